"""Still figures of notebook 06, as recorded: bits against quality, and why AWQ scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from lecture_util.classroom.figures.diagram import beside, chart, headline
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    ACCENT,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    number,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AWQ = "Lin et al. 2023, arXiv:2306.00978"
MADE_BY = "measured: benchmarks/quantization.py, its date in its results"
# Table 1 there, OPT-6.7B at INT3-g128 on WikiText; its fp16 belongs to this table alone.
TABLE_1 = {
    "unquantized": 10.86,
    "all rounded": 23.54,
    "1% kept, at random": 24.23,
    "1% kept, by weight": 22.37,
    "1% kept, by activation": 11.39,
}
EIGHT = {
    "fp32": "fp32",
    "bf16": "bf16",
    "int8 rows, weights only": "int8, weights only",
    "int8 rows, W8A8 absmax": "int8, activations too",
    "LLM.int8, threshold 6": "LLM.int8()",
    "bitsandbytes int8, threshold 6": "bitsandbytes' int8",
    "e4m3 rows": "e4m3, weights only",
}
FEW = {
    "NF4, blocks of 64": "NF4",
    "NF4, double quantized": "NF4, doubled",
    "bitsandbytes NF4": "",
    "RTN int4 g48": "rounded, int4",
    "AWQ int4 g48": "AWQ int4",
    "RTN int3 g48": "rounded, int3",
    "AWQ int3 g48": "AWQ int3",
}
SCALED = ("scaled, all rounded", "scaled and clipped (AWQ)")


def _source(run: dict) -> str:
    return f"benchmarks/quantization.py, {run['date']}"


def _awq_alt(run: dict) -> str:
    ours = run["lecture_picture"]["perplexity"]
    theirs = "; ".join(f"{name} {value}" for name, value in TABLE_1.items())
    mine = "; ".join(f"{name} {ours[name]:.2f}" for name in (*TABLE_1, *SCALED))
    return (
        f"Bars of perplexity at 3 bits. Published, OPT-6.7B in groups of 128: {theirs}. Ours, "
        f"SmolLM2-135M in groups of 48: {mine}."
    )


@recorded_figure(
    "quantization",
    [*(f"lecture_picture/perplexity/{name}" for name in (*TABLE_1, *SCALED))],
    alt=_awq_alt,
    name="awq",
    title="Protect the 1% that meet large activations, or scale and round all",
    answers=["awq-schema"],
    notebook="06",
    sources=[f"{AWQ}, Table 1", MADE_BY],
)
def awq() -> Figure:
    run = recorded("quantization")
    ours = run["lecture_picture"]["perplexity"]
    title = "Protect the 1% that meet large activations, or scale and round all"
    fig, (left, right) = chart(title, 2, 5.8)
    names = [*TABLE_1, *SCALED]
    for ax, values in ((left, TABLE_1), (right, ours)):
        for y, name in enumerate(names):
            if name in values:
                _bar(ax, y, name, values[name])
        ax.axvline(values["unquantized"], color=INK, lw=1.4, ls=(0, (4, 3)), zorder=1)
        ax.set(ylim=(len(names) - 0.4, -0.6), xlabel="perplexity")
        ax.set_xlim(0, 1.2 * max(values[name] for name in names if name in values))
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    left.text(1, 5.5, "not in this table", size=14, color=MUTED, va="center")
    left.set_yticks(range(len(names)), names, size=14)
    right.set_yticks(range(len(names)), [""] * len(names))
    left.set_title("published: OPT-6.7B, int3 g128", size=14, weight="normal")
    right.set_title("ours: SmolLM2-135M, int3 g48", size=14, weight="normal")
    caption(fig, shapes="the paper's Table 7 evaluates anew (fp16 12.29) and is left out",
            source=f"{AWQ}, Table 1; {_source(run)}")  # fmt: skip
    return fig


def _bar(ax: Axes, y: float, name: str, value: float) -> None:
    good = name in ("1% kept, by activation", *SCALED)
    color = INK if name == "unquantized" else MEASURED if good else tint(MEASURED, 0.45)
    ax.barh(y, value, color=color, height=0.7, zorder=2)
    beside(ax, value, y, f"{value:.2f}", size=15, weight="bold" if good else "normal")


def _bits_alt(run: dict) -> str:
    rows = {row["name"]: row for row in run["rows"]}
    few = "; ".join(
        f"{label} {rows[name]['bits_per_weight']:.3g} bits, {number(rows[name]['perplexity'])}"
        for name, label in FEW.items()
        if label
    )
    eight = [rows[name]["perplexity"] for name in EIGHT if name not in ("fp32", "bf16")]
    return (
        f"Perplexity against bits a weight. fp32 {rows['fp32']['perplexity']:.2f}, bf16 "
        f"{rows['bf16']['perplexity']:.2f}; {len(eight)} methods of 8 bits from {min(eight):.2f} "
        f"to {max(eight):.2f}. Fewer bits: {few}."
    )


@recorded_figure(
    "quantization",
    [*(f"rows/{name}" for name in (*EIGHT, *FEW)), "held"],
    alt=_bits_alt,
    name="bits-and-perplexity",
    title="8 bits cost next to nothing; at 4 and 3 the method decides",
    answers=[],
    notebook="06",
    sources=[MADE_BY],
)
def bits_and_perplexity() -> Figure:
    run = recorded("quantization")
    rows = {row["name"]: row for row in run["rows"]}
    fig, (low, high) = plt.subplots(
        1, 2, figsize=(10.4, 6.2), layout="constrained", gridspec_kw={"width_ratios": (1.35, 1)}
    )
    headline(fig, "8 bits cost next to nothing; at 4 and 3 the method decides")
    whole = rows["fp32"]["perplexity"]
    for name, text in FEW.items():
        kind, _, label = name.partition(" ")
        x, y = rows[name]["bits_per_weight"], rows[name]["perplexity"]
        if kind == "AWQ":
            start = rows[f"RTN {label}"]["perplexity"]
            low.annotate("", (x, y), (x, start), arrowprops={"arrowstyle": "-|>", "color": GUESS,
                         "lw": 2.4, "shrinkA": 8, "shrinkB": 7})  # fmt: skip
        color = {"AWQ": GUESS, "RTN": MEASURED}.get(kind, ACCENT)
        if not text:
            low.plot(x, y, "o", color=INK, ms=17, mfc="none", mew=1.4, zorder=2)
            continue
        low.plot(x, y, "o", color=color, ms=11, zorder=3)
        if name == "NF4, blocks of 64":  # its label stands at the doubled one's point
            continue
        if name == "NF4, double quantized":
            text = f"NF4 {number(rows['NF4, blocks of 64']['perplexity'])}\ndoubled"
        left = kind == "NF4,"
        beside(low, x, y, f"{text} {number(y)}", color, size=14,
               xytext=(-10 if left else 10, 0), ha="right" if left else "left")  # fmt: skip
    low.axhline(whole, color=INK, lw=1.6, zorder=1)
    beside(low, 3, whole, f"fp32 {number(whole)}", xytext=(4, -12))
    top = max(rows[name]["perplexity"] for name in FEW)
    low.set(yscale="log", xlim=(2.2, 6.8), xticks=range(3, 7))
    low.set(xlabel="bits a weight, scales included", ylabel="perplexity")
    low.set_yticks(ticks := [20, 25, 30, 40, 50, 60], ticks)
    low.minorticks_off()
    low.set_ylim(whole / 1.12, top * 1.12)
    for y, name in enumerate(EIGHT):
        color, value = INK if name == "fp32" else PREDICTED, rows[name]["perplexity"]
        high.plot([whole, value], [y, y], color=tint(color, 0.5), lw=3)
        high.plot(value, y, "o", color=color, ms=12)
        beside(high, value, y, f"{value:.2f}", size=14, xytext=(11, 0))
    names = [f"{label}\n{rows[name]['bits_per_weight']:.4g} bits" for name, label in EIGHT.items()]
    high.set_yticks(range(len(EIGHT)), names, size=13)
    values = [rows[name]["perplexity"] for name in EIGHT]
    margin = max(values) - min(values)
    high.set(ylim=(len(EIGHT) - 0.4, -0.6), xlabel="perplexity (axis cut)")
    high.set_xlim(min(values) - 0.2 * margin, max(values) + 0.45 * margin)
    high.grid(axis="y", visible=False)
    high.tick_params(axis="y", length=0)
    caption(fig, shapes=f"SmolLM2-135M, {run['held']['windows']} held-out windows of "
            f"{run['held']['T']}; groups of 48; circle: bitsandbytes' own NF4; all from weights "
            "that were once Q4_1", source=_source(run))  # fmt: skip
    return fig
