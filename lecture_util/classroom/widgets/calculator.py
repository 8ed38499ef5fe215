"""cache_calculator (notebook 04): bytes of any small cache, and the batch and speed they allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ipywidgets as widgets
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from lecture_util.classroom.figures import plots, style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.choices import (
    BATCHES,
    CONTEXTS,
    SHAPE,
    accelerator_named,
    accelerators,
    menu,
    slider,
)
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.kv_reduction.layout import Layout
from lecture_util.kv_reduction.sizes import Technique, cache_bytes, mla_technique, technique
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import DTYPE_BYTES, Accelerator, format_bytes, format_seconds

SIZE = (9.6, 3.3)
HEADS, LATENT = "keys and values", "an MLA latent"
WINDOWS = {"none": 0} | {f"{2**k:,}": 2**k for k in range(7, 13)}
GLOBAL = {"none": 0, "all": 1} | {f"1 in {n}": n for n in (2, 3, 4, 6, 8)}  # as `every` is counted
ROWS = {"": 0.92, "bytes a token": 0.77, "a sequence": 0.63, "sequences that fit": 0.49,
        "step of B": 0.35, "tokens/s of B": 0.21, "tokens/s, full": 0.07}  # fmt: skip
BELOW, ABOVE = 400, 6  # the plot reaches so much further than MHA's caches at the model's own L


class CacheCalculator(Explorer):
    """The explorer; `chosen` and `baseline` are the two techniques that it compares."""

    def __init__(self, accelerator: str, values: dict[str, Any]) -> None:
        self.canvas, self._drawn = Canvas(SIZE), None
        controls = _controls(accelerator)
        for name, value in values.items():
            if name not in controls:
                raise ValueError(f"{name!r} is no control: choose from {', '.join(controls)}")
            if name in ("model", "L", "K"):
                continue  # the others' choices depend on it: set below
            _set(name, controls[name], value)
        _set("model", controls["model"], values.get("model", SHAPE))
        self._model = None
        self._starts = {name: values[name] for name in ("L", "K") if name in values}
        super().__init__(self._draw, controls, columns=3)

    def redraw(self, change: object = None) -> None:
        """Let the controls fit the model and each other, then draw."""
        with self.quiet():
            self._fit()
        super().redraw(change)

    def _fit(self) -> None:
        model, controls = self.controls["model"].value, self.controls
        if model != self._model:
            config, self._model = PUBLISHED[model], model
            divisors = [K for K in range(1, config.N + 1) if config.N % K == 0]
            controls["K"].options = [(f"{K}", K) for K in divisors]
            starts, self._starts = {"K": config.K, "L": config.L} | self._starts, {}
            for name, value in starts.items():
                _set(name, controls[name], value)
        latent = controls["cached"].value == LATENT
        for name in ("K", "W", "share"):
            controls[name].disabled = latent
        for name in ("C", "R"):
            controls[name].disabled = not latent
        controls["every"].disabled = latent or not controls["W"].value

    def _draw(self, model, cached, K, C, R, W, every, share, L, S, B, dtype, accelerator):
        config, machine = replace(PUBLISHED[model], L=L), accelerator_named(accelerator)
        width = DTYPE_BYTES[dtype]
        mha = config.with_kv_heads(config.N)
        layout = Layout.hybrid(L, W or None, every or L + 1, share)

        def baseline(S: int) -> Technique:
            return technique("MHA", mha, Layout.full(L), S, width)

        def chosen(S: int) -> Technique:
            if cached == LATENT:
                return mla_technique("yours", mha, C, R, S, width)
            return technique("yours", config.with_kv_heads(K), layout, S, width)

        if self._drawn != model:
            usual = Layout.full(PUBLISHED[model].L)
            ends = (cache_bytes(PUBLISHED[model].with_kv_heads(config.N), usual, 1, s)
                    for s in (CONTEXTS[0], CONTEXTS[-1]))  # fmt: skip
            self._draw_still(*ends)
            self._drawn = model
        self.baseline, self.chosen = baseline(S), chosen(S)
        curves = [[make(s).held_bytes / 1e9 for s in CONTEXTS] for make in (baseline, chosen)]
        self._move_curves(*curves, S, B, machine)
        self._move_table(S, B, machine)
        return self.canvas.png(), _words(self.baseline, self.chosen, S, B, machine)

    def _draw_still(self, least: float, most: float) -> None:
        """least, most: bytes that MHA holds at the ends of the plot, at the model's own L."""
        with self.canvas.still() as fig:
            self.canvas.moving = [*self._curves(fig, least, most), *self._table(fig)]

    def _curves(self, fig: Figure, least: float, most: float) -> list[Artist]:
        ax = fig.add_axes((0.085, 0.17, 0.45, 0.71))
        ax.set(xscale="log", yscale="log", xlim=(CONTEXTS[0], CONTEXTS[-1]))
        ax.set(ylim=(least / BELOW / 1e9, most * ABOVE / 1e9), xlabel="context, tokens")
        ax.set_title("cache of a sequence, GB", fontsize=14, pad=6)
        plots.plain_log_ticks(ax.xaxis)
        plots.plain_log_ticks(ax.yaxis)
        (self.mha,) = ax.plot([], [], ":", color=style.MUTED, lw=2.4)
        self.mha_words = ax.text(CONTEXTS[-3], 1, "MHA", ha="right", va="bottom", size=13,
                                 color=style.MUTED, path_effects=style.HALO)  # fmt: skip
        (self.room,) = ax.plot([], [], color=style.INK, lw=1.6)
        self.room_words = ax.text(CONTEXTS[0] * 1.15, 1, "", size=13, va="bottom",
                                  path_effects=style.HALO)  # fmt: skip
        (self.curve,) = ax.plot([], [], "--", color=style.CACHE, lw=3.2)
        (self.here,) = ax.plot([], [], "o", color=style.CACHE, mec=style.INK, ms=12)
        return [self.mha, self.mha_words, self.room, self.room_words, self.curve, self.here]

    def _table(self, fig: Figure) -> list[Artist]:
        self.cells: dict[str, list[Artist]] = {}
        for row, y in ROWS.items():
            fig.text(0.575, y, row, size=13, va="center")
            self.cells[row] = [
                fig.text(x, y, "", size=14, va="center", ha="right", weight=weight)
                for x, weight in ((0.845, "normal"), (0.985, "bold"))
            ]
        for cell, words in zip(self.cells[""], ("MHA", "yours"), strict=True):
            cell.set_text(words)
        return [cell for pair in self.cells.values() for cell in pair]

    def _move_curves(self, mha: list[float], yours: list[float], S: int, B: int, machine) -> None:
        self.mha.set_data(CONTEXTS, mha)
        self.mha_words.set_y(mha[-3])
        self.curve.set_data(CONTEXTS, yours)
        self.here.set_data([S], [self.chosen.held_bytes / 1e9])
        each = (machine.memory_bytes - self.chosen.weight_bytes) / B / 1e9
        low, high = self.room.axes.get_ylim()
        self.room.set_data(CONTEXTS[:: len(CONTEXTS) - 1], [each, each])
        shown = low < each < high / 2
        self.room.set_visible(shown)
        words = f"room for each of {B}" if B > 1 else "room beside the weights"
        self.room_words.set(y=each, visible=shown, text=words)

    def _move_table(self, S: int, B: int, machine: Accelerator) -> None:
        for place, one in enumerate((self.baseline, self.chosen)):
            fits, step = one.max_batch(machine.memory_bytes), _latency(one, B, machine)
            full = number(fits / _latency(one, fits, machine)) if fits else "–"
            words = {
                "bytes a token": f"{one.held_bytes / S:,.0f}",
                "a sequence": format_bytes(one.held_bytes),
                "sequences that fit": f"{fits:,}",
                "step of B": format_seconds(step) if B <= fits else "–",
                "tokens/s of B": number(B / step) if B <= fits else "–",
                "tokens/s, full": full,
            }
            for row, text in words.items():
                self.cells[row][place].set_text(text)


