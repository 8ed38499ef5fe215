"""DeepSeek-V2 and V3 weights in our own MLA: those whose layers are dense, without YaRN.

Their rotary pairs are neighbours, (0, 1), (2, 3), ...; ours are halves, i and i + R/2. A score is
a sum over dimensions, so moving the rows of both projections alike changes nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.config import Config, UnsupportedModel
from lecture_util.model.transformer import Transformer

from .latent_cache import MLA
from .mla import mla_layers

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def deepseek_config(hf: dict) -> tuple[Config, MLA]:
    """Read a DeepSeek `config.json`: the Transformer's shape, and its attention's.

    Raises: UnsupportedModel for experts, biases, and any scaled RoPE. YaRN would change the softmax
            scale too (by the square of a factor from mscale_all_dim) and the rotary table (by the
            ratio of the factors from mscale and mscale_all_dim); left out, logits would be wrong.
    """
    names = hf.get("architectures") or ["missing"]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {names[0]!r}: expected {' or '.join(ARCHITECTURES)}")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise UnsupportedModel(
            f"RoPE scaling {kind!r} is not supported with MLA, only 'default': "
            "its mscale would change the softmax scale and the rotary table as well"
        )
    config = Config.from_hf(
        hf | {"architectures": ["LlamaForCausalLM"], "head_dim": hf.get("qk_rope_head_dim")}
    )
    if config.G != 1:
        raise UnsupportedModel(
            f"num_key_value_heads={config.K} for {config.N} heads: in MLA each head expands its own"
        )
    if (dense := hf.get("first_k_dense_replace") or 0) < config.L:
        raise UnsupportedModel(
            f"layers {dense} to {config.L - 1} are mixtures of experts: only dense ones can be read"
        )
    try:
        shape = MLA(
            C=hf["kv_lora_rank"],
            R=hf["qk_rope_head_dim"],
            nope=hf["qk_nope_head_dim"],
            v=hf["v_head_dim"],
            q_rank=hf.get("q_lora_rank"),
        )
    except KeyError as error:
        raise UnsupportedModel(f"config.json lacks {error}: is it a DeepSeek model's?") from error
    return config, shape


def load_deepseek(hf: dict, state: Mapping[str, Tensor], mode: str = "auto") -> Transformer:
    """A DeepSeek `config.json` and its tensors by name, as our Transformer in their dtype.

    Raises: UnsupportedModel as above; WeightsError for a tensor that is missing, unknown or of
            the wrong shape.
    """
    config, shape = deepseek_config(hf)
    with torch.device("meta"):
        model = Transformer(config, **mla_layers(shape, mode))
    waiting = dict(state)
    if config.tied:
        waiting.pop("lm_head.weight", None)
    ours = {}
    for name, theirs in _names(config, shape).items():
        if missing := [part for part in theirs if part not in waiting]:
            raise WeightsError(f"the weights lack {', '.join(missing)}: is the checkpoint whole?")
        parts = [waiting.pop(part) for part in theirs]
        if len({part.shape for part in parts}) > 1 or not parts[0].is_floating_point():
            kinds = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
            raise WeightsError(f"{' + '.join(theirs)}: {kinds}, expected floats of one shape")
        tensor = torch.cat(parts)
        expected = model.get_parameter(name).shape
        if tensor.shape != expected:
            raise WeightsError(
                f"{' + '.join(theirs)} has shape {tuple(tensor.shape)} but the config implies "
                f"{tuple(expected)}: weights and config belong to different models"
            )
        if hf.get("rope_interleave", True):
            if name.endswith(".query.weight"):
                heads = tensor.unflatten(0, (config.N, -1))
                tensor = halves(heads, shape.R).flatten(0, 1)
            elif name.endswith(".compress.weight"):
                tensor = halves(tensor, shape.R)
        ours[name] = tensor
    if waiting:
        raise WeightsError(f"the weights also hold {', '.join(waiting)}: not named by this config")
    if len(dtypes := {str(tensor.dtype) for tensor in ours.values()}) > 1:
        raise WeightsError(f"the weights mix {', '.join(sorted(dtypes))}: cast them to one dtype")
    if config.tied:
        ours["head.weight"] = ours["embed.weight"]
    model.load_state_dict(ours, assign=True)
    if config.tied:
        model.head.weight = model.embed.weight
    return model.eval().requires_grad_(False)


def halves(weight: Tensor, R: int) -> Tensor:
    """Move the last R rows from pairs of neighbours to pairs of halves: evens, then odds.

    Shapes: weight (..., rows, D) -> the same.
    """
    kept, turned = weight[..., :-R, :], weight[..., -R:, :]
    return torch.cat((kept, turned[..., 0::2, :], turned[..., 1::2, :]), dim=-2)


def _names(config: Config, shape: MLA) -> dict[str, list[str]]:
    """Each of our parameters and the tensors it is stacked from."""
    names = {"embed.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tied:
        names["head.weight"] = ["lm_head.weight"]
    parts = {
        "norm_attention": ["input_layernorm"],
        "query": ["self_attn.q_proj"],
        "compress": ["self_attn.kv_a_proj_with_mqa"],
        "norm_latent": ["self_attn.kv_a_layernorm"],
        "expand": ["self_attn.kv_b_proj"],
        "out": ["self_attn.o_proj"],
        "norm_mlp": ["post_attention_layernorm"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    if shape.q_rank is not None:
        parts |= {
            "query_down": ["self_attn.q_a_proj"],
            "norm_query": ["self_attn.q_a_layernorm"],
            "query": ["self_attn.q_b_proj"],
        }
    for layer in range(config.L):
        for ours, theirs in parts.items():
            stacked = [f"model.layers.{layer}.{part}.weight" for part in theirs]
            names[f"blocks.{layer}.{ours}.weight"] = stacked
    return names
