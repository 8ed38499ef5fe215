"""Pages as the scheduler's memory: what is refused changes nothing, what is shared counts once."""

import pytest

from lecture_util.model.config import Config
from lecture_util.serving.blocks import Blocks
from lecture_util.serving.paging import PagedCache, Pages
from lecture_util.serving.request import Params, Request, Running

TINY = Config(D=8, F=8, K=1, G=1, H=4, L=1, V=11)


def sequence(id, prompt, new=4, **about):
    request = Request(prompt, Params(max_new_tokens=new), **about)
    return Running(id, request, id, 0, list(prompt), 0.0)


def computed(pages, one, tokens=None):
    """The sequence after it was let in, and all its tokens computed."""
    assert pages.begin(one) is not None
    assert pages.grow(one, len(one.tokens) if tokens is None else tokens)
    one.computed = len(one.tokens) if tokens is None else tokens
    pages.commit(one)
    return one


def snapshot(pages):
    blocks = pages.blocks
    return (
        list(blocks.counts), list(blocks.texts), sorted(blocks.free), sorted(blocks.idle),
        {id: (list(t.pages), list(t.tokens)) for id, t in pages.tables.items()},
        list(pages.copies), pages.held(),
    )  # fmt: skip


def test_a_sequence_that_is_refused_takes_nothing():
    """neuralmagic/vllm#92: what could not be scheduled kept the pages it had found."""
    pages = Pages(Blocks(5, 2))
    pages.release(computed(pages, sequence(0, [1, 2, 3, 4])))
    computed(pages, sequence(1, [9] * 6))
    before = snapshot(pages)
    assert pages.begin(sequence(2, [1, 2, 3, 4, 5, 6])) is None  # 2 pages found, 2 needed, 0 free
    assert snapshot(pages) == before and 2 not in pages.tables
    assert pages.begin(sequence(3, [1, 2, 3, 4, 5], new=1)) is None
    pages.release(sequence(1, []))
    assert pages.begin(sequence(2, [1, 2, 3, 4, 5, 6])) == 4


def test_admission_leaves_room_for_the_first_new_token_if_there_will_be_one():
    assert Pages(Blocks(2, 2)).begin(sequence(0, [1, 2, 3, 4], new=2)) is None
    assert Pages(Blocks(2, 2)).begin(sequence(0, [1, 2, 3, 4], new=1)) == 0  # it is never computed
    assert Pages(Blocks(2, 2)).begin(sequence(0, [1, 2, 3], new=2)) == 0


def test_growth_that_is_refused_changes_nothing():
    pages = Pages(Blocks(3, 2))
    one = computed(pages, sequence(0, [1, 2, 3]), 3)
    child = sequence(1, [1, 2, 3])
    pages.fork(one, child)
    child.tokens += [4, 5, 6]
    before = snapshot(pages)
    assert not pages.grow(child, 6)
    assert snapshot(pages) == before
    assert pages.grow(child, 4)
    assert pages.copies == [(pages.table(one)[1], pages.table(child)[1])]


def test_growing_to_what_is_there_takes_nothing():
    pages = Pages(Blocks(3, 2))
    one = computed(pages, sequence(0, [1, 2, 3]))
    before = snapshot(pages)
    assert pages.grow(one, 3) and pages.grow(one, 1)
    assert snapshot(pages) == before


def test_copies_are_handed_over_once():
    pages = Pages(Blocks(3, 2))
    one, child = computed(pages, sequence(0, [1])), sequence(1, [1])
    pages.fork(one, child)
    child.tokens.append(2)
    assert pages.grow(child, 2)
    assert pages.take_copies() == [(pages.table(one)[0], pages.table(child)[0])]
    assert pages.take_copies() == []


def test_a_shared_page_is_held_once_with_the_most_that_anyone_has_there():
    pages = Pages(Blocks(8, 4))
    one, child = computed(pages, sequence(0, [1, 2, 3, 4, 5])), sequence(1, [1, 2, 3, 4, 5])
    assert pages.held() == (5, 8)
    pages.fork(one, child)
    assert pages.held() == (5, 8)
    child.tokens.append(6)
    assert pages.grow(child, 6)
    assert pages.held() == (4 + 1 + 2, 12)
    late = sequence(2, [1, 2, 3, 4, 7])
    assert pages.begin(late) == 4 and pages.held() == (7, 12)
    pages.release(one)
    assert pages.held() == (4 + 2, 8)
    pages.release(child)
    pages.release(late)
    pages.release(late)  # it holds nothing any more
    assert pages.held() == (0, 0) and pages.blocks.available == 8


def test_spaces_are_kept_apart():
    pages = Pages(Blocks(8, 2))
    computed(pages, sequence(0, [1, 2, 3], space=("adapter", "x")))
    assert pages.begin(sequence(1, [1, 2, 3], space=("salt", "x"))) == 0
    assert pages.begin(sequence(2, [1, 2, 3], space=("adapter", "x"))) == 2


def test_only_what_was_computed_is_shared():
    """A chunk has room for all its tokens before they are computed."""
    pages = Pages(Blocks(8, 2))
    one = sequence(0, [1, 2, 3, 4, 5])
    pages.begin(one)
    pages.grow(one, 5)
    one.computed = 2
    pages.commit(one)
    assert pages.begin(sequence(1, [1, 2, 3, 4, 5])) == 2


def test_after_a_preemption_the_work_left_is_what_the_cache_has_not():
    """nano-vllm#207: six tokens in pages of 4; counted before the look-up, work was too much."""
    pages = Pages(Blocks(3, 4))
    one = computed(pages, sequence(0, [1, 2, 3, 4, 5, 6]))
    pages.release(one)
    found = pages.begin(one)
    assert found == 4 and len(one.tokens) - found == 2
    assert pages.grow(one, 6) and len(pages.table(one)) == 2


@pytest.mark.parametrize("tokens, fits", [(0, True), (8, True), (9, False)])
def test_what_could_never_be_held_does_not_fit(tokens, fits):
    assert Pages(Blocks(4, 2)).fits(tokens) is fits


def test_a_sequence_begins_once():
    pages = Pages(Blocks(4, 2))
    one = computed(pages, sequence(0, [1, 2, 3]))
    before = snapshot(pages)
    with pytest.raises(ValueError, match="sequence 0 has begun already"):
        pages.begin(one)
    assert snapshot(pages) == before


def test_the_cache_has_a_page_more_than_it_lends():
    cache = PagedCache(TINY, 5, 4)
    assert cache.k_LMPKH.shape == (1, 6, 4, 1, 4)
    assert cache.nbytes == 2 * 6 * 4 * 4 * 4 and cache.page_size == 4
    assert cache.blocks.available == 5 and cache.memory.blocks is cache.blocks


@pytest.mark.parametrize("bad", [0, -1, 2.5, "4", None, True])
def test_a_paged_cache_of_no_size_is_refused(bad):
    with pytest.raises(ValueError, match=f"num_pages={bad!r}: expected a whole number"):
        PagedCache(TINY, bad)
    with pytest.raises(ValueError, match=f"page_size={bad!r}: expected a whole number"):
        PagedCache(TINY, 4, bad)
