"""Still figures of notebook 11, as recorded: every merge on every task, geometry, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from lecture_util.classroom.figures.diagram import chart
from lecture_util.classroom.figures.merging_runs import MADE_BY, TINY, seeds, where
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    MEASURED,
    PREDICTED,
    caption,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SINGLE = "fine-tune "
ALSO = ("base", "ensemble", "multitask")  # neither a fine-tune nor a merge


def label(entry: dict) -> str:
    """A row's name, and its parameters where it has some: "TIES, density 0.2, scale 0.8"."""
    about = [
        f"{name} {value:g}" if isinstance(value, float | int) else f"{name} {value}"
        for name, value in (entry.get("parameters") or {}).items()
        if value is not None and not isinstance(value, list | dict)
    ]
    return ", ".join([entry["name"], *about]).replace("scale ", "λ ")


def table(run: dict) -> list[tuple[str, str, np.ndarray]]:
    """(kind, label, accuracy by task), means of the seeds, in groups, best mean first within one.

    Kinds: "base", "fine-tune", "merge", "other".
    """
    groups: dict[str, list] = {"base": [], "fine-tune": [], "merge": [], "other": []}
    for entry in run["trials"]["table"]:
        name = entry["name"]
        single = name.startswith(SINGLE)
        kind = "fine-tune" if single else "merge" if name not in ALSO else "other"
        kind = "base" if name == "base" else kind
        shown = name if kind != "merge" else label(entry)
        groups[kind].append((kind, shown, np.mean(entry["accuracy"], axis=0)))
    groups["merge"].sort(key=lambda row: -row[2].mean())
    return [row for rows in groups.values() for row in rows]


def best(run: dict, kind: str) -> tuple[str, float]:
    """The row of a kind with the best mean over all tasks, and that mean."""
    rows = [(name, float(values.mean())) for k, name, values in table(run) if k == kind]
    return max(rows, key=lambda row: row[1])


def _table_alt(run: dict) -> str:
    merges = [(name, values.mean()) for kind, name, values in table(run) if kind == "merge"]
    others = "; ".join(
        f"{name} {values.mean():.2f}"
        for kind, name, values in table(run)
        if kind in ("base", "other")
    )
    (top, high), (last, low) = merges[0], merges[-1]
    single, mean = best(run, "fine-tune")
    return (
        f"Table of accuracy, a row a model, a column for each of {len(run['trials']['tasks'])} "
        f"tasks and their mean, mean of the seeds. Means: {others}; best single {single} "
        f"{mean:.2f}; {len(merges)} merges from {high:.2f} ({top}) to {low:.2f} ({last})."
    )


@recorded_figure(
    "merging",
    ["trials/tasks", "trials/table/base", "trials/table/ensemble", "trials/table/multitask"],
    alt=_table_alt,
    name="merge-table",
    title="A merge beats each fine-tune; training on all tasks beats all",
    answers=[
        "What is model merging? (slides)",
        "Model breadcrumbs, results (slides)",
        "DELLA, results (slides)",
    ],
    notebook="11",
    sources=[MADE_BY],
)
def merge_table() -> Figure:
    run = recorded("merging")
    rows, tasks = table(run), run["trials"]["tasks"]
    title = "A merge beats each fine-tune; training on all tasks beats all"
    fig, ax = chart(title, height=1.9 + 0.36 * len(rows))
    colors = LinearSegmentedColormap.from_list("accuracy", ["white", tint(PREDICTED, 0.75)])
    y, ticks = 0.0, []
    for k, (kind, _, values) in enumerate(rows):
        y += 0.35 if k and rows[k - 1][0] != kind else 0
        ticks.append(y)
        for x, value in enumerate([*values, values.mean()]):
            at = x + (0.25 if x == len(tasks) else 0)
            ax.barh(y, 0.96, left=at - 0.48, height=0.94, color=colors(max(0, (value - 0.2) / 0.8)))
            ax.text(at, y, f"{value:.2f}", ha="center", va="center", size=14)
        y += 1
    ax.set_yticks(ticks, [name for _, name, _ in rows], size=14)
    ax.set_xticks([*range(len(tasks)), len(tasks) + 0.25], [*tasks, "mean"], size=15)
    ax.xaxis.tick_top()
    ax.set(ylim=(y - 0.45, -0.55), xlim=(-0.52, len(tasks) + 0.77))
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    caption(fig, shapes=f"accuracy a digit; {TINY}; mean of {seeds(run)}",
            source=where(run))  # fmt: skip
    return fig


def shell(run: dict) -> list[tuple[str, float, float, float]]:
    """(matrix, spread of the lengths in %, angle and its spread in degrees); without the norms."""
    shell = run["trials"]["shell"]
    angles = {entry["name"]: entry for entry in shell["angles"]}
    return [
        (entry["name"].removesuffix(".weight"), 100 * entry["std"] / entry["mean"],
         angles[entry["name"]]["mean_deg"], angles[entry["name"]]["std_deg"])
        for entry in shell["norm_spread"]
        if entry["name"] in angles and entry["mean"] and "norm" not in entry["name"]
    ]  # fmt: skip


def _shell_alt(run: dict) -> str:
    rows = shell(run)
    spreads, angles, wide = ([row[k] for row in rows] for k in (1, 2, 3))
    return (
        f"Two panels, a row for each of {len(rows)} weight matrices. Left, how far the lengths "
        f"of the fine-tunes' changes spread: standard deviation between {min(spreads):.1f}% and "
        f"{max(spreads):.1f}% of the mean. Right, the angle between two changes: means from "
        f"{min(angles):.0f} to {max(angles):.0f} degrees, with standard deviations of "
        f"{min(wide):.1f} to {max(wide):.1f}."
    )


@recorded_figure(
    "merging",
    ["trials/shell/norm_spread", "trials/shell/angles"],
    alt=_shell_alt,
    name="thin-shell",
    title="Fine-tunes from other seeds: nearly one length, nearly one angle",
    answers=["Model stock, thin shell (slides)"],
    notebook="11",
    sources=[MADE_BY, "Jang et al. 2024, arXiv:2403.19522: what to look at"],
)
def thin_shell() -> Figure:
    run = recorded("merging")
    rows = shell(run)
    title = "Fine-tunes from other seeds: nearly one length, nearly one angle"
    fig, (left, right) = chart(title, 2, 1.9 + 0.26 * len(rows))
    for y, (_, spread, degrees, wide) in enumerate(rows):
        left.plot([0, spread], [y, y], color=tint(MEASURED, 0.5), lw=3)
        left.plot(spread, y, "o", color=MEASURED, ms=9)
        right.plot([degrees - wide, degrees + wide], [y, y], color=tint(MEASURED, 0.5), lw=4)
        right.plot(degrees, y, "o", color=MEASURED, ms=9)
    left.set_yticks(range(len(rows)), [name for name, *_ in rows], size=12)
    right.set_yticks(range(len(rows)), [""] * len(rows))
    for ax in (left, right):
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
    left.set(xlim=(0, max(10, 1.1 * max(row[1] for row in rows))))
    left.set_xlabel("spread of the lengths, % of their mean")
    right.set(xlim=(0, 90), xlabel="angle between two fine-tunes, degrees",
              xticks=range(0, 91, 15))  # fmt: skip
    left.set_title("their lengths: spread", size=15)
    right.set_title("their angles: mean, spread", size=15)
    caption(fig, shapes="changes of the weight matrices; tiny models, one base, other "
            "seeds; spread: one standard deviation", source=where(run))  # fmt: skip
    return fig
