"""One group of weights as it is stored: codes, bytes, a scale, and what they are read back as."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lecture_util.kernels.int4_linear import pack_int4, unpack_int4
from lecture_util.quantization.nf4 import NF4_LEVELS, quantize_nf4
from lecture_util.quantization.scales import quantize

INT8, INT4, ZERO_POINT, NF4 = STORED = ("int8", "int4", "int4 zero-point", "NF4")


@dataclass(frozen=True)
class Group:
    """codes: what a level is called, -127 to 127, -7 to 7, 0 to 15 or an NF4 level's number.

    halves:  the bits that hold each code, as whole numbers: a byte of int8, else four bits.
    data:    the bytes.   scale: a 0-d tensor in the dtype it is stored in.
    zero:    the code that means 0.0, where one is stored.   levels: all that a code can mean.
    """

    stored: str
    values: Tensor
    codes: Tensor
    halves: Tensor
    data: bytes
    scale: Tensor
    zero: int | None
    levels: Tensor
    level_codes: tuple[int, ...]

    @property
    def back(self) -> Tensor:
        """The values as they are read back, fp32."""
        return self.levels[self.codes - self.level_codes[0]]

    @property
    def bits(self) -> int:
        """Of one code."""
        return 8 if self.stored == INT8 else 4

    @property
    def nbytes(self) -> int:
        """The codes', the scale's and the zero's."""
        return len(self.data) + self.scale.itemsize + (self.zero is not None)


def group_of(values: Tensor, stored: str, scale_dtype: torch.dtype) -> Group:
    """Store these neighbours of a row with one scale. An NF4 scale is fp32, as in bitsandbytes.

    Shapes: values (X,), fp32.
    """
    if stored == NF4:
        packed, absmax = quantize_nf4(values, len(values))
        codes = unpack_int4(packed[None], len(values))[0].long()
        levels, zero, scale = NF4_LEVELS * absmax, None, absmax[0]
        level_codes, halves = range(16), codes
    else:
        bits, symmetric = 8 if stored == INT8 else 4, stored != ZERO_POINT
        q = quantize(values[None], bits, "row", symmetric, scale_dtype)
        codes, scale = q.codes[0].long(), q.scale.flatten()[0]
        zero = None if symmetric else int(q.zero)
        largest = 2 ** (bits - 1) - 1
        level_codes = range(-largest, largest + 1) if symmetric else range(2**bits)
        levels = (torch.tensor(level_codes) - (zero or 0)) * scale.float()
        halves = codes % 256 if bits == 8 else codes + 8 if symmetric else codes
        packed = halves if bits == 8 else pack_int4(halves[None])[0]
    return Group(stored, values, codes, halves, bytes(packed.tolist()), scale, zero, levels,
                 tuple(level_codes))  # fmt: skip
