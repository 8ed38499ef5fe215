"""The widgets of 06 show what a loop over blocks, torch's own casts or the whole matrix gives."""

import html
import re
import struct

import matplotlib
import numpy as np
import pytest
import torch

from lecture_util.classroom.widgets import quantization_explorer, weight_inspector
from lecture_util.classroom.widgets.rounding import MOST, samples
from lecture_util.kernels.int4_linear import pack_int4
from lecture_util.quantization.nf4 import dequantize_nf4, quantize_nf4
from lecture_util.quantization.scales import quantize

matplotlib.use("agg")
PNG = b"\x89PNG"
W_FD = torch.randn(7, 51, generator=torch.Generator().manual_seed(1))  # 51 = 3*16 + 3
X_TD = samples()[1]


def move(explorer, **values):
    """Set controls one after another; the text then, which holds no error."""
    for name, value in values.items():
        explorer.controls[name].value = value
    assert "Error" not in explorer.text.value, explorer.text.value
    return explorer.text.value


def blocks_of(x, per):
    """Every block's indices, told one by one."""
    R, D = x.shape
    rows, columns = np.arange(R), np.arange(D)
    if per == "tensor":
        return [np.ix_(rows, columns)]
    if per == "column":
        return [np.ix_(rows, [column]) for column in columns]
    size = D if per == "row" else per
    return [np.ix_([r], columns[d : d + size]) for r in rows for d in range(0, D, size)]


def rounded(x, bits, per, grid):
    """Each number moved to the nearest level of its block, in fp64."""
    x, back = x.double().numpy(), np.empty(x.shape)
    for block in blocks_of(x, per):
        part = x[block]
        if grid == "symmetric":
            top = 2 ** (bits - 1) - 1
            levels = np.arange(-top, top + 1) * (abs(part).max() / top)
        else:
            low, high = min(part.min(), 0), max(part.max(), 0)
            scale = (high - low) / (2**bits - 1)
            levels = (np.arange(2**bits) - np.round(-low / scale)) * scale
        back[block] = levels[abs(part[..., None] - levels).argmin(-1)]
    return back


# --- quantization_explorer


@pytest.mark.parametrize("per", ["tensor", "row", "column", 16, 32])
@pytest.mark.parametrize(("bits", "grid"), [(2, "symmetric"), (4, "zero-point"), (8, "symmetric")])
def test_the_error_is_that_of_the_nearest_level_of_each_block(bits, per, grid):
    explorer = quantization_explorer(W_FD, bits=bits, per=per, grid=grid, scale_dtype=torch.float32)
    back = rounded(W_FD, bits, per, grid)
    off = back - W_FD.double().numpy()
    result = explorer.result
    assert result.relative == pytest.approx(
        np.linalg.norm(off) / np.linalg.norm(W_FD.numpy()), rel=1e-3
    )
    assert result.largest == pytest.approx(abs(off).max(), rel=1e-3)
    assert result.zeros == pytest.approx((back == 0).mean(), abs=1e-6)


def test_nf4_in_groups_is_what_nf4_stores():
    w_FD = W_FD[:, :48].contiguous()
    explorer = quantization_explorer(w_FD, per=16, grid="NF4", scale_dtype=torch.float32)
    packed, absmax = quantize_nf4(w_FD, 16)
    off = dequantize_nf4(packed, absmax, w_FD.shape, 16) - w_FD
    assert explorer.result.relative == pytest.approx(float(off.norm() / w_FD.norm()), rel=1e-5)
    assert explorer.result.bits == 4 + 32 / 16


@pytest.mark.parametrize(
    ("chosen", "bits"),
    [
        ({"per": "row"}, 4 + 16 / 384),
        ({"per": "column", "bits": 3}, 3 + 16 / 256),
        ({"per": "tensor", "bits": 8}, 8 + 16 / (256 * 384)),
        ({"per": 48}, 4 + 16 / 48),
        ({"per": 48, "grid": "zero-point"}, 4 + (16 + 8) / 48),
        ({"per": 64, "grid": "NF4"}, 4 + 16 / 64),
        ({"per": 64, "grid": "NF4", "scale_dtype": torch.float32}, 4 + 32 / 64),
    ],
)
def test_bits_a_number_count_scales_and_zeros(chosen, bits):
    explorer = quantization_explorer(**chosen)
    assert explorer.result.bits == pytest.approx(bits)
    assert f"<b>{bits:.2f} bits</b>" in explorer.text.value


