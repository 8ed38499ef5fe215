"""Soups: the weighted mean by a plain loop, once rounded, and the greedy choice by simulation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.merging.soups import greedy_soup, soup
from lecture_util.model.shapes import ShapeError, TensorMismatch

SHAPES = [(), (1,), (5,), (1, 5), (7, 1), (3, 5), (2, 3, 7), (0,), (4, 0)]
SIZES = {"plain": 1.0, "huge": 1e100, "tiny": 1e-100, "zero": 0.0}
HALF = [torch.float16, torch.bfloat16]


def random(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def mean_by_loop(tensors, weights, normalize):
    """sum w x / sum w, entry by entry in fp64 (each sum rounded once)."""
    rows = [tensor.double().numpy().ravel() for tensor in tensors]
    divisor = math.fsum(weights) if normalize else 1.0
    out = [
        math.fsum(w * float(row[i]) for w, row in zip(weights, rows, strict=True)) / divisor
        for i in range(rows[0].size)
    ]
    return torch.tensor(np.array(out).reshape(tensors[0].shape), dtype=torch.float64)


def ulps(got, exact):
    """By how many steps of its dtype `got` misses the fp64 number rounded once."""
    once = exact.to(got.dtype).double()
    step = torch.finfo(got.dtype).eps * 2.0 ** (torch.frexp(once).exponent - 1)
    return ((got.double() - once).abs() / step).max()


def test_a_soup_by_hand():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    assert soup([a, b]).tolist() == [2, 4]
    assert soup([a, b], [3, 1]).tolist() == [1.5, 3]
    assert soup([a, b], [1, -0.5], normalize=False).tolist() == [-0.5, -1]
    assert soup([a, b], [2, -1]).tolist() == [-1, -2]  # beyond a, away from b
    assert soup([a]).tolist() == [1, 2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_soup_is_the_weighted_mean(shape, size, normalize):
    tensors = [random(shape, i) * SIZES[size] for i in range(3)]
    weights = [0.3, 1.1, -0.2]
    mixed = soup(tensors, weights, normalize=normalize)
    assert mixed.shape == shape
    bound = 8 * 2.0**-53 * sum(tensor.abs() for tensor in tensors)
    assert ((mixed - mean_by_loop(tensors, weights, normalize)).abs() <= bound).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 0.5, 1.0]])
def test_16_bit_models_are_added_wide_and_rounded_once(dtype, weights):
    tensors = [random((101, 7), i).abs().to(dtype) for i in range(3)]
    mixed = soup(tensors, weights)
    assert mixed.dtype == dtype
    assert ulps(mixed, mean_by_loop(tensors, weights, True)) <= 1
    once = mean_by_loop(tensors, weights, True).to(dtype)
    assert (mixed != once).float().mean() < 0.01  # and off by that one step almost never


def test_fp32_models_are_averaged_within_three_roundings():
    tensors, weights = [random((101, 7), i).abs().float() for i in range(3)], [0.2, 0.5, 1.0]
    assert ulps(soup(tensors, weights), mean_by_loop(tensors, weights, True)) <= 3


def test_a_sum_of_16_bit_models_may_leave_their_range_on_the_way():
    large = torch.full((3,), 6e4, dtype=torch.float16)
    assert torch.equal(soup([large] * 4), large)


def test_the_dtype_is_the_first_models_and_the_arithmetic_at_least_fp32():
    wide, narrow = torch.tensor([1.0], dtype=torch.float64), torch.tensor([2.0]).bfloat16()
    assert soup([wide, narrow]).dtype == torch.float64
    assert soup([narrow, wide]).dtype == torch.bfloat16
    assert soup([wide + 1e-12, narrow.double()]).item() == pytest.approx(1.5 + 5e-13, abs=1e-16)


def test_normalised_weights_of_one_model_return_it_and_others_scale_it():
    w = random((5, 7), 0)
    torch.testing.assert_close(soup([w, w], [0.1, 1.0]), w, rtol=1e-15, atol=0)
    torch.testing.assert_close(soup([w, w], [0.1, 1.0], normalize=False), 1.1 * w)


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_soup_of_equal_models_is_that_model(weights, dtype):
    w = random((13,), 1, dtype)
    ulp = torch.finfo(dtype).eps if dtype in HALF else len(weights) * torch.finfo(dtype).eps
    torch.testing.assert_close(soup([w] * len(weights), weights), w, rtol=ulp, atol=0)


@given(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), st.permutations(range(3)))
def test_the_order_of_models_does_not_matter(weights, order):
    tensors = [random((11,), i) for i in range(3)]
    shuffled = soup([tensors[i] for i in order], [weights[i] for i in order])
    torch.testing.assert_close(shuffled, soup(tensors, weights), rtol=1e-12, atol=1e-14)


@given(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), st.integers(-20, 20))
def test_only_ratios_of_normalised_weights_count(weights, exponent):
    tensors, factor = [random((11,), i) for i in range(3)], 2.0**exponent  # scales without rounding
    scaled = [factor * w for w in weights]
    assert torch.equal(soup(tensors, scaled), soup(tensors, weights))
    twice = soup(tensors, scaled, normalize=False)
    assert torch.equal(twice, factor * soup(tensors, weights, normalize=False))


def test_a_soup_leaves_its_ingredients_alone():
    tensors = [random((5,), i) for i in range(2)]
    before = [tensor.clone() for tensor in tensors]
    soup(tensors, [0.4, 0.6])
    soup(tensors[:1])
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    single = soup(tensors[:1])
    single.zero_()
    assert torch.equal(tensors[0], before[0])


def test_soups_that_cannot_be_are_refused_with_the_reason():
    w = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"3 weights for 2 tensors: expected one each"):
        soup([w, w], [1, 2, 3])
    with pytest.raises(ValueError, match=r"0 weights for 0 tensors"):
        soup([])
    with pytest.raises(ValueError, match=r"\[1, -1\] sum to 0.*normalize=False, or use task_arith"):
        soup([w, w], [1, -1])
    assert soup([w, 3 * w], [1e-9, 1e-9]).tolist() == (2 * w).tolist()  # small is not zero
    for weights in ([0, 0], [1e20, -1e20], [1e-12, -1e-12]):
        with pytest.raises(ValueError, match="sum to 0"):
            soup([w, w], weights)
    assert soup([w, w], [1, -1], normalize=False).tolist() == torch.zeros(2, 3).tolist()
    with pytest.raises(ShapeError, match=r"tensor 1 is \(3,\) but tensor 0 is \(2, 3\)"):
        soup([w, torch.ones(3)])  # would broadcast
    assert soup([w, 3 * w], torch.tensor([1.0, 1.0])).tolist() == (2 * w).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_what_is_no_float_has_no_mean(dtype):
    odd = torch.ones(3).to(dtype)
    with pytest.raises(TensorMismatch, match=f"tensor 1 is {dtype}"):
        soup([torch.ones(3), odd])
    with pytest.raises(TensorMismatch, match=f"tensor 0 is {dtype}"):
        soup([odd, odd])
    with pytest.raises(TensorMismatch, match="tensor 0 is sparse: make it dense first"):
        soup([torch.ones(3).to_sparse()])
    with pytest.raises(TypeError, match="tensor 0 is a list: expected a tensor"):
        soup([[1.0]])


# Greedy soups


def greedy_by_hand(numbers, score, strict):
    """The paper's recipe on models of one number: sort, then try each in turn."""
    order = sorted(range(len(numbers)), key=lambda i: score(numbers[i]), reverse=True)
    bowl = [order[0]]
    for i in order[1:]:
        now = score(sum(numbers[j] for j in bowl) / len(bowl))
        then = score(sum(numbers[j] for j in [*bowl, i]) / (len(bowl) + 1))
        if then > now or (then == now and not strict):
            bowl.append(i)
    return bowl


