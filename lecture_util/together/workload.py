"""Who asks what, and when: the requests that all configurations answer alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from lecture_util.model.tokenizer import chat
from lecture_util.serving.request import EndsAfter, Params, Request
from lecture_util.speculative.prompts import BEES, LETTER, LIGHTHOUSE, NOTES, held_prompts

SYSTEM = (
    "You are the assistant of the garden club. Answer briefly, from these notes, and quote them "
    "where you can.\n\n" + NOTES + "\n\n" + LETTER
)
QUESTIONS = (
    "Who was present at the meeting?", "What will Ana order, and by when?",
    "How much did the new hose cost?", "Repeat the notes word for word.",
    "What was put off, and why?", "Who writes to the school?", "List the tasks.",
    "Which item is in the letter?", "Repeat the letter word for word.",
    "Where is the gate that Boris will mend?", "What is the number to call?",
    "Write the notes as a list.", "When was the meeting?", "Who has signed the letter?",
    "What happens in June?", "Summarize the letter.",
)  # fmt: skip
ANSWERS = (24, 16, 16, 64, 24, 12, 48, 16, 64, 16, 12, 64, 12, 12, 16, 32)  # tokens, long-tailed
SERVED = 12


@dataclass(frozen=True)
class Workload:
    """Requests of known length, so that every configuration makes as many tokens.

    arrivals_s: in seconds, in this order.
    closed:     a single user, who asks the next question when the last is answered, whatever
                `arrivals_s` says; otherwise requests arrive then, whoever is still busy.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]
    arrivals_s: tuple[float, ...]
    closed: bool = False

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.new_tokens) == len(self.arrivals_s) > 0:
            raise ValueError(
                f"{len(self.prompts)} prompts, {len(self.new_tokens)} lengths, "
                f"{len(self.arrivals_s)} arrivals: expected as many of each, and some"
            )
        for i, (prompt, count) in enumerate(zip(self.prompts, self.new_tokens, strict=True)):
            if len(prompt) < 1:
                raise ValueError(f"prompt {i} is empty: a model continues at least one token")
            if type(count) is not int or count < 1:
                raise ValueError(f"new_tokens {i} is {count!r}: expected a whole number from 1")
        before_s = 0.0
        for i, arrival_s in enumerate(self.arrivals_s):
            if not isinstance(arrival_s, Real) or not before_s <= arrival_s < math.inf:
                raise ValueError(
                    f"arrival {i} is {arrival_s!r}: expected seconds from 0, none before the last"
                )
            before_s = arrival_s

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(len(p) + n for p, n in zip(self.prompts, self.new_tokens, strict=True))

    def requests(self) -> list[Request]:
        """For the scheduler, which knows only the largest budget, not where a text will end.

        Of a closed workload they are to be served one by one, each as soon as it is handed over.
        """
        most = max(self.new_tokens)
        return [
            Request(prompt, Params(most, stop=EndsAfter(n)), 0.0 if self.closed else arrival)
            for prompt, n, arrival in zip(
                self.prompts, self.new_tokens, self.arrivals_s, strict=True
            )
        ]

    def first(self, count: int) -> Workload:
        """The first `count` requests."""
        if type(count) is not int or not 1 <= count <= len(self):
            raise ValueError(f"count={count!r}: this workload has 1 to {len(self)} requests")
        cut = slice(count)
        return Workload(
            self.name, self.prompts[cut], self.new_tokens[cut], self.arrivals_s[cut], self.closed
        )


def assistant(
    tokenizer, count: int = SERVED, start: int = 0, gap_s: float = 0.0, scale: float = 1.0
) -> Workload:
    """Questions about the same notes: a shared beginning, answers that quote, unequal lengths.

    start: the first question; the SERVED first are measured on, the others predictions are made
           from.   gap_s: seconds between arrivals; 0 for all at once.
    scale: makes answers shorter or longer.
    Raises: ValueError for questions that there are not, and a scale that is not above 0.
    """
    last = len(QUESTIONS)
    if not (type(count) is type(start) is int and 0 <= start < start + count <= last):
        raise ValueError(
            f"count={count!r}, start={start!r}: there are {last} questions, so start from 0 and "
            f"start + count up to {last}, with a count of at least 1"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r}: expected a number above 0")
    chosen = slice(start, start + count)
    prompts = [
        chat(tokenizer, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": q}])
        for q in QUESTIONS[chosen]
    ]
    news = [max(1, round(scale * n)) for n in ANSWERS[chosen]]
    return _made("assistant", prompts, news, [gap_s * i for i in range(len(prompts))])


def writing(tokenizer, count: int = 8, new_tokens: int = 32) -> Workload:
    """A batch job: different questions, no common beginning, all there at once."""
    prompts = [chat(tokenizer, text) for text in held_prompts(count)]
    return _made("writing", prompts, [new_tokens] * len(prompts), [0.0] * len(prompts))


def editing(tokenizer, new_tokens: int = 48) -> Workload:
    """One person at a laptop, one text after another to repeat, correct and quote from."""
    tasks = (
        ("Repeat the following text word for word.", LIGHTHOUSE),
        ("Correct the grammar of this text.", BEES),
        ("Which sentence says when the lamp became electric? Quote it.", LIGHTHOUSE),
    )
    prompts = [chat(tokenizer, f"{request}\n\n{text}") for request, text in tasks]
    return _made("editing", prompts, [new_tokens] * 3, [0.0] * 3, closed=True)


def _made(
    name: str,
    prompts: Sequence[Sequence[int]],
    news: Sequence[int],
    arrivals: Sequence[float],
    closed: bool = False,
) -> Workload:
    return Workload(name, tuple(map(tuple, prompts)), tuple(news), tuple(arrivals), closed)
