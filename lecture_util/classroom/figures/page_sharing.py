"""Still figures of notebook 10: pages that several texts hold, and how they are found again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lecture_util.classroom.figures.diagram import arrow, box, canvas, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import ACCENT, CACHE, GUESS, MEASURED, MUTED, PREDICTED
from lecture_util.serving.blocks import Blocks, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VLLM = "Kwon et al. 2023, arXiv:2309.06180"
P = 4
COLORS = (PREDICTED, CACHE, GUESS)
SYSTEM = ["you", "are", "a", "kind", "and", "careful", "helper", "."]
QUESTIONS = (["what", "is", "a", "page", "?"], ["sing", "!"], ["who", "made", "you", ",", "friend"])


def page(ax: Axes, x: float, y: float, words: list[str], color: str, wide: float = 1.05) -> None:
    """A page of four places, the full ones with their word."""
    for slot in range(P):
        full = slot < len(words)
        box(ax, x + wide * slot, y, wide, 0.6, words[slot] if full else "",
            color if full else "#BBBBBB", 0.3 if full else 0.15, 13, rounded=False)  # fmt: skip


def shared() -> tuple[Blocks, list[Table]]:
    """Three requests with one system prompt, the first computed before the others come."""
    blocks = Blocks(10, P)
    tables = []
    for question in QUESTIONS:
        words = SYSTEM + question
        table = blocks.begin(words)
        blocks.append(table, words[len(table) :])
        blocks.commit(table)
        tables.append(table)
    return blocks, tables


@figure(
    name="paged-sharing",
    title="Texts that begin alike share pages: held once, counted thrice",
    answers=["paged-sharing"],
    notebook="10",
    alt="Three requests begin with the same system prompt of 8 words, two pages of 4. Their tables "
    "are 0, 1, 2, 3 and 0, 1, 4 and 0, 1, 5, 6: pages 0 and 1 are the same for all and have a "
    "count of 3, the others a count of 1. So 7 pages are held instead of 11, and of the second and "
    "third request only what follows the prompt is computed.",
    sources=[f"drawn from lecture_util.serving.blocks.Blocks; the idea: {VLLM}, section 4.4"],
)
def paged_sharing() -> Figure:
    fig, ax = canvas(15, 7.6, "Texts that begin alike share pages: held once, counted thrice")
    blocks, tables = shared()
    common = len(SYSTEM) // P
    pool_x, tops = 4.9, (6.0, 4.2, 2.6)
    write(ax, 0.4, 7.0, "tables", 16, ha="left", weight="bold")
    write(ax, pool_x, 7.0, "the system prompt, held once", 16, ha="left", weight="bold")
    write(ax, 10.3, 7.0, "what each goes on with", 16, ha="left", weight="bold")
    for j in range(common):
        y = 4.6 - 0.8 * j
        words = tables[0].tokens[j * P : (j + 1) * P]
        page(ax, pool_x, y, words, ACCENT)
        _count(ax, pool_x, y, tables[0].pages[j], blocks)
    for table, top, color in zip(tables, tops, COLORS, strict=True):
        y = top - 0.6
        for j, number in enumerate(table.pages):
            box(ax, 0.4 + 0.75 * j, y, 0.75, 0.6, str(number), ACCENT if j < common else color,
                0.4, 17, rounded=False)  # fmt: skip
        right = 0.4 + 0.75 * len(table.pages) + 0.05
        arrow(ax, (right, y + 0.3), (pool_x - 0.72, 4.5), color=ACCENT)
        for j in range(common, len(table.pages)):
            low = y - 0.72 * (j - common)
            page(ax, 10.6, low, table.tokens[j * P : (j + 1) * P], color, 0.9)
            write(ax, 10.35, low + 0.3, str(table.pages[j]), 14, color=MUTED)
    held, apart = blocks.num_pages - blocks.available, sum(len(t.pages) for t in tables)
    write(ax, 0.4, 0.5, f"{held} pages held, not {apart}; {common * P} words of each later prompt "
          "need no computing", 16, ha="left")  # fmt: skip
    return fig


def _count(ax: Axes, x: float, y: float, number: int, blocks: Blocks) -> None:
    write(ax, x - 0.25, y + 0.3, str(number), 14, color=MUTED)
    write(ax, x + 4.3, y + 0.3, f"count\n{blocks.counts[number]}", 13, ha="left")


class Moment(NamedTuple):
    """Two samples' tables and the counts after something was done; pages copied by it."""

    what: str
    tables: list[list[int]]
    tokens: list[list[str]]
    counts: dict[int, int]
    copies: list[tuple[int, int]]


PROMPT = ["tell", "me", "a", "story", "of", "a", "fox"]


def copied() -> list[Moment]:
    """Two samples of one prompt: forked, then one writes, then the other."""
    blocks = Blocks(8, P, prefix_caching=False)
    blocks.free = [0, 2, 4, 5, 6, 3, 1, 7]  # as others may have left them: 7 is taken first
    first = blocks.begin()
    blocks.append(first, PROMPT)
    second = blocks.fork(first)
    tables, moments = (first, second), []

    def note(what: str, copies: list[tuple[int, int]]) -> None:
        held = {number: blocks.counts[number] for t in tables for number in t.pages}
        moments.append(Moment(what, [list(t.pages) for t in tables],
                              [list(t.tokens) for t in tables], held, copies))  # fmt: skip

    note("forked: nothing is copied", [])
    note("A1 writes “once”: page 1 is copied", blocks.append(first, ["once"]))
    note("A2 writes “long”: page 1 is its own now", blocks.append(second, ["long"]))
    return moments


