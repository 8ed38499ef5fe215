"""The still figure of notebook 01: one Transformer block, every edge labelled with its axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import arrow, box, canvas, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    CACHE,
    GUESS,
    INK,
    MUTED,
    PREDICTED,
    WEIGHTS,
)
from lecture_util.model.config import PUBLISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@figure(
    name="transformer-block",
    title="One block: attention mixes positions, the MLP works on each alone",
    answers=["transformer-diagram"],
    notebook="01",
    alt="Two rows of boxes. Attention: x of axes B T D goes through a norm into Wq, Wk and Wv, "
    "giving q with axes B T K G H and k, v with axes B S K H, which the cache keeps; scores have "
    "axes B K G T S; the mixed values B T N H go through Wo back to B T D and are added to x. MLP: "
    "a norm, Wgate and Wup give B T F, their gated product goes through Wdown back to B T D and "
    "is added. Beside it the sizes of SmolLM2-135M.",
    sources=[
        "lecture_util.model.transformer's own tensors",
        "sizes: lecture_util.model.config.PUBLISHED",
    ],
)
def transformer_block() -> Figure:
    fig, ax = canvas(16, 8.3, "One block: attention mixes positions, the MLP works on each alone")
    _attention(ax, 5.75)
    _mlp(ax, 1.65)
    _sizes(ax)
    return fig


def _edge(ax: Axes, x: float, y: float, axes: str, **how: object) -> None:
    write(ax, x, y, axes, 14, style="italic", **how)


def _attention(ax: Axes, y: float) -> None:
    """x_BTD in at the left, out at the right; q, k and v on three rails."""
    rails = {"Wq": y + 1.15, "Wk": y, "Wv": y - 1.15}
    write(ax, 0.3, y + 2.15, "attention", 17, ha="left", weight="bold", color=PREDICTED)
    arrow(ax, (0.3, y), (1.45, y))
    _edge(ax, 0.62, y + 0.28, "B T D")
    box(ax, 1.45, y - 0.35, 0.95, 0.7, "norm")
    for name, rail in rails.items():
        arrow(ax, (2.4, y), (2.65, y), (2.65, rail), (2.95, rail))
        box(ax, 2.95, rail - 0.35, 0.9, 0.7, name, WEIGHTS, 0.5)
    box(ax, 5.2, rails["Wv"] - 0.35, 1.15, 1.85, "KV\ncache", CACHE, 0.4, 15)
    arrow(ax, (3.85, rails["Wq"]), (8.0, rails["Wq"]))
    _edge(ax, 4.55, rails["Wq"] + 0.28, "B T K G H")
    for name in ("Wq", "Wk"):
        write(ax, 4.5, rails[name] - 0.27, "RoPE", 11.5, color=MUTED)
    for name in ("Wk", "Wv"):
        arrow(ax, (3.85, rails[name]), (5.2, rails[name]))
        arrow(ax, (6.35, rails[name]), (8.0 if name == "Wk" else 9.95, rails[name]))
        _edge(ax, 4.5, rails[name] + 0.28, "B T K H")
        _edge(ax, 7.1, rails[name] + 0.28, "B S K H")
    box(ax, 8.0, y - 0.35, 1.15, 1.85, "softmax\nq·k", GUESS, 0.3)
    arrow(ax, (9.15, y + 0.4), (10.45, y + 0.4), (10.45, y - 0.8))
    _edge(ax, 9.95, y + 0.7, "B K G T S")
    box(ax, 9.95, rails["Wv"] - 0.35, 1.0, 0.7, "· v", GUESS, 0.3)
    _out(ax, 10.95, rails["Wv"], "B T N H", "Wo", (1.2, y, y + 1.78))


def _mlp(ax: Axes, y: float) -> None:
    """x_BTD in, widened to F by two matrices, back to D."""
    rails = {"Wgate": y + 0.55, "Wup": y - 0.6}
    write(ax, 0.3, y + 1.55, "MLP", 17, ha="left", weight="bold", color=PREDICTED)
    arrow(ax, (0.3, y), (1.45, y))
    _edge(ax, 0.62, y + 0.28, "B T D")
    box(ax, 1.45, y - 0.35, 0.95, 0.7, "norm")
    for name, rail in rails.items():
        arrow(ax, (2.4, y), (2.65, y), (2.65, rail), (2.95, rail))
        box(ax, 2.95, rail - 0.35, 1.25, 0.7, name, WEIGHTS, 0.5)
        _edge(ax, 4.75, rail + 0.28, "B T F")
    arrow(ax, (4.2, rails["Wgate"]), (5.35, rails["Wgate"]))
    box(ax, 5.35, rails["Wgate"] - 0.35, 0.9, 0.7, "silu", GUESS, 0.3)
    arrow(ax, (6.25, rails["Wgate"]), (7.0, rails["Wgate"]))
    arrow(ax, (4.2, rails["Wup"]), (7.0, rails["Wup"]))
    box(ax, 7.0, rails["Wup"] - 0.35, 0.8, 1.85, "×", GUESS, 0.3, 20)
    _out(ax, 7.8, y, "B T F", "Wdown", (1.2, y, y + 1.18))


def _out(
    ax: Axes, x: float, y: float, axes: str, matrix: str, skip: tuple[float, float, float]
) -> None:
    """The last matrix, then the sum with the input that went around."""
    arrow(ax, (x, y), (x + 1.15, y))
    _edge(ax, x + 0.52, y + 0.28, axes)
    box(ax, x + 1.15, y - 0.35, 1.1, 0.7, matrix, WEIGHTS, 0.5)
    x_sum = x + 3.0
    arrow(ax, (x + 2.25, y), (x_sum - 0.25, y))
    x_from, y_from, y_over = skip
    arrow(ax, (x_from, y_from), (x_from, y_over), (x_sum, y_over), (x_sum, y + 0.25), color=MUTED)
    box(ax, x_sum - 0.25, y - 0.25, 0.5, 0.5, "+", MUTED, 0.1, 18)
    arrow(ax, (x_sum + 0.25, y), (x_sum + 1.3, y))
    _edge(ax, x_sum + 0.75, y + 0.28, "B T D")


def _sizes(ax: Axes) -> None:
    """What the letters are in the course's model."""
    config = PUBLISHED["smollm2-135m"]
    rows = [("D", config.D, "model width"), ("F", config.F, "MLP width"),
            ("N", config.N, "query heads"), ("K", config.K, "KV heads"),
            ("G", config.G, "queries a KV head"), ("H", config.H, "head width"),
            ("L", config.L, "blocks")]  # fmt: skip
    x, top = 12.6, 3.2
    write(ax, x, top + 0.35, "SmolLM2-135M", 15, ha="left", weight="bold")
    for k, (letter, size, meaning) in enumerate(rows):
        y = top - 0.12 - 0.42 * k
        write(ax, x, y, letter, 14, ha="left", style="italic")
        write(ax, x + 1.1, y, f"{size:,}", 14, ha="right", color=INK)
        write(ax, x + 1.3, y, meaning, 12.5, ha="left", color=MUTED)
