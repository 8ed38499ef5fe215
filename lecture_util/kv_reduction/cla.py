"""Stacks in which layers share keys (cross-layer attention) or see windows, and their caches.

`LayeredPass` runs a `Layout` without a cache, to train or score. `LayeredCache` is the same pass
with a memory: a slab for each global producer, a ring for each windowed one, nothing for consumers.
Source: Brandon et al. 2024, arXiv:2405.12981.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lecture_util.model.attention import apply_rope, attend, causal_mask
from lecture_util.model.config import Config
from lecture_util.model.kv_cache import Cache, next_positions, shortened
from lecture_util.model.linear import Linear
from lecture_util.model.transformer import Block, Transformer

from .layout import Layout
from .window import Ring, Seen, Slab


class LayeredPass:
    """Attend within the tokens given, each layer by its own mask; keep nothing afterwards.

    A producer's keys, values and mask wait for its consumers and go when the last has read them.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.seen: dict[int, Seen] = {}  # of producers whose consumers are still to come

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        self.seen.clear()  # of a pass that failed midway
        return torch.arange(shape[-1], device=device).expand(shape)

    def attend(
        self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor | None = None, v_BTKH: Tensor | None = None
    ) -> Tensor:
        """A producer brings keys and values; a consumer brings none and reads its producer's."""
        source = self.layout.layers[layer].reads
        brings = k_BTKH is not None and v_BTKH is not None
        if brings != (source == layer):
            verb = "must bring its own" if source == layer else f"reads layer {source}'s"
            raise ValueError(
                f"layer {layer} {verb} keys and values: make the model's blocks with "
                "stack(config, layout), of the layout this cache has"
            )
        if source == layer:
            self.seen[layer] = self.take(layer, k_BTKH, v_BTKH)
        elif source not in self.seen:
            raise ValueError(
                f"layer {layer} reads layer {source}, which has not run in this pass: "
                "run the layers in order, from the first"
            )
        last = layer == self.layout.last_reader(source)
        k_BSKH, v_BSKH, mask_BTS = self.seen.pop(source) if last else self.seen[source]
        return attend(q_BTNH, k_BSKH, v_BSKH, mask_BTS)

    def take(self, layer: int, k_BTKH: Tensor, v_BTKH: Tensor) -> Seen:
        """What the step's queries may look at in this layer."""
        T, W = k_BTKH.shape[1], self.layout.layers[layer].window
        if W is None or W >= T:
            return k_BTKH, v_BTKH, None
        return k_BTKH, v_BTKH, causal_mask(torch.arange(T, device=k_BTKH.device), T, W)[None]

    def extend(self, T: int) -> None:
        pass


