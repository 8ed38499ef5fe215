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

So `parameters: {weight: [.5, .3, .2]}` beside three models is a gradient, the same for each of
them. A weight for each model is written at the model; `merge_states` takes a list as one a model.

`convention: mergekit` gives mergekit 0.1.5's numbers in fp32. Given a 16-bit dtype the tool casts
the models first and computes in 16 bits; here sums are fp32 and the result is cast once. The tool
reads more than this does: parameters that a method has no use for (`density` of task_arithmetic),
and `rescale` of ties and breadcrumbs (there: what is left is scaled up to the sum of magnitudes of
before). Here a parameter that a method does not have is refused, so that none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .conventions import Conventions, conventions
from .methods import method
from .parameters import suggest
from .schema import RecipeError, dtype, entries, mapping, merge_method, model_path, read_yaml
from .values import read_value, resolve

__all__ = ["Recipe", "RecipeError", "Slice", "Source", "parse", "read_recipe", "resolve"]

IGNORED = {"int8_mask"}  # saves the tool memory; changes no result


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


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe; models named by relative paths are looked for beside the file.

    Raises: RecipeError for what isn't YAML or isn't understood; OSError if there is no file.
    """
    path = Path(path)
    if path.is_dir():
        raise RecipeError(f"{path} is a folder: expected the recipe's YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not text ({error.reason}): expected YAML in UTF-8") from error
    return parse(text, folder=path.parent)


def parse(text: str, folder: str | Path = ".") -> Recipe:
    """The recipe in `text`. Raises: RecipeError naming the entry, what came and what to write."""
    try:
        return _recipe(read_yaml(text), Path(folder), text)
    except RecursionError as error:
        raise RecipeError("the recipe is nested too deeply, or within itself") from error
    except ValueError as error:  # unknown methods and conventions
        raise error if isinstance(error, RecipeError) else RecipeError(str(error)) from error


def _recipe(raw: Any, folder: Path, text: str) -> Recipe:
    if raw is None:
        raise RecipeError("the recipe is empty: expected merge_method and models")
    name = merge_method(mapping(raw, "recipe"))
    if ("models" in raw) == ("slices" in raw):
        raise RecipeError("the recipe needs either models or slices, and not both")
    if "models" in raw:
        sources = [_source(each, "model", name, folder) for each in entries(raw, "models")]
        slices = [Slice(tuple(sources))]
    else:
        slices = [_slice(each, name, folder) for each in entries(raw, "slices")]
    base, seed = raw.get("base_model"), raw.get("seed", 0)
    if type(seed) is not int:
        raise RecipeError(f"seed is {seed!r}: expected a whole number")
    dtypes = [dtype(raw, key) for key in ("out_dtype", "dtype")]
    wanted, pad = _tokenizer(raw, folder)
    return Recipe(
        name,
        tuple(slices),
        None if base is None else model_path(base, "base_model", folder),
        _parameters(raw, "recipe", name),
        dtypes[0] or dtypes[1],
        wanted,
        pad,
        conventions(raw.get("convention")),
        seed,
        text,
    )


def _tokenizer(raw: Mapping[str, Any], folder: Path) -> tuple[str | None, int | None]:
    """Whose tokens, and a multiple that the number of rows is rounded up to."""
    wanted, pad = raw.get("tokenizer_source"), None
    if (tokenizer := raw.get("tokenizer")) is not None:
        if wanted is not None:
            raise RecipeError("the recipe gives both tokenizer_source and tokenizer: keep one")
        mapping(tokenizer, "tokenizer")
        wanted, pad = tokenizer.get("source", "union"), tokenizer.get("pad_to_multiple_of")
    if pad is not None and (type(pad) is not int or pad < 1):
        raise RecipeError(f"pad_to_multiple_of is {pad!r}: expected a whole number, at least 1")
    if wanted not in (None, "base", "union"):
        wanted = model_path(wanted, "tokenizer_source", folder)
    return wanted, pad


def _slice(raw: Any, name: str, folder: Path) -> Slice:
    mapping(raw, "slice")
    sources = tuple(_source(each, "source", name, folder) for each in entries(raw, "sources"))
    lengths = {source.layers[1] - source.layers[0] for source in sources}
    if len(lengths) > 1:
        raise RecipeError(
            f"a slice takes {', '.join(map(str, sorted(lengths)))} layers from its sources: "
            "expected as many from each"
        )
    return Slice(sources, _parameters(raw, "slice", name))


def _source(raw: Any, kind: str, name: str, folder: Path) -> Source:
    mapping(raw, kind)
    if "model" not in raw:
        raise RecipeError(f"a {kind} names no model: {raw!r}")
    model, layers = model_path(raw["model"], "model", folder), None
    if kind == "source":
        layers = raw.get("layer_range")
        whole = isinstance(layers, list) and [type(i) for i in layers] == [int, int]
        if not whole or not 0 <= layers[0] < layers[1]:
            raise RecipeError(
                f"layer_range of {model} is {layers!r}: expected [first, last + 1], such as [0, 8]"
            )
        layers = tuple(layers)
    return Source(model, layers, _parameters(raw, kind, name))


def _parameters(raw: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    known, given = method(name).parameters, raw.get("parameters")
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise RecipeError(f"parameters of a {kind} are {given!r}: expected names and values")
    for word in given:
        if word not in known and word not in IGNORED:
            raise RecipeError(f"{name} has no parameter {word!r}{suggest(word, known)}")
        if word in known and kind in ("model", "source") and not known[word].per_model:
            raise RecipeError(f"{word} is one for all models: move it to the recipe's parameters")
    return {word: read_value(word, value) for word, value in given.items() if word in known}
