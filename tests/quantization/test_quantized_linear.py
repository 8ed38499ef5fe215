import copy
import io
import logging
import math
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from lecture_util.model.checkpoint import load_folder, save_folder
from lecture_util.model.config import Config
from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.linear import Linear
from lecture_util.model.observe import observe
from lecture_util.model.shapes import ShapeError
from lecture_util.model.transformer import Transformer
from lecture_util.quantization.errors import layer_errors, worst
from lecture_util.quantization.linear import (
    Borrowed,
    QuantizedLinear,
    bits_per_weight,
    bnb_int8,
    bnb_nf4,
    dequantize,
    linear_bytes,
    linear_layers,
    replace_linears,
)
from lecture_util.quantization.llm_int8 import Int8Linear
from lecture_util.quantization.nf4 import NF4Linear

# Rows of 64 and 128, so that bitsandbytes takes its CPU's fastest path.
CONFIG = Config(D=64, F=128, K=1, G=2, H=32, L=2, V=97, max_context=64, tied=True, qkv_bias=True)
MAKE = {
    "nf4": NF4Linear.from_linear,
    "nf4 single": partial(NF4Linear.from_linear, double=False),
    "int8": Int8Linear.from_linear,
    "int8 keeping": partial(Int8Linear.from_linear, keep=True),
    "bnb int8": bnb_int8,
    "bnb nf4": bnb_nf4,
    "bnb nf4 double": partial(bnb_nf4, double=True),
}
LAYERS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("qkv", "out", "gate_up", "down")]
TOKENS = torch.randint(97, (3, 20), generator=torch.Generator().manual_seed(0))
HAS_BNB = find_spec("bitsandbytes") is not None  # test_requirements.py fails where it should be
HERE = [name for name in MAKE if HAS_BNB or not name.startswith("bnb")]
needs_bnb = pytest.mark.skipif(not HAS_BNB, reason="bitsandbytes is not installed")


def each(*names):
    """A case for each of these layers, where those of bitsandbytes are skipped without it."""
    cases = [pytest.param(n, marks=needs_bnb if n.startswith("bnb") else ()) for n in names]
    return pytest.mark.parametrize("name", cases)


@pytest.fixture
def model():
    return Transformer.random(CONFIG, seed=1)


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@each(*MAKE)
def test_every_linear_but_the_head_is_replaced_and_the_rest_shared(model, name):
    before, parameters = bits(model), dict(model.named_parameters())
    kinds = {name: type(layer) for name, layer in linear_layers(model).items()}
    quantized = replace_linears(model, MAKE[name])

    after = linear_layers(quantized)
    assert list(after) == [*LAYERS, "head"]
    assert all(isinstance(after[layer], QuantizedLinear) for layer in LAYERS)
    assert type(after["head"]) is Linear
    assert quantized.head.weight is quantized.embed.weight  # tied, as before
    assert quantized.config == model.config
    assert not any(module.training for module in quantized.modules())  # as in the source
    for shared in ("embed.weight", "norm.weight", "blocks.1.norm_mlp.weight"):
        ours = quantized.get_parameter(shared)
        assert ours.data_ptr() == parameters[shared].data_ptr()
        assert ours is not parameters[shared]  # so that moving the copy leaves the source

    assert {name: type(layer) for name, layer in linear_layers(model).items()} == kinds
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@each(*MAKE)
def test_logits_stay_close_and_equal_those_of_the_dequantized_model(model, name):
    quantized = replace_linears(model, MAKE[name])
    logits = quantized(TOKENS)
    assert logits.shape == (3, 20, 97) and logits.dtype == torch.float32
    expected = model(TOKENS)
    bound = 0.2 if "nf4" in name else 0.02
    assert 0 < (logits - expected).norm() / expected.norm() < bound
    plain = dequantize(quantized)
    assert type(plain.blocks[0].qkv) is Linear
    # int8 also rounds activations, and bitsandbytes' NF4 may compute in bf16.
    slack = 1e-5 if name.startswith("nf4") else 0.02
    assert (plain(TOKENS) - logits).norm() / logits.norm() < slack


