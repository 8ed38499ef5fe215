"""The product with packed 4-bit weights in Triton. Imported by `int4_linear` when it is needed.

A program makes BLOCK_F numbers for each of BLOCK_B rows of x. It walks along its rows of w, several
groups at a time; each byte is read once and becomes two weights in registers, never in memory.

One row of x is multiplied and summed, and the scale can wait: within a group sum(x * level * scale)
is scale * sum(x * level), one multiplication and addition a weight. More rows go to the tensor
cores, which take at least 8 as cheaply as 2 but want w itself.

Compiled by Triton 3.9 for an H100, the loops have 6 to 8 instructions a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lecture_util.kernels.interpreted import interpreted

SUM_ROWS, DOT_ROWS = 1, 16  # of x, at most, in one program: more rows are more programs


@triton.jit
def _product(
    x_ptr, packed_ptr, levels_ptr, scale_ptr, offset_ptr, y_ptr,
    B, D, F, J, row_bytes,
    stride_x_row, stride_packed_row, stride_scale_row, stride_offset_row,
    GROUP_BYTES: tl.constexpr, LOWEST: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr,
    DOT: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)  # f * stride may pass 2^31
    b = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_f, mask_b = f < F, b < B
    y_fb = tl.zeros((BLOCK_F, BLOCK_B), tl.float32)
    y_fj = tl.zeros((BLOCK_F, BLOCK_J), tl.float32)

    if TABLE:
        levels_16 = tl.load(levels_ptr + tl.arange(0, 16)).to(tl.float32)

    for first_j in range(0, J, BLOCK_J):
        j = first_j + tl.arange(0, BLOCK_J)
        mask_fj = mask_f[:, None] & (j < J)[None, :]
        here_fj = f[:, None] * stride_scale_row + j[None, :]
        scale_fj = tl.load(scale_ptr + here_fj, mask=mask_fj, other=0).to(tl.float32)
        offset_fj = LOWEST * scale_fj
        if OFFSET:
            here_fj = f[:, None] * stride_offset_row + j[None, :]
            offset_fj += tl.load(offset_ptr + here_fj, mask=mask_fj, other=0).to(tl.float32)

        for first_p in range(0, GROUP_BYTES, BLOCK_P):
            # x first: Triton 3.9 was seen to keep the later load's layout, and w is the larger.
            i = 2 * first_p + tl.arange(0, 2 * BLOCK_P)
            d_ji = j[:, None] * (2 * GROUP_BYTES) + i[None, :]
            mask_ji = (i < 2 * GROUP_BYTES)[None, :] & (d_ji < D)
            here_bji = b[:, None, None] * stride_x_row + d_ji[None, :, :]
            mask_bji = mask_b[:, None, None] & mask_ji[None, :, :]
            x_bji = tl.load(x_ptr + here_bji, mask=mask_bji, other=0)  # 0 wherever no weight is

            p = first_p + tl.arange(0, BLOCK_P)
            byte_jp = j[:, None] * GROUP_BYTES + p[None, :]
            mask_jp = (p < GROUP_BYTES)[None, :] & (byte_jp < row_bytes)
            here_fjp = f[:, None, None] * stride_packed_row + byte_jp[None, :, :]
            mask_fjp = mask_f[:, None, None] & mask_jp[None, :, :]
            packed_fjp = tl.load(packed_ptr + here_fjp, mask=mask_fjp, other=0)
            code_fji = tl.join(packed_fjp >> 4, packed_fjp & 15)  # the first one is the high half
            code_fji = code_fji.reshape(BLOCK_F, BLOCK_J, 2 * BLOCK_P)
            if TABLE:  # gathered on the chip: loading by code took twice the instructions
                flat = code_fji.to(tl.int32).reshape(BLOCK_F * BLOCK_J * 2 * BLOCK_P)
                level_fji = tl.gather(levels_16, flat, 0).reshape(BLOCK_F, BLOCK_J, 2 * BLOCK_P)
            else:  # 0 to 15; LOWEST is in the offset
                level_fji = code_fji.to(tl.float32)

            if DOT:
                w_fji = level_fji * scale_fj[:, :, None] + offset_fj[:, :, None]
                w_fd = w_fji.to(x_bji.dtype).reshape(BLOCK_F, BLOCK_J * 2 * BLOCK_P)
                x_bd = x_bji.reshape(BLOCK_B, BLOCK_J * 2 * BLOCK_P)
                if WIDEN:
                    w_fd, x_bd = w_fd.to(tl.float32), x_bd.to(tl.float32)
                y_fb = tl.dot(w_fd, x_bd.trans(1, 0), y_fb, input_precision="ieee")
            else:
                x_1ji = x_bji.to(tl.float32)
                y_fj += tl.sum(level_fji * x_1ji, axis=2) * scale_fj
                y_fj += tl.sum(x_1ji, axis=2) * offset_fj

    y_bf = y_fb.trans(1, 0) if DOT else tl.sum(y_fj, axis=1)[None, :]
    here_bf = b[:, None] * F + f[None, :]
    mask_bf = mask_b[:, None] & mask_f[None, :]
    tl.store(y_ptr + here_bf, y_bf.to(y_ptr.dtype.element_ty), mask=mask_bf)


INTERPRETED = interpreted(_product)


def launch(
    x_BD: Tensor,
    packed: Tensor,
    levels_16: Tensor | int,
    scale_FJ: Tensor,
    offset_FJ: Tensor | None,
    group_size: int,
    dot: bool | None,
    block_F: int | None,
    block_bytes: int | None,
) -> Tensor:
    """Run the kernel on tensors that `check_int4` has seen. Only their last axes must be dense."""
    (B, D), (F, J) = x_BD.shape, scale_FJ.shape
    y_BF = torch.empty((B, F), dtype=x_BD.dtype, device=x_BD.device)
    if 0 in (B, D, F):
        return y_BF.zero_()
    x_BD, packed, scale_FJ = map(_dense_rows, (x_BD, packed, scale_FJ))
    table = isinstance(levels_16, Tensor)
    offset = scale_FJ if offset_FJ is None else _dense_rows(offset_FJ)
    blocks = choose_blocks(B, D, J, group_size, x_BD.itemsize == 2, dot, block_F, block_bytes)
    grid = (triton.cdiv(F, blocks["BLOCK_F"]), triton.cdiv(B, blocks["BLOCK_B"]))
    _product[grid](
        x_BD, packed, levels_16.contiguous() if table else scale_FJ, scale_FJ, offset, y_BF,
        B, D, F, J, packed.shape[1],
        x_BD.stride(0), packed.stride(0), scale_FJ.stride(0), offset.stride(0),
        LOWEST=0 if table else levels_16, TABLE=table, OFFSET=offset_FJ is not None,
        # Triton's interpreter (3.9) takes bf16's bits for whole numbers where it multiplies tiles.
        WIDEN=INTERPRETED and x_BD.dtype == torch.bfloat16,
        **blocks,
    )  # fmt: skip
    return y_BF


def choose_blocks(
    B: int,
    D: int,
    J: int,
    group_size: int,
    half: bool,
    dot: bool | None = None,
    block_F: int | None = None,
    block_bytes: int | None = None,
) -> dict[str, int | bool]:
    """How much a program takes at a time.

    Each of a warp's 32 threads best reads 16 bytes at once, 512 together, which are 1024 weights of
    one row; some rows of w more for each, so that what was read of x serves again.
    """
    if dot is None:
        dot = half and B > SUM_ROWS  # on tensor cores fp32 would lose bits
    block_B = max(8, triton.next_power_of_2(min(B, DOT_ROWS))) if dot else SUM_ROWS
    block_F = block_F or (32 if dot else 16)
    block_bytes = block_bytes or (128 if dot else 512)
    group_bytes = (min(group_size, D) + 1) // 2
    block_P = min(triton.next_power_of_2(group_bytes), block_bytes)
    block_J = min(triton.next_power_of_2(J), block_bytes // block_P)
    if dot:  # which sums over 16 or more at a time
        block_P = max(block_P, 8 // block_J)
    return dict(
        GROUP_BYTES=group_bytes, DOT=dot, BLOCK_B=block_B, BLOCK_F=block_F, BLOCK_J=block_J,
        BLOCK_P=block_P, num_warps=min(4, max(1, block_F // 16)) if dot else 4,
    )  # fmt: skip


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
