"""Our Transformer on the real weights against transformers on the same."""

import time

import pytest
import torch

from lecture_util.model.generate import generate, generate_naive, prefill
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.tokenizer import chat
from lecture_util.model.weights import load

TOLERANCE = 1e-4


@pytest.mark.parametrize("T", [1, 7, 64, 500])
@torch.inference_mode()
def test_logits_match_transformers(model, peer, text_tokens, T):
    tokens_BT = torch.tensor([text_tokens[:T]])
    torch.testing.assert_close(model(tokens_BT), peer(tokens_BT).logits, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_logits_of_an_unequal_batch_match_transformers(model, peer, text_tokens):
    prompts = [text_tokens[:3], text_tokens[50:91], text_tokens[200:211]]
    _, logits_BV = prefill(model, prompts, capacity=64)
    T = max(map(len, prompts))
    left = torch.tensor([[0] * (T - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (T - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    want = peer(left, attention_mask=mask, position_ids=positions).logits[:, -1]
    torch.testing.assert_close(logits_BV, want, atol=TOLERANCE, rtol=0)


def test_64_greedy_tokens_match_transformers(model, peer, tokenizer):
    prompt = chat(tokenizer, "Explain in a few sentences why the sky is blue.")
    ours = generate(model, [prompt], 64)[0]
    ids = torch.tensor([prompt])
    theirs = peer.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )[0, len(prompt) :]  # fmt: skip
    assert ours == theirs.tolist()


@pytest.mark.parametrize("split", [[64], [1, 63], [63, 1], [1, 3, 60], [20, 20, 24], [31, 33]])
@torch.inference_mode()
def test_any_split_through_the_cache_gives_the_same_logits(model, text_tokens, split):
    tokens_BT = torch.tensor([text_tokens[:64]])
    cache = KVCache(model.config, B=1, capacity=64)
    parts = [model(chunk, cache) for chunk in tokens_BT.split(split, dim=1)]
    torch.testing.assert_close(
        torch.cat(parts, dim=1), model(tokens_BT), atol=5 * TOLERANCE, rtol=0
    )


def test_naive_cached_and_batched_generation_agree(model, tokenizer):
    questions = ["Hi", "Name the capital of France.", "Count from one to ten, in words, please."]
    prompts = [chat(tokenizer, question) for question in questions]
    alone = [generate(model, [prompt], 24, eos=[2])[0] for prompt in prompts]
    assert generate(model, prompts, 24, eos=[2]) == alone
    assert [generate_naive(model, prompt, 24, eos=[2]) for prompt in prompts] == alone


def test_the_model_makes_sense(model, tokenizer):
    answer = generate(model, [chat(tokenizer, "What is the capital of France?")], 24, eos=[2])[0]
    assert "Paris" in tokenizer.decode(answer)


def test_a_warm_load_is_quick(model):
    """The budget is 2 s on two cores (see benchmarks); ten times that only catches reconversion."""
    start = time.perf_counter()
    load("smollm2-135m", device="cpu")
    assert time.perf_counter() - start < 20
