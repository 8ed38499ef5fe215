"""Predictions: with costs that are true, what is predicted is what a run then takes, exactly.

Run and prediction share the scheduler and the costs; only the run has a model. Seconds are sums of
quarters, so that nothing is rounded.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import together_models as tiny
import torch

from lecture_util.model.config import PUBLISHED
from lecture_util.model.weights import load
from lecture_util.speculative.target import Reader
from lecture_util.speculative.trained import load_eagle
from lecture_util.together.configuration import Configuration
from lecture_util.together.costs import Costs, from_peaks
from lecture_util.together.predict import head_bytes, predict
from lecture_util.together.run import drafter, serve, text_bytes
from lecture_util.together.scenarios import LAPTOP
from lecture_util.together.variants import Variants, held_bytes, with_weights

NEWS = (30, 9, 25, 2, 40)
PLAIN = [c for c in tiny.runnable(weights="fp32", student=False) if c.draft is None]
WORKLOADS = {
    "at once": tiny.workload((21, 40, 1, 33, 18), (7, 3, 5, 1, 9)),
    "in turn": tiny.workload((21, 40, 17, 33, 18), (7, 3, 5, 1, 9), (0, 1, 2, 3, 4), closed=True),
    "one by one": tiny.workload((60, 50, 80, 33, 5), (4, 6, 1, 7, 3), (0, 2, 2.5, 64, 200), seed=2),
    "in chunks": tiny.workload((300, 290, 70, 280, 8), (3, 2, 8, 1, 4), (0, 0, 3, 4, 4), shared=64),
}


@pytest.fixture(scope="module")
def variants():
    return Variants(tiny.tiny_model(dtype=torch.float32))


def same(predicted, outcome):
    assert predicted.tokens_per_s == outcome.tokens_per_s
    assert predicted.ttft_s == outcome.ttft_s
    assert predicted.weight_bytes == outcome.weight_bytes
    assert predicted.cache_bytes == outcome.cache_bytes
    assert predicted.memory_bytes == outcome.memory_bytes - outcome.copy_bytes


@pytest.mark.parametrize("step", [tiny.one_each, tiny.by_tokens, tiny.by_context])
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("c", PLAIN, ids=str)
def test_a_prediction_is_what_the_run_takes(variants, c, name, step):
    outcome = serve(variants(c), c, WORKLOADS[name], tiny.virtual(step))
    same(predict(tiny.TINY, c, WORKLOADS[name], Costs(step, step)), outcome)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "c",
    [
        Configuration(), Configuration(cache=False), Configuration(schedule="static", slots=3),
        Configuration(schedule="continuous", slots=3, pages=True, prefix=True),
    ],
    ids=str,
)  # fmt: skip
def test_so_it_is_in_other_numbers(variants, c, weights):
    c, work = replace(c, weights=weights), WORKLOADS["at once"]
    outcome = serve(variants(c), c, work, tiny.virtual())
    same(predict(tiny.TINY, c, work, Costs(tiny.one_each, tiny.one_each)), outcome)


@pytest.mark.parametrize("shape", [{"tied": True}, {"qkv_bias": True}, {"L": 1}])
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_so_it_is_for_other_shapes(shape, weights):
    config, c = replace(tiny.TINY, **shape), Configuration(weights)
    model = with_weights(tiny.tiny_model(config, dtype=torch.float32), weights)
    work = tiny.workload((9, 4), (2, 3))
    outcome = serve(model, c, work, tiny.virtual())
    same(predict(config, c, work, Costs(tiny.one_each, tiny.one_each)), outcome)


def test_static_batches_are_charged_by_rows_and_continuous_ones_by_the_flat_run(variants):
    costs = Costs(tiny.one_each, lambda pieces: 3.0)
    work = tiny.workload((5, 4), (3, 2))
    for c, seconds in (
        (Configuration(), 5),
        (Configuration(schedule="static", slots=2), 3),
        (Configuration(schedule="continuous", slots=2), 9),
    ):
        assert predict(tiny.TINY, c, work, costs).tokens_per_s == 5 / seconds
        assert predict(tiny.TINY, c, work, costs.scaled(2.0)).tokens_per_s == 5 / seconds / 2


def drafted(variants, c, step, work):
    """A run with n-gram drafts, and costs that say of drafts what happened in it."""
    outcome = serve(variants(c), c, work, tiny.virtual(step))
    tally = outcome.tally
    assert tally.tokens_per_round > 1.2
    known = {"tokens_per_round": tally.tokens_per_round, "drafted": tally.drafted / tally.rounds}
    return outcome, {name: {"ngram": value} for name, value in known.items()}


@pytest.mark.parametrize("guesses", [1, 4])
def test_drafts_are_predicted_from_what_a_round_gains(variants, guesses):
    """As many forwards in all as rounds, and as much drafting, if no answer is over in one round;
    a first token comes after one forward."""
    c = Configuration(draft="ngram", guesses=guesses)
    work = tiny.workload(news=NEWS, seed=3, closed=True)
    step = lambda pieces: sum(1.0 + 0.5 * p.drafted for p in pieces)  # noqa: E731
    outcome, known = drafted(variants, c, step, work)
    costs = Costs(tiny.one_each, tiny.one_each, {"ngram": 0.5}, **known)
    predicted = predict(tiny.TINY, c, work, costs)
    assert predicted.tokens_per_s == pytest.approx(outcome.tokens_per_s, rel=1e-9)
    assert predicted.memory_bytes == outcome.memory_bytes
    alike = predict(tiny.TINY, c, work, Costs(tiny.one_each, tiny.one_each, **known))
    assert alike.ttft_s == 1


def test_tokens_read_with_drafts_are_predicted_to_the_rounding_of_guesses(variants):
    """Guesses of a round are rounded to a whole number: half a token a round at most, and for each
    text's last, partial round less than a whole one."""
    c = Configuration(draft="ngram")
    work = tiny.workload(news=NEWS, seed=3)
    outcome, known = drafted(variants, c, tiny.by_tokens, work)
    predicted = predict(tiny.TINY, c, work, Costs(tiny.by_tokens, tiny.by_tokens, **known))
    seconds = outcome.new_tokens / predicted.tokens_per_s
    rounds, guesses = outcome.tally.rounds, known["drafted"]["ngram"]
    assert abs(seconds - outcome.seconds) <= 0.5 * rounds + len(work) * (1 + guesses)


