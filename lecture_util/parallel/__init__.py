"""Tensor parallelism: one model on M devices, each holding 1/M of the weights and of the KV cache.

sharding     cut a Transformer so that every rank keeps its share, through torch's own parallel API
processes    run a function in M processes that can talk to each other, and never hang
rank         the life of one of these processes
traffic      messages and bytes of a forward: predicted by a formula, counted as they are sent
step_time    what a sharded decode step should take: memory, waiting, and the link
demonstrate  two processes decode one model: same tokens, half the memory, the messages counted
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .processes import run
    from .sharding import shard
    from .step_time import sharded_step
    from .traffic import forward_traffic

__all__ = ["forward_traffic", "run", "shard", "sharded_step"]

# `demonstrate` is not among them: the name is its module's.
_HOMES = {
    "forward_traffic": "traffic",
    "run": "processes",
    "shard": "sharding",
    "sharded_step": "step_time",
}


def __getattr__(name: str) -> Any:
    """What is asked for is imported then: a new rank comes by here, and must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
