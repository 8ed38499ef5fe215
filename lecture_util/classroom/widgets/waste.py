"""waste_explorer (notebook 10): memory lent and not used, in pages and in contiguous rows."""

from __future__ import annotations

from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.serving.trace import Lengths

SIZE = (11.2, 3.7)  # as wide as a slide
PAGES = tuple(2**k for k in range(10))
MEDIANS = (16, 32, 64, 128, 256, 512)
LONGEST = (512, 1024, 2048, 4096)
STORED, RESERVED, UNUSED = "stored", "reserved for later tokens", "never used"
LOOKS = {
    STORED: {"fc": style.tint(style.CACHE, 0.75), "ec": style.CACHE},
    RESERVED: {"fc": "white", "ec": style.PREDICTED, "hatch": "..."},
    UNUSED: {"fc": "white", "ec": style.MEASURED, "hatch": "////"},
}
BARS = ("contiguous", "pages")


@dataclass(frozen=True)
class Waste:
    """Shares of the memory lent, summed over all forwards of all texts.

    stored: tokens a text in memory has on average.   counted, predicted: by page size.
    contiguous: stored, reserved for later tokens of the text, never used.
    lent: by page size, tokens that a text's pages have room for on average.
    """

    stored: float
    counted: dict[int, float]
    predicted: dict[int, float]
    lent: dict[int, float]
    contiguous: tuple[float, float, float]


