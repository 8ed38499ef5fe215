"""Medusa: what the heads compute, which tree is best, and whose guesses stand where in it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import (
    MEDUSA_TREE,
    PROMPT,
    SMALL,
    assert_reader_holds,
    fresh_features,
    small_medusa,
    small_model,
    tree_logits,
    whole_vocabulary,
)

from lecture_util.model.config import Config
from lecture_util.model.generate import generate
from lecture_util.model.train import IGNORE
from lecture_util.model.transformer import Transformer
from lecture_util.speculative.draft import NOTHING
from lecture_util.speculative.medusa import (
    MedusaDrafter,
    MedusaHeads,
    best_tree,
    medusa_loss,
)
from lecture_util.speculative.speculate import Tally, generate_speculative, speculate
from lecture_util.speculative.target import Reader
from lecture_util.speculative.verify import Chance
from lecture_util.speculative.vocabulary import DraftVocabulary

MODEL = small_model()
HEADS = small_medusa(MODEL)


def propose(tokens, tree, room=9, heads=HEADS, vocabulary=None):
    """A draft after everything but the newest token was read, and the reader it came from."""
    reader = Reader(MODEL, 48)
    vocabulary = whole_vocabulary(MODEL) if vocabulary is None else vocabulary
    drafter = MedusaDrafter(reader, heads, vocabulary, tree)
    reader(tokens[:-1])
    return drafter.propose(tokens, room, Chance()), reader


# The heads


def test_new_heads_say_what_the_models_own_head_says():
    x_TD = fresh_features(MODEL, PROMPT)
    heads = MedusaHeads(SMALL.D, 3).to(torch.float64)
    with torch.inference_mode():
        assert torch.equal(heads(x_TD), x_TD[:, None].expand(-1, 3, -1))


def test_a_head_is_one_residual_layer():
    """x + SiLU(W x + b), head by head, for any leading axes."""
    heads = small_medusa(MODEL, seed=1)
    x = torch.randn(2, 5, SMALL.D, dtype=torch.float64)
    with torch.no_grad():
        heads.linear.bias.normal_()
    out = heads(x)
    assert out.shape == (2, 5, 3, SMALL.D)
    for k in range(3):
        W, b = (
            part.unflatten(0, (3, SMALL.D))[k] for part in (heads.linear.weight, heads.linear.bias)
        )
        y = x @ W.T + b
        torch.testing.assert_close(out[:, :, k], x + y * torch.sigmoid(y))


def test_the_loss_weighs_later_heads_less_and_leaves_out_what_it_is_told_to():
    torch.manual_seed(1)
    vocabulary = DraftVocabulary(MODEL.head, torch.tensor([0, 2, 3, 11, 19]))
    x_BD = torch.randn(6, SMALL.D, dtype=torch.float64)
    targets_BK = torch.randint(0, 5, (6, 3))
    targets_BK[1, 0] = targets_BK[4, 2] = targets_BK[5, 2] = IGNORE
    loss = 0.0
    for k in range(3):
        logs = [
            vocabulary(HEADS(x)[k]).float().log_softmax(-1)[target]
            for x, target in zip(x_BD, targets_BK[:, k].tolist(), strict=True)
            if target != IGNORE
        ]
        loss += 0.8**k * -sum(logs) / len(logs)
    torch.testing.assert_close(medusa_loss(HEADS, vocabulary, x_BD, targets_BK), loss)


# The tree


def every_tree(K, R, size):
    """All trees of so many nodes, none without its beginnings."""
    nodes = [path for k in range(1, K + 1) for path in itertools.product(range(R), repeat=k)]
    for tree in itertools.combinations(nodes, size):
        if all(len(path) == 1 or path[:-1] in tree for path in tree):
            yield tree


def expected_accepted(tree, accuracy):
    """By its meaning: over all outcomes of which rank of which head is right, if any is."""
    K, R = len(accuracy), len(accuracy[0])
    total = 0.0
    for outcome in itertools.product(range(R + 1), repeat=K):  # R: none of the ranks
        chance = 1.0
        for head, rank in enumerate(outcome):
            chance *= accuracy[head][rank] if rank < R else 1 - sum(accuracy[head])
        longest = max((len(p) for p in tree if p == outcome[: len(p)]), default=0)
        total += chance * longest
    return total


@pytest.mark.parametrize(("K", "R", "sizes"), [(1, 4, (1, 2, 4)), (2, 3, (1, 3, 5)),
                                               (3, 2, (2, 4, 6)), (2, 2, (6,))])  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_no_tree_of_its_size_accepts_more(K, R, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    accuracy_KR = torch.rand(K, R + 1, generator=generator, dtype=torch.float64)
    accuracy_KR = (accuracy_KR / accuracy_KR.sum(-1, keepdim=True))[:, :R]  # not sorted by rank
    accuracy = accuracy_KR.tolist()
    for size in sizes:
        tree = best_tree(accuracy_KR, size)
        assert len(set(tree)) == size
        best = max(expected_accepted(other, accuracy) for other in every_tree(K, R, size))
        assert expected_accepted(tree, accuracy) == pytest.approx(best)


def test_parents_come_before_children_and_ties_go_to_the_lower_rank():
    assert best_tree(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), 4) == [(0,), (0, 0), (1,), (1, 0)]


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_best_tree_has_every_paths_beginning(K, R, data):
    size = data.draw(st.integers(1, sum(R**k for k in range(1, K + 1))))
    accuracy_KR = torch.rand(K, R, generator=torch.Generator().manual_seed(size))
    tree = best_tree(accuracy_KR, size)
    for i, path in enumerate(tree):
        assert len(path) == 1 or path[:-1] in tree[:i]


@pytest.mark.parametrize("size", [0, -1, 13, 2.0, True])
def test_a_size_that_no_tree_has_is_refused(size):
    with pytest.raises(ValueError, match="2 heads of 3 ranks give 1 to 12 nodes"):
        best_tree(torch.full((2, 3), 0.3), size)


# The drafter


def test_a_node_holds_its_heads_guess_of_its_rank():
    """And its parent is the node of the path's beginning, in whatever order paths were given."""
    tokens = [*PROMPT, 9]
    x_D = fresh_features(MODEL, tokens)[len(tokens) - 2]  # the newest token was not read
    ranked_KV = whole_vocabulary(MODEL)(HEADS(x_D)).argsort(-1, descending=True).tolist()
    for tree in (MEDUSA_TREE, MEDUSA_TREE[::-1]):
        draft, _ = propose(tokens, tree)
        found = {}
        for node in range(len(draft)):
            parents = draft.path(node)
            found[node] = tuple(
                ranked_KV[depth].index(draft.tokens[at]) for depth, at in enumerate(parents)
            )
        assert sorted(found.values()) == sorted(MEDUSA_TREE)


