"""Time several ways of computing one thing: cold, in turns, and beside what the machine could do.

Each way walks over more different inputs than a cache holds, as the layers of a model would. On a
GPU a walk is one CUDA graph, so that launching from Python is not what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from lecture_util.roofline.accounting import Cost
from lecture_util.roofline.hardware import Accelerator
from lecture_util.roofline.timing import Timing, measure

COLD_BYTES = 512 * 2**20  # read in a walk: ten times an H100's L2 cache, four times a B200's


class Wrong(RuntimeError):
    """A result that rounding does not explain: there is nothing to time."""


def copies_of(num_bytes: int, device: str) -> int:
    """How many different inputs of this size a walk needs, so that each is cold."""
    return max(1, -(-COLD_BYTES // num_bytes)) if device == "cuda" else 1


def walk(calls: Sequence[Callable[[], object]], device: str) -> Callable[[], object]:
    """All the calls, one after the other, as one."""

    def once() -> None:
        for call in calls:
            call()

    if device != "cuda":
        return once
    aside = _aside()  # libraries get ready stream by stream, so the capture is on the same one
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        once()  # compiles, and fills the allocator's pools
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        once()
    return graph.replay


@cache
def _aside() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def take_turns(
    walks: dict[object, Callable], rounds: int, device: str, calls: int = 1
) -> dict[object, Timing]:
    """Every walk once a round, so that a busy moment hits all. Seconds are those of one call."""
    samples = {name: [] for name in walks}
    for turn in range(rounds + 1):
        for name, seconds in samples.items():
            one = measure(walks[name], repeats=1, warmup=0, device=device).best_s / calls
            seconds.extend([one] * (turn > 0))  # the first turn warms up
    return {name: Timing(tuple(seconds)) for name, seconds in samples.items()}


def against(cost: Cost, timing: Timing, machine: Accelerator | None, dtype: str) -> dict:
    """What was reached, and its share of the machine's measured peaks (None: not measured).

    roofline  the time in which the machine could do it at best, over the time it took
    """
    row = {
        "median_s": timing.median_s,
        "low_s": timing.spread[0],
        "high_s": timing.spread[1],
        "bytes": cost.bytes,
        "bytes_per_s": cost.bytes / timing.median_s,
        "flops_per_s": cost.flops / timing.median_s,
        "share_of_copy": None,
        "share_of_matmul": None,
        "roofline": None,
    }
    if machine is not None:
        row["share_of_copy"] = cost.memory_s(machine) / timing.median_s
        if dtype in machine.flops_per_s:
            row["share_of_matmul"] = cost.compute_s(machine, dtype) / timing.median_s
        row["roofline"] = max(row["share_of_copy"], row["share_of_matmul"] or 0)
    return row


def shown(name: str, row: dict) -> str:
    """A line for the terminal."""
    if row["roofline"] is None:
        return f"  {name:<44}right, its error {row['error']:.2f} of what rounding may do"
    return (
        f"  {name:<44}{row['median_s'] * 1e6:>10.1f} µs{row['bytes_per_s'] / 1e9:>8.0f} GB/s"
        f"{row['share_of_copy']:>6.0%} of a copy{row['roofline']:>6.0%} of the roofline"
    )
