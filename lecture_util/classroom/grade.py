"""Grade a folder of submissions: `python -m lecture_util grade FOLDER [--csv out.csv] [--seed N]`.

A submission is a student's notebook, `FOLDER/<student>/….ipynb` or `FOLDER/<student>.ipynb`; its
grade_ids, not its name, say which notebook it is. Only its answer cells are graded: they are put
into a fresh copy of the released notebook, so an edited check, a deleted cell or a changed helper
does not count, and whatever else the student wrote outside answer cells does not run.

Each submission runs in processes of its own, with a time limit on the whole of it; when it ends or
is stopped, nothing of it is left running. That guards against mistakes (endless loops, crashes,
stray children), not against malice: grade strangers' code on a machine that holds nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from tqdm import tqdm

from .build import ROOT
from .notebook import grade_id, is_answer, is_check
from .sandbox import exercise_of, printed, run

UNREACHED = "–"
SIGNALS = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")]


class Interrupted(BaseException):
    """A signal asked to stop; what was graded so far is kept."""


@dataclass
class Grade:
    """One submission's verdicts: ✓ ○ ✗, or – for a check that was not reached."""

    student: str
    file: str
    notebook: str = ""
    verdicts: dict[str, str] = field(default_factory=dict)
    feedback: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def solved(self) -> int:
        return sum(verdict == "✓" for verdict in self.verdicts.values())


def submissions(folder: Path) -> list[tuple[str, Path]]:
    """(student, notebook) of every submission, hidden files and checkpoints left out.

    One notebook may be given in the folder's place.
    """
    if folder.is_file():
        return [(folder.stem, folder)]
    found = [(p.stem, p) for p in folder.glob("*.ipynb")]
    found += [(p.parent.name, p) for p in folder.glob("*/*.ipynb")]
    return sorted((s, p) for s, p in found if not s.startswith(".") and p.name[0] != ".")


def releases(folder: Path) -> dict[str, Path]:
    """From the grade_id of each check cell to the released notebook that holds it."""
    return {
        grade_id(cell): path
        for path in sorted(folder.glob("*.ipynb"))
        for cell in nbformat.read(path, as_version=4).cells
        if is_check(cell)
    }


def transplant(release: NotebookNode, submission: NotebookNode) -> list[str]:
    """Put the submission's answer cells into the release; notes on those missing or doubled."""
    answers: dict[str, list[str]] = {}
    for cell in submission.cells:
        if cell.cell_type == "code" and grade_id(cell).startswith("answer-"):
            answers.setdefault(grade_id(cell), []).append(cell.source)
    notes = []
    for cell in release.cells:
        if is_answer(cell):
            found = answers.get(grade_id(cell), [])
            if not found:
                notes.append(f"cell {grade_id(cell)} is missing")
            else:
                cell.source = found[-1]
            if len(found) > 1:
                notes.append(f"cell {grade_id(cell)} appears {len(found)} times: graded the last")
        elif is_check(cell):  # an answer may have taken the name
            cell.source = "from lecture_util.classroom import check\n" + cell.source
    return notes


def grade(
    student: str, path: Path, known: dict[str, Path], timeout_s: float, seed: str, root: Path
) -> Grade:
    """Run one submission in its own processes and read what its check cells printed."""
    result = Grade(student, path.name)
    try:
        nb = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
        ids = [grade_id(cell) for cell in nb.cells]
    except Exception as error:  # nbformat raises many types for what is not a notebook
        result.notes.append(f"not a notebook: {type(error).__name__}")
        return result
    votes = [known[f"check-{i.partition('-')[2]}"] for i in ids if _is_known(i, known)]
    if not votes:
        result.notes.append("no exercise cell of this course: was the released notebook used?")
        return result
    released = max(set(votes), key=votes.count)
    release = nbformat.read(released, as_version=4)
    result.notebook = released.stem
    expected = {exercise_of(cell): printed(cell) for cell in release.cells if is_check(cell)}
    result.verdicts = dict.fromkeys(expected, UNREACHED)
    result.notes += transplant(release, nb)

    # Every cell runs: an answer may use any name that an earlier cell made, and which cells those
    # are cannot be told without running them. A notebook takes under a minute by its own rule.
    events = run(release, timeout_s, seed, root)
    cell = "the start"
    for event in events:
        cell = event.get("cell", cell)
        if "check" in event:
            id, line = event["check"], event["line"]
            verdict = line[:1] if line[:1] in "✓○✗" else "✗"
            result.verdicts[id] = "✗" if verdict == "✓" and line != expected[id] else verdict
            if verdict == "✗":
                result.feedback[id] = line
        if "stop" in event:
            result.notes.append(f"{event['stop']} in {cell}")
            id = cell.rpartition("-")[2]
            if result.verdicts.get(id) == UNREACHED:  # it stopped the run itself
                result.verdicts[id], result.feedback[id] = "✗", event["stop"]
    return result