def number(value: float) -> str:
    """Three digits that matter, in words of ordinary length up to the millions."""
    return style.number(value) if value < 1e6 else f"{float(f'{value:.3g}'):,.0f}"


def _latency(one: Technique, B: int, machine: Accelerator) -> float:
    """Seconds of a decode step: the longer of moving the bytes and computing."""
    computing = B * one.flops / machine.peak(machine.sixteen_bits)
    return max(one.memory_s(B, machine), computing)


def _words(mha: Technique, yours: Technique, S: int, B: int, machine: Accelerator) -> str:
    ratio, room = mha.held_bytes / yours.held_bytes, machine.memory_bytes
    memory = f"{style.number(room / 1e9)} GB"
    if not (fits := yours.max_batch(room)):
        which = "The weights alone do" if yours.weight_bytes > room else "One sequence does"
        return f'<span style="color:#B00020"><b>{which} not fit</b></span> in {memory}.'
    step = _latency(yours, B, machine)
    bound = "memory" if step == yours.memory_s(B, machine) else "compute"
    speed = (
        f"a step of B = {B:,}: at least <b>{format_seconds(step)}</b> ({bound}-bound), "
        f"at most <b>{number(B / step)} tokens/s</b>"
        if fits >= B
        else f'<span style="color:#B00020"><b>B = {B:,} does not fit</b></span>'
    )
    less = f"{number(ratio)} times less than" if ratio > 1.005 else "as much as"
    return (
        f"<b>{yours.held_bytes / S:,.0f} bytes a token, {less} MHA</b>: "
        f"{format_bytes(yours.held_bytes)} at S = {S:,}; <b>{fits:,} sequences</b> fit beside the "
        f"weights in {memory} (MHA: {mha.max_batch(room):,}); {speed}."
    )


