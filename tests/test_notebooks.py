"""The course's own notebooks: up to date, executed, passing with the solutions and not without."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import nbval_run
import pytest

from lecture_util.classroom.exercise import _classroom
from lecture_util.classroom.notebook import (
    MAX_BYTES,
    MAX_LINES,
    check_executed,
    checked_id,
    grade_id,
    is_answer,
    is_check,
)

ROOT = Path(__file__).resolve().parents[1]
TREES = ("solutions", "notebooks")
SOURCES = sorted((ROOT / "solutions").glob("*.py"))
NAMES = [path.stem for path in SOURCES]
EXERCISES = _classroom.load_all()
ATTEMPT_FILES = sorted((ROOT / "tests" / "attempts").glob("nb*.py"))


def code_cells(path):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def described(path, indices):
    """Code cells by what they are, for a message that can be acted on."""
    cells = code_cells(path)
    return [grade_id(cells[i]) or f"{i}: {cells[i].source.splitlines()[0]}" for i in indices]


def build_check(root):
    command = [sys.executable, "-m", "lecture_util", "build", "--check"]
    return subprocess.run(command, cwd=root, env=tree_env(root), capture_output=True, text=True)


def tree_env(root):
    offline = str(ROOT / "tests" / "offline")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([offline, str(root)])}


@pytest.mark.skipif(not NAMES, reason="no notebook yet")
def test_the_committed_notebooks_are_those_of_the_sources():
    done = build_check(ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_executed_and_small(name, tree):
    path = ROOT / tree / f"{name}.ipynb"
    nb = nbformat.read(path, as_version=4)
    check_executed(nb, path)
    assert max(len(c.source.splitlines()) for c in nb.cells if c.cell_type == "code") <= MAX_LINES
    assert path.stat().st_size <= MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_solutions_pass(name):
    # Under another seed than the build's: a ✓ line must not depend on it.
    path = ROOT / "solutions" / f"{name}.ipynb"
    run = nbval_run.once(path, seed="1")
    assert described(path, run.failed) == [], run.output
    assert run.returncode == 0 and len(run.cells) == len(code_cells(path)), run.output


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_of_the_students_notebook_exactly_the_checks_fail(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    run = nbval_run.once(path, seed="1")
    checks = [i for i, cell in enumerate(code_cells(path)) if is_check(cell)]
    assert described(path, run.failed) == described(path, checks), run.output
    assert len(run.cells) == len(code_cells(path)), run.output


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("02_")])
def test_solving_one_exercise_turns_exactly_its_check_green(name, seed, tmp_path):
    path = tmp_path / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir()
    (tmp_path / "images").symlink_to(ROOT / "images")
    nb = nbformat.read(ROOT / "notebooks" / path.name, as_version=4)
    solved = nbformat.read(ROOT / "solutions" / path.name, as_version=4)
    index = next(i for i, cell in enumerate(nb.cells) if is_answer(cell))
    nb.cells[index].source = solved.cells[index].source
    nbformat.write(nb, path)
    run = nbval_run.run(path, seed, tmp_path)
    id = grade_id(nb.cells[index]).replace("answer", "check")
    checks = [i for i, c in enumerate(code_cells(path)) if is_check(c) and grade_id(c) != id]
    assert described(path, run.failed) == described(path, checks), run.output


@pytest.mark.skipif(not NAMES, reason="no notebook yet")
def test_editing_a_source_without_building_is_found(tmp_path):
    for folder in ("lecture_util", *TREES):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    source = tmp_path / "solutions" / SOURCES[0].name
    source.write_text(source.read_text(encoding="utf-8") + "\n# %% [markdown]\n# One more.\n")
    done = build_check(tmp_path)
    assert done.returncode == 1
    assert source.stem in done.stderr and "make notebooks" in done.stderr


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        ("socket.create_connection(('192.0.2.1', 80), timeout=1)", False),
        ("socket.getaddrinfo('example.org', 80)", False),
        ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 9))", False),
        ("socket.create_server(('127.0.0.1', 0)).close()", True),
    ],
)
def test_a_notebook_that_reaches_outside_fails_even_if_it_hides_it(tmp_path, code, passes):
    source = f"import socket\ntry:\n    {code}\nexcept Exception:\n    pass"
    cell = nbformat.v4.new_code_cell(source, execution_count=1)
    metadata = {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    path = tmp_path / "90_outside.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=metadata), path)
    run = nbval_run.run(path, "0", tmp_path)
    assert run.failed == ()  # the cell itself hides it
    assert (run.returncode == 0) == passes, run.output
    assert ("tried to reach another machine" in run.output) != passes


def attempts():
    """(id, label, answer, message) of every known-wrong answer."""
    found = []
    for path in ATTEMPT_FILES:
        spec = importlib.util.spec_from_file_location(f"attempts_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.ATTEMPTS
    return found


ATTEMPTS = attempts()


@pytest.mark.parametrize("seed", ["1", "2"])
@pytest.mark.parametrize(
    ("id", "label", "answer", "says"), ATTEMPTS, ids=[f"{a[0]} {a[1]}" for a in ATTEMPTS]
)
def test_a_known_wrong_answer_gets_its_message(id, label, answer, says, seed, monkeypatch, capsys):
    monkeypatch.setenv("LECTURE_SEED", seed)
    _classroom.check(id, answer)
    line = capsys.readouterr().out
    assert line.startswith(f"✗ {id} ") and says in line, line


@pytest.mark.parametrize("id", EXERCISES)
def test_every_exercise_has_two_known_wrong_answers_and_a_check_cell(id):
    assert sum(attempt[0] == id for attempt in ATTEMPTS) >= 2
    number = int(id.split(".")[0])
    paths = [p for p in SOURCES if p.name.startswith(f"{number:02d}_")]
    built = [
        c
        for p in paths
        if p.with_suffix(".ipynb").exists()
        for c in code_cells(p.with_suffix(".ipynb"))
    ]
    assert not paths or id in [checked_id(c.source) for c in built]
