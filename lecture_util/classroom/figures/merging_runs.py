"""Still figures of notebook 11, as recorded on tiny models: scales and densities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lecture_util.classroom.figures.diagram import beside, chart
from lecture_util.classroom.figures.plots import plain_log_ticks
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    HALO,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    tint,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MADE_BY = "measured: benchmarks/merging.py, its date and seeds in its results"
TINY = "tiny models of two layers, four tasks"


def where(run: dict) -> str:
    """The script, its date and the machine it ran on."""
    return f"benchmarks/merging.py, {run['date']}, {run['hardware']}"


def seeds(run: dict) -> str:
    return f"seeds {', '.join(map(str, run['trials']['seeds']))}"


def row(run: dict, name: str) -> dict:
    """The first row of the trials' table with this name."""
    return next(entry for entry in run["trials"]["table"] if entry["name"] == name)


def base_loss(run: dict) -> float:
    """Of the base, mean of tasks and seeds."""
    return float(np.mean(row(run, "base")["loss"]))


def scales(run: dict) -> tuple[np.ndarray, np.ndarray]:
    """λ, and the loss of task arithmetic with it. Shapes: (points,), (seeds, points)."""
    rows = sorted(run["trials"]["scales"], key=lambda entry: entry["scale"])
    return np.array([r["scale"] for r in rows]), np.array([r["loss"] for r in rows]).T


def negated(run: dict) -> tuple[float, np.ndarray]:
    """The weight nearest 0, and how accuracy changes. Shapes: -> (taken away, measured)."""
    rows, tasks = run["trials"]["negation"], run["trials"]["tasks"]
    weight = max(r["weight"] for r in rows)
    before = np.mean(row(run, "base")["accuracy"], axis=0)
    after = {r["task"]: [np.mean(r["accuracy"][name]) for name in tasks] for r in rows
             if r["weight"] == weight}  # fmt: skip
    return weight, np.array([after[name] for name in tasks]) - before


def points(change: float) -> str:
    """A change of accuracy in points."""
    return f"{100 * change:+.0f}".replace("-", "−") if round(100 * change) else "0"


def _scales_alt(run: dict) -> str:
    at, losses = scales(run)
    best = ", ".join(f"{at[k]:g}" for k in losses.argmin(1))
    weight, changes = negated(run)
    rows = "; ".join(
        f"{name}: {', '.join(map(points, row))}"
        for name, row in zip(run["trials"]["tasks"], changes, strict=True)
    )
    return (
        f"Left, loss against λ, a line a seed, from {at[0]:g} to {at[-1]:g}: each falls, then "
        f"rises; least at {best}. Right, a table: the task whose vector is added {weight:g} times, "
        f"and the change of accuracy in points on {', '.join(run['trials']['tasks'])}. {rows}."
    ).replace("-", "−")


@recorded_figure(
    "merging",
    ["trials/scales", "trials/negation", "trials/tasks", "trials/table/base"],
    alt=_scales_alt,
    name="task-scales",
    title="The best λ is below 1; a task taken away takes others along",
    answers=["Task arithmetic (slides)"],
    notebook="11",
    sources=[MADE_BY],
)
def task_scales() -> Figure:
    run = recorded("merging")
    title = "The best λ is below 1; a task taken away takes others along"
    fig, (left, right) = chart(title, 2, 5.4)
    at, losses = scales(run)
    for seed, strength in zip(losses, np.linspace(1, 0.45, len(losses)), strict=True):
        left.plot(at, seed, "-o", color=tint(MEASURED, strength))
        k = seed.argmin()
        left.plot(at[k], seed[k], "o", color=GUESS, ms=14, zorder=4)
    left.axhline(base_loss(run), color=MUTED, lw=1.6)
    beside(left, at[0], base_loss(run), "base", MUTED, size=15, xytext=(0, 10))
    left.set(xlabel="λ, scale of the sum of the task vectors", ylabel="loss, nats a digit")
    left.set_ylim(0, 1.06 * max(losses.max(), base_loss(run)))
    left.set_title("four tasks added; green: best", size=15)
    weight, changes = negated(run)
    _changes(right, changes, run["trials"]["tasks"])
    right.set_title(f"base {weight:g} × a vector: points".replace("-", "− "), size=15)
    caption(fig, shapes=f"{TINY}; right: change of accuracy, mean of seeds; {seeds(run)}",
            source=where(run))  # fmt: skip
    return fig


