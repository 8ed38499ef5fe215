import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_models import small_model, tokens

from lecture_util.kv_reduction.cla import adopt
from lecture_util.kv_reduction.gqa import pool_kv_heads
from lecture_util.kv_reduction.layout import Layout
from lecture_util.model.attention import attend, attention_by_hand, causal_mask
from lecture_util.model.config import Config
from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.transformer import Transformer

MANY = Config(D=24, F=32, K=6, G=2, H=4, L=3, V=31, qkv_bias=True, tied=True, max_context=64)


def many(seed=0, **options):
    return Transformer.random(MANY, seed=seed, **options)


def qkv_heads(model, layer, part="weight"):
    """Of a layer's stacked projection: query, key and value heads, each (heads, H, ...)."""
    c = model.config
    stacked = getattr(model.blocks[layer].qkv, part).unflatten(0, (-1, c.H))
    return stacked.split((c.N, c.K, c.K))


@settings(max_examples=40)
@given(
    B=st.integers(1, 3), T=st.integers(1, 7), extra=st.integers(0, 5),
    K=st.sampled_from([1, 2, 3]), G=st.sampled_from([1, 2, 4, 5]), H=st.sampled_from([2, 6, 8]),
)  # fmt: skip
def test_grouped_attention_equals_torchs(B, T, extra, K, G, H):
    """From MQA (K=1) to MHA (G=1). mamba#462: N differs from K; prime-rl#2681: T from H."""
    g = torch.Generator().manual_seed(0)
    S = T + extra
    q = torch.randn(B, T, K * G, H, generator=g, dtype=torch.float64)
    k, v = torch.randn(2, B, S, K, H, generator=g, dtype=torch.float64)
    mask_TS = causal_mask(torch.arange(extra, S), S)
    want = nnf.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask_TS, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(attend(q, k, v), want)
    torch.testing.assert_close(attend(q, k, v, mask_TS[None]), want)
    torch.testing.assert_close(attention_by_hand(q, k, v), want)


def test_four_query_heads_over_two_kv_heads_read_0_0_1_1():
    """axlearn#842, onnx#7274: not 0, 1, 0, 1. At T, S and H that no two axes share."""
    q, k = torch.zeros(1, 3, 4, 8), torch.zeros(1, 5, 2, 8)
    v = torch.arange(2.0)[None, None, :, None].expand(1, 5, 2, 8)
    for attention in (attend, attention_by_hand):
        out_BTNH = attention(q, k, v)
        assert out_BTNH.shape == (1, 3, 4, 8)
        for t in range(3):
            assert out_BTNH[0, t, :, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_pooled_heads_are_the_means_of_neighbouring_groups(K, part):
    model = many(dtype=torch.float64)
    pooled, group = pool_kv_heads(model, K), 6 // K
    assert (pooled.config.K, pooled.config.N, pooled.config.G) == (K, 12, 12 // K)
    for layer in range(3):
        old, new = qkv_heads(model, layer, part), qkv_heads(pooled, layer, part)
        assert torch.equal(new[0], old[0])
        for theirs, ours in zip(old[1:], new[1:], strict=True):
            for head in range(K):
                want = sum(theirs[head * group + i] for i in range(group)) / group
                torch.testing.assert_close(ours[head], want, atol=1e-15, rtol=0)


def test_heads_that_agree_within_groups_lose_nothing():
    """So query heads still read the KV head they read before."""
    model = many(dtype=torch.float64)
    with torch.no_grad():
        for layer in range(3):
            for part in ("weight", "bias"):
                for heads in qkv_heads(model, layer, part)[1:]:
                    heads *= 20
                    heads.copy_(heads[::3].repeat_interleave(3, 0))
    pooled, tokens_BT = pool_kv_heads(model, 2), tokens(2, 9)
    torch.testing.assert_close(pooled(tokens_BT), model(tokens_BT), atol=1e-12, rtol=0)
    other = pool_kv_heads(model, 3)(tokens_BT)  # groups of two mix heads that differ
    assert (other - model(tokens_BT)).abs().max() > 1e-6


def test_pooling_to_as_many_heads_is_the_same_model():
    model = many()
    pooled = pool_kv_heads(model, 6)
    assert pooled.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(pooled.state_dict()[name], weight)


def test_pooling_by_one_step_or_two_is_the_same():
    model = many(dtype=torch.float64)
    for (name, once), twice in zip(
        pool_kv_heads(model, 1).named_parameters(),
        pool_kv_heads(pool_kv_heads(model, 3), 1).parameters(), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(once, twice, atol=1e-15, rtol=0, msg=name)


def test_the_source_is_neither_changed_nor_shared():
    model = many()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    pooled = pool_kv_heads(model, 2)
    assert pooled.head.weight is pooled.embed.weight
    with torch.no_grad():
        for weight in pooled.parameters():
            weight.add_(1)
    assert all(torch.equal(before[n], w) for n, w in model.state_dict().items())
    assert model.config == MANY


def test_means_are_taken_in_fp32_and_cast_once():
    model = many(dtype=torch.bfloat16)
    pooled = pool_kv_heads(model, 1)
    assert pooled.dtype == torch.bfloat16
    _, keys, _ = qkv_heads(model, 0)
    _, mean, _ = qkv_heads(pooled, 0)
    assert torch.equal(mean[0], keys.double().mean(0).float().bfloat16())


def test_a_pooled_model_generates_and_its_cache_is_smaller():
    model = pool_kv_heads(many(dtype=torch.float64), 2)
    out = generate(model, [[3, 1, 4], [5]], 8)
    assert out == [generate_naive(model, p, 8) for p in ([3, 1, 4], [5])]


@pytest.mark.parametrize("K", [0, -1, 4, 12, 2.0, True, "2"])
def test_a_k_that_does_not_divide_is_refused_with_a_choice(K):
    with pytest.raises(
        ValueError, match=r"does not divide the model's K=6: choose of \[1, 2, 3, 6\]"
    ):
        pool_kv_heads(many(), K)


def test_layers_of_another_kind_are_refused():
    model = adopt(small_model(Layout.full(6)), Layout.cross_layer(6, 2))
    with pytest.raises(TypeError, match="layer 1 is a SharedBlock"):
        pool_kv_heads(model, 1)


def test_pooling_keeps_the_windows():
    from layered_models import SMALL, tokens

    from lecture_util.kv_reduction.cla import LayoutTransformer
    from lecture_util.kv_reduction.layout import Layout

    model = LayoutTransformer.random(SMALL, layout=Layout.windowed(SMALL.L, 2))
    same = pool_kv_heads(model, SMALL.K)
    torch.testing.assert_close(same(tokens(1, 9)), model(tokens(1, 9)))
    assert pool_kv_heads(model, 1).layout == model.layout
