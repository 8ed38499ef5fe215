"""Serving: schedules by hand on a virtual clock, and forwards that read what they are charged for.

What the model reads is seen by a spy on `model.features`, which knows nothing of pieces.
"""

from dataclasses import replace

import pytest
import together_models as tiny
import torch

from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.generate import PromptError
from lecture_util.model.kv_cache import KVCache
from lecture_util.serving.clock import VirtualClock, WallClock
from lecture_util.serving.flat import FlatCache
from lecture_util.speculative.speculate import Tally
from lecture_util.together.configuration import Configuration
from lecture_util.together.run import Answer, Outcome, new_server, serve
from lecture_util.together.variants import held_bytes
from lecture_util.together.workload import Workload

SINGLE, NAIVE, NGRAM = Configuration(), Configuration(cache=False), Configuration(draft="ngram")
PAIR = dict(schedule="continuous", slots=2)
TOKEN_BYTES = 2 * tiny.TINY.L * tiny.TINY.K * tiny.TINY.H * 8  # of the fp64 model's cache
THREE = dict(prompts=(5, 2, 4), news=(3, 1, 2))


@pytest.fixture(scope="module")
def model():
    return tiny.tiny_model()


def times(outcome: Outcome) -> list[tuple[float, float, float]]:
    return [(a.arrival_s, a.first_s, a.finished_s) for a in outcome.answers]


def test_one_after_another_waits_for_arrivals_and_for_its_turn(model):
    work = tiny.workload(prompts=(5, 2, 4), news=(3, 2, 2), arrivals=(0, 1, 10))
    outcome = serve(model, SINGLE, work, tiny.virtual())
    assert times(outcome) == [(0, 1, 3), (1, 4, 5), (10, 11, 12)]
    assert outcome.seconds == 12 and outcome.new_tokens == 7 and outcome.tokens_per_s == 7 / 12
    assert outcome.ttft_s == 1 and outcome.tpot_s == 1  # medians of 1, 3, 1 and of 1, 1, 1
    assert outcome.forwards == 7 and outcome.tokens_per_forward == 1 and outcome.tally is None


def test_a_forward_is_charged_for_what_it_reads(model):
    work = tiny.workload(**THREE)
    # with a cache: a prompt, then a token a forward; without, the whole text each time
    cached = serve(model, SINGLE, work, tiny.virtual(tiny.by_tokens))
    assert times(cached) == [(0, 5, 7), (0, 9, 9), (0, 13, 14)]
    naive = serve(model, NAIVE, work, tiny.virtual(tiny.by_tokens))
    assert times(naive) == [(0, 5, 18), (0, 20, 20), (0, 24, 29)]
    assert naive.ttft_s == 20 and naive.tpot_s == (6.5 + 5) / 2  # one token has no pace
    assert naive.cache_bytes == 0 and naive.forwards == 6


@pytest.mark.parametrize("arrivals", [(0, 0, 0), (0, 5, 90)])
@pytest.mark.parametrize(
    "c", [SINGLE, Configuration(schedule="static", slots=2), Configuration(**PAIR)], ids=str
)
def test_a_single_user_asks_when_the_last_answer_is_there(model, c, arrivals):
    work = tiny.workload(**THREE, arrivals=arrivals, closed=True)
    outcome = serve(model, c, work, tiny.virtual())
    assert times(outcome) == [(0, 1, 3), (3, 4, 4), (4, 5, 6)]
    assert outcome.ttft_s == 1 and outcome.seconds == 6


def test_a_static_batch_pads_prompts_and_carries_the_finished_along(model):
    work = tiny.workload(**THREE)
    c = Configuration(schedule="static", slots=2)
    by_forwards = serve(model, c, work, tiny.virtual())
    assert times(by_forwards) == [(0, 1, 3), (0, 1, 1), (0, 4, 5)]
    by_tokens = serve(model, c, work, tiny.virtual(tiny.by_tokens))
    # 2 rows of 5; 2 rows, of which one is over, twice; the third alone, 4 and 1
    assert times(by_tokens) == [(0, 10, 14), (0, 10, 10), (0, 18, 19)]
    assert by_tokens.forwards == 5 and by_tokens.tokens_per_forward == 6 / 5
    assert by_tokens.cache_bytes == 2 * (5 + 3) * TOKEN_BYTES


def test_a_continuous_batch_takes_in_whoever_waits(model):
    work = tiny.workload(**THREE)
    outcome = serve(model, Configuration(**PAIR), work, tiny.virtual(tiny.by_tokens))
    # 5 and 2 of two prompts; a token of the first beside the third's prompt of 4; a token of each
    assert times(outcome) == [(0, 7, 14), (0, 7, 7), (0, 12, 14)]
    assert outcome.forwards == 3 and outcome.ttft_s == 7 and outcome.tpot_s == (3.5 + 2) / 2
    assert outcome.cache_bytes == 2 * (5 + 3) * TOKEN_BYTES


