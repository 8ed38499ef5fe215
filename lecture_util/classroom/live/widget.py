"""`step(fn, *args)`: the walk as a widget. Python says what to show; stepper.js draws it.

The kernel keeps the recording; each move sends the front end one small picture.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
from IPython import get_ipython
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from traitlets import Dict, List

from .arguments import Arguments
from .directives import Source
from .recording import Call, Limits, Shown
from .trace import HOUSE, code_of, record
from .walk import MOVES, Walk

SAYS = {
    "call": "is called", "line": "runs next", "return": "returns", "yield": "yields",
    "raise": "stops here",
}  # fmt: skip
PRINTED = 2_000  # characters of output on screen


class Stepper(anywidget.AnyWidget):
    """A function's run, walked through. `walk` is where it stands, `move` goes on."""

    _esm = Path(__file__).with_name("stepper.js")
    _css = Path(__file__).with_name("stepper.css")
    sources = Dict().tag(sync=True)  # per function: its title and its lines
    picture = Dict().tag(sync=True)  # what is on screen now
    boxes = List().tag(sync=True)  # the arguments

    def __init__(
        self, fn: Callable, args: tuple, kwargs: dict, limits: Limits | None = None
    ) -> None:
        code_of(fn)  # refuses what has no source
        self.fn, self.limits = fn, limits or Limits()
        self.arguments = Arguments(fn, args, kwargs)
        self.name = code_of(fn).co_name
        self.histories: set[str] = set()
        self.asked = 0  # runs asked for, so that even one that changes nothing is answered
        super().__init__()
        self.run()
        self.on_msg(self._heard)

    def __repr__(self) -> str:
        """One line, equal on every machine: what is shown where there is no front end."""
        steps = [self.walk.steps[i] for i in self.walk.main]
        values = {name for s in steps for name, v in s.values.items() if not v.argument}
        return f"step: {self.name}, {_count(len(steps), 'step')}, {_count(len(values), 'value')}"

    def run(self, texts: dict[str, str] | None = None) -> bool:
        """Trace again, with what was typed; False, and nothing run, if that can't be read.

        The walk stays where it was if the new run passes the same place there.
        """
        self.asked += 1
        if not self.arguments.edit(texts or {}):
            self._show_boxes()
            self._show()
            return False
        old: Walk | None = getattr(self, "walk", None)
        args, kwargs = self.arguments.call()
        self.walk = Walk(record(self.fn, args, kwargs, self.limits))
        if old is not None:
            self.walk.go_where(old)
        self._show_sources()
        self._show_boxes()
        self._show()
        return True

    def move(self, name: str) -> bool:
        """Make one of MOVES; False where it leads nowhere."""
        moved = self.walk.move(name)
        self._show()
        return moved

    def to_line(self, line: int) -> bool:
        moved = self.walk.to_line(line)
        self._show("" if moved else f"Line {line} isn't reached in this run")
        return moved

    def _heard(self, _widget: object, message: dict, _buffers: object) -> None:
        if (do := message.get("do")) in MOVES:
            self.move(do)
        elif do == "line":
            self.to_line(int(message["line"]))
        elif do == "run":
            self.run(message["texts"])
        elif do == "history":
            self.histories ^= {message["name"]}
            self._show()

    def _show(self, notice: str = "") -> None:
        walk = self.walk
        step, call = walk.step, walk.calls[walk.step.call]
        last = walk.at == len(walk.steps) - 1
        rows = [self._value(name, shown) for name, shown in step.values.items()]
        values = sorted(filter(None, rows), key=lambda row: row["argument"])  # these come last
        outcome = {}
        if step.outcome is not None:
            outcome = {"says": SAYS[step.kind], "html": step.outcome.html}
        self.picture = {
            "asked": self.asked,
            "source": _key(call),
            "span": list(step.span),
            "kind": step.kind,
            "where": self._where(),
            "trail": [walk.calls[c].name for c in walk.trail][-6:],
            "values": values,
            "outcome": outcome,
            "note": notice or (walk.recording.note if last else ""),
            "printed": walk.recording.printed[: step.printed][-PRINTED:],
            "first": walk.at == 0,
            "last": last,
            "said": self._said(call),
        }

    def _value(self, name: str, shown: Shown) -> dict | None:
        """A row beside the code; a value that has a box of its own needs none."""
        step = self.walk.step
        boxes = {item.name for item in self.arguments.items if item.editable}
        if shown.argument and step.call == 0 and name in boxes:
            return None
        past = self.walk.history(name) if name in self.histories else None
        return {
            "name": name,
            "html": shown.value.html,
            "line": shown.line,
            "argument": shown.argument,
            "changed": name in step.changed and not shown.argument,
            "history": past and [[old.line, old.value.html] for old in past],
        }

    def _where(self) -> str:
        walk = self.walk
        count = f"step {walk.count:,} of {len(walk.main):,}"
        deep = f", {walk.depth} deep" if walk.depth > 1 else ""
        if walk.main[walk.count - 1] == walk.at:
            return f"{count}{deep}"
        return f"inside {walk.calls[walk.step.call].name}, after {count}{deep}"

    def _said(self, call: Call) -> str:
        """The step in words, for a screen reader."""
        step = self.walk.step
        words = [f"{call.name}, line {step.span[0]} {SAYS[step.kind]}"]
        if step.outcome is not None:
            words.append(step.outcome.text)
        words += [
            f"{name} is {shown.value.text}{', changed' if name in step.changed else ''}"
            for name, shown in step.values.items()
        ]
        return ". ".join(words)

    def _show_sources(self) -> None:
        recording, highlighted, found = self.walk.recording, {}, {}
        for call in self.walk.calls:
            source = recording.sources[call.filename]
            if call.filename not in highlighted:
                highlighted[call.filename] = _coloured(source)
            if _key(call) not in found:
                lines = highlighted[call.filename]
                found[_key(call)] = {
                    "title": f"{call.name} · {_place(call.filename)}",
                    "lines": [
                        [n, lines[n] + (" …" if n + 1 in source.folded else "")]
                        for n in source.shown(call.span)
                    ],
                }
        self.sources = found

    def _show_boxes(self) -> None:
        self.boxes = [
            {
                "name": item.name,
                "text": item.text,
                "error": item.error,
                "editable": item.editable,
                "shared": item.shared,
            }
            for item in self.arguments.items
        ]


