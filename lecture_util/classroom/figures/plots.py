"""The plots that notebooks draw again and again, each in one call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lecture_util.classroom.figures.style import (
    HALO,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    claim,
    number,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Bbox

_LEADER = {"arrowstyle": "-", "color": MUTED, "lw": 0.8, "shrinkA": 0, "shrinkB": 5}
# Where a point's label may stand, in points from it; the nearest free place wins.
_PLACES = [
    (9, -15), (9, 9), (-9, 9), (-9, -15), (12, -30), (12, 24), (-12, 24), (-12, -30),
    (14, -46), (14, 40), (-14, 40), (-14, -46),
]  # fmt: skip


def roofline(
    accelerator: Any,
    dtype: str = "bf16",
    points: Sequence[tuple[str, float, float]] = (),
    ax: Axes | None = None,
    compare: Sequence[Any] = (),
    title: str = "",
    span: tuple[float, float] | None = None,
) -> Axes:
    """Draw what an accelerator can reach at each arithmetic intensity, and what was measured.

    `points` are (label, FLOPs per byte, FLOP/s) as measured; `compare` are further accelerators,
    drawn thin; `span` fixes the intensities shown. The dashed roof is a bound, computed from the
    data sheet or from the machine's measured peaks.
    """
    ax = ax or plt.subplots()[1]
    machines = [accelerator, *compare]
    ridges = [machine.ridge(dtype) for machine in machines]
    intensities = [intensity for _, intensity, _ in points if intensity > 0]
    low = min([1.0, *ridges, *intensities]) / 2
    high = max([*ridges, *intensities]) * 8
    low, high = span or (low, high)
    rates = [rate for _, _, rate in points if rate > 0]
    top = max(machine.flops_per_s[dtype] for machine in machines)
    bottom = min([machine.bandwidth_bytes_per_s * low for machine in machines] + rates)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom / 2, top * 5))
    ax.set(xlabel="arithmetic intensity, FLOPs per byte", ylabel=f"attainable FLOP/s, {dtype}")
    for machine, ridge in zip(machines, ridges, strict=True):
        peak, main = machine.flops_per_s[dtype], machine is accelerator
        color = PREDICTED if main else MUTED
        roof = [machine.bandwidth_bytes_per_s * low, peak, peak]
        ax.plot([low, ridge, high], roof, color=color, ls="--", lw=2.6 if main else 1.5)
        ax.annotate(machine.name, (high, peak), xytext=(0, 5), textcoords="offset points",
                    ha="right", va="bottom", color=color, size=12)  # fmt: skip
        if main:
            ax.axvline(ridge, color=tint(PREDICTED, 0.6), lw=1, zorder=1)
            ax.annotate(f"ridge {number(ridge)}", (ridge, 0), xytext=(5, 5),
                        xycoords=("data", "axes fraction"), textcoords="offset points",
                        color=PREDICTED, size=12)  # fmt: skip
    if points:
        ax.plot(*zip(*[(x, y) for _, x, y in points], strict=True), "o", color=MEASURED, ms=9)
        label_points(ax, points)
    plain_log_ticks(ax.xaxis)
    plain_log_ticks(ax.yaxis)
    claim(ax, title or f"Below {number(ridges[0])} FLOPs a byte, memory sets the pace")
    return ax


def label_points(ax: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Write each point's label in the nearest place beside it that is free."""
    fig = ax.figure
    fig.canvas.draw()  # final positions, so that extents are true
    frame = ax.get_window_extent()
    taken = [text.get_window_extent() for text in ax.texts]
    ink = [dot for line in ax.lines if line.get_linestyle() == "--" for dot in _samples(ax, line)]
    dots = [ax.transData.transform((x, y)) for _, x, y in points]
    for index, (label, x, y) in enumerate(points):
        best = None
        for dx, dy in _PLACES:
            text = ax.annotate(label, (x, y), xytext=(dx, dy), textcoords="offset points",
                               ha="left" if dx > 0 else "right", size=12, color=INK,
                               path_effects=HALO)  # fmt: skip
            box = text.get_window_extent().padded(1)
            bad = sum(box.overlaps(other) for other in taken)
            near = [_distance(box, dot) for dot in dots]
            own = near.pop(index)
            bad += sum(gap == 0 for gap in near)
            bad += 0.7 * any(gap < own + 4 for gap in near)  # would read as another's label
            bad += 0.15 * any(box.contains(*dot) for dot in ink) + 0.02 * float(
                np.hypot(dx, dy + 4)
            )
            bad += 3 * (box.x0 < frame.x0 or box.x1 > frame.x1 + 4)
            bad += 3 * (box.y0 < frame.y0 or box.y1 > frame.y1)
            if best is None or bad < best[0]:
                if best is not None:
                    best[1].remove()
                best = (bad, text, box)
            else:
                text.remove()
        _, text, box = best
        taken.append(box)
        if _distance(box, dots[index]) > 18:  # far off: a thin line leads back to its point
            ax.annotate("", (x, y), xytext=text.xyann, textcoords="offset points",
                        arrowprops=_LEADER)  # fmt: skip


