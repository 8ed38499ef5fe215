"""Speculative decoding on the reference model: what every draft brings, predicted and measured.

    python benchmarks/speculative.py [section ...] [--again] [--quick] [--out FILE]

Sections, with their minutes on two cores: verify_cost 1, early_exits 6, chen 3, lookup 1,
grounded 6, drafters 8, trees 3, hf_assisted 1, examples 1. Each part is written to
benchmarks/results/speculative.json when it is done, and a second run goes on where the first was
stopped; --again measures anew. --quick goes through it all with few tokens, to see that it works.

Speeds are tokens a second after the first forward: that one reads the prompt, and it and what it
yields are left out, for everybody alike. Contenders take turns on each prompt, on the same weights.
A speed-up is predicted from the tokens a round, the measured cost of verifying so many rows, and
the time the draft took.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
from contenders import (
    EOS,
    WIDTH,
    Nothing,
    Run,
    first_difference,
    peer,
    plain,
    race,
    rate,
    rounds_of,
    speculated,
    tally_of,
)
from transformers import AutoModelForCausalLM

from lecture_util.model import weights
from lecture_util.model.checkpoint import save_folder
from lecture_util.model.generate import generate
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.sampling import GREEDY, Sampling
from lecture_util.model.tokenizer import chat
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.hardware import processor
from lecture_util.roofline.timing import measure
from lecture_util.speculative.draft import NOTHING
from lecture_util.speculative.draft_model import ModelDrafter, early_exit
from lecture_util.speculative.expected import speedup
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.prompts import grounded_prompts, held_prompts
from lecture_util.speculative.speculate import Round, speculate
from lecture_util.speculative.target import Reader
from lecture_util.speculative.trained import eagle_drafter, medusa_drafter
from lecture_util.speculative.verify import Chance, agreement

RESULTS = Path(__file__).parent / "results"
RECORD = RESULTS / "speculative.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ONE = "bfloat16"  # where one dtype must do
CACHED = 256  # tokens held when a forward's cost is measured
ROWS = (1, 2, 3, 5, 9, 17, 33)
GAMMAS = range(8)  # the numbers of guesses on Chen's axis
NGRAM = {"longest": 4, "shortest": 2, "k": 8}
LOOKUPS = [
    {"longest": longest, "shortest": shortest, "k": k, "latest": latest}
    for longest, shortest in ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (4, 3))
    for k in (4, 8, 12, 16)
    for latest in (True, False)
]
DROPS, EXIT_GAMMAS = (2, 4, 6, 8), (1, 2, 3, 5)
EXIT = {"dropped": 4, "gamma": 2}
MEDUSA = {"size": 4}
EAGLE = {"depth": 2, "width": 2, "size": 4}
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
SHAPES = (
    {"depth": 1, "width": 1, "size": 1},
    {"depth": 2, "width": 1, "size": 2},
    {"depth": 3, "width": 1, "size": 3},
    {"depth": 2, "width": 2, "size": 4},
    {"depth": 3, "width": 2, "size": 4},
    {"depth": 4, "width": 2, "size": 6},
    {"depth": 4, "width": 3, "size": 8},
    {"depth": 5, "width": 4, "size": 12},
    {"depth": 5, "width": 4, "size": 16},
)
HF_LOOKUP = {"prompt_lookup_num_tokens": 8}
WARM = Sampling(temperature=0.8, top_p=0.95)


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    held: int = 20  # prompts
    few: int = 4
    new: int = 64  # tokens
    grounded: int = 96
    repeats: int = 2
    batches: Sequence[int] = (1, 8, 32)


QUICK = Size(held=2, few=1, new=10, grounded=14, repeats=1, batches=(1, 2, 4))


def ngram_drafter(**changed):
    return lambda reader: NgramDrafter(banned=EOS, **(NGRAM | changed))


@cache
def ours(dtype: str) -> Transformer:
    return weights.load(dtype=DTYPES[dtype], device="cpu")


@cache
def theirs(dtype: str):
    return AutoModelForCausalLM.from_pretrained(weights.locate(), dtype=DTYPES[dtype]).eval()


class Bench:
    """Models, prompts, and the record that grows."""

    def __init__(self, out: Path, again: bool, size: Size) -> None:
        self.out, self.again, self.size = out, again, size
        self.made, self.costs, self.answered = set(), {}, {}
        self.tokenizer = weights.load_tokenizer()
        self.held = [chat(self.tokenizer, prompt) for prompt in held_prompts(size.held)]
        self.few = self.held[: size.few]
        self.grounded = [
            (task, prompt, chat(self.tokenizer, prompt)) for task, prompt in grounded_prompts()
        ]

    def read(self) -> dict:
        return json.loads(self.out.read_text()) if self.out.exists() else {}

    def once(self, path: tuple[str, ...], make: Callable[[], object]):
        """What the record holds at `path`, made and written if it isn't there."""
        found = self.read()
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if found is not None and (not self.again or path in self.made):
            return found
        start = time.perf_counter()
        made = make()
        self.made.add(path)
        document = self.read() | about()
        at = document
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = made
        self.out.parent.mkdir(exist_ok=True)
        scratch = self.out.with_suffix(".part")
        scratch.write_text(dumps(document) + "\n", encoding="utf-8")
        scratch.replace(self.out)
        print(f"{' / '.join(path)}: {time.perf_counter() - start:.0f} s", flush=True)
        return made

    def cost(self, dtype: str, rows: float) -> float:
        """A verifying forward over so many rows, in ms, as measured."""
        if dtype not in self.costs:
            made = self.once(("verify_cost", dtype), lambda: measure_cost(self, dtype))
            self.costs[dtype] = made["1"]
        return float(np.interp(rows, self.costs[dtype]["T"], self.costs[dtype]["ms"]))

    def predicted(self, dtype: str, rounds: Sequence[Round], draft_ms: float) -> float:
        """Tokens a round over what a round costs, against a step of one token."""
        verifying = np.mean([self.cost(dtype, len(r.draft) + 1) for r in rounds])
        tokens = tally_of(rounds).tokens_per_round
        return tokens / ((verifying + draft_ms) / self.cost(dtype, 1))

    def exit_layers(self, dropped: int) -> list[int]:
        """The layers left without the least important, as benchmarks/pruning.py ranked them."""
        ranked = json.loads((RESULTS / "pruning.json").read_text())["importance"]
        order = ranked["block influence"]["by_layer_order"]
        return sorted(order[dropped:])

    def exit_drafter(self, dtype: str, dropped: int, gamma: int, sampling=GREEDY):
        small = early_exit(ours(dtype), self.exit_layers(dropped))
        return lambda reader: ModelDrafter(Reader(small, reader.cache.capacity), gamma, sampling)

    def drafters(self, dtype: str) -> dict[str, tuple[dict, Callable]]:
        """Name -> its setting, and what makes it."""
        model = ours(dtype)
        return {
            "ngram": (NGRAM, ngram_drafter()),
            "early_exit": (EXIT, self.exit_drafter(dtype, **EXIT)),
            "medusa": (MEDUSA, medusa_drafter(model, **MEDUSA)),
            "eagle": (EAGLE, eagle_drafter(model, **EAGLE)),
        }

    def answers(self, which: str) -> list[tuple[list[int], list[int]]]:
        """(prompt, greedy answer) of the "held" or "grounded" prompts, all at once, in fp32."""
        ids = self.held if which == "held" else [ids for _, _, ids in self.grounded]
        n = self.size.new if which == "held" else self.size.grounded
        if which not in self.answered:
            self.answered[which] = generate(ours("float32"), ids, n, eos=EOS)
        return list(zip(ids, self.answered[which], strict=True))


