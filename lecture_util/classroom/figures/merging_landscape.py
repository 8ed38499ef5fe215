"""Still figures of notebook 11, as recorded: the loss between fine-tunes, and of soups."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from lecture_util.classroom.figures.diagram import beside, chart, headline
from lecture_util.classroom.figures.merging_runs import MADE_BY, TINY, seeds, where
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    ACCENT,
    GUESS,
    HALO,
    INK,
    MEASURED,
    PREDICTED,
    caption,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def line(run: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places from one model to the other; loss between two of one base, and of two bases.

    Shapes: (points,), (seeds, points), (seeds, points).
    """
    line = run["trials"]["line"]
    return np.array(line["alphas"]), np.array(line["same"]), np.array(line["apart"])


def _line_alt(run: dict) -> str:
    alphas, same, apart = line(run)
    ends = [loss for seed in apart for loss in (seed[0], seed[-1])]
    return (
        f"Loss of weighted means of two fine-tunes against the second's share, {len(alphas)} "
        f"points, {len(same)} seeds. Of one base: between {same.min():.3f} and {same.max():.3f} "
        f"all along. Of two bases: at most {max(ends):.3f} at the ends, and in between up to "
        + ", ".join(f"{seed.max():.2f}" for seed in apart)
        + "."
    )


@recorded_figure(
    "merging",
    ["trials/line/same", "trials/line/apart", "trials/seeds"],
    alt=_line_alt,
    name="merge-line",
    title="Fine-tunes of one base share a valley; a ridge parts two bases",
    answers=[],
    notebook="11",
    sources=[MADE_BY],
)
def merge_line() -> Figure:
    run = recorded("merging")
    alphas, same, apart = line(run)
    fig, ax = chart("Fine-tunes of one base share a valley; a ridge parts two bases", height=5.0)
    for losses, color, marker in ((apart, MEASURED, "s"), (same, GUESS, "o")):
        for seed in losses:
            ax.plot(alphas, seed, f"-{marker}", color=color, lw=1.8, ms=6)
    middle = len(alphas) // 2
    beside(ax, alphas[-2], apart[:, middle].max(), "of two bases", MEASURED, size=17,
           weight="bold", ha="right", xytext=(0, 0))  # fmt: skip
    beside(ax, alphas[middle], same.max(), f"of one base: {same.min():.2f} to {same.max():.2f}",
           GUESS, size=17, weight="bold", ha="center", xytext=(0, 20),
           path_effects=HALO)  # fmt: skip
    ax.set(
        xlim=(-0.02, 1.02), ylabel="loss, nats a digit", xlabel="share of the second in the mean"
    )
    ax.set_ylim(0, 1.12 * apart.max())
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0\nfirst", "¼", "½", "¾", "1\nsecond"])
    caption(fig, shapes=f"{TINY}; a line a seed: {seeds(run)}", source=where(run))
    return fig


PALE = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 2}


class Plane(NamedTuple):
    """Loss over a plane of weights. Shapes: x (X,), y (Y,), loss (Y, X); points by name."""

    x: np.ndarray
    y: np.ndarray
    loss: np.ndarray
    points: dict[str, tuple[float, float]]

    def at(self, x: float, y: float) -> float:
        """Between grid points: the weighted mean of the four around."""
        i = int(np.clip(np.searchsorted(self.x, x) - 1, 0, len(self.x) - 2))
        j = int(np.clip(np.searchsorted(self.y, y) - 1, 0, len(self.y) - 2))
        u = (x - self.x[i]) / (self.x[i + 1] - self.x[i])
        v = (y - self.y[j]) / (self.y[j + 1] - self.y[j])
        low = (1 - u) * self.loss[j, i] + u * self.loss[j, i + 1]
        return float(
            (1 - v) * low + v * ((1 - u) * self.loss[j + 1, i] + u * self.loss[j + 1, i + 1])
        )


def plane(run: dict) -> Plane:
    plane = run["trials"]["plane"]
    x, y, loss = (np.array(plane[key], dtype=float) for key in ("x", "y", "loss"))
    return Plane(x, y, loss, {name: (at[0], at[1]) for name, at in plane["points"].items()})


def _plane_alt(run: dict) -> str:
    found = plane(run)
    points = "; ".join(f"{name} {found.at(*at):.2f}" for name, at in found.points.items())
    return (
        f"Contours of the loss on the plane through the base and two fine-tunes, mean of the "
        f"tasks {' and '.join(run['trials']['plane']['tasks'])}, from {found.loss.min():.2f} to "
        f"{found.loss.max():.2f}: one valley holds them all. Loss at {points}."
    )


