"""How near is the selective scan to memory's pace? The Triton kernel against a copy.

    python benchmarks/scan_kernel.py            on a GPU: at a layer of Mamba-2.8B
    python benchmarks/scan_kernel.py --small    on a CPU: tiny sizes, in Triton's interpreter

One token a sequence reads each state and writes it: memory's pace is all there is to reach. A
prompt moves little for what it computes, and its tokens wait for each other, so both roofs are far
off there: besides the bytes, a row counts the states that were updated a second, each of which
costs an exponential. Results are checked before anything is timed; how they are timed: `turns`.
"""

import argparse
import os
import platform
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from record import RESULTS, today, versions, write
from turns import Wrong, against, copies_of, shown, take_turns, walk

from lecture_util.kernels.selective_scan import selective_scan, selective_scan_triton
from lecture_util.roofline.accounting import Cost
from lecture_util.roofline.hardware import this_machine


@dataclass(frozen=True)
class Plan:
    sizes: tuple[tuple[int, int], ...]  # B, T
    E: int
    Z: int
    dtype: torch.dtype
    rounds: int


# Channels and states of Mamba-2.8B: width 2560, expanded twice (Gu & Dao 2023, arXiv:2312.00752).
FULL = Plan(((1, 1), (64, 1), (1, 2048), (8, 2048)), 5120, 16, torch.bfloat16, rounds=20)
SMALL = Plan(((3, 1), (2, 5)), 37, 5, torch.float32, rounds=1)


def inputs(plan: Plan, B: int, T: int, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    """u, Δ, A, B, C, D and a state, as a layer would have them: A, D and states in fp32."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    E, Z = plan.E, plan.Z
    u_BTE, B_BTZ, C_BTZ = (normal(B, T, x).to(plan.dtype) for x in (E, Z, Z))
    delta_BTE = (normal(B, T, E) - 3).exp().to(plan.dtype)
    A_EZ = -torch.arange(1.0, Z + 1, device=device).expand(E, Z).contiguous()
    return u_BTE, delta_BTE, A_EZ, B_BTZ, C_BTZ, normal(E), normal(B, E, Z)


def cost_of(tensors) -> Cost:
    """Every tensor read once, y and the state written: `selective_step` has the FLOPs."""
    u_BTE, _, A_EZ, _, _, _, state_BEZ = tensors
    flops = 6 * u_BTE.numel() * A_EZ.shape[1]
    return Cost(flops, sum(x.nbytes for x in tensors), u_BTE.nbytes + state_BEZ.nbytes)


def error(found, tensors) -> float:
    """The largest error over what rounding may do, of y and of the state, over their largest."""
    worst = 0.0
    for one, wanted in zip(found, selective_scan(*(x.double() for x in tensors)), strict=True):
        bound = 32 * torch.finfo(one.dtype).eps * float(wanted.abs().max())
        difference = (one.double() - wanted).abs().nan_to_num(torch.inf)
        worst = max(worst, float(difference.max()) / bound)
    return worst


@torch.no_grad()
def rows(plan, device, machine):
    """A row for every size and way: checked, then timed in turns."""
    for B, T in plan.sizes:
        first = inputs(plan, B, T, 0, device)
        cost = cost_of(first)
        copies = copies_of(cost.bytes, device)
        made = [first] + [inputs(plan, B, T, seed, device) for seed in range(1, copies)]
        ways = {"Triton": selective_scan_triton}
        if T == 1:  # a prompt's loop in torch would be thousands of kernels
            ways["torch"] = selective_scan
        walks, errors = {}, {}
        for way, scan in ways.items():
            errors[way] = error(scan(*first), first)
            if not errors[way] < 1:
                raise Wrong(f"{way} at B={B}, T={T}: {errors[way]:.3g} times the rounding")
            walks[way] = walk([partial(scan, *tensors) for tensors in made], device)
        for way, timing in take_turns(walks, plan.rounds, device, copies).items():
            row = {"way": way, "B": B, "T": T, "E": plan.E, "Z": plan.Z, "error": errors[way]}
            row |= against(cost, timing, machine, "fp32")  # which it computes in
            yield row | {"states_per_s": B * T * plan.E * plan.Z / timing.median_s}
        del made, walks
        if device == "cuda":
            torch.cuda.empty_cache()


def name_of(row):
    return f"B={row['B']}, T={row['T']:,}: {row['way']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, to check it all")
    parser.add_argument("--out", type=Path, help="where the record goes; a small run keeps none")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA GPU here: pass --small to check it all on the CPU")
    if args.small:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which happens later
    device, plan = ("cpu", SMALL) if args.small else ("cuda", FULL)
    machine = None if args.small else this_machine(device)
    hardware = machine.name if machine else "Triton's interpreter, whose times mean nothing"
    print(f"{hardware}; E={plan.E}, Z={plan.Z}, {plan.dtype}")
    measured = []
    for row in rows(plan, device, machine):
        measured.append(row)
        print(shown(name_of(row), row), flush=True)
    out = args.out or (None if args.small else RESULTS / "scan_kernel.json")
    if out is not None:
        write(out, {
            "date": today(),
            "hardware": f"{platform.machine()}, {hardware}",
            "versions": versions("triton"),
            "small": args.small,
            "rounds": plan.rounds,
            "rows": measured,
        })  # fmt: skip
        print(f"wrote {out.name}")


if __name__ == "__main__":
    main()
