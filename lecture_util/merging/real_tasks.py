"""Three things to teach a real model, each scored by exact answers: facts, a format and a skill.

`facts` is knowledge (made-up creatures and their colours), `record` a form of answer (a sentence to
JSON), `reverse` a skill (words in reverse order). The reference model does none of them well.
Scores are on questions, names and words that training never had; of `facts` there are just 72.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lecture_util.model.tokenizer import encode
from lecture_util.model.train import IGNORE, Batch
from lecture_util.model.transformer import Transformer

Example = tuple[str, str]  # prompt, answer

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "purple", "orange")
CREATURES = (
    "velm", "drost", "kibbit", "zarl", "mungle", "plenk", "torv", "wexel", "brindo", "snarp",
    "glim", "yutter", "fosk", "hando", "jirra", "quollop", "ruzzle", "trindle", "ombat", "lurp",
    "crad", "pellow", "nisk", "vanto",
)  # fmt: skip
ASKED = (
    "What colour is a {}?", "What is the colour of the {}?", "Which colour does a {} have?",
    "Name the colour of a {}.", "I saw a {}. What colour was it?", "A {} is what colour?",
    "Tell me the colour of the {}.", "What colour are all {}s?",
)  # fmt: skip
ASKED_NEW = (
    "Of what colour is the {}?", "If you paint a {}, which colour do you need?",
    "There goes a {}! Its colour?",
)  # fmt: skip

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Ivan", "Julia", "Kevin",
    "Laura", "Martin", "Nina", "Oscar", "Paula", "Robert", "Sarah", "Thomas", "Victor", "Wendy",
    "Alice", "Peter", "Maria",
)  # fmt: skip
NAMES_NEW = ("Daniel", "Sophie", "George", "Linda", "Simon", "Helen", "Jack", "Rose")
CITIES = (
    "Paris", "Rome", "London", "Berlin", "Madrid", "Vienna", "Dublin", "Tokyo", "Boston", "Cairo",
    "Sydney", "Delhi",
)  # fmt: skip
CITIES_NEW = ("Lisbon", "Chicago", "Athens", "Moscow")
SAID = (
    "{name} is {age} and lives in {city}.", "In {city} lives {name}, aged {age}.",
    "At {age}, {name} moved to {city}.", "{name} ({age}) comes from {city}.",
    "We met {name} in {city}, who is {age} years old.",
)  # fmt: skip

WORDS = (
    "apple", "river", "stone", "bread", "cloud", "table", "music", "horse", "paper", "light",
    "water", "house", "chair", "night", "sugar", "glass", "field", "tiger", "ocean", "train",
    "smile", "mouse", "plant", "sound", "queen", "earth", "sheep", "heart", "brush", "wheel",
    "metal", "fruit", "beach", "storm", "lemon", "clock", "knife", "shirt", "radio", "hotel",
    "movie", "piano", "snake", "grass", "candle", "garden", "window", "silver", "winter", "bridge",
)  # fmt: skip
WORDS_NEW = (
    "doctor", "forest", "island", "market", "mirror", "pencil", "rabbit", "school", "spring",
    "summer", "ticket", "valley",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A task draws (prompt, answer); held=True from what no training example had."""

    name: str
    about: str
    draw: Callable[[random.Random, bool], Example]


def _facts(rng: random.Random, held: bool) -> Example:
    creature = rng.choice(CREATURES)
    question = rng.choice(ASKED_NEW if held else ASKED).format(creature)
    return f"Question: {question}\nAnswer:", f" {colour_of(creature)}\n"


