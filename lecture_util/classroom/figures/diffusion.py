"""Still figures of notebook 05: text uncovered in passes, or cleared of noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lecture_util.alternatives.denoise import denoise
from lecture_util.alternatives.diffusion import blur, nearest_word
from lecture_util.classroom.figures.diagram import canvas, cells, chart, write
from lecture_util.classroom.figures.plots import bars
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    CACHE,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

MERCURY = "Inception Labs 2025, Mercury, arXiv:2506.17298"
SPEEDS = {  # tokens a second and HumanEval, as reported there
    "Mercury Coder Mini": (1109, 88.0),
    "Mercury Coder Small": (737, 90.0),
    "Gemini 2.0 Flash-Lite": (201, 90.0),
    "Claude 3.5 Haiku": (61, 86.0),
    "GPT-4o mini": (59, 88.0),
}


class _Unsure:
    """Stands in for a model: at each position its own confidence, drawn once."""

    mask_id = 8

    def __init__(self, T: int, seed: int) -> None:
        self.logits_TV = torch.randn(T, 8, generator=torch.Generator().manual_seed(seed))

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        return self.logits_TV.expand(*tokens_BT.shape, 8)


@figure(
    name="diffusion-passes",
    title="Diffusion takes fewer passes, each over the whole text",
    answers=[],
    notebook="05",
    alt="Three grids, one row a forward pass, one column a position, 12 tokens. Autoregression: 12 "
    "passes, one token each from left to right, 12 positions computed. Masked diffusion in 4 "
    "passes: three tokens each, anywhere, 48 positions. In blocks of 4 with 2 passes each: 6 "
    "passes, 72 positions.",
    sources=["lecture_util.alternatives.denoise.denoise, confidences drawn at random, seed 0"],
)
def diffusion_passes() -> Figure:
    fig, ax = canvas(14, 6.3, "Diffusion takes fewer passes, each over the whole text")
    T, side, top = 12, 0.31, 5.0
    empty = torch.empty(1, 0, dtype=torch.long)
    order = torch.eye(T, dtype=torch.bool).tolist()
    runs = [("autoregression", order, T)]
    for name, steps, block in [("masked diffusion", 4, None), ("in blocks of 4", 6, 4)]:
        run = list(denoise(_Unsure(T, seed=0), empty, T, steps, block=block))[1:]
        runs.append((name, [step.revealed_BT[0].tolist() for step in run], T * len(run)))
    for k, (name, passes, positions) in enumerate(runs):
        x = 0.7 + 4.5 * k
        write(ax, x, 5.45, name, 17, ha="left", weight="bold")
        known, rows = [False] * T, []
        for revealed in passes:
            rows.append([
                tint(PREDICTED, 0.85) if now else tint(CACHE, 0.4) if before
                else "#E4E4E4" if k else None
                for now, before in zip(revealed, known, strict=True)
            ])  # fmt: skip
            known = [a or b for a, b in zip(known, revealed, strict=True)]
        cells(ax, x, top, rows, side)
        bottom = top - side * (len(passes) if k else T)
        write(ax, x, bottom - 0.3, f"{len(passes)} passes", 17, ha="left")
        write(ax, x, bottom - 0.72, f"{positions} positions computed", 14, ha="left", color=MUTED)
    write(ax, 0.35, top - side * T / 2, "forward pass", 13, rotation=90, color=MUTED)
    for k, (color, text) in enumerate([(tint(PREDICTED, 0.85), "uncovered in this pass"),
                                       (tint(CACHE, 0.4), "known before"),
                                       ("#E4E4E4", "masked")]):  # fmt: skip
        y = 1.9 - 0.42 * k
        cells(ax, 9.7, y + 0.15, [[color]], 0.3)
        write(ax, 10.2, y, text, 14, ha="left", color=INK)
    return fig


@figure(
    name="diffusion-lm",
    title="Diffusion-LM: noise becomes vectors, rounding makes them words",
    answers=["diffusion-lm"],
    notebook="05",
    alt="Four planes with the vectors of five words as labelled points. From left to right, at "
    "times 1, 0.5, 0.1 and 0, six dots, one a position, move from random noise onto the words' "
    "vectors. Below each plane the words nearest to the dots: by time 0 they read the cat sat on "
    "the mat.",
    sources=["lecture_util.alternatives.diffusion.blur, nearest_word; the noising, read backwards",
             "Li et al. 2022, arXiv:2205.14217"],
)  # fmt: skip
def diffusion_lm() -> Figure:
    title = "Diffusion-LM: noise becomes vectors, rounding makes them words"
    fig, axes = chart(title, columns=4, height=4.6)
    words = ["the", "cat", "sat", "on", "mat"]
    embed_VD = torch.tensor([[0.0, 2.2], [2.2, 0.5], [1.3, -2.0], [-1.4, -1.9], [-2.2, 0.7]])
    sentence = torch.tensor([0, 1, 2, 3, 0, 4])
    for ax, t in zip(axes, (1.0, 0.5, 0.1, 0.0), strict=True):
        generator = torch.Generator().manual_seed(4)  # the same noise at every time
        time = torch.tensor(t)
        vectors = blur(sentence, embed_VD, time, generator) if t else embed_VD[sentence]
        read = [words[w] for w in nearest_word(vectors, embed_VD).tolist()]
        ax.plot(*embed_VD.T.tolist(), "o", color=MUTED, ms=6, mfc="white", zorder=2)
        for word, (x, y) in zip(words, embed_VD.tolist(), strict=True):
            aside = (x, y - 0.85) if word == "cat" else (1.38 * x, 1.38 * y)  # clear of the dots
            ax.annotate(word, aside, ha="center", va="center", size=14, color=MUTED)
        points = [[round(value, 2) for value in row] for row in vectors.T.tolist()]
        ax.plot(*points, "o", color=MEASURED, ms=9, alpha=0.85, zorder=3)
        ax.set(xlim=(-3.9, 3.9), ylim=(-3.5, 3.6), aspect="equal", xticks=[], yticks=[])
        ax.spines[["top", "right"]].set_visible(True)
        ax.set_title("noise, t = 1" if t == 1 else f"t = {t:g}", size=15, weight="normal")
        lines = " ".join(read[:3]), " ".join(read[3:])
        ax.set_xlabel("\n".join(lines), size=15, weight="bold" if not t else "normal")
    caption(fig, shapes="noising read backwards, in 2 dimensions; a model must learn the way",
            source="Li et al. 2022, arXiv:2205.14217")  # fmt: skip
    return fig


@figure(
    name="mercury-speeds",
    title="Mercury's reported speeds; the others' hardware is unknown",
    answers=["Mercury picture"],
    notebook="05",
    alt="Bars of tokens a second as Inception Labs reports them, with HumanEval scores: Mercury "
    "Coder Mini 1,109 (88.0) and Small 737 (90.0) on H100; Gemini 2.0 Flash-Lite 201 (90.0), "
    "Claude 3.5 Haiku 61 (86.0), GPT-4o mini 59 (88.0), on hardware that is not known.",
    sources=[MERCURY],
)
def mercury_speeds() -> Figure:
    fig, ax = chart("Mercury's reported speeds; the others' hardware is unknown")
    labels = [f"{name} ({score})" for name, (_, score) in SPEEDS.items()]
    speeds = [speed for speed, _ in SPEEDS.values()]
    bars(labels, speeds, "tokens a second, as reported", color=MEASURED, highlight=labels[:2],
         ax=ax)  # fmt: skip
    ax.tick_params(axis="y", labelsize=15)
    for label, speed in zip(ax.texts, speeds, strict=True):
        label.set_text(f"{speed:,}")  # all four digits, as printed there
    caption(ax, device="Mercury on H100", shapes="in brackets HumanEval", source=MERCURY)
    return fig
