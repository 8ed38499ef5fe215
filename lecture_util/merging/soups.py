"""Model soups: the mean of several fine-tunes of one model.

Weights that were fine-tuned from the same start lie in one basin of the loss, so their mean is a
model too, often a better one than each, and costs at inference what one costs.
Source: Wortsman et al. 2022, arXiv:2203.05482.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from .tensors import map_states, one_shape, one_weight_each, wide

State = Mapping[str, Tensor]


def soup(
    tensors: Sequence[Tensor], weights: Sequence[float] | None = None, *, normalize: bool = True
) -> Tensor:
    """sum w_i x_i, divided by sum w_i if `normalize`; all weights 1 is the uniform soup.

    Normalised, only the ratios of the weights count: (.1, 1.0) of one model twice is that model;
    without it, 1.1 times that model.
    Shapes: all alike -> the same; dtype of the first, sums in fp32 or wider.
    Raises: ValueError if the weights are not one a tensor, or sum to nothing; ShapeError;
            TensorMismatch for what isn't floating-point.
    """
    weights = one_weight_each(weights, tensors, "tensors")
    if normalize:
        check_sum(weights)
    one_shape(tensors, "tensor ")
    mixed = wide(tensors[0]) * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        mixed.add_(wide(tensor), alpha=weight)
    if normalize:
        mixed.div_(sum(weights))
    return mixed.to(tensors[0].dtype)


def check_sum(weights: Sequence[float]) -> None:
    """Require weights that can be normalised. Raises: ValueError where they cancel, or are all 0.

    As measured by their magnitudes: 1e-9 twice is a mean as good as any.
    """
    if abs(sum(weights)) <= 1e-8 * sum(map(abs, weights)):
        raise ValueError(
            f"the weights {weights} sum to 0, so they can't be normalised: set "
            "normalize=False, or use task_arithmetic to subtract a model"
        )


@dataclass(frozen=True)
class GreedySoup:
    """The soup, who is in it, and every score on the way.

    chosen: indices of the states in it, in the order in which they went in.
    tried:  each (index, score of the soup with it), best single model first.
    """

    state: dict[str, Tensor]
    chosen: list[int]
    tried: list[tuple[int, float]]

    @property
    def score(self) -> float:
        return max(score for index, score in self.tried if index in self.chosen)


def greedy_soup(
    states: Sequence[State], score: Callable[[State], float], *, strict: bool = False
) -> GreedySoup:
    """Best model first, each next one joins if the soup's score does not fall.

    score:  of a state on held-out data, higher is better; called 2N - 1 times for N states.
    strict: a tie keeps the candidate out (the authors' code); the paper lets it in.
    Raises: ValueError for no states, and for a score that is NaN.
    """
    if not states:
        raise ValueError("greedy_soup got no states: pass at least one")
    alone = [_number(score(state), f"state {i}") for i, state in enumerate(states)]
    order = sorted(range(len(states)), key=lambda i: -alone[i])  # stable: ties in given order
    chosen, best = [order[0]], alone[order[0]]
    tried = [(order[0], best)]
    state = dict(states[order[0]])
    for index in order[1:]:
        bowl = [states[i] for i in (*chosen, index)]
        candidate = map_states(lambda *tensors: soup(tensors), *bowl)
        reached = _number(score(candidate), f"the soup of states {[*chosen, index]}")
        tried.append((index, reached))
        if reached > best or (reached == best and not strict):
            chosen.append(index)
            state, best = candidate, reached
    return GreedySoup(state, chosen, tried)


def _number(score: float, whose: str) -> float:
    if math.isnan(score):
        raise ValueError(f"{whose} scored NaN: expected a number, there is no order with NaN")
    return score
