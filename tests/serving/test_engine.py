"""Whatever the engine does behind the scenes, each text is the one its prompt gets alone."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_models import (
    EOS,
    SAMPLINGS,
    TINY,
    SumIsMultiple,
    alone,
    assert_all_given_back,
    assert_told,
    chunks,
    count_copies,
    expected,
    random_trace,
    tiny_engine,
    tiny_model,
    told,
)

from lecture_util.model.config import Config
from lecture_util.model.generate import generate
from lecture_util.model.sampling import Sampling
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.engine import Engine
from lecture_util.serving.loop import TooLong
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import EndsAfter, Params, Request
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.slots import SlotCache


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def trace():
    return random_trace(200, seed=1, longest=24, most_new=14)


@pytest.fixture(scope="module")
def answers(model, trace):
    return expected(model, trace)


def test_the_trace_holds_every_kind_of_request(trace, answers):
    reasons = {reason for _, reason in answers}
    assert reasons == {"end", "stop", "length"}
    assert {r.params.samples for r in trace} == {1, 2, 3, 4}
    assert {r.params.sampling for r in trace} == set(SAMPLINGS)
    assert {0, 1} < {r.params.max_new_tokens for r in trace}
    assert len({tuple(tokens) for tokens, _ in answers}) > 120  # the model has something to say


# The largest request may have 24 + 14 - 1 = 37 tokens: 10 pages of 4 are the least that holds it.
SETUPS = {
    "pages of 1": (dict(pages=50, page_size=1), Policy(slots=6, token_budget=13)),
    "pages of 4": (dict(pages=13, page_size=4), Policy(slots=6, token_budget=13)),
    "pages of 16": (dict(pages=4, page_size=16), Policy(slots=5, token_budget=7)),
    "room for one": (dict(pages=10, page_size=4), Policy(slots=4, token_budget=30)),
    "whole prompts": (
        dict(pages=13, page_size=4),
        Policy(slots=6, token_budget=24, chunked=False, order="shortest", patience=9),
    ),
    "fair, admitted in bursts": (
        dict(pages=13, page_size=4),
        Policy(slots=7, token_budget=17, order="fair", waiting_served_ratio=0.8),
    ),
    "no prefix cache": (
        dict(pages=13, page_size=4, prefix_caching=False),
        Policy(slots=6, token_budget=20),
    ),
}


@pytest.mark.parametrize("name", SETUPS)
def test_two_hundred_requests_through_pages_get_the_texts_they_get_alone(
    name, model, trace, answers
):
    cache, policy = SETUPS[name]
    if not name.startswith("pages of"):
        trace = trace[:70]
    engine = tiny_engine(model, policy=policy, **cache)
    copied = count_copies(engine)
    completions = engine.serve(trace)
    assert_told(completions, answers[: len(completions)])
    assert_all_given_back(engine)
    # Not by luck: all that could have gone wrong did happen.
    iterations = engine.loop.iterations
    stats = engine.stats
    assert stats.preemptions > 5
    assert sum(c.preemptions for cs in engine.loop.done.values() for c in cs) == stats.preemptions
    assert (stats.found_share > 0.02) == (name != "no prefix cache")
    assert bool(copied) == (name != "pages of 1")  # whose pages are never half full
    assert bool(chunks(engine)) == policy.chunked
    if policy.chunked:
        assert max(sum(p.count for p in i.parts) for i in iterations) <= policy.token_budget


@pytest.mark.parametrize("chunked", [True, False])
def test_two_hundred_requests_through_rows_get_the_texts_they_get_alone(
    chunked, model, trace, answers
):
    engine = tiny_engine(model, rows=7, policy=Policy(6, 16, chunked=chunked))
    copied = count_copies(engine)
    completions = engine.serve(trace if chunked else trace[:70])
    assert_told(completions, answers[: len(completions)])
    assert_all_given_back(engine)
    assert copied  # rows of further samples
    assert engine.stats.preemptions == 0


def test_serving_twice_finds_what_was_computed_and_changes_nothing(model, trace, answers):
    engine = tiny_engine(model, pages=400, policy=Policy(slots=8, token_budget=40))
    few = trace[:40]
    first = engine.serve(few)
    engine.reset_stats()
    again = engine.serve(few)
    assert told(first) == told(again) == answers[: len(first)]
    assert engine.stats.found_share > 0.6
    assert engine.stats.requests == 40
    assert_all_given_back(engine)


@pytest.mark.parametrize(
    "config",
    [
        Config(D=12, F=20, K=1, G=1, H=8, L=1, V=23, max_context=96),
        Config(D=18, F=20, K=1, G=5, H=4, L=2, V=23, tied=True, max_context=96),
        Config(D=20, F=12, K=4, G=1, H=6, L=3, V=23, qkv_bias=True, max_context=96),
    ],
    ids=["one head", "one KV head, tied", "MHA with biases"],
)
def test_other_shapes_of_model(config):
    model = tiny_model(config, seed=5)
    trace = random_trace(25, seed=2)
    answers = expected(model, trace)
    for setup in (dict(pages=16), dict(pages=60, page_size=1), dict(rows=5)):
        engine = tiny_engine(model, **setup)
        assert_told(engine.serve(trace), answers)
        assert_all_given_back(engine)


def test_in_fp32_greedy_texts_differ_at_most_where_two_logits_tie():
    model = tiny_model(dtype=torch.float32)
    trace = [
        replace(r, params=replace(r.params, sampling=Sampling()))
        for r in random_trace(60, seed=4, most_samples=1)
    ]
    completions = tiny_engine(model, pages=16).serve(trace)
    for request, c, (tokens, reason) in zip(
        trace, completions, expected(model, trace), strict=True
    ):
        pairs = enumerate(zip(c.tokens, tokens, strict=False))
        first = next((i for i, (mine, other) in pairs if mine != other), None)
        if first is None:
            assert (c.tokens, c.reason) == (tokens, reason)
            continue
        logits_V = model(torch.tensor([[*request.prompt, *tokens[:first]]]))[0, -1]
        best, second = logits_V.topk(2).values
        assert best - second < 1e-3


@st.composite
def policies(draw):
    slots = draw(st.integers(1, 6))
    return Policy(
        slots=slots,
        token_budget=draw(st.integers(slots, 40)),
        chunked=draw(st.booleans()),
        order=draw(st.sampled_from(["arrival", "shortest", "fair"])),
        patience=draw(st.none() | st.integers(1, 30)),
        waiting_served_ratio=draw(st.sampled_from([0, 0.3, 1.2, 50.0])),
        max_waiting_steps=draw(st.integers(1, 25)),
    )


@settings(max_examples=20)
@given(
    policy=policies(),
    seed=st.integers(0, 10**6),
    count=st.integers(1, 12),
    gap=st.sampled_from([0.1, 2.0, 9.0]),
    page_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
    spare=st.integers(0, 9),
    rows=st.booleans(),
    prefix_caching=st.booleans(),
)
def test_any_policy_serves_any_trace_to_its_end(
    policy, seed, count, gap, page_size, spare, rows, prefix_caching
):
    trace = random_trace(
        count, seed, gap, longest=20, most_new=9, most_samples=min(3, policy.slots)
    )
    model = tiny_model(Config(D=12, F=12, K=1, G=2, H=6, L=1, V=23, max_context=96))
    longest = max(len(r.prompt) + max(1, r.params.max_new_tokens) - 1 for r in trace)
    if rows:
        memory = dict(rows=policy.slots)
    else:  # just enough for the largest alone, and a little more
        pages = -(-longest // page_size) + spare
        memory = dict(pages=pages, page_size=page_size, prefix_caching=prefix_caching)
    engine = tiny_engine(model, policy=policy, **memory)
    assert_told(engine.serve(trace), expected(model, trace))
    assert_all_given_back(engine)


def test_samples_are_the_texts_of_as_many_requests_and_the_prompt_is_computed_once(model):
    prompt, sampling = list(range(10)), Sampling(temperature=1.0)
    params = Params(8, sampling, seed=40, samples=4)
    engine = tiny_engine(model)
    four = engine.generate([prompt], params)
    apart = [Params(8, sampling, seed=40 + i) for i in range(4)]
    assert told(four) == told(tiny_engine(model).generate([prompt] * 4, apart))
    assert [c.sample for c in four] == [0, 1, 2, 3] and len({c.number for c in four}) == 1
    assert len({tuple(c.tokens) for c in four}) == 4
    parts = [p for i in engine.loop.iterations for p in i.parts]
    assert sum(p.count for p in parts if p.kind == "prefill") == len(prompt)


def test_samples_share_pages_until_they_write(model):
    engine = tiny_engine(model, pages=40, page_size=4)
    copied = count_copies(engine)
    engine.submit(list(range(10)), Params(6, Sampling(temperature=1.0), samples=4))
    engine.step()
    assert engine.cache.memory.held() == (10, 12)  # three pages, once
    assert copied == []
    engine.step()
    assert len(copied) == 3  # of the half-full page: the last of four to write keeps the original
    assert engine.cache.memory.held() == (2 * 4 + 4 * 3, (2 + 4) * 4)


def test_a_text_does_not_depend_on_the_seeds_beside_it(model):
    mine = Params(10, Sampling(temperature=1.0), seed=1)
    alone_ = tiny_engine(model).generate([[1, 2]], mine)
    others = [Params(12, Sampling(temperature=1.0), seed=s) for s in range(4)]
    beside = tiny_engine(model).generate([[1, 2]] + [[1, 2, 3]] * 4, [mine, *others])
    assert told(alone_) == told(beside)[:1]


def test_prompts_may_be_tensors_arrays_tuples_or_numbers_of_numpy(model):
    (want,) = generate(model, [[3, 1, 4, 1]], 5)
    forms = [
        torch.tensor([3, 1, 4, 1]),
        np.array([3, 1, 4, 1]),
        (3, 1, 4, 1),
        [np.int64(3), 1, 4, 1],
    ]
    engine = tiny_engine(model)
    for completion in engine.generate(forms, Params(5)):
        assert completion.tokens == want and completion.prompt == [3, 1, 4, 1]
    both = engine.generate(torch.tensor([[3, 1, 4, 1], [3, 1, 4, 1]]), Params(5))
    assert [c.tokens for c in both] == [want, want]


def test_a_prompt_that_grows_after_submit_changes_nothing(model):
    """A chat's list of tokens is appended to while its answer is computed."""
    engine, prompt = tiny_engine(model), [3, 1, 4]
    number = engine.submit(prompt, Params(5))
    engine.step()
    prompt += [1, 5]
    while engine.loop.busy:
        engine.step()
    (completion,) = engine.result(number)
    assert completion.prompt == [3, 1, 4]
    assert [completion.tokens] == generate(model, [[3, 1, 4]], 5)


