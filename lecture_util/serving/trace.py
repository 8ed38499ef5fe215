"""Made-up traffic: requests that arrive at random, with lengths that have a long tail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .request import EndsAfter, Params, Request


@dataclass(frozen=True)
class Lengths:
    """A log-normal length in tokens: half lie below `median`; `spread` 0 makes all alike.

    spread is the standard deviation of the logarithm: at 1, one in six is over 2.7 medians. Drawn
    lengths are rounded and clipped to [least, most].
    """

    median: float
    spread: float = 1.0
    least: int = 1
    most: int = 512

    def __post_init__(self) -> None:
        floats, whole = (self.median, self.spread), (self.least, self.most)
        if not all(_is_number(x) for x in floats) or not all(type(n) is int for n in whole):
            raise TypeError(f"{self}: expected numbers, and whole ones for least and most")
        if not (self.median > 0 and self.spread >= 0 and 1 <= self.least <= self.most):
            raise ValueError(f"{self}: expected median > 0, spread >= 0 and 1 <= least <= most")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn = self.median * np.exp(self.spread * rng.standard_normal(count))
        return np.clip(np.rint(drawn), self.least, self.most).astype(int).tolist()


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def poisson_arrivals(rate_per_s: float, count: int, rng: np.random.Generator) -> list[float]:
    """Moments at which independent users come: gaps are exponential, 1/rate on average."""
    if not _is_number(rate_per_s) or not rate_per_s > 0:
        raise ValueError(f"rate_per_s={rate_per_s!r}: expected requests a second, above 0")
    return np.cumsum(rng.exponential(1 / rate_per_s, count)).tolist()


def make_trace(
    count: int,
    *,
    rate_per_s: float | None,
    prompt_tokens: Lengths = Lengths(48),
    new_tokens: Lengths = Lengths(32),
    most_new: int | None = None,
    tokens: Sequence[int] | None = None,
    seed: int = 0,
) -> list[Request]:
    """`count` requests. Nobody but their `stop` knows where their texts will end.

    rate_per_s   Poisson arrivals at this rate; None: all there from the beginning
    most_new     the max_new_tokens that each asks for; by default new_tokens.most
    tokens       where prompts are cut from at random; by default numbers up to 255
    """
    for name, value in (("count", count), ("seed", seed)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name}={value!r}: expected a whole number from 0 up")
    for name, value in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
        if not isinstance(value, Lengths):
            raise TypeError(f"{name}={value!r}: expected Lengths(median, spread)")
    rng = np.random.default_rng(seed)
    arrivals = [0.0] * count if rate_per_s is None else poisson_arrivals(rate_per_s, count, rng)
    prompts, news = prompt_tokens.draw(rng, count), new_tokens.draw(rng, count)
    pool = rng.integers(1, 256, 4 * prompt_tokens.most) if tokens is None else tokens
    pool = pool.tolist() if hasattr(pool, "tolist") else list(pool)
    if not all(type(token) is int for token in pool):
        raise TypeError("tokens: expected whole numbers, such as encode(tokenizer, text)")
    if len(pool) < prompt_tokens.most:
        raise ValueError(
            f"{len(pool)} tokens to cut prompts from, but one may have {prompt_tokens.most}"
        )
    most_new = new_tokens.most if most_new is None else most_new
    requests = []
    for i in range(count):
        start = int(rng.integers(0, len(pool) - prompts[i] + 1))
        params = Params(most_new, seed=seed + i, stop=EndsAfter(news[i]))
        requests.append(Request(pool[start : start + prompts[i]], params, arrivals[i]))
    return requests
