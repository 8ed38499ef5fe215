"""The simulator: formulas against the course's accounting, schedules against the real engine's."""

import dataclasses
import math

import numpy as np
import pytest
from serving_models import TINY, tiny_engine, tiny_model

from lecture_util.model.config import Config
from lecture_util.roofline.accounting import forward, kv_bytes_per_token, weight_bytes
from lecture_util.roofline.hardware import ACCELERATORS, Accelerator
from lecture_util.serving.blocks import Blocks
from lecture_util.serving.loop import Iteration, Part, TooLong
from lecture_util.serving.metrics import stats
from lecture_util.serving.paging import Pages
from lecture_util.serving.request import EndsAfter, Params, Request
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.simulate import FittedStep, RooflineStep, simulator
from lecture_util.serving.slots import Slots
from lecture_util.serving.static_batching import StaticScheduler
from lecture_util.serving.trace import Lengths, make_trace

LARGE = Config(D=4096, F=14336, K=8, G=4, H=128, L=32, V=128256)
H100 = ACCELERATORS["h100"]
STEP = RooflineStep(LARGE, H100)


def part(start, count, padded=0):
    return Part(0, 0, 0, start, count, "prefill", padded)


@pytest.mark.parametrize("config", [LARGE, dataclasses.replace(LARGE, tied=True)])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 700), (300, 1), (300, 64)])
def test_one_sequence_costs_what_the_accounting_says(config, start, count):
    step = RooflineStep(config, H100)
    S = start + count
    want = forward(config, 1, count, S, causal=True, logits_for=1)
    assert step.cost([part(start, count)]) == want
    assert step([part(start, count)]) == want.time_s(H100)


def test_alike_sequences_cost_what_a_batch_does():
    want = forward(LARGE, 16, 1, 501, causal=True, logits_for=1)
    assert STEP.cost([part(500, 1)] * 16) == want


def test_costs_add_but_the_weights_are_read_once():
    pieces = [part(0, 128), part(77, 1), part(512, 30), part(9, 1)]
    apart = [STEP.cost([p]) for p in pieces]
    together = STEP.cost(pieces)
    assert together.flops == sum(c.flops for c in apart)
    assert together.bytes_written == sum(c.bytes_written for c in apart)
    rows = LARGE.D * 2  # of the embedding, for each token
    weights = weight_bytes(LARGE) - LARGE.V * rows
    assert together.bytes_read == sum(c.bytes_read - weights for c in apart) + weights
    assert STEP.cost(pieces[::-1]) == together


def test_padding_is_computed_and_read_like_anything_else():
    assert STEP.cost([part(0, 5, padded=3)]) == STEP.cost([part(0, 8)])


def test_a_decode_step_is_bound_by_memory_and_a_long_prefill_by_compute():
    decode, prefill = [part(1000, 1)] * 8, [part(0, 4000)]
    read = STEP.cost(decode).bytes
    assert STEP(decode) == read / H100.bandwidth_bytes_per_s
    assert read > weight_bytes(LARGE) - LARGE.V * LARGE.D * 2 + 8 * 1001 * kv_bytes_per_token(LARGE)
    assert STEP(prefill) == STEP.cost(prefill).flops / H100.peak("bf16")


def test_overhead_is_added_to_every_forward():
    late = RooflineStep(LARGE, H100, overhead_s=0.01)
    assert late([part(4, 1)]) == STEP([part(4, 1)]) + 0.01


def test_half_the_bytes_in_eight_bits():
    eight = Accelerator("eight", {"fp8": 1e15}, 1e12, 1e11, "made up")
    step = RooflineStep(LARGE, eight, "fp8")
    assert step.cost([part(9, 1)]).bytes * 2 == STEP.cost([part(9, 1)]).bytes


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (dict(accelerator="h100"), TypeError, "ACCELERATORS"),
        (dict(dtype="int4"), ValueError, "int4"),
        (dict(dtype=None), ValueError, "None"),
        (dict(overhead_s=-1), ValueError, "overhead_s"),
        (dict(overhead_s=math.nan), ValueError, "overhead_s"),
        (dict(overhead_s=math.inf), ValueError, "overhead_s"),
        (dict(overhead_s="1"), TypeError, "overhead_s"),
        (dict(config=5), TypeError, "Config"),
    ],
    ids=str,
)
def test_a_step_that_cannot_be_is_refused(bad, error, says):
    with pytest.raises(error, match=says):
        RooflineStep(**{"config": LARGE, "accelerator": H100, **bad})


