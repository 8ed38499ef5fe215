"""The quantization explorer's picture: a histogram, its grids, and errors or columns beside it."""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor

from lecture_util.classroom.figures import plots, style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.rounding import (
    GRIDS,
    NF4,
    SYMMETRIC,
    ZERO_POINT,
    Result,
    Rounded,
)
from lecture_util.quantization.scales import Per

SIZE = (11.2, 3.9)  # as wide as a slide
COLORS = {SYMMETRIC: style.PREDICTED, ZERO_POINT: style.CACHE, NF4: style.ACCENT}
MARKS = {SYMMETRIC: "o", ZERO_POINT: "s", NF4: "D"}
LARGEST, MIDDLING = style.MEASURED, style.INK  # the two grids
BINS = 160
MIDDLE = 0.99  # the share of all numbers that is left when zoomed in


class RoundingPicture:
    """`with_errors` or `with_columns` draws what stands still for a tensor; the rest moves."""

    def __init__(self) -> None:
        self.canvas = Canvas(SIZE)

    def with_errors(self, name: str, x_RD: Tensor) -> None:
        """The histogram's axes, and beside them the errors' of every number of bits."""
        with self.canvas.still() as fig:
            self.canvas.moving = [*self._histogram(fig, name, x_RD), *self._errors(fig)]

    def with_columns(self, name: str, x_RD: Tensor, times: int) -> None:
        """The histogram's axes, and beside them the columns', with room for so much larger ones."""
        with self.canvas.still() as fig:
            self.canvas.moving = [*self._histogram(fig, name, x_RD),
                                  *self._columns(fig, x_RD, times)]  # fmt: skip

    def _histogram(self, fig: Figure, name: str, x_RD: Tensor) -> list[Artist]:
        self.top = fig.add_axes((0.078, 0.44, 0.535, 0.44))
        self.top.set(yscale="log", ylim=(0.7, 2 * x_RD.numel()))
        self.top.set_title(f"how many {name}", fontsize=14, pad=5)
        plots.plain_log_ticks(self.top.yaxis)
        self.top.tick_params(axis="x", labelbottom=False, length=0)
        self.top.grid(visible=False)
        self.bars = self.top.stairs(
            np.ones(BINS), np.arange(BINS + 1), fill=True, baseline=0.1, color=style.WEIGHTS
        )
        self.low = fig.add_axes((0.078, 0.125, 0.535, 0.29))
        self.low.set(ylim=(0, 2), yticks=[])
        self.low.grid(visible=False)
        self.low.spines["left"].set_visible(False)
        self.levels = [
            self.low.add_collection(LineCollection([], colors=color, linewidths=1.3))
            for color in (LARGEST, MIDDLING)
        ]
        self.names = [
            self.low.text(0, y, "", transform=self.low.get_yaxis_transform(), size=13, va="center",
                          color=color, path_effects=style.HALO)
            for y, color in [(1.83, style.shade(LARGEST)), (0.83, MIDDLING)]
        ]  # fmt: skip
        return [self.bars, self.low.xaxis, *self.levels, *self.names]

    def move_histogram(self, x_RD: Tensor, rounded: Rounded, per: Per, zoom: bool) -> None:
        """Count the numbers, and stand the levels of the two scales below them."""
        magnitudes = x_RD.abs().flatten()
        most = magnitudes.quantile(MIDDLE) if zoom else magnitudes.max()
        end = 1.03 * float(most or magnitudes.max())
        counts, edges = np.histogram(x_RD.numpy(), BINS, (-end, end))
        self.bars.set_data(counts, edges)
        self.top.set_xlim(-end, end)
        self.low.set_xlim(-end, end)
        for levels, grid, low in zip(self.levels, rounded.grids, (1.05, 0.05), strict=True):
            levels.set_segments([[(x, low), (x, low + 0.55)] for x in grid.tolist()])
        scope = per if isinstance(per, str) else "group"
        words = f"levels of the {scope} with the largest number", f"levels of a middling {scope}"
        for name, text in zip(self.names, words, strict=True):
            name.set_text(text)
        self.names[1].set_visible(per != "tensor")
        self.levels[1].set_visible(per != "tensor")

    def _errors(self, fig: Figure) -> list[Artist]:
        ax = fig.add_axes((0.685, 0.15, 0.295, 0.73))
        ax.set(yscale="log", xlim=(1.7, 10.5), ylim=(1e-3, 1.5))
        ax.set_xlabel("bits a weight, with scales")
        ax.set_title("relative error", fontsize=14, pad=5)
        plots.plain_log_ticks(ax.yaxis)
        self.curves = {
            grid: ax.plot([], [], "--" if grid != NF4 else "", marker=MARKS[grid], lw=1.8, ms=6,
                          color=COLORS[grid], label=grid)[0]
            for grid in GRIDS
        }  # fmt: skip
        (self.here,) = ax.plot([], [], "o", mfc="none", mec=style.INK, mew=2.4, ms=16)
        ax.legend(loc="upper right")
        return [*self.curves.values(), self.here]

    def move_errors(self, results: dict[str, list[Result]], here: Result) -> None:
        for grid, several in results.items():
            x, y = [one.bits for one in several], [one.relative for one in several]
            self.curves[grid].set_data(x, y)
        self.here.set_data([here.bits], [here.relative])

    def _columns(self, fig: Figure, x_RD: Tensor, times: int) -> list[Artist]:
        most_D = x_RD.abs().amax(0)
        ax = fig.add_axes((0.685, 0.15, 0.295, 0.73))
        self.floor, top = float(most_D[most_D > 0].min()) / 2, float(most_D.max()) * times
        ax.set(yscale="log", xlim=(-1, len(most_D)), ylim=(self.floor, top), xlabel="column")
        ax.set_title("largest |x| of each column", fontsize=14, pad=5)
        plots.plain_log_ticks(ax.yaxis)
        ax.grid(visible=False, axis="x")
        self.stems = [
            ax.add_collection(LineCollection([], colors=color, linewidths=width))
            for color, width in ((style.WEIGHTS, 1.0), (style.MEASURED, 2.2))
        ]
        (self.limit,) = ax.plot([], [], color=style.INK, lw=1.6)
        self.limit_words = ax.text(0.02, 1, "", transform=ax.get_yaxis_transform(), size=13,
                                   va="bottom", path_effects=style.HALO)  # fmt: skip
        return [*self.stems, self.limit, self.limit_words]

    def move_columns(self, x_RD: Tensor, in_fp16_D: Tensor, threshold: float) -> None:
        most_D = x_RD.abs().amax(0)
        for stems, chosen in zip(self.stems, (~in_fp16_D, in_fp16_D), strict=True):
            at = chosen.nonzero().flatten().tolist()
            stems.set_segments([[(i, self.floor), (i, float(most_D[i]))] for i in at])
        self.limit.set_data([-1, len(most_D)], [threshold or 1] * 2)
        self.limit_words.set(y=threshold or 1, text=f"from {threshold}: fp16")
        self.limit.set_visible(bool(threshold))
        self.limit_words.set_visible(bool(threshold))
