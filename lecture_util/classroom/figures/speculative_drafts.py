"""Still figure of notebook 08: four ways to draft the next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import arrow, box, canvas, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    MUTED,
    PREDICTED,
    WEIGHTS,
    tint,
)
from lecture_util.speculative.ngram import lookup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEDUSA = "Cai et al. 2024, arXiv:2401.10774"
EAGLE = "Li et al. 2024, arXiv:2401.15077"
LOOKUP = "Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding"


@figure(
    name="four-ways-to-draft",
    title="Four ways to guess t₄ and t₅: a model, a look-up, heads, a layer",
    answers=["medusa-eagle", "n-grams (slides)", "Medusa, heads and tree (slides)"],
    notebook="08",
    alt="Four panels; tokens t1 to t3 are known. Small model: reads t1, t2, t3, gives t4, reads "
    "it, gives t5. N-gram: the last two tokens stood earlier in the text, and what followed there "
    "is copied. Medusa: from the target's feature f2 its own head gave t3, head 1 gives t4 and "
    "head 2 t5, at once. EAGLE: one layer reads f1 with t2 and f2 with t3, gives a feature for t4; "
    "that with t4 gives one for t5.",
    sources=["drawn from lecture_util.speculative", LOOKUP, MEDUSA, EAGLE],
)
def four_ways_to_draft() -> Figure:
    title = "Four ways to guess t₄ and t₅: a model, a look-up, heads, a layer"
    fig, ax = canvas(15, 9.3, title)
    late = "one pass of a layer a guess; it reads the guess before"
    for x, y, name, note, draw in (
        (0.4, 4.9, "a smaller model", "one forward a guess", _small_model),
        (7.9, 4.9, "an n-gram of the text", "no model at all", _ngram),
        (0.4, 0.15, "Medusa: heads on a feature", "all at once, each for itself", _medusa),
        (7.9, 0.15, "EAGLE: a layer of features", late, _eagle),
    ):
        write(ax, x, y + 4.05, name, 18, ha="left", weight="bold")
        write(ax, x, y + 3.6, note, 14, ha="left", color=MUTED)
        draw(ax, x, y)
    ax.plot([7.5, 7.5], [0.2, 9.1], color=tint(MUTED, 0.4), lw=1.2)
    ax.plot([0.4, 14.6], [4.72, 4.72], color=tint(MUTED, 0.4), lw=1.2)
    return fig


def _known(ax: Axes, x: float, y: float, text: str) -> None:
    box(ax, x, y, 0.8, 0.6, text, MUTED, 0.15, 17)


def _guess(ax: Axes, x: float, y: float, text: str) -> None:
    box(ax, x, y, 0.8, 0.6, text, GUESS, 0.45, 17)


def _feature(ax: Axes, x: float, y: float, text: str, guessed: bool = False) -> None:
    box(ax, x, y, 0.8, 0.6, text, ACCENT if guessed else PREDICTED, 0.3, 17)


def _small_model(ax: Axes, x: float, y: float) -> None:
    box(ax, x, y + 1.5, 5.6, 0.75, "small model", CACHE, 0.45, 17)
    for k, name in enumerate(("t₁", "t₂", "t₃", "t₄")):
        left = x + 0.2 + 1.4 * k
        (_known if k < 3 else _guess)(ax, left, y + 0.35, name)
        arrow(ax, (left + 0.4, y + 0.98), (left + 0.4, y + 1.47))
        if k > 1:
            arrow(ax, (left + 0.4, y + 2.27), (left + 0.4, y + 2.68))
            _guess(ax, left, y + 2.7, ("t₄", "t₅")[k - 2])
    # The first guess is read for the second.
    arrow(ax, (x + 3.4, y + 3.32), (x + 3.4, y + 3.6), (x + 6.1, y + 3.6), (x + 6.1, y + 0.65),
          (x + 5.25, y + 0.65), color=GUESS)  # fmt: skip


TEXT = ("the", "red", "fox", "ran", "to", "the", "red")  # what is looked up in


def _ngram(ax: Axes, x: float, y: float) -> None:
    guesses = lookup(TEXT, longest=2, k=2)
    found = TEXT.index(guesses[0])
    wide, row = 0.74, y + 1.55
    for k, word in enumerate((*TEXT, *guesses)):
        matched = k in (found - 2, found - 1) or k in (len(TEXT) - 2, len(TEXT) - 1)
        color = GUESS if k >= len(TEXT) else CACHE if matched else MUTED
        box(ax, x + wide * k, row, wide - 0.08, 0.65, word, color, 0.45 if color != MUTED else 0.15,
            15)  # fmt: skip

    def middle(first: int) -> float:
        return x + wide * (first + 1) - 0.04

    arrow(ax, (middle(5), row - 0.1), (middle(5), y + 0.95), (middle(0), y + 0.95),
          (middle(0), row - 0.05), color=CACHE, width=2.2)  # fmt: skip
    write(ax, (middle(0) + middle(5)) / 2, y + 0.6, "stood here before", 15, color=MUTED)
    arrow(ax, (middle(2), row + 0.75), (middle(2), row + 1.2), (middle(7), row + 1.2),
          (middle(7), row + 0.7), color=GUESS, width=2.2)  # fmt: skip
    write(ax, (middle(2) + middle(7)) / 2, row + 1.5, "what followed is copied", 15, color=MUTED)


def _target(ax: Axes, x: float, y: float, count: int) -> None:
    """The target over t1, t2, with its features on top."""
    box(ax, x, y + 0.95, 1.4 * count - 0.2, 0.6, "target", WEIGHTS, 0.5, 16)
    for k in range(count):
        left = x + 0.2 + 1.4 * k
        _known(ax, left, y + 0.1, f"t{'₁₂'[k]}")
        arrow(ax, (left + 0.4, y + 0.72), (left + 0.4, y + 0.93))
        arrow(ax, (left + 0.4, y + 1.57), (left + 0.4, y + 1.83))
        _feature(ax, left, y + 1.85, f"f{'₁₂'[k]}")


def _medusa(ax: Axes, x: float, y: float) -> None:
    _target(ax, x, y, 2)
    start = x + 2.4
    rows = (("its own head", "t₃", WEIGHTS), ("head 1", "t₄", CACHE), ("head 2", "t₅", CACHE))
    for k, (name, token, color) in enumerate(rows):
        low = y + 2.65 - 0.8 * k
        arrow(ax, (start + 0.02, y + 2.15), (start + 0.35, y + 2.15), (start + 0.35, low + 0.3),
              (start + 0.73, low + 0.3))  # fmt: skip
        box(ax, start + 0.75, low, 1.95, 0.6, name, color, 0.45, 15)
        arrow(ax, (start + 2.72, low + 0.3), (start + 3.18, low + 0.3))
        (_known if k == 0 else _guess)(ax, start + 3.2, low, token)


def _eagle(ax: Axes, x: float, y: float) -> None:
    box(ax, x, y + 1.3, 6.3, 0.6, "one layer of the target's kind", CACHE, 0.45, 16)
    pairs = (("f₁", "t₂"), ("f₂", "t₃"), ("f̂₃", "t₄"))
    for k, (feature, token) in enumerate(pairs):
        left = x + 0.15 + 2.1 * k
        _feature(ax, left, y + 0.2, feature, k == 2)
        (_known if k < 2 else _guess)(ax, left + 0.85, y + 0.2, token)
        arrow(ax, (left + 0.82, y + 0.84), (left + 0.82, y + 1.27))
        if k == 0:
            continue
        arrow(ax, (left + 0.4, y + 1.92), (left + 0.4, y + 2.33))
        _feature(ax, left, y + 2.35, ("f̂₃", "f̂₄")[k - 1], True)
        arrow(ax, (left + 0.82, y + 2.65), (left + 1.08, y + 2.65))
        _guess(ax, left + 1.1, y + 2.35, ("t₄", "t₅")[k - 1])
    # Both go back in, side by side.
    ax.plot([x + 3.75] * 2, [y + 2.97, y + 3.2], color=GUESS, lw=1.8)
    arrow(ax, (x + 2.65, y + 2.97), (x + 2.65, y + 3.2), (x + 6.6, y + 3.2), (x + 6.6, y + 0.5),
          (x + 6.02, y + 0.5), color=GUESS)  # fmt: skip
