"""Run the sections of a long measurement, each in a process of its own and within its time.

A section that fails, hangs or takes the machine's driver down with it costs its own share of the
time and no more: the others run, and what it had found until then is kept. `Section.share` is its
part of the budget; what one leaves over, the later ones may use.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from record import write


@dataclass(frozen=True)
class Section:
    """command: what to run, to which the file for its result is appended."""

    name: str
    share: float
    command: tuple[str, ...]


class Skip(Exception):
    """This section cannot be had here; the message says why."""


class Report:
    """What a section has found so far, in a file that is whole at any moment."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.state = path, [], {"status": "failed", "reason": None}

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        write(self.path, self.state | {"rows": self.rows})

    def run(self, work: Callable[[Callable[[dict], None]], None]) -> int:
        """Do the work, which is handed `add`; say how it ended. -> exit status."""
        try:
            work(self.add)
            self.state = {"status": "measured", "reason": None}
        except Skip as reason:
            self.state = {"status": "skipped", "reason": one_line(reason)}
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            kind = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
            self.state = {"status": "failed", "reason": kind + one_line(error)}
        self.save()
        return int(self.state["status"] == "failed")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def supervise(
    sections: Sequence[Section],
    budget_s: float,
    folder: Path,
    env: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, dict]:
    """Run them in order. -> for each its status, reason, seconds and rows."""
    began, spent, results = time.monotonic(), 0.0, {}
    total = sum(section.share for section in sections)
    for number, section in enumerate(sections, 1):
        spent += section.share / total * budget_s
        left = max(0.1, spent - (time.monotonic() - began))
        tell(f"[{number}/{len(sections)}] {section.name}: at most {left:.0f} s")
        start = time.monotonic()
        found = _run(section, left, folder / f"{number}.json", env)
        found["seconds"] = round(time.monotonic() - start, 1)
        results[section.name] = found
        why = f": {found['reason']}" if found["reason"] else ""
        tell(f"    {found['status']} in {found['seconds']:.0f} s, {len(found['rows'])} rows{why}")
    return results


def _run(section: Section, limit_s: float, path: Path, env: Mapping[str, str] | None) -> dict:
    sys.stdout.flush()
    process = subprocess.Popen([*section.command, str(path)], env=env, start_new_session=True)
    try:
        status = process.wait(limit_s)
        died = f"it ended with status {status} before it could say why"
        if status < 0:
            died = f"it died of signal {-status}, {signal.Signals(-status).name}"
    except subprocess.TimeoutExpired:
        status, died = None, f"it took more than its {limit_s:.0f} s; what it found is kept"
    finally:  # of an interrupt too: nothing goes on behind us
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = {"status": "failed", "reason": None, "rows": []}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    if status is None or (found["status"] == "failed" and found["reason"] is None):
        found |= {"status": "failed", "reason": died}
    return found
