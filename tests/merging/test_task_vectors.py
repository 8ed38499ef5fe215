"""Task vectors: differences, sums and angles, against plain loops in fp64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.merging.conventions import PAPER
from lecture_util.merging.methods import METHODS, Context, settings
from lecture_util.merging.soups import soup
from lecture_util.merging.task_vectors import (
    apply,
    combine,
    cosines,
    task_arithmetic,
    task_vector,
)
from lecture_util.model.shapes import ShapeError, TensorMismatch

SHAPES = [(), (1,), (5,), (1, 5), (7, 1), (3, 5), (2, 3, 7), (0,)]


def random(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def numbers(tensor):
    return [float(x) for x in tensor.double().flatten()]


def like(values, tensor):
    return torch.tensor(values, dtype=torch.float64).reshape(tensor.shape)


def arithmetic_by_loop(base, tuned, weights, scale, normalize=False):
    """w0 + lambda sum w_i (x_i - w0), each entry's sum exact."""
    divisor = math.fsum(weights) if normalize else 1.0
    out = []
    for i, b in enumerate(numbers(base)):
        moved = math.fsum(w * (numbers(x)[i] - b) for w, x in zip(weights, tuned, strict=True))
        out.append(b + scale * moved / divisor)
    return like(out, base)


def agreeing_by_loop(deltas, weights, signs, normalize):
    """The paper's disjoint mean: sum and weight over the models whose entry has the sign."""
    out = []
    for i, sign in enumerate(numbers(signs)):
        inside = [
            (w, numbers(d)[i])
            for w, d in zip(weights, deltas, strict=True)
            if w * numbers(d)[i] * sign > 0
        ]
        total, weight = math.fsum(w * x for w, x in inside), math.fsum(abs(w) for w, _ in inside)
        out.append(total / weight if normalize and weight else total)
    return like(out, signs)


def test_task_arithmetic_by_hand():
    base, a, b = (torch.tensor(x) for x in ([1.0, 1.0], [2.0, 1.0], [1.0, -1.0]))
    assert task_vector(base, a).tolist() == [1, 0]
    assert task_arithmetic(base, [a, b]).tolist() == [2, -1]  # both skills
    assert task_arithmetic(base, [a], [-1]).tolist() == [0, 1]  # one taken away
    assert task_arithmetic(base, [a, b], [1, 0.5], scale=2).tolist() == [3, -1]
    assert task_arithmetic(base, [a, b], normalize=True).tolist() == [1.5, 0]
    assert apply(base, torch.tensor([1.0, 2.0]), 0.5).tolist() == [1.5, 2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1.0, 1e100, 1e-100, 0.0])
@pytest.mark.parametrize("normalize", [False, True])
def test_task_arithmetic_is_the_papers_sum(shape, size, normalize):
    base, *tuned = (random(shape, i) * size for i in range(4))
    weights = [1.0, 0.4, -0.3]
    got = task_arithmetic(base, tuned, weights, scale=0.7, normalize=normalize)
    want = arithmetic_by_loop(base, tuned, weights, 0.7, normalize)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14 * size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_models_are_subtracted_wide_and_rounded_once(dtype):
    base = random((101,), 0, dtype)
    tuned = [(base.double() + 0.01 * random((101,), i)).to(dtype) for i in (1, 2, 3)]
    assert task_vector(base, tuned[0]).dtype == torch.float32
    exact = arithmetic_by_loop(base, tuned, [0.5, 0.3, 0.9], 0.7)
    got = task_arithmetic(base, tuned, [0.5, 0.3, 0.9], scale=0.7)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), exact.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=0
    )
    assert (got != exact.to(dtype)).float().mean() < 0.03
    wide = task_vector(base.double(), tuned[0])
    assert wide.dtype == torch.float64
    assert torch.equal(wide, tuned[0].double() - base.double())


