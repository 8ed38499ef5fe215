"""Whatever goes wrong: the reason in one line, and nothing where the result would have been."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from tiny_folders import change, copy, ours, recipe, sliced, state, tokenizer

from lecture_util.merging import checkpoint
from lecture_util.merging.checkpoint import EMBED
from lecture_util.merging.merge import main, merge
from lecture_util.merging.methods import METHODS
from lecture_util.merging.recipe import RecipeError, parse
from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.shapes import ShapeError, TensorMismatch

NORM, HEAD = "model.norm.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "a", "b")):
        ours(root / name, seed)
    ours(root / "tied", 3, tied=True)
    ours(root / "wide", 4, F=32)
    ours(root / "deep", 5, L=4)
    ours(root / "spoken", 6, V=12)
    ours(root / "heads", 7, H=4, K=2, G=2)
    ours(root / "qwen", 8, qkv_bias=True)
    return root


@pytest.fixture
def bad(kit, tmp_path):
    return copy(kit / "b", tmp_path / "inputs" / "bad")


def configure(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def nothing_left(tmp_path):
    """Where results go; after the test there must be nothing."""
    folder = tmp_path / "results"
    folder.mkdir()
    yield folder / "out"
    assert list(folder.iterdir()) == []


def fails(plan, out, error, words):
    with pytest.raises(error, match=words) as caught:
        merge(plan, out, progress=False)
    return str(caught.value)


# Models that do not fit together


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        ("wide", ShapeError, r"mlp\.down_proj\.weight is \(16, 24\) in .*a, \(16, 32\) in .*wide"),
        ("deep", RecipeError, r"differ in layers \(3 in .*a, 4 in .*deep\).*slices"),
        ("spoken", ShapeError, r"embed_tokens\.weight is \(11, 16\) in .*tokenizer_source"),
        ("heads", RecipeError, r"num_attention_heads is 4 in .*heads but 2 in .*a"),
        ("qwen", RecipeError, r"qwen is a Qwen2ForCausalLM but .*a a LlamaForCausalLM"),
    ],
)
def test_models_that_differ_are_refused_by_name(kit, nothing_left, other, error, words):
    fails(recipe("linear", [kit / "a", kit / other]), nothing_left, error, words)


def test_shapes_that_differ_in_folders_of_one_name_are_told_apart(kit, tmp_path, nothing_left):
    models = [copy(kit / name, tmp_path / name / "final") for name in ("a", "wide")]
    fails(recipe("linear", models), nothing_left, ShapeError, "in .*a/final, .* in .*wide/final")


def test_a_base_of_another_depth_is_refused_though_it_is_not_listed(kit, nothing_left):
    plan = recipe("task_arithmetic", [kit / "a", kit / "b"], kit / "deep")
    fails(plan, nothing_left, RecipeError, r"differ in layers \(3 in .*4 in .*deep")


@pytest.mark.parametrize("name", [NORM, UP, HEAD, EMBED])
@pytest.mark.parametrize("place", ["first", "last", "base"])
def test_a_tensor_missing_in_one_model_is_named(kit, bad, nothing_left, name, place):
    change(bad, lambda tensors: tensors.pop(name))
    plan = {
        "first": recipe("linear", [bad, kit / "a"]),
        "last": recipe("linear", [kit / "a", bad]),
        "base": recipe("task_arithmetic", [kit / "a", kit / "tied"], bad),
    }[place]
    if name == UP:  # seen in the one model: its other layers have it
        fails(plan, nothing_left, WeightsError, f"{bad} lacks {name}, which other layers have")
        return
    said = fails(plan, nothing_left, KeyError, "merge models of one architecture")
    assert name in said and f"{bad} lacks" in said


def test_a_tensor_of_one_model_only_is_named(kit, bad, nothing_left):
    change(bad, lambda t: t.update({"model.layers.2.self_attn.q_norm.weight": torch.ones(8)}))
    for models in ([bad, kit / "a"], [kit / "a", bad]):
        words = r"bad holds model\.layers\.N\.self_attn\.q_norm\.weight, which .*a lacks"
        fails(recipe("linear", models), nothing_left, KeyError, words)


def test_tensors_may_be_missing_from_all_layers(tmp_path):
    models = [ours(tmp_path / str(seed), seed) for seed in (0, 1)]
    for path in models:
        for layer in range(3):
            name = f"model.layers.{layer}.post_attention_layernorm.weight"
            change(path, lambda t, name=name: t.pop(name))
    merged = merge(recipe("linear", models), tmp_path / "out", progress=False)
    assert set(state(merged)) == set(state(models[0]))


def test_a_tensor_missing_in_the_same_layer_of_all_is_named(tmp_path, nothing_left):
    models = [ours(tmp_path / "in" / str(seed), seed) for seed in (0, 1)]
    for path in models:
        change(path, lambda t: t.pop(UP))
    fails(recipe("linear", models), nothing_left, WeightsError, f"0 lacks {UP}, .*incomplete")
    types = ["full_attention", "sliding_attention", "full_attention"]  # may differ in tensors
    for path in models:
        configure(path, layer_types=types)
    merge(recipe("linear", models), nothing_left.parent.parent / "types", progress=False)
    for path in models:
        configure(path, layer_types=["full_attention"] * 3)
    fails(recipe("linear", models), nothing_left, WeightsError, f"0 lacks {UP}, .*incomplete")
    for path in models:
        configure(path, mlp_only_layers=[1])  # a mixture of experts, uneven by its config
    merge(recipe("linear", models), nothing_left.parent.parent / "moe", progress=False)


@pytest.mark.parametrize(
    ("depth", "words"),
    [
        (5, r"0 lacks layer 3: its config\.json says 5 layers, its files hold 3"),
        (2, r"0 holds layer 2 \(\..*says 2 layers: correct num_hidden_layers"),
        (None, r"0/config\.json gives no num_hidden_layers"),
    ],
)
def test_layers_that_the_config_does_not_count_are_refused(tmp_path, nothing_left, depth, words):
    models = [
        configure(ours(tmp_path / "in" / str(seed), seed), num_hidden_layers=depth)
        for seed in (0, 1)
    ]
    fails(recipe("linear", models), nothing_left, WeightsError, words)


def test_other_layouts_are_refused(tmp_path, nothing_left):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("model.layers.", "transformer.h.")] = tensors.pop(name)

    gpt2 = change(ours(tmp_path / "in" / "gpt2", 0), rename)
    configure(gpt2, architectures=["GPT2LMHeadModel"])
    words = r"gpt2 is a GPT2LMHeadModel with lm_head\.weight: only causal .*model\.layers\.0"
    fails(recipe("linear", [gpt2]), nothing_left, WeightsError, words)
    scorer = ours(tmp_path / "in" / "scorer", 0)
    configure(scorer, architectures=["LlamaForSequenceClassification"])
    words = "scorer is a LlamaForSequenceClassification .*only causal language models"
    fails(recipe("linear", [scorer]), nothing_left, WeightsError, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000.0 in .*but 10000.0 in"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_type is yarn in"),
        ({"rope_parameters": None, "rope_theta": 2e4}, "rope_theta is 20000.0 in"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_type is lin",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is gelu in .*other but silu in .*a: such models"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001 in"),
        ({"sliding_window": 8}, "sliding_window is 8 in .*but None in"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked"]}, r"layer_types differ: .*layer 2"),
    ],
)
@pytest.mark.parametrize("place", ["model", "base"])
def test_models_that_compute_differently_are_refused(
    kit, tmp_path, nothing_left, place, changes, words
):
    other = configure(copy(kit / "b", tmp_path / "other"), **changes)
    plan = recipe("linear", [kit / "a", other])
    if place == "base":
        plan = recipe("task_arithmetic", [other], kit / "a")
        if "layer_types" in changes:  # of a base that is not listed
            plan = recipe("task_arithmetic", [kit / "a"], other)
    fails(plan, nothing_left, RecipeError, words)


def test_layers_of_two_types_do_not_become_one(kit, tmp_path, nothing_left):
    types = ["full_attention", "sliding_attention", "full_attention"]
    model = configure(copy(kit / "a", tmp_path / "m"), layer_types=types)
    plan = sliced("linear", [[(model, 0, 1), (model, 1, 2)]])
    fails(
        plan, nothing_left, RecipeError, "layer_types differ: full_attention in layer 0 .*layer 1"
    )
    merge(sliced("linear", [[(model, 0, 1), (model, 2, 3)]]), tmp_path / "out", progress=False)


def test_configs_that_say_one_thing_in_two_ways_agree(kit, tmp_path):
    """As written before and since transformers 5."""
    old = {"rope_parameters": None, "rope_theta": 10_000, "rope_scaling": None}
    old |= {"sliding_window": 4096, "use_sliding_window": False, "layer_types": None}
    other = configure(copy(kit / "b", tmp_path / "other"), **old)
    listed = configure(copy(kit / "b", tmp_path / "listed"), layer_types=["full_attention"] * 3)
    plan = recipe("linear", [kit / "a", other, listed])
    merge(plan, tmp_path / "out", progress=False)


def test_what_is_no_checkpoint_is_called_by_its_name(kit, tmp_path, nothing_left):
    adapter, gguf = tmp_path / "adapter", tmp_path / "gguf"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    gguf.mkdir()
    (gguf / "model-q4.gguf").write_bytes(b"GGUF")
    for path, words in [
        (adapter, "adapter is an adapter: merge it into its base first"),
        (gguf, "gguf is GGUF, made for llama.cpp"),
        (gguf / "model-q4.gguf", "model-q4.gguf is GGUF"),
        (kit / "none", "no model .*none.*: looked in .*, which holds a, b, base, deep"),
        (tmp_path / "x" / "y", "no model .*y': looked in .*x, which does not exist"),
    ]:
        fails(recipe("linear", [kit / "a", path]), nothing_left, WeightsError, words)


def test_a_model_without_any_head_is_refused(kit, tmp_path, nothing_left):
    models = [copy(kit / name, tmp_path / "in" / name) for name in ("a", "b")]
    for path in models:
        change(path, lambda t: t.pop(HEAD))
    fails(recipe("linear", models), nothing_left, WeightsError, f"no {HEAD}, and is not tied")


def test_whole_numbers_that_differ_are_named(kit, tmp_path, nothing_left):
    models = [copy(kit / name, tmp_path / "in" / name) for name in ("a", "b")]
    for number, path in enumerate(models):
        change(path, lambda t, n=number: t.update({"model.steps": torch.tensor([n])}))
    fails(recipe("linear", models), nothing_left, ValueError, r"model\.steps holds whole numbers")


def test_floats_beside_whole_numbers_are_named(kit, bad, nothing_left):
    change(bad, lambda t: t.update({UP: t[UP].to(torch.int8)}))
    words = r"layers\.1\.mlp\.up_proj\.weight is torch\.int8"
    fails(recipe("linear", [kit / "a", bad]), nothing_left, TensorMismatch, words)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties", "passthrough"])
def test_nan_is_named_with_its_model(kit, bad, nothing_left, method, value):
    def spoil(tensors):
        tensors[UP][3, 5] = value

    change(bad, spoil)
    base = kit / "base" if "t" in method[:1] or "dare" in method else None
    given = {"density": 0.5} if base else {}
    models = [bad] if method == "passthrough" else [kit / "a", bad]
    plan = recipe(method, models, base, parameters=given)
    words = r"model\.layers\.1\.mlp\.up_proj\.weight of .*bad holds NaN or infinity"
    fails(plan, nothing_left, ValueError, words)


def test_what_grows_too_large_for_its_dtype_is_named(kit, nothing_left):
    plan = recipe(
        "linear", [(kit / "a", {"weight": 1e6})], parameters={"normalize": False}, dtype="float16"
    )
    fails(plan, nothing_left, ValueError, f"{EMBED} is too large for torch.float16: .*bfloat16")


def test_what_is_too_large_for_fp32_is_not_told_to_choose_it(kit, bad, nothing_left):
    change(bad, lambda tensors: tensors[EMBED].mul_(1e3))
    plan = recipe("linear", [(bad, {"weight": 3e38})], parameters={"normalize": False})
    said = fails(plan, nothing_left, ValueError, "too large for torch.float32: look at the recipe")
    assert "choose" not in said


# Checkpoints that are damaged


def cut(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def lose_config(path):
    (path / "config.json").unlink()


def quantize(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 8}}))


def pickle(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (cut, "bad/model.safetensors is damaged"),
        (lose_config, "bad exists but holds no config.json"),
        (quantize, "bad is quantized"),
        (pickle, "bad should hold model.safetensors but holds only pytorch_model.bin"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_written(
    kit, bad, nothing_left, monkeypatch, fault, words
):
    fault(bad)
    monkeypatch.setattr("lecture_util.merging.merge.new_folder", None)  # would be called
    fails(recipe("linear", [kit / "a", bad]), nothing_left, WeightsError, words)


def test_a_file_that_vanishes_in_mid_merge_is_named_as_such(kit, bad, nothing_left, monkeypatch):
    read = checkpoint.Folder.__getitem__

    def vanish(folder, name):
        if name == UP:
            (bad / "model.safetensors").unlink(missing_ok=True)
        return read(folder, name)

    monkeypatch.setattr(checkpoint.Folder, "__getitem__", vanish)
    plan = recipe("linear", [kit / "a", bad])
    said = fails(plan, nothing_left, WeightsError, "bad lacks the shard")
    assert "free some space" not in said


def test_a_tokenizer_that_does_not_fit_is_refused(kit, bad, nothing_left, monkeypatch):
    a = tokenizer(copy(kit / "a", bad.parent / "a"), {"x": 0})
    tokenizer(bad, {"x": 0, "y": 11})
    monkeypatch.setattr("lecture_util.merging.merge.new_folder", None)
    plan = recipe("linear", [a, bad], tokenizer_source="union")
    fails(plan, nothing_left, WeightsError, r"bad has 11 rows, but its tokenizer numbers up to 11")
    (a / "tokenizer.json").unlink()
    fails(plan, nothing_left, WeightsError, r"a holds no tokenizer\.json")


# Recipes that ask for what is not there


def test_what_a_recipe_asks_of_its_models_is_checked(kit, nothing_left):
    base, a, b = (kit / name for name in ("base", "a", "b"))
    for plan, words in [
        (recipe("ties", [a, b]), "ties needs a base model"),
        (recipe("slerp", [a, b], base, parameters={"t": 0.5}), "got 2 models .*exactly 1"),
        (recipe("slerp", [a], base), "slerp needs 't'"),
        (recipe("model_stock", [a], base), "got 1 models beside the base: expected at least 2"),
        (recipe("passthrough", [a, b]), "passthrough got 2 models: expected exactly 1"),
        (recipe("ties", [a, a], base), "a is listed twice"),
        (recipe("linear", [a, b], base), "linear has no use for base_model"),
        (
            recipe("dare_linear", [a, (b, {"density": 1})], base),
            r"needs 'density', and none is given for .*/a: .*parameters.*\(for model\.embed_tokens",
        ),
        (
            recipe("della", [a, (b, {"density": 0.02})], base, parameters={"density": 0.5}),
            r"/b: density=0\.02 with epsilon=0\.07 .*\(for model\.embed_tokens",
        ),
        (recipe("linear", [a, (b, {"weight": 1e300})]), r"weight is 1e\+300.*\(for model\.embed"),
        (
            recipe("linear", [a, b], parameters={"weight": [{"filter": "mpl", "value": 2}]}),
            "weight has the filter 'mpl', which is part of no tensor's name",
        ),
        (
            recipe("linear", [(a, {"weight": {"filter": "layers.3.", "value": 2}}), b]),
            r"filter 'layers\.3\.'",
        ),
        (recipe("ties", [a], base, parameters={"density": 1.5}), "density is 1.5.*between 0 and 1"),
        (recipe("slerp", [a], base, parameters={"t": -0.5}), "t is -0.5.*between 0 and 1"),
        (recipe("ties", [a], base, parameters={"normalize": 1}), "normalize is 1.0.*true or false"),
        (recipe("ties", [a], base, parameters={"lambda": True}), "lambda is True.*number"),
        (sliced("passthrough", [[(a, 1, 4)]]), r"layer_range \[1, 4\] of .*a: it has 3 layers"),
        (sliced("passthrough", [[(a, 7, 9)]]), r"\[7, 9\].*at most \[2, 3\]"),
        (sliced("ties", [[(a, 0, 3)]], base_model=base), "list .*base in it"),
    ]:
        fails(plan, nothing_left, RecipeError, words)


def test_weights_that_sum_to_nothing_are_refused(kit, nothing_left):
    plan = recipe("linear", [(kit / "a", {"weight": 1}), (kit / "b", {"weight": -1})])
    fails(plan, nothing_left, ValueError, "sum to 0")


def test_a_result_that_exists_is_left_alone(kit, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    plan = recipe("linear", [kit / "a", kit / "b"])
    with pytest.raises(FileExistsError, match="out exists: choose another name"):
        merge(plan, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "mine").read_text() == "precious"


# Interrupted, and full


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, RuntimeError])
def test_stopped_at_any_tensor_nothing_is_left(kit, nothing_left, monkeypatch, error):
    def stop(folder, name):
        if name == UP:
            assert list(nothing_left.parent.glob("out.partial-*/model.safetensors"))
            raise error("stop")
        return read(folder, name)

    read = checkpoint.Folder.__getitem__
    monkeypatch.setattr(checkpoint.Folder, "__getitem__", stop)
    fails(recipe("linear", [kit / "a", kit / "b"]), nothing_left, error, "stop")


def test_a_full_disk_leaves_nothing(kit, nothing_left):
    """A limit on the size of files stands in for it: the write fails alike."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        words = r"writing .*out failed \(.*\): free some space there"
        fails(recipe("linear", [kit / "a", kit / "b"]), nothing_left, WeightsError, words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("late", ["copy_beside", "add_tokens", "json.dumps"])
def test_a_failure_after_the_weights_leaves_nothing(kit, tmp_path, nothing_left, monkeypatch, late):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    a = tokenizer(copy(kit / "a", tmp_path / "a"), {"x": 0})
    b = tokenizer(copy(kit / "b", tmp_path / "b"), {"y": 0})
    plan = recipe("linear", [a, b], tokenizer_source="union")
    monkeypatch.setattr(f"lecture_util.merging.merge.{late}", full)
    fails(plan, nothing_left, WeightsError, "No space left on device.*free some space")


def test_what_was_made_meanwhile_is_left_alone(kit, nothing_left, monkeypatch):
    def meanwhile(*_):
        nothing_left.mkdir()
        (nothing_left / "theirs").write_text("precious")

    monkeypatch.setattr("lecture_util.merging.merge.copy_beside", meanwhile)
    words = "out exists now: another run made it"
    said = fails(recipe("linear", [kit / "a", kit / "b"]), nothing_left, FileExistsError, words)
    assert "space" not in said and (nothing_left / "theirs").read_text() == "precious"
    assert [path.name for path in nothing_left.parent.iterdir()] == ["out"]
    shutil.rmtree(nothing_left)


def test_a_place_under_a_file_is_no_lack_of_space(kit, tmp_path):
    (tmp_path / "file").write_text("x")
    plan = recipe("linear", [kit / "a", kit / "b"])
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "x" / "out"):
        with pytest.raises(
            WeightsError, match=r"writing .*out failed .*: name another place"
        ) as it:
            merge(plan, out, progress=False)
        assert "space" not in str(it.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_parents_that_were_made_for_it_go_too(kit, nothing_left, monkeypatch, error):
    def stop(folder, name):
        if name == NORM and busy:
            (nothing_left / "kept").mkdir()
        if name == NORM:
            raise error("stop")
        return read(folder, name)

    read, busy = checkpoint.Folder.__getitem__, False
    monkeypatch.setattr(checkpoint.Folder, "__getitem__", stop)
    plan = recipe("linear", [kit / "a", kit / "b"])
    fails(plan, nothing_left / "x" / "y", (error, WeightsError), "stop")
    assert not nothing_left.exists()
    busy = True
    fails(plan, nothing_left / "x" / "y", (error, WeightsError), "stop")
    assert [path.name for path in nothing_left.iterdir()] == ["kept"]
    shutil.rmtree(nothing_left)


# The command line


SLOW = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv.pop(1) == "nohup" else signal.SIG_DFL)
from lecture_util.merging import checkpoint
read = checkpoint.Folder.__getitem__
def slowly(folder, name):
    if "layers.1" in name:
        print("in mid merge", flush=True)
        sys.stdin.readline()
    return read(folder, name)
