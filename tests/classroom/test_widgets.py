"""A moved slider shows the accounting's number, and nothing a draw does is lost."""

import itertools
import re

import ipywidgets
import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from lecture_util.classroom.widgets import Race, explore, latency_explorer, race, roofline_explorer
from lecture_util.classroom.widgets import roofline as roofline_module
from lecture_util.classroom.widgets.latency import BEYOND, LatencyPicture
from lecture_util.classroom.widgets.layers import LAYERS, layer_cost, measure_layer
from lecture_util.classroom.widgets.runs import Run, Stopped, stream_naive
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.model.generate import PromptError, generate_naive
from lecture_util.model.transformer import Transformer
from lecture_util.roofline import (
    ACCELERATORS,
    DTYPE_BYTES,
    Accelerator,
    attention,
    decode_step,
    kv_cache_bytes,
    matmul,
    mlp,
    weight_bytes,
)

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


def test_the_picture_s_words_are_plain():
    explorer = explore(lambda B: (line(B)[0], f"**{B}**, done<br>well"), B=(1, 8, 1))
    assert explorer.image.tooltip == "4, done well"


def canvas_of(explorer):
    """What draws the explorer's picture."""
    draw = explorer.draw
    return draw.canvas if isinstance(draw, LatencyPicture) else explorer.canvas


@pytest.mark.parametrize("make", [roofline_explorer, latency_explorer])
def test_a_dragged_slider_redraws_only_what_moves(make):
    explorer = make()
    took_s, pictures = [], set()
    for B in (2, 4, 8, 16, 32, 64, 128, 256):
        explorer.controls["B"].value = B
        took_s.append(explorer.redraw_s)
        pictures.add(bytes(explorer.image.value))
    explorer.controls["S"].value = 4096
    assert canvas_of(explorer).still_draws == 1
    assert len(pictures) == 8
    print(f"{make.__name__}: {1e3 * max(took_s):.0f} ms at most for a move of B")
    explorer.controls["accelerator"].value = "a100"
    assert canvas_of(explorer).still_draws == 2
    print(f"{make.__name__}: {1e3 * explorer.redraw_s:.0f} ms for another accelerator")


@pytest.mark.parametrize("make", [roofline_explorer, latency_explorer])
def test_a_move_and_its_way_back_give_the_same_picture(make):
    explorer = make()
    first = bytes(explorer.image.value)
    explorer.controls["B"].value = 1024
    explorer.controls["B"].value = 1
    assert bytes(explorer.image.value) == first


@pytest.mark.parametrize("B", [1, 64, 128, 1024])
def test_the_memory_bar_ends_at_the_wall_and_what_is_over_is_hatched(B):
    explorer = latency_explorer()
    explorer.controls["B"].value = B
    config, room = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"].memory_bytes
    weights, cache = weight_bytes(config), kv_cache_bytes(config, B, 1024)
    picture = explorer.draw
    widths = {name: part.get_width() for name, part in picture.parts.items()}
    assert widths["weights"] == weights
    assert widths["cache"] == pytest.approx(min(cache, room - weights))
    assert widths["does not fit"] == pytest.approx(max(0, weights + cache - room))
    assert picture.parts["does not fit"].get_hatch()
    over = picture.amounts["does not fit"].get_text()
    assert (over == "does not fit: nothing") == (weights + cache <= room)
    assert picture.more.get_visible() == (weights + cache > BEYOND * room)
    assert picture.here.get_marker() == ("o" if weights + cache <= room else "X")


def test_weights_alone_may_not_fit():
    explorer = latency_explorer("llama-2-13b", "t4")
    widths = {name: part.get_width() for name, part in explorer.draw.parts.items()}
    assert widths["weights"] == ACCELERATORS["t4"].memory_bytes
    assert widths["cache"] == 0
    assert len(explorer.draw.fitting.get_xdata()) == 0


TOY_MACHINE = Accelerator("toy", {"fp32": 1e11, "bf16": 1e11}, 1e10, 8e9, "made up", True)


@pytest.fixture
def toy_machine(monkeypatch):
    """This machine's roofline without the seconds that it takes to measure."""
    monkeypatch.setattr("lecture_util.classroom.widgets.choices.this_machine", lambda: TOY_MACHINE)
    monkeypatch.setattr("lecture_util.classroom.widgets.layers.this_machine", lambda: TOY_MACHINE)