def test_with_equal_weights_it_is_the_uniform_soup():
    base, *tuned = (random((3, 5), i) for i in range(4))
    torch.testing.assert_close(task_arithmetic(base, tuned, [1 / 3] * 3), soup(tuned))
    torch.testing.assert_close(task_arithmetic(base, tuned, normalize=True), soup(tuned))


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.permutations(range(3)))
def test_the_order_of_models_does_not_matter(weights, order):
    base, *tuned = (random((7,), i) for i in range(4))
    shuffled = task_arithmetic(base, [tuned[i] for i in order], [weights[i] for i in order])
    straight = task_arithmetic(base, tuned, weights)
    torch.testing.assert_close(shuffled, straight, rtol=1e-12, atol=1e-12)


@given(st.floats(-2, 2), st.floats(-2, 2))
def test_weights_add_up_and_the_scale_multiplies_them(weight, scale):
    base, tuned = random((7,), 0), random((7,), 1)
    twice = task_arithmetic(base, [tuned, tuned], [weight, 0.5])
    once = task_arithmetic(base, [tuned], [weight + 0.5])
    torch.testing.assert_close(twice, once, rtol=1e-12, atol=1e-12)
    scaled = task_arithmetic(base, [tuned], [weight], scale=scale)
    product = task_arithmetic(base, [tuned], [weight * scale])
    torch.testing.assert_close(scaled, product, rtol=1e-12, atol=1e-12)


def test_models_equal_to_the_base_return_it_and_one_full_step_the_fine_tune():
    base, tuned = random((5,), 0, torch.bfloat16), random((5,), 1, torch.bfloat16)
    assert torch.equal(task_arithmetic(base, [base, base], [0.4, -3]), base)
    assert torch.equal(task_arithmetic(base, [tuned]), tuned)
    forth = task_arithmetic(base.double(), [tuned.double()], [1.5])
    back = task_arithmetic(forth, [forth + task_vector(base, tuned)], [-1.5])
    torch.testing.assert_close(back, base.double())


# Sums of what agrees


def test_only_entries_of_the_elected_sign_are_added_by_hand():
    deltas = [torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([-5.0, -4.0, 2.0, 1.0])]
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert combine(deltas, signs=signs).tolist() == [1, -6, 2, 0]
    assert combine(deltas, signs=signs, normalize=True).tolist() == [1, -3, 2, 0]
    assert combine(deltas, [3, 1], signs=signs, normalize=True).tolist() == [1, -2.5, 2, 0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 1.5, 0.7], [1.0, -0.6, 0.3]])
def test_a_disjoint_sum_is_the_papers(shape, normalize, weights):
    deltas = [random(shape, i) * (random(shape, 9 + i) > -0.5) for i in range(3)]
    signs = random(shape, 50).sign()
    got = combine(deltas, weights, signs=signs, normalize=normalize)
    want = agreeing_by_loop(deltas, weights, signs, normalize)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


def test_the_sign_that_counts_is_that_of_the_weighted_entry():
    up, down = torch.tensor([2.0]), torch.tensor([-1.0])
    assert combine([up], [-1], signs=down).tolist() == [-2]
    assert combine([up], [-1], signs=-down).tolist() == [0]


def test_weights_that_sum_to_nothing_divide_by_one():
    a, b = torch.tensor([3.0]), torch.tensor([1.0])
    assert combine([a, b], [1, -1], normalize=True).tolist() == [2]
    one = torch.ones(1)
    both = combine([a, -b], [1, -1], signs=one, normalize=True, divisor="signed")
    assert both.tolist() == [4]


@given(st.integers(-20, 20), st.booleans())
def test_normalised_only_the_ratios_of_weights_count(exponent, elect):
    deltas, weights = [random((11,), i) for i in range(3)], [0.3, 1.0, 0.7]
    signs = random((11,), 5).sign() if elect else None
    scaled = combine(deltas, [w * 2.0**exponent for w in weights], signs=signs, normalize=True)
    assert torch.equal(scaled, combine(deltas, weights, signs=signs, normalize=True))


