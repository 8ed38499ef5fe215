"""Still figures of notebook 08: Leviathan's and Chen's published speed-ups, beside the formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lecture_util.classroom.figures.diagram import beside, chart
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    tint,
)
from lecture_util.speculative.expected import best_gamma, expected_tokens, speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVIATHAN = "Leviathan et al. 2022, arXiv:2211.17192"
CHEN = "Chen et al. 2023, arXiv:2302.01318"


class Published(NamedTuple):
    """A row of Leviathan's Table 2: a T5-XXL of 11B, drafted for by a smaller T5."""

    name: str
    gamma: int
    alpha: float
    speedup: float


TABLE_2 = (
    Published("translation, T=0", 7, 0.75, 3.4),
    Published("translation, T=1", 7, 0.62, 2.6),
    Published("summaries, T=0", 5, 0.65, 3.1),
    Published("summaries, T=1", 5, 0.53, 2.3),
    Published("T5-base, T=1", 3, 0.55, 2.2),
    Published("T5-large, T=1", 3, 0.56, 1.7),
)
COST = 0.05  # of the right panel: one guess, in forwards of the target


def _leviathan_alt() -> str:
    rows = "; ".join(
        f"γ={gamma}, α={alpha:.2f}, {times}× ({expected_tokens(alpha, gamma):.2f})"
        for _, gamma, alpha, times in TABLE_2
    )
    return (
        "Left, speed-up against α: formulas for γ = 3, 5, 7 rise ever steeper. Measured with "
        f"T5-XXL (in brackets the formula's tokens a round): {rows}. Right, predicted against γ "
        f"if a guess costs {COST} forwards: best at "
        + ", ".join(f"γ={best_gamma(a, COST)} for α={a}" for a in (0.5, 0.7, 0.9))
        + "."
    )


@figure(
    name="leviathan",
    title="Speed grows with agreement; of guesses there is a best number",
    answers=["Speculative decoding, T5-XXL (slides)"],
    notebook="08",
    alt=_leviathan_alt(),
    sources=[f"{LEVIATHAN}, Table 2", "lecture_util.speculative.expected"],
)
def leviathan() -> Figure:
    title = "Speed grows with agreement; of guesses there is a best number"
    fig, (left, right) = chart(title, 2, 6.0)
    alphas = [k / 100 for k in range(45, 83, 2)]
    for gamma, strength in ((3, 0.45), (5, 0.7), (7, 1)):
        values = [expected_tokens(alpha, gamma) for alpha in alphas]
        left.plot(alphas, values, "--", color=tint(PREDICTED, strength))
        beside(left, alphas[-1], values[-1], f"γ={gamma}", PREDICTED, size=15)
    for k, (letter, row) in enumerate(zip("ABCDEF", TABLE_2, strict=True)):
        bound = expected_tokens(row.alpha, row.gamma)
        left.plot([row.alpha] * 2, [bound, row.speedup], color=tint(MEASURED, 0.5), lw=2)
        left.plot(row.alpha, bound, "o", color=PREDICTED, ms=6, zorder=3)
        left.plot(row.alpha, row.speedup, "o", color=MEASURED, ms=11, zorder=4)
        shift, ha = {
            "C": ((-9, 5), "right"),
            "D": ((-9, 5), "right"),
            "E": ((0, 14), "center"),
        }.get(letter, ((9, -5), "left"))
        beside(left, row.alpha, row.speedup, letter, INK, size=15, weight="bold", xytext=shift,
               ha=ha)  # fmt: skip
        y = 0.97 - 0.062 * k
        how = {"transform": left.transAxes, "size": 13, "va": "top"}
        left.text(0.03, y, letter, weight="bold", **how)
        left.text(0.09, y, f"{row.name}, γ={row.gamma}", **how)
        left.text(0.62, y, f"{row.speedup}×", **how)
    left.set(xlim=(alphas[0], alphas[-1]), ylim=(1.4, 5.2), xlabel="α, how likely a guess is "
             "accepted", ylabel="speed-up; dashed: tokens a round")  # fmt: skip
    left.set_title("T5-XXL as published", size=15)
    _by_gamma(right)
    caption(fig, shapes="dashed: guesses free (left), alike and independent, which no real run "
            "is, so measured may lie above; T: temperature; T5-small drafts unless named",
            source=f"{LEVIATHAN}, Table 2")  # fmt: skip
    return fig


