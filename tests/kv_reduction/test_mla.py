"""Latent attention: two modes and one cache that must all give the same numbers; what they cost."""

import math

import pytest
import sympy
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lecture_util.kv_reduction.latent_cache import DEEPSEEK_V2, MLA, LatentCache
from lecture_util.kv_reduction.mla import (
    MLABlock,
    attend_scaled,
    mla,
    mla_layers,
    set_mode,
)
from lecture_util.kv_reduction.mla_cost import mla_cost, mla_decode_cost
from lecture_util.model.attention import causal_mask, rope_frequencies, rope_table
from lecture_util.model.config import Config
from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.kv_cache import CacheFull, KVCache, NoCache
from lecture_util.model.recall import recall_task
from lecture_util.model.shapes import ShapeError, TensorMismatch
from lecture_util.model.train import train
from lecture_util.model.transformer import Transformer
from lecture_util.roofline import ACCELERATORS, attention, kv_bytes_per_token, symbols

CONFIG = Config(D=30, F=44, K=1, G=3, H=10, L=3, V=53, max_context=64)  # three heads
SHAPE = MLA(C=11, R=6, nope=5, v=7)  # odd and prime, no two alike
SQUEEZED = MLA(C=13, R=2, nope=1, v=3, q_rank=9)
SHAPES = [SHAPE, SQUEEZED]
MODES = ["naive", "absorbed"]


def lively(shape, **options):
    """Weights large enough for attention to be far from uniform, norms that are not 1."""
    model = Transformer.random(CONFIG, seed=1, dtype=torch.float64, **mla_layers(shape, **options))
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5, generator=generator)
        else:
            weight.mul_(15)
    return model


MODELS = {shape: lively(shape) for shape in SHAPES}


def draw(*shape, seed=0):
    return torch.randint(CONFIG.V, shape, generator=torch.Generator().manual_seed(seed))


def new_cache(shape, B=1, capacity=32):
    return shape.new_cache(CONFIG, B, capacity, torch.float64)


