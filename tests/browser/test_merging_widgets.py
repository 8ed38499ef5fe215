"""The widgets of 11 in Chromium: by keyboard and mouse, with names, on one slide each."""

import re

import pytest

SOURCE = """\
# %% [markdown]
# # Toy

# %%
from lecture_util.classroom.widgets import density_sliders, slerp_against_lerp, ties_step_by_step
from lecture_util.merging.tiny_tasks import (
    PRACTISED, evaluate, fine_tune, state, tiny_base, with_state,
)

base = tiny_base(steps=120)
states = {name: state(fine_tune(base, name, steps=20)) for name in PRACTISED}

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
slerp_against_lerp(0.3, degrees=120, fine_tunes=(0.31, 1.0002))

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
ties_step_by_step()

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
density_sliders(states, state(base), lambda weights: {
    name: evaluate(with_state(base, weights), name, B=64) for name in PRACTISED
})
"""
SLIDES = {"slerp": 2, "ties": 3, "density": 4}
KEYS = re.compile("arrow keys step")


@pytest.mark.parametrize("name", SLIDES)
def test_each_widget_fits_a_slide(fits, name):
    assert fits(name)


@pytest.mark.parametrize("name", SLIDES)
def test_sliders_and_menus_have_names(slide, name):
    output = slide(name)
    sliders = output.get_by_role("slider").all()
    assert sliders
    assert all(one.get_attribute("aria-label") for one in sliders)
    for one in output.get_by_role("combobox").all():
        assert one.evaluate("one => one.labels.length && one.labels[0].textContent")


def test_angle_and_t_move_the_arc_by_keyboard(moved_by_keyboard):
    moved_by_keyboard("slerp", "angle", "ArrowLeft", 10, "90°", "angle 90°")
    moved_by_keyboard("slerp", "t", "Home", 1, "0.00", "at t = 0")


def test_presets_are_buttons_for_the_keyboard(slide, press, wait_for):
    output = slide("slerp")
    for name, words in (
        ("opposite", "no arc is special"),
        ("zero vector", "no angle to divide"),
        ("parallel", "there is no arc"),
        ("two real fine-tunes", "lie on each other"),
    ):
        press(output.get_by_role("button", name=name, exact=True), "Enter")
        wait_for(output, words)
    angle = output.get_by_role("slider", name="angle", exact=True)
    assert angle.get_attribute("aria-valuetext") == "0.31°"


def test_ties_steps_by_buttons_arrows_and_space(slide, press, wait_for):
    output = slide("ties")
    shown = output.get_by_role("group", name=KEYS)
    wait_for(output, "Step 0 of 4")
    output.get_by_role("button", name="next ▶").click()
    wait_for(output, "Step 1 of 4")
    press(shown, "ArrowRight")
    wait_for(output, "Step 2 of 4")
    press(shown, " ")
    wait_for(output, "Step 3 of 4")
    assert shown.locator("title", has_text="against the elected sign").count() == 1
    press(output.get_by_role("slider", name="step"), "ArrowRight")
    wait_for(output, "Step 4 of 4")
    press(shown, "ArrowLeft", 2)
    wait_for(output, "Step 2 of 4")
    picture = output.get_by_role("img", name=re.compile("TIES on three task vectors"))
    before = picture.get_attribute("aria-label")
    press(output.get_by_role("slider", name="density"), "End")
    output.get_by_label("7, 7 and 7 changes left").wait_for(timeout=10_000)
    assert picture.get_attribute("aria-label") != before


def test_a_sum_of_zero_follows_the_menu_and_vectors_are_typed(slide, press, wait_for):
    output = slide("ties")
    press(output.get_by_role("slider", name="step"), "Home")
    press(output.get_by_role("slider", name="step"), "ArrowRight", 2)
    output.get_by_role("combobox", name="example").select_option("sums of 0")
    wait_for(output, "the majority of weights, −")
    output.get_by_role("combobox", name="sum of 0").select_option("mergekit: positive")
    wait_for(output, "+ there, always")
    field = output.get_by_role("textbox", name="vector 2")
    field.fill("1 2 three 4 5 6")
    press(field, "Enter")
    wait_for(output, "'three' is no number")
    field.fill("1 2 3 4 5 6")
    press(field, "Tab")
    wait_for(output, "Step 2 of 4")


def test_density_moves_bars_and_text_by_keyboard(moved_by_keyboard):
    moved_by_keyboard("density", "density", "Home", 1, "0.01", "density 0.01")
    moved_by_keyboard("density", "scale", "ArrowRight", 4, "1", "1 × mean")


def test_methods_sweeps_and_refusals_are_told(slide, press, wait_for, picture):
    output = slide("density")
    output.get_by_role("combobox", name="method").select_option("della")
    press(output.get_by_role("slider", name="density"), "End")
    wait_for(output, "density 1, drop rate 0")
    press(output.get_by_role("slider", name="density"), "Home")
    wait_for(output, "spans -0.06 to 0.08")
    press(output.get_by_role("slider", name="epsilon"), "Home")
    wait_for(output, "drop rate 0.99")
    press(output.get_by_role("button", name="forget"), " ")
    wait_for(output, "1 tried so far")
    image = output.get_by_role("img")
    before = picture(image)
    press(output.get_by_role("button", name="sweep"), "Enter")
    wait_for(output, "10 tried so far")
    output.page.wait_for_timeout(700)
    assert picture(image) != before
    output.get_by_role("combobox", name="method").select_option("task arithmetic")
    wait_for(output, "× sum")
