"""token_ribbon (notebook 08): an answer's tokens by where they came from, round by round."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.choices import menu
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.rounds import (
    ACCEPTED,
    BONUS,
    CORRECTION,
    PLAIN,
    REJECTED,
    UNTRIED,
    Told,
    by_name,
    marked,
)
from lecture_util.classroom.widgets.stepping import Steps
from lecture_util.speculative.speculate import Tally

COLORS = {
    ACCEPTED: style.GUESS, CORRECTION: style.MEASURED, BONUS: style.PREDICTED, PLAIN: style.MUTED
}  # fmt: skip
LINES = {ACCEPTED: "solid", CORRECTION: "double", BONUS: "dotted", PLAIN: "none"}
MOST = 6  # alternatives shown below one another
HEIGHT = 400  # pixels; a longer answer is scrolled
CELL = "padding:0 5px;white-space:pre;line-height:1.45"


class TokenRibbon(Explorer):
    """The ribbon; `tally` is what the rounds shown came to."""

    def __init__(self, rounds: dict[str, list[Told]], at: int | None) -> None:
        self.rounds, self._shown = rounds, next(iter(rounds))
        last = len(rounds[self._shown])
        self.round = widgets.IntSlider(
            description="round", min=0, max=last, value=last if at is None else at
        )
        self.steps = Steps(self.round, "The answer's tokens")
        controls = {"round": self.round}
        if len(rounds) > 1:
            controls = {"drafter": menu("drafter", list(rounds), self._shown)} | controls
        super().__init__(self._draw, controls, self.steps.parts, columns=2)

    def redraw(self, change: object = None) -> None:
        """Let the slider fit another drafter's rounds, then draw."""
        drafter = self.values.get("drafter", self._shown)
        if drafter != self._shown:
            self._shown = drafter
            with self.quiet():
                self.steps.reach(len(self.rounds[drafter]), len(self.rounds[drafter]))
        super().redraw(change)

    def _draw(self, round: int, drafter: str | None = None) -> str:
        shown = self.rounds[self._shown][:round]
        self.tally = Tally()
        for one in shown:
            self.tally.add(one.round)
        tables = "".join(_table(one, i == round) for i, one in enumerate(shown, start=1))
        self.steps.picture.value = (
            f'{_legend()}<div data-scrolls style="max-height:{HEIGHT}px;overflow-y:auto;'
            f'font-size:15px;color:{style.INK};min-height:130px">{tables}</div>'
        )
        return _words(self.tally, round, shown[-1] if shown else None)


def _table(one: Told, now: bool) -> str:
    """A round: its tokens above, below each the guesses that were made for that place."""
    draft, fates = one.round.draft, one.fates
    by_depth: list[list[int]] = [[] for _ in range(max(draft.depths, default=0))]
    for node, depth in enumerate(draft.depths):
        by_depth[depth - 1].append(node)
    for nodes in by_depth:
        nodes.sort(key=lambda node: fates[node] != ACCEPTED)  # stable
    places = range(max(len(by_depth), len(one.tokens)))
    rows = [[_token(one, place) for place in places]]
    for line in range(min(MOST, max(map(len, by_depth), default=0))):
        cells = []
        for nodes in (by_depth[i] if i < len(by_depth) else [] for i in places):
            more = len(nodes) - line if line == MOST - 1 and len(nodes) > MOST else 0
            node = nodes[line] if line < len(nodes) else None
            if node is None or more:
                cells.append(f'<td style="{CELL}">{f"+{more} more" if more else ""}</td>')
            else:
                cells.append(_guess(one.guesses[node], fates[node]))
        rows.append(cells)
    frame = f"outline:3px solid {style.INK}" if now else "outline:1px solid #CCC"
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return (
        f'<table {"data-now" if now else ""} style="display:inline-table;vertical-align:top;'
        f'margin:4px 5px 5px 4px;border-collapse:collapse;{frame}">{body}</table>'
    )


