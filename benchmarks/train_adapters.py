"""Three small fine-tunes of the reference model, for notebook 11, and how their merges score.

    python benchmarks/train_adapters.py            train, save to lecture_util/assets, and score
    python benchmarks/train_adapters.py --score    score what is in lecture_util/assets

One thread, about 5 minutes of processor time for all three, and as long to score. Seeded; another
machine's rounding changes the adapters' last digits.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from datetime import date
from pathlib import Path

import torch

from lecture_util.merging.adapter_training import train_adapter
from lecture_util.merging.adapters import ASSETS, delta, hf_views, load_adapter, save_adapter
from lecture_util.merging.real_tasks import TASKS, answer_loss, score, training_batch
from lecture_util.merging.task_vectors import cosines, task_arithmetic
from lecture_util.merging.ties import ties
from lecture_util.model import weights

RESULTS = Path(__file__).with_name("results") / "adapters.json"
SEED, RANK, SCALE, ROWS = 0, 2, 2.0, 16
# Trained until held-out examples come out right, and not much longer: a change that is larger than
# its task needs drowns the others when they are added up.
HOW = {
    "facts": {"steps": 88, "lr": 1e-3},
    "record": {"steps": 24, "lr": 7e-4},
    "reverse": {"steps": 48, "lr": 1e-3},
}
COUNT = 128  # examples of a score
LAMBDAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


def train_all(model, tokenizer) -> dict:
    """Train and save the three adapters; what each cost, and its loss."""
    facts = {}
    for task, how in HOW.items():
        wall, cpu = time.perf_counter(), time.process_time()
        adapter, losses = train_adapter(
            model, training_batch(tokenizer, task, ROWS),
            rank=RANK, scale=SCALE, weight_decay=0.0, warmup=8, seed=SEED, loss_of=answer_loss,
            label=task, **how,
        )  # fmt: skip
        path = save_adapter(adapter, ASSETS / f"adapter_{task}.safetensors")
        facts[task] = how | {
            "wall_s": round(time.perf_counter() - wall, 1),
            "cpu_s": round(time.process_time() - cpu, 1),
            "file_bytes": path.stat().st_size,
            "nats_mean_of_4_steps": [
                round(sum(losses[i : i + 4]) / 4, 4) for i in range(0, len(losses) - 3, 4)
            ],
        }
        print(task, facts[task], flush=True)
    return facts


def scores_with(model, tokenizer, change: dict) -> dict[str, float]:
    """The score on each task of the model with these tensors in the place of its own."""
    merged = copy.deepcopy(model)
    views = hf_views(merged)
    with torch.no_grad():
        for name, tensor in change.items():
            views[name].copy_(tensor)
    row = {task: score(merged, tokenizer, task, COUNT, SEED) for task in TASKS}
    print(row, flush=True)
    return row


def score_all(model, tokenizer, facts: dict) -> None:
    """Base, fine-tunes and merges on every task, written down row by row."""
    base = hf_views(model)
    vectors = {task: delta(load_adapter(task)) for task in TASKS}
    names = list(vectors[next(iter(TASKS))])
    tuned = {
        task: {name: base[name] + vector[name] for name in names}
        for task, vector in vectors.items()
    }

    def merged(method, **how):
        return {
            name: method(base[name], [tuned[task][name] for task in TASKS], **how) for name in names
        }

    facts |= {
        "cosines": cosines(list(vectors.values())).tolist(),
        "norms": {
            task: sum(d.double().square().sum() for d in vector.values()).sqrt().item()
            for task, vector in vectors.items()
        },
        "scores": {},
        "merges": [],
    }
    for task, change in {"base": {}, **tuned}.items():
        facts["scores"][task] = scores_with(model, tokenizer, change)
        write(facts)
    trials = [("average", task_arithmetic, {"scale": 1 / 3})]
    trials += [("task arithmetic", task_arithmetic, {"scale": each}) for each in LAMBDAS]
    trials += [
        ("TIES, tensor by tensor", ties, {"density": density, "scale": scale})
        for density in (0.2, 0.5)
        for scale in (0.5, 0.75, 1.0, 1.5)
    ]
    for label, method, how in trials:
        print(label, how)
        row = scores_with(model, tokenizer, merged(method, **how))
        facts["merges"].append({"method": label, **how, "scores": row})
        write(facts)


def write(facts: dict) -> None:
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--score", action="store_true", help="score the adapters that are there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = weights.load("smollm2-135m"), weights.load_tokenizer("smollm2-135m")
    facts = {
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": SEED,
        "settings": {
            "rank": RANK, "scale": SCALE, "rows": ROWS, "examples_scored": COUNT,
        },
    }  # fmt: skip
    if args.score:
        facts["training"] = json.loads(RESULTS.read_text())["training"]
    else:
        facts["training"] = train_all(model, tokenizer)
        write(facts)
    score_all(model, tokenizer, facts)


if __name__ == "__main__":
    main()
