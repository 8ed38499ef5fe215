"""The student: the reference model's layers and an adapter, and as good as its record says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lecture_util.merging.adapters import Adapter, Factors, hf_views
from lecture_util.model.checkpoint import WeightsError, hf_state
from lecture_util.model.config import Config
from lecture_util.model.text import english_split, perplexity
from lecture_util.model.transformer import Transformer
from lecture_util.model.weights import load, load_tokenizer
from lecture_util.pruning.importance import without
from lecture_util.together.student import ASSET, load_student, save_student, student_facts

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "student.json").read_text())
SMALL = Config(D=24, F=40, K=2, G=3, H=4, L=5, V=71, tied=True, max_context=64)
DROPPED = [3, 1]


@pytest.fixture(scope="module")
def model():
    return load("smollm2-135m", device="cpu")


@pytest.fixture(scope="module")
def student(model):
    return load_student(model)


@pytest.fixture
def small():
    return Transformer.random(SMALL, seed=3, dtype=torch.float64)


@pytest.fixture
def adapter():
    """Factors for some weights of the three layers that are left, of unlike shapes and one rank."""
    names = ("model.layers.0.self_attn.k_proj", "model.layers.2.mlp.down_proj")
    views = hf_views(Transformer.random(replace(SMALL, L=3), seed=0))
    generator = torch.Generator().manual_seed(5)
    return Adapter(
        {
            f"{name}.weight": Factors(
                torch.randn(2, views[f"{name}.weight"].shape[1], generator=generator),
                torch.randn(len(views[f"{name}.weight"]), 2, generator=generator),
            )
            for name in names
        },
        scale=0.5,
    )


@pytest.fixture
def file(small, adapter, tmp_path):
    return save_student(small, adapter, {"dropped": DROPPED}, tmp_path / "student.safetensors")


def by_hand(base: dict, factors: dict, scale: float, dropped, L: int) -> dict:
    """The student's tensors in fp64: renumbered, and the factors' outer products added in turn."""
    kept = [layer for layer in range(L) if layer not in dropped]
    made = {}
    for name, tensor in base.items():
        head, _, rest = name.partition("model.layers.")
        if rest:
            layer, _, rest = rest.partition(".")
            if int(layer) not in kept:
                continue
            name = f"{head}model.layers.{kept.index(int(layer))}.{rest}"
        made[name] = tensor.double().clone()
    for name in {key.rpartition(".")[0] for key in factors} & made.keys():
        down, up = factors[f"{name}.down"].double(), factors[f"{name}.up"].double()
        for r in range(len(down)):
            made[name] += scale * up[:, r, None] * down[r]
    return made


def test_a_student_is_the_layers_left_and_the_adapter_added(small, file):
    made = by_hand(hf_state(small), load_file(file), 0.5, DROPPED, SMALL.L)
    got = hf_state(load_student(small, file))
    assert got.keys() == made.keys()
    for name in made:
        torch.testing.assert_close(got[name], made[name], rtol=0, atol=1e-6)  # fp32 products
    whole = hf_state(small)
    kept = "model.layers.2.mlp.down_proj.weight"
    assert (got[kept] - whole["model.layers.4.mlp.down_proj.weight"]).abs().max() > 0.1


def test_the_shipped_student_is_what_its_file_says(model, student):
    facts = student_facts()
    assert student.config == replace(model.config, L=model.config.L - len(facts["dropped"]))
    factors = load_file(ASSET)
    some = ("embed_tokens", "layers.2.", "layers.18.", "layers.29.")  # before, between, after gaps
    base = {name: t for name, t in hf_state(model).items() if any(part in name for part in some)}
    made = by_hand(base, factors, 2.0, facts["dropped"], model.config.L)
    got = hf_state(student)
    assert len(made) == 1 + 3 * 9
    for name in made:
        torch.testing.assert_close(got[name].double(), made[name], rtol=1e-6, atol=1e-6)
    changed = {key.rpartition(".")[0] for key in factors}
    assert changed == {name for name in got if name.endswith("_proj.weight")}


def test_loading_leaves_the_base_as_it_was(small, file):
    before = {name: tensor.clone() for name, tensor in hf_state(small).items()}
    student = load_student(small, file)
    with torch.no_grad():
        for weight in student.parameters():
            weight.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in hf_state(small).items())


def test_the_student_is_far_better_than_the_cut_and_no_better_than_the_base(model, student):
    held_BT = english_split(load_tokenizer("smollm2-135m"))[1][:3]
    base = perplexity(model, held_BT)
    cut = perplexity(without(model, student_facts()["dropped"]), held_BT)
    repaired = perplexity(student, held_BT)
    assert base < repaired < cut
    assert repaired - base < 0.5 * (cut - base)


def test_the_record_is_of_the_file_that_is_here(student):
    facts = student_facts()
    assert RECORD["dropped"] == facts["dropped"]
    assert RECORD["chosen_step"] == facts["steps"]
    assert RECORD["adapter"]["file_bytes"] == ASSET.stat().st_size <= 3_500_000
    base, cut, repaired = (RECORD[name] for name in ("base", "cut", "student"))
    assert repaired["layers"] == student.config.L
    tied = student.head.weight is student.embed.weight
    held = sum(weight.numel() for weight in student.parameters())
    assert tied and repaired["parameters"] == held
    assert base["perplexity"] < repaired["perplexity"] < cut["perplexity"]
    assert cut["greedy_agreement"] < repaired["greedy_agreement"] < base["greedy_agreement"]
    best = min(RECORD["validation"][1:], key=lambda entry: sum(entry["nats"].values()))
    assert best["step"] == facts["steps"]


def test_a_student_takes_the_dtype_of_its_base(small, file):
    student = load_student(small.to(torch.bfloat16), file)
    assert student.dtype == torch.bfloat16


def test_another_model_is_refused(small, file):
    with pytest.raises(WeightsError, match=r"was cut from a model of .*'L': 5.* has .*'L': 4"):
        load_student(Transformer.random(replace(SMALL, L=4), seed=3), file)
    with pytest.raises(WeightsError, match="whole reference model"):
        load_student(load_student(small, file), file)  # a student of a student
    with pytest.raises(WeightsError, match=r"other embeddings .*: pass the reference model"):
        load_student(Transformer.random(SMALL, seed=4), file)
    broken = Transformer.random(SMALL, seed=3)
    broken.embed.weight.data[0, 0] = float("nan")
    with pytest.raises(WeightsError, match="other embeddings"):
        load_student(broken, file)
    with pytest.raises(TypeError, match=r"model is a str: expected weights\.load"):
        load_student("smollm2-135m", file)


def test_a_missing_file_names_its_remedy(small, tmp_path):
    with pytest.raises(WeightsError, match=r"no student at .*none.*train_student"):
        load_student(small, tmp_path / "none.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(small, file, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(WeightsError, match=r"no student, or damaged .*train_student"):
        load_student(small, file)


def test_a_file_of_another_kind_is_refused(small, file, tmp_path):
    with pytest.raises(WeightsError, match="no student"):
        load_student(small, ASSET.with_name("adapter_facts.safetensors"))
    tensors = load_file(file)
    save_file(tensors, tmp_path / "x.safetensors", {"facts": "{]"})
    with pytest.raises(WeightsError, match="no student"):
        load_student(small, tmp_path / "x.safetensors")


def test_saving_leaves_one_file_that_reads_back(small, adapter, tmp_path):
    path = tmp_path / "student.safetensors"
    path.write_text("an older one")
    assert save_student(small, adapter, {"dropped": DROPPED, "steps": 7}, path) == path
    assert [each.name for each in tmp_path.iterdir()] == ["student.safetensors"]
    assert student_facts(path)["steps"] == 7
    again = load_file(path)
    for name, factors in adapter.factors.items():
        assert torch.equal(again[f"{name}.down"], factors.down_rD.bfloat16())
        assert torch.equal(again[f"{name}.up"], factors.up_Fr.bfloat16())