def measure_cost(bench: Bench, dtype: str) -> dict:
    """Forwards over T tokens with 256 held, for B rows; all T logits, as verifying needs them."""
    model, costs = ours(dtype), {}
    for B in bench.size.batches:
        cache = filled(model, B)
        ms = []
        for T in ROWS:
            tokens_BT = torch.arange(T).expand(B, T) + 100

            def step(cache=cache, tokens_BT=tokens_BT):
                with torch.inference_mode():
                    model(tokens_BT, cache)
                    cache.truncate(CACHED)

            ms.append(round(1e3 * measure(step, repeats=15 if B == 1 else 4).median_s, 2))
        costs[str(B)] = {"T": list(ROWS), "ms": ms}
        print(f"  {dtype}, B={B}: {ms} ms", flush=True)
    return costs


def filled(model, B: int) -> KVCache:
    """A cache that holds 256 tokens in each of B rows: one row, repeated."""
    one = KVCache(model.config, 1, CACHED, model.dtype)
    with torch.inference_mode():
        model.features(torch.arange(CACHED)[None] + 500, one)
    cache = KVCache(model.config, B, CACHED + max(ROWS), model.dtype)
    cache.k_LBSKH[:, :, :CACHED], cache.v_LBSKH[:, :, :CACHED] = one.k_LBSKH, one.v_LBSKH
    cache.lengths = [CACHED] * B
    return cache


