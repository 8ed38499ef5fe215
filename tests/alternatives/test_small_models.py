"""The two trained models that ship, and the text they were trained and are tested on."""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch

from lecture_util.alternatives.denoise import denoise
from lecture_util.alternatives.diffusion import MaskedDiffusion, hide, masked_loss
from lecture_util.alternatives.small_models import (
    ASSETS,
    KINDS,
    SHARED,
    WINDOW,
    encode,
    load_small,
    save_small,
    split_text,
    text_of,
    untrained,
)
from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.text import nats_per_token

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "diffusion.json"


@pytest.fixture(scope="module")
def text():
    return split_text()


def test_held_out_text_is_not_quoted_in_the_training_text(text):
    train_S, held_BT = text
    whole = bytes(train_S.tolist())
    assert held_BT.shape[0] > 300 and held_BT.shape[1] == WINDOW
    for row in held_BT[::20].tolist():
        assert not any(bytes(row[i : i + SHARED]) in whole for i in range(WINDOW - SHARED + 1))


def test_text_and_tokens_round_trip_and_holes_show():
    assert text_of(encode("a b(c)")) == "a b(c)"
    assert text_of(torch.tensor([97, 10, 128, 7, 98])) == "a ▁▁b"
    assert encode("é").tolist() == [ord("?")]


def test_the_twins_differ_in_the_mask_only():
    sizes = {kind: sum(p.numel() for p in untrained(kind).parameters()) for kind in KINDS}
    assert sizes["diffusion"] - sizes["autoregressive"] == 2 * 128  # its row in embed and head
    assert untrained("diffusion").mask_id == 128


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back_to_half_precision(kind, tmp_path):
    torch.manual_seed(1)
    model = untrained(kind)
    save_small(model, kind, tmp_path)
    back = load_small(kind, tmp_path)
    assert type(back) is KINDS[kind] and not back.training
    for old, new in zip(model.parameters(), back.parameters(), strict=True):
        assert new.dtype == torch.float32 and not new.requires_grad
        torch.testing.assert_close(new, old.detach(), rtol=2**-11, atol=2**-24)


def test_what_is_missing_or_broken_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"kind='gpt'.*autoregressive, diffusion"):
        load_small("gpt")
    with pytest.raises(WeightsError, match=r"diffusion\.safetensors: run `python benchmarks"):
        load_small("diffusion", tmp_path)
    save_small(untrained("autoregressive"), "autoregressive", tmp_path)
    (tmp_path / "autoregressive.safetensors").rename(tmp_path / "diffusion.safetensors")
    with pytest.raises(WeightsError, match="does not hold this model"):
        load_small("diffusion", tmp_path)
    (tmp_path / "diffusion.safetensors").write_bytes(b"not tensors")
    with pytest.raises(WeightsError, match="does not hold this model"):
        load_small("diffusion", tmp_path)


def test_what_ships_is_small():
    sizes = [(ASSETS / f"{kind}.safetensors").stat().st_size for kind in KINDS]
    assert sum(sizes) <= 3e6


def unigram_nats(train_S, held_BT):
    """What knowing only how frequent each byte is would cost."""
    counts = train_S.bincount(minlength=128) + 1.0
    return -(counts / counts.sum()).log()[held_BT].mean().item()


def test_what_ships_has_learned_more_than_frequencies(text):
    train_S, held_BT = text
    blind = unigram_nats(train_S, held_BT)
    assert nats_per_token(load_small("autoregressive"), held_BT[:100]) < 0.8 * blind
    model, g = load_small("diffusion"), torch.Generator().manual_seed(0)
    B = len(held_BT)
    noisy, targets, t_B = hide(held_BT, torch.arange(1, B + 1) / B, model.mask_id, g)
    assert masked_loss(model, noisy, targets, t_B) < 0.9 * blind


def test_the_record_is_of_what_ships(text):
    train_S, held_BT = text
    record = json.loads(RECORD.read_text())
    if record["text"]["sha256"] != hashlib.sha256(bytes(train_S.tolist())).hexdigest():
        pytest.skip("another Python's text: its figures differ a little")
    bits = nats_per_token(load_small("autoregressive"), held_BT) / math.log(2)
    assert bits == pytest.approx(record["bits_per_byte"]["autoregressive"]["bits"], abs=1e-3)
    start = (WINDOW - 8) // 2
    model = load_small("diffusion")
    assert isinstance(model, MaskedDiffusion)
    covered = held_BT.clone()
    covered[:, start : start + 8] = model.mask_id
    (*_, last) = denoise(model, covered, 0, 2)
    right = (last.tokens_BT == held_BT).float()[:, start : start + 8].mean().item()
    (row,) = (
        row
        for row in record["infilling"]
        if row["passes"] == 2 and row["way"] == "diffusion, both sides"
    )
    assert right == pytest.approx(row["right"], abs=0.005)
