"""Still figures of notebook 06: the bits of each format, the numbers they reach, NF4's levels."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np

from lecture_util.classroom.figures.diagram import beside, canvas, cells, chart, headline, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    WEIGHTS,
    caption,
    tint,
)
from lecture_util.quantization.formats import FORMATS, int_range, step, values
from lecture_util.quantization.nf4 import NF4_LEVELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FP8 = "Micikevicius et al. 2022, arXiv:2209.05433"
QLORA = "Dettmers et al. 2023, arXiv:2305.14314"
OFFSET = 0.9677083  # the quantile at NF4's level 1, halfway between 1 - 1/30 and 1 - 1/32
SCALE_BITS = ((32 / 64,), (8 / 64, 32 / (64 * 256)))  # of a weight; plain, and quantized again
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plain(value: float) -> str:
    """A positive number readable from afar: 448, 57,344, 0.125, 6.0 × 10⁻⁸."""
    if value >= 1e6 or value < 1e-4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"


@figure(
    name="number-formats",
    title="Exponent bits buy range, mantissa bits buy fine steps",
    answers=["fp8 picture"],
    notebook="06",
    alt="Eight rows of boxes, one a bit. Sign, exponent, mantissa: fp32 1, 8, 23; fp16 1, 5, 10; "
    "bf16 1, 8, 7; e4m3 1, 4, 3; e5m2 1, 5, 2. Plain codes: int8, int4 and NF4. Largest, and step "
    "at 1: fp16 65,504 and 0.000977; bf16 3.4e38 and 0.00781; e4m3 448 and 0.125; e5m2 57,344 and "
    "0.25; int8 -128 to 127, int4 -8 to 7, both times a scale; NF4 16 uneven levels.",
    sources=["lecture_util.quantization.formats: FORMATS, step, int_range", FP8],
)
def number_formats() -> Figure:
    fig, ax = canvas(16, 7.8, "Exponent bits buy range, mantissa bits buy fine steps")
    left, side, pitch, top = 1.6, 0.24, 0.78, 6.55
    columns = {"largest": 9.55, "smallest above 0": 11.75, "step at 1": 14.3}
    for name, x in columns.items():
        write(ax, x, 7.05, name, 15, ha="left", color=MUTED)
    kinds = {"sign": ACCENT, "exponent": CACHE, "mantissa": WEIGHTS, "code": GUESS}
    shades = {kind: tint(color, 0.7) for kind, color in kinds.items()}
    rows = [(name, [("sign", 1), ("exponent", f.exponent_bits), ("mantissa", f.mantissa_bits)],
             (plain(f.max), plain(f.smallest_subnormal), plain(step(1.0, f).item())))
            for name, f in FORMATS.items() if name != "e4m3fnuz"]  # fmt: skip
    for bits in (8, 4):
        low, high = int_range(bits)
        rows.append((f"int{bits}", [("code", bits)], (f"{low} … {high}".replace("-", "−"), "1",
                                                      "1")))  # fmt: skip
    above = min(level for level in _nf4() if level > 0)
    rows.append(("NF4", [("code", 4)], ("1", plain(above), "uneven")))
    for row, (name, fields, numbers) in enumerate(rows):
        y = top - pitch * row
        write(ax, 0.35, y - 0.2, name, 18, ha="left", weight="bold")
        tall, x = 0.42, left
        for kind, bits in fields:
            _bits(ax, x, y, bits, side, tall, shades[kind])
            if bits > 1:
                write(ax, x + side * bits / 2, y - tall / 2, str(bits), 15, zorder=5)
            x += side * bits
        for text, at in zip(numbers, columns.values(), strict=True):
            write(ax, at, y - 0.2, text, 16, ha="left")
        if name.startswith("int"):
            write(ax, x + 0.2, y - 0.2, "whole numbers, times a scale", 14, ha="left", color=MUTED)
        if name == "NF4":
            write(ax, x + 0.2, y - 0.2, "picks one of 16 levels, times a block's largest", 14,
                  ha="left", color=MUTED)  # fmt: skip
    for k, kind in enumerate(kinds):
        x = left + 1.95 * k
        cells(ax, x, 7.18, [[shades[kind]]], 0.26, gap=0)
        write(ax, x + 0.38, 7.05, kind, 15, ha="left", color=MUTED)
    write(ax, 0.35, 0.2, "e4m3 as H100 has it (e4m3fn): 448, not the often quoted 240, which is "
          "the fnuz variant's end", 14, ha="left", color=MUTED)  # fmt: skip
    return fig


def _bits(
    ax: Axes, x: float, top: float, bits: int, side: float, tall: float, color: object
) -> None:
    """A field of bits: one rectangle, white lines between the bits."""
    ax.add_patch(plt.Rectangle((x, top - tall), side * bits, tall, facecolor=color, lw=0, zorder=2))
    lines = [value for k in range(bits + 1) for value in (x + side * k, x + side * k, None)]
    ax.plot(lines, [top, top - tall, None] * (bits + 1), color="white", lw=2, zorder=3,
            solid_capstyle="butt")  # fmt: skip


def _nf4() -> list[float]:
    return [round(float(level), 6) for level in NF4_LEVELS]


def reachable() -> dict[str, np.ndarray]:
    """Every number of the small formats, ascending."""
    floats = {name: values(name).numpy() for name in ("e4m3", "e5m2")}
    whole = {f"int{bits}": np.arange(low, high + 1.0) for bits in (8, 4)
             for low, high in [int_range(bits)]}  # fmt: skip
    return floats | whole | {"NF4": np.array(_nf4())}


@figure(
    name="representable-values",
    title="Floats crowd around zero, integers spread evenly; e4m3 ends at 448",
    answers=["fp8 picture"],
    notebook="06",
    alt="Five rows of marks, one a number. Above, each format scaled so that its largest is 1: "
    "e5m2 and e4m3 crowd around zero, int8 is even, int4 has 16 even marks, NF4 16 marks, denser "
    "near zero. Below, positive numbers on a logarithmic line: e5m2 from 0.000015 to 57,344, e4m3 "
    "from 0.002 to 448 (its fnuz variant ends at 240), int8 1 to 127, int4 1 to 7, NF4 0.08 to 1.",
    sources=["lecture_util.quantization: formats.values, formats.int_range, nf4.NF4_LEVELS", FP8],
)
def representable_values() -> Figure:
    fig, (linear, log) = plt.subplots(2, 1, figsize=(10.4, 6.4), layout="constrained")
    headline(fig, "Floats crowd around zero, integers spread evenly; e4m3 ends at 448")
    formats = reachable()
    colors = dict(zip(formats, (PREDICTED, GUESS, MEASURED, CACHE, ACCENT), strict=True))
    log.set_xscale("log")
    for row, (name, numbers) in enumerate(formats.items()):
        _marks(linear, numbers / abs(numbers).max(), row, colors[name])
        positive = numbers[numbers > 0]
        _marks(log, positive, row, colors[name])
        end = plain(positive[-1])
        if name == "e4m3":
            end += f" (bar: fnuz's end, {FORMATS['e4m3fnuz'].max:g})"
        beside(log, positive[-1], row, end, size=14)
        least = f"{positive[0]:.6f}".rstrip("0") if positive[0] < 1e-3 else plain(positive[0])
        beside(log, positive[0], row, least, size=14, xytext=(-8, 0), ha="right")
    e4m3 = list(formats).index("e4m3")
    end = FORMATS["e4m3fnuz"].max
    log.plot([end, end], [e4m3 - 0.42, e4m3 + 0.42], color=INK, lw=2.6)
    for ax in (linear, log):
        ax.set_yticks(range(len(formats)), formats, size=15)
        ax.set_ylim(len(formats) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)
    linear.set(xlim=(-1.02, 1.02), xticks=[-1, -0.5, 0, 0.5, 1])
    linear.set_xlabel("scaled: each format's largest magnitude is 1")
    log.set(xlim=(4e-8, 3e7))
    log.set_xticks([1e-4, 1e-2, 1, 1e2, 1e4], ["0.0001", "0.01", "1", "100", "10,000"])
    log.minorticks_off()
    log.set_xlabel("the numbers above 0 themselves")
    return fig


def _marks(ax: Axes, numbers: np.ndarray, row: int, color: str) -> None:
    """One upright mark a number, all of them one line in the file; what would overlap, once."""
    where = np.log10(numbers) if ax.get_xscale() == "log" else numbers
    numbers = numbers[np.unique(np.round(where * 400), return_index=True)[1]]
    xs = [value for number in numbers.tolist() for value in (number, number, None)]
    ax.plot(xs, [row - 0.34, row + 0.34, None] * len(numbers), color=color, lw=1.1,
            solid_capstyle="butt")  # fmt: skip


@figure(
    name="nf4-levels",
    title="NF4's 16 levels lie where normally spread weights do",
    answers=[],
    notebook="06",
    alt="Left, a bell curve cut at -1 and 1 with 16 levels under it, dense near zero and sparse "
    "outside: between neighbours lie 6.7% of normal numbers left of zero and 5.8% right of it; "
    "int4's even levels below for comparison. Right, bits a weight: 4 and a 32-bit scale for 64 "
    "weights, 4.5; with the scales themselves in 8 bits, 4.127.",
    sources=["lecture_util.quantization.nf4.NF4_LEVELS", f"{QLORA}, sections 3 and 4",
             "bits: 4 + 32/64; 4 + 8/64 + 32/(64*256)"],
)  # fmt: skip
def nf4_levels() -> Figure:
    fig, (bell, bits) = chart("NF4's 16 levels lie where normally spread weights do", 2, 5.6)
    levels = _nf4()
    spread = 1 / _quantile(OFFSET)  # the outermost level, 1, is this quantile
    xs = np.linspace(-1.12, 1.12, 160)
    for k, (low, high) in enumerate(pairwise(levels)):
        inside = np.linspace(low, high, 24)
        bell.fill_between(inside, _density(inside / spread), color=tint(WEIGHTS, 0.35 + 0.4 *
                          (k % 2)), lw=0)  # fmt: skip
    bell.plot(xs, _density(xs / spread), color=INK, lw=2)
    even = [k / 7.5 - 1 for k in range(16)]
    for y, marks, color, name in ((-0.035, levels, PREDICTED, "NF4"), (-0.095, even, MEASURED,
                                                                       "even")):  # fmt: skip
        bell.plot(marks, [y] * 16, "o", color=color, ms=8)
        beside(bell, 1.0, y, name, color, xytext=(12, 0), weight="bold")
    shares = areas()
    for x, share, ha in ((-0.98, shares[0], "left"), (0.98, shares[-1], "right")):
        bell.text(x, 0.3, f"{100 * share:.1f}%\neach", size=15, ha=ha)
    bell.set(xlim=(-1.15, 1.4), ylim=(-0.13, 0.43), xticks=[-1, -0.5, 0, 0.5, 1], yticks=[])
    bell.set_xlabel("weight / largest of its block")
    bell.grid(visible=False)
    bell.spines["left"].set_visible(False)
    for x, scales in enumerate(SCALE_BITS):
        bits.bar(x, 4, color=tint(WEIGHTS, 0.75), width=0.5)
        bits.bar(x, sum(scales), bottom=4, color=CACHE, width=0.5)
        text = f"{4 + sum(scales):.3f}".removesuffix("00")
        bits.text(x, 4.1 + sum(scales), text, size=20, weight="bold", ha="center", va="bottom")
        bits.text(x, 2, "4 bits of\n16 levels", size=14, ha="center", va="center")
    bits.set(ylim=(0, 5.4), xlim=(-0.45, 1.45), ylabel="bits a weight")
    names = [f"fp32 scales:\n+{sum(SCALE_BITS[0]):g}", f"8-bit scales:\n+{sum(SCALE_BITS[1]):.3f}"]
    bits.set_xticks([0, 1], names, size=15)
    bits.grid(axis="x", visible=False)
    bits.tick_params(axis="x", length=0)
    caption(fig, shapes="percent: normal numbers between neighbouring levels; 8-bit scales: "
            "one fp32 number for every 256 of them", source=QLORA)  # fmt: skip
    return fig


def _density(z: np.ndarray) -> np.ndarray:
    return np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _quantile(share: float) -> float:
    """The normal distribution's, by bisection."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle) < share else (low, middle)
    return (low + high) / 2


def _below(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def areas() -> list[float]:
    """Share of normal numbers between neighbouring levels of NF4."""
    shares = [_below(level * _quantile(OFFSET)) for level in _nf4()]
    return [high - low for low, high in pairwise(shares)]
