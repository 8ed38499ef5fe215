"""Train a small model: one loop, used wherever the course asks what an architecture can learn."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

IGNORE = -100  # a target that is not scored

Batch = tuple[Tensor, ...]  # tokens_BT and targets_BT, or what another loss takes


def scored_loss(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy over the scored targets, those that aren't IGNORE."""
    logits_MV = model(tokens_BT).flatten(0, 1)  # M = B*T
    return nnf.cross_entropy(logits_MV, targets_BT.flatten(), ignore_index=IGNORE)


def train(
    model: nn.Module,
    new_batch: Callable[[torch.Generator], Batch],
    steps: int,
    *,
    lr: float = 3e-3,
    warmup: int = 20,
    weight_decay: float = 0.01,
    seed: int = 0,
    label: str = "training",
    progress: bool = True,
    every: Callable[[int, float], None] | None = None,
    loss_of: Callable[..., Tensor] = scored_loss,
) -> list[float]:
    """AdamW, by default on the cross-entropy of the scored targets; the loss of each step.

    The learning rate rises over `warmup` steps, stays, and falls to zero in the last quarter.
    Gradients are cut to a norm of 1. Same model, seed and machine: same losses.

    new_batch: draws tokens_BT and targets_BT (IGNORE where nothing is scored) from a generator.
    every:     called with step and loss after each step, for curves.
    loss_of:   what is minimised, as loss_of(model, *batch).
    Raises: FloatingPointError at a loss that is no number, before it reaches the weights.
    """
    from tqdm.auto import tqdm

    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps={steps!r}: expected a whole number, at least 1")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training, grads = model.training, torch.is_grad_enabled()
    losses = []
    torch.set_grad_enabled(True)
    model.train()
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _trapezoid(steps, warmup))
        for step in tqdm(range(steps), desc=label, leave=False, disable=not progress):
            loss = loss_of(model, *(part.to(device) for part in new_batch(generator)))
            if not loss.isfinite():
                raise FloatingPointError(
                    f"the loss of step {step} is {loss.item()}: lower lr={lr}, and see that every "
                    "batch scores some target"
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if every is not None:
                every(step, losses[-1])
    finally:
        model.train(was_training)
        torch.set_grad_enabled(grads)
    return losses


def _trapezoid(steps: int, warmup: int) -> Callable[[int], float]:
    """Up over the warm-up, level, then down to nothing over the last quarter."""
    return lambda step: min(1.0, (step + 1) / max(1, warmup), 4 * (steps - step) / steps)
