"""tree_unfolding (notebook 08): a draft grows node by node, then its accepted path lights up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from lecture_util.classroom.widgets import tree_svg
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.rounds import REJECTED, Told, marked, told
from lecture_util.classroom.widgets.stepping import Steps
from lecture_util.classroom.widgets.tree_svg import (
    ABOVE,
    HERE,
    HIDDEN,
    OPEN,
    OWN,
    PATH,
    STRUCK,
)
from lecture_util.speculative.draft import ROOT, Draft
from lecture_util.speculative.target import tree_mask

MOST, DEEPEST = 32, 16  # guesses, and one after another, that the picture has room for


class TreeUnfolding(Explorer):
    """The explorer; `shown` is the round that is shown."""

    def __init__(
        self,
        rounds: list[Told],
        probabilities: list[list[float] | None],
        at: int | None,
    ) -> None:
        self.rounds, self.probabilities = rounds, probabilities
        self.shown = rounds[0]
        last = _steps(self.shown)
        self.step = widgets.IntSlider(
            description="step", min=0, max=last, value=last if at is None else at
        )
        self.steps = Steps(self.step, "The draft")
        controls = {"step": self.step}
        if len(rounds) > 1:
            one = widgets.IntSlider(description="round", min=1, max=len(rounds), value=1)
            controls = {"round": one} | controls
        super().__init__(self._draw, controls, self.steps.parts, columns=2)

    def redraw(self, change: object = None) -> None:
        """Let the steps fit another round, which begins with its sequence, then draw."""
        shown = self.rounds[self.values.get("round", 1) - 1]
        if shown is not self.shown:
            self.shown = shown
            with self.quiet():
                self.steps.reach(_steps(shown), 0)
        super().redraw(change)

    def _draw(self, step: int, round: int = 1) -> str:
        one, M = self.shown, len(self.shown.round.draft)
        path = one.round.accepted[: max(0, step - M)]
        ended = step == _steps(one) and _own(one)
        here = path[-1] if path and not ended else min(step, M) - 1
        if (step > M and not path) or ended:
            here = ROOT
        looks = _looks(one, step, path, here, ended)
        notes, products = _notes(one.round.draft, self.probabilities[round - 1])
        own_after = (one.round.accepted or [ROOT])[-1] if _own(one) else None
        text = _words(one, step, path, here, ended, products)
        self.steps.picture.value = tree_svg.svg(
            f"A draft of {M} guesses as a tree, step {step}, and its attention mask",
            tree_svg.tree(one, own_after, looks, notes),
            tree_svg.mask(one, min(step, M), here, path, tree_mask(one.round.draft).tolist()),
        )
        return text


def _own(one: Told) -> bool:
    """Whether a token of the target's own follows what was accepted."""
    return len(one.tokens) > len(one.round.accepted)


def _steps(one: Told) -> int:
    """A step for each guess, each accepted one, and the target's own token."""
    return len(one.round.draft) + len(one.round.accepted) + _own(one)


def _looks(one: Told, step: int, path: Sequence[int], here: int, ended: bool) -> dict[int, str]:
    draft = one.round.draft
    looks = {node: OPEN if node < step else HIDDEN for node in range(len(draft))}
    looks[OWN] = PATH if ended else HIDDEN
    if step <= len(draft):
        looks |= {node: ABOVE for node in (draft.path(here) if here != ROOT else ())}
        looks |= {here: HERE} if here != ROOT else {}
        return looks
    compared = {draft.parents[node] for node in path} | ({(path or [ROOT])[-1]} if ended else set())
    for node, fate in enumerate(one.fates):
        if node in path:
            looks[node] = PATH
        elif ended or (fate == REJECTED and draft.parents[node] in compared):
            looks[node] = STRUCK
    return looks


def _notes(draft: Draft, given: list[float] | None) -> tuple[list[str], list[float] | None]:
    """What stands beside each token, and where there are probabilities, their products."""
    if given is None and len(draft) and all(q is not None for q in draft.q):
        given = [float(q[token]) for token, q in zip(draft.tokens, draft.q, strict=True)]
    if given is None:
        ranks = {
            child: place
            for children in draft.children.values()
            for place, child in enumerate(children, start=1)
        }
        return [f"#{ranks[node]}" for node in range(len(draft))], None
    products = [math.prod(given[above] for above in draft.path(n)) for n in range(len(draft))]
    return [f"{p:.2f}" for p in given], products


