"""The steps of TIES as SVG: a row a vector, a column a weight, conflicts outlined."""

from __future__ import annotations

from torch import Tensor

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.drawing import box, css, hatch, path, svg, text
from lecture_util.classroom.widgets.ties_work import MOST, Work

WIDTH, HEIGHT = 1160, 356
LEFT, RIGHT = 232, 1012  # of the columns; names before them, notes behind
TALL = 27.0
TASKS = 30.0  # where the first task vector is
SUMS, MEANS, RESULTS = 124.0, 192.0, 260.0
CONFLICT = style.ACCENT
STEPS = ("task vectors", "trim", "sum and elect signs", "disjoint mean", "add to the base")
TASK, TRIM, ELECT, MEAN, ADD = range(len(STEPS))


def ties_svg(work: Work, step: int, zero_sign: str) -> str:
    """The picture at a step; what comes later is empty, so that nothing moves."""
    largest = max(float(row.abs().max()) for row in work.deltas) or 1.0
    rows = _Rows(work, largest)
    parts = [_legend(), *rows.heads(step)]
    parts += [rows.task(i, step) for i in range(len(work.deltas))]
    parts += rows.conflicts(step)
    parts += [
        rows.row(SUMS, "sum of what is left", work.sums, step >= ELECT),
        rows.signs(step >= ELECT, zero_sign),
        rows.row(MEANS, "disjoint mean", work.mean, step >= MEAN, bold=True),
        rows.row(MEANS + TALL + 2, "plain mean, untrimmed", work.plain, step >= MEAN),
        rows.row(RESULTS, "base", work.base, step >= ADD, tinted=False),
        rows.row(RESULTS + TALL + 2, "merged by TIES", work.merged, step >= ADD, bold=True,
                 tinted=False),
        rows.row(RESULTS + 2 * TALL + 4, "with the plain mean", work.beside, step >= ADD,
                 tinted=False),
    ]  # fmt: skip
    left = [int((thin != 0).sum()) for thin in work.trimmed]
    label = (
        f"TIES on three task vectors of {work.n} weights, step {step}: {STEPS[step]}. "
        f"{int(work.conflicts[step >= TRIM].sum())} weights in conflict"
        + (f", {left[0]}, {left[1]} and {left[2]} changes left." if step >= TRIM else ".")
    )
    return svg(label, WIDTH, HEIGHT, *parts)


def shown(value: float, signed: bool = True) -> str:
    """Two decimals and a sign; a zero is 0, and what would round to zero is not."""
    if value == 0:
        return "0"
    if abs(value) < 0.005:
        return f"{value:{'+' if signed else ''}.0e}".replace("-", "−")
    return f"{value:{'+' if signed else ''}.2f}".replace("-", "−")


def _legend() -> str:
    x = RIGHT + 12
    return (
        "".join(
            box(x, y, 15, 13, _fill(sign), style.MUTED, 0.8) + text(x + 21, y + 11.5, word, 13)
            for y, sign, word in ((TASKS, 1.0, "raises"), (TASKS + 18, -1.0, "lowers"))
        )
        + box(x, TASKS + 37, 15, 12, "none", CONFLICT, 3)
        + text(x + 21, TASKS + 48, "≠ conflict", 13)
    )


def _fill(strength: float) -> str:
    """Blue raises, vermilion lowers; pale, for dark words on it."""
    color = style.PREDICTED if strength > 0 else style.MEASURED
    return css(style.tint(color, 0.12 + 0.33 * min(1.0, abs(strength)))) if strength else "#FFFFFF"


