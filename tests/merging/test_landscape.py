"""The line, the plane and the shell, against a bowl whose height is known everywhere."""

import math

import pytest
import torch

from lecture_util.merging.landscape import Plane, on_line, on_plane, shell
from lecture_util.model.shapes import ShapeError


def new_state(seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(7, 5, generator=g, dtype=dtype),
        "b": torch.randn(11, generator=g, dtype=dtype),
        "scalar": torch.randn((), generator=g, dtype=dtype),
        "positions": torch.arange(3),
    }


def flat(state):
    return torch.cat([v.double().flatten() for v in state.values() if v.is_floating_point()])


ORIGIN, A, B, CENTRE = (new_state(i) for i in range(4))


def bowl(state):
    """Squared distance to CENTRE: quadratic on every line and plane."""
    return (flat(state) - flat(CENTRE)).square().sum().item()


def gram():
    """|a|^2, |b|^2 and a.b of the corners as seen from the origin: all a plane depends on."""
    a, b = flat(A) - flat(ORIGIN), flat(B) - flat(ORIGIN)
    return (a @ a).item(), (b @ b).item(), (a @ b).item()


def test_along_a_line_a_bowl_is_the_parabola_through_three_known_heights():
    alphas = [-0.5, 0.0, 0.3, 0.5, 1.0, 1.7]
    apart = (flat(A) - flat(B)).square().sum().item()
    expected = [(1 - t) * bowl(A) + t * bowl(B) - t * (1 - t) * apart for t in alphas]
    assert on_line(A, B, bowl, alphas) == pytest.approx(expected, rel=1e-12)


def test_the_line_keeps_the_ends_their_dtypes_and_whole_numbers():
    a, b = new_state(4, torch.bfloat16), new_state(5, torch.bfloat16)
    first, middle, last = on_line(a, b, dict, [0.0, 0.5, 1.0])
    for name in a:
        assert torch.equal(first[name], a[name]) and torch.equal(last[name], b[name])
        assert middle[name].dtype == a[name].dtype
    assert torch.equal(middle["b"], ((a["b"].float() + b["b"].float()) / 2).bfloat16())


def test_corners_lie_where_their_distances_and_angle_put_them():
    plane = Plane.through(ORIGIN, A, B)
    aa, bb, ab = gram()
    assert plane.coordinates(ORIGIN) == (0, 0)
    assert plane.coordinates(A) == pytest.approx((math.sqrt(aa), 0), abs=1e-12)
    x = ab / math.sqrt(aa)
    assert plane.coordinates(B) == pytest.approx((x, math.sqrt(bb - x * x)), rel=1e-12)


def test_a_point_of_the_plane_is_the_model_there_and_back():
    plane = Plane.through(ORIGIN, A, B)
    for state in (ORIGIN, A, B):
        assert torch.allclose(flat(plane.at(*plane.coordinates(state))), flat(state), atol=1e-12)
    assert plane.coordinates(plane.at(-1.5, 2.25)) == pytest.approx((-1.5, 2.25), rel=1e-12)


def test_a_model_off_the_plane_has_the_coordinates_of_the_nearest_point():
    plane = Plane.through(ORIGIN, A, B)
    columns = torch.stack([flat(A) - flat(ORIGIN), flat(B) - flat(ORIGIN)], dim=1)
    nearest = columns @ torch.linalg.lstsq(columns, (flat(CENTRE) - flat(ORIGIN))[:, None]).solution
    found = flat(plane.at(*plane.coordinates(CENTRE))) - flat(ORIGIN)
    assert torch.allclose(found, nearest[:, 0], atol=1e-12)


def test_on_the_plane_a_bowl_is_round_and_deepest_under_its_centre():
    seen = on_plane(ORIGIN, A, B, bowl, steps=5, margin=0.5)
    cx, cy = Plane.through(ORIGIN, A, B).coordinates(CENTRE)
    depth = bowl(ORIGIN) - cx**2 - cy**2
    for y, row in zip(seen.y, seen.values, strict=True):
        expected = [depth + (x - cx) ** 2 + (y - cy) ** 2 for x in seen.x]
        assert row == pytest.approx(expected, rel=1e-11)