def test_measured_points_are_drawn_on_this_machine_s_roofline(toy_machine):
    explorer = roofline_explorer(measured=[("B=1", 1.0, 9e9), ("B=8", 8.0, 7e10)])
    assert explorer.values["accelerator"] == "this machine"
    assert list(explorer.seen.get_xdata()) == [1.0, 8.0]
    assert list(explorer.seen.get_ydata()) == [9e9, 7e10]
    assert "ridge 10" in explorer.text.value


def test_measure_here_leaves_the_point_and_turns_to_this_machine(toy_machine, monkeypatch):
    asked = []

    def measured(layer, config, *sizes):
        asked.append((layer, *sizes))
        return 8.0, 5e10

    monkeypatch.setattr(roofline_module, "measure_layer", measured)
    explorer = roofline_explorer()
    explorer.controls["B"].value = 8
    explorer.button.click()
    assert asked == [("MLP", 8, 1, 1024, 1)]
    assert explorer.measured == [("MLP B=8", 8.0, 5e10)]
    assert explorer.values["accelerator"] == "this machine"
    assert "MLP B=8: 50 GFLOP/s" in explorer.note.value
    explorer.controls["B"].value = 16  # the point stays when the slider goes on
    assert list(explorer.seen.get_ydata()) == [5e10]


def test_what_would_take_too_long_is_refused_before_it_starts(toy_machine):
    explorer = roofline_explorer()
    explorer.controls["B"].value = 1024
    explorer.controls["T"].value = 4096
    explorer.button.click()
    assert "Not measured: takes at least" in explorer.note.value
    assert explorer.measured == []
    with pytest.raises(ValueError, match=r"needs 21\.48 GB"):
        measure_layer("attention", PUBLISHED["llama-2-13b"], 128, 1, 8192, 1)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_measured_here_has_the_accounting_s_intensity(toy_machine, layer):
    config, sizes = PUBLISHED["smollm2-135m"], (4, 2, 64, 3)
    intensity, rate = measure_layer(layer, config, *sizes)
    assert intensity == layer_cost(layer, config, *sizes).intensity
    assert rate > 0


def test_a_model_s_name_picks_the_shapes():
    explorer = roofline_explorer(model="smollm2-135m")
    config = PUBLISHED["smollm2-135m"]
    assert f"{mlp(1, 1, config.D, config.F).bytes / 1e6:.3g} MB" in explorer.text.value
    with pytest.raises(ValueError, match="gpt-5"):
        roofline_explorer(model="gpt-5")


class Letters:
    """A tokenizer whose token t is a letter."""

    eos_token_id = None

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(ord("a") + token % 26) for token in tokens)


@pytest.fixture(scope="module")
def toy_model():
    return Transformer.random(Config(D=16, F=32, K=2, G=2, H=4, L=2, V=26, max_context=64))


def toy_race(model, num_tokens: int = 6) -> Race:
    return race(model, Letters(), [1, 2, 3], max_new_tokens=num_tokens)


def shown(lane) -> str:
    """A lane's text as a reader sees it, so far."""
    text = re.search(r'<span style="color:#666">.*?</span>(.*?)<span', lane.value, re.S)
    return text[1]


def test_the_race_streams_what_the_model_generates(toy_model):
    prompt = [1, 2, 3]
    assert list(stream_naive(toy_model, prompt, 6)) == generate_naive(toy_model, prompt, 6)
    last = generate_naive(toy_model, prompt, 6)[2]
    assert list(stream_naive(toy_model, prompt, 6, eos=[last])) == generate_naive(
        toy_model, prompt, 6, eos=[last]
    )


def test_a_race_ends_with_both_texts_and_says_that_they_are_identical(toy_model):
    toy = toy_race(toy_model)
    runs = toy.record()
    toy.play(speed=100)
    tokens = generate_naive(toy_model, [1, 2, 3], 6)
    assert runs["naive"].tokens == runs["cached"].tokens == tuple(tokens)
    assert [shown(lane) for lane in toy.lanes.values()] == [Letters().decode(tokens)] * 2
    assert "<b>Identical texts</b>, 6 tokens" in toy.note.value
    assert "Each ran alone on this machine" in toy.note.value
    for run in runs.values():
        assert len(run.times_s) == 6
        assert list(run.times_s) == sorted(run.times_s)


