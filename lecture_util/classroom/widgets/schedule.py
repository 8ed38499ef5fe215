"""schedule_explorer (notebook 09): who has which slot when, in static and continuous batching."""

from __future__ import annotations

import math

import ipywidgets as widgets

from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.gantt import gantt
from lecture_util.classroom.widgets.schedules import MOST_NEW, Run, Summary, both, trace_of

RATES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 1.0, 2.0)
ALL_AT_ONCE = "all at once"
MOST_SLOTS, MOST_REQUESTS = 8, 40


class ScheduleExplorer(Explorer):
    """The explorer; `runs` holds both runs that are shown, by name."""

    def __init__(
        self, slots: int, rate: float | None, spread: float, trace: dict[str, int]
    ) -> None:
        self.trace = trace
        self.runs: dict[str, Run] = {}
        self.picture = widgets.HTML(layout=widgets.Layout(width="100%"))
        at_once = math.inf if rate is None else rate  # a slider takes no None
        rates = sorted({*RATES, at_once} - {math.inf})
        controls = {
            "rate": widgets.SelectionSlider(
                description="arrivals a forward",
                options=[*((f"{r:g}", r) for r in rates), (ALL_AT_ONCE, math.inf)],
                value=at_once,
            ),
            "spread": widgets.FloatSlider(
                description="spread of lengths", min=0, max=2, step=0.1, value=spread
            ),
            "slots": widgets.IntSlider(description="slots", min=1, max=MOST_SLOTS, value=slots),
        }
        super().__init__(self._draw, controls, [self.picture], columns=2)

    @property
    def summary(self) -> dict[str, Summary]:
        return {name: run.summary for name, run in self.runs.items()}

    def _draw(self, rate: float, spread: float, slots: int) -> str:
        arrivals = None if rate == math.inf else rate
        self.runs = both(trace_of(rate=arrivals, spread=spread, **self.trace), slots)
        self.picture.value = gantt(self.runs, slots)
        return _words(self.runs)


def _words(runs: dict[str, Run]) -> str:
    heads = ("", "forwards", "slots at work", "padding", "tokens a forward",
             "wait for the first token", "longest wait", "all done after")  # fmt: skip
    rows = [
        (name, f"{s.forwards}", f"{s.work:.0%}", f"{s.padding:.0%}", f"{s.tokens:.2f}",
         f"{s.mean_s:.1f} on average", f"{s.worst_s:.1f}", f"{s.end_s:.0f}")
        for name, s in ((name, run.summary) for name, run in runs.items())
    ]  # fmt: skip
    cell = "padding:0 14px 0 0;text-align:right;white-space:nowrap"
    head = "".join(f'<th style="{cell};font-weight:400">{one}</th>' for one in heads)
    body = "".join(
        "<tr>" + "".join(f'<td style="{cell}"><b>{one}</b></td>' for one in row) + "</tr>"
        for row in rows
    )
    return (
        f'<table style="font-size:15px;line-height:1.35;border-collapse:collapse">'
        f"<tr>{head}</tr>{body}</table>"
    )


def schedule_explorer(
    slots: int = 4,
    *,
    rate: float | None = 0.4,
    spread: float = 1.0,
    requests: int = 16,
    mean_new: float = 12,
    prompt: int = 8,
    seed: int = 0,
) -> ScheduleExplorer:
    """Slots over time, static above continuous, for one made-up trace (notebook 09).

    slots:    that each of the two has, 1 to 8.
    rate:     arrivals a forward; None: all requests are there from the beginning.
    spread:   of the answers' lengths, as in `Lengths`, 0 to 2; their mean is held at `mean_new`.
    prompt:   median tokens of a prompt.   requests: at most 40.

    Every forward takes 1, whatever it computes. Time is counted in forwards.

    Raises: ValueError naming what came.
    """
    for name, value, least, most in (
        ("slots", slots, 1, MOST_SLOTS), ("requests", requests, 1, MOST_REQUESTS),
        ("prompt", prompt, 1, 128), ("seed", seed, 0, 2**32),
    ):  # fmt: skip
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}: expected a whole number, {least} to {most}")
    for name, value, least, most in (
        ("rate", rate, 0.01, 100), ("spread", spread, 0, 2), ("mean_new", mean_new, 1, MOST_NEW),
    ):  # fmt: skip
        if value is None and name == "rate":
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}: expected {least} to {most}")
    trace = {"requests": requests, "mean_new": mean_new, "prompt": prompt, "seed": seed}
    return ScheduleExplorer(slots, rate, spread, trace)
