from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_models import SMALL, feed, held_state, new_cache, small_model, tokens

from lecture_util.kv_reduction.cla import LayeredCache, adopt
from lecture_util.kv_reduction.layout import Layout
from lecture_util.kv_reduction.window import Ring
from lecture_util.model.attention import causal_mask
from lecture_util.model.checkpoint import load_folder
from lecture_util.model.generate import generate, generate_naive

MODELS = {W: small_model(Layout.windowed(6, W)) for W in (1, 2, 3, 4, 5, 7, 8)}


def ring(cache, layer=0):
    return cache.stores[layer]


def check(got, want):
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("W", [1, 2, 5, 13])
def test_logits_equal_transformers_windowed_mistral(W, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    hf = MistralForCausalLM(MistralConfig(
        vocab_size=31, hidden_size=24, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=4, sliding_window=W,
        max_position_embeddings=64, initializer_range=0.3, attn_implementation="eager",
    )).double().eval()  # fmt: skip
    hf.save_pretrained(tmp_path / "mistral")
    plain = load_folder(tmp_path / "mistral", dtype=torch.float64)
    assert plain.config.max_context == W  # beyond it full attention would be wrong
    model = adopt(plain, Layout.windowed(3, W), max_context=64)
    tokens_BT = tokens(2, 17)
    with torch.no_grad():
        want = hf(tokens_BT, use_cache=False).logits
    tolerance = dict(atol=1e-5, rtol=1e-5)  # norms and rotations are in fp32 on both sides
    torch.testing.assert_close(model(tokens_BT), want, **tolerance)
    one_by_one = feed(model, new_cache(model, B=2), tokens_BT, 1)
    torch.testing.assert_close(one_by_one, want, **tolerance)
    wider = adopt(plain, Layout.windowed(3, W + 1), max_context=64)
    assert (wider(tokens_BT) - want).abs().max() > 1e-2  # one key more would be seen here


@settings(max_examples=40)
@given(
    W=st.sampled_from([1, 2, 3, 5, 7]), slack=st.integers(0, 4), B=st.integers(1, 3),
    chunks=st.lists(st.integers(1, 10), min_size=1, max_size=4),
)  # fmt: skip
def test_any_split_into_chunks_gives_the_uncached_logits(W, slack, B, chunks):
    model, tokens_BT = MODELS[W], tokens(B, sum(chunks))
    cache = new_cache(model, B, slack=slack)
    check(feed(model, cache, tokens_BT, chunks), model(tokens_BT))
    assert cache.lengths == [sum(chunks)] * B


@pytest.mark.parametrize("T", [1, 4, 5, 6, 13])
def test_chunks_around_the_window_and_longer_see_full_windows(T):
    model, tokens_BT = MODELS[5], tokens(2, 26)
    check(feed(model, new_cache(model, B=2), tokens_BT, T), model(tokens_BT))


def test_no_token_is_dropped_before_the_window_has_passed_it():
    """transformers#37574: W=8, six tokens, then one at a time. Rolled a step early there."""
    model, tokens_BT = MODELS[8], tokens(1, 9)
    cache = new_cache(model)
    model(tokens_BT[:, :6], cache)
    oldest, fewest_seen = [ring(cache).oldest[0]], []
    for p in (6, 7, 8):
        k = torch.zeros(1, 1, SMALL.K, SMALL.H, dtype=torch.float64)
        k_BSKH, _, mask = ring(cache).take(k, k, cache.lengths)
        assert mask is None  # all that is handed over is visible
        fewest_seen.append(k_BSKH.shape[1])
        model(tokens_BT[:, p : p + 1], cache)
        oldest.append(ring(cache).oldest[0])
    assert fewest_seen == [7, 8, 8]
    assert oldest == [0, 0, 1, 2]  # position 0 goes when position 8 is next and sees 1..8


def test_a_chunk_evicts_as_many_as_came_and_order_is_kept():
    """mlx-lm#1914: room for four, three tokens twice: the last four stay, in order."""
    model, tokens_BT = MODELS[4], tokens(1, 6)
    whole, cache = new_cache(model, slack=30), new_cache(model, slack=1)
    model(tokens_BT, whole)
    feed(model, cache, tokens_BT, 3)
    for layer in range(6):
        assert ring(cache, layer).R == 4
        assert ring(cache, layer).oldest == [2]
        check(ring(cache, layer).held(0, 6), ring(whole, layer).held(0, 6)[2:])


@pytest.mark.parametrize("W", [1, 2, 5])
@pytest.mark.parametrize("slack", [0, 3])
def test_storage_itself_is_bounded_by_the_window(W, slack):
    """VeloxQuant-MLX#274: eviction that only len() knew of."""
    model, cache = MODELS[W], new_cache(MODELS[W], B=2, slack=slack)
    for p in range(20):
        model(tokens(2, 1, seed=p), cache)
        storage = sum(
            x.untyped_storage().nbytes()
            for s in cache.stores.values()
            for x in (s.k_BSKH, s.v_BSKH)
        )
        assert storage == cache.nbytes == 6 * 2 * 2 * (W - 1 + slack) * SMALL.K * SMALL.H * 8
        assert all(store.new is None for store in cache.stores.values())
    assert not cache.seen
    assert ring(cache).held(0, 20).shape[0] == W - 1 + slack


def test_alternating_sequences_stay_bounded_and_apart():
    """ollama#12543: only the sequences of the current batch were trimmed."""
    model, a, b = MODELS[3], tokens(1, 24, seed=1), tokens(1, 24, seed=2)
    caches, got = (new_cache(model), new_cache(model)), ([], [])
    for p in range(0, 24, 2):
        for sequence, cache, out in zip((a, b), caches, got, strict=True):
            out.append(model(sequence[:, p : p + 2], cache))
            assert ring(cache).held(0, p + 2).shape[0] == min(2, p + 2) == ring(cache).R
    check(torch.cat(got[0], 1), model(a))
    check(torch.cat(got[1], 1), model(b))


def test_a_zero_key_is_still_a_token():
    """transformers' StaticLayer counted the rows that are not zero."""
    store = Ring(SMALL, 1, W=4, slack=0, capacity=9, dtype=torch.float64, device=None)
    zero, one = (torch.full((1, 1, SMALL.K, SMALL.H), x, dtype=torch.float64) for x in (0, 1))
    for length, k in enumerate([one, zero, zero, one], start=1):
        k_BSKH, _, _ = store.take(k, k, [length - 1])
        assert k_BSKH.shape[1] == length
        store.keep([length])
    assert store.held(0, 4)[:, 0, 0].tolist() == [0, 0, 1]


@settings(max_examples=40)
@given(
    W=st.sampled_from([1, 2, 3, 5, 7]), slack=st.integers(0, 5), first=st.integers(1, 12),
    back=st.lists(st.integers(0, 5), min_size=1, max_size=3), more=st.integers(1, 9),
)  # fmt: skip
def test_after_a_rollback_within_slack_the_logits_are_a_fresh_forwards(W, slack, first, back, more):
    """Several times over: a ring that went back has to know what it lost, also the next time."""
    model, cache = MODELS[W], new_cache(MODELS[W], slack=slack, capacity=60)
    sequence = tokens(1, first)
    model(sequence, cache)
    for turn, n in enumerate(back):
        keep = max(0, sequence.shape[1] - n)
        if n <= slack:
            cache.truncate(keep)
            sequence = sequence[:, :keep]
        sequence = torch.cat((sequence, tokens(1, more, seed=turn + 1)), dim=1)
        got = model(sequence[:, -more:], cache)
        check(got, model(sequence)[:, -more:])


@settings(max_examples=60)
@given(W=st.sampled_from([1, 2, 3, 5]), slack=st.integers(0, 4), length=st.integers(1, 14),
       data=st.data())  # fmt: skip
def test_truncate_gives_the_right_logits_or_refuses_and_changes_nothing(W, slack, length, data):
    model, cache = MODELS[W], new_cache(MODELS[W], slack=slack)
    sequence = tokens(1, length)
    chunk = data.draw(st.integers(1, length))
    feed(model, cache, sequence, chunk)
    for keep in data.draw(st.lists(st.integers(0, length), min_size=1, max_size=3)):
        before = held_state(cache)
        if keep > cache.lengths[0]:
            continue
        try:
            cache.truncate(keep)
        except ValueError as error:
            assert "slack" in str(error)
            # Refused only beyond slack, and only if a key that is needed is gone.
            assert max(length, *before[0]) - keep > slack
            assert max(0, keep - W + 1) < before[1][0][0][0]
            torch.testing.assert_close(held_state(cache), before, atol=0, rtol=0)
    keep = cache.lengths[0]
    sequence = torch.cat((sequence[:, :keep], tokens(1, 4, seed=9)), dim=1)
    check(model(sequence[:, keep:], cache), model(sequence)[:, keep:])


def test_going_back_twice_counts_against_one_slack():
    model, cache = MODELS[3], new_cache(MODELS[3], slack=2)
    model(tokens(1, 10), cache)
    cache.truncate(9)
    cache.truncate(8)
    with pytest.raises(
        ValueError, match=r"needs position 5 .*slack=2\) holds 6 on.*slack=3 or more"
    ):
        cache.truncate(7)
    assert cache.lengths == [8]
    cache.truncate(0)  # nothing is needed of nothing
    check(model(tokens(1, 7), cache), model(tokens(1, 7)))
    cache.truncate(5)  # within the new sequence's slack, whatever the old one had lost


def test_prompts_of_unequal_length_need_slack_and_then_go_on_alone():
    model, lengths = MODELS[3], [9, 4, 7]
    prompts = tokens(3, 9)
    cache = new_cache(model, B=3, slack=5)
    model(prompts, cache)
    cache.truncate(lengths)
    for step in (1, 4, 1):  # shorter and longer than the window
        more = tokens(3, step, seed=step)
        got = model(more, cache)
        rows = [torch.cat((p[:n], m)) for p, n, m in zip(prompts, lengths, more, strict=True)]
        for row, sequence in enumerate(rows):
            check(got[row], model(sequence[None])[0, -step:])
        lengths = [n + step for n in lengths]
        prompts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    short = new_cache(model, B=3)
    model(tokens(3, 9), short)
    with pytest.raises(ValueError, match=r"in row 1, but layer 0's window of 3 .* slack=5 or more"):
        short.truncate([9, 4, 7])
    assert short.lengths == [9, 9, 9]


def test_rows_shorter_than_the_window_beside_longer_ones():
    model, cache = MODELS[7], new_cache(MODELS[7], B=2, slack=8)
    prompts = tokens(2, 9)
    model(prompts, cache)
    cache.truncate([9, 1])
    more = tokens(2, 5, seed=3)
    got = feed(model, cache, more, [1, 3, 1])
    for row, n in enumerate([9, 1]):
        sequence = torch.cat((prompts[row, :n], more[row]))[None]
        check(got[row], model(sequence)[0, n:])


@pytest.mark.parametrize("W", [1, 3, 8])
def test_generation_with_rings_equals_the_naive_loop(W):
    model = MODELS[W]
    prompts = [[5, 3, 9, 1, 4, 4, 2], [7, 2]]
    out = generate(model, prompts, 12, new_cache=partial(model.new_cache, slack=5))
    assert out == [generate_naive(model, prompt, 12) for prompt in prompts]
    assert out[0] != generate_naive(MODELS[5], prompts[0], 12)  # another window, other words


def test_one_mask_for_all():
    """A ring's mask, taken apart by positions, is causal_mask's."""
    store = Ring(SMALL, 2, W=4, slack=3, capacity=50, dtype=torch.float64, device=None)
    k = torch.zeros(2, 6, SMALL.K, SMALL.H, dtype=torch.float64)
    lengths, T, past = [8, 2], 6, 3
    _, _, mask_BTS = store.take(k, k, lengths)
    for row, length in enumerate(lengths):
        positions_T = torch.arange(length, length + T)
        want_TS = causal_mask(positions_T, length + T, window=4)
        lost = max(0, past - length)  # keys before the sequence's start
        assert torch.equal(mask_BTS[row, :, lost:], want_TS[:, max(0, length - past) :])
        assert not mask_BTS[row, :, :lost].any()


def test_wrong_keys_are_refused_and_nothing_is_written():
    model, cache = MODELS[3], new_cache(MODELS[3])
    model(tokens(1, 5), cache)
    before = held_state(cache)
    with pytest.raises(TypeError, match=r"keys are torch.float32 .* cache is torch.float64"):
        adopt(small_model(Layout.full(6)), model.layout).float()(tokens(1, 2), cache)
    with pytest.raises(
        ValueError, match="40 new tokens after 5 need 45 slots but the cache has 40"
    ):
        model(tokens(1, 40), cache)
    with pytest.raises(ValueError, match="B=2 rows but the cache has 1"):
        model(tokens(2, 1), cache)
    torch.testing.assert_close(held_state(cache), before, atol=0, rtol=0)
    wide = LayeredCache(SMALL.with_kv_heads(3), 1, 9, torch.float64, layout=model.layout)
    with pytest.raises(ValueError, match=r"\(K, H\)=\(2, 4\) but the cache has \(3, 4\)"):
        model(tokens(1, 2), wide)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(B=0), "B=0"), (dict(capacity=0), "capacity=0"), (dict(capacity=2.0), "capacity=2.0"),
        (dict(slack=-1), r"slack=-1\): expected a whole number, at least 0"),
    ],
)  # fmt: skip
def test_bad_sizes_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        LayeredCache(SMALL, **(dict(B=1, capacity=4, layout=Layout.full(6)) | bad))
