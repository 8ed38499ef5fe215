"""Folders in, folder out: `merge` writes what the methods say, and transformers loads it."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from tiny_folders import change, copy, llama, qwen, recipe, sliced, state, tokenizer

from lecture_util.merging.checkpoint import Folder
from lecture_util.merging.merge import Job, main, merge
from lecture_util.merging.methods import METHODS
from lecture_util.merging.plan import merge_states
from lecture_util.merging.recipe import RecipeError, read_recipe
from lecture_util.model.checkpoint import load_folder, save_folder
from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
DENSE = {"density": 0.6}
PARAMETERS = {
    "slerp": {"t": 0.3},
    "ties": DENSE,
    "dare_linear": DENSE,
    "dare_ties": DENSE,
    "breadcrumbs": DENSE | {"gamma": 0.1},
    "breadcrumbs_ties": DENSE | {"gamma": 0.1},
    "della": DENSE | {"epsilon": 0.2},
    "della_linear": DENSE | {"epsilon": 0.2},
}


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """Folders that no test changes: three Llamas, sharded, and others by name."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "a", "b")):
        llama(root / name, seed, shard="6KB")
    llama(root / "tied_a", 3, tied=True)
    llama(root / "tied_b", 4, tied=True)
    llama(root / "half_a", 5, dtype=torch.bfloat16)
    llama(root / "half_b", 6, dtype=torch.float16)
    llama(root / "deep", 7, num_hidden_layers=4)
    qwen(root / "qwen_a", 8)
    qwen(root / "qwen_b", 9)
    return root


def assert_same(got, wanted):
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def loaded(folder):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model.eval()


@pytest.mark.parametrize("convention", ["paper", "mergekit"])
@pytest.mark.parametrize("method", METHODS)
def test_a_folder_is_merged_like_the_state_dicts(kit, tmp_path, method, convention):
    most = METHODS[method].takes[1]
    names = ["a", "b"][: most or 2]
    base = "base" if METHODS[method].base else None
    given = PARAMETERS.get(method, {})
    job = recipe(
        method,
        [kit / name for name in names],
        base and kit / base,
        parameters=given,
        convention=convention,
        seed=3,
    )
    out = merge(job, tmp_path / "out", progress=False)
    wanted = merge_states(
        method,
        [state(kit / name) for name in names],
        base and state(kit / base),
        convention=convention,
        seed=3,
        **given,
    )
    assert_same(state(out), wanted)


@pytest.mark.parametrize(("one", "two"), [("a", "b"), ("tied_a", "tied_b"), ("qwen_a", "qwen_b")])
def test_transformers_generates_with_it_and_so_do_we(kit, tmp_path, one, two):
    out = merge(recipe("linear", [kit / one, kit / two]), tmp_path / "out", progress=False)
    model = loaded(out)
    prompt = torch.tensor([[2, 3, 5]])
    assert model.generate(prompt, max_new_tokens=4, do_sample=False).shape[1] > 3
    ours = load_folder(out)(prompt)
    torch.testing.assert_close(ours, model(prompt).logits, atol=1e-5, rtol=1e-4)


def test_folders_of_our_own_are_merged(tmp_path):
    config = Config(D=16, F=24, K=1, G=2, H=8, L=2, V=11, qkv_bias=True)
    for seed in (0, 1):
        save_folder(Transformer.random(config, seed=seed), tmp_path / f"m{seed}")
    models = [tmp_path / "m0", tmp_path / "m1"]
    out = merge(recipe("linear", models), tmp_path / "out", progress=False)
    assert_same(state(out), merge_states("linear", [state(each) for each in models]))
    load_folder(out)


# Files


def test_shards_have_an_index_that_is_right(kit, tmp_path):
    plan = recipe("linear", [kit / "a", kit / "b"])
    out = merge(plan, tmp_path / "out", progress=False, shard_bytes=6_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    held = {}
    for file in files:
        with safe_open(out / file, framework="pt") as shard:
            held |= dict.fromkeys(shard.keys(), file)
        tensors = sum(t.nbytes for n, t in state(out).items() if held.get(n) == file)
        assert tensors <= 6_000
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state(out).values())
    loaded(out)
    whole = merge(plan, tmp_path / "whole", progress=False)
    assert [path.name for path in whole.glob("*.safetensors*")] == ["model.safetensors"]
    assert_same(state(whole), state(out))


