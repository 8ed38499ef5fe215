"""The widgets of 11 show what the merging functions do, checked against arithmetic by hand."""

import html
import math
import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.classroom.widgets import density_sliders, slerp_against_lerp, ties_step_by_step
from lecture_util.classroom.widgets.arcs import arc_between
from lecture_util.classroom.widgets.merges import STARTS
from lecture_util.classroom.widgets.ties_svg import shown, ties_svg
from lecture_util.classroom.widgets.ties_work import EXAMPLES, base_of, work_out
from lecture_util.merging.methods import METHODS
from lecture_util.merging.plan import merge_states
from lecture_util.merging.ties import ties

matplotlib.use("agg")
PNG = b"\x89PNG"


def words(explorer) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", explorer.text.value))


def drawn(markup: str) -> ElementTree.Element:
    """The picture as XML: malformed markup fails here."""
    svg = re.search(r"<svg.*</svg>", markup, re.S).group()
    return ElementTree.fromstring(svg)


def texts(explorer) -> list[str]:
    return [one.text for one in drawn(explorer.steps.picture.value).iter() if one.text]


def read(cell: str) -> float:
    return float(cell.replace("−", "-"))


# --- slerp_against_lerp


@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 179.9), st.floats(0.05, 1.5), st.floats(0, 1))
def test_lengths_and_angle_are_those_of_plane_trigonometry(degrees, ratio, t):
    arc, a = arc_between(degrees, ratio, t), math.radians(degrees)
    s0, s1 = math.sin((1 - t) * a) / math.sin(a), math.sin(t * a) / math.sin(a)

    def third_side(p, q):  # law of cosines, for vectors p and q long with the angle a between
        return math.sqrt(max(0.0, p * p + q * q + 2 * p * q * math.cos(a)))

    assert arc.degrees == pytest.approx(degrees, rel=1e-6)
    assert arc.slerp == pytest.approx(third_side(s0, s1 * ratio), abs=1e-7)
    assert arc.lerp == pytest.approx(third_side(1 - t, t * ratio), abs=1e-7)
    assert not arc.straight
    turned = complex(*arc.at_arc.tolist())
    if ratio == 1:
        assert math.degrees(math.atan2(turned.imag, turned.real)) == pytest.approx(t * degrees)


def test_equal_lengths_stay_on_the_circle_and_the_chord_is_shortest_halfway():
    explorer = slerp_against_lerp(degrees=120)
    arc_lengths, chord_lengths = explorer.shown.lengths
    assert torch.allclose(arc_lengths, torch.ones(101, dtype=torch.float64))
    assert chord_lengths.argmin() == 50
    assert chord_lengths.min() == pytest.approx(0.5)  # cos 60
    assert explorer.shown.difference == pytest.approx(0.5)
    for value in ("angle 120°", "|slerp| 1.0000", "|lerp| 0.5000", "50.00%", "= 0.5"):
        assert value in words(explorer)


def test_at_a_quarter_of_a_right_angle():
    explorer = slerp_against_lerp(0.25)
    assert explorer.shown.at_arc.tolist() == pytest.approx(
        [math.cos(math.pi / 8), math.sin(math.pi / 8)]
    )
    assert explorer.shown.at_chord.tolist() == pytest.approx([0.75, 0.25])
    assert f"|lerp| {math.sqrt(0.625):.4f}" in words(explorer)


@pytest.mark.parametrize(
    ("name", "says", "middle"),
    [("parallel", "there is no arc between them", 1.0), ("opposite", "no arc is special", 0.0),
     ("zero vector", "no angle to divide", 0.5)],
)  # fmt: skip
def test_where_there_is_no_arc_it_goes_straight_and_says_so(name, says, middle):
    explorer = slerp_against_lerp()
    assert not explorer.shown.straight
    explorer.buttons[name].click()
    assert explorer.shown.straight
    assert explorer.shown.slerp == explorer.shown.lerp == pytest.approx(middle, abs=1e-15)
    assert explorer.shown.difference == 0
    assert says in words(explorer)
    assert explorer.image.value[:4] == PNG


