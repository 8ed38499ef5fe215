"""NF4: four bits a weight, on levels where a normal distribution puts equal shares; and its layer.

A block of 64 weights shares one fp32 scale, its largest magnitude. Double quantization stores those
scales in 8 bits too, 256 of them to a scale of their own: 4 + 8/64 + 32/(64*256) = 4.127 bits.
Source: Dettmers et al. 2023, arXiv:2305.14314. Bit for bit what bitsandbytes stores on a CPU.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.kernels.int4_linear import int4_linear_fused
from lecture_util.model.shapes import check_shapes

from .layer import QuantizedLinear

CHUNK = 1 << 18  # weights rounded at a time, so that what is in between stays in the CPU's cache
STEPS = 65536  # into which bitsandbytes cuts -1..1 to round a scale to its 8-bit book


@cache
def nf4_levels() -> Tensor:
    """The 16 levels: 7 quantiles below zero, zero, 8 above, over the largest of them.

    Zero has a level of its own, so padding and pruned weights stay exactly zero. The outermost
    probability is the mean of 1 - 1/32 and 1 - 1/30, written with the digits bitsandbytes uses.
    """
    outermost = 0.9677083

    def quantiles(count: int) -> Tensor:  # of probabilities evenly spaced down to 1/2, which is 0
        probabilities = torch.linspace(outermost, 0.5, count + 1)[:-1]
        return torch.special.ndtri(probabilities.double()).float()

    levels = torch.cat([-quantiles(7), torch.zeros(1), quantiles(8).flip(0)])
    return levels / levels.max()


NF4_LEVELS = nf4_levels()


def quantize_nf4(w: Tensor, blocksize: int = 64) -> tuple[Tensor, Tensor]:
    """Round each weight to the nearest level times its block's largest magnitude.

    Blocks run over the flattened tensor, across rows; the last may be shorter. Halfway between two
    levels goes down. Two codes a byte, the first in the high nibble.

    Shapes: w of n elements -> packed uint8 (ceil(n / 2),), absmax fp32 (ceil(n / blocksize),).
    Raises: ValueError for NaN or infinite weights, no weights, a block size below 1.
            TypeError for other dtypes than fp32, bf16 and fp16.
    """
    _check(w, blocksize)
    flat = w.detach().reshape(-1).float()
    full = len(flat) - len(flat) % blocksize
    rows = max(1, CHUNK // blocksize)
    codes = torch.empty(len(flat) + len(flat) % 2, dtype=torch.uint8, device=w.device)
    absmax = torch.empty(math.ceil(len(flat) / blocksize), device=w.device)
    for start in range(0, full, rows * blocksize):
        blocks = flat[start : min(start + rows * blocksize, full)].view(-1, blocksize)
        scale = blocks.abs().amax(dim=1)
        absmax[start // blocksize :][: len(scale)] = scale
        scaled = blocks * (1 / scale.clamp(min=1e-38))[:, None]  # a block of zeros: 0 * 1e38
        codes[start:][: scaled.numel()] = _nearest(scaled).flatten()
    if full < len(flat):  # bitsandbytes divides here, and clamps what it stores
        absmax[-1] = flat[full:].abs().max().clamp(min=1e-38)
        codes[full : len(flat)] = _nearest(flat[full:] / absmax[-1])
    codes[len(flat) :] = 7  # the code of zero fills the last byte
    if not absmax.isfinite().all():
        raise ValueError(
            "w holds NaN or infinite weights: no scale fits them; mend the checkpoint first"
        )
    return codes[::2] << 4 | codes[1::2], absmax


def dequantize_nf4(
    packed: Tensor,
    absmax: Tensor,
    shape: torch.Size | tuple[int, ...],
    blocksize: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Levels times scales, multiplied in fp32 and cast once.

    Shapes: packed uint8 (ceil(n / 2),), absmax (ceil(n / blocksize),) -> w of `shape`, n elements.
    Raises: ValueError if packed or absmax have other lengths than the shape implies.
    """
    n = math.prod(shape)
    expected = (math.ceil(n / 2), math.ceil(n / blocksize))
    if (packed.numel(), absmax.numel()) != expected:
        raise ValueError(
            f"shape {tuple(shape)} in blocks of {blocksize} takes {expected[0]} bytes and "
            f"{expected[1]} scales, but there are {packed.numel()} and {absmax.numel()}: pass the "
            "shape and blocksize that quantize_nf4 saw"
        )
    pairs = _pairs(packed.device)[packed.reshape(-1).int()].view(-1)[:n]
    tail = -n % blocksize
    blocks = nnf.pad(pairs, (0, tail)).view(-1, blocksize) * absmax.reshape(-1, 1).float()
    return blocks.view(-1)[:n].view(shape).to(dtype)