def test_a_stream_yields_the_text_while_others_move_on(model):
    engine = tiny_engine(model)
    other = engine.submit([7, 8], Params(4))
    stream = engine.stream([1, 2, 3], Params(9))
    got = [next(stream) for _ in range(6)]
    assert engine.result(other)[0].reason == "length"  # ended in passing
    got += stream
    assert [got] == generate(model, [[1, 2, 3]], 9)
    assert_all_given_back(engine)


def test_streams_take_turns_and_each_gets_its_own(model):
    engine = tiny_engine(model)
    prompts = [[1, 2, 3], [4], [5, 6]]
    streams = [engine.stream(prompt, Params(7)) for prompt in prompts]
    texts = [[next(s)] for s in streams]
    for _ in range(6):
        for text, stream in zip(texts, streams, strict=True):
            text.append(next(stream))
    for stream in streams:
        assert list(stream) == []
    assert texts == [generate(model, [p], 7)[0] for p in prompts]


def test_a_stream_outlives_that_others_reset_the_stats(model):
    engine = tiny_engine(model)
    stream = engine.stream([1, 2, 3], Params(6))
    got = [next(stream)]
    engine.generate([[5]], Params(30))  # ends our request, too
    engine.reset_stats()
    assert [got + list(stream)] == generate(model, [[1, 2, 3]], 6)


