"""Still figures of notebook 11: what the papers report of soups, TIES and added vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from lecture_util.classroom.figures.diagram import beside, chart, headline
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOUPS = "Wortsman et al. 2022, arXiv:2203.05482"
SOUPS_FILES = "github.com/mlfoundations/model-soups (individual_model_, soup and ensemble results)"
# (ImageNet, mean of five shifted sets), % right, computed from the authors' *_results.jsonl
FINE_TUNES = (
    (75.57, 47.15), (77.27, 47.38), (76.21, 37.15), (78.70, 47.41), (75.92, 47.09), (75.92, 47.09),
    (78.56, 47.87), (77.83, 47.60), (77.20, 47.68), (78.65, 47.80), (78.50, 48.42), (77.35, 44.21),
    (77.31, 47.21), (78.34, 47.74), (76.53, 36.72), (77.33, 48.66), (76.56, 41.78), (78.73, 49.00),
    (75.93, 42.02), (78.33, 48.65), (77.57, 49.60), (78.34, 49.02), (77.77, 47.41), (76.80, 46.28),
    (78.83, 44.59), (78.47, 48.09), (78.23, 41.26), (79.76, 48.75), (77.74, 50.15), (78.12, 47.41),
    (77.74, 46.48), (74.99, 38.65), (79.46, 43.24), (76.96, 47.88), (79.41, 43.95), (76.66, 47.35),
    (78.43, 47.10), (77.28, 49.15), (77.56, 47.70), (76.15, 42.33), (78.17, 45.29), (76.70, 49.93),
    (78.70, 41.65), (80.39, 47.97), (79.89, 43.99), (78.64, 49.62), (79.12, 47.85), (78.83, 49.40),
    (79.91, 48.28), (78.92, 48.93), (78.63, 47.66), (78.28, 47.91), (77.91, 49.98), (77.75, 40.37),
    (79.27, 47.47), (76.53, 43.50), (78.41, 48.66), (79.36, 47.82), (77.81, 47.89), (78.34, 46.71),
    (79.50, 48.15), (78.11, 50.67), (77.67, 49.12), (79.53, 47.76), (77.14, 49.50), (76.57, 46.83),
    (76.90, 45.51), (78.18, 47.43), (77.31, 49.49), (79.79, 48.43), (79.28, 45.61), (76.37, 46.97),
)  # fmt: skip
TOGETHER = {
    "uniform soup": (79.97, 51.58),
    "greedy soup": (81.03, 50.86),
    "ensemble": (81.19, 50.87),
}
TABLE_3 = {  # the same, as the paper's Table 3 is transcribed
    "best single": (80.38, 47.83),
    "uniform soup": (79.97, 51.45),
    "greedy soup": (81.03, 50.75),
    "ensemble": (81.19, 50.77),
}


def best_single() -> tuple[float, float]:
    """The fine-tune with the most right on ImageNet."""
    return max(FINE_TUNES)


def _clip_alt() -> str:
    points = "; ".join(f"{name} {x:.2f} and {y:.2f}" for name, (x, y) in TOGETHER.items())
    x, y = best_single()
    return (
        f"Points, % right on shifted images against % right on ImageNet: {len(FINE_TUNES)} "
        f"fine-tunes of CLIP ViT-B/32, scattered below and left of three others. Best single "
        f"{x:.2f} and {y:.2f}; {points}. No fine-tune is above {max(FINE_TUNES)[0]:.2f} on "
        f"ImageNet or {max(shift for _, shift in FINE_TUNES):.2f} shifted."
    )


@figure(
    name="soup-clip",
    title="A greedy soup beats each of 72 models, and costs as much as one",
    answers=["Model soups, CLIP (slides)"],
    notebook="11",
    alt=_clip_alt(),
    sources=[f"{SOUPS}, Table 3", f"{SOUPS_FILES}; shift means computed from them"],
)
def soup_clip() -> Figure:
    fig, ax = chart("A greedy soup beats each of 72 models, and costs as much as one", height=6.0)
    ax.plot(*zip(*FINE_TUNES, strict=True), "o", color=tint(MUTED, 0.55), ms=8)
    beside(ax, 75.2, 44.5, f"{len(FINE_TUNES)} fine-tunes", MUTED, size=15, weight="bold")
    points = {"best single": best_single()} | TOGETHER
    for name, marker, color, shift, ha in (
        ("best single", "o", INK, (11, -12), "left"),
        ("uniform soup", "D", PREDICTED, (0, 18), "center"),
        ("greedy soup", "D", MEASURED, (14, -16), "left"),
        ("ensemble", "^", ACCENT, (12, 13), "left"),
    ):
        x, y = points[name]
        ax.plot(x, y, marker, color=color, ms=13, zorder=4)
        beside(ax, x, y, f"{name} {x:.1f} | {y:.1f}", color, size=15, xytext=shift, ha=ha,
               weight="bold")  # fmt: skip
    ax.set(xlim=(74.7, 84.4), ylim=(36, 53.2), xlabel="ImageNet, % right (axis cut)")
    ax.set_ylabel("five shifted sets, mean, % right (axis cut)")
    shifts = ", ".join(f"{shift:.2f}" for _, shift in TABLE_3.values())
    caption(fig, shapes=f"CLIP ViT-B/32; bold: ImageNet | shifted; an ensemble costs what all its "
            "models cost; the paper's table, as one "
            f"transcription has it, gives shift means {shifts} (best single, uniform, greedy, "
            "ensemble)", source="the authors' results (model-soups on GitHub)")  # fmt: skip
    return fig


TASKS = ("MRPC", "RTE", "CoLA", "SST-2")
GAINS = {"BERT": (0.0, 0.7, 0.0, 0.5), "T5": (0.6, 0.8, 0.4, 0.1)}


def _glue_alt() -> str:
    rows = "; ".join(
        f"{model}: " + ", ".join(f"{task} {gain}" for task, gain in zip(TASKS, gains, strict=True))
        for model, gains in GAINS.items()
    )
    return f"Bars of points gained by a greedy soup over its best single model. {rows}."


@figure(
    name="soup-glue",
    title=f"On text a greedy soup gains {max(map(max, GAINS.values()))} points at most, often less",
    answers=["Model soups, BERT and T5 on GLUE (slides)"],
    notebook="11",
    alt=_glue_alt(),
    sources=[f"{SOUPS}, as one public transcription of its table gives it"],
)
def soup_glue() -> Figure:
    title = (
        f"On text a greedy soup gains {max(map(max, GAINS.values()))} points at most, often less"
    )
    fig, ax = chart(title, height=4.6)
    for k, ((model, gains), color) in enumerate(
        zip(GAINS.items(), (PREDICTED, MEASURED), strict=True)
    ):
        places = [x + 0.38 * (k - 0.5) for x in range(len(TASKS))]
        drawn = ax.bar(places, gains, width=0.36, color=color)
        ax.bar_label(drawn, [f"{gain:+.1f}" if gain else "0" for gain in gains], padding=3,
                     size=16, color=INK)  # fmt: skip
        ax.text(0.02 + 0.09 * k, 0.93, model, transform=ax.transAxes, size=17, weight="bold",
                color=color, va="top")  # fmt: skip
    ax.axhline(0, color=INK, lw=1.4)
    ax.set_xticks(range(len(TASKS)), TASKS, size=16)
    ax.set(ylim=(0, 1.1), ylabel="points over the best single")
    ax.grid(axis="x", visible=False)
    ax.tick_params(axis="x", length=0)
    caption(fig, shapes="each task in its own metric", source=f"{SOUPS}, as one public "
            "transcription gives it")  # fmt: skip
    return fig


TIES = "Yadav et al. 2023, arXiv:2306.01708"
EIGHT_TASKS = {  # ViT-B/32, mean of 8 tasks, % right
    "before fine-tuning": 48.0,
    "averaged": 65.8,
    "task arithmetic": 69.1,
    "TIES": 72.4,
    "8 fine-tunes, each on its task": 90.5,
}


def _ties_alt() -> str:
    rows = "; ".join(f"{name} {value}" for name, value in EIGHT_TASKS.items())
    return f"Bars of % right, mean of eight image tasks with CLIP's ViT-B/32. {rows}."


@figure(
    name="ties-published",
    title="TIES leads among merges, far below eight specialists",
    answers=["TIES, results (slides)"],
    notebook="11",
    alt=_ties_alt(),
    sources=[
        f"{TIES}, as later papers reprint its row; before fine-tuning: one transcription",
    ],
)
def ties_published() -> Figure:
    fig, ax = plt.subplots(figsize=(10.4, 4.6), layout="constrained")
    headline(fig, "TIES leads among merges, far below eight specialists")
    colors = [tint(MUTED, 0.5), *(tint(MEASURED, s) for s in (0.45, 0.7)), MEASURED, GUESS]
    drawn = ax.barh(range(len(EIGHT_TASKS)), EIGHT_TASKS.values(), color=colors, height=0.66)
    ax.bar_label(drawn, [f"{value}" for value in EIGHT_TASKS.values()], padding=6, size=16,
                 color=INK)  # fmt: skip
    ax.set_yticks(range(len(EIGHT_TASKS)), list(EIGHT_TASKS), size=15)
    ax.set(ylim=(len(EIGHT_TASKS) - 0.5, -0.5), xlim=(0, 104), xlabel="% right, mean of 8 tasks")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    for y, text in (
        (0, "1 model"),
        (4, "8 models"),
        (1, "1 model"),
        (2, "1 model"),
        (3, "1 model"),
    ):
        ax.text(1.5, y, text, size=14, va="center", color="white" if y > 2 else INK)
    caption(fig, shapes="CLIP ViT-B/32, 8 image tasks; 48.0 from one transcription, the others as "
            "later papers reprint them", source=TIES)  # fmt: skip
    return fig


ADDING = "Ilharco et al. 2022, arXiv:2212.04089"
CLIP_KEPT = {"2 added (mean of pairs)": 98.9, "8 added": 91.2}  # % of the specialists' accuracy
T5_GLUE = {"fine-tuned": 78.1, "and others' vectors": 78.6}  # mean over GLUE


def _adding_alt() -> str:
    kept, glue = (
        "; ".join(f"{name} {value}" for name, value in values.items())
        for values in (CLIP_KEPT, T5_GLUE)
    )
    return (
        "Two panels, as published. Left, bars: CLIP with task vectors added: accuracy in % of "
        f"that of the fine-tunes, each on its own task: {kept}; a line at 100. Right, two points: "
        f"T5-base, mean score on GLUE: {glue}."
    )


@figure(
    name="vectors-added",
    title="Two task vectors add almost freely, eight cost some of each",
    answers=["Task vectors added, CLIP (slides)", "Task vectors in pairs, T5-base (slides)"],
    notebook="11",
    alt=_adding_alt(),
    sources=[f"{ADDING}, as public transcriptions give its numbers"],
)
def vectors_added() -> Figure:
    fig, axes = chart("Two task vectors add almost freely, eight cost some of each", 2, 4.4)
    left, right = axes
    drawn = left.bar(range(len(CLIP_KEPT)), CLIP_KEPT.values(), width=0.5, color=PREDICTED)
    left.bar_label(drawn, [f"{value}" for value in CLIP_KEPT.values()], padding=-24, size=16,
                   color="white")  # fmt: skip
    right.plot(range(len(T5_GLUE)), T5_GLUE.values(), "o", color=MEASURED, ms=14)
    for x, value in enumerate(T5_GLUE.values()):
        beside(right, x, value, f"{value}", MEASURED, size=16, xytext=(14, 0))
    for ax, values, name, low, high in (
        (left, CLIP_KEPT, "CLIP: % of the specialists' accuracy", 0, 112),
        (right, T5_GLUE, "T5-base: GLUE, mean score (axis cut)", 77.7, 79),
    ):
        ax.set_xticks(range(len(values)), list(values), size=14)
        ax.set(ylim=(low, high), xlim=(-0.6, len(values) - 0.4))
        ax.grid(axis="x", visible=False)
        ax.tick_params(axis="x", length=0)
        ax.set_title(name, size=15)
    left.axhline(100, color=INK, lw=1.4, ls=":")
    caption(fig, shapes="one model left in each case; T5's vectors are those of other people's "
            "fine-tunes", source=f"{ADDING}, public transcriptions")  # fmt: skip
    return fig
