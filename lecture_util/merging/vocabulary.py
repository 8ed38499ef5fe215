"""Models with different vocabularies: rows of the embedding aligned by token, not by number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..model.checkpoint import WeightsError
from .checkpoint import EMBED, VOCABULARY, Folder
from .schema import RecipeError
from .tensors import wide

TOKENIZER = "tokenizer.json"
Vocab = Mapping[str, int]


def read_vocab(folder: Path) -> dict[str, int]:
    """Token to number, in the order of the numbers, added tokens included.

    Raises: WeightsError without a tokenizer.json, or one that is none.
    """
    from tokenizers import Tokenizer

    path = folder / TOKENIZER
    if not path.is_file():
        raise WeightsError(f"{folder} holds no tokenizer.json: its tokens can't be told apart")
    try:
        vocab = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"{path} can't be read as a tokenizer ({error})") from error
    return dict(sorted(vocab.items(), key=lambda entry: entry[1]))  # its own order is a hash's


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
        _check_rows(f"model {i}", len(table), vocab)
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


def add_tokens(source: Path, target: Path, vocab: Vocab, tokens: Sequence[str]) -> None:
    """Write `source`'s tokenizer.json to `target` with more tokens, each matched as a whole.

    vocab: what the result must be. Raises: WeightsError where the format can't number them so.
    """
    tokenizer = json.loads((source / TOKENIZER).read_text(encoding="utf-8"))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = [{"id": vocab[token], "content": token} | plain for token in tokens]
    tokenizer["added_tokens"] = [*tokenizer.get("added_tokens", []), *added]
    text = json.dumps(tokenizer, ensure_ascii=False)
    (target / TOKENIZER).write_text(text, encoding="utf-8")
    if read_vocab(target) != dict(vocab):  # it numbers new tokens itself, without gaps
        raise WeightsError(
            f"{source / TOKENIZER} leaves numbers unused, so no tokens can be added to it: use "
            "tokenizer_source: base"
        )


def check_same_tokens(folders: Sequence[Folder]) -> None:
    """Require, where rows are merged by number, that no token has two numbers.

    Tokens that one model lacks, and spare numbers that one has renamed, do no harm.
    Raises: RecipeError naming the token and the models.
    """
    held = [folder for folder in folders if (folder.path / TOKENIZER).is_file()]
    texts = {folder.path: (folder.path / TOKENIZER).read_bytes() for folder in held}
    if len(set(texts.values())) < 2:
        return
    first = read_vocab(held[0].path)
    for folder in held[1:]:
        for token, row in read_vocab(folder.path).items():
            if first.get(token, row) != row:
                raise RecipeError(
                    f"{token!r} is token {row} of {folder.path} but {first[token]} of "
                    f"{held[0].path}: align their tokens with tokenizer_source: base or union"
                )


class Alignment:
    """Whose tokens the result has, and every model's embedding and head with rows for them.

    folders: the models', the one that counts as base first.
    source:  "base", "union", or the folder of a tokenizer.
    pad:     the number of rows is rounded up to a multiple of it.
    Raises:  WeightsError for a model whose tokenizer is missing, or not made for its weights.
    """

    def __init__(self, folders: Sequence[Folder], source: str | Path, pad: int = 1) -> None:
        self.folders, self.pad = folders, pad
        self.vocabs = [read_vocab(folder.path) for folder in folders]
        self.home = folders[0].path if source in ("base", "union") else Path(source)
        self.vocab = union(self.vocabs) if source == "union" else read_vocab(self.home)
        self.new = [t for t in self.vocab if t not in self.vocabs[0]] if source == "union" else []
        for folder, vocab in zip(folders, self.vocabs, strict=True):
            for name in VOCABULARY:
                if name in folder:
                    _check_rows(f"{name} of {folder.path}", folder.shape(name)[0], vocab)
        self._held: dict[str, dict[int, Tensor]] = {}

    @cached_property
    def num_rows(self) -> int:
        """As many as the tokens need, and never fewer than the tokenizer's own model has."""
        homes = [f for f in self.folders if f.path.resolve() == self.home.resolve()]
        own = homes[0].shape(EMBED)[0] if homes and EMBED in homes[0] else 0
        rows = max(own, max(self.vocab.values(), default=-1) + 1)
        return -(-rows // self.pad) * self.pad

    def read(self, model: int, name: str, *, base: int | None) -> Tensor:
        """A model's aligned tensor. One a model is held, until `forget` or another is read."""
        if name not in self._held:
            self.forget()
            holders = [i for i, folder in enumerate(self.folders) if name in folder]
            tables = align(
                [self.folders[i][name] for i in holders],
                [self.vocabs[i] for i in holders],
                self.vocab,
                base=holders.index(base) if base in holders else None,
                num_rows=self.num_rows,
            )
            self._held[name] = dict(zip(holders, tables, strict=True))
        return self._held[name][model]

    def forget(self) -> None:
        self._held.clear()


def _check_rows(what: str, rows: int, vocab: Vocab) -> None:
    if (highest := max(vocab.values(), default=-1)) >= rows:
        raise WeightsError(
            f"{what} has {rows} rows, but its tokenizer numbers up to {highest}: tokenizer and "
            "weights belong to different models"
        )
