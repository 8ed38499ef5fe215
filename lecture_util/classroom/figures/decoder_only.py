"""Still figure of notebook 01: what a decoder-only model leaves out, and how it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle

from lecture_util.classroom.figures.diagram import arrow, box, bracket, canvas, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    WEIGHTS,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "Decoder-only: one stack reads the prompt at once, then its own words"
PROMPT, ANSWER = ("why", "is", "it", "blue", "?"), ("because", "air")


@figure(
    name="decoder-only",
    title=TITLE,
    answers=["Decoder-only inference (slides)"],
    notebook="01",
    alt="Left, the Transformer of 2017: an encoder of self-attention and MLP reads the source; a "
    "decoder of causal self-attention, cross-attention to the encoder and MLP reads the answer so "
    "far and gives the next token. Right, decoder-only: one stack of causal self-attention and "
    "MLP. Five words of prompt enter at once, prefill; each new word goes back in by itself, "
    "decode, until an end token or the longest length allowed.",
    sources=["structure: Vaswani et al. 2017, arXiv:1706.03762", "drawn schematic, words invented"],
)
def decoder_only() -> Figure:
    fig, ax = canvas(16, 7.6, TITLE)
    _both_halves(ax)
    ax.plot([7.3, 7.3], [0.4, 6.9], color=MUTED, lw=1, alpha=0.5)
    _one_stack(ax)
    return fig


def _stack(ax: Axes, x: float, wide: float, bottom: float, layers: list[tuple[str, str]]) -> float:
    """Parts from the bottom up inside a frame, arrows between them; the frame's upper edge."""
    height = 0.95 * len(layers) + 0.25
    _frame(ax, x, bottom, wide, height)
    for k, (name, color) in enumerate(layers):
        y = bottom + 0.25 + 0.95 * k
        box(ax, x + 0.15, y, wide - 0.3, 0.7, name, color, 0.4, 14)
        if k:
            arrow(ax, (x + wide / 2, y - 0.25), (x + wide / 2, y))
    return bottom + height


def _frame(ax: Axes, x: float, y: float, width: float, height: float) -> None:
    """What is repeated L times, drawn behind everything else."""
    face, edge = tint(MUTED, 0.06), {"edgecolor": MUTED, "linewidth": 1.6, "zorder": 1}
    ax.add_patch(Rectangle((x, y), width, height, facecolor=face, **edge))


def _both_halves(ax: Axes) -> None:
    """Encoder and decoder, joined by cross-attention."""
    write(ax, 0.4, 6.7, "encoder and decoder", 17, ha="left", weight="bold", color=PREDICTED)
    inner = [("self-attention", WEIGHTS), ("MLP", GUESS)]
    top = _stack(ax, 0.4, 2.7, 2.0, inner)
    write(ax, 1.75, top + 0.28, "encoder × L", 14, color=MUTED)
    lower = [("causal self-attention", CACHE), ("cross-attention", ACCENT), ("MLP", GUESS)]
    top = _stack(ax, 4.0, 3.0, 2.0, lower)
    write(ax, 4.65, top + 0.28, "decoder × L", 14, color=MUTED)
    arrow(ax, (2.95, 3.55), (4.15, 3.55), color=ACCENT, width=2.4)
    for x, name in ((1.75, "the source text"), (5.5, "the answer so far")):
        box(ax, x - 1.25, 0.75, 2.5, 0.7, name, MUTED, 0.2, 14)
        arrow(ax, (x, 1.45), (x, 2.0))
    arrow(ax, (5.5, top), (5.5, 5.75))
    box(ax, 4.6, 5.75, 1.8, 0.6, "next token", MEASURED, 0.3, 14)


def _one_stack(ax: Axes) -> None:
    """The prompt and the answer in one run; what comes out goes back in."""
    write(ax, 7.7, 6.7, "decoder-only", 17, ha="left", weight="bold", color=PREDICTED)
    left, pitch = 7.7, 0.95
    for k, word in enumerate(PROMPT):
        box(ax, left + pitch * k, 2.2, 0.85, 0.65, word, MUTED, 0.25, 14)
    x = left + pitch * len(PROMPT) + 0.15
    for k, word in enumerate(ANSWER):
        box(ax, x + 1.35 * k, 2.2, 1.25, 0.65, word, MEASURED, 0.3, 14)
    end = x + 1.35 * len(ANSWER) - 0.1
    _frame(ax, left, 3.35, end - left, 1.6)
    half = (end - left) / 2
    box(ax, left + 0.2, 3.6, half, 1.1, "causal self-attention", CACHE, 0.4, 15)
    arrow(ax, (left + 0.2 + half, 4.15), (left + 0.65 + half, 4.15))
    box(ax, left + 0.65 + half, 3.6, half - 0.85, 1.1, "MLP", GUESS, 0.4, 15)
    write(ax, left, 5.22, "one stack × L", 14, ha="left", color=MUTED)
    for middle in (left + 2.3, x + 0.6, x + 1.95):
        arrow(ax, (middle, 2.85), (middle, 3.35))
    box(ax, x + 1.25, 5.55, 1.8, 0.6, "next token", MEASURED, 0.3, 14)
    arrow(ax, (x + 1.95, 4.95), (x + 1.95, 5.55))
    out = x + 1.25 + 1.8
    arrow(ax, (out, 5.85), (15.4, 5.85), (15.4, 2.52), (end + 0.1, 2.52), color=MEASURED, width=2.2)
    bracket(ax, left, left + pitch * len(PROMPT) - 0.1, 1.8, "prefill: all in one pass", INK, 14,
            above=False)  # fmt: skip
    bracket(ax, x, end, 1.8, "decode: one a pass", INK, 14, above=False)
    write(ax, left, 0.75, "what was read is not read again: its keys and values stay, in the cache",
          13, ha="left", color=MUTED)  # fmt: skip
