"""Quantizing the reference model's linear layers, ours against bitsandbytes: same weights, one run.

    OMP_NUM_THREADS=2 python benchmarks/quantize_speed.py [--rounds 5] [--dtype bf16]

Each round quantizes every layer by each way, layer by layer and in turn, so that a busy machine
slows both; a way's time is the least of its rounds. Bits are compared before anything is timed.
Last come the layers as a student makes them, the swap into the model included.
"""

import argparse
import logging
import time
from functools import partial

import torch

from lecture_util.model.weights import load
from lecture_util.quantization.linear import (
    bits_per_weight,
    bnb_int8,
    bnb_nf4,
    linear_layers,
    replace_linears,
)
from lecture_util.quantization.llm_int8 import Int8Linear, quantize_rows
from lecture_util.quantization.nf4 import NF4Linear, double_quantize, quantize_nf4

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
from bitsandbytes import functional as bnb  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def nf4_ours(w):
    return quantize_nf4(w)


def nf4_theirs(w):
    packed, state = bnb.quantize_4bit(w, quant_type="nf4")
    return packed.view(-1), state.absmax


def double_ours(w):
    packed, absmax = quantize_nf4(w)
    return packed, *double_quantize(absmax)


def double_theirs(w):
    packed, state = bnb.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    return packed.view(-1), state.absmax, state.state2.absmax, state.offset


def int8_ours(w):
    return quantize_rows(w.half())


def int8_theirs(w):
    return bnb.int8_vectorwise_quant(w.half())[:2]


PAIRS = {
    "NF4, blocks of 64": (nf4_ours, nf4_theirs),
    "NF4, double": (double_ours, double_theirs),
    "int8, rows": (int8_ours, int8_theirs),
}
LAYERS = {
    "NF4 model": (partial(NF4Linear.from_linear, double=False), bnb_nf4),
    "NF4 model, double": (NF4Linear.from_linear, partial(bnb_nf4, double=True)),
    "int8 model": (Int8Linear.from_linear, bnb_int8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    args = parser.parse_args()

    model = load("smollm2-135m", dtype=DTYPES[args.dtype], device="cpu")
    weights = [x.weight.detach() for name, x in linear_layers(model).items() if name != "head"]
    millions = sum(w.numel() for w in weights) / 1e6
    print(f"{millions:.1f} M weights in {args.dtype}, {torch.get_num_threads()} threads, "
          f"least of {args.rounds} alternating rounds")  # fmt: skip
    print(f"{'':<18} {'ours s':>7} {'bitsandbytes s':>15} {'ours / theirs':>14}")
    for name, ways in PAIRS.items():
        for w in weights[:4]:  # one block's
            results = [way(w) for way in ways]
            same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            assert same, f"{name}: the two store different bits"
        report(name, ways, args.rounds, lambda way: [way(w) for w in weights])
    for name, makes in LAYERS.items():
        bits = [bits_per_weight(replace_linears(model, make)) for make in makes]
        assert bits[0] == bits[1], f"{name}: the two count {bits} bits a weight"
        report(name, makes, args.rounds, lambda make: replace_linears(model, make))


def report(name, ways, rounds, run) -> None:
    seconds = {way: [] for way in ways}
    for _ in range(rounds):
        for way, times in seconds.items():
            start = time.perf_counter()
            run(way)
            times.append(time.perf_counter() - start)
    ours, theirs = (min(seconds[way]) for way in ways)
    print(f"{name:<18} {ours:>7.2f} {theirs:>15.2f} {ours / theirs:>14.2f}", flush=True)


if __name__ == "__main__":
    main()
