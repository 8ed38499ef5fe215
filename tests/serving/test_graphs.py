"""Decoding in padded buckets: equal to plain decoding, and nothing that a graph would freeze.

`Tape` stands in for a CUDA graph: it records every operation of a step together with the very
tensors it used, and a replay repeats them into the same outputs. What Python computed meanwhile
is frozen, as in a capture, and outputs are overwritten by the next replay, as there.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lecture_util.model.attention import attend
from lecture_util.model.config import Config
from lecture_util.model.sampling import Sampling
from lecture_util.model.shapes import TensorMismatch
from lecture_util.model.transformer import Transformer
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.engine import Engine
from lecture_util.serving.executor import ModelExecutor
from lecture_util.serving.graphs import (
    LENGTH,
    PLACE,
    POSITION,
    TABLE,
    TOKEN,
    DecodeGraphs,
    buckets,
    can_capture,
)
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import Params, Request, Running
from lecture_util.serving.scheduler import Policy, Work
from lecture_util.serving.slots import SlotCache

TINY = Config(D=24, F=40, K=2, G=3, H=8, L=2, V=61, max_context=96)
CUDA = torch.cuda.is_available()
PAGE = 3


class Tape(TorchDispatchMode):
    """A capture for the CPU, and what was done with it."""

    def __init__(self):
        super().__init__()
        self.captured, self.replayed, self.recording = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            raise RuntimeError("a number was asked for while capturing")
        out = func(*args, **(kwargs or {}))
        self.recording.append((func, args, kwargs or {}, out))
        return out

    def __call__(self, step):
        step()  # warm up
        with self:
            logits_BV = step()
        operations, self.recording = self.recording, []
        B = len(logits_BV)
        self.captured.append(B)

        def replay():
            self.replayed.append(B)
            for func, args, kwargs, out in operations:
                new = func(*args, **kwargs)
                pairs = (
                    zip(out, new, strict=True) if isinstance(out, tuple | list) else [(out, new)]
                )
                for old, fresh in pairs:
                    if not isinstance(old, torch.Tensor):  # Python used it up while recording
                        continue
                    if old.data_ptr() != fresh.data_ptr():  # neither a view nor in place
                        old.copy_(fresh)
            return logits_BV

        return replay


class Capturable(PagedCache):
    """Attends as the kernel does: by values on the device and the width of the tables alone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def decode(self, q_BNH, k_MPKH, v_MPKH):
        tables_BJ, lengths_B = self.frame.tables_BJ, self.frame.lengths_B
        self.seen.append((tuple(tables_BJ.shape), tables_BJ.data_ptr()))
        J, P = tables_BJ.shape[1], k_MPKH.shape[1]
        k_BSKH, v_BSKH = (pool[tables_BJ].flatten(1, 2) for pool in (k_MPKH, v_MPKH))
        mask_B1S = (torch.arange(J * P) < lengths_B[:, None])[:, None]
        mixed_BNH = attend(q_BNH[:, None], k_BSKH, v_BSKH, mask_B1S)[:, 0]
        return mixed_BNH.where(lengths_B[:, None, None] > 0, 0)


