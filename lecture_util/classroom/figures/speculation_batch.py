"""Still figure of notebook 12: what guesses gain as the batch grows, by two peaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import beside, chart
from lecture_util.classroom.figures.plots import plain_log_ticks
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline.accounting import forward, kv_cache_bytes, weight_bytes
from lecture_util.roofline.hardware import ACCELERATORS
from lecture_util.speculative.expected import expected_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODEL, MACHINE = PUBLISHED["llama-3-8b"], ACCELERATORS["h100"]
ALPHA = 0.8
GAMMAS, SHORT = (1, 2, 4, 8), 128
CONTEXTS, GAMMA = (128, 512, 1024, 4096), 4
TITLE = "Batches spend what guesses live on, unless their texts are long"


def gain(B: int, gamma: int, S: int) -> float:
    """Tokens a second with free guesses over without, for B texts of S tokens each."""

    def step_s(T: int) -> float:
        return forward(MODEL, B, T, S + T, causal=True).time_s(MACHINE)

    return expected_tokens(ALPHA, gamma) * step_s(1) / step_s(1 + gamma)


def most(S: int, gamma: int) -> int:
    """The largest batch whose weights and caches fit."""
    room = MACHINE.memory_bytes - weight_bytes(MODEL)
    return int(room // kv_cache_bytes(MODEL, 1, S + 1 + gamma))


def batches(S: int, gamma: int) -> list[int]:
    """Eight to each doubling, up to the largest that fits."""
    last = most(S, gamma)
    found = {round(2 ** (k / 8)) for k in range(8 * last.bit_length())}
    return [B for B in sorted(found) if B < last] + [last]


def pays_until(gamma: int, S: int) -> int | None:
    """The largest batch that gains; None if whatever fits gains."""
    low, high = 1, most(S, gamma)
    if gain(high, gamma, S) > 1:
        return None
    while high - low > 1:  # gain falls with B
        middle = (low + high) // 2
        low, high = (middle, high) if gain(middle, gamma, S) > 1 else (low, middle)
    return low


@figure(
    name="speculation-batch",
    title=TITLE,
    answers=[],
    notebook="12",
    alt="Gain of guesses against batch size, logarithmic, for Llama-3-8B on an H100, 8 in 10 "
    "guesses right. Left, 128 tokens each: 1 guess gains 1.80 times and pays to B = 378, 2 gain "
    "2.44 to 328, 4 gain 3.36 to 254, 8 gain 4.33 to 168; then below 1. Right, 4 guesses: with "
    "128 tokens each they stop paying; with 512, 1,024 and 4,096 memory is full before.",
    sources=[
        "by formula: lecture_util.roofline.accounting.forward, lecture_util.speculative.expected",
        "shape: Lightning-AI/litgpt litgpt/config.py; H100: pytorch/torchtitan utils.py; "
        "stas00/ml-engineering compute/accelerator/README.md",
    ],
)
def speculation_batch() -> Figure:
    fig, (left, right) = chart(TITLE, 2, 5.9)
    colors = (PREDICTED, GUESS, CACHE, MEASURED)
    for gamma, color in zip(GAMMAS, colors, strict=True):
        _line(left, gamma, SHORT, color)
        beside(left, 1.15, gain(1, gamma, SHORT),
               f"γ = {gamma}, B ≤ {pays_until(gamma, SHORT)}", color,
               va="bottom", xytext=(0, 4))  # fmt: skip
    for S, color in zip(CONTEXTS, colors, strict=True):
        y = _line(right, GAMMA, S, color)
        place = {"xytext": (9, 4)} if S > SHORT else {"xytext": (6, -14), "ha": "right"}
        beside(right, most(S, GAMMA), y, f"{S:,} tokens", color, **place)
    left.set_title(f"{SHORT} tokens each, γ guesses a round", size=15)
    right.set_title(f"γ = {GAMMA}, by tokens in each text", size=15)
    last = most(SHORT, GAMMA)
    for ax in (left, right):
        ax.axhline(1, color=INK, lw=1.6, zorder=1)
        ax.text(1.15, 0.93, "below 1: slower", size=13, va="top", color=MUTED)
        ax.set(xscale="log", xlim=(1, 4 * last), ylim=(0, 5), xlabel="B, texts in the batch")
        plain_log_ticks(ax.xaxis)
    left.set_ylabel("tokens a second, with over without")
    shapes = (
        f"Llama-3-8B, {100 * ALPHA:.0f}% of guesses right, guesses free; ●: memory is full; "
        "B ≤: guesses pay so far"
    )
    caption(fig, device="max(compute, memory) by formula for an H100", dtype="bf16", shapes=shapes)
    return fig


def _line(ax: Axes, gamma: int, S: int, color: str) -> float:
    """Dashed, for it is a formula; it ends where memory is full. The gain there."""
    at = batches(S, gamma)
    y = [gain(B, gamma, S) for B in at]
    ax.plot(at, y, "--", color=color)
    ax.plot(at[-1], y[-1], "o", color=color, ms=9)
    return y[-1]
