"""A py:percent source as a notebook, the rules it must keep, and the student's copy of it.

Everything here is pure: text in, notebook out. `build` executes and writes.

An answer cell holds `### BEGIN SOLUTION` and `### END SOLUTION`; the code cell after it is its
check, the single statement `check("2.3", name)`. Both get nbgrader's cell metadata (schema 3).
"""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
MAX_LINES, MAX_BYTES = 25, 200_000
IGNORED = "nbval-ignore-output"
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class BuildError(Exception):
    """A source or a notebook breaks a rule; the message names the file, the cell and the remedy."""


def number_of(path: Path) -> int:
    """The notebook's number: `02_arithmetic_intensity.py` -> 2."""
    if not (match := re.match(r"(\d\d)_\w+$", path.stem)):
        raise BuildError(f"{path.name}: expected a name such as 02_arithmetic_intensity.py")
    return int(match[1])


def read_source(path: Path, exercises: list[str]) -> NotebookNode:
    """The notebook of a py:percent source: unexecuted, with ids and nbgrader metadata.

    exercises: the ids registered for this notebook, each of which the source must check.
    Raises:    BuildError for the first rule that a cell breaks.
    """
    raw = jupytext.read(path, fmt="py:percent")
    number, cells = number_of(path), []
    for index, cell in enumerate(raw.cells):
        cell.id = f"{number:02d}-{index:03d}"
        cell.metadata = NotebookNode(
            {k: v for k, v in cell.metadata.items() if k != "lines_to_next_cell"}
        )
        cells.append(cell)
    nb = nbformat.v4.new_notebook(cells=cells, metadata=copy.deepcopy(METADATA))
    nb.nbformat_minor = 5
    _mark_exercises(nb, path)
    _refuse(nb, path, exercises)
    return nb


def checked_id(source: str) -> str | None:
    """The exercise id of a check cell, which holds one `check("2.3", …)` and nothing else."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # an IPython magic
        return None
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        return None
    call = body[0].value
    if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "check":
        return None
    id = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    return id if isinstance(id, str) else None


def grade_id(cell: NotebookNode) -> str:
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def is_answer(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and bool(cell.metadata.get("nbgrader", {}).get("solution"))


def is_check(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and bool(cell.metadata.get("nbgrader", {}).get("grade"))


def student_copy(solution: NotebookNode) -> NotebookNode:
    """The solution notebook without its answers; outputs stay, so that nbval can grade."""
    nb = copy.deepcopy(solution)
    for cell in nb.cells:
        if is_answer(cell):
            cell.source = _stub(cell.source)
    return nb


def dumps(nb: NotebookNode) -> str:
    """The notebook's file, byte for byte."""
    return nbformat.writes(nb, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def where(path: Path, index: int, cell: NotebookNode) -> str:
    first = next((line for line in cell.source.splitlines() if line.strip()), "empty")
    return f"{path.name}, cell {index} ({first.strip()[:50]})"


def check_size(text: str, path: Path, nb: NotebookNode) -> None:
    if (size := len(text.encode())) <= MAX_BYTES:
        return
    sizes = [len(str(cell.get("outputs", "")) + cell.source) for cell in nb.cells]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    raise BuildError(
        f"{path.name} has {size:,} bytes, at most {MAX_BYTES:,} allowed; its largest cell is "
        f"{where(path, largest, nb.cells[largest])}: draw fewer pixels or print less"
    )


def check_executed(nb: NotebookNode, path: Path) -> None:
    """nbval compares only cells with an execution count, so every code cell must have one."""
    count = 0
    for index, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        count += 1
        if cell.execution_count != count:
            raise BuildError(
                f"{where(path, index, cell)}: execution count {cell.execution_count}, expected "
                f"{count}; nbval does not compare a cell that was not run"
            )
        if any(output.output_type == "error" for output in cell.outputs):
            raise BuildError(f"{where(path, index, cell)}: its stored output is an error")


def _mark_exercises(nb: NotebookNode, path: Path) -> None:
    code = [(i, cell) for i, cell in enumerate(nb.cells) if cell.cell_type == "code"]
    for (index, cell), (_, after) in zip(code, [*code[1:], (0, None)], strict=True):
        if BEGIN in cell.source or END in cell.source:
            _stub(cell.source, where(path, index, cell))
            id = checked_id(after.source) if after else None
            if id is None:
                raise BuildError(
                    f"{where(path, index, cell)}: a solution must be followed by its check; make "
                    'the next code cell check("N.k", name) and nothing else'
                )
            cell.metadata["nbgrader"] = _nbgrader(f"answer-{id}", solution=True)
        elif id := checked_id(cell.source):
            cell.metadata["nbgrader"] = _nbgrader(f"check-{id}", grade=True, locked=True) | {
                "points": 1
            }


def _nbgrader(grade_id: str, *, grade=False, locked=False, solution=False) -> dict:
    return {
        "grade": grade,
        "grade_id": grade_id,
        "locked": locked,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }


def _stub(source: str, place: str = "answer cell") -> str:
    """Put nbgrader's stub where a solution stands."""
    lines, inside = [], False
    for line in source.splitlines():
        mark, indent = line.strip(), line[: len(line) - len(line.lstrip())]
        if mark == BEGIN and not inside:
            if not indent:
                raise BuildError(
                    f"{place}: the solution stands outside a function, so its stub would stop "
                    "Run All; put it into one"
                )
            inside = True
            lines += [f"{indent}# YOUR CODE HERE", f"{indent}raise NotImplementedError"]
        elif mark == END and inside:
            inside = False
        elif BEGIN in line or END in line:
            raise BuildError(f"{place}: {mark!r} has no partner; a region is {BEGIN} … {END}")
        elif not inside:
            lines.append(line)
    if inside:
        raise BuildError(f"{place}: {BEGIN!r} has no partner; close the region with {END}")
    return "\n".join(lines)


def _refuse(nb: NotebookNode, path: Path, exercises: list[str]) -> None:
    seen: set[str] = set()
    for index, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        place = where(path, index, cell)
        if not cell.source.strip():
            raise BuildError(f"{place}: an empty code cell; remove it")
        if (lines := len(cell.source.splitlines())) > MAX_LINES:
            raise BuildError(f"{place}: {lines} lines of code, at most {MAX_LINES}; split it")
        ignored = IGNORED in cell.metadata.get("tags", [])
        if re.search(r"^status\(", cell.source, re.MULTILINE) and not ignored:
            raise BuildError(
                f'{place}: what status() prints changes as exercises are solved; tag "{IGNORED}"'
            )
        if not is_check(cell):
            continue
        id = checked_id(cell.source)
        if int(id.split(".")[0]) != number_of(path):
            raise BuildError(f"{place}: exercise {id} belongs to another notebook")
        if id not in exercises:
            raise BuildError(
                f"{place}: exercise {id} is not registered; registered are {_list(exercises)}"
            )
        if id in seen:
            raise BuildError(f"{place}: exercise {id} is checked twice")
        if ignored:
            raise BuildError(f'{place}: a check cell tagged "{IGNORED}" is never compared')
        seen.add(id)
    answered = {grade_id(c).removeprefix("answer-") for c in nb.cells if is_answer(c)}
    if missing := [id for id in exercises if id not in seen]:
        raise BuildError(f"{path.name}: registered but never checked: {_list(missing)}")
    if unanswered := sorted(seen - answered):
        raise BuildError(f"{path.name}: {_list(unanswered)} has no answer cell before its check")


def _list(ids: list[str]) -> str:
    return ", ".join(ids) or "none"
