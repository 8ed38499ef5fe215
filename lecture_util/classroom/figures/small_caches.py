"""Still figure of notebook 04: what small models of each kind learned, as recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import beside, chart
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import PALETTE, caption, claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@cache
def recorded(name: str) -> dict:
    """What a script of benchmarks/ wrote to its results.

    Raises: FileNotFoundError saying which script makes it.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(
            f"no recorded run {path.name}: run benchmarks/{name}.py in the repository"
        )
    return json.loads(path.read_text(encoding="utf-8"))


@figure(
    name="small-caches",
    title="Small models on one budget: windows alone never recall",
    answers=[],
    notebook="04",
    alt="Left, pairs recalled against training steps for seven small models: every kind with "
    "a layer that sees everything passes 0.97 within 400 steps, windows of 4 stay near 0.06. "
    "Right, nats a byte on English against numbers held: on this short budget windows (1.40) and "
    "the stacks with 1 global layer in 3 (1.39, 1.40) lie below MHA, MQA (1.45), MLA and CLA2 "
    "(1.49).",
    sources=["measured: benchmarks/small_caches.py, seeds and date in its results"],
)
def small_caches() -> Figure:
    run = recorded("small_caches")
    fig, (left, right) = chart("Small models on one budget: windows alone never recall", 2)
    for (name, entry), color in zip(run["variants"].items(), [*PALETTE, "0.45"], strict=False):
        recall, nats = entry["recall"], [curve[-1] for curve in entry["text"]["nats"]]
        seeds = list(zip(*recall["accuracy"], strict=True))
        middle = [sorted(step)[len(step) // 2] for step in seeds]
        left.fill_between(recall["steps"], list(map(min, seeds)), list(map(max, seeds)),
                          color=color, alpha=0.15, lw=0)  # fmt: skip
        left.plot(recall["steps"], middle, color=color, lw=2.2, label=name)
        held = entry["numbers_held"]["128"]
        right.plot([held] * len(nats), nats, "o", color=color, ms=9)
        left_of = (
            {"xytext": (-9, 0), "ha": "right"} if held > 2e4 and "1 in 3 g" not in name else {}
        )
        if name.startswith("1 in 3, "):
            left_of = {"xytext": (0, -24), "ha": "center"}  # clear of its neighbour's points
        beside(right, held, sum(nats) / len(nats), name, color, size=12, **left_of)
    left.set(xlabel="training steps", ylabel="pairs recalled", ylim=(0, 1.03))
    left.legend(fontsize=11)
    right.set(xscale="log", xlabel="numbers held for 128 tokens", ylabel="nats a byte (axis cut)")
    claim(left, "Recall: middle and range of 3 seeds")
    claim(right, "English, byte by byte")
    caption(left, shapes=run["shape"], source=f"benchmarks/small_caches.py, {run['date']}")
    return fig
