"""Still figures of notebook 06: LLM.int8() step by step, by model size, and on BLOOM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from matplotlib.patches import Rectangle

from lecture_util.classroom.figures.diagram import arrow, beside, canvas, chart, write
from lecture_util.classroom.figures.quantization import minus
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    tint,
)
from lecture_util.quantization.scales import quantize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

INT8 = "Dettmers et al. 2022, arXiv:2208.07339"
POST = "huggingface/blog, hf-bitsandbytes-integration.md"
X_TD = ((0.4, -0.9, 24, 0.2, -0.5), (-0.3, 0.6, -32, 0.8, 0.1), (0.7, 0.2, 0.5, -0.4, 0.9))
W_FD = ((0.3, -0.5, 0.25, 0.8, -0.1), (-0.6, 0.4, 0.75, 0.1, 0.5))  # the third exact in fp16
THRESHOLD = 6.0
SIZES = {"125M": 0.125, "1.3B": 1.3, "2.7B": 2.7, "6.7B": 6.7, "13B": 13.0}
# Table 1 there: perplexity on C4 by size.
TABLE_1 = {
    "fp32": (25.65, 15.91, 14.43, 13.30, 12.45),
    "absmax": (87.76, 16.55, 15.11, 14.59, 19.08),
    "zero point": (56.66, 16.24, 14.76, 13.49, 13.94),
    "absmax by vectors": (35.84, 16.82, 14.98, 14.13, 16.48),
    "LLM.int8()": (25.83, 15.93, 14.44, 13.24, 12.45),
}
# BLOOM-176B: int8, bf16, standard error.
BLOOM = {
    "HellaSwag, acc_norm": (0.7274, 0.7303, 0.0044),
    "HellaSwag, acc": (0.5563, 0.5584, 0.0050),
    "PIQA, acc": (0.7835, 0.7884, 0.0095),
    "PIQA, acc_norm": (0.7922, 0.7911, 0.0095),
    "LAMBADA, acc": (0.6808, 0.6718, 0.0065),
    "LAMBADA, perplexity": (3.9191, 3.931, 0.0846),
    "WinoGrande, acc": (0.7048, 0.7048, 0.0128),
}
# Milliseconds a token at batch 1: GPU, then (how many, ms) in bf16 and in int8.
BLOOM_MS = {"A100-80": ((8, 239), (4, 282)), "A100-40": ((14, 285), (5, 367))}


def split_products() -> dict[str, Tensor]:
    """LLM.int8() on X_TD and W_FD, step by step: what the picture below prints."""
    x, w = torch.tensor(X_TD, dtype=torch.float64), torch.tensor(W_FD, dtype=torch.float64)
    apart = (x.abs() >= THRESHOLD).any(0)
    rest_x, all_w = quantize(x[:, ~apart], per="row"), quantize(w, per="row")  # w: before x is seen
    w_codes = all_w.codes[:, ~apart]
    whole = rest_x.codes.int() @ w_codes.int().T
    scaled = whole * rest_x.scale.double() * all_w.scale.double().T
    kept = x[:, apart] @ w[:, apart].T
    plain = quantize(x, per="row").dequantize() @ all_w.dequantize().T
    return {"apart": apart, "x": rest_x.codes, "x scale": rest_x.scale, "w": w_codes,
            "w scale": all_w.scale, "int32": whole, "kept": kept, "sum": kept + scaled,
            "exact": x @ w.T, "plain": plain}  # fmt: skip


@figure(
    name="outlier-columns",
    title="LLM.int8(): columns with outliers in fp16, the rest in int8, summed",
    answers=["Mixed-int8"],
    notebook="06",
    alt="A 3 by 5 matrix of inputs times a 5 by 2 matrix of weights. The third column holds 24 and "
    "-32, beyond the threshold 6: it goes with its row of weights to a product in fp16. The other "
    "columns become int8 codes with one scale a row, the weights one a column; their int32 product "
    "times both scales is added. Largest error 0.005, against 0.120 with all in int8.",
    sources=["lecture_util.quantization.scales.quantize, on numbers of our own",
             INT8],
)  # fmt: skip
def outlier_columns() -> Figure:
    title = "LLM.int8(): columns with outliers in fp16, the rest in int8, summed"
    fig, ax = canvas(16.3, 7.9, title)
    made, side, high, low = split_products(), 0.62, 6.85, 4.0
    x_codes, w_codes, product, total, wide = 5.0, 9.3, 11.5, 14.3, 0.72
    apart = made["apart"].tolist()
    k = apart.index(True)
    hot, cool, green = tint(CACHE, 0.75), tint(PREDICTED, 0.3), tint(GUESS, 0.45)

    write(ax, 0.4, high + 0.35, "inputs X", 16, ha="left", weight="bold")
    write(ax, 0.4, low + 0.35, "weights W", 16, ha="left", weight="bold")
    for d, out in enumerate(apart):
        color = hot if out else cool
        _grid(ax, 0.4 + wide * d, high, [[row[d]] for row in X_TD], side, color, wide)
        _grid(ax, 0.4, low - side * d, [[row[d] for row in W_FD]], side, color, wide)

    write(ax, x_codes, high + 0.35, f"fp16: columns with |x| ≥ {THRESHOLD:g}", 16, ha="left",
          weight="bold", color=MEASURED)  # fmt: skip
    _grid(ax, x_codes + 3 * wide, high, [[row[k]] for row in X_TD], side, hot, wide)
    _grid(ax, w_codes, high - side, [[row[k] for row in W_FD]], side, hot, 0.85)
    _grid(ax, product, high, _rounded(made["kept"]), side, hot, 1.05)

    write(ax, x_codes, low + 0.35, "int8: the other columns", 16, ha="left", weight="bold",
          color=PREDICTED)  # fmt: skip
    scales_x, scales_w = ([f"{value:.4f}" for value in made[name].flatten().tolist()]
                          for name in ("x scale", "w scale"))  # fmt: skip
    _grid(ax, x_codes, low, made["x"].tolist(), side, cool, wide)
    _grid(
        ax, x_codes + 4 * wide + 0.08, low, [[value] for value in scales_x], side, green, 0.85, 13
    )
    _grid(ax, w_codes, low, made["w"].T.tolist(), side, cool, 0.85)
    _grid(ax, w_codes, low - 4 * side - 0.1, [scales_w], side, green, 0.85, 13)
    _grid(ax, product, low, made["int32"].tolist(), side, cool, 1.05)
    write(ax, x_codes, low - 3 * side - 0.3, "a scale a row", 14, ha="left", color=MUTED)
    write(ax, product, low - 3 * side - 0.3, "int32, × its row's", 14, ha="left", color=MUTED)
    write(ax, product, low - 3 * side - 0.7, "and column's scale", 14, ha="left", color=MUTED)

    for top in (high, low):
        middle = top - 1.5 * side
        write(ax, w_codes - 0.23, middle, "×", 20)
        write(ax, product - 0.27, middle, "=", 20)
    arrow(ax, (4.1, high - 1.5 * side), (x_codes + 3 * wide - 0.1, high - 1.5 * side),
          color=CACHE, width=2.6)  # fmt: skip
    arrow(ax, (4.1, low - 1.5 * side), (x_codes - 0.1, low - 1.5 * side), color=PREDICTED,
          width=2.6)  # fmt: skip
    middle, end = 4.85, total + 0.92
    arrow(ax, (13.7, high - 1.5 * side), (end, high - 1.5 * side), (end, middle + 0.85),
          color=CACHE, width=2.6)  # fmt: skip
    arrow(ax, (13.7, low - 1.5 * side), (end, low - 1.5 * side), (end, middle - 1.45),
          color=PREDICTED, width=2.6)  # fmt: skip
    write(ax, total - 0.25, middle - 0.3, "+", 22)
    _grid(ax, total, middle + 0.65, _rounded(made["sum"]), side, tint(MUTED, 0.2), 0.92)
    errors = [float((made[name] - made["exact"]).abs().max()) for name in ("sum", "plain")]
    write(ax, x_codes, 0.35, f"largest error {errors[0]:.3f}; {errors[1]:.3f} with all columns in "
          "int8", 16, ha="left", weight="bold")  # fmt: skip
    return fig


def _grid(
    ax: Axes, x: float, top: float, rows: Sequence[Sequence[object]], side: float, color: object,
    wide: float | None = None, size: float = 14,
) -> None:  # fmt: skip
    """Numbers in cells `side` high and `wide` wide on one colour; x, top is the upper left."""
    wide, tall, across = wide or side, side * len(rows), len(rows[0])
    ax.add_patch(Rectangle((x, top - tall), wide * across, tall, facecolor=color, lw=0, zorder=2))
    lines = [((x + wide * k, x + wide * k), (top, top - tall)) for k in range(across + 1)]
    lines += [((x, x + wide * across), (top - side * k,) * 2) for k in range(len(rows) + 1)]
    flat = [[value for line in lines for value in (*line[axis], None)] for axis in (0, 1)]
    ax.plot(*flat, color="white", lw=2, zorder=2.5, solid_capstyle="butt")
    for r, values in enumerate(rows):
        for c, value in enumerate(values):
            middle = (x + wide * (c + 0.5), top - side * (r + 0.52))
            write(ax, *middle, minus(f"{value}"), size, zorder=4)


def _rounded(values: Tensor) -> list[list[str]]:
    return [[f"{value:.3g}" for value in row] for row in values.tolist()]


def above_fp32(name: str) -> list[float]:
    """Perplexity of a row of Table 1 over fp32's, in percent above it."""
    return [100 * (own / best - 1) for own, best in zip(TABLE_1[name], TABLE_1["fp32"],
                                                        strict=True)]  # fmt: skip


