"""What befalls one request is its own affair: the others get their texts, and all room returns."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from serving_models import (
    TINY,
    alone,
    assert_all_given_back,
    expected,
    random_trace,
    tiny_engine,
    tiny_model,
    told,
)

from lecture_util.model.sampling import Sampling
from lecture_util.serving.engine import Engine
from lecture_util.serving.executor import draw
from lecture_util.serving.loop import TooLong
from lecture_util.serving.request import Completion, Params, Request
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.static_batching import static_server

SAMPLED = Sampling(temperature=1.0)
PAGES = {"tight pages": dict(pages=14), "pages": dict(pages=60), "rows": dict(rows=5)}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def others():
    return random_trace(24, seed=8, gap=0.7)


@pytest.fixture(scope="module")
def answers(model, others):
    return expected(model, others)


class Mishap(Exception):
    pass


@dataclass
class Breaks:
    """A stop that holds state, and raises at the given token."""

    at: int
    seen: list = field(default_factory=list)

    def __call__(self, new_tokens):
        self.seen.append(list(new_tokens))
        if len(new_tokens) == self.at:
            raise Mishap("the user's own code")
        return False


def good(completions, bad):
    """Completions of all but the requests numbered in `bad`, in the order of their arrival."""
    return told([c for c in completions if c.number not in bad])


def serve_with(engine, others, strange, at=5):
    """The completions of the others and of the strange ones, put into the trace at `at`."""
    when = sorted(r.arrival_s for r in others)[at]
    strange = [Request(prompt, params, when) for prompt, params in strange]
    completions = engine.serve([*strange, *others])
    count = sum(r.params.samples for r in strange)
    return completions[count:], completions[:count]


@pytest.mark.parametrize("memory", PAGES)
def test_a_stop_that_raises_fails_its_request_and_no_other(memory, model, others, answers):
    engine = tiny_engine(model, **PAGES[memory])
    prompt = [4, 4, 4]
    strange = [(prompt, Params(9, stop=Breaks(at))) for at in (1, 2, 9)]
    strange += [(prompt, Params(9, SAMPLED, stop=Breaks(2), samples=3))]
    rest, failed = serve_with(engine, others, strange)
    assert told(rest) == answers
    assert [(c.reason, str(c.error)) for c in failed] == [("failed", "the user's own code")] * 6
    (text, _), *_ = alone(model, Request(prompt, Params(9)))
    assert [c.tokens for c in failed[:3]] == [text[:1], text[:2], text[:9]]
    assert [len(c.tokens) for c in failed[3:]] == [2, 2, 2]
    assert_all_given_back(engine)


def test_a_stop_is_asked_once_for_every_token(model):
    stop = Breaks(at=99)
    engine = tiny_engine(model, pages=13)
    engine.serve([*random_trace(9, seed=2), Request([1, 2], Params(12, stop=stop))])
    (text, _), *_ = alone(model, Request([1, 2], Params(12)))
    assert stop.seen == [text[:n] for n in range(1, 13)]


def test_a_stop_whose_answer_is_no_truth_fails_its_request(model):
    params = Params(5, stop=lambda new: torch.zeros(2))
    bad, fine = tiny_engine(model).generate([[1, 2], [1, 2]], [params, Params(5)])
    assert (bad.reason, type(bad.error)) == ("failed", RuntimeError)
    assert fine.reason == "length" and len(fine.tokens) == 5


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], Params(3), "empty"),
        ("text", Params(3), "not a list of tokens"),
        ([1, 23], Params(3), "0..22"),
        ([-1], Params(3), "0..22"),
        ([1.5], Params(3), "whole numbers"),
        ([True], Params(3), "whole numbers"),
        ([None], Params(3), "whole numbers"),
        (None, Params(3), "not a list of tokens"),
        (7, Params(3), "not a list of tokens"),
        ([[1, 2]], Params(3), "whole numbers"),
        (torch.tensor([[1, 2]]), Params(3), "whole numbers"),
        (torch.tensor([]), Params(3), "empty"),
        ([1] * 40, Params(20), "make a larger cache"),
        ([1] * 90, Params(20), "context is 96"),
        ([1, 2], Params(3, samples=6), "5 slots"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_a_reason(
    prompt, params, says, model, others, answers
):
    engine = tiny_engine(model, pages=14)
    rest, refused = serve_with(engine, others[:6], [(prompt, params)])
    assert told(rest) == answers[: len(rest)]
    assert {c.reason for c in refused} == {"failed"}
    assert says in str(refused[0].error)
    assert len(refused) == params.samples
    assert_all_given_back(engine)
    before = len(engine.loop.done)
    with pytest.raises((ValueError, TypeError)):
        engine.submit(prompt, params)
    assert len(engine.loop.done) == before and not engine.loop.busy


def test_what_fits_to_the_last_page_is_served_and_one_token_more_is_not(model):
    engine = tiny_engine(model, pages=5, page_size=4)  # the last token needs no room
    (c,) = engine.generate([[1] * 11], Params(10))
    assert (c.reason, len(c.tokens)) == ("length", 10)
    with pytest.raises(TooLong, match="room for 21"):
        engine.submit([1] * 11, Params(11))
    rows = tiny_engine(tiny_model(), rows=5)
    rows.cache.memory.capacity = 20
    assert rows.generate([[1] * 11], Params(10))[0].reason == "length"
    with pytest.raises(TooLong, match="room for 21"):
        rows.submit([1] * 11, Params(11))


@pytest.mark.parametrize("memory", PAGES)
@pytest.mark.parametrize("samples", [1, 3])
def test_cancelled_at_any_moment_a_request_leaves_nothing_behind(memory, samples, model, others):
    few = others[:7]
    answers = expected(model, few)
    lengths = set()
    for moment in (0, 1, 3, 6, 10):
        engine = tiny_engine(model, **PAGES[memory])
        for request in few:
            engine.submit(request.prompt, request.params)
        number = engine.submit([*range(20)], Params(5, SAMPLED, samples=samples))
        for _ in range(moment):
            engine.step()
        engine.cancel(number)
        engine.cancel(number)
        engine.cancel(10**6)
        assert number not in engine.loop.live
        while engine.loop.busy:
            engine.step()
        mine = engine.result(number)
        assert [c.sample for c in mine] == [*range(samples)]
        assert {c.reason for c in mine} <= {"cancelled", "length"}
        lengths |= {len(c.tokens) for c in mine}
        assert told([c for n in range(7) for c in engine.result(n)]) == answers
        assert_all_given_back(engine)
    assert 0 in lengths


def states(engine, number):
    (one, *_) = engine.loop.live[number]
    if one.slot is None:
        return "preempted" if one.preemptions else "queued"
    return "mid-prefill" if one.prefilling else "decoding"


@pytest.mark.parametrize("state", ["queued", "mid-prefill", "decoding", "preempted"])
@pytest.mark.parametrize("samples", [1, 2])
def test_cancelled_in_every_state(state, samples, model):
    """The pool holds the first to its end, but only the beginning of the second's text."""
    engine = tiny_engine(model, pages=11, policy=Policy(slots=3, token_budget=6))
    first = engine.submit([1] * 10, Params(25))
    number = engine.submit([2] * 17, Params(20, SAMPLED, samples=samples))
    last = engine.submit([3, 4], Params(4))
    seen = states(engine, number)
    for _ in range(60):
        if seen == state:
            break
        engine.step()
        seen = states(engine, number)
    assert seen == state
    engine.cancel(number)
    assert {c.reason for c in engine.result(number)} == {"cancelled"}
    while engine.loop.busy:
        engine.step()
    for other, prompt, new in ((first, [1] * 10, 25), (last, [3, 4], 4)):
        assert told(engine.result(other)) == alone(model, Request(prompt, Params(new)))
    assert_all_given_back(engine)


