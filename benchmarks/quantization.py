"""The table that matters: the reference model by every method, in bits, bytes, quality and speed.

    python benchmarks/quantization.py                       all, into results/quantization.json
    python benchmarks/quantization.py --speeds              renew the decode speeds alone
    python benchmarks/quantization.py --no-speeds --rows "AWQ int4 g48"     or only some rows
    python benchmarks/quantization.py --quick               see it run, on six blocks; no record

Perplexity is of 64 windows of Python's reference that neither calibration nor training ever sees
(`english_split`). A layer's error is the norm of its output's error over the output's norm, when it
is given what the original's layer reads. Bytes are of all weights: linear layers as stored, scales
and zero points included; embedding (which is the head) and norms at 16 bits, for fp32 at 32.

What Q4_1 does to the comparison: these weights have been through llama.cpp's Q4_1 once, sixteen
values to each block of 32 neighbours, from a real-valued minimum up. A 4-bit format of just those
blocks would give all of them back and look lossless. So the table's groups are 48, which straddle
the blocks, and 64 (two blocks) for the product that torch has on a CPU; the zero points here are
whole numbers, as a Q4_1 minimum need not be. The fp32 row is that model, not the one before Q4_1.
All methods start from the same weights, and NF4, absmax and zero points keep on them the ratios of
errors that they have on normal numbers. They are stored in bf16, so that bf16 changes no
weight: its layers' errors, which are of weights alone, are 0, and its perplexity is arithmetic's.

Decode speed: greedy, one sequence, one step at a time, a filled cache; rounds go through all
formats in turn, so that a busy machine slows all alike. AWQ has its format's speed.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from lecture_util.model import weights
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.text import english_split, perplexity, windows
from lecture_util.model.transformer import Transformer
from lecture_util.quantization.awq import fold_all, search
from lecture_util.quantization.awq_search import ALPHAS
from lecture_util.quantization.errors import layer_errors, worst
from lecture_util.quantization.group_linear import GroupLinear
from lecture_util.quantization.int4 import Int4Linear
from lecture_util.quantization.linear import (
    QuantizedLinear,
    bits_per_weight,
    bnb_int8,
    bnb_nf4,
    dequantize,
    linear_bytes,
    linear_layers,
    replace_linears,
)
from lecture_util.quantization.llm_int8 import Int8Linear
from lecture_util.quantization.nf4 import NF4Linear
from lecture_util.quantization.salient import keep_channels
from lecture_util.roofline.hardware import processor

RECORD = Path(__file__).parent / "results" / "quantization.json"
HELD, CALIBRATION, T, SEED = 64, 32, 128, 0
ERROR_WINDOWS = 8
CURVES = [f"blocks.{i}.{name}" for i in (0, 14, 29) for name in ("qkv", "out", "gate_up", "down")]
PROMPT, STEPS, ROUNDS, ROUND_S = 32, 16, 5, 2.0


class Int8Weights(Int8Linear):
    """int8 rows, with activations left as they are: what rounding the weights alone costs."""

    forward = QuantizedLinear.forward


class E4M3Linear(QuantizedLinear):
    """One byte a weight, torch.float8_e4m3fn, and one fp32 scale a row: its largest at 448."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias)
        w_FD = linear.weight.detach().float()
        largest = torch.finfo(torch.float8_e4m3fn).max
        scale_F1 = w_FD.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
        codes = (w_FD / scale_F1).clamp(-largest, largest).to(torch.float8_e4m3fn)
        self.register_buffer("codes", codes)
        self.register_buffer("scale_F1", scale_F1)

    def dequantized(self) -> torch.Tensor:
        return self.codes.float() * self.scale_F1


