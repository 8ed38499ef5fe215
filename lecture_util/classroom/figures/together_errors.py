"""Still figure of notebook 12, as recorded: how far off each row's predictions were."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from lecture_util.classroom.figures.diagram import headline
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import INK, PREDICTED, caption, tint
from lecture_util.classroom.figures.together_runs import MADE_BY, MODEL, NEEDS, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTITIES = {"tokens_per_s": "tokens a second", "ttft_s": "time to first token",
              "memory_bytes": "memory"}  # fmt: skip
TICKS = (0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10)


def ratios(run: dict, key: str) -> list[float]:
    """Predicted over measured, row by row."""
    return [row[f"predicted_{key}"] / row[key] for row in run["rows"]]


def typical(run: dict, key: str) -> float:
    """By how much half of the predictions are off at most."""
    return median(abs(ratio - 1) for ratio in ratios(run, key))


def _errors_alt(run: dict) -> str:
    words = []
    for key, name in QUANTITIES.items():
        found = ratios(run, key)
        words.append(
            f"{name} {min(found):.2f} to {max(found):.2f}, half within {typical(run, key):.1%}"
        )
    return (
        f"Three panels, a dot for each of {len(run['rows'])} rows: predicted over measured, 1 is "
        f"right. {'; '.join(words)}.".replace("%", " percent")
    )


@recorded_figure(
    "together",
    NEEDS,
    alt=_errors_alt,
    name="prediction-errors",
    title="Bytes are predicted better than seconds",
    answers=[],
    notebook="12",
    sources=[MADE_BY, "predicted: lecture_util.together.predict, of the same record"],
)
def prediction_errors() -> Figure:
    run = recorded("together")
    fig, axes = plt.subplots(1, 3, figsize=(10.4, 6.9), layout="constrained", sharey=True)
    headline(fig, "Bytes are predicted better than seconds")
    labels = [row["label"] for row in run["rows"]]
    every = [ratio for key in QUANTITIES for ratio in ratios(run, key)]
    low, high = min(0.62, min(every) / 1.1), max(1.62, max(every) * 1.1)
    for ax, (key, name) in zip(axes, QUANTITIES.items(), strict=True):
        ax.axvspan(1 / 1.1, 1.1, color=tint(PREDICTED, 0.15), lw=0)
        ax.axvline(1, color=INK, lw=1.6)
        found = ratios(run, key)
        ax.hlines(range(len(found)), 1, found, color=tint(PREDICTED, 0.5), lw=2)
        ax.plot(found, range(len(found)), "o", color=PREDICTED, ms=9)
        ax.set(xscale="log", xlim=(low, high), ylim=(len(labels) - 0.4, -0.6))
        ticks = [tick for tick in TICKS if low < tick < high]
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel("predicted / measured")
        ax.set_title(f"{name}\nhalf within {typical(run, key):.1%}", size=14.5)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(labels)), labels, size=13.5)
    copies = "; memory measured counts second copies that a CPU's 4-bit operator makes"
    shapes = f"{MODEL}; blue: within 10%" + copies * (run["device"] == "cpu")
    caption(fig, device=run["device"], shapes=shapes, source=where(run))
    return fig
