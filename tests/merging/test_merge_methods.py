"""Every method by name, its settings and conventions, and what all do with tensors."""

import dataclasses
import functools
import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from lecture_util.merging import methods
from lecture_util.merging.conventions import CHOICES, MERGEKIT, PAPER, Conventions, conventions
from lecture_util.merging.methods import METHODS, Context, generator, method, settings
from lecture_util.merging.recipe import resolve
from lecture_util.merging.tensors import (
    all_finite,
    by_chunks,
    map_states,
    one_shape,
    same_tensors,
    wide,
)
from lecture_util.model.shapes import ShapeError, TensorMismatch

TASK_VECTORS = [name for name, how in METHODS.items() if how.thin]


def random(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def filled(name, models=3, convention=PAPER, **given):
    """Settings with the parameters that a method insists on."""
    needed = {"density": 0.5, "t": 0.3}
    mine = {k: v for k, v in needed.items() if k in METHODS[name].parameters}
    return settings(name, {**mine, **given}, models, convention)


# Settings


def test_the_methods_are_the_recipes():
    assert set(METHODS) == {
        *("linear", "slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties"),
        *("breadcrumbs", "breadcrumbs_ties", "model_stock", "della", "della_linear"),
        "passthrough",
    }
    for name, how in METHODS.items():
        assert method(name) is how and how.about
        assert (how.thin is None) != (how.whole is None)


# Read off mergekit 0.1.5's registry. Its weight has no default; ours is 1.
TOOLS = {
    "linear": {"weight": [1, 1], "normalize": True},
    "task_arithmetic": {"weight": [1, 1], "lambda": 1, "normalize": False},
    "ties": {"weight": [1, 1], "lambda": 1, "normalize": True, "density": [1, 1]},
    "dare_linear": {"normalize": False, "density": [1, 1], "rescale": True},
    "dare_ties": {"normalize": False, "density": [1, 1], "rescale": True},
    "breadcrumbs": {"normalize": False, "density": [1, 1], "gamma": [0.01, 0.01]},
    "breadcrumbs_ties": {"normalize": False, "density": [1, 1], "gamma": [0.01, 0.01]},
    "model_stock": {"filter_wise": False},
    "della": {"normalize": True, "density": [1, 1], "epsilon": [0.15, 0.15], "rescale": True},
    "della_linear": {"normalize": False, "density": [1, 1], "epsilon": [0.15, 0.15]},
    "passthrough": {"scale": [None, None]},
}
PAPERS = {
    "ties": {"density": [0.2, 0.2], "normalize": True},
    "dare_ties": {"normalize": True},
    "breadcrumbs_ties": {"normalize": True},
    "della": {"normalize": True, "epsilon": [0.07, 0.07]},
    "della_linear": {"normalize": False, "epsilon": [0.07, 0.07]},
}


@pytest.mark.parametrize("name", TOOLS)
def test_what_a_recipe_leaves_out_is_mergekits_default_or_the_papers(name):
    theirs = settings(name, {}, 2, MERGEKIT)
    assert TOOLS[name].items() <= theirs.items() and set(theirs) == set(METHODS[name].parameters)
    needs = {"density": 0.4} if "density" in theirs and name != "ties" else {}
    ours = settings(name, needs, 2, PAPER)
    same = {k: v for k, v in TOOLS[name].items() if k not in ("density", *PAPERS.get(name, {}))}
    assert (same | PAPERS.get(name, {})).items() <= ours.items()


def test_the_papers_densities_and_slerps_t_must_be_given():
    for name in ("dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties", "della"):
        with pytest.raises(ValueError, match=f"{name} needs 'density', and none is given"):
            settings(name, {}, 2, PAPER)
    for convention in (PAPER, MERGEKIT):
        with pytest.raises(ValueError, match="slerp needs 't', and none is given"):
            settings("slerp", {}, 1, convention)


def test_one_number_is_for_all_models_and_a_list_for_each():
    assert settings("ties", {"density": 0.3}, 3, PAPER)["density"] == [0.3, 0.3, 0.3]
    assert settings("ties", {"weight": (1, 2)}, 2, PAPER)["weight"] == [1, 2]
    assert settings("ties", {"weight": [1, None]}, 2, PAPER)["weight"] == [1, 1]
    assert settings("ties", {"density": [None, 1]}, 2, MERGEKIT)["density"] == [1, 1]
    assert settings("passthrough", {"scale": [2]}, 1, PAPER)["scale"] == [2]
    assert settings("dare_linear", {"density": 0.5, "rescale": False}, 1, PAPER)["rescale"] is False


BAD = [
    ("tise", {}, r"merge method 'tise' is unknown: did you mean 'ties'\?"),
    ("fusion", {}, r"merge method 'fusion' is unknown.*"),
    (None, {}, r"merge method None is unknown"),
    ("ties", {"densty": 0.2}, r"ties has no parameter 'densty': did you mean 'density'\?"),
    ("linear", {"zzz": 1}, r"linear has no parameter 'zzz': expected one of weight, normalize"),
    ("slerp", {"density": 0.2}, r"slerp has no parameter 'density'"),
    ("ties", {"weight": [1, 2]}, r"ties got 2 of 'weight' for 3 models: one each"),
    ("ties", {"weight": "heavy"}, r"ties: weight is 'heavy', expected a number"),
    ("ties", {"weight": True}, r"ties: weight is True, expected a number"),
    ("ties", {"lambda": math.nan}, r"ties: lambda is nan, expected a number"),
    ("ties", {"lambda": math.inf}, r"ties: lambda is inf, expected a number"),
    ("ties", {"lambda": [1, 2, 3]}, r"ties: lambda is \[1, 2, 3\], expected a number"),
    ("ties", {"normalize": 1}, r"ties: normalize is 1, expected true or false"),
    ("model_stock", {"filter_wise": "yes"}, r"filter_wise is 'yes', expected true or false"),
    ("ties", {"density": 1.5}, r"ties: density is 1.5, expected a number between 0 and 1"),
    ("ties", {"density": [0.1, -0.1, 0.1]}, r"density is -0.1, expected a number between 0 and 1"),
    ("linear", {"weight": [0.5, -1, 0.5]}, r"linear: the weights \[0.5, -1.0, 0.5\] sum to 0"),
    ("linear", {"weight": 0}, r"linear: the weights .* sum to 0"),
    ("della", {"density": [0.5, 0.02, 0.5]}, r"della: model 1: density=0.02 with epsilon=0.07"),
    ("della", {"density": [1, 0, 0.97]}, r"della: model 2: density=0.97 with epsilon=0.07 spans"),
    ("della_linear", {"density": 0.5, "epsilon": 0.6}, r"della_linear: model 0: density=0.5"),
    ("dare_ties", {"density": [0.5, None, 0.5]}, r"for model 1: set it among that model's param"),
    ("linear", {"weight": 1e300}, r"linear: weight is 1e\+300, expected a number"),
    ("TIES", {}, r"merge method 'TIES' is unknown: did you mean 'ties'\?"),
    ("ties", {"Density": 0.2}, r"ties has no parameter 'Density': did you mean 'density'\?"),
    ("breadcrumbs", {"density": 0.5, "gamma": 2}, r"gamma is 2, expected a number between 0 and 1"),
]


@pytest.mark.parametrize("name,given,message", BAD)
def test_settings_that_cannot_be_are_refused_with_the_reason(name, given, message):
    with pytest.raises(ValueError, match=message):
        settings(name, given, 3, PAPER)


def test_settings_may_be_tensors_and_arrays_of_one_a_model():
    for made in (torch.tensor, np.array):
        full = settings("ties", {"weight": made([0.5, 2.0]), "lambda": made(0.5)}, 2, PAPER)
        assert full["weight"] == [0.5, 2.0] and full["lambda"] == 0.5
        assert type(full["weight"][0]) is float
        with pytest.raises(ValueError, match="ties got 3 of 'weight' for 2 models"):
            settings("ties", {"weight": made([0.5, 2.0, 1.0])}, 2, PAPER)
    assert settings("linear", {"weight": 1, "normalize": np.bool_(False)}, 2, PAPER)["weight"]


def test_weights_that_cancel_are_no_matter_where_nothing_is_divided():
    given = {"weight": [1, -1], "normalize": False}
    assert settings("linear", given, 2, PAPER)["weight"] == [1, -1]
    assert settings("linear", {"weight": 1e-9}, 2, PAPER)["weight"] == [1e-9, 1e-9]


def test_slerps_t_is_a_share():
    with pytest.raises(ValueError, match=r"slerp: t is 1.1, expected a number between 0 and 1"):
        settings("slerp", {"t": 1.1}, 1, PAPER)


# Conventions


def test_conventions_by_name_by_flag_and_as_they_are():
    assert conventions(None) == conventions("paper") == conventions({}) == PAPER == Conventions()
    assert conventions("mergekit") is MERGEKIT and conventions(MERGEKIT) is MERGEKIT
    assert conventions({"rescale": "l1"}) == dataclasses.replace(PAPER, rescale="l1")
    for flag, allowed in CHOICES.items():  # the two names are the two ends of every flag
        assert (getattr(PAPER, flag), getattr(MERGEKIT, flag)) == allowed
    assert set(CHOICES) == {each.name for each in dataclasses.fields(Conventions)}


def test_conventions_that_do_not_exist_are_refused():
    with pytest.raises(
        ValueError, match=r"convention is 'papers': expected 'paper', 'mergekit', or"
    ):
        conventions("papers")
    with pytest.raises(ValueError, match=r"convention is 3: expected"):
        conventions(3)
    with pytest.raises(ValueError, match=r"convention has no flag 'scale': expected some of resc"):
        conventions({"scale": "l1"})
    with pytest.raises(ValueError, match=r"convention rescale is 'l2': expected one of 'inverse'"):
        conventions({"rescale": "l2"})


@pytest.mark.parametrize("name", ["ties", "dare_ties", "breadcrumbs_ties", "della"])
def test_the_divisors_convention_reaches_every_method_with_elected_signs(name):
    base, tuned = torch.zeros(4), torch.full((4,), 2.0)
    given = {"density": 1.0, "weight": -0.5, "normalize": True}
    for divisor, moved in (("magnitudes", -2), ("signed", 2)):
        c = Context(dataclasses.replace(PAPER, divisor=divisor))
        p = filled(name, 1, **given)
        assert METHODS[name].merge(base, [tuned], p, c).tolist() == [moved] * 4


# Draws


def test_draws_depend_on_seed_tensor_and_model_alone_and_on_no_process():
    digest = hashlib.sha256(b"3/model.norm.weight/2").digest()
    wanted = int.from_bytes(digest[:8], "little") // 2
    made = generator(3, "model.norm.weight", 2)
    assert made.initial_seed() == wanted and made.device.type == "cpu"
    draws = {
        (seed, name, model): torch.rand(4, generator=generator(seed, name, model)).tolist()
        for seed in (0, 1)
        for name in ("a", "b")
        for model in (0, 1)
    }
    assert len({tuple(each) for each in draws.values()}) == 8


# Chunks


@pytest.mark.parametrize("n", [0, 1, 6, 7, 8, 13, 14, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_all_of_the_tensors_once(n, dtype):
    seen = []

    def add(x, y):
        seen.append(len(x))
        return x + 2 * y

    x, y = random((n,), 0, dtype), random((n,), 1)
    got = by_chunks(add, x, y, chunk=7)
    assert got.dtype == dtype and torch.equal(got, (x + 2 * y).to(dtype))
    assert sum(seen) == n and all(size == 7 for size in seen[:-1])


@pytest.mark.parametrize("shape", [(), (1, 5), (5, 1), (3, 5), (2, 3, 7), (0, 3)])
def test_chunks_keep_shapes_and_follow_strides(shape):
    x, y = random(shape, 0), random(shape[::-1], 1)
    y = y.permute(tuple(reversed(range(y.ndim))))
    assert torch.equal(by_chunks(torch.sub, x, y, chunk=4), x - y)
    assert torch.equal(by_chunks(torch.sub, y, x, chunk=4), y - x)


@pytest.mark.parametrize("name", TASK_VECTORS)
@pytest.mark.parametrize("convention", [PAPER, MERGEKIT])
def test_merging_by_chunks_changes_nothing(name, convention, monkeypatch):
    base, *tuned = ((3 * random((13, 7), i)).round().float() for i in range(4))
    p = filled(name, weight=[1.0, 0.5, 2.0], convention=convention)
    whole = METHODS[name].merge(base, tuned, p, Context(convention))
    for chunk in (1, 5, 90, 91):
        monkeypatch.setattr(methods, "by_chunks", functools.partial(by_chunks, chunk=chunk))
        assert torch.equal(METHODS[name].merge(base, tuned, p, Context(convention)), whole)


def test_the_majority_is_the_whole_tensors_not_a_chunks(monkeypatch):
    base = torch.zeros(6)
    tuned = [torch.tensor([1.0, -1, -1, -1, -1, 2]), torch.tensor([-1.0, -1, -1, -1, -1, 2])]
    monkeypatch.setattr(methods, "by_chunks", functools.partial(by_chunks, chunk=1))
    p = filled("ties", models=2, density=1.0)
    assert METHODS["ties"].merge(base, tuned, p, Context()).tolist() == [-1, -1, -1, -1, -1, 2]
    up = METHODS["ties"].merge(base, [-each for each in tuned], p, Context())
    assert up.tolist() == [1, 1, 1, 1, 1, -2]
    theirs = METHODS["ties"].merge(base, tuned, p, Context(zero_sign="positive"))
    assert theirs.tolist() == [1, -1, -1, -1, -1, 2]


# Tensors and states


def test_wide_is_fp32_or_what_is_wider():
    for dtype in (torch.float16, torch.bfloat16):
        assert wide(torch.ones(2, dtype=dtype)).dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(2, dtype=dtype)
        assert wide(x) is x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 5), (101,)])
