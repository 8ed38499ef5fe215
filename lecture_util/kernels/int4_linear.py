"""Multiply by weights of four bits, two of them in a byte, made real numbers only on the way.

    here         what it is
    x_BD         a few rows of input
    packed       uint8 (F, ceil(D/2)): weight 2p of a row in a byte's high half, 2p + 1 in its low
    levels_16    what the sixteen codes stand for: a table, or the whole number of code 0
    scale_FJ     one for each group of `group_size` neighbours in a row, J = ceil(D / group_size)
    offset_FJ    likewise, added; None where the levels lie around zero themselves

    w = levels_16[code] * scale + offset

The levels 0 to 15 and an offset make int4 with a zero point, the levels -8 to 7 symmetric int4, and
NF4's sixteen numbers NF4. A decode step is bound by the bytes of its weights, so what is read is
what counts. `int4_linear` is the definition, and the reference for the kernel in
`int4_linear_triton`, which `int4_linear_fused` runs where it can.

Source: Dettmers et al. 2023, arXiv:2305.14314 (NF4; bitsandbytes puts the first weight high too).
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lecture_util.model.shapes import ShapeError, TensorMismatch, check_shapes

Levels = Tensor | int

MAX_ROWS = 64  # the kernel reads the weights once for each 16 rows; dense pays off in the end
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def pack_int4(codes_FD: Tensor) -> Tensor:
    """Two codes into each byte, the first of them in its high half. An odd row ends in a half of 0.

    Shapes: codes_FD, whole numbers 0 to 15 -> packed uint8 (F, ceil(D/2)).
    Raises: ShapeError, TypeError for a dtype of no whole numbers, ValueError for other codes.
    """
    check_shapes(codes_FD=codes_FD)
    if codes_FD.is_floating_point() or codes_FD.is_complex() or codes_FD.dtype == torch.bool:
        raise TypeError(f"codes_FD is {codes_FD.dtype}: expected whole numbers, such as int8")
    strange = (codes_FD < 0) | (codes_FD > 15)
    if strange.any():
        f, d = strange.nonzero()[0].tolist()
        raise ValueError(
            f"codes_FD[{f}, {d}] is {codes_FD[f, d].item()}: four bits hold 0 to 15. "
            "Signed codes -8 to 7 become these by adding 8"
        )
    codes_FD = nnf.pad(codes_FD.to(torch.uint8), (0, codes_FD.shape[1] % 2))
    return codes_FD[:, 0::2] << 4 | codes_FD[:, 1::2]


def unpack_int4(packed: Tensor, D: int) -> Tensor:
    """The codes of `pack_int4`. D says whether the last low half is one. Shapes: -> uint8 codes_FD.

    Raises: ShapeError, TypeError.
    """
    _check_packed(packed, D)
    return torch.stack((packed >> 4, packed & 15), -1).flatten(1)[:, :D]


def dequantize_int4(
    packed: Tensor,
    levels_16: Levels,
    scale_FJ: Tensor,
    offset_FJ: Tensor | None = None,
    *,
    group_size: int,
    D: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """w_FD = levels_16[code] * scale + offset, computed in dtype. Raises: as `int4_linear`."""
    _check_weights(packed, levels_16, scale_FJ, offset_FJ, group_size, D)
    codes_FD = unpack_int4(packed, D)
    if isinstance(levels_16, int):
        w_FD = codes_FD.to(dtype).add_(levels_16)
    else:
        w_FD = levels_16.to(dtype).index_select(0, codes_FD.flatten().int()).view(codes_FD.shape)
    if tail := -D % group_size:
        w_FD = nnf.pad(w_FD, (0, tail))
    w_FJd = w_FD.unflatten(1, (-1, group_size))
    w_FJd.mul_(scale_FJ[..., None].to(dtype))  # in place: w is by far the largest here
    if offset_FJ is not None:
        w_FJd.add_(offset_FJ[..., None].to(dtype))
    return w_FJd.flatten(1)[:, :D]


def int4_linear(
    x_BD: Tensor,
    packed: Tensor,
    levels_16: Levels,
    scale_FJ: Tensor,
    offset_FJ: Tensor | None = None,
    *,
    group_size: int,
) -> Tensor:
    """x @ w.T, with w made whole first: the definition, in fp32 (fp64 if x is).

    group_size: even, so that a byte's two weights share a scale; or D or more for a scale a row.

    Shapes: x_BD, packed (F, ceil(D/2)), levels_16, scale_FJ, offset_FJ -> y_BF in x's dtype.
    Cost:   2*B*D*F FLOPs over D*F/2 bytes of codes, and F*J scales and offsets: four bits a weight
            and, with two 16-bit numbers for 64 weights, half a bit more.
    Raises: ShapeError, TensorMismatch, ValueError.
    """
    check_int4(x_BD, packed, levels_16, scale_FJ, offset_FJ, group_size)
    wide = torch.promote_types(x_BD.dtype, torch.float32)
    w_FD = dequantize_int4(
        packed, levels_16, scale_FJ, offset_FJ, group_size=group_size, D=x_BD.shape[1], dtype=wide
    )
    return (x_BD.to(wide) @ w_FD.mT).to(x_BD.dtype)


def int4_linear_fused(
    x_BD: Tensor,
    packed: Tensor,
    levels_16: Levels,
    scale_FJ: Tensor,
    offset_FJ: Tensor | None = None,
    *,
    group_size: int,
) -> Tensor:
    """`int4_linear` by the Triton kernel for a few rows on a GPU; elsewhere dense, in x's dtype.

    Dense is also what many rows and a wanted gradient get: the kernel has only a forward pass.

    Cost:   the kernel moves only the packed weights; dense writes w and reads it again as well.
    """
    check_int4(x_BD, packed, levels_16, scale_FJ, offset_FJ, group_size)
    weights = (packed, levels_16, scale_FJ, offset_FJ)
    tensors = [x for x in (x_BD, *weights) if isinstance(x, Tensor)]
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    few = x_BD.shape[0] <= MAX_ROWS and x_BD.dtype in FLOATS
    if x_BD.is_cuda and few and not gradient:
        return int4_linear_triton(x_BD, *weights, group_size=group_size)
    w_FD = dequantize_int4(*weights, group_size=group_size, D=x_BD.shape[1])
    return nnf.linear(x_BD, w_FD.to(x_BD.dtype))


def int4_linear_triton(
    x_BD: Tensor,
    packed: Tensor,
    levels_16: Levels,
    scale_FJ: Tensor,
    offset_FJ: Tensor | None = None,
    *,
    group_size: int,
    dot: bool | None = None,
    block_F: int | None = None,
    block_bytes: int | None = None,
) -> Tensor:
    """`int4_linear` by the Triton kernel, or an error that says why it cannot.

    On a CPU it runs in Triton's interpreter: set TRITON_INTERPRET=1 before Triton is imported.

    dot:         on the tensor cores, for which w is rounded to x's dtype, as a dense layer's is;
                 None: with more than one row of 16 bits.
    block_F:     rows of w a program takes, a power of two; None: chosen.
    block_bytes: how much of each it takes at a time, in bytes, a power of two; None: chosen.
    """
    for name, block in (("block_F", block_F), ("block_bytes", block_bytes)):
        if block is not None and (type(block) is not int or block < 1 or block & (block - 1)):
            raise ValueError(f"{name}={block!r}: expected a power of two, such as 16")
    check_int4(x_BD, packed, levels_16, scale_FJ, offset_FJ, group_size)
    if x_BD.dtype not in FLOATS:
        raise TensorMismatch(f"x_BD is {x_BD.dtype}: the kernel takes 16 or 32 bits, x_BD.float()")
    try:
        from lecture_util.kernels import int4_linear_triton as kernel
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "Triton is not installed here (it comes for Linux on x86-64): use int4_linear"
        ) from error
    if not (x_BD.is_cuda or kernel.INTERPRETED):
        raise RuntimeError(
            f"Triton compiles for GPUs but x_BD is on {x_BD.device}: use int4_linear, or set "
            "TRITON_INTERPRET=1 in the environment before Python starts"
        )
    return kernel.launch(
        x_BD, packed, levels_16, scale_FJ, offset_FJ, group_size, dot, block_F, block_bytes
    )


def check_int4(
    x_BD: Tensor,
    packed: Tensor,
    levels_16: Levels,
    scale_FJ: Tensor,
    offset_FJ: Tensor | None,
    group_size: int,
) -> None:
    """Do these fit together?

    Raises: ShapeError if axes disagree; TensorMismatch for another dtype or device than computes;
            ValueError for a group or a level that cannot be.
    """
    check_shapes(x_BD=x_BD)
    if not x_BD.is_floating_point():
        raise TensorMismatch(f"x_BD is {x_BD.dtype}: expected floating-point numbers")
    _check_weights(packed, levels_16, scale_FJ, offset_FJ, group_size, x_BD.shape[1])
    if packed.device != x_BD.device:
        raise TensorMismatch(f"packed is on {packed.device} but x_BD is on {x_BD.device}: move one")


def check_group_size(group_size: int, D: int) -> None:
    """Raises: ValueError unless a byte's two weights share a scale, in rows of D."""
    if type(group_size) is not int or group_size < 1 or (group_size % 2 and group_size < D):
        raise ValueError(
            f"group_size={group_size!r} with D={D}: expected an even number, since the two weights "
            "of a byte share a scale, or D or more for one scale a row"
        )


