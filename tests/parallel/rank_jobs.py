"""What the tests' processes do: decode small models whole and sharded, and say what they saw.

Weights are larger than 0.02, with which a model hardly looks back.
"""

import os
from dataclasses import replace

import torch
from torch import nn

from lecture_util.model import linear
from lecture_util.model.config import Config
from lecture_util.model.generate import generate, prefill
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.transformer import Block, Transformer
from lecture_util.parallel.demonstrate import decode_both
from lecture_util.parallel.sharding import ShardError, held_bytes, shard
from lecture_util.parallel.traffic import CountTraffic
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.engine import Engine
from lecture_util.serving.paging import PagedCache
from lecture_util.serving.request import Params
from lecture_util.serving.scheduler import Policy

GQA = Config(D=20, F=36, K=2, G=3, H=6, L=2, V=23, max_context=96)  # 2 and 3 don't divide V
TWO = {
    "gqa": GQA,
    "mha, tied": Config(D=13, F=14, K=4, G=1, H=4, L=1, V=17, tied=True, max_context=96),
    "biases": replace(GQA, G=7, H=2, L=1, qkv_bias=True, tied=True, V=32),
    "one KV head": replace(GQA, K=1, G=4, H=4, L=1, qkv_bias=True),
}
THREE = {
    "gqa": Config(D=18, F=9, K=3, G=3, H=4, L=2, V=25, tied=True, max_context=96),
    "six KV heads": Config(D=11, F=15, K=6, G=2, H=2, L=1, V=7, max_context=96),
    "one KV head": Config(D=8, F=3, K=1, G=3, H=2, L=1, V=11, max_context=96),
}
DEMONSTRATION = (replace(GQA, V=24), 3, 4, 5, torch.float64)  # config, B, prompt, steps, dtype
PROMPTS = ([3, 1, 2, 0, 1, 3, 2], [2], [1, 0, 3, 3, 2])
STEPS = 21


