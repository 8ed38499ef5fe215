"""The widths of multi-head latent attention, and the cache that holds its latents.

Axes besides the usual: C the latent, R the rotated part of a key, X = C + R a cached row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lecture_util.model.attention import causal_mask
from lecture_util.model.config import Config
from lecture_util.model.kv_cache import next_positions, shortened
from lecture_util.model.shapes import ShapeError, TensorMismatch


@dataclass(frozen=True)
class MLA:
    """Widths of multi-head latent attention. Integers for a model, SymPy symbols for algebra.

    C     the latent from which every head's keys and values are expanded
    R     the part of a key that carries the position, one for all heads
    nope  the part of a head's key that does not (no position encoding)
    v     a head's value
    q_rank  width through which queries are squeezed, None for a plain projection

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
    """

    C: Any
    R: Any
    nope: Any
    v: Any
    q_rank: Any = None

    def __post_init__(self) -> None:
        for name in ("C", "R", "nope", "v", "q_rank"):
            value = getattr(self, name)
            free = hasattr(value, "free_symbols") or (name == "q_rank" and value is None)
            if not free and (type(value) is not int or value < 1):
                raise ValueError(f"MLA.{name} is {value!r}: expected a whole number, at least 1")
        if isinstance(self.R, int) and self.R % 2:
            raise ValueError(f"MLA.R is {self.R}: rotary embeddings pair dimensions, so even")

    @property
    def latent_width(self) -> Any:
        """X = C + R: all that is cached of a token in a layer."""
        return self.C + self.R

    @property
    def scale(self) -> float:
        """What scores are multiplied by: from the width of a head's key, never the latent's."""
        return (self.nope + self.R) ** -0.5

    def new_cache(
        self,
        config: Config,
        B: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> LatentCache:
        """For generation: `generate(model, prompts, 50, new_cache=shape.new_cache)`."""
        return LatentCache(config, B, capacity, dtype, device, shape=self)


# Source: DeepSeek-AI 2024, arXiv:2405.04434, section 3.1.2; it has 128 heads in each of 60 layers.
DEEPSEEK_V2 = MLA(C=512, R=64, nope=128, v=128, q_rank=1536)


class LatentCache:
    """One slab of latents: a row is the normed latent c and, beside it, the roped key part.

    There is no other slab for values: they too are expanded from c. Slot s of a row holds its
    position s; rows may differ in length, and what lies past a row's length is seen by no query.

    Bytes: L*B*S*(C + R) numbers, allocated at once for `capacity` S.
    """

    def __init__(
        self,
        config: Config,
        B: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        shape: MLA,
    ) -> None:
        if not (isinstance(B, int) and isinstance(capacity, int) and B >= 1 and capacity >= 1):
            raise ValueError(
                f"LatentCache(B={B!r}, capacity={capacity!r}): both must be whole and at least 1"
            )
        self.shape = shape
        size = (config.L, B, capacity, shape.latent_width)
        self.latent_LBSX = torch.zeros(size, dtype=dtype, device=device)
        self.lengths = [0] * B

    @property
    def c_LBSC(self) -> Tensor:
        """The latents, RMS-normed: what keys (all but the rotated part) and values come from."""
        return self.latent_LBSX[..., : self.shape.C]

    @property
    def k_rope_LBSR(self) -> Tensor:
        """The rotated part of the keys, which all heads share; it is not normed."""
        return self.latent_LBSX[..., self.shape.C :]

    @property
    def capacity(self) -> int:
        return self.latent_LBSX.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor held, used or not."""
        return self.latent_LBSX.nbytes

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Raises: ShapeError if the batch differs; CacheFull, with nothing written, if too long."""
        return next_positions(self.lengths, self.capacity, shape, device)

    def update(self, layer: int, latent_BTX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take in one layer's new rows; return all so far, and which of them each query sees.

        Shapes: latent_BTX -> latent_BSX (a view of the slab), mask_BTS or None for all.
        Raises: ShapeError, TensorMismatch or CacheFull, with nothing written.
        """
        slab_LBSX = self.latent_LBSX
        if latent_BTX.dtype != slab_LBSX.dtype or latent_BTX.device != slab_LBSX.device:
            raise TensorMismatch(
                f"the latents are {latent_BTX.dtype} on {latent_BTX.device} but the cache is "
                f"{slab_LBSX.dtype} on {slab_LBSX.device}: "
                "make it with shape.new_cache(..., model.dtype, model.device)"
            )
        L, X = slab_LBSX.shape[0], slab_LBSX.shape[-1]
        if layer >= L or latent_BTX.shape[-1] != X:
            raise ShapeError(
                f"layer {layer} brings rows of C+R={latent_BTX.shape[-1]} numbers but the cache "
                f"has L={L} layers of C+R={X}: make it with this model's config and shape"
            )
        B, T = latent_BTX.shape[:2]
        positions_BT = self.positions(latent_BTX.shape[:2], latent_BTX.device)
        rows_B1 = torch.arange(B, device=latent_BTX.device)[:, None]
        slab_LBSX[layer, rows_B1, positions_BT] = latent_BTX
        S = max(self.lengths) + T
        sees_all = T == 1 and min(self.lengths) == max(self.lengths)
        return slab_LBSX[layer, :, :S], None if sees_all else causal_mask(positions_BT, S)

    def attend(self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Refused: keys and values per head are what this cache does without.

        Raises: TypeError naming the cache to use.
        """
        raise TypeError(
            "LatentCache holds latents, not keys and values: use KVCache with this model, or "
            "build the model with mla(config, shape)"
        )

    def extend(self, T: int) -> None:
        self.lengths = [length + T for length in self.lengths]

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget all but the first tokens, of every row or row by row.

        Raises: ValueError if a row would grow, or the number of rows differs.
        """
        self.lengths = shortened(self.lengths, lengths)
