"""Boxes, arrows, brackets and grids of cells on a plain canvas, in its own units; plain charts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, PathPatch, Rectangle
from matplotlib.path import Path

from lecture_util.classroom.figures.style import INK, MUTED, shade, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]


def canvas(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A figure of width x height units, 0.8 inch each, without axes; the claim on top."""
    inches = 0.8
    fig = plt.figure(figsize=(inches * width, inches * height + 0.5), layout="none")
    share = inches * height / (inches * height + 0.5)
    ax = fig.add_axes((0, 0, 1, share))
    ax.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    ax.axis("off")
    fig.text(
        0.3 / width,
        1 - 0.12 / fig.get_figheight(),
        title,
        va="top",
        ha="left",
        size=19,
        weight="bold",
    )
    return fig, ax


def write(ax: Axes, x: float, y: float, text: str, size: float = 14, **how: Any) -> None:
    """Text centred on a point, unless told otherwise."""
    ax.text(x, y, text, size=size, **({"ha": "center", "va": "center"} | how))


def box(
    ax: Axes, x: float, y: float, width: float, height: float, text: str = "", color: str = MUTED,
    strength: float = 0.25, size: float = 14, rounded: bool = True,
) -> None:  # fmt: skip
    """A tinted box with its lower left corner at x, y and its text in the middle."""
    face, style = tint(color, strength), {"edgecolor": color, "linewidth": 1.6, "zorder": 3}
    if rounded:
        shape = f"round,pad=0,rounding_size={0.12 * min(height, 1)}"
        patch = FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=face, **style)
    else:
        patch = Rectangle((x, y), width, height, facecolor=face, **style)
    ax.add_patch(patch)
    if text:
        write(ax, x + width / 2, y + height / 2, text, size, zorder=4, color=INK)


def arrow(ax: Axes, *points: Point, color: str = INK, width: float = 1.8) -> None:
    """A line through the points, with its head at the last."""
    for start, end in pairwise(points[:-1]):
        ax.plot(*zip(start, end, strict=True), color=color, lw=width, zorder=2)
    head = FancyArrowPatch(
        points[-2], points[-1], arrowstyle="-|>", mutation_scale=15, color=color, lw=width,
        shrinkA=0, shrinkB=0, zorder=2,
    )  # fmt: skip
    ax.add_patch(head)


def bracket(
    ax: Axes, x0: float, x1: float, y: float, text: str, color: str = INK, size: float = 14,
    above: bool = True,
) -> None:  # fmt: skip
    """A horizontal span with ticks at both ends, and its name above or below."""
    tick = 0.12
    ax.plot([x0, x0, x0, x1, x1, x1], [y - tick, y + tick, y, y, y - tick, y + tick],
            color=color, lw=2, solid_joinstyle="miter", zorder=4)  # fmt: skip
    y_text, side = (y + 0.2, "bottom") if above else (y - 0.2, "top")
    write(ax, (x0 + x1) / 2, y_text, text, size, va=side, color=color)


def cells(
    ax: Axes, x: float, y: float, rows: Sequence[Sequence[Any]], side: float, gap: float = 2
) -> None:  # fmt: skip
    """A grid of coloured squares; x, y is its upper left corner, None leaves a cell empty.

    One shape a colour, runs of equal cells joined, white lines on top: small in the file.
    """
    corners: dict[str, list[Path]] = {}
    for row, colors in enumerate(rows):
        top, column = y - row * side, 0
        for color, run in groupby(colors, lambda color: color and to_hex(color)):
            left = column
            column += len(list(run))
            if color:
                x0, x1 = (round(x + side * edge, 4) for edge in (left, column))
                rectangle = [(x0, top), (x1, top), (x1, top - side), (x0, top - side), (x0, top)]
                corners.setdefault(color, []).append(Path(rectangle, closed=True))
    for color, paths in corners.items():
        joined = Path.make_compound_path(*paths)
        ax.add_patch(PathPatch(joined, facecolor=color, edgecolor="none", zorder=2))
    height, width = len(rows), max(map(len, rows))
    lines_x = [(x + k * side, x + k * side, None) for k in range(width + 1)]
    lines_y = [(y, y - height * side, None) for _ in range(width + 1)]
    lines_x += [(x, x + width * side, None) for _ in range(height + 1)]
    lines_y += [(y - k * side, y - k * side, None) for k in range(height + 1)]
    flat = [[value for line in lines for value in line] for lines in (lines_x, lines_y)]
    ax.plot(*flat, color="white", lw=gap, zorder=2.5, solid_capstyle="butt")


def headline(fig: Figure, text: str) -> None:
    """The claim of a chart, at the figure's left edge like the diagrams'."""
    fig.get_layout_engine().set(h_pad=0.12)
    fig.suptitle(text, x=0.01, ha="left", size=18, weight="bold")


def chart(title: str, columns: int = 1, height: float = 5.4) -> tuple[Figure, Any]:
    """A figure of one axes (or several side by side), its claim at the left edge on top."""
    fig, axes = plt.subplots(1, columns, figsize=(10.4, height), layout="constrained")
    headline(fig, title)
    return fig, axes


def beside(ax: Axes, x: float, y: float, text: str, color: str = INK, **how: Any) -> None:
    """A label 8 points to the right of a point of a chart, instead of a legend."""
    ax.annotate(text, (x, y), **({"xytext": (8, 0), "textcoords": "offset points", "size": 14,
                "va": "center", "color": shade(color)} | how))  # fmt: skip
