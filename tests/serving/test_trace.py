"""Made-up traffic has the distributions it claims, is the same for a seed, and hides its ends."""

import math

import numpy as np
import pytest
import torch

from lecture_util.serving.request import EndsAfter, Params
from lecture_util.serving.trace import Lengths, make_trace, poisson_arrivals


def test_lengths_are_log_normal():
    drawn = Lengths(400, 0.8, most=10**6).draw(np.random.default_rng(0), 20_000)
    logs = np.log(drawn)
    assert all(type(n) is int for n in drawn)
    # Five standard errors of mean and deviation.
    assert abs(logs.mean() - math.log(400)) < 5 * 0.8 / math.sqrt(20_000)
    assert abs(logs.std() - 0.8) < 5 * 0.8 / math.sqrt(40_000)
    assert abs(np.mean(np.array(drawn) > 400) - 0.5) < 5 * 0.5 / math.sqrt(20_000)


def test_at_spread_one_one_in_six_is_over_e_medians():
    drawn = np.array(Lengths(300, most=10**7).draw(np.random.default_rng(1), 20_000))
    share = 1 - 0.8413447  # beyond one standard deviation of a normal
    assert abs(np.mean(drawn > 300 * math.e) - share) < 5 * math.sqrt(share / 20_000)


def test_lengths_are_clipped_and_without_spread_all_alike():
    drawn = Lengths(20, 2.0, least=5, most=60).draw(np.random.default_rng(0), 2000)
    assert min(drawn) == 5 and max(drawn) == 60
    assert set(Lengths(7.4, 0).draw(np.random.default_rng(0), 50)) == {7}


def test_gaps_between_arrivals_are_exponential():
    arrivals = np.array(poisson_arrivals(4.0, 20_000, np.random.default_rng(3)))
    gaps = np.diff(arrivals, prepend=0.0)
    assert (gaps > 0).all()
    assert abs(gaps.mean() - 0.25) < 5 * 0.25 / math.sqrt(20_000)
    for t in (0.1, 0.25, 0.7):
        share = math.exp(-4 * t)
        assert abs(np.mean(gaps > t) - share) < 5 * math.sqrt(share / 20_000)


def test_a_trace_is_the_same_for_its_seed():
    one, two = (make_trace(30, rate_per_s=2.0, seed=5) for _ in range(2))
    assert one == two
    assert make_trace(30, rate_per_s=2.0, seed=6) != one
    at_once = make_trace(30, rate_per_s=None, seed=5)
    assert {r.arrival_s for r in at_once} == {0.0}


def test_prompts_are_cut_from_the_tokens_and_ends_are_hidden():
    tokens = list(range(1000, 1400))
    trace = make_trace(
        50, rate_per_s=3.0, prompt_tokens=Lengths(20, most=80), new_tokens=Lengths(9, most=33),
        tokens=tokens, seed=7,
    )  # fmt: skip
    arrivals = [r.arrival_s for r in trace]
    assert arrivals == sorted(arrivals)
    for i, r in enumerate(trace):
        first = r.prompt[0]
        assert r.prompt == list(range(first, first + len(r.prompt))) and first >= 1000
        assert r.params == Params(33, seed=7 + i, stop=EndsAfter(r.params.stop.count))
        assert 1 <= r.params.stop.count <= 33
    assert len({len(r.prompt) for r in trace}) > 10


def test_by_default_tokens_are_below_256_and_prompts_differ():
    trace = make_trace(40, rate_per_s=None, prompt_tokens=Lengths(30, 0))
    assert all(0 < t < 256 for r in trace for t in r.prompt)
    assert len({tuple(r.prompt) for r in trace}) > 20


def test_tokens_may_be_a_tensor_or_an_array_and_requests_hold_plain_numbers():
    for tokens in (torch.arange(600), np.arange(600), range(600), tuple(range(600))):
        trace = make_trace(5, rate_per_s=None, tokens=tokens)
        assert trace == make_trace(5, rate_per_s=None, tokens=list(range(600)))
        assert all(type(t) is int for r in trace for t in r.prompt)


def test_the_longest_prompt_may_be_all_there_is():
    (request,) = make_trace(
        1, rate_per_s=None, prompt_tokens=Lengths(9, 0, most=9), tokens=[*range(9)]
    )
    assert request.prompt == [*range(9)]


def test_asking_for_more_than_will_come():
    trace = make_trace(9, rate_per_s=None, new_tokens=Lengths(4, most=8), most_new=100)
    assert {r.params.max_new_tokens for r in trace} == {100}
    assert make_trace(0, rate_per_s=1.0) == []


@pytest.mark.parametrize(
    "bad",
    [
        dict(median=0), dict(median=-1), dict(median=math.nan), dict(median=math.inf),
        dict(median="48"), dict(median=True), dict(median=None), dict(spread=-0.1),
        dict(spread=math.nan), dict(spread=math.inf), dict(spread=None), dict(least=0),
        dict(least=1.5), dict(least=9, most=8), dict(most="512"), dict(most=True),
    ],
    ids=str,
)  # fmt: skip
def test_lengths_that_cannot_be_are_refused(bad):
    with pytest.raises((ValueError, TypeError), match=r"Lengths\(.*expected"):
        Lengths(**{"median": 5, **bad})


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (dict(rate_per_s=0), "requests a second"),
        (dict(rate_per_s=-1.0), "requests a second"),
        (dict(rate_per_s=math.nan), "requests a second"),
        (dict(rate_per_s=math.inf), "requests a second"),
        (dict(rate_per_s="2"), "requests a second"),
        (dict(rate_per_s=True), "requests a second"),
        (dict(count=-1), "count=-1"),
        (dict(count=2.0), "count=2.0"),
        (dict(count=True), "count=True"),
        (dict(seed=-1), "seed=-1"),
        (dict(seed=None), "seed=None"),
        (dict(seed=0.5), "seed=0.5"),
        (dict(prompt_tokens=48), "Lengths"),
        (dict(new_tokens=(32, 1.0)), "Lengths"),
        (dict(most_new=-1), "max_new_tokens=-1"),
        (dict(most_new=2.5), "max_new_tokens=2.5"),
        (dict(tokens=[1, 2, 3]), "3 tokens to cut prompts from, but one may have 512"),
        (dict(tokens="a" * 600), "whole numbers"),
        (dict(tokens=[0.5] * 600), "whole numbers"),
    ],
    ids=str,
)
def test_a_trace_that_cannot_be_is_refused(bad, says):
    with pytest.raises((ValueError, TypeError), match=says):
        make_trace(**{"count": 3, "rate_per_s": 1.0, **bad})
