"""The table: what each row compares, with numbers by hand; and a whole one of a tiny model."""

import json
from dataclasses import replace

import pytest
import together_models as tiny
import torch

from lecture_util.pruning.prune import drop_layers
from lecture_util.speculative.speculate import Tally
from lecture_util.together import table as room
from lecture_util.together import variants as variants_room
from lecture_util.together.configuration import Configuration, conflicts
from lecture_util.together.costs import Costs
from lecture_util.together.predict import Prediction
from lecture_util.together.run import Answer, Outcome
from lecture_util.together.scenarios import SERVER as MACHINE
from lecture_util.together.table import ROWS, Row, bytes_ratio, make_table, markdown
from lecture_util.together.variants import Variants, held_bytes

QUALITY = {
    ("fp32", False): 20.0, ("int4", False): 24.0, ("fp32", True): 30.0, ("int4", True): 40.0,
    ("bf16", False): 20.5, ("int8", False): 21.0,
}  # fmt: skip
KEYS = ("tokens_per_s", "ttft_s", "memory_bytes")
SCHEMA = {
    "label", "configuration", *KEYS, *(f"predicted_{k}" for k in KEYS),
    *(f"limit_{k}" for k in KEYS), "tpot_s", "tokens_per_forward", "tokens_per_round",
    "predicted_perplexity", "perplexity", "same_tokens",
}  # fmt: skip
QUESTIONS = tiny.workload(news=(30, 9, 25, 2, 40), seed=3)
WORK = tiny.workload((21, 40, 18), (7, 12, 9), seed=8)


def outcome(seconds=4.0, tally=None):
    return Outcome((Answer((1, 2), 0.0, 2.0, seconds),), 100, 20, 2, 5, tally)


ROW = Row(
    "a row",
    Configuration("int8"),
    Prediction(4.0, 0.5, 90, 20),
    Prediction(0.6, 3.0, 110, 40),
    outcome(),
    (21.0, 22.5),
    0.75,
)


def test_an_error_is_predicted_over_measured_less_one():
    assert ROW.error("tokens_per_s") == pytest.approx(0.6 / 0.5 - 1)
    assert ROW.error("ttft_s") == pytest.approx(0.5)
    assert ROW.error("memory_bytes") == pytest.approx(150 / 125 - 1)


def test_a_record_is_plain_numbers_of_the_agreed_names():
    record = ROW.record()
    assert set(record) == SCHEMA
    assert json.loads(json.dumps(record)) == record
    assert record == {
        "label": "a row", "configuration": "int8, cache", "tokens_per_s": 0.5, "ttft_s": 2.0,
        "memory_bytes": 125, "predicted_tokens_per_s": 0.6, "predicted_ttft_s": 3.0,
        "predicted_memory_bytes": 150, "limit_tokens_per_s": 4.0, "limit_ttft_s": 0.5,
        "limit_memory_bytes": 110, "tpot_s": 2.0, "tokens_per_forward": 1.0,
        "tokens_per_round": None, "predicted_perplexity": 21.0, "perplexity": 22.5,
        "same_tokens": 0.75,
    }  # fmt: skip
    drafted = replace(ROW, measured=outcome(tally=Tally(rounds=4, tokens=10)))
    assert drafted.record()["tokens_per_round"] == 2.5


def test_markdown_shows_each_quantity_predicted_measured_and_how_far_off():
    fast = ROW.record() | {
        "label": "fast", "tokens_per_s": 1234.4, "predicted_tokens_per_s": 99.96,
        "memory_bytes": 236e6, "predicted_memory_bytes": 118e6, "limit_tokens_per_s": 5000.4,
    }  # fmt: skip
    header, line, first, second = markdown([ROW.record(), fast]).split("\n")
    assert first == (
        "| a row | 4 | 0.6 | 0.5 | +20% | 3.00 s | 2.00 s | +50% | 0 MB | 0 MB | +20% | 21.0 | "
        "22.5 | 75% |"
    )
    assert second.startswith("| fast | 5000 | 100 | 1234 | -92% | ")
    assert "| 118 MB | 236 MB | -50% |" in second
    assert len({text.count("|") for text in (header, line, first, second)}) == 1
    assert set(line) == {"|", "-"}
    assert markdown([]).split("\n") == [header, line]


