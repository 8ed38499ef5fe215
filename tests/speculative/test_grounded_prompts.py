"""Grounded prompts: what they hold, and that the model's answers do repeat them."""

import pytest

from lecture_util.model import weights
from lecture_util.model.generate import generate
from lecture_util.model.tokenizer import chat
from lecture_util.speculative.prompts import (
    LIGHTHOUSE,
    grounded_prompts,
    held_prompts,
    training_prompts,
)

TASKS = ("copy", "rewrite", "extract", "code edit", "summarize")
NEW, N = 32, 3


def repeated(prompt, answer):
    """Share of the answer's runs of three tokens that stand in the prompt."""
    runs = [[tuple(part[i : i + N]) for i in range(len(part) - N + 1)] for part in (prompt, answer)]
    return sum(run in runs[0] for run in runs[1]) / len(runs[1])


@pytest.fixture(scope="module")
def shares():
    """Task -> what its greedy answers repeat; "held" are ordinary questions."""
    model, tokenizer = weights.load(device="cpu"), weights.load_tokenizer()
    asked = [*grounded_prompts(), *(("held", prompt) for prompt in held_prompts(4))]
    prompts = [chat(tokenizer, prompt) for _, prompt in asked]
    answers = generate(model, prompts, NEW, eos=tokenizer.eos_token_id)
    found = {}
    for (task, _), prompt, answer in zip(asked, prompts, answers, strict=True):
        found.setdefault(task, []).append(repeated(prompt, answer))
    return found


def test_every_task_has_two_prompts_and_every_prompt_hands_over_a_text():
    tasks = [task for task, _ in grounded_prompts()]
    assert tasks == [task for task in TASKS for _ in range(2)]
    for _, prompt in grounded_prompts():
        request, _, text = prompt.partition("\n\n")
        assert 20 < len(request) < 70 and len(text) > 150
    assert any(prompt.endswith(LIGHTHOUSE) for _, prompt in grounded_prompts())


def test_no_prompt_comes_twice_or_was_trained_on():
    grounded = [prompt for _, prompt in grounded_prompts()]
    assert len({*grounded, *held_prompts()}) == len(grounded) + len(held_prompts())
    assert not set(grounded) & set(training_prompts(1_800))


def test_copies_and_rewrites_repeat_most_of_what_they_were_given(shares):
    assert min(shares["copy"] + shares["rewrite"]) > 0.4


@pytest.mark.parametrize("task", TASKS)
def test_answers_of_every_task_repeat_more_than_those_to_questions(shares, task):
    assert sum(shares[task]) / 2 > 0.2 + max(shares["held"])
