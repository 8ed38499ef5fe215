"""Still figures of notebooks 00, 01 and 03: how much is inferred, when, and which bytes move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from lecture_util.classroom.figures.diagram import (
    arrow,
    box,
    bracket,
    canvas,
    headline,
    write,
)
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
    number,
    tint,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, decode_step, kv_cache_bytes, weight_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALTMAN = "Altman, 9 Feb 2024 (x.com/sama/status/1756089361609981993)"
SANGER = "Sanger, 28 Apr 2025 (x.com/amanrsanger/status/1916968123535880684)"
LLAMA = "shape: Lightning-AI/litgpt litgpt/config.py"
H100 = "H100: pytorch/torchtitan utils.py; stas00/ml-engineering compute/accelerator/README.md"
WORDS_PER_DAY_OPENAI, WORDS_PER_DAY_PEOPLE = 100e9, 100e12
LINES_PER_DAY_CURSOR, LINES_PER_DAY_WORLD = 1e9, (2e9, 5e9)  # "a few billion", drawn as a range
TOKENS_PER_WORD = 4 / 3  # a rule of thumb for English, stated wherever it is used
CONTEXT = 1024


@figure(
    name="scale-of-inference",
    title="Models write a visible share of the world's words and code",
    answers=["openai-100b-tokens", "cursor-1b-lines"],
    notebook="01",
    alt="Bars on a logarithmic axis. Words a day: OpenAI about 100 billion in February 2024, all "
    "people about 100 trillion, a thousand times more. Lines of code a day: almost 1 billion "
    "accepted in Cursor in April 2025, a few billion written in the whole world.",
    sources=[ALTMAN, SANGER],
)
def scale_of_inference() -> Figure:
    fig, ax = plt.subplots(figsize=(10.4, 5.4), layout="constrained")
    low, high = LINES_PER_DAY_WORLD
    rows = [
        (4.1, "all people", WORDS_PER_DAY_PEOPLE, tint(PREDICTED, 0.35), "100 trillion"),
        (3.2, "OpenAI, 2024", WORDS_PER_DAY_OPENAI, PREDICTED, "100 billion"),
        (1.1, "the world", low, tint(MEASURED, 0.35), "a few billion"),
        (0.2, "accepted in\nCursor, 2025", LINES_PER_DAY_CURSOR, MEASURED, "almost 1 billion"),
    ]
    for y, _, value, color, text in rows:
        ax.barh(y, value, height=0.62, color=color)
        end = high if text == "a few billion" else value
        ax.annotate(text, (end, y), xytext=(8, 0), textcoords="offset points", va="center", size=15)
    ax.barh(rows[2][0], high - low, left=low, height=0.62, color="white", hatch="///",
            edgecolor=tint(MEASURED, 0.35), lw=0)  # fmt: skip
    for y, text in [(4.75, "words a day"), (1.75, "lines of code a day")]:
        ax.text(1.15e8, y, text, size=15, weight="bold", color=MUTED)
    ratio = WORDS_PER_DAY_PEOPLE / WORDS_PER_DAY_OPENAI
    ax.text(4e12, 3.2, f"1 for every {ratio:,.0f}", size=15, va="center", color=PREDICTED,
            weight="bold")  # fmt: skip
    ax.set(xscale="log", xlim=(1e8, 3e15), ylim=(-0.3, 5.2))
    ax.set_yticks([row[0] for row in rows], [row[1] for row in rows], size=14)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("a day (logarithmic)")
    headline(fig, "Models write a visible share of the world's words and code")
    caption(ax, source="Altman, 9 Feb 2024; Sanger, 28 Apr 2025")
    return fig


@figure(
    name="words-to-gpus",
    title="The same words need far fewer GPUs when requests are batched",
    answers=["openai-100b-tokens"],
    notebook="01",
    alt="Three numbers: 100 billion words a day, times 4/3 tokens a word over 86,400 seconds is "
    "1.54 million tokens a second. Below, bars: H100s needed if each ran Llama-2-13B at its memory "
    "bound with 1,024 tokens of context: 12,400 at batch 1, about 574 at batch 64.",
    sources=[
        ALTMAN,
        "4/3 tokens a word (assumed)",
        LLAMA,
        H100,
        "lecture_util.roofline.decode_step",
    ],
)
def words_to_gpus() -> Figure:
    config, h100 = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"]
    tokens_per_s = WORDS_PER_DAY_OPENAI * TOKENS_PER_WORD / 86_400
    batches = [1, 8, 64]
    rates = [decode_step(config, B, CONTEXT, h100).throughput_tokens_per_s for B in batches]
    gpus = [tokens_per_s / rate for rate in rates]
    fig, ax = canvas(14, 6.4, "The same words need far fewer GPUs when requests are batched")
    write(ax, 0.4, 5.35, "100 billion", 26, ha="left", weight="bold", color=PREDICTED)
    write(ax, 0.4, 4.72, "words a day", 15, ha="left", color=MUTED)
    arrow(ax, (4.1, 5.1), (7.9, 5.1), color=MUTED)
    write(ax, 5.95, 5.42, "× 4/3 tokens a word", 14)
    write(ax, 5.95, 4.78, "÷ 86,400 s", 14)
    write(ax, 8.3, 5.35, f"{tokens_per_s / 1e6:.2f} million", 26, ha="left", weight="bold",
          color=PREDICTED)  # fmt: skip
    write(ax, 8.3, 4.72, "tokens a second", 15, ha="left", color=MUTED)
    write(ax, 0.4, 3.65, "H100s, were each to run Llama-2-13B at its memory bound", 15, ha="left",
          weight="bold")  # fmt: skip
    room = 7.4
    for k, (B, count, rate) in enumerate(zip(batches, gpus, rates, strict=True)):
        y = 2.6 - 0.85 * k
        width = room * count / max(gpus)
        write(ax, 0.4, y + 0.28, f"B = {B}", 16, ha="left")
        box(ax, 1.8, y, width, 0.56, "", PREDICTED, 0.85, rounded=False)
        write(ax, 1.8 + width + 0.2, y + 0.28, number(count), 18, ha="left", weight="bold")
        x = 1.8 + width + 0.5 + 0.24 * len(number(count))
        write(ax, x, y + 0.27, f"{number(rate)} tok/s each", 13, ha="left", color=MUTED)
    write(ax, 0.4, 0.32, f"S = {CONTEXT:,} · bf16 · decode only: prefill, peaks and idle time come "
          "on top", 12.5, ha="left", color=MUTED)  # fmt: skip
    return fig


@figure(
    name="request-timeline",
    title="Three clocks: the first token, the next token, all tokens",
    answers=[],
    notebook="01",
    alt="A timeline of three requests served as one batch. A wide prefill block is followed by "
    "narrow decode steps, each giving one token per request. Time to first token spans prefill and "
    "the first token; latency spans one decode step; throughput is the B tokens of a step divided "
    "by its latency.",
    sources=["schematic, no measured lengths"],
)
def request_timeline() -> Figure:
    fig, ax = canvas(14, 5.5, "Three clocks: the first token, the next token, all tokens")
    x0, prefill_width, step, lane, steps = 1.9, 4.2, 0.95, 0.78, 7
    y_bottom = 1.75
    x_decode = x0 + prefill_width
    for b in range(3):
        y = y_bottom + lane * (2 - b)
        write(ax, 0.3, y + 0.3, f"request {b + 1}", 14, ha="left", color=MUTED)
        box(ax, x0, y, prefill_width - 0.06, 0.6, "prefill" if b == 1 else "", PREDICTED, 0.55, 16)
        for k in range(steps):
            face = 0.85 if k == 3 else 0.35
            box(ax, x_decode + k * step + 0.03, y, step - 0.06, 0.6, "", MEASURED, face)
    write(ax, x_decode + steps * step + 0.4, y_bottom + 1.5 * lane - 0.1, "…", 20, color=MUTED)
    y_top = y_bottom + 3 * lane + 0.25
    bracket(ax, x0, x_decode, y_top, "time to first token", PREDICTED, 16)
    x_marked = x_decode + 3 * step
    bracket(ax, x_marked, x_marked + step, y_top, "latency", MEASURED, 16)
    write(ax, x_marked + step / 2, y_bottom - 0.42, "B tokens a step", 15, color=MEASURED)
    write(ax, x0 + prefill_width / 2, y_bottom - 0.42, "all prompt tokens at once", 15,
          color=PREDICTED)  # fmt: skip
    arrow(ax, (x0, 0.82), (13.6, 0.82), color=MUTED)
    write(ax, 13.55, 0.45, "time", 14, ha="right", color=MUTED)
    write(ax, x0, 0.38, "throughput = B / latency", 17, ha="left", weight="bold")
    return fig


@figure(
    name="bytes-per-decode-step",
    title="As the batch grows, the cache outweighs the weights",
    answers=[],
    notebook="03",
    alt="Stacked bars of the bytes one decode step reads, Llama-2-13B in bf16 with 1,024 tokens a "
    "sequence. Weights are 26 GB at every batch size; the KV cache grows from 0.8 GB at B=1 to 54 "
    "GB at 64 and 215 GB at 256. A line marks the 80 GB of an H100, just above the bar of B=64.",
    sources=[LLAMA, H100, "lecture_util.roofline.weight_bytes and kv_cache_bytes"],
)
def bytes_per_decode_step() -> Figure:
    config, h100 = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"]
    batches = [1, 16, 32, 64, 128, 256]
    weights = [weight_bytes(config) / 1e9 for _ in batches]
    caches = [kv_cache_bytes(config, B, CONTEXT) / 1e9 for B in batches]
    fig, ax = plt.subplots(figsize=(10.4, 5.4), layout="constrained")
    x = range(len(batches))
    ax.bar(x, weights, color=WEIGHTS, width=0.66, label="weights")
    ax.bar(x, caches, bottom=weights, color=CACHE, width=0.66, label="KV cache")
    for k, B in enumerate(batches):
        step = decode_step(config, B, CONTEXT, h100)
        text = f"{step.latency_s * 1e3:.1f} ms" if step.fits else "does not fit"
        ax.annotate(text, (k, weights[k] + caches[k]), xytext=(0, 6), textcoords="offset points",
                    ha="center", size=14, color=INK if step.fits else MUTED)  # fmt: skip
    memory = h100.memory_bytes / 1e9
    ax.axhline(memory, color=INK, lw=1.8, ls=(0, (6, 3)))
    ax.annotate(f"H100: {memory:.0f} GB", (-0.45, memory), xytext=(0, 6), va="bottom",
                textcoords="offset points", size=14)  # fmt: skip
    ax.set_xticks(x, [f"B = {B}" for B in batches], size=14)
    ax.grid(axis="x", visible=False)
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel="read in one decode step, GB", ylim=(0, 265), yticks=range(0, 201, 50))
    ax.legend(loc="upper left", fontsize=15, reverse=True)
    headline(fig, "As the batch grows, the cache outweighs the weights")
    caption(
        ax, device="H100 SXM, times at best", dtype="bf16", shapes=f"Llama-2-13B, S = {CONTEXT:,}"
    )
    return fig


@figure(
    name="predict-measure-read",
    title="Every page of this course: predict, measure, read the gap",
    answers=[],
    notebook="00",
    alt="Three boxes joined by arrows: predict, derive a formula and put a number on it; measure, "
    "run it on your machine; read, divide one by the other and name what explains the gap. An "
    "arrow leads back from read to predict.",
    sources=["the course's own method"],
)
def predict_measure_read() -> Figure:
    fig, ax = canvas(14, 4.9, "Every page of this course: predict, measure, read the gap")
    steps = [
        ("predict", "derive it,\nput a number on it", PREDICTED),
        ("measure", "run it\non your machine", MEASURED),
        ("read", "divide: what\nexplains the gap?", GUESS),
    ]
    for k, (name, text, color) in enumerate(steps):
        x = 0.5 + 4.6 * k
        box(ax, x, 1.75, 3.8, 2.3, "", color, 0.22)
        write(ax, x + 1.9, 3.5, name, 22, weight="bold", color=color, zorder=5)
        write(ax, x + 1.9, 2.5, text, 16, zorder=5, linespacing=1.35)
        if k:
            arrow(ax, (x - 0.75, 2.9), (x - 0.05, 2.9), width=2.4)
    arrow(ax, (11.6, 1.7), (11.6, 0.85), (2.4, 0.85), (2.4, 1.7), color=MUTED)
    write(ax, 7.0, 0.5, "a better model", 15, color=MUTED)
    return fig
