"""The block allocator, case by case; `test_blocks_machine` does the same at random."""

import numpy as np
import pytest
import torch

from lecture_util.serving.blocks import Blocks, OutOfPages


def filled(blocks, tokens, **about):
    """A table whose tokens are computed and committed."""
    table = blocks.begin(tokens, **about)
    blocks.append(table, tokens[len(table) :])
    blocks.commit(table)
    return table


def snapshot(blocks, *tables):
    return (
        list(blocks.counts), list(blocks.texts), list(blocks.free), list(blocks.idle),
        {name: dict(pages) for name, pages in blocks.cache.by_name.items()},
        [(list(t.pages), list(t.tokens), list(t.texts)) for t in tables],
    )  # fmt: skip


def found(blocks, tokens, **about):
    """How many tokens a look-up finds, leaving the counts as they were."""
    table = blocks.begin(tokens, **about)
    length = len(table)
    blocks.release(table)
    return length


def test_a_new_page_is_taken_exactly_when_a_page_is_full():
    """nano-vllm#65: a prompt of 4 fills a page of 4, and the first new token opens the next."""
    blocks = Blocks(4, 4)
    table = blocks.begin()
    lengths = []
    for token in range(9):
        blocks.append(table, [token])
        lengths.append(len(table.pages))
    assert lengths == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert blocks.available == 1


def test_a_table_that_repeats_a_page_counts_it_once():
    """vllm#1556: a sliding window's table was counted entry by entry at fork, and freed so too."""
    blocks = Blocks(2, 2, prefix_caching=False)
    table = blocks.begin()
    blocks.append(table, [1, 2, 3])
    first, second = table.pages
    table.pages.append(first)
    child = blocks.fork(table)
    assert blocks.counts == [2, 2]
    blocks.release(child)
    assert blocks.counts == [1, 1] and blocks.available == 0
    table.tokens = [1, 2, 3, 4, 5]
    blocks.truncate(table, 3)  # the page dropped at the end is still there at the beginning
    assert table.pages == [first, second] and blocks.counts == [1, 1]
    blocks.release(table)
    assert blocks.counts == [0, 0] and sorted(blocks.free) == [0, 1]


def test_a_fork_never_reclaims_what_its_parent_gave_back():
    """vllm#20512: released pages were still linked from a table, and a fork took them again."""
    blocks = Blocks(4, 2)
    table = filled(blocks, [1, 2, 3, 4, 5, 6])
    dropped = table.pages[1:]
    blocks.truncate(table, 2)
    other = blocks.begin()
    blocks.append(other, [7] * 6)
    assert set(dropped) <= set(other.pages)
    child = blocks.fork(table)
    assert not set(child.pages) & set(other.pages)
    assert [blocks.counts[page] for page in other.pages] == [1, 1, 1]
    assert len(child.texts) == 1


def test_an_evicted_page_is_not_found_again():
    """vllm#4761: the page stayed in the table of cached pages and was served with other content."""
    blocks = Blocks(1, 2)
    for tokens in ([1, 2], [3, 4]):
        blocks.release(filled(blocks, tokens))
        assert found(blocks, [*tokens, 0]) == 2
    assert found(blocks, [1, 2, 0]) == 0


def test_an_evicted_page_forgets_its_text():
    """kvcached#362: a stale hash stayed with the page."""
    blocks = Blocks(2, 2)
    table = filled(blocks, [1, 2])
    (page,) = table.pages
    blocks.release(table)
    assert blocks.texts[page] is not None and list(blocks.idle) == [page]
    assert blocks.evict() == page
    assert blocks.texts[page] is None and not blocks.idle and not blocks.cache.by_name
    assert page in blocks.free and blocks.evict() is None


def test_one_of_two_equal_pages_is_evicted_and_the_other_still_hits():
    """kvcached#401: one text in two pages, computed side by side, was kept under one entry."""
    blocks = Blocks(2, 2)
    one, two = blocks.begin([1, 2]), blocks.begin([1, 2])
    for table in (one, two):
        blocks.append(table, [1, 2])
        blocks.commit(table)
    (kept,) = two.pages
    assert one.pages != two.pages
    blocks.release(one)
    assert blocks.evict() is not None
    hit = blocks.begin([1, 2, 3])
    assert hit.pages == [kept] and blocks.counts[kept] == 2


