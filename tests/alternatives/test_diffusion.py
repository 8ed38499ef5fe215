"""Masked diffusion against enumeration: the loss, the sampler, and the faults others had."""

import itertools
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from lecture_util.alternatives.denoise import (
    Step,
    denoise,
    draw,
    highest,
    parallel_joint,
    schedule,
)
from lecture_util.alternatives.diffusion import (
    Bidirectional,
    MaskedDiffusion,
    blur,
    hide,
    masked_loss,
    masked_task,
    nearest_word,
    sqrt_schedule,
)
from lecture_util.model.config import Config
from lecture_util.model.kv_cache import NoCache
from lecture_util.model.shapes import ShapeError
from lecture_util.model.train import IGNORE, train
from lecture_util.model.transformer import Transformer

TINY = Config(D=24, F=40, K=2, G=3, H=4, L=2, V=8, max_context=64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_joint(seed, V=3, T=3):
    logits = 1.5 * torch.randn((V,) * T, dtype=torch.float64, generator=generator(seed))
    return logits.flatten().softmax(0).view_as(logits)


class Table:
    """A perfect model of a joint: for each hidden position its conditional, by summing the joint.

    mask_id is V. At revealed positions it gives uniform logits, which nothing may read.
    """

    def __init__(self, joint):
        self.joint, self.mask_id, self.calls = joint, joint.shape[0], 0

    def __call__(self, tokens_BT):
        self.calls += 1
        V, (B, T) = self.mask_id, tokens_BT.shape
        logits = torch.zeros(B, T, V, dtype=torch.float64)
        cache = {}
        for b, row in enumerate(tokens_BT.tolist()):
            if tuple(row) not in cache:
                fits = torch.zeros_like(self.joint)
                index = tuple(slice(None) if x == V else slice(x, x + 1) for x in row)
                fits[index] = self.joint[index]
                cache[tuple(row)] = torch.stack(
                    [
                        fits.sum([j for j in range(T) if j != i]).log()
                        if row[i] == V
                        else torch.zeros(V, dtype=torch.float64)
                        for i in range(T)
                    ]
                )
            logits[b] = cache[tuple(row)]
        return logits


class Fixed:
    """Always the same logits, and a count of how often it was asked."""

    def __init__(self, logits_TV):
        self.logits_TV, self.mask_id, self.calls = logits_TV, logits_TV.shape[-1], 0

    def __call__(self, tokens_BT):
        self.calls += 1
        return self.logits_TV.expand(len(tokens_BT), -1, -1)


def nothing(mask_id, B=1, T=0):
    return torch.full((B, T), mask_id)


# --- the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 7])
def test_bidirectional_attention_is_the_plain_softmax_over_everything(T):
    g = generator(1)
    q_BTNH = torch.randn(3, T, 6, 4, dtype=torch.float64, generator=g)
    k_BTKH, v_BTKH = torch.randn(2, 3, T, 2, 4, dtype=torch.float64, generator=g)
    k_BTNH, v_BTNH = (x.repeat_interleave(3, dim=2) for x in (k_BTKH, v_BTKH))
    scores = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) / 2
    want = torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v_BTNH)
    torch.testing.assert_close(Bidirectional().attend(0, q_BTNH, k_BTKH, v_BTKH), want)


def test_every_token_sees_every_other_without_anyone_passing_a_cache():
    model = MaskedDiffusion.random(TINY, seed=3, dtype=torch.float64)
    tokens = torch.randint(7, (1, 5), generator=generator(2))
    base = model(tokens)
    for changed in range(5):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 7
        moved = (model(other) - base).abs().amax(-1)[0] > 1e-9
        assert moved.all()
    assert torch.equal(model(tokens, Bidirectional()), base)


def test_the_mask_is_an_input_and_never_an_output():
    model = MaskedDiffusion.random(TINY, seed=0)
    assert model.mask_id == 7
    assert model(nothing(7, 2, 5)).shape == (2, 5, 7)
    assert Transformer.random(TINY, seed=0)(nothing(7, 2, 5)).shape == (2, 5, 8)


# --- the loss ----------------------------------------------------------------------------------


