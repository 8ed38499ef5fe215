"""The widgets of 09 and 10 show what the scheduler, the engine and the allocator really did."""

import html
import itertools
import re
from collections import Counter
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.classroom.widgets import (
    block_table_explorer,
    engine_stepper,
    schedule_explorer,
    waste_explorer,
)
from lecture_util.classroom.widgets.drawing import letter
from lecture_util.classroom.widgets.gantt import bars
from lecture_util.classroom.widgets.page_story import Story
from lecture_util.classroom.widgets.page_svg import color
from lecture_util.classroom.widgets.waste import count_waste
from lecture_util.model.config import Config
from lecture_util.model.generate import generate
from lecture_util.model.transformer import Transformer
from lecture_util.serving.blocks import Blocks
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.engine import Engine
from lecture_util.serving.metrics import stats
from lecture_util.serving.paging import PagedCache, Pages
from lecture_util.serving.request import EndsAfter, Params, Request
from lecture_util.serving.scheduler import Policy
from lecture_util.serving.simulate import simulator
from lecture_util.serving.slots import SlotCache, Slots
from lecture_util.serving.static_batching import static_server
from lecture_util.serving.trace import Lengths, make_trace

matplotlib.use("agg")
PNG = b"\x89PNG"
CONFIG = Config(D=16, F=24, K=1, G=2, H=8, L=2, V=96, max_context=128)


@pytest.fixture(scope="module")
def model():
    return Transformer.random(CONFIG, seed=0)


def drawn(markup: str) -> ElementTree.Element:
    """The picture as XML: malformed markup fails here."""
    svg = re.search(r"<svg.*</svg>", markup, re.S).group()
    return ElementTree.fromstring(svg)


def words(explorer) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", explorer.text.value))


# --- schedule_explorer


@pytest.mark.parametrize("rate", [None, 0.3])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_bars_add_up_to_the_parts_of_all_forwards(rate, slots):
    explorer = schedule_explorer(slots, rate=rate, requests=11, seed=3)
    for run in explorer.runs.values():
        expected = Counter(
            (part.slot, part.number, part.kind) for one in run.iterations for part in one.parts
        )
        found = Counter()
        for bar in bars(run.iterations):
            found[bar.slot, bar.number, bar.kind] += round(bar.end_s - bar.start_s)
        assert found == expected
        lanes = sorted((bar.slot, bar.start_s, bar.end_s) for bar in bars(run.iterations))
        for (slot, _, end_s), (other, start_s, _) in itertools.pairwise(lanes):
            assert slot != other or start_s >= end_s - 1e-6


def test_both_serve_the_same_trace_to_the_same_lengths():
    runs = schedule_explorer(3, requests=9).runs
    lengths = [[len(c.tokens) for c in run.completions] for run in runs.values()]
    assert lengths[0] == lengths[1]
    assert min(len(run.completions) for run in runs.values()) == 9


def test_the_summary_follows_from_the_forwards():
    explorer = schedule_explorer(3, rate=None, requests=10)
    for run in explorer.runs.values():
        known, here = stats(run.completions, run.iterations, slots=3), run.summary
        assert here.padding == pytest.approx(known.padding)
        assert here.work == pytest.approx(known.slot_use)  # never idle: all came at once
        assert here.tokens == pytest.approx(known.new_tokens / known.iterations)
        assert here.worst_s == max(c.ttft_s for c in run.completions)
    assert explorer.summary["continuous"].padding == 0 < explorer.summary["static"].padding
    for value in (f"{explorer.summary['static'].padding:.0%}", "continuous", "static"):
        assert value in words(explorer)


def test_equal_lengths_waste_nothing_and_skewed_ones_do():
    explorer = schedule_explorer(4, rate=None, spread=0, requests=8)
    assert explorer.summary["static"].padding == 0
    assert explorer.summary["static"].end_s == explorer.summary["continuous"].end_s
    explorer.controls["spread"].value = 1.5
    assert explorer.summary["static"].padding > 0.3
    assert explorer.summary["static"].end_s > explorer.summary["continuous"].end_s


def test_every_control_redraws_and_the_picture_is_well_formed():
    explorer = schedule_explorer()
    for name, value in (("slots", 8), ("rate", 2.0), ("spread", 0.0), ("rate", float("inf"))):
        before = explorer.picture.value
        explorer.controls[name].value = value
        assert explorer.picture.value != before
        assert len(drawn(explorer.picture.value)) > 10
        assert "Error" not in words(explorer)


