"""Contiguous memory: each running sequence rents a row as long as a sequence may ever get.

Simple and fast to read, and wasteful: nobody knows in advance where a text will end, so most of a
row stays empty, and no row can be lent twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from lecture_util.model.attention import attend
from lecture_util.model.config import Config

from .flat import FlatCache
from .request import Running
from .scheduler import Work


class Slots:
    """Bookkeeping of `rows` rows of `capacity` tokens. A `Memory` for the scheduler."""

    def __init__(self, rows: int, capacity: int) -> None:
        for name, value in (("rows", rows), ("capacity", capacity)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
        self.rows, self.capacity = rows, capacity
        self.free = list(range(rows))
        self.rented: dict[int, int] = {}  # sequence id -> row
        self.lengths: dict[int, int] = {}
        self.copies: list[tuple[int, int]] = []

    def fits(self, tokens: int) -> bool:
        return tokens <= self.capacity

    def begin(self, sequence: Running) -> int | None:
        family = (sequence, *sequence.followers)
        if any(one.id in self.rented for one in family):
            raise ValueError(f"sequence {sequence.id} has begun already: release() it first")
        if len(self.free) < len(family):
            return None
        for one in family:
            self.rented[one.id] = heapq.heappop(self.free)
        self.lengths[sequence.id] = 0
        return 0

    def grow(self, sequence: Running, tokens: int) -> bool:
        if tokens > self.capacity:
            return False
        self.lengths[sequence.id] = max(tokens, self.lengths[sequence.id])
        return True

    def fork(self, sequence: Running, child: Running) -> None:
        self.copies.append((self.rented[sequence.id], self.rented[child.id]))
        self.lengths[child.id] = self.lengths[sequence.id]

    def commit(self, sequence: Running) -> None:
        pass

    def release(self, sequence: Running) -> None:
        for one in (sequence, *sequence.followers):
            self.lengths.pop(one.id, None)
            if (row := self.rented.pop(one.id, None)) is not None:
                heapq.heappush(self.free, row)

    def held(self) -> tuple[int, int]:
        return sum(self.lengths.values()), len(self.rented) * self.capacity

    def table(self, sequence: Running) -> list[int]:
        return [self.rented[sequence.id]]

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self.copies = self.copies, []
        return copies


class SlotCache(FlatCache):
    """Keys and values of `rows` sequences, each in a row of its own of `capacity` tokens.

    Bytes: 2*L*rows*capacity*K*H numbers, allocated at once.
    """

    def __init__(
        self,
        config: Config,
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, Slots(rows, capacity), rows, capacity, dtype, device)

    def load(self, work: Sequence[Work]) -> None:
        """A row that begins anew is wiped: a mask hides the last tenant's keys, but not its NaN."""
        super().load(work)
        for w in work:
            if w.start == 0:
                (row,) = self.memory.table(w.sequence)
                self.k_LMPKH[:, row] = 0
                self.v_LMPKH[:, row] = 0

    def read(self, pool_MPKH: Tensor, table: list[int], S: int) -> Tensor:
        return pool_MPKH[table[0], :S]

    def decode(self, q_BNH: Tensor, k_MPKH: Tensor, v_MPKH: Tensor) -> Tensor:
        """All rows of the slab at once, as views: those that don't decode see one old key each."""
        rows_B, lengths_B = self.frame.tables_BJ[:, 0], self.frame.lengths_B
        M, S = int(rows_B.max()) + 1, int(lengths_B.max())
        q_M1NH = q_BNH.new_zeros(M, 1, *q_BNH.shape[1:])
        q_M1NH[rows_B, 0] = q_BNH
        lengths_M = lengths_B.new_ones(M).index_copy_(0, rows_B, lengths_B)
        mask_M1S = torch.arange(S, device=q_BNH.device) < lengths_M[:, None, None]
        return attend(q_M1NH, k_MPKH[:M, :S], v_MPKH[:M, :S], mask_M1S)[rows_B, 0]
