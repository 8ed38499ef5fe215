"""Still figures are drawn to the same bytes everywhere, and each says what it shows."""

import functools
import re

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from lecture_util.alternatives.linear_attention import taylor_features
from lecture_util.classroom import figures
from lecture_util.classroom.figures import (
    cla,
    cli,
    llm_int8,
    mla_tables,
    number_formats,
    pruning,
    quantization,
    quantized_runs,
    records,
    small_caches,
    style,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.quantization.llm_int8 import llm_int8 as int8_product
from lecture_util.quantization.llm_int8 import quantize_rows
from lecture_util.roofline import ACCELERATORS, decode_step, kv_bytes_per_token

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


@pytest.fixture
def few_figures(monkeypatch):
    """Only four of the figures, one a kind: charts and diagrams, with and without torch."""
    names = ("associative-recall", "gqa-step-time", "kv-cache-tensor", "words-to-gpus")
    monkeypatch.setattr(cli, "FIGURES", {name: figures.FIGURES[name] for name in names})
    return names


@functools.cache
def texts(name: str) -> str:
    """Every word drawn in a figure."""
    fig = figures.FIGURES[name].draw()
    found = fig.findobj(match=matplotlib.text.Text)
    return "\n".join(text.get_text() for text in found)


def test_committed_pictures_are_what_their_code_draws():
    assert cli.differing() == []


def test_drawing_twice_gives_the_same_bytes(tmp_path, few_figures):
    for name in ("first", "second"):
        cli.draw_all(tmp_path / name)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


def test_a_changed_missing_or_left_over_picture_fails_the_check(tmp_path, few_figures, capsys):
    cli.draw_all(tmp_path)
    assert figures.main(["--check", "--folder", str(tmp_path)]) == 0
    names = few_figures
    (tmp_path / f"{names[0]}.svg").unlink()
    (tmp_path / f"{names[1]}.svg").write_text("<svg/>")
    (tmp_path / "left-over.svg").write_text("<svg/>")
    capsys.readouterr()
    assert figures.main(["--check", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    for name in (names[0], names[1], "left-over"):
        assert f"{name}.svg differs" in printed
    assert f"{names[2]}.svg" not in printed


def test_drawing_ignores_the_settings_of_whoever_calls(tmp_path):
    name, still = next(iter(figures.FIGURES.items()))
    with matplotlib.rc_context({"font.size": 31, "figure.figsize": (2, 2)}):
        cli.render(still, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == (cli.IMAGES / f"{name}.svg").read_bytes()


@pytest.mark.parametrize("still", figures.FIGURES.values(), ids=list(figures.FIGURES))
def test_each_figure_has_alt_text_sources_a_picture_and_a_line_in_the_index(still):
    assert 80 < len(still.alt) < 500
    assert still.alt.endswith(".")
    assert still.sources
    assert re.fullmatch(r"0[0-9]|1[012]", still.notebook)
    picture = cli.IMAGES / f"{still.name}.svg"
    assert picture.stat().st_size < 100_000
    content = picture.read_text()
    assert "<dc:date>" not in content
    assert "<text" not in content  # outlines: equal with and without our fonts
    index = (cli.IMAGES / "README.md").read_text()
    assert still.alt in index
    assert f"]({still.name}.svg)" in index
    assert still.title in texts(still.name)


def test_numbers_in_alt_texts_are_the_accounting_s():
    llama, smol = PUBLISHED["llama-2-13b"], PUBLISHED["smollm2-135m"]
    alt = figures.FIGURES["kv-cache-tensor"].alt
    assert f"{kv_bytes_per_token(smol):,} bytes" in alt
    assert f"{kv_bytes_per_token(llama):,} bytes" in alt
    tokens_per_s = 100e9 * 4 / 3 / 86_400
    alt, drawn = figures.FIGURES["words-to-gpus"].alt, texts("words-to-gpus")
    for B in (1, 64):
        rate = decode_step(llama, B, 1024, ACCELERATORS["h100"]).throughput_tokens_per_s
        for text in (alt, drawn):
            assert style.number(tokens_per_s / rate) in text
    assert f"{tokens_per_s / 1e6:.2f} million" in alt
    alt = figures.FIGURES["naive-and-cached-generation"].alt
    assert f"{sum(range(4, 12))} in all" in alt
    assert f"{4 + 7} in all" in alt


def test_numbers_in_alt_texts_of_small_caches_and_states_are_computed():
    llama, h100 = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"]
    alt, drawn = figures.FIGURES["gqa-step-time"].alt, texts("gqa-step-time")
    for K, B in [(40, 64), (8, 64), (8, 256)]:
        latency_s = decode_step(llama.with_kv_heads(K), B, 1024, h100).latency_s
        for text in (alt, drawn):
            assert f"{style.number(latency_s * 1e3)} ms" in text
    alt, drawn = figures.FIGURES["mla-cached-numbers"].alt, texts("mla-cached-numbers")
    for count in (2 * 128 * 128, 2 * 8 * 128, 512 + 64, 2 * 128):
        assert f"{count:,}" in alt
        assert f"{count:,}" in drawn
    assert f"{2 * 128 * 128 / (512 + 64):.0f} times" in alt
    state_bytes = taylor_features(torch.zeros(16)).numel() * (64 + 1) * 4
    alt = figures.FIGURES["based-tradeoff"].alt
    assert f"{state_bytes:,} bytes" in alt
    assert f"{state_bytes / (2 * 64 * 2):.0f} exact tokens" in alt


def test_published_tables_support_the_titles_above_them():
    assert all(mqa < gqa < mha for mqa, gqa, mha in zip(*mla_tables.TABLE_8.values(), strict=True))
    pairs = [
        (mha, mla)
        for variants in mla_tables.TABLE_9.values()
        for mha, mla in zip(variants["MHA"][1], variants["MLA"][1], strict=True)
    ]
    assert (sum(mla > mha for mha, mla in pairs), len(pairs)) == (7, 8)
    held = [(2 * 2 * width * -(-20 // share), share, loss) for _, width, share, loss in cla.TABLE_1]
    own = {size: loss for size, share, loss in held if share == 1}
    rivals = [(own[size], loss) for size, share, loss in held if share > 1 and size in own]
    assert len(rivals) == 5
    assert all(loss < alone for alone, loss in rivals)


def test_int8_tables_support_the_titles_above_them():
    alt, drawn = figures.FIGURES["llm-int8-by-size"].alt, texts("llm-int8-by-size")
    for name in ("absmax", "absmax by vectors", "zero point"):
        over = llm_int8.above_fp32(name)
        assert over[-1] > 5 * max(over[2], 1)  # "breaks down": 13B far above 2.7B
        assert f"{over[-1]:+.0f}%" in drawn
        assert f"{over[-1]:.0f}%" in alt
        assert f"{over[0]:.0f}%" in alt
    assert all(abs(over) < 1 for over in llm_int8.above_fp32("LLM.int8()"))
    alt, drawn = figures.FIGURES["llm-int8-bloom"].alt, texts("llm-int8-bloom")
    off = [(int8 - bf16) / error for int8, bf16, error in llm_int8.BLOOM.values()]
    assert f"between {min(off):.1f} and +{max(off):.1f}" in alt
    assert (sum(abs(x) < 1 for x in off), len(off)) == (6, 7)
    for (many, slow), (few, slower) in llm_int8.BLOOM_MS.values():
        assert few < many
        assert f"{100 * (slower / slow - 1):.0f}% more" in alt
        assert f"{slower}, +{100 * (slower / slow - 1):.0f}%" in drawn


def test_minitrons_comparison_and_the_parts_cut_are_computed():
    alt, drawn = figures.FIGURES["minitron-mmlu"].alt, texts("minitron-mmlu")
    (few, score), (many, scratch) = (pruning.MMLU[n] for n in ("Minitron 8B", "Nemotron-3 8B"))
    for text in (f"{many / few:.0f}", f"{score - scratch:.1f} points"):
        assert text in alt
        assert text in drawn
    smol, saved = PUBLISHED["smollm2-135m"], pruning.savings()
    D, F, H = smol.D, smol.F, smol.H
    assert saved["neuron"] == 3 * D
    assert saved["group of heads"] == 2 * (smol.G + 1) * H * D  # Wq and Wo, Wk and Wv
    assert saved["layer"] == smol.K * saved["group of heads"] + F * saved["neuron"] + 2 * D
    per_layer = 2 * (smol.N + smol.K) * H + 3 * F + 2
    assert saved["channel"] == smol.V + smol.L * per_layer + 1
    alt, drawn = figures.FIGURES["what-can-be-cut"].alt, texts("what-can-be-cut")
    for count in saved.values():
        assert f"{count:,}" in alt
        assert f"{count:,}" in drawn


def test_numbers_of_the_vector_and_of_the_outlier_columns_are_computed():
    alt, drawn = figures.FIGURES["absmax-and-zero-point"].alt, texts("absmax-and-zero-point")
    x = np.array(quantization.VECTOR)
    for low, step in ((-7, x.max() / 7), (0, (x.max() - x.min()) / 15)):
        zero = round(-x.min() / step) if low == 0 else 0
        codes = np.clip(np.round(x / step) + zero, low, 7 if low else 15)
        worst = abs((codes - zero) * step - x).max()
        assert all(f"\n{code:.0f}".replace("-", "−") in "\n" + drawn for code in codes)
        for number in (f"{step:.3f}", f"{worst:.3f}"):
            assert number in alt
            assert number in drawn
    unused = sum(code * x.max() / 7 < x.min() - x.max() / 14 for code in range(-7, 8))
    assert f"{unused} of its 15 codes" in alt
    assert f"{unused} of 15 codes" in drawn
    alt, drawn = figures.FIGURES["outlier-columns"].alt, texts("outlier-columns")
    made = llm_int8.split_products()
    exact = np.array(llm_int8.X_TD) @ np.array(llm_int8.W_FD).T
    for name in ("sum", "plain"):
        error = abs(made[name].numpy() - exact).max()
        assert f"{error:.3f}" in alt
        assert f"{error:.3f}" in drawn
    alone, w = made["apart"], torch.tensor(llm_int8.W_FD)
    assert (made["kept"].half().double() == made["kept"]).all()  # so it is what fp16 gives
    codes, absmax = quantize_rows(w)
    product = int8_product(torch.tensor(llm_int8.X_TD), codes, absmax, 6.0, w=w)
    assert alone.tolist() == [False, False, True, False, False]
    torch.testing.assert_close(product.double(), made["sum"], atol=1e-5, rtol=1e-5)


def test_formats_drawn_end_and_step_as_torch_says():
    alt, drawn = figures.FIGURES["number-formats"].alt, texts("number-formats")
    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
             "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # fmt: skip
    for dtype in names.values():
        limits = torch.finfo(dtype)
        for value in (limits.max, limits.eps, limits.smallest_normal * limits.eps):
            assert number_formats.plain(value) in drawn
        if limits.bits < 32 and dtype != torch.bfloat16:
            assert f"{limits.max:,.0f}" in drawn
            assert f"{limits.max:,.0f} and {limits.eps:.3g}" in alt
    reachable = number_formats.reachable()
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        assert reachable[name].tolist() == sorted(set(every[every.isfinite()].tolist()))
    assert [len(reachable[name]) for name in ("int8", "int4", "NF4")] == [256, 16, 16]


def test_nf4_levels_drawn_part_the_normal_distribution_evenly_on_either_side():
    alt, drawn = figures.FIGURES["nf4-levels"].alt, texts("nf4-levels")
    shares = number_formats.areas()
    for side in (shares[:7], shares[7:]):
        assert max(side) - min(side) < 1e-4
        assert f"{100 * side[0]:.1f}%" in alt
        assert f"{100 * side[0]:.1f}%" in drawn
    for scales in number_formats.SCALE_BITS:
        assert f"{4 + sum(scales):.3f}".removesuffix("00") in alt


def test_bits_that_scales_add_are_those_of_their_count():
    alt, drawn = figures.FIGURES["granularity"].alt, texts("granularity")
    F, D = PUBLISHED["smollm2-135m"].F, PUBLISHED["smollm2-135m"].D
    for scales in (1, F, D, F * D // 48):
        added = 16 * scales / (F * D)
        number = f"{added:.3f}" if added > 1e-3 else f"{added:.5f}"
        assert number in alt
        assert f"+{number}" in drawn


def test_masked_passes_drawn_uncover_every_position_once():
    drawn = texts("diffusion-passes")
    for passes, positions in [(12, 12), (4, 48), (6, 72)]:
        assert f"{passes} passes" in drawn
        assert f"{positions} positions computed" in drawn


def test_a_recorded_figure_waits_until_its_record_holds_all_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(small_caches, "RESULTS", tmp_path)
    monkeypatch.setattr(figures.registry, "FIGURES", found := {})
    about = {"title": "t", "answers": [], "notebook": "06", "sources": ["s"]}

    def register(record, *needs):
        found.clear()
        alt = "{n} points".format_map
        records.recorded_figure(record, needs, alt, name="new", **about)(lambda: None)
        return [still.alt for still in found.values()]

    assert register("absent", "a/b") == []
    (tmp_path / "partial.json").write_text('{"n": 3, "a": {"b": 1}, "rows": [{"name": "x"}]}')
    assert register("partial", "a/b", "a/c") == []
    assert register("partial", "rows/y") == []
    assert register("partial", "n/b") == []
    assert register("partial", "a/b", "rows/x") == ["3 points"]


def rows_of(run: dict) -> dict:
    return {row["name"]: row["perplexity"] for row in run["rows"]}


def eight_bits_are_nearly_free(run: dict) -> bool:
    row = rows_of(run)
    awq = all(row[f"AWQ {kind}"] < row[f"RTN {kind}"] for kind in ("int4 g48", "int3 g48"))
    eight = [row[name] for name in quantized_runs.EIGHT]
    few = [row[name] for name in quantized_runs.FEW]
    return awq and max(eight) < 1.05 * row["fp32"] < min(few)


def activations_choose_best(run: dict) -> bool:
    ours = run["lecture_picture"]["perplexity"]
    kept = {by: ours[f"1% kept, {by}"] for by in ("by activation", "by weight", "at random")}
    return min(kept, key=kept.get) == "by activation" and all(
        ours[name] < ours["all rounded"] for name in quantized_runs.SCALED
    )


def ends_matter_most(run: dict) -> bool:
    maps = run["importance"]
    ends = {0, 1, len(maps["heads"]["scores_LN"]) - 1}
    ways = ("block influence", "perplexity without")
    ranked = [set(maps[way]["by_layer_order"][-3:]) for way in ways]
    far = [row[10] > 5 * row[9] for row in maps["neurons"]["deciles_LQ"]]
    return ranked == [ends, ends] and sum(far) > len(far) / 2


def repair_wins_much_back(run: dict) -> bool:
    whole, fewest = run["layers"]["30"], run["layers"]["18"]
    won = [
        entry["before"] - entry["after"] > (entry["before"] - whole["perplexity"]) / 4
        for entry in run["layers repaired"].values()
    ]
    return all(won) and fewest["times_as_fast"] > 1.2 and fewest["perplexity"] > 40


def most_is_won_back(run: dict) -> bool:
    whole, curve = run["recovery"]["whole"]["perplexity"], run["recovery"]["8 dropped"]
    return curve["before"] - curve["after"] > 0.7 * (curve["before"] - whole)


def choices_differ(run: dict) -> bool:
    orders = [entry["perplexity"] for entry in run["orders"].values()]
    cut, mended = ([w[key] for w in run["width"].values()] for key in ("before", "after"))
    ranks = [sorted(range(len(cut)), key=each.__getitem__) for each in (cut, mended)]
    apart = max(mended) > 1.25 * min(mended) and ranks[0] == ranks[1]
    return max(orders) > 2 * min(orders) and max(cut) > 2 * min(cut) and apart


@pytest.mark.parametrize(
    ("name", "record", "holds"),
    [
        ("awq", "quantization", activations_choose_best),
        ("bits-and-perplexity", "quantization", eight_bits_are_nearly_free),
        ("importance-maps", "pruning", ends_matter_most),
        ("layers-kept", "pruning", repair_wins_much_back),
        ("recovery-curve", "pruning", most_is_won_back),
        ("what-to-cut", "pruning", choices_differ),
    ],
)
def test_records_support_the_titles_above_them(name, record, holds):
    assert name in figures.FIGURES
    assert holds(small_caches.recorded(record))


def test_two_figures_may_not_share_a_name():
    name = next(iter(figures.FIGURES))
    with pytest.raises(ValueError, match=name):
        figures.figure(name, "t", [], "01", "a", [])(lambda: None)


def test_roofline_marks_the_ridge_and_labels_points_without_overlap():
    figures.use_style()
    h100 = ACCELERATORS["h100"]
    points = [(f"B={B}", B, 0.8 * min(h100.peak(), B * h100.bandwidth_bytes_per_s))
              for B in (1, 2, 3, 4, 64, 256, 300, 1024)]  # fmt: skip
    ax = figures.roofline(h100, "bf16", points, compare=[ACCELERATORS["a100"]])
    drawn = {text.get_text(): text for text in ax.texts}
    assert f"ridge {h100.ridge():.0f}" in drawn
    boxes = [drawn[label].get_window_extent() for label, *_ in points]
    for k, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[k + 1 :])


def test_predicted_is_dashed_measured_solid_with_its_spread():
    x = [1, 2, 4, 8]
    ax = figures.predicted_vs_measured(x, [2, 4, 8, 16], np.array([1.0, 2, 4, 8]), spread=0.1)
    predicted, measured = ax.lines
    assert (predicted.get_linestyle(), measured.get_linestyle()) == ("--", "-")
    assert len(ax.collections) == 1
    ax = figures.predicted_vs_measured(x, [2, 4, 8, 16], None)
    assert "not measured here" in [text.get_text() for text in ax.texts]


def test_caption_adds_to_what_the_figure_already_says():
    ax = figures.bars(["a", "b"], [1, 2], "FLOPs per byte", source="a data sheet")
    figures.caption(ax, device="H100", dtype="bf16", shapes="B=1", seed=0)
    assert ax.figure.get_supxlabel() == "Source: a data sheet · H100 · bf16 · B=1 · seed 0"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (294.9, "295"), (12_376, "12,400"), (0.03123, "0.0312"), (3.4e12, "3.4e+12")],
)
def test_number_keeps_three_digits(value, text):
    assert style.number(value) == text


def test_a_picture_in_a_notebook_is_small():
    figures.use_style()
    ax = figures.roofline(ACCELERATORS["h100"], points=[("B=1", 1, 2e12), ("B=64", 60, 1e14)])
    assert len(style.small_png(ax.figure)) < 30_000


def test_a_folder_that_is_not_there_or_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for args, says in [
        (["--check", "--folder", str(tmp_path / "nope")], "no such folder"),
        (["--folder", str(tmp_path / "file" / "x")], "can't write to"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(args)
        assert says in capsys.readouterr().err