def expected_loss(model, text, nodes=8):
    """masked_loss in expectation: all masks enumerated, t by Gauss-Legendre (exact here)."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    T, total = len(text), 0.0
    for mask in itertools.product([False, True], repeat=T):
        if not any(mask):
            continue
        hidden = torch.tensor([mask])
        noisy = torch.tensor([text]).masked_fill(hidden, model.mask_id)
        targets = torch.tensor([text]).masked_fill(~hidden, IGNORE)
        for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
            chance = point ** sum(mask) * (1 - point) ** (T - sum(mask))
            t_B = torch.tensor([point], dtype=torch.float64)
            total += weight * chance * masked_loss(model, noisy, targets, t_B).item()
    return total


def mean_over_orders(model, text):
    """Reveal one token at a time; the nats of each, averaged over all orders."""
    T, total, orders = len(text), 0.0, list(itertools.permutations(range(len(text))))
    for order in orders:
        row = [model.mask_id] * T
        for i in order:
            total -= model(torch.tensor([row]))[0, i].log_softmax(-1)[text[i]].item()
            row[i] = text[i]
    return total / len(orders) / T


@pytest.mark.parametrize("text", [(0, 1, 2), (2, 2, 0), (1, 1, 1)])
def test_the_expected_loss_of_a_perfect_model_is_the_negative_log_likelihood(text):
    joint = random_joint(5)
    want = -joint[text].log().item() / 3
    assert expected_loss(Table(joint), text) == pytest.approx(want, abs=1e-12)


def test_the_expected_loss_of_any_model_is_its_average_over_reading_orders():
    """A network is no table of conditionals: its orders disagree, and the mean is a bound."""
    model = MaskedDiffusion.random(TINY, seed=4, dtype=torch.float64)
    with torch.no_grad():
        model.embed.weight.mul_(30)  # so that context matters
        model.head.weight.mul_(30)
    text = (6, 0, 3, 3)
    mean = mean_over_orders(model, text)
    assert expected_loss(model, text) == pytest.approx(mean, abs=1e-12)
    assert abs(mean - math.log(7)) > 1e-3


def test_without_the_weight_the_loss_would_not_be_the_likelihood():
    joint = random_joint(5)
    model, text = Table(joint), (0, 1, 2)

    hits = []
    for hidden in itertools.product([False, True], repeat=3):
        noisy = torch.tensor([text]).masked_fill(torch.tensor([hidden]), 3)
        targets = torch.tensor([text]).masked_fill(~torch.tensor([hidden]), IGNORE)
        chance = math.factorial(sum(hidden)) * math.factorial(3 - sum(hidden)) / math.factorial(4)
        one = torch.ones(1, dtype=torch.float64)
        hits.append(chance * masked_loss(model, noisy, targets, one).item())
    assert abs(sum(hits) + joint[text].log().item() / 3) > 0.1


def test_training_batches_average_to_the_expected_loss():
    """The whole path, drawn and not enumerated: within four standard errors."""
    joint = random_joint(6)
    model, text = Table(joint), (2, 0, 1)
    new_batch, g = masked_task(torch.tensor(text), 3, 3, mask_id=3), generator(0)
    losses = torch.tensor([masked_loss(model, *new_batch(g)).item() for _ in range(1500)])
    error = losses.std() / math.sqrt(len(losses))
    assert abs(losses.mean() + joint[text].log() / 3) < 4 * error
    assert error < 0.1


def test_hiding_hides_with_probability_t_and_scores_only_what_is_hidden():
    tokens, t_B = torch.randint(5, (2, 20_000), generator=generator(1)), torch.tensor([0.2, 0.9])
    noisy, targets, kept_t = hide(tokens, t_B, 5, generator(2))
    hidden = noisy == 5
    assert torch.equal(targets[hidden], tokens[hidden]) and (targets[~hidden] == IGNORE).all()
    assert torch.equal(noisy[~hidden], tokens[~hidden]) and kept_t is t_B
    error = (hidden.double().mean(1) - t_B).abs() / (t_B * (1 - t_B) / 20_000).sqrt()
    assert (error < 4).all()


def test_t_is_uniform_within_a_batch_and_never_zero():
    new_batch, g = masked_task(torch.arange(9), 7, 4, mask_id=9), generator(0)
    t_NB = torch.stack([new_batch(g)[2] for _ in range(300)])
    assert (t_NB > 0).all() and (t_NB <= 1).all()
    assert torch.equal((t_NB * 7).ceil().sort(dim=1).values, torch.arange(1.0, 8).expand(300, 7))
    counts, _ = np.histogram(t_NB[:, 0].numpy(), bins=10, range=(0, 1))
    assert chisquare(counts).pvalue > 1e-3


def test_t_stays_above_zero_when_the_uniform_is_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator=None: torch.zeros(*shape))
    _, _, t_B = masked_task(torch.arange(9), 5, 4, mask_id=9)(generator(0))
    assert t_B.sort().values.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    model = MaskedDiffusion(TINY)
    text = torch.arange(70) % 7
    losses = train(model, masked_task(text, 16, 12, 7), 80, progress=False, loss_of=masked_loss)
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])


# --- the schedule ------------------------------------------------------------------------------


@given(st.integers(1, 400), st.integers(1, 400))
def test_the_schedule_gives_every_token_a_step_and_no_step_nothing(m, steps):
    counts = schedule(m, steps)
    assert sum(counts) == m and len(counts) == min(m, steps)
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1 <= counts[-1]


def test_more_steps_than_tokens_leaves_none_idle():
    """LLaDA's schedule gives [1, 1, 0, 0] here: two passes for nothing."""
    assert schedule(2, 4) == [1, 1]
    assert schedule(7, 3) == [3, 2, 2]
    model = Fixed(torch.zeros(2, 5))
    assert [step.passes for step in denoise(model, nothing(5), 2, 4)] == [0, 1, 2]
    assert model.calls == 2