@pytest.mark.parametrize("method", ["dare_ties", "della"])
def test_one_seed_gives_the_same_bytes_and_another_others(kit, tmp_path, method):
    def bytes_of(name, seed):
        plan = recipe(
            method, [kit / "a", kit / "b"], kit / "base", parameters={"density": 0.5}, seed=seed
        )
        out = merge(plan, tmp_path / name, progress=False)
        return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".yml"}

    first = bytes_of("one", 1)
    assert first == bytes_of("two", 1)
    assert first["model.safetensors"] != bytes_of("three", 2)["model.safetensors"]


def test_tokenizer_generation_settings_and_recipe_lie_beside(kit, tmp_path):
    a = tokenizer(copy(kit / "a", tmp_path / "a"), {"x": 0, "y": 1})
    (a / "chat_template.jinja").write_text("{{ messages }}")
    (a / "tokenizer_cache").mkdir()
    plan = recipe("linear", [a, kit / "b"])
    out = merge(plan, tmp_path / "out", progress=False)
    names = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
    assert all((out / name).read_bytes() == (a / name).read_bytes() for name in names)
    assert (out / "merge_recipe.yml").read_text().endswith("\n" + plan.text)


def test_the_recipe_beside_tells_what_its_text_does_not(kit, tmp_path, monkeypatch):
    """Run from the command line, with models beside the recipe: seed, convention, where from."""
    copy(kit / "a", tmp_path / "work" / "a")
    tokenizer(copy(kit / "b", tmp_path / "work" / "b\nc"), {"x": 0})
    (tmp_path / "work" / "r.yml").write_text("merge_method: linear\nmodels: [{model: a}]\nseed: 1")
    monkeypatch.chdir(tmp_path / "work")
    assert main(["r.yml", "out", "--seed", "7", "--convention", "mergekit"]) == 0
    said = (tmp_path / "work" / "out" / "merge_recipe.yml").read_text().splitlines()
    assert said[1:4] == ["# seed: 7", "# convention: mergekit", f'# "a": "{tmp_path}/work/a"']
    assert said[4] == "merge_method: linear"
    plan = recipe("linear", [tmp_path / "work" / "b\nc"], convention={"rescale": "l1"})
    again = merge(plan, tmp_path / "out", progress=False) / "merge_recipe.yml"
    assert read_recipe(again) == dataclasses.replace(plan, text=again.read_text())
    assert '# convention: {"rescale": "l1", "trim_scope": "model"' in again.read_text()


def test_progress_is_shown_unless_unwanted(kit, tmp_path, capsys):
    plan = recipe("ties", [kit / "a"], kit / "base")
    merge(plan, tmp_path / "loud")
    shown = capsys.readouterr().err
    assert "merging" in shown and "counting magnitudes" in shown
    merge(plan, tmp_path / "quiet", progress=False)
    assert capsys.readouterr() == ("", "")


# Dtypes


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("base", ["base", "half_a", "half_b"])
def test_a_tensor_is_cast_once(kit, tmp_path, base, dtype):
    names = ["half_b", "a"]
    plan = recipe("task_arithmetic", [kit / n for n in names], kit / base, dtype=dtype)
    out = merge(plan, tmp_path / "out", progress=False)
    first = state(kit / base)
    target = getattr(torch, dtype) if dtype else first[EMBED].dtype
    wide = {name: tensor.float() for name, tensor in first.items()}
    exact = merge_states("task_arithmetic", [state(kit / n) for n in names], wide)
    assert_same(state(out), {name: tensor.to(target) for name, tensor in exact.items()})
    config = json.loads((out / "config.json").read_text())
    assert getattr(torch, config["dtype"]) == target and "torch_dtype" not in config


def test_out_dtype_goes_before_dtype(kit, tmp_path):
    plan = recipe("linear", [kit / "a", kit / "b"], dtype="float32", out_dtype="float16")
    assert state(merge(plan, tmp_path / "out", progress=False))[EMBED].dtype == torch.float16


def test_whole_numbers_stay_whatever_the_dtype(kit, tmp_path):
    def add(tensors):
        tensors["model.position_ids"] = torch.arange(5)

    models = [change(llama(tmp_path / str(seed), seed), add) for seed in (0, 1)]
    out = merge(recipe("linear", models, dtype="bfloat16"), tmp_path / "out", progress=False)
    assert torch.equal(state(out)["model.position_ids"], torch.arange(5))


