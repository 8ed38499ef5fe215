"""The course's pictures: one style, the plots notebooks share, and the still figures.

style        type, colours, the line of conditions below a plot
plots        roofline, predicted against measured, bars
registry     the list of still figures
diagram      boxes, arrows and brackets on a plain canvas
workload     inference's scale, its timeline, a step's bytes, the method    notebooks 00, 01, 03
transformer  one block with every edge's axes                              notebook 01
cache        naive against cached generation, and the cache as a tensor    notebook 03
cli          `make figures`: draw all, or check that none is out of date
"""

from lecture_util.classroom.figures import cache, transformer, workload  # noqa: F401  register
from lecture_util.classroom.figures.cli import main
from lecture_util.classroom.figures.plots import bars, label_points, predicted_vs_measured, roofline
from lecture_util.classroom.figures.registry import FIGURES, figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PALETTE,
    PREDICTED,
    WEIGHTS,
    caption,
    claim,
    number,
    tint,
    use_style,
)

__all__ = [
    "ACCENT",
    "CACHE",
    "FIGURES",
    "GUESS",
    "INK",
    "MEASURED",
    "MUTED",
    "PALETTE",
    "PREDICTED",
    "WEIGHTS",
    "bars",
    "caption",
    "claim",
    "figure",
    "label_points",
    "main",
    "number",
    "predicted_vs_measured",
    "roofline",
    "tint",
    "use_style",
]
