"""Costs against torch's FLOP counter and tensors, and properties that must hold for every size."""

import subprocess
import sys

import pytest
import sympy
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import (
    ACCELERATORS,
    Cost,
    attention,
    crossover_batch,
    decode_step,
    forward,
    forward_flops,
    kv_bytes_per_token,
    kv_cache_bytes,
    matmul,
    mlp,
    num_params,
    prefill,
    symbolic_config,
    symbols,
    weight_bytes,
    weight_bytes_read,
)

size = st.integers(1, 64)
big = st.integers(1, 10_000)


def counted(fn):
    with FlopCounterMode(display=False) as counter:
        out = fn()
    return counter.get_total_flops(), out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_matches_counter_and_tensors(dtype):
    x_BD, w_DF = torch.ones(3, 5, dtype=dtype), torch.ones(5, 7, dtype=dtype)
    flops, y_BF = counted(lambda: x_BD @ w_DF)
    read, written = x_BD.nbytes + w_DF.nbytes, y_BF.nbytes
    assert matmul(3, 5, 7, dtype.itemsize) == Cost(flops, read, written)


def test_mlp_matches_counter_and_tensors():
    B, T, D, F = 2, 3, 8, 20
    x_BTD = torch.ones(B, T, D)
    up_DF, gate_DF, down_FD = torch.ones(D, F), torch.ones(D, F), torch.ones(F, D)
    kept = []

    def run():
        u_BTF, g_BTF = x_BTD @ up_DF, x_BTD @ gate_DF
        kept.extend([u_BTF, g_BTF])
        return (nnf.silu(g_BTF) * u_BTF) @ down_FD

    flops, y_BTD = counted(run)
    weights = sum(w.nbytes for w in (up_DF, gate_DF, down_FD))
    hidden = sum(t.nbytes for t in kept)
    read, written = x_BTD.nbytes + weights, y_BTD.nbytes
    expected = {
        "unfused": Cost(flops, read + hidden, written + hidden),
        "write_only": Cost(flops, read, written + hidden),
        "fused": Cost(flops, read, written),
    }
    for fusion, cost in expected.items():
        assert mlp(B, T, D, F, fusion=fusion, dtype_bytes=4) == cost


def test_attention_matches_counter_and_tensors():
    B, S, T, K, G, H = 2, 7, 3, 2, 4, 8
    q_BTKGH = torch.randn(B, T, K, G, H)
    k_BSKH, v_BSKH = torch.randn(B, S, K, H), torch.randn(B, S, K, H)

    def run():
        scores = torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH)
        return torch.einsum("bkgts,bskh->btkgh", scores.softmax(-1), v_BSKH)

    flops, out_BTKGH = counted(run)
    read = q_BTKGH.nbytes + k_BSKH.nbytes + v_BSKH.nbytes
    cost = attention(B, S, T, K * G, K, H, dtype_bytes=4)
    assert cost == Cost(flops, read, out_BTKGH.nbytes)


def test_attention_matches_counter_on_scaled_dot_product_attention():
    """On the math backend: of the CPU's fused kernel torch counts no FLOPs at all."""
    q, k, v = (torch.randn(2, 4, length, 8) for length in (3, 7, 7))
    with sdpa_kernel(SDPBackend.MATH):
        flops, _ = counted(lambda: nnf.scaled_dot_product_attention(q, k, v))
    assert attention(2, 7, 3, 4, 4, 8).flops == flops


@settings(deadline=None)
@given(S=size, T=size, heads=size)
def test_causal_attention_counts_the_entries_of_the_mask(S, T, heads):
    S = S + T
    mask_TS = torch.ones(T, S).tril(S - T)
    flops = attention(1, S, T, heads, heads, 1, causal=True).flops
    assert flops == 4 * heads * int(mask_TS.sum())


@settings(deadline=None)
@given(B=big, D=big, F=big, T=big, fusion=st.sampled_from(["unfused", "write_only", "fused"]))
def test_matmul_and_mlp_numbers_are_their_algebra_substituted(B, D, F, T, fusion):
    values = dict(zip(symbols("B D F T"), (B, D, F, T), strict=True))
    b, d, f, t = values
    assert_same(matmul(B, D, F), matmul(b, d, f), values)
    assert_same(mlp(B, T, D, F, fusion=fusion), mlp(b, t, d, f, fusion=fusion), values)


