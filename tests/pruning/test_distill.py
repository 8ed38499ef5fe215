"""Distillation: the divergence against hand sums, and a repair that repairs and touches no more."""

import copy
import math
import time

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lecture_util.model.config import Config
from lecture_util.model.shapes import ShapeError
from lecture_util.model.text import (
    english_bytes,
    english_split,
    nats_per_token,
    perplexity,
    text_task,
    windows,
)
from lecture_util.model.train import train
from lecture_util.model.transformer import Transformer
from lecture_util.pruning import distill as module
from lecture_util.pruning.distill import counterparts, distill, hidden_loss, iterative, kl_loss
from lecture_util.pruning.importance import block_influence
from lecture_util.pruning.prune import drop_layers, keep_channels

CONFIG = Config(D=24, F=36, K=1, G=2, H=8, L=4, V=128, tied=True, max_context=64)
TEXT = english_bytes()
STUDY, HELD = TEXT[:200_000], TEXT[300_000 : 300_000 + 8 * 33].view(8, 33)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def logits(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale


def by_enumeration(student, teacher, temperature):
    """The definition, one probability after the other."""
    total = 0.0
    for q_row, p_row in zip(student.flatten(0, -2), teacher.flatten(0, -2), strict=True):
        q = [math.exp(x / temperature) for x in q_row.tolist()]
        p = [math.exp(x / temperature) for x in p_row.tolist()]
        total += sum(
            b / sum(p) * math.log((b / sum(p)) / (a / sum(q))) for a, b in zip(q, p, strict=True)
        )
    return temperature**2 * total / student.flatten(0, -2).shape[0]


@pytest.fixture(scope="module")
def teacher():
    """Four small layers that have read some English, byte by byte."""
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    train(model, text_task(STUDY, 16, 32), 100, progress=False)
    model.zero_grad()
    return model.eval().requires_grad_(False)


@pytest.fixture
def student(teacher):
    return drop_layers(teacher, [1, 2])


def quick(student, teacher, steps=3, study=STUDY, **options):
    options = {"B": 2, "T": 16, "progress": False} | options
    return distill(student, teacher, study, steps, **options)


# --- kl_loss


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_half_and_half_against_nine_to_one_is_0_5108(temperature):
    """Case 111: a forgotten log gives -0.5 or so, the other direction 0.3681."""
    teacher, student = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    got = kl_loss(student.log()[None] * temperature, teacher.log()[None] * temperature, temperature)
    assert got == pytest.approx(0.5108 * temperature**2, abs=1e-4 * temperature**2)
    assert got == pytest.approx(temperature**2 * math.log(5 / 3), rel=1e-6)


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (2, 5, 11), (1, 1, 3)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_kl_equals_enumeration_and_torchs_own(shape, temperature):
    student, teacher = logits(*shape), logits(*shape, seed=1)
    got = kl_loss(student, teacher, temperature)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(by_enumeration(student, teacher, temperature), rel=1e-12)
    flat = [(x / temperature).log_softmax(-1).flatten(0, -2) for x in (student, teacher)]
    want = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)(*flat) * temperature**2
    torch.testing.assert_close(got, want)


@given(st.integers(1, 5), st.integers(2, 40), st.floats(0.3, 20), st.integers(0, 1000))
def test_kl_is_never_negative_is_zero_for_equals_and_ignores_shifts(M, V, temperature, seed):
    student, teacher = logits(M, V, seed=seed), logits(M, V, seed=seed + 1)
    got = kl_loss(student, teacher, temperature)
    assert got > 0
    assert abs(kl_loss(teacher + 5, teacher, temperature)) < 1e-11 * max(1, temperature**2)
    torch.testing.assert_close(got, kl_loss(student - 7, teacher + 3, temperature), rtol=1e-7,
                               atol=1e-11)  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 4.0, 500.0])
def test_the_gradient_is_t_times_q_minus_p(temperature):
    student, teacher = logits(3, 9).requires_grad_(), logits(3, 9, seed=1)
    kl_loss(student, teacher, temperature).backward()
    q, p = ((x / temperature).softmax(-1) for x in (student.detach(), teacher))
    torch.testing.assert_close(student.grad, temperature * (q - p) / 3)


def test_without_shrinking_the_gradient_at_a_high_temperature_matches_centred_logits():
    """Hinton et al., equation 4: (z - v) / V, whatever T; without the factor it would vanish."""
    student, teacher = logits(2, 6).requires_grad_(), logits(2, 6, seed=1)
    kl_loss(student, teacher, 1e4).backward()
    gap = student.detach() - teacher
    want = (gap - gap.mean(-1, keepdim=True)) / 6 / 2
    torch.testing.assert_close(student.grad, want, rtol=1e-3, atol=1e-4)