# --- the draw ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([2.0, 0.3, -1.0, 0.3, -3.0])
    words = draw(logits.expand(40_000, -1), temperature, generator(7))
    want = (logits.double() / temperature).softmax(-1) * 40_000
    assert chisquare(words.bincount(minlength=5).numpy(), want.numpy()).pvalue > 1e-3


def test_a_large_vocabulary_keeps_its_tail():
    """vllm#34854, mdlm: fp32 noise ends at -log(2**-24) = 16.6, and a sum of rare words with it."""
    V, n = 4001, 3000
    logits = torch.full((V,), -9.0)
    logits[0] = 0.0  # the rest together: 4000 e^-9, a third
    words = draw(logits.expand(n, -1), 1.0, generator(3))
    tail = (words > 0).sum().item()
    share = 4000 * math.exp(-9) / (1 + 4000 * math.exp(-9))
    assert chisquare([n - tail, tail], [n * (1 - share), n * share]).pvalue > 1e-3


def test_noise_is_finite_and_signed_at_the_ends_of_the_uniform(monkeypatch):
    """Cases 36 and 37: u = 0, u just below 1. The smallest u gives the largest noise."""

    def with_uniform(*values):
        given_ = torch.tensor(values, dtype=torch.float64)

        def uniform_(x, generator=None):
            assert x.dtype == torch.float64
            return x.copy_(given_)

        monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)

    for values, want in [((0.5, 0.0), 1), ((1 - 2.0**-53, 0.5), 1), ((2.0**-32, 0.5), 0)]:
        with_uniform(*values)
        assert draw(torch.zeros(2), 1.0) == want
        assert draw(torch.tensor([0.0, -90.0]), 1.0) == 0  # no finite noise lifts that
    with_uniform(0.5, 2.0**-40)
    assert draw(torch.tensor([0.0, -20.0]), 1.0) == 1  # fp32 noise could not: it ends at 16.6


def test_temperature_zero_is_argmax_and_the_limit_of_small_ones():
    logits = torch.randn(50, 9, generator=generator(1))
    assert torch.equal(draw(logits, 0.0), logits.argmax(-1))
    assert torch.equal(draw(logits, 1e-320, generator(0)), logits.argmax(-1))
    with pytest.raises(ValueError, match="NaN"):
        draw(torch.tensor([0.0, torch.nan]), 0.0)


def test_words_ruled_out_are_never_drawn():
    logits = torch.tensor([0.0, -torch.inf, 0.0])
    assert 1 not in draw(logits.expand(5000, -1), 3.0, generator(0))


# --- the sampler -------------------------------------------------------------------------------


def passes_of(*args, **options):
    return list(denoise(*args, **options))


