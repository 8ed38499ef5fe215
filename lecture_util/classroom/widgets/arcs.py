"""Two vectors in the plane, the arc and the chord between them, and the lengths on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from torch import Tensor

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.canvas import Canvas
from lecture_util.merging.slerp import angle, lerp, slerp

SIZE = (11.2, 3.9)  # as wide as a slide
STEPS = 101  # points of a path
LONGEST = 1.5  # |v1| / |v0|
ARC, CHORD = style.ACCENT, style.INK


@dataclass(frozen=True)
class Arc:
    """Both ways from v0 to v1, which have two numbers each, and where they are at t.

    degrees:     the angle between them; None where one is zero and has no direction.
    straight:    whether SLERP goes straight: parallel, opposite, or a zero vector.
    slerp, lerp: lengths at t.
    difference:  length of slerp - lerp over that of slerp; 0 where both are zero.
    lengths:     of each on the whole way. Shapes: arc_P2, chord_P2.
    """

    v0: Tensor
    v1: Tensor
    arc_P2: Tensor
    chord_P2: Tensor
    at_arc: Tensor
    at_chord: Tensor
    t: float
    degrees: float | None
    straight: bool

    @property
    def slerp(self) -> float:
        return self.at_arc.norm().item()

    @property
    def lerp(self) -> float:
        return self.at_chord.norm().item()

    @property
    def difference(self) -> float:
        apart = (self.at_arc - self.at_chord).norm().item()
        return apart / self.slerp if apart else 0.0

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        return self.arc_P2.norm(dim=1), self.chord_P2.norm(dim=1)


def arc_between(degrees: float, ratio: float, t: float) -> Arc:
    """v0 is (1, 0); v1 is `ratio` long, at so many degrees. By `merging.slerp`, in fp64."""
    radians = math.radians(degrees)
    v0 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    v1 = ratio * torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float64)
    steps = torch.linspace(0, 1, STEPS, dtype=torch.float64).tolist()
    arc_P2 = torch.stack([slerp(v0, v1, step) for step in steps])
    chord_P2 = torch.stack([lerp(v0, v1, step) for step in steps])
    return Arc(
        v0, v1, arc_P2, chord_P2, slerp(v0, v1, t), lerp(v0, v1, t), t,
        degrees=math.degrees(angle(v0, v1)) if ratio else None,
        straight=torch.equal(arc_P2, chord_P2),
    )  # fmt: skip


class ArcPicture:
    """Left, the plane; right, the length of both over t."""

    def __init__(self) -> None:
        self.canvas = Canvas(SIZE)
        with self.canvas.still() as fig:
            self.canvas.moving = [*self._plane(fig), *self._lengths(fig)]

    def __call__(self, arc: Arc) -> bytes:
        for arrow, label, end, shift in zip(
            self.arrows, self.labels, (arc.v0, arc.v1), ((0.02, -0.17), (0, 0.13)), strict=True
        ):
            x, y = end.tolist()
            length = math.hypot(x, y)
            arrow.set_positions((0, 0), (x, y))
            arrow.set_visible(length > 0)
            label.set_text(label.get_gid() if length else f"{label.get_gid()} = 0")
            out = 0.12 / length if length else 0.0  # beyond its tip
            label.set_position((x + out * x + shift[0], y + out * y + shift[1]))
        for line, path in ((self.arc, arc.arc_P2), (self.chord, arc.chord_P2)):
            line.set_data(*path.T.tolist())
        for ray, point in ((self.arc_ray, arc.at_arc), (self.chord_ray, arc.at_chord)):
            ray.set_data([0, point[0].item()], [0, point[1].item()])
        for line, lengths in zip((self.arc_length, self.chord_length), arc.lengths, strict=True):
            line.set_ydata(lengths.tolist())
        self.now.set_xdata([arc.t] * 2)
        for dot, length in ((self.arc_dot, arc.slerp), (self.chord_dot, arc.lerp)):
            dot.set_data([arc.t], [length])
        return self.canvas.png()

    def _plane(self, fig: Figure) -> list[Artist]:
        ax = fig.add_axes((0.045, 0.1, 0.47, 0.78))
        ax.set(xlim=(-1.72, 1.72), ylim=(-0.28, 1.68), aspect="equal")
        ax.set_xticks([-1, 0, 1])
        ax.set_yticks([0, 1])
        ax.set_title("from $v_0$ to $v_1$ in the plane", fontsize=14.5, pad=8)
        turn = torch.linspace(0, math.pi, STEPS)
        ax.plot(turn.cos(), turn.sin(), ":", color=style.MUTED, lw=1.5)  # as long as v0
        arrow = {"arrowstyle": "-|>", "mutation_scale": 20, "lw": 2.6, "shrinkA": 0, "shrinkB": 0}
        self.arrows = [
            ax.add_patch(FancyArrowPatch((0, 0), (1, 0), color=color, **arrow))
            for color in (style.PREDICTED, style.MEASURED)
        ]
        look = {"size": 16, "ha": "center", "va": "center", "path_effects": style.HALO}
        self.labels = [ax.text(0, 0, name, gid=name, **look) for name in ("$v_0$", "$v_1$")]
        look = {"markevery": [1], "mec": "white", "lw": 1.2}
        (self.arc_ray,) = ax.plot([], [], "-o", color=ARC, ms=16, **look)
        (self.chord_ray,) = ax.plot([], [], "-s", color=CHORD, ms=8, **look)
        (self.arc,) = ax.plot([], [], color=ARC, lw=3.4)
        (self.chord,) = ax.plot([], [], "--", color=CHORD, lw=2.2)
        return [*self.arrows, self.arc, self.chord, self.arc_ray, self.chord_ray, *self.labels]

    def _lengths(self, fig: Figure) -> list[Artist]:
        ax = fig.add_axes((0.585, 0.245, 0.4, 0.635))
        ax.set(xlim=(0, 1), ylim=(0, 1.08 * LONGEST))
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
        ax.set_xlabel("t", labelpad=0)
        ax.set_title("length on the way", fontsize=14.5, pad=8)
        steps = torch.linspace(0, 1, STEPS)
        self.now = ax.axvline(0.5, color=style.MUTED, lw=1.5, ls=":")
        (self.arc_length,) = ax.plot(steps, steps, color=ARC, lw=3.4)
        (self.chord_length,) = ax.plot(steps, steps, "--", color=CHORD, lw=2.2)
        (self.arc_dot,) = ax.plot([], [], "o", color=ARC, mec="white", ms=16)
        (self.chord_dot,) = ax.plot([], [], "s", color=CHORD, mec="white", ms=8)
        for color, look, name in ((ARC, "-o", "SLERP, the arc"), (CHORD, "--s", "LERP, the chord")):
            ax.plot([], [], look, color=color, lw=2.6, mec="white", ms=10, label=name)
        fig.legend(loc="lower right", ncols=2, fontsize=13, bbox_to_anchor=(0.99, -0.02))
        return [self.now, self.arc_length, self.chord_length, self.arc_dot, self.chord_dot]
