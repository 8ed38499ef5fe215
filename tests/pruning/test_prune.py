"""Pruned models against models with the same parts zeroed, and against transformers."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lecture_util.model.checkpoint import load_folder, save_folder
from lecture_util.model.config import Config
from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.linear import Linear
from lecture_util.model.transformer import Block, RMSNorm, Transformer
from lecture_util.pruning.importance import without
from lecture_util.pruning.plan import Plan, plan_by_importance, width_for
from lecture_util.pruning.prune import (
    drop_layers,
    keep_channels,
    keep_kv_groups,
    keep_layers,
    keep_neurons,
    keep_query_heads,
    prune,
)
from lecture_util.roofline import num_params

BIASED = Config(D=24, F=19, K=3, G=2, H=4, L=4, V=31, tied=True, qkv_bias=True, max_context=64)
UNTIED = Config(D=26, F=21, K=2, G=3, H=6, L=3, V=37, max_context=64)
ONE_KV = Config(D=22, F=13, K=1, G=5, H=2, L=2, V=29, tied=True, max_context=64)
CONFIGS = pytest.mark.parametrize("config", [BIASED, UNTIED, ONE_KV], ids=["tied", "untied", "mqa"])


def scrambled(config, seed=0, dtype=torch.float64):
    """Every weight, bias and norm large enough to matter."""
    model = Transformer.random(config, seed=seed, dtype=dtype)
    g = torch.Generator().manual_seed(seed + 1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=g, dtype=torch.float64)
        weight.data.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


def tokens(config, B=2, T=11, seed=0):
    return torch.randint(config.V, (B, T), generator=torch.Generator().manual_seed(seed))


def assert_same(pruned, zeroed, atol=1e-12):
    want = zeroed(tokens(zeroed.config))
    torch.testing.assert_close(pruned(tokens(zeroed.config)), want, atol=atol, rtol=1e-12)


def some(L, size, keep, seed=0):
    """For each layer another set of `keep` indices, out of order."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randperm(size, generator=g)[:keep] for _ in range(L)]


def lost(keep, size):
    return sorted(set(range(size)) - set(torch.as_tensor(keep).tolist()))


def query_heads(config, G, seed=0):
    """For each layer, G query heads of each KV head."""
    each = some(config.L * config.K, config.G, G, seed)
    heads = [config.G * (i % config.K) + row for i, row in enumerate(each)]
    return [torch.cat(heads[i : i + config.K]) for i in range(0, len(heads), config.K)]


def some_plan(config, **changes):
    L, D = max(1, config.L - 1), config.D - 3
    return Plan(
        layers=torch.randperm(config.L)[:L].tolist(),
        heads=query_heads(config, config.G - 1),
        neurons=some(config.L, config.F, config.F - 4),
        channels=torch.randperm(config.D)[:D],
    )


@pytest.fixture
def wide_norms(monkeypatch):
    """RMSNorm works in fp32; in fp64 it shows what is exact."""

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    monkeypatch.setattr(RMSNorm, "forward", forward)


@CONFIGS
def test_a_layer_that_adds_nothing_can_be_dropped(config):
    model = scrambled(config)
    drop = [config.L - 1, 0][: config.L - 1]
    pruned = drop_layers(model, drop)
    assert pruned.config == replace(config, L=config.L - len(drop))
    assert (pruned(tokens(config)) - model(tokens(config))).abs().max() > 1e-3
    for layer in drop:
        model.blocks[layer].out.weight.data.zero_()
        model.blocks[layer].down.weight.data.zero_()
    assert_same(pruned, model)
    assert_same(keep_layers(model, lost(drop, config.L)), model)


@CONFIGS
def test_neurons_that_down_ignores_can_be_dropped(config):
    model = scrambled(config)
    keep = some(config.L, config.F, 7)
    pruned = keep_neurons(model, keep)
    assert pruned.config == replace(config, F=7)
    for layer, row in enumerate(keep):
        model.blocks[layer].down.weight.data[:, lost(row, config.F)] = 0
    assert_same(pruned, model)


@CONFIGS
def test_query_heads_that_out_ignores_can_be_dropped(config):
    model = scrambled(config)
    keep = query_heads(config, config.G - 1)
    pruned = keep_query_heads(model, keep)
    assert pruned.config == replace(config, G=config.G - 1)
    for layer, row in enumerate(keep):
        out_DNH = model.blocks[layer].out.weight.data.unflatten(1, (config.N, config.H))
        out_DNH[:, lost(row, config.N)] = 0
    assert_same(pruned, model)


