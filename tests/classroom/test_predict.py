"""A guess first, then the truth beside it; and nothing breaks where nobody can type."""

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


def test_a_typed_guess_counts_and_a_typo_is_explained():
    p = predict("q", unit="ms")
    p.entry.value = "1,500"
    assert p.guesses == [1500.0]
    p.entry.value = "fast"
    assert p.guesses == []
    assert "not a number" in p.note.value
    p.entry.value = "2e3"
    assert p.guesses == [2000.0]
    assert "2,000 ms" in p.note.value
    p.entry.value = ""
    assert p.guesses == []


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
    p.entry.value = "compute"
    p.reveal("memory")
    assert "✗ you chose compute; right is memory" in capsys.readouterr().out
    assert any("memory" in row and "✓" in row for row in rows(shown[0]))
    predict("What limits decode?", choices=["memory", "compute"]).reveal("memory")
    assert "no guess entered; right is memory" in capsys.readouterr().out


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