def step(fn: Callable, /, *args: Any, **kwargs: Any) -> Stepper:
    """Run `fn(*args, **kwargs)` once and walk through it: the last expression of a cell.

    Keys, with the focus in the widget: right and left go forward and back, down and up into a
    call and out of it, space over it, Home and End to the ends. Comments in the source say what
    to show: see `directives`. What `fn` raises is shown, not raised.

    Example: `step(accounting.mlp, B, T, D, F)`
    Raises:  TypeError if `fn` has no Python source or doesn't take these arguments.
    """
    stepper = Stepper(fn, args, kwargs)
    if get_ipython() is None:
        print(stepper)
    return stepper


def _count(number: int, noun: str) -> str:
    inspected = " inspected" if noun == "value" else ""
    return f"{number:,} {noun}{'' if number == 1 else 's'}{inspected}"


def _key(call: Call) -> str:
    return f"{call.name}:{call.span[0]}:{os.path.basename(call.filename)}"


def _place(filename: str) -> str:
    if filename.startswith(HOUSE):
        return "lecture_util/" + filename.removeprefix(HOUSE).replace(os.sep, "/")
    return os.path.basename(filename) if os.path.exists(filename) else "this notebook"


def _coloured(source: Source) -> dict[int, str]:
    """Every line of a file as HTML with Pygments' classes."""
    text = source.text()
    try:
        formatter = HtmlFormatter(nowrap=True, classprefix="step-")
        lines = highlight(text, PythonLexer(stripnl=False), formatter).split("\n")
    except ValueError:
        lines = html.escape(text).split("\n")
    return dict(enumerate(lines, start=1))
