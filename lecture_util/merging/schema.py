"""What a recipe may say where: its keys, and how an entry that does not fit is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .methods import METHODS, method
from .parameters import suggest

RESULTS = ("float32", "float16", "bfloat16", "float64")  # dtypes to choose from
KEYS = {
    "recipe": [
        *("merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype"),
        *("tokenizer_source", "tokenizer", "convention", "seed"),
    ],
    "model": ["model", "parameters"],
    "source": ["model", "layer_range", "parameters"],
    "slice": ["sources", "parameters"],
    "tokenizer": ["source", "pad_to_multiple_of"],
    "filtered value": ["filter", "value"],
}
ELSEWHERE = {  # what mergekit reads and this does not, with what to do instead
    "modules": "merge one stack of layers",
    "chat_template": "the tokenizer's own is kept; edit it in the result",
    "tokens": "a token that a model lacks gets the row of those that have it",
    "residual_weight": "leave it out",
    "base_model": "one base_model, beside the slices, holds for all of them",
    "lora": "merge the adapter into its base first",
    "revision": "download that revision and name its folder",
    "override_architecture": "leave it out",
}
THEIRS = (
    "arcee_fusion",
    "karcher",
    "multislerp",
    "nearswap",
    "nuslerp",
    "ram",
    "ramplus_tl",
    "sce",
)


class RecipeError(ValueError):
    """A recipe says something that can't be done, or that isn't understood."""


def read_yaml(text: str) -> Any:
    """What YAML says. Raises: RecipeError naming line and column; RecursionError."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice, of which the library would drop the first."""

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in getattr(node, "value", ()):
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    raise RecipeError(
                        f"the recipe gives {key.value!r} twice, again in line "
                        f"{key.start_mark.line + 1}: keep one"
                    )
                seen.add((key.tag, str(key.value)))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError(f"the recipe is not YAML{where}: {error.problem}") from error
    except (RecipeError, RecursionError):
        raise
    except Exception as error:  # the library lets through what its conversions raise
        raise RecipeError(f"the recipe is not YAML: {error}") from error


def mapping(raw: Any, kind: str) -> Mapping[str, Any]:
    """`raw`, if it is a mapping with known keys only."""
    if not isinstance(raw, Mapping):
        raise RecipeError(f"a {kind} is {raw!r}: expected keys and values")
    for key in raw:
        if key not in KEYS[kind]:
            if key in ELSEWHERE:
                raise unsupported(key, f"a {kind}")
            raise RecipeError(f"a {kind} has no key {key!r}{suggest(key, KEYS[kind])}")
    return raw


def unsupported(key: str, where: str) -> RecipeError:
    return RecipeError(f"{key} of {where} is not supported here: {ELSEWHERE[key]}")


def entries(raw: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list under `key`, if it is one and not empty."""
    found = raw.get(key)
    if not isinstance(found, list) or not found:
        raise RecipeError(f"{key} is {found!r}: expected a list with at least one entry")
    return found


def merge_method(raw: Mapping[str, Any]) -> str:
    if "merge_method" not in raw:
        raise RecipeError(f"the recipe has no merge_method: expected one of {', '.join(METHODS)}")
    name = raw["merge_method"]
    if name in THEIRS:
        raise RecipeError(
            f"merge method {name!r} is not supported here: expected one of {', '.join(METHODS)}"
        )
    method(name)
    return name


def dtype(raw: Mapping[str, Any], key: str) -> str | None:
    if raw.get(key) is not None and raw[key] not in RESULTS:
        raise RecipeError(f"{key} is {raw[key]!r}{suggest(raw[key], RESULTS)}")
    return raw.get(key)


def model_path(raw: Any, key: str, folder: Path) -> str:
    """A model's folder, looked for beside the recipe first, or its name."""
    from ..model.weights import HUB_IDS, like_path

    for word in ("lora", "revision", "override_architecture"):
        inner = [raw, *raw.values()] if isinstance(raw, Mapping) else []
        if any(isinstance(each, Mapping) and word in each for each in inner):
            raise unsupported(word, key)
    if not isinstance(raw, str) or not raw:
        raise RecipeError(f"{key} is {raw!r}: expected a folder, or one of {', '.join(HUB_IDS)}")
    beside = os.path.join(folder, raw)
    if os.path.isdir(beside):  # os.path: any text may be asked for
        return os.path.normpath(beside)
    for sign, word in (("+", "lora"), ("@", "revision")):
        if sign in raw and not os.path.exists(raw):
            raise unsupported(word, f"{key} {raw!r}")
    if not os.path.exists(raw) and like_path(raw, folder):
        return os.path.normpath(beside)  # where it should be
    return raw
