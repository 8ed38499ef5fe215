"""Low-rank adapters: a fine-tune in 1% of its bytes, and what it does to an ordinary checkpoint.

An adapter gives each weight two thin factors whose product is its change. Names are Hugging Face's,
so that it fits checkpoint folders; `fine_tuned` adds it to our Transformer.
Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lecture_util.model.checkpoint import WeightsError, hf_names, unstack
from lecture_util.model.shapes import ShapeError
from lecture_util.model.transformer import Transformer

from .tensors import one_weight_each, require_floats

ASSETS = Path(__file__).resolve().parents[1] / "assets"
REMEDY = "make one with benchmarks/train_adapters.py"
FORMAT = "no adapter in this course's format"
PEFT = "PEFT's: merge it into its model with PEFT, then merge that model"


@dataclass(frozen=True)
class Factors:
    """The change of one weight: up_Fr @ down_rD, r being the rank. Shapes: down_rD, up_Fr."""

    down_rD: Tensor
    up_Fr: Tensor

    def __post_init__(self) -> None:
        down, up = self.down_rD, self.up_Fr
        if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
            raise ShapeError(
                f"down_rD is {tuple(down.shape)} and up_Fr {tuple(up.shape)}: expected (r, D) and "
                "(F, r) with one rank r"
            )

    def product(self) -> Tensor:
        """up @ down in fp32, or fp64 for fp64 factors. -> (F, D)"""
        down_rD, up_Fr = (
            t if t.dtype == torch.float64 else t.float() for t in (self.down_rD, self.up_Fr)
        )
        return up_Fr @ down_rD


@dataclass(frozen=True)
class Adapter:
    """Factors by the name of the weight they change, and one scale for all of them."""

    factors: Mapping[str, Factors]
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return sum(f.down_rD.nbytes + f.up_Fr.nbytes for f in self.factors.values())


def delta(adapter: Adapter) -> dict[str, Tensor]:
    """The task vector: scale * up @ down for each weight, in fp32. -> {name: (F, D)}"""
    return {name: adapter.scale * f.product() for name, f in adapter.factors.items()}


def combine(adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
    """One adapter whose delta is the weighted sum of theirs: their factors side by side.

    The rank is the sum of ranks. Adding the factors themselves would multiply one task's up by
    another's down (huggingface/peft#3004), and a weight shared out as square roots would lose its
    sign (huggingface/peft#2918); here each weight goes into its own `up`, sign and all.

    Raises: ValueError unless there is one weight for each adapter; ShapeError for unlike weights.
    """
    weights = one_weight_each(weights, adapters, "adapters")
    if not all(math.isfinite(w) for w in weights):
        raise ValueError(f"weights={weights}: expected finite numbers, negative ones too")
    factors = {}
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.factors):
        parts = [
            (w * a.scale, a.factors[name])
            for a, w in zip(adapters, weights, strict=True)
            if name in a.factors
        ]
        shapes = {(len(f.up_Fr), f.down_rD.shape[1]) for _, f in parts}
        if len(shapes) > 1:
            raise ShapeError(
                f"{name} is {' and '.join(map(str, sorted(shapes)))} in these adapters: combine "
                "adapters of one model"
            )
        doubles = any(f.up_Fr.dtype == torch.float64 for _, f in parts)
        wide = torch.float64 if doubles else torch.float32
        factors[name] = Factors(
            torch.cat([f.down_rD.to(wide) for _, f in parts]),
            torch.cat([w * f.up_Fr.to(wide) for w, f in parts], dim=1),
        )
    return Adapter(factors)


def apply(state: Mapping[str, Tensor], adapter: Adapter, weight: float = 1.0) -> dict[str, Tensor]:
    """A checkpoint's tensors with weight * delta added in fp32, each cast once to its own dtype.

    Tensors the adapter doesn't name are handed on, not copied.
    Raises: WeightsError for a name that the checkpoint lacks; ShapeError for another shape;
            TensorMismatch for a weight that isn't floating-point.
    """
    if unknown := [name for name in adapter.factors if name not in state]:
        raise WeightsError(
            f"the checkpoint has no {unknown[0]} ({len(unknown)} of {len(adapter.factors)} names "
            "are unknown): an adapter fits the one model it was trained on"
        )
    return dict(state) | {
        name: _changed(name, state[name], f, weight * adapter.scale)
        for name, f in adapter.factors.items()
    }


def fine_tuned(model: Transformer, adapter: Adapter, weight: float = 1.0) -> Transformer:
    """A copy of the model with weight * delta added; the model itself stays as it is.

    Raises: as `apply`.
    """
    tuned = copy.deepcopy(model)
    views = hf_views(tuned)
    with torch.no_grad():
        for name, changed in apply(views, adapter, weight).items():
            if name in adapter.factors:
                views[name].copy_(changed)
    return tuned


def save_adapter(adapter: Adapter, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write factors as `NAME.down` and `NAME.up`, and the scale as metadata."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, f in adapter.factors.items():
        tensors[f"{name}.down"] = f.down_rD.detach().to(dtype).contiguous()
        tensors[f"{name}.up"] = f.up_Fr.detach().to(dtype).contiguous()
    save_file(tensors, path, metadata={"scale": json.dumps(adapter.scale)})
    path.chmod(0o644)  # safetensors makes it the owner's alone
    return path


def load_adapter(path: str | Path) -> Adapter:
    """Read what `save_adapter` wrote. A bare word is a task of `real_tasks`: load_adapter("facts").

    Raises: WeightsError if there is no such file, or it holds no adapter.
    """
    path = ASSETS / f"adapter_{path}.safetensors" if str(path).isidentifier() else Path(path)
    if (path / "adapter_config.json").is_file():
        raise WeightsError(f"{path} is {FORMAT}, but {PEFT}")
    if not path.is_file():
        raise WeightsError(f"no adapter at {path}: {REMEDY}")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if any(".lora_" in name for name in tensors):
                raise WeightsError(f"{path} is {FORMAT}, but {PEFT}")
            scale = float(json.loads((file.metadata() or {})["scale"]))
        names = sorted({name.rpartition(".")[0] for name in tensors})
        factors = {n: Factors(tensors.pop(f"{n}.down"), tensors.pop(f"{n}.up")) for n in names}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise WeightsError(f"{path} is {FORMAT} ({error}): {REMEDY}") from error
    if tensors:
        raise WeightsError(f"{path} is {FORMAT} (it holds {min(tensors)}): {REMEDY}")
    return Adapter(factors, scale)


def hf_views(model: Transformer) -> dict[str, Tensor]:
    """The model's tensors under Hugging Face's names, sharing its memory: writing changes it.

    Raises: TypeError for a model whose layers are not plain Linears, as after quantizing.
    """
    parameters = dict(model.named_parameters())
    views = {}
    for ours, theirs in hf_names(model.config).items():
        if ours not in parameters:
            raise TypeError(
                f"this model has no parameter {ours}: its layers are quantized or of another kind; "
                "adapters change the model it was made from"
            )
        parts = unstack(model.config, ours, parameters[ours].data)
        views |= dict(zip(theirs, parts, strict=True))
    return views


def _changed(name: str, base_FD: Tensor, factors: Factors, weight: float) -> Tensor:
    require_floats(**{name: base_FD})
    product_FD = factors.product().to(base_FD.device)
    if product_FD.shape != base_FD.shape:
        raise ShapeError(
            f"{name} is {tuple(base_FD.shape)} but the adapter changes a weight of "
            f"{tuple(product_FD.shape)}: an adapter fits the one model it was trained on"
        )
    wide = torch.promote_types(base_FD.dtype, product_FD.dtype)
    return (base_FD.to(wide) + weight * product_FD.to(wide)).to(base_FD.dtype)
