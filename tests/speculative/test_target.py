"""A reader's logits, for chains and trees of guesses, are those of fresh forwards; so are its cache
and features after every rollback."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import (
    ATOL,
    PROMPT,
    SMALL,
    assert_reader_holds,
    fresh_logits,
    random_tree,
    small_model,
    tree_logits,
)

from lecture_util.model.attention import attention_by_hand
from lecture_util.model.kv_cache import CacheFull, KVCache
from lecture_util.speculative.draft import NOTHING, ROOT, Draft, chain
from lecture_util.speculative.target import (
    Reader,
    Table,
    TreeCache,
    common_beginning,
    tree_mask,
)

MODEL = small_model()
#       -1 ── 0 ── 2 ── 5
#         │    └── 3
#         └── 1 ── 4
TREE = Draft([4, 9, 11, 4, 0, 22], [-1, -1, 0, 0, 1, 2])


@st.composite
def trees(draw, most=9):
    return random_tree(lambda low, high: draw(st.integers(low, high)), SMALL.V, most)


def sequences(least=1, most=8):
    return st.lists(st.integers(0, SMALL.V - 1), min_size=least, max_size=most)


def close(a, b):
    torch.testing.assert_close(a, b, atol=ATOL, rtol=ATOL)


# Masks and positions


@given(trees())
def test_a_node_sees_its_ancestors_and_itself(tree):
    for node in range(len(tree)):
        ancestors, at = {node}, node
        while tree.parents[at] != ROOT:
            at = tree.parents[at]
            ancestors.add(at)
        seen = set(torch.nonzero(tree_mask(tree)[node]).flatten().tolist())
        assert seen == ancestors


def forward_mask(cache, T):
    """What the Transformer asks of a cache: positions, then a mask."""
    positions_T = cache.positions(torch.Size((1, T)), torch.device("cpu"))[0].tolist()
    return positions_T, cache.mask(T, cache.lengths[0] + T, torch.device("cpu"))


@given(st.integers(0, 5), st.integers(0, 3), trees())
def test_the_mask_is_what_the_tree_says_and_positions_are_depths(held, known, tree):
    """`held` tokens in the cache, then `known` more of the sequence and the tree in one forward."""
    T = known + len(tree)
    if T == 0:
        return
    cache = TreeCache(SMALL, 1, 64, torch.float64)
    cache.lengths = [held]
    cache.draft = tree
    positions, mask_BTS = forward_mask(cache, T)
    before = held + known
    assert positions == [*range(held, before), *(before + depth - 1 for depth in tree.depths)]
    if mask_BTS is None:
        assert tree.is_chain  # then causal is all there is to say
        return
    assert mask_BTS.shape == (1, T, before + len(tree))
    for t in range(T):
        if t < known:
            wanted = set(range(held + t + 1))
        else:
            wanted = set(range(before)) | {before + node for node in tree.path(t - known)}
        assert set(torch.nonzero(mask_BTS[0, t]).flatten().tolist()) == wanted


def test_the_mask_of_one_forward_is_gone_in_the_next():
    cache = TreeCache(SMALL, 1, 64, torch.float64)
    cache.draft = TREE
    assert forward_mask(cache, len(TREE))[1] is not None
    cache.draft = NOTHING
    assert forward_mask(cache, 2)[1] is None


class Blinkered(KVCache):
    """Every new token sees slot 0 and itself, and nothing else."""

    def mask(self, T, S, device):
        mask_TS = torch.zeros(T, S, dtype=torch.bool)
        mask_TS[:, 0] = True
        mask_TS[range(T), range(S - T, S)] = True
        return mask_TS[None]


@pytest.mark.parametrize("held", [0, 3])
def test_a_kv_cache_attends_through_its_own_mask(held):
    torch.manual_seed(0)
    cache = Blinkered(SMALL, 2, 16, torch.float64)
    k_BSKH, v_BSKH = torch.randn(2, 2, held + 4, SMALL.K, SMALL.H, dtype=torch.float64)
    q_BTNH = torch.randn(2, 4, SMALL.N, SMALL.H, dtype=torch.float64)
    if held:
        q_BSNH = torch.randn(2, held, SMALL.N, SMALL.H, dtype=torch.float64)
        cache.attend(1, q_BSNH, k_BSKH[:, :held], v_BSKH[:, :held])
        cache.extend(held)
    out_BTNH = cache.attend(1, q_BTNH, k_BSKH[:, held:], v_BSKH[:, held:])
    for t in range(4):
        seen = [0] if held + t == 0 else [0, held + t]
        wanted = attention_by_hand(q_BTNH[:, t : t + 1], k_BSKH[:, seen], v_BSKH[:, seen])
        close(out_BTNH[:, t : t + 1], wanted)


# Logits


@given(sequences(), trees(), st.integers(0, 8))
def test_logits_after_every_node_equal_fresh_forwards(tokens, tree, held):
    reader = Reader(MODEL, 32)
    if tokens[:held]:
        reader(tokens[:held])
    close(reader(tokens, tree), tree_logits(MODEL, tokens, tree))


def test_siblings_of_one_token_at_one_position_do_not_see_each_other():
    both = Draft([4, 9], [-1, -1])
    together = Reader(MODEL, 32)(PROMPT, both)
    close(together[1], Reader(MODEL, 32)(PROMPT, chain([4]))[1])
    close(together[2], Reader(MODEL, 32)(PROMPT, chain([9]))[1])


@given(trees(most=9), st.data())
def test_a_tree_read_in_parts_equals_a_tree_read_at_once(tree, data):
    """As EAGLE reads its own, level by level: the draft grows, only its newest nodes are run."""
    cache = TreeCache(SMALL, 1, 32, torch.float64)
    with torch.inference_mode():
        MODEL.features(torch.tensor([PROMPT]), cache)
        parts, done = [], 0
        while done < len(tree):
            end = data.draw(st.integers(done + 1, len(tree)))
            cache.draft = Draft(tree.tokens[:end], tree.parents[:end])
            parts.append(MODEL(torch.tensor([tree.tokens[done:end]]), cache)[0])
            done = end
    if parts:
        close(torch.cat(parts), tree_logits(MODEL, PROMPT, tree)[1:])


def test_the_table_of_a_function_asks_it_for_the_sequence_and_every_path():
    asked = []

    def logits_of(tokens):
        asked.append(tokens)
        return torch.tensor([float(len(tokens)), float(tokens[-1])])

    logits_MV = Table(logits_of)([1, 2], TREE)
    assert asked == [
        [1, 2], [1, 2, 4], [1, 2, 9], [1, 2, 4, 11], [1, 2, 4, 4], [1, 2, 9, 0], [1, 2, 4, 11, 22],
    ]  # fmt: skip
    assert logits_MV.tolist() == [[float(len(t)), float(t[-1])] for t in asked]


# Rollback


@pytest.mark.parametrize("node", range(-1, len(TREE)))
def test_after_any_accepted_path_the_reader_is_one_that_never_saw_the_rest(node):
    reader = Reader(MODEL, 32)
    reader(PROMPT, TREE)
    path = TREE.path(node)
    reader.keep(path)
    assert_reader_holds(reader, PROMPT + [TREE.tokens[i] for i in path])


@pytest.mark.parametrize("accepted", range(5))
def test_after_any_number_of_a_chain_the_reader_is_one_that_never_saw_the_rest(accepted):
    """A2.24: rolled back, not reset: what was read stays."""
    reader = Reader(MODEL, 32)
    guesses = chain([4, 9, 11, 0])
    reader(PROMPT, guesses)
    reader.keep(range(accepted))
    assert_reader_holds(reader, PROMPT + guesses.tokens[:accepted])


def test_rolling_back_moves_nothing_that_was_read_before():
    """A2.26: what is kept is as long as what was accepted, and the slots before are untouched."""
    reader = Reader(MODEL, 32)
    reader(PROMPT)
    before = reader.cache.k_LBSKH[:, :, : len(PROMPT)].clone()
    reader(PROMPT, TREE)
    read_again = before[:, :, :-1]  # the newest token is read once more with the draft
    assert torch.equal(reader.cache.k_LBSKH[:, :, : len(PROMPT) - 1], read_again)
    reader.keep([1, 4])
    assert len(reader) == len(PROMPT) + 2
    assert torch.equal(reader.cache.k_LBSKH[:, :, : len(PROMPT) - 1], read_again)


@given(st.data())
def test_any_rounds_leave_what_a_fresh_reader_would_hold(data):
    """Guess, keep some path, add a token of one's own, sometimes go back or to another text."""
    reader, tokens = Reader(MODEL, 64), data.draw(sequences())
    for _ in range(data.draw(st.integers(1, 4))):
        tree = data.draw(trees(most=5))
        close(reader(tokens, tree), tree_logits(MODEL, tokens, tree))
        path = tree.path(data.draw(st.integers(-1, len(tree) - 1)))
        what = data.draw(st.sampled_from(["keep", "keep", "forget", "rewind", "restart"]))
        if what == "forget":  # nobody says what came true: nothing did
            tokens = [*tokens, data.draw(st.integers(0, SMALL.V - 1))]
            continue
        reader.keep(path)
        held = tokens + [tree.tokens[node] for node in path]
        assert_reader_holds(reader, held)
        tokens = [*held, data.draw(st.integers(0, SMALL.V - 1))]
        if what == "rewind":
            cut = data.draw(st.integers(0, len(held)))
            reader.rewind(tokens[:cut])
            assert_reader_holds(reader, tokens[:cut])
        if what == "restart":
            tokens = data.draw(sequences())


