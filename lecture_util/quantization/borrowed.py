"""bitsandbytes' layers, behind the interface of ours: its Linear8bitLt and its Linear4bit."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from .layer import QuantizedLinear, through


class Borrowed(QuantizedLinear):
    """bitsandbytes' layer, which keeps its own tensors, behind the interface of ours.

    It always runs in eval mode: for training, its CPU code multiplies dequantized weights instead.
    Repacked 4-bit weights have no gradient there, so x gets it from `dequantized`. A state_dict of
    such layers is bitsandbytes' own: keep the float model's, and quantize again.
    """

    def __init__(self, layer: nn.Linear, weight_bytes: int, dtype: torch.dtype) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias)
        self.layer, self.dtype, self._weight_bytes = layer, dtype, weight_bytes
        self.train(False)

    @property
    def weight_bytes(self) -> int:
        """As stored. Linear4bit unpacks its scales at the first call on a CPU with AVX512-BF16."""
        return self._weight_bytes

    @property
    def _repacked(self) -> bool:
        state = getattr(self.layer.weight, "quant_state", None)
        return getattr(state, "packing_format_for_cpu", False)

    def dequantized(self) -> Tensor:
        """What the layer multiplies by: the identity, sent through it."""
        device = self.layer.weight.device
        with torch.no_grad():
            product_DF = self.layer(torch.eye(self.in_features, dtype=self.dtype, device=device))
        if self.layer.bias is not None:
            product_DF = product_DF - self.layer.bias
        return product_DF.T.float()

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if x.ndim == 1:  # which its CPU code does not take
            return self.forward(x[None])[0]
        return through(x, self.layer, self.dequantized)

    def train(self, mode: bool = True):
        return super().train(False)

    def state_dict(self, *args, **kwargs):
        state = getattr(self.layer.weight, "quant_state", None)
        if self._repacked and not state.original_nested:
            raise RuntimeError(
                "bitsandbytes repacked this layer at its first call, and would mix up its scales "
                "in undoing that for a state_dict (seen in 0.50.2): keep the float model's, or use "
                "NF4Linear"
            )
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        raise RuntimeError(
            f"{prefix.rstrip('.')} is a layer of bitsandbytes, made from float weights: load those "
            "into the float model and quantize it again, with replace_linears"
        )

    def _apply(self, fn, recurse=True):
        weight, state = self.layer.weight, getattr(self.layer, "state", None)
        if self._repacked and fn(weight.new_empty(0)).device != weight.device:
            raise RuntimeError(
                "bitsandbytes repacked this layer for the CPU at its first call: move the float "
                "model first and quantize it there"
            )
        super()._apply(fn, recurse)
        if state is not None:  # Linear8bitLt moves these only when it is moved by itself
            state.CB, state.SCB = weight.data, state.SCB.to(weight.device)
        return self


def bnb_int8(linear: nn.Linear, threshold: float = 6.0) -> Borrowed:
    """bitsandbytes' Linear8bitLt with this layer's weights.

    It takes x and the weights as fp16: what is smaller than 6e-8 becomes 0 before it is quantized.
    Raises: ValueError for weights beyond fp16.
    """
    nn8 = _bitsandbytes()
    layer = nn8.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
        threshold=threshold,
        device="meta",
    )
    _check_finite(linear)
    if not linear.weight.half().isfinite().all():
        raise ValueError(
            f"a weight of {linear.weight.abs().max().item():.3g} is beyond fp16, through which "
            "bitsandbytes takes them: Int8Linear goes through fp32"
        )
    layer.weight = nn8.Int8Params(linear.weight.detach().cpu(), requires_grad=False)
    layer = _with_bias(layer, linear).to(linear.weight.device)  # which quantizes
    layer.init_8bit_state()  # as its first call would
    return Borrowed(layer, layer.state.CB.nbytes + layer.state.SCB.nbytes, linear.weight.dtype)


def bnb_nf4(linear: nn.Linear, blocksize: int = 64, double: bool = False) -> Borrowed:
    """bitsandbytes' Linear4bit with this layer's weights in NF4.

    On a CPU with AVX512-BF16 it repacks at the first call and then computes in bf16 throughout.
    """
    nn4, w = _bitsandbytes(), linear.weight.detach()
    if blocksize not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(
            f"blocksize={blocksize}: bitsandbytes takes powers of two from 32 to 4096; ours, in "
            "NF4Linear, takes any"
        )
    if linear.in_features % blocksize and w.device.type == "cpu":
        raise ValueError(
            f"rows of {linear.in_features} weights don't end with blocks of {blocksize}, where "
            "bitsandbytes (seen in 0.50.2, with AVX-512) reads back other blocks' scales: choose "
            "a block size that divides them, or NF4Linear"
        )
    layer = nn4.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=w.dtype,
        quant_type="nf4",
        device="meta",
    )
    _check_finite(linear)
    layer.weight = nn4.Params4bit(
        w.clone(),
        requires_grad=False,
        blocksize=blocksize,
        compress_statistics=double,
        quant_type="nf4",
        module=layer,
    )
    layer = _with_bias(layer, linear).to(w.device)  # which quantizes
    if linear.out_features % 32:
        layer.support_avx512bf16_for_cpu = False  # its repacking doesn't take such shapes
    state = layer.weight.quant_state
    stored = [layer.weight, state.absmax, *([state.state2.absmax, state.offset] if double else [])]
    return Borrowed(layer, sum(part.nbytes for part in stored), w.dtype)


def _with_bias(layer: nn.Linear, linear: nn.Linear) -> nn.Linear:
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return layer.requires_grad_(False)


def _check_finite(linear: nn.Linear) -> None:
    if not linear.weight.isfinite().all():
        raise ValueError("the layer holds NaN or infinite weights: mend the checkpoint first")


def _bitsandbytes():
    """Its layers; imported here because it is slow to load and warns of a package it can spare.

    It also warns at each call that x becomes fp16, which `bnb_int8` says once.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        from bitsandbytes import nn as layers
    except ImportError as error:
        raise ImportError(
            f"bitsandbytes is not to be had here ({error}): install it, or use NF4Linear and "
            "Int8Linear, which store the same"
        ) from error
    return layers
