"""The page of corrections quotes the notebooks' cells, and each shows the figures it is said to."""

import re
from dataclasses import replace
from functools import cache

import nbformat
import pytest

from lecture_util.classroom import corrections
from lecture_util.classroom.claims import CORRECTIONS, Evidence
from lecture_util.classroom.notebook import BEGIN, IGNORED

EVIDENCE = [evidence for each in CORRECTIONS for evidence in each.evidence]
by_title = pytest.mark.parametrize("each", CORRECTIONS, ids=lambda each: each.title)


@cache
def printed(notebook: str) -> dict[str, str]:
    """Code of each cell of the executed solution -> what it printed or returned."""
    path = corrections.source(notebook).with_suffix(".ipynb")
    outputs = {}
    for cell in nbformat.read(path, nbformat.NO_CONVERT).cells:
        if cell.cell_type == "code":
            texts = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)
            outputs[cell.source] = "\n".join(texts)
    return outputs


def plain(text: str) -> str:
    """Digits of code, 32_768, and of prose, 32,768, made alike."""
    return re.sub(r"(?<=\d)[_,](?=\d)", "", text)


def test_the_page_is_what_the_sources_give():
    assert corrections.PAGE.read_text(encoding="utf-8") == corrections.page()
    assert corrections.main(["--check"]) == 0


def test_an_old_or_missing_page_fails_the_check_and_is_mended(tmp_path, capsys):
    page = tmp_path / "page.md"
    assert corrections.main(["--check", "--out", str(page)]) == 1
    assert "make corrections" in capsys.readouterr().out
    assert corrections.main(["--out", str(page)]) == 0
    assert corrections.main(["--check", "--out", str(page)]) == 0
    page.write_text(page.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert corrections.main(["--check", "--out", str(page)]) == 1


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda e: f"{e.notebook} {e.cell[:40]}")
def test_each_cell_is_there_once_and_is_run_and_compared(evidence):
    found = corrections.find(evidence)
    assert IGNORED not in found.tags  # nbval compares what it prints
    assert "raises-exception" not in found.tags
    assert BEGIN not in found.code  # no student's answer
    decides = re.search(r"\bassert |\braise AssertionError", found.code)
    assert decides or printed(evidence.notebook)[found.code]
    assert found.section


@by_title
def test_figures_of_a_correction_are_on_the_page_and_in_its_cells(each):
    shown = ""
    for evidence in each.evidence:
        code = corrections.find(evidence).code
        shown += "\n" + code + "\n" + printed(evidence.notebook).get(code, "")
    assert each.figures
    for figure in each.figures:
        whole = rf"(?<![\d.]){re.escape(plain(figure))}(?!\.?\d)"
        assert re.search(whole, plain(each.right)), figure
        assert re.search(whole, plain(shown)), figure


def test_every_erratum_of_the_notebooks_is_on_the_page_and_every_note_named_exists():
    notes = corrections.notes()
    assert len(notes) >= 31
    named = [(e.notebook, e.note) for e in EVIDENCE if e.note]
    for notebook, text in notes:
        assert any(n == notebook and words in text for n, words in named), (notebook, text[:80])
    for notebook, words in named:
        assert sum(n == notebook and words in text for n, text in notes) == 1, words


def test_every_claim_of_the_lecture_s_list_is_on_the_page():
    assert {each.lecture for each in CORRECTIONS} - {0} == set(range(1, 17))
    titles = [each.title for each in CORRECTIONS]
    assert len(set(titles)) == len(titles)
    page = corrections.page()
    assert all(f"{number}. {title}" in page for number, title in enumerate(titles, 1))


@pytest.mark.parametrize(
    ("cell", "says"), [("assert no such thing", "0 code cells"), ("assert", "code cells of 04_")]
)
def test_a_cell_that_is_gone_or_not_alone_is_named(cell, says):
    with pytest.raises(LookupError, match=says):
        corrections.find(Evidence("04", cell))
    changed = replace(CORRECTIONS[0], evidence=(Evidence("04", cell),))
    with pytest.raises(LookupError, match=r"expected 1: name words"):
        corrections.page((changed,))


def test_a_notebook_that_is_not_there_is_named():
    with pytest.raises(LookupError, match="0 sources of notebook 77"):
        corrections.find(Evidence("77", "assert"))


def test_links_lead_to_notebooks_and_lines_of_the_table_to_sections():
    page = corrections.page()
    for path in set(re.findall(r"\]\((notebooks/[^)]+)\)", page)):
        assert (corrections.ROOT / path).is_file()
    assert re.findall(r"\]\(#(c\d+)\)", page) == re.findall(r'<a id="(c\d+)">', page)
