"""Pages are found by their tokens and all that came before, whatever the hash says."""

import itertools

import pytest

from lecture_util.serving.blocks import Blocks
from lecture_util.serving.prefix import PrefixCache, digest


def same_name(before, tokens):
    return b""


DIGESTS = pytest.mark.parametrize("digest", [digest, same_name])


def put(cache, first_page, tokens, page_size, space=()):
    text = cache.root(space)
    for page, start in enumerate(range(0, len(tokens) - page_size + 1, page_size), first_page):
        text = cache.link(text, tuple(tokens[start : start + page_size]))
        cache.put(page, text)


def pages(cache, tokens, page_size, space=()):
    return [page for page, _ in cache.match(space, tokens, page_size)]


@DIGESTS
def test_tokens_that_python_hashes_alike_are_told_apart(digest):
    """vllm#12621: keys made by `hash` collide, and one user is served what another's text made."""
    assert hash((-1,)) == hash((-2,))
    cache = PrefixCache(digest)
    put(cache, 0, [-1], 1)
    assert pages(cache, [-1, 0], 1) == [0] and pages(cache, [-2, 0], 1) == []


@DIGESTS
def test_an_adapter_and_a_salt_of_one_name_share_nothing(digest):
    """vllm#44701: both went into one key space without a tag."""
    cache = PrefixCache(digest)
    spaces = [
        (),
        ("adapter", "x"),
        ("salt", "x"),
        ("adapter", "x", "salt", "x"),
        ("x",),
        ("space",),
    ]
    for number, space in enumerate(spaces):
        put(cache, 10 * number, [1, 2], 1, space)
    for number, space in enumerate(spaces):
        assert pages(cache, [1, 2, 3], 1, space) == [10 * number, 10 * number + 1]
    assert pages(cache, [1, 2, 3], 1, ("adapter", "y")) == []


def test_a_space_must_be_a_tuple():
    """A string is taken letter by letter, so "ab" would share pages with ("a", "b")."""
    with pytest.raises(TypeError, match="space='ab': expected a tuple of words"):
        Blocks(2, 2).begin([1, 2, 3], "ab")


@DIGESTS
def test_an_equal_page_after_another_beginning_is_not_a_hit(digest):
    """Comparing a page's own tokens is not enough: its keys depend on all before."""
    cache = PrefixCache(digest)
    put(cache, 0, [1, 2, 3, 4], 2)
    assert pages(cache, [1, 2, 3, 4, 0], 2) == [0, 1]
    assert pages(cache, [9, 2, 3, 4, 0], 2) == []
    put(cache, 10, [9, 9], 2)
    assert pages(cache, [9, 9, 3, 4, 0], 2) == [10]
    assert pages(cache, [3, 4, 0], 2) == []  # nor at another position


@DIGESTS
def test_one_text_in_two_pages_survives_the_loss_of_one(digest):
    """kvcached#401: equal prompts started together; the entry of both went with the first."""
    for lost, kept in ((0, 10), (10, 0)):
        cache = PrefixCache(digest)
        put(cache, 0, [1, 2], 2)
        put(cache, 10, [1, 2], 2)
        cache.drop(lost, cache.by_name[next(iter(cache.by_name))][lost])
        assert pages(cache, [1, 2, 3], 2) == [kept]


@DIGESTS
def test_groups_of_other_page_sizes_share_nothing(digest):
    """kvcached#446: pages of 2 and of 4 tokens over one text of 8, in one cache."""
    cache = PrefixCache(digest)
    tokens = list(range(8))
    put(cache, 0, tokens, 2)
    put(cache, 100, tokens, 4)
    assert pages(cache, [*tokens, 9], 2) == [0, 1, 2, 3]
    assert pages(cache, [*tokens, 9], 4) == [100, 101]


def test_cutting_tokens_otherwise_gives_other_names():
    """(1, 23), (12, 3) and (1, 2, 3): digits run together must not make one name."""
    cuts = [[(1, 23)], [(12, 3)], [(1, 2, 3)], [(123,)], [(1,), (23,)], [(1,), (2,), (3,)]]
    names = set()
    for cut, space in itertools.product(cuts, [(), ("1",)]):
        cache = PrefixCache()
        text = cache.root(space)
        for tokens in cut:
            text = cache.link(text, tokens)
        names.add(text.name)
    assert len(names) == 2 * len(cuts)


@DIGESTS
def test_the_chain_breaks_at_the_first_page_that_is_lost(digest):
    cache = PrefixCache(digest)
    put(cache, 0, [1, 2, 3], 1)
    (text,) = [t for held in cache.by_name.values() for p, t in held.items() if p == 1]
    cache.drop(1, text)
    assert pages(cache, [1, 2, 3, 4], 1) == [0]
