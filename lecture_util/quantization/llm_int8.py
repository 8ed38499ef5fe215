"""LLM.int8(): whole numbers for almost all of a product, floats for the few columns that need them.

Rows of x and rows of W each get a scale, so int8 products add up in int32 and are scaled once. An
outlier in x would stretch its row's scale over everything else: every column of x that holds one,
in any row of the batch, leaves the int8 product and is multiplied apart.
Source: Dettmers et al. 2022, arXiv:2208.07339; conventions of bitsandbytes where the two differ.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.model.shapes import ShapeError, check_shapes

from .layer import QuantizedLinear, through

EXACT = 1024  # 1024 products of at most 128*128 add up to 2**24: fp32 holds every sum on the way
CHUNK = 1 << 18  # weights rounded at a time, so that what is in between stays in the CPU's cache


def quantize_rows(x: Tensor, threshold: float | None = None) -> tuple[Tensor, Tensor]:
    """Scale each row so that its largest magnitude becomes 127, and round to even.

    threshold: elements this large (>=) don't count for a row's scale, and columns that hold one
               become 0, as in bitsandbytes: what `llm_int8` multiplies.

    A row of zeros has codes 0; so has one whose magnitudes all stay below 1e-36.

    Shapes: x_TD -> codes_TD int8, absmax_T fp32; x is about codes * absmax / 127.
    Raises: ValueError for NaN, and for infinity unless a threshold sets it apart;
            TypeError for what is not floating point.
    """
    check_shapes("flatten leading axes: x.flatten(0, -2)", x_TD=x)
    if not x.is_floating_point() or x.numel() == 0:
        raise TypeError(f"x is {x.dtype} of shape {tuple(x.shape)}: expected some floats")
    x = x.detach()
    outliers = None if threshold is None else outlier_columns(x, threshold)
    if outliers is not None and len(outliers):
        x = torch.where(x.abs() >= threshold, 0, x)
    codes, absmax = torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)
    rows = max(1, CHUNK // x.shape[1])
    for part, code, largest in zip(
        x.split(rows), codes.split(rows), absmax.split(rows), strict=True
    ):
        part = part.float()
        largest.copy_(part.abs().amax(dim=1))
        scale = torch.where(largest > 1e-36, 127 / largest, 0)
        code.copy_((part * scale[:, None]).round_())
    if not absmax.isfinite().all():
        raise ValueError("x holds NaN or infinity, or overflowed its dtype: no scale fits it")
    if outliers is not None:
        codes[:, outliers] = 0
    return codes, absmax


def outlier_columns(x: Tensor, threshold: float = 6.0) -> Tensor:
    """Which columns hold a magnitude of `threshold` or more anywhere in the batch, in order.

    Shapes: x (..., D) -> int64 (number of outlier columns,).
    """
    _check_threshold(threshold)
    return (x.abs() >= threshold).flatten(0, -2).any(dim=0).nonzero().flatten()


def int8_matmul(a_TD: Tensor, b_FD: Tensor) -> Tensor:
    """a @ b.T over whole numbers, exactly. Shapes: int8, int8 -> int32 (T, F).

    torch's int8 product where it is fast: on CPUs with AVX-512, and on CUDA with T padded to 24
    and D and F to multiples of 8. Elsewhere in fp32, in pieces of D short enough to stay exact.
    Raises: ShapeError for other shapes or dtypes, or D so large that int32 could overflow.
    """
    D = check_shapes("the weights' rows are output features", a_TD=a_TD, b_FD=b_FD)["D"]
    if a_TD.dtype != torch.int8 or b_FD.dtype != torch.int8:
        raise ShapeError(
            f"a_TD is {a_TD.dtype}, b_FD is {b_FD.dtype}: expected int8, as quantize_rows gives"
        )
    if D > 2**31 // 2**14 - 1:
        raise ShapeError(f"D={D}: sums of more than 131071 int8 products can overflow int32")
    if a_TD.is_cuda:
        T, F = len(a_TD), len(b_FD)
        a = nnf.pad(a_TD, (0, -D % 8, 0, max(24 - T, 0)))
        b = nnf.pad(b_FD, (0, -D % 8, 0, -F % 8))
        return torch._int_mm(a, b.T)[:T, :F]
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return torch._int_mm(a_TD, b_FD.T)
    return _pieces(a_TD, b_FD)


def llm_int8(
    x: Tensor,
    w_codes: Tensor,
    w_absmax: Tensor,
    threshold: float | None = 6.0,
    w: Tensor | None = None,
) -> Tensor:
    """x @ W.T with W in int8, and x too but for its outlier columns.

    threshold: None for none apart: plain vector-wise int8.
    w: the float weights, for outlier columns as in the paper; without them, those columns come
       from the int8 weights, as in bitsandbytes, which keeps no others.

    Everything is scaled in fp32 before it meets x's dtype, so that fp16 overflows only where the
    result does. The gradient of x is that of x @ W.T, with the int8 weights.

    Shapes: x (..., D), w_codes_FD int8, w_absmax_F, w_FD -> (..., F) in x's dtype.
    """
    check_shapes(w_codes_FD=w_codes, w_absmax_F=w_absmax, **({} if w is None else {"w_FD": w}))
    return through(
        x,
        lambda x: _llm_int8(x, w_codes, w_absmax, threshold, w),
        lambda: w_codes * (w_absmax[:, None] / 127),
    )


def _llm_int8(x, w_codes, w_absmax, threshold, w) -> Tensor:
    x_TD = x.reshape(-1, x.shape[-1])
    if x_TD.numel() == 0:
        return x.new_zeros(*x.shape[:-1], len(w_codes))
    columns = () if threshold is None else outlier_columns(x_TD, threshold)
    x_codes, x_absmax = quantize_rows(x_TD, threshold if len(columns) else None)
    out_TF = int8_matmul(x_codes, w_codes) * (x_absmax[:, None] * w_absmax / 127**2)
    if len(columns):
        if w is None:
            w_FO = w_codes[:, columns] * (w_absmax[:, None] / 127)
        else:
            w_FO = w[:, columns].float()
        out_TF += x_TD[:, columns].float() @ w_FO.T
    return out_TF.to(x.dtype).view(*x.shape[:-1], -1)


class Int8Linear(QuantizedLinear):
    """int8 weights with a scale a row, multiplied as in LLM.int8().

    keep: also keep the float weights, for outlier columns as the paper has them. Which columns
          those are is known only when x comes, so all are kept, and counted.
    """

    def __init__(
        self, linear: nn.Linear, threshold: float | None = 6.0, keep: bool = False
    ) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias)
        if threshold is not None:
            _check_threshold(threshold)
        self.threshold = threshold
        codes, absmax = quantize_rows(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("absmax", absmax)
        self.register_buffer("kept", linear.weight.detach() if keep else None)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, threshold: float | None = 6.0, keep: bool = False
    ) -> Int8Linear:
        return cls(linear, threshold, keep)

    def dequantized(self) -> Tensor:
        return self.codes * (self.absmax[:, None] / 127)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        out = llm_int8(x, self.codes, self.absmax, self.threshold, self.kept)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _pieces(a_TD: Tensor, b_FD: Tensor) -> Tensor:
    parts = zip(a_TD.split(EXACT, dim=1), b_FD.split(EXACT, dim=1), strict=True)
    return sum((a.float() @ b.float().T).int() for a, b in parts)


def _check_threshold(threshold: float) -> None:
    if not threshold > 0:
        raise ValueError(
            f"threshold={threshold}: expected a positive magnitude such as 6.0, or None for no "
            "outliers"
        )
