"""What speed-ups are drawn from: measured points, and what a verifying forward costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lecture_util.classroom.figures.small_caches import recorded

MOST = 16  # guesses a round that are drawn
FAR = 1024  # and that a measured point may have
FLAT = "flat: any number costs one"


@dataclass(frozen=True)
class Point:
    """One measured run: guesses a round, tokens a round, and times as fast as plain decoding."""

    name: str
    gamma: float
    tokens: float
    speedup: float


@dataclass(frozen=True)
class VerifyCost:
    """The cost of a forward over n tokens, that over one token being 1; known up to `most`."""

    v: Callable[[int], float]
    most: int

    @property
    def gammas(self) -> range:
        """Numbers of guesses for which the cost of verifying is known."""
        return range(min(MOST, self.most - 1) + 1)


def record_of(points: Any) -> Mapping[str, Any] | None:
    """The record that points and costs are taken from: the one given, else the course's own."""
    if isinstance(points, Mapping):
        return points
    try:
        return recorded("speculative")
    except FileNotFoundError:
        return None


def points_of(points: Any, record: Mapping[str, Any] | None) -> list[Point]:
    """Points as given; from a record, its early exits by gamma and its other drafters.

    Raises: ValueError naming what is no point.
    """
    if points is None or isinstance(points, Mapping):
        points = () if record is None else _recorded(record)
    if isinstance(points, str) or not isinstance(points, Iterable):
        raise TypeError(
            f"points={points!r}: pass a list of (name, gamma, tokens a round, speed-up) or a record"
        )
    return [_point(one) for one in points]


def _point(one: Any) -> Point:
    try:
        name, *numbers = one
        point = Point(str(name), *map(float, numbers))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"point {one!r}: expected (name, gamma, tokens a round, speed-up)"
        ) from error
    numbers = point.gamma, point.tokens, point.speedup
    if not all(map(math.isfinite, numbers)) or min(numbers[1:]) <= 0 or not 0 <= point.gamma <= FAR:
        raise ValueError(
            f"point {one!r}: expected finite numbers above 0, gamma from 0 up to {FAR}"
        )
    return point


def _recorded(record: Mapping[str, Any]) -> list[tuple[str, float, float, float]]:
    found = []
    try:
        for one in record.get("early_exits", ()):
            for gamma, run in one["gamma"].items():
                name = f"{one['layers']} layers"
                found.append((name, float(gamma), run["tokens_per_round"], run["speedup"]))
        for name, by_dtype in record.get("drafters", {}).items():
            if name == "early_exit":
                continue
            for dtype, run in by_dtype.items():
                setting = run["setting"]
                gamma = next((setting[key] for key in ("gamma", "k", "size") if key in setting), 0)
                short = f"{name} {dtype.replace('bfloat', 'bf').replace('float', 'fp')}"
                found.append((short, gamma, run["tokens_per_round"], run["speedup"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "the record is not as benchmarks/speculative.py writes it, "
            f"{type(error).__name__}: {error}"
        ) from error
    return found


def costs_of(costs: Any, record: Mapping[str, Any] | None) -> dict[str, VerifyCost]:
    """Name -> cost of verifying, flat first; None: what the record holds."""
    found = {FLAT: VerifyCost(lambda n: 1.0, MOST + 1)}
    if costs is None:
        measured = {} if record is None else record.get("verify_cost", {})
        costs = {
            f"measured: {dtype}, batch {B}": dict(zip(run["T"], run["ms"], strict=True))
            for dtype, by_batch in measured.items()
            for B, run in by_batch.items()
        }
    if not isinstance(costs, Mapping):
        raise TypeError(f"costs={costs!r}: pass a dict, name to v(n) or to {{tokens: ms}}")
    return found | {str(name): _cost(str(name), one) for name, one in costs.items()}


def _cost(name: str, one: Any) -> VerifyCost:
    if callable(one):
        return VerifyCost(one, MOST + 1)
    try:
        measured = {int(n): float(cost) for n, cost in one.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"cost {name!r} is {one!r}: pass a function v(n), or {{tokens: ms}}"
        ) from error
    if 1 not in measured or len(measured) < 2 or min(measured) < 1:
        raise ValueError(
            f"cost {name!r} is known for {sorted(measured)} tokens: expected 1, the unit, and more"
        )
    if not all(math.isfinite(cost) and cost > 0 for cost in measured.values()):
        raise ValueError(f"cost {name!r} holds {list(measured.values())}: expected times above 0")
    n, cost = zip(*sorted(measured.items()), strict=True)
    return VerifyCost(lambda at: float(np.interp(at, n, cost)) / measured[1], n[-1])