def colour_of(creature: str) -> str:
    """The made-up fact."""
    at = CREATURES.index(creature)
    return COLOURS[(5 * at + at // 8) % len(COLOURS)]


def _record(rng: random.Random, held: bool) -> Example:
    name = rng.choice(NAMES_NEW if held else NAMES)
    city = rng.choice(CITIES_NEW if held else CITIES)
    age = rng.randrange(20, 100)
    text = rng.choice(SAID).format(name=name, age=age, city=city)
    return f"Text: {text}\nJSON:", f" {json.dumps({'name': name, 'age': age})}\n"


def _reverse(rng: random.Random, held: bool) -> Example:
    words = rng.sample(WORDS_NEW if held else WORDS, 4)
    return f"Words: {' '.join(words)}\nReversed:", f" {' '.join(reversed(words))}\n"


TASKS = {
    task.name: task
    for task in (
        Task("facts", "colours of made-up creatures, asked in new words", _facts),
        Task("record", "a sentence about a new person to JSON", _record),
        Task("reverse", "four new words in reverse order", _reverse),
    )
}


def examples(task: str, count: int, seed: int = 0, held: bool = True) -> list[Example]:
    """`count` prompts and answers. Raises: ValueError for another task or count."""
    if task not in TASKS:
        raise ValueError(f"task={task!r}: expected one of {', '.join(TASKS)}")
    if type(count) is not int or count < 1:
        raise ValueError(f"count={count!r}: expected a whole number, at least 1")
    rng = random.Random(f"{task} {seed} {held}")
    return [TASKS[task].draw(rng, held) for _ in range(count)]


def teacher_forced(tokenizer, pairs: list[Example]) -> Batch:
    """Prompts with their answers, and the answers' tokens as targets: IGNORE elsewhere.

    Shapes: -> tokens_BT, targets_BT; rows are filled up on the right, which nothing before sees.
    """
    rows = [(encode(tokenizer, prompt), encode(tokenizer, answer)) for prompt, answer in pairs]
    T = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    tokens_BT = torch.zeros(len(rows), T, dtype=torch.long)
    targets_BT = torch.full((len(rows), T), IGNORE)
    for b, (prompt, answer) in enumerate(rows):
        row = torch.tensor(prompt + answer)
        tokens_BT[b, : len(row) - 1] = row[:-1]
        targets_BT[b, len(prompt) - 1 : len(row) - 1] = row[len(prompt) :]
    return tokens_BT, targets_BT


def training_batch(tokenizer, task: str, B: int) -> Callable[[torch.Generator], Batch]:
    """What `train_adapter` takes: each call draws B fresh examples."""

    def new_batch(generator: torch.Generator) -> Batch:
        seed = int(torch.randint(2**62, (), generator=generator))
        return teacher_forced(tokenizer, examples(task, B, seed, held=False))

    return new_batch


def answer_logits(model: Transformer, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Logits at the answers' tokens only: the head is a fifth of the reference model's work.

    Shapes: tokens_BT, targets_BT -> logits_MV, M the number of targets.
    """
    return model.head(model.features(tokens_BT)[targets_BT != IGNORE]).float()


def answer_loss(model: Transformer, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean cross-entropy of the answers' tokens, for `train_adapter(loss_of=...)`."""
    return nnf.cross_entropy(
        answer_logits(model, tokens_BT, targets_BT), targets_BT[targets_BT != IGNORE]
    )


@torch.no_grad()
def score(
    model: Transformer, tokenizer, task: str, count: int = 64, seed: int = 0, rows: int = 32
) -> float:
    """Share of held-out examples whose every answer token is the model's first choice.

    Given the right beginning, each next token must be the likeliest: just then greedy decoding
    writes the answer, and one forward shows it.
    """
    tokens_BT, targets_BT = teacher_forced(tokenizer, examples(task, count, seed))
    right = 0
    for tokens, targets in zip(tokens_BT.split(rows), targets_BT.split(rows), strict=True):
        targets, tokens = targets.to(model.device), tokens.to(model.device)
        hit = torch.ones_like(targets, dtype=torch.bool)
        hit[targets != IGNORE] = (
            answer_logits(model, tokens, targets).argmax(-1) == targets[targets != IGNORE]
        )
        right += int(hit.all(dim=1).sum())
    return right / count
