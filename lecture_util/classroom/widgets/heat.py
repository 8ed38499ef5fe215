"""A map of cells that a click or the arrow keys pick from: Python's half; heat.js draws it."""

from __future__ import annotations

from pathlib import Path

import anywidget
import ipywidgets as widgets
import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from traitlets import Dict, List

from lecture_util.classroom.widgets.cells import Cells

COLORS = [to_hex(color) for color in matplotlib.colormaps["cividis_r"](np.linspace(0, 1, 32))]
MAP, LAYER, VALUE = COLORED = "rank in the map", "rank in its layer", "value"


class HeatMap(anywidget.AnyWidget):
    """`cell` is [row, column] of what is picked, or empty; `outline` is [row, start, stop]."""

    _esm = Path(__file__).with_name("heat.js")
    map = Dict().tag(sync=True)
    cell = List().tag(sync=True)
    outline = List().tag(sync=True)

    def __init__(self) -> None:
        super().__init__(layout=widgets.Layout(width="100%"))

    def show(self, cells: Cells, colored_by: str) -> None:
        """Draw these cells, coloured by one of COLORED."""
        rows, columns = cells.values_RC.shape
        self.map = {
            "rows": rows,
            "columns": columns,
            "colors": _colors(cells, colored_by),
            "scale": COLORS,
            "ends": _ends(cells, colored_by),
            "colored_by": colored_by,
            "row_title": "from" if cells.folded else "layer",
            "column_title": f"{cells.name}: {cells.columns:,}"
            + (f", {cells.span} to a cell" if cells.span > 1 else "")
            + (", row after row" if cells.folded and rows > 1 else ""),
            "row_ticks": [
                [row, f"{cells.start(row, 0):,}" if cells.folded else str(row)]
                for row in range(0, rows, max(1, -(-rows // 16)))
            ],
            "column_ticks": [
                [column, f"{column * cells.span:,}"]
                for column in range(0, columns, max(1, -(-columns // 16)))
            ],
            "label": f"Importance of {cells.name}, {rows} row{'s' * (rows > 1)} of {columns} "
            "cells: arrow keys pick one, Home and End go to the ends of its row",
        }


def _colors(cells: Cells, colored_by: str) -> list[str]:
    """Light is least important; "" where there is no cell."""
    shade = {MAP: cells.rank_RC, LAYER: cells.rank_in_row_RC, VALUE: cells.values_RC}[colored_by]
    lowest, highest = np.nanmin(shade), np.nanmax(shade)
    parts = (shade - lowest) / ((highest - lowest) or 1.0)
    return ["" if np.isnan(part) else COLORS[round(part * (len(COLORS) - 1))]
            for part in parts.ravel()]  # fmt: skip


def _ends(cells: Cells, colored_by: str) -> list[str]:
    if colored_by != VALUE:
        return ["least", "most"]
    return [f"{end(cells.values_RC):.2g}" for end in (np.nanmin, np.nanmax)]
