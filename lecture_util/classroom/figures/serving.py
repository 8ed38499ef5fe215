"""Still figures of notebook 09: who is in the batch, drawn from what our scheduler does."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from lecture_util.classroom.figures.diagram import arrow, box, canvas, cells, chart, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    WEIGHTS,
    caption,
    tint,
)
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline.hardware import ACCELERATORS
from lecture_util.serving.flat import Frame
from lecture_util.serving.request import EndsAfter, Params, Request, Running
from lecture_util.serving.scheduler import Policy, Scheduler
from lecture_util.serving.simulate import RooflineStep, simulator
from lecture_util.serving.slots import SlotCache, Slots
from lecture_util.serving.static_batching import StaticScheduler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lecture_util.serving.loop import Loop
    from lecture_util.serving.request import Completion

ORCA = "Yu et al. 2022, Orca (OSDI 22)"
NEW_TOKENS = (4, 2, 6, 3, 5, 3, 4, 2)  # of requests A to H
NAMES = "ABCDEFGH"


def batches() -> dict[str, Loop]:
    """Eight requests, all there from the start, served in four slots by either scheduler."""
    trace = [Request([1, 1], Params(8, stop=EndsAfter(n))) for n in NEW_TOKENS]
    loops = {}
    for name, scheduler in (("static", StaticScheduler), ("continuous", Scheduler)):
        loops[name] = simulator(Slots(4, 16), Policy(slots=4), scheduler=scheduler)
        loops[name].serve(trace)
    return loops


class Tally(NamedTuple):
    """forwards; rows computed for nothing, of all rows; forwards until E's first token."""

    forwards: int
    padding: int
    rows: int
    first_of_E: int


def tally(loop: Loop) -> Tally:
    parts = [part for i in loop.iterations for part in i.parts]
    padding = sum(part.kind == "padding" for part in parts)
    first = loop.done[NAMES.index("E")][0].ttft_s
    return Tally(len(loop.iterations), padding, len(parts), int(first))


@figure(
    name="static-batching",
    title="A static batch waits for its longest text; a continuous one refills",
    answers=["static batching", "Static and continuous batching (slides)"],
    notebook="09",
    alt="Two grids, rows are 4 slots, columns are forwards. Eight requests want 4, 2, 6, 3, 5, 3, "
    "4 and 2 tokens. Static: B ends after 2 forwards, C after 6; until then the other rows are "
    "padding, and E to H wait; 11 forwards, 15 of 44 rows for nothing, E's first token in forward "
    "7. Continuous: E takes B's slot at once, in forward 3; 8 forwards, no padding.",
    sources=[
        "drawn from the runs of lecture_util.serving: StaticScheduler, Scheduler",
        "four sequences, the first over after 2 steps, the last after 6: as in Anyscale's picture",
    ],
)
def static_batching() -> Figure:
    title = "A static batch waits for its longest text; a continuous one refills"
    fig, ax = canvas(15, 8.1, title)
    colors = (PREDICTED, GUESS, CACHE, "#B58FBF", WEIGHTS, MEASURED, "#8C8C3C", "#CC79A7")
    for (name, loop), top in zip(batches().items(), (7.0, 3.35), strict=True):
        found, side, left = tally(loop), 0.62, 1.6
        grid: list[list] = [[None] * found.forwards for _ in range(4)]
        for t, iteration in enumerate(loop.iterations):
            for part in iteration.parts:
                over, begins = part.kind == "padding", part.kind == "prefill"
                color = tint(colors[part.number], 0.85 if begins else 0.35)
                grid[part.slot][t] = "#E4E4E4" if over else color
                x, y = left + side * (t + 0.5), top - side * (part.slot + 0.5)
                write(ax, x, y, "×" if over else NAMES[part.number], 15, zorder=4,
                      color=MUTED if over else INK,
                      weight="bold" if begins else "normal")  # fmt: skip
        cells(ax, left, top, grid, side)
        write(ax, 0.3, top + 0.32, name, 17, ha="left", weight="bold")
        for slot in range(4):
            write(ax, left - 0.15, top - side * (slot + 0.5), f"slot {slot}", 13, ha="right",
                  color=MUTED)  # fmt: skip
        for t in range(found.forwards):
            write(ax, left + side * (t + 0.5), top - 4 * side - 0.2, str(t + 1), 12, color=MUTED)
        notes = (
            f"{found.forwards} forwards",
            f"{found.padding} of {found.rows} rows for nothing",
            f"E's first token: forward {found.first_of_E}",
        )
        for k, note in enumerate(notes):
            write(ax, 9.1, top - 0.55 - 0.68 * k, note, 17, ha="left",
                  weight="normal" if k else "bold")  # fmt: skip
    wanted = ",  ".join(f"{n} {k}" for n, k in zip(NAMES, NEW_TOKENS, strict=True))
    legend = "strong colour: its prompt\n×: text over, computed all the same"
    write(ax, 9.1, 0.72, legend, 13, ha="left", color=MUTED)
    write(ax, 0.3, 0.22, f"new tokens wanted:  {wanted}", 13, ha="left", color=MUTED)
    return fig


