"""A walk through a recording: where to go from each step. Pure; every move returns a position.

forward goes from line to line and into calls of functions that teach: those that carry directives,
and the function itself. `into` enters any call that was recorded, `over` none, `out` leaves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from .recording import Recording, Shown, Step

MOVES = ("start", "back", "forward", "over", "into", "out", "end")


class Walk:
    """A recording and a position in it. `main` are the steps that forward, alone, passes."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.at = recording, 0
        self.steps, self.calls = recording.steps, recording.calls
        seen: list[bool] = []  # whether forward, from the start, enters a call
        for call in self.calls:
            seen.append(call.caller is None or (call.teaches and seen[call.caller]))
        self.main = [i for i, step in enumerate(self.steps) if seen[step.call]]

    @property
    def step(self) -> Step:
        return self.steps[self.at]

    def move(self, name: str) -> bool:
        """Make one of MOVES; False where it leads nowhere."""
        return self._go(getattr(self, f"_{name}")())

    def to_line(self, line: int) -> bool:
        """To the next time this line of the function on screen is reached, else the last time."""
        here = self._place(self.at)

        def reached(i: int) -> bool:
            first, last = self.steps[i].span
            return first <= line <= last and self._place(i) == here

        found = self._first(range(self.at + 1, len(self.steps)), reached)
        return self._go(self._first(range(self.at), reached) if found is None else found)

    def history(self, name: str) -> list[Shown]:
        """What a shown name of this call has been up to here, oldest first."""
        found: list[Shown] = []
        for step in self.steps[: self.at + 1]:
            if step.call == self.step.call and name in step.changed and name in step.values:
                found.append(step.values[name])
        return found

    @property
    def count(self) -> int:
        """How many of `main` have been reached, this one included."""
        return bisect_right(self.main, self.at)

    def go_where(self, old: Walk) -> None:
        """Stand where another walk stands, if this run passes the same place there."""
        at = self.main[min(old.count, len(self.main)) - 1]
        if self.steps[at].span == old.steps[old.main[old.count - 1]].span:
            self.at = at

    @property
    def trail(self) -> list[int]:
        """The calls that are open, the outermost first."""
        return self._ancestors(self.step.call)[::-1]

    @property
    def depth(self) -> int:
        """How many runs of this same function are open: above 1, it has called itself."""
        places = [(self.calls[c].filename, self.calls[c].span) for c in self.trail]
        return places.count(places[-1])

    def _start(self) -> int:
        return 0

    def _end(self) -> int:
        return len(self.steps) - 1

    def _forward(self) -> int | None:
        return self._first(self._later(), self._follows())

    def _back(self) -> int | None:
        return self._first(self._earlier(), self._follows())

    def _over(self) -> int | None:
        open_calls = set(self._ancestors(self.step.call))
        return self._first(self._later(), lambda i: self.steps[i].call in open_calls)

    def _into(self) -> int | None:
        nearby = self.at + 1
        if nearby < len(self.steps) and self.steps[nearby].kind == "call":
            return nearby
        return self._forward()

    def _out(self) -> int | None:
        callers = set(self._ancestors(self.step.call)[1:])
        return self._first(self._later(), lambda i: self.steps[i].call in callers)

    def _follows(self) -> Callable[[int], bool]:
        """Whether a step is in an open call or, through calls that teach, in what one called."""
        open_calls = set(self._ancestors(self.step.call))

        def follows(i: int) -> bool:
            call: int | None = self.steps[i].call
            while call is not None and call not in open_calls:
                if not self.calls[call].teaches:
                    return False
                call = self.calls[call].caller
            return True

        return follows

    def _ancestors(self, call: int | None) -> list[int]:
        found = []
        while call is not None:
            found.append(call)
            call = self.calls[call].caller
        return found

    def _place(self, i: int) -> tuple:
        call = self.calls[self.steps[i].call]
        return call.filename, call.span

    def _later(self) -> range:
        return range(self.at + 1, len(self.steps))

    def _earlier(self) -> range:
        return range(self.at - 1, -1, -1)

    @staticmethod
    def _first(where: Iterable[int], wanted: Callable[[int], bool]) -> int | None:
        return next((i for i in where if wanted(i)), None)

    def _go(self, to: int | None) -> bool:
        if to is None or to == self.at:
            return False
        self.at = to
        return True
