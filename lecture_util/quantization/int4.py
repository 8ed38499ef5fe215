"""A Linear of four bits a weight that multiplies without ever holding its weights whole.

    w = (code - 8) * scale + offset        codes 0 to 15, two in a byte; a scale for each group

On a GPU the kernel in `kernels.int4_linear` makes the weights in its registers. On a CPU torch has
an operator that does so for bf16, of the same formula. Elsewhere, and for many rows, the weights
are dequantized at each call, which saves memory and no time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.kernels.int4_linear import (
    check_group_size,
    dequantize_int4,
    int4_linear_fused,
    pack_int4,
    unpack_int4,
)
from lecture_util.model.shapes import check_shapes

from .linear import QuantizedLinear
from .scales import Quantized, quantize

LOWEST = -8  # what code 0 stands for, before the scale
CPU_ROWS = 128  # seen on two Intel cores: dequantizing and dense overtook it at 128 to 256
CPU_GROUPS = (256, 128, 64, 32)  # all that the operator knows


class Int4Linear(QuantizedLinear):
    """Codes of up to four bits, each in half a byte, with a scale and an offset for each group.

    stored: from `quantize` by rows or groups, or what AWQ rounded, `GroupLinear.quantized()`. Codes
            of 2 or 3 bits take four here as well: the bytes counted are those of four.

    A zero point z is stored as the offset (8 - z) * scale, in the scale's dtype, whose rounding is
    the only difference to what was quantized; symmetric weights have none. On a CPU the first
    product in bf16 makes a second copy of the codes in the operator's order; `weight_bytes` counts
    the first alone.

    Cost:   4 bits a weight and 16 or 32 a group: at groups of 64 with fp16 scales 4.5 in all.
    Raises: ValueError for more bits, or one scale for more than a row; ShapeError if not a matrix.
    """

    def __init__(self, stored: Quantized, bias: Tensor | None = None) -> None:
        _check_stored(stored)
        F, D = stored.shape
        super().__init__(D, F, bias)
        self.bits, self.symmetric = stored.bits, stored.symmetric
        self.group_size = D if stored.per == "row" else stored.per
        codes_FD, offset_FJ = stored.codes, None
        if stored.symmetric:
            codes_FD = codes_FD + 8
        else:
            offset_FJ = ((8 - stored.zero.float()) * stored.scale).to(stored.scale.dtype)
            if not offset_FJ.isfinite().all():
                raise ValueError(
                    f"an offset, up to 8 times the largest scale {stored.scale.max().item():.3g}, "
                    f"is beyond {offset_FJ.dtype}: store scales as torch.bfloat16 or torch.float32"
                )
        self.register_buffer("packed", pack_int4(codes_FD))
        self.register_buffer("scale_FJ", stored.scale)
        self.register_buffer("offset_FJ", offset_FJ)
        self._copy: tuple[Tensor, Tensor, int] | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group_size: int = 64,
        symmetric: bool = False,
        bits: int = 4,
        scale_dtype: torch.dtype | None = None,
    ) -> Int4Linear:
        """Round a Linear's weights. scale_dtype: None for bf16 if the weights are, else fp16.

        Raises: as `quantize`, and ValueError for an odd group smaller than a row.
        """
        w_FD = linear.weight.detach()
        if scale_dtype is None:
            scale_dtype = torch.bfloat16 if w_FD.dtype == torch.bfloat16 else torch.float16
        return cls(quantize(w_FD, bits, group_size, symmetric, scale_dtype), linear.bias)

    def codes(self) -> Tensor:
        """One a byte, 0 to 15. Shapes: -> codes_FD."""
        return unpack_int4(self.packed, self.in_features)

    def dequantized(self) -> Tensor:
        weights, form = self._weights()
        return dequantize_int4(*weights, **form, D=self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        x_BD = x.reshape(-1, self.in_features)
        if self._suits_operator(x_BD):
            y_BF = self._by_operator(x_BD)
        else:
            weights, form = self._weights()
            y_BF = int4_linear_fused(x_BD, *weights, **form)
        y = y_BF.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the second copy that the first product in bf16 on a CPU has made; 0 before."""
        return sum(t.nbytes for t in (self._copy or ()) if torch.is_tensor(t))

    def _weights(self) -> tuple[tuple, dict]:
        stored = (self.packed, LOWEST, self.scale_FJ, self.offset_FJ)
        return stored, {"group_size": self.group_size}

    def _suits_operator(self, x_BD: Tensor) -> bool:
        return (
            x_BD.dtype == torch.bfloat16
            and x_BD.device.type == self.packed.device.type == "cpu"
            and 0 < len(x_BD) <= CPU_ROWS
            and not (torch.is_grad_enabled() and x_BD.requires_grad)
            and 2 * _padded(self.group_size, self.in_features)
            <= 3 * min(self.group_size, self.in_features)
            and cpu_operator() is not None
        )

    def _by_operator(self, x_BD: Tensor) -> Tensor:
        if self._copy is None:
            parts = (self.codes(), self.scale_FJ, self.offset_FJ)
            self._copy = for_operator(*parts, self.group_size)
        packed, scale_and_zero, group = self._copy
        x_BD = _fill_groups(x_BD, self.group_size)
        return cpu_operator()(x_BD, packed, group, scale_and_zero)[:, : self.out_features]

    def _apply(self, fn, recurse=True):
        self._copy = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self._copy = None
        super()._load_from_state_dict(*args, **kwargs)


