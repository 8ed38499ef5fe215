import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.model import weights
from lecture_util.model.config import Config
from lecture_util.model.observe import observe, run
from lecture_util.model.shapes import ShapeError
from lecture_util.model.text import english_split, windows
from lecture_util.model.transformer import Transformer
from lecture_util.quantization import awq_search
from lecture_util.quantization.awq import activation_means, awq, fold, fold_all, search, shared
from lecture_util.quantization.awq_search import (
    ALPHAS,
    SHARES,
    Seen,
    channel_scale,
    clip,
    output_loss,
    search_scale,
)
from lecture_util.quantization.group_linear import GroupLinear, pack_planes, unpack_planes
from lecture_util.quantization.int4 import Int4Linear
from lecture_util.quantization.linear import bits_per_weight, linear_layers
from lecture_util.quantization.salient import keep_channels, salient_channels
from lecture_util.quantization.scales import quantize

F64 = torch.float64
TINY = Config(D=20, F=37, K=2, G=3, H=6, L=2, V=50, tied=True, qkv_bias=True, max_context=64)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def tiny(seed=0, config=TINY):
    """Weights large enough for attention to choose, biases and norms that are not 0 and 1."""
    model = Transformer.random(config, seed, F64)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=F64)
        weight.data = 1 + 0.3 * noise if "norm" in name else 0.3 * noise
    return model


def tokens(B=3, T=11, seed=0, V=50):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def round_by_hand(row, bits, group_size, symmetric):
    """Round-to-nearest over one row of Python floats, from the definition."""
    out = []
    for start in range(0, len(row), group_size):
        group = row[start : start + group_size]
        low, high = min(0.0, *group), max(0.0, *group)
        if symmetric:
            top, bottom = 2 ** (bits - 1) - 1, -(2 ** (bits - 1) - 1)
            scale, zero = max(-low, high) / top or 1.0, 0
        else:
            top, bottom = 2**bits - 1, 0
            scale = (high - low) / top or 1.0
            zero = round(-low / scale)
        codes = [min(max(round(w / scale) + zero, bottom), top) for w in group]
        out += [(code - zero) * scale for code in codes]
    return out


def loss_by_hand(w, new, x):
    """Mean over tokens of the squared error of each output: {row: loss}."""
    return [
        sum(sum((n - o) * a for n, o, a in zip(new_f, w_f, token, strict=True)) ** 2 for token in x)
        / len(x)
        for w_f, new_f in zip(w, new, strict=True)
    ]


# The searches on one layer


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("F", "D", "group_size"), [(3, 7, 3), (1, 5, 8), (2, 6, 6), (5, 4, 1)])
def test_scale_search_equals_an_exhaustive_one_by_hand(F, D, group_size, symmetric):
    w, x = numbers(F, D), numbers(9, D, seed=1) * torch.logspace(-1, 1, D, dtype=F64)
    found = search_scale(w, Seen.of(x), 3, group_size, symmetric)
    energy = sum(loss_by_hand(w.tolist(), [[0.0] * D] * F, x.tolist()))
    mean = [sum(abs(token[d]) for token in x.tolist()) / 9 for d in range(D)]
    losses = []
    for i in range(21):
        s = [max(m ** (i / 20), 1e-4) for m in mean]
        centre = math.sqrt(max(s) * min(s))
        s = [value / centre for value in s]
        new = [
            [v / k for v, k in zip(row, s, strict=True)]
            for row in (
                round_by_hand([v * k for v, k in zip(r, s, strict=True)], 3, group_size, symmetric)
                for r in w.tolist()
            )
        ]
        losses.append(sum(loss_by_hand(w.tolist(), new, x.tolist())) / energy)
    assert found.losses == pytest.approx(losses, rel=1e-9, abs=1e-15)
    assert found.losses[ALPHAS.index(found.alpha)] == min(found.losses)
    torch.testing.assert_close(found.scale_D, channel_scale(Seen.of(x).mean_D, found.alpha))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("F", "D", "group_size"), [(4, 10, 4), (3, 6, 6), (1, 3, 5)])
