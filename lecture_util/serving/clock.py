"""The server's two clocks: seconds as they pass, and seconds by a formula."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from numbers import Real

from .scheduler import Work


class WallClock:
    """Seconds as they pass."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    def computed(self, work: Sequence[Work]) -> None:
        """Computing took its time already."""


class VirtualClock:
    """Seconds by a formula: a forward takes `step_time(work)`. By default each takes one.

    With the real model it makes arrivals and metrics the same on every machine; with a model of a
    large machine's speed it makes a simulator.
    """

    def __init__(self, step_time: Callable[[Sequence[Work]], float] = lambda work: 1.0) -> None:
        if not callable(step_time):
            raise TypeError(
                f"step_time={step_time!r}: expected a function of the work that gives seconds, "
                "such as lambda work: 1.0"
            )
        self.step_time, self.time = step_time, 0.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        """A wait too short to change the sum moves on all the same, by the least there is."""
        self.time = max(self.time + seconds, math.nextafter(self.time, math.inf))

    def computed(self, work: Sequence[Work]) -> None:
        """Raises: ValueError if the formula gives no seconds; then the clock stands still."""
        seconds = self.step_time(work)
        if not isinstance(seconds, Real) or not 0 <= seconds < math.inf:
            raise ValueError(f"step_time gave {seconds!r}: expected finite seconds from 0 up")
        self.time += float(seconds)
