"""Ten minutes on one card: are the kernels right, how fast are they, and is the step as predicted?

    python benchmarks/gpu.py            on a GPU; writes results/gpu.json and the README's block
    python benchmarks/gpu.py --dry      all of it at small sizes on a CPU, Triton interpreted
    python benchmarks/gpu.py --readme   writes the README's block from results/gpu.json, no more

It needs torch, Triton, transformers, NumPy, SymPy, safetensors and pytest, and no network. Each
section has a share of the time and a process of its own (`sections`), so that one that fails leaves
the others; then the exit status is 1, and the record says what failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import gpu_readme
from record import RESULTS, today, versions, write
from sections import Report, Section, Skip, supervise

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 570  # ten minutes with a start and an end
DRY_BUDGET_S = 900  # a tenth of it, were nothing else running
SHARES = {
    "peaks": 25, "int4_linear": 75, "paged_attention": 60, "selective_scan": 40,
    "llama-2-13b": 75, "llama-3-8b": 55, "engine": 70, "tests": 170,
}  # fmt: skip
BATCHES, CONTEXT = (1, 16, 64), 1024

Add = Callable[[dict], None]


class Here:
    """Where a section runs, and the peaks that the first one measured."""

    def __init__(self, dry: bool, peaks: Path | None) -> None:
        from lecture_util.roofline.hardware import Accelerator

        self.dry, self.device = dry, "cpu" if dry else "cuda"
        self.machine = None
        rows = []
        if peaks is not None and peaks.is_file():
            rows = json.loads(peaks.read_text(encoding="utf-8"))["rows"]
        if rows and "flops_per_s" in rows[-1]:
            names = Accelerator.__dataclass_fields__
            self.machine = Accelerator(**{k: v for k, v in rows[-1].items() if k in names})

    def need_triton(self) -> None:
        from importlib.util import find_spec

        if find_spec("triton") is None:
            raise Skip("Triton is not installed here (it comes for Linux on x86-64)")


def peaks(here: Here, add: Add) -> None:
    """The card's name first, so that a record has it whatever follows; then its two peaks."""
    import torch
    from serving_gpu import datasheet

    from lecture_util.roofline.hardware import processor, this_machine

    if here.dry:
        add({"name": processor()})
    else:
        properties = torch.cuda.get_device_properties(0)
        add({"name": properties.name, "memory_bytes": properties.total_memory})
    machine = this_machine(here.device)
    sheet = datasheet(machine.name, machine.memory_bytes)
    row = asdict(machine) | {"flops_per_s": dict(machine.flops_per_s), "datasheet": None}
    if sheet is not None:
        row["datasheet"] = {
            "name": sheet.name, "flops_per_s": dict(sheet.flops_per_s), "source": sheet.source,
            "bandwidth_bytes_per_s": sheet.bandwidth_bytes_per_s,
        }  # fmt: skip
    add(row)
    rates = ", ".join(f"{k} {v / 1e12:.3g} TFLOP/s" for k, v in machine.flops_per_s.items())
    print(f"  {machine.name}: a copy {machine.bandwidth_bytes_per_s / 1e9:.4g} GB/s; {rates}")


def int4_linear(here: Here, add: Add) -> None:
    import int4_kernel as bench
    from turns import shown

    here.need_triton()
    shapes, batches, rounds = (bench.LLAMA, (1, 16), 10)
    if here.dry:
        shapes, batches, rounds = {"narrow": bench.DRY["narrow"]}, (3,), 1
    ways = bench.kernel_ways(peers=False)
    for row in bench.rows(shapes, batches, ways, rounds, here.device, here.machine):
        add(row)
        print(shown(f"{row['layer']}, B={row['B']}: {row['way']}", row), flush=True)


def paged_attention(here: Here, add: Add) -> None:
    from dataclasses import replace

    import paged_kernel as bench
    from turns import shown

    here.need_triton()
    plan = replace(bench.SMALL, contexts=(37,), batches=(3,), pages=(4,))
    if not here.dry:
        plan = replace(bench.FULL, contexts=(1024, 8192), batches=(1, 32), pages=(16,), rounds=10)
    for row in bench.rows(plan, here.device, here.machine, here.dry):
        add(row)
        if "skipped" not in row:
            print(shown(bench.name_of(row), row), flush=True)


def selective_scan(here: Here, add: Add) -> None:
    import scan_kernel as bench
    from turns import shown

    here.need_triton()
    plan = bench.SMALL if here.dry else bench.FULL
    for row in bench.rows(plan, here.device, here.machine):
        add(row)
        print(shown(bench.name_of(row), row), flush=True)