def test_clip_takes_the_best_share_of_each_group_by_hand(F, D, group_size, symmetric):
    w, x = numbers(F, D, seed=2) ** 3, numbers(13, D, seed=3)
    expected = []
    for row in w.tolist():
        cut = []
        for start in range(0, D, group_size):
            group = row[start : start + group_size]
            part = [token[start : start + group_size] for token in x.tolist()]
            top, best = max(map(abs, group)), (math.inf, group)
            for share in SHARES:
                tried = [min(max(v, -top * share), top * share) for v in group]
                new = round_by_hand(tried, 3, group_size, symmetric)
                best = min(best, (loss_by_hand([group], [new], part)[0], tried), key=lambda b: b[0])
            cut += best[1]
        before, after = (
            loss_by_hand([row], [round_by_hand(r, 3, group_size, symmetric)], x.tolist())[0]
            for r in (row, cut)
        )
        expected.append(cut if after < before else row)
    clipped = clip(w, Seen.of(x).gram_DD, 3, group_size, symmetric)
    assert (clipped != w).any() or (F, D) == (1, 3)
    torch.testing.assert_close(clipped, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=0)


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(2, 4), st.integers(1, 9), st.booleans())
def test_no_row_gets_worse_by_clipping_and_no_layer_by_scaling(seed, bits, group_size, symmetric):
    w, x = numbers(5, 11, seed=seed), numbers(4, 11, seed=seed + 1)
    seen, how = Seen.of(x), (bits, group_size, symmetric)
    plain = output_loss(awq_search.rounded(w, *how) - w, seen.gram_DD)
    cut = output_loss(awq_search.rounded(clip(w, seen.gram_DD, *how), *how) - w, seen.gram_DD)
    assert (cut <= plain + 1e-12).all()
    found = search_scale(w, seen, *how)
    s = found.scale_D
    scaled = output_loss(awq_search.rounded(w * s, *how) / s - w, seen.gram_DD).sum()
    assert scaled <= plain.sum() * (1 + 1e-9)


def test_loss_from_the_gram_matrix_is_the_outputs_squared_error():
    off, x = numbers(7, 5), numbers(23, 5, seed=1)
    torch.testing.assert_close(
        output_loss(off, Seen.of(x).gram_DD), (x @ off.T).square().mean(0), rtol=1e-12, atol=0
    )


def test_a_planted_outlier_channel_gets_the_largest_scale_and_a_lower_error():
    w, x = numbers(16, 24), numbers(40, 24, seed=1)
    x[:, 17] *= 50
    found = search_scale(w, Seen.of(x), 3, 8)
    assert found.alpha > 0
    assert found.scale_D.argmax() == 17
    assert min(found.losses) < found.losses[0] / 3
    s = found.scale_D
    column = lambda s: (awq_search.rounded(w * s, 3, 8, False) / s - w)[:, 17].norm()  # noqa: E731
    assert column(s) < column(torch.ones_like(s)) / 2


def test_alpha_one_is_tried_and_can_win():
    """llm-awq's grid ends at 0.95. Weights of 1 over the square of their activation want more."""
    assert ALPHAS[0] == 0 and ALPHAS[-1] == 1
    mean = torch.logspace(-1, 1, 12, dtype=F64)
    sign = numbers(30, 12).sign()
    x = numbers(400, 12, seed=1).sign() * mean
    found = search_scale(sign * (1 + 0.1 * numbers(30, 12, seed=2)) / mean**2, Seen.of(x), 4, 12)
    assert found.alpha == 1
    assert found.losses[-1] < found.losses[-2] < found.losses[0]


def test_scales_are_centred_on_one_and_never_below_the_floor():
    mean = torch.tensor([0.0, 1e-9, 0.5, 3.0, 200.0], dtype=F64)
    for alpha in ALPHAS:
        s = channel_scale(mean, alpha)
        assert (s > 0).all() and s.isfinite().all()
        assert float(s.max() * s.min()) == pytest.approx(1)
        assert all(a <= b for a, b in pairwise(s.tolist()))
    assert (channel_scale(mean, 0.0) == 1).all()


