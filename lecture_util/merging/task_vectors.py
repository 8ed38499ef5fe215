"""Task vectors: what fine-tuning added. They can be added up, taken away, and scaled.

Source: Ilharco et al. 2022, arXiv:2212.04089.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..model.shapes import ShapeError
from .tensors import one_shape, one_weight_each, require_floats, wide


def task_vector(base: Tensor, tuned: Tensor) -> Tensor:
    """tuned - base, in fp32 or wider, where sums of such small numbers keep their digits.

    Shapes: alike -> the same. Raises: ShapeError; TensorMismatch for what isn't floating-point.
    """
    require_floats(base=base, tuned=tuned)
    if base.shape != tuned.shape:
        raise ShapeError(
            f"base is {tuple(base.shape)} but tuned is {tuple(tuned.shape)}: a task vector is the "
            "difference between a model and the one it was fine-tuned from"
        )
    return wide(tuned) - wide(base)


def combine(
    deltas: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    *,
    signs: Tensor | None = None,
    normalize: bool = False,
    divisor: str = "magnitudes",
) -> Tensor:
    """sum w_i d_i, where `signs` are given only of the entries w_i d_i that have that sign.

    normalize: divide by the sum of the weights that took part, entry by entry: a mean.
    divisor:   with signs, of those weights' "magnitudes": the mean lies among the changes, turned
               round where the weight is negative. "signed", as mergekit: one model of weight -1
               is added, not taken away; where weights 1 and -0.99 agree, sums grow a hundredfold.
    Shapes: all alike -> the same.
    Raises: ShapeError; ValueError unless there is a weight for each; TensorMismatch.
    """
    if divisor not in ("magnitudes", "signed"):
        raise ValueError(f"divisor is {divisor!r}: expected 'magnitudes' or 'signed'")
    weights = one_weight_each(weights, deltas, "task vectors")
    one_shape(deltas, "task vector ")
    total = torch.zeros_like(deltas[0])
    shares: Tensor | float = torch.zeros_like(total) if signs is not None else sum(weights)
    for delta, weight in zip(deltas, weights, strict=True):
        part = delta * weight  # rounded before it is added, or x - x would leave x's rounding error
        if signs is not None:
            part.mul_(signs).relu_()  # how far it goes the elected way
            shares.add_(part.sign(), alpha=weight if divisor == "signed" else abs(weight))
        total.add_(part)
    if signs is not None:
        total.mul_(signs)
    if not normalize:
        return total
    if signs is None:
        return total.div_(shares if abs(shares) >= 1e-8 else 1.0)
    return total.div_(shares.add_(1 - shares.sign().abs_()))  # by 1 instead of by 0


def apply(base: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
    """base + scale * delta, cast once to the base's dtype."""
    require_floats(base=base, delta=delta)
    return (wide(base) + (delta if scale == 1 else delta * scale)).to(base.dtype)


def task_arithmetic(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    *,
    scale: float = 1.0,
    normalize: bool = False,
) -> Tensor:
    """base + scale * sum w_i (tuned_i - base): weights 1 add skills, -1 takes one away.

    scale is the paper's lambda. With all weights 1/N and scale 1 it is the uniform soup. A version
    to read; recipes go through `methods.Method.merge`, which does the same.
    Shapes: all alike -> the same; dtype of the base.
    """
    deltas = [task_vector(base, each) for each in tuned]
    return apply(base, combine(deltas, weights, normalize=normalize), scale)


def cosines(vectors: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Cosine of the angle between each two of N whole-model task vectors. Shapes: -> (N, N).

    Vectors of unrelated tasks are nearly orthogonal, which is why they can be added.
    Raises: ValueError for no vectors.
    """
    N = len(vectors)
    if not N:
        raise ValueError("cosines got no task vectors: pass at least one, {name: tensor}")
    dots = torch.zeros(N, N, dtype=torch.float64)
    for name in vectors[0]:
        flat = torch.stack([wide(vector[name]).flatten() for vector in vectors]).double()
        dots += flat @ flat.T
    lengths = dots.diagonal().sqrt()
    return dots / (lengths[:, None] * lengths).clamp(min=1e-300)
