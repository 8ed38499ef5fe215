"""Still figures of notebook 06: one vector's codes, and what shares a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lecture_util.classroom.figures.diagram import bracket, canvas, cells, write
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
    tint,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.quantization.scales import Quantized, quantize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VECTOR = (0.9, -0.4, 3.2, 1.6, 0.2, -0.8, 2.5, 1.3)  # leans to one side


def minus(text: str) -> str:
    return text.replace("-", "−")


@figure(
    name="absmax-and-zero-point",
    title="Absmax centres the codes on 0; a zero point moves them to the numbers",
    answers=["quant-freeze"],
    notebook="06",
    alt="Eight numbers from -0.8 to 3.2 in 4 bits. Absmax: codes -7 to 7, steps of 0.457, largest "
    "error 0.229; on a line, 5 of its 15 codes lie below every number. Zero point: codes 0 to 15 "
    "of which 3 means zero, steps of 0.267, all between -0.8 and 3.2, largest error 0.133.",
    sources=["lecture_util.quantization.scales.quantize, on numbers of our own"],
)
def absmax_and_zero_point() -> Figure:
    title = "Absmax centres the codes on 0; a zero point moves them to the numbers"
    fig, ax = canvas(15, 7.6, title)
    x = torch.tensor([VECTOR], dtype=torch.float64)
    left, pitch = 3.1, 1.15
    write(ax, 0.4, 6.8, "numbers", 16, ha="left", weight="bold")
    for k, value in enumerate(VECTOR):
        middle = left + pitch * (k + 0.5)
        write(ax, middle, 6.8, minus(f"{value}"), 17)
    for symmetric, top, line, color in ((True, 6.3, 2.4, PREDICTED), (False, 4.85, 1.2, GUESS)):
        made = quantize(x, bits=4, per="row", symmetric=symmetric)
        name = "absmax" if symmetric else "zero point"
        off = (made.dequantize() - x)[0]
        write(ax, 0.4, top - 0.3, name, 16, ha="left", weight="bold", color=color)
        write(ax, 0.4, top - 0.8, "off by", 14, ha="left", color=MUTED)
        codes = made.codes[0].tolist()
        for k, (code, error) in enumerate(zip(codes, off.tolist(), strict=True)):
            middle = left + pitch * (k + 0.5)
            cells(ax, middle - pitch / 2 + 0.05, top, [[tint(color, 0.35)]], pitch - 0.1, gap=0)
            write(ax, middle, top - 0.3, minus(f"{code}"), 17, weight="bold", zorder=4)
            text = minus(f"{error:+.3f}") if abs(error) > 5e-4 else "0"
            write(ax, middle, top - 0.8, text, 14, zorder=4)
        step, worst = made.scale.item(), off.abs().max().item()
        write(ax, 12.6, top - 0.3, f"steps of {step:.3f}", 15, ha="left")
        write(ax, 12.6, top - 0.8, f"worst {worst:.3f}", 15, ha="left")
        _levels(ax, made, line, name, color)
    write(ax, 0.4, 0.3, "4 bits, so that steps can be seen: 7 and 15 stand where 8 bits have 127 "
          "and 255", 13, ha="left", color=MUTED)  # fmt: skip
    return fig


def _levels(ax: Axes, made: Quantized, y: float, name: str, color: str) -> None:
    """Every number a code can mean as a dot on a line, the eight numbers as marks above it."""
    low, high = (0, 15) if not made.symmetric else (-7, 7)
    zero = 0 if made.symmetric else made.zero.item()
    values = [(code - zero) * made.scale.item() for code in range(low, high + 1)]

    def at(value: float) -> float:
        return 7.7 + 1.42 * value

    write(ax, 0.4, y, name, 15, ha="left", color=color, weight="bold")
    ax.plot([at(-3.3), at(3.3)], [y, y], color=MUTED, lw=1, zorder=1)
    used = [value >= min(VECTOR) - made.scale.item() / 2 for value in values]
    for value, hit in zip(values, used, strict=True):
        ax.plot(at(value), y, "o", color=color, ms=10, mfc=color if hit else "white", zorder=3)
    ax.plot([at(value) for value in VECTOR], [y + 0.3] * len(VECTOR), "v", color=INK, ms=9)
    if made.symmetric:
        text = f"{used.count(False)} of {len(values)} codes for nothing"
        bracket(ax, at(values[0]) - 0.1, at(values[used.index(True) - 1]) + 0.1, y + 0.35, text,
                MUTED, 14)  # fmt: skip
    else:
        write(ax, at(0), y - 0.35, f"code {zero} means 0", 14, color=color)


@figure(
    name="granularity",
    title="More scales follow the weights closer and cost more bits",
    answers=[],
    notebook="06",
    alt="Four small matrices, cells of one shade share a scale. Per tensor: one scale. Per row: "
    "one for each output. Per column: one for each input. Per group of 48 in a row: many. Bits a "
    "weight that 16-bit scales add at 1,536 by 576: 0.00002, 0.028, 0.010 and 0.333. A scale per "
    "row is applied after the sum, per column before it, per group within it.",
    sources=["lecture_util.quantization.scales: Quantized.bits_per_weight"],
)
def granularity() -> Figure:
    fig, ax = canvas(15.4, 6.6, "More scales follow the weights closer and cost more bits")
    config = PUBLISHED["smollm2-135m"]
    F, D, side, group = 6, 8, 0.38, 4
    shades = [tint(color, 0.45) for color in (WEIGHTS, CACHE, ACCENT, GUESS)]
    panels = [
        ("tensor", "tensor", lambda f, d: 0, "multiplies the output,\nonce"),
        ("row", "row", lambda f, d: f % 4, "multiplies each output,\nafter its sum"),
        ("column", "column", lambda f, d: d % 4, "multiplies each input,\nbefore the sum"),
        ("group", 48, lambda f, d: (f + 2 * (d // group)) % 4, "must be applied\nwithin the sum"),
    ]
    ones = torch.ones(config.F, config.D)
    for k, (name, per, block, where) in enumerate(panels):
        x, top = 0.5 + 3.78 * k, 4.9
        label = f"per {name}" + (f" of {per}" if per == 48 else "")
        write(ax, x, 6.05, label, 18, ha="left", weight="bold")
        cells(ax, x, top, [[shades[block(f, d)] for d in range(D)] for f in range(F)], side)
        spots = {"tensor": [(x + side * D / 2, top + 0.28)],
                 "row": [(x + side * D + 0.2, top - side * (f + 0.5)) for f in range(F)],
                 "column": [(x + side * (d + 0.5), top + 0.28) for d in range(D)],
                 "group": [(x + side * group * (j + 0.5), top - side * (f + 0.5))
                           for f in range(F) for j in range(D // group)]}[name]  # fmt: skip
        ax.plot(*zip(*spots, strict=True), "s", color=MEASURED, ms=8, zorder=5)
        made = quantize(ones, bits=4, per=per, scale_dtype=torch.float16)
        added = made.bits_per_weight - made.bits
        text = f"+{added:.5f}" if added < 1e-3 else f"+{added:.3f}"
        write(ax, x, 2.0, text, 22, ha="left", weight="bold", color=MEASURED)
        write(ax, x, 1.5, f"bits a weight, {made.scale.numel():,} scales"
              if made.scale.numel() > 1 else "bits a weight, 1 scale", 13, ha="left")  # fmt: skip
        write(ax, x, 0.85, where, 14, ha="left", color=MUTED)
    ax.plot(0.62, 0.22, "s", color=MEASURED, ms=8)
    write(ax, 0.85, 0.2, f"a scale of 16 bits · rows are outputs, columns inputs · counts for "
          f"{config.F:,} × {config.D}, SmolLM2-135M's MLP", 13, ha="left", color=MUTED)  # fmt: skip
    return fig
