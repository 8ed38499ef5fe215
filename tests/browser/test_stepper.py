"""The stepper in a real JupyterLab: walked with buttons, keys and clicks, and run again."""

import json

import nbformat
import pytest

from lecture_util.classroom import deck

FUNCTION = '''\
from sympy import oo, symbols
from lecture_util.classroom.live import step
from lecture_util.roofline import accounting

B, D, F, c = symbols("B D F c", positive=True)

def matmul_intensity(B, D, F):
    """Arithmetic intensity of a matrix multiplication, from its cost to its limit."""
    cost = accounting.matmul(B, D, F)  # @inspect cost
    intensity = cost.flops / cost.bytes  # @inspect intensity
    intensity = intensity.simplify()  # @inspect intensity
    wide = intensity.subs({D: c * B, F: c * B})  # @inspect wide
    intensity = wide.limit(c, oo)  # @inspect intensity
    return intensity
'''
CALLS = ["step(matmul_intensity, B, D, F)", "step(accounting.mlp, B, 1, D, F)"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a notebook that holds two steppers; yields the notebook's address."""
    course = tmp_path_factory.mktemp("stepped")
    cells = [nbformat.v4.new_code_cell(source) for source in (FUNCTION, *CALLS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, course / "steps.ipynb")
    with deck.serve_folder(course) as address:
        yield address.replace("/lab?", "/lab/tree/steps.ipynb?")


@pytest.fixture(scope="module")
def page(lab, browser):
    """The notebook with all its cells run, at the size of a projector."""
    page = browser.new_page(viewport=deck.SCREEN)
    page.goto(lab)
    page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=60_000)
    deck.wait_idle(page)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function("() => document.querySelectorAll('.stepper').length === 2")
    yield page
    page.close()


@pytest.fixture
def stepper(page):
    """The first stepper, at its start, with its arguments as they were."""
    one = page.locator(".stepper").first
    one.scroll_into_view_if_needed()
    for name in "BDF":
        one.locator(f"input[name={name}]").fill(name)
    one.get_by_role("button", name="Run again").click()
    one.locator(".step-note:empty").wait_for(state="attached")  # "running" until it has run
    one.press("Home")
    at(one, "step 1 of")
    return one


def at(stepper, words):
    stepper.locator(".step-where", has_text=words).wait_for(timeout=10_000)


def value(stepper, name):
    """What is shown of a value; its letters as typed, not as MathML's italics."""
    return stepper.locator(f".step-value[data-name={name}] .step-what").text_content().strip()


def arrow_line(stepper):
    return stepper.locator(".step-here code").first.inner_text().strip()


def press(stepper, *names):
    for name in names:
        before = stepper.locator(".step-said").inner_text()
        stepper.get_by_role("button", name=name, exact=True).click()
        stepper.page.wait_for_function(
            "([node, before]) => node.textContent !== before",
            arg=[stepper.locator(".step-said").element_handle(), before],
        )


def test_an_intensity_goes_from_its_sum_to_B_and_follows_an_edited_argument(stepper, tmp_path):
    press(stepper, "Forward")
    assert arrow_line(stepper).startswith("cost = accounting.matmul(B, D, F)")
    press(stepper, "Forward")  # matmul carries directives, so forward enters it
    assert "matmul" in stepper.locator(".step-title").inner_text()
    assert "roofline/accounting.py" in stepper.locator(".step-title").inner_text()
    press(stepper, "Back")
    assert arrow_line(stepper).startswith("cost =")
    press(stepper, "Over", "Over")
    assert "@inspect" not in stepper.inner_text()
    assert stepper.locator(".step-value[data-name=intensity] mfrac").count() >= 1
    stepper.page.screenshot(path=tmp_path / "sum.png")
    press(stepper, "End")
    assert value(stepper, "intensity") == "B"

    stepper.locator("input[name=B]").fill("8")
    stepper.locator("input[name=B]").press("Enter")
    stepper.locator(".step-value[data-name=intensity] .step-what", has_text="8").wait_for()
    assert value(stepper, "intensity") == "8"
    stepper.page.screenshot(path=tmp_path / "eight.png")


def test_into_enters_a_helper_and_out_returns(stepper):
    press(stepper, "Forward", "Into", "Forward")
    assert arrow_line(stepper).startswith("B, D, F = sizes")
    press(stepper, "Into")
    assert "sizes" in stepper.locator(".step-title").inner_text()
    assert stepper.locator(".step-where").inner_text().startswith("matmul_intensity › matmul › ")
    press(stepper, "Out")
    assert "accounting.py" in stepper.locator(".step-title").inner_text()
    press(stepper, "Out")
    assert "this notebook" in stepper.locator(".step-title").inner_text()


def test_keys_walk_and_the_notebook_stays_where_it_is(stepper, page):
    stepper.focus()
    for key, words in [
        ("ArrowRight", "step 2 of"), ("Space", "step 8 of"), ("ArrowLeft", "step 7 of"),
        ("Home", "step 1 of"), ("ArrowRight", "step 2 of"), ("ArrowDown", "step 3 of"),
        ("ArrowUp", "step 8 of"), ("End", "step 13 of"),
    ]:  # fmt: skip
        page.keyboard.press(key)
        at(stepper, words)
    assert page.evaluate("() => document.activeElement.className") == "stepper"
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.className") != "stepper"


def test_a_click_on_a_line_goes_there_and_a_name_tells_its_history(stepper):
    line = stepper.locator(".step-line", has_text="return intensity")
    line.click()
    at(stepper, "step 12 of")
    stepper.get_by_role("button", name="intensity", exact=True).click()
    history = stepper.locator(".step-history li")
    history.last.wait_for()
    assert history.count() == 3
    assert history.first.locator("mfrac").count() >= 1
    assert history.last.text_content().endswith("B")
    stepper.get_by_role("button", name="intensity", exact=True).click()


def test_what_cannot_be_read_gets_a_message_beside_its_box(stepper):
    stepper.locator("input[name=D]").fill("D +")
    stepper.get_by_role("button", name="Run again").click()
    stepper.locator(".step-error").wait_for()
    assert "one of the symbols B, D, F" in stepper.locator(".step-error").inner_text()
    assert stepper.locator("input[name=D]").get_attribute("aria-invalid") == "true"


def test_every_control_has_a_name_and_the_code_is_readable_from_afar(stepper):
    names = stepper.locator("button, input").evaluate_all(
        """controls => controls.map(
               c => c.getAttribute('aria-label') || c.textContent || c.labels[0].textContent)"""
    )
    assert len(names) > 10 and all(name.strip() for name in names)
    sizes = stepper.locator(".step-line code").evaluate_all(
        "lines => lines.map(line => parseFloat(getComputedStyle(line).fontSize))"
    )
    assert min(sizes) >= 18
    assert stepper.bounding_box()["height"] < 720


def test_stored_views_fall_back_to_one_line(page, stepper):
    cells = page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.model.sharedModel.cells.map(
                   cell => JSON.stringify(cell.toJSON()))"""
    )
    outputs = [json.loads(cell)["outputs"] for cell in cells]
    line = "step: matmul_intensity, 13 steps, 4 values inspected"
    assert outputs[1][0]["data"]["text/plain"] == line
