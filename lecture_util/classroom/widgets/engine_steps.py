"""engine_stepper (notebooks 09 and 10): a real engine, one forward at a time."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.forwards import Forwards
from lecture_util.classroom.widgets.rounds import marked
from lecture_util.classroom.widgets.snapshots import Recorder, Snapshot, recorder
from lecture_util.classroom.widgets.stepping import Steps

MOST_SLOTS = 16


class LazySteps(Steps):
    """Steps one by one, since the last one is known only once it is reached."""

    def move(self, by: int) -> None:
        for _ in range(abs(by)):
            super().move(1 if by > 0 else -1)


class EngineStepper(Explorer):
    """The explorer; `history` has a Snapshot for each forward done, the first before all."""

    def __init__(self, recorded: Recorder, tokenizer: Any, at: int) -> None:
        self.recorded = recorded
        first = max([*recorded.loop.done, -1]) + 1  # whoever was served before has no colour
        self._forwards = Forwards(recorded.name, first, tokenizer)
        self.forward = widgets.IntSlider(description="forward", min=0, max=1, value=0)
        self.steps = LazySteps(self.forward, "The engine")
        super().__init__(self._draw, {"forward": self.forward}, self.steps.parts, columns=2)
        self.steps.move(at)

    @property
    def history(self) -> list[Snapshot]:
        return self.recorded.history

    @property
    def over(self) -> bool:
        """Whether all requests are answered."""
        return self.recorded.over

    def redraw(self, change: object = None) -> None:
        """Compute what is asked for the first time, and let the slider reach one forward more."""
        error = None
        with self.quiet():
            try:
                while len(self.history) <= self.forward.value and not self.over:
                    self.recorded.step()
            except Exception as raised:  # shown below; the step may be tried again
                error = raised
            last = len(self.history) - 1
            value = min(self.forward.value, last)
            self.steps.reach(max(1, last if self.over else last + 1), value)
        super().redraw(change)
        if error is not None:
            self.say(f"<b>{marked(f'{type(error).__name__}: {error}', 300)}</b>")

    def _draw(self, forward: int) -> str:
        shot = self.history[min(forward, len(self.history) - 1)]
        slots = self.recorded.loop.scheduler.policy.slots
        self.steps.picture.value = self._forwards(shot, slots)
        return self._words(forward, shot)

    def _words(self, forward: int, shot: Snapshot) -> str:
        name = self.recorded.name
        if forward == 0:
            return (
                f"Before the first forward: {len(shot.coming)} requests are to come. "
                "<b>next ▶</b>, → or the space bar on the picture runs one."
            )
        tokens = sum(part.count for part in shot.parts)
        padded = sum(part.padded for part in shot.parts)
        padded += sum(part.count for part in shot.parts if part.kind == "padding")
        words = [
            f"Forward {forward}, at {shot.start_s:.4g}: <b>{tokens} token{'s' * (tokens != 1)}</b>"
        ]
        for kind in ("decode", "prefill"):
            who = [(p.number, p.sample) for p in shot.parts if p.kind == kind]
            count = sum(p.count for p in shot.parts if p.kind == kind)
            if who:
                names = ", ".join(marked(name(one)) for one in who[:8]) + "…" * (len(who) > 8)
                words.append(f"{count} of {kind} ({names})")
        found = {(p.number, p.sample): p.found for p in shot.running}
        for part in shot.parts:
            who = (part.number, part.sample)
            if part.kind == "prefill" and part.start and part.start == found.get(who):
                words.append(f"{marked(name(who))}'s first {part.start} were in the prefix cache")
        if padded:
            words.append(f"<b>{padded} computed for nothing</b>")
        said = "; ".join(words) + "."
        ends = [marked(name((e.number, e.sample))) for e in shot.events if e.completion]
        if ends:
            said += f" Over: <b>{', '.join(ends)}</b>."
        refused = [e for e in shot.events if e.completion and e.completion.admitted_s is None]
        for event in refused:
            said += f"<br>{marked(str(event.completion.error), 200)}"
        if shot.preempted:
            said += f" <b>{shot.preempted} put back</b>: no page was free, all is computed again."
        copies = shot.pool.copies if shot.pool else ()
        if copies:
            pairs = ", ".join(f"{source} → {target}" for source, target in copies[:6])
            said += f" Copied before it was written: page {pairs}."
        if self.over and forward == len(self.history) - 1:
            said += " All is answered."
        return said


def engine_stepper(
    engine: Any, requests: Any, tokenizer: Any = None, *, at: int = 0
) -> EngineStepper:
    """Step an engine through requests; a forward is computed when it is first asked for.

    engine:    an Engine, or any Loop: `simulator(...)`, `static_server(...)`. It is stepped for
               good, so make one for this. At most 16 slots.
    requests:  Requests, lists of tokens, or strings if there is a tokenizer. Where some arrive
               later, the engine needs clock=VirtualClock().
    tokenizer: has decode([token]) and encode(text); without one tokens are shown as numbers.
    at:        how many forwards to do at once.

    Raises: TypeError or ValueError naming what came.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer is {tokenizer!r}: pass one with decode([token]), or none")
    if type(at) is not int or at < 0:
        raise ValueError(f"at is {at!r}: expected a number of forwards, 0 or more")
    recorded = recorder(engine, requests, tokenizer)
    slots = recorded.loop.scheduler.policy.slots
    if slots > MOST_SLOTS:
        raise ValueError(
            f"the engine has {slots} slots and the picture room for {MOST_SLOTS}: pass "
            f"Policy(slots={MOST_SLOTS}) or fewer to a smaller engine"
        )
    return EngineStepper(recorded, tokenizer, at)
