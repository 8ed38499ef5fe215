"""The selective scan in Triton. Imported by `selective_scan` when it is needed, not before.

A program takes one sequence and BLOCK_E of its channels, holds their states in registers and walks
through the T tokens. With T = 1 it is a decode step: the state is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lecture_util.kernels.interpreted import interpreted


@triton.jit
def _scan(
    u_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, state_ptr, y_ptr, new_state_ptr,
    T, E, Z,
    stride_u_row, stride_u_tok, stride_delta_row, stride_delta_tok,
    stride_B_row, stride_B_tok, stride_C_row, stride_C_tok, stride_y_row, stride_y_tok,
    WIDE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2^31
    e = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    z = tl.arange(0, BLOCK_Z)
    mask_e, mask_z = e < E, z < Z
    mask_ez = mask_e[:, None] & mask_z[None, :]
    here_ez = e[:, None] * Z + z[None, :]

    A_ez = tl.load(A_ptr + here_ez, mask=mask_ez, other=0).to(WIDE)
    D_e = tl.load(D_ptr + e, mask=mask_e, other=0).to(WIDE)
    state_ez = tl.load(state_ptr + row * E * Z + here_ez, mask=mask_ez, other=0).to(WIDE)

    u_ptr += row * stride_u_row
    delta_ptr += row * stride_delta_row
    B_ptr += row * stride_B_row
    C_ptr += row * stride_C_row
    y_ptr += row * stride_y_row
    for _ in range(T):
        u_e = tl.load(u_ptr + e, mask=mask_e, other=0).to(WIDE)
        delta_e = tl.load(delta_ptr + e, mask=mask_e, other=0).to(WIDE)
        B_z = tl.load(B_ptr + z, mask=mask_z, other=0).to(WIDE)
        C_z = tl.load(C_ptr + z, mask=mask_z, other=0).to(WIDE)
        decay_ez = tl.exp(delta_e[:, None] * A_ez)
        state_ez = decay_ez * state_ez + (delta_e * u_e)[:, None] * B_z[None, :]
        y_e = tl.sum(state_ez * C_z[None, :], axis=1) + D_e * u_e
        tl.store(y_ptr + e, y_e.to(y_ptr.dtype.element_ty), mask=mask_e)
        u_ptr += stride_u_tok  # pointers walk: a token's number times its stride may pass 2^31
        delta_ptr += stride_delta_tok
        B_ptr += stride_B_tok
        C_ptr += stride_C_tok
        y_ptr += stride_y_tok
    tl.store(new_state_ptr + row * E * Z + here_ez, state_ez, mask=mask_ez)


INTERPRETED = interpreted(_scan)


def launch(
    u_BTE: Tensor,
    delta_BTE: Tensor,
    A_EZ: Tensor,
    B_BTZ: Tensor,
    C_BTZ: Tensor,
    D_E: Tensor,
    state_BEZ: Tensor,
    block_E: int,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on tensors that `check_scan` has seen. The old state stays as it is.

    Slices of wider tensors, as a projection that makes several of these at once returns them, are
    read where they lie; only their last axis must be dense.
    """
    (B, T, E), Z = u_BTE.shape, A_EZ.shape[1]
    u_BTE, delta_BTE, B_BTZ, C_BTZ = map(_dense_rows, (u_BTE, delta_BTE, B_BTZ, C_BTZ))
    y_BTE = torch.empty((B, T, E), dtype=u_BTE.dtype, device=u_BTE.device)
    state_BEZ = state_BEZ.contiguous()
    new_state_BEZ = torch.empty_like(state_BEZ)
    strides = [
        stride
        for tensor in (u_BTE, delta_BTE, B_BTZ, C_BTZ, y_BTE)
        for stride in tensor.stride()[:2]
    ]
    _scan[(B, triton.cdiv(E, block_E))](
        u_BTE, delta_BTE, A_EZ.contiguous(), B_BTZ, C_BTZ, D_E.contiguous(), state_BEZ,
        y_BTE, new_state_BEZ,
        T, E, Z, *strides,
        WIDE=tl.float64 if state_BEZ.dtype == torch.float64 else tl.float32,
        BLOCK_E=block_E, BLOCK_Z=triton.next_power_of_2(Z),
    )  # fmt: skip
    return y_BTE, new_state_BEZ


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
