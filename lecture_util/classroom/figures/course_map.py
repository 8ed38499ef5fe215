"""The course in one picture: thirteen notebooks along the path of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.patches import Circle, Polygon

from lecture_util.classroom.figures.diagram import arrow, box, canvas, cells, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "The path of a request, and what makes each step faster"
Icon = Callable[["Axes", float, float, str], None]


class Stop(NamedTuple):
    """A notebook: its number, name, what it is about, and a drawing of that."""

    number: str
    name: str
    about: str
    icon: Icon


def _raised(ax: Axes, draw: Callable, *args: object) -> None:
    """Draw on the canvas, above the cards."""
    before = set(ax.get_children())
    draw(ax, *args)
    for artist in set(ax.get_children()) - before:
        artist.set_zorder(artist.get_zorder() + 2)


def _question(ax: Axes, x: float, y: float, color: str) -> None:
    bubble = [(0, 0.2), (0, 0.75), (1.25, 0.75), (1.25, 0.2), (0.5, 0.2), (0.3, 0), (0.3, 0.2)]
    ax.add_patch(Polygon([(x + a, y + b) for a, b in bubble], fc="white", ec=color, lw=1.8,
                         joinstyle="round", zorder=4))  # fmt: skip
    write(ax, x + 0.62, y + 0.47, "Why …?", 13, zorder=5)


def _bars(ax: Axes, x: float, y: float, bars: list[tuple], side: float = 0.22) -> None:
    """(start, length, row, colour, strength), in units of `side`."""
    for start, length, row, color, strength in bars:
        ax.barh(y + side * (row + 0.5), side * length - 0.04, side - 0.05,
                left=x + side * start, color=tint(color, strength), zorder=4)  # fmt: skip


def _slots(ax: Axes, x: float, y: float, color: str) -> None:
    _bars(ax, x, y, [(0, 2, 2, color, 1), (2, 4, 2, color, 0.35), (0, 4, 1, color, 0.6),
                     (4, 2, 1, color, 0.9), (0, 1, 0, color, 0.35), (1, 3, 0, color, 0.9),
                     (4, 2, 0, color, 0.5)])  # fmt: skip


def _pages(ax: Axes, x: float, y: float, color: str) -> None:
    strong, pale, free = tint(color, 0.9), tint(color, 0.4), "#E8E8E8"
    _raised(ax, cells, x, y + 0.72, [[strong, free, pale, strong, free],
                                     [pale, strong, free, pale, strong],
                                     [free, pale, strong, free, pale]], 0.24)  # fmt: skip


def _workload(ax: Axes, x: float, y: float, color: str) -> None:
    _bars(ax, x, y + 0.2, [(0, 2.4, 0, color, 1), *((2.5 + k, 0.8, 0, color, 0.45)
                                                    for k in range(4))])  # fmt: skip


def _roof(ax: Axes, x: float, y: float, color: str) -> None:
    ax.plot([x, x, x + 1.3], [y + 0.78, y, y], color=MUTED, lw=1.4, zorder=4)
    ax.plot([x + 0.08, x + 0.75, x + 1.3], [y + 0.08, y + 0.62, y + 0.62], color=color, lw=3,
            zorder=4)  # fmt: skip
    ax.plot(x + 0.36, y + 0.3, "o", color=MEASURED, ms=9, zorder=5)


def _guesses(ax: Axes, x: float, y: float, color: str) -> None:
    for k, (mark, face) in enumerate((("✓", color), ("✓", color), ("✓", color), ("✗", MEASURED))):
        box(ax, x + 0.33 * k, y + 0.22, 0.28, 0.4, mark, face, 0.4, 13)


def _bits(ax: Axes, x: float, y: float, color: str) -> None:
    strong, gone = tint(color, 0.9), tint(color, 0.15)
    _raised(ax, cells, x, y + 0.7, [[strong] * 8, [gone] * 8], 0.165)
    _raised(ax, cells, x, y + 0.33, [[strong] * 2 + [gone] * 6, [gone] * 8], 0.165)


def _layers(ax: Axes, x: float, y: float, color: str) -> None:
    for k in range(5):
        box(ax, x + 0.15, y + 0.155 * k, 0.9, 0.11, color=MUTED if k in (1, 3) else color,
            strength=0 if k in (1, 3) else 0.8, rounded=False)  # fmt: skip


def _merge(ax: Axes, x: float, y: float, color: str) -> None:
    for height in (0.05, 0.38, 0.71):
        ax.plot(x + 0.1, y + height, "o", color=tint(color, 0.55), ms=10, zorder=5)
        ax.plot([x + 0.1, x + 1.0], [y + height, y + 0.38], color=color, lw=1.8, zorder=4)
    ax.plot(x + 1.05, y + 0.38, "o", color=color, ms=17, zorder=5)


def _cache(ax: Axes, x: float, y: float, color: str) -> None:
    for k in range(6):
        ax.bar(x + 0.11 + 0.21 * k, 0.12 * (k + 1), 0.16, y, color=tint(color, 0.85), zorder=4)


def _shrunk(ax: Axes, x: float, y: float, color: str) -> None:
    for k in range(4):
        ax.bar(x + 0.08 + 0.17 * k, 0.72, 0.12, y, color=tint(color, 0.85), zorder=4)
    _raised(ax, arrow, (x + 0.74, y + 0.36), (x + 1.04, y + 0.36))
    ax.bar(x + 1.17, 0.72, 0.12, y, color=tint(color, 0.85), zorder=4)


def _state(ax: Axes, x: float, y: float, color: str) -> None:
    _raised(ax, arrow, (x, y + 0.38), (x + 0.39, y + 0.38))
    box(ax, x + 0.4, y + 0.12, 0.52, 0.52, color=color, strength=0.8)
    _raised(ax, arrow, (x + 0.93, y + 0.38), (x + 1.32, y + 0.38))


# What happens, its colour, and the notebooks about it.
PATH: tuple[tuple[str, str, tuple[Stop, ...]], ...] = (
    ("a question comes", ACCENT, (
        Stop("00", "start here", "predict,\nmeasure, read", _question),
        Stop("09", "continuous\nbatching", "who is done\nmakes room", _slots),
        Stop("10", "paged attention", "memory lent\nby the page", _pages))),
    ("a forward runs", GUESS, (
        Stop("01", "the inference\nworkload", "a prompt, then\ntoken by token", _workload),
        Stop("02", "arithmetic\nintensity", "memory sets\nthe pace", _roof),
        Stop("08", "speculative\nsampling", "several tokens\na forward", _guesses))),
    ("it reads the weights", PREDICTED, (
        Stop("06", "quantization", "fewer bits", _bits),
        Stop("07", "pruning and\ndistillation", "fewer layers,\nthen repair", _layers),
        Stop("11", "model merging", "one model\nof many", _merge))),
    ("it reads the past", CACHE, (
        Stop("03", "the KV cache", "compute once,\nread ever after", _cache),
        Stop("04", "a smaller\nKV cache", "fewer heads,\nor windows", _shrunk),
        Stop("05", "beyond\nattention", "a state that\nnever grows", _state))),
)  # fmt: skip
LAST = ("12", "all of it together", "one model, one machine, one table: "
        "what multiplies, what does not, and how far a prediction goes")  # fmt: skip


@figure(
    name="course-map",
    title=TITLE,
    answers=[],
    notebook="00",
    alt="Four steps, three notebooks each. A question comes: 00 start here, 09 continuous "
    "batching, 10 paged attention. A forward runs: 01 the workload, 02 arithmetic intensity, 08 "
    "speculative sampling. It reads the weights: 06 quantization, 07 pruning and distillation, 11 "
    "merging. It reads the past: 03 the KV cache, 04 a smaller one, 05 beyond attention. Then the "
    "next token goes round again. Below, across all steps: 12 all of it together.",
    sources=["the notebooks' titles; drawn by hand"],
)
def course_map() -> Figure:
    fig, ax = canvas(15, 9.75, TITLE)
    width, height = 3.6, 1.95
    for k, (step, color, stops) in enumerate(PATH):
        x = 0.3 + width * k
        _chevron(ax, x, 8.75, width, 0.8, step, color)
        for row, stop in enumerate(stops):
            _card(ax, x, 6.62 - 2.1 * row, width - 0.14, height, stop, color)
    left, right = 0.3 + 1.5 * width, 0.3 + 3.5 * width
    arrow(ax, (right, 2.38), (right, 1.95), (left, 1.95), (left, 2.38), color=INK, width=2.4)
    write(ax, (left + right) / 2, 1.95, "a token comes out, and goes round again", 14,
          bbox={"fc": "white", "ec": "none", "pad": 4}, zorder=5)  # fmt: skip
    number, name, about = LAST
    box(ax, 0.3, 0.3, 4 * width - 0.14, 1.2, color=MEASURED, strength=0.12)
    _badge(ax, 0.85, 0.9, number, MEASURED)
    write(ax, 1.35, 0.9, name, 16, ha="left", weight="bold", zorder=4)
    write(ax, 4.7, 0.9, about.replace(": ", ":\n"), 13.5, ha="left", zorder=4)
    for k, tall in enumerate((0.1, 0.2, 0.32, 0.5, 0.8)):
        ax.bar(13.1 + 0.27 * k, tall, 0.2, 0.48, color=tint(MEASURED, 0.3 + 0.17 * k), zorder=4)
    return fig


def _chevron(ax: Axes, x: float, y: float, width: float, height: float, text: str,
             color: str) -> None:  # fmt: skip
    tip, right = 0.28, x + width - 0.1
    corners = [(x, y), (right - tip, y), (right, y + height / 2), (right - tip, y + height),
               (x, y + height), (x + tip, y + height / 2)]  # fmt: skip
    ax.add_patch(Polygon(corners, fc=tint(color, 0.55), ec=color, lw=1.6, zorder=3))
    write(ax, x + width / 2 - 0.02, y + height / 2, text, 14.5, weight="bold", zorder=4)


def _card(ax: Axes, x: float, y: float, width: float, height: float, stop: Stop,
          color: str) -> None:  # fmt: skip
    box(ax, x, y, width, height, color=color, strength=0.1)
    _badge(ax, x + 0.48, y + height - 0.5, stop.number, color)
    write(ax, x + 0.95, y + height - 0.5, stop.name, 15, ha="left", weight="bold", zorder=4,
          linespacing=1.05)  # fmt: skip
    stop.icon(ax, x + 0.2, y + 0.14, color)
    write(ax, x + 1.68, y + 0.5, stop.about, 13, ha="left", zorder=4)


def _badge(ax: Axes, x: float, y: float, number: str, color: str) -> None:
    ax.add_patch(Circle((x, y), 0.34, fc=tint(color, 0.55), ec=color, lw=1.6, zorder=4))
    write(ax, x, y - 0.01, number, 15, weight="bold", zorder=5)
