"""Still figures of notebook 10, as recorded: where the memory is, and other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from lecture_util.classroom.figures.diagram import chart, headline
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.serving_runs import MADE_BY, MODEL, where
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    CACHE,
    GUESS,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    number,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Kwon et al. 2023, figure 2, percent: tokens, reserved, internal, external and other.
PUBLISHED_USE = {
    "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    "vLLM": (96.3, 0.0, 0.0, 3.7),
}
PARTS = {"stored": ("a token", PREDICTED), "reserved": ("for one to come", GUESS),
         "internal": ("never used", CACHE), "external": ("lent to nobody", "#BBBBBB")}  # fmt: skip
ROWS = {"max": "rows, max", "pow2": "rows, pow2", "oracle": "rows, oracle"}


def shares(run: dict) -> dict[str, tuple[float, ...]]:
    """Percent of all the memory, as measured: stored, reserved, internal, external."""
    return {
        ROWS.get(row["name"], row["name"].replace("paged ", "pages of ")): tuple(
            100 * row[part] for part in PARTS
        )
        for row in run["memory"]["waste"]
    }


def _waste_alt(run: dict) -> str:
    ours = ", ".join(f"{name} {use[0]:.0f}%" for name, use in shares(run).items())
    theirs = ", ".join(f"{name} {use[0]:.1f}%" for name, use in PUBLISHED_USE.items())
    return (
        "Stacked bars of where the memory for keys and values is: holding a token, kept for one to "
        f"come, never to be used, lent to nobody. Holding a token, ours: {ours}. In the vLLM "
        f"paper: {theirs}."
    )


@recorded_figure(
    "serving",
    ["memory/waste/max", "memory/waste/paged 16"],
    alt=_waste_alt,
    name="memory-waste",
    title="Pages fill far more of the memory than rented rows do",
    answers=[],
    notebook="10",
    sources=[MADE_BY, "Kwon et al. 2023, arXiv:2309.06180, figure 2"],
)
def memory_waste() -> Figure:
    run = recorded("serving")
    fig, axes = plt.subplots(1, 2, figsize=(10.4, 5.2), layout="constrained", sharex=True)
    headline(fig, "Pages fill far more of the memory than rented rows do")
    lowest = max(len(shares(run)), 6) - 0.45  # leaves room for the legend below the paper's rows
    heads = ("ours, counted on a trace", "the vLLM paper, reported")
    for ax, rows, head in zip(axes, (shares(run), PUBLISHED_USE), heads, strict=True):
        for y, use in enumerate(rows.values()):
            start = 0.0
            for value, (label, color) in zip(use, PARTS.values(), strict=True):
                ax.barh(y, value, left=start, color=tint(color, 0.75), height=0.7,
                        label=label if y == 0 else None)  # fmt: skip
                if value > 7:
                    ax.text(start + value / 2, y, f"{value:.0f}", ha="center", va="center", size=14)
                start += value
        ax.set_yticks(range(len(rows)), rows, size=14)
        ax.set(xlim=(0, 101), ylim=(lowest, -0.55), xlabel="percent of the memory")
        ax.set_title(head, size=15, weight="normal")
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    axes[1].legend(loc="lower left", ncols=2, fontsize=14, handlelength=0.9, columnspacing=1,
                   borderaxespad=0)  # fmt: skip
    shapes = (
        "counted while somebody waited; rows by first fit, pow2 and oracle know each text's "
        "length; vLLM's 3.7% is not split up"
    )
    caption(fig, shapes=shapes, source=where(run))
    return fig


def rates(run: dict) -> dict[str, dict[str, float]]:
    """Requests -> who served them -> tokens a second."""
    found: dict[str, dict[str, float]] = {}
    for row in run["peers"]:
        name = row["name"].removeprefix("transformers ")
        found.setdefault(row["requests"], {})[name] = row["tokens_per_s"]
    return found


def _peers_alt(run: dict) -> str:
    rows = ". ".join(
        f"{requests}: " + "; ".join(f"{name} {number(rate)}" for name, rate in ways.items())
        for requests, ways in rates(run).items()
    )
    return f"Bars of tokens a second, our engine and transformers' own ways. {rows}."


@recorded_figure(
    "serving",
    ["peers/engine", "peers/transformers generate_batch"],
    alt=_peers_alt,
    name="engine-peers",
    title="Continuous batching pays where texts end at different times",
    answers=[],
    notebook="10",
    sources=[MADE_BY],
)
def engine_peers() -> Figure:
    run = recorded("serving")
    found = rates(run)
    title = "Continuous batching pays where texts end at different times"
    fig, axes = chart(title, len(found), height=4.6)
    most = max(len(ways) for ways in found.values())
    for ax, (requests, ways) in zip(axes, found.items(), strict=True):
        colors = [MEASURED if name == "engine" else tint(MUTED, 0.5) for name in ways]
        drawn = ax.barh(range(len(ways)), ways.values(), color=colors, height=0.66)
        ax.bar_label(drawn, [number(rate) for rate in ways.values()], padding=5, size=14)
        names = [name.replace("generate, batches of", "generate,\nbatches of") for name in ways]
        ax.set_yticks(range(len(ways)), ["ours" if n == "engine" else n for n in names], size=14)
        ax.set(xlim=(0, 1.25 * max(ways.values())), ylim=(most - 0.45, -0.55))
        ax.set_xlabel("tokens a second")
        ax.set_title(requests, size=15, weight="normal")
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    caption(fig, dtype=run["dtype"], shapes=f"{MODEL}; generate and generate_batch: "
            "transformers', told how many tokens each wants", source=where(run))  # fmt: skip
    return fig
