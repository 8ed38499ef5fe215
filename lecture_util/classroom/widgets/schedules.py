"""One made-up trace served twice on paper, static and continuous, and both runs summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lecture_util.serving.loop import Iteration
from lecture_util.serving.request import Completion, Request
from lecture_util.serving.scheduler import Policy, Scheduler
from lecture_util.serving.simulate import simulator
from lecture_util.serving.slots import Slots
from lecture_util.serving.static_batching import StaticScheduler
from lecture_util.serving.trace import Lengths, make_trace

MOST_NEW = 96  # tokens of an answer
BUDGET = 256  # tokens of a forward, more than all prompts of a full batch


@dataclass(frozen=True)
class Summary:
    """A run of forwards that take 1 each.

    forwards        until the last answer was done
    work            share of slots at work, of all slots from the first arrival to the last end
    padding         rows computed for nothing, of all rows computed
    tokens          new tokens a forward
    mean_s, worst_s wait from arrival to the first token, in forwards
    end_s           when the last answer was done
    """

    forwards: int
    work: float
    padding: float
    tokens: float
    mean_s: float
    worst_s: float
    end_s: float


@dataclass(frozen=True)
class Run:
    completions: list[Completion]
    iterations: list[Iteration]
    summary: Summary


def trace_of(
    requests: int, rate: float | None, spread: float, mean_new: float, prompt: int, seed: int
) -> list[Request]:
    """The same requests whatever the sliders say; only when they come, and how long they grow.

    The mean of a log-normal length is median * exp(spread^2 / 2), so the median gives way where the
    spread grows: about as many tokens are asked for, but for rounding and the longest allowed.
    """
    median = mean_new * math.exp(-(spread**2) / 2)
    return make_trace(
        requests,
        rate_per_s=rate,
        prompt_tokens=Lengths(prompt, 0.5, most=4 * prompt),
        new_tokens=Lengths(median, spread, most=MOST_NEW),
        seed=seed,
    )


def serve(trace: Sequence[Request], slots: int, scheduler: type[Scheduler]) -> Run:
    """The trace through `slots` slots; each forward takes 1, whoever takes part."""
    longest = max(len(request.prompt) for request in trace) + MOST_NEW
    policy = Policy(slots=slots, token_budget=BUDGET)
    loop = simulator(Slots(slots, longest), policy, scheduler=scheduler)
    completions = loop.serve(trace)
    return Run(completions, loop.iterations, _summary(completions, loop.iterations, slots))


def both(trace: Sequence[Request], slots: int) -> dict[str, Run]:
    kinds = {"static": StaticScheduler, "continuous": Scheduler}
    return {name: serve(trace, slots, kind) for name, kind in kinds.items()}


def _summary(
    completions: Sequence[Completion], iterations: Sequence[Iteration], slots: int
) -> Summary:
    rows = sum(len(i.parts) for i in iterations)
    padding = sum(part.kind == "padding" for i in iterations for part in i.parts)
    start_s = min(c.arrival_s for c in completions)
    end_s = max(c.finished_s for c in completions)
    waits = [c.ttft_s for c in completions]
    return Summary(
        forwards=len(iterations),
        work=(rows - padding) / (slots * (end_s - start_s)),
        padding=padding / rows,
        tokens=sum(len(c.tokens) for c in completions) / len(iterations),
        mean_s=sum(waits) / len(waits),
        worst_s=max(waits),
        end_s=end_s,
    )