def test_the_rectangle_holds_the_corners_with_its_margin():
    seen = on_plane(ORIGIN, A, B, lambda state: 0.0, steps=3, margin=0.25)
    for axis, marks in enumerate((seen.x, seen.y)):
        low, high = min(p[axis] for p in seen.points), max(p[axis] for p in seen.points)
        wider = (high - low) / 4
        assert marks == pytest.approx([low - wider, (low + high) / 2, high + wider])


def test_the_plane_keeps_dtypes_and_whole_numbers():
    states = [new_state(i, torch.float16) for i in range(3)]
    there = Plane.through(*states).at(0.0, 0.0)
    for name, tensor in states[0].items():
        assert there[name].dtype == tensor.dtype and torch.equal(there[name], tensor)


@pytest.mark.parametrize(
    "corners", [(ORIGIN, A, A), (ORIGIN, ORIGIN, B), (ORIGIN, A, ORIGIN), (A, A, A)]
)
def test_three_models_on_one_line_span_no_plane(corners):
    with pytest.raises(ValueError, match="on one line"):
        on_plane(*corners, bowl)


def test_a_model_midway_between_two_others_spans_no_plane():
    (middle,) = on_line(ORIGIN, A, dict, [0.5])
    with pytest.raises(ValueError, match="on one line"):
        Plane.through(ORIGIN, A, middle)


def test_one_step_is_no_rectangle():
    with pytest.raises(ValueError, match="steps=1: expected at least 2"):
        on_plane(ORIGIN, A, B, bowl, steps=1)


def test_models_that_do_not_fit_together_are_refused_by_name():
    with pytest.raises(ShapeError, match="b is"):
        on_line(A, B | {"b": torch.zeros(3)}, bowl, [0.5])
    with pytest.raises(ShapeError, match="b is"):
        Plane.through(ORIGIN, A, B | {"b": torch.zeros(3)})
    with pytest.raises(ValueError, match="positions holds whole numbers"):
        shell(ORIGIN, [A, B | {"positions": torch.tensor([0, 1, 5])}])


def test_fine_tunes_along_known_directions_have_known_distances_and_angles():
    east, north, up = torch.eye(3, 6, dtype=torch.float64)
    base = {"w": torch.full((2, 3), 7.0, dtype=torch.float64), "n": torch.arange(2)}
    steps = [3 * east, 4 * (east + north) / math.sqrt(2), 5 * up]
    tuned = [base | {"w": base["w"] + step.view(2, 3)} for step in steps]
    found = shell(base, tuned)
    assert list(found) == ["w"]
    assert found["w"].distance == pytest.approx(4)
    assert found["w"].distance_std == pytest.approx(math.sqrt(2 / 3))
    assert found["w"].degrees == pytest.approx(75)  # of 45, 90 and 90
    assert found["w"].degrees_std == pytest.approx(math.sqrt(450))


def test_a_shell_of_random_directions_is_thin_and_square():
    """n steps of equal size at random: distance sigma sqrt(n), angles 90 degrees, in any dtype."""
    n, sigma = 40_000, 1e-3
    g = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(n, generator=g) * 0.05}
    tuned = [{"w": base["w"] + sigma * torch.randn(n, generator=g)} for _ in range(4)]
    found = shell(base, tuned)["w"]
    assert found.distance == pytest.approx(sigma * math.sqrt(n), rel=0.01)
    assert found.distance_std < 0.01 * found.distance
    assert found.degrees == pytest.approx(90, abs=1) and found.degrees_std < 1


def test_small_angles_are_not_lost_to_rounding():
    base = {"w": torch.zeros(2)}
    tuned = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 1e-5])}]
    assert shell(base, tuned)["w"].degrees == pytest.approx(math.degrees(1e-5), rel=1e-6)


def test_differences_are_taken_wide():
    """512 - 3 is no bf16 number."""
    base = {"w": torch.tensor([512.0], dtype=torch.bfloat16)}
    tuned = [{"w": torch.tensor([value], dtype=torch.bfloat16)} for value in (3.0, 1021.0 + 3)]
    assert shell(base, tuned[:1] * 2)["w"].distance == 509
    assert shell(base, tuned)["w"].degrees == 180


def test_a_shell_takes_two():
    with pytest.raises(ValueError, match="1 fine-tunes: an angle takes at least 2"):
        shell(ORIGIN, [A])