class _Rows:
    """Rows of cells; `largest` is the magnitude with the strongest colour."""

    def __init__(self, work: Work, largest: float) -> None:
        self.work, self.largest = work, largest
        self.wide = min(104.0, (RIGHT - LEFT) / min(work.n, MOST))

    def heads(self, step: int) -> list[str]:
        conflicts = self.work.conflicts[step >= TRIM]
        return [
            text(self._x(j) + self.wide / 2 - 2, 20, f"w{j + 1}" + (" ≠" if hit else ""), 14,
                 bold=bool(hit), anchor="middle")
            for j, hit in enumerate(conflicts.tolist())
        ]  # fmt: skip

    def task(self, i: int, step: int) -> str:
        """A task vector: as it is, then what trimming left, then what agrees with the signs."""
        work, y, parts = self.work, TASKS + i * (TALL + 2), []
        for j, value in enumerate(work.deltas[i].tolist()):
            gone = step >= TRIM and work.trimmed[i][j] == 0
            lost = step >= MEAN and not gone and not work.agrees[i][j]
            parts.append(self._cell(j, y, shown(value), value / self.largest, gone, lost, i + 1))
        return self._name(y, f"task vector {i + 1}") + "".join(parts)

    def conflicts(self, step: int) -> list[str]:
        """An outline around the three changes of a weight in conflict."""
        high = 3 * (TALL + 2) + 2
        return [
            box(self._x(j) - 2, TASKS - 3, self.wide - 1, high, "none", CONFLICT, 3, round=4)
            for j, hit in enumerate(self.work.conflicts[step >= TRIM].tolist())
            if hit
        ]

    def row(self, y: float, name: str, values: Tensor, there: bool, *, bold: bool = False,
            tinted: bool = True) -> str:  # fmt: skip
        if not there:
            return self._name(y, name, muted=True) + self._empty(y)
        return self._name(y, name, bold=bold) + "".join(
            self._cell(j, y, shown(value, tinted), value / self.largest * tinted)
            for j, value in enumerate(values.tolist())
        )

    def signs(self, there: bool, zero_sign: str) -> str:
        """The elected signs; dashed where the sum is 0, so that the rule for zeros decides."""
        work, y, name = self.work, SUMS + TALL + 2, "elected sign"
        if not there:
            return self._name(y, name, muted=True) + self._empty(y)
        parts, by_rule = [self._name(y, name, bold=True)], False
        elected = zip(work.signs.tolist(), work.sums.tolist(), strict=True)
        for j, (sign, total) in enumerate(elected):
            parts.append(self._cell(j, y, "+" if sign > 0 else "−", 0.6 * sign * (total != 0)))
            if total == 0:
                by_rule = True
                parts.append(box(self._x(j) + 4, y + 3, self.wide - 13, TALL - 6, "none", style.INK,
                                 1.4, dash="4 3"))  # fmt: skip
        if by_rule:
            parts.append(text(RIGHT + 12, y + 12, "dashed, sum 0:", 13))
            parts.append(text(RIGHT + 12, y + 27, zero_sign, 13, bold=True))
        return "".join(parts)

    def _x(self, j: int) -> float:
        return LEFT + j * self.wide

    def _name(self, y: float, name: str, *, bold: bool = False, muted: bool = False) -> str:
        color = style.MUTED if muted else style.INK
        return text(LEFT - 14, y + 18.5, name, 14, bold=bold, anchor="end", color=color)

    def _empty(self, y: float) -> str:
        return "".join(
            box(self._x(j), y, self.wide - 5, TALL, "none", "#CFCFCF", 0.8, dash="3 4")
            for j in range(self.work.n)
        )

    def _cell(self, j: int, y: float, words: str, strength: float, gone: bool = False,
              lost: bool = False, vector: int = 0) -> str:  # fmt: skip
        """gone: trimmed, hatched; lost: against the elected sign, struck through."""
        x, wide = self._x(j), self.wide - 5
        fate = "trimmed" if gone else "against the elected sign" if lost else ""
        title = f"task vector {vector}, w{j + 1}: {words} {fate}".strip() if vector else ""
        fill = "#FFFFFF" if gone or lost else _fill(strength)
        parts = [box(x, y, wide, TALL, fill, style.MUTED, 0.8, title=title)]
        middle = x + wide / 2
        if gone:
            parts.append(hatch(x, y, wide, TALL, "#D5D5D5"))
        color = style.MUTED if gone or lost else style.INK
        parts.append(text(middle, y + 18.5, words, 14, anchor="middle", color=color,
                          bold=not (gone or lost)))  # fmt: skip
        if lost:
            half = 4.6 * len(words)
            parts.append(path(f"M{middle - half:.1f} {y + 13.5:.1f}h{2 * half:.1f}",
                              style.MEASURED, 2))  # fmt: skip
        return "".join(parts)
