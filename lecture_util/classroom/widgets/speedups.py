"""speedup_explorer (notebook 08): tokens a round and speed-up, predicted; the measured beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.choices import menu
from lecture_util.classroom.widgets.curves import (
    FLAT,
    MOST,
    Point,
    VerifyCost,
    costs_of,
    points_of,
    record_of,
)
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.speculative.expected import best_gamma, expected_tokens, speedup

SIZE = (11.2, 3.6)  # as wide as a slide
MARKS = "osD^vPX<>h"
BEST = style.CACHE


class SpeedupPicture:
    """Left, tokens a round over gamma; right, the speed-up, the best gamma marked."""

    def __init__(self, points: Sequence[Point], costs: Mapping[str, VerifyCost]) -> None:
        self.points, self.costs = points, costs
        self.canvas = Canvas(SIZE)
        with self.canvas.still() as fig:
            self.canvas.moving = [*self._tokens(fig), *self._speedups(fig)]

    def __call__(self, alpha: float, gamma: int, c: float, costs: str) -> tuple[bytes, str]:
        cost = self.costs[costs]
        gammas = cost.gammas
        tokens = [expected_tokens(alpha, g) for g in range(MOST + 1)]
        gains = [speedup(alpha, g, c, cost.v(g + 1)) for g in gammas]
        best = best_gamma(alpha, c, cost.v, most=gammas[-1])
        self.curve.set_data(range(MOST + 1), tokens)
        self.here.set_data([gamma], [tokens[gamma]])
        ceiling = 1 / (1 - alpha) if alpha < 1 else math.inf
        fits = ceiling < self.tokens.get_ylim()[1]
        self.ceiling.set_data([0, MOST] if fits else [], [ceiling] * 2 if fits else [])
        self.gain.set_data(list(gammas), gains)
        self.gain_here.set_data(*([gamma], [gains[gamma]]) if gamma in gammas else ([], []))
        self.star.set_data([best], [gains[best]])
        highest = max([*gains, *(point.speedup for point in self.points)])
        self.speed.set_ylim(0, max(2.0, 1.15 * highest))
        text = _words(alpha, gamma, c, cost, costs, tokens[gamma], best, ceiling)
        return self.canvas.png(), text

    def _tokens(self, fig: Figure) -> list[Artist]:
        self.tokens = ax = fig.add_axes((0.05, 0.15, 0.34, 0.71))
        most = max([8.0, *(1.15 * point.tokens for point in self.points)])
        _axes(ax, "tokens a round, expected", self.points)
        ax.set_ylim(0, most)
        self._scatter(ax, lambda point: point.tokens)
        (self.ceiling,) = ax.plot([], [], ":", color=style.MUTED, lw=2, label="1/(1 – α)")
        (self.curve,) = ax.plot([], [], "--o", color=style.PREDICTED, ms=5, label="predicted")
        (self.here,) = ax.plot([], [], "o", color=style.PREDICTED, mec=style.INK, mew=2, ms=14)
        ax.legend(handles=[self.curve, self.ceiling], loc="upper left", fontsize=12)
        return [self.ceiling, self.curve, self.here]

    def _speedups(self, fig: Figure) -> list[Artist]:
        self.speed = ax = fig.add_axes((0.45, 0.15, 0.34, 0.71))
        _axes(ax, "speed-up over plain decoding", self.points)
        ax.tick_params(axis="y", length=0)
        measured = self._scatter(ax, lambda point: point.speedup)
        one = ax.axhline(1, color=style.INK, lw=1.6, ls="-")
        (self.gain,) = ax.plot([], [], "--o", color=style.PREDICTED, ms=5, label="speed-up")
        (self.gain_here,) = ax.plot([], [], "o", color=style.PREDICTED, mec=style.INK, mew=2,
                                    ms=14, ls="", label="chosen γ")  # fmt: skip
        (self.star,) = ax.plot([], [], "*", color=BEST, mec=style.INK, mew=1.2, ms=19,
                               label="best γ")  # fmt: skip
        look = {"fontsize": 13 if len(measured) < 7 else 10, "alignment": "left",
                "loc": "upper left"}  # fmt: skip
        predicted = [self.gain, self.gain_here, self.star]
        fig.legend(handles=predicted, bbox_to_anchor=(0.8, 1), title="predicted", **look)
        if measured:
            fig.legend(handles=measured, bbox_to_anchor=(0.8, 0.64), title="measured",
                       labelspacing=0.5 if len(measured) < 7 else 0.2, **look)  # fmt: skip
        return [ax.yaxis, one, *measured, self.gain, self.gain_here, self.star]

    def _scatter(self, ax: Axes, height: Callable[[Point], float]) -> list[Artist]:
        names = list(dict.fromkeys(point.name for point in self.points))
        drawn = []
        for i, name in enumerate(names):
            mine = sorted((p for p in self.points if p.name == name), key=lambda p: p.gamma)
            drawn += ax.plot(
                [p.gamma for p in mine], [height(p) for p in mine],
                MARKS[i % len(MARKS)] + ("-" if len(mine) > 1 else ""),
                color=_color(i), lw=1.6, ms=8, mec="white", label=name,
            )  # fmt: skip
        return drawn


def _axes(ax: Axes, title: str, points: Sequence[Point]) -> None:
    end = max([MOST, *(point.gamma for point in points)])
    ax.set_xlim(-0.5, end + 0.5)
    ax.set_xticks(range(0, int(end) + 1, 2 if end <= 20 else 8))
    ax.set_xlabel("γ, guesses a round", labelpad=2)
    ax.set_title(title, fontsize=14.5, pad=8)


def _color(place: int) -> str:
    colors = (style.MEASURED, style.ACCENT, style.INK, style.GUESS, style.MUTED)
    return colors[place % len(colors)]


def _words(alpha: float, gamma: int, c: float, cost: VerifyCost, name: str, tokens: float,
           best: int, ceiling: float) -> str:  # fmt: skip
    text = f"γ = {gamma}, α = {alpha:.2f}: <b>{tokens:.2f} tokens a round</b>"
    if math.isfinite(ceiling):
        text += f" (never over {ceiling:.2f})"
    if gamma in cost.gammas:
        v = cost.v(gamma + 1)
        text += (
            f" at a cost of {gamma} × {c:.2f} + {v:.2f} forwards: <b>speed-up "
            f"{speedup(alpha, gamma, c, v):.2f}</b>"
        )
    else:
        text += f"; verifying was measured up to {cost.most} tokens only"
    gain = speedup(alpha, best, c, cost.v(best + 1))
    where = f"The best is <b>γ = {best}</b>, with {gain:.2f}" if best else (
        "No γ pays: <b>plain decoding is faster</b>"
    )  # fmt: skip
    most = cost.gammas[-1]
    edge = f" (the largest that {'is shown' if name == FLAT else 'was measured or is shown'})"
    return f"{text}. {where}{edge if best == most else ''}."


def speedup_explorer(
    points: Any = None,
    *,
    alpha: float = 0.8,
    gamma: int = 4,
    c: float = 0.05,
    costs: Mapping[str, Any] | None = None,
) -> Explorer:
    """Expected tokens and speed-up over gamma, and what was measured (notebook 08).

    points: measured, (name, gamma, tokens a round, speed-up) each; or a record as
            benchmarks/speculative.py writes it. None: the record in its results, if there is one.
    alpha:  how likely a guess is accepted.   gamma: guesses a round.
    c:      what a guess costs, in forwards of the target.
    costs:  name -> what verifying n tokens costs: v(n), or measured {n: ms} with one for n = 1.
            None: the record's. A flat cost is always offered.

    Example: `speedup_explorer([("n-gram", 8, 2.1, 1.6)], costs={"here": {1: 29, 9: 65, 17: 66}})`
    Raises:  TypeError or ValueError naming what came.
    """
    for name, value, most in [("alpha", alpha, 1), ("c", c, 1), ("gamma", gamma, MOST)]:
        whole = name == "gamma" and type(value) is not int
        if isinstance(value, bool) or not isinstance(value, int | float) or whole or not (
            0 <= value <= most
        ):  # fmt: skip
            raise ValueError(f"{name} is {value!r}: expected 0 to {most}")
    record = record_of(points)
    offered = costs_of(costs, record)
    controls = {
        "alpha": _slider("α, acceptance", alpha),
        "gamma": widgets.IntSlider(description="γ, guesses", min=0, max=MOST, value=gamma),
        "c": _slider("c, cost of a guess", c),
        "costs": menu("verifying", list(offered), FLAT),
    }
    return Explorer(SpeedupPicture(points_of(points, record), offered), controls, columns=2)


def _slider(description: str, value: float) -> widgets.FloatSlider:
    return widgets.FloatSlider(description=description, min=0, max=1, step=0.01, value=value)
