"""Which guesses the target model agrees to, so that its distribution comes out unchanged.

p is the target's distribution and q the draft's, as in Leviathan et al.; Chen et al. name them the
other way round. A guess x drawn from q is accepted with probability min(1, p(x)/q(x)). If it is
rejected, the token is drawn instead from the *residual*, max(p - q, 0) normalised. Together:

    P(x) = q(x) min(1, p(x)/q(x)) + (1 - alpha) max(p(x) - q(x), 0)/(1 - alpha)
         = min(p(x), q(x)) + max(p(x) - q(x), 0) = p(x),      alpha = sum of min(p, q)

Source: Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318; for several
guesses of one token, Miao et al. 2023, arXiv:2305.09781.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lecture_util.model.sampling import Sampling, probabilities

from .draft import ROOT, Draft


class Chance:
    """Where the chances fall: every draw of a speculative step comes through here.

    A test puts in its place one that follows *every* outcome, and adds up their probabilities.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(
                f"generator is {generator!r}: expected torch.Generator().manual_seed(0) or None"
            )
        self.generator = generator

    def happens(self, probability: float) -> bool:
        """True with this probability. A fresh uniform number each time, in fp64."""
        device = None if self.generator is None else self.generator.device
        u = torch.rand((), dtype=torch.float64, device=device, generator=self.generator)
        return u.item() < probability

    def draw(self, p_V: Tensor) -> int:
        """A token, by its probability."""
        return int(torch.multinomial(p_V, 1, generator=self.generator))


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """max(p - q, 0), normalised: what the target still wants where the draft gave too little.

    Where nothing is left (p and q agree but for rounding) it is p itself.
    """
    left_V = (p_V - q_V).clamp(min=0)  # @inspect left_V
    return _normalised(left_V, p_V)


def agreement(p_V: Tensor, q_V: Tensor) -> Tensor:
    """alpha, the sum of min(p, q): how likely a guess drawn from q is accepted.

    Shapes: p (..., V), q (..., V) -> (...)
    """
    return torch.minimum(p_V, q_V).sum(-1)


def verify(
    logits_MV: Tensor, draft: Draft, sampling: Sampling, chance: Chance
) -> tuple[list[int], int]:
    """The accepted nodes, from a first guess down, and the one token that follows them.

    That token is drawn from the residual if guesses were tried there and all were rejected, else it
    is the bonus: it comes from p as it is, whatever was rejected above it.

    Shapes: logits_MV, the target's after the sequence (row 0) and after node i (row i + 1).
    Raises: ValueError if the rows don't fit the draft, a q is no distribution, or a token can't
            have come from its q.
    """
    check_fit(logits_MV, draft)
    if sampling.temperature == 0:
        return _greedy(logits_MV, draft)
    p_MV = probabilities(logits_MV, sampling)
    path: list[int] = []
    here, p_V = ROOT, p_MV[0]
    while True:
        for node in draft.children[here]:
            x, q_V = draft.tokens[node], draft.q[node]
            if chance.happens(float(p_V[x] if q_V is None else p_V[x] / q_V[x])):
                path.append(node)
                here, p_V = node, p_MV[node + 1]  # fresh: rejections above don't matter here
                break
            p_V = _without(p_V, x) if q_V is None else residual(p_V, q_V)
        else:
            return path, chance.draw(p_V)


def check_fit(logits_MV: Tensor, draft: Draft) -> None:
    """Raises: ValueError if the rows don't fit the draft, a q is no distribution, or a token can't
    have come from its q."""
    if logits_MV.ndim != 2 or len(logits_MV) != len(draft) + 1:
        raise ValueError(
            f"logits have shape {tuple(logits_MV.shape)} for a draft of {len(draft)}: expected "
            f"({len(draft) + 1}, V), a row for the sequence and one for each guess"
        )
    V = logits_MV.shape[1]
    for node, (x, q_V) in enumerate(zip(draft.tokens, draft.q, strict=True)):
        if not 0 <= x < V:
            raise ValueError(f"guess {node} is token {x}: the target knows tokens 0 to {V - 1}")
        if q_V is None:
            continue
        if q_V.shape != (V,):
            raise ValueError(
                f"guess {node} has a q of shape {tuple(q_V.shape)}: expected ({V},), one "
                "probability for each token of the target's vocabulary"
            )
        total = float(q_V.sum(dtype=torch.promote_types(q_V.dtype, torch.float32)))
        if not (q_V.min() >= 0 and abs(total - 1) <= 1e-3):
            raise ValueError(
                f"guess {node} has a q that goes from {float(q_V.min()):.4g} up and sums to "
                f"{total:.4g}: expected a distribution, 0 and above, sum 1; pass "
                "probabilities(logits, sampling)"
            )
        if not q_V[x] > 0:
            raise ValueError(
                f"guess {node} is token {x}, to which its q gives no probability: hand over "
                "the very distribution that the token was drawn from"
            )


def _greedy(logits_MV: Tensor, draft: Draft) -> tuple[list[int], int]:
    """Temperature 0, where p is one-hot: follow the guesses that are the target's own choice."""
    best = logits_MV.max(-1)  # one pass over V for both: NaN is the maximum of its row
    if not best.values.isfinite().all():
        raise ValueError("logits hold NaN, +inf or only -inf: the model's output is broken")
    choices = best.indices.tolist()
    path: list[int] = []
    here = ROOT
    while True:
        choice = choices[here + 1]
        agreed = [node for node in draft.children[here] if draft.tokens[node] == choice]
        if not agreed:
            return path, choice
        here = agreed[0]
        path.append(here)


def _without(p_V: Tensor, x: int) -> Tensor:
    """The residual against a one-hot q: p with x struck out. Leaves p as it is."""
    left_V = p_V.clone()
    left_V[x] = 0
    return _normalised(left_V, p_V)


def _normalised(left_V: Tensor, p_V: Tensor) -> Tensor:
    total = left_V.sum()
    return left_V / total if total > 0 else p_V
