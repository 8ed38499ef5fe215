"""The server's loop: plan, compute, hand out tokens, let go of what is over."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from .clock import VirtualClock, WallClock
from .executor import Drawn
from .records import Event, Iteration, Part
from .request import Completion, Request, Running
from .scheduler import Scheduler, Work


class TooLong(ValueError):
    """A request that the memory could not hold even if it were alone."""


class Executor(Protocol):
    def run(self, work: Sequence[Work]) -> list[list[Drawn]]:
        """As `executor.ModelExecutor.run`."""


def _plain_prompt(request: Request) -> list[int]:
    prompt = list(request.prompt)
    if not prompt:
        raise ValueError("the prompt is empty: expected at least one token")
    return prompt


class Loop:
    """Requests in, events out, one forward a `step`.

    check: turns a request's prompt into a list of tokens, or raises.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: WallClock | VirtualClock | None = None,
        check: Callable[[Request], list[int]] = _plain_prompt,
    ) -> None:
        self.scheduler, self.executor, self.check = scheduler, executor, check
        self.clock = WallClock() if clock is None else clock
        if not hasattr(self.clock, "computed"):
            raise TypeError(f"clock={clock!r}: expected WallClock(), VirtualClock() or None")
        self.origin_s = self.clock.now()
        self.live: dict[int, list[Running]] = {}  # by request number: its samples still running
        self.done: dict[int, list[Completion]] = {}
        self.iterations: list[Iteration] = []
        self._events: list[Event] = []
        self._inside = False  # a step, where only `stop` can call us
        self._numbers, self._ids = itertools.count(), itertools.count()

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def now(self) -> float:
        """Seconds since the loop was made."""
        return self.clock.now() - self.origin_s

    def submit(self, request: Request, arrival_s: float | None = None) -> int:
        """Queue a request and return its number. arrival_s: when it came, if not now.

        Raises: TooLong if it could never be held, or what `check` raises; then nothing is queued.
        """
        prompt, params = self.check(request), request.params
        request = replace(request, prompt=tuple(prompt))  # theirs may grow while we compute
        slots, memory = self.scheduler.policy.slots, self.scheduler.memory
        slots = min(slots, getattr(memory, "rows", slots))
        if params.samples > slots:
            raise TooLong(
                f"{params.samples} samples were asked for, but {slots} slots are all there are: "
                "ask for fewer, or make the engine with more slots"
            )
        number, now = next(self._numbers), self.now()
        arrival_s = now if arrival_s is None else arrival_s
        leader, *followers = (
            Running(next(self._ids), request, number, sample, list(prompt), arrival_s)
            for sample in range(params.samples)
        )
        if not memory.fits(leader.longest):
            raise TooLong(
                f"a prompt of {len(prompt)} tokens with {params.max_new_tokens} new ones needs "
                f"room for {leader.longest}, more than the cache has: ask for fewer new tokens, "
                "or make a larger cache"
            )
        leader.followers = followers
        if hasattr(memory, "check"):
            memory.check(leader)
        self.live[number], self.done[number] = [leader, *followers], []
        if params.max_new_tokens == 0:
            for one in (leader, *followers):
                self._finish(one, "length")
        else:
            self.scheduler.add(leader)
        return number

    def accept(self, request: Request, arrival_s: float | None = None) -> int:
        """As `submit`, but a request that is refused is done at once, and says why."""
        try:
            return self.submit(request, arrival_s)
        except (ValueError, TypeError) as error:
            number, now = next(self._numbers), self.now()
            came_s = now if arrival_s is None else arrival_s
            self.done[number] = [
                Completion(
                    number, sample, [], [], "failed", error, came_s, None, (), now,
                    user=request.user,
                )
                for sample in range(request.params.samples)
            ]  # fmt: skip
            self._events += [Event(number, c.sample, None, c) for c in self.done[number]]
            return number

    def cancel(self, number: int) -> None:
        """End a request now, all samples of it, and free what it holds. Nothing if it is over."""
        for one in list(self.live.get(number, ())):
            self._finish(one, "cancelled")

    def forget(self) -> None:
        """Forget the requests that are over and the iterations so far."""
        self.done = {number: self.done[number] for number in self.live}
        self.iterations = []

    def step(self) -> list[Event]:
        """One forward pass for whoever can have a part in it; what came of it.

        If the executor raises, every text is as it was, and `step` may be repeated.
        Raises: RuntimeError when called from a request's `stop`.
        """
        self._refuse_reentry()
        if self.busy:
            self._inside = True
            try:
                self._iterate()
            finally:
                self._inside = False
        events, self._events = self._events, []
        return events

    def serve(
        self, trace: Iterable[Request], progress: bool = False, *, stacklevel: int = 2
    ) -> list[Completion]:
        """Serve requests as they arrive, counted from now; completions in the trace's order.

        Requests that are refused give failed completions, and one warning in all. stacklevel: whom
        it names, as of `warnings.warn`.
        """
        self._refuse_reentry()
        from tqdm.auto import tqdm  # only where a bar may be drawn

        trace, start_s = list(trace), self.now()
        for request in trace:
            if not isinstance(request, Request):
                raise TypeError(f"the trace holds {request!r}: expected Request(prompt, ...)")
        coming = deque(sorted(range(len(trace)), key=lambda i: trace[i].arrival_s))
        # Of the trace's requests: their numbers, and their answers even if others `forget` them.
        numbers, answers = {}, {}
        with tqdm(total=len(trace), desc="requests", disable=not progress, leave=False) as bar:
            while coming or self.busy:
                while coming and trace[coming[0]].arrival_s <= self.now() - start_s:
                    i = coming.popleft()
                    numbers[i] = self.accept(trace[i], start_s + trace[i].arrival_s)
                    answers[i] = self.done[numbers[i]]
                if self.busy:
                    self.step()
                elif coming:
                    self.clock.wait(trace[coming[0]].arrival_s - (self.now() - start_s))
                bar.update(sum(n not in self.live for n in numbers.values()) - bar.n)
        self._events = []  # of those refused last; the others went with their steps
        completions = [c for i in range(len(trace)) for c in answers[i]]
        refused = [c for c in completions if c.error is not None and c.admitted_s is None]
        if refused:
            warnings.warn(
                f"{len(refused)} of {len(completions)} answers were refused: {refused[0].error}",
                stacklevel=stacklevel,
            )
        return completions

    def _refuse_reentry(self) -> None:
        if self._inside:
            raise RuntimeError(
                "a stop cannot move the engine on: step, stream, generate and serve would run "
                "inside a step. From a stop, only submit and cancel"
            )

    def _iterate(self) -> None:
        scheduler, start_s = self.scheduler, self.now()
        preempted = scheduler.preempted
        work = scheduler.plan()
        if not work:
            raise RuntimeError(
                f"{len(scheduler.waiting)} requests wait and none can be admitted: this is a bug"
            )
        for w in work:
            if w.sequence.admitted_s is None:
                w.sequence.admitted_s = start_s
        stored, lent = scheduler.memory.held()
        parts = tuple(_part(w) for w in work)
        waiting, running = len(scheduler.waiting), len(scheduler.running)
        drawing = [one for w in work if w.draws for one in (w.sequence, *w.sequence.followers)]
        states = [one.generator_state for one in drawing]
        try:
            drawn = self.executor.run(work)
            self.clock.computed(work)
        except BaseException:
            for one, state in zip(drawing, states, strict=True):
                one.generator_state = state
            raise
        now = self.now()
        self.iterations.append(
            Iteration(
                start_s, now - start_s, parts, waiting, running, stored, lent,
                scheduler.preempted - preempted,
            )
        )  # fmt: skip
        for w, tokens in zip(work, drawn, strict=True):
            if w.padding or not self._lives(w.sequence):
                continue
            w.sequence.computed = w.start + w.count
            scheduler.memory.commit(w.sequence)
            if w.draws:
                family = (w.sequence, *scheduler.forked(w.sequence))
                for one, token in zip(family, tokens, strict=True):
                    self._take(one, token, now)

    def _take(self, one: Running, token: Drawn, now: float) -> None:
        """One answer's new token, or the exception that came in its place.

        Through `stop` the user may cancel any request, this one too.
        """
        if not self._lives(one):
            return
        if isinstance(token, Exception):
            self._finish(one, "failed", error=token)
            return
        one.tokens.append(token)
        one.token_times_s.append(now)
        try:
            over = one.is_over()
        except Exception as error:  # the user's own code: only this request may fail
            over = error
        if not self._lives(one):
            return
        if isinstance(over, Exception):
            self._finish(one, "failed", token, over)
        elif over:
            self._finish(one, over, token)
        else:
            self._events.append(Event(one.number, one.sample, token))

    def _lives(self, one: Running) -> bool:
        return one in self.live.get(one.number, ())

    def _finish(
        self, one: Running, reason: str, token: int | None = None, error: Exception | None = None
    ) -> None:
        self.scheduler.leave(one)
        samples = self.live[one.number]
        samples.remove(one)
        if not samples:
            del self.live[one.number]
        prompt = one.tokens[: len(one.tokens) - len(one.new_tokens)]
        completion = Completion(
            one.number, one.sample, prompt, one.new_tokens, reason, error, one.arrival_s,
            one.admitted_s, tuple(one.token_times_s), self.now(), one.preemptions, one.found,
            one.request.user,
        )  # fmt: skip
        self.done[one.number].append(completion)
        self.done[one.number].sort(key=lambda c: c.sample)
        self._events.append(Event(one.number, one.sample, token, completion))


def _part(w: Work) -> Part:
    one = w.sequence
    kind = "padding" if w.padding else "prefill" if w.prefill else "decode"
    return Part(one.slot, one.number, one.sample, w.start, w.count, kind, w.padded)
