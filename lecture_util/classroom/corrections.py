"""`CORRECTIONS.md`: what is often said, what is right, and the notebook's cell that computes it.

`claims` holds the list. The cells are quoted from `solutions/NN_*.py`, so that the page shows the
code that runs, and a test holds the page against what this module writes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jupytext

from .claims import CORRECTIONS, Correction, Evidence

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CORRECTIONS.md"
REMEDY = "run `make corrections` and commit the result"
INTRO = """\
# Corrections

This course follows an excellent lecture, [Stanford CS336, spring 2025, lecture
10](https://github.com/stanford-cs336/spring2025-lectures), and the slides [*Deep Dive: Optimizing
LLM Inference*](https://youtu.be/hMs8VNRy5Ys) by Julien Simon. Both state their claims so plainly
that one can put numbers into them, and that is what the notebooks do. Here and there the numbers
come out differently: a lecture rounds, a slide has room for one line, a sentence outgrows the case
it was made for. Others below are of papers, posts and project pages, and some are only half wrong.

Each has its *Erratum* (once a *Note*) in a notebook, beside a cell that computes what is right.
`make test` runs those cells. They are quoted here as they stand there; in between them a notebook
has the derivation, the picture and the measurement.

If you find a mistake of ours, please open an issue: it will get a line of its own here.
"""


@dataclass(frozen=True)
class Found:
    """A cell of a notebook: its code, its tags, and the headings it stands under."""

    path: Path
    code: str
    tags: tuple[str, ...]
    section: str


@cache
def cells(notebook: str, root: Path = ROOT) -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """(type, source, tags, section) of each cell of a notebook's source, in order."""
    section, found = "", []
    for cell in jupytext.read(source(notebook, root), fmt="py:percent").cells:
        for line in cell.source.splitlines() if cell.cell_type == "markdown" else ():
            if line.startswith(("## ", "### ")):
                section = line.lstrip("# ")
        tags = tuple(cell.metadata.get("tags", ()))
        found.append((cell.cell_type, cell.source, tags, section))
    return tuple(found)


def source(notebook: str, root: Path = ROOT) -> Path:
    """`solutions/NN_topic.py`. Raises: LookupError unless there is exactly one."""
    paths = sorted((root / "solutions").glob(f"{notebook}_*.py"))
    if len(paths) != 1:
        raise LookupError(f"{len(paths)} sources of notebook {notebook} in solutions/, expected 1")
    return paths[0]


def find(evidence: Evidence, root: Path = ROOT) -> Found:
    """The one code cell that holds the words which the evidence names.

    Raises: LookupError if no code cell holds them, or several do.
    """
    path = source(evidence.notebook, root)
    hits = [
        Found(path, text, tags, section)
        for kind, text, tags, section in cells(evidence.notebook, root)
        if kind == "code" and evidence.cell in text
    ]
    if len(hits) != 1:
        raise LookupError(
            f"{len(hits)} code cells of {path.name} hold {evidence.cell!r}, expected 1: name words "
            "of that cell alone in lecture_util/classroom/claims.py"
        )
    return hits[0]


def notes(root: Path = ROOT) -> list[tuple[str, str]]:
    """(notebook, text) of every Erratum note in the sources, joined to one line each."""
    found = []
    for path in sorted((root / "solutions").glob("[0-9][0-9]_*.py")):
        for kind, text, *_ in cells(path.name[:2], root):
            if kind != "markdown":
                continue
            lines = text.splitlines()
            for start in (k for k, line in enumerate(lines) if line.startswith("> **Erratum")):
                end = start
                while end < len(lines) and lines[end].startswith(">"):
                    end += 1
                joined = " ".join(line.removeprefix(">").strip() for line in lines[start:end])
                found.append((path.name[:2], joined))
    return found


def page(corrections: tuple[Correction, ...] = CORRECTIONS, root: Path = ROOT) -> str:
    """The whole of CORRECTIONS.md."""
    lines = [INTRO, "| | Often said | Right | Notebook |", "|---|---|---|---|"]
    for number, each in enumerate(corrections, 1):
        where = ", ".join(sorted({evidence.notebook for evidence in each.evidence}))
        row = (f"[{number}](#c{number})", each.said, each.right, where)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    for number, each in enumerate(corrections, 1):
        lines += ["", f'<a id="c{number}"></a>', "", f"## {number}. {each.title}", ""]
        lines += [f"**Often said** ({each.by}): {each.said}", "", f"**Right:** {each.right}"]
        for evidence in each.evidence:
            found = find(evidence, root)
            link = f"[{evidence.notebook}](notebooks/{found.path.stem}.ipynb)"
            lines += ["", f"Notebook {link}, *{found.section}*:", ""]
            lines += ["```python", found.code, "```"]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """`python -m lecture_util corrections [--check]`: write CORRECTIONS.md, or say if it is old."""
    parser = argparse.ArgumentParser(
        prog="python -m lecture_util corrections", description=main.__doc__
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if it differs")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    args = parser.parse_args(argv)
    try:
        text = page()
    except LookupError as error:
        print(error, file=sys.stderr)
        return 1
    if args.check:
        same = args.out.exists() and args.out.read_text(encoding="utf-8") == text
        if not same:
            print(f"{args.out.name} is not what the notebooks' sources give: {REMEDY}")
        return 0 if same else 1
    args.out.write_text(text, encoding="utf-8")
    print(f"{len(CORRECTIONS)} corrections in {args.out.name}")
    return 0
