"""Static batching: the same texts, in batches that wait for their longest."""

import pytest
from serving_models import (
    alone,
    assert_all_given_back,
    assert_told,
    expected,
    random_trace,
    tiny_model,
    told,
)

from lecture_util.model.generate import PromptError
from lecture_util.model.sampling import Sampling
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.loop import TooLong
from lecture_util.serving.metrics import stats
from lecture_util.serving.request import EndsAfter, Params, Request
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.simulate import simulator
from lecture_util.serving.slots import Slots
from lecture_util.serving.static_batching import StaticScheduler, static_server


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def server(model, slots=5, capacity=96, step_time=lambda work: 1.0):
    return static_server(model, slots, capacity, VirtualClock(step_time))


@pytest.mark.parametrize("slots", [4, 7])
def test_texts_are_those_of_one_at_a_time(model, slots):
    trace = random_trace(60, seed=6)
    loop = server(model, slots)
    assert_told(loop.serve(trace), expected(model, trace))
    assert_all_given_back(loop)


def test_a_batch_is_filled_once_and_kept_to_its_end(model):
    """Three rows; the texts have 1, 4 and 2 tokens, and a fourth waits for all of them."""
    loop = server(model, slots=3)
    trace = [
        Request([1] * length, Params(9, stop=EndsAfter(new)))
        for length, new in ((2, 1), (5, 4), (3, 2), (1, 2))
    ]
    completions = loop.serve(trace)
    assert [len(c.tokens) for c in completions] == [1, 4, 2, 2]
    assert [c.token_times_s for c in completions] == [(1,), (1, 2, 3, 4), (1, 2), (5, 6)]
    assert [c.finished_s for c in completions] == [1, 4, 2, 6]  # a text is handed over at its end
    assert completions[3].queue_s == 4
    rows = [[(p.number, p.start, p.count, p.kind) for p in i.parts] for i in loop.iterations]
    assert rows == [
        [(0, 0, 2, "prefill"), (1, 0, 5, "prefill"), (2, 0, 3, "prefill")],
        [(0, 2, 1, "padding"), (1, 5, 1, "decode"), (2, 3, 1, "decode")],
        [(0, 3, 1, "padding"), (1, 6, 1, "decode"), (2, 4, 1, "padding")],
        [(0, 4, 1, "padding"), (1, 7, 1, "decode"), (2, 5, 1, "padding")],
        [(3, 0, 1, "prefill")],
        [(3, 1, 1, "decode")],
    ]
    assert [p.padded for p in loop.iterations[0].parts] == [3, 0, 2]
    assert [p.slot for p in loop.iterations[0].parts] == [0, 1, 2]
    summed = stats(completions, loop.iterations)
    assert summed.padding == 5 / 14 and summed.most_running == 3


def test_samples_are_rows_like_any_other(model):
    params = Params(4, Sampling(temperature=1.0), seed=2, samples=3)
    loop = server(model, slots=4)
    request = Request([1, 2, 3], params)
    assert told(loop.serve([request])) == alone(model, request)
    assert len(loop.iterations[0].parts) == 3


def test_who_comes_late_waits_and_cancelling_ends_a_batch_early(model):
    loop = server(model, slots=2)
    numbers = [loop.submit(Request([1, 2], Params(30))) for _ in range(2)]
    late = loop.submit(Request([3], Params(2)))
    loop.step(), loop.step()
    loop.cancel(numbers[0])
    loop.step()
    assert [p.kind for p in loop.iterations[-1].parts] == ["padding", "decode"]
    loop.cancel(numbers[1])
    loop.step(), loop.step()
    assert told(loop.done[late]) == alone(model, Request([3], Params(2)))
    assert_all_given_back(loop)


def test_the_whole_row_is_lent_and_little_of_it_used(model):
    loop = server(model, slots=2, capacity=50)
    loop.serve([Request([1] * 4, Params(3)), Request([1] * 6, Params(1))])
    assert [(i.stored, i.lent) for i in loop.iterations] == [(10, 100), (12, 100), (14, 100)]


def test_on_paper_it_makes_the_same_plans(model):
    trace = random_trace(50, seed=7, most_samples=3)
    loop = server(model)
    real = loop.serve([r for r in trace if not r.params.eos])
    paper = simulator(Slots(5, 96), Policy(slots=5, token_budget=256), scheduler=StaticScheduler)
    ends = iter(real)
    copies = []
    for r in (r for r in trace if not r.params.eos):
        mine = [next(ends) for _ in range(r.params.samples)]
        if len({len(c.tokens) for c in mine}) > 1 or not mine[0].tokens:
            continue
        stop = EndsAfter(len(mine[0].tokens))
        copies.append(Request(r.prompt, Params(30, stop=stop, samples=len(mine)), r.arrival_s))
    again = server(model)
    again.serve(copies)
    paper.serve(copies)
    assert paper.iterations == again.iterations


def test_long_texts_go_on_while_short_ones_are_dragged_along_past_the_rows_end(model):
    """A row of padding may pass its capacity: nothing is stored that anybody will read."""
    loop = server(model, slots=2, capacity=20)
    trace = [Request([1] * 18, Params(2)), Request([2], Params(19))]
    assert_told(loop.serve(trace), expected(model, trace))
    assert_all_given_back(loop)


def test_what_cannot_be_served_is_refused(model):
    loop = server(model, slots=2, capacity=20)
    for prompt, params, error in (
        ([], Params(2), PromptError),
        ([1] * 90, Params(9), PromptError),
        ([1] * 19, Params(3), TooLong),
        ([1], Params(3, samples=3), TooLong),
    ):
        with pytest.raises(error):
            loop.submit(Request(prompt, params))
        assert loop.serve([Request(prompt, params)])[0].reason == "failed"
    for slots, capacity in ((0, 20), (2, 0), (True, 20), ("2", 20), (2, 20.0)):
        with pytest.raises(ValueError, match="whole number"):
            static_server(model, slots, capacity)