# Hard inputs: cases 105, 106, B14, B15 of the collection of known defects


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_groups_of_zeros_and_dead_channels_stay_finite(bits, symmetric):
    w, x = numbers(6, 16), numbers(12, 16, seed=1)
    w[2, 4:8], w[3], w[:, 9] = 0, 0, 0
    x[:, 5], x[:, 8:12] = 0, 0
    seen = Seen.of(x)
    found = search_scale(w, seen, bits, 4, symmetric)
    assert all(map(math.isfinite, found.losses)) and found.scale_D.isfinite().all()
    cut = clip(w * found.scale_D, seen.gram_DD, bits, 4, symmetric)
    assert cut.isfinite().all() and (cut[3] == 0).all() and (cut[:, 9] == 0).all()


def test_a_layer_that_never_saw_anything_is_left_alone():
    w, seen = numbers(3, 8), Seen(torch.zeros(8, dtype=F64), torch.zeros(8, 8, dtype=F64))
    found = search_scale(w, seen)
    assert found.alpha == 0 and (found.scale_D == 1).all() and set(found.losses) == {0.0}
    assert torch.equal(clip(w, seen.gram_DD), w)


@pytest.mark.parametrize("M", [1, 10])
@pytest.mark.parametrize(("F", "D", "group_size"), [(1, 16, 16), (33, 17, 5), (65, 8, 48)])
def test_ten_tokens_and_one_and_any_number_of_rows_will_do(F, D, group_size, M):
    """A stride of tokens // 512 is 0 with ten tokens; rows in batches of 64 drop a 65th."""
    w, x = numbers(F, D) ** 3, numbers(M, D, seed=1)
    found = search_scale(w, Seen.of(x), 3, group_size)
    assert min(found.losses) <= found.losses[0]
    cut = clip(w, Seen.of(x).gram_DD, 3, group_size)
    assert cut.shape == w.shape
    if M == 10 and D > group_size:
        assert (cut[-1] != w[-1]).any() or (cut != w).any(1).float().mean() > 0.5


def test_statistics_that_do_not_fit_are_refused():
    w = numbers(3, 8)
    with pytest.raises(ValueError, match="this very layer read"):
        search_scale(w, Seen.of(numbers(5, 7)))
    with pytest.raises(ValueError, match="at least one token"):
        Seen.of(torch.zeros(0, 8))
    with pytest.raises(ValueError, match="NaN or infinities"):
        Seen.of(torch.full((2, 3), torch.nan))
    with pytest.raises(ValueError, match=r"expected \(D,\) and \(D, D\)"):
        Seen(torch.ones(4), torch.ones(5, 5))


# Folding


@pytest.mark.parametrize("name", ["qkv", "out", "gate_up", "down"])
def test_a_folded_model_gives_the_same_logits_in_fp64(name):
    model, folded = tiny(), tiny()
    for i, block in enumerate(folded.blocks):
        D = getattr(block, name).in_features
        s = torch.exp(numbers(D, seed=i))
        fold(block, name, shared(s, 2, 3) if name == "out" else s)
        assert not torch.equal(getattr(block, name).weight, getattr(model.blocks[i], name).weight)
    torch.testing.assert_close(folded(tokens()), model(tokens()), rtol=1e-11, atol=1e-11)


def test_folding_by_the_inverse_unfolds():
    model = tiny()
    scales = {f"blocks.1.{n}": torch.exp(numbers(D)) for n, D in (("down", 37), ("qkv", 20))}
    there = fold_all(model, scales)
    assert not torch.equal(there.blocks[1].down.weight, model.blocks[1].down.weight)
    back = fold_all(there, {name: 1 / s for name, s in scales.items()})
    for new, old in zip(back.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=0)


def test_folding_into_rows_leaves_their_codes():
    """`up` and v rows shrink along with their groups' steps."""
    w = numbers(4, 12)
    s = torch.exp(numbers(4, 1, seed=1))
    new = awq_search.rounded(w / s, 3, 5, False) * s
    torch.testing.assert_close(new, awq_search.rounded(w, 3, 5, False), rtol=1e-12, atol=0)


def test_folds_that_would_change_the_model_are_refused():
    block = tiny().blocks[0]
    with pytest.raises(ValueError, match="no layer 'head'"):
        fold(block, "head", torch.ones(20))
    with pytest.raises(ValueError, match="20 finite numbers above 0"):
        fold(block, "qkv", torch.ones(19))
    for strange in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite numbers above 0"):
            fold(block, "down", torch.tensor([strange] + [1.0] * 36))
    with pytest.raises(ValueError, match="3 queries of a KV head"):
        fold(block, "out", torch.arange(1.0, 37.0))


