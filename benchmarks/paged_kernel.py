"""How fast is a cache in pages read? The paged kernel against a copy, and against contiguous keys.

    python benchmarks/paged_kernel.py            on a GPU: the Triton kernel at Llama 3 8B's heads
    python benchmarks/paged_kernel.py --small    on a CPU: tiny sizes, the kernel interpreted where
                                                 Triton is installed, and the torch definition

Decode attention is bound by the bytes of K and V. So for each context, batch and page size: these
bytes over the time, as a share of the bandwidth that a copy reached here in the same run. Beside it
is scaled_dot_product_attention on the same keys side by side, with each query a head of its own,
and with the queries of a KV head as rows of one, as `attend` hands them over.

Results are checked before anything is timed. How they are timed: `turns`.
"""

import argparse
import os
import platform
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as nnf
from record import RESULTS, today, versions, write
from turns import Wrong, against, copies_of, shown, take_turns, walk

from lecture_util.kernels.paged_attention import (
    page_index,
    paged_attention,
    paged_attention_triton,
)
from lecture_util.model.attention import attend
from lecture_util.roofline.accounting import Cost
from lecture_util.roofline.hardware import this_machine

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
def compare(plan, B, S, device, machine, interpreted):
    """A row for every way at one batch and context: checked, then timed in turns."""
    moved = 2 * B * S * plan.K * plan.H * plan.dtype.itemsize
    copies = copies_of(moved, device)
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
                raise Wrong(f"{way}, P={P}, B={B}, S={S}: {errors[way, P]:.3g} times the rounding")
            walks[way, P] = walk([partial(ways[way], q_BNH) for ways in made], device)
    cost = Cost(4 * B * S * plan.K * plan.G * plan.H, moved)
    label = "bf16" if plan.dtype == torch.bfloat16 else "fp32"
    for (way, P), timing in take_turns(walks, plan.rounds, device, copies).items():
        row = {"way": way, "P": P, "B": B, "S": S, "error": errors[way, P]}
        yield row | against(cost, timing, machine, label)


def rows(plan, device, machine, interpreted):
    """A row for every batch, context, way and page size; one that says why, for what is left out.

    interpreted: on a CPU, the Triton kernel takes part.
    """
    for B in plan.batches:
        for S in plan.contexts:
            size = 2 * B * S * plan.K * plan.H * plan.dtype.itemsize
            layouts = 2 + len(plan.pages)  # keys side by side exist twice
            if machine and size * layouts > MOST_MEMORY * machine.memory_bytes:
                yield {"B": B, "S": S, "skipped": f"{size / 1e9:.1f} GB in {layouts} layouts"}
                continue
            yield from compare(plan, B, S, device, machine, interpreted)
            if device == "cuda":
                torch.cuda.empty_cache()


def name_of(row):
    return f"B={row['B']}, S={row['S']:,}: {row['way']}" + (f", P={row['P']}" if row["P"] else "")


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
    found = versions("triton")
    machine = None if args.small else this_machine(device)
    hardware = machine.name if machine else "a CPU and Triton's interpreter: times mean nothing"
    print(f"{hardware}; K={plan.K}, G={plan.G}, H={plan.H}, {plan.dtype}, random keys")
    measured = []
    for row in rows(plan, device, machine, found["triton"] is not None):
        measured.append(row)
        left_out = "skipped" in row
        print(f"B={row['B']}, S={row['S']:,} left out: {row['skipped']}" if left_out
              else shown(name_of(row), row), flush=True)  # fmt: skip
    out = args.out or (None if args.small else RESULTS / "paged_kernel.json")
    if out is not None:
        write(out, {
            "date": today(),
            "hardware": f"{platform.machine()}, {hardware}",
            "versions": found,
            "small": args.small,
            "shape": {"K": plan.K, "G": plan.G, "H": plan.H, "dtype": str(plan.dtype)},
            "rounds": plan.rounds,
            "bandwidth_bytes_per_s": machine.bandwidth_bytes_per_s if machine else None,
            "rows": measured,
        })  # fmt: skip
        print(f"wrote {out.name}")


if __name__ == "__main__":
    main()