@settings(deadline=None)
@given(B=big, S=big, T=size, K=size, G=size, H=size, causal=st.booleans())
def test_attention_numbers_are_their_algebra_substituted(B, S, T, K, G, H, causal):
    S = S + T
    values = dict(zip(symbols("B S T K G H"), (B, S, T, K, G, H), strict=True))
    b, s, t, k, g, h = values
    assert_same(
        attention(B, S, T, K * G, K, H, causal=causal),
        attention(b, s, t, k * g, k, h, causal=causal),
        values,
    )


@settings(deadline=None, max_examples=25)
@given(
    B=st.integers(1, 9), T=st.integers(1, 64), tied=st.booleans(), bias=st.booleans(),
    causal=st.booleans(), name=st.sampled_from(sorted(PUBLISHED)),
)  # fmt: skip
def test_forward_numbers_are_their_algebra_substituted(B, T, tied, bias, causal, name):
    shape = {letter: getattr(PUBLISHED[name], letter) for letter in "DFKGHLV"}
    config = Config(**shape, tied=tied, qkv_bias=bias)
    algebra = symbolic_config(tied=tied, qkv_bias=bias)
    b, t = symbols("B T")
    values = {symbols(letter)[0]: number for letter, number in shape.items()} | {b: B, t: T}
    number = forward(config, B, T, T, causal=causal)
    assert_same(number, forward(algebra, b, t, t, causal=causal), values)
    assert num_params(config) == num_params(algebra).subs(values)
    assert weight_bytes(config, 4) == weight_bytes(algebra, 4).subs(values)
    assert kv_cache_bytes(config, B, T) == kv_cache_bytes(algebra, b, t).subs(values)
    step = decode_step(algebra, b, t, ACCELERATORS["h100"]).latency_s.subs(values)
    assert decode_step(config, B, T, ACCELERATORS["h100"]).latency_s == pytest.approx(float(step))


@given(D=st.integers(600, 10**5), F=st.integers(600, 10**5), width=st.sampled_from([0.5, 1, 2, 4]))
def test_crossover_is_where_intensity_reaches_the_ridge(D, F, width):
    batch = crossover_batch(D, F, 200 / width, width)
    below, above = int(batch * 0.999), int(batch * 1.001) + 1
    if below:
        assert matmul(below, D, F, width).intensity < 200 / width
    assert matmul(above, D, F, width).intensity > 200 / width


def assert_same(number, algebra, values):
    for part in ("flops", "bytes_read", "bytes_written"):
        assert getattr(number, part) == sympy.sympify(getattr(algebra, part)).subs(values)
    assert number.intensity == pytest.approx(float(algebra.intensity.subs(values)))


@given(B=st.integers(1, 500), S=st.integers(1, 5000))
def test_larger_batches_are_slower_a_step_and_faster_in_all(B, S):
    config, h100 = PUBLISHED["llama-3-8b"], ACCELERATORS["h100"]
    one, more = decode_step(config, B, S, h100), decode_step(config, B + 1, S, h100)
    assert more.memory_bytes > one.memory_bytes
    assert more.latency_s > one.latency_s
    assert more.throughput_tokens_per_s > one.throughput_tokens_per_s
    assert forward(config, B + 1, 1, S).time_s(h100) > forward(config, B, 1, S).time_s(h100)
    assert prefill(config, B + 1, S, h100).ttft_s > prefill(config, B, S, h100).ttft_s


costs = st.builds(Cost, big, big, big)


@given(costs, costs, costs, st.integers(0, 9))
def test_costs_add_and_multiply_as_numbers_do(a, b, c, n):
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert sum([a] * n, Cost()) == a * n == n * a
    assert (a + b) * n == a * n + b * n
    assert (a + b).bytes == a.bytes + b.bytes


@given(costs)
def test_bound_time_and_intensity_agree(cost):
    h100 = ACCELERATORS["h100"]
    assert cost.time_s(h100) == max(cost.compute_s(h100), cost.memory_s(h100))
    assert (cost.bound(h100) == "compute") == (cost.intensity >= h100.ridge())


