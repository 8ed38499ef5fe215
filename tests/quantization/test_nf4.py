import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lecture_util.kernels.int4_linear import int4_linear
from lecture_util.quantization.nf4 import (
    NF4_LEVELS,
    NF4Linear,
    dequantize_nf4,
    double_dequantize,
    double_quantize,
    dynamic_book,
    quantize_nf4,
)

BLOCKSIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def bnb():
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    functional = pytest.importorskip("bitsandbytes").functional
    with torch.compiler.set_stance("force_eager"):  # it compiles for each odd length
        yield functional


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_bits(bnb, w, blocksize):
    """Bytes, scales and dequantized weights, with plain and with double-quantized scales.

    They dequantize as a single row: for a matrix whose rows don't end with a block, version 0.50.2
    multiplies by other blocks' scales on CPUs with AVX-512.
    """
    one_row = torch.Size([w.numel()])
    theirs, state = bnb.quantize_4bit(w, blocksize=blocksize, quant_type="nf4")
    packed, absmax = quantize_nf4(w, blocksize)
    assert packed.dtype == torch.uint8 and torch.equal(packed, theirs.view(-1))
    assert absmax.dtype == torch.float32 and torch.equal(absmax, state.absmax)
    for dtype in DTYPES:
        state.dtype, state.shape = dtype, one_row
        expected = bnb.dequantize_4bit(theirs, state).view(w.shape)
        assert torch.equal(dequantize_nf4(packed, absmax, w.shape, blocksize, dtype), expected)

    theirs, state = bnb.quantize_4bit(
        w, blocksize=blocksize, quant_type="nf4", compress_statistics=True
    )
    assert torch.equal(packed, theirs.view(-1))
    codes, group_absmax, offset = double_quantize(absmax)
    assert torch.equal(codes, state.absmax)
    assert torch.equal(group_absmax, state.state2.absmax)
    assert torch.equal(offset, state.offset)
    scales = double_dequantize(codes, group_absmax, offset)
    assert torch.equal(scales, bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset)
    state.shape = one_row
    expected = bnb.dequantize_4bit(theirs, state).view(w.shape)
    assert torch.equal(dequantize_nf4(packed, scales, w.shape, blocksize, w.dtype), expected)


