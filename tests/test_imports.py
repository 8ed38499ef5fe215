"""The two import rules of the house, read off the syntax tree, and what importing it costs."""

import ast
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "lecture_util"
GROUND = {"model", "kernels"}
TOP = "classroom"
COMBINES = "together"  # stands on all parts; none of them knows of it
MODULES = sorted(HOUSE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The folder of lecture_util that a file is in; '' for the files beside them."""
    parts = path.relative_to(HOUSE).parts
    return parts[0] if len(parts) > 1 else ""


def rooms_imported(path: Path) -> set[str]:
    """The folders of lecture_util that a file imports, wherever in it the import stands."""
    package = ["lecture_util", *path.relative_to(HOUSE).parent.parts]
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    folders = {p.name for p in HOUSE.iterdir() if p.is_dir()}
    return {p[1] for p in parts if p[0] == "lecture_util" and len(p) > 1} & folders


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(HOUSE)))
def test_a_room_imports_only_what_is_below_it(path):
    room = room_of(path)
    allowed = GROUND | {room}
    if room in ("", TOP):  # the classroom, and the command line that opens it
        return
    if room == COMBINES:
        allowed |= {p.name for p in HOUSE.iterdir()} - {TOP}
    if room not in GROUND | {"roofline"}:
        allowed.add("roofline")
    assert rooms_imported(path) <= allowed, (
        f"{path.relative_to(ROOT)} imports {rooms_imported(path) - allowed}: a part imports the "
        "ground and roofline, the ground imports no part, `together` imports parts, and nothing "
        "imports the classroom"
    )


def test_the_map_imports_nothing():
    assert rooms_imported(HOUSE / "__init__.py") == set()


@pytest.mark.parametrize(
    ("line", "rooms"),
    [
        ("import lecture_util.classroom.grade", {"classroom"}),
        ("from lecture_util import model", {"model"}),
        ("from ..classroom import check", {"classroom"}),
        ("from .. import model", {"model"}),
        ("from . import config", {"roofline"}),
        ("from .timing import measure", {"roofline"}),
        ("import torch", set()),
        ("def f():\n    from lecture_util.classroom import check", {"classroom"}),
    ],
)
def test_every_way_of_importing_is_seen(tmp_path, monkeypatch, line, rooms):
    house = tmp_path / "lecture_util"
    for name in ("model", "roofline", "classroom"):
        (house / name).mkdir(parents=True)
    monkeypatch.setattr(sys.modules[__name__], "HOUSE", house)
    path = house / "roofline" / "timing.py"
    path.write_text(line)
    assert rooms_imported(path) == rooms


def cpu_seconds(line: str) -> float:
    """What a line costs a fresh interpreter, the best of several; a busy machine's waits aside."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(ROOT)}
    code = f"import time; start = time.process_time(); {line}; print(time.process_time() - start)"
    command = [sys.executable, "-c", code]
    run = partial(subprocess.run, command, env=env, check=True, cwd=ROOT, capture_output=True)
    return min(float(run().stdout) for _ in range(5))


@pytest.mark.parametrize("module", ["lecture_util", "lecture_util.classroom"])
def test_importing_prints_nothing_and_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_importing_takes_under_a_fifth_of_a_second():
    assert cpu_seconds("import lecture_util, lecture_util.classroom") < 0.2
