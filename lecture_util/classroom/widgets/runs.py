"""A run of a model, recorded: what it said, and when each token came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lecture_util.roofline import stopwatch


@dataclass(frozen=True)
class Run:
    """One run, alone: its tokens, the text after each of them, and when each came.

    Units: seconds from the request.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    times_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.times_s[-1]

    @classmethod
    def record(
        cls,
        stream: Callable[[int], Iterator[int]],
        max_new_tokens: int,
        tokenizer,
        after_each: Callable[[int], object] = bool,
    ) -> Run:
        """Warm up, then note the clock at every token of `stream(max_new_tokens)`.

        after_each: called with the number of tokens so far; what it raises ends the run.
        """
        list(stream(min(2, max_new_tokens)))
        tokens, times_s = [], []
        with stopwatch() as watch:
            for token in stream(max_new_tokens):
                times_s.append(watch.seconds)
                tokens.append(token)
                after_each(len(tokens))
        starts = [tokens[: count + 1] for count in range(len(tokens))]
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in starts]
        whole = [text.rstrip("\ufffd") for text in texts]  # no half of a character
        return cls(tuple(tokens), tuple(whole), tuple(times_s))


class Stopped(Exception):
    """Somebody pressed Stop."""


def stream_naive(
    model, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int] = ()
) -> Iterator[int]:
    """Yield what `generate_naive` returns, token by token: each asks it for one more."""
    from lecture_util.model.generate import generate_naive

    text = list(prompt)
    for _ in range(max_new_tokens):
        text += generate_naive(model, text, 1)
        yield text[-1]
        if text[-1] in eos:
            return
