"""Train a small model: one loop, used wherever the course asks what an architecture can learn."""

from __future__ import annotations

import time
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
    budget_s: float | None = None,
) -> list[float]:
    """AdamW, by default on the cross-entropy of the scored targets; the loss of each step.

    The learning rate rises over `warmup` steps, stays, and falls to zero in the last quarter.
    Gradients are cut to a norm of 1. Same model, seed and machine: same losses.

    new_batch: draws tokens_BT and targets_BT (IGNORE where nothing is scored) from a generator.
    every:     called with step and loss after each step, for curves.
    loss_of:   what is minimised, as loss_of(model, *batch).
    budget_s:  stop after the step in which so many seconds have passed; where they run out before
               the steps do, the rate falls by the clock, so that the last steps still settle.
    Raises: FloatingPointError at a loss that is no number, before it reaches the weights.
    """
    from tqdm.auto import tqdm

    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps={steps!r}: expected a whole number, at least 1")
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"budget_s={budget_s!r}: expected seconds above 0, or None for no limit")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training, grads = model.training, torch.is_grad_enabled()
    losses = []
    start = time.perf_counter()

    def spent() -> float:
        """Share of the budget that is gone."""
        return 0.0 if budget_s is None else (time.perf_counter() - start) / budget_s

    torch.set_grad_enabled(True)
    model.train()
    try:
        options = dict(lr=lr, weight_decay=weight_decay, fused=True)  # one pass over the weights
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _trapezoid(step, steps, warmup, spent())
        )
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
            if spent() >= 1:
                break
    finally:
        model.train(was_training)
        torch.set_grad_enabled(grads)
    return losses


def _trapezoid(step: int, steps: int, warmup: int, spent: float) -> float:
    """Up over the warm-up, level, then down to nothing over the last quarter."""
    left = max(0.0, 1 - max(step / steps, spent))
    return min(1.0, (step + 1) / max(1, warmup), 4 * left)
