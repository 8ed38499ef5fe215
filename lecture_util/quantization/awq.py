"""AWQ: before rounding, enlarge the weights that meet large activations.

Rounding shifts each weight of a group by up to half of one common step, and the layer's output
feels the shift times the activation. Multiply a channel's weights by s and its activation by 1/s:
the product is the same and the shift counts s times less. 1/s costs nothing at run time, since
`fold` puts it once into the operation before. Every weight is rounded; none is kept aside.

    norm_attention -> qkv       up rows of gate_up -> down
    norm_mlp -> gate_up         v rows of qkv -> out, one s for all queries of a KV head

A row of `up` or v divided by s keeps its codes (its groups' steps shrink along), so that no search
spoils another's. `awq_search` holds the searches. Both judge a layer by its own output. The paper
judges qkv and gate_up by their block's; on the reference model that took more than twice as long
and came out no better (int4 in groups of 48, not clipped, perplexity 22.00 against 21.95). Leaving
v -> out unscaled cost as little (22.01), scaling nothing a good deal (25.45; unquantized 19.56).
Source: Lin et al. 2023, arXiv:2306.00978.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lecture_util.model.attention import rope_frequencies, rope_table
from lecture_util.model.kv_cache import NoCache
from lecture_util.model.observe import observe, run
from lecture_util.model.transformer import Block, Transformer

from .awq_search import Search, Seen, clip, search_scale, wide
from .group_linear import GroupLinear
from .int4 import Int4Linear
from .layer import QuantizedLinear
from .linear import is_quantized, linear_layers, replace_linears

LAYERS = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class Folded:
    """A model in floating point, ready to be rounded: scales folded in, groups cut.

    searches: by layer name, such as "blocks.0.down".
    cut:      the share of a layer's weights that clipping moved.
    """

    model: Transformer
    searches: dict[str, Search] = field(default_factory=dict)
    cut: dict[str, float] = field(default_factory=dict)


def activation_means(model: nn.Module, tokens_BT: Tensor, rows: int = 8) -> dict[str, Tensor]:
    """Mean |x| of every channel that the blocks' layers read. -> {"blocks.0.qkv": mean_D, ...}

    Raises: ValueError if tokens_BT is empty.
    """
    names = [f"blocks.{i}.{name}" for i in range(len(model.blocks)) for name in LAYERS]
    sums: dict[str, Tensor] = {}

    def see(name: str, x: Tensor, y: Tensor) -> None:
        sums[name] = sums.get(name, 0) + wide(x).abs().flatten(0, -2).sum(0)

    with observe(model, names, see):
        run(model, tokens_BT, rows)
    return {name: total_D / tokens_BT.numel() for name, total_D in sums.items()}


@torch.no_grad()
def fold(block: Block, name: str, s_D: Tensor) -> None:
    """In place, multiply a layer's columns by s and divide what writes its input by s.

    name: "qkv", "out", "gate_up" or "down". For "out", the G queries of a KV head read one row of
          v each, so s must be alike for them (`shared`).
    Raises: ValueError for another name, or an s that does not fit.
    """
    if name not in LAYERS:
        raise ValueError(f"a block has no layer {name!r}: expected one of {', '.join(LAYERS)}")
    layer, (N, K, _) = getattr(block, name), block.heads
    if s_D.shape != (layer.in_features,) or not (s_D.isfinite() & (s_D > 0)).all():
        raise ValueError(
            f"s_D has shape {tuple(s_D.shape)} and values from {s_D.min().item():.3g}: {name} "
            f"takes {layer.in_features} finite numbers above 0, as channel_scale makes them"
        )
    s_D = s_D.to(layer.weight)
    if name == "qkv":
        block.norm_attention.weight.div_(s_D)
    elif name == "gate_up":
        block.norm_mlp.weight.div_(s_D)
    elif name == "down":
        block.gate_up.weight[len(s_D) :].div_(s_D[:, None])
    else:
        s_KGH = s_D.view(K, N // K, -1)
        if not (s_KGH == s_KGH[:, :1]).all():
            raise ValueError(
                f"s_D differs among the {N // K} queries of a KV head, but one row of v feeds them "
                "all: pass shared(mean_D, K, G) to the search"
            )
        s_V = s_KGH[:, 0].flatten()  # one a row of v
        block.qkv.weight[-len(s_V) :].div_(s_V[:, None])
        if block.qkv.bias is not None:
            block.qkv.bias[-len(s_V) :].div_(s_V)
    layer.weight.mul_(s_D)


def shared(mean_D: Tensor, K: int, G: int) -> Tensor:
    """For `out`: each channel's mean over the G queries that read the same row of v."""
    return mean_D.view(K, G, -1).mean(1, keepdim=True).expand(K, G, -1).flatten()


@torch.no_grad()
def fold_all(model: Transformer, scales: Mapping[str, Tensor]) -> Transformer:
    """A copy of the model with each named layer's s folded in. With 1/s, it is unfolded again.

    scales: {"blocks.0.down": s_D, ...}.
    Unfolding a model that was rounded tells what its weights became in the original's terms, so
    that the two can be compared layer by layer.
    """
    new = _copy(model)
    for name, s_D in scales.items():
        fold(new.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], s_D)
    return new


