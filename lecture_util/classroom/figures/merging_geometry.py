"""Still figures of notebook 11: SLERP's arc, task vectors as arrows, Model Stock's ratio."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import torch

from lecture_util.classroom.figures.diagram import canvas, chart, headline, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    GUESS,
    HALO,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    shade,
    tint,
)
from lecture_util.merging.model_stock import stock_ratio
from lecture_util.merging.slerp import lerp, slerp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOEMAKE = "Shoemake 1985, doi:10.1145/325334.325242"
ANGLES = (5, 60, 120)  # degrees between the two ends
QUARTERS = (0, 0.25, 0.5, 0.75, 1)


def ends(degrees: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors of length 1 at this angle, either side of straight up."""
    half = math.radians(degrees) / 2
    v0, v1 = ([side * math.sin(half), math.cos(half)] for side in (-1, 1))
    return torch.tensor(v0, dtype=torch.float64), torch.tensor(v1, dtype=torch.float64)


def lengths(degrees: float, way=slerp, steps: int = 40) -> list[float]:
    """The norm along the way from one end to the other."""
    v0, v1 = ends(degrees)
    return [way(v0, v1, k / steps).norm().item() for k in range(steps + 1)]


def _slerp_alt() -> str:
    middle = "; ".join(f"{a} degrees {min(lengths(a, lerp)):.3f}" for a in ANGLES)
    return (
        "Left, a unit circle with two arrows 120 degrees apart: SLERP's points at t = 0, ¼, ½, ¾, "
        "1 lie on the arc, 30 degrees from each to the next; LERP's lie on the chord below it. "
        "Right, length against t: along the arc 1 throughout; along the chord it sinks, halfway, "
        f"for an angle of {middle}."
    )


@figure(
    name="slerp-path",
    title="SLERP keeps to the circle, the straight line cuts inside",
    answers=["SLERP against LERP (slides)", "SLERP, the formula (slides)"],
    notebook="11",
    alt=_slerp_alt(),
    sources=["lecture_util.merging.slerp: slerp, lerp", SHOEMAKE],
)
def slerp_path() -> Figure:
    fig, (left, right) = chart("SLERP keeps to the circle, the straight line cuts inside", 2, 5.6)
    v0, v1 = ends(120)
    turn = np.linspace(-0.12, 1.12, 90) * math.pi
    left.plot(np.cos(turn), np.sin(turn), color=tint(MUTED, 0.4), lw=1.6)
    for way, color, marker in ((slerp, PREDICTED, "o"), (lerp, MEASURED, "s")):
        path = np.array([way(v0, v1, k / 40).tolist() for k in range(41)])
        left.plot(*path.T, "-", color=color, lw=3.2, zorder=3)
        stops = np.array([way(v0, v1, t).tolist() for t in QUARTERS])
        left.plot(*stops.T, marker, color=color, ms=11, zorder=4)
    for end, name in ((v0, "v₀"), (v1, "v₁")):
        x, y = end.tolist()
        left.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 2,
                      "mutation_scale": 18, "shrinkA": 0, "shrinkB": 6})  # fmt: skip
        left.text(1.16 * x, y + 0.02, name, size=18, ha="center", va="center")
    left.text(0, 0.075, "120°", size=15, ha="center")
    left.text(0, 1.1, "SLERP: equal steps of angle", size=15, ha="center", color=shade(PREDICTED),
              weight="bold")  # fmt: skip
    left.text(0, 0.335, "LERP: equal\nsteps of length", size=14, ha="center", va="center",
              color=shade(MEASURED), weight="bold")  # fmt: skip
    left.set(xlim=(-1.2, 1.2), ylim=(-0.12, 1.25), aspect="equal")
    left.axis("off")
    t = [k / 40 for k in range(41)]
    right.plot(t, lengths(ANGLES[-1]), "--", color=PREDICTED)
    right.text(0.5, 1.085, "along the arc, whatever the angle: 1", size=15, ha="center",
               va="center", color=shade(PREDICTED))  # fmt: skip
    for degrees in ANGLES:
        along = lengths(degrees, lerp)
        if degrees > ANGLES[0]:  # the least can't be told from the arc
            right.plot(t, along, "--", color=MEASURED)
        y = min(along) - 0.025 if degrees > ANGLES[0] else 1.055
        right.text(0.5, y, f"along a chord of {degrees}°: {min(along):.3f}", size=15, ha="center",
                   va="top", color=shade(MEASURED))  # fmt: skip
    right.set(xlabel="t", ylabel="length", xlim=(0, 1), ylim=(0.38, 1.12), xticks=QUARTERS)
    caption(fig, shapes="two vectors of length 1, by formula", source=SHOEMAKE)
    return fig


