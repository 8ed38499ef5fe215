import math

import pytest
import sympy
import torch
from layered_models import LAYOUTS, SMALL, small_model, tokens
from torch.utils.flop_counter import FlopCounterMode

from lecture_util.kv_reduction import cla
from lecture_util.kv_reduction.cla import LayeredCache, build
from lecture_util.kv_reduction.layout import Layout
from lecture_util.kv_reduction.sizes import (
    cache_bytes,
    comparison,
    layout_weight_bytes,
    mla_cache_bytes,
    mla_weight_bytes,
    read_bytes,
    techniques,
)
from lecture_util.model.attention import attention_by_hand
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import (
    ACCELERATORS,
    decode_step,
    forward_flops,
    kv_cache_bytes,
    num_params,
    symbols,
    weight_bytes,
)

LLAMA, H100 = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"]


def by_name(rows, field="technique"):
    return {getattr(row, field): row for row in rows}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bytes_by_formula_are_those_of_the_tensors_held(name, dtype):
    layout = LAYOUTS[name]
    for B, S, slack in [(1, 1, 0), (2, 3, 2), (3, 17, 0), (1, 33, 5), (2, 64, 1)]:
        cache = LayeredCache(SMALL, B, S, dtype, layout=layout, slack=slack)
        assert cache.nbytes == cache_bytes(SMALL, layout, B, S, dtype.itemsize, slack)


def test_bytes_of_a_full_layout_are_rooflines_and_of_windows_stop_at_w_minus_1():
    full, windowed = Layout.full(6), Layout.windowed(6, 5)
    for S in (0, 1, 3, 4, 5, 9, 100):
        assert cache_bytes(SMALL, full, 2, S) == kv_cache_bytes(SMALL, 2, S)
        assert cache_bytes(SMALL, windowed, 2, S) == kv_cache_bytes(SMALL, 2, min(S, 4))
        assert cache_bytes(SMALL, Layout.cross_layer(6, 3), 2, S) * 3 == kv_cache_bytes(SMALL, 2, S)


def test_sharing_halves_what_is_held_and_nothing_of_what_is_read():
    cla, full = Layout.cross_layer(6, 2), Layout.full(6)
    assert cache_bytes(SMALL, cla, 1, 50) * 2 == cache_bytes(SMALL, full, 1, 50)
    assert read_bytes(SMALL, cla, 1, 50) == read_bytes(SMALL, full, 1, 50)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_read_are_those_that_attention_is_handed(name, monkeypatch):
    """The newest token attends to S positions in each layer, or to its window of them."""
    model, attend, handed = small_model(LAYOUTS[name]), cla.attend, []

    def counting(q, k, v, mask=None):
        handed.append(k.nbytes + v.nbytes)
        return attend(q, k, v, mask)

    monkeypatch.setattr(cla, "attend", counting)
    for S in (1, 2, 4, 9):
        cache = model.new_cache(SMALL, 2, 9, torch.float64)
        if S > 1:
            model(tokens(2, S - 1), cache)
        handed.clear()
        model(tokens(2, 1), cache)
        assert sum(handed) == read_bytes(SMALL, LAYOUTS[name], 2, S, 8)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_by_formula_are_the_parameters(name, bias):
    config = Config(D=24, F=32, K=2, G=3, H=4, L=6, V=31, qkv_bias=bias)
    held = sum(p.nbytes for p in build(config, LAYOUTS[name]).parameters())
    assert held == layout_weight_bytes(config, LAYOUTS[name], 4)


def test_formulas_take_symbols():
    S, K, H = symbols("S K H")
    config = Config(D=8, F=8, K=K, G=1, H=H, L=6, V=8)
    assert cache_bytes(config, Layout.full(6), 1, S) == 24 * S * K * H
    windowed = cache_bytes(config, Layout.windowed(6, 5), 1, S)
    assert sympy.simplify(windowed - 24 * K * H * sympy.Min(S, 4)) == 0
    assert windowed.subs(S, 100) == 96 * K * H
    C, R = symbols("C R")
    assert sympy.expand(mla_cache_bytes(config, C, R, 1, S) - 12 * S * (C + R)) == 0


def test_mla_holds_576_numbers_where_128_heads_held_32768():
    deepseek = Config(D=5120, F=12288, K=128, G=1, H=128, L=60, V=102400)
    ratio = kv_cache_bytes(deepseek, 1, 1000) / mla_cache_bytes(deepseek, 512, 64, 1, 1000)
    assert ratio == 32768 / 576
    assert round(ratio, 1) == 56.9


def test_mla_weights_are_those_of_the_model():
    from lecture_util.kv_reduction.mla import MLA, mla

    config = Config(D=24, F=32, K=3, G=2, H=4, L=3, V=31)
    model = mla(config, MLA(C=10, R=6, nope=4, v=8))
    held = sum(p.nbytes for p in model.parameters())
    assert held == mla_weight_bytes(config, 10, 6, nope=4, v=8, dtype_bytes=4)


