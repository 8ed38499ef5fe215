"""Draft with a smaller model of the same vocabulary, token by token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from operator import index

import torch

from lecture_util.model.sampling import GREEDY, Sampling, probabilities
from lecture_util.model.transformer import Transformer

from .draft import Draft, chain
from .target import Reader, Target
from .verify import Chance


class ModelDrafter:
    """A chain of gamma guesses drawn from another model.

    model:    anything that is a Target: `Reader(small_model, capacity)`, or a `Table` in a test.
    sampling: how it draws; best as the target does. Whatever it is, the q handed on is the tensor
              that was drawn from, so the output stays exact.
    """

    def __init__(self, model: Target, gamma: int, sampling: Sampling = GREEDY) -> None:
        if isinstance(model, torch.nn.Module) or not callable(model):
            raise TypeError(
                f"model is a {type(model).__name__}, which doesn't keep what it has read: wrap it, "
                "as in Reader(model, capacity)"
            )
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling is {sampling!r}: expected Sampling(temperature=0.7)")
        if type(gamma) is not int or gamma < 1:
            raise ValueError(f"gamma={gamma!r}: expected a whole number of guesses, at least 1")
        self.model, self.gamma, self.sampling = model, gamma, sampling

    def propose(self, tokens: Sequence[int], room: int, chance: Chance) -> Draft:
        guesses, q = [], []
        for _ in range(min(self.gamma, room)):
            logits_V = self.model([*tokens, *guesses])[0]
            if self.sampling.temperature == 0:
                guesses.append(int(logits_V.argmax()))
                q.append(None)
            else:
                q.append(probabilities(logits_V, self.sampling))
                guesses.append(chance.draw(q[-1]))
        return chain(guesses, q)

    def settle(self, tokens: Sequence[int]) -> None:
        """Roll the draft's own cache back; like the target's, it holds all but the newest token.
        After a draft accepted to its end it is one token shorter (nobody read the last guess): the
        next `propose` reads it first."""
        if isinstance(self.model, Reader):
            self.model.rewind(tokens[:-1])


def early_exit(model: Transformer, layers: int | Sequence[int]) -> Transformer:
    """The same model with fewer layers: a draft that costs no memory of its own.

    layers: how many of the first to keep, or which ones, in order. Weights are shared.

    Source: skipping layers to draft, Zhang et al. 2023, arXiv:2309.08168.
    Raises: ValueError unless at least one layer is kept, each once, in order; TypeError for what
            is no whole number.
    """
    if isinstance(layers, bool):
        raise TypeError(f"layers={layers}: expected how many of the first to keep, or which ones")
    kept = list(range(layers)) if isinstance(layers, int) else [index(i) for i in layers]
    if not kept or sorted(set(kept)) != kept or not 0 <= kept[0] <= kept[-1] < model.config.L:
        raise ValueError(
            f"layers={layers!r}: keep at least one of the {model.config.L} layers, each once, in "
            "order, or so many of the first"
        )
    with torch.device("meta"):
        small = Transformer(replace(model.config, L=len(kept)), rope_width=model.rope_config.H)
    small.embed, small.norm, small.head = model.embed, model.norm, model.head
    for place, layer in enumerate(kept):
        small.blocks[place] = _at(model.blocks[layer], place)
    return small.train(model.training)


def _at(block: torch.nn.Module, place: int) -> torch.nn.Module:
    """The block under another layer number; its parts are the same objects."""
    moved = copy.copy(block)
    moved.layer = place
    return moved