def test_a_path_is_found_in_the_flat_list_of_all_guesses():
    """A2.30: the newest token, then 3 guesses a head; path (1, 2) ends at 2 + 3*1 + 1 = 6."""
    tokens, ranks = [*PROMPT, 9], 3
    tree = [(0,), (1,), (2,), (1, 0), (1, 1), (1, 2)]
    draft, reader = propose(tokens, tree)
    guesses_KR, _ = whole_vocabulary(MODEL).top(HEADS(reader.features_SD[len(PROMPT) - 1]), ranks)
    flat = [tokens[-1], *guesses_KR.flatten().tolist()]
    path = (1, 2)
    node = next(i for i in range(len(draft)) if draft.depths[i] == 2
                and draft.tokens[i] == flat[path[-1] + ranks * (len(path) - 1) + 1])  # fmt: skip
    assert draft.tokens[draft.parents[node]] == flat[path[0] + 1]


def test_a_draft_vocabulary_gives_its_own_tokens():
    ids_U = torch.tensor([2, 5, 7, 20])
    draft, _ = propose([*PROMPT, 9], MEDUSA_TREE, vocabulary=DraftVocabulary(MODEL.head, ids_U))
    assert len(draft) == len(MEDUSA_TREE) and set(draft.tokens) <= {2, 5, 7, 20}


@pytest.mark.parametrize("room", range(5))
def test_a_tree_is_cut_to_the_room_there_is(room):
    draft, _ = propose([*PROMPT, 9], MEDUSA_TREE, room)
    assert len(draft) == sum(len(path) <= room for path in MEDUSA_TREE)


@pytest.mark.parametrize("held", [[], PROMPT[:-2], PROMPT, [1, *PROMPT[1:-1]]])
def test_without_the_feature_of_the_token_before_there_is_no_draft(held):
    """Nothing read yet, too little, too much, or another text of the same length."""
    reader = Reader(MODEL, 48)
    drafter = MedusaDrafter(reader, HEADS, whole_vocabulary(MODEL), MEDUSA_TREE)
    if held:
        reader(held)
    assert drafter.propose(PROMPT, 9, Chance()) is NOTHING
    assert drafter.propose([4], 9, Chance()) is NOTHING