def test_streams_of_nothing_and_of_one(model):
    engine = tiny_engine(model)
    assert list(engine.stream([1, 2], Params(0))) == []
    assert [list(engine.stream([1, 2], Params(1)))] == generate(model, [[1, 2]], 1)
    (end,) = generate(model, [[1, 2]], 1)[0]
    assert list(engine.stream([1, 2], Params(9, eos=end))) == [end]


def test_events_tell_the_whole_story_in_order(model, trace):
    engine = tiny_engine(model, pages=16)
    requests = trace[:30]
    numbers = [engine.submit(r.prompt, r.params) for r in requests]
    texts, ends = {}, {}
    while engine.loop.busy:
        for event in engine.step():
            key = event.number, event.sample
            assert key not in ends
            if event.token is not None:
                texts.setdefault(key, []).append(event.token)
            if event.completion is not None:
                ends[key] = event.completion
    assert engine.step() == []
    for number, request in zip(numbers, requests, strict=True):
        for sample, (tokens, reason) in enumerate(alone(model, request)):
            assert texts.get((number, sample), []) == tokens
            assert ends[number, sample].reason == reason
            assert ends[number, sample] == engine.result(number)[sample]


def test_no_and_one_new_token_are_as_many(model):
    """B28: a loop that ends at `== max_tokens` never ends at 0."""
    engine = tiny_engine(model)
    none, one = engine.generate([[1, 2], [1, 2]], [Params(0, samples=2), Params(1)])[1:]
    assert (none.tokens, none.reason, none.ttft_s) == ([], "length", None)
    assert [one.tokens] == generate(model, [[1, 2]], 1)
    assert len(engine.loop.iterations) == 1
    assert_all_given_back(engine)


