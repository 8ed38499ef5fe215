"""Adapters: their product, their exact combination, and what they do to a checkpoint."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lecture_util.merging.adapter_training import AdaptedLinear, train_adapter
from lecture_util.merging.adapters import (
    Adapter,
    Factors,
    apply,
    combine,
    delta,
    fine_tuned,
    hf_views,
    load_adapter,
    save_adapter,
)
from lecture_util.model.checkpoint import WeightsError, hf_state, save_folder
from lecture_util.model.config import Config
from lecture_util.model.linear import Linear
from lecture_util.model.shapes import ShapeError, TensorMismatch
from lecture_util.model.train import IGNORE
from lecture_util.model.transformer import Transformer

CONFIG = Config(D=24, F=40, K=2, G=3, H=4, L=2, V=31, tied=True, max_context=64)
BIASED = Config(D=24, F=40, K=2, G=3, H=4, L=2, V=31, qkv_bias=True, max_context=64)


def drawn(shapes, rank, seed=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return Adapter(
        {
            name: Factors(
                torch.randn(rank, D, generator=generator).to(dtype),
                torch.randn(F, rank, generator=generator).to(dtype),
            )
            for name, (F, D) in shapes.items()
        },
        scale,
    )


def linear_shapes(model):
    return {n: tuple(t.shape) for n, t in hf_views(model).items() if n.endswith("_proj.weight")}


@pytest.fixture(params=[CONFIG, BIASED], ids=["tied", "biased"])
def model(request):
    return Transformer.random(request.param, seed=1)


def batch_of(generator):
    tokens_BT = torch.randint(31, (5, 7), generator=generator)
    return tokens_BT, (tokens_BT + 1) % 31


def test_a_delta_is_scale_times_up_times_down():
    f = Factors(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[5.0], [7.0]]))
    assert delta(Adapter({"w": f}, 2.0))["w"].tolist() == [[10, 20, 30], [14, 28, 42]]


def test_16_bit_factors_are_multiplied_in_fp32():
    adapter = drawn({"w": (11, 13)}, 5, dtype=torch.bfloat16)
    f = adapter.factors["w"]
    exact = f.up_Fr.double() @ f.down_rD.double()
    got = delta(adapter)["w"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-5)


def test_combining_has_no_cross_terms():
    """huggingface/peft#3004: adding factors gives [[1, -1], [1, -1]] here."""
    e1, e2 = torch.eye(2)
    one = Adapter({"w": Factors(e1[None], e1[:, None])})
    two = Adapter({"w": Factors(e2[None], e2[:, None])})
    assert delta(combine([one, two], [1, -1]))["w"].tolist() == [[1, 0], [0, -1]]


@pytest.mark.parametrize("weight", [-1.0, -0.25, 0.0, 2.0])
def test_a_weight_multiplies_the_product_and_keeps_its_sign(weight):
    """huggingface/peft#2918: a negative weight lost under a square root."""
    adapter = drawn({"w": (3, 5)}, 2, scale=4.0)
    assert torch.equal(
        delta(combine([adapter], [weight]))["w"], weight * delta(adapter)["w"]
    )  # powers of two, so nothing rounds


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.floats(-3, 3), st.sampled_from([0.5, 1.0, 3.0])),
        min_size=1,
        max_size=4,
    )
)
def test_combining_is_the_weighted_sum_of_deltas(parts):
    adapters = [
        drawn({"w": (7, 5), f"only{i}": (2, 3)}, rank, i, scale, torch.float64)
        for i, (rank, _, scale) in enumerate(parts)
    ]
    weights = [w for _, w, _ in parts]
    both = combine(adapters, weights)
    wanted = sum(
        w * a.scale * torch.einsum("Fr,rD->FD", a.factors["w"].up_Fr, a.factors["w"].down_rD)
        for w, a in zip(weights, adapters, strict=True)
    )
    got = delta(both)
    torch.testing.assert_close(got["w"], wanted, rtol=0, atol=1e-12)
    assert len(both.factors["w"].down_rD) == sum(rank for rank, _, _ in parts)
    for i, (w, a) in enumerate(zip(weights, adapters, strict=True)):
        torch.testing.assert_close(got[f"only{i}"], w * delta(a)[f"only{i}"])


def test_the_order_of_adapters_does_not_matter():
    adapters = [drawn({"w": (5, 3)}, r, seed=r) for r in (1, 2, 3)]
    weights = [0.5, -1.0, 2.0]
    first = delta(combine(adapters, weights))["w"]
    for order in itertools.permutations(range(3)):
        got = delta(combine([adapters[i] for i in order], [weights[i] for i in order]))["w"]
        torch.testing.assert_close(got, first)


