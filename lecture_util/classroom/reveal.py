"""The plots that answer a prediction: a room's guesses against what was predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lecture_util.classroom.figures import style
from lecture_util.classroom.figures.plots import plain_log_ticks

COLORS = {"predicted": style.PREDICTED, "measured": style.MEASURED}
HUGE = 1e200  # a logarithmic axis needs room beyond the largest guess, and floats end at 1e308
MARKERS = {"predicted": "s", "measured": "o"}


def numbers(
    question: str,
    unit: str,
    guesses: Sequence[float],
    truths: dict[str, float],
    spread: tuple[float, float] | None = None,
) -> None:
    """Guesses, then `predicted` and `measured` where they are known, on one axis."""
    style.use_style()
    guesses = [max(-HUGE, min(guess, HUGE)) if abs(guess) > 1 / HUGE else 0.0 for guess in guesses]
    labels = [_name(guesses)] * bool(guesses) + list(truths)
    room = 0.7 * (len(guesses) > 1)  # many guesses need height, so that none covers another
    _, ax = plt.subplots(figsize=(7.5, 1.3 + 0.55 * len(labels) + room))
    if guesses:
        _guesses(ax, guesses, unit)
    for y, (name, value) in enumerate(truths.items(), start=bool(guesses)):
        ax.plot([value], [y], MARKERS[name], color=COLORS[name], ms=11, zorder=4)
        _label(ax, value, y, unit)
        dashed = "--" if name == "predicted" else "-"
        ax.axvline(value, ls=dashed, color=COLORS[name], zorder=2)
    if spread:
        ax.axvspan(*spread, color=style.tint(style.MEASURED), lw=0, zorder=1)
    ax.set_yticks(range(len(labels)), labels)
    ax.set(ylim=(len(labels) - 0.5, -0.5 - room / 0.9), xlabel=unit or "value")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    _limits(ax, [*guesses, *truths.values(), *(spread or ())])
    style.claim(ax, question)
    plt.show()


def finite(name: str, value: Any) -> float | None:
    """The value as a float; None stays None.

    Raises: ValueError if it is no finite number.
    """
    try:
        number = None if value is None else math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise ValueError(f"{name}={value!r} is not a finite number: pass one, or None for unknown")
    return number


def _name(guesses: Sequence[float]) -> str:
    return "your guess" if len(guesses) == 1 else f"{len(guesses)} guesses"


def _guesses(ax: Axes, guesses: Sequence[float], unit: str) -> None:
    """One diamond, or a cloud of them with its middle marked."""
    if len(guesses) == 1:
        ax.plot(guesses, [0], "D", color=style.GUESS, ms=11, zorder=4)
        _label(ax, guesses[0], 0, unit)
        return
    # Steps of the golden ratio never come back to where they were: equal guesses stand apart.
    heights = [0.4 - 1.1 * (i * 0.618 % 1) for i in range(len(guesses))]
    ax.plot(sorted(guesses), heights, "D", color=style.GUESS, ms=9, alpha=0.65, mew=0, zorder=4)
    middle = sorted(guesses)[len(guesses) // 2]
    ax.vlines(middle, -0.75, 0.45, color=style.INK, lw=2.5, zorder=5)
    ax.annotate(f"the middle: {_text(middle, unit)}", (middle, -0.75), xytext=(0, 3),
                textcoords="offset points", ha="center", color=style.INK,
                path_effects=style.HALO, zorder=6)  # fmt: skip


def _text(value: float, unit: str) -> str:
    return f"{style.number(value)} {unit}".strip()


def _label(ax: Axes, value: float, y: float, unit: str) -> None:
    ax.annotate(_text(value, unit), (value, y), xytext=(11, 0), va="center", color=style.INK,
                textcoords="offset points", path_effects=style.HALO, zorder=5)  # fmt: skip


def _limits(ax: Axes, values: list[float]) -> None:
    """A logarithmic axis when the values span more than a decade; room for labels either way."""
    smallest, largest = min(values), max(values)
    if smallest > 0 and largest > 10 * smallest:
        ax.set_xscale("log")
        reach = min(largest / smallest, 1e40)
        ax.set_xlim(smallest / reach**0.08, largest * reach**0.35)
        plain_log_ticks(ax.xaxis)
    else:
        ax.set_xlim(min(0, smallest * 1.1), max(largest * 1.3, 0) or 1)


def choices(question: str, options: Sequence[Any], guesses: Sequence[Any], right: Any) -> None:
    """How many chose what, and which was right."""
    style.use_style()
    _, ax = plt.subplots(figsize=(7.5, 1.2 + 0.5 * len(options)))
    rows = range(len(options))
    colors = [style.MEASURED if choice == right else style.MUTED for choice in options]
    names = [f"{choice}  ✓" if choice == right else str(choice) for choice in options]
    counts = [list(guesses).count(choice) for choice in options]
    bars = ax.barh(rows, counts, color=colors, height=0.6)
    if len(guesses) > 1:
        ax.bar_label(bars, padding=4)
    for label, color in zip(ax.set_yticks(rows, names), colors, strict=True):
        label.label1.set_color(color)
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.set_xlim(0, max([*counts, 1]) * 1.1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("guesses")
    style.claim(ax, question)
    plt.show()
