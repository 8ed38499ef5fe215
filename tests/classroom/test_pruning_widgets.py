"""The widgets of 07 show what was recorded, and count and rank as whole models and SciPy do."""

import copy
import itertools
import json
import re
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from lecture_util.classroom.figures import small_caches
from lecture_util.classroom.widgets import importance_map, layers_kept, records
from lecture_util.classroom.widgets.cells import Cells
from lecture_util.classroom.widgets.heat import COLORS
from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer

matplotlib.use("agg")
PNG = b"\x89PNG"
ORDER = [3, 6, 1, 4]
RECORD = {
    "date": "2031-05-17",
    "hardware": "an abacus, 1 thread",
    "layers": {
        str(8 - n): {
            "dropped": sorted(ORDER[:n]),
            "perplexity": 20.0 * 2**n,
            "weight_bytes": 100_000_000 - 11_000_000 * n,
            "tokens_per_cpu_s": 30 + n,
            "times_as_fast": 1 + n / 10,
            "predicted_times_as_fast": 1 + n / 8,
        }
        for n in (2, 0, 1, 4)  # 5 layers were not recorded
    },
    "layers repaired": {"4": {"after": 41.5, "options": {"steps": 20, "B": 4, "T": 64}}},
}


def changed(path: str, value) -> dict:
    """The record with one entry replaced, or taken out by ... ; path is a/b/c."""
    record = copy.deepcopy(RECORD)
    *way, last = path.split("/")
    at = record
    for step in way:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return record


# --- layers_kept


def test_the_text_says_what_the_record_holds():
    explorer = layers_kept(RECORD)
    text = explorer.text.value
    assert "<b>8 of 8 layers</b>: perplexity <b>20</b>; weights <b>100.0 MB</b>; 30 tokens" in text
    explorer.controls["kept"].value = 4
    text = explorer.text.value
    assert "<b>4 of 8 layers</b>, without 1, 3, 4, 6: perplexity <b>320</b>" in text
    assert "after 20 steps of 4×64 tokens <b>41.5</b> (whole model 20)" in text
    assert "weights <b>56.00 MB</b>, 56% of the whole" in text
    assert "<b>1.40 times as fast</b>, predicted 1.50; 34 tokens a second of CPU time" in text
    explorer.controls["kept"].value = 6
    assert "without 3, 6: perplexity <b>80</b>, not repaired in the record" in explorer.text.value


def test_the_record_s_date_and_machine_stand_below_and_nothing_of_this_one():
    explorer = layers_kept(RECORD, kept=7)
    assert "Recorded 2031-05-17 on an abacus, 1 thread." in explorer.text.value
    assert "Recorded 2031-05-17" in explorer.image.tooltip


def test_the_slider_has_the_models_that_were_recorded():
    assert [kept for _, kept in layers_kept(RECORD).controls["kept"].options] == [4, 6, 7, 8]


def test_points_stand_on_what_was_recorded_and_layers_that_went_are_crossed_out():
    explorer = layers_kept(RECORD, kept=4)
    picture = explorer.draw
    assert picture.crosses.get_xdata() == [1.5, 3.5, 4.5, 6.5]
    heights = [points.get_ydata() for _, points in picture.here]
    assert heights == [[320.0], [41.5], [56.0], [1.5], [1.4]]
    explorer.controls["kept"].value = 7
    heights = [points.get_ydata() for _, points in picture.here]
    assert heights == [[40.0], [], [89.0], [1.125], [1.1]]
    assert picture.crosses.get_xdata() == [3.5]
    drawn = {box.get_facecolor() for box in picture.boxes}
    assert len(drawn) == 2
    assert picture.boxes[3].get_facecolor() == (1, 1, 1, 1)


def test_moves_draw_the_axes_once():
    explorer = layers_kept(RECORD)
    pictures = set()
    for kept in (4, 6, 7, 8):
        explorer.controls["kept"].value = kept
        pictures.add(bytes(explorer.image.value))
    assert len(pictures) == 4
    assert explorer.draw.canvas.still_draws == 1
    print(f"{1e3 * explorer.redraw_s:.0f} ms for a move")


