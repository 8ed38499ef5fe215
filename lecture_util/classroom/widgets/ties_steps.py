"""ties_step_by_step (notebook 11): trim, elect signs, average what agrees, on three vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets
import torch

from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.stepping import Steps
from lecture_util.classroom.widgets.ties_svg import ADD, STEPS, TASK, shown, ties_svg
from lecture_util.classroom.widgets.ties_work import (
    MODELS,
    ZERO_SIGNS,
    Work,
    base_of,
    examples_of,
    numbers,
    vectors,
    work_out,
)
from lecture_util.merging.ties import majority


class TiesStepper(Explorer):
    """The explorer; `work` has every vector of every step. `fields` hold the task vectors."""

    def __init__(
        self, examples: dict[str, list[list[float]]], density: float, scale: float, step: int,
        convention: str,
    ) -> None:  # fmt: skip
        self.examples = examples
        self.work: Work | None = None
        self.step = widgets.IntSlider(description="step", min=TASK, max=ADD, value=step)
        self.steps = Steps(self.step, "TIES step by step", interval=2500)
        self.fields = [
            widgets.Text(
                description=f"vector {i + 1}", continuous_update=False,
                style={"description_width": "4.6em"}, layout=widgets.Layout(width="32%"),
            )
            for i in range(MODELS)
        ]  # fmt: skip
        controls = {
            "example": widgets.Dropdown(description="example", options=list(examples)),
            "density": widgets.FloatSlider(
                description="density", min=0, max=1, step=0.05, value=density
            ),
            "step": self.step,
            "convention": widgets.Dropdown(
                description="sum of 0",
                options=[(f"{name}: {rule}", name) for name, rule in ZERO_SIGNS.items()],
                value=convention,
            ),
            "scale": widgets.FloatSlider(description="scale", min=0, max=2, step=0.1, value=scale),
        }
        self._fill(controls["example"].value)
        controls["example"].observe(lambda change: self._fill(change["new"]), names="value")
        super().__init__(
            self._draw, controls, [widgets.HBox(self.fields), *self.steps.parts], columns=3
        )
        for field in self.fields:
            field.observe(self._typed, names="value")

    def _fill(self, example: str) -> None:
        """Write an example's vectors into the fields, without a redraw for each."""
        self._filling = True
        for field, row in zip(self.fields, self.examples[example], strict=True):
            field.value = " ".join(f"{value:g}" for value in row)
        self._filling = False

    def _typed(self, _change: object) -> None:
        if not self._filling:
            self.redraw()

    def _draw(self, density: float, scale: float, step: int, convention: str, **_) -> str:
        deltas = vectors("what is typed", [numbers(field.value) for field in self.fields])
        base = base_of(deltas[0].numel())
        self.work = work_out(base, deltas, density, scale, ZERO_SIGNS[convention])
        self.steps.picture.value = ties_svg(self.work, step, self._rule(convention))
        words = (_vectors, _trimmed, self._elected, _averaged, _added)[step](self.work)
        told = f"Step {step} of {ADD}, <b>{STEPS[step]}</b>: {words}"
        return f'<div style="min-height:3.3em">{told}</div>'  # two lines: the picture stands still

    def _rule(self, convention: str) -> str:
        if convention == "mergekit":
            return "always +"
        return f"majority: {'+' if majority(int(self.work.sums.sign().sum())) > 0 else '−'}"

    def _elected(self, work: Work) -> str:
        words = "the larger movement decides a weight's sign, not the number of votes."
        draws = [f"w{j + 1}" for j in _places((work.sums == 0) & work.conflicts[1])]
        if not draws:
            return words
        sign = "+" if work.signs[work.sums == 0][0] > 0 else "−"
        rule = "+ there, always" if self.controls["convention"].value == "mergekit" else (
            f"there the sign of the majority of weights, {sign}"
        )  # fmt: skip
        return f"{words}<br>The sum is exactly 0 in {', '.join(draws)}: {rule}."


def _vectors(work: Work) -> str:
    count = int(work.conflicts[0].sum())
    return (
        "three fine-tunes minus their base. Some raise a weight that others lower in "
        f"<b>{count} of {work.n}</b> weights (outlined, ≠): {work.shares[0]:.0%} of those that "
        "change."
    )


def _trimmed(work: Work) -> str:
    before, after = (int(mask.sum()) for mask in work.conflicts)
    left = ", ".join(str(int((thin != 0).sum())) for thin in work.trimmed)
    return (
        f"the largest changes of each stay: {left} of {work.n} are left. "
        f"Conflicts: <b>{after}</b>, before {before}."
    )


def _averaged(work: Work) -> str:
    out = sum(
        int(((thin != 0) & ~agree).sum())
        for thin, agree in zip(work.trimmed, work.agrees, strict=True)
    )
    most = int((work.mean - work.plain).abs().argmax())
    return (
        f"over the changes that have the elected sign, as many as there are; {out} struck "
        f"out.<br>They differ most in w{most + 1}: <b>{shown(work.mean[most].item())}</b> here, "
        f"{shown(work.plain[most].item())} by the plain mean of all three."
    )


def _added(work: Work) -> str:
    moved = [(row - work.base).norm().item() for row in (work.merged, work.beside)]
    return (
        "base + scale × disjoint mean, in every weight. TIES moves the base by a vector of length "
        f"<b>{moved[0]:.2f}</b>, the plain mean by one of length {moved[1]:.2f}."
    )


def _places(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def ties_step_by_step(
    examples: Mapping[str, Sequence[Sequence[float]]] | None = None,
    *,
    density: float = 0.5,
    scale: float = 1.0,
    step: int = 0,
    convention: str = "paper",
) -> TiesStepper:
    """TIES on three task vectors of a few weights, each step to be seen (notebook 11).

    examples:       name to three task vectors of 6 to 8 numbers; None: the course's own. The
                    numbers can be typed over.
    density, scale: of TIES, 0 to 1 and 0 to 2.
    step:           0 task vectors, 1 trimmed, 2 signs elected, 3 disjoint mean, 4 added to a base.
    convention:     what sign a sum of exactly 0 gets: "paper", the majority's, or "mergekit", +.

    Raises: ValueError or TypeError naming what came.
    """
    for name, value, most in (("density", density, 1), ("scale", scale, 2)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= most:
            raise ValueError(f"{name} is {value!r}: expected 0 to {most}")
    if type(step) is not int or not TASK <= step <= ADD:
        raise ValueError(f"step is {step!r}: expected a whole number, {TASK} to {ADD}")
    if convention not in ZERO_SIGNS:
        raise ValueError(f"convention is {convention!r}: expected {' or '.join(ZERO_SIGNS)}")
    return TiesStepper(examples_of(examples), density, scale, step, convention)
