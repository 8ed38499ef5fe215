"""Flat runs over both pools, against each sequence computed alone; unused slots hold NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.model.attention import attention_by_hand
from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError, TensorMismatch
from lecture_util.model.transformer import Transformer
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import Params, Request, Running
from lecture_util.serving.scheduler import Work
from lecture_util.serving.slots import SlotCache

LONGEST = 24
SMALL = {G: Config(D=24, F=32, K=2, G=G, H=8, L=2, V=53, max_context=64) for G in (1, 3)}
# The model rounds to fp32 in its norms and rotations, where a sum in another order may fall on the
# other side: some 2**-24 of a number near 1. A key of another's is 1e-2 and more.
CLOSE = dict(rtol=0, atol=1e-6)


def loud(config):
    """Weights large enough that each key matters."""
    model = Transformer.random(config, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for block in model.blocks:
            block.qkv.weight.mul_(10)
    return model


MODELS = {G: loud(config) for G, config in SMALL.items()}
KINDS = ["slots", 1, 3, 4, 16, 64]  # or the page size


def new_cache(kind, config=SMALL[3], rows=6, **options):
    options = {"dtype": torch.float64, **options}
    if kind == "slots":
        cache = SlotCache(config, rows, LONGEST, **options)
    else:
        cache = PagedCache(config, rows * -(-LONGEST // kind), kind, **options)
    for pool in (cache.k_LMPKH, cache.v_LMPKH):
        pool.fill_(torch.nan)
    return cache


def sequence(id, tokens, samples=1):
    request = Request(tokens, Params(max_new_tokens=8, samples=samples))
    leader, *followers = (
        Running(id + sample, request, id, sample, list(tokens), 0.0) for sample in range(samples)
    )
    leader.followers = followers
    return leader


def work_of(cache, one, count):
    assert cache.memory.grow(one, one.computed + count)
    return Work(one, one.computed, count)


def forward(model, cache, work):
    """Logits of the work, piece by piece, in the order that `load` wants."""
    flat = sorted(work, key=lambda w: w.count > 1)
    cache.load(flat)
    tokens = [t for w in flat for t in w.sequence.tokens[w.start : w.start + w.count]]
    parts = model(torch.tensor([tokens]), cache)[0].split([w.count for w in flat])
    for w in flat:
        w.sequence.computed = w.start + w.count
        cache.memory.commit(w.sequence)
    return [(w, logits_TV) for w, logits_TV in zip(flat, parts, strict=True)]


def check(model, results):
    for w, logits_TV in results:
        end = w.start + w.count
        alone_TV = model(torch.tensor([w.sequence.tokens[:end]]))[0, w.start :]
        torch.testing.assert_close(logits_TV, alone_TV, **CLOSE)


@pytest.mark.parametrize("G", SMALL)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(data=st.data())
def test_any_mixture_of_chunks_and_single_tokens_matches_each_sequence_alone(kind, G, data):
    """Sequences come, are computed in pieces beside each other, go, and others take their room."""
    model, cache = MODELS[G], new_cache(kind, SMALL[G], rows=3)
    alphabet = st.integers(0, 2)  # so that prefixes are found
    live, number = [], 0
    for _ in range(data.draw(st.integers(2, 5))):
        if len(live) == 3 or (live and data.draw(st.booleans())):
            cache.memory.release(live.pop(data.draw(st.integers(0, len(live) - 1))))
        while len(live) < 3:
            one = sequence(number, data.draw(st.lists(alphabet, min_size=1, max_size=LONGEST)))
            number += 1
            found = cache.memory.begin(one)
            if found is None:
                break
            one.computed = found
            live.append(one)
        counts = [min(data.draw(st.sampled_from([1, 1, 4, 30, 0])), s.remaining) for s in live]
        work = [work_of(cache, s, n) for s, n in zip(live, counts, strict=True) if n]
        if work:
            check(model, forward(model, cache, work))


@pytest.mark.parametrize("kind", KINDS)
def test_forks_go_on_differently_and_their_parent_is_untouched(kind):
    """Copy on write: a shared open page, written by three."""
    model, cache = MODELS[3], new_cache(kind)
    one, other = sequence(0, [5, 6, 7, 8, 9], samples=3), sequence(10, [5, 6, 7, 1])
    for s in (one, other):
        s.computed = cache.memory.begin(s)
    check(model, forward(model, cache, [work_of(cache, one, 5)]))
    children, one.followers = one.followers, []
    for child in children:
        cache.memory.fork(one, child)
        child.computed = one.computed
    family = [one, *children]
    for step in range(6):
        for i, s in enumerate(family):
            s.tokens.append(10 * i + step)
        work = [work_of(cache, s, 1) for s in family]
        if other.remaining:
            work.append(work_of(cache, other, min(2, other.remaining)))
        check(model, forward(model, cache, work))
    assert cache.memory.take_copies() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(6,), (4, 2), (1, 5), (1, 1, 1, 1, 1, 1), (2, 1, 3)])
def test_a_prompt_in_chunks_equals_one_pass(kind, cuts):
    """nano-vllm#213: a chunk attends up to its own end, not the prompt's."""
    model, cache = MODELS[3], new_cache(kind)
    one = sequence(0, [3, 1, 4, 1, 5, 9])
    cache.memory.begin(one)
    for count in cuts:
        check(model, forward(model, cache, [work_of(cache, one, count)]))


