"""Answer a workload with a configuration, and say what it took.

Every configuration is served by the part of the course it comes from: `model.generate`,
`speculative`, `serving`. Here they only meet the same requests, the same clock and the same scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from lecture_util.model.config import Config
from lecture_util.model.generate import check_prompts, generate_naive, stream
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.accounting import kv_bytes_per_token
from lecture_util.serving.clock import VirtualClock, WallClock
from lecture_util.serving.engine import Engine
from lecture_util.serving.loop import Loop
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.slots import SlotCache
from lecture_util.serving.static_batching import static_server
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.speculate import Tally, stream_speculative
from lecture_util.speculative.target import common_beginning
from lecture_util.speculative.trained import (
    eagle_drafter,
    load_eagle,
    load_medusa,
    medusa_drafter,
)

from .configuration import Configuration
from .variants import copy_bytes, held_bytes, weights_of
from .workload import Workload

PAGE = 16
EAGLE_TREE = 6  # tokens: three levels of two, what `eagle_drafter` grows unless told


@dataclass(frozen=True)
class Piece:
    """What a forward computes for one text, as `serving.simulate` counts it."""

    start: int
    count: int
    padded: int = 0
    drafted: int = 0  # guesses that were made for it


@dataclass(frozen=True)
class Answer:
    """One request: its tokens, and when it came, first spoke and ended."""

    tokens: tuple[int, ...]
    arrival_s: float
    first_s: float
    finished_s: float


@dataclass(frozen=True)
class Outcome:
    """What answering a workload took.

    Units: seconds, bytes. cache_bytes: the most that was lent at once. copy_bytes: second copies of
    weights that this machine's operators made. tokens_per_forward: new tokens for each forward of
    the model, which batching and drafts raise above one.
    """

    answers: tuple[Answer, ...]
    weight_bytes: int
    cache_bytes: int
    forwards: int
    copy_bytes: int = 0
    tally: Tally | None = None

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.copy_bytes

    @property
    def new_tokens(self) -> int:
        return sum(len(a.tokens) for a in self.answers)

    @property
    def seconds(self) -> float:
        return max(a.finished_s for a in self.answers) - min(a.arrival_s for a in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def ttft_s(self) -> float:
        """Median time from a request's arrival to its first token, waiting included."""
        return median(a.first_s - a.arrival_s for a in self.answers)

    @property
    def tpot_s(self) -> float:
        """Median time per token after the first, of the answers that have several."""
        several = [a for a in self.answers if len(a.tokens) > 1]
        paces = [(a.finished_s - a.first_s) / (len(a.tokens) - 1) for a in several]
        return median(paces) if paces else 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self.new_tokens / self.forwards

    def same_tokens(self, other: Outcome) -> float:
        """The share of tokens before each answer first differs from the other's."""
        if len(self.answers) != len(other.answers):
            raise ValueError(
                f"{len(self.answers)} answers and {len(other.answers)}: compare outcomes of one "
                "workload"
            )
        pairs = zip(self.answers, other.answers, strict=True)
        same = sum(common_beginning(mine.tokens, theirs.tokens) for mine, theirs in pairs)
        return same / self.new_tokens