def test_a_prompt_that_fills_the_context_is_served(model):
    prompt = [i % TINY.V for i in range(TINY.max_context - 1)]
    engine = tiny_engine(model, pages=24)
    assert [engine.generate([prompt], Params(1))[0].tokens] == generate(model, [prompt], 1)


def test_eos_and_stop_at_once_is_an_end(model):
    (tokens,) = generate(model, [[1, 2]], 5)
    last = tokens.index(tokens[4]) + 1
    params = Params(20, eos=tokens[4], stop=EndsAfter(last))
    (c,) = tiny_engine(model).generate([[1, 2]], params)
    assert (c.tokens, c.reason) == (tokens[:last], "end")


def test_a_space_keeps_others_from_its_pages(model):
    engine = tiny_engine(model, pages=60)
    prompt = [*range(17)]
    params = Params(3)
    spaces = [(), ("adapter", "x"), ("salt", "x"), ("adapter", "x"), ()]
    completions = [engine.serve([Request(prompt, params, space=s)])[0] for s in spaces]
    assert [c.found for c in completions] == [0, 0, 0, 16, 16]
    assert len({tuple(c.tokens) for c in completions}) == 1


def test_by_default_there_is_a_paged_cache_that_fits_the_policy_and_the_model(model):
    engine = Engine(model)
    assert isinstance(engine.cache, PagedCache)
    assert engine.cache.blocks.num_pages * 16 == engine.loop.scheduler.policy.slots * 512
    assert [engine.generate([[1, 2]], Params(4))[0].tokens] == generate(model, [[1, 2]], 4)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda m: Engine(m, policy=Policy(token_budget=97)), ValueError, "context of 96"),
        (lambda m: Engine(m, SlotCache(TINY, 3, 50, m.dtype), Policy(4, 8)), ValueError, "3 rows"),
        (lambda m: Engine(m, PagedCache(TINY, 9)), ValueError, "dtype"),
        (lambda m: Engine(m, PagedCache(replace(TINY, K=1), 9)), ValueError, r"\(2, 1, 6"),
        (lambda m: Engine(m, "paged"), TypeError, "PagedCache"),
        (lambda m: Engine(m).generate("text"), TypeError, "lists of tokens"),
        (lambda m: Engine(m).generate(None), TypeError, "lists of tokens"),
        (lambda m: Engine(m).generate([[1]], None), TypeError, "params=None"),
        (lambda m: Engine(m).generate([[1]], [Params(2)] * 2), ValueError, "2 params for 1"),
        (lambda m: Engine(m).generate([[1]], [5]), TypeError, "params=5"),
        (lambda m: Engine(m).serve([[1, 2]]), TypeError, "Request"),
        (lambda m: Engine(m).submit([1], Params(4), space="x"), TypeError, "tuple of words"),
        (lambda m: next(Engine(m).stream([1], Params(2, samples=2))), ValueError, "samples=2"),
        (lambda m: next(Engine(m).stream([])), ValueError, "empty"),
        (lambda m: Engine(m).submit([1], Params(4, samples=17)), TooLong, "16 slots"),
        (lambda m: Engine(m).result(3), ValueError, "no request has number 3"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(make, error, says, model):
    with pytest.raises(error, match=says):
        make(model)


def test_engines_do_not_disturb_each_other_or_the_global_generator(model):
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    tiny_engine(model).generate([[1, 2]], Params(6, Sampling(temperature=1.0)))
    assert torch.equal(torch.rand(3), want)


def test_outputs_do_not_depend_on_the_clock(model, trace, answers):
    few = [replace(r, arrival_s=0.0) for r in trace[:30]]
    slow = tiny_engine(model, clock=VirtualClock(lambda work: random.Random(len(work)).random()))
    want = answers[: sum(r.params.samples for r in few)]
    assert told(slow.serve(few)) == want
    assert any(EOS[0] in tokens for tokens, _ in want) and SumIsMultiple(3)([1, 2])
