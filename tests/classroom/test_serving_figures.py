"""Figures of serving draw what our scheduler and allocator do, and whatever a record holds."""

import copy
import math

import matplotlib
import matplotlib.pyplot as plt
import pytest

from lecture_util.classroom import figures
from lecture_util.classroom.figures import (
    cli,
    page_sharing,
    paging,
    paging_runs,
    serving,
    serving_runs,
    small_caches,
)

matplotlib.use("agg")
REGISTERS = "serving", (serving_runs, paging_runs)
RECORDED = ("engine-peers", "load-curve", "memory-waste", "scheduling-measured", "token-budgets")


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


def test_batches_drawn_give_each_request_its_tokens_and_waste_what_arithmetic_says():
    loops = serving.batches()
    for loop in loops.values():
        parts = [part for i in loop.iterations for part in i.parts if part.kind != "padding"]
        for number, count in enumerate(serving.NEW_TOKENS):
            assert sum(part.number == number for part in parts) == count
    batches = serving.NEW_TOKENS[:4], serving.NEW_TOKENS[4:]
    forwards = sum(map(max, batches))
    padding = sum(4 * max(batch) - sum(batch) for batch in batches)
    static, continuous = (serving.tally(loop) for loop in loops.values())
    assert static == (forwards, padding, 4 * forwards, 1 + max(batches[0]))
    assert continuous.padding == 0
    assert continuous.first_of_E == 1 + min(batches[0])  # the first to end makes room
    assert continuous.forwards >= math.ceil(sum(serving.NEW_TOKENS) / 4)
    alt, drawn = alt_and_drawn("static-batching")
    assert f"{static.padding} of {static.rows} rows for nothing" in alt
    for found in (static, continuous):
        assert f"{found.forwards} forwards" in alt
        assert f"{found.forwards} forwards" in drawn
        assert f"{found.padding} of {found.rows} rows for nothing" in drawn
        assert f"E's first token: forward {found.first_of_E}" in drawn


def test_the_flat_run_drawn_keeps_the_texts_apart():
    frame = serving.flat_run()
    assert frame.positions_1T.tolist() == [[*range(3), *range(9), *range(5)]]
    spans = [(rows.start, rows.stop, S) for rows, _, S in frame.runs]
    assert spans == [(0, 3, 3), (3, 12, 9), (12, 17, 5)]
    assert len({table[0] for _, table, _ in frame.runs}) == 3
    alt, drawn = alt_and_drawn("selective-batching")
    for shape in ("[3, D]", "[9, D]", "[5, D]", "[17, D]"):
        assert shape in alt
        assert shape in drawn


def test_the_pause_for_a_whole_prompt_is_its_forward_and_chunks_shorten_it():
    alt, drawn = alt_and_drawn("chunked-prefill")
    pauses = {}
    for name, (loop, done) in serving.prefills().items():
        start, pauses[name] = serving.longest_pause(done)
        (forward,) = (i for i in loop.iterations if i.start_s == start)
        assert pauses[name] == pytest.approx(forward.seconds)
        assert {part.kind for part in forward.parts} == {"prefill", "decode"}
        for number in (pauses[name], done[-1].ttft_s):
            assert f"{1e3 * number:.3g} ms" in alt
            assert f"{1e3 * number:.3g} ms" in drawn
        assert done[-1].arrival_s > done[0].token_times_s[0]  # the others do decode when it comes
        shown_s = serving.SHOWN_MS[1] / 1e3
        assert start + pauses[name] < shown_s < min(c.finished_s for c in done[:-1])
    assert pauses["in chunks"] < pauses["whole"] / 5


