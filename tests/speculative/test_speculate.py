"""The loop: the tokens of plain decoding whatever is guessed, budgets, ends and stops, and caches
that hold all but the newest token after every round."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    ATOL,
    PROMPT,
    SMALL,
    Foreseeing,
    Told,
    assert_reader_holds,
    drafters,
    fresh_logits,
    random_tree,
    small_medusa,
    small_model,
    whole_vocabulary,
)

from lecture_util.model.config import Config
from lecture_util.model.generate import PromptError, generate, generate_naive
from lecture_util.model.sampling import GREEDY, Sampling
from lecture_util.speculative.draft import NOTHING, Draft, chain
from lecture_util.speculative.draft_model import ModelDrafter, early_exit
from lecture_util.speculative.eagle import EagleDrafter
from lecture_util.speculative.medusa import MedusaDrafter
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.speculate import (
    Round,
    Tally,
    generate_speculative,
    speculate,
    stream_speculative,
)
from lecture_util.speculative.target import Reader, Table
from lecture_util.speculative.verify import Chance, verify

MODEL = small_model()
WARM = Sampling(temperature=1.0)
NAMES = list(drafters(MODEL, GREEDY))
LONG = generate_naive(MODEL, PROMPT, 30)
GAMMA = 3
PAIRS = list(itertools.product(range(GAMMA + 1), repeat=2))  # accepted in turn, round after round
FEW = settings(max_examples=15)


def run(name, budget, sampling=GREEDY, prompt=PROMPT, **options):
    return generate_speculative(
        MODEL, drafters(MODEL, sampling)[name], prompt, budget, sampling=sampling, **options
    )


def words(accepted, gamma=GAMMA, budget=12, **options):
    """The rounds of a draft of which exactly so many guesses come true, round after round."""
    drafter = Foreseeing(MODEL, accepted, gamma)
    return list(stream_speculative(MODEL, lambda reader: drafter, PROMPT, budget, **options))


def test_the_small_model_has_something_to_say():
    """Else the tests below would pass on one token said forever."""
    assert len(set(LONG)) > 8


# The same tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 5, 7, 13])
def test_greedy_tokens_are_plain_greedy_tokens_to_the_last_of_the_budget(name, budget):
    """Budgets 0, 1, gamma and gamma + 1 among them (A2.18: never one more)."""
    assert run(name, budget) == LONG[:budget]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_every_drafter_is_right_now_and_then(name):
    """Else none of these tests would see an accepted guess of its."""
    tally = Tally()
    run(name, 28, tally=tally)
    assert tally.accepted >= 2


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(prompt=st.lists(st.integers(0, SMALL.V - 1), min_size=1, max_size=6))
def test_greedy_tokens_are_plain_greedy_tokens_after_any_prompt(name, prompt):
    assert run(name, 9, prompt=prompt) == generate_naive(MODEL, prompt, 9)


@FEW
@given(st.data())
def test_no_tree_of_guesses_changes_a_greedy_token(data):
    def guess(tokens, room):
        tree = random_tree(lambda low, high: data.draw(st.integers(low, high)), SMALL.V, most=6)
        if data.draw(st.booleans()):  # put what will be said somewhere into it
            said = chain(generate_naive(MODEL, tokens, data.draw(st.integers(1, 4))))
            parents = [p if p < 0 else p + len(said) for p in tree.parents]
            taken = list(zip(said.parents, said.tokens, strict=True))
            kept = [(p, t) for p, t in zip(parents, tree.tokens, strict=True)]
            if set(taken) & set(kept):
                return said
            return Draft(said.tokens + tree.tokens, list(said.parents) + parents)
        return tree

    budget = data.draw(st.integers(0, 9))
    assert generate_speculative(MODEL, lambda _: Told(guess), PROMPT, budget) == LONG[:budget]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_tokens_is_a_prompt_too(name):
    assert run(name, 5, prompt=torch.tensor(PROMPT)) == LONG[:5]
    reader = Reader(MODEL, 40)
    (first, *_) = speculate(reader, Foreseeing(MODEL, [1]), torch.tensor(PROMPT), 5)
    assert first.tokens == LONG[:2]


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_that_was_used_before_drafts_for_another_prompt(name):
    """Shorter, longer, of the same length, and the same again."""
    reader = Reader(MODEL, 64)
    drafter = drafters(MODEL, GREEDY)[name](reader)
    for prompt in ([3, 0, 17, 5, 3, 0, 2], [4], [5], [5, 1, 2, 3, 4, 5, 6, 7], PROMPT, PROMPT):
        rounds = list(speculate(reader, drafter, prompt, 7))
        said = [token for r in rounds for token in r.tokens]
        assert said == generate_naive(MODEL, prompt, 7)


# Budgets, and where the context ends


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 5))
def test_the_budget_is_spent_and_never_exceeded(accepted, budget, gamma):
    rounds = words(accepted, gamma, budget)
    assert [token for r in rounds for token in r.tokens] == LONG[:budget]
    left = budget
    for r in rounds:
        assert max(r.draft.depths, default=0) <= left - 1  # A2.18: a token of the target's follows
        left -= len(r.tokens)
    assert left == 0


def test_two_tokens_asked_for_and_three_guessed_right_are_two_tokens():
    """A2.18."""
    (only,) = words([3], gamma=3, budget=2)
    assert only.tokens == LONG[:2] and len(only.draft) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_is_asked_for_no_more_than_there_is_room(name):
    """All of them keep to `room`, so that nothing is computed in vain."""
    reader = Reader(MODEL, 40)
    drafter = drafters(MODEL, GREEDY)[name](reader)
    tokens = list(PROMPT)
    for room in (3, 2, 1, 0):
        draft = drafter.propose(tokens, room, Chance())
        assert max(draft.depths, default=0) <= room
        reader(tokens, NOTHING)
        tokens.append(int(fresh_logits(MODEL, tokens).argmax()))
        drafter.settle(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_stay_within_the_context(name):
    """A2.20: a prompt one short of the context, and drafts that would go past it."""
    prompt = [i % SMALL.V for i in range(SMALL.max_context - 4)]
    assert run(name, 4, prompt=prompt) == generate(MODEL, [prompt], 4)[0]
    with pytest.raises(PromptError, match="ask for at most 4"):
        run(name, 5, prompt=prompt)


def test_a_draft_beyond_the_context_by_its_guesses_alone_is_cut():
    (r,) = stream_speculative(
        MODEL, lambda _: Told(lambda tokens, room: chain([1] * 4)), [1] * (SMALL.max_context - 1), 1
    )
    assert len(r.draft) == 0 and r.last == "plain"


# Ends and stops


def expected_until(eos, budget=20):
    said = LONG[:budget]
    at = [i for i, token in enumerate(said) if token in eos]
    return said[: at[0] + 1] if at else said


@pytest.mark.parametrize("name", NAMES)
def test_an_end_token_ends_the_text_wherever_it_falls(name):
    """Any token of the text as its end: in drafts, after them, as a correction (A2.16)."""
    for eos in set(LONG[:20]):
        output = run(name, 20, eos=eos)
        assert output == expected_until({eos}) == generate(MODEL, [PROMPT], 20, eos=eos)[0]


@pytest.mark.parametrize(("place", "last"), [(0, "guess"), (1, "guess"), (2, "guess"),
                                             (3, "bonus")])  # fmt: skip
def test_an_end_token_inside_an_accepted_block_hides_what_follows(place, last):
    """A2.16, at every place of a block of three guesses and a bonus."""
    start = next(  # a stretch of four different tokens
        i for i in range(20) if len(set(LONG[i : i + 4])) == 4
    )
    prompt = PROMPT + LONG[:start]
    drafter = Foreseeing(MODEL, [3])
    (r,) = stream_speculative(MODEL, lambda _: drafter, prompt, 9, eos=LONG[start + place])
    assert r.tokens == LONG[start : start + place + 1]
    assert r.accepted == list(range(min(place + 1, 3)))
    assert r.last == last


def test_an_end_token_that_was_guessed_and_rejected_ends_nothing():
    """A2.17."""
    eos = next(token for token in range(SMALL.V) if token not in LONG[:12])
    rounds = list(
        stream_speculative(
            MODEL, lambda _: Told(lambda tokens, room: chain([eos]).cut(room)), PROMPT, 12, eos=eos
        )
    )
    assert all(r.draft.tokens == [eos] for r in rounds[:-1]) and len(rounds) == 12
    assert [token for r in rounds for token in r.tokens] == LONG[:12]


def test_the_end_token_is_an_accepted_guess_after_a_rejected_sibling():
    eos = LONG[0]
    other = (eos + 1) % SMALL.V
    tree = Draft([other, eos, LONG[1]], [-1, -1, 1])
    (r,) = stream_speculative(MODEL, lambda _: Told(lambda *_: tree), PROMPT, 9, eos={eos})
    assert (r.tokens, r.accepted, r.last) == ([eos], [1], "guess")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", range(1, 9))
def test_a_stop_ends_the_text_at_the_token_that_completes_it(name, length):
    """`stop` sees every beginning of the text, one token longer each time, up to where it ends."""
    seen = []

    def stop(new):
        seen.append(list(new))
        return len(new) == length

    assert run(name, 12, stop=stop) == LONG[:length]
    assert seen == [LONG[: i + 1] for i in range(length)]


def test_several_end_tokens_and_none():
    assert run("mixed", 20, eos=LONG[5:9]) == expected_until(LONG[5:9])
    assert run("mixed", 20, eos=None) == LONG[:20]


@pytest.mark.parametrize("name", NAMES)
def test_token_0_is_a_token_like_any_other(name):
    """B21, B23: generated, guessed, accepted; and no padding that a short path runs into."""

    def logits_of(tokens):  # after 3, only 0s; the model's own weights play no part here
        return torch.eye(SMALL.V, dtype=torch.float64)[0] * 9

    zeros = Table(logits_of)
    rounds = list(speculate(zeros, Told(lambda _, room: chain([0, 0, 0]).cut(room)), [3], 9))
    assert [token for r in rounds for token in r.tokens] == [0] * 9
    assert [len(r.accepted) for r in rounds] == [3, 3, 0]
    # a tree whose shortest path is right: nothing beyond it is counted as accepted
    tree = Draft([0, 5, 6], [-1, -1, 1])
    first = next(iter(speculate(zeros, Told(lambda *_: tree), [3], 9)))
    assert (first.accepted, first.tokens) == ([0], [0, 0])
    assert 0 in PROMPT and run(name, 3, prompt=[0, 0]) == generate_naive(MODEL, [0, 0], 3)


# Rounds and what a run came to


@pytest.mark.parametrize(
    ("accepted", "last"), [(0, "correction"), (1, "correction"), (2, "correction"), (3, "bonus")]
)
def test_a_round_says_what_its_last_token_is(accepted, last):
    r = words([accepted])[0]
    assert (r.accepted, r.last) == (list(range(accepted)), last)
    assert r.tokens == LONG[: accepted + 1]


def test_a_round_without_a_draft_is_plain():
    assert [r.last for r in words([None], budget=3)] == ["plain"] * 3


def test_the_tally_adds_up():
    tally = Tally()
    for r in (rounds := words([3, 0, None, 2], budget=18)):
        tally.add(r)
    assert tally.rounds == len(rounds)
    assert tally.tokens == sum(len(r.tokens) for r in rounds) == 18
    assert tally.drafted == sum(len(r.draft) for r in rounds)
    assert tally.accepted == sum(len(r.accepted) for r in rounds)
    assert sum(tally.by_length.values()) == tally.rounds
    assert sum(k * n for k, n in tally.by_length.items()) == tally.accepted
    assert tally.tokens_per_round == 18 / len(rounds)


def test_acceptance_counts_the_guesses_that_were_tried():
    """Of 3, 0 and 2 accepted from drafts of three, 3 + 1 + 3 were tried: 5/7, not 5/9."""
    tally = Tally()
    for r in words([3, 0, None, 2], budget=40 - len(PROMPT))[:4]:
        tally.add(r)
    assert (tally.accepted, tally.tried, tally.drafted) == (5, 7, 9)
    assert tally.acceptance == 5 / 7


def test_a_guess_after_which_the_text_ended_was_tried_and_one_behind_it_was_not():
    tally = Tally()
    tally.add(Round(chain([1, 2, 3]), [0, 1], [1, 2], "guess"))
    assert (tally.tried, tally.accepted) == (2, 2)


def test_an_empty_tally_has_rates_of_zero():
    assert Tally().acceptance == Tally().tokens_per_round == 0.0


def test_generate_adds_to_the_tally_it_is_given():
    tally = Tally()
    for _ in range(2):
        run("right", 8, tally=tally)
    assert (tally.rounds, tally.tokens, tally.acceptance) == (4, 16, 1.0)


# Caches


def check_invariants(reader, drafter, prompt, rounds, small=None):
    """Through all rounds; `small` is the draft model's own reader."""
    sequence = list(prompt)
    for r in rounds:
        before = len(sequence)
        sequence += r.tokens
        assert_reader_holds(reader, sequence[:-1])
        if small is not None:
            to_its_end = bool(len(r.draft)) and len(r.accepted) == len(r.draft)
            n = len(sequence)
            if len(r.draft):
                assert len(small) == (n - 2 if to_its_end and r.last == "bonus" else n - 1)
            assert_reader_holds(small, sequence[: len(small)])
        if isinstance(drafter, EagleDrafter) and len(r.draft):
            assert len(drafter) == before - 1  # only what the target had read
    return sequence[len(prompt) :]


