from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lecture_util.alternatives.based import WindowBlock, based_block, window_attention
from lecture_util.alternatives.linear_attention import LinearAttentionBlock
from lecture_util.alternatives.state import States
from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError
from lecture_util.model.transformer import Block, Transformer

CONFIG = Config(D=12, F=16, K=2, G=2, H=6, L=3, V=19, max_context=64)
WINDOWS = (1, 2, 3, 5, 8)
KINDS = {"window": WindowBlock, "based": partial(based_block, width=3)}


def model(kind="window", W=3, dtype=torch.float64):
    torch.manual_seed(0)
    net = Transformer(CONFIG, block=partial(KINDS[kind], W=W))
    return net.to(dtype).eval().requires_grad_(False)


MODELS = {(kind, W): model(kind, W) for kind in KINDS for W in WINDOWS}


def tokens(B, T, seed=0):
    return torch.randint(19, (B, T), generator=torch.Generator().manual_seed(seed))


def qkv(B=2, T=7, N=4, K=2, H=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = (N, K, K)
    return [torch.randn(B, T, n, H, generator=generator, dtype=torch.float64) for n in heads]


def check(got, want, atol=1e-10):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def by_loop(q, k, v, W):
    out = torch.zeros_like(q)
    B, T, N, H = q.shape
    G = N // k.shape[2]
    for b in range(B):
        for t in range(T):
            seen = slice(max(0, t - W + 1), t + 1)
            for n in range(N):
                weights = (k[b, seen, n // G] @ q[b, t, n] / H**0.5).softmax(0)
                out[b, t, n] = weights @ v[b, seen, n // G]
    return out


@pytest.mark.parametrize("W", [*WINDOWS, 7, 100])
def test_window_attention_sees_w_tokens_itself_included_at_every_split(W):
    q, k, v = qkv()
    want = by_loop(q, k, v, W)
    check(window_attention(q, k, v, W)[0], want)
    for first in range(1, 7):
        head, state = window_attention(q[:, :first], k[:, :first], v[:, :first], W)
        tail, state = window_attention(q[:, first:], k[:, first:], v[:, first:], W, state)
        check(torch.cat((head, tail), 1), want)


@pytest.mark.parametrize("W", [1, 2, 3, 7, 8, 9])
def test_the_state_holds_the_last_w_less_one_tokens_and_nothing_else(W):
    """As a slice [-(W-1):] a window of 1 would keep everything."""
    q, k, v = qkv()
    state = None
    for t in range(7):
        new = slice(t, t + 1)
        _, state = window_attention(q[:, new], k[:, new], v[:, new], W, state)
        held = min(W - 1, t + 1)
        for part, source in zip(state, (k, v), strict=True):
            assert torch.equal(part, source[:, t + 1 - held : t + 1])
    _, at_once = window_attention(q, k, v, W)
    for part, expected in zip(at_once, state, strict=True):
        assert torch.equal(part, expected)
        assert part.untyped_storage().nbytes() == part.nbytes  # no view of the whole chunk


@pytest.mark.parametrize("W", [2, 5])
@pytest.mark.parametrize("T", [1, 4])
def test_a_step_leaves_the_state_it_was_given_alone(W, T):
    """A chunk shorter than the state must not write into a prefix that others share."""
    q, k, v = qkv(T=12)
    _, state = window_attention(q[:, :6], k[:, :6], v[:, :6], W)
    kept = [part.clone() for part in state]
    new = slice(6, 6 + T)
    first, after = window_attention(q[:, new], k[:, new], v[:, new], W, state)
    again, _ = window_attention(q[:, new], k[:, new], v[:, new], W, state)
    assert torch.equal(first, again)
    for part, copy, later in zip(state, kept, after, strict=True):
        assert torch.equal(part, copy)
        assert part.untyped_storage().data_ptr() != later.untyped_storage().data_ptr()


@given(
    kind=st.sampled_from(sorted(KINDS)), W=st.sampled_from(WINDOWS), B=st.integers(1, 3),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)  # fmt: skip
def test_any_split_of_the_prompt_gives_the_logits_of_one_pass(kind, W, B, chunks):
    net, tokens_BT = MODELS[kind, W], tokens(B, sum(chunks))
    states = States(CONFIG, B, 1, torch.float64)  # no slots are needed: capacity is no limit
    parts = [net(part, states) for part in tokens_BT.split(chunks, 1)]
    check(torch.cat(parts, 1), net(tokens_BT))
    assert states.lengths == [sum(chunks)] * B


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("W", [1, 3, 8])
def test_after_a_rollback_the_logits_are_those_of_a_fresh_pass(kind, W):
    net, states = MODELS[kind, W], States(CONFIG, 2, 1, torch.float64)
    prompt, draft, other = tokens(2, 7), tokens(2, 4, seed=1), tokens(2, 3, seed=2)
    net(prompt, states)
    point = states.snapshot()
    for part in draft.split(1, 1):
        net(part, states)
    states.restore(point)
    fresh = net(torch.cat((prompt, other), 1))[:, 7:]
    check(torch.cat([net(part, states) for part in other.split([1, 2], 1)], 1), fresh)
    states.restore(point)  # and a second time from the same point
    check(net(other, states), fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_reach_each_other(kind):
    net, tokens_BT = MODELS[kind, 3], tokens(3, 9)
    together = net(tokens_BT)
    for row in range(3):
        check(net(tokens_BT[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize(("W", "reach"), [(1, 0), (2, 3), (3, 6), (5, 12)])
def test_windows_reach_three_layers_times_w_less_one_back(W, reach):
    net, tokens_BT = MODELS["window", W], tokens(1, 20)
    changed = tokens_BT.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 19
    moved = (net(tokens_BT) - net(changed)).abs().amax(-1)[0] > 0
    assert moved.nonzero().flatten().tolist() == list(range(2, 2 + reach + 1))


def test_a_linear_layer_reaches_everything_after():
    net, tokens_BT = MODELS["based", 2], tokens(1, 20)
    changed = tokens_BT.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 19
    moved = (net(tokens_BT) - net(changed)).abs().amax(-1)[0] > 0
    assert moved.nonzero().flatten().tolist() == list(range(2, 20))


def test_a_window_as_wide_as_the_text_is_full_attention():
    torch.manual_seed(0)
    full = Transformer(CONFIG, block=Block).double().eval().requires_grad_(False)
    net = model("window", W=20)
    net.load_state_dict(full.state_dict())
    check(net(tokens(2, 20)), full(tokens(2, 20)))
    assert (net(tokens(2, 21)) - full(tokens(2, 21))).abs().max() > 1e-6


def test_based_alternates_windows_and_linear_layers_from_a_window_up():
    kinds = [type(block) for block in MODELS["based", 5].blocks]
    assert kinds == [WindowBlock, LinearAttentionBlock, WindowBlock]
    assert MODELS["based", 5].blocks[0].W == 5


def test_the_memory_of_a_based_stack_stops_growing_once_the_window_is_full():
    net, held = model("based", W=5, dtype=torch.float32), []
    for S in (2, 4, 5, 40):
        states = States(CONFIG, 2, 1)
        net(tokens(2, S), states)
        windows = 2 * 2 * min(S, 4) * 2 * 2 * 6 * 4  # layers, B, tokens, k and v, K, H, fp32
        linear = 2 * 4 * (13 * 6 + 13) * 4
        assert states.nbytes == windows + linear
        held.append(states.nbytes)
    assert held[0] < held[1] == held[2] == held[3]


@pytest.mark.parametrize("W", [0, -1, 2.0, None, True])
def test_what_is_no_window_is_refused(W):
    with pytest.raises(ValueError, match="a token sees itself"):
        WindowBlock(CONFIG, 0, W=W)
    with pytest.raises(ValueError, match="a token sees itself"):
        window_attention(*qkv(), W)


def test_a_state_of_another_batch_is_refused():
    _, state = window_attention(*qkv(B=1), 4)
    with pytest.raises(ShapeError, match=r"only the second axis, tokens, may differ"):
        window_attention(*qkv(B=2), 4, state)


def test_states_of_another_batch_are_refused():
    net, states = MODELS["based", 3], States(CONFIG, 2, 1, torch.float64)
    net(tokens(2, 4), states)
    with pytest.raises(ShapeError, match="B=1 rows but the states have 2"):
        net(tokens(1, 1), states)
