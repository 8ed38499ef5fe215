"""Causal attention over grouped KV heads, and rotary position embeddings.

Two versions of attention: `attention_by_hand`, the definition, and `attend`, the same numbers from
torch's fused kernel. A test holds them together.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as nnf
from torch import Tensor

from .config import Config
from .shapes import ShapeError, check_same_kind, check_shapes

KV_REMEDY = "pass KV heads as the cache holds them, before any repeating"


def causal_mask(positions_BT: Tensor, S: int, window: int | None = None) -> Tensor:
    """Slot s is visible to a query at position p if s <= p, itself included.

    window: W, the keys a query may see, itself included: also s > p - W. None for all.

    Shapes: positions_BT -> mask_BTS, bool, True where the query may look.
    """
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"window={window!r}: expected a whole number, at least 1, or None for all")
    slots_S = torch.arange(S, device=positions_BT.device)
    mask_BTS = slots_S <= positions_BT[..., None]
    if window is not None:
        mask_BTS &= slots_S > positions_BT[..., None] - window
    return mask_BTS


def attention_by_hand(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask_BTS: Tensor | None = None
) -> Tensor:
    """Attention written out: score, mask, softmax, average.

    Without a mask the T queries are the last T of the S positions, and each sees itself and all
    before it. Query head n reads KV head n // G.

    Shapes: q_BTNH, k_BSKH, v_BSKH, mask_BTS (bool) -> out_BTNH.
    Cost:   4*B*T*S*N*H FLOPs, and B*N*T*S scores in memory, which `attend` never stores.
    Source: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    T, K, G = _check(q_BTNH, k_BSKH, v_BSKH)
    S, H = k_BSKH.shape[1], q_BTNH.shape[-1]
    if mask_BTS is None:
        positions_T = torch.arange(S - T, S, device=q_BTNH.device)
        mask_BTS = causal_mask(positions_T, S)[None]
    q_BTKGH = q_BTNH.unflatten(2, (K, G))  # @inspect q_BTKGH
    scores_BKGTS = torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH) / math.sqrt(H)
    scores_BKGTS = scores_BKGTS.masked_fill(~mask_BTS[:, None, None], -torch.inf)
    wide = torch.promote_types(scores_BKGTS.dtype, torch.float32)  # @inspect scores_BKGTS
    weights_BKGTS = scores_BKGTS.softmax(-1, dtype=wide)  # @inspect weights_BKGTS
    out_BTKGH = torch.einsum("bkgts,bskh->btkgh", weights_BKGTS.to(v_BSKH.dtype), v_BSKH)
    return out_BTKGH.flatten(2, 3)  # @inspect out_BTKGH


def attend(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask_BTS: Tensor | None = None
) -> Tensor:
    """`attention_by_hand` through torch's fused kernel: no score ever reaches memory.

    In prefill the kernel skips what a causal mask hides. Otherwise the G heads that share a KV head
    are handed over as so many more queries of it, which saves the kernel from reading the cache G
    times: six to eight times faster in bf16 on a CPU (measured at T=1, G=3).

    Shapes: q_BTNH, k_BSKH, v_BSKH, mask_BTS (bool) -> out_BTNH; one dtype, one device.
    Cost:   4*B*T*S*N*H FLOPs over 4*B*S*K*H + 4*B*T*N*H bytes of 16-bit tensors.
    Raises: ShapeError if B, S, K or H disagree, or N is no multiple of K.
    """
    T, K, G = _check(q_BTNH, k_BSKH, v_BSKH)
    S = k_BSKH.shape[1]
    k_BKSH, v_BKSH = k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2)
    if mask_BTS is None and T == S:
        q_BNTH = q_BTNH.transpose(1, 2)
        out_BNTH = nnf.scaled_dot_product_attention(
            q_BNTH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=G > 1
        )
        return out_BNTH.transpose(1, 2)
    if mask_BTS is None and T > 1:  # torch's is_causal would align the T queries to the first keys
        mask_BTS = causal_mask(torch.arange(S - T, S, device=q_BTNH.device), S)[None]
    q_BKMH = q_BTNH.unflatten(2, (K, G)).transpose(1, 2).flatten(2, 3)  # M = T*G queries a KV head
    mask_B1MS = None if mask_BTS is None else mask_BTS.repeat_interleave(G, dim=1)[:, None]
    out_BKMH = nnf.scaled_dot_product_attention(q_BKMH, k_BKSH, v_BKSH, attn_mask=mask_B1MS)
    return out_BKMH.unflatten(2, (T, G)).transpose(1, 2).flatten(2, 3)


def rope_frequencies(config: Config, device: torch.device | str | None = None) -> Tensor:
    """Radians a position turns each pair of dimensions by; H/2 of them, fp32.

    Source: Su et al. 2021, arXiv:2104.09864; Llama 3's scaling as in transformers.
    """
    exponent = torch.arange(0, config.H, 2, device=device, dtype=torch.float32) / config.H
    frequency = 1 / config.rope_base**exponent
    if (s := config.rope_scaling) is None:
        return frequency
    turns = s.original_context * frequency / (2 * math.pi)  # in the original context
    keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / s.factor


def rope_table(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, fp32, with an axis for heads.

    Shapes: frequencies (H/2), positions (...) -> two of (..., 1, H/2).
    """
    angle = positions[..., None, None].float() * frequencies
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn dimension i together with i + H/2 (the half-split convention of Hugging Face weights).

    Shapes: x (..., heads, H), table as from `rope_table` -> like x; computed in fp32, cast once.
    """
    cos, sin = table
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _check(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> tuple[int, int, int]:
    size = check_shapes(KV_REMEDY, q_BTNH=q_BTNH, k_BSKH=k_BSKH, v_BSKH=v_BSKH)
    check_same_kind(q_BTNH=q_BTNH, k_BSKH=k_BSKH, v_BSKH=v_BSKH)
    T, S, N, K = (size[axis] for axis in "TSNK")
    if N % K:
        raise ShapeError(f"q_BTNH has N={N} but k_BSKH has K={K}: N must be a multiple of K")
    if T > S:
        raise ShapeError(f"q_BTNH has T={T} but k_BSKH has S={S}: the queries are among the keys")
    return T, K, N // K
