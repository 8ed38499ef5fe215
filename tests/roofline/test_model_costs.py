"""Parameters, cache bytes and forward FLOPs against transformers' own modules."""

import inspect

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config

from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import (
    forward,
    forward_flops,
    kv_bytes_per_token,
    kv_cache_bytes,
    num_params,
    params_by_part,
    weight_bytes,
    weight_bytes_read,
)

# numbers.md, section 5: parameters as printed, KV bytes a token in 16 bits.
TABLE = {
    "llama-2-7b": ("6.738B", 524_288),
    "llama-2-13b": ("13.016B", 819_200),
    "llama-2-70b": ("68.977B", 327_680),
    "llama-3-8b": ("8.030B", 131_072),
    "llama-3-70b": ("70.554B", 327_680),
    "mistral-7b": ("7.242B", 131_072),
    "smollm2-135m": ("134.5M", 23_040),
    "smollm2-360m": ("361.8M", 40_960),
    "smollm2-1.7b": ("1.711B", 196_608),
    "qwen2.5-0.5b": ("494.0M", 12_288),
}


def transformers_model(config: Config, device: str):
    kind = Qwen2Config if config.qkv_bias else LlamaConfig
    hf = kind(
        hidden_size=config.D,
        intermediate_size=config.F,
        num_attention_heads=config.N,
        num_key_value_heads=config.K,
        head_dim=config.H,
        num_hidden_layers=config.L,
        vocab_size=config.V,
        tie_word_embeddings=config.tied,
        attn_implementation="eager",
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(hf).eval()


def test_the_table_covers_every_published_shape():
    assert TABLE.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", sorted(TABLE))
def test_published_parameters_and_cache(name):
    printed, kv_bytes = TABLE[name]
    params = num_params(PUBLISHED[name])
    assert printed == (f"{params / 1e9:.3f}B" if params > 1e9 else f"{params / 1e6:.1f}M")
    assert kv_bytes_per_token(PUBLISHED[name]) == kv_bytes


@pytest.mark.parametrize("name", sorted(TABLE))
def test_parameters_equal_the_transformers_model(name):
    config = PUBLISHED[name]
    model = transformers_model(config, "meta")
    counted = dict.fromkeys(params_by_part(config), 0)
    for weight_name, weight in model.named_parameters():
        part = next(
            part
            for part, marks in {
                "embedding": ("embed_tokens",),
                "attention": ("self_attn",),
                "mlp": (".mlp.",),
                "norms": ("norm",),
                "head": ("lm_head",),
            }.items()
            if any(mark in weight_name for mark in marks)
        )
        counted[part] += weight.numel()
    assert counted == params_by_part(config)
    assert sum(counted.values()) == num_params(config)
    blocks = num_params(config, norms=False, embedding=False)
    assert blocks == counted["attention"] + counted["mlp"]


TINY = Config(D=48, F=80, K=2, G=3, H=16, L=3, V=101)
TINY_QWEN = Config(D=48, F=80, K=2, G=3, H=16, L=3, V=101, tied=True, qkv_bias=True)


@pytest.mark.parametrize("config", [TINY, TINY_QWEN], ids=["llama", "qwen2"])
@pytest.mark.parametrize(("past", "new"), [(0, 7), (7, 1), (7, 5)])
@pytest.mark.parametrize("logits_for", [None, 1])
def test_forward_matches_counter_and_cache_tensors(config, past, new, logits_for):
    torch.manual_seed(0)
    model, cache = transformers_model(config, "cpu"), DynamicCache()
    newer = "cache" in inspect.signature(model.forward).parameters
    held = {"cache" if newer else "past_key_values": cache}  # as it was called until 5.17 or later
    tokens_BS = torch.randint(config.V, (2, past + new))
    with torch.no_grad():
        if past:
            model(tokens_BS[:, :past], **held)
        with FlopCounterMode(display=False) as counter:
            model(tokens_BS[:, past:], **held, logits_to_keep=logits_for or 0)
    flops = forward_flops(config, 2, new, past + new, logits_for=logits_for)
    # Older transformers (seen: 5.17) make RoPE's angles by a matrix product, H/2 by `new`.
    assert counter.get_total_flops() - flops in (0, config.H * new)

    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_cache_bytes(config, 2, past + new, dtype_bytes=4) == cached
    weights = sum(weight.nbytes for weight in model.parameters())
    assert weight_bytes(config, 4) == weights
    cost = forward(config, 2, new, past + new, logits_for=logits_for, dtype_bytes=4)
    assert cost.flops == flops
    assert cost.bytes_read == weight_bytes_read(config, 2 * new, 4) + cached
    assert cost.bytes_written == cached * new // (past + new)


@pytest.mark.parametrize("tokens", [1, 30, 101, 500])
def test_a_pass_reads_a_row_a_token_of_an_untied_embedding(tokens):
    """At most the whole table: rows beyond V would be repeats."""
    model = transformers_model(TINY, "meta")
    rest = sum(w.nbytes for name, w in model.named_parameters() if "embed_tokens" not in name)
    looked_up = 4 * TINY.D * min(tokens, TINY.V)
    assert weight_bytes_read(TINY, tokens, 4) == rest + looked_up
