"""Typical acceptance: Medusa's faster and *lossy* rule.

A guess is accepted if the target finds it plausible, whether or not it would have drawn it. The
output is then no sample from the target: it favours what the draft likes. Compare `verify`, which
costs some acceptance and changes nothing.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.1 (epsilon .09, delta .3 in their code).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lecture_util.model.sampling import Sampling, probabilities

from .draft import ROOT, Draft
from .verify import Chance, check_fit


def threshold(p: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Tensor:
    """min(epsilon, delta * exp(-entropy)): low where many tokens would do. (..., V) -> (...)"""
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return (delta * torch.exp(-entropy)).clamp(max=epsilon)


def verify_typical(
    logits_MV: Tensor,
    draft: Draft,
    sampling: Sampling,
    chance: Chance,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> tuple[list[int], int]:
    """Like `verify`, but the deepest path of plausible guesses wins, the first of equals.

    p is tempered but not filtered. The token after the path is drawn as usual; at temperature 0
    plausible is judged at temperature 1, and the token is the likeliest.
    """
    check_fit(logits_MV, draft)
    judged = Sampling(temperature=sampling.temperature or 1.0)
    p_MV = probabilities(logits_MV, judged)
    limit_M = threshold(p_MV, epsilon, delta)
    fine = [
        bool(p_MV[parent + 1, token] > limit_M[parent + 1])
        for token, parent in zip(draft.tokens, draft.parents, strict=True)
    ]
    paths = [draft.path(node) for node in range(len(draft))]
    paths = [path for path in paths if all(fine[node] for node in path)]
    path = max(paths, key=len, default=[])
    row = logits_MV[(path[-1] if path else ROOT) + 1]
    return path, chance.draw(probabilities(row, sampling))
