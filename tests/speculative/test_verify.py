"""Acceptance, residual and bonus of one round, and the faults that others had in them."""

import pytest
import torch
from every_outcome import distribution, outcomes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from lecture_util.model.sampling import GREEDY, Sampling, probabilities
from lecture_util.speculative.draft import ROOT, Draft, chain
from lecture_util.speculative.draft_model import ModelDrafter
from lecture_util.speculative.speculate import speculate
from lecture_util.speculative.target import Table
from lecture_util.speculative.verify import Chance, agreement, residual, verify

ONE = Sampling(1.0)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def rows(*distributions):
    """Logits that give these distributions at temperature 1; zeros become -inf."""
    return torch.stack([tensor(*p) for p in distributions]).log()


def first_token(p_V, q_V):
    """Token -> probability after one guess drawn from q, and how likely it was accepted."""

    def run(chance):
        x = chance.draw(q_V)
        logits_MV = torch.stack([p_V, torch.full_like(p_V, 1 / len(p_V))]).log()
        path, token = verify(logits_MV, chain([x], [q_V]), ONE, chance)
        return (x if path else token), bool(path)

    found = distribution(run)
    p = torch.zeros_like(p_V)
    for (token, _), probability in found.items():
        p[token] += probability
    return p, sum(probability for (_, accepted), probability in found.items() if accepted)


class Script(Chance):
    """Answers that were fixed beforehand; keeps what was asked."""

    def __init__(self, answers, token=0):
        self.answers, self.token = list(answers), token
        self.asked, self.drawn_from = [], None

    def happens(self, probability):
        self.asked.append(probability)
        return self.answers.pop(0)

    def draw(self, p_V):
        self.drawn_from = p_V
        return self.token


@st.composite
def two_distributions(draw):
    """p and q on one vocabulary, zeros included."""
    V = draw(st.integers(1, 4))
    weights = st.lists(st.integers(0, 20), min_size=V, max_size=V).filter(any)
    p, q = tensor(*draw(weights)), tensor(*draw(weights))
    return p / p.sum(), q / q.sum()


@settings(max_examples=40)
@given(two_distributions())
def test_the_output_follows_p_whatever_q_is(pair):
    p_V, q_V = pair
    found_V, accepted = first_token(p_V, q_V)
    torch.testing.assert_close(found_V, p_V, rtol=0, atol=1e-12)
    assert accepted == pytest.approx(float(torch.minimum(p_V, q_V).sum()), abs=1e-12)
    assert accepted == pytest.approx(float(agreement(p_V, q_V)), abs=1e-12)


@settings(max_examples=40)
@given(two_distributions(), st.data())
def test_the_output_follows_p_whatever_was_chosen(pair, data):
    """A guess that was chosen is certain: accepted with p(x), and otherwise struck out."""
    p_V, _ = pair
    x = data.draw(st.integers(0, len(p_V) - 1))

    def run(chance):
        logits_MV = torch.stack([p_V, p_V]).log()
        path, token = verify(logits_MV, chain([x]), ONE, chance)
        return (x if path else token), bool(path)

    found = distribution(run)
    found_V = torch.zeros_like(p_V)
    for (token, _), probability in found.items():
        found_V[token] += probability
    torch.testing.assert_close(found_V, p_V, rtol=0, atol=1e-12)
    accepted = sum(probability for (_, kept), probability in found.items() if kept)
    assert accepted == pytest.approx(float(p_V[x]), abs=1e-12)


@settings(max_examples=40)
@given(two_distributions())
def test_the_residual_is_a_distribution_of_what_q_gave_too_little(pair):
    p_V, q_V = pair
    left_V = residual(p_V, q_V)
    assert float(left_V.sum()) == pytest.approx(1)
    assert (left_V >= 0).all()
    if not torch.equal(p_V, q_V):
        assert (left_V[p_V <= q_V] == 0).all()


def test_acceptance_by_hand():
    """p = (.2, .3, .5), q = (.5, .3, .2): accepted .4, 1 and 1; all that is left is token 2."""
    p_V, q_V = tensor(0.2, 0.3, 0.5), tensor(0.5, 0.3, 0.2)
    logits_MV = torch.stack([p_V, p_V]).log()
    for x, ratio in enumerate([0.4, 1.0, 2.5]):
        chance = Script([True])
        assert verify(logits_MV, chain([x], [q_V]), ONE, chance) == ([0], 0)
        assert chance.asked == [pytest.approx(ratio)]
    assert residual(p_V, q_V).tolist() == pytest.approx([0, 0, 1])
    assert float(agreement(p_V, q_V)) == pytest.approx(0.7)