def tiny(seed=1, dtype=torch.float64, config=TINY, scale=6.0):
    """Weights large enough that one wrong key changes the logits."""
    model = Transformer.random(config, seed=seed, dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(scale)
    return model


def make(kind, model, slots=9, pages=300, page=PAGE):
    """An executor with a cache of its own; `kind` is plain, padded or taped."""
    make_cache = Capturable if kind == "taped" else PagedCache
    cache = make_cache(model.config, pages, page, model.dtype, model.device, prefix_caching=False)
    if kind == "plain":
        return ModelExecutor(model, cache)
    return DecodeGraphs(model, cache, slots, Tape() if kind == "taped" else None)


class Drive:
    """Sequences whose next tokens are given, through one executor."""

    def __init__(self, executor, count, length=60):
        generator = torch.Generator().manual_seed(7)
        V = executor.model.config.V
        self.texts = torch.randint(0, V, (count, length), generator=generator).tolist()
        self.executor = executor
        params = Params(length)
        self.sequences = [
            Running(i, Request(t[:1], params), i, 0, t[:1], 0.0) for i, t in enumerate(self.texts)
        ]
        for one in self.sequences:
            executor.cache.memory.begin(one)

    @torch.inference_mode()
    def step(self, counts):
        """Compute the next counts[i] tokens of sequence i, as the loop would. -> logits_BV."""
        flat = []
        for i, count in sorted(counts.items(), key=lambda item: item[1] > 1):
            one = self.sequences[i]
            one.tokens = self.texts[i][: one.computed + count]
            assert self.executor.cache.memory.grow(one, one.computed + count)
            flat.append(Work(one, one.computed, count))
        logits_BV = self.executor.logits(flat, range(len(flat)))
        for w in flat:
            w.sequence.computed += w.count
        return logits_BV


def schedule():
    """Prompts of 1 to 9 tokens, then batches of every size up to 9, of sequences that change."""
    generator = torch.Generator().manual_seed(3)
    yield {i: i + 1 for i in range(9)}
    for size in (9, 8, 5, 1, 2, 9, 3, 4, 6, 7, 8, 1, 9, 5, 7, 2, 6):
        yield dict.fromkeys(sorted(torch.randperm(9, generator=generator)[:size].tolist()), 1)


@pytest.mark.parametrize("kind", ["padded", "taped"])
def test_logits_equal_plain_decoding_for_batches_of_one_to_nine(kind):
    model = tiny()
    plain, graphs = (Drive(make(k, model), 9) for k in ("plain", kind))
    for counts in schedule():
        expected, found = plain.step(counts), graphs.step(counts)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    # And the same keys lie in the same places; only the page of nobody may differ.
    for pool in ("k_LMPKH", "v_LMPKH"):
        ours, theirs = (getattr(d.executor.cache, pool)[:, :-1] for d in (graphs, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_each_decoding_batch_replays_the_next_bucket_and_nothing_else_does():
    executor = make("taped", tiny())
    played = []
    executor.replays = {B: spy(B, replay, played) for B, replay in executor.replays.items()}
    drive = Drive(executor, 9)
    sizes = []
    for counts in schedule():
        drive.step(counts)
        sizes.append(len(counts))
    assert played == [min(B for B in (1, 2, 4, 8, 9) if size <= B) for size in sizes[1:]]
    drive.step({0: 1, 1: 2})  # decoding beside a chunk of a prompt
    assert len(played) == len(sizes) - 1


def spy(B, replay, played):
    def spied():
        played.append(B)
        return replay()

    return spied


def test_graphs_are_captured_once_the_largest_first():
    tape, model = Tape(), tiny()
    cache = Capturable(TINY, 40, PAGE, torch.float64)
    executor = DecodeGraphs(model, cache, 6, tape)
    assert tape.captured == [6, 4, 2, 1]
    drive = Drive(executor, 6)
    drive.step(dict.fromkeys(range(6), 2))
    for size in (3, 6, 3, 1):
        drive.step(dict.fromkeys(range(size), 1))
    assert tape.captured == [6, 4, 2, 1] and tape.replayed == [4, 6, 4, 1]


def test_capturing_writes_to_no_page_that_could_be_lent():
    cache = Capturable(TINY, 5, PAGE, torch.float64)
    cache.k_LMPKH.fill_(3.0), cache.v_LMPKH.fill_(4.0)
    DecodeGraphs(tiny(), cache, 4, Tape())
    assert (cache.k_LMPKH[:, :-1] == 3).all() and (cache.v_LMPKH[:, :-1] == 4).all()
    assert (cache.k_LMPKH[:, -1, 0] != 3).all()  # it did run


def test_padded_rows_are_empty_sequences_whoever_had_the_row_before():
    executor = make("padded", tiny(), slots=8)
    mixed = []
    attend_paged = executor.cache.decode
    executor.cache.decode = lambda *qkv: mixed.append(attend_paged(*qkv)) or mixed[-1]
    drive = Drive(executor, 8)
    drive.step(dict.fromkeys(range(8), 5))
    drive.step(dict.fromkeys(range(8), 1))
    mixed.clear()
    pools = [pool.clone() for pool in (executor.cache.k_LMPKH, executor.cache.v_LMPKH)]
    drive.step(dict.fromkeys(range(5), 1))
    pages = sorted(executor.cache.memory.table(one)[6 // PAGE] for one in drive.sequences[:5])
    assert len(mixed) == TINY.L
    for out_BNH in mixed:
        assert out_BNH.shape[0] == 8 and (out_BNH[5:] == 0).all() and (out_BNH[:5] != 0).all()
    bin_place = 300 * PAGE
    assert executor.rows[5:, :TABLE].tolist() == [[0, 0, bin_place, 0]] * 3
    for before, after in zip(pools, (executor.cache.k_LMPKH, executor.cache.v_LMPKH), strict=True):
        changed = (before != after).any(-1).any(-1).any(0)[:-1]
        assert changed.nonzero().tolist() == [[page, 6 % PAGE] for page in pages]


def test_a_row_of_the_buffer_says_where_its_token_goes_and_what_it_sees():
    executor = make("padded", tiny(), slots=2)
    drive = Drive(executor, 2)
    drive.step({0: 4, 1: 7})
    drive.step({0: 1, 1: 1})
    for b, position in enumerate((4, 7)):
        row, table = executor.rows[b].tolist(), executor.cache.memory.table(drive.sequences[b])
        assert row[TOKEN] == drive.texts[b][position] and row[POSITION] == position
        assert row[LENGTH] == position + 1 and row[TABLE : TABLE + len(table)] == table
        assert row[PLACE] == table[position // PAGE] * PAGE + position % PAGE


def test_graphs_captured_on_nothing_are_right_as_contexts_grow_to_the_models_limit():
    model = tiny()
    plain, graphs = (Drive(make(k, model, slots=3), 3, length=96) for k in ("plain", "taped"))
    for counts in ({0: 1, 1: 1, 2: 1}, *[{0: 1, 1: 1, 2: 1}, {0: 1, 2: 1}, {1: 1}] * 31):
        torch.testing.assert_close(graphs.step(counts), plain.step(counts), rtol=1e-9, atol=1e-9)
    assert graphs.sequences[0].computed == 63
    for counts in ({0: 32}, {0: 1}):  # to the last position of the context
        torch.testing.assert_close(graphs.step(counts), plain.step(counts), rtol=1e-9, atol=1e-9)
    assert graphs.sequences[0].computed == TINY.max_context


def test_every_step_reads_tables_of_one_width_in_one_place():
    cache = Capturable(TINY, 100, PAGE, torch.float64, prefix_caching=False)
    executor = DecodeGraphs(tiny(), cache, 4)
    drive = Drive(executor, 4)
    drive.step(dict.fromkeys(range(4), 2))
    cache.seen.clear()
    for size in (1, 3, 4, 2) * 8:
        drive.step(dict.fromkeys(range(size), 1))
    width = TINY.max_context // PAGE
    assert {shape for shape, _ in cache.seen} == {(B, width) for B in (1, 2, 4)}
    assert {place for _, place in cache.seen} == {executor.rows[:, TABLE:].data_ptr()}


def test_tables_are_as_wide_as_the_pool_where_that_is_less_than_the_context():
    assert make("padded", tiny(), pages=7).width == 7
    assert make("padded", tiny(), pages=33).width == 32


def test_the_first_output_stays_when_a_graph_is_replayed():
    drive = Drive(make("taped", tiny(), slots=4), 4)
    drive.step(dict.fromkeys(range(4), 3))
    first = drive.step(dict.fromkeys(range(4), 1))
    kept = first.clone()
    second = drive.step(dict.fromkeys(range(4), 1))
    assert not torch.equal(second, kept)
    assert torch.equal(first, kept)


def test_the_step_of_a_cpu_reads_lengths_so_a_capture_of_it_would_freeze_them():
    """Why the stand-in above attends in its own way: the tape does find what is frozen."""
    model = tiny()
    cache = PagedCache(TINY, 60, PAGE, torch.float64, prefix_caching=False)
    frozen = Drive(DecodeGraphs(model, cache, 1, Tape()), 1)
    plain = Drive(make("plain", model), 1)
    for drive in (plain, frozen):
        drive.step({0: 5})
    assert not torch.allclose(frozen.step({0: 1}), plain.step({0: 1}), rtol=1e-3)


def test_batch_sizes_double_up_to_the_number_of_slots():
    assert [buckets(n) for n in (1, 2, 3, 8, 9)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9],
    ]  # fmt: skip
    for slots in range(1, 70):
        found = buckets(slots)
        assert found[-1] == slots and found == sorted(set(found))
        for B in range(1, slots + 1):
            assert min(b for b in found if b >= B) < 2 * B


# Through the engine.


def serve(model, graphs, prompts, params, slots=4, pages=40, budget=16, **options):
    policy = Policy(slots=slots, token_budget=budget)
    cache = PagedCache(model.config, pages, PAGE, model.dtype, model.device, **options)
    engine = Engine(model, cache, policy, VirtualClock(), graphs=graphs)
    kind = DecodeGraphs if graphs else ModelExecutor
    assert type(engine.loop.executor) is kind
    done = engine.generate(prompts, params)
    assert cache.blocks.available == pages
    return engine, [(c.tokens, c.reason) for c in done]


def prompts(count, V=61, least=1, most=11):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(least, most + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, V, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("pages", [9, 40])
def test_the_engine_says_the_same_with_and_without_graphs(pages):
    model, texts = tiny(), prompts(11)
    params = [Params(3 + 2 * i % 13, Sampling(0.8), seed=i) for i in range(11)]
    plain, expected = serve(model, False, texts, params, pages=pages)
    graphs, found = serve(model, True, texts, params, pages=pages)
    assert found == expected and all(reason == "length" for _, reason in found)
    assert (plain.stats.preemptions > 0) == (pages == 9)
    assert graphs.stats.preemptions == plain.stats.preemptions


def test_pages_are_copied_before_a_graph_writes_to_them():
    model, texts = tiny(), prompts(3, least=4)
    params = Params(8, Sampling(1.0), seed=3, samples=4)
    _, expected = serve(model, False, texts, params)
    _, found = serve(model, True, texts, params)
    assert found == expected and len({tuple(t) for t, _ in found}) > 3


def test_a_prompts_last_but_one_token_alone_draws_nothing():
    model, texts = tiny(), prompts(4, least=6)
    _, expected = serve(model, False, texts, Params(6), slots=2, budget=2)
    _, found = serve(model, True, texts, Params(6), slots=2, budget=2)
    assert found == expected


def test_only_the_rows_that_draw_have_logits():
    drives = [Drive(make(kind, tiny()), 3) for kind in ("plain", "padded")]
    found = []
    for drive in drives:
        drive.step(dict.fromkeys(range(3), 2))
        for one, text in zip(drive.sequences, drive.texts, strict=True):
            one.tokens = text[:3]
            assert drive.executor.cache.memory.grow(one, 3)
        with torch.inference_mode():
            flat = [Work(one, 2, 1) for one in drive.sequences]
            found.append(drive.executor.logits(flat, [2, 1]))
    assert found[0].shape == (2, TINY.V)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_graphs_are_for_gpus_unless_asked_for():
    model = tiny()
    engine = Engine(model, PagedCache(TINY, 40, PAGE, torch.float64), Policy(4, 16))
    assert type(engine.loop.executor) is ModelExecutor
    assert not can_capture(model, engine.cache)


def test_what_cannot_be_a_graph_is_refused():
    model, policy = tiny(), Policy(slots=2, token_budget=8)
    cache = SlotCache(TINY, 2, 96, torch.float64)
    with pytest.raises(TypeError, match=r"SlotCache.*PagedCache.*graphs=False"):
        Engine(model, cache, policy, graphs=True)
    paged = PagedCache(TINY, 40, PAGE, torch.float64)
    for slots in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=r"slots=.*at least 1"):
            DecodeGraphs(model, paged, slots)


# On a GPU.

gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


def on_gpu(kind, slots=9, dtype=torch.float32):
    config = Config(D=64, F=96, K=2, G=2, H=32, L=3, V=131, max_context=2048)
    model = tiny(dtype=dtype, config=config, scale=2.0).cuda()
    return make("padded" if kind == "graphs" else "plain", model, slots, 600, 16)


class TestOnGpu:
    pytestmark = gpu

    def test_replayed_logits_equal_plain_decoding(self):
        plain, graphs = (Drive(on_gpu(kind), 9) for kind in ("plain", "graphs"))
        for counts in schedule():
            torch.testing.assert_close(
                graphs.step(counts), plain.step(counts), rtol=1e-3, atol=1e-3
            )

    def test_a_graph_captured_on_nothing_is_right_past_every_threshold(self):
        plain, graphs = (Drive(on_gpu(kind, 2), 2, 1900) for kind in ("plain", "graphs"))
        for count in (1, 1, 14, 1, 1, 240, 1, 1, 255, 1, 1, 511, 1, 800, 1, 1):
            counts = {0: count, 1: 1}
            torch.testing.assert_close(
                graphs.step(counts), plain.step(counts), rtol=1e-3, atol=1e-3
            )

    def test_the_first_output_stays_when_a_graph_is_replayed(self):
        drive = Drive(on_gpu("graphs", 4), 4)
        drive.step(dict.fromkeys(range(4), 3))
        first = drive.step(dict.fromkeys(range(4), 1))
        kept = first.clone()
        second = drive.step(dict.fromkeys(range(4), 1))
        torch.cuda.synchronize()
        assert torch.equal(first, kept) and not torch.equal(second, kept)

    def test_the_engine_uses_graphs_and_a_double_model_is_refused(self):
        model = on_gpu("plain", dtype=torch.bfloat16).model
        engine = Engine(model, policy=Policy(slots=4, token_budget=64))
        assert type(engine.loop.executor) is DecodeGraphs
        done = engine.generate(prompts(7), Params(9))
        assert [len(c.tokens) for c in done] == [9] * 7
        double = model.double()
        cache = PagedCache(double.config, 20, 16, torch.float64, "cuda")
        assert not can_capture(double, cache)
        with pytest.raises(TensorMismatch, match=r"float64.*graphs=False"):
            DecodeGraphs(double, cache, 4)


# The benchmark.

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving_gpu.py"


def benchmark(monkeypatch, *arguments):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    return runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_benchmark_checks_and_times_both_ways_on_a_tiny_model(monkeypatch, tmp_path):
    out = tmp_path / "record.json"
    benchmark(monkeypatch, "--small", "--out", out)
    record = json.loads(out.read_text())
    assert record["small"] and len(record["date"]) == 10
    ways = [(row["B"], row["way"]) for row in record["steps"]]
    assert ways == [(B, way) for B in (1, 3) for way in ("plain launches", "CUDA graphs")]
    for row in record["steps"]:
        assert row["error"] < 1e-4 and row["S"] == 19
        assert row["tokens_per_s"] == pytest.approx(row["B"] / row["median_s"])
    assert [row["same_texts"] for row in record["load"]] == [5, 5]


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_the_benchmark_wants_a_gpu_or_says_how_to_do_without(monkeypatch):
    with pytest.raises(SystemExit, match="no CUDA GPU here: --small"):
        benchmark(monkeypatch)
