"""The widgets of 04 and 05 in Chromium: by keyboard, named for a screen reader, on one slide."""

import re

import pytest

SOURCE = """\
# %% [markdown]
# # Toy

# %%
from lecture_util.classroom.widgets import cache_calculator, mask_viewer, memory_stepper

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
cache_calculator()

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
mask_viewer()

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
memory_stepper()
"""
SLIDES = {"calculator": 2, "masks": 3, "memory": 4}


@pytest.mark.parametrize(
    ("name", "handle", "key", "times", "value", "words"),
    [
        ("calculator", "K, KV heads", "ArrowLeft", 3, "8", "163,840 bytes a token, 5 times less"),
        ("masks", "position of the query", "ArrowLeft", 4, "19", "query 19 sees"),
        ("memory", "tokens seen", "ArrowRight", 19, "20", "KV cache 1.00, window 0.02"),
    ],
)
def test_a_slider_moved_by_keyboard_changes_the_picture_and_the_text(
    moved_by_keyboard, name, handle, key, times, value, words
):
    moved_by_keyboard(name, handle, key, times, value, words)


def test_a_menu_by_keyboard_greys_what_it_makes_idle(slide, wait_for):
    output = slide("calculator")
    output.get_by_role("combobox", name="cached").select_option("an MLA latent")
    wait_for(output, "46,080 bytes a token")
    assert output.get_by_role("combobox", name="W, window").is_disabled()
    output.get_by_role("combobox", name="cached").select_option("keys and values")
    wait_for(output, "163,840 bytes a token")


def test_every_slider_has_a_name(slide):
    for name in SLIDES:
        sliders = slide(name).get_by_role("slider").all()
        assert sliders
        for one in sliders:
            assert one.get_attribute("aria-label")


def test_play_steps_token_by_token_and_stop_goes_back(slide, press, wait_for):
    output = slide("memory")
    seen = output.get_by_role("slider", name="tokens seen")
    press(output.get_by_role("button", name="back to the start"), "Enter")
    wait_for(output, re.compile("After 1 token,"))
    press(output.get_by_role("button", name="play or pause"), "Space")
    wait_for(output, re.compile(r"After ([5-9]|1\d) tokens"))
    press(output.get_by_role("button", name="play or pause"), "Space")
    seen.page.wait_for_timeout(1000)
    rests = seen.get_attribute("aria-valuetext")
    seen.page.wait_for_timeout(1000)
    assert seen.get_attribute("aria-valuetext") == rests
    assert int(rests) >= 5
    press(seen, "ArrowRight")  # and the slider goes on from there
    wait_for(output, f"After {int(rests) + 1} tokens")


@pytest.mark.parametrize("name", SLIDES)
def test_each_widget_fits_a_slide(fits, name):
    assert fits(name)
