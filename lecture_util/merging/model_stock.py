"""Model Stock: two fine-tunes and a little geometry in place of a soup of many.

Fine-tunes of one model with different seeds lie at nearly one distance from a centre and at
nearly one angle to each other. The mean of many is near the centre; from the angle between a few
follows how far their mean must be pulled towards the base to come as near as it can.
Source: Jang et al. 2024, arXiv:2403.19522.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .task_vectors import task_vector
from .tensors import map_states, wide


def stock_ratio(cosine: Tensor | float, N: int, *, bounds: str = "clamped") -> Tensor:
    """t = N cos / (1 + (N-1) cos): how far to go from the base to the mean of N fine-tunes.

    At cos = 1 they agree and t = 1; at cos = 0 they share nothing and t = 0. Below 0 the formula
    leaves the segment, and at -1/(N-1) it has a pole: "clamped" stays at the base there,
    "unbounded" extrapolates, as mergekit, which stays at the base at the pole alone.
    Raises: ValueError for other bounds, and for fewer than 1 model.
    """
    _check_bounds(bounds)
    if N < 1:
        raise ValueError(f"N={N}: expected the number of fine-tunes, at least 1")
    cosine = torch.as_tensor(cosine)
    below = 1 + (N - 1) * cosine
    pole = below.abs() < 1e-6
    t = torch.where(pole, 0.0, N * cosine / below.masked_fill(pole, 1))
    return t.masked_fill(cosine <= 0, 0).clamp(0, 1) if bounds == "clamped" else t


def mean_cosine(offsets: Sequence[Tensor], *, floor: float = 0.0) -> Tensor:
    """Mean over all pairs of the cosine along the last axis; a pair with a zero vector counts 0.

    floor: least product of two lengths to divide by (mergekit: 1e-6, too much for small offsets).
    Shapes: all (..., n) -> (...).
    """
    lengths = [torch.linalg.vector_norm(offset, dim=-1, keepdim=True) for offset in offsets]
    lengths = [n.masked_fill(n == 0, 1) for n in lengths]  # a zero vector's products are 0 anyway
    pairs = []
    for i, offset in enumerate(offsets[:-1]):
        unit = offset / lengths[i]
        for j in range(i + 1, len(offsets)):
            cosine = (unit * offsets[j]).sum(-1, keepdim=True) / lengths[j]
            product = lengths[i].double() * lengths[j]
            pairs.append(cosine.clamp(-1, 1) * (product / product.clamp(min=floor)))
    return torch.cat(pairs, -1).mean(-1)


def model_stock(
    base: Tensor, tuned: Sequence[Tensor], *, per_filter: bool = False, bounds: str = "clamped"
) -> Tensor:
    """t * mean(tuned) + (1-t) * base, with t from the angle between the fine-tunes.

    per_filter: a t for each row instead of one for the tensor.
    Shapes: all alike -> the same; dtype of the base.
    Raises: ValueError for fewer than 2 and for unknown bounds; ShapeError; TensorMismatch.
    """
    _check_bounds(bounds)
    if len(tuned) < 2:
        raise ValueError(f"{len(tuned)} fine-tune: the angle takes at least 2 beside the base")
    offsets = [task_vector(base, each) for each in tuned]
    rows = [x.reshape(1, -1) if x.ndim < 2 or not per_filter else x for x in offsets]
    floor = 1e-6 if bounds == "unbounded" else 0.0
    t = stock_ratio(mean_cosine(rows, floor=floor), len(tuned), bounds=bounds).unsqueeze(-1)
    moved = rows[0]
    for row in rows[1:]:
        moved.add_(row)
    moved.mul_(t.to(moved.dtype) / len(rows))
    return moved.reshape_as(base).add_(wide(base)).to(base.dtype)


def periodic_stock(
    base: Mapping[str, Tensor],
    tune: Callable[[Mapping[str, Tensor], int, int], Mapping[str, Tensor]],
    *,
    models: int = 2,
    rounds: int = 3,
) -> dict[str, Tensor]:
    """Fine-tune a while, merge, go on from the merge: every model starts each round together.

    tune: (start, model, round) -> the state after that round's training of that model.
    The angle is always the one seen from `base`, the pre-trained model.
    """
    start: Mapping[str, Tensor] = base
    for number in range(rounds):
        tuned = [tune(start, model, number) for model in range(models)]
        start = map_states(lambda w0, *ws: model_stock(w0, ws), base, *tuned)
    return dict(start)


def _check_bounds(bounds: str) -> None:
    if bounds not in ("clamped", "unbounded"):
        raise ValueError(f"bounds is {bounds!r}: expected 'clamped' or 'unbounded'")
