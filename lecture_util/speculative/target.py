"""The model as a function from tokens to logits, which keeps what it has already read.

Drafting and verification see only such functions. On toy vocabularies one is made from a table
(`Table`); on the real model it is `Reader`, with a cache that can hold a tree of guesses for one
forward and then keep the path that was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lecture_util.model.kv_cache import KVCache
from lecture_util.model.transformer import Transformer

from .draft import NOTHING, ROOT, Draft


class Target(Protocol):
    """What verification needs of a model."""

    def __call__(self, tokens: Sequence[int], draft: Draft = NOTHING) -> Tensor:
        """logits_MV of the token after the sequence (row 0) and after node i (row i + 1)."""

    def keep(self, path: Sequence[int]) -> None:
        """Of the guesses of the last call only these nodes, from a first guess down, came true."""


class Table:
    """A target without memory: a plain function from a sequence to the logits of its next token."""

    def __init__(self, logits_of: Callable[[list[int]], Tensor]) -> None:
        self.logits_of = logits_of

    def __call__(self, tokens: Sequence[int], draft: Draft = NOTHING) -> Tensor:
        guesses = [[draft.tokens[i] for i in draft.path(node)] for node in range(ROOT, len(draft))]
        return torch.stack([self.logits_of([*tokens, *guess]) for guess in guesses])

    def keep(self, path: Sequence[int]) -> None:
        pass


class TreeCache(KVCache):
    """A KVCache, one row, whose newest tokens may be alternatives to one another.

    Slots follow the order of the tokens, positions follow their depth: two guesses of the same
    token stand at one position in two slots, and neither sees the other.
    """

    draft = NOTHING  # the newest tokens, held or in the forward under way, as a tree
    mask_BTS: Tensor | None = None  # of the forward under way; None for a chain

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        positions_BT, self.mask_BTS = super().positions(shape, device), None
        if self.draft.is_chain:
            return positions_BT
        T, M = shape[-1], len(self.draft)
        S, new = self.lengths[0] + T, min(T, M)  # of the T, `new` are of the draft
        mask_TS = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
        mask_TS[T - new :, S - M :] = tree_mask(self.draft, device)[-new:]
        self.mask_BTS = mask_TS[None]
        depths_M = torch.tensor(self.draft.depths[-new:], device=device)
        return torch.cat((positions_BT[:, : T - new], (S - M - 1 + depths_M)[None]), dim=1)

    def mask(self, T: int, S: int, device: torch.device) -> Tensor | None:
        """What came before the draft, then ancestors and the token itself. Every layer asks; it was
        made once, with the positions."""
        return self.mask_BTS

    def keep(self, before: int, path: Sequence[int]) -> None:
        """Hold the first `before` tokens and, right after them, the nodes of `path`."""
        if list(path) != list(range(len(path))):
            slots_P = before + torch.tensor(path, device=self.k_LBSKH.device)
            new = slice(before, before + len(path))
            for held in (self.k_LBSKH, self.v_LBSKH):
                held[:, :, new] = held[:, :, slots_P]  # the right side is a copy
        self.truncate(before + len(path))


def tree_mask(draft: Draft, device: torch.device | str | None = None) -> Tensor:
    """mask_MM: node m sees itself and the nodes it follows, and none of the alternatives."""
    mask_MM = torch.eye(len(draft), dtype=torch.bool, device=device)
    for node, parent in enumerate(draft.parents):
        if parent != ROOT:
            mask_MM[node] |= mask_MM[parent]
    return mask_MM


class Reader:
    """A Transformer that reads one growing sequence, and takes back what did not come true.

    It knows which tokens it holds. Called with another sequence, it goes back to the longest common
    beginning and reads on from there: rolling back and catching up are one rule. The features of
    all it holds are kept too (Medusa and EAGLE draft from them).

    capacity: most tokens of the sequence and of one draft together.
    """

    def __init__(self, model: Transformer, capacity: int) -> None:
        self.model = model
        self.cache = TreeCache(model.config, 1, capacity, model.dtype, model.device)
        self.tokens: list[int] = []  # what the cache holds
        self.features_SD = torch.zeros(
            capacity, model.config.D, dtype=model.dtype, device=model.device
        )
        self._drafted = (0, NOTHING)

    def __len__(self) -> int:
        """Tokens held: the length of the cache."""
        return len(self.tokens)

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], draft: Draft = NOTHING) -> Tensor:
        """Raises: ValueError for an empty sequence or a token that the model doesn't know;
        CacheFull beyond the capacity."""
        if not tokens:
            raise ValueError("the sequence is empty: a model continues at least one token")
        V = self.model.config.V
        for what, read in (("the sequence", tokens), ("the draft", draft.tokens)):
            if not 0 <= min(read, default=0) <= max(read, default=0) < V:
                raise ValueError(
                    f"{what} holds tokens {min(read)} to {max(read)} but the vocabulary is "
                    f"0..{V - 1}: model, draft and tokenizer must belong together"
                )
        self.rewind(tokens[:-1])  # the last token is always read: its logits are asked for
        before, end = len(self), len(tokens)
        self.cache.draft = draft
        try:
            new_1T = torch.tensor(
                [[*tokens[before:], *draft.tokens]], device=self.model.device, dtype=torch.long
            )
            x_TD = self.model.features(new_1T, self.cache)[0]
        except BaseException:
            self.cache.truncate(before)
            raise
        finally:
            self.cache.draft = NOTHING
        self.features_SD[before : before + len(x_TD)] = x_TD
        self.tokens = [*tokens, *draft.tokens]
        self._drafted = (end, draft)
        return self.model.head(x_TD[end - before - 1 :])

    def awaits(self, tokens: Sequence[int]) -> bool:
        """Has all been read but the newest token? Then there is a feature to draft from."""
        return bool(self.tokens) and self.tokens == list(tokens[:-1])

    def keep(self, path: Sequence[int]) -> None:
        """Raises: ValueError unless `path` is one, in the draft of the last call."""
        end, draft = self._drafted
        nodes = range(len(draft))
        if path and (path[-1] not in nodes or list(path) != draft.path(path[-1])):
            raise ValueError(
                f"keep({list(path)}): expected nodes of the last draft, of {len(draft)} guesses, "
                "from a first guess down, each the child of the one before"
            )
        self.cache.keep(end, path)
        if path:
            slots_P = end + torch.tensor(path, device=self.features_SD.device)
            self.features_SD[end : end + len(path)] = self.features_SD[slots_P]
        self.tokens = self.tokens[:end] + [draft.tokens[node] for node in path]
        self._drafted = (len(self), NOTHING)

    def rewind(self, tokens: Sequence[int]) -> None:
        """Forget what is held beyond the longest common beginning with `tokens`."""
        if self._drafted[1]:  # a draft nobody settled: its slots are no sequence
            self.keep([])
        common = common_beginning(self.tokens, tokens)
        self.tokens = self.tokens[:common]
        self.cache.truncate(common)
        self._drafted = (common, NOTHING)


def common_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share before they first differ."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
