"""Cut layers, heads, neurons or channels out, and get an ordinary, smaller checkpoint.

Structured pruning removes whole rows and columns, so that what is left is a dense Transformer with
a smaller Config: no mask, no special kernel, and `save_folder` writes what transformers opens.
Every function returns a new model that shares no memory with its source, which is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lecture_util.model.linear import Linear
from lecture_util.model.transformer import Block, Transformer

from .plan import Indices, Plan, index_lists, indices


def prune(model: Transformer, plan: Plan) -> Transformer:
    """A new model of what the plan keeps, copied.

    Raises: ValueError for a plan that can't be carried out (see `Plan.kept`); TypeError for a model
            that no Config describes whole: another kind of layer, quantized weights.
    Source: Muralidharan et al. 2024, arXiv:2407.14679, section 2.
    """
    _check_plain(model)
    config, kept, smaller = model.config, plan.kept(model.config), plan.config(model.config)
    N, K, H, F = config.N, config.K, config.H, config.F
    grow = math.sqrt(config.D / smaller.D) if plan.rescale else 1.0

    def at(rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=model.device)

    channels = at(kept.channels)
    weights = {
        "embed.weight": _take(model.embed.weight, None, channels),
        "norm.weight": _take(model.norm.weight, channels) * grow,
    }
    if not config.tied:
        weights["head.weight"] = _take(model.head.weight, None, channels)
    for new, old in enumerate(kept.layers):
        block, kv, f = model.blocks[old], at(kept.groups[old]), at(kept.neurons[old])
        q = at(kept.heads[old])
        qkv = torch.cat((q, N + kv, N + K + kv))  # rows: N heads of q, K of k, K of v
        qkv_MHD = block.qkv.weight.unflatten(0, (N + 2 * K, H))
        out_DNH = block.out.weight.unflatten(1, (N, H))
        gate_up_2FD = block.gate_up.weight.unflatten(0, (2, F))
        parts = {
            "norm_attention.weight": _take(block.norm_attention.weight, channels) * grow,
            "qkv.weight": _take(qkv_MHD, qkv, None, channels).flatten(0, 1),
            "out.weight": _take(out_DNH, channels, q).flatten(1),
            "norm_mlp.weight": _take(block.norm_mlp.weight, channels) * grow,
            "gate_up.weight": _take(gate_up_2FD, None, f, channels).flatten(0, 1),
            "down.weight": _take(block.down.weight, channels, f),
        }
        if config.qkv_bias:
            parts["qkv.bias"] = _take(block.qkv.bias.unflatten(0, (N + 2 * K, H)), qkv).flatten()
        weights |= {f"blocks.{new}.{name}": weight for name, weight in parts.items()}

    with torch.device("meta"):
        pruned = Transformer(smaller)
    if config.tied:
        weights["head.weight"] = weights["embed.weight"]
    pruned.load_state_dict(weights, assign=True)
    if config.tied:
        pruned.head.weight = pruned.embed.weight
    return pruned.eval().requires_grad_(False)


def keep_layers(model: Transformer, layers: Indices) -> Transformer:
    """A new model of these layers only."""
    return prune(model, Plan(layers=layers))


def drop_layers(model: Transformer, layers: Indices) -> Transformer:
    """A new model without these layers: what they would have added to the residual is missing."""
    dropped = indices("layers", layers, model.config.L, empty=True)
    return keep_layers(model, [i for i in range(model.config.L) if i not in dropped])


def keep_neurons(model: Transformer, keep: Sequence[Indices]) -> Transformer:
    """A new model with these MLP neurons, a list a layer: rows of gate and up, columns of down."""
    return prune(model, Plan(neurons=keep))


def keep_kv_groups(model: Transformer, keep: Sequence[Indices]) -> Transformer:
    """A new model with these KV heads, a list a layer, each with all query heads that read it.

    No KV head goes alone: its query heads would be left to read keys that they never learned to
    read (NVIDIA/Model-Optimizer#690).
    """
    L, K, G = model.config.L, model.config.K, model.config.G
    groups = index_lists("KV heads", keep, L, K)
    heads = [[G * group + g for group in row for g in range(G)] for row in groups]
    return prune(model, Plan(heads=heads))


def keep_query_heads(model: Transformer, keep: Sequence[Indices]) -> Transformer:
    """A new model with these query heads, a list a layer, equally many of every KV head.

    So the KV cache stays as large as it was: K does not change.
    """
    config = model.config
    rows = index_lists("query heads", keep, config.L, config.N)
    for layer, row in enumerate(rows):
        if lost := set(range(config.K)) - {head // config.G for head in row}:
            raise ValueError(
                f"query heads: layer {layer} keeps none of KV head {min(lost)}: to drop a KV head "
                "with its query heads, use keep_kv_groups"
            )
    return prune(model, Plan(heads=rows))


def keep_channels(model: Transformer, keep_D: Indices, rescale: bool = True) -> Transformer:
    """A new model whose residual stream has these channels only, cut in every tensor it touches.

    RMSNorm divides by a mean over D channels, of which n are left. If those dropped were small, the
    sum of squares hardly changes and the mean grows by D/n. `rescale` undoes that, norm weights
    times sqrt(D/n) and eps times D/n: exact where the dropped channels were zero. Without it, as in
    Minitron, the norms take what is left for typical of what was there.
    """
    return prune(model, Plan(channels=keep_D, rescale=rescale))


def _take(weight: Tensor, *keep: Tensor | None) -> Tensor:
    """A copy of `weight` with, of each axis, the indices in keep (None: all)."""
    for axis, rows in enumerate(keep):
        if rows is not None:
            weight = weight.detach().index_select(axis, rows)
    return weight


def _check_plain(model: nn.Module) -> None:
    """Only a model that a Config describes whole can be described by a smaller Config."""
    whole = type(model) is Transformer and len(model.blocks) == model.config.L
    if not whole or model.rope_config != model.config:
        raise TypeError(
            f"the model is a {type(model).__name__} that its config does not describe whole: prune "
            "an ordinary Transformer first, then change it"
        )
    for layer, block in enumerate(model.blocks):
        if type(block) is not Block:
            raise TypeError(
                f"layer {layer} is a {type(block).__name__}: prune a model of plain Block layers "
                "first, then change them"
            )
    for name, module in model.named_modules():
        linear = name.rpartition(".")[2] in ("qkv", "out", "gate_up", "down", "head")
        if linear and type(module) not in (Linear, nn.Linear):
            raise TypeError(
                f"{name} is a {type(module).__name__}, whose weights can't be cut row by row: "
                "prune in floating point first, then quantize"
            )
