"""Floating-point formats bit by bit, against torch's own types: every code, and hard numbers."""

import math
import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lecture_util.quantization.formats import (
    FORMATS,
    bit_string,
    decode,
    encode,
    fields,
    int_range,
    round_to,
    step,
    two_to,
    values,
)

INTS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
EVERY = list(FORMATS.values())
NARROW = [f for f in EVERY if f.bits <= 16]
# What torch's cast saturates: older ones (seen: 2.11) made NaN of what lies past e4m3's end.
SATURATED = {"e4m3"} if torch.tensor(1e4).to(torch.float8_e4m3fn).float().isfinite() else set()
by_name = {"argvalues": EVERY, "ids": lambda f: f.name}
narrow = {"argvalues": NARROW, "ids": lambda f: f.name}


def all_codes(f):
    return torch.arange(2**f.bits)


def torch_decode(codes, f):
    return codes.to(INTS[f.bits]).view(f.dtype).double()


def torch_encode(x, f):
    return x.to(f.dtype).view(INTS[f.bits]).long() & (2**f.bits - 1)


def same(a, b):
    """Equal numbers, signs of zero included, and NaN in the same places."""
    nan = a.isnan()
    return (
        torch.equal(nan, b.isnan())
        and torch.equal(a[~nan], b[~nan])
        and torch.equal(a[~nan].signbit(), b[~nan].signbit())
    )


def bits(code, width):
    return f"{code:0{width}b}"


@pytest.mark.parametrize("f", **narrow)
def test_every_code_decodes_as_torch_decodes_it(f):
    assert same(decode(all_codes(f), f), torch_decode(all_codes(f), f))


@pytest.mark.parametrize("f", **narrow)
def test_every_code_survives_a_round_trip(f):
    codes = all_codes(f)
    codes = codes[~decode(codes, f).isnan()]
    assert torch.equal(encode(decode(codes, f), f, saturate=False), codes)


@pytest.mark.parametrize("f", **narrow)
def test_what_lies_between_two_numbers_rounds_as_torch_rounds_it(f):
    low = values(f)[:-1]
    high = values(f)[1:]
    middle = (low + high) / 2  # exact in fp32, and so is a nudge from it
    nudge = (high - low) / 8
    for x in (middle, middle - nudge, middle + nudge, low + nudge, high - nudge):
        x = x.float()
        assert torch.equal(encode(x, f), torch_encode(x, f))


@pytest.mark.parametrize("f", **narrow)
def test_half_way_goes_to_the_even_code(f):
    positive = values(f)[values(f) >= 0]
    codes = encode((positive[:-1] + positive[1:]) / 2, f)
    assert (codes % 2 == 0).all()


def test_fp32_is_its_own_bits():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(2**32, (200_000,), generator=generator)
    x = codes.to(torch.int32).view(torch.float32)  # every exponent, NaN and subnormals among them
    number = ~x.isnan()
    assert torch.equal(encode(x, "fp32", saturate=False)[number], codes[number])
    assert same(decode(codes, "fp32"), x.double())


finite_fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
@example([448.0, 464.0, 465.0, 479.9, 480.0, 1e4, math.inf, -math.inf, math.nan, 0.0, -0.0])
@example([240.0, 247.0, 248.0, 249.0, 57344.0, 61439.0, 61440.0, 65504.0, 65519.0, 65520.0])
@example([2.0**-24, 2.0**-25, 2.0**-26, -(2.0**-10), 2.0**-11, 1e-38, -1e-45, 3.4e38])
def test_any_fp32_number_is_cast_as_torch_casts_it(numbers):
    x = torch.tensor(numbers)
    for f in EVERY:
        got = encode(x, f, saturate=f.name in SATURATED)
        assert same(decode(got, f), x.to(f.dtype).double())
        assert torch.equal(got[~x.isnan()], torch_encode(x, f)[~x.isnan()])


