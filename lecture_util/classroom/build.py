"""Build the notebooks from their sources: `python -m lecture_util build [NN ...] [--check]`.

solutions/NN_topic.py -> executed solutions/NN_topic.ipynb -> notebooks/NN_topic.ipynb, the
student's copy. Both files are written together or not at all. `--check` executes nothing: it says
whether what is committed is what a build would derive from the sources.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

from .exercise import _classroom
from .notebook import (
    IGNORED,
    METADATA,
    WIDGET,
    BuildError,
    check_executed,
    check_size,
    dumps,
    number_of,
    read_source,
    student_copy,
    where,
)

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "run `make notebooks` and commit the result"


@dataclass(frozen=True)
class Paths:
    """One notebook's three files."""

    source: Path

    @property
    def solution(self) -> Path:
        return self.source.with_suffix(".ipynb")

    @property
    def student(self) -> Path:
        return self.source.parents[1] / "notebooks" / self.solution.name


def sources(root: Path, numbers: list[str]) -> list[Paths]:
    """The notebooks asked for, or all of them."""
    found = {number_of(path): Paths(path) for path in sorted((root / "solutions").glob("*.py"))}
    if not numbers:
        return list(found.values())
    known = ", ".join(f"{n:02d}" for n in found) or "none"
    for number in numbers:
        if not number.isdecimal() or int(number) not in found:
            raise BuildError(f"no notebook {number} in {root / 'solutions'}: there are {known}")
    return [found[int(number)] for number in numbers]


def kernel_env(root: Path, **more: str) -> dict[str, str]:
    """The environment in which notebooks run: `lecture_util` is the one beside them."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1", **more}


def build(paths: Paths, root: Path = ROOT, timeout_s: float = 300) -> None:
    """Execute one source and write its two notebooks.

    Raises: BuildError if the source breaks a rule or a cell fails; then nothing is written.
    """
    nb = read_source(paths.source, _classroom.load(number_of(paths.source)))
    _execute(nb, paths.source, root, timeout_s)
    _normalise(nb, paths.source)
    check_executed(nb, paths.solution)
    student = student_copy(nb)
    texts = {paths.solution: dumps(nb), paths.student: dumps(student)}
    for path, text in texts.items():
        nbformat.validate(nbformat.reads(text, as_version=nbformat.NO_CONVERT))
        check_size(text, path, nb)
    _write_together(texts)


def _execute(nb: NotebookNode, source: Path, root: Path, timeout_s: float) -> None:
    code = sum(cell.cell_type == "code" for cell in nb.cells)
    at: dict = {}
    with tqdm(total=code, desc=source.stem, unit="cell", leave=False) as bar:
        client = NotebookClient(
            nb,
            timeout=timeout_s,
            kernel_name="python3",
            resources={"metadata": {"path": str(source.parent)}},
            store_widget_state=False,
            record_timing=False,
            on_cell_start=lambda cell, cell_index: at.update(index=cell_index, cell=cell),
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            client.execute(env=kernel_env(root), stderr=subprocess.DEVNULL)
        except CellExecutionError as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", error.traceback)
            problem = f"{error.ename}: {error.evalue}\n\n{at['cell'].source}\n\n{text}"
        except CellTimeoutError:
            problem = f"still running after {timeout_s:g} s\n\n{at['cell'].source}"
        except DeadKernelError:
            problem = f"the kernel died\n\n{at['cell'].source}"
        else:
            return
    raise BuildError(f"{where(source, at['index'], at['cell'])}: {problem}") from None


def _normalise(nb: NotebookNode, source: Path) -> None:
    """Keep only what is the same in every build with the same outputs."""
    nb.metadata = nbformat.from_dict(METADATA)
    count = 0
    for index, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.metadata.pop("execution", None)
        outputs: list[NotebookNode] = []
        for output in cell.outputs:
            if WIDGET in output.get("data", {}):
                if IGNORED not in cell.metadata.get("tags", []):
                    raise BuildError(
                        f"{where(source, index, cell)}: shows a widget, which nbval cannot "
                        f'compare; tag "{IGNORED}"'
                    )
                continue  # without its state, which is not stored, a view is an error message
            if output.output_type == "execute_result":
                output.execution_count = count
            if output.output_type == "stream" and outputs and outputs[-1].get("name"):
                same = outputs[-1].name == output.name
            else:
                same = False
            if same:  # how a stream is cut into pieces depends on the time between prints
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        cell.outputs = outputs


def _write_together(texts: dict[Path, str]) -> None:
    ready: list[tuple[str, Path]] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=".", suffix=".tmp", delete=False
            ) as file:
                ready.append((file.name, path))
                file.write(text)
        for name, path in ready:
            os.chmod(name, 0o644)
            os.replace(name, path)
    finally:
        for name, _ in ready:
            Path(name).unlink(missing_ok=True)


def check(paths: Paths) -> None:
    """Require that the committed notebooks are those of the source.

    Raises: BuildError naming the first cell that differs.
    """
    fresh = read_source(paths.source, _classroom.load(number_of(paths.source)))
    for path in (paths.solution, paths.student):
        if not path.exists():
            raise BuildError(f"{path.parent.name}/{path.name} is missing: {REMEDY}")
    solution = nbformat.read(paths.solution, as_version=nbformat.NO_CONVERT)
    _same_cells(fresh, solution, paths.solution, ("cell_type", "source", "id", "metadata"))
    check_executed(solution, paths.solution)
    student_text = paths.student.read_text(encoding="utf-8")
    student = nbformat.reads(student_text, as_version=nbformat.NO_CONVERT)
    _same_cells(student_copy(solution), student, paths.student)
    for path, nb in ((paths.solution, solution), (paths.student, student_copy(solution))):
        text = path.read_text(encoding="utf-8")
        check_size(text, path, nb)
        if text != dumps(nb) or nb.metadata != METADATA:
            raise BuildError(f"{path.parent.name}/{path.name}: not as written by a build: {REMEDY}")


def _same_cells(
    want: NotebookNode, got: NotebookNode, path: Path, keys: tuple[str, ...] = ()
) -> None:
    for index, (w, g) in enumerate(zip(want.cells, got.cells, strict=False)):
        for key in keys or sorted({*w, *g}):
            if w.get(key) != g.get(key):
                place = f"{path.parent.name}/{where(path, index, g)}"
                raise BuildError(f"{place}: its {key} is not that of the source: {REMEDY}")
    if len(want.cells) != len(got.cells):
        raise BuildError(
            f"{path.parent.name}/{path.name} has {len(got.cells)} cells, "
            f"the source gives {len(want.cells)}: {REMEDY}"
        )


def orphans(root: Path) -> list[str]:
    """Notebooks without a source."""
    names = {path.stem for path in (root / "solutions").glob("*.py")}
    built = [p for folder in ("solutions", "notebooks") for p in (root / folder).glob("*.ipynb")]
    return [f"{p.parent.name}/{p.name} has no source" for p in built if p.stem not in names]


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser("lecture_util build", description=__doc__.split("\n\n")[0])
    parser.add_argument("numbers", nargs="*", metavar="NN", help="notebooks; all by default")
    parser.add_argument("--check", action="store_true", help="execute nothing; exit 1 if stale")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a cell may take")
    args = parser.parse_args(argv)
    try:
        todo = sources(root, args.numbers)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    problems = orphans(root) if args.check and not args.numbers else []
    for paths in todo:
        try:
            check(paths) if args.check else build(paths, root, args.timeout)
        except BuildError as error:
            problems.append(str(error))
        else:
            print(f"{paths.source.stem}: {'up to date' if args.check else 'built'}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0
