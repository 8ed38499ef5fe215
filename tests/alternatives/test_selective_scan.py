"""Every form of the selective scan against four nested loops over plain numbers."""

import math

import pytest
import torch

from lecture_util.alternatives.selective import (
    chunked_selective_scan,
    fast_selective_scan,
    selective_scan,
    selective_step,
)
from lecture_util.kernels.selective_scan import selective_scan_fused, selective_scan_triton
from lecture_util.model.shapes import ShapeError, TensorMismatch

FORMS = [selective_scan, chunked_selective_scan, fast_selective_scan, selective_scan_fused]


def inputs(B=2, T=7, E=3, Z=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    delta_BTE = torch.nn.functional.softplus(normal(B, T, E))
    A_EZ = -normal(E, Z).exp()
    return normal(B, T, E), delta_BTE, A_EZ, normal(B, T, Z), normal(B, T, Z), normal(E)


def by_loops(u, delta, A, B, C, D, state=None):
    """The paper's recurrence, one number at a time."""
    rows, tokens, channels, states = *u.shape, A.shape[1]
    u, delta, A, B, C, D = (x.double().tolist() for x in (u, delta, A, B, C, D))
    h = [[[0.0] * states for _ in range(channels)] for _ in range(rows)]
    if state is not None:
        h = state.double().tolist()
    y = [[[0.0] * channels for _ in range(tokens)] for _ in range(rows)]
    for b in range(rows):
        for e in range(channels):
            for t in range(tokens):
                y[b][t][e] = D[e] * u[b][t][e]
                for z in range(states):
                    h[b][e][z] *= math.exp(delta[b][t][e] * A[e][z])
                    h[b][e][z] += delta[b][t][e] * B[b][t][z] * u[b][t][e]
                    y[b][t][e] += C[b][t][z] * h[b][e][z]
    return torch.tensor(y, dtype=torch.float64), torch.tensor(h, dtype=torch.float64)


def assert_same(result, expected, atol=1e-12):
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("scan", FORMS)
@pytest.mark.parametrize(
    ("B", "T", "E", "Z"), [(1, 1, 1, 1), (3, 1, 2, 4), (1, 2, 3, 1), (2, 7, 3, 5), (9, 13, 5, 2)]
)
def test_every_form_equals_the_loops(scan, B, T, E, Z):
    tensors = inputs(B, T, E, Z)
    assert_same(scan(*tensors), by_loops(*tensors))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 17, 18, 100])
def test_chunks_of_any_length_make_no_difference(chunk):
    tensors = inputs(T=17)
    state_BEZ = torch.randn(2, 3, 5, dtype=torch.float64)
    expected = by_loops(*tensors, state_BEZ)
    assert_same(chunked_selective_scan(*tensors, state_BEZ, chunk=chunk), expected)


@pytest.mark.parametrize("scan", FORMS)
def test_any_split_continues_from_the_state_and_leaves_the_old_one_alone(scan):
    u, delta, A, B, C, D = inputs(T=11)
    whole = by_loops(u, delta, A, B, C, D)
    for split in range(1, 11):
        first, second = (
            [x[:, s] for x in (u, delta, B, C)] for s in (slice(split), slice(split, None))
        )
        y1, middle = scan(*first[:2], A, *first[2:], D)
        kept = middle.clone()
        y2, last = scan(*second[:2], A, *second[2:], D, middle)
        assert_same((torch.cat((y1, y2), 1), last), whole)
        assert torch.equal(middle, kept)


def test_steps_make_the_scan():
    u, delta, A, B, C, D = inputs(T=5)
    state, ys = torch.zeros(2, 3, 5, dtype=torch.float64), []
    for t in range(5):
        y, state = selective_step(u[:, t], delta[:, t], A, B[:, t], C[:, t], D, state)
        ys.append(y)
    assert_same((torch.stack(ys, 1), state), by_loops(u, delta, A, B, C, D))


