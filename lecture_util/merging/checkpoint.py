"""Checkpoint folders read and written one tensor at a time: a merge never holds a whole model.

`Folder` looks like a dict of tensors and reads each when asked. `FolderWriter` knows all names,
shapes and dtypes beforehand, so it can write safetensors' header first and then stream.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..model.checkpoint import WeightsError, read_json, shards_of

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
VOCABULARY = (EMBED, HEAD)  # whose rows are tokens
DERIVED = "rotary_emb.inv_freq"  # follows from the config
NAMES = {  # safetensors' names of dtypes
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
STORED = {name: dtype for dtype, name in NAMES.items()}
BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json")
BESIDE += ("chat_template*", "generation_config.json")


class Folder(Mapping[str, Tensor]):
    """A checkpoint as a mapping from tensor names to tensors, each read when it is asked for.

    A tied head is a name of its own here: `folder["lm_head.weight"]` is the embedding if the
    config ties them, so a tied and an untied model can be merged. A config that does not say
    counts as tied if no head is stored.
    Raises: WeightsError for a folder that is missing, incomplete, damaged or quantized.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise WeightsError(f"{self.path} holds no config.json: expected a checkpoint folder")
        self.config: dict[str, Any] = read_json(self.path / "config.json")
        if not isinstance(self.config, dict):
            raise WeightsError(f"{self.path / 'config.json'} is not an object: fetch it again")
        if self.config.get("quantization_config"):
            raise WeightsError(f"{self.path} is quantized: merge the original, quantize after")
        self._stored: dict[str, tuple[str, tuple[int, ...], str]] = {}
        for shard in shards_of(self.path):
            with self._open(shard) as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    entry = file.get_slice(name)
                    if not name.endswith(DERIVED):
                        self._stored[name] = (shard, tuple(entry.get_shape()), entry.get_dtype())
        index = self.path / "model.safetensors.index.json"
        promised = read_json(index)["weight_map"] if index.is_file() else {}
        if lost := sorted(set(promised) - set(self._stored)):
            raise WeightsError(
                f"{self.path} lacks {lost[0]}, which its index names: fetch it again"
            )
        if self.tied and EMBED in self._stored:
            if HEAD in self._stored and not self._head_is_embedding():
                raise WeightsError(
                    f"{self.path} says tie_word_embeddings=true but its {HEAD} is not the "
                    "embedding: set it to false in config.json"
                )
            self._stored[HEAD] = self._stored[EMBED]

    def _head_is_embedding(self) -> bool:
        with self._open(self._stored[HEAD][0]) as file:
            return torch.equal(file.get_tensor(HEAD), self[EMBED])

    @cached_property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", HEAD not in self._stored))

    @property
    def num_layers(self) -> int:
        """Raises: WeightsError if the config does not say."""
        layers = self.config.get("num_hidden_layers")
        if type(layers) is not int or layers < 1:
            raise WeightsError(f"{self.path / 'config.json'} gives no num_hidden_layers")
        return layers

    def __getitem__(self, name: str) -> Tensor:
        shard = self._entry(name)[0]
        stored = EMBED if name == HEAD and self.tied else name
        try:
            with self._open(shard) as file:  # anew each time: a map that stays open keeps its pages
                return file.get_tensor(stored)
        except SafetensorError as error:
            raise WeightsError(f"{name} of {self.path} can't be read ({error})") from error

    def __contains__(self, name: object) -> bool:  # a Mapping's own would read the tensor
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1]

    def dtype(self, name: str) -> torch.dtype:
        """Raises: WeightsError for one that there is no arithmetic for here, such as fp8."""
        stored = self._entry(name)[2]
        if stored not in STORED:
            raise WeightsError(
                f"{name} of {self.path} is stored as {stored}: merge a checkpoint in 16 or 32 bits"
            )
        return STORED[stored]

    def _entry(self, name: str) -> tuple[str, tuple[int, ...], str]:
        if name not in self._stored:
            raise KeyError(f"{self.path} has no tensor {name}")
        return self._stored[name]

    def _open(self, shard: str):
        path = self.path / shard
        if not path.is_file():
            raise WeightsError(f"{self.path} lacks the shard {shard} named in its index")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is damaged ({error}): fetch it again") from error


@dataclass(frozen=True)
class Spec:
    """What a tensor of the result will be, known before it is computed."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class FolderWriter:
    """Streams tensors, in the order of `specs`, into the shards of a folder that exists.

    shard_bytes: a shard ends before it would grow past this.
    Raises: ValueError unless that is above 0.
    """

    def __init__(self, folder: Path, specs: Sequence[Spec], *, shard_bytes: float = 5e9) -> None:
        if not shard_bytes > 0:
            raise ValueError(f"shard_bytes is {shard_bytes}: expected a size above 0")
        self.folder = folder
        self.shards: list[list[Spec]] = [[]]
        size = 0
        for spec in specs:
            if self.shards[-1] and size + spec.nbytes > shard_bytes:
                self.shards.append([])
                size = 0
            self.shards[-1].append(spec)
            size += spec.nbytes

    def write(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """All of them: header, then bytes as they come; an index if there are several shards."""
        several, weight_map = len(self.shards) > 1, {}
        for number, specs in enumerate(self.shards, 1):
            shard = f"model-{number:05}-of-{len(self.shards):05}.safetensors"
            shard = shard if several else "model.safetensors"
            with (self.folder / shard).open("wb") as file:
                file.write(_header(specs))
                for spec in specs:
                    name, tensor = next(tensors)
                    assert Spec(name, tuple(tensor.shape), tensor.dtype) == spec
                    flat = tensor.detach().cpu().contiguous().reshape(-1)
                    file.write(memoryview(flat.view(torch.uint8).numpy()))
                    weight_map[name] = shard
        if several:
            total = sum(spec.nbytes for specs in self.shards for spec in specs)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n")


def copy_beside(source: Path, target: Path) -> None:
    """Tokenizer, chat template and generation settings: what a checkpoint holds beside weights."""
    for pattern in BESIDE:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, target / path.name)


def _header(specs: Sequence[Spec]) -> bytes:
    """Eight bytes of length, then JSON, padded with spaces to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
