"""The loop's clocks, records and ends, mostly without a model."""

import math

import numpy as np
import pytest
import torch
from serving_models import assert_all_given_back, tiny_engine, tiny_model

from lecture_util.model.sampling import Sampling
from lecture_util.serving.blocks import Blocks
from lecture_util.serving.clock import VirtualClock, WallClock
from lecture_util.serving.executor import ModelExecutor
from lecture_util.serving.loop import Loop, TooLong
from lecture_util.serving.paging import PagedCache, Pages
from lecture_util.serving.request import EndsAfter, Params, Request, Running
from lecture_util.serving.scheduler import Policy, Scheduler, Work
from lecture_util.serving.simulate import Pretend, simulator
from lecture_util.serving.slots import Slots


def paper(slots=2, budget=8, rows=None, **policy):
    return simulator(Slots(rows or slots, 1000), Policy(slots, budget, **policy))


def request(tokens, new, at=0.0, **about):
    return Request(range(tokens), Params(new, **about), at)


def test_a_virtual_clock_counts_forwards():
    loop = paper()
    one, two = loop.serve([request(3, 2), request(12, 2, 0.5)])
    # 0 to 1: the prompt of 3. 1 to 2: 1 and 7 of 12. 2 to 3: the other 5. 3 to 4: one.
    assert (one.admitted_s, one.token_times_s, one.finished_s) == (0.0, (1.0, 2.0), 2.0)
    assert (two.arrival_s, two.admitted_s, two.token_times_s) == (0.5, 1.0, (3.0, 4.0))
    assert (two.queue_s, two.ttft_s, two.tpot_s, two.latency_s) == (0.5, 2.5, 1.0, 3.5)


def test_idle_time_passes_at_once_on_a_virtual_clock():
    (c,) = paper().serve([request(3, 1, 1000.25)])
    assert (c.arrival_s, c.admitted_s, c.finished_s) == (1000.25, 1000.25, 1001.25)


@pytest.mark.parametrize("start_s", [0.0, 0.1, 1000.1, 1e15])
def test_serving_ends_however_late_it_is(start_s):
    """The sum of a late hour and a short wait may round to the hour: no clock may stand still."""
    clock = VirtualClock(lambda work: 0.3)
    loop = Loop(Scheduler(Slots(2, 100), Policy(2, 8)), Pretend(), clock)
    clock.time, waits, wait = start_s, [], clock.wait

    def counted(seconds):
        waits.append(seconds)
        assert len(waits) < 1000
        wait(seconds)

    clock.wait = counted
    for i in range(40):
        (c,) = loop.serve([request(2, 2, 0.3 + i / 100)])
        assert c.queue_s >= 0


def test_a_wall_clock_tells_the_time_and_takes_no_negative_wait():
    """Between the look at the clock and the wait, the moment may have passed."""
    clock = WallClock()
    before = clock.now()
    clock.wait(-1.0)
    clock.wait(0.002)
    clock.computed([])
    assert clock.now() - before >= 0.002


def test_times_on_a_wall_clock_are_in_order_and_begin_at_zero():
    loop = Loop(Scheduler(Slots(2, 100), Policy(2, 8)), Pretend(), WallClock())
    for c in loop.serve([request(3, 3, 0.01 * i) for i in range(5)]):
        assert 0 <= c.arrival_s <= c.admitted_s <= c.token_times_s[0] <= c.finished_s < 60
        assert list(c.token_times_s) == sorted(c.token_times_s)
    assert all(i.seconds >= 0 for i in loop.iterations)


def test_completions_come_in_the_traces_order_not_in_that_of_arrivals():
    loop = paper()
    trace = [request(3, 2, 9.0), request(4, 1, 0.0), request(5, 1, 4.0, samples=2)]
    completions = loop.serve(trace)
    assert [len(c.prompt) for c in completions] == [3, 4, 5, 5]
    assert [c.sample for c in completions] == [0, 0, 0, 1]
    assert [c.number for c in completions] == [2, 0, 1, 1]


def test_those_who_come_at_once_are_served_in_the_traces_order():
    completions = paper(slots=1).serve([request(2, 1, 1.0) for _ in range(6)])
    admitted = [c.admitted_s for c in completions]
    assert admitted == sorted(admitted)


def test_arrivals_are_counted_from_the_call():
    loop = paper()
    loop.serve([request(2, 5, 3.0)])
    now = loop.now()
    (c,) = loop.serve([request(2, 1, 2.0)])
    assert now == 8.0 and c.arrival_s == 10.0


