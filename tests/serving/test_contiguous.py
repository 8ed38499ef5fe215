"""First-fit regions against a strip of cells, each of which knows whose it is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.serving.contiguous import Regions, Waste, final_length
from lecture_util.serving.request import EndsAfter, Params, Request, Running
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.simulate import simulator


def sequence(id, prompt=3, most=8, ends=5):
    params = Params(max_new_tokens=most, stop=EndsAfter(ends))
    return Running(id, Request([1] * prompt, params), id, 0, [1] * prompt, 0.0)


def size_of(reserve, prompt, most, ends):
    """What a server would reserve; the last token drawn is never stored."""
    output = min(most, ends)
    if reserve == "pow2":
        power = 1
        while power < output:
            power *= 2
        output = min(power, most)
    return prompt + (most if reserve == "max" else output) - 1


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 12))


@settings(max_examples=100)
@given(
    reserve=st.sampled_from(["max", "pow2", "oracle"]),
    total=st.integers(1, 40),
    steps=st.lists(st.tuples(st.sampled_from("bbgr"), st.integers(0, 20), SIZES), max_size=30),
)
def test_regions_never_overlap_and_every_token_of_waste_is_accounted_for(reserve, total, steps):
    regions, cells, live = Regions(total, reserve), [None] * total, []
    for number, (act, which, (prompt, most, ends)) in enumerate(steps):
        if act == "b":
            one, size = sequence(number, prompt, most, ends), size_of(reserve, prompt, most, ends)
            gaps = [i for i in range(total - size + 1) if set(cells[i : i + size]) <= {None}]
            before = regions.held(), dict(regions.regions)
            assert regions.begin(one) == (0 if gaps else None)
            if gaps:  # the lowest
                cells[gaps[0] : gaps[0] + size] = [number] * size
                assert regions.regions[number] == (gaps[0], size)
                live.append((one, [0], prompt + min(most, ends) - 1))
            else:
                assert (regions.held(), dict(regions.regions)) == before
        elif live and act == "g":
            one, length, final = live[which % len(live)]
            length[0] = max(length[0], min(final, 1 + which))
            assert regions.grow(one, length[0])
        elif live:
            one, *_ = live.pop(which % len(live))
            regions.release(one)
            cells = [None if owner == one.id else owner for owner in cells]
        stored = sum(length for _, (length,), _ in live)
        to_come = sum(final - length for _, (length,), final in live)
        lent = sum(owner is not None for owner in cells)
        assert regions.held() == (stored, lent)
        waste = regions.waste()
        assert waste == Waste(stored, to_come, lent - stored - to_come, total - lent)
        assert waste.total == total and min(vars(waste).values()) >= 0
    for one, *_ in live:
        regions.release(one)
    assert regions.waste() == Waste(0, 0, 0, total)


def test_neighbouring_gaps_are_one_gap():
    regions = Regions(12)
    three = [sequence(i, prompt=1, most=4) for i in range(3)]
    for one in three:
        assert regions.begin(one) == 0
    large = sequence(9, prompt=1, most=8)
    regions.release(three[0])
    assert regions.begin(large) is None
    regions.release(three[1])
    assert regions.begin(large) == 0 and regions.regions[9] == (0, 8)


def test_enough_room_in_pieces_is_not_enough():
    """External fragmentation: 8 tokens are free, and a region of 5 finds no place."""
    regions = Regions(12)
    three = [sequence(i, prompt=1, most=4) for i in range(3)]
    for one in three:
        regions.begin(one)
    regions.release(three[0])
    regions.release(three[2])
    assert regions.waste().external == 8
    assert regions.begin(sequence(9, prompt=1, most=5)) is None


@pytest.mark.parametrize(
    "reserve, waste",
    [
        ("max", Waste(10, 4, 8 - 5, 100 - 17)),
        ("pow2", Waste(10, 4, 8 - 5, 100 - 17)),
        ("oracle", Waste(10, 4, 0, 100 - 14)),
    ],
)
def test_the_parts_of_the_waste_by_hand(reserve, waste):
    """A prompt of 10 that may get 8 tokens and will end after 5: 14 are ever stored."""
    regions, one = Regions(100, reserve), sequence(0, prompt=10, most=8, ends=5)
    regions.begin(one)
    regions.grow(one, 10)
    assert regions.waste() == waste


def test_the_reserves_are_ordered():
    one = sequence(0, prompt=10, most=100, ends=5)
    sizes = {}
    for reserve in ("max", "pow2", "oracle"):
        regions = Regions(200, reserve)
        regions.begin(one)
        sizes[reserve] = regions.held()[1]
    assert sizes == {"max": 109, "pow2": 17, "oracle": 14}


def test_growth_past_the_region_is_refused_and_changes_nothing():
    regions, one = Regions(20, "oracle"), sequence(0, prompt=3, most=8, ends=5)
    regions.begin(one)
    assert regions.grow(one, 7)
    before = regions.waste()
    assert not regions.grow(one, 8) and regions.waste() == before


@pytest.mark.parametrize("ends, final", [(1, 3), (2, 4), (8, 10), (9, 10), (99, 10)])
def test_the_last_token_drawn_is_never_stored(ends, final):
    assert final_length(sequence(0, prompt=3, most=8, ends=ends)) == final


def test_a_text_whose_end_nobody_knows_is_refused_before_anything_changes():
    regions = Regions(20)
    one = Running(0, Request([1, 2]), 0, 0, [1, 2], 0.0)
    with pytest.raises(ValueError, match=r"stop=None: only a request with stop=EndsAfter\(n\)"):
        regions.begin(one)
    assert regions.held() == (0, 0) and regions.waste() == Waste(0, 0, 0, 20)


def test_regions_cannot_be_shared():
    regions, one = Regions(20), sequence(0)
    regions.begin(one)
    with pytest.raises(NotImplementedError, match="one sample a request"):
        regions.fork(one, sequence(1))


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_a_memory_of_no_size_is_refused(bad):
    with pytest.raises(ValueError, match=f"total_tokens={bad!r}: expected a whole number"):
        Regions(bad)


def test_an_unknown_reserve_is_refused():
    with pytest.raises(ValueError, match="reserve='huge': expected one of max, pow2, oracle"):
        Regions(20, "huge")
    assert Regions(20).fits(20) and not Regions(20).fits(21)


def test_what_regions_cannot_serve_is_refused_when_it_is_submitted():
    loop = simulator(Regions(40), Policy(slots=2))
    for params, says in (
        (Params(4, stop=EndsAfter(2), samples=2), "cannot be shared"),
        (Params(4), "tells where it will end"),
    ):
        with pytest.raises(ValueError, match=says):
            loop.submit(Request([1, 2], params))
    assert not loop.busy
    (c,) = loop.serve([Request([1, 2], Params(4, stop=EndsAfter(2)))])
    assert c.num_tokens == 2
