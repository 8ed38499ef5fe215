"""Repair a pruned model: the model it was cut from shows it, token by token, what to predict.

A text names one next token. The teacher names a probability for every token in the vocabulary, at
each position: what very many texts by the teacher would say. A text by others says something else,
its own domain, which `text=` mixes in.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lecture_util.model.shapes import ShapeError
from lecture_util.model.text import text_task, windows
from lecture_util.model.train import train
from lecture_util.model.transformer import Transformer

from .importance import block_influence
from .losses import at_least_fp32, counterparts, hidden_loss, kl_loss, positive
from .prune import drop_layers

ROWS = 256  # positions whose logits are in memory at a time


def distill(
    student: Transformer,
    teacher: Transformer,
    study_S: Tensor,
    steps: int,
    *,
    B: int = 8,
    T: int = 128,
    lr: float = 1e-4,
    temperature: float = 1.0,
    hidden: float = 0.0,
    text: float = 0.0,
    kept: Sequence[int] | None = None,
    autocast: bool | None = None,
    warmup: int | None = None,
    seed: int = 0,
    budget_s: float | None = None,
    label: str = "distilling",
    progress: bool = True,
    every: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `student`, in place, to predict what `teacher` predicts; the loss of each step.

    The loss is (1 - text) * kl_loss + text * cross-entropy + hidden * hidden_loss over B windows
    of T tokens of `study_S`, by AdamW. All of the student's weights learn, the teacher's never.
    Same weights, seed and machine: same losses, unless the budget cuts in.

    text:     share of the text's own next tokens; at 1 (and hidden=0) the teacher isn't run.
    kept:     which of the teacher's layers the student has, if hidden > 0 and some were dropped.
    autocast: multiply in bf16; by default where the processor has units for it.
    warmup:   steps until the rate is lr; by default a tenth of them.
    budget_s: stop after this many seconds, whatever is left of `steps`.
    Cost:     (6 student + 2 teacher) FLOPs per weight and token, and one more student head.
    Raises: ValueError or ShapeError for what cannot be distilled, before any step;
            FloatingPointError at a loss that is no number, before it reaches the weights.
    """
    _check(student, teacher, study_S, B, T, temperature, hidden, text)
    layers = _layers_to_match(student, teacher, kept) if hidden else []
    autocast = bf16_pays(student.device) if autocast is None else autocast

    def loss_of(student: Transformer, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with torch.autocast(student.device.type, torch.bfloat16, enabled=autocast):
            states, x_BTD = _features(student, tokens_BT, bool(layers))
            teacher_x_BTD = None
            if layers or text < 1:
                with torch.no_grad():
                    shown, teacher_x_BTD = _features(teacher, tokens_BT, bool(layers))
            loss = _head_loss(student, teacher, x_BTD, teacher_x_BTD, targets_BT, temperature, text)
            if not layers:
                return loss
            return loss + hidden * hidden_loss(states, [shown[layer] for layer in layers])

    warmup = max(1, steps // 10) if warmup is None and type(steps) is int else warmup
    options = dict(lr=lr, warmup=warmup, seed=seed, budget_s=budget_s, label=label)
    with _frozen(teacher), _learning(student):
        return train(
            student, text_task(study_S, B, T), steps,
            loss_of=loss_of, progress=progress, every=every, **options,
        )  # fmt: skip


def iterative(
    teacher: Transformer,
    study_S: Tensor,
    drop: int,
    rounds: int,
    steps: int,
    *,
    calibration: int = 32,
    T: int = 128,
    seed: int = 0,
    every: Callable[[int, float], None] | None = None,
    **options,
) -> tuple[Transformer, list[float], list[int]]:
    """Drop layers in several rounds, and distill after each; `steps` in all.

    Each round drops the layers of least block influence in the model as it then is, on
    `calibration` windows of the study text. rounds=1 is the one-shot repair.

    Returns: the student, its losses, and which of the teacher's layers it kept.
    """
    whole = all(type(n) is int for n in (drop, rounds, steps))
    if not (whole and 1 <= rounds <= min(drop, steps) and drop < teacher.config.L):
        raise ValueError(
            f"drop={drop}, rounds={rounds}, steps={steps}: expected 1 to {teacher.config.L - 1} "
            "layers to drop, and at least one layer and one step a round"
        )
    sample_BT = windows(study_S, calibration, T, torch.Generator().manual_seed(seed))
    student, kept, losses = teacher, list(range(teacher.config.L)), []
    for r in range(rounds):
        now, share = (n * (r + 1) // rounds - n * r // rounds for n in (drop, steps))
        least = block_influence(student, sample_BT.to(student.device)).argsort()[:now].tolist()
        student = drop_layers(student, least)
        kept = [layer for i, layer in enumerate(kept) if i not in least]
        done = len(losses)
        note = None if every is None else lambda step, loss, done=done: every(done + step, loss)
        losses += distill(
            student, teacher, study_S, share,
            T=T, seed=seed + r, kept=kept, every=note, **options,
        )  # fmt: skip
    return student, losses, kept


def bf16_pays(device: torch.device) -> bool:
    """Does this device multiply bf16 faster than fp32? GPUs do, and CPUs with AMX tiles.

    Without AMX, Intel cores that have AVX512-BF16 were half as fast in bf16 as in fp32.
    """
    if device.type != "cpu":
        return device.type == "cuda"
    return torch.cpu.get_capabilities().get("amx_bf16", False)


def _head_loss(student, teacher, x_BTD, teacher_x_BTD, targets_BT, temperature, text):
    """What is asked of the logits, a few rows at a time, and made again for the gradient.

    8 x 128 positions of 49,152 tokens are 200 MB in fp32, and a softmax and its gradient hold
    several copies: a repair of the reference model peaked at 4.2 GB with all logits at once and at
    3.0 GB so, in about the same time.
    """

    def part(x_MD: Tensor, teacher_x_MD: Tensor | None, targets_M: Tensor) -> Tensor:
        logits_MV, loss = student.head(x_MD), 0.0
        if text < 1:
            with torch.no_grad():
                teacher_logits_MV = teacher.head(teacher_x_MD)
            loss = (1 - text) * kl_loss(logits_MV, teacher_logits_MV, temperature)
        if text > 0:
            loss = loss + text * nnf.cross_entropy(at_least_fp32(logits_MV), targets_M)
        return loss * len(x_MD)

    flat = [x if x is None else x.flatten(0, 1) for x in (x_BTD, teacher_x_BTD, targets_BT)]
    M = len(flat[0])
    if M <= ROWS:
        return part(*flat) / M
    total = 0.0
    for start in range(0, M, ROWS):
        rows = [x if x is None else x[start : start + ROWS] for x in flat]
        total = total + checkpoint(part, *rows, use_reentrant=False)
    return total / M


def _features(model: Transformer, tokens_BT: Tensor, states: bool) -> tuple[list[Tensor], Tensor]:
    """What each layer hands on, if asked for, and what the head reads."""
    seen: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda block, inputs, output: seen.append(output))
        for block in (model.blocks if states else ())
    ]
    try:
        return seen, model.features(tokens_BT)
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _frozen(model: Transformer) -> Iterator[None]:
    """In eval mode; put back afterwards."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@contextlib.contextmanager
def _learning(model: Transformer) -> Iterator[None]:
    """All weights take gradients; afterwards those that did, and no gradient is left."""
    was = [weight.requires_grad for weight in model.parameters()]
    model.requires_grad_(True)
    try:
        yield
    finally:
        for weight, did in zip(model.parameters(), was, strict=True):
            weight.requires_grad_(did).grad = None


def _layers_to_match(student, teacher, kept) -> list[int]:
    L = teacher.config.L
    if kept is None and student.config.L != L:
        raise ValueError(
            f"the student has {student.config.L} layers and the teacher {L}: hidden states need "
            "kept=, the teacher's layers that the student has"
        )
    layers = counterparts(range(L) if kept is None else kept, L)
    if len(layers) != student.config.L:
        raise ValueError(f"kept names {len(layers)} layers, the student has {student.config.L}")
    if student.config.D != teacher.config.D:
        raise ShapeError(
            f"the student is {student.config.D} wide and the teacher {teacher.config.D}: states "
            "of two widths have no cosine, so leave hidden=0"
        )
    return layers


def _count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _check(student, teacher, study_S, B, T, temperature, hidden, text) -> None:
    if student.config.V != teacher.config.V:
        raise ShapeError(
            f"the student's vocabulary has {student.config.V} tokens and the teacher's "
            f"{teacher.config.V}: token i must mean the same to both"
        )
    if (ours := _count(student)) > (theirs := _count(teacher)):
        raise ValueError(
            f"the student has {ours:,} weights and the teacher {theirs:,}: were the two swapped? "
            "The student, which learns, comes first"
        )
    for name, module in student.blocks.named_modules():
        leaf = name.rpartition(".")[2] in ("qkv", "out", "gate_up", "down")
        if leaf and not (isinstance(module, nn.Linear) and module.weight.is_floating_point()):
            raise TypeError(
                f"the student's blocks.{name} is a {type(module).__name__}, whose weights can't "
                "learn: distill in floating point first, then quantize"
            )
    positive("temperature", temperature)
    if not (0 <= text <= 1 and 0 <= hidden < math.inf):
        raise ValueError(f"text={text}, hidden={hidden}: expected 0 <= text <= 1 and hidden >= 0")
    if type(B) is not int or type(T) is not int or min(B, T) < 1:
        raise ValueError(f"B={B!r}, T={T!r}: expected whole numbers, at least 1")
    if study_S.ndim != 1 or study_S.is_floating_point() or len(study_S) <= T:
        raise ShapeError(
            f"study_S is {study_S.dtype} of shape {tuple(study_S.shape)}: expected one row of more "
            f"than T={T} token ids, such as text.english_split gives"
        )
    if not 0 <= int(study_S.min()) <= int(study_S.max()) < student.config.V:
        raise ValueError(
            f"study_S holds tokens {int(study_S.min())} to {int(study_S.max())}: expected 0 to "
            f"{student.config.V - 1}; was it encoded by this model's tokenizer?"
        )
    if student.device != teacher.device:
        raise ValueError(f"student on {student.device}, teacher on {teacher.device}: move one")
    theirs = {weight.data_ptr() for weight in teacher.parameters()}
    if any(weight.data_ptr() in theirs for weight in student.parameters()):
        raise ValueError(
            "student and teacher share weights, so that training one would change the other: "
            "pass a copy, as drop_layers or copy.deepcopy make"
        )
    if student.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"the student's weights are {student.dtype}: most steps of AdamW would round to "
            "nothing. Train in fp32, student.float(); autocast=True still multiplies in bf16"
        )
