"""Rows of one length: rented for a whole family, copied at a fork, back when it is over."""

import pytest

from lecture_util.model.config import Config
from lecture_util.serving.request import Params, Request, Running
from lecture_util.serving.slots import SlotCache, Slots

TINY = Config(D=8, F=8, K=1, G=1, H=4, L=1, V=11)


def family(id, samples=1, prompt=(1, 2, 3)):
    request = Request(prompt, Params(max_new_tokens=4, samples=samples))
    leader, *followers = (
        Running(id + sample, request, id, sample, list(prompt), 0.0) for sample in range(samples)
    )
    leader.followers = followers
    return leader


def snapshot(slots):
    return sorted(slots.free), dict(slots.rented), dict(slots.lengths), list(slots.copies)


def test_no_row_is_rented_twice_and_the_lowest_goes_first():
    slots = Slots(3, 8)
    one, two, three = family(0), family(1), family(2)
    assert [slots.begin(s) for s in (one, two, three)] == [0, 0, 0]
    assert [slots.table(s) for s in (one, two, three)] == [[0], [1], [2]]
    assert slots.begin(family(3)) is None
    slots.release(two)
    slots.release(one)
    four = family(4)
    assert slots.begin(four) == 0 and slots.table(four) == [0]


def test_a_family_that_does_not_fit_whole_takes_nothing():
    slots = Slots(3, 8)
    slots.begin(family(0))
    before = snapshot(slots)
    assert slots.begin(family(10, samples=3)) is None
    assert snapshot(slots) == before
    assert slots.begin(family(20, samples=2)) == 0 and not slots.free


def test_growth_past_the_row_is_refused_and_changes_nothing():
    slots, one = Slots(1, 4), family(0)
    slots.begin(one)
    assert slots.grow(one, 4) and slots.held() == (4, 4)
    before = snapshot(slots)
    assert not slots.grow(one, 5)
    assert snapshot(slots) == before
    assert slots.grow(one, 2) and slots.held() == (4, 4)
    assert slots.fits(4) and not slots.fits(5)


def test_a_fork_copies_the_row_once_and_is_let_go_alone():
    slots, one = Slots(2, 4), family(0, samples=2)
    slots.begin(one)
    slots.grow(one, 3)
    assert slots.held() == (3, 8)  # the follower's row is rented and still empty
    (child,), one.followers = one.followers, []
    slots.fork(one, child)
    assert slots.held() == (6, 8)
    assert slots.take_copies() == [(0, 1)] and slots.take_copies() == []
    slots.release(one)
    assert slots.table(child) == [1] and slots.held() == (3, 4)
    slots.release(child)
    slots.release(child)
    assert slots.held() == (0, 0) and sorted(slots.free) == [0, 1]


def test_a_family_that_is_over_before_its_fork_gives_all_rows_back():
    slots, one = Slots(3, 4), family(0, samples=3)
    slots.begin(one)
    slots.grow(one, 2)
    slots.release(one)
    assert snapshot(slots) == ([0, 1, 2], {}, {}, [])


def test_a_sequence_begins_once():
    slots, one = Slots(3, 4), family(0)
    slots.begin(one)
    before = snapshot(slots)
    with pytest.raises(ValueError, match="sequence 0 has begun already"):
        slots.begin(one)
    assert snapshot(slots) == before


def test_the_cache_is_a_slab_of_rows():
    cache = SlotCache(TINY, 5, 7)
    assert cache.k_LMPKH.shape == (1, 5, 7, 1, 4) and cache.nbytes == 2 * 5 * 7 * 4 * 4


@pytest.mark.parametrize("bad", [0, -1, 2.5, "4", None, True])
def test_sizes_that_cannot_be_are_refused(bad):
    for make in (Slots, lambda *sizes: SlotCache(TINY, *sizes)):
        with pytest.raises(ValueError, match=f"rows={bad!r}: expected a whole number"):
            make(bad, 4)
        with pytest.raises(ValueError, match=f"capacity={bad!r}: expected a whole number"):
            make(4, bad)
