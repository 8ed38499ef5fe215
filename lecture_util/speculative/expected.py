"""What speculation should bring, before it is measured.

alpha  how likely a guess is accepted, taken to be the same for every guess and independent
gamma  guesses a round
c      what a guess costs, in forwards of the target over one token
v      what the verifying forward costs, over gamma + 1 tokens, in the same unit; 1 where only the
       weights' bytes count

Source: Leviathan et al. 2022, arXiv:2211.17192, sections 3.1 to 3.4; v is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a round: 1 + alpha + ... + alpha^gamma = (1 - alpha^(gamma+1))/(1 - alpha).

    Guess k is kept if it and all before it are accepted, with probability alpha^k; the 1 is the
    token that the target adds itself.
    """
    _check(alpha, gamma)
    return sum(alpha**k for k in range(gamma + 1))


def speedup(alpha: float, gamma: int, c: float = 0.0, v: float = 1.0) -> float:
    """Tokens a round over what the round costs, against one token at a cost of one."""
    return _rate(expected_tokens(alpha, gamma), gamma, c, v)


def best_gamma(
    alpha: float, c: float = 0.0, v: Callable[[int], float] | None = None, most: int = 32
) -> int:
    """The number of guesses with the largest `speedup`; 0 where none is above plain decoding.

    v: the cost of a verifying forward over n tokens, as v(n); None for 1 whatever n.
    """
    if type(most) is not int or most < 0:
        raise ValueError(f"most={most!r}: expected a whole number of guesses, 0 or more")
    _check_probability("alpha", alpha)
    tokens = accumulate(alpha**k for k in range(most + 1))  # `expected_tokens`, gamma by gamma
    gains = [_rate(n, i, c, 1.0 if v is None else v(i + 1)) for i, n in enumerate(tokens)]
    return max(range(most + 1), key=gains.__getitem__)


def tokens_formula() -> tuple[sympy.Symbol, sympy.Symbol, sympy.Expr]:
    """(alpha, gamma, expected tokens), for derivations."""
    import sympy

    alpha = sympy.Symbol("alpha", positive=True)
    gamma = sympy.Symbol("gamma", integer=True, nonnegative=True)
    return alpha, gamma, (1 - alpha ** (gamma + 1)) / (1 - alpha)


def two_symbols(p_A: float, q_A: float) -> tuple[float, float]:
    """The proof for a vocabulary of A and B: how likely a speculative step gives each of them.

    p_A, q_A: how likely A is to the target and to the draft.
    Returns P(A) and P(B); they come out as p_A and 1 - p_A, whatever q_A is.
    """
    _check_probability("p_A", p_A)
    _check_probability("q_A", q_A)
    p_B, q_B = 1 - p_A, 1 - q_A
    keep_A = min(1, p_A / q_A) if q_A > 0 else 0  # @inspect keep_A
    keep_B = min(1, p_B / q_B) if q_B > 0 else 0  # @inspect keep_B
    rejected = q_A * (1 - keep_A) + q_B * (1 - keep_B)  # @inspect rejected
    left_A, left_B = max(p_A - q_A, 0), max(p_B - q_B, 0)  # @inspect left_A left_B
    left = left_A + left_B or 1  # @inspect left
    P_A = q_A * keep_A + rejected * left_A / left  # @inspect P_A
    P_B = q_B * keep_B + rejected * left_B / left  # @inspect P_B
    return P_A, P_B


def _rate(tokens: float, gamma: int, c: float, v: float) -> float:
    if not c >= 0 or not v > 0:
        raise ValueError(f"c={c!r}, v={v!r}: costs are in forwards of the target, from 0 and above")
    return tokens / (gamma * c + v)


def _check(alpha: float, gamma: int) -> None:
    _check_probability("alpha", alpha)
    if type(gamma) is not int or gamma < 0:
        raise ValueError(f"gamma={gamma!r}: expected a whole number of guesses, 0 or more")


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: expected a probability, 0 to 1")