def test_a_token_the_teacher_rules_out_costs_nothing():
    teacher = torch.tensor([[0.0, 0.0, -math.inf]])
    student = torch.zeros(1, 3, requires_grad=True)
    loss = kl_loss(student, teacher)
    assert loss.item() == pytest.approx(math.log(1.5), rel=1e-6)
    loss.backward()
    torch.testing.assert_close(student.grad, torch.tensor([[-1 / 6, -1 / 6, 1 / 3]]))


def test_half_precision_logits_are_summed_in_fp32():
    student, teacher = logits(4, 4001).bfloat16(), logits(4, 4001, seed=1).bfloat16()
    got = kl_loss(student, teacher)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(kl_loss(student.double(), teacher.double()).item(), rel=1e-5)


@pytest.mark.parametrize("temperature", [0, -1, math.nan, math.inf])
def test_a_temperature_must_be_above_zero(temperature, student, teacher):
    with pytest.raises(ValueError, match=r"temperature=.*above 0"):
        kl_loss(logits(1, 2), logits(1, 2), temperature)
    with pytest.raises(ValueError, match=r"temperature=.*above 0"):
        quick(student, teacher, temperature=temperature)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((2, 3), (3, 3)), ((0, 3), (0, 3))])
def test_logits_of_two_shapes_or_none_are_refused(shapes):
    with pytest.raises(ShapeError, match="one shape"):
        kl_loss(*(torch.zeros(shape) for shape in shapes))


# --- hidden states


def test_hidden_loss_is_one_minus_the_cosine_written_out():
    a, b = [logits(2, 3, 5), logits(2, 3, 5, seed=1)], [logits(2, 3, 5, seed=2)] * 2
    total = 0.0
    for x, y in zip(a, b, strict=True):
        for u, v in zip(x.reshape(-1, 5).tolist(), y.reshape(-1, 5).tolist(), strict=True):
            dot = sum(i * j for i, j in zip(u, v, strict=True))
            total += 1 - dot / math.hypot(*u) / math.hypot(*v)
    assert hidden_loss(a, b).item() == pytest.approx(total / 12, rel=1e-12)
    assert hidden_loss(a, [3 * x for x in a]).item() == pytest.approx(0, abs=1e-12)
    assert hidden_loss(a, [-x for x in a]).item() == pytest.approx(2)


def test_hidden_states_of_unequal_number_or_width_are_refused():
    with pytest.raises(ShapeError, match="one teacher state"):
        hidden_loss([logits(2, 4)], [logits(2, 4)] * 2)
    with pytest.raises(ShapeError, match="hidden=0"):
        hidden_loss([logits(2, 4)], [logits(2, 5)])
    with pytest.raises(ShapeError):
        hidden_loss([], [])


def test_each_kept_layer_answers_for_the_gap_behind_it():
    assert counterparts([0, 1, 4], 6) == [0, 3, 5]
    assert counterparts(range(4), 4) == [0, 1, 2, 3]
    assert counterparts([2], 5) == [4]
    for kept in ([], [1, 0], [0, 0], [-1, 2], [0, 6]):
        with pytest.raises(ValueError, match="rising numbers of layers from 0 to 5"):
            counterparts(kept, 6)


def test_the_states_compared_are_what_the_next_kept_layer_reads(student, teacher):
    """With lr so small that nothing moves, the loss is hidden_loss of states found another way."""
    tokens_BT, _ = text_task(STUDY, 2, 16)(generator(0))
    deep, shallow = states_by_hand(teacher, tokens_BT), states_by_hand(student, tokens_BT)
    want = hidden_loss(shallow, [deep[2], deep[3]]).item()  # layers 0 and 3 of the teacher are kept
    with torch.no_grad():
        soft = kl_loss(student(tokens_BT), teacher(tokens_BT)).item()
    got = quick(student, teacher, 1, lr=1e-12, hidden=2.0, kept=[0, 3])
    assert got == [pytest.approx(soft + 2 * want, rel=1e-5)]


@torch.no_grad()
def states_by_hand(model, tokens_BT):
    """What each layer hands on, from models cut off behind it, their last norm taken out."""
    states = []
    for depth in range(1, model.config.L + 1):
        cut = drop_layers(model, list(range(depth, model.config.L)))
        cut.norm = torch.nn.Identity()
        states.append(cut.features(tokens_BT))
    return states


