"""Cut the reference model and repair it: what each cut costs, and what wins it back.

    python benchmarks/pruning.py [--only importance layers recovery recipes width] [--again]

All choices are made on the study part of the text, all perplexities but those of the importance
maps are of held-out windows. Every entry is written to benchmarks/results/pruning.json when it is
done, and a second run goes on where the first was stopped; --again measures anew.

Clock: beside wall seconds stand CPU seconds of this process, which other work on the machine
stretches less. Speeds are ratios of rounds that alternate with the whole model.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from lecture_util.model.config import Config
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.text import english_split, perplexity, windows
from lecture_util.model.transformer import Transformer
from lecture_util.model.weights import REFERENCE, load, load_tokenizer
from lecture_util.pruning.distill import bf16_pays, distill, iterative
from lecture_util.pruning.importance import (
    block_influence,
    channel_importance,
    greedy_drop,
    head_importance,
    neuron_importance,
    perplexity_without,
    without,
)
from lecture_util.pruning.plan import plan_by_importance, width_for
from lecture_util.pruning.prune import drop_layers, prune
from lecture_util.roofline.accounting import kv_cache_bytes, num_params, weight_bytes
from lecture_util.roofline.hardware import processor

RECORD = Path(__file__).parent / "results" / "pruning.json"
SEED, T = 0, 128
CALIBRATION, HELD = 32, 64  # windows to rank by, windows to score on
DROP = 8
LONG = dict(steps=120, B=4, T=128, lr=2e-4)  # the repair that is kept as a curve
SHORT = dict(steps=30, B=4, T=64, lr=2e-4)  # what recipes and depths are compared on
CURVE = (5, 10, 20, 30, 40, 60, 80, 100, 120)
KEPT, REPAIRED = range(30, 17, -1), (26, 22)
SCRATCH_LR = 1e-3  # fresh weights have further to go
CONTEXT, DECODED, ROUNDS = 128, 12, 3  # tokens in the cache, tokens timed, times


class Bench:
    """The model, the text, and the record that grows."""

    def __init__(self, out: Path, again: bool):
        self.out, self.again, self.made = out, again, set()
        self.teacher = load(REFERENCE, device="cpu")
        self.study_S, held_BT = english_split(load_tokenizer(REFERENCE), T)
        self.held_BT = held_BT[:HELD]
        generator = torch.Generator().manual_seed(SEED)
        self.sample_BT = windows(self.study_S, CALIBRATION, T, generator)

    def once(self, section: str, name: str, make) -> dict:
        """The entry of the record, made and written if it isn't there."""
        document = json.loads(self.out.read_text()) if self.out.exists() else {}
        known = name in document.get(section, {})
        if known and (not self.again or (section, name) in self.made):
            return document[section][name]
        start = time.perf_counter()
        made = make()
        self.made.add((section, name))
        document = json.loads(self.out.read_text()) if self.out.exists() else {}
        document |= self.about()
        document.setdefault(section, {})[name] = made
        scratch = self.out.with_suffix(".part")
        scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.out)
        shown = {k: v for k, v in made.items() if isinstance(v, int | float)}
        print(f"{section}, {name}: {shown} [{time.perf_counter() - start:.0f} s]", flush=True)
        return made

    def about(self) -> dict:
        return {
            "date": date.today().isoformat(),
            "hardware": f"{processor()}, {torch.get_num_threads()} thread",
            "autocast_bf16": bf16_pays(torch.device("cpu")),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "seed": SEED,
            "text": {
                "study_tokens": len(self.study_S),
                "held_windows": len(self.held_BT),
                "calibration_windows": CALIBRATION,
                "T": T,
            },
        }

    def score(self, model) -> float:
        return round(perplexity(model, self.held_BT), 3)

    def repair(self, student, options: dict, at=(), **more) -> dict:
        """Distill, and score after the steps in `at` and after the last."""
        points = {"at": [0], "perplexity": [self.score(student)]}
        pause_s = [0.0, 0.0]  # what scoring took: CPU, wall

        def note(step: int, loss: float) -> None:
            if step + 1 in at and step + 1 < options["steps"]:
                cpu, wall = time.process_time(), time.perf_counter()
                points["at"].append(step + 1)
                points["perplexity"].append(self.score(student))
                pause_s[0] += time.process_time() - cpu
                pause_s[1] += time.perf_counter() - wall
                print(f"  step {step + 1}: {points['perplexity'][-1]}", flush=True)

        cpu, wall = time.process_time(), time.perf_counter()
        losses = distill(
            student, self.teacher, self.study_S, **(options | more),
            seed=SEED, progress=False, every=note,
        )  # fmt: skip
        cpu, wall = time.process_time() - cpu - pause_s[0], time.perf_counter() - wall - pause_s[1]
        points["at"].append(len(losses))
        points["perplexity"].append(self.score(student))
        return points | {
            "before": points["perplexity"][0],
            "after": points["perplexity"][-1],
            "options": {k: v for k, v in (options | more).items() if k != "kept"},
            "losses": [round(loss, 4) for loss in losses],
            "s_per_step": round(wall / len(losses), 2),
            "cpu_s_per_step": round(cpu / len(losses), 2),
        }

    def order(self) -> list[int]:
        """Layers from the least important, by block influence."""
        return self.importance("block influence")["by_layer_order"]

    def importance(self, name: str) -> dict:
        ways = {
            "block influence": self.by_influence,
            "perplexity without": self.by_perplexity,
            "heads": lambda: {"scores_LN": rounded(head_importance(self.teacher, self.sample_BT))},
            "neurons": self.neurons,
            "channels": self.channels,
        }
        return self.once("importance", name, ways[name])

    def by_influence(self) -> dict:
        influence_L = block_influence(self.teacher, self.sample_BT)
        order = influence_L.argsort().tolist()
        return {"scores_L": rounded(influence_L), "by_layer_order": order}

    def by_perplexity(self) -> dict:
        """On half the sample: thirty passes."""
        some_BT = self.sample_BT[: CALIBRATION // 2]
        scores_L = torch.tensor(perplexity_without(self.teacher, some_BT))
        whole = perplexity(self.teacher, some_BT)
        return {"windows": len(some_BT), "whole": round(whole, 3), "scores_L": rounded(scores_L),
                "by_layer_order": scores_L.argsort().tolist()}  # fmt: skip

    def neurons(self) -> dict:
        """F numbers a layer are a picture of their own: kept are their deciles."""
        scores_LF = neuron_importance(self.teacher, self.sample_BT)
        deciles_QL = scores_LF.quantile(torch.linspace(0, 1, 11), dim=1)
        return {"quantiles": [i / 10 for i in range(11)], "deciles_LQ": rounded(deciles_QL.T)}

    def channels(self) -> dict:
        return {"scores_D": rounded(channel_importance(self.teacher, self.sample_BT))}

    def speed(self, model: Transformer) -> dict:
        """Tokens a second with a filled cache, in rounds that alternate with the whole model.

        Predicted: as many times as fast as there are fewer bytes to read, weights and cache.
        """
        tokens_BT = self.held_BT[:1, :CONTEXT]
        seconds = {"whole": [], "this": []}
        for _ in range(ROUNDS):
            for name, subject in (("whole", self.teacher), ("this", model)):
                cache = KVCache(subject.config, 1, CONTEXT + DECODED + 1, subject.dtype)
                with torch.inference_mode():
                    subject.features(tokens_BT, cache)
                    subject(tokens_BT[:, :1], cache)
                    start = time.process_time()
                    for _ in range(DECODED):
                        subject(tokens_BT[:, :1], cache)
                    seconds[name].append((time.process_time() - start) / DECODED)
        whole_s, this_s = (statistics.median(times) for times in seconds.values())
        read, all_read = (
            weight_bytes(config, 4) + kv_cache_bytes(config, 1, CONTEXT, 4)
            for config in (model.config, self.teacher.config)
        )
        return {
            "parameters": num_params(model.config),
            "weight_bytes": weight_bytes(model.config, 4),
            "tokens_per_cpu_s": round(1 / this_s, 2),
            "times_as_fast": round(whole_s / this_s, 3),
            "predicted_times_as_fast": round(all_read / read, 3),
        }


def importance(bench: Bench) -> None:
    for name in ("block influence", "heads", "neurons", "channels", "perplexity without"):
        bench.importance(name)


def layers(bench: Bench) -> None:
    """Fewer and fewer layers: before a repair, and for some after a short one."""
    order, teacher = bench.order(), bench.teacher
    for kept in KEPT:
        gone = order[: len(order) - kept]

        def make(gone=gone):
            cut = drop_layers(teacher, gone)
            return {"dropped": sorted(gone), "perplexity": bench.score(cut)} | bench.speed(cut)

        bench.once("layers", str(kept), make)
    for kept in REPAIRED:
        gone = order[: len(order) - kept]
        repaired(bench, gone)
    for name, make in {
        "block influence, measured once": lambda: order[:DROP],
        "perplexity without, measured once":
            lambda: bench.importance("perplexity without")["by_layer_order"][:DROP],
        "block influence, measured after each":
            lambda: greedy_drop(teacher, bench.sample_BT[: CALIBRATION // 2], DROP),
        "the last but one": lambda: list(range(len(order) - 1 - DROP, len(order) - 1)),
        "every third from the second": lambda: list(range(2, len(order) - 1, 3))[:DROP],
    }.items():  # fmt: skip
        bench.once("orders", name, lambda make=make: chosen(bench, make()))


def repaired(bench: Bench, gone: list[int]) -> dict:
    """These layers dropped and the short repair; used by three sections, made once."""
    kept = bench.teacher.config.L - len(gone)
    make = lambda: bench.repair(drop_layers(bench.teacher, gone), SHORT)  # noqa: E731
    return bench.once("layers repaired", str(kept), make)


def chosen(bench: Bench, gone: list[int]) -> dict:
    return {"dropped": gone, "perplexity": bench.score(without(bench.teacher, gone))}


def recovery(bench: Bench) -> None:
    gone = bench.order()[:DROP]
    bench.once("recovery", "whole", lambda: {"perplexity": bench.score(bench.teacher)})
    # What the text alone teaches, with nothing to repair: the study text is of the held-out kind.
    bench.once("recovery", "whole, cross-entropy of the text",
               lambda: bench.repair(copy.deepcopy(bench.teacher), SHORT, text=1.0))  # fmt: skip
    student = drop_layers(bench.teacher, gone)
    bench.once("recovery", f"{DROP} dropped",
               lambda: {"dropped": sorted(gone)} | bench.repair(student, LONG, CURVE))  # fmt: skip


def recipes(bench: Bench) -> None:
    """One budget of steps and tokens for all."""
    gone = bench.order()[:DROP]
    kept = [layer for layer in range(bench.teacher.config.L) if layer not in gone]

    def cut(**more):
        return bench.repair(drop_layers(bench.teacher, gone), SHORT, **more)

    def fresh():
        """No weight of the teacher's: torch's own start, which small models learn well from."""
        torch.manual_seed(SEED)
        student = Transformer(replace(bench.teacher.config, L=len(kept)))
        with torch.no_grad():  # tied: the head's scale, or the first logits are in the hundreds
            student.embed.weight.normal_(0, 0.02)
        return bench.repair(student, SHORT, lr=SCRATCH_LR)

    def rounds():
        cpu, wall = time.process_time(), time.perf_counter()
        student, losses, kept = iterative(
            bench.teacher, bench.study_S, DROP, 2, calibration=CALIBRATION,
            seed=SEED, progress=False, **SHORT,
        )  # fmt: skip
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return {
            "kept": kept,
            "after": bench.score(student),
            "options": SHORT | {"rounds": 2},
            "losses": [round(loss, 4) for loss in losses],
            "s_per_step": round(wall / len(losses), 2),
            "cpu_s_per_step": round(cpu / len(losses), 2),
        }

    for name, make in {
        "KL, T=1": lambda: repaired(bench, gone),
        "cross-entropy of the text": lambda: cut(text=1.0),
        "fresh weights, KL": fresh,
        "KL, T=2": lambda: cut(temperature=2.0),
        "KL and hidden states": lambda: cut(hidden=1.0, kept=kept),
        "KL and cross-entropy": lambda: cut(text=0.5),
        "two rounds of 4": rounds,
    }.items():
        bench.once("recipes", name, make)


def width(bench: Bench) -> None:
    """As many parameters as without 8 layers, taken from elsewhere; the same repair for all."""
    teacher, config = bench.teacher, bench.teacher.config
    target = num_params(replace(config, L=config.L - DROP))

    def narrow(smaller: Config, **scores) -> dict:
        student = prune(teacher, plan_by_importance(config, smaller, **scores))
        return shape(student) | bench.speed(student) | bench.repair(student, SHORT)

    def shallow() -> dict:
        gone = bench.order()[:DROP]
        student = drop_layers(teacher, gone)
        return shape(student) | bench.speed(student) | repaired(bench, gone)

    def shape(student: Transformer) -> dict:
        return {"shape": {name: getattr(student.config, name) for name in "DFKGL"}}

    def fewer_channels() -> dict:
        sizes = {D: abs(num_params(replace(config, D=D)) - target) for D in range(8, config.D, 8)}
        smaller = replace(config, D=min(sizes, key=sizes.get))
        return narrow(smaller, channels_D=channel_importance(teacher, bench.sample_BT))

    ways = {
        "layers": shallow,
        "neurons": lambda: narrow(
            width_for(config, target), neurons_LF=neuron_importance(teacher, bench.sample_BT)
        ),
        "channels": fewer_channels,
    }
    for name, make in ways.items():
        bench.once("width", name, make)


def rounded(x: torch.Tensor) -> list:
    """Four figures are more than rankings need."""
    shorten = lambda v: [shorten(w) for w in v] if isinstance(v, list) else float(f"{v:.4g}")  # noqa: E731
    return shorten(x.tolist())


SECTIONS = {f.__name__: f for f in (importance, layers, recovery, recipes, width)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--again", action="store_true", help="measure anew what is recorded")
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    args.out.parent.mkdir(exist_ok=True)
    bench = Bench(args.out, args.again)
    for name in args.only:
        SECTIONS[name](bench)


if __name__ == "__main__":
    main()
