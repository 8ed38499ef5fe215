"""The serving engine on the reference model: schedulers, memory, prefixes and peers, in one run.

    python benchmarks/serving.py [section ...] [--again] [--quick] [--out FILE]

Sections, with their minutes on two cores: scheduling 6, budgets 5, load 1, memory 3, prefix 1,
samples 1, peers 5. Each is written to benchmarks/results/serving.json when it is done, and a second
run goes on where the first was stopped; --again measures anew. --quick goes through it all with
little traffic, to see that it works, and writes no record.

Texts end where the trace says (`EndsAfter`), which no scheduler knows; prompts are pieces of the
course's English. fp32, greedy. Everybody serves the same requests.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from lecture_util.model import weights
from lecture_util.model.text import english
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.accounting import kv_bytes_per_token
from lecture_util.roofline.hardware import processor
from lecture_util.serving.blocks import Blocks
from lecture_util.serving.contiguous import Regions
from lecture_util.serving.engine import Engine
from lecture_util.serving.loop import Loop
from lecture_util.serving.metrics import Stats, stats
from lecture_util.serving.paging import PagedCache, Pages
from lecture_util.serving.request import Completion, Params, Request
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.simulate import FittedStep, simulator
from lecture_util.serving.slots import SlotCache, Slots
from lecture_util.serving.static_batching import StaticScheduler, static_server
from lecture_util.serving.trace import Lengths, make_trace

RECORD = Path(__file__).parent / "results" / "serving.json"
PROMPTS, NEWS = Lengths(128, 0.8, 16, 512), Lengths(48, 1.0, 4, 384)
CAPACITY = PROMPTS.most + NEWS.most  # what a contiguous row must have room for
SLOTS, PAGE = 16, 16
QUICK = False


@cache
def model() -> Transformer:
    return weights.load("smollm2-135m", device="cpu")


@cache
def words() -> list[int]:
    return weights.load_tokenizer("smollm2-135m").encode(english()[:400_000])


@cache
def peer():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        weights.locate("smollm2-135m"), dtype=torch.float32
    ).eval()


def traffic(count: int, rate_per_s: float | None, seed: int = 0, **lengths) -> list[Request]:
    sizes = {"prompt_tokens": PROMPTS, "new_tokens": NEWS} | lengths
    if QUICK:
        count = min(count, 6)
        sizes = {k: replace(v, median=8, least=2, most=12) for k, v in sizes.items()}
    return make_trace(count, rate_per_s=rate_per_s, tokens=words(), seed=seed, **sizes)


def paged(slots: int = SLOTS, pages: int = SLOTS * CAPACITY // PAGE, **policy) -> Engine:
    page_cache = PagedCache(model().config, pages, PAGE)
    return Engine(model(), page_cache, Policy(slots=slots, **policy))


def row(name: str, run: Stats, **more) -> dict:
    numbers = asdict(run)
    return {"name": name, **more, **numbers}


def agree(runs: Sequence[Sequence[Completion]]) -> float:
    """Share of requests whose tokens are the same in all runs."""
    return float(
        np.mean([len({tuple(c.tokens) for c in cs}) == 1 for cs in zip(*runs, strict=True)])
    )


def scheduling() -> dict:
    """Static, and continuous in three ways, on a queue that never runs dry."""
    paged().generate([words()[:64]], Params(4))  # the first forwards of a process are slow
    trace, rows, runs, loops = traffic(64, 4.0), [], [], {}
    whole = {"chunked": False, "token_budget": 1024}
    contenders = {
        "static": lambda: static_server(model(), SLOTS, CAPACITY),
        "continuous, contiguous": lambda: contiguous().loop,
        "continuous, whole prompts": lambda: paged(**whole).loop,
        "continuous, paged": lambda: paged().loop,
    }
    for name, new_loop in contenders.items():
        loop = loops[name] = new_loop()
        runs.append(loop.serve(trace, progress=True))
        rows.append(row(name, stats(runs[-1], loop.iterations, SLOTS), slots=SLOTS))
        print(f"  {name}: {rows[-1]['tokens_per_s']:.1f} tokens/s")
    return {
        "scheduling": rows,
        "same_tokens": agree(runs),
        "simulator": checked(trace, loops, rows),
    }


def contiguous(rows: int = SLOTS) -> Engine:
    return Engine(model(), SlotCache(model().config, rows, CAPACITY), Policy(slots=rows))


def checked(trace: Sequence[Request], loops: dict[str, Loop], rows: Sequence[dict]) -> dict:
    """The step time fitted to every second forward, held against the others, and whole runs."""
    forwards = [i for loop in loops.values() for i in loop.iterations]
    fitted = FittedStep.fit(forwards[::2])
    errors = [abs(fitted(i.parts) / i.seconds - 1) for i in forwards[1::2]]
    compared = []
    for measured in rows:
        name = measured["name"]
        kind = {"scheduler": StaticScheduler} if name == "static" else {}
        loop = simulator(_memory(name), loops[name].scheduler.policy, fitted, **kind)
        run = stats(loop.serve(trace), loop.iterations, SLOTS)
        compared.append(
            {
                "name": name,
                "measured_tokens_per_s": measured["tokens_per_s"],
                "simulated_tokens_per_s": run.tokens_per_s,
                "measured_ttft_p50": measured["ttft"]["p50"],
                "simulated_ttft_p50": run.ttft.p50,
            }
        )
    return {
        "weights": fitted.weights,
        "step_error_p50": float(np.percentile(errors, 50)),
        "step_error_p90": float(np.percentile(errors, 90)),
        "rows": compared,
    }


def _memory(name: str):
    if name in ("static", "continuous, contiguous"):
        return Slots(SLOTS, CAPACITY)
    return Pages(Blocks(SLOTS * CAPACITY // PAGE, PAGE))


def budgets() -> dict:
    """Long prompts among running texts: what a forward's budget does to both waits."""
    long, short = Lengths(256, 0.6, 64, 768), Lengths(32, 0.5, 8, 96)
    trace = traffic(32, 1.0, 1, prompt_tokens=long, new_tokens=short)
    rows = []
    for settings in (
        {"token_budget": 32}, {"token_budget": 64}, {"token_budget": 128}, {"token_budget": 256},
        {"token_budget": 512}, {"token_budget": 1024, "chunked": False},
    ):  # fmt: skip
        engine = paged(**settings)
        completions = engine.serve(trace, progress=True)
        pauses = [
            float(gap) for c in completions for gap in np.diff(c.token_times_s)
        ]  # between two tokens of one text
        rows.append(
            {"chunked": True, **settings, "pause_p99": float(np.percentile(pauses, 99)),
             "pause_max": max(pauses), **asdict(engine.stats)}
        )  # fmt: skip
    return {"budgets": rows}


