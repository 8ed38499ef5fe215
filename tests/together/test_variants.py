"""Variants: the same function in other numbers, and bytes from shapes that are the bytes held."""

from dataclasses import replace

import pytest
import together_models as tiny
import torch

from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.config import Config
from lecture_util.model.text import perplexity
from lecture_util.model.transformer import Transformer
from lecture_util.pruning.prune import drop_layers
from lecture_util.quantization.int4 import Int4Linear, cpu_operator
from lecture_util.quantization.linear import linear_layers
from lecture_util.quantization.llm_int8 import Int8Linear
from lecture_util.together import variants as room
from lecture_util.together.configuration import WEIGHTS, Configuration
from lecture_util.together.variants import (
    Variants,
    calibration,
    copy_bytes,
    held_bytes,
    predicted_bytes,
    scaled_for_4_bits,
    with_weights,
)

WIDE = Config(D=64, F=128, K=1, G=2, H=32, L=2, V=71)
SHAPES = {
    "untied": tiny.TINY,
    "tied": replace(tiny.TINY, tied=True),
    "biased": replace(tiny.TINY, qkv_bias=True),
    "odd": replace(tiny.TINY, D=77, F=131, K=1, G=3, H=10),  # groups of 64 do not divide these
    "wide": replace(WIDE, tied=True),
    "one layer": replace(tiny.TINY, L=1, tied=True, qkv_bias=True),
}
TOKENS_BT = torch.randint(0, tiny.TINY.V, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    return tiny.tiny_model(dtype=torch.float32)


def numbers(model) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def by_name_bytes(model) -> int:
    """Bytes by a walk over names, each tensor once."""
    seen = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        seen.setdefault(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        assert name
    return sum(seen.values())


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_from_shapes_alone_are_the_bytes_held(shape, weights):
    config = SHAPES[shape]
    made = with_weights(Transformer.random(config, seed=0, dtype=torch.float32), weights)
    assert predicted_bytes(config, weights) == held_bytes(made) == by_name_bytes(made)
    assert type(predicted_bytes(config, weights)) is int
    assert made.config == config


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_model_with_fewer_layers_holds_what_its_shape_says(model, weights):
    cut = drop_layers(model, [0])
    made = with_weights(cut, weights)
    assert held_bytes(made) == predicted_bytes(replace(tiny.TINY, L=1), weights)


def test_what_layers_share_is_held_once():
    tied = Transformer.random(SHAPES["tied"], seed=0, dtype=torch.float32)
    apart = Transformer.random(SHAPES["untied"], seed=0, dtype=torch.float32)
    assert held_bytes(apart) - held_bytes(tied) == 4 * tiny.TINY.V * tiny.TINY.D
    before = held_bytes(apart)
    apart.register_buffer("rows", apart.head.weight.detach()[3:5])  # another tensor, no new bytes
    assert held_bytes(apart) == before


def test_each_variant_computes_in_the_numbers_it_names(model):
    variants = Variants(model)
    assert variants.get("fp32") is model
    assert variants.get("bf16").dtype == variants.get("int4").dtype == torch.bfloat16
    assert variants.get("int8").dtype == torch.float32
    for weights, kind in (("int8", Int8Linear), ("int4", Int4Linear)):
        layers = linear_layers(variants.get(weights))
        assert not isinstance(layers.pop("head"), kind)
        assert len(layers) == 4 * tiny.TINY.L
        assert all(isinstance(layer, kind) for layer in layers.values())


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_a_variant_is_near_the_model_and_the_model_stays(model, weights):
    before = numbers(model)
    made = Variants(model, TOKENS_BT).get(weights)
    with torch.inference_mode():
        exact, near = model(TOKENS_BT), made(TOKENS_BT).float()
    off = ((near - exact).norm() / exact.norm()).item()
    assert 0 < off < {"bf16": 0.03, "int8": 0.05, "int4": 0.4}[weights]
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    with torch.no_grad():  # and bf16 shares no memory with it
        if weights == "bf16":
            made.embed.weight.zero_()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_every_variant_is_made_once_and_from_the_same_student(model, monkeypatch):
    calls = []

    def load_student(whole):
        calls.append(whole)
        return drop_layers(whole, [1])

    monkeypatch.setattr(room, "load_student", load_student)
    variants = Variants(model)
    student = variants(Configuration(student=True))
    made = {w: variants(Configuration(w, student=True)) for w in ("bf16", "int8", "int4")}
    assert len(calls) == 1 and calls[0] is model
    assert variants.get("fp32", True) is student and student.config.L == 1
    assert variants.get("fp32", False) is model
    for weights, variant in made.items():
        assert variants.get(weights, True) is variant
        assert variants.get(weights, False) is not variant
        assert variant.config.L == 1
    # int8 lends embedding and head from the student that is there
    assert made["int8"].embed.weight.data_ptr() == student.embed.weight.data_ptr()


def test_a_student_is_refused_to_another_model(model):
    with pytest.raises(WeightsError, match="was cut from a model of"):
        Variants(model).get("int8", student=True)


def test_scaling_for_4_bits_changes_no_function_and_rounds_better():
    torch.manual_seed(0)
    model = Transformer.random(WIDE, seed=2, dtype=torch.float32)
    with torch.no_grad():  # a few channels as large as real models have
        for block in model.blocks:
            block.norm_attention.weight[::9] *= 30
            block.norm_mlp.weight[::7] *= 30
    tokens_BT = torch.randint(0, WIDE.V, (4, 16))
    scaled = scaled_for_4_bits(model, tokens_BT)
    with torch.inference_mode():
        exact = model(tokens_BT)
        torch.testing.assert_close(scaled(tokens_BT), exact, rtol=1e-4, atol=1e-4)
        plain, better = (
            (Variants(model, seen).get("int4")(tokens_BT).float() - exact).norm()
            for seen in (None, tokens_BT)
        )
    assert not torch.equal(scaled.blocks[0].qkv.weight, model.blocks[0].qkv.weight)
    assert better < 0.9 * plain


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_calibration_matters_to_4_bits_alone(model, weights):
    plain, scaled = (Variants(model, seen).get(weights) for seen in (None, TOKENS_BT))
    assert perplexity(plain, TOKENS_BT) == perplexity(scaled, TOKENS_BT)


def test_calibration_windows_are_spread_from_the_first_token_to_the_last():
    study_S = torch.arange(100)
    tokens_BT = calibration(study_S, B=4, T=10)
    assert tokens_BT.shape == (4, 10)
    assert tokens_BT[0, 0] == 0 and tokens_BT[-1, -1] == 99
    assert (tokens_BT[:, 1:] - tokens_BT[:, :-1] == 1).all()
    assert calibration(study_S, B=2, T=100).tolist() == [study_S.tolist()] * 2
    with pytest.raises(ValueError, match="T=101 but the text has 100 tokens"):
        calibration(study_S, T=101)


def test_second_copies_of_4_bit_weights_are_counted_once_they_are_made():
    """At groups of 64 and rows by sixteens nothing is filled up: as many bytes as the first."""
    model = Transformer.random(WIDE, seed=0, dtype=torch.float32)
    made = with_weights(model, "int4")
    before = held_bytes(made)
    assert copy_bytes(made) == copy_bytes(model) == 0
    with torch.inference_mode():
        made(TOKENS_BT)
    first = sum(layer.weight_bytes for layer in made.modules() if isinstance(layer, Int4Linear))
    assert copy_bytes(made) == (0 if cpu_operator() is None else first)
    assert held_bytes(made) == before


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda m: Variants("smollm2-135m"), TypeError, "expected a Transformer, such as load"),
        (lambda m: Variants(m.to(torch.bfloat16)), ValueError, r"bfloat16: load\(dtype=torch\.fl"),
        (lambda m: Variants(m.double()), ValueError, "the model is torch.float64"),
        (lambda m: Variants(with_weights(m, "int8")), ValueError, "quantized: pass the one that"),
        (lambda m: Variants(m).get("int2"), ValueError, "weights='int2': expected one of fp32, bf"),
        (lambda m: Variants(m).get("int2", True), ValueError, "weights='int2'"),
        (lambda m: Variants(m)("int8"), TypeError, r"configuration='int8': expected Configurati"),
        (lambda m: with_weights(m, "int2"), ValueError, "weights='int2'"),
        (lambda m: predicted_bytes(m.config, "fp16"), ValueError, "weights='fp16': expected"),
    ],
)
def test_other_models_and_other_numbers_are_refused(model, make, error, says):
    with pytest.raises(error, match=says):
        make(model)
