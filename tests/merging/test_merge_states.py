"""Whole models merged in memory: every method against the papers' formulas over the flat model."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.merging.conventions import PAPER
from lecture_util.merging.methods import METHODS, generator
from lecture_util.merging.methods import settings as fill
from lecture_util.merging.plan import Piece, check_models, merge_states, merged
from lecture_util.model.shapes import ShapeError, TensorMismatch

SHAPES = {
    "embed": (7, 3),
    "norm": (5,),
    "bias": (1,),
    "gain": (),
    "head": (3, 7),
    "conv": (2, 1, 3),
}
NEEDS = {"density": 0.5, "t": 0.3}
RANDOM = ["dare_linear", "dare_ties", "della", "della_linear"]


def model(seed, dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def needs(name, **given):
    return {k: v for k, v in NEEDS.items() if k in METHODS[name].parameters} | given


def count(name):
    """As many models as the method takes."""
    return 1 if METHODS[name].takes[1] == 1 else 3


def assert_states_close(got, want, rtol=1e-11, atol=1e-12):
    assert list(got) == list(want)
    for name in want:
        said = f"{name}: {{}}".format
        torch.testing.assert_close(got[name], want[name], rtol=rtol, atol=atol, msg=said)


# The papers', and the tool's, in plain NumPy


def middle(row, density, gamma):
    n = row.size
    kept, order = int(density * n), np.argsort(np.abs(row), kind="stable")
    start = max(0, n - kept - int(gamma * n))
    out = np.zeros_like(row)
    out[order[start : start + kept]] = row[order[start : start + kept]]
    return out


def thinned(method, delta, i, name, convention, seed):
    """One task vector's tensor, thinned out; random methods get the draws they are to use."""
    tool = convention == "mergekit"
    if method == "task_arithmetic":
        return delta
    if method == "ties":  # by the tensor
        out = np.zeros(delta.size)
        kept = max(1, int(0.5 * delta.size))
        top = np.argsort(-np.abs(delta.ravel()))[:kept]
        out[top] = delta.ravel()[top]
        return out.reshape(delta.shape)
    if method.startswith("breadcrumbs"):
        rows = [delta.ravel()] if tool or delta.ndim < 2 else delta.reshape(-1, delta.shape[-1])
        return np.stack([middle(row, 0.5, 0.01) for row in rows]).reshape(delta.shape)
    p = np.full(delta.shape, 0.5)
    n = delta.shape[-1] if delta.ndim else 1
    if method.startswith("della") and n > 1:
        window = 0.15 if tool else 0.07
        ranks = np.abs(delta).argsort(-1).argsort(-1)
        p = 0.5 - window + 2 * window * ranks / (n - 1)
    draws = torch.rand(delta.shape, generator=generator(seed, name, i)).numpy()
    thin = np.where(draws < p, delta, 0)
    if not tool:
        return thin / p
    return thin * (np.abs(delta).sum() / np.abs(thin).sum()) if thin.any() else thin


def reference(method, states, base, convention, weights, seed=0):
    """Whole-model TIES aside, every method that adds task vectors."""
    names, N = list(base), len(states)
    elect = method.endswith("ties") or method == "della"
    mean = method in ("ties", "della") or (elect and convention == "paper")
    deltas = {
        name: [
            thinned(method, (s[name] - base[name]).numpy(), i, name, convention, seed)
            for i, s in enumerate(states)
        ]
        for name in names
    }
    if method == "ties" and convention == "paper":
        for i in range(N):
            raw = {name: (states[i][name] - base[name]).numpy() for name in names}
            flat = np.sort(np.abs(np.concatenate([x.ravel() for x in raw.values()])))
            edge = flat[flat.size - max(1, int(0.5 * flat.size))]
            for name in names:
                deltas[name][i] = np.where(np.abs(raw[name]) >= edge, raw[name], 0)
    moved = {name: [w * d for w, d in zip(weights, deltas[name], strict=True)] for name in names}
    sums = {name: sum(moved[name]) for name in names}
    balance = sum(np.sign(each).sum() for each in sums.values())
    if_zero = 1 if convention == "mergekit" or balance > 0 else -1
    out = {}
    for name in names:
        sign = np.where(sums[name] == 0, if_zero, np.sign(sums[name]))
        inside = [np.sign(m) == sign if elect else np.ones_like(m) for m in moved[name]]
        total = sum(m * k for m, k in zip(moved[name], inside, strict=True))
        shares = weights if convention == "mergekit" else [abs(w) for w in weights]
        weight = sum(w * k for w, k in zip(shares, inside, strict=True))
        total = total / np.where(weight == 0, 1, weight) if mean else total
        out[name] = torch.tensor(base[name].numpy() + 0.7 * total)
    return out