@each(*MAKE)
def test_it_generates_with_a_cache(model, name):
    quantized = replace_linears(model, MAKE[name])
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    outputs = generate(quantized, prompts, 8)
    assert [len(output) for output in outputs] == [8, 8, 8]
    if name.startswith("nf4"):  # where rows don't depend on each other, as with int8's columns
        assert outputs == [generate_naive(quantized, prompt, 8) for prompt in prompts]
        cache = KVCache(CONFIG, 3, 20, torch.float32)
        steps = torch.cat([quantized(TOKENS[:, t : t + 1], cache) for t in range(20)], 1)
        torch.testing.assert_close(steps, quantized(TOKENS), rtol=1e-4, atol=1e-5)
    assert quantized(TOKENS).isfinite().all()  # and goes on after inference mode


def test_bytes_are_those_of_codes_and_scales(model):
    weights = 2 * (
        64 * 128 + 64 * 64 + 64 * 256 + 128 * 64
    )  # two layers of qkv, out, gate_up, down
    assert linear_bytes(model) == 4 * weights and bits_per_weight(model) == 32
    rows = 2 * (128 + 64 + 256 + 64)
    for name, expected in {
        "int8": weights + 4 * rows,
        "bnb int8": weights + 4 * rows,
        "int8 keeping": 5 * weights + 4 * rows,
        "nf4 single": weights // 2 + 4 * weights // 64,
        "bnb nf4": weights // 2 + 4 * weights // 64,
        # A group of 256 scales has one of its own, and each layer an offset: no layer has over 256.
        "nf4": weights // 2 + weights // 64 + 8 * (4 + 4),
        "bnb nf4 double": weights // 2 + weights // 64 + 8 * (4 + 4),
    }.items():
        if name not in HERE:
            continue
        quantized = replace_linears(model, MAKE[name])
        assert linear_bytes(quantized) == expected, name
        quantized(TOKENS)
        assert linear_bytes(quantized) == expected, name
        assert bits_per_weight(quantized) == 8 * expected / weights
    half = replace_linears(model, MAKE["int8"], skip=("head", "down", "blocks.1"))
    kept = 2 * 64 * 128 + 64 * 128 + 64 * 64 + 64 * 256
    assert linear_bytes(half) == 4 * kept + (weights - kept) + 4 * (128 + 64 + 256)
    assert linear_bytes(half, skip=()) == linear_bytes(half) + 4 * 97 * 64


@needs_bnb
@pytest.mark.parametrize(
    "pair", [("nf4 single", "bnb nf4"), ("nf4", "bnb nf4 double"), ("int8", "bnb int8")]
)
def test_bitsandbytes_layers_hold_the_same_weights_as_ours(model, pair):
    model = model.half().float()  # it rounds weights to fp16 before int8
    ours, theirs = (linear_layers(replace_linears(model, MAKE[name])) for name in pair)
    for name in LAYERS:
        a, b = ours[name].dequantized(), theirs[name].dequantized()
        # 6.200124e-05 for 1/127**2; or, with AVX512-BF16, scales and products in bf16.
        tolerance = 2e-5 if "int8" in pair else 2**-7
        assert (a - b).abs().max() <= tolerance * a.abs().max()


def test_skip_takes_names_parts_and_beginnings(model):
    def replaced(**options):
        quantized = linear_layers(replace_linears(model, MAKE["int8"], **options))
        return [name for name, layer in quantized.items() if isinstance(layer, QuantizedLinear)]

    assert replaced() == LAYERS
    assert replaced(skip="head") == LAYERS
    assert replaced(skip=()) == [*LAYERS, "head"]
    assert replaced(skip=["head", "blocks.0", "down"]) == LAYERS[4:7]
    assert replaced(skip=["blocks.1.qkv"]) == [*LAYERS[:4], *LAYERS[5:], "head"]
    with pytest.raises(ValueError, match=r"'kqv', which fits none of this model's 9 Linears"):
        replaced(skip=["head", "kqv"])


def test_make_may_leave_a_layer_alone(model):
    def make(linear):
        return Int8Linear(linear) if linear.out_features == 64 else linear

    quantized = replace_linears(model, make)
    kinds = {name: type(layer) for name, layer in linear_layers(quantized).items()}
    assert kinds["blocks.0.out"] is Int8Linear and kinds["blocks.0.qkv"] is Linear
    qkv = quantized.blocks[0].qkv
    assert qkv is not model.blocks[0].qkv
    assert qkv.weight.data_ptr() == model.blocks[0].qkv.weight.data_ptr()


def test_a_model_without_transformers_names_and_an_untied_one_work():
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 4, bias=False)))
    quantized = replace_linears(net, MAKE["int8"])
    assert isinstance(quantized[0], Int8Linear) and isinstance(quantized[2][0], Int8Linear)
    assert quantized.training and quantized[0].training
    shared = nn.Linear(4, 4)
    twice = replace_linears(nn.Sequential(shared, shared), MAKE["int8"])
    assert twice[0] is twice[1]