def test_a_record_without_repairs_and_of_one_model_is_drawn():
    explorer = layers_kept(
        {**changed("layers repaired", ...), "layers": {"8": RECORD["layers"]["8"]}}
    )
    assert bytes(explorer.image.value).startswith(PNG)


def test_the_shipped_record_is_read_or_its_script_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(small_caches, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "recorded", small_caches.recorded.__wrapped__)  # not cached
    with pytest.raises(FileNotFoundError, match=r"run benchmarks/pruning\.py"):
        layers_kept()
    (tmp_path / "pruning.json").write_text(json.dumps(RECORD))
    assert layers_kept().text.value == layers_kept(RECORD).text.value


def test_the_record_in_the_repository_is_the_reference_model_s():
    record = records.read_record()
    whole = record.rows[0]
    assert (record.L, whole.dropped, whole.measured) == (30, (), pytest.approx(1, abs=0.2))
    assert all(a.nbytes > b.nbytes for a, b in itertools.pairwise(record.rows))
    explorer = layers_kept(kept=22)
    assert "<b>22 of 30 layers</b>" in explorer.text.value
    assert record.conditions in explorer.text.value


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (changed("layers", ...), "KeyError: 'layers'"),
        (changed("layers", {}), "lacks the whole model"),
        (changed("layers/8", ...), "lacks the whole model"),
        (changed("layers/6/perplexity", ...), "KeyError: 'perplexity'"),
        (changed("layers/6/weight_bytes", "many"), "ValueError: .*many"),
        (changed("layers/6/dropped", None), "TypeError"),
        (changed("layers/6/dropped", [3, 3]), r"6 layers are not what 8 less \[3, 3\] leave"),
        (changed("layers/6/dropped", [3, 8]), r"8 less \[3, 8\]"),
        (changed("layers/6/dropped", [3]), r"8 less \[3\]"),
        (changed("date", ...), "KeyError: 'date'"),
        (changed("layers repaired/4/after", ...), "KeyError: 'after'"),
        ([1, 2], "AttributeError"),
    ],
)
def test_a_record_that_lacks_or_garbles_something_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        layers_kept(record)


@pytest.mark.parametrize("kept", [5, 9, True, "4"])
def test_a_number_of_layers_that_was_not_recorded_is_named(kept):
    with pytest.raises(ValueError, match=rf"kept is {kept!r}: the record has 4, 6, 7, 8"):
        layers_kept(RECORD, kept=kept)


# --- importance_map

SHAPE = Config(D=24, F=40, K=2, G=3, H=4, L=5, V=50)
GENERATOR = torch.Generator().manual_seed(0)
HEADS_LN = torch.rand(5, 6, generator=GENERATOR)
MAPS = {"heads": HEADS_LN, "neurons": torch.rand(5, 40, generator=GENERATOR),
        "channels": torch.rand(24, generator=GENERATOR),
        "layers": torch.rand(5, generator=GENERATOR)}  # fmt: skip


def parameters(config: Config) -> int:
    """Of the model itself, a tied head counted once."""
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in Transformer(config).parameters())


def freed(pick) -> int:
    return int(re.search(r"([\d,]+) weights", pick.with_it)[1].replace(",", ""))


@pytest.mark.parametrize("more", [{}, {"tied": True}, {"qkv_bias": True}])
@pytest.mark.parametrize(
    ("name", "smaller", "times"),
    [("heads", {"K": 1}, 5), ("neurons", {"F": 39}, 5), ("channels", {"D": 23}, 1),
     ("layers", {"L": 4}, 1)],
)  # fmt: skip
def test_what_goes_with_a_cell_is_what_the_smaller_model_lacks(name, smaller, times, more):
    config = replace(SHAPE, **more)
    explorer = importance_map({name: MAPS[name]}, config)
    difference = parameters(config) - parameters(replace(config, **smaller))
    assert times * freed(explorer.pick(0, 2)) == difference


