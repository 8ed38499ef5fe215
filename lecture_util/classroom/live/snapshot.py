"""`snapshot(value)`: a small picture of a value as it is now, which keeps nothing of the value.

Mathematics becomes MathML, a tensor its shape, dtype, device, range and a heat map of at most
32 x 48 cells, a container its first items. Nothing a value does here can stop the walk.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import math
import reprlib
import sys
from collections.abc import Mapping, Set
from typing import Any

LONGEST = 160  # characters of one value
ITEMS = 6  # of a container
EXACT = 1 << 20  # elements up to which a tensor's range is exact, not of a sample
HEAT = (32, 48)  # cells of a heat map, at most
LOW, MIDDLE, HIGH, MISSING = (0, 114, 178), (255, 255, 255), (213, 94, 0), (110, 110, 110)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """`text` says it in a line, for a screen reader too; `html` shows it."""

    text: str
    html: str

    @property
    def nbytes(self) -> int:
        return len(self.text) + len(self.html) + 100


def snapshot(value: Any) -> Snapshot:
    """A picture of the value, whatever it is."""
    try:
        if _is_sympy(value):
            return _mathematics(value)
        if _is_array(value):
            return _array(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _fields(value)
        return plain(brief(value))
    except Exception as error:  # a half-made object may fail at anything, its repr included
        return plain(f"<{type(value).__name__}: not shown, {type(error).__name__}>")


def plain(text: str) -> Snapshot:
    return Snapshot(text, f"<code>{html.escape(text)}</code>")


def _fields(value: Any) -> Snapshot:
    """A dataclass, one field a line, its mathematics typeset."""
    names = [field.name for field in dataclasses.fields(value) if field.repr][:ITEMS]
    rows = []
    for name in names:
        item = getattr(value, name, None)
        shown = _mathematics(item) if _is_sympy(item) else plain(brief(item, 1))
        rows.append(f"<code>{html.escape(name)}</code> = {shown.html}")
    return Snapshot(brief(value), f"<code>{type(value).__name__}</code><br>" + "<br>".join(rows))


def brief(value: Any, depth: int = 0) -> str:
    """One line, at most LONGEST characters, and no longer to make for a long value."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float) and type(value) in (int, float):
        return number(value)
    if isinstance(value, str | bytes):
        return reprlib.repr(value) if depth else cut(repr(value[:LONGEST]), len(value) > LONGEST)
    if _is_sympy(value):
        return cut(str(value)) if _is_small(value) else type(value).__name__
    if _is_array(value):
        return _kind(value)
    if isinstance(value, list | tuple | Set | Mapping):
        return cut(_container(value, depth))
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    if dataclasses.is_dataclass(value):
        if depth:
            return type(value).__name__
        fields = (f for f in dataclasses.fields(value) if f.repr)
        inner = ", ".join(f"{f.name}={brief(getattr(value, f.name, None), 1)}" for f in fields)
        return cut(f"{type(value).__name__}({inner})")
    if type(value).__repr__ is object.__repr__:
        return f"<{type(value).__name__}>"
    return cut(repr(value))


