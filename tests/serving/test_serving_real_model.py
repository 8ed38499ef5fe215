"""The engine on the reference model, in fp32: the texts that `generate` makes one at a time."""

import random

import pytest
import torch

from lecture_util.model import weights
from lecture_util.model.generate import generate
from lecture_util.model.sampling import Sampling
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.engine import Engine
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import Params, Request
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.slots import SlotCache
from lecture_util.serving.static_batching import static_server

TIE = 1e-3  # two best logits nearer than this may change places with the order of sums


@pytest.fixture(scope="module")
def model():
    return weights.load("smollm2-135m")


@pytest.fixture(scope="module")
def trace(model):
    rng = random.Random(0)
    system = [rng.randrange(model.config.V) for _ in range(33)]
    requests = []
    for i in range(10):
        prompt = [rng.randrange(model.config.V) for _ in range(rng.randint(1, 30))]
        if i % 3 == 0:
            prompt = [*system, *prompt[:5]]
        params = Params(rng.randint(2, 8), samples=2 if i == 3 else 1)
        requests.append(Request(prompt, params, float(rng.randint(0, 8))))
    return requests


@pytest.fixture(scope="module")
def texts(model, trace):
    return [generate(model, [r.prompt], r.params.max_new_tokens)[0] for r in trace]


def assert_same_up_to_ties(model, trace, texts, completions):
    answers = iter(completions)
    for request, text in zip(trace, texts, strict=True):
        for _ in range(request.params.samples):
            got = next(answers).tokens
            assert len(got) == len(text)
            first = next(
                (i for i, pair in enumerate(zip(got, text, strict=True)) if len(set(pair)) > 1),
                None,
            )
            if first is not None:
                with torch.inference_mode():
                    logits_V = model(torch.tensor([[*request.prompt, *text[:first]]]))[0, -1]
                best, second = logits_V.topk(2).values
                assert best - second < TIE


def test_through_few_pages(model, trace, texts):
    engine = Engine(
        model, PagedCache(model.config, 17, 4), Policy(slots=4, token_budget=24), VirtualClock()
    )
    assert_same_up_to_ties(model, trace, texts, engine.serve(trace))
    assert engine.stats.preemptions > 0 and engine.stats.found_share > 0
    assert engine.cache.blocks.available == 17


def test_through_rows_and_through_static_batches(model, trace, texts):
    rows = Engine(
        model, SlotCache(model.config, 5, 64), Policy(slots=5, token_budget=40), VirtualClock()
    )
    assert_same_up_to_ties(model, trace, texts, rows.serve(trace))
    batches = static_server(model, 5, 64, VirtualClock())
    assert_same_up_to_ties(model, trace, texts, batches.serve(trace))


def test_with_seeds_samples_are_those_of_one_at_a_time(model):
    """Each draws from a generator of its own, over logits that differ by rounding alone."""
    sampling = Sampling(temperature=0.9, top_k=20, top_p=0.9)
    engine = Engine(model, PagedCache(model.config, 12, 4), Policy(slots=4), VirtualClock())
    got = engine.generate([[504, 260, 7]], Params(6, sampling, seed=11, samples=3))
    for i, c in enumerate(got):
        generator = torch.Generator().manual_seed(11 + i)
        want = generate(model, [[504, 260, 7]], 6, sampling=sampling, generator=generator)
        assert [c.tokens] == want
