"""Still figures of notebook 12, as recorded: the table, and its frontier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize

from lecture_util.classroom.figures.diagram import chart
from lecture_util.classroom.figures.plots import label_points, plain_log_ticks
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    number,
    tint,
)
from lecture_util.together.configuration import Configuration
from lecture_util.together.table import ROWS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MADE_BY = "measured: benchmarks/together.py, its date in its results"
MODEL = "SmolLM2-135M"
ALONE, SERVER, TOGETHER = "each alone", "a server", "together"
NEEDS = ["rows", "workload/new_tokens"]


def where(run: dict) -> str:
    """The script, its date and the machine it ran on."""
    return f"benchmarks/together.py, {run['date']}, {run['hardware']}"


def kind(c: Configuration) -> str:
    """Where a row of the table belongs: one technique, the server's, or several at once."""
    changed = (c.weights != "fp32") + c.student + (c.draft is not None) + (c.schedule != "single")
    if changed > 1:
        return TOGETHER
    return SERVER if c.schedule == "continuous" else ALONE


def grouped(run: dict) -> dict[str, list[dict]]:
    """The rows, in the table's order, by kind."""
    known = dict(ROWS)
    found: dict[str, list[dict]] = {ALONE: [], SERVER: [], TOGETHER: []}
    for row in run["rows"]:
        found[kind(known[row["label"]])].append(row)
    return found


def about(run: dict) -> str:
    """What all rows answer alike."""
    work = run["workload"]
    prompts, news = work["prompt_tokens"], work["new_tokens"]
    return (
        f"{MODEL}, {work['requests']} questions about one text: {min(prompts)} to {max(prompts)} "
        f"tokens, answers of {min(news)} to {max(news)}"
    )


def fastest(rows: list[dict]) -> dict:
    return max(rows, key=lambda row: row["tokens_per_s"])


def _named(row: dict) -> str:
    return f"{row['label']} {number(row['tokens_per_s'])}"


def _ladder_alt(run: dict) -> str:
    best = "; ".join(f"{name}: {_named(fastest(rows))}" for name, rows in grouped(run).items())
    first = ", ".join(_named(row) for row in run["rows"][:2])
    return (
        f"{len(run['rows'])} rows on a logarithmic axis of tokens a second, each with a hollow "
        "point (predicted), a full one (measured) and a tick (the limit by two peaks), in three "
        f"groups. {first}. The fastest of each group: {best}."
    )


@recorded_figure(
    "together",
    NEEDS,
    alt=_ladder_alt,
    name="ladder",
    title="The fastest combine several techniques; alone, none comes near",
    answers=[],
    notebook="12",
    sources=[MADE_BY, "predicted: lecture_util.together.predict, of the same record"],
)
def ladder() -> Figure:
    run = recorded("together")
    title = "The fastest combine several techniques; alone, none comes near"
    fig, ax = chart(title, height=6.9)
    y, ticks = 0.0, []
    least = min(min(row["tokens_per_s"], row["predicted_tokens_per_s"]) for row in run["rows"])
    most = max(max(row["tokens_per_s"], row["limit_tokens_per_s"]) for row in run["rows"])
    for name, rows in grouped(run).items():
        ax.text(least / 1.5, y, name, size=14, weight="bold", color=MUTED, va="center")
        y += 0.95
        for row in rows:
            _rung(ax, y, row)
            ax.text(most * 1.35, y, number(row["tokens_per_s"]), size=13.5, va="center",
                    ha="left", color=INK)  # fmt: skip
            ticks.append((y, row["label"]))
            y += 1
        y += 0.25
    ax.text(most * 1.35, 0, "measured", size=13, va="center", color=MUTED)
    ax.set_yticks(*zip(*ticks, strict=True), size=13.5)
    ax.set(xscale="log", xlim=(least / 1.6, most * 3), ylim=(y - 0.6, -0.7))
    ax.set_xlabel("tokens a second (logarithmic)")
    plain_log_ticks(ax.xaxis)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    handles, labels = ax.get_legend_handles_labels()
    kept = dict(zip(labels, handles, strict=True))
    fig.legend(kept.values(), kept.keys(), loc="upper left", bbox_to_anchor=(0.0, 0.945),
               ncols=3, fontsize=14, handletextpad=0.3)  # fmt: skip
    fig.get_layout_engine().set(rect=(0, 0, 1, 0.985))
    ax.set_title(" ", size=18)
    caption(fig, device=run["device"], shapes=about(run), source=where(run))
    return fig


