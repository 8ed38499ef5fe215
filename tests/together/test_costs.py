"""Costs: the peaks' formula against the course's accounting, the fitted one against known times."""

from collections import deque
from dataclasses import replace

import pytest
import together_models as tiny
import torch

from lecture_util.model.config import PUBLISHED
from lecture_util.roofline.accounting import forward, kv_bytes_per_token
from lecture_util.roofline.hardware import ACCELERATORS, DTYPE_BYTES, Accelerator
from lecture_util.roofline.step_time import decode_step
from lecture_util.roofline.timing import Timing
from lecture_util.serving.simulate import FittedStep, RooflineStep
from lecture_util.together import costs as room
from lecture_util.together.configuration import Configuration
from lecture_util.together.costs import (
    SHAPES,
    Costs,
    PeakStep,
    Scaled,
    Timed,
    Watch,
    calibrate,
    from_peaks,
    time_forwards,
)
from lecture_util.together.run import Piece, serve
from lecture_util.together.variants import Variants, predicted_bytes

SMOL = PUBLISHED["smollm2-135m"]
UNTIED = replace(SMOL, tied=False)
FLAT = Accelerator("made up", {"fp32": 2e12, "bf16": 4e12, "int8": 8e12}, 1e11, 1e9, "a test")
BANDWIDTH = replace(FLAT, flops_per_s={"fp32": 1e30, "bf16": 1e30})  # nothing waits for computing
RATE = replace(FLAT, bandwidth_bytes_per_s=1e30)
TERMS = (2e-3, 3e-4, -1e-4, 2e-6, 5e-8)  # as FittedStep's


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [SMOL, UNTIED, replace(SMOL, L=7)])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 201), (300, 1), (300, 64)])
def test_a_forward_costs_what_the_accounting_says(config, weights, start, count):
    step, width = PeakStep(config, weights, FLAT), DTYPE_BYTES[weights]
    want = forward(config, 1, count, start + count, causal=True, logits_for=1, dtype_bytes=width)
    pieces = [Piece(start, count)]
    assert step.flops(pieces) == want.flops
    assert step.bytes(pieces) == want.bytes
    assert step(pieces) == want.time_s(FLAT, weights)
    padded = [Piece(start, count - 1, padded=1)]
    assert step(padded) == step(pieces)


def test_forwards_of_many_texts_cost_what_the_servers_roofline_says():
    pieces = [Piece(0, 128), Piece(77, 1), Piece(512, 30, padded=2), Piece(9, 1)]
    for config in (SMOL, UNTIED):
        for weights in ("fp32", "bf16"):
            server = RooflineStep(config, FLAT, weights, overhead_s=0.25)
            assert PeakStep(config, weights, FLAT, 0.25)(pieces) == pytest.approx(server(pieces))


@pytest.mark.parametrize("B", [1, 13])
def test_a_decode_step_reads_what_notebook_02_says_and_writes_a_token_each(B):
    for config in (SMOL, UNTIED):
        step = PeakStep(config, "bf16", BANDWIDTH)
        read = decode_step(config, B, 301, BANDWIDTH, whole_embedding=False).bytes_read
        assert step.bytes([Piece(300, 1)] * B) == read + B * kv_bytes_per_token(config)
        assert step([Piece(300, 1)] * B) == step.bytes([Piece(300, 1)] * B) / 1e11


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_quantized_weights_are_read_as_they_are_held_and_the_cache_in_its_own_numbers(weights):
    step = PeakStep(SMOL, weights, FLAT)
    cache = 2 * SMOL.L * SMOL.K * SMOL.H * {"fp32": 4, "bf16": 2, "int8": 4, "int4": 2}[weights]
    assert step.bytes([Piece(9, 1)]) == predicted_bytes(SMOL, weights) + 11 * cache


