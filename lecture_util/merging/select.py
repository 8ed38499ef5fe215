"""The k least of many numbers, without sorting them; and over a whole model, without holding it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .tensors import wide


def least(values: Tensor, k: int) -> Tensor:
    """Mask of the k least entries of the last axis; of equal ones, the first come first.

    So `~least(values, n - k)` are the k largest, the last of equal ones among them.
    Shapes: any (n last) -> the same, bool. Exactly k are True in each row.
    """
    n = values.shape[-1] if values.ndim else 1
    if k <= 0 or k >= n or not values.numel():
        return torch.full(values.shape, k > 0, dtype=torch.bool, device=values.device)
    rows = wide(values).detach().cpu().contiguous()
    rows = rows.reshape(-1, n).numpy()  # NumPy: four times torch's speed
    edge = np.partition(rows, k - 1, axis=-1)[:, k - 1 : k]
    mask = rows < edge
    room = k - np.count_nonzero(mask, axis=-1)
    ties = np.flatnonzero(rows == edge)
    row = ties // n
    turn = np.arange(len(ties)) - np.searchsorted(row, row)  # how many of its row came before
    mask.reshape(-1)[ties[turn < room[row]]] = True
    return torch.from_numpy(mask).view(values.shape).to(values.device)


def only(mask: Tensor, values: Tensor) -> Tensor:
    """The values where the mask is True, 0 elsewhere. Shapes: alike -> the same."""
    if values.is_cuda or values.dtype == torch.bfloat16:  # NumPy knows neither
        return values * mask
    kept = torch.empty_like(values)
    np.multiply(values.detach().numpy(), mask.numpy(), out=kept.numpy())  # torch widens the mask
    return kept


class Magnitudes:
    """The k-th largest magnitude among tensors seen one at a time, exactly, in two rounds.

    A float32's bits, read as a whole number, rise with its magnitude. The first round counts the
    upper 15 bits of each (after the sign), which says in which of 32,768 bins the k-th lies; the
    second counts the lower 16 bits of that bin's members. What is kept is counts, not numbers.
    Other dtypes are rounded to float32 first.
    """

    def __init__(self) -> None:
        self.upper = torch.zeros(1 << 15, dtype=torch.int64)
        self.lower = torch.zeros(1 << 16, dtype=torch.int64)
        self.bin: int | None = None
        self.rank = 0

    def count(self, tensor: Tensor) -> None:
        """First round: see a tensor."""
        self.upper += torch.bincount(_bits(tensor) >> 16, minlength=1 << 15)

    @property
    def total(self) -> int:
        return int(self.upper.sum())

    def narrow(self, k: int) -> None:
        """Between the rounds: find the bin of the k-th largest.

        Raises: ValueError unless 1 <= k <= total.
        """
        if not 1 <= k <= self.total:
            raise ValueError(f"k={k}: expected a rank from 1 to {self.total}, as many were seen")
        above = self.upper.flip(0).cumsum(0).flip(0)  # how many lie in this bin or a higher one
        self.bin = int((above >= k).nonzero().max())
        self.rank = k - int(above[self.bin] - self.upper[self.bin])

    def refine(self, tensor: Tensor) -> None:
        """Second round: see it again."""
        bits = _bits(tensor)
        inside = bits[(bits >> 16) == self.bin] & 0xFFFF
        self.lower += torch.bincount(inside, minlength=1 << 16)

    def kth(self) -> float:
        above = self.lower.flip(0).cumsum(0).flip(0)
        low = int((above >= self.rank).nonzero().max())
        return torch.tensor((self.bin << 16) | low, dtype=torch.int32).view(torch.float32).item()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().float().abs().flatten().contiguous().view(torch.int32).cpu()
