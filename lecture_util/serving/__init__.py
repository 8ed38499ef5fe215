"""Serving: many requests on one model, token-identical to one at a time, in little memory.

request          what is asked, what runs, what comes back
trace            made-up traffic: Poisson arrivals, long-tailed lengths
scheduler        iteration-level scheduling: who computes how many tokens next
flat             selective batching: a flat run of tokens, attention sequence by sequence
slots            contiguous memory: a row for each sequence
static_batching  fill a batch once, keep it to its end: what the others are compared with
executor         the real model does the scheduler's work
clock            seconds as they pass, seconds by a formula
loop             plan, compute, hand out, let go
records          what the loop writes down of each forward
simulate         the same loop with a formula in the model's place
metrics          throughput, TTFT, time per token, use of memory
blocks           the block allocator: counts, copy-on-write, eviction
prefix           the prefix cache: chained hashes that point, tokens that decide
paging           paged memory for the scheduler and the model
contiguous       first-fit regions of unequal size, to measure what they waste
graphs           decode steps as CUDA graphs, in padded batches of a few sizes
client           the same requests to vLLM, over HTTP
wire             HTTP and server-sent events, one kind of error
engine           the public face: generate, stream, cancel, stats
"""

from .engine import Engine
from .request import Completion, Params, Request
from .scheduler import Policy

__all__ = ["Completion", "Engine", "Params", "Policy", "Request"]
