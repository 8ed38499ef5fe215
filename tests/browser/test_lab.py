"""A newcomer's first minute: JupyterLab on loopback, notebook 00 run to its end in Chromium."""

import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab as `make lab` starts it, without a window; yields its address with the token."""
    course = tmp_path_factory.mktemp("course")  # a copy: JupyterLab saves what it runs
    for folder in ("notebooks", "images"):
        shutil.copytree(ROOT / folder, course / folder)
    log = course / "lab.log"
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        "--expose-app-in-browser", "--ServerApp.port=0", f"--ServerApp.root_dir={course}",
    ]  # fmt: skip
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            deadline = time.monotonic() + 60
            while not (
                found := re.search(r"http://127\.0\.0\.1:\d+/lab\?token=\w+", log.read_text())
            ):
                assert time.monotonic() < deadline and server.poll() is None, log.read_text()
                time.sleep(0.2)
            yield found[0]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def test_the_server_wants_its_token(lab):
    contents = lab.split("/lab?")[0] + "/api/contents"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(contents)


def test_notebook_00_runs_to_its_end(lab, browser, tmp_path):
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    address, token = lab.split("?")
    page.goto(f"{address}/tree/notebooks/00_start_here.ipynb?{token}")
    page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=60_000)
    page.wait_for_function("() => !!window.jupyterapp", timeout=60_000)
    page.wait_for_function(
        """() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status
                 === 'idle'""",
        timeout=60_000,
    )
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    cells = page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.model.sharedModel.cells.map(
                   cell => cell.toJSON())"""
    )
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = {cell["id"]: cell["outputs"] for cell in code}
    assert not [o for out in outputs.values() for o in out if o["output_type"] == "error"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    checks = ["".join(o.get("text", "") for o in c["outputs"]) for c in code
              if "".join(c["source"]).startswith('check("')]  # fmt: skip
    assert checks and all(line.startswith("○ 0.1") for line in checks)
    page.close()