@pytest.mark.parametrize("accepted", PAIRS)
def test_the_target_holds_all_but_the_newest_token_for_every_number_accepted(accepted):
    reader, drafter = Reader(MODEL, 40), Foreseeing(MODEL, accepted, GAMMA)
    rounds = speculate(reader, drafter, PROMPT, 11)
    assert check_invariants(reader, drafter, PROMPT, rounds) == LONG[:11]


class Steered(ModelDrafter):
    """A draft model whose guesses are right exactly so often: it reads what it was told to say.

    numbers: guesses a round, and how many of them come true; 0 guesses is a round without a draft.
    """

    def __init__(self, reader, numbers):
        super().__init__(reader, 1)
        self.numbers = itertools.cycle(numbers)

    def propose(self, tokens, room, chance):
        gamma, accepted = next(self.numbers)
        if not min(gamma, room):
            return NOTHING
        self.gamma = gamma
        says = iter(Foreseeing(MODEL, [accepted], gamma)._guess(list(tokens), room).tokens)
        real = self.model

        def model(sequence):
            real(sequence)  # it reads as ever
            return torch.eye(SMALL.V)[[next(says)]]

        self.model = model
        try:
            return super().propose(tokens, room, chance)
        finally:
            self.model = real


@pytest.mark.parametrize("accepted", PAIRS)
def test_target_and_draft_hold_what_they_should_for_every_number_accepted(accepted):
    reader, small = Reader(MODEL, 40), Reader(early_exit(MODEL, 2), 40)
    drafter = Steered(small, [(GAMMA, k) for k in accepted])
    rounds = speculate(reader, drafter, PROMPT, 11)
    assert check_invariants(reader, drafter, PROMPT, rounds, small) == LONG[:11]


