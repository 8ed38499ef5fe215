"""Still figures of notebook 04, within a layer: fewer KV heads (GQA, MQA), or a latent (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import beside, box, canvas, chart, write
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
    number,
    tint,
)
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import ACCELERATORS, decode_step, num_params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GQA = "Ainslie et al. 2023, arXiv:2305.13245"
MLA = "DeepSeek-V2, arXiv:2405.04434"
CONTEXT = 1024

# Table 1 there: seconds a sample (per TPUv4 chip), average score of the benchmarks.
GQA_TABLE_1 = {
    "MHA-Large": (0.37, 46.0),
    "MHA-XXL": (1.51, 47.2),
    "MQA-XXL": (0.24, 46.6),
    "GQA-8-XXL": (0.28, 47.1),
}


@figure(
    name="kv-head-sharing",
    title="Fewer KV heads serve the same queries",
    answers=["gmqa"],
    notebook="04",
    alt="Three panels with 8 query heads each. Multi-head: 8 KV heads, one a query head. Grouped: "
    "4 KV heads, each read by 2 neighbouring query heads. Multi-query: 1 KV head read by all 8. "
    "The numbers cached a token and layer, 2KH, fall from 1,024 to 512 to 128 at H=64.",
    sources=["drawn from lecture_util.model.config.Config", f"{GQA}, section 2.2"],
)
def kv_head_sharing() -> Figure:
    fig, ax = canvas(14, 5.6, "Fewer KV heads serve the same queries")
    heads = Config(D=512, F=1408, K=8, G=1, H=64, L=1, V=256)
    pitch, side = 0.5, 0.4
    for panel, (K, name) in enumerate([(8, "multi-head"), (4, "grouped"), (1, "multi-query")]):
        config = heads.with_kv_heads(K)
        left = 1.0 + 4.4 * panel
        write(ax, left, 5.1, name, 18, ha="left", weight="bold")
        write(ax, left + 3.9, 5.1, f"K = {K}, G = {config.G}", 15, ha="right", color=MUTED)
        for n in range(config.N):
            group = n // config.G
            x = left + pitch * n + side / 2
            x_kv = left + pitch * (config.G * (group + 0.5) - 0.5) + side / 2
            ax.plot([x, x_kv], [4.05, 3.0], color=MUTED, lw=1.4, zorder=1)
            box(ax, x - side / 2, 4.05, side, side, "", MUTED, 0.3)
            if n % config.G == 0:
                box(ax, x_kv - side / 2, 2.6, side, side, "", PREDICTED, 0.55)
                box(ax, x_kv - side / 2, 2.15, side, side, "", GUESS, 0.55)
        cached = 2 * config.K * config.H
        write(ax, left, 1.45, f"{cached:,}", 24, ha="left", weight="bold")
        write(ax, left + (1.6 if cached > 999 else 1.15), 1.4, "numbers cached", 14, ha="left",
              color=MUTED)  # fmt: skip
    for y, text, color in [(4.25, "q", INK), (2.8, "k", PREDICTED), (2.35, "v", GUESS)]:
        write(ax, 0.5, y, text, 18, color=color, style="italic")
    write(ax, 1.0, 0.5, f"a token and layer: 2·K·H numbers, H = {heads.H} · query head n reads KV "
          "head n // G", 14, ha="left", color=MUTED)  # fmt: skip
    return fig


@figure(
    name="gqa-step-time",
    title="Fewer KV heads shorten the step; a larger batch lengthens it",
    answers=["gqa-speed"],
    notebook="04",
    alt="Predicted decode step time against KV heads K on logarithmic axes, Llama-2-13B shape, "
    "1,024 tokens, H100, one dashed line a batch size. Every line rises with K. At B=64 the step "
    "takes 23.8 ms with K=40 and 9.97 ms with K=8; at B=256 and K=8, 19.6 ms. Hollow points do "
    "not fit in 80 GB.",
    sources=[
        "lecture_util.roofline.decode_step",
        "shape: Lightning-AI/litgpt litgpt/config.py",
        "H100: pytorch/torchtitan utils.py; stas00/ml-engineering compute/accelerator/README.md",
    ],
)
def gqa_step_time() -> Figure:
    llama, h100 = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"]
    heads = [K for K in range(1, llama.N + 1) if llama.N % K == 0]
    fig, ax = chart("Fewer KV heads shorten the step; a larger batch lengthens it")
    for B, color in [(1, INK), (16, GUESS), (64, PREDICTED), (256, ACCENT)]:
        steps = {K: decode_step(llama.with_kv_heads(K), B, CONTEXT, h100) for K in heads}
        times = [steps[K].latency_s * 1e3 for K in heads]
        ax.plot(heads, times, "--", color=color)
        for K, time in zip(heads, times, strict=True):
            ax.plot(K, time, "o", color=color, mfc=color if steps[K].fits else "white", ms=9)
        beside(ax, heads[-1], times[-1], f"B = {B}", color, size=15)
        for K in {64: (8, 40), 256: (8,)}.get(B, ()):
            rate = steps[K].throughput_tokens_per_s
            text = f"{number(steps[K].latency_s * 1e3)} ms\n{rate:,.0f} tok/s"
            beside(ax, K, steps[K].latency_s * 1e3, text, xytext=(-2, 10), va="bottom",
                   ha="center" if B == 64 else "right", size=13)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(0.9, 62), ylim=(5.5, 110))
    ax.set_xticks(heads, [str(K) for K in heads])
    ax.set_yticks([10, 20, 50, 100], ["10", "20", "50", "100"])
    ax.minorticks_off()
    ax.set(xlabel="KV heads K, of 40 query heads", ylabel="predicted decode step, ms")
    full, fewer = (num_params(llama.with_kv_heads(K)) / 1e9 for K in (40, 8))
    caption(ax, device="H100 SXM, at best (hollow: over 80 GB)", dtype="bf16",
            shapes=f"Llama-2-13B, S = {CONTEXT:,}; Wk, Wv shrink too: {full:.1f}B "
            f"parameters at K = 40, {fewer:.1f}B at 8")  # fmt: skip
    return fig


@figure(
    name="gqa-quality-time",
    title="GQA-8: almost MQA's time at almost MHA's score",
    answers=["gqa-accuracy"],
    notebook="04",
    alt="Four points, seconds a sample against average score. T5-XXL with multi-head attention: "
    "1.51 s, 47.2. Multi-query: 0.24 s, 46.6. Eight groups: 0.28 s, 47.1. T5-Large with "
    "multi-head attention: 0.37 s, 46.0.",
    sources=[f"{GQA}, Table 1"],
)
def gqa_quality_time() -> Figure:
    fig, ax = chart("GQA-8: almost MQA's time at almost MHA's score")
    for name, (seconds, score) in GQA_TABLE_1.items():
        bright = name.startswith("GQA")
        ax.plot(seconds, score, "o", color=MEASURED if bright else tint(MEASURED, 0.45), ms=15)
        left = name == "MHA-XXL"
        beside(ax, seconds, score, f"{name}\n{seconds:g} s, {score}", INK, size=15,
               xytext=(-14 if left else 14, 0), ha="right" if left else "left",
               weight="bold" if bright else "normal")  # fmt: skip
    ax.set(xlim=(0, 1.7), ylim=(45.8, 47.5), yticks=[46, 46.5, 47])
    ax.set_xticks([0, 0.5, 1, 1.5])
    ax.set(xlabel="time per sample, s (per TPUv4 chip)", ylabel="average score (axis cut)")
    caption(ax, shapes="T5; MQA and GQA uptrained from MHA with 5% of its pre-training",
            source=f"{GQA}, Table 1")  # fmt: skip
    return fig


@figure(
    name="mla-cached-numbers",
    title="Cached a token and layer: keys and values, or a latent and one RoPE key",
    answers=["mla-schema"],
    notebook="04",
    alt="Bars to scale, 2,048 numbers a row, for 128 heads of width 128. Multi-head attention "
    "fills 16 rows, 8 of keys and 8 of values: 32,768 numbers. GQA with 8 KV heads fills one row, "
    "2,048. MLA: a latent of 512 and a RoPE key of 64, 576 in all, 57 times fewer than MHA. "
    "MQA: 256.",
    sources=[f"{MLA}, sizes", "2*K*H and C+R, computed"],
)
def mla_cached_numbers() -> Figure:
    title = "Cached a token and layer: keys and values, or a latent and one RoPE key"
    fig, ax = canvas(14, 6.9, title)
    N, H, C, R = 128, 128, 512, 64
    wide, high, left, row = 8.6, 0.21, 3.0, 2 * 8 * H
    mha = 2 * N * H
    half = mha // row // 2

    def bar(y: float, start: float, numbers: float, color: str, rows: int = 1) -> None:
        x, width = left + wide * start / row, wide * numbers / row
        box(ax, x, y, width, high * rows, "", color, 0.6, rounded=False)

    def name(y: float, label: str, numbers: int) -> None:
        write(ax, 0.3, y, label, 17, ha="left", weight="bold")
        write(ax, 2.75, y, f"{numbers:,}", 17, ha="right")

    top = 6.35
    bar(top - half * high, 0, row, PREDICTED, half)
    bar(top - 2 * half * high, 0, row, GUESS, half)
    for k in range(1, 2 * half):
        ax.plot([left, left + wide], [top - k * high] * 2, color="white", lw=1, zorder=4)
    name(top - half * high, "MHA", mha)
    for k, (text, color) in enumerate([("128 keys", PREDICTED), ("128 values", GUESS)]):
        write(ax, left + wide + 0.2, top - (k + 0.5) * half * high, text, 14, ha="left",
              color=color)  # fmt: skip
    bar(2.3, 0, row / 2, PREDICTED)
    bar(2.3, row / 2, row / 2, GUESS)
    name(2.4, "GQA-8", row)
    write(ax, left + wide + 0.2, 2.4, "8 and 8", 14, ha="left", color=MUTED)
    bar(1.65, 0, C, CACHE)
    bar(1.65, C, R, ACCENT)
    name(1.75, "MLA", C + R)
    text = f"latent {C} + RoPE key {R}, for all heads: 1/{mha / (C + R):.0f} of MHA"
    write(ax, left + wide * (C + R) / row + 0.2, 1.75, text, 14, ha="left")
    bar(1.0, 0, H, PREDICTED)
    bar(1.0, H, H, GUESS)
    name(1.1, "MQA", 2 * H)
    write(ax, left + wide * 2 * H / row + 0.2, 1.1, "1 key, 1 value", 14, ha="left", color=MUTED)
    write(ax, 0.3, 0.35, f"to scale, {row:,} numbers a row · DeepSeek-V2: {N} heads of width {H}",
          13, ha="left", color=MUTED)  # fmt: skip
    return fig
