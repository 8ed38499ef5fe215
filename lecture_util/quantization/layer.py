"""What every quantized layer has in common: it is called as a Linear, and knows its bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.model.shapes import ShapeError


class QuantizedLinear(nn.Module):
    """x (..., D) -> x @ W.T + b (..., F), with W kept as few bits in this module's buffers.

    A kind of layer registers what it stores as buffers and writes `dequantized`; one that can
    multiply without unpacking all of W writes `forward` too. Tables common to all layers are no
    buffers. Moving or casting the model moves buffers, and never changes their dtype: what is
    stored stays what was counted.
    """

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def dequantized(self) -> Tensor:
        """The weights that the stored bits stand for, w_FD, in fp32."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is dequantized")

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nnf.linear(x, self.dequantized().to(x.dtype), bias)

    def check(self, x: Tensor) -> None:
        if x.shape[-1:] != (self.in_features,) or not x.is_floating_point():
            raise ShapeError(
                f"x is {x.dtype} of shape {tuple(x.shape)}, but this layer reads floats of width "
                f"D={self.in_features}: shape (..., {self.in_features})"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes that stand for W: codes, scales, zero points. The bias is not counted."""
        return sum(stored.nbytes for stored in self.buffers())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weight_bytes / (self.in_features * self.out_features)

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias is not None}, {self.bits_per_weight:.3f} bits a weight"

    def _apply(self, fn, recurse=True):
        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            cast = new.dtype != tensor.dtype and not isinstance(tensor, nn.Parameter)
            return tensor.to(new.device) if cast else new

        return super()._apply(moved, recurse)


def through(
    x: Tensor, product: Callable[[Tensor], Tensor], weights_FD: Callable[[], Tensor]
) -> Tensor:
    """product(x), for products that torch has no gradient of: backward as if x @ weights_FD().T.

    Where x was rounded on the way, its gradient passes straight through. The weights are made in
    floating point only for the backward pass, and nothing is prepared where no gradient is wanted.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Through.apply(x, product, weights_FD)
    return product(x)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, product: Callable, weights_FD: Callable) -> Tensor:
        ctx.weights_FD = weights_FD
        return product(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.weights_FD().to(grad.dtype), None, None