# What a Linear becomes; AWQ and plain rounding share these.
FORMATS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8 weights": Int8Weights.from_linear,
    "int8 W8A8": lambda x: Int8Linear.from_linear(x, threshold=None),
    "LLM.int8": lambda x: Int8Linear.from_linear(x, threshold=6.0),
    "bnb int8": bnb_int8,
    "e4m3 rows": E4M3Linear,
    "NF4": lambda x: NF4Linear.from_linear(x, double=False),
    "NF4 double": lambda x: NF4Linear.from_linear(x, double=True),
    "bnb NF4": bnb_nf4,
    "int4 g48": lambda x: Int4Linear.from_linear(x, group_size=48),
    "int4 g64": lambda x: Int4Linear.from_linear(x, group_size=64),
    "int3 g48": lambda x: GroupLinear.from_linear(x, 3, 48),
}
# The table's rows: name, format, bits and group size that AWQ searches for, if it does.
ROWS = [
    ("fp32", None, None),
    ("bf16", None, None),
    ("int8 rows, weights only", "int8 weights", None),
    ("int8 rows, W8A8 absmax", "int8 W8A8", None),
    ("LLM.int8, threshold 6", "LLM.int8", None),
    ("bitsandbytes int8, threshold 6", "bnb int8", None),
    ("e4m3 rows", "e4m3 rows", None),
    ("NF4, blocks of 64", "NF4", None),
    ("NF4, double quantized", "NF4 double", None),
    ("bitsandbytes NF4", "bnb NF4", None),
    ("RTN int4 g48", "int4 g48", None),
    ("AWQ int4 g48", "int4 g48", (4, 48)),
    ("RTN int4 g64", "int4 g64", None),
    ("AWQ int4 g64", "int4 g64", (4, 64)),
    ("RTN int3 g48", "int3 g48", None),
    ("AWQ int3 g48", "int3 g48", (3, 48)),
]
PICTURED, CLIPPED = "AWQ int3 g48", "scaled and clipped (AWQ)"  # the lecture's picture
KEPT = 0.01  # share of the channels that it leaves alone


def weight_bytes(model: Transformer, other_bytes: int = 2) -> int:
    """The linear layers as stored, and embedding, norms and biases at `other_bytes` each."""
    layers = linear_layers(model)
    heads = {id(layers["head"].weight), id(model.embed.weight)}
    others = len(heads) * model.embed.weight.numel() + sum(
        p.numel() for name, p in model.named_parameters() if "norm" in name or "bias" in name
    )
    return linear_bytes(model) + others * other_bytes


def bf16_weights(model: Transformer) -> Transformer:
    """The same in bf16; the source stays as it is, since every tensor here is a new one."""
    new = Transformer(model.config).to(torch.bfloat16)
    new.load_state_dict(model.state_dict())
    return new.eval().requires_grad_(False)


def row(name, quantized, reference, comparable, held, other_bytes=2) -> dict:
    """One row of the table. comparable: in the original's terms, for errors layer by layer."""
    start = time.perf_counter()
    found = {
        "name": name,
        "bits_per_weight": round(bits_per_weight(quantized), 4),
        "linear_bytes": linear_bytes(quantized),
        "weight_bytes": weight_bytes(quantized, other_bytes),
        "perplexity": round(perplexity(quantized, held), 3),
    }
    if comparable is not None:
        errors = layer_errors(reference, comparable, held[:ERROR_WINDOWS])
        layer, error = worst(errors)
        found |= {
            "worst_layer": layer,
            "worst_error": round(error, 5),
            "median_error": round(statistics.median(errors.values()), 5),
        }
    print(line(found), f"{time.perf_counter() - start:4.0f} s", flush=True)
    return found


def line(found: dict) -> str:
    return (
        f"{found['name']:<31}{found['bits_per_weight']:7.3f}{found['weight_bytes'] / 1e6:8.1f}"
        f"{found['perplexity']:9.2f}  {found.get('worst_error', 0):7.2g} "
        f"{found.get('worst_layer', '-').removeprefix('blocks.'):<11}"
    )


