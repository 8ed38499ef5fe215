"""What four bits a weight buy a decode step: our 4-bit products against dense and bitsandbytes.

    python benchmarks/int4_kernel.py            on a GPU: the Triton kernel at Llama's shapes
                                                on a CPU: Int4Linear at the reference model's
    python benchmarks/int4_kernel.py --dry      tiny shapes, the kernel in Triton's interpreter

Results are checked before anything is timed. Then all ways of computing a layer take turns, each
walking over as many different weights as a cache cannot hold, as the layers of a model would. On a
GPU a walk is one CUDA graph, so that launching from Python is not what is timed. The last column is
the bytes a way must read over the bandwidth a copy reached here, as a share of the time it took.
"""

import argparse
import json
import math
import os
import platform
import sys
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as nnf

from lecture_util.kernels.int4_linear import int4_linear, int4_linear_triton, pack_int4
from lecture_util.roofline.hardware import this_machine
from lecture_util.roofline.timing import Timing, measure

RESULTS = Path(__file__).parent / "results"
GROUP = 64
COLD_BYTES = 512 * 2**20  # of 4-bit weights in a walk: ten times an H100's L2 cache
LLAMA = {  # F, D of Llama 3 8B: N=32, K=8, H=128
    "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
}  # fmt: skip
REFERENCE = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
REFERENCE_LAYERS = 30
DRY = {"narrow": (17, 64), "wide": (5, 192)}


class Weights:
    """One layer's weights: random codes and scales, and what each way reads of them."""

    def __init__(self, F: int, D: int, seed: int, device: str, dense: bool = True) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        J, self.shape = D // GROUP, (F, D)
        codes = torch.randint(0, 16, (F, D), generator=generator, device=device)
        self.packed = pack_int4(codes)
        absmax = torch.rand(F, J, generator=generator, device=device) + 0.5
        self.absmax = absmax / math.sqrt(D)
        self.scale = (self.absmax / 7.5).bfloat16()
        self.offset = -(7.5 * self.scale.float()).bfloat16()
        w_FD = torch.randn(F, D, generator=generator, device=device) / math.sqrt(D)
        self.dense = {torch.bfloat16: w_FD.bfloat16(), torch.float16: w_FD.half()} if dense else {}


def nf4_state(weights, dtype):
    """The same bytes and scales as bitsandbytes describes them."""
    from bitsandbytes.functional import QuantState, get_4bit_type

    code = get_4bit_type("nf4", device=weights.packed.device, blocksize=GROUP)
    return QuantState(
        absmax=weights.absmax.flatten(), shape=torch.Size(weights.shape), code=code,
        blocksize=GROUP, quant_type="nf4", dtype=dtype,
    )  # fmt: skip


def kernel_ways():
    """Name -> x's dtype; of weights: the product, what it should be, and the bytes it reads."""
    import bitsandbytes

    bf16, half = torch.bfloat16, torch.float16

    def dense(dtype):
        return (
            dtype,
            lambda w: lambda x: nnf.linear(x, w.dense[dtype]),
            lambda w: lambda x: x @ w.dense[dtype].double().T,
            lambda w: w.dense[dtype].nbytes,
        )

    def int4(**options):
        def parts(w):
            return (w.packed, 0, w.scale, w.offset)

        return (
            bf16,
            lambda w: lambda x: int4_linear_triton(x, *parts(w), group_size=GROUP, **options),
            lambda w: lambda x: int4_linear(x, *parts(w), group_size=GROUP),
            lambda w: w.packed.nbytes + w.scale.nbytes + w.offset.nbytes,
        )

    def nf4_exact(w):
        levels = nf4_state(w, bf16).code
        return lambda x: int4_linear(x, w.packed, levels, w.absmax, group_size=GROUP)

    def nf4_triton(w):
        levels = nf4_state(w, bf16).code
        return lambda x: int4_linear_triton(x, w.packed, levels, w.absmax, group_size=GROUP)

    def theirs(w):
        state, stored = nf4_state(w, bf16), w.packed.view(-1, 1)
        return lambda x: bitsandbytes.matmul_4bit(x, stored.t(), state)

    def nf4_bytes(w):
        return w.packed.nbytes + w.absmax.nbytes

    return {
        "dense bf16": dense(bf16),
        "dense fp16": dense(half),
        "int4, Triton": int4(),
        "int4, Triton, summing": int4(dot=False),
        "int4, Triton, tensor cores": int4(dot=True),
        "NF4, Triton": (bf16, nf4_triton, nf4_exact, nf4_bytes),
        "NF4, bitsandbytes": (bf16, theirs, nf4_exact, nf4_bytes),
    }


def layer_ways():
    """The same for layers on a CPU: `Weights` are rounded anew by each."""
    from lecture_util.model.linear import Linear
    from lecture_util.quantization.int4 import Int4Linear
    from lecture_util.quantization.linear import bnb_nf4

    def linear(w, dtype=torch.bfloat16):
        with torch.device("meta"):
            layer = Linear(*reversed(w.shape), bias=False)
        layer.weight = torch.nn.Parameter(w.dense[torch.bfloat16].to(dtype), requires_grad=False)
        return layer

    def way(dtype, make, weight_bytes):
        def exact(w):
            layer = make(w)
            dequantized = getattr(layer, "dequantized", lambda: layer.weight)
            return lambda x: x @ dequantized().double().T

        return dtype, make, exact, lambda w: weight_bytes(make(w))

    def quantized(make):
        return way(torch.bfloat16, lambda w: make(linear(w)), lambda layer: layer.weight_bytes)

    def plain(dtype):
        return way(dtype, lambda w: linear(w, dtype), lambda layer: layer.weight.nbytes)

    return {
        "dense fp32": plain(torch.float32),
        "dense bf16": plain(torch.bfloat16),
        "Int4Linear, groups of 64": quantized(lambda x: Int4Linear.from_linear(x, 64)),
        "Int4Linear, groups of 48": quantized(lambda x: Int4Linear.from_linear(x, 48)),
        "NF4, bitsandbytes": quantized(bnb_nf4),
    }


