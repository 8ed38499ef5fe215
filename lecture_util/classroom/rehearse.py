"""Rehearse a notebook on the presenting machine: `python -m lecture_util rehearse NN [...]`.

Before class, each notebook is run with its solutions, twice, in fresh kernels: the first run warms
model, kernels and caches, the second says how long each cell will take on stage. Then it is run in
the real deck, in a browser without a window, and every slide is measured against a 1280 x 720
screen. Exit 1 on an error, or when a slide would have to be scrolled.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

from .build import ROOT, kernel_env, sources
from .deck import Fit, find_chromium, measure_slides
from .notebook import BuildError, where
from .present import require_slideshow, stage_copy

SLOW_S = 5.0


def solved(nb: NotebookNode) -> NotebookNode:
    """The stage's copy with every solution revealed."""
    nb = copy.deepcopy(nb)
    for cell in nb.cells:
        cell.source = cell.metadata.get("stage", {}).get("solution", cell.source)
    return nb


def time_cells(nb: NotebookNode, source: Path, timeout_s: float, label: str = "") -> list[float]:
    """Run a copy in a fresh kernel; seconds by cell, zero for prose.

    Raises: BuildError naming the cell that failed.
    """
    nb, seconds, at = copy.deepcopy(nb), [0.0] * len(nb.cells), {}
    bar = tqdm(total=len(nb.cells), desc=f"{source.stem} {label}".strip(), unit="cell", leave=False)

    def started(cell: NotebookNode, cell_index: int) -> None:
        at.update(index=cell_index, cell=cell, t=time.perf_counter())

    def ended(cell: NotebookNode, cell_index: int, **_) -> None:
        seconds[cell_index] = time.perf_counter() - at["t"]
        bar.update(cell_index + 1 - bar.n)

    client = NotebookClient(
        nb,
        timeout=timeout_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(source.parent)}},
        on_cell_execute=started,
        on_cell_executed=ended,
    )
    try:
        with bar:
            client.execute(env=kernel_env(ROOT), stderr=subprocess.DEVNULL)
    except CellExecutionError as error:
        problem = f"{error.ename}: {error.evalue}"
    except CellTimeoutError:
        problem = f"still running after {timeout_s:g} s"
    except DeadKernelError:
        problem = "the kernel died"
    else:
        return seconds
    raise BuildError(f"{where(source, at['index'], at['cell'])}: {problem}") from None


def advice(cold_s: float, warm_s: float) -> str:
    """What to do about a cell, or nothing when it is quick."""
    if max(cold_s, warm_s) <= SLOW_S:
        return ""
    if warm_s <= SLOW_S:
        return "slow the first time only: warm now, rehearse again on the day"
    if warm_s <= 4 * SLOW_S:
        return "talk over it, or press Run all before class"
    return "press Run all before class, make it smaller, or skip it on stage"


def print_times(nb: NotebookNode, source: Path, cold: list[float], warm: list[float]) -> None:
    print(f"{source.stem}: first run {sum(cold):.1f} s, second run {sum(warm):.1f} s")
    slow = [i for i in range(len(cold)) if advice(cold[i], warm[i])]
    if not slow:
        print(f"  no cell takes over {SLOW_S:g} s")
        return
    print(f"  over {SLOW_S:g} s     first   second")
    for i in slow:
        print(f"  cell {i:>3}  {cold[i]:>6.1f} s {warm[i]:>6.1f} s  {advice(cold[i], warm[i])}")
        print(f"      {first_line(nb, i)}")


def print_fits(fits: list[Fit], nb: NotebookNode) -> None:
    over = sum(fit.over > 0 for fit in fits)
    print(f"  {len(fits)} slides, {over or 'none'} too high for {fits[0].room} px")
    print("  slide  cells    height")
    for number, fit in enumerate(fits, 1):
        cells = f"{fit.slide.cells[0]}-{fit.slide.cells[-1]}"
        verdict = f"✗ {fit.over} px too high" if fit.over else "✓ fits"
        print(f"  {number:>5}  {cells:<8} {fit.height:>5} px  {verdict:<20} {fit.slide.title[:60]}")
        if fit.over:
            for cell in fit.breaks:
                print(f"         → subslide at cell {cell}: {first_line(nb, cell)}")
            for cell in fit.too_high:
                print(f"         → split cell {cell}, or tag it hide-input: {first_line(nb, cell)}")


def first_line(nb: NotebookNode, cell: int) -> str:
    return next(line.strip() for line in nb.cells[cell].source.splitlines() if line.strip())[:70]


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser("lecture_util rehearse", description=__doc__.split("\n\n")[0])
    parser.add_argument("numbers", nargs="+", metavar="NN", help="notebooks, such as 02 03")
    parser.add_argument("--only", choices=["times", "slides"], help="half of the rehearsal")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a cell may take")
    args = parser.parse_args(argv)
    good, chromium = True, find_chromium()
    try:
        for paths in sources(root, args.numbers):
            nb = solved(stage_copy(paths.source))
            if args.only != "slides":
                cold = time_cells(nb, paths.source, args.timeout, "cold")
                warm = time_cells(nb, paths.source, args.timeout, "warm")
                print_times(nb, paths.source, cold, warm)
            if args.only == "times":
                continue
            require_slideshow()
            if chromium is None:
                print("  slides not measured here: no Chromium (apt-get install chromium)")
                continue
            print(f"{paths.source.stem}, in the deck")
            fits = measure_slides(paths, chromium)
            print_fits(fits, nb)
            good &= not any(fit.over for fit in fits)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if good else 1
