"""A draft's tree and its attention mask as SVG: where nodes lie, and what is drawn of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.rounds import Told, marked
from lecture_util.speculative.draft import ROOT

WIDTH, HEIGHT = 1160, 400
TREE, MASK = 745, 800  # where the tree ends and the mask begins
FIRST = 112  # width of the sequence's column
ROOMY = 34.0  # pixels a row from which notes stand above their boxes
TOP = 44
FONT = "'DejaVu Sans',system-ui,sans-serif"
SEQUENCE, OWN = ROOT, -2  # nodes that are no guesses: what came before, and what comes after
HIDDEN, OPEN, HERE, ABOVE, PATH, STRUCK = "hidden", "open", "here", "above", "path", "struck"
LOOKS = {  # fill, stroke, its width, dash
    OPEN: ("#FFFFFF", style.MUTED, 1.4, ""),
    HERE: ("#B3D5E8", style.PREDICTED, 3.5, ""),
    ABOVE: ("#E0EEF6", style.PREDICTED, 2.4, ""),
    PATH: ("#B8E4D7", style.GUESS, 3.5, ""),
    STRUCK: ("#FFFFFF", style.MEASURED, 1.4, "4 3"),
}


@dataclass(frozen=True)
class Places:
    """Where each node of a round's tree stands, in pixels: the centre of its box.

    above: whether there is room for notes above the boxes; else they stand inside.
    """

    x: dict[int, float]
    y: dict[int, float]
    width: float
    height: float
    above: bool

    @classmethod
    def of(cls, one: Told, own_after: int | None) -> Places:
        """own_after: the node that the target's own token follows; None if there is none."""
        draft = one.round.draft
        children = {node: list(found) for node, found in draft.children.items()}
        if own_after is not None:
            children[own_after].append(OWN)
        row: dict[int, float] = {}
        leaves = 0

        def place(node: int) -> float:
            nonlocal leaves
            below = [place(child) for child in children.get(node, ())]
            if not below:
                leaves += 1
            row[node] = (below[0] + below[-1]) / 2 if below else leaves - 1
            return row[node]

        place(SEQUENCE)
        depth = {SEQUENCE: 0} | dict(enumerate(draft.depths))
        if own_after is not None:
            depth[OWN] = depth[own_after] + 1
        across = (TREE - FIRST) / max(depth.values())
        down = (HEIGHT - TOP + 8) / leaves
        above = down >= ROOMY
        gap = min(30.0, 0.28 * across)
        width, height = min(150.0, across - gap), min(30.0, down - (15 if above else 3))
        x = {node: FIRST + across * (depth[node] - 1) + 0.6 * gap + width / 2 for node in row}
        y = {node: TOP - 8 + down * (row[node] + 0.5) + 5 * above for node in row}
        return cls(x | {SEQUENCE: (FIRST - 12) / 2}, y, width, height, above)

    def wide(self, node: int) -> float:
        return FIRST - 16 if node == SEQUENCE else self.width


def tree(one: Told, own_after: int | None, looks: dict[int, str], notes: Sequence[str]) -> str:
    """The tree: each node in its look, a note (its probability or rank) beside its token."""
    at, parts = Places.of(one, own_after), []
    parents = dict(enumerate(one.round.draft.parents))
    own_color = {"bonus": style.PREDICTED}.get(one.round.last, style.MEASURED)
    if own_after is not None:
        parents[OWN] = own_after
    for node, parent in parents.items():
        if looks[node] != HIDDEN:
            strong = looks[node] in (HERE, ABOVE, PATH)
            stroke = own_color if node == OWN else LOOKS[looks[node]][1]
            parts.append(_edge(at, parent, node, stroke, strong))
    parts.append(_box(at, SEQUENCE, "sequence", "", LOOKS[OPEN], ""))
    for node in parents:
        if looks[node] == HIDDEN:
            continue
        own = node == OWN
        words = one.tokens[-1] if own else one.guesses[node]
        look = ("#FFFFFF", own_color, 3.5, "") if own else LOOKS[looks[node]]
        note = one.round.last if own else notes[node]
        parts.append(_box(at, node, words, note, look, "" if own else str(node),
                          looks[node] == STRUCK))  # fmt: skip
    return _text(0, 20, "draft", 16, "bold") + "".join(parts)