@cache
def cpu_operator() -> Callable[[Tensor, Tensor, int, Tensor], Tensor] | None:
    """torch's product of bf16 with packed 4-bit weights on a CPU; None if it does not work here.

    It is no public part of torch, so it must first show that it means (code - 8) * scale + zero.
    """
    try:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        codes = torch.full((16, 32), 9, dtype=torch.int32)
        packed, scale_and_zero, group = for_operator(
            codes, torch.full((16, 1), 2.0), torch.full((16, 1), 3.0), 32
        )
        y = product(torch.ones(1, 32, dtype=torch.bfloat16), packed, group, scale_and_zero)
    except (AttributeError, RuntimeError):
        return None
    return product if (y == 32 * 5).all() else None


def for_operator(
    codes_FD: Tensor, scale_FJ: Tensor, offset_FJ: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor, int]:
    """The codes in the operator's order, its scales and zeros, and the groups it shall see.

    It knows groups of 32, 64, 128 and 256 and rows by sixteens. So groups of 48 are filled up to
    64, a third more to read, with weights that will meet zeros; a group of 96 becomes three of 32
    with the same scale.

    Shapes: codes_FD, scale_FJ, offset_FJ -> packed, (groups, rows, 2) in bf16, a size.
    """
    F, D = codes_FD.shape
    padded = _padded(group_size, D)
    group = next(size for size in CPU_GROUPS if padded % size == 0)
    more_rows = -F % 16
    codes = nnf.pad(_fill_groups(codes_FD.int(), group_size), (0, 0, 0, more_rows))
    zero_FJ = torch.zeros_like(scale_FJ) if offset_FJ is None else offset_FJ
    pair_FJ2 = torch.stack((scale_FJ, zero_FJ), -1).to(torch.bfloat16)
    pair = nnf.pad(pair_FJ2.repeat_interleave(padded // group, 1), (0, 0, 0, 0, 0, more_rows))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)
    return packed, pair.transpose(0, 1).contiguous(), group


def _padded(group_size: int, D: int) -> int:
    """A group's width once it is filled up to a multiple of 32."""
    return -(-min(group_size, D) // 32) * 32


def _fill_groups(rows: Tensor, group_size: int) -> Tensor:
    """Each group filled up with zeros to `_padded`, so that where no weight is x is 0 as well.

    Shapes: (rows, D) -> (rows, J * padded).
    """
    D = rows.shape[1]
    width = min(group_size, D)
    rows = nnf.pad(rows, (0, -D % width)).unflatten(1, (-1, width))
    return nnf.pad(rows, (0, _padded(group_size, D) - width)).flatten(1).contiguous()


def _check_stored(stored: Quantized) -> None:
    check_shapes(codes_FD=stored.codes)
    D, per = stored.shape[1], stored.per
    if stored.bits > 4:
        raise ValueError(f"codes of {stored.bits} bits: half a byte holds up to 4")
    if per in ("tensor", "column"):
        raise ValueError(
            f"codes quantized per {per!r}: expected a scale for each row or group, "
            "quantize(w, bits=4, per=64)"
        )
    check_group_size(D if per == "row" else per, D)
