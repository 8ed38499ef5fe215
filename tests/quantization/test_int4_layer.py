"""Int4Linear: what it stores, what it multiplies by, and torch's own operator on a CPU."""

import pytest
import torch
from torch import nn

from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError
from lecture_util.model.transformer import Transformer
from lecture_util.quantization import int4
from lecture_util.quantization.group_linear import GroupLinear
from lecture_util.quantization.int4 import Int4Linear
from lecture_util.quantization.linear import bits_per_weight, dequantize, replace_linears
from lecture_util.quantization.scales import quantize

SHAPES = [  # F, D, group_size: a multiple of 16 rows or not; tails; one group, shorter than a group
    (1, 16, 16),
    (33, 16, 16),
    (17, 33, 32),
    (48, 576, 48),
    (16, 256, 256),
    (5, 130, 64),
    (32, 96, 96),
    (9, 30, 1000),
]
needs_operator = pytest.mark.skipif(
    int4.cpu_operator() is None, reason="this torch has no working 4-bit product for CPUs"
)


def linear(F, D, dtype=torch.float32, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(D, F, bias=bias).to(dtype).requires_grad_(False)


def inputs(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def bf16_bound(layer, x):
    """Every step rounded to bf16: scale, offset, each product, the weight, the sum, the bias."""
    magnitude = abs(layer.scale_FJ.double()).amax() * 8
    if layer.offset_FJ is not None:
        magnitude = magnitude + layer.offset_FJ.double().abs().amax()
    bias = 0 if layer.bias is None else layer.bias.double().abs()
    return 4 * 2**-8 * (magnitude * x.double().abs().sum(-1, keepdim=True) + bias)


def exact(layer, x):
    bias = 0 if layer.bias is None else layer.bias.double()
    return x.double() @ layer.dequantized().double().T + bias


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("F", "D", "group_size"), SHAPES)
def test_what_is_stored_is_what_was_quantized(F, D, group_size, symmetric, scale_dtype):
    w = linear(F, D).weight + 0.3 / D  # leaning, so that zero points differ from 8
    stored = quantize(w, 4, group_size, symmetric, scale_dtype)
    layer = Int4Linear(stored)
    off = (layer.dequantized() - stored.dequantize(torch.float32)).abs()
    if symmetric:
        assert layer.offset_FJ is None and off.max() == 0
    # The offset, at most 8 steps, is rounded to the scale's dtype; the sum then to fp32.
    step = stored.each(stored.scale).float()
    assert (off <= step * (4 * torch.finfo(scale_dtype).eps + 32 * 2**-24)).all()
    assert torch.equal(layer.codes(), (stored.codes + 8 * symmetric).to(torch.uint8))


def test_rows_and_a_group_of_a_row_are_the_same():
    layer = linear(5, 33)
    by_row = Int4Linear(quantize(layer.weight, 4, "row", False))
    by_group = Int4Linear(quantize(layer.weight, 4, 33, False))
    assert by_row.group_size == 33
    assert torch.equal(by_row.dequantized(), by_group.dequantized())


def test_bytes_are_four_bits_a_weight_and_what_the_groups_store():
    layer = linear(16, 640)
    assert Int4Linear.from_linear(layer).bits_per_weight == 4.5
    assert Int4Linear.from_linear(layer, symmetric=True).bits_per_weight == 4.25
    assert Int4Linear.from_linear(layer, 32, scale_dtype=torch.float32).bits_per_weight == 6
    odd = Int4Linear.from_linear(linear(3, 5), 4, symmetric=True)
    assert odd.weight_bytes == 3 * 3 + 3 * 2 * 2  # half a byte of each row is spare
    assert Int4Linear.from_linear(layer.bfloat16()).scale_FJ.dtype == torch.bfloat16


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3])
def test_fewer_bits_are_kept_in_four(bits, symmetric):
    group = GroupLinear.from_linear(linear(8, 96), bits, 48, symmetric)
    layer = Int4Linear(group.quantized(), group.bias)
    assert layer.bits == bits and layer.packed.shape == (8, 48)
    off = (layer.dequantized() - group.dequantized()).abs()
    assert off.max() <= 4 * 2**-10 * group.scale_FJ.max()
    torch.testing.assert_close(layer(inputs(2, 96)), group(inputs(2, 96)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (0, 4)])
