"""Ends a traced function that passes no traced line, such as `while True: pass` on one line.

The tracer tests its limit at every line and call. What has neither is ended by a timer's signal,
again and again, as a bare `except` may swallow one. Signals reach the main thread alone, where
notebook cells and their widgets run; in other threads, and on Windows, there is no guard. (A thread
beside it won't do: on Python 3.11 a trace function set while one runs can hang.)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

AGAIN_S = 0.25


class Stopped(BaseException):
    """Raised inside a traced function that would not end."""


class Guard:
    """From `start` to `close`, raises `Stopped` in the main thread once `overdue()` says so."""

    def __init__(self, overdue: Callable[[], bool]) -> None:
        self.overdue, self.open = overdue, False
        self.works = hasattr(signal, "SIGALRM") and (
            threading.current_thread() is threading.main_thread()
        )

    def start(self) -> None:
        if self.works:
            self.open = True
            self.before = signal.signal(signal.SIGALRM, self._ring)
            self.timer = signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)

    def close(self) -> None:
        """No `Stopped` comes after this."""
        self.open = False
        if self.works:
            signal.setitimer(signal.ITIMER_REAL, *self.timer)  # whoever had set one before
            signal.signal(signal.SIGALRM, self.before)

    def _ring(self, _number: int, _frame: object) -> None:
        if self.open and self.overdue():
            raise Stopped