@pytest.mark.parametrize("last_accepted", range(4))
@pytest.mark.parametrize("first_accepted", range(4))
def test_a_round_without_a_draft_leaves_the_draft_model_to_catch_up(first_accepted, last_accepted):
    """A2.25: guesses 3, 0, 3. The middle round feeds the draft model nothing; the next does."""
    reader, small = Reader(MODEL, 40), Reader(early_exit(MODEL, 2), 40)
    drafter = Steered(small, [(3, first_accepted), (0, 0), (3, last_accepted)])
    rounds = speculate(reader, drafter, PROMPT, 13)
    assert check_invariants(reader, drafter, PROMPT, rounds, small) == LONG[:13]


@pytest.mark.parametrize("place", range(3))
def test_an_end_inside_a_block_leaves_caches_of_all_but_the_newest_token(place):
    reader, small = Reader(MODEL, 40), Reader(early_exit(MODEL, 2), 40)
    drafter = Steered(small, [(3, 3)])
    start = next(i for i in range(20) if len(set(LONG[i : i + 4])) == 4)
    prompt = PROMPT + LONG[:start]
    rounds = speculate(reader, drafter, prompt, 13, eos=LONG[start + place])
    new = check_invariants(reader, drafter, prompt, rounds, small)
    assert new == LONG[start : start + place + 1]


