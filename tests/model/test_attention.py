import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.model.attention import (
    apply_rope,
    attend,
    attention_by_hand,
    causal_mask,
    rope_frequencies,
    rope_table,
)
from lecture_util.model.config import Config, RopeScaling
from lecture_util.model.shapes import ShapeError, TensorMismatch, check_shapes


def qkv(B, T, S, K, G, H, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, K * G, H, generator=g, dtype=dtype)
    return q, *(torch.randn(B, S, K, H, generator=g, dtype=dtype) for _ in "kv")


@given(
    B=st.integers(1, 3), T=st.integers(1, 5), extra=st.integers(0, 6),
    K=st.integers(1, 3), G=st.integers(1, 3), H=st.sampled_from([2, 6, 8]),
)  # fmt: skip
def test_both_versions_and_a_loop_agree(B, T, extra, K, G, H):
    q, k, v = qkv(B, T, T + extra, K, G, H)
    want = torch.zeros_like(q)
    for b in range(B):
        for t in range(T):
            for n in range(K * G):
                seen = extra + t + 1
                scores = k[b, :seen, n // G] @ q[b, t, n] / H**0.5
                want[b, t, n] = scores.softmax(0) @ v[b, :seen, n // G]
    torch.testing.assert_close(attention_by_hand(q, k, v), want)
    torch.testing.assert_close(attend(q, k, v), want)


def test_query_heads_read_neighbouring_kv_heads_not_tiled_ones():
    """axlearn#842, onnx#7274: four query heads over two KV heads map to [0, 0, 1, 1]."""
    q, k, v = qkv(B=1, T=1, S=1, K=2, G=2, H=4)
    v[0, 0, 0], v[0, 0, 1] = 0.0, 1.0
    for attention in (attention_by_hand, attend):
        assert attention(q, k, v)[0, 0, :, 0].tolist() == [0, 0, 1, 1]


def test_heads_are_repeated_on_the_head_axis_not_the_sequence():
    """prime-rl#2681: with T different from H a repeat on the wrong axis cannot hide."""
    q, k, v = qkv(B=2, T=5, S=7, K=2, G=3, H=4)
    want = nnf.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2))),
        attn_mask=causal_mask(torch.arange(2, 7), 7),
    ).transpose(1, 2)
    torch.testing.assert_close(attend(q, k, v), want)


def test_a_mask_row_shows_itself_and_all_before():
    assert causal_mask(torch.tensor([[0, 3]]), 5).sum(-1).tolist() == [[1, 4]]


@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 32)])
def test_rotation_matches_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = Config(D=64, F=64, K=1, G=2, H=32, L=1, V=8, rope_base=5e5, rope_scaling=scaling,
                    max_context=256)  # fmt: skip
    hf = LlamaConfig(**{k: v for k, v in config.to_hf().items() if k != "architectures"})
    x = torch.randn(1, 9, 2, 32)
    positions = torch.tensor([[0, 1, 2, 31, 32, 33, 100, 200, 255]])
    cos, sin = LlamaRotaryEmbedding(hf)(x, positions)
    want, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    got = apply_rope(x, rope_table(rope_frequencies(config), positions))
    torch.testing.assert_close(got, want.transpose(1, 2), atol=1e-6, rtol=0)


def test_rotation_depends_on_distance_alone():
    config = Config(D=8, F=8, K=1, G=1, H=16, L=1, V=8)
    q, k = torch.randn(2, 1, 16)

    def at(x, p):
        return apply_rope(x, rope_table(rope_frequencies(config), torch.tensor(p)))

    near, far = (at(q, p + 3).flatten() @ at(k, p).flatten() for p in (0, 4000))
    torch.testing.assert_close(near, far, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q, k.repeat(1, 1, 2, 1), v), ShapeError,
         "v_BSKH has K=2 but k_BSKH has K=4"),
        (lambda q, k, v: (q[:, :, :3], k, v), ShapeError, "N=3 but k_BSKH has K=2"),
        (lambda q, k, v: (q[0], k, v), ShapeError, "q_BTNH has 3 axes"),
        (lambda q, k, v: (q, k[:1], v), ShapeError, "k_BSKH has B=1 but q_BTNH has B=2"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), ShapeError, "T=3 but k_BSKH has S=2"),
        (lambda q, k, v: (q, k.float(), v), TensorMismatch, "k_BSKH is torch.float32"),
        (lambda q, k, v: (q, k, v.to("meta")), TensorMismatch, "v_BSKH is on meta"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=message):
        attend(*change(*qkv(B=2, T=3, S=3, K=2, G=2, H=4)))


def test_check_shapes_returns_the_sizes_it_bound():
    assert check_shapes(x_BT=torch.zeros(2, 3), y_TD=torch.zeros(3, 4)) == {"B": 2, "T": 3, "D": 4}


@pytest.mark.parametrize("window", [1, 2, 5, 9, 50])
def test_a_window_counts_the_query_itself(window):
    mask_TS = causal_mask(torch.arange(9), 9, window)
    for p in range(9):
        assert mask_TS[p].nonzero().flatten().tolist() == list(range(max(0, p - window + 1), p + 1))


@pytest.mark.parametrize("window", [0, -3, 2.0, True])
def test_a_window_is_a_whole_number(window):
    with pytest.raises(ValueError, match="at least 1"):
        causal_mask(torch.arange(3), 3, window)
