"""The widgets of 09 and 10 in Chromium: by keyboard and mouse, with names, on one slide each."""

import re

import pytest

SOURCE = """\
# %% [markdown]
# # Toy

# %%
from lecture_util.classroom.widgets import (
    block_table_explorer,
    engine_stepper,
    schedule_explorer,
    waste_explorer,
)
from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer
from lecture_util.model.weights import load_tokenizer
from lecture_util.serving.engine import Engine
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import Params, Request
from lecture_util.serving.scheduler import Policy

tokenizer = load_tokenizer()
config = Config(D=16, F=24, K=1, G=2, H=8, L=2, V=tokenizer.vocab_size, max_context=256)
model = Transformer.random(config, seed=0)
system = "You are a helpful assistant that answers in one short sentence. "
asked = ["What is the capital of France?", "Why is the sky blue?", "Who are you?", "And now?"]
requests = [
    Request(tokenizer.encode(system + words), Params(9, samples=1 + (i == 2)), arrival_s=2.0 * i)
    for i, words in enumerate(asked)
]

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
schedule_explorer(8)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
engine_stepper(
    Engine(model, PagedCache(config, 48, 4), Policy(slots=5, token_budget=32), VirtualClock()),
    requests, tokenizer,
)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
block_table_explorer(events=("begin the cat sat on the mat", "fork A"))

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
waste_explorer()
"""
SLIDES = {"schedule": 2, "engine": 3, "tables": 4, "waste": 5}
KEYS = re.compile("arrow keys step")


@pytest.mark.parametrize("name", SLIDES)
def test_each_widget_fits_a_slide(fits, name):
    assert fits(name)


def test_sliders_have_names_and_move_the_schedule_by_keyboard(slide, press, wait_for):
    for name in ("schedule", "engine", "waste"):
        sliders = slide(name).get_by_role("slider").all()
        assert sliders
        assert all(one.get_attribute("aria-label") for one in sliders)
    output = slide("schedule")
    picture = output.get_by_role("img", name=re.compile("static batching above"))
    before = picture.get_attribute("aria-label")
    press(output.get_by_role("slider", name="arrivals a forward"), "End")
    press(output.get_by_role("slider", name="slots"), "Home")
    picture.and_(output.get_by_label("16 requests in 1 slots")).wait_for(timeout=10_000)
    assert picture.get_attribute("aria-label") != before
    wait_for(output, "wait for the first token")


def test_the_waste_follows_the_page_size_by_keyboard(moved_by_keyboard):
    moved_by_keyboard("waste", "page size, tokens", "End", 1, "512", "255.5 empty slots")


def test_the_engine_steps_by_buttons_arrows_and_space(stage, slide, press, wait_for):
    output = slide("engine")
    on, back = (output.get_by_role("button", name=which) for which in ("next ▶", "◀ back"))
    shown = output.get_by_role("group", name=KEYS)
    on.click()
    wait_for(output, "Forward 1, at 0:")
    press(shown, "ArrowRight")
    wait_for(output, "Forward 2, at 1:")
    press(shown, " ")
    wait_for(output, "Forward 3, at 2:")
    wait_for(output, "were in the prefix cache")
    press(on, " ")
    wait_for(output, "Forward 4, at 3:")
    press(back, "Enter")
    wait_for(output, "Forward 3, at 2:")
    press(shown, "ArrowLeft", 3)
    wait_for(output, "Before the first forward")
    press(output.get_by_role("slider", name="forward"), "ArrowRight", 3)
    wait_for(output, "Forward 3, at 2:")
    for _ in range(5):
        press(shown, "ArrowRight")
        stage.wait_for_timeout(300)
    wait_for(output, "Forward 8, at 7:")
    assert shown.is_visible()  # the deck stood still
    assert shown.get_by_title(re.compile("2 references")).count() > 0


def test_tables_are_played_with_by_keyboard_alone(slide, press, wait_for):
    output = slide("tables")
    names = ("begin", "write", "fork", "free", "look up", "evict", "undo")
    button = {name: output.get_by_role("button", name=name, exact=True) for name in names}
    shown = output.get_by_role("group", name=KEYS)
    press(shown, "ArrowRight")
    wait_for(output, "is copied to page 2 first")
    output.get_by_role("img").get_by_text("copied", exact=True).wait_for()
    press(shown, "ArrowLeft")
    wait_for(output, "Taken back")
    press(button["write"], " ")
    wait_for(output, "is copied to page 2 first")
    words = output.get_by_role("textbox")
    words.fill("the cat sat on a hill")
    press(words, "Tab")
    press(button["begin"], "Enter")
    wait_for(output, "1 page found in the prefix cache and shared")
    press(button["look up"], "Enter")
    wait_for(output, "the first 4 are there")
    output.get_by_role("combobox", name="sequence").select_option("A")
    press(button["free"], "Enter")
    wait_for(output, "A is over")
    press(button["evict"], "Enter")
    wait_for(output, "No page is idle")


def test_the_engine_s_picture_is_as_wide_as_the_slide(slide):
    output = slide("engine")
    wide = output.get_by_role("group", name=KEYS).bounding_box()["width"]
    assert wide > 0.95 * output.first.bounding_box()["width"]
