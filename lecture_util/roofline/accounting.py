"""FLOPs and bytes of what a Transformer computes.

Plain arithmetic: integers give the number, SymPy symbols give the algebra, from the same function.
Counted are matrix multiplications, a multiply-add as 2 FLOPs, and bytes between memory and chip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lecture_util.roofline.symbolic import (
    is_symbolic,
    larger,
    positive,
    shape_of,
    simplified,
    sizes,
)

if TYPE_CHECKING:
    from lecture_util.model.config import Config
    from lecture_util.roofline.hardware import Accelerator


@dataclass(frozen=True)
class Cost:
    """What a computation does and what it moves. Costs add, and multiply by a count.

    Units: FLOPs, bytes.
    """

    flops: Any = 0
    bytes_read: Any = 0
    bytes_written: Any = 0

    @property
    def bytes(self) -> Any:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> Any:
        """Arithmetic intensity: FLOPs for each byte moved."""
        if self.bytes == 0:
            raise ValueError("this cost moves no bytes, so it has no arithmetic intensity")
        return simplified(self.flops / self.bytes)

    def __add__(self, other: Cost) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )

    def __mul__(self, times: Any) -> Cost:
        if isinstance(times, Cost):
            return NotImplemented
        return Cost(self.flops * times, self.bytes_read * times, self.bytes_written * times)

    __rmul__ = __mul__

    def compute_s(self, accelerator: Accelerator, dtype: str = "bf16") -> Any:
        return self.flops / accelerator.peak(dtype)

    def memory_s(self, accelerator: Accelerator) -> Any:
        return self.bytes / accelerator.bandwidth_bytes_per_s

    def time_s(self, accelerator: Accelerator, dtype: str = "bf16") -> Any:
        """The roofline: the longer of computing and moving, a lower bound on the time."""
        return larger(self.compute_s(accelerator, dtype), self.memory_s(accelerator))

    def bound(self, accelerator: Accelerator, dtype: str = "bf16") -> str:
        """What it waits for: "compute" where the intensity reaches the ridge, else "memory"."""
        if is_symbolic(self.flops + self.bytes):
            raise ValueError("bound() compares numbers: substitute the symbols first")
        reaches = self.compute_s(accelerator, dtype) >= self.memory_s(accelerator)
        return "compute" if reaches else "memory"


def matmul(B: Any, D: Any, F: Any, dtype_bytes: Any = 2) -> Cost:
    """Read x_BD and w_DF, multiply, write y_BF: B FLOPs a byte while B is far below D and F."""
    B, D, F = sizes(B=B, D=D, F=F)
    width = _width(dtype_bytes)  # @inspect width
    return Cost(2 * B * D * F, width * (B * D + D * F), width * B * F)


def crossover_batch(D: Any, F: Any, ridge: Any, dtype_bytes: Any = 2) -> Any:
    """The B at which matmul(B, D, F) reaches the ridge: compute bound from its ceiling on.

    In 16 bits 1/B = 1/ridge - 1/D - 1/F. So B equals the ridge only as D and F grow without end,
    and where the right side is not positive no batch is large enough (infinity).
    """
    D, F = sizes(D=D, F=F)
    ridge = positive("ridge", ridge, "ACCELERATORS['h100'].ridge()")
    inverse = 2 / (_width(dtype_bytes) * ridge) - 1 / D - 1 / F
    if not is_symbolic(inverse) and inverse <= 0:
        return math.inf
    return simplified(1 / inverse)


def mlp(B: Any, T: Any, D: Any, F: Any, *, fusion: str = "unfused", dtype_bytes: Any = 2) -> Cost:
    """Gated MLP: u_BTF and g_BTF from x_BTD, then y_BTD from their product.

    fusion: where u and g wait for the down projection.
        "unfused"     written to memory and read back: 4BTD + 8BTF + 6DF bytes in 16 bits
        "write_only"  written, their reading forgotten: 4BTD + 4BTF + 6DF, as is often stated
        "fused"       on the chip:                      4BTD + 6DF
    Cost:   6*B*T*D*F FLOPs; B*T FLOPs a byte in every case, while B*T is far below D and F.
    """
    B, T, D, F = sizes(B=B, T=T, D=D, F=F)
    trips = {"unfused": (1, 1), "write_only": (0, 1), "fused": (0, 0)}
    if fusion not in trips:
        raise ValueError(f"fusion is {fusion!r}: expected one of {', '.join(trips)}")
    reads, writes = trips[fusion]  # @inspect reads, writes
    x_or_y, u_and_g = B * T * D, 2 * B * T * F  # @inspect x_or_y, u_and_g
    width = _width(dtype_bytes)
    return Cost(
        flops=6 * B * T * D * F,
        bytes_read=width * (x_or_y + 3 * D * F + reads * u_and_g),
        bytes_written=width * (x_or_y + writes * u_and_g),
    )


def attention(
    B: Any, S: Any, T: Any, N: Any, K: Any, H: Any, *, causal: bool = False, dtype_bytes: Any = 2
) -> Cost:
    """T queries over S keys and values of K heads, each read once; scores stay on the chip.

    causal: the T queries are the last of the S positions, and no score ahead of one is computed.
    Cost:   4*B*S*T*N*H FLOPs. MHA: S*T/(S+T) FLOPs a byte, so S/2 in prefill and below 1 in
            decode, where GQA nears G. B cancels: no two sequences share a cache.
    Source: Dao et al. 2022, arXiv:2205.14135.
    """
    B, S, T, N, K, H = sizes(B=B, S=S, T=T, N=N, K=K, H=H)
    if not is_symbolic(N % K) and N % K:
        raise ValueError(f"K={K} does not divide N={N}: each KV head serves N/K query heads")
    width = _width(dtype_bytes)  # @inspect width
    return Cost(
        flops=4 * B * N * H * _pairs(S, T, causal),
        bytes_read=width * (B * T * N * H + 2 * B * S * K * H),
        bytes_written=width * B * T * N * H,
    )


def params_by_part(config: Config) -> dict[str, Any]:
    """Parameters of the whole model: embedding, attention, mlp, norms, head (0 if tied)."""
    c = shape_of(config)
    bias = (c.N + 2 * c.K) * c.H if c.qkv_bias else 0
    return {
        "embedding": c.V * c.D,
        "attention": c.L * (2 * c.D * c.N * c.H + 2 * c.D * c.K * c.H + bias),
        "mlp": c.L * 3 * c.D * c.F,
        "norms": (2 * c.L + 1) * c.D,
        "head": 0 if c.tied else c.V * c.D,
    }


def num_params(config: Config, *, norms: bool = True, embedding: bool = True) -> Any:
    """Parameters of the model.

    norms=False leaves out the norms' gains, as most formulas do: about 0.003% of a 13B model.
    embedding=False leaves out embedding and head, as Kaplan et al. 2020, arXiv:2001.08361.
    """
    without = (() if norms else ("norms",)) + (() if embedding else ("embedding", "head"))
    return sum(n for part, n in params_by_part(config).items() if part not in without)


def weight_bytes(config: Config, dtype_bytes: Any = 2) -> Any:
    """Bytes that the weights occupy, norms included."""
    return num_params(config) * _width(dtype_bytes)


def weight_bytes_read(config: Config, tokens: Any, dtype_bytes: Any = 2) -> Any:
    """Bytes of weights that a pass over so many tokens reads; a decode step has B of them.

    Of an untied input embedding only a row a token. A tied one is the head too, so read whole.
    """
    (tokens,) = sizes(tokens=tokens)
    if config.tied:
        return weight_bytes(config, dtype_bytes)
    rows = tokens if is_symbolic(tokens) or is_symbolic(config.V) else min(tokens, config.V)
    return (num_params(config) - (config.V - rows) * config.D) * _width(dtype_bytes)


def kv_bytes_per_token(config: Config, dtype_bytes: Any = 2) -> Any:
    """A key and a value of width K*H in each layer."""
    c = shape_of(config)
    return 2 * c.L * c.K * c.H * _width(dtype_bytes)


def kv_cache_bytes(config: Config, B: Any, S: Any, dtype_bytes: Any = 2) -> Any:
    """Bytes of B sequences' caches of S positions each."""
    B, S = *sizes(B=B), *sizes(0, S=S)
    return B * S * kv_bytes_per_token(config, dtype_bytes)