def test_nothing_given_is_changed():
    base, *tuned = (random((5,), i) for i in range(3))
    before = [x.clone() for x in (base, *tuned)]
    task_arithmetic(base, tuned, [1, 2], scale=3, normalize=True)
    combine(tuned, [1, 2], signs=torch.ones(5, dtype=torch.float64), normalize=True)
    apply(base, tuned[0], 2.0)
    assert all(torch.equal(x, y) for x, y in zip((base, *tuned), before, strict=True))


# Angles


def test_cosines_of_whole_models_are_numpys_of_the_flat_vectors():
    vectors = [{"a": random((3, 5), i), "b": random((7,), 50 + i)} for i in range(4)]
    flat = np.stack([np.concatenate([v["a"].numpy().ravel(), v["b"].numpy()]) for v in vectors])
    lengths = np.linalg.norm(flat, axis=1)
    want = flat @ flat.T / lengths / lengths[:, None]
    torch.testing.assert_close(cosines(vectors), torch.tensor(want))
    half = [{name: x.bfloat16() for name, x in v.items()} for v in vectors]
    torch.testing.assert_close(cosines(half), torch.tensor(want), rtol=0, atol=1e-2)


def test_cosines_by_hand():
    right, up, none = ({"w": torch.tensor(x)} for x in ([2.0, 0.0], [0.0, 5.0], [0.0, 0.0]))
    left = {"w": torch.tensor([-1.0, 0.0])}
    want = [[1, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]]
    assert cosines([right, up, left, none]).tolist() == want


def test_what_cannot_be_is_refused_with_the_reason():
    x = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"base is \(2, 3\) but tuned is \(3,\): a task vector"):
        task_vector(x, torch.ones(3))
    with pytest.raises(ValueError, match="3 weights for 2 task vectors: expected one each"):
        combine([x, x], [1, 2, 3])
    with pytest.raises(ValueError, match="0 weights for 0 task vectors"):
        combine([])
    with pytest.raises(ValueError, match="divisor is 'abs': expected 'magnitudes' or 'signed'"):
        combine([x], divisor="abs")
    with pytest.raises(ValueError, match="cosines got no task vectors: pass at least one"):
        cosines([])
    with pytest.raises(ShapeError, match=r"task vector 1 is \(3,\) but task vector 0 is \(2, 3\)"):
        combine([x, torch.ones(3)])  # would broadcast


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_only_floats_have_a_difference(dtype):
    """Whole numbers would wrap around, or be cut to 0 and 1, without a word."""
    x, odd = torch.ones(3), torch.ones(3).to(dtype)
    for pair in ((x, odd), (odd, x)):
        with pytest.raises(TensorMismatch, match=f"is {dtype}"):
            task_vector(*pair)
        with pytest.raises(TensorMismatch, match=f"is {dtype}"):
            apply(*pair)
        with pytest.raises(TensorMismatch, match=f"task vector . is {dtype}"):
            combine(pair)


def test_the_version_to_read_is_what_recipes_run():
    base, *tuned = (random((13, 7), i) for i in range(4))
    given = {"weight": [1.0, -0.4, 0.3], "lambda": 0.7}
    p = settings("task_arithmetic", given, 3, PAPER)
    got = METHODS["task_arithmetic"].merge(base, tuned, p, Context())
    assert torch.equal(got, task_arithmetic(base, tuned, [1.0, -0.4, 0.3], scale=0.7))


def test_among_those_that_agree_the_divisor_is_of_magnitudes_or_signed():
    deltas, weights = [torch.tensor([4.0]), torch.tensor([-2.0])], [1.0, -0.5]
    up = torch.ones(1)  # 4 and (-.5)(-2) = 1 agree
    assert combine(deltas, weights, signs=up, normalize=True).item() == pytest.approx(5 / 1.5)
    signed = combine(deltas, weights, signs=up, normalize=True, divisor="signed")
    assert signed.item() == pytest.approx(5 / 0.5)
    assert combine(deltas[1:], [-1], signs=up, normalize=True).item() == 2
    alone = combine(deltas[1:], [-1], signs=up, normalize=True, divisor="signed")
    assert alone.item() == -2  # as mergekit: whatever a single model's weight, it is added
