"""The real deck in a browser without a window: serve it, open it, turn its slides, measure them."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .build import Paths
from .notebook import BuildError, is_check
from .present import Slide, lab, set_stage, slides, stage_copy, stage_flags

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCREEN = {"width": 1280, "height": 720}
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """One slide as drawn: what it needs, what the screen has, and each cell's part, in pixels."""

    slide: Slide
    height: int
    room: int
    parts: tuple[int, ...] = ()
    checks: frozenset[int] = frozenset()  # cells that stay with the one before them

    @property
    def over(self) -> int:
        return max(0, self.height - self.room)

    @property
    def breaks(self) -> list[int]:
        """The cells at which subslides would have to start for the rest to fit."""
        groups: list[list[int]] = []
        for cell, part in zip(self.slide.cells, self.parts, strict=True):
            if cell in self.checks and groups:
                groups[-1][1] += part
            else:
                groups.append([cell, part])
        starts, filled = [], 0
        for cell, part in groups:
            if filled and filled + part > self.room:
                starts.append(cell)
                filled = 0
            filled += part
        return starts

    @property
    def too_high(self) -> list[int]:
        """The cells that fit on no slide."""
        pairs = zip(self.slide.cells, self.parts, strict=True)
        return [cell for cell, part in pairs if part > self.room]


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


@contextlib.contextmanager
def serve_folder(folder: Path, *flags: str) -> Iterator[str]:
    """JupyterLab on `folder`, without a window; its address with the token."""
    command, env = lab(
        folder, "--no-browser", "--expose-app-in-browser", "--ServerApp.port=0", *flags
    )
    log = folder / ".lab.log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out) as server,
    ):
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"http://127\.\S+\?token=\w+", log.read_text())):
                if time.monotonic() > deadline or server.poll() is not None:
                    raise BuildError(f"JupyterLab does not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield found[0]
        finally:
            server.terminate()


@contextlib.contextmanager
def serve(paths: Paths) -> Iterator[str]:
    """A stage as `present` makes it, served without a window; its address with the token."""
    with tempfile.TemporaryDirectory(prefix="rehearse-") as temporary:
        copy = set_stage(Path(temporary), paths)
        with serve_folder(Path(temporary), *stage_flags(copy)) as address:
            yield address


def wait_idle(page: Page) -> None:
    """Wait until the kernel of the notebook on the page is ready."""
    page.wait_for_function(
        """() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status
                 === 'idle'""",
        timeout=60_000,
    )


def open_deck(browser: Browser, address: str) -> Page:
    """A page of the browser that shows the deck, its kernel ready."""
    page = browser.new_page(viewport=SCREEN)
    page.goto(address)
    page.wait_for_selector(".jp-Deck .jp-deck-mod-onscreen", timeout=60_000)
    wait_idle(page)
    return page


def show(page: Page, cell: int) -> None:
    """Turn to the slide of this cell and wait until it stands still."""
    page.evaluate(
        "i => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = i }", cell
    )
    last, since = "", time.monotonic()
    while time.monotonic() - since < 3:
        now = page.inner_text(".jp-Deck .jp-Notebook") + str(heights(page))
        if now == last:
            return
        last = now
        page.wait_for_timeout(150)


def heights(page: Page) -> tuple[int, int]:
    """What the slide on the screen needs, and the most it can have, in pixels."""
    return tuple(
        page.evaluate("""() => {
            const notebook = document.querySelector('.jp-Deck .jp-Notebook');
            const slide = notebook.querySelector('.jp-WindowedPanel-outer');
            return [slide.scrollHeight, parseFloat(getComputedStyle(notebook).maxHeight)];
        }""")
    )


def measure_slides(paths: Paths, chromium: str) -> list[Fit]:
    """Run the notebook in the deck, solutions revealed, and measure every slide.

    Raises: BuildError if a cell fails there.
    """
    from playwright.sync_api import sync_playwright

    nb = stage_copy(paths.source)
    deck = [slide for slide in slides(nb) if slide.cells]
    checks = frozenset(index for index, cell in enumerate(nb.cells) if is_check(cell))
    with serve(paths) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        page = open_deck(browser, address)
        failed = page.evaluate("""async () => {
            window.stage.revealAll();
            await window.jupyterapp.commands.execute('notebook:run-all-cells');
            return window.jupyterapp.shell.currentWidget.model.sharedModel.cells
                .map(cell => cell.toJSON()).flatMap(cell => cell.outputs ?? [])
                .filter(out => out.output_type === 'error')
                .map(out => `${out.ename}: ${out.evalue}`);
        }""")
        if failed:
            raise BuildError(f"{paths.source.name}, in the deck: {failed[0]}")
        fits = []
        for slide in deck:
            show(page, slide.cells[-1])
            parts = page.eval_on_selector_all(
                ".jp-Deck .jp-deck-mod-onscreen",
                "cells => cells.map(cell => Math.ceil(cell.getBoundingClientRect().height))",
            )
            fits.append(Fit(slide, *heights(page), tuple(parts), checks))
        browser.close()
    return fits