def count_waste(
    median: int, spread: float, longest: int, requests: int, seed: int, pages: tuple[int, ...]
) -> Waste:
    """Texts that grow by a token a forward, from their prompt to their end, and what they hold.

    Who runs beside whom does not matter: each text holds the same pages whenever it runs.
    predicted: a last page is as often full to any slot, so (P - 1)/2 slots of it are empty.
    """
    rng = np.random.default_rng(seed)
    prompts = Lengths(median, spread, most=longest // 2).draw(rng, requests)
    news = Lengths(median, spread, most=longest // 2).draw(rng, requests)
    ends = [p + n - 1 for p, n in zip(prompts, news, strict=True)]  # the last token never enters
    held = np.concatenate([np.arange(p, e + 1) for p, e in zip(prompts, ends, strict=True)])
    final = np.repeat(ends, news)
    stored = float(held.mean())
    lent = {P: float((-(-held // P) * P).mean()) for P in pages}
    return Waste(
        stored,
        counted={P: 1 - stored / lent[P] for P in pages},
        predicted={P: (P - 1) / 2 / (stored + (P - 1) / 2) for P in pages},
        lent=lent,
        contiguous=(
            stored / longest,
            float((final - held).mean()) / longest,
            float((longest - final).mean()) / longest,
        ),
    )


class WastePicture:
    """Left, what is lent and what of it is used; right, the waste over the size of a page."""

    def __init__(self, pages: tuple[int, ...]) -> None:
        self.pages = pages
        self.canvas = Canvas(SIZE)
        with self.canvas.still() as fig:
            self.canvas.moving = [*self._shares(fig), *self._curve(fig)]

    def __call__(self, waste: Waste, page_size: int) -> bytes:
        counted = waste.counted[page_size]
        shares = {
            "contiguous": dict(zip(LOOKS, waste.contiguous, strict=True)),
            "pages": {STORED: 1 - counted, RESERVED: 0.0, UNUSED: counted},
        }
        for name, parts in shares.items():
            left = 0.0
            for kind, share in parts.items():
                self.bars[name, kind].set(x=left, width=share, visible=share > 0)
                label = self.labels[name, kind]
                label.set_x(left + share / 2)
                label.set_text(f"{share:.0%}" if share >= 0.07 else "")
                left += share
        self.predicted.set_data(self.pages, [100 * waste.predicted[P] for P in self.pages])
        self.counted.set_data(self.pages, [100 * waste.counted[P] for P in self.pages])
        self.here.set_data([page_size], [100 * counted])
        self.row.set_ydata([100 * (1 - waste.contiguous[0])] * 2)
        return self.canvas.png()

    def _shares(self, fig: Figure) -> list[Artist]:
        ax = fig.add_axes((0.1, 0.3, 0.4, 0.56))
        ax.set(xlim=(0, 1), ylim=(-0.6, 1.6))
        ax.set_yticks([1, 0], BARS, fontsize=14)
        ax.set_xticks([0, 0.5, 1], ["0", "50%", "100%"])
        ax.tick_params(axis="y", length=0)
        ax.grid(False)
        ax.set_title("of the memory lent", fontsize=14.5, pad=8)
        self.bars, self.labels = {}, {}
        for y, name in zip((1, 0), BARS, strict=True):
            for kind, look in LOOKS.items():
                patch = Rectangle((0, y - 0.36), 0, 0.72, lw=1.4, **look)
                self.bars[name, kind] = ax.add_patch(patch)
                self.labels[name, kind] = ax.text(
                    0, y, "", ha="center", va="center", size=14, path_effects=style.HALO
                )
        swatches = [Rectangle((0, 0), 1, 1, label=name, **look) for name, look in LOOKS.items()]
        fig.legend(handles=swatches, loc="lower left", ncols=3, fontsize=12,
                   bbox_to_anchor=(0.02, -0.01), columnspacing=1.2)  # fmt: skip
        return [*self.bars.values(), *self.labels.values()]

    def _curve(self, fig: Figure) -> list[Artist]:
        ax = fig.add_axes((0.6, 0.3, 0.385, 0.56))
        ax.set_xscale("log", base=2)
        ax.set(xlim=(0.8, 1.25 * max(self.pages)), ylim=(0, 100))
        ax.set_xticks(self.pages, [str(P) for P in self.pages])
        ax.set_yticks([0, 25, 50, 75, 100], ["0", "25%", "50%", "75%", "100%"])
        ax.set_xlabel("tokens in a page", labelpad=2)
        ax.set_title("wasted, by size of a page", fontsize=14.5, pad=8)
        self.row = ax.axhline(0, color=style.INK, lw=1.8, ls="-.", label="contiguous")
        (self.predicted,) = ax.plot([], [], "--", color=style.PREDICTED, lw=2.4,
                                    label="(P – 1)/2 a text")  # fmt: skip
        (self.counted,) = ax.plot([], [], "o", color=style.MEASURED, ms=7, label="counted")
        (self.here,) = ax.plot([], [], "o", mfc="none", mec=style.INK, mew=2.2, ms=15)
        fig.legend(handles=[self.row, self.predicted, self.counted], loc="lower right", ncols=3,
                   fontsize=12, bbox_to_anchor=(0.995, -0.01), columnspacing=1.2)  # fmt: skip
        return [self.row, self.predicted, self.counted, self.here]


class WasteExplorer(Explorer):
    """The explorer; `waste` is what is shown."""

    def __init__(self, values: dict[str, float], requests: int, seed: int) -> None:
        self.requests, self.seed = requests, seed
        self._offered = {
            name: sorted({*usual, values[name]})
            for name, usual in (("page_size", PAGES), ("median", MEDIANS), ("longest", LONGEST))
        }
        self._picture = WastePicture(tuple(self._offered["page_size"]))
        self._kept: tuple[tuple, Waste] | None = None
        controls = {
            "page_size": self._slider("page size, tokens", "page_size", values),
            "median": self._slider("median length", "median", values),
            "spread": widgets.FloatSlider(
                description="spread of lengths", min=0, max=2, step=0.1, value=values["spread"]
            ),
            "longest": self._slider("longest allowed", "longest", values),
        }
        super().__init__(self._draw, controls, columns=2)

    @property
    def waste(self) -> Waste:
        return self._kept[1]

    def _slider(self, description: str, name: str, values: dict) -> widgets.SelectionSlider:
        options = [(f"{n:,}", n) for n in self._offered[name]]
        return widgets.SelectionSlider(description=description, options=options, value=values[name])

    def _draw(self, page_size: int, median: int, spread: float, longest: int) -> tuple[bytes, str]:
        lengths = (median, spread, longest, self.requests, self.seed)
        if self._kept is None or self._kept[0] != lengths:
            self._kept = lengths, count_waste(*lengths, tuple(self._offered["page_size"]))
        waste = self.waste
        more = longest / waste.lent[page_size]
        text = (
            f"A text in memory has {waste.stored:.0f} tokens on average, and a last page with "
            f"{(page_size - 1) / 2:g} empty slots: predicted waste "
            f"<b>{waste.predicted[page_size]:.1%}</b>, counted <b>{waste.counted[page_size]:.1%}"
            f"</b>.<br>A row of {longest:,} wastes <b>{1 - waste.contiguous[0]:.0%}</b>: in the "
            f"same memory, pages hold <b>{more:.1f} times</b> as many texts."
        )
        return self._picture(waste, page_size), text


def waste_explorer(
    page_size: int = 16,
    *,
    median: int = 128,
    spread: float = 1.0,
    longest: int = 2048,
    requests: int = 400,
    seed: int = 0,
) -> WasteExplorer:
    """Waste of pages and of contiguous rows, predicted and counted (notebook 10).

    page_size:      tokens in a page, 1 to 512.
    median, spread: of prompts and of answers, as in `Lengths`; each at most half of `longest`.
    longest:        tokens that a contiguous row has room for.

    Raises: ValueError naming what came.
    """
    for name, value, least, most in (
        ("page_size", page_size, 1, 512), ("longest", longest, 2, 16384),
        ("median", median, 1, longest), ("requests", requests, 1, 2000), ("seed", seed, 0, 2**32),
    ):  # fmt: skip
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}: expected a whole number, {least} to {most}")
    number = isinstance(spread, int | float) and not isinstance(spread, bool)
    if not number or not 0 <= spread <= 2:
        raise ValueError(f"spread is {spread!r}: expected 0 to 2")
    values = {"page_size": page_size, "median": median, "spread": spread, "longest": longest}
    return WasteExplorer(values, requests, seed)
