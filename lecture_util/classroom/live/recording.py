"""What a run leaves behind for the walk: its steps, calls and sources. Plain data, no frames."""

from __future__ import annotations

from dataclasses import dataclass, field

from .directives import Source, Span
from .snapshot import Snapshot

NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Limits:
    """When to stop recording; `grace_s` later the function itself is stopped."""

    steps: int = 20_000
    snapshot_bytes: int = 20_000_000
    seconds: float = 10.0
    grace_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A value beside the code: what it was, since which line, and whether it is an argument."""

    value: Snapshot
    line: int
    argument: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """About to run a statement (kind "line"), or: "call", "return", "yield", "raise"."""

    kind: str
    call: int
    span: Span
    values: dict[str, Shown]
    changed: frozenset[str] = NOTHING
    outcome: Snapshot | None = None  # what is returned, yielded or raised
    printed: int = 0  # characters printed so far


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a function: who called it, and where its source is."""

    name: str
    filename: str
    span: Span
    caller: int | None
    teaches: bool  # it is the function asked for, or carries directives


@dataclass
class Recording:
    steps: list[Step] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    printed: str = ""
    note: str = ""
    seconds: float = 0.0
    snapshot_bytes: int = 0