# Tied heads


def test_all_tied_gives_tied(kit, tmp_path):
    out = merge(recipe("linear", [kit / "tied_a", kit / "tied_b"]), tmp_path / "out")
    assert (
        HEAD not in state(out)
        and json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    )
    model = loaded(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("order", [("tied_a", "a"), ("a", "tied_a")])
def test_tied_and_untied_give_untied(kit, tmp_path, order):
    out = merge(recipe("linear", [kit / name for name in order]), tmp_path / "out", progress=False)
    tied, free = state(kit / "tied_a"), state(kit / "a")
    merged = state(out)
    torch.testing.assert_close(merged[HEAD], (tied[EMBED] + free[HEAD]) / 2)
    torch.testing.assert_close(merged[EMBED], (tied[EMBED] + free[EMBED]) / 2)
    assert not torch.equal(merged[HEAD], merged[EMBED])
    assert torch.equal(loaded(out).lm_head.weight, merged[HEAD])


def test_a_stored_head_that_is_the_embedding_is_fine_when_tied(kit, tmp_path):
    path = copy(kit / "tied_a", tmp_path / "stored")
    change(path, lambda tensors: tensors.update({HEAD: tensors[EMBED].clone()}))
    out = merge(recipe("linear", [path, kit / "tied_b"]), tmp_path / "out", progress=False)
    assert HEAD not in state(out)


def test_a_config_that_does_not_say_is_tied_if_no_head_is_stored(kit, tmp_path):
    for name, tied in (("tied_a", True), ("a", False)):
        path = copy(kit / name, tmp_path / name)
        config = json.loads((path / "config.json").read_text())
        config.pop("tie_word_embeddings", None)
        (path / "config.json").write_text(json.dumps(config))
        assert Folder(path).tied is tied and HEAD in Folder(path)


# Slices


def test_layers_are_stacked_anew_and_renumbered(kit, tmp_path):
    plan = sliced("passthrough", [[(kit / "a", 0, 3)], [(kit / "deep", 1, 4)]])
    out = merge(plan, tmp_path / "out", progress=False)
    first, second, merged = state(kit / "a"), state(kit / "deep"), state(out)
    for new, (source, old) in enumerate(
        [(first, i) for i in (0, 1, 2)] + [(second, i) for i in (1, 2, 3)]
    ):
        stem = f"model.layers.{new}."
        mine = {name.removeprefix(stem): t for name, t in merged.items() if name.startswith(stem)}
        theirs = {
            name.removeprefix(f"model.layers.{old}."): tensor
            for name, tensor in source.items()
            if name.startswith(f"model.layers.{old}.")
        }
        assert_same(mine, theirs)
    assert torch.equal(merged[EMBED], first[EMBED])
    assert torch.equal(merged[HEAD], second[HEAD])
    assert torch.equal(merged["model.norm.weight"], second["model.norm.weight"])
    model = loaded(out)
    assert model.config.num_hidden_layers == len(model.model.layers) == 6
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(6))
    model.generate(torch.tensor([[2]]), max_new_tokens=3, do_sample=False)


def test_lists_with_an_entry_a_layer_are_stacked_too(tmp_path):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    extra = dict(
        layer_types=kinds, use_sliding_window=True, sliding_window=4, eos_token_id=[1, 2, 3]
    )
    a, b = (qwen(tmp_path / str(seed), seed, **extra) for seed in (0, 1))
    plan = sliced("passthrough", [[(a, 0, 2)], [(b, 1, 2)], [(b, 1, 3)]])
    config = json.loads((merge(plan, tmp_path / "out", progress=False) / "config.json").read_text())
    assert config["layer_types"] == [kinds[i] for i in (0, 1, 1, 1, 2)]
    assert config["eos_token_id"] == [1, 2, 3]
    assert loaded(tmp_path / "out").config.num_hidden_layers == 5
    other = json.loads((b / "config.json").read_text())
    del other["layer_types"]
    (b / "config.json").write_text(json.dumps(other))
    with pytest.raises(RecipeError, match="layer_types"):
        merge(plan, tmp_path / "again", progress=False)


