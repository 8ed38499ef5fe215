"""What a calibration set says each layer, head, neuron and channel is worth, forward only.

A few windows of text run through the model, no gradient is taken, and each part is scored by what
flows out of it: nearly nothing, or nearly what flowed in, can go. Scores rank; they are no losses,
and compare within one kind only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.model.observe import observe, run
from lecture_util.model.shapes import ShapeError
from lecture_util.model.text import perplexity
from lecture_util.model.transformer import Block, Transformer

from .plan import indices

MINITRON = ("mean", "l2")  # over the positions of a row, then over the rows


def block_influence(model: Transformer, tokens_BT: Tensor, rows: int = 8) -> Tensor:
    """How far each layer turns the residual stream: 1 - cos(x_in, x_out), mean over tokens.

    Shapes: tokens_BT -> influence_L, from 0 (no turn at all) to 2.
    Source: Men et al. 2024, ShortGPT, arXiv:2403.03853, section 3.
    """

    def turn(name: str, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        return 1 - nnf.cosine_similarity(_wide(x_BTD), _wide(y_BTD), dim=-1)[..., None]

    names = [f"blocks.{layer}" for layer in range(len(model.blocks))]
    return _score(model, tokens_BT, names, turn, ("mean", "mean"), rows)[:, 0]


def perplexity_without(model: Transformer, tokens_BT: Tensor, rows: int = 8) -> list[float]:
    """The perplexity on these windows of the model without layer 0, without layer 1, and so on.

    What block influence guesses at, measured. Cost: a pass over the windows for each layer.
    """
    if len(model.blocks) < 2:
        raise ValueError("the model has one layer: without it there is nothing to measure")
    return [
        perplexity(without(model, [layer]), tokens_BT, rows) for layer in range(len(model.blocks))
    ]


def head_importance(
    model: Transformer,
    tokens_BT: Tensor,
    rows: int = 8,
    aggregate: tuple[str, str] = MINITRON,
    groups: bool = False,
    projected: bool = False,
) -> Tensor:
    """The norm of what each query head hands to the output projection, aggregated.

    groups:    of each KV head instead, the norm over all its query heads together.
    projected: the norm after its slice of the projection instead, so of what the head adds to the
               residual stream; a large output may meet small weights. Not in Minitron.
    Shapes: tokens_BT -> importance_LN, or importance_LK.
    Source: Muralidharan et al. 2024, Minitron, arXiv:2407.14679, section 2.2.
    """
    _check_blocks(model)
    if projected and not all(hasattr(block.out, "weight") for block in model.blocks):
        raise TypeError(
            "projected needs the weights of `out` as numbers, and this model's are quantized: "
            "measure the model it was made from"
        )
    heads = model.config.K if groups else model.config.N

    def norm(name: str, mixed: Tensor, y_BTD: Tensor) -> Tensor:
        mixed_BTNH = _wide(mixed).unflatten(-1, (heads, -1))  # with groups: K heads, G*H wide
        if projected:
            out_DNH = _wide(model.get_submodule(name).weight).unflatten(1, (heads, -1))
            return torch.einsum("btnh,dnh->btnd", mixed_BTNH, out_DNH).norm(dim=-1)
        return mixed_BTNH.norm(dim=-1)

    return _score(model, tokens_BT, _names(model, "out"), norm, aggregate, rows)


def neuron_importance(
    model: Transformer, tokens_BT: Tensor, rows: int = 8, aggregate: tuple[str, str] = MINITRON
) -> Tensor:
    """The size of what each MLP neuron hands to `down`: |silu(gate) * up|, aggregated.

    Shapes: tokens_BT -> importance_LF. Source: as `head_importance`.
    """
    _check_blocks(model)

    def size(name: str, hidden_BTF: Tensor, y_BTD: Tensor) -> Tensor:
        return _wide(hidden_BTF).abs()

    return _score(model, tokens_BT, _names(model, "down"), size, aggregate, rows)


def channel_importance(
    model: Transformer, tokens_BT: Tensor, rows: int = 8, aggregate: tuple[str, str] = MINITRON
) -> Tensor:
    """The size of each channel of the residual stream as the layers read it: after their norms.

    Each of the 2*L norms is aggregated by itself, and their scores are added up.
    Shapes: tokens_BT -> importance_D. Source: as `head_importance`.
    """
    _check_blocks(model)

    def size(name: str, x_BTD: Tensor, unit_BTD: Tensor) -> Tensor:
        return _wide(unit_BTD).abs()

    names = _names(model, "norm_attention", "norm_mlp")
    return _score(model, tokens_BT, names, size, aggregate, rows).sum(0)


def importances(model: Transformer, tokens_BT: Tensor, rows: int = 8) -> dict[str, Tensor]:
    """All four, under the names that `plan_by_importance` takes. Cost: four passes."""
    return {
        "layers_L": block_influence(model, tokens_BT, rows),
        "heads_LN": head_importance(model, tokens_BT, rows),
        "neurons_LF": neuron_importance(model, tokens_BT, rows),
        "channels_D": channel_importance(model, tokens_BT, rows),
    }


def greedy_drop(
    model: Transformer,
    tokens_BT: Tensor,
    num_layers: int,
    score: Callable[[Transformer, Tensor], Tensor | Sequence[float]] = block_influence,
) -> list[int]:
    """Which layers to drop, one at a time, measuring again after each; the first goes first.

    Two layers that do the same work each score low, since the other is there. After one is gone,
    only a new measurement sees that the other is needed. No guarantee: of the reference model's
    layers, eight chosen so by block influence were worse to lose than its eight lowest.

    score: of a model and windows, a number a layer; the lowest goes. `perplexity_without` fits too.
    Cost:  a call of `score` for each layer dropped. Nothing is copied, the model is not changed.
    """
    L = len(model.blocks)
    if type(num_layers) is not int or not 0 <= num_layers < L:
        raise ValueError(
            f"num_layers={num_layers!r}: choose from 0 to {L - 1}, so that one is left"
        )
    dropped: list[int] = []
    for _ in range(num_layers):
        left = [layer for layer in range(L) if layer not in dropped]
        scores = torch.as_tensor(score(without(model, dropped), tokens_BT))
        if scores.shape != (len(left),):
            raise ShapeError(
                f"score returned shape {tuple(scores.shape)}: expected a number for each of the "
                f"{len(left)} layers, as block_influence and perplexity_without give"
            )
        if not scores.isfinite().all():
            raise ValueError(f"without layers {dropped} a score is not finite: {scores.tolist()}")
        dropped.append(left[int(scores.argmin())])
    return dropped


def without(model: Transformer, layers: Sequence[int]) -> Transformer:
    """A view of the model that skips these layers: it shares every weight and copies none.

    For measuring without a cache. `prune.drop_layers` makes a model of its own.
    Raises: as `plan.indices`, for layers that the model does not have.
    """
    layers = indices("layers", layers, len(model.blocks), empty=True)
    view = copy.copy(model)
    blocks = [block for layer, block in enumerate(model.blocks) if layer not in layers]
    view._modules = model._modules | {"blocks": nn.ModuleList(blocks)}
    return view


def _score(
    model: nn.Module,
    tokens_BT: Tensor,
    names: Sequence[str],
    size: Callable[[str, Tensor, Tensor], Tensor],
    aggregate: tuple[str, str],
    rows: int,
) -> Tensor:
    """Aggregate size(name, input, output), of shape (rows, T, X), of the named modules.

    Rows stream by; what is kept is a sum for each name, in fp64. -> (names, X), fp32 or wider.
    """
    over_positions, over_rows = _checked(aggregate)
    sums: dict[str, Tensor] = {}

    def see(name: str, x: Tensor, y: Tensor) -> None:
        size_BTX = size(name, x, y)
        rows_BX = size_BTX.mean(1) if over_positions == "mean" else size_BTX.norm(dim=1)
        rows_BX = rows_BX.double() if over_rows == "mean" else rows_BX.double() ** 2
        sums[name] = sums.get(name, 0) + rows_BX.sum(0)

    with observe(model, names, see):
        run(model, tokens_BT, rows)
    total = torch.stack([sums[name] for name in names])
    total = total / len(tokens_BT) if over_rows == "mean" else total.sqrt()
    return total.to(torch.promote_types(model.dtype, torch.float32))


def _checked(aggregate: tuple[str, str]) -> tuple[str, str]:
    ways = ("mean", "l2")
    if isinstance(aggregate, str) or len(aggregate) != 2 or not set(aggregate) <= set(ways):
        raise ValueError(
            f"aggregate={aggregate!r}: expected two of {ways}, over positions and over rows, such "
            f"as {MINITRON}"
        )
    return tuple(aggregate)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _names(model: Transformer, *parts: str) -> list[str]:
    return [f"blocks.{layer}.{part}" for layer in range(len(model.blocks)) for part in parts]


def _check_blocks(model: Transformer) -> None:
    for layer, block in enumerate(model.blocks):
        if not isinstance(block, Block):
            raise TypeError(
                f"layer {layer} is a {type(block).__name__}, without the heads and neurons of a "
                "Block: score its layers by block_influence"
            )
