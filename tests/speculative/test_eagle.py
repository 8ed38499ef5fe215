"""EAGLE: its tree against a naive recomputation, and a cache that holds true features only."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    ATOL,
    PROMPT,
    SMALL,
    fresh_features,
    small_eagle,
    small_model,
    whole_vocabulary,
)
from test_medusa import counting_model

from lecture_util.model.attention import rope_frequencies, rope_table
from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.kv_cache import KVCache, NoCache
from lecture_util.speculative.draft import NOTHING, ROOT
from lecture_util.speculative.eagle import EagleDrafter, EagleHead
from lecture_util.speculative.speculate import Tally, generate_speculative, speculate
from lecture_util.speculative.target import Reader, TreeCache
from lecture_util.speculative.verify import Chance
from lecture_util.speculative.vocabulary import DraftVocabulary

MODEL = small_model()
HEAD = small_eagle(MODEL)
ALL = whole_vocabulary(MODEL)
FOUR = DraftVocabulary(MODEL.head, torch.tensor([2, 5, 7, 20]))


def new_drafter(vocabulary=ALL, **shape):
    reader = Reader(MODEL, 48)
    return EagleDrafter(reader, HEAD, vocabulary, **shape), reader


def propose(tokens, vocabulary=ALL, room=9, **shape):
    drafter, reader = new_drafter(vocabulary, **shape)
    reader(tokens[:-1])
    return drafter.propose(tokens, room, Chance())


@torch.inference_mode()
def prediction(tokens, guesses):
    """The feature that the head expects for the last guess, all over again and without a cache.

    True features of tokens[:-1], each with the token after it; then, one by one, the head's own
    predictions, each with the guess that it led to.
    """
    x_TD = fresh_features(MODEL, tokens[:-1])
    read = list(tokens[1:])
    for guess in [*guesses, None]:
        out_TD = HEAD(x_TD[None], MODEL.embed(torch.tensor([read])))[0]
        if guess is None:
            return out_TD[-1]
        x_TD = torch.cat((x_TD, out_TD[-1:]))
        read.append(guess)


def naive_tree(tokens, vocabulary, depth, width, size):
    """{path of tokens: log of the product} of the likeliest nodes, level by level."""
    found, beam = {}, [()]
    for _ in range(depth):
        level = {}
        for path in beam:
            start = found.get(path, 0.0)
            guesses, logs = vocabulary.top(prediction(tokens, path), width)
            for guess, log in zip(guesses.tolist(), logs.tolist(), strict=True):
                level[*path, guess] = start + log
        found |= level
        beam = sorted(level, key=level.get, reverse=True)[:width]
    return dict(sorted(found.items(), key=lambda item: -item[1])[:size])


def paths_of(draft):
    return [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))]


# The head


def test_the_head_is_one_block_over_feature_and_token():
    torch.manual_seed(0)
    x_BTD, e_BTD = torch.randn(2, 2, 5, SMALL.D, dtype=torch.float64)
    joined = torch.cat((x_BTD, e_BTD), -1) @ HEAD.join.weight.T + HEAD.join.bias
    rope = rope_table(rope_frequencies(SMALL), torch.arange(5)[None])
    wanted = HEAD.block(joined, rope, NoCache())
    torch.testing.assert_close(HEAD(x_BTD, e_BTD), wanted)
    assert HEAD.config.L == 1 and HEAD.config.D == SMALL.D


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_cached_head_equals_one_pass(cut):
    torch.manual_seed(0)
    x_1TD, e_1TD = torch.randn(2, 1, 6, SMALL.D, dtype=torch.float64)
    cache = KVCache(HEAD.config, 1, 8, torch.float64)
    with torch.inference_mode():
        parts = [
            HEAD(x_1TD[:, part], e_1TD[:, part], cache) for part in (slice(cut), slice(cut, 6))
        ]
    assert cache.lengths == [6]
    torch.testing.assert_close(torch.cat(parts, 1), HEAD(x_1TD, e_1TD), atol=ATOL, rtol=ATOL)


# The tree


@pytest.mark.parametrize(
    ("depth", "width", "size"),
    [(1, 1, 1), (1, 4, 4), (3, 1, 3), (2, 2, 3), (3, 2, 4), (3, 3, 9), (4, 3, 30), (5, 2, 11)],
)
def test_the_tree_equals_a_naive_recomputation(depth, width, size):
    tokens = [*PROMPT, 9]
    draft = propose(tokens, depth=depth, width=width, size=size)
    wanted = naive_tree(tokens, ALL, depth, width, size)
    assert len(draft) == len(wanted) == min(size, width + (depth - 1) * width**2)
    assert set(paths_of(draft)) == set(wanted)
    assert not any(draft.q)  # chosen, not drawn: the probabilities only rank them


@given(st.lists(st.integers(0, SMALL.V - 1), min_size=2, max_size=9))
@settings(max_examples=8)
def test_the_tree_equals_a_naive_recomputation_after_any_text(tokens):
    draft = propose(tokens, depth=3, width=2, size=5)
    assert set(paths_of(draft)) == set(naive_tree(tokens, ALL, 3, 2, 5))


@pytest.mark.parametrize("newest", [0, 9, 14])
def test_no_other_nodes_are_likelier(newest):
    """Against all 4 + 16 + 64 nodes of a vocabulary of four: a beam as wide misses none."""
    tokens, values, level = [*PROMPT, newest], {}, {(): 0.0}
    for _ in range(3):
        logs = {path: FOUR(prediction(tokens, path)).float().log_softmax(-1) for path in level}
        level = {
            (*path, guess): value + float(logs[path][FOUR.place_V[guess]])
            for path, value in level.items()
            for guess in FOUR.ids_U.tolist()
        }
        values |= level
    assert len(values) == 84
    ordered = sorted(values, key=values.get, reverse=True)
    for size in (1, 2, 3, 4):
        draft = propose(tokens, FOUR, depth=3, width=4, size=size)
        assert set(paths_of(draft)) == set(ordered[:size])


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.integers(1, 5), st.integers(0, 22)
)
@settings(max_examples=25)
def test_a_tree_has_every_nodes_beginning_and_no_more_than_was_asked_for(
    depth, width, size, room, newest
):
    draft = propose([*PROMPT, newest], FOUR, room=room, depth=depth, width=width, size=size)
    paths = paths_of(draft)
    assert len(set(paths)) == len(paths) <= size
    assert max(draft.depths) <= min(depth, room)
    assert all(len(path) == 1 or path[:-1] in paths for path in paths)
    assert all(parent == ROOT or parent < node for node, parent in enumerate(draft.parents))


def test_siblings_are_tried_from_the_likeliest_down():
    tokens = [*PROMPT, 9]
    draft = propose(tokens, depth=1, width=5, size=5)
    logs_V = ALL(prediction(tokens, ())).float().log_softmax(-1)
    assert draft.tokens == logs_V.argsort(descending=True)[:5].tolist()


def test_equal_nodes_keep_parents_before_children():
    """A head that is certain: every product is 1, so nothing but the order decides."""
    model = counting_model()
    drafter, reader = counting_drafter(model, depth=4, width=2, size=8, sure=1e4)
    reader([0, 1])
    draft = drafter.propose([0, 1, 2], 9, Chance())
    assert draft.path(max(range(len(draft)), key=lambda i: draft.depths[i]))[0] == 0


# What it keeps


def true_cache(tokens):
    """What the head's cache holds after true features only."""
    cache = TreeCache(HEAD.config, 1, 48, torch.float64)
    with torch.inference_mode():
        x_1TD = fresh_features(MODEL, tokens[:-1])[None]
        HEAD(x_1TD, MODEL.embed(torch.tensor([tokens[1:]])), cache)
    return cache


