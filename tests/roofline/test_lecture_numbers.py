"""The lecture's figures and limits, from its start to grouped-query attention, and its errata."""

import math
from dataclasses import replace

import pytest
import sympy

from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import (
    ACCELERATORS,
    attention,
    crossover_batch,
    decode_step,
    forward_flops,
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

B, S, T, D, F, N, K, G, H, L, V, c = symbols("B S T D F N K G H L V c")
LLAMA = PUBLISHED["llama-2-13b"]
LLAMA_K8 = LLAMA.with_kv_heads(8)
H100 = ACCELERATORS["h100"]


def limit_when_weights_dominate(intensity, tokens):
    return intensity.subs({D: c * tokens, F: c * tokens}).limit(c, sympy.oo).simplify()


def test_matmul_is_counted_as_in_the_lecture():
    cost = matmul(B, D, F)
    assert cost.flops == 2 * B * D * F
    assert sympy.expand(cost.bytes) == 2 * B * D + 2 * D * F + 2 * B * F


def test_matmul_intensity_tends_to_the_batch():
    assert limit_when_weights_dominate(matmul(B, D, F).intensity, B) == B


def test_matrix_vector_intensity_is_one_and_memory_bound():
    assert matmul(1, D, F).intensity.subs({D: c, F: c}).limit(c, sympy.oo) == 1
    assert matmul(1, 5120, 13824).bound(H100) == "memory"


@pytest.mark.parametrize(
    ("fusion", "num_bytes"),
    [
        ("write_only", 4 * B * T * D + 4 * B * T * F + 6 * D * F),
        ("unfused", 4 * B * T * D + 8 * B * T * F + 6 * D * F),
        ("fused", 4 * B * T * D + 6 * D * F),
    ],
)
def test_mlp_bytes_by_fusion_and_one_limit_for_all(fusion, num_bytes):
    cost = mlp(B, T, D, F, fusion=fusion)
    assert cost.flops == 6 * B * T * D * F
    assert sympy.expand(cost.bytes - num_bytes) == 0
    assert limit_when_weights_dominate(cost.intensity, B * T) == B * T


def test_attention_intensity_of_mha():
    cost = attention(B, S, T, N, N, H)
    assert cost.flops == 4 * B * S * T * N * H
    assert sympy.expand(cost.bytes - 4 * B * (S + T) * N * H) == 0
    assert sympy.simplify(cost.intensity - S * T / (S + T)) == 0
    assert attention(B, S, S, N, N, H).intensity == S / 2
    decode = attention(B, S, 1, N, N, H).intensity
    assert (decode < 1) == True  # noqa: E712  SymPy decides it for every positive S
    assert B not in cost.intensity.free_symbols


def test_grouped_queries_share_what_they_read():
    intensity = attention(B, S, 1, K * G, K, H).intensity
    assert sympy.simplify(intensity - G * S / (G + S)) == 0
    assert intensity.limit(S, sympy.oo) == G


def test_causal_mask_halves_prefill_in_the_limit():
    full, causal = (attention(B, S, S, N, N, H, causal=flag).flops for flag in (False, True))
    assert sympy.limit(causal / full, S, sympy.oo) == sympy.Rational(1, 2)


@pytest.mark.parametrize("peak", [989e12, 989.5e12])
def test_crossover_is_321_at_finite_size_and_the_ridge_in_the_limit(peak):
    ridge = peak / 3.35e12
    assert round(ridge) == 295
    assert math.ceil(crossover_batch(5120, 13824, ridge)) == 321
    assert matmul(321, 5120, 13824).intensity >= ridge > matmul(320, 5120, 13824).intensity
    assert crossover_batch(10**12, 10**12, ridge) == pytest.approx(ridge)


def test_crossover_algebra():
    (ridge,) = symbols("ridge")
    solved = sympy.solve(sympy.Eq(matmul(B, D, F).intensity, ridge), B)
    assert sympy.simplify(crossover_batch(D, F, ridge) - solved[0]) == 0
    assert crossover_batch(D, F, ridge).subs({D: c, F: c}).limit(c, sympy.oo) == ridge


def test_crossover_is_infinite_where_no_batch_is_large_enough():
    assert crossover_batch(512, 512, 295) == math.inf
    assert matmul(10**9, 512, 512).intensity < 295


@pytest.mark.parametrize("norms_counted", [True, False])
@pytest.mark.parametrize(
    ("config", "batch", "gigabytes", "milliseconds", "tokens_per_s"),
    [
        (LLAMA, 1, "26.87", "8.02", "124.7"),
        (LLAMA, 64, "79.72", "23.80", "2,689"),
        (LLAMA, 256, "240.8", "71.87", "3,562"),
        (LLAMA_K8, 64, None, "9.97", None),
        (LLAMA_K8, 256, None, "19.59", "13,068"),
    ],
)
def test_decode_step_of_llama_2_13b_on_an_h100(
    config, batch, gigabytes, milliseconds, tokens_per_s, norms_counted
):
    """The lecture leaves the norms out; at the printed digits that cannot be told apart."""
    step = decode_step(config, batch, 1024, H100)
    num_bytes, latency_s, rate = step.memory_bytes, step.latency_s, step.throughput_tokens_per_s
    if not norms_counted:
        num_bytes -= 2 * (2 * 40 + 1) * 5120
        latency_s = num_bytes / 3.35e12
        rate = batch / latency_s
    if gigabytes is not None:
        assert f"{num_bytes / 1e9:.{len(gigabytes.partition('.')[2])}f}" == gigabytes
    assert f"{latency_s * 1e3:.2f}" == milliseconds
    if tokens_per_s is not None:
        assert f"{rate:,.{len(tokens_per_s.partition('.')[2])}f}" == tokens_per_s


def test_what_fits_on_an_h100():
    fits = [decode_step(LLAMA, batch, 1024, H100).fits for batch in (1, 64, 256)]
    assert fits == [True, True, False]
    assert decode_step(LLAMA_K8, 256, 1024, H100).fits
    assert decode_step(LLAMA, 1, 1024, 3.35e12).fits is None


def test_gqa_at_equal_parameters():
    """Keep the parameters, shrink only the cache: by hand, and by a wider MLP."""
    num_bytes = weight_bytes(LLAMA) + kv_cache_bytes(LLAMA_K8, 64, 1024)
    assert f"{num_bytes / 3.35e12 * 1e3:.2f}" == "10.98"
    assert f"{64 / (num_bytes / 3.35e12):,.0f}" == "5,831"
    saved = num_params(LLAMA) - num_params(LLAMA_K8)
    assert round(num_params(LLAMA_K8) / 1e9, 1) == 11.3
    wider = replace(LLAMA_K8, F=13824 + round(saved / (3 * 5120 * 40)))
    assert num_params(wider) == pytest.approx(num_params(LLAMA), rel=1e-4)
    assert f"{decode_step(wider, 64, 1024, H100).latency_s * 1e3:.2f}" == "10.98"


def test_untied_input_embedding_is_looked_up_not_read():
    unread = 1 - weight_bytes_read(LLAMA, 1) / weight_bytes(LLAMA)
    assert round(100 * unread, 1) == 1.3
    step = decode_step(LLAMA, 1, 1024, H100, whole_embedding=False)
    assert round(100 * (1 - step.bytes_read / step.memory_bytes), 1) == 1.2
    assert step.memory_bytes == decode_step(LLAMA, 1, 1024, H100).memory_bytes
    tied = PUBLISHED["smollm2-135m"]
    assert weight_bytes_read(tied, 1) == weight_bytes(tied)


def test_lecture_parameter_formula():
    ours = num_params(symbolic_config(), norms=False)
    lecture = 2 * V * D + 3 * D * F * L + (2 * D * K * G * H + 2 * D * K * H) * L
    assert sympy.expand(ours - lecture) == 0


def test_forward_pass_costs_two_flops_a_parameter_and_token():
    tokens = 512
    flops = forward_flops(LLAMA, 1, tokens, tokens)
    matmul_params = num_params(LLAMA, norms=False) - LLAMA.V * LLAMA.D  # no lookup multiplies
    assert flops == 2 * tokens * matmul_params + 4 * tokens * tokens * 5120 * 40
    assert 1.9 < flops / (tokens * num_params(LLAMA)) < 2.1


def test_prefill_is_compute_bound_and_its_time_is_the_longer():
    estimate = prefill(LLAMA, 1, 1024, H100)
    assert estimate.cost.bound(H100) == "compute"
    assert estimate.ttft_s == estimate.compute_s > estimate.memory_s
    short = prefill(LLAMA, 1, 16, H100)
    assert short.ttft_s == short.memory_s > short.compute_s


def test_decode_step_algebra_is_the_lecture_formula():
    (bandwidth,) = symbols("bandwidth")
    config = symbolic_config()
    step = decode_step(config, B, S, bandwidth)
    expected = 2 * num_params(config) + B * S * 4 * config.K * H * L
    assert sympy.simplify(step.memory_bytes - expected) == 0
    assert sympy.simplify(step.latency_s - expected / bandwidth) == 0
    assert sympy.simplify(step.throughput_tokens_per_s - B * bandwidth / expected) == 0
    assert step.fits is None
