"""Boxes, arrows and brackets on a plain canvas, measured in its own units."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from lecture_util.classroom.figures.style import INK, MUTED, tint

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
