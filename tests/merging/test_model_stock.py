"""Model Stock: the paper's ratio, the geometry it comes from, and where the tool differs."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.merging.model_stock import mean_cosine, model_stock, periodic_stock, stock_ratio
from lecture_util.model.shapes import ShapeError

SHAPES = [(1,), (5,), (1, 5), (7, 1), (3, 5), (2, 3, 7)]


def random(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def cosine(x, y):
    length = math.sqrt(math.fsum(a * a for a in x)) * math.sqrt(math.fsum(b * b for b in y))
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / length if length else 0.0


def stock_by_loop(base, tuned, clamp=True):
    """One vector: t = N cos / (1 + (N-1) cos), then t mean + (1-t) base."""
    N = len(tuned)
    offsets = [[x - b for x, b in zip(each, base, strict=True)] for each in tuned]
    pairs = list(itertools.combinations(offsets, 2))
    mean = sum(cosine(x, y) for x, y in pairs) / len(pairs)
    below = 1 + (N - 1) * mean
    t = 0.0 if abs(below) < 1e-6 else N * mean / below
    if clamp:
        t = 0.0 if mean <= 0 else min(1.0, max(0.0, t))
    return [
        t * sum(column) / N + (1 - t) * b
        for b, column in zip(base, zip(*tuned, strict=True), strict=True)
    ]


def rows(tensor, width=None):
    return tensor.reshape(-1, tensor.numel() if width is None else width).tolist()


def test_the_ratio_by_hand():
    assert stock_ratio(0.5, 2).item() == pytest.approx(2 / 3)
    assert stock_ratio(0.5, 4).item() == pytest.approx(0.8)
    assert [stock_ratio(c, 3).item() for c in (1.0, 0.0)] == [1, 0]
    assert stock_ratio(1, 2).item() == 1
    both = stock_ratio(torch.tensor([0.5, 1.0]), 2)
    torch.testing.assert_close(both, torch.tensor([2 / 3, 1.0]))


def test_below_zero_the_ratio_stays_at_the_base_or_extrapolates_as_the_tool():
    assert stock_ratio(-0.5, 2).item() == 0 == stock_ratio(-0.9, 2).item()
    assert stock_ratio(-0.5, 2, bounds="unbounded").item() == pytest.approx(-2)
    assert stock_ratio(-0.9, 3, bounds="unbounded").item() == pytest.approx(2.7 / 0.8)
    assert stock_ratio(-0.9, 3).item() == 0  # beyond the pole the formula says 3.4
    for N in (2, 3, 5):  # at the pole itself both stay
        for bounds in ("clamped", "unbounded"):
            assert stock_ratio(-1 / (N - 1), N, bounds=bounds).item() == 0


@given(st.floats(-1, 1), st.integers(2, 8))
def test_the_ratio_rises_from_the_base_to_the_mean_with_the_cosine_and_the_models(c, N):
    t = stock_ratio(c, N).item()
    assert 0 <= t <= 1
    assert t <= stock_ratio(c, N + 1).item() + 1e-6
    assert t <= stock_ratio(min(1.0, c + 0.01), N).item() + 1e-6
    unbounded = stock_ratio(c, N, bounds="unbounded").item()
    if c >= 0:
        assert t == unbounded
    if c > 1e-6:
        assert t == pytest.approx(1 / ((1 / c + N - 1) / N), rel=1e-5)


@pytest.mark.parametrize("N", [2, 3, 5])
def test_the_merge_is_the_point_next_to_the_centre(N):
    """Fine-tunes around a centre, at one distance, all differences at right angles: the point on
    the way from the base to their mean that is nearest to the centre, found by projection."""
    axes = torch.linalg.qr(random((9, 9), 1)).Q
    base, centre = random((9,), 2), None
    centre = base + 1.7 * axes[0]
    tuned = [centre + 0.9 * axes[1 + i] for i in range(N)]
    way = sum(tuned) / N - base
    nearest = base + way * (way @ (centre - base)) / (way @ way)
    torch.testing.assert_close(model_stock(base, tuned), nearest)


def test_model_stock_by_hand():
    base = torch.tensor([1.0, 1.0])
    tuned = [torch.tensor([3.0, 1.0]), torch.tensor([1 + 1.0, 1 + math.sqrt(3)])]
    want = base + (2 / 3) * torch.tensor([1.5, math.sqrt(3) / 2])  # 60 degrees apart
    torch.testing.assert_close(model_stock(base, tuned), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("N", [2, 3, 4])
@pytest.mark.parametrize(
    "bounds,size",
    # the tool's floor takes over for tiny ones: see below
    [*(("clamped", size) for size in (1.0, 1e100, 1e-100, 0.0)), ("unbounded", 1.0)],
)
def test_model_stock_is_the_papers_formula(shape, size, N, bounds):
    base, shared = random(shape, 0) * size, random(shape, 9) * size
    tuned = [base + 0.6 * shared + 0.5 * size * random(shape, i) for i in range(1, N + 1)]
    got = model_stock(base, tuned, bounds=bounds)
    want = stock_by_loop(rows(base)[0], [rows(each)[0] for each in tuned], bounds == "clamped")
    want = torch.tensor(want, dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11 * size)


@pytest.mark.parametrize("shape", SHAPES)
def test_per_filter_every_row_has_its_own_ratio(shape):
    base = random(shape, 0)
    tuned = [base + random(shape, 9) + random(shape, i) for i in (1, 2, 3)]
    width = shape[-1]
    parts = [rows(each, width) for each in (base, *tuned)]
    want = [stock_by_loop(first, rest) for first, *rest in zip(*parts, strict=True)]
    got = model_stock(base, tuned, per_filter=True)
    want = torch.tensor(want, dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_a_number_is_a_vector_of_one():
    base, up = torch.tensor(1.0), torch.tensor(3.0)
    for per_filter in (False, True):
        assert model_stock(base, [up, up + 1], per_filter=per_filter).item() == 3.5
        assert model_stock(base, [up, -up], per_filter=per_filter).item() == 1.0


def test_fine_tunes_near_the_base_have_an_angle_which_the_tools_floor_takes_away():
    """Offsets of length 1e-4: their product is 1e-8, and the tool divides by 1e-6 at least."""
    base = torch.zeros(100, dtype=torch.float64)
    offset = torch.full((100,), 1e-5, dtype=torch.float64)
    tuned = [base + offset] * 2
    torch.testing.assert_close(model_stock(base, tuned), offset, rtol=1e-9, atol=0)
    torch.testing.assert_close(mean_cosine([offset] * 2, floor=1e-6).item(), 0.01)
    theirs = model_stock(base, tuned, bounds="unbounded")
    torch.testing.assert_close(theirs, offset * 0.02 / 1.01, rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 7)])
@pytest.mark.parametrize("per_filter", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_mergekits_model_stock_restated(shape, per_filter, size):
    """Pairs' cosines over norms whose product is at least 1e-6, no bounds on t."""
    base = random(shape, 0).numpy()
    tuned = [base + size * random(shape, i).numpy() for i in (1, 2, 3)]
    last = shape if per_filter else (base.size,)
    offsets = [(each - base).reshape(-1, last[-1]) for each in tuned]
    cosines = []
    for x, y in itertools.combinations(offsets, 2):
        product = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        cosines.append(np.clip((x * y).sum(1) / np.maximum(product, 1e-6), -1, 1))
    c = np.mean(cosines, axis=0)[:, None]
    t = 3 * c / (1 + 2 * c)
    mean = sum(tuned).reshape(-1, last[-1]) / 3
    want = t * mean + (1 - t) * base.reshape(-1, last[-1])
    got = model_stock(
        torch.tensor(base),
        [torch.tensor(each) for each in tuned],
        per_filter=per_filter,
        bounds="unbounded",
    )
    torch.testing.assert_close(got, torch.tensor(want).reshape(shape), rtol=1e-10, atol=1e-11)


