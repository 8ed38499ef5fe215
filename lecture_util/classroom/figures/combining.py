"""Still figure of notebook 12: which techniques multiply, compete, or exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

from lecture_util.classroom.figures.diagram import box, canvas, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    WEIGHTS,
)
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline.accounting import forward
from lecture_util.roofline.hardware import Accelerator
from lecture_util.speculative.expected import expected_tokens
from lecture_util.together.configuration import Configuration, Incompatible
from lecture_util.together.costs import Costs, from_peaks
from lecture_util.together.predict import head_bytes, predict
from lecture_util.together.scenarios import LAPTOP
from lecture_util.together.student import student_facts
from lecture_util.together.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SLOTS, GUESSES, ACCEPTED = 12, 4, 0.8
# What each switches on, beside a cache, which all have.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "4-bit weights": {"weights": "int4"},
    "student": {"student": True},
    "batching": {"schedule": "continuous", "slots": SLOTS},
    "pages": {"pages": True},
    "shared prefix": {"prefix": True},
    "n-gram drafts": {"draft": "ngram"},
    "EAGLE's head": {"draft": "eagle"},
}
MORE, TIMES, LESS, NONE = "more than the product", "multiply", "compete", "no change in speed"
NEEDS, NOT = "one needs the other", "exclude each other"
LOOKS = {TIMES: GUESS, MORE: WEIGHTS, LESS: CACHE, NONE: MUTED, NEEDS: ACCENT, NOT: MEASURED}
CLOSE = 0.05  # of the product: so near counts as it


def made_up(
    requests: int = SLOTS, shared: int = 256, asks: int = 24, new: int = 32, name: str = "made up"
) -> Workload:
    """Questions after a common beginning; the answers' lengths go round a half, one and two `new`.

    Tokens are numbers that mean nothing: all that counts on paper is which are equal.
    """
    beginning = range(shared)
    prompts = [
        (*beginning, *range(shared + asks * i, shared + asks * (i + 1))) for i in range(requests)
    ]
    answers = [max(1, new * (1, 2, 4)[i % 3] // 2) for i in range(requests)]
    return Workload(name, tuple(prompts), tuple(answers), (0.0,) * requests)


def cut_config(config: Config) -> Config:
    """The student's shape: the share of layers that the course's own student keeps."""
    facts = student_facts()
    kept = 1 - len(facts["dropped"]) / facts["config"]["L"]
    return replace(config, L=max(1, round(kept * config.L)))


def costs_on(
    config: Config,
    c: Configuration,
    machine: Accelerator,
    tokens_per_round: float,
    overhead_s: float = 0.0,
) -> Costs:
    """Costs by two peaks. tokens_per_round is assumed: no formula knows what is guessed right.

    A trained head is read once a guess; Medusa's make all guesses of a round at once.
    """
    peaks = from_peaks(config, c.weights, machine, overhead_s)
    if c.draft is None:
        return peaks
    reads = 1 / c.guesses if c.draft == "medusa" else 1
    return replace(
        peaks,
        guess_s={c.draft: reads * head_bytes(config, c) / machine.bandwidth_bytes_per_s},
        tokens_per_round={c.draft: tokens_per_round},
        drafted={c.draft: float(c.guesses)},
    )


def whole(names: Sequence[str]) -> Configuration | None:
    """All of these together, if they go together."""
    fields: dict[str, Any] = {}
    for name in names:
        if fields.keys() & TECHNIQUES[name].keys():
            return None  # one draft at a time
        fields |= TECHNIQUES[name]
    try:
        return Configuration(guesses=GUESSES, **fields)
    except Incompatible:
        return None


@cache
def needs(name: str) -> tuple[str, ...]:
    """The fewest other techniques without which this one is refused."""
    others = [other for other in TECHNIQUES if other != name]
    for count in range(len(others) + 1):
        for found in combinations(others, count):
            if whole((*found, name)) is not None:
                return found
    raise AssertionError(f"{name} goes with nothing")


@cache
def speed(names: tuple[str, ...]) -> float:
    """Tokens a second by two peaks of the laptop, for the reference model's shape."""
    c = whole(names)
    config = PUBLISHED["smollm2-135m"]
    config = cut_config(config) if c.student else config
    costs = costs_on(config, c, LAPTOP, expected_tokens(ACCEPTED, GUESSES))
    return predict(config, c, made_up(), costs).tokens_per_s


@dataclass(frozen=True)
class Pair:
    """Two techniques. share: the speed-up of both over the product of the two, where there is one;
    with drafts in a batch, which our code refuses, by the time of a step alone."""

    kind: str
    share: float | None = None


def pair(a: str, b: str) -> Pair:
    """Decided in this order: by what `Configuration` refuses, then by predicted tokens a second."""
    ground = tuple(dict.fromkeys((*needs(a), *needs(b))))
    if a in ground or b in ground:
        return Pair(NEEDS)
    if whole((*ground, a, b)) is None:
        drafts = any("draft" in TECHNIQUES[name] for name in (a, b))
        return Pair(NOT, drafts_in_a_batch() if "batching" in (a, b) and drafts else None)
    none, one, other, both = (speed((*ground, *names)) for names in ((), (a,), (b,), (a, b)))
    share = both * none / (one * other)
    if min(abs(one / none - 1), abs(other / none - 1)) < 0.01:
        return Pair(NONE, share)
    return Pair(MORE if share > 1 + CLOSE else TIMES if share > 1 - CLOSE else LESS, share)