def run(model, mode, tokens_BT, cache=None):
    set_mode(model, mode)
    return model(tokens_BT, cache)


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.fixture(autouse=True, scope="module")
def norms_and_rotations_in_fp64():
    """They go through fp32 in the model, where a last bit may turn and hide what we look for."""
    to_fp32 = torch.Tensor.float
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_fp32(x)
        )
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 1), (2, 13)])
def test_absorbed_matches_naive(shape, B, T):
    tokens_BT = draw(B, T)
    naive, absorbed = (run(MODELS[shape], mode, tokens_BT) for mode in MODES)
    assert naive.std() > 0.1
    assert_same(absorbed, naive)


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    B=st.integers(1, 3),
    shape=st.sampled_from(SHAPES),
    mode=st.sampled_from([*MODES, "auto"]),
)
def test_any_split_of_the_prompt_matches_the_full_forward(cuts, B, shape, mode):
    tokens_BT, cache, model = draw(B, sum(cuts)), new_cache(shape, B), MODELS[shape]
    got = torch.cat([run(model, mode, chunk, cache) for chunk in tokens_BT.split(cuts, 1)], 1)
    assert cache.lengths == [sum(cuts)] * B
    assert_same(got, run(model, "naive", tokens_BT))


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), min_size=2, max_size=4), shape=st.sampled_from(SHAPES))
def test_modes_match_over_one_cache(cuts, shape):
    """The same cached latents, attended to in both ways at every step."""
    tokens_BT = draw(2, sum(cuts), seed=3)
    caches = [new_cache(shape, 2) for _ in MODES]
    for chunk in tokens_BT.split(cuts, 1):
        naive, absorbed = (
            run(MODELS[shape], mode, chunk, cache)
            for mode, cache in zip(MODES, caches, strict=True)
        )
        assert_same(absorbed, naive)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    T=st.integers(1, 4),
    mode=st.sampled_from(MODES),
)
def test_rows_of_unequal_length_match_rows_alone(lengths, T, mode):
    prompts, nexts = draw(len(lengths), max(lengths)), draw(len(lengths), T, seed=1)
    cache = new_cache(SHAPE, len(lengths))
    run(MODELS[SHAPE], mode, prompts, cache)
    cache.truncate(lengths)
    got = run(MODELS[SHAPE], mode, nexts, cache)
    for row, length in enumerate(lengths):
        alone = torch.cat([prompts[row, :length], nexts[row]])[None]
        assert_same(got[row], run(MODELS[SHAPE], "naive", alone)[0, length:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [0, 1, 5, 8])
def test_logits_after_rollback_match_a_fresh_forward(keep, mode):
    tokens, other, cache = draw(1, 8), draw(1, 4, seed=2), new_cache(SHAPE)
    run(MODELS[SHAPE], mode, tokens, cache)
    cache.truncate(keep)
    got = run(MODELS[SHAPE], mode, other, cache)
    fresh = run(MODELS[SHAPE], mode, torch.cat([tokens[:, :keep], other], 1))
    assert_same(got, fresh[:, keep:])


def test_a_layer_matches_its_definition_written_head_by_head():
    """No kernel, no folding: a loop over rows, heads, queries and keys."""
    block, T = MODELS[SHAPE].blocks[1], 5
    generator = torch.Generator().manual_seed(4)
    x_BTD = torch.randn(2, T, CONFIG.D, dtype=torch.float64, generator=generator)
    positions = torch.arange(T).expand(2, T)
    cos, sin = rope_table(rope_frequencies(MODELS[SHAPE].rope_config), positions)

    def turn(x_R, t):
        first, second = x_R.chunk(2)
        c, s = cos[0, t, 0], sin[0, t, 0]
        return torch.cat((first * c - second * s, second * c + first * s))

    J, R, U, C = SHAPE.nope, SHAPE.R, SHAPE.v, SHAPE.C
    expected = torch.zeros(2, T, CONFIG.N * U, dtype=torch.float64)
    for b in range(2):
        down = [block.compress.weight @ x for x in x_BTD[b]]
        latents = [block.norm_latent(d[:C]) for d in down]
        shared = [turn(d[C:], t) for t, d in enumerate(down)]
        for n in range(CONFIG.N):
            query = block.query.weight[n * (J + R) : (n + 1) * (J + R)]
            expand = block.expand.weight[n * (J + U) : (n + 1) * (J + U)]
            for t in range(T):
                q = query @ x_BTD[b, t]
                q = torch.cat((q[:J], turn(q[J:], t)))
                scores = [
                    q @ torch.cat((expand[:J] @ latents[s], shared[s])) / math.sqrt(J + R)
                    for s in range(t + 1)
                ]
                weights = torch.stack(scores).softmax(0)
                mixed = sum(w * (expand[J:] @ c) for w, c in zip(weights, latents, strict=False))
                expected[b, t, n * U : (n + 1) * U] = mixed
    expected = expected @ block.out.weight.T
    for mode in MODES:
        block.mode = mode
        got = block.attention(x_BTD, (cos, sin), NoCache())
        assert_same(got, expected)


def test_the_cache_holds_normed_latents_and_one_rotated_key_for_all_heads():
    model, cache, tokens = MODELS[SHAPE], new_cache(SHAPE), draw(1, 7)
    model(tokens, cache)
    block = model.blocks[0]
    x_BTD = block.norm_attention(model.embed(tokens))
    down_BTX = block.compress(x_BTD)
    c_BTC = cache.c_LBSC[0, :, :7] / block.norm_latent.weight
    torch.testing.assert_close(
        c_BTC.square().mean(-1), torch.ones(1, 7).double(), rtol=1e-3, atol=0
    )
    k_BTR = cache.k_rope_LBSR[0, :, :7]
    raw_BTR = down_BTX[..., SHAPE.C :]
    lengths = k_BTR.norm(dim=-1), raw_BTR.norm(dim=-1)  # rotated, not normed
    torch.testing.assert_close(*lengths, rtol=1e-6, atol=0)  # the rotary table is fp32
    assert_same(k_BTR[:, 0], raw_BTR[:, 0])  # position 0 is not turned at all
    assert not torch.allclose(k_BTR[:, 3], raw_BTR[:, 3])


@pytest.mark.parametrize("S", [1, 7, 32])
def test_bytes_held_match_the_formula(S):
    cache = SHAPE.new_cache(CONFIG, 3, S, torch.bfloat16)
    held = [x for x in vars(cache).values() if isinstance(x, torch.Tensor)]
    formula = 2 * CONFIG.L * 3 * S * (SHAPE.C + SHAPE.R)
    assert cache.nbytes == formula == sum(x.untyped_storage().nbytes() for x in held)


@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("shape", SHAPES)
def test_generation_with_latents_matches_generation_without_a_cache(shape, mode):
    model = lively(shape, mode=mode)
    prompts = [[5, 3, 9, 1], [7, 2], [11]]
    out = generate(model, prompts, 9, new_cache=shape.new_cache)
    assert out == [generate_naive(model, prompt, 9) for prompt in prompts]
    assert len({token for row in out for token in row}) > 3  # not the same token for ever


def test_positions_reach_the_scores_only_through_the_rotated_part():
    """Without it, a permuted past would look the same; with it, it must not."""
    tokens, swapped = draw(1, 6), draw(1, 6)[:, [2, 0, 1, 3, 4, 5]]

    def last(model, tokens):
        return model.blocks[0].attention(
            model.embed(tokens),
            rope_table(rope_frequencies(model.rope_config), torch.arange(6)[None]),
            NoCache(),
        )[:, -1]

    model = lively(SHAPE)
    assert not torch.allclose(last(model, tokens), last(model, swapped))
    model.blocks[0].compress.weight[SHAPE.C :] = 0
    assert_same(last(model, tokens), last(model, swapped))


def test_both_modes_have_the_same_gradients():
    model, tokens = lively(SQUEEZED).requires_grad_(True), draw(2, 9)
    grads = []
    for mode in MODES:
        model.zero_grad()
        nnf.cross_entropy(
            run(model, mode, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        grads.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    assert all(grad.abs().max() > 0 for grad in grads[0].values())
    for name, grad in grads[0].items():
        assert_same(grads[1][name], grad)


def test_it_trains():
    torch.manual_seed(0)
    config = Config(D=32, F=64, K=2, G=1, H=16, L=1, V=16, max_context=64)
    model = mla(config, MLA(C=16, R=8, nope=8, v=16))
    losses = train(model, recall_task(num_pairs=3, V=16, B=16), 40, progress=False)
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]


def test_bad_input_is_named():
    model = MODELS[SHAPE]
    set_mode(model, "auto")
    with pytest.raises(ValueError, match=r"MLA\.R is 5: rotary embeddings pair dimensions"):
        MLA(C=8, R=5, nope=4, v=4)
    for bad in ({"C": 0}, {"v": 2.0}, {"nope": True}, {"q_rank": 0}):
        with pytest.raises(ValueError, match=f"MLA.{next(iter(bad))} is .*at least 1"):
            MLA(**{"C": 8, "R": 2, "nope": 4, "v": 4} | bad)
    with pytest.raises(ShapeError, match="B=3 rows but the cache has 2"):
        model(draw(3, 1), new_cache(SHAPE, 2))
    with pytest.raises(
        TensorMismatch, match=r"latents are torch.float64 .* cache is torch.float32"
    ):
        model(draw(2, 1), SHAPE.new_cache(CONFIG, 2, 4))
    same_sum = MLA(C=13, R=4, nope=5, v=7)
    with pytest.raises(ShapeError, match="cache holds C=13, R=4 but the model has C=11, R=6"):
        model(draw(1, 1), new_cache(same_sum))
    two_layers = Config(D=30, F=44, K=3, G=1, H=10, L=2, V=53)
    with pytest.raises(ShapeError, match=r"layer 2 brings rows of C\+R=17 .* L=2 layers"):
        model(draw(1, 1), SHAPE.new_cache(two_layers, 1, 4, torch.float64))
    with pytest.raises(
        TypeError, match=r"cache is a KVCache: MLA keeps latents, so pass shape\.new"
    ):
        model(draw(1, 1), KVCache(CONFIG, 1, 4, torch.float64))
    with pytest.raises(TypeError, match="holds latents, not keys and values: use KVCache"):
        Transformer.random(CONFIG, dtype=torch.float64)(draw(1, 1), new_cache(SHAPE))
    with pytest.raises(ShapeError, match="table is 10 wide but R=6: make the model with mla"):
        Transformer(CONFIG, block=mla_layers(SHAPE)["block"])(draw(1, 2))
    with pytest.raises(ValueError, match="mode='fast': expected one of auto, naive, absorbed"):
        set_mode(model, "fast")
    with pytest.raises(ValueError, match="mode='fast'"):
        mla(CONFIG, SHAPE, mode="fast")
    with pytest.raises(ValueError, match="qkv_bias is True: MLA's projections have none"):
        mla(Config(D=8, F=8, K=1, G=1, H=8, L=1, V=8, qkv_bias=True), SHAPE)
    for B in (0, 1.5, None):
        with pytest.raises(ValueError, match="both must be whole and at least 1"):
            LatentCache(CONFIG, B, 4, shape=SHAPE)
    with pytest.raises(ValueError, match="T=3 exceeds S=2"):
        mla_cost(1, 2, 3, 4, SHAPE, absorbed=True)
    with pytest.raises(ValueError, match="N is 0: expected a whole number"):
        mla_decode_cost(1, 2, 0, SHAPE)


def test_a_failed_step_leaves_the_cache_as_it_was():
    cache = new_cache(SHAPE, capacity=8)
    MODELS[SHAPE](draw(1, 6), cache)
    before = cache.latent_LBSX.clone()
    with pytest.raises(CacheFull, match="3 new tokens after 6 need 9 slots but the cache has 8"):
        MODELS[SHAPE](draw(1, 3), cache)
    assert cache.lengths == [6] and torch.equal(cache.latent_LBSX, before)


def test_a_pass_that_looks_elsewhere_than_back_is_refused():
    """A subclass of NoCache, as diffusion has, must not silently become causal."""

    class Bidirectional(NoCache):
        pass

    with pytest.raises(TypeError, match="cache is a Bidirectional"):
        MODELS[SHAPE](draw(1, 3), Bidirectional())


# The scale


def test_scores_of_unit_normal_queries_and_keys_have_unit_spread():
    """maxtext#1370: an inverted scale would spread them by 192. DeepSeek's width is 128 + 64."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 400, 192, dtype=torch.float64, generator=generator)
    scores = DEEPSEEK_V2.scale * q @ k.T
    assert scores.std().item() == pytest.approx(1, abs=0.05)


def test_torch_would_take_another_scale_in_the_latent():
    """optimum-intel#1877: left alone, it divides by sqrt(C + R), which fits expanded keys only."""
    generator = torch.Generator().manual_seed(0)
    N, T, C, R, J = 3, 6, SHAPE.C, SHAPE.R, SHAPE.nope
    q_BTNX = torch.randn(2, T, N, C + R, dtype=torch.float64, generator=generator)
    k_BS1X = torch.randn(2, T, 1, C + R, dtype=torch.float64, generator=generator)
    v_BS1C = k_BS1X[..., :C]
    mask_BTS = causal_mask(torch.arange(T).expand(2, T), T)

    def torchs(scale):
        q, k, v = (x.transpose(1, 2) for x in (q_BTNX, k_BS1X, v_BS1C))
        out = nnf.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_BTS[:, None], enable_gqa=True, scale=scale
        )
        return out.transpose(1, 2)

    ours = attend_scaled(q_BTNX, k_BS1X, v_BS1C, SHAPE.scale, mask_BTS)
    assert SHAPE.scale == (J + R) ** -0.5
    assert_same(ours, torchs((J + R) ** -0.5))
    assert not torch.allclose(ours, torchs(None), rtol=1e-2)


# Costs and the numbers of the lecture


B, S, T, N, C, R, J, U = symbols("B S T N C R J U")
FREE = MLA(C, R, J, U)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("B", "T", "S"), [(1, 1, 1), (2, 1, 9), (3, 4, 11), (2, 5, 5)])
def test_flops_match_torchs_counter(mode, B, T, S):
    block = MLABlock(CONFIG, 0, SHAPE).requires_grad_(False)
    q_BTNJ, q_BTNR = torch.randn(B, T, 3, SHAPE.nope), torch.randn(B, T, 3, SHAPE.R)
    latent_BSX = torch.randn(B, S, SHAPE.latent_width)
    mask_BTS = causal_mask(torch.arange(S - T, S).expand(B, T), S)
    with FlopCounterMode(display=False) as counter:
        getattr(block, mode)(q_BTNJ, q_BTNR, latent_BSX, mask_BTS)
    cost = mla_cost(B, S, T, 3, SHAPE, absorbed=mode == "absorbed", dtype_bytes=4)
    assert cost.flops == counter.get_total_flops() > 0
    inputs = [block.expand.weight, q_BTNJ, q_BTNR, latent_BSX]
    expanded = 0 if mode == "absorbed" else 4 * B * S * 3 * (SHAPE.nope + SHAPE.R + SHAPE.v)
    assert cost.bytes_read == sum(x.nbytes for x in inputs) + expanded
    assert cost.bytes_written == 4 * B * T * 3 * SHAPE.v + expanded


