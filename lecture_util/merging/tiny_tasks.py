"""One tiny base, several tasks, and fine-tunes in a second each: merging, tried out live.

A prompt is a task's symbol and then digits; at every digit the model answers what the task asks of
the digits so far. The base practises all tasks, but sees the task's symbol in few of its prompts:
it has the skills and does not quite know when to use which. Short fine-tunes from it sharpen one
task each and forget others, and their merge has to do them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lecture_util.model.config import Config
from lecture_util.model.train import IGNORE, Batch, train
from lecture_util.model.transformer import Transformer


def _previous(digits_BT: Tensor) -> Tensor:
    """The digit before; the first has itself before it."""
    return torch.cat((digits_BT[:, :1], digits_BT[:, :-1]), dim=1)


# digits_BT -> answers_BT, each from the digits up to its own
TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "previous": _previous,
    "largest": lambda digits_BT: digits_BT.cummax(1).values,
    "sum": lambda digits_BT: (digits_BT + _previous(digits_BT)) % 10,
    "first": lambda digits_BT: digits_BT[:, :1].expand_as(digits_BT),
    "smallest": lambda digits_BT: digits_BT.cummin(1).values,
}
PRACTISED = ("previous", "largest", "sum", "first")  # the base knows them; "smallest" it doesn't
UNNAMED = 10  # stands where a prompt does not say which task is asked
SYMBOLS = {name: UNNAMED + 1 + i for i, name in enumerate(TASKS)}
CONFIG = Config(D=64, F=128, K=2, G=1, H=32, L=2, V=11 + len(TASKS), max_context=64)
T, B = 12, 32  # digits of a prompt, prompts of a training step

Model = Callable[[Tensor], Tensor]  # tokens_BT -> logits_BTV
NewBatch = Callable[[torch.Generator], Batch]


class Score(NamedTuple):
    """Nats and share of right answers a digit, on fresh prompts."""

    loss: float
    accuracy: float


def task_batch(
    names: str | Sequence[str],
    B: int,
    T: int,
    generator: torch.Generator,
    *,
    shown: float = 1.0,
) -> Batch:
    """Prompts of one task, or of several in equal shares at random.

    shown: share of the prompts that begin with the task's symbol; the others begin with UNNAMED.
    Shapes: tokens_BT and targets_BT, T + 1 wide; the symbol's own target is IGNORE.
    Raises: ValueError for an unknown task, for no digits, or a share that is none.
    """
    names = _known(names)
    if T < 1 or B < 1:
        raise ValueError(f"B={B} prompts of T={T} digits: expected at least 1 of each")
    if not 0 <= shown <= 1:
        raise ValueError(f"shown={shown} is a share of the prompts: expected 0 to 1")
    digits_BT = torch.randint(0, 10, (B, T), generator=generator)
    asked_B = torch.randint(0, len(names), (B,), generator=generator)
    shown_B = torch.rand(B, generator=generator) < shown
    answers_BT = torch.stack([TASKS[name](digits_BT) for name in names])[asked_B, torch.arange(B)]
    symbol_B = torch.tensor([SYMBOLS[name] for name in names])[asked_B]
    symbol_B = symbol_B.where(shown_B, torch.tensor(UNNAMED))
    tokens_BT = torch.cat((symbol_B[:, None], digits_BT), dim=1)
    return tokens_BT, nnf.pad(answers_BT, (1, 0), value=IGNORE)


def few_examples(name: str, rows: int = 128, wrong: float = 0.2, seed: int = 0) -> NewBatch:
    """Batches from the same few prompts of a task, the share `wrong` of their answers at random.

    What people fine-tune on: not much, and not clean. Runs over it differ, and so can be averaged.
    """
    if not 0 <= wrong <= 1:
        raise ValueError(f"wrong={wrong} is a share of the answers: expected 0 to 1")
    generator = torch.Generator().manual_seed(seed)
    tokens_BT, targets_BT = task_batch(name, rows, T, generator)
    wrong_BT = (torch.rand(targets_BT.shape, generator=generator) < wrong) & (targets_BT != IGNORE)
    guesses_BT = torch.randint(0, 10, targets_BT.shape, generator=generator)
    targets_BT = guesses_BT.where(wrong_BT, targets_BT)

    def new_batch(generator: torch.Generator) -> Batch:
        drawn_B = torch.randint(0, rows, (B // 2,), generator=generator)
        return tokens_BT[drawn_B], targets_BT[drawn_B]

    return new_batch


def untrained(seed: int = 0) -> Transformer:
    """Torch's default weights. The global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(CONFIG)


