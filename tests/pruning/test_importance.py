"""Importances against transformers' own modules, watched and reduced by loops."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lecture_util.model.checkpoint import save_folder
from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError
from lecture_util.model.text import perplexity
from lecture_util.model.transformer import RMSNorm, Transformer
from lecture_util.pruning.importance import (
    block_influence,
    channel_importance,
    greedy_drop,
    head_importance,
    importances,
    neuron_importance,
    perplexity_without,
    without,
)
from lecture_util.pruning.prune import drop_layers, keep_query_heads
from lecture_util.quantization.linear import replace_linears
from lecture_util.quantization.llm_int8 import Int8Linear

CONFIG = Config(D=24, F=19, K=3, G=2, H=4, L=4, V=31, max_context=64)
MEASURES = pytest.mark.parametrize(
    "measure", [block_influence, head_importance, neuron_importance, channel_importance]
)


def scrambled(config=CONFIG, seed=0, dtype=torch.float64):
    model = Transformer.random(config, seed=seed, dtype=dtype)
    g = torch.Generator().manual_seed(seed + 1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=g, dtype=torch.float64)
        weight.data.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


def tokens(B=5, T=7, seed=0):
    return torch.randint(CONFIG.V, (B, T), generator=torch.Generator().manual_seed(seed))


def hooks(model):
    return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What flows through transformers' copy of the model, by kind and layer: lists (B, T, X)."""
    from transformers import AutoModelForCausalLM

    folder = save_folder(scrambled(), tmp_path_factory.mktemp("importance") / "model")
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = {kind: [] for kind in ("x", "y", "heads", "neurons", "norms")}

    def keep(kind, tensor):
        found[kind].append((tensor[0] if isinstance(tensor, tuple) else tensor).detach().tolist())

    for layer in peer.model.layers:
        layer.register_forward_pre_hook(lambda m, x: keep("x", x))
        layer.register_forward_hook(lambda m, x, y: keep("y", y))
        layer.self_attn.o_proj.register_forward_pre_hook(lambda m, x: keep("heads", x))
        layer.mlp.down_proj.register_forward_pre_hook(lambda m, x: keep("neurons", x))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda m, x, y: keep("norms", y))
    peer(tokens())
    return found


def norm(numbers):
    return math.sqrt(sum(number * number for number in numbers))


def mean(numbers):
    return sum(numbers) / len(numbers)


def reduced(rows_BTX, aggregate=("mean", "l2")):
    """Of one module: over the positions of each row, then over rows, one number for each of X."""
    over_positions, over_rows = ({"mean": mean, "l2": norm}[how] for how in aggregate)
    return [
        over_rows([over_positions([abs(x[i]) for x in row_TX]) for row_TX in rows_BTX])
        for i in range(len(rows_BTX[0][0]))
    ]


def close(got, want):
    torch.testing.assert_close(got.double(), torch.tensor(want).double(), atol=1e-7, rtol=1e-6)


def test_block_influence_is_one_minus_the_mean_cosine(seen):
    want = []
    for xs, ys in zip(seen["x"], seen["y"], strict=True):
        pairs = [(x, y) for row in zip(xs, ys, strict=True) for x, y in zip(*row, strict=True)]
        cosines = [
            sum(a * b for a, b in zip(x, y, strict=True)) / (norm(x) * norm(y)) for x, y in pairs
        ]
        want.append(1 - mean(cosines))
    got = block_influence(scrambled(), tokens())
    assert got.shape == (4,)
    close(got, want)


@pytest.mark.parametrize(
    "aggregate", [("mean", "l2"), ("mean", "mean"), ("l2", "l2"), ("l2", "mean")]
)
def test_neurons_heads_and_channels_match_loops_over_transformers(seen, aggregate):
    model, H = scrambled(), CONFIG.H

    def by_heads(rows_BTX, width):
        return [
            [[norm(x[i : i + width]) for i in range(0, len(x), width)] for x in row]
            for row in rows_BTX
        ]

    def got(measure, **options):
        return measure(model, tokens(), aggregate=aggregate, **options)

    neurons = got(neuron_importance)
    assert neurons.shape == (4, 19)
    close(neurons, [reduced(rows, aggregate) for rows in seen["neurons"]])
    heads = got(head_importance)
    assert heads.shape == (4, 6)
    close(heads, [reduced(by_heads(rows, H), aggregate) for rows in seen["heads"]])
    groups = got(head_importance, groups=True)
    assert groups.shape == (4, 3)
    close(groups, [reduced(by_heads(rows, 2 * H), aggregate) for rows in seen["heads"]])
    channels = got(channel_importance)
    assert channels.shape == (24,)
    of_norms = [reduced(rows, aggregate) for rows in seen["norms"]]
    assert len(of_norms) == 2 * CONFIG.L
    close(channels, [sum(scores) for scores in zip(*of_norms, strict=True)])