# Cosines


@pytest.mark.parametrize("N", [2, 3, 4])
def test_the_mean_cosine_is_over_all_pairs(N):
    offsets = [random((3, 5), i) for i in range(N)]
    pairs = list(itertools.combinations(offsets, 2))
    rows = [[(x[r].tolist(), y[r].tolist()) for x, y in pairs] for r in range(3)]
    want = [sum(cosine(x, y) for x, y in row) / len(row) for row in rows]
    torch.testing.assert_close(mean_cosine(offsets), torch.tensor(want, dtype=torch.float64))


def test_a_pair_with_a_zero_vector_counts_as_nothing_shared():
    one, zero = torch.ones(1, 3), torch.zeros(1, 3)
    assert mean_cosine([one, zero]).item() == 0
    assert mean_cosine([one, one, zero]).item() == pytest.approx(1 / 3)
    assert mean_cosine([zero, zero]).item() == 0


@given(st.integers(0, 99), st.integers(-30, 30))
def test_cosines_do_not_depend_on_lengths_or_leave_their_range(seed, exponent):
    x, y = random((1, 4), seed, torch.float32), random((1, 4), seed + 100, torch.float32)
    near = mean_cosine([x, y]).item()
    assert mean_cosine([x * 2.0**exponent, y]).item() == pytest.approx(near, abs=1e-6)
    assert mean_cosine([x, x]).item() <= 1 and mean_cosine([x, -x]).item() >= -1


