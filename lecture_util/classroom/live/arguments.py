"""A call's arguments: fresh copies for every run, and what is typed into their boxes.

Typed text is arithmetic over numbers and the symbols that came with the call, or a Python literal.
It is read, never evaluated as code.
"""

from __future__ import annotations

import ast
import copy
import inspect
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .snapshot import brief, cut

COPIED_BYTES = 64_000_000  # what is larger goes in as it is
MOST_PARTS = 100_000
OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


@dataclass
class Argument:
    """One value of the call: where it goes, what it is now, and what its box says."""

    name: str
    key: str | int  # keyword, or place among the positional
    value: Any
    original: Any
    text: str = ""
    error: str = ""

    @property
    def editable(self) -> bool:
        return isinstance(self.original, int | float | str | None) or _is_expression(self.original)

    @property
    def shared(self) -> bool:
        """Whether runs share it, so that one sees what another left in it."""
        return not _copyable(self.value)


class Arguments:
    """What a function is called with, named as its signature names it."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict) -> None:
        """Raises: TypeError, naming the signature, if they don't fit it."""
        names, defaults = _names(fn, args, kwargs)
        keys = [*range(len(args)), *kwargs, *defaults]
        names += defaults
        kept = fresh([*args, *kwargs.values(), *defaults.values()])
        self.items = [
            Argument(name, key, value, value, _text(value))
            for name, key, value in zip(names, keys, kept, strict=True)
        ]
        found = [_symbols(item.original) for item in self.items]
        self.symbols = {symbol.name: symbol for symbols in found for symbol in symbols}

    def call(self) -> tuple[tuple, dict[str, Any]]:
        """Copies to call with. Whatever a run does to them, the next run gets the same again."""
        values = fresh([item.value for item in self.items])
        pairs = list(zip(self.items, values, strict=True))
        return (
            tuple(value for item, value in pairs if isinstance(item.key, int)),
            {item.key: value for item, value in pairs if isinstance(item.key, str)},
        )

    def edit(self, texts: dict[str, str]) -> bool:
        """Take over what is typed; False, and a message at each box, where it can't be read."""
        read = []
        for item in self.items:
            item.error = ""
            if item.name not in texts or not item.editable:
                continue
            item.text = texts[item.name]
            try:
                read.append((item, self.parse(item.text, item.original)))
            except ValueError as error:
                item.error = cut(str(error))
        fine = not any(item.error for item in self.items)
        for item, value in read if fine else []:
            item.value = value
        return fine

    def parse(self, text: str, original: Any) -> Any:
        """The value that a text stands for, in a box that held `original`.

        Raises: ValueError with what was expected.
        """
        text = text.strip()
        if text == _text(original):
            return original
        if isinstance(original, str):
            return text
        if text in ("True", "False", "None"):
            return ast.literal_eval(text)
        if isinstance(original, bool):
            raise ValueError(f"{text!r} is neither True nor False")
        try:
            value = self._value(ast.parse(text, mode="eval").body)
        except SyntaxError:
            raise ValueError(f"{text!r} is not a number" + self._or_symbols()) from None
        except (ArithmeticError, TypeError) as error:
            raise ValueError(f"{text!r}: {error}") from None
        return float(value) if isinstance(original, float) and isinstance(value, int) else value

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.symbols:
            return self.symbols[node.id]
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](self._value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            left, right = self._value(node.left), self._value(node.right)
            huge = isinstance(right, int | float) and abs(right) > 1000
            if isinstance(node.op, ast.Pow) and huge:
                raise ValueError(f"a power of {right} is too large to work out")
            return OPERATIONS[type(node.op)](left, right)
        raise ValueError(f"{ast.unparse(node)!r} is not a number" + self._or_symbols())

    def _or_symbols(self) -> str:
        names = ", ".join(sorted(self.symbols))
        return f" or one of the symbols {names}" if names else ""


def fresh(values: list) -> list:
    """Copies of what can change; symbols, models and what is very large stay themselves.

    One object passed twice is still one object in the copy.
    """
    memo: dict[int, Any] = {}
    return [_fresh(value, memo) for value in values]


def _fresh(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, int | float | str | bytes | None) or not _copyable(value):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if id(value) not in memo:
            clone = value.detach().clone().requires_grad_(value.requires_grad)
            memo[id(value)] = clone
        return memo[id(value)]
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a generator, a lock, a tensor in the midst of autograd
        return value


def _copyable(value: Any) -> bool:
    torch, sympy = sys.modules.get("torch"), sys.modules.get("sympy")
    if torch is not None and isinstance(value, torch.nn.Module):
        return False
    if sympy is not None and isinstance(value, sympy.Basic):
        return True
    return _size(value) <= COPIED_BYTES


def _size(value: Any) -> int:
    """Bytes of the tensors, arrays and texts within; a model or too many parts counts as huge."""
    torch, total, parts, seen = sys.modules.get("torch"), 0, [value], set()
    while parts and total <= COPIED_BYTES:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if len(seen) > MOST_PARTS or (torch and isinstance(part, torch.nn.Module)):
            return COPIED_BYTES + 1
        total += getattr(part, "nbytes", 0) if not isinstance(part, type) else 0
        total += sys.getsizeof(part, 0)
        if isinstance(part, dict):
            parts.extend([*part, *part.values()])
        elif isinstance(part, list | tuple | set | frozenset):
            parts.extend(part)
        elif not callable(part) and hasattr(part, "__dict__"):
            parts.extend(vars(part).values())
    return total


def _symbols(value: Any) -> set:
    return value.free_symbols if _is_expression(value) else set()


def _is_expression(value: Any) -> bool:
    sympy = sys.modules.get("sympy")
    return sympy is not None and isinstance(value, sympy.Expr)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | None) or _is_expression(value):
        return str(value)
    return brief(value)


def _names(fn: Callable, args: tuple, kwargs: dict) -> tuple[list[str], dict[str, Any]]:
    """The name of each argument (those of `*rest` are rest[0], rest[1]), and unused defaults."""
    names, defaults = [], {}
    signature = inspect.signature(fn)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        called = f"{getattr(fn, '__name__', type(fn).__name__)}{signature}"
        raise TypeError(f"step can't call {called} with these arguments: {error}") from None
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = bound.arguments.get(parameter.name, ())
            names += [f"{parameter.name}[{i}]" for i in range(len(rest))]
        elif parameter.name in bound.arguments:
            names.append(parameter.name)
        elif isinstance(parameter.default, int | float | str) and (
            parameter.kind is not parameter.POSITIONAL_ONLY
        ):
            defaults[parameter.name] = parameter.default
    return names[: len(args)] + list(kwargs), defaults
