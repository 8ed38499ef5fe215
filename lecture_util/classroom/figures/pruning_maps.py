"""Still figure of notebook 07, as recorded: how much every layer, head and neuron matters."""

from __future__ import annotations

from bisect import bisect
from itertools import pairwise
from statistics import median, mode
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from lecture_util.classroom.figures.diagram import cells, headline
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import INK, MEASURED, PREDICTED, caption, number, tint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = (0.8, 1.25, 2, 5, 20)
SHADES = [tint(PREDICTED, share) for share in (0.06, 0.2, 0.36, 0.55, 0.78, 1)]


def _alt(run: dict) -> str:
    maps = run["importance"]
    influence, without = maps["block influence"], maps["perplexity without"]
    least = ", ".join(str(layer) for layer in influence["by_layer_order"][:4])
    neurons = [row[-1] / median(row) for row in maps["neurons"]["deciles_LQ"]]
    heads = [max(row) / median(row) for row in maps["heads"]["scores_LN"]]
    return (
        f"Four maps, a row a layer. Influence: layers 0, {len(neurons) - 1} and 1 highest, {least} "
        f"lowest. Perplexity without a layer: {without['whole']:.1f} with all, from "
        f"{min(without['scores_L']):.1f} up, {number(max(without['scores_L']))} at most. Heads: "
        f"the best of a layer has at most {max(heads):.1f} times the median. Neurons: in most "
        f"layers nine tenths are alike, the best has {min(neurons):.0f} to {max(neurons):.0f} "
        "times the median."
    )


@recorded_figure(
    "pruning",
    [
        f"importance/{name}"
        for name in ("block influence", "perplexity without", "heads", "neurons")
    ],
    alt=_alt,
    name="importance-maps",
    title="The first and last layers matter most; a few neurons stand far out",
    answers=[],
    notebook="07",
    sources=["measured: benchmarks/pruning.py, its date and seed in its results"],
)  # fmt: skip
def importance_maps() -> Figure:
    run = recorded("pruning")
    maps = run["importance"]
    fig = plt.figure(figsize=(10.4, 7.2), layout="constrained")
    grid = fig.add_gridspec(2, 4, width_ratios=(1.2, 1.2, 1, 1.2), height_ratios=(1, 0.09))
    axes = [fig.add_subplot(grid[0, k]) for k in range(4)]
    headline(fig, "The first and last layers matter most; a few neurons stand far out")
    influence, without = maps["block influence"], maps["perplexity without"]
    L, least = len(influence["scores_L"]), influence["by_layer_order"][:8]
    for ax, entry in ((axes[0], influence), (axes[1], without)):
        for layer, score in enumerate(entry["scores_L"]):
            color = MEASURED if layer in least else tint(PREDICTED, 0.7)
            ax.plot(score, layer + 0.5, "o", color=color, mec="none", ms=9, zorder=3)
        ax.set(xscale="log", ylim=(0, L))
        ax.minorticks_off()
    axes[0].set_xlim(0.01, 2)
    axes[0].set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes[1].axvline(without["whole"], color=INK, lw=1.6)
    axes[1].set_xlim(without["whole"] / 1.5, 2 * max(without["scores_L"]))
    axes[1].set_xticks([100, 10_000], ["100", "10,000"])
    _map(axes[2], maps["heads"]["scores_LN"])
    _map(axes[3], maps["neurons"]["deciles_LQ"])
    axes[2].set_xticks([0.5, 4.5, 8.5], [0, 4, 8])
    axes[3].set_xticks([0.5, 5.5, 10.5], ["least", "median", "most"])
    names = ("influence", "perplexity\nwithout it", "heads", "neurons")
    for ax, name in zip(axes, names, strict=True):
        ax.set_title(name, size=16)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="both", length=0)
        ax.set_yticks([layer + 0.5 for layer in range(0, L, 5)],
                      range(0, L, 5) if ax is axes[0] else [])  # fmt: skip
    axes[0].set_ylabel("layer", size=15)
    names = [f"< {STEPS[0]}", *(f"{a:g}–{b:g}" for a, b in pairwise(STEPS)), f"> {STEPS[-1]}"]
    keys = [Patch(facecolor=shade, label=name) for shade, name in zip(SHADES, names, strict=True)]
    legend = fig.add_subplot(grid[1, :])
    legend.axis("off")
    legend.legend(handles=keys, ncols=6, loc="center right", columnspacing=1, handlelength=1.1,
                  handletextpad=0.4, title="heads and neurons: times the layer's median",
                  title_fontsize=13, alignment="right", borderaxespad=0)  # fmt: skip
    caption(fig, shapes="SmolLM2-135M; red: the 8 layers of least influence; neurons by deciles",
            source=f"benchmarks/pruning.py, {run['date']}")  # fmt: skip
    return fig


def _map(ax: Axes, rows: Sequence[Sequence[float]]) -> None:
    """Times a row's median as shades, layer 0 at the bottom; the commonest shade as one box."""
    steps = [[bisect(STEPS, value / median(row)) for value in row] for row in reversed(rows)]
    common = mode(step for row in steps for step in row)
    box = Rectangle((0, 0), len(rows[0]), len(rows), facecolor=SHADES[common], lw=0, zorder=1)
    ax.add_patch(box)
    shades = [[None if step == common else SHADES[step] for step in row] for row in steps]
    cells(ax, 0, len(rows), shades, 1, gap=0.8)
    ax.set(xlim=(0, len(rows[0])), ylim=(0, len(rows)))