def test_marks_of_padding_prefill_and_decode_differ_without_colour():
    picture = schedule_explorer(2, rate=None, requests=4, spread=1.5).picture.value
    shape = {}
    for kind in ("prefill", "decode", "padding"):
        rect, after = re.search(rf"(<rect[^>]*>)<title>\w+: {kind}[^<]*</title></rect>(<\w+)",
                                picture).groups()  # fmt: skip
        shape[kind] = ('fill="#FFFFFF"' in rect, after)
    assert shape["padding"] == (True, "<path")  # hatched
    assert shape["prefill"] == (False, "<rect")  # with a dark edge
    assert shape["decode"][0] is False


@pytest.mark.parametrize(
    ("given", "message"),
    [({"slots": 0}, "slots is 0"), ({"slots": 9}, "1 to 8"), ({"rate": 0}, "rate is 0"),
     ({"spread": -1}, "spread is -1"), ({"requests": 41}, "1 to 40"), ({"seed": -1}, "seed"),
     ({"spread": True}, "spread is True"), ({"mean_new": 200}, "1 to 96"),
     ({"prompt": 1.5}, "prompt is 1.5")],
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        schedule_explorer(**given)


def test_letters_go_on_after_z():
    assert [letter(i) for i in (0, 25, 26, 53)] == ["A", "Z", "A1", "B2"]
    assert [color(letter(i)) for i in range(60)] == list(range(60))


# --- engine_stepper


def requests() -> list[Request]:
    same = list(range(1, 10))
    return [
        Request([*same, 11], Params(5)),
        Request([*same, 12, 13], Params(3), arrival_s=2),
        Request([7, 8, 9], Params(4, samples=2), arrival_s=3.5),
        Request([5], Params(2, stop=EndsAfter(1)), arrival_s=40),
    ]


def to_the_end(stepper, most=200):
    while not stepper.over:
        stepper.steps.move(1)
        assert len(stepper.history) < most


def caches(model):
    return {
        "pages": PagedCache(CONFIG, 24, 4),
        "few pages": PagedCache(CONFIG, 6, 4),
        "rows": SlotCache(CONFIG, 3, 64),
    }


@pytest.mark.parametrize("name", ["pages", "few pages", "rows"])
def test_a_stepped_engine_says_what_an_engine_says(model, name):
    policy = Policy(slots=3, token_budget=6)
    stepped = Engine(model, caches(model)[name], policy, VirtualClock())
    to_the_end(engine_stepper(stepped, requests()))
    served = Engine(model, caches(model)[name], policy, VirtualClock()).serve(requests())
    found = [c for cs in stepped.loop.done.values() for c in cs]
    assert [(c.tokens, c.reason, c.token_times_s) for c in found] == [
        (c.tokens, c.reason, c.token_times_s) for c in served
    ]
    assert found[0].tokens == generate(model, [requests()[0].prompt], 5)[0]


def test_a_step_is_computed_when_asked_for_and_back_is_history(model):
    engine = Engine(model, PagedCache(CONFIG, 24, 4), Policy(slots=2, token_budget=6),
                    VirtualClock())  # fmt: skip
    stepper = engine_stepper(engine, requests())
    assert (len(engine.loop.iterations), stepper.forward.max) == (0, 1)
    assert "Before the first forward: 4 requests" in words(stepper)
    stepper.steps.move(3)
    assert (len(engine.loop.iterations), stepper.forward.max) == (3, 4)
    shown = stepper.steps.picture.value
    stepper.steps.move(-2)
    stepper.steps.move(2)
    assert len(engine.loop.iterations) == 3
    assert stepper.steps.picture.value == shown
    to_the_end(stepper)
    assert stepper.forward.max == len(engine.loop.iterations)
    assert "All is answered" in words(stepper)
    stepper.steps.move(1)
    assert stepper.forward.value == len(engine.loop.iterations)


def test_the_pool_is_drawn_as_it_was_during_the_forward(model):
    engine = Engine(model, PagedCache(CONFIG, 24, 4), Policy(slots=4, token_budget=16),
                    VirtualClock())  # fmt: skip
    stepper = engine_stepper(engine, requests())
    to_the_end(stepper)
    shared = 0
    for shot in stepper.history[1:]:
        assert tuple(map(len, shot.pool.owners)) == shot.pool.counts
        assert all(shot.pool.counts[page] == 0 for page in shot.pool.idle)
        shared += any(count > 1 for count in shot.pool.counts)
        tokens = sum(part.count for part in shot.parts)
        assert tokens <= 16
        counts = [part.count > 1 for part in shot.parts]
        assert counts == sorted(counts)  # decoding first, as the flat run is laid
    assert shared > 0  # B found A's two full pages, and the samples of C share theirs
    assert any(shot.pool.copies for shot in stepper.history)
    hit = next(i for i, shot in enumerate(stepper.history) if any(
        p.kind == "prefill" and p.number == 1 for p in shot.parts))  # fmt: skip
    stepper.forward.value = hit
    assert "B's first 8 were in the prefix cache" in words(stepper)
    copied = next(i for i, shot in enumerate(stepper.history) if shot.pool.copies)
    stepper.forward.value = copied
    assert "Copied before it was written" in words(stepper)


def test_what_was_put_back_and_what_was_refused_are_told():
    trace = [Request([1] * 6, Params(9)), Request([2] * 6, Params(9)), Request([3] * 90)]
    loop = simulator(Pages(Blocks(6, 4, prefix_caching=False)), Policy(slots=3, token_budget=16))
    stepper = engine_stepper(loop, trace)
    stepper.steps.move(1)
    assert "more than the cache has" in words(stepper)
    to_the_end(stepper)
    put_back = [i for i, shot in enumerate(stepper.history) if shot.preempted]
    assert put_back
    stepper.forward.value = put_back[0]
    assert "1 put back" in words(stepper)


def test_padding_of_a_static_server_is_told(model):
    loop = static_server(model, 2, 32, VirtualClock())
    stepper = engine_stepper(loop, [Request([1, 2, 3], Params(2)), Request([4], Params(6))], at=4)
    assert "1 computed for nothing" in words(stepper)
    assert "padding" in stepper.steps.picture.value
    stepper.forward.value = 1
    assert "2 computed for nothing" in words(stepper)  # the shorter prompt


def test_prompts_and_strings_become_requests_and_markup_stays_text(model):
    class Tokenizer:
        def encode(self, text):
            return list(text.encode())

        def decode(self, tokens):
            return "<b>" if tokens == [33] else chr(tokens[0])

    engine = Engine(model, PagedCache(CONFIG, 40, 4), Policy(slots=2, token_budget=6),
                    VirtualClock())  # fmt: skip
    stepper = engine_stepper(engine, ["!A B", [1, 2]], Tokenizer(), at=1)
    assert "&lt;b&gt;" in stepper.steps.picture.value
    assert [len(place.tokens) for place in stepper.history[1].running] == [4, 2]


def test_an_engine_that_was_used_goes_on_with_new_names(model):
    engine = Engine(model, PagedCache(CONFIG, 40, 4), Policy(slots=2, token_budget=6),
                    VirtualClock())  # fmt: skip
    engine.generate([[1, 2]], Params(2))
    stepper = engine_stepper(engine, [[3, 4]], at=1)
    assert "of prefill (A)" in words(stepper)


def test_a_forward_that_raises_is_told_and_may_be_tried_again(model):
    engine = Engine(model, PagedCache(CONFIG, 8, 4), Policy(slots=2, token_budget=6),
                    VirtualClock())  # fmt: skip
    stepper, run = engine_stepper(engine, [Request([3, 4], Params(3))]), engine.loop.executor.run
    engine.loop.executor.run = lambda work: 1 / 0
    stepper.steps.move(1)
    assert "ZeroDivisionError" in words(stepper)
    assert stepper.forward.value == 0
    engine.loop.executor.run = run
    to_the_end(stepper)
    assert len(engine.loop.done[0][0].tokens) == 3


@pytest.mark.parametrize(
    ("engine", "asked", "options", "error", "message"),
    [("an engine", [[1]], {}, TypeError, "pass an Engine, or a Loop"),
     (None, [], {}, ValueError, "no requests"),
     (None, 5, {}, TypeError, "requests are 5"),
     (None, ["words"], {}, TypeError, "needs a tokenizer"),
     (None, [[1.5]], {}, TypeError, "request 0"),
     (None, [[1]], {"at": -1}, ValueError, "at is -1"),
     (None, [[1]], {"tokenizer": 3}, TypeError, "decode")],
)  # fmt: skip
def test_what_cannot_be_stepped_is_refused(engine, asked, options, error, message):
    loop = simulator(Slots(2, 32), Policy(slots=2)) if engine is None else engine
    with pytest.raises(error, match=message):
        engine_stepper(loop, asked, **options)


def test_too_many_slots_and_a_clock_that_runs_are_refused(model):
    with pytest.raises(ValueError, match="17 slots"):
        engine_stepper(simulator(Slots(17, 32), Policy(slots=17)), [[1]])
    engine = Engine(model, PagedCache(CONFIG, 8, 4), Policy(slots=2, token_budget=6))
    with pytest.raises(ValueError, match="VirtualClock"):
        engine_stepper(engine, requests())


# --- block_table_explorer


def test_a_fork_shares_and_writing_copies():
    play = block_table_explorer(events=["begin the cat sat on the mat", "fork A"])
    blocks = play.story.blocks
    assert blocks.counts[:3] == [2, 2, 0]
    assert play.chosen.value == "B"
    play.write("A", "and")
    assert play.story.blocks.counts[:3] == [2, 1, 1]
    assert play.story.tables["A"].pages == [0, 2]
    assert play.story.contents[2] == ["the", "mat", "and", None]
    assert play.story.contents[1] == ["the", "mat", None, None]
    assert play.story.change.copies == [(1, 2)]
    assert "page 1 was shared, so it is copied to page 2 first" in words(play)
    assert "copied" in play.picture.value
    assert "count 2 → 1" in play.picture.value
    play.undo()
    assert play.story.blocks.counts[:3] == [2, 2, 0]
    assert play.story.contents[2] == [None] * 4
    assert "Taken back" in words(play)


def test_freed_pages_are_found_again_until_evicted():
    play = block_table_explorer(events=["begin the cat sat on the mat", "free A"])
    assert (list(play.story.blocks.idle), "1 page free, 1 page idle" in words(play)) == ([0], True)
    assert play.chosen.value == "none"
    play.look_up("the cat sat on a hill")
    assert "the first 4 are there in page 0; 2 would be computed" in words(play)
    assert "found" in play.picture.value
    play.begin("the cat sat on a hill")
    assert play.story.change.hits == [0]
    assert "1 page found in the prefix cache and shared, 1 page new" in words(play)
    play.free("B")
    play.evict()
    assert not play.story.blocks.idle
    play.evict()
    assert "No page is idle" in words(play)
    play.look_up("the cat sat on a hill")
    assert "the first 0 are there" in words(play)


def test_running_out_of_pages_is_told_and_changes_nothing():
    play = block_table_explorer(2, 2, events=["begin a b c"])
    play.begin("a b d e f g")
    assert "does not fit" in words(play)
    assert "Nothing was changed" in words(play)
    assert list(play.story.tables) == ["A"]
    assert play.story.blocks.counts == [1, 1]
    assert play.chosen.value == "A"
    play.write("A", "d")
    play.write("A", "e")
    assert "A cannot write “e”" in words(play)
    assert play.story.tables["A"].tokens == list("abcd")


def test_buttons_do_what_the_methods_do_and_keys_write_and_undo():
    play = block_table_explorer()
    assert play.buttons["write"].disabled and play.buttons["undo"].disabled
    play.words.value = "one two three"
    play.buttons["begin"].click()
    play.buttons["fork"].click()
    assert (list(play.story.tables), play.chosen.value) == (["A", "B"], "B")
    play.presses.moves += 2  # words take turns
    assert play.story.tables["B"].tokens == ["one", "two", "three", "one", "two"]
    play.presses.moves -= 1
    assert play.story.tables["B"].tokens == ["one", "two", "three", "one"]
    play.buttons["free"].click()
    assert list(play.story.tables) == ["A"]
    for _ in range(9):
        play.buttons["undo"].click()
    assert not play.story.tables
    play.words.value = " "
    play.buttons["begin"].click()
    assert "type one or more" in words(play)
    play.write("Z", "x")
    assert "no sequence 'Z'" in words(play)


WORDS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6).map(" ".join)
MOVES = st.lists(
    st.tuples(st.sampled_from(["begin", "write", "fork", "free", "evict", "undo"]),
              st.integers(0, 5), WORDS),
    max_size=25,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(MOVES, st.integers(1, 3), st.booleans())
def test_pages_hold_what_the_tables_say_whatever_is_played(moves, page_size, caching):
    story, before = Story(6, page_size, caching), []
    for verb, which, text in moves:
        names = list(story.tables)
        if verb in ("write", "fork", "free") and not names:
            continue
        state = (list(story.blocks.counts), {n: list(t.pages) for n, t in story.tables.items()})
        depth = len(story.past)
        if verb == "begin":
            story.begin(text)
        elif verb == "write":
            story.write(names[which % len(names)], text)
        elif verb in ("fork", "free"):
            getattr(story, verb)(names[which % len(names)])
        else:
            getattr(story, verb)()
        if verb == "undo":
            if before:
                state = before.pop()
                assert state[0] == story.blocks.counts
                assert state[1] == {n: t.pages for n, t in story.tables.items()}
        elif len(story.past) > depth:
            before.append(state)
        held = Counter(page for table in story.tables.values() for page in table.pages)
        assert [held[page] for page in range(6)] == story.blocks.counts
        for table in story.tables.values():
            found = [word for page in table.pages for word in story.contents[page]]
            assert found[: len(table)] == table.tokens
        for page, known in enumerate(story.blocks.texts):
            assert known is None or tuple(story.contents[page]) == known.tokens


def test_the_largest_pool_and_awkward_words_are_drawn():
    play = block_table_explorer(16, 8, events=["begin <b> & ** `x` " + "long" * 30, "fork A"])
    svg = drawn(play.picture.value)
    assert float(svg.attrib["viewBox"].split()[3]) <= 400
    for _ in range(4):
        play.fork("A")
    assert len(play.story.tables) == 6
    drawn(play.picture.value)
    play.fork("A")
    assert "room for 6 sequences" in words(play)
    assert "nothing is ever found" in words(
        block_table_explorer(prefix_caching=False, events=["begin a b", "look up a b"])
    )


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [({"num_pages": 17}, ValueError, "1 to 16"), ({"page_size": 0}, ValueError, "page_size is 0"),
     ({"events": "fork A"}, TypeError, "pass a list"), ({"events": [3]}, TypeError, "events are"),
     ({"events": ["jump"]}, ValueError, "expected it to begin with one of"),
     ({"events": ["beginning of it"]}, ValueError, "expected it to begin with"),
     ({"events": ["fork A"]}, ValueError, "no sequence 'A'"),
     ({"events": ["begin"]}, ValueError, "type one or more")],
)  # fmt: skip
def test_what_cannot_be_played_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        block_table_explorer(**given)


