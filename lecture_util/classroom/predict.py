"""The predict-then-measure cell: put a number on it first, then see how far off you were.

`predict(...)` asks; `.reveal(...)`, after the measurement, shows guess, prediction and measurement
in one plot. Both work without a front end, where nobody can type: they say "no guess entered".
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
from IPython import get_ipython
from IPython.display import display
from matplotlib.ticker import MaxNLocator

from lecture_util.classroom.figures import style
from lecture_util.classroom.figures.plots import plain_log_ticks


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

    def _valid(self, guess: Any) -> Any:
        if self.choices is not None:
            if guess not in self.choices:
                raise ValueError(f"{guess!r} is not a choice: choose from {self.choices}")
            return guess
        try:
            value = float(str(guess).replace(",", "").replace("_", "").strip())
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{guess!r} is not a number: type digits, for example 25 or 1.5e3")
        return value

    def _form(self) -> widgets.Widget:
        """The question, a box or a list to answer in, and a line that says what was understood."""
        title = widgets.HTML(f"<b>Predict.</b> {html.escape(self.question)}")
        note = widgets.HTML("")
        if self.choices is None:
            entry = widgets.Text(
                placeholder=f"your guess, {self.unit}" if self.unit else "your guess",
                description="Your guess",
                continuous_update=False,
            )
        else:
            entry = widgets.RadioButtons(options=self.choices, value=None, description="Your guess")
        entry.style.description_width = "6em"

        def answered(change: dict) -> None:
            given = change["new"]
            self.guesses.clear()
            if given is None or not str(given).strip():
                note.value = ""
                return
            try:
                self.add(given)
                note.value = f"Noted: <b>{html.escape(self._show(self.guesses[-1]))}</b>"
            except ValueError as error:
                note.value = f'<span style="color:#B00020">{html.escape(str(error))}</span>'

        entry.observe(answered, names="value")
        self.entry, self.note = entry, note
        return Form([title, widgets.HBox([entry, note])])

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
        """
        if self.choices is not None:
            self._reveal_choice(measured if measured is not None else predicted)
            return
        if measured is None and predicted is None and not self.guesses:
            print(f"{self.question}: no guess entered, not measured here")
            return
        print(self._verdict(measured, predicted))
        self._plot(measured, predicted, low, high)
        plt.show()

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

    def _plot(
        self, measured: float | None, predicted: float | None, low: float | None, high: float | None
    ) -> None:
        style.use_style()
        rows: list[tuple[str, list[float], str, str]] = []
        if self.guesses:
            name = "your guess" if len(self.guesses) == 1 else f"{len(self.guesses)} guesses"
            rows.append((name, self.guesses, style.GUESS, "D"))
        if predicted is not None:
            rows.append(("predicted", [predicted], style.PREDICTED, "s"))
        if measured is not None:
            rows.append(("measured", [measured], style.MEASURED, "o"))
        fig, ax = plt.subplots(figsize=(7.5, 1.3 + 0.55 * len(rows)))
        for y, (_, values, color, marker) in enumerate(rows):
            ax.plot(values, [y] * len(values), marker, color=color, ms=11, zorder=4)
            if len(values) == 1:
                ax.annotate(self._show(values[0]), (values[0], y), xytext=(11, 0), va="center",
                            textcoords="offset points", color=style.INK, zorder=5,
                            path_effects=style.HALO)  # fmt: skip
        if predicted is not None:
            ax.axvline(predicted, ls="--", color=style.PREDICTED, zorder=2)
        if measured is not None:
            ax.axvline(measured, ls="-", color=style.MEASURED, zorder=2)
            if low is not None and high is not None:
                ax.axvspan(low, high, color=style.tint(style.MEASURED), lw=0, zorder=1)
        ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
        ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel=self.unit or "value")
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        values = [value for _, group, *_ in rows for value in group]
        values += [edge for edge in (low, high) if edge is not None]
        smallest, largest = min(values), max(values)
        if smallest > 0 and largest > 10 * smallest:
            ax.set_xscale("log")
            reach = largest / smallest
            ax.set_xlim(smallest / reach**0.08, largest * reach**0.35)
            plain_log_ticks(ax.xaxis)
        else:
            ax.set_xlim(min(0, smallest * 1.1), max(largest * 1.3, 0) or 1)
        style.claim(ax, self.question)
        fig.align_labels()

    def _reveal_choice(self, right: Any) -> None:
        if right is not None and right not in self.choices:
            raise ValueError(f"{right!r} is not a choice: reveal one of {self.choices}")
        if not self.guesses:
            print(f"no guess entered; right is {right}")
        elif len(self.guesses) == 1:
            mark = "✓" if self.guesses[0] == right else "✗"
            print(f"{mark} you chose {self.guesses[0]}; right is {right}")
        else:
            hits = sum(guess == right for guess in self.guesses)
            print(f"{hits} of {len(self.guesses)} chose {right}, which is right")
        counts = [self.guesses.count(choice) for choice in self.choices]
        style.use_style()
        _, ax = plt.subplots(figsize=(7.5, 1.2 + 0.5 * len(self.choices)))
        rows = range(len(self.choices))
        colors = [style.MEASURED if choice == right else style.MUTED for choice in self.choices]
        names = [f"{c}  ✓" if c == right else str(c) for c in self.choices]
        ax.barh(rows, counts, color=colors, height=0.6)
        for label, color in zip(ax.set_yticks(rows, names), colors, strict=True):
            label.label1.set_color(color)
        ax.invert_yaxis()
        ax.grid(visible=False)
        ax.set_xlim(0, max([*counts, 1]) * 1.1)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("guesses" if self.guesses else "guesses (none entered)")
        style.claim(ax, self.question)
        plt.show()


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
        prediction.note.value = f"Noted: <b>{html.escape(prediction._show(guess))}</b>"
    if get_ipython() is not None:
        display(prediction.form)
    return prediction


def _off(guess: float, truth: float | None) -> str:
    """How far a guess was from the truth, as a factor where that makes sense."""
    if truth is None:
        return "not checked"
    if guess == truth:
        return "exact"
    if guess <= 0 or truth <= 0:
        return f"off by {style.number(guess - truth)}"
    ratio = guess / truth
    if 0.9 <= ratio <= 1.1:
        return f"within {abs(ratio - 1):.0%}"
    factor, way = (ratio, "high") if ratio > 1 else (1 / ratio, "low")
    return f"{style.number(factor)} x too {way}"
