"""What CUDA graphs buy a decode step: our engine at Llama 3 8B's shape, with and without them.

    python benchmarks/serving_gpu.py            on a GPU: random bf16 weights, batches up to 64
    python benchmarks/serving_gpu.py --small    anywhere: a tiny model through the same code

Both engines serve the same prompts from one paged cache, in turns. What they compute is compared
before anything is timed. A time is that of one iteration in which all sequences decode, with
scheduling, launches, and drawing the tokens. The prediction is the accounting's: every byte of
weights and cache read once, at the bandwidth a copy reached on this GPU.
"""

import argparse
import json
import platform
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from statistics import mean

import torch

from lecture_util.model.config import PUBLISHED, Config
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.hardware import ACCELERATORS, this_machine
from lecture_util.roofline.step_time import decode_step
from lecture_util.roofline.timing import Timing
from lecture_util.serving.engine import Engine
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import Params
from lecture_util.serving.scheduler import Policy

OUT = Path(__file__).parent / "results" / "serving_gpu.json"
SMALL = Config(D=48, F=96, K=2, G=2, H=16, L=2, V=101, max_context=128)
PAGE = 16
WAYS = {"plain launches": False, "CUDA graphs": True}
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # of the norm; a wrong page gives about 1


def random_model(config, device, dtype, seed=0):
    """Made where it is used: 8 billion numbers in fp32 would not fit everywhere."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.fill_(1) if "norm" in name else weight.normal_(0, 0.02, generator=generator)
    return model


class Way:
    """An engine, and the logits of its first step in which everybody decodes."""

    def __init__(self, model, cache, B, graphs):
        policy = Policy(slots=B, token_budget=max(B, min(8192, model.config.max_context)))
        self.engine, self.B, self.first = Engine(model, cache, policy, graphs=graphs), B, None
        self.compute = self.engine.loop.executor.logits
        self.engine.loop.executor.logits = self.logits

    def logits(self, flat, drawing):
        logits_BV = self.compute(flat, drawing)
        if self.first is None and len(flat) == self.B and all(w.count == 1 for w in flat):
            self.first = logits_BV.double()
        return logits_BV

    def serve(self, prompts, steps):
        """Seconds and mean context of each iteration in which all B sequences decode."""
        self.first = None
        self.engine.reset_stats()
        done = self.engine.generate(prompts, Params(steps))
        assert all(c.error is None and len(c.tokens) == steps for c in done), done
        return [
            (i.seconds, mean(part.start + 1 for part in i.parts))
            for i in self.engine.loop.iterations
            if len(i.parts) == self.B and all(part.kind == "decode" for part in i.parts)
        ]


def compare(model, B, context, steps, rounds, accelerator):
    """Rows of one batch size: both ways, checked against each other, then timed in turns."""
    config, device = model.config, model.device
    pages = B * -(-(context + steps) // PAGE)
    ways = {
        name: Way(
            model,
            PagedCache(config, pages, PAGE, model.dtype, device, prefix_caching=False),
            B,
            graphs,
        )
        for name, graphs in WAYS.items()
    }
    generator = torch.Generator().manual_seed(B)
    prompts = torch.randint(0, config.V, (B, context), generator=generator).tolist()
    seconds, contexts = defaultdict(list), []
    for turn in range(rounds + 1):
        for name, way in ways.items():
            iterations = way.serve(prompts, steps)
            if turn > 0:  # the first turn warms up
                seconds[name] += [s for s, _ in iterations]
                contexts += [S for _, S in iterations]
        plain, graphs = (way.first for way in ways.values())
        error = float((graphs - plain).norm() / plain.norm())
        if not error < TOLERANCE[model.dtype]:
            sys.exit(
                f"the graphs compute something else at B={B}: their logits are {error:.2g} off"
            )
    S = round(mean(contexts))
    width = model.dtype.itemsize
    expected = decode_step(config, B, S, accelerator, dtype_bytes=width, whole_embedding=False)
    rows = []
    for name in WAYS:
        timing = Timing(tuple(seconds[name]))
        rows.append({
            "way": name, "B": B, "context": S, "steps": len(seconds[name]),
            "median_s": timing.median_s, "low_s": timing.spread[0], "high_s": timing.spread[1],
            "tokens_per_s": B / timing.median_s, "predicted_s": float(expected.latency_s),
            "predicted_tokens_per_s": float(expected.throughput_tokens_per_s), "error": error,
        })  # fmt: skip
    return rows


def show(rows):
    print(f"\nbatch of {rows[0]['B']}, {rows[0]['context']} tokens each")
    for row in rows:
        share = row["predicted_s"] / row["median_s"]
        print(f"  {row['way']:<16}{row['median_s'] * 1e3:>9.2f} ms a step"
              f"{row['tokens_per_s']:>10.0f} tokens/s, {share:.0%} of the prediction of "
              f"{row['predicted_tokens_per_s']:.0f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model, to check the code")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=512, help="tokens of every prompt")
    parser.add_argument("--steps", type=int, default=48, help="new tokens of every prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the record goes; a small run keeps none")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if args.small:
        args.batches, args.context, args.steps, args.rounds = [1, 3], 19, 7, 1
        config, accelerator = SMALL, ACCELERATORS["h100"]
        model = random_model(config, "cuda" if on_gpu else "cpu", torch.float32)
        hardware = "a tiny model, whose times mean nothing"
    elif on_gpu:
        config, accelerator = PUBLISHED["llama-3-8b"], this_machine("cuda")
        model = random_model(config, "cuda", torch.bfloat16)
        hardware = accelerator.name
    else:
        sys.exit("torch sees no CUDA GPU here: --small runs the same code on a tiny model")
    print(f"{hardware}; random weights, pages of {PAGE}, {model.dtype}")
    rows = []
    for B in args.batches:
        rows += compare(model, B, args.context, args.steps, args.rounds, accelerator)
        show(rows[-len(WAYS) :])
    out = args.out or (None if args.small else OUT)
    if out is not None:
        write(out, args, hardware, accelerator, config, model.dtype, rows)


def write(out, args, hardware, accelerator, config, dtype, rows):
    document = {
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()}, {hardware}",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "small": args.small,
        "config": {axis: getattr(config, axis) for axis in "DFKGHLV"},
        "dtype": str(dtype).removeprefix("torch."),
        "page_size": PAGE,
        "prompt_tokens": args.context,
        "new_tokens": args.steps,
        "rounds": args.rounds,
        "bandwidth_bytes_per_s": accelerator.bandwidth_bytes_per_s,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_suffix(".part")
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scratch.replace(out)
    print(f"wrote {out.name}")


if __name__ == "__main__":
    main()