def test_a_large_number_harms_only_what_shares_its_scale():
    explorer = quantization_explorer(outlier=1, per="tensor")
    errors = {}
    for per in ("tensor", "row", 16):
        errors[per] = [
            move(explorer, per=per, outlier=n) and explorer.result.relative for n in (1, 100)
        ]
    assert errors["tensor"][1] > 0.95  # all others are read back as 0
    assert errors["row"][1] < 1.3 * errors["row"][0]
    assert errors[16][1] < 1.1 * errors[16][0] + 0.02


def test_columns_that_reach_the_threshold_stay_in_fp16():
    explorer = quantization_explorer(shows="activations", bits=8, per="row", threshold=6,
                                     scale_dtype=torch.float32)  # fmt: skip
    wide = (X_TD.abs() >= 6).any(0)
    assert 3 < wide.sum() < 10
    rest = torch.where(wide, 0, X_TD)
    rest = torch.from_numpy(rounded(rest, 8, "row", "symmetric"))
    back = torch.where(wide, X_TD.half().double(), rest)
    relative = float((back - X_TD).norm() / X_TD.double().norm())
    result = explorer.result
    assert result.fp16_columns == wide.sum()
    assert result.relative == pytest.approx(relative, rel=1e-3)
    assert result.unsplit == pytest.approx(
        np.linalg.norm(rounded(X_TD, 8, "row", "symmetric") - X_TD.numpy()) / X_TD.norm().item(),
        rel=1e-3,
    )
    assert result.bits == pytest.approx(8 + 32 / 384 + 16 * int(wide.sum()) / 384)
    share = f"{int(wide.sum())} of 384 columns"
    assert share in explorer.text.value
    assert result.unsplit > 5 * result.relative
    assert "fp16" not in move(explorer, threshold=0)
    move(explorer, threshold=5, shows="weights")
    assert explorer.result.fp16_columns == 0


@pytest.mark.parametrize(("bits", "grid"), [(3, "symmetric"), (3, "zero-point"), (4, "NF4")])
def test_the_levels_drawn_are_those_that_numbers_are_read_back_as(bits, grid):
    explorer = quantization_explorer(
        W_FD, bits=bits, grid=grid, per="row", scale_dtype=torch.float32
    )
    rows = W_FD.abs().amax(1) if grid != "zero-point" else W_FD.amax(1) - W_FD.amin(1)
    largest, middling = int(W_FD.abs().amax(1).argmax()), int(rows.argsort()[3])
    for row, levels in zip((largest, middling), explorer.picture.levels, strict=True):
        drawn = [segment[0][0] for segment in levels.get_segments()]
        check_levels(drawn, row, bits, grid)


def check_levels(drawn, row, bits, grid):
    if grid == "NF4":
        back = dequantize_nf4(*quantize_nf4(W_FD[row], 51), (51,), 51).numpy()
    else:
        back = rounded(W_FD[row : row + 1], bits, "row", grid)
    assert len(drawn) == (7 if grid == "symmetric" else 2**bits)
    assert np.abs(back.reshape(-1, 1) - np.array(drawn)).min(1).max() < 1e-5
    assert np.ptp(drawn) < 1.001 * 2 * W_FD[row].abs().max()


def test_the_histogram_counts_every_number_and_zoomed_the_middle_ones():
    explorer = quantization_explorer(W_FD)
    assert explorer.picture.bars.get_data().values.sum() == W_FD.numel()
    move(explorer, zoom=True)
    assert 0.97 < explorer.picture.bars.get_data().values.sum() / W_FD.numel() < 1


def test_the_curves_are_the_errors_at_every_number_of_bits():
    explorer = quantization_explorer(W_FD, per=16)
    curves = explorer.picture.curves
    for bits in (2, 5, 8):
        for grid in ("symmetric", "zero-point"):
            move(explorer, grid=grid, bits=bits)
            x, y = curves[grid].get_data()
            assert (explorer.result.bits, explorer.result.relative) == (x[bits - 2], y[bits - 2])
            assert explorer.picture.here.get_data() == ([x[bits - 2]], [y[bits - 2]])


def test_of_very_many_numbers_the_first_rows_are_taken_and_it_is_said():
    w_FD = torch.randn(600, 577)
    explorer = quantization_explorer(w_FD)
    taken = MOST // 577
    assert f"the first {taken} of 600 rows" in explorer.text.value
    few = quantization_explorer(w_FD[:taken])
    assert few.result == explorer.result
    assert "first" not in few.text.value