ILHARCO = "Ilharco et al. 2022, arXiv:2212.04089"


@figure(
    name="task-vectors",
    title="What fine-tuning added is an arrow: add it, reverse it, combine it",
    answers=["Task arithmetic (slides)"],
    notebook="11",
    alt="Three sketches of a plane of weights, a base in each. Add: from the base an arrow a leads "
    "to fine-tune A and an arrow b, at nearly a right angle, to fine-tune B; base plus a plus b is "
    "the opposite corner. Negate: base minus a lies as far on the other side, and A's skill is "
    "less. Scale: on the line of the sum lie base plus λ times a plus b for λ = 0.25, 0.5, 0.75, "
    "1.",
    sources=["drawn by hand; directions invented", ILHARCO],
)
def task_vectors() -> Figure:
    fig, ax = canvas(14, 6.0, "What fine-tuning added is an arrow: add it, reverse it, combine it")
    a, b = np.array([2.2, 0.9]), np.array([-0.55, 2.1])
    for left, name in ((0.3, "add"), (4.9, "reverse"), (9.5, "add a part")):
        write(ax, left + 0.1, 5.35, name, 18, ha="left", weight="bold")
    base = np.array([1.3, 1.35])
    _arrow(ax, base, base + a, PREDICTED, "a", (0.1, -0.35))
    _arrow(ax, base, base + b, MEASURED, "b", (-0.3, 0.0))
    for start, step in ((base + a, b), (base + b, a)):
        ax.plot(*zip(start, start + step, strict=True), ":", color=MUTED, lw=2)
    _arrow(ax, base, base + a + b, GUESS)
    _dot(ax, base, INK, "base θ₀", (0, -0.4))
    _dot(ax, base + a, PREDICTED, "A", (0.38, 0))
    _dot(ax, base + b, MEASURED, "B", (-0.38, 0.1))
    _dot(ax, base + a + b, GUESS, "both skills", (0.0, 0.38))
    base = np.array([7.0, 2.35])
    _arrow(ax, base, base + a, PREDICTED, "a", (0, 0.38))
    _arrow(ax, base, base - a, tint(PREDICTED, 0.7), "−a", (0, -0.42))
    _dot(ax, base, INK, "base θ₀", (0.35, -0.42))
    _dot(ax, base + a, PREDICTED, "A", (0.05, 0.42))
    _dot(ax, base - a, PREDICTED, "less of A's skill", (0.75, -0.42))
    base = np.array([10.9, 1.35])
    for way, color in ((a, PREDICTED), (b, MEASURED)):
        _arrow(ax, base, base + way, tint(color, 0.5))
    _arrow(ax, base, base + a + b, GUESS)
    for scale in (0.25, 0.5, 0.75):
        x, y = base + scale * (a + b)
        ax.plot(x, y, "o", color=GUESS, ms=12, zorder=4)
        write(ax, x + 0.24, y - 0.1, f"{scale}", 15, ha="left", path_effects=HALO, zorder=6)
    _dot(ax, base, INK, "base θ₀", (0, -0.4))
    _dot(ax, base + a + b, GUESS, "λ = 1", (0.05, 0.38))
    write(ax, 0.4, 0.4, "θ = θ₀ + λ (a + b)", 19, ha="left")
    write(ax, 5.0, 0.4, "θ = θ₀ − λ a", 19, ha="left")
    write(ax, 9.6, 0.4, "λ is chosen by trying", 17, ha="left")
    return fig


