"""Models with different vocabularies: rows of the embedding aligned by token, not by number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..model.checkpoint import WeightsError
from .tensors import wide

Vocab = Mapping[str, int]


def read_vocab(folder: Path) -> dict[str, int]:
    """Token to number, added tokens included. Raises: WeightsError without a tokenizer.json."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WeightsError(f"{folder} holds no tokenizer.json: its tokens can't be told apart")
    try:
        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"{path} can't be read as a tokenizer ({error})") from error


def union(vocabs: Sequence[Vocab]) -> dict[str, int]:
    """The first vocabulary as it is, then every new token of the others, in their order."""
    merged = dict(vocabs[0])
    free = max(merged.values(), default=-1) + 1
    for vocab in vocabs[1:]:
        for token in sorted(vocab, key=vocab.get):
            if token not in merged:
                merged[token] = free
                free += 1
    return merged


def align(
    rows: Sequence[Tensor],
    vocabs: Sequence[Vocab],
    target: Vocab,
    *,
    base: int | None = None,
    num_rows: int | None = None,
) -> list[Tensor]:
    """Each model's embedding with its rows where `target` wants them.

    A token that a model lacks gets the row of the one model that has it, else the base's, else
    the mean of those that have it; if nobody has it, zero. Rows that belong to no token (padding
    to a round size) keep the model's own row of that number, or zero.

    rows:     a (V_i, D) tensor a model; vocabs: each token's row.
    base:     index of the base among the models.
    num_rows: of the result; at least the target's largest number + 1.
    Shapes:   -> one (num_rows, D) a model, in the model's dtype.
    """
    least = max(target.values(), default=-1) + 1
    num_rows = least if num_rows is None else num_rows
    if num_rows < least:
        raise ValueError(f"num_rows={num_rows} is too few for token number {least - 1}")
    for i, (table, vocab) in enumerate(zip(rows, vocabs, strict=True)):
        if (highest := max(vocab.values(), default=-1)) >= len(table):
            raise WeightsError(
                f"model {i} has {len(table)} rows, but its tokenizer numbers up to {highest}: "
                "tokenizer and weights belong to different models"
            )
    aligned = [table.new_zeros(num_rows, *table.shape[1:]) for table in rows]
    free = torch.ones(num_rows, dtype=torch.bool)
    free[list(target.values())] = False
    for new, table in zip(aligned, rows, strict=True):
        shared = min(num_rows, len(table))
        spare = free[:shared].nonzero().flatten()
        new[spare] = table[spare]
    for i, vocab in enumerate(vocabs):
        known = [token for token in target if token in vocab]
        aligned[i][[target[t] for t in known]] = rows[i][[vocab[t] for t in known]]
    for token, row in target.items():
        owners = [i for i, vocab in enumerate(vocabs) if token in vocab]
        if len(owners) in (0, len(vocabs)):
            continue
        if len(owners) > 1 and base in owners:
            owners = [base]
        gift = sum(wide(rows[i][vocabs[i][token]]) for i in owners) / len(owners)
        for i, vocab in enumerate(vocabs):
            if token not in vocab:
                aligned[i][row] = gift
    return aligned


def add_tokens(source: Path, target: Path, tokens: Sequence[str], numbers: Sequence[int]) -> None:
    """Write `source`'s tokenizer.json to `target` with more tokens, each matched as a whole."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    for token, number in zip(tokens, numbers, strict=True):
        tokenizer.setdefault("added_tokens", []).append(
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": False,
            }
        )
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
