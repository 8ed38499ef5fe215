"""Slots over time as SVG: static batching above continuous, on one axis, under the arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.drawing import box, hatch, hue, letter, pale, path, svg, text
from lecture_util.classroom.widgets.schedules import Run
from lecture_util.serving.loop import Iteration

WIDTH, HEIGHT = 1160, 372
LEFT, RIGHT = 122, 1150
TOP = 62  # where the first chart begins, under the legend and the arrivals
GAP = 26  # between the two charts
TALLEST = 28.0  # pixels of a slot


@dataclass(frozen=True)
class Bar:
    """Forwards on end that one answer spent in one slot, doing one thing."""

    slot: int
    number: int
    kind: str
    start_s: float
    end_s: float


def bars(iterations: Sequence[Iteration]) -> list[Bar]:
    """The parts of all forwards, those that follow on each other put together."""
    found: list[Bar] = []
    open_bars: dict[int, Bar] = {}
    for one in iterations:
        end_s = one.start_s + one.seconds
        now: dict[int, Bar] = {}
        for part in one.parts:
            before = open_bars.get(part.slot)
            goes_on = (
                before is not None
                and (before.number, before.kind) == (part.number, part.kind)
                and one.start_s - before.end_s < 1e-6  # the server was never idle between
            )
            start_s = before.start_s if goes_on else one.start_s
            now[part.slot] = Bar(part.slot, part.number, part.kind, start_s, end_s)
            if before is not None and not goes_on:
                found.append(before)
        found += [bar for slot, bar in open_bars.items() if slot not in now]
        open_bars = now
    return found + list(open_bars.values())


def gantt(runs: Mapping[str, Run], slots: int) -> str:
    """The picture."""
    end_s = max(run.summary.end_s for run in runs.values())
    per_s = (RIGHT - LEFT) / end_s
    tall = min(TALLEST, (HEIGHT - TOP - 24 - GAP) / (2 * slots))
    parts = [_legend(), _arrivals(next(iter(runs.values())), per_s)]
    bottom = TOP
    for name, run in runs.items():
        parts.append(_chart(name, run, slots, bottom, tall, per_s))
        bottom += slots * tall + GAP
    parts.append(_axis(end_s, per_s, bottom - GAP))
    label = (
        f"Slots over {end_s:.0f} forwards: static batching above continuous batching, "
        f"{len(next(iter(runs.values())).completions)} requests in {slots} slots"
    )
    return svg(label, WIDTH, bottom + 16, *parts)


def _legend() -> str:
    x, parts = LEFT, []
    for name in ("prefill", "decode", "padding", "empty"):
        parts += [_bar(x, 2, 34, 18, 0, name), text(x + 40, 16, name, 13)]
        x += 118
    parts += [_triangle(x + 8, 4), text(x + 20, 16, "a request arrives", 13)]
    return "".join(parts)


def _arrivals(run: Run, per_s: float) -> str:
    """A mark and a letter each; where marks would lie on each other, only how many there are."""
    parts = [text(LEFT - 8, 45, "arrivals", 13, anchor="end")]
    groups: list[tuple[float, list[int]]] = []
    for one in sorted(run.completions, key=lambda c: c.arrival_s):
        x = LEFT + per_s * one.arrival_s
        if groups and x - groups[-1][0] < 24:
            groups[-1][1].append(one.number)
        else:
            groups.append((x, [one.number]))
    for i, (x, numbers) in enumerate(groups):
        room = (groups[i + 1][0] if i + 1 < len(groups) else RIGHT + 10) - x
        names = ",".join(map(letter, numbers))
        if len(numbers) > 3 or 8 * len(names) > room:
            names = f"{letter(numbers[0])}–{letter(numbers[-1])}"
        single = len(numbers) == 1
        parts += [
            text(x - (4 if single else 0), 40, names, 11, bold=True),
            _triangle(x, 44, hue(numbers[0]) if single else style.INK),
        ]
    return "".join(parts)


def _triangle(x: float, y: float, color: str = style.INK) -> str:
    return path(f"M{x - 5:.1f} {y}h10l-5 10z", style.INK, 0.8, fill=color)


def _chart(name: str, run: Run, slots: int, top: float, tall: float, per_s: float) -> str:
    middle = top + slots * tall / 2
    parts = [text(LEFT - 26, middle + 4, name, 14, bold=True, anchor="end")]
    for slot in range(slots):
        y = top + slot * tall
        parts.append(text(LEFT - 8, y + 0.5 * tall + 4, str(slot), min(12, tall), anchor="end"))
        parts.append(box(LEFT, y + 1, RIGHT - LEFT, tall - 2, "#FFFFFF", "#CFCFCF", 0.8))
    for bar in bars(run.iterations):
        x, wide = LEFT + per_s * bar.start_s, per_s * (bar.end_s - bar.start_s)
        y, high = top + bar.slot * tall + 2, tall - 4
        parts.append(_bar(x, y, wide, high, bar.number, bar.kind, _told(bar)))
        if bar.kind == "decode" and wide >= 11:
            parts.append(
                text(x + wide / 2, y + high / 2 + 4.5, letter(bar.number), min(13, high), bold=True,
                     anchor="middle")
            )  # fmt: skip
    end = LEFT + per_s * run.summary.end_s
    parts.append(path(f"M{end:.1f} {top - 3:.1f}v{slots * tall + 6:.1f}", style.INK, 2.2))
    return "".join(parts)


def _bar(x: float, y: float, wide: float, high: float, number: int, kind: str,
         title: str = "") -> str:  # fmt: skip
    """One look a kind, told apart without colour: filled and dark, pale, hatched, blank."""
    if kind == "padding":
        return box(x, y, wide, high, "#FFFFFF", hue(number), 1, title=title) + hatch(
            x, y, wide, high, style.MUTED
        )
    if kind == "prefill":
        mark = min(4.0, wide / 2)
        return box(x, y, wide, high, hue(number), style.INK, 0.7, title=title) + box(
            x, y, mark, high, style.INK
        )
    if kind == "decode":
        return box(x, y, wide, high, pale(number, 0.45), hue(number), 1, title=title)
    return box(x, y, wide, high, "#FFFFFF", "#B5B5B5", 1)


def _told(bar: Bar) -> str:
    forwards = bar.end_s - bar.start_s
    return f"{letter(bar.number)}: {bar.kind}, {forwards:.0f} forwards from {bar.start_s:.1f}"


def _axis(end_s: float, per_s: float, y: float) -> str:
    every = next(n for n in (5, 10, 20, 25, 50, 100, 200, 500, 1000, 10**9) if n * per_s >= 60)
    parts = [text(LEFT - 8, y + 17, "forwards", 12, anchor="end")]
    for tick in range(0, int(end_s) + 1, every):
        x = LEFT + per_s * tick
        parts.append(path(f"M{x:.1f} {y:.1f}v5", style.MUTED, 1))
        parts.append(text(x, y + 17, str(tick), 12, anchor="middle"))
    return "".join(parts)
