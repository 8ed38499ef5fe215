"""What flows through a model while it runs, and text that was not seen before."""

import pytest
import torch
from tiny_model import TINY, tiny_model

from lecture_util.model.observe import observe, run
from lecture_util.model.text import english, english_split
from lecture_util.model.transformer import Transformer


def tokens(B, T, seed=0):
    return torch.randint(TINY.V, (B, T), generator=torch.Generator().manual_seed(seed))


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def kept(into):
    return lambda name, x, y: into.append((name, x.clone(), y.clone()))


def test_inputs_and_outputs_are_those_of_a_pass_by_hand(tiny):
    seen, tokens_BT = [], tokens(2, 7)
    names = ["embed", "blocks.0", "blocks.1.norm_attention", "blocks.2.down", "norm"]
    with observe(tiny, names, kept(seen)):
        out = tiny.features(tokens_BT)
    assert [name for name, _, _ in seen] == names  # in the order of the pass
    inputs, outputs = ({name: pair[i] for name, *pair in seen} for i in (0, 1))
    assert torch.equal(inputs["embed"], tokens_BT)
    assert torch.equal(inputs["blocks.0"], tiny.embed(tokens_BT))
    assert torch.equal(inputs["blocks.1.norm_attention"], outputs["blocks.0"])
    assert torch.equal(outputs["norm"], out)
    down = tiny.blocks[2].down
    assert torch.equal(outputs["blocks.2.down"], down(inputs["blocks.2.down"]))
    assert inputs["blocks.2.down"].shape == (2, 7, TINY.F)


def test_one_call_for_each_call_of_a_module(tiny):
    seen = []
    with observe(tiny, "norm", kept(seen)):  # one name needs no list
        for T in (1, 3):
            tiny(tokens(1, T))
    assert [x.shape for _, x, _ in seen] == [(1, 1, TINY.D), (1, 3, TINY.D)]


def test_a_name_that_is_there_twice_is_seen_once(tiny):
    seen = []
    with observe(tiny, ["norm", "norm"], kept(seen)):
        tiny(tokens(1, 3))
    assert len(seen) == 1


def test_observing_changes_nothing(tiny):
    want = tiny(tokens(2, 5))
    with observe(tiny, [name for name, _ in tiny.named_modules() if name], lambda *seen: None):
        assert torch.equal(tiny(tokens(2, 5)), want)
    assert torch.equal(tiny(tokens(2, 5)), want)


def test_hooks_are_gone_afterwards_whatever_happens(tiny):
    with observe(tiny, ["norm", "head"], lambda *seen: None):
        assert hooks(tiny) == 2
    assert hooks(tiny) == 0

    def fail(name, x, y):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), observe(tiny, ["norm"], fail):
        tiny(tokens(1, 2))
    assert hooks(tiny) == 0
    with pytest.raises(ValueError), observe(tiny, ["norm", "nothing"], fail):
        pass
    assert hooks(tiny) == 0


def test_observers_can_be_nested(tiny):
    inner, outer = [], []
    with observe(tiny, ["norm"], kept(outer)):
        with observe(tiny, ["norm"], kept(inner)):
            tiny(tokens(1, 2))
        tiny(tokens(1, 2))
    assert (len(inner), len(outer)) == (1, 2)


def test_what_is_seen_holds_no_graph():
    torch.manual_seed(0)
    model, seen = Transformer(TINY), []
    with observe(model, ["blocks.0.qkv"], lambda name, x, y: seen.extend((x, y))):
        model(tokens(1, 4)).sum().backward()
    assert len(seen) == 2 and not any(part.requires_grad for part in seen)
    assert model.blocks[0].qkv.weight.grad is not None


@pytest.mark.parametrize(
    ("name", "hint"),
    [("down", "blocks.0.down"), ("blocks.9.down", "embed"), ("model.norm", "embed")],
)
def test_a_name_that_is_no_module_is_refused_with_names_that_are(tiny, name, hint):
    with pytest.raises(ValueError, match=hint), observe(tiny, [name], lambda *seen: None):
        pass


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_run_sends_every_row_once_and_in_order(tiny, rows):
    seen, tokens_BT = [], tokens(5, 6)
    with observe(tiny, ["embed"], kept(seen)):
        run(tiny, tokens_BT, rows)
    assert torch.equal(torch.cat([x for _, x, _ in seen]), tokens_BT)
    assert max(len(x) for _, x, _ in seen) <= rows


def test_run_leaves_out_the_head_and_the_graph():
    torch.manual_seed(0)
    model, seen = Transformer(TINY), []
    with observe(model, ["norm", "head"], kept(seen)):
        run(model, tokens(1, 3))
    assert [name for name, _, _ in seen] == ["norm"]
    assert torch.is_grad_enabled()

    class Grads(torch.nn.Module):  # a model without `features`
        def forward(self, tokens_BT):
            seen.append(torch.is_grad_enabled())
            return tokens_BT

    run(Grads(), tokens(1, 3))
    assert seen[-1] is False


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (4,), (1, 2, 3)])
def test_nothing_to_send_is_refused(shape):
    with pytest.raises(ValueError, match=r"at least one.*text\.windows"):
        run(tiny_model(), torch.zeros(shape, dtype=torch.long))


@pytest.fixture(scope="module")
def split(tokenizer):
    return english_split(tokenizer)


def test_held_windows_share_no_16_tokens_with_the_study(split):
    study_S, held_BT = split
    assert held_BT.dtype == study_S.dtype == torch.int64 and held_BT.shape[1] == 128
    assert len(held_BT) > 64  # the tables need as many

    def spelled(tokens):  # one character a token, so that Python's own search does the work
        return "".join(chr(0x10000 + t) for t in tokens)

    study = spelled(study_S.tolist())
    assert spelled(study_S[50:66].tolist()) in study
    for window in held_BT.tolist():
        assert not any(spelled(window[i : i + 16]) in study for i in range(0, 113))


def test_the_split_is_of_the_text_each_paragraph_once(split, tokenizer):
    study_S, held_BT = split
    text = english()
    paragraphs = [
        " ".join(part.split()) for part in tokenizer.decode(study_S.tolist()).split("\n\n")
    ]
    whole = paragraphs[:-1]  # the last is cut off
    assert len(set(whole)) == len(whole) > 500
    source = " ".join(text.split())
    assert all(part in source for part in whole)
    for window in held_BT[::10].tolist():
        inside = tokenizer.decode(window[2:-2]).strip("\ufffd \n").split("\n\n")
        assert all(" ".join(part.split()) in source for part in inside)


def test_the_split_repeats_itself(split, tokenizer):
    again = english_split(tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(again, split, strict=True))


@pytest.mark.parametrize(
    ("T", "repeat", "message"),
    [
        (1, 1, "T=1"), (128, 0, "run=0"), (16, 17, "run=17"),
        (100_000, 16, "no window of T=100000"), (128, 1, "runs of 16"),
    ],
)  # fmt: skip
def test_a_split_that_cannot_be_is_refused(tokenizer, T, repeat, message):
    with pytest.raises(ValueError, match=message):
        english_split(tokenizer, T, repeat)
