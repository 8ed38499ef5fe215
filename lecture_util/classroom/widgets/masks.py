"""What every layer of a small stack sees, keeps and reaches: the sets behind the mask viewer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lecture_util.kv_reduction.layout import Layout

DILATION, FIRST = 2, 2  # of a dilated window: every 2nd key; with first tokens: 2 of them


@dataclass(frozen=True)
class Stack:
    """Masks of all layers for T positions and as many again, whose queries are yet to come.

    masks_LTS: bool; `T` is half its length. reads: whose keys each layer uses. kinds: in words.
    """

    masks_LTS: np.ndarray
    reads: tuple[int, ...]
    kinds: tuple[str, ...]

    @property
    def T(self) -> int:
        return self.masks_LTS.shape[-1] // 2

    def sees(self, layer: int) -> np.ndarray:
        """The layer's mask, bool (T, T): query down, key across."""
        return self.masks_LTS[layer, : self.T, : self.T]

    def kept(self, layer: int, position: int) -> np.ndarray:
        """The keys up to this position that a later query of the layer will look at. bool (T,)"""
        later_TS = self.masks_LTS[layer, position + 1 :, : self.T]
        return later_TS.any(0) & (np.arange(self.T) <= position)

    def reach(self, layer: int, position: int) -> np.ndarray:
        """What this layer's output at this position depends on: bool, (layer + 2, T).

        Row 0 is the tokens, row i+1 the output of layer i. A token's output depends on its own
        input and on the inputs that the keys it sees were made of: the producer's, which for a
        layer that shares keys lie further down.
        """
        needed = np.zeros((layer + 2, self.T), dtype=bool)
        needed[layer + 1, position] = True
        for i in range(layer, -1, -1):
            needed[i] |= needed[i + 1]
            needed[self.reads[i]] |= self.sees(i)[needed[i + 1]].any(0)
        return needed


def _full(T: int, L: int, W: int, every: int, share: int) -> Stack:
    return _of(Layout.cross_layer(L, share), T)


def _window(T: int, L: int, W: int, every: int, share: int) -> Stack:
    return _of(Layout.hybrid(L, W, every=L + 1, share=share), T)


def _hybrid(T: int, L: int, W: int, every: int, share: int) -> Stack:
    return _of(Layout.hybrid(L, W, every, share), T)


def _dilated(T: int, L: int, W: int, every: int, share: int) -> Stack:
    """W keys, every second one: twice as far for the same work. Longformer, arXiv:2004.05150."""
    stack = _window(T, L, W, every, share)
    back = np.arange(2 * T)[:, None] - np.arange(2 * T)
    mask = (back >= 0) & (back % DILATION == 0) & (back < DILATION * W)
    return Stack(np.repeat(mask[None], L, 0), stack.reads, (f"{W} keys, every 2nd",) * L)


def _first(T: int, L: int, W: int, every: int, share: int) -> Stack:
    """A window, and the first tokens for all: Longformer's global tokens, seen causally."""
    stack = _window(T, L, W, every, share)
    causal = np.tri(2 * T, dtype=bool)
    first = causal & (np.arange(2 * T) < FIRST)
    return Stack(stack.masks_LTS | first, stack.reads, (f"window of {W}, first {FIRST}",) * L)


LAYOUTS: dict[str, Callable[[int, int, int, int, int], Stack]] = {
    "full": _full,
    "window": _window,
    "hybrid": _hybrid,
    "dilated window": _dilated,
    "window + first tokens": _first,
}


def _of(layout: Layout, T: int) -> Stack:
    masks = [layout.mask_TS(i, 2 * T).numpy() for i in range(layout.L)]
    windows = [layer.window for layer in layout.layers]
    kinds = tuple("global" if W is None else f"window of {W}" for W in windows)
    return Stack(np.stack(masks), tuple(layer.reads for layer in layout.layers), kinds)
