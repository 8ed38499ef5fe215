"""One Chromium for all browser tests; without one they are skipped, and say so.

A module with a SOURCE (a notebook in percent format, one widget a slide) and SLIDES (a widget's
name to its cell) asks for `stage`, the deck with every cell run, or `slide`, which turns to one.
"""

import hashlib
import os
from pathlib import Path

import pytest

from lecture_util.classroom import deck
from lecture_util.classroom.build import Paths

CHROMIUM = deck.find_chromium()
SHOTS = os.environ.get("WIDGET_SHOTS")  # a folder for pictures of the slides, to be looked at
RAN = """() => window.jupyterapp.shell.currentWidget.model.sharedModel.cells
    .filter(cell => cell.cell_type === 'code').every(cell => cell.execution_count)"""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "browser":
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="no Chromium: apt-get install chromium"))


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=deck.CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def stage(request, tmp_path_factory, browser):
    """The deck of the module's SOURCE, every cell run."""
    source = tmp_path_factory.mktemp("course") / "solutions" / "90_toy.py"
    source.parent.mkdir()
    source.write_text(request.module.SOURCE)
    with deck.serve(Paths(source)) as address:
        page = deck.open_deck(browser, address)
        page.click(".stage-run")
        page.wait_for_function(RAN, timeout=90_000)
        yield page
        page.close()


@pytest.fixture
def slide(request, stage):
    """Turn to the slide of a widget; what is on it."""

    def turn(name: str):
        deck.show(stage, request.module.SLIDES[name])
        return stage.locator(".jp-deck-mod-onscreen .jp-OutputArea")

    return turn


@pytest.fixture
def fits(stage, slide):
    """Whether a widget fits its slide alone; WIDGET_SHOTS keeps a picture of it."""

    def measure(name: str) -> bool:
        slide(name)
        stage.wait_for_timeout(500)
        if SHOTS:
            stage.screenshot(path=Path(SHOTS) / f"{name}.png")
        needed, room = deck.heights(stage)
        print(f"{name}: {needed} of {room:.0f} pixels")
        return needed <= room

    return measure


@pytest.fixture
def press():
    """Give the focus to a locator and press a key there."""

    def press_on(locator, key: str, times: int = 1) -> None:
        locator.focus()
        locator.page.wait_for_timeout(400)  # the stage keeps the arrow keys for the slider
        for _ in range(times):
            locator.page.keyboard.press(key)

    return press_on


@pytest.fixture
def wait_for():
    """Wait until a widget's text says something."""

    def wait(output, words) -> None:
        output.get_by_role("status").get_by_text(words).first.wait_for(timeout=10_000)

    return wait


@pytest.fixture
def picture():
    """A fingerprint of the pixels that the browser shows."""

    def fingerprint(locator) -> str:
        locator.wait_for(timeout=10_000)
        return hashlib.sha256(locator.screenshot()).hexdigest()

    return fingerprint


@pytest.fixture
def moved_by_keyboard(slide, press, wait_for, picture):
    """Move a slider of a widget by keys: its value, its picture and its text must follow."""

    def move(name: str, handle: str, key: str, times: int, value: str, words: str) -> None:
        output = slide(name)
        image = output.get_by_role("img")
        before = picture(image)
        slider = output.get_by_role("slider", name=handle, exact=True)
        press(slider, key, times)
        wait_for(output, words)
        slider.page.wait_for_timeout(700)
        assert slider.get_attribute("aria-valuetext") == value
        assert picture(image) != before
        assert words in image.get_attribute("title")

    return move
