"""A guess first, then the truth beside it; and nothing breaks where nobody can type."""

from itertools import pairwise

import matplotlib
import matplotlib.pyplot as plt
import pytest

from lecture_util.classroom.predict import predict

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    """The figures that plt.show() was called on, kept open to be looked at."""
    figures = []
    monkeypatch.setattr(plt, "show", lambda: figures.append(plt.gcf()))
    yield figures
    plt.close("all")


def rows(fig) -> list[str]:
    return [tick.get_text() for tick in fig.axes[0].get_yticklabels()]


def test_without_a_guess_it_says_so_and_still_plots(shown, capsys):
    p = predict("tokens/s of naive generation", unit="tok/s")
    assert p.reveal(measured=20, predicted=40, low=18, high=22) is None
    printed = capsys.readouterr().out
    assert "no guess entered" in printed
    assert "measured 20 tok/s is 0.5 x predicted 40 tok/s" in printed
    assert rows(shown[0]) == ["predicted", "measured"]


def test_prediction_is_dashed_measurement_solid(shown):
    predict("q", guess=30).reveal(measured=20, predicted=40)
    lines = [line for line in shown[0].axes[0].lines if line.get_marker() == "None"]
    assert [line.get_linestyle() for line in lines] == ["--", "-"]
    assert rows(shown[0]) == ["your guess", "predicted", "measured"]


@pytest.mark.parametrize(
    ("guess", "verdict"),
    [(5, "4 x too low"), (200, "10 x too high"), (20, "exact"), (21, "within 5%"), (-1, "off by")],
)
def test_says_how_far_off_a_guess_was(guess, verdict, capsys):
    predict("q", guess=guess).reveal(measured=20)
    assert verdict in capsys.readouterr().out


def test_axis_is_logarithmic_when_values_span_more_than_a_decade(shown):
    predict("q", guess=1000).reveal(measured=20, predicted=40)
    predict("q", guess=30).reveal(measured=20, predicted=40)
    assert [fig.axes[0].get_xscale() for fig in shown] == ["log", "linear"]


def test_each_typed_guess_is_added_and_a_typo_is_explained():
    p = predict("q", unit="ms")
    p.entry.value = "1,500"
    assert p.guesses == [1500.0]
    assert p.entry.value == ""  # ready for the next, which may be the same number
    p.entry.value = "fast"
    assert p.guesses == [1500.0]
    assert "not a number" in p.note.value and p.entry.value == "fast"
    p.entry.value = "2e3"
    p.entry.value = "2e3"
    assert p.guesses == [1500.0, 2000.0, 2000.0]
    assert "3 guesses, the last: 2,000 ms" in p.note.value
    p.entry.value = " "
    assert len(p.guesses) == 3


def test_the_last_guess_can_be_taken_back():
    p = predict("q")
    assert p.undo.disabled
    for guess in ("10", "20"):
        p.entry.value = guess
    p.undo.click()
    assert p.guesses == [10.0] and "1 guess, the last: 10" in p.note.value
    p.undo.click()
    assert p.guesses == [] and p.note.value == "" and p.undo.disabled


def test_a_room_votes_by_buttons_that_count(shown, capsys):
    p = predict("What limits decode?", choices=["memory", "compute"])
    for choice in ("memory", "compute", "memory"):
        p.buttons[choice].click()
    assert [b.description for b in p.buttons.values()] == ["memory (2)", "compute (1)"]
    p.undo.click()
    assert p.buttons["memory"].description == "memory (1)"
    p.reveal("memory")
    assert "1 of 2 chose memory, which is right" in capsys.readouterr().out
    assert [text.get_text() for text in shown[0].axes[0].texts] == ["1", "1"]


@pytest.mark.parametrize("count", [2, 5, 30])
def test_no_guess_of_a_room_covers_another(count, shown):
    p = predict("q")
    for _ in range(count):
        p.add(25)
    p.reveal(measured=20)
    cloud = next(line for line in shown[0].axes[0].lines if len(line.get_xdata()) == count)
    heights = sorted(cloud.get_ydata())
    assert min(b - a for a, b in pairwise(heights)) > 0.01
    low, high = sorted(shown[0].axes[0].get_ylim())
    assert low < heights[0] and heights[-1] < high


def test_a_room_s_guesses_share_one_plot(shown, capsys):
    p = predict("q")
    for guess in (5, 10, 20, 40, 400):
        p.add(guess)
    p.reveal(measured=20)
    assert rows(shown[0]) == ["5 guesses", "measured"]
    assert "the middle of 5 guesses, 20, was exact" in capsys.readouterr().out


def test_not_measured_here_is_said(shown, capsys):
    predict("q", guess=30).reveal(predicted=40)
    assert "not measured here" in capsys.readouterr().out
    predict("q").reveal()
    assert "no guess entered, not measured here" in capsys.readouterr().out
    assert len(shown) == 1


def test_a_choice_shows_chosen_against_right(shown, capsys):
    p = predict("What limits decode?", choices=["memory", "compute"])
    p.buttons["compute"].click()
    p.reveal("memory")
    assert "✗ you chose compute; right is memory" in capsys.readouterr().out
    assert any("memory" in row and "✓" in row for row in rows(shown[0]))
    predict("What limits decode?", choices=["memory", "compute"]).reveal("memory")
    assert "no guess entered; right is memory" in capsys.readouterr().out
    assert len(shown) == 1  # the first one's: without a guess there is nothing to draw


@pytest.mark.parametrize("guess", ["many", float("nan"), float("inf"), ""])
def test_a_guess_that_is_no_number_is_refused(guess):
    with pytest.raises(ValueError, match="not a number"):
        predict("q", guess=guess)


def test_a_choice_that_is_not_offered_is_refused():
    with pytest.raises(ValueError, match="choose from"):
        predict("q", choices=["a", "b"], guess="c")
    with pytest.raises(ValueError, match="reveal one of"):
        predict("q", choices=["a", "b"]).reveal("c")


def test_its_repr_is_one_stable_line():
    assert repr(predict("tokens/s")) == "Prediction('tokens/s')"
    assert "\n" not in repr(predict("tokens/s").form)


@pytest.mark.parametrize(
    ("typed", "value"), [("1,500", 1500), ("-1,234,567.5", -1234567.5), ("1_000", 1000)]
)
def test_commas_part_groups_of_three(typed, value):
    assert predict("q", guess=typed).guesses == [value]


@pytest.mark.parametrize("typed", ["1,5", "12,34", "1,5000", ",5", "1.500,5"])
def test_a_decimal_comma_is_answered_with_the_point(typed):
    p = predict("q")
    p.entry.value = typed
    assert p.guesses == []
    assert "decimal point" in p.note.value


@pytest.mark.parametrize("name", ["measured", "predicted", "low", "high"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "20", [1], 10**400])
def test_what_is_revealed_must_be_finite_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* is not a finite number"):
        predict("q", guess=1).reveal(**{name: value})


@pytest.mark.parametrize("guess", [1e300, -1e300, 1.7e308, 5e-324])
@pytest.mark.parametrize("more", [[], [3.0]])
def test_an_absurd_guess_does_not_break_the_plot(shown, guess, more):
    p = predict("q", guess=guess)
    for other in more:
        p.add(other)
    p.reveal(measured=20, predicted=40)
    shown[0].canvas.draw()


def test_choices_in_one_string_are_refused():
    with pytest.raises(ValueError, match="'abc' is a string: pass a list"):
        predict("q", choices="abc")
