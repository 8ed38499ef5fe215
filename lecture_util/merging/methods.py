"""Every method by its recipe name: what it takes, and what it does with one tensor of each model.

Most are one recipe with two choices: thin the task vectors out somehow, and elect signs or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .conventions import PAPER, Conventions
from .model_stock import model_stock
from .parameters import REQUIRED, Parameter, fill, suggest
from .slerp import slerp
from .soups import check_sum, soup
from .sparsify import breadcrumbs, check_window, drop, magprune, trim
from .task_vectors import apply, combine, task_vector
from .tensors import by_chunks
from .ties import balance, elect_signs, majority


@dataclass(frozen=True)
class Context:
    """What a method may know besides tensors and settings.

    draw:       a model's index to its generator for this tensor.
    thresholds: each model's magnitude from which TIES keeps entries of this tensor, where it goes
                by the model.
    zero_sign:  see `ties.elect_signs`.
    """

    conventions: Conventions = PAPER
    draw: Callable[[int], torch.Generator] = field(default=lambda i: generator(0, "", i))
    thresholds: Sequence[float | None] | None = None
    zero_sign: str | int = "majority"


def generator(seed: int, name: str, model: int) -> torch.Generator:
    """Draws that depend on seed, tensor and model alone, not on what was merged before.

    model: its place among the models, so listing them in another order draws anew.
    """
    digest = hashlib.sha256(f"{seed}/{name}/{model}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


Settings = Mapping[str, Any]
Thin = Callable[[Tensor, int, Settings, Context], Tensor]


@dataclass(frozen=True)
class Method:
    """A way to merge.

    takes:  least and most models, the base not counted (SLERP's base is one of its two ends).
    base:   whether there must be one.
    thin, elect: of the methods that add thinned-out task vectors; `whole` of the others.
    check:  raises ValueError for settings that don't go together.
    """

    about: str
    parameters: Mapping[str, Parameter]
    takes: tuple[int, int | None] = (1, None)
    base: bool = True
    thin: Thin | None = None
    elect: bool = False
    trims: bool = False
    whole: Callable[[Tensor | None, list[Tensor], Settings, Context], Tensor] | None = None
    check: Callable[[Settings], None] | None = None

    def deltas(
        self, base: Tensor, tuned: Iterable[Tensor], p: Settings, c: Context
    ) -> list[Tensor]:
        """The thinned-out task vectors."""
        return [self.thin(task_vector(base, each), i, p, c) for i, each in enumerate(tuned)]

    def merge(
        self, base: Tensor | None, tuned: Iterable[Tensor], p: Settings, c: Context
    ) -> Tensor:
        """One tensor of the result from that tensor of each model."""
        if self.whole is not None:
            return self.whole(base, list(tuned), p, c)
        deltas, weights = self.deltas(base, tuned, p, c), p["weight"]
        if self.elect and c.zero_sign == "majority":  # of the tensor: looked up before it is cut up
            signs = elect_signs(deltas, weights, zero_sign=0)
            c = replace(c, zero_sign=majority(balance(signs)))

        def mix(base: Tensor, *deltas: Tensor) -> Tensor:
            signs = elect_signs(deltas, weights, zero_sign=c.zero_sign) if self.elect else None
            rule = c.conventions.divisor
            mixed = combine(deltas, weights, signs=signs, normalize=p["normalize"], divisor=rule)
            return apply(base, mixed, p["lambda"])

        return by_chunks(mix, base, *deltas)


def _trim(delta: Tensor, i: int, p: Settings, c: Context) -> Tensor:
    threshold = None if c.thresholds is None else c.thresholds[i]
    return trim(delta, p["density"][i], threshold=threshold)


def _drop(delta: Tensor, i: int, p: Settings, c: Context) -> Tensor:
    rescale = c.conventions.rescale if p["rescale"] else None
    return drop(delta, p["density"][i], c.draw(i), rescale=rescale)


def _crumbs(delta: Tensor, i: int, p: Settings, c: Context) -> Tensor:
    scope = c.conventions.crumbs_scope
    return breadcrumbs(delta, p["density"][i], p["gamma"][i], scope=scope)


def _magprune(delta: Tensor, i: int, p: Settings, c: Context) -> Tensor:
    rescale = c.conventions.rescale if p["rescale"] else None
    return magprune(delta, p["density"][i], p["epsilon"][i], c.draw(i), rescale=rescale)


def _linear(base: Tensor | None, tensors: list[Tensor], p: Settings, c: Context) -> Tensor:
    return soup(tensors, p["weight"], normalize=p["normalize"])


def _slerp(base: Tensor, tensors: list[Tensor], p: Settings, c: Context) -> Tensor:
    return slerp(base, tensors[0], p["t"], nearly=c.conventions.slerp_nearly)


def _stock(base: Tensor, tensors: list[Tensor], p: Settings, c: Context) -> Tensor:
    bounds = c.conventions.stock_range
    return model_stock(base, tensors, per_filter=p["filter_wise"], bounds=bounds)


def _passthrough(base: Tensor | None, tensors: list[Tensor], p: Settings, c: Context) -> Tensor:
    scale = p["scale"][0]
    return tensors[0] if scale is None else apply(torch.zeros_like(tensors[0]), tensors[0], scale)


def _check_linear(p: Settings) -> None:
    if p["normalize"]:
        check_sum(p["weight"])


def _check_windows(p: Settings) -> None:
    for i, (density, epsilon) in enumerate(zip(p["density"], p["epsilon"], strict=True)):
        if 0 < density < 1:  # else nothing is drawn
            check_window(density, epsilon, f"model {i}: ")


_WEIGHT = Parameter(float, 1.0, per_model=True)
_SHARED = {"weight": _WEIGHT, "lambda": Parameter(float, 1.0)}
_DENSITY = {"density": Parameter(float, REQUIRED, per_model=True, mergekit=1.0)}
_GAMMA = {"gamma": Parameter(float, 0.01, per_model=True)}
_EPSILON = {"epsilon": Parameter(float, 0.07, per_model=True, mergekit=0.15)}
_RESCALE = {"rescale": Parameter(bool, True)}


def _normalize(default: bool, mergekit: bool | None = None) -> dict[str, Parameter]:
    return {"normalize": Parameter(bool, default, mergekit=mergekit)}


METHODS: dict[str, Method] = {
    "linear": Method(
        "weighted mean: a soup",
        {"weight": _WEIGHT} | _normalize(True),
        base=False,
        whole=_linear,
        check=_check_linear,
    ),
    "slerp": Method("along the arc", {"t": Parameter(float)}, takes=(1, 1), whole=_slerp),
    "task_arithmetic": Method(
        "base plus task vectors", _SHARED | _normalize(False), thin=lambda d, i, p, c: d
    ),
    "ties": Method(
        "trim, elect signs, mean of what agrees",
        _SHARED | _normalize(True) | {"density": Parameter(float, 0.2, True, mergekit=1.0)},
        thin=_trim,
        elect=True,
        trims=True,
    ),
    "dare_linear": Method(
        "drop at random, rescale, add",
        _SHARED | _normalize(False) | _DENSITY | _RESCALE,
        thin=_drop,
    ),
    "dare_ties": Method(
        "drop at random, rescale, elect signs",
        _SHARED | _normalize(True, mergekit=False) | _DENSITY | _RESCALE,
        thin=_drop,
        elect=True,
    ),
    "breadcrumbs": Method(
        "without the smallest and the outliers",
        _SHARED | _normalize(False) | _DENSITY | _GAMMA,
        thin=_crumbs,
    ),
    "breadcrumbs_ties": Method(
        "the same, with elected signs",
        _SHARED | _normalize(True, mergekit=False) | _DENSITY | _GAMMA,
        thin=_crumbs,
        elect=True,
    ),
    "model_stock": Method(
        "mean pulled to the base, by the angle",
        {"filter_wise": Parameter(bool, False)},
        takes=(2, None),
        whole=_stock,
    ),
    "della": Method(
        "drop by rank, rescale, elect signs",
        _SHARED | _normalize(True) | _DENSITY | _EPSILON | _RESCALE,
        thin=_magprune,
        elect=True,
        check=_check_windows,
    ),
    "della_linear": Method(
        "drop by rank, rescale, add",
        _SHARED | _normalize(False) | _DENSITY | _EPSILON | _RESCALE,
        thin=_magprune,
        check=_check_windows,
    ),
    "passthrough": Method(
        "layers as they are, stacked anew",
        {"scale": Parameter(float, None, per_model=True)},
        takes=(1, 1),
        base=False,
        whole=_passthrough,
    ),
}


def method(name: str) -> Method:
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"merge method {name!r} is unknown{suggest(name, METHODS)}")
    return METHODS[name]


def settings(name: str, given: Settings, models: int, conventions: Conventions) -> dict[str, Any]:
    """Every parameter of a method, filled up and checked: see `parameters.fill`.

    Raises: ValueError, also for settings that don't go together, naming the model by its place.
    """
    how = method(name)
    full = fill(name, how.parameters, given, models, conventions)
    if how.check is not None:
        try:
            how.check(full)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return full