def test_the_input_enters_by_euler_and_not_by_zero_order_hold():
    u, delta, A, B, C, D = (torch.ones(shape, dtype=torch.float64) for shape in
                            [(1, 1, 1), (1, 1, 1), (1, 1), (1, 1, 1), (1, 1, 1), (1,)])  # fmt: skip
    _, state = selective_scan(u, delta * 2, -A, B, C, D)
    assert state.item() == 2  # ΔB; zero-order hold would take in (1 - e^-2)/1
    assert (1 - math.exp(-2)) == pytest.approx(0.865, abs=1e-3)


@pytest.mark.parametrize("scan", FORMS)
def test_decays_that_vanish_stay_finite(scan):
    u, delta, A, B, C, D = inputs(T=64)
    tensors = u, delta * 50, A * 10, B, C, D  # exp(-500) over and over: cumulative products are 0
    expected = by_loops(*tensors)
    result = scan(*tensors)
    assert all(part.isfinite().all() for part in result)
    assert_same(result, expected, atol=1e-9)  # the numbers are in the hundreds


@pytest.mark.parametrize("scan", FORMS)
def test_a_step_of_no_time_changes_nothing(scan):
    u, delta, A, B, C, D = inputs(T=3)
    state = torch.randn(2, 3, 5, dtype=torch.float64)
    assert torch.equal(scan(u, delta * 0, A, B, C, D, state)[1], state)


@pytest.mark.parametrize("scan", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_state_in_fp32(scan, dtype):
    tensors = inputs(T=29, dtype=dtype)
    y_BTE, state_BEZ = scan(*tensors)
    assert (y_BTE.dtype, state_BEZ.dtype) == (dtype, torch.float32)
    y, state = by_loops(*tensors)  # of the rounded inputs
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(state_BEZ.double(), state, rtol=29 * eps, atol=29 * eps)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y_BTE.double(), y, rtol=8 * eps, atol=8 * eps)


def test_gradients_of_chunks_equal_those_of_the_loop():
    weights = torch.randn(2, 7, 3, dtype=torch.float64)
    gradients = []
    for scan in (selective_scan, chunked_selective_scan):
        state = torch.ones(2, 3, 5, dtype=torch.float64, requires_grad=True)
        tensors = [x.requires_grad_(True) for x in inputs()]
        y, last = scan(*tensors, state)
        ((y * weights).sum() + last.square().sum()).backward()
        gradients.append([x.grad for x in (*tensors, state)])
    assert_same(*gradients, atol=1e-11)


def test_the_loop_has_the_right_gradient():
    tensors = [x.requires_grad_(True) for x in inputs(B=1, T=3, E=2, Z=2)]
    assert torch.autograd.gradcheck(selective_scan, tensors)


def test_where_a_gradient_is_wanted_the_reference_computes_it():
    u, *rest = inputs()
    y, _ = selective_scan_fused(u.requires_grad_(True), *rest)
    y.sum().backward()
    assert u.grad.abs().sum() > 0


@pytest.mark.parametrize("scan", [*FORMS, selective_scan_triton])
def test_what_does_not_fit_is_named(scan):
    u, delta, A, B, C, D = inputs()
    with pytest.raises(ShapeError, match="B_BTZ has Z=4 but A_EZ has Z=5"):
        scan(u, delta, A, B[..., :4], C, D)
    with pytest.raises(ShapeError, match="D_E has 2 axes"):
        scan(u, delta, A, B, C, D[None])
    with pytest.raises(ShapeError, match="state_BEZ has B=3 but u_BTE has B=2"):
        scan(u, delta, A, B, C, D, torch.zeros(3, 3, 5, dtype=torch.float64))
    with pytest.raises(TensorMismatch, match=r"expected torch\.float64"):
        scan(u, delta, A, B, C, D, torch.zeros(2, 3, 5))
    with pytest.raises(ShapeError, match="T=0"):
        scan(u[:, :0], delta[:, :0], A, B[:, :0], C[:, :0], D)
    with pytest.raises(TensorMismatch, match="A_EZ is on meta"):
        scan(u, delta, A.to("meta"), B, C, D)


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True])
def test_a_chunk_has_a_whole_length(chunk):
    with pytest.raises(ValueError, match="chunk="):
        chunked_selective_scan(*inputs(), chunk=chunk)