def test_shared_pages_are_lent_once(model):
    """Two texts of 33 and up to 2 more tokens: 3 pages each, of which the first two are alike."""
    work = tiny.workload(prompts=(33, 33), news=(3, 3), arrivals=(0, 1), shared=32)
    assert work.prompts[0][:32] == work.prompts[1][:32] and work.prompts[0] != work.prompts[1]
    apart = serve(model, Configuration(**PAIR, pages=True), work, tiny.virtual())
    shared = serve(model, Configuration(**PAIR, pages=True, prefix=True), work, tiny.virtual())
    assert apart.cache_bytes == 6 * 16 * TOKEN_BYTES
    assert shared.cache_bytes == 4 * 16 * TOKEN_BYTES
    rows = serve(model, Configuration(**PAIR), work, tiny.virtual())
    assert rows.cache_bytes == 2 * 36 * TOKEN_BYTES
    # the second reads one token of its own where it read 33
    charged = [
        serve(
            model, Configuration(**PAIR, pages=True, prefix=p), work, tiny.virtual(tiny.by_tokens)
        )
        for p in (False, True)
    ]
    assert charged[0].seconds - charged[1].seconds == 32


class Spy:
    """What `model.features` is given: how many tokens, and how many each row's cache holds."""

    def __init__(self, model, monkeypatch):
        self.read, self.held, features = [], [], model.features

        def spy(tokens_BT, cache=None):
            self.read.append(tokens_BT.numel())
            if isinstance(cache, FlatCache):
                self.held.append(sorted(cache.frame.positions_1T[0].tolist()))
            else:
                self.held.append([0] if cache is None else list(cache.lengths))
            return features(tokens_BT, cache)

        monkeypatch.setattr(model, "features", spy)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("c", tiny.runnable(weights="fp32", student=False), ids=str)
def test_what_is_charged_is_what_the_model_reads(model, monkeypatch, c, closed):
    spy, charged = Spy(model, monkeypatch), []

    def step(pieces):
        charged.append([(p.start, p.count + p.padded, getattr(p, "drafted", 0)) for p in pieces])
        return 1.0

    # a long prompt too, which is read in chunks, and answers long enough to repeat themselves
    news = (30, 9, 25, 1, 40) if c.draft else (7, 3, 5, 1, 12)
    work = tiny.workload((21, 140, 3, 300, 18), news, (0, 0, 2, 2, 9), closed, seed=3)
    outcome = serve(model, c, work, VirtualClock(step))
    assert [sum(count for _, count, _ in pieces) for pieces in charged] == spy.read
    assert len(charged) == outcome.forwards == len(spy.read)
    for pieces, held in zip(charged, spy.held, strict=True):
        if c.schedule == "continuous":
            places = [p for start, n, _ in pieces for p in range(start, start + n)]
            assert sorted(places) == held
        else:
            assert [start for start, _, _ in pieces] == held
    if c.draft:
        assert outcome.tally.rounds == outcome.forwards
        assert sum(d for pieces in charged for _, _, d in pieces) == outcome.tally.drafted > 0
        assert outcome.tally.tokens == outcome.new_tokens > outcome.forwards  # some came true
        # all but the last token of each text is read once, and what was guessed wrong besides
        wrong = outcome.tally.drafted - outcome.tally.accepted
        texts = sum(len(p) + n - 1 for p, n in zip(work.prompts, work.new_tokens, strict=True))
        assert sum(spy.read) == texts + wrong


@pytest.mark.parametrize(
    "c",
    [
        SINGLE, NGRAM, replace(NGRAM, guesses=9), Configuration(schedule="static", slots=5),
        Configuration(schedule="continuous", slots=5),
    ],
    ids=str,
)  # fmt: skip
def test_a_caches_bytes_are_those_of_the_cache_that_was_made(model, monkeypatch, c):
    """Where it is allocated in full: one text at a time, and rows that are all lent."""
    made = []
    for kind in (KVCache, FlatCache):
        init = kind.__init__

        def spy(self, *args, init=init, **options):
            init(self, *args, **options)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", spy)
    outcome = serve(model, c, tiny.workload((30, 21, 4, 5, 9), (7, 3, 5, 1, 2)), tiny.virtual())
    assert outcome.cache_bytes == max(cache.nbytes for cache in made) > 0
    assert outcome.weight_bytes == held_bytes(model) and outcome.copy_bytes == 0
    assert outcome.memory_bytes == outcome.weight_bytes + outcome.cache_bytes


def test_a_pool_of_pages_has_room_for_every_slots_longest_request(model):
    work = tiny.workload((30, 21), (7, 3))
    c = Configuration(schedule="continuous", slots=3, pages=True)
    blocks = new_server(model, c, work).scheduler.memory.blocks
    # Two requests need two places, however many slots there are.
    assert blocks.num_pages == 2 * 3 and blocks.page_size == 16 and not blocks.prefix_caching
    prefix = new_server(model, replace(c, prefix=True), work).scheduler.memory.blocks
    assert prefix.prefix_caching
    many = new_server(model, replace(c, slots=10**9), work).scheduler
    assert many.policy.slots == 2 and many.policy.token_budget == 256 < model.config.max_context
    assert many.memory.blocks.num_pages == blocks.num_pages


