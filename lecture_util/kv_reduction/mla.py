"""Multi-head latent attention: cache one small latent a token instead of every head's K and V.

Keys and values are both linear in the latent c, so there are two ways to attend over it:

naive     expand c into each head's keys and values, then attend as always. The definition.
absorbed  (q W) . c is q . (W c): take the query to the latent's side once, attend over the latents
          as if they were one KV head that all heads share, and expand only what was mixed.

A rotation would stand between the two matrices and depend on the position, so it could not be
folded. Positions therefore go into R extra dimensions of their own, shared by all heads.

Axes besides the usual: C the latent, R the rotated part of a key, J the part that is not ("nope"),
U a head's value, X whatever is scored against each other: J + R, or C + R in the latent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lecture_util.model.attention import apply_rope, causal_mask
from lecture_util.model.config import Config
from lecture_util.model.kv_cache import Cache, NoCache
from lecture_util.model.linear import Linear
from lecture_util.model.shapes import ShapeError, check_same_kind, check_shapes
from lecture_util.model.transformer import Block, RMSNorm, Transformer

from .latent_cache import MLA, LatentCache
from .mla_cost import mla_cost

MODES = ("auto", "naive", "absorbed")
INNER_EPS = 1e-6  # of the norms on latents, whatever the model's own; as DeepSeek's


def attend_scaled(
    q_BTNX: Tensor, k_BSKX: Tensor, v_BSKU: Tensor, scale: float, mask_BTS: Tensor | None = None
) -> Tensor:
    """Attention whose values may differ in width from its keys, with its scale spelled out.

    Left alone, torch would take X^-0.5 from the queries it sees, and in the latent that is not
    the width of a head's key. The heads that share a KV head become more queries of it.

    Shapes: q_BTNX, k_BSKX, v_BSKU, mask_BTS (bool, None to see all) -> out_BTNU.
    Cost:   2*B*T*S*N*(X + U) FLOPs.
    """
    size = check_shapes(q_BTNX=q_BTNX, k_BSKX=k_BSKX, v_BSKU=v_BSKU)
    check_same_kind(q_BTNX=q_BTNX, k_BSKX=k_BSKX, v_BSKU=v_BSKU)
    T, N, K = size["T"], size["N"], size["K"]
    G = N // K
    q_BKMX = q_BTNX.unflatten(2, (K, G)).transpose(1, 2).flatten(2, 3)  # M = T*G queries a KV head
    mask_B1MS = None if mask_BTS is None else mask_BTS.repeat_interleave(G, dim=1)[:, None]
    out_BKMU = nnf.scaled_dot_product_attention(
        q_BKMX, k_BSKX.transpose(1, 2), v_BSKU.transpose(1, 2), attn_mask=mask_B1MS, scale=scale
    )
    return out_BKMU.unflatten(2, (T, G)).transpose(1, 2).flatten(2, 3)


class MLABlock(Block):
    """A layer whose attention goes through a latent; norms and MLP are Block's.

    mode: "naive", "absorbed", or "auto" for the one with fewer FLOPs in this pass: expanding pays
          when many queries share it (prefill, training), absorbing when few do (decode).

    `expand` has no bias, and nothing stands between latent and key: else it could not be absorbed.
    """

    def __init__(self, config: Config, layer: int, shape: MLA, mode: str = "auto") -> None:
        super().__init__(config, layer)
        if config.qkv_bias:
            raise ValueError("config.qkv_bias is True: MLA's projections have none, so set False")
        del self.qkv, self.heads  # what follows stands in their place
        D, N = config.D, config.N
        self.shape, self.N, self.mode = shape, N, check_mode(mode)
        C, R, J, U = shape.C, shape.R, shape.nope, shape.v
        self.query_down = None
        if shape.q_rank is not None:
            self.query_down = Linear(D, shape.q_rank, bias=False)
            self.norm_query = RMSNorm(shape.q_rank, INNER_EPS)
        self.query = Linear(shape.q_rank or D, N * (J + R), bias=False)
        self.compress = Linear(D, C + R, bias=False)
        self.norm_latent = RMSNorm(C, INNER_EPS)
        self.expand = Linear(C, N * (J + U), bias=False)  # W_UK and W_UV, head by head
        self.out = Linear(N * U, D, bias=False)

    def attention(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        shape = self.shape
        if 2 * (width := rope[0].shape[-1]) != shape.R:
            raise ShapeError(
                f"the rotary table is {2 * width} wide but R={shape.R}: make the model with "
                f"mla(config, shape), or Transformer(..., rope_width={shape.R})"
            )
        q_BTNX = self.query(self.squeezed(x_BTD)).unflatten(-1, (self.N, -1))
        q_BTNJ, q_BTNR = q_BTNX.split((shape.nope, shape.R), dim=-1)
        q_BTNR = apply_rope(q_BTNR, rope)
        latent_BSX, mask_BTS = self.remembered(self.latent(x_BTD, rope), cache)
        attend = getattr(self, self.mode_for(x_BTD.shape[1], latent_BSX))
        return self.out(attend(q_BTNJ, q_BTNR, latent_BSX, mask_BTS).flatten(-2))

    def squeezed(self, x_BTD: Tensor) -> Tensor:
        """What queries are projected from: x itself, or x through the q_rank."""
        return x_BTD if self.query_down is None else self.norm_query(self.query_down(x_BTD))

    def latent(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """What is cached of x: c, normed, and beside it the shared key part, rotated, un-normed.

        Shapes: x_BTD -> latent_BTX with X = C + R.
        """
        c_BTC, k_BTR = self.compress(x_BTD).split((self.shape.C, self.shape.R), dim=-1)
        k_BT1R = apply_rope(k_BTR[:, :, None], rope)
        return torch.cat((self.norm_latent(c_BTC), k_BT1R[:, :, 0]), dim=-1)

    def remembered(self, latent_BTX: Tensor, cache: Cache) -> tuple[Tensor, Tensor | None]:
        """The latents of all positions so far, and which of them each query sees."""
        if type(cache) is NoCache:  # a subclass may look elsewhere than back
            positions_BT = cache.positions(latent_BTX.shape[:2], latent_BTX.device)
            return latent_BTX, causal_mask(positions_BT, latent_BTX.shape[1])
        if not isinstance(cache, LatentCache):
            raise TypeError(
                f"cache is a {type(cache).__name__}: MLA keeps latents, so pass "
                "shape.new_cache(config, B, capacity, dtype, device), or None"
            )
        if (cache.shape.C, cache.shape.R) != (self.shape.C, self.shape.R):
            raise ShapeError(
                f"the cache holds C={cache.shape.C}, R={cache.shape.R} but the model has "
                f"C={self.shape.C}, R={self.shape.R}: make it with this model's shape.new_cache"
            )
        return cache.update(self.layer, latent_BTX)

    def naive(
        self, q_BTNJ: Tensor, q_BTNR: Tensor, latent_BSX: Tensor, mask_BTS: Tensor | None
    ) -> Tensor:
        """Every head gets its own keys and values, made anew from the latents."""
        c_BSC, k_BSR = latent_BSX.split((self.shape.C, self.shape.R), dim=-1)
        kv_BSNX = self.expand(c_BSC).unflatten(-1, (self.N, -1))
        k_BSNJ, v_BSNU = kv_BSNX.split((self.shape.nope, self.shape.v), dim=-1)
        k_BSNR = k_BSR[:, :, None].expand(-1, -1, self.N, -1)
        q_BTNX = torch.cat((q_BTNJ, q_BTNR), dim=-1)
        k_BSNX = torch.cat((k_BSNJ, k_BSNR), dim=-1)
        return attend_scaled(q_BTNX, k_BSNX, v_BSNU, self.shape.scale, mask_BTS)

    def absorbed(
        self, q_BTNJ: Tensor, q_BTNR: Tensor, latent_BSX: Tensor, mask_BTS: Tensor | None
    ) -> Tensor:
        """All heads attend over the latents themselves: one KV head, read once for N queries."""
        weight_NXC = self.expand.weight.unflatten(0, (self.N, -1))
        key_NJC, value_NUC = weight_NXC.split((self.shape.nope, self.shape.v), dim=1)
        q_BTNC = torch.einsum("btnj,njc->btnc", q_BTNJ, key_NJC)
        q_BTNX = torch.cat((q_BTNC, q_BTNR), dim=-1)
        k_BS1X = latent_BSX[:, :, None]
        v_BS1C = k_BS1X[..., : self.shape.C]
        mixed_BTNC = attend_scaled(q_BTNX, k_BS1X, v_BS1C, self.shape.scale, mask_BTS)
        return torch.einsum("btnc,nuc->btnu", mixed_BTNC, value_NUC)

    def mode_for(self, T: int, latent_BSX: Tensor) -> str:
        """The mode of a pass of T queries over these latents."""
        if check_mode(self.mode) != "auto":
            return self.mode
        B, S = latent_BSX.shape[:2]
        flops = {
            mode: mla_cost(B, S, T, self.N, self.shape, absorbed=mode == "absorbed").flops
            for mode in ("absorbed", "naive")
        }
        return min(flops, key=flops.get)


def mla_layers(shape: MLA, mode: str = "auto") -> dict[str, Any]:
    """What makes a Transformer attend through latents: `Transformer.random(config, **these)`."""
    return {"block": partial(MLABlock, shape=shape, mode=mode), "rope_width": shape.R}


def mla(config: Config, shape: MLA, mode: str = "auto") -> Transformer:
    """A Transformer with MLA in every layer, freshly initialised, ready to train.

    config gives D, F, N (as K*G), L and V; its H is not used: MLA's head widths are in `shape`.
    """
    return Transformer(config, **mla_layers(shape, mode))


def set_mode(model: Transformer, mode: str) -> None:
    """Choose how every layer attends from now on; weights and caches stay as they are."""
    for block in model.blocks:
        block.mode = check_mode(mode)


def check_mode(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    return mode
