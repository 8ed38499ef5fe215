"""Still figures of notebook 03: why a cache, and what the cache is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle

from lecture_util.classroom.figures.diagram import arrow, box, bracket, canvas, write
from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.style import (
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    number,
    tint,
)
from lecture_util.model.config import PUBLISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALING_BOOK = "structure after jax-ml.github.io/scaling-book/inference"
SHAPES = "shapes: Lightning-AI/litgpt litgpt/config.py (lecture_util.model.config.PUBLISHED)"


@figure(
    name="naive-and-cached-generation",
    title="A cache turns a triangle of work into one row and single cells",
    answers=["naive-inference", "cached-inference", "KV cache (slides)"],
    notebook="03",
    alt="Two grids with one row per step and one column per position. Left, naive: every step "
    "processes the whole prefix, so the filled cells form a triangle, 60 in all. Right, cached: "
    "the first step fills the prompt's 4 cells, each later step computes one new cell and only "
    "reads the earlier ones from the cache, 11 in all.",
    sources=["counted by the code that draws it", SCALING_BOOK],
)
def naive_and_cached() -> Figure:
    prompt, new = 4, 8
    fig, ax = canvas(14, 6.4, "A cache turns a triangle of work into one row and single cells")
    side, y_top = 0.46, 5.2
    naive = sum(prompt + step for step in range(new))
    cached = prompt + new - 1
    panels = [(1.3, "naive", naive, MEASURED), (8.0, "with a KV cache", cached, PREDICTED)]
    for x_left, name, total, color in panels:
        write(ax, x_left, y_top + 0.85, name, 17, ha="left", weight="bold", color=color)
        for step in range(new):
            for position in range(prompt + step):
                computed = name == "naive" or step == 0 or position == prompt + step - 1
                face = tint(color, 0.85) if computed else tint(CACHE, 0.28)
                corner = (x_left + position * side, y_top - (step + 1) * side)
                ax.add_patch(Rectangle(corner, side, side, facecolor=face, edgecolor="white", lw=2))
        bracket(ax, x_left, x_left + prompt * side, y_top + 0.2, "prompt", MUTED, 13)
        y_mid = y_top - new * side / 2
        write(ax, x_left - 0.35, y_mid, "step", 13, rotation=90, color=MUTED)
        arrow(
            ax, (x_left - 0.12, y_top), (x_left - 0.12, y_top - new * side), color=MUTED, width=1.2
        )
        write(ax, x_left, y_top - new * side - 0.35, "position", 13, ha="left", color=MUTED)
        write(ax, x_left, 0.42, f"{total} tokens through the model", 16, ha="left", color=color)
    x_key, y_key = 8.0 + 2.55, y_top - new * side - 0.37
    for k, (face, text) in enumerate(
        [(tint(PREDICTED, 0.85), "computed"), (tint(CACHE, 0.28), "read")]
    ):
        x = x_key + 1.75 * k
        ax.add_patch(Rectangle((x - 0.4, y_key - 0.13), 0.3, 0.3, facecolor=face))
        write(ax, x, y_key, text, 13, ha="left", color=INK)
    return fig


@figure(
    name="kv-cache-tensor",
    title="Every token leaves a key and a value in each layer",
    answers=["KV cache (slides)"],
    notebook="03",
    alt="Left: two stacks of L slabs, keys and values; each slab has the axes S and K times H, and "
    "there is one such pair for each of B sequences. The size is 2 x L x B x S x K x H numbers of "
    "2 bytes. Right: two squares to scale, one token of SmolLM2-135M leaves 23,040 bytes, of "
    "Llama-2-13B 819,200 bytes, about 36 times as many.",
    sources=["formula 2*L*K*H*2 bytes at 16 bits, computed", SHAPES],
)
def kv_cache_tensor() -> Figure:
    fig, ax = canvas(14, 6.4, "Every token leaves a key and a value in each layer")
    for x_left, name, color in [(1.5, "keys", PREDICTED), (5.15, "values", GUESS)]:
        _stack(ax, x_left, 2.35, color)
        write(ax, x_left + 1.05, 2.35 + 1.1, name, 16, weight="bold", zorder=30)
    bracket(ax, 1.5, 3.6, 2.1, "K·H", INK, 15, above=False)
    bracket(ax, 5.15, 7.25, 2.1, "K·H", INK, 15, above=False)
    ax.plot([1.3, 1.3], [2.35, 4.55], color=INK, lw=2)
    write(ax, 1.0, 3.45, "S", 15)
    arrow(ax, (3.8, 2.45), (4.75, 3.4), color=MUTED)
    write(ax, 4.55, 2.8, "L", 15)
    write(ax, 1.3, 5.95, "for each of B sequences", 14, ha="left", color=MUTED)
    write(ax, 1.3, 0.75, "2 · L · B · S · K · H  numbers", 18, ha="left", weight="bold")
    write(ax, 1.3, 0.25, "2 bytes each in bf16", 14, ha="left", color=MUTED)
    sizes = {}
    for name in ("smollm2-135m", "llama-2-13b"):
        config = PUBLISHED[name]
        sizes[name] = 2 * config.L * config.K * config.H * 2
    small, large = sizes["smollm2-135m"], sizes["llama-2-13b"]
    side = 3.3
    little = side * (small / large) ** 0.5
    write(ax, 9.2, 5.95, "bytes one token leaves behind", 14, ha="left", color=MUTED)
    box(ax, 9.2, 2.15, side, side, f"Llama-2-13B\n{large / 1e3:,.1f} kB", CACHE, 0.45, 17, False)
    box(ax, 9.2, 1.2, little, little, "", CACHE, 0.9, rounded=False)
    write(ax, 9.2 + little + 0.2, 1.2 + little / 2, f"SmolLM2-135M  {small / 1e3:,.1f} kB", 16,
          ha="left")  # fmt: skip
    write(
        ax, 9.2, 0.55, f"areas to scale, {number(large / small)} to 1", 13, ha="left", color=MUTED
    )
    return fig


def _stack(ax: Axes, x: float, y: float, color: str, depth: int = 6) -> None:
    """Slabs behind one another, the nearest in front."""
    for layer in reversed(range(depth)):
        shift = 0.2 * layer
        ax.add_patch(
            Rectangle((x + shift, y + shift), 2.1, 2.2, facecolor=tint(color, 0.3),
                      edgecolor=color, lw=1.6, zorder=20 - layer)
        )  # fmt: skip
