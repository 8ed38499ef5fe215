"""The configurator predicts as `together.predict` does, and never lets one into a dead end."""

import html
import itertools
import re
import sys
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.classroom.widgets import configurator
from lecture_util.classroom.widgets.configurator import TOGGLES
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, Accelerator
from lecture_util.together.configuration import DRAFTS, SCHEDULES, Configuration, Incompatible
from lecture_util.together.costs import from_peaks
from lecture_util.together.predict import predict
from lecture_util.together.scenarios import SCENARIOS

SMALL = {"requests": 3, "shared": 40, "asks": 4, "new": 4}
PNG = b"\x89PNG"


def words(explorer) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", explorer.text.value))


def allowed(fields: dict) -> bool:
    try:
        Configuration(**fields)
    except Incompatible:
        return False
    return True


def after(fields: dict, name: str, on_now: bool) -> dict:
    """The fields if this toggle were pressed."""
    field, on, off, _ = TOGGLES[name]
    pressed = fields | {field: off if on_now else on}
    return pressed | ({"slots": 1} if pressed["schedule"] == "single" else {})


@pytest.fixture(scope="module")
def explorer():
    return configurator(**SMALL)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(sorted(TOGGLES)), min_size=1, max_size=10))
def test_what_is_not_greyed_out_may_be_pressed_and_what_is_may_not(explorer, presses):
    for name in presses:
        toggle = explorer.controls[name]
        if not toggle.disabled:
            toggle.value = not toggle.value
        assert explorer.reasons == []
        assert explorer.configuration == Configuration(**explorer.fields)
        assert explorer.prediction.tokens_per_s > 0
        for one, control in explorer.controls.items():
            if one in TOGGLES:
                right = allowed(after(explorer.fields, one, control.value))
                assert control.disabled is not right
                assert bool(control.tooltip) is not right
                assert control.tooltip in "; ".join(explorer.greyed.get(one, []))


def test_every_sensible_configuration_can_be_reached_by_presses():
    """Walk the presses that are not greyed out, and count what is sensible one by one."""
    start = {"cache": True, "student": False, "schedule": "single", "pages": False,
             "prefix": False, "draft": None, "slots": 1}  # fmt: skip
    seen, ahead = set(), [start]
    while ahead:
        fields = ahead.pop()
        if tuple(fields.values()) in seen:
            continue
        seen.add(tuple(fields.values()))
        for name, (field, on, _, _) in TOGGLES.items():
            pressed = after(fields, name, fields[field] == on)
            pressed["slots"] = 1 if pressed["schedule"] == "single" else 12
            if allowed(pressed):
                ahead.append(pressed)
    yes = (True, False)
    every = itertools.product(yes, yes, SCHEDULES, yes, yes, (None, *DRAFTS))
    sensible = [
        values for values in every
        if allowed(dict(zip(start, (*values, 1 if values[2] == "single" else 12), strict=True)))
    ]  # fmt: skip
    assert len(seen) == len(sensible) > 10


@pytest.mark.parametrize(
    "fields",
    [{}, {"cache": False}, {"weights": "int4", "schedule": "static", "slots": 2},
     {"weights": "bf16", "schedule": "continuous", "slots": 3, "pages": True, "prefix": True}],
)  # fmt: skip
@pytest.mark.parametrize(("shape", "machine"), [("llama-3-8b", "h100"), ("llama-2-13b", "t4")])
def test_predictions_are_those_of_the_formulas(shape, machine, fields):
    shown = configurator(shape, machine, **SMALL, **fields)
    c, device = Configuration(**fields), ACCELERATORS[machine]
    config, work = PUBLISHED[shape], shown.workload
    assert shown.configuration == c
    assert shown.prediction == predict(config, c, work, from_peaks(config, c.weights, device))
    plain = predict(config, Configuration(), work, from_peaks(config, "fp32", device))
    assert shown.baseline == plain
    fits = shown.prediction.memory_bytes <= device.memory_bytes
    assert ("does not fit" in words(shown)) is not fits
    assert bytes(shown.image.value[:4]) == PNG


def test_a_scenario_s_machine_has_its_seconds_besides_a_forward():
    shown = configurator("smollm2-135m", "a small server", **SMALL, weights="int8")
    chat, config = SCENARIOS["chat"], PUBLISHED["smollm2-135m"]
    costs = from_peaks(config, "int8", chat.machine, chat.overhead_s)
    assert shown.prediction == predict(config, shown.configuration, shown.workload, costs)


def test_drafts_gain_what_the_slider_says_and_nothing_without_one():
    shown = configurator("llama-3-8b", "h100", **SMALL, draft="ngram", tokens_per_round=1.0)
    slow = shown.prediction.tokens_per_s
    shown.controls["tokens_per_round"].value = 3.0
    fast = shown.prediction.tokens_per_s
    assert slow < fast < 3 * slow
    shown.controls["guesses"].value = 1  # a round gains two at most
    assert shown.prediction.tokens_per_s < fast
    rate, count = shown.controls["tokens_per_round"], shown.controls["guesses"]
    assert not rate.disabled
    shown.controls["ngram"].value = False
    assert rate.disabled
    assert count.disabled
    assert shown.prediction == shown.baseline
    rate.value = 1.5
    assert shown.prediction == shown.baseline


