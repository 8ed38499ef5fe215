import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import TINY, tiny_model

from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.kv_cache import CacheFull, KVCache
from lecture_util.model.shapes import ShapeError, TensorMismatch
from lecture_util.model.transformer import Transformer

MODEL = tiny_model(dtype=torch.float64)


def new_cache(B=1, capacity=32):
    return KVCache(TINY, B, capacity, dtype=torch.float64)


def draw(*shape, seed=0):
    return torch.randint(TINY.V, shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5), B=st.integers(1, 3))
def test_incremental_decode_matches_full_forward(cuts, B):
    tokens_BT = draw(B, sum(cuts))
    cache = new_cache(B)
    got = torch.cat([MODEL(chunk, cache) for chunk in tokens_BT.split(cuts, 1)], 1)
    torch.testing.assert_close(got, MODEL(tokens_BT))


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4), T=st.integers(1, 4))
def test_rows_of_unequal_length_match_rows_alone(lengths, T):
    prompts, nexts = draw(len(lengths), max(lengths)), draw(len(lengths), T, seed=1)
    cache = new_cache(len(lengths))
    MODEL(prompts, cache)
    cache.truncate(lengths)
    got = MODEL(nexts, cache)
    for row, length in enumerate(lengths):
        alone = torch.cat([prompts[row, :length], nexts[row]])[None]
        torch.testing.assert_close(got[row], MODEL(alone)[0, length:])


@pytest.mark.parametrize("keep", [0, 1, 5, 8])
def test_logits_after_rollback_match_a_fresh_forward(keep):
    """aprender#2014: rolling back must keep the prefix, and drop all else."""
    tokens, other = draw(1, 8), draw(1, 4, seed=2)
    cache = new_cache()
    MODEL(tokens, cache)
    cache.truncate(keep)
    got = MODEL(other, cache)
    torch.testing.assert_close(got, MODEL(torch.cat([tokens[:, :keep], other], 1))[:, keep:])


def test_the_first_decoded_token_stands_at_the_prompt_length():
    """nano-vllm#67 and tiny-llm#46: positions 6, 7, 8 after a prompt of six, each once."""
    cache = new_cache()
    MODEL(draw(1, 6), cache)
    seen = []
    for _ in range(3):
        seen.append(cache.positions(torch.Size((1, 1)), torch.device("cpu")).item())
        MODEL(draw(1, 1), cache)
    assert seen == [6, 7, 8]


def test_an_all_zero_key_is_still_a_key():
    """transformers' StaticLayer once counted non-zero rows to find its length."""
    cache = KVCache(TINY, 1, 4)
    q = torch.ones(1, 2, TINY.N, TINY.H)
    zero, one = torch.zeros(1, 2, TINY.K, TINY.H), torch.ones(1, 2, TINY.K, TINY.H)
    out = cache.attend(0, q, zero, one)
    cache.extend(2)
    assert cache.lengths == [2]
    torch.testing.assert_close(out, torch.ones_like(out))


def test_a_failed_step_leaves_the_lengths_as_they_were():
    cache = new_cache(capacity=8)
    MODEL(draw(1, 6), cache)
    before = cache.k_LBSKH.clone()
    with pytest.raises(CacheFull, match="3 new tokens after 6 need 9 slots but the cache has 8"):
        MODEL(draw(1, 3), cache)
    assert cache.lengths == [6] and torch.equal(cache.k_LBSKH, before)


@pytest.mark.parametrize("S", [1, 7, 32])
def test_bytes_held_match_the_formula(S):
    cache = KVCache(TINY, 3, S, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 2 * TINY.L * 3 * S * TINY.K * TINY.H


def test_bad_input_is_named():
    cache = new_cache(B=2)
    with pytest.raises(ShapeError, match="B=3 rows but the cache has 2"):
        MODEL(draw(3, 1), cache)
    with pytest.raises(TensorMismatch, match=r"keys are torch.float64 .* cache is torch.float32"):
        MODEL(draw(2, 1), KVCache(TINY, 2, 4))
    with pytest.raises(ShapeError, match=r"\(K, H\)=\(2, 8\) but the cache has \(1, 8\)"):
        MODEL(draw(2, 1), KVCache(TINY.with_kv_heads(1), 2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="length 1 in row 0, which holds 0"):
        cache.truncate(1)
    with pytest.raises(ValueError, match="got 3 lengths for 2 rows"):
        cache.truncate([0, 0, 0])
    with pytest.raises(TypeError):
        cache.truncate(1.5)
    for B in (0, 1.5, None):
        with pytest.raises(ValueError, match="both must be whole and at least 1"):
            KVCache(TINY, B, 4)
    with pytest.raises(ShapeError, match="T=65 tokens, but the context is 64"):
        MODEL(draw(1, 65))
    with pytest.raises(ShapeError, match="expected whole numbers of shape"):
        MODEL(torch.zeros(1, 2))
    with pytest.raises(ShapeError, match="expected whole numbers of shape"):
        MODEL(torch.tensor([1, 2]))
    with pytest.raises(TensorMismatch, match="tokens_BT is on meta but the model is on cpu"):
        MODEL(draw(1, 2).to("meta"))


def test_another_kind_of_layer_and_cache_comes_in_from_outside():
    """A layer that only adds the mean of its past, and the cache that lets it."""
    from torch import nn

    class Mean(nn.Module):
        def __init__(self, config, layer):
            super().__init__()
            self.layer, self.heads = layer, (config.N, config.H)

        def forward(self, x_BTD, rope, cache):
            assert rope[0].shape[-1] == 2  # rope_width 4: two pairs
            q_BTNH = torch.zeros(*x_BTD.shape[:2], *self.heads, dtype=x_BTD.dtype)
            k_BTKH = q_BTNH[:, :, :2]
            v_BTKH = x_BTD[..., :16].unflatten(-1, (2, 8))
            return x_BTD + cache.attend(self.layer, q_BTNH, k_BTKH, v_BTKH).flatten(-2)

    made = []

    def new_cache(*arguments):
        made.append(KVCache(*arguments))
        return made[-1]

    model = Transformer.random(TINY, dtype=torch.float64, block=Mean, rope_width=4)
    prompts = [[5, 3, 9, 1], [7, 2]]
    out = generate(model, prompts, 6, new_cache=new_cache)
    assert out == [generate_naive(model, prompt, 6) for prompt in prompts]
    assert made[0].lengths == [9, 7]  # the last token was never fed


@pytest.mark.parametrize("lengths", [8.0, "7", None, [8.5]])
def test_truncating_to_no_number_names_what_came(lengths):
    with pytest.raises(TypeError, match="truncate"):
        new_cache().truncate(lengths)
