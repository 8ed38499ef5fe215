"""A block allocator played with by hand: named sequences, what is in the pages, and undo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

from lecture_util.classroom.widgets.drawing import letter
from lecture_util.serving.blocks import Blocks, OutOfPages, Table

MOST_SEQUENCES = 6
VERBS = ("look up", "begin", "write", "fork", "free", "evict")


@dataclass
class Change:
    """What the last event did to the pages, for the picture."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)  # page -> its count before
    written: set[tuple[int, int]] = field(default_factory=set)  # page and slot
    hits: list[int] = field(default_factory=list)  # pages that a prefix was found in


@dataclass
class _State:
    blocks: Blocks
    tables: dict[str, Table]
    contents: list[list[str | None]]  # words in the slots of each page, for good or stale
    begun: int = 0


class Story:
    """Events told to a `Blocks`, a word being a token. All that is written is computed at once.

    `said` tells the last event in a line, `change` what it did; `refused` if it could not be done.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool = True) -> None:
        blocks = Blocks(num_pages, page_size, prefix_caching=prefix_caching)
        self._state = _State(blocks, {}, [[None] * page_size for _ in range(num_pages)])
        self.past: list[tuple[_State, str]] = []
        self.said, self.refused, self.change = "Nothing has happened yet.", False, Change()

    @property
    def blocks(self) -> Blocks:
        return self._state.blocks

    @property
    def tables(self) -> dict[str, Table]:
        """The live sequences by name, in the order of their beginning."""
        return self._state.tables

    @property
    def contents(self) -> list[list[str | None]]:
        return self._state.contents

    def filled(self, page: int) -> int:
        """Slots of a page that some table counts as written, or the prefix cache knows."""
        P = self.blocks.page_size
        if self.blocks.texts[page] is not None:
            return P
        holds = [
            min(P, len(table) - P * j)
            for table in self.tables.values()
            for j, held in enumerate(table.pages)
            if held == page
        ]
        return max(holds, default=0)

    def tell(self, event: str) -> None:
        """An event as words: "begin the cat", "write A sat", "fork A", "free A", "evict", ...

        Raises: ValueError for what is none, or a sequence that is not there.
        """
        verb = next((v for v in VERBS if f"{event} ".startswith(f"{v} ")), None)
        rest = event[len(verb or "") :].strip()
        if verb is None:
            raise ValueError(
                f"event {event!r}: expected it to begin with one of {', '.join(VERBS)}"
            )
        if verb == "write":
            name, _, words = rest.partition(" ")
            self.write(name, words)
        elif verb == "evict":
            self.evict()
        else:
            getattr(self, verb.replace(" ", "_"))(rest)

    def begin(self, words: str) -> None:
        """A sequence with these words; pages that the prefix cache has of them are shared."""
        tokens = _tokens(words)

        def act(state: _State) -> str:
            name = self._new_name(state)
            table = state.blocks.begin(tokens)
            found = len(table.pages)
            self.change.hits = list(table.pages)
            self._append(state, table, tokens[len(table) :])
            state.tables[name] = table
            new = len(table.pages) - found
            hit = f"{_many(found)} found in the prefix cache and shared, " if found else ""
            return f"{name} begins with {_many(len(tokens), 'token')}: {hit}{_many(new)} new"

        self._do(act, f"A sequence of {_many(len(tokens), 'token')} does not fit")

    def write(self, name: str, words: str) -> None:
        """Append words to a sequence."""
        tokens = _tokens(words)
        self._table(name)

        def act(state: _State) -> str:
            table = state.tables[name]
            before = len(table.pages)
            known = bool(len(table) % state.blocks.page_size) and (
                state.blocks.texts[table.pages[-1]] is not None
            )
            copies = self._append(state, table, tokens)
            said = f"{name} writes {_quoted(tokens)}"
            for source, target in copies:
                said += (
                    f": page {source} was shared, so it is copied to page {target} first; its "
                    f"count falls to {state.blocks.counts[source]}"
                )
            if known and not copies:
                said += ": the prefix cache forgets the page that is written over"
            new = len(table.pages) - before
            return said + (f"; {_many(new)} new" if new else "")

        self._do(act, f"{name} cannot write {_quoted(tokens)}")

    def fork(self, name: str) -> None:
        """Another sequence over the same pages."""
        self._table(name)

        def act(state: _State) -> str:
            child = self._new_name(state)
            state.tables[child] = state.blocks.fork(state.tables[name])
            count = len(state.tables[name].pages)
            return f"{child} is forked from {name}: {_many(count)} counted once more, none copied"

        self._do(act)

    def free(self, name: str) -> None:
        """The sequence is over."""
        self._table(name)

        def act(state: _State) -> str:
            pages = list(state.tables[name].pages)
            state.blocks.release(state.tables.pop(name))
            idle = [page for page in pages if page in state.blocks.idle]
            freed = [page for page in pages if page in state.blocks.free]
            shared = len(pages) - len(idle) - len(freed)
            parts = [f"{_many(len(freed))} free"] * bool(freed)
            parts += [f"{_many(len(idle))} idle, still to be found"] * bool(idle)
            parts += [f"{_many(shared)} still held by others"] * bool(shared)
            return f"{name} is over: {', '.join(parts) or 'it held nothing'}"

        self._do(act)

    def evict(self) -> None:
        """Free the idle page that was used least recently."""

        def act(state: _State) -> str | None:
            page = state.blocks.evict()
            if page is None:
                return None
            return f"Page {page}, idle for longest, is forgotten and free"

        self._do(act, "No page is idle: free a sequence whose pages are full, then one can be")

    def look_up(self, words: str) -> None:
        """Which pages `begin` would find. Nothing is taken."""
        tokens, blocks = _tokens(words), self.blocks
        self.change = Change()
        found = list(blocks.cache.match((), tokens, blocks.page_size))
        self.change.hits = [page for page, _ in found]
        known, self.refused = len(found) * blocks.page_size, False
        where = f" in page {', '.join(map(str, self.change.hits))}" if found else ""
        self.said = (
            f"Looked up {_many(len(tokens), 'token')}: the first {known} are there{where}; "
            f"{len(tokens) - known} would be computed (one always is)"
        )
        if not blocks.prefix_caching:
            self.said = "There is no prefix cache here: nothing is ever found"

    def undo(self) -> None:
        """As before the last event that changed anything."""
        if self.past:
            self._state, event = self.past.pop()
            self.said, self.refused, self.change = f"Taken back: {event}", False, Change()

    def _do(self, act: Callable[[_State], str | None], refusal: str = "That does not work") -> None:
        """Do it on a copy, so that what fails half-way has changed nothing."""
        state = copy.deepcopy(self._state)
        before = list(state.blocks.counts)
        self.change, self.refused = Change(), False
        try:
            said = act(state)
        except OutOfPages as error:
            said, refusal = None, f"{refusal}: {error}. Nothing was changed"
        if said is None:
            self.change, self.said, self.refused = Change(), refusal, True
            return
        after = state.blocks.counts
        self.change.counts = {p: n for p, n in enumerate(before) if n != after[p]}
        self.past.append((self._state, said))
        self._state, self.said = state, said

    def _append(self, state: _State, table: Table, tokens: list[str]) -> list[tuple[int, int]]:
        P, start = state.blocks.page_size, len(table)
        copies = state.blocks.append(table, tokens)
        for source, target in copies:
            state.contents[target] = list(state.contents[source])
        for i, token in enumerate(tokens, start=start):
            page = table.pages[i // P]
            state.contents[page][i % P] = token
            self.change.written.add((page, i % P))
        state.blocks.commit(table)
        self.change.copies = copies
        return copies

    def _new_name(self, state: _State) -> str:
        if len(state.tables) >= MOST_SEQUENCES:
            raise OutOfPages(f"the picture has room for {MOST_SEQUENCES} sequences: free one first")
        state.begun += 1
        return letter(state.begun - 1)

    def _table(self, name: str) -> Table:
        if name not in self.tables:
            known = ", ".join(self.tables) or "none yet: begin one"
            raise ValueError(f"there is no sequence {name!r}; there is {known}")
        return self.tables[name]


def _tokens(words: str) -> list[str]:
    if not isinstance(words, str) or not words.split():
        raise ValueError(f"words are {words!r}: type one or more, each is a token")
    return words.split()


def _many(count: int, what: str = "page") -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _quoted(tokens: list[str]) -> str:
    return "“" + " ".join(tokens[:6]) + ("…" if len(tokens) > 6 else "") + "”"
