"""Bars of two predictions: the plain cached loop, and the configuration that is switched on."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.roofline import Accelerator, format_bytes, format_seconds
from lecture_util.together.predict import Prediction

SIZE = (11.2, 2.5)  # as wide as a slide
ROWS = ("cached loop", "yours")
ROOM = 1.5  # a panel reaches so much further than its longest bar, for the number at its end


class ConfiguredPicture:
    """Three panels of two bars each: tokens a second, first token, bytes (weights, then cache).

    A line stands where the machine's memory ends, unless that is far off.
    """

    def __init__(self) -> None:
        self.canvas = Canvas(SIZE)
        with self.canvas.still() as fig:
            self.canvas.moving = [
                *self._panel(fig, 0, "tokens a second"),
                *self._panel(fig, 1, "first token after"),
                *self._panel(fig, 2, "bytes held | memory"),
            ]

    def draw(self, plain: Prediction, now: Prediction, machine: Accelerator) -> bytes:
        both = (plain, now)
        rates, firsts = [p.tokens_per_s for p in both], [p.ttft_s for p in both]
        self._set(0, [[rate] for rate in rates], [style.number(rate) for rate in rates])
        self._set(1, [[first] for first in firsts], [format_seconds(first) for first in firsts])
        parts = [[p.weight_bytes, p.cache_bytes] for p in both]
        self._set(2, parts, [format_bytes(p.memory_bytes) for p in both])
        wall = machine.memory_bytes / (ROOM * max(p.memory_bytes for p in both))
        self.wall.set_xdata([min(wall, 1)] * 2)
        self.wall.set_visible(wall < 1)
        return self.canvas.png()

    def _panel(self, fig: Figure, place: int, title: str) -> list[Artist]:
        if place == 0:
            self.bars: dict[tuple[int, int, int], Rectangle] = {}
            self.labels: dict[tuple[int, int], Artist] = {}
            for y, name in zip((0.627, 0.233), ROWS, strict=True):
                fig.text(0.105, y, name, ha="right", va="center", size=14)
        ax = fig.add_axes((0.115 + 0.3 * place, 0.03, 0.275, 0.79))
        ax.set(xlim=(0, 1), ylim=(1.55, -0.55), xticks=[], yticks=[])
        ax.spines["bottom"].set_visible(False)
        ax.set_title(title, fontsize=15, pad=7)
        for row in range(2):
            for part, color in enumerate((style.WEIGHTS, style.CACHE) if place == 2 else
                                         (style.PREDICTED,)):  # fmt: skip
                look = {"fc": style.tint(color, 0.6 if row else 0.3), "ec": color, "ls": "--"}
                bar = Rectangle((0, row - 0.36), 0, 0.72, lw=1.6, **look)
                self.bars[place, row, part] = ax.add_patch(bar)
            weight = "bold" if row else "normal"
            self.labels[place, row] = ax.text(
                0, row, "", va="center", size=14, weight=weight, path_effects=style.HALO
            )
        moving: list[Artist] = [a for key, a in self.bars.items() if key[0] == place]
        if place == 2:
            (self.wall,) = ax.plot([1, 1], [-0.5, 1.5], color=style.INK, lw=3)
            moving.append(self.wall)
        return moving + [a for key, a in self.labels.items() if key[0] == place]

    def _set(self, place: int, rows: Sequence[Sequence[float]], words: Sequence[str]) -> None:
        end = ROOM * max(map(sum, rows))
        for row, (parts, text) in enumerate(zip(rows, words, strict=True)):
            left = 0.0
            for part, value in enumerate(parts):
                self.bars[place, row, part].set(x=left, width=value / end)
                left += value / end
            self.labels[place, row].set(x=left + 0.02, text=text)