@pytest.mark.parametrize(
    ("weights", "peaks", "rate"),
    [
        ("fp32", {"fp32": 2, "bf16": 4, "int8": 8}, 2),
        ("bf16", {"fp32": 2, "bf16": 4, "int8": 8}, 4),
        ("int8", {"fp32": 2, "bf16": 4, "int8": 8}, 8),
        ("int4", {"fp32": 2, "bf16": 4, "int8": 8}, 4),
        ("int8", {"bf16": 4}, 8),  # the double of 16 bits stands in
        ("fp32", {"bf16": 4}, 4),
        ("int4", {"fp16": 3}, 3),
    ],
)
def test_computing_runs_at_the_peak_of_the_numbers_it_is_done_in(weights, peaks, rate):
    step = PeakStep(SMOL, weights, replace(RATE, flops_per_s=peaks), 0.5)
    pieces = [Piece(0, 100)]
    assert step(pieces) == 0.5 + step.flops(pieces) / rate


def test_guesses_cost_their_bytes():
    pieces = [Piece(30, 5, drafted=4), Piece(8, 1)]
    plain = PeakStep(SMOL, "fp32", BANDWIDTH)
    drafting = replace(plain, guess_bytes=1000.0)
    assert drafting.bytes(pieces) - plain.bytes(pieces) == 4000
    assert plain.bytes(pieces) == plain.bytes([Piece(30, 5), Piece(8, 1)])


def test_peaks_say_nothing_about_drafts():
    costs = from_peaks(SMOL, "int8", ACCELERATORS["h100"], 0.001)
    step = PeakStep(SMOL, "int8", ACCELERATORS["h100"], 0.001)
    assert costs == Costs(step, step, weights="int8")
    assert not costs.tokens_per_round and not costs.drafted and not costs.guess_s


def test_scaled_costs_are_longer_forwards_and_the_same_drafts():
    costs = Costs(tiny.by_tokens, tiny.one_each, {"ngram": 2.0}, {"ngram": 1.5}, {"ngram": 3.0})
    half = costs.scaled(0.5)
    assert half.rows([Piece(0, 8)]) == 4 and half.flat([Piece(0, 8)]) == 0.5
    assert (half.guess_s, half.tokens_per_round, half.drafted) == (
        costs.guess_s,
        costs.tokens_per_round,
        costs.drafted,
    )
    assert half.rows == Scaled(tiny.by_tokens, 0.5)


def known_s(B, T, S):
    """Seconds of a forward of B texts, T tokens each, after S others: TERMS, written out."""
    one, token, beyond, end, score = TERMS
    tokens = B * T
    scores = B * T * (S + T) if T > 1 else 0
    return one + token * tokens + beyond * max(0, tokens - 16) + end * B * (S + T) + score * scores


@pytest.fixture
def clockwork(monkeypatch):
    """`measure` runs the forward once and gives the seconds that the next shape is known to take;
    what the forward read is kept."""
    shapes, seen = deque(SHAPES), []

    def measure(fn, repeats, warmup, device):
        assert repeats == 3 and warmup == 1
        logits = fn()
        B, T, S = shapes.popleft()
        assert logits.shape[0] == B
        again = fn()  # a cache that filled up would not let a second one in
        torch.testing.assert_close(again, logits)
        return Timing((known_s(B, T, S), 99.0, known_s(B, T, S)))

    monkeypatch.setattr(room, "measure", measure)
    return seen


def test_known_times_are_found_again(clockwork, monkeypatch):
    model = tiny.tiny_model(dtype=torch.float32)
    features = model.features

    def spy(tokens_BT, cache):
        clockwork.append((*tokens_BT.shape, *set(cache.lengths)))
        return features(tokens_BT, cache)

    monkeypatch.setattr(model, "features", spy)
    timed = time_forwards(model)
    assert [t.parts for t in timed] == [(Piece(S, T),) * B for B, T, S in SHAPES]
    assert clockwork == [shape for shape in SHAPES for _ in range(2)]
    fitted = FittedStep.fit(timed)
    assert fitted.weights == pytest.approx(TERMS, rel=1e-6)
    assert fitted([Piece(17, 5), Piece(400, 5)]) == pytest.approx(
        TERMS[0] + 10 * TERMS[1] + (22 + 405) * TERMS[3] + 5 * (22 + 405) * TERMS[4]
    )


