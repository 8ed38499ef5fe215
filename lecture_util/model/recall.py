"""Associative recall: pairs of key and value, then some of the keys again, in another order.

The model is scored where a key comes the second time: the token after it is its value. A model
that can look back solves it; one that keeps a small summary of the past must have kept every pair.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .train import IGNORE, Batch


def recall_batch(B: int, num_pairs: int, V: int, generator: torch.Generator, gap: int = 0) -> Batch:
    """k v k v ... then k' v' k' v' ...: the same pairs in another order, scored at each k'.

    Keys are drawn without repetition from the lower half of the vocabulary but token 0, values
    from the upper half. `gap` zeros stand between the two halves, to push the pairs away.

    Shapes: tokens_BT and targets_BT with T = 4*num_pairs + gap; unscored targets are IGNORE.
    Source: after Arora et al. 2024, arXiv:2402.18668 (associative recall).
    """
    half = V // 2
    if not 1 <= num_pairs < half:
        raise ValueError(f"num_pairs={num_pairs}: V={V} has keys for 1 to {half - 1} pairs")
    shuffled = torch.rand(B, half - 1, generator=generator).argsort(-1)
    keys_BP = 1 + shuffled[:, :num_pairs]
    values_BP = torch.randint(half, V, (B, num_pairs), generator=generator)
    again_BP = torch.rand(B, num_pairs, generator=generator).argsort(-1)
    first = torch.stack((keys_BP, values_BP), -1).flatten(1)
    second = torch.stack((keys_BP.gather(1, again_BP), values_BP.gather(1, again_BP)), -1)
    tokens_BT = torch.cat((first, first.new_zeros(B, gap), second.flatten(1)), dim=1)
    targets_BT = torch.full_like(tokens_BT, IGNORE)
    asked = torch.arange(2 * num_pairs + gap, tokens_BT.shape[1], 2)
    targets_BT[:, asked] = tokens_BT[:, asked + 1]
    return tokens_BT, targets_BT


def recall_task(
    num_pairs: int = 8, V: int = 64, B: int = 64, gap: int = 0
) -> Callable[[torch.Generator], Batch]:
    """The task as `train` takes it: a fresh batch at every call."""
    return lambda generator: recall_batch(B, num_pairs, V, generator, gap)


@torch.no_grad()
def recall_accuracy(
    model: nn.Module, new_batch: Callable[[torch.Generator], Batch], seed: int = 1234
) -> float:
    """Share of scored positions where the likeliest token is the right one, on fresh batches."""
    generator = torch.Generator().manual_seed(seed)
    right = scored = 0
    for _ in range(8):
        tokens_BT, targets_BT = new_batch(generator)
        asked_BT: Tensor = targets_BT != IGNORE
        best_BT = model(tokens_BT).argmax(-1)
        right += int((best_BT == targets_BT)[asked_BT].sum())
        scored += int(asked_BT.sum())
    return right / scored