def _arrow(ax: Axes, start, end, color, name: str = "", shift=(0, 0)) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 3,
                "mutation_scale": 22, "shrinkA": 0, "shrinkB": 7}, zorder=3)  # fmt: skip
    if name:
        x, y = (np.array(start) + end) / 2 + shift
        write(ax, x, y, name, 20, color=shade(color), style="italic", weight="bold")


def _dot(ax: Axes, at, color, name: str, shift) -> None:
    ax.plot(*at, "o", color=color, ms=14, zorder=5)
    write(ax, at[0] + shift[0], at[1] + shift[1], name, 16, path_effects=HALO, zorder=6)


STOCK = "Jang et al. 2024, arXiv:2403.19522"
COUNTS = (2, 3, 4, 8)


@figure(
    name="stock-ratio",
    title="Model Stock: the wider the fine-tunes' angle, the nearer the base",
    answers=["Model stock, the centre (slides)"],
    notebook="11",
    alt="Left, t against the cosine between fine-tunes, for N = 2, 3, 4, 8: all rise from 0 at "
    "cosine 0 to 1 at cosine 1, steeper for more fine-tunes: at cosine 0.5 "
    + ", ".join(f"{stock_ratio(0.5, N).item():.3f}" for N in COUNTS)
    + ". Right, the formula below cosine 0: t is negative and falls without bound towards a pole "
    "at cosine −1/(N−1), "
    + ", ".join(f"{-1 / (N - 1):.2f}" for N in COUNTS)
    + ", below which no mean cosine can be. Held in [0, 1], it stays 0.",
    sources=["lecture_util.merging.model_stock.stock_ratio", STOCK],
)
def stock_ratio_figure() -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(10.4, 5.4), layout="constrained")
    headline(fig, "Model Stock: the wider the fine-tunes' angle, the nearer the base")
    inside = np.linspace(0, 1, 33)
    for N, strength in zip(COUNTS, (1, 0.8, 0.6, 0.45), strict=True):
        color = tint(PREDICTED, strength)
        left.plot(inside, stock_ratio(torch.tensor(inside), N), "--", color=color)
        pole = -1 / (N - 1)  # |sum of N directions|² = N + N (N-1) cos: none is below it
        cosine = np.linspace(pole + 0.004, 1, 200)
        t = stock_ratio(torch.tensor(cosine), N, bounds="unbounded").numpy()
        right.plot(cosine[t > -3.5], t[t > -3.5], "--", color=color, label=f"N = {N}")
    left.text(0.56, 0.5, "at cosine 0.5:", size=15)
    for k, N in enumerate(reversed(COUNTS)):
        t = stock_ratio(0.5, N).item()
        left.plot(0.5, t, "o", color=INK, ms=8, zorder=4)
        left.text(0.56, 0.41 - 0.085 * k, f"N = {N}: {t:.3f}", size=16)
    left.set(xlabel="cosine between two fine-tunes, seen from the base", xlim=(0, 1.02),
             ylim=(0, 1.03), ylabel="t: 0 is the base, 1 the mean")  # fmt: skip
    right.axhspan(0, 1, color=tint(GUESS, 0.2), lw=0, zorder=0)
    right.text(0.4, 0.24, "0 ≤ t ≤ 1", size=15, va="center", color=shade(GUESS))
    right.legend(fontsize=15, loc="lower right")
    right.set(xlabel="the same, below 0 as well", xlim=(-1, 1), ylim=(-3.2, 1.3), ylabel="t",
              xticks=(-1, -0.5, 0, 0.5, 1))  # fmt: skip
    left.set_title("cosine 0 to 1", size=15)
    right.set_title("where the formula leaves [0, 1]", size=15)
    caption(fig, shapes="t = N cos / (1 + (N − 1) cos), pole at −1/(N − 1)", source=STOCK)
    return fig
