"""memory_stepper (notebook 05): a token at a time through a cache, a window and two states."""

from __future__ import annotations

import ipywidgets as widgets
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.memories import NAMES, Pairs

SIZE = (11.2, 4.0)  # as wide as a slide
CELL = 7  # pixels a number: the same in each memory, so that area is memory
LEFT = {NAMES[0]: 34, NAMES[1]: 400, NAMES[2]: 590, NAMES[3]: 850}  # pixels from the left
TOP = 52  # pixels above the memories
COLORS = dict(zip(NAMES, (style.CACHE, style.INK, style.ACCENT, style.GUESS), strict=True))
TEXT = {name: tuple(0.65 * c for c in to_rgb(color)) for name, color in COLORS.items()}  # legible
LINES = dict(zip(NAMES, ("-", "--", "-", "-."), strict=True))
SHORT = dict(zip(NAMES, ("KV cache", "window", "linear", "SSM"), strict=True))
FULL = 0.75  # a number this far from zero has the full colour
MOST = 48  # tokens for which the picture has room


class MemoryPicture:
    """Contents above, drawn number by number; below, a value read back and how well it was."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs, self.canvas = pairs, Canvas(SIZE)
        self.recall = pairs.recall
        with self.canvas.still() as fig:
            self.canvas.moving = [
                *self._contents(fig), *self._read_back(fig), *self._curves(fig)
            ]  # fmt: skip

    def __call__(self, t: int, pair: int) -> tuple[bytes, str]:
        """The memories after t tokens, asked for the pair of this token, counted from 1."""
        self._move_contents(t, pair)
        self._move_read_back(t, pair)
        self._move_curves(t, pair)
        return self.canvas.png(), self._words(t, pair)

    def _axes(self, fig: Figure, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at this place in pixels from the top left."""
        across, down = (100 * inches for inches in self.canvas.size)
        return fig.add_axes((left / across, 1 - (top + height) / down, width / across,
                             height / down))  # fmt: skip

    def _contents(self, fig: Figure) -> list[Artist]:
        T, H, W = self.pairs.T, self.pairs.H, self.pairs.W
        columns = {NAMES[0]: T, NAMES[1]: max(1, W - 1), NAMES[2]: H, NAMES[3]: H}
        self.images, self.sizes, self.newest, self.asked = {}, {}, {}, {}
        for name, width in columns.items():
            rows = 2 * H if name in NAMES[:2] else H
            ax = self._axes(fig, LEFT[name], TOP, CELL * width, CELL * rows)
            ax.set(xlim=(0, width), ylim=(rows, 0), xticks=[], yticks=[])
            ax.spines[:].set(visible=True, color=style.GRID)
            self.images[name] = _cells(ax, np.full((rows, width), np.nan))
            ax.text(0, -30 / CELL, name, size=15, weight="bold", color=TEXT[name], va="bottom")
            self.sizes[name] = ax.text(0, -7 / CELL, "", size=13, va="bottom")
            if name in NAMES[:2]:
                ax.axhline(H, color="white", lw=2)
                frames = [Rectangle((0, 0), 1, rows, fill=False, clip_on=False) for _ in range(2)]
                self.newest[name], self.asked[name] = map(ax.add_patch, frames)
                self.newest[name].set(ec=style.INK, lw=2.4)
                self.asked[name].set(ec=style.PREDICTED, lw=2.4, ls=(0, (2, 1)))
        for y, letter in [(H / 2, "k"), (1.5 * H, "v")]:
            self.images[NAMES[0]].axes.text(-1, y, letter, size=15, ha="right", va="center")
        rules = {NAMES[2]: "old + v kᵀ", NAMES[3]: "exp(–Δ) old + Δ v kᵀ"}
        for name, rule in rules.items():
            for row, words in enumerate([f"always {H * H} numbers:", rule]):
                self.images[name].axes.text(0, H + 1 + 2.9 * row, words, size=13, va="top")
        self.gate = self.images[NAMES[3]].axes.text(0, H + 6.8, "", size=13, va="top")
        return [*self.images.values(), *self.newest.values(), *self.asked.values(),
                *self.sizes.values(), self.gate]  # fmt: skip

    def _move_contents(self, t: int, pair: int) -> None:
        pairs = self.pairs
        both_THH = np.concatenate([pairs.k_XTH[0], pairs.v_XTH[0]], axis=-1)
        grown = np.full((pairs.T, 2 * pairs.H), np.nan)
        grown[:t] = both_THH[:t]
        slots = max(1, pairs.W - 1)
        ring = np.full((slots, 2 * pairs.H), np.nan)
        ring[pairs.kept(t) % slots] = both_THH[pairs.kept(t)]
        state = pairs.ssm_TXHH[t - 1, 0]  # small numbers: the largest gets the full colour
        contents = grown.T, ring.T, pairs.linear_TXHH[t - 1, 0], FULL * state / np.abs(state).max()
        for name, cells in zip(NAMES, contents, strict=True):
            self.images[name].set_data(cells)
        for name, held, columns in [
            (NAMES[0], np.arange(t), pairs.T),
            (NAMES[1], pairs.kept(t), slots),
        ]:
            self.newest[name].set(x=(t - 1) % columns, visible=t - 1 in held)
            self.asked[name].set(x=(pair - 1) % columns, visible=pair - 1 in held)
        for name, nbytes in pairs.nbytes(t).items():
            self.sizes[name].set_text(f"{nbytes:,} bytes")
        delta = pairs.delta_XT[0, t - 1]
        self.gate.set_text(f"Δ = {delta:.2f}: keeps {np.exp(-delta):.0%}")

    def _read_back(self, fig: Figure) -> list[Artist]:
        H = self.pairs.H
        ax = self._axes(fig, 92, 306, 17 * H, 90)
        ax.set(xlim=(0, H), ylim=(5, 0), xticks=[])
        ax.spines[:].set_visible(False)
        ax.set_yticks(np.arange(5) + 0.5, ["stored", *SHORT.values()])
        ax.tick_params(length=0)
        for label, color in zip(ax.get_yticklabels(), [style.INK, *TEXT.values()], strict=True):
            label.set(color=color, fontsize=13)
        self.back = _cells(ax, np.zeros((5, H)))
        for y in range(1, 5):
            ax.axhline(y, color="white", lw=3)
        self.question = ax.text(-0.2, -0.35, "", size=13, weight="bold", ha="left")
        return [self.back, *ax.lines, self.question]

    def _move_read_back(self, t: int, pair: int) -> None:
        rows = np.full((5, self.pairs.H), np.nan)
        if pair <= t:
            rows[0] = self.pairs.v_XTH[0, pair - 1]
            for row, read_XtH in enumerate(self.pairs.read(t).values(), start=1):
                length = np.linalg.norm(read_XtH[0, pair - 1])
                rows[row] = read_XtH[0, pair - 1] / (length or 1)
        self.back.set_data(rows)
        words = f"v of token {pair}, read back" if pair <= t else f"token {pair} is yet to come"
        self.question.set_text(words)

    def _curves(self, fig: Figure) -> list[Artist]:
        T = self.pairs.T
        ax = self._axes(fig, 590, 270, 386, 86)
        ax.set(xlim=(1, T), ylim=(-0.1, 1.08), yticks=[0, 0.5, 1])
        ax.set_xlabel("tokens seen", labelpad=1)
        ax.text(0, 1.12, f"how like what was stored (mean cosine of {self.pairs.runs} runs)",
                transform=ax.transAxes, size=13, weight="bold")  # fmt: skip
        self.curves, self.ends = {}, {}
        for name in NAMES:
            (self.curves[name],) = ax.plot(
                [], [], LINES[name], color=COLORS[name], marker="o", lw=2.6
            )
            self.ends[name] = ax.text(1.015, 0, "", transform=ax.get_yaxis_transform(), size=13,
                                      color=TEXT[name], va="center")  # fmt: skip
        (self.now,) = ax.plot([], [], color=style.MUTED, lw=1.2)
        return [self.now, *self.curves.values(), *self.ends.values()]

    def _move_curves(self, t: int, pair: int) -> None:
        x = np.arange(pair, t + 1)  # empty until the pair has come
        self.now.set_data([t, t], [-0.1, 1.08])
        levels = {name: self.recall[name][t - 1, pair - 1] for name in NAMES}
        heights = dict(zip(levels, _apart(list(levels.values()), 0.3), strict=True))
        for name, level in levels.items():
            self.curves[name].set_data(x, self.recall[name][pair - 1 : t, pair - 1])
            self.curves[name].set_markevery([len(x) - 1] if len(x) else None)
            self.ends[name].set_text(f"{SHORT[name]} {level:z.2f}" if pair <= t else "")
            self.ends[name].set_y(heights[name] if pair <= t else 0)

    def _words(self, t: int, pair: int) -> str:
        held = ", ".join(f"{name} <b>{n:,}</b>" for name, n in self.pairs.nbytes(t).items())
        if pair > t:
            return f"After {t} tokens, in bytes: {held}. Token {pair} is yet to come."
        let_go = "" if pair - 1 in self.pairs.kept(t) else ", which has let go of it"
        likeness = {name: f"{self.recall[name][t - 1, pair - 1]:z.2f}" for name in NAMES}
        likeness[NAMES[1]] += let_go
        back = ", ".join(f"{SHORT[name]} {words}" for name, words in likeness.items())
        return (
            f"After {t} token{'s' * (t > 1)}, in bytes: {held}.<br>"
            f"Likeness to what token {pair} stored: {back}."
        )


