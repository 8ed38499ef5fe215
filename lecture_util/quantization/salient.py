"""The experiment behind AWQ: keep 1% of the channels unrounded. Which 1% decides everything.

A channel is a column of weights, all of which meet the same activation. `keep_channels` rounds a
model and puts the chosen columns back as they were. It shows where the error comes from; nobody
serves it, as a matrix of two kinds of numbers is awkward to multiply. AWQ gets there by scaling.
Source: Lin et al. 2023, arXiv:2306.00978, section 3.1 and table 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lecture_util.model.linear import Linear
from lecture_util.model.transformer import Transformer

from .awq import activation_means
from .awq_search import wide
from .group_linear import GroupLinear
from .linear import linear_layers, replace_linears

CHOICES = ("activation", "weight", "random")


def salient_channels(
    w_FD: Tensor,
    mean_D: Tensor,
    share: float = 0.01,
    by: str = "activation",
    generator: torch.Generator | None = None,
) -> Tensor:
    """The ceil(share * D) channels to keep. -> whole numbers, ascending.

    by: "activation", the largest mean |x|; "weight", the columns of largest norm; "random".
    """
    if not 0 <= share <= 1 or by not in CHOICES:
        raise ValueError(
            f"share={share!r}, by={by!r}: expected 0 to 1, and one of {', '.join(CHOICES)}"
        )
    D = w_FD.shape[1]
    if mean_D.shape != (D,):
        raise ValueError(f"mean_D has shape {tuple(mean_D.shape)} but w_FD has D={D} columns")
    if not mean_D.isfinite().all():
        raise ValueError("mean_D holds NaN or infinity, which rank nothing: calibrate in float32")
    worth_D = {
        "activation": lambda: mean_D,
        "weight": lambda: wide(w_FD).norm(dim=0),
        "random": lambda: torch.rand(D, generator=generator),
    }[by]()
    keep = math.ceil(round(share * D, 6))  # 0.07 * 100 is a little more than 7
    return worth_D.topk(keep).indices.sort().values


@torch.no_grad()
def keep_channels(
    model: Transformer,
    tokens_BT: Tensor,
    bits: int = 3,
    group_size: int = 48,
    share: float = 0.01,
    by: str = "activation",
    symmetric: bool = False,
    seed: int = 0,
) -> Transformer:
    """Round every layer but the head, and put a share of each layer's channels back.

    Weights come back as ordinary floating-point Linears. Stored as mixed, a weight would take
    bits * (1 - share) + 16 * share bits, scales aside.

    Raises: ValueError for an empty calibration set, a share outside 0 to 1, another `by`.
    """
    means = activation_means(model, tokens_BT)
    names = {layer: name for name, layer in linear_layers(model).items()}
    generator = torch.Generator().manual_seed(seed)

    def mixed(linear: nn.Linear) -> Linear:
        w_FD = linear.weight.detach()
        kept = salient_channels(w_FD, means[names[linear]], share, by, generator)
        stored = GroupLinear.from_linear(linear, bits, group_size, symmetric)
        mixed_FD = stored.dequantized().to(w_FD.dtype)
        mixed_FD[:, kept] = w_FD[:, kept]
        with torch.device("meta"):
            new = Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        new.weight, new.bias = nn.Parameter(mixed_FD, requires_grad=False), linear.bias
        return new

    return replace_linears(model, mixed)