@pytest.mark.parametrize("groups", [False, True])
def test_projected_heads_are_measured_by_what_they_add_to_the_residual(seen, groups):
    """Each head's output through `out` with the columns of all other heads set to zero."""
    model, heads, want = scrambled(), CONFIG.K if groups else CONFIG.N, []
    for block, rows_BTX in zip(model.blocks, seen["heads"], strict=True):
        added = []
        for head in range(heads):
            alone = block.out.weight.clone().unflatten(1, (heads, -1))
            alone[:, :head], alone[:, head + 1 :] = 0, 0
            added.append((torch.tensor(rows_BTX) @ alone.flatten(1).T.float()).norm(dim=-1))
        want.append(reduced(torch.stack(added, -1).tolist()))
    got = head_importance(model, tokens(), groups=groups, projected=True)
    torch.testing.assert_close(got, torch.tensor(want).double(), atol=1e-5, rtol=1e-5)
    other = head_importance(model, tokens(), groups=groups)
    assert (got.argsort() != other.argsort()).any()


def test_default_is_minitrons_mean_then_l2(seen):
    close(neuron_importance(scrambled(), tokens()), [reduced(rows) for rows in seen["neurons"]])


@MEASURES
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 99])
def test_batches_of_any_size_give_the_same(measure, rows):
    model = scrambled()
    at_once = measure(model, tokens(), rows=5)
    torch.testing.assert_close(measure(model, tokens(), rows=rows), at_once, atol=0, rtol=1e-6)


@MEASURES
def test_the_model_is_left_as_it_was_even_after_an_error(measure):
    model = scrambled(dtype=torch.float32).train().requires_grad_(True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    scores = measure(model, tokens())
    assert not scores.requires_grad and not hooks(model)
    with pytest.raises(IndexError):
        measure(model, torch.full((1, 3), CONFIG.V))
    assert not hooks(model) and model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], w) for n, w in model.state_dict().items())


@MEASURES
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (3,)])
def test_an_empty_calibration_set_is_refused(measure, shape):
    with pytest.raises(ValueError, match="a calibration set needs at least one row"):
        measure(scrambled(), torch.zeros(shape, dtype=torch.long))


def test_parts_that_say_nothing_score_zero():
    model = scrambled()
    block = model.blocks[2]
    block.out.weight.data.zero_()
    block.down.weight.data.zero_()
    gate_2FD = block.gate_up.weight.data.unflatten(0, (2, -1))
    gate_2FD[:, 5] = 0
    block.qkv.weight.data[(6 + 3 + 1) * 4 :][:4] = 0  # v of KV head 1
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.data[7] = 0
    scores = importances(model, tokens())
    assert scores["layers_L"].argmin() == 2 and scores["layers_L"][2].abs() < 1e-12
    assert scores["neurons_LF"].eq(0).nonzero().tolist() == [[2, 5]]
    assert scores["heads_LN"].eq(0).nonzero().tolist() == [[2, 2], [2, 3]]
    assert scores["channels_D"].eq(0).nonzero().tolist() == [[7]]
    groups_LK = head_importance(model, tokens(), groups=True)
    assert groups_LK.eq(0).nonzero().tolist() == [[2, 1]]


def test_a_layer_that_turns_its_input_round_has_influence_two():
    class Turn(nn.Module):
        def forward(self, x, rope, cache):
            return -3 * x

    model = Transformer.random(CONFIG, block=lambda config, layer: Turn())
    close(block_influence(model, tokens()), [2.0] * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_reduced_in_fp32(dtype):
    """Sums over fp16 overflow past 65504, and bf16 stops counting at 256."""
    model = scrambled(dtype=dtype)
    model.embed.weight.data *= 100
    for name, scores in importances(model, tokens(B=9)).items():
        assert scores.dtype == torch.float32 and scores.isfinite().all(), name
    wide = neuron_importance(scrambled(dtype=dtype).float(), tokens())
    torch.testing.assert_close(
        neuron_importance(scrambled(dtype=dtype), tokens()), wide, atol=0.1, rtol=0.1
    )


def test_perplexity_without_a_layer_is_that_of_the_model_without_it():
    model = scrambled()
    got = perplexity_without(model, tokens(), rows=3)
    assert got == [perplexity(drop_layers(model, [i]), tokens(), 3) for i in range(4)]
    assert len(set(got)) == 4 and len(model.blocks) == 4
    with pytest.raises(ValueError, match="one layer"):
        perplexity_without(scrambled(replace(CONFIG, L=1)), tokens())


def test_a_view_shares_its_weights_and_skips_what_it_should():
    model = scrambled()
    view = without(model, [1, 3])
    assert torch.equal(view(tokens()), drop_layers(model, [3, 1])(tokens()))
    ours = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in view.parameters()} < ours
    assert len(model.blocks) == 4 and len(view.blocks) == 2


