"""Which of a checkpoint's tensors belong to which layer, and what a config says layer by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.checkpoint import WeightsError
from .checkpoint import Folder
from .schema import RecipeError

LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..+)$")
UNEVEN = (  # keys of configs whose layers may differ in their tensors, by rules of their own
    "first_k_dense_replace",
    "mlp_only_layers",
    "mlp_layer_types",
    "decoder_sparse_step",
    "moe_layer_freq",
)


def check_layers(folder: Folder) -> None:
    """Require a causal language model in Llama's layout, with every tensor of every layer.

    transformers would fill in at random what is missing, and leave out what is too much.
    Raises: WeightsError naming what is missing or too much.
    """
    path, config = folder.path, folder.config
    listed = config.get("architectures")
    kind = str(listed[0]) if isinstance(listed, list) and listed else ""
    found: dict[int, set[str]] = {}
    for match in filter(None, map(LAYER.match, folder)):
        found.setdefault(int(match[2]), set()).add(match[3])
    if not found or ("For" in kind and not kind.endswith("ForCausalLM")):
        inside = f"a {kind or 'model'} with {min(folder, default='no tensors')}"
        raise WeightsError(
            f"{path} is {inside}: only causal language models are merged here, in Llama's layout "
            "(model.layers.0 ...)"
        )
    depth = folder.num_layers
    if lost := sorted(set(range(depth)) - set(found)):
        raise WeightsError(
            f"{path} lacks layer {lost[0]}: its config.json says {depth} layers, its files hold "
            f"{len(found)}. Fetch it again, or correct num_hidden_layers"
        )
    if more := sorted(set(found) - set(range(depth))):
        raise WeightsError(
            f"{path} holds layer {more[0]} ({min(found[more[0]])} ...), but its config.json says "
            f"{depth} layers: correct num_hidden_layers, or take that layer out of the files"
        )
    if any(key in config for key in UNEVEN):
        return
    for number in range(depth):
        alike = [other for other in found if same_type([(folder, other), (folder, number)])]
        for rest in sorted(set().union(*(found[other] for other in alike)) - found[number]):
            raise WeightsError(
                f"{path} lacks model.layers.{number}{rest}, which other layers have: the "
                "checkpoint is incomplete, fetch it again"
            )


def same_type(layers: Sequence[tuple[Folder, int]]) -> bool:
    """Whether the configs call these layers alike, as by `full_attention`."""
    return len({layer_type(folder.config, number) for folder, number in layers}) == 1


def layer_type(config: Mapping[str, Any], number: int) -> Any:
    """What the config says of one layer; where it says nothing, all attend to all or a window."""
    types = config.get("layer_types")
    if isinstance(types, list) and number < len(types):
        return str(types[number])
    return "full_attention" if window(config) is None else "sliding_attention"


def window(config: Mapping[str, Any]) -> Any:
    """How far layers see; None if without a limit."""
    return config.get("sliding_window") if config.get("use_sliding_window", True) else None


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
    return "embed" in name


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
