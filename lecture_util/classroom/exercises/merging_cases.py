"""What the checkers of notebook 11 share: models as dicts, and cases that show every mistake."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Mapping

import torch

from lecture_util.classroom.checker import Wrong
from lecture_util.classroom.compare import difference

CHANGED = "your function changed what it was given: build new tensors instead"


class Models(list):
    """State dicts; in a message they are counted, not printed."""

    def __repr__(self) -> str:
        return f"{len(self)} model{'s' * (len(self) != 1)}"


class State(dict):
    def __repr__(self) -> str:
        return f"a model of {len(self)} tensor{'s' * (len(self) != 1)}"


class Tensors(list):
    """Tensors of one shape."""

    def __repr__(self) -> str:
        return f"{len(self)} tensors of shape {tuple(self[0].shape)}"


class Adapter(tuple):
    """(down_rD, up_Fr)"""

    def __repr__(self) -> str:
        return f"an adapter of rank {len(self[0])}"


def copied(answer):
    """The answer, given copies: a checker copies no dicts, and values are expected of the inputs"""
    if not callable(answer):
        return answer

    @functools.wraps(answer)
    def run(*args):
        return answer(*copy.deepcopy(args))

    return run


def _same(x, y) -> bool:
    if type(x) is not type(y):
        return False
    if isinstance(x, torch.Tensor):
        return x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
    if isinstance(x, Mapping):
        return list(x) == list(y) and all(_same(x[name], y[name]) for name in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(_same, x, y))
    return x == y


def untouched(c, answer, args) -> None:
    """One check: called with these very objects, not copies, the answer leaves them alone.

    It comes first: in place, a right idea gives odd numbers. What is raised is reported later.
    """
    before = copy.deepcopy(args)
    with contextlib.suppress(Wrong):
        c.call(lambda: answer(*args))
    c.expect(_same(args, before), CHANGED)


def called(c, answer, what, *args):
    """c.call, but what is raised is said to come of `what`, a special case."""
    try:
        return c.call(answer, *args)
    except Wrong as error:
        raise Wrong(f"{what}: {error}") from error


def has_nan(got) -> bool:
    if isinstance(got, Mapping):
        return any(map(has_nan, got.values()))
    if isinstance(got, list | tuple):
        return any(map(has_nan, got))
    return isinstance(got, torch.Tensor) and bool(got.isnan().any())


def telling(draw, right, mistakes):
    """Cases in which every mistake shows, and no two look alike: drawn anew until they do."""
    for _ in range(1000):
        cases = draw()
        results = [_results(function, cases) for function in (right, *mistakes)]
        if all(difference(x, y, 1e-6, 1e-9) for x, y in itertools.combinations(results, 2)):
            return cases
    raise RuntimeError("no draw shows all mistakes: a fault of this exercise, not of the answer")


def _results(function, cases):
    try:
        return [function(*case) for case in cases]
    except ArithmeticError:
        return []