def twins(model, tokens_BT):
    """Layers 1 and 2 do the same work: each is dispensable while the other is there."""
    left = [block.layer for block in model.blocks]
    cost = {0: 9.0, 1: 0.1 if 2 in left else 5.0, 2: 0.2 if 1 in left else 5.0, 3: 1.0}
    return [cost[layer] for layer in left]


def test_greedy_drop_measures_again_after_each_layer():
    model = scrambled()
    assert greedy_drop(model, tokens(), 3, twins) == [1, 3, 2]
    assert greedy_drop(model, tokens(), 0) == []
    assert len(model.blocks) == 4


def test_greedy_drop_takes_what_lowers_quality_least_each_time():
    """By perplexity, against dropping each candidate for real."""
    model, dropped = scrambled(), []
    for _ in range(3):
        left = [i for i in range(4) if i not in dropped]
        dropped.append(
            min(left, key=lambda i: perplexity(drop_layers(model, [*dropped, i]), tokens()))
        )
    assert greedy_drop(model, tokens(), 3, perplexity_without) == dropped


@pytest.mark.parametrize("num", [-1, 4, 1.0, True])
def test_greedy_drop_leaves_a_layer(num):
    with pytest.raises(ValueError, match="choose from 0 to 3"):
        greedy_drop(scrambled(), tokens(), num)


def test_scores_that_rank_nothing_are_refused():
    with pytest.raises(ValueError, match=r"without layers \[\] a score is not finite"):
        greedy_drop(scrambled(), tokens(), 1, lambda model, text: [math.nan] * len(model.blocks))


def test_scores_of_anything_but_layers_are_refused():
    """The place of the least of them would be taken for a layer's."""
    with pytest.raises(ShapeError, match=r"shape \(4, 6\): expected a number for each of the 4"):
        greedy_drop(scrambled(), tokens(), 1, head_importance)


@pytest.mark.parametrize("layers", [[-1], [4], [1, 1]])
def test_a_view_without_layers_that_are_not_there_is_refused(layers):
    with pytest.raises(ValueError, match="layers: index"):
        without(scrambled(), layers)


def test_projected_heads_of_a_quantized_model_are_refused():
    model = replace_linears(scrambled(dtype=torch.float32), Int8Linear.from_linear)
    assert head_importance(model, tokens()).isfinite().all()
    with pytest.raises(TypeError, match="quantized: measure the model it was made from"):
        head_importance(model, tokens(), projected=True)


@pytest.mark.parametrize("aggregate", ["mean", ("mean",), ("max", "l2"), ("mean", "l2", "l2")])
def test_an_unknown_aggregation_is_refused(aggregate):
    with pytest.raises(ValueError, match=r"expected two of \('mean', 'l2'\)"):
        neuron_importance(scrambled(), tokens(), aggregate=aggregate)


@pytest.mark.parametrize("measure", [head_importance, neuron_importance, channel_importance])
def test_other_layers_have_block_influence_only(measure):
    class Add(nn.Module):
        def forward(self, x, rope, cache):
            return x + 1

    model = Transformer.random(CONFIG, block=lambda config, layer: Add())
    with pytest.raises(TypeError, match=r"layer 0 is a Add.*block_influence"):
        measure(model, tokens())


def test_a_pruned_model_can_be_measured_again():
    pruned = keep_query_heads(scrambled(), [[0, 2, 4]] * 4)
    assert head_importance(pruned, tokens()).shape == (4, 3)
    close(
        head_importance(pruned, tokens(), groups=True), head_importance(pruned, tokens()).tolist()
    )


def test_the_reference_model_would_miss_its_first_and_last_layers_most():
    """And its middle least: six layers are among the eight least in each calibration set tried."""
    from lecture_util.model.text import english_split, windows
    from lecture_util.model.weights import load, load_tokenizer

    model = load("smollm2-135m", device="cpu")
    study_S, _ = english_split(load_tokenizer("smollm2-135m"))
    tokens_BT = windows(study_S, 8, 128, torch.Generator().manual_seed(0))
    order = block_influence(model, tokens_BT).argsort().tolist()
    assert order[0] == 25 and order[-2:] == [29, 0]
    assert {14, 13, 17, 26, 15} < set(order[:8])
