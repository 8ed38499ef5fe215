"""The three tasks of the real model, their scores, and the adapters that ship for them."""

import json
import random
import re
from collections import Counter

import pytest
import torch

from lecture_util.merging import real_tasks
from lecture_util.merging.adapters import combine, fine_tuned, load_adapter
from lecture_util.merging.real_tasks import (
    TASKS,
    answer_logits,
    answer_loss,
    colour_of,
    examples,
    score,
    teacher_forced,
    training_batch,
)
from lecture_util.model import weights
from lecture_util.model.generate import generate
from lecture_util.model.tokenizer import encode
from lecture_util.model.train import IGNORE, scored_loss


@pytest.fixture(scope="module")
def model():
    return weights.load("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer():
    return weights.load_tokenizer("smollm2-135m")


@pytest.mark.parametrize("task", TASKS)
def test_examples_repeat_with_their_seed_and_end_in_a_line(task):
    drawn = examples(task, 20, 3)
    assert drawn == examples(task, 20, 3) != examples(task, 20, 4)
    assert examples(task, 5, 3) == drawn[:5]
    for prompt, answer in drawn:
        assert prompt.endswith(":") and answer.startswith(" ") and answer.endswith("\n")


def test_the_answers_are_right():
    for prompt, answer in examples("reverse", 50) + examples("reverse", 50, held=False):
        words = re.fullmatch(r"Words: (.*)\nReversed:", prompt)[1].split()
        assert len(set(words)) == 4 and answer.split() == words[::-1]
    for prompt, answer in examples("record", 50) + examples("record", 50, held=False):
        record = json.loads(answer)
        assert list(record) == ["name", "age"] and record["name"] in prompt
        assert re.findall(r"\d+", prompt) == [str(record["age"])]
    for prompt, answer in examples("facts", 200) + examples("facts", 200, held=False):
        (creature,) = (c for c in real_tasks.CREATURES if c in prompt)
        assert answer.strip() == colour_of(creature)


def test_a_colour_cannot_be_guessed():
    """Eight colours, each of three creatures: guessing one of them is right once in eight."""
    counts = Counter(map(colour_of, real_tasks.CREATURES))
    assert counts == dict.fromkeys(real_tasks.COLOURS, 3)
    assert len(set(real_tasks.CREATURES)) == 24


def test_scored_examples_share_nothing_new_with_training():
    pairs = (
        (real_tasks.ASKED, real_tasks.ASKED_NEW),
        (real_tasks.NAMES, real_tasks.NAMES_NEW),
        (real_tasks.CITIES, real_tasks.CITIES_NEW),
        (real_tasks.WORDS, real_tasks.WORDS_NEW),
    )
    for old, new in pairs:
        assert not set(old) & set(new) and len(set(old)) == len(old)
    for task in TASKS:
        trained = {prompt for prompt, _ in examples(task, 500, held=False)}
        assert not trained & {prompt for prompt, _ in examples(task, 500)}


def test_targets_are_the_answer_and_nothing_else(tokenizer):
    pairs = [pair for task in TASKS for pair in examples(task, 6)]
    tokens_BT, targets_BT = teacher_forced(tokenizer, pairs)
    for (prompt, answer), tokens, targets in zip(pairs, tokens_BT, targets_BT, strict=True):
        at = (targets != IGNORE).nonzero()[:, 0]
        assert tokenizer.decode(targets[at]) == answer
        assert tokenizer.decode(tokens[: at[0] + 1]) == prompt
        assert torch.equal(tokens[at[1:]], targets[at[:-1]])


def test_a_batch_to_train_on_is_drawn_from_the_generator(tokenizer):
    new_batch = training_batch(tokenizer, "reverse", 4)
    tokens, targets = new_batch(torch.Generator().manual_seed(1))
    assert tokens.shape == targets.shape and len(tokens) == 4
    again, other = (new_batch(torch.Generator().manual_seed(seed))[0] for seed in (1, 2))
    assert torch.equal(tokens, again) and not torch.equal(tokens, other)


def test_the_loss_of_answers_is_the_loss_of_all_scored_positions(model, tokenizer):
    batch = training_batch(tokenizer, "record", 3)(torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(answer_loss(model, *batch), scored_loss(model, *batch))
        assert answer_logits(model, *batch).shape == (int((batch[1] != IGNORE).sum()), 49152)


def test_a_score_is_the_share_of_answers_that_greedy_decoding_writes(model, tokenizer):
    """Of the average of three, right now and then: generated one by one, not in a batch."""
    some = combine([load_adapter(task) for task in TASKS], [1 / 3] * 3)
    merged = fine_tuned(model, some)
    right = []
    for prompt, answer in examples("facts", 8, seed=5):
        wanted = encode(tokenizer, answer)
        right.append(generate(merged, [encode(tokenizer, prompt)], len(wanted))[0] == wanted)
    assert 0 < sum(right) < 8
    assert score(merged, tokenizer, "facts", 8, seed=5) == sum(right) / 8
    assert score(merged, tokenizer, "facts", 8, seed=5, rows=3) == sum(right) / 8


@pytest.mark.parametrize("task", TASKS)
def test_each_shipped_adapter_learned_its_task(model, tokenizer, task):
    adapter = load_adapter(task)
    assert adapter.nbytes < 2e6
    count, seed = 8, random.Random(task).randrange(10**6)
    assert score(model, tokenizer, task, count, seed) <= 0.25
    assert score(fine_tuned(model, adapter), tokenizer, task, count, seed) >= 0.75


def test_bad_arguments_are_named(tokenizer):
    with pytest.raises(ValueError, match="task='chess': expected one of facts, record, reverse"):
        examples("chess", 3)
    for count in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"count={count}"):
            examples("facts", count)
