"""An importance map as rows and columns of cells: wide rows binned, a single row folded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

WIDEST, TALLEST = 96, 64  # cells a row, rows of a folded map


@dataclass(frozen=True)
class Cells:
    """One map. A cell is the mean of `span` columns, of fewer at a row's end.

    values_RC: fp64, NaN where a folded map's last row has ended. columns: of the tensor.
    folded: the tensor had one axis and runs on from row to row; else a row is a layer.
    """

    name: str
    values_RC: np.ndarray
    span: int
    columns: int
    folded: bool

    @classmethod
    def of(cls, name: str, importance: Any) -> Cells:
        """Shapes: importance (L, columns) or (columns,). Raises: ValueError naming the map."""
        values = _numbers(name, importance)
        columns = values.shape[-1]
        if values.ndim == 2:
            span = -(-columns // WIDEST)
            return cls(name, _means(values, span), span, columns, folded=False)
        span = -(-columns // (WIDEST * TALLEST))
        means_C = _means(values[None], span)[0]
        width = _width(len(means_C))
        cells = np.full(-(-len(means_C) // width) * width, np.nan)
        cells[: len(means_C)] = means_C
        return cls(name, cells.reshape(-1, width), span, columns, folded=True)

    def start(self, row: int, column: int) -> int:
        """The first column of the tensor that the cell stands for."""
        before = row * self.values_RC.shape[1] if self.folded else 0
        return (before + column) * self.span

    def stop(self, row: int, column: int) -> int:
        return min(self.start(row, column) + self.span, self.columns)

    @cached_property
    def rank_RC(self) -> np.ndarray:
        """1 is the least important of the map; of equals the first is lower."""
        return _ranks(self.values_RC.ravel()).reshape(self.values_RC.shape)

    @cached_property
    def rank_in_row_RC(self) -> np.ndarray:
        """1 is the least important of its layer; a folded map has only one."""
        if self.folded:
            return self.rank_RC
        return np.stack([_ranks(row) for row in self.values_RC])


def _numbers(name: str, importance: Any) -> np.ndarray:
    try:
        values = torch.as_tensor(importance).detach().cpu().double().numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"importance of {name!r} is a {type(importance).__name__}: expected a tensor"
        ) from error
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(
            f"importance of {name!r} has shape {values.shape}: expected (layers, columns) or "
            "(columns,), with at least one number"
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"importance of {name!r} holds {(~np.isfinite(values)).sum()} NaN or inf: was the "
            "calibration set empty, or did the model overflow?"
        )
    return values


def _means(values_LX: np.ndarray, span: int) -> np.ndarray:
    starts = np.arange(0, values_LX.shape[1], span)
    sizes = np.diff([*starts, values_LX.shape[1]])
    return np.add.reduceat(values_LX, starts, axis=1) / sizes


def _width(cells: int) -> int:
    """Cells a row of a folded map: some 2.5 times as many as rows, without a rest if possible."""
    if cells <= TALLEST:
        return cells
    wish = max((2.5 * cells) ** 0.5, cells / TALLEST)
    whole = [width for width in range(24, WIDEST + 1) if cells % width == 0
             and cells // width <= TALLEST]  # fmt: skip
    nearest = min(whole, key=lambda width: abs(width - wish), default=0)
    return nearest or min(WIDEST, round(wish))


def _ranks(values: np.ndarray) -> np.ndarray:
    ranks = np.full(values.shape, np.nan)
    order = np.argsort(values, kind="stable")  # NaN comes last
    there = int(np.isfinite(values).sum())
    ranks[order[:there]] = np.arange(1, there + 1)
    return ranks