def test_activations_of_a_batch_are_rows():
    explorer = quantization_explorer(activations=X_TD.view(4, 32, 384).bfloat16())
    flat = quantization_explorer(activations=X_TD.bfloat16())
    assert explorer.result == flat.result
    assert explorer.controls["shows"].options == ("activations",)


def test_controls_that_say_nothing_now_are_greyed():
    explorer = quantization_explorer()

    def greyed():
        return {name for name, control in explorer.controls.items() if control.disabled}

    assert greyed() == {"threshold"}
    move(explorer, grid="NF4")
    assert greyed() == {"threshold", "bits"}
    move(explorer, shows="activations")
    assert greyed() == {"bits"}


def test_nf4_has_four_bits_wherever_the_slider_stands():
    explorer = quantization_explorer(grid="NF4", bits=4)
    four = explorer.result
    move(explorer, bits=8)
    assert explorer.result == four


def test_moves_draw_the_axes_once_for_a_tensor():
    explorer = quantization_explorer()
    pictures = {bytes(explorer.image.value)}
    steps = [{"bits": 3}, {"per": 48}, {"grid": "zero-point"}, {"outlier": 10}, {"zoom": True}]
    for value in steps:
        move(explorer, **value)
        pictures.add(bytes(explorer.image.value))
    assert len(pictures) == 6
    assert explorer.picture.canvas.still_draws == 1
    print(f"{1e3 * explorer.redraw_s:.0f} ms for a move")
    move(explorer, shows="activations")
    assert explorer.picture.canvas.still_draws == 2


def test_numbers_that_neither_a_scale_nor_fp16_can_hold_are_said_or_stopped_at_its_end():
    explorer = quantization_explorer(activations=1e4 * X_TD, bits=8)
    explorer.controls["outlier"].value = 100
    assert "beyond torch.float16" in explorer.text.value
    wide = quantization_explorer(activations=1e4 * X_TD, bits=8, scale_dtype=torch.float32,
                                 threshold=6)  # fmt: skip
    assert wide.result.largest == pytest.approx(float(1e4 * X_TD.abs().max()) - 65504, rel=1e-4)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1, 1), -torch.ones(3, 2), torch.eye(40) * 1e-7, torch.tensor([[0.0, 0, 0, 5]])],
)
def test_tensors_of_one_number_of_tiny_ones_and_with_rows_of_zeros_are_drawn(tensor):
    explorer = quantization_explorer(tensor, tensor, per="tensor")
    moves = [{"grid": "zero-point"}, {"per": "row"}, {"grid": "NF4", "per": "column"},
             {"zoom": True}, {"shows": "activations"}, {"threshold": 1}]  # fmt: skip
    for values in moves:
        move(explorer, **values)
        assert np.isfinite(explorer.result.relative)
    assert bytes(explorer.image.value).startswith(PNG)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"bits": 9}, "bits is 9: expected a whole number, 2 to 8"),
        ({"bits": 4.0}, "bits is 4.0"),
        ({"per": "head"}, "per is 'head': choose from tensor, column, row, 512|per is 'head'"),
        ({"per": 0}, "per is 0"),
        ({"grid": "fp4"}, "grid is 'fp4': choose from symmetric, zero-point, NF4"),
        ({"outlier": 7}, "outlier is 7: choose from 1, 2, 3"),
        ({"threshold": 7}, "threshold is 7: choose from 0, 1"),
        ({"shows": "biases"}, "shows is 'biases': choose from weights, activations"),
        ({"scale_dtype": torch.int8}, "scale_dtype is torch.int8"),
        ({"weights": torch.randn(5)}, r"weights is shape \(5,\)"),
        ({"weights": [[1.0]]}, r"weights is \[\[1.0\]\]: expected a floating-point tensor"),
        ({"weights": torch.ones(2, 2).int()}, "weights is shape"),
        ({"weights": torch.empty(0, 4)}, "weights is shape"),
        ({"weights": torch.zeros(2, 2)}, "weights is all zeros"),
        ({"activations": torch.tensor([[1.0, torch.nan]])}, "activations has NaN"),
        ({"weights": torch.ones(2, 2), "shows": "activations"}, "shows is 'activations'"),
    ],
)  # fmt: skip
def test_a_start_that_cannot_be_shown_is_named(chosen, message):
    with pytest.raises(ValueError, match=message):
        quantization_explorer(**chosen)


