"""Fewer KV heads: MHA, GQA and MQA are one model at K = N, in between, and K = 1.

Every attention of the course takes any K and G; this module turns a checkpoint with many KV heads
into one with few, which is where uptraining starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lecture_util.model.config import Config
from lecture_util.model.transformer import Block, Transformer

from .cla import LayoutTransformer


def pool_kv_heads(model: Transformer, K: int) -> Transformer:
    """A new model of K KV heads, each the mean of a group of neighbouring ones; `model` is kept.

    Query heads stay: those that read a head of the group read its mean. Averaging is in fp32 (or
    wider, if the weights are), cast once. Until it is trained on, the model is worse.

    Raises: ValueError if K does not divide the model's K; TypeError for layers that are not `Block`
            (of a shared or latent cache).
    Source: Ainslie et al. 2023, arXiv:2305.13245, section 2.1.
    """
    config = model.config
    if type(K) is not int or K < 1 or config.K % K:
        choices = [k for k in range(1, config.K + 1) if config.K % k == 0]
        raise ValueError(f"K={K!r} does not divide the model's K={config.K}: choose of {choices}")
    for layer, block in enumerate(model.blocks):
        if type(block) is not Block:
            raise TypeError(
                f"layer {layer} is a {type(block).__name__}: pool a model of plain Block layers, "
                "then change its layout"
            )
    with torch.device("meta"):
        if isinstance(model, LayoutTransformer):  # its windows stay
            pooled = LayoutTransformer(config.with_kv_heads(K), model.layout)
        else:
            pooled = Transformer(config.with_kv_heads(K))
    weights = {
        name: pool_rows(config, weight, K) if ".qkv." in name else weight.clone()
        for name, weight in model.state_dict().items()
    }
    pooled.load_state_dict(weights, assign=True)
    if config.tied:
        pooled.head.weight = pooled.embed.weight
    return pooled.eval().requires_grad_(False)


def pool_rows(config: Config, qkv: Tensor, K: int) -> Tensor:
    """Of a stacked projection, weight or bias: keep the query rows, average key and value heads."""
    N, H, group = config.N, config.H, config.K // K
    queries, keys_and_values = qkv.split((N * H, 2 * config.K * H))  # @inspect keys_and_values
    heads = keys_and_values.unflatten(0, (2 * K, group, H))  # @inspect heads
    wide = torch.promote_types(qkv.dtype, torch.float32)
    return torch.cat((queries, heads.mean(1, dtype=wide).to(qkv.dtype).flatten(0, 1)))
