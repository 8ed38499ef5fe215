"""Greedy decoding, ours against transformers' `generate`: same weights, same prompts, one run.

    python benchmarks/decode.py [--dtype fp32] [--new 64] [--rounds 3]

Rounds alternate between the two, so that a busy machine slows both. The last column is the bytes a
step must read (weights once, the filled cache) over the measured copy bandwidth, as a share of the
measured step time.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from lecture_util.model.generate import generate
from lecture_util.model.weights import load, load_tokenizer, locate
from lecture_util.roofline.accounting import kv_cache_bytes, weight_bytes_read
from lecture_util.roofline.hardware import this_machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--new", type=int, default=64, help="tokens generated per sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    dtype = DTYPES[args.dtype]
    model = load("smollm2-135m", dtype=dtype, device="cpu")
    peer = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m"), dtype=dtype).eval()
    tokens = load_tokenizer("smollm2-135m").encode("The history of computing began when " * 8)[:48]
    machine = this_machine("cpu")

    def ours(prompts):
        return generate(model, prompts, args.new)

    def theirs(prompts):
        ids = torch.tensor(prompts)
        options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
        out = peer.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new, **options
        )
        return out[:, ids.shape[1] :].tolist()

    print(f"{args.dtype}, {torch.get_num_threads()} threads, prompt 48, {args.new} new tokens,")
    print(f"median of {args.rounds} alternating rounds; copy bandwidth "
          f"{machine.bandwidth_bytes_per_s / 1e9:.1f} GB/s")  # fmt: skip
    print(f"{'B':>3} {'ours tok/s':>11} {'peer tok/s':>11} {'ratio':>6} {'of memory roofline':>19}")
    for B in args.batches:
        prompts = [tokens] * B
        seconds = {ours: [], theirs: []}
        for _ in range(args.rounds + 1):
            for way, times in seconds.items():
                start = time.perf_counter()
                way(prompts)
                times.append(time.perf_counter() - start)
        mine, peers = (statistics.median(times[1:]) for times in seconds.values())
        width = dtype.itemsize
        step_bytes = weight_bytes_read(model.config, B, width) + kv_cache_bytes(
            model.config, B, len(tokens) + args.new // 2, width
        )
        bound = step_bytes / machine.bandwidth_bytes_per_s / (mine / args.new)
        total = B * args.new
        print(
            f"{B:>3} {total / mine:>11.1f} {total / peers:>11.1f} "
            f"{peers / mine:>6.2f} {bound:>19.2f}"
        )


if __name__ == "__main__":
    main()
