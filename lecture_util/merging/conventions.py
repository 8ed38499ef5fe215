"""Where the papers and the usual tool disagree: one flag for each, two sets of them with names.

`PAPER` is the default everywhere. `MERGEKIT` reproduces mergekit 0.1.5: in fp32 a recipe made for
it gives the same model here. With a 16-bit `dtype` the tool computes in 16 bits, we in 32, and the
results differ by that rounding. A single flag can be changed with `dataclasses.replace`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHOICES: dict[str, tuple[Any, ...]] = {
    "rescale": ("inverse", "l1"),
    "trim_scope": ("model", "tensor"),
    "zero_sign": ("majority", "positive"),
    "divisor": ("magnitudes", "signed"),
    "crumbs_scope": ("row", "tensor"),
    "stock_range": ("clamped", "unbounded"),
    "slerp_nearly": ("exact", "lerp"),
    "two_ends": ("untied", "tied"),
    "defaults": ("paper", "mergekit"),
}


@dataclass(frozen=True)
class Conventions:
    """What a method does where its descriptions differ.

    rescale:      what makes up for dropped entries (DARE, DELLA): "inverse", 1/p of each
                  survivor, which keeps the mean; "l1", the sum of magnitudes of before.
    trim_scope:   TIES keeps the largest entries of the whole "model" or of each "tensor".
    zero_sign:    the sign where a sum is exactly 0: of the "majority" of all signs, or "positive".
    divisor:      with elected signs, the weighted mean of what agrees is divided by the sum of
                  the weights' "magnitudes", or of the "signed" weights, which comes near 0 where
                  weights of both signs agree. The papers have no weights: all of them are 1.
    crumbs_scope: Breadcrumbs ranks entries within a "row" (the last axis) or a "tensor".
    stock_range:  Model Stock's t "clamped" to [0, 1] (the paper's formula is not, but promises
                  a point between base and mean), or "unbounded", as the tool leaves it.
    slerp_nearly: within 1.8 degrees of parallel or opposite, and for a zero tensor: "exact" goes
                  by the angle as long as there is one, "lerp" as the tool does.
    two_ends:     where a stack of layers begins with one model's and ends with another's, and
                  the heads are tied to the embeddings: the head is the last model's own
                  ("untied"), or stays "tied" to the first one's embedding.
    defaults:     what a parameter is that a recipe leaves out (see `methods`).
    """

    rescale: str = "inverse"
    trim_scope: str = "model"
    zero_sign: str = "majority"
    divisor: str = "magnitudes"
    crumbs_scope: str = "row"
    stock_range: str = "clamped"
    slerp_nearly: str = "exact"
    two_ends: str = "untied"
    defaults: str = "paper"

    def __post_init__(self) -> None:
        for flag, allowed in CHOICES.items():
            if getattr(self, flag) not in allowed:
                raise ValueError(
                    f"convention {flag} is {getattr(self, flag)!r}: expected one of "
                    f"{', '.join(map(repr, allowed))}"
                )


PAPER = Conventions()
MERGEKIT = Conventions(
    rescale="l1",
    trim_scope="tensor",
    zero_sign="positive",
    divisor="signed",
    crumbs_scope="tensor",
    stock_range="unbounded",
    slerp_nearly="lerp",
    two_ends="tied",
    defaults="mergekit",
)
NAMED = {"paper": PAPER, "mergekit": MERGEKIT}


def conventions(choice: str | Mapping[str, str] | Conventions | None) -> Conventions:
    """A name, single flags on top of the papers', or Conventions as they are."""
    if isinstance(choice, Conventions):
        return choice
    if choice is None:
        return PAPER
    if isinstance(choice, Mapping):
        unknown = [flag for flag in choice if flag not in CHOICES]
        if unknown:
            raise ValueError(
                f"convention has no flag {unknown[0]!r}: expected some of {', '.join(CHOICES)}"
            )
        return dataclasses.replace(PAPER, **choice)
    if not isinstance(choice, str) or choice not in NAMED:
        raise ValueError(
            f"convention is {choice!r}: expected 'paper', 'mergekit', or a mapping of flags "
            f"({', '.join(CHOICES)})"
        )
    return NAMED[choice]
