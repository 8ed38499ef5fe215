"""What goes on stage: slides as the deck groups them, stubs with solutions behind, a copy."""

import json

import nbformat
import pytest
import toy_course
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lecture_util.classroom import present
from lecture_util.classroom.build import Paths
from lecture_util.classroom.exercise import _classroom
from lecture_util.classroom.present import set_stage, slides, stage_copy

SOURCE = (
    toy_course.SOURCE
    + """
# %% [markdown] slideshow={"slide_type": "slide"}
# ## Signs

# %% [markdown] slideshow={"slide_type": "notes"}
# Ask the room first.

# %% tags=["hide-input"]
print("shown alone")
"""
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for id in ("91.1", "91.2"):
        monkeypatch.setitem(_classroom.exercises, id, None)


@pytest.fixture
def paths(tmp_path):
    return Paths(toy_course.write(tmp_path / "course", SOURCE))


def deck_of(*kinds):
    metas = [{"slideshow": {"slide_type": kind}} if kind else {} for kind in kinds]
    nb = new_notebook(cells=[new_markdown_cell("text", metadata=meta) for meta in metas])
    return [slide.cells for slide in slides(nb)]


@pytest.mark.parametrize(
    ("kinds", "cells"),
    [
        (["slide", None, "slide"], [[0, 1], [2]]),
        ([None, None], [[0, 1]]),  # the first cell starts a slide, tagged or not
        (["slide", "fragment", "subslide", None], [[0, 1], [2, 3]]),
        (["slide", "notes", None, "skip", "fragment"], [[0, 2, 4]]),
        (["slide", "skip", "slide"], [[0], [2]]),
        (["slide", "-", ""], [[0, 1, 2]]),
    ],
)
def test_cells_are_grouped_as_the_deck_groups_them(kinds, cells):
    assert deck_of(*kinds) == cells


def test_a_slide_has_its_heading_as_title_and_a_subslide_its_slides():
    meta = {"slideshow": {"slide_type": "subslide"}}
    nb = new_notebook(
        cells=[new_markdown_cell("text\n## Here\nmore"), new_code_cell("x", metadata=meta)]
    )
    assert [slide.title for slide in slides(nb)] == ["Here", "Here"]


def test_solutions_are_hidden_in_metadata_without_their_marks(paths):
    nb = stage_copy(paths.source)
    answers = [c for c in nb.cells if "solution" in c.metadata.get("stage", {})]
    assert [c.metadata["stage"]["id"] for c in answers] == ["91.1", "91.2"]
    assert all("NotImplementedError" in c.source for c in answers)
    assert answers[0].metadata["stage"]["solution"] == "def twice(x):\n    return 2 * x"


def test_the_stage_starts_without_outputs_and_hides_the_code_that_is_tagged(paths):
    nb = stage_copy(paths.source)
    assert not any(c.get("outputs") for c in nb.cells)
    hidden = [c.source for c in nb.cells if c.metadata.get("jupyter", {}).get("source_hidden")]
    assert hidden == ['print("shown alone")']
    nbformat.validate(nb)


def test_notes_are_the_presenters(paths, capsys, tmp_path):
    nb = stage_copy(paths.source)
    first = next(c for c in nb.cells if c.source == "## Signs")
    assert first.metadata["stage"] == {
        "title": "Signs",
        "next": "the end",
        "notes": "Ask the room first.",
    }
    assert present.main(["91", "--notes"], root=tmp_path / "course") == 0
    printed = capsys.readouterr().out
    assert "Signs\n     Ask the room first." in printed


def test_the_stage_is_a_copy_with_its_start_beside_it(paths, tmp_path):
    images = paths.source.parents[1] / "images"
    images.mkdir()
    (images / "a.svg").write_text("<svg/>")
    before = paths.source.read_bytes()
    copy = set_stage(tmp_path / "stage", paths)
    start = tmp_path / "stage" / "start" / "91_toy.ipynb"
    assert copy.read_bytes() == start.read_bytes()
    assert (copy.parent / "../images/a.svg").exists()
    assert paths.source.read_bytes() == before
    assert not (paths.source.parents[1] / "notebooks").exists()


def test_jupyterlab_listens_on_loopback_and_keeps_its_settings_on_the_stage(paths, tmp_path):
    copy = set_stage(tmp_path / "stage", paths)
    command, env = present.lab(tmp_path / "stage", *present.stage_flags(copy), "--no-browser")
    assert "--ip=127.0.0.1" in command and "--no-browser" in command
    settings = tmp_path / "stage" / ".settings"
    assert env["JUPYTERLAB_SETTINGS_DIR"] == str(settings)
    plugin = settings / "@jupyterlab" / "docmanager-extension" / "plugin.jupyterlab-settings"
    assert json.loads(plugin.read_text()) == {"autosave": False}


def test_an_unknown_notebook_is_named(capsys, paths, tmp_path):
    assert present.main(["77"], root=tmp_path / "course") == 1
    assert "no notebook 77" in capsys.readouterr().err


def test_a_missing_extension_is_named_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert present.main(["00"]) == 1
    assert "jupyterlab-slideshow is missing: run `make setup`" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["03", "04"], ["03", "--no-browser", "--port", "8899", "04"]])
def test_a_second_notebook_is_refused(capsys, words):
    with pytest.raises(SystemExit):
        present.main(words)
    assert "unexpected '04' after 03: one notebook" in capsys.readouterr().err
