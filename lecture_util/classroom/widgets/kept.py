"""layers_kept (notebook 07): fewer layers, their perplexity, bytes and speed, as recorded."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from lecture_util.classroom.figures import plots, style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.records import Record, Row, read_record
from lecture_util.roofline import format_bytes

SIZE = (11.2, 4.0)  # at 100 dpi as high as a slide shows a picture
BEFORE, REPAIRED = "as cut", "repaired"
PREDICTED, MEASURED = "predicted", "measured"
LOOKS = {
    BEFORE: {"color": style.MEASURED, "ls": "-", "marker": "o"},
    REPAIRED: {"color": style.GUESS, "ls": "-", "marker": "D"},
    "": {"color": style.INK, "ls": "-", "marker": "o"},
    PREDICTED: {"color": style.PREDICTED, "ls": "--", "marker": "s"},
    MEASURED: {"color": style.MEASURED, "ls": "-", "marker": "o"},
}
GONE = {"facecolor": "white", "edgecolor": style.MUTED, "linewidth": 1.0, "linestyle": ":"}
LEFT = {"facecolor": style.tint(style.PREDICTED, 0.45), "edgecolor": style.PREDICTED,
        "linewidth": 1.4, "linestyle": "-"}  # fmt: skip


class KeptPicture:
    """Above, the layers that are left; below, three curves with this model marked on them."""

    def __init__(self, record: Record) -> None:
        self.record, self.canvas = record, Canvas(SIZE)
        self.rows = {row.kept: row for row in record.rows}
        with self.canvas.still() as fig:
            self.canvas.moving = [*self._strip(fig), *self._curves(fig)]

    def __call__(self, kept: int) -> tuple[bytes, str]:
        row = self.rows[kept]
        for layer, box in enumerate(self.boxes):
            box.set(**(GONE if layer in row.dropped else LEFT))
        self.crosses.set_data([layer + 0.5 for layer in row.dropped], [0.5] * len(row.dropped))
        for value, points in self.here:
            there = value(row) is not None
            points.set_data([kept] if there else [], [value(row)] if there else [])
        return self.canvas.png(), _words(row, self.record)

    def _strip(self, fig: Figure) -> list[Artist]:
        L = self.record.L
        ax = fig.add_axes((0.01, 0.86, 0.98, 0.12))
        ax.set(xlim=(0, L), ylim=(0, 1), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        self.boxes = [ax.add_patch(Rectangle((i + 0.06, 0.04), 0.88, 0.92)) for i in range(L)]
        (self.crosses,) = ax.plot([], [], "x", color=style.MEASURED, ms=24, mew=2, alpha=0.5)
        size = 13 if L <= 40 else 7
        numbers = [ax.text(i + 0.5, 0.48, i, size=size, ha="center", va="center") for i in range(L)]
        return [*self.boxes, self.crosses, *numbers]

    def _curves(self, fig: Figure) -> list[Artist]:
        panels = {
            "perplexity": {BEFORE: lambda row: row.perplexity, REPAIRED: lambda row: row.repaired},
            "weights in fp32, MB": {"": lambda row: row.nbytes / 1e6},
            "speed, whole model = 1": {
                PREDICTED: lambda row: row.predicted,
                MEASURED: lambda row: row.measured,
            },
        }
        self.here = []
        for (title, curves), left in zip(panels.items(), (0.06, 0.395, 0.72), strict=True):
            ax = fig.add_axes((left, 0.15, 0.265, 0.56))
            self._panel(ax, title, curves)
        return [points for _, points in self.here]

    def _panel(
        self, ax: Axes, title: str, curves: dict[str, Callable[[Row], float | None]]
    ) -> None:
        least = self.record.rows[-1].kept
        for name, value in curves.items():
            rows = [row for row in self.record.rows if value(row) is not None]
            look = LOOKS[name]
            if rows:
                x, y = [row.kept for row in rows], [value(row) for row in rows]
                ax.plot(x, y, ms=5, lw=2, label=name, **look)
            (here,) = ax.plot([], [], look["marker"], color=look["color"], mec=style.INK, mew=2,
                              ms=13)  # fmt: skip
            self.here.append((value, here))
        ax.set_xlim(least - 0.04 * (self.record.L - least) - 0.3, self.record.L + 0.6)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.set_xlabel("layers kept", labelpad=2)
        ax.set_title(title, fontsize=14, pad=6)
        if title == "perplexity":
            ax.set_yscale("log")
            plots.plain_log_ticks(ax.yaxis)
        else:
            ax.set_ylim(
                0, 1.15 * max([y for line in ax.lines for y in line.get_ydata()], default=1)
            )
        if any(curves):
            ax.legend(loc="best")


def _words(row: Row, record: Record) -> str:
    whole = record.rows[0]
    text = f"<b>{row.kept} of {record.L} layers</b>"
    if not row.dropped:
        text += f": perplexity <b>{style.number(row.perplexity)}</b>; weights "
        text += f"<b>{format_bytes(row.nbytes)}</b>"
    else:
        layers = ", ".join(map(str, sorted(row.dropped)))
        repaired = "not repaired in the record"
        if row.repaired is not None:
            repaired = f"after {row.repair} <b>{style.number(row.repaired)}</b>"
        text += (
            f", without {layers}: perplexity <b>{style.number(row.perplexity)}</b>, {repaired} "
            f"(whole model {style.number(whole.perplexity)}); weights "
            f"<b>{format_bytes(row.nbytes)}</b>, {row.nbytes / whole.nbytes:.0%} of the whole; "
            f"decoding <b>{row.measured:.2f} times as fast</b>, predicted {row.predicted:.2f}"
        )
    text += f"; {style.number(row.tokens_per_s)} tokens a second of CPU time"
    conditions = html.escape(record.conditions)
    return f'{text}.<br><span style="font-size:0.85em;color:{style.MUTED}">{conditions}</span>'


def layers_kept(record: Mapping[str, Any] | None = None, kept: int | None = None) -> Explorer:
    """Perplexity, bytes and speed of a model with fewer layers, as recorded (notebook 07).

    record: as benchmarks/pruning.py writes it; None: the one in its results. Nothing is measured
            here: the record's date and hardware stand below the picture.
    kept:   where the slider starts; None: at the whole model.

    Raises: FileNotFoundError if there is no record; ValueError if it lacks something, or for a
            number of layers that it does not hold.
    """
    read = read_record(record)
    offered = [row.kept for row in read.rows][::-1]
    kept = offered[-1] if kept is None else kept
    if isinstance(kept, bool) or kept not in offered:
        raise ValueError(f"kept is {kept!r}: the record has {', '.join(map(str, offered))}")
    slider = widgets.SelectionSlider(
        description="layers kept", options=[(f"{one}", one) for one in offered], value=kept
    )
    return Explorer(KeptPicture(read), {"kept": slider})
