"""Medusa: heads on the frozen model that guess the tokens after next, all at once.

Head k reads the same last feature as the model's own head and guesses k tokens further on. The
guesses of one head don't know which of the others' came true, so several of each are combined into
a tree, and one forward verifies the whole of it.

Source: Cai et al. 2024, arXiv:2401.10774 (Medusa-1: only the heads are trained).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.model.train import IGNORE

from .draft import NOTHING, ROOT, Draft
from .target import Reader
from .verify import Chance
from .vocabulary import DraftVocabulary

RankPath = tuple[int, ...]  # (0, 2): the likeliest of head 1, then the third likeliest of head 2


class MedusaHeads(nn.Module):
    """x + SiLU(W x + b) for each head; with W = 0 at first, each begins as the model's own head.

    Shapes: x (..., D) -> (..., heads, D), to be read by a `DraftVocabulary`.
    """

    def __init__(self, D: int, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(D, heads * D)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., None, :] + nnf.silu(self.linear(x)).unflatten(-1, (self.heads, -1))


def medusa_loss(
    heads: MedusaHeads, vocabulary: DraftVocabulary, x_BD: Tensor, targets_BK: Tensor
) -> Tensor:
    """Cross-entropy of each head's guess, later heads weighted by 0.8 less each (the paper's).

    targets_BK: for head k the token k + 1 after the feature's; what lies outside the draft's
                vocabulary, or past the text, as IGNORE.
    """
    logits_BKU = vocabulary(heads(x_BD))
    losses_K = [
        nnf.cross_entropy(logits_BU.float(), targets_B, ignore_index=IGNORE)
        for logits_BU, targets_B in zip(logits_BKU.unbind(1), targets_BK.unbind(1), strict=True)
    ]
    return sum(0.8**k * loss for k, loss in enumerate(losses_K))


def best_tree(accuracy_KR: Tensor, size: int) -> list[RankPath]:
    """The tree of `size` guesses that accepts most, if heads were right independently.

    accuracy_KR: how often head k's guess of rank r is right. The value of a node is the product
    along its path, which a child never exceeds: so taking the best node next, again and again, is
    optimal. Parents come before children.

    Raises: ValueError if the heads and ranks don't give so many nodes, or accuracies aren't (K, R)
            and of 0 to 1.
    """
    if not isinstance(accuracy_KR, Tensor) or accuracy_KR.ndim != 2 or not accuracy_KR.numel():
        what = getattr(accuracy_KR, "shape", type(accuracy_KR).__name__)
        raise ValueError(f"accuracy_KR is {what}: expected a tensor (K, R), heads by ranks")
    if not ((accuracy_KR >= 0) & (accuracy_KR <= 1)).all():  # NaN is neither
        raise ValueError(
            f"accuracy_KR goes from {float(accuracy_KR.min()):.4g} to "
            f"{float(accuracy_KR.max()):.4g}: expected shares of right guesses, 0 to 1"
        )
    K, R = accuracy_KR.shape
    most = sum(R**k for k in range(1, K + 1))
    if type(size) is not int or not 1 <= size <= most:
        raise ValueError(f"size={size!r}: {K} heads of {R} ranks give 1 to {most} nodes")
    accuracy = accuracy_KR.tolist()
    open_nodes = [(-accuracy[0][r], (r,)) for r in range(R)]  # the smallest is the best
    heapq.heapify(open_nodes)
    tree: list[RankPath] = []
    while len(tree) < size:
        value, path = heapq.heappop(open_nodes)  # of equals, the lower ranks
        tree.append(path)
        if len(path) < K:
            for r in range(R):
                heapq.heappush(open_nodes, (value * accuracy[len(path)][r], (*path, r)))
    return tree


class MedusaDrafter:
    """A tree of guesses from the feature of the last token that the target has read.

    tree: paths of ranks, as from `best_tree`; a path's beginnings must be in it too.

    Raises: ValueError for a path deeper than there are heads, or without its beginning.
    """

    def __init__(
        self,
        reader: Reader,
        heads: MedusaHeads,
        vocabulary: DraftVocabulary,
        tree: Sequence[RankPath],
    ) -> None:
        self.reader, self.heads, self.vocabulary = reader, heads, vocabulary
        self.tree = sorted(map(tuple, tree), key=len)
        self.parents = []
        for path in self.tree:
            if not 1 <= len(path) <= heads.heads:
                raise ValueError(
                    f"path {path} is {len(path)} deep but there are {heads.heads} heads: paths "
                    f"have 1 to {heads.heads} ranks"
                )
            if not all(type(r) is int and 0 <= r < len(vocabulary.ids_U) for r in path):
                raise ValueError(f"path {path}: ranks go from 0 to {len(vocabulary.ids_U) - 1}")
            if len(path) > 1 and path[:-1] not in self.tree:
                raise ValueError(f"path {path} without {path[:-1]}: give every path's beginnings")
            self.parents.append(ROOT if len(path) == 1 else self.tree.index(path[:-1]))
        if len(set(self.tree)) != len(self.tree):
            raise ValueError("a path is in the tree twice")
        self.ranks = 1 + max((r for path in self.tree for r in path), default=0)

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], room: int, chance: Chance) -> Draft:
        if room < 1 or not self.reader.awaits(tokens):
            return NOTHING
        x_D = self.reader.features_SD[len(self.reader) - 1]
        guesses_KR = self.vocabulary.top(self.heads(x_D), self.ranks)[0].tolist()
        guesses = [guesses_KR[len(path) - 1][path[-1]] for path in self.tree]
        return Draft(guesses, self.parents).cut(room)

    def settle(self, tokens: Sequence[int]) -> None:
        pass
