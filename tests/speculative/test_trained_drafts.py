"""Draft heads from a file: they come back as they were saved, and only for their own model."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from small_models import PROMPT, SMALL, small_eagle, small_medusa, small_model

from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.generate import generate
from lecture_util.speculative import trained
from lecture_util.speculative.medusa import MedusaDrafter, best_tree
from lecture_util.speculative.speculate import generate_speculative
from lecture_util.speculative.target import Reader

MODEL = small_model()
IDS = torch.tensor([0, 3, 5, 17, 20])
ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1]]
FACTS = {"D": SMALL.D, "V": SMALL.V, "L": SMALL.L}


def write(path, module, **facts):
    """As training does: weights in bf16, the vocabulary beside them, facts in the header."""
    tensors = {name: weight.bfloat16() for name, weight in module.state_dict().items()}
    tensors["ids"] = IDS.to(torch.int32)
    save_file(tensors, path, {"facts": json.dumps({"config": FACTS} | facts)})
    return path


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with both heads, in place of the course's own."""
    write(tmp_path / "medusa.safetensors", small_medusa(MODEL, heads=2), accuracy=ACCURACY)
    write(tmp_path / "eagle.safetensors", small_eagle(MODEL))
    monkeypatch.setattr(trained, "ASSETS", tmp_path)
    return tmp_path


def assert_read_from(module, saved):
    read, saved = module.state_dict(), saved.state_dict()
    assert read.keys() == saved.keys()
    assert all(torch.equal(read[name], saved[name].bfloat16().to(MODEL.dtype)) for name in read)


def test_heads_come_back_as_they_were_saved(files):
    heads, vocabulary, accuracy_KR = trained.load_medusa(MODEL)
    assert_read_from(heads, small_medusa(MODEL, heads=2))
    assert vocabulary.ids_U.tolist() == IDS.tolist()
    assert torch.equal(vocabulary.weight_UD, MODEL.head.weight[IDS])
    assert torch.equal(accuracy_KR, torch.tensor(ACCURACY))
    head, vocabulary = trained.load_eagle(MODEL)
    assert_read_from(head, small_eagle(MODEL))
    assert vocabulary.ids_U.tolist() == IDS.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_take_the_dtype_of_their_model_and_want_no_gradient(files, dtype):
    model = small_model().to(dtype)
    for module in (trained.load_medusa(model)[0], trained.load_eagle(model)[0]):
        assert {weight.dtype for weight in module.parameters()} == {dtype}
        assert not any(weight.requires_grad for weight in module.parameters())
        assert not module.training


def test_a_file_can_be_named(files, tmp_path):
    path = write(tmp_path / "mine.safetensors", small_eagle(MODEL, seed=5))
    assert_read_from(trained.load_eagle(MODEL, path)[0], small_eagle(MODEL, seed=5))


def test_the_drafters_have_the_shape_that_was_asked_for(files):
    reader = Reader(MODEL, 32)
    drafter = trained.medusa_drafter(MODEL, size=5)(reader)
    assert isinstance(drafter, MedusaDrafter) and drafter.reader is reader
    assert set(drafter.tree) == set(best_tree(torch.tensor(ACCURACY), 5))
    drafter = trained.eagle_drafter(MODEL, depth=2, width=3, size=6)(reader)
    assert (drafter.depth, drafter.width, drafter.size) == (2, 3, 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_they_generate_what_the_model_generates(files, dtype):
    model = small_model().to(dtype)
    for new in (trained.medusa_drafter(model), trained.eagle_drafter(model)):
        assert generate_speculative(model, new, PROMPT, 12) == generate(model, [PROMPT], 12)[0]


@pytest.mark.parametrize("other", [{"D": 36}, {"V": 24}, {"L": 2}])
def test_another_model_is_refused(files, other):
    model = small_model(config=replace(SMALL, **other))
    for load in (trained.load_medusa, trained.load_eagle, trained.medusa_drafter):
        with pytest.raises(WeightsError, match=r"was trained on a model of .* but this one has"):
            load(model)


def test_a_missing_file_says_how_to_make_it(files):
    (files / "medusa.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no draft head at .*medusa.*train_drafts"):
        trained.load_medusa(MODEL)


def test_a_file_that_holds_something_else_is_refused(files, tmp_path):
    text = tmp_path / "text.safetensors"
    text.write_text("no tensors")
    bare = tmp_path / "bare.safetensors"
    save_file({"ids": IDS}, bare)
    unlisted = tmp_path / "unlisted.safetensors"
    save_file(small_eagle(MODEL).state_dict(), unlisted, {"facts": json.dumps({"config": FACTS})})
    for path in (text, bare):
        with pytest.raises(WeightsError, match="is no draft head"):
            trained.load_eagle(MODEL, path)
    with pytest.raises(WeightsError, match="holds no EagleHead"):
        trained.load_eagle(MODEL, unlisted)
    with pytest.raises(WeightsError, match="holds no EagleHead"):
        trained.load_eagle(MODEL, files / "medusa.safetensors")
    with pytest.raises(WeightsError, match="holds no MedusaHeads"):
        trained.load_medusa(MODEL, files / "eagle.safetensors")
