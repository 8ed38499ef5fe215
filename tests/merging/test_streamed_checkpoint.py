"""Checkpoint folders tensor by tensor: read like safetensors reads them, written like it writes."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_folders import change, copy, llama, recipe, state

from lecture_util.merging.checkpoint import (
    EMBED,
    HEAD,
    NAMES,
    Folder,
    FolderWriter,
    Spec,
    copy_beside,
)
from lecture_util.merging.job import Job
from lecture_util.model.checkpoint import WeightsError


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    llama(root / "whole", 0)
    llama(root / "shards", 0, shard="6KB")
    llama(root / "tied", 1, tied=True)
    return root


def set_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", ["whole", "shards"])
def test_a_folder_is_a_mapping_of_its_tensors(kit, name):
    folder, wanted = Folder(kit / name), state(kit / name)
    assert set(folder) == set(wanted) and len(folder) == len(wanted)
    for key, tensor in wanted.items():
        assert torch.equal(folder[key], tensor)
        assert folder.shape(key) == tensor.shape and folder.dtype(key) == tensor.dtype
    assert folder.num_layers == 3 and not folder.tied
    with pytest.raises(KeyError, match="has no tensor nothing"):
        folder["nothing"]


def test_a_tied_head_is_there_by_name(kit):
    folder = Folder(kit / "tied")
    assert folder.tied and HEAD in folder and HEAD not in state(kit / "tied")
    assert torch.equal(folder[HEAD], folder[EMBED])
    assert folder.shape(HEAD) == folder.shape(EMBED)


def test_a_tied_config_with_another_head_is_refused(kit, tmp_path):
    path = copy(kit / "tied", tmp_path / "m")
    change(path, lambda t: t.update({HEAD: t[EMBED].clone()}))
    assert torch.equal(Folder(path)[HEAD], Folder(path)[EMBED])
    change(path, lambda t: t[HEAD][3, 2].add_(1e-3))
    with pytest.raises(WeightsError, match=r"tie_word_embeddings=true but its lm_head"):
        Folder(path)


def test_what_follows_from_the_config_is_left_out(kit, tmp_path):
    path = copy(kit / "whole", tmp_path / "m")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(path, lambda t: t.update({name: torch.ones(4)}))
    assert name not in Folder(path) and EMBED in Folder(path)


def drop_config(path):
    (path / "config.json").unlink()


def spoil_config(path):
    (path / "config.json").write_text("[1")


def list_config(path):
    (path / "config.json").write_text("[1]")


def cut(path):
    file = sorted(path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-5])


def empty(path):
    sorted(path.glob("*.safetensors"))[0].write_bytes(b"")


def lose(path):
    sorted(path.glob("*.safetensors"))[1].unlink()


def promise(path):
    index = path / "model.safetensors.index.json"
    promised = json.loads(index.read_text())
    promised["weight_map"]["model.extra"] = min(promised["weight_map"].values())
    index.write_text(json.dumps(promised))


def pickled(path):
    for file in path.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")


def quantize(path):
    set_config(path, quantization_config={"bits": 4})


def bare(path):
    for file in path.glob("*.safetensors*"):
        file.unlink()


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("whole", drop_config, r"m holds no config\.json"),
        ("whole", spoil_config, r"config\.json is not JSON"),
        ("whole", list_config, r"config\.json is not an object"),
        ("whole", cut, r"model\.safetensors is damaged"),
        ("whole", empty, r"model\.safetensors is damaged"),
        ("shards", cut, r"model-0000.-of-0000.\.safetensors is damaged"),
        ("shards", lose, r"lacks the shard model-00002-of"),
        ("shards", promise, r"lacks model\.extra, which its index names"),
        ("whole", pickled, r"only pytorch_model\.bin, a pickle"),
        ("whole", bare, r"should hold model\.safetensors but holds none"),
        ("whole", quantize, r"is quantized: merge the original"),
        ("whole", shutil.rmtree, r"holds no config\.json"),
    ],
)
def test_a_checkpoint_that_is_incomplete_or_damaged_is_refused(kit, tmp_path, name, fault, words):
    path = copy(kit / name, tmp_path / "m")
    fault(path)
    with pytest.raises(WeightsError, match=words):
        Folder(path)


def test_a_shard_that_vanishes_later_is_noticed(kit, tmp_path):
    folder = Folder(copy(kit / "whole", tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="lacks the shard"):
        folder[EMBED]


def test_numbers_that_have_no_arithmetic_here_are_refused(kit, tmp_path):
    path = copy(kit / "whole", tmp_path / "m")
    change(path, lambda t: t.update({"model.norm.weight": torch.ones(16).to(torch.float8_e5m2)}))
    folder = Folder(path)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight of .* stored as F8_E5M2"):
        folder.dtype("model.norm.weight")


@pytest.mark.parametrize("layers", [..., "3", 0, None, True])
def test_a_config_that_gives_no_depth_is_refused(kit, tmp_path, layers):
    path = set_config(copy(kit / "whole", tmp_path / "m"), num_hidden_layers=layers)
    with pytest.raises(WeightsError, match="gives no num_hidden_layers"):
        _ = Folder(path).num_layers


def test_a_null_quantization_is_none(kit, tmp_path):
    Folder(set_config(copy(kit / "whole", tmp_path / "m"), quantization_config=None))


# Writing


TENSORS = {
    "matrix": torch.randn(5, 3),
    "vector": torch.randn(7).double(),
    "scalar": torch.tensor(3.5).half(),
    "nothing": torch.empty(0, 4),
    "ünï": torch.randn(2, 2, 2).bfloat16(),
    "whole": torch.arange(6).view(2, 3),
    "yes": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "transposed": torch.randn(4, 6).T,
}


def specs_of(tensors):
    return [Spec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]


def test_what_is_written_is_what_safetensors_reads(tmp_path):
    FolderWriter(tmp_path, specs_of(TENSORS)).write(iter(TENSORS.items()))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert set(read) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0  # so that the data is aligned


@pytest.mark.parametrize("dtype", NAMES)
def test_every_dtype_comes_through(tmp_path, dtype):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    FolderWriter(tmp_path, [Spec("x", (2, 2), dtype)]).write(iter([("x", tensor)]))
    read = load_file(tmp_path / "model.safetensors")["x"]
    assert read.dtype == dtype and torch.equal(read, tensor)


@pytest.mark.parametrize(("limit", "files"), [(1, 5), (40, 3), (41, 3), (80, 2), (100, 1)])
def test_a_shard_ends_before_it_grows_past_the_limit(tmp_path, limit, files):
    tensors = {f"t{i}": torch.full((5,), float(i)) for i in range(5)}  # 20 bytes each
    FolderWriter(tmp_path, specs_of(tensors), shard_bytes=limit).write(iter(tensors.items()))
    found = sorted(tmp_path.glob("*.safetensors"))
    assert len(found) == files
    index = tmp_path / "model.safetensors.index.json"
    if files == 1:
        assert not index.exists()
        return
    said = json.loads(index.read_text())
    assert said["metadata"] == {"total_size": 100} and list(said["weight_map"]) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / said["weight_map"][name])[name], tensor)
    held = [sum(t.nbytes for t in load_file(path).values()) for path in found]
    assert all(size <= max(limit, 20) for size in held) and sum(held) == 100


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_shard_of_no_size_is_refused(tmp_path, limit):
    with pytest.raises(ValueError, match=r"shard_bytes is .*above 0"):
        FolderWriter(tmp_path, [], shard_bytes=limit)


def test_only_files_that_belong_beside_weights_are_copied(tmp_path):
    (tmp_path / "a" / "tokenizer_dir").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    kept = ["tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt", "chat_template.jinja"]
    kept += ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
    for name in [*kept, "config.json", "model.safetensors", "README.md", "training_args.bin"]:
        (tmp_path / "a" / name).write_text(name)
    copy_beside(tmp_path / "a", tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(kept)
    assert (tmp_path / "b" / "vocab.txt").read_text() == "vocab.txt"


def test_a_plan_reads_no_tensor(kit, monkeypatch):
    def read(folder, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Folder, "__getitem__", read)
    job = Job(recipe("linear", [kit / "whole", kit / "shards"]))
    assert len(job.specs) == len(Folder(kit / "whole"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files")
def test_a_tensor_that_was_read_leaves_no_file_open(kit):
    def is_open():
        held = (os.path.realpath(f"/proc/self/fd/{i}") for i in os.listdir("/proc/self/fd"))
        return sum(path.startswith(str(kit)) for path in held)

    def is_mapped():
        with open("/proc/self/maps") as maps:
            return sum(str(kit) in line for line in maps)

    folder = Folder(kit / "shards")
    assert is_open() == is_mapped() == 0
    held = folder[EMBED]
    assert is_mapped() > 0
    del held
    assert is_open() == is_mapped() == 0  # so the pages that were read are given back


# Memory


PEAKS = """
import json, os, shutil, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from lecture_util.merging.merge import merge
from lecture_util.merging.recipe import parse

