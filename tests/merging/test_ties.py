"""TIES: the paper's three steps by plain loops, and mergekit's version of them restated."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.merging.conventions import PAPER
from lecture_util.merging.methods import METHODS, Context, settings
from lecture_util.merging.sparsify import trim
from lecture_util.merging.task_vectors import task_vector
from lecture_util.merging.ties import (
    balance,
    disjoint_mean,
    elect_signs,
    majority,
    sign_conflicts,
    ties,
)
from lecture_util.model.shapes import ShapeError

SHAPES = [(), (1,), (5,), (1, 5), (7, 1), (3, 5), (2, 3, 7), (0,)]
SMALL = st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=4)


def random(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def ties_by_loop(base, tuned, density, weights, scale, positive=False):
    """Section 4 of the paper on one vector; where the weighted sum is 0 the majority of all signs
    decides, as in the authors' code, or + always."""
    rows = []
    for each in tuned:
        row = [x - b for x, b in zip(each, base, strict=True)]
        kept = max(1, math.floor(density * len(row))) if density else 0
        order = sorted(range(len(row)), key=lambda i: abs(row[i]))
        rows.append([x if i in set(order[len(row) - kept :]) else 0 for i, x in enumerate(row)])
    sums = [sum(w * x for w, x in zip(weights, column, strict=True)) for column in zip(*rows)]  # noqa: B905
    up, down = sum(s > 0 for s in sums), sum(s < 0 for s in sums)
    if_zero = 1 if positive or up > down else -1
    out = []
    for b, s, column in zip(base, sums, zip(*rows, strict=True), strict=True):
        sign = (s > 0) - (s < 0) or if_zero
        agree = [(w, x) for w, x in zip(weights, column, strict=True) if w * x * sign > 0]
        weight = sum(abs(w) for w, _ in agree)
        out.append(b + scale * sum(w * x for w, x in agree) / (weight if weight else 1))
    return out


def test_ties_by_hand():
    base = torch.zeros(4)
    tuned = [torch.tensor(x) for x in ([3.0, -1.0, 0.5, 2.0], [-1.0, -2.0, 4.0, 0.1])]
    tuned.append(torch.tensor([2.0, 3.0, -0.2, -3.0]))
    # Two of four kept: [3, 0, 0, 2], [0, -2, 4, 0], [0, 3, 0, -3]; sums 3, 1, 4, -1; signs + + + -
    # means of what agrees: 3, 3, 4, -3
    trimmed = [trim(each, 0.5) for each in tuned]
    assert [each.tolist() for each in trimmed] == [[3, 0, 0, 2], [0, -2, 4, 0], [0, 3, 0, -3]]
    assert elect_signs(trimmed).tolist() == [1, 1, 1, -1]
    assert disjoint_mean(trimmed, elect_signs(trimmed)).tolist() == [3, 3, 4, -3]
    assert ties(base, tuned, density=0.5, scale=0.5).tolist() == [1.5, 1.5, 2, -1.5]
    assert ties(base, tuned, density=1.0).tolist() == [2.5, 3, 2.25, -3]  # -1 - 2 + 3: a draw
    signs = elect_signs(trimmed, [3, 1, 0.5])
    assert signs.tolist() == [1, -1, 1, 1]
    assert disjoint_mean(trimmed, signs, [3, 1, 0.5]).tolist() == [3, -2, 4, 2]


def test_the_mean_is_over_those_that_agree_and_move():
    deltas = [torch.tensor([4.0]), torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([-1.0])]
    assert disjoint_mean(deltas, torch.ones(1)).item() == 3  # not 6/3, not 6/4
    assert disjoint_mean(deltas, torch.ones(1), [1, 3, 5, 7]).item() == 10 / 4
    assert disjoint_mean(deltas[3:], torch.ones(1)).item() == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1.0, 1e100, 1e-100, 0.0])
@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 1.5, 0.7], [1.0, -0.99, -0.4]])
def test_ties_are_the_papers_three_steps(shape, size, density, weights):
    base, *tuned = (random(shape, i) * size for i in range(4))
    got = ties(base, tuned, density=density, weights=weights, scale=0.7)
    rows = [each.flatten().tolist() for each in tuned]
    want = ties_by_loop(base.flatten().tolist(), rows, density, weights, 0.7)
    want = torch.tensor(want, dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14 * size)


