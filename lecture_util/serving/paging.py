"""Paged memory: sequences grow page by page, share what they have in common, and fork for free."""

from __future__ import annotations

import torch
from torch import Tensor

from lecture_util.kernels.paged_attention import gather_pages, page_index, paged_attention_fused
from lecture_util.model.config import Config

from .blocks import Blocks, OutOfPages, Table
from .flat import FlatCache
from .request import Running


class Pages:
    """A `Memory` for the scheduler over a block allocator."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.tables: dict[int, Table] = {}  # by sequence id
        self.copies: list[tuple[int, int]] = []

    def fits(self, tokens: int) -> bool:
        return self.blocks.pages_for(tokens) <= self.blocks.num_pages

    def begin(self, sequence: Running) -> int | None:
        """Admit only what can be computed, with one token to spare: else it would be put back."""
        if sequence.id in self.tables:
            raise ValueError(f"sequence {sequence.id} has begun already: release() it first")
        blocks = self.blocks
        table = blocks.begin(sequence.tokens, sequence.request.space)
        need = blocks.pages_for(min(len(sequence.tokens) + 1, sequence.longest))
        if need - len(table.pages) > blocks.available:
            blocks.release(table)
            return None
        self.tables[sequence.id] = table
        return len(table)

    def grow(self, sequence: Running, tokens: int) -> bool:
        table = self.tables[sequence.id]
        try:
            self.copies += self.blocks.append(table, sequence.tokens[len(table) : tokens])
        except OutOfPages:
            return False
        return True

    def fork(self, sequence: Running, child: Running) -> None:
        self.tables[child.id] = self.blocks.fork(self.tables[sequence.id])

    def commit(self, sequence: Running) -> None:
        self.blocks.commit(self.tables[sequence.id], sequence.computed)

    def release(self, sequence: Running) -> None:
        if (table := self.tables.pop(sequence.id, None)) is not None:
            self.blocks.release(table)

    def held(self) -> tuple[int, int]:
        """A page that several tables hold is counted once."""
        P, filled = self.blocks.page_size, {}
        for table in self.tables.values():
            for j, page in enumerate(table.pages):
                filled[page] = max(filled.get(page, 0), min(P, len(table) - j * P))
        return sum(filled.values()), len(filled) * P

    def table(self, sequence: Running) -> list[int]:
        return self.tables[sequence.id].pages

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self.copies = self.copies, []
        return copies


class PagedCache(FlatCache):
    """Keys and values in `num_pages` pages of `page_size` tokens, lent to whoever needs them.

    Bytes: 2*L*num_pages*page_size*K*H numbers, and one page that catches what padded rows write.
    """

    def __init__(
        self,
        config: Config,
        num_pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        prefix_caching: bool = True,
    ) -> None:
        self.blocks = Blocks(num_pages, page_size, prefix_caching=prefix_caching)
        super().__init__(config, Pages(self.blocks), num_pages + 1, page_size, dtype, device)

    def read(self, pool_MPKH: Tensor, table: list[int], S: int) -> Tensor:
        pages_J = torch.tensor(table, device=pool_MPKH.device)
        return gather_pages(pool_MPKH, pages_J, S)

    def decode(self, q_BNH: Tensor, k_MPKH: Tensor, v_MPKH: Tensor) -> Tensor:
        frame = self.frame
        if frame.index is None and not q_BNH.is_cuda:  # the kernel needs none
            frame.index = page_index(frame.tables_BJ, frame.lengths_B, *k_MPKH.shape[:2])
        return paged_attention_fused(
            q_BNH, k_MPKH, v_MPKH, frame.tables_BJ, frame.lengths_B, frame.index
        )
