"""S4: a linear state, run as a recurrence to generate and as one convolution to train.

    here        paper    what it is
    u_BTD       u        the input, D channels that never mix here
    A_DZ        A, Λ     one decay (real part) and frequency (imaginary part) a channel and state
    C_DZ        C, B·C   how the state is read; B is 1, since only the product matters
    skip_D      D        how much of u goes straight to the output
    delta_D     Δ        step size of a channel, fixed after training: nothing here selects
    state_BDZ   x        complex; each number stands for itself and its conjugate

A real sequence needs states in conjugate pairs. Of each pair we keep one: the two add up to twice
its real part, so y = 2 Re(C x), and Z complex numbers do the work of 2*Z states.

Source: Gu et al. 2021, arXiv:2111.00396 (S4); Gu et al. 2022, arXiv:2206.11893 (S4D, whose
diagonal A is built here).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.model.config import Config
from lecture_util.model.kv_cache import Cache
from lecture_util.model.linear import Linear
from lecture_util.model.shapes import ShapeError, TensorMismatch, check_shapes
from lecture_util.model.transformer import RMSNorm

from .state import keep_state, state_of


class S4D(nn.Module):
    """D independent state spaces with Z complex states each, read in either of two ways.

    Starts at S4D-Lin: A_n = -1/2 + iπn. Any state decays, whatever is learned: Re A = -exp(...).
    """

    def __init__(self, D: int, Z: int = 16) -> None:
        super().__init__()
        for name, size in (("D", D), ("Z", Z)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}={size!r}: expected a whole number, at least 1")
        self.log_delta_D = nn.Parameter(torch.empty(D).uniform_(math.log(1e-3), math.log(1e-1)))
        self.log_decay_DZ = nn.Parameter(torch.full((D, Z), math.log(0.5)))
        self.frequency_DZ = nn.Parameter(math.pi * torch.arange(float(Z)).repeat(D, 1))
        self.C_real_DZ = nn.Parameter(torch.randn(D, Z) * 0.5**0.5)
        self.C_imag_DZ = nn.Parameter(torch.randn(D, Z) * 0.5**0.5)
        self.skip_D = nn.Parameter(torch.ones(D))

    def discretised(self) -> tuple[Tensor, Tensor, Tensor]:
        """Zero-order hold: what the continuous system does while its input holds still for Δ.

        Ā = exp(ΔA) and B̄ = (Ā - 1)/A. fp32 at least, since powers of Ā follow.

        Shapes: -> log_A_bar_DZ, B_bar_DZ, C_DZ, all complex.
        """
        wide = torch.promote_types(self.skip_D.dtype, torch.float32)
        A_DZ = torch.complex(-self.log_decay_DZ.to(wide).exp(), self.frequency_DZ.to(wide))
        C_DZ = torch.complex(self.C_real_DZ.to(wide), self.C_imag_DZ.to(wide))
        log_A_bar_DZ = self.log_delta_D.to(wide).exp()[:, None] * A_DZ
        return log_A_bar_DZ, torch.expm1(log_A_bar_DZ) / A_DZ, C_DZ

    def kernel(self, T: int) -> Tensor:
        """The answer to a single 1, in closed form: K_t = 2 Re Σ_n C_n B̄_n Ā_n^t.

        A product with a Vandermonde matrix, whose columns are the powers of Ā. -> kernel_TD.
        """
        log_A_bar_DZ, B_bar_DZ, C_DZ = self.discretised()
        return 2 * torch.einsum("dz,tdz->td", C_DZ * B_bar_DZ, _powers(log_A_bar_DZ, 0, T)).real

    def recurrence(self, u_BTD: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One token after the other: x_t = Ā x_(t-1) + B̄ u_t, y_t = 2 Re(C x_t) + D u_t.

        Shapes: u_BTD, state_BDZ -> y_BTD, state_BDZ.
        Cost:   B*D*Z complex multiply-adds a token, whatever came before; T steps in a row.
        """
        state_BDZ = self._start(u_BTD, state)
        log_A_bar_DZ, B_bar_DZ, C_DZ = self.discretised()
        A_bar_DZ, y = log_A_bar_DZ.exp(), []
        for u_BD in u_BTD.to(self._wide(u_BTD)).unbind(1):
            state_BDZ = A_bar_DZ * state_BDZ + B_bar_DZ * u_BD[..., None]
            y.append(2 * (C_DZ * state_BDZ).sum(-1).real + self.skip_D * u_BD)
        return torch.stack(y, dim=1).to(u_BTD.dtype), state_BDZ

    def convolution(self, u_BTD: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All tokens at once: the same numbers, since a fixed linear recurrence is a convolution.

        Shapes: u_BTD, state_BDZ -> y_BTD, state_BDZ.
        Cost:   O(T log T) a channel by FFT, and D*T*Z numbers for the kernel and the last state.
        """
        start_BDZ, T = self._start(u_BTD, state), u_BTD.shape[1]
        log_A_bar_DZ, B_bar_DZ, C_DZ = self.discretised()
        wide_BTD = u_BTD.to(self._wide(u_BTD))
        y_BTD = fft_convolution(wide_BTD, self.kernel(T)) + self.skip_D * wide_BTD
        fading_TDZ = C_DZ * _powers(log_A_bar_DZ, 1, T + 1)  # how the state we came with is read
        y_BTD = y_BTD + 2 * torch.einsum("tdz,bdz->btd", fading_TDZ, start_BDZ).real
        weight_TDZ = B_bar_DZ * _powers(log_A_bar_DZ, 0, T).flip(0)
        state_BDZ = torch.einsum("tdz,btd->bdz", weight_TDZ, wide_BTD.to(weight_TDZ.dtype))
        state_BDZ = state_BDZ + (T * log_A_bar_DZ).exp() * start_BDZ
        return y_BTD.to(u_BTD.dtype), state_BDZ

    def _wide(self, u_BTD: Tensor) -> torch.dtype:
        wide = torch.promote_types(u_BTD.dtype, torch.float32)
        return torch.promote_types(wide, self.skip_D.dtype)

    def _start(self, u_BTD: Tensor, state_BDZ: Tensor | None) -> Tensor:
        """The state given, or nothing, after checking that all fit together."""
        named = {"u_BTD": u_BTD, "A_DZ": self.frequency_DZ}
        if state_BDZ is not None:
            named["state_BDZ"] = state_BDZ
        sizes = check_shapes(**named)
        if sizes["T"] == 0:
            raise ShapeError("u_BTD has T=0: expected at least one token")
        kind = torch.promote_types(self._wide(u_BTD), torch.complex32)
        if state_BDZ is None:
            shape = [sizes[axis] for axis in "BDZ"]
            state_BDZ = torch.zeros(shape, dtype=kind, device=u_BTD.device)
        if state_BDZ.dtype != kind:
            raise TensorMismatch(f"state_BDZ is {state_BDZ.dtype}: expected {kind}")
        return state_BDZ


class S4Block(nn.Module):
    """x + out(gelu(S4D(norm(x)))): a layer of Transformer(config, block=S4Block).

    Tokens in a chunk are convolved; a single token, the decode step, is one turn of the recurrence.
    """

    def __init__(self, config: Config, layer: int, Z: int = 16) -> None:
        super().__init__()
        self.layer = layer
        self.norm = RMSNorm(config.D, config.norm_eps)
        self.ssm = S4D(config.D, Z)
        self.out = Linear(config.D, config.D, bias=False)

    def forward(self, x_BTD: Tensor, rope: Any, cache: Cache) -> Tensor:
        state = state_of(cache, self.layer)
        form = self.ssm.recurrence if x_BTD.shape[1] == 1 else self.ssm.convolution
        y_BTD, state_BDZ = form(self.norm(x_BTD), None if state is None else state[0])
        keep_state(cache, self.layer, (state_BDZ,))
        return x_BTD + self.out(nnf.gelu(y_BTD))


def fft_convolution(u_BTD: Tensor, kernel_TD: Tensor) -> Tensor:
    """y_t = Σ_s kernel_(t-s) u_s, as a product of spectra. -> y_BTD.

    An FFT convolves in a circle, so the end would leak into the start; T zeros keep them apart.
    """
    T = check_shapes(u_BTD=u_BTD, kernel_TD=kernel_TD)["T"]
    spectrum = torch.fft.rfft(u_BTD, 2 * T, dim=1) * torch.fft.rfft(kernel_TD, 2 * T, dim=0)
    return torch.fft.irfft(spectrum, 2 * T, dim=1)[:, :T]


def direct_convolution(u_BTD: Tensor, kernel_TD: Tensor) -> Tensor:
    """The same by its definition, for comparison: T² products a channel. -> y_BTD."""
    T = check_shapes(u_BTD=u_BTD, kernel_TD=kernel_TD)["T"]
    y_BTD = torch.zeros_like(u_BTD)
    for s in range(T):
        y_BTD[:, s:] += kernel_TD[: T - s] * u_BTD[:, s, None]
    return y_BTD


def hippo_legs(Z: int, normalised: bool = True) -> tuple[Tensor, Tensor]:
    """A_ZZ and B_Z of HiPPO-LegS: t x'(t) = -A x(t) + B u(t) keeps a past as Legendre polynomials.

    normalised: for polynomials of unit length, as published. For the plain Legendre polynomials A
    has small whole entries, [[1, 0, 0], [1, 2, 0], [1, 3, 3]] at Z = 3: the matrix that slides on
    S4 often show. The two are one system, in two units for each coefficient.

    Source: Gu et al. 2020, arXiv:2008.07669, theorem 2; S4 and S4D write -A for this A.
    """
    if type(Z) is not int or Z < 1:
        raise ValueError(f"Z={Z!r}: expected a whole number, at least 1")
    odd_Z = 2 * torch.arange(Z, dtype=torch.float64) + 1
    below = torch.tril(odd_Z.expand(Z, Z), diagonal=-1)  # 2k + 1 under the diagonal
    A_ZZ = below + torch.diag(torch.arange(1, Z + 1, dtype=torch.float64))
    if not normalised:
        return A_ZZ, torch.ones(Z, dtype=torch.float64)
    root_Z = odd_Z.sqrt()
    return root_Z[:, None] * A_ZZ / root_Z, root_Z


def _powers(log_A_bar_DZ: Tensor, first: int, last: int) -> Tensor:
    """Ā^first ... Ā^(last-1), in a new first axis."""
    t_T = torch.arange(first, last, device=log_A_bar_DZ.device, dtype=log_A_bar_DZ.real.dtype)
    return (t_T[:, None, None] * log_A_bar_DZ).exp()
