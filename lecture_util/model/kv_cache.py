"""Where keys and values wait between steps.

A cache is a thing that attends. The Transformer asks where the new tokens stand (`positions`),
hands every layer's q, k, v to `attend`, and says when all layers are done (`extend`). How keys are
stored is the cache's own business, so a ring, a page table or a latent can stand in for these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Protocol

import torch
from torch import Tensor

from .attention import attend, causal_mask
from .config import Config
from .shapes import ShapeError, TensorMismatch


class CacheFull(ValueError):
    """The cache has no room for the tokens of this step."""


class Cache(Protocol):
    """What the Transformer needs of a cache."""

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Where the next tokens, of shape (B, T), will stand in their sequences."""

    def attend(self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Take in one layer's new keys and values; return out_BTNH, attention over all so far."""

    def extend(self, T: int) -> None:
        """All layers have seen the T new tokens: they are part of the sequence now."""


class NoCache:
    """Attend within the tokens given and keep nothing: training, scoring, the naive loop."""

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        return torch.arange(shape[-1], device=device).expand(shape)

    def attend(self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        return attend(q_BTNH, k_BTKH, v_BTKH)

    def extend(self, T: int) -> None:
        pass


class KVCache:
    """One preallocated slab for keys and one for values; slot s of a row holds its position s.

    Rows may differ in length. Slots past a row's length hold leftovers that no query sees, since a
    query at position p looks at slots 0..p only; the next tokens overwrite them. So a batch of
    unequal prompts is padded on the right, run once, and truncated to its true lengths.

    Bytes: 2*L*B*S*K*H numbers, allocated at once for `capacity` S.
    """

    def __init__(
        self,
        config: Config,
        B: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if not (isinstance(B, int) and isinstance(capacity, int) and B >= 1 and capacity >= 1):
            raise ValueError(
                f"KVCache(B={B!r}, capacity={capacity!r}): both must be whole and at least 1"
            )
        shape = (config.L, B, capacity, config.K, config.H)
        self.k_LBSKH = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LBSKH = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * B

    @property
    def capacity(self) -> int:
        return self.k_LBSKH.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held, used or not."""
        return self.k_LBSKH.nbytes + self.v_LBSKH.nbytes

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Raises: ShapeError if the batch differs; CacheFull, with nothing written, if too long."""
        return next_positions(self.lengths, self.capacity, shape, device)

    def attend(self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        B, T = k_BTKH.shape[:2]
        k_BSKH, v_BSKH = self.k_LBSKH[layer], self.v_LBSKH[layer]
        if k_BTKH.dtype != k_BSKH.dtype or k_BTKH.device != k_BSKH.device:
            raise TensorMismatch(
                f"the keys are {k_BTKH.dtype} on {k_BTKH.device} but the cache is {k_BSKH.dtype} "
                f"on {k_BSKH.device}: make it with KVCache(..., model.dtype, model.device)"
            )
        if k_BTKH.shape[2:] != k_BSKH.shape[2:]:
            raise ShapeError(
                f"the keys have (K, H)={tuple(k_BTKH.shape[2:])} but the cache has "
                f"{tuple(k_BSKH.shape[2:])}: make it with this model's config"
            )
        start = self.lengths[0]
        if all(length == start for length in self.lengths):
            k_BSKH[:, start : start + T] = k_BTKH
            v_BSKH[:, start : start + T] = v_BTKH
            S = start + T
            return attend(q_BTNH, k_BSKH[:, :S], v_BSKH[:, :S], self.mask(T, S, k_BTKH.device))
        positions_BT = self.positions(k_BTKH.shape[:2], k_BTKH.device)
        rows_B1 = torch.arange(B, device=k_BTKH.device)[:, None]
        k_BSKH[rows_B1, positions_BT] = k_BTKH
        v_BSKH[rows_B1, positions_BT] = v_BTKH
        S = max(self.lengths) + T
        return attend(q_BTNH, k_BSKH[:, :S], v_BSKH[:, :S], causal_mask(positions_BT, S))

    def mask(self, T: int, S: int, device: torch.device) -> Tensor | None:
        """mask_BTS where T new tokens don't simply see all before them; rows of one length only."""
        return None

    def extend(self, T: int) -> None:
        self.lengths = [length + T for length in self.lengths]

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget all but the first tokens, of every row or row by row.

        Raises: ValueError if a row would grow, or the number of rows differs.
        """
        self.lengths = shortened(self.lengths, lengths)


def next_positions(
    lengths: list[int], capacity: int, shape: torch.Size, device: torch.device
) -> Tensor:
    """Where tokens of shape (B, T) will stand in rows that hold `lengths` tokens.

    Raises: ShapeError if the batch differs; CacheFull if a row would outgrow `capacity`.
    """
    B, T = shape
    if len(lengths) != B:
        raise ShapeError(
            f"tokens have B={B} rows but the cache has {len(lengths)}: make the cache with B={B}"
        )
    if (need := max(lengths) + T) > capacity:
        raise CacheFull(
            f"{T} new tokens after {max(lengths)} need {need} slots but the cache has "
            f"{capacity}: allocate a larger capacity or truncate() first"
        )
    starts_B1 = torch.tensor(lengths, device=device)[:, None]
    return starts_B1 + torch.arange(T, device=device)


def shortened(held: list[int], lengths: int | Sequence[int]) -> list[int]:
    """The lengths that truncate() asks for, one a row, of rows that hold `held` tokens.

    Raises: ValueError if a row would grow, or the number of rows differs.
    """
    one = isinstance(lengths, str) or not isinstance(lengths, Sequence)
    try:
        wanted = [index(n) for n in ([lengths] * len(held) if one else lengths)]
    except TypeError as error:
        raise TypeError(
            f"truncate() got {lengths!r}: expected a whole number, or one for each row"
        ) from error
    if len(wanted) != len(held):
        raise ValueError(f"truncate() got {len(wanted)} lengths for {len(held)} rows")
    for row, (new, old) in enumerate(zip(wanted, held, strict=True)):
        if not 0 <= new <= old:
            raise ValueError(
                f"truncate() asked for length {new} in row {row}, which holds {old} tokens: "
                f"choose 0 to {old}"
            )
    return wanted
