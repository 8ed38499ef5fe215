"""Accuracy on each task as bars, and the mean loss of the merges tried so far as a curve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.classroom.widgets.merges import Bench, Point, mean

SIZE = (11.2, 3.15)  # as wide as a slide
BASE = {"fc": style.tint(style.MUTED, 0.25), "ec": style.MUTED, "hatch": "///"}
MERGED = {"fc": style.tint(style.MEASURED, 0.75), "ec": style.MEASURED}
TUNED = {"fc": "white", "ec": style.INK}
AXES = {"density": (0.0, 1.04), "scale": (0.0, 2.05)}
ROOM = 1.25  # of the loss axis: times the base's loss


class DensityPicture:
    """`draw(...)` gives the PNG; the axes are drawn anew where `over` changes."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.canvas = Canvas(SIZE)
        self.over = ""

    def draw(self, shown: Point | None, past: Sequence[Point], curve: Sequence[Point],
             over: str) -> bytes:  # fmt: skip
        """shown: the merge in question, None for none; curve: those that lie on one line with it.

        over: what lies on the axis of the losses, "density" or "scale".
        """
        if over != self.over:
            self.over = over
            with self.canvas.still() as fig:
                self.canvas.moving = [*self._bars(fig), *self._losses(fig)]
        for task, bar, label in zip(self.bench.tasks, self.bars, self.labels, strict=True):
            accuracy = shown.scores[task].accuracy if shown else 0.0
            bar.set(height=accuracy, visible=shown is not None)
            label.set_y(accuracy + 0.015)
            label.set_text(f"{accuracy:.2f}" if shown else "")
        self.others.set_data(*self._places([p for p in past if p not in curve]))
        self.line.set_data(*self._places(curve))
        self.here.set_data(*self._places([shown] if shown else []))
        return self.canvas.png()

    def _places(self, points: Sequence[Point]) -> tuple[list[float], list[float]]:
        """Where points lie; those beyond the axis lie on its edge."""
        known = [p for p in points if getattr(p.setting, self.over) is not None]
        x = [getattr(point.setting, self.over) for point in known]
        return x, [min(point.loss, self.top) for point in known]

    def _bars(self, fig: Figure) -> list[Artist]:
        ax = fig.add_axes((0.055, 0.2, 0.47, 0.66))
        bench, best = self.bench, self.bench.best
        ax.set(xlim=(-0.5, len(bench.tasks) - 0.5), ylim=(0, 1.12))
        ax.set_yticks([0, 0.5, 1])
        ax.set_xticks(range(len(bench.tasks)), bench.tasks, fontsize=13)
        ax.tick_params(axis="x", length=0)
        ax.grid(False, axis="x")
        ax.set_title("accuracy by task", fontsize=14.5, pad=8)
        self.bars, self.labels = [], []
        for i, task in enumerate(bench.tasks):
            for x, height, look in (
                (i - 0.41, bench.base[task].accuracy, BASE), (i + 0.2, best[task].accuracy, TUNED)
            ):  # fmt: skip
                ax.add_patch(Rectangle((x, 0), 0.21, height, lw=1.4, **look))
            self.bars.append(ax.add_patch(Rectangle((i - 0.15, 0), 0.3, 0, lw=1.4, **MERGED)))
            self.labels.append(
                ax.text(i, 0, "", ha="center", va="bottom", size=12, path_effects=style.HALO)
            )
        names = ("base", BASE), ("merged", MERGED), ("best fine-tune on it", TUNED)
        swatches = [Rectangle((0, 0), 1, 1, label=name, **look) for name, look in names]
        fig.legend(handles=swatches, loc="lower left", ncols=3, fontsize=12,
                   bbox_to_anchor=(0.045, -0.03), columnspacing=1.2)  # fmt: skip
        return [*self.bars, *self.labels]

    def _losses(self, fig: Figure) -> list[Artist]:
        ax, bench = fig.add_axes((0.6, 0.27, 0.385, 0.59)), self.bench
        base, best = mean(bench.base).loss, mean(bench.tuned[bench.leader]).loss
        self.top = ROOM * max(base, best)
        ax.set(xlim=AXES[self.over], ylim=(0, 1.02 * self.top))
        ticks = np.linspace(0, 1 if self.over == "density" else 2, 5)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_xlabel(self.over, labelpad=0)
        ax.set_title("mean loss over the tasks, nats", fontsize=14.5, pad=8)
        lines = [
            ax.axhline(base, color=style.MUTED, lw=1.8, ls=":", label="base"),
            ax.axhline(best, color=style.INK, lw=1.8, ls="-.", label="best fine-tune"),
        ]
        (self.others,) = ax.plot([], [], "o", color=style.MUTED, mfc="white", ms=5,
                                 label="other settings")  # fmt: skip
        (self.line,) = ax.plot([], [], "-o", color=style.MEASURED, lw=2, ms=6, label="tried so far")
        (self.here,) = ax.plot([], [], "o", mfc="none", mec=style.INK, mew=2.2, ms=14)
        lines += [self.line, self.others]
        fig.legend(handles=lines, loc="lower right", ncols=4, fontsize=11,
                   bbox_to_anchor=(0.998, -0.03), columnspacing=0.9, handletextpad=0.5)  # fmt: skip
        return [self.others, self.line, self.here]