def test_a_model_of_other_weights_is_refused():
    model = tiny.tiny_model(dtype=torch.float32)
    with pytest.raises(ValueError, match="holds fp32 weights but the configuration names int4"):
        serve(model, Configuration("int4"), tiny.workload())


def test_by_the_wall_clock_time_only_passes(model):
    work = tiny.workload((9, 5), (3, 4), arrivals=(0, 0.02))
    for c in (SINGLE, NGRAM, Configuration(**PAIR)):
        outcome = serve(model, c, work)
        for answer, arrival in zip(outcome.answers, work.arrivals_s, strict=True):
            assert arrival <= answer.arrival_s <= answer.first_s <= answer.finished_s
        assert max(a.finished_s for a in outcome.answers) > 0.02
        assert [a.tokens for a in outcome.answers] == tiny.alone(model, work)


def answers(*texts):
    return Outcome(tuple(Answer(tuple(t), 0.0, 1.0, 2.0) for t in texts), 0, 0, 1)


@pytest.mark.parametrize(
    ("mine", "theirs", "share"),
    [
        ([(1, 2, 3)], [(1, 2, 3)], 1.0),
        ([(1, 2, 3)], [(9, 2, 3)], 0.0),
        ([(1, 2, 3, 4)], [(1, 2, 9, 4)], 0.5),  # what follows a difference is not counted
        ([(1, 2), (3,) * 6], [(1, 9), (3,) * 6], 7 / 8),
        ([(1, 2, 3, 4)], [(1, 2)], 0.5),  # nothing is the same where the other is silent
        ([(1, 2)], [(1, 2, 3, 4)], 1.0),
    ],
)
def test_the_share_of_same_tokens_ends_where_texts_part(mine, theirs, share):
    assert answers(*mine).same_tokens(answers(*theirs)) == share


def test_outcomes_of_different_workloads_are_not_compared():
    with pytest.raises(ValueError, match="2 answers and 1: compare outcomes of one workload"):
        answers((1,), (2,)).same_tokens(answers((1,)))


def test_an_outcomes_parts_add_up():
    outcome = Outcome(
        (Answer((1, 2, 3), 1.0, 2.0, 6.0), Answer((4,), 3.0, 8.0, 8.0)), 100, 20, 2, 7, Tally()
    )
    assert outcome.memory_bytes == 127 and outcome.new_tokens == 4
    assert (
        outcome.seconds == 7 and outcome.tokens_per_s == 4 / 7 and outcome.tokens_per_forward == 2
    )
    assert outcome.ttft_s == 3 and outcome.tpot_s == 2
    assert answers((1,)).tpot_s == 0


@pytest.mark.parametrize("c", [SINGLE, NAIVE, NGRAM, Configuration(**PAIR)], ids=str)
@pytest.mark.parametrize(
    ("prompt", "count", "says"),
    [
        ((1, 2, tiny.TINY.V), 2, "holds token 23 but the vocabulary is 0..22"),
        ((1, 2, -1), 2, "holds token -1"),
        ((1, "2"), 2, "holds '2': tokens are whole numbers"),
        ((1,) * 510, 3, "510 tokens and 3 more were asked for, but the model's context is 512"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_forward(
    model, monkeypatch, c, prompt, count, says
):
    spy = Spy(model, monkeypatch)
    work = Workload("bad", ((1, 2), prompt), (1, count), (0.0, 0.0))
    with pytest.raises(PromptError, match=says):
        serve(model, c, work, tiny.virtual())
    assert not spy.read


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "smollm2-135m"}, "model='smollm2-135m': expected a Transformer"),
        ({"configuration": "int8"}, r"configuration='int8': expected Configuration\(slots"),
        ({"configuration": {"slots": 8}}, r"configuration={'slots': 8}"),
        ({"workload": [[1, 2]]}, r"workload=\[\[1, 2\]\]: expected a Workload, such as assistant"),
        ({"clock": 5.0}, r"clock=5\.0: expected WallClock\(\), VirtualClock\(\) or None"),
        ({"clock": WallClock}, "expected WallClock"),
    ],
)
def test_things_of_another_kind_are_refused(model, change, says):
    given = {"model": model, "configuration": SINGLE, "workload": tiny.workload(), "clock": None}
    with pytest.raises(TypeError, match=says):
        serve(**given | change)


@pytest.mark.parametrize("draft", ["medusa", "eagle"])
def test_heads_of_another_model_are_refused(model, draft):
    with pytest.raises(WeightsError, match="trained on a model of"):
        serve(model, Configuration(draft=draft), tiny.workload())


@pytest.mark.parametrize("c", [SINGLE, Configuration(**PAIR)], ids=str)
def test_a_model_that_breaks_says_so(c):
    broken = tiny.tiny_model()
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        serve(broken, c, tiny.workload(), tiny.virtual())