@recorded_figure(
    "merging",
    ["trials/plane/loss", "trials/plane/points", "trials/plane/tasks"],
    alt=_plane_alt,
    name="merge-plane",
    title="Base and fine-tunes lie in one valley, with no ridge between",
    answers=[],
    notebook="11",
    sources=[MADE_BY],
)
def merge_plane() -> Figure:
    run = recorded("merging")
    found = plane(run)
    fig, ax = chart("Base and fine-tunes lie in one valley, with no ridge between", height=6.2)
    low, high = found.loss.min(), found.loss.max()
    levels = np.geomspace(0.999 * low, 1.001 * high, 11)
    shades = [tint(PREDICTED, strength) for strength in np.linspace(0.75, 0.04, 10)]
    ax.contourf(found.x, found.y, found.loss, levels=levels, colors=shades)
    lines = ax.contour(found.x, found.y, found.loss, levels=levels[1:-1:2], colors=INK,
                       linewidths=1)  # fmt: skip
    ax.clabel(lines, fmt=number_of, fontsize=13)
    for name, (x, y) in found.points.items():
        ax.plot(x, y, "o", color=MEASURED, ms=13, mec="white", mew=2, zorder=4)
        beside(ax, x, y, f"{name}: {found.at(x, y):.2f}", INK, size=16, xytext=(0, -20),
               ha="center", weight="bold", zorder=5, bbox=PALE)  # fmt: skip
    ax.set(aspect="equal", xlabel="distance along the first task vector", ylabel="across it")
    ax.set(xlim=(found.x[0], found.x[-1]), ylim=(found.y[0], found.y[-1]))
    ax.grid(visible=False)
    first = run["trials"]["seeds"][0]
    tasks = " and ".join(run["trials"]["plane"]["tasks"])
    caption(fig, shapes=f"{TINY}; loss of {tasks} in nats a digit; axes: distance of weights",
            seed=first, source=where(run))  # fmt: skip
    return fig


def number_of(value: float) -> str:
    return f"{value:.2f}"


def soups(run: dict) -> dict[str, np.ndarray]:
    """Loss by length of prompt. Shapes: (seeds, lengths) each."""
    soups = run["trials"]["soups"]
    singles = np.array(soups["singles"], dtype=float)
    best = np.stack([seed[seed[:, 0].argmin()] for seed in singles])
    others = {
        name: np.array(soups[name], dtype=float) for name in ("ensemble", "uniform", "greedy")
    }
    return {"best single": best} | others


def _soups_alt(run: dict) -> str:
    lengths = run["trials"]["soups"]["lengths"]
    rows = "; ".join(
        f"{name} {', '.join(f'{loss:.3f}' for loss in losses.mean(0))}"
        for name, losses in soups(run).items()
    )
    return (
        f"Points of loss, a panel for prompts of {', '.join(map(str, lengths))} digits, a point a "
        f"seed: best of the single fine-tunes, their ensemble, uniform soup, greedy soup. Means of "
        f"the seeds: {rows}."
    )


@recorded_figure(
    "merging",
    [f"trials/soups/{name}" for name in ("lengths", "singles", "uniform", "greedy", "ensemble")],
    alt=_soups_alt,
    name="soup-measured",
    title="Our soups beat their best ingredient, and the ensemble too",
    answers=[],
    notebook="11",
    sources=[MADE_BY],
)
def soup_measured() -> Figure:
    run = recorded("merging")
    lengths, found = run["trials"]["soups"]["lengths"], soups(run)
    title = "Our soups beat their best ingredient, and the ensemble too"
    fig, axes = plt.subplots(
        1, len(lengths), figsize=(10.4, 5.4), layout="constrained", sharey=True
    )
    headline(fig, title)
    colors = {"best single": INK, "ensemble": ACCENT, "uniform": PREDICTED, "greedy": MEASURED}
    for k, (ax, length) in enumerate(zip(axes, lengths, strict=True)):
        for y, (name, losses) in enumerate(found.items()):
            ax.plot(losses[:, k], [y] * len(losses), "o", color=tint(colors[name], 0.55), ms=11)
            middle = losses[:, k].mean()
            ax.plot([middle] * 2, [y - 0.28, y + 0.28], color=colors[name], lw=4)
            beside(ax, middle, y, f"{middle:.3f}", colors[name], size=15, xytext=(0, 22),
                   ha="center", weight="bold")  # fmt: skip
        trained = " (as trained)" if k == 0 else ""
        ax.set_title(f"{length} digits{trained}", size=15)
        ax.set_xlabel("loss, nats a digit")
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        ax.margins(x=0.12)
    axes[0].set_yticks(range(len(found)), [f"{name} soup" if name in ("uniform", "greedy") else name
                                           for name in found], size=15)  # fmt: skip
    axes[0].set_ylim(len(found) - 0.5, -0.75)
    count = len(run["trials"]["soups"]["singles"][0])
    caption(fig, shapes=f"{count} fine-tunes on one task, other seeds and learning rates; points: "
            f"{seeds(run)}; bars: their mean; best single: at {lengths[0]} digits; axes cut",
            source=where(run))  # fmt: skip
    return fig
