"""The selective scan: one state a channel, decayed and fed by amounts the input itself chooses.

    here             paper    what it is
    u_BTE            x        the input, E channels
    delta_BTE        Δ        step size, positive: how much time passes, so how much is taken in
    A_EZ             A        rates of decay, negative, one for each channel and state
    B_BTZ, C_BTZ     B, C     how the input enters the state, how the state is read
    D_E              D        how much of u goes straight to the output
    state_BEZ        h        what is remembered: Z numbers a channel, at any context

`selective_step` is the definition and `selective_scan` its loop: the reference for the kernel in
`selective_scan_triton`, which `selective_scan_fused` runs where it can.

Source: Gu & Dao 2023, arXiv:2312.00752, algorithm 2 and section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lecture_util.model.shapes import ShapeError, TensorMismatch, check_shapes

Result = tuple[Tensor, Tensor]


def selective_step(
    u_BE: Tensor,
    delta_BE: Tensor,
    A_EZ: Tensor,
    B_BZ: Tensor,
    C_BZ: Tensor,
    D_E: Tensor,
    state_BEZ: Tensor,
) -> Result:
    """One token: let the state decay for a time Δ, add the input, read it. A new state comes back.

    The decay exp(ΔA) is exact for any Δ (zero-order hold, ZOH). The input is weighted by ΔB, one
    step of Euler; ZOH would have (exp(ΔA) - 1)/A·B, which is ΔB + O(Δ²). Mamba takes the simpler.

    Shapes: u_BE, delta_BE, A_EZ, B_BZ, C_BZ, D_E, state_BEZ -> y_BE, state_BEZ.
    Cost:   about 6*B*E*Z FLOPs and B*E*Z exponentials; the state is read once and written once.
    """
    decay_BEZ = torch.exp(delta_BE[..., None] * A_EZ)  # @inspect decay_BEZ
    taken_BEZ = (delta_BE * u_BE)[..., None] @ B_BZ[:, None]  # @inspect taken_BEZ
    state_BEZ = decay_BEZ * state_BEZ + taken_BEZ  # @inspect state_BEZ
    y_BE = (state_BEZ @ C_BZ[..., None]).squeeze(-1) + D_E * u_BE  # @inspect y_BE
    return y_BE, state_BEZ


def selective_scan(
    u_BTE: Tensor,
    delta_BTE: Tensor,
    A_EZ: Tensor,
    B_BTZ: Tensor,
    C_BTZ: Tensor,
    D_E: Tensor,
    state: Tensor | None = None,
) -> Result:
    """All tokens, one step after the other: the definition of the scan.

    state: where the last chunk ended, in fp32 (fp64 if u is); None for the start of a sequence.

    Shapes: u_BTE, delta_BTE, A_EZ, B_BTZ, C_BTZ, D_E, state_BEZ -> y_BTE in u's dtype, state_BEZ.
    Cost:   T steps, each waiting for the one before.
    Raises: ShapeError, TensorMismatch.
    """
    state_BEZ = check_scan(u_BTE, delta_BTE, A_EZ, B_BTZ, C_BTZ, D_E, state)
    wide = state_BEZ.dtype
    A_EZ, D_E = A_EZ.to(wide), D_E.to(wide)
    tokens = zip(*(x.to(wide).unbind(1) for x in (u_BTE, delta_BTE, B_BTZ, C_BTZ)), strict=True)
    y = []
    for u_BE, delta_BE, B_BZ, C_BZ in tokens:
        y_BE, state_BEZ = selective_step(u_BE, delta_BE, A_EZ, B_BZ, C_BZ, D_E, state_BEZ)
        y.append(y_BE)
    return torch.stack(y, dim=1).to(u_BTE.dtype), state_BEZ


def selective_scan_fused(
    u_BTE: Tensor,
    delta_BTE: Tensor,
    A_EZ: Tensor,
    B_BTZ: Tensor,
    C_BTZ: Tensor,
    D_E: Tensor,
    state: Tensor | None = None,
) -> Result:
    """`selective_scan` by the Triton kernel on a GPU, by the reference elsewhere.

    The reference also computes where a gradient is wanted: the kernel has only a forward pass.

    Cost:   the state stays in registers for all T tokens, so u, delta, B, C and y move once, where
            the reference moves several tensors of B*E*Z at each step.
    """
    tensors = (u_BTE, delta_BTE, A_EZ, B_BTZ, C_BTZ, D_E, state)
    gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if not u_BTE.is_cuda or gradient:
        return selective_scan(*tensors)
    return selective_scan_triton(*tensors)


def selective_scan_triton(
    u_BTE: Tensor,
    delta_BTE: Tensor,
    A_EZ: Tensor,
    B_BTZ: Tensor,
    C_BTZ: Tensor,
    D_E: Tensor,
    state: Tensor | None = None,
    *,
    block_E: int = 32,
) -> Result:
    """`selective_scan` by the Triton kernel, or an error that says why it cannot.

    On a CPU it runs in Triton's interpreter: set TRITON_INTERPRET=1 before Triton is imported.

    block_E: channels a program takes, a power of two; E need not be a multiple.
    """
    if type(block_E) is not int or block_E < 1 or block_E & (block_E - 1):
        raise ValueError(f"block_E={block_E!r}: expected a power of two, such as 32")
    tensors = (u_BTE, delta_BTE, A_EZ, B_BTZ, C_BTZ, D_E)
    state_BEZ = check_scan(*tensors, state)
    try:
        from lecture_util.kernels import selective_scan_triton as kernel
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "Triton is not installed here (it comes for Linux on x86-64): use selective_scan"
        ) from error
    if not (u_BTE.is_cuda or kernel.INTERPRETED):
        raise RuntimeError(
            f"Triton compiles for GPUs but u_BTE is on {u_BTE.device}: use selective_scan, or set "
            "TRITON_INTERPRET=1 in the environment before Python starts"
        )
    return kernel.launch(*tensors, state_BEZ, block_E)


def check_scan(
    u_BTE: Tensor,
    delta_BTE: Tensor,
    A_EZ: Tensor,
    B_BTZ: Tensor,
    C_BTZ: Tensor,
    D_E: Tensor,
    state_BEZ: Tensor | None,
) -> Tensor:
    """Do these fit together? Returns the state to start from: zeros if none was given.

    Raises: ShapeError if axes disagree or T = 0; TensorMismatch for another device, or a state
            that is not kept in fp32 (fp64 if u is).
    """
    named = dict(
        u_BTE=u_BTE, delta_BTE=delta_BTE, A_EZ=A_EZ, B_BTZ=B_BTZ, C_BTZ=C_BTZ, D_E=D_E
    )  # fmt: skip
    wide = torch.promote_types(u_BTE.dtype, torch.float32)
    if state_BEZ is not None:
        named["state_BEZ"] = state_BEZ
        if state_BEZ.dtype != wide:
            raise TensorMismatch(
                f"state_BEZ is {state_BEZ.dtype}: expected {wide} for u_BTE in {u_BTE.dtype}, "
                "since what is rounded away at each step never comes back"
            )
    sizes = check_shapes(**named)
    if sizes["T"] == 0:
        raise ShapeError("u_BTE has T=0: a scan needs at least one token")
    for name, tensor in named.items():
        if tensor.device != u_BTE.device:
            raise TensorMismatch(
                f"{name} is on {tensor.device} but u_BTE is on {u_BTE.device}: move one"
            )
    if state_BEZ is None:
        shape = [sizes[axis] for axis in "BEZ"]
        state_BEZ = torch.zeros(shape, dtype=wide, device=u_BTE.device)
    return state_BEZ
