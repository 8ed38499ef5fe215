"""The training loop, the recall task and perplexity, against sums written out by hand."""

import math

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

from lecture_util.model.config import Config
from lecture_util.model.recall import recall_accuracy, recall_batch, recall_task
from lecture_util.model.text import english, english_bytes, nats_per_token, perplexity, text_task
from lecture_util.model.text import windows as text_windows
from lecture_util.model.train import IGNORE, train
from lecture_util.model.transformer import Transformer

SMALL = Config(D=32, F=48, K=1, G=1, H=32, L=2, V=20, max_context=64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def fresh(seed=0):
    torch.manual_seed(seed)
    return Transformer(SMALL)


def test_training_lowers_the_loss_and_repeats_itself():
    runs = [train(fresh(), recall_task(2, 20, 16), 60, progress=False) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 60
    assert sum(runs[0][-10:]) < 0.9 * sum(runs[0][:10])


def test_training_leaves_the_mode_and_the_gradient_switch_as_they_were():
    model = fresh().eval()
    with torch.no_grad():
        train(model, recall_task(2, 20, 4), 2, progress=False)
        assert not torch.is_grad_enabled()
    assert not model.training
    with pytest.raises(RuntimeError, match="stop"):
        train(model.eval(), recall_task(2, 20, 4), 2, progress=False, every=stop)
    assert torch.is_grad_enabled() and not model.training


def stop(step, loss):
    raise RuntimeError("stop")


def test_only_scored_targets_count():
    tokens = torch.tensor([[1, 2, 3, 4]])
    scored = torch.tensor([[IGNORE, 7, IGNORE, IGNORE]])
    model = fresh()
    want = nnf.cross_entropy(model(tokens)[0, 1:2], torch.tensor([7])).item()
    assert train(model, lambda g: (tokens, scored), 1, progress=False) == [pytest.approx(want)]


def test_the_learning_rate_rises_stays_and_falls():
    rates, weight = [], nn.Embedding(4, 4)
    before = weight.weight.detach().clone()

    def note(step, loss):  # AdamW's first steps move every weight by the learning rate
        rates.append((weight.weight.detach() - before).abs().max().item())
        before.copy_(weight.weight.detach())

    batch = torch.tensor([[0, 1, 2, 3]])
    train(
        weight, lambda g: (batch, batch), 40, lr=0.1, warmup=4, weight_decay=0,
        progress=False, every=note,
    )  # fmt: skip
    assert rates[0] == pytest.approx(0.025, rel=1e-3)
    assert rates[-1] < 0.03 < 0.05 < rates[15]


@pytest.mark.parametrize("steps", [0, -1, 1.5, None])
def test_steps_must_be_a_whole_number(steps):
    with pytest.raises(ValueError, match="at least 1"):
        train(fresh(), recall_task(2, 20, 4), steps, progress=False)


@pytest.mark.parametrize(("num_pairs", "V", "gap"), [(1, 4, 0), (3, 8, 5), (8, 64, 0), (31, 64, 1)])
def test_a_recall_batch_asks_for_every_pair_once(num_pairs, V, gap):
    tokens_BT, targets_BT = recall_batch(7, num_pairs, V, generator(), gap)
    assert tokens_BT.shape == targets_BT.shape == (7, 4 * num_pairs + gap)
    for tokens, targets in zip(tokens_BT.tolist(), targets_BT.tolist(), strict=True):
        first, second = tokens[: 2 * num_pairs], tokens[2 * num_pairs + gap :]
        pairs = dict(zip(first[::2], first[1::2], strict=True))
        assert len(pairs) == num_pairs, "a key twice"
        assert dict(zip(second[::2], second[1::2], strict=True)) == pairs
        assert tokens[2 * num_pairs : 2 * num_pairs + gap] == [0] * gap
        asked = {t: target for t, target in enumerate(targets) if target != IGNORE}
        assert len(asked) == num_pairs
        assert all(target == pairs[tokens[t]] for t, target in asked.items())
        assert all(t >= 2 * num_pairs + gap for t in asked)
        assert all(0 < key < V // 2 <= value < V for key, value in pairs.items())


@pytest.mark.parametrize("num_pairs", [0, 32])
def test_too_many_pairs_are_refused(num_pairs):
    with pytest.raises(ValueError, match="1 to 31 pairs"):
        recall_batch(1, num_pairs, 64, generator())


class Oracle(nn.Module):
    """Looks the key up; wrong for every third token if `faulty`."""

    def __init__(self, faulty=False):
        super().__init__()
        self.faulty = faulty

    def forward(self, tokens_BT):
        logits = torch.zeros(*tokens_BT.shape, 64)
        for b, row in enumerate(tokens_BT.tolist()):
            for t, key in enumerate(row):
                if key in row[:t]:
                    logits[b, t, row[row.index(key) + 1]] = 1
                if self.faulty and key % 3 == 0:
                    logits[b, t, 0] = 2
        return logits


def test_recall_accuracy_is_the_share_of_right_answers():
    task = recall_task(5, 64, 8)
    assert recall_accuracy(Oracle(), task) == 1
    keys = [t for b in range(8) for t in recall_seed_batches(task)[b]]
    want = sum(key % 3 != 0 for key in keys) / len(keys)
    assert recall_accuracy(Oracle(faulty=True), task) == pytest.approx(want)


def recall_seed_batches(task):
    """The keys asked for in the eight batches that recall_accuracy draws."""
    g = generator(1234)
    batches = [task(g) for _ in range(8)]
    return [tokens[targets != IGNORE].tolist() for tokens, targets in batches]


def test_the_text_is_bytes_below_128():
    tokens = english_bytes()
    assert len(tokens) == len(english()) > 300_000
    assert 0 < int(tokens.min()) and int(tokens.max()) < 128
    assert bytes(tokens[:500].tolist()).decode() == english()[:500]


def test_windows_are_pieces_of_the_text_from_first_to_last():
    tokens = torch.arange(10)
    drawn = text_windows(tokens, 500, 7, generator())
    assert (drawn[:, 1:] - drawn[:, :-1] == 1).all()
    assert {*drawn[:, 0].tolist()} == {0, 1, 2, 3}
    assert text_windows(tokens, 2, 10, generator()).tolist() == [list(range(10))] * 2
    with pytest.raises(ValueError, match="T=11 but the text has 10"):
        text_windows(tokens, 1, 11, generator())


def test_the_text_task_predicts_the_next_token():
    tokens, targets = text_task(torch.arange(50), 3, 8)(generator())
    assert tokens.shape == targets.shape == (3, 8)
    assert (targets == tokens + 1).all()


def test_perplexity_is_the_mean_of_what_each_token_costs():
    model, tokens = fresh().double().eval(), torch.randint(0, 20, (5, 9), generator=generator())
    nats = []
    with torch.no_grad():
        for row in tokens:
            for t in range(1, 9):
                chances = model(row[None, :t])[0, -1].softmax(-1)
                nats.append(-math.log(chances[row[t]]))
    for rows in (1, 2, 5, 9):
        assert nats_per_token(model, tokens, rows) == pytest.approx(sum(nats) / 40, rel=1e-6)
    assert perplexity(model, tokens) == pytest.approx(math.exp(sum(nats) / 40), rel=1e-5)


def test_one_token_a_row_predicts_nothing():
    with pytest.raises(ValueError, match="T at least 2"):
        perplexity(fresh(), torch.tensor([[1], [2]]))
    with pytest.raises(ValueError, match="B at least 1"):
        perplexity(fresh(), torch.zeros(0, 5, dtype=torch.long))


def test_the_reference_model_reads_its_text_about_as_well_as_was_seen(request):
    """About 12.7 on the first 1,024 tokens of the text; another Python words it a bit otherwise."""
    from lecture_util.model.weights import load, load_tokenizer

    model, tokenizer = load("smollm2-135m", device="cpu"), load_tokenizer("smollm2-135m")
    tokens = tokenizer.encode(english()[:8_000], add_special_tokens=False)[:1024]
    assert perplexity(model, torch.tensor([tokens])) == pytest.approx(12.7, rel=0.15)


def test_a_loss_that_is_no_number_stops_before_the_weights():
    model = fresh()
    before = [p.detach().clone() for p in model.parameters()]
    nothing = (torch.tensor([[1, 2]]), torch.tensor([[IGNORE, IGNORE]]))
    with pytest.raises(FloatingPointError, match="step 0"):
        train(model, lambda g: nothing, 3, progress=False)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