def quality(model, held, calibration, chosen) -> Iterator[dict]:
    """Row after row, each as a part of the record; AWQ's come with its alphas and loss curves."""
    print(f"{'method':<31}{'bits':>7}{'MB':>8}{'perpl.':>9}  worst layer's error")
    for name, kind, searched in chosen:
        more: dict = {}
        if kind is None:
            dense = model if name == "fp32" else bf16_weights(model)
            like = None if dense is model else replace_linears(model, _through_bf16)
            found = row(name, dense, model, like, held, 4 if dense is model else 2)
        elif searched is None:
            quantized = replace_linears(model, FORMATS[kind])
            found = row(name, quantized, model, quantized, held)
        else:
            start = time.perf_counter()
            folded = search(model, calibration, *searched)
            seconds = time.perf_counter() - start
            scales = {layer: each.scale_D for layer, each in folded.searches.items()}
            quantized = replace_linears(folded.model, FORMATS[kind])
            inverse = {layer: 1 / s_D for layer, s_D in scales.items()}
            found = row(name, quantized, model, fold_all(dequantize(quantized), inverse), held)
            found["search_s"] = round(seconds, 1)
            searches = folded.searches
            more["alphas"] = {name: {layer: each.alpha for layer, each in searches.items()}}
            more["loss_curves"] = {
                name: {n: _figures(searches[n].losses) for n in CURVES if n in searches}
            }
            more["alpha_grid"] = ALPHAS
            if name == PICTURED:
                more["lecture_picture"] = picture(model, held, calibration, scales, FORMATS[kind])
                more["lecture_picture"]["perplexity"][CLIPPED] = found["perplexity"]
        yield {"rows": [found | {"format": kind or name}]} | more


def picture(model, held, calibration, scales, make) -> dict:
    """The experiment behind AWQ: 1% of the channels kept aside, or all scaled and none kept."""
    found = {}

    def score(name: str, changed: Transformer) -> float:
        found[name] = round(perplexity(changed, held), 3)
        print(f"int3 g48, {name:<30}{found[name]}", flush=True)
        return found[name]

    keep = partial(keep_channels, model, calibration, 3, 48, KEPT)
    score("unquantized", model)
    score("all rounded", replace_linears(model, make))
    score("scaled, all rounded", replace_linears(fold_all(model, scales), make))
    for by in ("activation", "weight"):
        score(f"1% kept, by {by}", keep(by))
    draws = [score(f"1% kept, at random, seed {i}", keep("random", seed=i)) for i in range(3)]
    for i in range(3):
        del found[f"1% kept, at random, seed {i}"]
    found |= {"1% kept, at random": round(statistics.mean(draws), 3), "at random, each seed": draws}
    return {"bits": 3, "group_size": 48, "kept": KEPT, "perplexity": found}


def merged(old: dict, new: dict) -> dict:
    """The record with new rows in place of old ones of the same name, in the table's order."""
    by_name = {r["name"]: r for r in (*old.get("rows", ()), *new.get("rows", ()))}
    document = old | new
    document["rows"] = [by_name[name] for name, *_ in ROWS if name in by_name]
    for key in ("alphas", "loss_curves"):
        document[key] = old.get(key, {}) | new.get(key, {})
    return document


def speeds(model, prompt: list[int], rounds: int) -> dict:
    """Tokens a second of each format, with fp32 and with bf16 activations.

    A format's first step is not timed. In each round it takes 16 steps, or what fits in 2 seconds
    but at least two.
    """
    found: dict[str, dict] = {}
    for dtype, short in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        dense = model if dtype == torch.float32 else bf16_weights(model)
        models = {short: dense}
        for name, make in FORMATS.items():
            models[name] = replace_linears(dense, make)
        samples = {name: [] for name in models}
        for _ in range(rounds):
            for name, each in models.items():
                samples[name] += step_times(each, prompt)
        base = statistics.median(samples[short])
        for name, times in samples.items():
            middle = statistics.median(times)
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
            found.setdefault(name, {})[short] = {
                "tokens_per_s": round(1 / middle, 2),
                "quartiles": [round(1 / high, 2), round(1 / low, 2)],
                "times_dense": round(base / middle, 3),
                "steps": len(times),
            }
            print(f"{name:<12} {short} activations: {1 / middle:7.1f} tokens/s "
                  f"[{1 / high:.1f}, {1 / low:.1f}], {base / middle:5.2f} x dense {short}",
                  flush=True)  # fmt: skip
        del models
    return found