def error(product, exact, x):
    """The largest error over what 16 bits may do: rounding w, the scale and the result of each."""
    y, wanted = product(x).double(), exact(x.double())
    eps = 2**-7 if x.dtype == torch.bfloat16 else torch.finfo(x.dtype).eps
    magnitude = wanted.abs() + x.double().norm(dim=1, keepdim=True)  # rows of w are about 1 long
    return float(((y - wanted).abs() / (2 * eps * magnitude)).max())


def walk(products, x):
    """One pass over all the weights, as a function without arguments: on a GPU, as a graph."""

    def once():
        for product in products:
            product(x)

    if not x.is_cuda:
        return once
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        once()  # compiles, and fills the allocator's pools
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph.replay


@torch.no_grad()
def compare(name, F, D, batches, ways, copies, rounds, device, bandwidth):
    """Every way at every batch: check, then time in turns."""
    weights = [Weights(F, D, seed, device) for seed in range(copies)]
    products = {way: [make(w) for w in weights] for way, (_, make, _, _) in ways.items()}
    rows = []
    for B in batches:
        walks, errors = {}, {}
        generator = torch.Generator(device).manual_seed(B)
        x_BD = torch.randn(B, D, generator=generator, device=device)
        for way, (dtype, _, exact, _) in ways.items():
            x = x_BD.to(dtype)
            errors[way] = error(products[way][0], exact(weights[0]), x)
            if not errors[way] < 1:
                sys.exit(f"{way} is wrong at {name}, B={B}: {errors[way]:.3g} times the rounding")
            walks[way] = walk(products[way], x)
        samples = {way: [] for way in ways}
        for run in range(rounds + 1):
            for way, times in samples.items():
                seconds = measure(walks[way], repeats=1, warmup=0, device=device).best_s / copies
                times.extend([seconds] * (run > 0))
        for way, (dtype, _, _, weight_bytes) in ways.items():
            timing, moved = Timing(tuple(samples[way])), weight_bytes(weights[0])
            moved += B * (D + F) * dtype.itemsize
            rows.append({
                "layer": name, "F": F, "D": D, "B": B, "way": way, "median_s": timing.median_s,
                "low_s": timing.spread[0], "high_s": timing.spread[1], "bytes": moved,
                "memory_s": moved / bandwidth if bandwidth else None, "error": errors[way],
            })  # fmt: skip
        show([row for row in rows if row["B"] == B])
    return rows


def show(rows):
    first = rows[0]
    base = next(row["median_s"] for row in rows if row["way"] == "dense bf16")
    print(f"\n{first['layer']}: F={first['F']}, D={first['D']}, B={first['B']}")
    for row in rows:
        if row["memory_s"] is None:
            print(f"  {row['way']:<28}right, its error {row['error']:.2f} of what rounding may do")
            continue
        print(f"  {row['way']:<28}{row['median_s'] * 1e6:>10.1f} µs"
              f"{base / row['median_s']:>7.2f}x dense bf16{row['bytes'] / 1e6:>8.2f} MB"
              f"{row['memory_s'] / row['median_s']:>7.0%} of bandwidth", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dry", action="store_true", help="check the kernel, interpreted, on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--out", type=Path, help="where the record goes; a dry run keeps none")
    args = parser.parse_args()
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which happens later
        device, shapes, args.rounds = "cpu", DRY, 1
        args.batches = [1, 3]
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shapes = LLAMA if device == "cuda" else REFERENCE
    on_gpu = device == "cuda"
    ways = kernel_ways() if on_gpu or args.dry else layer_ways()
    machine = None if args.dry else this_machine(device)
    bandwidth = machine.bandwidth_bytes_per_s if machine else None
    hardware = machine.name if machine else "Triton's interpreter, whose times mean nothing"
    print(f"{hardware}; random weights, groups of {GROUP}")
    if bandwidth:
        print(f"a copy moves {bandwidth / 1e9:.1f} GB/s")
    rows = []
    for name, (F, D) in shapes.items():
        copies = 1 if args.dry else REFERENCE_LAYERS
        if on_gpu:
            copies = max(2, -(-COLD_BYTES // (F * D // 2)))
        rows += compare(name, F, D, args.batches, ways, copies, args.rounds, device, bandwidth)
        if on_gpu:
            torch.cuda.empty_cache()
    out = args.out
    if out is None and not args.dry:
        out = RESULTS / ("int4_kernel.json" if on_gpu else "int4_kernel_cpu.json")
    if out is not None:
        write(out, args, hardware, bandwidth, rows)


def write(out, args, hardware, bandwidth, rows):
    from importlib.metadata import PackageNotFoundError, version

    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "bitsandbytes"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    document = {
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()}, {hardware}",
        "versions": versions,
        "dry": args.dry,
        "rounds": args.rounds,
        "group_size": GROUP,
        "bandwidth_bytes_per_s": bandwidth,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_suffix(".part")
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scratch.replace(out)
    print(f"wrote {out.name}")


if __name__ == "__main__":
    main()
