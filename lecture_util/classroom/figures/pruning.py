"""Still figures of notebook 07: the loop, what can be cut, and Minitron's scores."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import arrow, beside, box, canvas, cells, chart, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    tint,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import num_params

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MINITRON = "Muralidharan et al. 2024, arXiv:2407.14679"
# Training tokens, MMLU.
MMLU = {
    "Minitron 8B": (94e9, 63.8),
    "Minitron 4B": (94e9, 58.6),
    "Nemotron-3 8B": (3.8e12, 54.7),
    "Llama-3 8B": (15e12, 65.3),
}


@figure(
    name="pruning-loop",
    title="Rank the parts, trim the least important, repair by distilling",
    answers=["pruning-kd-loop"],
    notebook="07",
    alt="Five steps from left to right, joined by arrows. A trained model, drawn as a stack of "
    "eight layers. Importance: a bar a layer, from a few samples, forward passes only. Rank: the "
    "bars sorted. Trim: the three shortest are gone, five layers stay. Distil: the trained model "
    "teaches the small one its probabilities. An arrow leads back from distil to importance.",
    sources=[f"{MINITRON}, the order of the steps", "drawn schematic"],
)
def pruning_loop() -> Figure:
    fig, ax = canvas(15, 6.3, "Rank the parts, trim the least important, repair by distilling")
    importance, cut = (9, 5, 7, 2, 3, 1, 6, 8), 3  # schematic: any order would do
    order = sorted(range(len(importance)), key=lambda layer: -importance[layer])
    kept = [layer for layer in range(len(importance)) if layer in order[:-cut]]
    steps = [("trained", "a whole model"), ("importance", "few samples,\nforward only"),
             ("rank", "least important\nlast"), ("trim", "a smaller,\nordinary model"),
             ("distil", "learn the teacher's\nprobabilities")]  # fmt: skip
    lefts, low, pitch, tall = (0.4, 3.3, 6.3, 9.3, 12.1), 1.75, 0.34, 0.28
    for (name, text), x in zip(steps, lefts, strict=True):
        write(ax, x, 5.85, name, 19, ha="left", weight="bold")
        write(ax, x, 5.5, text, 14, ha="left", va="top", color=MUTED)

    def layers(x: float, which: list[int], width: float, color: str, base: float = low) -> None:
        for row, _ in enumerate(which):
            box(ax, x, base + pitch * row, width, tall, "", color, 0.6)

    everything = list(range(len(importance)))
    layers(lefts[0], everything, 1.6, PREDICTED)
    for column, which in ((1, everything), (2, order[::-1])):
        for row, layer in enumerate(which):
            y, gone = low + pitch * row, column == 2 and layer in order[-cut:]
            box(ax, lefts[column], y, 0.2 * importance[layer], tall, "",
                MEASURED if gone else CACHE, 0.25 if gone else 0.75, rounded=False)  # fmt: skip
    end = low + pitch * cut - 0.03
    ax.plot([lefts[2] - 0.1, lefts[2] + 1.9], [end, end], color=MEASURED, lw=2.4, ls=(0, (4, 2)))
    write(ax, lefts[2] + 0.75, low + 0.55, "cut", 16, ha="left", color=MEASURED, weight="bold")
    layers(lefts[3], kept, 1.6, GUESS)
    layers(lefts[4], everything, 0.9, PREDICTED)
    layers(lefts[4] + 1.6, kept, 0.9, GUESS)
    arrow(ax, (lefts[4] + 0.95, low + 0.84), (lefts[4] + 1.52, low + 0.84), width=2.4)
    for start, stop in zip((2.1, 5.2, 8.3, 11.0), lefts[1:], strict=True):
        arrow(ax, (start, low + 1.2), (stop - 0.12, low + 1.2), width=2.4)
    arrow(ax, (13.2, 1.6), (13.2, 0.75), (4.1, 0.75), (4.1, 1.6), color=MUTED, width=2.4)
    write(ax, 8.65, 0.4, "again, a little at a time (optional)", 15, color=MUTED)
    return fig


@figure(
    name="what-can-be-cut",
    title="Four things to cut: layers, groups of heads, neurons, channels",
    answers=[],
    notebook="07",
    alt="Left, a stack of 30 layers, some marked. Right, one layer: 9 query heads over 3 KV heads, "
    "one whole group marked; a row of MLP neurons, some marked; the residual stream's channels, "
    "which run through every layer, some marked. A table of parameters saved in SmolLM2-135M: a "
    "layer 3,540,096; a group in one layer 294,912; a neuron there 1,728; a channel 233,533.",
    sources=["counted by lecture_util.roofline.num_params",
             "lecture_util.model.config.PUBLISHED['smollm2-135m']"],
)  # fmt: skip
def what_can_be_cut() -> Figure:
    fig, ax = canvas(15, 7.4, "Four things to cut: layers, groups of heads, neurons, channels")
    config = PUBLISHED["smollm2-135m"]
    gone, stays = tint(MEASURED, 0.85), tint(PREDICTED, 0.4)
    layers = [[gone if layer in (13, 14, 17, 25) else stays] for layer in reversed(range(config.L))]
    side = 0.195
    for column in range(5):  # a layer is a wide bar: five cells that touch
        cells(ax, 0.5 + side * column, 6.6, layers, side, gap=0)
    for row in range(config.L + 1):
        ax.plot([0.5, 0.5 + 5 * side], [6.6 - row * side] * 2, color="white", lw=2, zorder=3)
    write(ax, 0.5, 6.95, f"{config.L} layers", 16, ha="left", weight="bold")
    _one_layer(ax, config.K, config.G, gone, stays)
    _savings(ax)
    return fig


def savings() -> dict[str, int]:
    """Parameters of SmolLM2-135M that go with one part of each kind."""
    config = PUBLISHED["smollm2-135m"]
    whole = num_params(config)
    per_group = replace(config, K=config.K - 1)
    return {
        "layer": whole - num_params(replace(config, L=config.L - 1)),
        "group of heads": (whole - num_params(per_group)) // config.L,
        "neuron": (whole - num_params(replace(config, F=config.F - 1))) // config.L,
        "channel": whole - num_params(replace(config, D=config.D - 1)),
    }


def _one_layer(ax: Axes, K: int, G: int, gone: object, stays: object) -> None:
    """Heads, neurons and channels of one layer, the ones to go in colour."""
    left, right, pitch, side = 3.0, 9.6, 0.7, 0.5
    ax.plot([1.55, left, left, 1.55], [4.65, 6.6, 0.55, 4.45], color=MUTED, lw=1, zorder=1)
    write(ax, left + 0.25, 6.95, "one layer", 16, ha="left", weight="bold")
    write(ax, left + 0.25, 5.9, "heads", 15, ha="left")
    for n in range(K * G):
        group, marked = n // G, n // G == 1
        x = left + 0.35 + pitch * n
        face = MEASURED if marked else PREDICTED
        middle = left + 0.35 + pitch * (G * group + (G - 1) / 2)
        ax.plot([x + side / 2, middle + side / 2], [5.1, 4.6], color=MUTED, lw=1.4, zorder=1)
        box(ax, x, 5.1, side, side, "q", face, 0.75 if marked else 0.35, 15)
        if n % G == 0:
            box(ax, middle - 0.15, 4.1, side + 0.3, side, "k, v", face, 0.75 if marked else 0.35)
    write(ax, left + 0.25, 3.55, "neurons of the MLP", 15, ha="left")
    marks = (2, 3, 7, 11, 16, 20, 21, 26)
    cells(ax, left + 0.35, 3.25, [[gone if f in marks else stays for f in range(30)]], 0.2067)
    cells(ax, left + 0.35, 3.04, [[gone if f in marks else stays for f in range(30)]], 0.2067)
    write(ax, left + 0.25, 2.25, "channels of the residual stream, through all layers", 15,
          ha="left")  # fmt: skip
    for d in range(6):
        marked = d in (1, 4)
        y = 1.85 - 0.2 * d
        ax.plot([left + 0.4, right], [y, y], color=MEASURED if marked else PREDICTED,
                lw=4.5, alpha=1 if marked else 0.45, zorder=2)  # fmt: skip


def _savings(ax: Axes) -> None:
    """What one of each saves, and what shrinks."""
    x, saved = 10.5, savings()
    write(ax, x, 6.95, "one of them saves", 16, ha="left", weight="bold")
    rows = [("layer", "L"), ("group of heads", "K, one layer"), ("neuron", "F, one layer"),
            ("channel", "D, all layers")]  # fmt: skip
    for (name, shrinks), y in zip(rows, (6.25, 5.0, 3.35, 1.75), strict=True):
        write(ax, x, y, f"{saved[name]:,}", 21, ha="left", weight="bold", color=MEASURED)
        write(ax, x, y - 0.45, f"a {name} ({shrinks})", 15, ha="left")
    write(ax, x, 0.4, f"SmolLM2-135M: {num_params(PUBLISHED['smollm2-135m']) / 1e6:.1f}M, norms in",
          13, ha="left", color=MUTED)  # fmt: skip


@figure(
    name="minitron-mmlu",
    title="Cut from a trained 15B: 9.1 points more on 40× fewer tokens",
    answers=["pruning-kd"],
    notebook="07",
    alt="MMLU against training tokens, logarithmic. Minitron 8B, 94 billion tokens, 63.8; "
    "Minitron 4B, 94 billion, 58.6; Nemotron-3 8B, about 3.8 trillion, 54.7; Llama-3 8B, about 15 "
    "trillion, 65.3. A dashed line from Nemotron-3 8B to Minitron 8B: 40 times fewer, 9.1 points "
    "more. The 8 trillion tokens of their teacher are not counted.",
    sources=[f"{MINITRON}, and its model cards", "tokens of Nemotron-3 and Llama-3: about",
             "40× and 9.1 points computed"],
)  # fmt: skip
def minitron_mmlu() -> Figure:
    fig, ax = chart("Cut from a trained 15B: 9.1 points more on 40× fewer tokens")
    small, scratch = MMLU["Minitron 8B"], MMLU["Nemotron-3 8B"]
    ax.plot(*zip(small, scratch, strict=True), "--", color=MUTED, lw=1.8, zorder=2)
    times, points = scratch[0] / small[0], small[1] - scratch[1]
    ax.text((small[0] * scratch[0]) ** 0.5 * 1.12, (small[1] + scratch[1]) / 2 + 0.35,
            f"{times:.0f}× fewer tokens,\n{points:+.1f} points", size=15)  # fmt: skip
    for name, (tokens, score) in MMLU.items():
        cut = name.startswith("Minitron")
        ax.plot(tokens, score, "o", color=MEASURED if cut else PREDICTED, ms=15, zorder=3)
        left = name.startswith("Llama")
        amount = f"{tokens / 1e9:.0f}B" if cut else f"≈ {tokens / 1e12:g}T"
        beside(ax, tokens, score, f"{name}\n{score}, {amount} tokens", INK, size=15,
               xytext=(-14 if left else 14, 14 if name == "Minitron 8B" else 0),
               ha="right" if left else "left", weight="bold" if cut else "normal")  # fmt: skip
    ax.set(xscale="log", xlim=(6e10, 5e13), ylim=(53, 67), yticks=[55, 60, 65])
    ax.set_xticks([1e11, 1e12, 1e13], ["100B", "1T", "10T"])
    ax.minorticks_off()
    ax.set(xlabel="training tokens (Minitron: of the distillation)", ylabel="MMLU (axis cut)")
    ax.tick_params(labelsize=13)
    caption(ax, shapes="not counted: the teacher Nemotron-4 15B, 8T tokens of its own; scores "
            "read in transcriptions, the 4B's on its card too", source=MINITRON)  # fmt: skip
    return fig
