"""A serving loop stepped one forward at a time, and what stood where during each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lecture_util.classroom.widgets.drawing import letter
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.engine import Engine
from lecture_util.serving.executor import Drawn
from lecture_util.serving.loop import Event, Loop, Part
from lecture_util.serving.paging import Pages
from lecture_util.serving.request import Request, Running
from lecture_util.serving.scheduler import Work


@dataclass(frozen=True)
class Place:
    """A running sequence: its slot, its tokens, and how many of them were computed before."""

    number: int
    sample: int
    slot: int
    tokens: tuple[int, ...]
    prompt: int
    computed: int
    found: int  # tokens that the prefix cache had
    follower: bool = False  # a further sample, which waits for its prompt to be computed


@dataclass(frozen=True)
class Pool:
    """The pages while a forward runs. owners: for each page, the sequences that hold it."""

    page_size: int
    owners: tuple[tuple[tuple[int, int], ...], ...]
    counts: tuple[int, ...]
    cached: tuple[bool, ...]
    idle: tuple[int, ...]  # the least recently used first
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """One forward: the parts in the order of the flat run, and what came of it."""

    start_s: float
    parts: tuple[Part, ...] = ()
    running: tuple[Place, ...] = ()
    waiting: tuple[tuple[int, int], ...] = ()  # who, by number and sample
    coming: tuple[tuple[int, float], ...] = ()  # the place in the trace, and when
    events: tuple[Event, ...] = ()
    preempted: int = 0
    pool: Pool | None = None


@dataclass
class Recorder:
    """Steps a loop over a trace. `history[0]` is before the first forward.

    An executor only sees what there is while a forward runs, so that is where it is written down.
    """

    loop: Loop
    trace: Sequence[Request]
    history: list[Snapshot] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # of requests, by number
    _copies: list | None = None
    _seen: int = 0

    def __post_init__(self) -> None:
        self.origin_s = self.loop.now()
        self.coming = sorted(range(len(self.trace)), key=lambda i: self.trace[i].arrival_s)
        self.history.append(self._snapshot())

    @property
    def over(self) -> bool:
        return not self.coming and not self.loop.busy

    def name(self, who: tuple[int, int]) -> str:
        """A, B, ... in the trace's order; A2 is the second sample of A."""
        number, sample = who
        name = self.names.get(number) or f"#{number}"
        return name if sample == 0 else f"{name}.{sample + 1}"

    def step(self) -> None:
        """One forward more. Time without requests is skipped. Nothing if all is over."""
        if self.over:
            return
        if not self.loop.busy:
            idle_s = self.trace[self.coming[0]].arrival_s - self._now()
            if idle_s > 0:
                self.loop.clock.wait(idle_s)
        while self.coming and self.trace[self.coming[0]].arrival_s <= self._now() + 1e-9:
            i = self.coming.pop(0)
            came_s = self.origin_s + self.trace[i].arrival_s
            self.names[self.loop.accept(self.trace[i], came_s)] = letter(i)
        inner, seen = self.loop.executor, []
        self.loop.executor = _Watching(inner, lambda: seen.append(self._snapshot()))
        preempted = self.loop.scheduler.preempted
        try:
            events = self.loop.step()
        finally:
            self.loop.executor = inner
        shot = seen[-1] if seen else self._snapshot()  # all that came were refused
        parts = self.loop.iterations[-1].parts if seen else ()
        self.history.append(
            replace(
                shot,
                parts=tuple(sorted(parts, key=lambda p: p.count > 1)),  # as `ModelExecutor` does
                events=tuple(events),
                preempted=self.loop.scheduler.preempted - preempted,
            )
        )

    def _now(self) -> float:
        return self.loop.now() - self.origin_s

    def _snapshot(self) -> Snapshot:
        scheduler = self.loop.scheduler
        return Snapshot(
            start_s=self._now(),
            running=tuple(place for one in scheduler.running for place in _places(one)),
            waiting=tuple((one.number, one.sample) for one in scheduler.waiting),
            coming=tuple((i, self.trace[i].arrival_s) for i in self.coming),
            pool=self._pool(),
        )

    def _pool(self) -> Pool | None:
        memory = self.loop.scheduler.memory
        if not isinstance(memory, Pages):
            return None
        blocks = memory.blocks
        owners: list[list[tuple[int, int]]] = [[] for _ in range(blocks.num_pages)]
        for one in self.loop.scheduler.running:
            if one.id in memory.tables:
                for page in memory.tables[one.id].pages:
                    owners[page].append((one.number, one.sample))
        # A real cache takes the list and leaves a new one; on paper it only grows.
        start = self._seen if memory.copies is self._copies else 0
        self._copies, self._seen = memory.copies, len(memory.copies)
        return Pool(
            blocks.page_size,
            tuple(map(tuple, owners)),
            tuple(blocks.counts),
            tuple(text is not None for text in blocks.texts),
            tuple(blocks.idle),
            tuple(memory.copies[start:]),
        )


@dataclass
class _Watching:
    """An executor that says what it is asked for, then lets the real one do it."""

    inner: Any
    tell: Callable[[], None]

    def run(self, work: Sequence[Work]) -> list[list[Drawn]]:
        self.tell()
        return self.inner.run(work)


def _places(one: Running) -> list[Place]:
    def place(any_one: Running, follower: bool) -> Place:
        prompt = len(any_one.tokens) - len(any_one.new_tokens)
        return Place(any_one.number, any_one.sample, any_one.slot, tuple(any_one.tokens), prompt,
                     any_one.computed, any_one.found, follower)  # fmt: skip

    return [place(one, False), *(place(follower, True) for follower in one.followers)]


def recorder(engine: Any, requests: Any, tokenizer: Any = None) -> Recorder:
    """A recorder for an Engine or a Loop. Prompts become requests that are there at once.

    Raises: TypeError or ValueError naming what came.
    """
    loop = engine.loop if isinstance(engine, Engine) else engine
    if not isinstance(loop, Loop):
        raise TypeError(f"engine is {engine!r}: pass an Engine, or a Loop such as simulator(...)")
    if isinstance(requests, str | Request) or not hasattr(requests, "__iter__"):
        raise TypeError(f"requests are {requests!r}: pass a list of Request or of prompts")
    trace = [_request(i, one, tokenizer) for i, one in enumerate(requests)]
    if not trace:
        raise ValueError("no requests: there is nothing to step through")
    if any(one.arrival_s for one in trace) and not isinstance(loop.clock, VirtualClock):
        raise ValueError(
            "requests arrive later, but the clock of this engine runs while you look: make it with "
            "clock=VirtualClock(), where every forward takes 1"
        )
    return Recorder(loop, trace)


def _request(i: int, one: Any, tokenizer: Any) -> Request:
    if isinstance(one, Request):
        return one
    if isinstance(one, str):
        if tokenizer is None:
            raise TypeError(f"request {i} is {one!r}: a string needs a tokenizer; or pass tokens")
        one = tokenizer.encode(one)
    if isinstance(one, Sequence) and all(type(token) is int for token in one):
        return Request(list(one))
    raise TypeError(f"request {i} is {one!r}: expected a Request, a list of tokens or a string")