def test_the_least_recently_used_page_goes_first_and_a_hit_renews_it():
    blocks = Blocks(3, 1)
    pages = {}
    for token in (1, 2, 3):
        table = filled(blocks, [token])
        pages[token] = table.pages[0]
        blocks.release(table)
    assert found(blocks, [1, 0]) == 1
    assert [blocks.evict() for _ in range(4)] == [pages[2], pages[3], pages[1], None]


def test_the_tail_of_a_text_is_evicted_before_its_head():
    """Else the head's loss would make the tail unreachable, and its page a waste."""
    blocks = Blocks(3, 2)
    table = filled(blocks, [1, 2, 3, 4, 5, 6])
    pages = list(table.pages)
    blocks.release(table)
    for left in (2, 1, 0):
        assert blocks.evict() == pages[left]
        assert found(blocks, [1, 2, 3, 4, 5, 6, 7]) == 2 * left


def test_free_pages_are_taken_before_any_is_evicted():
    blocks = Blocks(3, 2)
    blocks.release(filled(blocks, [1, 2]))
    table = blocks.begin()
    blocks.append(table, [9] * 4)
    assert found(blocks, [1, 2, 3]) == 2 and blocks.available == 1
    blocks.append(table, [9])
    assert found(blocks, [1, 2, 3]) == 0 and blocks.available == 0


def test_an_idle_page_is_revived_by_a_hit_and_safe_from_eviction():
    blocks = Blocks(2, 2)
    table = filled(blocks, [1, 2])
    pages = list(table.pages)
    blocks.release(table)
    again = blocks.begin([1, 2, 3])
    assert again.pages == pages and again.tokens == [1, 2] and blocks.counts[pages[0]] == 1
    assert blocks.evict() is None and blocks.available == 1


def test_one_token_is_always_left_to_compute():
    blocks = Blocks(4, 2)
    filled(blocks, [1, 2, 3, 4])
    assert found(blocks, [1, 2, 3, 4]) == 2
    assert found(blocks, [1, 2, 3, 4, 5]) == 4
    assert found(blocks, [1, 2]) == found(blocks, [1]) == found(blocks, []) == 0


def test_only_what_is_computed_can_be_found():
    blocks = Blocks(4, 2)
    table = blocks.begin()
    blocks.append(table, [1, 2, 3, 4])
    for computed, there in ((0, 0), (1, 0), (2, 2), (3, 2), (4, 4)):
        blocks.commit(table, computed)
        assert found(blocks, [1, 2, 3, 4, 5]) == there


def test_a_write_to_an_open_page_copies_it_if_shared_and_only_then():
    blocks = Blocks(4, 4)
    parent = filled(blocks, [1, 2, 3, 4, 5, 6])
    child = blocks.fork(parent)
    shared, tail = parent.pages
    copies = blocks.append(child, [7])
    assert copies == [(tail, child.pages[1])] and child.pages == [shared, copies[0][1]]
    assert parent.pages == [shared, tail] and (parent.tokens, child.tokens[-1]) == (
        [1, 2, 3, 4, 5, 6],
        7,
    )
    assert [blocks.counts[p] for p in (shared, tail, child.pages[1])] == [2, 1, 1]
    assert blocks.append(parent, [8]) == []  # nobody else holds it now


def test_full_pages_are_shared_without_a_copy():
    blocks = Blocks(3, 2)
    parent = filled(blocks, [1, 2])
    child = blocks.fork(parent)
    assert blocks.append(parent, [3]) == blocks.append(child, [4]) == []
    assert parent.pages[0] == child.pages[0] and parent.pages[1] != child.pages[1]


def test_a_page_written_over_can_no_longer_be_found():
    blocks = Blocks(2, 4)
    table = filled(blocks, [1, 2, 3, 4])
    blocks.truncate(table, 2)
    assert found(blocks, [1, 2, 3, 4, 5]) == 4  # it still holds what it held
    blocks.append(table, [9])
    assert found(blocks, [1, 2, 3, 4, 5]) == 0
    blocks.append(table, [9])
    blocks.commit(table)
    assert found(blocks, [1, 2, 9, 9, 5]) == 4


