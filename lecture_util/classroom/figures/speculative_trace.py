"""Still figure of notebook 08: a text made in rounds, every guess coloured by what became of it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from lecture_util.classroom.figures.diagram import box, canvas, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import ACCENT, GUESS, MEASURED, MUTED
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.speculate import Round, speculate
from lecture_util.speculative.target import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "the bees lives in a hive near the river and makes honey for the winter ."
ANSWER = "the bees live in a hive near the river and make honey for the winter ."
ASKED, WANTED = ["mend", ":", *QUESTION.split(), "mended", ":"], ANSWER.split()
VOCABULARY = sorted({*ASKED, *WANTED})


@cache
def rounds() -> tuple[Round, ...]:
    """The loop of the course, on a target that wants WANTED and guesses looked up in the text."""
    prompt, wanted = ([VOCABULARY.index(word) for word in text] for text in (ASKED, WANTED))

    def logits(tokens: list[int]) -> torch.Tensor:
        place = min(len(tokens) - len(prompt), len(wanted) - 1)  # behind the end: never asked for
        return 9.0 * torch.nn.functional.one_hot(torch.tensor(wanted[place]), len(VOCABULARY))

    drafter = NgramDrafter(longest=2, k=4, shortest=1)
    return tuple(speculate(Table(logits), drafter, prompt, len(wanted)))


def _counts() -> tuple[int, int, int]:
    """Rounds, tokens, and guesses that were accepted."""
    made = rounds()
    return len(made), sum(len(r.tokens) for r in made), sum(len(r.accepted) for r in made)


def _title() -> str:
    forwards, tokens, _ = _counts()
    return f"{tokens} words in {forwards} forwards: kept guesses, and one word each of its own"


def _alt() -> str:
    forwards, tokens, accepted = _counts()
    guessed = sum(len(r.draft) for r in rounds())
    return (
        f"A grid, a row for each of {forwards} forwards, a column for each of {tokens} words of "
        "the answer. In a row stand the words guessed, looked up in the question, and below them "
        f"what came of them. Of {guessed} guesses {accepted} are kept, green; the others are "
        f"struck through, orange; a row ends with one word of the target's own, purple. So {tokens}"
        f" words take {forwards} forwards, and are the words the target alone would have written."
    )


@figure(
    name="speculative-trace",
    title=_title(),
    answers=["Speculative decoding, coloured (slides)"],
    notebook="08",
    alt=_alt(),
    sources=[
        "lecture_util.speculative: speculate, NgramDrafter",
        "the text and a target that wants it are invented",
        "the idea of the picture: Leviathan et al. 2022, arXiv:2211.17192",
    ],
)
def speculative_trace() -> Figure:
    made, wide, tall = rounds(), 1.0, 0.74
    fig, ax = canvas(17.6, tall * len(made) + 2.2, _title())
    top, left, done = tall * len(made) + 0.9, 1.0, 0
    write(ax, 0.4, top + 0.75, f"the question: {QUESTION}", 15, ha="left", color=MUTED)
    for number, r in enumerate(made):
        y = top - tall * (number + 1)
        write(ax, 0.55, y + 0.3, f"{number + 1}", 15, color=MUTED)
        for k, guess in enumerate(r.draft.tokens):
            if k >= len(r.accepted):
                x = left + wide * (done + k)
                _word(ax, x, y + 0.31, guess, MEASURED, 0.12, struck=True)
        for k, token in enumerate(r.tokens):
            kept = k < len(r.accepted)
            below = not kept and len(r.draft) > len(r.accepted)
            x, shift = left + wide * (done + k), 0.0 if below else 0.155
            _word(ax, x, y + shift, token, GUESS if kept else ACCENT, 0.6)
        done += len(r.tokens)
    _legend(ax)
    return fig


def _word(ax, x: float, y: float, token: int, color: str, strength: float, struck=False) -> None:
    box(ax, x + 0.03, y, 0.94, 0.3, VOCABULARY[token], color, strength, 13)
    if struck:
        ax.plot([x + 0.12, x + 0.88], [y + 0.15] * 2, color=MEASURED, lw=2, zorder=6)


def _legend(ax) -> None:
    for x, color, strength, text in (
        (1.0, GUESS, 0.6, "guessed and kept"),
        (5.2, MEASURED, 0.12, "guessed, rejected or behind a rejected one"),
        (12.6, ACCENT, 0.6, "the target's own word"),
    ):
        box(ax, x, 0.3, 0.5, 0.3, "", color, strength)
        write(ax, x + 0.65, 0.45, text, 14, ha="left")
