"""Verify a chain as one block: as exact as guess by guess, and never fewer accepted on average.

Guess by guess, one that the target likes *more* than the draft does is accepted for certain, and
the rest of its ratio p/q above 1 is lost. Here that surplus makes up for guesses before it: what
counts is the product of the ratios along the way, held at most 1.

Source: Sun et al. 2024, arXiv:2403.10444, algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lecture_util.model.sampling import Sampling, probabilities

from .draft import Draft
from .verify import Chance, check_fit, verify


def verify_block(
    logits_MV: Tensor, draft: Draft, sampling: Sampling, chance: Chance
) -> tuple[list[int], int]:
    """Like `verify`, for chains: the longest beginning that stands, and the token that follows it.

    The beginning of n guesses has weight w, the product of its ratios. Of the target's next token
    `left` = sum of max(w p - q, 0) is what longer beginnings don't provide; it stands with
    probability left/(left + 1 - w). After the last guess nothing is drafted: q is 0 there, so that
    the whole draft stands with probability w, and the bonus comes from p.

    Raises: ValueError for a tree, and as `verify`.
    """
    if not draft.is_chain:
        raise ValueError("this draft is a tree: verify_block takes chains, `verify` takes both")
    if sampling.temperature == 0:
        return verify(logits_MV, draft, sampling, chance)  # all weights are 0 or 1: the same rule
    check_fit(logits_MV, draft)
    p_MV = probabilities(logits_MV, sampling)
    q_MV = torch.zeros_like(p_MV)
    weights = [1.0]
    for i, (x, q_V) in enumerate(zip(draft.tokens, draft.q, strict=True)):
        if q_V is None:
            q_MV[i, x] = 1
        else:
            q_MV[i] = q_V
        weights.append(min(1.0, weights[-1] * float(p_MV[i, x] / q_MV[i, x])))
    n = len(draft)
    while True:  # the longest that stands counts, so begin with the whole
        left_V = (weights[n] * p_MV[n] - q_MV[n]).clamp(min=0)
        left = float(left_V.sum())
        if n == 0 or (left > 0 and chance.happens(left / (left + 1 - weights[n]))):
            return list(range(n)), chance.draw(left_V / left if left > 0 else p_MV[n])
        n -= 1