def test_the_replay_shows_each_token_when_it_came(toy_model):
    toy = toy_race(toy_model, 3)
    slow = Run((1, 2, 3), ("b", "bc", "bcd"), (1.0, 2.0, 4.0))
    fast = Run((1, 2, 3), ("b", "bc", "bcd"), (1.0, 1.5, 2.0))
    toy.runs = {"naive": slow, "cached": fast}
    toy._show(1.9)
    assert [shown(lane) for lane in toy.lanes.values()] == ["b", "bc"]
    toy._show(3.0)
    naive, cached = (lane.value for lane in toy.lanes.values())
    assert "3.0 s" in naive and "2 tokens" in naive and "0.7 tok/s" in naive
    assert "2.0 s" in cached and "3 tokens" in cached and "1.5 tok/s" in cached  # its clock stands
    assert "✓ done" in cached and "✓ done" not in naive
    assert "4.00 s without a cache, 2.00 s with one, <b>2.0 times faster</b>" in toy.verdict()


def test_texts_that_part_are_not_called_identical(toy_model):
    toy = toy_race(toy_model, 3)
    toy.runs = {
        "naive": Run((1, 2, 3), ("b", "bc", "bcd"), (1.0, 2.0, 4.0)),
        "cached": Run((1, 2, 4), ("b", "bc", "bce"), (1.0, 1.5, 8.0)),
    }
    assert "<b>Different texts</b>" in toy.verdict()
    assert "part after 2 tokens" in toy.verdict()
    assert "2.0 times slower" in toy.verdict()


def test_start_runs_beside_the_cells_and_starts_again_from_what_it_recorded(toy_model):
    toy = toy_race(toy_model)
    toy.buttons[0].click()
    toy._thread.join(30)
    assert "Identical" in toy.note.value
    recorded = toy.runs
    toy.buttons[0].click()
    toy._thread.join(30)
    assert toy.runs is recorded
    toy.buttons[2].click()
    toy._thread.join(30)
    assert toy.runs is not recorded


def test_stop_ends_a_run_that_is_being_recorded_and_keeps_nothing(toy_model):
    toy = toy_race(toy_model)
    toy.stop()
    with pytest.raises(Stopped):
        toy.record()
    assert toy.runs == {}


def test_an_error_in_the_race_is_shown(toy_model, monkeypatch):
    toy = toy_race(toy_model)
    monkeypatch.setattr(toy, "record", lambda: 1 / 0)
    toy.start()
    toy._thread.join(30)
    assert "ZeroDivisionError" in toy.note.value


def test_a_race_that_cannot_be_run_is_refused_at_once(toy_model):
    with pytest.raises(PromptError, match="context is 64"):
        toy_race(toy_model, 100)
    with pytest.raises(ValueError, match="at least 1"):
        toy_race(toy_model, 0)


def test_without_a_front_end_a_race_is_one_stable_line(toy_model):
    printed = repr(toy_race(toy_model))
    assert printed == repr(toy_race(toy_model))
    assert "\n" not in printed


@pytest.mark.parametrize("name", ["roofline", "latency", "race"])
def test_every_control_has_words_for_a_screen_reader(name, toy_model):
    made = {"roofline": roofline_explorer, "latency": latency_explorer}
    widget = made[name]() if name in made else toy_race(toy_model)

    def all_of(one):
        return [one, *itertools.chain(*(all_of(child) for child in getattr(one, "children", ())))]

    controls = [
        one for one in all_of(widget) if hasattr(one, "value") or isinstance(one, ipywidgets.Button)
    ]
    assert len(controls) > 4
    for one in controls:
        if not isinstance(one, ipywidgets.HTML | ipywidgets.Image):
            assert one.description
        if isinstance(one, ipywidgets.Image):
            assert one.tooltip


def test_a_draw_that_is_no_function_and_a_nan_are_refused():
    with pytest.raises(TypeError, match="draw=None is not a function"):
        explore(None, B=[1, 2])
    with pytest.raises(ValueError, match=r"control B=\[nan\] holds nan"):
        explore(line, B=[float("nan")])


def test_a_race_without_a_prompt_or_with_half_a_token_is_refused(toy_model):
    with pytest.raises(TypeError, match="prompt is None: pass text"):
        race(toy_model, Letters(), None, 4)
    with pytest.raises(ValueError, match=r"max_new_tokens=1\.5: a race needs an int"):
        race(toy_model, Letters(), [1, 2], 1.5)
