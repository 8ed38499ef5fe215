"""What doesn't fit is refused, at once, with what came, what was expected and what to do."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_models import PROMPT, SMALL, Told, small_eagle, small_medusa, small_model

from lecture_util.model.sampling import GREEDY, Sampling
from lecture_util.speculative import trained
from lecture_util.speculative.block import verify_block
from lecture_util.speculative.draft import ROOT, Draft, chain
from lecture_util.speculative.draft_model import ModelDrafter, early_exit
from lecture_util.speculative.expected import best_gamma, speedup
from lecture_util.speculative.medusa import best_tree
from lecture_util.speculative.ngram import NgramDrafter, lookup
from lecture_util.speculative.speculate import (
    generate_speculative,
    speculate,
    stream_speculative,
)
from lecture_util.speculative.target import Reader
from lecture_util.speculative.typical import verify_typical
from lecture_util.speculative.verify import Chance, verify

MODEL = small_model()
ONE = Sampling(temperature=1.0)
INF, NAN = math.inf, math.nan


def none_drafted(reader):
    return Told(lambda *_: pytest.fail("a round began"))


# Distributions


@pytest.mark.parametrize("rule", [verify, verify_block, verify_typical])
@pytest.mark.parametrize("sampling", [ONE, GREEDY])
@pytest.mark.parametrize(
    "q", [(2.0, -1.0, 0.5), (1.0, 1.0, 0.0), (1.5, -0.5, 0.0), (0.5, 0.4, 0.0), (0.5, NAN, 0.5),
          (0.5, INF, 0.5), (NAN, 0.5, 0.5)],
)  # fmt: skip
def test_a_q_that_is_no_distribution_is_refused(q, sampling, rule):
    """Logits, or weights that nobody normalised, would be accepted by wrong ratios in silence."""
    draft = chain([0], [torch.tensor(q)])
    with pytest.raises(ValueError, match=r"guess 0 has a q .*sums to .*pass probabilities"):
        rule(torch.zeros(2, 3), draft, sampling, Chance())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_a_q_is_added_up_in_enough_bits(dtype):
    """1024 times 1/1024; in bf16 a running sum would stop long before 1."""
    q_V = torch.full((1024,), 1 / 1024).to(dtype)
    if dtype == torch.int64:
        q_V[3] = 1
    verify(torch.zeros(2, 1024), chain([3], [q_V]), ONE, Chance())


@pytest.mark.parametrize("sampling", [ONE, GREEDY])
def test_a_row_that_allows_no_token_is_refused(sampling):
    logits_MV = torch.zeros(2, 3)
    logits_MV[1] = -INF
    with pytest.raises(ValueError, match="only -inf"):
        verify(logits_MV, chain([0]), sampling, Chance())


# Heads and draft models


@pytest.fixture
def heads(tmp_path, monkeypatch):
    """Both files of heads, for the small model, in place of the course's own."""
    facts = {"config": {name: getattr(SMALL, name) for name in "DVL"}, "accuracy": [[0.5, 0.2]]}
    for name, module in {"medusa": small_medusa(MODEL, 1), "eagle": small_eagle(MODEL)}.items():
        tensors = module.state_dict() | {"ids": torch.tensor([0, 3, 5])}
        save_file(tensors, tmp_path / f"{name}.safetensors", {"facts": json.dumps(facts)})
    monkeypatch.setattr(trained, "ASSETS", tmp_path)


@pytest.mark.parametrize("new", [trained.medusa_drafter, trained.eagle_drafter])
def test_heads_of_one_model_do_not_draft_for_another(heads, new):
    options = {"size": 2}
    for other in (small_model().half(), early_exit(MODEL, SMALL.L - 1), small_model(11)):
        with pytest.raises(ValueError, match="these heads were loaded for another model"):
            generate_speculative(other, new(MODEL, **options), PROMPT, 4)
    assert len(generate_speculative(MODEL, new(MODEL, **options), PROMPT, 4)) == 4


