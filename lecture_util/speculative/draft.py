"""A draft: tokens that somebody guesses will come next, as a chain or as a tree of alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index

from torch import Tensor

ROOT = -1  # the parent of a first guess: the last token of the sequence itself


@dataclass(frozen=True)
class Draft:
    """Guesses, each with the guess it follows; parents come before their children.

    tokens    the guessed token of each node
    parents   the node that each one follows; ROOT where it follows the sequence itself
    q         the distribution each token was *drawn* from, (V); None where it was chosen, not drawn
              (an n-gram, a top-k list): then it is certain, and the distribution is one-hot. One
              tensor (K, V) for all K tokens will do

    Raises: ValueError at a parent that doesn't come first, a repeated sibling that was chosen (it
            would be tried twice), or unequal lengths; TypeError for tokens and parents that are no
            whole numbers, or a q that is no tensor.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    q: Sequence[Tensor | None] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "parents"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        n = len(self.tokens)
        q = self.q
        if isinstance(q, Tensor):
            q = list(q) if q.ndim == 2 else [q]
        object.__setattr__(self, "q", q or (None,) * n)
        if not len(self.parents) == len(self.q) == n:
            raise ValueError(
                f"a draft of {n} tokens has {len(self.parents)} parents and {len(self.q)} "
                "distributions: give one of each a token"
            )
        chosen = set()
        for node, (token, parent, q) in enumerate(
            zip(self.tokens, self.parents, self.q, strict=True)
        ):
            if not isinstance(q, Tensor | None):
                raise TypeError(
                    f"the q of node {node} is {q!r}: expected a tensor (V), or None for a token "
                    "that was chosen"
                )
            if not ROOT <= parent < node:
                raise ValueError(
                    f"node {node} follows node {parent}: parents come before their children, and "
                    f"the first guesses follow {ROOT}, the sequence itself"
                )
            if q is None and (parent, token) in chosen:
                raise ValueError(
                    f"token {token} is guessed twice after node {parent}: once will do"
                )
            if q is None:
                chosen.add((parent, token))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Node -> the nodes that follow it, in the order in which they are tried."""
        found: dict[int, list[int]] = {node: [] for node in range(ROOT, len(self))}
        for node, parent in enumerate(self.parents):
            found[parent].append(node)
        return found

    @cached_property
    def depths(self) -> list[int]:
        """How many guesses lead to each node, itself included: 1 for a first guess."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def path(self, node: int) -> list[int]:
        """The nodes from a first guess to this one."""
        if not ROOT <= index(node) < len(self):
            raise ValueError(f"node {node}: expected {ROOT} to {len(self) - 1}")
        found = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def cut(self, depth: int) -> Draft:
        """Without the guesses deeper than `depth`: what a budget still has room for."""
        if index(depth) < 0:
            raise ValueError(f"depth={depth}: expected 0 or more")
        if not self.depths or max(self.depths) <= depth:
            return self
        kept = [node for node in range(len(self)) if self.depths[node] <= depth]
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return Draft(
            [self.tokens[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            [self.q[node] for node in kept],
        )


def _whole(name: str, values: Sequence[int]) -> list[int]:
    try:
        return [index(value) for value in values]
    except TypeError as error:
        raise TypeError(f"{name}={values!r}: expected a list of whole numbers") from error


NOTHING = Draft()


def chain(tokens: Sequence[int], q: Sequence[Tensor | None] = ()) -> Draft:
    """One guess after the other."""
    return Draft(tokens, list(range(-1, len(tokens) - 1)), q)
