"""Paged attention in Triton. Imported by `paged_attention` when it is needed, not before.

A program takes one sequence, one KV head with all G queries that read it, and one split of the
positions; it walks along them BLOCK_S at a time, looks up each position's page, and keeps a running
softmax in fp32. So every key and value is read once. With one long sequence and few heads most of a
GPU would have nothing to do, hence the splits: each leaves its average and the logarithm of its
sum of weights, by which `_merge` puts them together.

Where a split starts follows from the length, which is read on the GPU, so a launch captured in a
CUDA graph is right for any lengths.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lecture_util.kernels.interpreted import interpreted

BLOCK_BYTES = 16384  # of keys a program takes at a time, and as many of values
LEAST_POSITIONS = 256  # a split is worth its merging only if it may have as many
MOST_SPLITS = 128


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, out_ptr, lse_ptr,
    scale, G,
    stride_q_row, stride_q_head, stride_q_h,
    stride_k_page, stride_k_slot, stride_k_head, stride_k_h,
    stride_v_page, stride_v_slot, stride_v_head, stride_v_h,
    stride_tables_row, stride_tables_page, stride_lengths,
    P: tl.constexpr, H: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)  # b * stride may pass 2^31
    kv_head = tl.program_id(1).to(tl.int64)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths_ptr + b * stride_lengths).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, BLOCK_S), num_splits) * BLOCK_S  # whole blocks for each split
    first = split * share
    end = tl.minimum(first + share, length)

    g, h = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H).to(tl.int64)
    head_g = kv_head * G + g
    mask_gh = (g < G)[:, None] & (h < H)[None, :]
    here_gh = b * stride_q_row + head_g[:, None] * stride_q_head + h[None, :] * stride_q_h
    q_gh = tl.load(q_ptr + here_gh, mask=mask_gh, other=0)
    if WIDEN:
        q_gh = q_gh.to(tl.float32)
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    tables_ptr += b * stride_tables_row

    largest_g = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    sum_g = tl.zeros((BLOCK_G,), tl.float32)
    out_gh = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    for block in range(first, end, BLOCK_S):
        s = block + tl.arange(0, BLOCK_S)
        mask_s = s < end  # of loads too: a weight of 0 times a stale NaN would be NaN
        mask_sh = mask_s[:, None] & (h < H)[None, :]
        page_s = tl.load(tables_ptr + s // P * stride_tables_page, mask=mask_s, other=0)
        page_s = page_s.to(tl.int64)  # page * stride may pass 2^31
        slot_s = (s % P).to(tl.int64)
        here_s = page_s * stride_k_page + slot_s * stride_k_slot
        k_sh = tl.load(k_ptr + here_s[:, None] + h[None, :] * stride_k_h, mask=mask_sh, other=0)
        here_s = page_s * stride_v_page + slot_s * stride_v_slot
        v_sh = tl.load(v_ptr + here_s[:, None] + h[None, :] * stride_v_h, mask=mask_sh, other=0)
        if WIDEN:
            k_sh, v_sh = k_sh.to(tl.float32), v_sh.to(tl.float32)

        scores_gs = tl.dot(q_gh, k_sh.trans(1, 0), input_precision="ieee") * scale
        scores_gs = tl.where(mask_s[None, :], scores_gs, float("-inf"))
        new_g = tl.maximum(largest_g, tl.max(scores_gs, axis=1))
        keep_g = tl.exp2(largest_g - new_g)  # scale makes scores powers of 2
        weights_gs = tl.exp2(scores_gs - new_g[:, None])
        sum_g = sum_g * keep_g + tl.sum(weights_gs, axis=1)
        out_gh *= keep_g[:, None]
        out_gh = tl.dot(weights_gs.to(v_sh.dtype), v_sh, out_gh, input_precision="ieee")
        largest_g = new_g

    sum_g = tl.where(sum_g > 0, sum_g, 1)  # a split without positions leaves 0 and -inf
    out_gh = out_gh / sum_g[:, None]
    part_g = (b * tl.num_programs(1) * G + head_g) * num_splits + split
    here_gh = part_g[:, None] * H + h[None, :]
    tl.store(out_ptr + here_gh, out_gh.to(out_ptr.dtype.element_ty), mask=mask_gh)
    tl.store(lse_ptr + part_g, largest_g + tl.log2(sum_g), mask=g < G)


@triton.jit
def _merge(
    parts_ptr, lse_ptr, out_ptr, num_splits,
    H: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # of B * N
    i, h = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_H)
    mask_i, mask_h = i < num_splits, h < H
    lse_i = tl.load(lse_ptr + row * num_splits + i, mask=mask_i, other=float("-inf"))
    largest = tl.max(lse_i, axis=0)
    weights_i = tl.exp2(lse_i - tl.where(largest > float("-inf"), largest, 0))  # all 0 if none has
    here_ih = (row * num_splits + i)[:, None] * H + h[None, :]
    parts_ih = tl.load(parts_ptr + here_ih, mask=mask_i[:, None] & mask_h[None, :], other=0)
    total = tl.sum(weights_i, axis=0)
    out_h = tl.sum(parts_ih * weights_i[:, None], axis=0) / tl.where(total > 0, total, 1)
    tl.store(out_ptr + row * H + h, out_h.to(out_ptr.dtype.element_ty), mask=mask_h)


INTERPRETED = interpreted(_attend)


def launch(
    q_BNH: Tensor,
    k_MPKH: Tensor,
    v_MPKH: Tensor,
    tables_BJ: Tensor,
    lengths_B: Tensor,
    num_splits: int | None,
    block_S: int | None,
) -> Tensor:
    """Run the kernel on tensors that `check_paged` has seen, wherever their strides lead."""
    (B, N, H), (M, P, K, _) = q_BNH.shape, k_MPKH.shape
    J = tables_BJ.shape[1]
    out_BNH = torch.empty((B, N, H), dtype=q_BNH.dtype, device=q_BNH.device)
    if 0 in (B, N, H, M, P, J):
        return out_BNH.zero_()
    blocks = choose_blocks(N // K, H, q_BNH.itemsize, block_S)
    if num_splits is None:
        num_splits = choose_splits(B, K, J * P, _processors(q_BNH.device))
    parts = out_BNH
    if num_splits > 1:
        parts = torch.empty((B, N, num_splits, H), dtype=torch.float32, device=q_BNH.device)
    lse_BNI = torch.empty((B, N, num_splits), dtype=torch.float32, device=q_BNH.device)
    _attend[(B, K, num_splits)](
        q_BNH, k_MPKH, v_MPKH, tables_BJ, lengths_B, parts, lse_BNI,
        math.log2(math.e) / math.sqrt(H), N // K,
        *q_BNH.stride(), *k_MPKH.stride(), *v_MPKH.stride(), *tables_BJ.stride(),
        lengths_B.stride(0),
        P=P, H=H,
        # Triton's interpreter (3.9) takes bf16's bits for whole numbers where it multiplies tiles.
        WIDEN=INTERPRETED and q_BNH.dtype == torch.bfloat16,
        **blocks,
    )  # fmt: skip
    if num_splits > 1:
        _merge[(B * N,)](
            parts, lse_BNI, out_BNH, num_splits,
            H=H, BLOCK_I=triton.next_power_of_2(num_splits), BLOCK_H=blocks["BLOCK_H"],
        )  # fmt: skip
    return out_BNH


def choose_blocks(G: int, H: int, itemsize: int, block_S: int | None = None) -> dict[str, int]:
    """How much a program takes at a time. `tl.dot` wants 16 or more of everything."""
    block_H = max(16, triton.next_power_of_2(H))
    block_S = block_S or min(128, max(16, BLOCK_BYTES // (block_H * itemsize)))
    block_G = max(16, triton.next_power_of_2(G))
    return dict(BLOCK_G=block_G, BLOCK_S=block_S, BLOCK_H=block_H, num_warps=4, num_stages=3)


def choose_splits(B: int, K: int, positions: int, processors: int) -> int:
    """Four programs for each of the GPU's processors, if so many positions could be there.

    positions: what a row of the table could hold. Lengths, which change, are not asked for.
    """
    wanted = -(-4 * processors // (B * K))
    return max(1, min(wanted, positions // LEAST_POSITIONS, MOST_SPLITS))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