def test_the_picture_draws_what_was_computed():
    explorer = slerp_against_lerp(0.25, degrees=60, ratio=0.5)
    arc, picture = explorer.shown, explorer._picture
    assert np.allclose(picture.arc.get_xydata(), arc.arc_P2)
    assert np.allclose(picture.chord.get_xydata(), [(1 - t) * arc.v0.numpy() + t * arc.v1.numpy()
                                                    for t in np.linspace(0, 1, 101)])  # fmt: skip
    assert np.allclose(picture.arc_ray.get_xydata()[1], arc.at_arc)
    assert np.allclose(picture.chord_ray.get_xydata()[1], [0.75 + 0.0625, 0.125 * 3**0.5 / 2])
    assert np.allclose(picture.arc_length.get_ydata(), np.hypot(*arc.arc_P2.numpy().T))
    assert np.allclose(picture.chord_length.get_ydata(), np.hypot(*arc.chord_P2.numpy().T))
    assert picture.chord_dot.get_xydata()[0].tolist() == [0.25, arc.lerp]
    assert picture.arc_dot.get_xydata()[0].tolist() == [0.25, arc.slerp]
    explorer.preset("zero vector")
    assert [arrow.get_visible() for arrow in picture.arrows] == [True, False]


def test_two_real_fine_tunes_are_offered_only_when_measured():
    assert "two real fine-tunes" not in slerp_against_lerp().buttons
    explorer = slerp_against_lerp(fine_tunes=0.31)
    explorer.preset("two real fine-tunes")
    assert explorer.shown.degrees == pytest.approx(0.31)
    half = math.radians(0.31) / 2
    assert explorer.shown.difference == pytest.approx(1 - math.cos(half), rel=1e-4)
    assert "0.31°" in words(explorer) and "0.00%" not in words(explorer)
    explorer = slerp_against_lerp(fine_tunes=(0.4, 1.0003))
    explorer.preset("two real fine-tunes")
    assert explorer.shown.lengths[0][-1] == pytest.approx(1.0003)
    with pytest.raises(ValueError, match="preset 'sideways'"):
        explorer.preset("sideways")


def test_every_control_moves_the_arc():
    explorer = slerp_against_lerp()
    for name, value in (("degrees", 33.0), ("ratio", 0.5), ("t", 0.9)):
        before = explorer.image.value, explorer.text.value
        explorer.controls[name].value = value
        assert explorer.image.value != before[0]
        assert explorer.text.value != before[1]
    assert "only where both ends are equally long" in words(explorer)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"t": 1.5}, "t is 1.5: expected 0 to 1"), ({"degrees": 181}, "degrees is 181"),
     ({"ratio": -1}, "ratio is -1"), ({"t": True}, "t is True"),
     ({"fine_tunes": (1, 2, 3)}, "expected degrees, or"), ({"fine_tunes": "1"}, "fine_tunes is"),
     ({"fine_tunes": (200, 1)}, "angle of fine_tunes"), ({"degrees": math.nan}, "degrees is nan"),
     ({"fine_tunes": None, "t": "x"}, "t is 'x'")],
)  # fmt: skip
def test_vectors_that_cannot_be_drawn_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        slerp_against_lerp(**given)


# --- ties_step_by_step


def by_hand(rows, density, positive):
    """The paper's steps with plain numbers: -> sums, signs, means."""
    trimmed = []
    for row in rows:
        keep = 0 if density <= 0 else max(1, int(density * len(row)))
        order = sorted(range(len(row)), key=lambda j: (abs(row[j]), j))[len(row) - keep :]
        trimmed.append([value if j in order else 0.0 for j, value in enumerate(row)])
    sums = [sum(column) for column in zip(*trimmed, strict=True)]
    votes = sum((s > 0) - (s < 0) for s in sums)
    zero = 1 if positive or votes > 0 else -1
    signs = [(s > 0) - (s < 0) or zero for s in sums]
    means = []
    for sign, column in zip(signs, zip(*trimmed, strict=True), strict=True):
        agree = [value for value in column if value * sign > 0]
        means.append(sum(agree) / len(agree) if agree else 0.0)
    return sums, signs, means


