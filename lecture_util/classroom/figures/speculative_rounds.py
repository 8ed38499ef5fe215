"""Still figures of notebook 08: one round of speculation, and why it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lecture_util.classroom.figures.diagram import arrow, box, canvas, chart, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
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
from lecture_util.speculative.verify import agreement, residual

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPERS = "Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318"
SEQUENCE = ("The", "cat", "sat")
# The round drawn, invented: guess, its q, its p, and the uniform number that decides.
ROUND = (("on", 0.80, 0.90, 0.64), ("the", 0.60, 0.45, 0.31), ("red", 0.50, 0.10, 0.57),
         ("roof", 0.40, 0.30, 0.12))  # fmt: skip
CORRECTION = "mat"


def kept_of_round() -> int:
    """How many guesses of the round drawn are accepted."""
    kept = 0
    for _, q, p, u in ROUND:
        if u >= min(1, p / q):
            break
        kept += 1
    return kept


@figure(
    name="speculative-round",
    title="One forward of the target judges every guess at once",
    answers=["speculative-sampling-algorithm"],
    notebook="08",
    alt="After The cat sat the draft guesses on, the, red, roof, with q .80, .60, .50, .40. One "
    "forward of the target gives each its p: .90, .45, .10, .30. Accepted with probability p/q, at "
    "most 1: on and the are, red is not (.20 against a drawn .57), roof is never looked at. The "
    "target's own token follows, mat, drawn from the residual: three tokens for one forward.",
    sources=[f"the order of the steps: {PAPERS}", "words and probabilities invented"],
)
def speculative_round() -> Figure:
    fig, ax = canvas(15, 7.5, "One forward of the target judges every guess at once")
    kept, left, pitch, wide = kept_of_round(), 4.7, 2.0, 1.75
    middles = [left + pitch * k + wide / 2 for k in range(len(ROUND) + 1)]
    for k, word in enumerate(SEQUENCE):
        box(ax, 0.4 + 1.2 * k, 6.3, 1.1, 0.7, word, MUTED, 0.15, 17)
    for k, (word, *_) in enumerate(ROUND):
        box(ax, left + pitch * k, 6.3, wide, 0.7, word, GUESS, 0.3, 18)
    for y, name, note in (
        (5.7, "the draft: q", "guesses one after the other"),
        (4.65, "the target: p", "reads them all in one forward"),
        (3.45, "accept with", "probability min(1, p/q)"),
        (2.5, "drawn", "evenly from 0 to 1, fresh each time"),
        (1.25, f"{kept + 1} tokens", "for one forward"),
    ):
        write(ax, 0.4, y, name, 16, ha="left", weight="bold")
        write(ax, 0.4, y - 0.4, note, 13, ha="left", color=MUTED)
    _target(ax, left, middles, wide)
    for k, (middle, (_, q, p, u)) in enumerate(zip(middles, ROUND, strict=False)):
        looked_at = k <= kept
        ink = INK if looked_at else tint(MUTED, 0.7)
        write(ax, middle, 5.7, f"{q:.2f}", 17, color=shade_of(looked_at, GUESS))
        write(ax, middle, 4.65, f"{p:.2f}", 17, zorder=5, color=ink)
        if not looked_at:
            write(ax, middle, 2.95, "never\nlooked at", 15, color=MUTED)
            continue
        write(ax, middle, 3.45, f"{min(1, p / q):.2f}", 17)
        sign = "<" if u < min(1, p / q) else "≥"
        write(ax, middle, 2.5, f"{u:.2f} {sign} {min(1, p / q):.2f}", 16)
    _outcome(ax, kept, left, pitch, wide, middles)
    return fig


def shade_of(shown: bool, color: str) -> object:
    """A colour, or a pale grey for what plays no part."""
    return color if shown else tint(MUTED, 0.7)


def _target(ax: Axes, left: float, middles: list[float], wide: float) -> None:
    """The verifying forward: one box over all columns, and what each row of it has read."""
    box(ax, left - 0.15, 4.2, middles[-1] + wide / 2 - left + 0.3, 1.15, "", WEIGHTS, 0.35)
    read = [SEQUENCE[-1], *(word for word, *_ in ROUND)]
    for middle, word in zip(middles, read, strict=True):
        write(ax, middle, 5.1, f"after “… {word}”", 13, zorder=5, color=MUTED)
    write(ax, middles[-1], 4.65, "not needed", 14, zorder=5, color=MUTED)
    write(ax, middles[-1], 2.95, "after four\naccepted: a\nbonus, from p", 15, color=MUTED)


def _outcome(
    ax: Axes, kept: int, left: float, pitch: float, wide: float, middles: list[float]
) -> None:
    for k, (word, *_) in enumerate(ROUND[: kept + 1]):
        accepted = k < kept
        y, color = (0.85, GUESS) if accepted else (1.6, MEASURED)
        box(ax, left + pitch * k, y, wide, 0.6, word, color, 0.7 if accepted else 0.15, 17)
        write(ax, middles[k], 0.55, "accepted" if accepted else "correction", 14, color=MUTED)
        if accepted:
            arrow(ax, (middles[k], 2.25), (middles[k], 1.5), color=color, width=2.2)
    ax.plot([middles[kept] - 0.5, middles[kept] + 0.5], [1.9, 1.9], color=MEASURED, lw=3,
            zorder=6)  # fmt: skip
    box(ax, left + pitch * kept, 0.85, wide, 0.6, CORRECTION, ACCENT, 0.7, 17)
    x = left + pitch * (kept + 1)
    write(ax, x, 1.15, "drawn from the residual,\nmax(p − q, 0) normalised", 14, ha="left")


VOCABULARY = ("mat", "roof", "rug", "bed", "box")
P, Q = (0.40, 0.25, 0.20, 0.10, 0.05), (0.20, 0.45, 0.10, 0.10, 0.15)


def parts() -> dict[str, torch.Tensor]:
    """Of the two distributions drawn: what is kept, what is rejected, what the residual adds."""
    p_V, q_V = (torch.tensor(x, dtype=torch.float64) for x in (P, Q))
    kept_V, alpha = torch.minimum(p_V, q_V), agreement(p_V, q_V)
    return {"kept": kept_V, "rejected": q_V - kept_V, "alpha": alpha,
            "added": (1 - alpha) * residual(p_V, q_V)}  # fmt: skip


@figure(
    name="the-residual",
    title="Kept guesses and the residual add up to p, whatever q is",
    answers=[],
    notebook="08",
    alt="Three panels of bars over five words. Target p .40, .25, .20, .10, .05 beside draft q "
    ".20, .45, .10, .10, .15. The draft's bars split: the smaller of p and q is kept, .70 in all; "
    "what stands above p is rejected, .30. The target's bars rebuilt: the same kept parts, and on "
    "top the residual, .20 on mat and .10 on rug: as much as was rejected.",
    sources=["lecture_util.speculative.verify: agreement, residual", "p and q invented"],
)
def the_residual() -> Figure:
    title = "Kept guesses and the residual add up to p, whatever q is"
    fig, axes = chart(title, 3, 5.2)
    made, x = parts(), range(len(P))
    kept, rejected, added = (made[name].tolist() for name in ("kept", "rejected", "added"))
    alpha = made["alpha"].item()
    left, middle, right = axes
    both = ((-0.2, P, PREDICTED, "p, target"), (0.2, Q, CACHE, "q, draft"))
    for shift, values, color, name in both:
        left.bar([k + shift for k in x], values, 0.38, color=color, label=name)
    for ax, top, color, name in ((middle, rejected, MEASURED, "rejected"),
                                 (right, added, ACCENT, "residual")):  # fmt: skip
        ax.bar(x, kept, 0.62, color=GUESS, label=f"kept: {alpha:.2f}")
        ax.bar(x, top, 0.62, bottom=kept, color=color, label=f"{name}: {1 - alpha:.2f}")
    for ax, values in ((middle, Q), (right, P)):
        for k, value in enumerate(values):
            ax.text(k, value + 0.008, f"{value:.2f}", ha="center", va="bottom", size=13)
    for ax, name in zip(axes, ("two opinions", "what becomes of q", "what comes out: p"),
                        strict=True):  # fmt: skip
        ax.set(ylim=(0, 0.6), yticks=[0, 0.2, 0.4])
        ax.set_xticks(range(len(VOCABULARY)), VOCABULARY, size=14)
        ax.tick_params(axis="x", length=0)
        ax.grid(axis="x", visible=False)
        ax.set_title(name, size=15)
        ax.legend(loc="upper right", fontsize=13, handlelength=1.1)
        if ax is not left:
            ax.set_yticklabels([])
    left.set_ylabel("probability of the next token")
    caption(fig, shapes="kept: min(p, q), its sum is α; residual: max(p − q, 0), of the same mass "
            "as what was rejected; p and q invented", source=PAPERS)  # fmt: skip
    return fig
