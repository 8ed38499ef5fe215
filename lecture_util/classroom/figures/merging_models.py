"""Still figures of notebook 11: a model of stacked layers, and what serving N fine-tunes costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from lecture_util.classroom.figures.diagram import beside, canvas, chart, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    tint,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, decode_step, num_params

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Slice(NamedTuple):
    """Layers first to stop - 1 of a model."""

    model: str
    first: int
    stop: int


XWIN, EURYALE = "Xwin-LM-70B", "Euryale-1.3-L2-70B"
GOLIATH = (
    Slice(XWIN, 0, 16), Slice(EURYALE, 8, 24), Slice(XWIN, 17, 32), Slice(EURYALE, 25, 40),
    Slice(XWIN, 33, 48), Slice(EURYALE, 41, 56), Slice(XWIN, 49, 64), Slice(EURYALE, 57, 72),
    Slice(XWIN, 65, 80),
)  # fmt: skip
LAYERS = PUBLISHED["llama-2-70b"].L


def stacked(slices: tuple[Slice, ...] = GOLIATH) -> list[tuple[str, int]]:
    """The layers of the franken-merge from the bottom up, each with where it came from."""
    return [(part.model, layer) for part in slices for layer in range(part.first, part.stop)]


def parameters_B() -> float:
    """Billions, of a Llama-2-70B shape with as many layers as GOLIATH has."""
    return num_params(replace(PUBLISHED["llama-2-70b"], L=len(stacked()))) / 1e9


def _twice() -> int:
    """Depths of which the franken-merge has both models' layer."""
    return sum(count == 2 for count in Counter(layer for _, layer in stacked()).values())


def _franken_alt() -> str:
    ranges = ", ".join(f"{part.first}–{part.stop}" for part in GOLIATH)
    return (
        f"Two bars of {LAYERS} layers, {XWIN} and {EURYALE}, and the stack made of them, one bar "
        f"of {len(stacked())}. By turns from the first and the second, upper end left out: "
        f"{ranges}. "
        f"Neighbouring parts overlap, so {_twice()} of the {LAYERS} depths are there twice, "
        f"once from each; {parameters_B():.1f} billion parameters."
    )


@figure(
    name="franken",
    title=f"Goliath: {len(stacked())} layers from two models of {LAYERS}, weights untouched",
    answers=["Franken-merging, Goliath (slides)"],
    notebook="11",
    alt=_franken_alt(),
    sources=[
        "ranges: the slides (one source); counted from them",
        "huggingface.co/alpindale/goliath-120b",
        "parameters: lecture_util.roofline.num_params",
    ],
)
def franken() -> Figure:
    title = f"Goliath: {len(stacked())} layers from two models of {LAYERS}, weights untouched"
    fig, ax = canvas(14, 5.3, title)
    unit, left = 13.2 / len(stacked()), 0.4
    colors = {XWIN: PREDICTED, EURYALE: MEASURED}
    rows = {XWIN: 3.95, EURYALE: 2.6}
    for model, y in rows.items():
        ax.barh(y, LAYERS * unit, left=left, height=0.72, color=tint(MUTED, 0.12), zorder=1)
        write(ax, left, y + 0.6, f"{model}, layers 0 to {LAYERS - 1}", 16, ha="left",
              weight="bold", color=colors[model])  # fmt: skip
    at, y_out = 0, 0.95
    for part in GOLIATH:
        count, color = part.stop - part.first, colors[part.model]
        how = {"height": 0.72, "color": tint(color, 0.5), "edgecolor": color, "linewidth": 1.6}
        ax.barh(rows[part.model], count * unit, left=left + part.first * unit, zorder=3, **how)
        ax.barh(y_out, count * unit, left=left + at * unit, zorder=3, **how)
        for x, y in ((part.first, rows[part.model]), (at, y_out)):
            write(ax, left + (x + count / 2) * unit, y, f"{part.first}–{part.stop}", 14, zorder=5)
        at += count
    write(ax, left, y_out + 0.6, f"Goliath, {at} layers, {parameters_B():.1f} billion parameters",
          16, ha="left", weight="bold")  # fmt: skip
    write(ax, 8.5, 3.95, "0–16 is layers 0 to 15:\nthe upper end is left out", 15, ha="left")
    write(ax, 8.5, 2.6, f"{_twice()} of {LAYERS} depths are there\ntwice, once from each", 15,
          ha="left")  # fmt: skip
    write(ax, left, 0.25, "bottom layer left; parts renumbered in this order", 14, ha="left",
          color=MUTED)  # fmt: skip
    return fig


