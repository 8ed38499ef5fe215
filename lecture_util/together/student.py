"""The pruned student that comes with the course: fewer layers, and an adapter that repaired them.

Only the adapter is kept, 1.5 numbers for 100 of the student: its layers are the reference model's.
The teacher was that model, and no weight but the thin factors learned (distillation, Hinton et al.
2015, arXiv:1503.02531; adapters, Hu et al. 2021, arXiv:2106.09685). benchmarks/train_student.py
made it, and benchmarks/results/student.json says how good it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lecture_util.merging.adapters import Adapter, fine_tuned, load_adapter, save_adapter
from lecture_util.model.checkpoint import WeightsError
from lecture_util.model.transformer import Transformer
from lecture_util.pruning.prune import drop_layers

ASSET = Path(__file__).resolve().parents[1] / "assets" / "student.safetensors"
REMEDY = "make one with benchmarks/train_student.py"
PROBES = 32  # entries of the embedding that tell one trained model from another


def load_student(model: Transformer, path: Path | None = None) -> Transformer:
    """The reference model without the layers that the file names, its adapter added.

    A new model of the dtype and device of `model`, which is not changed.
    Cost:   a copy of what is kept, then 2*r FLOPs a weight for an adapter of rank r.
    Raises: WeightsError if there is no such file, it is damaged, or was made for another model;
            TypeError for quantized or otherwise changed layers, as `drop_layers`.
    """
    path = ASSET if path is None else Path(path)
    facts = student_facts(path)
    if not isinstance(model, Transformer):
        raise TypeError(f"model is a {type(model).__name__}: expected weights.load()'s Transformer")
    if (found := _shape(model)) != facts["config"]:
        raise WeightsError(
            f"{path.name} was cut from a model of {facts['config']} but this one has {found}: pass "
            'the whole reference model, weights.load("smollm2-135m")'
        )
    apart = (_probe(model) - torch.tensor(facts["probe"])).abs().max().item()
    if not apart <= 0.01 * max(map(abs, facts["probe"])):  # bf16 rounds by less than half of that
        raise WeightsError(
            f"this model has the shape that {path.name} was made for but other embeddings (entries "
            f'differ by {apart:.2g}): pass the reference model, weights.load("smollm2-135m")'
        )
    return fine_tuned(drop_layers(model, facts["dropped"]), load_adapter(path))


def student_facts(path: Path | None = None) -> dict:
    """What the file says of itself: `dropped` layers, rank, seed, steps, text, date ...

    Raises: WeightsError if there is no such file, or it holds no student.
    """
    path = ASSET if path is None else Path(path)
    if not path.is_file():
        raise WeightsError(f"no student at {path}: {REMEDY}")
    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {})["facts"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise WeightsError(f"{path} is no student, or damaged ({error}): {REMEDY}") from error


def save_student(model: Transformer, adapter: Adapter, facts: dict, path: Path = ASSET) -> Path:
    """Write the adapter of a student of `model`, with facts that name the `dropped` layers.

    To a file beside it first, so that whoever reads meanwhile gets the old one or the new one.
    """
    facts = facts | {"config": _shape(model), "probe": _probe(model).tolist()}
    part = save_adapter(adapter, path.with_suffix(".part"))
    metadata = {"scale": json.dumps(adapter.scale), "facts": json.dumps(facts)}
    save_file(load_file(part), part, metadata)
    part.chmod(0o644)  # safetensors makes it the owner's alone
    return part.replace(path)


def _shape(model: Transformer) -> dict[str, int]:
    c = model.config
    return {"D": c.D, "F": c.F, "K": c.K, "G": c.G, "H": c.H, "L": c.L, "V": c.V}


def _probe(model: Transformer) -> Tensor:
    """A few embeddings' first entries: no adapter changes them, another training would."""
    return model.embed.weight[:: -(-model.config.V // PROBES), 0].detach().float().cpu()
