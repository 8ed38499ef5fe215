"""Speculative sampling changes no probability: every way that the chances can fall, added up.

The real loop runs on toy language models of 2 to 4 tokens, whose logits differ after every
sequence. A `Chance` that follows each outcome gives the whole joint distribution of the output, in
fp64, and it has to equal the chain rule's to 1e-12. Faults that others had are put in on purpose:
the same comparison has to tell each of them.
"""

import itertools
from collections import defaultdict

import pytest
import torch
from every_outcome import distance, distribution, filtered, outcomes, plain, toy, toy_logits
from scipy.stats import chisquare

from lecture_util.model.sampling import GREEDY, Sampling, probabilities
from lecture_util.speculative.block import verify_block
from lecture_util.speculative.draft import NOTHING, ROOT, Draft
from lecture_util.speculative.draft_model import ModelDrafter
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.speculate import speculate
from lecture_util.speculative.target import Table
from lecture_util.speculative.verify import Chance, residual, verify

EXACT = 1e-12
WRONG = 1e-3  # the faults are off by more than this; the least of them by .0047
PROMPT = [0, 1]

FILTERS = {
    "tempered": (Sampling(0.7), Sampling(1.3)),
    "top-k": (Sampling(1.2, top_k=2), Sampling(0.8)),
    "top-p": (Sampling(0.8, top_p=0.75), Sampling(1.1, top_p=0.9)),
    "top-k and top-p": (Sampling(1.5, top_k=3, top_p=0.8), Sampling(1.3, top_k=2)),
    "a greedy draft": (Sampling(0.9), GREEDY),
}


def joint(target, drafter, n, sampling, prompt=PROMPT, seen=None, **options):
    """Output -> probability, through the real loop. What happened on the way goes into `seen`."""

    def run(chance):
        rounds = list(
            speculate(target, drafter, prompt, n, sampling=sampling, chance=chance, **options)
        )
        if seen is not None:
            seen.extend(rounds)
        return tuple(token for r in rounds for token in r.tokens)

    return distribution(run)


class TreeDrafter:
    """Guesses in a tree of a given shape; each node's token is got in one of three ways.

    drawn     from the draft model, whatever its siblings are
    distinct  from the draft model without its earlier siblings
    chosen    the likeliest that no earlier sibling is
    """

    def __init__(self, model, sampling, parents, ways):
        self.model, self.sampling, self.parents, self.ways = model, sampling, parents, ways
        self.depths = Draft(list(range(len(parents))), parents).depths

    def propose(self, tokens, room, chance):
        guesses, q, kept = [], [], []
        for node, (parent, way) in enumerate(zip(self.parents, self.ways, strict=True)):
            if self.depths[node] > room:  # parents come first and are never deeper
                continue
            path, above = [], parent
            while above != ROOT:
                path.append(guesses[kept.index(above)])
                above = self.parents[above]
            q_V = probabilities(self.model([*tokens, *path[::-1]])[0], self.sampling)
            siblings = [i for i, other in enumerate(kept) if self.parents[other] == parent]
            if way != "drawn":
                q_V = q_V.clone()
                q_V[[guesses[i] for i in siblings]] = 0
                q_V = q_V / q_V.sum()
            kept.append(node)
            guesses.append(int(q_V.argmax()) if way == "chosen" else chance.draw(q_V))
            q.append(None if way == "chosen" else q_V)
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return Draft(guesses, [place[self.parents[node]] for node in kept], q)

    def settle(self, tokens):
        pass


TREES = {
    "two drawn siblings": (3, 3, [-1, -1], ["drawn"] * 2),
    "three drawn siblings": (2, 3, [-1, -1, -1], ["drawn"] * 3),
    "drawn at both levels": (2, 3, [-1, -1, 0, 1, 1], ["drawn"] * 5),
    "without replacement": (3, 3, [-1, -1, 1, 1], ["distinct"] * 4),
    "chosen": (3, 4, [-1, -1, 0, 0, 1], ["chosen"] * 5),
    "chosen, three levels": (4, 4, [-1, -1, 0, 1, 1, 4], ["chosen"] * 6),
    "every token chosen": (3, 3, [-1, -1, -1, 2, 2, 2], ["chosen"] * 6),
    "chosen, then drawn": (3, 3, [-1, -1, 0, 1], ["chosen", "drawn", "drawn", "chosen"]),
    "drawn, then chosen": (3, 3, [-1, -1, 1, 1], ["drawn", "chosen", "drawn", "chosen"]),
}
TREE_FILTERS = {
    "tempered": (Sampling(0.7), Sampling(1.3)),
    "top-p": (Sampling(1.4, top_p=0.85), Sampling(0.9)),
    "top-k": (Sampling(1.1, top_k=2), Sampling(1.6)),
}


