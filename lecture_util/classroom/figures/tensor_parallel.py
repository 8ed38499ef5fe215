"""Still figure of notebook 12: one block of the model, cut over two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lecture_util.classroom.figures.diagram import arrow, box, canvas, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import CACHE, GUESS, INK, MEASURED, MUTED, PREDICTED
from lecture_util.model.config import PUBLISHED
from lecture_util.parallel.sharding import shard_config
from lecture_util.parallel.traffic import forward_traffic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODEL, M = PUBLISHED["llama-3-8b"], 2
RANKS = (PREDICTED, GUESS)  # a colour for each rank's share
LANES = (6.2, 2.35)  # middle of each rank's lane
TITLE = "One block on two ranks: heads and channels stay apart, sums meet twice"


@figure(
    name="tensor-parallel",
    title=TITLE,
    answers=[],
    notebook="12",
    alt="Two lanes, a rank each, for a block of Llama-3-8B. Both have x whole. Columns of qkv give "
    "each rank 16 query heads and 4 of 8 KV heads, whose cache it keeps; it attends alone and "
    "multiplies by its rows of out. An all-reduce adds both parts. Columns of gate_up give each "
    "7,168 of 14,336 channels, rows of down another part; a second all-reduce adds. 2 messages a "
    "block, 65 with the embedding's.",
    sources=[
        "cut as in lecture_util.parallel.sharding, after Shoeybi et al. 2019, arXiv:1909.08053",
        "shape: Lightning-AI/litgpt litgpt/config.py",
    ],
)
def tensor_parallel() -> Figure:
    fig, ax = canvas(15.2, 8.4, TITLE)
    for rank, y in enumerate(LANES):
        _lane(ax, rank, y)
    middle = sum(LANES) / 2
    for x, which in ((8.1, "attention's"), (13.75, "the MLP's")):
        box(ax, x - 0.26, LANES[1] - 0.6, 0.52, LANES[0] - LANES[1] + 1.2, color=MEASURED,
            strength=0.3)  # fmt: skip
        ax.text(x, middle, f"all-reduce: add {which} parts", size=14, rotation=90, ha="center",
                va="center", zorder=5, color=INK)  # fmt: skip
    reduces = forward_traffic(MODEL, 1, 1, M).counts["all_reduce"]
    notes = (
        f"Llama-3-8B, M = {M}. x, norms and sums whole on both. Faint: what the other rank holds.",
        f"2 all-reduces of B·T·D numbers a block; with the embedding's, {reduces} a forward. "
        "Attention sends nothing.",
    )
    for k, note in enumerate(notes):
        write(ax, 0.3, 0.6 - 0.34 * k, note, 12.5, ha="left", va="center", color=MUTED)
    return fig


def _lane(ax: Axes, rank: int, y: float) -> None:
    whole, own, color = MODEL, shard_config(MODEL, M), RANKS[rank]
    write(ax, 0.3, y + 1.75, f"rank {rank}", 17, ha="left", weight="bold", color=color)
    box(ax, 0.3, y - 0.45, 0.8, 0.9, "x\n[D]", MUTED, 0.1, 14)
    arrow(ax, (1.1, y), (1.6, y))
    _columns(ax, 1.6, y, 1.5, rank, "qkv")
    write(
        ax, 2.35, y - 1.12, f"{own.N} of {whole.N} query heads\n{own.K} of {whole.K} KV heads", 12
    )
    arrow(ax, (3.1, y), (3.6, y))
    box(ax, 3.6, y - 0.45, 1.6, 0.9, "attention", color, 0.3, 14)
    box(ax, 3.6, y + 0.95, 1.6, 0.75, f"cache: its\n{own.K} KV heads", CACHE, 0.45, 12.5)
    arrow(ax, (4.4, y + 0.95), (4.4, y + 0.47))
    arrow(ax, (5.2, y), (5.75, y))
    _rows(ax, 5.75, y, 1.0, rank, "out")
    write(ax, 6.25, y - 1.12, f"its heads' rows:\n{own.N * own.H:,} of {whole.N * whole.H:,}", 12)
    arrow(ax, (6.75, y), (7.82, y))
    write(ax, 7.28, y + 0.32, "a part\nof [D]", 11.5, color=MUTED, va="bottom")
    arrow(ax, (8.38, y), (9.0, y))
    write(ax, 8.7, y + 0.2, "[D]", 12, color=MUTED, va="bottom")
    _columns(ax, 9.0, y, 1.5, rank, "gate_up")
    write(ax, 9.75, y - 1.12, f"{own.F:,} of {whole.F:,}\nchannels", 12)
    arrow(ax, (10.5, y), (10.9, y))
    box(ax, 10.9, y - 0.33, 0.85, 0.66, "SiLU·", color, 0.3, 13)
    arrow(ax, (11.75, y), (12.1, y))
    _rows(ax, 12.1, y, 0.85, rank, "down")
    write(ax, 12.5, y - 1.12, f"{own.F:,}\nrows", 12)
    arrow(ax, (12.95, y), (13.47, y))
    arrow(ax, (14.03, y), (14.7, y))
    write(ax, 14.4, y + 0.2, "[D]", 12, color=MUTED, va="bottom")


def _columns(ax: Axes, x: float, y: float, width: float, rank: int, name: str) -> None:
    """A matrix cut by its output: upright halves, this rank's in colour."""
    for part in range(M):
        face = RANKS[part] if part == rank else MUTED
        box(ax, x + width * part / M, y - 0.75, width / M, 1.5, color=face,
            strength=0.55 if part == rank else 0.06, rounded=False)  # fmt: skip
    write(ax, x + width / 2, y + 0.98, f"{name}, columns", 13, weight="bold")
    write(ax, x + width * (rank + 0.5) / M, y, name.replace("_", "_\n"), 13, zorder=5)


def _rows(ax: Axes, x: float, y: float, width: float, rank: int, name: str) -> None:
    """A matrix cut by its input: lying halves, this rank's in colour."""
    for part in range(M):
        face = RANKS[part] if part == rank else MUTED
        low = y + 0.75 - 1.5 * (part + 1) / M
        box(ax, x, low, width, 1.5 / M, color=face, strength=0.55 if part == rank else 0.06,
            rounded=False)  # fmt: skip
    write(ax, x + width / 2, y + 0.98, f"{name}, rows", 13, weight="bold")
    write(ax, x + width / 2, y + 0.75 - 1.5 * (rank + 0.5) / M, name, 13, zorder=5)
