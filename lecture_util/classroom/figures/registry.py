"""The list of the course's still pictures: what each shows, answers, and draws its numbers from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class StillFigure:
    """One picture: the function that draws it and what a reader must know about it.

    name      file name, `images/<name>.svg`       answers   pictures of the lecture it replaces
    notebook  where it is shown, "01"              alt       what it says to who cannot see it
    sources   where its numbers come from          title     its claim
    """

    name: str
    title: str
    answers: tuple[str, ...]
    notebook: str
    alt: str
    sources: tuple[str, ...]
    draw: Callable[[], Figure]

    @property
    def markdown(self) -> str:
        """The line that shows it in a notebook."""
        return f"![{self.alt}](../images/{self.name}.svg)"


FIGURES: dict[str, StillFigure] = {}


def figure(
    name: str, title: str, answers: Sequence[str], notebook: str, alt: str, sources: Sequence[str]
) -> Callable[[Callable[[], Figure]], Callable[[], Figure]]:
    """Register the decorated function, which returns a matplotlib Figure, under `name`."""

    def register(draw: Callable[[], Figure]) -> Callable[[], Figure]:
        if name in FIGURES and FIGURES[name].draw.__module__ != draw.__module__:
            raise ValueError(f"two figures are named {name!r}: rename one, it names the file")
        FIGURES[name] = StillFigure(
            name, title, tuple(answers), notebook, alt, tuple(sources), draw
        )
        return draw

    return register