def test_levels_and_book_are_bitsandbytes(bnb):
    assert torch.equal(NF4_LEVELS, bnb.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(dynamic_book(), bnb.create_dynamic_map())


def test_levels_are_quantiles_of_a_normal_as_scipy_computes_them():
    norm = pytest.importorskip("scipy.stats").norm
    outermost = (1 - 1 / 32 + 1 - 1 / 30) / 2  # the paper's; bitsandbytes rounds it to 7 digits
    above = [norm.ppf(outermost + (0.5 - outermost) * i / 8) for i in range(8)]
    below = [-norm.ppf(outermost + (0.5 - outermost) * i / 7) for i in range(7)]
    levels = torch.tensor([*below, 0, *above[::-1]], dtype=torch.float64) / above[0]
    torch.testing.assert_close(NF4_LEVELS.double(), levels, rtol=0, atol=1e-6)
    assert NF4_LEVELS[7] == 0 and NF4_LEVELS[0] == -1 and NF4_LEVELS[15] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_bits_equal_bitsandbytes_for_every_block_size_and_tail(bnb, blocksize, dtype):
    for n in [1, 2, blocksize - 1, blocksize, blocksize + 1, 5 * blocksize + 7]:
        assert_same_bits(bnb, normal(n, seed=n, dtype=dtype), blocksize)


def test_block_sizes_that_bitsandbytes_refuses_work_here(bnb):
    w = normal(3, 50)
    for blocksize in [1, 7, 16, 48]:
        with pytest.raises(ValueError):
            bnb.quantize_4bit(w, blocksize=blocksize, quant_type="nf4")
        packed, absmax = quantize_nf4(w, blocksize)
        assert len(packed) == 75 and len(absmax) == math.ceil(150 / blocksize)
        wrong = dequantize_nf4(packed, absmax, w.shape, blocksize) - w
        assert wrong.abs().max() <= absmax.max() * 0.16  # half the widest gap between levels, 0.304


@pytest.mark.parametrize("shape", [(1, 16), (33, 16), (33, 17), (576, 192), (2, 3, 5)])
def test_blocks_run_on_across_rows_and_shapes_return(bnb, shape):
    assert_same_bits(bnb, normal(*shape), 64)


def test_more_than_a_chunk_of_weights_and_several_groups_of_scales(bnb):
    assert_same_bits(bnb, normal(301, 1777) * normal(301, 1, seed=1), 64)  # 534,877 weights
    assert_same_bits(bnb, normal(301, 1777) * normal(301, 1, seed=1), 4096)


@pytest.mark.parametrize("n", [128, 100, 64, 63])
def test_zero_blocks_give_zeros_in_whole_blocks_and_tails(bnb, n):
    zeros = torch.zeros(n)
    assert_same_bits(bnb, zeros, 64)
    packed, absmax = quantize_nf4(zeros)
    assert set(packed.tolist()) == {0x77}  # the code of zero, twice
    assert not dequantize_nf4(packed, absmax, (n,)).any()
    mixed = normal(4 * 64 + 9)
    mixed[64:128] = 0
    mixed[256:] = 0
    assert_same_bits(bnb, mixed, 64)


def test_a_weight_halfway_between_levels_goes_down(bnb):
    midpoints = (NF4_LEVELS[:-1] + NF4_LEVELS[1:]) / 2
    w = torch.cat([torch.ones(1), midpoints])  # the 1 makes the block's scale 1
    up = torch.cat([torch.ones(1), torch.nextafter(midpoints, torch.tensor(2.0))])
    for blocksize in [32, 64]:  # as a tail
        assert_same_bits(bnb, w, blocksize)
        assert_same_bits(bnb, up, blocksize)
    assert_same_bits(bnb, torch.cat([w, w, up, up]), 32)  # as whole blocks
    codes = [code for byte in quantize_nf4(w)[0].tolist() for code in (byte >> 4, byte & 15)]
    assert codes == [15, *range(15)]
    codes = [code for byte in quantize_nf4(up)[0].tolist() for code in (byte >> 4, byte & 15)]
    assert codes == [15, *range(1, 16)]


def test_tiny_and_huge_weights(bnb):
    for scale in [1e-45, 1e-40, 1e-38, 1e-30, 1e30, 3e37]:
        assert_same_bits(bnb, normal(150).clamp(-3, 3) * scale, 64)


def test_the_first_weight_is_in_the_high_nibble_and_zero_fills_the_last():
    packed, absmax = quantize_nf4(torch.tensor([1.0, -1.0, 0.5 - 1e-3]))
    assert packed.tolist() == [0xF0, 0xC7]  # level 12 is 0.441, level 7 is 0
    assert absmax.tolist() == [1.0]


@given(st.integers(1, 200), st.integers(1, 70), st.integers(0, 9), st.sampled_from(DTYPES))
def test_errors_stay_within_half_a_gap_and_scaling_by_two_changes_no_code(n, size, seed, dtype):
    w = normal(n, seed=seed, dtype=dtype)
    packed, absmax = quantize_nf4(w, size)
    back = dequantize_nf4(packed, absmax, w.shape, size)
    scale = absmax.repeat_interleave(size)[:n]
    gaps = NF4_LEVELS.diff().max() / 2 * scale
    assert ((back - w.float()).abs() <= gaps * (1 + 1e-6)).all()
    doubled, twice = quantize_nf4(w * 2, size)
    assert torch.equal(doubled, packed) and torch.equal(twice, absmax * 2)
    again, _ = quantize_nf4(back, size)
    assert torch.equal(again, packed)  # what has been rounded stays


def test_double_quantization_of_fifteen_scales_in_two_groups(bnb):
    absmax = normal(15).abs()
    codes, group_absmax, offset = double_quantize(absmax, blocksize=8)
    theirs, state = bnb.quantize_blockwise(absmax - absmax.mean(), blocksize=8)
    assert len(group_absmax) == 2 and torch.equal(group_absmax, state.absmax)
    assert torch.equal(codes, theirs) and torch.equal(offset, absmax.mean())
    back = double_dequantize(codes, group_absmax, offset, blocksize=8)
    assert torch.equal(back, bnb.dequantize_blockwise(theirs, state) + offset)
    # The book's widest gap is 0.0141 of a group's scale.
    assert (back - absmax).abs().max() <= 0.0071 * group_absmax.max()


def test_scales_of_another_shape_or_block_size_are_refused():
    codes, group_absmax, offset = double_quantize(normal(256).abs(), blocksize=128)
    with pytest.raises(ValueError, match="256 codes in blocks of 256 have 1 groups, not 2"):
        double_dequantize(codes, group_absmax, offset)
    with pytest.raises(ValueError, match="flatten the scales"):
        double_quantize(normal(256, 3).abs())


@pytest.mark.parametrize("J", [1, 2, 255, 256, 257, 511, 513, 70_001])
def test_double_quantization_equals_bitsandbytes_at_any_number_of_scales(bnb, J):
    for absmax in (normal(J).abs(), normal(J, seed=1).exp(), torch.full((J,), 0.3)):
        codes, group_absmax, offset = double_quantize(absmax)
        theirs, state = bnb.quantize_blockwise(absmax - absmax.mean(), blocksize=256)
        assert torch.equal(codes, theirs) and torch.equal(group_absmax, state.absmax)
        back = double_dequantize(codes, group_absmax, offset)
        assert torch.equal(back, bnb.dequantize_blockwise(theirs, state) + absmax.mean())
        assert back.isfinite().all()


def test_layer_stores_what_it_counts_and_double_scales_cost_0_127_bits():
    linear = nn.Linear(1024, 512)
    single = NF4Linear.from_linear(linear, double=False)
    double = NF4Linear.from_linear(linear)
    assert single.weight_bytes == 1024 * 512 // 2 + 1024 * 512 // 64 * 4
    assert single.bits_per_weight == 4.5
    assert double.bits_per_weight == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-4)
    saved = single.bits_per_weight - double.bits_per_weight
    assert saved == pytest.approx(0.373, abs=1e-3)  # QLoRA, section 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(64, 96), (7, 5), (65, 33)])
