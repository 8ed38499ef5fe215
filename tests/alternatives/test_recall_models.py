import pytest
import torch

from lecture_util.alternatives.layouts import layout_of, memory_bytes
from lecture_util.alternatives.recall_models import RECALL_MODELS, W, learn_recall, recall_model
from lecture_util.model.recall import recall_batch


def test_the_four_differ_in_what_they_remember_and_little_in_size():
    models = {kind: recall_model(kind) for kind in RECALL_MODELS}
    kinds = {kind: layout_of(net).kinds for kind, net in models.items()}
    assert kinds == {"attention": "AA", "window": "ww", "linear": "ll", "window + linear": "wl"}
    sizes = [sum(p.numel() for p in net.parameters()) for net in models.values()]
    assert max(sizes) < 1.25 * min(sizes)
    grows = [
        kind for kind, net in models.items()
        if memory_bytes(layout_of(net), 200).total > memory_bytes(layout_of(net), 100).total
    ]  # fmt: skip
    assert grows == ["attention"]


def test_a_seed_gives_the_same_model_and_leaves_the_global_one_alone():
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (
        recall_model("linear", 1),
        recall_model("linear", 1),
        recall_model("linear"),
    )
    assert torch.equal(torch.rand(1), want)
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_the_window_cannot_reach_most_pairs():
    """No training could help: the last question's logits depend on 2*(W-1) tokens before it."""
    net = recall_model("window").eval()
    tokens_BT, _ = recall_batch(4, 8, 64, torch.Generator().manual_seed(0))
    changed = tokens_BT.clone()
    changed[:, : 30 - 2 * (W - 1)] = 0
    assert torch.equal(net(tokens_BT)[:, 30], net(changed)[:, 30])
    for kind in ("attention", "window + linear"):
        net = recall_model(kind).eval()
        assert not torch.equal(net(tokens_BT)[:, 30], net(changed)[:, 30])


def test_the_width_sets_the_size_of_the_linear_state_and_of_nothing_else():
    held = {
        kind: [memory_bytes(layout_of(recall_model(kind, width=w)), 99).total for w in (4, 8)]
        for kind in RECALL_MODELS
    }
    assert held["attention"][0] == held["attention"][1]
    assert held["window"][0] == held["window"][1]
    linear = [4 * (1 + w + w * w) * (64 + 1) for w in (4, 8)]  # a layer, in fp32
    assert held["linear"] == [2 * layer for layer in linear]
    assert held["window + linear"][1] - held["window + linear"][0] == linear[1] - linear[0]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="expected one of attention, window, linear, window"):
        learn_recall("mamba")


def test_a_short_run_returns_a_model_its_losses_and_a_share():
    outcome = learn_recall("linear", steps=2, num_pairs=2, progress=False)
    assert len(outcome.losses) == 2
    assert 0 <= outcome.accuracy <= 1
    assert not outcome.model.training
    assert "model" not in repr(outcome)


@pytest.mark.slow
def test_attention_recalls_window_and_linear_do_not_and_both_together_do_better():
    accuracy = {kind: learn_recall(kind, progress=False).accuracy for kind in RECALL_MODELS}
    assert accuracy["attention"] >= 0.95
    assert accuracy["window"] < 0.3
    assert accuracy["linear"] < 0.3
    assert accuracy["window + linear"] >= 0.6
