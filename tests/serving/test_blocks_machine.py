"""The block allocator against a model of what each slot of the pool holds, for 10,000 steps.

A key depends on its token, on every token before it, and on its space. So a slot of the model holds
just that, the story so far; every write and every copy is made in the model as a cache would make
it, and whatever the allocator says is held against the stories.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lecture_util.serving.blocks import Blocks, OutOfPages, Table
from lecture_util.serving.prefix import digest

STEPS, MACHINES = 10_000, 7
TOKENS = st.lists(st.sampled_from([-1, -1, -1, -2]), max_size=9)  # so that texts come again
WHICH = st.integers(0, 30)  # of the live tables
WRITE = st.tuples(
    st.sampled_from([99, 0, 3]), st.booleans()
)  # tokens at most, and whether to commit


@dataclass(eq=False)
class Live:
    """A table, the tokens it should stand for, and how many of them the cache has computed."""

    table: Table
    space: tuple
    tokens: list
    computed: int

    def story(self, position):
        return self.space, tuple(self.tokens[: position + 1])


class Allocator(RuleBasedStateMachine):
    page_size, prefix_caching, steps = 1, True, 0
    digest = staticmethod(digest)

    @initialize(room=st.integers(1, 60))
    def open(self, room):
        num_pages = -(-room // self.page_size)
        self.blocks = Blocks(
            num_pages, self.page_size, prefix_caching=self.prefix_caching, digest=self.digest
        )
        self.live, self.past = [], [()]
        self.slots = {}  # (page, slot) -> story
        self.listed = {}  # page -> story of its last slot: what a look-up may find
        self.left = {}  # page -> when its last holder left
        self.time = 0

    def pick(self, which):
        return self.live[which % len(self.live)]

    def holders(self):
        return Counter(page for one in self.live for page in set(one.table.pages))

    def idle(self):
        """Listed pages that nobody holds, the longest unused first."""
        return sorted(self.listed.keys() - self.holders().keys(), key=self.left.__getitem__)

    def known_to_cache(self):
        return sorted(page for pages in self.blocks.cache.by_name.values() for page in pages)

    # ------------------------------------------------------------------ what a sequence does

    @rule(
        tokens=TOKENS, again=st.integers(0, 5), space=st.sampled_from([(), ("salt",)]), write=WRITE
    )
    def begin(self, tokens, again, space, write):
        """Look a prompt up, often one that was here before, and make room for the rest."""
        P = self.page_size
        tokens = list(self.past[again % len(self.past)])[:24] + tokens
        findable, most = set(self.listed.values()), 0
        while most + P < len(tokens) and (space, tuple(tokens[: most + P])) in findable:
            most += P
        table = self.blocks.begin(tokens, space)
        assert table.tokens == tokens[:most], "the longest run of full pages, one token left over"
        one = Live(table, space, tokens[:most], most)
        self.live.append(one)
        self.past = [tuple(tokens), *self.past][:6]
        self.read_back()
        self.grow(one, tokens[most:])
        self.compute(one, *write)

    @precondition(lambda self: self.live)
    @rule(which=WHICH, tokens=TOKENS, write=WRITE)
    def append(self, which, tokens, write):
        """Decode, or a further chunk."""
        one = self.pick(which)
        self.grow(one, tokens)
        self.compute(one, *write)

    @precondition(lambda self: 0 < len(self.live) < 12)
    @rule(which=WHICH, tokens=TOKENS, write=WRITE, child_first=st.booleans())
    def fork(self, which, tokens, write, child_first):
        """What is computed is shared; whoever writes next must not be seen by the other."""
        one = self.pick(which)
        self.compute(one, 99, False)
        child = Live(self.blocks.fork(one.table), one.space, list(one.tokens), one.computed)
        self.live.append(child)
        writer = child if child_first else one
        self.grow(writer, tokens)
        self.compute(writer, *write)

    def grow(self, one, tokens):
        blocks, P, pages = self.blocks, self.page_size, list(one.table.pages)
        held, idle = self.holders(), self.idle()
        is_open = len(one.tokens) % P > 0
        copy = is_open and len(tokens) > 0 and held[pages[-1]] > 1
        fresh = -(-(len(one.tokens) + len(tokens)) // P) - len(pages) + copy
        before = self.everything()
        if fresh > blocks.num_pages - len(held):
            with pytest.raises(OutOfPages, match=f"need {fresh} pages"):
                blocks.append(one.table, tokens)
            assert self.everything() == before
            return
        copies = blocks.append(one.table, tokens)
        kept = len(pages) - copy
        assert one.table.pages[:kept] == pages[:kept]
        taken = one.table.pages[kept:]
        assert len(set(taken)) == len(taken) == fresh and not held.keys() & set(taken)
        evicted = idle[: max(0, fresh - (blocks.num_pages - len(held) - len(idle)))]
        assert set(taken) & set(idle) == set(evicted), "the least recently used, and only if needed"
        assert copies == ([(pages[-1], taken[0])] if copy else [])
        for page in taken:
            self.listed.pop(page, None)
            for slot in range(P):
                self.slots.pop((page, slot), None)
        for source, target in copies:
            for slot in range(P):
                self.slots[target, slot] = self.slots.get((source, slot))
        if tokens and is_open and not copy:
            self.listed.pop(pages[-1], None)
        one.tokens += tokens

    @precondition(lambda self: self.live)
    @rule(which=WHICH, write=WRITE)
    def write(self, which, write):
        """Compute what there is room for since an earlier step."""
        self.compute(self.pick(which), *write)

    def compute(self, one, most, commit):
        """Write a chunk; commit it now, later or never."""
        held, P = self.holders(), self.page_size
        for position in range(one.computed, min(one.computed + most, len(one.tokens))):
            page = one.table.pages[position // P]
            assert held[page] == 1, "a write to a page that another table holds"
            assert page not in self.known_to_cache(), "a write to a page that can be found"
            self.slots[page, position % P] = one.story(position)
            one.computed = position + 1
        if commit:
            self.commit(one, one.computed)

    @precondition(lambda self: self.live)
    @rule(which=WHICH, few=st.integers(0, 12))
    def commit_part(self, which, few):
        one = self.pick(which)
        self.commit(one, min(few, one.computed))

    def commit(self, one, computed):
        self.blocks.commit(one.table, computed)
        for j in range(computed // self.page_size if self.prefix_caching else 0):
            story = one.story((j + 1) * self.page_size - 1)
            assert self.listed.setdefault(one.table.pages[j], story) == story

    @precondition(lambda self: self.live)
    @rule(which=WHICH, back=st.integers(0, 9), tokens=TOKENS, write=WRITE)
    def truncate(self, which, back, tokens, write):
        """Roll back, and maybe go on otherwise."""
        one = self.pick(which)
        length = max(0, len(one.tokens) - back)
        dropped = one.table.pages[-(-length // self.page_size) :]
        self.blocks.truncate(one.table, length)
        del one.tokens[length:]
        one.computed = min(one.computed, length)
        self.leave(dropped)
        self.grow(one, tokens)
        self.compute(one, *write)

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def release(self, which):
        one = self.pick(which)
        pages = list(one.table.pages)
        self.blocks.release(one.table)
        self.live.remove(one)
        self.leave(pages)

    def leave(self, pages):
        for page in reversed(pages):
            if page not in self.holders():
                self.time += 1
                self.left[page] = self.time

    @precondition(lambda self: self.idle())
    @rule()
    def evict(self):
        oldest = self.idle()[0]
        assert self.blocks.evict() == oldest
        del self.listed[oldest]

    # ------------------------------------------------------------------ what must always hold

    def everything(self):
        """All that an operation could change."""
        blocks, tables = self.blocks, [one.table for one in self.live]
        return (
            list(blocks.counts), list(blocks.texts), list(blocks.free), list(blocks.idle),
            {name: dict(pages) for name, pages in blocks.cache.by_name.items()},
            [(list(t.pages), list(t.tokens), list(t.texts)) for t in tables],
        )  # fmt: skip

    @invariant()
    def pages_are_counted(self):
        type(self).steps += 1
        blocks, held = self.blocks, self.holders()
        assert blocks.counts == [held[page] for page in range(blocks.num_pages)]
        assert sorted([*blocks.free, *blocks.idle, *held]) == list(range(blocks.num_pages))
        assert blocks.available == blocks.num_pages - len(held)
        assert list(blocks.idle) == self.idle()

    @invariant()
    def only_what_is_whole_and_computed_can_be_found(self):
        assert self.known_to_cache() == sorted(self.listed)
        assert self.listed.keys() == {p for p, text in enumerate(self.blocks.texts) if text}
        for page, story in self.listed.items():
            assert self.slots.get((page, self.page_size - 1)) == story

    @invariant()
    def read_back(self):
        """Every table's tokens, read through its pages: each with the story that is its own."""
        P = self.page_size
        for one in self.live:
            assert one.table.tokens == one.tokens
            assert len(one.table.pages) == -(-len(one.tokens) // P)
            for position in range(one.computed):
                where = one.table.pages[position // P], position % P
                assert self.slots.get(where) == one.story(position)

    def teardown(self):
        if not hasattr(self, "blocks"):
            return
        while self.live:
            self.release(0)
        self.pages_are_counted()
        assert self.blocks.available == self.blocks.num_pages
        while self.blocks.evict() is not None:
            pass
        assert sorted(self.blocks.free) == list(range(self.blocks.num_pages))
        assert not self.blocks.cache.by_name and not any(self.blocks.texts)


KINDS = {
    "hashes of SHA-256": dict(digest=staticmethod(digest)),
    "all hashes alike": dict(digest=staticmethod(lambda before, tokens: b"")),
}


def run(**kind):
    machine = type("Machine", (Allocator,), {**kind, "steps": 0})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=50, deadline=None)
    )
    assert machine.steps >= STEPS / MACHINES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_nothing_leaks_and_no_shared_page_is_written(page_size, kind):
    run(page_size=page_size, **KINDS[kind])


def test_the_same_without_a_prefix_cache():
    run(page_size=2, prefix_caching=False)
