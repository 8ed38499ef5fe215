"""The table: each technique switched on in turn, then together; predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lecture_util.model.config import Config
from lecture_util.model.text import perplexity
from lecture_util.roofline.hardware import Accelerator, this_machine

from .configuration import Configuration
from .costs import Costs, calibrate, from_peaks
from .predict import Prediction, guess_bytes, predict
from .run import Outcome, serve
from .variants import Variants, predicted_bytes
from .workload import Workload

SLOTS = 12
SERVER = dict(schedule="continuous", slots=SLOTS, pages=True, prefix=True)
# What each row adds to the one before, and then what goes together.
ROWS: tuple[tuple[str, Configuration], ...] = (
    ("naive", Configuration(cache=False)),
    ("KV cache", Configuration()),
    ("a batch of 12", Configuration(schedule="static", slots=SLOTS)),
    ("bf16 weights", Configuration("bf16")),
    ("int8 weights", Configuration("int8")),
    ("4-bit weights", Configuration("int4")),
    ("pruned student", Configuration(student=True)),
    ("n-gram drafts", Configuration(draft="ngram")),
    ("Medusa's heads", Configuration(draft="medusa")),
    ("EAGLE's head", Configuration(draft="eagle")),
    ("continuous batching", Configuration(schedule="continuous", slots=SLOTS)),
    ("+ pages", Configuration(schedule="continuous", slots=SLOTS, pages=True)),
    ("+ prefix sharing", Configuration(**SERVER)),
    ("4-bit, n-gram drafts", Configuration("int4", draft="ngram")),
    ("4-bit, EAGLE's head", Configuration("int4", draft="eagle")),
    ("4-bit student", Configuration("int4", student=True)),
    ("4-bit student, n-gram drafts", Configuration("int4", student=True, draft="ngram")),
    ("server, bf16 weights", Configuration("bf16", **SERVER)),
    ("server, 4-bit weights", Configuration("int4", **SERVER)),
    ("server, student", Configuration(student=True, **SERVER)),
    ("server, 4-bit student", Configuration("int4", student=True, **SERVER)),
)


@dataclass(frozen=True)
class Row:
    """One configuration, on paper by two peaks, by measured parts, and measured.

    perplexity: predicted (the product of what each change costs alone) and measured.
    same_tokens: the share of tokens that are those of the first row.
    """

    label: str
    configuration: Configuration
    limit: Prediction
    predicted: Prediction
    measured: Outcome
    perplexity: tuple[float, float]
    same_tokens: float

    def error(self, what: str) -> float:
        """Predicted over measured, less one; what: "tokens_per_s", "ttft_s", "memory_bytes"."""
        return getattr(self.predicted, what) / getattr(self.measured, what) - 1

    def record(self) -> dict:
        """Plain numbers, for a file."""
        keys = ("tokens_per_s", "ttft_s", "memory_bytes")
        fields = {key: getattr(self.measured, key) for key in keys}
        fields |= {f"predicted_{key}": getattr(self.predicted, key) for key in keys}
        fields |= {f"limit_{key}": getattr(self.limit, key) for key in keys}
        predicted, measured = self.perplexity
        tally = self.measured.tally
        return {
            "label": self.label, "configuration": str(self.configuration), **fields,
            "tpot_s": self.measured.tpot_s, "tokens_per_forward": self.measured.tokens_per_forward,
            "tokens_per_round": tally and tally.tokens_per_round,
            "predicted_perplexity": predicted, "perplexity": measured,
            "same_tokens": self.same_tokens,
        }  # fmt: skip


def make_table(
    variants: Variants,
    workload: Workload,
    questions: Workload,
    held_BT: Tensor,
    rows: Sequence[tuple[str, Configuration]] = ROWS,
    accelerator: Accelerator | None = None,
    rounds: int = 1,
    progress: bool = True,
) -> list[Row]:
    """Predict and measure every row. The first is what `same_tokens` compares with.

    questions: what predictions are calibrated on, none of them in `workload`.
    held_BT:   windows of text that nothing was trained on, for the perplexity.
    rounds:    runs of each row, in turns; the one of median speed is kept.
    Cost:      minutes on two CPU cores, most of them for the row without a cache.
    Raises:    ValueError without rows or rounds, or for questions that are in the workload.
    """
    from tqdm.auto import tqdm

    if not rows or type(rounds) is not int or rounds < 1:
        raise ValueError(f"{len(rows)} rows, rounds={rounds!r}: expected at least one of each")
    if set(map(tuple, workload.prompts)) & set(map(tuple, questions.prompts)):
        raise ValueError(
            "some questions are in the workload too: predictions must be made from others, such "
            "as assistant(tokenizer, 4, start=SERVED)"
        )

    accelerator = this_machine(str(variants.model.device)) if accelerator is None else accelerator
    costs, quality = {}, {}
    configurations = [c for _, c in rows]
    for weights, drafts in _drafts(configurations).items():
        costs[weights] = calibrate(variants, weights, questions, drafts)
    kinds = {("fp32", False)}
    for c in configurations:
        kinds |= {(c.weights, c.student), (c.weights, False), ("fp32", c.student)}
    for weights, student in sorted(kinds):
        quality[weights, student] = perplexity(
            variants.get(weights, student), held_BT.to(variants.model.device)
        )
    outcomes: list[list[Outcome]] = [[] for _ in rows]
    turns = [i for _ in range(rounds) for i in range(len(rows))]
    for i in tqdm(turns, desc="configurations", disable=not progress, leave=False):
        label, c = rows[i]
        outcomes[i].append(serve(variants(c), c, workload))
    table = []
    for (label, c), runs in zip(rows, outcomes, strict=True):
        measured = sorted(runs, key=lambda o: o.tokens_per_s)[len(runs) // 2]
        table.append(
            Row(
                label,
                c,
                _predicted(variants, c, workload, costs[c.weights], accelerator),
                _predicted(variants, c, workload, costs[c.weights]),
                measured,
                (_together(quality, c), quality[c.weights, c.student]),
                measured.same_tokens(outcomes[0][0]),
            )
        )
    return table


def _drafts(configurations: Iterable[Configuration]) -> dict[str, list[str]]:
    """By the numbers of the weights, the drafts to try on them."""
    drafts: dict[str, list[str]] = {}
    for c in configurations:
        of = drafts.setdefault(c.weights, [])
        if c.draft is not None and c.draft not in of:
            of.append(c.draft)
    return drafts


def _predicted(
    variants: Variants,
    c: Configuration,
    workload: Workload,
    costs: Costs,
    accelerator: Accelerator | None = None,
) -> Prediction:
    """By measured parts; by peaks where an accelerator is given. What a draft guesses right is
    measured in both; a student's forwards are the whole model's, shortened as its bytes are."""
    whole, config = variants.model.config, variants(c).config
    if accelerator is not None:
        peaks = from_peaks(config, c.weights, accelerator)
        guess_s = guess_bytes(config, c) / accelerator.bandwidth_bytes_per_s
        costs = replace(
            peaks, guess_s={c.draft: guess_s},
            tokens_per_round=costs.tokens_per_round, drafted=costs.drafted,
        )  # fmt: skip
    elif c.student:
        costs = costs.scaled(bytes_ratio(config, whole, c.weights))
    return predict(config, c, workload, costs)


def bytes_ratio(config: Config, whole: Config, weights: str) -> float:
    """Bytes that a forward of one model reads for weights, over another's."""
    return predicted_bytes(config, weights) / predicted_bytes(whole, weights)


