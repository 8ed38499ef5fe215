"""A pruned student of the reference model, repaired by distillation into low-rank adapters.

    python benchmarks/train_student.py text --work F       the model answers 192 prompts
    python benchmarks/train_student.py baselines --work F  base and cuts on held-out text
    python benchmarks/train_student.py train --work F      factors beside what is left, by KL
    python benchmarks/train_student.py score --work F      the student on held-out text

Each step reads what the ones before left in the folder F. `text` goes on where it was stopped;
`train` starts over, but from its first look at the validation rows on the asset holds the best
adapter so far. One thread: about 4, 5, 20 and 2 minutes. Seeded; another machine's rounding changes
some tokens, and the student with them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from record import write
from safetensors.torch import load_file, save_file
from torch import Tensor

from lecture_util.merging.adapter_training import AdaptedLinear, train_adapter
from lecture_util.merging.adapters import Adapter, load_adapter
from lecture_util.model import weights
from lecture_util.model.generate import generate
from lecture_util.model.sampling import GREEDY, Sampling
from lecture_util.model.text import english_split, perplexity, windows
from lecture_util.model.tokenizer import chat
from lecture_util.pruning.importance import block_influence, without
from lecture_util.pruning.losses import kl_loss
from lecture_util.pruning.prune import drop_layers
from lecture_util.roofline.accounting import num_params
from lecture_util.roofline.hardware import processor
from lecture_util.speculative.prompts import held_prompts, training_prompts
from lecture_util.together.student import ASSET, load_student, save_student, student_facts

RESULTS = Path(__file__).with_name("results") / "student.json"
SEED, EOS, PAD = 0, 2, -1
BATCHES, B_TEXT, NEW, T = 3, 64, 116, 160
WARM = Sampling(temperature=0.7, top_p=0.95)
HELD, VALIDATION = 64, 8  # rows of each kind that choose among the checkpoints, and train nothing
CALIBRATION, DROP, DROPS, SHOWN = 32, 6, (4, 6, 8), 3
RANK, SCALE, LR, ROWS = 7, 2.0, 2e-3, 1  # ROWS of each kind in a batch
STEPS, EVERY, BUDGET_S = 400, 40, 1_800


def write_text(work: Path, model, tokenizer) -> None:
    """Answers, batch by batch; every other batch greedy, since people decode both ways."""
    prompts = [chat(tokenizer, prompt) for prompt in training_prompts(BATCHES * B_TEXT, SEED)]
    for batch in range(BATCHES):
        path = work / f"text-{batch}.safetensors"
        if not path.exists():
            part = prompts[batch * B_TEXT : (batch + 1) * B_TEXT]
            sampling = GREEDY if batch % 2 else WARM
            answers = answer(model, part, NEW, sampling, torch.Generator().manual_seed(batch))
            save_file(rows_of(part, answers), path)
            print(f"batch {batch}: {sum(map(len, answers))} tokens", flush=True)


def answer(model, prompts, new: int, sampling=GREEDY, generator=None) -> list[list[int]]:
    return generate(model, prompts, new, sampling=sampling, eos=EOS, generator=generator)


def rows_of(prompts, answers) -> dict[str, Tensor]:
    """Prompt and answer in rows of T tokens. -> tokens_BT, padded, and where the answers start."""
    rows = [(p + a)[:T] for p, a in zip(prompts, answers, strict=True)]
    return {
        "tokens": torch.tensor([row + [PAD] * (T - len(row)) for row in rows]),
        "start": torch.tensor([len(p) for p in prompts]),
    }


def text_rows(study_S: Tensor) -> dict[str, Tensor]:
    """The study text in rows of T tokens, each scored from its second token on."""
    tokens = study_S[: len(study_S) // T * T].view(-1, T)
    return {"tokens": tokens, "start": torch.ones(len(tokens), dtype=torch.long)}


def all_rows(work: Path, tokenizer) -> dict[str, dict[str, Tensor]]:
    """Rows of the two kinds, shuffled: reference text, and the model's own answers."""
    parts = [load_file(work / f"text-{batch}.safetensors") for batch in range(BATCHES)]
    kinds = {
        "text": text_rows(english_split(tokenizer)[0]),
        "answers": {key: torch.cat([part[key] for part in parts]) for key in parts[0]},
    }
    for rows in kinds.values():
        order = torch.randperm(len(rows["start"]), generator=torch.Generator().manual_seed(SEED))
        rows |= {key: value[order] for key, value in rows.items()}
    return kinds


