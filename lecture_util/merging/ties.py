"""TIES: trim, elect a sign, merge what agrees.

Where one task raises a weight and another lowers it, their mean serves neither. TIES first drops
the small changes, then lets the larger movement decide the sign of each weight, and averages only
the changes that agree.
Source: Yadav et al. 2023, arXiv:2306.01708, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sparsify import trim
from .task_vectors import apply, combine, task_vector
from .tensors import one_shape


def elect_signs(
    deltas: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    *,
    zero_sign: str | int = "majority",
) -> Tensor:
    """The sign of sum w_i d_i at each entry, +1 or -1 (or 0, if zero_sign is).

    zero_sign: where the sum is exactly 0: "majority", the sign most entries of the tensor have;
               "positive"; or a sign given (the majority over a whole model); 0 leaves it 0.
    Shapes: all alike -> the same.
    """
    if zero_sign not in ("majority", "positive", -1, 0, 1):
        raise ValueError(f"zero_sign is {zero_sign!r}: expected 'majority', 'positive', 1, -1 or 0")
    signs = combine(deltas, weights).sign_()
    if isinstance(zero_sign, str):
        zero_sign = 1 if zero_sign == "positive" else majority(balance(signs))
    return signs.add_(zero_sign / 2).sign_()  # moves the zeros only


def balance(signs: Tensor) -> int:
    """How many more are up than down, counted exactly."""
    return int((signs > 0).count_nonzero() - (signs < 0).count_nonzero())


def majority(sum_of_signs: int) -> int:
    """+1 or -1; a draw counts as -1, as in the authors' code, where 0 is not above 0."""
    return 1 if sum_of_signs > 0 else -1


def disjoint_mean(
    deltas: Sequence[Tensor], signs: Tensor, weights: Sequence[float] | None = None
) -> Tensor:
    """The mean of the entries that have the elected sign, 0 where none has it.

    Weighted, sum w_i d_i / sum |w_i| of those whose w_i d_i has it: see `task_vectors.combine`.
    """
    return combine(deltas, weights, signs=signs, normalize=True)


def ties(
    base: Tensor,
    tuned: Sequence[Tensor],
    *,
    density: float = 0.2,
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
    zero_sign: str | int = "majority",
) -> Tensor:
    """base + scale * disjoint mean of the trimmed task vectors.

    On one flat vector this is the paper's algorithm; on a tensor of a model, its per-tensor
    variant, written to be read; recipes go through `methods.Method.merge`, which does the same.
    `plan.merge_states` trims over the whole model.
    Shapes: all alike -> the same; dtype of the base.
    """
    trimmed = [trim(task_vector(base, each), density) for each in tuned]
    signs = elect_signs(trimmed, weights, zero_sign=zero_sign)
    return apply(base, disjoint_mean(trimmed, signs, weights), scale)


def sign_conflicts(deltas: Sequence[Tensor]) -> float:
    """Share of the entries that some raise and others lower, among those that any changes.

    Raises: ValueError for no task vectors; ShapeError.
    """
    if not deltas:
        raise ValueError("sign_conflicts got no task vectors: pass at least one")
    one_shape(deltas, "task vector ")
    up = torch.stack([delta > 0 for delta in deltas]).any(0)
    down = torch.stack([delta < 0 for delta in deltas]).any(0)
    return ((up & down).sum() / (up | down).sum().clamp(min=1)).item()
