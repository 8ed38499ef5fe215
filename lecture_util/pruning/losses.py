"""How far a student is from its teacher: in what it predicts, and in what its layers hand on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lecture_util.model.shapes import ShapeError


def kl_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Forward KL divergence, T² * mean over positions of sum over V of p (log p - log q).

    p is the teacher's softmax(logits / T), q the student's. A high T evens both out, so that
    unlikely tokens count too; the gradient shrinks by T², which the factor makes up for.

    Shapes: (..., V), (..., V) -> scalar in nats.
    Raises: ShapeError for two vocabularies; ValueError unless T is above 0.
    Source: Hinton et al. 2015, arXiv:1503.02531, section 2.
    """
    positive("temperature", temperature)
    if student_logits.shape != teacher_logits.shape or student_logits.numel() == 0:
        raise ShapeError(
            f"student_logits has shape {tuple(student_logits.shape)} and teacher_logits "
            f"{tuple(teacher_logits.shape)}: expected two of one shape (..., V), not empty"
        )
    V = student_logits.shape[-1]
    log_q_MV, log_p_MV = (
        (at_least_fp32(logits) / temperature).log_softmax(-1).reshape(-1, V)  # M positions
        for logits in (student_logits, teacher_logits)
    )  # @inspect log_q_MV, log_p_MV
    # torch's mean would divide by V as well, and "batchmean" by the first axis alone.
    total = nnf.kl_div(log_q_MV, log_p_MV.exp(), reduction="sum")  # @inspect total
    return total * temperature**2 / len(log_q_MV)


def hidden_loss(student_states: Sequence[Tensor], teacher_states: Sequence[Tensor]) -> Tensor:
    """1 - cosine of what two models' layers hand on, mean over layers and positions.

    A cosine, since the next layer reads its input through RMSNorm, which takes the length out. And
    lengths differ: half-way up SmolLM2-135M the first position is 100 times as long as the rest,
    so that a mean squared error would see almost nothing else.

    Shapes: two lists of (..., D), as long as each other -> scalar, 0 to 2.
    Raises: ShapeError if their numbers or shapes differ.
    """
    shapes = [[tuple(x.shape) for x in states] for states in (student_states, teacher_states)]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise ShapeError(
            f"student_states are {len(shapes[0])} of {shapes[0][:1]}, teacher_states "
            f"{len(shapes[1])} of {shapes[1][:1]}: expected one teacher state of equal shape for "
            "each student state; after keep_channels leave hidden=0, the widths differ"
        )
    cosines = [
        nnf.cosine_similarity(at_least_fp32(x), at_least_fp32(y), dim=-1).mean()
        for x, y in zip(student_states, teacher_states, strict=True)
    ]
    return 1 - torch.stack(cosines).mean()


def counterparts(kept: Sequence[int], L: int) -> list[int]:
    """After which of the teacher's L layers each kept layer should hand on the same state.

    Not after itself: before the next layer that was kept. So the layers in front of a gap learn
    the work of those that are gone. Keeping 0, 1, 4 of six layers: [0, 3, 5].
    """
    kept = list(kept)
    whole = all(type(layer) is int for layer in kept)
    if not kept or not whole or kept != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= L:
        raise ValueError(f"kept={kept}: expected rising numbers of layers from 0 to {L - 1}")
    return [after - 1 for after in kept[1:]] + [L - 1]


def positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: expected a number above 0")


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
