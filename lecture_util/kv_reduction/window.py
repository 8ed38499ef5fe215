"""Two stores for one layer's keys and values: `Slab` keeps every token, `Ring` the last few.

Both work in two beats. `take` is given a step's new keys and values and returns all that its
queries may look at. `keep`, once every layer has seen the step, makes the new tokens part of the
past. A step that fails between the two leaves the past as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lecture_util.model.attention import causal_mask
from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError, TensorMismatch

Seen = tuple[Tensor, Tensor, Tensor | None]  # k_BSKH, v_BSKH and mask_BTS, as `attend` takes them


class Slab:
    """Slot s of a row holds position s: KVCache's slab, of one layer."""

    def __init__(self, config: Config, B: int, slots: int, dtype, device) -> None:
        shape = (B, slots, config.K, config.H)
        self.k_BSKH = torch.zeros(shape, dtype=dtype, device=device)
        self.v_BSKH = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held, used or not."""
        return self.k_BSKH.nbytes + self.v_BSKH.nbytes

    def take(self, k_BTKH: Tensor, v_BTKH: Tensor, lengths: list[int]) -> Seen:
        self.check(k_BTKH)
        T, S = k_BTKH.shape[1], max(lengths) + k_BTKH.shape[1]
        rows_B1, positions_BT = _rows_and_positions(lengths, T, k_BTKH.device)
        self.k_BSKH[rows_B1, positions_BT] = k_BTKH  # past every row's length: not seen if it fails
        self.v_BSKH[rows_B1, positions_BT] = v_BTKH
        mask_BTS = None if min(lengths) == max(lengths) else causal_mask(positions_BT, S)
        return self.k_BSKH[:, :S], self.v_BSKH[:, :S], mask_BTS

    def keep(self, lengths: list[int]) -> None:
        pass  # they are in their slots already

    def oldest_needed(self, length: int) -> int:
        return 0

    def check(self, k_BTKH: Tensor) -> None:
        held = self.k_BSKH
        if k_BTKH.dtype != held.dtype or k_BTKH.device != held.device:
            raise TensorMismatch(
                f"the keys are {k_BTKH.dtype} on {k_BTKH.device} but the cache is {held.dtype} "
                f"on {held.device}: make the cache with model.dtype and model.device"
            )
        if k_BTKH.shape[2:] != held.shape[2:]:
            raise ShapeError(
                f"the keys have (K, H)={tuple(k_BTKH.shape[2:])} but the cache has "
                f"{tuple(held.shape[2:])}: make it with this model's config"
            )


class Ring(Slab):
    """The last R tokens of a layer that sees W: position p is in slot p % R.

    Of W = 4 the token at position 9 sees positions 6 to 9. Three of them are past when it comes,
    the fourth is itself, so W-1 is all a ring must hold between steps:

        R = 3, after positions 0..8   slot   0  1  2       position 9 goes to slot 9 % 3 = 0
                                      holds  6  7  8       and overwrites 6, which 10 won't see

    slack: hold so many more, R = W-1+slack. Tokens can be taken back (`truncate`) as long as what
    the window then needs has not been overwritten, which is sure for `slack` of them.

    A step of T tokens attends over the past it needs and all T, as many as there are, before any
    is dropped: within a long prompt, too, every query sees its full window.

    Bytes: 2*B*R*K*H numbers, whatever the context; while a step runs, its T tokens besides.
    """

    def __init__(self, config: Config, B: int, W: int, slack: int, capacity: int, dtype, device):
        super().__init__(config, B, min(W - 1 + slack, capacity), dtype, device)
        self.W, self.slack = W, slack
        self.oldest = [0] * B  # of each row, the oldest position not overwritten yet
        self.new: tuple[Tensor, Tensor] | None = None  # what `keep` will write

    @property
    def R(self) -> int:
        return self.k_BSKH.shape[1]

    def take(self, k_BTKH: Tensor, v_BTKH: Tensor, lengths: list[int]) -> Seen:
        self.check(k_BTKH)
        T, past = k_BTKH.shape[1], min(self.W - 1, max(lengths))
        self.new = None
        if last := min(T, self.R):  # copies, so that the step's own tensors can be freed
            self.new = (k_BTKH[:, -last:].clone(), v_BTKH[:, -last:].clone())
        if past == 0:
            k_BSKH, v_BSKH, before_BP = k_BTKH, v_BTKH, None
        elif min(lengths) == max(lengths):  # the same slots in all rows, in one run or two
            start = (lengths[0] - past) % self.R
            runs = slice(start, start + past), slice(max(0, start + past - self.R))
            k_BSKH = torch.cat((*(self.k_BSKH[:, run] for run in runs), k_BTKH), dim=1)
            v_BSKH = torch.cat((*(self.v_BSKH[:, run] for run in runs), v_BTKH), dim=1)
        else:
            starts = [length - past for length in lengths]  # below 0 in rows that are shorter
            rows_B1, before_BP = _rows_and_positions(starts, past, k_BTKH.device)
            slots_BP = before_BP % self.R
            k_BSKH = torch.cat((self.k_BSKH[rows_B1, slots_BP], k_BTKH), dim=1)
            v_BSKH = torch.cat((self.v_BSKH[rows_B1, slots_BP], v_BTKH), dim=1)
        if past + T <= self.W and min(lengths) >= past:
            return k_BSKH, v_BSKH, None  # nothing to hide but the future
        # Masks see distances only: count every row's positions from its oldest key here.
        queries_1T = torch.arange(past, past + T, device=k_BTKH.device)[None]
        mask_BTS = causal_mask(queries_1T, past + T, self.W)
        if min(lengths) < past:
            exists_BS = torch.cat((before_BP >= 0, before_BP.new_ones(len(lengths), T) > 0), dim=1)
            mask_BTS = mask_BTS & exists_BS[:, None]
        return k_BSKH, v_BSKH, mask_BTS

    def keep(self, lengths: list[int]) -> None:
        """Write the step's last tokens; rows now have these lengths."""
        if self.new is not None:
            k_BTKH, v_BTKH = self.new
            T = k_BTKH.shape[1]
            starts = [length - T for length in lengths]
            rows_B1, positions_BT = _rows_and_positions(starts, T, k_BTKH.device)
            self.k_BSKH[rows_B1, positions_BT % self.R] = k_BTKH
            self.v_BSKH[rows_B1, positions_BT % self.R] = v_BTKH
            self.new = None
        pairs = zip(self.oldest, lengths, strict=True)
        self.oldest = [max(oldest, length - self.R) for oldest, length in pairs]

    def oldest_needed(self, length: int) -> int:
        """The first position that the token after so many will look back to."""
        return max(0, length - (self.W - 1))

    def held(self, row: int, length: int) -> Tensor:
        """The keys of one row in the order of their positions, self.oldest[row] to length - 1."""
        positions_P = torch.arange(self.oldest[row], length, device=self.k_BSKH.device)
        return self.k_BSKH[row, positions_P % max(1, self.R)]


def _rows_and_positions(starts: list[int], T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row numbers (B, 1) and the T positions (B, T) from each row's start on: an index of slots."""
    starts_B1 = torch.tensor(starts, device=device)[:, None]
    rows_B1 = torch.arange(len(starts), device=device)[:, None]
    return rows_B1, starts_B1 + torch.arange(T, device=device)
