"""What to keep: a plan of layers, heads, neurons and channels, checked, and made from importances.

One Config describes every layer, so a plan leaves all layers equally wide, and all KV heads with
equally many query heads. Indices count in the source model, in any order; what is kept stays in
its old order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError
from lecture_util.roofline import num_params as count_params

Indices = Sequence[int] | Tensor


class Kept(NamedTuple):
    """A plan's indices, complete, checked and in order."""

    layers: list[int]
    heads: list[list[int]]
    groups: list[list[int]]
    neurons: list[list[int]]
    channels: list[int]


@dataclass(frozen=True)
class Plan:
    """What to keep of a model; None keeps all.

    layers:   indices of layers.
    heads:    for each layer of the source, indices of query heads. A KV head goes when its last
              query head goes; those that stay keep equally many query heads each.
    neurons:  for each layer of the source, indices of MLP neurons.
    channels: indices of channels of the residual stream, the same in every layer.
    rescale:  with channels, correct the norms: see `prune.keep_channels`.

    The lists of layers that are dropped are checked like the others, then left aside.
    """

    layers: Indices | None = None
    heads: Sequence[Indices] | None = None
    neurons: Sequence[Indices] | None = None
    channels: Indices | None = None
    rescale: bool = True

    def kept(self, config: Config) -> Kept:
        """The indices this plan keeps of a model of this shape.

        Raises: ValueError for a plan that keeps nothing, repeats or invents an index, or leaves
                layers or GQA groups of unequal width; TypeError for what is no list of indices.
        """
        heads = index_lists("query heads", self.heads, config.L, config.N)
        counts = [Counter(head // config.G for head in row) for row in heads]
        for layer, count in enumerate(counts):
            if len(set(count.values())) > 1:
                raise ValueError(
                    f"query heads: layer {layer} keeps {dict(count)} of its KV heads: grouped "
                    "attention needs equally many query heads for every KV head that stays"
                )
            if len(count) != len(counts[0]):
                raise ValueError(
                    f"query heads: layer {layer} leaves {len(count)} KV heads, layer 0 leaves "
                    f"{len(counts[0])}: one Config describes every layer, so leave equally many"
                )
        return Kept(
            layers=indices("layers", self.layers, config.L),
            heads=heads,
            groups=[sorted(count) for count in counts],
            neurons=index_lists("neurons", self.neurons, config.L, config.F),
            channels=indices("channels", self.channels, config.D),
        )

    def config(self, config: Config) -> Config:
        """The shape of what this plan leaves of a model of this shape; raises as `kept` does."""
        kept = self.kept(config)
        D, K = len(kept.channels), len(kept.groups[0])
        return replace(
            config,
            D=D,
            F=len(kept.neurons[0]),
            K=K,
            G=len(kept.heads[0]) // K,
            L=len(kept.layers),
            norm_eps=config.norm_eps * config.D / D if self.rescale else config.norm_eps,
        )


def plan_by_importance(
    config: Config,
    target: Config,
    *,
    layers_L: Tensor | Sequence[float] | None = None,
    heads_LN: Tensor | None = None,
    neurons_LF: Tensor | None = None,
    channels_D: Tensor | None = None,
    rescale: bool = True,
) -> Plan:
    """Keep what scores highest, until a model of shape `config` has the shape `target`.

    Only scores of what shrinks are needed. Of each group the best target.G query heads stay, then
    the target.K groups whose remaining heads score highest (L2). Ties keep the lower index.

    Scores are of the whole model, once: two layers that do the same work are both dispensable, but
    not together. `importance.greedy_drop` measures again after each layer.

    Raises: ValueError for a target that is no smaller shape of the same model, a missing score or
            one that is not finite; ShapeError for scores of another length.
    """
    _check_target(config, target)
    L, D, F, K, G = config.L, config.D, config.F, config.K, config.G

    def best(name: str, scores, shape: tuple[int, ...], keep: int) -> list | None:
        if keep == shape[-1]:
            return None
        return _top(_scores(name, scores, shape), keep).tolist()

    heads = None
    if (target.K, target.G) != (K, G):
        scores_LKG = _scores("heads_LN", heads_LN, (L, K * G)).unflatten(-1, (K, G))
        g_LKG = _top(scores_LKG, target.G)
        groups_LK = _top(scores_LKG.gather(-1, g_LKG).norm(dim=-1), target.K)
        heads_LKG = g_LKG + G * torch.arange(K)[:, None]
        heads = heads_LKG.gather(1, groups_LK[..., None].expand(-1, -1, target.G))
        heads = heads.flatten(1).tolist()
    return Plan(
        layers=best("layers_L", layers_L, (L,), target.L),
        heads=heads,
        neurons=best("neurons_LF", neurons_LF, (L, F), target.F),
        channels=best("channels_D", channels_D, (D,), target.D),
        rescale=rescale,
    )


def width_for(config: Config, num_params: int, multiple_of: int = 8) -> Config:
    """The same shape with F such that the model has `num_params` parameters, as near as it goes.

    F stays a multiple of `multiple_of`, which kernels like, so the count is off by at most
    3*D*L*multiple_of/2. For narrower attention too, hand over a config with fewer heads.
    Raises: ValueError if no F up to config.F comes as near.
    """
    step = multiple_of
    if type(step) is not int or not 1 <= step <= config.F:
        raise ValueError(f"multiple_of={step!r}: expected a whole number from 1 to F={config.F}")
    widths = range(step, config.F + 1, step)
    off = [abs(count_params(replace(config, F=F)) - num_params) for F in widths]
    if not min(off) <= 3 * config.D * config.L * step / 2:
        least, most = (count_params(replace(config, F=F)) for F in (widths[0], widths[-1]))
        raise ValueError(
            f"num_params={num_params:,} is out of reach: with these layers and heads, F can bring "
            f"{least:,} to {most:,}; change L, K, G or D of the config first"
        )
    return replace(config, F=widths[off.index(min(off))])


def indices(name: str, keep: Indices | None, size: int, empty: bool = False) -> list[int]:
    """The indices in order, checked: of 0 to size - 1, each once. None: all of them."""
    if keep is None:
        return list(range(size))
    if isinstance(keep, Tensor):
        if keep.dtype == torch.bool or keep.ndim != 1:
            raise TypeError(
                f"{name}: a tensor of {keep.dtype} and shape {tuple(keep.shape)}: expected a list "
                "of indices; a mask becomes one by mask.nonzero()[:, 0]"
            )
        keep = keep.tolist()
    try:
        if isinstance(keep, str | dict | Iterator):  # an iterator is gone after one look
            raise TypeError
        if any(isinstance(i, bool) or getattr(i, "dtype", None) == torch.bool for i in keep):
            raise TypeError
        keep = [index(i) for i in keep]
    except TypeError as error:
        raise TypeError(f"{name}: {keep!r} is not a list of indices such as [0, 2, 3]") from error
    if not keep and not empty:
        raise ValueError(f"{name}: nothing is kept of {size}: keep at least one")
    if wrong := [i for i in keep if not 0 <= i < size]:
        raise ValueError(f"{name}: index {wrong[0]} is out of range: choose from 0 to {size - 1}")
    if twice := [i for i, times in Counter(keep).items() if times > 1]:
        raise ValueError(f"{name}: index {twice[0]} is there more than once: name each once")
    return sorted(keep)


def index_lists(name: str, keep: Iterable[Indices] | None, L: int, size: int) -> list[list[int]]:
    """A list of indices for each layer, checked, all of one length. None: all of them."""
    if keep is None:
        return [list(range(size)) for _ in range(L)]
    if isinstance(keep, Iterator) or not isinstance(keep, Iterable):
        raise TypeError(f"{name}: {keep!r} is not a list of lists of indices, one for each layer")
    rows = list(keep)
    if len(rows) != L:
        raise ValueError(
            f"{name}: {len(rows)} lists for a model of L={L} layers: give one for each, also for "
            "layers that are dropped"
        )
    rows = [indices(f"{name} of layer {layer}", row, size) for layer, row in enumerate(rows)]
    for layer, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{name}: layer {layer} keeps {len(row)}, layer 0 keeps {len(rows[0])}: one Config "
                "describes every layer, so keep equally many in each"
            )
    return rows


def _top(scores: Tensor, keep: int) -> Tensor:
    """Of the last axis, the indices of the `keep` highest, in order."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :keep].sort(-1).values


def _scores(name: str, scores: Tensor | Sequence[float] | None, shape: tuple[int, ...]) -> Tensor:
    if scores is None:
        raise ValueError(f"the target is smaller, so {name} is needed: measure it in `importance`")
    scores = torch.as_tensor(scores).detach().cpu()
    scores = scores if scores.is_floating_point() else scores.double()
    if tuple(scores.shape) != shape:
        raise ShapeError(
            f"{name} has shape {tuple(scores.shape)} but the model asks for {shape}: measure it on "
            "the model that is cut"
        )
    if not scores.isfinite().all():
        where = (~scores.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{name} is {scores[tuple(where)].item()} at {where}: nothing can be ranked by that; "
            "measure again in fp32"
        )
    return scores


def _check_target(config: Config, target: Config) -> None:
    for name in "DFKGL":
        if getattr(target, name) > getattr(config, name):
            raise ValueError(
                f"the target has {name}={getattr(target, name)} but the model "
                f"{name}={getattr(config, name)}: pruning only takes away"
            )
    same = {name: getattr(config, name) for name in (*"DFKGL", "norm_eps")}
    if replace(target, **same) != config:
        raise ValueError(
            "the target is no smaller shape of this model: make it with replace(model.config, ...) "
            "of D, F, K, G and L only"
        )
