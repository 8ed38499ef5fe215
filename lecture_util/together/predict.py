"""What a configuration will take, before it is run: the scheduler on paper, forwards by formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from statistics import median

from lecture_util.model.config import Config
from lecture_util.roofline.accounting import kv_bytes_per_token, params_by_part
from lecture_util.serving.blocks import Blocks
from lecture_util.serving.paging import Pages
from lecture_util.serving.scheduler import Scheduler
from lecture_util.serving.simulate import simulator
from lecture_util.serving.slots import Slots
from lecture_util.serving.static_batching import StaticScheduler

from .configuration import HEADS, Configuration
from .costs import Costs, StepTime
from .run import PAGE, Piece, policy, text_bytes
from .variants import BYTES, predicted_bytes
from .workload import Workload

DRAFT_WORDS = 8192  # that the heads which come with the course can say
EAGLE_LEVELS = 3  # that `eagle_drafter` grows unless told


@dataclass(frozen=True)
class Prediction:
    """As `run.Outcome` measures it, but for the `copy_bytes` that a machine's operators may add.

    Units: seconds, bytes, tokens a second.
    """

    tokens_per_s: float
    ttft_s: float
    weight_bytes: int
    cache_bytes: int

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


def predict(
    config: Config, configuration: Configuration, workload: Workload, costs: Costs
) -> Prediction:
    """Answer the workload on paper.

    config: of the model that is run, a student's if it is one.
    costs:  of that model in these weights; those of the whole model are a student's once they are
            `scaled`, by `table.bytes_ratio`.
    Raises: ValueError for a draft that `costs` knows nothing of, costs of other weights, forwards
            that take no finite time, requests beyond the context; TypeError for what is no Config,
            Configuration, Workload or Costs.
    """
    for name, value, kind in (
        ("config", config, Config),
        ("configuration", configuration, Configuration),
        ("workload", workload, Workload),
        ("costs", costs, Costs),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name}={value!r}: expected a {kind.__name__}")
    c = configuration
    if costs.weights not in (None, c.weights):
        raise ValueError(
            f"these are costs of {costs.weights} weights but the configuration has {c.weights}: "
            f"calibrate(..., {c.weights!r}, ...) or from_peaks(..., {c.weights!r}, ...)"
        )
    if workload.longest > config.max_context:
        raise ValueError(
            f"a request has {workload.longest} tokens with its answer, but the model's context is "
            f"{config.max_context}: shorten it"
        )
    costs = replace(costs, rows=_finite(costs.rows), flat=_finite(costs.flat))
    if c.draft is not None:
        if c.draft not in costs.tokens_per_round or c.draft not in costs.drafted:
            raise ValueError(
                f"no tokens a round are known for {c.draft!r}: a formula can't say what a draft "
                "guesses right; calibrate(..., drafts=[...]) or give Costs(tokens_per_round=..., "
                "drafted=...)"
            )
        if not costs.tokens_per_round[c.draft] >= 1:
            raise ValueError(
                f"tokens_per_round of {c.draft!r} is {costs.tokens_per_round[c.draft]!r}: every "
                "round gains one token at least"
            )
    ends = _single(c, workload, costs) if c.schedule == "single" else None
    width = BYTES[c.weights][1]
    if ends is None:
        arrivals, firsts, lasts, lent = _batched(config, c, workload, costs)
        cache_bytes = kv_bytes_per_token(config, width) * lent
    else:
        arrivals, firsts, lasts = ends
        cache_bytes = text_bytes(config, c, workload.longest, width)
    seconds = max(lasts) - min(arrivals)
    if not seconds:
        raise ValueError("all forwards take no time at all: costs must say how long one takes")
    return Prediction(
        tokens_per_s=sum(workload.new_tokens) / seconds,
        ttft_s=median(first - came for first, came in zip(firsts, arrivals, strict=True)),
        weight_bytes=predicted_bytes(config, c.weights) + head_bytes(config, c),
        cache_bytes=cache_bytes,
    )


def head_bytes(config: Config, c: Configuration) -> int:
    """Of what drafts: three square layers (Medusa) or a joining layer and a block (EAGLE), the
    rows of the output head that it can say, and tables of which those are."""
    if c.draft not in HEADS:
        return 0
    D, parts = config.D, params_by_part(config)
    block = (parts["attention"] + parts["mlp"]) // config.L + 2 * D
    head = 3 * (D * D + D) if c.draft == "medusa" else 2 * D * D + D + block
    return BYTES[c.weights][1] * (head + DRAFT_WORDS * D) + 8 * (DRAFT_WORDS + config.V)


def guess_bytes(config: Config, c: Configuration) -> float:
    """What drafting one guess reads: Medusa's heads guess all at once, EAGLE's by levels."""
    passes = {"medusa": 1, "eagle": EAGLE_LEVELS}.get(c.draft, 0)
    return passes * head_bytes(config, c) / c.guesses


def _finite(step: StepTime) -> StepTime:
    def checked(pieces: Sequence[Piece]) -> float:
        seconds = step(pieces)
        if not isinstance(seconds, Real) or not 0 <= seconds < math.inf:
            raise ValueError(f"a forward takes {seconds!r}: expected finite seconds from 0 up")
        return seconds

    return checked


def _single(c, workload, costs) -> tuple[list[float], list[float], list[float]]:
    now, arrivals, firsts, lasts = 0.0, [], [], []
    for prompt, count, came in zip(
        workload.prompts, workload.new_tokens, workload.arrivals_s, strict=True
    ):
        came = now if workload.closed else came
        now = max(now, came)
        times = _forwards(len(prompt), count, c, costs)
        arrivals.append(came)
        firsts.append(now + times[0])
        now += sum(times)
        lasts.append(now)
    return arrivals, firsts, lasts


def _forwards(P: int, count: int, c: Configuration, costs: Costs) -> list[float]:
    """Seconds of each forward for one request; the last may be a share of one."""
    if not c.cache:
        return [costs.rows([Piece(0, P + i)]) for i in range(count)]
    if c.draft is None:
        return [costs.rows([Piece(P + i - 1, 1) if i else Piece(0, P)]) for i in range(count)]
    gain, guesses = costs.tokens_per_round[c.draft], costs.drafted[c.draft]
    drafting_s = guesses * costs.guess_s.get(c.draft, 0.0)
    times, done = [], 0.0
    while done < count:
        start, new = (P + round(done) - 1, 1) if done else (0, P)
        share = min(1.0, (count - done) / gain) if done else 1.0
        piece = Piece(start, new + round(guesses), drafted=round(guesses))
        times.append(share * (costs.rows([piece]) + drafting_s))
        done += gain
    return times


def _batched(config, c, workload, costs) -> tuple[list[float], list[float], list[float], int]:
    longest = max(map(len, workload.prompts)) + max(workload.new_tokens)
    how = policy(config, c, workload)
    if c.pages:
        blocks = Blocks(how.slots * -(-longest // PAGE), PAGE, prefix_caching=c.prefix)
        memory = Pages(blocks)
    else:
        memory = Slots(how.slots, longest)
    static = c.schedule == "static"
    scheduler, step = (StaticScheduler, costs.rows) if static else (Scheduler, costs.flat)
    loop = simulator(memory, how, step, scheduler)
    if workload.closed:
        done = [x for request in workload.requests() for x in loop.serve([request])]
    else:
        done = loop.serve(workload.requests())
    lent = max(i.lent for i in loop.iterations)
    return (
        [x.arrival_s for x in done],
        [x.token_times_s[0] for x in done],
        [x.finished_s for x in done],
        lent,
    )