def test_layer_multiplies_its_dequantized_weights(shape, double, bias):
    D, F = shape
    linear = nn.Linear(D, F, bias=bias)
    layer = NF4Linear.from_linear(linear, double=double)
    packed, absmax = quantize_nf4(linear.weight)
    w_FD = dequantize_nf4(packed, absmax, (F, D))
    x = normal(2, 3, D)
    if not double:
        assert torch.equal(layer.dequantized(), w_FD)
    expected = x.double() @ layer.dequantized().double().T
    expected = expected if linear.bias is None else expected + linear.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert (layer.dequantized() - w_FD).abs().max() <= 0.01 * absmax.max()


def test_the_int4_kernels_reference_reads_our_bytes():
    linear = nn.Linear(128, 24, bias=False)
    layer = NF4Linear.from_linear(linear, double=False)
    x_BD = normal(3, 128)
    out = int4_linear(
        x_BD, layer.packed.view(24, -1), NF4_LEVELS, layer.absmax.view(24, -1), group_size=64
    )
    torch.testing.assert_close(out, layer(x_BD), rtol=1e-5, atol=1e-5)


def test_bad_input_is_refused():
    for bad in [math.nan, math.inf, -math.inf]:
        for place in [0, 70]:  # a whole block, and a tail
            w = normal(80)
            w[place] = bad
            with pytest.raises(ValueError, match="NaN or infinite"):
                quantize_nf4(w)
            with pytest.raises(ValueError, match="NaN or infinite"):
                double_quantize(w)
    for wrong in [torch.ones(4).double(), torch.ones(4).int(), torch.ones(4).bool()]:
        with pytest.raises(TypeError, match="expected float32, bfloat16 or float16"):
            quantize_nf4(wrong)
    with pytest.raises(ValueError, match="nothing to quantize"):
        quantize_nf4(torch.empty(0, 4))
    for blocksize in [0, -64, 64.0, True]:
        with pytest.raises(ValueError, match="blocksize"):
            quantize_nf4(normal(4), blocksize)
    packed, absmax = quantize_nf4(normal(80))
    with pytest.raises(ValueError, match="40 bytes and 3 scales, but there are 40 and 2"):
        dequantize_nf4(packed, absmax, (80,), blocksize=32)
    with pytest.raises(ValueError, match="pass the shape"):
        dequantize_nf4(packed, absmax, (78,))


def test_quantizing_leaves_its_input_alone_and_takes_views():
    w = normal(10, 64)
    before = w.clone()
    packed, absmax = quantize_nf4(w.T)
    assert torch.equal(w, before)
    again = quantize_nf4(w.T.contiguous())
    assert torch.equal(packed, again[0]) and torch.equal(absmax, again[1])