def test_the_shapes_that_are_timed_tell_all_terms_apart():
    rows = [FittedStep.terms(Timed((Piece(S, T),) * B, 1.0).parts) for B, T, S in SHAPES]
    scaled = torch.tensor(rows, dtype=torch.float64)
    assert torch.linalg.matrix_rank(scaled / scaled.amax(0)) == 5


@pytest.fixture(scope="module")
def variants():
    return Variants(tiny.tiny_model(dtype=torch.float32))


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_calibration_measures_forwards_and_what_drafts_gain(variants, weights):
    questions = tiny.workload(news=(30, 9, 25, 2, 40), seed=3)
    costs = calibrate(variants, weights, questions, ["ngram"])
    c = Configuration(weights, draft="ngram")
    tally = serve(variants(c), c, questions, tiny.virtual()).tally
    assert costs.tokens_per_round == {"ngram": tally.tokens_per_round}
    assert costs.drafted == {"ngram": tally.drafted / tally.rounds}
    assert costs.guess_s["ngram"] >= 0
    assert isinstance(costs.rows, FittedStep) and isinstance(costs.flat, FittedStep)
    assert costs.rows != costs.flat
    assert not calibrate(variants, weights, questions).guess_s


def test_a_draft_costs_what_forwards_do_not_explain(variants, monkeypatch):
    """Forwards said to take nothing: a guess costs all the seconds there were, shared out."""
    monkeypatch.setattr(room, "time_forwards", lambda model: [])
    monkeypatch.setattr(room.FittedStep, "fit", staticmethod(lambda _: lambda pieces: 0.0))
    watch = []

    def timed(model, c, workload, clock=None):
        outcome = serve(model, c, workload, clock)
        watch.append((outcome.seconds, outcome.tally.drafted))
        return outcome

    monkeypatch.setattr(room, "serve", timed)
    costs = calibrate(variants, "fp32", tiny.workload(news=(30, 9, 25, 2, 40), seed=3), ["ngram"])
    seconds, drafted = watch[-1]
    assert drafted > 10
    assert costs.guess_s["ngram"] == pytest.approx(seconds / drafted)
    assert len(watch) == 2  # the first, unmeasured, warms up
    monkeypatch.setattr(room.FittedStep, "fit", staticmethod(lambda _: lambda pieces: 9.0))
    slow = calibrate(variants, "fp32", tiny.workload(news=(30, 9, 25, 2, 40), seed=3), ["ngram"])
    assert slow.guess_s["ngram"] == 0  # less than nothing is noise


def test_a_watch_lists_forwards_and_lets_time_pass():
    seen = []
    watch = Watch(seen)
    before = watch.now()
    watch.computed([Piece(0, 3)])
    watch.computed([Piece(3, 1), Piece(0, 2)])
    assert seen == [Piece(0, 3), Piece(3, 1), Piece(0, 2)]
    assert watch.now() >= before


def test_weights_and_drafts_that_are_none_are_refused(variants):
    with pytest.raises(ValueError, match="weights='int2': expected one of"):
        calibrate(variants, "int2", tiny.workload())
    with pytest.raises(ValueError, match="draft='lookahead': expected one of"):
        calibrate(variants, "fp32", tiny.workload(), ["lookahead"])
    with pytest.raises(ValueError, match="weights='fp16': expected one of"):
        PeakStep(SMOL, "fp16", FLAT)([Piece(0, 1)])
    with pytest.raises(ValueError, match="a fit needs five forwards"):
        calibrate(variants, "fp32", tiny.workload((5, 4), (1, 2)))