class LayeredCache(LayeredPass):
    """The cache of a stack of any layout: a store for each producer, none for consumers.

    capacity: tokens a row may have. Rings take W-1+slack slots (or `capacity`, if that is less).
    slack:    how many tokens `truncate` is sure to be able to take back from a windowed layer.
              Unequal prompts, padded on the right, need as much as their lengths differ.

    Bytes: `sizes.cache_bytes(config, layout, B, capacity, slack=slack)`, allocated at once.
    """

    def __init__(
        self,
        config: Config,
        B: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        layout: Layout,
        slack: int = 0,
    ) -> None:
        for name, value, least in (("B", B, 1), ("capacity", capacity, 1), ("slack", slack, 0)):
            if type(value) is not int or value < least:
                raise ValueError(
                    f"LayeredCache({name}={value!r}): expected a whole number, at least {least}"
                )
        _check_depth(config, layout)
        super().__init__(layout)
        self.capacity, self.lengths = capacity, [0] * B
        self.stores: dict[int, Slab] = {}
        for layer in layout.producers:
            W = layout.layers[layer].window
            if W is None:
                self.stores[layer] = Slab(config, B, capacity, dtype, device)
            else:
                self.stores[layer] = Ring(config, B, W, slack, capacity, dtype, device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held, used or not."""
        return sum(store.nbytes for store in self.stores.values())

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Raises: ShapeError if the batch differs; CacheFull, with nothing written, if too long."""
        self.seen.clear()
        return next_positions(self.lengths, self.capacity, shape, device)

    def take(self, layer: int, k_BTKH: Tensor, v_BTKH: Tensor) -> Seen:
        return self.stores[layer].take(k_BTKH, v_BTKH, self.lengths)

    def extend(self, T: int) -> None:
        self.lengths = [length + T for length in self.lengths]
        for store in self.stores.values():
            store.keep(self.lengths)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget all but the first tokens, of every row or row by row.

        Raises: ValueError, with nothing forgotten, if a row would grow, or if a ring has already
                overwritten what the shorter row would look back to.
        """
        wanted = shortened(self.lengths, lengths)
        rings = {i: store for i, store in self.stores.items() if isinstance(store, Ring)}
        for layer, ring in rings.items():
            for row, n in enumerate(wanted):
                needed, oldest = ring.oldest_needed(n), ring.oldest[row]
                if needed < n and needed < oldest:
                    raise ValueError(
                        f"truncate() to {n} tokens in row {row}, but layer {layer}'s window of "
                        f"{ring.W} then needs position {needed} and its ring (slack="
                        f"{ring.slack}) holds {oldest} on: make the cache with slack="
                        f"{ring.slack + oldest - needed} or more, or feed the row again"
                    )
        for ring in rings.values():
            ring.oldest = [min(pair) for pair in zip(ring.oldest, wanted, strict=True)]
        self.lengths = wanted


class SharedBlock(Block):
    """A consumer: it projects queries only and reads the keys of the layer its layout names."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        del self.qkv
        self.q = Linear(config.D, config.N * config.H, bias=config.qkv_bias)

    def attention(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        q_BTNH = self.q(x_BTD).unflatten(-1, (self.heads[0], -1))
        mixed_BTNH = cache.attend(self.layer, apply_rope(q_BTNH, rope), None, None)
        return self.out(mixed_BTNH.flatten(-2))


def stack(config: Config, layout: Layout) -> Callable[[Config, int], Block]:
    """What makes the layers of a layout: Transformer(config, block=stack(config, layout))."""
    _check_depth(config, layout)
    return lambda config, layer: (Block if layout.is_producer(layer) else SharedBlock)(
        config, layer
    )


class LayoutTransformer(Transformer):
    """A Transformer that knows its layout, so that nobody can forget a mask.

    Without a cache it runs a `LayeredPass`. `model.new_cache` makes the right cache and is what
    `generate(model, ..., new_cache=model.new_cache)` wants; partial(model.new_cache, slack=8) adds
    slack.

    Raises: ValueError if it is given a cache of another layout.
    """

    def __init__(self, config: Config, layout: Layout) -> None:
        super().__init__(config, block=stack(config, layout))
        self.layout = layout

    def features(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        cache = LayeredPass(self.layout) if cache is None else cache
        plain = self.layout if self.layout.is_full else None  # any cache without a layout will do
        if getattr(cache, "layout", plain) != self.layout:
            raise ValueError(
                f"a {type(cache).__name__} does not know this model's layout: make the cache with "
                "model.new_cache(config, B, capacity, dtype, device)"
            )
        return super().features(tokens_BT, cache)

    def new_cache(
        self,
        config: Config,
        B: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        slack: int = 0,
    ) -> LayeredCache:
        return LayeredCache(config, B, capacity, dtype, device, layout=self.layout, slack=slack)


def build(config: Config, layout: Layout) -> LayoutTransformer:
    """A fresh model of this layout, with torch's initial weights: for training."""
    return LayoutTransformer(config, layout)


def adopt(
    model: Transformer, layout: Layout, *, max_context: int | None = None
) -> LayoutTransformer:
    """The same weights under another layout. Nothing is copied: both models hold the same tensors.

    Consumers lose their key and value projections, which costs quality until the model is trained.

    max_context: if more than model.config has; a windowed checkpoint's config stops at its window,
                 where full attention would begin to differ.
    Raises: TypeError if the model's layers are not all `Block`.
    """
    strange = [type(block).__name__ for block in model.blocks if type(block) is not Block]
    if strange:
        raise TypeError(f"the model has layers of type {strange[0]}: adopt a model of plain Blocks")
    config = replace(model.config, max_context=max_context or model.config.max_context)
    with torch.device("meta"):
        adopted = LayoutTransformer(config, layout)
    weights, queries = model.state_dict(), config.N * config.H
    for layer in set(range(config.L)) - set(layout.producers):
        for part in ("weight", "bias") if config.qkv_bias else ("weight",):
            qkv = weights.pop(f"blocks.{layer}.qkv.{part}")
            weights[f"blocks.{layer}.q.{part}"] = qkv[:queries]
    adopted.load_state_dict(weights, assign=True)
    if config.tied:
        adopted.head.weight = adopted.embed.weight
    return adopted.eval().requires_grad_(False)


def _check_depth(config: Config, layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}: expected a Layout, such as Layout.full({config.L})")
    if layout.L != config.L:
        raise ValueError(
            f"the layout has {layout.L} layers but the config has L={config.L}: "
            f"make it for {config.L}"
        )
