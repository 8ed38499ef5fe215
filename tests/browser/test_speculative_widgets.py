"""The widgets of 08 in Chromium: by keyboard and mouse, with names, on one slide each."""

import re

import pytest

SOURCE = """\
# %% [markdown]
# # Toy

# %%
import torch

from lecture_util.classroom.widgets import (
    speedup_explorer,
    token_ribbon,
    tree_unfolding,
    two_symbol_explorer,
)
from lecture_util.model.weights import load_tokenizer
from lecture_util.speculative.draft import Draft, chain
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.speculate import Round, speculate
from lecture_util.speculative.target import Table

tokenizer = load_tokenizer()

# %%
story = "def add(a, b):\\n    return a + b\\n\\ndef sub(a, b):\\n    return a - b\\n\\n"
prompt = tokenizer.encode("Write these functions again:\\n" + story)
answer = tokenizer.encode(12 * story + "def mul(a, b):\\n    return a * b\\n<|im_end|>")
after = len(prompt)

def recite(tokens):
    logits_V = torch.zeros(tokenizer.vocab_size)
    logits_V[answer[len(tokens) - after]] = 9.0
    return logits_V

def rounds(drafter):
    return speculate(Table(recite), drafter, prompt, len(answer), eos=2)

words = " the| a| its| cat| dog| sun|sat| is| was| shines| on| **| `| mat".split("|")
tree = Draft(range(14), [-1, -1, -1, 0, 0, 1, 2, 3, 3, 5, 6, 7, 7, 8])
example = {"prompt": "Once", "rounds": [
    {"guesses": words, "parents": list(tree.parents), "accepted": [0, 3, 8], "last": "correction",
     "tokens": [" the", " cat", " was", " asleep"]},
    {"guesses": words[:4], "parents": [-1, 0, 1, 2], "accepted": [0, 1, 2, 3], "last": "bonus",
     "tokens": [*words[:4], "<|im_end|>"]},
]}

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
token_ribbon({"n-gram": rounds(NgramDrafter(banned=2)), "tree": example}, tokenizer)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
tree_unfolding(example, at=0)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
tree_unfolding(
    Round(tree, [0, 3, 8], [0, 3, 8, 5], "correction"), tokenizer,
    probabilities=[0.5, 0.2, 0.1, 0.6, 0.2, 0.5, 0.4, 0.7, 0.2, 0.3, 0.3, 0.4, 0.3, 0.5],
)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
speedup_explorer(
    [("n-gram", 8, 3.1, 1.9), ("EAGLE", 4, 2.6, 1.4), ("20 layers", 2, 1.9, 0.9),
     ("20 layers", 4, 2.2, 0.7)],
    costs={"measured here": {1: 29, 5: 52, 9: 65, 17: 66, 33: 84}},
)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
two_symbol_explorer()
"""
SLIDES = {"ribbon": 3, "tree": 4, "tree_end": 5, "speedup": 6, "two_symbols": 7}


@pytest.mark.parametrize("name", SLIDES)
def test_each_widget_fits_a_slide(fits, name):
    assert fits(name)


@pytest.mark.parametrize(
    ("name", "handle", "key", "times", "value", "words"),
    [
        ("speedup", "α, acceptance", "ArrowLeft", 3, "0.77", "α = 0.77"),
        ("speedup", "γ, guesses", "End", 1, "16", "γ = 16"),
        ("two_symbols", "target p(A)", "ArrowLeft", 2, "0.58", "the target wants 0.58 and 0.42"),
        ("two_symbols", "draft q(A)", "Home", 1, "0.00", "A never drawn"),
    ],
)
def test_a_slider_moved_by_keyboard_changes_the_picture_and_the_text(
    moved_by_keyboard, name, handle, key, times, value, words
):
    moved_by_keyboard(name, handle, key, times, value, words)


def test_verifying_at_a_measured_cost_moves_the_best_gamma(slide, wait_for):
    output = slide("speedup")
    output.get_by_role("combobox", name="verifying").select_option("measured here")
    wait_for(output, re.compile(r"× 0.05 \+ (1\.79|2\.28) forwards"))  # 5 tokens or 17
    output.get_by_role("combobox", name="verifying").select_option("flat: any number costs one")
    wait_for(output, "× 0.05 + 1.00 forwards")


def test_every_slider_has_a_name(slide):
    for name in SLIDES:
        sliders = slide(name).get_by_role("slider").all()
        assert sliders
        for one in sliders:
            assert one.get_attribute("aria-label")


@pytest.mark.parametrize(
    ("name", "before", "first", "second"),
    [
        ("ribbon", "Before the first round", "Round 1:", "Round 2:"),
        ("tree", "Nothing is guessed yet", "Guess 0, ␣the", "Guess 1, ␣a"),
    ],
)
def test_buttons_arrow_keys_and_the_slider_step(
    stage, slide, press, wait_for, name, before, first, second
):
    output = slide(name)
    slider = output.get_by_role("slider", name="step" if name == "tree" else "round")
    press(slider, "Home")
    wait_for(output, before)
    on, back = (output.get_by_role("button", name=which) for which in ("next ▶", "◀ back"))
    on.click()
    wait_for(output, first)
    shown = output.get_by_role("group", name=re.compile("arrow keys step"))
    press(shown, "ArrowRight")
    wait_for(output, second)
    press(shown, "ArrowLeft")
    wait_for(output, first)
    press(on, "Enter")
    wait_for(output, second)
    press(back, "ArrowLeft")  # on a button too
    wait_for(output, first)
    press(slider, "ArrowRight")
    wait_for(output, second)
    assert shown.is_visible()  # the deck stood still
    press(shown, "Escape")
    assert not stage.evaluate("() => Boolean(document.activeElement.closest('.stepped'))")


def test_the_ribbon_s_end_is_in_view_and_another_drafter_starts_at_its_end(slide, press, wait_for):
    output = slide("ribbon")
    press(output.get_by_role("slider", name="round"), "End")
    wait_for(output, "tokens a round")
    now = output.locator("[data-now]")
    now.wait_for()
    output.page.wait_for_timeout(500)
    inner = now.bounding_box()
    outer = output.locator("[data-scrolls]").bounding_box()
    assert inner["y"] >= outer["y"]
    assert inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1
    output.get_by_role("combobox", name="drafter").select_option("tree")
    wait_for(output, "4 of 4 guesses accepted")
    assert output.locator("[data-now]").get_by_text("<|im_end|>").count() == 1
    output.get_by_role("combobox", name="drafter").select_option("n-gram")


def test_the_accepted_path_lights_up_and_the_next_round_begins_at_its_start(slide, press, wait_for):
    output = slide("tree")
    press(output.get_by_role("slider", name="step"), "End")
    wait_for(output, "4 tokens from one forward")
    press(output.get_by_role("slider", name="round"), "ArrowRight")
    wait_for(output, "4 guesses are to come")
    press(output.get_by_role("slider", name="round"), "ArrowLeft")
    wait_for(output, "14 guesses are to come")
