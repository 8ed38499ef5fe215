"""Run a notebook under nbval in a process of its own: which cells passed and which failed."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """An nbval run: indices of all code cells and of those that failed, and what was printed."""

    cells: tuple[int, ...]
    failed: tuple[int, ...]
    returncode: int
    output: str


@cache
def once(path: Path, seed: str) -> Run:
    """The run of a committed notebook: once a session, however many tests read it."""
    return run(path, seed, Path(os.environ["LECTURE_OFFLINE_LOG"]).parent)


def run(path: Path, seed: str, scratch: Path) -> Run:
    """`pytest --nbval` on one notebook, offline, with LECTURE_SEED set."""
    report = scratch / f"nbval-{os.getpid()}-{path.parent.name}-{path.stem}-{seed}.xml"
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "--color=no", str(path)]
    command += ["-p", "offline_session", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # The tests' own options, such as a selection by mark, do not apply to cells.
    command += ["--rootdir", str(path.parent), "-c", os.devnull]
    env = {**os.environ, "LECTURE_SEED": seed}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=path.parent)
    cells, failed = [], []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            index = int(case.attrib["name"].removeprefix("Cell "))
            cells.append(index)
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(index)
        report.unlink()
    return Run(tuple(cells), tuple(failed), done.returncode, done.stdout + done.stderr)
