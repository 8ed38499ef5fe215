"""Tiny models, requests and clocks for this room's tests; no text that means anything."""

import random
from itertools import product

import torch

from lecture_util.model.config import Config
from lecture_util.model.generate import generate
from lecture_util.model.transformer import Transformer
from lecture_util.serving.clock import VirtualClock
from lecture_util.together.configuration import HEADS, Configuration, Incompatible
from lecture_util.together.variants import with_weights
from lecture_util.together.workload import Workload

# A server's forwards take up to 256 tokens, so a context must be as long.
TINY = Config(D=20, F=28, K=2, G=3, H=6, L=2, V=23, max_context=512)
VALUES = {
    "weights": ("fp32", "bf16", "int8", "int4"),
    "student": (False, True),
    "cache": (True, False),
    "schedule": ("single", "static", "continuous"),
    "slots": (1, 3),
    "pages": (False, True),
    "prefix": (False, True),
    "draft": (None, "ngram", "medusa", "eagle"),
    "guesses": (1, 4),
}


def tiny_model(config=TINY, seed=3, dtype=torch.float64):
    """Random weights, larger than 0.02: with those a model hardly looks back."""
    model = Transformer.random(config, seed=seed, dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.startswith("norm") and weight.ndim > 1:
                weight.mul_(12)
    return model


def in_numbers(weights: str) -> Transformer:
    """The tiny model with rounded weights that computes in fp64, where sums' order is no matter."""
    return with_weights(tiny_model(dtype=torch.float32), weights).double()


def combinations() -> list[dict]:
    return [dict(zip(VALUES, v, strict=True)) for v in product(*VALUES.values())]


def allowed() -> list[Configuration]:
    """Every configuration of VALUES that can be made; without a draft, of one number of guesses."""
    made = []
    for fields in combinations():
        if fields["draft"] is None and fields["guesses"] != 4:
            continue
        try:
            made.append(Configuration(**fields))
        except Incompatible:
            continue
    return made


def runnable(**fixed) -> list[Configuration]:
    """Of those, without the heads that only the reference model has, and with these values."""
    return [
        c
        for c in allowed()
        if c.draft not in HEADS and all(getattr(c, k) == v for k, v in fixed.items())
    ]


def workload(
    prompts=(21, 40, 1, 33, 18),
    news=(7, 3, 5, 1, 9),
    arrivals=None,
    closed=False,
    shared=16,
    seed=0,
    name="tiny",
) -> Workload:
    """Random tokens; the longer prompts begin alike, with `shared` tokens."""
    draw = random.Random(seed)
    words = [draw.randrange(1, TINY.V) for _ in range(max(prompts))]
    texts = tuple(
        tuple(words[: min(shared, P - 1)] + [draw.randrange(1, TINY.V) for _ in range(P)])[:P]
        for P in prompts
    )
    arrivals = [0.0] * len(prompts) if arrivals is None else arrivals
    return Workload(name, texts, tuple(news), tuple(arrivals), closed)


def alone(model, work: Workload) -> list[tuple[int, ...]]:
    """What plain `generate` says to each request by itself."""
    return [
        tuple(generate(model, [prompt], count)[0])
        for prompt, count in zip(work.prompts, work.new_tokens, strict=True)
    ]


def one_each(pieces) -> float:
    return 1.0


def by_tokens(pieces) -> float:
    return float(sum(p.count + p.padded for p in pieces))


def by_context(pieces) -> float:
    """In halves and quarters, whose sums are exact."""
    return 0.5 + sum(0.25 * p.start + p.count + p.padded for p in pieces)


def virtual(step=one_each) -> VirtualClock:
    return VirtualClock(step)
