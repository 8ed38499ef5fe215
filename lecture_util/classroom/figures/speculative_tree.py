"""Still figure of notebook 08: a tree of guesses, its mask and its positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lecture_util.classroom.figures.diagram import arrow, box, canvas, cells, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import GUESS, INK, MUTED, PREDICTED, tint
from lecture_util.model.config import Config
from lecture_util.speculative.draft import ROOT, Draft
from lecture_util.speculative.medusa import best_tree
from lecture_util.speculative.target import TreeCache

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEDUSA = "Cai et al. 2024, arXiv:2401.10774"
SEQUENCE = ("The", "cat", "sat", "on", "the")
HEADS = (("warm", "old"), ("mat", "and"), (".", "in"))  # likeliest first, one row a head
ACCURACY = ((0.55, 0.25), (0.45, 0.25), (0.40, 0.20))  # invented: which guesses are worth it
ACCEPTED = (0, 2)


def tree() -> tuple[Draft, list[tuple[int, ...]]]:
    """The tree drawn, and the ranks along each of its paths."""
    paths = best_tree(torch.tensor(ACCURACY), 6)
    parents = [paths.index(path[:-1]) if len(path) > 1 else ROOT for path in paths]
    return Draft([2 * len(path) + path[-1] for path in paths], parents), paths


def read_as() -> tuple[list[list[bool]], list[int]]:
    """What each token of that forward sees, and its position, from the cache itself."""
    draft, _ = tree()
    before, new = len(SEQUENCE) - 1, 1 + len(draft)
    config = Config(D=4, F=4, K=1, G=1, H=4, L=1, V=8, max_context=32)
    cache = TreeCache(config, 1, 16, torch.float32, "cpu")
    cache.extend(before)
    cache.draft = draft
    device = torch.device("cpu")
    positions_1T = cache.positions(torch.Size((1, new)), device)  # first, as in a forward
    mask_1TS = cache.mask(new, before + new, device)
    return mask_1TS[0].tolist(), positions_1T[0].tolist()


@figure(
    name="draft-tree-mask",
    title="A tree of guesses in one forward: each sees only its own past",
    answers=["Medusa, heads and tree (slides)"],
    notebook="08",
    alt="Left, a tree after The cat sat on the: warm, then mat and a full stop, or and; old, then "
    "mat. Right, the mask of that forward: seven rows, the newest token and six guesses; eleven "
    "columns. All see the five words; of the guesses each sees itself and those it follows. Slots "
    "run from 5 to 10, positions are 5, 5, 6, 6, 6, 7. Accepted: guesses 0 and 2, then kept in "
    "slots 5 and 6.",
    sources=["lecture_util.speculative: best_tree, TreeCache.mask and .positions", MEDUSA,
             "words and accuracies invented"],
)  # fmt: skip
def draft_tree_mask() -> Figure:
    title = "A tree of guesses in one forward: each sees only its own past"
    fig, ax = canvas(15, 7.3, title)
    draft, paths = tree()
    words = [HEADS[len(path) - 1][path[-1]] for path in paths]
    _tree(ax, draft, words)
    _mask(ax, draft, words)
    return fig


def _tree(ax: Axes, draft: Draft, words: list[str]) -> None:
    places = {ROOT: (0.4, 4.0), 0: (1.95, 4.85), 1: (1.95, 2.75), 2: (3.6, 5.5), 3: (3.6, 4.2),
              4: (3.6, 2.75), 5: (5.25, 5.5)}  # fmt: skip
    for depth in (1, 2, 3):
        write(ax, 0.87 + 1.65 * depth, 6.75, f"head {depth}", 15, color=MUTED)
    write(ax, 0.95, 6.75, "newest", 15, color=MUTED)
    box(ax, *places[ROOT], 1.1, 0.7, SEQUENCE[-1], MUTED, 0.15, 17)
    for node, (parent, word) in enumerate(zip(draft.parents, words, strict=True)):
        (x, y), (x0, y0) = places[node], places[parent]
        wide = 1.1
        accepted = node in ACCEPTED
        arrow(ax, (x0 + wide + 0.03, y0 + 0.35), (x - 0.04, y + 0.35),
              color=GUESS if accepted else MUTED, width=2.6 if accepted else 1.6)  # fmt: skip
        box(ax, x, y, 1.1, 0.7, word, GUESS, 0.7 if accepted else 0.2, 17)
        write(ax, x + 1.07, y + 0.86, str(node), 13, color=MUTED, ha="right")
    write(ax, 0.4, 1.55, "head 2 doesn't know what head 1 picks:\nboth branches get its “mat”", 15,
          ha="left", color=MUTED)  # fmt: skip
    slots = [len(SEQUENCE) + node for node in ACCEPTED]
    moved = range(len(SEQUENCE), len(SEQUENCE) + len(slots))
    write(ax, 0.4, 0.55, f"“warm mat” accepted: slots {slots[0]} and {slots[1]} become {moved[0]} "
          f"and {moved[1]},\nthe others are overwritten", 15, ha="left")  # fmt: skip


def _mask(ax: Axes, draft: Draft, words: list[str]) -> None:
    mask, positions = read_as()
    side, left, top, known = 0.5, 8.3, 5.35, len(SEQUENCE)
    colors = [[(tint(GUESS, 0.75) if s >= known else tint(PREDICTED, 0.4)) if seen else "#EFEFEF"
               for s, seen in enumerate(row)] for row in mask]  # fmt: skip
    cells(ax, left, top, colors, side)
    columns = [*SEQUENCE, *words]
    for s, word in enumerate(columns):
        write(ax, left + side * (s + 0.5), top + 0.12, word, 15, rotation=60, ha="left",
              va="bottom", rotation_mode="anchor",
              color=INK if s < known else GUESS)  # fmt: skip
    for x, name in ((left - 1.45, "slot"), (left - 0.55, "position")):
        write(ax, x, top + 0.25, name, 14, color=MUTED, ha="center")
    for row, position in enumerate(positions):
        y, slot = top - side * (row + 0.5), known - 1 + row
        write(ax, left - 1.45, y, str(slot), 16)
        write(ax, left - 0.55, y, str(position), 16, weight="bold")
        write(ax, left + side * len(columns) + 0.12, y, columns[slot], 15, ha="left",
              color=INK if slot < known else GUESS)  # fmt: skip
    write(ax, left - 0.2, 1.2, "positions follow depth, slots follow order:\nthe two “mat” stand "
          "at one position and never meet", 14, ha="left", color=MUTED)  # fmt: skip
