"""The stage in Chromium: slides turn, widgets live on, solutions are revealed, all starts again."""

import pytest

from lecture_util.classroom import deck
from lecture_util.classroom.build import Paths
from lecture_util.classroom.exercise import _classroom
from lecture_util.classroom.present import slides, stage_copy

SOURCE = """\
# %% [markdown]
# # Toy

# %%
from lecture_util.classroom.exercise import check, exercise
from lecture_util.classroom.predict import predict
from lecture_util.classroom.widgets import explore, latency_explorer, roofline_explorer

# %% [markdown] slideshow={"slide_type": "notes"}
# Say hello.

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
explore(lambda B: f"intensity **{10 * B}**", B=[1, 2, 4, 8])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A room guesses

# %% tags=["nbval-ignore-output"]
guess = predict("tokens per second", unit="tok/s")

# %% slideshow={"slide_type": "fragment"} tags=["nbval-ignore-output"]
guess.reveal(measured=20, predicted=40)

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
roofline_explorer()

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "slide"}
latency_explorer()

# %% slideshow={"slide_type": "skip"}
@exercise("91.1", title="Double", minutes=1, trains="doubling")
def double(answer, c):
    x = c.int(3, 99)
    c.equal(c.call(answer, x), 2 * x)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Exercise 91.1

# %%
def twice(x):
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION

# %%
check("91.1", twice)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The end
"""
CELLS = (
    """() => window.jupyterapp.shell.currentWidget.model.sharedModel.cells.map(c => c.toJSON())"""
)
SHOWN = """() => window.jupyterapp.shell.currentWidget.content.widgets
    .map((cell, i) => cell.hasClass('jp-deck-mod-onscreen') ? i : -1).filter(i => i >= 0)"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    source = tmp_path_factory.mktemp("course") / "solutions" / "91_toy.py"
    source.parent.mkdir()
    source.write_text(SOURCE)
    patch = pytest.MonkeyPatch()
    patch.setitem(_classroom.exercises, "91.1", None)  # the notebook registers it in its own
    yield Paths(source)
    patch.undo()


@pytest.fixture(scope="module")
def address(paths):
    with deck.serve(paths) as address:
        yield address


@pytest.fixture(scope="module")
def stage(address, browser):
    """The deck, every cell run."""
    page = deck.open_deck(browser, address)
    page.click(".stage-run")
    page.wait_for_function(
        """() => { const cells = window.jupyterapp.shell.currentWidget.model.sharedModel.cells
            .filter(cell => cell.cell_type === 'code');
            return cells.every(cell => cell.execution_count) }""",
        timeout=60_000,
    )
    yield page
    page.close()


def at(stage, text: str) -> None:
    """Turn to the slide with the first cell whose source holds this text."""
    cells = stage.evaluate(CELLS)
    deck.show(stage, next(i for i, cell in enumerate(cells) if text in "".join(cell["source"])))


def printed(stage, start: str) -> str:
    cells = stage.evaluate(CELLS)
    cell = next(cell for cell in cells if "".join(cell["source"]).startswith(start))
    return "".join("".join(out.get("text", "")) for out in cell["outputs"])


def visible(stage, selector: str):
    return stage.locator(f".jp-deck-mod-onscreen {selector}")


def test_the_slides_are_those_the_deck_shows(stage, paths):
    for slide in slides(stage_copy(paths.source)):
        deck.show(stage, slide.cells[0])
        assert stage.evaluate(SHOWN) == slide.cells


def test_a_widget_is_alive_after_its_slide_was_left_and_found_again(stage):
    at(stage, "explore(lambda")
    assert "intensity 10" in visible(stage, ".widget-html").inner_text()
    here = stage.evaluate(SHOWN)
    for command, gone in [("deck:forward", True), ("deck:back", False)]:
        stage.evaluate("c => window.jupyterapp.commands.execute(c)", command)
        stage.wait_for_timeout(200)
        assert (stage.evaluate(SHOWN) != here) == gone
    visible(stage, ".noUi-handle").focus()
    stage.wait_for_timeout(400)  # the stage keeps the arrow keys for the slider
    stage.keyboard.press("ArrowRight")
    visible(stage, ".widget-html").get_by_text("intensity 20").wait_for(timeout=5000)


def test_space_and_a_clicker_walk_through_every_slide(stage, paths):
    at(stage, "# Toy")
    seen = []
    for press in range(30):
        shown = stage.evaluate(SHOWN)
        if not seen or seen[-1] != shown:
            seen.append(shown)
        stage.keyboard.press("PageDown" if press % 2 else "Space")
        stage.wait_for_timeout(60)
    assert seen == [slide.cells for slide in slides(stage_copy(paths.source))]


@pytest.mark.parametrize(
    ("explorer", "slider", "before", "after"),
    [
        ("roofline_explorer", "B, sequences", "1 FLOPs per byte", "2 FLOPs per byte"),
        ("latency_explorer", "B, sequences", "26.87 GB", "27.71 GB"),
    ],
)
def test_a_slider_moved_by_key_changes_the_number(stage, explorer, slider, before, after):
    at(stage, f"{explorer}()")
    text = visible(stage, "[role=status]")
    assert before in text.inner_text()
    visible(stage, ".widget-hslider").filter(has_text=slider).locator(".noUi-handle").focus()
    stage.wait_for_timeout(400)
    stage.keyboard.press("ArrowRight")
    text.get_by_text(after).wait_for(timeout=5000)


def test_a_slider_dragged_with_the_mouse_changes_the_number(stage):
    at(stage, "latency_explorer()")
    text = visible(stage, "[role=status]")
    before = text.inner_text()
    slider = visible(stage, ".widget-hslider").filter(has_text="S, positions")
    handle, track = slider.locator(".noUi-handle").bounding_box(), slider.bounding_box()
    stage.mouse.move(handle["x"] + 4, handle["y"] + 4)
    stage.mouse.down()
    stage.mouse.move(track["x"] + track["width"], handle["y"] + 4, steps=8)
    stage.mouse.up()
    stage.wait_for_timeout(1000)
    assert text.inner_text() != before


def test_a_room_s_guesses_are_taken_counted_and_taken_back(stage):
    at(stage, "guess = predict")
    for number in ("10", "25", "25"):
        visible(stage, "input").fill(number)
        stage.keyboard.press("Enter")
        stage.wait_for_timeout(300)
    note = visible(stage, ".widget-html [role=status]")
    assert note.inner_text() == "3 guesses, the last: 25 tok/s"
    visible(stage, "button").get_by_text("undo").click()
    note.get_by_text("2 guesses").wait_for(timeout=5000)


def test_a_solution_is_revealed_by_a_button_and_checks(stage):
    at(stage, "## Exercise 91.1")
    assert printed(stage, "check(").startswith("○ 91.1")
    stage.get_by_role("button", name="Reveal the solution of 91.1").click()
    visible(stage, ".jp-OutputArea-output").get_by_text("✓ 91.1 Double").wait_for(timeout=5000)
    assert "return 2 * x" in stage.inner_text(".jp-deck-mod-onscreen.jp-CodeCell .cm-content")
    assert not stage.locator(".stage-reveal").is_visible()


def test_the_presenter_s_window_shows_the_notes_the_room_does_not_see(stage):
    at(stage, "# Toy")
    assert "Say hello" not in stage.inner_text("body")
    with stage.expect_popup() as popup:
        stage.get_by_role("button", name="Notes").click()
    notes = popup.value
    notes.get_by_text("Say hello.").wait_for(timeout=5000)
    at(stage, "## A room guesses")
    notes.get_by_text("A room guesses").wait_for(timeout=5000)
    notes.close()


def test_every_slide_fits_the_screen(stage, paths):
    for slide in slides(stage_copy(paths.source)):
        deck.show(stage, slide.cells[0])
        needed, room = deck.heights(stage)
        assert needed <= room, slide


def test_start_again_brings_the_notebook_and_the_kernel_back(stage, paths):
    stage.get_by_role("button", name="Start again").click()
    stage.wait_for_timeout(3000)
    fresh, now = stage_copy(paths.source), stage.evaluate(CELLS)
    assert ["".join(c["source"]) for c in now] == [c.source for c in fresh.cells]
    assert not any(c.get("outputs") for c in now)
    assert stage.evaluate(SHOWN) == [0, 1]
    at(stage, "check(")
    stage.keyboard.press("Shift+Enter")
    stage.wait_for_timeout(2000)
    error = next(c for c in stage.evaluate(CELLS) if "".join(c["source"]).startswith("check("))
    assert error["outputs"][0]["ename"] == "NameError"  # nothing of the old kernel is left
