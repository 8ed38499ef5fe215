"""Merges of a few small models, made and scored as soon as a setting is chosen, and remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lecture_util.merging.methods import METHODS
from lecture_util.merging.parameters import suggest
from lecture_util.merging.plan import merge_states

State = Mapping[str, Tensor]
Score = Callable[[State], Mapping[str, Any]]

# density and scale to begin with: sums of N task vectors need a small scale, means of some don't
STARTS = {
    "task_arithmetic": (1.0, 0.4),
    "ties": (0.7, 0.8),
    "dare_linear": (0.5, 0.4),
    "dare_ties": (0.5, 0.8),
    "breadcrumbs": (0.9, 0.4),
    "breadcrumbs_ties": (0.9, 0.8),
    "della_linear": (0.5, 0.4),
    "della": (0.5, 0.8),
}
RANDOM = ("dare_linear", "dare_ties", "della_linear", "della")


class TaskScore(NamedTuple):
    loss: float
    accuracy: float


def mean(scores: Mapping[str, TaskScore]) -> TaskScore:
    return TaskScore(*(sum(part) / len(scores) for part in zip(*scores.values(), strict=True)))


@dataclass(frozen=True)
class Setting:
    """A merge. What a method does not ask for is None, so that equal merges are equal settings."""

    method: str
    scale: float
    density: float | None = None
    epsilon: float | None = None
    seed: int | None = None
    convention: str = "paper"

    def on_curve_with(self, other: Setting, over: str) -> bool:
        """Whether they differ in `over`, density or scale, at most."""
        mine, others = dict(vars(self)), dict(vars(other))
        return mine | {over: None} == others | {over: None}


@dataclass(frozen=True)
class Point:
    """A merge and its score on each task."""

    setting: Setting
    scores: Mapping[str, TaskScore]

    @property
    def loss(self) -> float:
        return mean(self.scores).loss

    @property
    def accuracy(self) -> float:
        return mean(self.scores).accuracy


def asks_for(method: str, parameter: str) -> bool:
    """Whether a method has density, epsilon, or a seed."""
    return method in RANDOM if parameter == "seed" else parameter in METHODS[method].parameters


def setting_of(
    method: str, scale: float, density: float, epsilon: float, seed: int, convention: str
) -> Setting:
    given = {"density": density, "epsilon": epsilon, "seed": seed}
    used = {name: value for name, value in given.items() if asks_for(method, name)}
    return Setting(method, scale, convention=convention, **used)


class Bench:
    """Fine-tunes and their base; `merge(setting)` merges and scores once, then remembers.

    base, tuned: the scores of what is merged.   past: every Point so far, in order.
    """

    def __init__(
        self, states: Mapping[str, State], base: State, score: Score, tasks: Sequence[str] | None
    ) -> None:
        self.states, self.base_state, self._score = states, base, score
        self.tasks = None if tasks is None else tuple(tasks)
        self.base = self.score(base, "the base")
        self.tasks = tuple(self.base)
        self.tuned = {name: self.score(one, f"fine-tune {name!r}") for name, one in states.items()}
        self._points: dict[Setting, Point] = {}

    @property
    def past(self) -> list[Point]:
        return list(self._points.values())

    @property
    def best(self) -> dict[str, TaskScore]:
        """For each task the most accurate fine-tune's score."""
        return {
            task: max((scores[task] for scores in self.tuned.values()), key=lambda s: s.accuracy)
            for task in self.tasks
        }

    @property
    def leader(self) -> str:
        """The fine-tune with the least mean loss over all tasks."""
        return min(self.tuned, key=lambda name: mean(self.tuned[name]).loss)

    def merge(self, setting: Setting) -> Point:
        """Raises: ValueError for a setting that the method refuses."""
        if setting not in self._points:
            used = {"density": setting.density, "epsilon": setting.epsilon}
            merged = merge_states(
                setting.method, list(self.states.values()), self.base_state, scale=setting.scale,
                seed=setting.seed or 0, convention=setting.convention,
                **{name: value for name, value in used.items() if value is not None},
            )  # fmt: skip
            self._points[setting] = Point(setting, self.score(merged, setting.method))
        return self._points[setting]

    def forget(self) -> None:
        self._points.clear()

    def curve(self, setting: Setting, over: str) -> list[Point]:
        """The past points that differ from a setting in `over` only, in its order."""
        found = [point for point in self.past if point.setting.on_curve_with(setting, over)]
        return sorted(found, key=lambda point: getattr(point.setting, over))

    def score(self, state: State, whose: str) -> dict[str, TaskScore]:
        """Raises: TypeError if `score` does not return (loss, accuracy) for each task."""
        found = self._score(state)
        if not isinstance(found, Mapping) or not found:
            raise TypeError(
                f"score of {whose} is {found!r:.80}: expected a dict, task to (loss, accuracy)"
            )
        tasks = tuple(found) if self.tasks is None else self.tasks
        if set(tasks) != set(found):
            raise TypeError(
                f"score of {whose} has tasks {', '.join(map(str, found))}: expected "
                f"{', '.join(map(str, tasks))}"
            )
        scores = {}
        for task in tasks:
            try:
                loss, accuracy = map(float, found[task])
            except (TypeError, ValueError):
                raise TypeError(
                    f"score of {whose} on {task} is {found[task]!r:.80}: expected (loss, accuracy)"
                ) from None
            if not 0 <= accuracy <= 1 or math.isnan(loss):
                raise TypeError(
                    f"score of {whose} on {task} is ({loss:g}, {accuracy:g}): expected a loss, and "
                    "an accuracy of 0 to 1"
                )
            scores[task] = TaskScore(loss, accuracy)
        return scores


def named(states: Any, tasks: Sequence[str] | None) -> dict[str, State]:
    """The fine-tunes by name. Raises: TypeError or ValueError naming what came."""
    if not isinstance(states, Mapping):
        if isinstance(states, str) or not isinstance(states, Sequence):
            raise TypeError(f"states are {states!r:.80}: pass a dict, task to its state dict")
        if tasks is None or len(tasks) != len(states):
            raise ValueError(f"{len(states)} states in a list: name them with as many tasks")
        states = dict(zip(tasks, states, strict=True))
    if len(states) < 2 or not all(isinstance(one, Mapping) for one in states.values()):
        raise ValueError(
            f"states hold {', '.join(map(str, states)) or 'nothing'}: pass a dict of two or more "
            "fine-tunes, task to its state dict"
        )
    return dict(states)


def method_named(name: Any) -> str:
    if not isinstance(name, str) or name not in STARTS:
        raise ValueError(f"method is {name!r}{suggest(name, STARTS)}")
    return name