def test_cancelled_when_half_of_its_samples_are_over(model):
    engine = tiny_engine(model, pages=30)
    other = engine.submit([5, 6], Params(9))
    params = Params(12, SAMPLED, seed=3, samples=4, stop=lambda new: new[0] % 2 and len(new) > 2)
    want = alone(model, Request([7, 8], params))
    assert {reason for _, reason in want} == {"stop", "length"}
    number = engine.submit([7, 8], params)
    for _ in range(6):
        engine.step()
    engine.cancel(number)
    for c, (tokens, reason) in zip(engine.result(number), want, strict=True):
        assert c.reason == ("stop" if reason == "stop" else "cancelled")
        assert c.tokens == (tokens if reason == "stop" else tokens[: len(c.tokens)])
    while engine.loop.busy:
        engine.step()
    assert told(engine.result(other)) == alone(model, Request([5, 6], Params(9)))
    assert_all_given_back(engine)


def test_closing_a_stream_cancels_its_request(model):
    engine = tiny_engine(model)
    other = engine.submit([5, 6], Params(9))
    stream = engine.stream([7, 8], Params(20))
    for token in stream:
        assert token == alone(model, Request([7, 8], Params(1)))[0][0][0]
        break
    stream.close()
    assert engine.result(other + 1)[0].reason == "cancelled"
    while engine.loop.busy:
        engine.step()
    assert told(engine.result(other)) == alone(model, Request([5, 6], Params(9)))
    assert_all_given_back(engine)


