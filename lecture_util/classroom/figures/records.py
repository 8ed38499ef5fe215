"""Figures of recorded runs: drawn once the record holds what they need, described from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lecture_util.classroom.figures.registry import figure
from lecture_util.classroom.figures.small_caches import recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

Draw = Callable[[], Figure] if TYPE_CHECKING else Any


def recorded_figure(
    record: str, needs: Sequence[str], alt: Callable[[dict], str], **about: Any
) -> Callable[[Draw], Draw]:
    """Register as `figure` does, if benchmarks/results/<record>.json holds all that is needed.

    needs: paths in the record, "section/entry"; an entry of a list goes by its "name".
    alt:   the words, given the record, so that their numbers are the record's.

    A script that writes entry by entry leaves a figure out until the last one it needs is there;
    `make figures` then draws it.
    """

    def register(draw: Draw) -> Draw:
        if has(record, needs):
            figure(alt=alt(recorded(record)), **about)(draw)
        return draw

    return register


def has(record: str, needs: Sequence[str]) -> bool:
    """Is the record there, with every path of `needs` in it?"""
    try:
        run = recorded(record)
    except FileNotFoundError:
        return False
    for path in needs:
        part: Any = run
        for key in path.split("/"):
            if isinstance(part, list):
                part = {entry["name"]: entry for entry in part}
            if not isinstance(part, dict) or key not in part:
                return False
            part = part[key]
    return True