# --- The oracle itself


def test_all_ways_through_are_found_once():
    """Two coins and a die of three: 4 + 3 outcomes, whose probabilities add up to one."""

    def run(chance):
        if chance.happens(0.25):
            return "coins", chance.happens(0.5), chance.happens(1.0)
        return "die", chance.draw(torch.tensor([0.5, 0.0, 0.5]))

    assert sorted(outcomes(run)) == [
        (("coins", False, True), 0.125),
        (("coins", True, True), 0.125),
        (("die", 0), 0.375),
        (("die", 2), 0.375),
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("filters", FILTERS)
def test_the_oracle_filters_as_the_sampler_does(filters, seed):
    sampling = FILTERS[filters][0]
    logits_V = toy_logits(4, seed)([0])
    ours = {i: p for i, p in enumerate(probabilities(logits_V, sampling).tolist()) if p > 0}
    assert distance(ours, filtered(logits_V, sampling)) < EXACT


# --- Exact, whatever drafts


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("V", "gamma"), list(itertools.product([2, 3], [1, 2, 3])))
def test_a_drafted_chain_leaves_the_joint_distribution_as_it_is(V, gamma, filters, rule):
    """More than one round, rejections at every place, and whole drafts accepted."""
    sampling, draft_sampling = FILTERS[filters]
    logits_of, n, seen = toy_logits(V, seed=V), 4 if V == 2 or gamma == 3 else 3, []
    drafter = ModelDrafter(toy(V, seed=10 + gamma), gamma, draft_sampling)
    found = joint(Table(logits_of), drafter, n, sampling, seen=seen, verify=rule)
    expected = plain(logits_of, PROMPT, n, sampling)
    assert distance(found, expected) < EXACT
    if V > 2 or filters == "tempered":
        assert {r.last for r in seen} == {"bonus", "correction", "plain"}
        assert {len(r.accepted) for r in seen} == set(range(min(gamma, n - 1) + 1))
    if sampling.top_k == 2 and V > 2:
        assert len(expected) == 2**n  # the filter is on


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_whole_texts_of_four_tokens_filtered_both_ways(gamma, rule):
    """V=4, every path through all rounds of gamma + 1 tokens, with top-k and top-p on."""
    both, n = Sampling(temperature=0.8, top_k=3, top_p=0.9), gamma + 1

    def run(chance):
        drafter = ModelDrafter(toy(4, 7), gamma, both)
        rounds = speculate(toy(4, 0), drafter, [0], n, sampling=both, chance=chance, verify=rule)
        return tuple(token for r in rounds for token in r.tokens)

    wanted = plain(toy_logits(4, 0), [0], n, both)
    assert len(wanted) > 4
    assert distance(distribution(run), wanted) < 1e-12


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_it_holds_for_four_tokens(gamma, filters, rule):
    """V=4, one round with its bonus; what it leaves of gamma + 1 tokens is sampled plainly."""
    (sampling, draft_sampling), n = FILTERS[filters], gamma + 1
    logits_of, drafter = (
        toy_logits(4, seed=40),
        ModelDrafter(toy(4, seed=41), gamma, draft_sampling),
    )

    def first_round(chance):
        options = {"sampling": sampling, "chance": chance, "verify": rule}
        return tuple(next(speculate(Table(logits_of), drafter, PROMPT, n, **options)).tokens)

    found = defaultdict(float)
    for tokens, probability in distribution(first_round).items():
        rest = plain(logits_of, [*PROMPT, *tokens], n - len(tokens), sampling)
        for more, p in rest.items():
            found[(*tokens, *more)] += probability * p
    assert distance(found, plain(logits_of, PROMPT, n, sampling)) < EXACT


