"""What every method does with tensors: compute wide, cast once, go through models name by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..model.shapes import ShapeError, TensorMismatch


def wide(tensor: Tensor) -> Tensor:
    """In fp32, or fp64 if it was; the tensor itself if it is wide already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def all_finite(tensor: Tensor) -> bool:
    """In one pass without a mask, ten times as fast: NaN comes through both ends."""
    return not tensor.numel() or all(bool(edge.isfinite()) for edge in tensor.aminmax())


def require_floats(**tensors: Tensor) -> None:
    """Require dense tensors of real floating-point numbers: others have no mean, and no angle.

    Raises: TypeError, TensorMismatch with the keyword's name.
    """
    for name, tensor in tensors.items():
        _require_dense(name, tensor)
        if not tensor.is_floating_point():
            raise TensorMismatch(
                f"{name} is {tensor.dtype}: expected floating-point numbers. A quantized "
                "checkpoint? Merge first, quantize after"
            )


def one_weight_each(
    weights: Sequence[float] | None, tensors: Sequence[Any], kind: str
) -> list[float]:
    """A list of as many weights as tensors, all 1 where none are given. Raises: ValueError."""
    if weights is None:
        weights = [1.0] * len(tensors)
    weights = weights.tolist() if hasattr(weights, "tolist") else list(weights)
    if not tensors or len(weights) != len(tensors):
        raise ValueError(f"{len(weights)} weights for {len(tensors)} {kind}: expected one each")
    return weights


def one_shape(tensors: Sequence[Tensor], name: str) -> None:
    """Require floats of one shape, called `name`0, `name`1 ...: nothing is broadcast here.

    Raises: ShapeError, and as `require_floats`.
    """
    for i, tensor in enumerate(tensors):
        require_floats(**{f"{name}{i}": tensor})
        if tensor.shape != tensors[0].shape:
            raise ShapeError(
                f"{name}{i} is {tuple(tensor.shape)} but {name}0 is {tuple(tensors[0].shape)}: "
                "expected one shape"
            )


def by_chunks(function: Callable[..., Tensor], *tensors: Tensor, chunk: int = 1 << 17) -> Tensor:
    """An entry-by-entry function of tensors of one shape, a stretch that fits the cache at a time.

    The same numbers with temporaries of half a megabyte instead of many tensors' size.
    """
    flat = [tensor.reshape(-1) for tensor in tensors]
    out = torch.empty_like(flat[0])
    for start in range(0, len(out), chunk):
        stop = start + chunk
        out[start:stop] = function(*(each[start:stop] for each in flat))
    return out.view(tensors[0].shape)


def map_states(function: Callable[..., Tensor], *states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`function` of the tensors of each name, one from each state.

    Whole-number entries (counters, position ids) are nobody's weights: they must agree, and stay.
    Raises: as `same_tensors`.
    """
    merged = {}
    for name in states[0]:
        tensors = [state[name] for state in states if name in state]
        same_tensors(name, tensors, len(states))
        whole = not tensors[0].is_floating_point()
        merged[name] = tensors[0] if whole else function(*tensors)
    for i, state in enumerate(states):
        if extra := [name for name in state if name not in states[0]]:
            raise KeyError(f"model {i} holds {extra[0]}, which model 0 lacks: not one architecture")
    return merged


def same_tensors(name: str, tensors: list[Tensor], expected: int) -> None:
    """Require one a model, of one shape, all floats or all whole numbers that agree.

    Raises: KeyError, ShapeError, TypeError, TensorMismatch, ValueError with the tensor's name.
    """
    if len(tensors) != expected:
        raise KeyError(
            f"{name} is in {len(tensors)} of {expected} models: only models of one architecture "
            "can be merged"
        )
    for i, tensor in enumerate(tensors):
        _require_dense(name, tensor, f" in model {i}")
    first = tensors[0]
    for i, tensor in enumerate(tensors[1:], 1):
        if tensor.shape != first.shape:
            raise ShapeError(
                f"{name} is {tuple(tensor.shape)} in model {i} but {tuple(first.shape)} in "
                "model 0: merge models of one shape (for vocabularies of different sizes, see "
                "tokenizer_source)"
            )
        if tensor.is_floating_point() != first.is_floating_point():
            raise TensorMismatch(
                f"{name} is {tensor.dtype} in model {i} but {first.dtype} in model 0: a "
                "quantized checkpoint? Merge first, quantize after"
            )
        if not first.is_floating_point() and not torch.equal(tensor, first):
            raise ValueError(
                f"{name} holds whole numbers ({first.dtype}) and differs between models 0 and "
                f"{i}: there is no mean of such a buffer; make them agree first"
            )


def _require_dense(name: str, tensor: Any, where: str = "") -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}{where}: expected a tensor")
    if tensor.layout != torch.strided:
        raise TensorMismatch(f"{name} is sparse{where}: make it dense first, with to_dense()")
    if tensor.is_complex():
        raise TensorMismatch(f"{name} is {tensor.dtype}{where}: merging is for real numbers")
