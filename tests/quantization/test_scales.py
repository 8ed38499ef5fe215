"""Absmax and zero-point scales, against fp64 NumPy, torch's fake quantization, their promises."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.quantization.scales import Quantized, quantize

PERS = ("tensor", "row", "column", 1, 5, 16, 100)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALF_A_STEP = 0.5011  # zero-point may clip a thousandth of a step; fp32's division rounds


def normal(*shape, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def off_in_steps(x, q):
    """How far each element moved, in steps of its own block."""
    return (x.double() - q.dequantize(torch.float64)).abs() / q.each(q.scale).double()


def blocks_of(x, per):
    """Every block's indices, spelled out: the oracle for what shares a scale."""
    R, D = x.shape
    if per == "tensor":
        return [[(r, d) for r in range(R) for d in range(D)]]
    if per == "row":
        return [[(r, d) for d in range(D)] for r in range(R)]
    if per == "column":
        return [[(r, d) for r in range(R)] for d in range(D)]
    return [
        [(r, d) for d in range(start, min(start + per, D))]
        for r in range(R)
        for start in range(0, D, per)
    ]


def by_hand(x, bits, per, symmetric):
    """Scale, zero and x/scale + zero of every block, one at a time in fp64."""
    x, found = x.double().numpy(), []
    for block in blocks_of(x, per):
        part = np.array([x[i] for i in block])
        if symmetric:
            scale, zero = np.abs(part).max() / (2 ** (bits - 1) - 1), 0.0
        else:
            low, high = min(part.min(), 0.0), max(part.max(), 0.0)
            scale = (high - low) / (2**bits - 1)
            zero = np.rint(-low / scale)
        found.append((block, scale, zero, part / scale + zero))
    return found


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def matrices(draw, elements=floats):
    R, D = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    return torch.tensor(draw(st.lists(elements, min_size=R * D, max_size=R * D))).reshape(R, D)


tame = st.floats(-1e4, 1e4, width=32).map(lambda v: v if abs(v) > 1e-4 else 0.0)
pers = st.sampled_from(("tensor", "row", "column", 1, 2, 3, 64))
widths = st.integers(2, 8)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize("shape", [(1, 16), (33, 16), (3, 7), (5, 1)])
def test_codes_scales_and_zeros_equal_a_loop_in_fp64(shape, per, symmetric):
    for bits in (2, 3, 4, 8):
        x = normal(*shape, seed=bits)
        q = quantize(x, bits, per, symmetric)
        scale = q.each(q.scale).double()
        zero = torch.zeros_like(scale) if q.zero is None else q.each(q.zero).double()
        least, greatest = (
            (-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
        )
        for block, want_scale, want_zero, exact in by_hand(x, bits, per, symmetric):
            rows, columns = zip(*block, strict=True)
            np.testing.assert_allclose(scale[rows, columns], want_scale, rtol=1e-7)
            near = abs(-x.double().numpy()[rows, columns].min() / want_scale % 1 - 0.5) < 1e-4
            if symmetric or not near:
                assert (zero[rows, columns] == want_zero).all()
                want = np.clip(np.rint(exact), least, greatest)
                tie = abs(exact % 1 - 0.5) < 1e-4
                assert ((q.codes[rows, columns].numpy() == want) | tie).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_agrees_with_torch_fake_quantize(bits, symmetric):
    x = normal(33, 17, seed=bits)
    for per, axis in (("row", 0), ("column", 1)):
        q = quantize(x, bits, per, symmetric)
        scale = q.scale.flatten()
        zero = torch.zeros_like(scale, dtype=torch.int32) if symmetric else q.zero.flatten().int()
        low, high = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
        want = torch.fake_quantize_per_channel_affine(x, scale, zero, axis, low, high)
        tie = ((x.double() / q.each(q.scale).double()).abs() % 1 - 0.5).abs() < 1e-4
        assert ((q.dequantize() - want).abs()[~tie] < 1e-6).all()
        assert tie.float().mean() < 0.01


def test_halves_go_to_the_even_code():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.0]])
    assert quantize(x).codes.tolist() == [[0, 2, 2, 0, -2, -2, 127]]


@given(matrices(), widths, pers, st.booleans(), st.sampled_from((torch.float32, torch.bfloat16)))
def test_no_element_is_off_by_more_than_half_a_step(x, bits, per, symmetric, scale_dtype):
    if scale_dtype == torch.bfloat16:
        x = x / 2  # or a scale of the largest fp32 would be beyond bf16
    q = quantize(x, bits, per, symmetric, scale_dtype)
    assert off_in_steps(x, q).max() <= HALF_A_STEP
    assert q.dequantize().isfinite().all()


