"""Choosing by rank: against a full sort, with ties, zeros, subnormals and infinities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.merging.select import Magnitudes, least

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS = st.floats(width=32, allow_nan=False)
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.inf, 1e-45, -1e-45, 1e-38])


def least_by_sort(row, k):
    """Python's sort is stable: of equal entries the first come first."""
    order = sorted(range(len(row)), key=lambda i: row[i])
    return [i in set(order[: max(0, k)]) for i in range(len(row))]


def test_least_by_hand():
    values = torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0])
    assert least(values, 2).tolist() == [False, True, False, True, False]
    assert least(values, 4).tolist() == [False, True, True, True, True]
    rows = torch.tensor([[2.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert least(rows, 1).tolist() == [[False, True, False], [True, False, False]]


@given(st.lists(st.one_of(FEW, FLOATS), min_size=1, max_size=40), st.integers(-1, 41))
def test_least_is_what_a_stable_sort_puts_first(row, k):
    values = torch.tensor(row)
    assert least(values, k).tolist() == least_by_sort(row, k)
    assert least(values[None], k).tolist() == [least_by_sort(row, k)]  # the way for rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (1, 7), (7, 1), (3, 5), (2, 3, 5), (0,), (3, 0)])
def test_every_row_gets_exactly_k(dtype, shape):
    values = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for k in range(-1, shape[-1] + 2):
        mask = least(values, k)
        assert mask.shape == shape and mask.dtype == torch.bool
        for row, got in zip(
            values.reshape(-1, max(1, shape[-1])), mask.reshape(-1, max(1, shape[-1])), strict=True
        ):
            assert got.tolist() == least_by_sort(row.tolist(), k)


def test_a_number_is_a_row_of_one():
    assert [least(torch.tensor(5.0), k).item() for k in (0, 1, 2)] == [False, True, True]


def test_values_stay_as_they_are_and_may_be_strided_or_trainable():
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = values.detach().clone()
    column, rows = least(values[:, 1], 3), least(values.T, 2)
    assert torch.equal(values.detach(), before)
    assert column.tolist() == least_by_sort(before[:, 1].tolist(), 3)
    assert rows.tolist() == [least_by_sort(row, 2) for row in before.T.tolist()]


# A whole model's k-th largest


def kth_magnitude(tensors, k):
    magnitudes = Magnitudes()
    for tensor in tensors:
        magnitudes.count(tensor)
    magnitudes.narrow(k)
    for tensor in tensors:
        magnitudes.refine(tensor)
    return magnitudes.kth()


def kth_by_sort(tensors, k):
    flat = np.concatenate([np.abs(t.float().numpy().ravel()) for t in tensors])
    return float(np.sort(flat)[::-1][k - 1])


@given(
    st.lists(st.lists(st.one_of(FEW, FLOATS), max_size=12), min_size=1, max_size=5),
    st.data(),
)
def test_the_kth_largest_magnitude_is_a_full_sorts(rows, data):
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    total = sum(map(len, rows))
    if not total:
        return
    k = data.draw(st.integers(1, total))
    found = kth_magnitude(tensors, k)
    assert found == kth_by_sort(tensors, k)
    assert kth_magnitude(tensors[::-1], k) == found  # whatever the order


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_of_random_numbers_of_all_sizes(dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-6, 4, (3, 67), generator=generator)
    tensors = [(torch.randn(67, generator=generator) * size).to(dtype) for size in sizes]
    for k in range(1, 202, 7):
        assert kth_magnitude(tensors, k) == kth_by_sort(tensors, k)


def test_numbers_that_differ_in_the_last_bit_are_told_apart():
    one, bits = torch.tensor([1.0]), torch.tensor([0x3F800001], dtype=torch.int32)
    above = bits.view(torch.float32)
    assert kth_magnitude([one, above], 1) == above.item() > 1
    assert kth_magnitude([one, above], 2) == 1
    below_a_bin = torch.tensor([0x3F7FFFFF], dtype=torch.int32).view(torch.float32)
    assert kth_magnitude([one, below_a_bin], 2) == below_a_bin.item() < 1


def test_zeros_ties_subnormals_and_infinities_have_their_ranks():
    tensors = [torch.tensor([0.0, -0.0, 1e-45, -1e-45]), torch.tensor([[math.inf], [-2.0]])]
    ranks = [kth_magnitude(tensors, k) for k in range(1, 7)]
    smallest = torch.tensor(1e-45).item()
    assert ranks == [math.inf, 2.0, smallest, smallest, 0.0, 0.0]
    assert kth_magnitude([torch.zeros(7)], 3) == 0


def test_it_counts_and_keeps_no_numbers():
    magnitudes = Magnitudes()
    for n in (5, 0, 12):
        magnitudes.count(torch.ones(n))
    assert magnitudes.total == 17
    kept = sum(x.numel() for x in vars(magnitudes).values() if isinstance(x, torch.Tensor))
    assert kept == 2**15 + 2**16


@pytest.mark.parametrize("k", [-1, 0, 4])
def test_a_rank_that_nothing_has_is_refused(k):
    magnitudes = Magnitudes()
    magnitudes.count(torch.ones(3))
    with pytest.raises(ValueError, match=f"k={k}: expected a rank from 1 to 3"):
        magnitudes.narrow(k)
