"""Draft by looking the last words up in what was already said: no model at all.

Where the answer repeats its input (summaries, questions about a document, edits of code), the last
few tokens have often stood somewhere before, and what followed them there follows again.

Source: prompt lookup decoding, Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lecture_util.model.generate import end_tokens

from .draft import NOTHING, Draft, chain
from .verify import Chance


def lookup(
    tokens: Sequence[int], longest: int = 3, k: int = 8, latest: bool = True, shortest: int = 1
) -> list[int]:
    """Up to k tokens that followed an earlier occurrence of the last n, n as long as possible.

    The longest n wins, from `longest` down to `shortest`; of several occurrences the latest (or, as
    in transformers and vLLM, the leftmost). The last n themselves are no occurrence, but a
    continuation may run into them.

    Raises: ValueError unless 1 <= shortest <= longest and k is at least 1, and for a `latest` that
            is neither True nor False.
    """
    _check(longest, shortest, k, latest)
    tokens = list(tokens)
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        tail = tokens[-n:]
        starts = range(len(tokens) - n)  # the suffix itself is left out
        for start in reversed(starts) if latest else starts:
            if tokens[start] == tail[0] and tokens[start : start + n] == tail:
                return tokens[start + n : start + n + k]
    return []


class NgramDrafter:
    """Guesses by `lookup`, of at least two tokens: a single one recurs by chance, and a wrong guess
    costs a row of the verifying forward.

    banned: a guess ends before these; the end tokens belong here, since a prompt holds those that
            closed earlier turns.
    """

    def __init__(
        self,
        longest: int = 4,
        k: int = 8,
        banned: int | Collection[int] = (),
        latest: bool = True,
        shortest: int = 2,
    ) -> None:
        _check(longest, shortest, k, latest)
        self.longest, self.shortest, self.k, self.latest = longest, shortest, k, latest
        self.banned = end_tokens(banned)

    def propose(self, tokens: Sequence[int], room: int, chance: Chance) -> Draft:
        k = min(self.k, room)
        if k < 1:
            return NOTHING
        guesses = lookup(tokens, self.longest, k, self.latest, self.shortest)
        for i, guess in enumerate(guesses):
            if guess in self.banned:
                guesses = guesses[:i]
                break
        return chain(guesses)

    def settle(self, tokens: Sequence[int]) -> None:
        pass


def _check(longest: int, shortest: int, k: int, latest: bool) -> None:
    if not (type(longest) is type(shortest) is int and 1 <= shortest <= longest):
        raise ValueError(
            f"longest={longest!r}, shortest={shortest!r}: expected whole numbers from 1 up, the "
            "shortest no longer than the longest"
        )
    if type(k) is not int or k < 1:
        raise ValueError(f"k={k!r}: expected a whole number of guesses, at least 1")
    if type(latest) is not bool:
        raise ValueError(f"latest={latest!r}: expected True, or False for the leftmost")