@figure(
    name="copy-on-write",
    title="Writing to a shared page copies it first, and only that page",
    answers=["paged-parallel"],
    notebook="10",
    alt="Two samples, A1 and A2, of one prompt of 7 words in pages of 4. Forked, both tables are "
    "7, 1 and both pages have a count of 2. A1 writes a word: page 1, shared, is copied to page 3; "
    "A1's table becomes 7, 3, and page 1's count falls to 1. A2 writes a word: page 1 is its own "
    "now, nothing is copied. Page 7 stays shared throughout.",
    sources=[f"drawn from lecture_util.serving.blocks.Blocks; page numbers as in {VLLM}, figure 8"],
)
def copy_on_write() -> Figure:
    fig, ax = canvas(15, 8.0, "Writing to a shared page copies it first, and only that page")
    for k, moment in enumerate(copied()):
        top = 7.3 - 2.5 * k
        write(ax, 0.4, top, f"{k + 1}  {moment.what}", 16, ha="left", weight="bold")
        for row, (name, pages) in enumerate(zip(("A1", "A2"), moment.tables, strict=True)):
            y = top - 0.95 - 0.78 * row
            write(ax, 0.75, y + 0.3, name, 16)
            for j, number in enumerate(pages):
                box(ax, 1.3 + 0.75 * j, y, 0.75, 0.6, str(number),
                    _owner(moment, number), 0.4, 17, rounded=False)  # fmt: skip
        where = {7: (3.6, top - 0.95), 1: (3.6, top - 1.73), 3: (10.0, top - 1.73)}
        for number, count in moment.counts.items():
            x, y = where[number]
            words = next(
                tokens[P * j : P * j + P]
                for pages, tokens in zip(moment.tables, moment.tokens, strict=True)
                for j, other in enumerate(pages)
                if other == number
            )
            page(ax, x, y, words, _owner(moment, number), 0.92)
            write(ax, x - 0.27, y + 0.3, str(number), 15, color=MUTED)
            write(ax, x + 3.85, y + 0.3, f"count {count}", 14, ha="left")
        for source, target in moment.copies:
            (x, y), (to, _) = where[source], where[target]
            start, end = x + 5.0, to - 0.45
            arrow(ax, (start, y + 0.2), (end, y + 0.2), color=MEASURED)
            write(ax, (start + end) / 2, y + 0.45, "copy", 14, color=MEASURED)
    return fig


def _owner(moment: Moment, number: int) -> str:
    """Purple for what both hold, else the holder's colour."""
    holders = [k for k, pages in enumerate(moment.tables) if number in pages]
    return ACCENT if len(holders) > 1 else COLORS[holders[0]]


CHAINS = (
    ("first", ["you", "are", "a", "kind", "helper", ".", "say", "what", "time", "it"]),
    ("same beginning", ["you", "are", "a", "kind", "helper", ".", "say", "who", "is", "it"]),
    ("same second page", ["he", "is", "a", "kind", "helper", ".", "say", "what", "now", "?"]),
)


class Link(NamedTuple):
    """A full page of a chain: its words, the first digits of its name, and was it found?"""

    words: list[str]
    name: str
    found: bool


def chains() -> tuple[str, list[list[Link]]]:
    """Three prompts, one after the other: the root's name, and each one's full pages."""
    blocks, made = Blocks(10, P), []
    for _, words in CHAINS:
        table = blocks.begin(words)
        found = len(table.pages)
        blocks.append(table, words[len(table) :])
        blocks.commit(table)
        made.append([Link(list(text.tokens), text.name.hex()[:4], j < found)
                     for j, text in enumerate(table.texts)])  # fmt: skip
    return blocks.cache.root(()).name.hex()[:4], made


@figure(
    name="prefix-chain",
    title="A page is named by its words and by all that came before",
    answers=[],
    notebook="10",
    alt="Three prompts as chains of pages of 4 words; each full page's name is a hash of its words "
    "and of the name before it. The second prompt begins like the first: its first page has the "
    "same name and is found, its second differs and is computed. The third has the same second "
    "page as the first but another first page: both its names differ, nothing is found.",
    sources=["names: SHA-256, from lecture_util.serving.blocks.Blocks and prefix.digest"],
)
def prefix_chain() -> Figure:
    fig, ax = canvas(15, 7.6, "A page is named by its words and by all that came before")
    root, made = chains()
    for k, ((title, words), links) in enumerate(zip(CHAINS, made, strict=True)):
        y = 5.5 - 2.2 * k
        write(ax, 0.35, y + 1.05, title, 16, ha="left", weight="bold")
        box(ax, 0.35, y - 0.1, 1.2, 0.8, root, MUTED, 0.15, 16)
        for j, link in enumerate(links):
            x, color = 2.3 + 5.1 * j, GUESS if link.found else PREDICTED
            arrow(ax, (x - 0.72, y + 0.3), (x - 0.05, y + 0.3))
            page(ax, x, y, link.words, color, 1.03)
            label = "found" if link.found else "computed"
            write(ax, x, y - 0.38, f"name {link.name}…, {label}", 14.5, ha="left",
                  color=GUESS if link.found else MUTED)  # fmt: skip
        x = 2.3 + 5.1 * len(links)
        write(ax, x, y + 0.3, f"{' '.join(words[len(links) * P :])}", 14, ha="left")
        write(ax, x, y - 0.38, "not full: no name", 13, ha="left", color=MUTED)
    write(ax, 0.35, 0.2, "left: the name of the empty beginning; a name only points, the words "
          "themselves are compared", 13.5, ha="left", color=MUTED)  # fmt: skip
    return fig
