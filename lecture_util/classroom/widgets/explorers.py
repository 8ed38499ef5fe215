"""The explorers of notebooks 02 and 03: move a slider, and the accounting answers."""

from __future__ import annotations

from functools import partial

import ipywidgets as widgets
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lecture_util.classroom.figures import plots, style
from lecture_util.classroom.widgets.explore import Explorer, explore
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import (
    ACCELERATORS,
    DTYPE_BYTES,
    Accelerator,
    Cost,
    attention,
    decode_step,
    kv_cache_bytes,
    matmul,
    mlp,
    this_machine,
    weight_bytes,
)

THIS_MACHINE = "this machine"  # measured when first chosen, which takes some seconds
BATCHES = [2**k for k in range(11)]
CONTEXTS = [2**k for k in range(7, 18)]
SPAN = (0.3, 20_000)  # FLOPs a byte: fixed, so that the point moves and the roof does not
SHAPE = "llama-2-13b"


def accelerator_named(name: str) -> Accelerator:
    """One of the table's, or this machine as measured."""
    return this_machine() if name == THIS_MACHINE else ACCELERATORS[name]


def sixteen_bits(accelerator: Accelerator) -> str:
    """bf16 where the accelerator computes in it, else fp16."""
    return "bf16" if "bf16" in accelerator.flops_per_s else "fp16"