# Whole models


def test_the_searched_model_without_clipping_is_the_original():
    model = tiny()
    found = search(model, tokens(), bits=3, group_size=7, clipped=False)
    assert {s.alpha for s in found.searches.values()} != {0.0}
    torch.testing.assert_close(
        found.model(tokens(seed=5)), model(tokens(seed=5)), rtol=1e-9, atol=1e-9
    )


def test_search_reads_each_layers_own_inputs():
    """Against statistics of the whole model's run, for every layer of every block."""
    model, calibration = tiny(), tokens(5, 9)
    found = search(model, calibration, bits=3, group_size=7, rows=2)
    means = activation_means(model, calibration, rows=3)
    read = {}
    with observe(model, list(means), lambda name, x, y: read.setdefault(name, []).append(x)):
        run(model, calibration)
    for name, layer in linear_layers(model).items():
        if name == "head":
            continue
        x = torch.cat(read[name]).flatten(0, -2)
        seen = Seen.of(x)
        torch.testing.assert_close(means[name], seen.mean_D)
        mean = shared(seen.mean_D, 2, 3) if name.endswith("out") else seen.mean_D
        alone = search_scale(layer.weight, Seen(mean, seen.gram_DD), 3, 7)
        assert found.searches[name].losses == pytest.approx(alone.losses, rel=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_no_layer_errs_more_than_by_plain_rounding_on_the_calibration_set(symmetric):
    model, calibration, reads = tiny(), tokens(4, 16), {}
    found = search(model, calibration, 3, 7, symmetric)
    names = list(found.searches)
    with observe(model, names, lambda name, x, y: reads.__setitem__(name, x.flatten(0, -2))):
        run(model, calibration)
    for name in names:
        layer = found.model.get_submodule(name)
        layer.weight.copy_(awq_search.rounded(layer.weight, 3, 7, symmetric))
    back = fold_all(found.model, {name: 1 / s.scale_D for name, s in found.searches.items()})
    for name in names:
        w, ours = (m.get_submodule(name).weight for m in (model, back))
        plain = awq_search.rounded(w, 3, 7, symmetric)
        error, rtn = (float((reads[name] @ (new - w).T).norm()) for new in (ours, plain))
        assert error <= rtn * (1 + 1e-9), name


def test_q_and_k_rows_are_never_cut():
    found = search(tiny(), tokens(), bits=2, group_size=7)
    whole = search(tiny(), tokens(), bits=2, group_size=7, clipped=False)
    qk = (2 * 3 + 2) * 6
    for cut, left in zip(found.model.blocks, whole.model.blocks, strict=True):
        assert torch.equal(cut.qkv.weight[:qk], left.qkv.weight[:qk])
        assert not torch.equal(cut.qkv.weight[qk:], left.qkv.weight[qk:])
    assert not whole.cut and all(0 < share < 1 for share in found.cut.values())


def test_groups_are_cut_by_what_the_folded_model_reads():
    model, calibration, reads = tiny(), tokens(4, 16), {}
    whole = search(model, calibration, bits=3, group_size=7, clipped=False)
    cut = search(model, calibration, bits=3, group_size=7)
    names = [name for name in whole.searches if not name.endswith("qkv")]
    with observe(whole.model, names, lambda name, x, y: reads.__setitem__(name, x.flatten(0, -2))):
        run(whole.model, calibration)
    for name in names:
        expected = clip(whole.model.get_submodule(name).weight, Seen.of(reads[name]).gram_DD, 3, 7)
        torch.testing.assert_close(
            cut.model.get_submodule(name).weight, expected, rtol=1e-9, atol=1e-12
        )


def test_the_source_model_is_untouched_and_the_embedding_is_lent():
    model = tiny()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    found = search(model, tokens(), bits=3, group_size=7)
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert found.model.embed.weight.data_ptr() == model.embed.weight.data_ptr()
    assert found.model.head.weight is found.model.embed.weight


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq_gives_a_model_of_group_linears(symmetric):
    model = tiny()
    quantized = awq(model, tokens(), bits=3, group_size=8, symmetric=symmetric)
    layers = linear_layers(quantized)
    assert all(isinstance(layer, GroupLinear) for name, layer in layers.items() if name != "head")
    assert quantized(tokens()).isfinite().all()
    folded = search(model, tokens(), 3, 8, symmetric).model
    for name, layer in linear_layers(folded).items():
        if name != "head":
            expected = GroupLinear.from_linear(layer, 3, 8, symmetric).dequantized()
            assert torch.equal(layers[name].dequantized(), expected)


def test_four_bits_become_int4_linears_with_the_same_weights():
    made, folded = awq(tiny(), tokens(), 4, 10), search(tiny(), tokens(), 4, 10).model
    for name, layer in linear_layers(made).items():
        if name != "head":
            assert isinstance(layer, Int4Linear)
            expected = GroupLinear.from_linear(folded.get_submodule(name), 4, 10).dequantized()
            torch.testing.assert_close(layer.dequantized(), expected, rtol=0, atol=2e-3)


def test_awq_takes_another_kind_of_layer():
    made = []

    def make(linear):
        made.append(linear)
        return GroupLinear.from_linear(linear, 8, 20)

    awq(tiny(), tokens(), make=make, clipped=False)
    assert len(made) == 8


def test_short_calibration_works_and_an_empty_one_is_refused():
    assert search(tiny(), tokens(1, 10), bits=3, group_size=7).searches
    assert search(tiny(), tokens(1, 1), bits=3, group_size=7).searches
    for empty in (tokens(0, 11), tokens(3, 0)):
        for function in (search, awq, activation_means, keep_channels):
            with pytest.raises(ValueError, match="calibration set needs at least one row"):
                function(tiny(), empty)


def test_a_model_that_overflows_is_refused_by_name():
    model = tiny()
    model.blocks[1].gate_up.weight.data.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"blocks\.1\.gate_up|blocks\.1\.down|NaN or infin"):
        search(model, tokens())


