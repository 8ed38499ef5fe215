"""The same scheduler without a model: a formula says how long each forward takes.

So policies can be tried on a machine that isn't here, in milliseconds, and the formula can be held
against the real run of a model that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lecture_util.model.config import Config
from lecture_util.roofline.accounting import (
    Cost,
    forward_flops,
    kv_bytes_per_token,
    weight_bytes_read,
)
from lecture_util.roofline.hardware import DTYPE_BYTES, Accelerator

from .clock import VirtualClock
from .executor import Drawn
from .loop import Loop
from .records import Iteration
from .scheduler import Memory, Policy, Scheduler, Work


class Piece(Protocol):
    """What a forward computes for one sequence; `Work` and `loop.Part` both say it."""

    start: int
    count: int
    padded: int


@dataclass(frozen=True)
class RooflineStep:
    """Seconds of one forward over many sequences: the slower of computing and reading.

    Weights are read once for all; each sequence's own cache is read, and its scores are computed.

    overhead_s: what every forward takes besides, such as launching its kernels.
    """

    config: Config
    accelerator: Accelerator
    dtype: str = "bf16"
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            raise TypeError(f"config={self.config!r}: expected a Config, such as model.config")
        if not isinstance(self.accelerator, Accelerator):
            raise TypeError(
                f"accelerator={self.accelerator!r}: expected ACCELERATORS['h100'] or the like"
            )
        self.accelerator.peak(self.dtype)  # raises for a dtype it has no peak for
        if not isinstance(self.overhead_s, int | float):
            raise TypeError(f"overhead_s={self.overhead_s!r}: expected seconds")
        if not 0 <= self.overhead_s < math.inf:
            raise ValueError(f"overhead_s={self.overhead_s!r}: expected seconds from 0 up")

    def cost(self, pieces: Sequence[Piece]) -> Cost:
        width = DTYPE_BYTES[self.dtype]
        token_bytes = kv_bytes_per_token(self.config, width)
        flops = held = new = 0
        for piece in pieces:
            T = piece.count + piece.padded
            S = piece.start + T
            flops += forward_flops(self.config, 1, T, S, causal=True, logits_for=1)
            held, new = held + S, new + T
        return Cost(
            flops=flops,
            bytes_read=weight_bytes_read(self.config, new, width) + held * token_bytes,
            bytes_written=new * token_bytes,
        )

    def __call__(self, pieces: Sequence[Piece]) -> float:
        return self.overhead_s + self.cost(pieces).time_s(self.accelerator, self.dtype)


@dataclass(frozen=True)
class FittedStep:
    """Seconds of one forward as a sum of a few terms, fitted to forwards that were measured."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != 5 or not all(map(math.isfinite, self.weights)):
            raise ValueError(f"weights={self.weights!r}: expected five finite numbers")

    @staticmethod
    def terms(pieces: Sequence[Piece]) -> list[float]:
        """One forward; its tokens; those of them beyond 16; the tokens attended to; the scores."""
        news = [p.count + p.padded for p in pieces]
        ends = [p.start + T for p, T in zip(pieces, news, strict=True)]
        tokens = sum(news)
        scores = sum(T * S for T, S in zip(news, ends, strict=True) if T > 1)
        return [1.0, tokens, max(0, tokens - 16), sum(ends), scores]

    @classmethod
    def fit(cls, iterations: Iterable[Iteration]) -> FittedStep:
        """Least squares of the relative error, so that short forwards count as much as long ones.

        Raises: ValueError with fewer forwards than terms.
        """
        measured = [i for i in iterations if i.seconds > 0]
        rows = np.array([cls.terms(i.parts) for i in measured], dtype=float)
        if len(rows) < 5:
            raise ValueError(f"{len(rows)} measured forwards: five terms need at least five")
        seconds = np.array([i.seconds for i in measured])
        solved = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(rows)), rcond=None)[0]
        return cls(tuple(float(w) for w in solved))

    def __call__(self, pieces: Sequence[Piece]) -> float:
        return max(0.0, float(np.dot(self.weights, self.terms(pieces))))


class Pretend:
    """An executor that computes nothing: every token is a number that means nothing."""

    def run(self, work: Sequence[Work]) -> list[list[Drawn]]:
        return [
            [-1 - one.id for one in (w.sequence, *w.sequence.followers)] if w.draws else []
            for w in work
        ]


def simulator(
    memory: Memory,
    policy: Policy,
    step_time=lambda pieces: 1.0,
    scheduler: type[Scheduler] = Scheduler,
) -> Loop:
    """A loop that serves on paper. `.serve(trace)` it, then read `.iterations`, `stats(...)`.

    step_time: a RooflineStep, a FittedStep or any function of the pieces; by default forwards are
    counted.   scheduler: StaticScheduler for static batching.
    """
    return Loop(scheduler(memory, policy), Pretend(), VirtualClock(step_time))