def test_a_stream_raises_what_its_request_failed_of(model):
    engine = tiny_engine(model)
    stream = engine.stream([7, 8], Params(20, stop=Breaks(3)))
    got = [next(stream) for _ in range(3)]
    with pytest.raises(Mishap):
        next(stream)
    assert got == alone(model, Request([7, 8], Params(3)))[0][0]
    assert_all_given_back(engine)


@pytest.mark.parametrize("target", ["itself", "an older one", "a younger one", "one in the queue"])
@pytest.mark.parametrize("static", [False, True])
def test_a_stop_may_cancel_any_request(target, static, model):
    """As where the first of several answers wins; it is called amid the loop's own bookkeeping."""
    engine = static_server(model, 3, 60) if static else tiny_engine(
        model, pages=40, policy=Policy(slots=3, token_budget=40)
    )  # fmt: skip
    numbers = {"an older one": 0, "itself": 1, "a younger one": 2, "one in the queue": 3}
    victim = numbers[target]

    def stop(new_tokens):
        if len(new_tokens) == 3:
            engine.cancel(victim)
        return victim == 1 and len(new_tokens) == 3  # to end what was just cancelled is no end

    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    for i, prompt in enumerate(prompts):
        params = Params(6, stop=stop if i == 1 else None)
        loop = getattr(engine, "loop", engine)
        assert loop.submit(Request(prompt, params)) == i
    while loop.busy:
        loop.step()
    for i, prompt in enumerate(prompts):
        (c,) = loop.done[i]
        ((tokens, _),) = alone(model, Request(prompt, Params(6)))
        if i == victim:
            assert c.reason == "cancelled" and c.tokens == tokens[: len(c.tokens)]
            assert len(c.tokens) < 6
        else:
            assert (c.tokens, c.reason) == (tokens, "length")
    assert_all_given_back(engine)


def test_one_who_comes_while_everybody_is_put_back(model):
    engine = tiny_engine(model, pages=12, policy=Policy(slots=4, token_budget=12))
    for i in range(3):
        engine.submit([i] * 9, Params(20))
    while not any(one.preemptions for one in engine.loop.scheduler.waiting):
        engine.step()
    for one in list(engine.loop.scheduler.running):
        engine.loop.scheduler.preempt(one)
    assert not engine.loop.scheduler.running
    late = engine.submit([9, 9], Params(5))
    while engine.loop.busy:
        engine.step()
    for i in range(3):
        assert told(engine.result(i)) == alone(model, Request([i] * 9, Params(20)))
    assert told(engine.result(late)) == alone(model, Request([9, 9], Params(5)))
    admitted = [engine.result(i)[0].admitted_s for i in (0, 1, 2, late)]
    assert admitted == sorted(admitted)
    assert_all_given_back(engine)


def poisoned(token=13):
    """A model for which one token's embedding is NaN: whoever says it is lost."""
    model = tiny_model()
    with torch.no_grad():
        model.embed.weight[token] = torch.nan
    return model


