"""From cost to seconds: how long a decode step takes, and a prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lecture_util.roofline.accounting import (
    Cost,
    forward,
    kv_cache_bytes,
    weight_bytes,
    weight_bytes_read,
)
from lecture_util.roofline.hardware import DTYPE_BYTES, Accelerator
from lecture_util.roofline.symbolic import is_symbolic, positive, simplified, sizes

if TYPE_CHECKING:
    from lecture_util.model.config import Config


@dataclass(frozen=True)
class StepEstimate:
    """One decode step: latency at best, throughput at most.

    Units: bytes held, bytes read, seconds, tokens a second over the whole batch.
    fits: weights and cache are within the accelerator's memory; None where that is not known.
    """

    memory_bytes: Any
    bytes_read: Any
    latency_s: Any
    throughput_tokens_per_s: Any
    fits: bool | None = None


def decode_step(
    config: Config,
    B: Any,
    S: Any,
    accelerator: Accelerator | Any,
    *,
    dtype_bytes: Any = 2,
    whole_embedding: bool = True,
) -> StepEstimate:
    """A step in which memory sets the pace: every byte of weights and caches is read once.

    accelerator: an Accelerator, or just its bytes a second.
    whole_embedding=False counts the B rows of an untied input embedding that a step looks up.
    Left out: computing (see `forward(...).time_s` once B nears the ridge), activations, launches.
    """
    (B,) = sizes(B=B)
    cache_bytes = kv_cache_bytes(config, B, S, dtype_bytes)  # @inspect cache_bytes
    memory_bytes = weight_bytes(config, dtype_bytes) + cache_bytes  # @inspect memory_bytes
    bytes_read = memory_bytes
    if not whole_embedding:
        bytes_read = weight_bytes_read(config, B, dtype_bytes) + cache_bytes
    known = isinstance(accelerator, Accelerator)
    bandwidth = accelerator.bandwidth_bytes_per_s if known else accelerator  # @inspect bandwidth
    bandwidth = positive("accelerator", bandwidth, "ACCELERATORS['h100'] or 3.35e12")
    latency_s = bytes_read / bandwidth  # @inspect latency_s
    return StepEstimate(
        memory_bytes=simplified(memory_bytes),
        bytes_read=simplified(bytes_read),
        latency_s=simplified(latency_s),
        throughput_tokens_per_s=simplified(B / latency_s),
        fits=memory_bytes <= accelerator.memory_bytes
        if known and not is_symbolic(memory_bytes)
        else None,
    )


@dataclass(frozen=True)
class PrefillEstimate:
    """A prefill: its cost, and the two times of which the longer is the time to first token.

    Units: seconds, at best: both overlap perfectly and every peak is reached.
    """

    cost: Cost
    compute_s: Any
    memory_s: Any
    ttft_s: Any


def prefill(
    config: Config,
    B: Any,
    S: Any,
    accelerator: Accelerator,
    *,
    dtype: str = "bf16",
    causal: bool = True,
    dtype_bytes: Any = None,
) -> PrefillEstimate:
    """Encode B prompts of S tokens and take the logits of each one's last position.

    dtype: what it computes in; dtype_bytes: what weights and cache are stored in, if different.
    """
    if dtype_bytes is None:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPE_BYTES)}")
        dtype_bytes = DTYPE_BYTES[dtype]
    cost = forward(config, B, S, S, causal=causal, logits_for=1, dtype_bytes=dtype_bytes)
    return PrefillEstimate(
        cost=cost,
        compute_s=cost.compute_s(accelerator, dtype),
        memory_s=cost.memory_s(accelerator),
        ttft_s=cost.time_s(accelerator, dtype),
    )