def layer_cost(layer: str, config: Config, B: int, T: int, S: int, G: int) -> Cost:
    """What one layer of the config costs, its N query heads regrouped in groups of G."""
    if layer == "matmul D×F":
        return matmul(B * T, config.D, config.F)
    if layer == "MLP":
        return mlp(B, T, config.D, config.F)
    return attention(B, max(S, T), T, config.N, config.N // G, config.H)


def roofline_explorer(accelerator: str = "h100") -> Explorer:
    """Where a layer of Llama-2-13B lands on a roofline, as B, T, S and G move (notebook 02)."""
    config = PUBLISHED[SHAPE]
    groups = [G for G in range(1, config.N + 1) if config.N % G == 0]
    return explore(
        partial(_draw_roofline, config),
        accelerator=_menu("accelerator", [*ACCELERATORS, THIS_MACHINE], accelerator),
        layer=_menu("layer", ["matmul D×F", "MLP", "attention"], "MLP"),
        B=_slider("B, sequences", BATCHES, 1),
        T=_slider("T, positions now", [1, 2, 4, 8, 16, 64, 256, 1024, 4096], 1),
        S=_slider("S, attended to", CONTEXTS, 1024),
        G=_slider("G, queries a KV head", groups, 1),
    )


def _draw_roofline(
    config: Config, accelerator: str, layer: str, B: int, T: int, S: int, G: int
) -> tuple[Figure, str]:
    machine = accelerator_named(accelerator)
    dtype = sixteen_bits(machine)
    cost = layer_cost(layer, config, B, T, S, G)
    bound, seconds = cost.bound(machine, dtype), cost.time_s(machine, dtype)
    with matplotlib.rc_context(style.STYLE | {"figure.constrained_layout.use": False}):
        fig = Figure(figsize=(8.4, 4.2), dpi=100)
        ax = fig.add_axes((0.11, 0.15, 0.86, 0.72))
        plots.roofline(machine, dtype, ax=ax, title=f"{layer}: {bound} sets the pace", span=SPAN)
        ax.set_ylim(machine.bandwidth_bytes_per_s * 0.2, machine.peak(dtype) * 4)
        rate = cost.flops / seconds
        ax.vlines(cost.intensity, ax.get_ylim()[0], rate, color=style.ACCENT, lw=2)
        ax.plot([cost.intensity], [rate], "o", color=style.ACCENT, ms=14, zorder=5)
    attends = f", S = {max(S, T):,}, G = {G}" if layer == "attention" else ""
    text = (
        f"<b>{style.number(cost.intensity)} FLOPs per byte</b>, ridge "
        f"{style.number(machine.ridge(dtype))}: <b>{bound}-bound</b>, at least "
        f"{style.number(seconds * 1e6)} µs "
        f"({style.number(cost.flops / 1e9)} GFLOP, {style.number(cost.bytes / 1e6)} MB; "
        f"B = {B:,}, T = {T:,}{attends})"
    )
    return fig, text


def latency_explorer(model: str = SHAPE, accelerator: str = "h100") -> Explorer:
    """Memory, latency and throughput of a decode step, as everything moves (notebook 03)."""
    return explore(
        _draw_latency,
        model=_menu("model", list(PUBLISHED), model),
        accelerator=_menu("accelerator", [*ACCELERATORS, THIS_MACHINE], accelerator),
        B=_slider("B, sequences", BATCHES, 1),
        S=_slider("S, positions each", CONTEXTS, 1024),
        dtype=_menu("weights and cache in", list(DTYPE_BYTES), "bf16"),
    )


def _draw_latency(model: str, accelerator: str, B: int, S: int, dtype: str) -> tuple[Figure, str]:
    config, machine, width = PUBLISHED[model], accelerator_named(accelerator), DTYPE_BYTES[dtype]
    step = decode_step(config, B, S, machine, dtype_bytes=width)
    with matplotlib.rc_context(style.STYLE | {"figure.constrained_layout.use": False}):
        fig = Figure(figsize=(9.6, 4.4), dpi=100)
        bar, curve = fig.add_axes((0.085, 0.15, 0.15, 0.7)), fig.add_axes((0.36, 0.15, 0.62, 0.7))
        weights = weight_bytes(config, width) / 1e9
        _draw_memory(bar, weights, kv_cache_bytes(config, B, S, width) / 1e9, machine)
        steps = [decode_step(config, b, S, machine, dtype_bytes=width) for b in BATCHES]
        x = [one.latency_s * 1e3 for one in steps]
        y = [one.throughput_tokens_per_s for one in steps]
        fitting = sum(bool(one.fits) for one in steps)
        curve.plot(x, y, ls=":", color=style.MUTED, label="does not fit")
        curve.plot(x[:fitting], y[:fitting], "--", color=style.PREDICTED, label="fits")
        curve.plot(x, y, "o", color=style.MUTED, ms=4)
        curve.plot([step.latency_s * 1e3], [step.throughput_tokens_per_s], "o",
                   color=style.ACCENT if step.fits else style.MUTED, ms=15, zorder=5)  # fmt: skip
        curve.set(xscale="log", yscale="log", xlim=(x[0] / 1.5, x[-1] * 1.5))
        curve.set_ylim(y[0] / 2, y[-1] * 2)
        curve.set(xlabel="latency of a step, ms", ylabel="throughput, tokens/s")
        plots.plain_log_ticks(curve.xaxis)
        plots.plain_log_ticks(curve.yaxis)
        curve.legend(loc="lower right")
        curve.set_title(f"B = 1 to {BATCHES[-1]:,}; here B = {B:,}", weight="normal")
    fits = "fits" if step.fits else '<span style="color:#B00020">does not fit</span>'
    beyond = f" (the model was trained for {config.max_context:,} positions)"
    text = (
        f"<b>{style.number(step.memory_bytes / 1e9, 4)} GB, {fits}</b> in "
        f"{style.number(machine.memory_bytes / 1e9)} GB; latency at least "
        f"<b>{style.number(step.latency_s * 1e3, 4)} ms</b> a token, throughput at most "
        f"<b>{style.number(step.throughput_tokens_per_s, 4)} tokens/s</b>"
        f"{beyond if config.max_context < S else ''}"
    )
    return fig, text


def _draw_memory(ax: Axes, weights: float, cache: float, machine: Accelerator) -> None:
    """Weights below, cache on top, and the line they must stay under."""
    room = machine.memory_bytes / 1e9
    ax.bar([0], [weights], color=style.WEIGHTS, width=0.9)
    ax.bar([0], [cache], bottom=[weights], color=style.CACHE, width=0.9)
    top = max(1.15 * room, 1.08 * (weights + cache))
    for bottom, height, name in [(0, weights, "weights"), (weights, cache, "cache")]:
        if height > 0.08 * top:
            ax.text(0, bottom + height / 2, name, ha="center", va="center", size=13)
    ax.axhline(room, color=style.INK, lw=2, ls=(0, (5, 2)))
    ax.set(xlim=(-0.7, 0.7), ylim=(0, top), xticks=[], ylabel="GB")
    ax.grid(axis="x", visible=False)
    ax.set_title(f"of {style.number(room)} GB", weight="normal")


def _menu(description: str, options: list[str], value: str) -> widgets.Dropdown:
    if value not in options:
        raise ValueError(f"{description} is {value!r}: choose from {', '.join(options)}")
    return widgets.Dropdown(description=description, options=options, value=value)


def _slider(description: str, options: list[int], value: int) -> widgets.SelectionSlider:
    labelled = [(f"{option:,}", option) for option in options]
    return widgets.SelectionSlider(description=description, options=labelled, value=value)