@figure(
    name="llm-int8-by-size",
    title="At 13B plain int8 breaks down; with outliers kept apart it holds",
    answers=[],
    notebook="06",
    alt="C4 perplexity in percent above fp32's, against parameters, 125M to 13B. Absmax: 4% at "
    "1.3B, 10% at 6.7B, 53% at 13B. Absmax by vectors: 6%, 6%, 32%. Zero point: 2%, 1%, 12%. "
    "LLM.int8() stays within 1% at every size. At 125M the first three are off the scale or high: "
    "242%, 40% and 121%.",
    sources=[f"{INT8}, Table 1", "percentages computed"],
)
def llm_int8_by_size() -> Figure:
    fig, ax = chart("At 13B plain int8 breaks down; with outliers kept apart it holds")
    sizes, top = list(SIZES.values()), 62
    rows = {"absmax": MEASURED, "absmax by vectors": ACCENT, "zero point": CACHE,
            "LLM.int8()": PREDICTED}  # fmt: skip
    for name, color in rows.items():
        over = above_fp32(name)
        ours = name == "LLM.int8()"
        ax.plot(sizes, over, "-o", color=color, ms=10, lw=3.4 if ours else 2.2, zorder=4)
        text = f"{name}: {TABLE_1[name][-1]}"
        text += "" if ours else f"\n{over[-1]:+.0f}%"
        beside(ax, sizes[-1], over[-1], text, color, xytext=(12, 0), size=15, zorder=5,
               weight="bold" if ours else "normal")  # fmt: skip
    high = [(name, above_fp32(name)[0]) for name in rows if above_fp32(name)[0] > top]
    text = "off the scale at 125M:\n" + "\n".join(f"{name} {over:+.0f}%" for name, over in high)
    ax.text(1.5, 50, text, size=14, color=MUTED, va="center")
    ax.axhline(0, color=INK, lw=1.6, zorder=3)
    ax.text(0.115, -1.2, "fp32", size=14, va="top")
    ax.set(xscale="log", xlim=(0.11, 14), ylim=(-6, top), yticks=range(0, top, 20))
    ax.set_yticks(range(0, 61, 20), [f"{k:+d}%" if k else "0" for k in range(0, 61, 20)])
    ax.set_xticks(sizes, list(SIZES))
    ax.minorticks_off()
    ax.set(xlabel="parameters", ylabel="C4 perplexity above fp32's")
    ax.tick_params(labelsize=13)
    caption(ax, shapes="right: perplexity at 13B, fp32 12.45; weights and activations in int8",
            source=f"{INT8}, Table 1")  # fmt: skip
    return fig


