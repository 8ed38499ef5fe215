"""A recipe's values: a number, a gradient over the layers, or a list of values with filters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .schema import RecipeError, mapping


def resolve(setting: Any, name: str, t: float) -> Any:
    """A setting's value for the tensor `name`, at t (0 to 1) of its slice; None if none fits.

    A gradient's values lie evenly spaced over the layers, with straight lines between them; one
    of truth values holds each until the next. Of filters the first that is part of the name counts.
    """
    if isinstance(setting, Mapping):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    if any(isinstance(entry, Mapping) for entry in setting):
        for entry in setting:
            if entry.get("filter") in (None, "*") or entry["filter"] in name:
                return resolve(entry["value"], name, t)
        return None
    at = t * (len(setting) - 1)
    low = int(at)
    if isinstance(setting[low], bool) or at == low:
        return setting[low]
    return setting[low] * (1 - (at - low)) + setting[low + 1] * (at - low)


def filters(setting: Any) -> list[str]:
    """The filters in a setting that must be part of some tensor's name."""
    entries = setting if isinstance(setting, list) else [setting]
    found = [entry.get("filter") for entry in entries if isinstance(entry, Mapping)]
    return [pattern for pattern in found if pattern not in (None, "*")]


def read_value(word: str, value: Any) -> Any:
    """A setting as the recipe has it, checked, its numbers as floats.

    Texts that are numbers are read as such: to YAML, 1e-3 is a text (1.0e-3 is not).
    """
    if not isinstance(value, list):
        return _filtered(word, value) if isinstance(value, Mapping) else _plain(word, value)
    if not value:
        raise RecipeError(f"{word} is an empty list: expected at least one value")
    filtered = sum(isinstance(entry, Mapping) for entry in value)
    if filtered not in (0, len(value)):
        raise RecipeError(f"{word} mixes numbers with filters: write a value for every filter")
    plain = [_filtered(word, each) if filtered else _plain(word, each) for each in value]
    if len({isinstance(each, bool) for each in plain}) > 1:
        raise RecipeError(f"{word} is {value!r}: expected numbers, or true and false, not both")
    return plain


def _filtered(word: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    mapping(entry, "filtered value")
    pattern, value = entry.get("filter"), entry.get("value")
    if pattern is not None and not isinstance(pattern, str):
        raise RecipeError(f"{word} has the filter {pattern!r}: expected part of a tensor's name")
    nested = isinstance(value, list) and any(isinstance(each, Mapping) for each in value)
    if value is None or isinstance(value, Mapping) or nested:
        raise RecipeError(f"{word} has the entry {entry!r}: expected a number or list as its value")
    return {"filter": pattern, "value": read_value(word, value)}


def _plain(word: str, value: Any) -> bool | float:
    if isinstance(value, bool):
        return value
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{word} is {value!r}: expected a number, true or false")
    return number