# --- waste_explorer


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_counted_waste_is_what_the_allocator_lends_over_a_run(page_size):
    longest, count = 64, 9
    waste = count_waste(10, 0.8, longest, count, 5, (page_size,))
    lengths = Lengths(10, 0.8, most=longest // 2)
    trace = make_trace(count, rate_per_s=None, prompt_tokens=lengths, new_tokens=lengths, seed=5)
    policy = Policy(slots=3, token_budget=256, chunked=False)
    paged = simulator(Pages(Blocks(99, page_size, prefix_caching=False)), policy)
    rows = simulator(Slots(3, longest), policy)
    for loop, wasted in ((paged, waste.counted[page_size]), (rows, 1 - waste.contiguous[0])):
        done = loop.serve(trace)
        assert stats(done, loop.iterations).waste == pytest.approx(wasted)


def test_shares_add_up_and_the_prediction_is_near_what_is_counted():
    shown = waste_explorer().waste
    assert sum(shown.contiguous) == pytest.approx(1)
    assert shown.counted[1] == shown.predicted[1] == 0
    for page_size in (8, 32, 128):
        assert shown.counted[page_size] == pytest.approx(shown.predicted[page_size], rel=0.15)


def test_every_control_of_the_waste_moves_picture_and_text():
    explorer = waste_explorer(requests=60)
    for name, value in (("page_size", 64), ("median", 16), ("spread", 0.3), ("longest", 4096)):
        before = explorer.image.value, explorer.text.value
        explorer.controls[name].value = value
        assert explorer.image.value[:4] == PNG
        assert explorer.image.value != before[0]
        assert explorer.text.value != before[1]
    assert f"{explorer.waste.counted[64]:.1%}" in words(explorer)
    assert waste_explorer(48, median=100, requests=9).controls["page_size"].value == 48


@pytest.mark.parametrize(
    ("given", "message"),
    [({"page_size": 0}, "page_size is 0"), ({"median": 4000}, "1 to 2048"),
     ({"longest": 1}, "longest is 1"), ({"spread": 3}, "spread is 3"),
     ({"requests": 0}, "requests is 0"), ({"seed": 0.5}, "seed is 0.5")],
)  # fmt: skip
def test_lengths_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        waste_explorer(**given)
