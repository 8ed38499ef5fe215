"""What users and owners of a server look at: latency by percentile, throughput, use of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .records import Iteration
from .request import Completion


@dataclass(frozen=True)
class Percentiles:
    """p50, p90 and p99 of `count` values; None where there are none."""

    p50: float | None
    p90: float | None
    p99: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles:
        known = [value for value in values if value is not None]
        if not known:
            return cls(None, None, None, 0)
        return cls(*(float(x) for x in np.percentile(known, (50, 90, 99))), len(known))


@dataclass(frozen=True)
class Stats:
    """A run in numbers.

    tokens_per_s        new tokens of all requests over the time from first arrival to last end
    ttft, tpot, queue   seconds: to the first token, for each one after it, before admission
    slot_use            share of the slots at work, over the time computing
    padding             rows that were computed for nothing, of all rows computed
    memory_use, waste   tokens stored of the room that was lent, over time; and the rest
    found_share         tokens that the prefix cache saved us from computing, for each token of a
                        prompt; those of texts that were put back count too
    """

    requests: int
    new_tokens: int
    seconds: float
    tokens_per_s: float
    ttft: Percentiles
    tpot: Percentiles
    queue: Percentiles
    latency: Percentiles
    iterations: int
    slot_use: float
    padding: float
    memory_use: float
    preemptions: int
    found_share: float
    most_running: int

    @property
    def waste(self) -> float:
        return 1 - self.memory_use if self.memory_use else 0.0  # nothing lent, nothing wasted


def stats(
    completions: Sequence[Completion], iterations: Sequence[Iteration], slots: int | None = None
) -> Stats:
    """Sum up a run. slots: those there were; by default the most that were ever in use."""
    started = min((c.arrival_s for c in completions), default=0.0)
    seconds = max((c.finished_s for c in completions), default=0.0) - started
    new_tokens = sum(c.num_tokens for c in completions)
    busy_s = sum(i.seconds for i in iterations)
    rows = [len(i.parts) for i in iterations]
    padded = [sum(part.kind == "padding" for part in i.parts) for i in iterations]
    slots = max(rows, default=0) if slots is None else slots
    used = sum((r - p) * i.seconds for r, p, i in zip(rows, padded, iterations, strict=True))
    lent = sum(i.lent * i.seconds for i in iterations)
    stored = sum(i.stored * i.seconds for i in iterations)
    prompts = sum(len(c.prompt) for c in completions)
    return Stats(
        requests=len({c.number for c in completions}),
        new_tokens=new_tokens,
        seconds=seconds,
        tokens_per_s=new_tokens / seconds if seconds else 0.0,
        ttft=Percentiles.of(c.ttft_s for c in completions),
        tpot=Percentiles.of(c.tpot_s for c in completions),
        queue=Percentiles.of(c.queue_s for c in completions),
        latency=Percentiles.of(c.latency_s for c in completions if c.reason != "failed"),
        iterations=len(iterations),
        slot_use=used / (slots * busy_s) if slots and busy_s else 0.0,
        padding=sum(padded) / sum(rows) if sum(rows) else 0.0,
        memory_use=stored / lent if lent else 0.0,
        preemptions=sum(i.preempted for i in iterations),
        found_share=sum(c.found for c in completions) / prompts if prompts else 0.0,
        most_running=max((i.running for i in iterations), default=0),
    )