@given(matrices(st.floats(-60000, 60000, width=16)), widths, pers, st.booleans())
def test_nor_with_scales_in_fp16_however_small(x, bits, per, symmetric):
    for magnitude in (0.25, 2.0**-20, 2.0**-30):  # the second makes fp16 scales subnormal or 0
        tiny = x * magnitude
        q = quantize(tiny, bits, per, symmetric, torch.float16)
        assert q.scale.dtype == torch.float16 and (q.scale > 0).all()
        assert off_in_steps(tiny, q).max() <= HALF_A_STEP


@given(matrices(), widths, pers)
def test_absmax_is_symmetric_in_sign(x, bits, per):
    plus, minus = quantize(x, bits, per), quantize(-x, bits, per)
    assert torch.equal(minus.codes, -plus.codes)
    assert torch.equal(minus.scale, plus.scale)


@given(matrices(tame), widths, pers, st.booleans(), st.integers(-20, 20))
def test_a_power_of_two_scales_the_scale_and_keeps_the_codes(x, bits, per, symmetric, k):
    one, other = quantize(x, bits, per, symmetric), quantize(x * 2.0**k, bits, per, symmetric)
    assert torch.equal(other.codes, one.codes)
    assert torch.equal(other.dequantize(), one.dequantize() * 2.0**k)


@given(matrices(tame), widths, pers)
def test_quantizing_again_changes_nothing(x, bits, per):
    once = quantize(x, bits, per)
    twice = quantize(once.dequantize(), bits, per)
    assert torch.equal(twice.codes, once.codes)
    torch.testing.assert_close(twice.dequantize(), once.dequantize(), rtol=3e-7, atol=0)


@given(matrices(), widths, st.booleans())
def test_columns_are_the_rows_of_the_transpose(x, bits, symmetric):
    columns, rows = quantize(x, bits, "column", symmetric), quantize(x.T, bits, "row", symmetric)
    assert torch.equal(columns.codes, rows.codes.T)
    assert torch.equal(columns.scale, rows.scale.T)
    assert torch.equal(columns.dequantize(), rows.dequantize().T)


@given(matrices(), widths, st.booleans())
def test_groups_wider_than_the_row_are_rows_and_groups_of_one_are_exact(x, bits, symmetric):
    wide, row = quantize(x, bits, 64, symmetric), quantize(x, bits, "row", symmetric)
    assert torch.equal(wide.codes, row.codes) and torch.equal(wide.scale, row.scale)
    one = quantize(x, bits, 1, symmetric)
    torch.testing.assert_close(one.dequantize(), x, rtol=1e-6, atol=1e-42)  # subnormal scales


@given(matrices(tame), widths, pers)
def test_zero_stays_zero_and_in_range(x, bits, per):
    x[0, 0] = 0.0
    q = quantize(x, bits, per, symmetric=False)
    assert q.dequantize()[0, 0] == 0
    assert int(q.codes.max()) <= 2**bits - 1


