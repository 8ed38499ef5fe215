"""Still figures of notebook 11: what thinning and electing do to a few numbers, computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import matplotlib.pyplot as plt
import torch

from lecture_util.classroom.figures.diagram import box, canvas, headline, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    tint,
)
from lecture_util.merging.sparsify import drop, trim
from lecture_util.merging.ties import disjoint_mean, elect_signs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

YADAV = "Yadav et al. 2023, arXiv:2306.01708, section 4"
DELTAS = (
    (0.9, 0.3, 0.6, 0.2, -0.7, 0.1),
    (-0.5, 0.4, 0.7, -0.8, 0.1, 0.3),
    (0.1, -0.6, 0.2, -0.5, 0.8, -0.4),
)


class Steps(NamedTuple):
    """TIES on DELTAS. Shapes: three of (6,) each, then (6,) each."""

    given: list[Tensor]
    trimmed: list[Tensor]
    sums: Tensor
    signs: Tensor
    merged: Tensor
    plain: Tensor


def ties_by_steps() -> Steps:
    """What merging.ties does at density 1/2, kept after each step; and the plain mean."""
    given = [torch.tensor(delta, dtype=torch.float64) for delta in DELTAS]
    trimmed = [trim(delta, 0.5) for delta in given]
    signs = elect_signs(trimmed)
    merged, plain = disjoint_mean(trimmed, signs), torch.stack(given).mean(0)
    return Steps(given, trimmed, torch.stack(trimmed).sum(0), signs, merged, plain)


def signed(value: float, digits: int = 1) -> str:
    """With a sign, without the zero before the point: short enough for a cell."""
    text = f"{value:+.{digits}f}".rstrip("0").rstrip(".").replace("-", "−").replace("0.", ".")
    return "0" if float(f"{value:.{digits}f}") == 0 else text


def _ties_alt() -> str:
    steps = ties_by_steps()
    merged, plain = (", ".join(signed(x, 2) for x in row.tolist())
                     for row in (steps.merged, steps.plain))  # fmt: skip
    signs = " ".join("+" if sign > 0 else "−" for sign in steps.signs.tolist())
    return (
        "Three panels of three task vectors of six numbers. Trim: the three largest of each stay. "
        f"Elect: what stays is added up, the sums' signs are {signs}; the last column is empty and "
        "takes the majority's. Merge: the mean of the numbers with the elected sign, "
        f"{merged}. The plain mean of all: {plain}."
    )


@figure(
    name="ties-steps",
    title="TIES: keep the large, elect a sign, average those that agree",
    answers=["TIES (slides)"],
    notebook="11",
    alt=_ties_alt(),
    sources=["computed by lecture_util.merging: trim, elect_signs, disjoint_mean", YADAV],
)
def ties_steps() -> Figure:
    steps, side = ties_by_steps(), 0.64
    fig, ax = canvas(14, 5.3, "TIES: keep the large, elect a sign, average those that agree")
    lefts = (0.75, 5.35, 9.95)
    for left, name in zip(lefts, ("1  trim", "2  elect", "3  merge"), strict=True):
        write(ax, left - 0.05, 4.85, name, 18, ha="left", weight="bold")
    for row, (given, kept, name) in enumerate(zip(steps.given, steps.trimmed, "ABC", strict=True)):
        y = 3.75 - side * row
        write(ax, 0.45, y + side / 2, name, 17, weight="bold")
        for k, (value, stays) in enumerate(zip(given.tolist(), kept.tolist(), strict=True)):
            agrees = stays * steps.signs[k].item() > 0
            for left, shown, bright in zip(
                lefts, (value, stays, stays), (stays, stays, agrees), strict=True
            ):
                _cell(ax, left + side * k, y, signed(shown), shown, bool(bright))
    below = 3.75 - 3 * side - 0.25
    for k in range(6):
        total, sign = steps.sums[k].item(), steps.signs[k].item()
        x = lefts[1] + side * k
        write(ax, x + side / 2, below + 0.35, signed(total), 14)
        box(ax, x + 0.04, below - 0.62, side - 0.08, 0.62, "+" if sign > 0 else "−",
            _color(sign), 0.6, 22)  # fmt: skip
        x = lefts[2] + side * k
        _cell(ax, x, below - 0.03, signed(steps.merged[k], 2), steps.merged[k].item(), True)
        write(ax, x + side / 2, below - 0.48, signed(steps.plain[k], 2), 14, color=MUTED)
    for x, y, text in ((lefts[1], below + 0.35, "sum"), (lefts[1], below - 0.31, "sign"),
                       (lefts[2], below + 0.31, "TIES"), (lefts[2], below - 0.48, "mean"),
                       ):  # fmt: skip
        write(ax, x - 0.08, y, text, 13, ha="right", color=MUTED)
    write(ax, lefts[0], below + 0.1, "half of each vector's numbers\nstay: the largest", 14,
          ha="left", va="center")  # fmt: skip
    write(ax, lefts[0], 0.25, "an empty column takes the majority's sign; numbers of the other "
          "sign do not count, nor in the divisor", 14, ha="left")  # fmt: skip
    return fig


def _color(value: float) -> str:
    return MUTED if value == 0 else PREDICTED if value > 0 else MEASURED


def _cell(ax: Axes, x: float, y: float, text: str, value: float, bright: bool) -> None:
    """A number on its sign's colour; pale with grey text where it does not count."""
    color = _color(value) if bright else "#BBBBBB"
    box(ax, x + 0.03, y + 0.03, 0.58, 0.58, "", color, 0.5 if bright else 0.12, rounded=False)
    if bright or value:
        write(
            ax,
            x + 0.32,
            y + 0.32,
            text,
            15 if len(text) < 4 else 13,
            zorder=5,
            color=INK if bright else "#8A8A8A",
        )