def test_trained_heads_cost_their_bytes_and_their_reading():
    rows = {}
    for draft in ("ngram", "medusa", "eagle"):
        shown = configurator(**SMALL, draft=draft, tokens_per_round=2.0)
        rows[draft] = shown.prediction
    assert rows["ngram"].weight_bytes < min(rows["medusa"].weight_bytes, rows["eagle"].weight_bytes)
    speeds = [rows[name].tokens_per_s for name in ("ngram", "medusa", "eagle")]
    assert speeds == sorted(speeds, reverse=True)  # Medusa's are read once a round


def test_one_schedule_and_one_draft_at_a_time():
    shown = configurator(**SMALL, schedule="static")
    shown.controls["continuous"].value = True
    assert (shown.controls["static"].value, shown.fields["schedule"]) == (False, "continuous")
    shown = configurator(**SMALL, draft="ngram")
    shown.controls["eagle"].value = True
    assert (shown.controls["ngram"].value, shown.fields["draft"]) == (False, "eagle")
    shown.controls["eagle"].value = False
    assert shown.fields["draft"] is None


def test_the_student_is_smaller_and_faster_for_every_shape():
    for shape in ("smollm2-135m", "llama-3-8b", "llama-2-13b"):
        shown = configurator(shape, "a100", **SMALL)
        shown.controls["student"].value = True
        assert shown.prediction.memory_bytes < shown.baseline.memory_bytes
        assert shown.prediction.tokens_per_s > shown.baseline.tokens_per_s


def test_reasons_are_said_in_words_once_each():
    shown = configurator(**SMALL, draft="ngram")
    said = words(shown)
    assert said.count("speculation spends the computing") == 1
    for name in ("static batch", "continuous batch"):
        assert name in said
    assert said.count("a draft is verified on top of what was read") == 1
    assert shown.image.tooltip  # a screen reader gets the words too


def test_an_excluded_setting_from_code_is_refused_in_words():
    shown = configurator(**SMALL)
    shown.controls["prefix"].value = True
    assert (shown.configuration, shown.prediction) == (None, None)
    assert "excluded: what is shared are pages" in words(shown)
    assert shown.image.value == b""
    shown.controls["prefix"].value = False
    assert shown.configuration == Configuration()


def test_bars_are_as_long_as_what_they_show():
    shown = configurator("llama-3-8b", "h100", **SMALL, weights="int4", schedule="static")
    bars = shown._picture.bars
    both = (shown.baseline, shown.prediction)
    for place, values in enumerate(
        ([[p.tokens_per_s] for p in both], [[p.ttft_s] for p in both],
         [[p.weight_bytes, p.cache_bytes] for p in both])
    ):  # fmt: skip
        unit = bars[place, 0, 0].get_width() / values[0][0]
        for row, parts in enumerate(values):
            left = 0.0
            for part, value in enumerate(parts):
                assert bars[place, row, part].get_width() == pytest.approx(unit * value)
                assert bars[place, row, part].get_x() == pytest.approx(left)
                left += unit * value
            assert left < 1


def test_this_machine_is_measured_only_when_chosen(monkeypatch):
    def measured(name: str) -> Accelerator:
        asked.append(name)
        return Accelerator("this one", {"fp32": 1e11, "bf16": 1e11}, 1e10, 8e9, "made up", True)

    asked: list[str] = []
    module = sys.modules[configurator.__module__]  # the package's name for it is the function's
    monkeypatch.setattr(module, "accelerator_named", measured)
    shown = configurator(**SMALL)
    assert asked == []
    shown.controls["machine"].value = "this machine"
    assert asked == ["this machine"]
    assert shown.prediction.tokens_per_s > 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [({"requests": 0}, ValueError, "requests is 0"), ({"shared": 2000}, ValueError, "0 to 1024"),
     ({"new": 1.5}, ValueError, "new is 1.5"), ({"asks": True}, ValueError, "asks is True"),
     ({"tokens_per_round": 0.5}, ValueError, "tokens_per_round is 0.5"),
     ({"tokens_per_round": "2"}, ValueError, "tokens_per_round is '2'"),
     ({"guesses": 9, "draft": "ngram"}, ValueError, "guesses is 9"),
     ({"colour": 1}, ValueError, "'colour' is no"),
     ({"weights": "fp8"}, ValueError, "weights='fp8'"), ({"shape": "gpt"}, ValueError, "shape"),
     ({"machine": "abacus"}, ValueError, "machine is 'abacus'"),
     ({"prefix": True}, Incompatible, "pages=True")],
)  # fmt: skip
def test_a_start_that_cannot_be_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        configurator(**given)


def test_a_start_s_fields_are_what_the_controls_show():
    c = Configuration("int4", schedule="continuous", slots=5, pages=True, prefix=True)
    shown = configurator(**SMALL, **asdict(c))
    assert shown.configuration == c
    assert shown.controls["slots"].value == 5
    assert configurator(**SMALL, schedule="static").configuration.slots == 12
