"""Still figures of notebook 05: stacks in which few layers, or short windows, attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lecture_util.alternatives.layouts import HYBRIDS, Linear, Window, memory_bytes
from lecture_util.alternatives.linear_attention import taylor_features
from lecture_util.classroom.figures.diagram import beside, box, canvas, cells, chart, write
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
from lecture_util.model.attention import causal_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JAMBA = "Lieber et al. 2024, arXiv:2403.19887"
MINIMAX = "MiniMax 2025, arXiv:2501.08313"
BASED = "Arora et al. 2024, arXiv:2402.18668"
LLAMA = "shape: Lightning-AI/litgpt litgpt/config.py"
GIB = 2**30


@figure(
    name="jamba-block",
    title="Jamba: one layer in eight keeps a cache",
    answers=["jamba-architecture"],
    notebook="05",
    alt="A stack of eight layers, bottom up: Mamba, Mamba with experts, Mamba, Mamba with experts, "
    "attention, Mamba with experts, Mamba, Mamba with experts; four such blocks make the model. "
    "Beside it bars of the KV cache at 256K tokens by formula: Jamba 4 GiB, Llama-3.1-8B 32 GiB.",
    sources=[JAMBA, "KV bytes by lecture_util.alternatives.layouts.memory_bytes", LLAMA],
)
def jamba_block() -> Figure:
    fig, ax = canvas(14, 6.1, "Jamba: one layer in eight keeps a cache")
    pitch, low = 0.62, 0.55
    for layer, kind in enumerate(HYBRIDS["jamba"].kinds[:8]):
        y, attends, experts = low + pitch * layer, kind == "A", layer % 2 == 1
        color = CACHE if attends else PREDICTED
        box(ax, 0.9, y, 2.3, 0.52, "attention" if attends else "Mamba", color, 0.55, 15)
        box(ax, 3.3, y, 1.5, 0.52, "MoE" if experts else "MLP", GUESS, 0.5 if experts else 0.12, 15)
        write(ax, 0.6, y + 0.25, str(layer), 14, color=MUTED, ha="right")
    ax.plot([5.05, 5.25, 5.25, 5.05], [low, low, low + 7 * pitch + 0.52, low + 7 * pitch + 0.52],
            color=INK, lw=2)  # fmt: skip
    write(ax, 5.45, low + 4 * pitch, "× 4", 22, ha="left", weight="bold")
    x = 7.3
    write(ax, x, 5.3, "KV cache at 256K tokens", 17, ha="left", weight="bold")
    names = {"jamba": "Jamba", "attention": "Llama-3.1-8B"}
    held = {name: memory_bytes(HYBRIDS[name], 256 * 1024).kv for name in names}
    for row, (name, label) in enumerate(names.items()):
        y, wide = 3.9 - 1.35 * row, 4.6 * held[name] / max(held.values())
        label += f", {HYBRIDS[name].kinds.count('A')} attention layers"
        write(ax, x, y + 0.75, label, 15, ha="left")
        box(ax, x, y, wide, 0.5, "", CACHE, 0.75, rounded=False)
        write(ax, x + wide + 0.2, y + 0.25, f"{held[name] / GIB:.0f} GiB", 18, ha="left",
              weight="bold")  # fmt: skip
    write(ax, x, 1.45, "52B parameters, 12B active a token:", 14, ha="left", color=MUTED)
    write(ax, x, 1.03, "16 experts, the best 2 of them", 14, ha="left", color=MUTED)
    write(ax, x, 0.61, "one sequence, 8 KV heads of 128, 16 bits", 14, ha="left", color=MUTED)
    return fig


@figure(
    name="memory-by-context",
    title="A cache grows with the context, a state does not",
    answers=[],
    notebook="05",
    alt="Predicted memory of one sequence against context, 4K to 1M tokens, both logarithmic. "
    "Llama-3.1-8B, attention in all 32 layers, rises in a straight line. MiniMax-01, 10 attention "
    "layers of 80, starts almost level with it, held up by its states, and ends at a third. Jamba, "
    "4 of 32, ends at an eighth. 32 Mamba layers stay flat.",
    sources=["lecture_util.alternatives.layouts: HYBRIDS, memory_bytes", LLAMA, JAMBA, MINIMAX],
)  # fmt: skip
def memory_by_context() -> Figure:
    fig, ax = chart("A cache grows with the context, a state does not")
    contexts = [2**k for k in range(12, 21)]
    stacks = [
        ("attention", "Llama-3.1-8B:\n32 attention", INK, 8),
        ("minimax-01", "MiniMax-01: 70 linear,\n10 attention", MEASURED, 0),
        ("jamba", "Jamba: 28 Mamba,\n4 attention", PREDICTED, -16),
        ("mamba", "32 Mamba", GUESS, 0),
    ]
    for name, label, color, shift in stacks:
        held = [memory_bytes(HYBRIDS[name], S).total for S in contexts]
        ax.plot(contexts, held, "--", color=color)
        beside(ax, contexts[-1], held[-1], label, color, xytext=(8, shift))
    ax.set(xscale="log", yscale="log", xlim=(contexts[0], contexts[-1]), ylim=(8e6, 3e11))
    ax.set_xticks(contexts[::2], ["4K", "16K", "64K", "256K", "1M"])
    ax.set_yticks([1e7, 1e8, 1e9, 1e10, 1e11], ["10 MB", "100 MB", "1 GB", "10 GB", "100 GB"])
    ax.minorticks_off()
    ax.set(xlabel="context, tokens", ylabel="predicted memory, one sequence")
    caption(ax, dtype="caches in 16 bits, states in fp32",
            shapes="published widths; that MiniMax-01 keeps states of 64 heads in fp32 is assumed"
            )  # fmt: skip
    return fig


@figure(
    name="based-tradeoff",
    title="BASED: a short exact window, and a fixed state for all the past",
    answers=["based-attention"],
    notebook="05",
    alt="Three causal masks: a window of 4 exact; linear attention over all the past, approximate; "
    "BASED, both. Right: predicted bytes a head against window W. The window's keys and values "
    "grow with W; the state of 273 Taylor features stays at 70,980 bytes, as much as 277 exact "
    "tokens; BASED is their sum.",
    sources=["features 1+d+d*d at d=16; state 273*(H+1)*4 bytes, window 2*(W-1)*H*2, H=64", BASED],
)
def based_tradeoff() -> Figure:
    fig, ax = canvas(14, 6.2, "BASED: a short exact window, and a fixed state for all the past")
    T, W, d, H = 10, 4, 16, 64
    near, far = tint(MEASURED, 0.8), tint(PREDICTED, 0.35)
    full, window = causal_mask(torch.arange(T), T).tolist(), causal_mask(torch.arange(T), T, W)
    panels = [("window", near, None), ("linear", far, far), ("BASED", near, far)]
    for k, (name, inside, outside) in enumerate(panels):
        x = 0.4 + 2.25 * k
        write(ax, x, 5.2, name, 16, ha="left", weight="bold")
        rows = [[(inside if close else outside or "#EFEFEF") if seen else None
                 for seen, close in zip(*both, strict=True)]
                for both in zip(full, window.tolist(), strict=True)]  # fmt: skip
        cells(ax, x, 4.9, rows, 0.2, gap=1.2)
    for y, color, text in [(2.2, near, "exact: keys and values of W tokens"),
                           (1.6, far, "all the past, 1 + s + s²/2 for eˢ")]:  # fmt: skip
        box(ax, 0.4, y - 0.17, 0.34, 0.34, "", MUTED, 0, rounded=False)
        ax.patches[-1].set(facecolor=color, edgecolor="none")
        write(ax, 0.95, y, text, 15, ha="left")
    write(ax, 0.4, 0.9, f"layers alternate; a head of each: H = {H}, Taylor "
          f"features\nof {d} dimensions, window in 16 bits, state in fp32",
          13, ha="left", color=MUTED)  # fmt: skip
    state = Linear(1, taylor_features(torch.zeros(d)).numel(), H).state(1, 2)
    windows = [2**k for k in range(4, 11)]
    kept = [Window(1, H, w).state(2**20, 2) for w in windows]
    plot = ax.inset_axes([8.5, 1.25, 4.3, 4.2], transform=ax.transData)
    plot.plot(windows, [value / 1e3 for value in kept], "--", color=MEASURED)
    plot.axhline(state / 1e3, ls="--", color=PREDICTED)
    plot.plot(windows, [(value + state) / 1e3 for value in kept], "--", color=ACCENT)
    beside(plot, 1024, kept[-1] / 1e3, "window", MEASURED)
    beside(plot, 1024, (kept[-1] + state) / 1e3, "BASED", ACCENT)
    beside(plot, 1024, state / 1e3, "state", PREDICTED)
    equal = state / (2 * H * 2)
    write(ax, 8.6, 5.75, f"the state weighs {number(equal)} exact tokens", 14, ha="left")
    plot.set(xlim=(16, 1024), ylim=(0, 360), xlabel="window W, tokens", xticks=[64, 256, 512, 1024])
    plot.set_ylabel("predicted kB a head")
    return fig
