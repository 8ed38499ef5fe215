"""How the lecture is taught: exercises, predictions, widgets, figures, and notebooks as artefacts.

exercise     check, hint, status; the checkers of notebook NN are in exercises/nbNN
checker      what a checker writes with; compare says how two values differ
notebook     a py:percent source as a notebook, and the student's copy of it
build        executes sources into solutions/ and notebooks/      python -m lecture_util build
grade        runs submissions, each in a process of its own       python -m lecture_util grade
sandbox      how they are run, and none of them left behind
predict      a guess before a measurement; reveal draws both
widgets      sliders over formulas and measurements
live         the stepper: a function walked line by line
figures      how the course looks, and the pictures of images/    python -m lecture_util figures
corrections  claims we correct, each with its cell (claims)       python -m lecture_util corrections
present      a notebook as slides                                 python -m lecture_util present
rehearse     before class: every cell timed, every slide measured python -m lecture_util rehearse
deck         the real deck in a browser without a window
doctor       what this machine can do                             python -m lecture_util doctor

Names are handed on lazily: importing this package loads nothing.
"""

from importlib import import_module
from sys import modules
from types import ModuleType

PUBLIC = {
    "check": "exercise",
    "hint": "exercise",
    "status": "exercise",
    "predict": "predict",
    "explore": "widgets",
    "use_style": "figures",
    "FIGURES": "figures",
    "step": "live",
}
__all__ = list(PUBLIC)


def __getattr__(name: str):
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})


class _Package(ModuleType):
    """Importing the module `predict` would put it over the function that it hands on."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and PUBLIC.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


modules[__name__].__class__ = _Package