def test_an_answer_shorter_than_a_rounds_gain_takes_a_whole_forward():
    c, work = Configuration(draft="ngram"), tiny.workload((5,), (1,))
    costs = Costs(tiny.one_each, tiny.one_each, {}, {"ngram": 4.0}, {"ngram": 3.0})
    predicted = predict(tiny.TINY, c, work, costs)
    assert predicted.ttft_s == 1 and predicted.tokens_per_s == 1


def test_a_draft_that_gains_nothing_costs_its_guesses():
    c, work = Configuration(draft="ngram"), tiny.workload((5, 3), (4, 2))
    costs = Costs(tiny.by_tokens, tiny.by_tokens, {"ngram": 0.25}, {"ngram": 1.0}, {"ngram": 2.0})
    predicted = predict(tiny.TINY, c, work, costs)
    # prompts of 5 and 3, four tokens more, six rounds of two guesses and what guessing them took
    assert 6 / predicted.tokens_per_s == 5 + 3 + 4 + 6 * (2 + 0.5)
    assert predicted.ttft_s == (7.5 + (7.5 + 3 * 3.5 + 5.5)) / 2


@pytest.fixture(scope="module")
def reference():
    return load("smollm2-135m", device="cpu")


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("draft", ["medusa", "eagle"])
def test_heads_hold_the_bytes_that_were_predicted(reference, draft, weights):
    model = reference if weights == "fp32" else SimpleNamespace()
    if weights == "bf16":  # its heads take the dtype of embedding and head; layers are not asked
        model = load_shell(reference)
    c = Configuration(weights, draft=draft)
    new_drafter, held = drafter(model, c)
    assert held == head_bytes(model.config, c) > 0
    # and the caches of one text: the reader's, and the one that EAGLE's layer has to itself
    reader = Reader(model, 100 + c.guesses)
    made = new_drafter(reader)
    own = made.cache.nbytes if draft == "eagle" else 0
    assert text_bytes(model.config, c, 100, model.dtype.itemsize) == reader.cache.nbytes + own