def rows_to_use(work: Path, tokenizer) -> tuple[dict, dict]:
    """(tokens_BT, scored_BT) of each kind: to train on, and to choose by."""
    train, chosen = {}, {}
    for kind, rows in all_rows(work, tokenizer).items():
        tokens_BT = rows["tokens"]
        # Position t is scored for what it predicts, token t + 1.
        scored_BT = (torch.arange(T) >= rows["start"][:, None] - 1) & (tokens_BT.roll(-1, 1) != PAD)
        scored_BT[:, -1] = False
        every = (tokens_BT.clamp(min=0), scored_BT)
        chosen[kind] = tuple(part[:VALIDATION] for part in every)
        train[kind] = tuple(part[VALIDATION:] for part in every)
    return train, chosen


class Shown:
    """Rows, and what the teacher's head reads at them: computed once, so that from the second
    epoch on a step runs the student alone."""

    def __init__(self, teacher, tokens_BT: Tensor, scored_BT: Tensor) -> None:
        self.teacher, self.tokens_BT, self.scored_BT = teacher, tokens_BT, scored_BT
        self.x_BTD = torch.zeros(*tokens_BT.shape, teacher.config.D)
        self.known = torch.zeros(len(tokens_BT), dtype=torch.bool)

    @torch.no_grad()
    def __getitem__(self, at: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        if new := [i for i in at if not self.known[i]]:
            self.x_BTD[new] = self.teacher.features(self.tokens_BT[new])
            self.known[new] = True
        return self.tokens_BT[at], self.scored_BT[at], self.x_BTD[at]


def shown(teacher, kinds: dict) -> dict[str, Shown]:
    return {kind: Shown(teacher, *every) for kind, every in kinds.items()}


def distance(student, teacher, tokens_BT, scored_BT, x_BTD) -> Tensor:
    """Mean KL at the scored positions, in nats."""
    logits_MV = student.head(student.features(tokens_BT)[scored_BT])
    with torch.no_grad():
        teacher_MV = teacher.head(x_BTD[scored_BT])
    return kl_loss(logits_MV, teacher_MV)


@torch.no_grad()
def distances(student, teacher, chosen) -> dict[str, float]:
    """The mean distance on the validation rows of each kind."""
    found = {}
    for kind, rows in chosen.items():
        total = 0.0
        for at in range(0, len(rows.known), 4):
            parts = rows[list(range(at, min(at + 4, len(rows.known))))]
            total += distance(student, teacher, *parts).item() * int(parts[1].sum())
        found[kind] = total / int(rows.scored_BT.sum())
    return found


def by_influence(model, tokenizer) -> list[int]:
    """The layers, those that turn the residual stream least first, as benchmarks/pruning.py."""
    study_S = english_split(tokenizer)[0]
    sample_BT = windows(study_S, CALIBRATION, 128, torch.Generator().manual_seed(SEED))
    return block_influence(model, sample_BT).argsort().tolist()


def mixed(train, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """ROWS of each kind, in a new order in each epoch."""
    orders = {kind: [] for kind in train}
    while True:
        parts = []
        for kind, rows in train.items():
            if len(orders[kind]) < ROWS:
                orders[kind] = torch.randperm(len(rows.known), generator=generator).tolist()
            parts.append(rows[[orders[kind].pop() for _ in range(ROWS)]])
        yield tuple(torch.cat(same) for same in zip(*parts, strict=True))


def train_student(work: Path, model, tokenizer) -> None:
    train, chosen = (shown(model, kinds) for kinds in rows_to_use(work, tokenizer))
    dropped = sorted(by_influence(model, tokenizer)[:DROP])
    student = drop_layers(model, dropped)
    start, cpu = time.perf_counter(), time.process_time()
    curve, seen = [], []

    def look(step: int) -> None:
        """Measure, and save what is best so far."""
        nats = distances(student, model, chosen)
        best = min((sum(entry["nats"].values()) for entry in curve), default=math.inf)
        minutes = (time.perf_counter() - start) / 60
        curve.append({"step": step, "nats": nats, "minutes": round(minutes, 1)})
        print(curve[-1], "training", sum(seen[-EVERY:]) / max(1, len(seen[-EVERY:])), flush=True)
        if step and sum(nats.values()) < best:
            facts = {
                "dropped": dropped, "rank": RANK, "seed": SEED, "steps": step,
                "trained_on": "Python's reference, study part, and the base's own answers",
                "nats": nats, "date": date.today().isoformat(),
            }  # fmt: skip
            save_student(model, factors_in(student), facts)
        note = {
            "dropped": dropped, "curve": curve, "losses": seen,
            "wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu,
        }  # fmt: skip
        (work / "training.json").write_text(json.dumps(note))

    def every(step: int, loss: float) -> None:
        seen.append(round(loss, 4))
        out_of_time = time.perf_counter() - start >= BUDGET_S
        if (step + 1) % EVERY == 0 or step + 1 == STEPS or out_of_time:
            look(step + 1)

    def loss_of(student, *parts):
        return distance(student, model, *parts)

    rows = mixed(train, torch.Generator().manual_seed(SEED))
    look(0)
    train_adapter(
        student, lambda generator: next(rows), STEPS,
        rank=RANK, scale=SCALE, seed=SEED, lr=LR, warmup=20, weight_decay=0.0, budget_s=BUDGET_S,
        loss_of=loss_of, every=every, label="student", progress=False,
    )  # fmt: skip


def factors_in(student) -> Adapter:
    """What a model in training has learned so far."""
    adapted = [module for module in student.modules() if isinstance(module, AdaptedLinear)]
    factors = {name: f for module in adapted for name, f in module.trained().items()}
    return Adapter(copy.deepcopy(factors), SCALE)


@torch.no_grad()
def agreement(model, rows: dict[str, Tensor]) -> float:
    """At how many of the base's own greedy tokens `model`, told those before, says the same."""
    same = count = 0
    for tokens_BT, start_B in zip(rows["tokens"].split(4), rows["start"].split(4), strict=True):
        said_BT = model(tokens_BT.clamp(min=0))[:, :-1].argmax(-1)
        answers_BT = torch.arange(1, T) >= start_B[:, None]
        scored_BT = answers_BT & (tokens_BT[:, 1:] != PAD)
        same += int((said_BT == tokens_BT[:, 1:])[scored_BT].sum())
        count += int(scored_BT.sum())
    return same / count


def scores_of(subject, tokenizer, work: Path) -> dict[str, float]:
    held_BT = english_split(tokenizer)[1][:HELD]
    scores = {
        "layers": len(subject.blocks),
        "parameters": num_params(replace(subject.config, L=len(subject.blocks))),
        "perplexity": round(perplexity(subject, held_BT), 3),
        "greedy_agreement": round(agreement(subject, load_file(work / "held.safetensors")), 4),
    }
    print(scores, flush=True)
    return scores


def write_baselines(work: Path, model, tokenizer) -> None:
    """What the base says to held-out prompts, and what is left of it without 4, 6 and 8 layers."""
    prompts = [chat(tokenizer, prompt) for prompt in held_prompts()]
    save_file(rows_of(prompts, answer(model, prompts, NEW)), work / "held.safetensors")
    order = by_influence(model, tokenizer)
    record = {"base": scores_of(model, tokenizer, work), "cuts": []}
    for drop in DROPS:
        cut = scores_of(without(model, order[:drop]), tokenizer, work)
        record["cuts"].append({"dropped": sorted(order[:drop])} | cut)
        (work / "baselines.json").write_text(json.dumps(record))


def score(work: Path, model, tokenizer) -> None:
    facts, student = student_facts(), load_student(model)
    training, baselines = (
        json.loads((work / f"{name}.json").read_text()) for name in ("training", "baselines")
    )
    (cut,) = (entry for entry in baselines["cuts"] if entry["dropped"] == facts["dropped"])
    record = {
        "date": date.today().isoformat(),
        "hardware": f"{processor()}, {torch.get_num_threads()} thread",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "settings": {
            "seed": SEED, "rank": RANK, "scale": SCALE, "lr": LR, "rows_of_each_kind": ROWS, "T": T,
            "prompts": BATCHES * B_TEXT, "validation_rows_of_each_kind": VALIDATION,
            "held_windows": HELD, "held_prompts": len(held_prompts()),
        },
        "dropped": facts["dropped"],
        "validation": training["curve"],
        "losses": training["losses"],
        "wall_s": round(training["wall_s"]),
        "cpu_s": round(training["cpu_s"]),
        "chosen_step": facts["steps"],
        "adapter": {
            "file_bytes": ASSET.stat().st_size,
            "parameters": load_adapter(ASSET).nbytes // 2,
        },
        "base": baselines["base"],
        "cuts": baselines["cuts"],
        "cut": cut,
        "student": scores_of(student, tokenizer, work),
        "answers": [],
    }  # fmt: skip
    prompts = held_prompts()[:SHOWN]
    asked = [chat(tokenizer, prompt) for prompt in prompts]
    said = {"base": answer(model, asked, NEW), "student": answer(student, asked, NEW)}
    for i, prompt in enumerate(prompts):
        words = {who: tokenizer.decode(said[who][i], skip_special_tokens=True) for who in said}
        record["answers"].append({"prompt": prompt} | words)
    write(RESULTS, record)


STAGES = {
    "text": write_text,
    "baselines": write_baselines,
    "train": train_student,
    "score": score,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model, tokenizer = weights.load("smollm2-135m"), weights.load_tokenizer("smollm2-135m")
    STAGES[args.step](args.work, model, tokenizer)


if __name__ == "__main__":
    main()
