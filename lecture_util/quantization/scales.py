"""Real numbers to small whole numbers and back: absmax and zero-point, and what shares a scale.

A *block* shares one scale: the tensor, a row, a column or a group of neighbours in a row. Absmax
puts its largest magnitude on the largest code and keeps zero at code 0. Zero-point stretches the
codes from the block's least to its greatest value and notes which code means zero, which pays
where values lean to one side.
Source: Jacob et al. 2018, arXiv:1712.05877 (zero-point); Dettmers et al. 2022, arXiv:2208.07339
(absmax).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

Per = str | int  # "tensor", "row", "column", or how many neighbours of a row make a group

SCALE_DTYPES = {torch.float64: torch.int64, torch.float32: torch.int32}
SCALE_DTYPES |= dict.fromkeys((torch.float16, torch.bfloat16), torch.int16)


@dataclass(frozen=True)
class Quantized:
    """Whole-number codes, and what turns them back into numbers.

    codes: of the tensor's own shape, int8 (absmax) or uint8 (zero-point), one a byte.
    scale: one a block: (1, 1) by tensor, (R, 1) by row, (1, D) by column, (R, J) by group, where a
           tensor (..., D) counts as R rows of D.
    zero:  the code that means 0.0, uint8, shaped like scale; None under absmax, where it is 0.
    dtype: what the tensor was.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    per: Per
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def symmetric(self) -> bool:
        return self.zero is None

    @property
    def nbytes(self) -> int:
        """Codes packed at `bits` each, and scales and zeros as they are stored."""
        packed = -(-self.codes.numel() * self.bits // 8)
        return packed + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.codes.numel()

    def each(self, per_block: Tensor) -> Tensor:
        """A number a block, such as `scale`, repeated for every element. Shapes: -> x's."""
        blocks, _ = _blocks(self.codes, self.per)
        return _unblock(per_block[..., None].expand(blocks.shape), self.shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """(code - zero) * scale, multiplied in fp32 (or wider) and cast once, to x's dtype.

        In fp16 a sum of 4096 products 127 * 6.0 is far past 65,504, and even one stored scale,
        rounded up, can carry the largest value past the dtype's end: it stops there.
        """
        dtype = dtype or self.dtype
        compute = _wide(dtype, self.scale.dtype)
        blocks, _ = _blocks(self.codes, self.per)
        values = blocks.to(compute)
        if self.zero is not None:
            values -= self.zero[..., None].to(compute)
        values *= self.scale[..., None].to(compute)
        limits = torch.finfo(dtype)
        return _unblock(values, self.shape).clamp_(limits.min, limits.max).to(dtype)

    def error(self, x: Tensor) -> float:
        """How far from x: the norm of the difference over the norm of x; 0 if both are zero."""
        if x.shape != self.shape:
            raise ValueError(f"x has shape {tuple(x.shape)} but the codes {tuple(self.shape)}")
        off = (x.double() - self.dequantize(torch.float64)).norm()
        return float(off / x.double().norm()) if off else 0.0


@torch.no_grad()
def quantize(
    x: Tensor,
    bits: int = 8,
    per: Per = "row",
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
) -> Quantized:
    """Round every element to the nearest multiple of its block's scale.

    symmetric: absmax, codes -(2^(bits-1) - 1) to 2^(bits-1) - 1 and scale = max|x| / the largest.
               Otherwise zero-point, codes 0 to 2^bits - 1 over [min(x, 0), max(x, 0)].
    per:       "tensor", "row", "column", or a group's size along the last axis. A row's last group
               is shorter where the size does not divide D.

    The scale is rounded to scale_dtype first and the codes made with what is stored, so that no
    element is off by more than half a step (zero-point: a thousandth more). A block of zeros has
    scale 1.

    Shapes: x (..., D) -> codes (..., D).
    Raises: ValueError for NaN and infinities, an empty tensor, or a scale that scale_dtype cannot
            hold; TypeError if x is not floating-point.
    """
    _check(x, bits, per, symmetric, scale_dtype)
    blocks, axes = _blocks(x, per)
    low = blocks.amin(axes, keepdim=True).double()
    high = blocks.amax(axes, keepdim=True).double()
    if not (low.isfinite() & high.isfinite()).all():
        raise ValueError(_not_finite(x))

    if symmetric:
        largest = 2 ** (bits - 1) - 1
        codes_range, span, slack = (-largest, largest), torch.maximum(-low, high), 0.5
    else:
        largest = 2**bits - 1
        codes_range, span, slack = (0, largest), high.clamp(min=0) - low.clamp(max=0), 1e-3
    scale = _stored(span / largest, 1 + slack / largest, scale_dtype)

    compute = _wide(x.dtype, scale_dtype)
    codes, zero = blocks / scale.to(compute), None
    codes = codes.round_()
    if not symmetric:
        zero = (-low.clamp(max=0) / scale.double()).round_().clamp_(max=largest)
        codes += zero.to(compute)
    codes = codes.clamp_(*codes_range).to(torch.int8 if symmetric else torch.uint8)
    if zero is not None:
        zero = zero.squeeze(-1).to(torch.uint8)
    return Quantized(_unblock(codes, x.shape), scale.squeeze(-1), zero, bits, per, x.dtype)


def _stored(scale: Tensor, allowance: float, dtype: torch.dtype) -> Tensor:
    """The scale as `dtype` holds it: the nearest, or the next above if that would clip the block.

    A tiny scale that fp16 would round to 0 thereby becomes the smallest fp16 above 0.
    """
    stored = scale.to(dtype)
    next_above = (stored.view(SCALE_DTYPES[dtype]) + 1).view(dtype)  # positive floats sort as ints
    stored = torch.where(stored.double() * allowance < scale, next_above, stored)
    if stored.isinf().any():
        raise ValueError(
            f"a scale of {scale.max().item():.3g} is beyond {dtype}, which ends at "
            f"{torch.finfo(dtype).max:.3g}: store scales as torch.float32 or torch.bfloat16"
        )
    return torch.where(scale == 0, torch.ones_like(stored), stored)


def _blocks(x: Tensor, per: Per) -> tuple[Tensor, tuple[int, ...]]:
    """x seen as three axes, and those that one scale spans; tails are filled up with zeros."""
    D = x.shape[-1]
    per = min(per, D) if isinstance(per, int) else per  # a group wider than a row is the row
    if per == "tensor":
        return x.reshape(-1, 1, D), (0, 2)
    if per == "row":
        return x.reshape(-1, 1, D), (2,)
    if per == "column":
        return x.reshape(-1, D, 1), (0,)
    return nnf.pad(x.reshape(-1, D), (0, -D % per)).unflatten(-1, (-1, per)), (2,)


def _unblock(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Back to the shape x had, without what `_blocks` filled in."""
    return blocks.reshape(blocks.shape[0], -1)[:, : shape[-1]].reshape(shape)


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    """What to compute in: fp32, or fp64 if some tensor is."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _check(x: Tensor, bits: int, per: Per, symmetric: bool, scale_dtype: torch.dtype) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: expected floating-point numbers, x.float()")
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected at least one row of one number")
    if type(bits) is not int or not 2 <= bits <= 8:
        raise ValueError(f"bits={bits!r}: expected a whole number from 2 to 8")
    if per not in ("tensor", "row", "column") and (type(per) is not int or per < 1):
        raise ValueError(
            f"per={per!r}: expected 'tensor', 'row', 'column', or a group's size such as 64"
        )
    if type(symmetric) is not bool:  # any number would pass for True
        raise TypeError(f"symmetric={symmetric!r}: expected True for absmax, False for zero-point")
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"scale_dtype={scale_dtype!r}: expected one of {list(SCALE_DTYPES)}")


def _not_finite(x: Tensor) -> str:
    strange = (~x.isfinite()).nonzero()
    where = tuple(strange[0].tolist())
    return (
        f"{len(strange)} of {x.numel()} numbers are NaN or infinite, the first {x[where].item()} "
        f"at {list(where)}: one would become its whole block's scale. Find what made them, or "
        "replace them, x.nan_to_num()"
    )