def verify_cost(bench: Bench) -> None:
    for dtype in DTYPES:
        bench.cost(dtype, 1)


def early_exits(bench: Bench) -> None:
    """The same model with fewer layers: how often it agrees, what it costs, what it brings."""
    model = ours(ONE)

    def agreed(small) -> tuple[float, float]:
        """Shares of the answers' positions: same first choice, and mean sum of min(p, q)."""
        same, shared = [], []
        for ids, answer in bench.answers("held"):
            tokens_1T = torch.tensor([[*ids, *answer]])
            with torch.inference_mode():
                x, y = (m(tokens_1T)[0, len(ids) - 1 : -1].float() for m in (model, small))
            same.append((x.argmax(-1) == y.argmax(-1)).float())
            shared.append(agreement(x.softmax(-1), y.softmax(-1)))
        return torch.cat(same).mean().item(), torch.cat(shared).mean().item()

    def one_token(m) -> float:
        cache, token_11 = filled(m, 1), torch.tensor([[100]])

        def step():
            with torch.inference_mode():
                m(token_11, cache)
                cache.truncate(CACHED)

        return measure(step, repeats=25, warmup=3).median_s

    def entry(dropped: int) -> dict:
        kept = bench.exit_layers(dropped)
        small = early_exit(model, kept)
        greedy, sampled = agreed(small)
        c = one_token(small) / one_token(model)
        contenders = {0: lambda reader: Nothing()} | {
            gamma: bench.exit_drafter(ONE, dropped, gamma) for gamma in EXIT_GAMMAS
        }
        runs = all_runs(bench, model, contenders, bench.few)
        return {
            "dropped": sorted(set(range(model.config.L)) - set(kept)),
            "layers": len(kept),
            "alpha_greedy": greedy,
            "alpha_sampled": sampled,
            "c": c,
            "dtype": ONE,
            "gamma": {
                str(gamma): {
                    "tokens_per_round": tally_of(rounds_of(runs[gamma])).tokens_per_round,
                    "speedup": rate(runs[gamma]) / rate(runs[0]),
                    "predicted": speedup(
                        greedy, gamma, c, bench.cost(ONE, gamma + 1) / bench.cost(ONE, 1)
                    ),
                }
                for gamma in EXIT_GAMMAS
            },
        }

    bench.once(("early_exits",), lambda: [entry(dropped) for dropped in DROPS])


def all_runs(bench: Bench, model, contenders: dict, prompts, n=None) -> dict[object, list[Run]]:
    """name -> one run a prompt, through `speculated`."""
    runs: dict[object, list[Run]] = {name: [] for name in contenders}
    for turn, ids in enumerate(prompts):
        best = race(
            {
                name: lambda new=new, ids=ids: speculated(model, new, ids, n or bench.size.new)
                for name, new in contenders.items()
            },
            1,
            turn,
        )
        for name, run in best.items():
            runs[name].append(run)
    return runs


