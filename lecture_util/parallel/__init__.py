"""Tensor parallelism: one model on M devices, each holding 1/M of the weights and of the KV cache.

sharding     cut a Transformer so that every rank keeps its share, through torch's own parallel API
processes    run a function in M processes that can talk to each other, and never hang
traffic      messages and bytes of a forward: predicted by a formula, counted as they are sent
step_time    what a sharded decode step should take: memory, waiting, and the link
demonstrate  two processes decode one model: same tokens, half the memory, the messages counted
"""