def test_a_greedy_draft_is_certain_of_its_guess():
    """jaymody/speculative-sampling#3: the likeliest token of q handed over with q itself makes
    (.2, .3, .5) into (.4, 0, .6); handed over as chosen, it stays what it is."""
    p_V, q_V = tensor(0.2, 0.3, 0.5), tensor(0.5, 0.3, 0.2)

    def output(draft):
        def run(chance):
            path, token = verify(torch.stack([p_V, p_V]).log(), draft, ONE, chance)
            return draft.tokens[0] if path else token

        found = distribution(run)
        return [found.get(x, 0) for x in range(3)]

    assert output(chain([0], [q_V])) == pytest.approx([0.4, 0, 0.6])
    assert output(chain([0])) == pytest.approx([0.2, 0.3, 0.5])


def test_agreement_of_batches():
    p, q = torch.rand(2, 3, 5), torch.rand(2, 3, 5)
    found = agreement(p, q)
    assert found.shape == (2, 3)
    assert float(found[1, 2]) == pytest.approx(
        sum(min(a, b) for a, b in zip(p[1, 2].tolist(), q[1, 2].tolist(), strict=True)), rel=1e-6
    )


def test_equal_distributions_leave_no_residual_to_divide_by():
    p_V = tensor(0.1, 0.9)
    assert residual(p_V, p_V).tolist() == [0.1, 0.9]
    found_V, accepted = first_token(p_V, p_V)
    assert accepted == pytest.approx(1)
    assert found_V.tolist() == pytest.approx([0.1, 0.9])


def test_a_spread_distribution_stays_spread():
    """mistral.rs#2424: filtering and then taking the argmax made temperature and top-p dead."""
    target = Table(lambda tokens: tensor(0.4, 0.35, 0.25).log())
    drafter = ModelDrafter(Table(lambda tokens: tensor(0.2, 0.2, 0.6).log()), 2, ONE)
    chance = Chance(torch.Generator().manual_seed(0))
    firsts = [
        next(
            speculate(target, drafter, [0], 3, sampling=Sampling(1.0, top_p=0.99), chance=chance)
        ).tokens[0]
        for _ in range(300)
    ]
    assert set(firsts) == {0, 1, 2}
    counts = [firsts.count(x) for x in range(3)]
    assert chisquare(counts, [120, 105, 75]).pvalue > 1e-3


def test_the_draft_compares_with_the_tensor_that_it_drew_from():
    """DeepSpec#31: drawn from a bf16 softmax, accepted by a fp32 one. Here: one object."""
    logits_V = torch.tensor([10.00, 10.01, 9.99], dtype=torch.bfloat16)
    drawn_from = []

    class Noting(Chance):
        def draw(self, p_V):
            drawn_from.append(p_V)
            return super().draw(p_V)

    draft = ModelDrafter(Table(lambda tokens: logits_V), 3, ONE).propose([0], 3, Noting())
    assert len(drawn_from) == len(draft) == 3
    assert all(a is b for a, b in zip(draft.q, drawn_from, strict=True))
    assert draft.q[0].dtype == torch.float32


