"""Still figures of notebook 08, as recorded: what each draft brings, and tasks that repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import matplotlib.pyplot as plt

from lecture_util.classroom.figures.diagram import beside, chart, headline
from lecture_util.classroom.figures.records import recorded_figure
from lecture_util.classroom.figures.small_caches import recorded
from lecture_util.classroom.figures.speculative_records import DTYPES, MADE_BY, NAMES, where
from lecture_util.classroom.figures.style import (
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    WEIGHTS,
    caption,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Row(NamedTuple):
    """A draft in one dtype, as measured."""

    name: str
    short: str
    entry: dict


def _rows(run: dict) -> list[Row]:
    return [
        Row(NAMES[name], short, run["drafters"][name][dtype])
        for name in NAMES
        for dtype, short in DTYPES.items()
    ]


def _drafters_alt(run: dict) -> str:
    rows = "; ".join(
        f"{row.name} {row.short} {row.entry['tokens_per_round']:.2f} tokens, "
        f"{row.entry['speedup']:.2f}× ({row.entry['predicted']:.2f})"
        for row in _rows(run)
    )
    return (
        "Bars of tokens a round, bars of where a round's time goes, and speed-up measured "
        f"(predicted in brackets) over plain decoding: {rows}."
    )


PARTS = {"draft": (GUESS, ("draft_ms",)), "target": (WEIGHTS, ("target_ms",)),
         "rest": ("#BBBBBB", ("verify_ms", "other_ms"))}  # fmt: skip


@recorded_figure(
    "speculative",
    [f"drafters/{name}/{dtype}/profile" for name in NAMES for dtype in DTYPES],
    alt=_drafters_alt,
    name="drafters-measured",
    title="A round brings more tokens than speed: guesses and checks cost time",
    answers=["n-grams (slides)", "Medusa-1 and -2 (slides)", "medusa-eagle"],
    notebook="08",
    sources=[MADE_BY],
)
def drafters_measured() -> Figure:
    run = recorded("speculative")
    title = "A round brings more tokens than speed: guesses and checks cost time"
    fig, axes = plt.subplots(1, 3, figsize=(10.4, 6.0), layout="constrained", sharey=True)
    headline(fig, title)
    tokens, time, speed = axes
    rows = _rows(run)
    places = [2.35 * (k // 2) + k % 2 for k in range(len(rows))]
    for y, row in zip(places, rows, strict=True):
        entry, bright = row.entry, 1 if row.short == "bf16" else 0.55
        tokens.barh(y, entry["tokens_per_round"], color=tint(MEASURED, bright), height=0.8)
        beside(tokens, entry["tokens_per_round"], y, f"{entry['tokens_per_round']:.2f}", size=14)
        start = 0.0
        for label, (color, parts) in PARTS.items():
            value = sum(entry["profile"][part] for part in parts)
            time.barh(y, value, left=start, color=color, height=0.8,
                      label=label if y == 0 else None)  # fmt: skip
            start += value
        plain_ms = 1e3 / entry["plain_tokens_per_s"]
        time.plot([plain_ms] * 2, [y - 0.45, y + 0.45], color=INK, lw=2.4)
        speed.plot([entry["predicted"], entry["speedup"]], [y, y], color=tint(MUTED, 0.5), lw=3)
        speed.plot(entry["predicted"], y, "o", color=PREDICTED, ms=10, mfc="white", mew=2.2)
        speed.plot(entry["speedup"], y, "o", color=MEASURED, ms=11)
        pair = sorted((entry["predicted"], entry["speedup"]))
        left_of = pair[1] < 1  # keep clear of the line at 1
        beside(speed, pair[0 if left_of else 1], y, f"{entry['speedup']:.2f}×", size=14,
               xytext=(-11 if left_of else 11, 0), ha="right" if left_of else "left")  # fmt: skip
    names = [f"{row.name}  {row.short}" if row.short == "fp32" else row.short for row in rows]
    tokens.set_yticks(places, names, size=14)
    tokens.set_ylim(places[-1] + 0.6, -1.75)
    most = max(row.entry["tokens_per_round"] for row in rows)
    tokens.set(xlim=(0, 1.3 * most), xlabel="tokens")
    time.set_xlabel("ms; line: one plain token")
    reached = [row.entry[key] for row in rows for key in ("predicted", "speedup")]
    low, high = min(0.9, *reached), max(1.1, *reached)
    span = high - low
    speed.set(xlim=(low - (0.6 if low < 0.9 else 0.12) * span, high + 0.45 * span))
    speed.set_xlabel("times plain decoding")
    speed.axvline(1, ymax=0.92, color=INK, lw=1.6, zorder=1)
    for ax, name in zip(axes, ("tokens a round", "time of a round", "speed-up"), strict=True):
        ax.set_title(name, size=15)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    time.legend(loc="upper left", ncols=3, fontsize=13, handlelength=0.8, handletextpad=0.3,
                columnspacing=0.7, borderaxespad=0)  # fmt: skip
    speed.text(0.02, 0.985, "○ predicted  ● measured", transform=speed.transAxes, size=13, va="top")
    caption(fig, shapes="SmolLM2-135M, B=1, greedy, held-out prompts; predicted: tokens a round "
            "over the cost of draft and verifying forward", source=where(run))  # fmt: skip
    return fig


def _by_task(run: dict) -> dict[tuple[str, str], dict]:
    """(task, dtype) -> rates; of several prompts, all their tokens over all their time."""
    found: dict[tuple[str, str], list[dict]] = {}
    for entry in run["grounded"]:
        found.setdefault((entry["task"], entry["dtype"]), []).append(entry)
    return {
        key: {
            rate: sum(e["tokens"] for e in entries) / sum(e["tokens"] / e[rate] for e in entries)
            for rate in RATES
        }
        for key, entries in found.items()
    }


RATES = {
    "plain": (MEASURED, "white", "ours: plain"),
    "ngram": (MEASURED, MEASURED, "n-gram drafts"),
    "hf_plain": (PREDICTED, "white", "transformers: plain"),
    "hf_lookup": (PREDICTED, PREDICTED, "prompt lookup"),
}


def _grounded_alt(run: dict) -> str:
    by_task = _by_task(run)
    rows = ". ".join(
        f"{short}: "
        + "; ".join(
            f"{task} {rates['plain']:.0f}, {rates['ngram']:.0f}, {rates['hf_lookup']:.0f}"
            for (task, kind), rates in by_task.items()
            if kind == dtype
        )
        for dtype, short in DTYPES.items()
    )
    return (
        "Tokens a second on tasks whose answer repeats the prompt: our plain decoding, our n-gram "
        f"drafts, transformers' prompt lookup. {rows}."
    )


@recorded_figure(
    "speculative",
    ["grounded"],
    alt=_grounded_alt,
    name="grounded-tasks",
    title="Where the answer repeats its prompt, looking it up pays",
    answers=["n-grams (slides)"],
    notebook="08",
    sources=[MADE_BY],
)
def grounded_tasks() -> Figure:
    run = recorded("speculative")
    fig, axes = chart("Where the answer repeats its prompt, looking it up pays", 2, 5.6)
    rows = _by_task(run)
    tasks = list(dict.fromkeys(task for task, _ in rows))
    top = max(max(rates.values()) for rates in rows.values())
    for ax, (dtype, short) in zip(axes, DTYPES.items(), strict=True):
        for y, task in enumerate(tasks):
            if (task, dtype) not in rows:
                continue
            rates = rows[task, dtype]
            for lift, base, drafted in ((-0.17, "plain", "ngram"), (0.17, "hf_plain", "hf_lookup")):
                start, stop = rates[base], rates[drafted]
                ax.plot([start, stop], [y + lift] * 2, color=tint(RATES[base][0], 0.45), lw=3)
                for name in (base, drafted):
                    edge, face, _ = RATES[name]
                    ax.plot(rates[name], y + lift, "o", color=edge, mfc=face, mew=2.2, ms=10)
                beside(ax, max(start, stop), y + lift, f"{stop / start:.1f}×", RATES[base][0],
                       size=14, xytext=(11, 0))  # fmt: skip
        ax.set_yticks(range(len(tasks)), tasks if ax is axes[0] else [""] * len(tasks), size=15)
        ax.set(xlim=(0, 1.16 * top), ylim=(len(tasks) - 0.4, -1.1), xlabel="tokens a second")
        ax.set_title(short, size=15)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    keys = [plt.Line2D([], [], marker="o", ls="", color=edge, mfc=face, mew=2.2, ms=10, label=label)
            for edge, face, label in RATES.values()]  # fmt: skip
    for ax, pair in zip(axes, (keys[:2], keys[2:]), strict=True):
        ax.legend(handles=pair, loc="upper left", ncols=2, fontsize=13, handletextpad=0.1,
                  columnspacing=1, borderaxespad=0)  # fmt: skip
    caption(fig, shapes="SmolLM2-135M, B=1, greedy, same weights and prompts in one run; ×: over "
            "the plain decoding beside it", source=where(run))  # fmt: skip
    return fig
