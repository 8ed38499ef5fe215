"""What CUDA graphs buy a decode step, and what the engine makes of it: random weights, no download.

    python benchmarks/serving_gpu.py            on a GPU: Llama 3 8B's shape in bf16
    python benchmarks/serving_gpu.py --small    anywhere: a tiny model through the same code

A step computes one token for each of B sequences of S tokens, whose keys are random numbers in
pages: plainly, launch by launch, and as a CUDA graph, on the same cache. Their logits are compared
before anything is timed. The prediction is `decode_step`'s, of notebook 03: every byte of weights
and cache is read once, at the bandwidth that a copy reached on this card, and at its data sheet's.

The engine serves requests of mixed lengths, all there at once: prompts in chunks beside decoding.
"""

import argparse
import gc
import math
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from record import RESULTS, today, versions, write
from turns import Wrong, take_turns

from lecture_util.model.config import PUBLISHED, Config
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.accounting import kv_cache_bytes, weight_bytes
from lecture_util.roofline.hardware import ACCELERATORS, Accelerator, this_machine
from lecture_util.roofline.step_time import decode_step
from lecture_util.serving.engine import Engine
from lecture_util.serving.executor import ModelExecutor
from lecture_util.serving.graphs import DecodeGraphs
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import Params, Request, Running
from lecture_util.serving.scheduler import Policy, Work

PAGE = 16
WAYS = {"plain launches": ModelExecutor, "CUDA graphs": DecodeGraphs}
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # of the norm; a wrong page gives about 1
SPARE = 0.94  # of the memory: the rest is for activations, and for what CUDA itself takes


def small(config: Config) -> Config:
    """The same kind of model, tiny: as many queries a KV head, up to 2."""
    G = min(config.G, 2)
    return replace(config, D=48, F=96, K=2, G=G, H=16, L=2, V=101, max_context=128)


def datasheet(name: str, memory_bytes: float) -> Accelerator | None:
    """The published peaks of a card that calls itself so; None where ours are not of this one.

    Ours are of SXM parts where there are several: others have other memory, or PCIe in their name.
    """
    if re.search(r"pcie|laptop|\d+ ?d\b", name.lower()):
        return None
    for key, sheet in ACCELERATORS.items():
        words = key.replace("rtx", "rtx ")
        near = abs(memory_bytes / sheet.memory_bytes - 1) < 0.1
        if near and re.search(rf"\b{words}\b", name.lower()):
            return sheet
    return None


