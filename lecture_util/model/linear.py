"""nn.Linear that takes the faster of torch's two matrix libraries for a few rows on a CPU.

In fp32 torch multiplies through MKL, which keeps its best kernels for its maker's processors.
oneDNN, which torch ships too and uses for bf16, ran the reference model's layers 1.5 to 2.7 times
faster on two AMD cores; on two Intel cores it was slower (one token 37 ms, with MKL 26), so there
torch's choice stays. So it does with many rows: oneDNN's sums round about twice as coarsely there,
and logits would leave the 1e-4 within which they equal transformers'.
"""

from __future__ import annotations

import math
import platform
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

MAX_ROWS = 32
# An operator of torch's own compiler, present where torch was built with oneDNN.
OPERATOR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
if not torch.backends.mkldnn.is_available():
    OPERATOR = None


def _intel() -> bool:
    """Is this processor of MKL's maker?"""
    cpuinfo = Path("/proc/cpuinfo")
    words = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else platform.processor()
    return "GenuineIntel" in words


ONEDNN = None if _intel() else OPERATOR  # what Linear uses


class Linear(nn.Linear):
    """x (..., D) -> x @ W.T + b (..., F). Cost: 2*D*F FLOPs a row, over the bytes of W."""

    def forward(self, x: Tensor) -> Tensor:
        fast = (
            ONEDNN is not None
            and x.numel() <= MAX_ROWS * self.in_features
            and x.dtype == self.weight.dtype == torch.float32
            and x.device.type == self.weight.device.type == "cpu"
            and not (torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad))
        )
        if not fast:  # oneDNN's operator has no gradient
            return super().forward(x)
        return ONEDNN(x, self.weight, self.bias, "none", [], "")


if OPERATOR is not None:

    @register_flop_formula(OPERATOR)
    def _flops(x_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
        """So that torch's FLOP counter sees these layers, as it sees nn.Linear."""
        return 2 * math.prod(x_shape) * weight_shape[0]