def test_an_iteration_records_its_parts_and_the_memory():
    loop = paper(slots=2, budget=6)
    loop.serve([request(3, 3), request(5, 2), request(2, 1)])
    parts = [
        [(p.slot, p.number, p.start, p.count, p.kind) for p in i.parts] for i in loop.iterations
    ]
    assert parts == [
        [(0, 0, 0, 3, "prefill"), (1, 1, 0, 3, "prefill")],
        [(0, 0, 3, 1, "decode"), (1, 1, 3, 2, "prefill")],
        [(0, 0, 4, 1, "decode"), (1, 1, 5, 1, "decode")],
        [(0, 2, 0, 2, "prefill")],
    ]
    assert [(i.waiting, i.running, i.stored, i.lent) for i in loop.iterations] == [
        (1, 2, 6, 2000), (1, 2, 9, 2000), (1, 2, 11, 2000), (0, 1, 2, 1000),
    ]  # fmt: skip
    assert [i.start_s for i in loop.iterations] == [0, 1, 2, 3]
    assert {i.preempted for i in loop.iterations} == {0}


def test_preemptions_are_recorded_where_they_happen():
    loop = simulator(Pages(Blocks(4, 4)), Policy(2, 16))
    a, b = loop.serve([Request(range(7), Params(9)), Request(range(50, 57), Params(9))])
    assert (a.preemptions, b.preemptions) == (0, 1)
    assert [i.preempted for i in loop.iterations][:4] == [0, 0, 1, 0]
    assert b.token_times_s[1] < a.finished_s < b.token_times_s[2]
    again = [p for i in loop.iterations for p in i.parts if p.number == 1 and p.start == 0]
    assert len(again) == 2 - (b.found > 0)


def test_what_the_prefix_cache_found_is_told():
    loop = simulator(Pages(Blocks(40, 4)), Policy(2, 64))
    first, second = loop.serve([request(17, 1), request(17, 1, 5.0)])
    assert (first.found, second.found) == (0, 16)
    assert [p.count for i in loop.iterations for p in i.parts] == [17, 1]


def test_forgetting_keeps_what_is_on_its_way():
    loop = paper()
    loop.submit(request(2, 1))
    late = loop.submit(request(2, 9))
    loop.step(), loop.step()
    loop.forget()
    assert set(loop.done) == {late} and loop.iterations == []
    while loop.busy:
        loop.step()
    assert len(loop.done[late][0].tokens) == 9


def test_a_refused_request_takes_no_room_and_keeps_its_user():
    loop = paper()
    (c,) = loop.serve([Request([], Params(2), 3.0, user="ann")])
    assert (c.reason, c.user, c.arrival_s, c.finished_s) == ("failed", "ann", 3.0, 3.0)
    assert c.ttft_s is None and c.queue_s is None and c.tpot_s is None and c.latency_s == 0
    with pytest.raises(TooLong, match="room for 1001"):
        loop.submit(request(1000, 2))
    with pytest.raises(TooLong, match="2 slots"):
        loop.submit(request(1, 2, samples=3))
    assert_all_given_back(loop)


def test_a_plan_of_nothing_is_called_a_bug_and_does_not_spin():
    loop = paper()
    loop.submit(request(2, 2))
    loop.scheduler.plan = list
    with pytest.raises(RuntimeError, match="this is a bug"):
        loop.step()


def test_work_that_draws_nothing_keeps_drawn_tokens_with_their_rows():
    """B27: rows were written by the loop's index and read by the request's."""
    model = tiny_model()
    prompts = [[1, 2, 3, 4, 5], [6, 7], [8], [9, 10, 11], [12, 13]]
    counts = [3, 2, 1, 2, 2]  # the first and the fourth are chunks that draw nothing
    cache = PagedCache(model.config, 20, 4, model.dtype)
    work, sequences = [], []
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        request = Request(prompt, Params(1, Sampling(temperature=1.0) if i == 4 else Sampling()))
        sequences.append(Running(i, request, i, 0, prompt, 0.0))
        cache.memory.begin(sequences[i])
        cache.memory.grow(sequences[i], count)
        work.append(Work(sequences[i], 0, count))
    sequences[1].followers = [Running(9, sequences[1].request, 1, 1, [6, 7], 0.0)]
    drawn = ModelExecutor(model, cache).run(work)
    best = [int(model(torch.tensor([prompt]))[0, -1].argmax()) for prompt in prompts]
    assert drawn[:4] == [[], [best[1], best[1]], [best[2]], []]
    assert len(drawn[4]) == 1
    assert best[1] != best[2]