def test_a_head_takes_its_kv_group_along():
    explorer = importance_map(MAPS, SHAPE)
    for head in range(6):
        pick = explorer.pick(3, head)
        group = head // 3
        assert explorer.heat.outline == [3, 3 * group, 3 * group + 3]
        assert (
            f"KV head {group} with its query heads {3 * group} to {3 * group + 2}" in pick.with_it
        )
        sums = HEADS_LN[3].view(2, 3).sum(1)
        assert f"rank {1 + int(sums[group] > sums[1 - group])} of 2 groups" in pick.with_it
        assert "8 numbers a token" in pick.with_it


def test_without_a_config_no_group_and_no_number_of_weights_is_claimed():
    explorer = importance_map(MAPS)
    assert "weights" not in explorer.pick(3, 4).with_it
    assert explorer.heat.outline == []
    other = importance_map(torch.rand(3, 4))
    assert other.pick(1, 1).with_it == ""
    assert "With it" not in other.text.value


def test_ranks_are_scipy_s_and_the_least_is_the_first():
    explorer = importance_map(MAPS, SHAPE)
    whole = rankdata(HEADS_LN.numpy(), method="ordinal").reshape(5, 6)
    rows = rankdata(HEADS_LN.numpy(), method="ordinal", axis=1)
    for layer in range(5):
        for head in range(6):
            pick = explorer.pick(layer, head)
            assert (pick.map, pick.layer, pick.start, pick.stop) == ("heads", layer, head, head + 1)
            assert (pick.rank, pick.of) == (whole[layer, head], 30)
            assert (pick.rank_in_layer, pick.of_in_layer) == (rows[layer, head], 6)
            assert pick.value == pytest.approx(HEADS_LN[layer, head].item())
    words = f"rank {pick.rank} of 30 from the least up, {pick.rank_in_layer} of 6 in its layer"
    assert words in explorer.text.value


def test_equals_are_ranked_from_the_first_on():
    cells = Cells.of("flat", torch.ones(2, 3))
    assert cells.rank_RC.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert cells.rank_in_row_RC.tolist() == [[1, 2, 3]] * 2


SHAPES = st.one_of(
    st.tuples(st.integers(1, 9000)), st.tuples(st.integers(1, 7), st.integers(1, 1000))
)


@given(shape=SHAPES)
def test_every_number_is_in_one_cell_whose_mean_it_shares(shape):
    values = torch.arange(float(np.prod(shape))).reshape(shape).sin()
    cells = Cells.of("any", values)
    rows, columns = cells.values_RC.shape
    assert columns <= 96
    assert len(shape) == 2 or rows <= 64
    seen = torch.zeros(shape, dtype=torch.int)
    for row in range(rows):
        for column in range(columns):
            if np.isnan(cells.values_RC[row, column]):
                assert cells.start(row, column) >= shape[0]
                continue
            place = slice(cells.start(row, column), cells.stop(row, column))
            there = values[place] if len(shape) == 1 else values[row, place]
            assert cells.values_RC[row, column] == pytest.approx(there.double().mean().item())
            (seen if len(shape) == 1 else seen[row])[place] += 1
    assert (seen == 1).all()


def test_wide_maps_are_binned_and_a_bin_says_so():
    neurons_LF = torch.rand(4, 250)
    explorer = importance_map({"neurons": neurons_LF}, SHAPE)
    pick = explorer.pick(2, 83)
    assert (pick.start, pick.stop) == (249, 250)
    pick = explorer.pick(2, 10)
    assert (pick.start, pick.stop) == (30, 33)
    assert pick.value == pytest.approx(neurons_LF[2, 30:33].mean().item())
    assert "30–32: mean" in explorer.text.value
    assert freed(pick) == 3 * 3 * 24
    assert "3 to a cell" in explorer.heat.map["column_title"]


def test_a_map_of_one_axis_is_folded_and_picked_by_its_own_index():
    explorer = importance_map({"channels": torch.arange(576.0)}, SHAPE)
    rows, columns = explorer.heat.map["rows"], explorer.heat.map["columns"]
    assert rows * columns == 576
    pick = explorer.pick(2, 5)
    assert pick.layer is None
    assert pick.start == 2 * columns + 5 == pick.value == pick.rank - 1
    assert (pick.rank_in_layer, pick.of_in_layer) == (pick.rank, 576)


