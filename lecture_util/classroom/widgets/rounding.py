"""A tensor put on a grid of few levels, and what that cost: the numbers behind the explorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lecture_util.quantization.llm_int8 import outlier_columns
from lecture_util.quantization.nf4 import NF4_LEVELS
from lecture_util.quantization.scales import Per, quantize

SYMMETRIC, ZERO_POINT, NF4 = GRIDS = ("symmetric", "zero-point", "NF4")
MOST = 2**17  # numbers that are looked at, so that a slider answers at once


@dataclass(frozen=True)
class Rounded:
    """back_RD: the numbers as they are read back. bits: a number, scales included.

    grids: the levels of the scale over the largest number, and those of a middling scale.
    """

    back_RD: Tensor
    bits: float
    grids: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Result:
    """What a choice costs. relative: norm of the errors over the norm of what came.

    largest: the largest error. zeros: the share of numbers not 0 that are read back as 0.
    fp16_columns: columns that the threshold leaves in fp16. unsplit: the relative error without it.
    """

    relative: float
    largest: float
    bits: float
    zeros: float
    fp16_columns: int
    unsplit: float


def round_to(
    x_RD: Tensor, bits: int, per: Per, grid: str, scale_dtype: torch.dtype = torch.float16
) -> Rounded:
    """Round to the nearest level of each block's grid; a block is what shares a scale."""
    row, column = divmod(int(x_RD.abs().argmax()), x_RD.shape[1])
    if grid == NF4:
        absmax = quantize(x_RD, 8, per, True, torch.float32)  # for its blocks; scale = absmax/127
        scale = (absmax.scale * 127).to(scale_dtype).float()
        if scale.isinf().any():
            raise ValueError(f"a largest number is beyond {scale_dtype}: store scales in another")
        scale = torch.where(scale == 0, 1.0, scale)  # too small for scale_dtype
        each_RD = absmax.each(scale)
        levels_16, codes_RD = nf4_codes(x_RD / each_RD)
        back_RD = levels_16[codes_RD] * each_RD
        middling = scale.flatten().median()
        width = 4 + 8 * scale_dtype.itemsize * scale.numel() / x_RD.numel()
        return Rounded(back_RD, width, (levels_16 * each_RD[row, column], levels_16 * middling))
    q = quantize(x_RD, bits, per, grid == SYMMETRIC, scale_dtype)
    least, most = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if q.symmetric else (0, 2**bits - 1)
    codes = torch.arange(least, most + 1)
    zero = torch.zeros_like(q.scale) if q.zero is None else q.zero
    at = int(q.scale.flatten().float().median(0).indices)
    grids = [
        (codes - float(z)) * float(s)
        for s, z in [(q.each(q.scale)[row, column], q.each(zero)[row, column]),
                     (q.scale.flatten()[at], zero.flatten()[at])]
    ]  # fmt: skip
    return Rounded(q.dequantize(), q.bits_per_weight, (grids[0], grids[1]))


def nf4_codes(unit: Tensor) -> tuple[Tensor, Tensor]:
    """NF4's 16 levels, and for each number the code of the nearest; halfway goes down."""
    return NF4_LEVELS, torch.bucketize(unit, (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2)


def split(x_RD: Tensor, threshold: float) -> Tensor:
    """The columns that LLM.int8 leaves in fp16, bool (D,); none for threshold 0."""
    chosen = torch.zeros(x_RD.shape[1], dtype=torch.bool)
    if threshold:
        chosen[outlier_columns(x_RD, threshold)] = True
    return chosen


def enlarged(x_RD: Tensor, times: float) -> Tensor:
    """x with its number of largest magnitude made so many times as large."""
    x_RD = x_RD.clone()
    x_RD.view(-1)[x_RD.abs().argmax()] *= times
    return x_RD


def first_rows(name: str, x: Any) -> Tensor:
    """x as fp32 rows, the first of them if there are more than MOST numbers.

    Shapes: x (..., D) -> (R, D). Raises: ValueError naming the tensor.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or not x.numel():
        got = f"shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else f"{x!r:.60}"
        raise ValueError(
            f"{name} is {got}: expected a floating-point tensor (rows, columns) with numbers in it"
        )
    x_RD = x.detach().cpu().flatten(0, -2)
    x_RD = x_RD[: max(1, MOST // x_RD.shape[1])].float()
    if not x_RD.isfinite().all():
        raise ValueError(f"{name} has NaN or infinite numbers: find what made them first")
    if not x_RD.any():
        raise ValueError(f"{name} is all zeros: there is nothing to round")
    return x_RD


def samples(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights (256, 384) like a trained layer's; activations (128, 384) with five wide columns."""
    generator = torch.Generator().manual_seed(seed)
    weights_FD = 0.05 * torch.randn(256, 384, generator=generator)
    weights_FD *= 0.5 + torch.rand(256, 1, generator=generator)  # rows differ in size
    activations_TD = torch.randn(128, 384, generator=generator)
    wide = torch.randperm(384, generator=generator)[:5]
    activations_TD[:, wide] *= torch.tensor([4.0, 6.0, 9.0, 14.0, 25.0])
    return weights_FD, activations_TD