def test_changes_multiply_what_each_costs_alone():
    expect = {
        ("fp32", False): 20.0, ("int4", False): 24.0, ("fp32", True): 30.0, ("int4", True): 36.0
    }  # fmt: skip
    for (weights, student), value in expect.items():
        c = Configuration(weights, student)
        assert room._together(QUALITY, c) == pytest.approx(value)
        served = replace(c, schedule="continuous", slots=4, pages=True, prefix=True)
        assert room._together(QUALITY, served) == room._together(QUALITY, c)


def test_each_row_can_be_run_and_only_the_first_keeps_no_cache():
    labels = [label for label, _ in ROWS]
    assert len(set(labels)) == len(ROWS) == 21
    assert len({c for _, c in ROWS}) == len({str(c) for _, c in ROWS}) == 21
    assert not any(conflicts(c) for _, c in ROWS)
    assert [c.cache for _, c in ROWS] == [False] + [True] * 20
    used = {c.weights for _, c in ROWS}
    assert used == {"fp32", "bf16", "int8", "int4"}
    assert {c.draft for _, c in ROWS} == {None, "ngram", "medusa", "eagle"}


def test_every_draft_is_tried_once_on_each_weights_that_use_it():
    assert room._drafts(c for _, c in ROWS) == {
        "fp32": ["ngram", "medusa", "eagle"], "bf16": [], "int8": [], "int4": ["ngram", "eagle"]
    }  # fmt: skip


TABLE_ROWS = (
    ("naive", Configuration(cache=False)),
    ("cache", Configuration()),
    ("int4", Configuration("int4")),
    ("n-grams", Configuration(draft="ngram")),
    ("student", Configuration(student=True)),
    ("all", Configuration("int4", True, schedule="continuous", slots=3, pages=True, prefix=True)),
)


@pytest.fixture(scope="module")
def made():
    """A table of a tiny model whose student has a layer less, and whose perplexities are given;
    each forward is said to take a millisecond, and each row is served three times."""
    asked, served = [], []
    patch = pytest.MonkeyPatch()
    patch.setattr(variants_room, "load_student", lambda model: drop_layers(model, [1]))
    variants = Variants(tiny.tiny_model(dtype=torch.float32))
    calibrations = []

    def calibrate(_, weights, questions, drafts):
        calibrations.append((weights, questions, drafts))
        step = lambda pieces: {"fp32": 1e-3, "int4": 5e-4}[weights]  # noqa: E731
        known = {d: 2.0 for d in drafts}
        return Costs(step, step, {}, known, known)

    def perplexity(model, held_BT):
        (key,) = (k for k in QUALITY if variants._made.get(k) is model)
        asked.append(key)
        return QUALITY[key]

    def serve(model, c, workload):
        served.append(c)
        turn = served.count(c)
        rate = {1: 1.0, 2: 3.0, 3: 2.0}[turn]  # of three runs the last is the median
        run = room_serve(model, c, workload, tiny.virtual(lambda pieces: rate))
        return run

    room_serve = room.serve
    patch.setattr(room, "calibrate", calibrate)
    patch.setattr(room, "perplexity", perplexity)
    patch.setattr(room, "serve", serve)
    held_BT = torch.ones(2, 4, dtype=torch.long)
    rows = make_table(
        variants, WORK, QUESTIONS, held_BT, TABLE_ROWS, MACHINE, rounds=3, progress=False
    )
    patch.undo()
    return variants, rows, asked, served, calibrations