# --- weight_inspector


def cells(page: str, head: str) -> list[str]:
    """What the rows of a table say whose head starts with this."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page)
    mine = [row for row in rows if re.match(rf"<th[^>]*>{re.escape(head)}", row)]
    found = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in mine]
    return [html.unescape(re.sub(r"<[^>]+>", "", cell)) for row in found for cell in row]


@pytest.mark.parametrize("stored", ["int8", "int4", "int4 zero-point", "NF4"])
@pytest.mark.parametrize(("size", "group"), [(16, 3), (17, 2), (48, 0)])
def test_the_bytes_are_those_of_the_whole_matrix(stored, size, group):
    w_FD = W_FD if stored != "NF4" or size == 17 else W_FD[:, :48].contiguous()
    if w_FD.shape[1] <= group * size:
        group = 0
    g = weight_inspector(w_FD, size, stored=stored, row=4, group=group).group
    start = group * size
    place = slice(start, start + len(g.values))
    if stored == "NF4":
        packed, absmax = quantize_nf4(w_FD, size)  # blocks of 17 start inside a byte
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()
        first = 4 * w_FD.shape[1] + start
        assert g.codes.tolist() == codes[first : first + len(g.values)].tolist()
        back = dequantize_nf4(packed, absmax, w_FD.shape, size)[4, place]
    else:
        bits, symmetric = (8 if stored == "int8" else 4), stored != "int4 zero-point"
        q = quantize(w_FD, bits, size, symmetric, torch.float16)
        assert g.codes.tolist() == q.codes[4, place].tolist()
        back = q.dequantize()[4, place]
        whole = q.codes[4:5] if symmetric else q.codes[4:5].int()
        if stored == "int8":
            assert g.data == whole[0, place].numpy().tobytes()
        else:
            shifted = whole[:, place] + (8 if symmetric else 0)
            assert g.data == bytes(pack_int4(shifted)[0].tolist())
        assert g.scale == q.scale[4, group]
        assert (g.zero is None) if symmetric else g.zero == q.zero[4, group]
    assert torch.equal(g.back, back)


@pytest.mark.parametrize("stored", ["int4", "int4 zero-point", "NF4"])
def test_the_first_of_two_codes_is_the_high_digit_of_its_byte(stored):
    explorer = weight_inspector(W_FD, 17, stored=stored, row=2)
    g = explorer.group
    digits = "".join(cells(explorer.strip.value, "byte"))
    assert len(digits) == 18
    shown = [int(code) for code in cells(explorer.strip.value, "code")]
    assert shown == g.codes.tolist()
    stored_as = [code + 8 if stored == "int4" else code for code in shown]
    assert [int(digit, 16) for digit in digits[:17]] == stored_as


@pytest.mark.parametrize(("stored", "value"), [("int4", 6), ("int4", 7), ("NF4", 1), ("int8", 3)])
def test_the_coloured_bits_of_a_byte_are_the_chosen_code_s(stored, value):
    explorer = weight_inspector(W_FD, 16, stored=stored, value=value)
    row = re.findall(r"<tr>(.*?)</tr>", explorer.bits.value)[0]
    boxes = re.findall(r'background:([#\w]+)">([01])</span>', row)
    assert len(boxes) == 8
    code = int(explorer.group.codes[value])
    stored_as = {"int4": f"{code + 8:04b}", "NF4": f"{code:04b}", "int8": f"{code % 256:08b}"}
    assert "".join(bit for fill, bit in boxes if fill != "white") == stored_as[stored]


def test_an_int8_byte_is_the_code_in_two_s_complement():
    explorer = weight_inspector(W_FD, 16, stored="int8", row=1)
    octets = bytes.fromhex("".join(cells(explorer.strip.value, "byte")))
    assert list(struct.unpack("16b", octets)) == explorer.group.codes.tolist()
    assert min(explorer.group.codes) < 0


@pytest.mark.parametrize("value", [0, 5, 15])
def test_the_bits_shown_are_torch_s(value):
    explorer = weight_inspector(W_FD, 16, row=3, value=value, stored="int4 zero-point")
    x = W_FD[3, value]
    shown = {head: cells(explorer.bits.value, head)[0] for head in
             ("its byte", "scale in fp16", "zero", "the value in fp16", "the value in bf16",
              "the value in e4m3")}  # fmt: skip
    g = explorer.group
    half = np.frombuffer(x.half().numpy().tobytes(), np.uint16)[0]
    assert shown["the value in fp16"] == f"{half:016b}"
    assert shown["the value in bf16"] == f"{x.bfloat16().view(torch.int16).item() & 0xFFFF:016b}"
    e4m3 = x.to(torch.float8_e4m3fn).view(torch.uint8).item()
    assert shown["the value in e4m3"] == f"{e4m3:08b}"
    assert shown["scale in fp16"] == f"{g.scale.view(torch.int16).item():016b}"
    assert shown["zero"] == f"{g.zero:08b}"
    assert shown["its byte"] == f"{g.data[value // 2]:08b}"
    words = cells(explorer.bits.value, "the value in bf16")[1]
    assert float(words.split(",")[0]) == pytest.approx(float(x.bfloat16()), rel=1e-5)


def test_the_text_says_what_was_stored_and_what_a_group_takes():
    w = torch.tensor([[0.7, -0.1, 0.24, 0.0]])
    explorer = weight_inspector(w, 4, stored="int4", value=2, scale_dtype=torch.float32)
    text = explorer.text.value
    assert "Column 2: 0.24 is stored as <b>code 2</b>" in text
    assert "as <b>0.2</b>, off by -0.04" in text
    assert "4 weights in <b>6 bytes</b> (12.00 bits each)" in text
    assert explorer.group.data.hex() == "f7a8"  # 7, -1, 2, 0, each + 8
    assert "10 = code 2 + 8" in explorer.bits.value
    assert explorer.image.tooltip.startswith("Column 2: 0.24")
    assert "<b>7 bytes</b>" in move(explorer, stored="int4 zero-point")
    assert "level × absmax" in move(explorer, stored="NF4")
    assert cells(explorer.bits.value, "absmax in fp32")[1] == "0.7"


def test_a_row_s_last_group_may_be_shorter():
    explorer = weight_inspector(W_FD, 16)
    move(explorer, value=15, group=3)
    assert explorer.controls["value"].max == 2
    assert explorer.values["value"] == 2
    assert len(explorer.group.values) == 3
    assert len(cells(explorer.strip.value, "byte")) == 2
    move(explorer, group=0)
    assert explorer.controls["value"].max == 15


def test_the_chosen_value_its_code_and_its_byte_are_marked():
    explorer = weight_inspector(W_FD, 16, value=5)
    marked = re.findall(r"<td[^>]*outline[^>]*>(.*?)</td>", explorer.strip.value)
    g = explorer.group
    assert marked == [f"{W_FD[0, 5] * 10:.1f}", str(g.codes[5].item()), f"{g.data[2]:02X}"]


@pytest.mark.parametrize("stored", ["int8", "int4", "int4 zero-point", "NF4"])
def test_groups_of_zeros_and_of_one_number_and_the_largest_are_shown(stored):
    w_FD = torch.zeros(2, 129)
    w_FD[1] = torch.linspace(-3e4, 3e4, 129)
    w_FD[0, 128] = -1e-7
    explorer = weight_inspector(w_FD, 64, stored=stored)
    assert not explorer.group.back.any()
    move(explorer, group=2)
    assert len(explorer.group.values) == 1
    move(explorer, row=1, group=1, value=63)
    assert len(cells(explorer.strip.value, "code")) == 64
    assert bytes(explorer.image.value).startswith(PNG)
    assert explorer.canvas.still_draws == 1
    print(f"{1e3 * explorer.redraw_s:.0f} ms for a move")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"group_size": 1}, "group_size is 1: the page has room for 2 to 64"),
        ({"group_size": 128}, "group_size is 128"),
        ({"group_size": 16.0}, "group_size is 16.0"),
        ({"stored": "int3"}, "stored as is 'int3': choose from int8"),
        ({"row": 7}, "row is 7: expected a whole number, 0 to 6"),
        ({"group": 4}, "group is 4: expected a whole number, 0 to 3"),
        ({"group": 3, "value": 3}, "value is 3: expected a whole number, 0 to 2"),
        ({"group": -1}, "group is -1"),
        ({"scale_dtype": torch.int8}, "scale_dtype is torch.int8"),
        ({"weights": torch.full((2, 2), torch.inf)}, "weights has NaN or infinite"),
        ({"weights": torch.randn(5)}, r"weights is shape \(5,\)"),
    ],
)
def test_a_place_that_is_not_there_is_named(chosen, message):
    with pytest.raises(ValueError, match=message):
        weight_inspector(**({"weights": W_FD} | chosen))
