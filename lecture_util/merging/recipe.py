"""Recipes: mergekit's YAML for the methods here, read strictly.

    merge_method: ties
    base_model: base/
    models:
      - model: german/
        parameters: {weight: 0.6, density: 0.3}
      - model: poems/
        parameters:
          weight: [0, 0.5, 1]      # a gradient over the layers
          density:
            - {filter: mlp, value: 0.5}
            - {value: 0.2}
    parameters: {lambda: 0.9}
    dtype: bfloat16
    convention: mergekit           # ours: what mergekit would do; else what the papers say

A value is a number, a gradient (a list: interpolated over the layers of its slice, tensors outside
the layers take its first), or a list of values with filters (a part of the tensor's name; the
first that fits counts). The nearest setting wins: the model's, the slice's, the recipe's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .conventions import Conventions, conventions
from .methods import method, suggest

DTYPES = ("float32", "float16", "bfloat16", "float64")
IGNORED = {"int8_mask"}  # saves the tool memory; changes no result
KEYS = {
    "recipe": ["merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype"]
    + ["tokenizer_source", "tokenizer", "convention", "seed"],
    "model": ["model", "parameters"],
    "source": ["model", "layer_range", "parameters"],
    "slice": ["sources", "parameters"],
    "tokenizer": ["source", "pad_to_multiple_of"],
    "filtered value": ["filter", "value"],
}


class RecipeError(ValueError):
    """A recipe says something that can't be done, or that isn't understood."""


@dataclass(frozen=True)
class Source:
    """A model, from layer `start` up to but without `stop`; None for all of its layers."""

    model: str
    layers: tuple[int, int] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """Layers of the result, made of as many layers of each source."""

    sources: tuple[Source, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """What to merge, and how. A recipe of `models` is one slice of all their layers."""

    merge_method: str
    slices: tuple[Slice, ...]
    base_model: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    tokenizer_source: str | None = None
    pad_to_multiple_of: int | None = None
    convention: Conventions = field(default_factory=Conventions)
    seed: int = 0
    text: str = ""

    @property
    def models(self) -> list[str]:
        """Each model once, the base first."""
        named = [source.model for part in self.slices for source in part.sources]
        named = named if self.base_model is None else [self.base_model, *named]
        return list(dict.fromkeys(named))

    def replaced(self, *, convention: str | None = None, seed: int | None = None) -> Recipe:
        """The same recipe under another convention or seed, where one is given."""
        chosen = self.convention if convention is None else conventions(convention)
        return replace(self, convention=chosen, seed=self.seed if seed is None else seed)

    def value(self, word: str, source: Source | None, part: Slice, name: str, t: float) -> Any:
        """A parameter for one tensor; None if nobody sets it.

        source: the model's entry, or None for a setting that all models share.
        name:   the tensor's; t: how far along the slice its layer is, 0 to 1.
        """
        nearest = () if source is None else (source.parameters,)
        for scope in (*nearest, part.parameters, self.parameters):
            if word in scope and (value := resolve(scope[word], name, t)) is not None:
                return value
        return None


def resolve(setting: Any, name: str, t: float) -> Any:
    """A setting's value for the tensor `name` at `t`: see the top of the file."""
    if isinstance(setting, Mapping):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    if any(isinstance(entry, Mapping) for entry in setting):
        for entry in setting:
            if entry.get("filter") in (None, "*") or str(entry["filter"]) in name:
                return resolve(entry["value"], name, t)
        return None
    at = t * (len(setting) - 1)
    low = min(int(at), len(setting) - 1)
    if any(isinstance(value, bool) for value in setting):
        return setting[low]
    high = min(low + 1, len(setting) - 1)
    return setting[low] * (1 - (at - low)) + setting[high] * (at - low)


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe; models named by relative paths are looked for beside the file.

    Raises: RecipeError for what isn't YAML or isn't understood; OSError if there is no file.
    """
    path = Path(path)
    return parse(path.read_text(), folder=path.parent)


def parse(text: str, folder: str | Path = ".") -> Recipe:
    """The recipe in `text`. Raises: RecipeError naming the entry, what came and what to write."""
    import yaml

    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"the recipe is not YAML: {error}") from error
    try:
        return _recipe(raw, Path(folder), text)
    except ValueError as error:
        raise error if isinstance(error, RecipeError) else RecipeError(str(error)) from error


def _recipe(raw: Any, folder: Path, text: str) -> Recipe:
    _mapping(raw, "recipe")
    if "merge_method" not in raw:
        raise RecipeError("the recipe has no merge_method")
    name = raw["merge_method"]
    method(name)
    if ("models" in raw) == ("slices" in raw):
        raise RecipeError("the recipe needs either models or slices, and not both")
    base = raw.get("base_model")
    base = None if base is None else _place(base, "base_model", folder)
    if "models" in raw:
        sources = [_source(each, "model", name, folder) for each in _list(raw, "models")]
        slices = [Slice(tuple(sources))]
    else:
        slices = [_slice(each, name, folder) for each in _list(raw, "slices")]
    tokenizer = raw.get("tokenizer") or {}
    _mapping(tokenizer, "tokenizer")
    if "tokenizer_source" in raw and tokenizer:
        raise RecipeError("the recipe gives both tokenizer_source and tokenizer: keep one")
    wanted = raw.get("tokenizer_source", tokenizer.get("source"))
    if wanted not in (None, "base", "union"):
        wanted = _place(wanted, "tokenizer_source", folder)
    pad, seed = tokenizer.get("pad_to_multiple_of"), raw.get("seed", 0)
    if pad is not None and (type(pad) is not int or pad < 1):
        raise RecipeError(f"pad_to_multiple_of is {pad!r}: expected a whole number, at least 1")
    if type(seed) is not int:
        raise RecipeError(f"seed is {seed!r}: expected a whole number")
    return Recipe(
        name,
        tuple(slices),
        base,
        _parameters(raw, "recipe", name),
        _dtype(raw),
        wanted,
        pad,
        conventions(raw.get("convention")),
        seed,
        text,
    )


def _slice(raw: Any, name: str, folder: Path) -> Slice:
    _mapping(raw, "slice")
    sources = tuple(_source(each, "source", name, folder) for each in _list(raw, "sources"))
    lengths = {source.layers[1] - source.layers[0] for source in sources}
    if len(lengths) > 1:
        raise RecipeError(
            f"a slice takes {', '.join(map(str, sorted(lengths)))} layers from its sources: "
            "expected as many from each"
        )
    return Slice(sources, _parameters(raw, "slice", name))


def _source(raw: Any, kind: str, name: str, folder: Path) -> Source:
    _mapping(raw, kind)
    if "model" not in raw:
        raise RecipeError(f"a {kind} names no model: {raw}")
    place, layers = _place(raw["model"], "model", folder), None
    if kind == "source":
        layers = raw.get("layer_range")
        whole = isinstance(layers, list) and [type(i) for i in layers] == [int, int]
        if not whole or not 0 <= layers[0] < layers[1]:
            raise RecipeError(
                f"layer_range of {raw['model']} is {layers!r}: expected [first, last + 1]"
            )
        layers = tuple(layers)
    return Source(place, layers, _parameters(raw, kind, name))


def _parameters(raw: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    given = raw.get("parameters") or {}
    if not isinstance(given, Mapping):
        raise RecipeError(f"parameters of a {kind} are {given!r}: expected names and values")
    known = method(name).parameters
    for word, value in given.items():
        if word not in known and word not in IGNORED:
            raise RecipeError(f"{name} has no parameter {word!r}{suggest(word, known)}")
        if word in known and kind in ("model", "source") and not known[word].per_model:
            raise RecipeError(f"{word} is one for all models: move it to the recipe's parameters")
        _check_value(word, value)
    return {word: _numbers(value) for word, value in given.items() if word not in IGNORED}


def _check_value(word: str, value: Any) -> None:
    entries = value if isinstance(value, list) else [value]
    if not entries:
        raise RecipeError(f"{word} is an empty list")
    filtered = [entry for entry in entries if isinstance(entry, Mapping)]
    if filtered and len(filtered) < len(entries):
        raise RecipeError(f"{word} mixes numbers with filters: write a value for every filter")
    for entry in filtered:
        _mapping(entry, "filtered value")
        if "value" not in entry or isinstance(entry["value"], Mapping):
            raise RecipeError(f"{word} has an entry without a plain value: {entry}")
        _check_value(word, entry["value"])
    for entry in entries:
        if not filtered and not isinstance(_numbers(entry), (bool, int, float)):
            raise RecipeError(f"{word} is {entry!r}: expected a number, true or false")


def _numbers(value: Any) -> Any:
    """With texts that are numbers read as such: to YAML, 1e-3 is one (1.0e-3 is not)."""
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _numbers(each) if key == "value" else each for key, each in value.items()}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _dtype(raw: Mapping[str, Any]) -> str | None:
    for key in ("out_dtype", "dtype"):
        if raw.get(key) is not None:
            if raw[key] not in DTYPES:
                raise RecipeError(f"{key} is {raw[key]!r}{suggest(raw[key], DTYPES)}")
            return raw[key]
    return None


def _place(raw: Any, key: str, folder: Path) -> str:
    from ..model.weights import HUB_IDS

    if not isinstance(raw, str) or not raw:
        raise RecipeError(f"{key} is {raw!r}: expected a folder, or one of {', '.join(HUB_IDS)}")
    beside = folder / raw
    return str(beside) if beside.is_dir() else raw


def _list(raw: Mapping[str, Any], key: str) -> Sequence[Any]:
    entries = raw.get(key)
    if not isinstance(entries, list) or not entries:
        raise RecipeError(f"{key} is {entries!r}: expected a list with at least one entry")
    return entries


def _mapping(raw: Any, kind: str) -> None:
    if not isinstance(raw, Mapping):
        raise RecipeError(f"a {kind} is {raw!r}: expected keys and values")
    for key in raw:
        if key not in KEYS[kind]:
            raise RecipeError(f"a {kind} has no key {key!r}{suggest(key, KEYS[kind])}")