def forward_flops(
    config: Config, B: Any, T: Any, S: Any, *, causal: bool = False, logits_for: Any = None
) -> Any:
    """Matmul FLOPs of a pass over T new tokens a sequence, which attend to S positions.

    S includes the T. causal: as in `attention`. logits_for: how many of the T reach the LM head,
    all if None; one is enough to go on generating.
    Cost: 2 FLOPs a weight and token, and 4*S*N*H a token and layer for attention.
    """
    c = config
    B, T, S = sizes(B=B, T=T, S=S)
    _check_new(S, T)
    (logits,) = (T,) if logits_for is None else sizes(0, logits_for=logits_for)
    if not is_symbolic(T - logits) and logits > T:
        raise ValueError(f"logits_for={logits} exceeds T={T}: only new positions reach the head")
    per_token = 2 * c.D * c.N * c.H + 2 * c.D * c.K * c.H + 3 * c.D * c.F
    scores = 4 * B * c.N * c.H * _pairs(S, T, causal)
    return c.L * (2 * B * T * per_token + scores) + 2 * B * logits * c.D * c.V


def forward(
    config: Config,
    B: Any,
    T: Any,
    S: Any,
    *,
    causal: bool = False,
    logits_for: Any = None,
    dtype_bytes: Any = 2,
) -> Cost:
    """The same pass with its bytes: weights and S cached positions read, T positions written.

    Activations are left out, so `time_s` of this cost is a lower bound.
    """
    return Cost(
        flops=forward_flops(config, B, T, S, causal=causal, logits_for=logits_for),
        bytes_read=weight_bytes_read(config, B * T, dtype_bytes)
        + kv_cache_bytes(config, B, S, dtype_bytes),
        bytes_written=kv_cache_bytes(config, B, T, dtype_bytes),
    )


def _pairs(S: Any, T: Any, causal: bool) -> Any:
    """Scores computed: all T*S, or those with no key ahead of its query."""
    if not causal:
        return T * S
    _check_new(S, T)
    twice = T * (2 * S - T + 1)  # even: T and 2*S - T + 1 differ in parity
    return twice / 2 if is_symbolic(twice) else twice // 2


def _check_new(S: Any, T: Any) -> None:
    if not is_symbolic(T - S) and T > S:
        raise ValueError(f"T={T} exceeds S={S}: S counts every position, the T new ones included")


def _width(dtype_bytes: Any) -> Any:
    return positive("dtype_bytes", dtype_bytes, "2, or DTYPE_BYTES['int4'] for half a byte")
