"""One forward of a server as HTML: its flat run, its slots, who waits, and its pool of pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.drawing import css, hue, letter, pale
from lecture_util.classroom.widgets.ribbon import faint
from lecture_util.classroom.widgets.rounds import marked, visible, word
from lecture_util.classroom.widgets.snapshots import Place, Pool, Snapshot
from lecture_util.serving.loop import Part

MOST = 18  # tokens of one part that are shown; of a longer one, the first and the last
TAIL = 62  # characters of a text that are shown
SMALL = "font-size:13px;line-height:1.35"
KINDS = {  # how a part of the flat run is framed
    "prefill": "border:2px solid {hue};border-left:7px solid " + style.INK,
    "decode": "border:2px solid {hue}",
    "padding": f"border:2px dashed {style.MUTED}",
}
HATCH = f"background:repeating-linear-gradient(135deg,#FFF 0 5px,{style.GRID} 5px 7px)"
Who = tuple[int, int]


class Forwards:
    """Draws snapshots.   name: of a sequence, by request number and sample."""

    def __init__(self, name: Callable[[Who], str], first: int, tokenizer: Any) -> None:
        self.name, self.first, self.tokenizer = name, first, tokenizer

    def __call__(self, shot: Snapshot, slots: int) -> str:
        parts = [
            self._run(shot),
            '<div style="display:flex;gap:18px;margin-top:8px">',
            self._slots(shot, slots),
            self._queue(shot),
            "</div>",
            "" if shot.pool is None else self._pool(shot.pool),
        ]
        return (
            f'<div style="color:{style.INK};background:white;font-size:14px;line-height:1.4;'
            f'padding:2px 4px;min-height:330px">{"".join(parts)}</div>'
        )

    def word(self, token: int) -> str:
        """A token's text; a dot for one that only stands for a token, on paper."""
        return "•" if token < 0 else word(token, self.tokenizer)

    def _color(self, who: Who) -> int:
        return who[0] - self.first + 3 * who[1]

    def _run(self, shot: Snapshot) -> str:
        texts = {(p.number, p.sample): p.tokens for p in shot.running}
        tables = [self._part(part, texts.get((part.number, part.sample), ()))
                  for part in shot.parts]  # fmt: skip
        body = "".join(tables) or '<span style="opacity:0.8">nothing yet: step on</span>'
        return (
            "<div><b>the flat run</b> of this forward: prefill has a dark edge</div>"
            f'<div data-scrolls style="max-height:150px;overflow-y:auto;min-height:62px">{body}'
            "</div>"
        )

    def _part(self, part: Part, tokens: Sequence[int]) -> str:
        who = (part.number, part.sample)
        end = part.start + part.count
        places = list(range(part.start, end))
        if len(places) > MOST:
            places = [*places[: MOST - 6], None, *places[-5:]]
        words = [
            "…" if i is None else self.word(tokens[i]) if i < len(tokens) else "·" for i in places
        ]
        words += ["·"] * min(part.padded, 6)
        fill = HATCH if part.kind == "padding" else f"background:{pale(self._color(who), 0.3)}"
        cells = "".join(
            f'<td style="padding:0 4px;white-space:pre;border-left:1px solid #FFF;{fill}">'
            f"{faint(one)}</td>"
            for one in words
        )
        where = f"{part.start}" if part.count == 1 else f"{part.start}–{end - 1}"
        padded = f" + {part.padded} padded" if part.padded else ""
        frame = KINDS[part.kind].format(hue=hue(self._color(who)))
        return (
            '<table style="display:inline-table;border-collapse:collapse;margin:2px 8px 2px 0">'
            f'<tr><td colspan="{len(words)}" style="{SMALL};white-space:nowrap">'
            f"<b>{marked(self.name(who))}</b> {part.kind} {where}{padded}</td></tr>"
            f'<tr style="{frame}">{cells}</tr></table>'
        )

    def _slots(self, shot: Snapshot, slots: int) -> str:
        by_slot = {place.slot: place for place in shot.running}
        doing = {part.slot: part for part in shot.parts}
        came = {(e.number, e.sample): e for e in shot.events}
        rows = "".join(
            self._slot(slot, by_slot.get(slot), doing.get(slot), came) for slot in range(slots)
        )
        head = "".join(
            f'<td style="padding:0 8px 0 0">{one}</td>'
            for one in ("slot", "", "in the cache", "its text, and what this forward added")
        )
        return (
            '<div data-scrolls style="flex:1;max-height:216px;overflow-y:auto">'
            f'<table style="{SMALL};border-collapse:collapse"><tr style="color:{style.MUTED}">'
            f"{head}</tr>{rows}</table></div>"
        )

    def _slot(self, slot: int, place: Place | None, part: Part | None, came: dict) -> str:
        cell = "padding:1px 8px 1px 0;white-space:nowrap;vertical-align:top"
        if place is None:
            return f'<tr><td style="{cell}">{slot}</td><td style="{cell}">empty</td></tr>'
        who = (place.number, place.sample)
        chip = (
            f'<span style="background:{pale(self._color(who))};border:1px solid '
            f'{hue(self._color(who))};padding:0 6px"><b>{marked(self.name(who))}</b></span>'
        )
        held = place.computed if part is None or part.kind == "padding" else part.start + part.count
        whole = f"{held} of {len(place.tokens)}"
        what = "waits for its prompt" if place.follower else part.kind if part else "no room: waits"
        text = (" " * (self.tokenizer is None)).join(map(self.word, place.tokens))
        text = text if len(text) <= TAIL else "…" + text[-TAIL:]
        return (
            f'<tr><td style="{cell}">{slot}</td><td style="{cell}">{chip} {what}</td>'
            f'<td style="{cell}">{whole}</td>'
            f'<td style="{cell};white-space:pre">{faint_text(text)}{self._added(came.get(who))}'
            "</td></tr>"
        )

    def _added(self, event: Any) -> str:
        if event is None:
            return ""
        new = "" if event.token is None else (
            f'<b style="background:#FFF2B3;outline:1px solid {style.CACHE}">'
            f"{' ' * (self.tokenizer is None)}{faint(self.word(event.token))}</b>"
        )  # fmt: skip
        if event.completion is None:
            return new
        return f'{new} <b style="color:{css(style.shade(style.MEASURED))}">■ {_end(event)}</b>'

    def _queue(self, shot: Snapshot) -> str:
        waiting = ", ".join(marked(self.name(who)) for who in shot.waiting[:12]) or "nobody"
        if len(shot.waiting) > 12:
            waiting += f" and {len(shot.waiting) - 12} more"
        coming = "".join(
            f"<br>{marked(name)} at {at:.4g}" for name, at in self._coming(shot)
        ) or "<br>nobody"  # fmt: skip
        return (
            f'<div style="{SMALL};width:170px">waiting: <b>{waiting}</b><br>'
            f'<div style="margin-top:6px">still to come:{coming}</div></div>'
        )

    def _coming(self, shot: Snapshot) -> list[tuple[str, float]]:
        return [(letter(i), at) for i, at in shot.coming[:6]]

    def _pool(self, pool: Pool) -> str:
        cells = "".join(self._page(page, pool) for page in range(len(pool.counts)))
        size = f"{len(pool.counts)} pages of {pool.page_size} tokens"
        return (
            f'<div style="margin-top:8px"><b>the pool</b>, {size}: who holds each; ×2 is its '
            "reference count; ✓ the prefix cache knows it; grey and dashed: idle, nobody holds it"
            '</div><div data-scrolls style="display:flex;flex-wrap:wrap;gap:3px;max-height:132px;'
            f'overflow-y:auto;margin-top:3px">{cells}</div>'
        )

    def _page(self, page: int, pool: Pool) -> str:
        owners, count = pool.owners[page], pool.counts[page]
        names = "".join(self.name(who) for who in owners)
        copied = [source for source, target in pool.copies if target == page]
        fills = [pale(self._color(who)) for who in owners]
        fill, edge = "#FFFFFF", f"1px solid {style.GRID}"
        if owners:
            fill = fills[0] if len(set(fills)) == 1 else _stripes(fills)
            edge = f"1px solid {hue(self._color(owners[0]))}"
        elif pool.cached[page]:
            fill, edge = "#EEEEEE", f"1px dashed {style.MUTED}"
        if copied:
            edge = f"3px solid {style.INK}"
            names += f"←{copied[0]}"
        notes = (f" ×{count}" if count > 1 else "") + (" ✓" if pool.cached[page] else "")
        title = f"page {page}: {count} references" + (", cached" if pool.cached[page] else "")
        return (
            f'<div title="{title}" style="width:43px;height:36px;background:{fill};'
            f"border:{edge};box-sizing:border-box;font-size:11px;line-height:1.3;"
            f'text-align:center;overflow:hidden;white-space:nowrap">{page}{notes}<br>'
            f'<b style="font-size:{13 if len(names) < 5 else 10}px">{marked(names, 7)}</b></div>'
        )


def faint_text(text: str) -> str:
    """A text whose words are visible already, as HTML."""
    return marked(text, 400).replace("␣", '<span style="opacity:0.55">␣</span>')


def _end(event: Any) -> str:
    done = event.completion
    if done.error is not None:
        return marked(f"failed: {visible(str(done.error))}", 60)
    return {"end": "end token", "stop": "it is over", "length": "longest allowed"}.get(
        done.reason, done.reason
    )


def _stripes(fills: Sequence[str]) -> str:
    wide = 100 / len(fills)
    stops = ",".join(f"{c} {i * wide:.0f}% {(i + 1) * wide:.0f}%" for i, c in enumerate(fills))
    return f"linear-gradient(90deg,{stops})"
