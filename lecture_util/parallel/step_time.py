"""What a decode step on M devices should take: reading the shard, waiting, and sending."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lecture_util.roofline.accounting import kv_cache_bytes, params_by_part
from lecture_util.roofline.hardware import Accelerator
from lecture_util.roofline.symbolic import is_symbolic, positive, shape_of, simplified, sizes

from .traffic import Traffic, forward_traffic, vocabulary_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lecture_util.model.config import Config


@dataclass(frozen=True)
class Link:
    """What connects the ranks. A collective takes latency_s, and its bytes over the bandwidth.

    Units: seconds from call to result of a small all-reduce; bytes a second that a rank can send.
    """

    name: str
    latency_s: Any
    bandwidth_bytes_per_s: Any
    source: str

    def __post_init__(self) -> None:
        latency_s, bandwidth = self.latency_s, self.bandwidth_bytes_per_s
        if latency_s != 0:
            positive("latency_s", latency_s, "40e-6, or 0")
        if bandwidth != math.inf:
            positive("bandwidth_bytes_per_s", bandwidth, "450e9, or math.inf")


_STAS = "stas00/ml-engineering network"
LINKS: dict[str, Link] = {
    "nvlink4": Link(
        "NVLink 4 and NVSwitch, 8 H200, NCCL called from torch", 40e-6, 450e9,
        f"latency: 32 KiB at 0.82 GB/s, {_STAS}/benchmarks/results/all-reduce-8xH200.md (64 to 256 "
        f"KiB take as long); bandwidth: one direction by specification, ibid.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ShardedStep:
    """One decode step of M ranks.

    Units: bytes on a rank (weights, cache), bytes it sends, seconds. latency_s is the sum of
    memory_s, waiting_s and sending_s: nothing overlaps, as each message is needed at once.
    fits: weights and cache are within one accelerator's memory; None where that is not known.
    """

    weight_bytes: Any
    cache_bytes: Any
    traffic: Traffic
    sent_bytes: Any
    memory_s: Any
    waiting_s: Any
    sending_s: Any
    latency_s: Any
    fits: bool | None = None


def rank_weight_bytes(config: Config, M: Any, dtype_bytes: Any = 2, *, rank: int = 0) -> Any:
    """Bytes of the weights that one of M ranks holds: 1/M of all but the norms, and of KV heads
    that are fewer than the ranks. Where M doesn't divide V, the first ranks hold the most.

    Raises: ShardError for numbers that `shard` refuses; ValueError for a rank that is none of M's.
    """
    M = _suitable(config, M)
    c, parts = config, params_by_part(config)
    vocabulary = vocabulary_rows(c.V, M, rank) * c.D * (1 if c.tied else 2)
    per_kv_head = 2 * c.H * (c.D + (1 if c.qkv_bias else 0)) * c.L  # of its key and its value
    queries = parts["attention"] - c.K * per_kv_head
    attention = _shared(queries, M) + _kv_heads(c.K, M) * per_kv_head
    numbers = vocabulary + attention + _shared(parts["mlp"], M) + parts["norms"]
    return numbers * positive("dtype_bytes", dtype_bytes, "2")


def rank_cache_bytes(config: Config, B: Any, S: Any, M: Any, dtype_bytes: Any = 2) -> Any:
    """Bytes of a rank's KV cache: 1/M of the whole, or 1/K where there are fewer heads than M.

    Raises: as rank_weight_bytes.
    """
    M = _suitable(config, M)
    whole = kv_cache_bytes(config, B, S, dtype_bytes)
    return _shared(whole, config.K) * _kv_heads(config.K, M)


def sharded_step(
    config: Config,
    B: Any,
    S: Any,
    accelerator: Accelerator | Any,
    M: Any,
    link: Link = LINKS["nvlink4"],
    *,
    dtype_bytes: Any = 2,
) -> ShardedStep:
    """roofline's `decode_step` for M shards: every byte a rank holds is read, then comes the rest.

    With link.bandwidth infinite, norms left out and 2*L waits for 2*L + 2, this is the formula of
    notebook 03. accelerator: an Accelerator, or just its bytes a second.

    Raises: as rank_weight_bytes; TypeError for a link that is none.
    """
    if not isinstance(link, Link):
        known = ", ".join(f"LINKS[{name!r}]" for name in LINKS)
        raise TypeError(f"link is {link!r}: expected a Link, such as {known} or this_link(mesh)")
    weights = rank_weight_bytes(config, M, dtype_bytes)
    cache = rank_cache_bytes(config, B, S, M, dtype_bytes)
    traffic = forward_traffic(config, B, 1, M, dtype_bytes=dtype_bytes)
    known = isinstance(accelerator, Accelerator)
    bandwidth = accelerator.bandwidth_bytes_per_s if known else accelerator
    bandwidth = positive("accelerator", bandwidth, "ACCELERATORS['h100'] or 3.35e12")
    sent = traffic.sent_bytes(M)
    memory_s = (weights + cache) / bandwidth
    waiting_s = traffic.messages * link.latency_s
    sending_s = sent / link.bandwidth_bytes_per_s
    fits = None
    if known and not is_symbolic(weights + cache):
        fits = bool(weights + cache <= accelerator.memory_bytes)
    return ShardedStep(
        weight_bytes=simplified(weights),
        cache_bytes=simplified(cache),
        traffic=traffic,
        sent_bytes=simplified(sent),
        memory_s=simplified(memory_s),
        waiting_s=simplified(waiting_s),
        sending_s=simplified(sending_s),
        latency_s=simplified(memory_s + waiting_s + sending_s),
        fits=fits,
    )


def this_link(mesh: DeviceMesh, small: int = 4096, large: int = 2**24) -> Link:
    """Measure all-reduces between the ranks of a mesh; every rank calls it.

    The median of 30 small ones gives the latency, of 5 large ones the bandwidth. One rank alone
    sends nothing, as over a link without an end to its bandwidth.
    """
    import torch
    import torch.distributed as dist

    def seconds(nbytes: int, repeats: int) -> float:
        x = torch.zeros(nbytes // 4, device=mesh.device_type)
        times = []
        for _ in range(repeats + 1):
            start = perf_counter()
            dist.all_reduce(x, group=mesh.get_group())
            float(x[0])  # on a GPU the call returns before it is done
            times.append(perf_counter() - start)
        return median(times[1:])

    latency_s, M = seconds(small, 30), mesh.size()
    sent = Traffic({"all_reduce": 1}, {"all_reduce": large}).sent_bytes(M)
    sending_s = max(seconds(large, 5) - latency_s, 1e-9)
    return Link(
        name=f"{dist.get_backend(mesh.get_group())} between {M} ranks on this machine",
        latency_s=latency_s,
        bandwidth_bytes_per_s=sent / sending_s if M > 1 else math.inf,
        source=f"measured here with torch {torch.__version__}",
    )


def _suitable(config: Config, M: Any) -> Any:
    """M as a whole number that this shape can be cut for. Symbols are taken to suit."""
    (M,) = sizes(M=M)
    if not any(is_symbolic(size) for size in (M, *(getattr(config, x, 0) for x in "KGFV"))):
        from .sharding import shard_config  # it brings torch.distributed, which formulas don't need

        shard_config(shape_of(config), M)
    return M


def _kv_heads(K: Any, M: Any) -> Any:
    """KV heads on a rank: K/M, but at least the one that its queries read. Symbols: K/M."""
    return K / M if is_symbolic(K / M) else max(_shared(K, M), 1)


def _shared(whole: Any, M: Any) -> Any:
    """whole/M, whole where it divides."""
    return whole // M if not is_symbolic(whole / M) and whole % M == 0 else whole / M