def double_quantize(absmax: Tensor, blocksize: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Store the scales themselves in 8 bits: less their mean, in groups, by a code book.

    Scales are all positive, so their mean is taken off first to use both halves of the book.

    Shapes: absmax (J,) -> codes uint8 (J,), group_absmax (ceil(J / blocksize),), offset ().
    Source: as above, section 3; the book: Dettmers et al. 2022, arXiv:2110.02861.
    """
    check_shapes("flatten the scales first", absmax_J=absmax)
    _check(absmax, blocksize)
    offset = absmax.float().mean()
    groups = nnf.pad(absmax.float() - offset, (0, -len(absmax) % blocksize)).view(-1, blocksize)
    group_absmax = groups.abs().amax(dim=1)
    if not group_absmax.isfinite().all():
        raise ValueError("absmax holds NaN or infinite scales: quantize finite weights")
    scaled = (groups / group_absmax[:, None]).clamp(-1, 1).nan_to_num()
    step = ((scaled + 1) * 0.5 * (STEPS - 1) + 0.5).int()
    codes = _nearest_in_book(absmax.device)[step]
    codes[group_absmax == 0] = 0  # any code times 0
    return codes.view(-1)[: len(absmax)], group_absmax, offset


def double_dequantize(
    codes: Tensor, group_absmax: Tensor, offset: Tensor, blocksize: int = 256
) -> Tensor:
    """The scales again. Shapes: as double_quantize -> absmax (J,).

    Raises: ValueError if there are more or fewer groups than codes in blocks of that size.
    """
    if len(group_absmax) != math.ceil(len(codes) / blocksize):
        raise ValueError(
            f"{len(codes)} codes in blocks of {blocksize} have {math.ceil(len(codes) / blocksize)} "
            f"groups, not {len(group_absmax)}: pass the blocksize that double_quantize saw"
        )
    values = dynamic_book().to(codes.device)[codes.int()]
    return values * group_absmax.repeat_interleave(blocksize)[: len(codes)] + offset


@cache
def dynamic_book() -> Tensor:
    """256 values in -1..1, dense near zero: for each power of ten down to 1e-6, the midpoints of
    twice as many equal steps of 0.1..1 as the power below it has; and 0 and 1.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2.2.
    """
    values = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles]
    return torch.cat(values).sort().values


class NF4Linear(QuantizedLinear):
    """NF4 weights, with scales in 8 bits, or in fp32 if not `double`.

    On a GPU few rows go through the kernel, where blocks end with the rows of W; else it unpacks
    its weights at each call.
    """

    def __init__(self, linear: nn.Linear, blocksize: int = 64, double: bool = True) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias)
        self.blocksize, self.double = blocksize, double
        packed, absmax = quantize_nf4(linear.weight, blocksize)
        self.register_buffer("packed", packed)
        if double:
            codes, group_absmax, offset = double_quantize(absmax)
            self.register_buffer("absmax_codes", codes)
            self.register_buffer("group_absmax", group_absmax)
            self.register_buffer("offset", offset)
        else:
            self.register_buffer("absmax", absmax)

    @classmethod
    def from_linear(cls, linear: nn.Linear, blocksize: int = 64, double: bool = True) -> NF4Linear:
        return cls(linear, blocksize, double)

    def scales(self) -> Tensor:
        """One a block, fp32, whichever way they are stored."""
        if self.double:
            return double_dequantize(self.absmax_codes, self.group_absmax, self.offset)
        return self.absmax

    def dequantized(self) -> Tensor:
        shape = (self.out_features, self.in_features)
        return dequantize_nf4(self.packed, self.scales(), shape, self.blocksize)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or self.in_features % self.blocksize or self.in_features % 2:
            return super().forward(x)
        self.check(x)
        packed, scale_FJ = (t.view(self.out_features, -1) for t in (self.packed, self.scales()))
        levels = NF4_LEVELS.to(x.device)
        rows = x.reshape(-1, self.in_features)
        out = int4_linear_fused(rows, packed, levels, scale_FJ, group_size=self.blocksize)
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _nearest(scaled: Tensor) -> Tensor:
    """How many midpoints between levels lie below: the code, and a tie stays below."""
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for midpoint in ((NF4_LEVELS[:-1] + NF4_LEVELS[1:]) / 2).tolist():
        codes += (scaled > midpoint).view(torch.uint8)
    return codes


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels that each of the 256 bytes holds: one look-up a byte. Shape (256, 2)."""
    return torch.cartesian_prod(NF4_LEVELS, NF4_LEVELS).to(device)


@cache
def _nearest_in_book(device: torch.device) -> Tensor:
    """The nearest code to each of 65,536 equal steps: bitsandbytes' CPU code rounds scales so."""
    book = dynamic_book()
    steps = -1 + 2 * torch.arange(STEPS) / (STEPS - 1)
    return torch.bucketize(steps, (book[:-1] + book[1:]) / 2).to(device, torch.uint8)


def _check(w: Tensor, blocksize: int) -> None:
    if w.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"w is {w.dtype}: expected float32, bfloat16 or float16 weights")
    if w.numel() == 0:
        raise ValueError(f"w has shape {tuple(w.shape)}: there is nothing to quantize")
    if isinstance(blocksize, bool) or not isinstance(blocksize, int) or blocksize < 1:
        raise ValueError(f"blocksize={blocksize!r}: expected a whole number such as 64")
