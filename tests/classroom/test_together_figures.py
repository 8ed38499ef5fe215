"""Figures of putting it together draw what the formulas say, and whatever a record holds."""

import copy
import itertools
import re

import matplotlib
import matplotlib.pyplot as plt
import pytest

from lecture_util.classroom import figures
from lecture_util.classroom.figures import (
    cli,
    combining,
    course_map,
    small_caches,
    speculation_batch,
    tensor_parallel,
    together_errors,
    together_runs,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS
from lecture_util.together.configuration import Configuration, Incompatible
from lecture_util.together.scenarios import LAPTOP
from lecture_util.together.student import student_facts
from lecture_util.together.table import ROWS

matplotlib.use("agg")
REGISTERS = "together", (together_runs, together_errors)
RECORDED = ("ladder", "prediction-errors", "speed-memory")


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


def texts(still: figures.registry.StillFigure) -> str:
    """Every word drawn in a figure."""
    found = still.draw().findobj(match=matplotlib.text.Text)
    return "\n".join(text.get_text() for text in found)


def alt_and_drawn(name: str) -> tuple[str, str]:
    return figures.FIGURES[name].alt, texts(figures.FIGURES[name])


def synthetic(gain: float = 1.0) -> dict:
    """A record in the schema of benchmarks/together.py, by formula: nothing was measured.

    gain: the power of every technique's factor; at 0 and below none helps, and no title holds.
    """
    rows = []
    for k, (label, c) in enumerate(ROWS):
        smaller = {"fp32": 1, "bf16": 0.5, "int8": 0.42, "int4": 0.23}[c.weights]
        factor = 1.0 if c.cache else 0.1
        factor *= {"fp32": 1, "bf16": 1.3, "int8": 1.5, "int4": 1.9}[c.weights]
        factor *= 1.2 if c.student else 1
        factor *= {None: 1, "ngram": 1.9, "medusa": 1.2, "eagle": 1.1}[c.draft]
        factor *= {"single": 1, "static": 2.0, "continuous": 2.2}[c.schedule]
        factor *= (1.02 if c.pages else 1) * (1.6 if c.prefix else 1)
        speed = 20 * factor**gain
        memory = 538e6 * smaller * (0.9 if c.student else 1) + 3e6 * c.slots
        off = 1 + (0.12 if k % 2 else -0.2) * gain
        rows.append({
            "label": label, "configuration": str(c), "tokens_per_s": speed,
            "ttft_s": 20 / speed, "memory_bytes": memory,
            "predicted_tokens_per_s": speed * off, "predicted_ttft_s": 20 / speed / off,
            "predicted_memory_bytes": memory * (0.68 if c.weights == "int4" else 1),
            "limit_tokens_per_s": 1.6 * speed * max(1, off), "limit_ttft_s": 5 / speed,
            "limit_memory_bytes": memory, "tpot_s": 1 / speed, "tokens_per_forward": factor,
            "tokens_per_round": 2.5 if c.draft else None,
            "predicted_perplexity": 21 / smaller**0.1, "same_tokens": 1.0,
            "perplexity": 21 / smaller**0.12 * (1.15 if c.student else 1),
        })  # fmt: skip
    return {
        "date": "2020-02-02",
        "hardware": "Processor of no machine, 2 threads",
        "device": "cpu",
        "bandwidth_bytes_per_s": 1e10,
        "flops_per_s": {"fp32": 1e11},
        "versions": {},
        "workload": {"requests": 12, "prompt_tokens": [280, 300] * 6, "new_tokens": [12, 64] * 6,
                     "rounds": 3, "windows": 64},
        "rows": rows,
    }  # fmt: skip


def refused(*names: str) -> bool:
    """Whether Configuration has something against these together, all else left off."""
    fields: dict = {}
    for name in names:
        if fields.keys() & combining.TECHNIQUES[name].keys():
            return True  # two drafts
        fields |= combining.TECHNIQUES[name]
    try:
        Configuration(**fields)
    except Incompatible:
        return True
    return False


PAIRS = list(itertools.combinations(combining.TECHNIQUES, 2))


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_pair_is_excluded_where_no_configuration_has_both(a, b):
    others = [name for name in combining.TECHNIQUES if name not in (a, b)]
    found = any(
        not refused(a, b, *more)
        for count in range(3)
        for more in itertools.combinations(others, count)
    )
    assert (combining.pair(a, b).kind == combining.NOT) is not found


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_one_needs_the_other_where_it_is_refused_without(a, b):
    kind = combining.pair(a, b).kind
    ground = {name: combining.needs(name) for name in (a, b)}
    for name, needed in ground.items():
        assert refused(name) is bool(needed)
        assert not refused(name, *needed)
    assert (kind == combining.NEEDS) is (a in ground[b] or b in ground[a])


def test_speeds_behind_the_pairs_are_two_peaks_summed_over_the_forwards():
    config, work = PUBLISHED["smollm2-135m"], combining.made_up()
    weights = 4 * (config.L * (2 * config.D * (config.N + config.K) * config.H
                               + 3 * config.D * config.F + 2 * config.D)
                   + config.V * config.D + config.D)  # fmt: skip
    token = 4 * 2 * config.L * config.K * config.H
    dense = 2 * config.L * (2 * config.D * (config.N + config.K) * config.H
                            + 3 * config.D * config.F)  # fmt: skip
    seconds = 0.0
    for prompt, count in zip(work.prompts, work.new_tokens, strict=True):
        for i in range(count):
            start, T = (len(prompt) + i - 1, 1) if i else (0, len(prompt))
            S = start + T
            pairs = sum(start + t + 1 for t in range(T))
            flops = T * dense + 4 * config.L * config.N * config.H * pairs
            flops += 2 * config.D * config.V
            moved = weights + token * (S + T)
            seconds += max(flops / 0.4e12, moved / 30e9)
    assert (LAPTOP.flops_per_s["fp32"], LAPTOP.bandwidth_bytes_per_s) == (0.4e12, 30e9)
    assert combining.speed(()) == pytest.approx(sum(work.new_tokens) / seconds, rel=1e-6)


def test_the_matrix_is_what_its_title_and_alt_text_say():
    table = combining.table()
    kinds = [found.kind for found in table.values()]
    times = kinds.count(combining.TIMES)
    assert 0 < times < len(kinds) / 3  # "few"
    assert kinds.count(combining.LESS) > 1
    assert kinds.count(combining.NOT) > 1
    alt, drawn = alt_and_drawn("what-combines")
    words = drawn.split("\n")
    for kind, short in combining.SHORT.items():
        assert words.count(short) == kinds.count(kind) + 1  # and once in the legend
    for found in table.values():
        if found.kind in (combining.TIMES, combining.MORE, combining.LESS):
            assert f"× {found.share:.2f}" in words
    four = {b: found for (a, b), found in table.items() if a == "4-bit weights"}
    assert (four["batching"].kind, four["shared prefix"].kind) == (combining.LESS, combining.MORE)
    assert f"({four['batching'].share:.2f} of the product)" in alt
    assert f"prefix ({four['shared prefix'].share:.2f})" in alt
    assert four["n-gram drafts"].kind == four["EAGLE's head"].kind == combining.LESS
    student = {a if b == "student" else b: found.kind for (a, b), found in table.items()
               if "student" in (a, b)}  # fmt: skip
    assert student.pop("EAGLE's head") == combining.NOT
    assert student.pop("pages") == combining.NONE
    assert set(student.values()) == {combining.TIMES}
    assert 0 < combining.drafts_in_a_batch() < 0.9
    assert words.count(f"(× {combining.drafts_in_a_batch():.2f})") == 2


def test_made_up_questions_share_their_beginning_and_nothing_else():
    work = combining.made_up(7, shared=20, asks=5, new=8)
    assert [prompt[:20] for prompt in work.prompts] == [tuple(range(20))] * 7
    rest = [token for prompt in work.prompts for token in prompt[20:]]
    assert len(rest) == len(set(rest) - set(range(20))) == 7 * 5
    assert sorted(set(work.new_tokens)) == [4, 8, 16]
    assert combining.made_up(1, shared=0, asks=1, new=1).prompts == ((0,),)


def test_the_student_s_shape_keeps_the_share_of_layers_of_the_course_s_own():
    dropped = student_facts()["dropped"]
    smol = PUBLISHED["smollm2-135m"]
    assert combining.cut_config(smol).L == smol.L - len(dropped)
    whole = PUBLISHED["llama-2-13b"]
    cut = combining.cut_config(whole)
    assert cut.L / whole.L == pytest.approx(1 - len(dropped) / smol.L, abs=0.5 / whole.L)
    assert (cut.D, cut.V, cut.K) == (whole.D, whole.V, whole.K)


def test_guesses_stop_paying_where_the_figure_says():
    alt, drawn = alt_and_drawn("speculation-batch")
    for gamma in speculation_batch.GAMMAS:
        last, S = speculation_batch.pays_until(gamma, 128), 128
        assert (
            speculation_batch.gain(last, gamma, S) > 1 >= speculation_batch.gain(last + 1, gamma, S)
        )
        gains = [speculation_batch.gain(B, gamma, S) for B in speculation_batch.batches(S, gamma)]
        assert all(more >= less - 1e-12 for more, less in itertools.pairwise(gains))
        tokens = sum(0.8**k for k in range(gamma + 1))  # a round's: each guess needs the last
        assert gains[0] == pytest.approx(tokens, rel=0.01)  # reading decides: guesses are free
        assert gains[-1] == pytest.approx(tokens / (gamma + 1), rel=0.01)  # computing decides
        assert f"γ = {gamma}, B ≤ {last}" in drawn
        assert re.search(rf"{gamma} (guess )?gains? .*{gains[0]:.2f} .*to .*{last}", alt)
    fits = {S: speculation_batch.most(S, 4) for S in speculation_batch.CONTEXTS}
    for S, B in fits.items():
        config = PUBLISHED["llama-3-8b"]
        held = 2 * (B * (S + 5) * 2 * config.L * config.K * config.H)
        free = ACCELERATORS["h100"].memory_bytes - figures.workload.weight_bytes(config)
        assert held <= free < held / B * (B + 1)
        assert (speculation_batch.gain(B, 4, S) > 1) is (S > 128)  # "unless their texts are long"


def test_shards_drawn_are_those_of_the_plan():
    alt, drawn = alt_and_drawn("tensor-parallel")
    c = PUBLISHED["llama-3-8b"]
    assert f"{c.N // 2} of {c.N} query heads" in drawn
    assert f"{c.K // 2} of {c.K} KV heads" in drawn
    assert f"{c.F // 2:,} of {c.F:,}" in drawn
    assert f"{c.F // 2:,} of {c.F:,} channels" in alt
    assert f"{c.N // 2} query heads and {c.K // 2} of {c.K} KV heads" in alt
    assert f"its {c.K // 2} KV heads".replace(" ", "") in re.sub(r"\s", "", drawn)
    assert f"{2 * c.L + 1} a forward" in drawn
    assert f"{2 * c.L + 1} with the embedding's" in alt
    assert drawn.count("all-reduce:") == 2
    assert [style for style in tensor_parallel.RANKS] == [*dict.fromkeys(tensor_parallel.RANKS)]


def test_the_map_has_every_notebook_once_and_by_its_name():
    stops = [stop for _, _, step in course_map.PATH for stop in step]
    names = {stop.number: stop.name for stop in stops} | dict([course_map.LAST[:2]])
    assert sorted([s.number for s in stops] + ["12"]) == [f"{k:02}" for k in range(13)]
    alt, drawn = alt_and_drawn("course-map")
    for number in names:
        assert drawn.split("\n").count(number) == 1
        assert re.search(rf"\b{number}\b", alt)
    sources = {path.name[:2]: path.stem for path in (cli.IMAGES.parent / "solutions").glob("*.py")}
    assert sources.keys() <= names.keys()
    for number, stem in sources.items():
        shared = set(re.findall(r"[a-z]+", names[number].lower())) & set(stem.split("_"))
        assert shared - {"the", "of"}, (names[number], stem)


def test_recorded_figures_wait_for_their_record(registered):
    assert registered(None) == {}
    run = synthetic()
    assert registered({key: run[key] for key in ("date", "rows")}) == {}
    assert tuple(sorted(registered(run))) == RECORDED


def test_recorded_figures_are_small(registered, tmp_path):
    for name, still in registered(synthetic(1.2)).items():
        cli.render(still, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size < cli.MAX_BYTES


def test_recorded_figures_draw_whatever_was_measured(registered):
    for still in registered(synthetic(-0.4)).values():
        assert 80 < len(still.alt) < 500, still.alt
        assert still.alt.endswith(".")
        drawn = texts(still)
        assert still.title in drawn
        assert "2020-02-02, Processor of no machine, 2 threads" in drawn.replace("\n", " ")


def test_groups_of_the_table_hold_every_row_once():
    groups = together_runs.grouped(synthetic())
    assert [row["label"] for rows in groups.values() for row in rows] == [n for n, _ in ROWS]
    assert [row["label"] for row in groups[together_runs.SERVER]] == [
        "continuous batching", "+ pages", "+ prefix sharing"
    ]  # fmt: skip
    assert len(groups[together_runs.TOGETHER]) == 8


def test_numbers_of_recorded_figures_are_the_record_s(registered):
    run = synthetic(1.1)
    found = registered(run)
    fig = found["ladder"].draw()
    drawn = [text.get_text() for text in fig.findobj(match=matplotlib.text.Text)]
    points = {(line.get_xdata()[0], line.get_mfc()) for line in fig.axes[0].lines
              if line.get_marker() == "o"}  # fmt: skip
    for row in run["rows"]:
        assert row["label"] in drawn
        assert figures.number(row["tokens_per_s"]) in drawn
        assert (row["predicted_tokens_per_s"], "white") in points
        assert (row["tokens_per_s"], figures.MEASURED) in points
    best = max(run["rows"], key=lambda row: row["tokens_per_s"])
    assert f"{best['label']} {figures.number(best['tokens_per_s'])}" in found["ladder"].alt
    alt = found["prediction-errors"].alt
    ratios = [row["predicted_ttft_s"] / row["ttft_s"] for row in run["rows"]]
    assert f"time to first token {min(ratios):.2f} to {max(ratios):.2f}" in alt


def test_nothing_beats_the_frontier_in_both_and_all_else_is_beaten(registered):
    run = synthetic(0.7)

    def beaten(row: dict) -> bool:
        return any(
            other["tokens_per_s"] >= row["tokens_per_s"]
            and other["memory_bytes"] <= row["memory_bytes"]
            for other in run["rows"]
            if other is not row
        )

    labels = [row["label"] for row in together_runs.frontier(run)]
    assert labels == [row["label"] for row in sorted(
        (row for row in run["rows"] if not beaten(row)), key=lambda row: row["memory_bytes"]
    )]  # fmt: skip
    alt = registered(run)["speed-memory"].alt
    for label in labels:
        assert label in alt


def combinations_win(run: dict) -> bool:
    groups = together_runs.grouped(run)
    alone, *_, both = (together_runs.fastest(rows)["tokens_per_s"] for rows in groups.values())
    fastest = together_runs.fastest(run["rows"])
    return fastest in groups[together_runs.TOGETHER] and both > 1.25 * alone


def frontier_combines(run: dict) -> bool:
    together = together_runs.grouped(run)[together_runs.TOGETHER]
    return all(row in together for row in together_runs.frontier(run))


def bytes_are_easier(run: dict) -> bool:
    off = {key: together_errors.typical(run, key) for key in together_errors.QUANTITIES}
    return off.pop("memory_bytes") < min(off.values())


HOLDS = {
    "ladder": combinations_win,
    "prediction-errors": bytes_are_easier,
    "speed-memory": frontier_combines,
}


@pytest.mark.parametrize("name", HOLDS)
def test_the_record_supports_the_titles_above_it(name):
    assert name in figures.FIGURES, "run benchmarks/together.py"
    run = small_caches.recorded("together")
    assert [row["label"] for row in run["rows"]] == [label for label, _ in ROWS]
    assert HOLDS[name](run)


def test_titles_can_be_found_unsupported():
    run = synthetic()
    assert all(holds(run) for holds in HOLDS.values())
    slow, wrong = synthetic(-0.4), copy.deepcopy(run)
    for row in wrong["rows"]:
        row["predicted_memory_bytes"] *= 2
    assert not combinations_win(slow)
    assert not frontier_combines(slow)
    assert not bytes_are_easier(wrong)