@pytest.mark.parametrize("drawn", [True, False])
def test_nothing_that_is_handed_in_is_changed(drawn):
    """vllm-ascend#2881: the drafted token's probability was zeroed in place and stayed zero."""
    logits_MV = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = [probabilities(-logits_MV[i], ONE) if drawn else None for i in range(2)]
    draft = Draft([2, 1], [ROOT, ROOT], q)
    before = [t.clone() for t in [logits_MV, *q] if t is not None]
    answers = [verify(logits_MV, draft, ONE, Script([False, False], 3)) for _ in range(2)]
    assert answers == [([], 3), ([], 3)]
    after = [t for t in [logits_MV, *q] if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("drawn", [True, False])
def test_after_a_rejected_sibling_the_bonus_is_still_the_targets_own(drawn):
    """EAGLE#47: siblings a and b of one depth; a rejected, b accepted; the bonus came from what the
    rejection of a had left. It has to come from the target's row after b, as it is."""
    logits_MV = rows([0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.6, 0.25, 0.15])
    q_V = tensor(0.6, 0.2, 0.2)
    draft = Draft([0, 1], [ROOT, ROOT], [q_V, q_V] if drawn else ())
    chance = Script([False, True], token=2)
    assert verify(logits_MV, draft, ONE, chance) == ([1], 2)
    torch.testing.assert_close(chance.drawn_from, tensor(0.6, 0.25, 0.15))
    # b was tried against what a had left: the residual (0, 1, 0), or p without a
    assert chance.asked[1] == pytest.approx(1 / 0.2 if drawn else 0.6)


def test_after_all_siblings_are_rejected_what_is_left_has_none_of_them():
    logits_MV = rows([0.4, 0.3, 0.2, 0.1], *[[0.25] * 4] * 3)
    chance = Script([False] * 3, token=3)
    draft = Draft([0, 2, 1], [ROOT] * 3)
    assert verify(logits_MV, draft, ONE, chance) == ([], 3)
    assert chance.asked == pytest.approx([0.4, 0.2 / 0.6, 0.3 / 0.4])
    assert chance.drawn_from.tolist() == pytest.approx([0, 0, 0, 1])


def test_each_row_is_the_one_after_its_node():
    """A path through a tree reads row node + 1, not the row of its depth."""
    logits_MV = rows(*[[0.1 + 0.1 * i, 0.9 - 0.1 * i] for i in range(5)])
    draft = Draft([0, 1, 0, 1], [ROOT, ROOT, 1, 1])
    chance = Script([False, True, False, True])
    path, _ = verify(logits_MV, draft, ONE, chance)
    assert path == [1, 3]
    assert chance.asked[2] == pytest.approx(0.3)  # row 2: after node 1
    assert chance.drawn_from[0] == pytest.approx(0.5)  # row 4: after node 3


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_filters_do_the_same_on_a_trees_rows_as_on_one(temperature):
    """EAGLE#215: the top-p filter met logits without a batch axis in the verifying step."""
    logits_MV = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sampling = Sampling(temperature, top_p=0.6)
    for node in range(3):
        chance = Script([True])
        verify(logits_MV[[0, node + 1]], chain([0]), sampling, chance)
        torch.testing.assert_close(chance.drawn_from, probabilities(logits_MV[node + 1], sampling))
    draft = Draft([0, 1, 2], [ROOT, ROOT, ROOT])
    chance = Script([False, False, True])
    assert verify(logits_MV, draft, sampling, chance)[0] == [2]
    torch.testing.assert_close(chance.drawn_from, probabilities(logits_MV[3], sampling))


def test_a_token_that_the_filter_removed_is_never_accepted():
    logits_MV = rows([0.5, 0.3, 0.2], [0.5, 0.3, 0.2])
    chance = Script([False])
    verify(logits_MV, chain([2], [tensor(0.1, 0.1, 0.8)]), Sampling(1.0, top_k=2), chance)
    assert chance.asked == [0.0]


def test_a_drawn_token_may_stand_in_the_tree_twice():
    """Two siblings drawn independently can be equal; the second one is tried against the rest."""
    q_V, p = tensor(0.7, 0.3), [0.4, 0.6]
    draft = Draft([0, 0], [ROOT, ROOT], [q_V, q_V])
    chance = Script([False, False], token=1)
    verify(rows(p, p, p), draft, ONE, chance)
    assert chance.asked == pytest.approx([4 / 7, 0.0])


# --- Greedy


def test_greedy_follows_the_targets_own_choices():
    logits_MV = torch.tensor(
        [[0.0, 2.0, 1.0], [0.0, 0.0, 3.0], [3.0, 0.0, 1.0], [0.0, 5.0, 0.0], [1.0, 0.0, 0.0]]
    )
    tree = Draft([2, 1, 0, 2], [ROOT, ROOT, 1, 2])
    assert verify(logits_MV, tree, GREEDY, Script([])) == ([1, 2], 1)
    assert verify(logits_MV[:1], chain([]), GREEDY, Script([])) == ([], 1)


def test_greedy_needs_no_dice_and_no_q():
    """However the guesses were drawn, temperature 0 asks for nothing."""
    q_V = tensor(0.2, 0.8)
    logits_MV = rows([0.6, 0.4], [0.1, 0.9])
    assert verify(logits_MV, chain([0], [q_V]), GREEDY, Script([])) == ([0], 1)
    assert verify(logits_MV, chain([1], [q_V]), GREEDY, Script([])) == ([], 0)


@settings(max_examples=40)
@given(two_distributions())
def test_a_tiny_temperature_comes_to_greedy(pair):
    p_V, q_V = pair
    if (p_V == p_V.max()).sum() > 1:
        return
    logits_MV = torch.stack([p_V, q_V]).log()
    for x in range(len(p_V)):
        draft = chain([x])
        greedy = verify(logits_MV, draft, GREEDY, Script([]))
        found = {tuple(path): p for (path, _), p in outcomes(
            lambda chance, draft=draft: verify(logits_MV, draft, Sampling(1e-6), chance)
        )}  # fmt: skip
        assert set(found) == {tuple(greedy[0])}


# --- The dice


def test_each_chance_is_a_fresh_one():
    """feifeibear re-seeded before every uniform: all of them were equal."""
    chance = Chance(torch.Generator().manual_seed(0))
    pairs = [(chance.happens(0.5), chance.happens(0.5)) for _ in range(2000)]
    counts = [pairs.count((a, b)) for a in (True, False) for b in (True, False)]
    assert chisquare(counts).pvalue > 1e-3
    assert any(pairs[i] != pairs[0] for i in range(1, 20))


def test_chances_are_as_likely_as_they_say():
    chance = Chance(torch.Generator().manual_seed(1))
    for probability in (0.03, 0.5, 0.9):
        times = sum(chance.happens(probability) for _ in range(3000))
        assert binomtest(times, 3000, probability).pvalue > 1e-3
    p_V = tensor(0.0, 0.15, 0.6, 0.0, 0.25)
    draws = [chance.draw(p_V) for _ in range(3000)]
    assert set(draws) == {1, 2, 4}
    assert chisquare([draws.count(x) for x in (1, 2, 4)], [450, 1800, 750]).pvalue > 1e-3


def test_the_certain_always_happens_and_the_impossible_never():
    chance = Chance(torch.Generator().manual_seed(2))
    assert all(chance.happens(1.0) and chance.happens(float("inf")) for _ in range(500))
    assert not any(chance.happens(0.0) for _ in range(500))


def test_rare_chances_are_not_rounded_away():
    """vllm#34854: numbers with few bits lose the tail. A uniform in fp64 has 53 of them."""

    chance = Chance(torch.Generator().manual_seed(3))
    seen, original = [], torch.rand

    def noting(*args, **kwargs):
        seen.append(original(*args, **kwargs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", noting)
        for _ in range(50):
            chance.happens(0.5)
    assert any(float(u.float()) != float(u) for u in seen)  # more bits than fp32 holds


def test_equal_seeds_fall_equally():
    runs = []
    for _ in range(2):
        chance = Chance(torch.Generator().manual_seed(4))
        runs.append([(chance.happens(0.5), chance.draw(tensor(0.5, 0.5))) for _ in range(20)])
    assert runs[0] == runs[1]


# --- What is refused


@pytest.mark.parametrize("shape", [(2, 4), (4, 4), (4,), (1, 3, 4)])
def test_logits_that_do_not_fit_the_draft_are_refused(shape):
    with pytest.raises(ValueError, match=r"for a draft of 2: expected\s+\(3, V\)"):
        verify(torch.zeros(shape), chain([0, 1]), ONE, Chance())


@pytest.mark.parametrize("sampling", [ONE, GREEDY])
@pytest.mark.parametrize("token", [-1, 4])
def test_a_token_that_the_target_does_not_know_is_refused(token, sampling):
    """-1 would be read as the last token of the vocabulary."""
    with pytest.raises(ValueError, match=f"guess 1 is token {token}: .* tokens 0 to 3"):
        verify(torch.zeros(3, 4), chain([0, token]), sampling, Chance())


def test_a_q_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"guess 0 has a q of shape \(3,\): expected \(4,\)"):
        verify(torch.zeros(2, 4), chain([0], [tensor(0.2, 0.3, 0.5)]), ONE, Chance())


def test_a_token_that_its_q_cannot_have_given_is_refused():
    with pytest.raises(ValueError, match="guess 0 is token 0, to which its q gives no probability"):
        verify(torch.zeros(2, 2), chain([0], [tensor(0.0, 1.0)]), ONE, Chance())


@pytest.mark.parametrize("sampling", [ONE, GREEDY])
def test_broken_logits_are_refused(sampling):
    logits_MV = torch.zeros(2, 3)
    logits_MV[1, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        verify(logits_MV, chain([0]), sampling, Chance())