def load() -> dict:
    """Waits against arrival rate, by the simulator, with the step time of `scheduling`."""
    fitted = FittedStep(tuple(read()["simulator"]["weights"]))
    rows = []
    for rate in (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0):
        trace = traffic(600, rate, 2)
        for policy, kind in (("static", {"scheduler": StaticScheduler}), ("continuous", {})):
            memory = Slots(SLOTS, CAPACITY) if kind else _memory("paged")
            loop = simulator(memory, Policy(slots=SLOTS), fitted, **kind)
            run = stats(loop.serve(trace), loop.iterations, SLOTS)
            rows.append(
                {"policy": policy, "rate_per_s": rate, "source": "simulated", **asdict(run)}
            )
    return {"load": rows}


def memory() -> dict:
    """As many sequences as fit in the same bytes; and where the bytes are, by allocator."""
    rows, trace = 6, traffic(96, None, 3)
    tokens = rows * CAPACITY
    fixed, pages = contiguous(rows), paged(64, tokens // PAGE)
    runs = [engine.serve(trace, progress=True) for engine in (fixed, pages)]
    record = {
        "bytes": tokens * kv_bytes_per_token(model().config, 4),
        "contiguous_running": _running(fixed.loop),
        "paged_running": _running(pages.loop),
        "same_tokens": agree(runs),
        "contiguous": row("contiguous", fixed.stats),
        "paged": row("paged", pages.stats),
        "waste": [],
    }
    policy = Policy(slots=256, token_budget=512)
    for reserve in ("max", "pow2", "oracle"):
        regions = Regions(tokens, reserve)
        record["waste"].append({"name": reserve, **_shares(regions, policy, trace)})
    for size in (1, 4, 8, 16, 32, 64, 128):
        memory = Pages(Blocks(tokens // size, size, prefix_caching=False))
        record["waste"].append({"name": f"paged {size}", **_shares(memory, policy, trace)})
    return {"memory": record}


def _running(loop: Loop) -> dict:
    """Sequences running while others waited, which is when there was no room for more."""
    full = [i for i in loop.iterations if i.waiting] or loop.iterations
    seconds = sum(i.seconds for i in full)
    return {
        "mean": sum(i.running * i.seconds for i in full) / seconds,
        "most": max(i.running for i in full),
    }


def _shares(memory, policy: Policy, trace: Sequence[Request]) -> dict:
    """Shares of the memory while somebody waits for it, forward by forward."""
    loop = simulator(memory, policy)
    shares = []
    for request in trace:
        loop.submit(request)
    while loop.busy:
        loop.step()
        shares.append((loop.iterations[-1].waiting > 0, _share(memory)))
    full = [share for waited, share in shares if waited] or [share for _, share in shares]
    mean = np.mean(full, axis=0)
    return dict(zip(("stored", "reserved", "internal", "external"), map(float, mean), strict=True))


def _share(memory) -> tuple[float, ...]:
    if isinstance(memory, Regions):
        waste, total = memory.waste(), memory.total_tokens
        return tuple(
            part / total for part in (waste.stored, waste.reserved, waste.internal, waste.external)
        )
    stored, lent = memory.held()
    total = memory.blocks.num_pages * memory.blocks.page_size
    return stored / total, 0.0, (lent - stored) / total, 1 - lent / total


def prefix() -> dict:
    """Time to first token of questions that share a long beginning, one at a time."""
    shared, questions = (512, 8) if not QUICK else (40, 3)
    beginning = words()[1000 : 1000 + shared]
    times = {}
    for caching in (False, True):
        page_cache = PagedCache(model().config, 128, PAGE, prefix_caching=caching)
        engine = Engine(model(), page_cache, Policy(slots=4, token_budget=1024))
        ttfts, texts = [], []
        for i in range(questions + 1):
            prompt = beginning + words()[5000 + 24 * i : 5000 + 24 * i + 16]
            (done,) = engine.generate([prompt], Params(4))
            ttfts.append(done.ttft_s)
            texts.append(done.tokens)
        times[caching] = (ttfts[1:], texts)
    cold, hit = (float(np.median(times[caching][0])) for caching in (False, True))
    return {
        "prefix": {
            "shared_tokens": shared,
            "question_tokens": 16,
            "cold_ttft_s": cold,
            "hit_ttft_s": hit,
            "same_tokens": times[False][1] == times[True][1],
        }
    }


def samples() -> dict:
    """Several answers to one prompt: pages that they hold together, and would hold apart."""
    count, length = 8, 256 if not QUICK else 20
    held = {}
    for name, asked in (("together", [Params(32, samples=count)]), ("apart", [Params(32)] * count)):
        page_cache = PagedCache(model().config, 256, PAGE, prefix_caching=False)
        engine = Engine(model(), page_cache, Policy(slots=count, token_budget=1024))
        engine.generate([words()[:length]] * len(asked), asked)
        held[name] = max(i.lent for i in engine.loop.iterations)
    token_bytes = kv_bytes_per_token(model().config, 4)
    return {
        "samples": {
            "samples": count, "prompt_tokens": length, "new_tokens": 32,
            "bytes_shared": held["together"] * token_bytes,
            "bytes_apart": held["apart"] * token_bytes,
        }
    }  # fmt: skip


def peers() -> dict:
    """The engine, transformers' continuous batching and its `generate`; budgets known to all."""
    short = [Request(words()[100 * i : 100 * i + 16], Params(32)) for i in range(16)]
    long_tailed = [Request(r.prompt, Params(r.params.stop.count)) for r in traffic(48, None, 4)]
    rows = []
    for name, requests, rounds in (
        ("16 short requests", short, 5),
        ("long-tailed", long_tailed, 1),
    ):
        if QUICK:
            few = [min(4, r.params.max_new_tokens) for r in requests[:4]]
            requests = [Request(r.prompt, Params(n)) for r, n in zip(requests, few, strict=False)]
            rounds = 1
        total = sum(r.params.max_new_tokens for r in requests)
        ways = {"engine": engine_way, "transformers generate_batch": continuous_peer} | {
            f"transformers generate, batches of {b}": partial(static_peer, B=b)
            for b in (8, 16, 32)
            if b <= len(requests)
        }
        for serve in ways.values() if name == "16 short requests" else ():
            with serve(requests[:4]) as go:  # the first forwards of a process are slow
                go()
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):  # in turns, so that a busy moment hits everybody
            for way, serve in ways.items():
                with serve(requests) as go:  # the server is up: its pool of pages is there
                    start = time.perf_counter()
                    go()
                    seconds[way].append(time.perf_counter() - start)
        for way, times in seconds.items():
            median = float(np.median(times))
            rows.append(
                {"name": way, "requests": name, "rounds": rounds, "seconds": median,
                 "new_tokens": total, "tokens_per_s": total / median}
            )  # fmt: skip
            print(f"  {name}, {way}: {rows[-1]['tokens_per_s']:.1f} tokens/s", flush=True)
    return {"peers": rows}


@contextmanager
def engine_way(requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
    """Our engine, with room for all."""
    engine = paged(min(32, len(requests)), _room(requests))

    def go() -> None:
        engine.generate([r.prompt for r in requests], [r.params for r in requests])

    yield go


@contextmanager
def continuous_peer(requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
    """transformers' own continuous batching, each request with its own budget."""
    with peer().continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=_room(requests), max_batch_tokens=256
        ),
    ) as manager:

        def go() -> None:
            wanted = {f"{i}": r.params.max_new_tokens for i, r in enumerate(requests)}
            for i, request in enumerate(requests):
                manager.add_request(request.prompt, f"{i}", request.params.max_new_tokens)
            while wanted:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    made = len(result.generated_tokens)
                    if made != wanted.pop(result.request_id):
                        raise RuntimeError(f"transformers made {made} tokens: {result.error}")

        yield go


@contextmanager
def static_peer(requests: Sequence[Request], B: int) -> Iterator[Callable[[], None]]:
    """Batches of B in order of arrival, padded on the left, each run to its longest budget."""

    def go() -> None:
        for first in range(0, len(requests), B):
            batch = requests[first : first + B]
            longest = max(len(r.prompt) for r in batch)
            pads = [longest - len(r.prompt) for r in batch]
            ids = [[0] * pad + list(r.prompt) for pad, r in zip(pads, batch, strict=True)]
            mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
            peer().generate(
                torch.tensor(ids), attention_mask=torch.tensor(mask), do_sample=False,
                eos_token_id=None, pad_token_id=0,
                max_new_tokens=max(r.params.max_new_tokens for r in batch),
            )  # fmt: skip

    yield go


def _room(requests: Sequence[Request]) -> int:
    """Pages for all of them at once, at their longest."""
    return sum(-(-(len(r.prompt) + r.params.max_new_tokens) // PAGE) for r in requests)


SECTIONS = {f.__name__: f for f in (scheduling, peers, memory, prefix, samples, budgets, load)}


def read(path: Path = RECORD) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rounded(value):
    """Five significant figures: no more is known, and the file stays readable."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return value


def described() -> Iterator[tuple[str, object]]:
    yield "date", date.today().isoformat()
    yield "hardware", f"{processor()}, {torch.get_num_threads()} threads"
    yield "versions", {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    yield "dtype", "fp32"
    yield "trace", {
        "prompt_tokens": asdict(PROMPTS), "new_tokens": asdict(NEWS), "capacity": CAPACITY,
        "slots": SLOTS, "page_size": PAGE,
    }  # fmt: skip


def main() -> None:
    global QUICK, RECORD
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    QUICK = args.quick
    if args.out is not None:
        RECORD = args.out
    elif QUICK:
        raise SystemExit("--quick measures nothing worth keeping: name a file with --out")
    record = read(RECORD) | dict(described())
    for name in args.sections or SECTIONS:
        if name in record and not args.again:
            continue
        print(name, flush=True)
        record |= rounded(SECTIONS[name]())
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