def test_a_table_has_a_row_for_each_configuration(made):
    _, rows, *_ = made
    assert [(row.label, row.configuration) for row in rows] == list(TABLE_ROWS)
    for row in rows:
        record = row.record()
        assert set(record) == SCHEMA and json.loads(json.dumps(record)) == record
        assert (record["tokens_per_round"] is None) == (row.configuration.draft is None)
    assert len(markdown(row.record() for row in rows).split("\n")) == 2 + len(rows)


def test_rows_run_in_turns_and_the_median_is_kept(made):
    _, rows, _, served, _ = made
    assert served == [c for _ in range(3) for _, c in TABLE_ROWS]
    for row in rows[:2]:  # every forward of the last turn took two seconds
        assert row.measured.seconds == 2 * WORK.new_tokens[0] * 4 == 56
        assert row.measured.forwards == sum(WORK.new_tokens)


def test_perplexities_are_measured_once_for_each_model_and_multiplied(made):
    _, rows, asked, *_ = made
    assert sorted(asked) == [("fp32", False), ("fp32", True), ("int4", False), ("int4", True)]
    pairs = {row.label: row.perplexity for row in rows}
    assert pairs == {
        "naive": (20.0, 20.0), "cache": (20.0, 20.0), "int4": (24.0, 24.0),
        "n-grams": (20.0, 20.0), "student": (30.0, 30.0), "all": (36.0, 40.0),
    }  # fmt: skip


def test_the_first_row_is_compared_with(made):
    _, rows, *_ = made
    same = {row.label: row.same_tokens for row in rows}
    assert same["naive"] == same["cache"] == same["n-grams"] == 1
    assert same["int4"] < 1 and same["student"] < 1 and same["all"] < 1
    for row in rows:
        assert row.same_tokens == row.measured.same_tokens(rows[0].measured)


def test_predictions_are_made_from_the_questions_and_a_students_from_its_bytes(made):
    variants, rows, _, _, calibrations = made
    assert calibrations == [("fp32", QUESTIONS, ["ngram"]), ("int4", QUESTIONS, [])]
    by = {row.label: row.predicted for row in rows}
    tokens = sum(WORK.new_tokens)
    assert by["cache"].tokens_per_s == pytest.approx(1000)
    assert by["int4"].tokens_per_s == pytest.approx(2000)
    assert by["n-grams"].tokens_per_s == pytest.approx(2000)  # two tokens a round
    ratio = held_bytes(variants.get("fp32", True)) / held_bytes(variants.get("fp32"))
    assert bytes_ratio(replace(tiny.TINY, L=1), tiny.TINY, "fp32") == ratio < 1
    assert by["student"].tokens_per_s == pytest.approx(1000 / ratio)
    ratio = held_bytes(variants.get("int4", True)) / held_bytes(variants.get("int4"))
    forwards = rows[-1].measured.forwards
    assert by["all"].tokens_per_s == pytest.approx(2000 / ratio * tokens / forwards)
    for row in rows:
        assert row.predicted.memory_bytes == row.limit.memory_bytes
        assert row.predicted.weight_bytes == row.measured.weight_bytes
        assert row.predicted.cache_bytes == row.measured.cache_bytes
        assert row.limit.tokens_per_s > row.predicted.tokens_per_s  # of a much larger machine


def test_a_table_of_nothing_is_refused_before_anything_is_measured(monkeypatch):
    def never(*args, **options):
        raise AssertionError("measured")

    for name in ("this_machine", "calibrate", "perplexity", "serve"):
        monkeypatch.setattr(room, name, never)
    given = (object(), WORK, QUESTIONS, torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="0 rows, rounds=1: expected at least one of each"):
        make_table(*given, rows=())
    for rounds in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"6 rows, rounds={rounds}"):
            make_table(*given, TABLE_ROWS, rounds=rounds)
    overlap = replace(QUESTIONS, prompts=(WORK.prompts[1], *QUESTIONS.prompts[1:]))
    with pytest.raises(ValueError, match="some questions are in the workload too"):
        make_table(object(), WORK, overlap, given[-1], TABLE_ROWS)
