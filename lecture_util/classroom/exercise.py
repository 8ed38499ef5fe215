"""Exercises that answer at once: `check("2.3", answer)`, `hint("2.3")`, `status()`.

A notebook's checkers are in `exercises/nbNN.py`, each a function registered by `@exercise`:

    @exercise("2.3", title="Intensity of a matmul", minutes=10, trains="reading a cost off a shape",
              hints=("Count the bytes of all three matrices.", "Then divide."))
    def _(answer, c):
        B, D = c.ints(2, low=2, high=99)
        c.close(c.call(answer, B, D), 2 * B * D, wrong={"you counted one FLOP a pair": B * D})

`check` prints one line and never raises. A ✓ line is the same on every machine and under every
LECTURE_SEED: it is what nbval compares.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .checker import Checker, NotAttempted, Wrong, error_text

SOLVED, OPEN, WRONG = "✓", "○", "✗"


@dataclass(frozen=True)
class Exercise:
    id: str
    title: str
    minutes: int
    trains: str
    hints: tuple[str, ...]
    checker: Callable[[Any, Checker], None]


class Classroom:
    """The exercises known to this process, their last verdicts, and the hints opened."""

    def __init__(self, package: str = "lecture_util.classroom.exercises") -> None:
        self.package = package
        self.exercises: dict[str, Exercise] = {}
        self.reset()

    def reset(self) -> None:
        """Forget verdicts and hints; the exercises stay."""
        self.verdicts: dict[str, str] = {}
        self.hints_opened: dict[str, int] = {}

    def exercise(
        self, id: str, *, title: str, minutes: int, trains: str, hints: tuple[str, ...] = ()
    ) -> Callable:
        """Register the decorated `f(answer, c)` as the checker of exercise `id`."""
        if not re.fullmatch(r"\d+\.\d+", id):
            raise ValueError(f"exercise id {id!r}: expected notebook.number, such as '2.3'")
        if isinstance(hints, str):
            raise TypeError(f"hints of exercise {id} is a string: expected a tuple, ('...',)")

        def register(checker: Callable) -> Callable:
            known = self.exercises.get(id)
            if known and _is_another(known.checker, checker):
                raise ValueError(f"exercise {id} is registered twice in {checker.__module__}")
            self.exercises[id] = Exercise(id, title, minutes, trains, tuple(hints), checker)
            return checker

        return register

    def load(self, number: int) -> list[str]:
        """Import notebook `number`'s checkers; the ids it has, in order."""
        name = f"{self.package}.nb{number:02d}"
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        return sorted((i for i in self.exercises if int(i.split(".")[0]) == number), key=_order)

    def load_all(self) -> list[str]:
        """Import every notebook's checkers; all ids."""
        for number in self._numbers():
            self.load(number)
        return sorted(self.exercises, key=_order)

    def _numbers(self) -> list[int]:
        """The notebooks that have a module of checkers."""
        modules = pkgutil.iter_modules(importlib.import_module(self.package).__path__)
        found = [re.fullmatch(r"nb(\d+)", module.name) for module in modules]
        return [int(match[1]) for match in found if match]

    def check(self, id: str, answer: Any) -> None:
        """Check an answer and print one line: ✓ solved, ○ not attempted, or ✗ and what is wrong.

        What the answer prints doesn't show: to see it, call your function in a cell of its own.
        """
        exercise, problem = self._find(id)
        if exercise is None:
            print(f"{WRONG} {problem}")
            return
        verdict, text = _judge(exercise, answer)
        self.verdicts[id] = verdict
        print(f"{verdict} {id} {exercise.title}: {text}")

    def hint(self, id: str) -> None:
        """Open the next hint of an exercise."""
        exercise, problem = self._find(id)
        if exercise is None:
            print(problem)
            return
        opened, total = self.hints_opened.get(id, 0), len(exercise.hints)
        if opened == total:
            print(f"{id} {exercise.title}: " + ("no more hints" if total else "it has no hints"))
            return
        self.hints_opened[id] = opened + 1
        print(f"{id} {exercise.title}, hint {opened + 1} of {total}: {exercise.hints[opened]}")

    def status(self, notebook: str | int | None = None) -> None:
        """Print the progress in one notebook, or in all whose exercises were checked so far."""
        if notebook is None:
            numbers = sorted({int(i.split(".")[0]) for i in self.verdicts})
            if not numbers:
                print('no exercise was checked yet; status("02") lists a notebook\'s exercises')
        else:
            if not re.fullmatch(r"\d+", str(notebook)):
                print(f'{notebook!r} is not a notebook: pass its number, such as status("02")')
                return
            numbers = [int(notebook)]
        for number in numbers:
            ids = self.load(number)
            if not ids:
                has = ", ".join(f"{n:02d}" for n in self._numbers())
                print(f"there is no notebook {number:02d} with exercises; those that have: {has}")
                continue
            solved = sum(self.verdicts.get(i) == SOLVED for i in ids)
            print(f"notebook {number:02d}: {solved} of {len(ids)} solved")
            width = max((len(self.exercises[i].title) for i in ids), default=0)
            for i in ids:
                e, said = self.exercises[i], self.verdicts.get(i)
                word = {SOLVED: "solved", OPEN: "not attempted", WRONG: "not right yet"}
                state = word.get(said, "not checked yet")
                print(f"  {said or '·'} {i:<5} {e.title:<{width}} {e.minutes:>3} min  {state}")

    def _find(self, id: Any) -> tuple[Exercise | None, str]:
        if not isinstance(id, str) or not re.fullmatch(r"\d+\.\d+", id):
            return None, f"{id!r} is not an exercise: the id is a string such as '2.3'"
        number = int(id.split(".")[0])
        try:
            known = self.load(number)
        except Exception as error:  # a broken nbNN.py must not end the notebook
            return None, f"{id}: the checkers of notebook {number:02d} do not load: {error!r}"
        if id in self.exercises:
            return self.exercises[id], ""
        has = f"has {', '.join(known)}" if known else "has no exercises"
        return None, f"{id} is not an exercise: notebook {number:02d} {has}"


