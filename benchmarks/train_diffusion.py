"""Train a masked diffusion model and its autoregressive twin, and measure both: one core, minutes.

    python benchmarks/train_diffusion.py [--steps 2400] [--only measuring]

Writes the weights to lecture_util/assets and the record to benchmarks/results/diffusion.json. The
two have one size and are trained alike: as many windows, the same rate. What is measured are the
shipped half-precision weights, on text that shares no 32 bytes in a row with the training text.
"""

import argparse
import hashlib
import json
import math
import platform
import statistics
import time
from collections import Counter
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as nnf

from lecture_util.alternatives.denoise import denoise
from lecture_util.alternatives.diffusion import hide, masked_loss, masked_task
from lecture_util.alternatives.small_models import (
    CONFIG,
    KINDS,
    WINDOW,
    load_small,
    save_small,
    split_text,
    text_of,
    untrained,
)
from lecture_util.model.generate import generate
from lecture_util.model.sampling import Sampling
from lecture_util.model.text import nats_per_token, text_task
from lecture_util.model.train import IGNORE, scored_loss, train
from lecture_util.model.weights import load, load_tokenizer
from lecture_util.roofline.hardware import processor

RECORD = Path(__file__).parent / "results" / "diffusion.json"
BATCH, LR, SEED = 32, 2e-3, 0
PROMPT = NEW = WINDOW // 2
PASSES = (1, 2, 4, 8, 16, 32)
HOLE = 8  # bytes to fill in
ROWS = 64  # held-out windows whose first half is continued


def seeded(seed: int = SEED) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits_per_byte(model, kind, held_BT, draws=32):
    """The cost of a window after its first byte. Diffusion: the bound, averaged over draws."""
    if kind == "autoregressive":
        return {"bits": nats_per_token(model, held_BT) / math.log(2)}
    B, T = held_BT.shape
    generator, bounds = seeded(), []
    for _ in range(draws):
        t_B = 1 - (torch.rand(1, generator=generator) + torch.arange(B) / B) % 1
        noisy_BT, targets_BT, _ = hide(held_BT, t_B, model.mask_id, generator)
        noisy_BT[:, 0], targets_BT[:, 0] = held_BT[:, 0], IGNORE
        with torch.no_grad():
            loss = masked_loss(model, noisy_BT, targets_BT, t_B).item()
        bounds.append(loss * T / (T - 1) / math.log(2))
    spread = statistics.stdev(bounds) / math.sqrt(draws)
    return {"bits_at_most": statistics.fmean(bounds), "standard_error": spread}


class Judge:
    """The real model as a reader: how many bits a byte the texts cost it after their prompts."""

    def __init__(self):
        self.model, self.tokenizer = (
            load("smollm2-135m", device="cpu"),
            load_tokenizer("smollm2-135m"),
        )
        self.prompts = None

    def nats(self, texts):
        rows = [torch.tensor(self.tokenizer.encode(text)) for text in texts]
        tokens_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORE)
        targets_BT = tokens_BT[:, 1:]  # the padding stands on the right, where no token sees it
        with torch.inference_mode():
            logits_BTV = self.model(tokens_BT[:, :-1].clamp_min(0))
        return nnf.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
        ).item()

    def __call__(self, prompts, texts):
        if prompts != self.prompts:
            self.prompts, self.before = prompts, self.nats(prompts)
        both = self.nats([p + t for p, t in zip(prompts, texts, strict=True)])
        return (both - self.before) / math.log(2) / sum(map(len, texts))


def variety(texts, words):
    """Whether the texts repeat themselves, and how many of their words are words."""
    every = "".join(texts)
    shares = [count / len(every) for count in Counter(every).values()]
    grams = [text[i : i + 4] for text in texts for i in range(len(text) - 3)]
    inner = [word for text in texts for word in text.split(" ")[1:-1] if word]
    return {
        "byte_entropy_bits": sum(share * -math.log2(share) for share in shares),
        "distinct_4_bytes": len(set(grams)) / len(grams),
        "words_seen_in_training": sum(word in words for word in inner) / max(1, len(inner)),
        "words": len(inner),
    }


def last(steps):
    for step in steps:  # noqa: B007
        pass
    return step