ROWS = st.integers(6, 8).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(-8, 8).map(lambda i: i / 8), min_size=n, max_size=n),
        min_size=3, max_size=3,
    )
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 20), st.booleans())
def test_each_step_is_the_paper_s_by_hand(rows, twentieths, positive):
    density = twentieths / 20
    deltas = [torch.tensor(row, dtype=torch.float64) for row in rows]
    zero_sign = "positive" if positive else "majority"
    work = work_out(base_of(len(rows[0])), deltas, density, 1.0, zero_sign)
    sums, signs, means = by_hand(rows, density, positive)
    assert work.sums.tolist() == sums  # eighths add up exactly
    assert work.signs.tolist() == signs
    assert work.mean.tolist() == pytest.approx(means)
    assert work.plain.tolist() == pytest.approx(np.mean(rows, axis=0).tolist())
    for step in range(5):
        drawn(ties_svg(work, step, "rule"))


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("zero_sign", ["majority", "positive"])
def test_the_steps_end_where_the_whole_function_ends(example, zero_sign):
    convention = {"majority": "paper", "positive": "mergekit"}[zero_sign]
    explorer = ties_step_by_step(density=0.6, scale=0.7, step=4, convention=convention)
    explorer.controls["example"].value = example
    work = explorer.work
    tuned = [torch.tensor(row, dtype=torch.float64) for row in EXAMPLES[example]]
    zero = torch.zeros_like(work.base)  # or equal changes would differ by a rounding
    whole = ties(zero, tuned, density=0.6, scale=0.7, zero_sign=zero_sign)
    torch.testing.assert_close(work.merged - work.base, whole)
    plain = work.base + 0.7 * torch.tensor(EXAMPLES[example], dtype=torch.float64).mean(0)
    torch.testing.assert_close(work.beside, plain)


def test_the_picture_holds_the_numbers_of_its_step_and_none_of_later_ones():
    explorer = ties_step_by_step()
    rows = ("sum of what is left", "elected sign", "disjoint mean", "plain mean, untrimmed",
            "base", "merged by TIES", "with the plain mean")  # fmt: skip
    for step, there in ((0, 0), (1, 0), (2, 2), (3, 4), (4, 7)):
        explorer.steps.move(step - explorer.step.value)
        found, n = texts(explorer), explorer.work.n
        cells = [text for text in found if re.fullmatch(r"[+−]|0|[+−]?\d+\.\d\d", text)]
        assert len(cells) == n * (3 + there)
        assert [name for name in rows if name in found] == list(rows)
    assert [read(cell) for cell in cells[-2 * n : -n]] == pytest.approx(
        explorer.work.merged.tolist(), abs=0.0051
    )


def test_conflicts_are_outlined_and_counted():
    rows = [[1, 1, 0, 0, 0.5, -1], [-1, 1, 0, -1, 0.25, -1], [0, 1, 0, -1, -0.5, 1]]
    explorer = ties_step_by_step({"mine": rows}, density=1)
    assert explorer.work.conflicts[0].tolist() == [True, False, False, False, True, True]
    assert "3 of 6 weights" in words(explorer)
    assert "60% of those that change" in words(explorer)  # w3 is changed by none
    assert {text for text in texts(explorer) if "≠" in text} == {
        "w1 ≠", "w5 ≠", "w6 ≠", "≠ conflict"
    }  # fmt: skip
    explorer.controls["density"].value = 0.2  # one change each is left: w6, w6, w6
    assert explorer.work.conflicts[1].tolist() == [False] * 5 + [True]
    explorer.steps.move(1)
    assert "Conflicts: 1, before 3" in words(explorer)


def test_a_sum_of_zero_goes_to_the_majority_or_is_positive():
    explorer = ties_step_by_step(step=2)
    explorer.controls["example"].value = "sums of 0"
    paper = explorer.work
    assert paper.sums[[0, 3]].tolist() == [0, 0]
    assert paper.signs[[0, 3]].tolist() == [-1, -1]
    assert "exactly 0 in w1, w4: there the sign of the majority of weights, −" in words(explorer)
    assert "majority: −" in texts(explorer)
    explorer.controls["convention"].value = "mergekit"
    assert explorer.work.signs[[0, 3]].tolist() == [1, 1]
    assert explorer.work.mean[[0, 3]].tolist() == [-x for x in paper.mean[[0, 3]].tolist()]
    assert "+ there, always" in words(explorer)


