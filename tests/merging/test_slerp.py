"""SLERP against SciPy's, the textbook formula in fp64, and the angles it promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.spatial import geometric_slerp

from lecture_util.merging.slerp import angle, lerp, slerp
from lecture_util.model.shapes import ShapeError, TensorMismatch

SHAPES = [(2,), (5,), (1, 5), (7, 1), (3, 5), (2, 3, 7)]
TS = [0.0, 0.1, 0.5, 0.77, 1.0]


def random(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def at_degrees(degrees, length=1.0):
    a = math.radians(degrees)
    return length * torch.tensor([math.cos(a), math.sin(a)], dtype=torch.float64)


def arc(v0, v1, t):
    """The formula by plain loops in fp64, with arccos (so not for tiny angles)."""
    x, y = [float(i) for i in v0.flatten()], [float(i) for i in v1.flatten()]
    lengths = [math.sqrt(math.fsum(i * i for i in v)) for v in (x, y)]
    cosine = math.fsum(i * j for i, j in zip(x, y, strict=True)) / lengths[0] / lengths[1]
    a = math.acos(cosine)
    c0, c1 = math.sin((1 - t) * a) / math.sin(a), math.sin(t * a) / math.sin(a)
    mixed = [c0 * i + c1 * j for i, j in zip(x, y, strict=True)]
    return torch.tensor(mixed, dtype=torch.float64).reshape(v0.shape)


def as_the_tool(v0, v1, t):
    """mergekit: a vector without length stays as it is, nearly parallel or opposite ones go
    straight, coefficients multiply the vectors themselves. Here in fp64; the tool's fp32 arccos
    is some 1e-7/sin(angle) off."""
    x, y = v0.numpy().ravel(), v1.numpy().ravel()
    units = []
    for v in (x, y):
        length = np.linalg.norm(v)
        units.append(v / length if length > 1e-8 else v)
    dot = float(np.clip(units[0] @ units[1], -1, 1))
    if abs(dot) > 0.9995:
        c0, c1 = 1 - t, t
    else:
        a = math.acos(dot)
        c0, c1 = math.sin((1 - t) * a) / math.sin(a), math.sin(t * a) / math.sin(a)
    return torch.tensor(c0 * x + c1 * y).reshape(v0.shape)


def test_slerp_by_hand():
    root = math.sqrt(0.5)
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    torch.testing.assert_close(slerp(x, y, 0.5), torch.tensor([root, root]))
    torch.testing.assert_close(slerp(3 * x, y, 0.5), torch.tensor([3 * root, root]))
    third = slerp(x, y, 1 / 3)
    torch.testing.assert_close(third, torch.tensor([math.cos(math.pi / 6), 0.5]))
    assert lerp(x, y, 0.25).tolist() == [0.75, 0.25]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", TS)
@pytest.mark.parametrize("size", [1.0, 1e100, 1e-100])
def test_slerp_is_the_textbook_formula_on_the_whole_tensor(shape, t, size):
    v0, v1 = random(shape, 0), random(shape, 1) * 3
    mixed = slerp(v0 * size, v1 * size, t)
    assert mixed.shape == shape
    torch.testing.assert_close(mixed, arc(v0, v1, t) * size, rtol=1e-12, atol=1e-13 * size)
    flat = slerp((v0 * size).flatten(), (v1 * size).flatten(), t)
    torch.testing.assert_close(mixed.flatten(), flat, rtol=1e-13, atol=0)


@pytest.mark.parametrize("n", [2, 3, 17])
@pytest.mark.parametrize("t", TS)
def test_unit_vectors_go_where_scipy_goes(n, t):
    ends = [random((n,), seed) for seed in (3, 4)]
    ends = [v / v.norm() for v in ends]
    theirs = geometric_slerp(*(v.numpy() for v in ends), t)
    torch.testing.assert_close(slerp(*ends, t), torch.tensor(theirs), rtol=1e-12, atol=1e-13)


@given(st.floats(0.001, 179.999), st.floats(0, 1), st.floats(0.01, 100))
def test_equal_lengths_stay_equal_and_the_angle_grows_evenly(degrees, t, length):
    v0, v1 = at_degrees(0, length), at_degrees(degrees, length)
    mixed = slerp(v0, v1, t)
    assert mixed.norm().item() == pytest.approx(length, rel=1e-9)
    turned = math.degrees(math.atan2(mixed[1].item(), mixed[0].item()))
    assert turned == pytest.approx(t * degrees, abs=1e-9)


@given(st.integers(0, 50), st.floats(0, 1), st.integers(-9, 9))
def test_slerp_can_be_walked_backwards_and_scaled(seed, t, exponent):
    v0, v1, factor = random((5,), seed), random((5,), seed + 99), 2.0**exponent
    torch.testing.assert_close(slerp(v0, v1, t), slerp(v1, v0, 1 - t), rtol=1e-9, atol=1e-12)
    scaled = slerp(factor * v0, factor * v1, t)
    torch.testing.assert_close(scaled, factor * slerp(v0, v1, t), rtol=1e-12, atol=0)


@pytest.mark.parametrize("nearly", ["exact", "lerp"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 5)])
def test_equal_models_merge_to_themselves_and_t_0_and_1_are_the_ends(nearly, shape):
    v = random(shape, 5)
    torch.testing.assert_close(slerp(v, v, 0.3, nearly=nearly), v, rtol=1e-15, atol=0)
    w = random(shape, 6)
    torch.testing.assert_close(slerp(v, w, 0.0, nearly=nearly), v, rtol=1e-15, atol=1e-16)
    torch.testing.assert_close(slerp(v, w, 1.0, nearly=nearly), w, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("nearly", ["exact", "lerp"])
@pytest.mark.parametrize("factor", [2.0, 1.0, -1.0, -0.5])
def test_parallel_and_opposite_tensors_go_straight(nearly, factor):
    v = random((7,), 8)
    for t in TS:
        mixed = slerp(v, factor * v, t, nearly=nearly)
        torch.testing.assert_close(mixed, v * (1 - t + factor * t), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_a_zero_tensor_has_no_direction_so_the_way_is_straight(shape):
    v, zero = random(shape, 9), torch.zeros(shape, dtype=torch.float64)
    torch.testing.assert_close(slerp(zero, v, 0.5), 0.5 * v)
    torch.testing.assert_close(slerp(v, zero, 0.25), 0.75 * v)
    root = math.sqrt(0.5)  # the tool takes the angle for 90 degrees
    torch.testing.assert_close(slerp(zero, v, 0.5, nearly="lerp"), root * v)
    torch.testing.assert_close(slerp(v, zero, 0.5, nearly="lerp"), root * v)
    assert slerp(zero, zero, 0.3).eq(0).all() and slerp(zero, zero, 0.3, nearly="lerp").eq(0).all()


def test_within_two_degrees_the_tool_goes_straight_and_the_formula_does_not():
    v0 = at_degrees(0)
    for degrees in (1.7, 178.3):
        v1 = at_degrees(degrees)
        straight = lerp(v0, v1, 0.3)
        assert torch.equal(slerp(v0, v1, 0.3, nearly="lerp"), straight)
        exact = slerp(v0, v1, 0.3)
        torch.testing.assert_close(exact, at_degrees(0.3 * degrees), rtol=1e-12, atol=1e-12)
        assert (exact - straight).abs().max() > 1e-6
    for degrees in (1.9, 178.1):
        v1 = at_degrees(degrees)
        torch.testing.assert_close(slerp(v0, v1, 0.3, nearly="lerp"), slerp(v0, v1, 0.3))


@pytest.mark.parametrize("degrees", [0, 1e-5, 1, 1.8, 1.83, 60, 90, 150, 178.1, 178.3, 180])
@pytest.mark.parametrize("t", TS)
def test_the_tools_convention_restated(degrees, t):
    v0, v1 = at_degrees(20, 2.0), at_degrees(20 + degrees, 0.7)
    ours, theirs = slerp(v0, v1, t, nearly="lerp"), as_the_tool(v0, v1, t)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    for tiny in (1e-9, 0.0):
        ours, theirs = slerp(v0, v1 * tiny, t, nearly="lerp"), as_the_tool(v0, v1 * tiny, t)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def test_the_angle_is_right_where_arccos_of_a_cosine_is_not():
    for a in (1e-9, 1e-6, 1e-3, 1.0, math.pi / 2, 3.0, math.pi - 1e-6):
        v = torch.tensor([math.cos(a), math.sin(a)], dtype=torch.float64)
        ahead = torch.tensor([3.0, 0.0], dtype=torch.float64)
        assert angle(ahead, v) == pytest.approx(a, rel=1e-9)
    assert angle(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3e-5])) == pytest.approx(3e-5)
    assert angle(torch.ones(3), -torch.ones(3)) == pytest.approx(math.pi)
    assert angle(torch.ones(3), torch.zeros(3)) == 0 == angle(torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1e20, 1e30])
def test_lengths_whose_squares_leave_fp32_still_have_an_angle(size):
    v0, v1 = torch.tensor([size, 0.0]), torch.tensor([size, size])
    assert angle(v0, v1) == pytest.approx(math.pi / 4, rel=1e-6)
    turned = slerp(v0, torch.tensor([0.0, size]), 0.5)
    torch.testing.assert_close(turned / size, torch.full((2,), math.sqrt(0.5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", [slerp, lerp])
def test_16_bit_models_are_rounded_once(dtype, method):
    v0, v1 = random((101,), 1, dtype).abs(), random((101,), 2, dtype).abs()
    exact = arc if method is slerp else lambda x, y, t: 0.7 * x.double() + 0.3 * y.double()
    once = exact(v0, v1, 0.3).to(dtype)
    mixed = method(v0, v1, 0.3)
    assert mixed.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mixed.double(), once.double(), rtol=eps, atol=0)
    assert (mixed != once).float().mean() < 0.03


def test_the_dtype_is_the_first_tensors_and_both_stay_as_they_are():
    v0, v1 = random((5,), 1).bfloat16(), random((5,), 2)
    before = v0.clone(), v1.clone()
    assert slerp(v0, v1, 0.4).dtype == torch.bfloat16 and slerp(v1, v0, 0.4).dtype == torch.float64
    assert torch.equal(v0, before[0]) and torch.equal(v1, before[1])


@given(st.floats(0, 1), st.floats(-5, 5), st.floats(-5, 5))
def test_numbers_have_only_two_directions(t, x, y):
    assume(abs(x) > 1e-3 and abs(y) > 1e-3)
    mixed = slerp(*(torch.tensor(v, dtype=torch.float64) for v in (x, y)), t)
    assert mixed.shape == () and mixed.item() == pytest.approx((1 - t) * x + t * y, abs=1e-12)


@pytest.mark.parametrize("apart", [2e-6, 1e-5, 1e-4, 1e-3, 8e-3])
def test_near_opposite_fp32_models_are_as_exact_as_any(apart):
    v0 = random((1001,), 3)
    side = random((1001,), 4)
    side -= v0 * (side @ v0) / (v0 @ v0)
    side *= v0.norm() / side.norm()
    v1 = (-math.cos(apart) * v0 + math.sin(apart) * side).float()
    exact = slerp(v0.float().double(), v1.double(), 0.3)
    got = slerp(v0.float(), v1, 0.3)
    assert got.dtype == torch.float32
    assert (got - exact).norm() <= 1e-7 * exact.norm()  # one rounding


def test_what_cannot_be_is_refused_with_the_reason():
    for method in (slerp, lerp):
        with pytest.raises(ShapeError, match=r"v1 is \(3,\) but v0 is \(2, 3\): expected one"):
            method(torch.ones(2, 3), torch.ones(3), 0.5)
    with pytest.raises(ValueError, match=r"nearly is 'linear': expected 'exact' or 'lerp'"):
        slerp(torch.ones(2), torch.ones(2), 0.5, nearly="linear")
    for method in (slerp, lerp):
        with pytest.raises(TensorMismatch, match=r"v1 is torch\.int64: expected floating-point"):
            method(torch.ones(2), torch.ones(2).long(), 0.5)