def drafts_in_a_batch() -> float:
    """What a batch leaves of the gain from guesses that cost nothing."""
    config, S = PUBLISHED["smollm2-135m"], max(map(len, made_up().prompts))

    def seconds(B: int, T: int) -> float:
        cost = forward(config, B, T, S + T, causal=True, dtype_bytes=4)
        return cost.time_s(LAPTOP, "fp32")

    alone, many = (seconds(B, 1) / seconds(B, 1 + GUESSES) for B in (1, SLOTS))
    return many / alone


SHORT = {MORE: "more", TIMES: "multiply", LESS: "less", NONE: "no change", NEEDS: "needs it",
         NOT: "excluded"}  # fmt: skip
MEANS = {
    TIMES: f"within {100 * CLOSE:.0f}% of the product",
    MORE: "they shorten different parts of the time",
    LESS: "the same part, or the same idle computing",
    NONE: "one of them saves bytes, not seconds",
    NEEDS: "pages want a batch, prefixes want pages",
    NOT: "by our code; in brackets: by formula",
}
TITLE = "Few pairs simply multiply; some compete, some exclude each other"


def table() -> dict[tuple[str, str], Pair]:
    """Every pair, the earlier technique first."""
    return {(a, b): pair(a, b) for a, b in combinations(TECHNIQUES, 2)}


@figure(
    name="what-combines",
    title=TITLE,
    answers=[],
    notebook="12",
    alt="A triangle of 7 techniques by 7: 4-bit weights, student, batching, pages, shared prefix, "
    "n-gram drafts, EAGLE's head. The student multiplies with all but EAGLE's head, which excludes "
    "it; 4 bits gain less in a batch (0.69 of the product) and with drafts, more with a shared "
    "prefix (1.31); pages change no speed; prefix, pages and batching need one another; drafts "
    "exclude batches, pages, prefixes and each other.",
    sources=[
        "excluded: lecture_util.together.configuration; speeds: lecture_util.together.predict, by "
        "the two peaks of the made-up laptop of lecture_util.together.scenarios",
    ],
)
def what_combines() -> Figure:
    fig, ax = canvas(15, 9.2, TITLE)
    names, pairs, width, height, left, top = [*TECHNIQUES], table(), 1.77, 1.1, 2.4, 9.0
    for row, name in enumerate(names):
        y, x = top - height * (row + 1), left + width * row
        write(ax, left - 0.15, y + height / 2, name, 14.5, ha="right", weight="bold")
        for column, other in enumerate(names[:row]):
            _cell(ax, left + width * column, y, width, height, pairs[other, name])
        alone = speed((*needs(name), name)) / speed(needs(name))
        box(ax, x + 0.05, y + 0.05, width - 0.1, height - 0.1, color=INK, strength=0)
        write(ax, x + width / 2, y + 0.72, name, 12, zorder=4)
        write(ax, x + width / 2, y + 0.34, f"{alone:.2f}×", 14.5, zorder=4, weight="bold")
    for k, (kind, words) in enumerate(MEANS.items()):
        y = 8.75 - 0.5 * k
        box(ax, 8.0, y - 0.17, 0.4, 0.36, color=LOOKS[kind], strength=0.45, rounded=False)
        write(ax, 8.6, y, SHORT[kind], 13.5, ha="left", weight="bold")
        write(ax, 10.05, y, words, 12.5, ha="left")
    note = (
        "White: a technique's own gain in tokens a second. Coloured: the gain of both over the "
        "product of their own. By formula: SmolLM2-135M\non a made-up laptop (30 GB/s, fp32 0.4 "
        f"TFLOP/s), {SLOTS} questions about 256 shared tokens, {GUESSES} guesses a round, "
        f"{100 * ACCEPTED:.0f}% of them right (assumed)"
    )
    write(ax, 0.3, 0.65, note, 12, ha="left", color=MUTED)
    return fig


def _cell(ax: Axes, x: float, y: float, width: float, height: float, found: Pair) -> None:
    box(ax, x + 0.05, y + 0.05, width - 0.1, height - 0.1, color=LOOKS[found.kind], strength=0.45,
        rounded=False)  # fmt: skip
    number = found.kind in (MORE, TIMES, LESS)
    lines = [SHORT[found.kind]]
    if number:
        lines.append(f"× {found.share:.2f}")
    elif found.kind == NOT and found.share is not None:
        lines.append(f"(× {found.share:.2f})")
    middle = y + height / 2
    write(ax, x + width / 2, middle + 0.2 * (len(lines) - 1), lines[0], 13, zorder=4)
    if len(lines) > 1:
        write(ax, x + width / 2, middle - 0.2, lines[1], 15 if number else 13, zorder=4,
              weight="bold" if number else "normal")  # fmt: skip