@pytest.mark.parametrize(
    "shape", [{"depth": 2000}, {"depth": 600, "width": 2}, {"size": 1025}, {"width": 4},
              {"depth": 0}, {"size": 2.0}],
)  # fmt: skip
def test_a_tree_out_of_bounds_is_refused_before_there_is_a_reader(heads, shape):
    with pytest.raises(ValueError, match=f"{next(iter(shape))}="):
        trained.eagle_drafter(MODEL, **shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((MODEL, 3), r"model is a Transformer.*Reader\(model, capacity\)"),
        ((None, 3), r"model is a NoneType.*Reader\(model, capacity\)"),
        ((Reader(MODEL, 16), 3, 0.7), "sampling is 0.7"),
        ((Reader(MODEL, 16), 3, None), "sampling is None"),
    ],
)
def test_a_draft_model_of_the_wrong_kind_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        ModelDrafter(*arguments)


def test_a_yes_is_no_number_of_layers():
    with pytest.raises(TypeError, match="layers=True"):
        early_exit(MODEL, True)


@pytest.mark.parametrize("latest", ["leftmost", 0, None])
def test_latest_is_yes_or_no(latest):
    with pytest.raises(ValueError, match="latest="):
        NgramDrafter(latest=latest)
    with pytest.raises(ValueError, match="latest="):
        lookup([1, 2, 1], latest=latest)


# The loop


@pytest.mark.parametrize(
    "new_drafter",
    [NgramDrafter(), NgramDrafter, ModelDrafter, lambda reader: None, lambda reader: NgramDrafter,
     None],
)  # fmt: skip
def test_what_makes_no_drafter_is_refused(new_drafter):
    with pytest.raises(TypeError, match=r"drafter is .*a function of the reader, such as lambda"):
        stream_speculative(MODEL, new_drafter, PROMPT, 4)


@pytest.mark.parametrize("new", [trained.medusa_drafter, trained.eagle_drafter])
def test_a_maker_that_nobody_called_is_refused(new):
    with pytest.raises(TypeError, match=r"model is a Reader: .* medusa_drafter\(model\)"):
        stream_speculative(MODEL, new, PROMPT, 4)


def test_a_class_that_takes_the_reader_is_a_function_of_it():
    class Mine(NgramDrafter):
        def __init__(self, reader):
            super().__init__()

    assert len(generate_speculative(MODEL, Mine, PROMPT, 4)) == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"generator": 0}, TypeError, "generator is 0"),
        ({"stop": "."}, TypeError, "stop is '.'"),
        ({"verify": None}, TypeError, "verify is None"),
        ({"sampling": {"temperature": 1}}, TypeError, "sampling is"),
        ({"width": -1}, ValueError, "width=-1: expected .* 0 to 64"),
        ({"width": 65}, ValueError, "width=65"),
        ({"width": 8.0}, ValueError, "width=8.0"),
        ({"width": True}, ValueError, "width=True"),
        ({"eos": "2"}, TypeError, "expected tokens"),
    ],
)
def test_options_are_looked_at_before_the_first_round(options, error, message):
    with pytest.raises(error, match=message):
        stream_speculative(MODEL, none_drafted, PROMPT, 4, **options)


def test_a_tally_and_a_chance_are_what_they_say():
    with pytest.raises(TypeError, match="tally is 0"):
        generate_speculative(MODEL, none_drafted, PROMPT, 4, tally=0)
    with pytest.raises(TypeError, match=r"chance is .*Chance\(generator\)"):
        speculate(Reader(MODEL, 16), none_drafted(None), PROMPT, 4, chance=torch.Generator())


@pytest.mark.parametrize("answer", [None, [3, 4]])
def test_what_a_drafter_returns_is_a_draft(answer):
    with pytest.raises(TypeError, match=r"propose returned .*expected a Draft"):
        generate_speculative(MODEL, lambda _: Told(lambda *_: answer), PROMPT, 4)


def test_a_tree_wider_than_the_room_for_it_is_refused_at_the_first_draft():
    """The budget leaves slots that it would fit into; later rounds would find them taken."""
    tree = Draft(list(range(9)), [ROOT] * 9)
    rounds = stream_speculative(MODEL, lambda _: Told(lambda *_: tree), PROMPT, 20, width=8)
    with pytest.raises(ValueError, match=r"a draft of 9 guesses, but width=8: pass width=9"):
        next(rounds)


