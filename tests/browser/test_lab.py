"""A newcomer's first minute: JupyterLab on loopback, notebook 00 run to its end in Chromium."""

import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lecture_util.classroom import deck

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a copy of the course, since it saves what it runs."""
    course = tmp_path_factory.mktemp("course")
    for folder in ("notebooks", "images"):
        shutil.copytree(ROOT / folder, course / folder)
    with deck.serve_folder(course) as address:
        yield address


def test_the_server_wants_its_token(lab):
    contents = lab.split("/lab?")[0] + "/api/contents"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(contents)


def test_notebook_00_runs_to_its_end(lab, browser):
    page = browser.new_page(viewport=deck.SCREEN)
    address, token = lab.split("?")
    page.goto(f"{address}/tree/notebooks/00_start_here.ipynb?{token}")
    page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=60_000)
    deck.wait_idle(page)
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
