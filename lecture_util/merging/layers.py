"""Which of a checkpoint's tensors belong to which layer, and what a config says layer by layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .checkpoint import Folder
from .schema import RecipeError

LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks?)\.)(\d+)(\..+)$")


def outside(folder: Folder) -> list[str]:
    """Names of the tensors that belong to no layer."""
    return [name for name in folder if not LAYER.match(name)]


def inside(folder: Folder, number: int) -> list[tuple[str, str]]:
    """What stands before and after the number, for each tensor of a layer."""
    found = [LAYER.match(name) for name in folder]
    return [(match[1], match[3]) for match in found if match and int(match[2]) == number]


def kinds(folder: Folder) -> set[str]:
    """Names without the layers' numbers: what models of one architecture have in common."""
    return {LAYER.sub(r"\1N\3", name) for name in folder}


def is_embedding(name: str) -> bool:
    return "embed" in name or name.endswith(("wte.weight", "wpe.weight"))


def restacked(config: dict[str, Any], layers: Sequence[tuple[Folder, int]]) -> dict[str, Any]:
    """The config of a model of these layers; lists with an entry a layer follow them."""
    depth = config.get("num_hidden_layers")
    new = config | {"num_hidden_layers": len(layers)}
    for key, value in config.items():
        if "layer" in key and isinstance(value, list) and len(value) == depth:
            new[key] = [_entry(folder, key, index) for folder, index in layers]
    return new


def _entry(folder: Folder, key: str, index: int) -> Any:
    value = folder.config.get(key)
    if not isinstance(value, list) or len(value) != folder.num_layers:
        raise RecipeError(
            f"{folder.path / 'config.json'} has no {key} with an entry a layer, unlike the first "
            "model's: make the configs agree"
        )
    return value[index]