root = Path(sys.argv[1])
tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(1024, 1024) for i in range(4)}
(root / "0").mkdir(parents=True)
save_file(tensors, root / "0" / "model.safetensors")
del tensors
config = {"architectures": ["Layers"], "num_hidden_layers": 4, "tie_word_embeddings": True}
(root / "0" / "config.json").write_text(json.dumps(config))
for i in range(1, 6):
    (root / str(i)).mkdir()
    for name in ("model.safetensors", "config.json"):
        os.link(root / "0" / name, root / str(i) / name)

def resident(key):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(key)) / 1024

def peak(method, models):
    listed = [{"model": str(root / str(i))} for i in range(1, models + 1)]
    base = {} if method == "linear" else {"base_model": str(root / "0")}
    recipe = parse(json.dumps({"merge_method": method, "models": listed} | base))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident("VmRSS")
    merge(recipe, root / "out", progress=False)
    shutil.rmtree(root / "out")
    return resident("VmHWM") - before

peak("ties", 1)  # so that what is loaded once is loaded
print(json.dumps({m: [peak(m, n) for n in (2, 5)] for m in ("linear", "ties")}))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="resets a peak: Linux")
def test_memory_grows_by_a_tensor_a_model_not_by_a_model(tmp_path):
    """Four tensors of 4 MiB a model: mapped and own memory, from two models to five.

    A mean maps one tensor of each. TIES holds its task vector too.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path / "models")],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"},  # what is freed is given back
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for method, tensors in (("linear", 1), ("ties", 2)):
        two, five = json.loads(done.stdout)[method]
        a_model = (five - two) / 3 / 4
        assert a_model < tensors + 0.7, f"{method}: {two:.0f} MiB of two, {five:.0f} of five"
