"""weight_inspector (notebook 06): one group's stored bytes, down to the bits."""

from __future__ import annotations

import ipywidgets as widgets
import torch
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.bytes_html import bits, strip
from lecture_util.classroom.widgets.bytes_of import NF4, STORED, ZERO_POINT, group_of
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.choices import menu
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.rounding import first_rows, samples

SIZE = (11.2, 1.25)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
MOST = 64  # values of a group that a slide has room for


class WeightInspector(Explorer):
    """The explorer; `group` is the group that is shown."""

    def __init__(self, w_FD: Tensor, group_size: int, controls: dict[str, widgets.Widget],
                 scale_dtype: torch.dtype) -> None:  # fmt: skip
        self.w_FD, self.group_size, self.scale_dtype = w_FD, group_size, scale_dtype
        self.strip, self.bits = widgets.HTML(), widgets.HTML()
        self.canvas = Canvas(SIZE)
        with self.canvas.still() as fig:
            self.canvas.moving = self._line(fig)
        super().__init__(self._draw, controls, [self.strip, self.bits], columns=4)

    def redraw(self, change: object = None) -> None:
        """Let `value` fit a row's last group, which may be shorter, then draw."""
        D, value = self.w_FD.shape[1], self.controls["value"]
        with self.quiet():
            value.max = min(self.group_size, D - self.values["group"] * self.group_size) - 1
        super().redraw(change)

    def _draw(self, stored: str, row: int, group: int, value: int) -> tuple[bytes, str]:
        start = group * self.group_size
        values = self.w_FD[row, start : start + self.group_size]
        self.group = group_of(values, stored, self.scale_dtype)
        self.strip.value = strip(self.group, value)
        self.bits.value = bits(self.group, value)
        self._move_line(value)
        return self.canvas.png(), self._words(value, start)

    # --- the levels

    def _line(self, fig: Figure) -> list[Artist]:
        ax = self.ax = fig.add_axes((0.03, 0.3, 0.94, 0.5))
        ax.set(ylim=(0, 1), yticks=[])
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
        fig.text(0.03, 0.86, "levels, and the group's values on them", size=14, weight="bold")
        self.ticks = ax.add_collection(LineCollection([], colors=style.PREDICTED, linewidths=1.6))
        (self.dots,) = ax.plot([], [], "o", color=style.MUTED, ms=7, alpha=0.6, mec="none")
        (self.here,) = ax.plot([], [], "o", color=style.MEASURED, mec=style.INK, ms=12)
        (self.goes,) = ax.plot([], [], color=style.MEASURED, lw=2.4)
        return [ax.xaxis, self.ticks, self.dots, self.goes, self.here]

    def _move_line(self, chosen: int) -> None:
        g = self.group
        ends = torch.cat((g.levels, g.values)).aminmax()
        room = 0.02 * float(ends.max - ends.min) or 1.0
        self.ax.set_xlim(float(ends.min) - room, float(ends.max) + room)
        self.ticks.set_segments([[(x, 0), (x, 0.45)] for x in g.levels.tolist()])
        self.dots.set_data(g.values.tolist(), [0.72] * len(g.values))
        x, back = float(g.values[chosen]), float(g.back[chosen])
        self.here.set_data([x], [0.72])
        self.goes.set_data([x, back, back], [0.72, 0.45, 0])

    def _words(self, chosen: int, start: int) -> str:
        g, code = self.group, int(self.group.codes[chosen])
        x, back = float(g.values[chosen]), float(g.back[chosen])
        unit = "level × absmax" if g.stored == NF4 else "code × scale"
        if g.zero is not None:
            unit = "(code – zero) × scale"
        off = float((g.back - g.values).norm() / (g.values.norm() or 1))
        return (
            f"Column {start + chosen}: {x:.5g} is stored as <b>code {code}</b> and read back, "
            f"{unit}, as <b>{back:.5g}</b>, off by {back - x:+.2g}. The group: {len(g.values)} "
            f"weights in <b>{g.nbytes} bytes</b> ({8 * g.nbytes / len(g.values):.2f} bits each), "
            f"relative error {style.number(100 * off)}%."
        )


def weight_inspector(
    weights: Tensor | None = None,
    group_size: int = 16,
    *,
    stored: str = ZERO_POINT,
    row: int = 0,
    group: int = 0,
    value: int = 0,
    scale_dtype: torch.dtype = torch.float16,
) -> WeightInspector:
    """One group of a weight matrix as its bytes: codes, bits, scale, errors (notebook 06).

    weights:     (F, D); None: random ones, seeded.   group_size: 2 to 64 neighbours in a row.
    stored:      "int8", "int4", "int4 zero-point" or "NF4". Of two codes in a byte the first is
                 the high half; a signed int4 is stored as code + 8.
    row, group, value: where to start.   scale_dtype: of scales, but NF4's is fp32.

    Example: `weight_inspector(model.layers[3].down.weight, group_size=48)`
    Raises:  ValueError naming what is no matrix, holds NaN, or is out of range.
    """
    if type(group_size) is not int or not 2 <= group_size <= MOST:
        raise ValueError(f"group_size is {group_size!r}: the page has room for 2 to {MOST}")
    if scale_dtype not in SCALES:
        raise ValueError(f"scale_dtype is {scale_dtype!r}: choose from {list(SCALES)}")
    w_FD = first_rows("weights", samples()[0] if weights is None else weights)
    F, D = w_FD.shape
    groups = -(-D // group_size)
    ends = {"row": F, "group": groups, "value": min(group_size, D - group * group_size)}
    for (name, end), at in zip(ends.items(), (row, group, value), strict=True):
        if type(at) is not int or not 0 <= at < end:
            raise ValueError(f"{name} is {at!r}: expected a whole number, 0 to {end - 1}")
    controls = {"stored": menu("stored as", list(STORED), stored)} | {
        name: widgets.IntSlider(description=name, min=0, max=ends[name] - 1, value=at)
        for name, at in (("row", row), ("group", group), ("value", value))
    }
    return WeightInspector(w_FD, group_size, controls, scale_dtype)
