"""Straight-through training: its gradients, and what it wins over rounding after training."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

from lecture_util.model.checkpoint import load_folder, save_folder
from lecture_util.model.config import Config
from lecture_util.model.linear import Linear
from lecture_util.model.text import english_bytes, nats_per_token, text_task, windows
from lecture_util.model.train import train
from lecture_util.model.transformer import Transformer
from lecture_util.quantization.linear import bnb_int8, replace_linears
from lecture_util.quantization.nf4 import NF4Linear
from lecture_util.quantization.scales import quantize
from lecture_util.quantization.ste import FakeQuantizedLinear, fake_quantize, qat, settle

TINY = Config(D=48, F=96, K=1, G=1, H=32, L=2, V=128, max_context=64)
GRIDS = [(2, "row", True), (3, 7, False), (4, "column", True), (8, "tensor", False)]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fresh(config=TINY, seed=0):
    torch.manual_seed(seed)
    return Transformer(config)


def tokens(B=2, T=9, seed=0):
    return torch.randint(TINY.V, (B, T), generator=torch.Generator().manual_seed(seed))


def snapshot(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def unchanged(model, before):
    return all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def fakes(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantizedLinear)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("bits", "per", "symmetric"), GRIDS)
def test_the_forward_pass_is_quantize_then_dequantize(bits, per, symmetric, dtype):
    w = normal(9, 16, dtype=dtype)
    out = fake_quantize(w, bits, per, symmetric)
    assert out.dtype == dtype
    assert torch.equal(out, quantize(w, bits, per, symmetric).dequantize())


@pytest.mark.parametrize(("bits", "per", "symmetric"), GRIDS)
def test_the_gradient_is_one_everywhere_inside_the_range(bits, per, symmetric):
    w, weigh = normal(9, 16).requires_grad_(), normal(9, 16, seed=1)
    (fake_quantize(w, bits, per, symmetric) * weigh).sum().backward()
    assert torch.equal(w.grad, weigh)


def test_the_true_gradient_of_rounding_is_zero():
    w = normal(4, 8, dtype=torch.float64)
    w[:, 0] = 9.0  # holds the scale, so that the rest may move
    nudged = w.clone()
    nudged[:, 1:] += 1e-9
    assert torch.equal(quantize(w, 4).codes, quantize(nudged, 4).codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per", ["row", "column", "tensor", 5])
def test_what_saturates_gets_no_gradient(per, symmetric):
    w = normal(6, 13).requires_grad_()
    out = fake_quantize(w, 4, per, symmetric, clip=0.5)
    out.sum().backward()
    whole = quantize(w, 8, per, symmetric)  # only to find each block's ends, block by block
    x = w.detach().double()
    inside = torch.empty_like(x, dtype=torch.bool)
    for scale in whole.each(whole.scale).unique():
        block = whole.each(whole.scale) == scale
        low, high = x[block].min().clamp(max=0), x[block].max().clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        slack = 0 if symmetric else (high - low) / 15 / 2  # the whole-number zero moves the ends
        sure = (x >= low / 2 + slack) & (x <= high / 2 - slack)
        never = (x < low / 2 - slack - 1e-6) | (x > high / 2 + slack + 1e-6)
        inside[block] = sure[block]
        assert (w.grad[block & never] == 0).all()
    assert (w.grad[inside] == 1).all()
    assert 0 < (w.grad == 0).float().mean() < 0.8
    assert w.grad.unique().tolist() == [0, 1]


def test_clipping_covers_part_of_the_range_with_a_finer_step():
    w = torch.tensor([[-4.0, 0.3, 1.0, 4.0]])
    assert fake_quantize(w, 3).unique().numel() <= 7
    assert fake_quantize(w, 2).tolist() == [[-4, 0, 0, 4]]
    assert fake_quantize(w, 2, clip=0.25).tolist() == [[-1, 0, 1, 1]]
    assert torch.equal(fake_quantize(w, 2, clip=1.0), fake_quantize(w, 2))


def test_the_straight_through_gradient_is_that_of_the_rounded_weights():
    """Weights settle at the gradient a plain layer would get with the rounded weights in it."""
    linear, x = nn.Linear(8, 5), normal(3, 8)
    fake = FakeQuantizedLinear(linear, bits=3, per="row", symmetric=True, clip=1.0)
    plain = nn.Linear(8, 5)
    with torch.no_grad():
        plain.weight.copy_(quantize(linear.weight, 3).dequantize())
        plain.bias.copy_(linear.bias)
    for layer in (fake, plain):
        nnf.mse_loss(layer(x), torch.ones(3, 5)).backward()
    torch.testing.assert_close(fake.weight.grad, plain.weight.grad)
    torch.testing.assert_close(fake.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("tied", [False, True])
def test_qat_replaces_every_linear_but_the_head_and_leaves_the_source_alone(tied):
    source = Transformer.random(Config(D=32, F=48, K=1, G=1, H=32, L=2, V=128, tied=tied))
    before = snapshot(source)
    model = qat(source, 3, 8)
    assert set(fakes(model)) == {
        f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("qkv", "out", "gate_up", "down")
    }
    assert (model.head.weight is model.embed.weight) == tied
    assert all(weight.requires_grad for weight in model.parameters())
    train(model, text_task(english_bytes(), 2, 8), 3, progress=False)
    assert unchanged(source, before) and not fakes(source)
    assert not any(weight.requires_grad for weight in source.parameters())
    assert "head" in fakes(qat(Transformer.random(TINY), skip=()))


def test_training_moves_the_weights_behind_and_computes_with_rounded_ones():
    model = qat(fresh(), 2)
    before = snapshot(model)
    losses = train(model, text_task(english_bytes(), 4, 16), 40, progress=False)
    assert sum(losses[-5:]) < sum(losses[:5])
    for layer in fakes(model).values():
        off_grid = layer.weight - fake_quantize(layer.weight, **layer.grid)
        assert off_grid.abs().max() > 0
    assert not any(torch.equal(w, before[name]) for name, w in model.named_parameters())


@pytest.mark.parametrize(("bits", "per", "symmetric"), GRIDS)
def test_settling_gives_plain_layers_with_the_weights_of_training(bits, per, symmetric):
    model = qat(fresh(), bits, per, symmetric)
    plain = settle(model)
    assert not fakes(plain) and {type(plain.blocks[0].qkv), type(plain.head)} == {Linear}
    for name, layer in fakes(model).items():
        want = quantize(layer.weight.detach(), bits, per, symmetric).dequantize()
        assert torch.equal(plain.get_submodule(name).weight, want)
    torch.testing.assert_close(plain(tokens()), model(tokens()), rtol=1e-5, atol=1e-5)
    before = snapshot(plain)
    train(model, text_task(english_bytes(), 2, 8), 2, progress=False)
    assert unchanged(plain, before)  # nothing is shared
    assert not any(weight.requires_grad for weight in plain.parameters())


def test_settling_without_training_is_post_training_quantization():
    source = fresh()
    plain, by_hand = settle(qat(source, 4, 16)), copy.deepcopy(source)
    with torch.no_grad():
        for block in by_hand.blocks:
            for layer in (block.qkv, block.out, block.gate_up, block.down):
                layer.weight.copy_(quantize(layer.weight, 4, 16).dequantize())
    assert unchanged(plain, snapshot(by_hand))


def test_biases_are_kept():
    config = Config(D=32, F=48, K=1, G=1, H=32, L=1, V=128, qkv_bias=True)
    model = qat(fresh(config), 8)
    assert torch.equal(settle(model).blocks[0].qkv.bias, model.blocks[0].qkv.bias)
    torch.testing.assert_close(settle(model)(tokens()), model(tokens()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_at_2_bits_beats_rounding_after_training_on_one_budget(seed):
    text = english_bytes()
    cut = len(text) * 85 // 100
    task = text_task(text[:cut], 8, 48)
    held_BT = windows(text[cut:], 48, 49, torch.Generator().manual_seed(99))
    start = fresh(replace(TINY, L=1), seed)
    plain, aware = copy.deepcopy(start), qat(start, 2)
    for model in (plain, aware):
        train(model, task, 200, seed=seed, progress=False)
    full, rounded, trained = (
        nats_per_token(model, held_BT) for model in (plain, settle(qat(plain, 2)), settle(aware))
    )
    print(f"seed {seed}: full {full:.3f}, rounded {rounded:.3f}, trained {trained:.3f}")
    assert full < rounded - 0.04  # rounding costs something to win back
    assert rounded - trained > 0.25 * (rounded - full)


@pytest.mark.parametrize("clip", [0, -0.5, 1.5, float("nan")])
def test_a_clip_outside_0_to_1_is_refused(clip):
    with pytest.raises(ValueError, match="share of the range"):
        fake_quantize(torch.ones(2, 4), 4, clip=clip)
    with pytest.raises(ValueError, match="share of the range"):
        qat(fresh(), 4, clip=clip)


def test_a_tied_head_stays_tied_in_training_and_is_not_once_it_is_rounded(tmp_path):
    tied = fresh(replace(TINY, tied=True))
    model = qat(tied, 2, skip=())
    assert model.head.weight is model.embed.weight and model.config.tied
    plain = settle(model)
    assert not plain.config.tied
    reopened = load_folder(save_folder(plain, tmp_path / "settled"))
    assert torch.equal(reopened(tokens()), plain(tokens()))


def test_unrounded_weights_are_not_saved_by_mistake(tmp_path):
    with pytest.raises(TypeError, match=r"blocks\.0\.qkv\.weight.*settle\(model\)"):
        save_folder(qat(fresh(), 2), tmp_path / "unsettled")


def test_a_quantized_model_is_refused():
    quantized = replace_linears(fresh(), NF4Linear.from_linear)
    with pytest.raises(ValueError, match="quantized already"):
        qat(quantized, 4)
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="quantized already"):
        qat(replace_linears(fresh(), bnb_int8), 4)


def test_bad_grids_are_refused_before_training():
    with pytest.raises(ValueError, match="from 2 to 8"):
        qat(fresh(), bits=1)
    with pytest.raises(ValueError, match="a group's size"):
        qat(fresh(), per="rows")
    with pytest.raises(ValueError, match="qat"):
        settle(fresh())


def test_weights_that_are_not_finite_are_refused():
    w = torch.ones(2, 4)
    w[0, 1] = torch.nan
    with pytest.raises(ValueError, match="nan_to_num"):
        fake_quantize(w, 4, clip=0.5)
