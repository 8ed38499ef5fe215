"""One small model of each kind, alike in all but what it caches: for experiments.

All have three layers, D=64 and two query heads of 64. What a variant saves on keys and values it
doesn't get back elsewhere, so the smaller caches have slightly fewer parameters too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer

from .cla import build
from .layout import Layout
from .mla import MLA, mla
from .sizes import cache_bytes, mla_cache_bytes

SMALL = Config(D=64, F=128, K=2, G=1, H=64, L=3, V=64, max_context=1024)
WINDOW = 4
LATENT = MLA(C=32, R=32, nope=32, v=64)


@dataclass(frozen=True)
class Variant:
    """A kind of model. make(config) is fresh and untrained; numbers(config, S) is what it caches.

    Units: `numbers` counts the numbers held for one sequence of S tokens, all layers together.
    """

    name: str
    make: Callable[[Config], Transformer]
    numbers: Callable[[Config, int], int]


def _layered(name: str, K: int, layout_of: Callable[[int], Layout]) -> Variant:
    def shape(config: Config) -> Config:
        return config.with_kv_heads(K)

    return Variant(
        name,
        lambda config: build(shape(config), layout_of(config.L)),
        lambda config, S: cache_bytes(shape(config), layout_of(config.L), 1, S, 1),
    )


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        _layered("MHA", 2, Layout.full),
        _layered("MQA", 1, Layout.full),
        Variant(
            f"MLA {LATENT.C}+{LATENT.R}",
            lambda config: mla(config, LATENT),
            lambda config, S: mla_cache_bytes(config, LATENT.C, LATENT.R, 1, S, 1),
        ),
        _layered("CLA2", 2, lambda L: Layout.cross_layer(L, 2)),
        _layered(f"window {WINDOW}", 2, lambda L: Layout.windowed(L, WINDOW)),
        _layered("1 in 3 global", 2, lambda L: Layout.hybrid(L, WINDOW, every=3)),
        _layered("1 in 3, CLA2, MQA", 1, lambda L: Layout.hybrid(L, WINDOW, every=3, share=2)),
    )
}


def small(name: str, V: int = SMALL.V) -> Transformer:
    """A fresh model of one kind over V tokens; seed torch before.

    Raises: ValueError listing the names.
    """
    if name not in VARIANTS:
        raise ValueError(f"no variant {name!r}: choose from {', '.join(map(repr, VARIANTS))}")
    return VARIANTS[name].make(replace(SMALL, V=V))