def test_what_two_texts_rent_adds_up_to_their_rows():
    waste = paging.rented()
    rows, pages = waste["rows"], waste["pages"]
    stored = sum(one.prompt + one.made for one in paging.EXAMPLE)
    coming = sum(one.coming for one in paging.EXAMPLE)
    assert rows.total == sum(one.row for one in paging.EXAMPLE) == 2048 + 512
    assert (rows.stored, rows.reserved, rows.external) == (stored, coming, 0)
    page_count = sum(-(-one.stored // paging.PAGE) for one in paging.EXAMPLE)
    assert (pages.stored, pages.total) == (stored, paging.PAGE * page_count)
    alt, drawn = alt_and_drawn("paged-fragmentation")
    for found in (rows, pages):
        assert f"{found.stored} of {found.total:,} places" in alt
        assert f"{found.stored} of {found.total:,} places" in drawn
    for one in paging.EXAMPLE:
        never = one.row - one.prompt - one.made - one.coming
        assert f"{never:,}" in alt
        assert f"{never:,} never used" in drawn


def test_tables_drawn_are_those_of_the_lecture():
    blocks, tables = paging.two_tables()
    assert [table.pages for table in tables.values()] == [[7, 1, 3], [5, 2]]
    assert sorted(blocks.free) == [0, 4, 6]
    alt, drawn = alt_and_drawn("paged-blocks")
    for table in tables.values():
        assert ", ".join(map(str, table.pages)) in alt
        assert all(drawn.split("\n").count(word) >= 2 for word in table.tokens)
    assert drawn.count("free") == 3


def test_pages_drawn_as_shared_are_counted_by_every_table():
    blocks, tables = page_sharing.shared()
    common = len(page_sharing.SYSTEM) // page_sharing.P
    for page in range(blocks.num_pages):
        assert blocks.counts[page] == sum(page in table.pages for table in tables)
    assert all(table.pages[:common] == tables[0].pages[:common] for table in tables)
    held = len({page for table in tables for page in table.pages})
    apart = sum(-(-len(table) // page_sharing.P) for table in tables)
    alt, drawn = alt_and_drawn("paged-sharing")
    assert f"{held} pages are held instead of {apart}" in alt
    assert f"{held} pages held, not {apart}" in drawn
    for table in tables:
        assert ", ".join(map(str, table.pages)) in alt


def test_the_copy_drawn_is_of_page_1_to_page_3():
    forked, first, second = page_sharing.copied()
    assert forked.tables == [[7, 1], [7, 1]]
    assert forked.counts == {7: 2, 1: 2}
    assert first.copies == [(1, 3)]
    assert first.tables == [[7, 3], [7, 1]]
    assert first.counts == {7: 2, 3: 1, 1: 1}
    assert second.copies == forked.copies == []
    assert (second.tables, second.counts) == (first.tables, first.counts)
    drawn = texts(figures.FIGURES["copy-on-write"])
    assert (drawn.count("count 2"), drawn.count("count 1")) == (2 + 1 + 1, 2 + 2)


def test_names_drawn_depend_on_what_came_before():
    _, (first, same, other) = page_sharing.chains()
    assert first[0].name == same[0].name != other[0].name
    assert first[1].words == other[1].words
    assert first[1].name != other[1].name
    assert [[link.found for link in links] for links in (first, same, other)] == [
        [False, False], [True, False], [False, False]
    ]  # fmt: skip
    drawn = texts(figures.FIGURES["prefix-chain"])
    for links in (first, same, other):
        for link in links:
            assert f"name {link.name}…, {'found' if link.found else 'computed'}" in drawn


def synthetic(speed: float = 2.0) -> dict:
    """A record in the schema of benchmarks/serving.py, by formula: nothing was measured."""

    def percentiles(middle: float) -> dict:
        return {"p50": middle, "p90": 2 * middle, "p99": 5 * middle}

    def row(k: int, name: str) -> dict:
        rate = 50.0 * (speed if k else 1)
        return {"name": name, "slots": 16, "tokens_per_s": rate + k, "seconds": 4000 / rate,
                "ttft": percentiles(0.5 if k else 0.5 * speed**2),
                "tpot": percentiles(0.05 + k / 99)}  # fmt: skip

    def load(policy: str, capacity: float, source: str, count: int) -> list[dict]:
        rates = [capacity * (k + 1) / (count + 1) for k in range(count)]
        return [{"policy": policy, "rate_per_s": rate, "source": source,
                 "ttft": percentiles(0.2 / (1 - rate / capacity))} for rate in rates]  # fmt: skip

    return {
        "date": "2020-02-02",
        "hardware": "Processor of no machine, 2 threads",
        "dtype": "fp32",
        "scheduling": [row(k, name) for k, name in enumerate(serving_runs.SERVERS)],
        "load": [*load("static", 1, "simulated", 12), *load("continuous", speed, "simulated", 12),
                 *load("continuous", speed, "measured", 3), *load("static", 1, "measured", 3)],
        "budgets": [
            {"token_budget": budget, "chunked": chunked, "ttft": percentiles(9 / budget**0.2),
             "pause_p99": 0.01 * budget ** (0.2 * speed)}
            for budget, chunked in ((16, True), (64, True), (256, True), (2048, False))
        ],
        "memory": {
            "waste": [
                {"name": name, "stored": stored, "reserved": 0.1, "internal": 0.85 - stored,
                 "external": 0.05}
                for name, stored in (("max", 0.3 / speed), ("pow2", 0.35), ("oracle", 0.5),
                                     ("paged 1", 0.85), ("paged 16", 0.8), ("paged 64", 0.6))
            ]
        },
        "peers": [
            {"name": name, "requests": requests, "tokens_per_s": rate}
            for requests, gain in (("short", 1.0), ("long-tailed", speed))
            for name, rate in (("engine", 90.0 * gain), ("transformers generate_batch", 40.0),
                               ("transformers generate, batches of 8", 80.0),
                               ("transformers generate, batches of 16", 85.0))
        ],
    }  # fmt: skip


def test_recorded_figures_wait_for_their_sections(registered):
    assert registered(None) == {}
    run = synthetic()
    about = {key: run[key] for key in ("date", "hardware", "dtype")}
    assert sorted(registered(about | {"load": run["load"]})) == ["load-curve"]
    del run["scheduling"][-1], run["peers"][5], run["peers"][1]
    assert sorted(registered(run)) == ["load-curve", "memory-waste", "token-budgets"]
    assert tuple(sorted(registered(synthetic()))) == RECORDED


@pytest.mark.parametrize("speed", [0.8, 1.3, 4.0])
def test_recorded_figures_draw_whatever_was_measured(registered, tmp_path, speed):
    for name, still in registered(synthetic(speed)).items():
        assert 80 < len(still.alt) < 500, still.alt
        assert still.alt.endswith(".")
        cli.render(still, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size < cli.MAX_BYTES
        drawn = texts(still)
        assert still.title in drawn
        assert "2020-02-02, Processor of no machine, 2 threads" in drawn.replace("\n", " ")


def test_numbers_of_recorded_figures_are_the_record_s(registered):
    run = synthetic(1.3)
    found = registered(run)
    alt, drawn = found["scheduling-measured"].alt, texts(found["scheduling-measured"])
    for row in run["scheduling"]:
        assert f"{row['name']} {row['tokens_per_s']:.0f}, " in alt
        for value in (row["tokens_per_s"], row["ttft"]["p90"], 1e3 * row["tpot"]["p90"]):
            assert figures.number(value) in drawn
    lines = serving_runs.load_lines(run)
    for (policy, source), points in lines.items():
        rows = [r for r in run["load"] if (r["policy"], r["source"]) == (policy, source)]
        assert points == [(r["rate_per_s"], r["ttft"]["p90"]) for r in rows]
    drawn = texts(found["token-budgets"]).split("\n")
    assert {"16", "64", "256", "whole prompts"} <= set(drawn)
    drawn = texts(found["memory-waste"]).split("\n")
    for row in run["memory"]["waste"]:
        assert f"{100 * row['stored']:.0f}" in drawn
    alt, drawn = found["engine-peers"].alt, texts(found["engine-peers"])
    for row in run["peers"]:
        name, rate = row["name"].removeprefix("transformers "), figures.number(row["tokens_per_s"])
        assert f"{name} {rate}" in alt
        assert rate in drawn.split("\n")


def test_rows_of_the_papers_table_add_up_and_stand_in_the_alt_text(registered):
    alt = registered(synthetic())["memory-waste"].alt
    for name, use in paging_runs.PUBLISHED_USE.items():
        assert sum(use) == pytest.approx(100, abs=0.11)
        assert f"{name} {use[0]}%" in alt


def refilling_wins(run: dict) -> bool:
    static, *others = (serving_runs.by_name(run["scheduling"])[n] for n in serving_runs.SERVERS)
    return all(
        row["tokens_per_s"] > static["tokens_per_s"] and row["ttft"]["p90"] < static["ttft"]["p90"]
        for row in others
    )


def static_gives_way_first(run: dict) -> bool:
    lines = serving_runs.load_lines(run)
    for source in {source for _, source in lines}:
        static, ours = (lines[policy, source] for policy in ("static", "continuous"))
        worst, calm = static[-1][1], static[0][1]
        sooner = [rate for rate, wait in ours if wait >= worst]
        if worst < 2 * calm or (sooner and min(sooner) <= static[-1][0]):
            return False
    return True


def budget_trades(run: dict) -> bool:
    chunked = [p for p in serving_runs.budget_points(run) if p[0] != "whole prompts"]
    (_, pace, first), (_, slower, sooner) = chunked[0], chunked[-1]
    return slower > pace and sooner < first


def pages_fill_more(run: dict) -> bool:
    stored = {row["name"]: row["stored"] for row in run["memory"]["waste"]}
    rows = [stored[name] for name in paging_runs.ROWS if name in stored]
    whole = [sum(row[part] for part in paging_runs.PARTS) for row in run["memory"]["waste"]]
    return stored["paged 16"] > 1.3 * max(rows) and whole == pytest.approx(
        [1] * len(whole), abs=1e-3
    )


def pays_where_ends_differ(run: dict) -> bool:
    gains = {}
    for requests, ways in paging_runs.rates(run).items():
        static = [rate for name, rate in ways.items() if name.startswith("generate, ")]
        gains[requests] = ways["engine"] / max(static)
    return gains["long-tailed"] > max(1, *(g for name, g in gains.items() if name != "long-tailed"))


HOLDS = {
    "scheduling-measured": refilling_wins,
    "load-curve": static_gives_way_first,
    "token-budgets": budget_trades,
    "memory-waste": pages_fill_more,
    "engine-peers": pays_where_ends_differ,
}


@pytest.mark.parametrize("name", HOLDS)
def test_the_record_supports_the_titles_above_it(name):
    if name not in figures.FIGURES:
        pytest.skip("benchmarks/serving.py has not been run, or not to its end")
    assert HOLDS[name](small_caches.recorded("serving"))


def test_titles_can_be_found_unsupported():
    run = synthetic()
    assert all(holds(run) for holds in HOLDS.values())
    assert not refilling_wins(synthetic(0.8))
    assert not static_gives_way_first(synthetic(0.8))
    flat, empty, slow = (copy.deepcopy(run) for _ in range(3))
    for row in flat["budgets"]:
        row["ttft"]["p90"] = 1.0
    empty["memory"]["waste"][4]["stored"] = 0.5
    slow["peers"][-1]["tokens_per_s"] = 1e4
    assert not budget_trades(flat)
    assert not pages_fill_more(empty)
    assert not pays_where_ends_differ(slow)
