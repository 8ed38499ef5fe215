"""The draft heads that come with the course, trained on the reference model's own text.

Made by benchmarks/train_drafts.py; a head fits the one model whose features it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.transformer import Transformer

from .eagle import EagleDrafter, EagleHead, check_shape
from .medusa import MedusaDrafter, MedusaHeads, best_tree
from .target import Reader
from .vocabulary import DraftVocabulary

REMEDY = "make one with benchmarks/train_drafts.py"
ASSETS = Path(__file__).resolve().parents[1] / "assets"


def load_medusa(
    model: Transformer, path: Path | None = None
) -> tuple[MedusaHeads, DraftVocabulary, Tensor]:
    """Heads, their vocabulary, and accuracy_KR: how often head k's guess of rank r was right.

    Raises: WeightsError if there is no such file, or it was made for another model.
    """
    path = ASSETS / "medusa.safetensors" if path is None else path
    tensors, facts = _read(model, path)
    accuracy_KR = torch.tensor(facts.get("accuracy", [[]]))
    heads = MedusaHeads(model.config.D, len(accuracy_KR))
    return heads, _fill(model, heads, tensors, path), accuracy_KR


def load_eagle(model: Transformer, path: Path | None = None) -> tuple[EagleHead, DraftVocabulary]:
    """The head and its vocabulary. Raises: as `load_medusa`."""
    path = ASSETS / "eagle.safetensors" if path is None else path
    tensors, _ = _read(model, path)
    head = EagleHead(model.config)
    return head, _fill(model, head, tensors, path)


def medusa_drafter(model: Transformer, size: int = 4) -> Callable[[Reader], MedusaDrafter]:
    """What `generate_speculative` takes, with the best tree of `size` guesses.

    Raises: as `load_medusa` and `best_tree`; ValueError, at the first use, for another model.
    """
    heads, vocabulary, accuracy_KR = load_medusa(model)
    tree = best_tree(accuracy_KR, size)
    return lambda reader: MedusaDrafter(_of(model, reader), heads, vocabulary, tree)


def eagle_drafter(
    model: Transformer, depth: int = 3, width: int = 2, size: int = 4
) -> Callable[[Reader], EagleDrafter]:
    """What `generate_speculative` takes; depth, width and size as for EagleDrafter.

    Raises: as `load_eagle` and EagleDrafter; ValueError, at the first use, for another model.
    """
    head, vocabulary = load_eagle(model)
    check_shape(vocabulary, depth, width, size)
    return lambda reader: EagleDrafter(_of(model, reader), head, vocabulary, depth, width, size)


def _of(model: Transformer, reader: Reader) -> Reader:
    if reader.model is not model:
        raise ValueError(
            "these heads were loaded for another model: call medusa_drafter(...) or "
            "eagle_drafter(...) with the model that you generate with"
        )
    return reader


def _read(model: Transformer, path: Path) -> tuple[dict[str, Tensor], dict]:
    if not isinstance(model, Transformer):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a Transformer; hand generate_speculative "
            "what medusa_drafter(model) or eagle_drafter(model) returns"
        )
    if not path.is_file():
        raise WeightsError(f"no draft head at {path}: {REMEDY}")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads((file.metadata() or {})["facts"])
    except (SafetensorError, KeyError) as error:
        raise WeightsError(f"{path} is no draft head ({error}): {REMEDY}") from error
    c = model.config
    found = {"D": c.D, "V": c.V, "L": c.L}
    if facts["config"] != found:
        raise WeightsError(
            f"{path.name} was trained on a model of {facts['config']} but this one has {found}: a "
            f"draft head fits one model's features; {REMEDY}"
        )
    return tensors, facts


def _fill(
    model: Transformer, head: nn.Module, tensors: dict[str, Tensor], path: Path
) -> DraftVocabulary:
    """Weights into the head, in the model's dtype and place; what is left is the vocabulary."""
    try:
        ids_U = tensors.pop("ids").long()
        head.load_state_dict(tensors)
    except (KeyError, RuntimeError) as error:
        raise WeightsError(f"{path} holds no {type(head).__name__} ({error}): {REMEDY}") from error
    head.to(model.device, model.dtype).eval().requires_grad_(False)
    return DraftVocabulary(model.head, ids_U)
