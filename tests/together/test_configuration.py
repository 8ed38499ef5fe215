"""Configurations: what excludes what, against rules written anew; what is allowed says the same."""

import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import together_models as tiny

from lecture_util.together import configuration as room
from lecture_util.together.configuration import Configuration, Incompatible, conflicts
from lecture_util.together.run import serve

REMEDY = re.compile(r"(\w+)=('\w+'|True|False)")
MODELS = {}


def possible(f) -> bool:
    """The rules in other words: what each schedule of the course's code can do."""
    f = SimpleNamespace(**f)
    heads = f.draft in ("medusa", "eagle")
    if f.schedule == "single":
        plain = f.slots == 1 and not f.pages and not f.prefix
        return plain and (f.cache or f.draft is None) and not (heads and f.student)
    if f.schedule == "static":
        return f.cache and not (f.pages or f.prefix or f.draft)
    return f.cache and f.draft is None and (f.pages or not f.prefix)


def test_exactly_what_cannot_be_combined_is_refused_with_all_its_reasons():
    made = 0
    for f in tiny.combinations():
        reasons = conflicts(SimpleNamespace(**f))
        assert (not reasons) == possible(f), f
        if not reasons:
            assert conflicts(Configuration(**f)) == []
            made += 1
            continue
        with pytest.raises(Incompatible) as caught:
            Configuration(**f)
        assert str(caught.value) == "; ".join(reasons)
        assert len(set(reasons)) == len(reasons)
    # of 8 weights and students: no cache; a cache; an n-gram draft; 2 static and 6 continuous
    # batches, each with either number of guesses; two heads on the whole model alone
    assert made == 8 * 2 * (1 + 1 + 1 + 2 + 6) + 4 * 2 * 2


def test_every_reason_names_a_remedy_that_removes_it():
    seen = set()
    for f in tiny.combinations():
        for reason in conflicts(SimpleNamespace(**f)):
            name, value = REMEDY.search(reason).groups()
            value = {"True": True, "False": False}.get(value, value.strip("'"))
            assert f[name] != value
            assert reason not in conflicts(SimpleNamespace(**f | {name: value})), reason
            seen.add(reason)
    assert len(seen) == 9  # eight rules, one of which names the draft


def test_names_tell_configurations_apart():
    names = [str(c) for c in tiny.allowed()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("configuration", "name"),
    [
        (Configuration(), "fp32, cache"),
        (Configuration("bf16", cache=False), "bf16, no cache"),
        (Configuration(draft="eagle", guesses=7), "fp32, cache, eagle x7"),
        (Configuration("int8", schedule="static", slots=3), "int8, static x3"),
        (
            Configuration("int4", True, True, "continuous", 16, True, True),
            "student int4, continuous x16, pages, prefix",
        ),
    ],
)
def test_a_name_says_what_is_on(configuration, name):
    assert str(configuration) == name


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"weights": "int2"}, r"weights='int2': expected one of 'fp32', 'bf16', 'int8', 'int4'"),
        ({"weights": ["int8"]}, r"weights=\['int8'\]: expected one of"),
        ({"schedule": "dynamic"}, "schedule='dynamic': expected one of 'single', 'static'"),
        ({"draft": False}, "draft=False: expected one of None, 'ngram'"),
        ({"draft": "lookahead"}, "draft='lookahead'"),
        ({"student": 1}, "student=1: expected True or False"),
        ({"cache": None}, "cache=None"),
        ({"pages": "yes"}, "pages='yes'"),
        ({"prefix": 0}, "prefix=0"),
        ({"slots": 0}, "slots=0: expected a whole number from 1"),
        ({"slots": True}, "slots=True"),
        ({"slots": 2.0}, r"slots=2\.0"),
        ({"guesses": -1}, "guesses=-1"),
    ],
)
def test_values_that_are_none_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says) as caught:
        Configuration(**wrong)
    assert not isinstance(caught.value, Incompatible)


def test_the_tables_name_every_value_and_the_default_is_a_cached_loop():
    assert tuple(room.WEIGHTS) == tiny.VALUES["weights"]
    assert tuple(room.SCHEDULES) == tiny.VALUES["schedule"]
    assert (None, *room.DRAFTS) == tiny.VALUES["draft"]
    assert [f.name for f in fields(Configuration)] == list(tiny.VALUES)
    assert hash(Configuration()) == hash(replace(Configuration("int8"), weights="fp32"))
    for f in fields(Configuration):  # each is explained
        assert re.search(rf"\n    {f.name} ", Configuration.__doc__)


def rounded(weights, student):
    """The model, a shallower one for a student, and what it says to each request alone."""
    if (weights, student) not in MODELS:
        model = tiny.tiny_model(replace(tiny.TINY, L=1), 5) if student else tiny.tiny_model()
        model = model if weights == "fp32" else tiny.in_numbers(weights)
        MODELS[weights, student] = model, tiny.alone(model, tiny.workload())
    return MODELS[weights, student]


@pytest.mark.parametrize(
    "c",
    [*tiny.runnable(student=False), *tiny.runnable(student=True, weights="fp32")],
    ids=str,
)
def test_whatever_is_allowed_says_what_plain_generation_says(c):
    model, wanted = rounded(c.weights, c.student)
    outcome = serve(model, c, tiny.workload(), tiny.virtual())
    assert [a.tokens for a in outcome.answers] == wanted
    assert len({token for tokens in wanted for token in tokens}) > 5