def _words(one: Told, step: int, path: Sequence[int], here: int, ended: bool,
           products: list[float] | None) -> str:  # fmt: skip
    draft, M = one.round.draft, len(one.round.draft)
    if step == 0:
        return f"Nothing is guessed yet; {M} guesses are to come. Each will see the sequence."
    if step <= M:
        above = [str(node) for node in draft.path(here)[:-1]]
        hidden = here + 1 - len(above) - 1
        product = f"; its whole path: <b>{products[here]:.3f}</b>" if products else ""
        return (
            f"Guess {here}, <b>{marked(one.guesses[here])}</b>, at depth {draft.depths[here]}"
            f"{product}.<br>It sees the sequence, {''.join(f'{node}, ' for node in above)}itself; "
            f"{hidden} earlier guess{'es' * (hidden != 1)} of other branches "
            f"{'are' if hidden != 1 else 'is'} hidden from it."
        )
    if not ended:
        return (
            f"One forward has read all {M} guesses. The target agrees to guess {here}, "
            f"<b>{marked(one.guesses[here])}</b>: {len(path)} accepted so far.<br>The slots of the "
            "accepted path stay in the cache, the others are taken back."
        )
    own = marked(one.tokens[-1])
    word = {"correction": "None that follows is accepted: the", "bonus": "The draft went on no "
            "further: as a bonus the"}.get(one.round.last, "The")  # fmt: skip
    count = len(one.tokens)
    return (
        f"{word} target's own token follows, <b>{own}</b>.<br>{len(path)} accepted and 1 of its "
        f"own: <b>{count} token{'s' * (count > 1)} from one forward</b> over {M + 1}."
    )


def tree_unfolding(
    drafts: Any,
    tokenizer: Any = None,
    *,
    probabilities: Sequence[float] | Sequence[Sequence[float]] | None = None,
    at: int | None = None,
) -> Explorer:
    """A draft's tree node by node, its mask, and what of it was accepted (notebook 08).

    drafts:        a Draft, a Round, a list of either, or a recorded example. Rounds without a
                   guess are left out. At most 32 guesses each, 16 deep.
    probabilities: one a guess (a list of lists for several drafts): how likely it is right if what
                   it follows is. None: q of the tokens that were drawn, else ranks among siblings.
    at:            the step to start at; None: the last.

    Example: `tree_unfolding([r for r in rounds if not r.draft.is_chain], tokenizer)`
    Raises:  TypeError or ValueError naming what came.
    """
    rounds = told(drafts, tokenizer)
    given = _given(rounds, probabilities)
    kept = [(one, p) for one, p in zip(rounds, given, strict=True) if len(one.round.draft)]
    if not kept:
        raise ValueError("no round has a draft: pass rounds of a drafter that guessed something")
    for one, _ in kept:
        size, depth = len(one.round.draft), max(one.round.draft.depths)
        if size > MOST or depth > DEEPEST:
            raise ValueError(
                f"a draft has {size} guesses, {depth} deep, but the picture has room for {MOST}, "
                f"{DEEPEST} deep: leave some out with draft.cut(depth), or draft a smaller tree"
            )
    last = _steps(kept[0][0])
    if at is not None and (type(at) is not int or not 0 <= at <= last):
        raise ValueError(f"at is {at!r}: expected a step, 0 to {last}")
    return TreeUnfolding(*map(list, zip(*kept, strict=True)), at)


def _given(rounds: list[Told], probabilities: Any) -> list[list[float] | None]:
    """The probabilities of each round's guesses. Raises: ValueError if they don't fit."""
    if probabilities is None:
        return [None] * len(rounds)
    given = list(probabilities)
    if not any(isinstance(part, list | tuple) or getattr(part, "ndim", 0) for part in given):
        given = [given]
    sizes = [len(one.round.draft) for one in rounds]
    found = [[float(p) for p in part] for part in given]
    if list(map(len, found)) != sizes:
        raise ValueError(
            f"probabilities are for {list(map(len, found))} guesses but the drafts have {sizes}: "
            "give one a guess, a list for each draft"
        )
    if wrong := [p for part in found for p in part if not 0 <= p <= 1]:
        raise ValueError(f"probabilities hold {wrong[0]!r}: expected 0 to 1")
    return found