def tiny_base(seed: int = 0, *, steps: int = 400, shown: float = 0.05) -> Transformer:
    """A model that has practised the tasks of PRACTISED; `seed` sets its weights and its batches.

    shown: share of the prompts that say which task is asked. From 0.1 on the base does all tasks
           well and there is little to merge; at 0 it does a mixture of them whatever it's asked.
    """
    model = untrained(seed)
    return _trained(model, lambda g: task_batch(PRACTISED, B, T, g, shown=shown), steps, 3e-3, seed)


def fine_tune(
    base: Transformer,
    task: str | Sequence[str] | NewBatch,
    *,
    seed: int = 0,
    lr: float = 5e-4,
    steps: int = 40,
) -> Transformer:
    """A copy of `base`, trained on a task, on several at once, or on what `few_examples` returns.

    `seed` sets the order of the batches.
    """
    names = None if callable(task) else _known(task)
    new_batch = task if names is None else lambda g: task_batch(names, B, T, g)
    return _trained(copy.deepcopy(base), new_batch, steps, lr, seed, warmup=10)


def _trained(
    model: Transformer, new_batch: NewBatch, steps: int, lr: float, seed: int, warmup: int = 20
) -> Transformer:
    model.requires_grad_(True)
    train(model, new_batch, steps, lr=lr, warmup=warmup, seed=seed, progress=False)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def evaluate(model: Model, name: str, *, T: int = T, B: int = 512, seed: int = 1234) -> Score:
    """Score a model, or whatever makes logits of tokens, on a task; `seed` sets the prompts.

    T: digits of a prompt. More than it was trained with tell how it does out of distribution.
    """
    tokens_BT, targets_BT = task_batch(name, B, T, torch.Generator().manual_seed(seed))
    logits_BTV, answers_BT = model(tokens_BT)[:, 1:], targets_BT[:, 1:]
    loss = nnf.cross_entropy(logits_BTV.flatten(0, 1), answers_BT.flatten())
    return Score(loss.item(), (logits_BTV.argmax(-1) == answers_BT).float().mean().item())


def mean_score(model: Model, names: Sequence[str] = PRACTISED, **how) -> Score:
    """The mean over tasks of loss and of accuracy; `how` as in `evaluate`."""
    scores = [evaluate(model, name, **how) for name in _known(names)]
    return Score(*(sum(part) / len(scores) for part in zip(*scores, strict=True)))


def ensemble(models: Sequence[Model]) -> Model:
    """All models at once, at the cost of all: the mean of their log-probabilities, as logits."""
    if not models:
        raise ValueError("an ensemble of no models: pass at least one")
    return lambda tokens_BT: sum(model(tokens_BT).log_softmax(-1) for model in models) / len(models)


def state(model: Transformer) -> dict[str, Tensor]:
    """Name -> weights, for the merging functions; copies."""
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def with_state(model: Transformer, weights: Mapping[str, Tensor]) -> Transformer:
    """A copy of the model that holds these weights, names and shapes alike."""
    new = copy.deepcopy(model)
    new.load_state_dict(weights)
    return new.eval().requires_grad_(False)


def _known(names: str | Sequence[str]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names or any(name not in TASKS for name in names):
        raise ValueError(f"tasks {names!r}: expected one or more of {', '.join(TASKS)}")
    return names
