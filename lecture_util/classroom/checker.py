"""What an exercise's checker writes with: call the answer, compare it, name the misconception.

A comparison is staged (type, shape, dtype, values) and stops at the first stage that fails. Every
comparison that holds counts as one check; one that fails raises `Wrong` with what to tell the
student, and never with the formula that was asked for.
"""

from __future__ import annotations

import inspect
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .compare import difference, kind, show


class Wrong(Exception):
    """The answer is wrong; the message says in what."""


class NotAttempted(Exception):
    """The answer is still the stub."""


class Checker:
    """Seeded inputs and counted comparisons for one run of one exercise."""

    def __init__(self, id: str, seed: str | None = None) -> None:
        seed = os.environ.get("LECTURE_SEED", "0") if seed is None else seed
        self.seed = zlib.crc32(f"{seed}/{id}".encode())
        self.rng = np.random.default_rng(self.seed)
        self.passed = 0
        self._given = ""

    # Inputs, as plain Python numbers and fp32 tensors.

    def int(self, low: int, high: int) -> int:
        """One integer, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def ints(self, n: int, low: int, high: int) -> list[int]:
        """n different integers, so that mixed-up arguments show."""
        return [int(i) for i in self.rng.choice(np.arange(low, high + 1), n, replace=False)]

    def float(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def choice(self, options: Sequence) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def randn(self, *shape: int) -> Any:
        """A normal fp32 tensor on the CPU."""
        import torch

        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32))

    # The answer.

    def call(self, answer: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Call the student's function; what it raises becomes a message.

        Tensors, arrays and lists are passed as copies, so that an answer that works in place cannot
        alter the expected value; other objects are passed as they are.
        """
        if not callable(answer):
            raise Wrong(f"expected a function, got {kind(answer)}: pass its name, without calling")
        self._given = _describe(answer, args, kwargs)
        try:
            got = _apply(answer, args, kwargs)
        except NotImplementedError as error:
            if error.args:  # torch reports a missing operator with this type, and a text
                raise Wrong(self._raised(error)) from error
            raise NotAttempted from error
        except (KeyboardInterrupt, Wrong, NotAttempted):
            raise
        except BaseException as error:  # SystemExit too: a check never ends the notebook
            raise Wrong(self._raised(error)) from error
        if inspect.iscoroutine(got):
            got.close()  # or Python warns that it was never awaited
            raise Wrong("your function is async: write it with plain `def`")
        return got

    def raises(self, error: type[Exception], answer: Callable, /, *args: Any, **kwargs: Any) -> str:
        """The answer must refuse these arguments with `error`; gives back the error's text."""
        try:
            got = self.call(answer, *args, **kwargs)
        except Wrong as wrong:
            if not isinstance(wrong.__cause__, error):
                raise Wrong(f"{wrong}; expected {error.__name__}") from wrong
            self.passed += 1
            return str(wrong.__cause__)
        raise Wrong(f"{self._for()}expected {error.__name__}, but it returned {show(got)}")

    # Comparisons.

    def expect(self, condition: Any, message: str) -> None:
        """One check: `message` says what is wrong with the answer when the condition fails."""
        if not condition:
            raise Wrong(message)
        self.passed += 1

    def expect_type(self, got: Any, types: type | tuple[type, ...], what: str = "") -> None:
        """One check of type. True is no int here unless bool is listed."""
        types = types if isinstance(types, tuple) else (types,)
        if not isinstance(got, types) or (isinstance(got, bool) and bool not in types):
            names = " or ".join(t.__name__ for t in types)
            raise Wrong(f"{what or 'it'} is {kind(got)}, expected {names}")
        self.passed += 1

    def equal(
        self, got: Any, want: Any, *, wrong: Mapping[str, Any] | None = None, given: str = ""
    ) -> None:
        """One check of exact equality; SymPy expressions are equal when their values are.

        wrong: from a misconception's message to the value that the misconception gives, or to a
               function without arguments that computes it (evaluated only on a wrong answer).
        given: the inputs, in words; by default those of the last `call`.
        """
        self._compare([(given or self._given, got, want)], _fixed(wrong), 0.0, 0.0)

    def close(
        self,
        got: Any,
        want: Any,
        *,
        rtol: float = 1e-6,
        atol: float = 0.0,
        wrong: Mapping[str, Any] | None = None,
        given: str = "",
    ) -> None:
        """As `equal`, to a tolerance: |got - want| <= atol + rtol * |want|."""
        self._compare([(given or self._given, got, want)], _fixed(wrong), rtol, atol)

    def like(
        self,
        answer: Callable,
        reference: Callable,
        cases: Sequence[tuple | dict],
        *,
        rtol: float = 1e-6,
        atol: float = 0.0,
        wrong: Mapping[str, Callable] | None = None,
    ) -> None:
        """The answer must agree with `reference` on every case; one check a case.

        cases: tuples of positional or dicts of keyword arguments.
        wrong: from a misconception's message to the function a student would have written; its
               message is given only if it explains the answer on all cases.
        """
        rows, inputs = [], []
        for case in cases:
            args, kwargs = ((), case) if isinstance(case, dict) else (tuple(case), {})
            got = self.call(answer, *args, **kwargs)
            inputs.append((args, kwargs))
            rows.append((self._given, got, _apply(reference, args, kwargs)))
        values = {
            message: lambda i, f=f: _apply(f, *inputs[i]) for message, f in (wrong or {}).items()
        }
        self._compare(rows, values, rtol, atol)

    def _compare(self, rows: list[tuple], wrong: dict[str, Callable], rtol: float, atol: float):
        complaints = [difference(got, want, rtol, atol) for _, got, want in rows]
        failed = next((i for i, complaint in enumerate(complaints) if complaint), None)
        if failed is None:
            self.passed += len(rows)
            return
        for message, value in wrong.items():
            if all(_matches(got, value, i, rtol, atol) for i, (_, got, _) in enumerate(rows)):
                raise Wrong(message)
        given = rows[failed][0]
        raise Wrong((f"for {given}: " if given else "") + complaints[failed])

    def _for(self) -> str:
        return f"for {self._given}: " if self._given else ""

    def _raised(self, error: BaseException) -> str:
        called = f" when called with {self._given}" if self._given else ""
        return f"your function raised {error_text(error)}{called}"


def error_text(error: BaseException) -> str:
    """`TypeError: what it says`, for errors of any making."""
    try:
        text = str(error)
    except Exception:  # an answer may raise an error whose own text is broken
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _fixed(wrong: Mapping[str, Any] | None) -> dict[str, Callable]:
    return {
        message: (lambda i, v=value: v() if inspect.isfunction(v) else v)
        for message, value in (wrong or {}).items()
    }


def _matches(got: Any, value: Callable, i: int, rtol: float, atol: float) -> bool:
    try:
        return difference(got, value(i), rtol or 1e-9, atol) is None
    except Exception:  # a misconception may not be computable at these inputs
        return False


def _apply(function: Callable, args: tuple, kwargs: dict) -> Any:
    return function(*map(_copy, args), **{k: _copy(v) for k, v in kwargs.items()})


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.copy()
    clone = getattr(value, "clone", None)
    return clone() if clone is not None and type(value).__module__ == "torch" else value


def _describe(function: Callable, args: tuple, kwargs: dict) -> str:
    """The call's arguments by name: `B=3, D=5`."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # wrong number of arguments, or a builtin
        named = [show(a) for a in args] + [f"{k}={show(v)}" for k, v in kwargs.items()]
    else:
        named = [f"{k}={show(v)}" for k, v in bound.items()]
    return ", ".join(named)