def test_mla_rows_are_the_costs_of_its_own_module():
    from lecture_util.kv_reduction.mla import MLA
    from lecture_util.kv_reduction.mla_cost import mla_decode_cost

    S, shape = 8192, MLA(C=512, R=64, nope=128, v=128)
    D, N = LLAMA.D, LLAMA.N
    around = 2 * (D * N * (128 + 64) + D * (512 + 64) + N * 128 * D)  # projections in and out
    other = 2 * (40 * 3 * D * LLAMA.F + LLAMA.V * D)
    attention = mla_decode_cost(1, S, N, shape).flops
    technique = by_name(techniques(LLAMA, S), "name")["MLA 512+64"]
    assert technique.flops == 40 * (around + attention) + other


@pytest.mark.parametrize("S", [1, 17, 64])
def test_mla_bytes_by_formula_are_those_of_the_latents_held(S):
    from lecture_util.kv_reduction.latent_cache import MLA, LatentCache

    cache = LatentCache(SMALL, 3, S, torch.bfloat16, shape=MLA(C=10, R=6, nope=4, v=8))
    assert cache.nbytes == mla_cache_bytes(SMALL, 10, 6, 3, S)


@pytest.mark.parametrize("S", [1024, 8192])
@pytest.mark.parametrize(("name", "K"), [("MHA", 40), ("GQA-8", 8), ("MQA", 1)])
def test_rows_of_plain_heads_are_rooflines_decode_step(name, K, S):
    config = LLAMA.with_kv_heads(K)
    technique = by_name(techniques(LLAMA, S), "name")[name]
    assert technique.weight_bytes == weight_bytes(config)
    assert technique.flops == forward_flops(config, 1, 1, S)
    for B in (1, 8):
        row = by_name(comparison(LLAMA, S, H100, B=B))[name]
        want = decode_step(config, B, S, H100)
        assert row.bound == "memory"
        assert row.latency_s == pytest.approx(want.latency_s)
        assert row.tokens_per_s == pytest.approx(want.throughput_tokens_per_s)
    most = by_name(comparison(LLAMA, S, H100))[name].max_batch
    assert decode_step(config, most, S, H100).fits
    assert not decode_step(config, most + 1, S, H100).fits


def test_the_lectures_numbers_and_their_corrected_reading():
    """K 40 -> 8 at one batch makes a step faster; the larger batch that then fits is slower."""
    at_64 = by_name(comparison(LLAMA, 1024, H100, B=64))
    assert round(at_64["MHA"].latency_s * 1e3, 2) == 23.80
    assert round(at_64["GQA-8"].latency_s * 1e3, 2) == 9.97
    at_256 = by_name(comparison(LLAMA, 1024, H100, B=256))["GQA-8"]
    assert (round(at_256.latency_s * 1e3, 2), round(at_256.tokens_per_s)) == (19.59, 13068)


@pytest.mark.parametrize(
    ("name", "config", "layout"),
    [
        ("MHA", SMALL.with_kv_heads(6), Layout.full(6)),
        ("CLA2 on MQA", SMALL.with_kv_heads(1), Layout.cross_layer(6, 2)),
        ("window 5", SMALL.with_kv_heads(6), Layout.windowed(6, 5)),
        ("window 5, 1 layer in 6 global", SMALL.with_kv_heads(6), Layout.hybrid(6, 5)),
        ("character.ai", SMALL.with_kv_heads(1), Layout.character_ai(6, 5)),
    ],
)
def test_flops_are_what_torch_counts(name, config, layout, monkeypatch):
    """With attention written out, as the counter does not see a CPU's fused one."""
    monkeypatch.setattr(cla, "attend", attention_by_hand)
    technique = by_name(techniques(SMALL, 12, W=5), "name")[name]
    model = build(config, layout).double()
    cache = model.new_cache(config, 1, 12, torch.float64)
    with torch.no_grad():
        model(tokens(1, 11), cache)
        with FlopCounterMode(display=False) as counter:
            model(tokens(1, 1), cache)
    assert counter.get_total_flops() == technique.flops


def test_the_table_has_every_technique_with_its_bytes():
    S = 8192
    rows = by_name(comparison(LLAMA, S, H100))
    assert list(rows) == [
        "MHA", "GQA-8", "MQA", "MLA 512+64", "CLA2 on GQA-8", "CLA2 on MQA",
        "window 1024", "window 1024, 1 layer in 6 global", "character.ai",
    ]  # fmt: skip
    per_token = {name: row.bytes_per_token for name, row in rows.items()}
    assert per_token["MHA"] == 819_200  # 2*40*40*128*2, as numbers for this shape go
    assert per_token["GQA-8"] * 5 == per_token["MQA"] * 40 == per_token["MHA"]
    assert per_token["MLA 512+64"] == 40 * 576 * 2
    assert per_token["CLA2 on MQA"] * 2 == per_token["MQA"]
    assert per_token["window 1024"] * S == 819_200 * 1023
    assert per_token["MHA"] / per_token["character.ai"] > 20
    for row in rows.values():
        assert row.weight_bytes + row.max_batch * row.held_bytes <= 80e9
        assert row.weight_bytes + (row.max_batch + 1) * row.held_bytes > 80e9
        assert row.tokens_per_s == pytest.approx(row.B / row.latency_s)
        assert row.B == row.max_batch


