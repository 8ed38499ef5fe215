"""Still figures of notebook 05: a state space run two ways, recall, and four kinds of memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lecture_util.alternatives.s4 import S4D, hippo_legs
from lecture_util.classroom.figures.diagram import arrow, box, bracket, canvas, cells, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    tint,
)
from lecture_util.model.recall import IGNORE, recall_batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

S4 = "Gu et al. 2021, arXiv:2111.00396"


@figure(
    name="s4-two-forms",
    title="One state space, two ways to run it: step by step, or all at once",
    answers=["s4-summary"],
    notebook="05",
    alt="Left: the continuous system x' = -Ax + Bu, y = Cx, with HiPPO's A at Z=3, rows 1 0 0, 1 2 "
    "0, 1 3 3. A step of size delta turns it into x_t = Abar x_(t-1) + Bbar u_t. From there two "
    "branches: a recurrence that carries one state from token to token, to generate; and a "
    "convolution with a kernel, drawn as bars, to train. Both give the same y.",
    sources=["lecture_util.alternatives.s4: hippo_legs, S4D.kernel", S4],
)
def s4_two_forms() -> Figure:
    title = "One state space, two ways to run it: step by step, or all at once"
    fig, ax = canvas(14, 6.6, title)
    write(ax, 0.4, 5.75, "continuous", 17, ha="left", weight="bold")
    write(ax, 0.4, 5.15, "x′ = −A x + B u", 17, ha="left")
    write(ax, 0.4, 4.65, "y = C x", 17, ha="left")
    rows = hippo_legs(3, normalised=False)[0].int().tolist()
    write(ax, 0.4, 3.1, "A =", 17, ha="left")
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            x, y = 1.3 + 0.55 * column, 3.42 - 0.55 * row
            box(ax, x, y, 0.5, 0.5, str(value), ACCENT, 0.3 if value else 0.06, 15, rounded=False)
    write(ax, 0.4, 1.75, "HiPPO: keeps the past as\na polynomial's coefficients", 13, ha="left",
          color=MUTED)  # fmt: skip
    arrow(ax, (3.2, 4.9), (4.5, 4.9), width=2.4)
    write(ax, 3.8, 5.2, "step Δ", 14)
    box(ax, 4.5, 4.45, 3.3, 0.9, "xₜ = Ā xₜ₋₁ + B̄ uₜ", PREDICTED, 0.2, 16)
    arrow(ax, (7.8, 4.9), (8.6, 4.9), width=2.4)
    arrow(ax, (6.1, 4.45), (6.1, 2.0), (8.6, 2.0), width=2.4)
    write(ax, 8.8, 5.95, "recurrence, to generate", 17, ha="left", weight="bold", color=PREDICTED)
    for t in range(4):
        x = 8.8 + 1.3 * t
        box(ax, x, 4.55, 0.75, 0.7, f"x{'₀₁₂₃'[t]}", CACHE, 0.5, 17)
        arrow(ax, (x + 0.375, 4.1), (x + 0.375, 4.55))
        write(ax, x + 0.375, 3.9, f"u{'₀₁₂₃'[t]}", 14)
        if t:
            arrow(ax, (x - 0.55, 4.9), (x, 4.9))
    write(ax, 8.8, 3.45, "one state of fixed size, at any S", 14, ha="left", color=MUTED)
    write(ax, 8.8, 2.85, "convolution, to train", 17, ha="left", weight="bold", color=PREDICTED)
    plot = ax.inset_axes([8.8, 0.95, 4.7, 1.6], transform=ax.transData)
    plot.bar(range(32), _kernel(32), color=CACHE, width=0.7)
    plot.axhline(0, color=MUTED, lw=1)
    plot.set_axis_off()
    write(ax, 8.8, 0.5, "kernel Kₜ = C Āᵗ B̄: all T outputs by FFT", 14, ha="left",
          color=MUTED)  # fmt: skip
    return fig


def _kernel(T: int) -> list[float]:
    """The kernel of one S4D channel with 4 complex states, C all ones; rounded, to draw alike."""
    system = S4D(1, Z=4).double().requires_grad_(False)
    system.log_delta_D.fill_(math.log(0.1))
    system.C_real_DZ.fill_(1.0)
    system.C_imag_DZ.fill_(0.0)
    return [round(value, 4) for value in system.kernel(T)[:, 0].tolist()]


@figure(
    name="associative-recall",
    title="Associative recall: later, each key asks for its value again",
    answers=["based-associative-recall"],
    notebook="05",
    alt="A row of 16 tokens from our own task: four pairs of a letter and a digit, each pair in "
    "its colour, then the same letters in another order. After each repeated letter a dashed box "
    "holds the digit to be predicted. An arc leads from each repeated letter back to its pair.",
    sources=["drawn from lecture_util.model.recall.recall_batch, seed 7",
             "task after Arora et al. 2024, arXiv:2402.18668"],
)  # fmt: skip
def associative_recall() -> Figure:
    fig, ax = canvas(14, 4.6, "Associative recall: later, each key asks for its value again")
    num_pairs, V, pitch, side, y = 4, 16, 0.84, 0.72, 1.35
    tokens_BT, targets_BT = recall_batch(1, num_pairs, V, torch.Generator().manual_seed(7))
    tokens, asked = tokens_BT[0].tolist(), (targets_BT[0] != IGNORE).tolist()
    first = {token: position for position, token in reversed(list(enumerate(tokens)))}
    colors = dict(zip(tokens[: 2 * num_pairs : 2], (PREDICTED, MEASURED, GUESS, ACCENT),
                      strict=True))  # fmt: skip
    for position, token in enumerate(tokens):
        x = 0.3 + pitch * position
        key, is_key = tokens[position - position % 2], position % 2 == 0
        text = "ABCDEFG"[token - 1] if is_key else str(token - V // 2)
        answer = position > 0 and asked[position - 1]
        box(ax, x, y, side, side, text, colors[key], 0.1 if answer else 0.5, 20)
        if answer:
            ax.patches[-1].set_linestyle("--")
        if is_key and first[token] < position:
            start, end = x + side / 2, 0.3 + pitch * first[token] + side / 2 + pitch / 2
            _arc(ax, start, end, y + side + 0.05, colors[key])
    right = 0.3 + pitch * 2 * num_pairs
    bracket(ax, 0.3, right - 0.15, 1.0, "pairs to keep", MUTED, 15, above=False)
    bracket(ax, right, 2 * right - 0.4, 1.0, "asked: predict the dashed", MUTED, 15, above=False)
    return fig


def _arc(ax: Axes, start: float, end: float, y: float, color: str) -> None:
    """A bow over the tokens, from a repeated key back to its pair."""
    ax.annotate("", (end, y), (start, y), zorder=1, arrowprops={
        "arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.42", "color": color, "lw": 2.2,
        "shrinkA": 0, "shrinkB": 0, "mutation_scale": 16})  # fmt: skip


@figure(
    name="four-memories",
    title="Four kinds of memory: growing, rolling, overwritten, refined",
    answers=[],
    notebook="05",
    alt="A table: four memories after 3, 6 and 9 tokens. A KV cache has 3, 6, then 9 cells. A "
    "window of W=4 keeps the last 3 and has let go of the others. A state is one box of the same "
    "size, into which all tokens so far are mixed. A masked canvas has 9 cells from the start, of "
    "which 3, 6, then all are filled, in any order.",
    sources=["drawn schematic; a window keeps W-1 tokens between steps"],
)
def four_memories() -> Figure:
    fig, ax = canvas(14, 6.3, "Four kinds of memory: growing, rolling, overwritten, refined")
    names = [("growing", "attention"), ("rolling", "window W = 4"),
             ("overwritten", "Mamba, linear"), ("refined", "masked diffusion")]  # fmt: skip
    order, W, T, side = (4, 0, 7, 2, 8, 5, 1, 6, 3), 4, 9, 0.36
    tops = [5.0 - 1.25 * row for row in range(4)]
    for (name, what), top in zip(names, tops, strict=True):
        write(ax, 0.3, top - 0.04, name, 17, ha="left", weight="bold")
        write(ax, 0.3, top - 0.44, what, 14, ha="left", color=MUTED)
    faint = "#EFEFEF"
    for column, count in enumerate((3, 6, 9)):
        x = 3.3 + 3.6 * column
        write(ax, x, 5.65, f"{count} tokens", 16, ha="left", color=MUTED)
        cached = [tint(CACHE, 0.7)] * count
        kept = [tint(GUESS, 0.6) if t > count - W else faint for t in range(count)]
        filled = [tint(ACCENT, 0.7) if t in order[:count] else faint for t in range(T)]
        for row, colors in ((0, cached), (1, kept), (3, filled)):
            cells(ax, x, tops[row], [colors], side)
            for t, color in enumerate(colors):
                if color != faint:
                    write(ax, x + side * (t + 0.5), tops[row] - side / 2, str(t), 13)
        box(ax, x, tops[2] - 0.5, 1.9, 0.56, f"0…{count - 1} mixed", PREDICTED,
            0.25, 14, rounded=False)  # fmt: skip
        for row, held in enumerate((count, min(count, W - 1), None, T)):
            text = f"holds {held}" if held else "one state"
            write(ax, x, tops[row] - 0.72, text, 13, ha="left", color=INK)
    return fig
