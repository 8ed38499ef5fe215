"""The predict-then-measure cell: put a number on it first, then see how far off you were.

`predict(...)` asks; `.reveal(...)`, after the measurement, shows guess, prediction and measurement
in one plot. One reader enters one guess; a room enters many, each with Enter or a click. Both work
without a front end, where nobody can type: they say "no guess entered".
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
from IPython import get_ipython
from IPython.display import display

from lecture_util.classroom import reveal
from lecture_util.classroom.figures import style

SNUG = {"width": "auto"}
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)


class Form(widgets.VBox):
    """Where a guess is typed; printed as one line where nothing can be typed."""

    def __repr__(self) -> str:
        return "Form for a guess: open the notebook in JupyterLab to enter one"


class Prediction:
    """A question, the guesses made so far, and later what was right.

    `guesses` is a list: one entry from a reader, many from a room.
    """

    def __init__(self, question: str, unit: str = "", choices: Sequence[Any] | None = None) -> None:
        self.question, self.unit = question, unit
        if isinstance(choices, str):
            raise ValueError(f"choices={choices!r} is a string: pass a list, such as ['yes', 'no']")
        self.choices = list(choices) if choices is not None else None
        self.guesses: list[Any] = []
        self.form = self._form()

    def __repr__(self) -> str:
        return f"Prediction({self.question!r})"

    def add(self, guess: Any) -> None:
        """Append one guess.

        Raises: ValueError if it is not a number, or not one of the choices.
        """
        self.guesses.append(self._valid(guess))
        self._count()

    def _valid(self, guess: Any) -> Any:
        if self.choices is not None:
            if guess not in self.choices:
                raise ValueError(f"{guess!r} is not a choice: choose from {self.choices}")
            return guess
        text = str(guess).replace("_", "").strip()
        if "," in text and not THOUSANDS.fullmatch(text):
            raise ValueError(f"{guess!r} has a comma: type a decimal point, for example 1.5")
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{guess!r} is not a number: type digits, for example 25 or 1.5e3")
        return value

    def _form(self) -> Form:
        """The question, a box or buttons to answer with, how many have answered, and an undo."""
        title = widgets.HTML(f"<b>Predict.</b> {html.escape(self.question)}")
        self.note = widgets.HTML("")
        self.undo = widgets.Button(
            description="undo", tooltip="take the last guess back", layout=SNUG, disabled=True
        )
        self.undo.on_click(self._take_back)
        if self.choices is None:
            self.entry = widgets.Text(
                placeholder=f"{self.unit}, then Enter" if self.unit else "then Enter",
                description="Your guess",
                continuous_update=False,
            )
            self.entry.style.description_width = "6em"
            self.entry.observe(self._entered, names="value")
            answers = [self.entry]
        else:
            self.buttons = {c: widgets.Button(layout=SNUG) for c in self.choices}
            for choice, button in self.buttons.items():
                button.on_click(lambda _, choice=choice: self._take(choice))
            answers = list(self.buttons.values())
        self._count()
        box = widgets.HBox([*answers, self.undo, self.note])
        box.layout = widgets.Layout(flex_flow="row wrap", align_items="center")
        return Form([title, box])

    def _entered(self, change: dict) -> None:
        given = change["new"].strip()
        if given and self._take(given):
            self.entry.value = ""  # ready for the next one

    def _take(self, guess: Any) -> bool:
        try:
            self.add(guess)
        except ValueError as error:
            self._say(str(error), color="#B00020")
            return False
        return True

    def _take_back(self, _button: object) -> None:
        del self.guesses[-1:]
        self._count()

    def _count(self) -> None:
        """Show how many guesses there are, and the last, so that a slip is seen."""
        count = len(self.guesses)
        self.undo.disabled = not count
        if self.choices is not None:
            for choice, button in self.buttons.items():
                votes = self.guesses.count(choice)
                button.description = f"{choice} ({votes})" if votes else str(choice)
        last = self._show(self.guesses[-1]) if count else ""
        self._say(f"{count} guess{'es' * (count > 1)}, the last: {last}" if count else "")

    def _say(self, text: str, color: str = "inherit") -> None:
        self.note.value = (
            f'<span role="status" style="color:{color}">{html.escape(text)}</span>' if text else ""
        )

    def _show(self, value: Any) -> str:
        if self.choices is not None or isinstance(value, str):
            return str(value)
        return f"{style.number(value)} {self.unit}".strip()

    def reveal(
        self,
        measured: Any = None,
        predicted: Any = None,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        """Show guess, prediction and measurement in one plot, and the ratios between them.

        `low` and `high` are the measurement's spread. For a question of choices, `measured` (or
        else `predicted`) is the right one. `measured=None` says "not measured here".

        Raises: ValueError if one of them is no finite number, or not one of the choices.
        """
        if self.choices is not None:
            self._reveal_choice(measured if measured is not None else predicted)
            return
        given = {"measured": measured, "predicted": predicted, "low": low, "high": high}
        measured, predicted, low, high = (reveal.finite(*item) for item in given.items())
        if measured is None and predicted is None and not self.guesses:
            print(f"{self.question}: no guess entered, not measured here")
            return
        print(self._verdict(measured, predicted))
        rows = [("measured", measured), ("predicted", predicted)]
        reveal.numbers(
            self.question,
            self.unit,
            self.guesses,
            {name: value for name, value in reversed(rows) if value is not None},
            (low, high) if low is not None and high is not None else None,
        )

    def _verdict(self, measured: float | None, predicted: float | None) -> str:
        parts = []
        if measured is None:
            parts.append("not measured here")
        elif predicted:
            ratio = style.number(measured / predicted)
            parts.append(
                f"measured {self._show(measured)} is {ratio} x predicted {self._show(predicted)}"
            )
        else:
            parts.append(f"measured {self._show(measured)}")
        truth = measured if measured is not None else predicted
        if not self.guesses:
            parts.append("no guess entered")
        elif len(self.guesses) == 1:
            parts.append(
                f"your guess {self._show(self.guesses[0])} was {_off(self.guesses[0], truth)}"
            )
        else:
            middle = sorted(self.guesses)[len(self.guesses) // 2]
            parts.append(
                f"the middle of {len(self.guesses)} guesses, {self._show(middle)}, "
                f"was {_off(middle, truth)}"
            )
        return "; ".join(parts)

    def _reveal_choice(self, right: Any) -> None:
        if right is not None and right not in self.choices:
            raise ValueError(f"{right!r} is not a choice: reveal one of {self.choices}")
        if not self.guesses:
            print(f"no guess entered; right is {right}")
            return  # nothing to draw
        if len(self.guesses) == 1:
            mark = "✓" if self.guesses[0] == right else "✗"
            print(f"{mark} you chose {self.guesses[0]}; right is {right}")
        else:
            hits = sum(guess == right for guess in self.guesses)
            print(f"{hits} of {len(self.guesses)} chose {right}, which is right")
        reveal.choices(self.question, self.choices, self.guesses, right)


def predict(
    question: str, unit: str = "", guess: Any = None, choices: Sequence[Any] | None = None
) -> Prediction:
    """Ask for a guess before the measurement; show a form where there is a front end.

    Example: `p = predict("tokens/s, naive loop", unit="tok/s")`, then, after measuring,
             `p.reveal(measured=21.3, predicted=33.1, low=20.8, high=21.9)`
    """
    prediction = Prediction(question, unit, choices)
    if guess is not None:
        prediction.add(guess)
    if get_ipython() is not None:
        display(prediction.form)
    return prediction


def _off(guess: float, truth: float | None) -> str:
    """How far a guess was from the truth, as a factor where that makes sense."""
    if truth is None:
        return "not checked"
    if guess == truth:
        return "exact"
    if guess <= 0 or truth <= 0 or not guess / truth:
        return f"off by {style.number(guess - truth)}"
    ratio = guess / truth
    if 0.9 <= ratio <= 1.1:
        return f"within {abs(ratio - 1):.0%}"
    factor, way = (ratio, "high") if ratio > 1 else (1 / ratio, "low")
    return f"{style.number(factor)} x too {way}"