def test_cla_fits_twice_the_batch_and_is_no_faster_at_the_same():
    fit, same = by_name(comparison(LLAMA, 8192, H100)), by_name(comparison(LLAMA, 8192, H100, B=32))
    assert fit["CLA2 on GQA-8"].max_batch >= 2 * fit["GQA-8"].max_batch
    gain = same["CLA2 on GQA-8"].tokens_per_s / same["GQA-8"].tokens_per_s
    assert 1 < gain < 1.01  # what it gains are the consumers' projections


def test_enough_sequences_wait_for_the_units_and_not_for_memory():
    rows = by_name(comparison(LLAMA, 1024, H100))
    assert rows["MHA"].bound == "memory"
    assert rows["MQA"].bound == "compute"
    mqa = by_name(techniques(LLAMA, 1024), "name")["MQA"]
    batch = rows["MQA"].B
    assert rows["MQA"].latency_s == mqa.compute_s(batch, H100) > mqa.memory_s(batch, H100)


def test_what_does_not_fit_has_no_speed():
    rows = by_name(comparison(LLAMA, 100_000, H100))
    assert (rows["MHA"].max_batch, rows["MHA"].tokens_per_s, rows["MHA"].bound) == (0, None, None)
    assert rows["MQA"].max_batch > 0
    assert by_name(comparison(LLAMA, 8192, H100, B=9))["MHA"].tokens_per_s is None


def test_a_card_without_bf16_computes_in_fp16():
    rows = comparison(PUBLISHED["smollm2-135m"], 1024, ACCELERATORS["t4"])
    assert all(row.tokens_per_s > 0 for row in rows)


def test_heads_that_do_not_divide_are_left_out():
    assert "GQA-8" not in by_name(comparison(SMALL, 64, H100))


def test_mla_reads_its_matrices_and_little_else():
    """V2-Lite's way of counting on the 13B shape: down, up, queries, output; D*N*H*... by hand."""
    per_layer = 5120 * 40 * (128 + 64) + 5120 * 576 + 512 * 40 * 256 + 40 * 128 * 5120 + 512
    plain = num_params(LLAMA) - 40 * 4 * 5120 * 5120
    assert mla_weight_bytes(LLAMA, 512, 64) == 2 * (plain + 40 * per_layer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cache_bytes(SMALL, Layout.full(5), 1, 9), "5 layers but the config has L=6"),
        (lambda: read_bytes(SMALL, Layout.full(6), 0, 9), "B is 0"),
        (lambda: cache_bytes(SMALL, Layout.full(6), 1, -1), "S is -1"),
        (lambda: cache_bytes(SMALL, Layout.full(6), 1, 1, slack=-1), "slack is -1"),
        (lambda: cache_bytes(SMALL, Layout.full(6), 1, 1, dtype_bytes=0), "dtype_bytes is 0"),
        (lambda: mla_cache_bytes(SMALL, 0, 4, 1, 9), "C is 0"),
        (lambda: comparison(LLAMA, 0, H100), "S is 0"),
        (lambda: comparison(LLAMA, 9, H100, B=0), "B is 0"),
        (lambda: layout_weight_bytes(SMALL, Layout.full(5)), "5 layers but the config has L=6"),
    ],
)
def test_bad_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_window_of_one_holds_nothing_and_sets_no_batch():
    with pytest.raises(ValueError, match="holds nothing"):
        comparison(LLAMA, 4096, H100, W=1)


@pytest.mark.parametrize("memory", [math.inf, math.nan, -1, "80"])
def test_memory_is_a_number_of_bytes(memory):
    with pytest.raises(ValueError, match="memory_bytes"):
        techniques(LLAMA, 1024)[0].max_batch(memory)


@pytest.mark.parametrize("options", [{"dtype_bytes": -2}, {"dtype_bytes": "2"}, {"C": 0}])
def test_mla_sizes_are_checked_too(options):
    name = next(iter(options))
    C = options.pop("C", 512)
    for call in (
        lambda: mla_cache_bytes(LLAMA, C, 64, 1, 8, **options),
        lambda: mla_weight_bytes(LLAMA, C, 64, **options),
    ):
        with pytest.raises(ValueError, match=name):
            call()
    with pytest.raises(ValueError, match="nope"):
        mla_weight_bytes(LLAMA, 512, 64, nope=0)
