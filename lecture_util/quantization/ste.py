"""Quantization-aware training: round in the forward pass, and let gradients pass straight through.

Rounding is flat almost everywhere, so its true gradient is zero and nothing would be learned. The
straight-through estimator pretends that it is the identity: the layer computes with weights on the
grid, and the optimizer moves the unrounded ones behind them until they round better.
Source: Bengio et al. 2013, arXiv:1308.3432 (the estimator); Jacob et al. 2018, arXiv:1712.05877.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.model.linear import Linear

from .linear import linear_layers, replace_linears
from .scales import Per, quantize


class _StraightThrough(torch.autograd.Function):
    """Forward: onto the grid. Backward: the gradient as it came."""

    @staticmethod
    def forward(ctx, w: Tensor, bits: int, per: Per, symmetric: bool) -> Tensor:
        return quantize(w, bits, per, symmetric).dequantize()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


def fake_quantize(
    w: Tensor, bits: int, per: Per = "row", symmetric: bool = True, clip: float = 1.0
) -> Tensor:
    """w rounded to its grid, still in floating point; the gradient passes as if it were w.

    clip: how much of each block's range the grid covers. Below 1 the rest of the block gets a finer
          step, and what lies outside saturates: there the gradient is 0, as the clamp's truly is.

    Shapes: w -> the same.
    Raises: as `scales.quantize`; ValueError unless 0 < clip <= 1.
    """
    if not 0 < clip <= 1:
        raise ValueError(f"clip={clip!r}: expected the share of the range to cover, above 0, to 1")
    if clip < 1:
        low, high = _range(w, bits, per, symmetric)
        w = w.clamp(clip * low, clip * high)
    return _StraightThrough.apply(w, bits, per, symmetric)


def _range(w: Tensor, bits: int, per: Per, symmetric: bool) -> tuple[Tensor, Tensor]:
    """For each element, the least and the greatest value on its block's grid."""
    whole = quantize(w, bits, per, symmetric)
    step = whole.each(whole.scale)
    if symmetric:
        high = (2 ** (bits - 1) - 1) * step
        return (-high).to(w.dtype), high.to(w.dtype)
    zero = whole.each(whole.zero)
    return (-step * zero).to(w.dtype), (step * (2**bits - 1 - zero.to(step.dtype))).to(w.dtype)


class FakeQuantizedLinear(Linear):
    """A Linear that computes with rounded weights and trains the ones behind them."""

    def __init__(self, linear: nn.Linear, **grid) -> None:
        nn.Module.__init__(self)  # the weights are there already
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.grid = linear.weight, linear.bias, grid

    def forward(self, x: Tensor) -> Tensor:
        return nnf.linear(x, fake_quantize(self.weight, **self.grid), self.bias)

    @torch.no_grad()
    def settled(self) -> Linear:
        """An ordinary Linear with the rounded weights for good."""
        with torch.device("meta"):
            plain = Linear(self.in_features, self.out_features, bias=self.bias is not None)
        plain.weight = nn.Parameter(fake_quantize(self.weight, **self.grid))
        plain.bias = self.bias
        return plain

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.grid}"


def qat(
    model: nn.Module,
    bits: int = 2,
    per: Per = "row",
    symmetric: bool = True,
    clip: float = 1.0,
    skip: Iterable[str] = ("head",),
) -> nn.Module:
    """A copy of the model whose Linears fake-quantize their weights at every step, for `train`.

    Train it, then `settle` it. Without training between, that is post-training quantization.
    Embeddings, norms and `skip` stay as they are; the source is untouched.
    """
    grid = {"bits": bits, "per": per, "symmetric": symmetric, "clip": clip}
    fake = replace_linears(
        copy.deepcopy(model), lambda linear: FakeQuantizedLinear(linear, **grid), skip
    ).requires_grad_(True)
    for layer in linear_layers(fake).values():  # a bad grid is refused here, not in training
        if isinstance(layer, FakeQuantizedLinear):
            fake_quantize(layer.weight.detach(), **grid)
    return fake


def settle(model: nn.Module) -> nn.Module:
    """A copy with ordinary Linears that hold the rounded weights, to the bit those of training.

    Raises: ValueError if no layer fake-quantizes.
    """

    def plain(linear: nn.Linear) -> nn.Linear:
        return linear.settled() if isinstance(linear, FakeQuantizedLinear) else linear

    if not any(isinstance(layer, FakeQuantizedLinear) for layer in model.modules()):
        raise ValueError("no layer of this model fake-quantizes: settle what `qat` returned")
    return replace_linears(copy.deepcopy(model), plain, skip=()).requires_grad_(False)
