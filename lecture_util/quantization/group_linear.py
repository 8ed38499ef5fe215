"""A Linear of any number of bits from 2 to 8, in groups along each row, packed without a bit lost.

Three bits do not divide a byte. So the codes of eight neighbours are laid down as `bits` bytes:
byte b holds bit b of each of the eight. What is stored is what is counted, at every width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.model.shapes import ShapeError, check_shapes

from .layer import QuantizedLinear
from .scales import Quantized, quantize


def pack_planes(codes_FD: Tensor, bits: int) -> Tensor:
    """Bit b of eight neighbours in one byte, the first in its lowest bit; tails filled with 0.

    Shapes: codes_FD, 0 to 2^bits - 1 -> uint8 (F, bits, ceil(D/8)).
    """
    check_shapes(codes_FD=codes_FD)
    if codes_FD.min() < 0 or codes_FD.max() >> bits:
        raise ValueError(
            f"codes from {codes_FD.min().item()} to {codes_FD.max().item()}: {bits} bits hold "
            f"0 to {2**bits - 1}; add an offset to signed codes first"
        )
    eights = nnf.pad(codes_FD.to(torch.int32), (0, -codes_FD.shape[1] % 8)).unflatten(1, (-1, 8))
    place = torch.arange(8, device=codes_FD.device, dtype=torch.int32)
    planes = [((eights >> b & 1) << place).sum(-1) for b in range(bits)]
    return torch.stack(planes, 1).to(torch.uint8)


def unpack_planes(planes: Tensor, D: int) -> Tensor:
    """The codes that `pack_planes` packed. Shapes: uint8 (F, bits, ceil(D/8)) -> uint8 codes_FD."""
    if planes.shape[-1] != -(-D // 8):
        raise ShapeError(f"planes have {planes.shape[-1]} bytes a row: D={D} takes {-(-D // 8)}")
    place = torch.arange(8, device=planes.device, dtype=torch.uint8)
    bits = planes[..., None] >> place & 1
    weight = torch.arange(planes.shape[1], device=planes.device, dtype=torch.uint8)
    return (bits << weight[:, None, None]).sum(1, dtype=torch.uint8).flatten(1)[:, :D]


class GroupLinear(QuantizedLinear):
    """Codes in bit planes, a scale for each group, and a zero point unless symmetric.

    It is unpacked at each call, which suits counting bytes and errors, not speed.
    """

    def __init__(self, stored: Quantized, bias: Tensor | None = None) -> None:
        F, D = check_shapes(codes_FD=stored.codes).values()
        super().__init__(D, F, bias)
        self.bits, self.group_size, self.weight_dtype = stored.bits, stored.per, stored.dtype
        offset = 2 ** (stored.bits - 1) if stored.symmetric else 0
        self.register_buffer(
            "planes", pack_planes(stored.codes.to(torch.int16) + offset, self.bits)
        )
        self.register_buffer("scale_FJ", stored.scale)
        self.register_buffer("zero_FJ", stored.zero)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        bits: int = 3,
        group_size: int = 48,
        symmetric: bool = False,
        scale_dtype: torch.dtype = torch.float16,
    ) -> GroupLinear:
        """Round a Linear's weights. Raises: as `quantize`."""
        stored = quantize(linear.weight.detach(), bits, group_size, symmetric, scale_dtype)
        return cls(stored, linear.bias)

    def quantized(self) -> Quantized:
        """The codes one a byte again, as `quantize` gave them."""
        codes_FD = unpack_planes(self.planes, self.in_features)
        if self.zero_FJ is None:
            codes_FD = (codes_FD.to(torch.int16) - 2 ** (self.bits - 1)).to(torch.int8)
        return Quantized(
            codes_FD, self.scale_FJ, self.zero_FJ, self.bits, self.group_size, self.weight_dtype
        )

    def dequantized(self) -> Tensor:
        return self.quantized().dequantize(torch.float32)