def test_a_chain_always_finds_room():
    long = Told(lambda tokens, room: chain([1] * 30).cut(room))
    assert generate_speculative(MODEL, lambda _: long, PROMPT, 20, width=0) == (
        generate_speculative(MODEL, lambda _: NgramDrafter(), PROMPT, 20)
    )


# Drafts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.5], [ROOT]), r"tokens=\[1.5\]: expected a list of whole numbers"),
        (("a", [ROOT]), "tokens='a'"),
        ((5, [ROOT]), "tokens=5"),
        (([1], [0.0]), r"parents=\[0.0\]"),
        (([1], [ROOT], [[0.5, 0.5]]), "the q of node 0 is .*expected a tensor"),
    ],
)
def test_a_draft_of_the_wrong_kind_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        Draft(*arguments)


def test_tensors_of_tokens_and_of_distributions_are_taken_apart():
    q_KV = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    draft = chain(torch.tensor([1, 0]), q_KV)
    assert draft.tokens == [1, 0] and all(type(x) is int for x in draft.tokens)
    assert [q_V.tolist() for q_V in draft.q] == q_KV.tolist()
    with pytest.raises(ValueError, match="2 tokens has 2 parents and 1 dist"):
        chain([1, 0], q_KV[0])


@pytest.mark.parametrize("node", [-2, 2, 9])
def test_a_node_that_is_not_there_has_no_path(node):
    with pytest.raises(ValueError, match=f"node {node}: expected -1 to 1"):
        chain([4, 5]).path(node)


def test_a_cut_is_at_a_whole_depth():
    with pytest.raises(ValueError, match="depth=-1"):
        chain([4, 5]).cut(-1)
    with pytest.raises(TypeError, match="integer"):
        chain([4, 5]).cut(1.5)


# Choosing a tree, and a number of guesses


@pytest.mark.parametrize(
    "accuracy",
    [[[1.1]], [[-0.1]], [[NAN]], [0.5], [[[0.5]]], [[]]],
)
def test_accuracies_are_shares_of_heads_and_ranks(accuracy):
    with pytest.raises(ValueError, match="accuracy_KR"):
        best_tree(torch.tensor(accuracy), 1)
    with pytest.raises(ValueError, match="accuracy_KR is list"):
        best_tree(accuracy, 1)


def slow_tree(accuracy, size):
    """The best open node again and again, by looking through all of them."""
    K, R = len(accuracy), len(accuracy[0])
    nodes = {(r,): accuracy[0][r] for r in range(R)}
    tree = []
    while len(tree) < size:
        path = max(nodes, key=lambda node: (nodes[node], [-r for r in node]))
        value = nodes.pop(path)
        tree.append(path)
        if len(path) < K:
            nodes |= {(*path, r): value * accuracy[len(path)][r] for r in range(R)}
    return tree


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_the_heap_finds_the_same_tree_ties_included(K, R, data):
    few = st.sampled_from([0.0, 0.25, 0.5, 1.0])  # products tie, exactly
    row = st.lists(few, min_size=R, max_size=R)
    accuracy_KR = torch.tensor(data.draw(st.lists(row, min_size=K, max_size=K)))
    size = data.draw(st.integers(1, sum(R**k for k in range(1, K + 1))))
    assert best_tree(accuracy_KR, size) == slow_tree(accuracy_KR.tolist(), size)


@settings(max_examples=60)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 20), st.floats(0, 0.3))
def test_the_best_gamma_is_that_of_speedup(alpha, c, most, slope):
    def v(n):
        return 1 + slope * (n - 1)

    found = best_gamma(alpha, c, v, most)
    gains = [speedup(alpha, gamma, c, v(gamma + 1)) for gamma in range(most + 1)]
    assert gains[found] == pytest.approx(max(gains), rel=1e-12)
    assert all(gain < gains[found] * (1 + 1e-12) for gain in gains[:found])


@pytest.mark.parametrize("options", [{"c": -1.0}, {"c": NAN}, {"v": lambda n: 0.0}])
def test_costs_that_are_none_are_refused_by_best_gamma_too(options):
    with pytest.raises(ValueError, match="costs are in forwards"):
        best_gamma(0.5, **options)
    with pytest.raises(ValueError, match=r"alpha=1\.5"):
        best_gamma(1.5)
