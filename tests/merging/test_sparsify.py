"""Thinning task vectors out: who is kept, by a sort; how likely each is, by counting draws."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.merging.sparsify import breadcrumbs, drop, keep_probabilities, magprune, trim
from lecture_util.model.shapes import TensorMismatch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (5,), (1, 5), (7, 1), (3, 5), (2, 3, 7), (0,), (4, 0)]
VALUES = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 1e-45, 1e30]), min_size=1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def rank_mask(row, first, stop):
    """True for ranks first <= r < stop by rising magnitude, of equal ones the first first."""
    order = sorted(range(len(row)), key=lambda i: abs(row[i]))
    chosen = set(order[max(0, first) : stop])
    return [i in chosen for i in range(len(row))]


def keep(delta, mask):
    flat = [x if m else 0.0 for x, m in zip(delta.flatten().tolist(), mask, strict=True)]
    return torch.tensor(flat, dtype=delta.dtype).reshape(delta.shape)


# Trim


def test_trim_by_hand():
    delta = torch.tensor([[0.1, -5.0], [3.0, 0.2]])
    assert trim(delta, 0.5).tolist() == [[0, -5], [3, 0]]
    rows = torch.tensor([[5.0, 4.0, 3.0], [0.3, 0.2, 0.1]])  # of the tensor, not of each row
    assert trim(rows, 0.5).tolist() == [[5, 4, 3], [0, 0, 0]]
    assert trim(delta, 0.3).tolist() == [[0, -5], [0, 0]]  # floor(1.2)
    assert trim(delta, 0.01).tolist() == [[0, -5], [0, 0]]  # at least one
    assert trim(delta, 0.0).tolist() == [[0, 0], [0, 0]]
    assert torch.equal(trim(delta, 1.0), delta)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 0.77, 0.999])
def test_trim_keeps_the_largest_of_the_tensor(shape, dtype, density):
    delta = (4 * random(shape)).round().to(dtype)  # with ties and zeros
    n = delta.numel()
    kept = max(1, math.floor(density * n))
    want = keep(delta, rank_mask(delta.flatten().tolist(), n - kept, n))
    got = trim(delta, density)
    assert got.dtype == dtype and torch.equal(got, want)


@given(VALUES, st.floats(0, 1))
def test_trim_keeps_floor_density_n_whatever_the_ties(values, density):
    delta = torch.tensor(values, dtype=torch.float64)
    n = len(values)
    kept = n if density == 1 else 0 if density == 0 else max(1, int(density * n))
    assert trim(delta, density).tolist() == [
        x if m else 0 for x, m in zip(values, rank_mask(values, n - kept, n), strict=True)
    ]


def test_density_is_what_is_kept_not_what_is_dropped():
    ones = torch.ones(10_000)  # and a constant tensor is not wiped out by its own threshold
    assert trim(ones, 0.95).count_nonzero() == 9500
    assert trim(ones.view(100, 100), 0.05).count_nonzero() == 500
    assert trim(torch.ones(3), 0.9).count_nonzero() == 2  # drops .3 of an entry, rounded up
    assert 9400 < drop(ones, 0.95, seeded()).count_nonzero() < 9600
    assert breadcrumbs(ones, 0.95, gamma=0.0).count_nonzero() == 9500
    assert 9400 < magprune(ones, 0.95, 0.04, seeded()).count_nonzero() < 9600


def test_a_threshold_keeps_all_from_it_on():
    delta = torch.tensor([1.0, -2.0, 2.0, 3.0])
    assert trim(delta, 0.2, threshold=2.0).tolist() == [0, -2, 2, 3]
    assert trim(delta, 0.9, threshold=2.5).tolist() == [0, 0, 0, 3]
    assert trim(delta, 0.9, threshold=9.0).tolist() == [0, 0, 0, 0]
    assert trim(delta, 1.0, threshold=9.0).tolist() == delta.tolist()  # all or nothing go first
    assert trim(delta, 0.0, threshold=0.0).tolist() == [0, 0, 0, 0]
    fine = torch.tensor([1 + 1e-12, 1 - 1e-9], dtype=torch.float64)  # thresholds are fp32 numbers
    assert torch.equal(trim(fine, 0.5, threshold=1.0), fine)


@pytest.mark.parametrize("density", [0.1, 0.37, 0.5, 0.9])
def test_trim_is_mergekits_magnitude_where_no_magnitudes_are_equal(density):
    delta = random((13, 7), 3, torch.float32)
    flat = delta.numpy().ravel()
    top = np.argsort(-np.abs(flat))[: max(1, int(density * flat.size))]
    want = np.zeros_like(flat)
    want[top] = flat[top]
    assert torch.equal(trim(delta, density), torch.tensor(want).view(13, 7))


def test_a_nan_is_not_hidden():
    delta = torch.tensor([1.0, math.nan, 2.0, 3.0])
    for density in (0.2, 0.5, 0.9):
        assert trim(delta, density).isnan().any()
        assert trim(delta, density, threshold=2.0).isnan().any()
        assert breadcrumbs(delta, density).isnan().any()


def test_infinities_are_the_largest():
    delta = torch.tensor([1.0, -math.inf, 5.0, 2.0])
    assert trim(delta, 0.25).nan_to_num(0, 9, -9).tolist() == [0, -9, 0, 0]


# Breadcrumbs


def test_breadcrumbs_by_hand():
    row = torch.tensor([1.0, -2, 3, -4, 5, -6, 7, -8, 9, -10])
    assert breadcrumbs(row, 0.5, 0.2).tolist() == [0, 0, 0, -4, 5, -6, 7, -8, 0, 0]
    both = torch.stack([row, row / 100])
    got = breadcrumbs(both, 0.5, 0.2)
    torch.testing.assert_close(got[1], got[0] / 100)  # each row by itself
    whole = breadcrumbs(both, 0.5, 0.2, scope="tensor")
    assert whole[0].tolist() == [1, -2, 3, -4, 5, -6, 0, 0, 0, 0]
    assert whole[1].count_nonzero() == 4  # 20 entries: 4 outliers off, the next 10 kept


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density,gamma", [(0.5, 0.2), (0.9, 0.3), (0.37, 0.01), (0.0, 0.1)])
@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_breadcrumbs_keep_the_middle(shape, dtype, density, gamma, scope):
    delta = (4 * random(shape, 1)).round().to(dtype)
    n = (shape[-1] if shape else 1) if scope == "row" else delta.numel()
    kept, outliers = math.floor(density * n), math.floor(gamma * n)
    first = max(0, n - kept - outliers)  # where both don't fit, outliers come back
    rows = delta.reshape(-1, n) if n else delta.reshape(0, 0)
    mask = [m for row in rows.tolist() for m in rank_mask(row, first, first + kept)]
    got = breadcrumbs(delta, density, gamma, scope=scope)
    assert got.dtype == dtype and torch.equal(got, keep(delta, mask))


def test_breadcrumbs_without_outliers_are_a_trim_and_with_all_kept_the_vector():
    delta = random((3, 31))
    assert torch.equal(breadcrumbs(delta, 0.4, 0.0, scope="tensor"), trim(delta, 0.4))
    assert torch.equal(breadcrumbs(delta, 1.0, 0.3), delta)


@pytest.mark.parametrize("density,gamma", [(0.5, 0.1), (0.9, 0.25), (0.2, 0.01)])
def test_breadcrumbs_are_mergekits_outlier_mask_by_the_tensor(density, gamma):
    delta = random((11, 9), 4, torch.float32)
    flat = delta.numpy().ravel()
    rising = np.argsort(np.abs(flat))
    wanted, top = int(density * 99), int(gamma * 99)
    start = max(0, 99 - wanted - top)
    out = np.zeros_like(flat)
    out[rising[start : start + wanted]] = flat[rising[start : start + wanted]]
    got = breadcrumbs(delta, density, gamma, scope="tensor")
    assert torch.equal(got, torch.tensor(out).view(11, 9))


# DARE


def test_dare_keeps_what_is_drawn_below_the_density():
    delta = random((5, 7))
    draws = torch.rand((5, 7), generator=seeded(3))
    want = torch.where(draws < 0.3, delta / 0.3, 0)
    torch.testing.assert_close(drop(delta, 0.3, seeded(3)), want)
    torch.testing.assert_close(drop(delta, 0.3, seeded(3), rescale=None), want * 0.3)


@pytest.mark.parametrize("density", [0.05, 0.3, 0.5, 0.9])
def test_dare_is_unbiased_with_the_variance_of_bernoulli_draws(density):
    """Each entry is x/p with probability p: mean x, variance x^2 (1-p)/p; checked at 5 sigma."""
    S, x = 400, torch.tensor([1.0, -2.0, 0.5, 1e3, -1e-3] * 20, dtype=torch.float64)
    ratios = torch.stack([drop(x, density, seeded(s)) for s in range(S)]) / x
    variance = (1 - density) / density
    assert abs(ratios.mean().item() - 1) < 5 * math.sqrt(variance / ratios.numel())
    per_entry = ratios.mean(0) - 1  # 100 entries, so 5 sigma is enough for the worst too
    assert per_entry.abs().max() < 5 * math.sqrt(variance / S)
    values = set(ratios.unique().mul(density).round(decimals=12).tolist())
    assert values == {0.0, 1.0}  # with which the variance follows from the share kept
    kept = (ratios > 0).double().mean().item()
    share_sigma = math.sqrt(density * (1 - density) / ratios.numel())
    assert abs(kept - density) < 5 * share_sigma
    assert ratios.var().item() == pytest.approx(kept * (1 - kept) / density**2, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draw_does_not_depend_on_dtype_values_or_strides(dtype):
    draws = torch.rand((6, 4), generator=seeded(1)) < 0.5
    for delta in (random((6, 4), 2), 5 * random((4, 6), 3).abs().T):
        got = drop(delta.to(dtype), 0.5, seeded(1))
        assert got.dtype == dtype and torch.equal(got != 0, draws)
        torch.testing.assert_close(got[draws], (delta.to(dtype) * 2)[draws])
        probability = keep_probabilities(delta.to(dtype), 0.5, 0.2)
        pruned = magprune(delta.to(dtype), 0.5, 0.2, seeded(1))
        assert pruned.dtype == dtype
        assert torch.equal(pruned != 0, torch.rand((6, 4), generator=seeded(1)) < probability)


def test_draws_go_on_from_where_the_generator_stands():
    delta, generator = torch.ones(100), seeded()
    assert not torch.equal(drop(delta, 0.5, generator), drop(delta, 0.5, generator))
    assert torch.equal(drop(delta, 0.5, seeded(7)), drop(delta, 0.5, seeded(7)))
    state = torch.random.get_rng_state()
    drop(delta, 0.5, generator)
    magprune(delta, 0.5, 0.1, generator)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's draws


def test_matching_the_l1_norm_is_not_unbiased():
    """[100, .01 x 999]: with the 100 dropped, survivors grow some 124 times instead of 10."""
    delta = torch.full((1000,), 0.01)
    delta[0] = 100
    kept = drop(torch.ones(1000), 0.1, seeded(0)) > 0
    assert not kept[0]
    theirs = drop(delta, 0.1, seeded(0), rescale="l1")
    survivors = int(kept.sum())
    torch.testing.assert_close(theirs[kept], torch.full((survivors,), 109.99 / survivors))
    assert 100 < (theirs.max() / 0.01).item() < 150
    assert drop(delta, 0.1, seeded(0)).max().item() == pytest.approx(0.1)
    torch.testing.assert_close(theirs.abs().sum(), delta.abs().sum())
    means = {"inverse": 0.0, "l1": 0.0}
    for rescale in means:
        means[rescale] = sum(
            drop(delta, 0.1, seeded(s), rescale=rescale)[1:].mean().item() for s in range(300)
        )
    # sigma of the mean of 299,700 small entries: .01 * sqrt(9 / 299700) = 5.5e-5
    assert means["inverse"] / 300 == pytest.approx(0.01, abs=3e-4)
    assert means["l1"] / 300 > 0.05


@pytest.mark.parametrize("rescale", ["inverse", "l1", None])
def test_nothing_left_is_nothing_and_no_division_by_zero(rescale):
    delta = random((3,))
    assert drop(delta, 1e-6, seeded(), rescale=rescale).tolist() == [0, 0, 0]
    assert magprune(delta, 1e-6, 5e-7, seeded(), rescale=rescale).tolist() == [0, 0, 0]
    zeros = torch.zeros(5)
    for seed in range(5):
        assert drop(zeros, 0.5, seeded(seed), rescale=rescale).tolist() == [0] * 5
        assert magprune(zeros, 0.5, 0.1, seeded(seed), rescale=rescale).tolist() == [0] * 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_l1_norm_is_summed_wide(dtype):
    many = torch.ones(200_000, dtype=dtype)  # 200,000 is beyond fp16
    got = drop(many, 0.5, seeded(), rescale="l1")
    ratio = 200_000 / int((got != 0).sum())
    torch.testing.assert_close(got.max().double().item(), ratio, rtol=1e-2, atol=0)


def test_below_mergekits_least_norm_nothing_is_scaled():
    delta = torch.full((50,), 1e-10)
    got = drop(delta, 0.5, seeded(), rescale="l1")
    assert got.max() == delta.max()
    assert drop(delta, 0.5, seeded()).max().item() == pytest.approx(2e-10)


# DELLA


def test_keep_probabilities_by_hand():
    delta = torch.tensor([[1.0, -3.0, 2.0], [0.0, 0.0, 5.0]])
    want = torch.tensor([[0.4, 0.6, 0.5], [0.4, 0.5, 0.6]])  # of equal ones the first is lower
    torch.testing.assert_close(keep_probabilities(delta, 0.5, 0.1), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density,epsilon", [(0.5, 0.1), (0.3, 0.07), (0.5, 0.0), (0.5, 0.499)])
def test_probabilities_rise_evenly_with_the_rank_in_a_row(shape, dtype, density, epsilon):
    delta = (4 * random(shape, 5)).round().to(dtype)
    got = keep_probabilities(delta, density, epsilon)
    assert got.shape == shape and got.dtype in (torch.float32, torch.float64)
    n = shape[-1] if shape else 1
    low, width = Fraction(density) - Fraction(epsilon), 2 * Fraction(epsilon)
    want = []
    for row in delta.reshape(-1, n).tolist() if n else []:
        order = sorted(range(n), key=lambda i: abs(row[i]))
        step = width / (n - 1) if n > 1 else 0
        by_rank = [low + r * step if n > 1 else Fraction(density) for r in range(n)]
        want += [float(by_rank[order.index(i)]) for i in range(n)]
    want = torch.tensor(want, dtype=got.dtype).reshape(shape)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    if delta.numel():
        assert got.mean().item() == pytest.approx(density, rel=1e-6)


def test_a_row_of_one_entry_gets_the_density_itself():
    for shape in ((), (1,), (7, 1)):
        got = keep_probabilities(torch.ones(shape), 0.4, 0.2)
        torch.testing.assert_close(got, torch.full(shape, 0.4))
        pruned = magprune(torch.ones(shape), 0.4, 0.2, seeded())
        assert pruned.shape == shape and pruned.isfinite().all()


@pytest.mark.parametrize("n", [5, 300, 70_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_of_long_rows_are_counted_wide(n, dtype):
    got = keep_probabilities(torch.ones(n, dtype=dtype), 0.5, 0.25)
    assert got.diff().min() > 0 and got.min() >= 0.25 and got.max() <= 0.75


@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 1), ()])
def test_shapes_are_kept(shape):
    for rescale in ("inverse", "l1"):
        assert magprune(random(shape), 0.5, 0.1, seeded(), rescale=rescale).shape == shape
        assert drop(random(shape), 0.5, seeded(), rescale=rescale).shape == shape
    assert trim(random(shape), 0.5).shape == breadcrumbs(random(shape), 0.5).shape == shape


def test_epsilon_makes_large_entries_likelier():
    delta = torch.arange(1.0, 101.0)
    halves = {}
    for epsilon in (0.0, 0.4):
        kept = sum((magprune(delta, 0.5, epsilon, seeded(s)) != 0).double() for s in range(200))
        halves[epsilon] = kept[:50].mean().item() / 200, kept[50:].mean().item() / 200
    # mean probability of the halves: .5 -+ .4 * 50/99; sigma of each mean: at most .005
    assert halves[0.0] == pytest.approx((0.5, 0.5), abs=0.025)
    assert halves[0.4] == pytest.approx((0.5 - 20 / 99, 0.5 + 20 / 99), abs=0.025)


def test_della_is_unbiased_entry_by_entry():
    """Each survivor over its own p: mean x, variance x^2 (1-p)/p; checked at 5 sigma."""
    S, delta = 500, random((4, 11), 6)
    p = keep_probabilities(delta, 0.5, 0.3)
    ratios = torch.stack([magprune(delta, 0.5, 0.3, seeded(s)) for s in range(S)]) / delta
    sigma = ((1 - p) / p / S).sqrt()
    assert ((ratios.mean(0) - 1).abs() < 5 * sigma).all()
    scaled = (ratios * p).round(decimals=6)  # so nothing but 0 and 1/p, and the variance follows
    assert scaled.unique().tolist() == [0, 1]


def test_della_without_a_window_is_dare():
    delta = random((4, 11), 6)
    for rescale in ("inverse", "l1", None):
        dare = drop(delta, 0.4, seeded(5), rescale=rescale)
        torch.testing.assert_close(magprune(delta, 0.4, 0.0, seeded(5), rescale=rescale), dare)


def test_mergekits_della_restated():
    """Its ranks count from 1, its window is the same, its scale the sum of magnitudes."""
    delta, density, epsilon = random((3, 8), 2, torch.float32), 0.5, 0.15
    rank = np.abs(delta.numpy()).argsort(axis=1).argsort(axis=1) + 1
    spread = (rank - 1) / (8 - 1)
    chance = (density - epsilon) + spread * 2 * epsilon
    drawn = torch.rand((3, 8), generator=seeded(4)).numpy() < chance
    thin = delta.numpy() * drawn
    want = thin * np.abs(delta.numpy()).sum() / np.abs(thin).sum()
    got = magprune(delta, density, epsilon, seeded(4), rescale="l1")
    torch.testing.assert_close(got, torch.tensor(want))


# All of them

WAYS = {
    "trim": lambda d, density: trim(d, density),
    "breadcrumbs": lambda d, density: breadcrumbs(d, density),
    "drop": lambda d, density: drop(d, density, seeded()),
    "magprune": lambda d, density: magprune(d, density, 0.01, seeded()),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_vector_itself_is_never_touched_and_the_result_is_a_new_one(way):
    delta = random((3, 5))
    before = delta.clone()
    for density in (0.0, 0.5, 1.0):
        WAYS[way](delta, density).fill_(9)
        assert torch.equal(delta, before)


@pytest.mark.parametrize("way", WAYS)
def test_density_0_keeps_nothing_and_1_everything(way):
    delta = random((3, 5))
    assert torch.equal(WAYS[way](delta, 1), delta)
    assert not WAYS[way](delta, 0).any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("density", [-0.1, 1.1, math.nan, True, "0.5", None])
def test_a_density_that_is_no_share_is_refused(way, density):
    with pytest.raises(ValueError, match=r"density is .*: expected the share of entries, between"):
        WAYS[way](torch.ones(3), density)


def test_other_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"gamma is -0.1: expected the share of entries"):
        breadcrumbs(torch.ones(3), 0.5, -0.1)
    with pytest.raises(ValueError, match=r"scope is 'rows': expected 'row' or 'tensor'"):
        breadcrumbs(torch.ones(3), 0.5, scope="rows")
    with pytest.raises(ValueError, match=r"rescale is 'l2': expected 'inverse', 'l1' or None"):
        drop(torch.ones(3), 0.5, seeded(), rescale="l2")
    for epsilon in (0.5, 0.6, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"density=0.5 with epsilon=.* spans .* above 0 and"):
            keep_probabilities(torch.ones(3), 0.5, epsilon)
    with pytest.raises(ValueError, match=r"density=0.9 with epsilon=0.2 spans 0.7 to 1.1"):
        magprune(torch.ones(3), 0.9, 0.2, seeded())
    keep_probabilities(torch.ones(3), 0.75, 0.25)  # up to 1 is a probability


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_only_floats_are_thinned_out(dtype):
    odd = torch.ones(3).to(dtype)
    for thin in (
        *(lambda x: trim(x, 0.5), lambda x: drop(x, 0.5, seeded()), lambda x: breadcrumbs(x, 0.5)),
        *(lambda x: magprune(x, 0.5, 0.1, seeded()), lambda x: keep_probabilities(x, 0.5, 0.1)),
    ):
        with pytest.raises(TensorMismatch, match=f"delta is {dtype}"):
            thin(odd)


def test_a_share_may_be_any_real_number_and_counts_as_a_double():
    delta = torch.arange(1.0, 12)
    assert torch.equal(trim(delta, Fraction(1, 2)), trim(delta, 0.5))
    assert torch.equal(trim(delta, np.float64(0.5)), trim(delta, 0.5))
    assert torch.equal(
        breadcrumbs(delta, np.float32(0.5), np.float32(0.25)), breadcrumbs(delta, 0.5, 0.25)
    )
    share = np.float32(0.7)  # a little less than .7; in float32 100,000 times it is 70,000
    assert trim(torch.arange(1.0, 100_001), share).count_nonzero() == 69_999
