"""two_symbol_explorer (notebook 08): kept and rejected, residual, and their sum, which is p."""

from __future__ import annotations

import ipywidgets as widgets
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.speculative.expected import two_symbols
from lecture_util.speculative.verify import agreement, residual

SIZE = (11.2, 3.9)  # as wide as a slide
SYMBOLS = "AB"
WIDE = 0.62  # of a bar
KEPT, REJECTED, REDRAWN = "kept", "rejected", "drawn from the residual"
LOOKS = {
    KEPT: {"fc": style.tint(style.GUESS, 0.6), "ec": style.GUESS},
    REJECTED: {"fc": "white", "ec": style.MEASURED, "hatch": "////"},
    REDRAWN: {"fc": style.tint(style.MEASURED, 0.55), "ec": style.MEASURED, "hatch": "..."},
}


class TwoSymbols:
    """Three pairs of bars: what the draft says, what replaces the rejected, what comes out."""

    def __init__(self) -> None:
        self.canvas = Canvas(SIZE)
        with self.canvas.still() as fig:
            self.canvas.moving = self._panels(fig)

    def __call__(self, p_A: float, q_A: float) -> tuple[bytes, str]:
        p_V, q_V = (torch.tensor([a, 1 - a], dtype=torch.float64) for a in (p_A, q_A))
        alpha = float(agreement(p_V, q_V))
        kept_V, left_V = torch.minimum(p_V, q_V), residual(p_V, q_V)
        rejected_V = q_V - kept_V
        again_V = float(rejected_V.sum()) * left_V
        heights = [(KEPT, 0, kept_V, 0 * kept_V), (REJECTED, 0, rejected_V, kept_V),
                   (REDRAWN, 1, again_V, 0 * kept_V), (KEPT, 2, kept_V, 0 * kept_V),
                   (REDRAWN, 2, again_V, kept_V)]  # fmt: skip
        for name, panel, tall_V, from_V in heights:
            for place in range(2):
                bar = self.bars[name, panel][place]
                bar.set(y=float(from_V[place]), height=float(tall_V[place]),
                        visible=bool(tall_V[place] > 0))  # fmt: skip
                label = self.labels[name, panel][place]
                label.set_y(float(from_V[place] + tall_V[place] / 2))
                label.set_text(f"{float(tall_V[place]):.2f}" if tall_V[place] >= 0.055 else "")
        for panel, target_V in ((0, q_V), (2, p_V)):
            for line, height in zip(self.outlines[panel], target_V.tolist(), strict=True):
                line.set_ydata([height, height])
        return self.canvas.png(), _words(p_A, q_A, alpha, left_V.tolist())

    def _panels(self, fig: Figure) -> list[Artist]:
        titles = ("the draft draws from q", "rejected: drawn anew", "what comes out: p again")
        self.bars, self.labels, self.outlines = {}, {}, {}
        for panel, title in enumerate(titles):
            ax = fig.add_axes((0.06 + 0.325 * panel, 0.2, 0.25, 0.64))
            ax.set(xlim=(-0.6, 1.6), ylim=(0, 1.02), yticks=[0, 0.5, 1])
            ax.set_xticks([0, 1], SYMBOLS, fontsize=15, weight="bold")
            ax.tick_params(axis="x", length=0)
            ax.set_title(title, fontsize=14.5, pad=8)
            if panel:
                fig.text(0.06 + 0.325 * panel - 0.05, 0.5, "+="[panel - 1], size=26,
                         ha="center", va="center", weight="bold")  # fmt: skip
            self._bars(ax, panel)
        swatches = [Rectangle((0, 0), 1, 1, label=name, **look) for name, look in LOOKS.items()]
        fig.legend(handles=[*swatches, self.outlines[2][0]], loc="lower center", ncols=4,
                   fontsize=13, bbox_to_anchor=(0.5, -0.01))  # fmt: skip
        parts = (*self.bars.values(), *self.labels.values(), *self.outlines.values())
        return [one for pair in parts for one in pair]

    def _bars(self, ax: Axes, panel: int) -> None:
        for name in ((KEPT, REJECTED), (REDRAWN,), (KEPT, REDRAWN))[panel]:
            self.bars[name, panel] = [
                ax.add_patch(Rectangle((x - WIDE / 2, 0), WIDE, 0, lw=1.4, **LOOKS[name]))
                for x in range(2)
            ]
            self.labels[name, panel] = [
                ax.text(x, 0, "", ha="center", va="center", size=14, path_effects=style.HALO)
                for x in range(2)
            ]
        if panel != 1:
            self.outlines[panel] = [
                ax.plot([x - 0.45, x + 0.45], [0, 0], "--" if panel else "-", lw=2.8,
                        color=style.INK, label="p, the target's")[0]
                for x in range(2)
            ]  # fmt: skip


def _words(p_A: float, q_A: float, alpha: float, left: list[float]) -> str:
    out = dict(zip(SYMBOLS, two_symbols(p_A, q_A), strict=True))
    rows = zip(SYMBOLS, (p_A, 1 - p_A), (q_A, 1 - q_A), strict=True)
    keeps = {name: min(1.0, p / q) if q > 0 else None for name, p, q in rows}
    kept = ", ".join(f"{name} {'never drawn' if k is None else f'{k:.0%}'}"
                     for name, k in keeps.items())  # fmt: skip
    rest = "nothing is rejected" if alpha > 1 - 1e-12 else (
        f"residual A {left[0]:.0%}, B {left[1]:.0%}"
    )  # fmt: skip
    return (
        f"A guess is kept with probability min(1, p/q): {kept}; <b>acceptance rate α = Σ min(p, q) "
        f"= {alpha:.2f}</b>; {rest}.<br>Together P(A) = <b>{out['A']:.2f}</b>, P(B) = "
        f"<b>{out['B']:.2f}</b>; the target wants {p_A:.2f} and {1 - p_A:.2f}, "
        f"the draft said {q_A:.2f} and {1 - q_A:.2f}."
    )


def two_symbol_explorer(p_A: float = 0.6, q_A: float = 0.9) -> Explorer:
    """The proof for a vocabulary of A and B, as its two probabilities move (notebook 08).

    p_A, q_A: how likely A is to the target and to the draft, at first.

    Raises: ValueError for what is no probability.
    """
    controls = {}
    for name, value in {"p_A": p_A, "q_A": q_A}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name} is {value!r}: expected a probability, 0 to 1")
        who = {"p": "target", "q": "draft"}[name[0]]
        controls[name] = widgets.FloatSlider(
            description=f"{who} {name[0]}(A)", min=0, max=1, step=0.01, value=value
        )
    return Explorer(TwoSymbols(), controls, columns=2)
