"""EAGLE: one small layer that continues the target's *features*, and a tree grown from it.

A feature says more than a token, but not which token was drawn from it. So the layer reads the
feature of position t together with token t + 1, and predicts the feature of position t + 1; the
model's own head turns that into guesses for token t + 2. It feeds on its own predictions until the
target has read the tokens, and then on the true features instead.

Source: Li et al. 2024, arXiv:2401.15077; the tree by confidence, arXiv:2406.16858.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lecture_util.model.attention import rope_frequencies, rope_table
from lecture_util.model.config import Config
from lecture_util.model.kv_cache import Cache, NoCache
from lecture_util.model.linear import Linear
from lecture_util.model.transformer import Block

from .draft import NOTHING, ROOT, Draft
from .target import Reader, TreeCache, common_beginning
from .verify import Chance
from .vocabulary import DraftVocabulary


class EagleHead(nn.Module):
    """(feature at t, embedding of token t + 1) -> the feature at t + 1.

    Shapes: x_BTD, e_BTD -> x_BTD.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = replace(config, L=1)
        self.join = Linear(2 * config.D, config.D, bias=True)
        self.block = Block(self.config, 0)

    def forward(self, x_BTD: Tensor, e_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        cache = NoCache() if cache is None else cache
        positions_BT = cache.positions(x_BTD.shape[:2], x_BTD.device)
        rope = rope_table(rope_frequencies(self.config, x_BTD.device), positions_BT)
        out_BTD = self.block(self.join(torch.cat((x_BTD, e_BTD), dim=-1)), rope, cache)
        cache.extend(x_BTD.shape[1])
        return out_BTD


class Node(NamedTuple):
    """A guess while the tree grows."""

    token: int
    parent: int  # the node it follows, or ROOT
    log: float  # of the product of probabilities along its path


MOST = 1024  # nodes that a tree may have, or be grown from; trees that pay have a dozen or two


class EagleDrafter:
    """A tree of guesses, grown level by level where the head is surest.

    depth: levels; each costs one forward of the head.
    width: nodes of a level that are continued, and continuations looked at for each.
    size:  guesses handed on for verification, those with the largest product of probabilities.

    Raises: ValueError for a shape that is no tree, or one of more than MOST nodes.
    """

    def __init__(
        self,
        reader: Reader,
        head: EagleHead,
        vocabulary: DraftVocabulary,
        depth: int = 3,
        width: int = 2,
        size: int = 4,
    ) -> None:
        check_shape(vocabulary, depth, width, size)
        self.reader, self.head, self.vocabulary = reader, head, vocabulary
        self.depth, self.width, self.size = depth, width, size
        capacity = reader.cache.capacity + depth * width
        model = reader.model
        self.cache = TreeCache(head.config, 1, capacity, model.dtype, model.device)
        self.tokens: list[int] = []  # the sequence whose positions the cache holds

    def __len__(self) -> int:
        """Positions that the head has read, all of them with true features."""
        return self.cache.lengths[0]

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], room: int, chance: Chance) -> Draft:
        levels = min(self.depth, room)
        if levels < 1 or not self.reader.awaits(tokens):
            return NOTHING
        start, end = self._rewind(tokens), len(tokens) - 1
        x_1TD = self.reader.features_SD[None, start:end]
        x_WD = self._read(x_1TD, tokens[start + 1 :])[0, -1:]
        nodes: list[Node] = []
        beam, fed = [ROOT], []  # nodes that x_WD follows; nodes that the head has read
        for level in range(levels):
            first = len(nodes)
            guesses_WK, logs_WK = (part.tolist() for part in self.vocabulary.top(x_WD, self.width))
            for parent, guesses, logs in zip(beam, guesses_WK, logs_WK, strict=True):
                so_far = 0.0 if parent == ROOT else nodes[parent].log
                nodes += [
                    Node(guess, parent, so_far + log)
                    for guess, log in zip(guesses, logs, strict=True)
                ]
            if level + 1 < levels:
                surest = _likeliest(nodes, range(first, len(nodes)), self.width)
                x_1WD = x_WD[None, [beam.index(nodes[i].parent) for i in surest]]
                fed += surest
                x_WD = self._read(x_1WD, [nodes[i].token for i in surest], _draft(nodes, fed))[0]
                beam = surest
        self.cache.truncate(end)  # what was built on guesses goes
        self.tokens = list(tokens)
        return _draft(nodes, _likeliest(nodes, range(len(nodes)), self.size))

    def _rewind(self, tokens: Sequence[int]) -> int:
        """Forget positions of another sequence, each read from its own token and the next; how many
        are left. The last position is always read: its prediction is asked for."""
        known = min(common_beginning(self.tokens, tokens), len(tokens) - 1) - 1
        self.cache.truncate(min(len(self), max(known, 0)))
        return len(self)

    def _read(self, x_1TD: Tensor, tokens: Sequence[int], fed: Draft = NOTHING) -> Tensor:
        model = self.reader.model
        e_1TD = model.embed(torch.tensor([tokens], device=model.device))
        self.cache.draft = fed
        try:
            return self.head(x_1TD, e_1TD, self.cache)
        finally:
            self.cache.draft = NOTHING

    def settle(self, tokens: Sequence[int]) -> None:
        """Nothing to take back: `propose` leaves only true features behind."""


def check_shape(vocabulary: DraftVocabulary, depth: int, width: int, size: int) -> None:
    for name, value in {"depth": depth, "width": width, "size": size}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
    if width > (U := len(vocabulary.ids_U)):
        raise ValueError(f"width={width}: the draft's vocabulary has only {U} tokens")
    if depth * width > MOST or size > MOST:
        raise ValueError(
            f"depth={depth}, width={width}, size={size}: depth * width and size go up to {MOST}; "
            "ask for a smaller tree"
        )


def _likeliest(nodes: list[Node], among: range, n: int) -> list[int]:
    """Of these nodes the n surest, in order. A node is never likelier than its parent, and equals
    stay in order: so among all nodes parents come first, and none is missing."""
    return sorted(among, key=lambda i: -nodes[i].log)[:n]


def _draft(nodes: list[Node], chosen: list[int]) -> Draft:
    """The chosen nodes, whose parents are among them, as a draft."""
    place = {ROOT: ROOT} | {node: i for i, node in enumerate(chosen)}
    return Draft([nodes[i].token for i in chosen], [place[nodes[i].parent] for i in chosen])
