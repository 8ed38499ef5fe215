"""Present a notebook as slides, on the live kernel: `python -m lecture_util present NN`.

JupyterLab opens a copy of the notebook as a deck (jupyterlab-slideshow) in large type. The answers
are stubs; a button puts each solution in, another brings everything back to the start. The copy
lives in a temporary folder, so nothing done on stage reaches the course's own files.

Slides follow the cells' `slide_type`: `slide` and `subslide` start one, `fragment` and untagged
cells continue it, `notes` are for the presenter, `skip` is left out. A cell tagged `hide-input`
shows its output only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from nbformat import NotebookNode

from .build import ROOT, Paths, kernel_env, sources
from .exercise import _classroom
from .notebook import (
    BEGIN,
    END,
    BuildError,
    dumps,
    grade_id,
    is_answer,
    number_of,
    read_source,
    student_copy,
)

HERE = Path(__file__).parent
SETTINGS = {  # by plugin, on top of what `make lab` uses
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    "@jupyterlab/notebook-extension:tracker": {
        "codeCellConfig": {"lineNumbers": False, "lineWrap": True},
    },
}


@dataclass
class Slide:
    """What is on the screen together: the indices of its cells, first to last."""

    title: str
    cells: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def slide_type(cell: NotebookNode) -> str | None:
    kind = cell.metadata.get("slideshow", {}).get("slide_type")
    return None if kind in (None, "", "-") else kind


def slides(nb: NotebookNode) -> list[Slide]:
    """The notebook's slides as the deck shows them."""
    found: list[Slide] = []
    for index, cell in enumerate(nb.cells):
        kind = slide_type(cell)
        if kind == "skip":
            continue
        if kind in ("slide", "subslide") or not found:
            earlier = found[-1].title if kind == "subslide" and found else ""
            found.append(Slide(_heading(cell) or earlier or "untitled"))
        if kind == "notes":
            found[-1].notes.append(cell.source)
        else:
            found[-1].cells.append(index)
    return found


def _heading(cell: NotebookNode) -> str:
    lines = cell.source.splitlines() if cell.cell_type == "markdown" else []
    headings = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
    return headings[0] if headings else ""


def stage_copy(source: Path) -> NotebookNode:
    """The notebook for the stage: no outputs, answers as stubs, solutions and notes in metadata."""
    solved = read_source(source, _classroom.load(number_of(source)))
    nb = student_copy(solved)
    for cell, answer in zip(nb.cells, solved.cells, strict=True):
        if "hide-input" in cell.metadata.get("tags", []):
            cell.metadata["jupyter"] = {"source_hidden": True}
        if is_answer(cell):
            lines = answer.source.splitlines()
            text = "\n".join(line for line in lines if line.strip() not in (BEGIN, END))
            cell.metadata["stage"] = {
                "id": grade_id(cell).removeprefix("answer-"),
                "solution": text,
            }
    deck = slides(nb)
    for slide, after in zip(deck, [*deck[1:], None], strict=True):
        about = {"title": slide.title, "next": after.title if after else "the end"}
        if slide.notes:
            about["notes"] = "\n\n".join(slide.notes)
        if slide.cells:
            nb.cells[slide.cells[0]].metadata.setdefault("stage", {}).update(about)
    return nb


def set_stage(folder: Path, paths: Paths) -> Path:
    """Lay out `folder` for the stage: a copy to present, one to start again from, the images."""
    text, name = dumps(stage_copy(paths.source)), paths.solution.name
    for place in ("notebooks", "start"):  # one to present, one to start again from
        (folder / place).mkdir(parents=True)
        (folder / place / name).write_text(text, encoding="utf-8")
    images = paths.source.parents[1] / "images"
    if images.is_dir():
        shutil.copytree(images, folder / "images")
    return folder / "notebooks" / name


def stage_flags(copy: Path) -> list[str]:
    """What makes JupyterLab open `copy`, laid out by `set_stage`, as a deck."""
    return [
        f"--LabApp.extra_labextensions_path={HERE}",
        f"--LabApp.default_url=/lab/tree/notebooks/{copy.name}",
    ]


def lab(folder: Path, *flags: str) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of JupyterLab on `folder`, with settings of its own."""
    for plugin, values in {
        **json.loads((HERE / "jupyterlab.json").read_text()),
        **SETTINGS,
    }.items():
        package, short = plugin.split(":")
        file = folder / ".settings" / package / f"{short}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    command = [
        sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--ServerApp.root_dir={folder}",
        *flags,
    ]  # fmt: skip
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.insert(3, "--allow-root")
    env = kernel_env(
        ROOT,
        JUPYTERLAB_SETTINGS_DIR=str(folder / ".settings"),
        JUPYTERLAB_WORKSPACES_DIR=str(folder / ".workspaces"),
    )
    return command, env


def require_slideshow() -> None:
    """Raises: BuildError if the deck's extension is not installed."""
    from importlib.util import find_spec

    if find_spec("jupyterlab_slideshow") is None:
        raise BuildError("jupyterlab-slideshow is missing: run `make setup`, or pip install it")


def print_notes(nb: NotebookNode) -> None:
    """The speaker notes on the terminal, slide by slide."""
    for number, slide in enumerate(slides(nb), 1):
        print(f"{number:>3}  {slide.title}")
        for note in slide.notes:
            print(re.sub("^", "     ", note.strip(), flags=re.MULTILINE) + "\n")


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser("lecture_util present", description=__doc__.split("\n\n")[0])
    parser.add_argument("number", metavar="NN", help="the notebook, such as 03")
    parser.add_argument(
        "--notes", action="store_true", help="print the speaker notes, open nothing"
    )
    args, flags = parser.parse_known_args(argv)  # the rest is JupyterLab's, such as --no-browser
    for before, word in zip(["", *flags], flags, strict=False):
        if word[0] != "-" and before[:1] != "-":  # nor the value of a flag, such as --port 8899
            parser.error(f"unexpected {word!r} after {args.number}: one notebook is presented")
    try:
        require_slideshow()
        paths = sources(root, [args.number])[0]
        if args.notes:
            print_notes(stage_copy(paths.source))
            return 0
        with tempfile.TemporaryDirectory(prefix="lecture-") as temporary:
            copy = set_stage(Path(temporary), paths)
            command, env = lab(Path(temporary), *stage_flags(copy), *flags)
            print("Presenting a copy: what you change on stage is gone when JupyterLab ends.")
            print("Space and arrows turn slides, Shift Enter runs a cell, Escape leaves the deck.")
            with subprocess.Popen(command, env=env, cwd=temporary) as server:
                try:
                    return server.wait()
                except KeyboardInterrupt:  # JupyterLab got it too
                    server.terminate()
                    return 0
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
