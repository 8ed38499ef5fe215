"""Answers with a clock: our plain decoding, our speculative loop, and transformers' `generate`.

The forward over the prompt is timed apart from what follows it, for everybody alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers.generation.streamers import BaseStreamer

from lecture_util.model.generate import decode
from lecture_util.model.sampling import GREEDY
from lecture_util.speculative.draft import NOTHING, Draft
from lecture_util.speculative.speculate import Round, Tally, speculate
from lecture_util.speculative.target import Reader
from lecture_util.speculative.verify import Chance, verify

EOS, WIDTH = 2, 64  # the chat model's end token; slots for a draft


@dataclass
class Run:
    """One answer: its tokens, and when they came."""

    tokens: list[int]
    first: int  # tokens that the forward over the prompt yielded
    prompt_s: float
    decode_s: float
    rounds: list[Round] = field(default_factory=list)  # after the first
    parts_s: dict[str, float] = field(default_factory=dict)  # of decode_s

    @property
    def decoded(self) -> int:
        return len(self.tokens) - self.first


class Nothing:
    """Drafts nothing: plain decoding through the same loop."""

    def propose(self, tokens: Sequence[int], room: int, chance: Chance) -> Draft:
        return NOTHING

    def settle(self, tokens: Sequence[int]) -> None:
        pass


class Clocked:
    """Calls through to a drafter and a reader, and adds up what each takes."""

    def __init__(self, reader: Reader, drafter) -> None:
        self.reader, self.drafter = reader, drafter
        self.keep, self.settle = reader.keep, drafter.settle
        self.seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0}

    def _timed(self, part: str, call: Callable, *args):
        start = time.perf_counter()
        result = call(*args)
        self.seconds[part] += time.perf_counter() - start
        return result

    def propose(self, *args) -> Draft:
        return self._timed("draft", self.drafter.propose, *args)

    def __call__(self, *args):
        return self._timed("target", self.reader, *args)

    def verify(self, *args):
        return self._timed("verify", verify, *args)


def speculated(model, new_drafter, ids, n: int, sampling=GREEDY, seed: int = 0) -> Run:
    start = time.perf_counter()
    reader = Reader(model, len(ids) + n + WIDTH)
    clocked = Clocked(reader, new_drafter(reader))
    chance = Chance(torch.Generator().manual_seed(seed))
    rounds = speculate(
        clocked, clocked, ids, n,
        sampling=sampling, eos=EOS, chance=chance, verify=clocked.verify,
    )  # fmt: skip
    first, begun = next(rounds), time.perf_counter()
    before, rest = dict(clocked.seconds), list(rounds)
    end = time.perf_counter()
    tokens = [token for r in (first, *rest) for token in r.tokens]
    parts = {part: clocked.seconds[part] - before[part] for part in before}
    return Run(tokens, len(first.tokens), begun - start, end - begun, rest, parts)


def plain(model, ids, n: int) -> Run:
    """Our own decoding: `generate`'s loop."""
    start = time.perf_counter()
    steps = decode(model, [ids], n, eos=EOS)
    tokens, begun = list(next(steps)), time.perf_counter()
    tokens += [token for (token,) in steps]
    return Run(tokens, 1, begun - start, time.perf_counter() - begun)


class FirstTokens(BaseStreamer):
    """Notes when the first tokens of an answer come, and how many."""

    def __init__(self) -> None:
        self.calls, self.first, self.at = 0, 0, 0.0

    def put(self, value) -> None:
        self.calls += 1  # the first call is the prompt
        if self.calls == 2:
            self.first, self.at = value.numel(), time.perf_counter()

    def end(self) -> None:
        pass


def peer(model, ids, n: int, **options) -> Run:
    """transformers' `generate`."""
    ids_1T, noted, start = torch.tensor([ids]), FirstTokens(), time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=n, do_sample=False,
            eos_token_id=EOS, pad_token_id=EOS, streamer=noted, **options,
        )  # fmt: skip
    tokens, end = out[0, len(ids) :].tolist(), time.perf_counter()
    return Run(tokens, noted.first, noted.at - start, end - noted.at)


def race(contenders: dict[str, Callable[[], Run]], repeats: int, turn: int = 0) -> dict[str, Run]:
    """The best run of each. They take turns, and who comes first changes."""
    best: dict[str, Run] = {}
    names = list(contenders)
    for repeat in range(repeats):
        shift = (turn + repeat) % len(names)
        for name in names[shift:] + names[:shift]:
            run = contenders[name]()
            if name not in best or run.decode_s < best[name].decode_s:
                best[name] = run
    return best


def rate(runs: Iterable[Run]) -> float:
    """Tokens a second, the forward over the prompt left out."""
    runs = list(runs)
    return sum(run.decoded for run in runs) / sum(run.decode_s for run in runs)


def tally_of(rounds: Iterable[Round]) -> Tally:
    tally = Tally()
    for r in rounds:
        tally.add(r)
    return tally


def rounds_of(runs: Iterable[Run]) -> list[Round]:
    return [r for run in runs for r in run.rounds]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two answers part; None if they are the same."""
    if list(a) == list(b):
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