def test_the_forward_is_that_of_the_dequantized_linear(dtype, leading):
    layer = Int4Linear.from_linear(linear(6, 50), 16)
    x = inputs(*leading, 50, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (*leading, 6)
    torch.testing.assert_close(y.double(), exact(layer, x), rtol=1e-5, atol=1e-6)


def test_gradients_reach_the_input_in_bf16():
    layer = Int4Linear.from_linear(linear(16, 64, torch.bfloat16), 64)
    x = inputs(3, 64, dtype=torch.bfloat16).requires_grad_(True)
    layer(x).sum().backward()
    wanted = layer.dequantized().sum(0).expand(3, -1)
    torch.testing.assert_close(x.grad.float(), wanted, rtol=0.02, atol=0.02)


# torch's operator.


@needs_operator
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_torchs_operator_means_code_minus_eight_times_scale_plus_zero(group_size):
    F, D = 32, 512
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (F, D), generator=generator, dtype=torch.int32)
    scale, zero = torch.randn(2, F, D // group_size, generator=generator).bfloat16()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    pairs = torch.stack((scale.mT, zero.mT), -1).contiguous()
    x = inputs(3, D, dtype=torch.bfloat16)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, pairs)
    each = [p.double().repeat_interleave(group_size, 1) for p in (scale, zero)]
    w = (codes - 8) * each[0] + each[1]
    terms = x.double().abs() @ ((codes - 8).abs() * each[0].abs() + each[1].abs()).T
    assert ((y.double() - x.double() @ w.T).abs() <= 2**-7 * terms).all()


@needs_operator
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("F", "D", "group_size"), SHAPES)
def test_in_bf16_the_operator_gives_the_product_within_rounding(F, D, group_size, symmetric):
    layer = Int4Linear.from_linear(linear(F, D, torch.bfloat16), group_size, symmetric)
    for B in (1, 5):
        x = inputs(B, D, dtype=torch.bfloat16)
        y = layer(x)
        assert y.dtype == torch.bfloat16 and y.shape == (B, F)
        assert ((y.double() - exact(layer, x)).abs() <= bf16_bound(layer, x)).all()
    padding = -min(D, group_size) % 32 / min(D, group_size)
    assert (layer._copy is not None) == (padding <= 0.5), "the operator was to be used, or not"


@needs_operator
def test_the_operator_and_dense_agree_in_every_entry(monkeypatch):
    layer = Int4Linear.from_linear(linear(33, 130, torch.bfloat16), 48)
    x = inputs(2, 3, 130, dtype=torch.bfloat16)
    fast = layer(x)
    assert layer._copy is not None
    monkeypatch.setattr(int4, "cpu_operator", lambda: None)
    slow = layer(x)
    assert ((fast.double() - slow.double()).abs() <= 2 * bf16_bound(layer, x)).all()


@needs_operator
def test_many_rows_fp32_and_gradients_do_not_take_the_operator():
    layer = Int4Linear.from_linear(linear(16, 64, torch.bfloat16), 64)
    layer(inputs(int4.CPU_ROWS + 1, 64, dtype=torch.bfloat16))
    layer.float()(inputs(1, 64))
    layer(inputs(1, 64, dtype=torch.bfloat16).requires_grad_(True))
    assert layer._copy is None
    layer(inputs(int4.CPU_ROWS, 64, dtype=torch.bfloat16))
    assert layer._copy is not None


