"""What does the scheduler's work: the real model, or static batching's padded rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lecture_util.model.sampling import sample
from lecture_util.model.transformer import Transformer

from .flat import FlatCache
from .request import Running
from .scheduler import Work

Drawn = int | Exception  # a new token, or why there is none


class ModelExecutor:
    """One forward of the model over a flat run of everybody's tokens."""

    def __init__(self, model: Transformer, cache: FlatCache) -> None:
        self.model, self.cache = model, cache

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[list[Drawn]]:
        """Compute the work; a new token for every sequence whose turn it is.

        Returns, for each piece of work, a token for its sequence and one for each of its followers,
        or the exception that its drawing raised; nothing where `draws` is False.
        """
        order = sorted(range(len(work)), key=lambda i: work[i].count > 1)
        flat = [work[i] for i in order]
        drawing = [i for i, w in enumerate(flat) if w.draws]
        logits_BV = self.logits(flat, drawing)
        families = [(flat[i].sequence, *flat[i].sequence.followers) for i in drawing]
        drawn: list[list[Drawn]] = [[] for _ in work]
        for i, tokens in zip(drawing, draw(logits_BV, families), strict=True):
            drawn[order[i]] = tokens
        return drawn

    def logits(self, flat: Sequence[Work], drawing: Sequence[int]) -> Tensor:
        """What follows the last token of each piece that `drawing` lists. -> logits_BV."""
        x_1TD = self.forward(flat)
        ends_T = torch.tensor([w.count for w in flat], device=x_1TD.device).cumsum(0) - 1
        return self.model.head(x_1TD[0, ends_T[drawing]])

    def forward(self, flat: Sequence[Work]) -> Tensor:
        """The features of all tokens of the work, one-token rows first. -> x_1TD."""
        tokens = [t for w in flat for t in w.sequence.tokens[w.start : w.start + w.count]]
        self.cache.load(flat)
        return self.model.features(torch.tensor([tokens], device=self.model.device), self.cache)


def draw(logits_BV: Tensor, families: Sequence[Sequence[Running]]) -> list[list[Drawn]]:
    """A token for every member of each row's family. What fails in one row fails it alone."""
    if not families:
        return []
    top_B, best_B = logits_BV.max(-1)  # NaN, where there is one, is the maximum
    best_B, broken_B = best_B.tolist(), top_B.isnan().tolist()
    drawn: list[list[Drawn]] = []
    for b, family in enumerate(families):
        tokens: list[Drawn] = []
        for one in family:
            sampling = one.request.params.sampling
            if sampling.temperature == 0 and not broken_B[b]:
                tokens.append(best_B[b])
                continue
            if one.generator is None:
                one.generator = torch.Generator(logits_BV.device)
                one.generator.manual_seed(one.request.params.seed + one.sample)
            try:
                tokens.append(int(sample(logits_BV[b : b + 1], sampling, one.generator)))
            except ValueError as error:
                tokens.append(error)
        drawn.append(tokens)
    return drawn
