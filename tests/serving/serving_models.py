"""Small fp64 models, random traffic, and what each request would get if it were alone.

`alone` runs `lecture_util.model.generate`, one prompt at a time, and then reads the ends off its
tokens. Norms and rotations compute in fp32 whatever the model's dtype, so logits agree to 1e-5 or
so; at the seeds used here no two best logits are that close.
"""

import random
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from lecture_util.model.config import Config
from lecture_util.model.generate import generate
from lecture_util.model.sampling import GREEDY, Sampling
from lecture_util.model.transformer import Transformer
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.engine import Engine
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import Params, Request
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.slots import SlotCache

TINY = Config(D=20, F=28, K=2, G=3, H=6, L=2, V=23, max_context=96)
EOS = (5, 11)
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.9),
    Sampling(temperature=1.2, top_k=4),
    Sampling(temperature=0.8, top_p=0.7),
    Sampling(temperature=1.0, top_k=9, top_p=0.9, min_p=0.05),
)


def tiny_model(config=TINY, seed=3, dtype=torch.float64):
    """Random weights, larger than 0.02: with those a model hardly looks back."""
    model = Transformer.random(config, seed=seed, dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight *= 12.0
    return model


@dataclass(frozen=True)
class SumIsMultiple:
    """A stop of its own kind: true when the sum of the new tokens divides by `of`."""

    of: int

    def __call__(self, new_tokens):
        return sum(new_tokens) % self.of == 0


def random_request(rng, *, V=TINY.V, longest=30, most_new=20, most_samples=4, shared=()):
    """shared: beginnings that some of the prompts have in common."""
    prompt = [rng.randrange(V) for _ in range(rng.randint(1, longest))]
    if shared and rng.random() < 0.4:
        prompt = [*rng.choice(shared), *prompt[: rng.randint(0, 6)]]
    params = Params(
        max_new_tokens=rng.choice([0, 1, *range(2, most_new + 1)]),
        sampling=rng.choice(SAMPLINGS) if rng.random() < 0.5 else GREEDY,
        seed=rng.randrange(1000),
        eos=EOS if rng.random() < 0.3 else (),
        stop=SumIsMultiple(rng.randint(3, 12)) if rng.random() < 0.3 else None,
        samples=rng.randint(2, most_samples) if most_samples > 1 and rng.random() < 0.2 else 1,
    )
    return Request(prompt, params, user=rng.choice("abc"))


def random_trace(count, seed, gap=1.5, **about):
    """Requests that come `gap` forwards apart on average; many at once, too."""
    rng = random.Random(seed)
    shared = [[rng.randrange(TINY.V) for _ in range(length)] for length in (9, 16, 17)]
    requests, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(1 / gap) if rng.random() < 0.8 else 0.0
        request = random_request(rng, shared=shared, **about)
        requests.append(Request(request.prompt, request.params, now, request.user))
    rng.shuffle(requests)  # a trace need not be in order
    return requests


_answers = WeakKeyDictionary()  # of each model, what is known already


def alone(model, request):
    """For each sample, (tokens, reason) of the request by itself."""
    params, prompt = request.params, list(request.prompt)
    known, key = _answers.setdefault(model, {}), (tuple(prompt), params)
    if key in known:
        return known[key]
    answers = known[key] = []
    for i in range(params.samples):
        (tokens,) = generate(
            model, [prompt], params.max_new_tokens, sampling=params.sampling, eos=params.eos,
            generator=torch.Generator().manual_seed(params.seed + i),
        )  # fmt: skip
        answers.append(cut(tokens, params))
    return answers


def cut(tokens, params):
    for n in range(1, len(tokens) + 1):
        if tokens[n - 1] in params.eos:
            return tokens[:n], "end"
        if params.stop is not None and params.stop(tokens[:n]):
            return tokens[:n], "stop"
    return tokens, "length"


def told(completions):
    """Completions of a trace as a list of (tokens, reason), samples side by side."""
    return [(c.tokens, c.reason) for c in completions]


def assert_told(completions, answers):
    """Name the first that differs: pytest's own comparison of long lists takes minutes."""
    got = told(completions)
    differing = [i for i, pair in enumerate(zip(got, answers, strict=True)) if pair[0] != pair[1]]
    if differing:
        i = differing[0]
        raise AssertionError(
            f"{len(differing)} of {len(got)} differ; the first is {i}: {got[i]}, alone {answers[i]}"
        )


def expected(model, requests):
    return [answer for request in requests for answer in alone(model, request)]


def tiny_engine(model, *, pages=40, page_size=4, rows=None, policy=None, clock=None, **cache):
    """An engine with a small pool of pages; with `rows`, a SlotCache instead."""
    config, dtype = model.config, model.dtype
    policy = Policy(slots=5, token_budget=11) if policy is None else policy
    if rows is not None:
        memory = SlotCache(config, rows, config.max_context, dtype)
    else:
        memory = PagedCache(config, pages, page_size, dtype, **cache)
    memory.k_LMPKH.fill_(torch.nan if rows is None else 7.0)  # what nobody wrote, nobody may read
    memory.v_LMPKH.fill_(torch.nan if rows is None else 7.0)
    return Engine(model, memory, policy, VirtualClock() if clock is None else clock)


def assert_all_given_back(engine_or_loop):
    """No sequence, slot, row, page or table is left behind."""
    loop = getattr(engine_or_loop, "loop", engine_or_loop)
    scheduler, memory = loop.scheduler, loop.scheduler.memory
    assert not loop.live and not scheduler.waiting and not scheduler.running
    assert sorted(scheduler.free_slots) == list(range(scheduler.policy.slots))
    assert not +scheduler.waited
    assert memory.held() == (0, 0)
    if hasattr(memory, "blocks"):
        blocks = memory.blocks
        assert not memory.tables
        assert blocks.counts == [0] * blocks.num_pages
        assert blocks.available == blocks.num_pages
        assert sorted([*blocks.free, *blocks.idle]) == list(range(blocks.num_pages))
    else:
        assert sorted(memory.free) == list(range(memory.rows))
        assert not memory.rented and not memory.lengths


def count_copies(engine):
    """A list that grows by the pages (from, to) that the engine copies from now on."""
    memory, copied = engine.cache.memory, []
    take = memory.take_copies

    def take_copies():
        copies = take()
        copied.extend(copies)
        return copies

    memory.take_copies = take_copies
    return copied


def chunks(engine):
    """Parts of forwards that computed a piece of a prompt, and not its end."""
    prompts = {n: len(cs[0].prompt) for n, cs in engine.loop.done.items() if cs}
    parts = [p for i in engine.loop.iterations for p in i.parts]
    return [p for p in parts if p.start + p.count < prompts[p.number]]