@pytest.mark.parametrize("convention", ["paper", "mergekit"])
@pytest.mark.parametrize("method", [name for name, how in METHODS.items() if how.thin])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.3, 1.2, 0.8], [0.3, -1.2, 0.8]])
@pytest.mark.parametrize("seed", [0, 7])
def test_task_vector_methods_are_their_formulas_over_a_model(method, convention, weights, seed):
    base, states = model(0), [model(i) for i in (1, 2, 3)]
    given = needs(method, weight=weights, convention=convention, seed=seed)
    got = merge_states(method, states, base, scale=0.7, **given)
    # probabilities are fp32 where the papers' are exact
    atol = 1e-6 if method.startswith("della") else 1e-12
    want = reference(method, states, base, convention, weights, seed)
    assert_states_close(got, want, atol=atol)


@pytest.mark.parametrize("convention", ["paper", "mergekit"])
def test_the_other_methods_go_tensor_by_tensor(convention):
    base, a, b = model(0), model(1), model(2)
    got = merge_states("linear", [a, b], weight=[3, 1], convention=convention)
    assert_states_close(got, {k: (3 * a[k] + b[k]) / 4 for k in a})
    got = merge_states("linear", [a, b], weight=[3, 1], normalize=False, convention=convention)
    assert_states_close(got, {k: 3 * a[k] + b[k] for k in a})
    assert_states_close(
        merge_states("passthrough", [a], scale=2, convention=convention), {k: 2 * a[k] for k in a}
    )
    got = merge_states("slerp", [a], base, t=0.3, convention=convention)
    for k in a:
        u, v = base[k].flatten(), a[k].flatten()
        angle = math.acos(float((u @ v / u.norm() / v.norm()).clamp(-1, 1)))
        if angle in (0.0, math.pi):
            want = 0.7 * u + 0.3 * v
        else:
            want = (math.sin(0.7 * angle) * u + math.sin(0.3 * angle) * v) / math.sin(angle)
        torch.testing.assert_close(got[k].flatten(), want)
    for rows in (False, True):
        got = merge_states("model_stock", [a, b], base, filter_wise=rows, convention=convention)
        for k in a:
            width = a[k].shape[-1] if rows and a[k].ndim > 1 else a[k].numel()
            x, y, w = ((s[k] - base[k] * (s is not base)).reshape(-1, width) for s in (a, b, base))
            c = (x * y).sum(-1) / x.norm(dim=-1) / y.norm(dim=-1)
            if convention == "paper":
                t = torch.where(c > 0, 2 * c / (1 + c), 0)
            else:
                t = torch.where(1 + c > 1e-6, 2 * c / (1 + c), 0)
            want = w + t[:, None] * (x + y) / 2
            torch.testing.assert_close(got[k], want.reshape(a[k].shape), rtol=1e-9, atol=1e-9)


# TIES over a whole model


def flat(state):
    return torch.cat([tensor.flatten() for tensor in state.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.29, 0.5, 0.7, 0.95])