def tiny(config, dtype=torch.float64, seed=3):
    model = Transformer.random(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn(weight.shape, generator=generator).to(dtype)
            else:
                weight *= 12.0
    return model


@torch.inference_mode()
def logits_of(model):
    """A pass without a cache, then unequal prompts with one: steps of 1, 3 and 1 tokens."""
    V = model.config.V
    tokens_BT = torch.arange(3 * 7).view(3, 7) * 5 % V
    cache, logits_BV = prefill(model, PROMPTS, 16)
    steps = [model(tokens_BT[:, :T], cache) for T in (1, 3, 1)]
    return [model(tokens_BT), logits_BV, *steps], cache.nbytes


def counted(model, B=3, T=7):
    """Traffic of: a pass over all, a prefill by `generate`'s, a decode step."""
    with torch.inference_mode():
        tokens_BT = torch.ones(B, T, dtype=torch.long)
        with CountTraffic() as whole:
            model(tokens_BT)
        with CountTraffic() as first:
            cache, _ = prefill(model, tokens_BT.tolist(), T + 1)
        with CountTraffic() as step:
            model(tokens_BT[:, :1], cache)
    return whole.traffic, first.traffic, step.traffic


def served(model):
    """Four requests through an engine of three slots and little memory, on every rank alike."""
    cache = PagedCache(model.config, 12, 4, model.dtype)
    policy = Policy(slots=3, token_budget=6)
    engine = Engine(model, cache, policy, VirtualClock(), graphs=False)
    done = engine.generate([*PROMPTS, [3, 3]], Params(max_new_tokens=5))
    return [c.tokens for c in done], cache.nbytes


def decode_cases(mesh, cases, steps):
    """By name of the case, what this rank saw of its shard.

    Of each shape that comes for the first time, DTensor works out how it is computed; so they are
    few, and the same in all that a model does.
    """
    about = {"rank": mesh.get_local_rank(), "pid": os.getpid(), "threads": torch.get_num_threads()}
    for name, config in cases.items():
        model = shard(tiny(config), mesh)
        logits, cache_bytes = logits_of(model)
        about[name] = {
            "logits": logits,
            "cache_bytes": cache_bytes,
            "weight_bytes": held_bytes(model),
            "tokens": generate(model, PROMPTS, steps),
            "traffic": counted(model),
            "config": model.config,
        }
    for dtype in (torch.float32, torch.bfloat16):
        about[dtype] = counted(shard(tiny(cases["gqa"], dtype), mesh))
    return about


def decode_and_refuse(mesh, cases, steps):
    return decode_cases(mesh, cases, steps) | {
        "served": served(shard(tiny(GQA), mesh)),
        "refusals": refusals(mesh),
        "by hand": by_hand(mesh),
        "demonstrated": decode_both(mesh, *DEMONSTRATION),
        "oneDNN": with_onednn(mesh),
        "by torch": counted_by_torch(mesh),  # last: CommDebugMode (torch 2.13) leaves its hooks
    }


class OtherBlock(Block):
    pass


class NoLinear(nn.Module):
    pass


def refusals(mesh):
    """By kind of model, the error and whether the model still is what it was."""
    models = {
        "K": tiny(replace(GQA, K=3, G=2)),
        "block": Transformer.random(GQA, block=OtherBlock),
        "layer": tiny(GQA),
        "device": tiny(GQA).to("meta"),
        "twice": shard(tiny(GQA), mesh),
    }
    models["layer"].blocks[1].down = NoLinear()
    said = {}
    for kind, model in [*models.items(), ("no model", "gpt")]:
        before = repr(model), getattr(model, "config", None)
        try:
            shard(model, mesh)
        except (ShardError, TypeError, ValueError) as error:
            unchanged = (repr(model), getattr(model, "config", None)) == before
            said[kind] = type(error).__name__, str(error), unchanged
    return said


def with_onednn(mesh):
    """Largest difference of logits in fp32 where the whole model uses torch's oneDNN operator."""
    if linear.OPERATOR is None:
        return 0.0
    linear.ONEDNN = linear.OPERATOR  # as on processors that are not Intel's
    model = tiny(GQA, torch.float32)
    whole, _ = logits_of(model)
    mine, _ = logits_of(shard(model, mesh))
    return max(float((a - b).abs().max()) for a, b in zip(whole, mine, strict=True))


def counted_by_torch(mesh):
    """A decode step's collectives by torch's own count."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = shard(tiny(GQA), mesh)
    with torch.inference_mode(), CommDebugMode() as seen:
        model(torch.ones(2, 1, dtype=torch.long), KVCache(model.config, 2, 4, model.dtype))
    return {op._qualified_op_name.split("::")[1]: n for op, n in seen.get_comm_counts().items()}


def by_hand(mesh):
    """Collectives called without DTensor, of known sizes."""
    import torch.distributed as dist

    M = mesh.size()
    with CountTraffic() as seen:
        dist.all_reduce(torch.ones(5))
        parts = torch.empty(M * 3)
        dist.all_gather_into_tensor(parts, torch.ones(3))
        dist.broadcast(torch.ones(2, dtype=torch.float64), 0)
        torch.ones(7) + 1
    return seen.traffic


def real_model(mesh, prompts, steps):
    """SmolLM2 in fp32 on this rank."""
    from lecture_util.model import weights

    model = shard(weights.load("smollm2-135m"), mesh)
    cache, logits_BV = prefill(model, prompts, 40)
    with torch.inference_mode(), CountTraffic() as seen:
        step_BTV = model(logits_BV.argmax(-1, keepdim=True), cache)
    return {
        "logits": [logits_BV, step_BTV[:, -1]],
        "tokens": generate(model, prompts, steps),
        "weight_bytes": held_bytes(model),
        "cache_bytes": cache.nbytes,
        "traffic": seen.traffic,
    }


def on_gpus(mesh):
    """fp32 logits of a shard on this rank's GPU, and the whole model's."""
    device = torch.device("cuda", mesh.get_local_rank())
    config = replace(GQA, D=64, H=16, L=3)
    model = tiny(config, torch.float32).to(device)
    tokens_BT = torch.arange(10, device=device).view(2, 5)
    with torch.inference_mode():
        whole = model(tokens_BT).cpu()
        model = shard(model, mesh)
        mine = model(tokens_BT).cpu()
    return whole, mine, generate(model, PROMPTS, 24), counted_on(model, device)


def counted_on(model, device):
    with torch.inference_mode(), CountTraffic() as seen:
        model(torch.ones(2, 1, dtype=torch.long, device=device))
    return seen.traffic