@torch.inference_mode()
def step_times(model: Transformer, prompt: list[int]) -> list[float]:
    """Seconds of each decode step after a short prompt."""
    cache = KVCache(model.config, 1, len(prompt) + STEPS + 1, model.dtype, model.device)
    model.features(torch.tensor([prompt]), cache)
    token, times = torch.tensor([[prompt[-1]]]), []
    while (len(times) <= STEPS and sum(times) < ROUND_S) or len(times) < 3:
        start = time.perf_counter()
        token = model(token, cache).argmax(-1)
        times.append(time.perf_counter() - start)
    return times[1:]


def _through_bf16(linear: nn.Linear) -> nn.Linear:
    new = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    new.weight = nn.Parameter(linear.weight.detach().bfloat16().float(), requires_grad=False)
    new.bias = linear.bias
    return new


def _figures(numbers, digits: int = 4) -> list[float]:
    return [float(f"{x:.{digits}g}") for x in numbers]


def about(held, calibration) -> dict:
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "bitsandbytes", "transformers")},
        "seed": SEED,
        "held": {"windows": len(held), "T": held.shape[1]},
        "calibration": {"windows": len(calibration), "T": calibration.shape[1], "seed": SEED},
        "counting": "bits and linear_bytes: linear layers without the head, scales and zero points "
        "included; weight_bytes adds embedding and norms at 2 bytes a number, in fp32 at 4",
        "q4_1": "the weights went through Q4_1 (blocks of 32, a real-valued minimum) before any of "
        "this: fp32 is that model. Groups of 48 straddle its blocks and zero points are whole "
        "numbers, so that no row gets the grid back",
    }


def hardware() -> str:
    return f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def busy() -> float:
    """Runnable processes on this machine in the last minute, per core, where the system tells."""
    return os.getloadavg()[0] / os.cpu_count() if hasattr(os, "getloadavg") else math.nan


def write(document: dict, out: Path | None) -> None:
    if out:
        out.parent.mkdir(exist_ok=True)
        scratch = out.with_suffix(".part")
        scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        scratch.replace(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name for name, *_ in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--speeds", action="store_true", help="renew only the record's speeds")
    parser.add_argument("--no-speeds", action="store_true", help="leave the speeds as they are")
    parser.add_argument("--quick", action="store_true", help="six blocks, few windows, no record")
    parser.add_argument("--out", type=Path, help=f"default {RECORD.name}; --quick writes nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="bitsandbytes")
    load = busy()
    out = args.out or (None if args.quick else RECORD)
    document = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else {}

    model = weights.load(device="cpu")
    study, held = english_split(weights.load_tokenizer(), T)
    held, generator = held[:HELD], torch.Generator().manual_seed(SEED)
    calibration = windows(study, CALIBRATION, T, generator)
    if args.quick:
        model.config, model.blocks = replace(model.config, L=6), model.blocks[:6]
        held, calibration = held[:4], calibration[:4]

    chosen = [] if args.speeds else [each for each in ROWS if each[0] in args.rows]
    for part in quality(model, held, calibration, chosen) if chosen else ():
        document = merged(document, about(held, calibration) | part)
        write(document, out)
    if not args.no_speeds:
        document["speeds"] = {
            "date": date.today().isoformat(),
            "hardware": hardware(),
            "load_per_core_before": round(load, 2),
            "prompt": PROMPT,
            "formats": speeds(model, study[:PROMPT].tolist(), 1 if args.quick else ROUNDS),
        }
        write(document, out)
    if out:
        print(f"wrote {out.name}")


if __name__ == "__main__":
    main()
