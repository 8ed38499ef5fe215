"""Shrinking the KV cache: fewer heads, a latent, shared layers, windows."""