def _by_gamma(ax: Axes) -> None:
    """Predicted over the number of guesses, the best of each curve ringed."""
    gammas = range(16)
    for alpha in (0.5, 0.7, 0.8, 0.9):
        values = [speedup(alpha, gamma, COST) for gamma in gammas]
        best = best_gamma(alpha, COST)
        ax.plot(gammas, values, "--", color=PREDICTED)
        ax.plot(best, values[best], "o", color=PREDICTED, ms=11, zorder=4)
        beside(ax, best, values[best], f"γ={best}: {values[best]:.1f}×", INK, size=13,
               xytext=(0, 14 if best > 4 else -15), ha="center")  # fmt: skip
        beside(ax, gammas[-1], values[-1], f"α={alpha}", PREDICTED, size=15)
    ax.axhline(1, color=MUTED, lw=1.2)
    ax.set(xlim=(0, 15), ylim=(0.8, 5.2), xticks=range(0, 16, 3), xlabel="γ, guesses a round")
    ax.set_title(f"predicted, a guess costs {COST} forwards", size=15)


class Row(NamedTuple):
    """A row of Chen's Table 1: score without and with speculation, ms a token, speed-up printed."""

    name: str
    before: str
    after: str
    ms: float
    printed: float


BASELINE_MS = 14.1
TABLE_1 = (
    Row("XSum, nucleus", "0.112", "0.114", 7.52, 1.92),
    Row("XSum, greedy", "0.157", "0.156", 7.00, 2.01),
    Row("HumanEval", "45.1%", "47.0%", 5.73, 2.46),
)


def _chen_alt() -> str:
    rows = "; ".join(
        f"{row.name} {row.ms:.2f} ms, {BASELINE_MS / row.ms:.2f} times as fast, score "
        f"{row.before} before and {row.after} after"
        for row in TABLE_1
    )
    return f"Milliseconds a token as published: {BASELINE_MS} without speculation. With it: {rows}."


@figure(
    name="chen-results",
    title="Chen et al.: about twice as fast, at about the same scores",
    answers=["speculative-sampling-results"],
    notebook="08",
    alt=_chen_alt(),
    sources=[f"{CHEN}, Table 1", "speed-ups computed from its times"],
)
def chen_results() -> Figure:
    fig, ax = chart("Chen et al.: about twice as fast, at about the same scores", height=4.6)
    for y, row in enumerate(TABLE_1):
        ax.barh(y, row.ms, color=MEASURED, height=0.56, zorder=2)
        ax.plot([row.ms, BASELINE_MS], [y, y], color=tint(MUTED, 0.5), lw=2, zorder=1)
        beside(ax, row.ms, y, f"{row.ms:.2f} ms, {BASELINE_MS / row.ms:.2f}× as fast", INK, size=15,
               weight="bold", xytext=(9, 13))  # fmt: skip
        ax.text(BASELINE_MS + 0.45, y, f"{row.before} → {row.after}", size=16, va="center")
    ax.axvline(BASELINE_MS, ymax=0.84, color=INK, lw=2)
    ax.text(BASELINE_MS - 0.2, -0.68, f"without: {BASELINE_MS} ms", size=15, ha="right",
            va="center")  # fmt: skip
    ax.text(BASELINE_MS + 0.45, -0.68, "score", size=15, va="center", weight="bold")
    ax.set_yticks(range(len(TABLE_1)), [row.name for row in TABLE_1], size=16)
    ax.set(xlim=(0, 18.5), ylim=(len(TABLE_1) - 0.5, -0.95), xlabel="ms a token")
    ax.set_xticks(range(0, 15, 2))
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    first = TABLE_1[0]
    caption(fig, shapes=f"draft of 4B, K = 4 guesses, batch 1; for {first.name} the paper prints "
            f"{first.printed}×, its times give {BASELINE_MS / first.ms:.2f}×",
            source=f"{CHEN}, Table 1")  # fmt: skip
    return fig