@pytest.mark.parametrize("block", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("order", ["confidence", "random"])
@pytest.mark.parametrize("B", [1, 3])
def test_every_hole_is_filled_and_nothing_given_is_touched(block, order, B):
    model = MaskedDiffusion.random(TINY, seed=1)
    prompt = torch.randint(7, (B, 4), generator=generator(2))
    steps = passes_of(model, prompt, 7, 7, block=block, order=order, temperature=1.0,
                      generator=generator(0))  # fmt: skip
    assert (steps[0].tokens_BT[:, 4:] == 7).all()
    for before, after in itertools.pairwise(steps):
        assert torch.equal(after.tokens_BT[:, :4], prompt)
        assert torch.equal(after.revealed_BT, (before.tokens_BT == 7) & (after.tokens_BT != 7))
        assert not after.remasked_BT.any()
        assert (after.revealed_BT.sum(1) == 1).all()
    assert (steps[-1].tokens_BT < 7).all() and steps[-1].passes == 7 == len(steps) - 1


def test_the_counts_follow_the_schedule_and_so_do_the_passes():
    model = Fixed(torch.randn(11, 6, generator=generator(0)))
    steps = passes_of(model, nothing(6), 11, 4)
    assert [int(step.revealed_BT.sum()) for step in steps] == [0, 3, 3, 3, 2]
    assert model.calls == steps[-1].passes == 4


def test_blocks_are_finished_from_left_to_right():
    model = MaskedDiffusion.random(TINY, seed=1)
    steps = passes_of(model, torch.tensor([[1, 2]]), 8, 5, block=3)  # blocks of 3, 3, 2
    assert [int(step.revealed_BT.sum()) for step in steps[1:]] == [2, 1, 2, 1, 2]
    for step, done in zip(steps[1:], [0, 0, 3, 3, 6], strict=True):
        columns = step.revealed_BT[0].nonzero()[:, 0] - 2
        assert columns.min() >= done and columns.max() < done + 3


def test_holes_within_the_text_are_filled_in():
    model = MaskedDiffusion.random(TINY, seed=1)
    text = torch.tensor([[1, 7, 2, 7], [7, 3, 7, 0]])
    (*_, last) = denoise(model, text, 0, 2)
    assert torch.equal(last.tokens_BT[text != 7], text[text != 7])
    assert (last.tokens_BT < 7).all()
    (*_, last) = denoise(model, text, 3, 3, block=2)
    assert (last.tokens_BT < 7).all() and last.tokens_BT.shape == (2, 7)


def test_confidence_is_that_of_the_drawn_word_before_noise():
    """LLaDA takes it from the clean softmax; noisy logits would say how lucky a word was."""
    logits = torch.tensor([[9.0, 0.0], [1.0, 0.0], [0.2, 0.0]])
    for seed in range(20):
        first = passes_of(Fixed(logits), nothing(2), 3, 3, temperature=1.0,
                          generator=generator(seed))[1]  # fmt: skip
        words = draw(logits[None], 1.0, generator(seed))  # what the pass proposed
        chances = logits.softmax(-1).gather(-1, words[0, :, None])[:, 0]
        assert first.revealed_BT[0].nonzero().item() == chances.argmax()
        assert first.tokens_BT[0, chances.argmax()] == words[0, chances.argmax()]


def test_a_model_that_would_emit_the_mask_is_refused():
    """LLaDA never bans its mask id, so it can appear in the output."""
    model = Fixed(torch.zeros(4, 6))
    model.mask_id = 5  # the last column is the mask's
    with pytest.raises(ShapeError, match=r"\(1, 4, 6\).*5 words and none for the mask"):
        passes_of(model, nothing(5), 4, 2)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_keeping_the_surest_is_remasking_the_least_sure(scores, data):
    """LLaDA#70: the two wordings name one set, once ties are pinned (leftmost stays)."""
    count = data.draw(st.integers(0, len(scores)))
    kept = highest(torch.tensor([scores]), count)[0].tolist()
    remasked = sorted(range(len(scores)), key=lambda i: (scores[i], -i))[: len(scores) - count]
    assert [i for i, keep in enumerate(kept) if not keep] == sorted(remasked)


class ChangesItsMind:
    """Unsure of word 0 at position 1 at first; after two tokens stand, sure of word 1 elsewhere."""

    mask_id = 2

    def __call__(self, tokens_BT):
        logits = torch.zeros(*tokens_BT.shape, 2)
        if int((tokens_BT == 2).sum()) == 3:
            logits[:, 1, 0] = 0.5  # the best there is, and weak
        else:
            logits[:, 2:, 1] = 5.0
            logits[:, 1, 1] = 4.0
        return logits


def test_a_revealed_token_can_be_remasked_and_the_prompt_cannot():
    """Open-dLLM#7: revealed tokens had infinite confidence, so that remasking never happened."""
    prompt = torch.tensor([[0]])
    steps = passes_of(ChangesItsMind(), prompt, 3, 3, remask=True)
    assert steps[1].tokens_BT.tolist() == [[0, 0, 2, 2]]
    assert steps[2].tokens_BT.tolist() == [[0, 2, 1, 1]]
    assert steps[2].remasked_BT.tolist() == [[False, True, False, False]]
    assert steps[3].tokens_BT.tolist() == [[0, 1, 1, 1]]
    for step in steps:
        assert step.tokens_BT[0, 0] == 0 and not step.remasked_BT[0, 0]
    kept = passes_of(ChangesItsMind(), prompt, 3, 3)
    assert kept[-1].tokens_BT.tolist() == [[0, 0, 1, 1]]
    assert not any(step.remasked_BT.any() for step in kept)


class Boasts:
    """Finds one new word a pass, and claims to be sure of all that stands."""

    mask_id = 2
    offers: ClassVar = {4: [0.6, 0, 0, 0], 3: [0, 0.7, 0, 0], 2: [5, 5, 6, 7], 1: [8, 8, 8, 8]}

    def __call__(self, tokens_BT):
        hidden_BT = tokens_BT == 2
        offer = torch.tensor(self.offers[int(hidden_BT.sum())], dtype=torch.float64)
        logits = torch.where(hidden_BT, offer, 9.0)
        return torch.stack([torch.zeros_like(logits), logits], -1)


def test_what_stands_is_judged_by_the_confidence_it_was_chosen_with():
    """Not by what the model says there now: it learns to speak of hidden positions only."""
    steps = passes_of(Boasts(), nothing(2), 4, 4, remask=True)
    shown = [(step.tokens_BT[0] != 2).tolist() for step in steps]
    assert shown[1] == [True, False, False, False]  # by 0.6
    assert shown[2] == [True, True, False, False]  # and by 0.7
    assert shown[3] == [False, True, True, True]  # 0.6 gives way to 6 and 7
    assert steps[3].remasked_BT.tolist() == [[True, False, False, False]]
    assert shown[4] == [True] * 4


def test_remasking_fills_everything_in_as_many_passes():
    model = MaskedDiffusion.random(TINY, seed=2)
    prompt = torch.randint(7, (4, 3), generator=generator(2))
    steps = passes_of(model, prompt, 9, 6, remask=True, block=5, temperature=1.0,
                      generator=generator(0))  # fmt: skip
    assert (steps[-1].tokens_BT < 7).all() and steps[-1].passes == 6
    for step in steps:
        assert torch.equal(step.tokens_BT[:, :3], prompt) and not step.remasked_BT[:, :3].any()


def test_steps_keep_what_they_showed():
    model = MaskedDiffusion.random(TINY, seed=2)
    shown = []
    steps = []
    for step in denoise(model, torch.tensor([[1]]), 6, 6, remask=True):
        assert isinstance(step, Step)
        steps.append(step)
        shown.append(step.tokens_BT.clone())
    assert all(torch.equal(step.tokens_BT, was) for step, was in zip(steps, shown, strict=True))


def test_one_seed_gives_one_text_and_sampling_leaves_gradients_as_they_were():
    model = MaskedDiffusion.random(TINY, seed=2)
    texts = [passes_of(model, torch.tensor([[1]]), 6, 3, temperature=1.0, generator=generator(5))
             [-1].tokens_BT for _ in range(2)]  # fmt: skip
    assert torch.equal(*texts)
    for _ in denoise(model, torch.tensor([[1]]), 6, 3):
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.0}, r"steps=2\.0"),
        ({"length": -1}, "length=-1"),
        ({"length": 0}, r"\[0\] positions to fill"),
        ({"block": 0}, "block=0"),
        ({"block": 2, "steps": 2}, "3 blocks of up to 2"),
        ({"order": "left"}, "order='left'.*confidence, random"),
        ({"order": "random", "remask": True}, "remasking goes by confidence"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"prompt_BT": torch.tensor([[9]])}, r"outside 0\.\.7"),
        ({"prompt_BT": torch.tensor([[-1]])}, r"outside 0\.\.7"),
        ({"prompt_BT": torch.tensor([[7, 1], [2, 1]])}, r"\[6, 5\] positions"),
        ({"prompt_BT": torch.tensor([1, 2])}, r"shape \(2,\)"),
        ({"prompt_BT": torch.ones(1, 2)}, r"torch\.float32"),
        ({"prompt_BT": torch.zeros(0, 2, dtype=torch.long)}, r"\[\] positions"),
    ],
)
def test_bad_requests_are_refused_at_the_call(change, match):
    model = MaskedDiffusion.random(TINY)
    options = {"prompt_BT": torch.tensor([[1]]), "length": 5, "steps": 3} | change
    with pytest.raises(ValueError, match=match):
        denoise(model, **options)  # not iterated


