"""Mamba: a layer that remembers a state of fixed size, and lets the input choose what enters it.

    here          paper, and its code     here          paper, and its code
    D             D, d_model              W             d_conv: inputs a convolution sees
    E = 2*D       E·D, d_inner            R             dt_rank = ceil(D/16); not MLA's R
    Z             N, d_state              tail_BTE      conv_state, W - 1 inputs
    A_log_EZ      A = -exp(A_log)         state_BEZ     ssm_state, h
    skip_E        D, beside A, B and C    dt_bias_E     dt_proj.bias

Source: Gu & Dao 2023, arXiv:2312.00752, section 3.4 and figure 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from lecture_util.model.config import Config
from lecture_util.model.generate import check_prompts
from lecture_util.model.kv_cache import Cache
from lecture_util.model.linear import Linear
from lecture_util.model.shapes import ShapeError, check_shapes
from lecture_util.model.transformer import RMSNorm, Transformer
from lecture_util.roofline.accounting import Cost

from .selective import fast_selective_scan
from .state import State, States, keep_state, state_of


class MambaBlock(nn.Module):
    """x + mix(norm(x)), in place of attention and MLP both.

    A layer of Transformer(config, block=MambaBlock): run as block(x, rope, cache), where it leaves
    the rotations alone and keeps its state in a cache of `States`.
    """

    def __init__(
        self, config: Config, layer: int, Z: int = 16, W: int = 4, expand: int = 2
    ) -> None:
        super().__init__()
        for name, size in (("Z", Z), ("W", W), ("expand", expand)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}={size!r}: expected a whole number, at least 1")
        D, E, R = config.D, expand * config.D, _rank(config)
        self.layer, self.parts = layer, (R, Z, Z)
        self.norm = RMSNorm(D, config.norm_eps)
        self.u_gate = Linear(D, 2 * E, bias=False)
        self.conv_EW = nn.Parameter(torch.empty(E, W).uniform_(-(W**-0.5), W**-0.5))
        self.conv_bias_E = nn.Parameter(torch.zeros(E))
        self.dt_B_C = Linear(E, R + 2 * Z, bias=False)
        self.dt = Linear(R, E, bias=False)  # its bias is dt_bias_E, added in one place
        nn.init.uniform_(self.dt.weight, -(R**-0.5), R**-0.5)
        step_E = torch.empty(E).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias_E = nn.Parameter(step_E.expm1().log())  # softplus of it is the step
        self.A_log_EZ = nn.Parameter(torch.arange(1.0, Z + 1).log().repeat(E, 1))
        self.skip_E = nn.Parameter(torch.ones(E))
        self.out = Linear(E, D, bias=False)

    def forward(
        self, x_BTD: Tensor, rope: Any, cache: Cache, mask_BT: Tensor | None = None
    ) -> Tensor:
        mixed_BTD, state = self.mix(self.norm(x_BTD), state_of(cache, self.layer), mask_BT)
        keep_state(cache, self.layer, state)
        return x_BTD + mixed_BTD

    def mix(
        self, x_BTD: Tensor, state: State | None = None, mask_BT: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Any number of tokens from any state: training, prefill, a chunk and a step are one path.

        state:   (tail_BTE, state_BEZ), the last W - 1 inputs of the convolution and what the scan
                 remembers; None at the start. It stays as it is; a new one comes back.
        mask_BT: False where a row is padding, on its left. Padding is zeroed before the
                 convolution and again after, whose bias would make something of nothing.

        Shapes: x_BTD, mask_BT -> out_BTD, (tail_BTE of T = W - 1, state_BEZ).
        Cost:   6*D*E + 4*E*(R + Z) FLOPs a token in the projections, and the scan.
        """
        if mask_BT is not None:
            _check_padding(x_BTD, mask_BT)
        tail_BTE, state_BEZ = (None, None) if state is None else state
        u_BTE, gate_BTE = self.u_gate(x_BTD).chunk(2, dim=-1)
        u_BTE = _zero(u_BTE, mask_BT)
        u_BTE, tail_BTE = causal_conv(u_BTE, self.conv_EW, self.conv_bias_E, tail_BTE)
        u_BTE = _zero(nnf.silu(u_BTE), mask_BT)
        dt_BTR, B_BTZ, C_BTZ = self.dt_B_C(u_BTE).split(self.parts, dim=-1)
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        delta_BTE = nnf.softplus(self.dt(dt_BTR).to(wide) + self.dt_bias_E.to(wide))
        A_EZ = -self.A_log_EZ.to(wide).exp()
        y_BTE, state_BEZ = fast_selective_scan(
            u_BTE, delta_BTE, A_EZ, B_BTZ, C_BTZ, self.skip_E, state_BEZ
        )
        return self.out(y_BTE * nnf.silu(gate_BTE)), (tail_BTE, state_BEZ)


