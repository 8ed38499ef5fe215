"""What each technique costs, by formula: bytes held, bytes read, the tokens a second they allow.

Holding and reading are two things. A shared cache is held once but read by every layer that uses
it, so cross-layer attention makes room for more sequences and leaves a step's attention as slow as
it was. A window or fewer heads shrink both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lecture_util.model.config import Config
from lecture_util.roofline import Accelerator, weight_bytes
from lecture_util.roofline.symbolic import is_symbolic, positive, sizes

from .layout import Layout


def cache_bytes(
    config: Config, layout: Layout, B: Any, S: Any, dtype_bytes: Any = 2, slack: int = 0
) -> Any:
    """Bytes held for B sequences of S tokens: 2*K*H numbers a token in each producer layer.

    A windowed layer holds min(S, W-1+slack) tokens: the newest query brings its own key, so W-1
    wait between steps. Consumers hold nothing. It is what LayeredCache(capacity=S) allocates.
    """
    B, S, slack = *sizes(B=B), *sizes(0, S=S, slack=slack)
    windows = [layout.layers[i].window for i in layout.producers]
    tokens = sum(S if W is None else _smaller(S, W - 1 + slack) for W in windows)
    return B * tokens * _layer_bytes(config, layout, dtype_bytes)


def read_bytes(config: Config, layout: Layout, B: Any, S: Any, dtype_bytes: Any = 2) -> Any:
    """Bytes of keys and values that a step attends to, its own token the last of the S.

    min(S, W) tokens in every layer, consumers included: each fetches its producer's keys again.
    """
    B, S = *sizes(B=B), *sizes(0, S=S)
    return B * _tokens_read(layout, S) * _layer_bytes(config, layout, dtype_bytes)


def layout_weight_bytes(config: Config, layout: Layout, dtype_bytes: Any = 2) -> Any:
    """Bytes of the weights: consumers have no key and value projections."""
    return weight_bytes(config, dtype_bytes) - dtype_bytes * _unprojected(config, layout)


def mla_cache_bytes(config: Config, C: Any, R: Any, B: Any, S: Any, dtype_bytes: Any = 2) -> Any:
    """Bytes of an MLA cache: a latent of C and one rotated key of R a token and layer.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    B, C, R, S = *sizes(B=B, C=C, R=R), *sizes(0, S=S)
    return B * S * config.L * (C + R) * positive("dtype_bytes", dtype_bytes, "2")


def mla_weight_bytes(
    config: Config, C: Any, R: Any, nope: Any = None, v: Any = None, dtype_bytes: Any = 2
) -> Any:
    """Bytes of the weights with MLA in place of the config's attention, H wide where not given.

    A layer has D*N*(nope+R) weights for queries (uncompressed, as in DeepSeek-V2-Lite), D*(C+R)
    down to the latent and the rotated key, the latent norm's C, C*N*(nope+v) up to keys and values,
    N*v*D out. Absorbed decoding reads the same matrices, applied to queries and outputs instead.
    """
    nope, v = (config.H if width is None else width for width in (nope, v))
    C, R, nope, v = sizes(C=C, R=R, nope=nope, v=v)
    dtype_bytes = positive("dtype_bytes", dtype_bytes, "2")
    matrices = config.L * _mla_matrices(config, C, R, nope, v)
    bias = config.L * (config.N + 2 * config.K) * config.H if config.qkv_bias else 0
    grouped = config.L * 2 * config.D * config.H * (config.N + config.K) + bias
    return weight_bytes(config, dtype_bytes) + dtype_bytes * (matrices + config.L * C - grouped)