@torch.no_grad()
def search(
    model: Transformer,
    tokens_BT: Tensor,
    bits: int = 4,
    group_size: int = 48,
    symmetric: bool = False,
    clipped: bool = True,
    rows: int = 8,
) -> Folded:
    """Fold the best scales into a copy of the model, then cut its groups. Nothing is rounded yet.

    tokens_BT: calibration windows, run `rows` at a time; score on others.
    clipped:   q and k are left whole in any case: their errors meet in a product, not a sum.

    Raises: ValueError for an empty calibration set or a model that is quantized already; TypeError
            for blocks of another kind.
    """
    _check(model)
    if type(group_size) is not int or group_size < 1:
        raise ValueError(f"group_size={group_size!r}: expected a whole number, such as 48")
    run(model, tokens_BT[:1])  # bad windows get their error before the work starts
    config = model.config
    found = Folded(_copy(model))
    for i, seen in enumerate(_calibrate(model, tokens_BT, rows)):
        block = found.model.blocks[i]
        for name, layer in ((name, getattr(block, name)) for name in LAYERS):
            mean_D, gram_DD, how = *seen[name], (bits, group_size, symmetric)
            if name == "out":
                mean_D = shared(mean_D, config.K, config.G)
            best = search_scale(layer.weight, Seen(mean_D, gram_DD), *how)
            fold(block, name, best.scale_D)
            found.searches[f"blocks.{i}.{name}"] = best
            if clipped:
                gram_DD = gram_DD / best.scale_D / best.scale_D[:, None]
                start = (config.N + config.K) * config.H if name == "qkv" else 0
                whole_FD = layer.weight[start:].clone()
                layer.weight[start:] = clip(whole_FD, gram_DD, *how)
                moved = (layer.weight[start:] != whole_FD).sum() / layer.weight.numel()
                found.cut[f"blocks.{i}.{name}"] = float(moved)
    return found


def awq(
    model: Transformer,
    tokens_BT: Tensor,
    bits: int = 4,
    group_size: int = 48,
    symmetric: bool = False,
    make: Callable[[nn.Linear], nn.Module] | None = None,
    **options,
) -> Transformer:
    """Search, fold, clip, and round: the model with quantized layers; the head stays as it is.

    make:    what a folded Linear becomes; by default an Int4Linear of these groups if bits is 4,
             otherwise a GroupLinear.
    options: `clipped` and `rows`, as for `search`.
    Raises:  as `search`.
    """

    def rounded(linear: nn.Linear) -> QuantizedLinear:
        kind = Int4Linear if bits == 4 else GroupLinear
        return kind.from_linear(linear, bits=bits, group_size=group_size, symmetric=symmetric)

    _check(model)
    if make is None:  # what can't be made should fail before the search
        rounded(next(iter(linear_layers(model).values()))).dequantized()
    folded = search(model, tokens_BT, bits, group_size, symmetric, **options)
    return replace_linears(folded.model, make or rounded)


def _check(model: Transformer) -> None:
    if any(map(is_quantized, linear_layers(model).values())):
        raise ValueError("the model is quantized already: start from the one that was loaded")
    if not all(isinstance(block, Block) for block in model.blocks):
        raise TypeError("AWQ folds into model.transformer.Block; this model has blocks of its own")


def _copy(model: Transformer) -> Transformer:
    """With blocks of its own; embedding and head are not changed, so they are lent."""
    lent = {
        id(weight): nn.Parameter(weight.detach(), requires_grad=False)  # memory alone is shared:
        for weight in {model.embed.weight, model.head.weight}  # casting the copy casts no other
    }
    return copy.deepcopy(model, lent)


def _calibrate(model: Transformer, tokens_BT: Tensor, rows: int) -> Iterator[dict[str, tuple]]:
    """Block by block, what its layers read: {name: (mean_D, gram_DD)}; one block's at a time."""
    positions_BT = NoCache().positions(tokens_BT.shape, tokens_BT.device)
    rope = rope_table(rope_frequencies(model.rope_config, tokens_BT.device), positions_BT)
    x_BTD, tokens = model.embed(tokens_BT), tokens_BT.numel()
    for block in model.blocks:
        sums: dict[str, tuple[Tensor, Tensor]] = {}

        def see(name: str, x: Tensor, y: Tensor, sums=sums) -> None:
            x_MD = wide(x).flatten(0, -2)
            mean_D, gram_DD = sums.get(name, (0, 0))
            sums[name] = mean_D + x_MD.abs().sum(0) / tokens, gram_DD + x_MD.T @ x_MD / tokens

        with observe(block, LAYERS, see):
            parts = zip(*(tensor.split(rows) for tensor in (x_BTD, *rope)), strict=True)
            x_BTD = torch.cat([block(x, (cos, sin), NoCache()) for x, cos, sin in parts])
        yield sums