def test_what_was_read_is_not_read_again(monkeypatch):
    """A2.24: rolled back, not reset. A forward is over the newest token and the draft."""
    widths = []
    whole = MODEL.features

    def features(tokens_BT, cache):
        widths.append(tokens_BT.shape[1])
        return whole(tokens_BT, cache)

    monkeypatch.setattr(MODEL, "features", features)
    reader = Reader(MODEL, 32)
    tokens = list(PROMPT)
    for path in ([0, 2, 5], [], [1]):
        reader(tokens, TREE)
        reader.keep(path)
        tokens = [*reader.tokens, 7]
    reader(tokens)
    reader([*PROMPT[:4], 8])
    assert widths == [len(PROMPT) + len(TREE), 1 + len(TREE), 1 + len(TREE), 1, 1]


def test_another_sequence_goes_back_to_the_common_beginning():
    reader = Reader(MODEL, 32)
    reader(PROMPT)
    other = [*PROMPT[:3], 8, 1]
    reader.rewind(other)
    assert_reader_holds(reader, PROMPT[:3])
    close(reader(other)[0], fresh_logits(MODEL, other))
    assert common_beginning([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_beginning([], [1]) == 0


def test_a_draft_nobody_settled_leaves_nothing():
    reader = Reader(MODEL, 32)
    reader(PROMPT, TREE)
    reader.rewind([*PROMPT, TREE.tokens[0], TREE.tokens[1]])  # neighbours in the cache: siblings
    assert_reader_holds(reader, PROMPT)


def test_the_same_sequence_twice_gives_the_same_logits():
    reader = Reader(MODEL, 32)
    assert torch.equal(reader(PROMPT), Reader(MODEL, 32)(PROMPT))
    close(reader(PROMPT)[0], fresh_logits(MODEL, PROMPT))
    assert len(reader) == len(PROMPT)


# What is refused


@pytest.mark.parametrize(
    ("tokens", "draft", "error", "words"),
    [
        ([], NOTHING, ValueError, "sequence is empty"),
        ([1, 23], NOTHING, ValueError, "the sequence holds tokens 1 to 23 but the vocabulary is"),
        ([1, -1], NOTHING, ValueError, "the sequence holds tokens -1 to 1"),
        ([1], chain([2, 23]), ValueError, "the draft holds tokens 2 to 23"),
        ([1] * 9, NOTHING, CacheFull, "larger capacity"),
        ([1] * 6, chain([2] * 3), CacheFull, "larger capacity"),
    ],
)
def test_what_cannot_be_read_is_refused_and_changes_nothing(tokens, draft, error, words):
    reader = Reader(MODEL, 8)
    reader([1, 1, 1])
    with pytest.raises(error, match=words):
        reader(tokens, draft)
    held = reader.tokens
    assert held == [1, 1, 1][: len(held)]
    assert_reader_holds(reader, held)
    close(reader([1, 5, 2])[0], fresh_logits(MODEL, [1, 5, 2]))


def test_a_full_reader_reads_to_its_last_slot():
    reader = Reader(MODEL, 9)
    close(reader(PROMPT, chain([1, 2, 3])), tree_logits(MODEL, PROMPT, chain([1, 2, 3])))


@pytest.mark.parametrize("path", [[1, 2], [2], [0, 1], [0, 2, 3], [6], [-1], [5, 2, 0]])
def test_only_a_path_of_the_last_draft_can_be_kept(path):
    reader = Reader(MODEL, 32)
    reader(PROMPT, TREE)
    with pytest.raises(ValueError, match="from a first guess down"):
        reader.keep(path)
    reader.keep([0, 2])
    with pytest.raises(ValueError, match="last draft, of 0 guesses"):
        reader.keep([0])
