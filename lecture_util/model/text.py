"""English that ships with Python, and how well a model predicts it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from .tokenizer import encode
from .train import Batch


def english() -> str:
    """Half a megabyte: Python's own reference, from the module `pydoc_data.topics`.

    Its wording differs a little between versions of Python, and so do figures measured on it.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def english_bytes() -> Tensor:
    """The same text as one token a byte, V = 128: small enough for small models' vocabularies."""
    return torch.tensor(list(english().encode("ascii", "replace")))


def windows(tokens_S: Tensor, B: int, T: int, generator: torch.Generator) -> Tensor:
    """B windows of T tokens each, from anywhere in the text. Shapes: tokens_S -> tokens_BT."""
    if not 1 <= T <= len(tokens_S):
        raise ValueError(f"T={T} but the text has {len(tokens_S)} tokens")
    starts_B = torch.randint(len(tokens_S) - T + 1, (B,), generator=generator)
    return tokens_S[starts_B[:, None] + torch.arange(T)]


def text_task(tokens_S: Tensor, B: int, T: int) -> Callable[[torch.Generator], Batch]:
    """Predict the next token, as `train` takes it: each call draws B windows of T + 1 tokens."""

    def new_batch(generator: torch.Generator) -> Batch:
        tokens = windows(tokens_S, B, T + 1, generator)
        return tokens[:, :-1], tokens[:, 1:]

    return new_batch


@torch.no_grad()
def nats_per_token(model: nn.Module, tokens_BT: Tensor, rows: int = 8) -> float:
    """Mean cross-entropy of each token given those before it in its row; `rows` rows at a time."""
    if tokens_BT.ndim != 2 or tokens_BT.shape[1] < 2 or len(tokens_BT) == 0:
        raise ValueError(
            f"tokens_BT has shape {tuple(tokens_BT.shape)}: expected (B, T) with B at least 1 and "
            "T at least 2, since the first token of a row is predicted by nothing"
        )
    total = 0.0
    for part in tokens_BT.split(rows):
        logits = model(part[:, :-1]).float()
        total += nnf.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
    return float(total) / (tokens_BT.shape[0] * (tokens_BT.shape[1] - 1))


def perplexity(model: nn.Module, tokens_BT: Tensor, rows: int = 8) -> float:
    """exp of `nats_per_token`: among how many equally likely tokens the model is undecided."""
    return math.exp(nats_per_token(model, tokens_BT, rows))


def english_split(tokenizer, T: int = 128, run: int = 16) -> tuple[Tensor, Tensor]:
    """Tokens to calibrate and train on, and windows that are new to whatever saw those.

    Python's reference quotes itself, so that a plain split would score text already seen. Every
    paragraph is taken once; the last 15% is cut into windows of T tokens, and those that share
    `run` tokens in a row with the rest are dropped. About 100 windows of 128 are left.

    Shapes: -> study_S, held_BT.
    Raises: ValueError if no window is left.
    """
    if not 2 <= T or not 1 <= run <= T:
        raise ValueError(f"T={T}, run={run}: expected windows of 2 or more, and run of 1 to T")
    paragraphs: dict[str, str] = {}
    for part in english().split("\n\n"):
        if words := " ".join(part.split()):
            paragraphs.setdefault(words, part)
    tokens = encode(tokenizer, "\n\n".join(paragraphs.values()))
    cut = len(tokens) * 85 // 100
    seen = {tuple(tokens[i : i + run]) for i in range(cut - run + 1)}
    held = [
        part
        for start in range(cut, len(tokens) - T + 1, T)
        for part in [tokens[start : start + T]]
        if not any(tuple(part[i : i + run]) in seen for i in range(T - run + 1))
    ]
    if not held:
        raise ValueError(
            f"no window of T={T} tokens is new in each of its runs of run={run}: take shorter "
            "windows, or runs of 16, which chance does not repeat"
        )
    return torch.tensor(tokens[:cut]), torch.tensor(held)
