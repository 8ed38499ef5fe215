import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.alternatives.linear_attention import (
    LinearAttentionBlock,
    chunked,
    elu_features,
    parallel,
    recurrent,
    softmax_features,
    taylor_features,
)
from lecture_util.alternatives.state import States
from lecture_util.model.attention import apply_rope, rope_frequencies, rope_table
from lecture_util.model.config import Config
from lecture_util.model.kv_cache import NoCache
from lecture_util.model.shapes import ShapeError
from lecture_util.model.transformer import Transformer

FEATURES = {"elu": elu_features, "softmax": softmax_features, "taylor": taylor_features}
SHAPES = [(2, 7, 3, 5, 4), (1, 1, 1, 1, 1), (3, 13, 2, 2, 5), (2, 3, 5, 4, 3)]  # B, T, N, d, H


def inputs(B, T, N, d, H, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    new = partial(torch.randn, generator=generator, dtype=torch.float64)
    return tuple(x.to(dtype) for x in (new(B, T, N, d), new(B, T, N, d), new(B, T, N, H)))


def featured(name, shape, seed=0):
    q, k, v = inputs(*shape, seed=seed)
    return FEATURES[name](q), FEATURES[name](k), v


def check(got, want, atol=1e-12):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def by_loop(q, k, v, weight):
    """Weighted means, one number at a time: nothing in common with the module."""
    out = torch.zeros_like(v)
    B, T, N, H = v.shape
    for b in range(B):
        for n in range(N):
            for t in range(T):
                weights = [weight(float(q[b, t, n] @ k[b, s, n])) for s in range(t + 1)]
                for h in range(H):
                    values = [float(v[b, s, n, h]) for s in range(t + 1)]
                    pairs = zip(weights, values, strict=True)
                    out[b, t, n, h] = sum(w * x for w, x in pairs) / sum(weights)
    return out


def all_forms(q, k, v):
    yield parallel(q, k, v)
    yield recurrent(q, k, v)[0]
    for chunk in range(1, q.shape[1] + 3):
        yield chunked(q, k, v, chunk=chunk)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_form_is_attention_with_exp_to_second_order(shape):
    q, k, v = inputs(*shape)
    scale = shape[3] ** -0.5
    want = by_loop(q, k, v, lambda dot: 1 + dot * scale + (dot * scale) ** 2 / 2)
    for got in all_forms(taylor_features(q), taylor_features(k), v):
        check(got, want)


@pytest.mark.parametrize("name", ["elu", "softmax"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_form_is_the_weighted_mean_of_its_features(shape, name):
    q, k, v = featured(name, shape)
    want = by_loop(q, k, v, lambda dot: dot)
    for got in all_forms(q, k, v):
        check(got, want)


def test_small_scores_give_softmax_attention():
    """With exp expanded to second order the error is of third order in the scores."""
    q, k, v = inputs(2, 11, 3, 5, 4)
    errors = []
    for size in (0.1, 0.05):
        heads = (x.transpose(1, 2) for x in (size * q, size * k, v))
        want = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        got = parallel(taylor_features(size * q), taylor_features(size * k), v)
        errors.append((got - want.transpose(1, 2)).abs().max().item())
    assert errors[0] < 1e-5
    assert 40 < errors[0] / errors[1] < 90  # scores are quartered: 4³ = 64


@given(
    d=st.integers(1, 9), seed=st.integers(0, 99), size=st.floats(0, 30),
    scale=st.sampled_from([None, 1.0, 0.3]),
)  # fmt: skip
def test_taylor_features_multiply_to_the_polynomial_of_the_score(d, seed, size, scale):
    q, k, _ = inputs(1, 1, 1, d, 1, seed)
    q, k = size * q.flatten(), size * k.flatten()
    phi_q, phi_k = taylor_features(q, scale), taylor_features(k, scale)
    assert phi_q.shape == (1 + d + d * d,)
    s = (q @ k).item() * (d**-0.5 if scale is None else scale)
    product = (phi_q @ phi_k).item()
    magnitude = 1 + phi_q.norm().item() * phi_k.norm().item()
    assert math.isclose(product, 1 + s + s * s / 2, abs_tol=1e-14 * magnitude)
    assert product >= 0.5 - 1e-14 * magnitude


def test_the_scale_is_one_over_root_d_unless_given():
    """flash-linear-attention#47: two scales in two paths."""
    q, k, v = inputs(2, 7, 3, 4, 5)
    default = parallel(taylor_features(q), taylor_features(k), v)
    check(parallel(taylor_features(q, 0.5), taylor_features(k, 0.5), v), default)
    bare = parallel(taylor_features(q, 1.0), taylor_features(k, 1.0), v)
    check(bare, by_loop(q, k, v, lambda dot: 1 + dot + dot**2 / 2))
    assert (bare - default).abs().max() > 1e-2


def test_features_are_as_defined_and_positive_far_from_zero():
    x = torch.tensor([-700.0, -30.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    want = [math.exp(y) if y < 0 else y + 1 for y in x.tolist()]
    check(elu_features(x), torch.tensor(want, dtype=torch.float64))
    assert (elu_features(x) > 0).all()  # elu(x) + 1 would be 0 from -37 down
    check(elu_features(x[1:]), torch.nn.functional.elu(x[1:]) + 1)
    x.requires_grad_()
    elu_features(x).sum().backward()
    assert x.grad.isfinite().all()
    check(softmax_features(x).sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("form", [recurrent, chunked, partial(chunked, chunk=2)])
def test_continuing_from_a_state_at_every_split_equals_one_pass(name, form):
    """flash-linear-attention#285: a second chunk with a past differed from the full pass."""
    q, k, v = featured(name, (2, 7, 3, 5, 4))
    want, end = parallel(q, k, v), recurrent(q, k, v)[1]
    for first in range(1, 7):
        head, state = form(q[:, :first], k[:, :first], v[:, :first])
        tail, state = form(q[:, first:], k[:, first:], v[:, first:], state)
        check(torch.cat((head, tail), 1), want)
        for got, expected in zip(state, end, strict=True):
            check(got, expected)


def test_the_state_is_the_two_sums():
    q, k, v = featured("taylor", (2, 7, 3, 5, 4))
    for form in (recurrent, chunked, partial(chunked, chunk=3)):
        kv_BNMH, sum_BNM = form(q, k, v)[1]
        want = sum(k[:, t, :, :, None] * v[:, t, :, None, :] for t in range(7))
        check(kv_BNMH, want)
        check(sum_BNM, sum(k[:, t] for t in range(7)))


def test_one_head_or_row_does_not_reach_another():
    """flash-linear-attention#850: the normaliser summed over heads instead of time."""
    q, k, v = featured("elu", (2, 5, 3, 4, 6))
    for form in (recurrent, partial(chunked, chunk=2)):
        together = form(q, k, v)[0]
        for b in range(2):
            for n in range(3):
                cut = (slice(b, b + 1), slice(None), slice(n, n + 1))
                check(form(q[cut], k[cut], v[cut])[0], together[cut])


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_agree_between_forms_and_with_finite_differences(name):
    """flash-linear-attention#875: no gradient through the normaliser, so a wrong one for k."""
    q, k, v = inputs(2, 5, 3, 2, 4)
    weight = torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=v.dtype)

    def gradients(form):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = form(FEATURES[name](leaves[0]), FEATURES[name](leaves[1]), leaves[2])
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad((out * weight).sum(), leaves)

    want = gradients(parallel)
    for form in (recurrent, chunked, partial(chunked, chunk=2)):
        for got, expected in zip(gradients(form), want, strict=True):
            check(got, expected)
    phi = FEATURES[name]
    small = [x[:1, :3, :1].clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: chunked(phi(q), phi(k), v, chunk=2)[0], small)


@pytest.mark.parametrize("form", [recurrent, chunked, partial(chunked, chunk=2)])
def test_a_step_leaves_the_state_it_was_given_alone(form):
    """Written in place, a state could not be gone back to after a rejected draft."""
    q, k, v = featured("taylor", (2, 7, 3, 5, 4))
    state = form(q[:, :4], k[:, :4], v[:, :4])[1]
    kept = [part.clone() for part in state]
    first = form(q[:, 4:], k[:, 4:], v[:, 4:], state)
    again = form(q[:, 4:], k[:, 4:], v[:, 4:], state)
    for part, copy in zip(state, kept, strict=True):
        assert torch.equal(part, copy)
    check(again[0], first[0], atol=0)
    memory = {part.untyped_storage().data_ptr() for part in state}
    assert memory.isdisjoint(part.untyped_storage().data_ptr() for part in first[1])


def test_the_state_stays_in_fp32_under_bf16_inputs():
    """In bf16 a sum of ones stops growing at 256."""
    ones = torch.ones(1, 1000, 1, 1, dtype=torch.bfloat16)
    for form in (recurrent, chunked):
        out, (kv, total) = form(ones, ones, ones)
        assert out.dtype == torch.bfloat16
        assert kv.dtype == total.dtype == torch.float32
        assert kv.item() == total.item() == 1000
    out = parallel(ones, ones, ones)
    assert out.dtype == torch.bfloat16
    assert (out == 1).all()


def test_weights_that_round_to_nothing_give_zero_and_no_nan():
    q, k = torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)
    for out in all_forms(q, k, torch.ones(1, 3, 1, 4)):
        assert (out == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(q_BTNM=torch.ones(1, 3, 2, 5)), ShapeError, "k_BTNM has M=4 but q_BTNM has M=5"),
        (dict(k_BTNM=torch.ones(1, 3, 1, 4)), ShapeError, "keys of their own"),
        (dict(v_BTNH=torch.ones(1, 2, 2, 3)), ShapeError, "v_BTNH has T=2"),
        (dict(state=(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3))), ShapeError, "the state has"),
        (dict(chunk=0), ValueError, "chunk=0: expected a whole number, at least 1"),
        (dict(chunk=2.0), ValueError, "chunk=2.0"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, words):
    given = dict(
        q_BTNM=torch.ones(1, 3, 2, 4), k_BTNM=torch.ones(1, 3, 2, 4), v_BTNH=torch.ones(1, 3, 2, 3)
    )
    with pytest.raises(error, match=words):
        chunked(**given | change)
    if "chunk" not in change:
        with pytest.raises(error, match=words):
            recurrent(**given | change)


def test_no_tokens_at_all_are_refused():
    empty = torch.ones(1, 0, 2, 4)
    for form in (parallel, recurrent, chunked):
        with pytest.raises(ShapeError, match="T=0"):
            form(empty, empty, empty)


# The layer

CONFIG = Config(D=12, F=16, K=2, G=2, H=6, L=2, V=19, max_context=64)


def model(features=taylor_features, width=3, dtype=torch.float64, rotate=False):
    torch.manual_seed(0)
    block = partial(LinearAttentionBlock, width=width, features=features, rotate=rotate)
    return Transformer(CONFIG, block=block).to(dtype).eval().requires_grad_(False)


def tokens(B, T, seed=0):
    return torch.randint(19, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("width", "rotate"), [(3, False), (2, True), (6, True)])
@pytest.mark.parametrize("chunks", [[1] * 9, [9], [1, 3, 5], [5, 1, 1, 2], [2, 7]])
def test_the_layer_gives_the_same_logits_for_any_split(name, width, rotate, chunks):
    net, tokens_BT = model(FEATURES[name], width, rotate=rotate), tokens(2, 9)
    states = States(CONFIG, 2, 9, torch.float64)
    got = torch.cat([net(part, states) for part in tokens_BT.split(chunks, 1)], 1)
    # Rotations are in fp32: there the last digits depend on how many are done at once.
    check(got, net(tokens_BT), atol=1e-6 if rotate else 1e-10)


def test_a_layer_sees_the_order_of_what_came_before_only_if_it_rotates():
    x_BTD = torch.randn(1, 8, 12, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4, 7])  # the last stays the last
    rope = rope_table(rope_frequencies(CONFIG), torch.arange(8)[None])
    for rotate in (False, True):
        layer = model(width=2, dtype=torch.float32, rotate=rotate).blocks[0]
        out, other = (layer(x, rope, NoCache())[:, -1] for x in (x_BTD, x_BTD[:, order]))
        assert torch.allclose(out, other, atol=1e-5) != rotate


def test_a_rotated_layer_turns_as_attention_with_heads_of_its_width():
    """The score of a query and a key depends on the distance between them, at width's own rates."""
    width, seen = 2, []
    layer = model(width=width, dtype=torch.float32, rotate=True).blocks[0]
    layer.features = lambda x: seen.append(x) or taylor_features(x)
    rope = rope_table(rope_frequencies(CONFIG), torch.tensor([[3, 11]]))
    x_BTD = torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(0))
    layer(x_BTD, rope, NoCache())
    q, k, _ = layer.qkv(layer.norm_attention(x_BTD)).unflatten(-1, (4, -1)).split([2, 2, 6], -1)
    narrow = rope_table(rope_frequencies(replace(CONFIG, H=width)), torch.tensor([[3, 11]]))
    for got, want in zip(seen, (q, k), strict=True):
        torch.testing.assert_close(got, apply_rope(want, narrow), atol=1e-5, rtol=0)


def test_the_layer_is_causal():
    net, tokens_BT = model(), tokens(1, 9)
    changed = tokens_BT.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 19
    before, after = net(tokens_BT), net(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()


def test_the_layers_state_is_of_one_size_at_any_context():
    net = model(dtype=torch.float32)
    assert net.blocks[0].num_features == 1 + 3 + 9
    for S in (1, 5, 40):
        states = States(CONFIG, 2, S)
        net(tokens(2, S), states)
        assert states.nbytes == 2 * 2 * 4 * (13 * 6 + 13) * 4  # L, B, N heads, sums, fp32


def test_a_bf16_model_sums_in_fp32():
    net = model(dtype=torch.bfloat16)
    states = States(CONFIG, 1, 9, torch.bfloat16)
    out = net(tokens(1, 9), states)
    assert out.dtype == torch.bfloat16
    assert {part.dtype for state in states.states.values() for part in state} == {torch.float32}


def test_a_width_that_is_no_width_is_refused():
    with pytest.raises(ValueError, match="width=0: expected a whole number"):
        LinearAttentionBlock(CONFIG, 0, width=0)
    for width in (3, 4):
        with pytest.raises(ValueError, match="expected an even divisor of H=6"):
            LinearAttentionBlock(CONFIG, 0, width=width, rotate=True)