def chen(bench: Bench) -> None:
    """Chen's three panels: kept share, time of a loop, time of 128 tokens, against the guesses."""
    grounded = [ids for _, _, ids in bench.grounded][:: 10 // bench.size.few]

    def panels(new_drafter: Callable[[int], Callable], prompts) -> list[dict]:
        contenders = {gamma: new_drafter(gamma) for gamma in GAMMAS if gamma}
        contenders[0] = lambda reader: Nothing()
        runs, found = all_runs(bench, ours(ONE), contenders, prompts), []
        for gamma in GAMMAS:
            tally = tally_of(rounds_of(runs[gamma]))
            seconds = sum(run.decode_s for run in runs[gamma])
            found.append(
                {
                    "gamma": gamma,
                    "accepted_share": tally.accepted / tally.drafted if tally.drafted else 1.0,
                    "loop_ms": 1e3 * seconds / tally.rounds,
                    "ms_per_128_tokens": 1e3 * 128 * seconds / tally.tokens,
                    "tokens_per_round": tally.tokens_per_round,
                    "dtype": ONE,
                }
            )
        return found

    def ngram(gamma: int):
        return ngram_drafter(k=gamma)

    def small(gamma: int):
        return bench.exit_drafter(ONE, EXIT["dropped"], gamma)

    bench.once(("chen", "ngram"), lambda: panels(ngram, grounded))
    bench.once(("chen", "early_exit"), lambda: panels(small, bench.few))


def replay(ids: Sequence[int], answer: Sequence[int], drafter) -> list[Round]:
    """The rounds that would have led to this greedy answer. No model: its choices are known."""
    at = 0

    class Known:
        def __call__(self, tokens, draft=NOTHING):
            nonlocal at
            at = len(tokens) - len(ids)

        def keep(self, path):
            pass

    def follow(_, draft, sampling, chance):
        right = 0
        while right < len(draft) and draft.tokens[right] == answer[at + right]:
            right += 1
        return list(range(right)), answer[at + right]

    return list(speculate(Known(), drafter, ids, len(answer), verify=follow))[1:]


def lookup(bench: Bench) -> None:
    """Every setting of the n-gram lookup, on all answers."""

    def entry(setting: dict) -> dict:
        found = {}
        for which in ("grounded", "held"):
            drafter = NgramDrafter(banned=EOS, **setting)
            rounds = [r for pair in bench.answers(which) for r in replay(*pair, drafter)]
            found[which] = {"tokens_per_round": tally_of(rounds).tokens_per_round} | {
                f"predicted_{dtype}": bench.predicted(dtype, rounds, 0.0) for dtype in DTYPES
            }
        return setting | found

    bench.once(("lookup",), lambda: [entry(setting) for setting in LOOKUPS])


def grounded(bench: Bench) -> None:
    """Answers that repeat their prompt: n-gram drafts against transformers' prompt lookup."""
    n, drafter = bench.size.grounded, ngram_drafter()

    def entry(turn: int, task: str, prompt: str, ids: list[int], dtype: str) -> dict:
        model, other = ours(dtype), theirs(dtype)
        contenders = {
            "plain": lambda: plain(model, ids, n),
            "ngram": lambda: speculated(model, drafter, ids, n),
            "hf_plain": lambda: peer(other, ids, n),
            "hf_lookup": lambda: peer(other, ids, n, **HF_LOOKUP),
        }
        best = race(contenders, bench.size.repeats, turn)
        drafted = best["ngram"]
        rates = {name: rate([run]) for name, run in best.items()}
        print(f"  {task}, {dtype}: " + ", ".join(f"{k} {v:.1f}" for k, v in rates.items()))
        return {
            "task": task,
            "dtype": dtype,
            "prompt": prompt.partition("\n")[0],
            "tokens": len(best["plain"].tokens),
            **rates,
            "with_prompt": {
                name: len(run.tokens) / (run.prompt_s + run.decode_s) for name, run in best.items()
            },
            "ngram_tokens_per_round": tally_of(drafted.rounds).tokens_per_round,
            "ngram_predicted": bench.predicted(
                dtype, drafted.rounds, 1e3 * drafted.parts_s["draft"] / len(drafted.rounds)
            ),
            "same": first_difference(drafted.tokens, best["plain"].tokens),
            "hf_same": first_difference(best["hf_plain"].tokens, best["plain"].tokens),
            "profile": profile([drafted]),
        }

    bench.once(
        ("grounded",),
        lambda: [
            entry(turn, *one, dtype) for dtype in DTYPES for turn, one in enumerate(bench.grounded)
        ],
    )


def profile(runs: Sequence[Run]) -> dict[str, float]:
    """Where a round's time goes: the guesses, the target's forward, accepting, and the rest."""
    n = sum(len(run.rounds) for run in runs)
    parts = {
        f"{part}_ms": 1e3 * sum(run.parts_s[part] for run in runs) / n for part in runs[0].parts_s
    }
    return parts | {"other_ms": 1e3 * sum(run.decode_s for run in runs) / n - sum(parts.values())}


def drafters(bench: Bench) -> None:
    """Every draft on questions of every kind, whose answers repeat little."""
    n, held = bench.size.new, bench.held

    def entries(dtype: str) -> dict[str, dict]:
        model, subjects = ours(dtype), bench.drafters(dtype)
        runs: dict[str, list[Run]] = {name: [] for name in ("plain", *subjects)}
        for turn, ids in enumerate(held):
            contenders = {"plain": lambda ids=ids: plain(model, ids, n)} | {
                name: lambda new=new, ids=ids: speculated(model, new, ids, n)
                for name, (_, new) in subjects.items()
            }
            for name, run in race(contenders, 1, turn).items():
                runs[name].append(run)
        return {
            name: entry(dtype, setting, runs[name], runs["plain"])
            for name, (setting, _) in subjects.items()
        }

    def entry(dtype: str, setting: dict, runs: list[Run], plain_runs: list[Run]) -> dict:
        rounds, spent = rounds_of(runs), profile(runs)
        tally, speeds = tally_of(rounds), (rate(runs), rate(plain_runs))
        return {
            "tokens": tally.tokens,
            "rounds": tally.rounds,
            "tokens_per_round": tally.tokens_per_round,
            "acceptance": tally.acceptance,
            "by_length": {str(k): v for k, v in sorted(tally.by_length.items())},
            "tokens_per_s": speeds[0],
            "plain_tokens_per_s": speeds[1],
            "speedup": speeds[0] / speeds[1],
            "predicted": bench.predicted(dtype, rounds, spent["draft_ms"]),
            "profile": spent,
            "setting": setting,
            "differs": [
                {"prompt": i, "at": at, "top2_gap": gap(dtype, held[i], base.tokens[:at])}
                for i, (run, base) in enumerate(zip(runs, plain_runs, strict=True))
                if (at := first_difference(run.tokens, base.tokens)) is not None
            ],
        }

    def gap(dtype: str, ids: list[int], answer: list[int]) -> float:
        """How far apart the two best logits lie where plain decoding chose its next token."""
        with torch.inference_mode():
            logits_V = ours(dtype)(torch.tensor([[*ids, *answer]]))[0, -1].float()
        best, second = logits_V.topk(2).values.tolist()
        return best - second

    def both() -> dict:
        found: dict[str, dict] = {}
        for dtype in DTYPES:
            for name, made in entries(dtype).items():
                found.setdefault(name, {})[dtype] = made
        return found

    made = bench.once(("drafters",), both)
    bench.once(("bf16_ties",), lambda: ties(bench, made))


def ties(bench: Bench, made: dict) -> list[dict]:
    """Prompt by prompt: is a drafted answer plain decoding's, and how near was the choice if not?

    In bf16 a forward over several rows rounds otherwise than one over a single row, so of two
    logits that lie within that rounding either may win.
    """
    prompts, found = held_prompts(bench.size.held), []
    for name, entry in made.items():
        differs = {
            dtype: {one["prompt"]: one for one in entry[dtype]["differs"]} for dtype in DTYPES
        }
        for i, prompt in enumerate(prompts):
            there = differs["bfloat16"].get(i, {})
            found.append(
                {
                    "prompt": prompt,
                    "drafter": name,
                    "fp32_same": i not in differs["float32"],
                    "bf16_first_difference": there.get("at"),
                    "top2_gap": there.get("top2_gap"),
                }
            )
    return found


def trees(bench: Bench) -> None:
    """Larger trees accept more and cost more."""
    model = ours(ONE)

    def entries(new_drafter: Callable, settings: Sequence[dict]) -> list[dict]:
        contenders: dict = {None: lambda reader: Nothing()}
        contenders |= {i: new_drafter(model, **setting) for i, setting in enumerate(settings)}
        runs = all_runs(bench, model, contenders, bench.few)
        return [
            setting
            | {
                "tokens_per_round": tally_of(rounds_of(runs[i])).tokens_per_round,
                "speedup": rate(runs[i]) / rate(runs[None]),
                "dtype": ONE,
            }
            for i, setting in enumerate(settings)
        ]

    sizes = [{"size": size} for size in SIZES]
    bench.once(("trees", "medusa"), lambda: entries(medusa_drafter, sizes))
    bench.once(("trees", "eagle"), lambda: entries(eagle_drafter, SHAPES))


def hf_assisted(bench: Bench) -> None:
    """transformers with the same early exit as its assistant, as many guesses a round; and ours."""
    n = bench.size.new

    def entry() -> dict:
        model, other = ours(ONE), theirs(ONE)
        small = early_exit(model, bench.exit_layers(EXIT["dropped"]))
        with tempfile.TemporaryDirectory() as scratch:
            folder = save_folder(small, Path(scratch) / "exit")
            assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[ONE]).eval()
        options = assistant.generation_config
        options.num_assistant_tokens = EXIT["gamma"]
        options.num_assistant_tokens_schedule = "constant"
        options.assistant_confidence_threshold = 0.0
        drafter = bench.exit_drafter(ONE, **EXIT)
        runs: dict[str, list[Run]] = {}
        for turn, ids in enumerate(bench.few):
            contenders = {
                "tokens_per_s": lambda ids=ids: peer(other, ids, n, assistant_model=assistant),
                "plain_tokens_per_s": lambda ids=ids: peer(other, ids, n),
                "ours": lambda ids=ids: speculated(model, drafter, ids, n),
                "ours_plain": lambda ids=ids: plain(model, ids, n),
            }
            for name, run in race(contenders, 1, turn).items():
                runs.setdefault(name, []).append(run)
        return {"dtype": ONE, "setting": EXIT} | {name: rate(one) for name, one in runs.items()}

    bench.once(("hf_assisted",), entry)