def test_a_folded_row_s_end_is_no_cell():
    explorer = importance_map(torch.rand(101))  # prime
    rows, columns = explorer.heat.map["rows"], explorer.heat.map["columns"]
    assert rows * columns > 101
    assert explorer.heat.map["colors"].count("") == rows * columns - 101
    with pytest.raises(ValueError, match="no cell"):
        explorer.pick(rows - 1, columns - 1)


def test_colours_follow_the_rank_the_layer_s_rank_or_the_value():
    values = torch.tensor([[0.0, 1.0, 100.0], [2.0, 3.0, 4.0]])
    explorer = importance_map(values)

    def shades():
        return [COLORS.index(color) for color in explorer.heat.map["colors"]]

    most = len(COLORS) - 1
    assert shades() == [round(most * part / 5) for part in (0, 1, 5, 2, 3, 4)]
    explorer.controls["colors"].value = "rank in its layer"
    assert shades() == [0, round(most / 2), most] * 2
    explorer.controls["colors"].value = "value"
    assert shades() == [round(most * v / 100) for v in (0, 1, 100, 2, 3, 4)]
    assert explorer.heat.map["ends"] == ["0", "1e+02"]


def test_a_pick_is_kept_told_and_answered():
    heard = []
    explorer = importance_map(
        MAPS, SHAPE, lambda pick: heard.append(pick) or f"<i>{pick.start}</i>"
    )
    assert explorer.picked is None
    assert "arrow keys" in explorer.text.value
    explorer.heat.cell = [1, 4]  # as the browser sets it
    assert heard == [explorer.picked]
    assert explorer.text.value.count("<i>4</i>") == 1
    explorer.controls["colors"].value = "value"
    assert len(heard) == 1
    assert "<i>4</i>" in explorer.text.value


def test_another_map_starts_with_nothing_picked_and_a_late_click_is_let_go():
    explorer = importance_map(MAPS, SHAPE)
    before = explorer.pick(4, 5)
    explorer.controls["map"].value = "layers"
    assert explorer.heat.cell == explorer.heat.outline == []
    assert "Click a cell" in explorer.text.value
    assert explorer.heat.map["label"].startswith("Importance of layers, 1 row of 5 cells")
    explorer.heat.cell = [4, 5]  # was on its way: there is but one row now
    assert explorer.heat.cell == []
    assert explorer.picked == before
    explorer.controls["map"].value = "heads"
    assert explorer.pick(4, 5) == before


def test_an_error_of_on_pick_is_shown_and_the_pick_stands():
    explorer = importance_map(MAPS, SHAPE, lambda pick: 1 / 0)
    pick = explorer.pick(0, 0)
    assert "on_pick: ZeroDivisionError: division by zero" in explorer.text.value
    assert "Layer 0, heads <b>0" in explorer.text.value
    assert explorer.picked == pick


@pytest.mark.parametrize("at", [(-1, 0), (5, 0), (0, 6), (0, -1)])
def test_a_cell_that_is_not_there_is_named(at):
    with pytest.raises(ValueError, match="no cell"):
        importance_map(MAPS, SHAPE).pick(*at)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        ({}, "empty dict"),
        (torch.rand(2, 3, 4), r"'importance' has shape \(2, 3, 4\)"),
        (torch.empty(3, 0), r"shape \(3, 0\)"),
        ({"heads": torch.tensor([1.0, torch.nan])}, "'heads' holds 1 NaN or inf"),
        ({"heads": "many"}, "'heads' is a str: expected a tensor"),
    ],
)
def test_what_is_no_map_is_refused(importance, message):
    with pytest.raises(ValueError, match=message):
        importance_map(importance)


@pytest.mark.parametrize("more", [{"config": 3}, {"on_pick": "print"}])
def test_a_config_or_a_function_that_is_none_is_refused(more):
    with pytest.raises(TypeError, match=next(iter(more))):
        importance_map(MAPS, **more)
