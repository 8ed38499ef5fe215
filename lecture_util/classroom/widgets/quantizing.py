"""quantization_explorer (notebook 06): few bits, shared scales, outliers, and what they cost."""

from __future__ import annotations

from functools import lru_cache

import ipywidgets as widgets
import torch
from torch import Tensor

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.choices import menu
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.quantizing_picture import MIDDLE, RoundingPicture
from lecture_util.classroom.widgets.rounding import (
    GRIDS,
    NF4,
    SYMMETRIC,
    Result,
    Rounded,
    enlarged,
    first_rows,
    round_to,
    samples,
    split,
)
from lecture_util.quantization.scales import SCALE_DTYPES, Per

SIZES = (16, 32, 48, 64, 96, 128, 256, 512)
TIMES = (1, 2, 3, 5, 10, 20, 50, 100)
THRESHOLDS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
WEIGHTS, ACTIVATIONS = "weights", "activations"


class QuantizationExplorer(Explorer):
    """The explorer; `result` says what the present choice costs."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        rows: dict[str, int],
        controls: dict[str, widgets.Widget],
        scale_dtype: torch.dtype,
    ) -> None:
        self.tensors, self.rows, self.scale_dtype = tensors, rows, scale_dtype
        self.picture, self._drawn = RoundingPicture(), None
        self._round = lru_cache(64)(self._round_anew)
        self._x = lru_cache(4)(lambda shows, times: enlarged(tensors[shows], times))
        super().__init__(self._draw, controls, columns=3)

    def redraw(self, change: object = None) -> None:
        """Grey what says nothing now, then draw."""
        self.controls["bits"].disabled = self.values["grid"] == NF4
        self.controls["threshold"].disabled = self.values["shows"] == WEIGHTS
        super().redraw(change)

    def _round_anew(self, shows: str, times: int, threshold: float, bits: int, per: Per,
                    grid: str) -> tuple[Rounded, Result]:  # fmt: skip
        x_RD = self._x(shows, times)
        in_fp16_D = split(x_RD, threshold)
        rounded = round_to(x_RD.masked_fill(in_fp16_D, 0), bits, per, grid, self.scale_dtype)
        back_RD = torch.where(in_fp16_D, _in_fp16(x_RD), rounded.back_RD)
        off_RD = (back_RD - x_RD).abs()
        relative = float(off_RD.norm() / self.tensors[shows].norm())
        result = Result(
            relative,
            float(off_RD.max()),
            rounded.bits + 16 * int(in_fp16_D.sum()) / len(in_fp16_D),
            float(((back_RD == 0) & (x_RD != 0)).sum() / x_RD.count_nonzero()),
            int(in_fp16_D.sum()),
            relative,
        )
        return rounded, result

    def _draw(self, shows, bits, per, grid, outlier, threshold, zoom):
        threshold = threshold if shows == ACTIVATIONS else 0
        if self._drawn != shows:
            if shows == WEIGHTS:
                self.picture.with_errors(shows, self.tensors[shows])
            else:
                self.picture.with_columns(shows, self.tensors[shows], TIMES[-1])
            self._drawn = shows
        x_RD, bits = self._x(shows, outlier), 4 if grid == NF4 else bits
        rounded, self.result = self._round(shows, outlier, threshold, bits, per, grid)
        if threshold:
            unsplit = self._round(shows, outlier, 0, bits, per, grid)[1].relative
            self.result = Result(**{**vars(self.result), "unsplit": unsplit})
        self.picture.move_histogram(x_RD, rounded, per, zoom)
        if shows == WEIGHTS:
            results = {
                name: [self._round(shows, outlier, 0, bits, per, name)[1]
                       for bits in ([4] if name == NF4 else range(2, 9))]
                for name in GRIDS
            }  # fmt: skip
            self.picture.move_errors(results, self.result)
        else:
            self.picture.move_columns(x_RD, split(x_RD, threshold), threshold)
        return self.picture.canvas.png(), self._words(x_RD, shows, bits, per, grid, threshold)

    def _words(self, x_RD: Tensor, shows: str, bits: int, per: Per, grid: str, threshold) -> str:
        one, (rows, columns) = self.result, x_RD.shape
        scope = f"groups of {per}" if isinstance(per, int) else f"one scale a {per}"
        scope = "one scale for all" if per == "tensor" else scope
        name = "NF4" if grid == NF4 else f"{bits} bits, {grid}"
        text = (
            f"{name}, {scope}: <b>relative error {percent(one.relative)}</b>, no number off by "
            f"more than {style.number(one.largest)}; <b>{one.bits:.2f} bits</b> a number, scales "
            f"included; {percent(one.zeros)} are read back as 0"
        )
        if threshold:
            text += (
                f"; <b>{one.fp16_columns} of {columns:,} columns "
                f"({percent(one.fp16_columns / columns)}) in fp16</b>, without that the error is "
                f"{percent(one.unsplit)}"
            )
        if rows < self.rows[shows]:
            text += f" (the first {rows:,} of {self.rows[shows]:,} rows)"
        return text + "."


def _in_fp16(x: Tensor) -> Tensor:
    most = torch.finfo(torch.float16).max
    return x.clamp(-most, most).half().float()


def percent(share: float) -> str:
    return f"{style.number(100 * share, 3)}%"


def _controls(D: int, per: Per, shown: list[str], **starts) -> dict[str, widgets.Widget]:
    if type(per) is int and per >= 1:
        sizes = sorted({size for size in SIZES if size < D} | {per})
    else:
        sizes = [size for size in SIZES if size < D]
    scopes = {"the whole tensor": "tensor", "a column": "column", "a row": "row"}
    scopes |= {f"{size} of a row": size for size in reversed(sizes)}
    shows, bits, grid = starts["shows"], starts["bits"], starts["grid"]
    if type(bits) is not int or not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}: expected a whole number, 2 to 8")
    for name, value, offered in [("per", per, list(scopes.values())),
                                 ("outlier", starts["outlier"], TIMES),
                                 ("threshold", starts["threshold"], THRESHOLDS)]:  # fmt: skip
        if isinstance(value, bool) or value not in offered:
            raise ValueError(f"{name} is {value!r}: choose from {', '.join(map(str, offered))}")
    return {
        "shows": menu("shows", shown, shows or shown[0]),
        "bits": widgets.IntSlider(description="bits", min=2, max=8, value=bits),
        "per": widgets.Dropdown(description="a scale for", options=scopes, value=per),
        "grid": menu("grid", list(GRIDS), grid),
        "outlier": widgets.SelectionSlider(
            description="largest one ×", value=starts["outlier"],
            options=[(f"{times}", times) for times in TIMES],
        ),
        "threshold": widgets.SelectionSlider(
            description="fp16 from", value=starts["threshold"],
            options=[(f"{limit}" if limit else "none", limit) for limit in THRESHOLDS],
        ),
        "zoom": widgets.Dropdown(
            description="axis over", value=False,
            options={"all numbers": False, f"the middle {MIDDLE:.0%}": True},
        ),
    }  # fmt: skip


def quantization_explorer(
    weights: Tensor | None = None,
    activations: Tensor | None = None,
    *,
    shows: str | None = None,
    bits: int = 4,
    per: Per = "row",
    grid: str = SYMMETRIC,
    outlier: int = 1,
    threshold: float = 0,
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizationExplorer:
    """Round a real tensor to few bits: the grid, the error, what outliers do (notebook 06).

    weights:     (F, D).   activations: (..., D). Neither: random ones of both, seeded.
    shows:       "weights" or "activations", where there are both.
    bits:        2 to 8; NF4 has 4.   grid: "symmetric", "zero-point" or "NF4".
    per:         what shares a scale: "tensor", "column", "row", or so many neighbours in a row.
    outlier:     the largest number is made so many times as large: 1, 2, 3, 5, 10, 20, 50, 100.
    threshold:   LLM.int8's: columns of activations that reach it stay in fp16. 0: none.
    scale_dtype: what a scale is stored in.

    The error is relative to the tensor before its largest number was made larger. `.result` holds
    the numbers. Of more than 131,072 numbers the first rows are taken, and the text says so.

    Example: `quantization_explorer(model.layers[3].down.weight, per=48, grid="zero-point")`
    Raises:  ValueError naming what is no tensor, holds NaN, or is not among the choices.
    """
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"scale_dtype is {scale_dtype!r}: choose from {list(SCALE_DTYPES)}")
    given = {WEIGHTS: weights, ACTIVATIONS: activations}
    given = {name: x for name, x in given.items() if x is not None}
    given = given or dict(zip((WEIGHTS, ACTIVATIONS), samples(), strict=True))
    tensors = {name: first_rows(name, x) for name, x in given.items()}
    rows = {name: x.numel() // x.shape[-1] for name, x in given.items()}
    D = max(x_RD.shape[1] for x_RD in tensors.values())
    controls = _controls(D, per, list(tensors), shows=shows, bits=bits, grid=grid,
                         outlier=outlier, threshold=threshold)  # fmt: skip
    return QuantizationExplorer(tensors, rows, controls, scale_dtype)
