"""Train an adapter: the model frozen, thin factors beside each Linear learning its change.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lecture_util.model.checkpoint import hf_names
from lecture_util.model.train import Batch, train
from lecture_util.model.transformer import Transformer

from .adapters import Adapter, Factors, hf_views

PLACES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class AdaptedLinear(nn.Module):
    """A frozen Linear and, while they are trained, the factors of the weights stacked in it.

    rows:  how many rows of the stack each weight has, by its Hugging Face name.
    start: the factors to start from, for all or some of these weights.

    Shapes: x (..., D) -> (..., F).
    Cost:   2*r*(D + F) FLOPs a row beside the Linear's 2*D*F.
    """

    def __init__(
        self, linear: nn.Linear, rows: Mapping[str, int], start: Mapping[str, Factors], scale: float
    ) -> None:
        super().__init__()
        self.linear, self.rows, self.scale = linear, dict(rows), scale
        self.down = nn.ParameterList(f.down_rD for f in start.values())
        self.up = nn.ParameterList(f.up_Fr for f in start.values())
        self.place = {name: at for at, name in enumerate(start)}

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(
            zip(self.rows, self.linear(x).split(list(self.rows.values()), -1), strict=True)
        )
        for name, at in self.place.items():
            down_rD, up_Fr = self.down[at].to(x.dtype), self.up[at].to(x.dtype)
            parts[name] = parts[name] + self.scale * (x @ down_rD.T @ up_Fr.T)
        return torch.cat(list(parts.values()), dim=-1)

    def trained(self) -> dict[str, Factors]:
        """What was learned, by the names of the weights."""
        return {
            name: Factors(self.down[at].detach(), self.up[at].detach())
            for name, at in self.place.items()
        }


def train_adapter(
    model: Transformer,
    new_batch: Callable[[torch.Generator], Batch],
    steps: int,
    *,
    rank: int = 4,
    scale: float = 2.0,
    places: Sequence[str] = PLACES,
    seed: int = 0,
    **how,
) -> tuple[Adapter, list[float]]:
    """Train factors for the weights in `places`; the model is given back as it came.

    `up` starts at zero, so training starts from the model itself. Seeded as `model.train.train`.

    how: what `train` takes besides: lr, warmup, loss_of ...
    Returns the adapter, and the loss of each step.
    Raises: ValueError for a rank below 1 or an unknown place; as `train`.
    """
    if not places or not set(places) <= set(PLACES):
        raise ValueError(f"places={list(places)}: expected some of {', '.join(PLACES)}")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"rank={rank!r}: expected a whole number, at least 1")
    generator, views = torch.Generator().manual_seed(seed), hf_views(model)

    def start(name: str) -> Factors:
        F, D = views[name].shape
        down_rD = torch.randn(rank, D, generator=generator) / math.sqrt(D)
        return Factors(down_rD.to(model.device), torch.zeros(F, rank, device=model.device))

    frozen, adapted = {}, {}
    needed_grad = {p: p.requires_grad for p in model.parameters()}
    try:
        model.requires_grad_(False)
        for ours, theirs in hf_names(model.config).items():
            if not ours.endswith(".weight"):
                continue
            if chosen := [name for name in theirs if name.split(".")[-2] in places]:
                at = ours.removesuffix(".weight")
                frozen[at] = model.get_submodule(at)
                adapted[at] = AdaptedLinear(
                    frozen[at],
                    {name: len(views[name]) for name in theirs},
                    {name: start(name) for name in chosen},
                    scale,
                )
                model.set_submodule(at, adapted[at])
        losses = train(model, new_batch, steps, seed=seed, **how)
    finally:
        for at, linear in frozen.items():
            model.set_submodule(at, linear)
        for parameter, needed in needed_grad.items():
            parameter.requires_grad_(needed)
    return Adapter({k: v for a in adapted.values() for k, v in a.trained().items()}, scale), losses
