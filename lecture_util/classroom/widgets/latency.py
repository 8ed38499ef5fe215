"""latency_explorer (notebook 03): what a decode step holds in memory, and how fast it then is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.patches import Rectangle

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
from lecture_util.classroom.widgets.explore import Explorer, explore
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import (
    DTYPE_BYTES,
    Accelerator,
    StepEstimate,
    decode_step,
    kv_cache_bytes,
    weight_bytes,
)

BEYOND = (
    1.5  # the memory bar shows this many times the capacity, and an arrow for what lies further
)


class LatencyPicture:
    """A memory bar against a wall, and below it latency and throughput for every batch."""

    def __init__(self) -> None:
        self.canvas, self._drawn = Canvas(), None

    def __call__(self, model: str, accelerator: str, B: int, S: int, dtype: str):
        config, machine, width = (
            PUBLISHED[model],
            accelerator_named(accelerator),
            DTYPE_BYTES[dtype],
        )
        if self._drawn != (model, accelerator, dtype):
            self._draw_still(config, machine, width)
            self._drawn = model, accelerator, dtype
        steps = [decode_step(config, b, S, machine, dtype_bytes=width) for b in BATCHES]
        step = steps[BATCHES.index(B)]
        self._move_memory(weight_bytes(config, width), kv_cache_bytes(config, B, S, width))
        self._move_curve(steps, B)
        return self.canvas.png(), _words(step, config, machine, S)

    def _draw_still(self, config: Config, machine: Accelerator, width: float) -> None:
        with self.canvas.still() as fig:
            self.memory = fig.add_axes((0.02, 0.745, 0.96, 0.125))
            self.curve = fig.add_axes((0.1, 0.155, 0.88, 0.47))
            self.canvas.moving = [*self._bar(machine), *self._latencies(config, machine, width)]

    def _bar(self, machine: Accelerator) -> list[Artist]:
        ax, room = self.memory, machine.memory_bytes
        self.room, end = room, BEYOND * room
        ax.set(xlim=(0, end), ylim=(0, 1), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.add_patch(Rectangle((0, 0), room, 1, fc="white", ec=style.MUTED, lw=1))
        ax.text(
            room,
            -0.12,
            f"{machine.name}: {style.number(room / 1e9)} GB",
            ha="right",
            va="top",
            size=13,
        )
        fills = {
            "weights": {"fc": style.WEIGHTS},
            "cache": {"fc": style.CACHE},
            "does not fit": {"fc": "white", "ec": style.MEASURED, "hatch": "////"},
        }
        self.parts = {
            name: ax.add_patch(Rectangle((0, 0.06), 0, 0.88, **fill))
            for name, fill in fills.items()
        }
        self.amounts = {}
        for place, (name, fill) in enumerate(fills.items()):
            x = end * (0.0 + 0.3 * place)
            ax.add_patch(Rectangle((x, 1.2), end * 0.025, 0.45, clip_on=False, **fill))
            self.amounts[name] = ax.text(x + end * 0.032, 1.42, "", va="center", size=14)
        (wall,) = ax.plot([room, room], [-0.15, 1.1], color=style.INK, lw=3.5, clip_on=False)
        self.more = ax.text(
            end,
            0.5,
            "▶",
            ha="right",
            va="center",
            size=22,
            color=style.INK,
            path_effects=style.HALO,
        )
        return [*self.parts.values(), wall, *self.amounts.values(), self.more]

    def _move_memory(self, weights: float, cache: float) -> None:
        total, room = weights + cache, self.room
        ends = {
            "weights": (0, min(weights, room)),
            "cache": (min(weights, room), min(total, room)),
            "does not fit": (room, max(total, room)),
        }
        for name, (start, end) in ends.items():
            self.parts[name].set_x(start)
            self.parts[name].set_width(end - start)
        for name, amount in [
            ("weights", weights),
            ("cache", cache),
            ("does not fit", total - room),
        ]:
            size = f"{style.number(amount / 1e9, 4)} GB" if amount > 0 else "nothing"
            self.amounts[name].set_text(f"{name}: {size}")
        self.more.set_visible(total > BEYOND * room)

    def _latencies(self, config: Config, machine: Accelerator, width: float) -> list[Artist]:
        ax = self.curve
        ends = itertools.product((BATCHES[0], BATCHES[-1]), (CONTEXTS[0], CONTEXTS[-1]))
        corners = [decode_step(config, B, S, machine, dtype_bytes=width) for B, S in ends]
        x = [1e3 * step.latency_s for step in corners]
        y = [step.throughput_tokens_per_s for step in corners]
        ax.set(xscale="log", yscale="log", xlim=(min(x) / 1.6, max(x) * 1.6))
        ax.set(ylim=(min(y) / 2, max(y) * 2.5))
        ax.set(xlabel="latency of a step, ms", ylabel="tokens/s")
        plots.plain_log_ticks(ax.xaxis)
        plots.plain_log_ticks(ax.yaxis)
        (self.all,) = ax.plot(
            [], [], ":o", color=style.MUTED, mfc="white", ms=6, lw=1.6, label="does not fit"
        )
        (self.fitting,) = ax.plot([], [], "--o", color=style.PREDICTED, ms=6, label="fits")
        (self.here,) = ax.plot([], [], color=style.ACCENT, mec=style.INK, mew=1.5, ms=15)
        self.label = ax.annotate(
            "", (0, 0), xytext=(14, -6), textcoords="offset points",
            ha="left", va="top", size=14, weight="bold", path_effects=style.HALO,
        )  # fmt: skip
        ax.legend(handles=[self.fitting, self.all], loc="lower right")
        return [self.all, self.fitting, self.here, self.label]

    def _move_curve(self, steps: Sequence[StepEstimate], B: int) -> None:
        x = [1e3 * step.latency_s for step in steps]
        y = [step.throughput_tokens_per_s for step in steps]
        fitting = sum(bool(step.fits) for step in steps)
        self.all.set_data(x[max(0, fitting - 1) :], y[max(0, fitting - 1) :])
        self.fitting.set_data(x[:fitting], y[:fitting])
        at = BATCHES.index(B)
        self.here.set_data([x[at]], [y[at]])
        self.here.set_marker("o" if steps[at].fits else "X")
        self.label.set_text(f"B = {B:,}")
        self.label.xy = x[at], y[at]


def _words(step: StepEstimate, config: Config, machine: Accelerator, S: int) -> str:
    fits = "fits" if step.fits else '<span style="color:#B00020">does not fit</span>'
    beyond = f" (the model was trained for {config.max_context:,} positions)"
    return (
        f"<b>{style.number(step.memory_bytes / 1e9, 4)} GB, {fits}</b> in "
        f"{style.number(machine.memory_bytes / 1e9)} GB; latency at least "
        f"<b>{style.number(step.latency_s * 1e3, 4)} ms</b> a token, throughput at most "
        f"<b>{style.number(step.throughput_tokens_per_s, 4)} tokens/s</b>"
        f"{beyond if config.max_context < S else ''}"
    )


def latency_explorer(model: str = SHAPE, accelerator: str = "h100") -> Explorer:
    """Memory, latency and throughput of a decode step, as everything moves (notebook 03)."""
    return explore(
        LatencyPicture(),
        model=menu("model", list(PUBLISHED), model),
        accelerator=accelerators(accelerator),
        B=slider("B, sequences", BATCHES, 1),
        S=slider("S, positions each", CONTEXTS, 1024),
        dtype=menu("weights and cache in", list(DTYPE_BYTES), "bf16"),
    )
