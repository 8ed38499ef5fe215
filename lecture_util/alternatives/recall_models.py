"""Four small models that differ in what they remember, trained alike on associative recall.

All have two layers and 75,000 to 90,000 weights. The pairs of a task must be tied together, a key
with the value right after it, and be found again from far away. Attention does both. A window of 4
ties but can't look back. A small linear state looks back, but tells neighbours from others by a
blurred comparison of positions. One layer of each does better, in a memory of fixed size.

It is a matter of size: a wider linear state learns the task as well, see `learn_recall(width=)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from lecture_util.model.config import Config
from lecture_util.model.recall import recall_accuracy, recall_task
from lecture_util.model.train import train
from lecture_util.model.transformer import Block, Transformer

from .based import WindowBlock, based_block
from .linear_attention import LinearAttentionBlock

CONFIG = Config(D=64, F=128, K=1, G=1, H=64, L=2, V=64, max_context=256)
W, WIDTH, STEPS = 4, 4, 400

RECALL_MODELS: dict[str, Callable[[Config, int], nn.Module]] = {
    "attention": Block,
    "window": partial(WindowBlock, W=W),
    "linear": partial(LinearAttentionBlock, width=WIDTH, rotate=True),
    "window + linear": partial(based_block, W=W, width=WIDTH),
}


@dataclass(frozen=True)
class Recall:
    """A trained model, the share of values it gives back on fresh pairs, the loss of each step."""

    kind: str
    accuracy: float
    losses: list[float] = field(repr=False)
    model: Transformer = field(repr=False)


def recall_model(kind: str, seed: int = 0, width: int = WIDTH) -> Transformer:
    """One of RECALL_MODELS, untrained. The global random state is left as it was.

    width: entries of a key in its linear layers; 4 make 21 Taylor features, 8 make 73.
    """
    if kind not in RECALL_MODELS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(RECALL_MODELS)}")
    block = RECALL_MODELS[kind]
    if "linear" in kind:
        block = partial(block, width=width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(CONFIG, block=block)


def learn_recall(
    kind: str,
    seed: int = 0,
    steps: int = STEPS,
    *,
    width: int = WIDTH,
    num_pairs: int = 8,
    gap: int = 0,
    progress: bool = True,
) -> Recall:
    """Train one of RECALL_MODELS; `seed` sets its weights and its batches.

    It is scored on fresh batches, where a guess among the values seen is right once in num_pairs.
    """
    model, task = recall_model(kind, seed, width), recall_task(num_pairs, CONFIG.V, gap=gap)
    losses = train(model, task, steps, seed=seed, label=kind, progress=progress)
    model.eval().requires_grad_(False)
    return Recall(kind, recall_accuracy(model, task), losses, model)
