"""From a py:percent source to the two notebooks, and what is refused on the way."""

import json
import os

import nbformat
import pytest
import toy_course

from lecture_util.classroom import build
from lecture_util.classroom.build import Paths
from lecture_util.classroom.exercise import _classroom
from lecture_util.classroom.notebook import BuildError, read_source

BOTH = ["91.1", "91.2"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """This process knows the toy exercises; the notebook registers them in its own."""
    for id in BOTH:
        monkeypatch.setitem(_classroom.exercises, id, None)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("course")
    source = toy_course.write(root)
    patch = pytest.MonkeyPatch()
    for id in BOTH:
        patch.setitem(_classroom.exercises, id, None)
    build.build(Paths(source), toy_course.ROOT)
    patch.undo()
    return root


@pytest.fixture
def course(built, tmp_path):
    """A fresh copy of the built course."""
    for folder in ("solutions", "notebooks"):
        (tmp_path / folder).mkdir()
        for path in (built / folder).iterdir():
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    return tmp_path


def read(root, folder):
    return nbformat.read(root / folder / "91_toy.ipynb", as_version=4)


def test_the_student_gets_stubs_with_the_solutions_outputs(course):
    solution, student = read(course, "solutions").cells, read(course, "notebooks").cells
    assert [c.get("outputs") for c in solution] == [c.get("outputs") for c in student]
    answers = [c for c in student if c.metadata.get("nbgrader", {}).get("solution")]
    assert answers[1].source.splitlines() == [
        "def minus(x):",
        '    """Turn the sign."""',
        "    # YOUR CODE HERE",
        "    raise NotImplementedError",
    ]
    assert "SOLUTION" not in str(student)
    checks = [c for c in student if c.metadata.get("nbgrader", {}).get("grade")]
    assert [c.outputs[0].text for c in checks] == [
        "✓ 91.1 Double: 1 check\n",
        "✓ 91.2 Negate: 1 check\n",
    ]
    assert checks[0].metadata.nbgrader == {
        "grade": True,
        "grade_id": "check-91.1",
        "locked": True,
        "points": 1,
        "schema_version": 3,
        "solution": False,
        "task": False,
    }


def test_tags_and_slides_are_kept_and_the_machine_is_not(course):
    nb = read(course, "notebooks")
    assert nb.cells[1].metadata == {
        "tags": ["nbval-ignore-output"],
        "slideshow": {"slide_type": "slide"},
    }
    assert nb.metadata.language_info == {"name": "python"}
    assert [c.id for c in nb.cells][:2] == ["91-000", "91-001"]
    assert [c.execution_count for c in nb.cells if c.cell_type == "code"] == [1, 2, 3, 4, 5, 6]


def test_a_second_build_gives_the_same_bytes(course):
    before = (course / "notebooks/91_toy.ipynb").read_bytes()
    build.build(Paths(course / "solutions/91_toy.py"), toy_course.ROOT)
    assert (course / "notebooks/91_toy.ipynb").read_bytes() == before
    assert before.endswith(b"}\n")
    assert sorted(os.listdir(course / "solutions")) == ["91_toy.ipynb", "91_toy.py"]


def test_check_accepts_what_was_built(course, capsys):
    assert build.main(["--check"], course) == 0
    assert "91_toy: up to date" in capsys.readouterr().out


def edit(path, change):
    nb = json.loads(path.read_text())
    change(nb)
    path.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize(
    ("folder", "change", "says"),
    [
        ("notebooks", lambda nb: nb["cells"][3].update(source=["x = 1"]), "cell 3 (x = 1): its"),
        ("notebooks", lambda nb: nb["cells"][4].update(outputs=[]), "its outputs is not that"),
        ("notebooks", lambda nb: nb["cells"].pop(), "has 7 cells, the source gives 8"),
        ("solutions", lambda nb: nb["cells"][1]["metadata"].clear(), "its metadata is not that"),
        ("solutions", lambda nb: nb["cells"][1].update(execution_count=None), "count None"),
        ("solutions", lambda nb: nb["metadata"].update(host="here"), "not as written by a build"),
    ],
)
def test_check_names_the_first_cell_that_differs(course, capsys, folder, change, says):
    edit(course / folder / "91_toy.ipynb", change)
    assert build.main(["--check"], course) == 1
    assert says in capsys.readouterr().err


def test_check_sees_a_source_edited_after_the_build(course, capsys):
    source = course / "solutions/91_toy.py"
    source.write_text(source.read_text().replace("set up", "set down"))
    assert build.main(["--check"], course) == 1
    error = capsys.readouterr().err
    assert "solutions/91_toy.ipynb, cell 1" in error and "run `make notebooks`" in error


def test_check_sees_notebooks_that_are_missing_or_have_no_source(course, capsys):
    (course / "notebooks/91_toy.ipynb").rename(course / "notebooks/92_new.ipynb")
    assert build.main(["--check"], course) == 1
    error = capsys.readouterr().err
    assert "91_toy.ipynb is missing" in error and "92_new.ipynb has no source" in error


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("    ### END SOLUTION\n\n# %%\ncheck", "\n# %%\ncheck", "has no partner"),
        ("    ### BEGIN SOLUTION\n", "", "has no partner"),
        ('check("91.1", twice)', "twice(3)", "must be followed by its check"),
        ('check("91.1", twice)', 'check("91.1", twice); twice(3)', "must be followed by its"),
        ('check("91.1", twice)', 'check("90.1", twice)', "belongs to another notebook"),
        ('check("91.1", twice)', 'check("91.7", twice)', "91.7 is not registered; registered"),
        ('check("91.2", minus)', 'check("91.1", minus)', "91.1 is checked twice"),
        ('print("set up")', "x = 1\n" * 25, "27 lines of code, at most 25"),
        ('print("set up")', "# %%\nstatus()", "changes as exercises are solved"),
        (
            "def twice(x):\n    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION",
            "### BEGIN SOLUTION\ntwice = 2\n### END SOLUTION",
            "stands outside a function",
        ),
    ],
)
def test_a_source_that_breaks_a_rule_is_refused_by_name(tmp_path, old, new, says):
    assert old in toy_course.SOURCE
    path = toy_course.write(tmp_path, toy_course.SOURCE.replace(old, new))
    with pytest.raises(BuildError, match=r"91_toy\.py") as error:
        read_source(path, BOTH)
    assert says in str(error.value)


def test_an_exercise_that_the_source_never_checks_is_refused(tmp_path):
    with pytest.raises(BuildError, match=r"registered but never checked: 91\.3"):
        read_source(toy_course.write(tmp_path), [*BOTH, "91.3"])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(1)", "the kernel died"),
        ("import time; time.sleep(60)", "still running after 2 s"),
        ("print('x' * 300_000)", "at most 200,000 allowed; its largest cell"),
        ("import ipywidgets; display(ipywidgets.IntSlider())", "shows a widget"),
    ],
)
def test_a_build_that_fails_names_the_cell_and_writes_nothing(tmp_path, code, says):
    source = toy_course.SOURCE.replace("# %% [markdown]\n# Now", f"# %%\n{code}\n\n# %%\n# Now")
    path = toy_course.write(tmp_path, source)
    with pytest.raises(BuildError) as error:
        build.build(Paths(path), toy_course.ROOT, timeout_s=2)
    assert says in str(error.value) and "91_toy" in str(error.value)
    assert code[:20] in str(error.value)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["91_toy.py"]


def test_an_unknown_number_is_answered_with_those_there_are(course, capsys):
    assert build.main(["07"], course) == 1
    assert "no notebook 07" in capsys.readouterr().err
