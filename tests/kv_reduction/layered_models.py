"""Stacks small enough to compute attention by a loop over every query, and their layouts."""

import torch
from torch import nn

from lecture_util.kv_reduction.cla import LayoutTransformer
from lecture_util.kv_reduction.layout import Layer, Layout
from lecture_util.model.attention import apply_rope, rope_frequencies, rope_table
from lecture_util.model.config import Config

SMALL = Config(D=24, F=32, K=2, G=3, H=4, L=6, V=31, max_context=64)

LAYOUTS = {
    "full": Layout.full(6),
    **{f"window {W}": Layout.windowed(6, W) for W in (1, 2, 3, 5, 7)},
    "hybrid": Layout.hybrid(6, 3, every=3),
    "CLA2": Layout.cross_layer(6, 2),
    "CLA3": Layout.cross_layer(6, 3),
    "hybrid CLA2": Layout.hybrid(6, 4, every=3, share=2),
    "window CLA3": Layout.hybrid(6, 3, every=7, share=3),
    "three windows": Layout(
        (Layer(2, 0), Layer(5, 1), Layer(2, 0), Layer(None, 3), Layer(5, 1), Layer(None, 3))
    ),
}


def small_model(layout, config=SMALL, seed=1):
    """Torch's own initial weights, larger than Transformer.random's: every key matters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LayoutTransformer(config, layout).double()
        for name, weight in model.named_parameters():
            if "bias" in name:
                nn.init.normal_(weight)
    return model.eval().requires_grad_(False)


def tokens(B, T, seed=0, V=SMALL.V):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def by_hand(model, tokens_BT):
    """Logits of a stack, each query's keys picked out one by one. No mask, no cache, no kernel."""
    config, layout = model.config, model.layout
    (B, T), N, K, H = tokens_BT.shape, config.N, config.K, config.H
    rope = rope_table(rope_frequencies(config), torch.arange(T).expand(B, T))
    x_BTD, keys, values = model.embed(tokens_BT), {}, {}
    for i, block in enumerate(model.blocks):
        h_BTD = block.norm_attention(x_BTD)
        if layout.is_producer(i):
            q, k, v = (
                p.unflatten(-1, (-1, H)) for p in block.qkv(h_BTD).split((N * H, K * H, K * H), -1)
            )
            keys[i], values[i] = apply_rope(k, rope), v
        else:
            q = block.q(h_BTD).unflatten(-1, (-1, H))
        q = apply_rope(q, rope)
        W, source = layout.layers[i].window, layout.layers[i].reads
        mixed_BTNH = torch.zeros_like(q)
        for b in range(B):
            for t in range(T):
                seen = [s for s in range(T) if s <= t and (W is None or t - s < W)]
                for n in range(N):
                    k_PH, v_PH = (x[source][b, seen, n // config.G] for x in (keys, values))
                    mixed_BTNH[b, t, n] = (k_PH @ q[b, t, n] / H**0.5).softmax(0) @ v_PH
        x_BTD = x_BTD + block.out(mixed_BTNH.flatten(-2))
        x_BTD = x_BTD + block.mlp(block.norm_mlp(x_BTD))
    return model.head(model.norm(x_BTD))


def new_cache(model, B=1, capacity=40, slack=0):
    return model.new_cache(model.config, B, capacity, torch.float64, slack=slack)


def feed(model, cache, tokens_BT, chunks):
    """Logits of the tokens, fed in chunks of these sizes."""
    return torch.cat([model(part, cache) for part in tokens_BT.split(chunks, dim=1)], dim=1)


def held_state(cache):
    """Everything that a cache would go on from, copied."""
    rings = {
        i: (list(s.oldest), s.k_BSKH.clone(), s.v_BSKH.clone())
        for i, s in cache.stores.items()
        if hasattr(s, "oldest")
    }
    return list(cache.lengths), rings
