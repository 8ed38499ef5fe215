"""Which layers of a stack see how far, and whose keys they read.

Two ideas shrink a cache without touching a head: a *window* (a layer sees its last W tokens and may
forget the rest) and *sharing* (a layer reads the keys and values of one below it and has none of
its own). A `Layout` says both for every layer; full attention is the layout that does neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lecture_util.model.attention import causal_mask


@dataclass(frozen=True)
class Layer:
    """window: W, the keys a query sees, itself included; None for all. reads: whose keys."""

    window: int | None
    reads: int


@dataclass(frozen=True)
class Layout:
    """A `Layer` for each layer of a stack, from the bottom up.

    A layer that reads its own keys is a *producer* and needs a cache; the others are *consumers*.

    Raises: ValueError naming the layer that reads from above, or from another consumer, or through
            another window than its producer keeps.
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if strange := [layer for layer in self.layers if not isinstance(layer, Layer)]:
            raise TypeError(f"a layout of {strange[0]!r}: expected Layer(window, reads)")
        if not self.layers:
            raise ValueError("a layout of no layers: pass at least one Layer(window, reads)")
        for i, layer in enumerate(self.layers):
            W, source = layer.window, layer.reads
            if W is not None:
                _whole("window", W)
            if type(source) is not int or not 0 <= source <= i:
                raise ValueError(
                    f"layer {i} reads the keys of layer {source!r}: expected itself, {i}, or one "
                    "below it, whose keys exist by then"
                )
            producer = self.layers[source]
            if producer.reads != source:
                raise ValueError(
                    f"layer {i} reads layer {source}, which has no keys of its own: "
                    f"read its producer, {producer.reads}"
                )
            if producer.window != W:
                raise ValueError(
                    f"layer {i} has window {W} but layer {source}, whose keys it reads, has "
                    f"{producer.window}: give both the same"
                )

    @classmethod
    def full(cls, L: int) -> Layout:
        """Every layer sees everything."""
        return cls.hybrid(L, None, every=1)

    @classmethod
    def windowed(cls, L: int, W: int) -> Layout:
        """Every layer sees W tokens. Source: Jiang et al. 2023, arXiv:2310.06825 (Mistral 7B)."""
        _whole("window", W)
        return cls(tuple(Layer(W, i) for i in range(_whole("L", L))))

    @classmethod
    def cross_layer(cls, L: int, share: int = 2) -> Layout:
        """`share` neighbours read the lowest one's keys: CLA2 for 2, CLA3 for 3.

        Source: Brandon et al. 2024, arXiv:2405.12981.
        """
        return cls.hybrid(L, None, every=1, share=share)

    @classmethod
    def hybrid(cls, L: int, W: int | None, every: int = 6, share: int = 1) -> Layout:
        """Layers every-1, 2*every-1, ... see everything, those between see W tokens.

        share: of each kind, so many layers in a row use one set of keys. Layers of a kind are
        neighbours even with one of the other kind between them.
        """
        _whole("every", every), _whole("share", share)
        layers: list[Layer] = []
        seen: dict[int | None, list[int]] = {}
        for i in range(_whole("L", L)):
            window = None if (i + 1) % every == 0 else W
            same_kind = seen.setdefault(window, [])
            same_kind.append(i)
            first = (len(same_kind) - 1) // share * share
            layers.append(Layer(window, same_kind[first]))
        return cls(tuple(layers))

    @classmethod
    def character_ai(cls, L: int, W: int = 1024, every: int = 6, share: int = 2) -> Layout:
        """Character.AI's recipe: 1 global layer in 6, the others W=1024, keys shared within a kind.

        Their multi-query attention is not a layout's business: config.with_kv_heads(1).
        Source: Character.AI, "Optimizing AI Inference at Character.AI", June 2024.
        """
        return cls.hybrid(L, W, every, share)

    @property
    def L(self) -> int:
        return len(self.layers)

    @property
    def producers(self) -> tuple[int, ...]:
        """The layers that compute and keep keys and values."""
        return tuple(i for i in range(self.L) if self.is_producer(i))

    @property
    def num_caches(self) -> int:
        return len(self.producers)

    @property
    def is_full(self) -> bool:
        """Nothing is hidden and nothing shared: any cache will do."""
        return all(layer == Layer(None, i) for i, layer in enumerate(self.layers))

    def is_producer(self, layer: int) -> bool:
        return self.layers[layer].reads == layer

    def last_reader(self, producer: int) -> int:
        """The highest layer that reads this producer's keys; itself if it doesn't share."""
        return max(i for i, layer in enumerate(self.layers) if layer.reads == producer)

    def mask_TS(self, layer: int, T: int) -> Tensor:
        """What each of T tokens sees in this layer, with nothing before them. bool, T = S."""
        return causal_mask(torch.arange(T), T, self.layers[layer].window)

    def receptive_field(self, S: int | None = None, layer: int = -1) -> int | float:
        """How many positions a layer's output depends on, its own included, of the S so far.

        1 + L*(W-1) for windows that share nothing, since each layer reaches W-1 further back. A
        consumer reaches no further than its producer's keys, which are older by the layers between.

        S:     None for no limit (infinity once a layer sees everything).
        layer: the last if not given.
        """
        if S is not None:
            _whole("S", S)
        if not -self.L <= layer < self.L:
            raise ValueError(f"layer {layer} of {self.L}: expected 0 to {self.L - 1}")
        reach = [0]  # reach[i]: how far back the input of layer i depends on tokens
        for i, (W, source) in enumerate((x.window, x.reads) for x in self.layers):
            reach.append(max(reach[i], math.inf if W is None else W - 1 + reach[source]))
        field = 1 + reach[layer % self.L + 1]
        return field if S is None else min(S, field)


def _whole(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
    return value