def test_past_the_end_of_e4m3():
    x = torch.tensor([448.0, 464.0, 465.0, 1e4, math.inf, -1e4, -math.inf, math.nan])
    saturated = round_to(x, "e4m3")
    assert saturated[:-1].tolist() == [448, 448, 448, 448, 448, -448, -448]
    assert saturated[-1].isnan()
    kept = round_to(x, "e4m3", saturate=False)
    assert kept[:2].tolist() == [448, 448]  # 464 is half way to 480, and 448 is even
    assert kept[2:].isnan().all()
    cast = saturated if SATURATED else kept
    assert same(x.to(torch.float8_e4m3fn).double(), cast)


def test_past_the_end_of_the_others():
    x = torch.tensor([1e6, math.inf, -1e6, -math.inf])
    for name in ("fp16", "e5m2"):
        assert round_to(x, name, saturate=False).tolist() == [math.inf] * 2 + [-math.inf] * 2
    assert round_to(x, "e5m2").tolist() == [57344, 57344, -57344, -57344]
    assert round_to(x, "fp16").tolist() == [65504, 65504, -65504, -65504]
    assert round_to(x, "e4m3fnuz").tolist() == [240, 240, -240, -240]
    assert round_to(x, "e4m3fnuz", saturate=False).isnan().all()


@given(finite_fp32)
def test_saturating_changes_only_what_is_past_the_end(number):
    for f in EVERY:
        kept, saturated = round_to(number, f, saturate=False), round_to(number, f)
        if kept.isfinite():
            assert torch.equal(kept, saturated)
        else:
            assert saturated.abs() == f.max and saturated * number > 0


@given(finite_fp32)
def test_rounding_is_to_the_nearest_within_half_a_step(number):
    for f in EVERY:
        rounded = round_to(number, f).item()
        if abs(number) <= f.max:
            assert abs(rounded - number) <= step(number, f).item() / 2
        if f.bits <= 16:
            assert abs(rounded - number) == (values(f) - number).abs().min()


def test_fp64_is_rounded_once():
    x = torch.tensor(1 + 2.0**-11 + 2.0**-40, dtype=torch.float64)  # above half way, for fp16
    assert round_to(x, "fp16").item() == 1 + 2.0**-10
    assert x.float().half().item() == 1.0  # by way of fp32 it has become half way, then even
    assert round_to(1e300, "fp32", saturate=False).item() == math.inf


@pytest.mark.parametrize("f", **by_name)
def test_ends_equal_torch_finfo(f):
    info = torch.finfo(f.dtype)
    assert (f.max, f.smallest_normal) == (info.max, info.smallest_normal)
    assert f.bits == info.bits
    assert step(1.0, f).item() == info.eps
    assert f.smallest_subnormal == decode(1, f).item()
    assert decode(f.max_code, f).item() == f.max
    assert decode(f.nan_code, f).isnan()


def test_the_ranges_of_8_bits():
    ends = {name: FORMATS[name].max for name in ("e4m3", "e5m2", "e4m3fnuz")}
    assert ends == {"e4m3": 448, "e5m2": 57344, "e4m3fnuz": 240}
    assert (int_range(8), int_range(4), int_range(2)) == ((-128, 127), (-8, 7), (-2, 1))
    assert int_range(8) == (torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max)


