"""SLERP: from one vector to another along the arc instead of the chord.

Source: Shoemake 1985, "Animating rotation with quaternion curves", section 3.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .tensors import one_shape, wide

NEARLY = 0.9995  # mergekit: |cosine| beyond which it goes straight
NOTHING = 1e-8  # mergekit: length up to which a tensor counts as zero
TINY = 1e-6  # radians: from here on there is no arc to speak of
FLAT = 1e-2  # radians from opposite: there the coefficients are large, and cancel


def lerp(v0: Tensor, v1: Tensor, t: float) -> Tensor:
    """(1-t) v0 + t v1, the straight way. Shapes: alike -> the same; dtype of v0."""
    one_shape([v0, v1], "v")
    return (wide(v0) * (1 - t) + wide(v1) * t).to(v0.dtype)


def angle(v0: Tensor, v1: Tensor) -> float:
    """The angle between two tensors as flat vectors, radians in [0, pi]; 0 if one is zero.

    By the two diagonals of the rhombus, 2 atan2(|u-v|, |u+v|), which is exact for small angles,
    where arccos of a rounded cosine is not.
    Source: Kahan 2006, "How futile are mindless assessments of roundoff", section 12.
    """
    u, v = _unit(v0), _unit(v1)
    if u is None or v is None:
        return 0.0
    apart, together = torch.linalg.vector_norm(u - v), torch.linalg.vector_norm(u + v)
    return 2 * math.atan2(apart.item(), together.item())


def slerp(v0: Tensor, v1: Tensor, t: float, *, nearly: str = "exact") -> Tensor:
    """sin((1-t) a)/sin(a) v0 + sin(t a)/sin(a) v1, with a the angle between them.

    The whole tensor is one vector; the coefficients multiply the tensors as they are, so lengths
    go from |v0| to |v1| and equal lengths stay equal. Parallel tensors, opposite ones (every arc
    between them is as good as another) and a zero tensor (it has no direction) go straight.
    Within half a degree of opposite, two large multiples nearly cancel and take fp32's digits with
    them, so there "exact" computes in fp64.

    nearly: "lerp" goes straight within 1.8 degrees of parallel or opposite already, and takes the
            angle to a zero tensor for 90 degrees, as mergekit does.
    Shapes: v0, v1 alike -> the same; dtype of v0, computed in fp32 or wider.
    """
    if nearly not in ("exact", "lerp"):
        raise ValueError(f"nearly is {nearly!r}: expected 'exact' or 'lerp'")
    one_shape([v0, v1], "v")
    a = angle(v0, v1)
    if nearly == "lerp":
        lengths = [torch.linalg.vector_norm(wide(v)) for v in (v0, v1)]
        a = math.pi / 2 if min(lengths) <= NOTHING else a
        straight = abs(math.cos(a)) > NEARLY
    else:
        if math.pi - a < FLAT and not v0.dtype == v1.dtype == torch.float64:
            return slerp(v0.double(), v1.double(), t).to(v0.dtype)
        straight = min(a, math.pi - a) < TINY
    if straight:
        return lerp(v0, v1, t)
    s0, s1 = math.sin((1 - t) * a) / math.sin(a), math.sin(t * a) / math.sin(a)
    return (wide(v0) * s0).add_(wide(v1), alpha=s1).to(v0.dtype)


def _unit(vector: Tensor) -> Tensor | None:
    """The direction, or None if there is none."""
    vector = wide(vector).flatten()
    length = torch.linalg.vector_norm(vector)
    if not 1e-15 < length < 1e15 and vector.any():  # its squares leave float32's range
        vector = vector / vector.abs().max()
        length = torch.linalg.vector_norm(vector)
    return None if length == 0 else vector / length