def mask(
    one: Told, shown: int, here: int, path: Sequence[int], seen_by: Sequence[Sequence[bool]]
) -> str:
    """The mask's first rows. Column 0 is all that came before the draft.

    here:    the row to frame.   path: the rows that were accepted.
    seen_by: for each node, which of the nodes it sees.
    """
    M = len(one.round.draft)
    size = min(30.0, (WIDTH - MASK - 6) / (M + 2), (HEIGHT - TOP - 30) / M)
    left, small = MASK + size, min(13.0, size - 1)
    every = 1 if size > 13 else 4
    parts = [_text(MASK - 40, 20, "mask: row sees column", 16, "bold")]
    parts.append(_text(left + size / 2, TOP - 5, "seq.", min(13.0, size - 2), "normal", "middle"))
    for node in range(M):
        x, y = left + size * (node + 1), TOP + size * node
        if node % every == 0:
            parts.append(_text(x + size / 2, TOP - 5, str(node), small, "normal", "middle"))
            weight = "bold" if node == here else "normal"
            parts.append(_text(left - 5, y + 0.7 * size, str(node), small, weight, "end"))
        for column in range(M + 1):
            sees = column == 0 or seen_by[node][column - 1]
            fill = "#F2F2F2" if node >= shown else "#FFFFFF"
            if sees and node < shown:
                fill = "#7FCDB2" if node in path else "#9CC8E0"
                fill = style.PREDICTED if node == here and not path else fill
            parts.append(
                f'<rect x="{left + size * column:.1f}" y="{y:.1f}" width="{size:.1f}" '
                f'height="{size:.1f}" fill="{fill}" stroke="#CCC" stroke-width="0.8"/>'
            )
    if 0 <= here < M:
        parts.append(
            f'<rect x="{left:.1f}" y="{TOP + size * here:.1f}" width="{size * (M + 1):.1f}" '
            f'height="{size:.1f}" fill="none" stroke="{style.INK}" stroke-width="2.4"/>'
        )
    return "".join(parts)


def svg(label: str, *parts: str) -> str:
    return (
        f'<svg role="img" aria-label="{marked(label, 400)}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'style="display:block;width:100%;max-height:{HEIGHT}px;background:white">'
        f"{''.join(parts)}</svg>"
    )


def _edge(at: Places, parent: int, node: int, stroke: str, strong: bool) -> str:
    x0, y0 = at.x[parent] + at.wide(parent) / 2, at.y[parent]
    x1, y1 = at.x[node] - at.width / 2, at.y[node]
    mid = (x0 + x1) / 2
    return (
        f'<path d="M{x0:.1f} {y0:.1f}C{mid:.1f} {y0:.1f} {mid:.1f} {y1:.1f} {x1:.1f} {y1:.1f}" '
        f'fill="none" stroke="{stroke}" stroke-width="{3 if strong else 1.4}"/>'
    )


def _box(at: Places, node: int, words: str, note: str, look: tuple, number: str,
         struck: bool = False) -> str:  # fmt: skip
    """A box with the token's words; its number and its note above the corners, or inside."""
    fill, stroke, line, dash = look
    width = at.wide(node)
    left, top = at.x[node] - width / 2, at.y[node] - at.height / 2
    size = min(15.0, 0.72 * at.height, max(9.5, width / 6))
    small = min(11.5, width / 3.2) if at.above else 0.75 * size
    base = at.y[node] + 0.35 * size
    beside = 0 if at.above else 0.62 * small * len(number)
    room = width - 12 - beside - (0 if at.above else 0.62 * small * len(note) + 4)
    aside = top - 4 if at.above else base
    through = ";text-decoration:line-through" if struck else ""
    return (
        f"<g><title>{marked(words, 400)}</title>"
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{at.height:.1f}" rx="4" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="{line}" stroke-dasharray="{dash}"/>'
        + _text(left + 4, aside, number, small, "normal", "start", style.MUTED)
        + f'<g style="font-weight:600{through}">'
        + _text(left + 7 + beside, base, words, size, "", most=max(2, int(room / (0.66 * size))))
        + "</g>"
        + _text(left + width - 4, aside, note, small, "normal", "end")
        + "</g>"
    )


def _text(x: float, y: float, words: str, size: float, weight: str, anchor: str = "start",
          color: str = style.INK, most: int = 28) -> str:  # fmt: skip
    weight = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" font-family="{FONT}"{weight} '
        f'text-anchor="{anchor}" fill="{color}">{marked(words, most)}</text>'
    )