@pytest.mark.parametrize("f", **narrow)
def test_values_are_all_finite_numbers_once(f):
    decoded = torch_decode(all_codes(f), f)
    assert torch.equal(values(f), decoded[decoded.isfinite()].unique())  # unique also sorts
    assert not values(f)[len(values(f)) // 2].signbit()


def test_the_counts_of_finite_values():
    counts = {f.name: len(values(f)) for f in NARROW}
    assert counts["e4m3"] == 256 - 2 - 1  # two NaN, and -0 is 0
    assert counts["e5m2"] == 256 - 2 * 4 - 1
    assert counts["e4m3fnuz"] == 256 - 1
    assert counts["fp16"] == 2**16 - 2 * 2**10 - 1


@pytest.mark.parametrize("f", **narrow)
def test_step_is_the_distance_to_the_next_value_up(f):
    positive = values(f)[values(f) >= 0]
    assert torch.equal(step(positive[:-1], f), positive.diff())
    assert torch.equal(step(-positive[:-1], f), positive.diff())
    assert step(f.max, f) == step(1e300, f) == step(math.inf, f) == positive.diff()[-1]
    assert step(0.0, f) == f.smallest_subnormal


def test_fields_are_the_bits_of_the_machine():
    code = struct.unpack("<I", struct.pack("<f", -0.15625))[0]
    assert encode(-0.15625, "fp32").item() == code
    assert fields(code, "fp32") == (1, 124, 1 << 21)
    assert bit_string(code, "fp32") == "1 01111100 01000000000000000000000"
    assert bit_string(encode(3.5, "e4m3"), "e4m3") == "0 1000 110"
    assert bit_string(encode(torch.tensor([-1.0]), "e5m2"), "e5m2") == "1 01111 00"


@pytest.mark.parametrize("f", **narrow)
def test_bit_strings_are_the_code_in_three_fields(f):
    for code in range(0, 2**f.bits, 1 if f.bits == 8 else 251):
        shown = bit_string(code, f)
        assert shown.replace(" ", "") == bits(code, f.bits)
        assert [len(part) for part in shown.split()] == [1, f.exponent_bits, f.mantissa_bits]
    sign, exponent, mantissa = fields(all_codes(f), f)
    rebuilt = (sign << (f.bits - 1)) | (exponent << f.mantissa_bits) | mantissa
    assert torch.equal(rebuilt, all_codes(f))


def test_powers_of_two_are_exact():
    k = torch.arange(-1022, 1024)
    assert two_to(k).tolist() == [2.0**i for i in k.tolist()]


def test_shapes_and_dtypes_are_kept():
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        codes = encode(x.to(dtype), "e4m3")
        assert codes.shape == x.shape and codes.dtype == torch.int64
        assert decode(codes, "e4m3").shape == x.shape
    assert encode(1.0, "fp16").shape == () and decode(0, "fp16").item() == 0
    assert encode(torch.empty(0), "fp16").shape == decode(torch.empty(0).long(), "fp16").shape
    byte_codes = x.to(torch.float8_e4m3fn).view(torch.uint8)  # torch's own bytes
    assert torch.equal(decode(byte_codes, "e4m3"), round_to(x, "e4m3"))
    for name, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
        assert torch.equal(decode(x.to(dtype).view(torch.uint16), name), x.to(dtype).double())
    assert [part.tolist() for part in fields([0xC1, 0x3C], "e4m3")] == [[1, 0], [8, 7], [1, 4]]


def test_the_source_is_left_alone():
    x = torch.tensor([1e9, math.nan, -math.inf], dtype=torch.float64)
    codes = encode(x, "e4m3")
    before = codes.clone()
    decode(codes, "e4m3"), encode(x, "e4m3fnuz")
    assert torch.equal(codes, before) and x[0] == 1e9 and x[1].isnan()


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        (ValueError, lambda: encode(1.0, "fp8"), "e4m3"),
        (ValueError, lambda: decode(256, "e4m3"), "0 to 255"),
        (ValueError, lambda: decode(torch.tensor([3, -1]), "e4m3"), "& 255"),
        (TypeError, lambda: decode(torch.tensor([1.0]), "e4m3"), "as encode returns"),
        (TypeError, lambda: fields(1.5, "e4m3"), "whole numbers"),
        (ValueError, lambda: values("fp32"), "too many"),
        (ValueError, lambda: step(math.nan, "fp16"), "nan_to_num"),
        (ValueError, lambda: int_range(0), "at least 1"),
        (ValueError, lambda: int_range(4.0), "at least 1"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(kind, call, message):
    with pytest.raises(kind, match=message):
        call()
