"""Submissions of every kind: the right table, and nothing left running."""

import csv
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
import toy_course

from lecture_util.classroom import build, grade
from lecture_util.classroom.build import Paths
from lecture_util.classroom.exercise import _classroom

TWICE, MINUS = "def twice(x): return 2 * x", "def minus(x): return -x"
STRAY = "78901.5"  # seconds; also how a stray process is recognised

SUBMISSIONS = {
    "solved": {"answer-91.1": TWICE, "answer-91.2": MINUS},
    "half": {"answer-91.1": TWICE},
    "crash": {"answer-91.1": TWICE, "answer-91.2": "import os\nos._exit(3)"},
    "endless": {"answer-91.1": "def twice(x):\n    while True: print(x)", "answer-91.2": MINUS},
    "stray": {
        "answer-91.1": TWICE,
        "answer-91.2": "import subprocess\n"
        f"subprocess.Popen(['sleep', '{STRAY}'], start_new_session=True)\n{MINUS}",
    },
    "syntax": {"answer-91.1": "def twice(x) return", "answer-91.2": MINUS},
    "edited": {"check-91.1": "print('✓ 91.1 Double: 1 check')", "answer-91.2": MINUS},
    "named": {"answer-91.1": "def check(*_): print('✓')\ntwice = check", "answer-91.2": MINUS},
}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The toy course built, and a folder of submissions to it."""
    root = tmp_path_factory.mktemp("course")
    (root / "lecture_util").symlink_to(toy_course.ROOT / "lecture_util")
    source = toy_course.write(root)
    with pytest.MonkeyPatch.context() as patch:
        for id in ("91.1", "91.2"):
            patch.setitem(_classroom.exercises, id, None)
        build.build(Paths(source), root)
    for student, cells in SUBMISSIONS.items():
        nb = nbformat.read(root / "notebooks/91_toy.ipynb", as_version=4)
        for cell in nb.cells:
            id = cell.metadata.get("nbgrader", {}).get("grade_id")
            cell.source = cells.get(id, cell.source)
        (root / "work" / student).mkdir(parents=True)
        nbformat.write(nb, root / "work" / student / "91_toy (copy).ipynb")
    (root / "work" / "torn.ipynb").write_text('{"cells": [')
    nbformat.write(nbformat.v4.new_notebook(), root / "work" / "empty.ipynb")
    return root


@pytest.mark.slow
def test_each_submission_gets_its_row_and_nothing_keeps_running(course, tmp_path, capsys):
    out = tmp_path / "grades.csv"
    before = set(psutil.Process().children(recursive=True))  # another test's browser, say
    args = [str(course / "work"), "--timeout", "8", "--seed", "3", "--csv", str(out)]
    assert grade.main(args, course) == 0
    rows = {row["student"]: row for row in csv.DictReader(out.open(encoding="utf-8"))}
    verdicts = {s: (r["solved"], r["91.1"], r["91.2"], r["note"]) for s, r in rows.items()}
    assert verdicts == {
        "solved": ("2", "✓", "✓", ""),
        "half": ("1", "✓", "○", ""),
        "crash": ("1", "✓", "✗", "kernel died in cell answer-91.2"),
        "endless": ("0", "✗", "–", "timed out after 8 s in cell check-91.1"),
        "stray": ("2", "✓", "✓", ""),
        "syntax": ("1", "✗", "✓", ""),
        "edited": ("1", "○", "✓", ""),
        "named": ("1", "✗", "✓", ""),
        "torn": ("0", "", "", "not a notebook: NotJSONError"),
        "empty": ("0", "", "", "no exercise cell of this course: was the released notebook used?"),
    }
    assert "NameError" in rows["syntax"]["feedback"]
    table = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert "half 91_toy 1/2 91.1 ✓ 91.2 ○" in lines
    assert "--seed 3" in table
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]
    assert not [c for c in left if STRAY in c]
    assert not set(psutil.Process().children(recursive=True)) - before


@pytest.mark.parametrize(
    ("make", "says"), [(None, "is not a folder"), ("empty", "no .ipynb in"), ("file", "not a")]
)
def test_a_folder_without_submissions_is_refused(course, tmp_path, capsys, make, says):
    folder = tmp_path / "work"
    if make == "empty":
        folder.mkdir()
    elif make == "file":
        folder.write_text("")
    with pytest.raises(SystemExit):
        grade.main([str(folder)], course)
    assert says in capsys.readouterr().err


def test_missing_and_doubled_answer_cells_are_noted(course):
    path = course / "notebooks/91_toy.ipynb"
    release, submission = (nbformat.read(path, as_version=4) for _ in range(2))
    first = next(c for c in submission.cells if "answer-91.1" in str(c.metadata))
    submission.cells = [first, {**first, "source": TWICE}]
    notes = grade.transplant(release, nbformat.from_dict(submission))
    assert notes == [
        "cell answer-91.1 appears 2 times: graded the last",
        "cell answer-91.2 is missing",
    ]
    assert TWICE in [c.source for c in release.cells]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--timeout", "0"], "no time limit"),
        (["--timeout", "nan"], "no time limit"),
        (["--timeout", "inf"], "no time limit"),
        (["--timeout", "soon"], "invalid"),
        (["--csv", "no/such/folder.csv"], "a file in a folder that exists"),
        (["--csv", "."], "a file in a folder that exists"),
    ],
)
def test_arguments_are_refused_before_grading(tmp_path, capsys, args, says):
    with pytest.raises(SystemExit):
        grade.main([str(tmp_path), *args])
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_run_and_keeps_what_was_graded(course, tmp_path, number):
    work = tmp_path / "work"
    work.mkdir()
    nbformat.write(nbformat.v4.new_notebook(), work / "a.ipynb")
    shutil.copy(course / "work/endless/91_toy (copy).ipynb", work / "endless.ipynb")
    start = (  # a shell's nohup or & may have handed down ignored signals
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "[signal.signal(s, signal.SIG_DFL) for s in (signal.SIGHUP, signal.SIGTERM)];"
        "import sys; from pathlib import Path; from lecture_util.classroom import grade;"
        "sys.exit(grade.main(sys.argv[2:], Path(sys.argv[1])))"
    )
    args = [str(course), str(work), "--csv", str(tmp_path / "out.csv")]
    with subprocess.Popen(
        [sys.executable, "-c", start, *args],
        cwd=toy_course.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as grading:  # fmt: skip
        deadline, started = time.monotonic() + 60, []
        while len(started) < 2 and time.monotonic() < deadline:  # the run and its kernel
            started = psutil.Process(grading.pid).children(recursive=True)
            time.sleep(0.2)
        grading.send_signal(number)
        try:
            out, err = grading.communicate(timeout=30)
        finally:
            grading.kill()
    assert grading.returncode == 128 + number
    assert "Traceback" not in err
    assert f"stopped by {number.name}: 1 of 2 submissions are graded" in err
    assert "no exercise cell" in out
    assert [row["student"] for row in csv.DictReader((tmp_path / "out.csv").open())] == ["a"]
    assert len(started) >= 2
    assert not any(p.is_running() for p in started)