def _token(one: Told, place: int) -> str:
    if place >= len(one.tokens):
        return "<td></td>"
    kind = one.kinds[place]
    fill = _css(style.tint(COLORS[kind], 0.28))
    return (
        f'<td title="{kind}" style="{CELL};background:{fill};font-weight:600;'
        f'border-bottom:4px {LINES[kind]} {COLORS[kind]}">{faint(one.tokens[place])}</td>'
    )


def _guess(words: str, fate: str) -> str:
    look = {
        ACCEPTED: f"color:{_css(style.shade(style.GUESS))}",
        REJECTED: f"color:{_css(style.shade(style.MEASURED))};text-decoration:line-through 2px",
        UNTRIED: f"color:{style.MUTED};text-decoration:line-through 1px",
    }[fate]
    return f'<td title="{fate}" style="{CELL};font-size:13px;{look}">{faint(words)}</td>'


def faint(words: str) -> str:
    """A token's words as HTML, its spaces a little paler."""
    return marked(words).replace("␣", '<span style="opacity:0.55">␣</span>')


def _legend() -> str:
    swatches = [
        f'<span style="background:{_css(style.tint(COLORS[kind], 0.28))};padding:0 6px;'
        f'border-bottom:4px {LINES[kind]} {COLORS[kind]}">{kind}</span>'
        for kind in COLORS
    ]
    swatches += [
        f'<span style="color:{_css(style.shade(style.MEASURED))};'
        f'text-decoration:line-through 2px">{REJECTED}</span>',
        f'<span style="color:{style.MUTED};text-decoration:line-through 1px">{UNTRIED}</span>',
    ]
    return f'<div style="font-size:14px;margin:2px 4px 6px">{" &ensp; ".join(swatches)}</div>'


def _css(color: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in color)


def _words(tally: Tally, at: int, last: Told | None) -> str:
    if last is None:
        return "Before the first round: nothing is guessed yet."
    kept, of = len(last.round.accepted), len(last.round.draft)
    words = f"Round {at}: "
    if of:
        words += f"<b>{kept} of {of} guess{'es' * (of != 1)} accepted</b>"
    else:
        words += "no guess"
    end = last.kinds[-1]
    own = {ACCEPTED: "the text ends inside the draft", PLAIN: "a plain token"}.get(end, f"a {end}")
    words += f", then {own}"
    if end != ACCEPTED:
        words += f", {marked(last.tokens[-1])}"
    alpha = f"{tally.acceptance:.2f} ({tally.accepted} of {tally.tried} tried)"
    return (
        f"{words}.<br>{tally.rounds} round{'s' * (tally.rounds > 1)}, {tally.tokens} "
        f"token{'s' * (tally.tokens > 1)}: <b>{tally.tokens_per_round:.2f} tokens a round</b>; "
        f"α = {alpha if tally.tried else 'not known yet'}; "
        f"{tally.drafted} guess{'es' * (tally.drafted != 1)} read by the target."
    )


def token_ribbon(rounds: Any = None, tokenizer: Any = None, *, at: int | None = None) -> Explorer:
    """The tokens of an answer, coloured by where each came from, a round at a time (notebook 08).

    rounds:    a list or iterator of Round, a recorded example, or a dict of drafters' names to
               these; None: the examples in the results of benchmarks/speculative.py.
    tokenizer: has decode([token]); without one a token is shown as its number.
    at:        the round to start at; None: the last, so that the whole answer stands there.

    Example: `token_ribbon(stream_speculative(model, new_drafter, prompt, 48), tokenizer)`
    Raises:  FileNotFoundError if nothing was recorded; TypeError or ValueError naming what came.
    """
    found = by_name(rounds, tokenizer)
    for name, shown in found.items():
        if not all(one.verified for one in shown):
            raise ValueError(
                f"a draft that was not verified {f'in {name!r} ' * bool(name)}has no tokens to "
                "show: pass Rounds, or unfold it with tree_unfolding"
            )
    last = len(next(iter(found.values())))
    if at is not None and (type(at) is not int or not 0 <= at <= last):
        raise ValueError(f"at is {at!r}: expected a round, 0 to {last}")
    return TokenRibbon(found, at)
