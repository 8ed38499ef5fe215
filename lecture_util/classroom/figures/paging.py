"""Still figures of notebook 10: rented rows, pages and their table, a context read in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lecture_util.classroom.figures.diagram import arrow, box, canvas, cells, write
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
from lecture_util.serving.blocks import Blocks, Table
from lecture_util.serving.contiguous import Regions, Waste
from lecture_util.serving.request import EndsAfter, Params, Request, Running

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VLLM = "Kwon et al. 2023, arXiv:2309.06180"


class Rented(NamedTuple):
    """A sequence half-way: its prompt, what is made, what will be, and the row it rented."""

    name: str
    prompt: int
    made: int
    coming: int
    row: int

    @property
    def stored(self) -> int:
        return self.prompt + self.made


EXAMPLE = (Rented("A", 7, 2, 2, 2048), Rented("B", 3, 1, 1, 512))
PAGE = 16


def rented() -> dict[str, Waste]:
    """The two sequences in rows by `Regions`, and in pages by `Blocks`: where the memory is."""
    regions = Regions(sum(one.row for one in EXAMPLE), "max")
    blocks, pages = Blocks(8, PAGE), []
    for i, one in enumerate(EXAMPLE):
        params = Params(one.row - one.prompt + 1, stop=EndsAfter(one.made + one.coming + 1))
        request = Request([1] * one.prompt, params)
        sequence = Running(i, request, i, 0, [1] * one.stored, 0.0)
        regions.begin(sequence)
        regions.grow(sequence, one.stored)
        table = blocks.begin()
        blocks.append(table, sequence.tokens)
        pages += table.pages
    stored = sum(one.stored for one in EXAMPLE)
    return {"rows": regions.waste(),
            "pages": Waste(stored, 0, PAGE * len(pages) - stored, 0)}  # fmt: skip


@figure(
    name="paged-fragmentation",
    title="Two texts rent 2,560 places, and 13 of them hold a token",
    answers=["paged-fragmentation"],
    notebook="10",
    alt="Two bars to scale. A rents 2,048 places: 7 of its prompt, 2 generated, 2 for tokens still "
    "to come, 2,037 that will never be used. B rents 512: 3, 1, 1 and 507. What holds a token is a "
    "sliver at each left edge, enlarged below. In all 13 of 2,560 places are in use, 0.5%. In "
    "pages of 16 the same two need 2 pages: 13 of 32 places in use.",
    sources=[
        f"the example: {VLLM}, figure 3 (whose slots of A add up to 2,049)",
        "measured: lecture_util.serving.contiguous.Regions.waste, lecture_util.serving.blocks",
    ],
)
def paged_fragmentation() -> Figure:
    fig, ax = canvas(15, 8.1, "Two texts rent 2,560 places, and 13 of them hold a token")
    waste, left, width = rented(), 1.0, 13.4
    for one, top, last in zip(EXAMPLE, (7.1, 4.25), (11.9, 11.9), strict=True):
        wide = width * one.row / EXAMPLE[0].row
        sliver = width * (one.stored + one.coming) / EXAMPLE[0].row
        never = one.row - one.stored - one.coming
        box(ax, left, top - 0.55, wide, 0.55, "", MUTED, 0.12, rounded=False)
        box(ax, left, top - 0.55, sliver, 0.55, "", PREDICTED, 1, rounded=False)
        write(ax, left - 0.3, top - 0.28, one.name, 19, weight="bold")
        write(ax, left + wide / 2, top - 0.28, f"a row of {one.row:,} places", 14, zorder=5)
        side, low = 0.56, top - 1.35
        parts = [(one.prompt, PREDICTED, 0.7, "prompt"), (one.made, GUESS, 0.7, "made"),
                 (one.coming, CACHE, 0.55, "to come")]  # fmt: skip
        x = left
        for count, color, strength, name in parts:
            cells(ax, x, low, [[tint(color, strength)] * count], side)
            label = f"{count}\n{name}" if one is EXAMPLE[0] else str(count)
            write(ax, x + side * count / 2, low - side - 0.1, label, 14, va="top")
            x += side * count
        box(ax, x, low - side, last - x, side, f"{never:,} never used", MUTED, 0.12, 16,
            rounded=False)  # fmt: skip
        for start, end in ((left, left), (left + sliver, x)):
            ax.plot([start, end], [top - 0.55, low], color=MUTED, lw=1, zorder=1)
        ax.plot([left + wide, last], [top - 0.55, low], color=MUTED, lw=1, ls=":", zorder=1)
    rows, pages = waste["rows"], waste["pages"]
    for k, (name, found) in enumerate((("rows as long as a text may get", rows),
                                       (f"pages of {PAGE}", pages))):  # fmt: skip
        write(ax, left, 1.3 - 0.62 * k, f"{name}:", 16, ha="left", weight="bold")
        share = 100 * found.stored / found.total
        write(ax, 6.6, 1.3 - 0.62 * k, f"{found.stored} of {found.total:,} places hold a token, "
              f"{share:.2g}%", 16, ha="left")  # fmt: skip
    return fig


WORDS = {"A": ["the", "cat", "sat", "on", "the", "mat", "and", "then", "slept"],
         "B": ["once", "upon", "a", "time", "there", "was"]}  # fmt: skip
ORDER = (7, 1, 5, 2, 3, 0, 4, 6)  # in which pages became free before


def two_tables() -> tuple[Blocks, dict[str, Table]]:
    """A and B, word by word, in pages of 4; both grow in turn, prompt by prompt first."""
    blocks = Blocks(8, 4)
    blocks.free = list(reversed(ORDER))
    tables = {name: blocks.begin() for name in WORDS}
    for name, words in WORDS.items():
        blocks.append(tables[name], words[:5])
    for name, words in WORDS.items():
        for word in words[5:]:
            blocks.append(tables[name], [word])
    return blocks, tables


@figure(
    name="paged-blocks",
    title="The table says on which page each part of a text really lies",
    answers=["paged-blocks", "paged-logical"],
    notebook="10",
    alt="Left, text A as it reads, 9 words on its pages 0, 1, 2, and text B, 6 words on its pages "
    "0 and 1; each page has 4 places. In the middle their tables: A 7, 1, 3 and B 5, 2. Right, the "
    "pool of 8 pages in memory: 7, 1 and 3 hold A's words, 5 and 2 hold B's, 0, 4 and 6 are free. "
    "Only a text's last page has empty places.",
    sources=[f"drawn from lecture_util.serving.blocks.Blocks; page numbers as in {VLLM}, fig. 6"],
)
def paged_blocks() -> Figure:
    fig, ax = canvas(15, 8.4, "The table says on which page each part of a text really lies")
    blocks, tables = two_tables()
    colors, high, P = {"A": PREDICTED, "B": CACHE}, 0.62, blocks.page_size
    pool_x, pool_top = 9.3, 7.2
    held = {}
    write(ax, 0.8, 7.75, "as the text reads", 16, ha="left", weight="bold")
    write(ax, 6.5, 7.75, "table", 16, weight="bold")
    write(ax, pool_x, 7.75, "as memory holds it", 16, ha="left", weight="bold")
    for (name, table), top in zip(tables.items(), (7.2, 3.9), strict=True):
        write(ax, 0.35, top - high / 2, name, 19, weight="bold")
        for j, page in enumerate(table.pages):
            y, words = top - (j + 1) * (high + 0.2), table.tokens[j * P : (j + 1) * P]
            held[page] = words, colors[name]
            _page(ax, 0.8, y, words, colors[name], P, high)
            write(ax, 5.55, y + high / 2, str(j), 14, color=MUTED)
            box(ax, 6.1, y, 0.8, high, str(page), colors[name], 0.5, 17, rounded=False)
            target = pool_top - (page + 1) * (high + 0.2) + high / 2
            arrow(ax, (6.95, y + high / 2), (pool_x - 0.5, target), color=colors[name])
    for page in range(blocks.num_pages):
        y = pool_top - (page + 1) * (high + 0.2)
        words, color = held.get(page, ([], MUTED))
        _page(ax, pool_x, y, words, color, P, high)
        write(ax, pool_x - 0.27, y + high / 2, str(page), 14, color=MUTED)
        if page in blocks.free:
            write(ax, pool_x + 4.6, y + high / 2, "free", 14, ha="left", color=MUTED)
    write(ax, 0.35, 0.25, f"pages of {P} places; position p lies on page table[p // {P}], in place "
          f"p % {P}", 13.5, ha="left", color=MUTED)  # fmt: skip
    return fig


def _page(ax: Axes, x: float, y: float, words: list[str], color: str, P: int, high: float) -> None:
    wide = 1.1
    for slot in range(P):
        full = slot < len(words)
        box(ax, x + wide * slot, y, wide, high, words[slot] if full else "",
            color if full else "#BBBBBB", 0.3 if full else 0.15, 14, rounded=False)  # fmt: skip


@figure(
    name="split-context",
    title="Split, one long context keeps many workers busy at once",
    answers=[],
    notebook="10",
    alt="Above, one worker walks along all 16 blocks of a context's keys and values, one after the "
    "other: 16 turns, while the other workers idle. Below, the context is split into 4 parts, a "
    "worker each: 4 turns. Each leaves an average and the logarithm of its sum of weights; from "
    "these a last step merges the parts into exactly the attention over the whole.",
    sources=[
        "splits as in lecture_util.kernels.paged_attention; FlashDecoding: Dao et al. 2023, "
        "crfm.stanford.edu/2023/10/12/flashdecoding.html",
    ],
)
def split_context() -> Figure:
    fig, ax = canvas(15, 7.6, "Split, one long context keeps many workers busy at once")
    turns, splits, side, left = 16, 4, 0.62, 3.3
    colors = (PREDICTED, GUESS, CACHE, ACCENT)
    share = turns // splits
    write(ax, 0.3, 6.55, "keys and values", 16, ha="left", weight="bold")
    cells(ax, left, 6.86, [[tint(colors[t // share], 0.6) for t in range(turns)]], side)
    write(ax, left + side * turns + 0.2, 6.55, "16 blocks", 14, ha="left", color=MUTED)
    write(ax, 0.3, 5.25, "one worker", 16, ha="left", weight="bold")
    cells(ax, left, 5.56, [[tint(MUTED, 0.35)] * turns], side)
    for t in range(turns):
        write(ax, left + side * (t + 0.5), 5.25, str(t + 1), 13, zorder=4)
    write(ax, left + side * turns + 0.2, 5.25, f"{turns} turns", 15, ha="left")
    top = 4.3
    for i in range(splits):
        y = top - 0.78 * i
        write(ax, 0.3, y - 0.3, f"worker {i + 1} of {splits}", 16, ha="left", weight="bold")
        cells(ax, left, y, [[tint(colors[i], 0.6)] * share], side)
        for t in range(share):
            write(ax, left + side * (t + 0.5), y - 0.31, str(t + 1), 13, zorder=4)
        arrow(ax, (left + side * share + 0.08, y - 0.31), (left + side * share + 0.55, y - 0.31))
        write(ax, left + side * share + 0.65, y - 0.31, f"average o{'₁₂₃₄'[i]},  "
              f"log-sum ℓ{'₁₂₃₄'[i]}", 14.5, ha="left")  # fmt: skip
    merge_x, low = 10.2, top - 0.78 * (splits - 1) - 0.62
    box(ax, merge_x, low, 2.0, top - low, "merge:\nweights\nsoftmax(ℓ)", WEIGHTS, 0.4, 16)
    arrow(ax, (9.7, (top + low) / 2), (merge_x - 0.03, (top + low) / 2), color=MUTED)
    write(ax, merge_x + 2.2, (top + low) / 2, f"{share} turns\nand a\nmerge", 15, ha="left")
    write(ax, 0.3, 0.55, "Σ softmax(ℓ)ᵢ oᵢ  is exactly the attention over the whole context: ℓᵢ is "
          "the logarithm of all the weight in part i", 14, ha="left", color=MUTED)  # fmt: skip
    return fig
