"""Time a function, and say how much the time varied.

One run says little: the first pays for caches, compilation and lazy loading, and any may be
interrupted. So warm up, repeat, and report the median with its quartiles.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Wall times of repeated runs.

    Units: seconds.
    """

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def best_s(self) -> float:
        """The fastest run: what the machine can do when nothing interrupts."""
        return min(self.samples_s)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile, between which the middle half of the runs lies."""
        if len(self.samples_s) == 1:
            return self.best_s, self.best_s
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        size, unit = _unit(self.median_s, _SECONDS, 3)
        middle, low, high = (_figures(x / size, 3) for x in (self.median_s, *self.spread))
        runs = len(self.samples_s)
        return f"{middle} {unit} [{low}, {high}], {runs} run{'s' if runs > 1 else ''}"


def measure(
    fn: Callable[..., Any], *args: Any, repeats: int = 5, warmup: int = 1, device: Any = None
) -> Timing:
    """Time `fn(*args)`, `repeats` times after `warmup` untimed runs.

    A GPU works behind Python's back, so each run ends when the GPU has finished: on `device`, or
    if that is None on the current CUDA device once torch has used one. Garbage waits till the end.
    Units: wall seconds; on a GPU they include launching and waiting, some 10 microseconds.
    """
    if not callable(fn):
        raise TypeError(
            f"fn is a {type(fn).__name__}, not a function: "
            "pass the function and its arguments apart, measure(f, x) and not measure(f(x))"
        )
    _check_count("repeats", repeats, 1)
    _check_count("warmup", warmup, 0)
    for _ in range(warmup):
        fn(*args)
    wait = _waiter(device)
    samples = []
    collected = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            wait()
            start = time.perf_counter()
            fn(*args)
            wait()
            samples.append(time.perf_counter() - start)
    finally:
        if collected:
            gc.enable()
    return Timing(tuple(samples))


class Stopwatch:
    """Seconds since it started; stands still once stopped."""

    def __init__(self, device: Any = None) -> None:
        self._device = device
        self._stopped_s: float | None = None
        _waiter(device)()
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        if self._stopped_s is not None:
            return self._stopped_s
        _waiter(self._device)()
        return time.perf_counter() - self._start

    def stop(self) -> None:
        self._stopped_s = self.seconds


@contextmanager
def stopwatch(device: Any = None) -> Iterator[Stopwatch]:
    """Time a block: `with stopwatch() as watch: ...`, then read `watch.seconds`."""
    watch = Stopwatch(device)
    try:
        yield watch
    finally:
        watch.stop()


def format_seconds(seconds: float) -> str:
    """Three figures and a unit: 0.0238 -> '23.8 ms'."""
    size, unit = _unit(seconds, _SECONDS, 3)
    return f"{_figures(seconds / size, 3)} {unit}" if seconds else "0 s"


def format_bytes(num_bytes: float, *, binary: bool = False) -> str:
    """Four figures and a unit: 26_870_589_440 -> '26.87 GB', or in binary '25.03 GiB'."""
    size, unit = _unit(num_bytes, _GIB if binary else _GB, 4)
    return f"{num_bytes:g} B" if unit == "B" else f"{_figures(num_bytes / size, 4)} {unit}"


_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_GB = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
_GIB = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def _unit(value: float, units: tuple[tuple[float, str], ...], figures: int) -> tuple[float, str]:
    """The largest unit of which the value, once rounded, makes at least 1."""
    least = 1 - 0.5 * 10**-figures
    return next((u for u in units if abs(value) >= least * u[0]), units[-1])


def _figures(x: float, figures: int) -> str:
    exponent = int(f"{x:.{figures - 1}e}".partition("e")[2])
    return f"{x:.{max(0, figures - 1 - exponent)}f}"


def _check_count(name: str, value: int, at_least: int) -> None:
    if not isinstance(value, Integral) or value < at_least:
        raise ValueError(f"{name} is {value!r}: expected a whole number, at least {at_least}")


def _waiter(device: Any) -> Callable[[], None]:
    """What to call so that the device has finished: nothing on a CPU."""
    if device is None:
        torch = sys.modules.get("torch")
        used = torch is not None and torch.cuda.is_initialized()
        return torch.cuda.synchronize if used else _nothing
    import torch

    device = torch.device(device)
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing


def _nothing() -> None:
    pass