MODEL, B, S = "llama-3-8b", 24, 1024
COUNTS = (1, 2, 3, 4, 6, 8)


def serving(N: int) -> dict[str, tuple[float, float]]:
    """(bytes held, seconds a step) for B sequences with N fine-tunes, on one H100.

    served apart  each model has B/N of the sequences; they take turns
    ensemble      each model reads all B, and their answers are averaged
    merged        one model
    """
    config, h100 = PUBLISHED[MODEL], ACCELERATORS["h100"]
    share, whole = (decode_step(config, b, S, h100) for b in (B // N, B))
    return {
        "served apart": (N * share.memory_bytes, N * share.latency_s),
        "ensemble": (N * whole.memory_bytes, N * whole.latency_s),
        "merged": (whole.memory_bytes, whole.latency_s),
    }


def _one_alt() -> str:
    last = COUNTS[-1]
    rows = "; ".join(
        f"{name} {held / 1e9:.0f} GB and {1e3 * seconds:.1f} ms"
        for name, (held, seconds) in serving(last).items()
    )
    return (
        "Predicted, against the number of fine-tunes: bytes held (left) and time of a decode step "
        f"(right). Both grow in proportion for an ensemble, nearly so for models served apart, and "
        f"not at all once merged. With {last}: {rows}."
    )


@figure(
    name="one-model",
    title="Merged, N fine-tunes cost one model's memory and time",
    answers=["What is model merging? (slides)"],
    notebook="11",
    alt=_one_alt(),
    sources=["lecture_util.roofline.decode_step", "shape: Lightning-AI/litgpt litgpt/config.py",
             f"H100: {ACCELERATORS['h100'].source}"],
)  # fmt: skip
def one_model() -> Figure:
    fig, (left, right) = chart("Merged, N fine-tunes cost one model's memory and time", 2, 5.4)
    rows = [serving(N) for N in COUNTS]
    for name, color in (("ensemble", ACCENT), ("served apart", MEASURED), ("merged", GUESS)):
        held = [row[name][0] / 1e9 for row in rows]
        taken = [1e3 * row[name][1] for row in rows]
        for ax, values, unit in ((left, held, "GB"), (right, taken, "ms")):
            ax.plot(COUNTS, values, "--o", color=color)
            shown = f"{values[-1]:.0f} {unit}" if unit == "GB" else f"{values[-1]:.1f} {unit}"
            beside(ax, COUNTS[-1], values[-1], f"{name}\n{shown}", color, size=15,
                   weight="bold")  # fmt: skip
    memory = ACCELERATORS["h100"].memory_bytes / 1e9
    left.axhline(memory, color=INK, lw=1.6)
    beside(left, 8, memory, f"H100: {memory:.0f} GB", INK, size=14, xytext=(-2, -14), ha="right")
    left.set_ylabel("bytes held, GB")
    right.set_ylabel("a decode step at best, ms")
    for ax in (left, right):
        ax.set(xlabel="fine-tunes", xlim=(0.7, 8), xticks=COUNTS)
        ax.set_ylim(bottom=0)
    caption(fig, device="one H100, predicted from bytes read", dtype="bf16",
            shapes=f"Llama-3-8B, {B} sequences of {S:,} tokens in all; served apart: each model "
            "has its share of them, in turn")  # fmt: skip
    return fig
