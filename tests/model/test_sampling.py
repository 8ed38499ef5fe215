"""Samplers against enumeration, transformers' warpers, and the faults others had."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from lecture_util.model.sampling import Sampling, probabilities, sample


def logits_of(probs):
    return torch.tensor(probs, dtype=torch.float64).log()


def kept(probs, **options):
    result = probabilities(logits_of(probs), Sampling(temperature=1.0) if not options else
                           Sampling(**{"temperature": 1.0, **options}))  # fmt: skip
    return [i for i, p in enumerate(result.tolist()) if p > 0]


def test_top_p_keeps_the_token_that_crosses():
    """reasoning-from-scratch#164, fish-speech#1171: keep while the mass *before* is below p."""
    assert kept([0.5, 0.41, 0.09], top_p=0.9) == [0, 1]
    assert kept([0.09, 0.5, 0.41], top_p=0.49) == [1]
    assert kept([0.25, 0.25, 0.25, 0.25], top_p=0.01) == [0]


def test_top_p_of_one_keeps_all():
    """ChatRWKV#170: an argmax over an all-False row made p=1 greedy."""
    assert kept([0.5, 0.3, 0.15, 0.05], top_p=1.0) == [0, 1, 2, 3]


def test_temperature_comes_before_the_filters():
    """transformers#8686: the kept set follows the tempered distribution."""
    probs = [0.5, 0.3, 0.2]  # tempered by 2: about 0.41, 0.32, 0.26
    assert kept(probs, top_p=0.45, temperature=1.0) == [0]
    assert kept(probs, top_p=0.45, temperature=2.0) == [0, 1]


def test_top_k_keeps_exactly_k_even_among_ties():
    assert len(kept([0.25] * 4, top_k=2)) == 2
    assert kept([0.4, 0.6], top_k=5) == [0, 1]


def test_min_p_is_relative_to_the_best():
    assert kept([0.6, 0.3, 0.07, 0.03], min_p=0.1) == [0, 1, 2]


def test_filters_leave_a_spread_distribution_to_draw_from():
    """mistral.rs#2424: filtering and then taking the argmax made sampling dead."""
    logits = logits_of([[0.4, 0.35, 0.25]])
    g = torch.Generator().manual_seed(0)
    options = Sampling(temperature=1.0, top_p=0.99)
    assert {sample(logits, options, g).item() for _ in range(300)} == {0, 1, 2}


def test_logits_are_not_changed():
    """nano-vllm divided fp32 logits in place."""
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample(logits, Sampling(0.7, top_k=5, top_p=0.9, min_p=0.01))
    assert torch.equal(logits, before)


@given(st.integers(0, 10_000), st.floats(0.2, 3), st.integers(1, 20), st.floats(0.05, 1))
def test_kept_mass_matches_transformers(seed, temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours = probabilities(logits, Sampling(temperature, top_k, top_p))
    theirs = logits.clone()
    for warper in (
        TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)
    ):  # fmt: skip
        theirs = warper(None, theirs)
    torch.testing.assert_close(ours, theirs.softmax(-1))


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.7}]
)
def test_draws_follow_the_distribution(options):
    """chainerrl#104 drew with the wrong sign; a histogram would have told."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0])
    sampling = Sampling(temperature=0.9, **options)
    expected = probabilities(logits.double(), sampling)
    g = torch.Generator().manual_seed(1)
    draws = sample(logits.expand(50_000, -1), sampling, g)
    counts = torch.bincount(draws, minlength=6)
    assert counts[expected == 0].sum() == 0
    alive = expected > 0
    assert (
        chisquare(counts[alive], 50_000 * (expected[alive] / expected[alive].sum())).pvalue > 1e-3
    )


def test_a_large_vocabulary_is_drawn_without_losing_its_tail():
    """vllm#34854: noise with too few bits truncates the tail. 10^5 tokens in 200 bins."""
    V = 100_000
    logits = torch.linspace(0, -12, V)
    g = torch.Generator().manual_seed(2)
    draws = torch.cat([sample(logits.expand(40, -1), Sampling(1.0), g) for _ in range(100)])
    bins = torch.bincount(draws * 200 // V, minlength=200)
    expected = logits.double().softmax(-1).reshape(200, -1).sum(-1) * len(draws)
    tail = expected >= 5
    rest = torch.tensor([bins[~tail].sum()]), expected[~tail].sum()[None]
    observed = torch.cat([bins[tail], rest[0]]).double()
    assert chisquare(observed, torch.cat([expected[tail], rest[1]])).pvalue > 1e-3


def test_equal_seeds_draw_equal_tokens():
    logits = torch.randn(4, 100)
    a, b = (sample(logits, Sampling(1.0), torch.Generator().manual_seed(3)) for _ in "ab")
    assert torch.equal(a, b)


def test_greedy_is_temperature_zero():
    logits = torch.tensor([[0.1, 3.0, 0.2], [1.0, 0.0, -1.0]])
    assert sample(logits).tolist() == [1, 0]
    assert probabilities(logits, Sampling()).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature=-1: expected a number from 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0: expected at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: expected above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -0.1}, "min_p=-0.1"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    "options", [{"temperature": "1"}, {"temperature": None}, {"top_k": 1.5}, {"top_p": "0.9"}]
)
def test_options_of_the_wrong_kind_are_refused(options):
    with pytest.raises(TypeError, match=f"{next(iter(options))}=.*: expected a"):
        Sampling(**options)


def test_a_tiny_temperature_is_nearly_greedy():
    probs = probabilities(torch.tensor([1.0, 3.0, 2.0]), Sampling(temperature=1e-40))
    assert probs.tolist() == [0, 1, 0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_broken_logits_are_refused(sampling):
    with pytest.raises(ValueError, match="NaN"):
        sample(torch.tensor([[0.0, float("nan")]]), sampling)
