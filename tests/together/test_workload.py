"""Workloads: as many tokens whoever serves them, and nothing that cannot be served."""

import math
from dataclasses import replace

import pytest
import together_models as tiny

from lecture_util.model.weights import load_tokenizer
from lecture_util.speculative.target import common_beginning
from lecture_util.together import workload as room
from lecture_util.together.workload import SERVED, Workload, assistant, editing, writing


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2-135m")


def test_questions_about_the_same_notes_share_a_beginning(tokenizer):
    work = assistant(tokenizer)
    assert len(work) == SERVED == 12 and not work.closed
    assert work.new_tokens == room.ANSWERS[:SERVED] and set(work.arrivals_s) == {0.0}
    shared = min(common_beginning(work.prompts[0], p) for p in work.prompts[1:])
    assert shared > 16 * 10  # ten pages and more
    for prompt, question in zip(work.prompts, room.QUESTIONS, strict=False):
        text = tokenizer.decode(prompt)
        assert room.SYSTEM in text and question in text and text.endswith("assistant\n")


def test_predictions_are_made_from_other_questions_than_are_served(tokenizer):
    served, others = assistant(tokenizer), assistant(tokenizer, 4, start=SERVED)
    assert not set(served.prompts) & set(others.prompts)
    assert len(room.QUESTIONS) == len(room.ANSWERS) == len(served) + len(others)
    assert len(set(room.QUESTIONS)) == len(room.QUESTIONS)


def test_start_gap_and_scale_do_what_they_say(tokenizer):
    work = assistant(tokenizer, 3, start=2, gap_s=0.5, scale=0.25)
    assert work.arrivals_s == (0.0, 0.5, 1.0)
    assert work.new_tokens == (4, 16, 6)
    assert work.prompts == assistant(tokenizer).prompts[2:5]
    assert assistant(tokenizer, 1, scale=1e-9).new_tokens == (1,)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"count": 0}, "count=0, start=0: there are 16 questions"),
        ({"count": 17}, "count=17"),
        ({"count": 4, "start": 13}, r"count=4, start=13: .*start \+ count up to 16"),
        ({"count": 1, "start": 16}, "start=16"),
        ({"count": 1, "start": -1}, "start=-1"),
        ({"count": 2.0}, r"count=2\.0"),
        ({"scale": 0}, "scale=0: expected a number above 0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"gap_s": -1.0}, r"arrival 1 is -1\.0: expected seconds from 0"),
    ],
)
def test_questions_that_there_are_not_are_refused(tokenizer, wrong, says):
    with pytest.raises(ValueError, match=says):
        assistant(tokenizer, **wrong)


def test_a_batch_job_has_nothing_in_common_and_one_person_asks_in_turn(tokenizer):
    job = writing(tokenizer, 5, 7)
    assert job.new_tokens == (7,) * 5 and set(job.arrivals_s) == {0.0} and not job.closed
    frame = common_beginning(*job.prompts[:2])  # the template's own words
    assert all(common_beginning(job.prompts[0], p) < frame + 5 for p in job.prompts[1:])
    person = editing(tokenizer, 9)
    assert person.closed and person.new_tokens == (9,) * 3
    with pytest.raises(ValueError, match=r"new_tokens 0 is 2\.5: expected a whole number"):
        editing(tokenizer, 2.5)
    with pytest.raises(ValueError, match="new_tokens 0 is 0"):
        writing(tokenizer, 2, 0)
    with pytest.raises(ValueError, match="n=21: expected 1 to 20"):
        writing(tokenizer, 21)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (((), (), ()), "0 prompts, 0 lengths, 0 arrivals: expected as many of each, and some"),
        ((((1,),), (1, 2), (0.0,)), "1 prompts, 2 lengths, 1 arrivals"),
        ((((1,), (2,)), (1, 2), (0.0,)), "2 prompts, 2 lengths, 1 arrivals"),
        ((((1,), ()), (1, 2), (0.0, 0.0)), "prompt 1 is empty"),
        ((((1,),), (0,), (0.0,)), "new_tokens 0 is 0: expected a whole number from 1"),
        ((((1,),), ("3",), (0.0,)), "new_tokens 0 is '3'"),
        ((((1,),), (True,), (0.0,)), "new_tokens 0 is True"),
        ((((1,),), (1,), (-0.5,)), r"arrival 0 is -0\.5: expected seconds from 0"),
        ((((1,),), (1,), (math.inf,)), "arrival 0 is inf"),
        ((((1,),), (1,), (math.nan,)), "arrival 0 is nan"),
        ((((1,),), (1,), ("now",)), "arrival 0 is 'now'"),
        ((((1,), (2,)), (1, 1), (1.0, 0.5)), r"arrival 1 is 0\.5: .*none before the last"),
    ],
)
def test_requests_that_cannot_be_are_refused_when_they_are_written_down(parts, says):
    with pytest.raises(ValueError, match=says):
        Workload("wrong", *parts)


def test_the_longest_request_is_a_prompt_with_its_own_answer():
    work = tiny.workload(prompts=(30, 10, 20), news=(2, 15, 14))
    assert len(work) == 3
    assert work.longest == 34


def test_the_first_few_requests_keep_their_lengths_and_times():
    work = tiny.workload(arrivals=(0, 1, 2, 3, 4), closed=True)
    two = work.first(2)
    assert two == Workload("tiny", work.prompts[:2], (7, 3), (0, 1), True)
    assert work.first(5) == work
    for count in (0, 6, 1.5, True, "2"):
        with pytest.raises(ValueError, match=f"count={count!r}: this workload has 1 to 5"):
            work.first(count)


def test_a_scheduler_learns_the_largest_budget_and_not_where_a_text_ends():
    work = tiny.workload(arrivals=(0, 0.5, 1, 2, 4))
    requests = work.requests()
    assert {r.params.max_new_tokens for r in requests} == {9}
    assert tuple(r.prompt for r in requests) == work.prompts
    assert tuple(r.arrival_s for r in requests) == work.arrivals_s
    for request, count in zip(requests, work.new_tokens, strict=True):
        assert not request.params.stop([1] * (count - 1))
        assert request.params.stop([1] * count)


def test_whoever_asks_in_turn_waits_for_no_time_of_arrival():
    work = tiny.workload(arrivals=(0, 0.5, 1, 2, 4))
    assert {r.arrival_s for r in replace(work, closed=True).requests()} == {0.0}