def load_shell(reference):
    """The reference in bf16 with all its layers but none of their weights' bytes."""
    from lecture_util.model.transformer import Transformer

    with torch.device("meta"):
        shell = Transformer(reference.config)
    shell.embed.weight = torch.nn.Parameter(reference.embed.weight.detach().bfloat16())
    shell.head.weight = shell.embed.weight
    return shell


def test_the_reference_models_bytes_are_the_bytes_held(reference):
    config = PUBLISHED["smollm2-135m"]
    c, work = Configuration(), tiny.workload((5,), (3,))
    predicted = predict(config, c, work, Costs(tiny.one_each, tiny.one_each))
    assert predicted.weight_bytes == held_bytes(reference)
    assert load_eagle(reference)[0].config.L == 1
    assert head_bytes(config, c) == head_bytes(config, Configuration(draft="ngram")) == 0


GOOD = Costs(tiny.one_each, tiny.one_each)
NGRAM = Configuration(draft="ngram")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"config": tiny.tiny_model()}, TypeError, "expected a Config"),
        ({"configuration": "int8"}, TypeError, "configuration='int8': expected a Configuration"),
        ({"workload": []}, TypeError, r"workload=\[\]: expected a Workload"),
        ({"costs": tiny.one_each}, TypeError, "expected a Costs"),
        ({"configuration": NGRAM}, ValueError, r"no tokens a round are known for 'ngram': a form"),
        (
            {"configuration": NGRAM, "costs": replace(GOOD, tokens_per_round={"ngram": 2.0})},
            ValueError,
            r"give Costs\(tokens_per_round=\.\.\., drafted=\.\.\.\)",
        ),
        (
            {"configuration": NGRAM, "costs": from_peaks(tiny.TINY, "fp32", LAPTOP)},
            ValueError,
            r"calibrate\(\.\.\., drafts=\[\.\.\.\]\)",
        ),
        *(
            (
                {
                    "configuration": NGRAM,
                    "costs": replace(GOOD, tokens_per_round={"ngram": gain}, drafted={"ngram": 1}),
                },
                ValueError,
                f"tokens_per_round of 'ngram' is {gain}: every round gains one token at least",
            )
            for gain in (0, 0.5, -1, math.nan)
        ),
    ],
)
def test_what_nothing_can_be_predicted_from_is_refused(change, error, says):
    given = {
        "config": tiny.TINY,
        "configuration": Configuration(),
        "workload": tiny.workload(),
        "costs": GOOD,
    }
    with pytest.raises(error, match=says):
        predict(**given | change)


def test_what_a_run_would_refuse_is_refused_on_paper():
    work, free = tiny.workload((3,), (4,)), Costs(tiny.one_each, tiny.one_each)
    with pytest.raises(ValueError, match="costs of fp32 weights but the configuration has int4"):
        predict(tiny.TINY, Configuration("int4"), work, from_peaks(tiny.TINY, "fp32", LAPTOP))
    with pytest.raises(ValueError, match="context is"):
        predict(tiny.TINY, Configuration(), tiny.workload((9000,), (4,)), free)
    for seconds in (float("nan"), -1.0, float("inf"), 0.0):
        costs = Costs(lambda pieces, s=seconds: s, lambda pieces, s=seconds: s)
        for c in (Configuration(), Configuration(schedule="continuous", slots=2)):
            with pytest.raises(ValueError, match=r"finite seconds|no time at all"):
                predict(tiny.TINY, c, work, costs)
