"""TIES on three small vectors, with all that lies between the task vectors and the merged model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lecture_util.merging.sparsify import trim
from lecture_util.merging.task_vectors import apply, combine
from lecture_util.merging.ties import disjoint_mean, elect_signs, sign_conflicts

MODELS = 3
FEWEST, MOST = 6, 8  # entries of a vector
LARGEST = 99.0
ZERO_SIGNS = {"paper": "majority", "mergekit": "positive"}

EXAMPLES: dict[str, tuple[tuple[float, ...], ...]] = {
    "small changes": (
        (0.9, 0.1, 0.2, 0.8, -0.1, 0.1, -0.1),
        (-0.1, 0.7, 0.1, -0.6, 0.1, 0.9, 0.1),
        (0.1, 0.1, 0.8, -0.1, -0.9, -0.1, -0.2),
    ),
    "one against two": (
        (1.2, 0.3, -0.4, 0.8, 0.2, -0.7, 0.5, 0.1),
        (-0.4, 0.5, -0.6, -0.3, 0.9, 0.3, -0.4, 0.7),
        (-0.5, 0.4, -0.5, -0.4, -0.8, 0.3, -0.3, -0.6),
    ),
    "sums of 0": (
        (0.75, -0.5, -0.25, 0.5, -0.25, -0.75),
        (-0.75, -0.25, 0.25, -0.5, -0.5, 0.25),
        (0.0, -0.5, 0.0, -0.25, -0.25, 0.5),
    ),
}


@dataclass(frozen=True)
class Work:
    """Each step of TIES. Shapes: lists of three (n,) tensors; all others (n,), in fp64.

    conflicts:      masks of entries that some raise and others lower: before trimming, after it.
    sums, signs:    of the trimmed vectors; the sign elected for each entry.
    agrees:         mask, for each vector: changes that have the elected sign.
    mean, plain:    of what agrees, and of all three untrimmed: what TIES adds, and a plain mean.
    merged, beside: base + scale * mean, base + scale * plain.
    """

    base: Tensor
    deltas: list[Tensor]
    trimmed: list[Tensor]
    conflicts: tuple[Tensor, Tensor]
    sums: Tensor
    signs: Tensor
    agrees: list[Tensor]
    mean: Tensor
    plain: Tensor
    merged: Tensor
    beside: Tensor

    @property
    def n(self) -> int:
        return self.base.numel()

    @property
    def shares(self) -> tuple[float, float]:
        """Of the changed entries, those in conflict: before trimming, and after it."""
        return sign_conflicts(self.deltas), sign_conflicts(self.trimmed)


def work_out(
    base: Tensor, deltas: Sequence[Tensor], density: float, scale: float, zero_sign: str
) -> Work:
    """Run the steps of `merging.ties` one by one on three task vectors, each trimmed by itself."""
    trimmed = [trim(delta, density) for delta in deltas]
    signs = elect_signs(trimmed, zero_sign=zero_sign)
    mean = disjoint_mean(trimmed, signs)
    plain = combine(deltas, normalize=True)
    return Work(
        base, list(deltas), trimmed,
        conflicts=(_conflicts(deltas), _conflicts(trimmed)),
        sums=combine(trimmed),
        signs=signs,
        agrees=[(thin.sign() == signs) & (thin != 0) for thin in trimmed],
        mean=mean,
        plain=plain,
        merged=apply(base, mean, scale),
        beside=apply(base, plain, scale),
    )  # fmt: skip


def _conflicts(deltas: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(deltas))
    return (stacked > 0).any(0) & (stacked < 0).any(0)


def base_of(n: int) -> Tensor:
    """Weights that the task vectors are added to: 1, then 2, and so on, so that each is known."""
    return torch.arange(1, n + 1, dtype=torch.float64)


def numbers(words: str) -> list[float]:
    """Numbers separated by spaces, commas or semicolons. Raises: ValueError naming the word."""
    found = []
    for word in re.split(r"[\s,;]+", words.strip().replace("−", "-").replace("–", "-")):
        try:
            found.append(float(word))
        except ValueError:
            raise ValueError(f"{word!r} is no number: write them as in 0.5 -0.2 0 1") from None
    return found


def vectors(name: str, rows: Any) -> list[Tensor]:
    """Three task vectors as tensors in fp64.

    Raises: ValueError naming which has too many or too few numbers, or one that is too large.
    """
    try:
        listed = [[float(value) for value in row] for row in rows]
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {rows!r:.80}: expected three lists of numbers") from None
    if len(listed) != MODELS:
        raise ValueError(f"{name} has {len(listed)} task vectors: expected {MODELS}")
    n = len(listed[0])
    for i, row in enumerate(listed):
        if not FEWEST <= len(row) <= MOST:
            raise ValueError(
                f"{name}: task vector {i + 1} has {len(row)} numbers: expected {FEWEST} to {MOST}"
            )
        if len(row) != n:
            raise ValueError(
                f"{name}: task vector {i + 1} has {len(row)} numbers but task vector 1 has {n}: "
                "expected one length"
            )
        for value in row:
            if not math.isfinite(value) or abs(value) > LARGEST:
                raise ValueError(
                    f"{name}: task vector {i + 1} has {value}: expected {-LARGEST:g} to {LARGEST:g}"
                )
    return [torch.tensor(row, dtype=torch.float64) for row in listed]


def examples_of(given: Any) -> dict[str, list[list[float]]]:
    """The examples to choose from, checked."""
    given = EXAMPLES if given is None else given
    if not isinstance(given, Mapping) or not given:
        raise TypeError(f"examples are {given!r:.80}: pass a dict, name to three task vectors")
    return {
        str(name): [row.tolist() for row in vectors(f"example {name!r}", rows)]
        for name, rows in given.items()
    }