PROMPTS = (3, 9, 5)


def flat_run() -> Frame:
    """Three prompts admitted in one forward, and where our cache puts their tokens."""
    config = Config(D=8, F=8, K=1, G=1, H=8, L=1, V=16, max_context=64)
    cache = SlotCache(config, rows=3, capacity=16)
    scheduler = Scheduler(cache.memory, Policy(slots=3))
    for i, length in enumerate(PROMPTS):
        scheduler.add(Running(i, Request([1] * length), i, 0, [1] * length, 0.0))
    cache.load(scheduler.plan())
    return cache.frame


@figure(
    name="selective-batching",
    title="Linear layers take one flat run; attention, each text by itself",
    answers=[],
    notebook="09",
    alt="Three texts of 3, 9 and 5 tokens, shapes [3, D], [9, D] and [5, D], are laid end to end "
    "as one run [17, D]; each token keeps its position, counted from 0 in its own text. Norms and "
    "linear layers take the whole run and read each weight once. Attention splits it into three, "
    "each over its own keys and values, and joins the results to [17, D] for the layers after it.",
    sources=["lengths and positions: lecture_util.serving.flat.FlatCache.load", ORCA],
)
def selective_batching() -> Figure:
    fig, ax = canvas(15, 8.2, "Linear layers take one flat run; attention, each text by itself")
    frame, side, left = flat_run(), 0.56, 2.3
    texts = [rows for rows, _, _ in frame.runs]
    colors, total = (PREDICTED, GUESS, CACHE), frame.places_T.numel()
    width = side * total
    apart = [left - 0.7, left, left + 0.7]  # the three before they are joined
    for k, rows in enumerate(texts):
        color, count = tint(colors[k], 0.55), rows.stop - rows.start
        x = apart[k] + side * rows.start
        cells(ax, x, 7.2, [[color] * count], side)
        write(ax, x + side * count / 2, 7.5, f"[{count}, D]", 16)
        middle = side * (rows.start + rows.stop) / 2
        arrow(ax, (apart[k] + middle, 6.58), (left + middle, 6.05))
        for y in (5.98, 2.0):
            cells(ax, left + side * rows.start, y, [[color] * count], side)
    for t, position in enumerate(frame.positions_1T[0].tolist()):
        write(ax, left + side * (t + 0.5), 5.7, str(position), 13, zorder=4)
    for y, what, note in ((5.7, f"[{total}, D]", "positions, each\nfrom its text's start"),
                          (1.72, f"[{total}, D]", "joined again")):  # fmt: skip
        write(ax, left - 0.25, y, what, 16, ha="right", weight="bold")
        write(ax, left + width + 0.25, y, note, 13, ha="left", color=MUTED)
    box(ax, left, 4.35, width, 0.62, "norm, Wq, Wk, Wv: each weight is read once", WEIGHTS, 0.4, 16)
    box(ax, left, 0.35, width, 0.62, "Wo, norm, MLP: each weight is read once", WEIGHTS, 0.4, 16)
    arrow(ax, (left + width / 2, 5.38), (left + width / 2, 5.0))
    arrow(ax, (left + width / 2, 1.4), (left + width / 2, 1.0))
    for k, rows in enumerate(texts):
        x0, x1 = left + side * rows.start + 0.07, left + side * rows.stop - 0.07
        box(ax, x0, 2.7, x1 - x0, 1.0, "attention", colors[k], 0.25, 15)
        arrow(ax, ((x0 + x1) / 2, 4.32), ((x0 + x1) / 2, 3.73))
        arrow(ax, ((x0 + x1) / 2, 2.67), ((x0 + x1) / 2, 2.05))
    write(ax, left + width + 0.25, 3.2, "each over the keys and\nvalues of its own text", 13,
          ha="left", color=MUTED)  # fmt: skip
    return fig


LONG, OTHERS, ARRIVES_S = 6000, 3, 0.1
SHOWN_MS = (85, 225)
BUDGETS = {"whole": Policy(slots=8, token_budget=8192, chunked=False),
           "in chunks": Policy(slots=8, token_budget=512)}  # fmt: skip


