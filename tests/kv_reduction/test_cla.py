from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_models import (
    LAYOUTS,
    SMALL,
    by_hand,
    feed,
    held_state,
    new_cache,
    small_model,
    tokens,
)

from lecture_util.kv_reduction.cla import (
    LayeredCache,
    LayeredPass,
    LayoutTransformer,
    SharedBlock,
    adopt,
    build,
    stack,
)
from lecture_util.kv_reduction.layout import Layout
from lecture_util.model.config import Config
from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.train import train
from lecture_util.model.transformer import Block, Transformer

MODELS = {name: small_model(layout) for name, layout in LAYOUTS.items()}


def check(got, want):
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_pass_without_a_cache_is_attention_picked_out_key_by_key(name):
    model, tokens_BT = MODELS[name], tokens(2, 11)
    torch.testing.assert_close(model(tokens_BT), by_hand(model, tokens_BT), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=6)
@given(B=st.integers(1, 3), chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_cached_in_any_split_equals_uncached(name, B, chunks):
    """mlx-lm#1674, mlx-swift-lm#333: sharing only with a cache; offset taken after the update."""
    model, tokens_BT = MODELS[name], tokens(B, sum(chunks))
    cache = new_cache(model, B)
    check(feed(model, cache, tokens_BT, chunks), model(tokens_BT))
    assert not cache.seen


@pytest.mark.parametrize("name", LAYOUTS)
def test_token_by_token_equals_one_prefill(name):
    model, tokens_BT = MODELS[name], tokens(2, 19)
    check(
        feed(model, new_cache(model, B=2), tokens_BT, 1),
        feed(model, new_cache(model, B=2), tokens_BT, 19),
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_after_a_rollback_logits_are_a_fresh_forwards(name):
    model, tokens_BT = MODELS[name], tokens(2, 15)
    cache = new_cache(model, B=2, slack=4)
    feed(model, cache, tokens_BT, 5)
    cache.truncate([13, 11])
    more = tokens(2, 3, seed=5)
    got = model(more, cache)
    for row, n in enumerate([13, 11]):
        sequence = torch.cat((tokens_BT[row, :n], more[row]))[None]
        check(got[row], model(sequence)[0, n:])


@pytest.mark.parametrize("name", LAYOUTS)
def test_generation_of_unequal_prompts_equals_the_naive_loop(name):
    model, prompts = MODELS[name], [[5, 3, 9, 1, 4, 4, 2], [7, 2], [1]]
    out = generate(model, prompts, 12, new_cache=partial(model.new_cache, slack=6))
    assert out == [generate_naive(model, prompt, 12) for prompt in prompts]


def test_a_snapshot_of_a_shared_cache_holds_the_accepted_tokens_only():
    """mlx-swift-lm#308: the shared keys kept rejected rows after a trim."""
    model, tokens_BT = MODELS["CLA2"], tokens(1, 9)
    cache = new_cache(model)
    model(tokens_BT, cache)
    cache.truncate(6)
    model(tokens_BT[:, 6:7], cache)
    k = torch.zeros(1, 1, SMALL.K, SMALL.H, dtype=torch.float64)
    k_BSKH, _, _ = cache.stores[0].take(k, k, cache.lengths)
    fresh = new_cache(model)
    model(tokens_BT[:, :7], fresh)
    assert cache.lengths == [7]
    assert k_BSKH.shape[1] == 8  # the seven and the next
    check(k_BSKH[:, :7], fresh.stores[0].k_BSKH[:, :7])


@pytest.mark.parametrize("name", ["CLA2", "window CLA3"])
def test_a_consumer_leaves_its_producers_keys_alone(name):
    """vllm-ascend#11791: a consumer wrote into its producer's slots."""
    model, cache = MODELS[name], new_cache(MODELS[name], slack=20)
    model(tokens(1, 6), cache)
    assert set(cache.stores) == set(model.layout.producers)
    consumer = model.blocks[1]
    assert isinstance(consumer, SharedBlock)
    assert not hasattr(consumer, "qkv")
    assert consumer.q.weight.shape == (SMALL.N * SMALL.H, SMALL.D)
    cache.positions((1, 1), None)
    k = torch.ones(1, 1, SMALL.K, SMALL.H, dtype=torch.float64)
    q = torch.ones(1, 1, SMALL.N, SMALL.H, dtype=torch.float64)
    cache.attend(0, q, k, k)
    store = cache.stores[0]
    before = store.k_BSKH.clone(), store.v_BSKH.clone()
    first, again = cache.attend(1, q, None, None), cache.seen
    assert torch.equal(store.k_BSKH, before[0])
    assert torch.equal(store.v_BSKH, before[1])
    assert first.shape == q.shape
    assert (0 in again) == (model.layout.last_reader(0) != 1)  # freed with its last reader


def test_a_step_that_fails_midway_leaves_the_past_as_it_was():
    model, tokens_BT = MODELS["hybrid CLA2"], tokens(1, 12)
    cache = new_cache(model, slack=1)
    model(tokens_BT[:, :8], cache)
    before = held_state(cache)

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.blocks[4].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(1, 7, seed=4), cache)
    handle.remove()
    torch.testing.assert_close(held_state(cache), before, atol=0, rtol=0)
    assert cache.seen  # of the step that failed; the next one starts without it
    cache.positions((1, 4), None)
    assert not cache.seen
    check(model(tokens_BT[:, 8:], cache), model(tokens_BT)[:, 8:])


def test_only_what_later_layers_read_outlives_a_layer():
    layout, most = LAYOUTS["hybrid CLA2"], []
    model = MODELS["hybrid CLA2"]

    class Watched(LayeredPass):
        def attend(self, layer, *qkv):
            out = super().attend(layer, *qkv)
            most.append(sorted(self.seen))
            return out

    model(tokens(1, 5), Watched(layout))
    #       windows at 0 1 3 4, everything at 2 5: 1 reads 0, 4 reads 3, 5 reads 2
    assert most == [[0], [], [2], [2, 3], [2], []]


@pytest.mark.parametrize("name", ["window 3", "hybrid CLA2"])
def test_training_sends_gradients_through_every_layer(name):
    config = Config(D=16, F=24, K=1, G=2, H=8, L=6, V=11, max_context=32)
    torch.manual_seed(0)
    model = build(config, LAYOUTS[name])
    model(tokens(2, 9, V=11)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())

    def in_turns(generator):
        """Two tokens by turns: what comes next stood two places before it, within any window."""
        tokens_BT = torch.randint(0, 11, (16, 2), generator=generator).repeat(1, 5)
        return tokens_BT[:, :-1], tokens_BT[:, 1:]

    losses = train(model, in_turns, 60, lr=1e-2, progress=False)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("name", ["CLA2", "hybrid CLA2", "three windows"])
def test_gradients_are_those_of_attention_picked_out_key_by_key(name):
    """A producer's projections are moved by their consumers too."""
    model = small_model(LAYOUTS[name]).requires_grad_(True)
    tokens_BT, grads = tokens(1, 7), []
    for forward in (model, lambda tokens_BT: by_hand(model, tokens_BT)):
        model.zero_grad()
        forward(tokens_BT).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # norms are in fp32


def test_a_model_without_a_cache_uses_its_own_layout():
    weights = small_model(Layout.full(6))
    tokens_BT = tokens(1, 12)
    narrow, wide = adopt(weights, Layout.windowed(6, 3)), adopt(weights, Layout.windowed(6, 12))
    check(wide(tokens_BT), weights(tokens_BT))
    assert (narrow(tokens_BT) - wide(tokens_BT)).abs().max() > 1e-3
    check(narrow(tokens_BT), narrow(tokens_BT, LayeredPass(narrow.layout)))


def test_a_cache_of_another_layout_is_refused():
    model = MODELS["window 3"]
    plain = KVCache(SMALL, 1, 9, torch.float64)
    for cache in (plain, LayeredPass(Layout.windowed(6, 4)), new_cache(MODELS["full"])):
        with pytest.raises(ValueError, match=r"does not know this model's layout.*new_cache"):
            model(tokens(1, 3), cache)
    assert plain.lengths == [0]
    check(MODELS["full"](tokens(1, 3), plain), MODELS["full"](tokens(1, 3)))


def test_a_full_layout_is_the_plain_transformer():
    plain = Transformer.random(SMALL, seed=3, dtype=torch.float64)
    same = LayoutTransformer.random(SMALL, seed=3, dtype=torch.float64, layout=Layout.full(6))
    check(same(tokens(2, 9)), plain(tokens(2, 9)))
    by_stack = Transformer.random(
        SMALL, seed=3, dtype=torch.float64, block=stack(SMALL, Layout.full(6))
    )
    check(by_stack(tokens(2, 9)), plain(tokens(2, 9)))


@pytest.mark.parametrize("bias", [False, True])
def test_adopting_weights_copies_none_and_takes_queries_of_consumers(bias):
    config = Config(D=24, F=32, K=2, G=3, H=4, L=6, V=31, tied=True, qkv_bias=bias)
    source = small_model(Layout.full(6), config)
    model = adopt(source, Layout.cross_layer(6, 2), max_context=7)
    assert model.config.max_context == 7
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.data_ptr() == source.embed.weight.data_ptr()
    assert torch.equal(model.blocks[1].q.weight, source.blocks[1].qkv.weight[:24])
    tokens_BT = tokens(2, 6)
    torch.testing.assert_close(model(tokens_BT), by_hand(model, tokens_BT), atol=1e-9, rtol=0)
    check(feed(model, new_cache(model, B=2), tokens_BT, 2), model(tokens_BT))
    with pytest.raises(TypeError, match="type SharedBlock: adopt a model of plain Blocks"):
        adopt(model, Layout.full(6))
    assert isinstance(source.blocks[1], Block)


def test_blocks_and_layouts_that_do_not_belong_together_are_named():
    q = torch.zeros(1, 1, SMALL.N, SMALL.H, dtype=torch.float64)
    k = q[:, :, : SMALL.K]
    shared = LayeredPass(Layout.cross_layer(6, 2))
    with pytest.raises(ValueError, match="layer 0 must bring its own keys and values"):
        shared.attend(0, q, None, None)
    with pytest.raises(ValueError, match="layer 1 reads layer 0's keys and values"):
        shared.attend(1, q, k, k)
    with pytest.raises(ValueError, match="layer 1 reads layer 0, which has not run in this pass"):
        shared.attend(1, q)
    with pytest.raises(ValueError, match="the layout has 5 layers but the config has L=6"):
        stack(SMALL, Layout.full(5))
    with pytest.raises(ValueError, match="the layout has 5 layers but the config has L=6"):
        LayeredCache(SMALL, 1, 4, layout=Layout.full(5))
    with pytest.raises(TypeError, match=r"layout is 'full': expected a Layout.*full\(6\)"):
        build(SMALL, "full")


def test_bad_truncations_are_named():
    cache = new_cache(MODELS["hybrid"], B=2)
    with pytest.raises(ValueError, match="length 1 in row 0, which holds 0"):
        cache.truncate(1)
    with pytest.raises(ValueError, match="got 1 lengths for 2 rows"):
        cache.truncate([0])


def test_a_cache_of_another_layout_is_refused_even_by_full_attention():
    full, windowed = (build(SMALL, layout) for layout in (Layout.full(6), Layout.windowed(6, 3)))
    toks = tokens(1, 5)
    with pytest.raises(ValueError, match="layout"):
        full(toks, windowed.new_cache(SMALL, 1, 9))
    from lecture_util.model.kv_cache import KVCache

    torch.testing.assert_close(full(toks, KVCache(SMALL, 1, 9)), full(toks))
