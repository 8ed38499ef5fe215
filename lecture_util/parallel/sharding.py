"""Cut a Transformer into M shards, so that each of M ranks computes 1/M of every layer.

    qkv, gate_up   by output: each rank makes its own heads, its own channels of the MLP  no message
    out, down      by input: each rank multiplies what it made; the parts are added up    all-reduce
    embed          by vocabulary: the rank that has a token's row sends it, others zeros  all-reduce
    head           by vocabulary: each rank scores its share; the scores are joined       all-gather
    norms          whole, on every rank: they are small                                   no message

Attention needs no message at all: query head n reads KV head n // G, and both are on one rank, and
so are that head's keys and values in the cache. Hence 2*L + 1 all-reduces and one all-gather a
forward. Embedding and head could be kept whole, which saves two messages and costs memory: cut, the
weights of a rank are 1/M of the model's but for the norms, and a tied matrix is cut once for both.

Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3; torch.distributed.tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from lecture_util.model.config import Config
from lecture_util.model.transformer import Block, Transformer

from .traffic import vocabulary_rows

LINEARS = ("qkv", "out", "gate_up", "down")


class ShardError(ValueError):
    """The model cannot be cut into so many equal shards."""


def plan() -> dict[str, ParallelStyle]:
    """How each module is cut, as torch's parallelize_module reads it."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.qkv": ColwiseParallel(),
        "blocks.*.out": RowwiseParallel(),
        "blocks.*.gate_up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def shard(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Keep this rank's share of the model. In place, as parallelize_module; returns the model.

    Every rank of the mesh calls it on the same weights; nothing is sent. Afterwards each rank must
    make the same calls in the same order, and gets whole logits. `model.config` has the K and F of
    the shard, so a cache made with it holds this rank's heads. With M above K, each KV head is held
    by M/K ranks. For inference only.

    Raises: ShardError if M does not suit K, N, F or V; TypeError for layers other than Block with
            plain linear layers; ValueError if sharded already or on another kind of device. The
            model is then as it was.
    """
    check_model(model, mesh)
    M = mesh.size()
    whole, model.config = model.config, shard_config(model.config, M)
    K = model.config.K
    with torch.no_grad():
        for block in model.blocks:
            heads, block.heads = block.heads, (whole.N // M, K, K)
            block.qkv = _ready(block.qkv, lambda w, heads=heads: by_rank(w, heads, M))
            block.gate_up = _ready(block.gate_up, lambda w: by_rank(w, (whole.F, whole.F), M))
            block.out, block.down = _ready(block.out), _ready(block.down)
        model.head = _ready(model.head)
        parallelize_module(model, mesh, plan(), src_data_rank=None)  # None: nothing is sent
    if whole.tied:  # two modules, cut one by one, would hold two copies
        model.head.weight = model.embed.weight
    return model


def by_rank(weight: Tensor, heads: tuple[int, ...], M: int) -> Tensor:
    """Reorder the rows of stacked parts: rank 0's share of every part, then rank 1's, and so on.

    heads: of each part. A part with fewer heads than ranks has each head repeated M/heads times.
    Cut into M equal pieces, the result gives every rank a smaller stack of the same parts.

    Shapes: weight (rows, ...), rows a multiple of sum(heads) -> at least as many rows.
    Raises: ShardError if the rows are not, or a part's heads cannot be dealt to M ranks.
    """
    if len(weight) % sum(heads):
        raise ShardError(f"{len(weight)} rows are no multiple of the {sum(heads)} heads {heads}")
    if uneven := [n for n in heads if n % M and M % n]:
        raise ShardError(f"a part with {uneven[0]} heads cannot be dealt to M={M} ranks")
    parts = weight.unflatten(0, (sum(heads), -1)).split(heads)
    copies = [part.repeat_interleave(max(1, M // len(part)), dim=0) for part in parts]
    return torch.cat([part.unflatten(0, (M, -1)) for part in copies], dim=1).flatten(0, 2)


def shard_config(config: Config, M: int) -> Config:
    """The shape of one of M shards: K and F are its own, D and V the model's.

    Raises: ShardError naming the size that M does not suit, and the M that would do.
    """
    if not isinstance(config, Config):
        raise TypeError(f"config={config!r}: expected a Config, such as PUBLISHED['llama-2-13b']")
    if type(M) is not int or M < 1:
        raise ShardError(f"M={M!r} ranks: expected a whole number, at least 1")
    N, K, F = config.N, config.K, config.F
    if K % M and M % K:
        reason = (
            f"K={K} KV heads cannot be dealt to M={M} ranks: M must divide K, so that each rank "
            "holds K/M of them, or be a multiple of K, so that each is copied to M/K ranks"
        )
    elif N % M:
        reason = f"N={N} query heads are no multiple of M={M} ranks"
    elif F % M:
        reason = f"F={F} channels of the MLP are no multiple of M={M} ranks"
    elif not vocabulary_rows(config.V, M, M - 1):
        reason = f"V={config.V} rows of the vocabulary leave the last of M={M} ranks without any"
    else:
        held = max(K // M, 1)
        return replace(config, K=held, G=N // M // held, F=F // M)
    suits = [
        m
        for m in range(1, N + 1)
        if not (N % m or F % m or (K % m and m % K)) and vocabulary_rows(config.V, m, m - 1)
    ]
    raise ShardError(f"{reason}. This shape can be cut for M = {', '.join(map(str, suits))}")


def check_model(model: Transformer, mesh: DeviceMesh) -> None:
    """Raises: what `shard` says."""
    if not isinstance(model, Transformer):
        raise TypeError(f"model={model!r}: expected a Transformer")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise TypeError(f"mesh={mesh!r}: expected a DeviceMesh of one dimension, as from `run`")
    if isinstance(model.embed.weight, DTensor):
        raise ValueError("this model is sharded already: load or make it anew to cut it again")
    for layer, block in enumerate(model.blocks):
        if type(block) is not Block:
            raise TypeError(
                f"layer {layer} is a {type(block).__name__}: the plan knows the layers of Block "
                "only; another kind needs a plan of its own"
            )
        for name in LINEARS:
            if not isinstance(module := getattr(block, name), nn.Linear):
                raise TypeError(
                    f"layer {layer} has a {type(module).__name__} as {name}: shard the plain "
                    "nn.Linear, before it is quantized or replaced"
                )
    if model.device.type != mesh.device_type:
        raise ValueError(
            f"the model is on {model.device} but the mesh is of {mesh.device_type}: move the "
            f"model to this rank's {mesh.device_type} device first"
        )
    shard_config(model.config, mesh.size())


def held_bytes(model: nn.Module) -> int:
    """Bytes of the weights in this process's memory; what is shared counts once."""
    held = {}
    for weight in model.parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        held[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(held.values())


class ShardedLinear(nn.Linear):
    """nn.Linear for weights that are DTensors: none of our Linear's operators of oneDNN.

    Outside inference mode, within which DTensor (torch 2.13) works out anew at every call how a
    linear layer cut by input is computed: some 2 ms of a CPU each time.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return super().forward(x)


def _ready(linear: nn.Linear, rows: Callable[[Tensor], Tensor] = lambda w: w) -> ShardedLinear:
    """The same layer as a ShardedLinear, its rows put in another order."""
    made = ShardedLinear(
        linear.in_features, linear.out_features, linear.bias is not None, device="meta"
    )
    made.weight = nn.Parameter(rows(linear.weight.detach()), requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(rows(linear.bias.detach()), requires_grad=False)
    return made
