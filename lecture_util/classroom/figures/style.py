"""How every picture of the course looks: type, colours, and the line of conditions below.

Blue and dashed is predicted, vermilion and solid is measured, green is a guess. The colours are
Okabe and Ito's (2008), which people with any colour vision can tell apart.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import matplotlib.pyplot as plt
from cycler import cycler
from IPython import get_ipython
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREDICTED = "#0072B2"  # blue
MEASURED = "#D55E00"  # vermilion
GUESS = "#009E73"  # green
WEIGHTS = "#56B4E9"  # sky blue: bytes of parameters
CACHE = "#E69F00"  # orange: bytes of keys and values
ACCENT = "#CC79A7"  # purple: anything else worth a colour
INK = "#1A1A1A"
MUTED = "#666666"  # still 5.7:1 against white
GRID = "#DDDDDD"
HALO = [withStroke(linewidth=4, foreground="white")]  # keeps text legible across lines
PALETTE = (PREDICTED, MEASURED, GUESS, CACHE, ACCENT, WEIGHTS, INK)

STYLE: dict[str, Any] = {
    "figure.figsize": (7.5, 4.2),
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",  # ships with matplotlib, so equal everywhere
    "font.size": 13,
    "text.color": INK,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelsize": 13,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "axes.prop_cycle": cycler(color=PALETTE),
    "lines.linewidth": 2.4,
    "lines.markersize": 7,
    "lines.solid_capstyle": "round",
}


def use_style() -> None:
    """Make matplotlib draw as the course does, from here to the end of the notebook."""
    plt.rcParams.update(STYLE)
    shell = get_ipython()
    if shell is not None and "inline" in matplotlib.get_backend():
        plt.switch_backend(matplotlib.get_backend())  # now, lest it undo the next line later
        shell.display_formatter.formatters["image/png"].for_type(Figure, small_png)


def small_png(fig: Figure) -> bytes:
    """The figure as a PNG of 96 colours: as sharp, and a third of the bytes in a notebook."""
    buffer, small = io.BytesIO(), io.BytesIO()
    fig.savefig(buffer, format="png", bbox_inches="tight")
    image = Image.open(buffer).convert("RGB")
    image.quantize(96, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def tint(color: str, strength: float = 0.25) -> tuple[float, float, float]:
    """The colour mixed with white: strength 1 is the colour, 0 is white."""
    r, g, b = (1 - strength * (1 - channel) for channel in to_rgb(color))
    return r, g, b


def shade(color: str) -> tuple[float, float, float]:
    """The colour darkened by a third, so that text in it stays legible on white."""
    r, g, b = (0.67 * channel for channel in to_rgb(color))
    return r, g, b


def number(value: float, digits: int = 3) -> str:
    """Significant digits only, readable from afar: 12,400 or 0.0312 or 3.4e+12."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        rounded = float(f"{value:.{digits}g}")
        return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"
    return f"{value:.{digits}g}"


def claim(ax: Axes, title: str) -> None:
    """Set a title, wrapped to the axes' figure. A title states what the picture shows."""
    width = int(6.4 * ax.figure.get_figwidth())
    ax.set_title(textwrap.fill(title, width))


def caption(
    where: Axes | Figure,
    *,
    device: str = "",
    dtype: str = "",
    shapes: str = "",
    seed: int | None = None,
    source: str = "",
) -> None:
    """Write under a figure the conditions it was made in; a second call adds to the first.

    Example: `caption(ax, device="H100 SXM", dtype="bf16", shapes="B=1, S=1024", seed=0)`
    """
    fig = where if hasattr(where, "get_supxlabel") else where.figure
    parts: Sequence[str] = [
        fig.get_supxlabel().replace("\n", " "),
        device,
        dtype,
        shapes,
        "" if seed is None else f"seed {seed}",
        f"Source: {source}" if source else "",
    ]
    line = " · ".join(part for part in parts if part)
    wrapped = textwrap.fill(line, int(11.5 * fig.get_figwidth()))
    fig.supxlabel(wrapped, x=0.01, ha="left", fontsize=10, color=MUTED)
