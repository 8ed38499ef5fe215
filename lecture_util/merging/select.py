"""The k least of many numbers, without sorting them; and over a whole model, without holding it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def least(values: Tensor, k: int) -> Tensor:
    """Mask of the k least entries of the last axis; of equal ones, the first come first.

    So `~least(values, n - k)` are the k largest, the last of equal ones among them.
    Shapes: any (n last) -> the same, bool. Exactly k are True in each row.
    """
    n = values.shape[-1] if values.ndim else 1
    if k <= 0 or k >= n:
        return torch.full(values.shape, k > 0, dtype=torch.bool, device=values.device)
    if values.ndim > 1 or values.is_cuda:
        edge = values.kthvalue(k, dim=-1, keepdim=True).values
        mask, ties = values < edge, values == edge
        room = k - mask.sum(-1, keepdim=True)
        return mask.logical_or_(ties & (ties.cumsum(-1) <= room))
    edge = np.partition(values.numpy(), k - 1)[k - 1].item()  # three times as fast as kthvalue
    mask = values < edge
    room = k - int(mask.sum())
    mask[(values == edge).nonzero().flatten()[:room]] = True
    return mask


class Magnitudes:
    """The k-th largest magnitude among tensors seen one at a time, exactly, in two rounds.

    A float32's bits, read as a whole number, rise with its magnitude. The first round counts the
    upper 15 bits of each (after the sign), which says in which of 32,768 bins the k-th lies; the
    second counts the lower 16 bits of that bin's members. What is kept is counts, not numbers.
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
        """Between the rounds: find the bin of the k-th largest, 1 <= k <= total."""
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


def kth_magnitude(tensors: Iterable[Tensor], k: int) -> float:
    """The k-th largest magnitude of all of them, which are gone through twice (pass a list)."""
    tensors = list(tensors)
    magnitudes = Magnitudes()
    for tensor in tensors:
        magnitudes.count(tensor)
    magnitudes.narrow(k)
    for tensor in tensors:
        magnitudes.refine(tensor)
    return magnitudes.kth()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().float().abs().flatten().contiguous().view(torch.int32).cpu()
