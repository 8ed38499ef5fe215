"""Buttons and arrow keys that move a slider one step, and a picture in HTML that they move."""

from __future__ import annotations

from pathlib import Path

import anywidget
import ipywidgets as widgets
from traitlets import Int, Unicode


class Keys(anywidget.AnyWidget):
    """Invisible: arrow keys on what has the class `stepped` in this box count `moves` up or down.

    What is shown there can be scrolled, and is scrolled to its part with `data-now`.
    """

    _esm = Path(__file__).with_name("stepping.js")
    moves = Int(0).tag(sync=True)
    label = Unicode().tag(sync=True)

    def __init__(self, label: str) -> None:
        super().__init__(label=label, layout=widgets.Layout(display="none"))


class Steps:
    """Ways to move `slider`: two buttons, play, and the arrow keys on buttons and picture.

    picture: the HTML widget that shows a step. `parts` go below the controls of an Explorer.
    """

    def __init__(self, slider: widgets.IntSlider, label: str, interval: int = 900) -> None:
        self.slider = slider
        self.picture = widgets.HTML(layout=widgets.Layout(width="100%"))
        self.picture.add_class("stepped")
        self.buttons = [
            self._button("◀ back", "one step back", -1),
            self._button("next ▶", "one step on", 1),
        ]
        self.play = widgets.Play(
            min=slider.min, max=slider.max, value=slider.value, interval=interval, show_repeat=False
        )
        widgets.jslink((self.play, "value"), (slider, "value"))
        self.keys = Keys(f"{label}: arrow keys step")
        self.keys.observe(lambda change: self.move(change["new"] - change["old"]), names="moves")
        bar = widgets.HBox([*self.buttons, self.play])
        self.parts = [bar, self.picture, self.keys]

    def _button(self, description: str, tooltip: str, by: int) -> widgets.Button:
        button = widgets.Button(
            description=description, tooltip=tooltip, layout=widgets.Layout(width="7em")
        )
        button.add_class("stepped")
        button.on_click(lambda _button: self.move(by))
        return button

    def move(self, by: int) -> None:
        """So many steps on, or back; it ends at the ends."""
        self.slider.value = min(self.slider.max, max(self.slider.min, self.slider.value + by))

    def reach(self, last: int, value: int) -> None:
        """Another number of steps, and where to stand."""
        for one in (self.slider, self.play):
            one.max = last
            one.value = value