def _controls(accelerator: str) -> dict[str, widgets.Widget]:
    def choice(description: str, options: dict[str, Any], value: Any) -> widgets.Dropdown:
        return widgets.Dropdown(description=description, options=options, value=value)

    return {
        "model": menu("model", list(PUBLISHED), SHAPE),
        "cached": menu("cached", [HEADS, LATENT], HEADS),
        "K": slider("K, KV heads", [1], 1),
        "C": slider("C, latent", [64, 128, 192, 256, 384, 512, 768, 1024], 512),
        "R": slider("R, rotated", [16, 32, 64, 128], 64),
        "W": choice("W, window", WINDOWS, 0),
        "every": choice("global", GLOBAL, 6),
        "share": slider("KV shared by", [1, 2, 3, 4], 1),
        "L": widgets.IntSlider(description="L, layers", min=1, max=128, value=1),
        "S": slider("S, context", CONTEXTS, 4096),
        "B": slider("B, sequences", BATCHES, 1),
        "dtype": menu("numbers in", list(DTYPE_BYTES), "bf16"),
        "accelerator": accelerators(accelerator),
    }  # fmt: skip


def _set(name: str, control: widgets.Widget, value: Any) -> None:
    options = [v[1] if isinstance(v, tuple) else v for v in getattr(control, "_options_full", ())]
    if options and value not in options:
        raise ValueError(f"{name} is {value!r}: choose from {', '.join(map(str, options))}")
    control.value = value


def cache_calculator(accelerator: str = "h100", **chosen: Any) -> CacheCalculator:
    """Bytes of a cache, what fits beside the weights, and how fast it decodes (notebook 04).

    chosen: where the controls start: model, cached ("keys and values" or "an MLA latent"), K, C,
            R, W (0: no window), every (each so-manieth layer sees everything; 0: none), share
            (layers to a set of keys and values), L, S, B, dtype.

    Times are bounds from the accelerator's peaks, for weights and cache in one dtype. MLA stands
    alone, in every layer, with keys and values as wide as the model's heads.

    Example: `cache_calculator(model="llama-3-8b", K=1, W=1024, every=6, share=2)`
    Raises:  ValueError naming the control and what it offers.
    """
    return CacheCalculator(accelerator, chosen)
