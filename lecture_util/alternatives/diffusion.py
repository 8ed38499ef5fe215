"""Masked diffusion: text that is not written left to right but uncovered, several tokens at a time.

Training hides tokens and asks for them back. Sampling starts with all of them hidden and uncovers
some in every forward pass, so the number of passes is ours to choose and not the text's length.

Source: LLaDA, Nie et al. 2025, arXiv:2502.09992; MDLM, Sahoo et al. 2024, arXiv:2406.07524.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lecture_util.model.attention import attend
from lecture_util.model.kv_cache import Cache, NoCache
from lecture_util.model.text import windows
from lecture_util.model.train import IGNORE, Batch
from lecture_util.model.transformer import Transformer


class Bidirectional(NoCache):
    """Every token sees every token. Nothing can be cached: an uncovered token changes them all."""

    def attend(self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        B, T = q_BTNH.shape[:2]
        everything_BTS = torch.ones(B, T, T, dtype=torch.bool, device=q_BTNH.device)
        return attend(q_BTNH, k_BTKH, v_BTKH, everything_BTS)


class MaskedDiffusion(Transformer):
    """The course's Transformer, looking both ways. The last of its V ids is the mask.

    Shapes: tokens_BT -> logits over the V-1 words, so that no mask can ever be predicted.
    """

    @property
    def mask_id(self) -> int:
        return self.config.V - 1

    def features(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is not None and not isinstance(cache, Bidirectional):
            raise TypeError(
                f"a {type(cache).__name__} looks only back, and this model was trained to look "
                "both ways: pass no cache, and write text with denoise()"
            )
        return super().features(tokens_BT, Bidirectional() if cache is None else cache)

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        return super().forward(tokens_BT, cache)[..., : self.mask_id]


def hide(tokens_BT: Tensor, t_B: Tensor, mask_id: int, generator: torch.Generator) -> Batch:
    """Replace each token by the mask with its row's probability t.

    Shapes: tokens_BT, t_B -> noisy_BT, targets_BT (IGNORE where nothing is hidden), t_B.
    """
    hidden_BT = torch.rand(tokens_BT.shape, generator=generator) < t_B[:, None]
    noisy_BT = tokens_BT.masked_fill(hidden_BT, mask_id)
    return noisy_BT, tokens_BT.masked_fill(~hidden_BT, IGNORE), t_B


def masked_task(
    tokens_S: Tensor, B: int, T: int, mask_id: int
) -> Callable[[torch.Generator], Batch]:
    """Batches for `train(..., loss_of=masked_loss)`: windows of text with t hidden, t in (0, 1].

    Each t is uniform, and the B of a batch are spread evenly, which steadies the loss.
    """

    def new_batch(generator: torch.Generator) -> Batch:
        spread_B = (torch.rand(1, generator=generator) + torch.arange(B) / B) % 1
        return hide(windows(tokens_S, B, T, generator), 1 - spread_B, mask_id, generator)

    return new_batch


def masked_loss(model: MaskedDiffusion, noisy_BT: Tensor, targets_BT: Tensor, t_B: Tensor):
    """Cross-entropy of the hidden tokens, weighted by 1/t, in nats a token of the whole text.

    In expectation over t and over what is hidden, this is the cost of revealing the text one token
    at a time, averaged over all orders: an upper bound on its negative log-likelihood.

    Source: arXiv:2502.09992, equation 3; arXiv:2406.07524, section 3.
    """
    logits_BTV = model(noisy_BT)
    nats_BT = nnf.cross_entropy(
        logits_BTV.transpose(1, 2), targets_BT, ignore_index=IGNORE, reduction="none"
    )
    return (nats_BT / t_B[:, None]).mean()


def sqrt_schedule(t: Tensor, start: float = 1e-4) -> Tensor:
    """How much of a word is left at time t in [0, 1]: the share of its vector's variance.

    Source: Diffusion-LM, Li et al. 2022, arXiv:2205.14217, appendix A: 1 - sqrt(t + s).
    """
    return (1 - (t + start).sqrt()).clamp(0, 1)


def blur(words: Tensor, embed_VD: Tensor, t: Tensor, generator: torch.Generator) -> Tensor:
    """The other kind of diffusion, as an illustration: Gaussian noise on the words' vectors.

    Shapes: words (...), one t -> vectors (..., D).
    """
    kept = sqrt_schedule(t)
    noise = torch.randn((*words.shape, embed_VD.shape[1]), generator=generator)
    return kept.sqrt() * embed_VD[words] + (1 - kept).sqrt() * noise


def nearest_word(vectors: Tensor, embed_VD: Tensor) -> Tensor:
    """Round vectors (..., D) to the words whose embeddings are closest, (...)."""
    return torch.cdist(vectors.flatten(0, -2), embed_VD).argmin(-1).view(vectors.shape[:-1])
