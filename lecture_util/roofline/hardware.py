"""Accelerators: what their makers publish, and what this machine was measured to do.

Two peaks make a roofline: FLOPs a second and bytes a second. Their quotient, the ridge, is the
arithmetic intensity at which a computation stops waiting for memory and starts waiting for units.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lecture_util.roofline.timing import measure

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5}


@dataclass(frozen=True)
class Accelerator:
    """Peaks of one device.

    Units: dense FLOPs a second by dtype name, bytes a second, bytes (1 GB = 10**9).
    """

    name: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    bandwidth_bytes_per_s: float
    memory_bytes: float
    source: str
    measured: bool = False

    def peak(self, dtype: str = "bf16") -> float:
        """FLOPs a second in `dtype`.

        Raises: ValueError naming the dtypes that are known.
        """
        if dtype not in self.flops_per_s:
            raise ValueError(
                f"{self.name} has no {dtype!r} peak, only {', '.join(self.flops_per_s)}: "
                f"pass one of these as dtype"
            )
        return self.flops_per_s[dtype]

    @property
    def sixteen_bits(self) -> str:
        """bf16 where it computes in it, else fp16."""
        return "bf16" if "bf16" in self.flops_per_s else "fp16"

    def ridge(self, dtype: str = "bf16") -> float:
        """FLOPs a byte at which compute time equals memory time."""
        return self.peak(dtype) / self.bandwidth_bytes_per_s


_FLOPS = "FLOP/s: pytorch/torchtitan torchtitan/tools/utils.py"
_MEMORY = "bandwidth, memory: stas00/ml-engineering compute/accelerator/README.md"
_HOPPER = "FLOP/s: 1979/2, Lightning fabric/utilities/throughput.py; torchtitan has 989"
_LIGHTNING = "FLOP/s: Lightning fabric/utilities/throughput.py"

# Dense: from Hopper on, sheets lead with twice these, which need 2:4 sparse weights.
ACCELERATORS: dict[str, Accelerator] = {
    "a100": Accelerator(
        "NVIDIA A100 SXM 80GB", {"bf16": 312e12}, 2.039e12, 80e9,
        f"{_FLOPS}; {_MEMORY} (read at the source; 2.039 TB/s one transcription, 2.0 there)",
    ),
    "h100": Accelerator(
        "NVIDIA H100 SXM", {"bf16": 989.5e12}, 3.35e12, 80e9,
        f"{_HOPPER}; {_MEMORY} (read at the source)",
    ),
    "h200": Accelerator(
        "NVIDIA H200", {"bf16": 989.5e12}, 4.8e12, 141e9,
        f"{_HOPPER}; {_MEMORY} (read at the source)",
    ),
    "b200": Accelerator(
        "NVIDIA B200", {"bf16": 2250e12}, 8.0e12, 180e9,
        f"{_FLOPS}; {_MEMORY} (read at the source; memory given as 180 to 192 GB)",
    ),
    "mi300x": Accelerator(
        "AMD MI300X", {"bf16": 1307.4e12}, 5.3e12, 192e9,
        f"FLOP/s: transcriptions that agree on 1,307.4; torchtitan reads 1,300; {_MEMORY}",
    ),
    "t4": Accelerator(
        "NVIDIA T4", {"fp16": 65e12}, 0.32e12, 16e9,
        f"{_LIGHTNING} (read at the source); {_MEMORY} (one transcription)",
    ),
    "l4": Accelerator(
        "NVIDIA L4", {"bf16": 121e12}, 0.3e12, 24e9,
        f"{_LIGHTNING}; {_MEMORY} (one transcription)",
    ),
    "rtx4090": Accelerator(
        "NVIDIA RTX 4090, fp32 accumulation", {"bf16": 165.2e12}, 1.008e12, 24e9,
        f"{_LIGHTNING}; {_MEMORY} (transcriptions that agree)",
    ),
}  # fmt: skip


def processor() -> str:
    """The CPU's name, for a record of what was measured on it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def this_machine(device: str | None = None) -> Accelerator:
    """Measure this machine's roofline: copy bandwidth, and matmul rate by dtype.

    Device: CUDA where there is one, else the CPU. Measured once a process, and anew if torch's
            number of threads has changed.
    Cost:   under 3 s on two CPU cores, and half a GiB (CUDA: two GiB) while it lasts.
    """
    import torch

    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: this measures 'cpu' or 'cuda'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA GPU here: pass 'cpu'")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return _measured(str(chosen), torch.get_num_threads())


@cache
def _measured(device: str, threads: int) -> Accelerator:
    import torch

    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = properties.name, properties.total_memory
    else:
        import psutil

        name = f"this CPU, {threads} thread{'s' * (threads > 1)}"
        memory_bytes = psutil.virtual_memory().total
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    rates = {label: _matmul_flops_per_s(dtype, device) for label, dtype in dtypes.items()}
    bandwidth = _copy_bytes_per_s(device)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return Accelerator(
        name=name,
        flops_per_s={label: rate for label, rate in rates.items() if rate > 0},
        bandwidth_bytes_per_s=bandwidth,
        memory_bytes=memory_bytes,
        source=f"measured here with torch {torch.__version__}: best copy, best square matmul",
        measured=True,
    )


def _copy_bytes_per_s(device: str) -> float:
    """Best of several copies of a buffer far larger than any cache.

    Units: each byte is counted twice, once read and once written. Measured in turns on two CPU
           cores, a plain sum read at 1.0 to 1.2 times this rate, so one bandwidth serves; a
           matrix-vector product read at about half, which its kernel limits and not the memory.
    """
    import torch

    num_bytes = (1024 if device.startswith("cuda") else 256) * 2**20
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / measure(target.copy_, source, repeats=7, device=device).best_s


def _matmul_flops_per_s(dtype, device: str) -> float:
    """Best rate over square matmuls, doubled until one takes 60 ms; 0 if the dtype has none.

    fp32 is computed as torch is set to: in full precision, unless TF32 was switched on.
    """
    import torch

    best, seconds, n = 0.0, 0.0, 256
    largest = 8192 if device.startswith("cuda") else 2048
    own_seed = torch.Generator(device).manual_seed(0)  # the caller's draws stay as they were
    try:
        # 60 ms: a stall on a busy machine, some 30 ms, must not end the search at a small n.
        while n <= largest and seconds < 0.06:
            x, y = torch.randn(2, n, n, device=device, generator=own_seed).to(dtype)
            seconds = measure(torch.mm, x, y, repeats=2, device=device).best_s
            best = max(best, 2 * n**3 / seconds)
            n *= 2
    except RuntimeError:  # this dtype has no matmul here, or n no longer fits: keep what was seen
        pass
    return best