def test_the_trim_keeps_as_many_of_the_model_as_of_one_flat_vector(dtype, density):
    shapes = {f"layer{i}": shape for i, shape in enumerate([(1,)] * 30 + [(3, 7), (), (31,)])}
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    tuned = model(3, torch.float32, shapes)
    order = torch.randperm(83, generator=torch.Generator().manual_seed(0)) + 1.0
    tuned = {n: x.sign().to(dtype) for n, x in tuned.items()}
    for (name, x), size in zip(tuned.items(), order.split([x.numel() for x in tuned.values()])):  # noqa: B905
        tuned[name] = x * size.reshape(x.shape).to(dtype)  # 1 to 83, each once
    got = merge_states("ties", [tuned], zeros, density=density)
    kept = max(1, int(density * 83))
    want = flat(tuned).where(flat(tuned).abs() > 83 - kept, 0)
    assert torch.equal(flat(got), want) and flat(got).count_nonzero() == kept


def test_fp64_models_keep_their_share_too():
    zeros = {"w": torch.zeros(101, dtype=torch.float64)}
    for seed in range(5):
        tuned = model(seed, shapes={"w": (101,)})
        for k in (1, 2, 50):
            got = merge_states("ties", [tuned], zeros, density=(k + 0.5) / 101)
            assert got["w"].count_nonzero() == k


@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=11, max_size=11), min_size=1, max_size=3))
def test_a_model_is_one_vector_whatever_its_tensors(rows):
    """Cut in tensors or not, the result is one; entries as large as the last kept stay too."""

    def cut(row, *sizes):
        parts = torch.tensor(row, dtype=torch.float64).split(list(sizes))
        return {str(i): part for i, part in enumerate(parts)}

    for density in (0.2, 0.5, 0.9):
        whole = merge_states("ties", [cut(r, 11) for r in rows], cut([0] * 11, 11), density=density)
        for sizes in ((1, 10), (4, 4, 3), (2, 2, 2, 2, 2, 1)):
            parts = [cut(row, *sizes) for row in rows]
            got = merge_states("ties", parts, cut([0] * 11, *sizes), density=density)
            assert torch.equal(flat(got), flat(whole))
        if len(rows) == 1:
            edge = sorted(map(abs, rows[0]))[11 - max(1, int(density * 11))]
            assert flat(whole).tolist() == [x if abs(x) >= edge else 0 for x in rows[0]]


def test_by_the_tensor_every_tensor_keeps_its_share():
    base = {"small": torch.zeros(10), "large": torch.zeros(10)}
    tuned = {"small": torch.arange(10.0) / 100, "large": torch.arange(10.0) + 1}
    count = lambda **how: {  # noqa: E731
        k: int(v.count_nonzero()) for k, v in merge_states("ties", [tuned], base, **how).items()
    }
    assert count(density=0.5) == {"small": 0, "large": 10}
    assert count(density=0.5, convention={"trim_scope": "tensor"}) == {"small": 5, "large": 5}
    assert count(density=0.5, convention="mergekit") == {"small": 5, "large": 5}


def test_tensors_of_several_densities_keep_their_shares():
    """Each density ranks among its own tensors, whose sizes do not matter; what is kept whole or
    not at all needs no rank."""
    sizes = {
        "half": (10, 0.5),
        "small": (4, 0.5),
        "fifth": (10, 0.2),
        "all": (5, 1.0),
        "none": (7, 0.0),
    }
    base = {name: torch.zeros(n) for name, (n, _) in sizes.items()}
    tuned = {
        "half": torch.arange(1.0, 11),
        "small": torch.tensor([0.1, 0.2, 9.5, 0.3]),
        "fifth": 0.5 + torch.arange(1.0, 11),
        "all": torch.full((5,), 0.1),
        "none": torch.full((7,), 99.0),
    }
    pieces = [
        Piece(name, ((0, name),), (1, name), fill("ties", {"density": density}, 1, PAPER))
        for name, (_, density) in sizes.items()
    ]
    models = [tuned, base]
    got = dict(merged(METHODS["ties"], pieces, lambda i, name: models[i][name], PAPER))
    assert got["half"].tolist() == [0] * 4 + [5, 6, 7, 8, 9, 10]  # 7 of the 14 of both
    assert got["small"].tolist() == torch.tensor([0, 0, 9.5, 0]).tolist()
    assert got["fifth"].tolist() == [0] * 8 + [9.5, 10.5]
    assert torch.equal(got["all"], tuned["all"]) and not got["none"].any()