def _is_known(id: str, known: dict[str, Path]) -> bool:
    return id.startswith(("answer-", "check-")) and f"check-{id.partition('-')[2]}" in known


def table(grades: list[Grade]) -> str:
    rows = [("student", "notebook", "solved", "exercises", "note")]
    for g in grades:
        marks = "  ".join(f"{id} {verdict}" for id, verdict in g.verdicts.items())
        solved = f"{g.solved}/{len(g.verdicts)}"
        rows.append((g.student, g.notebook or g.file, solved, marks, "; ".join(g.notes)))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def write_csv(grades: list[Grade], path: Path) -> None:
    ids = sorted({id for g in grades for id in g.verdicts}, key=lambda i: [*map(int, i.split("."))])
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        head = ["student", "file", "notebook", "solved", "total"]
        writer.writerow([*head, *ids, "note", "feedback"])
        for g in grades:
            marks = [g.verdicts.get(id, "") for id in ids]
            feedback = "\n".join(f"{id}: {line}" for id, line in g.feedback.items())
            head = [g.student, g.file, g.notebook, g.solved, len(g.verdicts)]
            writer.writerow([*head, *marks, "; ".join(g.notes), feedback])


@contextlib.contextmanager
def interrupts() -> Iterator[list[str]]:
    """Turn the first of SIGNALS into Interrupted and ignore the rest; the names of those received.

    One that was ignored before, as under nohup, still is.
    """
    received: list[str] = []

    def stop(number: int, _frame: object) -> None:
        received.append(signal.Signals(number).name)
        if len(received) == 1:
            raise Interrupted

    before = {s: signal.getsignal(s) for s in SIGNALS}
    for s, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(s, stop)
    try:
        yield received
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} s is no time limit: give seconds, above 0")
    return value


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser("lecture_util grade", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "folder", type=Path, help="holds <student>/….ipynb or <student>.ipynb; or one notebook"
    )
    parser.add_argument("--timeout", type=_seconds, default=300, help="seconds for one submission")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    parser.add_argument(
        "--seed", help="LECTURE_SEED of the checks' inputs; drawn afresh by default"
    )
    args = parser.parse_args(argv)
    one = args.folder.is_file() and args.folder.suffix == ".ipynb"
    if not one and not args.folder.is_dir():
        parser.error(
            f"{args.folder} is not a folder, nor a notebook: give that which holds the submissions"
        )
    if args.csv and (args.csv.is_dir() or not args.csv.parent.is_dir()):
        parser.error(f"--csv {args.csv}: expected a file in a folder that exists; create it first")
    found = submissions(args.folder)
    if not found:
        parser.error(f"no .ipynb in {args.folder} or in its folders: expected <student>/NN_….ipynb")
    known = releases(root / "notebooks")
    if not known:
        parser.error(f"no released notebook in {root / 'notebooks'}: run `make notebooks` first")
    seed = args.seed or str(secrets.randbelow(10**6))
    grades: list[Grade] = []
    with interrupts() as received:
        with contextlib.suppress(Interrupted):
            for student, path in tqdm(found, desc="grading", unit="submission", leave=False):
                if received:  # where it came, an exception could not be raised
                    break
                grades.append(grade(student, path, known, args.timeout, seed, root))
        if args.csv:
            write_csv(grades, args.csv)
        # After SIGHUP the terminal may be gone.
        with contextlib.suppress(OSError) if received else contextlib.nullcontext():
            _report(grades, seed, args.csv)
            if received:
                count = f"{len(grades)} of {len(found)} submissions are graded"
                print(f"stopped by {received[0]}: {count}", file=sys.stderr, flush=True)
    return 128 + signal.Signals[received[0]] if received else 0


def _report(grades: list[Grade], seed: str, path: Path | None) -> None:
    print(table(grades))
    print(f"\n✓ solved  ○ not attempted  ✗ wrong  {UNREACHED} not reached   inputs: --seed {seed}")
    if path:
        print(f"written to {path}", flush=True)
