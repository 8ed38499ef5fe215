"""A rehearsal times every cell, says what to do about the slow ones, and fails on an error."""

import pytest
import toy_course

from lecture_util.classroom import rehearse
from lecture_util.classroom.build import Paths
from lecture_util.classroom.deck import Fit
from lecture_util.classroom.exercise import _classroom
from lecture_util.classroom.notebook import BuildError
from lecture_util.classroom.present import Slide, stage_copy


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for id in ("91.1", "91.2"):
        monkeypatch.setitem(_classroom.exercises, id, None)


def test_the_solutions_are_what_is_rehearsed(tmp_path):
    nb = stage_copy(toy_course.write(tmp_path))
    assert not any("NotImplementedError" in cell.source for cell in rehearse.solved(nb).cells)
    assert sum("NotImplementedError" in cell.source for cell in nb.cells) == 2


def test_both_runs_are_timed_and_slow_cells_listed(tmp_path, capsys, monkeypatch):
    slow = toy_course.SOURCE + '\n# %%\nimport time\n\ntime.sleep(0.8)\nprint("awake")\n'
    toy_course.write(tmp_path, slow)
    monkeypatch.setattr(rehearse, "SLOW_S", 0.5)
    assert rehearse.main(["91", "--only", "times"], root=tmp_path) == 0
    printed = capsys.readouterr().out
    assert "91_toy: first run" in printed and "second run" in printed
    assert "over 0.5 s" in printed and "import time" in printed
    assert "talk over it, or press Run all before class" in printed
    assert not (tmp_path / "notebooks").exists()  # a rehearsal writes nothing


@pytest.mark.parametrize(
    ("cold_s", "warm_s", "says"),
    [
        (4.9, 4.9, ""),
        (30, 1, "slow the first time only"),
        (7, 8, "talk over it"),
        (90, 60, "make it smaller, or skip it on stage"),
    ],
)
def test_what_to_do_follows_from_both_times(cold_s, warm_s, says):
    advice = rehearse.advice(cold_s, warm_s)
    assert says in advice and bool(says) == bool(advice)


@pytest.mark.parametrize(
    ("cell", "message"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("while True: pass", "still running after")],
)
def test_an_error_fails_the_rehearsal_and_names_the_cell(tmp_path, capsys, cell, message):
    toy_course.write(tmp_path, toy_course.SOURCE + f"\n# %%\n{cell}\n")
    assert rehearse.main(["91", "--only", "times", "--timeout", "5"], root=tmp_path) == 1
    said = capsys.readouterr().err
    assert message in said and f"91_toy.py, cell 8 ({cell})" in said


def test_a_slide_too_high_fails_the_rehearsal_and_says_by_how_much(tmp_path, capsys, monkeypatch):
    toy_course.write(tmp_path)
    fits = [Fit(Slide("Short", [0, 1]), 400, 676, (200, 200)),
            Fit(Slide("Long", [2, 3]), 700, 676, (300, 400))]  # fmt: skip
    monkeypatch.setattr(rehearse, "find_chromium", lambda: "chromium")
    monkeypatch.setattr(rehearse, "measure_slides", lambda paths, chromium: fits)
    assert rehearse.main(["91", "--only", "slides"], root=tmp_path) == 1
    printed = capsys.readouterr().out
    assert "2 slides, 1 too high for 676 px" in printed
    assert "✓ fits" in printed and "✗ 24 px too high" in printed
    assert "→ subslide at cell 3: def twice(x):" in printed


@pytest.mark.parametrize(
    ("parts", "breaks", "too_high"),
    [
        ((100, 200, 300), [], []),
        ((400, 200, 300), [7], []),
        ((400, 400, 400), [5, 7], []),
        ((100, 900, 100), [5, 7], [5]),
        ((900, 100, 100), [5], [4]),
    ],
)
def test_where_a_slide_should_break_follows_from_its_cells(parts, breaks, too_high):
    fit = Fit(Slide("Long", [4, 5, 7]), sum(parts), 676, parts)
    assert (fit.breaks, fit.too_high) == (breaks, too_high)


def test_a_check_stays_on_the_slide_of_its_answer():
    fit = Fit(Slide("Exercise", [4, 5, 6]), 1000, 676, (300, 300, 100), frozenset({6}))
    assert fit.breaks == [5]


def test_without_a_browser_it_says_that_slides_were_not_measured(tmp_path, capsys, monkeypatch):
    toy_course.write(tmp_path)
    monkeypatch.setattr(rehearse, "find_chromium", lambda: None)
    assert rehearse.main(["91", "--only", "slides"], root=tmp_path) == 0
    assert "slides not measured here: no Chromium" in capsys.readouterr().out


def test_prose_takes_no_time(tmp_path):
    source = toy_course.write(tmp_path)
    nb = rehearse.solved(stage_copy(source))
    seconds = rehearse.time_cells(nb, Paths(source).source, 60)
    assert len(seconds) == len(nb.cells)
    assert all((s > 0) == (c.cell_type == "code") for s, c in zip(seconds, nb.cells, strict=True))


def test_an_error_leaves_no_output_in_the_copy(tmp_path):
    source = toy_course.write(tmp_path, toy_course.SOURCE + "\n# %%\n1 / 0\n")
    nb = rehearse.solved(stage_copy(source))
    with pytest.raises(BuildError, match="division by zero"):
        rehearse.time_cells(nb, source, 60)
    assert not any(cell.get("outputs") for cell in nb.cells)
