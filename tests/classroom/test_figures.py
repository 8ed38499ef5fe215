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
from lecture_util.classroom.figures import cla, cli, mla_tables, style
from lecture_util.model.config import PUBLISHED
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
    assert re.fullmatch(r"0[0-5]", still.notebook)
    picture = cli.IMAGES / f"{still.name}.svg"
    assert picture.stat().st_size < 100_000
    content = picture.read_text()
    assert "<dc:date>" not in content
    assert "<text" not in content  # outlines: equal with and without our fonts
    index = (cli.IMAGES / "README.md").read_text()
    assert still.alt in index
    assert f"]({still.name}.svg)" in index
    assert still.title in texts(still.name)


def test_every_picture_of_the_lecture_so_far_is_answered():
    answered = {answer for still in figures.FIGURES.values() for answer in still.answers}
    assert {
        "openai-100b-tokens",
        "cursor-1b-lines",
        "transformer-diagram",
        "naive-inference",
        "cached-inference",
        "gmqa",
        "gqa-speed",
        "gqa-accuracy",
        "mla-schema",
        "mla-accuracy",
        "mla-accuracy-2",
        "cla-diagram",
        "cla-results",
        "longformer-attention",
        "character.ai figure",
        "s4-summary",
        "based-associative-recall",
        "jamba-architecture",
        "based-attention",
        "diffusion-lm",
        "Mercury picture",
    } <= answered


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


def test_masked_passes_drawn_uncover_every_position_once():
    drawn = texts("diffusion-passes")
    for passes, positions in [(12, 12), (4, 48), (6, 72)]:
        assert f"{passes} passes" in drawn
        assert f"{positions} positions computed" in drawn


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
