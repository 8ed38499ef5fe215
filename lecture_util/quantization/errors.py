"""How wrong each layer has become, given what it read before quantizing: where the damage is done.

Each quantized layer is fed the reference's own inputs, so its error is its own and not what
earlier layers hand on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lecture_util.model.observe import observe, run

from .linear import is_quantized, linear_layers


@torch.no_grad()
def layer_errors(
    reference: nn.Module, quantized: nn.Module, tokens_BT: Tensor, rows: int = 8
) -> dict[str, float]:
    """|quantized output - output| / |output|, norms over all tokens, for each replaced layer.

    The two must agree on what a layer reads. Where scales were folded from one layer into another,
    as in AWQ, the reference is the folded model.

    Raises: ValueError if the models have other layers or share all of them, if only the reference
            is quantized, or a layer's outputs are all zero.
    """
    ours, theirs = linear_layers(reference), linear_layers(quantized)
    if ours.keys() != theirs.keys():
        odd = min(ours.keys() ^ theirs.keys())
        raise ValueError(f"only one of the models has a layer {odd}: compare a model with its copy")
    names = [name for name in ours if not _shared(ours[name], theirs[name])]
    if not names:
        raise ValueError("every layer of the two models has the same weights: nothing was replaced")
    if swapped := [n for n in names if is_quantized(ours[n]) and not is_quantized(theirs[n])]:
        raise ValueError(
            f"{swapped[0]} is quantized in the reference and not in the other: the reference comes "
            "first, layer_errors(model, quantized, tokens_BT)"
        )
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in names}

    def see(name: str, x: Tensor, output: Tensor) -> None:
        wrong = theirs[name](x).double() - output.double()
        sums[name] += torch.stack([wrong.square().sum(), output.double().square().sum()]).cpu()

    # `run` leaves the head out of a model that has `features`; a Sequential of it has none.
    with observe(reference, names, see):
        run(nn.Sequential(reference) if "head" in names else reference, tokens_BT, rows)
    if silent := [name for name in names if not sums[name][1] > 0]:
        raise ValueError(
            f"{silent[0]} was not run, or gave only zeros: its error relative to them has no value"
        )
    return {name: float((wrong / total).sqrt()) for name, (wrong, total) in sums.items()}


def worst(errors: dict[str, float]) -> tuple[str, float]:
    """The layer with the largest error, and that error; one that is no number is the largest."""
    if not errors:
        raise ValueError("there are no errors to compare: pass what layer_errors returned")
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return name, errors[name]


def _shared(a: nn.Module, b: nn.Module) -> bool:
    weights = [getattr(layer, "weight", None) for layer in (a, b)]
    return (
        all(isinstance(w, Tensor) for w in weights)
        and weights[0].data_ptr() == weights[1].data_ptr()
    )