@pytest.mark.parametrize("memory", PAGES)
def test_nan_in_one_row_fails_it_and_harms_neither_neighbours_nor_successors(memory):
    model = poisoned()
    rng = random.Random(5)
    trace, sick, healthy = [], set(), [t for t in range(TINY.V) if t != 13]
    for i in range(60):
        prompt = [rng.choice(healthy) for _ in range(rng.randint(1, 24))]
        if i % 3 == 1:
            prompt[rng.randrange(len(prompt))] = 13
            sick.add(i)
        sampling = SAMPLED if i % 2 else Sampling()
        samples = 2 if i % 5 == 0 else 1
        params = Params(rng.randint(1, 9), sampling, eos=13, samples=samples)
        trace.append(Request(prompt, params, float(i // 3)))
    engine = tiny_engine(model, **PAGES[memory])
    completions = engine.serve(trace)
    for i, request in enumerate(trace):
        mine = engine.result(completions_number(completions, trace, i))
        if i in sick:
            assert {(c.reason, tuple(c.tokens)) for c in mine} == {("failed", ())}
            assert all("NaN" in str(c.error) for c in mine)
        else:
            assert told(mine) == alone(model, request)
    assert_all_given_back(engine)


def completions_number(completions, trace, i):
    """The number of the trace's i-th request: completions come in its order."""
    return completions[sum(r.params.samples for r in trace[:i])].number


def test_draw_fails_only_the_row_that_is_broken_and_leaves_the_logits_alone(model):
    """B28: nano-vllm divided fp32 logits in place."""
    logits_BV = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    logits_BV[1, 3] = torch.nan
    before = logits_BV.clone()
    engine = tiny_engine(model)
    samplings = [Sampling(temperature=0.5, top_k=3), Sampling(temperature=2.0), SAMPLED, Sampling()]
    for sampling in samplings:
        engine.submit([1], Params(1, sampling, seed=4))
    families = [(one,) for one in engine.loop.scheduler.waiting]
    drawn = draw(logits_BV, families)
    assert torch.equal(logits_BV.nan_to_num(7.7), before.nan_to_num(7.7))
    assert [type(d) for (d,) in drawn] == [int, ValueError, int, int]
    assert drawn[3] == [int(before[3].argmax())]


class Fails:
    """An executor that raises at the given calls, before or after it computes."""

    def __init__(self, executor, at, after):
        self.executor, self.at, self.after, self.calls = executor, set(at), after, 0

    def run(self, work):
        self.calls += 1
        if self.calls in self.at and not self.after:
            raise Mishap(f"call {self.calls}")
        drawn = self.executor.run(work)
        if self.calls in self.at:
            raise Mishap(f"call {self.calls}")
        return drawn


def finish(loop):
    failed = 0
    while loop.busy:
        try:
            loop.step()
        except Mishap:
            failed += 1
    return failed


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("memory", [*PAGES, "whole prompts", "static"])
def test_a_forward_that_raised_may_be_repeated(memory, after, model, others):
    """Greedy requests only where tokens were drawn already: a generator cannot be wound back."""
    few = [r for r in others if not after or r.params.sampling.temperature == 0][:9]
    if memory == "static":
        loop = static_server(model, 4, 60)
    elif memory == "whole prompts":
        policy = Policy(slots=4, token_budget=40, chunked=False)
        loop = tiny_engine(model, pages=14, policy=policy).loop
    else:
        loop = tiny_engine(model, **PAGES[memory]).loop
    at = [1, 2, 3, 5, 9, 10, 14, 20]
    if memory == "static" and after:
        at = []  # its KVCache has moved on by then: see the next test for what may be repeated
    loop.executor = Fails(loop.executor, at, after)
    numbers = [loop.submit(Request(r.prompt, r.params)) for r in few]
    assert finish(loop) == len(at)
    assert told([c for n in numbers for c in loop.done[n]]) == expected(model, few)
    assert_all_given_back(loop)


def test_a_request_may_be_cancelled_between_a_failed_forward_and_the_next(model):
    for static in (False, True):
        loop = static_server(model, 3, 60) if static else tiny_engine(model, pages=14).loop
        loop.executor = Fails(loop.executor, [1, 2, 4], after=False)
        prompts = [[1, 2, 3], [4], [5, 6]]
        for prompt in prompts:
            loop.submit(Request(prompt, Params(6)))
        for _ in range(2):
            with pytest.raises(Mishap):
                loop.step()
        loop.cancel(0)
        finish(loop)
        assert told(loop.done[0]) == [([], "cancelled")]
        for i in (1, 2):
            assert told(loop.done[i]) == alone(model, Request(prompts[i], Params(6)))
        assert_all_given_back(loop)


def test_all_requests_failing_is_not_the_end(model):
    engine = tiny_engine(model)
    assert {c.reason for c in engine.generate([[], [99], "x"], Params(2))} == {"failed"}
    assert engine.step() == []  # nothing is left to be told
    (c,) = engine.generate([[1, 2]], Params(2))
    assert isinstance(c, Completion) and c.reason == "length"


def test_serving_nothing(model):
    engine = tiny_engine(model)
    assert engine.generate([], Params(2)) == [] and engine.serve([]) == [] and engine.step() == []
    assert engine.stats.requests == 0


@pytest.mark.parametrize(
    "act",
    [
        lambda engine: engine.step(),
        lambda engine: list(engine.stream([1, 2], Params(2))),
        lambda engine: engine.generate([[1, 2]], Params(2)),
        lambda engine: engine.serve([]),
    ],
    ids=["step", "stream", "generate", "serve"],
)
def test_a_stop_that_moves_the_engine_on_fails_alone(act, model):
    """It would draw a neighbour's next token in the middle of this one's forward."""
    engine, neighbour = tiny_engine(model), Params(8, SAMPLED, seed=5)

    def meddles(new):
        act(engine)
        return False

    prompts, params = [[1, 2], [3, 4]], [Params(8, stop=meddles), neighbour]
    bad, good = engine.generate(prompts, params)
    assert bad.reason == "failed" and "a stop cannot move the engine on" in str(bad.error)
    assert [(good.tokens, good.reason)] == alone(model, Request([3, 4], neighbour))
    assert_all_given_back(engine)
    assert engine.generate([[1]], Params(2))[0].reason == "length"


def test_a_cache_of_another_model_or_in_use_is_refused(model):
    engine = tiny_engine(model)
    with pytest.raises(ValueError, match="another model"):
        Engine(tiny_model(seed=4), engine.cache)
    engine.submit([1, 2], Params(4))
    for _ in range(2):  # while it waits, and while it runs
        with pytest.raises(ValueError, match="in use"):
            Engine(model, engine.cache)
        engine.step()
    engine.cancel(0)
    second = Engine(model, engine.cache, Policy(3, 9))
    (c,) = second.generate([[1, 2]], Params(4))
    assert [(c.tokens, c.reason)] == alone(model, Request([1, 2], Params(4)))
    with pytest.raises(RuntimeError, match="another Engine was made on this cache"):
        engine.submit([1, 2], Params(4))


def test_after_the_weights_changed_prefixes_can_be_forgotten():
    changed, request = tiny_model(), Request(list(range(18)), Params(6))
    engine = tiny_engine(changed)
    engine.serve([request])
    running = engine.submit([*range(16)], Params(9))
    engine.step()
    changed.load_state_dict(tiny_model(seed=9).state_dict())
    engine.forget_prefixes()
    completions = engine.serve([request])
    assert told(completions) == alone(tiny_model(seed=9), request)
    assert completions[0].found == 0 and engine.result(running)[0].reason == "length"
    engine.serve([request])
    assert engine.serve([request])[0].found == 16
    tiny_engine(changed, rows=5).forget_prefixes()  # rows keep none


@pytest.mark.parametrize("how", ["generate", "serve"])
def test_the_warning_about_refused_requests_names_the_callers_line(how, model):
    engine = tiny_engine(model)
    with pytest.warns(UserWarning, match="1 of 1 answers were refused") as caught:
        engine.generate([[]]) if how == "generate" else engine.serve([Request([], Params(2))])
    assert caught[0].filename == __file__


def test_a_result_is_a_list_of_ones_own(model):
    engine = tiny_engine(model)
    engine.generate([[1]], Params(2))
    engine.result(0).clear()
    assert len(engine.result(0)) == 1


def test_a_small_context_has_a_policy_and_what_is_no_part_is_refused(model):
    small = tiny_model(replace(TINY, max_context=8))
    assert Engine(small).generate([[1, 2]], Params(3))[0].reason == "length"
    for about, says in (
        (dict(model=None), "model=None"),
        (dict(model=model, policy=5), "policy=5"),
        (dict(model=model, clock=5), "clock=5"),
    ):
        with pytest.raises(TypeError, match=says):
            Engine(**about)
