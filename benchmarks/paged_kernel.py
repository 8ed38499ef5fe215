"""How fast is a cache in pages read? The paged kernel against a copy, and against contiguous keys.

    python benchmarks/paged_kernel.py            on a GPU: the Triton kernel at Llama 3 8B's heads
    python benchmarks/paged_kernel.py --small    on a CPU: tiny sizes, the kernel interpreted where
                                                 Triton is installed, and the torch definition

Decode attention is bound by the bytes of K and V. So for each context, batch and page size: these
bytes over the time, as a share of the bandwidth that a copy reached here in the same run. Beside it
is scaled_dot_product_attention on the same keys side by side, with each query a head of its own,
and with the queries of a KV head as rows of one, as `attend` hands them over.

Results are checked before anything is timed. Then all ways take turns, each walking over as many
caches as the GPU's L2 cannot hold; a walk is one CUDA graph, so that launching from Python is not
what is timed.
"""

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as nnf
from int4_kernel import walk

from lecture_util.kernels.paged_attention import (
    page_index,
    paged_attention,
    paged_attention_triton,
)
from lecture_util.model.attention import attend
from lecture_util.roofline.hardware import this_machine
from lecture_util.roofline.timing import Timing, measure

RECORD = Path(__file__).parent / "results" / "paged_kernel.json"
COLD_BYTES = 512 * 2**20  # of keys and values in a walk: ten times an H100's L2 cache
MOST_MEMORY = 0.7  # of the GPU, for all layouts of one batch and context: larger ones are left out
HEADS = dict(K=8, G=4, H=128)  # Llama 3 8B


@dataclass(frozen=True)
class Plan:
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    pages: tuple[int, ...]
    K: int
    G: int
    H: int
    dtype: torch.dtype
    rounds: int


FULL = Plan(
    contexts=tuple(2**i * 1024 for i in range(7)), batches=(1, 8, 32), pages=(1, 16, 64, 256),
    **HEADS, dtype=torch.bfloat16, rounds=20,
)  # fmt: skip
SMALL = Plan(
    contexts=(17, 64), batches=(1, 3), pages=(4, 16), K=2, G=3, H=16,
    dtype=torch.float32, rounds=1,
)  # fmt: skip