@pytest.mark.parametrize("D", [16, 17, 5, 4, 1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_tail_is_a_group_of_its_own(D, symmetric):
    x = normal(33, D)
    q = quantize(x, 4, 5, symmetric)
    assert q.scale.shape == (33, -(-D // 5))
    for j in range(q.scale.shape[1]):
        alone = quantize(x[:, 5 * j : 5 * j + 5], 4, "row", symmetric)
        assert torch.equal(q.codes[:, 5 * j : 5 * j + 5], alone.codes)
        assert torch.equal(q.scale[:, j : j + 1], alone.scale)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_magnitude_takes_the_largest_code(scale_dtype):
    for bits in range(2, 9):
        for seed in range(20):
            x = normal(8, 33, seed=seed)
            q = quantize(x, bits, "row", scale_dtype=scale_dtype)
            at = x.abs().argmax(-1, keepdim=True)
            assert (q.codes.gather(1, at).abs() == 2 ** (bits - 1) - 1).all()
            if scale_dtype == torch.float32:
                values = q.dequantize().gather(1, at)
                torch.testing.assert_close(values, x.gather(1, at), rtol=2e-7, atol=0)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_codes_are_made_with_the_scale_that_is_stored(scale_dtype):
    x = normal(64, 64)
    q = quantize(x, 8, "row", scale_dtype=scale_dtype)
    exact = x.double() / q.scale.double()
    tie = (exact.abs() % 1 - 0.5).abs() < 1e-4
    assert torch.equal(q.codes.double()[~tie], exact.round().clamp(-127, 127)[~tie])
    unrounded = (x.double() / (x.double().abs().amax(-1, keepdim=True) / 127)).round()
    assert not torch.equal(q.codes.double(), unrounded)  # so the difference shows here


def test_a_tie_at_the_end_does_not_step_past_the_last_code():
    for bits in (2, 8):  # both ends are half way and round outwards, to even
        end = (2**bits - 1) / 2
        q = quantize(torch.tensor([[-end, end]]), bits, symmetric=False)
        assert q.codes.tolist() == [[0, 2**bits - 1]]
    x = torch.tensor([[-12750.0, 12750.0]]) * 2.0**-24  # 127.5 of the fp16 scale, a subnormal
    q = quantize(x, 8, scale_dtype=torch.float16)
    assert q.scale.item() == 100 * 2.0**-24
    assert q.codes.tolist() == [[-127, 127]]


def test_a_stored_scale_that_would_clip_moves_up():
    x = torch.tensor([[0.0, 255.0 * 1.0038]])  # in bf16 the scale rounds down to 1.0
    q = quantize(x, 8, "row", symmetric=False, scale_dtype=torch.bfloat16)
    assert q.scale.item() == 1 + 2**-7
    assert off_in_steps(x, q).max() <= 0.5


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per", PERS)
def test_blocks_of_zeros_stay_zeros(per, symmetric):
    for dtype in DTYPES:
        x = normal(4, 12, dtype=dtype)
        x[1], x[:, 5:10] = 0, 0
        q = quantize(x, 4, per, symmetric, torch.float16)
        assert (q.dequantize()[x == 0] == 0).all()
        nothing = quantize(torch.zeros_like(x), 8, per, symmetric)
        assert (nothing.scale == 1).all() and (nothing.codes == 0).all()
        assert torch.equal(nothing.dequantize(), torch.zeros_like(x))
        assert nothing.error(torch.zeros_like(x)) == 0.0


def test_scales_that_fp16_would_round_to_zero_do_not_divide_by_it():
    x = torch.tensor([[1e-6, -1e-6, 2e-7], [1.0, -1.0, 0.2]])
    assert (x[0].abs().max() / 127).half() == 0
    q = quantize(x, 8, "row", scale_dtype=torch.float16)
    assert q.scale[0].item() == 2.0**-24
    assert q.dequantize().isfinite().all() and off_in_steps(x, q).max() <= 0.5


def test_dequantizing_in_fp16_does_not_overflow_on_the_way():
    row = torch.full((1, 4096), 600.0, dtype=torch.float16)
    q = quantize(row)
    assert (q.codes.half() * 600).isinf().all()  # codes times the maximum, before dividing by 127
    assert torch.equal(q.dequantize(), row)
    stored = Quantized(torch.full((1, 4096), 127).char(), torch.tensor([[6.0]]).half(), None,
                       8, "row", torch.float16)  # fmt: skip
    assert torch.equal(stored.dequantize(), torch.full_like(row, 762.0))


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_largest_number_of_a_dtype_comes_back_finite(symmetric):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for scale_dtype in (torch.float32, torch.float64, dtype):
            x = torch.tensor([[1.0, -1.0, 0.3]], dtype=dtype) * torch.finfo(dtype).max
            for bits in (3, 8):
                back = quantize(x, bits, "row", symmetric, scale_dtype).dequantize()
                assert back.dtype == dtype and back.isfinite().all()
                assert (back[0, 0] / x[0, 0]).item() == pytest.approx(1, abs=0.25 if bits == 3 else
                                                                      0.01)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_comes_back_unless_another_is_asked_for(dtype):
    x = normal(3, 8, dtype=dtype)
    q = quantize(x)
    assert q.dequantize().dtype == dtype and q.dequantize(torch.float32).dtype == torch.float32
    assert q.codes.dtype == torch.int8 and quantize(x, symmetric=False).codes.dtype == torch.uint8


def test_any_number_of_axes_counts_as_rows():
    x = normal(2, 3, 10)
    for per in PERS:
        q, flat = quantize(x, 4, per), quantize(x.reshape(6, 10), 4, per)
        assert q.shape == x.shape and torch.equal(q.scale, flat.scale)
        assert torch.equal(q.dequantize().reshape(6, 10), flat.dequantize())
        one, row = quantize(x[0, 0], 4, per), quantize(x[0, :1], 4, per)
        assert one.shape == (10,) and torch.equal(one.codes, row.codes[0])


def test_the_source_is_left_alone_and_views_are_fine():
    x = normal(16, 12).T.requires_grad_()
    before = x.detach().clone()
    q = quantize(x, 4, 5, symmetric=False)
    q.dequantize(), q.dequantize()
    assert torch.equal(x, before) and not q.scale.requires_grad
    assert torch.equal(q.codes, quantize(before.contiguous(), 4, 5, symmetric=False).codes)


@pytest.mark.parametrize(
    ("bits", "per", "symmetric", "scale_dtype", "nbytes"),
    [
        (8, "row", True, torch.float32, 33 * 16 + 33 * 4),
        (8, "column", True, torch.float32, 33 * 16 + 16 * 4),
        (8, "tensor", False, torch.float32, 33 * 16 + 4 + 1),
        (4, 16, True, torch.float16, 33 * 8 + 33 * 2),
        (3, 5, False, torch.float16, 198 + 33 * 4 * (2 + 1)),
        (2, "row", False, torch.bfloat16, 33 * 4 + 33 * 3),
    ],
)
def test_bytes_count_packed_codes_scales_and_zeros(bits, per, symmetric, scale_dtype, nbytes):
    q = quantize(normal(33, 16), bits, per, symmetric, scale_dtype)
    assert q.nbytes == nbytes
    assert q.bits_per_weight == 8 * nbytes / (33 * 16)


def test_the_error_is_relative_to_the_norm():
    x = torch.tensor([[3.0, 4.0]])
    q = Quantized(torch.tensor([[3, 3]]).char(), torch.ones(1, 1), None, 8, "row", x.dtype)
    assert q.error(x) == pytest.approx(1 / 5)
    errors = [quantize(normal(16, 64), bits).error(normal(16, 64)) for bits in range(2, 9)]
    assert errors == sorted(errors, reverse=True)


def test_an_outlier_costs_its_whole_block():
    x = normal(8, 64)
    x[:, 3] *= 100
    others = [d for d in range(64) if d != 3]
    lost = {
        per: (quantize(x, 8, per).dequantize() - x)[:, others].abs().mean().item()
        for per in ("row", 16, "column")
    }
    assert lost["column"] < lost[16] < lost["row"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", ["tensor", "row", "column", 5])
def test_what_is_not_finite_is_refused(bad, dtype, per):
    x = normal(3, 16, dtype=dtype)
    x[1, 15] = bad
    for symmetric in (True, False):
        with pytest.raises(ValueError, match=r"1 of 48 numbers .* \[1, 15\].*nan_to_num"):
            quantize(x, 8, per, symmetric)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (TypeError, {"x": torch.ones(2, 2, dtype=torch.int8)}, "x.float()"),
        (ValueError, {"x": torch.ones(0, 4)}, "at least one"),
        (ValueError, {"x": torch.ones(4, 0)}, "at least one"),
        (ValueError, {"x": torch.tensor(1.0)}, "at least one"),
        (ValueError, {"bits": 1}, "from 2 to 8"),
        (ValueError, {"bits": 9}, "from 2 to 8"),
        (ValueError, {"bits": 4.0}, "from 2 to 8"),
        (ValueError, {"per": 0}, "a group's size"),
        (ValueError, {"per": True}, "a group's size"),
        (ValueError, {"per": "rows"}, "'row'"),
        (ValueError, {"per": 2.5}, "a group's size"),
        (TypeError, {"symmetric": 48}, "True for absmax, False for zero-point"),
        (TypeError, {"symmetric": torch.float16}, "True for absmax"),
        (ValueError, {"scale_dtype": torch.float8_e4m3fn}, "expected one of"),
        (ValueError, {"x": torch.full((2, 2), 1e8), "scale_dtype": torch.float16}, "bfloat16"),
        (ValueError, {"x": torch.full((2, 2), 1e300, dtype=torch.float64)}, "beyond torch.float32"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(kind, given, message):
    with pytest.raises(kind, match=message):
        quantize(**{"x": torch.ones(2, 4), **given})


def test_a_group_far_wider_than_the_row_costs_nothing():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    wide, row = quantize(x, 4, 10**15), quantize(x, 4, "row")
    assert torch.equal(wide.codes, row.codes) and torch.equal(wide.dequantize(), row.dequantize())


def test_the_error_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="shape"):
        quantize(torch.ones(2, 4)).error(torch.ones(4, 2))