@figure(
    name="llm-int8-bloom",
    title="BLOOM-176B in int8: scores within the noise, on fewer GPUs, slower",
    answers=["llm-int8-bloom"],
    notebook="06",
    alt="Left, seven scores of BLOOM-176B, int8 minus bf16 in standard errors: between -0.7 and "
    "+1.4, six of seven within one. Right, ms a token at batch 1: on A100-80, bf16 on 8 takes 239, "
    "int8 on 4 takes 282, 18% more; on A100-40, bf16 on 14 takes 285, int8 on 5 takes 367, 29% "
    "more.",
    sources=[POST, "differences in standard errors and percentages computed"],
)
def llm_int8_bloom() -> Figure:
    fig, (left, right) = chart("BLOOM-176B in int8: scores within the noise, on fewer GPUs, slower",
                               2, 5.8)  # fmt: skip
    left.axvspan(-1, 1, color=tint(PREDICTED, 0.15), lw=0)
    left.axvline(0, color=INK, lw=1.6)
    for y, (int8, bf16, error) in enumerate(BLOOM.values()):
        x = (int8 - bf16) / error
        left.plot([0, x], [y, y], color=tint(MEASURED, 0.5), lw=3)
        left.plot(x, y, "o", color=MEASURED, ms=12)
        beside(left, x, y, f"{int8:g}", xytext=(12 if x >= 0 else -12, 0), size=13,
               ha="left" if x >= 0 else "right")  # fmt: skip
    left.set_yticks(range(len(BLOOM)), [f"{name}\nbf16 {bf16:g}" for name, (_, bf16, _)
                                        in BLOOM.items()], size=13)  # fmt: skip
    left.set(xlim=(-2.3, 2.7), ylim=(len(BLOOM) - 0.4, -0.6), xticks=range(-2, 3))
    left.set_xlabel("int8 minus bf16, standard errors")
    left.grid(axis="y", visible=False)
    left.tick_params(axis="y", length=0)
    bars = [(f"{dtype}\n{count} × {gpu}", ms, base) for gpu, ((many, slow), few) in
            BLOOM_MS.items() for dtype, (count, ms), base in
            (("bf16", (many, slow), 0), ("int8", few, slow))]  # fmt: skip
    y = [0, 1, 2.5, 3.5]
    colors = [PREDICTED if base == 0 else MEASURED for *_, base in bars]
    right.barh(y, [ms for _, ms, _ in bars], color=colors, height=0.78)
    for at, (_, ms, base) in zip(y, bars, strict=True):
        text = f"{ms}" if not base else f"{ms}, {100 * (ms / base - 1):+.0f}%"
        beside(right, ms, at, text, size=15, weight="bold" if base else "normal")
    right.set_yticks(y, [name for name, *_ in bars], size=13)
    right.set(xlim=(0, 640), ylim=(4.1, -0.6), xticks=range(0, 401, 100))
    right.set_xlabel("ms a token, batch 1")
    right.grid(axis="y", visible=False)
    right.tick_params(axis="y", length=0)
    caption(fig, shapes="band: within one standard error; labels: the score in int8; for "
            "perplexity less is better", source=POST)  # fmt: skip
    return fig
