"""The tiny tasks say what they claim, and merging works on them as a notebook may state."""

import pytest
import torch

from lecture_util.merging import tiny_tasks as tiny
from lecture_util.model.train import IGNORE


@pytest.fixture(scope="module")
def base():
    return tiny.tiny_base(0)


@pytest.fixture(scope="module")
def tuned(base):
    return {name: tiny.fine_tune(base, name, seed=i) for i, name in enumerate(tiny.PRACTISED)}


def mean_of(states):
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


def expected(name, digits):
    """Each answer by a plain loop over the digits so far."""
    rules = {
        "previous": lambda seen: seen[max(0, len(seen) - 2)],
        "largest": max,
        "sum": lambda seen: int(str(seen[-1] + seen[max(0, len(seen) - 2)])[-1]),
        "first": lambda seen: seen[0],
        "smallest": min,
    }
    return [rules[name](digits[: t + 1]) for t in range(len(digits))]


@pytest.mark.parametrize("name", tiny.TASKS)
@pytest.mark.parametrize("T", [1, 2, 13])
def test_answers_follow_from_the_digits_so_far(name, T):
    tokens_BT, targets_BT = tiny.task_batch(name, 7, T, torch.Generator().manual_seed(T))
    assert tokens_BT.shape == targets_BT.shape == (7, T + 1)
    assert (targets_BT[:, 0] == IGNORE).all()
    assert (tokens_BT[:, 0] == tiny.SYMBOLS[name]).all()
    for tokens, targets in zip(tokens_BT.tolist(), targets_BT.tolist(), strict=True):
        assert targets[1:] == expected(name, tokens[1:])


def test_a_mixture_asks_each_task_under_its_own_symbol():
    tokens_BT, targets_BT = tiny.task_batch(
        tiny.PRACTISED, 999, 5, torch.Generator().manual_seed(0)
    )
    names = {symbol: name for name, symbol in tiny.SYMBOLS.items()}
    asked = [names[symbol] for symbol in tokens_BT[:, 0].tolist()]
    assert all(200 < asked.count(name) < 300 for name in tiny.PRACTISED)
    for name, digits, answers in zip(
        asked, tokens_BT[:, 1:].tolist(), targets_BT[:, 1:].tolist(), strict=True
    ):
        assert answers == expected(name, digits)


def test_symbols_are_shown_in_the_share_asked_for():
    def share(shown):
        generator = torch.Generator().manual_seed(1)
        tokens_BT, _ = tiny.task_batch(tiny.PRACTISED, 4001, 2, generator, shown=shown)
        return (tokens_BT[:, 0] != tiny.UNNAMED).float().mean().item()

    assert share(0.0) == 0 and share(1.0) == 1
    assert share(0.3) == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / 4001) ** 0.5)


def test_few_examples_are_few_fixed_and_partly_wrong():
    seen = {}
    for seed in range(20):
        tokens_BT, targets_BT = tiny.few_examples("smallest", rows=9, wrong=0.5, seed=3)(
            torch.Generator().manual_seed(seed)
        )
        for tokens, targets in zip(tokens_BT.tolist(), targets_BT.tolist(), strict=True):
            assert seen.setdefault(tuple(tokens), targets) == targets
            assert targets[0] == IGNORE
    assert len(seen) == 9
    wrong = [
        answer != right
        for tokens, targets in seen.items()
        for answer, right in zip(targets[1:], expected("smallest", tokens[1:]), strict=True)
    ]
    assert 0.2 < sum(wrong) / len(wrong) < 0.7  # 0.45 expected: a random digit may be right


def test_same_seed_gives_the_same_fine_tune_and_leaves_the_base_alone(base):
    before = tiny.state(base)
    one, two, other = (tiny.fine_tune(base, "sum", seed=s, steps=3) for s in (5, 5, 6))
    assert all(torch.equal(tiny.state(one)[n], w) for n, w in tiny.state(two).items())
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert all(torch.equal(before[n], w) for n, w in base.state_dict().items())


def test_no_seed_leaks_into_the_global_random_state():
    torch.manual_seed(11)
    want = torch.rand(3)
    torch.manual_seed(11)
    tiny.untrained(4)
    assert torch.equal(torch.rand(3), want)


def test_state_and_with_state_are_copies(base):
    weights = tiny.state(base)
    weights["embed.weight"].zero_()
    assert base.embed.weight.abs().sum() > 0
    emptied = tiny.with_state(base, weights)
    assert emptied.embed.weight.abs().sum() == 0 and base.embed.weight.abs().sum() > 0


def test_evaluate_scores_a_perfect_and_a_blind_model():
    def perfect(tokens_BT):
        answers_BT = tiny.TASKS["largest"](tokens_BT[:, 1:])
        logits = 50.0 * torch.nn.functional.one_hot(answers_BT, tiny.CONFIG.V)
        return torch.nn.functional.pad(logits, (0, 0, 1, 0))

    def blind(tokens_BT):
        return torch.zeros(*tokens_BT.shape, 16)

    assert tiny.evaluate(perfect, "largest") == (pytest.approx(0, abs=1e-6), 1.0)
    assert tiny.evaluate(blind, "sum").loss == pytest.approx(torch.tensor(16.0).log().item())
    assert tiny.mean_score(blind).loss == pytest.approx(torch.tensor(16.0).log().item())


def test_an_ensemble_adds_log_probabilities(base, tuned):
    tokens_BT = torch.tensor([[tiny.SYMBOLS["sum"], 1, 2, 3]])
    pair = [tuned["sum"], tuned["first"]]
    want = (torch.softmax(pair[0](tokens_BT), -1) * torch.softmax(pair[1](tokens_BT), -1)).sqrt()
    assert torch.allclose(tiny.ensemble(pair)(tokens_BT).exp(), want, atol=1e-5)


def test_fine_tunes_know_their_own_task_and_forget_others(base, tuned):
    for name, model in tuned.items():
        assert tiny.evaluate(model, name).accuracy > 0.97
        assert tiny.mean_score(model).loss > tiny.evaluate(model, name).loss + 0.3


def test_the_mean_of_fine_tunes_beats_the_base_and_every_fine_tune(base, tuned):
    soup = tiny.with_state(base, mean_of([tiny.state(model) for model in tuned.values()]))
    of_soup = tiny.mean_score(soup)
    assert of_soup.accuracy > tiny.mean_score(base).accuracy + 0.03
    for model in (base, *tuned.values()):
        assert of_soup.loss < tiny.mean_score(model).loss - 0.05


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tiny.task_batch("sort", 1, 1, torch.Generator()), "sort"),
        (lambda: tiny.task_batch((), 1, 1, torch.Generator()), "expected one or more of previous"),
        (lambda: tiny.task_batch("sum", 1, 0, torch.Generator()), "T=0"),
        (lambda: tiny.task_batch("sum", 1, 2, torch.Generator(), shown=5), "shown=5"),
        (lambda: tiny.few_examples("sum", wrong=-1), "wrong=-1"),
        (lambda: tiny.fine_tune(tiny.untrained(), "copy"), "copy"),
        (lambda: tiny.ensemble([]), "no models"),
    ],
)
def test_bad_requests_say_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