checkpoint.Folder.__getitem__ = slowly
from lecture_util.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}


@pytest.fixture
def written(kit, tmp_path):
    """Write a recipe to a file."""

    def write(text):
        path = tmp_path / "recipe.yml"
        path.write_text(text if isinstance(text, str) else text.text, encoding="utf-8")
        return str(path)

    return write


def test_a_signal_in_mid_merge_leaves_nothing(kit, written, nothing_left):
    path, place = written(recipe("linear", [kit / "a", kit / "b"])), nothing_left.parent
    children = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        command = [sys.executable, "-c", SLOW, "", "merge", path, str(place / number.name)]
        children[number] = subprocess.Popen(command, **PIPES)
    try:
        for number, child in children.items():
            assert child.stdout.readline() == "in mid merge\n"
            assert list(place.glob(f"{number.name}.partial-*/model.safetensors"))
            child.send_signal(number)
            said = child.communicate(timeout=60)[1]
            assert child.returncode == 128 + number, said
            assert said.endswith("merge: stopped; nothing was written\n"), said
            assert "Traceback" not in said and not list(place.glob(f"{number.name}*"))
    finally:
        for child in children.values():
            child.kill()
            child.communicate()


def test_under_nohup_a_merge_goes_on(kit, written, tmp_path):
    path, out = written(recipe("linear", [kit / "a", kit / "b"])), tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, "nohup", "merge", path, str(out)], **PIPES
    )
    try:
        assert child.stdout.readline() == "in mid merge\n"
        child.send_signal(signal.SIGHUP)
        assert child.communicate("\n" * 1000, timeout=60)[0].endswith(f"into {out}\n")
        assert child.returncode == 0 and (out / "config.json").is_file()
    finally:
        child.kill()
        child.communicate()


LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LINEAR.replace("linear", "liner"), "did you mean 'linear'"),
        (LINEAR.replace("linear", "DARE_TIES"), "did you mean 'dare_ties'"),
        (LINEAR + "modles: []\n", "did you mean 'models'"),
        (LINEAR + "parameters: {wight: 1}\n", "did you mean 'weight'"),
        (LINEAR + "models: [", "the recipe is not YAML in line"),
        (LINEAR + "slices: []", "either models or slices"),
        (LINEAR + 'dtype: "a\\nb"', "dtype is"),
        ("", "the recipe is empty"),
        ("models: [{model: a}]", "no merge_method"),
        (
            "merge_method: linear\nmodels: [{model: nobody/none-such-model}]",
            "nobody/none-such-model",
        ),
        (
            "merge_method: linear\nmodels: [{model: 'odd name/with/slashes'}]",
            "odd name/with/slashes",
        ),
        ("merge_method: linear\nmodels: [{model: a/none}]", "/a, which holds no folders"),
        ("merge_method: linear\nmodels: [{model: 'none/'}]", "none': looked in "),
        (
            "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1e300}}]",
            "weight is 1e+300",
        ),
        (LINEAR + "dtype: float16\ndtype: float32", "gives 'dtype' twice, again in line 4"),
        ('merge_method: linear\nmodels: [{model: "nul\\0"}]', "nul"),
        ("merge_method: slerp\nmodels: [{model: a}, {model: b}]", "slerp needs a base model"),
        (
            'merge_method: linear\nslices: [{sources: [{model: "x\\ny"}]}]',
            "layer_range of x y is None",
        ),
        ("merge_method: linear\nmodels: [{model: a}, {model: gone}]", "gone lacks lm_head.weight"),
        (LINEAR.replace("linear", "ties") + "base_model: broken", "NaN"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    kit, tmp_path, nothing_left, capsys, text, words
):
    for name in ("a", "b"):
        copy(kit / name, tmp_path / name)
    change(copy(kit / "a", tmp_path / "gone"), lambda tensors: tensors.pop(HEAD))
    change(copy(kit / "a", tmp_path / "broken"), lambda tensors: tensors[UP].fill_(torch.nan))
    (tmp_path / "recipe.yml").write_text(text)
    assert main([str(tmp_path / "recipe.yml"), str(nothing_left)]) == 1
    said = capsys.readouterr()
    line = said.err.split("\r")[-1]  # behind the progress bar, if it got that far
    assert line.startswith("merge: ") and line.endswith("\n") and line.count("\n") == 1
    assert words in line and said.out == "" and "Traceback" not in said.err


