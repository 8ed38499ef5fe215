"""The configurator in Chromium: its toggles by keyboard and mouse, on one slide."""

SOURCE = """\
# %% [markdown]
# # Toy

# %%
from lecture_util.classroom.widgets import configurator

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
configurator(weights="int4", student=True, schedule="continuous", pages=True, prefix=True)
"""
SLIDES = {"configurator": 2}


def test_it_fits_a_slide_with_most_toggles_greyed_out(fits):
    assert fits("configurator")


def test_toggles_are_pressed_and_greyed_out_with_their_reasons(slide, press, wait_for):
    output = slide("configurator")
    toggle = {
        name: output.get_by_role("button", name=name, exact=True)
        for name in ("pages", "shared prefix", "n-grams", "EAGLE", "continuous batch", "student")
    }
    assert toggle["n-grams"].is_disabled()
    assert "speculation spends" in toggle["n-grams"].get_attribute("title")
    assert toggle["pages"].is_disabled()
    press(toggle["student"], "Enter")
    wait_for(output, "int4, continuous x12, pages, prefix:")
    press(toggle["shared prefix"], " ")
    toggle["pages"].click()
    wait_for(output, "int4, continuous x12:")
    toggle["continuous batch"].click()
    wait_for(output, "int4, cache:")
    toggle["EAGLE"].click()
    wait_for(output, "int4, cache, eagle x4")
    assert toggle["student"].is_disabled()
    assert toggle["continuous batch"].is_disabled()


def test_sliders_have_names_and_the_picture_follows_them(moved_by_keyboard):
    moved_by_keyboard("configurator", "guesses a round", "End", 1, "8", "int4, cache, eagle x8")