def test_absorbed_decode_tends_to_242_flops_a_byte():
    limit = mla_decode_cost(B, S, N, FREE).intensity.limit(S, sympy.oo)
    assert sympy.simplify(limit - N * (2 * C + R) / (C + R)) == 0
    deepseek = float(limit.subs({N: 128, C: 512, R: 64}))
    assert (
        deepseek
        == pytest.approx(2 * 128 * (576 + 512) / (2 * 576))
        == pytest.approx(241.8, abs=0.1)
    )
    # as MQA's would tend to 128: here, too, one KV head serves them all, but its K is its V
    H = symbols("H")[0]
    assert attention(B, S, 1, N, 1, H).intensity.limit(S, sympy.oo) == N
    assert ACCELERATORS["h200"].ridge() < deepseek < ACCELERATORS["h100"].ridge()


def test_naive_decode_is_bound_by_the_keys_it_makes():
    """As many bytes as MHA's cache, and more: that is no way to decode."""
    naive = mla_decode_cost(8, 4096, 128, DEEPSEEK_V2, absorbed=False)
    absorbed = mla_decode_cost(8, 4096, 128, DEEPSEEK_V2)
    mha = attention(8, 4096, 1, 128, 128, 128)
    assert naive.bytes > mha.bytes > 10 * absorbed.bytes
    h100 = ACCELERATORS["h100"]
    assert naive.time_s(h100) > 30 * absorbed.time_s(h100)