def _judge(exercise: Exercise, answer: Any) -> tuple[str, str]:
    if answer is ... or answer is None:
        return OPEN, "not attempted"
    c = Checker(exercise.id)
    try:
        with _quietly(c.seed):
            exercise.checker(answer, c)
    except NotAttempted:
        return OPEN, "not attempted"
    except Wrong as wrong:
        text = str(wrong)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an odd answer, such as an object whose == raises
        if isinstance(error, NotImplementedError) and not error.args:
            return OPEN, "not attempted"
        text = f"checking this answer raised {error_text(error)}"
    else:
        return SOLVED, f"{c.passed} check{'s' * (c.passed != 1)}"
    finally:
        if inspect.iscoroutine(answer):
            answer.close()  # or Python warns that it was never awaited
    text = " ".join(text.split())
    return WRONG, text if len(text) <= 400 else text[:399] + "…"


@contextlib.contextmanager
def _quietly(seed: int) -> Iterator[None]:
    """Discard what the answer prints or shows, and leave no trace in the global generators."""
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(null))
        stack.enter_context(contextlib.redirect_stderr(null))
        if "IPython" in sys.modules:
            from IPython.utils.capture import capture_output

            stack.enter_context(capture_output(stdout=False, stderr=False, display=True))
        if torch := sys.modules.get("torch"):
            gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            stack.enter_context(torch.random.fork_rng(devices=gpus))
            torch.manual_seed(seed)
        stack.callback(random.setstate, random.getstate())
        random.seed(seed)
        numpy = sys.modules["numpy"]
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        numpy.random.seed(seed)
        stack.callback(_close_figures, keep=_figures())
        yield


def _figures() -> set[int]:
    pyplot = sys.modules.get("matplotlib.pyplot")
    return set(pyplot.get_fignums()) if pyplot else set()


def _close_figures(keep: set[int]) -> None:
    """A figure left open by the answer would be drawn under the cell."""
    for number in _figures() - keep:
        sys.modules["matplotlib.pyplot"].close(number)


def _is_another(old: Callable, new: Callable) -> bool:
    """Two functions of one file; a reloaded or re-run one replaces itself."""
    old, new = old.__code__, new.__code__
    return old.co_filename == new.co_filename and old.co_firstlineno != new.co_firstlineno


def _order(id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in id.split("."))


_classroom = Classroom()
exercise, check, hint, status = (
    _classroom.exercise,
    _classroom.check,
    _classroom.hint,
    _classroom.status,
)