@pytest.mark.parametrize("config", [BIASED, UNTIED])
def test_kv_heads_go_with_the_query_heads_that_read_them(config):
    """NVIDIA/Model-Optimizer#690: cutting K alone is not in Minitron and not done here."""
    model = scrambled(config)
    keep = some(config.L, config.K, config.K - 1)
    pruned = keep_kv_groups(model, keep)
    assert pruned.config == replace(config, K=config.K - 1)
    for layer, row in enumerate(keep):
        out_DKX = model.blocks[layer].out.weight.data.unflatten(1, (config.K, -1))
        out_DKX[:, lost(row, config.K)] = 0
    assert_same(pruned, model)


def silence_channels(model, channels):
    """Nothing writes these channels of the residual stream."""
    model.embed.weight.data[:, channels] = 0
    for block in model.blocks:
        block.out.weight.data[channels] = 0
        block.down.weight.data[channels] = 0


@CONFIGS
def test_silent_channels_can_be_dropped_once_the_norms_are_rescaled(config, wide_norms):
    keep = some(1, config.D, config.D - 5)[0]
    model = scrambled(config)
    silence_channels(model, lost(keep, config.D))
    rescaled = keep_channels(model, keep)
    n = config.D - 5
    assert rescaled.config == replace(config, D=n, norm_eps=config.norm_eps * config.D / n)
    assert_same(rescaled, model)


@CONFIGS
def test_without_rescaling_every_norm_shrinks_by_the_root_of_n_over_d(config, wide_norms):
    keep = some(1, config.D, config.D - 5)[0]
    model = scrambled(config)
    silence_channels(model, lost(keep, config.D))
    sliced = keep_channels(model, keep, rescale=False)
    assert sliced.config.norm_eps == config.norm_eps
    assert (sliced(tokens(config)) - model(tokens(config))).abs().max() > 1e-2
    left = (config.D - 5) / config.D
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.data *= left**0.5
            module.eps *= left
    assert_same(sliced, model)


@CONFIGS
def test_a_plan_is_the_same_as_its_cuts_one_by_one(config):
    torch.manual_seed(0)
    model, plan = scrambled(config), some_plan(config)
    at_once = prune(model, plan)
    assert at_once.config == plan.config(config)
    layers = sorted(plan.layers)
    cuts = {
        "layers": lambda m, rows: keep_layers(m, plan.layers),
        "heads": lambda m, rows: keep_query_heads(m, [plan.heads[i] for i in rows]),
        "neurons": lambda m, rows: keep_neurons(m, [plan.neurons[i] for i in rows]),
        "channels": lambda m, rows: keep_channels(m, plan.channels),
    }
    for order in itertools.permutations(cuts):
        step, rows = model, range(config.L)
        for kind in order:
            step = cuts[kind](step, rows)
            rows = layers if kind == "layers" else rows
        for name, weight in at_once.state_dict().items():
            torch.testing.assert_close(step.state_dict()[name], weight, atol=0, rtol=1e-15)


def test_keeping_all_gives_a_copy():
    for config in (BIASED, UNTIED):
        model = scrambled(config, dtype=torch.bfloat16)
        same = prune(model, Plan())
        assert same.config == config and same.dtype == torch.bfloat16
        for name, weight in model.state_dict().items():
            assert torch.equal(same.state_dict()[name], weight)
        assert drop_layers(model, []).config == config


@settings(max_examples=25)
@given(st.data())
def test_parameters_by_formula_are_the_parameters_there(data):
    config = data.draw(st.sampled_from([BIASED, UNTIED, ONE_KV]))
    target = replace(config, **{
        x: data.draw(st.integers(1, getattr(config, x)), label=x) for x in "DFKGL"
    })  # fmt: skip
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    L, N = config.L, config.N
    shapes = {
        "layers_L": (L,), "heads_LN": (L, N), "neurons_LF": (L, config.F), "channels_D": (config.D,)
    }  # fmt: skip
    scores = {name: torch.rand(shape, generator=g) for name, shape in shapes.items()}
    pruned = prune(scrambled(config), plan_by_importance(config, target, **scores, rescale=False))
    assert pruned.config == target
    assert sum(p.numel() for p in pruned.parameters()) == num_params(target)
    assert all(p.shape == q.shape for p, q in zip(
        pruned.parameters(), Transformer(target).parameters(), strict=True
    ))  # fmt: skip
    assert pruned(tokens(config, T=1)).isfinite().all()