def assert_true_features_only(drafter, tokens):
    n = len(tokens) - 1
    assert len(drafter) == drafter.cache.lengths[0] == n
    wanted = true_cache(tokens)
    for mine, fresh in ((drafter.cache.k_LBSKH, wanted.k_LBSKH),
                        (drafter.cache.v_LBSKH, wanted.v_LBSKH)):  # fmt: skip
        torch.testing.assert_close(mine[:, :, :n], fresh[:, :, :n], atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("node", range(-1, 7))
def test_after_a_proposal_only_true_features_are_held(node):
    """In the first round and, for every path that can be accepted, in the next."""
    tokens = [*PROMPT, 9]
    drafter, reader = new_drafter(depth=3, width=3, size=7)
    reader(tokens[:-1])
    draft = drafter.propose(tokens, 9, Chance())
    assert_true_features_only(drafter, tokens)
    reader(tokens, draft)
    reader.keep(draft.path(node))
    longer = [*reader.tokens, 4]
    drafter.settle(longer)
    again = drafter.propose(longer, 9, Chance())
    assert_true_features_only(drafter, longer)
    assert set(paths_of(again)) == set(naive_tree(longer, ALL, 3, 3, 7))


def test_a_round_without_a_draft_is_caught_up_with():
    """A2.25 for the head: rounds pass unasked, then it reads what it missed."""
    drafter, reader = new_drafter(depth=2, width=2, size=3)
    tokens = [*PROMPT, 9]
    reader(tokens[:-1])
    drafter.propose(tokens, 9, Chance())
    tokens += [1, 2, 3]
    assert drafter.propose(tokens, 0, Chance()) is NOTHING  # no room: not even read
    reader(tokens[:-1])
    draft = drafter.propose(tokens, 9, Chance())
    assert_true_features_only(drafter, tokens)
    assert set(paths_of(draft)) == set(naive_tree(tokens, ALL, 2, 2, 3))


@pytest.mark.parametrize(
    "other", [[3, 0], [3, 0, 17, 5, 1, 1, 1, 1, 1], [1, 0, 17, 5, 3, 0, 9], [3, 0, 17, 5, 3, 0, 9]]
)
def test_another_text_is_not_continued_from_the_features_of_the_last(other):
    """Shorter, longer, of the same length, and the very same once more."""
    drafter, reader = new_drafter(depth=3, width=2, size=4)
    for tokens in ([*PROMPT, 9], other):
        reader(tokens[:-1])
        reader.rewind(tokens[:-1])
        draft = drafter.propose(tokens, 9, Chance())
        assert_true_features_only(drafter, tokens)
        assert set(paths_of(draft)) == set(naive_tree(tokens, ALL, 3, 2, 4))


@pytest.mark.parametrize("held", [[], PROMPT[:-2], PROMPT, [1, *PROMPT[1:-1]]])
def test_without_the_features_of_the_text_there_is_no_draft(held):
    drafter, reader = new_drafter()
    if held:
        reader(held)
    assert drafter.propose(PROMPT, 9, Chance()) is NOTHING
    assert drafter.propose([4], 9, Chance()) is NOTHING
    assert len(drafter) == 0


def test_a_failed_proposal_leaves_nothing_behind(monkeypatch):
    drafter, reader = new_drafter(depth=3, width=2, size=4)
    tokens = [*PROMPT, 9]
    reader(tokens[:-1])
    calls = []
    whole = HEAD.forward

    def breaks_the_second_time(*parts):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return whole(*parts)

    with monkeypatch.context() as patch:
        patch.setattr(HEAD, "forward", breaks_the_second_time)
        with pytest.raises(MemoryError):
            drafter.propose(tokens, 9, Chance())
    draft = drafter.propose(tokens, 9, Chance())
    assert_true_features_only(drafter, tokens)
    assert set(paths_of(draft)) == set(naive_tree(tokens, ALL, 3, 2, 4))


# A model that counts: the feature after token t is known, so a right head is too


def counting_drafter(model, depth, width, size, sure=1.0):
    """The predicted feature is the token's, whatever the feature before said."""
    V = model.config.V
    head = EagleHead(model.config).to(torch.float64).requires_grad_(False)
    for weight in (head.join.weight, head.join.bias, head.block.out.weight, head.block.down.weight):
        weight.zero_()
    head.join.weight[:, V:] = sure * V**0.5 * torch.eye(V)
    reader = Reader(model, 64)
    return EagleDrafter(reader, head, whole_vocabulary(model), depth, width, size), reader


@pytest.mark.parametrize(("width", "size"), [(1, 3), (2, 6)])
def test_the_guesses_are_for_the_tokens_right_after_the_newest(width, size):
    """A head that is right has all its guesses accepted; off by one, none would be."""
    model = counting_model()
    drafter, reader = counting_drafter(model, 3, width, size)
    tally = Tally()
    rounds = list(speculate(reader, drafter, [0, 1, 2], 13))
    for r in rounds:
        tally.add(r)
    assert [t for r in rounds for t in r.tokens] == [i % 12 for i in range(3, 16)]
    assert [len(r.accepted) for r in rounds] == [0, 3, 3, 3]
    assert tally.acceptance == 1.0


def test_a_prompt_of_one_token_begins_without_a_draft():
    def drafter(reader):
        return EagleDrafter(reader, HEAD, ALL, 3, 2, 4)

    assert generate_speculative(MODEL, drafter, [5], 9) == generate(MODEL, [[5]], 9)[0]
    reader = Reader(MODEL, 48)
    first, second = itertools.islice(speculate(reader, drafter(reader), [5], 9), 2)
    assert len(first.draft) == 0 and len(second.draft) == 4


def test_it_drafts_to_the_last_slot_of_the_readers_cache():
    reader = Reader(MODEL, len(PROMPT) + 8 + 6)
    drafter = EagleDrafter(reader, HEAD, ALL, depth=4, width=3, size=6)
    rounds = list(speculate(reader, drafter, PROMPT, 8))
    assert [t for r in rounds for t in r.tokens] == generate_naive(MODEL, PROMPT, 8)


# What is refused


@pytest.mark.parametrize("shape", [{"depth": 0}, {"width": -1}, {"size": 1.5}, {"size": True}])
def test_a_shape_that_is_no_tree_is_refused(shape):
    (name,) = shape
    with pytest.raises(ValueError, match=f"{name}="):
        new_drafter(**shape)


def test_a_level_wider_than_the_draft_vocabulary_is_refused():
    with pytest.raises(ValueError, match="width=5: the draft's vocabulary has only 4 tokens"):
        new_drafter(FOUR, width=5)