def test_expanding_pays_from_171_queries_on():
    def better(T, S):
        costs = {mode: mla_cost(1, S, T, 128, DEEPSEEK_V2, absorbed=mode) for mode in (True, False)}
        return min(costs, key=lambda mode: costs[mode].flops)

    assert [better(T, 10**7) for T in (1, 170, 171, 4096)] == [True, True, False, False]
    gap = (
        mla_cost(B, S, T, N, FREE, absorbed=True).flops
        - mla_cost(B, S, T, N, FREE, absorbed=False).flops
    )
    (even,) = sympy.solve(sympy.limit(gap / S, S, sympy.oo), T)
    assert even.subs({C: 512, R: 64, J: 128, U: 128}) == sympy.Rational(512, 3)  # 170.67
    prefill = [
        mla_cost(1, 4096, 4096, 128, DEEPSEEK_V2, absorbed=mode).flops for mode in (True, False)
    ]
    assert prefill[0] > 2.5 * prefill[1]


def test_auto_takes_the_mode_with_fewer_flops():
    shape = MLA(C=40, R=2, nope=8, v=8)
    block = MLABlock(Config(D=8, F=8, K=2, G=1, H=8, L=1, V=8), 0, shape)
    latent_BSX = torch.zeros(1, 64, shape.latent_width)
    assert [block.mode_for(T, latent_BSX) for T in (1, 64)] == ["absorbed", "naive"]
    block.mode = "absorbed"
    assert block.mode_for(64, latent_BSX) == "absorbed"


