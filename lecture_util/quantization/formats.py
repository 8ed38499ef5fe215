"""Floating-point formats bit by bit: sign, exponent, mantissa, and rounding to what they can hold.

A number is sign * 2^(exponent - bias) * 1.mantissa. Exponent 0 drops the leading 1 and stays in
the lowest binade: those are the subnormals, which step down to zero evenly. Codes grow with the
magnitude, so rounding is counting steps, and a count that overflows its mantissa carries into the
exponent by itself.
Source: IEEE 754-2019; Micikevicius et al. 2022, arXiv:2209.05433 (e4m3, e5m2); Noune et al. 2022,
arXiv:2206.02915 (fnuz).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format, and which codes it spends on what is not a number.

    specials: "ieee"  the highest exponent means infinity (mantissa 0) or NaN;
              "fn"    finite: no infinity, and NaN only where exponent and mantissa are all ones;
              "fnuz"  finite, unsigned zero: the code of -0 is the one NaN.
    dtype:    torch's name for it.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str
    dtype: torch.dtype

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def lowest_binade(self) -> int:
        """The power of two of the smallest normal number, shared by the subnormals."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """The largest finite number's code."""
        if self.specials == "ieee":
            return self.infinity_code - 1
        return self.sign_bit - (2 if self.specials == "fn" else 1)

    @property
    def infinity_code(self) -> int | None:
        if self.specials != "ieee":
            return None
        return self.sign_bit - (1 << self.mantissa_bits)

    @property
    def nan_code(self) -> int:
        """One NaN; "ieee" has several."""
        if self.specials == "ieee":
            return self.infinity_code | 1 << (self.mantissa_bits - 1)
        return self.sign_bit - 1 if self.specials == "fn" else self.sign_bit

    @property
    def max(self) -> float:
        return decode(self.max_code, self).item()

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.lowest_binade

    @property
    def smallest_subnormal(self) -> float:
        """Also the step between neighbours from here up to twice the smallest normal."""
        return 2.0 ** (self.lowest_binade - self.mantissa_bits)


FORMATS = {
    format.name: format
    for format in (
        FloatFormat("fp32", 8, 23, 127, "ieee", torch.float32),
        FloatFormat("fp16", 5, 10, 15, "ieee", torch.float16),
        FloatFormat("bf16", 8, 7, 127, "ieee", torch.bfloat16),
        FloatFormat("e4m3", 4, 3, 7, "fn", torch.float8_e4m3fn),
        FloatFormat("e5m2", 5, 2, 15, "ieee", torch.float8_e5m2),
        FloatFormat("e4m3fnuz", 4, 3, 8, "fnuz", torch.float8_e4m3fnuz),
    )
}


def encode(x: Tensor | float, format: FloatFormat | str, saturate: bool = True) -> Tensor:
    """The code of the nearest number that the format has; halfway goes to the even mantissa.

    saturate: what rounds past the largest number, infinities too, becomes the largest; otherwise
              infinity, or NaN where the format has none. NaN stays NaN either way. torch 2.13's
              `.to` saturates e4m3 (448 for 465; older ones gave NaN) and none of the others.

    An fp64 x is rounded once; torch goes by way of fp32, and may round twice.
    Shapes: any -> the same, int64.
    """
    f = _known(format)
    x = torch.as_tensor(x, dtype=torch.float64)
    magnitude = torch.where(x.isfinite(), x.abs(), 0.0)
    binade = _binade(magnitude, f)
    steps = torch.round(magnitude / two_to(binade - f.mantissa_bits)).long()  # ties to even
    code = ((binade.long() - f.lowest_binade) << f.mantissa_bits) + steps

    above = f.nan_code if f.infinity_code is None else f.infinity_code
    code[(code > f.max_code) | x.isinf()] = f.max_code if saturate else above
    negative = x.signbit()
    if f.specials == "fnuz":
        negative &= code > 0
    code |= negative.long() * f.sign_bit
    code[x.isnan()] = f.nan_code
    return code