def serve(
    model: Transformer,
    configuration: Configuration,
    workload: Workload,
    clock: WallClock | VirtualClock | None = None,
    progress: bool = False,
) -> Outcome:
    """Answer all requests greedily.

    model: the variant that the configuration asks for (`variants.Variants`).
    clock: by default seconds as they pass; a VirtualClock charges each forward by a formula, and
           then two machines agree on every number here.
    Raises: PromptError for a request that the model has no room or no words for, TypeError for
            what is no model, configuration, workload or clock, ValueError for a model of other
            weights: before anything is computed.
    """
    clock = WallClock() if clock is None else clock
    for name, value, kind, such in (
        ("model", model, Transformer, "a Transformer, such as Variants(load())(configuration)"),
        ("configuration", configuration, Configuration, "Configuration(slots=8, ...)"),
        ("workload", workload, Workload, "a Workload, such as assistant(tokenizer)"),
        ("clock", clock, WallClock | VirtualClock, "WallClock(), VirtualClock() or None"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name}={value!r}: expected {such}")
    if (found := weights_of(model)) not in (configuration.weights, None):
        raise ValueError(
            f"the model holds {found} weights but the configuration names {configuration.weights}: "
            "make it with Variants(load())(configuration)"
        )
    batched = configuration.schedule != "single"  # then all have the longest answer's budget
    for prompt, count in zip(workload.prompts, workload.new_tokens, strict=True):
        check_prompts(model, [prompt], max(workload.new_tokens) if batched else count)
    if configuration.schedule == "single":
        return _single(model, configuration, workload, clock, progress)
    return _batched(model, configuration, workload, clock, progress)


def new_server(model: Transformer, c: Configuration, workload: Workload, clock=None) -> Loop:
    """The loop that serves a batched configuration, with room for `slots` longest requests, or for
    all there are."""
    how = policy(model.config, c, workload)
    longest = max(map(len, workload.prompts)) + max(workload.new_tokens)
    if c.schedule == "static":
        return static_server(model, how.slots, longest, clock)
    place = (model.dtype, model.device)
    if c.pages:
        pages = how.slots * -(-longest // PAGE)
        cache = PagedCache(model.config, pages, PAGE, *place, prefix_caching=c.prefix)
    else:
        cache = SlotCache(model.config, how.slots, longest, *place)
    graphs = False if c.weights == "int8" else None  # outliers are looked up, which no graph can
    return Engine(model, cache, how, clock, graphs).loop


def policy(config: Config, c: Configuration, workload: Workload) -> Policy:
    """Prompts in chunks beside the decoding rows, 256 tokens a forward if the context has them."""
    slots = min(c.slots, len(workload))
    return Policy(slots=slots, token_budget=min(max(256, slots), config.max_context))


def drafter(model: Transformer, c: Configuration) -> tuple[Callable, int]:
    """What `generate_speculative` takes, and the bytes that it holds beside the model.

    Raises: as `speculative.trained.load_eagle`.
    """
    if c.draft == "ngram":
        return (lambda reader: NgramDrafter(k=c.guesses)), 0
    load, make = {
        "medusa": (load_medusa, medusa_drafter),
        "eagle": (load_eagle, eagle_drafter),
    }[c.draft]
    head, vocabulary, *_ = load(model)
    return make(model, size=c.guesses), held_bytes(head) + held_bytes(vocabulary)


def text_bytes(config: Config, c: Configuration, tokens: int, number_bytes: int) -> int:
    """The cache that one text gets to itself: room for its tokens, for a round's guesses, and for
    both in EAGLE's own layer, which sees its tree besides."""
    if not c.cache:
        return 0
    room = tokens + (0 if c.draft is None else c.guesses)
    held_bytes = room * kv_bytes_per_token(config, number_bytes)
    if c.draft == "eagle":
        held_bytes += (room + EAGLE_TREE) * kv_bytes_per_token(replace(config, L=1), number_bytes)
    return held_bytes


def _single(model, c, workload, clock, progress) -> Outcome:
    from tqdm.auto import tqdm

    new_drafter, head_bytes = drafter(model, c) if c.draft else (None, 0)
    tally = Tally() if c.draft else None
    cache_bytes = text_bytes(model.config, c, workload.longest, model.dtype.itemsize)
    origin_s, answers, forwards = clock.now(), [], 0
    requests = list(zip(workload.prompts, workload.new_tokens, workload.arrivals_s, strict=True))
    for prompt, count, arrival_s in tqdm(requests, desc=str(c), disable=not progress, leave=False):
        if workload.closed:
            arrival_s = clock.now() - origin_s
        elif (early_s := origin_s + arrival_s - clock.now()) > 0:
            clock.wait(early_s)
        if not c.cache:
            steps = _naive(model, prompt, count)
        elif c.draft is None:
            steps = _cached(model, prompt, count)
        else:
            steps = _drafted(model, new_drafter, prompt, count, c, tally)
        tokens, first_s = [], None
        for new, piece in steps:
            clock.computed([piece])
            tokens += new
            forwards += 1
            first_s = clock.now() if first_s is None else first_s
        answers.append(Answer(tuple(tokens), arrival_s, first_s - origin_s, clock.now() - origin_s))
    weight_bytes = held_bytes(model) + head_bytes
    return Outcome(tuple(answers), weight_bytes, cache_bytes, forwards, copy_bytes(model), tally)


def _naive(model, prompt, count) -> Iterator[tuple[list[int], Piece]]:
    """A token at a time, so that the clock sees each forward; every one reads the whole text."""
    text = list(prompt)
    for _ in range(count):
        text += generate_naive(model, text, 1)
        yield text[-1:], Piece(0, len(text) - 1)


def _cached(model, prompt, count) -> Iterator[tuple[list[int], Piece]]:
    held = 0
    for i, token in enumerate(stream(model, prompt, count)):
        read = len(prompt) + i - held
        yield [token], Piece(held, read)
        held += read


def _drafted(model, new_drafter, prompt, count, c, tally) -> Iterator[tuple[list[int], Piece]]:
    held, total = 0, len(prompt)
    for r in stream_speculative(model, new_drafter, prompt, count, width=c.guesses):
        tally.add(r)
        yield r.tokens, Piece(held, total - held + len(r.draft), drafted=len(r.draft))
        held, total = total + len(r.accepted), total + len(r.tokens)


def _batched(model, c, workload, clock, progress) -> Outcome:
    loop = new_server(model, c, workload, clock)
    if workload.closed:
        completions = []
        for request in workload.requests():
            completions += loop.serve([request], progress)
    else:
        completions = loop.serve(workload.requests(), progress)
    failed = [x.error for x in completions if x.error is not None]
    if failed:
        raise failed[0]
    token_bytes = kv_bytes_per_token(model.config, model.dtype.itemsize)
    answers = tuple(
        Answer(tuple(x.tokens), x.arrival_s, x.token_times_s[0], x.finished_s) for x in completions
    )
    lent = max(i.lent for i in loop.iterations)
    forwards = len(loop.iterations)
    return Outcome(answers, held_bytes(model), token_bytes * lent, forwards, copy_bytes(model))
