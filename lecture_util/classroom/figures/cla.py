"""Still figures of notebook 04: layers that read the keys and values of the layer below (CLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import arrow, beside, box, canvas, chart, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    MEASURED,
    MUTED,
    PREDICTED,
    WEIGHTS,
    caption,
)
from lecture_util.kv_reduction.layout import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLA = "Brandon et al. 2024, arXiv:2405.12981"
CLA_LAYERS, CLA_HEAD = 20, 128  # of that paper's 1B models
# Table 1 there: name, numbers in a layer's keys (K*H), layers that share, perplexity.
TABLE_1 = [
    ("MHA", 16 * 128, 1, 13.15), ("GQA4", 4 * 128, 1, 13.36), ("GQA2", 2 * 128, 1, 13.52),
    ("MQA", 128, 1, 13.54), ("H64", 64, 1, 13.81), ("H46", 46, 1, 13.96), ("H32", 32, 1, 14.37),
    ("H512", 512, 2, 13.49), ("H256", 256, 2, 13.51), ("H128", 128, 2, 13.60),
    ("H90", 90, 2, 13.73), ("H64", 64, 2, 13.89), ("CLA3", 128, 3, 13.77), ("CLA4", 128, 4, 13.95),
]  # fmt: skip


@figure(
    name="cla-layers",
    title="CLA: every second layer has no keys and values of its own",
    answers=["cla-diagram"],
    notebook="04",
    alt="Four layers, bottom up. Layers 0 and 2 are producers: Wq, Wk and Wv, with a cache that "
    "their attention reads. Layers 1 and 3 are consumers: only Wq; an arrow leads from the cache "
    "of the layer below to their attention. So 4 layers hold 2 caches.",
    sources=["drawn from lecture_util.kv_reduction.layout.Layout.cross_layer", CLA],
)
def cla_layers() -> Figure:
    fig, ax = canvas(14, 6.6, "CLA: every second layer has no keys and values of its own")
    layout = Layout.cross_layer(4, share=2)
    low, tall, gap = 1.0, 0.7, 0.42
    y = [low + 3.0 * (layer // 2) + 1.2 * (layer % 2) for layer in range(layout.L)]
    arrow(ax, (2.2, 0.15), (2.2, 6.2), color=MUTED, width=2.4)
    for layer, how in enumerate(layout.layers):
        own = layout.is_producer(layer)
        middle = y[layer] + tall / 2
        write(ax, 0.3, middle, f"layer {layer}", 16, ha="left")
        arrow(ax, (2.2, middle), (2.9, middle), color=MUTED)
        box(ax, 2.9, y[layer], 1.1, tall, "Wq", WEIGHTS, 0.5, 16)
        arrow(ax, (4.0, middle), (8.2, middle))
        box(ax, 8.2, y[layer], 1.9, tall, "attention", GUESS, 0.3, 16)
        text = "producer" if own else f"consumer: reads {how.reads}'s"
        write(ax, 10.4, middle, text, 16, ha="left", weight="bold" if own else "normal")
        if own:
            below = y[layer] - gap
            arrow(ax, (2.2, below), (2.9, below), color=MUTED)
            box(ax, 2.9, below - 0.25, 1.6, 0.5, "Wk, Wv", WEIGHTS, 0.5)
            arrow(ax, (4.5, below), (5.2, below))
            box(ax, 5.2, below - 0.25, 1.8, 0.5, "KV cache", CACHE, 0.5)
            arrow(ax, (7.0, below), (8.8, below), (8.8, y[layer]), color=CACHE, width=2.4)
        else:
            start, x, end = y[how.reads] - gap + 0.25, 6.5, middle - 0.2
            arrow(ax, (x, start), (x, end), (8.2, end), color=CACHE, width=2.4)
    return fig


@figure(
    name="cla-quality-bytes",
    title="At equal bytes, sharing between layers costs less perplexity",
    answers=["cla-results"],
    notebook="04",
    alt="Perplexity of 1B models against bytes of cache a token, logarithmic. Unshared: MHA "
    "163,840 bytes, 13.15; GQA4 40,960, 13.36; MQA 10,240, 13.54; 64-wide heads 5,120, 13.81; 32 "
    "wide 2,560, 14.37. Pairs of layers sharing lie below: 10,240, 13.51; 5,120, 13.60; 2,560, "
    "13.89. Four sharing: 2,560, 13.95.",
    sources=[f"{CLA}, Table 1", f"bytes: 2*2*K*H*{CLA_LAYERS} layers/share, computed"],
)
def cla_quality_bytes() -> Figure:
    fig, ax = chart("At equal bytes, sharing between layers costs less perplexity")
    kinds = {1: ("every layer its own", PREDICTED), 2: ("CLA2: two layers share", MEASURED),
             3: ("", ACCENT), 4: ("", ACCENT)}  # fmt: skip
    places = {"MQA": (6, 13), "GQA2": (0, 14), "H512": (0, -15), "H256": (0, -15)}
    for share, (label, color) in kinds.items():
        rows = [row for row in TABLE_1 if row[2] == share]
        caches = -(-CLA_LAYERS // share)
        held = [2 * 2 * width * caches for _, width, *_ in rows]
        scores = [score for *_, score in rows]
        ax.plot(held, scores, "-o", color=color, ms=10, lw=1.6)
        for (name, *_), x, score in zip(rows, held, scores, strict=True):
            above = share == 1
            dx, dy = places.get(name, (9, 9) if above else (-9, -12))
            ha = "center" if not dx else "left" if dx > 0 else "right"
            if share > 2:
                dx, dy, ha = (0, 14, "center") if share == 3 else (-12, 2, "right")
            beside(ax, x, score, name, color, xytext=(dx, dy), ha=ha, size=13)
        if label:
            at = (30_000, 13.95) if share == 1 else (30_000, 13.82)
            ax.text(*at, label, color=color, size=16, weight="bold")
    ax.set(xscale="log", xlim=(1_700, 260_000), ylim=(13.0, 14.55))
    ax.set_xticks([2_560, 5_120, 10_240, 20_480, 40_960, 163_840],
                  ["2,560", "5,120", "10,240", "20,480", "40,960", "163,840"])  # fmt: skip
    ax.minorticks_off()
    ax.set(xlabel="bytes of cache a token (by formula)", ylabel="perplexity (axis cut)")
    caption(ax, shapes=f"1B models, {CLA_LAYERS} layers; Hn: one KV head of width n",
            source=f"{CLA}, Table 1")  # fmt: skip
    return fig