@CONFIGS
def test_the_source_is_neither_changed_nor_shared(config):
    model = scrambled(config)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for plan in (Plan(), Plan(layers=[0]), some_plan(config)):
        pruned = prune(model, plan)
        assert (pruned.head.weight is pruned.embed.weight) == config.tied
        assert not pruned.training and not any(p.requires_grad for p in pruned.parameters())
        for weight in pruned.parameters():
            weight.add_(1)
        assert all(torch.equal(before[n], w) for n, w in model.state_dict().items())
    assert model.config == config


KINDS = {
    "layers": lambda m, c: drop_layers(m, [0]),
    "neurons": lambda m, c: keep_neurons(m, some(c.L, c.F, 5)),
    "query heads": lambda m, c: keep_query_heads(m, query_heads(c, 1)),
    "KV groups": lambda m, c: keep_kv_groups(m, some(c.L, c.K, max(1, c.K - 1))),
    "channels": lambda m, c: keep_channels(m, some(1, c.D, c.D - 7)[0]),
    "sliced channels": lambda m, c: keep_channels(m, some(1, c.D, c.D - 7)[0], rescale=False),
    "all": lambda m, c: prune(m, some_plan(c)),
}


@pytest.mark.parametrize("kind", KINDS)
@CONFIGS
@torch.inference_mode()
def test_transformers_opens_a_pruned_checkpoint_and_gives_our_logits(tmp_path, config, kind):
    from transformers import AutoModelForCausalLM

    pruned = KINDS[kind](scrambled(config, dtype=torch.float32), config)
    folder = save_folder(pruned, tmp_path / "pruned")
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokens(config, B=2, T=9)
    ours = pruned(text)
    torch.testing.assert_close(ours, peer(text).logits, atol=1e-5, rtol=1e-5)
    again = load_folder(folder)
    assert again.config == pruned.config and torch.equal(again(text), ours)


@CONFIGS
def test_a_pruned_model_generates_with_a_cache_of_its_own_shape(config):
    pruned = prune(scrambled(config), some_plan(config))
    prompts = [[3, 1, 4], [5]]
    assert generate(pruned, prompts, 7) == [generate_naive(pruned, p, 7) for p in prompts]


