"""What latent attention costs: FLOPs and bytes of its two modes, by formula."""

from __future__ import annotations

from typing import Any

from lecture_util.roofline import Cost
from lecture_util.roofline.symbolic import is_symbolic, positive, sizes

from .latent_cache import MLA


def mla_cost(
    B: Any, S: Any, T: Any, N: Any, shape: MLA, *, absorbed: bool, dtype_bytes: Any = 2
) -> Cost:
    """T queries of N heads over S cached latents, from projected queries to mixed values.

    Scores stay on the chip, as do queries taken to the latent. Naive keys and values do not: they
    are as large as the cache that MLA does away with, so they are written and read back.

    Absorbed does 2C + R multiply-adds a query, key and head, naive only nope + R + v; but naive
    first expands all S latents, at C*(nope + v) each and head, however few the queries. For
    DeepSeek-V2's widths that evens out at T = 171, while S is far longer. So expanding suits
    prefill and absorbing decode, where it also spares the trip of the expanded keys and values.

    Cost:   absorbed: 2*B*T*N*(C*(nope + v) + S*(2*C + R)) FLOPs;
            naive:    2*B*N*S*(C*(nope + v) + T*(nope + R + v)) FLOPs.
    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 (absorbing); the counts are ours.
    """
    B, S, T, N = sizes(B=B, S=S, T=T, N=N)
    if not is_symbolic(T - S) and T > S:
        raise ValueError(f"T={T} exceeds S={S}: S counts every position, the T new ones included")
    width = positive("dtype_bytes", dtype_bytes, "2")
    C, R, J, U = shape.C, shape.R, shape.nope, shape.v
    weights, latents = N * C * (J + U), B * S * (C + R)
    queries, mixed = B * T * N * (J + R), B * T * N * U
    if absorbed:
        flops = 2 * B * T * weights + 2 * B * T * S * N * (C + R + C)
        expanded = 0
    else:
        flops = 2 * B * S * weights + 2 * B * T * S * N * (J + R + U)
        expanded = B * S * N * (J + R + U)
    return Cost(
        flops=flops,
        bytes_read=width * (weights + latents + queries + expanded),
        bytes_written=width * (mixed + expanded),
    )


def mla_decode_cost(
    B: Any, S: Any, N: Any, shape: MLA, absorbed: bool = True, dtype_bytes: Any = 2
) -> Cost:
    """One new token a sequence, in one layer: `mla_cost` at T = 1.

    Absorbed, its intensity tends to N*(2*C + R)/(C + R) FLOPs a byte of 16 bits as S grows: N
    query heads share one KV head, and the latent serves as key and as value. It stays well below
    while B*S is small against N*C*(nope + v)/(C + R): W_UK and W_UV are read at every step.
    """
    return mla_cost(B, S, 1, N, shape, absorbed=absorbed, dtype_bytes=dtype_bytes)
