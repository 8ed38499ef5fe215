"""Attention of one new token a sequence to keys and values that lie in pages of one shared pool.

    here            what it is
    k_MPKH, v_MPKH  the pool: M pages of P slots, in no order, whoever they belong to
    tables_BJ       page j of sequence b is tables_BJ[b, j]; past the pages it needs, anything
    lengths_B       tokens in each sequence, the newest included; 0 for a row that only pads
    q_BNH           the newest token's queries; its key and value are in the pool already

Position s of sequence b is slot s % P of page tables_BJ[b, s // P]. Slots past a length belong to
nobody yet and may hold NaN, of which nothing reaches a result. `paged_attention` is the definition,
and the reference for the kernel in `paged_attention_triton`, which `paged_attention_fused` runs
where it can.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4.1; the kernel's splits are those of
        Flash-Decoding (Dao et al. 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lecture_util.model.attention import attend
from lecture_util.model.shapes import ShapeError, TensorMismatch, check_same_kind, check_shapes

GROUP_POSITIONS = 4096  # gathered at a time, with padding: a copy that mostly stays in the caches
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Group(NamedTuple):
    """Sequences of similar length whose keys are gathered together."""

    rows: Tensor | None  # which of the B; None: all of them, in order
    slots: Tensor  # of the pool flattened to M*P, for each row its positions in order
    mask_BTS: Tensor | None  # T=1; None if all of them are equally long


class PageIndex(NamedTuple):
    """Where every key of a step lies: made once by `page_index`, then used in all layers."""

    groups: tuple[Group, ...]
    M: int
    P: int
    B: int


def page_index(tables_BJ: Tensor, lengths_B: Tensor, M: int, P: int) -> PageIndex:
    """Find the slots of all sequences, the longest first, in groups that are padded to one length.

    A padded position is given the slot of its sequence's first, which the mask hides: so no slot
    that nobody wrote is ever read.

    M, P: of the pool, as in k_MPKH.

    Cost:   from a seventh to a half of what attention then takes in one layer (two CPU cores, pages
            of 16, 1 to 32 sequences of 50 to 1,000). Reads lengths on the host: a GPU waits.
    Raises: ShapeError, TensorMismatch; ValueError naming the row whose length or page cannot be.
    """
    _check_tables(tables_BJ, lengths_B)
    tables_BJ, lengths = tables_BJ.long(), lengths_B.tolist()
    _check_values(tables_BJ, lengths, M, P)
    if lengths and min(lengths) and len(lengths) * max(lengths) <= GROUP_POSITIONS:
        return PageIndex((_group(None, tables_BJ, lengths_B, lengths, P),), M, P, len(lengths))
    order = sorted((b for b, length in enumerate(lengths) if length), key=lambda b: -lengths[b])
    groups = []
    while order:
        count = max(1, GROUP_POSITIONS // lengths[order[0]])
        rows, order = torch.tensor(order[:count], device=tables_BJ.device), order[count:]
        held = [lengths[b] for b in rows.tolist()]
        groups.append(_group(rows, tables_BJ[rows], lengths_B[rows], held, P))
    return PageIndex(tuple(groups), M, P, len(lengths))


def _group(
    rows: Tensor | None, tables_BJ: Tensor, lengths_B: Tensor, lengths: list[int], P: int
) -> Group:
    S = max(lengths)
    positions_S = torch.arange(S, device=tables_BJ.device)
    mask_BS = positions_S < lengths_B[:, None]
    positions_BS = torch.where(mask_BS, positions_S, 0)
    slots_BS = tables_BJ.gather(1, positions_BS // P) * P + positions_BS % P
    return Group(rows, slots_BS.flatten(), None if min(lengths) == S else mask_BS[:, None])


def paged_attention(
    q_BNH: Tensor,
    k_MPKH: Tensor,
    v_MPKH: Tensor,
    tables_BJ: Tensor,
    lengths_B: Tensor,
    index: PageIndex | None = None,
) -> Tensor:
    """Bring each sequence's keys and values together, then attend as to any cache.

    Query head n reads KV head n // G. A sequence of length 0 gets zeros.

    index: `page_index(tables_BJ, lengths_B, M, P)` if it is at hand; None: made here. With it,
           tables and lengths have been looked at and are not again.

    Shapes: q_BNH, k_MPKH, v_MPKH, tables_BJ, lengths_B (int32 or int64) -> out_BNH.
    Cost:   4*S*N*H FLOPs a sequence; 4*S*K*H bytes of a 16-bit pool are read, written where they
            lie in order, and read again. The kernel only reads them, once.
    Raises: ShapeError, TensorMismatch, ValueError.
    """
    M, P = k_MPKH.shape[:2]
    if index is None:
        check_paged(q_BNH, k_MPKH, v_MPKH, tables_BJ, lengths_B)
        index = page_index(tables_BJ, lengths_B, M, P)
    elif (index.B, index.M, index.P) != (len(q_BNH), M, P):
        raise ShapeError(
            f"index is for B={index.B}, M={index.M}, P={index.P} but q_BNH and k_MPKH have "
            f"B={len(q_BNH)}, M={M}, P={P}: make one with page_index for these tables"
        )
    out_BNH = torch.zeros_like(q_BNH, memory_format=torch.contiguous_format)
    for rows, slots, mask_BTS in index.groups:
        q_B1NH = q_BNH[:, None] if rows is None else q_BNH[rows, None]
        k_BSKH, v_BSKH = (_take(pool, slots, len(q_B1NH)) for pool in (k_MPKH, v_MPKH))
        mixed_BNH = attend(q_B1NH, k_BSKH, v_BSKH, mask_BTS)[:, 0]
        if rows is None:
            return mixed_BNH
        out_BNH[rows] = mixed_BNH
    return out_BNH


def gather_pages(pool_MPKH: Tensor, table_J: Tensor, length: int) -> Tensor:
    """One sequence's keys, or values, in order and side by side, for a chunk of prefill.

    Shapes: pool_MPKH, table_J (may be longer than needed) -> (length, K, H), contiguous.
    Raises: ShapeError, TensorMismatch, ValueError.
    """
    M, P = (check_shapes(pool_MPKH=pool_MPKH, table_J=table_J)[axis] for axis in "MP")
    _check_integers(table_J=table_J)
    _check_place("pool_MPKH", pool_MPKH, table_J=table_J)
    if type(length) is not int or not 0 <= length <= len(table_J) * P:
        raise ValueError(
            f"length={length!r}: expected a whole number, 0 to {len(table_J) * P}, which the "
            f"table's {len(table_J)} pages of {P} hold"
        )
    pages = table_J[: -(-length // P)]
    if not pages.is_cuda:  # where reading the values would wait for the GPU
        _check_values(pages[None], [length], M, P, name="table_J")
    return pool_MPKH.index_select(0, pages).flatten(0, 1)[:length]


def paged_attention_fused(
    q_BNH: Tensor,
    k_MPKH: Tensor,
    v_MPKH: Tensor,
    tables_BJ: Tensor,
    lengths_B: Tensor,
    index: PageIndex | None = None,
) -> Tensor:
    """`paged_attention` by the Triton kernel on a GPU, by the definition elsewhere.

    The definition also computes where a gradient is wanted: the kernel has only a forward pass. The
    kernel needs no index, and does not look whether pages and lengths are possible: it would have
    to wait for the GPU, and could not be captured in a CUDA graph.
    """
    tensors = (q_BNH, k_MPKH, v_MPKH)
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if q_BNH.is_cuda and q_BNH.dtype in FLOATS and not gradient:
        return paged_attention_triton(*tensors, tables_BJ, lengths_B)
    return paged_attention(*tensors, tables_BJ, lengths_B, index)


def paged_attention_triton(
    q_BNH: Tensor,
    k_MPKH: Tensor,
    v_MPKH: Tensor,
    tables_BJ: Tensor,
    lengths_B: Tensor,
    *,
    num_splits: int | None = None,
    block_S: int | None = None,
) -> Tensor:
    """`paged_attention` by the Triton kernel, or an error that says why it cannot.

    On a CPU it runs in Triton's interpreter: set TRITON_INTERPRET=1 before Triton is imported.

    num_splits: programs that share one sequence's KV head; None: enough to fill the GPU, chosen
                from B, K and the width of the table, never from the lengths.
    block_S:    positions a program takes at a time, a power of two from 16; None: chosen.
    """
    for name, value, least in (("num_splits", num_splits, 1), ("block_S", block_S, 16)):
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name}={value!r}: expected a whole number, at least {least}")
    if block_S is not None and block_S & (block_S - 1):
        raise ValueError(f"block_S={block_S}: expected a power of two, such as 64")
    check_paged(q_BNH, k_MPKH, v_MPKH, tables_BJ, lengths_B)
    if q_BNH.dtype not in FLOATS:
        raise TensorMismatch(f"q_BNH is {q_BNH.dtype}: the kernel takes 16 or 32 bits of float")
    try:
        from lecture_util.kernels import paged_attention_triton as kernel
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "Triton is not installed here (it comes for Linux on x86-64): use paged_attention"
        ) from error
    if not (q_BNH.is_cuda or kernel.INTERPRETED):
        raise RuntimeError(
            f"Triton compiles for GPUs but q_BNH is on {q_BNH.device}: use paged_attention, or set "
            "TRITON_INTERPRET=1 in the environment before Python starts"
        )
    return kernel.launch(q_BNH, k_MPKH, v_MPKH, tables_BJ, lengths_B, num_splits, block_S)


def check_paged(
    q_BNH: Tensor, k_MPKH: Tensor, v_MPKH: Tensor, tables_BJ: Tensor, lengths_B: Tensor
) -> None:
    """Do these fit together? Looks at no value, so a GPU need not be waited for.

    Raises: ShapeError if axes disagree; TensorMismatch for another dtype or device than computes.
    """
    named = dict(q_BNH=q_BNH, k_MPKH=k_MPKH, v_MPKH=v_MPKH)
    size = check_shapes(**named, tables_BJ=tables_BJ, lengths_B=lengths_B)
    check_same_kind(**named)
    if not q_BNH.is_floating_point():
        raise TensorMismatch(f"q_BNH is {q_BNH.dtype}: expected floating-point numbers")
    if not size["K"] or size["N"] % size["K"]:
        raise ShapeError(
            f"q_BNH has N={size['N']} but k_MPKH has K={size['K']}: N must be a multiple of K"
        )
    _check_tables(tables_BJ, lengths_B)
    _check_place("q_BNH", q_BNH, tables_BJ=tables_BJ)


def _take(pool_MPKH: Tensor, slots: Tensor, B: int) -> Tensor:
    M, P = pool_MPKH.shape[:2]
    if pool_MPKH.stride(0) == P * pool_MPKH.stride(1) or 1 in (M, P):
        chosen = pool_MPKH.flatten(0, 1).index_select(0, slots)
    else:  # flatten would copy the whole pool
        chosen = pool_MPKH[slots // P, slots % P]
    return chosen.unflatten(0, (B, -1))


def _check_tables(tables_BJ: Tensor, lengths_B: Tensor) -> None:
    check_shapes(tables_BJ=tables_BJ, lengths_B=lengths_B)
    _check_integers(tables_BJ=tables_BJ, lengths_B=lengths_B)
    _check_place("tables_BJ", tables_BJ, lengths_B=lengths_B)


def _check_integers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TensorMismatch(f"{name} is {tensor.dtype}: expected int32 or int64")


def _check_place(like: str, tensor: Tensor, **other: Tensor) -> None:
    ((name, moved),) = other.items()
    if moved.device != tensor.device:
        raise TensorMismatch(
            f"{name} is on {moved.device} but {like} is on {tensor.device}: move one"
        )


def _check_values(tables_BJ: Tensor, lengths: list[int], M: int, P: int, name="tables_BJ") -> None:
    J = tables_BJ.shape[1]
    for b, length in enumerate(lengths):
        if not 0 <= length <= J * P:
            raise ValueError(
                f"lengths_B[{b}] is {length}: expected 0 to {J * P}, which the {J} pages of {P} "
                "in a row of tables_BJ hold"
            )
    first_J = torch.arange(0, J * P, P, device=tables_BJ.device)
    needed_BJ = first_J < torch.tensor(lengths, device=tables_BJ.device)[:, None]
    strange_BJ = needed_BJ & ((tables_BJ < 0) | (tables_BJ >= M))
    if strange_BJ.any():
        b, j = strange_BJ.nonzero()[0].tolist()
        where = f"[{b}, {j}]" if name == "tables_BJ" else f"[{j}]"
        raise ValueError(
            f"{name}{where} is {tables_BJ[b, j].item()}: expected a page from 0 to {M - 1}, "
            f"since the sequence has {lengths[b]} tokens in pages of {P}"
        )