def test_vectors_can_be_typed_and_an_example_brings_its_own_back():
    explorer = ties_step_by_step(density=1, step=3)
    for field in explorer.fields:
        field.value = "1, 2; 3 −4 0 0.5"
    assert explorer.work.mean.tolist() == [1, 2, 3, -4, 0, 0.5]
    assert explorer.work.plain.tolist() == pytest.approx([1, 2, 3, -4, 0, 0.5])
    explorer.controls["example"].value = "one against two"
    assert explorer.work.deltas[2].tolist() == list(EXAMPLES["one against two"][2])


@pytest.mark.parametrize(
    ("typed", "message"),
    [("1 2 x 4 5 6 7", "'x' is no number"), ("", "is no number"), ("1 2", "has 2 numbers"),
     ("1 2 3 4 5 6", "has 6 numbers but task vector 1 has 7"), ("1 2 3 4 5 6 nan", "nan"),
     ("1e9 2 3 4 5 6 7", "expected -99 to 99"), ("<b> 2 3 4 5 6 7", "'<b>' is no number")],
)  # fmt: skip
def test_what_is_typed_wrong_is_told_in_the_widget(typed, message):
    explorer = ties_step_by_step()
    explorer.fields[1].value = typed
    assert message in words(explorer)
    assert "<b>'" not in explorer.text.value
    explorer.fields[1].value = "0 0 0 0 0 0 0"
    assert "Step 0 of 4" in words(explorer)


def test_buttons_and_keys_step_and_stop_at_the_ends():
    explorer = ties_step_by_step()
    back, on = explorer.steps.buttons
    for step in (1, 2, 3, 4, 4):
        on.click()
        assert f"Step {step} of 4" in words(explorer)
    explorer.steps.keys.moves -= 1
    assert explorer.step.value == 3
    for _ in range(5):
        back.click()
    assert explorer.step.value == 0


def test_numbers_are_shown_with_a_sign_and_no_false_zero():
    assert [shown(x) for x in (0.5, -0.25, 0.0, 6e-17)] == ["+0.50", "−0.25", "0", "+6e−17"]
    assert shown(1.5, signed=False) == "1.50"
    assert shown(-6e-17) == "−6e−17"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [({"density": 2}, ValueError, "density is 2"), ({"scale": -1}, ValueError, "scale is -1"),
     ({"step": 5}, ValueError, "step is 5"), ({"convention": "mine"}, ValueError, "'mine'"),
     ({"examples": []}, TypeError, "pass a dict"),
     ({"examples": {"a": [[1] * 6] * 2}}, ValueError, "has 2 task vectors"),
     ({"examples": {"a": [[1] * 9] * 3}}, ValueError, "9 numbers: expected 6 to 8"),
     ({"examples": {"a": 3}}, ValueError, "expected three lists"),
     ({"density": math.nan}, ValueError, "density is nan")],
)  # fmt: skip
def test_steps_that_cannot_be_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        ties_step_by_step(**given)


# --- density_sliders


def tiny(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(7, 11, generator=generator), "b": torch.randn(5, generator=generator)}


BASE = tiny(0)
STATES = {
    name: {key: BASE[key] + 0.3 * delta for key, delta in tiny(i).items()}
    for i, name in enumerate(("left", "right", "up"), start=1)
}


def far(state):
    """How far a state is from each fine-tune, and a made-up accuracy that falls with it."""
    scores = {}
    for name, tuned in STATES.items():
        loss = sum((state[key] - tuned[key]).square().sum().item() for key in tuned)
        scores[name] = (loss, 1 / (1 + loss))
    return scores


def test_what_is_shown_is_the_score_of_that_merge():
    explorer = density_sliders(STATES, BASE, far)
    for method in STARTS:
        explorer.controls["method"].value = method
        setting = {} if method == "task_arithmetic" else {"density": 0.7}
        merged = merge_states(method, list(STATES.values()), BASE, scale=0.8, **setting)
        expected = far(merged)
        assert explorer.scores == expected, method
        losses = [loss for loss, _ in expected.values()]
        assert explorer.shown.loss == pytest.approx(sum(losses) / 3)
        row = [f"{accuracy:.3f}" for _, accuracy in expected.values()]
        assert "merged" + "".join(row) in words(explorer)
        assert explorer.image.value[:4] == PNG
    assert len(explorer.past) == len(STARTS)


