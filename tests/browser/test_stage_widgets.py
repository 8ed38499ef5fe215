"""The widgets of 01 to 03 in Chromium: by keyboard, named for a screen reader, on one slide."""

import re

import pytest

SOURCE = """\
# %% [markdown]
# # Toy

# %%
from lecture_util.classroom.widgets import latency_explorer, race, roofline_explorer
from lecture_util.model.weights import load, load_tokenizer

model, tokenizer = load(), load_tokenizer()

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
race(model, tokenizer, "The three primary colours are", max_new_tokens=12)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
roofline_explorer(model="smollm2-135m")

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
latency_explorer()
"""
SLIDES = {"race": 2, "roofline": 3, "latency": 4}


def test_the_race_runs_by_keyboard_and_ends_with_identical_texts(slide, press):
    race = slide("race")
    status = race.get_by_role("status")
    press(race.get_by_role("button", name="Start"), "Enter")
    status.get_by_text("Identical texts").wait_for(timeout=60_000)
    texts = []
    for name in ("Without a cache", "With a KV cache"):
        lane = race.get_by_role("group", name=name).inner_text()
        assert "12 tokens" in lane
        texts.append(lane.split("tok/s")[1])
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("The three primary colours are")


def test_the_race_stops_by_keyboard_and_the_kernel_stays_free(slide, press):
    race = slide("race")
    press(race.get_by_role("button", name="Run anew"), "Enter")
    press(race.get_by_role("button", name="Stop"), "Space")
    note = race.get_by_role("status").get_by_text(re.compile("Stopped|Identical"))
    note.wait_for(timeout=30_000)


@pytest.mark.parametrize("name", ["roofline", "latency"])
def test_a_slider_says_its_name_and_its_value(slide, press, name):
    batch = slide(name).get_by_role("slider", name="B, sequences")
    press(batch, "ArrowRight", times=4)
    batch.page.wait_for_timeout(500)
    assert batch.get_attribute("aria-valuetext") == "16"


def test_a_point_measured_by_keyboard_stays_on_the_picture(slide, press):
    roofline = slide("roofline")
    press(roofline.get_by_role("button", name="Measure here"), "Enter")
    roofline.get_by_text(re.compile(r"MLP B=\d+: .* GFLOP/s")).wait_for(timeout=60_000)
    chosen = roofline.get_by_role("combobox", name="accelerator").input_value()
    assert chosen == "this machine"


def test_what_does_not_fit_is_said_in_words(slide, press):
    latency = slide("latency")
    press(latency.get_by_role("slider", name="B, sequences"), "End")
    latency.get_by_role("status").get_by_text("does not fit").wait_for(timeout=5000)
    assert "does not fit" in latency.get_by_role("img").get_attribute("title")


@pytest.mark.parametrize("name", SLIDES)
def test_each_widget_fits_a_slide(fits, name):
    assert fits(name)