@pytest.mark.parametrize("sampling", [GREEDY, WARM, Sampling(temperature=0.7, top_p=0.8)])
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_leaves_caches_as_they_should_be(name, sampling):
    for seed in range(2):
        reader = Reader(MODEL, 64)
        drafter = drafters(MODEL, sampling)[name](reader)
        small = drafter.model if isinstance(drafter, ModelDrafter) else None
        chance = Chance(torch.Generator().manual_seed(seed))
        rounds = speculate(reader, drafter, PROMPT, 12, sampling=sampling, chance=chance)
        assert len(check_invariants(reader, drafter, PROMPT, rounds, small)) == 12


class Coin(Chance):
    """Accepts as it is told, where it can, and draws the likeliest."""

    def __init__(self, flips):
        self.flips = flips

    def happens(self, probability):
        return 0 < probability and (probability >= 1 or self.flips())

    def draw(self, p_V):
        return int(p_V.argmax())


@FEW
@given(st.data())
def test_caches_are_right_whatever_happens(data):
    """Random trees of drawn guesses, any of them accepted or rejected."""

    def guess(tokens, room):
        tree = random_tree(lambda low, high: data.draw(st.integers(low, high)), SMALL.V, most=5)
        return Draft(tree.tokens, tree.parents, [torch.full((SMALL.V,), 1 / SMALL.V)] * len(tree))

    reader, drafter = Reader(MODEL, 40), Told(guess)
    coin = Coin(lambda: data.draw(st.booleans()))
    rounds = speculate(reader, drafter, PROMPT, 7, sampling=WARM, chance=coin)
    assert len(check_invariants(reader, drafter, PROMPT, rounds)) == 7


