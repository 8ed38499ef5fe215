"""Typical acceptance: its thresholds, its choice of path, and that it is lossy."""

import math

import pytest
import torch
from every_outcome import distance, distribution, plain, toy, toy_logits

from lecture_util.model.sampling import GREEDY, Sampling, probabilities
from lecture_util.speculative.draft import ROOT, Draft, chain
from lecture_util.speculative.draft_model import ModelDrafter
from lecture_util.speculative.speculate import speculate
from lecture_util.speculative.target import Table
from lecture_util.speculative.typical import threshold, verify_typical
from lecture_util.speculative.verify import Chance

ONE = Sampling(1.0)


class Likeliest(Chance):
    def draw(self, p_V):
        self.drawn_from = p_V
        return int(p_V.argmax())


def rows(*distributions):
    return torch.tensor(distributions, dtype=torch.float64).log()


def test_thresholds_are_those_of_the_paper_not_swapped():
    """Four equal tokens: .3 * exp(-ln 4) = .075; a peak: the cap, .09. With epsilon and delta
    swapped, as Medusa's helper has them, they would be .0225 and about .076."""
    uniform, peak = torch.full((4,), 0.25), torch.tensor([0.97, 0.01, 0.01, 0.01])
    assert float(threshold(uniform)) == pytest.approx(0.075)
    assert float(threshold(peak)) == pytest.approx(0.09)
    assert float(threshold(uniform, 0.3, 0.09)) == pytest.approx(0.0225)
    assert float(threshold(peak, 0.3, 0.09)) == pytest.approx(0.076, abs=5e-4)


def test_a_threshold_for_each_row_also_with_impossible_tokens():
    p = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]])
    torch.testing.assert_close(threshold(p), torch.tensor([[0.09], [0.09]]))
    assert float(threshold(torch.full((1000,), 1e-3, dtype=torch.float64))) == pytest.approx(3e-4)
    p_V = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1])
    entropy = -sum(x * math.log(x) for x in p_V.tolist())
    assert float(threshold(p_V)) == pytest.approx(min(0.09, 0.3 * math.exp(-entropy)))


def test_the_deepest_plausible_path_wins():
    """The first guess is likelier, but only the second goes on."""
    logits_MV = rows([0.6, 0.3, 0.1], [0.98, 0.01, 0.01], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1])
    logits_MV = torch.cat([logits_MV, rows([0.1, 0.1, 0.8])])
    draft = Draft([0, 1, 1, 2], [ROOT, ROOT, 0, 1])  # node 2 is implausible: .01
    chance = Likeliest()
    assert verify_typical(logits_MV, draft, ONE, chance) == ([1, 3], 2)
    torch.testing.assert_close(chance.drawn_from, probabilities(logits_MV[4], ONE))


def test_of_equally_deep_paths_the_first_wins():
    logits_MV = rows([0.4, 0.4, 0.2], *[[0.4, 0.3, 0.3]] * 2)
    assert verify_typical(logits_MV, Draft([1, 0], [ROOT, ROOT]), ONE, Likeliest()) == ([0], 0)


def test_a_path_ends_at_its_first_implausible_guess():
    """What comes after it does not count, however plausible (and no padding is ever accepted)."""
    logits_MV = rows([0.98, 0.02], [0.01, 0.99], [0.01, 0.99], [0.9, 0.1])
    path, token = verify_typical(logits_MV, chain([0, 0, 1]), ONE, Likeliest())
    assert (path, token) == ([0], 1)
    assert verify_typical(logits_MV[:1], chain([]), ONE, Likeliest()) == ([], 0)


def test_a_guess_at_the_threshold_is_not_above_it():
    """p = .5, .5 and epsilon .5: plausible is only what lies above."""
    logits_MV = rows([0.5, 0.5], [0.9, 0.1])
    assert verify_typical(logits_MV, chain([0]), ONE, Likeliest(), epsilon=0.5, delta=9.0)[0] == []
    assert verify_typical(logits_MV, chain([0]), ONE, Likeliest(), epsilon=0.49, delta=9)[0] == [0]


def test_it_judges_the_tempered_distribution_and_draws_the_filtered_one():
    logits_MV = rows([0.9, 0.08, 0.02], [0.5, 0.3, 0.2])
    assert verify_typical(logits_MV, chain([1]), ONE, Likeliest())[0] == []  # .08 is below .09
    warm, chance = Sampling(2.0, top_k=2), Likeliest()
    assert verify_typical(logits_MV, chain([1]), warm, chance)[0] == [0]
    torch.testing.assert_close(chance.drawn_from, probabilities(logits_MV[1], warm))
    # at temperature 0 it judges at 1, and goes on with the likeliest
    assert verify_typical(logits_MV, chain([1]), GREEDY, Likeliest())[0] == []
    assert verify_typical(logits_MV, chain([0]), GREEDY, Likeliest()) == ([0], 0)


def test_it_is_lossy_and_the_enumeration_says_so():
    """The same comparison in which `verify` agrees to 1e-12 (test_exactness_by_enumeration)."""
    logits_of, sampling = toy_logits(3, seed=59), Sampling(0.8)
    drafter = ModelDrafter(toy(3, seed=60), 2, Sampling(1.2))

    def run(chance):
        options = {"sampling": sampling, "chance": chance, "verify": verify_typical}
        rounds = speculate(Table(logits_of), drafter, [0, 1], 3, **options)
        return tuple(token for r in rounds for token in r.tokens)

    found = distribution(run)
    assert sum(found.values()) == pytest.approx(1)
    assert distance(found, plain(logits_of, [0, 1], 3, sampling)) > 0.05


def test_even_greedy_it_may_say_something_else():
    """A plausible second choice that was guessed is taken: greedy decoding would not say it."""
    logits_MV = rows([0.6, 0.4], [0.6, 0.4])
    assert verify_typical(logits_MV, chain([1]), GREEDY, Likeliest())[0] == [0]


def test_nothing_that_is_handed_in_is_changed():
    logits_MV = torch.randn(3, 4)
    before = logits_MV.clone()
    verify_typical(logits_MV, chain([1, 2]), ONE, Likeliest())
    assert torch.equal(logits_MV, before)


@pytest.mark.parametrize(
    ("logits_MV", "tokens", "message"),
    [
        (torch.zeros(2, 4), [0, 1], "for a draft of 2: expected"),
        (torch.zeros(2, 4), [-1], "guess 0 is token -1"),
        (torch.zeros(2, 4), [4], "guess 0 is token 4"),
        (torch.full((2, 4), float("nan")), [0], "NaN"),
    ],
)
def test_what_does_not_fit_is_refused(logits_MV, tokens, message):
    with pytest.raises(ValueError, match=message):
        verify_typical(logits_MV, chain(tokens), ONE, Chance())
