"""Still figures of notebook 08, as recorded: what checking costs, and Chen's panels, twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from lecture_util.classroom.figures.diagram import beside, chart, headline
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    number,
    shade,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MADE_BY = "measured: benchmarks/speculative.py, its date in its results"
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
BATCHES = ("1", "8", "32")
NAMES = {"ngram": "n-gram", "early_exit": "early exit", "medusa": "Medusa", "eagle": "EAGLE"}


def where(run: dict) -> str:
    """The script, its date and the machine it ran on."""
    return f"benchmarks/speculative.py, {run['date']}, {run['machine']['hardware']}"


def ends(ax: Axes, labels: Sequence[tuple[float, float, str, object]], gap: float = 17) -> None:
    """Write (x, y, text, color) right of points, moved up where they would meet (gap in points)."""
    ax.figure.canvas.draw()  # final positions
    scale = 72 / ax.figure.dpi
    spots = [ax.transData.transform((x, y))[1] * scale for x, y, *_ in labels]
    last = None
    for spot, (x, y, text, color) in sorted(zip(spots, labels, strict=True), key=lambda s: s[0]):
        place = spot if last is None else max(spot, last + gap)
        beside(ax, x, y, text, color, xytext=(11, place - spot), size=14)
        last = place


def _cost_alt(run: dict) -> str:
    def row(dtype: str, B: str) -> str:
        entry = run["verify_cost"][dtype][B]
        costs = dict(zip(entry["T"], entry["ms"], strict=True))
        return f"B={B} " + ", ".join(f"{costs[T] / costs[1]:.2f}" for T in entry["T"][-4:])

    ends_at = run["verify_cost"]["float32"]["1"]["T"][-4:]
    rows = ". ".join(
        f"{short}: " + "; ".join(row(dtype, B) for B in BATCHES) for dtype, short in DTYPES.items()
    )
    return (
        "Time of one forward over T tokens, over that of one token, both logarithmic, with a "
        f"diagonal for T separate forwards. At T = {', '.join(map(str, ends_at))}. {rows}."
    )


@recorded_figure(
    "speculative",
    [f"verify_cost/{dtype}/{B}" for dtype in DTYPES for B in BATCHES],
    alt=_cost_alt,
    name="verification-cost",
    title="Checking T tokens costs less than making T; a batch eats the gain",
    answers=[],
    notebook="08",
    sources=[MADE_BY],
)
def verification_cost() -> Figure:
    run = recorded("speculative")
    title = "Checking T tokens costs less than making T; a batch eats the gain"
    fig, axes = chart(title, 2, 5.6)
    costs, top = run["verify_cost"], 0.0
    for ax, (dtype, short) in zip(axes, DTYPES.items(), strict=True):
        labels = []
        for B, color in zip(BATCHES, (MEASURED, CACHE, MUTED), strict=True):
            T, ms = costs[dtype][B]["T"], costs[dtype][B]["ms"]
            over = [value / ms[T.index(1)] for value in ms]
            ax.plot(T, over, "-o", color=color)
            labels.append((T[-1], over[-1], f"B={B}: {over[-1]:.1f}", color))
            top = max(top, T[-1], *over)
        ax.plot([1, T[-1]], [1, T[-1]], color=INK, lw=1.4)
        ax.text(3.3, 4.1, "T forwards", size=14, ha="right", va="bottom", rotation=0)
        ax.axhline(1, ls="--", color=PREDICTED)
        ax.text(T[-1], 0.97, "if only weights were read", size=13, ha="right", va="top",
                color=shade(PREDICTED))  # fmt: skip
        ax.set(xscale="log", yscale="log", xlim=(0.92, T[-1] * 1.08), xlabel="T, tokens read")
        ax.set_xticks(T, T)
        ax.set_title(f"{short}: ms over that of T = 1", size=15)
        ax.minorticks_off()
        ax.labels_due = labels
    for ax in axes:
        ax.set_ylim(0.75, top * 1.15)
        ax.set_yticks([1, 2, 5, 10, 20], [1, 2, 5, 10, 20])
    for ax in axes:
        ends(ax, ax.labels_due)
    one = ", ".join(f"{short} {number(costs[dtype]['1']['ms'][0])} ms" for dtype, short in
                    DTYPES.items())  # fmt: skip
    caption(fig, shapes=f"SmolLM2-135M, B rows of 256 cached tokens; B=1, T=1: {one}",
            source=where(run))  # fmt: skip
    return fig


# Read off Chen's plot: ms a loop from K = 0, and the share of K = 1 to 7 guesses that is kept.
CHEN = "Chen et al. 2023, arXiv:2302.01318"
CHEN_LOOP_MS = (14.1, 16.3, 18.2, 20.3, 22.8, 25.0, 27.1, 28.5)
CHEN_KEPT = {
    "HumanEval": (0.945, 0.89, 0.84, 0.80, 0.75, 0.71, 0.68),
    "XSum": (0.875, 0.78, 0.70, 0.62, 0.55, 0.50, 0.455),
}
LENGTH = 128  # tokens of the third panel

Curves = dict[str, list[tuple[int, float]]]


def chen_curves() -> tuple[Curves, Curves, Curves]:
    """What is kept, ms a loop, ms for 128 tokens; the last computed from the other two."""
    kept = {name: list(enumerate(shares, 1)) for name, shares in CHEN_KEPT.items()}
    loop = {"": list(enumerate(CHEN_LOOP_MS))}
    total = {
        name: [(0, LENGTH * CHEN_LOOP_MS[0])]
        + [(K, LENGTH * CHEN_LOOP_MS[K] / (1 + K * share)) for K, share in points]
        for name, points in kept.items()
    }
    return kept, loop, total


def our_curves(run: dict) -> tuple[Curves, Curves, Curves]:
    """The same three of each draft, as measured."""
    keys = ("accepted_share", "loop_ms", f"ms_per_{LENGTH}_tokens")
    return tuple(
        {
            NAMES.get(name, name): [
                (entry["gamma"], entry[key])
                for entry in sorted(entries, key=lambda entry: entry["gamma"])
                if entry["gamma"] or key != "accepted_share"  # of no guesses there is no share
            ]
            for name, entries in run["chen"].items()
        }
        for key in keys
    )


def _panels_alt(run: dict) -> str:
    ours = []
    for name, kept, _, total in _named(our_curves(run)):
        best, least = min(total, key=lambda point: point[1])
        first, last = kept[0][1], kept[-1][1]
        ours.append(f"{name}: kept {first:.2f} to {last:.2f}, best {number(least)} ms at K={best}")
    return (
        "Two rows of three panels against K guesses: share kept, ms a loop, ms for "
        f"{LENGTH} tokens. Chen, read off: HumanEval kept 0.945 to 0.68, XSum 0.875 to 0.455, loop "
        f"14.1 to 28.5 ms. Ours, {'; '.join(ours)}."
    )


def _named(curves: tuple[Curves, Curves, Curves]) -> list[tuple]:
    return [(name, *(kind[name] for kind in curves)) for name in curves[0]]


@recorded_figure(
    "speculative",
    ["chen"],
    alt=_panels_alt,
    name="chen-panels",
    title="More guesses: a smaller share is kept, and every loop takes longer",
    answers=["speculative-sampling-stats"],
    notebook="08",
    sources=[f"{CHEN}, read off its plot (≈)", MADE_BY],
)
def chen_panels() -> Figure:
    run = recorded("speculative")
    title = "More guesses: a smaller share is kept, and every loop takes longer"
    fig, rows = plt.subplots(2, 3, figsize=(10.4, 7.4), layout="constrained", sharex=True)
    headline(fig, title)
    due = []
    for axes, curves, colors, who in (
        (rows[0], chen_curves(), (PREDICTED, ACCENT), "Chen, ≈"),
        (rows[1], our_curves(run), (MEASURED, GUESS, CACHE, ACCENT), "ours"),
    ):
        names = list(curves[0])
        for ax, kind in zip(axes, curves, strict=True):
            labels = []
            for name, points in kind.items():
                color = colors[names.index(name) % len(colors)] if name in names else INK
                ax.plot(
                    *zip(*points, strict=True), "-o" if who == "ours" else "-", color=color, ms=5
                )
                if ax is axes[0]:
                    labels.append((*points[-1], name, color))
                elif ax is axes[2]:
                    best = min(points, key=lambda point: point[1])
                    ax.plot(*best, "o", color=color, ms=12, mfc="none", mew=2)
                    labels.append((*points[-1], f"{best[1]:,.0f}, K={best[0]}", color))
            due.append((ax, labels))
            ax.set_ylim(0, 1.12 * max(y for points in kind.values() for _, y in points))
            ax.yaxis.set_major_locator(MaxNLocator(4))
        axes[0].set_ylim(0, 1.05)
        axes[0].set_ylabel(who, size=16)
    heads = ("kept of K guesses (not α)", "ms a loop", f"ms for {LENGTH} tokens, best")
    for ax, head in zip(rows[0], heads, strict=True):
        ax.set_title(head, size=15, weight="normal")
    for ax in rows[1]:
        ax.set(xlabel="K, guesses a loop", xticks=range(0, 8, 2))
    for ax, labels in due:
        ends(ax, labels)
    dtype = DTYPES[next(iter(run["chen"].values()))[0]["dtype"]]
    caption(fig, shapes="kept over all guesses, those after a rejected one too; top right computed "
            f"(the paper: ≈ 735 for HumanEval, K=4); ours: {dtype}, n-gram on tasks that repeat "
            "their prompt, others on questions", source=f"{CHEN}; {where(run)}")  # fmt: skip
    return fig