def test_slerps_convention_reaches_it():
    base = {"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    one_degree = math.radians(1)
    tuned = {"w": torch.tensor([math.cos(one_degree), math.sin(one_degree)], dtype=torch.float64)}
    lengths = {
        rule: merge_states("slerp", [tuned], base, t=0.5, convention=rule)["w"].norm().item()
        for rule in ("paper", "mergekit")
    }
    assert lengths["paper"] == pytest.approx(1, abs=1e-12)  # on the arc, not on the chord
    assert lengths["mergekit"] == pytest.approx(math.cos(one_degree / 2), abs=1e-12)


def test_each_model_is_trimmed_to_its_own_density():
    base = {"w": torch.zeros(10)}
    up, down = {"w": torch.arange(1.0, 11)}, {"w": -100 * torch.arange(1.0, 11)}
    got = merge_states("ties", [up, down], base, density=[1.0, 0.2])
    assert got["w"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, -900, -1000]
    assert merge_states("ties", [up, down], base, density=[0.3, 0])["w"].count_nonzero() == 3


@pytest.mark.parametrize("method", ["ties", "dare_ties", "breadcrumbs_ties", "della"])
def test_where_signs_cancel_the_whole_models_majority_decides(method):
    """In `few` nothing leans either way; in `many` everything goes up."""
    base = {"few": torch.zeros(1), "many": torch.zeros(50)}
    up = {"few": torch.tensor([2.0]), "many": torch.ones(50)}
    down = {"few": torch.tensor([-2.0]), "many": torch.ones(50)}
    given = needs(method, density=1.0)
    assert merge_states(method, [up, down], base, **given)["few"].item() == 2
    upside = [{k: -v for k, v in state.items()} for state in (up, down)]
    assert merge_states(method, upside, base, **given)["few"].item() == -2
    for rule in ("mergekit", {"zero_sign": "positive"}):
        got = merge_states(method, upside, base, **given, convention=rule)
        assert got["few"].item() == 2


# Random methods


@pytest.mark.parametrize("method", RANDOM)
def test_a_seed_fixes_the_merge_and_no_other_thing_does(method):
    base, states = model(0), [model(i) for i in (1, 2, 3)]
    given = needs(method, convention={"zero_sign": "positive"})
    first = merge_states(method, states, base, seed=3, **given)
    torch.manual_seed(99)
    assert_states_close(merge_states(method, states, base, seed=3, **given), first, 0, 0)
    other = merge_states(method, states, base, seed=4, **given)
    assert any(not torch.equal(other[k], first[k]) for k in first)
    turned = [{k: s[k] for k in reversed(s)} for s in (base, *states)]
    back = merge_states(method, turned[1:], turned[0], seed=3, **given)
    assert all(torch.equal(back[k], first[k]) for k in first)  # the tensors' order
    only = [{"head": s["head"]} for s in (base, *states)]
    alone = merge_states(method, only[1:], only[0], seed=3, **given)
    assert torch.equal(alone["head"], first["head"])  # other tensors
    fewer = merge_states(method, states[:2], base, seed=3, weight=[1, 0], **given)
    single = merge_states(method, states[:1], base, seed=3, **given)
    assert_states_close(fewer, single, 0, 0)  # other models


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
def test_over_seeds_the_papers_random_merges_are_task_arithmetic(method):
    """Unbiased: each entry's mean within 5 sigma of the sum of the task vectors."""
    base, states, S = model(0), [model(1), model(2)], 300
    given = needs(method, weight=[0.6, 0.9])
    mean = sum(flat(merge_states(method, states, base, seed=s, **given)) for s in range(S)) / S
    want = flat(merge_states("task_arithmetic", states, base, weight=[0.6, 0.9]))
    least_p = 0.5 if method == "dare_linear" else 0.43
    moves = [w * (flat(s) - flat(base)) for w, s in zip((0.6, 0.9), states, strict=True)]
    sigma = sum(m**2 for m in moves).sqrt() * math.sqrt((1 - least_p) / least_p / S)
    assert ((mean - want).abs() < 5 * sigma).all()


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
def test_models_draw_apart(method):
    base, tuned = {"w": torch.zeros(999)}, {"w": torch.ones(999)}
    got = merge_states(method, [tuned, tuned], base, **needs(method, rescale=False))["w"]
    assert sorted(got.unique().tolist()) == [0, 1, 2]


# What merging may be trusted to do


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_models_equal_to_the_base_return_it(method, dtype):
    base = model(0, dtype)
    got = merge_states(method, [base] * count(method), base, **needs(method))
    eps = torch.finfo(dtype).eps
    assert_states_close(got, base, rtol=2 * eps, atol=0)
    assert all(got[k].dtype == dtype for k in got)


@pytest.mark.parametrize("method", METHODS)
def test_equal_models_give_what_one_gives(method):
    """Means return the model (linear, slerp, stock, passthrough); TIES-like ones the one trimmed;
    the sums add it up."""
    base, tuned, N = model(0), model(1), count(method)
    given = needs(method, density=1.0) if "density" in METHODS[method].parameters else needs(method)
    if METHODS[method].whole and method != "slerp":
        assert_states_close(merge_states(method, [tuned] * N, base, **given), tuned)
    elif method == "slerp":
        assert_states_close(merge_states(method, [tuned], tuned, **given), tuned)
    else:
        got = merge_states(method, [tuned] * N, base, normalize=True, **given)
        assert_states_close(got, tuned)
        added = merge_states(method, [tuned] * N, base, normalize=False, **given)
        assert_states_close(added, {k: base[k] + N * (tuned[k] - base[k]) for k in base})


ORDERLY = ["linear", "task_arithmetic", "ties", "breadcrumbs", "breadcrumbs_ties", "model_stock"]


@pytest.mark.parametrize("method", ORDERLY)
@pytest.mark.parametrize("convention", ["paper", "mergekit"])
def test_the_order_of_models_does_not_matter(method, convention):
    base, states, weights = model(0), [model(i) for i in (1, 2, 3)], [0.3, 1.2, 0.8]
    want = None
    for order in itertools.permutations(range(3)):
        given = needs(method, convention=convention)
        if "weight" in METHODS[method].parameters:
            given["weight"] = [weights[i] for i in order]
        got = merge_states(method, [states[i] for i in order], base, **given)
        want = want or got
        assert_states_close(got, want)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_models_are_merged_wide_and_rounded_once(method, dtype):
    base, states = model(0, dtype), [model(i, dtype) for i in range(1, count(method) + 1)]
    double = [{k: v.double() for k, v in s.items()} for s in (base, *states)]
    got = merge_states(method, states, base, **needs(method))
    want = merge_states(method, double[1:], double[0], **needs(method))
    eps = torch.finfo(dtype).eps
    once = {k: v.to(dtype) for k, v in want.items()}
    assert_states_close(got, once, rtol=eps, atol=eps / 8)
    assert (flat(got) == flat(once)).float().mean() > 0.9


@pytest.mark.parametrize("method", METHODS)
def test_states_stay_as_they_are_and_whole_numbers_too(method):
    def counted(seed):
        steps, mask = torch.tensor([3, 2**24 + 1, *[0] * 40]), torch.tensor([True, False])
        return model(seed) | {"steps": steps, "mask": mask}

    base, states = counted(0), [counted(i) for i in range(1, count(method) + 1)]
    before = [{k: v.clone() for k, v in s.items()} for s in (base, *states)]
    got = merge_states(method, states, base, **needs(method))
    for state, old in zip((base, *states), before, strict=True):
        assert_states_close(state, old, 0, 0)
    assert list(got) == list(base)
    assert got["steps"].dtype == torch.int64 and torch.equal(got["steps"], base["steps"])
    assert got["mask"].tolist() == [True, False]
    plain = [{k: s[k] for k in SHAPES} for s in (base, *states)]  # and count in no ranking
    alone = merge_states(method, plain[1:], plain[0], **needs(method))
    assert_states_close({k: got[k] for k in SHAPES}, alone, 0, 0)
    states[-1]["steps"] = states[-1]["steps"] + 1
    if len(states) > 1 or METHODS[method].base:
        with pytest.raises(ValueError, match=r"steps holds whole numbers .* make them agree first"):
            merge_states(method, states, base, **needs(method))


@pytest.mark.parametrize("method", METHODS)
def test_empty_tensors_and_trainable_ones_are_merged_too(method):
    shapes = {"none": (0, 3), "w": (5, 3)}
    base = {k: torch.nn.Parameter(v) for k, v in model(0, shapes=shapes).items()}
    states = [
        {k: torch.nn.Parameter(v) for k, v in model(i, shapes=shapes).items()}
        for i in range(1, count(method) + 1)
    ]
    got = merge_states(method, states, base, **needs(method))
    plain = [{k: v.detach() for k, v in s.items()} for s in (base, *states)]
    assert got["none"].shape == (0, 3)
    assert_states_close(
        {k: v.detach() for k, v in got.items()},
        merge_states(method, plain[1:], plain[0], **needs(method)),
    )


def test_weights_of_one_model_add_up():
    base, a = model(0), model(1)
    assert_states_close(merge_states("linear", [a, a], weight=[0.1, 1.0]), a)
    got = merge_states("linear", [a, a], weight=[0.1, 1.0], normalize=False)
    assert_states_close(got, {k: 1.1 * a[k] for k in a})
    got = merge_states("task_arithmetic", [a, a], base, weight=[0.1, 1.0])
    assert_states_close(got, {k: base[k] + 1.1 * (a[k] - base[k]) for k in a})


def test_scale_stands_for_lambda():
    base, a = model(0), model(1)
    got = merge_states("task_arithmetic", [a], base, scale=0.3)
    assert_states_close(got, merge_states("task_arithmetic", [a], base, **{"lambda": 0.3}))
    assert_states_close(got, {k: base[k] + 0.3 * (a[k] - base[k]) for k in a})


def test_a_base_that_a_method_has_no_use_for_is_left_out():
    base, a, b = model(0), model(1), model(2)
    assert_states_close(merge_states("linear", [a, b], base), merge_states("linear", [a, b]))


def test_scale_and_lambda_at_once_are_refused():
    with pytest.raises(ValueError, match="ties got both scale and lambda, which are one"):
        merge_states("ties", [model(1)], model(0), scale=0.3, **{"lambda": 0.3})


@pytest.mark.parametrize("method", METHODS)
def test_trainable_models_make_no_graph(method):
    trainable = lambda i: {k: torch.nn.Parameter(v) for k, v in model(i).items()}  # noqa: E731
    states = [trainable(i) for i in range(1, count(method) + 1)]
    got = merge_states(method, states, trainable(0), **needs(method))
    assert all(tensor.grad_fn is None for tensor in got.values())
    assert torch.is_grad_enabled()


def test_gradients_stay_on_for_whoever_reads_the_merge_as_it_is_made():
    piece = Piece("w", ((0, "w"),), settings=fill("linear", {}, 1, PAPER))
    for _ in merged(METHODS["linear"], [piece] * 2, lambda i, name: torch.ones(2), PAPER):
        assert torch.is_grad_enabled()


def test_what_are_no_state_dicts_is_refused_by_name():
    state, module = model(1), torch.nn.Linear(2, 2)
    for states, message in (
        (state, "states is one dict: expected a list of state dicts"),
        (module, "states is one Linear: expected a list of state dicts"),
        ([state, module], "model 1 is a Linear: expected a state dict, .* like model.state_dict"),
    ):
        with pytest.raises(TypeError, match=message):
            merge_states("linear", states)
    with pytest.raises(TypeError, match="base is a Linear: expected a state dict"):
        merge_states("ties", [state], module)
    with pytest.raises(TypeError, match="gain is a float in model 0: expected a tensor"):
        merge_states("linear", [state | {"gain": 1.0}] * 2)


def test_progress_is_shown_on_request(capsys):
    base, a = model(0), model(1)
    merge_states("ties", [a, a], base)
    assert capsys.readouterr() == ("", "")
    merge_states("ties", [a, a], base, progress=True)
    shown = capsys.readouterr().err
    for label in ("counting magnitudes", "finding thresholds", "counting signs", "merging"):
        assert label in shown


# What does not fit


def test_models_that_do_not_fit_are_refused_with_the_tensors_name():
    w = {"a": torch.ones(2, 3)}
    with pytest.raises(KeyError, match=r"b is in one of models 0 and 1 only: merge models of one"):
        merge_states("linear", [w, w | {"b": torch.ones(1)}])
    with pytest.raises(KeyError, match=r"a is in one of models 0 and 2 only"):
        merge_states("ties", [w, w], {"b": torch.ones(2, 3)})
    with pytest.raises(ShapeError, match=r"a is \(3,\) in model 1 but \(2, 3\) in model 0"):
        merge_states("linear", [w, {"a": torch.ones(3)}])
    with pytest.raises(TensorMismatch, match=r"a is torch.int8 in model 1 but torch.float32"):
        merge_states("ties", [{"a": torch.ones(2, 3, dtype=torch.int8)}], w)
    with pytest.raises(ValueError, match=r"model 0 holds no tensors: pass state dicts"):
        merge_states("ties", [{}], {})


@pytest.mark.parametrize("method", [name for name, how in METHODS.items() if how.base])
def test_a_method_that_needs_a_base_says_so(method):
    states = [model(i) for i in range(count(method))]
    with pytest.raises(ValueError, match=f"{method} needs a base model: the one the others were"):
        merge_states(method, states, **needs(method))


def test_too_few_or_too_many_models_are_refused():
    a = model(1)
    for name, models, message in (
        ("slerp", 2, r"slerp got 2 models beside the base: expected exactly 1"),
        ("slerp", 0, r"slerp got 0 models beside the base: expected exactly 1"),
        ("model_stock", 1, r"model_stock got 1 models beside the base: expected at least 2"),
        ("passthrough", 2, r"passthrough got 2 models: expected exactly 1"),
        ("ties", 0, r"ties got 0 models beside the base: expected at least 1"),
        ("linear", 0, r"linear got 0 models: expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_states(name, [a] * models, a, **needs(name))
        with pytest.raises(ValueError, match=message):
            check_models(name, models, True)


def test_unknown_methods_parameters_and_conventions_are_refused_before_anything_is_merged():
    a = model(1)
    with pytest.raises(ValueError, match=r"merge method 'tise' is unknown: did you mean 'ties'"):
        merge_states("tise", [a], a)
    with pytest.raises(ValueError, match=r"linear has no parameter 'scale'"):
        merge_states("linear", [a], scale=2)
    with pytest.raises(ValueError, match=r"convention is 'papers'"):
        merge_states("linear", [a], convention="papers")
    with pytest.raises(ValueError, match=r"probabilities must lie above 0 and at most at 1"):
        merge_states("della", [a], a, density=0.95, epsilon=0.07)
    assert_states_close(merge_states("linear", [a], convention=PAPER), a)
