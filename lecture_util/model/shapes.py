"""Check tensors against the axis letters in their names.

A tensor of known rank ends in its axes: `q_BTNH` has four. `check_shapes` reads the letters off
the names, binds each to a size, and says which two tensors disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ShapeError(ValueError):
    """Two tensors disagree about an axis, or one has the wrong number of them."""


class TensorMismatch(TypeError):
    """Two tensors that must be computed together differ in dtype or device."""


def check_shapes(remedy: str = "", /, **tensors: Tensor) -> dict[str, int]:
    """Bind each axis letter to its size; equal letters must have equal sizes.

    Example: `check_shapes(q_BTNH=q, k_BSKH=k)` -> {"B": 2, "T": 1, "N": 8, "H": 64, ...}
    Raises:  ShapeError naming the tensors, both sizes and, if given, the remedy.
    """
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    hint = f": {remedy}" if remedy else ""
    for name, tensor in tensors.items():
        axes = name.rpartition("_")[2]
        if tensor.ndim != len(axes):
            raise ShapeError(
                f"{name} has {tensor.ndim} axes, shape {tuple(tensor.shape)}, "
                f"but its name expects {len(axes)}: {', '.join(axes)}{hint}"
            )
        for axis, size in zip(axes, tensor.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ShapeError(
                    f"{name} has {axis}={size} but {first[axis]} has {axis}={sizes[axis]}{hint}"
                )
            first.setdefault(axis, name)
    return sizes


def check_same_kind(**tensors: Tensor) -> None:
    """Require one dtype and one device.

    Raises: TensorMismatch naming the two tensors that differ and how to convert.
    """
    (name0, tensor0), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.dtype != tensor0.dtype:
            raise TensorMismatch(
                f"{name} is {tensor.dtype} but {name0} is {tensor0.dtype}: "
                f"cast one, for example {name}.to({tensor0.dtype})"
            )
        if tensor.device != tensor0.device:
            raise TensorMismatch(
                f"{name} is on {tensor.device} but {name0} is on {tensor0.device}: "
                f"move one, for example {name}.to({str(tensor0.device)!r})"
            )
