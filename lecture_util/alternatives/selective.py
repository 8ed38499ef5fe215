"""Two ways through the selective scan beside its loop, which `kernels.selective_scan` defines.

A step is h -> a*h + b. Two steps in a row are one such step again,

    a2*(a1*h + b1) + b2  =  (a2*a1)*h + (a2*b1 + b2),

so steps may be gathered in any grouping: the scan is associative, and need not go token by token.

Source: Gu & Dao 2023, arXiv:2312.00752, section 3.3.2; Blelloch 1990, "Prefix sums and their
applications".
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lecture_util.kernels.selective_scan import (
    Result,
    check_scan,
    selective_scan,
    selective_scan_fused,
    selective_step,
)

__all__ = ["chunked_selective_scan", "fast_selective_scan", "selective_scan", "selective_step"]

ENOUGH_ROWS = 8  # sequences in a batch that keep a CPU as busy as chunks would; measured


def chunked_selective_scan(
    u_BTE: Tensor,
    delta_BTE: Tensor,
    A_EZ: Tensor,
    B_BTZ: Tensor,
    C_BTZ: Tensor,
    D_E: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int | None = None,
) -> Result:
    """`selective_scan` with all chunks of the sequence walked at once, then tied together.

    Every chunk starts from an empty state; its true start is then known from the chunk before and
    is added, decayed by as much as has passed. Decays are multiplied, never divided by: a long
    chunk makes them vanish where a quotient of cumulative products would be 0/0.

    chunk: tokens of a chunk; about the root of T if None, which makes the fewest steps.

    Shapes: as `selective_scan`; any T, the last chunk may be short.
    Cost:   chunk + T/chunk steps in a row for T, about twice the arithmetic, and four tensors of
            B*T*E*Z numbers.
    """
    state_BEZ = check_scan(u_BTE, delta_BTE, A_EZ, B_BTZ, C_BTZ, D_E, state)
    wide, T = state_BEZ.dtype, u_BTE.shape[1]
    if chunk is None:
        chunk = math.isqrt(T - 1) + 1
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: expected a whole number, at least 1")
    # Tokens with Δ = 0 fill the last chunk: exp(0) = 1 and Δu = 0, so they leave the state alone.
    pad = (0, 0, 0, -T % chunk)
    u, delta, B, C = (
        nnf.pad(x.to(wide), pad).unflatten(1, (-1, chunk)) for x in (u_BTE, delta_BTE, B_BTZ, C_BTZ)
    )  # now (B, number of chunks, chunk, ...)
    decays = torch.exp(delta[..., None] * A_EZ.to(wide)).unbind(2)
    taken = ((delta * u)[..., None] * B[..., None, :]).unbind(2)

    local, passed = [taken[0]], [decays[0]]  # each chunk from nothing; what a start would decay by
    for a, b in zip(decays[1:], taken[1:], strict=True):
        local.append(a * local[-1] + b)
        passed.append(a * passed[-1])

    starts = []  # the state each chunk truly starts from
    for a, b in zip(passed[-1].unbind(1), local[-1].unbind(1), strict=True):
        starts.append(state_BEZ)
        state_BEZ = a * state_BEZ + b
    start = torch.stack(starts, dim=1)

    states = torch.stack([b + a * start for a, b in zip(passed, local, strict=True)], dim=2)
    y_BTE = (states @ C[..., None]).squeeze(-1).flatten(1, 2)[:, :T] + D_E.to(wide) * u_BTE
    return y_BTE.to(u_BTE.dtype), state_BEZ


def fast_selective_scan(
    u_BTE: Tensor,
    delta_BTE: Tensor,
    A_EZ: Tensor,
    B_BTZ: Tensor,
    C_BTZ: Tensor,
    D_E: Tensor,
    state: Tensor | None = None,
) -> Result:
    """`selective_scan` in the form that is quick here: a kernel, chunks, or the plain loop.

    A batch is parallel already, so on a CPU chunks pay only while it is small: for E = 128, Z = 16
    on two cores, 1,024 tokens of one sequence took 5 ms in chunks and 28 ms in the loop; a
    training step on 64 sequences of 32 tokens took 71 ms in chunks and 22 ms in the loop.
    """
    tensors = (u_BTE, delta_BTE, A_EZ, B_BTZ, C_BTZ, D_E, state)
    B, T = u_BTE.shape[:2]
    if u_BTE.is_cuda:
        return selective_scan_fused(*tensors)
    if T > 2 and B < ENOUGH_ROWS:
        return chunked_selective_scan(*tensors)
    return selective_scan(*tensors)
