"""The widgets of 06 and 07 in Chromium: by keyboard and mouse, with names, on one slide each."""

import pytest

SOURCE = """\
# %% [markdown]
# # Toy

# %%
import torch

from lecture_util.classroom.widgets import (
    importance_map,
    layers_kept,
    quantization_explorer,
    weight_inspector,
)
from lecture_util.model.config import PUBLISHED

# %%
order = [3, 1, 6, 5]
record = {
    "date": "2026-11-29",
    "hardware": "a made-up machine",
    "layers": {
        str(8 - n): {
            "dropped": order[:n], "perplexity": 20 * 2**n, "weight_bytes": 10**8 - n * 10**7,
            "tokens_per_cpu_s": 30 + n, "times_as_fast": 1 + n / 9,
            "predicted_times_as_fast": 1 + n / 8,
        }
        for n in range(5)
    },
    "layers repaired": {"4": {"after": 40, "options": {"steps": 20, "B": 4, "T": 64}}},
}
torch.manual_seed(0)
maps = {
    "heads": torch.rand(30, 9) ** 3, "neurons": torch.rand(30, 1536) ** 3,
    "channels": torch.rand(576) ** 3, "layers": torch.rand(30) ** 3,
}

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
quantization_explorer(torch.randn(960, 576), outlier=5)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
quantization_explorer(shows="activations", bits=8, threshold=6)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
weight_inspector(group_size=64)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
layers_kept(record, kept=5)

# %% slideshow={"slide_type": "slide"} tags=["nbval-ignore-output"]
importance_map(maps, PUBLISHED["smollm2-135m"], lambda pick: f"on_pick heard {pick.start}")
"""
SLIDES = {"weights": 3, "activations": 4, "inspector": 5, "kept": 6, "importance": 7}


@pytest.mark.parametrize(
    ("name", "handle", "key", "times", "value", "words"),
    [
        ("weights", "bits", "ArrowLeft", 2, "2", "2 bits, symmetric"),
        ("weights", "largest one ×", "ArrowRight", 1, "10", "2 bits, symmetric"),
        ("activations", "fp16 from", "End", 1, "50", "of 384 columns"),
        ("inspector", "value", "ArrowRight", 3, "3", "Column 3"),
        ("kept", "layers kept", "ArrowLeft", 1, "4", "without 1, 3, 5, 6"),
    ],
)
def test_a_slider_moved_by_keyboard_changes_the_picture_and_the_text(
    moved_by_keyboard, name, handle, key, times, value, words
):
    moved_by_keyboard(name, handle, key, times, value, words)


def test_every_slider_has_a_name(slide):
    for name in ("weights", "activations", "inspector", "kept"):
        sliders = slide(name).get_by_role("slider").all()
        assert sliders
        for one in sliders:
            assert one.get_attribute("aria-label")


def test_the_bytes_of_a_group_are_a_table_with_row_heads(slide, wait_for):
    output = slide("inspector")
    output.get_by_role("combobox", name="stored as").select_option("NF4")
    wait_for(output, "level × absmax")
    heads = output.get_by_role("rowheader")
    assert heads.filter(has_text="byte").count() >= 3
    assert heads.filter(has_text="absmax in fp32").count() == 1
    output.get_by_role("combobox", name="stored as").select_option("int4 zero-point")
    wait_for(output, "(code – zero) × scale")  # the highest of them: it stays for what follows


def test_nf4_greys_the_bits(slide, wait_for):
    output = slide("weights")
    output.get_by_role("combobox", name="grid").select_option("NF4")
    wait_for(output, "NF4, one scale a row")
    slider = output.locator(".widget-slider", has_text="bits").first
    assert slider.locator("[disabled]").count() or "disabled" in slider.inner_html()
    output.get_by_role("combobox", name="grid").select_option("symmetric")


def test_arrow_keys_pick_a_cell_and_leave_the_slide_where_it_is(slide, press, wait_for, picture):
    output = slide("importance")
    cells = output.get_by_role("application", name="Importance of heads")
    before = picture(cells)
    press(cells, "ArrowDown")  # the first key picks the first cell
    wait_for(output, "Layer 0, heads")
    press(cells, "ArrowDown", 2)
    press(cells, "ArrowRight", 4)
    wait_for(output, "Layer 2, heads")
    wait_for(output, "KV head 1 with its query heads 3 to 5")
    wait_for(output, "on_pick heard 4")
    press(cells, "End")
    wait_for(output, "on_pick heard 8")
    assert cells.is_visible()
    assert picture(cells) != before


def test_a_click_picks_the_cell_under_it(slide, wait_for):
    output = slide("importance")
    output.get_by_role("combobox", name="map").select_option("layers")
    cells = output.get_by_role("application", name="Importance of layers")
    cells.wait_for()
    box = cells.bounding_box()
    width = (box["width"] - 84 - 8) / 30
    cells.click(position={"x": 84 + 7.5 * width, "y": 34 + 10})
    wait_for(output, "on_pick heard 7")
    wait_for(output, "its attention, its MLP, its two norms and its cache: 3,540,096 weights")
    output.get_by_role("combobox", name="map").select_option("neurons")
    wait_for(output, "Click a cell")


def test_escape_gives_the_keys_back_to_the_deck(stage, slide, press):
    output = slide("importance")
    output.get_by_role("combobox", name="map").select_option("channels")
    cells = output.get_by_role("application", name="Importance of channels")
    cells.wait_for()
    press(cells, "Escape")
    assert not stage.evaluate("() => Boolean(document.activeElement.closest('.heat-map'))")


@pytest.mark.parametrize("name", SLIDES)
def test_each_widget_fits_a_slide(fits, name):
    assert fits(name)