def written(models, held_BT, words):
    """Continue held-out prompts in every way, and have SmolLM2 judge."""
    judge = Judge()
    prompt_BT, truth_BT = held_BT[:ROWS, :PROMPT], held_BT[:ROWS, PROMPT:]
    prompts = [text_of(row) for row in prompt_BT]
    rows = []

    def note(way, passes, temperature, tokens_BT, seconds):
        texts = [text_of(row, "?") for row in tokens_BT]
        row = {"way": way, "passes": passes, "temperature": temperature, "seconds": seconds}
        row |= {"smollm2_bits_per_byte": judge(prompts, texts)} | variety(texts, words)
        row |= {"samples": texts[:3]}
        rows.append(row)
        print(" ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))

    note("held-out text", None, None, truth_BT, None)
    phrase = torch.tensor(list((b"the object of " * NEW)[:NEW]))
    note("one phrase, repeated", None, None, phrase.expand(ROWS, -1), None)
    model = models["diffusion"]
    ways = {
        "confidence": {},
        "random": {"order": "random"},
        "confidence, remasking": {"remask": True},
        "confidence, blocks of 8": {"block": 8},
    }
    for temperature in (0.0, 1.0):
        for way, options in ways.items():
            for passes in PASSES:
                if passes < NEW // options.get("block", NEW):
                    continue
                start = time.perf_counter()
                step = last(
                    denoise(model, prompt_BT, NEW, passes, temperature=temperature,
                            generator=seeded(), **options)
                )  # fmt: skip
                seconds = time.perf_counter() - start
                note(way, step.passes, temperature, step.tokens_BT[:, PROMPT:], seconds)
        start = time.perf_counter()
        tokens = generate(models["autoregressive"], prompt_BT.tolist(), NEW,
                          sampling=Sampling(temperature), generator=seeded())  # fmt: skip
        seconds = time.perf_counter() - start
        note("autoregressive", NEW, temperature, torch.tensor(tokens), seconds)
    return rows


def infilled(models, held_BT):
    """Which share of hidden bytes is guessed, greedily. The twin reads the left side only."""
    start = (WINDOW - HOLE) // 2
    middle, model = slice(start, start + HOLE), models["diffusion"]
    truth_BT = held_BT[:, middle]
    covered_BT = held_BT.clone()
    covered_BT[:, middle] = model.mask_id
    left_BT = torch.full_like(held_BT, model.mask_id)[:, : start + HOLE]
    left_BT[:, :start] = held_BT[:, :start]
    rows = []
    for passes in (1, 2, 4, 8):
        for way, text_BT in (("both sides", covered_BT), ("left side only", left_BT)):
            tokens_BT = last(denoise(model, text_BT, 0, passes)).tokens_BT[:, middle]
            hit = (tokens_BT == truth_BT).float()
            rows.append({"way": f"diffusion, {way}", "passes": passes, "right": hit.mean().item(),
                         "all_right": hit.prod(1).mean().item()})  # fmt: skip
    tokens = generate(models["autoregressive"], held_BT[:, :start].tolist(), HOLE)
    hit = (torch.tensor(tokens) == truth_BT).float()
    rows.append({"way": "autoregressive, left side only", "passes": HOLE,
                 "right": hit.mean().item(), "all_right": hit.prod(1).mean().item()})  # fmt: skip
    for row in rows:
        print(row)
    return rows


def trained(kind, train_S, steps):
    torch.manual_seed(SEED)
    model = untrained(kind)
    if kind == "diffusion":
        batches, loss_of = masked_task(train_S, BATCH, WINDOW, model.mask_id), masked_loss
    else:
        batches, loss_of = text_task(train_S, BATCH, WINDOW), scored_loss
    wall, cpu = time.perf_counter(), time.process_time()
    losses = train(model, batches, steps, lr=LR, seed=SEED, label=kind, loss_of=loss_of)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    path = save_small(model, kind)
    print(f"{kind}: {losses[0]:.2f} -> {statistics.fmean(losses[-50:]):.3f} nats, {cpu:.0f} CPU s")
    return {
        "steps": steps,
        "batch": BATCH,
        "lr": LR,
        "wall_s": round(wall, 1),
        "cpu_s": round(cpu, 1),
        "file_bytes": path.stat().st_size,
        "nats_mean_of_20_steps": [
            round(statistics.fmean(losses[i : i + 20]), 4) for i in range(0, steps, 20)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--only", choices=(*KINDS, "measuring"), help="one part of the three")
    args = parser.parse_args()
    torch.set_num_threads(1)
    train_S, held_BT = split_text()
    for kind in KINDS:
        if args.only in (None, kind):
            made = trained(kind, train_S, args.steps)
            old = json.loads(RECORD.read_text()) if RECORD.exists() else {}
            RECORD.parent.mkdir(exist_ok=True)
            write({"training": old.get("training", {}) | {kind: made}})
    if args.only in (None, "measuring"):
        write(measured(train_S, held_BT))


def measured(train_S, held_BT):
    models = {kind: load_small(kind) for kind in KINDS}
    words = set(text_of(train_S).split(" "))
    return {
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "threads": 1},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": SEED,
        "config": {name: getattr(CONFIG, name) for name in "DFKGHLV"},
        "text": {
            "train_bytes": len(train_S),
            "held_out_windows": len(held_BT),
            "window": WINDOW,
            "sha256": hashlib.sha256(bytes(train_S.tolist())).hexdigest(),
        },
        "training": json.loads(RECORD.read_text())["training"],
        "bits_per_byte": {kind: bits_per_byte(m, kind, held_BT) for kind, m in models.items()},
        "infilling": infilled(models, held_BT),
        "writing": written(models, held_BT, words),
    }


def write(record):
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