def measured(seconds_of, seed=0, count=80):
    rng = np.random.default_rng(seed)
    iterations = []
    for _ in range(count):
        parts = [part(int(rng.integers(1, 900)), 1) for _ in range(rng.integers(0, 16))]
        parts += [
            part(int(rng.integers(0, 300)), int(rng.integers(2, 200)), int(rng.integers(0, 20)))
            for _ in range(rng.integers(0 if parts else 1, 3))
        ]
        iterations.append(Iteration(0.0, seconds_of(parts), tuple(parts), 0, 1, 1, 1, 0))
    return iterations


def by_hand(parts, weights):
    """The five terms, written out."""
    one, token, beyond, attended, score = weights
    seconds, tokens = one, 0
    for p in parts:
        T = p.count + p.padded
        S = p.start + T
        tokens += T
        seconds += attended * S + (score * T * S if T > 1 else 0)
    return seconds + token * tokens + beyond * max(0, tokens - 16)


def test_a_fit_recovers_the_coefficients_it_was_measured_with():
    weights = (0.02, 1.5e-3, -4e-4, 3e-6, 2e-8)
    iterations = measured(lambda parts: by_hand(parts, weights))
    fitted = FittedStep.fit(iterations)
    assert fitted.weights == pytest.approx(weights, rel=1e-6)
    for i in iterations[:10]:
        assert fitted(i.parts) == pytest.approx(i.seconds, rel=1e-9)


def test_a_fit_weighs_relative_errors():
    """At the least sum of (fitted/measured - 1)², its slope along each of the weights is 0."""
    rng = np.random.default_rng(1)
    weights = (0.02, 1.5e-3, -4e-4, 3e-6, 2e-8)
    noisy = measured(lambda parts: by_hand(parts, weights) * rng.uniform(0.8, 1.2), count=400)
    fitted = FittedStep.fit(noisy)
    errors = np.array([by_hand(i.parts, fitted.weights) / i.seconds - 1 for i in noisy])
    for unit in np.eye(5):
        term = np.array([by_hand(i.parts, unit) / i.seconds for i in noisy])
        assert abs(errors @ term) < 1e-8 * np.abs(errors) @ np.abs(term)
    assert np.abs(errors).mean() > 0.05


def test_a_fit_needs_forwards_and_never_runs_backwards():
    with pytest.raises(ValueError, match="at least five"):
        FittedStep.fit(measured(lambda parts: 1.0, count=4))
    with pytest.raises(ValueError, match="0 measured"):
        FittedStep.fit(measured(lambda parts: 0.0, count=40))
    assert FittedStep((-1.0, 0, 0, 0, 0))([part(0, 1)]) == 0.0