def test_a_symbolic_cost_has_a_symbolic_time():
    B, D, F, L = symbols("B D F L")
    time_s = matmul(B, D, F).time_s(ACCELERATORS["h100"])
    assert isinstance(time_s, sympy.Max)
    assert float(time_s.subs({B: 1, D: 5120, F: 13824})) == pytest.approx(
        matmul(1, 5120, 13824).time_s(ACCELERATORS["h100"])
    )
    assert (L * matmul(B, D, F)).flops == L * 2 * B * D * F


def test_whole_numbers_of_any_kind_are_accepted():
    import numpy as np

    expected = matmul(64, 5120, 13824)
    assert matmul(64.0, np.int32(5120), sympy.Integer(13824)) == expected


LLAMA = PUBLISHED["llama-2-13b"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: matmul(-1, 2, 2), ValueError, "B is -1: expected a whole number, at least 1"),
        (lambda: matmul(1, 2.5, 2), ValueError, "D is 2.5"),
        (lambda: matmul(1, 2, float("nan")), ValueError, "F is nan"),
        (lambda: matmul(1, 2, float("inf")), ValueError, "F is inf"),
        (lambda: matmul("B", 2, 2), TypeError, "whole number or a SymPy symbol"),
        (lambda: matmul(1, 2, 2, "bf16"), ValueError, r"dtype_bytes is 'bf16'.*DTYPE_BYTES"),
        (lambda: matmul(1, 2, 2, 0), ValueError, "dtype_bytes is 0"),
        (lambda: mlp(1, 1, 8, 8, fusion="none"), ValueError, "expected one of unfused"),
        (lambda: attention(1, 8, 1, 8, 3, 4), ValueError, "K=3 does not divide N=8"),
        (lambda: attention(1, 4, 5, 8, 8, 4, causal=True), ValueError, "T=5 exceeds S=4"),
        (lambda: forward_flops(LLAMA, 1, 5, 4), ValueError, "T=5 exceeds S=4"),
        (lambda: forward_flops(LLAMA, 1, 4, 4, logits_for=-1), ValueError, "logits_for is -1"),
        (
            lambda: forward_flops(LLAMA, 1, 4, 4, logits_for=5),
            ValueError,
            "logits_for=5 exceeds T=4",
        ),
        (lambda: kv_cache_bytes(LLAMA, 0, 4), ValueError, "B is 0"),
        (lambda: kv_cache_bytes(LLAMA, 1, -4), ValueError, "S is -4: .*at least 0"),
        (lambda: weight_bytes_read(LLAMA, 0), ValueError, "tokens is 0"),
        (lambda: decode_step(LLAMA, -3, 8, 1e12), ValueError, "B is -3"),
        (lambda: decode_step(LLAMA, 1, 8, 0), ValueError, "accelerator is 0"),
        (lambda: decode_step(LLAMA, 1, 8, "h100"), ValueError, "such as ACCELERATORS"),
        (lambda: prefill(LLAMA, 1, 8, ACCELERATORS["h100"], dtype="x"), ValueError, "one of fp32"),
        (lambda: prefill(LLAMA, 1, 8, ACCELERATORS["t4"]), ValueError, "only fp16"),
        (lambda: crossover_batch(8, 8, -1), ValueError, "ridge is -1"),
        (lambda: Cost(1).intensity, ValueError, "moves no bytes"),
        (
            lambda: matmul(*symbols("B D F")).bound(ACCELERATORS["h100"]),
            ValueError,
            "substitute the symbols first",
        ),
    ],
)
def test_bad_sizes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_importing_the_roofline_loads_neither_torch_nor_sympy():
    code = (
        "import sys, lecture_util.roofline as r; r.matmul(1, 2, 3).intensity; "
        "sys.exit(bool({'torch', 'sympy', 'psutil'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_in_place_of_a_shape_is_refused_with_the_remedy():
    for function in (num_params, kv_bytes_per_token):
        with pytest.raises(TypeError, match=r"PUBLISHED\['llama-2-13b'\]"):
            function("llama-2-13b")
