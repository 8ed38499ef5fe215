"""Do the recipe's models fit together? Each check names what does not, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.shapes import ShapeError
from .checkpoint import HEAD, VOCABULARY, Folder
from .layers import check_layers, kinds, layer_type, same_type, window
from .methods import method
from .plan import check_models
from .schema import RecipeError
from .values import filters


def check_sources(recipe: Any) -> None:
    """As many models as the method takes in each slice, and the base where it must be."""
    name, base = recipe.merge_method, recipe.base_model
    how = method(name)
    for part in recipe.slices:
        listed = [source.model for source in part.sources]
        if doubled := [model for model in listed if listed.count(model) > 1 and how.base]:
            raise RecipeError(f"{doubled[0]} is listed twice in one merge: give it one weight")
        others = [model for model in listed if not how.base or model != base]
        try:
            check_models(name, len(others), base is not None)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        if how.base and part.sources[0].layers and base not in listed:
            raise RecipeError(f"a slice needs layers of the base model too: list {base} in it")
        if not how.base and base is not None and base not in listed:
            raise RecipeError(
                f"{name} has no use for base_model {base}: list it among the models if it is "
                "to be averaged, else leave it out"
            )


def check_architectures(folders: Mapping[str, Folder]) -> None:
    """One architecture, what shapes don't show alike, the same names (the head's aside), no gap."""
    first, *others = folders
    for model in others:
        ours, theirs = folders[first].config, folders[model].config
        if (kind := _kind(theirs)) != (wanted := _kind(ours)):
            raise RecipeError(
                f"{model} is a {kind} but {first} a {wanted}: merge models of one architecture"
            )
        here, there = must_agree(ours), must_agree(theirs)
        for key in here | there:
            if here.get(key) != there.get(key):
                raise RecipeError(
                    f"{key} is {there.get(key)} in {model} but {here.get(key)} in {first}: such "
                    "models compute different things with the same weights; merge models whose "
                    "configs agree"
                )
        mine, other = (kinds(folders[each]) - {HEAD} for each in (first, model))
        for name in sorted(mine ^ other):
            has, lacks = (first, model) if name in mine else (model, first)
            raise KeyError(
                f"{has} holds {name}, which {lacks} lacks: merge models of one architecture"
            )
    for folder in folders.values():
        check_layers(folder)


def must_agree(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a merge takes from the first config and shapes don't show.

    Older configs give the rotary angles in keys of their own; what one leaves out is Llama's.
    """
    heads = config.get("num_attention_heads")
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), "rope_type": "default"}
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        rope |= given if isinstance(given, Mapping) else {}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "sliding_window": window(config),
        **rope,
    }


def check_types(
    recipe: Any, folders: Mapping[str, Folder], part: Any, numbers: Sequence[int], depth: int
) -> None:
    """Require that layers which become one attend alike: the sources', and an unlisted base's."""
    named = list(zip((source.model for source in part.sources), numbers, strict=True))
    if recipe.base_model is not None and recipe.base_model not in dict(named):
        named.append((recipe.base_model, depth))
    layers = [(folders[model], number) for model, number in named]
    if not same_type(layers):
        said = [f"{layer_type(f.config, i)} in layer {i} of {f.path}" for f, i in layers]
        raise RecipeError(f"layer_types differ: {', '.join(said)}. Merge layers of one type")


def by_name(message: str, models: Sequence[str]) -> str:
    """A method knows its models as `model 0`, `model 1`: a recipe has names for them."""
    return re.sub(r"\bmodel (\d+)\b", lambda found: models[int(found[1])], message)


def check_filters(recipe: Any, folders: Mapping[str, Folder], results: Sequence[str]) -> None:
    """Require that every filter is part of some tensor's name: else a slip goes unnoticed."""
    names = {*results, *(name for folder in folders.values() for name in folder)}
    scopes = [recipe.parameters, *(part.parameters for part in recipe.slices)]
    scopes += [source.parameters for part in recipe.slices for source in part.sources]
    for word, setting in ((w, s) for scope in scopes for w, s in scope.items()):
        for pattern in filters(setting):
            if not any(pattern in name for name in names):
                raise RecipeError(
                    f"{word} has the filter {pattern!r}, which is part of no tensor's name: "
                    f"write a part of one, such as {min(names)}"
                )


def check_tensor(name: str, places: Sequence[tuple[Folder, str]], aligned: bool) -> None:
    """The tensor in every model, of one shape, its rows aside if they will be aligned."""
    shapes = []
    for folder, stored in places:
        if stored not in folder:
            raise KeyError(f"{folder.path} lacks {stored}: merge models of one architecture")
        folder.dtype(stored)
        shapes.append(folder.shape(stored)[aligned:])
    if len(set(shapes)) > 1:
        rows = name in VOCABULARY and len({shape[1:] for shape in shapes}) == 1
        remedy = "merge models of one shape"
        if rows and not aligned:
            remedy = "align their tokens with tokenizer_source: base or union"
        pairs = zip(shapes, places, strict=True)
        listed = ", ".join(f"{shape} in {folder.path}" for shape, (folder, _) in pairs)
        raise ShapeError(f"{name} is {listed}: {remedy}")


def _kind(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    listed = named if isinstance(named, list) else [named or config.get("model_type")]
    return ", ".join(map(str, listed))