def _check_packed(packed: Tensor, D: int) -> None:
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed is {packed.dtype}: expected uint8, as pack_int4 returns")
    if packed.ndim != 2 or packed.shape[1] != (D + 1) // 2:
        raise ShapeError(
            f"packed has shape {tuple(packed.shape)} for D={D}: expected two axes, the second "
            f"of ceil(D/2) = {(D + 1) // 2} bytes"
        )


def _check_weights(packed, levels_16, scale_FJ, offset_FJ, group_size, D) -> None:
    _check_packed(packed, D)
    F = packed.shape[0]
    check_group_size(group_size, D)
    J = -(-D // group_size)
    per_group = {"scale_FJ": scale_FJ} | ({} if offset_FJ is None else {"offset_FJ": offset_FJ})
    for name, tensor in per_group.items():
        if tuple(tensor.shape) != (F, J):
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}: expected ({F}, {J}), one for each "
                f"group of {group_size} in each of {F} rows of {D}"
            )
    if isinstance(levels_16, Tensor):
        if tuple(levels_16.shape) != (16,):
            raise ShapeError(f"levels_16 has shape {tuple(levels_16.shape)}: expected (16,)")
        per_group["levels_16"] = levels_16
    elif type(levels_16) is not int:
        raise ValueError(
            f"levels_16={levels_16!r}: expected a table of 16, or the whole number that code 0 "
            "stands for, such as 0 or -8"
        )
    for name, tensor in per_group.items():
        if not tensor.is_floating_point():
            raise TensorMismatch(f"{name} is {tensor.dtype}: expected floating-point numbers")
        if tensor.device != packed.device:
            raise TensorMismatch(
                f"{name} is on {tensor.device} but packed is on {packed.device}: move one"
            )
