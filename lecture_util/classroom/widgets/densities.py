"""density_sliders (notebook 11): merge small models while you look, and see what each task gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
from torch import Tensor

from lecture_util.classroom.widgets.density_picture import DensityPicture
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.merges import (
    STARTS,
    Bench,
    Point,
    Setting,
    TaskScore,
    asks_for,
    mean,
    method_named,
    named,
    setting_of,
)
from lecture_util.classroom.widgets.rounds import marked
from lecture_util.merging.conventions import NAMED
from lecture_util.merging.methods import METHODS

DENSITIES = (0.01, 0.02, 0.05, *(i / 20 for i in range(2, 21)))
SCALES = tuple(i / 20 for i in range(41))
ABOUT = {"breadcrumbs_ties": "without the smallest and the outliers, elect signs"}
SWEPT = {"density": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0), "scale": SCALES[4:33:4]}


class DensitySliders(Explorer):
    """The explorer; `shown` is the Point in the picture, `past` holds all so far."""

    def __init__(self, bench: Bench, values: dict[str, Any]) -> None:
        self.bench = bench
        self.shown: Point | None = None
        self.over = "density" if asks_for(values["method"], "density") else "scale"
        self._picture = DensityPicture(bench)
        controls = {
            "method": widgets.Dropdown(
                description="method",
                options=[(name.replace("_", " "), name) for name in STARTS],
                value=values["method"],
            ),
            "density": _slider("density", DENSITIES, values["density"]),
            "scale": _slider("scale", SCALES, values["scale"]),
            "convention": widgets.Dropdown(
                description="as in", options=list(NAMED), value=values["convention"]
            ),
            "epsilon": widgets.FloatSlider(
                description="epsilon", min=0, max=0.3, step=0.01, value=values["epsilon"]
            ),
            "seed": widgets.IntSlider(description="seed", min=0, max=9, value=values["seed"]),
        }
        for name in ("density", "scale"):
            controls[name].observe(self._moved, names="value")  # before the redraw
        buttons = [
            self._button("sweep", "try a few densities, or scales, with all else as it is",
                         self.sweep),
            self._button("forget", "forget the merges tried so far", self.forget),
        ]  # fmt: skip
        super().__init__(self._draw, controls, [widgets.HBox(buttons)], columns=3)

    @property
    def scores(self) -> dict[str, TaskScore]:
        """Of what is shown, by task; nothing where the method refuses the setting."""
        return dict(self.shown.scores) if self.shown else {}

    @property
    def past(self) -> list[Point]:
        return self.bench.past

    def sweep(self) -> None:
        """Merge at a few densities (or scales, whichever was moved last), all else as it is."""
        values = self.values
        for value in SWEPT[self._axis(values["method"])]:
            try:
                self.bench.merge(setting_of(**values | {self._axis(values["method"]): value}))
            except ValueError:  # DELLA has no probabilities there: a gap in the curve
                continue
        self.redraw()

    def forget(self) -> None:
        """Forget the merges tried so far, but for the one shown."""
        self.bench.forget()
        self.redraw()

    def _axis(self, method: str) -> str:
        return self.over if asks_for(method, "density") else "scale"

    def _moved(self, change: dict) -> None:
        self.over = next(name for name, one in self.controls.items() if one is change["owner"])

    def _button(self, name: str, tooltip: str, action: Callable[[], None]) -> widgets.Button:
        button = widgets.Button(
            description=name, tooltip=tooltip, layout=widgets.Layout(width="7em")
        )
        button.on_click(lambda _button: action())
        return button

    def _draw(self, method: str, **values: Any) -> tuple[bytes, str]:
        for name in ("density", "epsilon", "seed"):
            self.controls[name].disabled = not asks_for(method, name)
        setting, over = setting_of(method, **values), self._axis(method)
        self.shown, refusal = None, ""
        try:
            self.shown = self.bench.merge(setting)
        except ValueError as error:  # epsilon does not fit the density
            refusal = f"<b>✗ {marked(str(error), 300)}</b><br>"
        curve = self.bench.curve(setting, over)
        png = self._picture.draw(self.shown, self.past, curve, over)
        tried = f" {len(self.past)} tried so far."
        return png, (refusal or _about(setting) + tried) + _table(self.bench, self.shown)


def _about(setting: Setting) -> str:
    """One line; the scale multiplies a sum or a mean, by the method and the convention."""
    how = METHODS[setting.method]
    about = ABOUT.get(setting.method, how.about)
    words = [f"{setting.method.replace('_', ' ')}: {about}"]
    if setting.density is not None:
        kept = f"density {setting.density:g}"
        if setting.seed is not None:
            kept += f", drop rate <b>{1 - setting.density:g}</b>"
        words.append(kept)
    mean = how.parameters["normalize"].fallback(NAMED[setting.convention])
    what = "mean" if mean else "sum"
    return "; ".join([*words, f"{setting.scale:g} × {what}"]) + "."


def _table(bench: Bench, shown: Point | None) -> str:
    """Accuracies by task, and means, in words for whoever does not see the bars."""
    leader = marked(f"best of the fine-tunes: {bench.leader}", 60)
    rows: list[tuple[str, Mapping[str, TaskScore]]] = [
        ("base", bench.base),
        (leader, bench.tuned[bench.leader]),
        ("for each task the best fine-tune on it", bench.best),
    ]
    rows += [("merged", shown.scores)] if shown else []
    cell = "padding:0 16px 0 0;text-align:right;white-space:nowrap"
    heads = ("accuracy", *bench.tasks, "mean", "mean loss")
    lines = ["".join(f'<th style="{cell};font-weight:400">{marked(str(h))}</th>' for h in heads)]
    for name, scores in rows:
        numbers = [scores[task].accuracy for task in bench.tasks]
        words = [
            name,
            *(f"{one:.3f}" for one in (*numbers, mean(scores).accuracy, mean(scores).loss)),
        ]
        bold = "font-weight:600" if scores is getattr(shown, "scores", None) else ""
        lines.append("".join(f'<td style="{cell};{bold}">{one}</td>' for one in words))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        '<table style="font-size:14px;line-height:1.25;border-collapse:collapse;margin-top:2px">'
        f"{body}</table>"
    )


def _slider(description: str, usual: Sequence[float], value: float) -> widgets.SelectionSlider:
    options = [(f"{option:g}", option) for option in sorted({*usual, float(value)})]
    return widgets.SelectionSlider(description=description, options=options, value=float(value))


def density_sliders(
    states: Mapping[str, Mapping[str, Tensor]] | Sequence[Mapping[str, Tensor]],
    base: Mapping[str, Tensor],
    score: Callable[[Mapping[str, Tensor]], Mapping[str, Any]],
    tasks: Sequence[str] | None = None,
    *,
    method: str = "ties",
    density: float | None = None,
    scale: float | None = None,
    epsilon: float = 0.07,
    seed: int = 0,
    convention: str = "paper",
) -> DensitySliders:
    """Merge fine-tunes live, and see each task's accuracy and the mean loss (notebook 11).

    states: the fine-tunes by name (a list, if `tasks` names them); base: what they came from.
    score:  of a state dict: {task: (loss, accuracy)}, the same tasks each time. It runs at every
            new setting, so some 64 prompts a task keep the sliders quick.
    method: one that adds thinned-out task vectors: "ties", "dare_linear", "della", ...
    density, scale: to begin with; None: what suits the method.

    Example: `density_sliders(states, state(base), lambda s: {n: evaluate(with_state(base, s), n,
             B=64) for n in PRACTISED})`
    Raises:  ValueError or TypeError naming what came.
    """
    start = dict(zip(("density", "scale"), STARTS[method_named(method)], strict=True))
    given = {"density": density, "scale": scale}
    values = start | {name: value for name, value in given.items() if value is not None}
    for name, value, most in (
        ("density", values["density"], 1), ("scale", values["scale"], 2), ("epsilon", epsilon, 0.3)
    ):  # fmt: skip
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= most:
            raise ValueError(f"{name} is {value!r}: expected 0 to {most}")
    if type(seed) is not int or not 0 <= seed <= 9:
        raise ValueError(f"seed is {seed!r}: expected a whole number, 0 to 9")
    if convention not in NAMED:
        raise ValueError(f"convention is {convention!r}: expected {' or '.join(NAMED)}")
    if not callable(score):
        raise TypeError(f"score={score!r:.80} is no function: pass one of a state dict")
    bench = Bench(named(states, tasks), base, score, tasks)
    chosen = {"method": method, "epsilon": epsilon, "seed": seed, "convention": convention}
    return DensitySliders(bench, values | chosen)