def _changes(ax: Axes, changes: np.ndarray, names: Sequence[str]) -> None:
    """A row for each task taken away, a column for each measured; worse is redder."""
    worst = -changes.min()
    for y, row in enumerate(changes):
        for x, change in enumerate(row):
            face = tint(MEASURED, 0.06 + 0.74 * max(0, -change) / worst) if worst > 0 else "white"
            ax.barh(y, 0.94, left=x - 0.47, height=0.92, color=face)
            ax.text(x, y, points(change), size=17, ha="center", va="center",
                    weight="bold" if x == y else "normal")  # fmt: skip
    ax.set_yticks(range(len(names)), [f"− {name}" for name in names], size=15)
    ax.set_xticks(range(len(names)), names, size=15)
    ax.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(names) - 0.5, -0.5))
    ax.set_xlabel("change on this task")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


NAMES = {"ties": "TIES", "dare_linear": "DARE", "dare_ties": "DARE with signs", "breadcrumbs":
         "Breadcrumbs", "della": "DELLA", "della_linear": "DELLA, no signs",
         "breadcrumbs_ties": "Breadcrumbs, signs"}  # fmt: skip
LOOKS = {"ties": (ACCENT, "D"), "dare_linear": (PREDICTED, "o"), "dare_ties": (MEASURED, "s"),
         "breadcrumbs": (GUESS, "^"), "della": (CACHE, "v"), "della_linear": (MUTED, "P"),
         "breadcrumbs_ties": (INK, "X")}  # fmt: skip


def densities(run: dict) -> dict[str, list[tuple[float, float]]]:
    """Each method's (density, loss), mean of the seeds, sparsest first."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in sorted(run["trials"]["densities"], key=lambda entry: entry["density"]):
        point = entry["density"], float(np.mean(entry["loss"]))
        found.setdefault(entry["method"], []).append(point)
    return found


def _scales(run: dict) -> dict[str, float]:
    """The λ of each method that has one, the same at every density."""
    given = {entry["method"]: entry.get("scale") for entry in run["trials"]["densities"]}
    return {name: scale for name, scale in given.items() if scale is not None}


def _densities_alt(run: dict) -> str:
    scales, rows = _scales(run), []
    for name, points in densities(run).items():
        given = f" (λ {scales[name]:g})" if name in scales else ""
        ends = ", ".join(f"{loss:.2f} at {density:g}" for density, loss in (points[0], points[-1]))
        rows.append(f"{NAMES.get(name, name)}{given} {ends}")
    return (
        f"Loss, logarithmic, against the density kept, logarithmic; the base has "
        f"{base_loss(run):.2f}. The sparsest and densest of each method, at its own scale: "
        f"{'; '.join(rows)}."
    )


@recorded_figure(
    "merging",
    ["trials/densities", "trials/draws", "trials/table/base"],
    alt=_densities_alt,
    name="merge-densities",
    title="At random, half of the entries can go; nearly all cannot",
    answers=[
        "DARE, results (slides)",
        "Model breadcrumbs, results (slides)",
        "DELLA, results (slides)",
    ],
    notebook="11",
    sources=[MADE_BY],
)
def merge_densities() -> Figure:
    run = recorded("merging")
    fig, ax = chart("At random, half of the entries can go; nearly all cannot", height=5.8)
    found, scales = densities(run), _scales(run)
    for name, points in found.items():
        color, marker = LOOKS.get(name, (INK, "*"))
        given = f", λ {scales[name]:g}" if name in scales else ""
        ax.plot(*zip(*points, strict=True), f"-{marker}", color=color, ms=9,
                label=NAMES.get(name, name) + given)  # fmt: skip
    ax.axhline(base_loss(run), color=MUTED, lw=1.6, zorder=1)
    every = [density for points in found.values() for density, _ in points]
    beside(ax, max(every), base_loss(run), f"base {base_loss(run):.2f}", MUTED, size=15,
           xytext=(0, 11), ha="right", path_effects=HALO)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="density: share of each task vector kept")
    ax.set_ylabel("loss, nats a digit (logarithmic)")
    ticks: list[float] = []
    for density in sorted(set(every)):  # as many as have room for their names
        ticks += [density] if not ticks or density > 1.35 * ticks[-1] else []
    ax.set_xticks(ticks, [f"{density:g}" for density in ticks])
    ax.minorticks_off()
    plain_log_ticks(ax.yaxis)
    ax.legend(fontsize=15, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    caption(fig, shapes=f"{TINY}; mean of {seeds(run)} and {run['trials']['draws']} draws of "
            "random methods", source=where(run))  # fmt: skip
    return fig
