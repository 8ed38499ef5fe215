"""How fast could it go? FLOPs and bytes by formula, peaks by data sheet, seconds by the clock.

hardware    accelerators' published peaks, and this machine's, measured
timing      run a function several times; say how long it took and how much that varied
accounting  FLOPs and bytes of a matmul, an MLP, attention, a whole forward pass
symbolic    what lets one formula be a number and algebra
step_time   from a cost to seconds: the decode step and the prefill
"""

from lecture_util.roofline.accounting import (
    Cost,
    attention,
    crossover_batch,
    forward,
    forward_flops,
    kv_bytes_per_token,
    kv_cache_bytes,
    matmul,
    mlp,
    num_params,
    params_by_part,
    weight_bytes,
    weight_bytes_read,
)
from lecture_util.roofline.hardware import ACCELERATORS, DTYPE_BYTES, Accelerator, this_machine
from lecture_util.roofline.step_time import PrefillEstimate, StepEstimate, decode_step, prefill
from lecture_util.roofline.symbolic import symbolic_config, symbols
from lecture_util.roofline.timing import Timing, format_bytes, format_seconds, measure, stopwatch

__all__ = [
    "ACCELERATORS",
    "DTYPE_BYTES",
    "Accelerator",
    "Cost",
    "PrefillEstimate",
    "StepEstimate",
    "Timing",
    "attention",
    "crossover_batch",
    "decode_step",
    "format_bytes",
    "format_seconds",
    "forward",
    "forward_flops",
    "kv_bytes_per_token",
    "kv_cache_bytes",
    "matmul",
    "measure",
    "mlp",
    "num_params",
    "params_by_part",
    "prefill",
    "stopwatch",
    "symbolic_config",
    "symbols",
    "this_machine",
    "weight_bytes",
    "weight_bytes_read",
]
