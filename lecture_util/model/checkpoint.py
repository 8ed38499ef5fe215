"""A checkpoint is an ordinary folder: config.json, safetensors, tokenizer.

`load_folder` and `save_folder` read and write what transformers does; no pickle is ever loaded.
Ours stacks q, k and v into one matrix, and gate and up into another: `hf_names` says which Hugging
Face tensors make up each parameter, `unstack` takes a parameter apart again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .config import Config
from .linear import Linear
from .transformer import Transformer

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class WeightsError(OSError):
    """A checkpoint is missing, damaged, or not what its config says."""


def load_folder(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """Load a Llama-family folder, tensor by tensor, each cast once to `dtype`.

    Raises: UnsupportedModel for a config we can't honour; WeightsError for a tensor that is
            missing, unknown or of the wrong shape, and for a damaged file.
    """
    folder = Path(folder)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}: expected torch.float32, bfloat16 or another float")
    config = Config.from_hf(read_json(folder / "config.json"))
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device)
    if config.tied:
        model.head.weight = model.embed.weight
    _copy_in(model, folder)
    return model.eval().requires_grad_(False)


def save_folder(model: Transformer, folder: str | Path, tokenizer=None) -> Path:
    """Write a folder that transformers opens; it appears whole or not at all.

    Raises: FileExistsError if the folder exists; TypeError for a model whose layers are not
            plain Linears, as after quantizing.
    """
    state = hf_state(model)
    with new_folder(folder) as partial:
        save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
        hf = model.config.to_hf() | {"dtype": str(model.dtype).removeprefix("torch.")}
        (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    return Path(folder)


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a partial folder, renamed to `folder` on success and removed on any failure.

    So are the parents that were made for it, if nobody has put anything there meanwhile.
    Raises: FileExistsError if `folder` exists, or does in the end; WeightsError if it can't be
            written.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another name or remove it first")
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    made = [parent for parent in partial.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except WeightsError:  # of what was being read
        raise
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST) and folder.is_dir():
            raise FileExistsError(
                f"{folder} exists now: another run made it meanwhile, and it was left alone"
            ) from error
        full = getattr(error, "errno", None) in FULL
        full |= any(f"os error {number})" in str(error) for number in FULL)  # as safetensors says
        raise WeightsError(
            f"writing {folder} failed ({error}): {'free some space there, or ' * full}name another "
            "place (for the course's own copies, in $LECTURE_CACHE); nothing half-written was kept"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # not empty: in use
                parent.rmdir()


def hf_names(config: Config) -> dict[str, list[str]]:
    """Each of our parameters and the Hugging Face tensors it is stacked from, along axis 0."""
    names = {"embed.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tied:
        names["head.weight"] = ["lm_head.weight"]
    parts = {
        "norm_attention.weight": ["input_layernorm.weight"],
        "qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
        "out.weight": ["self_attn.o_proj.weight"],
        "norm_mlp.weight": ["post_attention_layernorm.weight"],
        "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "down.weight": ["mlp.down_proj.weight"],
    }
    if config.qkv_bias:
        parts["qkv.bias"] = [f"self_attn.{x}_proj.bias" for x in "qkv"]
    for layer in range(config.L):
        for ours, theirs in parts.items():
            names[f"blocks.{layer}.{ours}"] = [f"model.layers.{layer}.{t}" for t in theirs]
    return names


def unstack(config: Config, name: str, stacked: Tensor) -> tuple[Tensor, ...]:
    """Views of the Hugging Face tensors that our parameter `name` is stacked from."""
    if ".qkv." in name:
        return stacked.split([config.N * config.H, config.K * config.H, config.K * config.H])
    if ".gate_up." in name:
        return stacked.split(config.F)
    return (stacked,)


def hf_state(model: Transformer) -> dict[str, Tensor]:
    """The model's tensors under their Hugging Face names, contiguous."""
    config, modules, ours = model.config, dict(model.named_modules()), {}
    for name in hf_names(config):
        module = modules.get(name.rpartition(".")[0])
        weight = getattr(module, name.rpartition(".")[2], None)
        plain = not isinstance(module, nn.Linear) or type(module) in (Linear, nn.Linear)
        if plain and isinstance(weight, Tensor) and weight.is_floating_point():
            ours[name] = weight.detach()
        else:
            raise TypeError(
                f"this model holds no {name} of floats: its layers are quantized, or of another "
                "kind than an ordinary checkpoint describes. Save the model it was made from, or "
                "the rounded weights: quantization.linear.dequantize(model), or ste.settle(model)"
            )
    return {
        theirs: part.contiguous()
        for name, stack in hf_names(config).items()
        for theirs, part in zip(stack, unstack(config, name, ours[name]), strict=True)
    }


def _copy_in(model: Transformer, folder: Path) -> None:
    config, parameters = model.config, dict(model.named_parameters())
    places = {
        theirs: part
        for name, stack in hf_names(config).items()
        for theirs, part in zip(stack, unstack(config, name, parameters[name].data), strict=True)
    }
    head = None
    for name, tensor in _tensors(folder):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # derived from the config
        if config.tied and name == "lm_head.weight":
            head = tensor
            continue
        if (place := places.pop(name, None)) is None:
            raise WeightsError(
                f"{folder.name} holds {name}, unknown to {config.to_hf()['architectures'][0]}: "
                "its config.json does not describe these weights"
            )
        if place.shape != tensor.shape:
            raise WeightsError(
                f"{name} has shape {tuple(tensor.shape)} but config.json implies "
                f"{tuple(place.shape)}: weights and config belong to different models"
            )
        place.copy_(tensor)
    if places:
        raise WeightsError(
            f"{folder.name} lacks {len(places)} tensors, among them {min(places)}: "
            "the checkpoint is incomplete, fetch it again"
        )
    embed = model.embed.weight
    if head is not None and not torch.equal(head.to(embed), embed):
        raise WeightsError(
            f"{folder.name} says tie_word_embeddings=true but its lm_head.weight is not the "
            "embedding: set it to false in config.json"
        )


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises: WeightsError if it is none."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON ({error}): fetch it again") from error


def shards_of(folder: Path) -> list[str]:
    """Names of the safetensors files that hold a checkpoint's tensors, by its index or alone."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index)
        if not isinstance(names, dict) or not isinstance(names.get("weight_map"), dict):
            raise WeightsError(f"{index} has no weight_map: fetch the checkpoint again")
        return sorted(set(names["weight_map"].values()))
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if other := another_format(folder):
        raise WeightsError(f"{folder} {other}")
    pickles = [p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt*"))]
    found = f"only {pickles[0]}, a pickle, which can run code when loaded" if pickles else "none"
    raise WeightsError(
        f"{folder} should hold model.safetensors but holds {found}: save the model again "
        "with save_pretrained(..., safe_serialization=True)"
    )


def another_format(path: Path) -> str | None:
    """What a path without a checkpoint holds instead, and what to do; None if we can't tell."""
    if (path / "adapter_config.json").is_file():
        return "is an adapter: merge it into its base first, with peft's merge_and_unload()"
    if path.suffix.lower() == ".gguf" or any(path.glob("*.gguf")):
        return "is GGUF, made for llama.cpp: pass the safetensors checkpoint it was made from"
    return None


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for shard in shards_of(folder):
        if not (folder / shard).is_file():
            raise WeightsError(f"{folder} lacks the shard {shard} named in its index")
        try:
            with safe_open(folder / shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(
                f"{folder / shard} is damaged ({error}): fetch or convert it again"
            ) from error