class Cache:
    """Keys and values of B sequences of S tokens, side by side; and the same in pages."""

    def __init__(self, plan: Plan, B: int, S: int, seed: int, device: str) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        shape = (B, S, plan.K, plan.H)
        self.k_BSKH, self.v_BSKH = (
            torch.randn(shape, generator=self.generator, device=device).to(plan.dtype)
            for _ in range(2)
        )
        self.lengths_B = torch.full((B,), S, dtype=torch.int32, device=device)

    def paged(self, P: int):
        """The pages of all sequences, shuffled: neighbours in a sequence lie anywhere."""
        B, S, K, H = self.k_BSKH.shape
        J, device = -(-S // P), self.k_BSKH.device
        order = torch.randperm(B * J, generator=self.generator, device=device)
        pools = []
        for x in (self.k_BSKH, self.v_BSKH):
            pool = torch.empty((B * J, P, K, H), dtype=x.dtype, device=device)
            pool[order] = nnf.pad(x, (0, 0, 0, 0, 0, J * P - S)).reshape(B * J, P, K, H)
            pools.append(pool)
        return *pools, order.view(B, J).int(), self.lengths_B


def contiguous_ways(cache):
    """torch's kernels on keys side by side, as (B, K, S, H) in memory: what each likes best."""
    k, v = (x.transpose(1, 2).contiguous() for x in (cache.k_BSKH, cache.v_BSKH))

    def sdpa(q_BNH):
        out = nnf.scaled_dot_product_attention(q_BNH[:, :, None], k, v, enable_gqa=True)
        return out.squeeze(2)

    def grouped(q_BNH):
        out = attend(q_BNH[:, None], k.transpose(1, 2), v.transpose(1, 2))
        return out[:, 0]

    return {"SDPA": sdpa, "SDPA, heads grouped": grouped}


def paged_ways(cache, P, device, interpreted):
    k, v, tables, lengths = cache.paged(P)
    ways = {}
    if device == "cuda" or interpreted:
        ways["pages, Triton"] = lambda q: paged_attention_triton(q, k, v, tables, lengths)
    if device == "cpu":
        index = page_index(tables, lengths, *k.shape[:2])
        ways["pages, torch"] = lambda q: paged_attention(q, k, v, tables, lengths, index)
    return ways


def exact(q_BNH, cache):
    """Row by row in fp32 (fp64 on a CPU), so that a large batch needs no second copy of itself."""
    wide = torch.float64 if q_BNH.device.type == "cpu" else torch.float32
    rows = zip(q_BNH, cache.k_BSKH, cache.v_BSKH, strict=True)
    out = []
    for q_NH, k_SKH, v_SKH in rows:
        q_KGH = q_NH.to(wide).unflatten(0, (k_SKH.shape[1], -1))
        scores_KGS = torch.einsum("kgh,skh->kgs", q_KGH, k_SKH.to(wide)) / q_NH.shape[-1] ** 0.5
        out.append(
            torch.einsum("kgs,skh->kgh", scores_KGS.softmax(-1), v_SKH.to(wide)).flatten(0, 1)
        )
    return torch.stack(out)


def error(way, q_BNH, wanted):
    """The largest error, over what rounding the weights and the result may do."""
    finfo = torch.finfo
    eps = 4 * finfo(q_BNH.dtype).eps + 64 * finfo(torch.float32).eps
    difference = (way(q_BNH).to(wanted.dtype) - wanted).abs()
    # Averages over S random values are small: they, not the values, are what errors stay below.
    bound = eps * (wanted.abs() + wanted.square().mean().sqrt())
    return float((difference / bound).max())


@torch.no_grad()
def compare(plan, B, S, device, bandwidth, interpreted):
    """Every way at one batch and context: check, then time in turns."""
    moved = 2 * B * S * plan.K * plan.H * plan.dtype.itemsize
    copies = max(1, -(-COLD_BYTES // moved)) if device == "cuda" else 1
    caches = [Cache(plan, B, S, seed, device) for seed in range(copies)]
    shape = (B, plan.K * plan.G, plan.H)
    q_BNH = torch.randn(shape, generator=caches[0].generator, device=device).to(plan.dtype)
    wanted = exact(q_BNH, caches[0])
    makers = {None: contiguous_ways}
    makers |= {
        P: partial(paged_ways, P=P, device=device, interpreted=interpreted) for P in plan.pages
    }
    walks, errors = {}, {}
    for P, make in makers.items():
        made = [make(cache) for cache in caches]
        for way in made[0]:
            errors[way, P] = error(made[0][way], q_BNH, wanted)
            if not errors[way, P] < 1:
                sys.exit(f"{way}, P={P}: wrong at B={B}, S={S}, {errors[way, P]:.3g} of rounding")
            walks[way, P] = walk([ways[way] for ways in made], q_BNH)
    samples = {key: [] for key in walks}
    for run in range(plan.rounds + 1):
        for key, times in samples.items():
            seconds = measure(walks[key], repeats=1, warmup=0, device=device).best_s / copies
            times.extend([seconds] * (run > 0))
    rows = []
    for (way, P), times in samples.items():
        timing = Timing(tuple(times))
        rows.append({
            "way": way, "P": P, "B": B, "S": S, "median_s": timing.median_s,
            "low_s": timing.spread[0], "high_s": timing.spread[1], "bytes": moved,
            "bytes_per_s": moved / timing.median_s,
            "share_of_copy": moved / timing.median_s / bandwidth if bandwidth else None,
            "error": errors[way, P],
        })  # fmt: skip
    show(rows)
    return rows


def show(rows):
    first = rows[0]
    print(f"\nB={first['B']}, S={first['S']:,}: {first['bytes'] / 1e6:.3g} MB of keys and values")
    for row in rows:
        name = row["way"] + (f", P={row['P']}" if row["P"] else "")
        if row["share_of_copy"] is None:
            print(f"  {name:<28}right, its error {row['error']:.2f} of what rounding may do")
            continue
        print(f"  {name:<28}{row['median_s'] * 1e6:>10.1f} µs{row['bytes_per_s'] / 1e9:>9.0f} GB/s"
              f"{row['share_of_copy']:>7.0%} of a copy", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, to check it all")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--pages", type=int, nargs="+")
    parser.add_argument("--out", type=Path, help="where the record goes; a small run keeps none")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA GPU here: pass --small to check it all on the CPU")
    chosen = {
        name: value if name == "rounds" else tuple(value)
        for name in ("rounds", "contexts", "batches", "pages")
        if (value := getattr(args, name))
    }
    plan = Plan(**vars(SMALL if args.small else FULL) | chosen)
    if args.small:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which happens later
    device = "cpu" if args.small else "cuda"
    versions = package_versions()
    machine = None if args.small else this_machine(device)
    bandwidth = machine.bandwidth_bytes_per_s if machine else None
    hardware = machine.name if machine else "a CPU and Triton's interpreter: times mean nothing"
    print(f"{hardware}; K={plan.K}, G={plan.G}, H={plan.H}, {plan.dtype}, random keys")
    if bandwidth:
        print(f"a copy moves {bandwidth / 1e9:.0f} GB/s")
    rows = []
    for B in plan.batches:
        for S in plan.contexts:
            size = 2 * B * S * plan.K * plan.H * plan.dtype.itemsize
            layouts = 2 + len(plan.pages)  # keys side by side exist twice
            if machine and size * layouts > MOST_MEMORY * machine.memory_bytes:
                print(f"\nB={B}, S={S:,} left out: {size / 1e9:.1f} GB in {layouts} layouts")
                continue
            rows += compare(plan, B, S, device, bandwidth, versions["triton"] is not None)
            if device == "cuda":
                torch.cuda.empty_cache()
    out = args.out or (None if args.small else RECORD)
    if out is not None:
        write(out, args.small, plan, hardware, versions, bandwidth, rows)


def package_versions():
    from importlib.metadata import PackageNotFoundError, version

    versions = {"torch": torch.__version__, "python": platform.python_version()}
    try:
        versions["triton"] = version("triton")
    except PackageNotFoundError:
        versions["triton"] = None
    return versions


def write(out, small, plan, hardware, versions, bandwidth, rows):
    document = {
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()}, {hardware}",
        "versions": versions,
        "small": small,
        "shape": {"K": plan.K, "G": plan.G, "H": plan.H, "dtype": str(plan.dtype)},
        "rounds": plan.rounds,
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