def _rung(ax: Axes, y: float, row: dict) -> None:
    predicted, measured = row["predicted_tokens_per_s"], row["tokens_per_s"]
    ax.plot([predicted, measured], [y, y], color=tint(MUTED, 0.5), lw=2, zorder=1)
    ax.plot(row["limit_tokens_per_s"], y, "|", color=INK, ms=15, mew=2.2, ls="none",
            label="limit by two peaks")  # fmt: skip
    ax.plot(predicted, y, "o", mfc="white", mec=PREDICTED, mew=2.2, ms=10, ls="none", zorder=3,
            label="predicted")  # fmt: skip
    ax.plot(measured, y, "o", color=MEASURED, ms=8, ls="none", zorder=4, label="measured")


def frontier(run: dict) -> list[dict]:
    """The rows that none beats in both speed and memory, the smallest first."""
    found: list[dict] = []
    for row in sorted(run["rows"], key=lambda row: (row["memory_bytes"], -row["tokens_per_s"])):
        if not found or row["tokens_per_s"] > found[-1]["tokens_per_s"]:
            found.append(row)
    return found


def _memory_alt(run: dict) -> str:
    best = "; ".join(
        f"{row['label']}, {row['memory_bytes'] / 1e6:.0f} MB, {number(row['tokens_per_s'])} a "
        f"second, perplexity {row['perplexity']:.1f}"
        for row in frontier(run)
    )
    return (
        f"{len(run['rows'])} points: memory against tokens a second, both logarithmic, coloured by "
        f"perplexity. On the frontier, from little memory to much: {best}."
    )


@recorded_figure(
    "together",
    NEEDS,
    alt=_memory_alt,
    name="speed-memory",
    title="On the frontier of speed and memory, all are combinations",
    answers=[],
    notebook="12",
    sources=[MADE_BY],
)
def speed_memory() -> Figure:
    run = recorded("together")
    fig, ax = chart("On the frontier of speed and memory, all are combinations", height=6.9)
    quality = [row["perplexity"] for row in run["rows"]]
    colors = ScalarMappable(
        Normalize(min(quality), max(quality)),
        LinearSegmentedColormap.from_list("", [PREDICTED, tint(MEASURED, 0.35), MEASURED]),
    )
    best, known = frontier(run), dict(ROWS)
    shown = [row for row in run["rows"] if known[row["label"]].cache]
    points = [(row["label"], row["memory_bytes"] / 1e6, row["tokens_per_s"]) for row in shown]
    right, low = 1.2 * max(m for _, m, _ in points), 0.7 * min(speed for *_, speed in points)
    left, top = 0.87 * min(m for _, m, _ in points), 1.6 * max(speed for *_, speed in points)
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, top))
    line = _staircase(ax, best, low, right)
    for row, (_, memory, speed) in zip(shown, points, strict=True):
        ax.plot(memory, speed, "o", ms=13 if row in best else 9, mec="white", zorder=3,
                color=colors.to_rgba(row["perplexity"]))  # fmt: skip
    bar = fig.colorbar(colors, ax=ax, pad=0.015, aspect=32)
    bar.set_label("perplexity: lower is better", size=14)
    bar.outline.set_visible(False)
    ax.set_xlabel("memory at its most, MB: weights and cache (logarithmic)")
    ax.set_ylabel("tokens a second (logarithmic)")
    plain_log_ticks(ax.xaxis)
    plain_log_ticks(ax.yaxis)
    label_points(ax, points)
    line.set_linestyle("-")
    for text in ax.texts:  # halos would be outlines of every letter, twice as many bytes
        text.set_path_effects([])
    naive = ", ".join(_named(row) for row in run["rows"] if row not in shown)
    caption(fig, device=run["device"], shapes=f"{about(run)}; line: the frontier; far below: "
            f"{naive} tokens a second", source=where(run))  # fmt: skip
    return fig


def _staircase(ax: Axes, best: list[dict], low: float, right: float) -> Line2D:
    """The frontier; dashed for the time being, since labels keep clear of dashed lines."""
    x, y = [], [low]
    for row in best:
        x += [row["memory_bytes"] / 1e6] * 2
        y += [row["tokens_per_s"]] * 2
    (line,) = ax.plot([*x, right], y, "--", color=INK, lw=1.8, zorder=1)
    return line
