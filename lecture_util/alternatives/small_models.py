"""Two small models of one size, trained alike on the same text: one diffuses, one goes in order.

They ship as half-precision weights in `lecture_util/assets`; `benchmarks/train_diffusion.py` trains
and measures them anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.config import Config
from lecture_util.model.text import english
from lecture_util.model.transformer import Transformer

from .diffusion import MaskedDiffusion

ASSETS = Path(__file__).resolve().parents[1] / "assets"
CONFIG = Config(D=128, F=256, K=4, G=1, H=32, L=4, V=128, max_context=128)  # a token is a byte
KINDS = {"autoregressive": Transformer, "diffusion": MaskedDiffusion}
WINDOW = 64  # tokens of a training example
SHARED = 32  # held-out text has no run of so many bytes in common with the training text


def untrained(kind: str) -> Transformer:
    """A fresh model with torch's default weights: seed first. The mask is one id more."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    return KINDS[kind](replace(CONFIG, V=CONFIG.V + (kind == "diffusion")))


def load_small(kind: str, folder: str | Path = ASSETS) -> Transformer:
    """The trained "diffusion" or "autoregressive" model, in fp32 and for inference.

    Raises: ValueError for another kind; WeightsError if its file is missing or not this model's.
    """
    model, path = untrained(kind), Path(folder) / f"{kind}.safetensors"
    remedy = "run `python benchmarks/train_diffusion.py`, which makes it"
    if not path.is_file():
        raise WeightsError(f"no trained model at {path}: {remedy}")
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        model.load_state_dict(weights)
    except (SafetensorError, RuntimeError) as error:
        raise WeightsError(f"{path} does not hold this model ({error}): {remedy}") from error
    return model.eval().requires_grad_(False)


def save_small(model: Transformer, kind: str, folder: str | Path = ASSETS) -> Path:
    """Write the weights in fp16, half the bytes, for `load_small`."""
    path = Path(folder) / f"{kind}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, path, metadata={"config": json.dumps(asdict(model.config))})
    path.chmod(0o644)  # safetensors makes it the owner's alone
    return path


def split_text() -> tuple[Tensor, Tensor]:
    """Text to train on, and windows that are new to a model so trained.

    Python's reference repeats itself: whole topics are quoted in others, so that a plain split
    would test on training text. Every paragraph is taken once, its white space single; the last
    tenth is cut into windows, and those that quote the rest are dropped.

    Shapes: -> train_S, held_BT, T = WINDOW.
    """
    paragraphs = dict.fromkeys(" ".join(part.split()) for part in english().split("\n\n"))
    text = "\n".join(filter(None, paragraphs))
    cut = len(text) * 9 // 10
    seen = {text[i : i + SHARED] for i in range(cut - SHARED + 1)}
    held = [
        part
        for start in range(cut, len(text) - WINDOW + 1, WINDOW)
        for part in [text[start : start + WINDOW]]
        if not any(part[i : i + SHARED] in seen for i in range(WINDOW - SHARED + 1))
    ]
    return encode(text[:cut]), torch.stack([encode(part) for part in held])


def encode(text: str) -> Tensor:
    """One token a byte; what is not ASCII becomes a question mark. -> tokens_T."""
    return torch.tensor(list(text.encode("ascii", "replace")))


def text_of(tokens_T: Tensor, hole: str = "▁") -> str:
    """The text of one row; masks and control characters show as `hole`, new lines as spaces."""
    return "".join(
        chr(token) if 32 <= token < 127 else " " if token == 10 else hole
        for token in tokens_T.tolist()
    )
