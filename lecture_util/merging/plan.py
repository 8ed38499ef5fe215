"""From models to the merged model, tensor by tensor: `merge_states` in memory, `merged` in general.

A Piece says from which tensors of which models one tensor of the result is made, and with which
settings. Models are read by name, so they may be dicts in memory or folders on disk; no more than
one tensor of each is held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .conventions import Conventions, conventions
from .methods import Context, Method, generator, method, settings
from .select import Magnitudes
from .soups import State
from .task_vectors import task_vector
from .tensors import same_tensors
from .ties import balance, elect_signs, majority

Place = tuple[int, str]  # a model's index, and its name for the tensor
Read = Callable[[int, str], Tensor]
Thresholds = Mapping[tuple[int, float], float]  # of a model's tensors of one density


@dataclass(frozen=True)
class Piece:
    """One tensor of the result. settings: as `methods.settings` fills them up."""

    name: str
    sources: tuple[Place, ...]
    base: Place | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def read(self, read: Read) -> tuple[Tensor | None, list[Tensor]]:
        """The base's tensor and the others'. Raises: as `same_tensors`."""
        places = self.sources if self.base is None else (self.base, *self.sources)
        tensors = [read(*place) for place in places]
        same_tensors(self.name, tensors, len(places))
        return (None, tensors) if self.base is None else (tensors[0], tensors[1:])


def merge_states(
    name: str,
    states: Sequence[State],
    base: State | None = None,
    *,
    convention: str | Mapping[str, str] | Conventions | None = None,
    seed: int = 0,
    progress: bool = False,
    **parameters: Any,
) -> dict[str, Tensor]:
    """Merge state dicts: `merge_states("ties", [a, b, c], base, density=.2, scale=.7)`.

    states:     the fine-tunes, without the base; for SLERP the one other end.
    seed:       of the random methods; each model draws by its place, so order matters to them.
    parameters: of the method, one number or one a model; `scale` stands for `lambda`.
    Returns a new state; the tensors that a method leaves alone are the models' own.
    Raises: ValueError for unknown methods and parameters; TypeError for what are no state dicts;
            KeyError, ShapeError, TensorMismatch with the tensor's name where models don't fit
            together.
    """
    chosen, how = conventions(convention), method(name)
    _check_states(states, base)
    if "scale" in parameters and "lambda" in how.parameters:
        if "lambda" in parameters:
            raise ValueError(f"{name} got both scale and lambda, which are one: keep one")
        parameters["lambda"] = parameters.pop("scale")
    check_models(name, len(states), base is not None)
    models: list[State] = list(states) if base is None or not how.base else [*states, base]
    full = settings(name, parameters, len(states), chosen)
    if not models[0]:
        raise ValueError("model 0 holds no tensors: pass state dicts, like model.state_dict()")
    for i, state in enumerate(models):
        if strange := set(models[0]) ^ set(state):
            raise KeyError(
                f"{min(strange)} is in one of models 0 and {i} only: merge models of one kind"
            )
    pieces = [
        Piece(
            key,
            tuple((i, key) for i in range(len(states))),
            (len(states), key) if how.base else None,
            full,
        )
        for key in models[0]
    ]
    read = lambda i, key: models[i][key]  # noqa: E731
    return dict(merged(how, pieces, read, chosen, seed=seed, progress=progress))


def _check_states(states: Sequence[State], base: State | None) -> None:
    if isinstance(states, (Mapping, torch.nn.Module)):
        raise TypeError(
            f"states is one {type(states).__name__}: expected a list of state dicts, such as "
            "[a.state_dict(), b.state_dict()]"
        )
    named = [(f"model {i}", state) for i, state in enumerate(states)]
    for whose, state in named if base is None else [*named, ("base", base)]:
        if not isinstance(state, Mapping):
            raise TypeError(
                f"{whose} is a {type(state).__name__}: expected a state dict, {{name: tensor}}, "
                "like model.state_dict()"
            )


def check_models(name: str, models: int, base: bool) -> None:
    """Require as many models as the method takes, and a base where it needs one."""
    how = method(name)
    if how.base and not base:
        raise ValueError(f"{name} needs a base model: the one the others were fine-tuned from")
    least, most = how.takes
    if models < least or (most is not None and models > most):
        wanted = f"exactly {least}" if least == most else f"at least {least}"
        beside = " beside the base" if how.base else ""
        raise ValueError(f"{name} got {models} models{beside}: expected {wanted}")


@torch.no_grad()
def merged(
    how: Method,
    pieces: Sequence[Piece],
    read: Read,
    chosen: Conventions,
    *,
    seed: int = 0,
    progress: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the result, by name, in the order of the pieces.

    The papers' TIES looks at the whole model before it merges a tensor: the trim's thresholds
    take two rounds over the files, the majority of signs a third. Per tensor, one round does.
    """
    from tqdm.auto import tqdm

    def rounds(label: str) -> Iterator[Piece]:
        return tqdm(pieces, desc=label, unit="tensor", leave=False, disable=not progress)

    def context(piece: Piece, thresholds: Thresholds | None, zero_sign: str | int) -> Context:
        edges = None
        if thresholds is not None:
            own = zip(piece.sources, piece.settings["density"], strict=True)
            edges = [thresholds.get((model, density)) for (model, _), density in own]
        return Context(chosen, lambda i: generator(seed, piece.name, i), edges, zero_sign)

    # A function for each tensor, so that what it read is gone before the next is read.

    def balance_of(piece: Piece, c: Context) -> int:
        base, tuned = piece.read(read)
        if not base.is_floating_point():
            return 0
        deltas = how.deltas(base, _once(tuned), piece.settings, c)
        return balance(elect_signs(deltas, piece.settings["weight"], zero_sign=0))

    def merged_of(piece: Piece, c: Context) -> Tensor:
        base, tuned = piece.read(read)
        first = tuned[0] if base is None else base
        if not first.is_floating_point():
            return first
        return how.merge(base, _once(tuned), piece.settings, c)

    thresholds, zero_sign = None, chosen.zero_sign
    if how.trims and chosen.trim_scope == "model":
        thresholds = _thresholds(pieces, read, rounds)
    if how.elect and zero_sign == "majority":
        balances = (
            balance_of(piece, context(piece, thresholds, zero_sign))
            for piece in rounds("counting signs")
        )
        zero_sign = majority(sum(balances))
    for piece in rounds("merging"):
        yield piece.name, merged_of(piece, context(piece, thresholds, zero_sign))


def _once(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Each in turn, let go as the next is asked for: a model is held as tensor or as delta."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def _thresholds(pieces: Sequence[Piece], read: Read, rounds) -> Thresholds:
    """The magnitude of the floor(density * n)-th largest entry of a model's task vector.

    A recipe may give tensors densities of their own. Each density ranks among its own n entries,
    so that every tensor's group keeps the share it was given; 0 and 1 need no threshold.
    """
    counters: dict[tuple[int, float], Magnitudes] = {}

    def look(piece: Piece, see: str) -> None:
        base, tuned = piece.read(read)
        if not base.is_floating_point() or not base.numel():
            return
        own = zip(piece.sources, piece.settings["density"], tuned, strict=True)
        for (model, _), density, each in own:
            if 0 < density < 1:
                counter = counters.setdefault((model, density), Magnitudes())
                getattr(counter, see)(task_vector(base, each))

    for piece in rounds("counting magnitudes"):
        look(piece, "count")
    for (_, density), counter in counters.items():
        counter.narrow(max(1, int(density * counter.total)))
    for piece in rounds("finding thresholds"):
        look(piece, "refine")
    return {group: counter.kth() for group, counter in counters.items()}