@dataclass(frozen=True)
class Technique:
    """One way to keep keys and values, at a context of S tokens.

    Units: bytes of the model; bytes held and read a sequence; FLOPs of one sequence's decode step.
    """

    name: str
    S: Any
    weight_bytes: Any
    held_bytes: Any
    read_bytes: Any
    flops: Any

    def max_batch(self, memory_bytes: Any) -> int:
        """Sequences whose caches fit beside the weights; 0 if not even one does.

        Raises: ValueError if a sequence holds nothing, so that memory sets no limit.
        """
        memory_bytes = positive("memory_bytes", memory_bytes, "80e9")
        if self.held_bytes == 0:
            raise ValueError(
                f"{self.name} holds nothing between steps at S={self.S}, so memory limits no "
                "batch: choose a window of at least 2, and a context of at least 1"
            )
        return max(0, int((memory_bytes - self.weight_bytes) // self.held_bytes))

    def memory_s(self, B: Any, accelerator: Accelerator) -> Any:
        """Every weight once, and every sequence's keys and values, through the memory's bus."""
        moved = self.weight_bytes + B * self.read_bytes  # @inspect moved
        return moved / accelerator.bandwidth_bytes_per_s

    def compute_s(self, B: Any, accelerator: Accelerator) -> Any:
        return B * self.flops / accelerator.peak(accelerator.sixteen_bits)


@dataclass(frozen=True)
class Row:
    """A line of the table: a technique with as many sequences as fit, or with the B asked for.

    latency_s is the longer of memory and compute time and `bound` says which: a lower bound, so
    tokens_per_s is an upper one. None where nothing fits.
    """

    technique: str
    bytes_per_token: float
    held_bytes: Any
    weight_bytes: Any
    max_batch: int
    B: int
    latency_s: float | None
    tokens_per_s: float | None
    bound: str | None


def techniques(
    config: Config, S: Any, *, W: int = 1024, C: int = 512, R: int = 64, dtype_bytes: Any = 2
) -> list[Technique]:
    """The ways of this part on one model shape, whose N query heads all of them keep.

    Each is alone but for those whose name says more; character.ai's is MQA, 1 global layer in 6,
    W and neighbours sharing. MLA has keys and values as wide as the config's heads.
    """
    L, N = config.L, config.N
    full, cla = Layout.full(L), Layout.cross_layer(L, 2)
    window, hybrid = Layout.windowed(L, W), Layout.hybrid(L, W)
    heads = {"MHA": N, "GQA-8": 8, "MQA": 1}
    rows = [(name, K, full) for name, K in heads.items()]
    rows += [("CLA2 on GQA-8", 8, cla), ("CLA2 on MQA", 1, cla)]
    rows += [(f"window {W}", N, window), (f"window {W}, 1 layer in 6 global", N, hybrid)]
    rows += [("character.ai", 1, Layout.character_ai(L, W))]
    table = [
        technique(name, config.with_kv_heads(K), layout, S, dtype_bytes)
        for name, K, layout in rows
        if N % K == 0
    ]
    mla = mla_technique(f"MLA {C}+{R}", config, C, R, S, dtype_bytes)
    after = [t.name for t in table].index("MQA") + 1
    return [*table[:after], mla, *table[after:]]


def comparison(
    config: Config, S: int, accelerator: Accelerator, *, B: int | None = None, **shape: Any
) -> list[Row]:
    """A `Row` for each of `techniques(config, S, **shape)`.

    B: sequences decoded together; as many as fit the accelerator's memory if None.
    Left out: activations, launches, fragmentation.
    """
    (S,) = sizes(S=S)
    if B is not None:
        (B,) = sizes(B=B)
    return [_row(technique, accelerator, B) for technique in techniques(config, S, **shape)]


def _row(technique: Technique, accelerator: Accelerator, B: int | None) -> Row:
    most = technique.max_batch(accelerator.memory_bytes)
    batch = most if B is None else B
    fits = 1 <= batch <= most
    times = {
        "memory": technique.memory_s(batch, accelerator),
        "compute": technique.compute_s(batch, accelerator),
    }
    bound = max(times, key=times.get)
    return Row(
        technique=technique.name,
        bytes_per_token=technique.held_bytes / technique.S,
        held_bytes=technique.held_bytes,
        weight_bytes=technique.weight_bytes,
        max_batch=most,
        B=batch,
        latency_s=times[bound] if fits else None,
        tokens_per_s=batch / times[bound] if fits else None,
        bound=bound if fits else None,
    )


def technique(name: str, config: Config, layout: Layout, S: Any, dtype_bytes: Any = 2) -> Technique:
    """The config's own KV heads, in a stack of this layout."""
    c = config
    linear = c.L * 2 * c.D * c.H * (c.N + c.K) + _other_matrices(c)
    linear -= (c.L - layout.num_caches) * 2 * c.D * c.K * c.H
    return Technique(
        name=name,
        S=S,
        weight_bytes=layout_weight_bytes(c, layout, dtype_bytes),
        held_bytes=cache_bytes(c, layout, 1, S, dtype_bytes),
        read_bytes=read_bytes(c, layout, 1, S, dtype_bytes),
        flops=2 * linear + 4 * c.N * c.H * _tokens_read(layout, S),
    )


def mla_technique(
    name: str, config: Config, C: Any, R: Any, S: Any, dtype_bytes: Any = 2
) -> Technique:
    """MLA in every layer, absorbed, with keys and values as wide as the config's heads."""
    L, N = config.L, config.N
    scores = 2 * N * (2 * C + R) * S  # absorbed: C + R wide for a score, C for a value
    linear = L * _mla_matrices(config, C, R, config.H, config.H) + _other_matrices(config)
    return Technique(
        name=name,
        S=S,
        weight_bytes=mla_weight_bytes(config, C, R, dtype_bytes=dtype_bytes),
        held_bytes=mla_cache_bytes(config, C, R, 1, S, dtype_bytes),
        read_bytes=mla_cache_bytes(config, C, R, 1, S, dtype_bytes),
        flops=2 * linear + L * scores,
    )


def _tokens_read(layout: Layout, S: Any) -> Any:
    return sum(S if x.window is None else _smaller(S, x.window) for x in layout.layers)


def _unprojected(config: Config, layout: Layout) -> Any:
    _check_depth(config, layout)
    bias = 2 * config.K * config.H if config.qkv_bias else 0
    consumers = config.L - layout.num_caches
    return consumers * (2 * config.D * config.K * config.H + bias)


def _mla_matrices(config: Config, C: Any, R: Any, nope: Any, v: Any) -> Any:
    D, N = config.D, config.N
    return D * N * (nope + R) + D * (C + R) + C * N * (nope + v) + N * v * D


def _other_matrices(config: Config) -> Any:
    """Multiplied in a step and no part of attention: the MLPs and the head."""
    return config.L * 3 * config.D * config.F + config.V * config.D


def _layer_bytes(config: Config, layout: Layout, dtype_bytes: Any) -> Any:
    """Of one token in one layer."""
    _check_depth(config, layout)
    return 2 * config.K * config.H * positive("dtype_bytes", dtype_bytes, "2")


def _check_depth(config: Config, layout: Layout) -> None:
    if layout.L != config.L:
        raise ValueError(f"the layout has {layout.L} layers but the config has L={config.L}")


def _smaller(a: Any, b: Any) -> Any:
    if is_symbolic(a) or is_symbolic(b):
        from sympy import Min

        return Min(a, b)
    return min(a, b)