@pytest.mark.parametrize("kept", [None, [0, 1, 3]])
def test_hidden_states_need_to_know_which_layers_were_kept(kept, student, teacher):
    with pytest.raises(ValueError, match=r"kept"):
        quick(student, teacher, hidden=1.0, kept=kept)


def test_hidden_states_of_a_narrower_student_are_refused(teacher):
    narrow = keep_channels(teacher, range(20))
    with pytest.raises(ShapeError, match="20 wide and the teacher 24"):
        quick(narrow, teacher, hidden=1.0)
    assert len(quick(narrow, teacher)) == 3  # its logits are as good as any


# --- distill


@pytest.mark.parametrize("options", [
    {}, {"temperature": 3.0}, {"text": 0.4}, {"text": 1.0}, {"text": 0.4, "temperature": 2.0},
])  # fmt: skip
@pytest.mark.parametrize("rows", [5, 32, 100])
def test_the_loss_and_the_step_are_those_of_all_logits_at_once(
    options, rows, student, teacher, monkeypatch
):
    """In fp64: chunks of rows that end in the middle, just at the end, and beyond."""
    monkeypatch.setattr(module, "ROWS", rows)
    teacher, student = copy.deepcopy(teacher).double(), student.double()
    whole = copy.deepcopy(student).requires_grad_(True)

    def loss_of(model, tokens_BT, targets_BT):
        share, T = options.get("text", 0.0), options.get("temperature", 1.0)
        with torch.no_grad():
            p_BTV = (teacher(tokens_BT) / T).softmax(-1)
        z_BTV = model(tokens_BT)
        gap_BTV = p_BTV * (p_BTV.log() - (z_BTV / T).log_softmax(-1))
        hard = nnf.cross_entropy(z_BTV.flatten(0, 1), targets_BT.flatten())
        return (1 - share) * T**2 * gap_BTV.sum(-1).mean() + share * hard

    want = train(
        whole, text_task(STUDY, 2, 16), 3, lr=1e-3, warmup=1, loss_of=loss_of, progress=False
    )
    got = quick(student, teacher, lr=1e-3, warmup=1, **options)
    assert got == pytest.approx(want, rel=1e-9)
    for mine, theirs in zip(student.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-9)


def test_the_teacher_is_left_as_it_was(student, teacher):
    before = copy.deepcopy(teacher.state_dict())
    teacher.train()
    seen = []
    spy = teacher.norm.register_forward_hook(
        lambda m, i, out: seen.append((teacher.training, out.requires_grad))
    )
    try:
        quick(student, teacher, hidden=1.0, kept=[0, 3])
        assert seen and set(seen) == {(False, False)}
        assert teacher.training
    finally:
        spy.remove()
        teacher.eval()
    for name, weight in teacher.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert not any(block._forward_hooks for block in [*teacher.blocks, *student.blocks])


def test_a_student_comes_back_in_the_state_it_came(student, teacher):
    quick(student, teacher)
    assert not student.training
    assert all(p.grad is None and not p.requires_grad for p in student.parameters())
    with pytest.raises(RuntimeError, match="enough"):
        quick(student.train(), teacher, every=enough)
    assert student.training and not any(p.requires_grad for p in student.parameters())
    student.eval()
    student.blocks[0].requires_grad_(True)
    quick(student, teacher)
    assert {name for name, p in student.named_parameters() if p.requires_grad} == {
        f"blocks.0.{name}" for name, _ in student.blocks[0].named_parameters()
    }


def enough(step, loss):
    raise RuntimeError("enough")


def test_every_weight_learns_and_tied_embeddings_stay_tied(student, teacher):
    before = {name: p.clone() for name, p in student.named_parameters()}
    quick(student, teacher)
    assert student.head.weight is student.embed.weight
    assert "head.weight" not in before
    for name, p in student.named_parameters():
        assert not torch.equal(p, before[name]), name


def test_text_only_does_not_run_the_teacher(student, teacher):
    handle = teacher.embed.register_forward_hook(lambda *a: pytest.fail("the teacher ran"))
    try:
        losses = quick(student, teacher, text=1.0)
    finally:
        handle.remove()
    assert len(losses) == 3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_short_repair_wins_back_most_of_what_dropping_cost(seed, teacher):
    student = drop_layers(teacher, [1, 2])
    full, cut = (nats_per_token(model, HELD) for model in (teacher, student))
    steps = []
    losses = distill(
        student, teacher, STUDY, 60, B=8, T=32, lr=2e-3, seed=seed, progress=False,
        every=lambda step, loss: steps.append((step, loss)),
    )  # fmt: skip
    assert nats_per_token(student, HELD) < full + 0.5 * (cut - full)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert steps == list(enumerate(losses))


