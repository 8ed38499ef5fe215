"""The loss between models: along a line, on the plane through three, and how far apart they lie.

A model's weights are one long vector, so two models have a line through them and three a plane,
and each point on either is a model that can be scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .slerp import angle, lerp
from .soups import State
from .tensors import map_states

Score = Callable[[State], Any]  # of a model's weights


def on_line(a: State, b: State, score: Score, alphas: Sequence[float]) -> list[Any]:
    """The scores of (1 - alpha) a + alpha b; alphas outside [0, 1] go on past the models."""
    return [score(map_states(lambda u, v, t=t: lerp(u, v, t), a, b)) for t in alphas]


@dataclass(frozen=True)
class Plane:
    """The plane through an origin, by two directions of length 1 at a right angle (states, fp64).

    (x, y) is origin + x * right + y * up: coordinates are distances between weights.
    """

    origin: State
    right: State
    up: State

    @classmethod
    def through(cls, origin: State, a: State, b: State) -> Plane:
        """By Gram and Schmidt: a lies on the x axis, and b above it.

        Raises: ValueError if the three are on one line; otherwise as `map_states`.
        """
        to_a, to_b = _offset(origin, a), _offset(origin, b)
        length, reach = math.sqrt(_dot(to_a, to_a)), math.sqrt(_dot(to_b, to_b))
        right = {name: delta / (length or 1.0) for name, delta in to_a.items()}
        for _ in range(2):  # the second time takes away what rounding left of the first
            along = _dot(to_b, right)
            to_b = {name: delta - along * right[name] for name, delta in to_b.items()}
        height = math.sqrt(_dot(to_b, to_b))
        if length == 0 or height <= 1e-7 * reach:
            raise ValueError("the three models lie on one line: a plane takes three corners")
        return cls(origin, right, {name: delta / height for name, delta in to_b.items()})

    def at(self, x: float, y: float) -> dict[str, Tensor]:
        """The model there, in the origin's dtypes; whole-number entries are the origin's."""
        there = dict(self.origin)
        for name, right in self.right.items():
            moved = self.origin[name].double() + x * right + y * self.up[name]
            there[name] = moved.to(self.origin[name].dtype)
        return there

    def coordinates(self, state: State) -> tuple[float, float]:
        """(x, y) of a model, or of its shadow if it lies off the plane."""
        offset = _offset(self.origin, state)
        return _dot(offset, self.right), _dot(offset, self.up)


class Landscape(NamedTuple):
    """values[i][j] is the score at (x[j], y[i]); points, where origin, a and b lie."""

    x: list[float]
    y: list[float]
    values: list[list[Any]]
    points: list[tuple[float, float]]


def on_plane(
    origin: State, a: State, b: State, score: Score, *, steps: int = 9, margin: float = 0.25
) -> Landscape:
    """Score steps * steps models on the rectangle around three, `margin` of its sides wider."""
    if steps < 2:
        raise ValueError(f"steps={steps}: expected at least 2, for both edges")
    plane = Plane.through(origin, a, b)
    points = [plane.coordinates(state) for state in (origin, a, b)]
    axes = torch.tensor(points, dtype=torch.float64).T
    wider = margin * (axes.amax(1) - axes.amin(1))
    low, high = axes.amin(1) - wider, axes.amax(1) + wider
    x, y = (torch.linspace(*ends, steps).tolist() for ends in zip(low, high, strict=True))
    return Landscape(x, y, [[score(plane.at(u, v)) for u in x] for v in y], points)


class Shell(NamedTuple):
    """Fine-tunes' distances from the base, and angles between each two there: means and spreads."""

    distance: float
    distance_std: float
    degrees: float
    degrees_std: float


def shell(base: State, tuned: Sequence[State]) -> dict[str, Shell]:
    """For each tensor of floats how far and in which directions the fine-tunes went.

    On a thin shell all went equally far, at equal angles: the spreads (standard deviations, by N)
    are small. Source: Jang et al. 2024, arXiv:2403.19522, section 3.
    Raises: ValueError for fewer than two fine-tunes; otherwise as `map_states`.
    """
    if len(tuned) < 2:
        raise ValueError(f"{len(tuned)} fine-tunes: an angle takes at least 2 beside the base")
    offsets, shells = [_offset(base, each) for each in tuned], {}
    for name in offsets[0]:
        deltas = [offset[name] for offset in offsets]
        lengths = [torch.linalg.vector_norm(delta).item() for delta in deltas]
        degrees = [math.degrees(angle(u, v)) for u, v in combinations(deltas, 2)]
        shells[name] = Shell(fmean(lengths), pstdev(lengths), fmean(degrees), pstdev(degrees))
    return shells


def _offset(origin: State, state: State) -> dict[str, Tensor]:
    """state - origin in fp64, without the whole-number entries, which must agree."""
    moved = map_states(lambda o, s: s.double() - o.double(), origin, state)
    return {name: delta for name, delta in moved.items() if delta.is_floating_point()}


def _dot(u: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> float:
    return math.fsum(torch.dot(u[name].flatten(), v[name].flatten()).item() for name in u)
