"""S4D against SciPy's zero-order hold and simulation, and its two forms against each other."""

import numpy as np
import pytest
import scipy.signal
import torch

from lecture_util.alternatives.s4 import (
    S4D,
    S4Block,
    direct_convolution,
    fft_convolution,
    hippo_legs,
)
from lecture_util.alternatives.state import States
from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError, TensorMismatch
from lecture_util.model.transformer import Transformer

CONFIG = Config(D=6, F=8, K=1, G=1, H=6, L=2, V=11, max_context=64)
LENGTHS = [1, 2, 7, 16, 31, 53]


def new_s4d(D=3, Z=5, dtype=torch.float64):
    torch.manual_seed(0)
    s4d = S4D(D, Z).to(dtype).requires_grad_(False)
    for weight in s4d.parameters():  # nothing stays at a round number
        weight += 0.3 * torch.randn_like(weight)
    s4d.log_delta_D += 2  # long steps: exp, Euler and bilinear would differ visibly
    return s4d


def signal(B=2, T=7, D=3, dtype=torch.float64):
    return torch.randn(B, T, D, dtype=dtype, generator=torch.Generator().manual_seed(T))


def by_scipy(s4d, u_BTD):
    """Each channel as a real system of 2*Z states, discretised and simulated by SciPy."""
    B, T, D = u_BTD.shape
    y_BTD = np.zeros((B, T, D))
    for d in range(D):
        Z = s4d.C_real_DZ.shape[1]
        A, C = np.zeros((2 * Z, 2 * Z)), np.zeros((1, 2 * Z))
        for z in range(Z):
            real, imag = -np.exp(float(s4d.log_decay_DZ[d, z])), float(s4d.frequency_DZ[d, z])
            A[2 * z : 2 * z + 2, 2 * z : 2 * z + 2] = [[real, -imag], [imag, real]]
            # Re(c (p + iq)) = Re(c) p - Im(c) q, once for the state and once for its conjugate
            C[0, 2 * z : 2 * z + 2] = (
                2 * float(s4d.C_real_DZ[d, z]),
                -2 * float(s4d.C_imag_DZ[d, z]),
            )
        continuous = (A, np.array([[1.0], [0.0]] * Z), C, np.zeros((1, 1)))
        A, B_bar, C, _, dt = scipy.signal.cont2discrete(
            continuous, float(s4d.log_delta_D[d].exp()), "zoh"
        )
        for b in range(B):
            # SciPy reads before it takes the input in, we after: one more step, shifted by one.
            u = np.append(u_BTD[b, :, d].numpy(), 0.0)[:, None]
            _, y, _ = scipy.signal.dlsim((A, B_bar, C, np.zeros((1, 1)), dt), u)
            y_BTD[b, :, d] = y[1:, 0] + float(s4d.skip_D[d]) * u[:-1, 0]
    return torch.from_numpy(y_BTD)


@pytest.mark.parametrize("form", ["recurrence", "convolution"])
@pytest.mark.parametrize("T", LENGTHS)
def test_it_computes_what_scipy_simulates(form, T):
    s4d, u_BTD = new_s4d(), signal(T=T)
    y_BTD, _ = getattr(s4d, form)(u_BTD)
    torch.testing.assert_close(y_BTD, by_scipy(s4d, u_BTD), rtol=0, atol=1e-11)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("T", LENGTHS)