YU = "Yu et al. 2023, arXiv:2311.03099"
GSM8K = {"WizardLM": 2.2, "WizardMath": 64.2, "merged, DARE": 66.3}  # % right
RATES = (0.5, 0.9)
DRAWS = 1000


def dare_draws() -> dict[str, Tensor]:
    """A task vector of 48 numbers, once through `drop` at each rate, and the mean of many draws."""
    generator = torch.Generator().manual_seed(0)
    delta = 2 * torch.rand(48, generator=generator) - 1
    rows = {"task vector": delta}
    for rate in RATES:
        rows[f"{rate:.0%} dropped, × {1 / (1 - rate):.0f}"] = drop(delta, 1 - rate, generator)
    draws = [drop(delta, 1 - RATES[-1], generator).double() for _ in range(DRAWS)]
    rows[f"mean of {DRAWS:,} such draws"] = torch.stack(draws).mean(0)
    return rows


def _dare_alt() -> str:
    kept = "; ".join(f"{name}: {int((row != 0).sum())} left" for name, row in
                     list(dare_draws().items())[1:3])  # fmt: skip
    scores = ", ".join(f"{name} {value}" for name, value in GSM8K.items())
    return (
        "Left, 48 numbers of a task vector as bars, and thinned out at random, what stays enlarged "
        f"by one over the share kept: {kept}; the mean of {DRAWS:,} draws at 90% looks like the "
        f"task vector again. Right, published GSM8K, % right: {scores}."
    )


@figure(
    name="dare-kept",
    title="DARE drops most of a task vector and enlarges the rest",
    answers=["DARE (slides)", "DARE, results (slides)"],
    notebook="11",
    alt=_dare_alt(),
    sources=["computed by lecture_util.merging.sparsify.drop, seed 0",
             f"{YU}; scores: github.com/yule-BUAA/MergeLM, its README"],
)  # fmt: skip
def dare_kept() -> Figure:
    fig = plt.figure(figsize=(10.4, 6.0), layout="constrained")
    headline(fig, "DARE drops most of a task vector and enlarges the rest")
    grid = fig.add_gridspec(4, 2, width_ratios=(1.75, 1))
    colors = (PREDICTED, MEASURED, MEASURED, GUESS)
    for k, ((name, row), color) in enumerate(zip(dare_draws().items(), colors, strict=True)):
        ax = fig.add_subplot(grid[k, 0])
        values = row.tolist()
        ax.bar(range(len(values)), values, width=0.7, color=color)
        ax.axhline(0, color=MUTED, lw=1)
        reach = 1.15 * max(map(abs, values))
        ax.set(xlim=(-1, 48), ylim=(-reach, reach), xticks=[])
        ax.set_yticks([-round(reach / 1.25), 0, round(reach / 1.25)])
        ax.grid(visible=False)
        ax.spines["bottom"].set_visible(False)
        left = int((row != 0).sum())
        ax.set_title(f"{name}" + (f": {left} of 48 left" if color == MEASURED else ""), size=14,
                     pad=4)  # fmt: skip
    right = fig.add_subplot(grid[:, 1])
    faces = [tint(MUTED, 0.5), tint(MUTED, 0.5), MEASURED]
    drawn = right.bar(range(3), GSM8K.values(), color=faces, width=0.62)
    right.bar_label(drawn, [str(value) for value in GSM8K.values()], padding=4, size=17, color=INK)
    right.set_xticks(range(3), ["Wizard-\nLM", "Wizard-\nMath", "merged\n(DARE)"], size=14)
    right.set(ylim=(0, 75), ylabel="GSM8K, % right")
    right.set_title("as published", size=15)
    right.grid(axis="x", visible=False)
    right.tick_params(axis="x", length=0)
    caption(fig, shapes="left: our drop(), seed 0, numbers even between −1 and 1; the published "
            "merge drops less", source="MergeLM on GitHub, README")  # fmt: skip
    return fig
