"""Recipes are read strictly: what is meant is understood, all else is refused in words."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.merging.conventions import MERGEKIT, PAPER, Conventions
from lecture_util.merging.methods import METHODS
from lecture_util.merging.recipe import (
    Recipe,
    RecipeError,
    Slice,
    Source,
    parse,
    read_recipe,
    resolve,
)

THEIRS = ["nuslerp", "sce", "karcher", "multislerp", "nearswap", "ram", "ramplus_tl"]
THEIRS += ["arcee_fusion"]


def recipe(**changes):
    """A short recipe with these keys changed; None takes one away."""
    raw = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]} | changes
    return json.dumps({key: value for key, value in raw.items() if value is not None})


def refused(text, *words):
    with pytest.raises(RecipeError) as caught:
        parse(text)
    for word in words:
        assert word in str(caught.value), str(caught.value)


# What is understood


def test_everything_a_recipe_says_arrives():
    read = parse(
        """
merge_method: della
base_model: base
models:
  - model: base
  - model: a
    parameters: {weight: 0.6, density: [0.1, 1e-1], int8_mask: true}
  - model: b
    parameters:
      epsilon:
        - {filter: mlp, value: 5e-2}
        - value: [0, 1]
parameters: {lambda: 1e-3, normalize: false, int8_mask: true}
dtype: float32
out_dtype: bfloat16
tokenizer: {source: union, pad_to_multiple_of: 8}
convention: mergekit
seed: -3
"""
    )
    epsilon = [{"filter": "mlp", "value": 0.05}, {"filter": None, "value": [0.0, 1.0]}]
    sources = (
        Source("base"),
        Source("a", None, {"weight": 0.6, "density": [0.1, 0.1]}),
        Source("b", None, {"epsilon": epsilon}),
    )
    assert read == Recipe(
        "della",
        (Slice(sources),),
        "base",
        {"lambda": 0.001, "normalize": False},
        "bfloat16",
        "union",
        8,
        MERGEKIT,
        -3,
        read.text,
    )
    assert read.models == ["base", "a", "b"]


def test_slices_keep_their_ranges_and_parameters():
    text = """
merge_method: slerp
base_model: a
slices:
  - sources: [{model: a, layer_range: [0, 8]}, {model: b, layer_range: [4, 12]}]
    parameters: {t: 0.5}
  - sources: [{model: b, layer_range: [1, 2]}, {model: a, layer_range: [1, 2]}]
