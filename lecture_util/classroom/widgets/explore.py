"""`explore(draw, **controls)`: sliders above a picture and a text that follow them.

The picture lives in an Image and the text in an HTML widget, never in an Output: what an Output
captures is written into a cell, and a slide deck that moves cells about loses it.
"""

from __future__ import annotations

import contextlib
import html
import io
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
from ipywidgets.widgets.interaction import interactive
from matplotlib.figure import Figure
from traitlets import Unicode

from lecture_util.classroom.widgets.names import Names

Drawn = Figure | str | bytes | tuple[Figure | bytes, str]  # bytes: a PNG


class Picture(widgets.Image):
    """An Image whose tooltip gives a screen reader its words.

    The front end sets a tooltip only on what has an empty description, which Image lacks.
    """

    description = Unicode("").tag(sync=True)


class Explorer(widgets.VBox):
    """Controls, text and picture of one `draw` function. `controls` maps name to widget.

    below: widgets after the controls; columns: how many controls stand in a row, where there is
    room for so many. `redraw_s` is how long the last redraw took.
    """

    def __init__(
        self,
        draw: Callable[..., Drawn],
        controls: dict[str, widgets.Widget],
        below: Sequence[widgets.Widget] = (),
        columns: int = 1,
    ) -> None:
        self.draw, self.controls, self.redraw_s = draw, controls, 0.0
        self.text = widgets.HTML()
        self.image = Picture(format="png", layout=widgets.Layout(max_width="100%"))
        _align(list(controls.values()))
        for control in controls.values():
            control.observe(self.redraw, names="value")
        every = list(controls.values())
        rows = [*(every if columns == 1 else [_side_by_side(every, columns)]), *below]
        box = widgets.VBox(rows, layout=widgets.Layout(width="100%"))
        super().__init__([box, self.text, self.image, Names()])
        self.redraw()

    def __repr__(self) -> str:
        names = ", ".join(self.controls)
        return f"Explorer of {names}: open the notebook in JupyterLab to move them"[:105]

    @property
    def values(self) -> dict[str, Any]:
        """What the controls say now."""
        return {name: control.value for name, control in self.controls.items()}

    def redraw(self, _change: object = None) -> None:
        """Call `draw` with the controls' values and show what it returns.

        The front end holds back a slider's moves while the kernel is busy and then sends the
        latest, so that no queue builds up behind a slow picture.
        """
        before, start = set(plt.get_fignums()), time.perf_counter()
        try:
            text, png = _split(self.draw(**self.values))
        except Exception as error:  # whatever a reader's draw raises is shown, not lost
            text, png = _error(error), b""
        finally:
            for leftover in set(plt.get_fignums()) - before:
                plt.close(leftover)
        self.say(text)
        self.image.value = png
        self.image.layout.display = "" if png else "none"
        self.image.tooltip = _plain(text)
        self.redraw_s = time.perf_counter() - start

    def say(self, text: str) -> None:
        """Put HTML where the text stands, and leave the picture."""
        self.text.value = f'<div role="status" style="font-size:1.15em">{text}</div>'
        self.text.layout.display = "" if text else "none"

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Set several controls without a redraw for each."""
        for control in self.controls.values():
            control.unobserve(self.redraw, names="value")
        try:
            yield
        finally:
            for control in self.controls.values():
                control.observe(self.redraw, names="value")


def explore(draw: Callable[..., Drawn], **controls: Any) -> Explorer:
    """Show `draw(**values)` again whenever a control moves.

    A control is an ipywidget or short for one: (low, high, step) or a list of numbers is a
    slider, a list or dict of choices a menu, a bool a tick box. `draw` returns a Figure, text
    (HTML; **bold**, `code` and line ends work too), or both as a tuple.

    Example: `explore(lambda B: f"intensity **{B}**", B=[1, 2, 4, 8])`
    Raises:  ValueError naming the control that is none of these; TypeError if draw is no function.
    """
    if not callable(draw):
        raise TypeError(f"draw={draw!r} is not a function: pass one that returns a Figure or text")
    return Explorer(draw, {name: _control(name, short) for name, short in controls.items()})


def _control(name: str, short: Any) -> widgets.Widget:
    if isinstance(short, list | dict | tuple) and not short:
        raise ValueError(f"control {name}={short!r} offers nothing: list at least one choice")
    numbers = isinstance(short, list) and all(
        isinstance(item, int | float) and not isinstance(item, bool) for item in short
    )
    if numbers and any(map(math.isnan, short)):
        raise ValueError(f"control {name}={short!r} holds nan: list numbers only")
    if numbers:
        control = widgets.SelectionSlider(
            options=[(f"{item:,}", item) for item in short], continuous_update=True
        )
    else:
        try:
            control = interactive.widget_from_abbrev(short)
        except (TypeError, ValueError) as error:
            raise ValueError(f"control {name}={short!r}: {error}") from error
    if control is None or not hasattr(control, "value"):
        raise ValueError(
            f"control {name}={short!r} is neither a widget nor short for one: "
            "pass (low, high, step), a list, a dict or a bool"
        )
    if not control.description:
        control.description = name.replace("_", " ")
    return control


def _align(controls: list[widgets.Widget]) -> None:
    """Give every description the room of the longest, so that none is cut off."""
    room = max((len(control.description) for control in controls), default=0)
    for control in controls:
        if hasattr(control.style, "description_width"):
            control.style.description_width = f"{0.62 * room + 1.5:.1f}em"
        control.layout.width = "min(100% - 8px, 36em)"


def _side_by_side(controls: list[widgets.Widget], columns: int) -> widgets.Widget:
    """The controls side by side, in fewer columns on a narrow page."""
    narrowest = f"max(19em, {100 // columns - 4}%)"
    return widgets.GridBox(
        controls,
        layout=widgets.Layout(
            width="100%", grid_template_columns=f"repeat(auto-fit, minmax({narrowest}, 1fr))"
        ),
    )


def _split(drawn: Drawn) -> tuple[str, bytes]:
    parts = drawn if isinstance(drawn, tuple) else (drawn,)
    text, png = "", b""
    for part in parts:
        if isinstance(part, Figure):
            png = png_of(part)
        elif isinstance(part, bytes):
            png = part
        elif isinstance(part, str):
            text = _as_html(part)
        elif part is not None:
            raise TypeError(
                f"draw returned a {type(part).__name__}: return a Figure, text, or both as a tuple"
            )
    return text, png


def png_of(fig: Figure) -> bytes:
    """The figure as PNG bytes, always of one size, so that the page stands still. Closes it."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", bbox_inches=None)
    plt.close(fig)
    return buffer.getvalue()


def _as_html(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text.strip())
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
    return text if "<table" in text else text.replace("\n", "<br>")


def _plain(text: str) -> str:
    """HTML as words, for a tooltip."""
    words = html.unescape(re.sub(r"<[^>]+>", " ", text)).split()
    return re.sub(r" ([,.:;])", r"\1", " ".join(words))


def _error(error: Exception) -> str:
    message = html.escape(f"{type(error).__name__}: {error}")
    return f'<span style="color:#B00020"><b>{message}</b></span>'