def test_what_cannot_be_made_is_refused_before_the_search():
    with pytest.raises(ValueError, match="group_size=7"):
        awq(tiny(), tokens(), bits=4, group_size=7)
    with pytest.raises(ValueError, match="bits=9"):
        awq(tiny(), tokens(), bits=9)


def test_a_quantized_model_is_refused():
    quantized = awq(tiny(), tokens(), bits=3, group_size=7, clipped=False)
    for function in (search, awq):
        with pytest.raises(ValueError, match="quantized already"):
            function(quantized, tokens(), bits=3)


def test_other_blocks_are_refused():
    class Other(torch.nn.Module):
        def __init__(self, config, layer):
            super().__init__()

        def forward(self, x, rope, cache):
            return x

    with pytest.raises(TypeError, match="blocks of its own"):
        search(Transformer(TINY, block=Other), tokens())


# One percent kept


def test_salient_channels_are_the_largest_by_what_is_asked():
    w, mean = torch.ones(3, 200), torch.rand(200)
    w[:, 150], w[:, 3], mean[7], mean[100] = -5, 4, 9, 8
    assert salient_channels(w, mean, 0.01).tolist() == [7, 100]
    assert salient_channels(w, mean, 0.01, "weight").tolist() == [3, 150]
    draws = [
        salient_channels(w, mean, 0.05, "random", torch.Generator().manual_seed(i))
        for i in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert len(set(draws[0].tolist())) == 10
    assert salient_channels(w, mean, 0.0).numel() == 0
    assert len(salient_channels(w[:, :100], mean[:100], 0.07)) == 7
    mean[5] = torch.nan
    with pytest.raises(ValueError, match="rank nothing"):
        salient_channels(w, mean, 0.01)
    for bad in (dict(share=1.5), dict(by="luck")):
        with pytest.raises(ValueError, match="expected 0 to 1, and one of"):
            salient_channels(w, mean, **bad)


def test_kept_channels_come_back_and_the_rest_is_rounded():
    model = tiny()
    kept = keep_channels(model, tokens(), bits=2, group_size=7, share=0.1)
    means = activation_means(model, tokens())
    for name, layer in linear_layers(model).items():
        new = linear_layers(kept)[name].weight
        if name == "head":
            assert new.data_ptr() == layer.weight.data_ptr()
            continue
        columns = means[name].topk(math.ceil(0.1 * layer.in_features)).indices
        expected = GroupLinear.from_linear(layer, 2, 7).dequantized().to(F64)
        expected[:, columns] = layer.weight[:, columns]
        assert torch.equal(new, expected)
    everything = keep_channels(model, tokens(), bits=2, group_size=7, share=1.0)
    assert torch.equal(everything(tokens()), model(tokens()))


# Packed codes of any width


@settings(max_examples=40)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 21), st.integers(0, 2**31))
def test_bit_planes_give_back_every_code(bits, F, D, seed):
    codes = torch.randint(2**bits, (F, D), generator=torch.Generator().manual_seed(seed))
    planes = pack_planes(codes, bits)
    assert planes.shape == (F, bits, -(-D // 8)) and planes.dtype == torch.uint8
    assert torch.equal(unpack_planes(planes, D).long(), codes)
    for f in range(F):
        for d in range(D):
            stored = sum((int(planes[f, b, d // 8]) >> d % 8 & 1) << b for b in range(bits))
            assert stored == codes[f, d]


def test_codes_that_do_not_fit_are_refused():
    for code in (-1, 8):
        with pytest.raises(ValueError, match="3 bits hold 0 to 7"):
            pack_planes(torch.tensor([[code]]), 3)
    with pytest.raises(ShapeError, match="codes_FD has 1 axes"):
        pack_planes(torch.ones(4).int(), 3)
    with pytest.raises(ShapeError, match="1 bytes a row: D=20 takes 3"):
        unpack_planes(pack_planes(torch.ones(2, 7).int(), 3), 20)
    with pytest.raises(ShapeError, match="codes_FD has 3 axes"):
        GroupLinear(quantize(torch.ones(2, 4, 8), 3, 4))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_group_linear_computes_with_what_quantize_gave(bits, symmetric):

    linear = torch.nn.Linear(21, 6)
    layer = GroupLinear.from_linear(linear, bits, 8, symmetric)
    expected = quantize(linear.weight.detach(), bits, 8, symmetric, torch.float16)
    assert torch.equal(layer.dequantized(), expected.dequantize())
    x = torch.randn(2, 3, 21)
    torch.testing.assert_close(layer(x), x @ expected.dequantize().T + linear.bias)
    scales = 6 * 3 * (2 if symmetric else 3)
    assert layer.weight_bytes == 6 * bits * 3 + scales  # 21 codes fill three bytes a plane


def test_bits_a_weight_count_scales_and_zero_points():
    """For 48 weights 16 bits of scale and 8 of zero point (int4: another 16), so half a bit."""
    config = Config(D=96, F=144, K=2, G=1, H=48, L=1, V=9)
    model = Transformer.random(config)
    for bits, group_size, symmetric, expected in (
        (4, 48, False, 4 + 2 / 3), (3, 48, False, 3.5), (3, 48, True, 3 + 1 / 3), (3, 24, False, 4),
    ):  # fmt: skip
        made = awq(model, tokens(V=9), bits, group_size, symmetric)
        assert bits_per_weight(made) == pytest.approx(expected)


# The reference model


@pytest.fixture(scope="module")
def reference():

    study, held = english_split(weights.load_tokenizer())
    return weights.load(), windows(study, 4, 128, torch.Generator().manual_seed(0)), held[:8]


def test_awq_lowers_the_error_of_every_layer_of_the_reference_models_first_block(reference):
    """And keeps what the model computes, in fp32."""
    model, calibration, held = reference
    model.blocks = model.blocks[:1]
    found = search(model, calibration[:, :32], bits=3, clipped=False)
    for name, layer in found.searches.items():
        assert layer.alpha > 0, name
        assert min(layer.losses) < 0.95 * layer.losses[0], name
    ours, theirs = found.model.features(held), model.features(held)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


def test_casting_a_folded_copy_leaves_the_source_as_it_was():
    model = Transformer.random(TINY)
    copied = fold_all(model, {}).double()
    assert copied.embed.weight.dtype == torch.float64
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    if TINY.tied:
        assert copied.head.weight is copied.embed.weight


@pytest.mark.parametrize("group_size", ["row", 0, 4.0])
def test_a_group_is_a_whole_number_before_the_search_begins(group_size):
    with pytest.raises(ValueError, match="group_size"):
        search(Transformer.random(TINY), torch.zeros(1, 4, dtype=torch.long), group_size=group_size)
