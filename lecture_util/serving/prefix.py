"""The prefix cache: full pages, found again by what they hold and what came before.

The keys of a page depend on every token before it, so a page's name is a hash of its tokens and of
the name of the page before: a chain that begins at the space (an adapter, a salt) it belongs to.
A hash only points at candidates. What decides is a comparison of the tokens, all the way back, so
that no collision can ever hand one user the keys of another's text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Digest = Callable[[bytes, tuple], bytes]


def digest(before: bytes, tokens: tuple) -> bytes:
    """SHA-256 over the chain. Python's own `hash` would do worse: hash((-1,)) == hash((-2,))."""
    return hashlib.sha256(before + repr(tokens).encode()).digest()


@dataclass(frozen=True, eq=False)
class Text:
    """What a full page holds, linked to what stands before it. The first link is a space."""

    tokens: tuple
    before: Text | None
    name: bytes

    def same(self, other: Text | None) -> bool:
        """Equal token by token back to the beginning; the very same links need no comparing."""
        one: Text | None = self
        while one is not other:
            if one is None or other is None or one.tokens != other.tokens:
                return False
            one, other = one.before, other.before
        return True


class PrefixCache:
    """Which pages hold which text. One text may be in several pages, computed side by side."""

    def __init__(self, digest: Digest = digest) -> None:
        self.digest = digest
        self.by_name: dict[bytes, dict[int, Text]] = {}  # name -> page -> text

    def root(self, space: tuple[str, ...]) -> Text:
        """Where a chain begins. Words of another space, or in another place, begin another."""
        if not isinstance(space, tuple):  # "ab" would share with ("a", "b")
            raise TypeError(f'space={space!r}: expected a tuple of words, such as ("salt", "x")')
        return Text(("space", *space), None, self.digest(b"", ("space", *space)))

    def link(self, before: Text, tokens: tuple[int, ...]) -> Text:
        """The text of one more full page."""
        return Text(tokens, before, self.digest(before.name, tokens))

    def put(self, page: int, text: Text) -> None:
        self.by_name.setdefault(text.name, {})[page] = text

    def drop(self, page: int, text: Text) -> None:
        """This page holds the text no longer; other pages may."""
        pages = self.by_name[text.name]
        del pages[page]
        if not pages:
            del self.by_name[text.name]

    def find(self, text: Text) -> int | None:
        """A page that holds this text after these texts, if any does."""
        for page, held in self.by_name.get(text.name, {}).items():
            if held.same(text):
                return page
        return None

    def match(
        self, space: tuple[str, ...], tokens: list[int], page_size: int
    ) -> Iterator[tuple[int, Text]]:
        """The longest run of cached pages that begins `tokens`, page by page.

        At least one token is left over: its logits are wanted, and they were not kept.
        """
        text = self.root(space)
        for end in range(page_size, len(tokens), page_size):
            text = self.link(text, tuple(tokens[end - page_size : end]))
            page = self.find(text)
            if page is None:
                return
            yield page, text