@pytest.mark.parametrize(("K", "G"), [(1, 3), (2, 2), (3, 1), (2, 3), (1, 1)])
def test_heads_by_importance_are_the_best_of_all_choices(K, G):
    """Against every allowed choice: equally many query heads of each KV head that stays."""
    config = replace(UNTIED, K=3, G=3)
    scores_LN = torch.rand(config.L, 9, generator=torch.Generator().manual_seed(K * 10 + G))
    plan = plan_by_importance(config, replace(config, K=K, G=G), heads_LN=scores_LN)
    for layer in range(config.L):
        allowed = [
            heads for heads in itertools.combinations(range(9), K * G)
            if sorted(sum(h // 3 == k for h in heads) for k in range(3)) == [0] * (3 - K) + [G] * K
        ]  # fmt: skip
        best = max(allowed, key=lambda heads: scores_LN[layer, list(heads)].square().sum())
        assert sorted(plan.heads[layer]) == list(best)


def test_importance_keeps_the_highest_and_of_equals_the_first():
    config = replace(UNTIED, L=3, F=4, D=6)
    plan = plan_by_importance(
        config, replace(config, L=2, F=2, D=3),
        layers_L=[0.5, 0.1, 0.5],
        neurons_LF=torch.tensor([[1.0, 9, 8, 2], [3, 3, 3, 3], [0, -1, -2, 5]]),
        channels_D=torch.tensor([1.0, 6, 2, 5, 3, 4]),
    )  # fmt: skip
    assert plan == Plan([0, 2], None, [[1, 2], [0, 1], [0, 3]], [1, 3, 5])
    assert plan_by_importance(config, config) == Plan()


@pytest.mark.parametrize("multiple_of", [1, 8, 7])
def test_width_for_comes_as_near_as_any_width(multiple_of):
    config = replace(UNTIED, F=61, L=5)
    for num in (num_params(replace(config, L=4)), num_params(replace(config, L=2)) + 33):
        found = width_for(config, num, multiple_of)
        off = {
            F: abs(num_params(replace(config, F=F)) - num)
            for F in range(multiple_of, 62, multiple_of)
        }
        assert found == replace(config, F=found.F) and off[found.F] == min(off.values())
    assert width_for(config, num_params(config), 1) == config


def test_a_width_with_the_parameters_of_22_layers_of_the_reference_model():
    config = replace(UNTIED, D=576, F=1536, K=3, G=3, H=64, L=30, V=49152, tied=True)
    shallow = num_params(replace(config, L=22))
    for start in (config, replace(config, K=2), replace(config, G=2)):
        narrow = width_for(start, shallow)
        assert narrow.F % 8 == 0 and narrow.L == 30
        assert abs(num_params(narrow) / shallow - 1) < 0.002


@pytest.mark.parametrize("num", [0, 10_000, 10**9, float("nan")])
def test_a_size_that_no_width_reaches_is_refused(num):
    with pytest.raises(
        ValueError, match=r"out of reach: .* F can bring [\d,]+ to [\d,]+; change L"
    ):
        width_for(UNTIED, num)


@pytest.mark.parametrize("step", [0, 22, 2.0, True])
def test_a_width_step_must_fit(step):
    with pytest.raises(ValueError, match="whole number from 1 to F=21"):
        width_for(UNTIED, num_params(UNTIED), step)


ROWS = [[0, 1]] * 3


@pytest.mark.parametrize(
    ("cut", "argument", "message"),
    [
        (drop_layers, [0, 1, 2], "layers: nothing is kept of 3: keep at least one"),
        (keep_layers, [], "layers: nothing is kept"),
        (keep_layers, [0, 3], "layers: index 3 is out of range: choose from 0 to 2"),
        (drop_layers, [-1], "layers: index -1 is out of range"),
        (keep_layers, [2, 0, 2], "layers: index 2 is there more than once"),
        (keep_neurons, [[0], [1], []], "neurons of layer 2: nothing is kept of 21"),
        (keep_neurons, [[0, 1], [1, 2], [3]], "layer 2 keeps 1, layer 0 keeps 2: one Config"),
        (keep_neurons, ROWS[:2], "neurons: 2 lists for a model of L=3 layers"),
        (keep_neurons, [[0], [21], [1]], "neurons of layer 1: index 21 is out of range"),
        (keep_kv_groups, [[0], [0, 1], [0]], "KV heads: layer 1 keeps 2, layer 0 keeps 1"),
        (keep_kv_groups, [[], [], []], "KV heads of layer 0: nothing is kept"),
        (keep_query_heads, [[0, 1, 2]] * 3, "layer 0 keeps none of KV head 1: .* keep_kv_groups"),
        (keep_query_heads, [[0, 3], [0, 4], [0, 1]], "layer 2 keeps none of KV head 1"),
        (keep_query_heads, [[0, 1, 3]] * 3, r"layer 0 keeps \{0: 2, 1: 1\} of its KV heads"),
        (keep_channels, [], "channels: nothing is kept of 26"),
        (keep_channels, [0, 26], "channels: index 26 is out of range"),
    ],
)
def test_what_can_not_be_cut_is_refused(cut, argument, message):
    with pytest.raises(ValueError, match=message):
        cut(scrambled(UNTIED), argument)


def test_a_plan_leaves_as_many_kv_heads_in_every_layer():
    heads = [[0, 1, 2, 3, 4, 5]] + [[0, 1, 2]] * 2
    with pytest.raises(ValueError, match="layer 1 keeps 3, layer 0 keeps 6"):
        prune(scrambled(UNTIED), Plan(heads=heads))
    with pytest.raises(ValueError, match="layer 1 leaves 1 KV heads, layer 0 leaves 2"):
        prune(scrambled(UNTIED), Plan(heads=[[0, 3], [0, 1], [0, 3]]))
    whole = prune(scrambled(UNTIED), Plan(heads=[[0, 1, 2], [3, 4, 5], [2, 0, 1]]))
    assert (whole.config.K, whole.config.G) == (1, 3)


@pytest.mark.parametrize(
    "keep", [torch.tensor([True, False, True]), torch.tensor([[0, 1]]), torch.tensor([0.0, 1.0]),
             [True, False], [0, 1.0], 2, "01", {0: 1}, [None],
             list(torch.tensor([True, False])), iter([0, 1])],
)  # fmt: skip
def test_what_is_no_list_of_indices_is_refused(keep):
    with pytest.raises(TypeError, match="list of indices"):
        keep_layers(scrambled(UNTIED), keep)


@pytest.mark.parametrize("keep", [3, iter(ROWS)])
def test_what_is_no_list_of_lists_is_refused(keep):
    with pytest.raises(TypeError, match=r"neurons: .* is not a list of lists of indices"):
        keep_neurons(scrambled(UNTIED), keep)


def test_scores_may_be_whole_numbers():
    target = replace(UNTIED, G=1)
    plan = plan_by_importance(UNTIED, target, heads_LN=torch.tensor([[3, 1, 2, 5, 6, 4]] * 3))
    assert plan.heads == [[0, 4]] * 3


class OtherBlock(Block):
    pass


class Packed(Linear):
    pass


def test_models_that_no_config_describes_whole_are_refused():
    with pytest.raises(TypeError, match="layer 0 is a OtherBlock: prune a model of plain Block"):
        drop_layers(Transformer.random(UNTIED, block=OtherBlock), [1])
    with pytest.raises(TypeError, match="that its config does not describe whole"):
        drop_layers(Transformer.random(UNTIED, rope_width=2), [1])
    with pytest.raises(TypeError, match="that its config does not describe whole"):
        drop_layers(without(scrambled(UNTIED), [0]), [1])  # its layer 1 is another
    with pytest.raises(TypeError, match="is a Sequential"):
        prune(nn.Sequential(nn.Linear(2, 2)), Plan(layers=[1]))
    for name in ("qkv", "out", "gate_up", "down"):
        model = scrambled(UNTIED)
        layer = getattr(model.blocks[2], name)
        setattr(model.blocks[2], name, Packed(layer.in_features, layer.out_features))
        with pytest.raises(TypeError, match=rf"blocks\.2\.{name} is a Packed.* then quantize"):
            drop_layers(model, [1])


@pytest.mark.parametrize(
    ("change", "scores", "message"),
    [
        ({"F": 9}, {}, "the target is smaller, so neurons_LF is needed"),
        ({"G": 1}, {}, "heads_LN is needed"),
        ({"L": 2}, {"layers_L": [1.0, 2.0]}, r"layers_L has shape \(2,\) but .* asks for \(3,\)"),
        ({"K": 1}, {"heads_LN": torch.ones(3, 2)}, r"heads_LN has shape \(3, 2\)"),
        ({"F": 9}, {"neurons_LF": torch.ones(21)}, r"neurons_LF has shape \(21,\)"),
        ({"L": 2}, {"layers_L": [1.0, float("nan"), 0.0]}, r"layers_L is nan at \[1\]"),
        ({"D": 9}, {"channels_D": torch.full((26,), torch.inf)}, r"channels_D is inf at \[0\]"),
        ({"F": 22}, {}, "the target has F=22 but the model F=21: pruning only takes away"),
        ({"H": 4}, {}, "no smaller shape of this model"),
        ({"tied": True}, {}, "no smaller shape of this model"),
    ],
)
def test_targets_and_scores_that_do_not_fit_are_refused(change, scores, message):
    with pytest.raises(ValueError, match=message):
        plan_by_importance(UNTIED, replace(UNTIED, **change), **scores)


@torch.inference_mode()
def test_transformers_opens_the_reference_model_with_8_layers_fewer(tmp_path):
    from transformers import AutoModelForCausalLM

    from lecture_util.model.weights import load

    model = load("smollm2-135m", device="cpu")
    pruned = drop_layers(model, [25, 14, 17, 13, 26, 15, 16, 3])
    assert pruned.config.L == 22
    del model
    peer = AutoModelForCausalLM.from_pretrained(
        save_folder(pruned, tmp_path / "pruned"), dtype=torch.float32
    )
    assert peer.num_parameters() == num_params(pruned.config)
    text = tokens(pruned.config, B=1, T=40)
    torch.testing.assert_close(pruned(text), peer(text).logits, atol=1e-4, rtol=0)
