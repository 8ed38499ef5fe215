"""A request, the sequences that answer it, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from numbers import Real

import torch

from lecture_util.model.generate import end_tokens
from lecture_util.model.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Params:
    """How a prompt is to be continued.

    max_new_tokens  at most so many, the end token included
    sampling, seed  how tokens are chosen; sample i of a request draws from a generator of its own,
                    seeded with seed + i, so its text does not depend on who shares the batch
    eos             end tokens; the one that comes is part of the output
    stop            called with the new tokens after each one; True ends the text. It may hold state
                    or raise: then this request fails and no other
    samples         answers wanted to one prompt; the prompt is computed once, where memory can fork
    """

    max_new_tokens: int = 64
    sampling: Sampling = GREEDY
    seed: int = 0
    eos: int | Collection[int] | None = ()
    stop: Callable[[list[int]], bool] | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 0), ("samples", 1)):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name}={value!r}: expected a whole number, at least {least}")
            if value < least:
                raise ValueError(f"{name}={value}: expected at least {least}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63 - self.samples:
            raise ValueError(f"seed={self.seed!r}: expected a whole number from 0 up, below 2^63")
        if not isinstance(self.sampling, Sampling):
            raise TypeError(
                f"sampling={self.sampling!r}: expected Sampling(temperature=0.7) or the like"
            )
        if self.stop is not None and not callable(self.stop):
            raise TypeError(
                f"stop={self.stop!r}: expected a function of the new tokens that says True to end"
            )
        object.__setattr__(self, "eos", end_tokens(self.eos))


@dataclass(frozen=True)
class EndsAfter:
    """A `stop` for experiments: the text is over after `count` tokens, and no scheduler knows it.

    It stands in for the end token that a chat model would say by itself.
    """

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"count={self.count!r}: expected a whole number, at least 1")

    def __call__(self, new_tokens: list[int]) -> bool:
        return len(new_tokens) >= self.count


@dataclass(frozen=True)
class Request:
    """A prompt with its parameters, and when and from whom it comes.

    space: names a prefix cache of its own, such as ("adapter", "french") or ("salt", "alice");
           only requests of one space share keys and values.
    """

    prompt: Sequence[int]
    params: Params = Params()
    arrival_s: float = 0.0
    user: str = ""
    space: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.params, Params):
            raise TypeError(f"params={self.params!r}: expected Params(max_new_tokens=64, ...)")
        if isinstance(self.arrival_s, bool) or not isinstance(self.arrival_s, Real):
            raise TypeError(f"arrival_s={self.arrival_s!r}: expected seconds")
        if not 0 <= self.arrival_s < float("inf"):
            raise ValueError(f"arrival_s={self.arrival_s}: expected seconds from 0 up")
        object.__setattr__(self, "arrival_s", float(self.arrival_s))  # sums of float32 are coarse
        if not isinstance(self.user, str):
            raise TypeError(f"user={self.user!r}: expected a name, such as 'alice'")
        if not isinstance(self.space, tuple) or not all(isinstance(s, str) for s in self.space):
            raise TypeError(f"space={self.space!r}: expected a tuple of words")


def as_requests(prompts: Sequence, params: Params | Sequence[Params]) -> list[Request]:
    """A request for each prompt. params: for all, or one for each."""
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__len__"):
        raise TypeError(f"prompts={prompts!r}: expected a list of them: lists of tokens, [[1, 2]]")
    if not isinstance(params, Params | list | tuple):
        raise TypeError(f"params={params!r}: expected Params(...), or a list with one for each")
    many = [params] * len(prompts) if isinstance(params, Params) else params
    if len(many) != len(prompts):
        raise ValueError(f"{len(many)} params for {len(prompts)} prompts: give one for each")
    return [Request(prompt, p) for prompt, p in zip(prompts, many, strict=True)]


@dataclass(eq=False)
class Running:
    """One answer on its way: its tokens, how many of them are in the cache, and its times.

    `computed` counts the tokens whose keys and values are in the cache. Decoding, all but the
    newest are. After a preemption none is, and prompt and new tokens are computed again together.
    """

    id: int
    request: Request
    number: int  # of the request
    sample: int
    tokens: list[int]
    arrival_s: float
    computed: int = 0
    slot: int | None = None
    followers: list[Running] = field(default_factory=list)  # further samples, not yet forked
    generator: torch.Generator | None = None  # made at the first draw, on the logits' device
    admitted_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    found: int = 0  # tokens that the prefix cache saved us from computing

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens to be computed before the next one can be drawn; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        return self.remaining > 1 or not self.token_times_s

    @property
    def longest(self) -> int:
        """The most tokens it can ever have in the cache; the last one drawn is never computed."""
        return len(self.request.prompt) + max(1, self.request.params.max_new_tokens) - 1

    def is_over(self) -> str | None:
        """Why the text ends with its newest token, if it does. Raises: what `stop` raises."""
        params, new = self.request.params, self.new_tokens
        if new and new[-1] in params.eos:
            return "end"
        full = len(new) >= params.max_new_tokens  # before `stop`, which may change its list
        if params.stop is not None and params.stop(new):
            return "stop"
        return "length" if full else None

    @property
    def generator_state(self) -> torch.Tensor | None:
        """None before the first draw."""
        return None if self.generator is None else self.generator.get_state()

    @generator_state.setter
    def generator_state(self, state: torch.Tensor | None) -> None:
        if state is None:
            self.generator = None
        else:
            self.generator.set_state(state)


@dataclass(frozen=True)
class Completion:
    """What became of one answer.

    reason   "end" (an end token), "stop", "length", "cancelled" or "failed" (see `error`)
    times    seconds on the server's clock; None for what never happened
    """

    number: int
    sample: int
    prompt: list[int]
    tokens: list[int]
    reason: str
    error: Exception | None = None
    arrival_s: float = 0.0
    admitted_s: float | None = None
    token_times_s: tuple[float, ...] = ()
    finished_s: float = 0.0
    preemptions: int = 0
    found: int = 0
    user: str = ""

    @property
    def num_tokens(self) -> int:
        """New tokens; here all of them are known by number."""
        return len(self.tokens)

    @property
    def queue_s(self) -> float | None:
        """Seconds between arrival and the first admission."""
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: what a user waits before anything appears."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, on average; needs at least two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def latency_s(self) -> float:
        """From arrival to the end."""
        return self.finished_s - self.arrival_s