def _distance(box: Bbox, dot: tuple[float, float]) -> float:
    """From a box to a point, in pixels; zero inside."""
    dx = max(box.x0 - dot[0], 0, dot[0] - box.x1)
    dy = max(box.y0 - dot[1], 0, dot[1] - box.y1)
    return float(np.hypot(dx, dy + 4))


def _samples(ax: Axes, line: Line2D) -> np.ndarray:
    """Points along a line as drawn, close enough that none slips through a label's box."""
    corners = ax.transData.transform(line.get_xydata())
    steps = np.linspace(0, 1, 60)[:, None]
    pieces = pairwise(corners)
    return np.concatenate([a + steps * (b - a) for a, b in pieces])


def predicted_vs_measured(
    x: Sequence[float],
    predicted: Sequence[float] | None,
    measured: Sequence[float] | None,
    spread: Any = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw a dashed prediction and a solid measurement with its spread over the same x.

    `spread` is a half-width per point, or a pair (low, high) of sequences. `measured=None` says
    "not measured here". An axis whose values span more than a decade is logarithmic.
    """
    ax = ax or plt.subplots()[1]
    x = np.asarray(x, dtype=float)
    drawn = []
    if predicted is not None:
        ax.plot(x, predicted, ls="--", color=PREDICTED, label="predicted", zorder=3)
        drawn.append(np.asarray(predicted, dtype=float))
    if measured is not None:
        measured = np.asarray(measured, dtype=float)
        if spread is not None:
            pair = isinstance(spread, tuple) and len(spread) == 2
            low, high = spread if pair else (measured - spread, measured + np.asarray(spread))
            ax.fill_between(x, low, high, color=tint(MEASURED, 0.3), lw=0, zorder=2)
        ax.plot(x, measured, "-o", color=MEASURED, label="measured", zorder=4)
        drawn.append(measured)
    else:
        ax.text(0.97, 0.06, "not measured here", transform=ax.transAxes, ha="right", color=MUTED)
    if (x > 0).all() and x.max() > 10 * x.min():
        powers = bool((np.log2(x) % 1 == 0).all())
        ax.set_xscale("log", base=2 if powers else 10)
        if powers:
            ax.set_xticks(x if len(x) < 12 else x[::2])
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    values = np.concatenate(drawn)
    if (values > 0).all() and values.max() > 10 * values.min():
        ax.set_yscale("log")
        plain_log_ticks(ax.yaxis)
    elif ax.get_yscale() == "linear":  # an earlier call on the same axes may have made it log
        ax.set_ylim(bottom=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend()
    if title:
        claim(ax, title)
    return ax


def bars(
    labels: Sequence[str],
    values: Sequence[float],
    unit: str,
    source: str = "",
    title: str = "",
    highlight: Sequence[str] | str = (),
    log: bool = False,
    color: str = PREDICTED,
    ax: Axes | None = None,
) -> Axes:
    """Draw horizontal bars, first on top, each with its number at its end.

    `highlight` names the bars that stay in full colour; without it all do.
    """
    ax = ax or plt.subplots()[1]
    bright = set(
        labels if not highlight else [highlight] if isinstance(highlight, str) else highlight
    )
    colors = [color if label in bright else tint(color, 0.35) for label in labels]
    drawn = ax.barh(range(len(labels)), values, color=colors, height=0.68)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.bar_label(drawn, [number(value) for value in values], padding=6, color=INK, size=13)
    if log:
        ax.set_xscale("log")
        positive = [value for value in values if value > 0]
        ax.set_xlim(min(positive) / 3, max(positive) * 6)
        plain_log_ticks(ax.xaxis)
    else:
        ax.set_xlim(0, max(values) * 1.18)
    ax.set_xlabel(unit)
    if title:
        claim(ax, title)
    if source:
        caption(ax, source=source)
    return ax


def plain_log_ticks(axis: Axis) -> None:
    """Decades as plain numbers; where few decades fit, 2 and 5 as well."""
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < 200 * low else (1.0,)
    axis.set_major_locator(LogLocator(10, subs=subs, numticks=12))
    axis.set_minor_locator(NullLocator())
    if high < 1e6:
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
