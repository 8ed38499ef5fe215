"""A picture that follows a slider: what stands still is drawn once, what moves is drawn over it.

Axes, ticks and text cost most of a redraw and rarely change. So they are kept as pixels, and a move
costs a copy of these, a few artists, and the PNG.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from lecture_util.classroom.figures import style

SIZE = (9.6, 4.0)  # inches; at 100 dpi as high as a slide shows a picture, so never rescaled


class Canvas:
    """A figure whose `moving` artists are drawn over a kept background.

    `still_draws` counts how often the background had to be drawn.
    """

    def __init__(self, size: tuple[float, float] = SIZE) -> None:
        self.size = size
        self.moving: list[Artist] = []
        self.still_draws = 0

    @contextlib.contextmanager
    def still(self) -> Iterator[Figure]:
        """Draw what stands still, on an empty figure; put what moves into `moving`."""
        self.moving = []
        with matplotlib.rc_context(style.STYLE | {"figure.constrained_layout.use": False}):
            fig = Figure(figsize=self.size, dpi=100)
            self._agg = FigureCanvasAgg(fig)
            yield fig
            for artist in self.moving:
                artist.set_animated(True)  # left out of what follows
            self._agg.draw()
        self._kept = self._agg.copy_from_bbox(fig.bbox)
        self.still_draws += 1

    def png(self) -> bytes:
        """The picture with the artists where they are now."""
        self._agg.restore_region(self._kept)
        for artist in self.moving:
            self._agg.figure.draw_artist(artist)
        pixels = np.asarray(self._agg.buffer_rgba())[..., :3]
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "png", compress_level=1)
        return buffer.getvalue()
