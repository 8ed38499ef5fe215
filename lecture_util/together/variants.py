"""The model that a configuration runs: whole or pruned, in the numbers it asks for."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer
from lecture_util.quantization.awq import activation_means, fold_all, shared
from lecture_util.quantization.awq_search import channel_scale
from lecture_util.quantization.int4 import Int4Linear
from lecture_util.quantization.linear import is_quantized, replace_linears
from lecture_util.quantization.llm_int8 import Int8Linear
from lecture_util.roofline.accounting import num_params

from .configuration import WEIGHTS, Configuration
from .student import load_student

GROUP = 64
ALPHA = 0.4  # near what notebook 06's search finds for most layers
# Bytes a weight of the blocks' linear layers, and a number of all the rest and of the cache.
BYTES = {"fp32": (4, 4), "bf16": (2, 2), "int8": (1, 4), "int4": (0.5 + 4 / GROUP, 2)}


class Variants:
    """Makes each variant of a model once, at its first use, from the model as loaded in fp32.

    calibration_BT: windows of text that 4 bits are scaled by, see `scaled_for_4_bits`; None to
                    round as it comes.
    """

    def __init__(self, model: Transformer, calibration_BT: Tensor | None = None) -> None:
        if not isinstance(model, Transformer):
            raise TypeError(f"model={model!r}: expected a Transformer, such as load() gives")
        if model.dtype != torch.float32:
            raise ValueError(
                f"the model is {model.dtype}: load(dtype=torch.float32), from which "
                "the others are made"
            )
        if any(map(is_quantized, model.modules())):
            raise ValueError(
                "the model is quantized: pass the one that was loaded, from which "
                "the others are made"
            )
        self.model, self.calibration_BT = model, calibration_BT
        self._made: dict[tuple[str, bool], Transformer] = {("fp32", False): model}

    def __call__(self, configuration: Configuration) -> Transformer:
        """Raises: as `student.load_student`, for a model that it is not the student of."""
        if not isinstance(configuration, Configuration):
            raise TypeError(
                f"configuration={configuration!r}: expected Configuration(weights='int8', ...)"
            )
        return self.get(configuration.weights, configuration.student)

    def get(self, weights: str = "fp32", student: bool = False) -> Transformer:
        key = (weights, student)
        if key not in self._made:
            _check(weights)
            source = load_student(self.model) if weights == "fp32" else self.get("fp32", student)
            if weights == "int4" and self.calibration_BT is not None:
                source = scaled_for_4_bits(source, self.calibration_BT.to(source.device))
            self._made[key] = with_weights(source, weights)
        return self._made[key]


def with_weights(model: Transformer, weights: str) -> Transformer:
    """The model in other numbers; the source stays. Shapes and calls are the same."""
    _check(weights)
    if weights == "fp32":
        return model
    if weights == "int8":
        return replace_linears(model, Int8Linear.from_linear)
    half = copy.deepcopy(model).to(torch.bfloat16)
    if weights == "bf16":
        return half
    return replace_linears(half, lambda linear: Int4Linear.from_linear(linear, GROUP))


def calibration(study_S: Tensor, B: int = 8, T: int = 128) -> Tensor:
    """Windows spread over a text, for `Variants`. Shapes: study_S -> tokens_BT."""
    if not 1 <= T <= len(study_S):
        raise ValueError(f"T={T} but the text has {len(study_S)} tokens")
    starts_B = torch.linspace(0, len(study_S) - T, B).long()
    return study_S[starts_B[:, None] + torch.arange(T)]


def scaled_for_4_bits(model: Transformer, tokens_BT: Tensor) -> Transformer:
    """AWQ with one exponent for all layers: no search, no clipping, one pass over some text.

    Computes the same as before; its columns with large activations round more finely.
    """
    config, scales = model.config, {}
    for name, mean_D in activation_means(model, tokens_BT).items():
        if name.endswith(".out"):
            mean_D = shared(mean_D, config.K, config.G)
        scales[name] = channel_scale(mean_D, ALPHA)
    return fold_all(model, scales)


def weights_of(model: Transformer) -> str | None:
    """Which of WEIGHTS a model holds; None for others, such as fp64."""
    kinds = {type(module) for module in model.modules()}
    if Int4Linear in kinds:
        return "int4"
    if Int8Linear in kinds:
        return "int8"
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(model.dtype)


def held_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, what several layers share counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(model)}
    return sum(storage.nbytes() for storage in storages.values())


def copy_bytes(model: nn.Module) -> int:
    """Bytes of the second copies of 4-bit weights that a CPU's operator has made by now."""
    return sum(m.copy_bytes for m in model.modules() if isinstance(m, Int4Linear))


def predicted_bytes(config: Config, weights: str) -> int:
    """What `held_bytes` should be: from shapes alone, with the scales that go with each format."""
    _check(weights)
    D, F, L, mixed = config.D, config.F, config.L, config.N * config.H
    qkv, out = (mixed + 2 * config.K * config.H, D), (D, mixed)
    matrices = (qkv, out, (2 * F, D), (D, F))
    rest = num_params(config) - L * sum(rows * columns for rows, columns in matrices)
    linear_bytes = L * sum(_matrix_bytes(weights, *shape) for shape in matrices)
    return linear_bytes + BYTES[weights][1] * rest


def _matrix_bytes(weights: str, rows: int, columns: int) -> int:
    if weights == "int8":  # one fp32 scale a row
        return rows * (columns + 4)
    if weights == "int4":  # two in a byte; a scale and an offset in bf16 for each group
        return rows * (-(-columns // 2) + 4 * -(-columns // GROUP))
    return rows * columns * BYTES[weights][0]


def _check(weights: str) -> None:
    if weights not in tuple(WEIGHTS):
        raise ValueError(f"weights={weights!r}: expected one of {', '.join(WEIGHTS)}")


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
