"""`record(fn, args, kwargs)`: run a function once and keep what a walk through it needs.

Recorded are the steps of the function itself, of the functions in its file and of those in
notebook cells and in `lecture_util`; a library's insides run untraced. Limits keep this bounded:
past one nothing more is recorded, and what doesn't end by itself soon after is stopped.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .directives import read
from .frame import Frame, said
from .guard import Guard, Stopped
from .recording import NOTHING, Call, Limits, Recording, Step
from .snapshot import Snapshot, plain, snapshot

HOUSE = str(Path(__file__).resolve().parents[2]) + os.sep
COMPREHENSIONS = {"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}


def record(
    fn: Callable, args: tuple = (), kwargs: dict | None = None, limits: Limits | None = None
) -> Recording:
    """Run `fn` once, traced. What it raises becomes the last step; nothing is propagated."""
    tracer = Tracer(code_of(fn), limits or Limits())
    printed, before, start = _Printed(), sys.gettrace(), time.perf_counter()
    tracer.printed = printed
    error = result = None
    guard = Guard(tracer.overdue)
    with contextlib.redirect_stdout(printed), contextlib.suppress(Stopped):
        guard.start()
        sys.settrace(tracer.enter)
        try:
            result = fn(*args, **(kwargs or {}))
            if inspect.isgenerator(result):
                for _ in result:
                    if tracer.full:
                        break
        except Stopped:
            pass
        except BaseException as raised:  # an interrupt too: the walk shows where it struck
            error = raised
        finally:
            guard.open = False  # nothing can strike from here on
            sys.settrace(before)
            guard.close()
    tracer.finish(error, result)
    recording = tracer.recording
    recording.printed, recording.seconds = printed.getvalue(), time.perf_counter() - start
    return recording


def code_of(fn: Callable) -> CodeType:
    """The code to show for what was passed: of a method, a class, a module, a decorated function.

    Raises: TypeError if there is no Python source to step through.
    """
    found = fn
    while hasattr(found, "func") and not hasattr(found, "__code__"):
        found = found.func  # functools.partial
    if isinstance(found, type):
        found = found.__init__
    elif not hasattr(found, "__code__") and not hasattr(found, "__wrapped__"):
        kind = type(found)
        found = getattr(kind, "forward", None) or kind.__dict__.get("__call__")
    code = getattr(inspect.unwrap(found), "__code__", None) if found is not None else None
    if code is None or not read(code.co_filename).lines:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(f"{name} has no Python source to step through: pass a Python function")
    if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise TypeError(f"{code.co_name} is async: step takes a plain function or a generator")
    return code


class _Printed(io.StringIO):
    """What the function prints, the first of it."""

    def write(self, text: str) -> int:
        room = 100_000 - self.tell()
        super().write(text[: max(0, room)])
        return len(text)


class Tracer:
    """The trace function of calls, and the recording that all frames write to."""

    def __init__(self, root: CodeType, limits: Limits) -> None:
        self.root, self.limits, self.recording = root, limits, Recording()
        self.full, self.seen, self.stopped = "", 0, False
        self.wanted: dict[str, bool] = {}
        self.deadline = time.perf_counter() + limits.seconds
        self.printed = io.StringIO()

    def enter(self, frame: FrameType, event: str, arg: Any) -> Callable | None:
        """Called at every call in this thread, so all that most calls cost is one look-up."""
        self.seen += 1
        if self.full or not self.seen % 1024:
            self.watch()
        filename = frame.f_code.co_filename
        wanted = self.wanted.get(filename)
        if wanted is None:
            wanted = self.wanted[filename] = self.wants(filename)
        if not wanted or frame.f_code.co_name in COMPREHENSIONS:
            return None
        if isinstance(known := getattr(frame.f_trace, "__self__", None), Frame):
            return known.trace  # a generator goes on
        if self.full or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return self.patrol if self.full else None
        return self.open(frame)

    def wants(self, filename: str) -> bool:
        if filename == self.root.co_filename:
            return True
        if filename.startswith(HOUSE):
            return not filename.startswith(os.path.dirname(__file__))
        cell = filename.startswith("<ipython-input") or "ipykernel_" in filename
        return cell and not os.path.exists(filename)

    def open(self, frame: FrameType) -> Callable | None:
        outer = frame.f_back
        while outer and not isinstance(getattr(outer.f_trace, "__self__", None), Frame):
            outer = outer.f_back
        caller: Frame | None = outer.f_trace.__self__ if outer else None
        code, sources = frame.f_code, self.recording.sources
        if caller is None and code is not self.root:
            return None  # a decorator around the function
        if code.co_filename not in sources:
            sources[code.co_filename] = read(code.co_filename, frame.f_globals)
        source = sources[code.co_filename]
        span = source.function(code.co_firstlineno)
        if (caller and caller.mute) or span[0] in source.hidden:
            return None
        teaches = code is self.root or source.has_directives(span)
        index = caller.index if caller else None
        self.recording.calls.append(Call(code.co_name, code.co_filename, span, index, teaches))
        return Frame(self, frame, source, len(self.recording.calls) - 1).trace

    def picture(self, value: Any) -> Snapshot:
        shot = snapshot(value)
        self.recording.snapshot_bytes += shot.nbytes
        return shot

    def add(self, step: Step) -> None:
        self.recording.steps.append(replace(step, printed=self.printed.tell()))
        if len(self.recording.steps) >= self.limits.steps:
            self.fill(f"{len(self.recording.steps):,} steps")
        elif self.recording.snapshot_bytes >= self.limits.snapshot_bytes:
            self.fill(f"{self.recording.snapshot_bytes / 1e6:,.0f} MB of values")
        self.watch()

    def watch(self) -> None:
        if self.overdue():
            raise Stopped

    def overdue(self) -> bool:
        """Whether it is to be stopped; at the first deadline only the recording ends."""
        if time.perf_counter() < self.deadline:
            return False
        if self.full:
            self.stopped = True
            return True
        self.fill(f"{self.limits.seconds:g} s")
        return False

    def fill(self, reason: str) -> None:
        self.full, self.deadline = reason, time.perf_counter() + self.limits.grace_s

    def patrol(self, frame: FrameType, event: str, arg: Any) -> Callable:
        self.watch()
        return self.patrol

    def finish(self, error: BaseException | None, result: Any) -> None:
        """Let the walk end where the function failed, and say if it was cut short."""
        steps, message = self.recording.steps, said(error) if error is not None else ""
        if self.full:
            ending = (
                f"it was stopped {self.limits.grace_s:g} s later" if self.stopped
                else f"it then raised {message}" if error is not None
                else "its first values were taken" if inspect.isgenerator(result)
                else f"it ran on to its end and returned {snapshot(result).text}"
            )  # fmt: skip
            self.recording.note = f"The walk ends here, after {self.full}; {ending}."
            return
        if error is None:
            return
        while len(steps) > 1 and steps[-2].kind == steps[-1].kind == "raise":
            steps.pop()  # callers it passed through
        if not steps or steps[-1].kind != "raise":  # no call came about, or no stack was left
            steps.append(
                replace(self.last(), kind="raise", outcome=plain(message), changed=NOTHING)
            )

    def last(self) -> Step:
        """The last step, or one at the head of a function that was never entered."""
        if self.recording.steps:
            return self.recording.steps[-1]
        name, filename = self.root.co_name, self.root.co_filename
        source = self.recording.sources[filename] = read(filename)
        span = source.function(self.root.co_firstlineno)
        self.recording.calls.append(Call(name, filename, span, None, True))
        return Step("call", 0, source.statement(span[0]), {})
