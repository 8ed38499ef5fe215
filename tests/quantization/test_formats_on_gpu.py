"""NF4 and int8 on a GPU. Apart from their other tests, so that this file needs no hypothesis."""

import pytest
import torch
from torch import nn

from lecture_util.quantization.llm_int8 import int8_matmul
from lecture_util.quantization.nf4 import NF4Linear


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shape", [(128, 24), (65, 33)])
def test_on_a_gpu_the_same_bits_and_the_same_product(shape):
    D, F = shape
    linear = nn.Linear(D, F)
    here, there = NF4Linear.from_linear(linear), NF4Linear.from_linear(linear.cuda())
    assert torch.equal(here.packed, there.packed.cpu())
    x = normal(3, D)
    torch.testing.assert_close(there(x.cuda()).cpu(), here(x), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 576, 960), (16, 64, 8), (17, 33, 9), (40, 20, 3)])
def test_int8_product_is_exact_on_a_gpu(shape):
    T, D, F = shape
    a_TD, b_FD = whole(T, D), whole(F, D, seed=1)
    out_TF = int8_matmul(a_TD.cuda(), b_FD.cuda())
    assert torch.equal(out_TF.cpu().long(), a_TD.long() @ b_FD.long().T)
