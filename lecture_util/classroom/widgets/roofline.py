"""roofline_explorer (notebook 02): a point that climbs the roofline as B, T, S and G move."""

from __future__ import annotations

import html
from collections.abc import Sequence

import ipywidgets as widgets
from matplotlib.axes import Axes

from lecture_util.classroom.figures import plots, style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.choices import (
    BATCHES,
    CONTEXTS,
    SHAPE,
    THIS_MACHINE,
    accelerator_named,
    accelerators,
    menu,
    slider,
)
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.layers import LAYERS, layer_cost, measure_layer
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import Accelerator, format_seconds

Point = tuple[str, float, float]  # label, FLOPs per byte, FLOP/s
SPAN = (0.3, 20_000)  # FLOPs a byte: fixed, so that the point moves and the roof does not


class RooflineExplorer(Explorer):
    """The explorer, and the points this machine was seen to reach: `measured` grows."""

    def __init__(self, accelerator: str, measured: Sequence[Point], model: str) -> None:
        if model not in PUBLISHED:
            raise ValueError(f"model is {model!r}: choose from {', '.join(PUBLISHED)}")
        self.config: Config = PUBLISHED[model]
        self.measured = list(measured)
        self.canvas, self._drawn = Canvas((9.6, 3.75)), None
        N = self.config.N
        self.button = widgets.Button(
            description="Measure here",
            tooltip="Compute this layer on this machine and leave the point on the picture",
        )
        self.button.on_click(self.measure)
        self.note = widgets.HTML()  # beside the button
        controls = {
            "accelerator": accelerators(accelerator),
            "layer": menu("layer", LAYERS, "MLP"),
            "B": slider("B, sequences", BATCHES, 1),
            "T": slider("T, positions now", [1, 2, 4, 8, 16, 64, 256, 1024, 4096], 1),
            "S": slider("S, attended to", CONTEXTS, 1024),
            "G": slider("G, queries a KV head", [G for G in range(1, N + 1) if not N % G], 1),
        }
        super().__init__(self._draw, controls, [self.button, self.note])

    def measure(self, _button: object = None) -> None:
        """Measure the layer as the sliders are, here, and show it on this machine's roofline."""
        self._note("Measuring, some seconds …")
        layer, B, T, S, G = (self.values[name] for name in ("layer", "B", "T", "S", "G"))
        try:
            intensity, rate = measure_layer(layer, self.config, B, T, S, G)
        except (ValueError, RuntimeError) as error:  # too long, too large, or out of memory
            self._note(f"Not measured: {html.escape(str(error))}")
            return
        words = [f"B={B:,}", *([f"T={T:,}"] if T > 1 else [])]
        words = [f"S={S:,}"] if layer == "attention" and T == 1 else words
        label = f"{layer} {', '.join(words)}"
        self.measured.append((label, intensity, rate))
        self._note(f"<b>{label}: {style.number(rate / 1e9)} GFLOP/s</b>, measured")
        with self.quiet():
            self.controls["accelerator"].value = THIS_MACHINE
        self.redraw()

    def _note(self, text: str) -> None:
        self.note.value = f'<span aria-live="polite">{text}</span>'

    def _draw(self, accelerator: str, layer: str, B: int, T: int, S: int, G: int):
        machine = accelerator_named(accelerator)
        dtype = machine.sixteen_bits
        if self._drawn != (accelerator, len(self.measured)):
            self._draw_still(machine, dtype)
            self._drawn = accelerator, len(self.measured)
        cost = layer_cost(layer, self.config, B, T, S, G)
        bound, seconds = cost.bound(machine, dtype), cost.time_s(machine, dtype)
        rate = cost.flops / seconds
        every = [layer_cost(layer, self.config, b, T, S, G) for b in BATCHES]
        rates = [one.flops / one.time_s(machine, dtype) for one in every]
        self.batches.set_data([one.intensity for one in every], rates)
        self.stem.set_data([cost.intensity] * 2, [self.floor, rate])
        self.point.set_data([cost.intensity], [rate])
        self.title.set_text(f"{layer}, B = {B:,}: {bound} sets the pace")
        attends = f", S = {max(S, T):,}, G = {G}" if layer == "attention" else ""
        text = (
            f"<b>{style.number(cost.intensity)} FLOPs per byte</b>, ridge "
            f"{style.number(machine.ridge(dtype))}: <b>{bound}-bound</b>, at least "
            f"{format_seconds(seconds)} "
            f"({style.number(cost.flops / 1e9)} GFLOP, {style.number(cost.bytes / 1e6)} MB; "
            f"B = {B:,}, T = {T:,}{attends})"
        )
        return self.canvas.png(), text

    def _draw_still(self, machine: Accelerator, dtype: str) -> None:
        self.floor = machine.bandwidth_bytes_per_s * 0.2
        with self.canvas.still() as fig:
            ax: Axes = fig.add_axes((0.1, 0.16, 0.88, 0.72))
            plots.roofline(machine, dtype, ax=ax, title=" ", span=SPAN)
            ax.set_ylim(self.floor, machine.peak(dtype) * 4)
            for x, side, words in [(0.02, "left", "← waits for memory"),
                                   (0.98, "right", "waits for compute →")]:  # fmt: skip
                ax.text(x, 0.97, words, transform=ax.transAxes, ha=side, va="top",
                        color=style.MUTED, size=13)  # fmt: skip
            seen = [point for point in self.measured if point[2] > self.floor]
            plots.label_points(ax, seen)
            x, y = [x for _, x, _ in seen], [y for _, _, y in seen]
            (self.seen,) = ax.plot(x, y, "D", color=style.MEASURED, ms=9)
            (self.batches,) = ax.plot([], [], "o", color=style.ACCENT, mfc="white", ms=6, mew=1.5)
            (self.stem,) = ax.plot([], [], color=style.ACCENT, lw=2)
            (self.point,) = ax.plot([], [], "o", color=style.ACCENT, mec=style.INK, ms=15, zorder=5)
            self.title = ax.text(0, 1.05, "", transform=ax.transAxes, size=15, weight="bold")
            self.canvas.moving = [self.batches, self.stem, self.seen, self.point, self.title]


def roofline_explorer(
    accelerator: str | None = None, measured: Sequence[Point] = (), model: str = SHAPE
) -> RooflineExplorer:
    """Where a layer of the model lands on a roofline, as B, T, S and G move (notebook 02).

    measured: points (label, FLOPs per byte, FLOP/s) seen on this machine. The button adds the one
              the sliders name. With points, the roofline is this machine's unless you name one.

    Example: `roofline_explorer(measured=[("B=8", 8.0, 2.1e10)])`
    """
    chosen = accelerator or (THIS_MACHINE if measured else "h100")
    return RooflineExplorer(chosen, measured, model)
