"""A draft need not be able to say everything: an output head for the frequent tokens only.

The head of a small model with a large vocabulary is a large share of its weights (a fifth of
SmolLM2-135M), and a draft that reads all of it for each guess is slow. Verification corrects what
the draft cannot say, so the output stays exact whatever is left out.

Source: Zhao et al. 2025, arXiv:2502.14856.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn


def frequent(tokens_S: Tensor, V: int, U: int) -> Tensor:
    """The U most frequent of V tokens in a text, in ascending order. Shapes: tokens_S -> ids_U."""
    if not 1 <= U <= V:
        raise ValueError(f"U={U}: expected 1 to V={V} tokens")
    if len(tokens_S) and not 0 <= tokens_S.min() <= tokens_S.max() < V:
        raise ValueError(
            f"the text has tokens {int(tokens_S.min())} to {int(tokens_S.max())}: expected 0 to "
            f"{V - 1}, is it another tokenizer's?"
        )
    counts_V = torch.bincount(tokens_S, minlength=V)
    return counts_V.sort(descending=True, stable=True).indices[:U].sort().values


class DraftVocabulary(nn.Module):
    """The rows of the model's own head that belong to `ids_U`, as a head of its own.

    Shapes: x (..., D) -> logits (..., U); `ids_U` tells the tokens.
    Cost:   2*D*U FLOPs a row, over 2*D*U bytes of 16-bit weights.
    """

    def __init__(self, head: nn.Linear, ids_U: Tensor) -> None:
        super().__init__()
        V = head.weight.shape[0]
        if ids_U.ndim != 1 or not len(ids_U) or ids_U.min() < 0 or ids_U.max() >= V:
            raise ValueError(
                f"ids_U has shape {tuple(ids_U.shape)}: expected tokens of 0..{V - 1}, such as "
                "frequent(tokens, V, 8192)"
            )
        if len(ids_U.unique()) < len(ids_U):
            raise ValueError("ids_U holds a token twice: it would be guessed twice, once will do")
        if head.bias is not None:
            raise ValueError("the head has a bias, which would be dropped: give one without")
        ids_U = ids_U.to(head.weight.device)
        place_V = torch.full((V,), -1, device=ids_U.device)
        place_V[ids_U] = torch.arange(len(ids_U), device=ids_U.device)
        self.register_buffer("ids_U", ids_U, persistent=False)
        self.register_buffer("place_V", place_V, persistent=False)  # token -> row, or -1
        self.register_buffer("weight_UD", head.weight.detach()[ids_U], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return nnf.linear(x, self.weight_UD)

    def top(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest tokens and their log-probabilities. x (..., D) -> two of (..., k)."""
        log_probs, places = self(x).float().log_softmax(-1).topk(k)
        return self.ids_U[places], log_probs
