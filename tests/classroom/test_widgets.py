"""A moved slider shows the accounting's number, and nothing a draw does is lost."""

import ipywidgets
import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from lecture_util.classroom.widgets import explore, latency_explorer, roofline_explorer
from lecture_util.classroom.widgets.explorers import layer_cost
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, DTYPE_BYTES, attention, decode_step, matmul, mlp

matplotlib.use("agg")
PNG = b"\x89PNG"


def line(B: int) -> tuple[Figure, str]:
    fig, ax = plt.subplots()
    ax.plot([0, B])
    return fig, f"intensity **{B}**"


def test_moving_a_slider_changes_picture_and_text_and_leaves_no_figure_open():
    before = plt.get_fignums()
    explorer = explore(line, B=(1, 8, 1))
    explorer.controls["B"].value = 2
    text, png = explorer.text.value, bytes(explorer.image.value)
    explorer.controls["B"].value = 7
    assert "<b>2</b>" in text
    assert "<b>7</b>" in explorer.text.value
    assert png.startswith(PNG)
    assert bytes(explorer.image.value) != png
    assert plt.get_fignums() == before


def test_an_error_is_shown_in_red_and_goes_when_mended():
    def draw(n):
        plt.figure()
        return f"{1 / n}" if n != 2 else [n]

    before = plt.get_fignums()
    explorer = explore(draw, n=(0, 2, 1))
    explorer.controls["n"].value = 0
    assert "ZeroDivisionError: division by zero" in explorer.text.value
    assert "#B00020" in explorer.text.value
    explorer.controls["n"].value = 1
    assert "1.0" in explorer.text.value
    assert "#B00020" not in explorer.text.value
    explorer.controls["n"].value = 2
    assert "return a Figure, text, or both" in explorer.text.value
    assert plt.get_fignums() == before


def test_an_error_s_message_cannot_inject_markup():
    def draw(ok):
        raise ValueError("<script>alert(1)</script>")

    assert "<script>" not in explore(draw, ok=True).text.value


@pytest.mark.parametrize(
    ("short", "kind"),
    [
        ((1, 8, 1), ipywidgets.IntSlider),
        ((0.0, 1.0, 0.1), ipywidgets.FloatSlider),
        ([1, 2, 4, 1024], ipywidgets.SelectionSlider),
        (["bf16", "int8"], ipywidgets.Dropdown),
        ({"half": 0.5}, ipywidgets.Dropdown),
        (True, ipywidgets.Checkbox),
    ],
)
def test_short_forms_of_controls(short, kind):
    explorer = explore(lambda value: str(value), value=short)
    assert isinstance(explorer.controls["value"], kind)


@pytest.mark.parametrize("short", [[], object(), None])
def test_a_control_that_is_none_of_these_is_named(short):
    with pytest.raises(ValueError, match="control batch="):
        explore(lambda batch: str(batch), batch=short)


def test_without_a_front_end_an_explorer_is_one_stable_line():
    printed = repr(latency_explorer())
    assert printed == repr(latency_explorer())
    assert "\n" not in printed
    assert len(printed) <= 110


def test_no_picture_goes_through_an_output_widget():
    def kinds(widget):
        yield type(widget)
        for child in getattr(widget, "children", ()):
            yield from kinds(child)

    assert ipywidgets.Output not in set(kinds(roofline_explorer()))


def test_descriptions_have_room():
    for control in latency_explorer().controls.values():
        width = float(control.style.description_width.removesuffix("em"))
        assert width > 0.6 * len(control.description)


@pytest.mark.parametrize(
    ("B", "memory", "latency", "throughput", "fits"),
    [(1, "26.87", "8.02", "124.7", True), (64, "79.72", "23.8", "2,689", True),
     (256, "240.8", "71.87", "3,562", False)],
)  # fmt: skip
def test_latency_explorer_shows_the_lecture_s_numbers(B, memory, latency, throughput, fits):
    explorer = latency_explorer()
    explorer.controls["B"].value = B
    text = explorer.text.value
    assert f"{memory} GB" in text
    assert f"{latency} ms" in text.replace("8.021", "8.02")
    assert f"{throughput} tokens/s" in text
    assert ("does not fit" not in text) is fits


@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3-8b"])
@pytest.mark.parametrize("accelerator", ["t4", "h200"])
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
def test_latency_explorer_shows_the_accounting_s_numbers(model, accelerator, dtype):
    explorer = latency_explorer(model, accelerator)
    explorer.controls["B"].value, explorer.controls["S"].value = 32, 4096
    explorer.controls["dtype"].value = dtype
    step = decode_step(
        PUBLISHED[model], 32, 4096, ACCELERATORS[accelerator], dtype_bytes=DTYPE_BYTES[dtype]
    )
    shown = explorer.text.value.replace(",", "")
    assert f"{float(f'{step.memory_bytes / 1e9:.4g}'):g} GB" in shown
    assert f"{float(f'{step.latency_s * 1e3:.4g}'):g} ms" in shown
    assert ("does not fit" not in shown) == step.fits


def test_roofline_explorer_s_layers_are_the_accounting_s():
    config = PUBLISHED["llama-2-13b"]
    D, F, N, H = config.D, config.F, config.N, config.H
    assert layer_cost("matmul D×F", config, 8, 2, 64, 1) == matmul(16, D, F)
    assert layer_cost("MLP", config, 8, 2, 64, 1) == mlp(8, 2, D, F)
    assert layer_cost("attention", config, 8, 2, 64, 5) == attention(8, 64, 2, N, N // 5, H)


def test_roofline_explorer_says_which_limit_binds():
    explorer = roofline_explorer()
    assert "memory-bound" in explorer.text.value
    explorer.controls["B"].value = 1024
    assert "compute-bound" in explorer.text.value
    explorer.controls["layer"].value = "attention"
    assert "memory-bound" in explorer.text.value
    explorer.controls["G"].value = 8
    intensity = attention(1024, 1024, 1, 40, 5, 128).intensity
    assert f"{intensity:.3g} FLOPs per byte" in explorer.text.value
    explorer.controls["accelerator"].value = "t4"  # computes in fp16 only
    assert "ridge 203" in explorer.text.value


def test_an_unknown_model_or_accelerator_is_named():
    with pytest.raises(ValueError, match="gpt-5"):
        latency_explorer("gpt-5")
    with pytest.raises(ValueError, match="abacus"):
        roofline_explorer("abacus")
