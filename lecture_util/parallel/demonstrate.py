"""Two processes decode one small model, and all that was predicted is held against what happened.

from lecture_util.parallel.demonstrate import demonstrate
print(demonstrate(M=2))
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from lecture_util.model.config import Config
from lecture_util.model.generate import generate, prefill
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.accounting import kv_cache_bytes, weight_bytes
from lecture_util.roofline.symbolic import sizes

from .processes import run
from .step_time import Link, rank_cache_bytes, rank_weight_bytes, this_link
from .traffic import CountTraffic, Traffic, forward_traffic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALL = Config(D=256, F=768, K=4, G=2, H=32, L=4, V=512)


@dataclass(frozen=True)
class Demonstration:
    """What M ranks did, beside one process with the whole model.

    Lists are by rank. whole_step_s and step_s: the median decode step, alone and sharded.
    """

    M: int
    largest_logit: float
    logits_gap: float
    same_tokens: bool
    whole_weight_bytes: int
    weight_bytes: list[int]
    predicted_weight_bytes: list[int]
    whole_cache_bytes: int
    cache_bytes: list[int]
    predicted_cache_bytes: int
    traffic: list[Traffic]
    predicted_traffic: Traffic
    whole_step_s: float
    step_s: float
    link: Link

    def __str__(self) -> str:
        predicted, counted = self.predicted_traffic, self.traffic[0]
        kinds = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in counted.counts.items())
        of_kinds = f" ({kinds})" if kinds else ""
        lines = [
            f"{self.M} ranks and one process: same tokens {self.same_tokens}, logits (up to "
            f"{self.largest_logit:.2f}) differ by at most {self.logits_gap:.0e}",
            f"weights  {self.whole_weight_bytes:,} bytes whole; on a rank "
            f"{self.weight_bytes[0]:,}, predicted {self.predicted_weight_bytes[0]:,}",
            f"KV cache {self.whole_cache_bytes:,} bytes whole; on a rank "
            f"{self.cache_bytes[0]:,}, predicted {self.predicted_cache_bytes:,}",
            f"messages {counted.messages} a step{of_kinds}, predicted {predicted.messages}; "
            f"{counted.payload_bytes:,} bytes, predicted {predicted.payload_bytes:,}",
            f"step     {1e3 * self.whole_step_s:.2f} ms whole, {1e3 * self.step_s:.2f} ms sharded; "
            f"a small all-reduce alone takes {1e6 * self.link.latency_s:.0f} µs here",
        ]
        return "\n".join(lines)


def demonstrate(
    M: int = 2,
    config: Config = SMALL,
    *,
    B: int = 2,
    prompt: int = 12,
    steps: int = 24,
    dtype: torch.dtype = torch.float32,
    timeout_s: float = 120.0,
) -> Demonstration:
    """Decode a random model whole and on M ranks. About 10 s on two cores, mostly torch's imports.

    Small layers on a CPU are no place to be faster: what a step saves in reading is less than what
    its messages cost. The bytes and messages are those of any machine.

    Raises: ShardError, ValueError or TypeError before a process is started; else as `run`.
    """
    B, prompt, steps = _checked(config, M, B, prompt, steps, dtype)
    config_of_rank = (config, B, prompt, steps, dtype)
    ranks = run(decode_both, M, *config_of_rank, timeout_s=timeout_s)
    width, S = dtype.itemsize, prompt + steps
    return Demonstration(
        M=M,
        largest_logit=max(r["largest_logit"] for r in ranks),
        logits_gap=max(r["logits_gap"] for r in ranks),
        same_tokens=all(r["same_tokens"] for r in ranks),
        whole_weight_bytes=weight_bytes(config, width),
        weight_bytes=[r["weight_bytes"] for r in ranks],
        predicted_weight_bytes=[
            int(rank_weight_bytes(config, M, width, rank=rank)) for rank in range(M)
        ],
        whole_cache_bytes=kv_cache_bytes(config, B, S, width),
        cache_bytes=[r["cache_bytes"] for r in ranks],
        predicted_cache_bytes=int(rank_cache_bytes(config, B, S, M, width)),
        traffic=[r["traffic"] for r in ranks],
        predicted_traffic=forward_traffic(config, B, 1, M, dtype_bytes=width),
        whole_step_s=max(r["whole_step_s"] for r in ranks),
        step_s=max(r["step_s"] for r in ranks),
        link=ranks[0]["link"],
    )


def _checked(
    config: Config, M: int, B: int, prompt: int, steps: int, dtype: torch.dtype
) -> tuple[int, int, int]:
    """B, prompt and steps, if ranks could do something with all of it."""
    from .sharding import shard_config

    shard_config(config, M)
    B, prompt = sizes(B=B, prompt=prompt)
    (steps,) = sizes(2, steps=steps)  # the first is counted, and the others timed
    if prompt + steps > config.max_context:
        raise ValueError(
            f"prompt={prompt} tokens and steps={steps} are more than the model's context of "
            f"{config.max_context}"
        )
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype is {dtype!r}: expected torch.float32, torch.bfloat16 or the like")
    return B, prompt, steps


def decode_both(
    mesh: DeviceMesh, config: Config, B: int, prompt: int, steps: int, dtype: torch.dtype
) -> dict:
    """On each rank: the whole model, then its shard, on the same prompts."""
    from .sharding import held_bytes, shard

    cpu = mesh.device_type == "cpu"
    device = torch.device("cpu") if cpu else torch.device(mesh.device_type, mesh.get_local_rank())
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(config.V, (B, prompt), generator=generator).tolist()
    model = Transformer.random(config, seed=0, dtype=dtype).to(device)
    whole = _decode(model, prompts, steps)
    shard(model, mesh)
    mine = _decode(model, prompts, steps)
    return {
        "largest_logit": float(whole["logits"].abs().max()),
        "logits_gap": float((mine["logits"] - whole["logits"]).abs().max()),
        "same_tokens": mine["tokens"] == whole["tokens"],
        "weight_bytes": held_bytes(model),
        "cache_bytes": mine["cache_bytes"],
        "traffic": mine["traffic"],
        "whole_step_s": whole["step_s"],
        "step_s": mine["step_s"],
        "link": this_link(mesh),
    }


@torch.inference_mode()
def _decode(model: Transformer, prompts: list[list[int]], steps: int) -> dict:
    """Tokens of greedy decoding; logits, bytes and messages of the step after the prompt."""
    tokens = generate(model, prompts, steps)
    cache, logits_BV = prefill(model, prompts, len(prompts[0]) + steps)
    tokens_B1 = logits_BV.argmax(-1, keepdim=True)
    with CountTraffic() as seen:
        logits_BTV = model(tokens_B1, cache)
    times = []
    for _ in range(steps - 1):
        start = perf_counter()
        last_BTV = model(tokens_B1, cache)
        float(last_BTV[0, 0, 0])  # on a GPU the call returns before it is done
        times.append(perf_counter() - start)
    return {
        "tokens": tokens,
        "logits": logits_BTV,
        "cache_bytes": cache.nbytes,
        "traffic": seen.traffic,
        "step_s": median(times),
    }
