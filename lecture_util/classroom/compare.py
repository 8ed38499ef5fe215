"""Say how two values differ, in a student's words.

`difference(got, want)` is None when they agree, and otherwise one clause such as
`got 12, expected 10` or `shape (2, 3), expected (3, 2)`: type first, then shape, then values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from numbers import Number, Rational
from typing import Any

import numpy as np


def kind(value: Any) -> str:
    """A value's type with its article: `a list`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def show(value: Any, limit: int = 60) -> str:
    """A value in few characters; tensors by shape once they have more than a few elements."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and math.prod(shape) > 8:
        return f"<{type(value).__name__} {tuple(shape)}>"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if isinstance(shape, tuple):
        value = value.tolist()
    if isinstance(value, float | np.floating):
        return f"{float(value):.6g}"
    try:
        text = str(value) if _is_sympy(value) or isinstance(value, np.generic) else repr(value)
    except Exception:  # a student's class may have a broken repr
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def difference(got: Any, want: Any, rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """None if `got` agrees with `want` to |got - want| <= atol + rtol*|want|, else what differs."""
    if got is None and want is not None:
        return "it returned None: is a `return` missing?"
    if _is_tensor(want):
        return _tensor(got, want, rtol, atol)
    if isinstance(want, np.ndarray):
        return _array(got, want, rtol, atol)
    if _is_sympy(want) and not want.is_Boolean and getattr(want, "free_symbols", None):
        return _algebra(got, want)
    if isinstance(want, bool | np.bool_):
        if not isinstance(got, bool | np.bool_) and not _is_sympy_bool(got):
            return f"it is {kind(got)}, expected True or False"
        return None if bool(got) == bool(want) else _expected(got, want)
    if isinstance(want, Number) or _is_sympy(want):
        return _number(got, want, rtol, atol)
    if isinstance(want, list | tuple):
        return _sequence(got, want, rtol, atol)
    if isinstance(want, Mapping):
        return _mapping(got, want, rtol, atol)
    if isinstance(want, str) and not isinstance(got, str):
        return f"it is {kind(got)}, expected a string"
    return None if bool(got == want) else _expected(got, want)


def _expected(got: Any, want: Any) -> str:
    left, right = show(got), show(want)
    if left == right:  # they differ only past the digits shown, or past the cut
        left, right = repr(got), repr(want)
    return f"got {left}, expected {right}"


def _number(got: Any, want: Any, rtol: float, atol: float) -> str | None:
    if (_is_tensor(got) or isinstance(got, np.ndarray)) and got.shape == ():
        got = got.item()
    if _is_sympy(got):
        if free := getattr(got, "free_symbols", None):
            return f"it still holds the symbol {_names(free)}, expected a number"
    elif isinstance(got, bool | np.bool_) or not isinstance(got, Number):
        return f"it is {kind(got)}, expected a number"
    got, want = _exact(got), _exact(want)
    if got == want:
        return None
    if isinstance(got, complex) or isinstance(want, complex):
        close = abs(got - want) <= atol + rtol * abs(want)
    elif isinstance(got, Rational) and isinstance(want, Rational):  # may be beyond any float
        off, of = abs(Fraction(got) - Fraction(want)), abs(Fraction(want))
        close = bool(rtol or atol) and off <= Fraction(atol) + Fraction(rtol) * of
    else:
        x, y = _float(got), _float(want)
        close = math.isfinite(y) and abs(x - y) <= atol + rtol * abs(y) and bool(rtol or atol)
        close = close or (math.isnan(x) and math.isnan(y))
    return None if close else _expected(got, want)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond any float
        return math.inf if value > 0 else -math.inf


def _exact(value: Any) -> Any:
    """A SymPy number as Python's: SymPy's own 1/2 and 0.5 are unequal."""
    if not _is_sympy(value):
        return value
    if value.is_Rational:
        return Fraction(int(value.p), int(value.q))
    return float(value) if value.is_real else complex(value)


def _sequence(got: Any, want: Any, rtol: float, atol: float) -> str | None:
    name = "a list" if isinstance(want, list) else "a tuple"
    if not isinstance(got, list | tuple):
        return f"it is {kind(got)}, expected {name} of {len(want)}"
    if len(got) != len(want):
        return f"it has {len(got)} items, expected {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if complaint := difference(g, w, rtol, atol):
            return f"item {i}: {complaint}"
    return None


def _mapping(got: Any, want: Mapping, rtol: float, atol: float) -> str | None:
    if not isinstance(got, Mapping):
        return f"it is {kind(got)}, expected a dict"
    for key in want:
        if key not in got:
            return f"the key {key!r} is missing"
    for key in got:
        if key not in want:
            return f"the key {key!r} should not be there"
    for key, value in want.items():
        if complaint := difference(got[key], value, rtol, atol):
            return f"under {key!r}: {complaint}"
    return None


def _tensor(got: Any, want: Any, rtol: float, atol: float) -> str | None:
    import torch

    if not isinstance(got, torch.Tensor):
        return f"it is {kind(got)}, expected a tensor of shape {tuple(want.shape)}"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, expected {want.dtype}"
    wide = torch.complex128 if got.is_complex() else torch.float64
    wide = wide if got.is_floating_point() or got.is_complex() else got.dtype
    g, w = (t.detach().cpu().to(wide).numpy() for t in (got, want))
    return _values(g, w, rtol, atol)


def _array(got: Any, want: np.ndarray, rtol: float, atol: float) -> str | None:
    if not isinstance(got, np.ndarray):
        return f"it is {kind(got)}, expected an array of shape {want.shape}"
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    if got.dtype.kind != want.dtype.kind:
        return f"dtype {got.dtype}, expected {want.dtype}"
    return _values(got, want, rtol, atol)


def _values(got: np.ndarray, want: np.ndarray, rtol: float, atol: float) -> str | None:
    if got.dtype.kind not in "fc":
        bad = got != want
    else:
        bad = ~np.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
        if (np.isnan(got) & ~np.isnan(want)).any():
            return f"{int(np.isnan(got).sum())} of {got.size} values are NaN"
    if not bad.any():
        return None
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    where = f"at {list(at)}: " if at else ""
    share = f" ({int(bad.sum())} of {bad.size} values differ)" if at else ""
    return f"{where}{_expected(got[at].item(), want[at].item())}{share}"


def _algebra(got: Any, want: Any) -> str | None:
    """Compare expressions by value at random points, which no way of writing them can fool."""
    import sympy

    if isinstance(got, str | bool) or not (_is_sympy(got) or isinstance(got, Number)):
        return f"it is {kind(got)}, expected a SymPy expression"
    if isinstance(want, sympy.Expr) != isinstance(got, sympy.Expr | Number):
        return f"it is {kind(got)}, expected {kind(want)}"
    # A symbol is its name here: B and B(positive=True) are the same letter on the board.
    ours = {s.name: s for s in want.free_symbols}
    theirs = getattr(got, "free_symbols", set())
    if extra := {s for s in theirs if s.name not in ours}:
        return f"it holds {_names(extra)}, expected only {_names(want.free_symbols)}"
    if not isinstance(want, sympy.Expr):
        got = got.xreplace({s: ours[s.name] for s in theirs})
        return None if got == want or sympy.simplify(got ^ want) == False else _expected(got, want)  # noqa: E712
    rng = np.random.default_rng(0)
    for _ in range(12):
        point = {name: int(2 ** rng.uniform(0, 12)) + 1 for name in sorted(ours)}
        g = sympy.sympify(got).subs({s: point[s.name] for s in theirs})
        w = want.subs({s: point[name] for name, s in ours.items()})
        if abs(sympy.N(g - w, 20)) > 1e-12 * abs(sympy.N(w, 20)):
            values = ", ".join(f"{name}={value}" for name, value in point.items())
            return f"at {values} it gives {_plain(g)}, expected {_plain(w)}"
    return None


def _plain(value: Any) -> str:
    return show(int(value)) if value.is_Integer else show(float(value))


def _names(symbols: Any) -> str:
    return ", ".join(sorted(s.name for s in symbols))


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # no tensor exists before torch is imported
    return torch is not None and isinstance(value, torch.Tensor)


def _is_sympy(value: Any) -> bool:
    sympy = sys.modules.get("sympy")
    return sympy is not None and isinstance(value, sympy.Basic)


def _is_sympy_bool(value: Any) -> bool:
    return _is_sympy(value) and value.is_Boolean and not value.free_symbols