def test_seed_and_epsilon_reach_the_merge():
    explorer = density_sliders(STATES, BASE, far, method="della", density=0.5, scale=1.0)
    scores = [explorer.scores]
    for name, value in (("seed", 4), ("epsilon", 0.3)):
        explorer.controls[name].value = value
        scores.append(explorer.scores)
    for got, setting in zip(scores, ((0, 0.07), (4, 0.07), (4, 0.3)), strict=True):
        merged = merge_states("della", list(STATES.values()), BASE, scale=1.0, density=0.5,
                              seed=setting[0], epsilon=setting[1])  # fmt: skip
        assert got == far(merged)
    assert scores[0] != scores[1] != scores[2]


def test_the_picture_draws_the_scores_and_the_curve():
    explorer = density_sliders(STATES, BASE, far, density=0.5)
    picture = explorer._picture
    for density in (1.0, 0.2):
        explorer.controls["density"].value = density
    heights = [bar.get_height() for bar in picture.bars]
    assert heights == [score.accuracy for score in explorer.scores.values()]
    curve = picture.line.get_xydata()
    assert curve[:, 0].tolist() == [0.2, 0.5, 1.0]
    losses = {point.setting.density: point.loss for point in explorer.past}
    assert curve[:, 1].tolist() == [min(losses[d], picture.top) for d in (0.2, 0.5, 1.0)]
    assert picture.here.get_xydata().tolist() == [curve[0].tolist()]
    assert not len(picture.others.get_xdata())
    explorer.controls["method"].value = "breadcrumbs"
    assert picture.others.get_xdata() == [0.5, 1.0, 0.2]
    assert picture.line.get_xdata() == [0.2]


def test_base_and_fine_tunes_stand_beside_the_merge():
    bench = density_sliders(STATES, BASE, far).bench
    assert bench.base == far(BASE)
    assert all(bench.tuned[name] == far(state) for name, state in STATES.items())
    assert all(score == (0, 1) for score in bench.best.values())  # each is best where it began
    means = {name: sum(loss for loss, _ in far(one).values()) for name, one in STATES.items()}
    assert bench.leader == min(means, key=means.get)


def test_past_merges_make_a_curve_over_what_was_moved():
    explorer = density_sliders(STATES, BASE, far, density=0.5, scale=1.0)
    for density in (0.9, 0.2, 0.9):
        explorer.controls["density"].value = density
    curve = explorer.bench.curve(explorer.shown.setting, "density")
    assert [point.setting.density for point in curve] == [0.2, 0.5, 0.9]
    assert (len(explorer.past), explorer.over) == (3, "density")
    explorer.controls["scale"].value = 0.4
    assert explorer.over == "scale"
    curve = explorer.bench.curve(explorer.shown.setting, "scale")
    assert [point.setting.scale for point in curve] == [0.4, 1.0]
    explorer.forget()
    assert [point.setting.scale for point in explorer.past] == [0.4]


def test_a_merge_is_made_once_and_only_for_what_its_method_asks():
    calls = []

    def counted(state):
        calls.append(1)
        return far(state)

    explorer = density_sliders(STATES, BASE, counted)
    assert len(calls) == 1 + 3 + 1
    explorer.controls["seed"].value = 3  # TIES draws nothing
    explorer.controls["epsilon"].value = 0.2
    assert len(calls) == 5
    assert [explorer.controls[name].disabled for name in ("density", "seed", "epsilon")] == [
        False, True, True
    ]  # fmt: skip
    explorer.controls["method"].value = "della"
    assert not explorer.controls["seed"].disabled and not explorer.controls["epsilon"].disabled
    assert len(calls) == 6
    explorer.controls["seed"].value = 4
    assert len(calls) == 7
    explorer.controls["seed"].value = 3
    assert len(calls) == 7
    explorer.controls["method"].value = "task_arithmetic"
    assert explorer.controls["density"].disabled


def test_a_sweep_tries_densities_or_scales():
    explorer = density_sliders(STATES, BASE, far, method="dare_linear")
    explorer.sweep()
    assert len(explorer.bench.curve(explorer.shown.setting, "density")) == 9
    assert "9 tried so far" in words(explorer)
    explorer.controls["method"].value = "task_arithmetic"
    explorer.sweep()
    scales = [p.setting.scale for p in explorer.bench.curve(explorer.shown.setting, "scale")]
    assert scales == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6])
    explorer.controls["method"].value = "della"  # epsilon .07 refuses some: they are left out
    explorer.over = "density"
    explorer.sweep()
    tried = [p.setting.density for p in explorer.bench.curve(explorer.shown.setting, "density")]
    assert tried == [0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]


