"""What is predicted before it is measured, against enumeration and against the algebra."""

import math

import pytest
import sympy
import torch
from every_outcome import outcomes
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.model.sampling import Sampling
from lecture_util.speculative.draft_model import ModelDrafter
from lecture_util.speculative.expected import (
    best_gamma,
    expected_tokens,
    speedup,
    tokens_formula,
    two_symbols,
)
from lecture_util.speculative.speculate import speculate
from lecture_util.speculative.target import Table

probability = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


@given(probability, st.integers(0, 12))
def test_tokens_of_a_round_are_a_truncated_geometric(alpha, gamma):
    """Accept k guesses and then one not, or all gamma: each case with its probability."""
    cases = [(alpha**k * (1 - alpha), k + 1) for k in range(gamma)] + [(alpha**gamma, gamma + 1)]
    assert sum(p for p, _ in cases) == pytest.approx(1)
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(p * n for p, n in cases))


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize(("p_A", "q_A"), [(0.7, 0.4), (0.1, 0.95), (0.5, 0.5), (1.0, 0.25)])
def test_the_real_loop_keeps_the_prediction(p_A, q_A, gamma):
    """With the same p and q everywhere alpha is sum of min(p, q), and the formula is exact."""

    def table(A):
        return Table(lambda tokens: torch.tensor([A, 1 - A], dtype=torch.float64).log())

    target, drafter = table(p_A), ModelDrafter(table(q_A), gamma, Sampling(1.0))

    def run(chance):
        options = {"sampling": Sampling(1.0), "chance": chance}
        return len(next(speculate(target, drafter, [0], gamma + 1, **options)).tokens)

    measured = sum(n * p for n, p in outcomes(run))
    alpha = min(p_A, q_A) + min(1 - p_A, 1 - q_A)
    assert measured == pytest.approx(expected_tokens(alpha, gamma), abs=1e-12)


@pytest.mark.parametrize("gamma", [0, 1, 4, 7])
def test_the_formula_is_the_sum(gamma):
    alpha, gamma_symbol, formula = tokens_formula()
    terms = sum(alpha**k for k in range(gamma + 1))
    assert sympy.simplify(formula.subs(gamma_symbol, gamma) - terms) == 0
    assert float(formula.subs({alpha: 0.8, gamma_symbol: gamma})) == pytest.approx(
        expected_tokens(0.8, gamma)
    )


def test_a_draft_that_is_always_right_or_never():
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(0.6, 0) == 1


def test_the_speedup_is_leviathans():
    """Theorem 3.8: (1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)), where verifying costs 1."""
    for alpha, gamma, c in [(0.75, 7, 0.02), (0.8, 5, 0.1), (0.5, 1, 0.5)]:
        theirs = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
        assert speedup(alpha, gamma, c) == pytest.approx(theirs)
    assert speedup(0.8, 3, c=0.1, v=1.7) == pytest.approx(expected_tokens(0.8, 3) / 2.0)


@given(st.floats(0, 1), st.floats(0, 1))
def test_one_guess_pays_where_alpha_exceeds_its_cost(alpha, c):
    """Corollary 3.9: some gamma improves on plain decoding if and only if alpha > c; and then
    gamma = 1 does, by (1 + alpha)/(1 + c)."""
    assert speedup(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c))
    best = best_gamma(alpha, c)
    if alpha > c + 1e-9:
        assert best >= 1
    if alpha < c - 1e-9:
        assert best == 0


@settings(max_examples=50)
@given(st.floats(0, 0.99), st.floats(0.001, 1))
def test_the_best_gamma_is_no_worse_than_any(alpha, c):
    best = best_gamma(alpha, c)
    assert all(speedup(alpha, best, c) >= speedup(alpha, gamma, c) for gamma in range(33))


def test_a_costly_verification_asks_for_fewer_guesses():
    cheap = best_gamma(0.8, 0.05)
    dear = best_gamma(0.8, 0.05, v=lambda n: 1 + 0.2 * (n - 1))
    assert 0 < dear < cheap
    assert best_gamma(0.8, 0.05, v=lambda n: float(n)) == 0  # n tokens cost as much as n forwards
    assert best_gamma(0.0, 0.0) == 0  # of equals the least


def test_only_so_many_guesses_are_looked_at():
    assert best_gamma(1.0, 0.0) == 32
    assert best_gamma(1.0, 0.0, most=5) == 5
    assert best_gamma(1.0, 0.0, most=0) == 0


@given(probability, probability)
def test_two_symbols_come_out_as_the_target_has_them(p_A, q_A):
    P_A, P_B = two_symbols(p_A, q_A)
    assert math.isclose(P_A, p_A, abs_tol=1e-12)
    assert math.isclose(P_B, 1 - p_A, abs_tol=1e-12)


@pytest.mark.parametrize("q_A", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("p_A", [0.0, 0.3, 1.0])
def test_two_symbols_at_the_ends(p_A, q_A):
    assert two_symbols(p_A, q_A) == pytest.approx((p_A, 1 - p_A), abs=1e-15)


@pytest.mark.parametrize("call", [expected_tokens, speedup])
@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_an_alpha_that_is_no_probability_is_refused(call, alpha):
    with pytest.raises(ValueError, match=r"alpha=.*: expected a probability, 0 to 1"):
        call(alpha, 3)


@pytest.mark.parametrize("gamma", [-1, 1.5, True])
def test_a_number_of_guesses_that_is_none_is_refused(gamma):
    with pytest.raises(ValueError, match=r"gamma=.*: expected a whole number of guesses"):
        expected_tokens(0.5, gamma)


@pytest.mark.parametrize("costs", [{"c": -0.1}, {"v": 0}, {"c": float("nan")}, {"v": -1.0}])
def test_costs_below_nothing_are_refused(costs):
    with pytest.raises(ValueError, match="costs are in forwards of the target"):
        speedup(0.5, 3, **costs)


@pytest.mark.parametrize("most", [-1, 2.0])
def test_a_search_through_no_number_is_refused(most):
    with pytest.raises(ValueError, match=r"most=.*: expected a whole number of guesses"):
        best_gamma(0.5, most=most)


@pytest.mark.parametrize(("p_A", "q_A", "name"), [(1.2, 0.5, "p_A"), (0.5, -0.1, "q_A")])
def test_two_symbols_take_probabilities(p_A, q_A, name):
    with pytest.raises(ValueError, match=f"{name}=.*: expected a probability"):
        two_symbols(p_A, q_A)
