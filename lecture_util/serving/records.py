"""What the loop writes down: a forward, each sequence's part in it, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from .request import Completion


@dataclass(frozen=True)
class Part:
    """What one sequence did in one forward, for charts."""

    slot: int
    number: int
    sample: int
    start: int
    count: int
    kind: str  # "prefill", "decode" or "padding"
    padded: int = 0  # tokens computed for nothing after its own


@dataclass(frozen=True)
class Iteration:
    """One forward: when, how long, whose tokens, and how full the memory was after planning."""

    start_s: float
    seconds: float
    parts: tuple[Part, ...]
    waiting: int
    running: int
    stored: int  # tokens in the cache
    lent: int  # tokens that the lent memory has room for
    preempted: int


@dataclass(frozen=True)
class Event:
    """A new token of one answer, its end, or both. `number` is the request's."""

    number: int
    sample: int
    token: int | None
    completion: Completion | None = None
