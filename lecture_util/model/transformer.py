"""The Transformer of the course: a Llama-family decoder in one screen.

It never asks how keys are stored (`kv_cache`) and its linear layers don't care about leading axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from .attention import apply_rope, rope_frequencies, rope_table
from .config import Config
from .kv_cache import Cache, NoCache
from .linear import Linear
from .shapes import ShapeError, TensorMismatch


class RMSNorm(nn.Module):
    """Divide by the root mean square, in fp32; scale by a learned weight.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, D: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        unit = nnf.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return self.weight * unit.to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)).

    q, k and v come from one matrix and gate and up from another: fewer, larger products.
    """

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        D, F, N, K, H = config.D, config.F, config.N, config.K, config.H
        self.layer, self.heads = layer, (N, K, K)
        self.norm_attention = RMSNorm(D, config.norm_eps)
        self.qkv = Linear(D, (N + 2 * K) * H, bias=config.qkv_bias)
        self.out = Linear(N * H, D, bias=False)
        self.norm_mlp = RMSNorm(D, config.norm_eps)
        self.gate_up = Linear(D, 2 * F, bias=False)
        self.down = Linear(F, D, bias=False)

    def attention(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        N, K, _ = self.heads
        qkv_BTMH = self.qkv(x_BTD).unflatten(-1, (N + 2 * K, -1))
        qk_BTMH, v_BTKH = qkv_BTMH.split((N + K, K), dim=-2)
        q_BTNH, k_BTKH = apply_rope(qk_BTMH, rope).split((N, K), dim=-2)
        mixed_BTNH = cache.attend(self.layer, q_BTNH, k_BTKH, v_BTKH)
        return self.out(mixed_BTNH.flatten(-2))

    def mlp(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.down(nnf.silu(gate_BTF) * up_BTF)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD), rope, cache)
        return x_BTD + self.mlp(self.norm_mlp(x_BTD))


class Transformer(nn.Module):
    """Tokens to logits.

    block: makes layer number `layer`, called as block(config, layer) and run as block(x, rope,
           cache): where another kind of layer, or a stack of several kinds, comes in.
    rope_width: how many dimensions of a head are rotated, if not all H.

    Shapes: tokens_BT -> logits_BTV.
    Cost:   2 FLOPs per weight and token in the linear layers, 4*T*S*N*H per layer in attention.
    """

    def __init__(
        self,
        config: Config,
        block: Callable[[Config, int], nn.Module] = Block,
        rope_width: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.rope_config = config if rope_width is None else replace(config, H=rope_width)
        self.embed = nn.Embedding(config.V, config.D)
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.L))
        self.norm = RMSNorm(config.D, config.norm_eps)
        self.head = Linear(config.D, config.V, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def features(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """What the head reads: the last layer's output, normed. tokens_BT -> x_BTD."""
        if tokens_BT.is_floating_point() or tokens_BT.ndim != 2:
            raise ShapeError(
                f"tokens_BT is {tokens_BT.dtype} of shape {tuple(tokens_BT.shape)}: "
                "expected whole numbers of shape (B, T), such as torch.tensor([[1, 2, 3]])"
            )
        if tokens_BT.device != self.device:
            raise TensorMismatch(
                f"tokens_BT is on {tokens_BT.device} but the model is on {self.device}: "
                f"move them, tokens.to({str(self.device)!r})"
            )
        if (T := tokens_BT.shape[1]) > self.config.max_context:
            raise ShapeError(
                f"T={T} tokens, but the context is {self.config.max_context}: cut them"
            )
        cache = NoCache() if cache is None else cache
        positions_BT = cache.positions(tokens_BT.shape, tokens_BT.device)
        rope = rope_table(rope_frequencies(self.rope_config, tokens_BT.device), positions_BT)
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rope, cache)
        cache.extend(tokens_BT.shape[-1])
        return self.norm(x_BTD)

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        return self.head(self.features(tokens_BT, cache))

    @classmethod
    def random(
        cls, config: Config, seed: int = 0, dtype: torch.dtype = torch.float32, **kind
    ) -> Transformer:
        """Seeded random weights of standard deviation 0.02, for tests and timing.

        kind: `block` and `rope_width`, as for Transformer itself.
        """
        generator = torch.Generator().manual_seed(seed)
        model = cls(config, **kind)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" not in name:
                    weight.normal_(0, 0.02, generator=generator)
        return model.to(dtype).eval().requires_grad_(False)
