"""One Chromium for all browser tests; without one they are skipped, and say so."""

import pytest

from lecture_util.classroom import deck

CHROMIUM = deck.find_chromium()


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
