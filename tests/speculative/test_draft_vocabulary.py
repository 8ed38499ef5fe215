"""The head for frequent tokens: the same numbers as the whole head, for fewer tokens."""

from collections import Counter

import pytest
import torch
from every_outcome import distance, distribution, plain, toy_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lecture_util.model.sampling import Sampling
from lecture_util.speculative.draft import chain
from lecture_util.speculative.speculate import speculate
from lecture_util.speculative.target import Table
from lecture_util.speculative.vocabulary import DraftVocabulary, frequent

V, D = 11, 5


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=False, dtype=torch.float64).requires_grad_(False)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 7))
def test_the_frequent_tokens_are_counted(text, U):
    found = frequent(torch.tensor(text, dtype=torch.long), 7, U).tolist()
    counts = Counter(text)
    assert found == sorted(found) == sorted(set(found))
    assert len(found) == U
    worst = min(counts[token] for token in found)
    assert all(counts[token] <= worst for token in set(range(7)) - set(found))


def test_of_equally_frequent_tokens_the_first_are_taken():
    assert frequent(torch.tensor([4, 4, 2, 0, 3]), 6, 3).tolist() == [0, 2, 4]
    assert frequent(torch.tensor([], dtype=torch.long), 6, 2).tolist() == [0, 1]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_its_logits_are_rows_of_the_heads(head, shape):
    ids_U = torch.tensor([7, 0, 3])
    x = torch.randn(*shape, D, dtype=torch.float64)
    torch.testing.assert_close(DraftVocabulary(head, ids_U)(x), head(x)[..., ids_U])


def test_the_likeliest_come_back_as_tokens_with_their_log_probabilities(head):
    """Of the tokens it knows; their probabilities add up to one among these."""
    ids_U = torch.tensor([9, 1, 4, 6])
    x_BD = torch.randn(3, D, dtype=torch.float64)
    tokens_BK, logs_BK = DraftVocabulary(head, ids_U).top(x_BD, 4)
    logits_BV = head(x_BD)
    for tokens, logs, logits_V in zip(tokens_BK.tolist(), logs_BK, logits_BV, strict=True):
        assert tokens == sorted(ids_U.tolist(), key=lambda token: -float(logits_V[token]))
        p = logits_V[ids_U].softmax(0)[[ids_U.tolist().index(token) for token in tokens]]
        torch.testing.assert_close(logs.exp().double(), p, rtol=1e-5, atol=1e-6)
    assert DraftVocabulary(head, ids_U).top(x_BD, 2)[0].tolist() == tokens_BK[:, :2].tolist()


def test_all_tokens_give_the_head_itself(head):
    x_BD = torch.randn(4, D, dtype=torch.float64)
    vocabulary = DraftVocabulary(head, torch.arange(V))
    torch.testing.assert_close(vocabulary(x_BD), head(x_BD))
    assert vocabulary.top(x_BD, 1)[0][:, 0].tolist() == head(x_BD).argmax(-1).tolist()


def test_each_token_knows_its_row(head):
    vocabulary = DraftVocabulary(head, torch.tensor([9, 1, 4]))
    assert vocabulary.place_V.tolist() == [-1, 1, -1, -1, 2, -1, -1, -1, -1, 0, -1]


def test_it_is_no_part_of_a_checkpoint_and_is_not_trained(head):
    """It is made of the model's own head again: nothing to save, nothing to learn."""
    vocabulary = DraftVocabulary(head, torch.tensor([1, 2]))
    assert vocabulary.state_dict() == {}
    assert list(vocabulary.parameters()) == []
    trained = DraftVocabulary(nn.Linear(D, V, bias=False), torch.tensor([1, 2]))
    assert not trained(torch.randn(D)).requires_grad


def test_what_a_draft_cannot_say_the_output_still_says():
    """The draft knows tokens 0 and 2 only; the joint distribution is the target's all the same."""
    torch.manual_seed(1)
    vocabulary = DraftVocabulary(
        nn.Linear(2, 3, bias=False, dtype=torch.float64), torch.tensor([0, 2])
    )

    class Drafter:
        def propose(self, tokens, room, chance):
            x_D = torch.tensor([len(tokens) % 3, tokens[-1]], dtype=torch.float64)
            return chain(vocabulary.top(x_D, 2)[0].tolist()[: min(room, 2)])

        def settle(self, tokens):
            pass

    logits_of, sampling = toy_logits(3, seed=70), Sampling(0.9, top_p=0.97)

    def run(chance):
        rounds = speculate(Table(logits_of), Drafter(), [0, 1], 3, sampling=sampling, chance=chance)
        return tuple(token for r in rounds for token in r.tokens)

    found = distribution(run)
    assert any(1 in output for output in found)
    assert distance(found, plain(logits_of, [0, 1], 3, sampling)) < 1e-12


@pytest.mark.parametrize("U", [0, -1, V + 1])
def test_more_tokens_than_there_are_are_refused(U):
    with pytest.raises(ValueError, match=f"U={U}: expected 1 to V={V} tokens"):
        frequent(torch.tensor([1, 2]), V, U)


@pytest.mark.parametrize("text", [[0, 5, 11], [-1, 3]])
def test_a_text_of_another_tokenizer_is_refused(text):
    """Token 11 of 11 would have been counted, and handed on as a row that the head lacks."""
    with pytest.raises(ValueError, match=r"the text has tokens .*: expected 0 to 10"):
        frequent(torch.tensor(text), V, 3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 11], r"expected tokens of 0\.\.10"),
        ([-1, 0], r"expected tokens of 0\.\.10"),
        ([], r"ids_U has shape \(0,\)"),
        ([[0, 1]], r"ids_U has shape \(1, 2\)"),
        ([3, 3], "ids_U holds a token twice"),
    ],
)
def test_tokens_that_make_no_vocabulary_are_refused(head, ids, message):
    with pytest.raises(ValueError, match=message):
        DraftVocabulary(head, torch.tensor(ids, dtype=torch.long))


def test_a_head_with_a_bias_is_refused():
    with pytest.raises(ValueError, match="the head has a bias"):
        DraftVocabulary(nn.Linear(D, V), torch.tensor([1]))