def traffic(seed):
    """Shared beginnings, several samples, hidden ends; no two prompts are the same."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, TINY.V, 13).tolist()
    trace = []
    for i in range(40):
        own = rng.integers(0, TINY.V, rng.integers(1, 18)).tolist()
        prompt = [*shared[: rng.choice([0, 8, 13])], i % TINY.V, i // TINY.V, *own]
        stop = EndsAfter(int(rng.integers(1, 16)))
        params = Params(16, stop=stop, samples=int(rng.choice([1, 1, 1, 2])), seed=i)
        trace.append(Request(prompt, params, float(rng.integers(0, 60)), "abc"[i % 3]))
    return trace


@pytest.mark.parametrize(
    "policy",
    [
        Policy(slots=5, token_budget=11),
        Policy(slots=6, token_budget=30, chunked=False, order="shortest", patience=8),
        Policy(slots=4, token_budget=16, order="fair", waiting_served_ratio=1.0),
    ],
    ids=["chunked", "whole, shortest", "fair, in bursts"],
)
def test_on_paper_the_schedule_is_that_of_the_real_engine(policy):
    """Part by part: the scheduler is one and the same, and never sees a token's meaning.

    The samples of a request are greedy, so on paper their pages would differ where in truth they
    are equal: without a prefix cache for them there is nothing to find.
    """
    for caching, most in ((False, 2), (True, 1)):
        trace = [r for r in traffic(2) if r.params.samples <= most]
        engine = tiny_engine(tiny_model(), pages=17, policy=policy, prefix_caching=caching)
        real = engine.serve(trace)
        paper = simulator(Pages(Blocks(17, 4, prefix_caching=caching)), policy)
        told = paper.serve(trace)
        assert paper.iterations == engine.loop.iterations
        assert engine.stats.preemptions > 0
        assert (engine.stats.found_share > 0) == caching
        for mine, other in zip(told, real, strict=True):
            same = dataclasses.replace(mine, tokens=other.tokens)
            assert same == other


def test_rows_on_paper_too():
    policy = Policy(slots=5, token_budget=11)
    engine = tiny_engine(tiny_model(), rows=5, policy=policy)
    engine.serve(traffic(3))
    paper = simulator(Slots(5, TINY.max_context), policy)
    paper.serve(traffic(3))
    assert paper.iterations == engine.loop.iterations


def test_the_clock_of_the_simulator_is_the_sum_of_its_steps():
    loop = simulator(Pages(Blocks(2000, 16)), Policy(slots=8, token_budget=512), STEP)
    trace = make_trace(60, rate_per_s=40.0, prompt_tokens=Lengths(200, 1.0), seed=1)
    completions = loop.serve(trace)
    assert [len(c.tokens) for c in completions] == [r.params.stop.count for r in trace]
    for i in loop.iterations:
        assert i.seconds == pytest.approx(STEP(i.parts), rel=1e-9)
    summed = stats(completions, loop.iterations)
    assert summed.seconds == pytest.approx(
        max(c.finished_s for c in completions) - trace[0].arrival_s
    )
    assert summed.queue.p50 >= 0 and summed.ttft.p50 > STEP([part(0, 1)])


def test_more_slots_serve_more_on_a_machine_bound_by_memory():
    """The roofline's promise: weights are read once for all who run."""
    trace = make_trace(64, rate_per_s=None, prompt_tokens=Lengths(64, 0), new_tokens=Lengths(32, 0))
    rates = []
    for slots in (1, 4, 16):
        loop = simulator(Slots(slots, 1000), Policy(slots, 2048), STEP)
        rates.append(stats(loop.serve(trace), loop.iterations).tokens_per_s)
    assert 3.5 < rates[1] / rates[0] < 4 and 3.2 < rates[2] / rates[1] < 4


def test_an_empty_prompt_is_refused_on_paper_as_well():
    loop = simulator(Slots(2, 100), Policy(2, 8))
    assert loop.serve([Request([], Params(3))])[0].reason == "failed"


def test_weights_that_are_no_numbers_are_refused():
    for weights in ((1.0, math.nan, 0, 0, 0), (1.0, math.inf, 0, 0, 0), (1.0, 2.0)):
        with pytest.raises(ValueError, match="five finite numbers"):
            FittedStep(weights)


def test_rows_may_be_fewer_than_slots_but_not_than_samples():
    server = simulator(Slots(2, 20), Policy(slots=4))
    trace = [Request([1] * 4, Params(3)) for _ in range(3)]
    assert [len(c.tokens) for c in server.serve(trace)] == [3] * 3
    assert max(i.running for i in server.iterations) == 2
    with pytest.raises(TooLong, match="3 samples were asked for, but 2 slots"):
        server.submit(Request([1], Params(3, samples=3)))


def test_a_static_batch_that_outgrows_its_memory_says_so():
    pages = Pages(Blocks(4, 2, prefix_caching=False))
    loop = simulator(pages, Policy(slots=2), scheduler=StaticScheduler)
    with pytest.raises(RuntimeError, match="a static batch keeps what it began with"):
        loop.serve([Request([1, 2], Params(6)), Request([3, 4], Params(6))])
