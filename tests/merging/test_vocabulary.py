"""Rows are aligned by token: every row goes where its token is, and none is made up silently."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_folders import copy, ours, tokenizer

from lecture_util.merging.checkpoint import EMBED, Folder
from lecture_util.merging.schema import RecipeError
from lecture_util.merging.vocabulary import (
    Alignment,
    add_tokens,
    align,
    check_same_tokens,
    read_vocab,
    union,
)
from lecture_util.model.checkpoint import WeightsError


def rows(*numbers, dtype=torch.float32):
    """One row a number, two wide."""
    return torch.tensor([[number, -number] for number in numbers], dtype=dtype)


def test_the_union_keeps_the_first_and_appends_the_others():
    assert union([{"a": 0, "c": 2}, {"b": 7, "a": 3, "d": 1}]) == {"a": 0, "c": 2, "d": 3, "b": 4}
    assert union([{}, {"x": 5}]) == {"x": 0}
    first = {"a": 0}
    union([first, {"b": 0}])
    assert first == {"a": 0}


def test_tokens_come_in_the_order_of_their_numbers(tmp_path):
    """The library's own order is a hash's, another in every process."""
    vocab = {f"t{i * 37 % 101}": i for i in range(101)}
    tokenizer(tmp_path, vocab)
    assert list(read_vocab(tmp_path).items()) == list(vocab.items())


def test_two_vocabularies_by_hand():
    """{a, b, c} and {a, c}: a has rows 1 and 10, c rows 3 and 30; b comes from who has it."""
    one, two = rows(1, 2, 3), rows(10, 30)
    vocabs = [{"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 1}]
    got = align([one, two], vocabs, vocabs[0])
    assert torch.equal(got[0], one) and torch.equal(got[1], rows(10, 2, 30))
    got = align([one, two], vocabs, vocabs[1])
    assert torch.equal(got[0], rows(1, 3)) and torch.equal(got[1], two)


def test_a_token_that_some_lack_comes_from_the_base_else_from_their_mean():
    tables, vocabs = [rows(1), rows(2), rows(0)], [{"x": 0}, {"x": 0}, {"y": 0}]
    target = {"x": 0, "y": 1, "z": 2}
    for base, gift in ((0, 1), (1, 2), (2, 1.5), (None, 1.5)):
        got = align(tables, vocabs, target, base=base)
        assert torch.equal(got[2], rows(gift, 0, 0)), base
        assert torch.equal(got[0], rows(1, 0, 0)) and torch.equal(got[1], rows(2, 0, 0))


def test_spare_rows_stay_where_they_are():
    one, two = rows(1, 2, 8, 9), rows(10, 20, 80)
    vocabs = [{"a": 0, "b": 1}, {"b": 0, "a": 1}]
    got = align([one, two], vocabs, vocabs[0], num_rows=5)
    assert torch.equal(got[0], rows(1, 2, 8, 9, 0))
    assert torch.equal(got[1], rows(20, 10, 80, 0, 0))


def test_rows_keep_their_dtype_and_a_mean_is_taken_wide():
    dtype = torch.float16
    tables = [rows(60000, dtype=dtype), rows(60000, dtype=dtype), rows(1, dtype=torch.float32)]
    got = align(tables, [{"x": 0}, {"x": 0}, {"y": 0}], {"x": 0})
    assert [each.dtype for each in got] == [dtype, dtype, torch.float32]
    assert got[2][0, 0] == 60000  # a sum in fp16 would be infinite


def test_too_few_rows_are_refused():
    with pytest.raises(WeightsError, match="model 1 has 1 rows, but its tokenizer numbers up to 1"):
        align([rows(1, 2), rows(1)], [{"a": 0}, {"a": 0, "b": 1}], {"a": 0})
    with pytest.raises(ValueError, match="num_rows=1 is too few for token number 4"):
        align([rows(1)], [{"a": 0}], {"a": 4}, num_rows=1)


NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True)


@given(NAMES, NAMES, NAMES, st.integers(0, 3))
def test_each_row_goes_where_its_token_is(first, second, wanted, spare):
    vocabs = [{token: i for i, token in enumerate(each)} for each in (first, second)]
    tables = [
        rows(*range(base, base + len(v) + spare)) for base, v in zip((10, 50), vocabs, strict=True)
    ]
    target = {token: i for i, token in enumerate(wanted)}
    for i, got in enumerate(align(tables, vocabs, target)):
        assert len(got) == len(wanted)
        for token, row in target.items():
            owner = i if token in vocabs[i] else 1 - i
            has = token in vocabs[owner]
            assert torch.equal(got[row], tables[owner][vocabs[owner][token]] if has else rows(0)[0])


# Files


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    root = tmp_path_factory.mktemp("vocabularies")
    return ours(root / "one", 0, V=4, tied=True)


def test_a_vocabulary_is_read_with_added_tokens(plain, tmp_path):
    path = tokenizer(copy(plain, tmp_path / "m"), {"a": 0, "b": 1})
    (tmp_path / "new").mkdir()
    add_tokens(path, tmp_path / "new", {"a": 0, "b": 1, "ü": 2, "x y": 3}, ["ü", "x y"])
    assert read_vocab(tmp_path / "new") == {"a": 0, "b": 1, "ü": 2, "x y": 3}
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json"))
    assert words.encode("a x y b ü").ids == [0, 3, 1, 2]


def test_a_vocabulary_with_gaps_takes_no_more_tokens(plain, tmp_path):
    path = tokenizer(copy(plain, tmp_path / "m"), {"a": 0, "b": 3})
    (tmp_path / "new").mkdir()
    with pytest.raises(WeightsError, match=r"leaves numbers unused.*tokenizer_source: base"):
        add_tokens(path, tmp_path / "new", {"a": 0, "b": 3, "c": 4}, ["c"])


def test_a_folder_without_a_tokenizer_is_refused(plain, tmp_path):
    with pytest.raises(WeightsError, match=r"holds no tokenizer\.json"):
        read_vocab(plain)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match=r"tokenizer\.json can't be read as a tokenizer"):
        read_vocab(tmp_path)


def spoken(plain, root, *vocabs):
    named = enumerate(vocabs)
    return [Folder(tokenizer(copy(plain, root / str(i)), vocab)) for i, vocab in named]


def test_one_token_has_one_number(plain, tmp_path):
    abc = {"a": 0, "b": 1, "c": 2}
    same = spoken(plain, tmp_path / "same", abc, abc, {"a": 0}, {"a": 0, "renamed": 1})
    check_same_tokens(same)
    check_same_tokens([Folder(plain), *same])  # who says nothing is believed
    check_same_tokens([])
    other = spoken(plain, tmp_path / "other", abc, {"a": 0, "c": 1})
    with pytest.raises(RecipeError, match=r"'c' is token 1 of .*1 but 2 of .*0: align"):
        check_same_tokens(other)


def test_an_alignment_knows_its_rows(plain, tmp_path):
    folders = spoken(plain, tmp_path, {"a": 0, "b": 1}, {"b": 0, "x": 1, "y": 2, "z": 3})
    assert Alignment(folders, "base").num_rows == 4  # two of them spare
    assert Alignment(folders, "union").vocab == {"a": 0, "b": 1, "x": 2, "y": 3, "z": 4}
    assert Alignment(folders, "union").new == ["x", "y", "z"]
    assert Alignment(folders, "union").num_rows == 5
    assert Alignment(folders, "union", pad=8).num_rows == 8
    theirs = Alignment(folders, folders[1].path)
    assert (theirs.new, theirs.num_rows, theirs.home) == ([], 4, folders[1].path)
    elsewhere = tokenizer(tmp_path, {"q": 0})
    assert Alignment(folders, elsewhere).num_rows == 1


def test_an_alignment_reads_every_models_rows(plain, tmp_path):
    folders = spoken(plain, tmp_path, {"a": 0, "b": 1}, {"b": 0, "a": 1})
    alignment = Alignment(folders, "base")
    table = folders[1][EMBED]
    assert torch.equal(alignment.read(1, EMBED, base=0), table[[1, 0, 2, 3]])
    assert torch.equal(alignment.read(0, EMBED, base=0), folders[0][EMBED])


def test_a_tokenizer_that_is_not_made_for_the_weights_is_refused(plain, tmp_path):
    folders = spoken(plain, tmp_path, {"a": 0}, {"a": 0, "b": 4})
    with pytest.raises(
        WeightsError, match=r"embed_tokens.weight of .*1 has 4 rows, but .* up to 4"
    ):
        Alignment(folders, "base")


def test_a_tokenizers_file_stays_json_with_every_other_entry(plain, tmp_path):
    path = tokenizer(copy(plain, tmp_path / "m"), {"a": 0})
    (tmp_path / "new").mkdir()
    add_tokens(path, tmp_path / "new", {"a": 0, "b": 1}, ["b"])
    before, after = (
        json.loads((p / "tokenizer.json").read_text()) for p in (path, tmp_path / "new")
    )
    assert [each["content"] for each in after.pop("added_tokens")] == ["b"]
    before.pop("added_tokens")
    assert before == after
