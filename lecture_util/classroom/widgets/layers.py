"""One layer of a model: what it costs by formula, and how fast this machine computes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from lecture_util.model.config import Config
from lecture_util.roofline import Cost, attention, format_bytes, matmul, measure, mlp, this_machine

if TYPE_CHECKING:
    from torch import Tensor, dtype

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
LAYERS = ["matmul D×F", "MLP", "attention"]
LONGEST_S = 3.0  # a slide can wait this long for one run
COLD_BYTES = 2**28  # beyond any cache: copies are used in turns until they are this large


def layer_cost(layer: str, config: Config, B: int, T: int, S: int, G: int) -> Cost:
    """What one layer of the config costs, its N query heads regrouped in groups of G."""
    if layer == "matmul D×F":
        return matmul(B * T, config.D, config.F)
    if layer == "MLP":
        return mlp(B, T, config.D, config.F)
    return attention(B, max(S, T), T, config.N, config.N // G, config.H)


def measure_layer(
    layer: str, config: Config, B: int, T: int, S: int, G: int
) -> tuple[float, float]:
    """Compute the layer on this machine, in 16 bits; its FLOPs per byte and its FLOP/s, median.

    Weights and cache come from memory, as in a model of many layers. Attention is unmasked.
    Raises: ValueError if it would take too long or too much memory, and what to do.
    """
    import torch

    machine, cost = this_machine(), layer_cost(layer, config, B, T, S, G)
    dtype = machine.sixteen_bits
    if (least_s := cost.time_s(machine, dtype)) > LONGEST_S:
        raise ValueError(f"takes at least {least_s:.0f} s on this machine: choose fewer")
    if cost.bytes > machine.memory_bytes / 8:
        raise ValueError(f"needs {format_bytes(cost.bytes)} on this machine: choose fewer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = _layer(layer, config, B, T, max(S, T), G, getattr(torch, TORCH_NAMES[dtype]), device)
    timing = measure(run, repeats=5 if least_s < 0.2 else 2, device=device)
    return cost.intensity, cost.flops / timing.median_s


def _layer(
    layer: str, config: Config, B: int, T: int, S: int, G: int, dtype: dtype, device: str
) -> Callable[[], Tensor]:
    """The layer as a function of nothing that takes other weights, or another cache, each time."""
    import torch
    import torch.nn.functional as nnf

    D, F, N, H = config.D, config.F, config.N, config.H
    K = N // G
    shapes, x_shape = {
        "matmul D×F": ([(D, F)], (B * T, D)),
        "MLP": ([(D, F), (D, F), (F, D)], (B * T, D)),
        "attention": ([(B, K, S, H), (B, K, S, H)], (B, K, G * T, H)),
    }[layer]
    sizes = [math.prod(shape) for shape in shapes]
    one = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def numbers(count: int) -> Tensor:
        return one.repeat(math.ceil(count / len(one)))[:count]

    x = numbers(math.prod(x_shape)).view(x_shape)
    num_copies = math.ceil(COLD_BYTES / (one.element_size() * sum(sizes)))
    copies = itertools.cycle(
        [part.view(shape) for part, shape in zip(copy.split(sizes), shapes, strict=True)]
        for copy in numbers(num_copies * sum(sizes)).view(num_copies, -1)
    )

    @torch.inference_mode()
    def run() -> Tensor:
        read = next(copies)
        if layer == "attention":
            return nnf.scaled_dot_product_attention(x, *read)
        if layer == "MLP":
            return (nnf.silu(x @ read[0]) * (x @ read[1])) @ read[2]
        return x @ read[0]

    return run
