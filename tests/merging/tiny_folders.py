"""Checkpoint folders small enough to make by the dozen, written by transformers or by us."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lecture_util.merging.recipe import parse
from lecture_util.model.checkpoint import save_folder
from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer

SIZES = dict(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_hidden_layers=3,
    vocab_size=11,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
)


def llama(path: Path, seed: int, *, dtype=torch.float32, tied=False, shard=None, **sizes) -> Path:
    """A Llama in a folder. shard: the most bytes in a file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES | sizes, tie_word_embeddings=tied)
    return _save(LlamaForCausalLM, config, path, seed, dtype, shard)


def qwen(path: Path, seed: int, *, dtype=torch.float32, tied=False, shard=None, **sizes) -> Path:
    """A Qwen2, which has biases, in a folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SIZES | sizes, tie_word_embeddings=tied)
    return _save(Qwen2ForCausalLM, config, path, seed, dtype, shard)


def ours(path: Path, seed: int, **sizes) -> Path:
    """The same shapes out of our own model, which takes no second to import."""
    shape = dict(D=16, F=24, K=1, G=2, H=8, L=3, V=11, max_context=64) | sizes
    model = Transformer.random(Config(**shape), seed=seed)
    return save_folder(model, path)


def _save(kind, config, path: Path, seed: int, dtype, shard) -> Path:
    torch.manual_seed(seed)
    model = kind(config).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():  # norms and biases too, or they would all be alike
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(path, max_shard_size=shard or "1GB")
    return path


def state(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder as they are stored."""
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def change(path: Path, edit) -> Path:
    """Let `edit` change the stored tensors of a folder of one file in place."""
    tensors = state(path)
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def tokenizer(path: Path, vocab: dict[str, int]) -> Path:
    """Give a folder a tokenizer of whole words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel(vocab, unk_token=min(vocab)))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
    return path


def recipe(method: str, models: list, base=None, **rest):
    """A recipe for folders: `models` are paths, or pairs of a path and its parameters."""
    listed = [each if isinstance(each, tuple) else (each, {}) for each in models]
    raw = {
        "merge_method": method,
        "models": [{"model": str(path), "parameters": given} for path, given in listed],
        **({} if base is None else {"base_model": str(base)}),
        **rest,
    }
    return parse(json.dumps(raw))


def sliced(method: str, slices: list, **rest):
    """A recipe of slices, each a list of (path, first, last + 1), perhaps with parameters."""
    parts = [part if isinstance(part, dict) else {"sources": part} for part in slices]
    for part in parts:
        part["sources"] = [
            {"model": str(path), "layer_range": [start, stop]}
            for path, start, stop in part["sources"]
        ]
    return parse(json.dumps({"merge_method": method, "slices": parts} | rest, default=str))
