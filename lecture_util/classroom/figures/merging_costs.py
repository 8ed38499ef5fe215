"""Still figures of notebook 11, as recorded: what a merge takes, and what stacking layers costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import beside, chart
from lecture_util.classroom.figures.merging_runs import MADE_BY, where
from lecture_util.classroom.figures.plots import plain_log_ticks
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    number,
    tint,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import weight_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE = weight_bytes(PUBLISHED["smollm2-135m"], 4)  # the reference model in fp32


def memory(run: dict) -> list[tuple[int, float]]:
    """(models, peak bytes) of our TIES."""
    return sorted((entry["models"], entry["bytes"]) for entry in run["memory"])


def a_model_more(run: dict) -> float:
    """Bytes that a further model adds to the peak, from the fewest models to the most."""
    (few, low), *_, (many, high) = memory(run)
    return (high - low) / (many - few)


def peers(run: dict) -> list[tuple[str, float, float]]:
    """(method, mergekit's time over ours, its peak memory over ours), by gain in time."""
    rows = [
        (entry["method"], entry["mergekit_s"] / entry["ours_s"],
         entry["mergekit_bytes"] / entry["ours_bytes"])
        for entry in run["peers"]
        if all(entry.get(key) for key in ("ours_s", "mergekit_s", "ours_bytes", "mergekit_bytes"))
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row[1])


def _memory_alt(run: dict) -> str:
    points = ", ".join(f"{count} models {held / 1e9:.2f} GB" for count, held in memory(run))
    rows = "; ".join(f"{name} {time:.1f} and {held:.1f}" for name, time, held in peers(run))
    return (
        f"Left, peak memory of our TIES against models merged: {points}; all held whole would be "
        f"{WHOLE / 1e9:.2f} GB each. Right, mergekit's time and peak memory over ours: {rows}."
    )


@recorded_figure(
    "merging",
    ["memory", "peers"],
    alt=_memory_alt,
    name="merge-memory",
    title="A further model adds a fraction of its bytes to the peak",
    answers=[],
    notebook="11",
    sources=[MADE_BY],
)
def merge_memory() -> Figure:
    run = recorded("merging")
    title = "A further model adds a fraction of its bytes to the peak"
    fig, (left, right) = chart(title, 2, 5.6)
    counts, held = zip(*memory(run), strict=True)
    left.plot(counts, [value / 1e9 for value in held], "-o", color=MEASURED, ms=10)
    whole = [count * WHOLE / 1e9 for count in counts]
    left.plot(counts, whole, "--", color=PREDICTED)
    beside(left, counts[-1], whole[-1], f"all held\nwhole\n{whole[-1]:.1f} GB", PREDICTED, size=15)
    beside(left, counts[-1], held[-1] / 1e9, f"ours, peak\n{held[-1] / 1e9:.1f} GB", MEASURED,
           size=15, weight="bold")  # fmt: skip
    left.set(xlabel="models merged with TIES", ylabel="GB", xticks=counts)
    left.set_ylim(0, 1.1 * max(*whole, held[-1] / 1e9))
    left.set_title(
        f"a model more: {a_model_more(run) / 1e6:,.0f} of its {WHOLE / 1e6:,.0f} MB", size=15
    )
    rows = peers(run)
    for y, (_, time, bytes_ratio) in enumerate(rows):
        for value, lift, color, name in (
            (time, -0.19, MEASURED, "time"),
            (bytes_ratio, 0.19, GUESS, "peak memory"),
        ):
            right.barh(y + lift, value, height=0.36, color=color, label="" if y else name)
            beside(right, value, y + lift, f"{value:.1f}×", INK, size=13, xytext=(5, 0))
    right.axvline(1, color=INK, lw=1.8)
    right.set_yticks(range(len(rows)), [name.replace("_", " ") for name, *_ in rows], size=14)
    right.set(ylim=(len(rows) - 0.4, -0.6), xlabel="times as much as ours")
    right.set_xlim(0, 1.2 * max(max(row[1:]) for row in rows))
    right.grid(axis="y", visible=False)
    right.tick_params(axis="y", length=0)
    right.set_title("mergekit 0.1.5 over ours", size=15)
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=14)
    largest = run.get("largest_tensor_bytes", 0) / 1e6
    caption(fig, dtype="fp32", shapes="copies of SmolLM2-135M; the same recipes and inputs"
            + (f"; its largest tensor has {largest:.0f} MB" if largest else ""),
            source=where(run))  # fmt: skip
    return fig


def franken(run: dict) -> list[tuple[str, int, float, float]]:
    """(name, layers, perplexity, bytes read a token over the model's), the whole model first."""
    rows = run["real"]["franken"]
    whole = rows[0]["bytes_per_token"]
    return [(e["name"], e["depth"], e["perplexity"], e["bytes_per_token"] / whole) for e in rows]


def _franken_alt(run: dict) -> str:
    rows = "; ".join(
        f"{name}, {layers} layers, {number(value)}" for name, layers, value, _ in franken(run)
    )
    return f"Perplexity on English of the reference model and of stacks of its layers: {rows}."


@recorded_figure(
    "merging",
    ["real/franken"],
    alt=_franken_alt,
    name="franken-measured",
    title="Layers stacked anew and not trained predict worse",
    answers=["Franken-merging, Goliath (slides)"],
    notebook="11",
    sources=[MADE_BY],
)
def franken_measured() -> Figure:
    run = recorded("merging")
    rows = franken(run)
    height = 2.4 + 0.55 * len(rows)
    fig, ax = chart("Layers stacked anew and not trained predict worse", height=height)
    least, most = (edge(value for _, _, value, _ in rows) for edge in (min, max))
    for y, (_, _, value, read) in enumerate(rows):
        color = MUTED if y == 0 else MEASURED
        ax.plot([least, value], [y, y], color=tint(color, 0.5), lw=4)
        ax.plot(value, y, "o", color=color, ms=14)
        more = f"  ({read - 1:+.0%} bytes)".replace("-", "−") if y else ""
        beside(ax, value, y, f"{number(value)}{more}", INK, size=16, xytext=(13, 0))
    ax.set_yticks(range(len(rows)), [f"{name}\n{layers} layers" for name, layers, *_ in rows],
                  size=14)  # fmt: skip
    ax.set(xscale="log", ylim=(len(rows) - 0.4, -0.6), xlabel="perplexity (logarithmic)")
    ax.set_xlim(least / 1.15, most * (most / least) ** 0.3)
    plain_log_ticks(ax.xaxis)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    caption(
        fig,
        shapes="SmolLM2-135M with itself, weights untouched; English; in brackets: "
        "bytes read a token",
        source=where(run),
    )
    return fig