def test_two_tied_models_stacked_are_untied(kit, tmp_path):
    plan = sliced("passthrough", [[(kit / "tied_a", 0, 2)], [(kit / "tied_b", 2, 3)]])
    out = merge(plan, tmp_path / "out", progress=False)
    assert torch.equal(state(out)[EMBED], state(kit / "tied_a")[EMBED])
    assert torch.equal(state(out)[HEAD], state(kit / "tied_b")[EMBED])
    assert not loaded(out).config.tie_word_embeddings
    for choice in ("mergekit", {"two_ends": "tied"}):  # as the tool: the last one's is lost
        plan = plan.replaced(convention=choice)
        theirs = merge(plan, tmp_path / str(choice), progress=False)
        assert torch.equal(state(theirs)[EMBED], state(kit / "tied_a")[EMBED])
        assert HEAD not in state(theirs) and loaded(theirs).config.tie_word_embeddings
    mixed = sliced("passthrough", [[(kit / "tied_a", 0, 2)], [(kit / "a", 2, 3)]])
    free = merge(mixed.replaced(convention="mergekit"), tmp_path / "free", progress=False)
    assert torch.equal(state(free)[HEAD], state(kit / "a")[HEAD])
    one = sliced("passthrough", [[(kit / "tied_a", 0, 2)], [(kit / "tied_a", 1, 3)]])
    assert HEAD not in state(merge(one, tmp_path / "one", progress=False))


def test_scale_multiplies_the_tensors_it_fits(kit, tmp_path):
    scale = [{"filter": "o_proj", "value": 0.5}, {"filter": "down_proj", "value": 0}]
    plan = sliced("passthrough", [[(kit / "a", 0, 3)]], parameters={"scale": scale})
    merged, before = state(merge(plan, tmp_path / "out", progress=False)), state(kit / "a")
    for name, tensor in before.items():
        factor = 0.5 if "o_proj" in name else 0 if "down_proj" in name else 1
        assert torch.equal(merged[name], tensor * factor), name


def test_a_slice_may_be_merged(kit, tmp_path):
    three, two, deep = (
        [(kit / n, 0, 2) for n in ("base", "a", "b")],
        (kit / "base", 2, 3),
        (kit / "deep", 3, 4),
    )
    plan = sliced(
        "ties",
        [three, [two, deep]],
        base_model=kit / "base",
        parameters={"density": 0.5},
        convention="mergekit",
    )
    merged = state(merge(plan, tmp_path / "out", progress=False))
    base, a, b, other = (state(kit / n) for n in ("base", "a", "b", "deep"))
    lower = merge_states("ties", [a, b], base, density=0.5, convention="mergekit")
    for name in (n for n in base if ".layers.0." in n or ".layers.1." in n or n == EMBED):
        assert torch.equal(merged[name], lower[name]), name
    renamed = {name: other[name.replace("layers.2", "layers.3")] for name in base}
    upper = merge_states("ties", [renamed], base, density=0.5, convention="mergekit")
    for name in (n for n in base if ".layers.2." in n or n in (HEAD, "model.norm.weight")):
        assert torch.equal(merged[name], upper[name]), name