def decode(codes: Tensor | int, format: FloatFormat | str) -> Tensor:
    """The numbers that codes stand for, exactly. Shapes: any -> the same, fp64.

    Raises: TypeError for codes that are not whole; ValueError for ones the format doesn't have.
    """
    f = _known(format)
    codes = torch.as_tensor(codes)
    sign, exponent, mantissa = fields(codes, f)
    codes = codes.long()
    one = (exponent > 0).double()  # the leading 1, which subnormals lack
    value = two_to(exponent.clamp(min=1) - f.bias) * (one + mantissa * 2.0**-f.mantissa_bits)
    magnitude = codes & (f.sign_bit - 1)
    value[magnitude > f.max_code] = torch.nan
    if f.infinity_code is not None:
        value[magnitude == f.infinity_code] = torch.inf
    value = torch.where(sign > 0, -value, value)
    if f.specials == "fnuz":
        value[codes == f.nan_code] = torch.nan
    return value


def fields(codes: Tensor | int, format: FloatFormat | str) -> tuple:
    """Sign, exponent and mantissa as stored: the bits as whole numbers, tensors for tensors."""
    f = _known(format)
    tensor = torch.as_tensor(codes)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"codes are {tensor.dtype}: expected whole numbers, as encode returns them")
    tensor = tensor.long()
    codes = codes if isinstance(codes, int) else tensor
    if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < 2**f.bits:
        raise ValueError(
            f"codes run from {int(tensor.min())} to {int(tensor.max())}: {f.name} has 0 to "
            f"{2**f.bits - 1}; bytes seen as signed need & {2**f.bits - 1}"
        )
    exponent = (codes >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1)
    return codes >> (f.bits - 1), exponent, codes & ((1 << f.mantissa_bits) - 1)


def bit_string(code: Tensor | int, format: FloatFormat | str) -> str:
    """One code's bits in their fields: '0 1000 110' is e4m3's 3.5."""
    f = _known(format)
    sign, exponent, mantissa = fields(int(code), f)
    return f"{sign} {exponent:0{f.exponent_bits}b} {mantissa:0{f.mantissa_bits}b}"


def round_to(x: Tensor | float, format: FloatFormat | str, saturate: bool = True) -> Tensor:
    """x as the format would hold it: encoded and decoded, in fp64."""
    return decode(encode(x, format, saturate), format)


def values(format: FloatFormat | str) -> Tensor:
    """Every finite number of a format of up to 16 bits, once each, ascending, in fp64."""
    f = _known(format)
    if f.bits > 16:
        raise ValueError(f"{f.name} has 2**{f.bits} codes: too many to list, so ask for a narrower")
    positive = decode(torch.arange(1, f.max_code + 1), f)
    return torch.cat((-positive.flip(0), positive.new_zeros(1), positive))


def step(x: Tensor | float, format: FloatFormat | str) -> Tensor:
    """The distance between the format's neighbours around x: it doubles with each binade.

    At a power of two it is the step above it; past the largest number, the step just below that.
    """
    f = _known(format)
    x = torch.as_tensor(x, dtype=torch.float64)
    if x.isnan().any():
        raise ValueError("x holds NaN, which has no neighbours: replace it, x.nan_to_num()")
    return two_to(_binade(x.abs().clamp(max=f.max), f) - f.mantissa_bits)


def int_range(bits: int) -> tuple[int, int]:
    """Least and greatest whole number of so many bits in two's complement: (-8, 7) for int4."""
    if type(bits) is not int or bits < 1:
        raise ValueError(f"bits={bits!r}: expected a whole number, at least 1")
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _binade(magnitude: Tensor, f: FloatFormat) -> Tensor:
    """floor(log2(magnitude)) without a logarithm's rounding; the lowest for zero and subnormals."""
    mantissa, exponent = torch.frexp(magnitude)  # magnitude = mantissa * 2^exponent, from 1/2 to 1
    return torch.where(mantissa == 0, f.lowest_binade, exponent - 1).clamp(min=f.lowest_binade)


def two_to(k: Tensor) -> Tensor:
    """2^k exactly, for whole k of -1022 to 1023: k goes into the exponent field of an fp64."""
    return ((k.long() + 1023) << 52).view(torch.float64)


def _known(format: FloatFormat | str) -> FloatFormat:
    if isinstance(format, FloatFormat):
        return format
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not known: expected one of {', '.join(FORMATS)}")
    return FORMATS[format]