def test_nonsense_is_refused(model):
    quantized = replace_linears(model, MAKE["int8"])
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv is quantized already \(Int8Linear\)"):
        replace_linears(quantized, MAKE["nf4"])
    with pytest.raises(TypeError, match=r"make returned Parameter for blocks\.0\.qkv"):
        replace_linears(model, lambda linear: linear.weight)
    with pytest.raises(TypeError, match="make returned NoneType"):
        replace_linears(model, lambda linear: None)
    with pytest.raises(ShapeError, match=r"widths \[128, 64\] for blocks\.0\.qkv"):
        replace_linears(model, lambda linear: nn.Linear(128, 64))
    with pytest.raises(ShapeError, match=r"widths \[None, None\]"):
        replace_linears(model, lambda linear: nn.Identity())
    for skip in [("head", "blocks"), [*LAYERS, "head"]]:
        with pytest.raises(ValueError, match="nothing to replace"):
            replace_linears(model, MAKE["int8"], skip=skip)
    with pytest.raises(ValueError, match="nothing to replace"):
        replace_linears(model, lambda linear: linear)
    with pytest.raises(ValueError, match="nothing to replace"):
        replace_linears(nn.ReLU(), MAKE["int8"])
    with pytest.raises(ValueError, match="nothing to dequantize"):
        dequantize(model)
    with pytest.raises(ValueError, match="no linear layers to count"):
        linear_bytes(model, skip=("head", "blocks"))
    for count in (linear_bytes, bits_per_weight):
        with pytest.raises(ValueError, match="'heads', which fits none"):
            count(model, skip="heads")
    with pytest.raises(ShapeError, match=r"shape \(\.\.\., 64\)"):
        quantized.blocks[0].qkv(torch.ones(2, 63))


@needs_bnb
def test_a_layer_of_bitsandbytes_is_quantized_already():
    with pytest.raises(ValueError, match="quantized already"):
        replace_linears(nn.Sequential(bnb_int8(nn.Linear(8, 8)).layer), MAKE["nf4"])


@each(*MAKE)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_numbers_are_refused(name, bad):
    linear = nn.Linear(64, 32)
    linear.weight.data[3, 3] = bad
    with pytest.raises(ValueError, match=r"NaN or (infinite|infinity)"):
        MAKE[name](linear)


@needs_bnb
def test_bitsandbytes_is_refused_what_it_gets_wrong():
    with pytest.raises(ValueError, match="powers of two from 32 to 4096"):
        bnb_nf4(nn.Linear(64, 64), blocksize=16)
    with pytest.raises(ValueError, match=r"rows of 48 weights don't end with blocks of 64"):
        bnb_nf4(nn.Linear(48, 64))


@needs_bnb
def test_weights_that_bitsandbytes_would_turn_into_infinity_are_refused():
    linear = nn.Linear(64, 32)
    linear.weight.data[3, 3] = 1e5
    with pytest.raises(ValueError, match=r"a weight of 1e\+05 is beyond fp16.*Int8Linear"):
        bnb_int8(linear)
    assert Int8Linear(linear).dequantized().isfinite().all()


def test_moving_and_casting_leaves_stored_bits_and_the_source_alone(model):
    for name in HERE:
        quantized = replace_linears(model, MAKE[name])
        quantized(TOKENS)
        stored = linear_bytes(quantized)
        quantized = quantized.to(torch.bfloat16)
        assert quantized.dtype == torch.bfloat16 and model.dtype == torch.float32
        assert linear_bytes(quantized) == stored
        assert {b.dtype for b in quantized.buffers()} <= {torch.uint8, torch.int8, torch.float32}
        logits = quantized(TOKENS)
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - model(TOKENS)).norm() / model(TOKENS).norm() < 0.2
    moved = replace_linears(model, MAKE["nf4"]).to("meta")
    assert moved.blocks[0].qkv.packed.device.type == "meta"
    assert model.device.type == "cpu" and model(TOKENS).isfinite().all()


