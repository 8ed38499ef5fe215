"""Selective batching: tokens of many sequences in one flat run, attention sequence by sequence.

Norms, linear layers and the head don't care which sequence a token belongs to: [3, D], [9, D] and
[5, D] are laid end to end as [17, D] and each weight is read once. Only attention must keep them
apart, and attention is the cache's business; so this cache takes the flat run, and the Transformer
stays as it is.

    k_LMPKH, v_LMPKH   M pages of P tokens a layer; a sequence's table lists its pages in order
    row of the run     one token; it stands at `positions_1T` in its sequence, and its key goes to
                       place `places_T`, which is page * P + slot, of the pool

With one page a sequence, as long as a sequence may ever get, this is contiguous allocation
(`slots`); with pages of 16 it is paged attention (`paged_cache`).

Source: Yu et al. 2022, Orca (OSDI 22), section 3.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lecture_util.model.attention import attend
from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError, TensorMismatch

from .request import Running
from .scheduler import Memory, Work


class PooledMemory(Memory, Protocol):
    """A `Memory` that says where in a pool its tokens are."""

    def table(self, sequence: Running) -> list[int]:
        """The pages of a sequence, in order."""

    def take_copies(self) -> list[tuple[int, int]]:
        """Pages to be copied, from and to, before the next tokens are written; then forgotten."""


@dataclass
class Frame:
    """Where the tokens of one forward go, and what each of them may look at.

    The first B rows are decoding, one token a sequence: tables_BJ and lengths_B are theirs, the new
    token counted. After them come `runs` of a prompt's tokens: (rows, table, tokens up to its end).
    """

    positions_1T: Tensor
    places_T: Tensor
    tables_BJ: Tensor
    lengths_B: Tensor
    runs: list[tuple[slice, list[int], int]] = field(default_factory=list)
    index: object = None  # what a subclass makes of the tables once, for all layers


class FlatCache:
    """Pools of pages, and the two ways to attend to them. A subclass reads them its own way."""

    def __init__(
        self,
        config: Config,
        memory: PooledMemory,
        pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        shape = (config.L, pages, page_size, config.K, config.H)
        self.k_LMPKH = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LMPKH = torch.zeros(shape, dtype=dtype, device=device)
        self.memory = memory
        self.frame: Frame | None = None
        self.model: weakref.ref | None = None  # whose keys it holds
        self.engine: weakref.ref | None = None  # the engine that lends it out

    @property
    def page_size(self) -> int:
        return self.k_LMPKH.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the pools, used or not."""
        return self.k_LMPKH.nbytes + self.v_LMPKH.nbytes

    def copy_pages(self) -> None:
        """Copy the pages that the memory wants copied, before the next forward writes to them."""
        for source, target in self.memory.take_copies():
            self.k_LMPKH[:, target] = self.k_LMPKH[:, source]
            self.v_LMPKH[:, target] = self.v_LMPKH[:, source]

    def load(self, work: Sequence[Work]) -> None:
        """Say whose tokens the next forward brings: rows of one token first, then longer runs."""
        self.copy_pages()
        P = self.page_size
        positions, places, tables, lengths, runs = [], [], [], [], []
        for w in work:
            table, end = self.memory.table(w.sequence), w.start + w.count
            if w.count < 1 or (w.count == 1 and runs):
                raise ValueError(
                    f"work of {w.count} tokens in place {len(tables) + len(runs)} of the run: put "
                    "work of one token first, longer work after it, and leave out empty work"
                )
            if end > len(table) * P:
                raise ValueError(
                    f"sequence {w.sequence.id} has room for {len(table) * P} tokens, not {end}: "
                    "grow() its memory first"
                )
            if w.count == 1:
                tables.append(table)
                lengths.append(end)
            else:
                runs.append((slice(len(positions), len(positions) + w.count), table, end))
            positions += range(w.start, end)
            places += [table[p // P] * P + p % P for p in range(w.start, end)]
        J = max(map(len, tables), default=1)
        device = self.k_LMPKH.device
        self.frame = Frame(
            torch.tensor([positions], device=device, dtype=torch.long),
            torch.tensor(places, device=device, dtype=torch.long),
            torch.tensor([t + [0] * (J - len(t)) for t in tables], device=device).view(-1, J),
            torch.tensor(lengths, device=device, dtype=torch.long),
            runs,
        )

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        T = 0 if self.frame is None else self.frame.places_T.numel()
        if tuple(shape) != (1, T):
            raise ShapeError(
                f"the tokens have shape {tuple(shape)} but load() announced a run of (1, {T})"
            )
        return self.frame.positions_1T

    def attend(self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        frame, k_MPKH, v_MPKH = self.frame, self.k_LMPKH[layer], self.v_LMPKH[layer]
        if k_BTKH.dtype != k_MPKH.dtype or k_BTKH.device != k_MPKH.device:
            raise TensorMismatch(
                f"the keys are {k_BTKH.dtype} on {k_BTKH.device} but the pool is {k_MPKH.dtype} on "
                f"{k_MPKH.device}: make the cache with dtype=model.dtype, device=model.device"
            )
        if k_BTKH.shape[2:] != k_MPKH.shape[2:]:
            raise ShapeError(
                f"the keys have (K, H)={tuple(k_BTKH.shape[2:])} but the pool has "
                f"{tuple(k_MPKH.shape[2:])}: make the cache with this model's config"
            )
        k_MPKH.flatten(0, 1).index_copy_(0, frame.places_T, k_BTKH[0])
        v_MPKH.flatten(0, 1).index_copy_(0, frame.places_T, v_BTKH[0])
        outs_TNH = []
        if B := frame.lengths_B.numel():
            outs_TNH.append(self.decode(q_BTNH[0, :B], k_MPKH, v_MPKH))
        for rows, table, S in frame.runs:
            if rows.stop - rows.start == S:  # a prompt from its beginning: all of it is here
                k_BSKH, v_BSKH = k_BTKH[:, rows], v_BTKH[:, rows]
            else:
                k_BSKH, v_BSKH = (self.read(p, table, S)[None] for p in (k_MPKH, v_MPKH))
            outs_TNH.append(attend(q_BTNH[:, rows], k_BSKH, v_BSKH)[0])
        return (outs_TNH[0] if len(outs_TNH) == 1 else torch.cat(outs_TNH))[None]

    def extend(self, T: int) -> None:
        """The scheduler keeps the count of what is computed."""

    def read(self, pool_MPKH: Tensor, table: list[int], S: int) -> Tensor:
        """The first S keys or values of a sequence, in order. -> (S, K, H)."""
        raise NotImplementedError

    def decode(self, q_BNH: Tensor, k_MPKH: Tensor, v_MPKH: Tensor) -> Tensor:
        """Attend from one new token each to the B sequences of `frame`. -> out_BNH."""
        raise NotImplementedError