def test_one_number_that_is_none_is_found_anywhere(dtype, shape):
    x = random(shape, 0, dtype)
    assert all_finite(x) and all_finite(torch.zeros(0, 3, dtype=dtype))
    for bad in (math.nan, math.inf, -math.inf):
        for at in {0, x.numel() // 2, x.numel() - 1}:
            spoilt = x.clone()
            spoilt.view(-1)[at] = bad
            assert not all_finite(spoilt)


def test_states_are_merged_name_by_name_and_whole_numbers_stay():
    a = {"w": torch.tensor([1.0]), "steps": torch.tensor([2]), "mask": torch.tensor([True])}
    b = {"mask": torch.tensor([True]), "steps": torch.tensor([2]), "w": torch.tensor([3.0])}
    got = map_states(torch.add, a, b)
    assert list(got) == ["w", "steps", "mask"]
    assert got["w"].item() == 4 and got["steps"] is a["steps"] and got["mask"] is a["mask"]


def test_states_that_do_not_fit_are_refused_with_the_tensors_name():
    w, ints = torch.ones(2, 3), torch.tensor([1])
    with pytest.raises(KeyError, match=r"b is in 1 of 2 models: only models of one architecture"):
        map_states(torch.add, {"a": w, "b": w}, {"a": w})
    with pytest.raises(KeyError, match=r"model 1 holds b, which model 0 lacks: not one archit"):
        map_states(torch.add, {"a": w}, {"a": w, "b": w})
    with pytest.raises(
        ShapeError, match=r"a is \(3, 3\) in model 2 but \(2, 3\) in model 0: merge"
    ):
        same_tensors("a", [w, w, torch.ones(3, 3)], 3)
    with pytest.raises(TensorMismatch, match=r"a is torch.int8 in model 1 but torch.float32 in m"):
        same_tensors("a", [w, w.to(torch.int8)], 2)
    with pytest.raises(ValueError, match=r"a holds whole numbers \(torch.int64\) and differs betw"):
        same_tensors("a", [ints, ints, ints + 1], 3)
    with pytest.raises(TensorMismatch, match=r"a is torch.complex64 in model 1: merging is for re"):
        same_tensors("a", [w, w.to(torch.complex64)], 2)
    with pytest.raises(TensorMismatch, match=r"a is sparse in model 0: make it dense first"):
        same_tensors("a", [w.to_sparse()], 1)
    with pytest.raises(TypeError, match=r"a is a list in model 1: expected a tensor"):
        same_tensors("a", [w, [1.0]], 2)
    same_tensors("a", [w, w.bfloat16(), w.double()], 3)  # floats of several kinds can be merged
    with pytest.raises(ShapeError, match=r"part 2 is \(2,\) but part 0 is \(2, 3\): expected one"):
        one_shape([w, w, torch.ones(2)], "part ")


# Each method through its name


def test_passthrough_is_the_tensor_or_a_scaled_copy():
    w, how = torch.tensor([1.0, -2.0]).bfloat16(), METHODS["passthrough"]
    assert how.merge(None, [w], filled("passthrough", 1), Context()) is w
    scaled = how.merge(None, [w], filled("passthrough", 1, scale=0.5), Context())
    assert scaled.tolist() == [0.5, -1] and scaled.dtype == torch.bfloat16
    assert w.tolist() == [1, -2]
    assert how.merge(None, [w], filled("passthrough", 1, scale=0.0), Context()).tolist() == [0, 0]


def test_epsilon_reaches_della_and_gamma_breadcrumbs():
    """Both are settings of the method that once got lost on the way."""
    base, tuned = torch.zeros(1000), torch.arange(1.0, 1001.0)
    for name in ("della", "della_linear"):
        upper = {}
        for epsilon in (0.0, 0.49):
            p = filled(name, 1, density=0.5, epsilon=epsilon, rescale=False)
            kept = METHODS[name].merge(base, [tuned], p, Context()) != 0
            upper[epsilon] = int(kept[500:].sum())
        # 500 draws of 1/2: 250, sigma 11; with the window the mean p is .745: 372, sigma 7
        assert abs(upper[0.0] - 250) < 55 and abs(upper[0.49] - 372) < 36
    for name in ("breadcrumbs", "breadcrumbs_ties"):
        p = filled(name, 1, density=0.5, gamma=0.2)
        kept = METHODS[name].merge(base, [tuned], p, Context()).nonzero().flatten()
        assert (kept.min().item(), kept.max().item(), len(kept)) == (300, 799, 500)


@pytest.mark.parametrize("name", [n for n in TASK_VECTORS if "rescale" in METHODS[n].parameters])
def test_rescaling_is_by_convention_or_off(name):
    base, tuned = torch.zeros(1000), torch.ones(1000)
    given = {"density": 0.25} | ({"epsilon": 0.0} if "epsilon" in METHODS[name].parameters else {})
    size = {}
    for label, convention, rescale in (
        ("inverse", PAPER, True),
        ("l1", dataclasses.replace(PAPER, rescale="l1"), True),
        ("off", PAPER, False),
    ):
        p = filled(name, 1, rescale=rescale, **given)
        size[label] = METHODS[name].merge(base, [tuned], p, Context(convention)).max().item()
    survivors = int((METHODS[name].merge(base, [tuned], p, Context()) != 0).sum())
    assert size["off"] == 1 and size["inverse"] == pytest.approx(4)
    assert size["l1"] == pytest.approx(1000 / survivors)


def test_each_model_has_its_own_settings_and_draws():
    base, tuned = torch.zeros(400), torch.ones(400)
    p = filled("dare_linear", 2, density=[1.0, 0.5], weight=[1.0, 10.0])
    got = METHODS["dare_linear"].merge(base, [tuned, tuned], p, Context())
    assert sorted(set(got.tolist())) == [1, 21]
    alike = filled("dare_linear", 2, density=0.5)
    both = METHODS["dare_linear"].merge(base, [tuned, tuned], alike, Context())
    assert set(both.tolist()) == {0, 2, 4}  # not 0 and 4 alone: drawn apart


@profile(max_examples=40)
@given(st.sampled_from(TASK_VECTORS), st.floats(-2, 2))
def test_lambda_multiplies_what_is_added_to_the_base(name, scale):
    base, *tuned = (random((31,), i) for i in range(4))
    once = METHODS[name].merge(base, tuned, filled(name), Context()) - base
    got = METHODS[name].merge(base, tuned, filled(name, **{"lambda": scale}), Context()) - base
    torch.testing.assert_close(got, scale * once, rtol=1e-9, atol=1e-12)


# Values of a recipe


def test_a_gradient_over_one_layer_is_its_end_and_divides_by_nothing():
    assert resolve([0.0, 1.0], "model.layers.0.mlp.w", 1.0) == 1
    assert resolve([0.25], "w", 0.0) == resolve([0.25], "w", 1.0) == 0.25
    assert [resolve([0.0, 1.0], "w", t) for t in (0.0, 0.5, 1.0)] == [0, 0.5, 1]  # three layers
    assert resolve([0.0, 1.0, 0.0], "w", 0.75) == 0.5
