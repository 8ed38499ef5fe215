"""Still figures of notebook 11: which entries of a task vector are kept, by size or by chance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from lecture_util.classroom.figures.diagram import beside, chart
from lecture_util.classroom.figures.merging_steps import YU
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    GUESS,
    HALO,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    caption,
    shade,
    tint,
)
from lecture_util.merging.sparsify import breadcrumbs, keep_probabilities, trim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DAVARI = "Davari and Belilovsky 2023, arXiv:2312.06795"
ENTRIES, KEPT, OUTLIERS = 4000, 0.15, 0.01


def crumbs() -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes of a task vector, and those of what breadcrumbs() leaves of it.

    Evenly spaced quantiles of a Laplace distribution, signs in turn; the mean magnitude is 1.
    """
    magnitude = [-math.log(1 - (k + 0.5) / ENTRIES) for k in range(ENTRIES)]
    delta = torch.tensor(magnitude, dtype=torch.float64) * torch.tensor([1, -1]).repeat(
        ENTRIES // 2
    )
    kept = breadcrumbs(delta, KEPT, OUTLIERS)
    return delta.abs().numpy(), kept[kept != 0].abs().numpy()


def _crumbs_alt() -> str:
    magnitudes, kept = crumbs()
    small = int((magnitudes < kept.min()).sum())
    large = int((magnitudes > kept.max()).sum())
    return (
        f"Histogram of {ENTRIES:,} magnitudes, many small and few large, count logarithmic. Cut: "
        f"the {small:,} smallest, below {kept.min():.2f} times the mean, and the {large} largest, "
        f"above {kept.max():.2f} times the mean. Kept between the two: {len(kept)}, or "
        f"{len(kept) / ENTRIES:.0%}."
    )


@figure(
    name="breadcrumbs",
    title="Breadcrumbs cuts both ends: the smallest and the outliers",
    answers=["Model breadcrumbs (slides)"],
    notebook="11",
    alt=_crumbs_alt(),
    sources=["computed by lecture_util.merging.sparsify.breadcrumbs; magnitudes invented", DAVARI],
)
def breadcrumbs_figure() -> Figure:
    fig, ax = chart("Breadcrumbs cuts both ends: the smallest and the outliers", height=5.0)
    magnitudes, kept = crumbs()
    low, high = kept.min(), kept.max()
    edges = np.concatenate(
        [np.linspace(0, low, 9), np.linspace(low, high, 13)[1:], np.linspace(high, 9.2, 20)[1:]]
    )
    counts, _ = np.histogram(magnitudes, edges - 1e-9)
    for start, stop, count in zip(edges[:-1], edges[1:], counts, strict=True):
        stays = low <= (start + stop) / 2 <= high
        ax.bar(start, count, width=stop - start, align="edge", edgecolor="white", lw=1,
               color=GUESS if stays else tint(MUTED, 0.45))  # fmt: skip
    small, large = (magnitudes < low).sum(), (magnitudes > high).sum()
    for x, text, color in (
        (low / 2, f"too small\n{small:,} cut", MUTED),
        ((low + high) / 2, f"kept: {len(kept)}", GUESS),
        (high + 1.4, f"outliers\n{large} cut", MUTED),
    ):
        ax.text(x, 3000, text, size=17, ha="center", va="center", weight="bold",
                color=shade(color))  # fmt: skip
    for x in (low, high):
        ax.axvline(x, color=INK, lw=2)
    ax.set(yscale="log", xlim=(0, 9.2), ylim=(0.8, 9000))
    ax.set(xlabel="magnitude of a change, in means", ylabel="entries (logarithmic)")
    ax.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    caption(fig, shapes=f"density {KEPT}, γ = {OUTLIERS}; {ENTRIES:,} numbers spread as a Laplace "
            "distribution", source=DAVARI)  # fmt: skip
    return fig


DEEP = "Deep et al. 2024, arXiv:2406.11617"
RANKS, DENSITY, EPSILON = 200, 0.3, 0.2


def chances() -> dict[str, np.ndarray]:
    """The chance of each rank to be kept, smallest magnitude first, all at one density."""
    delta = torch.arange(1, RANKS + 1, dtype=torch.float64)
    return {
        "DARE": np.full(RANKS, DENSITY),
        "TIES": (trim(delta, DENSITY) != 0).double().numpy(),
        "DELLA": keep_probabilities(delta, DENSITY, EPSILON).numpy(),
    }


@figure(
    name="magprune",
    title="By chance, by rank, or both: how DARE, TIES and DELLA keep entries",
    answers=["DELLA (slides)"],
    notebook="11",
    alt=f"Left, the chance to be kept against rank by magnitude, at density {DENSITY}: DARE level "
    f"at {DENSITY}; TIES 0 and, for the largest {DENSITY:.0%}, 1; DELLA rising evenly from "
    f"{DENSITY - EPSILON:.1f} to {DENSITY + EPSILON:.1f}. Right, what a kept entry is multiplied "
    f"by: DARE {1 / DENSITY:.2f}; TIES 1; DELLA from {1 / (DENSITY - EPSILON):.0f} for the "
    f"smallest down to {1 / (DENSITY + EPSILON):.0f} for the largest.",
    sources=["computed by lecture_util.merging.sparsify: trim, keep_probabilities", DEEP],
)
def magprune_figure() -> Figure:
    title = "By chance, by rank, or both: how DARE, TIES and DELLA keep entries"
    fig, (left, right) = chart(title, 2, 5.2)
    rank = (np.arange(RANKS) + 0.5) / RANKS
    looks = {"DARE": (PREDICTED, "--"), "TIES": (ACCENT, ":"), "DELLA": (MEASURED, "-")}
    for name, chance in chances().items():
        color, style = looks[name]
        left.plot(rank, chance, style, color=color, lw=3)
        if name == "TIES":
            shown = chance > 0
            right.plot(rank[shown], np.ones(shown.sum()), style, color=color, lw=3)
        else:
            right.plot(rank, 1 / chance, style, color=color, lw=3)
    for ax, labels in (
        (left, {"DARE": (0.03, DENSITY + 0.045), "TIES": (0.67, 0.8), "DELLA": (0.03, 0.19)}),
        (right, {"DARE": (0.03, 2.45), "TIES": (0.74, 0.35), "DELLA": (0.22, 7.0)}),
    ):
        for name, (x, y) in labels.items():
            side = "right" if (name, ax) == ("TIES", left) else "left"
            beside(ax, x, y, name, looks[name][0], size=17, weight="bold", xytext=(0, 0), ha=side,
                   path_effects=HALO)  # fmt: skip
        ax.set(xlabel="rank by magnitude, largest right", xlim=(0, 1))
        ax.set_xticks([0, 0.5, 1], ["smallest", "middle", "largest"])
    left.set(ylim=(-0.02, 1.05), ylabel="chance to be kept")
    right.set(ylim=(0, 10.5), ylabel="a kept entry, times")
    caption(fig, shapes=f"density {DENSITY} for all; DELLA with ε = {EPSILON}, half its window",
            source=f"by formula: {YU}; {DEEP}")  # fmt: skip
    return fig
