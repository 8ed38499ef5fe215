"""Still figures of notebook 09, as recorded: schedulers, load, the token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from lecture_util.classroom.figures.diagram import chart, headline
from lecture_util.classroom.figures.plots import label_points, plain_log_ticks
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    INK,
    MEASURED,
    MUTED,
    caption,
    number,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MADE_BY = "measured: benchmarks/serving.py, its date in its results"
MODEL = "SmolLM2-135M, the same requests for all"
SERVERS = ("static", "continuous, contiguous", "continuous, whole prompts", "continuous, paged")


def where(run: dict) -> str:
    """The script, its date and the machine it ran on."""
    return f"benchmarks/serving.py, {run['date']}, {run['hardware']}"


def by_name(rows: list[dict]) -> dict[str, dict]:
    return {row["name"]: row for row in rows}


def _scheduling_alt(run: dict) -> str:
    rows = "; ".join(
        f"{name} {row['tokens_per_s']:.0f}, {number(row['ttft']['p90'])} s, "
        f"{1e3 * row['tpot']['p90']:.0f} ms"
        for name, row in by_name(run["scheduling"]).items()
        if name in SERVERS
    )
    return f"Bars: tokens a second, time to first token (90%), time a token after it (90%). {rows}."


@recorded_figure(
    "serving",
    [f"scheduling/{name}" for name in SERVERS],
    alt=_scheduling_alt,
    name="scheduling-measured",
    title="Refilling the batch: more tokens a second, and they begin sooner",
    answers=[],
    notebook="09",
    sources=[MADE_BY],
)
def scheduling_measured() -> Figure:
    run = recorded("serving")
    fig, axes = plt.subplots(1, 3, figsize=(10.4, 4.6), layout="constrained", sharey=True)
    headline(fig, "Refilling the batch: more tokens a second, and they begin sooner")
    rows = [by_name(run["scheduling"])[name] for name in SERVERS]
    colors = [tint(MUTED, 0.5) if row["name"] == "static" else MEASURED for row in rows]
    _bars(axes[0], [row["tokens_per_s"] for row in rows], colors)
    axes[0].set_xlabel("tokens a second")
    for ax, key, scale, unit in ((axes[1], "ttft", 1, "s"), (axes[2], "tpot", 1e3, "ms")):
        for low, high in (("p50", 1.0), ("p90", 0.45)):
            values = [scale * row[key][low] for row in rows]
            faces = [tint(MEASURED if color == MEASURED else MUTED, high) for color in colors]
            if low == "p90":
                _bars(ax, values, faces)
            else:
                ax.plot(values, range(len(rows)), "|", color=INK, ms=24, mew=2.4)
        ax.set_xlabel(f"{unit}; bar: 90%, line: half")
    axes[0].set_yticks(range(len(rows)), [name.replace(", ", ",\n") for name in SERVERS], size=14)
    axes[0].set_ylim(len(rows) - 0.45, -0.55)
    for ax, name in zip(axes, ("throughput", "time to first token", "time a token"), strict=True):
        ax.set_title(name, size=15)
    caption(fig, dtype=run["dtype"], shapes=MODEL, source=where(run))
    return fig


def _bars(ax: Axes, values: list[float], colors: list) -> None:
    drawn = ax.barh(range(len(values)), values, color=colors, height=0.66)
    ax.bar_label(drawn, [number(value) for value in values], padding=5, color=INK, size=14)
    ax.set_xlim(0, 1.32 * max(values))
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)


def load_lines(run: dict) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(policy, source) -> requests a second and the TTFT that 90% stay below."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in sorted(run["load"], key=lambda row: row["rate_per_s"]):
        point = row["rate_per_s"], row["ttft"]["p90"]
        lines.setdefault((row["policy"], row["source"]), []).append(point)
    return lines


def _load_alt(run: dict) -> str:
    lines = "; ".join(
        f"{policy}, {source}, from {number(points[0][1])} s at {number(points[0][0])} a second to "
        f"{number(points[-1][1])} s at {number(points[-1][0])}"
        for (policy, source), points in load_lines(run).items()
    )
    return f"Time to first token that 90% stay below, against requests a second: {lines}."


@recorded_figure(
    "serving",
    ["load"],
    alt=_load_alt,
    name="load-curve",
    title="The wait explodes near capacity, and static batches reach it first",
    answers=[],
    notebook="09",
    sources=[MADE_BY, "simulated: lecture_util.serving.simulate, on times fitted to that run"],
)
def load_curve() -> Figure:
    run = recorded("serving")
    fig, ax = chart("The wait explodes near capacity, and static batches reach it first")
    colors = {"static": MUTED, "continuous": MEASURED}
    for (policy, source), points in load_lines(run).items():
        measured, color = source == "measured", colors[policy]
        ax.plot(*zip(*points, strict=True), "o-" if measured else "--", color=color, ms=8,
                lw=2.6 if measured else 2, label=f"{policy}, {source}")  # fmt: skip
    ax.set(yscale="log", xlabel="requests a second")
    ax.set_ylabel("time to first token, s: 90% wait less")
    plain_log_ticks(ax.yaxis)
    ax.legend(fontsize=14, loc="upper left")
    ax.set_ylim(top=ax.get_ylim()[1] * 4)
    shapes = f"{MODEL}; Poisson arrivals"
    caption(fig, dtype=run["dtype"], shapes=shapes, source=where(run))
    return fig


def budget_points(run: dict) -> list[tuple[str, float, float]]:
    """(budget, ms of the longest pauses, s to the first token): 99% and 90% stay below."""
    return [
        (
            f"{row['token_budget']}" if row["chunked"] else "whole prompts",
            1e3 * row["pause_p99"],
            row["ttft"]["p90"],
        )
        for row in run["budgets"]
    ]


def _budgets_alt(run: dict) -> str:
    points = "; ".join(
        f"{name}: {number(pause_ms)} ms, {number(ttft_s)} s"
        for name, pause_ms, ttft_s in budget_points(run)
    )
    return (
        "Points, one a token budget of a forward: the pause between two tokens that 99% stay below "
        f"against the time to first token that 90% stay below. {points}."
    )


@recorded_figure(
    "serving",
    ["budgets"],
    alt=_budgets_alt,
    name="token-budgets",
    title="A larger token budget: the first token sooner, the pauses longer",
    answers=[],
    notebook="09",
    sources=[MADE_BY],
)
def token_budgets() -> Figure:
    run = recorded("serving")
    fig, ax = chart("A larger token budget: the first token sooner, the pauses longer")
    points = budget_points(run)
    for name, x, y in points:
        whole = name == "whole prompts"
        ax.plot(x, y, "s" if whole else "o", color=MUTED if whole else MEASURED, ms=11)
    chunked = [(x, y) for name, x, y in points if name != "whole prompts"]
    ax.plot(*zip(*chunked, strict=True), color=tint(MEASURED, 0.5), lw=2, zorder=1)
    ax.set(xlim=(0, 1.15 * max(x for _, x, _ in points)))
    ax.set(ylim=(0, 1.15 * max(y for *_, y in points)))
    ax.set_xlabel("pause between two tokens, ms: 99% are shorter")
    ax.set_ylabel("time to first token, s: 90% wait less")
    label_points(ax, points)
    for text in ax.texts:
        text.set_size(15)
    caption(fig, dtype=run["dtype"], shapes=f"{MODEL}; long prompts among texts that run; beside "
            "a point: tokens of one forward at most", source=where(run))  # fmt: skip
    return fig
