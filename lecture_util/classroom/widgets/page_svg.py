"""Block tables and physical pages as SVG: who holds what, what it holds, and what just changed."""

from __future__ import annotations

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.drawing import box, css, hue, pale, path, svg, text
from lecture_util.classroom.widgets.page_story import Story

WIDTH, HEIGHT = 1160, 372
TOP = 30
TABLES, POOL = 470, 548  # where the tables end and the pages begin
BETWEEN = 34  # pixels between two columns of pages
NEW = "#FFF2B3"  # behind words that were just written
CHANGED = css(style.shade(style.MEASURED))


class Places:
    """Where the cells of the block tables and the boxes of the pages are, in pixels."""

    def __init__(self, story: Story) -> None:
        blocks = story.blocks
        self.columns = 1 if blocks.num_pages <= 3 else 2
        self.rows = -(-blocks.num_pages // self.columns)
        self.wide = (WIDTH - POOL - BETWEEN * (self.columns - 1) - 4) / self.columns
        self.down = min(84.0, (HEIGHT - TOP) / self.rows)
        self.tall = self.down - 26
        self.row = min(78.0, (HEIGHT - TOP) / max(1, len(story.tables)))
        longest = max((len(table.pages) for table in story.tables.values()), default=1)
        self.cell = min(66.0, (TABLES - 40) / max(1, longest))

    def page(self, page: int) -> tuple[float, float]:
        column, row = divmod(page, self.rows)
        return POOL + column * (self.wide + BETWEEN), TOP + 19 + row * self.down

    def entry(self, row: int, j: int) -> tuple[float, float]:
        return 36 + j * self.cell, TOP + row * self.row + 19


def pages_svg(story: Story, chosen: str | None) -> str:
    """The picture; arrows lead from the block table of the chosen sequence to its pages."""
    at = Places(story)
    parts = [
        text(0, 16, "sequences and their block tables", 14, bold=True),
        text(POOL, 16, "physical pages", 14, bold=True),
    ]
    if not story.tables:
        parts.append(text(0, TOP + 26, "none yet: type some words and begin", 14))
    for row, name in enumerate(story.tables):
        if name == chosen:
            parts.append(_arrows(story, at, row, name))
    parts += [_table(story, at, row, name) for row, name in enumerate(story.tables)]
    parts += [_page(story, at, page) for page in range(story.blocks.num_pages)]
    parts += [_copied(at, *pair) for pair in story.change.copies]
    label = (
        f"{len(story.tables)} sequences with their block tables, and {story.blocks.num_pages} "
        f"pages of {story.blocks.page_size} tokens. {story.said}."
    )
    return svg(label, WIDTH, HEIGHT, *parts)


def color(name: str) -> int:
    return ord(name[0]) - ord("A") + 26 * int(name[1:] or 0)


def _table(story: Story, at: Places, row: int, name: str) -> str:
    table, P = story.tables[name], story.blocks.page_size
    x, y = at.entry(row, 0)
    words = " ".join(table.tokens)
    words = words if len(words) <= 54 else "…" + words[-53:]
    high = min(38.0, at.row - 24)
    parts = [
        box(0, y - 15, 26, min(54, at.row - 6), pale(color(name)), hue(color(name)), 1.5, round=4),
        text(13, y + 6, name, 14, bold=True, anchor="middle"),
        text(x, y - 4, words, 13),
    ]
    for j, page in enumerate(table.pages):
        x, y = at.entry(row, j)
        filled = min(P, len(table) - P * j)
        parts += [
            box(x, y, at.cell - 4, high, "#FFFFFF", hue(color(name)), 1.5, round=3,
                title=f"logical page {j} of {name} is physical page {page}, {filled} of {P} full"),
            box(x + 2, y + 2, (at.cell - 8) * filled / P, high - 4, pale(color(name), 0.3)),
            text(x + at.cell / 2 - 2, y + high / 2 + 5, f"{j} → {page}", min(14, at.cell / 3.6),
                 bold=True, anchor="middle"),
        ]  # fmt: skip
    return "".join(parts)


def _arrows(story: Story, at: Places, row: int, name: str) -> str:
    high, parts = min(38.0, at.row - 24), []
    for j, page in enumerate(story.tables[name].pages):
        x0, y0 = at.entry(row, j)
        x0, y0 = x0 + at.cell / 2 - 2, y0 + high
        x1, y1 = at.page(page)
        y1 += at.tall / 2
        shade = css(style.shade(hue(color(name))))
        parts.append(
            path(f"M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + 26:.1f} {x1 - 120:.1f} {y1:.1f} "
                 f"{x1 - 8:.1f} {y1:.1f}", shade, 1.6)
            + path(f"M{x1 - 1:.1f} {y1:.1f}l-10 -5v10z", shade, 0.5, fill=shade)
        )  # fmt: skip
    return "".join(parts)


def _page(story: Story, at: Places, page: int) -> str:
    blocks, change = story.blocks, story.change
    x, y = at.page(page)
    owners = [name for name, table in story.tables.items() if page in table.pages]
    cached, filled = blocks.texts[page] is not None, story.filled(page)
    wide, held = at.wide / blocks.page_size, bool(owners)
    parts = [_head(story, at, page, owners)]
    for i, word in enumerate(story.contents[page]):
        left = x + i * wide
        new, stale = (page, i) in change.written, i >= filled
        fill = "#FFFFFF" if stale else pale(color(owners[0]), 0.3) if held else "#EFEFEF"
        if held and len(owners) > 1 and not stale:
            share = at.tall / len(owners)
            parts += [box(left, y + k * share, wide, share, pale(color(owner), 0.3))
                      for k, owner in enumerate(owners)]  # fmt: skip
            fill = "none"
        parts.append(box(left, y, wide, at.tall, NEW if new else fill, "#BBBBBB", 0.8))
        if word is not None:
            most = max(2, int((wide - 6) / 7.4))
            parts.append(
                text(left + wide / 2, y + at.tall / 2 + 5, word, 13, bold=new, anchor="middle",
                     color=style.MUTED if stale else style.INK, most=most)
            )  # fmt: skip
            if stale:
                parts.append(path(f"M{left + 6:.1f} {y + at.tall / 2:.1f}h{wide - 12:.1f}",
                                  style.MUTED, 1))  # fmt: skip
    edge, line, dash = (hue(color(owners[0])), 2.0, "") if held else (style.MUTED, 1.2, "5 4")
    if cached and not held:
        line = 2.0
    if page in change.hits:
        edge, line, dash = style.PREDICTED, 4.0, ""
    elif page in change.counts or any(p == page for p, _ in change.written):
        edge, line = style.INK, 2.6
    parts.append(box(x, y, at.wide, at.tall, "none", edge, line, dash=dash))
    return "".join(parts)


def _head(story: Story, at: Places, page: int, owners: list[str]) -> str:
    """Above a page: its number, its count and how that changed, its owners, what the cache says."""
    blocks, change = story.blocks, story.change
    x, y = at.page(page)
    y -= 5
    parts = [text(x, y, f"{page}", 14, bold=True)]
    count = f"count {blocks.counts[page]}"
    if page in change.counts:
        count = f"count {change.counts[page]} → {blocks.counts[page]}"
    parts.append(
        text(x + 24, y, count, 13, bold=page in change.counts,
             color=CHANGED if page in change.counts else style.INK)
    )  # fmt: skip
    left = x + 118
    for owner in owners:
        parts.append(box(left, y - 12, 19, 15, pale(color(owner)), hue(color(owner)), 1, round=3))
        parts.append(text(left + 9.5, y, owner, 12, bold=True, anchor="middle"))
        left += 22
    state = "✓ cached" if blocks.texts[page] is not None else ""
    if page in blocks.idle:
        turn = list(blocks.idle).index(page) + 1
        state = f"✓ cached, idle: evicted {'first' if turn == 1 else f'as no. {turn}'}"
    elif page in blocks.free:
        state = "free"
    if page in change.hits:
        state += ", found"
    parts.append(text(x + at.wide, y, state, 12, anchor="end"))
    return "".join(parts)


def _copied(at: Places, source: int, target: int) -> str:
    """An arrow from one page to the other, and what it says."""
    (x0, y0), (x1, y1) = at.page(source), at.page(target)
    y0, y1 = y0 + at.tall / 2, y1 + at.tall / 2
    on = x1 > x0  # to the next column: into its left edge; else round into the right edge
    x0, x1 = x0 + at.wide, x1 + (0 if on else at.wide)
    bend = max(x0, x1 - BETWEEN if on else x1) + (BETWEEN / 2 if on else 22)
    head = -9 if on else 9
    middle = (y0 + y1) / 2
    return (
        path(f"M{x0:.1f} {y0:.1f}C{bend:.1f} {y0:.1f} {bend:.1f} {y1:.1f} {x1 + head:.1f} {y1:.1f}",
             style.INK, 3)
        + path(f"M{x1:.1f} {y1:.1f}l{head} -6v12z", style.INK, 0.5, fill=style.INK)
        + box(bend - 54, middle - 11, 56, 19, "#FFFFFF", style.INK, 1, round=4)
        + text(bend - 26, middle + 4, "copied", 13, bold=True, anchor="middle")
    )  # fmt: skip
