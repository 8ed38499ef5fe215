"""What lets one formula be a number for integers and algebra for symbols.

SymPy is imported only when a symbol is made or met.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lecture_util.model.config import Config


def symbols(letters: str) -> tuple:
    """Positive SymPy symbols: `B, S, T = symbols("B S T")`, and `(B,) = symbols("B")`."""
    import sympy

    return sympy.symbols(letters, positive=True, seq=True)


def symbolic_config(**fixed: Any) -> Config:
    """A Config whose sizes are symbols, except those given: symbolic_config(G=1) is MHA."""
    from lecture_util.model.config import Config

    free = {letter: symbols(letter)[0] for letter in "DFKGHLV" if letter not in fixed}
    return Config(**free, **fixed)


def is_symbolic(value: Any) -> bool:
    return bool(getattr(value, "free_symbols", False))


def simplified(value: Any) -> Any:
    return value.simplify() if is_symbolic(value) else value


def larger(a: Any, b: Any) -> Any:
    if is_symbolic(a) or is_symbolic(b):
        from sympy import Max

        return Max(a, b)
    return max(a, b)


def sizes(at_least: int = 1, /, **values: Any) -> tuple:
    """Whole numbers as ints, symbols as they came.

    Raises: ValueError or TypeError naming the size that is neither.
    """
    return tuple(_size(name, value, at_least) for name, value in values.items())


def _size(name: str, value: Any, at_least: int) -> Any:
    if is_symbolic(value):
        return value
    if not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}: expected a whole number or a SymPy symbol")
    if not math.isfinite(value) or value != int(value) or value < at_least:
        raise ValueError(f"{name} is {value!r}: expected a whole number, at least {at_least}")
    return int(value)


def shape_of(config: Any) -> Any:
    """A Config, and not the name of one.

    Raises: TypeError that shows how to pass the shape.
    """
    if isinstance(config, str):
        raise TypeError(f"config is {config!r}, a name: pass the shape, PUBLISHED[{config!r}]")
    return config


def positive(name: str, value: Any, example: str) -> Any:
    """A number above 0, or a symbol.

    Raises: ValueError with an example of what was expected.
    """
    if not is_symbolic(value) and not (isinstance(value, Real) and 0 < value < math.inf):
        raise ValueError(f"{name} is {value!r}: expected a number above 0, such as {example}")
    return value
