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

REMEDY = (
    "generate_speculative takes a function of the reader, such as lambda reader: NgramDrafter()"
)
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
    width: int | None = None,
) -> Iterator[Round]:
    """Yield round after round until the budget is spent, an end token comes, or `stop` says so.

    The new tokens follow the distribution of plain sampling from the target (with `verify` as it
    is); greedy, they are the same tokens. An end token or a stop inside an accepted block ends the
    text there; one that was guessed and rejected ends nothing.

    stop:   looks at the new tokens so far, after each; True ends the text.
    chance: where draws come from; by default torch's global generator.
    width:  most guesses in a tree; None for as many as the target can read.

    Cost:   each round, one forward of the target over the draft and the newest token.
    Raises: PromptError for an empty prompt; ValueError for a drafter of another reader; TypeError
            for an argument of the wrong kind: all before the first round. ValueError for a draft
            that is wider than `width`.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: expected a whole number, 0 or more")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {sampling!r}: expected Sampling(temperature=0.7) or the like")
    if isinstance(drafter, type) or not (
        hasattr(drafter, "propose") and hasattr(drafter, "settle")
    ):
        raise TypeError(
            f"the drafter is {drafter!r}: expected an object with propose and settle, such as "
            f"NgramDrafter(); {REMEDY}"
        )
    if not callable(verify) or not (stop is None or callable(stop)):
        raise TypeError(
            f"verify is {verify!r}, stop is {stop!r}: expected functions; stop looks at the new "
            "tokens and says whether the text ends"
        )
    if chance is not None and not (hasattr(chance, "happens") and hasattr(chance, "draw")):
        raise TypeError(f"chance is {chance!r}: expected Chance(generator) or None")
    if isinstance(target, Reader) and getattr(drafter, "reader", target) is not target:
        raise ValueError(
            f"the {type(drafter).__name__} drafts from the features of another reader than the "
            "target: make it with the reader that verifies"
        )
    sequence = [index(token) for token in prompt]
    if not sequence:
        raise PromptError("the prompt is empty: a model continues at least one token")
    return _rounds(
        target, drafter, sequence, max_new_tokens, sampling, end_tokens(eos), stop,
        Chance() if chance is None else chance, verify, width,
    )  # fmt: skip


def _rounds(
    target: Target,
    drafter: Drafter,
    sequence: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    eos: Collection[int],
    stop: Callable[[list[int]], bool] | None,
    chance: Chance,
    verify: Verify,
    width: int | None,
) -> Iterator[Round]:
    new: list[int] = []
    while (room := max_new_tokens - len(new)) > 0:
        draft = drafter.propose(sequence, room - 1, chance)
        if not isinstance(draft, Draft):
            raise TypeError(f"propose returned {draft!r}: expected a Draft, or NOTHING")
        draft = draft.cut(room - 1)
        if width is not None and len(draft) > width and not draft.is_chain:
            raise ValueError(
                f"a draft of {len(draft)} guesses, but width={width}: pass width={len(draft)} to "
                "generate_speculative, or draft fewer"
            )
        logits_MV = target(sequence, draft)
        path, token = verify(logits_MV, draft, sampling, chance)
        block = [*(draft.tokens[node] for node in path), token]
        ended = False
        for i, token in enumerate(block):
            new.append(token)
            if token in eos or (stop is not None and stop(new)):
                block, ended = block[: i + 1], True
                break
        last = _last(draft, path) if len(block) > len(path) else "guess"
        target.keep(path[: len(block) - 1])  # the newest token is not counted as read
        sequence += block
        drafter.settle(sequence)
        yield Round(draft, path[: len(block)], block, last)
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
    width: most guesses in a tree, which need slots in the cache besides the tokens. (Those of a
           chain need none: it never reaches beyond max_new_tokens.)

    Raises: as `generate` and `speculate`; TypeError for a new_drafter that makes no drafter;
            ValueError for a width that is no whole number of 0 to max_context.
    """
    if not isinstance(tally, Tally | None):
        raise TypeError(f"tally is {tally!r}: expected Tally(), which you keep, or None")
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
    """The rounds of `generate_speculative`, as they come. Raises: the same, before the first."""
    if not callable(new_drafter):
        raise TypeError(f"new_drafter is {new_drafter!r}: {REMEDY}")
    if type(width) is not int or not 0 <= width <= model.config.max_context:
        raise ValueError(
            f"width={width!r}: expected a whole number of guesses, 0 to {model.config.max_context}"
        )
    (tokens,) = check_prompts(model, [prompt], max_new_tokens)
    chance = Chance(generator)
    reader = Reader(model, len(tokens) + max_new_tokens + width)
    try:
        drafter = new_drafter(reader)
    except (TypeError, ValueError) as error:
        if isinstance(new_drafter, type):  # NgramDrafter itself: its first argument is no reader
            raise TypeError(f"new_drafter is {new_drafter!r} ({error}): {REMEDY}") from error
        raise
    return speculate(reader, drafter, tokens, max_new_tokens, chance=chance, width=width, **options)


def _last(draft: Draft, path: list[int]) -> str:
    if not len(draft):
        return "plain"
    return "correction" if draft.children[path[-1] if path else -1] else "bonus"


def _tried(r: Round) -> int:
    """Steps down the draft at which guesses were compared with the target."""
    return len(r.accepted) + (r.last == "correction")
