"""Shrinking the KV cache: fewer heads, a latent, shared layers, windows, and all of them together.

layout        which layers see how far, and whose keys they read
window        two stores for a layer's keys: a slab of all, a ring of the last few
cla           stacks that share keys or see windows: with a cache, without, their blocks
gqa           fewer KV heads: a checkpoint's heads pooled by their means
latent_cache  MLA's widths, and the cache of latents: C + R numbers a token and layer
mla           multi-head latent attention, naive and absorbed on the same weights
mla_cost      FLOPs and bytes of the two modes
deepseek      DeepSeek-V2/V3 weights (dense layers) in our MLA
sizes         bytes held, bytes read and tokens a second of every technique, by formula
variants      one small model of each kind, alike in all but what it caches
"""