def test_logits_after_many_rollbacks_are_those_of_a_fresh_forward():
    """A2.24: no rounding or leftover piles up over thirty rounds."""
    reader = Reader(MODEL, 64)
    list(speculate(reader, Foreseeing(MODEL, [0, 2, 1, 3, 0]), PROMPT, 50))
    tokens = [*reader.tokens, 4]
    torch.testing.assert_close(reader(tokens)[0], fresh_logits(MODEL, tokens), atol=ATOL, rtol=0)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_sequences_that_take_turns_do_not_disturb_one_another(order):
    """A1.12 for readers: batch slots don't exist here, but several sequences do."""
    prompts = [PROMPT, [1, 2], [7, 7, 7, 1]]
    runs = [
        stream_speculative(MODEL, drafters(MODEL, GREEDY)[name], prompt, 9)
        for name, prompt in zip(["eagle", "medusa", "early exit"], prompts, strict=True)
    ]
    said = [[] for _ in prompts]
    waiting = list(order)
    while waiting:
        which = waiting.pop(0)
        r = next(runs[which], None)
        if r is not None:
            said[which] += r.tokens
            waiting.append(which)
    assert said == [generate_naive(MODEL, prompt, 9) for prompt in prompts]


# Chance


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_repeats_a_run_and_its_generator_moves_on(name):
    """B21: one seed doesn't start every draw anew."""

    def sampled(generator):
        return run(name, 12, WARM, generator=generator)

    first = sampled(torch.Generator().manual_seed(0))
    assert sampled(torch.Generator().manual_seed(0)) == first
    going_on = torch.Generator().manual_seed(0)
    assert sampled(going_on) == first
    assert sampled(going_on) != first


def test_every_draw_of_a_run_is_a_number_of_its_own():
    """B21: the uniforms behind acceptance all differ."""
    seen = []

    class Watched(Chance):
        def happens(self, probability):
            before = self.generator.get_state()
            u = torch.rand((), dtype=torch.float64, generator=self.generator).item()
            self.generator.set_state(before)
            seen.append(u)
            return super().happens(probability)

    chance = Watched(torch.Generator().manual_seed(0))
    small = Reader(early_exit(MODEL, 2), 64)
    drafter = ModelDrafter(small, 3, WARM)
    list(speculate(Reader(MODEL, 64), drafter, PROMPT, 40, sampling=WARM, chance=chance))
    assert len(seen) > 15 and len(set(seen)) == len(seen)


def test_without_a_generator_torchs_own_is_used():
    torch.manual_seed(3)
    first = run("early exit", 8, WARM)
    torch.manual_seed(3)
    assert run("early exit", 8, WARM) == first


# What is refused


