"""The trace function of one call: at which statement it is, and what is shown beside it.

A statement's values are looked at once it has run, that is, at whatever event comes next.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from .directives import Inspect, Source
from .recording import NOTHING, Shown, Step
from .snapshot import Snapshot, cut, plain

if TYPE_CHECKING:
    from .trace import Tracer

ENDS_A_LOOP = (StopIteration, StopAsyncIteration, GeneratorExit)


class Frame:
    """One call's trace function: the statement it is at, and what is shown beside it."""

    def __init__(self, tracer: Tracer, frame: FrameType, source: Source, index: int) -> None:
        self.tracer, self.source, self.index = tracer, source, index
        self.span, self.start = source.statement(frame.f_code.co_firstlineno), -1
        self.values: dict[str, Shown] = {}
        self.mute = False  # whether calls made from here are left out
        self.failed = ""  # what was raised here and isn't caught yet
        self.trace = self._trace  # one bound method, so that `f_trace` leads back here
        self._arguments(frame)
        self._add("call", self._settle(frame) | frozenset(self.values))

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable:
        if self.tracer.full:
            self.tracer.watch()
        elif event == "line":
            self._line(frame)
        elif event == "return":
            self._leave(frame, arg)
        elif event == "exception":
            self.failed = said(arg[1])
            if not issubclass(arg[0], ENDS_A_LOOP):
                self._add("raise", outcome=plain(self.failed))
        return self.trace

    def _line(self, frame: FrameType) -> None:
        span = self.source.statement(frame.f_lineno)
        if span == self.span and frame.f_lasti > self.start >= 0:
            return  # another line of the same statement, or the next turn of a comprehension
        changed = self._settle(frame) if self.start >= 0 else NOTHING
        self.span, self.start, self.failed = span, frame.f_lasti, ""
        hidden = span[0] in self.source.hidden
        self.mute = hidden or span[0] in self.source.stepover
        if not hidden:
            self._add("line", changed | self.unseen)
        else:
            self.unseen |= changed

    def _leave(self, frame: FrameType, value: Any) -> None:
        """A return and a yield look alike to a trace function, and so does an exception."""
        operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if self.mute and self.span[0] in self.source.hidden:
            return
        if operation.startswith("RETURN_"):
            self._add("return", self._settle(frame), self.tracer.picture(value))
        elif operation in ("YIELD_VALUE", "RESUME") and not self.failed:  # RESUME: Python 3.13
            self._add("yield", NOTHING, self.tracer.picture(value))
        elif self.failed.startswith(("StopIteration", "StopAsyncIteration")):
            self._add("raise", outcome=plain(self.failed))

    def _add(
        self, kind: str, changed: frozenset[str] = NOTHING, outcome: Snapshot | None = None
    ) -> None:
        self.unseen = NOTHING
        self.tracer.add(Step(kind, self.index, self.span, self.values, changed, outcome))

    def _arguments(self, frame: FrameType) -> None:
        code, found = frame.f_code, frame.f_locals
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS) + bool(
            code.co_flags & inspect.CO_VARKEYWORDS
        )
        for name in code.co_varnames[:count]:
            if name in found and name not in ("self", "cls"):
                shown = Shown(self.tracer.picture(found[name]), self.span[0], argument=True)
                self.values[name] = shown

    def _settle(self, frame: FrameType) -> frozenset[str]:
        """Look at what the statement that has just run was asked to show; say what changed."""
        at, changed = self.span[0], set()
        wanted, cleared = self.source.inspect.get(at, ()), self.source.clear.get(at, ())
        if not wanted and not cleared:
            return NOTHING
        values = {name: shown for name, shown in self.values.items() if name not in cleared}
        local = frame.f_locals
        for item in wanted:
            if (picture := self._look(item, frame.f_globals, local)) is None:
                continue
            before = values.get(item.name)
            if before is None or before.value != picture:
                changed.add(item.name)
            values[item.name] = Shown(picture, at)
        self.values = values
        return frozenset(changed)

    def _look(self, item: Inspect, module: dict, local: dict) -> Snapshot | None:
        if item.code is None:
            return plain("not an expression")
        try:
            return self.tracer.picture(eval(item.code, module, local))
        except NameError:
            return None  # not assigned yet
        except Exception as error:
            return plain(said(error))


def said(error: BaseException | None) -> str:
    words = cut(str(error))
    name = type(error).__name__
    return f"{name}: {words}" if words else name
