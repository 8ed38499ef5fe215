"""How long forwards take: by the data sheet, or by a few that were measured here.

`from_peaks` is the roofline of notebooks 02 and 03: FLOPs, bytes, two peaks, nothing measured of
the model. `calibrate` times a handful of forwards and tries each draft on questions of its own;
what a configuration does with them is predicted from these parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from lecture_util.model.config import Config
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.accounting import forward_flops, kv_bytes_per_token
from lecture_util.roofline.hardware import Accelerator
from lecture_util.roofline.timing import measure
from lecture_util.serving.clock import WallClock
from lecture_util.serving.simulate import FittedStep

from .configuration import Configuration
from .run import Piece, new_server, serve
from .variants import BYTES, Variants, predicted_bytes
from .workload import Workload

StepTime = Callable[[Sequence[Piece]], float]
# (sequences, new tokens, context held before) of the forwards that `calibrate` times
SHAPES = (
    (1, 1, 64), (1, 1, 320), (1, 4, 300), (1, 8, 300), (1, 64, 0), (1, 160, 0), (1, 320, 0),
    (4, 1, 300), (8, 1, 320), (12, 1, 320), (4, 300, 0),
)  # fmt: skip
COMPUTES_IN = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "bf16"}


@dataclass(frozen=True)
class Costs:
    """What a prediction is made of.

    rows, flat        seconds of a forward: over rows of a cache, and over the engine's flat run
    guess_s           seconds to draft one guess, by draft
    tokens_per_round  what a round of drafting and verifying gains, by draft
    drafted           guesses that a round has the model read, by draft
    weights           what numbers they are costs of; None where nobody should check

    What is known of a draft is known for the number of guesses that it was tried with.
    """

    rows: StepTime
    flat: StepTime
    guess_s: Mapping[str, float] = field(default_factory=dict)
    tokens_per_round: Mapping[str, float] = field(default_factory=dict)
    drafted: Mapping[str, float] = field(default_factory=dict)
    weights: str | None = None

    def scaled(self, factor: float) -> Costs:
        """The same with every forward `factor` times as long: for a model of fewer bytes."""
        return replace(self, rows=Scaled(self.rows, factor), flat=Scaled(self.flat, factor))


@dataclass(frozen=True)
class Scaled:
    step: StepTime
    factor: float

    def __call__(self, pieces: Sequence[Piece]) -> float:
        return self.factor * self.step(pieces)


@dataclass(frozen=True)
class PeakStep:
    """Seconds of a forward by two peaks: the longer of computing and reading, if nothing is lost.

    guess_bytes: what drafting one guess reads, beside the model.

    Where a machine has no peak for a dtype, its 16-bit peak stands in, doubled for int8: no product
    is faster, so that the time stays a limit.
    """

    config: Config
    weights: str
    accelerator: Accelerator
    overhead_s: float = 0.0
    guess_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("config", self.config, Config),
            ("accelerator", self.accelerator, Accelerator),
        ):
            if not isinstance(value, kind):
                such = "model.config" if kind is Config else "ACCELERATORS['h100']"
                raise TypeError(f"{name}={value!r}: expected a {kind.__name__}, such as {such}")
        if self.weights not in COMPUTES_IN:
            raise ValueError(f"weights={self.weights!r}: expected one of {', '.join(COMPUTES_IN)}")
        for name in ("overhead_s", "guess_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number from 0 up")

    def flops(self, pieces: Sequence[Piece]) -> float:
        return sum(
            forward_flops(
                self.config, 1, p.count + p.padded, p.start + p.count + p.padded,
                causal=True, logits_for=1,
            )
            for p in pieces
        )  # fmt: skip

    def bytes(self, pieces: Sequence[Piece]) -> float:
        """Weights once for all, every text's own cache, and the drafts'."""
        weights = predicted_bytes(self.config, self.weights)
        width, news = BYTES[self.weights][1], [p.count + p.padded for p in pieces]
        if not self.config.tied:  # of the embedding only the tokens' rows
            weights -= max(0, self.config.V - sum(news)) * self.config.D * width
        cache = sum(p.start + 2 * new for p, new in zip(pieces, news, strict=True))
        cache_bytes = cache * kv_bytes_per_token(self.config, width)
        guesses = sum(getattr(p, "drafted", 0) for p in pieces)
        return weights + cache_bytes + guesses * self.guess_bytes

    def __call__(self, pieces: Sequence[Piece]) -> float:
        memory_s = self.bytes(pieces) / self.accelerator.bandwidth_bytes_per_s
        return self.overhead_s + max(self.flops(pieces) / self.peak, memory_s)

    @property
    def peak(self) -> float:
        """FLOPs a second in what these weights are computed in."""
        machine, dtype = self.accelerator, COMPUTES_IN[self.weights]
        if dtype in machine.flops_per_s:
            return machine.peak(dtype)
        return machine.peak(machine.sixteen_bits) * (2 if dtype == "int8" else 1)


def from_peaks(
    config: Config, weights: str, accelerator: Accelerator, overhead_s: float = 0.0
) -> Costs:
    """Costs of a machine that need not be here. Says nothing about what drafts guess right."""
    step = PeakStep(config, weights, accelerator, overhead_s)
    return Costs(step, step, weights=weights)


class Watch(WallClock):
    """Seconds as they pass, and a list of the forwards that passed in them."""

    def __init__(self, seen: list[Piece]) -> None:
        self.seen = seen

    def computed(self, work: Sequence[Piece]) -> None:
        self.seen += work


@dataclass(frozen=True)
class Timed:
    """A forward that was measured, as `FittedStep.fit` reads it."""

    parts: tuple[Piece, ...]
    seconds: float


def time_forwards(model: Transformer, shapes=SHAPES, repeats: int = 3) -> list[Timed]:
    """Forwards over rows of an ordinary cache. What the cache holds is zeros: time doesn't care."""
    timed = []
    for B, T, S in shapes:
        cache = KVCache(model.config, B, S + T, model.dtype, model.device)
        tokens_BT = torch.ones(B, T, dtype=torch.long, device=model.device)
        last_B = torch.full((B,), T - 1, device=model.device)
        rows_B = torch.arange(B, device=model.device)

        @torch.inference_mode()
        def forward(cache=cache, tokens_BT=tokens_BT, rows_B=rows_B, last_B=last_B, S=S):
            cache.lengths[:] = [S] * len(rows_B)
            x_BTD = model.features(tokens_BT, cache)
            return model.head(x_BTD[rows_B, last_B])

        spent = measure(forward, repeats=repeats, warmup=1, device=model.device)
        timed.append(Timed((Piece(S, T),) * B, spent.median_s))
    return timed