def causal_conv(
    u_BTE: Tensor, weight_EW: Tensor, bias_E: Tensor, tail_BTE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each channel's weighted sum of its last W inputs; the last weight is for the newest.

    tail_BTE: the W - 1 inputs before these, as they came in; None, the start, stands for zeros.
    A chunk shorter than that pushes the oldest out of a copy: the tail given stays as it is.

    Shapes: u_BTE, weight_EW, bias_E -> out_BTE, tail_BTE of T = W - 1.
    """
    W = check_shapes(u_BTE=u_BTE, weight_EW=weight_EW, bias_E=bias_E)["W"]
    B, T, E = u_BTE.shape
    if tail_BTE is None:
        tail_BTE = u_BTE.new_zeros(B, W - 1, E)
    if tail_BTE.shape != (B, W - 1, E):
        raise ShapeError(
            f"tail_BTE has shape {tuple(tail_BTE.shape)}: expected {(B, W - 1, E)}, the "
            f"{W - 1} inputs before u_BTE"
        )
    inputs_BTE = torch.cat((tail_BTE, u_BTE), dim=1)
    shifted = (inputs_BTE[:, w : w + T] * weight_EW[:, w] for w in range(W))
    # Without clone() the W - 1 inputs would keep the whole chunk in memory.
    return sum(shifted, start=bias_E), inputs_BTE[:, T:].clone()


@torch.inference_mode()
def prefill_unequal(model: Transformer, prompts: Sequence[Sequence[int]]) -> tuple[States, Tensor]:
    """Run prompts of unequal length together, padded on the left, where a state is still empty.

    Padding on the right, as a KV cache likes it, would go into the state and could not be cut off.

    Shapes: B prompts -> States that model(tokens_BT, states) continues, logits_BV of what is next.
    """
    strange = [type(block).__name__ for block in model.blocks if not isinstance(block, MambaBlock)]
    if strange:
        raise TypeError(f"the stack has a {strange[0]}: expected a MambaBlock in every layer")
    prompts = check_prompts(model, prompts, 0)
    T = max(map(len, prompts))
    left = [[0] * (T - len(prompt)) + prompt for prompt in prompts]
    x_BTD = model.embed(torch.tensor(left, device=model.device))
    first_B1 = torch.tensor([[T - len(prompt)] for prompt in prompts], device=model.device)
    mask_BT = torch.arange(T, device=model.device) >= first_B1
    states = States(model.config, len(prompts), T, model.dtype, model.device)
    for block in model.blocks:
        x_BTD = block(x_BTD, None, states, mask_BT)
    states.extend(T)
    return states, model.head(model.norm(x_BTD[:, -1]))


def mamba_state_bytes(
    config: Config, B: Any = 1, dtype_bytes: Any = 2, Z: Any = 16, W: Any = 4, expand: Any = 2
) -> Any:
    """Bytes of the states of all layers, at any context: E*Z in fp32, (W-1)*E in the dtype."""
    E = expand * config.D
    return config.L * B * (4 * E * Z + dtype_bytes * (W - 1) * E)


def mamba_decode_cost(
    config: Config, B: Any = 1, dtype_bytes: Any = 2, Z: Any = 16, W: Any = 4, expand: Any = 2
) -> Cost:
    """One token for each of B sequences through the layers: no S, the step costs the same always.

    Counted as elsewhere in the course: a multiply-add as 2 FLOPs; embedding and head left out.
    """
    D, E, R = config.D, expand * config.D, _rank(config)
    matrices = 3 * D * E + E * (R + 2 * Z) + R * E + E * W
    weights = matrices + E * Z + 3 * E + D  # and A, two biases, the skip, the norm
    states = mamba_state_bytes(config, B, dtype_bytes, Z, W, expand)
    flops = config.L * B * (2 * matrices + 6 * E * Z)
    return Cost(flops, config.L * weights * dtype_bytes + states, states)


def _rank(config: Config) -> Any:
    return -(-config.D // 16)


def _zero(x_BTE: Tensor, mask_BT: Tensor | None) -> Tensor:
    return x_BTE if mask_BT is None else x_BTE.masked_fill(~mask_BT[..., None], 0)


def _check_padding(x_BTD: Tensor, mask_BT: Tensor) -> None:
    check_shapes(x_BTD=x_BTD, mask_BT=mask_BT)
    if mask_BT.dtype != torch.bool:
        raise TypeError(f"mask_BT is {mask_BT.dtype}: expected bool, False where a row is padding")
    if (mask_BT[:, :-1] & ~mask_BT[:, 1:]).any():
        raise ValueError(
            "mask_BT has padding after a token: pad on the left, where the state is still empty"
        )