@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", [verify, verify_block])
def test_guesses_from_the_text_leave_it_as_it_is(filters, latest, rule):
    """n-grams are certain of their guess: q is one-hot, and where it is rejected, struck out."""
    sampling, seen = FILTERS[filters][0], []
    logits_of, prompt = toy_logits(3, seed=6), [0, 1, 2, 0, 1, 1, 2, 0, 1]
    drafter = NgramDrafter(shortest=1, longest=2, k=3, latest=latest)
    found = joint(Table(logits_of), drafter, 4, sampling, prompt, seen, verify=rule)
    assert distance(found, plain(logits_of, prompt, 4, sampling)) < EXACT
    assert {"correction", "bonus"} <= {r.last for r in seen}


@pytest.mark.parametrize("filters", TREE_FILTERS)
@pytest.mark.parametrize("tree", TREES)
def test_a_tree_leaves_it_as_it_is(tree, filters):
    """Also where an earlier sibling is rejected and a later one accepted, at the last level too."""
    V, n, parents, ways = TREES[tree]
    sampling, draft_sampling = TREE_FILTERS[filters]
    logits_of, seen = toy_logits(V, seed=7), []
    drafter = TreeDrafter(toy(V, seed=8), draft_sampling, parents, ways)
    found = joint(Table(logits_of), drafter, n, sampling, seen=seen)
    assert distance(found, plain(logits_of, PROMPT, n, sampling)) < EXACT
    later = [r for r in seen for node in r.accepted if _rank(r.draft, node) > 0]
    assert any(r.last == "bonus" for r in later)


def _rank(draft, node):
    """How many siblings were tried before this node."""
    return draft.children[draft.parents[node]].index(node)


DRAFTERS = {
    "chain": lambda: ModelDrafter(toy(3, seed=23), 3, Sampling(1.2)),
    "n-gram": lambda: NgramDrafter(shortest=1, longest=1, k=3),
    "tree": lambda: TreeDrafter(
        toy(3, seed=23), Sampling(1.2), [-1, -1, 1], ["drawn", "chosen", "drawn"]
    ),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_that_end_early_keep_their_probability(drafter):
    """An end token ends the text, drafted or not; there are outputs of 1 to 4 tokens."""
    sampling, logits_of, seen = Sampling(0.8, top_p=0.95), toy_logits(3, seed=22), []
    prompt = [0, 2, 1, 0, 2]
    found = joint(Table(logits_of), DRAFTERS[drafter](), 4, sampling, prompt, seen, eos=1)
    expected = plain(logits_of, prompt, 4, sampling, ends=lambda tokens: tokens[-1] == 1)
    assert distance(found, expected) < EXACT
    assert {len(output) for output in found} == {1, 2, 3, 4}
    assert any(r.last == "guess" for r in seen)  # it ended inside an accepted draft
    rejected = [
        r for r in seen if r.last == "correction" and r.tokens[-1] != 1
        if any(r.draft.tokens[i] == 1 for i in r.draft.children[(r.accepted or [ROOT])[-1]])
    ]  # fmt: skip
    assert rejected  # an end token that was guessed and refused ended nothing


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_inside_a_draft_keeps_the_distribution(drafter):
    def twice(tokens):
        return len(tokens) > 1 and tokens[-1] == tokens[-2]

    sampling, logits_of = Sampling(1.3), toy_logits(3, seed=24)
    found = joint(Table(logits_of), DRAFTERS[drafter](), 3, sampling, stop=twice)
    assert distance(found, plain(logits_of, PROMPT, 3, sampling, ends=twice)) < EXACT


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_is_the_special_case_with_one_outcome(drafter):
    """EAGLE#75: in exact arithmetic, with the same end, it is plain greedy decoding. (What a
    sampled draft guesses differs from path to path; the output never does.)"""
    for seed in range(2):
        logits_of, output = toy_logits(3, seed), []
        while len(output) < 4:
            output.append(int(logits_of([*PROMPT, *output]).argmax()))
        found = joint(Table(logits_of), DRAFTERS[drafter](), 4, GREEDY)
        assert found.keys() == {tuple(output)}


def test_without_guesses_it_is_plain_sampling():
    class Nobody:
        def propose(self, tokens, room, chance):
            return NOTHING

        def settle(self, tokens):
            pass

    logits_of, sampling = toy_logits(4, seed=9), Sampling(1.1, top_k=3)
    found = joint(Table(logits_of), Nobody(), 3, sampling)
    assert distance(found, plain(logits_of, PROMPT, 3, sampling)) < EXACT


# --- Block verification


def accepted_on_average(rule, target, drafter, gamma, sampling):
    """Guesses accepted in the first round, in expectation."""

    def run(chance):
        rounds = speculate(
            target, drafter, PROMPT, gamma + 1, sampling=sampling, chance=chance, verify=rule
        )
        return len(next(rounds).accepted)

    return sum(n * probability for n, probability in distribution(run).items())


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("V", "gamma"), list(itertools.product([2, 3], [1, 2, 3])))
def test_a_block_accepts_no_fewer_than_guess_by_guess(V, gamma, filters):
    sampling, draft_sampling = FILTERS[filters]
    for seed in range(3):
        setting = toy(V, seed), ModelDrafter(toy(V, 30 + seed), gamma, draft_sampling)
        one, block = (
            accepted_on_average(rule, *setting, gamma, sampling) for rule in (verify, verify_block)
        )
        assert block >= one - EXACT
        if gamma == 1:  # no other guess to make up for
            assert block == pytest.approx(one, abs=EXACT)