def test_convolution_equals_recurrence_with_its_last_state(B, T):
    s4d, u_BTD = new_s4d(), signal(B, T)
    for one, other in zip(s4d.convolution(u_BTD), s4d.recurrence(u_BTD), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("first", ["recurrence", "convolution"])
@pytest.mark.parametrize("second", ["recurrence", "convolution"])
def test_a_chunk_continues_from_the_state_of_the_one_before(first, second):
    s4d, u_BTD = new_s4d(), signal(T=13)
    whole_BTD, last_BDZ = s4d.recurrence(u_BTD)
    for split in range(1, 13):
        start_BTD, state_BDZ = getattr(s4d, first)(u_BTD[:, :split])
        kept_BDZ = state_BDZ.clone()
        rest_BTD, end_BDZ = getattr(s4d, second)(u_BTD[:, split:], state_BDZ)
        torch.testing.assert_close(
            torch.cat((start_BTD, rest_BTD), 1), whole_BTD, rtol=0, atol=1e-11
        )
        torch.testing.assert_close(end_BDZ, last_BDZ, rtol=0, atol=1e-11)
        assert torch.equal(state_BDZ, kept_BDZ)


@pytest.mark.parametrize("T", LENGTHS)
def test_the_closed_form_of_the_kernel_is_the_answer_to_a_single_1(T):
    s4d = new_s4d()
    impulse_BTD = torch.zeros(1, T, 3, dtype=torch.float64)
    impulse_BTD[:, 0] = 1
    answer_BTD, _ = s4d.recurrence(impulse_BTD)
    answer_BTD -= s4d.skip_D * impulse_BTD
    torch.testing.assert_close(s4d.kernel(T), answer_BTD[0], rtol=0, atol=1e-12)


def test_without_the_conjugates_half_would_be_missing():
    s4d = new_s4d()
    kernel_TD = s4d.kernel(9)
    log_A_bar_DZ, B_bar_DZ, C_DZ = s4d.discretised()
    t = np.arange(9)[:, None, None]
    powers_TDZ = log_A_bar_DZ.exp().numpy()[None] ** t
    pairs_TDZ = (C_DZ * B_bar_DZ).numpy() * powers_TDZ
    both_TD = (pairs_TDZ + pairs_TDZ.conj()).sum(-1)
    np.testing.assert_allclose(both_TD.imag, 0, atol=1e-14)
    np.testing.assert_allclose(kernel_TD.numpy(), both_TD.real, atol=1e-12)


@pytest.mark.parametrize("T", LENGTHS)
def test_both_convolutions_equal_scipys_filter(T):
    u_BTD, kernel_TD = signal(T=T), signal(1, T, dtype=torch.float64)[0] + 0.1
    for convolve in (fft_convolution, direct_convolution):
        y_BTD = convolve(u_BTD, kernel_TD)
        for d in range(3):
            expected = scipy.signal.lfilter(kernel_TD[:, d].numpy(), 1, u_BTD[..., d].numpy())
            np.testing.assert_allclose(y_BTD[..., d].numpy(), expected, atol=1e-12)


def test_the_slides_matrix_is_hippo_in_other_units():
    A_ZZ, B_Z = hippo_legs(3, normalised=False)
    assert A_ZZ.tolist() == [[1, 0, 0], [1, 2, 0], [1, 3, 3]]
    assert B_Z.tolist() == [1, 1, 1]


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("power", [0, 1, 2, 5])
def test_hippo_keeps_the_legendre_coefficients_of_the_past(normalised, power):
    """u = t^p has coefficients c_n t^p, for which t x' = -A x + B u says p c = -A c + B."""
    Z = 4
    A_ZZ, B_Z = (part.numpy() for part in hippo_legs(Z, normalised))
    nodes, weights = np.polynomial.legendre.leggauss(20)  # exact for these polynomials
    legendre = np.polynomial.legendre.legvander(nodes, Z - 1).T
    # The mean of s^p P_n over the past, s in [0, 1], by which the published units are defined.
    moments = (weights / 2 * ((nodes + 1) / 2) ** power * legendre).sum(-1)
    units = np.sqrt(2 * np.arange(Z) + 1)
    c = moments * units if normalised else moments
    np.testing.assert_allclose(power * c, -A_ZZ @ c + B_Z, atol=1e-13)


def test_hippo_published_form():
    A_ZZ, B_Z = hippo_legs(5)
    for n in range(5):
        assert float(B_Z[n]) == pytest.approx((2 * n + 1) ** 0.5)
        for k in range(5):
            expected = ((2 * n + 1) * (2 * k + 1)) ** 0.5 if n > k else n + 1 if n == k else 0
            assert float(A_ZZ[n, k]) == pytest.approx(expected)


def test_no_state_can_grow_whatever_is_learned():
    s4d = new_s4d()
    s4d.log_decay_DZ.normal_(0, 5)
    assert (s4d.discretised()[0].exp().abs() < 1).all()


@pytest.mark.parametrize("split", [1, 2, 5])
def test_a_stack_of_blocks_generates_what_it_scores(split):
    model = Transformer.random(CONFIG, dtype=torch.float64, block=S4Block)
    for weight in model.parameters():
        weight.normal_(0, 0.5)
    tokens_BT = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))
    expected_BTV = model(tokens_BT)
    states = States(CONFIG, 2, 9)
    parts = [model(part, states) for part in (tokens_BT[:, :split], tokens_BT[:, split:-1])]
    parts.append(model(tokens_BT[:, -1:], states))
    torch.testing.assert_close(torch.cat(parts, 1), expected_BTV, rtol=0, atol=1e-10)


def test_low_precision_computes_in_fp32_and_comes_back():
    s4d = new_s4d(dtype=torch.bfloat16)
    for form in (s4d.convolution, s4d.recurrence):
        y_BTD, state_BDZ = form(signal(dtype=torch.bfloat16))
        assert (y_BTD.dtype, state_BDZ.dtype) == (torch.bfloat16, torch.complex64)


def test_every_parameter_learns_in_both_forms_alike():
    gradients = []
    for form in ("convolution", "recurrence"):
        s4d = new_s4d().requires_grad_(True)
        getattr(s4d, form)(signal())[0].square().sum().backward()
        gradients.append([weight.grad for weight in s4d.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.recurrence(signal(D=4)), ShapeError, "A_DZ has D=3 but u_BTD has D=4"),
        (lambda s: s.convolution(signal(T=0)), ShapeError, "T=0"),
        (lambda s: s.convolution(signal(), torch.zeros(2, 3, 5)), TensorMismatch, "complex128"),
        (lambda s: S4D(3, 0), ValueError, "Z=0"),
        (lambda s: hippo_legs(0), ValueError, "Z=0"),
    ],
)
def test_what_does_not_fit_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(new_s4d())