def _together(quality: Mapping[tuple[str, bool], float], c: Configuration) -> float:
    """Each change multiplies the perplexity by what it does alone; all else leaves it as it is."""
    base = quality["fp32", False]
    return quality[c.weights, False] * quality["fp32", c.student] / base


def markdown(records: Iterable[Mapping]) -> str:
    """Records of rows as a table: predicted, measured, and how far off, for each quantity."""
    lines = [
        "| | tok/s limit | predicted | measured | off | first token, predicted | measured | off |"
        " memory, predicted | measured | off | perplexity, predicted | measured | same tokens |",
        "|---|" + "---|" * 13,
    ]
    for r in records:
        cells = [r["label"], f"{r['limit_tokens_per_s']:.0f}"]
        for key, show in (
            ("tokens_per_s", lambda x: f"{x:.0f}" if x >= 100 else f"{x:.3g}"),
            ("ttft_s", lambda x: f"{x:.2f} s" if x >= 0.1 else f"{1e3 * x:.3g} ms"),
            ("memory_bytes", lambda x: f"{x / 1e6:.0f} MB"),
        ):
            predicted, measured = r[f"predicted_{key}"], r[key]
            off = f"{100 * (predicted / measured - 1):+.0f}%"
            cells += [show(predicted), show(measured), off]
        cells += [f"{r['predicted_perplexity']:.1f}", f"{r['perplexity']:.1f}"]
        cells.append(f"{100 * r['same_tokens']:.0f}%")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