def test_a_block_accepts_what_its_paper_says():
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two guesses: 10/9 accepted one by one, 11/9 as a
    block (Sun et al. 2024, the motivating example)."""
    target = Table(lambda tokens: torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log())
    draft = Table(lambda tokens: torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).log())
    drafter = ModelDrafter(draft, 2, Sampling(1.0))
    one, block = (
        accepted_on_average(rule, target, drafter, 2, Sampling(1.0))
        for rule in (verify, verify_block)
    )
    assert one == pytest.approx(10 / 9, abs=EXACT)
    assert block == pytest.approx(11 / 9, abs=EXACT)


def test_a_block_is_a_chain():
    draft = Draft([0, 1], [-1, -1])
    with pytest.raises(ValueError, match="this draft is a tree: verify_block takes chains"):
        verify_block(torch.zeros(3, 2), draft, Sampling(1.0), Chance())


# --- Known to be wrong


def variant(fault):
    """`verify` written once more with one fault in it; with none it is right, as tested."""

    def rule(logits_MV, draft, sampling, chance):
        p_MV = probabilities(logits_MV, sampling)
        path, here, p_V, shared, adjusted = [], ROOT, p_MV[0], 1.0, False
        while True:
            for node in draft.children[here]:
                x, q_V = draft.tokens[node], draft.q[node]
                if q_V is None:
                    q_V = torch.zeros_like(p_V).index_fill(0, torch.tensor(x), 1.0)
                ratio = min(1.0, float(p_V[x] / q_V[x]))
                if fault == "accept everything":
                    ratio = 1.0
                if fault == "one uniform reused":  # it is known to lie below `shared`
                    ratio, shared = min(ratio, shared) / shared, min(ratio, shared)
                if chance.happens(ratio):
                    path.append(node)
                    here = node
                    if fault == "bonus from the adjusted distribution" and adjusted:
                        return path, chance.draw(p_V)
                    p_V, adjusted = p_MV[node + 1], False
                    if fault == "bonus from a residual" and not draft.children[node]:
                        p_V = residual(p_V, q_V)
                    break
                adjusted = True
                if fault != "correction from p":
                    p_V = (p_V - q_V).clamp(min=0)
                if fault not in ("correction from p", "residual not renormalised"):
                    p_V = p_V / p_V.sum()
            else:
                if (
                    fault == "residual not renormalised"
                ):  # a search in its running sum falls through
                    p_V = p_V.clone()
                    p_V[-1] += 1 - p_V.sum()
                return path, chance.draw(p_V)

    return rule


CHAIN_FAULTS = [
    "accept everything",
    "residual not renormalised",
    "correction from p",
    "one uniform reused",
    "bonus from a residual",
]
TREE_FAULTS = [
    "accept everything",
    "residual not renormalised",
    "correction from p",
    "bonus from the adjusted distribution",
]


def chain_distance(rule, drafter=None, seed=59):
    logits_of, sampling = toy_logits(3, seed), Sampling(0.8)
    drafter = ModelDrafter(toy(3, seed + 1), 2, Sampling(1.2)) if drafter is None else drafter
    found = joint(Table(logits_of), drafter, 3, sampling, verify=rule)
    return distance(found, plain(logits_of, PROMPT, 3, sampling))


def tree_distance(rule, way):
    logits_of, sampling = toy_logits(3, seed=52), Sampling(0.8)
    drafter = TreeDrafter(toy(3, seed=53), Sampling(1.2), [-1, -1, 1], [way] * 3)
    found = joint(Table(logits_of), drafter, 3, sampling, verify=rule)
    return distance(found, plain(logits_of, PROMPT, 3, sampling))


@pytest.mark.parametrize("way", ["drawn", "distinct", "chosen"])
def test_the_variant_without_a_fault_is_right(way):
    assert chain_distance(variant(None)) < EXACT
    assert tree_distance(variant(None), way) < EXACT


@pytest.mark.parametrize("fault", CHAIN_FAULTS)
def test_a_faulty_rule_is_told_by_the_distribution(fault):
    assert chain_distance(variant(fault)) > WRONG


@pytest.mark.parametrize("way", ["drawn", "distinct", "chosen"])
@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_a_faulty_rule_is_told_on_trees(fault, way):
    """The last of them is EAGLE#47: a sibling was rejected, a later one accepted at the last level,
    and the bonus came from what the rejection had left."""
    assert tree_distance(variant(fault), way) > WRONG


class ArgmaxDrafter(ModelDrafter):
    """Wrong: takes the likeliest token and claims to have drawn it."""

    def propose(self, tokens, room, chance):
        greedy = ModelDrafter(self.model, self.gamma).propose(tokens, room, chance)
        q = [
            probabilities(self.model([*tokens, *greedy.tokens[:i]])[0], self.sampling)
            for i in range(len(greedy))
        ]
        return Draft(greedy.tokens, greedy.parents, q)


@pytest.mark.parametrize("rule", [verify, verify_block])
def test_an_argmax_draft_that_claims_a_softmax_is_told(rule):
    """jaymody/speculative-sampling#3."""
    draft = toy(3, seed=60)
    assert chain_distance(rule, ArgmaxDrafter(draft, 2, Sampling(1.2))) > WRONG
    assert chain_distance(rule, ModelDrafter(draft, 2, GREEDY)) < EXACT  # said plainly, it is fine


