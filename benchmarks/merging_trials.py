"""Does merging work? Every method on tiny models' tasks, and on the reference model's adapters.

Two sections of benchmarks/merging.py. Nothing is timed here, so a busy machine does no harm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor, nn

from lecture_util.merging import tiny_tasks as tiny
from lecture_util.merging.adapters import fine_tuned, hf_views, load_adapter
from lecture_util.merging.landscape import Plane, on_line, on_plane, shell
from lecture_util.merging.plan import merge_states
from lecture_util.merging.real_tasks import TASKS as REAL_TASKS
from lecture_util.merging.real_tasks import score as real_score
from lecture_util.merging.slerp import lerp, slerp
from lecture_util.merging.soups import State, greedy_soup
from lecture_util.merging.task_vectors import cosines, task_vector
from lecture_util.merging.tensors import map_states
from lecture_util.merging.ties import sign_conflicts
from lecture_util.model import weights
from lecture_util.model.text import english_split, perplexity
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.accounting import weight_bytes

TASKS = tiny.PRACTISED
DRAWS = 3  # of random methods: what is recorded is their mean
MERGES = (  # name in the table, method, settings
    ("uniform soup", "linear", {}),
    ("task arithmetic", "task_arithmetic", {"scale": 0.4}),
    ("task arithmetic", "task_arithmetic", {"scale": 1.0}),
    ("TIES", "ties", {"density": 0.2, "scale": 0.8}),
    ("TIES", "ties", {"density": 0.7, "scale": 0.8}),
    ("DARE", "dare_linear", {"density": 0.5, "scale": 0.4}),
    ("DARE-TIES", "dare_ties", {"density": 0.5, "scale": 1.0}),
    ("breadcrumbs", "breadcrumbs", {"density": 0.9, "scale": 0.4}),
    ("DELLA", "della", {"density": 0.5, "scale": 1.0}),
    ("DELLA-linear", "della_linear", {"density": 0.5, "scale": 0.4}),
    ("model stock", "model_stock", {}),
)
REAL_MERGES = (
    ("uniform soup", "linear", {}),
    *(("task arithmetic", "task_arithmetic", {"scale": scale}) for scale in (0.4, 0.6, 0.8, 1.0)),
    ("TIES", "ties", {"density": 0.2, "scale": 1.0}),
    ("TIES", "ties", {"density": 0.7, "scale": 1.0}),
    ("DARE", "dare_linear", {"density": 0.5, "scale": 0.6}),
    ("DARE", "dare_linear", {"density": 0.1, "scale": 0.6}),
    ("DARE-TIES", "dare_ties", {"density": 0.5, "scale": 1.0}),
    ("breadcrumbs", "breadcrumbs", {"density": 0.9, "scale": 0.6}),
    ("DELLA", "della", {"density": 0.5, "scale": 1.0}),
    ("DELLA-linear", "della_linear", {"density": 0.5, "scale": 0.6}),
    ("model stock", "model_stock", {}),
)
SCALES = (0.1, 0.25, 0.4, 0.6, 0.8, 1.0)
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0)
SWEPT = {"ties": 0.8, "dare_linear": 0.4, "dare_ties": 1.0, "breadcrumbs": 0.4, "della": 1.0}
RANDOM = {"dare_linear", "dare_ties", "della", "della_linear"}
LENGTHS, FEW = (tiny.T, 18, 24), "smallest"
ALPHAS = [step / 8 for step in range(9)]
STACKS = {  # half-open ranges of the reference model's 30 layers
    "the model itself": [(0, 30)],
    "one layer twice": [(0, 15), (14, 30)],
    "two layers twice": [(0, 16), (14, 30)],
    "ten layers twice": [(0, 20), (10, 30)],
    "eighteen layers twice": [(0, 24), (6, 30)],
    "two layers left out": [(0, 14), (16, 30)],
}


def trials(small: bool = False) -> dict:
    """Tiny models: one base, a fine-tune for each task, all methods; soups, lines, shells."""
    seeds = (0,) if small else (0, 1, 2)
    runs = []
    for seed in seeds:
        print(f"  seed {seed}", flush=True)
        runs.append(_Trial(seed, small))
    table = {}
    for run in runs:
        for name, parameters, scores in run.table():
            row = table.setdefault(
                (name, str(parameters)),
                {"name": name, "parameters": parameters, "accuracy": [], "loss": []},
            )
            row["accuracy"].append([score.accuracy for score in scores])
            row["loss"].append([score.loss for score in scores])
    for row in table.values():
        means = [sum(accuracy) / len(accuracy) for accuracy in row["accuracy"]]
        settings = ", ".join(f"{k} {v}" for k, v in row["parameters"].items())
        print(f"  {row['name']:22}{settings:26}", " ".join(f"{mean:.3f}" for mean in means))
    return {
        "trials": {
            "seeds": list(seeds),
            "tasks": list(TASKS),
            "draws": DRAWS,
            "table": list(table.values()),
            "scales": [
                {"scale": scale, **_swept(runs, "task_arithmetic", scale=scale)} for scale in SCALES
            ],
            "densities": [
                {"method": name, "density": density, "scale": scale}
                | _swept(runs, name, density=density, scale=scale)
                for name, scale in SWEPT.items()
                for density in (DENSITIES[-1:] if small else DENSITIES)
            ],
            "soups": _by_key([run.soups() for run in runs]) | {"lengths": list(LENGTHS)},
            "line": _by_key([run.lines() for run in runs]) | {"alphas": ALPHAS},
            "plane": runs[0].plane(),
            "shell": runs[0].shell(),
            "cosines": cosines(runs[0].deltas).tolist(),
            "conflicts": [run.conflicts() for run in runs],
            "negation": [
                {"task": task, "weight": weight}
                | {"accuracy": _by_key([run.negated(task, weight) for run in runs])}
                for task in TASKS
                for weight in (-0.5, -1.0)
            ],
        }
    }


def _swept(runs: Sequence[_Trial], name: str, **parameters: float) -> dict[str, list[float]]:
    if name == "della":  # its probabilities must stay between 0 and 1
        density = parameters["density"]
        parameters["epsilon"] = min(0.07, density / 2, (1 - density) / 2)
    scores = [_mean(run.merged(name, parameters)) for run in runs]
    return {"loss": [s.loss for s in scores], "accuracy": [s.accuracy for s in scores]}


def _mean(scores: Sequence[tiny.Score]) -> tiny.Score:
    return tiny.Score(*(sum(part) / len(scores) for part in zip(*scores, strict=True)))


def _by_key(runs: Sequence[Mapping]) -> dict:
    """Per run a dict -> a dict of one entry per run."""
    return {key: [run[key] for run in runs] for key in runs[0]}


class _Trial:
    """One seed: a base and its fine-tunes."""

    def __init__(self, seed: int, small: bool) -> None:
        self.seed, self.steps = seed, {"steps": 3} if small else {}
        self.small, self.B = small, 16 if small else 512
        self.model = tiny.tiny_base(seed, **self.steps)
        self.base = tiny.state(self.model)
        self.tuned = [self.tune(task, seed=i) for i, task in enumerate(TASKS)]
        self.states = [tiny.state(model) for model in self.tuned]
        self.deltas = [map_states(task_vector, self.base, state) for state in self.states]

    def tune(self, task, base: Transformer | None = None, **how) -> Transformer:
        return tiny.fine_tune(base or self.model, task, **how | self.steps)

    def of(self, state: State) -> Transformer:
        return tiny.with_state(self.model, state)

    def scores(self, model: tiny.Model) -> list[tiny.Score]:
        return [tiny.evaluate(model, name, B=self.B) for name in TASKS]

    def merged(self, name: str, parameters: Mapping[str, float]) -> list[tiny.Score]:
        """Scores of a merge, of random methods the mean over draws."""
        draws = [
            self.scores(self.of(merge_states(name, self.states, self.base, seed=i, **parameters)))
            for i in range(DRAWS if name in RANDOM and not self.small else 1)
        ]
        return [_mean(scores) for scores in zip(*draws, strict=True)]

    def table(self):
        yield "base", {}, self.scores(self.model)
        for task, model in zip(TASKS, self.tuned, strict=True):
            yield f"fine-tune {task}", {}, self.scores(model)
        for name, method, parameters in MERGES:
            yield name, parameters, self.merged(method, parameters)
        yield "ensemble", {}, self.scores(tiny.ensemble(self.tuned))
        steps = 4 * 40  # as many as all four fine-tunes had
        yield "multitask", {}, self.scores(self.tune(TASKS, seed=9, steps=steps))

    def soups(self) -> dict:
        """Losses on a task the base never saw, taught by a few examples in six runs."""
        few = tiny.few_examples(FEW, seed=self.seed)
        rates = (1e-3, 2e-3, 4e-3) * 2
        models = [self.tune(few, seed=i, lr=lr, steps=80) for i, lr in enumerate(rates)]
        states = [tiny.state(model) for model in models]
        greedy = greedy_soup(
            states, lambda s: -tiny.evaluate(self.of(s), FEW, B=self.B // 2, seed=5).loss
        )

        def losses(model: tiny.Model) -> list[float]:
            return [tiny.evaluate(model, FEW, T=T, B=self.B).loss for T in LENGTHS]

        return {
            "singles": [losses(model) for model in models],
            "uniform": losses(self.of(merge_states("linear", states))),
            "greedy": losses(self.of(greedy.state)),
            "ensemble": losses(tiny.ensemble(models)),
            "chosen": greedy.chosen,
        }

    def loss(self, state: State, names: Sequence[str] = TASKS) -> float:
        return tiny.mean_score(self.of(state), names, B=self.B).loss

    def lines(self) -> dict:
        """Between two fine-tunes on all tasks: of one base, and of two bases."""
        other = tiny.tiny_base(self.seed + 50, **self.steps)
        one, two, far = (
            tiny.state(self.tune(TASKS, base, seed=seed, lr=1e-3))
            for base, seed in ((self.model, 1), (self.model, 2), (other, 2))
        )
        return {
            "same": on_line(one, two, self.loss, ALPHAS),
            "apart": on_line(one, far, self.loss, ALPHAS),
        }

    def plane(self) -> dict:
        """Mean loss of two tasks around the base and the fine-tunes for those two."""
        pair = [1, 2]  # largest, sum
        names, (a, b) = [TASKS[i] for i in pair], [self.states[i] for i in pair]
        seen = on_plane(
            self.base, a, b, lambda s: self.loss(s, names), steps=3 if self.small else 17
        )
        corners = ["base", *(f"fine-tune {name}" for name in names)]
        soup = Plane.through(self.base, a, b).coordinates(merge_states("linear", [a, b]))
        return {
            "tasks": names,
            "x": seen.x,
            "y": seen.y,
            "loss": seen.values,
            "points": dict(zip(corners, map(list, seen.points), strict=True))
            | {"soup": list(soup)},
        }

    def shell(self) -> dict:
        """Five fine-tunes on all tasks that differ in their batches only."""
        count = 2 if self.small else 5
        tuned = [tiny.state(self.tune(TASKS, seed=i, lr=1e-3)) for i in range(count)]
        return _shell(shell(self.base, tuned))

    def conflicts(self) -> float:
        return sign_conflicts([_flat(delta) for delta in self.deltas])

    def negated(self, task: str, weight: float) -> dict[str, float]:
        """Accuracy on every task after taking one away."""
        given = [weight * (name == task) for name in TASKS]
        scores = self.merged("task_arithmetic", {"weight": given})
        return {name: score.accuracy for name, score in zip(TASKS, scores, strict=True)}


def _flat(state: State) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in state.values()])


def _shell(shells: Mapping) -> dict:
    return {
        "norm_spread": [
            {"name": name, "mean": s.distance, "std": s.distance_std} for name, s in shells.items()
        ],
        "angles": [
            {"name": name, "mean_deg": s.degrees, "std_deg": s.degrees_std}
            for name, s in shells.items()
        ],
    }


@torch.no_grad()
def real(small: bool = False) -> dict:
    """The reference model and its three adapters; and its own layers, stacked anew."""
    count = 2 if small else 64
    model = weights.load("smollm2-135m", device="cpu")
    tokenizer = weights.load_tokenizer("smollm2-135m")
    adapters = [load_adapter(name) for name in REAL_TASKS]
    changed = sorted({name for adapter in adapters for name in adapter.factors})
    part = lambda m: {name: hf_views(m)[name].clone() for name in changed}  # noqa: E731
    base, tuned = part(model), [part(fine_tuned(model, adapter)) for adapter in adapters]
    trial = copy.deepcopy(model)  # the adapters' tensors are all that differs
    views = hf_views(trial)

    def scores(state: State) -> list[float]:
        for name, tensor in state.items():
            views[name].copy_(tensor)
        return [real_score(trial, tokenizer, task, count) for task in REAL_TASKS]

    rows: list[tuple[str, dict, Callable[[], State]]] = [("base", {}, lambda: base)]
    rows += [(f"fine-tune {name}", {}, lambda i=i: tuned[i]) for i, name in enumerate(REAL_TASKS)]
    merges = REAL_MERGES[:2] if small else REAL_MERGES
    rows += [
        (name, p, lambda how=how, p=p: merge_states(how, tuned, base, **p))
        for name, how, p in merges
    ]
    table = []
    for name, parameters, make in rows:
        table.append({"name": name, "parameters": parameters, "scores": scores(make())})
        print(f"  {name:20}{parameters!s:34}", table[-1]["scores"], flush=True)
    deltas = [map_states(task_vector, base, state) for state in tuned]
    return {
        "real": {
            "tasks": list(REAL_TASKS),
            "examples": count,
            "table": table,
            "cosines": cosines(deltas).tolist(),
            "conflicts": sign_conflicts([_flat(delta) for delta in deltas]),
            "norms": [_flat(delta).norm().item() for delta in deltas],
            "base_norm": _flat(base).norm().item(),
            "arc": arcs(tuned, list(REAL_TASKS)),
            "franken": franken(model, tokenizer, small),
        }
    }


def arcs(states: Sequence[State], names: Sequence[str]) -> list[dict]:
    """Between each two fine-tunes: the angle, and how far the arc's middle is from the chord's."""
    rows = []
    for i, j in combinations(range(len(states)), 2):
        a, b = states[i], states[j]
        chord = _flat(map_states(lambda u, v: lerp(u, v, 0.5), a, b)).double()
        arc = _flat(map_states(lambda u, v: slerp(u, v, 0.5), a, b)).double()
        u, v = _flat(a).double(), _flat(b).double()
        apart, together = (u / u.norm() - v / v.norm()).norm(), (u / u.norm() + v / v.norm()).norm()
        rows.append(
            {
                "models": [names[i], names[j]],
                "degrees": math.degrees(2 * math.atan2(apart, together)),
                "relative_difference": ((arc - chord).norm() / chord.norm()).item(),
                "of_their_distance": ((arc - chord).norm() / (u - v).norm()).item(),
            }
        )
    return rows


def franken(model: Transformer, tokenizer, small: bool = False) -> list[dict]:
    """Stacks of the model's own layers: perplexity on English, and bytes a token reads (bf16)."""
    held_BT = english_split(tokenizer)[1][: 2 if small else 64]
    rows = []
    for name, ranges in list(STACKS.items())[: 2 if small else None]:
        layers = [layer for first, stop in ranges for layer in range(first, stop)]
        stack = stacked(model, layers)
        rows.append(
            {
                "name": name,
                "layers": [list(pair) for pair in ranges],
                "depth": len(layers),
                "perplexity": perplexity(stack, held_BT),
                "bytes_per_token": int(weight_bytes(stack.config, 2)),
            }
        )
        print(f"  {name:24}{rows[-1]['perplexity']:10.1f}", flush=True)
    return rows


def stacked(model: Transformer, layers: Sequence[int]) -> Transformer:
    """The model with these of its layers in this order; weights are shared, not copied."""
    stack = copy.copy(model)
    stack._modules = dict(model._modules)
    stack.config = replace(model.config, L=len(layers))
    stack.blocks = nn.ModuleList([model.blocks[layer] for layer in layers])
    return stack
