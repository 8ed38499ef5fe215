"""BASED: a short window that is exact about the near, a linear state that sums up the far.

Window attention sees order and compares keys exactly, but forgets what is W tokens back. A linear
state forgets nothing and blurs everything. In a stack that alternates them the first can tie a
token to its neighbour and the second look it up from far away; both memories are of fixed size.

Source: Arora et al. 2024, arXiv:2402.18668, section 4. The paper's models have gated convolutions
in most layers besides; ours have none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lecture_util.model.attention import attend, causal_mask
from lecture_util.model.config import Config
from lecture_util.model.kv_cache import Cache
from lecture_util.model.shapes import ShapeError
from lecture_util.model.transformer import Block

from .linear_attention import Features, LinearAttentionBlock, taylor_features
from .state import State, keep_state, state_of


def window_attention(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, W: int, state: State | None = None
) -> tuple[Tensor, State]:
    """Attend to the last W tokens, itself included, the earlier of them from the state.

    The state holds keys and values of the last W-1 tokens, fewer at the start; W=1 holds none. It
    is left as it is and a new one comes back, so an old one stays good for a rollback. A chunk may
    be longer than W: it attends before anything is dropped.

    Shapes: q_BTNH, k_BTKH, v_BTKH -> out_BTNH, (k_BSKH, v_BSKH) of S = min(W-1, all so far).
    Cost:   4*W*N*H FLOPs a token over 4*(W-1)*K*H bytes of 16-bit state, at any context.
    """
    _check_window(W)
    if state is not None:
        for old, new in zip(state, (k_BTKH, v_BTKH), strict=True):
            if (old.shape[0], *old.shape[2:]) != (new.shape[0], *new.shape[2:]):
                raise ShapeError(
                    f"the state holds keys or values of shape {tuple(old.shape)}, the new ones "
                    f"have {tuple(new.shape)}: only the second axis, tokens, may differ"
                )
        k_BTKH, v_BTKH = (torch.cat(pair, 1) for pair in zip(state, (k_BTKH, v_BTKH), strict=True))
    T, S = q_BTNH.shape[1], k_BTKH.shape[1]  # S from here on: the state's tokens and the T new ones
    positions_T = torch.arange(S - T, S, device=q_BTNH.device)
    mask_BTS = causal_mask(positions_T, S, window=W)[None] if S > W else None
    out_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, mask_BTS)
    first = max(0, S - (W - 1))  # as a slice, [-(W-1):] would keep all at W=1
    # Without clone() a view of W-1 tokens would keep the whole chunk in memory.
    return out_BTNH, (k_BTKH[:, first:].clone(), v_BTKH[:, first:].clone())


class WindowBlock(Block):
    """A Transformer's block that sees W tokens, its own included. Its cache is `States`."""

    def __init__(self, config: Config, layer: int, W: int = 16) -> None:
        super().__init__(config, layer)
        _check_window(W)
        self.W = W

    def attention(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        return super().attention(x_BTD, rope, _Window(cache, self.W))


class _Window:
    """What Block hands q, k and v to: the window attends and the cache keeps its state."""

    def __init__(self, cache: Cache, W: int) -> None:
        self.cache, self.W = cache, W

    def attend(self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        state = state_of(self.cache, layer)
        out_BTNH, state = window_attention(q_BTNH, k_BTKH, v_BTKH, self.W, state)
        keep_state(self.cache, layer, state)
        return out_BTNH


def based_block(
    config: Config, layer: int, W: int = 16, width: int = 16, features: Features = taylor_features
) -> nn.Module:
    """Layer number `layer` of a BASED stack, Transformer(config, block=based_block).

    Window attention in the even layers, linear attention in the odd: the window comes first, since
    only it sees which token stands beside which.
    """
    if layer % 2:
        return LinearAttentionBlock(config, layer, width, features)
    return WindowBlock(config, layer, W)


def _check_window(W: int) -> None:
    if type(W) is not int or W < 1:
        raise ValueError(f"W={W!r}: expected a whole number, at least 1: a token sees itself")
