"""Thin a task vector out: the largest entries, a random part, the middle, or large ones likelier.

Fine-tuning moves every weight a little. Most of it is redundant, and where several models are
merged, harmful: four ways to keep a share `density` of a task vector's entries.
"""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from .select import least, only
from .tensors import require_floats, wide


def trim(delta: Tensor, density: float, *, threshold: float | None = None) -> Tensor:
    """The floor(density * n) largest magnitudes, at least one; zero elsewhere (TIES).

    threshold: keep all magnitudes from this on instead (found over a whole model, in fp32).
    Shapes: any -> the same.
    Source: Yadav et al. 2023, arXiv:2306.01708, section 4 step 1.
    """
    density = _share("density", density)
    require_floats(delta=delta)
    if density >= 1 or not delta.numel():
        return delta.clone()
    if density <= 0:
        return torch.zeros_like(delta)
    magnitude = delta.abs()
    if threshold is not None:
        return only(magnitude.float() >= threshold, delta)
    kept = max(1, int(density * delta.numel()))
    small = least(magnitude.flatten(), delta.numel() - kept).view_as(delta)
    return only(small.logical_not_(), delta)


def drop(
    delta: Tensor, density: float, generator: torch.Generator, *, rescale: str | None = "inverse"
) -> Tensor:
    """Keep each entry with probability `density`, rescale what is kept (DARE).

    With "inverse", 1/density, the mean over draws is the task vector itself. The paper's drop
    rate p is 1 - density.
    Shapes: any -> the same.
    Source: Yu et al. 2023, arXiv:2311.03099, equation 2.
    """
    density = _share("density", density)
    require_floats(delta=delta)
    if density >= 1:
        return delta.clone()
    if density <= 0:
        return torch.zeros_like(delta)
    kept = _draw(delta, generator) < density
    return _rescaled(delta, kept, density, rescale)


def breadcrumbs(
    delta: Tensor, density: float, gamma: float = 0.01, *, scope: str = "row"
) -> Tensor:
    """Without the share `gamma` of largest magnitudes, then the next `density`; zero elsewhere.

    The smallest are noise, and the very largest, outliers, belong to one task only.
    scope: rank within each "row" (the last axis, as the authors' code), or the whole "tensor".
    Shapes: any -> the same.
    Source: Davari and Belilovsky 2023, arXiv:2312.06795, section 3.
    """
    density, gamma = _share("density", density), _share("gamma", gamma)
    require_floats(delta=delta)
    if density >= 1 or not delta.numel():
        return delta.clone()
    if scope not in ("row", "tensor"):
        raise ValueError(f"scope is {scope!r}: expected 'row' or 'tensor'")
    magnitude = delta.abs() if scope == "row" and delta.ndim else delta.abs().flatten()
    n = magnitude.shape[-1]
    kept = int(density * n)
    below = max(0, n - kept - int(gamma * n))  # the outliers make room if density needs it
    mask = least(magnitude, below + kept).logical_xor_(least(magnitude, below))
    return only(mask.view_as(delta), delta)


def keep_probabilities(delta: Tensor, density: float, epsilon: float) -> Tensor:
    """From density - epsilon for the smallest magnitude of a row to density + epsilon (MagPrune).

    Evenly spaced by rank within the last axis; a row of one entry gets `density`. epsilon is half
    the paper's window. Shapes: any -> the same, fp32 or wider.
    Source: Deep et al. 2024, arXiv:2406.11617, section 3.
    """
    density = _share("density", density)
    require_floats(delta=delta)
    check_window(density, epsilon)
    n = delta.shape[-1] if delta.ndim else 1
    if n < 2:
        return torch.full_like(wide(delta), density)
    order = delta.abs().argsort(dim=-1, stable=True)
    result = torch.empty_like(wide(delta))
    rising = (density - epsilon) + torch.arange(n).to(result) * (2 * epsilon / (n - 1))
    return result.scatter_(-1, order, rising.expand_as(delta))


def check_window(density: float, epsilon: float, whose: str = "") -> None:
    """Require density +/- epsilon to be probabilities. Raises: ValueError, beginning with whose."""
    if not 0 <= epsilon or density - epsilon <= 0 or density + epsilon > 1:
        raise ValueError(
            f"{whose}density={density} with epsilon={epsilon} spans {density - epsilon:g} to "
            f"{density + epsilon:g}: probabilities must lie above 0 and at most at 1"
        )


def magprune(
    delta: Tensor,
    density: float,
    epsilon: float,
    generator: torch.Generator,
    *,
    rescale: str | None = "inverse",
) -> Tensor:
    """Keep each entry with its own probability, by rank; each survivor over its own (DELLA).

    Shapes: any -> the same. Source: as `keep_probabilities`.
    """
    density = _share("density", density)
    require_floats(delta=delta)
    if density >= 1:
        return delta.clone()
    if density <= 0:
        return torch.zeros_like(delta)
    probability = keep_probabilities(delta, density, epsilon)
    return _rescaled(delta, _draw(delta, generator) < probability, probability, rescale)


def _draw(delta: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers, drawn in fp32 on the CPU whatever the tensor is: the same everywhere."""
    return torch.rand(delta.shape, generator=generator).to(delta.device)


def _rescaled(delta: Tensor, kept: Tensor, p: Tensor | float, rescale: str | None) -> Tensor:
    if rescale not in ("inverse", "l1", None):
        raise ValueError(f"rescale is {rescale!r}: expected 'inverse', 'l1' or None")
    thin = only(kept, delta)
    if rescale == "inverse":
        return thin.div_(p)
    before, after = wide(delta).abs().sum(), wide(thin).abs().sum()
    if rescale is None or min(before, after) < 1e-7:  # nothing survived: nothing to scale up
        return thin
    return thin.mul_(before / after)


def _share(name: str, share: float) -> float:
    """A Python float, or n * share of a float32 would round."""
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share <= 1:
        raise ValueError(f"{name} is {share!r}: expected the share of entries, between 0 and 1")
    return float(share)