def test_one_seed_repeats_itself_and_another_does_not(teacher):
    runs = [quick(drop_layers(teacher, [2]), teacher, seed=seed) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_bf16_products_leave_fp32_weights_near_those_of_fp32(teacher):
    students = [drop_layers(teacher, [2]) for _ in range(2)]
    losses = [
        quick(student, teacher, 5, autocast=on)
        for student, on in zip(students, (True, False), strict=True)
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert students[0].dtype == torch.float32


def test_a_budget_ends_the_run_after_a_step(student, teacher, monkeypatch):
    """The clock is ours: each step takes a second."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def tick(step, loss):
        now[0] += 1

    assert len(quick(student, teacher, 50, budget_s=3.5, every=tick)) == 4
    assert len(quick(student, teacher, 50, budget_s=1e-9, every=tick)) == 1
    assert len(quick(student, teacher, 3, budget_s=100.0, every=tick)) == 3


@pytest.mark.parametrize("budget_s", [0, -1.0, math.nan])
def test_a_budget_must_be_above_zero(budget_s, student, teacher):
    with pytest.raises(ValueError, match="budget_s"):
        quick(student, teacher, budget_s=budget_s)


def test_a_run_within_its_budget_is_the_run_without_one(teacher):
    runs = [quick(drop_layers(teacher, [2]), teacher, 4, budget_s=b) for b in (None, 1e6)]
    assert runs[0] == runs[1]


# --- refusals


def test_two_vocabularies_are_refused(student):
    other = Transformer.random(Config(D=24, F=36, K=1, G=2, H=8, L=4, V=127, tied=True))
    with pytest.raises(ShapeError, match="128 tokens and the teacher's 127"):
        quick(student, other)


@pytest.mark.parametrize(
    "study", [STUDY[:0], STUDY[:16], STUDY[:64].view(2, 32), STUDY[:64].double()]
)
def test_no_text_or_no_tokens_are_refused(study, student, teacher):
    with pytest.raises(ShapeError, match="more than T=16 token ids"):
        quick(student, teacher, study=study)


def test_tokens_of_another_tokenizer_are_refused(student, teacher):
    with pytest.raises(ValueError, match=r"tokens 0 to 128: expected 0 to 127"):
        quick(student, teacher, study=torch.arange(129))
    with pytest.raises(ValueError, match="tokens -100"):
        quick(student, teacher, study=torch.arange(-100, 100))


@pytest.mark.parametrize("options", [{"text": -0.1}, {"text": 1.1}, {"hidden": -1.0},
                                     {"text": math.nan}, {"hidden": math.inf}])  # fmt: skip
def test_shares_outside_their_range_are_refused(options, student, teacher):
    with pytest.raises(ValueError, match="0 <= text <= 1 and hidden >= 0"):
        quick(student, teacher, **options)


def test_a_student_that_shares_weights_with_its_teacher_is_refused(teacher):
    with pytest.raises(ValueError, match="share weights"):
        quick(teacher, teacher)
    shared = copy.copy(teacher)
    with pytest.raises(ValueError, match="share weights"):
        quick(shared, teacher)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_refused(dtype, student, teacher):
    with pytest.raises(ValueError, match=r"fp32"):
        quick(student.to(dtype), teacher)


@pytest.mark.parametrize("options", [{"B": 0}, {"T": 0}, {"B": 2.0}, {"T": "16"}])
def test_batches_of_nothing_are_refused(options, student, teacher):
    with pytest.raises(ValueError, match="whole numbers, at least 1"):
        quick(student, teacher, **options)


def test_on_a_cpu_bf16_is_used_only_where_there_are_units_for_it(student, teacher, monkeypatch):
    for units in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda units=units: {"amx_bf16": units})
        default = quick(copy.deepcopy(student), teacher)
        assert default == quick(copy.deepcopy(student), teacher, autocast=units)
        assert default != quick(copy.deepcopy(student), teacher, autocast=not units)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert not module.bf16_pays(torch.device("cpu"))
    assert module.bf16_pays(torch.device("cuda", 0))


@pytest.mark.parametrize("steps", [0, -3, 2.5])
def test_steps_must_be_a_whole_number(steps, student, teacher):
    with pytest.raises(ValueError, match="at least 1"):
        quick(student, teacher, steps)


def test_a_loss_that_is_no_number_stops_before_the_weights(student, teacher):
    broken = copy.deepcopy(teacher)
    broken.norm.weight[3] = math.nan
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(FloatingPointError, match="step 0"):
        quick(student, broken)
    assert all(torch.equal(w, before[name]) for name, w in student.state_dict().items())


# --- iterative


def test_two_rounds_drop_and_repair_twice_on_one_budget(teacher):
    seen = []
    student, losses, kept = iterative(
        teacher, STUDY, 3, 2, 7, calibration=4, B=2, T=16, progress=False,
        every=lambda step, loss: seen.append(step),
    )  # fmt: skip
    assert student.config.L == 1 and len(kept) == 1 and len(losses) == 7
    assert seen == list(range(7))
    again = iterative(teacher, STUDY, 3, 2, 7, calibration=4, B=2, T=16, progress=False)
    assert again[1] == losses and again[2] == kept


def test_rounds_rank_the_student_as_it_is_and_count_in_the_teachers_layers(teacher, monkeypatch):
    """Each round drops its second layer: first the teacher's layer 1, then its layer 2."""
    ranked = []

    def second_is_least(model, tokens_BT):
        ranked.append(copy.deepcopy(model))
        return torch.tensor([5.0, 0.0, 3.0, 4.0])[: model.config.L]

    monkeypatch.setattr(module, "block_influence", second_is_least)
    options = dict(B=2, T=16, hidden=0.5, progress=False)
    student, losses, kept = iterative(teacher, STUDY, 2, 2, 5, seed=3, calibration=2, **options)
    assert kept == [0, 3]

    by_hand = drop_layers(teacher, [1])
    first = distill(by_hand, teacher, STUDY, 2, seed=3, kept=[0, 2, 3], **options)
    for mine, theirs in zip(ranked[1].parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    by_hand = drop_layers(by_hand, [1])
    assert losses == first + distill(by_hand, teacher, STUDY, 3, seed=4, kept=[0, 3], **options)
    for mine, theirs in zip(student.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_one_round_is_one_shot(teacher):
    student, losses, kept = iterative(
        teacher, STUDY, 2, 1, 3, calibration=4, B=2, T=16, progress=False
    )
    by_hand = drop_layers(teacher, [layer for layer in range(4) if layer not in kept])
    assert quick(by_hand, teacher) == losses
    for mine, theirs in zip(student.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("drop", "rounds", "steps"), [(4, 2, 8), (2, 0, 8), (2, 3, 8), (3, 3, 2)])
def test_rounds_without_layers_or_steps_are_refused(drop, rounds, steps, teacher):
    with pytest.raises(ValueError, match="one step a round"):
        iterative(teacher, STUDY, drop, rounds, steps, progress=False)


# --- the real model


@pytest.fixture(scope="module")
def reference():
    """Model, study text, held-out windows, eight layers of least influence, perplexity without."""
    from lecture_util.model.weights import load, load_tokenizer

    model = load("smollm2-135m", device="cpu")
    study_S, held_BT = english_split(load_tokenizer("smollm2-135m"))
    sample_BT = windows(study_S, 16, 128, generator())
    least = block_influence(model, sample_BT).argsort()[:8].tolist()
    cut = perplexity(drop_layers(model, least), held_BT[:16])
    return model, study_S, held_BT[:16], least, cut


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_repair_shown_in_class_lowers_held_out_perplexity(seed, reference):
    """Seen: 67 after dropping eight of thirty layers, 42 after eight steps."""
    model, study_S, held_BT, least, before = reference
    student = drop_layers(model, least)
    distill(student, model, study_S, 8, B=4, T=64, lr=2e-4, seed=seed, progress=False)
    assert perplexity(student, held_BT) < 0.8 * before


def test_a_student_larger_than_its_teacher_is_refused(teacher):
    """Otherwise swapped arguments would train the teacher."""
    with pytest.raises(ValueError, match="were the two swapped"):
        distill(teacher, drop_layers(teacher, [1]), STUDY, 1, B=1, T=8, progress=False)


def test_a_student_whose_layers_cannot_learn_is_refused(teacher):
    student = drop_layers(teacher, [1])
    student.blocks[0].down = nn.Identity()
    with pytest.raises(TypeError, match=r"blocks.0.down is a Identity, whose weights can't learn"):
        distill(student, teacher, STUDY, 1, B=1, T=8, progress=False)


@pytest.mark.parametrize("kept", [[0.5, 1.7], [False, True], []])
def test_counterparts_take_whole_numbers(kept):
    with pytest.raises(ValueError, match="rising numbers of layers"):
        counterparts(kept, 4)


@pytest.mark.parametrize("numbers", [(1.5, 1, 2), (2, 1.0, 2), (2, True, 2)])
def test_rounds_and_layers_are_whole_numbers(teacher, numbers):
    with pytest.raises(ValueError, match="layers to drop"):
        iterative(teacher, STUDY, *numbers, T=8)
