"""What a guess is: chains and trees, their depths, paths and cuts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.speculative.draft import NOTHING, ROOT, Draft, chain

#      a        b
#    c   d      e
#            f
TREE = Draft([10, 11, 12, 13, 14, 15], [ROOT, ROOT, 0, 0, 1, 3])


@st.composite
def trees(draw):
    """Parents that come first; all tokens different, so that no sibling repeats."""
    parents = [ROOT]
    for node in range(1, draw(st.integers(1, 12))):
        parents.append(draw(st.integers(ROOT, node - 1)))
    return Draft(list(range(100, 100 + len(parents))), parents)


def test_depths_paths_and_children_of_a_tree():
    assert TREE.depths == [1, 1, 2, 2, 2, 3]
    assert TREE.path(5) == [0, 3, 5]
    assert TREE.path(ROOT) == []
    assert TREE.children == {ROOT: [0, 1], 0: [2, 3], 1: [4], 2: [], 3: [5], 4: [], 5: []}
    assert not TREE.is_chain


def test_a_chain_is_a_tree_without_alternatives():
    draft = chain([7, 7, 8])
    assert draft.parents == [ROOT, 0, 1]
    assert draft.q == [] or tuple(draft.q) == (None, None, None)
    assert draft.is_chain
    assert draft.path(2) == [0, 1, 2]
    assert len(draft) == 3


def test_no_guess_is_a_draft_too():
    assert len(NOTHING) == 0
    assert NOTHING.is_chain
    assert NOTHING.depths == []
    assert NOTHING.children == {ROOT: []}
    assert len(NOTHING.cut(0)) == 0
    assert len(chain([])) == 0


@settings(max_examples=40)
@given(trees())
def test_a_path_walks_down_from_the_sequence(tree):
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[-1] == node
        assert len(path) == tree.depths[node]
        assert [tree.parents[step] for step in path] == [ROOT, *path[:-1]]


@settings(max_examples=40)
@given(trees(), st.integers(0, 6))
def test_a_cut_keeps_the_shallow_guesses_and_who_they_follow(tree, depth):
    cut = tree.cut(depth)
    kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
    assert list(cut.tokens) == [tree.tokens[node] for node in kept]
    for i, node in enumerate(kept):  # tokens are different, so they name the nodes
        assert [cut.tokens[step] for step in cut.path(i)] == [
            tree.tokens[step] for step in tree.path(node)
        ]


def test_a_cut_keeps_the_very_distributions():
    """DeepSpec#31: what was drawn from and what is compared with must be one tensor."""
    q = [torch.full((4,), 0.25) for _ in range(5)]
    cut = Draft([0, 1, 2, 3, 0], [ROOT, 0, ROOT, 1, 2], q).cut(2)
    assert list(cut.parents) == [ROOT, 0, ROOT, 2]
    assert all(a is b for a, b in zip(cut.q, [q[0], q[1], q[2], q[4]], strict=True))


def test_what_needs_no_cut_is_left_alone():
    assert TREE.cut(3) is TREE
    assert TREE.cut(9) is TREE


@pytest.mark.parametrize(
    ("parents", "node"),
    [([ROOT, 1, 0], 1), ([0, ROOT, ROOT], 0), ([ROOT, 2, 0], 1), ([-2, 0, 0], 0)],
)
def test_a_parent_that_does_not_come_first_is_refused(parents, node):
    with pytest.raises(ValueError, match=f"node {node} follows node .*: parents come before"):
        Draft([1, 2, 3], parents)


@pytest.mark.parametrize(("parents", "q"), [([ROOT], ()), ([ROOT, 0], [None])])
def test_unequal_lengths_are_refused(parents, q):
    with pytest.raises(ValueError, match="a draft of 2 tokens has"):
        Draft([1, 2], parents, q)


def test_the_same_choice_twice_is_refused_but_drawn_twice_is_chance():
    with pytest.raises(ValueError, match="token 5 is guessed twice after node -1"):
        Draft([5, 5], [ROOT, ROOT])
    q_V = torch.full((6,), 1 / 6)
    assert len(Draft([5, 5], [ROOT, ROOT], [q_V, q_V])) == 2
    assert len(Draft([5, 5], [ROOT, 0])) == 2  # in different places it is fine
