import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lecture_util.model.shapes import ShapeError
from lecture_util.quantization.llm_int8 import (
    Int8Linear,
    int8_matmul,
    llm_int8,
    outlier_columns,
    quantize_rows,
)

HALF = 2.0**-11  # fp16's relative rounding error


@pytest.fixture(scope="module")
def bnb():
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    pytest.importorskip("bitsandbytes")
    return torch.ops.bitsandbytes


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def batch(T, D, outliers=(), seed=0, dtype=torch.float16):
    """Below 6 but at the given (row, column, value)."""
    x_TD = normal(T, D, seed=seed).clamp(-5, 5).to(dtype)
    for row, column, value in outliers:
        x_TD[row, column] = value
    return x_TD


BATCHES = {
    "no outliers": (7, 96, ()),
    "one row": (1, 96, ()),
    "one row with outliers": (1, 96, [(0, 3, -40.0), (0, 95, 6.0)]),
    "one outlier": (7, 96, [(2, 5, 60.0)]),
    "two in a column, at the threshold": (20, 33, [(0, 32, 6.0), (19, 32, -6.0)]),
    "three columns": (33, 65, [(0, 0, 9.0), (5, 1, -100.0), (32, 64, 6.01)]),
    "all outliers": (3, 4, [(0, 0, 7.0), (1, 1, 7.0), (2, 2, 7.0), (0, 3, -7.0)]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_codes_and_scales_equal_bitsandbytes(bnb, name):
    T, D, outliers = BATCHES[name]
    x_TD = batch(T, D, outliers)
    codes, absmax, columns = bnb.int8_vectorwise_quant(x_TD.clone(), 6.0)
    ours, scales = quantize_rows(x_TD, threshold=6.0)
    kept = scales > 0  # theirs divides by zero where a row is all outliers
    assert torch.equal(ours[kept], codes[kept]) and torch.equal(scales, absmax)
    assert not ours[~kept].any()
    assert torch.equal(outlier_columns(x_TD), columns)
    codes, absmax, _ = bnb.int8_vectorwise_quant(x_TD, 0.0)
    ours, scales = quantize_rows(x_TD)
    assert torch.equal(ours, codes) and torch.equal(scales, absmax)


def test_more_rows_than_a_chunk_equal_bitsandbytes(bnb):
    x_TD = normal(700, 1001, dtype=torch.float16)
    codes, absmax, _ = bnb.int8_vectorwise_quant(x_TD, 0.0)
    ours, scales = quantize_rows(x_TD)
    assert torch.equal(ours, codes) and torch.equal(scales, absmax)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 5), (16, 64, 8), (17, 33, 9), (5, 1025, 3)])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_int8_product_is_exact_on_either_path(monkeypatch, bnb, shape, capability):
    T, D, F = shape
    a_TD, b_FD = whole(T, D), whole(F, D, seed=1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    out_TF = int8_matmul(a_TD, b_FD)
    assert out_TF.dtype == torch.int32
    assert torch.equal(out_TF.long(), a_TD.long() @ b_FD.long().T)
    assert torch.equal(out_TF, bnb.int8_linear_matmul(a_TD, b_FD))


@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_sums_beyond_what_fp32_and_int16_hold_stay_exact(monkeypatch, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    D = 40_001
    a_TD = torch.full((2, D), -128, dtype=torch.int8)
    b_FD = torch.full((3, D), -128, dtype=torch.int8)
    a_TD[1], b_FD[1:, 0] = 127, 127
    assert torch.equal(int8_matmul(a_TD, b_FD).long(), a_TD.long() @ b_FD.long().T)


@pytest.mark.parametrize("name", BATCHES)
def test_product_equals_the_formula_in_fp64(name):
    T, D, outliers = BATCHES[name]
    x_TD, w_FD = batch(T, D, outliers, dtype=torch.float32), normal(11, D, seed=1)
    w_codes, w_absmax = quantize_rows(w_FD)
    columns = sorted({column for _, column, _ in outliers})
    inner = [d for d in range(D) if d not in columns]
    x, rounded = x_TD.double(), w_codes.double() * w_absmax[:, None].double() / 127
    # Rows are scaled by what is no outlier, in outlier columns too.
    scale = torch.where(x.abs() < 6, x.abs(), 0).amax(1, keepdim=True) / 127
    steps = torch.where(scale > 0, (x[:, inner] / scale).round(), 0)
    inside = scale * steps @ rounded[:, inner].T
    for w, outer in [(None, rounded), (w_FD, w_FD.double())]:
        expected = inside + x[:, columns] @ outer[:, columns].T
        out = llm_int8(x_TD, w_codes, w_absmax, w=w).double()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * (1 + x.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_product_agrees_with_bitsandbytes_within_rounding(bnb, name, dtype):
    T, D, outliers = BATCHES[name]
    x_TD = batch(T, D, outliers).to(dtype)
    if name == "all outliers":
        x_TD[:, :] = 7.0 * normal(T, D).sign()
        x_TD = torch.cat(
            [x_TD, normal(T, 1).half().to(dtype)], 1
        )  # or bitsandbytes divides by zero
        D += 1
    w_FD = normal(24, D, seed=1, dtype=torch.float16)
    w_codes, w_absmax = quantize_rows(w_FD)
    codes, absmax, columns = bnb.int8_vectorwise_quant(x_TD.half(), 6.0)
    theirs, _ = bnb.int8_mixed_scaled_mm(x_TD, codes, w_codes, absmax, w_absmax, columns)
    ours = llm_int8(x_TD, w_codes, w_absmax)
    assert ours.dtype == dtype
    # Theirs multiplies by 6.200124e-05 for 1/127**2, 1.8e-5 too large, and rounds to x's dtype at
    # each of three steps where ours does once.
    size = x_TD.float().abs() @ w_FD.float().abs().T
    slack = 3e-5 if dtype == torch.float32 else 3e-5 + 4 * HALF
    assert ((ours.float() - theirs.float()).abs() <= slack * size).all()


def test_an_outlier_takes_its_whole_column_out_of_int8_for_every_row():
    x_TD = torch.zeros(3, 8)
    x_TD[0, 2], x_TD[1, 2], x_TD[2, 2] = 6.0, 0.01, -0.3
    w_FD = normal(5, 8)
    w_codes, w_absmax = quantize_rows(w_FD)
    x_TD[:, 4] = 5.0  # whose scale would round 0.01 to nothing
    rest = x_TD.clone()
    rest[:, 2] = 0
    column = llm_int8(x_TD, w_codes, w_absmax, w=w_FD) - llm_int8(rest, w_codes, w_absmax)
    torch.testing.assert_close(column, x_TD[:, 2:3] * w_FD[:, 2], rtol=1e-4, atol=1e-5)


def test_the_threshold_itself_is_an_outlier():
    x_TD = torch.tensor([[5.999, 0.0, 6.0, -6.0, 100.0]])
    assert outlier_columns(x_TD).tolist() == [2, 3, 4]
    assert outlier_columns(x_TD.view(1, 1, 5), threshold=100.5).tolist() == []


def test_outliers_spoil_plain_int8_and_not_llm_int8():
    x_TD, w_FD = batch(64, 256, dtype=torch.float32), normal(32, 256, seed=1)
    x_TD[:, 7] = 80.0 * normal(64, seed=2).sign()
    expected = x_TD @ w_FD.T
    quantized = quantize_rows(w_FD)

    def error(**options):
        return (llm_int8(x_TD, *quantized, **options) - expected).norm() / expected.norm()

    plain, theirs, paper = error(threshold=None), error(), error(w=w_FD)
    assert plain > 3 * theirs > 3 * paper


@pytest.mark.parametrize("threshold", [6.0, None])
@pytest.mark.parametrize("keep", [False, True])
def test_fp16_holds_a_row_of_4096_weights_at_code_127_times_six(threshold, keep):
    x_TD = torch.full((2, 4096), 6.0, dtype=torch.float16)
    w_FD = torch.full((3, 4096), 2.0, dtype=torch.float16)
    w_codes, w_absmax = quantize_rows(w_FD)
    assert (w_codes == 127).all()
    out_TF = llm_int8(x_TD, w_codes, w_absmax, threshold, w_FD if keep else None)
    assert out_TF.dtype == torch.float16  # while 4096 * 127 * 6 is beyond its 65504
    torch.testing.assert_close(out_TF, torch.full_like(out_TF, 4096 * 12.0), rtol=HALF, atol=0)


def test_rows_of_zeros_stay_zeros():
    x_TD = batch(4, 16, [(3, 2, 50.0)])
    x_TD[1] = 0
    x_TD[2] = 0
    x_TD[2, 5] = 30.0  # nothing but an outlier
    codes, absmax = quantize_rows(x_TD)
    assert not codes[1].any() and absmax[1] == 0
    w_FD = normal(6, 16, dtype=torch.float16)
    w_FD[4] = 0
    layer = Int8Linear.from_linear(as_linear(w_FD))
    out_TF = layer(x_TD)
    assert out_TF.isfinite().all() and not out_TF[1].any() and not out_TF[:, 4].any()
    torch.testing.assert_close(out_TF[2].float(), 30 * w_FD[:, 5].float(), rtol=0.02, atol=0.5)
    assert not Int8Linear.from_linear(as_linear(torch.zeros(3, 16)))(normal(2, 16)).any()


@given(st.integers(1, 40), st.integers(1, 9), st.integers(-20, 20), st.integers(0, 99))
def test_rows_round_to_half_a_step_symmetrically_and_scale_along(D, T, exponent, seed):
    x_TD = normal(T, D, seed=seed)
    codes, absmax = quantize_rows(x_TD)
    assert codes.abs().amax(1).tolist() == [127] * T
    assert torch.equal(absmax, x_TD.abs().amax(1))
    wrong = (codes.double() * absmax[:, None].double() / 127 - x_TD.double()).abs()
    assert (wrong <= absmax[:, None].double() / 254 * (1 + 1e-5)).all()
    negated, same = quantize_rows(-x_TD)
    assert torch.equal(negated, -codes) and torch.equal(same, absmax)
    scaled, scales = quantize_rows(x_TD * 2.0**exponent)
    assert torch.equal(scaled, codes) and torch.equal(scales, absmax * 2.0**exponent)


def test_rows_at_the_ends_of_fp16_and_below_fp32():
    x_TD = torch.tensor([[65504.0, -1.0], [6e-8, -6e-8]], dtype=torch.float16)
    codes, absmax = quantize_rows(x_TD)
    assert codes.tolist() == [[127, 0], [127, -127]] and (absmax > 0).all()
    codes, absmax = quantize_rows(torch.tensor([[1e-40, -1e-41], [1e-30, 0.0]]))
    assert codes.tolist() == [[0, 0], [127, 0]]


def as_linear(w_FD, bias=None):
    linear = nn.Linear(w_FD.shape[1], len(w_FD), bias=bias is not None, dtype=w_FD.dtype)
    with torch.no_grad():
        linear.weight.copy_(w_FD)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 48), (7, 5), (33, 1)])