def test_a_refused_setting_is_told_and_the_next_one_works():
    explorer = density_sliders(STATES, BASE, far, method="della", density=0.05)
    assert "density=0.05 with epsilon=0.07 spans -0.02 to 0.12" in words(explorer)
    assert explorer.scores == {}
    assert explorer.shown is None
    assert explorer.image.value[:4] == PNG
    explorer.controls["density"].value = 0.5
    assert explorer.scores
    assert "spans" not in words(explorer)


def test_the_drop_rate_stands_beside_the_density_where_entries_are_dropped():
    explorer = density_sliders(STATES, BASE, far, method="dare_linear", density=0.1)
    assert "density 0.1, drop rate 0.9" in words(explorer)
    assert "0.4 × sum" in words(explorer)
    explorer.controls["method"].value = "ties"
    assert "drop rate" not in words(explorer)
    assert "0.4 × mean" in words(explorer)
    explorer.controls["method"].value = "dare_ties"
    assert "0.4 × mean" in words(explorer)
    explorer.controls["convention"].value = "mergekit"  # which does not divide there
    assert "0.4 × sum" in words(explorer)


def test_conventions_change_the_merge():
    explorer = density_sliders(STATES, BASE, far, method="dare_linear")
    paper = explorer.shown.loss
    explorer.controls["convention"].value = "mergekit"
    assert explorer.shown.loss != paper
    merged = merge_states("dare_linear", list(STATES.values()), BASE, scale=0.4, density=0.5,
                          convention="mergekit")  # fmt: skip
    assert explorer.scores == far(merged)


def test_a_list_of_states_takes_its_names_from_the_tasks():
    explorer = density_sliders(list(STATES.values()), BASE, far, ("up", "left", "right"))
    assert list(explorer.bench.states) == ["up", "left", "right"]
    assert list(explorer.scores) == ["up", "left", "right"]


def test_every_method_that_is_offered_takes_a_scale_and_a_base():
    for name, (density, scale) in STARTS.items():
        assert {"lambda", "weight"} <= set(METHODS[name].parameters)
        assert 0 < density <= 1 and 0 < scale <= 2
    assert set(STARTS) == {name for name, how in METHODS.items() if how.thin}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [({"method": "slerp"}, ValueError, "method is 'slerp'"),
     ({"method": "tise"}, ValueError, "did you mean 'ties'"),
     ({"density": 1.5}, ValueError, "density is 1.5"), ({"scale": 3}, ValueError, "scale is 3"),
     ({"seed": -1}, ValueError, "seed is -1"), ({"epsilon": 1}, ValueError, "epsilon is 1"),
     ({"convention": "x"}, ValueError, "paper or mergekit"),
     ({"states": [BASE, BASE]}, ValueError, "name them"), ({"states": 3}, TypeError, "states are"),
     ({"states": {"one": BASE}}, ValueError, "two or more"),
     ({"score": 3}, TypeError, "no function"),
     ({"score": lambda s: 0.5}, TypeError, "task to .loss, accuracy."),
     ({"score": lambda s: {"left": 0.5}}, TypeError, "on left is 0.5"),
     ({"score": lambda s: {"left": (0.1, 7)}}, TypeError, "accuracy of 0 to 1"),
     ({"tasks": ["other"]}, TypeError, "expected other")],
)  # fmt: skip
def test_merges_that_cannot_be_are_refused(given, error, message):
    arguments = {"states": STATES, "base": BASE, "score": far} | given
    with pytest.raises(error, match=message):
        density_sliders(**arguments)


def test_models_that_do_not_fit_together_are_told_in_the_widget():
    other = {**STATES, "up": {"w": torch.zeros(2, 2), "b": torch.zeros(5)}}
    explorer = density_sliders(other, BASE, lambda s: {"any": (1.0, 0.5)})
    assert "w" in words(explorer) and "(2, 2)" in words(explorer)
