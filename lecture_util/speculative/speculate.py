"""Speculative generation: draft, verify in one forward, keep what was accepted, repeat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Protocol

import torch
from torch import Tensor

from lecture_util.model.generate import Prompt, PromptError, check_prompts, end_tokens
from lecture_util.model.sampling import GREEDY, Sampling
from lecture_util.model.transformer import Transformer

from .draft import Draft
from .target import Reader, Target
from .verify import Chance, verify

Verify = Callable[[Tensor, Draft, Sampling, Chance], tuple[list[int], int]]


class Drafter(Protocol):
    """Who guesses. It sees the sequence so far and nothing else of the loop."""

    def propose(self, tokens: Sequence[int], room: int, chance: Chance) -> Draft:
        """Guesses for what follows `tokens`, at most `room` deep; none is an answer too."""

    def settle(self, tokens: Sequence[int]) -> None:
        """The sequence now reads `tokens`: take back whatever was built on other guesses."""


@dataclass(frozen=True)
class Round:
    """One step of the loop: what was guessed, what of it was accepted, and what came of it.

    accepted  nodes of the draft, from a first guess down
    tokens    what the sequence gained: the accepted guesses, then one token of the target's own;
              fewer if an end token or a stop came first
    last      what the last token is: "bonus" after a draft accepted to its end, "correction" after
              a rejection, "plain" without a draft, "guess" where the text ended inside the draft
    """

    draft: Draft
    accepted: list[int]
    tokens: list[int]
    last: str


@dataclass
class Tally:
    """What a run came to."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0  # guesses that the target had to read
    accepted: int = 0
    tried: int = 0  # guesses that were compared with p; the rest followed a rejected one
    by_length: dict[int, int] = field(default_factory=dict)  # accepted in a round -> rounds

    def add(self, r: Round) -> None:
        self.rounds += 1
        self.tokens += len(r.tokens)
        self.drafted += len(r.draft)
        self.accepted += len(r.accepted)
        self.tried += _tried(r)
        self.by_length[len(r.accepted)] = self.by_length.get(len(r.accepted), 0) + 1

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """alpha as measured: of the guesses that were tried, how many were accepted."""
        return self.accepted / self.tried if self.tried else 0.0


def speculate(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    eos: int | Collection[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    chance: Chance | None = None,
    verify: Verify = verify,
) -> Iterator[Round]:
    """Yield round after round until the budget is spent, an end token comes, or `stop` says so.

    The new tokens follow the distribution of plain sampling from the target (with `verify` as it
    is); greedy, they are the same tokens. An end token or a stop inside an accepted block ends the
    text there; one that was guessed and rejected ends nothing.

    stop:   looks at the new tokens so far, after each; True ends the text.
    chance: where draws come from; by default torch's global generator.

    Cost:   each round, one forward of the target over the draft and the newest token.
    Raises: at the first round, PromptError for an empty prompt; ValueError for a drafter of another
            reader.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: expected a whole number, 0 or more")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {sampling!r}: expected Sampling(temperature=0.7) or the like")
    if isinstance(target, Reader) and getattr(drafter, "reader", target) is not target:
        raise ValueError(
            f"the {type(drafter).__name__} drafts from the features of another reader than the "
            "target: make it with the reader that verifies"
        )
    chance = Chance() if chance is None else chance
    eos, sequence, new = end_tokens(eos), [index(token) for token in prompt], []
    if not sequence:
        raise PromptError("the prompt is empty: a model continues at least one token")
    while (room := max_new_tokens - len(new)) > 0:
        draft = drafter.propose(sequence, room - 1, chance).cut(room - 1)
        logits_MV = target(sequence, draft)
        path, token = verify(logits_MV, draft, sampling, chance)
        block = [*(draft.tokens[node] for node in path), token]
        ended = False
        for i, token in enumerate(block):
            new.append(token)
            if token in eos or (stop is not None and stop(new)):
                block, ended = block[: i + 1], True
                break
        complete = len(block) == len(path) + 1
        path = path[: len(block) - complete]
        target.keep(path if complete else path[:-1])  # the newest token is not counted as read
        sequence += block
        drafter.settle(sequence)
        yield Round(draft, path, block, _last(draft, path) if complete else "guess")
        if ended:
            return


def generate_speculative(
    model: Transformer,
    new_drafter: Callable[[Reader], Drafter],
    prompt: Prompt,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    eos: int | Collection[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    generator: torch.Generator | None = None,
    verify: Verify = verify,
    tally: Tally | None = None,
    width: int = 64,
) -> list[int]:
    """Continue one prompt, as `generate` does, drafting with new_drafter(reader of the target).

    tally: is added to, if given.
    width: most guesses in a draft, which need slots in the cache besides the tokens.
    """
    rounds = stream_speculative(
        model, new_drafter, prompt, max_new_tokens,
        sampling=sampling, eos=eos, stop=stop, generator=generator, verify=verify, width=width,
    )  # fmt: skip
    output: list[int] = []
    for r in rounds:
        output += r.tokens
        if tally is not None:
            tally.add(r)
    return output


def stream_speculative(
    model: Transformer,
    new_drafter: Callable[[Reader], Drafter],
    prompt: Prompt,
    max_new_tokens: int,
    *,
    generator: torch.Generator | None = None,
    width: int = 64,
    **options,
) -> Iterator[Round]:
    """The rounds of `generate_speculative`, as they come. Raises: PromptError, at once."""
    (tokens,) = check_prompts(model, [prompt], max_new_tokens)
    reader = Reader(model, len(tokens) + max_new_tokens + width)
    drafter = new_drafter(reader)
    return speculate(reader, drafter, tokens, max_new_tokens, chance=Chance(generator), **options)


def _last(draft: Draft, path: list[int]) -> str:
    if not len(draft):
        return "plain"
    return "correction" if draft.children[path[-1] if path else -1] else "bonus"


def _tried(r: Round) -> int:
    """Steps down the draft at which guesses were compared with the target."""
    return len(r.accepted) + (r.last == "correction")