def prefills() -> dict[str, tuple[Loop, list[Completion]]]:
    """Three users decode when a fourth brings a long prompt: by formula, either way."""
    step = RooflineStep(PUBLISHED["llama-3-8b"], ACCELERATORS["h100"])
    trace = [Request([1] * 1000, Params(400, stop=EndsAfter(60))) for _ in range(OTHERS)]
    trace.append(Request([1] * LONG, Params(400, stop=EndsAfter(8)), ARRIVES_S))
    runs = {}
    for name, policy in BUDGETS.items():
        loop = simulator(Slots(8, 8192), policy, step)
        runs[name] = loop, loop.serve(trace)
    return runs


def longest_pause(done: list[Completion]) -> tuple[float, float]:
    """Between two tokens of the first user: (when it begins, seconds)."""
    pairs = pairwise(done[0].token_times_s)
    return max(((a, b - a) for a, b in pairs), key=lambda pause: pause[1])


@figure(
    name="chunked-prefill",
    title="A whole prompt stops everybody; in chunks it only slows them",
    answers=[],
    notebook="09",
    alt="Two timelines by formula: A, B and C decode on an H100, and D brings 6,000 tokens. "
    "Computed whole, D's prompt is one long forward, and nobody gets a token for 94.2 ms; D's own "
    "first token comes after 97.1 ms. In chunks, at most 512 tokens a forward in all, no pause is "
    "longer than 8.67 ms, and D's first token comes after 97.8 ms.",
    sources=[
        "predicted: lecture_util.serving.simulate.RooflineStep; Scheduler",
        "shape: Lightning-AI/litgpt litgpt/config.py; H100: pytorch/torchtitan utils.py; "
        "stas00/ml-engineering compute/accelerator/README.md",
        "chunks beside decoding: Agrawal et al. 2024, arXiv:2403.02310",
    ],
)
def chunked_prefill() -> Figure:
    title = "A whole prompt stops everybody; in chunks it only slows them"
    fig, axes = chart(title, height=6.4)
    fig.delaxes(axes)
    upper, lower = fig.subplots(2, 1, sharex=True)
    for ax, (name, (loop, done)) in zip((upper, lower), prefills().items(), strict=True):
        _timeline(ax, loop)
        start, pause = longest_pause(done)
        ttft = done[-1].ttft_s
        words = f"{name}: longest pause {1e3 * pause:.3g} ms, D's first token after " \
                f"{1e3 * ttft:.3g} ms"  # fmt: skip
        ax.set_title(words, size=15, weight="normal")
        ax.plot([1e3 * start, 1e3 * (start + pause)], [-0.75] * 2, color=MEASURED, lw=5,
                solid_capstyle="butt")  # fmt: skip
        ax.axvline(1e3 * ARRIVES_S, color=INK, lw=1.4)
    lower.annotate("D comes", (1e3 * ARRIVES_S, 3.62), xytext=(-6, 0), ha="right", va="center",
                   textcoords="offset points", size=13)  # fmt: skip
    lower.set(xlabel="ms, predicted", xlim=SHOWN_MS)
    budget = BUDGETS["in chunks"].token_budget
    shapes = (
        f"Llama-3-8B; A, B, C begin with 1,000 tokens each, D brings {LONG:,}; a block is a "
        f"forward, yellow: of a prompt; in chunks: at most {budget} tokens a forward; red line: "
        "the longest pause between two tokens of A"
    )
    caption(fig, device="by formula for an H100", dtype="bf16", shapes=shapes)
    return fig


def _timeline(ax: Axes, loop: Loop) -> None:
    """One block a forward in which somebody has a part: blue decoding, yellow a prompt."""
    for kind, color in (("decode", tint(PREDICTED, 0.7)), ("prefill", tint(CACHE, 0.8))):
        for number in range(OTHERS + 1):
            spans = [
                (1e3 * i.start_s, 1e3 * i.seconds)
                for i in loop.iterations
                for part in i.parts
                if part.number == number and part.kind == kind
                if SHOWN_MS[0] - 10 < 1e3 * i.start_s < SHOWN_MS[1]
            ]
            ax.broken_barh(spans, (number - 0.4, 0.8), facecolor=color, edgecolor="white", lw=1)
    ax.set_yticks(range(OTHERS + 1), NAMES[: OTHERS + 1], size=15)
    ax.set_ylim(OTHERS + 0.9, -1.05)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
