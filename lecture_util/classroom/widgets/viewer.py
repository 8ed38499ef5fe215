"""mask_viewer (notebook 04): what a layer sees, what its cache keeps, how far it reaches."""

from __future__ import annotations

import ipywidgets as widgets
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.choices import menu
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.masks import LAYOUTS, Stack

SIZE = (10.4, 4.0)
SIDE = 288  # pixels of the mask
WIDTH = 384  # of the stack
COME, UNSEEN, SEEN, NOW, KEPT, NEEDED = np.array(
    [to_rgb("#D9D9D9"), (1, 1, 1), style.tint(style.PREDICTED, 0.3), to_rgb(style.PREDICTED),
     to_rgb(style.CACHE), to_rgb(style.ACCENT)]
)  # fmt: skip


class MaskPicture:
    """Left, the layer's mask and below it its cache; right, what an output depends on."""

    def __init__(self, T: int, L: int, every: int) -> None:
        self.T, self.L, self.every = T, L, every
        self.canvas = Canvas(SIZE)
        with self.canvas.still() as fig:
            self.canvas.moving = [*self._mask(fig), *self._cache(fig), *self._stack(fig)]

    def __call__(self, layout: str, W: int, share: int, layer: int, position: int):
        stack = LAYOUTS[layout](self.T, self.L, W, self.every, share)
        now, keys = np.arange(self.T)[:, None], np.arange(self.T)
        sees, kept = stack.sees(layer), stack.kept(layer, position)
        cells = np.where(sees[..., None], SEEN, UNSEEN)
        cells[keys > now] = COME
        cells[position, sees[position]] = NOW
        self.mask.set_data(cells)
        self.row.set_y(position)
        self.title.set_text(f"layer {layer}: {stack.kinds[layer]}")
        strip = np.where(kept[:, None], KEPT, UNSEEN)
        strip[keys > position] = COME
        self.cache.set_data(strip[None])
        dropped = np.flatnonzero(~kept[: position + 1])
        self.dropped.set_data(dropped + 0.5, np.full(len(dropped), 0.5))
        reach = stack.reach(layer, position)
        self._move_stack(stack, layer, position, reach)
        return self.canvas.png(), _words(stack, layer, position, reach[0])

    def _axes(self, fig: Figure, left: float, top: float, width: float, height: float) -> Axes:
        across, down = (100 * inches for inches in self.canvas.size)
        ax = fig.add_axes((left / across, 1 - (top + height) / down, width / across,
                           height / down))  # fmt: skip
        ax.tick_params(length=0, pad=3)
        ax.grid(visible=False)
        return ax

    def _mask(self, fig: Figure) -> list[Artist]:
        T, ticks = self.T, np.arange(0, self.T, 4)
        ax = self._axes(fig, 66, 36, SIDE, SIDE)
        self.mask, lines = _cells(ax, T, T)
        ax.set_xticks([])
        ax.set_yticks(ticks + 0.5, ticks)
        ax.set_ylabel("query at position", labelpad=2)
        self.row = ax.add_patch(Rectangle((0, 0), T, 1, fill=False, ec=style.INK, lw=2.4,
                                          clip_on=False))  # fmt: skip
        self.title = ax.text(0, -0.5, "", size=15, weight="bold", va="bottom")
        return [self.mask, lines, self.row, self.title]

    def _cache(self, fig: Figure) -> list[Artist]:
        T, ticks = self.T, np.arange(0, self.T, 4)
        ax = self._axes(fig, 66, 36 + SIDE + 8, SIDE, 22)
        self.cache, lines = _cells(ax, 1, T)
        ax.set_xticks(ticks + 0.5, ticks)
        ax.set_yticks([0.5], ["cache"])
        ax.set_xlabel("key of position", labelpad=2)
        (self.dropped,) = ax.plot([], [], "x", color=style.MUTED, ms=7, mew=1.6)
        return [self.cache, lines, self.dropped]

    def _stack(self, fig: Figure) -> list[Artist]:
        T, rows, ticks = self.T, self.L + 1, np.arange(0, self.T, 4)
        ax = self._axes(fig, 410, 36, WIDTH, SIDE + 30)
        self.levels, lines = _cells(ax, rows, T)
        ax.set_xticks(ticks + 0.5, ticks)
        ax.set_yticks([])
        ax.set_xlabel("position", labelpad=2)
        self.reached = ax.text(0, -0.5 * rows / T, "", size=15, weight="bold", va="bottom")
        self.labels = [ax.text(T + 0.4, rows - 0.5 - i, "", size=13, va="center")
                       for i in range(rows)]  # fmt: skip
        self.labels[0].set_text("tokens")
        return [self.levels, lines, self.reached, *self.labels]

    def _move_stack(self, stack: Stack, layer: int, position: int, reach: np.ndarray) -> None:
        cells = np.empty((self.L + 1, self.T, 3))
        cells[:] = UNSEEN
        cells[: layer + 2][reach] = NEEDED
        cells[:, position + 1 :] = COME
        self.levels.set_data(cells[::-1])
        for i, label in enumerate(self.labels[1:]):
            reads, kind = stack.reads[i], stack.kinds[i].split(",")[0]
            words = f"{i} {kind}" if reads == i else f"{i} reads {reads}'s keys"
            label.set(text=words, weight="bold" if i == layer else "normal",
                      color=style.INK if i <= layer else style.MUTED)  # fmt: skip
        tokens = int(reach[0].sum())
        self.reached.set_text(
            f"layer {layer}'s output at {position}: from {tokens} token{'s' * (tokens > 1)}"
        )