def _cells(ax: Axes, cells: np.ndarray):
    """Numbers as colours, brown below zero and purple above it; nothing where there is none."""
    rows, columns = cells.shape
    return ax.imshow(cells, cmap="PuOr", vmin=-FULL, vmax=FULL, interpolation="nearest",
                     aspect="auto", extent=(0, columns, rows, 0))  # fmt: skip


def _apart(values: list[float], gap: float) -> list[float]:
    """The values moved so that each is at least `gap` from the next, and below 1."""
    order, placed, roof = sorted(range(len(values)), key=lambda i: -values[i]), {}, 1.05
    for i in order:
        placed[i] = min(values[i], roof)
        roof = placed[i] - gap
    low = min(placed.values())
    lift = max(0.0, -0.3 - low)
    return [placed[i] + lift for i in range(len(values))]


def memory_stepper(T: int = 48, W: int = 8, seed: int = 0) -> Explorer:
    """A token at a time through a KV cache, a window, linear attention and an SSM (notebook 05).

    T:    tokens in all, 2 to 48.   W: keys a query of the window sees, itself included.
    seed: of the random keys and values.

    Example: `memory_stepper(W=12)`
    Raises:  ValueError if T or W is out of range.
    """
    if not 2 <= T <= MOST:
        raise ValueError(f"T is {T!r}: the picture has room for 2 to {MOST} tokens")
    if not 1 <= W <= 13:
        raise ValueError(f"W is {W!r}: the picture has room for windows of 1 to 13")
    pairs = Pairs(T=T, W=W, seed=seed)
    controls = {
        "t": widgets.IntSlider(description="tokens seen", min=1, max=T, value=1),
        "pair": widgets.IntSlider(description="asked for token", min=1, max=T, value=1),
    }
    play = widgets.Play(min=1, max=T, value=1, interval=350, show_repeat=False)
    widgets.jslink((play, "value"), (controls["t"], "value"))
    return Explorer(MemoryPicture(pairs), controls, [play], columns=2)
