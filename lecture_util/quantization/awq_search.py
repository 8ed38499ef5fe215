"""AWQ's two searches on one layer: how much to scale each channel, and where to cut each group.

Both compare rounded weights with the original by the layer's output on calibration tokens. Its mean
squared error needs of those tokens only mean x xᵀ, `gram_DD`: D² numbers, in which every token
counts, and ten tokens are as welcome as ten thousand.
Source: Lin et al. 2023, arXiv:2306.00978, section 3.2; the clipping is its released code's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from .scales import quantize

ALPHAS = tuple(i / 20 for i in range(21))  # with 1, which the released code never tries
SHARES = tuple(1 - i / 20 for i in range(11))  # of a group's largest magnitude: all, down to half
LEAST = 1e-4  # of mean|x|^alpha: a channel that was never active must not divide by zero


@dataclass(frozen=True)
class Seen:
    """What one layer read on the calibration set: mean |x| of each channel, and mean x xᵀ."""

    mean_D: Tensor
    gram_DD: Tensor

    def __post_init__(self) -> None:
        D = len(self.mean_D)
        if self.mean_D.ndim != 1 or self.gram_DD.shape != (D, D):
            raise ValueError(
                f"mean_D has shape {tuple(self.mean_D.shape)} and gram_DD "
                f"{tuple(self.gram_DD.shape)}: expected (D,) and (D, D)"
            )
        if not (self.mean_D.isfinite().all() and self.gram_DD.isfinite().all()):
            raise ValueError(
                "NaN or infinities in what a layer read during calibration: look for them in the "
                "model's weights, or calibrate in float32"
            )

    @classmethod
    def of(cls, x_MD: Tensor) -> Seen:
        """Of M tokens' activations."""
        if x_MD.ndim != 2 or len(x_MD) == 0:
            raise ValueError(
                f"x_MD has shape {tuple(x_MD.shape)}: expected at least one token's activations, "
                "(M, D)"
            )
        x_MD = wide(x_MD)
        return cls(x_MD.abs().mean(0), x_MD.T @ x_MD / len(x_MD))


@dataclass(frozen=True)
class Search:
    """The best alpha, its scale, and for each of ALPHAS the output's squared error over its square.

    alpha = 0 is plain rounding: the best of all can't be worse on the calibration set.
    """

    alpha: float
    scale_D: Tensor
    losses: tuple[float, ...]


def channel_scale(mean_D: Tensor, alpha: float) -> Tensor:
    """s = mean|x|^alpha, at least 1e-4, over sqrt(max s * min s). Shapes: mean_D -> s_D.

    The division centres s on 1, which keeps folded weights away from the ends of fp16; groups round
    alike under any multiple of s. alpha = 0 gives ones.
    """
    s_D = mean_D.pow(alpha).clamp(min=LEAST)
    return s_D / (s_D.max() * s_D.min()).sqrt()


def output_loss(off_FD: Tensor, gram_DD: Tensor) -> Tensor:
    """Mean over tokens of (x · off)² for each output, off being the weights' error. -> loss_F."""
    return ((off_FD @ gram_DD) * off_FD).sum(-1)


@torch.no_grad()
def search_scale(
    w_FD: Tensor, seen: Seen, bits: int = 4, group_size: int = 48, symmetric: bool = False
) -> Search:
    """Try every alpha; keep the one whose rounded weights leave the output nearest to itself.

    Cost:   2*F*D*D FLOPs and one rounding, for each of 21 alphas.
    Raises: ValueError if `seen` is of another layer.
    """
    w_FD = wide(w_FD)
    _check(w_FD, seen.gram_DD)
    energy = float(output_loss(w_FD, seen.gram_DD).sum())
    scales, losses = [channel_scale(seen.mean_D, alpha) for alpha in ALPHAS], []
    for s_D in scales:
        off_FD = rounded(w_FD * s_D, bits, group_size, symmetric) / s_D - w_FD
        loss = float(output_loss(off_FD, seen.gram_DD).sum())
        losses.append(loss / energy if energy > 0 else 0.0)
    best = min(range(len(ALPHAS)), key=losses.__getitem__)
    return Search(ALPHAS[best], scales[best], tuple(losses))


@torch.no_grad()
def clip(
    w_FD: Tensor, gram_DD: Tensor, bits: int = 4, group_size: int = 48, symmetric: bool = False
) -> Tensor:
    """Cut each group at that share of its largest magnitude which lowers its output error most.

    A group is judged by its own part of the output. Parts of one row lean on each other, so a row
    whose whole error did not fall stays as it was: on the calibration set, clipping does no harm.

    Shapes: w_FD, gram_DD -> w_FD, clipped.
    Cost:   2*F*D*group_size FLOPs and one rounding, for each of 11 shares.
    """
    wide_FD = wide(w_FD)
    _check(wide_FD, gram_DD)
    pad = -wide_FD.shape[1] % group_size
    gram_JUU = _squares(nnf.pad(gram_DD, (0, pad, 0, pad)), group_size)
    w_FJU = nnf.pad(wide_FD, (0, pad)).unflatten(1, (-1, group_size))
    top_FJ1 = w_FJU.abs().amax(-1, keepdim=True)

    cut_FJU, least_FJ1 = w_FJU, torch.full_like(top_FJ1, torch.inf)
    for share in SHARES:
        tried_FJU = w_FJU.clamp(-top_FJ1 * share, top_FJ1 * share)
        off_FJU = rounded(tried_FJU, bits, group_size, symmetric) - w_FJU
        felt_FJU = torch.einsum("FJU,JUW->FJW", off_FJU, gram_JUU)
        loss_FJ1 = (felt_FJU * off_FJU).sum(-1, keepdim=True)
        cut_FJU = torch.where(loss_FJ1 < least_FJ1, tried_FJU, cut_FJU)
        least_FJ1 = torch.minimum(loss_FJ1, least_FJ1)

    cut_FD = cut_FJU.flatten(1)[:, : wide_FD.shape[1]]
    before_F, after_F = (
        output_loss(rounded(tried_FD, bits, group_size, symmetric) - wide_FD, gram_DD)
        for tried_FD in (wide_FD, cut_FD)
    )
    return torch.where((after_F < before_F)[:, None], cut_FD, wide_FD).to(w_FD.dtype)


def rounded(w: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
    """Through whole-number codes and back."""
    return quantize(w, bits, group_size, symmetric, scale_dtype=w.dtype).dequantize()


def wide(x: Tensor) -> Tensor:
    """In fp32; in fp64 what is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def _squares(gram_DD: Tensor, size: int) -> Tensor:
    """The squares along the diagonal: each group with itself. -> (J, size, size)."""
    J = len(gram_DD) // size
    return gram_DD.view(J, size, J, size).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def _check(w_FD: Tensor, gram_DD: Tensor) -> None:
    if w_FD.ndim != 2 or gram_DD.shape != (w_FD.shape[1],) * 2:
        raise ValueError(
            f"the weights have shape {tuple(w_FD.shape)} but gram_DD {tuple(gram_DD.shape)}: "
            "expected (F, D) and (D, D), what this very layer read"
        )