def test_errors_of_torch_end_in_one_line_too(kit, written, nothing_left, monkeypatch, capsys):
    def fail(folder, name):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(checkpoint.Folder, "__getitem__", fail)
    assert main([written(recipe("linear", [kit / "a"])), str(nothing_left)]) == 1
    assert capsys.readouterr().err.endswith("merge: out of memory\n")


def test_the_help_lists_the_methods_and_a_recipe_that_is_one(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {name:18}{how.about}\n" in said for name, how in METHODS.items())
    example = textwrap.dedent(said.split("a recipe:\n")[1])
    assert len(example.splitlines()) == 6 and parse(example).merge_method == "ties"


def test_the_command_refuses_files_that_are_no_recipes(tmp_path, nothing_left, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    for path, words in [
        (tmp_path, "is a folder"),
        (tmp_path / "none.yml", "No such file"),
        (tmp_path / "binary", "is not text"),
    ]:
        assert main([str(path), str(nothing_left)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("merge: ") and words in said and said.count("\n") == 1


def test_the_command_in_a_process_of_its_own_ends_with_1(written, nothing_left):
    command = [sys.executable, "-m", "lecture_util", "merge", written("a: b"), str(nothing_left)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("merge: a recipe has no key 'a'") and done.stderr.count("\n") == 1


def test_the_command_leaves_signals_as_they_were(kit, written, tmp_path):
    path = written(recipe("linear", [kit / "a", kit / "b"]))
    before = signal.getsignal(signal.SIGTERM)
    assert main([path, str(tmp_path / "one")]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main([path, str(tmp_path / "two")])))
    thread.start()
    thread.join(timeout=60)
    assert codes == [0] and (tmp_path / "two" / "config.json").is_file()
