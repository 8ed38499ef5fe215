"""Hybrids as data: which layer keeps what, and the bytes that come of it at any context.

A hybrid has a few attention layers, whose keys and values grow with the context, among many layers
of fixed size. Each kind below says what one layer of it holds for one sequence; a `Hybrid` is a
tuple of them. It is the memory that `States` has: states of sums in fp32, all else in the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lecture_util.model.config import PUBLISHED, Config
from lecture_util.model.transformer import Block, Transformer
from lecture_util.roofline.symbolic import larger, positive, sizes

from .based import WindowBlock
from .linear_attention import LinearAttentionBlock
from .mamba import MambaBlock

KIB = 1024
CONTEXTS = tuple(4 * KIB * 4**i for i in range(5))  # 4K, 16K, 64K, 256K, 1M


@dataclass(frozen=True)
class Attention:
    """Keys and values of all S tokens: 2*K*H numbers each."""

    K: Any
    H: Any

    def kv(self, S: Any, dtype_bytes: Any) -> Any:
        return 2 * S * self.K * self.H * dtype_bytes

    def state(self, S: Any, dtype_bytes: Any) -> Any:
        return 0


@dataclass(frozen=True)
class Window:
    """Keys and values of the last W-1 tokens; the newest brings its own."""

    K: Any
    H: Any
    W: Any

    def kv(self, S: Any, dtype_bytes: Any) -> Any:
        return 0

    def state(self, S: Any, dtype_bytes: Any) -> Any:
        held = S + self.W - 1 - larger(S, self.W - 1)  # so the smaller of the two
        return 2 * held * self.K * self.H * dtype_bytes


@dataclass(frozen=True)
class Linear:
    """A sum of M by H in fp32 for each of N heads, and the normaliser's M where there is one."""

    N: Any
    M: Any
    H: Any
    normalised: bool = True

    def kv(self, S: Any, dtype_bytes: Any) -> Any:
        return 0

    def state(self, S: Any, dtype_bytes: Any) -> Any:
        return 4 * self.N * self.M * (self.H + (1 if self.normalised else 0))


@dataclass(frozen=True)
class Mamba:
    """E*Z numbers in fp32, and the last W-1 inputs of the convolution."""

    E: Any
    Z: Any = 16
    W: Any = 4

    def kv(self, S: Any, dtype_bytes: Any) -> Any:
        return 0

    def state(self, S: Any, dtype_bytes: Any) -> Any:
        return 4 * self.E * self.Z + dtype_bytes * (self.W - 1) * self.E


Layer = Attention | Window | Linear | Mamba


@dataclass(frozen=True)
class Hybrid:
    """A stack, bottom layer first. note: where the sizes come from, and what is our assumption."""

    layers: tuple[Layer, ...]
    note: str = ""

    @property
    def kinds(self) -> str:
        """One letter a layer: A attention, w window, l linear attention, m Mamba."""
        letters = {Attention: "A", Window: "w", Linear: "l", Mamba: "m"}
        return "".join(letters[type(layer)] for layer in self.layers)


@dataclass(frozen=True)
class Memory:
    """Bytes: keys and values that grow with the context, and what does not."""

    kv: Any
    state: Any

    @property
    def total(self) -> Any:
        return self.kv + self.state


def memory_bytes(hybrid: Hybrid, S: Any, B: Any = 1, dtype_bytes: Any = 2) -> Memory:
    """What B sequences of S tokens hold, as integers or SymPy symbols."""
    S, B, dtype_bytes = *sizes(0, S=S), *sizes(B=B), positive("dtype_bytes", dtype_bytes, "2")
    return Memory(
        B * sum(layer.kv(S, dtype_bytes) for layer in hybrid.layers),
        B * sum(layer.state(S, dtype_bytes) for layer in hybrid.layers),
    )


def memory_table(
    contexts: Sequence[int] = CONTEXTS, B: int = 1, dtype_bytes: int = 2
) -> dict[str, dict[int, Memory]]:
    """Each of HYBRIDS at each context: {name: {S: Memory}}."""
    return {
        name: {S: memory_bytes(hybrid, S, B, dtype_bytes) for S in contexts}
        for name, hybrid in HYBRIDS.items()
    }


def hybrid_block(
    kinds: str, makers: Mapping[str, Callable[[Config, int], nn.Module]]
) -> Callable[[Config, int], nn.Module]:
    """A stack spelt out, for Transformer(config, block=hybrid_block("lllA", makers)).

    makers: what stands for each letter, {"A": Block, "l": LinearAttentionBlock, ...}.
    """
    if missing := sorted(set(kinds) - set(makers)):
        raise ValueError(f"kinds={kinds!r} has {missing[0]!r}: makers has only {', '.join(makers)}")

    def block(config: Config, layer: int) -> nn.Module:
        if config.L != len(kinds):
            raise ValueError(f"kinds={kinds!r} has {len(kinds)} layers but the config L={config.L}")
        return makers[kinds[layer]](config, layer)

    return block


def attention_layers(model: Transformer) -> list[int]:
    """The layers that need keys and values, as `States` wants them named."""
    return [i for i, layer in enumerate(layout_of(model).layers) if isinstance(layer, Attention)]


def layout_of(model: Transformer) -> Hybrid:
    """A model's layers as data, to know its memory before it runs."""
    return Hybrid(tuple(_layer_of(block, model.config) for block in model.blocks))


def _layer_of(block: nn.Module, config: Config) -> Layer:
    if isinstance(block, WindowBlock):
        return Window(config.K, config.H, block.W)
    if isinstance(block, LinearAttentionBlock):
        return Linear(config.N, block.num_features, config.H)
    if isinstance(block, MambaBlock):
        E, Z = block.A_log_EZ.shape
        return Mamba(E, Z, block.conv_EW.shape[1])
    if type(block) is Block:
        return Attention(config.K, config.H)
    raise TypeError(f"{type(block).__name__}: not a layer whose memory is known here")


LLAMA = PUBLISHED["llama-3-8b"]  # 3.1 has its layers
_attention = Attention(LLAMA.K, LLAMA.H)
_jamba_mamba = Mamba(E=2 * 4096)
_based = (Window(LLAMA.K, LLAMA.H, W=64), Linear(LLAMA.N, 1 + 16 + 16**2, LLAMA.H))

# Jamba and MiniMax: arXiv:2403.19887 and arXiv:2501.08313, and the models' own config.json. Their
# experts take the place of MLPs and hold nothing between tokens.
HYBRIDS: dict[str, Hybrid] = {
    "attention": Hybrid((_attention,) * LLAMA.L, "Llama-3.1-8B: 32 layers of 8 KV heads of 128"),
    "jamba": Hybrid(
        (*[_jamba_mamba] * 4, Attention(K=8, H=128), *[_jamba_mamba] * 3) * 4,
        "Jamba-v0.1: 1 attention layer in 8, E=8192, Z=16, W=4; the scan's state in fp32 is ours",
    ),
    "minimax-01": Hybrid(
        (*[Linear(N=64, M=128, H=128, normalised=False)] * 7, Attention(K=8, H=128)) * 10,
        "MiniMax-Text-01: 7 linear layers to 1 softmax, 64 heads of 128, softmax in groups of 8; "
        "states of all 64 heads in fp32 are our assumption",
    ),
    "based": Hybrid(
        _based * (LLAMA.L // 2),
        "assumed: windows of 64 and Taylor layers of width 16 in turn, shaped as in `attention`",
    ),
    "mamba": Hybrid((_jamba_mamba,) * LLAMA.L, "assumed: Jamba's Mamba layer 32 times"),
}