def test_deepseek_v2_caches_576_numbers_where_mha_has_32768():
    """Claim 12 of the lecture's errata: keys and values, so 57x. 16,384 leaves out the values."""
    config = Config(D=5120, F=64, K=128, G=1, H=128, L=1, V=2)
    latents = DEEPSEEK_V2.new_cache(config, 1, 1, torch.bfloat16)
    mha = KVCache(config, 1, 1, torch.bfloat16)
    assert (mha.nbytes // 2, latents.nbytes // 2) == (32_768, 576)
    assert round(mha.nbytes / latents.nbytes) == 57


def test_deepseek_v2s_headline_saving_is_not_mla_alone():
    """93.3% compares 6 bits with 16, and with DeepSeek 67B's GQA: 95 layers of 8 KV heads of 128.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, abstract, section 3.2.3, Table 9.
    """
    gqa = kv_bytes_per_token(Config(D=1, F=1, K=8, G=8, H=128, L=95, V=1))
    mla_bytes = 2 * 60 * DEEPSEEK_V2.latent_width
    assert round(gqa / mla_bytes, 1) == 5.6
    assert round(100 * (1 - mla_bytes * 6 / 16 / gqa), 1) == 93.3
    table_9 = {"large MHA": 860.2e3, "large MLA": 34.6e3}  # numbers a token, all layers
    assert table_9["large MLA"] == pytest.approx(60 * DEEPSEEK_V2.latent_width, rel=2e-3)
    assert round(table_9["large MHA"] / 60 / DEEPSEEK_V2.latent_width) == 25
