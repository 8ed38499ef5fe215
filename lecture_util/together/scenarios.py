"""A chat service, a batch job, a laptop: a machine, its users, and what they will not put up with.

The texts, the bytes and the forwards are measured by running the real model; only the seconds come
from the scenario's machine, by its two peaks, so that a verdict is the same wherever it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from lecture_util.model.text import english_split, perplexity
from lecture_util.roofline.hardware import Accelerator
from lecture_util.serving.clock import VirtualClock

from .configuration import Configuration
from .costs import PeakStep
from .predict import guess_bytes
from .run import Outcome, serve
from .variants import Variants, calibration
from .workload import Workload, assistant, editing, writing

WINDOWS = 8
MADE_UP = "round numbers, made up for this exercise"
SERVER = Accelerator(
    "a small server", {"fp32": 2e12, "bf16": 4e12, "int8": 8e12}, 60e9, 4e9, MADE_UP
)
LAPTOP = Accelerator(
    "a laptop", {"fp32": 0.4e12, "bf16": 0.8e12, "int8": 1.6e12}, 30e9, 1e9, MADE_UP
)


@dataclass(frozen=True)
class Scenario:
    """Budgets; None where nobody minds.

    Units: bytes in all (weights and the most cache lent), seconds to the median first token, tokens
    a second over the whole run, perplexity on held-out English.
    """

    name: str
    story: str
    machine: Accelerator
    memory_bytes: float
    tokens_per_s: float
    perplexity: float
    ttft_s: float | None = None
    overhead_s: float = 1e-3  # what every forward takes besides


SCENARIOS: Mapping[str, Scenario] = {
    s.name: s
    for s in (
        Scenario(
            "chat",
            "A club's assistant: eight members ask about the same notes within a tenth of a "
            "second, and every answer should begin at once.",
            SERVER,
            memory_bytes=260e6,
            tokens_per_s=300,
            perplexity=22.0,
            ttft_s=0.02,
        ),
        Scenario(
            "batch",
            "Eight texts to be written by tomorrow, on a machine that is shared: as many tokens a "
            "second as can be had in little memory. Nobody waits for the first word.",
            SERVER,
            memory_bytes=150e6,
            tokens_per_s=1500,
            perplexity=25.5,
        ),
        Scenario(
            "laptop",
            "One person, one text at a time: repeat, correct, quote. Not many bytes, and slow "
            "memory.",
            LAPTOP,
            memory_bytes=250e6,
            tokens_per_s=300,
            perplexity=22.0,
        ),
    )
}


def workload_of(name: str, tokenizer) -> Workload:
    """Who asks in a scenario. Raises: ValueError for a name that is none."""
    if name == "chat":
        return assistant(tokenizer, 8, gap_s=0.01, scale=0.5)
    if name == "batch":
        return writing(tokenizer, 8, 16)
    if name == "laptop":
        return editing(tokenizer, 32)
    raise ValueError(f"scenario {name!r}: expected one of {', '.join(SCENARIOS)}")


@dataclass(frozen=True)
class Verdict:
    """What a configuration came to in a scenario, and the budgets that it broke."""

    outcome: Outcome
    perplexity: float
    broken: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.broken


class Trial:
    """Tries configurations in scenarios, each only once.

    model: the whole model in fp32. Its variants, and the texts' perplexities, are kept.
    """

    def __init__(self, model, tokenizer) -> None:
        study_S, held_BT = english_split(tokenizer)
        self.variants, self.tokenizer = Variants(model, calibration(study_S)), tokenizer
        held_BT = held_BT[:: len(held_BT) // WINDOWS][:WINDOWS]
        self.held_BT = held_BT.to(model.device)
        self._quality: dict[tuple[str, bool], float] = {}
        self._verdicts: dict[tuple[str, Configuration], Verdict] = {}

    def __call__(self, name: str, configuration: Configuration) -> Verdict:
        """Raises: ValueError for another scenario; TypeError for what is no Configuration."""
        if name not in SCENARIOS:
            raise ValueError(f"scenario {name!r}: expected one of {', '.join(SCENARIOS)}")
        if not isinstance(configuration, Configuration):
            raise TypeError(
                f"configuration={configuration!r}: expected Configuration(weights='int8', ...)"
            )
        key = (name, configuration)
        if key not in self._verdicts:
            self._verdicts[key] = self._try(SCENARIOS[name], configuration)
        return self._verdicts[key]

    def _try(self, scenario: Scenario, c: Configuration) -> Verdict:
        model = self.variants(c)
        reads = guess_bytes(model.config, c)
        step = PeakStep(model.config, c.weights, scenario.machine, scenario.overhead_s, reads)
        workload = workload_of(scenario.name, self.tokenizer)
        outcome = serve(model, c, workload, VirtualClock(lambda work: step(work)))
        quality = self.perplexity(c)
        return Verdict(outcome, quality, tuple(broken(scenario, outcome, quality)))

    def perplexity(self, c: Configuration) -> float:
        """On a few held-out windows, of the variant that a configuration runs."""
        key = (c.weights, c.student)
        if key not in self._quality:
            self._quality[key] = perplexity(self.variants(c), self.held_BT)
        return self._quality[key]


def broken(scenario: Scenario, outcome: Outcome, quality: float) -> list[str]:
    """The budgets that are not kept, in words."""
    found = []
    memory_bytes = outcome.memory_bytes - outcome.copy_bytes  # copies are this machine's alone
    if memory_bytes > scenario.memory_bytes:
        found.append(
            f"memory: {memory_bytes / 1e6:.0f} MB, the budget is {scenario.memory_bytes / 1e6:.0f}"
        )
    if scenario.ttft_s is not None and outcome.ttft_s > scenario.ttft_s:
        found.append(
            f"first token: {1e3 * outcome.ttft_s:.0f} ms, the budget is {1e3 * scenario.ttft_s:.0f}"
        )
    if outcome.tokens_per_s < scenario.tokens_per_s:
        found.append(
            f"speed: {outcome.tokens_per_s:.0f} tokens/s, at least {scenario.tokens_per_s:.0f} "
            "are needed"
        )
    if quality > scenario.perplexity:
        found.append(f"quality: perplexity {quality:.1f}, at most {scenario.perplexity:.1f}")
    return found


@cache
def trial() -> Trial:
    """One `Trial` of the reference model, kept for the process."""
    from lecture_util.model.weights import REFERENCE, load, load_tokenizer

    return Trial(load(REFERENCE), load_tokenizer(REFERENCE))
