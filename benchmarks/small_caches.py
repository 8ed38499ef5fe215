"""Train one small model of each kind on one budget: what does a smaller cache cost in quality?

    python benchmarks/small_caches.py [--variants MHA "window 4"] [--recall-steps 500]

Two tasks. Recall: eight pairs, then their keys again, most of them further back than the windows
reach. Text: Python's reference, byte by byte. Same data, steps, rate and width for all; the curves
of every seed go to benchmarks/results/small_caches.json, which notebook 04 draws.
"""

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path

import torch

from lecture_util.kv_reduction.variants import LATENT, SMALL, VARIANTS, WINDOW, small
from lecture_util.model.recall import recall_accuracy, recall_task
from lecture_util.model.text import english_bytes, nats_per_token, text_task, windows
from lecture_util.model.train import train

RECORD = Path(__file__).parent / "results" / "small_caches.json"
SEEDS = {"recall": (0, 1, 2), "text": (0, 1)}
PAIRS, RECALL_BATCH = 8, 64
TEXT_BATCH, TEXT_LENGTH = 16, 128
EVERY = 25  # steps between two points of a curve
WEIGHT_DECAY = 0.3  # strong: with little of it several kinds stay for long where MHA leaves early


def curve(model, new_batch, steps, seed, label, score):
    """Train, and score before the first step and after every 25."""
    points = {"steps": [0], "scores": [score(model)]}

    def note(step, loss):
        if (step + 1) % EVERY == 0:
            points["steps"].append(step + 1)
            points["scores"].append(score(model))

    train(model, new_batch, steps, weight_decay=WEIGHT_DECAY, seed=seed, label=label, every=note)
    return points


def recall_curve(name, seed, steps):
    task = recall_task(PAIRS, SMALL.V, RECALL_BATCH)
    torch.manual_seed(seed)
    label = f"{name}, recall, seed {seed}"
    return curve(small(name), task, steps, seed, label, lambda m: recall_accuracy(m, task))


def text_curve(name, seed, steps):
    """The last tenth of the text is held out; scored are 64 windows of it.

    Python's topics quote each other, so part of the tenth occurs in the rest as well. It does for
    every kind alike: the curves compare kinds and are no measure of unseen English.
    """
    tokens = english_bytes()
    cut = len(tokens) * 9 // 10
    held_out = windows(tokens[cut:], 64, TEXT_LENGTH + 1, torch.Generator().manual_seed(99))
    task = text_task(tokens[:cut], TEXT_BATCH, TEXT_LENGTH)
    torch.manual_seed(seed)
    label = f"{name}, text, seed {seed}"
    score = lambda m: nats_per_token(m, held_out, 64)  # noqa: E731
    return curve(small(name, V=128), task, steps, seed, label, score)


def record(name, recall_steps, text_steps):
    """Both tasks, every seed."""
    variant = VARIANTS[name]
    entry = {
        "parameters": sum(p.numel() for p in small(name).parameters()),
        "numbers_held": {str(S): variant.numbers(SMALL, S) for S in (32, 128, 1024)},
    }
    for task, of, steps in (
        ("recall", recall_curve, recall_steps),
        ("text", text_curve, text_steps),
    ):
        curves = [of(name, seed, steps) for seed in SEEDS[task]]
        key = {"recall": "accuracy", "text": "nats"}[task]
        entry[task] = {"steps": curves[0]["steps"], key: [c["scores"] for c in curves]}
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--recall-steps", type=int, default=500)
    parser.add_argument("--text-steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    start, variants = time.perf_counter(), {}
    for name in args.variants:
        variants[name] = record(name, args.recall_steps, args.text_steps)
        recall, text = variants[name]["recall"]["accuracy"], variants[name]["text"]["nats"]
        print(f"{name:>18}: recall {[round(c[-1], 3) for c in recall]}, "
              f"nats a byte {[round(c[-1], 3) for c in text]}", flush=True)  # fmt: skip
    document = {
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "seeds": SEEDS,
        "shape": f"L={SMALL.L}, D={SMALL.D}, N={SMALL.N}, H={SMALL.H}; W={WINDOW}; "
        f"MLA C={LATENT.C}, R={LATENT.R}",
        "weight_decay": WEIGHT_DECAY,
        "recall": {"pairs": PAIRS, "batch": RECALL_BATCH, "vocabulary": SMALL.V},
        "text": {"batch": TEXT_BATCH, "length": TEXT_LENGTH},
        "variants": variants,
    }
    args.out.parent.mkdir(exist_ok=True)
    scratch = args.out.with_suffix(".part")
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scratch.replace(args.out)
    print(f"wrote {args.out.name}, {document['minutes']} minutes")


if __name__ == "__main__":
    main()