def _cells(ax: Axes, rows: int, columns: int) -> tuple[Artist, Artist]:
    """An image of that many cells, row 0 on top, and the lines between them."""
    image = ax.imshow(np.ones((rows, columns, 3)), interpolation="nearest", aspect="auto",
                      extent=(0, columns, rows, 0))  # fmt: skip
    ends = [[(0, y), (columns, y)] for y in range(rows + 1)]
    ends += [[(x, 0), (x, rows)] for x in range(columns + 1)]
    lines = LineCollection(ends, colors=style.GRID, linewidths=0.8)
    ax.add_collection(lines)
    ax.set(xlim=(0, columns), ylim=(rows, 0))
    ax.spines[:].set_visible(False)
    return image, lines


def _words(stack: Stack, layer: int, position: int, tokens: np.ndarray) -> str:
    seen, kept = stack.sees(layer)[position].sum(), stack.kept(layer, position).sum()
    past, reads = position + 1, stack.reads[layer]
    cache = "its cache" if reads == layer else f"layer {reads}'s cache"
    return (
        f"Layer {layer}, {stack.kinds[layer]}: query {position} sees <b>{seen} of {past}</b> keys; "
        f"{cache} keeps <b>{kept}</b> for later ones, {past - kept} are dropped.<br>"
        f"After layer {layer} position {position} depends on <b>{tokens.sum()} tokens</b>, back to "
        f"position {tokens.argmax()}. Caches in the stack: {len(set(stack.reads))} for "
        f"{len(stack.reads)} layers."
    )


def mask_viewer(
    layout: str = "hybrid", T: int = 24, L: int = 6, W: int = 6, every: int = 3, share: int = 1
) -> Explorer:
    """What a layer's queries see, what its cache keeps, what its output depends on (notebook 04).

    layout: full, window, hybrid, dilated window, or window + first tokens.
    T, L:   positions and layers shown.   W: keys a query of a window sees, itself included.
    every:  of a hybrid, each so-manieth layer sees everything.   share: layers to a set of keys.

    Example: `mask_viewer("window", W=4, share=2)`
    Raises:  ValueError naming what is out of range.
    """
    for name, value, least, most in [("T", T, 4, 32), ("L", L, 1, 12), ("W", W, 1, T),
                                     ("every", every, 1, 12), ("share", share, 1, 4)]:  # fmt: skip
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}: expected a whole number, {least} to {most}")
    kinds = LAYOUTS[layout](T, L, W, every, share).kinds if layout in LAYOUTS else ()
    first = max((i for i, kind in enumerate(kinds) if kind != "global"), default=L - 1)
    controls = {
        "layout": menu("layout", list(LAYOUTS), layout),
        "W": slider("W, keys a query sees", 1, T, W),
        "share": slider("layers a set of keys", 1, 4, share),
        "layer": slider("layer", 0, L - 1, first),
        "position": slider("position of the query", 0, T - 1, T - 1),
    }
    return Explorer(MaskPicture(T, L, every), controls, columns=2)


def slider(description: str, low: int, high: int, value: int) -> widgets.IntSlider:
    return widgets.IntSlider(description=description, min=low, max=high, value=value)
