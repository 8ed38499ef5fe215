"""The block allocator: pages lent by count, copied on write, kept for those who come back.

It moves no tensor. A sequence's `Table` lists its pages; `append` makes room for tokens and says
which pages must be copied first; a page is free when no table holds it. A free page that is full
and computed stays findable until its room is needed: the least recently used goes first.

    state of a page    count   text     where it is
    free               0       None     in `free`
    lent, open         >= 1    None     in tables
    lent, cached       >= 1    a Text   in tables and the prefix cache
    idle               0       a Text   in `idle` and the prefix cache: a hit revives it

Source: Kwon et al. 2023, arXiv:2309.06180, sections 4.2 to 4.5.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lecture_util.model.generate import plain

from .prefix import Digest, PrefixCache, Text, digest


class OutOfPages(MemoryError):
    """Not enough free pages. Nothing was changed."""


@dataclass(eq=False)
class Table:
    """The pages of one sequence, in order, and the tokens that have a slot in them."""

    space: tuple[str, ...] = ()
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)  # of the full pages that are computed
    freed: bool = False
    owner: Blocks | None = field(default=None, repr=False)
    era: int = 0  # of `Blocks.forget`: what began in an earlier one is never found

    def __len__(self) -> int:
        return len(self.tokens)


class Blocks:
    """`num_pages` pages of `page_size` tokens.

    prefix_caching: keep and find full pages.   digest: names them; tests stub it.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        digest: Digest = digest,
    ) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        self.prefix_caching = prefix_caching
        self.counts = [0] * num_pages
        self.texts: list[Text | None] = [None] * num_pages
        self.free = list(reversed(range(num_pages)))  # a stack: the lowest first, then the warmest
        self.idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.cache = PrefixCache(digest)
        self.era = 0

    @property
    def available(self) -> int:
        """Pages that can be lent now: the free ones, and the idle ones that would be evicted."""
        return len(self.free) + len(self.idle)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def begin(self, tokens: Sequence[int] = (), space: tuple[str, ...] = ()) -> Table:
        """A table for a sequence, with the pages that the prefix cache has of its first tokens.

        At least one token is always left to `append`. Never fails.
        """
        table, tokens = Table(space, owner=self, era=self.era), list(plain(tokens))
        if self.prefix_caching:
            for page, text in self.cache.match(space, tokens, self.page_size):
                self._share(page)
                table.pages.append(page)
                table.texts.append(text)
                table.tokens += text.tokens
        return table

    def append(self, table: Table, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Make room for more tokens; pages (from, to) to be copied before they are written.

        A last page that is not full is written to. Where others hold it too, this table gets a copy
        of its own; where the prefix cache knows it, the cache forgets it.

        Raises: OutOfPages, and then nothing has changed.
        """
        self._check(table)
        tokens = list(plain(tokens))
        if not tokens:
            return []
        open_page = len(table) % self.page_size != 0
        copy = open_page and self.counts[table.pages[-1]] > 1
        new = self.pages_for(len(table) + len(tokens)) - len(table.pages)
        if new + copy > self.available:
            raise OutOfPages(
                f"{len(tokens)} more tokens after {len(table)} need {new + copy} pages of "
                f"{self.page_size}, and {self.available} are to be had: free a table first"
            )
        copies = []
        if copy:
            source, target = table.pages[-1], self._take()
            table.pages[-1] = target
            self.counts[source] -= 1
            copies.append((source, target))
        elif open_page:
            self._forget(table.pages[-1])
        table.pages += [self._take() for _ in range(new)]
        table.tokens += tokens
        return copies

    def commit(self, table: Table, computed: int | None = None) -> None:
        """The first `computed` tokens (or all) are in the cache: full pages can be found from now.

        Raises: ValueError if the table has fewer tokens.
        """
        self._check(table)
        computed = len(table) if computed is None else computed
        if type(computed) is not int or not 0 <= computed <= len(table):
            raise ValueError(
                f"computed={computed!r}, but the table has {len(table)} tokens: expected a whole "
                "number up to that"
            )
        if not self.prefix_caching:
            return
        P = self.page_size
        for j in range(len(table.texts), computed // P):
            before = table.texts[-1] if table.texts else self.cache.root(table.space)
            text = self.cache.link(before, tuple(table.tokens[j * P : (j + 1) * P]))
            table.texts.append(text)
            page = table.pages[j]
            if self.texts[page] is None and table.era == self.era:
                self.texts[page] = text
                self.cache.put(page, text)

    def fork(self, table: Table) -> Table:
        """Another table over the same pages, each counted once more."""
        self._check(table)
        for page in set(table.pages):
            self.counts[page] += 1
        return replace(
            table, pages=list(table.pages), tokens=list(table.tokens), texts=list(table.texts)
        )

    def truncate(self, table: Table, length: int) -> None:
        """Forget all but the first tokens. Pages beyond them are given back.

        Raises: ValueError if the table would grow.
        """
        self._check(table)
        if type(length) is not int or not 0 <= length <= len(table):
            raise ValueError(
                f"truncate() asked for length {length!r} of a table of {len(table)} tokens"
            )
        keep = self.pages_for(length)
        dropped, table.pages = table.pages[keep:], table.pages[:keep]
        del table.tokens[length:], table.texts[length // self.page_size :]
        self._give_back([page for page in dropped if page not in table.pages])

    def release(self, table: Table) -> None:
        """Give all pages back, the last first, so that a prefix outlives what followed it.

        Raises: ValueError if it was given back before.
        """
        self._check(table)
        table.freed = True
        self._give_back(table.pages)
        table.pages, table.tokens, table.texts = [], [], []

    def evict(self) -> int | None:
        """Forget and free the idle page that was used least recently. -> which, if there is one."""
        if not self.idle:
            return None
        page, _ = self.idle.popitem(last=False)
        self._forget(page)
        self.free.append(page)
        return page

    def forget(self) -> None:
        """Find nothing of what was computed so far, as after the weights have changed.

        Tables keep their pages. What they add stands on old keys, so that is not found either.
        """
        while self.evict() is not None:
            pass
        for page in range(self.num_pages):
            self._forget(page)
        self.era += 1

    def _take(self) -> int:
        if not self.free:
            self.evict()
        page = self.free.pop()
        self.counts[page] = 1
        return page

    def _share(self, page: int) -> None:
        self.idle.pop(page, None)
        self.counts[page] += 1

    def _give_back(self, pages: list[int]) -> None:
        for page in reversed(list(dict.fromkeys(pages))):  # each once, even if a table repeats it
            self.counts[page] -= 1
            if self.counts[page] == 0:
                if self.texts[page] is None:
                    self.free.append(page)
                else:
                    self.idle[page] = None  # the newest at the end

    def _forget(self, page: int) -> None:
        """Take a page out of the prefix cache."""
        if (text := self.texts[page]) is not None:
            self.cache.drop(page, text)
            self.texts[page] = None

    def _check(self, table: Table) -> None:
        if table.owner is not self:
            raise ValueError("this table is another allocator's: begin() one with this one")
        if table.freed:
            raise ValueError("this table was given back: begin() another")
