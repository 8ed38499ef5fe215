"""Still figures of notebook 04, across layers: windows, hybrids, and what a stack then holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lecture_util.classroom.figures.diagram import arrow, beside, box, canvas, cells, chart, write
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
from lecture_util.kv_reduction.layout import Layout
from lecture_util.kv_reduction.sizes import cache_bytes, mla_cache_bytes
from lecture_util.model.attention import causal_mask
from lecture_util.model.config import PUBLISHED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LLAMA = "shape: Lightning-AI/litgpt litgpt/config.py"
CHARACTER = "Character.AI, Optimizing AI Inference at Character.AI, June 2024"


@figure(
    name="attention-masks",
    title="Four causal masks: what a query reads, and what must be kept for it",
    answers=["longformer-attention"],
    notebook="04",
    alt="Four grids, queries down, keys across, nothing above the diagonal. Full: the last of 12 "
    "queries reads 12 keys. Window of 4: a band of 4. Dilated: 4 keys, every second one, reaching "
    "back 7 positions. Window and 2 global columns: 6 keys. Kept between steps: all, 3, 6 and 5.",
    sources=["lecture_util.model.attention.causal_mask; counted by the code that draws it"],
)
def attention_masks() -> Figure:
    title = "Four causal masks: what a query reads, and what must be kept for it"
    fig, ax = canvas(14, 5.3, title)
    T, W, dilation, globals_ = 12, 4, 2, 2
    positions_T = torch.arange(T)
    full_TS = causal_mask(positions_T, T)
    window_TS = causal_mask(positions_T, T, W)
    distance_TS = positions_T[:, None] - positions_T
    wide_TS = causal_mask(positions_T, T, (W - 1) * dilation + 1)
    dilated_TS = wide_TS & (distance_TS % dilation == 0)
    columns_TS = full_TS & (positions_T < globals_)
    rows = [
        ("full", full_TS, full_TS, "all"),
        (f"window W = {W}", window_TS, window_TS, f"W−1 = {W - 1}"),
        (f"dilated by {dilation}", dilated_TS, dilated_TS,
         f"{dilation}(W−1) = {dilation * (W - 1)}"),
        (f"window + {globals_} global", window_TS | columns_TS, window_TS,
         f"W−1+{globals_} = {W - 1 + globals_}"),
    ]  # fmt: skip
    side, top = 0.245, 4.55
    for panel, (name, mask_TS, near_TS, kept) in enumerate(rows):
        left = 0.4 + 3.45 * panel
        write(ax, left, top + 0.3, name, 16, ha="left", weight="bold")
        colors = [
            [tint(PREDICTED, 0.75) if near else tint(MEASURED, 0.75) if seen
             else "#EFEFEF" if column <= row else None
             for column, (seen, near) in enumerate(zip(*both, strict=True))]
            for row, both in enumerate(zip(mask_TS.tolist(), near_TS.tolist(), strict=True))
        ]  # fmt: skip
        cells(ax, left, top, colors, side, gap=1.5)
        read = int(mask_TS[-1].sum())
        write(ax, left, 1.2, f"reads {read}", 16, ha="left")
        write(ax, left, 0.72, f"keeps {kept}", 16, ha="left", weight="bold")
    write(ax, 0.4, 0.22, f"rows: queries, columns: keys · read by query {T}, itself included; kept "
          "between steps", 13, ha="left", color=MUTED)  # fmt: skip
    return fig


@figure(
    name="hybrid-stack",
    title="One global layer in six, windows between, keys shared within a kind",
    answers=["character.ai figure"],
    notebook="04",
    alt="Twelve layers, bottom up: layers 5 and 11 see everything, the others a window of 1,024; "
    "pairs of one kind share a cache, so 12 layers hold 6. Right: predicted cache against context "
    "at the shape of Llama-3-8B, for GQA-8, then MQA, then windows in 5 layers of 6, then sharing; "
    "only the windows bend the line.",
    sources=[CHARACTER, "Layout.character_ai and cache_bytes of lecture_util.kv_reduction", LLAMA],
)
def hybrid_stack() -> Figure:
    fig, ax = canvas(14, 6.6, "One global layer in six, windows between, keys shared within a kind")
    layout, pitch, low = Layout.character_ai(12), 0.46, 0.75
    for layer, how in enumerate(layout.layers):
        y, color = low + pitch * layer, PREDICTED if how.window is None else GUESS
        text = "global" if how.window is None else f"window {how.window:,}"
        box(ax, 1.1, y, 2.5, pitch - 0.08, text, color, 0.45 if layout.is_producer(layer) else 0.12,
            13)  # fmt: skip
        write(ax, 0.8, y + 0.19, str(layer), 13, ha="right", color=MUTED)
        if not layout.is_producer(layer):
            start, x = low + pitch * how.reads + 0.19, 4.6 if how.window is None else 4.1
            arrow(ax, (3.62, start), (x, start), (x, y + 0.19), (3.65, y + 0.19), color=CACHE)
    write(ax, 1.1, 0.35, f"{layout.L} layers, {layout.num_caches} caches; an arrow: is read by",
          12.5, ha="left", color=MUTED)  # fmt: skip
    llama = PUBLISHED["llama-3-8b"]
    mqa = llama.with_kv_heads(1)
    plot = ax.inset_axes([6.9, 1.35, 4.1, 4.5], transform=ax.transData)
    lines = [
        ("GQA-8", llama, Layout.full(llama.L), MUTED),
        ("MQA", mqa, Layout.full(llama.L), ACCENT),
        ("+ windows", mqa, Layout.character_ai(llama.L, share=1), GUESS),
        ("+ sharing", mqa, Layout.character_ai(llama.L), CACHE),
    ]
    contexts = [2**k for k in range(8, 18)]
    for name, config, recipe, color in lines:
        held = [cache_bytes(config, recipe, 1, S) for S in contexts]
        plot.plot(contexts, held, "--", color=color)
        giga = held[-1] >= 1e9
        size = f"{held[-1] / 1e9:.1f} GB" if giga else f"{held[-1] / 1e6:.0f} MB"
        beside(plot, contexts[-1], held[-1], f"{name} {size}", color, size=13,
               xytext=(8, {"+ windows": 4, "+ sharing": -4}.get(name, 0)))  # fmt: skip
    plot.set(xscale="log", yscale="log", xlim=(256, 2**17), xlabel="context, tokens")
    plot.set_xticks([256, 1024, 8192, 65536], ["256", "1K", "8K", "64K"])
    plot.set_yticks([1e6, 1e7, 1e8, 1e9, 1e10], ["1 MB", "10 MB", "100 MB", "1 GB", "10 GB"])
    plot.minorticks_off()
    write(ax, 6.9, 6.1, "predicted cache", 14, ha="left")
    write(
        ax,
        5.9,
        0.35,
        "Llama-3-8B's shape, 16 bits, up to 128K tokens",
        12.5,
        ha="left",
        color=MUTED,
    )
    return fig


@figure(
    name="cache-by-technique",
    title="Windows bend the line; everything else only lowers it",
    answers=[],
    notebook="04",
    alt="Predicted cache of one sequence against context, 1K to 1M tokens, both logarithmic, at "
    "the shape of Llama-2-13B. MHA, GQA-8, GQA-8 with layers sharing in pairs, MLA and MQA are "
    "parallel rising lines. Windows of 4,096 in every layer stay flat from there; the recipe with "
    "1 global layer in 6 grows, but slowly.",
    sources=["lecture_util.kv_reduction.sizes: cache_bytes, mla_cache_bytes", LLAMA, CHARACTER],
)
def cache_by_technique() -> Figure:
    fig, ax = chart("Windows bend the line; everything else only lowers it")
    llama = PUBLISHED["llama-2-13b"]
    gqa, mqa, L = llama.with_kv_heads(8), llama.with_kv_heads(1), llama.L
    contexts = [2**k for k in range(10, 21)]
    lines = {
        "MHA": ([cache_bytes(llama, Layout.full(L), 1, S) for S in contexts], INK),
        "GQA-8": ([cache_bytes(gqa, Layout.full(L), 1, S) for S in contexts], PREDICTED),
        "GQA-8 + CLA2": (
            [cache_bytes(gqa, Layout.cross_layer(L), 1, S) for S in contexts], WEIGHTS
        ),
        "MLA 512 + 64": ([mla_cache_bytes(llama, 512, 64, 1, S) for S in contexts], MEASURED),
        "MQA": ([cache_bytes(mqa, Layout.full(L), 1, S) for S in contexts], ACCENT),
        "GQA-8, W = 4,096": (
            [cache_bytes(gqa, Layout.windowed(L, 4096), 1, S) for S in contexts], CACHE
        ),
        "MQA + 1 in 6 + CLA2": (
            [cache_bytes(mqa, Layout.character_ai(L), 1, S) for S in contexts], GUESS
        ),
    }  # fmt: skip
    for name, (held, color) in lines.items():
        ax.plot(contexts, held, "--", color=color)
        beside(ax, contexts[-1], held[-1], name, color, size=13.5)
    ax.axhline(80e9, color=MUTED, lw=1.2)
    ax.annotate("80 GB", (1024, 80e9), xytext=(4, 4), textcoords="offset points", color=MUTED)
    ax.set(xscale="log", yscale="log", xlim=(1024, 2**20))
    ax.set_xticks([2**k for k in range(10, 21, 2)], ["1K", "4K", "16K", "64K", "256K", "1M"])
    ax.set_yticks([1e7, 1e8, 1e9, 1e10, 1e11, 1e12],
                  ["10 MB", "100 MB", "1 GB", "10 GB", "100 GB", "1 TB"])  # fmt: skip
    ax.minorticks_off()
    ax.set(xlabel="context, tokens", ylabel="predicted cache, one sequence")
    caption(ax, dtype="16 bits", shapes="Llama-2-13B: 40 layers, 40 heads of 128; K as named")
    return fig