def test_a_block_rule_without_its_own_residual_is_told():
    """vllm-ascend#7807: a block's acceptance needs the block's own acceptance and residual."""

    def mixed(logits_MV, draft, sampling, chance):
        path, token = verify_block(logits_MV, draft, sampling, chance)
        if len(path) < len(draft):
            p_V = probabilities(logits_MV, sampling)[len(path)]
            token = chance.draw(residual(p_V, draft.q[len(path)]))
        return path, token

    def products(logits_MV, draft, sampling, chance):  # whole or not at all, by the product
        p_MV = probabilities(logits_MV, sampling)
        ratio = 1.0
        for x, p_V, q_V in zip(draft.tokens, p_MV[:-1], draft.q, strict=True):
            ratio *= float(p_V[x] / q_V[x])
        if chance.happens(ratio):
            return list(range(len(draft))), chance.draw(p_MV[-1])
        return [], chance.draw(residual(p_MV[0], draft.q[0]) if len(draft) else p_MV[0])

    assert chain_distance(verify_block) < EXACT
    assert chain_distance(mixed) > WRONG
    assert chain_distance(products) > WRONG


# --- The real dice


class OneUniform(Chance):
    """Wrong: one random number for all the acceptances of a round (a new one after each draw)."""

    u = None

    def happens(self, probability):
        if self.u is None:
            self.u = torch.rand((), generator=self.generator).item()
        return self.u < probability

    def draw(self, p_V):
        self.u = None
        return super().draw(p_V)


@pytest.mark.parametrize(("dice", "right"), [(Chance, True), (OneUniform, False)])
def test_a_histogram_agrees_and_tells_a_reused_uniform(dice, right):
    """The same by sampling, through the dice that a reader uses; 1500 texts at a fixed seed."""
    logits_of, sampling = toy_logits(2, seed=60), Sampling(0.9)
    drafter = ModelDrafter(toy(2, seed=61), 2, Sampling(1.3))
    expected = plain(logits_of, PROMPT, 3, sampling)
    counts = dict.fromkeys(expected, 0)
    chance = dice(torch.Generator().manual_seed(0))
    for _ in range(1500):
        r = speculate(Table(logits_of), drafter, PROMPT, 3, sampling=sampling, chance=chance)
        counts[tuple(token for one in r for token in one.tokens)] += 1
    p_value = chisquare(list(counts.values()), [1500 * p for p in expected.values()]).pvalue
    assert p_value > 1e-3 if right else p_value < 1e-9
