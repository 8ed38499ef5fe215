"""A quantized layer is a Linear: same call, same shapes, its own bytes. Put them into a model.

`replace_linears(model, make)` swaps a model's Linears for what `make` returns: ours
(`Int8Linear.from_linear`, `NF4Linear.from_linear`, ...) or bitsandbytes' (`bnb_int8`, `bnb_nf4`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from lecture_util.model.linear import Linear
from lecture_util.model.shapes import ShapeError

from .borrowed import Borrowed, bnb_int8, bnb_nf4
from .layer import QuantizedLinear

__all__ = [
    "Borrowed",
    "QuantizedLinear",
    "bits_per_weight",
    "bnb_int8",
    "bnb_nf4",
    "dequantize",
    "is_quantized",
    "linear_bytes",
    "linear_layers",
    "replace_linears",
]


def replace_linears(
    model: nn.Module, make: Callable[[nn.Linear], nn.Module], skip: Iterable[str] = ("head",)
) -> nn.Module:
    """A copy of the model with make(linear) in place of each Linear.

    skip: layers to leave alone: full names, last parts of names ("down") or beginnings
          ("blocks.0"). The head stays by default: it is the embedding where the two are tied.
    make: may return its argument to leave that layer alone too.

    What is not replaced shares its memory with the source, and tied weights stay tied; a head that
    is rounded, and its embedding not, is tied no longer. The source keeps its layers, and stays
    where it is when the copy moves to another device.

    Raises: ValueError for a model that is quantized already, names in `skip` that fit no layer, and
            when nothing is left to replace; TypeError if `make` returns no module; ShapeError if
            that module has other widths than the layer it stands for.
    """
    linears = linear_layers(model)
    skip = _skipped(linears, skip)
    if quantized := [name for name, layer in linears.items() if is_quantized(layer)]:
        raise ValueError(
            f"{quantized[0]} is quantized already ({type(linears[quantized[0]]).__name__}): start "
            "from the model that was loaded, since what quantizing drops can't be had back"
        )
    new = {}
    for name, layer in linears.items():
        if not any(_fits(name, s) for s in skip):
            made = _checked(name, layer, make(layer))
            if made is not layer:
                new[layer] = made.train(layer.training)
    if not new:
        raise ValueError(
            f"nothing to replace: of {len(linears)} Linears, skip={skip} and `make` leave none"
        )
    return _rebuilt(model, new)


def dequantize(model: nn.Module) -> nn.Module:
    """A copy of a quantized model with ordinary Linears again, holding the rounded weights.

    It computes what the quantized weights say, at full precision: with it a checkpoint can be
    saved. The weights take the dtype of the model's other parameters.
    """
    new = {}
    for layer in linear_layers(model).values():
        if isinstance(layer, QuantizedLinear):
            w_FD = layer.dequantized()
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), w_FD.dtype)
            with torch.device("meta"):
                plain = Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight = nn.Parameter(w_FD.to(dtype), requires_grad=False)
            plain.bias = layer.bias
            new[layer] = plain.train(layer.training)
    if not new:
        raise ValueError("no layer of this model is quantized: there is nothing to dequantize")
    return _rebuilt(model, new)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The model's Linears and quantized layers by name, in order."""
    found: dict[str, nn.Module] = {}
    for name, layer in model.named_modules():
        inside = any(_fits(name, f) for f in found if isinstance(found[f], QuantizedLinear))
        if isinstance(layer, nn.Linear | QuantizedLinear) and not inside:
            found[name] = layer
    return found


def is_quantized(layer: nn.Module) -> bool:
    """Ours, or bitsandbytes', whose layers pass for nn.Linear."""
    return isinstance(layer, QuantizedLinear) or type(layer).__module__.startswith("bitsandbytes")


def linear_bytes(model: nn.Module, skip: Iterable[str] = ("head",)) -> int:
    """Bytes of the linear layers' weights, scales included; the head apart, as in replacing."""
    return sum(_bytes(layer) for layer in _counted(model, skip))


def bits_per_weight(model: nn.Module, skip: Iterable[str] = ("head",)) -> float:
    """Bits stored for each weight of the linear layers, scales included."""
    layers = _counted(model, skip)
    return 8 * sum(map(_bytes, layers)) / sum(x.in_features * x.out_features for x in layers)


def _counted(model: nn.Module, skip: Iterable[str]) -> list[nn.Module]:
    layers = linear_layers(model)
    skip = _skipped(layers, skip)
    counted = [layer for name, layer in layers.items() if not any(_fits(name, s) for s in skip)]
    if not counted:
        raise ValueError(f"no linear layers to count: the model has {len(layers)}, skip={skip}")
    return counted


def _skipped(linears: dict[str, nn.Module], skip: Iterable[str]) -> tuple[str, ...]:
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    if unknown := [s for s in skip if s != "head" and not any(_fits(n, s) for n in linears)]:
        raise ValueError(
            f"skip names {unknown[0]!r}, which fits none of this model's {len(linears)} Linears: "
            f"expected names such as {list(linears)[:3]}"
        )
    return skip


def _bytes(layer: nn.Module) -> int:
    return layer.weight_bytes if isinstance(layer, QuantizedLinear) else layer.weight.nbytes


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or name.startswith(f"{pattern}.")


def _checked(name: str, layer: nn.Linear, made: nn.Module) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"make returned {type(made).__name__} for {name}: expected a module to call in the "
            "Linear's place, such as NF4Linear.from_linear(linear)"
        )
    widths = [getattr(made, side, None) for side in ("in_features", "out_features")]
    if widths != [layer.in_features, layer.out_features]:
        raise ShapeError(
            f"make returned a module of widths {widths} for {name}, which has "
            f"[{layer.in_features}, {layer.out_features}]: a quantized layer says in_features and "
            "out_features, and keeps them"
        )
    return made


def _rebuilt(model: nn.Module, new: dict[nn.Module, nn.Module]) -> nn.Module:
    """Deep-copy the modules but no tensors: `deepcopy` takes what its memo holds as copied."""
    memo: dict[int, object] = {id(layer): made for layer, made in new.items()}
    for weight in model.parameters():  # each tied weight once, so it stays one
        memo.setdefault(id(weight), nn.Parameter(weight.detach(), weight.requires_grad))
    for made in new.values():  # a bias that it took over, say, is lent like the rest
        for name, weight in made._parameters.items():
            made._parameters[name] = memo.get(id(weight), weight)
    for stored in model.buffers():
        memo.setdefault(id(stored), stored)
    rebuilt = copy.deepcopy(model, memo)
    config, head = getattr(model, "config", None), getattr(rebuilt, "head", None)
    if getattr(config, "tied", False) and getattr(head, "weight", None) is not rebuilt.embed.weight:
        rebuilt.config = replace(config, tied=False)
    return rebuilt