def test_a_negative_weight_takes_a_model_away_and_no_weights_make_a_change_grow():
    base, a, b = (random((101,), i) for i in range(3))
    away = ties(base, [a], density=1.0, weights=[-1])
    torch.testing.assert_close(away, base - (a - base), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(away, ties(base, [a], density=1.0, weights=[-0.3]))
    moved = ties(base, [a, b], density=1.0, weights=[1, -0.99]) - base
    most = torch.maximum((a - base).abs(), (b - base).abs())
    assert (moved.abs() <= most * (1 + 1e-12)).all()


@pytest.mark.parametrize("zero_sign", ["majority", "positive"])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, -1.5, 0.7]])
def test_the_version_to_read_is_what_recipes_run(zero_sign, weights):
    base, *tuned = ((2 * random((13, 7), i)).round() for i in range(4))  # with ties and zeros
    p = settings("ties", {"density": 0.4, "weight": weights, "lambda": 0.7}, 3, PAPER)
    got = METHODS["ties"].merge(base, tuned, p, Context(zero_sign=zero_sign))
    want = ties(base, tuned, density=0.4, weights=weights, scale=0.7, zero_sign=zero_sign)
    assert torch.equal(got, want)


@given(SMALL, st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.booleans())
def test_ties_with_many_equal_and_cancelling_entries(rows, density, positive):
    base, weights = [0.0] * 6, [1.0] * len(rows)
    tuned = [torch.tensor(row, dtype=torch.float64) for row in rows]
    zero_sign = "positive" if positive else "majority"
    got = ties(torch.zeros(6).double(), tuned, density=density, zero_sign=zero_sign)
    assert got.tolist() == pytest.approx(ties_by_loop(base, rows, density, weights, 1.0, positive))


@pytest.mark.parametrize("density", [0.1, 0.37, 1.0])
def test_mergekits_ties_restated(density):
    """Per tensor, signs of the weighted sum with 0 counting as +, over the agreeing weights."""
    base, *tuned = (random((13, 7), i, torch.float32) for i in range(4))
    weights = np.array([0.3, 0.9, 0.6], dtype=np.float32).reshape(3, 1)
    deltas = np.stack([(each - base).numpy().ravel() for each in tuned])
    for row in deltas:
        row[np.argsort(-np.abs(row))[max(1, int(density * 91)) :]] = 0
    moved = deltas * weights
    sign = np.where(moved.sum(0) >= 0, 1, -1)
    inside = np.sign(moved) == sign
    divisor = (weights * inside).sum(0)
    divisor[divisor == 0] = 1
    want = base.numpy().ravel() + (moved * inside).sum(0) / divisor
    got = ties(base, tuned, density=density, weights=[0.3, 0.9, 0.6], zero_sign="positive")
    torch.testing.assert_close(got.flatten(), torch.tensor(want), rtol=0, atol=1e-6)


# Signs


def test_a_sum_of_zero_takes_the_majority_of_all_signs_or_plus_or_a_given_sign():
    more_down = [torch.tensor([1.0, -1.0, -1.0, 0.0]), torch.tensor([-1.0, -1.0, -1.0, 0.0])]
    assert elect_signs(more_down).tolist() == [-1, -1, -1, -1]
    assert elect_signs(more_down, zero_sign="positive").tolist() == [1, -1, -1, 1]
    assert elect_signs(more_down, zero_sign=1).tolist() == [1, -1, -1, 1]
    assert elect_signs(more_down, zero_sign=-1).tolist() == [-1, -1, -1, -1]
    assert elect_signs(more_down, zero_sign=0).tolist() == [0, -1, -1, 0]
    more_up = [-d for d in more_down]
    assert elect_signs(more_up).tolist() == [1, 1, 1, 1]
    draw = [torch.tensor([1.0, -1.0, 0.0])]
    assert elect_signs(draw).tolist() == [1, -1, -1]  # 0 is not above 0
    assert [majority(n) for n in (-2, 0, 1)] == [-1, -1, 1]


def test_equal_and_opposite_entries_cancel_exactly():
    """x w - x w is 0 whatever the weight; a fused multiply-add would leave x's rounding error."""
    x = random((10_001,), 3, torch.float32)
    for w in (0.1, 0.3, 1 / 3):
        assert (elect_signs([x, -x], [w, w], zero_sign=0) == 0).all()