def examples(bench: Bench) -> None:
    """Rounds word by word, in fp32: each draft greedily, and one of them sampling."""
    question, edit = held_prompts(1)[0], bench.grounded[2][1]

    def entry(new_drafter: Callable, prompt: str, sampling: Sampling = GREEDY) -> dict:
        ids = chat(bench.tokenizer, prompt)
        model, n = ours("float32"), min(48, bench.size.new)
        reader = Reader(model, len(ids) + n + WIDTH)
        chance = Chance(torch.Generator().manual_seed(0))
        rounds = speculate(
            reader, new_drafter(reader), ids, n, sampling=sampling, eos=EOS, chance=chance
        )
        return {"prompt": prompt, "rounds": [told(r) for r in rounds]}

    def told(r: Round) -> dict:
        words = lambda tokens: [bench.tokenizer.decode([token]) for token in tokens]  # noqa: E731
        return {
            "guesses": words(r.draft.tokens),
            "parents": list(r.draft.parents),
            "accepted": r.accepted,
            "tokens": words(r.tokens),
            "last": r.last,
        }

    def every() -> dict:
        subjects = bench.drafters("float32")
        found = {
            name: entry(new, edit if name == "ngram" else question)
            for name, (_, new) in subjects.items()
        }
        warm = bench.exit_drafter("float32", **EXIT, sampling=WARM)
        return found | {"early_exit, sampled": entry(warm, question, WARM)}

    bench.once(("examples",), every)


def dumps(document: dict) -> str:
    """JSON to be read by people too: numbers in four figures, short lists on one line."""

    def rounded(x):
        if isinstance(x, float):
            return float(f"{x:.4g}")
        if isinstance(x, dict):
            return {key: rounded(value) for key, value in x.items()}
        return [rounded(value) for value in x] if isinstance(x, list | tuple) else x

    return json.dumps(rounded(document), indent=1)


def about() -> dict:
    return {
        "date": date.today().isoformat(),
        "model": weights.locate().name,
        "machine": {
            "hardware": f"{processor()}, {torch.get_num_threads()} threads",
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        },
    }


SECTIONS = {
    section.__name__: section
    for section in (
        verify_cost, early_exits, chen, lookup, grounded, drafters, trees, hf_assisted, examples,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--again", action="store_true", help="measure anew what is recorded")
    parser.add_argument("--quick", action="store_true", help="few tokens; not into the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(unknown)}: there are {', '.join(SECTIONS)}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    out = args.out or (Path(tempfile.gettempdir()) / RECORD.name if args.quick else RECORD)
    bench = Bench(out, args.again, QUICK if args.quick else Size())
    for name in args.sections or SECTIONS:
        SECTIONS[name](bench)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
