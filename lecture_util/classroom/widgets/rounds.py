"""Rounds of speculative sampling with words for their tokens, live or as recorded."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.speculative.draft import ROOT, Draft
from lecture_util.speculative.speculate import Round

ACCEPTED, CORRECTION, BONUS, PLAIN = "accepted guess", "correction", "bonus", "plain"
REJECTED, UNTRIED = "rejected guess", "guess never compared"
LASTS = {"correction": CORRECTION, "bonus": BONUS, "plain": PLAIN, "guess": ACCEPTED}
SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})


@dataclass(frozen=True)
class Told:
    """A round and its words. Without tokens it is a draft that nobody has verified yet."""

    round: Round
    guesses: tuple[str, ...]
    tokens: tuple[str, ...]

    @property
    def verified(self) -> bool:
        return bool(self.round.tokens)

    @property
    def kinds(self) -> list[str]:
        """What each token is: ACCEPTED, CORRECTION, BONUS or PLAIN."""
        own = len(self.tokens) - len(self.round.accepted)
        return [ACCEPTED] * len(self.round.accepted) + [LASTS[self.round.last]] * own

    @property
    def fates(self) -> list[str]:
        """What became of each guess. Siblings are tried in turn, until one is accepted."""
        draft, accepted = self.round.draft, self.round.accepted
        found = [UNTRIED] * len(draft)
        for here, chosen in zip([ROOT, *accepted], [*accepted, None], strict=True):
            if chosen is None and self.round.last == "guess":
                break  # the text ended here
            for node in draft.children[here]:
                if chosen is not None and node > chosen:
                    break
                found[node] = ACCEPTED if node == chosen else REJECTED
        return found


def visible(text: str) -> str:
    """Spaces, line ends and what else can't be seen as signs; "∅" for nothing at all."""
    shown = text.translate(SIGNS)
    shown = re.sub(r"([␣⇥↵])\1{3,}", lambda run: f"{run[1]}×{len(run[0])}", shown)
    return "".join(c if c.isprintable() else f"⟨{ord(c):X}⟩" for c in shown) or "∅"


def marked(words: str, most: int = 28) -> str:
    """Words of a token as HTML that nothing reads as markup."""
    short = words if len(words) <= most else words[: most - 1] + "…"
    return html.escape(short).replace("*", "&#42;").replace("`", "&#96;")


def by_name(rounds: Any, tokenizer: Any = None) -> dict[str, list[Told]]:
    """Name -> rounds; the one name is "" where none was given. None: the recorded examples.

    Raises: FileNotFoundError if there is no record; TypeError or ValueError naming what came.
    """
    if rounds is None:
        try:
            rounds = recorded("speculative")["examples"]
        except KeyError as error:
            raise ValueError(
                "the record holds no examples: run that section of benchmarks/speculative.py"
            ) from error
    if isinstance(rounds, Mapping) and "rounds" not in rounds:
        if not rounds:
            raise ValueError("an empty dict: pass at least one drafter's name and its rounds")
        return {str(name): told(one, tokenizer, f" of {name!r}") for name, one in rounds.items()}
    return {"": told(rounds, tokenizer)}


def told(rounds: Any, tokenizer: Any = None, whose: str = "") -> list[Told]:
    """Rounds, drafts or a recorded example as a list; an iterator is read to its end."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer is {tokenizer!r}: pass one with decode([token]), or none")
    if isinstance(rounds, Round | Draft):
        rounds = [rounds]
    if isinstance(rounds, Mapping):
        if "rounds" not in rounds:
            raise TypeError(
                f"a dict of {', '.join(map(str, rounds)) or 'nothing'}: pass the rounds of one "
                'drafter, or a recorded example with its "rounds"'
            )
        rounds = rounds["rounds"]
    if isinstance(rounds, str) or not isinstance(rounds, Iterable):
        raise TypeError(
            f"rounds{whose} are {rounds!r}: pass a list of Round, such as "
            "list(stream_speculative(...)), or a recorded example"
        )
    found = [_told(one, tokenizer, f"round {i}{whose}") for i, one in enumerate(rounds, start=1)]
    if not found:
        raise ValueError(f"no rounds{whose}: let the model generate at least one token")
    return found


def _told(one: Any, tokenizer: Any, name: str) -> Told:
    if isinstance(one, Draft):
        one = Round(one, [], [], "plain")
    if isinstance(one, Round):
        guesses, tokens = one.draft.tokens, one.tokens
        words = [tuple(word(token, tokenizer) for token in part) for part in (guesses, tokens)]
    elif isinstance(one, Mapping):
        one, *words = _recorded(one, name)
    else:
        raise TypeError(f"{name} is {one!r}: expected a Round, or one as recorded")
    known = len(one.accepted) <= len(one.tokens) <= len(one.accepted) + 1 or not one.tokens
    path = one.draft.path(one.accepted[-1]) if one.accepted else []
    if one.last not in LASTS or not known or path != list(one.accepted):
        raise ValueError(
            f"{name} accepts {one.accepted} of {len(one.draft)} guesses and gains "
            f"{len(one.tokens)} tokens, the last a {one.last!r}: expected a path from a first "
            f"guess down, at most one token more, and one of {', '.join(LASTS)}"
        )
    return Told(one, *words)


def word(token: int, tokenizer: Any) -> str:
    """A token as its text, all of it visible; as its number without a tokenizer."""
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token])
    return f"⟨{token}⟩" if "\ufffd" in text else visible(text)  # part of a character


def _recorded(one: Mapping[str, Any], name: str) -> tuple[Round, tuple[str, ...], tuple[str, ...]]:
    """A round as benchmarks/speculative.py writes it; its words are the tokens themselves."""
    try:
        guesses, tokens = (tuple(map(visible, one[part])) for part in ("guesses", "tokens"))
        draft = Draft(range(len(guesses)), one["parents"])
        accepted = [int(node) for node in one["accepted"]]
        if not all(0 <= node < len(draft) for node in accepted):
            raise ValueError(f"accepted is {accepted} of {len(draft)} guesses")
        return Round(draft, accepted, list(range(len(tokens))), one["last"]), guesses, tokens
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{name} is not as benchmarks/speculative.py writes it, {type(error).__name__}: {error}"
        ) from error