def test_layer_is_the_linear_within_int8_and_counts_its_bytes(shape, dtype):
    D, F = shape
    linear = as_linear(normal(F, D, dtype=dtype), normal(F, seed=3, dtype=dtype))
    x = batch(6, D, [(1, D - 1, 9.0)], dtype=dtype).view(2, 3, D)
    expected = linear(x).float()
    for keep in (False, True):
        layer = Int8Linear.from_linear(linear, keep=keep)
        out = layer(x)
        assert out.shape == (2, 3, F) and out.dtype == dtype
        assert (out.float() - expected).norm() <= 0.02 * expected.norm()
        assert layer.weight_bytes == F * D + 4 * F + (dtype.itemsize * F * D if keep else 0)
        step = layer.absmax[:, None] / 127
        assert ((layer.dequantized() - linear.weight.float()).abs() <= 0.5001 * step).all()
    assert layer(x[:0]).shape == (0, 3, F)


def test_bad_input_is_refused():
    for bad in (math.nan, math.inf):
        x_TD = normal(3, 8)
        x_TD[1, 1] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize_rows(x_TD)
        with pytest.raises(ValueError, match="NaN or infinity"):
            Int8Linear.from_linear(as_linear(x_TD))
    layer = Int8Linear.from_linear(nn.Linear(8, 4))
    with pytest.raises(ValueError, match="NaN"):
        layer(torch.full((2, 8), math.nan))
    with pytest.raises(ShapeError, match="D=8"):
        layer(normal(2, 7))
    with pytest.raises(ShapeError, match="floats"):
        layer(torch.ones(2, 8).int())
    with pytest.raises(TypeError, match="expected some floats"):
        quantize_rows(torch.ones(2, 3).int())
    with pytest.raises(TypeError, match="expected some floats"):
        quantize_rows(torch.empty(0, 3))
    with pytest.raises(ShapeError, match="flatten"):
        quantize_rows(normal(2, 3, 4))
    for threshold in (0.0, -6.0, math.nan):
        with pytest.raises(ValueError, match="positive magnitude"):
            outlier_columns(normal(2, 3), threshold)
        with pytest.raises(ValueError, match="positive magnitude"):
            Int8Linear.from_linear(nn.Linear(8, 4), threshold)
    with pytest.raises(ShapeError, match="D=3"):
        int8_matmul(whole(2, 3), whole(2, 4))
    with pytest.raises(ShapeError, match="expected int8"):
        int8_matmul(whole(2, 3), whole(2, 3).int())
    with pytest.raises(ShapeError, match="overflow int32"):
        int8_matmul(torch.zeros(1, 131_072, dtype=torch.int8), whole(1, 131_072))
