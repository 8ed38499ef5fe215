"""slerp_against_lerp (notebook 11): along the arc or along the chord, and when it matters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ipywidgets as widgets

from lecture_util.classroom.widgets.arcs import LONGEST, Arc, ArcPicture, arc_between
from lecture_util.classroom.widgets.explore import Explorer

DEGREES = tuple(range(0, 181, 3))
RATIOS = tuple(i / 20 for i in range(int(20 * LONGEST) + 1))
PRESETS = {
    "right angle": (90.0, 1.0),
    "parallel": (0.0, 1.0),
    "opposite": (180.0, 1.0),
    "zero vector": (90.0, 0.0),
}
REAL = "two real fine-tunes"


class SlerpExplorer(Explorer):
    """The explorer; `shown` is the Arc in the picture. `presets` maps a button to its settings."""

    def __init__(
        self, degrees: float, ratio: float, t: float, real: tuple[float, float] | None
    ) -> None:
        self.shown: Arc | None = None
        self.presets = PRESETS | ({REAL: real} if real else {})
        self._picture = ArcPicture()
        offered = [(degrees, ratio), *self.presets.values()]
        controls = {
            "degrees": _slider("angle", DEGREES, [d for d, _ in offered], degrees, "°"),
            "ratio": _slider("|v1| / |v0|", RATIOS, [r for _, r in offered], ratio),
            "t": widgets.FloatSlider(description="t", min=0, max=1, step=0.05, value=t),
        }
        self.buttons = {name: self._button(name) for name in self.presets}
        bar = widgets.HBox(list(self.buttons.values()))
        super().__init__(self._draw, controls, [bar], columns=3)

    def preset(self, name: str) -> None:
        """Set angle and ratio as the button of that name does."""
        if name not in self.presets:
            raise ValueError(f"preset {name!r}: expected one of {', '.join(self.presets)}")
        with self.quiet():
            self.controls["degrees"].value, self.controls["ratio"].value = self.presets[name]
        self.redraw()

    def _button(self, name: str) -> widgets.Button:
        degrees, ratio = self.presets[name]
        button = widgets.Button(
            description=name,
            tooltip=f"{name}: {degrees:.6g} degrees, v1 is {ratio:.6g} times as long as v0",
            layout=widgets.Layout(width=f"{0.62 * len(name) + 2:.1f}em"),
        )
        button.on_click(lambda _button: self.preset(name))
        return button

    def _draw(self, degrees: float, ratio: float, t: float) -> tuple[bytes, str]:
        self.shown = arc_between(degrees, ratio, t)
        return self._picture(self.shown), _words(self.shown, ratio)


def _words(arc: Arc, ratio: float) -> str:
    between = "none: zero has no direction" if arc.degrees is None else f"{arc.degrees:.4g}°"
    numbers = (
        f"angle <b>{between}</b>, at t = {arc.t:g}: |slerp| <b>{arc.slerp:.4f}</b>, "
        f"|lerp| <b>{arc.lerp:.4f}</b>, |slerp – lerp| / |slerp| <b>{_percent(arc.difference)}</b>"
    )
    return f"{numbers}<br>{_why(arc, ratio)}"


def _why(arc: Arc, ratio: float) -> str:
    if arc.degrees is None:
        return "A zero vector points nowhere, so there is no angle to divide: SLERP goes straight."
    if arc.straight and arc.degrees > 90:
        return (
            "Opposite: half circles on every side, and <b>no arc is special</b>. SLERP goes "
            "straight, through 0."
        )
    if arc.straight:
        return "Parallel vectors: there is no arc between them, and SLERP goes straight."
    if arc.degrees < 5:
        return "So close together that arc and chord lie on each other, and so do their lengths."
    if ratio == 1:
        middle = math.cos(math.radians(arc.degrees) / 2)
        return (
            "Both ends have length 1. The arc keeps it; the chord is shortest halfway: "
            f"cos(angle / 2) = <b>{middle:.4g}</b>."
        )
    return (
        f"The arc leads from length 1 to length {ratio:.6g}: lengths are kept only where both ends "
        "are equally long."
    )


def _percent(share: float) -> str:
    """A share as a percentage that does not round to nothing."""
    percent = 100 * share
    return f"{percent:.2f}%" if percent >= 0.1 else f"{percent:.2g}%"


def _slider(
    description: str, usual: Sequence[float], more: Sequence[float], value: float, unit: str = ""
) -> widgets.SelectionSlider:
    options = sorted({*map(float, usual), *map(float, more)})
    labelled = [(f"{option:.6g}{unit}", option) for option in options]
    return widgets.SelectionSlider(description=description, options=labelled, value=float(value))


def slerp_against_lerp(
    t: float = 0.5,
    *,
    degrees: float = 90.0,
    ratio: float = 1.0,
    fine_tunes: float | tuple[float, float] | None = None,
) -> SlerpExplorer:
    """SLERP and LERP between two vectors of the plane, and their lengths on the way (notebook 11).

    degrees, ratio: the angle between v0 and v1, 0 to 180, and |v1| / |v0|, 0 to 1.5.
    fine_tunes: the angle in degrees between two models as measured, or (angle, ratio of lengths);
                adds the button "two real fine-tunes".

    Raises: ValueError naming what came.
    """
    _between("t", t, 1)
    real = None
    if fine_tunes is not None:
        pair = fine_tunes if isinstance(fine_tunes, Sequence) else (fine_tunes, 1.0)
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"fine_tunes is {fine_tunes!r}: expected degrees, or (degrees, ratio)")
        real = float(pair[0]), float(pair[1])
        _between("the angle of fine_tunes", pair[0], 180)
        _between("the ratio of fine_tunes", pair[1], LONGEST)
    _between("degrees", degrees, 180)
    _between("ratio", ratio, LONGEST)
    return SlerpExplorer(float(degrees), float(ratio), float(t), real)


def _between(name: str, value: float, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r}: expected 0 to {most:g}")