@needs_operator
def test_other_weights_loaded_later_are_the_ones_multiplied():
    one, other = (
        Int4Linear.from_linear(linear(16, 64, torch.bfloat16, seed=s), 64) for s in (0, 1)
    )
    x = inputs(2, 64, dtype=torch.bfloat16)
    before = one(x)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x)) and not torch.equal(one(x), before)


def test_an_operator_that_means_something_else_is_not_used(monkeypatch):
    class Ops:
        _convert_weight_to_int4pack_for_cpu = staticmethod(lambda codes, tiles: codes)

        class _weight_int4pack_mm_for_cpu:
            default = staticmethod(lambda x, packed, group, pairs: x.new_full((1, 16), 9 * 2 + 3))

    monkeypatch.setattr(torch.ops, "aten", Ops)
    assert int4.cpu_operator.__wrapped__() is None
    monkeypatch.setattr(torch.ops, "aten", object())
    assert int4.cpu_operator.__wrapped__() is None


# In a model, on a GPU, and refused.

TINY = Config(D=64, F=96, K=2, G=2, H=16, L=2, V=41, max_context=32)


def test_a_model_of_such_layers_is_the_model_of_their_weights():
    model = Transformer.random(TINY, seed=0)
    quantized = replace_linears(model, lambda layer: Int4Linear.from_linear(layer, 48))
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(
            quantized(tokens), dequantize(quantized)(tokens), rtol=1e-4, atol=1e-4
        )
        assert not torch.allclose(quantized(tokens), model(tokens), atol=1e-3)
    assert 4.6 < bits_per_weight(quantized) < 5.1


def test_saved_and_loaded_it_computes_the_same():
    layer, twin = (Int4Linear.from_linear(linear(7, 30, seed=s), 8) for s in (0, 1))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(inputs(2, 30)), layer(inputs(2, 30)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("F", "D", "group_size"), SHAPES)
def test_on_a_gpu_it_gives_the_product_within_rounding(F, D, group_size, dtype):
    layer = Int4Linear.from_linear(linear(F, D, dtype), group_size).cuda()
    for B in (1, 3, 17, 200):
        x = inputs(B, D, dtype=dtype).cuda()
        bound = bf16_bound(layer, x) * torch.finfo(dtype).eps / 2**-7 + 1e-5
        assert ((layer(x).double() - exact(layer, x)).abs() <= bound).all()


def test_what_half_a_byte_cannot_hold_is_refused():
    w = linear(4, 32).weight
    with pytest.raises(ValueError, match="codes of 5 bits: half a byte holds up to 4"):
        Int4Linear(quantize(w, 5, 16))
    for per in ("tensor", "column"):
        with pytest.raises(ValueError, match="expected a scale for each row or group"):
            Int4Linear(quantize(w, 4, per))


def test_an_offset_that_fp16_does_not_hold_is_refused():
    large = linear(4, 32)
    large.weight.data = large.weight.data.abs() * 2e6  # its scales are still fp16 numbers
    with pytest.raises(ValueError, match=r"an offset.*is beyond torch.float16.*bfloat16"):
        Int4Linear.from_linear(large)
    assert Int4Linear.from_linear(large, scale_dtype=torch.bfloat16).dequantized().isfinite().all()


def test_arguments_in_group_linears_order_are_refused():
    with pytest.raises(TypeError, match="symmetric=48"):
        Int4Linear.from_linear(linear(4, 32), 4, 48)


def test_an_odd_group_and_a_wrong_width_are_refused():
    with pytest.raises(ValueError, match="group_size=5 with D=32: expected an even number"):
        Int4Linear.from_linear(linear(4, 32), 5)
    with pytest.raises(ShapeError, match="reads floats of width D=32"):
        Int4Linear.from_linear(linear(4, 32))(inputs(2, 31))
    with pytest.raises(ShapeError, match="codes_FD has 3 axes"):
        Int4Linear(quantize(inputs(2, 4, 32), 4, 16))