# --- fewer steps -------------------------------------------------------------------------------


def test_one_token_at_a_time_gives_the_joint_back_and_more_do_not():
    joint = random_joint(8)
    assert joint.sum().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(parallel_joint(joint, [1, 1, 1]), joint, rtol=0, atol=1e-12)
    pair = parallel_joint(joint, [2, 1])
    single = parallel_joint(joint, [3])
    for drawn in (pair, single):
        assert drawn.sum().item() == pytest.approx(1, abs=1e-12)
        assert (drawn - joint).abs().sum() > 1e-3
    marginals = [joint.sum(axes) for axes in [(1, 2), (0, 2), (0, 1)]]
    want = torch.einsum("a,b,c->abc", *marginals)
    torch.testing.assert_close(single, want, rtol=0, atol=1e-12)


def test_words_that_exclude_each_other_are_mixed_by_a_single_pass():
    """Half the time one text, half the time the other: drawn at once, half are neither."""
    joint = torch.tensor([[0.5, 0.0], [0.0, 0.5]], dtype=torch.float64)
    assert torch.equal(parallel_joint(joint, [1, 1]), joint)
    assert torch.equal(parallel_joint(joint, [2]), torch.full((2, 2), 0.25, dtype=torch.float64))
    three = torch.zeros(2, 2, 2, dtype=torch.float64)
    three[0, 0, 0] = three[1, 1, 1] = 0.5
    assert parallel_joint(three, [2, 1]).sum() == 1  # impossible beginnings go on somehow