def test_a_greedy_soup_by_hand():
    # Best is 1.1 alone; with .8 the mean is .95, nearer to 1; with 5 it would be far off.
    states = [{"w": torch.tensor([x], dtype=torch.float64)} for x in (5.0, 0.8, 1.1)]
    asked = []

    def score(state):
        asked.append(state["w"].item())
        return -abs(state["w"].item() - 1)

    found = greedy_soup(states, score)
    assert found.chosen == [2, 1]
    assert found.state["w"].item() == pytest.approx(0.95)
    assert [index for index, _ in found.tried] == [2, 1, 0]
    assert [s for _, s in found.tried] == pytest.approx([-0.1, -0.05, -1.3])
    assert found.score == pytest.approx(-0.05)
    assert asked == pytest.approx([5, 0.8, 1.1, 0.95, 2.3])  # 2N - 1 scores


@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=6),
    st.integers(-4, 4),
    st.booleans(),
)
def test_a_greedy_soup_takes_whom_the_recipe_takes(numbers, goal, strict):
    score = lambda x: -abs(round(x * 60) - 60 * goal)  # noqa: E731  (means of up to 6: exact)
    states = [{"w": torch.tensor(float(x), dtype=torch.float64)} for x in numbers]
    found = greedy_soup(states, lambda state: score(state["w"].item()), strict=strict)
    assert found.chosen == greedy_by_hand(numbers, score, strict)
    mean = sum(numbers[i] for i in found.chosen) / len(found.chosen)
    assert found.state["w"].item() == pytest.approx(mean)
    assert found.score == score(mean) >= max(map(score, numbers))
    assert len(found.tried) == len(numbers)


