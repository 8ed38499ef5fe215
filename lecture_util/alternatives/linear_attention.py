"""Linear attention: a similarity that factors, so that the past sums up into a matrix.

Attention weighs token s for query t by exp(q_t·k_s), which needs every k_s at hand. Where the
weight is φ(q_t)·φ(k_s) instead, the query moves out of the sum:

    out_t = φ(q_t)·Σ φ(k_s) v_sᵀ / φ(q_t)·Σ φ(k_s),    both sums over s ≤ t

The sums are the state: kv_BNMH and the normaliser sum_BNM, of one size at any context. Below, q and
k have gone through φ already, M features a head, and v has H numbers a head.

Source: Katharopoulos et al. 2020, arXiv:2006.16236; the Taylor features from Arora et al. 2024,
arXiv:2402.18668, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lecture_util.model.attention import apply_rope
from lecture_util.model.config import Config
from lecture_util.model.kv_cache import Cache
from lecture_util.model.linear import Linear
from lecture_util.model.shapes import ShapeError, check_shapes
from lecture_util.model.transformer import Block

from .state import State, keep_state, state_of

Features = Callable[[Tensor], Tensor]


def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1, so x + 1 above 0 and exp(x) below: positive. M = the width of x."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())  # (exp(x) - 1) + 1 would round to 0


def softmax_features(x: Tensor) -> Tensor:
    """exp(x) over its sum: positive. M = the width of x."""
    return x.softmax(-1)


def taylor_features(x: Tensor, scale: float | None = None) -> Tensor:
    """1, x and all products of two entries, so weighted that φ(q)·φ(k) = 1 + s + s²/2.

    That is exp(s) to second order for s = scale * q·k, attention's own score. It equals
    (1 + (1 + s)²)/2, so it is at least 1/2: a normaliser of n tokens can't fall below n/2.

    scale: d**-0.5 for x of width d if None, as in attention; 1 for the bare product.

    Shapes: x (..., d) -> (..., M), M = 1 + d + d².
    """
    d = x.shape[-1]
    x = x * (d**-0.5 if scale is None else scale) ** 0.5  # half of the scale from q, half from k
    pairs = (x[..., :, None] * x[..., None, :]).flatten(-2)
    return torch.cat((torch.ones_like(x[..., :1]), x, pairs * 0.5**0.5), dim=-1)


def parallel(q_BTNM: Tensor, k_BTNM: Tensor, v_BTNH: Tensor) -> Tensor:
    """The definition: every query against every key up to its own, then weights that add to 1.

    Shapes: q_BTNM, k_BTNM, v_BTNH -> out_BTNH.
    Cost:   2*B*N*T²*(M + H) FLOPs: quadratic, as attention.
    """
    wide = _check(q_BTNM, k_BTNM, v_BTNH)
    weights_BNTS = torch.einsum("btnm,bsnm->bnts", q_BTNM.to(wide), k_BTNM.to(wide)).tril()
    weights_BNTS = weights_BNTS / _positive(weights_BNTS.sum(-1, keepdim=True))
    return torch.einsum("bnts,bsnh->btnh", weights_BNTS, v_BTNH.to(wide)).to(v_BTNH.dtype)


def recurrent(
    q_BTNM: Tensor, k_BTNM: Tensor, v_BTNH: Tensor, state: State | None = None
) -> tuple[Tensor, State]:
    """Token by token through the state: what decoding does. A new state comes back; in fp32.

    Shapes: q_BTNM, k_BTNM, v_BTNH -> out_BTNH, (kv_BNMH, sum_BNM).
    Cost:   4*N*M*H FLOPs a token, over the bytes of the state, at any context.
    """
    wide = _check(q_BTNM, k_BTNM, v_BTNH)
    kv_BNMH, sum_BNM = _start(k_BTNM, v_BTNH, wide, state)
    out = []
    for t in range(q_BTNM.shape[1]):
        q_BNM, k_BNM, v_BNH = (x[:, t].to(wide) for x in (q_BTNM, k_BTNM, v_BTNH))
        kv_BNMH = kv_BNMH + k_BNM[..., :, None] * v_BNH[..., None, :]  # not +=: see state.py
        sum_BNM = sum_BNM + k_BNM
        read_BNH = torch.einsum("bnm,bnmh->bnh", q_BNM, kv_BNMH)
        out.append(read_BNH / _positive((q_BNM * sum_BNM).sum(-1, keepdim=True)))
    return torch.stack(out, dim=1).to(v_BTNH.dtype), (kv_BNMH, sum_BNM)


def chunked(
    q_BTNM: Tensor,
    k_BTNM: Tensor,
    v_BTNH: Tensor,
    state: State | None = None,
    *,
    chunk: int = 64,
) -> tuple[Tensor, State]:
    """The definition within a chunk, the state for all before it: training and prefill.

    Shapes: as `recurrent`; any T, the last chunk may be short.
    Cost:   4*N*M*H FLOPs a token and 2*N*chunk*(M + H) within chunks: linear in T, and in matmuls.
    """
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: expected a whole number, at least 1")
    wide = _check(q_BTNM, k_BTNM, v_BTNH)
    kv_BNMH, sum_BNM = _start(k_BTNM, v_BTNH, wide, state)
    empty, out = state is None, []
    for q, k, v in zip(*(x.split(chunk, dim=1) for x in (q_BTNM, k_BTNM, v_BTNH)), strict=True):
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        weights_BNTS = torch.einsum("btnm,bsnm->bnts", q, k).tril()
        read_BTNH = torch.einsum("bnts,bsnh->btnh", weights_BNTS, v)
        total_BTN = weights_BNTS.sum(-1).transpose(1, 2)
        if not empty:
            read_BTNH = read_BTNH + torch.einsum("btnm,bnmh->btnh", q, kv_BNMH)
            total_BTN = total_BTN + torch.einsum("btnm,bnm->btn", q, sum_BNM)
        out.append(read_BTNH / _positive(total_BTN[..., None]))
        kv_BNMH = kv_BNMH + torch.einsum("btnm,btnh->bnmh", k, v)
        sum_BNM = sum_BNM + k.sum(1)
        empty = False
    return torch.cat(out, dim=1).to(v_BTNH.dtype), (kv_BNMH, sum_BNM)


class LinearAttentionBlock(Block):
    """A Transformer's block with linear attention in place of the softmax kind.

    All N heads have keys, values and a state of their own, G or not. Its cache is `States`.

    width:  entries of a query and a key before the features; 16 make 273 Taylor features.
    rotate: turn queries and keys by their positions first. Without it such a layer sees which
            tokens came before, and not in which order.
    """

    def __init__(
        self,
        config: Config,
        layer: int,
        width: int = 16,
        features: Features = taylor_features,
        rotate: bool = False,
    ) -> None:
        super().__init__(config, layer)
        if type(width) is not int or width < 1:
            raise ValueError(f"width={width!r}: expected a whole number, at least 1")
        if rotate and (width % 2 or config.H % width):
            raise ValueError(
                f"width={width} with rotate=True: expected an even divisor of H={config.H}, whose "
                "rotary frequencies it takes every so many of"
            )
        self.parts, self.features, self.rotate = (width, width, config.H), features, rotate
        self.qkv = Linear(config.D, config.N * sum(self.parts), bias=config.qkv_bias)

    @property
    def num_features(self) -> int:
        """M, of which the state has H numbers each and one more."""
        return self.features(torch.zeros(self.parts[0])).shape[-1]

    def attention(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        q, k, v_BTNH = self.qkv(x_BTD).unflatten(-1, (self.heads[0], -1)).split(self.parts, dim=-1)
        if self.rotate:  # of H/2 frequencies these are the ones that a head of this width has
            table = tuple(part[..., :: v_BTNH.shape[-1] // q.shape[-1]] for part in rope)
            q, k = apply_rope(q, table), apply_rope(k, table)
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        q_BTNM, k_BTNM = self.features(q.to(wide)), self.features(k.to(wide))
        form = recurrent if x_BTD.shape[1] == 1 else chunked
        mixed_BTNH, state = form(q_BTNM, k_BTNM, v_BTNH, state_of(cache, self.layer))
        keep_state(cache, self.layer, state)
        return self.out(mixed_BTNH.flatten(-2))


def _check(q_BTNM: Tensor, k_BTNM: Tensor, v_BTNH: Tensor) -> torch.dtype:
    """The dtype to sum in: fp32, or fp64 where that came in."""
    size = check_shapes(
        "all heads have keys of their own", q_BTNM=q_BTNM, k_BTNM=k_BTNM, v_BTNH=v_BTNH
    )
    if not size["T"]:
        raise ShapeError("q_BTNM has T=0 tokens: expected at least 1")
    return torch.promote_types(v_BTNH.dtype, torch.float32)


def _start(k_BTNM: Tensor, v_BTNH: Tensor, wide: torch.dtype, state: State | None) -> State:
    """The state before the first token: the one given, or nothing summed up yet."""
    B, _, N, M = k_BTNM.shape
    H = v_BTNH.shape[-1]
    if state is None:
        new = v_BTNH.new_zeros
        return new(B, N, M, H, dtype=wide), new(B, N, M, dtype=wide)
    kv_BNMH, sum_BNM = state
    if kv_BNMH.shape != (B, N, M, H) or sum_BNM.shape != (B, N, M):
        raise ShapeError(
            f"the state has shapes {tuple(kv_BNMH.shape)} and {tuple(sum_BNM.shape)}: expected "
            f"{(B, N, M, H)} and {(B, N, M)}, as these keys and values make it"
        )
    return kv_BNMH.to(wide), sum_BNM.to(wide)


def _positive(total: Tensor) -> Tensor:
    """Weights that all round to 0 should give 0, not 0/0. Taylor's add up to 1/2 and more."""
    return total.clamp_min(torch.finfo(total.dtype).tiny)