"""
    first = Slice((Source("a", (0, 8)), Source("b", (4, 12))), {"t": 0.5})
    assert parse(text).slices == (first, Slice((Source("b", (1, 2)), Source("a", (1, 2)))))
    assert parse(text).models == ["a", "b"]


def test_what_a_recipe_leaves_out_is_the_papers():
    read = parse(recipe())
    assert (read.convention, read.seed, read.dtype, read.base_model) == (PAPER, 0, None, None)
    assert (read.tokenizer_source, read.pad_to_multiple_of, read.parameters) == (None, None, {})
    assert parse(recipe(parameters=None, tokenizer=None, tokenizer_source=None)) is not None
    assert parse("merge_method: linear\nmodels: [{model: a, parameters: }]\nparameters:\n")


def test_single_flags_of_a_convention_may_be_chosen():
    assert parse(recipe(convention={"rescale": "l1"})).convention == Conventions(rescale="l1")
    read = parse(recipe(seed=3)).replaced(convention="mergekit", seed=4)
    assert (read.convention, read.seed) == (MERGEKIT, 4)
    assert read.replaced() == read


def test_models_are_looked_for_beside_the_recipe_first(tmp_path):
    (tmp_path / "a").mkdir()
    path = tmp_path / "r.yml"
    path.write_text(recipe(base_model="./a/", tokenizer_source="a/../a"), encoding="utf-8")
    read = read_recipe(path)
    assert read.models == [str(tmp_path / "a"), "b"] and read.base_model == str(tmp_path / "a")
    assert read.tokenizer_source == str(tmp_path / "a")


def test_what_is_written_like_a_path_is_one(tmp_path):
    """Beside the recipe, where it should be; only `owner/model` may be asked of the hub."""
    (tmp_path / "m").mkdir()
    for name in ("m/none", "./none", "none/", "a/b/c"):
        (read,) = parse(recipe(models=[{"model": name}]), folder=tmp_path).models
        assert read == str(tmp_path / name)
    assert parse(recipe(models=[{"model": "owner/m"}]), folder=tmp_path).models == ["owner/m"]


@pytest.mark.parametrize(
    ("setting", "t", "value"),
    [
        (3.0, 0.5, 3.0),
        ([0.0, 1.0], 0.0, 0.0),
        ([0.0, 1.0], 0.5, 0.5),
        ([0.0, 1.0], 1.0, 1.0),
        ([0.0, 1.0, 0.0], 0.75, 0.5),
        ([2.0], 0.7, 2.0),
        ([True, False], 0.99, True),
        ([True, False], 1.0, False),
        ({"filter": "mlp", "value": 1.0}, 0.5, 1.0),
        ({"filter": "attn", "value": 1.0}, 0.5, None),
        ([{"filter": "attn", "value": 1.0}, {"filter": "*", "value": 2.0}], 0.5, 2.0),
        ([{"filter": "mlp", "value": [0.0, 4.0]}, {"filter": "up", "value": 2.0}], 0.5, 2.0),
        ([{"filter": "up", "value": 5.0}, {"filter": "mlp", "value": 2.0}], 0.5, 5.0),
        ([{"filter": None, "value": 6.0}, {"filter": "mlp", "value": 2.0}], 0.5, 6.0),
    ],
)
def test_a_setting_has_one_value_for_each_tensor(setting, t, value):
    assert resolve(setting, "model.layers.3.mlp.up_proj.weight", t) == value


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merge_method": None}, ["no merge_method", "ties"]),
        ({"merge_method": "tise"}, ["'tise'", "did you mean 'ties'"]),
        ({"merge_method": "TIES"}, ["'TIES'", "did you mean 'ties'"]),
        ({"merge_method": ["ties"]}, ["['ties']"]),
        ({"models": None}, ["either models or slices"]),
        ({"slices": []}, ["either models or slices, and not both"]),
        ({"models": None, "slices": []}, ["slices is []", "at least one"]),
        ({"models": []}, ["models is []", "at least one"]),
        ({"models": {"model": "a"}}, ["models is", "expected a list"]),
        ({"models": ["a"]}, ["a model is 'a'", "keys and values"]),
        ({"models": [{"mode": "a"}]}, ["'mode'", "did you mean 'model'"]),
        ({"models": [{}]}, ["names no model"]),
        ({"models": [{"model": 3}]}, ["model is 3", "expected a folder"]),
        ({"models": [{"model": ""}]}, ["model is ''"]),
        ({"base_modle": "a"}, ["'base_modle'", "did you mean 'base_model'"]),
        ({"base_model": ["a"]}, ["base_model is ['a']"]),
        ({"parameters": {"wieght": 1}}, ["no parameter 'wieght'", "'weight'"]),
        ({"parameters": {"t": 1}}, ["linear has no parameter 't'", "weight, normalize"]),
        ({"parameters": [1]}, ["parameters of a recipe are [1]"]),
        ({"parameters": 0}, ["parameters of a recipe are 0"]),
        ({"parameters": {"weight": "much"}}, ["weight is 'much'"]),
        ({"parameters": {"weight": {}}}, ["weight has the entry {}"]),
        ({"parameters": {"weight": []}}, ["weight is an empty list"]),
        ({"parameters": {"weight": [1, [2]]}}, ["weight is [2]"]),
        ({"parameters": {"weight": [1, True]}}, ["not both"]),
        ({"parameters": {"weight": [1, {"value": 1}]}}, ["mixes numbers with filters"]),
        ({"parameters": {"weight": [{"fliter": "a", "value": 1}]}}, ["did you mean 'filter'"]),
        ({"parameters": {"weight": [{"filter": 3, "value": 1}]}}, ["the filter 3"]),
        ({"parameters": {"weight": [{"filter": "a"}]}}, ["weight has the entry"]),
        ({"parameters": {"weight": {"value": [{"value": 1}]}}}, ["weight has the entry"]),
        ({"parameters": {"weight": float("nan")}}, ["weight is 'NaN'"]),
        ({"parameters": {"weight": "inf"}}, ["weight is 'inf'"]),
        ({"parameters": {"weight": 10**400}}, ["weight is 1000"]),
        ({"parameters": {"weight": None}}, ["weight is None"]),
        (
            {"models": [{"model": "a", "parameters": {"normalize": True}}]},
            ["move it to the recipe"],
        ),
        ({"dtype": "bf16"}, ["dtype is 'bf16'", "bfloat16"]),
        ({"dtype": "int8", "out_dtype": "float16"}, ["dtype is 'int8'"]),
        ({"out_dtype": 16}, ["out_dtype is 16"]),
        ({"tokenizer_source": 3}, ["tokenizer_source is 3"]),
        ({"tokenizer": "union"}, ["a tokenizer is 'union'"]),
        ({"tokenizer": False}, ["a tokenizer is False"]),
        (
            {"tokenizer": {"pad_to_multiple": 3}},
            ["'pad_to_multiple'", "did you mean 'pad_to_multiple_of'"],
        ),
        ({"tokenizer": {"pad_to_multiple_of": 0}}, ["pad_to_multiple_of is 0"]),
        ({"tokenizer": {"pad_to_multiple_of": True}}, ["pad_to_multiple_of is True"]),
        ({"tokenizer_source": "base", "tokenizer": {}}, ["keep one"]),
        ({"convention": "tool"}, ["convention is 'tool'"]),
        ({"convention": {"scale": 1}}, ["no flag 'scale'"]),
        ({"convention": {"rescale": [1]}}, ["rescale is [1]"]),
        ({"seed": "1"}, ["seed is '1'"]),
        ({"seed": True}, ["seed is True"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_recipe_that_is_wrong_is_told_how(changes, words):
    refused(recipe(**changes), *words)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"model": "a"}, ["layer_range of a is None", "[first, last + 1]"]),
        ({"model": "a", "layer_range": [3, 3]}, ["layer_range of a is [3, 3]"]),
        ({"model": "a", "layer_range": [3, 1]}, ["layer_range of a is [3, 1]"]),
        ({"model": "a", "layer_range": [-1, 1]}, ["layer_range of a is [-1, 1]"]),
        ({"model": "a", "layer_range": [0, 1.0]}, ["layer_range of a is [0, 1.0]"]),
        ({"model": "a", "layer_range": [False, True]}, ["layer_range of a is"]),
        ({"model": "a", "layer_range": [0, 1, 2]}, ["layer_range of a is"]),
        ({"model": "a", "layer_range": "0-4"}, ["layer_range of a is '0-4'"]),
        ({"model": "a", "range": [0, 1]}, ["a source has no key 'range'"]),
        ({"layer_range": [0, 1]}, ["a source names no model"]),
    ],
)
def test_a_slice_that_is_wrong_is_told_how(source, words):
    refused(recipe(models=None, slices=[{"sources": [source]}]), *words)


def test_a_slice_takes_as_many_layers_from_each_source():
    sources = [{"model": "a", "layer_range": [0, 2]}, {"model": "b", "layer_range": [0, 3]}]
    refused(recipe(models=None, slices=[{"sources": sources}]), "2, 3 layers", "as many from each")
    refused(recipe(models=None, slices=[{"sources": []}]), "sources is []")
    refused(recipe(models=None, slices=[{}]), "sources is None")
    refused(recipe(models=None, slices=["a"]), "a slice is 'a'")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": None, "modules": {"vision": {}}}, ["modules of a recipe"]),
        ({"chat_template": "auto"}, ["chat_template of a recipe"]),
        ({"tokenizer": {"tokens": {"x": {}}}}, ["tokens of a tokenizer"]),
        ({"models": None, "slices": [{"base_model": "a"}]}, ["base_model of a slice"]),
        ({"models": None, "slices": [{"residual_weight": 1}]}, ["residual_weight of a slice"]),
        ({"models": [{"model": "a+b"}]}, ["lora of model 'a+b'", "merge the adapter"]),
        ({"models": [{"model": "a@main"}]}, ["revision of model 'a@main'"]),
        ({"models": [{"model": {"model": {"path": "a"}, "lora": "b"}}]}, ["lora of model"]),
        ({"base_model": {"path": "a", "revision": "main"}}, ["revision of base_model"]),
        ({"base_model": {"model": {"path": "a", "revision": "m"}}}, ["revision of base_model"]),
        *(({"merge_method": name}, [f"merge method '{name}'"]) for name in THEIRS),
    ],
    ids=str,
)
def test_what_only_mergekit_reads_is_said_to_be_unsupported(changes, words):
    refused(recipe(**changes), "is not supported here", *words)


@pytest.mark.parametrize(
    "text",
    [
        "merge_method: [ties",
        "a: b: c",
        "\tmodels: 1",
        "a: !!python/object:os.system x",
        "a: !!timestamp x",
        "a: !!bool x",
        "a: 2001-99-99",
        "--- a\n--- b",
        "a: \x00",
        "? [1]\n: 2",
        "a: *nowhere",
        "a: ! =",
        "[" * 500,
    ],
)
def test_what_is_not_yaml_is_said_to_be(text):
    refused(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("merge_method: linear\nmerge_method: ties", ["'merge_method' twice, again in line 2"]),
        (
            recipe()[:-1] + ', "seed": 1, "parameters": {"weight": 1, "weight": 2}}',
            ["'weight' twi"],
        ),
        (recipe()[:-1] + ', "models": []}', ["'models' twice", "keep one"]),
    ],
)
def test_a_key_given_twice_is_refused(text, words):
    refused(text, *words)


def test_one_key_in_two_places_is_fine():
    text = "models:\n- {model: a, parameters: &p {weight: 1}}\n- {model: b, parameters: {<<: *p}}"
    sources = parse(text + "\nmerge_method: linear").slices[0].sources
    assert [source.parameters for source in sources] == [{"weight": 1.0}] * 2


def test_a_mistake_in_yaml_is_located():
    refused("merge_method: ties\nmodels: [a\nseed: 1", "not YAML in line 3, column 5")


@pytest.mark.parametrize("text", ["", "# nothing", "null", "3", "ties", "[]", "2001-01-01"])
def test_what_is_no_mapping_is_refused(text):
    refused(text, "a recipe is" if text and text not in ("# nothing", "null") else "empty")


@pytest.mark.parametrize(
    "text",
    [
        "{merge_method: linear, models: &a [*a]}",
        "{merge_method: linear, models: [{model: a}], parameters: {weight: &a [*a]}}",
        "{merge_method: linear, models: [{model: a}], parameters: {weight: &a {value: *a}}}",
        "&a {merge_method: linear, models: [*a]}",
    ],
)
def test_a_recipe_within_itself_is_refused(text):
    refused(text)


def test_a_folder_and_a_binary_file_are_no_recipes(tmp_path):
    with pytest.raises(RecipeError, match="is a folder"):
        read_recipe(tmp_path)
    (tmp_path / "r.yml").write_bytes(b"\xff\xfe\x00merge")
    with pytest.raises(RecipeError, match=r"r\.yml is not text"):
        read_recipe(tmp_path / "r.yml")
    with pytest.raises(FileNotFoundError, match="none"):
        read_recipe(tmp_path / "none.yml")


# Anything at all


WORDS = [
    *("merge_method", "models", "slices", "sources", "model", "parameters", "layer_range", "value"),
    *("filter", "base_model", "dtype", "out_dtype", "tokenizer", "tokenizer_source", "source"),
    *("pad_to_multiple_of", "convention", "seed", "weight", "t", "density", "normalize", "scale"),
    *METHODS,
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.integers(),
    st.floats(),
    st.dates(),
    st.binary(max_size=3),
    st.text(max_size=6),
    st.sampled_from([*WORDS, "bfloat16", "union", "base", "mergekit", "1e-3", "\0", "x" * 5000]),
)
KEYS = st.one_of(st.sampled_from(WORDS), SCALARS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
SETTINGS = st.dictionaries(st.sampled_from(["weight", "t", "density", "scale"]), VALUES)
MODEL = st.fixed_dictionaries(
    {"model": st.just("a") | SCALARS}, optional={"parameters": SETTINGS | VALUES}
)
SOURCE = st.fixed_dictionaries(
    {"model": st.just("a"), "layer_range": st.just([0, 2]) | VALUES},
    optional={"parameters": SETTINGS},
)
PARTS = st.fixed_dictionaries({"sources": st.lists(SOURCE, max_size=2) | VALUES})
RECIPES = st.fixed_dictionaries(
    {"merge_method": st.sampled_from(list(METHODS)) | SCALARS},
    optional={
        "models": st.lists(MODEL, max_size=3) | VALUES,
        "slices": st.lists(PARTS, max_size=3) | VALUES,
        **dict.fromkeys(["base_model", "parameters", "dtype", "convention", "seed"], VALUES),
        **dict.fromkeys(["tokenizer", "tokenizer_source"], VALUES),
    },
)


def only_recipe_errors(text):
    try:
        read = parse(text)
    except RecipeError as error:
        assert str(error)
        return
    assert read.models and read.merge_method in METHODS
    for part in read.slices:
        for source in part.sources:
            for word in METHODS[read.merge_method].parameters:
                for t in (0.0, 0.3, 1.0):
                    value = read.value(word, source, part, "model.norm.weight", t)
                    assert value is None or isinstance(value, (bool, float))


@settings(max_examples=150)
@given(RECIPES | VALUES)
def test_whatever_yaml_says_only_recipe_errors_come_out(raw):
    import yaml

    only_recipe_errors(yaml.safe_dump(raw))


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"%@`#,? \n\t0.e~=")))
def test_whatever_text_comes_only_recipe_errors_come_out(text):
    only_recipe_errors(text)