def test_a_fine_tuned_model_is_what_transformers_makes_of_the_changed_weights(model, tmp_path):
    from transformers import AutoModelForCausalLM

    adapter = drawn(linear_shapes(model), 3, scale=0.02)
    theirs = AutoModelForCausalLM.from_pretrained(save_folder(model, tmp_path / "base"))
    with torch.no_grad():
        for name, f in adapter.factors.items():
            theirs.get_parameter(name).add_(0.5 * 0.02 * f.up_Fr.double() @ f.down_rD.double())
    tokens = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(0))
    got = fine_tuned(model, adapter, weight=0.5)(tokens)
    torch.testing.assert_close(got, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    assert (got - model(tokens)).abs().max() > 0.01


def test_fine_tuning_leaves_the_base_alone_and_ties_tied(model):
    before = {name: tensor.clone() for name, tensor in hf_state(model).items()}
    tuned = fine_tuned(model, drawn(linear_shapes(model), 1))
    assert all(torch.equal(before[name], tensor) for name, tensor in hf_state(model).items())
    assert (tuned.head.weight is tuned.embed.weight) == model.config.tied
    changed = {n for n, t in hf_state(tuned).items() if not torch.equal(before[n], t)}
    assert changed == set(linear_shapes(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_change_is_added_wide_and_cast_once(dtype):
    generator = torch.Generator().manual_seed(3)
    state = {n: torch.randn(99, 50, generator=generator).to(dtype) for n in ("w", "kept")}
    adapter = drawn({"w": (99, 50)}, 2)
    changed = apply(state, adapter, -0.5)
    wanted = (state["w"].double() - 0.5 * delta(adapter)["w"].double()).to(dtype)
    assert changed["w"].dtype == dtype
    assert (changed["w"] != wanted).float().mean() < 0.01  # a change rounded first: a third
    assert changed["kept"] is state["kept"]


def test_apply_and_combine_agree(model):
    adapters = [drawn(linear_shapes(model), 2, seed, scale=0.1) for seed in range(3)]
    state = hf_views(model)
    together = apply(state, combine(adapters, [1, -1, 0.5]))
    one_by_one = state
    for adapter, weight in zip(adapters, [1, -1, 0.5], strict=True):
        one_by_one = apply(one_by_one, adapter, weight)
    for name in state:
        torch.testing.assert_close(together[name], one_by_one[name], rtol=0, atol=1e-6)


def test_training_lowers_the_loss_and_returns_the_model_as_it_came(model):
    model.head.weight.data *= 20  # from 0.02: the frozen head must be able to tell tokens apart
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    model.embed.weight.requires_grad_(True)
    adapter, losses = train_adapter(model, batch_of, 60, lr=2e-2, rank=3, progress=False)
    assert losses[-1] < 0.6 * losses[0]
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert [type(m) for m in model.modules()] == kinds
    assert model.embed.weight.requires_grad and not model.blocks[0].qkv.weight.requires_grad
    assert model.embed.weight.grad is None and not model.training
    assert {n: (len(f.up_Fr), f.down_rD.shape[1]) for n, f in adapter.factors.items()} == (
        linear_shapes(model)
    )
    tokens, targets = batch_of(torch.Generator().manual_seed(9))
    loss = torch.nn.functional.cross_entropy(
        fine_tuned(model, adapter)(tokens).flatten(0, 1), targets.flatten()
    )
    assert loss < 0.7 * losses[0]


def test_one_step_of_training_leaves_its_start_and_the_loss_is_the_models_own(model):
    """`up` starts at zero: the first loss is the base's, whatever `down` is."""
    _, losses = train_adapter(model, batch_of, 1, seed=4, progress=False)
    tokens, targets = batch_of(torch.Generator().manual_seed(4))
    own = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(torch.tensor(losses[0]), own)


def test_only_the_places_asked_for_are_trained_and_a_seed_repeats(model):
    runs = [
        train_adapter(
            model, batch_of, 3, places=("q_proj", "v_proj", "down_proj"), seed=s, progress=False
        )[0]
        for s in (5, 5, 6)
    ]
    assert {name.split(".")[-2] for name in runs[0].factors} == {"q_proj", "v_proj", "down_proj"}
    first, again, other = ({n: f.down_rD for n, f in run.factors.items()} for run in runs)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not any(torch.equal(first[n], other[n]) for n in first)


def test_a_linear_with_factors_equals_the_linear_of_changed_weights():
    torch.manual_seed(0)
    linear = Linear(6, 9).double()
    rows = {"a": 4, "b": 2, "c": 3}
    start = drawn({"a": (4, 6), "c": (3, 6)}, 2, dtype=torch.float64).factors
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    adapted = AdaptedLinear(linear, rows, start, scale=3.0)
    weight = linear.weight.clone()
    weight[:4] += 3 * start["a"].up_Fr @ start["a"].down_rD
    weight[6:] += 3 * start["c"].up_Fr @ start["c"].down_rD
    torch.testing.assert_close(adapted(x), x @ weight.T + linear.bias)


def test_a_failed_training_leaves_the_model_whole(model):
    def nothing_scored(generator):
        tokens, targets = batch_of(generator)
        return tokens, torch.full_like(targets, IGNORE)

    kinds = [type(m) for m in model.modules()]
    with pytest.raises(FloatingPointError, match="scores some target"):
        train_adapter(model, nothing_scored, 2, progress=False)
    assert [type(m) for m in model.modules()] == kinds


def test_a_saved_adapter_loads_as_it_was(tmp_path):
    adapter = drawn({"model.a.weight": (5, 3), "b": (2, 7)}, 2, scale=1.5, dtype=torch.bfloat16)
    again = load_adapter(save_adapter(adapter, tmp_path / "new" / "x.safetensors"))
    assert again.scale == 1.5 and again.factors.keys() == adapter.factors.keys()
    for name, f in adapter.factors.items():
        assert torch.equal(again.factors[name].down_rD, f.down_rD)
        assert torch.equal(again.factors[name].up_Fr, f.up_Fr)
    assert again.nbytes == 2 * (2 * 8 + 2 * 9)


def test_files_that_are_no_adapters_are_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"no adapter at .*adapter_dance.safetensors: make one"):
        load_adapter("dance")
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not one")
    with pytest.raises(WeightsError, match="is no adapter"):
        load_adapter(path)
    pair = {"w.down": torch.ones(2, 3), "w.up": torch.ones(4, 2)}
    for tensors, metadata, words in (
        (pair, None, "scale"),
        ({"w.down": pair["w.down"]}, {"scale": "1.0"}, "w.up"),
        (pair | {"w.bias": torch.ones(4)}, {"scale": "1.0"}, "w.bias"),
        (pair | {"w.up": torch.ones(4, 3)}, {"scale": "1.0"}, "one rank"),
        (pair, {"scale": "wide"}, "is no adapter"),
    ):
        save_file(tensors, path, metadata)
        with pytest.raises(WeightsError, match=words):
            load_adapter(path)
    theirs = {f"base_model.model.q.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    save_file(theirs, path, {"format": "pt"})
    words = "is no adapter in this course's format, but PEFT's: merge it into its model with PEFT"
    with pytest.raises(WeightsError, match=words):
        load_adapter(path)
    folder = tmp_path / "peft"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(WeightsError, match=words):
        load_adapter(folder)
    whole = save_adapter(drawn({"w": (50, 50)}, 2), path).read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(WeightsError, match="is no adapter"):
        load_adapter(path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_a_weight_that_is_no_float_is_not_changed(dtype):
    state = {"w": torch.ones(3, 2).to(dtype)}
    with pytest.raises(TensorMismatch, match=f"w is {dtype}"):
        apply(state, drawn({"w": (3, 2)}, 1))


def test_an_adapter_of_another_model_is_refused(model):
    shapes = linear_shapes(model)
    with pytest.raises(WeightsError, match=r"no model\.layers\.9\.x \(1 of 1 names"):
        fine_tuned(model, drawn({"model.layers.9.x": (2, 2)}, 1))
    name = next(iter(shapes))
    with pytest.raises(ShapeError, match=r"q_proj.weight is \(24, 24\) but .* \(1, 24\)"):
        fine_tuned(model, drawn({name: (1, 24)}, 1))
    model.blocks[0].out = torch.nn.Identity()
    with pytest.raises(TypeError, match=r"no parameter blocks\.0\.out\.weight"):
        fine_tuned(model, drawn(shapes, 1))


def test_bad_arguments_are_named(model):
    one, wide = drawn({"w": (2, 3)}, 1), drawn({"w": (2, 4)}, 1)
    with pytest.raises(ValueError, match="2 weights for 1 adapters: expected one each"):
        combine([one], [1, 2])
    with pytest.raises(ValueError, match="0 adapters"):
        combine([], [])
    with pytest.raises(ValueError, match="finite"):
        combine([one], [float("nan")])
    with pytest.raises(ShapeError, match=r"w is \(2, 3\) and \(2, 4\)"):
        combine([one, wide], [1, 1])
    with pytest.raises(ShapeError, match="one rank r"):
        Factors(torch.ones(2, 3), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"places=\['qkv'\]"):
        train_adapter(model, batch_of, 1, places=["qkv"])
    with pytest.raises(ValueError, match="places="):
        train_adapter(model, batch_of, 1, places=[])
    with pytest.raises(ValueError, match="rank=0"):
        train_adapter(model, batch_of, 1, rank=0)
