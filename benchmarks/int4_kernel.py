"""What four bits a weight buy a decode step: our 4-bit products against dense and bitsandbytes.

    python benchmarks/int4_kernel.py            on a GPU: the Triton kernel at Llama's shapes
                                                on a CPU: Int4Linear at the reference model's
    python benchmarks/int4_kernel.py --dry      tiny shapes, the kernel in Triton's interpreter

Results are checked before anything is timed. How they are timed: `turns`. bitsandbytes takes part
where it is installed. The last columns are the bytes a way must read over the bandwidth a copy
reached here, as a share of the time it took, and the same for the nearer of the two roofs.
"""

import argparse
import math
import os
import platform
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as nnf
from record import RESULTS, today, versions, write
from turns import Wrong, against, copies_of, shown, take_turns, walk

from lecture_util.kernels.int4_linear import int4_linear, int4_linear_triton, pack_int4
from lecture_util.roofline.accounting import Cost
from lecture_util.roofline.hardware import this_machine

GROUP = 64
LLAMA = {  # F, D of Llama 3 8B: N=32, K=8, H=128
    "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
}  # fmt: skip
REFERENCE = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
REFERENCE_LAYERS = 30
DRY = {"narrow": (17, 64), "wide": (5, 192)}
LABELS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Weights:
    """One layer's weights: random codes and scales, and what each way reads of them."""

    def __init__(self, F: int, D: int, seed: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        J, self.shape = D // GROUP, (F, D)
        codes = torch.randint(0, 16, (F, D), generator=generator, device=device)
        self.packed = pack_int4(codes)
        absmax = torch.rand(F, J, generator=generator, device=device) + 0.5
        self.absmax = absmax / math.sqrt(D)
        self.scale = (self.absmax / 7.5).bfloat16()
        self.offset = -(7.5 * self.scale.float()).bfloat16()
        w_FD = torch.randn(F, D, generator=generator, device=device) / math.sqrt(D)
        self.dense = {torch.bfloat16: w_FD.bfloat16(), torch.float16: w_FD.half()}


def kernel_ways(peers: bool) -> dict:
    """Name -> x's dtype; of weights: the product, what it should be, and the bytes it reads.

    peers: bitsandbytes too, which must then be installed.
    """
    from lecture_util.quantization.nf4 import NF4_LEVELS

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

    def nf4(product):
        def made(w):
            levels = NF4_LEVELS.to(w.packed.device)
            return lambda x: product(x, w.packed, levels, w.absmax, group_size=GROUP)

        return made

    def nf4_bytes(w):
        return w.packed.nbytes + w.absmax.nbytes

    ways = {
        "dense bf16": dense(bf16),
        "dense fp16": dense(half),
        "int4, Triton": int4(),
        "int4, Triton, summing": int4(dot=False),
        "int4, Triton, tensor cores": int4(dot=True),
        "NF4, Triton": (bf16, nf4(int4_linear_triton), nf4(int4_linear), nf4_bytes),
    }
    if peers:
        ways["NF4, bitsandbytes"] = (bf16, _theirs, nf4(int4_linear), nf4_bytes)
    return ways


def _theirs(weights):
    """bitsandbytes' product with the same bytes and scales."""
    import bitsandbytes
    from bitsandbytes.functional import QuantState, get_4bit_type

    state = QuantState(
        absmax=weights.absmax.flatten(), shape=torch.Size(weights.shape),
        code=get_4bit_type("nf4", device=weights.packed.device, blocksize=GROUP),
        blocksize=GROUP, quant_type="nf4", dtype=torch.bfloat16,
    )  # fmt: skip
    stored = weights.packed.view(-1, 1)
    return lambda x: bitsandbytes.matmul_4bit(x, stored.t(), state)


def layer_ways(peers: bool) -> dict:
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

    ways = {
        "dense fp32": plain(torch.float32),
        "dense bf16": plain(torch.bfloat16),
        "Int4Linear, groups of 64": quantized(lambda x: Int4Linear.from_linear(x, 64)),
        "Int4Linear, groups of 48": quantized(lambda x: Int4Linear.from_linear(x, 48)),
    }
    return ways | ({"NF4, bitsandbytes": quantized(bnb_nf4)} if peers else {})


def error(product, exact, x):
    """The largest error over what 16 bits may do: rounding w, the scale and the result of each."""
    y, wanted = product(x).double(), exact(x.double())
    eps = 2**-7 if x.dtype == torch.bfloat16 else torch.finfo(x.dtype).eps
    magnitude = wanted.abs() + x.double().norm(dim=1, keepdim=True)  # rows of w are about 1 long
    return float(((y - wanted).abs() / (2 * eps * magnitude)).max())


@torch.no_grad()
def rows(shapes, batches, ways, rounds, device, machine, copies=None):
    """A row for every shape, batch and way: checked, then timed in turns."""
    for name, (F, D) in shapes.items():
        count = copies or copies_of(F * D // 2, device)
        weights = [Weights(F, D, seed, device) for seed in range(count)]
        products = {way: [make(w) for w in weights] for way, (_, make, _, _) in ways.items()}
        for B in batches:
            walks, errors = {}, {}
            generator = torch.Generator(device).manual_seed(B)
            x_BD = torch.randn(B, D, generator=generator, device=device)
            for way, (dtype, _, exact, _) in ways.items():
                x = x_BD.to(dtype)
                errors[way] = error(products[way][0], exact(weights[0]), x)
                if not errors[way] < 1:
                    raise Wrong(f"{way} at {name}, B={B}: {errors[way]:.3g} times the rounding")
                walks[way] = walk([lambda p=p, x=x: p(x) for p in products[way]], device)
            for way, timing in take_turns(walks, rounds, device, count).items():
                dtype, _, _, weight_bytes = ways[way]
                cost = Cost(
                    2 * B * D * F, weight_bytes(weights[0]) + B * D * dtype.itemsize,
                    B * F * dtype.itemsize,
                )  # fmt: skip
                yield {
                    "way": way, "layer": name, "F": F, "D": D, "B": B, "error": errors[way],
                } | against(cost, timing, machine, LABELS[dtype])  # fmt: skip
        del weights, products, walks
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dry", action="store_true", help="check the kernel, interpreted, on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--out", type=Path, help="where the record goes; a dry run keeps none")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not args.dry
    peers, copies = find_spec("bitsandbytes") is not None, None
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which happens later
        shapes, args.rounds, args.batches = DRY, 1, [1, 3]
    else:
        shapes = LLAMA if on_gpu else REFERENCE
        copies = None if on_gpu else REFERENCE_LAYERS
    ways = (kernel_ways if on_gpu or args.dry else layer_ways)(peers)
    device = "cuda" if on_gpu else "cpu"
    machine = None if args.dry else this_machine(device)
    hardware = machine.name if machine else "Triton's interpreter, whose times mean nothing"
    print(f"{hardware}; random weights, groups of {GROUP}")
    measured = []
    for row in rows(shapes, args.batches, ways, args.rounds, device, machine, copies):
        print(shown(f"{row['layer']}, B={row['B']}: {row['way']}", row), flush=True)
        measured.append(row)
    out = args.out
    if out is None and not args.dry:
        out = RESULTS / ("int4_kernel.json" if on_gpu else "int4_kernel_cpu.json")
    if out is not None:
        write(out, {
            "date": today(),
            "hardware": f"{platform.machine()}, {hardware}",
            "versions": versions("triton", "bitsandbytes"),
            "dry": args.dry,
            "rounds": args.rounds,
            "group_size": GROUP,
            "bandwidth_bytes_per_s": machine.bandwidth_bytes_per_s if machine else None,
            "rows": measured,
        })  # fmt: skip
        print(f"wrote {out.name}")


if __name__ == "__main__":
    main()
