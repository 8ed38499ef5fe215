"""Still figures of notebook 04: DeepSeek-V2's two comparisons of attention variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import beside, chart
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
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

PAPER = "DeepSeek-V2, arXiv:2405.04434"
BENCHMARKS = ("BBH", "MMLU", "C-Eval", "CMMLU")
TABLE_8 = {  # 7B dense
    "MQA": (33.2, 37.9, 30.0, 34.6),
    "GQA-8": (35.6, 41.2, 37.7, 38.4),
    "MHA": (37.0, 45.2, 42.9, 43.5),
}
TABLE_9 = {  # mixtures of experts: thousands of numbers cached a token, then scores
    "small": {"MHA": (110.6, (37.9, 48.7, 51.6, 52.3)), "MLA": (15.6, (39.0, 50.0, 50.9, 53.4))},
    "large": {"MHA": (860.2, (46.6, 57.5, 57.9, 60.7)), "MLA": (34.6, (50.7, 59.0, 59.2, 62.5))},
}


@figure(
    name="mla-table-8",
    title="Dense 7B: fewer KV heads score lower (no variance reported)",
    answers=["mla-accuracy"],
    notebook="04",
    alt="Dots on four lines, scores of a dense 7B model with MQA, GQA-8 and MHA. BBH 33.2, 35.6, "
    "37.0; MMLU 37.9, 41.2, 45.2; C-Eval 30.0, 37.7, 42.9; CMMLU 34.6, 38.4, 43.5. The order is "
    "the same on all four; no variance is reported.",
    sources=[f"{PAPER}, Table 8"],
)
def mla_table_8() -> Figure:
    fig, ax = chart("Dense 7B: fewer KV heads score lower (no variance reported)")
    for (name, scores), color in zip(TABLE_8.items(), (ACCENT, CACHE, PREDICTED), strict=True):
        _dots(ax, scores, color)
        ha = "left" if name == "MHA" else "right" if name == "GQA-8" else "center"
        beside(ax, scores[0], 0, name, color, weight="bold", size=16,
               xytext=({"MHA": -10, "GQA-8": 22}.get(name, 0), 26), ha=ha)  # fmt: skip
    _benchmarks(ax, list(zip(*TABLE_8.values(), strict=True)))
    ax.set(xlim=(28, 47), xticks=range(30, 46, 5), xlabel="score (axis cut)")
    caption(ax, source=f"{PAPER}, Table 8")
    return fig


@figure(
    name="mla-table-9",
    title="MLA scores above MHA in 7 of 8 rows, no variance reported",
    answers=["mla-accuracy2"],
    notebook="04",
    alt="Two panels of dots, MHA against MLA. Small mixture of experts, 110.6K against 15.6K "
    "numbers cached a token: BBH 37.9, 39.0; MMLU 48.7, 50.0; C-Eval 51.6, 50.9, a loss; CMMLU "
    "52.3, 53.4. Large, 860.2K against 34.6K: 46.6, 50.7; 57.5, 59.0; 57.9, 59.2; 60.7, 62.5. No "
    "variance is reported.",
    sources=[f"{PAPER}, Table 9", "ratios of the cache computed"],
)
def mla_table_9() -> Figure:
    fig, axes = chart("MLA scores above MHA in 7 of 8 rows, no variance reported", columns=2)
    for ax, (size, variants) in zip(axes, TABLE_9.items(), strict=True):
        (big, mha), (little, mla) = variants["MHA"], variants["MLA"]
        _dots(ax, mha, PREDICTED, side=-1, against=mla)
        _dots(ax, mla, MEASURED, side=-1, against=mha)
        _benchmarks(ax, list(zip(mha, mla, strict=True)))
        if size == "large":
            ax.tick_params(axis="y", labelleft=False)  # the rows of its neighbour
        if size == "small":
            for name, scores, color in (("MHA", mha, PREDICTED), ("MLA", mla, MEASURED)):
                beside(ax, scores[0], 0, name, color, weight="bold", size=15,
                       xytext=(0, 14), ha="right" if name == "MHA" else "left")  # fmt: skip
        ax.set_title(f"{size}: {big:g}K → {little:g}K numbers\na token, {big / little:.0f}× fewer",
                     size=14, weight="normal")  # fmt: skip
        low, high = min(mha + mla), max(mha + mla)
        ax.set(xlim=(low - 3, high + 3), xlabel="score (axis cut)")
        ax.set_xticks(range(40 if size == "small" else 45, int(high) + 1, 5))
    axes[0].text(51.25, 2.42, "MLA loses", ha="center", va="center", size=13, weight="bold")
    caption(fig, shapes="active: 2.5B and 2.4B, 25.0B and 21.5B parameters; large "
            "MHA: 14,336 numbers a layer (57× is for V2's 128 heads)",
            source=f"{PAPER}, Table 9")  # fmt: skip
    return fig


def _dots(
    ax: Axes, scores: Sequence[float], color: str, side: int = 0, against: Sequence[float] = ()
) -> None:
    """A dot a benchmark with its number: below it, or on the side away from its rival."""
    ax.plot(scores, range(len(scores)), "o", color=color, ms=13, zorder=3)
    for y, score in enumerate(scores):
        if side:
            right = score > against[y]
            beside(ax, score, y, f"{score}", xytext=(11 if right else -11, 0),
                   ha="left" if right else "right", size=13)  # fmt: skip
        else:
            beside(ax, score, y, f"{score}", xytext=(0, -12), ha="center", va="top", size=13)


def _benchmarks(ax: Axes, rows: Sequence[Sequence[float]]) -> None:
    """One line a benchmark, first on top, spanned from its lowest score to its highest."""
    for y, scores in enumerate(rows):
        ax.plot([min(scores), max(scores)], [y, y], color=tint(MUTED, 0.5), lw=3, zorder=2)
    ax.set_yticks(range(len(rows)), BENCHMARKS, size=15, color=INK)
    ax.set_ylim(len(rows) - 0.4, -0.8)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
