"""configurator (notebook 12): switch techniques on and off, and see what is predicted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ipywidgets as widgets

from lecture_util.classroom.figures import style
from lecture_util.classroom.figures.combining import costs_on, cut_config, made_up
from lecture_util.classroom.widgets.choices import THIS_MACHINE, accelerator_named, menu
from lecture_util.classroom.widgets.configured import ConfiguredPicture
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.names import Names
from lecture_util.classroom.widgets.rounds import marked
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, Accelerator, format_bytes, format_seconds
from lecture_util.together.configuration import WEIGHTS, Configuration, conflicts
from lecture_util.together.predict import Prediction, predict
from lecture_util.together.scenarios import LAPTOP, SERVER, Scenario

SHAPES = ("smollm2-135m", "llama-3-8b", "llama-2-13b")
MADE_UP = {machine.name: machine for machine in (LAPTOP, SERVER)}
MACHINES = (*MADE_UP, *ACCELERATORS, THIS_MACHINE)
SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_GUESSES = 8
# Each toggle: the field of Configuration that it sets, on and off, and its name.
TOGGLES: dict[str, tuple[str, Any, Any, str]] = {
    "cache": ("cache", True, False, "KV cache"),
    "student": ("student", True, False, "student"),
    "static": ("schedule", "static", "single", "static batch"),
    "continuous": ("schedule", "continuous", "single", "continuous batch"),
    "pages": ("pages", True, False, "pages"),
    "prefix": ("prefix", True, False, "shared prefix"),
    "ngram": ("draft", "ngram", None, "n-grams"),
    "medusa": ("draft", "medusa", None, "Medusa"),
    "eagle": ("draft", "eagle", None, "EAGLE"),
}


class Configurator(Explorer):
    """The explorer. `fields` are what is switched on; `reasons`, why that is excluded, if it is;
    `configuration` and `prediction` are None then; `greyed` has the reasons of each toggle."""

    def __init__(self, values: dict[str, Any], work: dict[str, int]) -> None:
        self.workload = made_up(**work)
        self.configuration: Configuration | None = None
        self.prediction: Prediction | None = None
        self.baseline: Prediction | None = None
        self.reasons: list[str] = []
        self.greyed: dict[str, list[str]] = {}
        self._kept: dict[tuple, Prediction] = {}
        self._picture = ConfiguredPicture()
        controls = _controls(values)
        for name in TOGGLES:
            controls[name].observe(self._one_of_a_kind, names="value")  # before the redraw
        super().__init__(self._draw, controls, columns=3)
        self._arrange()

    @property
    def fields(self) -> dict[str, Any]:
        """As Configuration takes them: one text at a time has one slot."""
        values = self.values
        fields: dict[str, Any] = {"cache": False, "student": False, "schedule": "single",
                                  "pages": False, "prefix": False, "draft": None}  # fmt: skip
        for name, (field, on, _, _) in TOGGLES.items():
            if values[name]:
                fields[field] = on
        slots = 1 if fields["schedule"] == "single" else values["slots"]
        return fields | {name: values[name] for name in ("weights", "guesses")} | {"slots": slots}

    def _one_of_a_kind(self, change: dict) -> None:
        """There is one schedule and one draft: the one switched on switches the others off."""
        if not change["new"]:
            return
        pressed = next(n for n in TOGGLES if self.controls[n] is change["owner"])
        field = TOGGLES[pressed][0]
        with self.quiet():
            for name, (other, *_) in TOGGLES.items():
                if other == field and name != pressed:
                    self.controls[name].value = False

    def _arrange(self) -> None:
        """Menus and sliders in a grid, as Explorer has them, and the toggles in a row below."""
        toggles = [self.controls[name] for name in TOGGLES]
        for toggle in toggles:
            toggle.layout.width = "auto"
        grid = self.children[0].children[0]
        grid.children = [one for one in grid.children if one not in toggles]
        row = widgets.HBox(toggles, layout=widgets.Layout(flex_flow="row wrap"))
        box = widgets.VBox([grid, row], layout=widgets.Layout(width="100%"))
        self.children = [box, self.text, self.image, Names()]

    def _draw(self, shape: str, machine: str, **values: Any) -> Any:
        fields = self.fields
        self._grey(fields)
        self.reasons = conflicts(SimpleNamespace(**fields))
        self.configuration = None if self.reasons else Configuration(**fields)
        self.prediction = None
        if self.configuration is None:
            return _refused(self.reasons)
        device = _machine(machine)
        rate = min(values["tokens_per_round"], fields["guesses"] + 1)
        self.baseline = self._predict(shape, device, Configuration(), 1.0)
        self.prediction = self._predict(shape, device, self.configuration, rate)
        png = self._picture.draw(self.baseline, self.prediction, device)
        said = _words(self.configuration, self.baseline, self.prediction, device)
        return png, said + _why(self.greyed)

    def _predict(
        self, shape: str, machine: Accelerator, c: Configuration, rate: float
    ) -> Prediction:
        key = (shape, machine.name, c, rate if c.draft else None)
        if key not in self._kept:
            config = cut_config(PUBLISHED[shape]) if c.student else PUBLISHED[shape]
            overhead_s = Scenario.overhead_s if machine.name in MADE_UP else 0.0
            costs = costs_on(config, c, machine, rate, overhead_s)
            self._kept[key] = predict(config, c, self.workload, costs)
        return self._kept[key]

    def _grey(self, fields: dict[str, Any]) -> None:
        """Disable what would lead from an allowed combination to an excluded one."""
        self.greyed = {}
        allowed = not conflicts(SimpleNamespace(**fields))
        for name, (field, on, off, _) in TOGGLES.items():
            toggle = self.controls[name]
            after = fields | {field: off if toggle.value else on}
            if after["schedule"] == "single":
                after["slots"] = 1
            why = conflicts(SimpleNamespace(**after)) if allowed else []
            toggle.disabled, toggle.tooltip = bool(why), "; ".join(why)
            if why:
                self.greyed[name] = why
        drafts = fields["draft"] is not None
        self.controls["guesses"].disabled = not drafts
        self.controls["tokens_per_round"].disabled = not drafts
        self.controls["slots"].disabled = fields["schedule"] == "single"


def _machine(name: str) -> Accelerator:
    return MADE_UP[name] if name in MADE_UP else accelerator_named(name)


def _words(c: Configuration, plain: Prediction, now: Prediction, machine: Accelerator) -> str:
    faster, sooner = now.tokens_per_s / plain.tokens_per_s, plain.ttft_s / now.ttft_s
    soon = "soon" if sooner >= 1 else "late"
    share = 100 * now.memory_bytes / plain.memory_bytes
    beside = (
        ["", "", ""] if now == plain
        else [f", {style.number(faster)} times the plain cached loop's",
              f", {style.number(max(sooner, 1 / sooner))} times as {soon}",
              f", {style.number(share)}% of its bytes"]
    )  # fmt: skip
    room = (
        "" if now.memory_bytes <= machine.memory_bytes
        else ', which <b style="color:#B00020">does not fit</b> in '
        f"{format_bytes(machine.memory_bytes)}"
    )  # fmt: skip
    return (
        f"<b>{marked(str(c), 90)}</b>: at most <b>{style.number(now.tokens_per_s)} tokens/s</b>"
        f"{beside[0]}; first token after <b>{format_seconds(now.ttft_s)}</b>{beside[1]}; "
        f"<b>{format_bytes(now.memory_bytes)}</b>{beside[2]}{room}."
    )


def _why(greyed: dict[str, list[str]]) -> str:
    """A line for each group of toggles that are greyed for the same reasons; no reason twice."""
    by_reason: dict[str, list[str]] = {}
    for name, reasons in greyed.items():
        for reason in reasons:
            reason = reason.replace(f"{name}'s heads", "its heads")
            by_reason.setdefault(reason, []).append(TOGGLES[name][3])
    by_names: dict[str, list[str]] = {}
    for reason, names in by_reason.items():
        by_names.setdefault(", ".join(names), []).append(reason)
    lines = [f"<i>{names}</i>: {marked('; '.join(why), 300)}" for names, why in by_names.items()]
    if not lines:
        return ""
    return f'<div style="font-size:0.8em;line-height:1.3">Greyed out. {"<br>".join(lines)}</div>'


def _refused(reasons: list[str]) -> str:
    said = "<br>".join(marked(reason, 300) for reason in reasons)
    return f'<span style="color:#B00020"><b>excluded</b></span>: {said}'


def _controls(values: dict[str, Any]) -> dict[str, widgets.Widget]:
    rate = values["tokens_per_round"]
    slots = sorted({*SLOTS, values["slots"]})
    return {
        "shape": menu("shape", list(SHAPES), values["shape"]),
        "machine": menu("machine", list(MACHINES), values["machine"]),
        "weights": menu("weights", list(WEIGHTS), values["weights"]),
        "slots": widgets.SelectionSlider(
            description="slots", options=[(f"{n}", n) for n in slots], value=values["slots"]
        ),
        "guesses": widgets.IntSlider(
            description="guesses a round", min=1, max=MOST_GUESSES, value=values["guesses"]
        ),
        "tokens_per_round": widgets.FloatSlider(
            description="tokens a round", min=1, max=MOST_GUESSES + 1, step=0.1, value=rate
        ),
    } | {
        name: widgets.ToggleButton(description=words, value=values[field] == on)
        for name, (field, on, _, words) in TOGGLES.items()
    }


def configurator(
    shape: str = "smollm2-135m",
    machine: str = LAPTOP.name,
    *,
    requests: int = 12,
    shared: int = 256,
    asks: int = 24,
    new: int = 32,
    tokens_per_round: float = 2.5,
    **chosen: Any,
) -> Configurator:
    """Predicted speed, first token and bytes of any configuration, beside the plain cached loop.

    shape:    "smollm2-135m", "llama-3-8b" or "llama-2-13b"; a student has fewer layers by the share
              that the course's own student lacks.
    machine:  "a laptop", "a small server" (made up, with 1 ms besides a forward), a name of
              ACCELERATORS, or "this machine", measured when first chosen.
    requests, shared, asks, new: questions, all there at once: tokens of their common beginning, of
              each question, and of a middling answer (others are half or twice as long).
    tokens_per_round: what a draft is taken to gain; a formula can't know it.
    chosen:   where the toggles start, as Configuration's fields; 12 slots in a batch.

    Bounds, from two peaks (notebook 12); where a machine has no peak for a format, 16 bits' counts.

    Example: `configurator("llama-3-8b", "h100", weights="int4", schedule="continuous")`
    Raises:  ValueError naming what came; Incompatible for a start that is excluded.
    """
    for name, value, least, most in (
        ("requests", requests, 1, 32), ("shared", shared, 0, 1024), ("asks", asks, 1, 256),
        ("new", new, 1, 128),
    ):  # fmt: skip
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}: expected a whole number, {least} to {most}")
    real = isinstance(tokens_per_round, int | float) and not isinstance(tokens_per_round, bool)
    if not real or not 1 <= tokens_per_round <= MOST_GUESSES + 1:
        raise ValueError(
            f"tokens_per_round is {tokens_per_round!r}: expected 1 to {MOST_GUESSES + 1}"
        )
    known = Configuration.__dataclass_fields__
    if unknown := chosen.keys() - known.keys():
        raise ValueError(f"{min(unknown)!r} is no field: choose from {', '.join(known)}")
    start = Configuration(**chosen)
    if start.guesses > MOST_GUESSES:
        raise ValueError(f"guesses is {start.guesses}: expected 1 to {MOST_GUESSES}")
    if "slots" not in chosen:
        start = replace(start, slots=12) if start.schedule != "single" else start
    values = {name: getattr(start, name) for name in known}
    values["slots"] = values["slots"] if start.schedule != "single" else 12
    values |= {"shape": shape, "machine": machine, "tokens_per_round": float(tokens_per_round)}
    work = {"requests": requests, "shared": shared, "asks": asks, "new": new}
    return Configurator(values, work)