@pytest.mark.parametrize("kind", KINDS)
def test_positions_go_on_where_each_sequence_stands(kind):
    """nano-vllm#67 and tiny-llm#46: after a prompt of six come 6, 7, 8, each once."""
    cache, one, other = new_cache(kind), sequence(0, [1] * 6), sequence(1, [2] * 4)
    for s in (one, other):
        cache.memory.begin(s)
    forward(MODELS[3], cache, [work_of(cache, one, 6)])
    seen = []
    for start in range(3):
        one.tokens.append(1)
        cache.load([work_of(cache, one, 1), *([work_of(cache, other, 4)] if start == 1 else [])])
        run = cache.frame.positions_1T[0].tolist()
        one.computed += 1
        seen.append(run)
    assert seen == [[6], [7, 0, 1, 2, 3], [8]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token_and_one_that_fills_a_page_and_one(kind):
    """pytorch#159247: five keys in pages of four."""
    model, cache = MODELS[3], new_cache(kind)
    live = [sequence(0, [7]), sequence(1, [1, 2, 3, 4, 5])]
    for s in live:
        cache.memory.begin(s)
    check(model, forward(model, cache, [work_of(cache, s, len(s.tokens)) for s in live]))
    for s in live:
        s.tokens.append(9)
    check(model, forward(model, cache, [work_of(cache, s, 1) for s in live]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("G", [1, 3])
def test_attention_in_fp64_equals_the_definition_to_its_rounding(kind, G):
    """Without the model's fp32: random q, k, v; three sequences, out of order in the pool."""
    config, torch_rng = SMALL[G], torch.Generator().manual_seed(G)
    cache = new_cache(kind, config)
    K, N, H = config.K, config.N, config.H
    live = [sequence(i, [i] * LONGEST) for i in range(4)]
    for s in live:
        cache.memory.begin(s)
    cache.memory.release(live.pop(1))  # its row and its pages are free, between the others
    history = {s.id: (torch.empty(0, K, H).double(),) * 2 for s in live}
    for counts in ((1, 5, 3), (4, 1, 1), (1, 1, 1), (1, 0, 7), (2, 1, 1), (0, 0, 1)):
        pairs = zip(live, counts, strict=True)
        work = sorted((work_of(cache, s, n) for s, n in pairs if n), key=lambda w: w.count > 1)
        T = sum(w.count for w in work)
        q_1TNH, k_1TKH, v_1TKH = (
            torch.randn(1, T, heads, H, dtype=torch.float64, generator=torch_rng)
            for heads in (N, K, K)
        )
        cache.load(work)
        out_1TNH = cache.attend(1, q_1TNH, k_1TKH, v_1TKH)
        start = 0
        for w in work:
            rows = slice(start, start + w.count)
            start += w.count
            k_SKH, v_SKH = (
                torch.cat([old, new[0, rows]])
                for old, new in zip(history[w.sequence.id], (k_1TKH, v_1TKH), strict=True)
            )
            history[w.sequence.id] = k_SKH, v_SKH
            w.sequence.computed += w.count
            want = attention_by_hand(q_1TNH[:, rows], k_SKH[None], v_SKH[None])
            torch.testing.assert_close(out_1TNH[:, rows], want, rtol=0, atol=1e-12)
    assert cache.k_LMPKH[0].isnan().sum() >= cache.k_LMPKH[0].numel() // 2  # another layer


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_whose_numbers_broke_leaves_no_trace(kind):
    """NaN that one tenant wrote: 0 times NaN is NaN, and a mask alone lets it through."""
    model, cache = MODELS[3], new_cache(kind, rows=1)
    broken, one = sequence(0, [1] * 20), sequence(1, [1, 2])
    cache.memory.begin(broken)
    work_of(cache, broken, 20)
    cache.k_LMPKH.fill_(torch.nan)
    cache.v_LMPKH.fill_(torch.nan)
    cache.memory.release(broken)
    cache.memory.begin(one)
    check(model, forward(model, cache, [work_of(cache, one, 1)]))
    check(model, forward(model, cache, [work_of(cache, one, 1)]))


def test_a_row_is_copied_to_a_fork_before_its_next_tenant_wipes_it():
    """The parent ends right after the fork, and its row is rented again in the same step."""
    model, cache = MODELS[3], new_cache("slots", rows=2)
    one = sequence(0, [5, 6, 7], samples=2)
    cache.memory.begin(one)
    forward(model, cache, [work_of(cache, one, 3)])
    (child,), one.followers = one.followers, []
    cache.memory.fork(one, child)
    child.computed = 3
    cache.memory.release(one)
    late = sequence(9, [1, 2])
    cache.memory.begin(late)
    assert cache.memory.table(late) == [0]
    child.tokens.append(8)
    check(model, forward(model, cache, [work_of(cache, child, 1), work_of(cache, late, 2)]))


@pytest.fixture(params=["slots", 4])
def loaded(request):
    cache, one = new_cache(request.param), sequence(0, [1, 2, 3])
    cache.memory.begin(one)
    cache.load([work_of(cache, one, 3)])
    return cache


@pytest.mark.parametrize("shape", [(1, 2), (3, 1), (1, 4)])
def test_tokens_of_another_shape_than_announced_are_refused(loaded, shape):
    with pytest.raises(ShapeError, match=r"load\(\) announced a run of \(1, 3\)"):
        MODELS[3](torch.ones(shape, dtype=torch.long), loaded)


def test_tokens_that_nobody_announced_are_refused():
    with pytest.raises(ShapeError, match=r"announced a run of \(1, 0\)"):
        MODELS[3](torch.ones(1, 2, dtype=torch.long), new_cache(4))


def test_a_model_of_another_dtype_is_refused(loaded):
    model = Transformer.random(SMALL[3])
    with pytest.raises(TensorMismatch, match=r"float32 .* the pool is torch.float64.*dtype=model"):
        model(torch.tensor([[1, 2, 3]]), loaded)


def test_keys_on_another_device_are_refused(loaded):
    k = torch.empty(1, 3, 2, 8, dtype=torch.float64, device="meta")
    with pytest.raises(TensorMismatch, match=r"on meta but the pool is torch\.float64 on cpu"):
        loaded.attend(0, k, k, k)


def test_a_model_of_another_shape_is_refused(loaded):
    other = Transformer.random(Config(D=24, F=32, K=3, G=1, H=4, L=2, V=53), dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"\(K, H\)=\(3, 4\) but the pool has \(2, 8\)"):
        other(torch.tensor([[1, 2, 3]]), loaded)


def test_work_in_the_wrong_order_or_without_tokens_is_refused():
    cache, one, other = new_cache(4), sequence(0, [1, 2, 3]), sequence(1, [1, 2, 3])
    for s in (one, other):
        cache.memory.begin(s)
    long, short = work_of(cache, one, 3), work_of(cache, other, 1)
    with pytest.raises(ValueError, match="work of one token first, longer work after it"):
        cache.load([long, short])
    with pytest.raises(ValueError, match="leave out empty work"):
        cache.load([Work(one, 3, 0)])


@pytest.mark.parametrize("kind", ["slots", 4])
def test_work_that_has_no_room_is_refused(kind):
    cache, one = new_cache(kind), sequence(0, [1] * (LONGEST + 1))
    cache.memory.begin(one)
    with pytest.raises(ValueError, match=r"sequence 0 has room for .*grow\(\) its memory first"):
        cache.load([Work(one, 0, LONGEST + 1)])