def decode(shape: str) -> Callable[[Here, Add], None]:
    """Steps of this published shape, or in a dry run of a tiny one of its kind."""

    def section(here: Here, add: Add) -> None:
        import serving_gpu as bench

        model = model_of(shape, here)
        batches, S, rounds = ((1, 3), 19, 1) if here.dry else (BATCHES, CONTEXT, 20)
        sheet = None
        if here.machine is not None:
            sheet = bench.datasheet(here.machine.name, here.machine.memory_bytes)
        for row in bench.steps(model, batches, S, rounds, here.machine, sheet):
            add(row)
            print(bench.shown_step(row), flush=True)

    return section


def engine(here: Here, add: Add) -> None:
    import serving_gpu as bench

    model = model_of("llama-3-8b", here)
    load = bench.SMALL_LOAD if here.dry else bench.LOAD
    for row in bench.throughput(model, **load, machine=here.machine):
        add(row)
        print(bench.shown_load(row), flush=True)


def model_of(shape: str, here: Here):
    import serving_gpu as bench
    import torch

    from lecture_util.model.config import PUBLISHED

    config = PUBLISHED[shape]
    if here.dry:
        return bench.random_model(bench.small(config), "cpu", torch.float32)
    held = torch.cuda.get_device_properties(0).total_memory
    if reason := bench.needed(config, 1, CONTEXT, held):
        raise Skip(reason)
    return bench.random_model(config, "cuda", torch.bfloat16)


def tests(here: Here, add: Add) -> None:
    """Those marked gpu, from the files that have any: they need no more than this script does."""
    import pytest

    class Recorder:
        def pytest_runtest_logreport(self, report) -> None:
            if report.when == "call" or report.outcome != "passed":
                reason = ""
                if report.skipped and isinstance(report.longrepr, tuple):
                    reason = report.longrepr[2].removeprefix("Skipped: ")
                elif report.failed:
                    reason = str(report.longrepr).strip().splitlines()[-1]
                add({
                    "test": report.nodeid, "outcome": report.outcome, "reason": reason,
                    "seconds": round(report.duration, 2),
                })  # fmt: skip

    options = ["-o", "addopts=", "-p", "no:cacheprovider", "--strict-markers", "-q", "-m", "gpu"]
    status = pytest.main([*options, *map(str, files_with_gpu_tests())], plugins=[Recorder()])
    if status:
        raise RuntimeError(f"pytest ended with {pytest.ExitCode(status).name}")


def files_with_gpu_tests() -> list[Path]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in paths if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]


SECTIONS: dict[str, Callable[[Here, Add], None]] = {
    "peaks": peaks,
    "int4_linear": int4_linear,
    "paged_attention": paged_attention,
    "selective_scan": selective_scan,
    "llama-2-13b": decode("llama-2-13b"),
    "llama-3-8b": decode("llama-3-8b"),
    "engine": engine,
    "tests": tests,
}


def measure_all(dry: bool, names: list[str], budget_s: float) -> dict:
    """The record of a whole run."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env.pop("TRITON_INTERPRET", None)
    if dry:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        command = [sys.executable, __file__, *(["--dry"] if dry else [])]
        if names[0] == "peaks":
            command += ["--peaks", str(Path(folder, "1.json"))]  # the first section's result
        results = supervise(
            [
                Section(n, 1 if dry else SHARES[n], (*command, "--section", n, "--into"))
                for n in names
            ],
            budget_s, Path(folder), env,
        )  # fmt: skip
    named = results.get("peaks", {}).get("rows") or [{"name": "unknown"}]
    return {
        "date": today(),
        "card": named[0]["name"],
        "host": f"{platform.system()} {platform.machine()}",
        "versions": versions("triton", "transformers", "numpy"),
        "dry": dry,
        "budget_s": budget_s,
        "seconds": round(time.monotonic() - began, 1),
        "sections": results,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--out", type=Path, help="where the record goes, and nowhere else")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="these sections")
    parser.add_argument("--budget-s", type=float, help=f"seconds for all of it ({BUDGET_S})")
    parser.add_argument("--readme", action="store_true", help="write the README's block, no more")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peaks", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.readme:
        return gpu_readme.refresh()
    if args.section:
        here = Here(args.dry, args.peaks)
        return Report(args.into).run(lambda add: SECTIONS[args.section](here, add))
    if not args.dry:
        import torch

        if not torch.cuda.is_available():
            sys.exit(
                "torch sees no CUDA GPU here: make gpu DRY=1 (python benchmarks/gpu.py --dry) "
                "runs all of it on the CPU, at small sizes"
            )
    budget_s = args.budget_s or (DRY_BUDGET_S if args.dry else BUDGET_S)
    record = measure_all(args.dry, args.only or list(SECTIONS), budget_s)
    whole = not (args.dry or args.only)
    out = args.out or (RESULTS / "gpu.json" if whole else Path(tempfile.mkdtemp(), "gpu.json"))
    write(out, record)
    print(f"{record['card']}, {record['seconds']:.0f} s: wrote {out}")
    if whole and args.out is None:
        gpu_readme.refresh()
    failed = [name for name, found in record["sections"].items() if found["status"] == "failed"]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
