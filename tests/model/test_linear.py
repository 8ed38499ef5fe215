import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lecture_util.model import linear
from lecture_util.model.linear import Linear


@pytest.fixture(autouse=True, params=["oneDNN", "torch's choice"])
def library(request, monkeypatch):
    """Either path, whatever processor the test runs on."""
    if request.param == "oneDNN":
        if linear.OPERATOR is None:
            pytest.skip("torch was built without oneDNN")
        monkeypatch.setattr(linear, "ONEDNN", linear.OPERATOR)
    else:
        monkeypatch.setattr(linear, "ONEDNN", None)


def pair(D, F, bias, dtype=torch.float32):
    torch.manual_seed(0)
    ours = Linear(D, F, bias=bias, dtype=dtype)
    peer = nn.Linear(D, F, bias=bias, dtype=dtype)
    peer.load_state_dict(ours.state_dict())
    return ours.requires_grad_(False), peer.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3), (33, 1), (0,), (2, 0)])
def test_it_equals_fp64(rows, bias, dtype):
    ours, peer = pair(65, 31, bias, dtype)
    x = torch.randn(*rows, 65, dtype=dtype)
    want = peer.double()(x.double())
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(ours(x).double(), want, atol=tolerance, rtol=tolerance)


def test_strided_rows_and_weights_are_read_as_they_are():
    ours, peer = pair(16, 12, False)
    x = torch.randn(5, 32)[:, ::2]
    torch.testing.assert_close(ours(x), peer(x))
    ours.weight = nn.Parameter(ours.weight.t().contiguous().t(), requires_grad=False)
    torch.testing.assert_close(ours(x), peer(x))


def test_it_has_gradients_when_they_are_wanted():
    ours, peer = pair(8, 6, True)
    x = torch.randn(3, 8)
    for layer in (ours, peer):
        layer.requires_grad_(True)
        layer(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, peer.weight.grad)
    y = x.clone().requires_grad_(True)
    ours.requires_grad_(False)(y).sum().backward()
    torch.testing.assert_close(y.grad, peer.weight.detach().sum(0).expand(3, -1))


def test_a_changed_weight_counts_at_once():
    ours, _ = pair(4, 4, False)
    x = torch.eye(4)
    ours(x)
    ours.weight.data.zero_()
    assert not ours(x).any()


def test_the_flop_counter_sees_it():
    ours, peer = pair(8, 6, False)
    counts = []
    for layer in (ours, peer):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(torch.randn(2, 5, 8))
        counts.append(counter.get_total_flops())
    assert counts == [2 * 10 * 8 * 6] * 2
