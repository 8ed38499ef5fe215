"""Our latent attention against transformers' DeepSeek-V2 and V3, on the same random weights."""

import pytest
import torch

from lecture_util.kv_reduction.deepseek import deepseek_config, halves, load_deepseek
from lecture_util.kv_reduction.latent_cache import DEEPSEEK_V2
from lecture_util.kv_reduction.mla import set_mode
from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.config import UnsupportedModel
from lecture_util.model.generate import generate
from lecture_util.model.kv_cache import NoCache

SIZES = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 11,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 5,
    "v_head_dim": 7,
    "q_lora_rank": 13,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PLAIN = {"q_lora_rank": None}
HALVES = {"rope_interleave": False}
KINDS = [("V2", {}), ("V2", PLAIN), ("V3", {}), ("V3", PLAIN), ("V3", HALVES)]


def peer_of(version, **changes):
    import transformers

    config = getattr(transformers, f"Deepseek{version}Config")(**SIZES | changes)
    config._attn_implementation = "sdpa"  # the eager one takes its softmax in fp32
    peer = getattr(transformers, f"Deepseek{version}ForCausalLM")(config).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(0, 0.3, generator=generator)
    hf = config.to_dict() | {"architectures": [f"Deepseek{version}ForCausalLM"]}
    return peer.requires_grad_(False), hf


def both(version, **changes):
    peer, hf = peer_of(version, **changes)
    return peer, load_deepseek(hf, peer.state_dict())


def draw(*shape, seed=0):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got, expected):
    """Both go through fp32 in norms and rotations, in different places."""
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["naive", "absorbed"])
@pytest.mark.parametrize(("version", "changes"), KINDS)
def test_attention_matches_transformers(version, changes, mode):
    peer, ours = both(version, **changes)
    set_mode(ours, mode)
    B, T = 2, 9
    generator = torch.Generator().manual_seed(1)
    x_BTD = torch.randn(B, T, 36, dtype=torch.float64, generator=generator)
    positions_BT = torch.arange(T).expand(B, T)
    mask_BTS = torch.ones(T, T).tril().bool().expand(B, 1, T, T)
    theirs, _ = peer.model.layers[1].self_attn(
        hidden_states=x_BTD,
        position_embeddings=peer.model.rotary_emb(x_BTD, positions_BT),
        attention_mask=mask_BTS,
    )
    seen = {}
    ours.blocks[1].register_forward_pre_hook(lambda _, args: seen.update(rope=args[1]))
    ours(draw(B, T))
    got = ours.blocks[1].attention(x_BTD, seen["rope"], NoCache())
    assert_close(got, theirs)


@pytest.mark.parametrize(("version", "changes"), [*KINDS, ("V3", {"tie_word_embeddings": True})])
def test_logits_of_a_whole_dense_model_match_transformers(version, changes):
    peer, ours = both(version, **changes)
    tokens_BT = draw(2, 17)
    assert_close(ours(tokens_BT), peer(tokens_BT).logits)
    assert (ours.head.weight is ours.embed.weight) == ("tie_word_embeddings" in changes)


def test_a_cached_absorbed_decode_matches_transformers_without_a_cache():
    peer, ours = both("V3")
    shape, tokens_BT = ours.blocks[0].shape, draw(2, 12)
    cache = shape.new_cache(ours.config, 2, 12, torch.float64)
    set_mode(ours, "absorbed")
    got = torch.cat([ours(chunk, cache) for chunk in tokens_BT.split([5, 1, 1, 3, 2], 1)], 1)
    assert_close(got, peer(tokens_BT).logits)


def test_generation_matches_transformers():
    peer, ours = both("V2")
    prompt = [5, 17, 3, 3, 40]
    theirs = peer.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
    got = generate(ours, [prompt], 9, new_cache=ours.blocks[0].shape.new_cache)
    assert got[0] == theirs[0, 5:].tolist()


def test_rotary_pairs_of_neighbours_and_of_halves_differ():
    """optimum-intel#1877: the same weights read in the other layout give other logits."""
    peer, hf = peer_of("V3")
    tokens_BT = draw(1, 8)
    wrong = load_deepseek(hf | HALVES, peer.state_dict())
    assert not torch.allclose(wrong(tokens_BT), peer(tokens_BT).logits, rtol=1e-2)


def test_rows_move_from_neighbours_to_halves():
    weight = torch.arange(8.0)[:, None]
    assert halves(weight, 6).flatten().tolist() == [0, 1, 2, 4, 6, 3, 5, 7]


def yarn(mscale, mscale_all_dim):
    return {"type": "yarn", "factor": 40, "mscale": mscale, "mscale_all_dim": mscale_all_dim}


@pytest.mark.parametrize("mscales", [(0.707, 0.707), (1.0, 0.707)])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_rope_is_refused(mscales, key):
    """imp#880, Megatron-LM#1429: which mscale goes where is easily got wrong; so is leaving it."""
    _, hf = peer_of("V2")
    scaled = {k: v for k, v in hf.items() if k != "rope_parameters"} | {key: yarn(*mscales)}
    with pytest.raises(UnsupportedModel, match=r"RoPE scaling 'yarn' .*softmax scale"):
        deepseek_config(scaled)


def test_without_scaled_rope_transformers_scale_is_ours():
    """No mscale: the factor is 1."""
    for version, changes in KINDS:
        peer, ours = both(version, **changes)
        assert peer.model.layers[0].self_attn.scaling == pytest.approx(ours.blocks[0].shape.scale)
        assert ours.blocks[0].shape.scale == pytest.approx((5 + 6) ** -0.5)


def test_published_widths_are_read_from_a_config():
    _, hf = peer_of("V2")
    published = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
    }
    _, shape = deepseek_config(hf | published)
    assert shape == DEEPSEEK_V2


def test_what_we_cannot_honour_is_refused():
    peer, hf = peer_of("V3")
    for change, message in [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture 'LlamaForCausalLM': expected Deep"),
        ({"first_k_dense_replace": 1}, "layers 1 to 2 are mixtures of experts"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 for 3 heads"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ]:
        with pytest.raises(UnsupportedModel, match=message):
            deepseek_config(hf | change)
    with pytest.raises(UnsupportedModel, match="lacks 'v_head_dim'"):
        deepseek_config({key: value for key, value in hf.items() if key != "v_head_dim"})
    state = peer.state_dict()
    with pytest.raises(WeightsError, match=r"lack model\.norm\.weight"):
        load_deepseek(hf, {k: v for k, v in state.items() if k != "model.norm.weight"})
    with pytest.raises(WeightsError, match="also hold stray: not named by this config"):
        load_deepseek(hf, state | {"stray": torch.zeros(1)})
    with pytest.raises(
        WeightsError, match=r"kv_b_proj.weight has shape \(36, 11\) but .*\(36, 9\)"
    ):
        load_deepseek(
            hf | {"kv_lora_rank": 9},
            {
                k: v[: 9 + 6 if "kv_a_proj" in k else 9] if "kv_a" in k else v
                for k, v in state.items()
            },
        )