def test_independent_words_lose_nothing():
    a, b = torch.tensor([[0.2, 0.8], [0.6, 0.4]], dtype=torch.float64)
    joint = torch.outer(a, b)
    torch.testing.assert_close(parallel_joint(joint, [2]), joint, rtol=0, atol=1e-12)


@pytest.mark.parametrize("counts", [[2], [1, 1, 2], [3, 0], []])
def test_counts_must_fit_the_text(counts):
    with pytest.raises(ValueError, match="add up to T=3"):
        parallel_joint(random_joint(0), counts)


@pytest.mark.parametrize(("steps", "counts"), [(3, [1, 1, 1]), (2, [2, 1]), (1, [3])])
def test_the_sampler_draws_what_the_enumeration_says(steps, counts):
    joint, n = random_joint(8), 20_000
    (*_, last) = denoise(Table(joint), nothing(3, n), 3, steps, order="random", temperature=1.0,
                         generator=generator(1))  # fmt: skip
    drawn = (last.tokens_BT * torch.tensor([9, 3, 1])).sum(1).bincount(minlength=27).numpy()
    want = parallel_joint(joint, counts).flatten().numpy() * n
    assert chisquare(drawn, want).pvalue > 1e-3
    if steps < 3:
        assert chisquare(drawn, joint.flatten().numpy() * n).pvalue < 1e-6


# --- continuous diffusion ------------------------------------------------------------------------


def test_noise_grows_from_nearly_none_to_all_and_keeps_the_variance():
    kept = sqrt_schedule(torch.linspace(0, 1, 11, dtype=torch.float64))
    assert kept[0] == pytest.approx(0.99) and kept[-1] == 0  # 1 - sqrt(1e-4); never below nothing
    assert (kept.diff() < 0).all()
    embed_VD = torch.randn(40, 200, generator=generator(0))
    words = torch.randint(40, (300,), generator=generator(1))
    for t in (0.0, 0.3, 1.0):
        vectors = blur(words, embed_VD, torch.tensor(t), generator(2))
        assert vectors.var().item() == pytest.approx(1, abs=0.05)


def test_little_noise_rounds_back_to_the_word_and_much_does_not():
    embed_VD = torch.randn(40, 24, generator=generator(0))
    words = torch.randint(40, (5, 60), generator=generator(1))
    assert torch.equal(nearest_word(embed_VD[words], embed_VD), words)
    right = [
        (nearest_word(blur(words, embed_VD, torch.tensor(t), generator(2)), embed_VD) == words)
        .float().mean().item() for t in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    assert right[0] == 1 and right[0] > right[1] > right[2] and right[2] < 0.1


def test_a_cache_that_looks_only_back_is_refused():
    from lecture_util.alternatives.small_models import load_small

    model = load_small("diffusion")
    with pytest.raises(TypeError, match="looks only back"):
        model(torch.zeros(1, 3, dtype=torch.long), NoCache())