@each(*MAKE)
def test_the_gradient_of_x_is_that_of_the_dequantized_weights(model, name):
    """Also where the product is of whole numbers, which have none, or of repacked codes."""
    layer = replace_linears(model, MAKE[name]).blocks[0].down
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(2))
    x[1, 2, 5] = 9.0  # an outlier column
    for _ in range(2):  # before and after bitsandbytes' first call
        (grad,) = torch.autograd.grad(layer(x.requires_grad_()).sum(), x)
        expected = layer.dequantized().sum(0).expand(2, 3, -1)
        assert (grad - expected).norm() / expected.norm() < 1e-4
        x = x.detach()
        layer(x)


@each(*MAKE)
def test_one_row_without_a_batch_will_do(model, name):
    layer = replace_linears(model, MAKE[name]).blocks[0].qkv
    x = torch.randn(64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(layer(x), layer(x[None])[0])
    with pytest.raises(ShapeError, match=r"of shape \(\)"):
        layer(torch.tensor(1.0))


@each(*MAKE)
def test_copied_loaded_or_pickled_it_computes_the_same(model, name):
    quantized = replace_linears(model, MAKE[name])
    for _ in range(2):  # before and after bitsandbytes' first call
        stream = io.BytesIO()
        torch.save(quantized, stream)
        stream.seek(0)
        pickled = torch.load(stream, weights_only=False)
        copied, logits = copy.deepcopy(quantized), quantized(TOKENS)
        assert torch.equal(pickled(TOKENS), logits) and torch.equal(copied(TOKENS), logits)
    other = replace_linears(Transformer.random(CONFIG, seed=2), MAKE[name])
    if not name.startswith("bnb"):
        other.load_state_dict(quantized.state_dict())
        assert torch.equal(other(TOKENS), logits)
        return
    with pytest.raises(RuntimeError, match=r"blocks\.0\.qkv is a layer of bitsandbytes.*again"):
        other.load_state_dict(replace_linears(model, MAKE[name]).state_dict())


@needs_bnb
def test_a_state_dict_of_repacked_layers_does_not_mix_up_their_scales(model):
    quantized = replace_linears(model, bnb_nf4)
    logits, layer = quantized(TOKENS), quantized.blocks[0].down.layer
    if layer.weight.quant_state.packing_format_for_cpu:  # needs AVX512-BF16
        with pytest.raises(RuntimeError, match="mix up its scales"):
            quantized.state_dict()
    else:
        quantized.state_dict()
    assert torch.equal(quantized(TOKENS), logits)


def test_moving_a_dequantized_model_leaves_its_source_alone(model):
    quantized = replace_linears(model, MAKE["nf4"])
    plain = dequantize(quantized).double()
    assert plain.blocks[0].qkv.bias.dtype == torch.float64
    assert quantized.blocks[0].qkv.bias.dtype == torch.float32


@each("nf4", "int8", "bnb int8")
def test_a_rounded_head_is_tied_no_longer(tmp_path, model, name):
    """Otherwise its checkpoint would hold the embedding alone, and open with another head."""
    plain = dequantize(replace_linears(model, MAKE[name], skip=()))
    assert not plain.config.tied and model.config.tied
    reopened = load_folder(save_folder(plain, tmp_path / "model"))
    assert torch.equal(reopened(TOKENS), plain(TOKENS))


def test_hooks_on_the_copy_do_not_fire_on_the_source(model):
    seen = []
    quantized = replace_linears(model, MAKE["int8"])
    with observe(quantized, ["blocks.0.down", "norm"], lambda name, x, y: seen.append(name)):
        model(TOKENS)
        assert seen == []
        quantized(TOKENS)
    assert seen == ["blocks.0.down", "norm"]


@each("nf4", "int8", "bnb int8", "bnb nf4")
def test_a_quantized_model_is_saved_only_when_dequantized(model, tmp_path, name):
    quantized = replace_linears(model, MAKE[name])
    with pytest.raises(TypeError, match=r"no blocks\.0\.qkv\.weight of floats.*dequantize"):
        save_folder(quantized, tmp_path / "refused")
    assert list(tmp_path.iterdir()) == []
    plain = dequantize(quantized)
    save_folder(plain, tmp_path / "plain")
    assert torch.equal(load_folder(tmp_path / "plain")(TOKENS), plain(TOKENS))


@needs_bnb
def test_a_model_with_a_raw_layer_of_bitsandbytes_is_not_saved(tmp_path):
    raw = Transformer.random(CONFIG)
    raw.blocks[0].out = bnb_int8(raw.blocks[0].out).layer  # whose int8 weight has the right name
    with pytest.raises(TypeError, match=r"no blocks\.0\.out\.weight of floats"):
        save_folder(raw, tmp_path / "refused")


def test_layer_errors_are_each_layers_own(model):
    quantized = replace_linears(model, MAKE["nf4"])
    errors = layer_errors(model, quantized, TOKENS, rows=2)
    assert list(errors) == LAYERS
    inputs = {}
    with observe(model, LAYERS, lambda name, x, y: inputs.setdefault(name, x.clone())):
        model(TOKENS)
    for name in LAYERS:
        layer = model.get_submodule(name)
        w_FD = quantized.get_submodule(name).dequantized().double()
        wrong = inputs[name].double() @ (w_FD - layer.weight.double()).T
        expected = wrong.norm() / layer(inputs[name]).double().norm()
        assert errors[name] == pytest.approx(float(expected), rel=1e-4)
    name, error = worst(errors)
    assert error == errors[name] == max(errors.values())
    one = layer_errors(
        model, replace_linears(model, MAKE["int8"], skip=["head", *LAYERS[1:]]), TOKENS
    )
    assert list(one) == LAYERS[:1] and one[LAYERS[0]] < errors[LAYERS[0]] / 4


def test_layer_errors_count_the_head_where_it_is_replaced(model):
    errors = layer_errors(model, replace_linears(model, MAKE["int8"], skip=LAYERS), TOKENS)
    assert list(errors) == ["head"] and 0 < errors["head"] < 0.02


def test_layer_errors_refuse_models_that_cannot_be_compared(model):
    with pytest.raises(ValueError, match="nothing was replaced"):
        layer_errors(model, model, TOKENS)
    with pytest.raises(ValueError, match="compare a model with its copy"):
        layer_errors(model, nn.Sequential(nn.Linear(4, 4)), TOKENS)
    with pytest.raises(ValueError, match="at least one row"):
        layer_errors(model, replace_linears(model, MAKE["int8"]), TOKENS[:0])
    silent = Transformer.random(CONFIG)
    silent.blocks[0].qkv.weight.data.zero_()
    silent.blocks[0].qkv.bias.data.zero_()
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv was not run, or gave only zeros"):
        layer_errors(silent, replace_linears(silent, MAKE["int8"]), TOKENS)
    with pytest.raises(ValueError, match="the reference comes first"):
        layer_errors(replace_linears(model, MAKE["int8"]), model, TOKENS)
    for order in ("ab", "ba"):
        assert worst({name: {"a": 0.1, "b": math.nan}[name] for name in order})[0] == "b"
    with pytest.raises(ValueError, match="no errors to compare"):
        worst({})


def test_a_layer_keeps_its_bias_and_says_its_bits():
    layer = NF4Linear.from_linear(nn.Linear(64, 64))
    assert "in_features=64, out_features=64, bias=True" in repr(layer)
    assert f"{layer.bits_per_weight:.3f} bits" in repr(layer)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    layer(x).sum().backward()  # gradients pass to x; weights have none
    torch.testing.assert_close(x.grad, layer.dequantized().sum(0).expand(2, 64))


@needs_bnb
def test_bitsandbytes_warns_of_nothing_while_it_runs(model, caplog):
    with caplog.at_level(logging.WARNING):
        replace_linears(model, bnb_int8)(TOKENS)
        replace_linears(model.bfloat16(), bnb_nf4)(TOKENS)
    assert caplog.records == []


@needs_bnb
def test_a_repacked_bitsandbytes_layer_refuses_to_move():
    layer = bnb_nf4(nn.Linear(64, 64)).train()
    assert isinstance(layer, Borrowed) and not layer.training and not layer.layer.training
    with torch.no_grad():
        layer(torch.ones(1, 64))
    if getattr(layer.layer.weight.quant_state, "packing_format_for_cpu", False):
        with pytest.raises(RuntimeError, match="quantize it there"):
            layer.to("meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each(*MAKE)
@pytest.mark.parametrize("first", ["move", "quantize"])
def test_on_a_gpu_it_generates_whether_moved_before_or_after(model, name, first):
    if first == "move":
        quantized = replace_linears(model.cuda(), MAKE[name])
    else:
        quantized = replace_linears(model, MAKE[name]).cuda()
        assert model.device.type == "cpu"
    assert len(generate(quantized, [[1, 2, 3], [4]], 6)[1]) == 6
    logits = quantized(TOKENS.cuda()).cpu()
    expected = model.cpu()(TOKENS)
    assert (logits - expected).norm() / expected.norm() < 0.2