def random_model(config: Config, device: str, dtype: torch.dtype, seed: int = 0) -> Transformer:
    """Made where it is used: 8 billion numbers in fp32 would not fit everywhere."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.fill_(1) if "norm" in name else weight.normal_(0, 0.02, generator=generator)
    return model


def filled(model: Transformer, B: int, S: int, seed: int = 0) -> tuple[PagedCache, list[Work]]:
    """A cache in which B sequences hold S - 1 tokens that nobody computed; the next step's work."""
    config, device = model.config, model.device
    pages = B * -(-S // PAGE)
    cache = PagedCache(config, pages, PAGE, model.dtype, device, prefix_caching=False)
    generator = torch.Generator(device).manual_seed(seed)
    for pool in (cache.k_LMPKH, cache.v_LMPKH):
        pool.normal_(generator=generator)
    texts = torch.randint(config.V, (B, S), generator=torch.Generator().manual_seed(seed)).tolist()
    work = []
    for b, text in enumerate(texts):
        one = Running(b, Request(text[:1], Params(S)), b, 0, text, 0.0)
        if cache.memory.begin(one) is None or not cache.memory.grow(one, S):
            raise AssertionError(f"no room for sequence {b} of {S} tokens in {pages} pages")
        one.computed = S - 1
        work.append(Work(one, S - 1, 1))
    return cache, work


def needed(config: Config, B: int, S: int, memory_bytes: float) -> str | None:
    """Why a step of B sequences in bf16 does not fit a card; None if it does."""
    held = weight_bytes(config) + kv_cache_bytes(config, B, S)
    if held <= SPARE * memory_bytes:
        return None
    return f"{held / 1e9:.0f} GB of weights and cache, of {memory_bytes / 1e9:.0f} that there are"


@torch.inference_mode()
def steps(model, batches, S, rounds, machine, sheet=None) -> Iterator[dict]:
    """Two rows for every batch, plain and with graphs; one that says why, for what is left out."""
    on_gpu = model.device.type == "cuda"
    memory_bytes = torch.cuda.get_device_properties(0).total_memory if on_gpu else math.inf
    for B in batches:
        if reason := needed(model.config, B, S, memory_bytes):
            yield {"B": B, "S": S, "skipped": reason}
            continue
        cache, work = filled(model, B, S)
        ways = {"plain launches": ModelExecutor(model, cache)}
        ways["CUDA graphs"] = DecodeGraphs(model, cache, B)
        calls = {way: partial(each.logits, work, range(B)) for way, each in ways.items()}
        plain, graphs = (call().float() for call in calls.values())
        error = float((graphs - plain).norm() / plain.norm())
        if not error < TOLERANCE[model.dtype]:
            raise Wrong(f"the graphs compute something else at B={B}: logits {error:.2g} off")
        timings = take_turns(calls, rounds, model.device.type)
        predicted = step_s(model, B, S, machine)
        by_sheet = step_s(model, B, S, sheet)
        for way, timing in timings.items():
            yield {
                "way": way, "B": B, "S": S, "error": error, "median_s": timing.median_s,
                "low_s": timing.spread[0], "high_s": timing.spread[1],
                "tokens_per_s": B / timing.median_s,
                "predicted_s": predicted, "ratio": predicted and timing.median_s / predicted,
                "datasheet_s": by_sheet, "datasheet_ratio": by_sheet and timing.median_s / by_sheet,
            }  # fmt: skip
        del cache, work, ways, calls
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def step_s(model: Transformer, B: int, S: int, machine: Accelerator | None) -> float | None:
    """Seconds of a step by notebook 03's model; None where nothing is known of the machine."""
    if machine is None:
        return None
    width = model.dtype.itemsize
    step = decode_step(model.config, B, S, machine, dtype_bytes=width, whole_embedding=False)
    return float(step.latency_s)


def requests(V: int, count: int, prompt: tuple[int, int], new: tuple[int, int], seed: int = 0):
    """Prompts and parameters of mixed lengths, drawn evenly from these ranges."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low, high):
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    lengths = drawn(*prompt)
    prompts = [torch.randint(V, (n,), generator=generator).tolist() for n in lengths]
    return prompts, [Params(n) for n in drawn(*new)]


def throughput(model, slots, budget, count, prompt, new, machine) -> Iterator[dict]:
    """The engine under load: a row without graphs and one with them.

    decode_alone_tokens_per_s  what `decode_step` allows with every slot always decoding
    same_texts                 of the requests, as without graphs; rounding may part the others
    """
    prompts, params = requests(model.config.V, count, prompt, new)
    pages = slots * -(-(prompt[1] + new[1]) // PAGE)
    S = round(sum(prompt) / 2 + sum(new) / 4)  # half of its answer is there on average
    alone_s = step_s(model, slots, S, machine)
    texts = {}
    for way in WAYS:
        cache = PagedCache(
            model.config, pages, PAGE, model.dtype, model.device, prefix_caching=False
        )
        policy = Policy(slots=slots, token_budget=budget)
        engine = Engine(model, cache, policy, graphs=way == "CUDA graphs")
        engine.generate(prompts[:slots], Params(4))  # the first forwards of a process are slow
        engine.reset_stats()
        done = engine.generate(prompts, params)
        for completion in done:
            if completion.error is not None:
                raise completion.error
        found, texts[way] = engine.stats, [c.tokens for c in done]
        same = [a == b for a, b in zip(texts[way], texts["plain launches"], strict=True)]
        yield {
            "way": way, "slots": slots, "token_budget": budget, "requests": found.requests,
            "prompt_tokens": sum(map(len, prompts)), "new_tokens": found.new_tokens,
            "seconds": found.seconds, "tokens_per_s": found.tokens_per_s,
            "ttft_p50_s": found.ttft.p50, "tpot_p50_s": found.tpot.p50,
            "tpot_p99_s": found.tpot.p99, "same_texts": sum(same),
            "decode_alone_tokens_per_s": alone_s and slots / alone_s,
        }  # fmt: skip
        del cache, engine, done
        gc.collect()


def shown_step(row: dict) -> str:
    if "skipped" in row:
        return f"  B={row['B']}, S={row['S']:,}: left out, {row['skipped']}"
    ratios = ""
    if row["ratio"]:
        ratios = f", {row['ratio']:.2f} of the time predicted from this machine's copy"
    if row["datasheet_ratio"]:
        ratios += f", {row['datasheet_ratio']:.2f} by its data sheet"
    return (
        f"  B={row['B']}, S={row['S']:,}, {row['way']:<16}{row['median_s'] * 1e3:>9.2f} ms a step"
        f"{row['tokens_per_s']:>9.0f} tokens/s{ratios}"
    )


def shown_load(row: dict) -> str:
    return (
        f"  {row['requests']} requests in {row['slots']} slots, {row['way']:<16}"
        f"{row['tokens_per_s']:>9.0f} tokens/s, {row['ttft_p50_s']:.2f} s to the first token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model, to check the code")
    parser.add_argument("--shape", choices=sorted(PUBLISHED), default="llama-3-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="where the record goes; a small run keeps none")
    args = parser.parse_args()
    on_gpu, config, sheet = torch.cuda.is_available(), PUBLISHED[args.shape], None
    if args.small:
        config, machine = small(config), None
        args.batches, args.context, args.rounds, load = [1, 3], 19, 1, SMALL_LOAD
        model = random_model(config, "cuda" if on_gpu else "cpu", torch.float32)
        hardware = "a tiny model, whose times mean nothing"
    elif on_gpu:
        machine, load = this_machine("cuda"), LOAD
        sheet, hardware = datasheet(machine.name, machine.memory_bytes), machine.name
        if reason := needed(config, 1, args.context, machine.memory_bytes):
            sys.exit(f"{args.shape} does not fit: {reason}")
        model = random_model(config, "cuda", torch.bfloat16)
    else:
        sys.exit("torch sees no CUDA GPU here: --small runs the same code on a tiny model")
    print(f"{hardware}; {args.shape}, random weights, pages of {PAGE}, {model.dtype}")
    measured, served = [], []
    for row in steps(model, args.batches, args.context, args.rounds, machine, sheet):
        measured.append(row)
        print(shown_step(row), flush=True)
    for row in throughput(model, **load, machine=machine):
        served.append(row)
        print(shown_load(row), flush=True)
    out = args.out or (None if args.small else RESULTS / "serving_gpu.json")
    if out is not None:
        write(out, {
            "date": today(),
            "hardware": f"{platform.machine()}, {hardware}",
            "versions": versions("triton"),
            "small": args.small,
            "shape": args.shape,
            "config": {axis: getattr(config, axis) for axis in "DFKGHLV"},
            "dtype": str(model.dtype).removeprefix("torch."),
            "page_size": PAGE,
            "rounds": args.rounds,
            "bandwidth_bytes_per_s": machine.bandwidth_bytes_per_s if machine else None,
            "steps": measured,
            "load": served,
        })  # fmt: skip
        print(f"wrote {out.name}")


LOAD = dict(slots=64, budget=2048, count=256, prompt=(128, 896), new=(32, 224))
SMALL_LOAD = dict(slots=3, budget=16, count=5, prompt=(3, 20), new=(2, 9))


if __name__ == "__main__":
    main()
