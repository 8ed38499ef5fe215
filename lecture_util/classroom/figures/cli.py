"""Draw the registered figures to `images/`, always to the same bytes, and index them."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from lecture_util.classroom.figures.answers import table
from lecture_util.classroom.figures.registry import FIGURES, StillFigure
from lecture_util.classroom.figures.style import STYLE

IMAGES = Path(__file__).parents[3] / "images"
MAX_BYTES = 100_000
# Text as outlines looks equal without our fonts; a fixed salt gives equal ids.
_SVG = {"svg.fonttype": "path", "svg.hashsalt": "lecture_util", "path.simplify": True}


def render(still: StillFigure, path: Path, **savefig: object) -> None:
    """Draw one figure to a file; the same figure gives the same bytes of SVG."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | _SVG)
        fig = still.draw()
        if path.suffix == ".svg":
            fig.savefig(path, metadata={"Date": None, "Creator": None, "Title": still.title})
            path.write_text(smaller(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            fig.savefig(path, **savefig)
        plt.close(fig)


def smaller(svg: str) -> str:
    """The same picture in fewer bytes: coordinates to a hundredth of a point, no spare text."""

    def tight(attribute: re.Match) -> str:  # "M 1 2 \nL 3 4 \n" and "fill: none; stroke: red"
        return re.sub(r"\s*([A-Za-z]) (?=[-\d])|\s*\n|([:;]) ", r"\1\2", attribute[0])

    svg = re.sub(r"<!-- .*? -->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?<= d=)\"[^\"]*\"|(?<= style=)\"[^\"]*\"", tight, svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    svg = re.sub(r"\b[1-9]\d*\.\d{3,}", lambda long: f"{float(long[0]):.2f}", svg)
    svg = re.sub(r"translate\((\S+) 0\)", r"translate(\1)", svg)
    svg = re.sub(r"DejaVuSans(?:-([BO])[a-zA-Z]*)?-(?=[0-9a-f]+\")", r"D\1", svg)
    return re.sub(r" id=\"[a-z]+_\d+\"", "", svg)


def index() -> str:
    """`images/README.md`: each figure, what it answers, and where its numbers come from."""
    lines = [
        "# Figures",
        "",
        "Drawn by `make figures` (`python -m lecture_util figures`) from",
        "`lecture_util/classroom/figures/`; edit there, never here. *Answers* names the picture",
        "of the lecture or its slides whose place ours takes; ours are drawn afresh, from",
        "formulas, from our own code, or from the cited numbers. A second table, below, goes the",
        "other way: each picture of the lecture and the slides, and what answers it here.",
        "",
        "| Figure | Title | Notebook | Answers | Numbers from | Alt text |",
        "|---|---|---|---|---|---|",
    ]
    for still in sorted(FIGURES.values(), key=lambda still: (still.notebook, still.name)):
        cells = [
            f"[{still.name}]({still.name}.svg)",
            still.title,
            still.notebook,
            ", ".join(still.answers) or "none",
            "; ".join(still.sources),
            still.alt,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", *table()]) + "\n"


def draw_all(folder: Path) -> list[Path]:
    """Draw every figure and the index into `folder`; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for still in FIGURES.values():
        path = folder / f"{still.name}.svg"
        render(still, path)
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(
                f"{path.name} has {size:,} bytes, at most {MAX_BYTES:,}: draw fewer shapes"
            )
        paths.append(path)
    (folder / "README.md").write_text(index(), encoding="utf-8")
    return [*paths, folder / "README.md"]


def differing(folder: Path = IMAGES) -> list[str]:
    """Names of the files in `folder` that drawing anew would change, add or leave over."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = {path.name: path.read_bytes() for path in draw_all(Path(scratch))}
    kept = {
        path.name: path.read_bytes()
        for path in (folder.iterdir() if folder.exists() else ())
        if path.suffix == ".svg" or path.name == "README.md"
    }
    return sorted(name for name in fresh | kept if fresh.get(name) != kept.get(name))


def main(argv: list[str] | None = None) -> int:
    """`python -m lecture_util figures [--check]`: draw, or say which pictures are out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m lecture_util figures", description=main.__doc__
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if any differ")
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where the pictures live")
    args = parser.parse_args(argv)
    if args.check and not args.folder.is_dir():
        parser.error(f"no such folder: {args.folder}; draw into it first, without --check")
    if args.check:
        changed = differing(args.folder)
        for name in changed:
            print(f"{name} differs from what its code draws: run `make figures`")
        return 1 if changed else 0
    try:
        paths = draw_all(args.folder)
    except OSError as error:
        parser.error(f"can't write to {args.folder} ({error}): give a folder that can be written")
    print(f"{len(paths) - 1} figures and their index in {args.folder.name}/")
    return 0