def test_the_papers_ties_ranks_each_model_over_all_its_slices(kit, tmp_path):
    """Whatever order the slices list the models in, and however many."""
    ab, ba = [
        [(kit / n, 0, 2) for n in order] for order in (("base", "a", "b"), ("base", "b", "a"))
    ]
    top = [(kit / n, 2, 3) for n in ("base", "b", "a")]
    options = dict(base_model=kit / "base", parameters={"density": 0.3})
    one = state(merge(sliced("ties", [ab, top], **options), tmp_path / "one", progress=False))
    two = state(merge(sliced("ties", [ba, top], **options), tmp_path / "two", progress=False))
    whole = merge_states(
        "ties", [state(kit / "b"), state(kit / "a")], state(kit / "base"), density=0.3
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(one[name], tensor, msg=name)
        assert torch.equal(two[name], tensor), name
    few = sliced("ties", [[(kit / "base", 0, 2), (kit / "a", 0, 2)], top], **options)
    merge(few, tmp_path / "few", progress=False)


def test_slerp_of_slices_follows_its_gradient(kit, tmp_path):
    """t = [0, 1] over three layers is 0, .5, 1; a one-layer slice takes the last value."""
    pair = [kit / "a", kit / "b"]
    lower, upper = [(each, 0, 3) for each in pair], [(each, 1, 2) for each in pair]
    plan = sliced("slerp", [lower, upper], base_model=pair[0], parameters={"t": [0, 1]})
    merged = state(merge(plan, tmp_path / "out", progress=False))
    for new, (old, t) in enumerate([(0, 0.0), (1, 0.5), (2, 1.0), (1, 1.0)]):
        wanted = merge_states("slerp", [state(pair[1])], state(pair[0]), t=t)
        for name in (n for n in wanted if f".layers.{old}." in n):
            assert torch.equal(merged[name.replace(f"s.{old}.", f"s.{new}.")], wanted[name]), name
    for name in (EMBED, HEAD, "model.norm.weight"):  # outside the layers: the first
        assert torch.equal(merged[name], state(pair[0])[name])


# Values


def weights(plan, name):
    (piece,) = [piece for piece in Job(plan).pieces if piece.name == name]
    return piece.settings["weight"]


def test_the_nearest_setting_wins(kit):
    a, b = kit / "a", kit / "b"
    plan = recipe("linear", [(a, {"weight": 2}), b], parameters={"weight": 3})
    assert weights(plan, EMBED) == [2, 3]
    part = {"sources": [(a, 0, 3), (b, 0, 3)], "parameters": {"weight": 4}}
    assert weights(sliced("linear", [part], parameters={"weight": 3}), EMBED) == [4, 4]
    plan = recipe(  # a filter that does not fit hands on
        "linear", [(a, {"weight": [{"filter": "mlp", "value": 2}]}), b], parameters={"weight": 3}
    )
    assert weights(plan, "model.layers.1.mlp.up_proj.weight") == [2, 3]
    assert weights(plan, "model.layers.1.self_attn.q_proj.weight") == [3, 3]
    assert weights(recipe("linear", [(a, {"weight": 5}), b]), EMBED) == [5, 1]


def test_filters_and_gradients_meet_in_one_value(kit):
    entries = [
        {"filter": "q_proj", "value": [0, 1]},
        {"filter": "_proj", "value": 7},
        {"value": [9, 5]},
    ]
    plan = recipe("linear", [(kit / "a", {"weight": entries}), kit / "b"])
    layer = "model.layers.{}.{}.weight"
    q = [weights(plan, layer.format(i, "self_attn.q_proj"))[0] for i in range(3)]
    assert q == [0, 0.5, 1]
    assert weights(plan, layer.format(1, "mlp.up_proj"))[0] == 7
    assert [weights(plan, layer.format(i, "input_layernorm"))[0] for i in range(3)] == [9, 7, 5]
    assert weights(plan, "model.norm.weight")[0] == 9


# Vocabularies


@pytest.fixture
def spoken(tmp_path):
    """a, b, c in rows 0 to 2 of four; a, c, d in rows 1, 0, 2 of three."""
    abc = tokenizer(llama(tmp_path / "abc", 0, vocab_size=4, tied=True), {"a": 0, "b": 1, "c": 2})
    acd = tokenizer(llama(tmp_path / "acd", 1, vocab_size=3, tied=True), {"c": 0, "a": 1, "d": 2})
    return abc, acd


@pytest.mark.parametrize(
    ("rest", "rows"),
    [
        ({"tokenizer_source": "base"}, ["a", "b", "c", "pad"]),
        ({"tokenizer_source": "union"}, ["a", "b", "c", "d"]),
        ({"tokenizer": {"source": "union"}}, ["a", "b", "c", "d"]),
        ({"tokenizer": {"source": "base", "pad_to_multiple_of": 6}}, ["a", "b", "c", "pad", 0, 0]),
        ({"tokenizer": {"pad_to_multiple_of": 5}}, ["a", "b", "c", "d", 0]),
    ],
)
def test_vocabularies_are_aligned_by_token(spoken, tmp_path, rest, rows):
    abc, acd = (state(path)[EMBED] for path in spoken)
    zero = torch.zeros(16)
    wanted = {
        "a": (abc[0] + acd[1]) / 2,
        "b": abc[1],  # who lacks a token gets it from who has it
        "c": (abc[2] + acd[0]) / 2,
        "d": acd[2],
        "pad": abc[3] / 2,  # the base's spare row, and nothing
        0: zero,
    }
    out = merge(recipe("linear", list(spoken), **rest), tmp_path / "out", progress=False)
    torch.testing.assert_close(state(out)[EMBED], torch.stack([wanted[row] for row in rows]))
    assert loaded(out).get_input_embeddings().weight.shape[0] == len(rows)
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(out)
    known = {token: i for i, token in enumerate(rows) if token not in ("pad", 0)}
    assert words.get_vocab() == known
    assert words("a c b")["input_ids"] == [0, 2, 1]
    if "d" in known:
        assert words("a d c")["input_ids"] == [0, 3, 2]


def test_another_models_tokenizer_brings_its_special_tokens(spoken, tmp_path):
    abc, acd = spoken
    config = json.loads((acd / "config.json").read_text()) | {"eos_token_id": 2}
    (acd / "config.json").write_text(json.dumps(config))
    plan = recipe("linear", [abc, acd], tokenizer_source=str(acd))
    out = merge(plan, tmp_path / "out", progress=False)
    one, two = (state(path)[EMBED] for path in spoken)
    wanted = torch.stack([(one[2] + two[0]) / 2, (one[0] + two[1]) / 2, two[2]])
    torch.testing.assert_close(state(out)[EMBED], wanted)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 2


def test_untied_heads_are_aligned_as_well(tmp_path):
    one = tokenizer(llama(tmp_path / "1", 0, vocab_size=2), {"a": 0, "b": 1})
    two = tokenizer(llama(tmp_path / "2", 1, vocab_size=2), {"b": 0, "a": 1})
    plan = recipe("linear", [one, two], tokenizer_source="base", dtype="bfloat16")
    merged = state(merge(plan, tmp_path / "out", progress=False))
    for name in (EMBED, HEAD):
        mean = (state(one)[name] + state(two)[name].flip(0)) / 2
        assert torch.equal(merged[name], mean.bfloat16())


def test_padded_rows_beyond_the_tokenizer_are_kept(tmp_path):
    vocab = {"a": 0, "b": 1}
    models = [tokenizer(llama(tmp_path / str(s), s, tied=True), vocab) for s in (0, 1)]
    for rest in ({}, {"tokenizer_source": "base"}, {"tokenizer_source": "union"}):
        out = merge(recipe("linear", models, **rest), tmp_path / f"out{rest}", progress=False)
        mean = (state(models[0])[EMBED] + state(models[1])[EMBED]) / 2
        torch.testing.assert_close(state(out)[EMBED], mean)
        assert len(mean) == 11


def test_tokens_with_two_numbers_are_not_merged_by_number(tmp_path):
    one = tokenizer(llama(tmp_path / "1", 0), {"a": 0, "b": 1, "c": 2})
    two = tokenizer(llama(tmp_path / "2", 1), {"a": 0, "c": 1, "b": 2})
    with pytest.raises(RecipeError, match=r"'c' is token 1 .*2 but 2 .*1.*tokenizer_source"):
        merge(recipe("linear", [one, two]), tmp_path / "out", progress=False)
    more = tokenizer(llama(tmp_path / "3", 2), {"a": 0, "b": 1, "c": 2, "new": 3})
    merge(recipe("linear", [one, more]), tmp_path / "out", progress=False)


# The command


def test_the_command_reads_models_beside_its_recipe(kit, tmp_path, capsys):
    copy(kit / "a", tmp_path / "work" / "mine")
    copy(kit / "base", tmp_path / "work" / "base")
    path = tmp_path / "work" / "recipe.yml"
    path.write_text(
        "merge_method: dare_linear\nbase_model: base/\nmodels:\n  - {model: base}\n"
        "  - {model: ./mine, parameters: {density: .5, weight: 5e-1}}\n"
    )
    out = tmp_path / "new" / "out"
    flags = ["--convention", "mergekit", "--seed", "7", "--shard-gb", "6e-6"]
    assert main([str(path), str(out), *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"merged 2 models into {out}\n"
    wanted = merge_states(
        "dare_linear",
        [state(kit / "a")],
        state(kit / "base"),
        density=0.5,
        weight=0.5,
        seed=7,
        convention="mergekit",
    )
    assert_same(state(out), wanted)
    assert len(list(out.glob("*.safetensors"))) > 2