def test_out_of_pages_changes_nothing():
    blocks = Blocks(3, 2)
    blocks.release(filled(blocks, [5, 6]))
    table = filled(blocks, [1, 2, 3])
    child = blocks.fork(table)
    before = snapshot(blocks, table, child)
    with pytest.raises(OutOfPages, match="3 more tokens after 3 need 2 pages of 2, and 1 are"):
        blocks.append(child, [7, 8, 9])  # one more page, and a copy of the open one
    assert snapshot(blocks, table, child) == before
    assert len(blocks.append(child, [7])) == 1


def test_a_pool_without_a_prefix_cache_finds_nothing_and_frees_at_once():
    blocks = Blocks(2, 2, prefix_caching=False)
    blocks.release(filled(blocks, [1, 2, 3]))
    assert found(blocks, [1, 2, 3]) == 0 and len(blocks.free) == 2 and not blocks.idle


@pytest.mark.parametrize("name", ["num_pages", "page_size"])
@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "4", None])
def test_sizes_that_cannot_be_are_refused(name, bad):
    sizes = {"num_pages": 4, "page_size": 4, name: bad}
    with pytest.raises(ValueError, match=f"{name}={bad!r}: expected a whole number, at least 1"):
        Blocks(**sizes)


def test_a_table_given_back_is_refused_everywhere():
    """And a page is not freed twice."""
    blocks = Blocks(2, 2)
    table = filled(blocks, [1, 2, 3])
    blocks.release(table)
    before = snapshot(blocks, table)
    for act in (
        lambda: blocks.release(table),
        lambda: blocks.append(table, [1]),
        lambda: blocks.commit(table),
        lambda: blocks.fork(table),
        lambda: blocks.truncate(table, 0),
    ):
        with pytest.raises(ValueError, match=r"given back: begin\(\) another"):
            act()
    assert snapshot(blocks, table) == before


@pytest.mark.parametrize("bad", [-1, 4, 1.0, True, "2", None])
def test_lengths_that_cannot_be_are_refused(bad):
    blocks = Blocks(2, 2)
    table = filled(blocks, [1, 2, 3])
    before = snapshot(blocks, table)
    with pytest.raises(ValueError, match="of a table of 3 tokens"):
        blocks.truncate(table, bad)
    if bad is not None:  # None commits all
        with pytest.raises(ValueError, match="the table has 3 tokens"):
            blocks.commit(table, bad)
    assert snapshot(blocks, table) == before


def test_appending_nothing_takes_nothing():
    blocks = Blocks(1, 2)
    table = blocks.begin()
    assert blocks.append(table, []) == [] and table.pages == [] and blocks.available == 1


def test_what_is_forgotten_is_not_found_nor_is_what_stands_on_it():
    blocks = Blocks(8, 2)
    old = filled(blocks, [1, 2, 3, 4])
    blocks.release(filled(blocks, [7, 7]))
    fork = blocks.fork(old)
    blocks.forget()
    assert not blocks.idle and not blocks.cache.by_name and old.pages == fork.pages
    for table in (old, fork):
        blocks.append(table, [5, 6])
        blocks.commit(table)  # computed from keys that are stale
    assert found(blocks, [7, 7, 7]) == found(blocks, [1, 2, 3, 4, 5, 6, 7]) == 0
    new = filled(blocks, [1, 2, 3, 4])
    assert found(blocks, [1, 2, 3, 4, 5, 6, 7]) == 4
    for table in (old, fork, new):
        blocks.release(table)
    assert blocks.available == 8 and blocks.counts == [0] * 8


def test_a_table_of_another_allocator_is_refused():
    ours, theirs = Blocks(4, 2), Blocks(4, 2)
    table = filled(theirs, [1, 2, 3])
    for act in (ours.release, ours.fork, ours.commit, lambda t: ours.append(t, [1])):
        with pytest.raises(ValueError, match="another allocator"):
            act(table)
    assert ours.counts == [0] * 4 and len(table) == 3


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_tokens_of_arrays_and_tensors_are_found_as_numbers(kind):
    blocks = Blocks(8, 2)
    filled(blocks, kind([1, 2, 3, 4, 5]))
    assert found(blocks, [1, 2, 3, 4, 5]) == found(blocks, kind([1, 2, 3, 4, 9])) == 4
