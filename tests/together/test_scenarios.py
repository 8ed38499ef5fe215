"""Scenarios: budgets at their edges; a verdict is given once and alike; and on the real model, what
a reasonable configuration keeps and plausible ones break.

Without drafts a prediction is the run (test_predict), so most of what breaks a budget is predicted.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import together_models as tiny
import torch

from lecture_util.model.weights import load, load_tokenizer
from lecture_util.together import scenarios as room
from lecture_util.together.configuration import Configuration
from lecture_util.together.costs import Costs, from_peaks
from lecture_util.together.predict import predict
from lecture_util.together.run import Answer, Outcome
from lecture_util.together.scenarios import (
    SCENARIOS,
    SERVER,
    Scenario,
    Trial,
    Verdict,
    broken,
    workload_of,
)

BUDGET = Scenario("any", "", SERVER, memory_bytes=1000, tokens_per_s=4.0, perplexity=22.0, ttft_s=2)
CHAT = dict(schedule="continuous", slots=8, pages=True, prefix=True)


def outcome(memory=1000, ttft=2.0, seconds=2.0, copies=0):
    """Eight tokens in so many seconds."""
    return Outcome((Answer((1,) * 8, 0.0, ttft, seconds),), memory - 100, 100, 8, copies)


@pytest.mark.parametrize(
    ("change", "quality", "names"),
    [
        ({}, 22.0, []),  # on every budget at once
        ({"memory": 1001}, 22.0, ["memory"]),
        ({"memory": 999}, 22.0, []),
        ({"copies": 5000}, 22.0, []),  # this machine's own copies are no part of a verdict
        ({"ttft": math.nextafter(2.0, 3)}, 22.0, ["first token"]),
        ({"ttft": math.nextafter(2.0, 1)}, 22.0, []),
        ({"seconds": math.nextafter(2.0, 3)}, 22.0, ["speed"]),
        ({"seconds": math.nextafter(2.0, 1)}, 22.0, []),
        ({}, math.nextafter(22.0, 23), ["quality"]),
        ({}, math.nextafter(22.0, 21), []),
        (
            {"memory": 2000, "ttft": 3.0, "seconds": 3.0},
            30.0,
            ["memory", "first token", "speed", "quality"],
        ),
    ],
)
def test_a_budget_holds_up_to_the_number_itself(change, quality, names):
    found = broken(BUDGET, outcome(**change), quality)
    assert [words.split(":")[0] for words in found] == names
    assert Verdict(outcome(), quality, tuple(found)).holds == (not names)


def test_what_is_broken_is_said_with_what_came_and_what_was_allowed():
    scenario = replace(BUDGET, memory_bytes=250e6, ttft_s=0.02, tokens_per_s=300)
    found = broken(scenario, outcome(int(272.4e6), 0.0321, 0.1), 24.44)
    assert found == [
        "memory: 272 MB, the budget is 250",
        "first token: 32 ms, the budget is 20",
        "speed: 80 tokens/s, at least 300 are needed",
        "quality: perplexity 24.4, at most 22.0",
    ]


def test_nobody_minds_a_first_token_without_a_budget():
    assert broken(replace(BUDGET, ttft_s=None), outcome(ttft=1e9), 22.0) == []


@pytest.fixture
def tried(monkeypatch):
    """A trial of a tiny model; its texts, its workloads and how often each thing is done."""
    held_BT = torch.randint(0, tiny.TINY.V, (19, 6), generator=torch.Generator().manual_seed(0))
    counts = {"serve": 0, "perplexity": 0}

    def counted(name):
        function = getattr(room, name)

        def count(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(room, name, count)

    monkeypatch.setattr(room, "english_split", lambda _: (torch.arange(400) % tiny.TINY.V, held_BT))
    monkeypatch.setattr(room, "workload_of", lambda name, _: tiny.workload(arrivals=(0,) * 5))
    counted("serve")
    counted("perplexity")
    return Trial(tiny.tiny_model(dtype=torch.float32), None), counts, held_BT


def test_a_trial_tries_each_configuration_once(tried):
    trial, counts, held_BT = tried
    assert torch.equal(trial.held_BT, held_BT[:16:2])
    first = trial("chat", Configuration("int8", **CHAT))
    assert trial("chat", Configuration("int8", **CHAT)) is first
    assert counts == {"serve": 1, "perplexity": 1}
    trial("batch", Configuration("int8", **CHAT))  # another scenario, the same model
    trial("chat", Configuration("int8"))
    assert counts == {"serve": 3, "perplexity": 1}
    trial("chat", Configuration("bf16"))
    assert counts == {"serve": 4, "perplexity": 2}
    assert set(trial._quality) == {("int8", False), ("bf16", False)}


def test_two_trials_come_to_one_verdict(tried):
    trial, *_ = tried
    other = Trial(tiny.tiny_model(dtype=torch.float32), None)
    for c in (Configuration("int8", **CHAT), Configuration("int4"), Configuration(draft="ngram")):
        one, two = trial("chat", c), other("chat", c)
        assert (one.outcome, one.perplexity, one.broken) == (
            two.outcome,
            two.perplexity,
            two.broken,
        )
        assert one is not two


def test_seconds_are_those_of_the_scenarios_machine(tried):
    trial, *_ = tried
    for name in SCENARIOS:
        c, work = Configuration("int8", **CHAT), tiny.workload()
        peaks = from_peaks(tiny.TINY, "int8", SCENARIOS[name].machine, SCENARIOS[name].overhead_s)
        got, want = trial(name, c).outcome, predict(tiny.TINY, c, work, peaks)
        assert got.tokens_per_s == pytest.approx(want.tokens_per_s, rel=1e-9)
        assert got.ttft_s == pytest.approx(want.ttft_s, rel=1e-9)
        assert got.seconds > SCENARIOS[name].overhead_s * got.forwards


@pytest.mark.parametrize(
    ("name", "configuration", "error", "says"),
    [
        ("server", Configuration(), ValueError, "scenario 'server': expected one of chat, batch, "),
        (None, Configuration(), ValueError, "scenario None"),
        ("chat", "int8", TypeError, "configuration='int8': expected Configuration"),
        ("chat", None, TypeError, "configuration=None"),
        ("chat", {"weights": "int8"}, TypeError, "expected Configuration"),
    ],
)
def test_other_names_and_other_things_are_refused(tried, name, configuration, error, says):
    with pytest.raises(error, match=says):
        tried[0](name, configuration)
    assert tried[1] == {"serve": 0, "perplexity": 0}


def test_every_scenario_has_its_workload_and_a_name_of_its_own():
    with pytest.raises(ValueError, match="scenario 'club': expected one of chat, batch, laptop"):
        workload_of("club", None)
    for name, scenario in SCENARIOS.items():
        assert scenario.name == name and scenario.story


@pytest.fixture(scope="module")
def real():
    """The reference model in its scenarios. Only what is needed of it is run."""
    trial = Trial(load("smollm2-135m", device="cpu"), load_tokenizer("smollm2-135m"))
    good = {
        "chat": Configuration("int8", **CHAT),
        "batch": Configuration("int4", schedule="static", slots=8),
        "laptop": Configuration("int8", draft="ngram"),
    }
    verdicts = {name: trial(name, c) for name, c in good.items()}
    return SimpleNamespace(trial=trial, good=good, verdicts=verdicts)


def on_paper(trial, name, c, tokens_per_round=1.0, guesses=0.0):
    """What a configuration comes to, with the perplexity of the real model where rounding matters:
    in fp32 and bf16 it is what keeps the quality, and the runs would cost seconds each."""
    scenario, config = SCENARIOS[name], trial.variants.model.config
    step = from_peaks(config, c.weights, scenario.machine, scenario.overhead_s).rows
    known = ({"ngram": tokens_per_round}, {"ngram": guesses})
    predicted = predict(
        config, c, workload_of(name, trial.tokenizer), Costs(step, step, {}, *known)
    )
    seen = SimpleNamespace(
        memory_bytes=predicted.memory_bytes, copy_bytes=0, ttft_s=predicted.ttft_s,
        tokens_per_s=predicted.tokens_per_s,
    )  # fmt: skip
    quality = trial.perplexity(c) if c.weights in ("int8", "int4") else 0.0
    found = broken(scenario, seen, quality)
    return predicted, {words.split(":")[0] for words in found}


@pytest.mark.slow
def test_for_each_scenario_something_reasonable_holds(real):
    for name, verdict in real.verdicts.items():
        assert verdict.holds, (name, verdict.broken)


def test_on_paper_a_run_without_drafts_is_what_it_is(real):
    for name in ("chat", "batch"):
        predicted, found = on_paper(real.trial, name, real.good[name])
        ran = real.verdicts[name].outcome
        assert predicted.tokens_per_s == pytest.approx(ran.tokens_per_s, rel=1e-9)
        assert predicted.ttft_s == pytest.approx(ran.ttft_s, rel=1e-9)
        assert predicted.weight_bytes == ran.weight_bytes
        assert predicted.cache_bytes == ran.cache_bytes
        assert not found
    tally = real.verdicts["laptop"].outcome.tally
    rounds = tally.tokens_per_round, tally.drafted / tally.rounds
    predicted, found = on_paper(real.trial, "laptop", real.good["laptop"], *rounds)
    assert predicted.memory_bytes == real.verdicts["laptop"].outcome.memory_bytes
    assert not found


def test_the_chat_service_tells_plausible_configurations_apart(real):
    found = {
        name: on_paper(real.trial, "chat", c)[1]
        for name, c in {
            "not shared": Configuration("int8", schedule="continuous", slots=8, pages=True),
            "rows": Configuration("int8", schedule="continuous", slots=8),
            "bf16": Configuration("bf16", **CHAT),
            "few slots": Configuration("int8", schedule="continuous", slots=3),
            "static": Configuration("int8", schedule="static", slots=8),
            "4 bits": Configuration("int4", **CHAT),
            "one by one": Configuration("int8"),
        }.items()
    }
    assert found["not shared"] == found["rows"] == found["bf16"] == {"memory"}
    assert found["few slots"] == {"first token"}
    assert found["static"] >= {"first token", "speed"}
    assert found["4 bits"] == {"quality"}
    assert found["one by one"] >= {"first token", "speed"}


def test_the_batch_job_wants_4_bits_and_many_slots(real):
    found = {
        name: on_paper(real.trial, "batch", c)[1]
        for name, c in {
            "int8": Configuration("int8", **CHAT),
            "few slots": Configuration("int4", schedule="continuous", slots=4),
            "fp32": Configuration(schedule="static", slots=8),
            "one by one": Configuration("int4"),
            "continuous": Configuration("int4", **CHAT),
        }.items()
    }
    assert found["int8"] >= {"memory"}
    assert found["few slots"] == found["one by one"] == {"speed"}
    assert found["fp32"] >= {"memory", "speed"}
    assert not found["continuous"]


def test_the_laptop_wants_drafts_and_int8(real):
    tally = real.verdicts["laptop"].outcome.tally
    rounds = tally.tokens_per_round, tally.drafted / tally.rounds
    found = {
        name: on_paper(real.trial, "laptop", c, *rounds)[1]
        for name, c in {
            "no drafts": Configuration("int8"),
            "4 bits": Configuration("int4", draft="ngram"),
            "bf16": Configuration("bf16", draft="ngram"),
            "as loaded": Configuration(draft="ngram"),
        }.items()
    }
    assert found["no drafts"] == {"speed"}
    assert found["4 bits"] == {"quality"}
    assert found["bf16"] >= {"memory"} and found["as loaded"] >= {"memory"}