def number(value: float, significant: int = 6) -> str:
    """Digits in groups of three; six significant ones of a float; powers of ten beyond that."""
    if isinstance(value, int):
        if value.bit_length() > 60:
            return f"about 10^{math.floor(value.bit_length() * math.log10(2)):,}"
        return f"{value:,}"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if 1e-4 <= abs(value) < 1e15:
        digits = max(0, significant - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"
    return f"{value:.{significant}g}"


def cut(text: str, longer: bool = False) -> str:
    text = " ".join(text.split())
    return f"{text[: LONGEST - 1]}…" if longer or len(text) > LONGEST else text


def _container(value: Any, depth: int) -> str:
    if depth > 1:
        return f"{type(value).__name__} of {len(value):,}"
    items, more = [], len(value) - ITEMS
    for item, _ in zip(value, range(ITEMS), strict=False):
        shown = brief(item, depth + 1)
        items.append(
            f"{shown}: {brief(value[item], depth + 1)}" if isinstance(value, Mapping) else shown
        )
    if more > 0:
        items.append(f"… {more:,} more")
    inside = ", ".join(items)
    if hasattr(value, "_fields"):
        return f"{type(value).__name__}({inside})"
    if isinstance(value, list):
        return f"[{inside}]"
    if isinstance(value, tuple):
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if not value and isinstance(value, Set):
        return "empty set"
    return f"{{{inside}}}"


def _is_sympy(value: Any) -> bool:
    sympy = sys.modules.get("sympy")
    return sympy is not None and isinstance(value, sympy.Basic)


def _is_small(expression: Any) -> bool:
    """Has few enough parts to be read, counted no further than that."""
    import sympy

    return all(count < 120 for count, _ in enumerate(sympy.preorder_traversal(expression)))


def _mathematics(expression: Any) -> Snapshot:
    from sympy.printing.mathml import mathml

    if not _is_small(expression):
        return plain(f"{type(expression).__name__} too long to show")
    markup = mathml(expression, printer="presentation")
    return Snapshot(
        cut(str(expression)), f'<math displaystyle="true" class="step-math">{markup}</math>'
    )


def _is_array(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def _kind(array: Any) -> str:
    """`[2, 3] bf16 on cpu`; a NumPy array is nowhere else."""
    dtype = str(array.dtype).removeprefix("torch.")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    where = f" on {array.device}" if dtype != str(array.dtype) else ""
    return f"{list(array.shape)} {short.get(dtype, dtype)}{where}"


def _array(array: Any) -> Snapshot:
    import numpy as np

    kind = _kind(array)
    sample = _sample(array)
    if sample is None or sample.size == 0:
        return plain(kind)
    numbers = np.asarray(sample)
    finite = numbers[np.isfinite(numbers)]
    parts = []
    if finite.size:
        scale = "" if sample.size == math.prod(array.shape) else f" of {sample.size:,} sampled"
        low, mean, high = (number(float(x), 3) for x in (finite.min(), finite.mean(), finite.max()))
        parts.append(f"min {low}, mean {mean}, max {high}{scale}")
    for what, found in (("NaN", np.isnan(numbers)), ("infinite", np.isinf(numbers))):
        if count := int(found.sum()):
            parts.append(f"{count:,} {what}")
    if math.prod(array.shape) <= ITEMS:
        parts = [" ".join(number(float(x)) for x in numbers.ravel())]
    text = f"{kind}: {', '.join(parts)}"
    detail = "<br>".join(html.escape(part) for part in parts)
    return Snapshot(text, f"<code>{html.escape(kind)}</code><br>{detail}{_heat_map(numbers)}")


def _sample(array: Any) -> Any:
    """The array's numbers in fp64, or an evenly spaced sample of a long one's; None if it has none.

    Rows are sampled before they are copied, so that little of a large tensor is ever touched.
    """
    import numpy as np

    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "biuf":
            return None
        view = array
    else:
        if array.device.type == "meta" or array.layout.__str__() != "torch.strided":
            return None
        if array.is_complex() or array.is_quantized:
            return None
        view = array.detach()
    for axis in range(view.ndim):  # the leading axes first: whole rows stay together
        step = math.ceil(math.prod(view.shape) / EXACT) or 1
        view = view[(slice(None),) * axis + (slice(None, None, step),)]
    if isinstance(view, np.ndarray):
        return view.astype(np.float64)
    return view.cpu().double().numpy()


def _heat_map(numbers: Any) -> str:
    """Blue below zero, white at it, vermilion above; grey where there is no number."""
    import numpy as np
    from PIL import Image

    if numbers.size < 2:
        return ""
    rows = numbers.reshape(-1, numbers.shape[-1])
    rows = rows[:: math.ceil(rows.shape[0] / HEAT[0]), :: math.ceil(rows.shape[1] / HEAT[1])]
    finite = np.isfinite(rows)
    largest = np.abs(rows[finite]).max(initial=0) or 1
    share = np.where(finite, rows, 0) / largest
    end = np.where(share[..., None] < 0, LOW, HIGH)
    colours = MIDDLE + np.abs(share)[..., None] * (end - np.array(MIDDLE))
    colours[~finite] = MISSING
    file = io.BytesIO()
    Image.fromarray(colours.astype(np.uint8)).save(file, "png")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img class="step-heat" alt="" src="data:image/png;base64,{data}">'