def test_one_token_prompts_beside_decoding_and_chunks():
    """Rows of one token are computed first, whoever they belong to; answers find their way."""
    model = tiny_model()
    engine = tiny_engine(model, policy=Policy(slots=5, token_budget=5))
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8], [9], [10, 11], [1]]
    for c in engine.generate(prompts, Params(4)):
        (want,) = [tiny_engine(model).generate([c.prompt], Params(4))[0].tokens]
        assert c.tokens == want


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Params(max_new_tokens=-1), ValueError),
        (lambda: Params(max_new_tokens=True), TypeError),
        (lambda: Params(max_new_tokens=2.0), TypeError),
        (lambda: Params(max_new_tokens="9"), TypeError),
        (lambda: Params(max_new_tokens=None), TypeError),
        (lambda: Params(max_new_tokens=np.int64(3)), TypeError),
        (lambda: Params(samples=0), ValueError),
        (lambda: Params(samples=1.0), TypeError),
        (lambda: Params(seed=-1), ValueError),
        (lambda: Params(seed=2**63), ValueError),
        (lambda: Params(seed=2**63 - 2, samples=3), ValueError),
        (lambda: Params(seed=True), ValueError),
        (lambda: Params(seed=None), ValueError),
        (lambda: Params(sampling=0.7), TypeError),
        (lambda: Params(stop="\n"), TypeError),
        (lambda: Params(eos="</s>"), TypeError),
        (lambda: Params(eos=2.0), TypeError),
        (lambda: Params(eos=[1.0]), TypeError),
        (lambda: Params(eos=True), TypeError),
        (lambda: EndsAfter(0), ValueError),
        (lambda: EndsAfter("3"), ValueError),
        (lambda: EndsAfter(True), ValueError),
        (lambda: Request([1], {"max_new_tokens": 3}), TypeError),
        (lambda: Request([1], arrival_s="now"), TypeError),
        (lambda: Request([1], arrival_s=True), TypeError),
        (lambda: Request([1], arrival_s=None), TypeError),
        (lambda: Request([1], arrival_s=-0.1), ValueError),
        (lambda: Request([1], arrival_s=math.nan), ValueError),
        (lambda: Request([1], arrival_s=math.inf), ValueError),
        (lambda: Request([1], user=None), TypeError),
        (lambda: Request([1], user=["ann"]), TypeError),
        (lambda: Request([1], space="salt"), TypeError),
        (lambda: Request([1], space=("salt", 3)), TypeError),
        (lambda: Request([1], space=["salt"]), TypeError),
    ],
)
def test_what_cannot_be_asked_for_is_refused_when_it_is_written_down(make, error):
    with pytest.raises(error, match=r"=.*: expected"):
        make()


def test_end_tokens_may_be_one_none_a_list_or_numbers_of_numpy():
    for eos in (2, [2], (2,), {2}, np.int64(2), torch.tensor(2), torch.tensor([2]), range(2, 3)):
        assert Params(eos=eos).eos == frozenset({2})
    assert Params(eos=None).eos == Params(eos=[]).eos == frozenset()


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -1.0, None, "1"], ids=["nan", "inf", "negative", "None", "text"]
)
def test_a_formula_that_gives_no_seconds_is_refused_and_time_stands_still(bad):
    clock = VirtualClock(lambda work: bad)
    with pytest.raises(ValueError, match="step_time gave"):
        clock.computed([])
    assert clock.now() == 0.0
    with pytest.raises(TypeError, match="step_time=3"):
        VirtualClock(3)
    with pytest.raises(TypeError, match="clock=5"):
        Loop(Scheduler(Slots(1, 9), Policy(1)), Pretend(), 5)


def test_a_stop_that_changes_its_list_changes_nothing():
    def meddles(new):
        new += [0] * 9
        return False

    (c,) = paper().serve([request(3, 4, stop=meddles)])
    assert (c.num_tokens, c.reason) == (4, "length")


def test_stats_that_a_stop_resets_cost_no_answers():
    loop = paper()

    def resets(new):
        loop.forget()
        return False

    found = loop.serve([request(3, 1), request(3, 5, stop=resets), request(2, 1, 20.0)])
    assert [c.num_tokens for c in found] == [1, 5, 1]


def test_seconds_of_any_kind_of_number_are_a_float():
    arrival_s = request(3, 1, np.float32(1.5)).arrival_s
    assert type(arrival_s) is float and arrival_s == 1.5


def test_a_step_that_fails_after_drawing_draws_the_same_again():
    """Whether the executor raises after its draws or the clock's formula does."""
    model, broken = tiny_model(), []

    def engine_of(step_time):
        return tiny_engine(model, clock=VirtualClock(step_time))

    def fails_often(work):
        broken.append(len(broken) % 3 != 2)
        return math.nan if broken[-1] else 1.0

    params = [Params(6, Sampling(1.0), seed=i, samples=2) for i in range(2)]
    want = engine_of(lambda work: 1.0).generate([[1, 2], [3]], params)
    engine = engine_of(fails_often)
    numbers = [engine.submit(p, q) for p, q in zip([[1, 2], [3]], params, strict=True)]
    while engine.loop.busy:
        try:
            engine.step()
        except ValueError:
            continue
    assert any(broken)
    got = [c.tokens for n in numbers for c in engine.result(n)]
    assert got == [c.tokens for c in want]
