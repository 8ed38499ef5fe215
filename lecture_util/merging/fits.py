"""Do the recipe's models fit together? Each check names what does not, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..model.shapes import ShapeError
from .checkpoint import HEAD, VOCABULARY, Folder
from .layers import kinds
from .methods import method
from .plan import check_models
from .schema import RecipeError

MUST_AGREE = ("num_attention_heads", "num_key_value_heads")  # shapes alone don't show them


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
    """One architecture, one split into heads, and the same names in all, the head's aside."""
    first, *others = folders
    for model in others:
        ours, theirs = folders[first].config, folders[model].config
        if (kind := _kind(theirs)) != (wanted := _kind(ours)):
            raise RecipeError(
                f"{model} is a {kind} but {first} a {wanted}: merge models of one architecture"
            )
        for key in MUST_AGREE:
            if theirs.get(key) != ours.get(key):
                raise RecipeError(
                    f"{key} is {theirs.get(key)} in {model} but {ours.get(key)} in {first}: merge "
                    "models of one shape"
                )
        mine, other = (kinds(folders[each]) - {HEAD} for each in (first, model))
        for name in sorted(mine ^ other):
            has, lacks = (first, model) if name in mine else (model, first)
            raise KeyError(
                f"{has} holds {name}, which {lacks} lacks: merge models of one architecture"
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
