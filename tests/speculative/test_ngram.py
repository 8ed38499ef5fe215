"""Guesses looked up in the text, against transformers' prompt lookup and the faults of others."""

import pytest
import torch
from every_outcome import toy, toy_logits
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.model.sampling import GREEDY
from lecture_util.speculative.ngram import NgramDrafter, lookup
from lecture_util.speculative.speculate import speculate
from lecture_util.speculative.target import Table
from lecture_util.speculative.verify import Chance

texts = st.lists(st.integers(0, 4), min_size=1, max_size=25)


def guesses(tokens, room=100, **options):
    return list(NgramDrafter(**({"shortest": 1} | options)).propose(tokens, room, Chance()).tokens)


@settings(max_examples=60)
@given(texts, st.integers(1, 4), st.integers(1, 6))
def test_leftmost_lookup_is_transformers(tokens, longest, k):
    """With the end token 4, which cuts the guesses off in both (transformers#31301)."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    theirs, _ = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([4]),
        num_output_tokens=k,
        max_matching_ngram_size=longest,
        max_length=1000,
    ).get_candidates(torch.tensor([tokens]))
    ours = guesses(tokens, longest=longest, k=k, latest=False, banned=4)
    assert ours == theirs[0, len(tokens) :].tolist()


@given(texts, st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
def test_the_latest_of_the_longest_is_found(tokens, a, b, k):
    """Against a search over every earlier place and every length."""
    shortest, longest = sorted((a, b))
    found = [
        (n, start)
        for n in range(shortest, longest + 1)
        for start in range(len(tokens) - n)
        if tokens[start : start + n] == tokens[len(tokens) - n :]
    ]
    n, start = max(found, default=(0, 0))
    expected = tokens[start + n : start + n + k] if found else []
    assert lookup(tokens, longest, k, shortest=shortest) == expected


def test_guesses_need_not_fill_the_draft():
    """The original wanted k full tokens and found nothing here; transformers has 3, 1, 2."""
    assert lookup([1, 2, 3, 1, 2], longest=2, k=10) == [3, 1, 2]


def test_of_several_places_the_latest_counts_unless_asked_otherwise():
    """vllm#22437: which one is a choice, so it is pinned here."""
    tokens = [1, 2, 9, 1, 2, 8, 1, 2]
    assert lookup(tokens, k=1) == [8]
    assert lookup(tokens, k=1, latest=False) == [9]


def test_a_longer_match_is_better_than_a_later_one():
    assert lookup([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], longest=3, k=1) == [7]
    assert lookup([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], longest=1, k=1) == [8]
    assert lookup([5, 1, 9, 1], longest=3, shortest=2, k=1) == []


def test_a_match_may_run_into_the_end_itself():
    assert lookup([5, 5, 5, 5], longest=2, k=8) == [5]
    assert lookup([1, 2, 1, 2, 1], longest=3, k=8) == [2, 1]


@pytest.mark.parametrize("tokens", [[], [3], [1, 2, 3]])
def test_nothing_is_found_where_nothing_repeats(tokens):
    assert lookup(tokens) == []
    assert guesses(tokens) == []


def test_a_token_of_number_zero_is_a_token():
    """feifeibear's sampler took it for a failure."""
    assert lookup([0, 0, 7, 0, 0], longest=2, k=2) == [7, 0]


def test_guesses_end_before_an_end_token():
    """transformers#31301: what follows the end of an earlier turn is no guess."""
    tokens = [51, 0, 7, 8, 51]
    assert guesses(tokens, longest=1, banned=0) == []
    assert guesses(tokens, longest=1, banned=[0, 7]) == []
    assert guesses(tokens, longest=1, banned=7) == [0]
    assert guesses(tokens, longest=1) == [0, 7, 8, 51]


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_a_budget_bounds_the_guesses(room):
    """vllm#42533: four were proposed where one still fitted."""
    assert len(guesses([1, 2, 3, 4, 5, 1], room=room, k=4)) == room


@pytest.mark.parametrize("n", range(6))
def test_a_budget_bounds_the_text_when_all_is_accepted(n):
    """transformers#46993: three guesses accepted, and a budget of two exceeded."""
    target = Table(lambda tokens: torch.eye(4)[(tokens[-1] + 1) % 4])  # 0 1 2 3 0 1 2 ...
    drafter = NgramDrafter(shortest=1, k=3)
    rounds = list(speculate(target, drafter, [0, 1, 2, 3, 0], n, sampling=GREEDY))
    text = [token for r in rounds for token in r.tokens]
    assert text == [1, 2, 3, 0, 1, 2][:n]
    assert all(len(r.accepted) == len(r.draft) for r in rounds)
    assert len(rounds) == -(-n // 4)


def test_guesses_are_chosen_not_drawn():
    draft = NgramDrafter(shortest=1, k=2).propose([1, 2, 3, 1], 5, Chance())
    assert draft.is_chain
    assert list(draft.q) == [None, None]


def test_the_text_that_is_handed_in_is_not_changed():
    tokens = [1, 2, 3, 1]
    guesses(tokens)
    assert tokens == [1, 2, 3, 1]
    assert guesses((1, 2, 3, 1)) == [2, 3, 1]


def test_greedy_output_does_not_depend_on_the_guesses():
    for seed in range(3):
        logits_of, output = toy_logits(4, seed), []
        while len(output) < 12:
            output.append(int(logits_of([0, 1, *output]).argmax()))
        rounds = list(speculate(toy(4, seed), NgramDrafter(shortest=1, longest=2, k=3), [0, 1], 12))
        assert [token for r in rounds for token in r.tokens] == output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 0}, "longest=0, shortest=1: expected whole numbers from 1 up"),
        ({"longest": 2, "shortest": 3}, "longest=2, shortest=3: .* no longer than the longest"),
        ({"shortest": 0}, "longest=3, shortest=0"),
        ({"longest": 2.0}, "longest=2.0"),
        ({"k": 0}, "k=0: expected a whole number of guesses, at least 1"),
        ({"k": 1.5}, "k=1.5"),
        ({"k": -2}, "k=-2"),
    ],
)
def test_impossible_lookups_are_refused(options, message):
    options = {"longest": 3, "shortest": 1} | options
    with pytest.raises(ValueError, match=message):
        NgramDrafter(**options)
    with pytest.raises(ValueError, match=message):
        lookup([1, 2, 1], **options)


def test_words_are_no_tokens():
    with pytest.raises(TypeError, match="eos='end': expected tokens"):
        NgramDrafter(banned="end")