def calibrate(
    variants: Variants, weights: str, questions: Workload, drafts: Sequence[str] = ()
) -> Costs:
    """Measure the parts on the whole model with these weights, and each draft on `questions`.

    questions: not those that will be predicted; one answer has five tokens at least, so that there
               are forwards enough to fit.
    Cost:      some seconds on two CPU cores.
    """
    if not isinstance(variants, Variants) or not isinstance(questions, Workload):
        raise TypeError(
            f"variants={variants!r}, questions={questions!r}: expected Variants(load()) and "
            "assistant(tokenizer, 4, SERVED), say"
        )
    if max(questions.new_tokens) < 5:
        raise ValueError(
            f"the longest answer has {max(questions.new_tokens)} tokens: a fit needs five forwards"
        )
    model = variants.get(weights)
    rows = FittedStep.fit(time_forwards(model))
    batched = Configuration(weights, schedule="continuous", slots=len(questions), pages=True)
    loop = new_server(model, batched, questions)
    loop.serve(questions.requests())
    flat = FittedStep.fit(loop.iterations)
    guess_s, tokens_per_round, drafted = {}, {}, {}
    for draft in drafts:
        configuration = Configuration(weights, draft=draft)
        serve(model, configuration, questions.first(1))  # loads the heads, warms the caches
        seen: list[Piece] = []
        outcome = serve(model, configuration, questions, Watch(seen))
        plain_s = sum(rows([piece]) for piece in seen)
        guesses = max(1, sum(piece.drafted for piece in seen))
        guess_s[draft] = max(0.0, outcome.seconds - plain_s) / guesses
        tokens_per_round[draft] = outcome.tally.tokens_per_round
        drafted[draft] = outcome.tally.drafted / outcome.tally.rounds
    return Costs(rows, flat, guess_s, tokens_per_round, drafted, weights)