def test_every_path_of_the_tree_can_be_kept():
    """Logits after every node, and cache and features after every path, are those of a chain."""
    tokens = [*PROMPT, 9]
    for node in range(-1, len(MEDUSA_TREE)):
        draft, reader = propose(tokens, MEDUSA_TREE)
        torch.testing.assert_close(
            reader(tokens, draft), tree_logits(MODEL, tokens, draft), atol=1e-5, rtol=1e-5
        )
        path = draft.path(node)
        reader.keep(path)
        assert_reader_holds(reader, tokens + [draft.tokens[i] for i in path])


def test_features_after_a_kept_path_feed_the_next_guess():
    """The next draft is what a reader of just these tokens would draft."""
    tokens = [*PROMPT, 9]
    for node in range(-1, len(MEDUSA_TREE)):
        draft, reader = propose(tokens, MEDUSA_TREE)
        reader(tokens, draft)
        reader.keep(draft.path(node))
        longer = [*reader.tokens, 1]
        drafter = MedusaDrafter(reader, HEADS, whole_vocabulary(MODEL), MEDUSA_TREE)
        assert drafter.propose(longer, 9, Chance()) == propose(longer, MEDUSA_TREE)[0]


# A model that counts: token t is followed by t + 1, so what a right head says is known


def counting_model(V=12):
    """Features are the newest token, one-hot; the head adds one."""
    config = Config(D=V, F=8, K=1, G=1, H=4, L=1, V=V, max_context=64)
    model = Transformer.random(config, dtype=torch.float64)
    with torch.no_grad():
        model.blocks[0].out.weight.zero_()
        model.blocks[0].down.weight.zero_()
        model.embed.weight.copy_(torch.eye(V))
        model.head.weight.copy_(torch.eye(V).roll(1, 0))
    return model


def test_head_k_guesses_k_tokens_further_than_the_models_own():
    """Heads that add 1, 2, 3 more: all is accepted from the second round on, none if off by one."""
    model = counting_model()
    V = model.config.V
    for shift, accepted_share in ((1, 1.0), (0, 0.0), (2, 0.0)):
        heads = MedusaHeads(V, 3).to(torch.float64)
        with torch.no_grad():
            further = [100 * torch.eye(V).roll(k + shift, 0) for k in range(3)]
            heads.linear.weight.copy_(torch.cat(further))
        tally = Tally()
        output = generate_speculative(
            model,
            lambda reader, heads=heads: MedusaDrafter(
                reader, heads, whole_vocabulary(model), [(0,), (0, 0), (0, 0, 0)]
            ),
            [0, 1, 2], 13, tally=tally,
        )  # fmt: skip
        assert output == [i % V for i in range(3, 16)]
        assert tally.acceptance == accepted_share
    assert generate(model, [[0, 1, 2]], 13)[0] == output


def test_a_prompt_of_one_token_begins_without_a_draft():
    drafter = None

    def new_drafter(reader):
        nonlocal drafter
        drafter = MedusaDrafter(reader, HEADS, whole_vocabulary(MODEL), MEDUSA_TREE)
        return drafter

    assert generate_speculative(MODEL, new_drafter, [5], 9) == generate(MODEL, [[5]], 9)[0]
    first, second = itertools.islice(
        speculate(reader := Reader(MODEL, 48), new_drafter(reader), [5], 9), 2
    )
    assert first.draft == NOTHING and len(second.draft) == len(MEDUSA_TREE)


# What is refused


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], r"path \(0, 0, 0, 0\) is 4 deep but there are 3"),
        ([()], "is 0 deep"),
        ([(0,), (1, 0)], r"path \(1, 0\) without \(1,\)"),
        ([(23,)], "ranks go from 0 to 22"),
        ([(-1,)], "ranks go from 0 to 22"),
        ([(0.5,)], "ranks go from 0 to 22"),
        ([(0,), (0,)], "twice"),
    ],
)
def test_a_tree_that_cannot_be_filled_is_refused(tree, message):
    """A2.29: four levels for three heads is an error, not an index somewhere else."""
    with pytest.raises(ValueError, match=message):
        MedusaDrafter(Reader(MODEL, 48), HEADS, whole_vocabulary(MODEL), tree)


def test_ranks_end_with_the_draft_vocabulary():
    few = DraftVocabulary(MODEL.head, torch.tensor([1, 2, 3]))
    MedusaDrafter(Reader(MODEL, 48), HEADS, few, [(2,)])
    with pytest.raises(ValueError, match="ranks go from 0 to 2"):
        MedusaDrafter(Reader(MODEL, 48), HEADS, few, [(3,)])


def test_an_empty_tree_never_drafts():
    draft, _ = propose([*PROMPT, 9], [])
    assert len(draft) == 0