def test_a_tie_joins_by_the_paper_and_stays_out_by_the_authors_code():
    states = [{"w": torch.tensor(float(i))} for i in range(3)]
    assert greedy_soup(states, lambda state: 1.0).chosen == [0, 1, 2]
    assert greedy_soup(states, lambda state: 1.0, strict=True).chosen == [0]


def test_a_greedy_soup_of_one_is_that_model_and_of_none_is_refused():
    state = {"w": torch.ones(2), "steps": torch.tensor(7)}
    assert greedy_soup([state], lambda state: 0.0).state == state
    with pytest.raises(ValueError, match="greedy_soup got no states: pass at least one"):
        greedy_soup([], lambda state: 0.0)


def test_a_score_that_is_no_number_is_refused_with_the_models_place():
    states = [{"w": torch.tensor(x)} for x in (1.0, 2.0, 4.0)]
    scores = {1.0: 3.0, 2.0: math.nan, 4.0: 1.0}
    for order in ([0, 1, 2], [1, 0, 2]):
        at = order.index(1)
        with pytest.raises(ValueError, match=f"^state {at} scored NaN: expected a number"):
            greedy_soup([states[i] for i in order], lambda s: scores[s["w"].item()])
    scores = {1.0: 3.0, 2.0: 2.0, 4.0: 1.0, 1.5: math.nan}
    with pytest.raises(ValueError, match=r"the soup of states \[0, 1\] scored NaN"):
        greedy_soup(states, lambda s: scores[s["w"].item()])


def test_whole_numbers_are_not_averaged():
    steps = [7, 2**24 + 1]  # fp32 would lose the 1
    states = [{"w": torch.full((2,), x), "steps": torch.tensor(steps)} for x in (1.0, 2.0)]
    mixed = greedy_soup(states, lambda state: 0.0).state
    assert mixed["w"].tolist() == [1.5, 1.5]
    assert mixed["steps"].dtype == torch.int64 and mixed["steps"].tolist() == steps
    states[1]["steps"] = torch.tensor([7, 10])
    with pytest.raises(ValueError, match=r"steps holds whole numbers \(torch.int64\) and differs"):
        greedy_soup(states, lambda state: 0.0)
