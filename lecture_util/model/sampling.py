"""From logits to a token: temperature, then top-k, top-p and min-p, then one draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. Temperature 0 is greedy; the filters only ever remove tokens.

    temperature   divides the logits, before any filter
    top_k         keep the k most likely
    top_p         keep the most likely until their mass reaches p, the one that crosses included
    min_p         keep those at least min_p times as likely as the most likely
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            kinds = int if name == "top_k" else int | float
            missing = value is None and name != "temperature"
            if not missing and (isinstance(value, bool) or not isinstance(value, kinds)):
                kind = "a whole number" if name == "top_k" else "a number"
                raise TypeError(f"{name}={value!r}: expected {kind}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature}: expected a number from 0 (greedy) up, such as 0.8"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: expected at least 1, or None to keep all")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}={value}: expected above 0 and at most 1, or None")


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that `sample` draws from. Leaves `logits` as they are.

    Shapes: logits (..., V) -> probabilities (..., V), fp32 or the logits' own if wider.
    Raises: ValueError if a row has a NaN or nothing finite.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not logits.max(-1).values.isfinite().all():  # NaN is the maximum of its row
        raise ValueError("logits hold NaN, +inf or only -inf: the model's output is broken")
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    # From the largest down, so that a tiny temperature gives -inf and not inf.
    probs = ((logits - logits.max(-1, keepdim=True).values) / sampling.temperature).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < probs.shape[-1]:
        kept = probs.topk(sampling.top_k).indices
        probs = torch.zeros_like(probs).scatter(-1, kept, probs.gather(-1, kept))
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(mass_before >= sampling.top_p, 0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    if sampling.min_p is not None:
        floor = sampling.min_p * probs.max(-1, keepdim=True).values
        probs = probs.masked_fill(probs < floor, 0)
    return probs / probs.sum(-1, keepdim=True)


def sample(
    logits_BV: Tensor, sampling: Sampling = GREEDY, generator: torch.Generator | None = None
) -> Tensor:
    """Choose one token a row.

    Shapes: logits_BV -> tokens_B. The generator lives on the logits' device.
    """
    if sampling.temperature == 0:
        if logits_BV.isnan().any():
            raise ValueError("logits hold NaN: the model's output is broken")
        return logits_BV.argmax(-1)
    probs_BV = probabilities(logits_BV, sampling)
    return torch.multinomial(probs_BV, 1, generator=generator)[:, 0]