# What merging may be trusted to do


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("per_filter", [False, True])
def test_equal_models_merge_to_themselves_and_to_the_base_if_nothing_moved(dtype, per_filter):
    base, tuned = random((3, 5), 0, dtype), random((3, 5), 1, dtype)
    for N in (2, 3):
        got = model_stock(base, [tuned] * N, per_filter=per_filter)
        eps = torch.finfo(dtype).eps
        assert got.dtype == dtype
        torch.testing.assert_close(got, tuned, rtol=4 * eps, atol=4 * eps)
        assert torch.equal(model_stock(base, [base] * N, per_filter=per_filter), base)


@given(st.permutations(range(3)))
def test_the_order_of_models_does_not_matter(order):
    base, *tuned = (random((3, 5), i) for i in range(4))
    shuffled = model_stock(base, [tuned[i] for i in order], bounds="unbounded")
    torch.testing.assert_close(shuffled, model_stock(base, tuned, bounds="unbounded"))


def test_opposite_fine_tunes_leave_the_base():
    base, step = random((5,), 0), random((5,), 1)
    assert torch.equal(model_stock(base, [base + step, base - step]), base)
    torch.testing.assert_close(
        model_stock(base, [base + step, base - step], bounds="unbounded"), base
    )


def test_nothing_given_is_changed():
    base, *tuned = (random((5,), i) for i in range(3))
    before = [x.clone() for x in (base, *tuned)]
    model_stock(base, tuned)
    assert all(torch.equal(x, y) for x, y in zip((base, *tuned), before, strict=True))


# Periodic merging


def test_periodic_merging_starts_each_round_from_the_merge_and_looks_from_the_base():
    base = {"w": random((5,), 0), "steps": torch.tensor([3, 4])}
    calls = []

    def tune(start, model, number):
        calls.append((model, number, start["w"].clone()))
        step = random((5,), 10 * number + model) + 1
        return {"w": start["w"] + step, "steps": start["steps"]}

    got = periodic_stock(base, tune, models=3, rounds=2)
    assert [call[:2] for call in calls] == [(m, r) for r in range(2) for m in range(3)]
    start = base["w"]
    for number in range(2):
        here = [call[2] for call in calls if call[1] == number]
        assert all(torch.equal(each, start) for each in here)
        tuned = [start + random((5,), 10 * number + model) + 1 for model in range(3)]
        merged = stock_by_loop(base["w"].tolist(), [each.tolist() for each in tuned])
        start = calls[3][2] if number == 0 else got["w"]
        torch.testing.assert_close(start, torch.tensor(merged, dtype=torch.float64))
    assert got["steps"].tolist() == [3, 4] and got["steps"].dtype == torch.int64


def test_no_round_is_the_base():
    base = {"w": torch.ones(2)}
    assert periodic_stock(base, None, rounds=0) == base


def test_what_cannot_be_is_refused_with_the_reason():
    x = torch.ones(2, 3)
    for tuned in ([], [x]):
        with pytest.raises(ValueError, match=r"fine-tune: the angle takes at least 2 beside the"):
            model_stock(x, tuned)
    with pytest.raises(ShapeError, match=r"base is \(2, 3\) but tuned is \(3,\)"):
        model_stock(x, [x, torch.ones(3)])
    for call in (
        lambda b: model_stock(x, [x, x], bounds=b),
        lambda b: stock_ratio(0.5, 2, bounds=b),
    ):
        with pytest.raises(ValueError, match="bounds is 'clamp': expected 'clamped' or 'unbound"):
            call("clamp")
    with pytest.raises(ValueError, match="N=0: expected the number of fine-tunes, at least 1"):
        stock_ratio(0.5, 0)
