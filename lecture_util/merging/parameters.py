"""What a method can be told: each parameter's kind and default, and how what came is checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .conventions import Conventions

REQUIRED = object()
LARGEST = 3.4e38  # in float32, where models are merged


@dataclass(frozen=True)
class Parameter:
    """One setting of a method. per_model: each model has its own. mergekit: the tool's default."""

    kind: type
    default: Any = REQUIRED
    per_model: bool = False
    mergekit: Any = None

    def fallback(self, conventions: Conventions) -> Any:
        theirs = conventions.defaults == "mergekit" and self.mergekit is not None
        return self.mergekit if theirs else self.default


def suggest(word: Any, known: Sequence[str] | Mapping[str, Any]) -> str:
    """`: did you mean ...?`, or what there is."""
    spelt = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(word).lower(), list(spelt), n=1)
    if near:
        return f": did you mean {spelt[near[0]]!r}?"
    return f": expected one of {', '.join(known)}"


def fill(
    name: str,
    parameters: Mapping[str, Parameter],
    given: Mapping[str, Any],
    models: int,
    conventions: Conventions,
) -> dict[str, Any]:
    """Every parameter of the method `name`, filled up and checked; those per model as lists.

    given: a parameter per model is a list (a tensor, an array) of one a model, or one for all.
    Raises: ValueError naming the parameter, what came and what was expected.
    """
    for word in given:
        if word not in parameters:
            raise ValueError(f"{name} has no parameter {word!r}{suggest(word, parameters)}")
    full = {}
    for word, parameter in parameters.items():
        value = given.get(word)
        value = parameter.fallback(conventions) if value is None else value
        value = value.tolist() if hasattr(value, "tolist") else value
        if not parameter.per_model:
            full[word] = _checked(name, word, parameter, value)
            continue
        values = list(value) if isinstance(value, (list, tuple)) else [value] * models
        if len(values) != models:
            raise ValueError(f"{name} got {len(values)} of {word!r} for {models} models: one each")
        fallback = parameter.fallback(conventions)
        full[word] = [
            _checked(name, word, parameter, fallback if each is None else each, i)
            for i, each in enumerate(values)
        ]
    return full


def _checked(
    name: str, word: str, parameter: Parameter, value: Any, model: int | None = None
) -> Any:
    if value is REQUIRED:
        whose = "this tensor: set it among the parameters"
        if model is not None:
            whose = f"model {model}: set it among that model's parameters, or once for all models"
        raise ValueError(f"{name} needs {word!r}, and none is given for {whose}")
    if value is None:
        return None
    if parameter.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name}: {word} is {value!r}, expected true or false")
        return value
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) <= LARGEST:
        raise ValueError(f"{name}: {word} is {value!r}, expected a number")
    if word in ("density", "gamma", "t") and not 0 <= number <= 1:
        raise ValueError(f"{name}: {word} is {value!r}, expected a number between 0 and 1")
    return number
