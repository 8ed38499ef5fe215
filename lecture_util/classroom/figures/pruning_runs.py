"""Still figures of notebook 07, as recorded: what a cut costs, and what repairs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import beside, chart
from lecture_util.classroom.figures.plots import plain_log_ticks
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.style import (
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    number,
    tint,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOURCE = "measured: benchmarks/pruning.py, its date and seed in its results"


def _run() -> dict:
    return recorded("pruning")


def _where(run: dict) -> str:
    return f"benchmarks/pruning.py, {run['date']}, {run['hardware']}"


def _layers_alt(run: dict) -> str:
    rows = {int(kept): entry for kept, entry in run["layers"].items()}
    mended = {int(kept): entry for kept, entry in run["layers repaired"].items()}
    costs = "; ".join(
        f"{kept} layers {rows[kept]['perplexity']:.1f}, repaired {entry['after']:.1f}"
        for kept, entry in mended.items()
    )
    least = rows[min(rows)]
    return (
        f"Left, perplexity against layers kept, logarithmic: all {max(rows)}, "
        f"{rows[max(rows)]['perplexity']:.1f}; {costs}. Right, decoding speed over the whole "
        f"model's: with {min(rows)} layers {least['times_as_fast']:.2f} times measured, "
        f"{least['predicted_times_as_fast']:.2f} predicted from the bytes read."
    )


@recorded_figure(
    "pruning",
    [*(f"layers/{kept}" for kept in range(30, 17, -1)),
     *(f"layers repaired/{kept}" for kept in (26, 22))],
    alt=_layers_alt,
    name="layers-kept",
    title="Fewer layers decode faster and predict worse; repair wins much back",
    answers=[],
    notebook="07",
    sources=[SOURCE],
)  # fmt: skip
def layers_kept() -> Figure:
    run = _run()
    title = "Fewer layers decode faster and predict worse; repair wins much back"
    fig, (left, right) = chart(title, 2, 5.8)
    rows = {int(kept): entry for kept, entry in run["layers"].items()}
    mended = {int(kept): entry for kept, entry in run["layers repaired"].items()}
    most, least = max(rows), min(rows)
    left.axhline(rows[most]["perplexity"], color=INK, lw=1.6, zorder=1)
    beside(left, least, rows[most]["perplexity"], f"whole\n{rows[most]['perplexity']:.1f}", size=15)
    steps = next(iter(mended.values()))["at"][-1]
    for entries, key, color, label in (
        (rows, "perplexity", MEASURED, "as cut"),
        (mended, "after", GUESS, f"{steps} steps\nlater"),
    ):
        left.plot(list(entries), [entry[key] for entry in entries.values()], "-o", color=color)
        last = min(entries)
        beside(left, last, entries[last][key], f"{label}\n{number(entries[last][key])}", color,
               size=15)  # fmt: skip
    for key, color, how, label, lift in (
        ("predicted_times_as_fast", PREDICTED, "--", "predicted\n{}", -18),
        ("times_as_fast", MEASURED, "o", "measured\n{}", 8),
    ):
        speeds = [entry[key] for entry in rows.values()]
        right.plot(list(rows), speeds, how, color=color)
        last = rows[least][key]
        beside(right, least, last, label.format(f"{last:.2f}×"), color, size=15,
               xytext=(8, lift))  # fmt: skip
    for ax in (left, right):
        ax.set(xlim=(most + 0.5, least - 0.5), xlabel="layers kept")
        ax.set_xticks(range(most, least - 1, -2))
    left.set(yscale="log", ylabel="perplexity")
    plain_log_ticks(left.yaxis)
    right.set_ylabel("decoding, times as fast")
    caption(fig, shapes="least influence first; predicted: bytes read, all over what is kept",
            source=_where(run))  # fmt: skip
    return fig


RECIPES = {
    "KL, T=1": "teacher's probabilities (KL)",
    "KL, T=2": "the same, softened: T = 2",
    "KL and cross-entropy": "KL and the text's tokens",
    "KL and hidden states": "KL and hidden states",
    "cross-entropy of the text": "the text's tokens only",
    "two rounds of 4": "KL, dropping 4 and 4",
    "fresh weights, KL": "KL, from fresh weights",
}
CONTROL = "whole, cross-entropy of the text"  # nothing to repair: what the text alone teaches


def _recovery_alt(run: dict) -> str:
    teacher, curve = run["recovery"]["whole"]["perplexity"], run["recovery"]["8 dropped"]
    middle = len(curve["at"]) // 2
    recipes = "; ".join(
        f"{label} {number(run['recipes'][name]['after'])}" for name, label in RECIPES.items()
    )
    return (
        f"Left, perplexity of 22 of 30 layers against steps of distillation: {curve['before']:.1f} "
        f"as cut, {curve['perplexity'][middle]:.1f} after {curve['at'][middle]}, "
        f"{curve['after']:.1f} after {curve['at'][-1]}; the whole model has {teacher:.1f}. Right, "
        f"after one shorter budget each: {recipes}; the whole model, trained on the text alike, "
        f"{number(run['recovery'][CONTROL]['after'])}."
    )


@recorded_figure(
    "pruning",
    [
        "recovery/whole",
        "recovery/8 dropped",
        f"recovery/{CONTROL}",
        *(f"recipes/{name}" for name in RECIPES),
    ],
    alt=_recovery_alt,
    name="recovery-curve",
    title="A few steps of distillation win most of the quality back",
    answers=["pruning-kd"],
    notebook="07",
    sources=[SOURCE],
)
def recovery_curve() -> Figure:
    run = _run()
    title = "A few steps of distillation win most of the quality back"
    fig, (left, right) = chart(title, 2, 5.8)
    teacher, curve = run["recovery"]["whole"]["perplexity"], run["recovery"]["8 dropped"]
    left.axhline(teacher, color=INK, lw=1.6, zorder=1)
    left.plot(curve["at"], curve["perplexity"], "-o", color=MEASURED)
    beside(left, 0, curve["before"], f"22 of 30 layers: {curve['before']:.1f}", MEASURED)
    beside(left, curve["at"][-1], curve["after"], f"{curve['after']:.1f}", MEASURED,
           xytext=(0, 14), ha="right", weight="bold")  # fmt: skip
    beside(left, curve["at"][-1], teacher, f"whole model: {teacher:.1f}", xytext=(0, -13),
           ha="right")  # fmt: skip
    left.set(yscale="log", xlabel="steps", ylabel="perplexity")
    left.set_ylim(teacher / 1.15, 1.15 * curve["before"])
    plain_log_ticks(left.yaxis)
    after = {name: run["recipes"][name]["after"] for name in RECIPES} | {
        CONTROL: run["recovery"][CONTROL]["after"]
    }
    near = [value for name, value in after.items() if not name.startswith("fresh")]
    edge = max(near) + 0.35 * (max(near) - min(near))
    for y, value in enumerate(after.values()):
        if value > edge:
            beside(right, edge, y, f"{number(value)} →", MEASURED, size=15, xytext=(0, 0),
                   ha="right", weight="bold")  # fmt: skip
            continue
        right.plot(value, y, "o", color=INK if y == len(RECIPES) else MEASURED, ms=12)
        beside(right, value, y, f"{value:.1f}", size=14, xytext=(11, 0))
    right.set_yticks(range(len(after)), [*RECIPES.values(), "whole model, text only"], size=13)
    right.set(ylim=(len(after) - 0.4, -0.6), xlabel="perplexity (axis cut)")
    right.set_xlim(min(near) - 0.1 * (max(near) - min(near)), edge)
    right.grid(axis="y", visible=False)
    right.tick_params(axis="y", length=0)
    long, short = curve["options"], run["recipes"]["KL, T=1"]["options"]
    caption(fig, shapes=f"left: {long['B']}×{long['T']} tokens a step; right: {short['steps']} "
            f"steps of {short['B']}×{short['T']}, as cut {curve['before']:.1f}",
            source=_where(run))  # fmt: skip
    return fig


ORDERS = {
    "block influence, measured once": "least influence",
    "block influence, measured after each": "least influence,\nmeasured after each",
    "perplexity without, measured once": "least harm\nalone",
    "every third from the second": "every third",
    "the last but one": "8 before the last",
}
WIDTHS = {"layers": "8 layers", "neurons": "neurons", "channels": "channels"}


def _cuts_alt(run: dict) -> str:
    orders = "; ".join(
        f"{label} {number(run['orders'][name]['perplexity'])}".replace("\n", " ")
        for name, label in ORDERS.items()
    )
    widths = "; ".join(
        f"{label} {number(run['width'][name]['before'])} and {number(run['width'][name]['after'])}"
        for name, label in WIDTHS.items()
    )
    return (
        f"Left, perplexity without 8 layers, as cut, by how they are chosen: {orders}. Right, as "
        f"many parameters less, perplexity as cut and after a short repair: {widths}."
    )


@recorded_figure(
    "pruning",
    [*(f"orders/{name}" for name in ORDERS), *(f"width/{name}" for name in WIDTHS)],
    alt=_cuts_alt,
    name="what-to-cut",
    title="One size, other cuts: which parts go decides what is left",
    answers=[],
    notebook="07",
    sources=[SOURCE],
)
def what_to_cut() -> Figure:
    run = _run()
    title = "One size, other cuts: which parts go decides what is left"
    fig, (left, right) = chart(title, 2, 5.4)
    for y, name in enumerate(ORDERS):
        value = run["orders"][name]["perplexity"]
        left.plot(value, y, "o", color=MEASURED, ms=13)
        shown = number(value) if value < 1e6 else f"{value / 1e6:.0f} million"
        far = dict(xytext=(-12, 0), ha="right") if value > 1e6 else dict(xytext=(12, 0))
        beside(left, value, y, shown, size=15, **far)
    _rows(left, list(ORDERS.values()))
    left.set_title("which 8 layers, as cut", size=15)
    for y, name in enumerate(WIDTHS):
        entry = run["width"][name]
        right.plot([entry["after"], entry["before"]], [y, y], color=tint(MUTED, 0.5), lw=3)
        for key, color, lift in (("before", MEASURED, 17), ("after", GUESS, -18)):
            right.plot(entry[key], y, "o", color=color, ms=13)
            beside(right, entry[key], y, number(entry[key]), color, size=15,
                   xytext=(0, lift), ha="center")  # fmt: skip
    _rows(right, [f"{label}\n{run['width'][name]['times_as_fast']:.2f}× as fast"
                  for name, label in WIDTHS.items()])  # fmt: skip
    right.set_title("as many weights less", size=15)
    for ax, entries in ((left, run["orders"]), (right, run["width"])):
        values = [entry[key] for entry in entries.values()
                  for key in ("perplexity", "before", "after")
                  if isinstance(entry.get(key), float | int)]  # fmt: skip
        room = (max(values) / min(values)) ** 0.12
        ax.set(xscale="log", xlim=(min(values) / room, max(values) * room), xlabel="perplexity")
        plain_log_ticks(ax.xaxis)
    steps = run["width"]["layers"]["options"]["steps"]
    caption(fig, shapes=f"right: as cut (orange), after {steps} steps of distillation (green)",
            source=_where(run))  # fmt: skip
    return fig


def _rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names, size=14)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