def test_weights_count_in_the_election():
    deltas = [torch.tensor([1.0, 1.0]), torch.tensor([-2.0, -0.5])]
    assert elect_signs(deltas).tolist() == [-1, 1]
    assert elect_signs(deltas, [3, 1]).tolist() == [1, 1]
    assert elect_signs(deltas, [1, 3]).tolist() == [-1, -1]
    assert elect_signs(deltas, [-1, 0]).tolist() == [-1, -1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_many_signs_are_counted_exactly_in_any_dtype(dtype):
    signs = torch.ones(150_001, dtype=dtype)  # beyond fp16, and odd
    signs[:75_000] = -1
    assert balance(signs) == 1
    signs[0] = 1
    assert balance(signs) == 3
    many = torch.ones(100_000, dtype=dtype)
    many[-1] = 0
    assert elect_signs([many])[-1] == 1


def test_conflicts_are_counted_among_the_entries_that_move():
    deltas = [torch.tensor([1.0, 1.0, 0.0, 0.0, -1.0]), torch.tensor([-1.0, 2.0, 0.0, 3.0, -1.0])]
    assert sign_conflicts(deltas) == 0.25
    assert sign_conflicts([torch.zeros(3)] * 2) == 0
    assert sign_conflicts([*deltas, torch.ones(5)]) == pytest.approx(2 / 5)


# What merging may be trusted to do


@given(st.integers(1, 4), st.sampled_from([0.2, 0.5, 1.0]), st.floats(0.1, 3))
def test_equal_models_give_one_trimmed_model_whatever_their_weights(count, density, weight):
    base, tuned = random((11,), 0), random((11,), 1)
    alone = base + trim(task_vector(base, tuned), density)
    got = ties(base, [tuned] * count, density=density, weights=[weight] * count)
    torch.testing.assert_close(got, alone, rtol=1e-13, atol=1e-14)
    assert torch.equal(ties(base, [base] * count), base)


@given(st.permutations(range(3)), st.lists(st.floats(0.1, 2), min_size=3, max_size=3))
def test_the_order_of_models_does_not_matter(order, weights):
    base, *tuned = (random((31,), i) for i in range(4))
    shuffled = ties(base, [tuned[i] for i in order], weights=[weights[i] for i in order])
    torch.testing.assert_close(shuffled, ties(base, tuned, weights=weights))


@given(st.integers(-9, 9))
def test_only_ratios_of_weights_count_and_the_scale_multiplies(exponent):
    base, *tuned = (random((31,), i) for i in range(4))
    once = ties(base, tuned, weights=[0.3, 1, 0.7], density=0.5)
    scaled = [w * 2.0**exponent for w in (0.3, 1, 0.7)]
    assert torch.equal(ties(base, tuned, weights=scaled, density=0.5), once)
    twice = ties(base, tuned, weights=scaled, density=0.5, scale=2.0)
    torch.testing.assert_close(twice - base, 2 * (once - base), rtol=1e-12, atol=1e-13)


def test_mirrored_models_give_the_mirrored_merge():
    base, *tuned = (random((31,), i) for i in range(4))
    got = ties(-base, [-each for each in tuned], density=0.5)
    torch.testing.assert_close(got, -ties(base, tuned, density=0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_models_are_merged_wide_and_rounded_once(dtype):
    base = random((101,), 0, dtype)
    tuned = [(base.double() + 0.1 * random((101,), i)).to(dtype) for i in (1, 2, 3)]
    got = ties(base, tuned, density=0.5, weights=[0.5, 0.3, 0.9])
    rows = [each.tolist() for each in tuned]
    want = torch.tensor(ties_by_loop(base.tolist(), rows, 0.5, [0.5, 0.3, 0.9], 1.0))
    assert got.dtype == dtype
    once = want.to(dtype).double()
    torch.testing.assert_close(got.double(), once, rtol=torch.finfo(dtype).eps, atol=0)


def test_nothing_given_is_changed():
    base, *tuned = (random((5,), i) for i in range(3))
    before = [x.clone() for x in (base, *tuned)]
    ties(base, tuned, weights=[1, 2], scale=3)
    elect_signs(tuned, [1, 2])
    assert all(torch.equal(x, y) for x, y in zip((base, *tuned), before, strict=True))


def test_what_cannot_be_is_refused():
    x = torch.ones(3)
    for zero_sign in ("postive", 2, None):
        with pytest.raises(ValueError, match=r"zero_sign is .*'majority', 'positive', 1, -1 or 0"):
            elect_signs([x], zero_sign=zero_sign)
    with pytest.raises(ValueError, match="sign_conflicts got no task vectors: pass at least one"):
        sign_conflicts([])
    with pytest.raises(ShapeError, match=r"task vector 1 is \(2,\) but task vector 0 is \(3,\)"):
        sign_conflicts([x, torch.ones(2)])
    with pytest.raises(ValueError, match="1 weights for 2 task vectors: expected one each"):
        ties(x, [x, x], weights=[1])
    with pytest.raises(ValueError, match="density is 2: expected the share"):
        ties(x, [x], density=2)


def test_equal_and_opposite_changes_cancel_whatever_their_weight():
    """A fused multiply-add would leave the product's rounding error, with its sign."""
    up = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert (elect_signs([up, -up], [0.3, 0.3], zero_sign=0) == 0).all()
