"""Numbers of a run, each computed by hand."""

import numpy as np
import pytest

from lecture_util.serving.loop import Iteration, Part
from lecture_util.serving.metrics import Percentiles, stats
from lecture_util.serving.request import Completion


def completion(number, arrival, admitted, times, *, prompt=4, reason="length", **about):
    return Completion(
        number, about.pop("sample", 0), [1] * prompt, [7] * len(times), reason,
        arrival_s=arrival, admitted_s=admitted, token_times_s=tuple(times),
        finished_s=about.pop("finished", times[-1] if times else arrival), **about,
    )  # fmt: skip


def by_hand(values, p):
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = p / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_by_hand(count):
    values = np.random.default_rng(count).exponential(size=count).tolist()
    got = Percentiles.of([None, *values, None])
    assert got.count == count
    for p, value in ((50, got.p50), (90, got.p90), (99, got.p99)):
        assert value == pytest.approx(by_hand(values, p), rel=1e-12)
    assert Percentiles.of(v for v in values) == got  # a generator will do


def test_percentiles_of_nothing():
    assert Percentiles.of([]) == Percentiles.of([None]) == Percentiles(None, None, None, 0)


def test_what_the_times_of_one_answer_mean():
    c = completion(0, 1.0, 2.5, [4.0, 4.5, 7.0], finished=7.5)
    assert c.queue_s == 1.5  # from arrival to admission
    assert c.ttft_s == 3.0  # from arrival, the queue included
    assert c.tpot_s == 1.5  # the mean of the gaps after the first token: 0.5 and 2.5
    assert c.latency_s == 6.5
    one = completion(0, 1.0, 2.5, [4.0])
    assert (one.ttft_s, one.tpot_s) == (3.0, None)
    none = completion(0, 1.0, None, [])
    assert (none.queue_s, none.ttft_s, none.tpot_s, none.latency_s) == (None, None, None, 0.0)


def test_a_run_summed_up_by_hand():
    completions = [
        completion(0, 1.0, 1.0, [2.0, 4.0], prompt=6),
        completion(1, 1.5, 2.0, [4.0, 5.0, 8.0], prompt=2, found=1, preemptions=1),
        completion(1, 1.5, 2.0, [4.0], prompt=2, sample=1),
        completion(2, 3.0, None, [], prompt=0, reason="failed", finished=9.0),
    ]
    part = Part(0, 0, 0, 0, 6, "prefill")
    iterations = [
        Iteration(1.0, 1.0, (part,), 0, 1, 6, 8, 0),
        Iteration(2.0, 2.0, (part, part, Part(2, 1, 0, 0, 1, "padding")), 3, 2, 9, 16, 1),
        Iteration(6.0, 1.0, (part, part), 0, 2, 12, 16, 2),
    ]
    got = stats(completions, iterations)
    assert (got.requests, got.new_tokens, got.iterations) == (3, 6, 3)
    assert got.seconds == 9.0 - 1.0
    assert got.tokens_per_s == 6 / 8
    assert (got.ttft.p50, got.ttft.count) == (2.5, 3)  # of 1, 2.5 and 2.5
    assert (got.tpot.p50, got.tpot.count) == (2.0, 2)
    assert (got.queue.p90, got.queue.count) == (0.5, 3)
    assert got.latency.count == 3  # a refused request has none
    # One row for 1 s, two (and a padded one) for 2 s, two for 1 s, of three for 4 s.
    assert got.slot_use == (1 + 4 + 2) / (3 * 4)
    assert stats(completions, iterations, slots=7).slot_use == 7 / (7 * 4)
    assert got.padding == 1 / 6
    assert got.memory_use == (6 + 18 + 12) / (8 + 32 + 16)
    assert got.waste == 1 - got.memory_use
    assert got.preemptions == 3 and got.most_running == 2
    assert got.found_share == 1 / 10


def test_a_run_of_nothing_has_numbers_too():
    got = stats([], [])
    assert (got.requests, got.new_tokens, got.seconds, got.tokens_per_s) == (0, 0, 0, 0)
    assert got.ttft == Percentiles(None, None, None, 0)
    assert (got.slot_use, got.padding, got.memory_use, got.most_running) == (0, 0, 0, 0)
    assert got.waste == 0