@pytest.mark.parametrize(
    ("prompt", "budget", "error", "message"),
    [
        ([], 3, PromptError, "empty"),
        ([23], 3, PromptError, "token 23 but the vocabulary is 0..22"),
        ([-1], 3, PromptError, "token -1"),
        ([1.5], 3, PromptError, "whole numbers"),
        ("text", 3, PromptError, "not a list of tokens"),
        ([1], -1, ValueError, "expected 0 or more"),
        ([1], 2.0, TypeError, "expected a whole number"),
        ([1], True, TypeError, "expected a whole number"),
        ([1] * 60, 5, PromptError, "ask for at most 4"),
    ],
)
def test_what_generate_refuses_is_refused_before_anything_is_computed(
    prompt, budget, error, message
):
    with pytest.raises(error, match=message):
        stream_speculative(MODEL, lambda reader: pytest.fail("drafted"), prompt, budget)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampling": 0.7}, TypeError, "expected Sampling"),
        ({"eos": "2"}, TypeError, "expected tokens"),
        ({"temperature": 0.7}, TypeError, "temperature"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        list(stream_speculative(MODEL, lambda reader: NgramDrafter(), PROMPT, 3, **options))


@pytest.mark.parametrize(
    ("prompt", "budget", "error", "message"),
    [
        ([], 2, PromptError, "the prompt is empty"),
        ([1], -1, ValueError, "max_new_tokens=-1"),
        ([1], 1.0, ValueError, "max_new_tokens=1.0"),
        ([1.5], 2, TypeError, "integer"),
        ([23], 2, ValueError, "the sequence holds tokens 23 to 23"),
    ],
)
def test_the_loop_by_itself_refuses_too(prompt, budget, error, message):
    with pytest.raises(error, match=message):
        list(speculate(Reader(MODEL, 16), NgramDrafter(), prompt, budget))


def test_a_drafter_on_the_features_of_another_reader_is_refused():
    """It would never draft, and nobody would know why nothing is faster."""
    reader, other = Reader(MODEL, 32), Reader(MODEL, 32)
    drafter = MedusaDrafter(other, small_medusa(MODEL), whole_vocabulary(MODEL), [(0,)])
    with pytest.raises(ValueError, match="MedusaDrafter drafts from the features of another"):
        list(speculate(reader, drafter, PROMPT, 4))


@pytest.mark.parametrize("V", [SMALL.V - 1, SMALL.V + 1])
def test_a_draft_model_with_another_vocabulary_is_refused(V):
    """Drawn guesses carry a q over the draft's vocabulary, which tells at once."""
    config = Config(D=24, F=40, K=2, G=3, H=6, L=1, V=V, max_context=64)
    drafter = ModelDrafter(Reader(small_model(2, config), 64), 3, WARM)
    with pytest.raises(ValueError, match="vocabulary"):
        list(speculate(Reader(MODEL, 64), drafter, PROMPT, 20, sampling=WARM))


def test_a_guess_outside_the_vocabulary_is_refused():
    for target in (Reader(MODEL, 32), Table(lambda tokens: torch.zeros(SMALL.V))):
        with pytest.raises(ValueError, match="23"):
            list(speculate(target, Told(lambda *_: chain([23])), PROMPT, 4))


def test_a_draft_wider_than_the_cache_was_made_for_is_refused():
    wide = Draft(list(range(9)), [-1] * 9)
    with pytest.raises(ValueError, match="a draft of 9 guesses, but width=6"):
        generate_speculative(MODEL, lambda _: Told(lambda *_: wide), PROMPT, 2, width=6)
    assert (
        generate_speculative(MODEL, lambda _: Told(lambda *_: wide), PROMPT, 2, width=9)
        == (LONG[:2])
    )


def test_a_draft_model_with_too_small_a_cache_is_refused():
    drafter = ModelDrafter(Reader(early_exit(MODEL, 2), 8), 3)
    with pytest.raises(ValueError, match="larger capacity"):
        list(speculate(Reader(MODEL, 64), drafter, PROMPT, 9))


def test_another_rule_of_acceptance_can_be_put_in():
    def nothing_is_accepted(logits_MV, draft, sampling, chance):
        return [], verify(logits_MV[:1], NOTHING, sampling, chance)[1]

    tally = Tally()
    assert run("right", 6, verify=nothing_is_accepted, tally=tally) == LONG[:6]
    assert (tally.rounds, tally.accepted) == (6, 0)
