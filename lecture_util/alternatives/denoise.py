"""Sampling from a masked diffusion model: in every forward pass uncover some of the hidden tokens.

Fewer passes are faster and worse, for a reason that has nothing to do with training: the tokens of
one pass are drawn without knowing of each other (`parallel_joint`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lecture_util.model.shapes import ShapeError

ORDERS = ("confidence", "random")


@dataclass(frozen=True)
class Step:
    """The text after so many forward passes.

    revealed_BT, remasked_BT: the tokens that the last pass uncovered, and those it hid again.
    """

    tokens_BT: Tensor
    revealed_BT: Tensor
    remasked_BT: Tensor
    passes: int


def schedule(m: int, steps: int) -> list[int]:
    """Share m tokens among steps evenly, the remainder first: 7 in 3 steps are [3, 2, 2].

    A step without tokens would cost a pass and change nothing, so there are never more than m.
    """
    _check_whole(m=m, steps=steps)
    steps = min(m, steps)
    return [m // steps + (k < m % steps) for k in range(steps)]


def draw(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """One token for every position: the largest logit after noise. Temperature 0 is argmax.

    The noise is Gumbel's, -log(E) with E exponential. It is drawn in float64, since a fp32 uniform
    has 24 bits, so that its noise ends at 17: words that would need more could never be drawn.

    Shapes: logits (..., V) -> tokens (...).
    """
    if logits.isnan().any():
        raise ValueError("logits hold NaN: the model's output is broken")
    if temperature == 0:
        return logits.argmax(-1)
    scaled = (logits.double() - logits.amax(-1, keepdim=True)) / temperature
    uniform = torch.empty_like(scaled).uniform_(generator=generator)
    exponential = (-torch.log1p(-uniform)).clamp_min(2.0**-54)  # a uniform may be 0
    return (scaled - exponential.log()).argmax(-1)


def highest(score_BT: Tensor, count: int) -> Tensor:
    """Mark each row's `count` highest scores; among equals the leftmost."""
    order_BT = score_BT.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(score_BT, dtype=torch.bool).scatter(-1, order_BT[:, :count], True)


def denoise(
    model: Callable[[Tensor], Tensor],
    prompt_BT: Tensor,
    length: int,
    steps: int,
    *,
    block: int | None = None,
    order: str = "confidence",
    remask: bool = False,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Step]:
    """Uncover `length` tokens after the prompt, and any holes (mask ids) within it.

    Yields the covered text, then the text after each pass. In a pass the model proposes a word for
    every hidden position; those it was surest of ("confidence"), or any ("random"), stay.

    model:  gives logits over mask_id words, and has that mask_id.
    block:  uncover this many positions at a time, from left to right; those of later blocks stay
            hidden. The steps are shared among the blocks by their size.
    remask: a revealed token keeps the confidence it was chosen with, and is hidden again once the
            hidden positions offer as many better ones. Given tokens never are.
    Cost:   `steps` passes over all T tokens, or one for each position to fill if those are fewer.
            Autoregression: one pass a token, over one token each with a KV cache.
    Raises: ValueError or ShapeError, at the call and not at the first step.
    """
    tokens_BT, holes_BT = _cover(prompt_BT, length, model.mask_id)
    m = int(holes_BT[0].sum())
    block = m if block is None else block
    _check_whole(steps=steps, block=block)
    if order not in ORDERS or (remask and order != "confidence"):
        raise ValueError(
            f"order={order!r}, remask={remask}: expected one of {', '.join(ORDERS)}, and remasking "
            "goes by confidence"
        )
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: expected a number from 0 (argmax) up")
    sizes = [min(block, m - start) for start in range(0, m, block)]
    if steps < len(sizes):
        raise ValueError(
            f"steps={steps} but there are {len(sizes)} blocks of up to {block}: each needs a pass"
        )
    block_BT = (holes_BT.cumsum(-1) - 1) // block
    shares = [1] * len(sizes)  # passes of each block; the next one goes where a pass does most
    for _ in range(min(steps, m) - len(sizes)):
        shares[max(range(len(sizes)), key=lambda b: sizes[b] / shares[b])] += 1
    plan = [
        (holes_BT & (block_BT == b), schedule(size, share))
        for b, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]

    def run(tokens_BT: Tensor) -> Iterator[Step]:
        none_BT, passes = torch.zeros_like(holes_BT), 0
        confidence_BT = torch.zeros_like(tokens_BT, dtype=torch.float64)
        yield Step(tokens_BT, none_BT, none_BT, passes)
        for here_BT, counts in plan:
            standing = 0
            for count in counts:
                standing, passes = standing + count, passes + 1
                hidden_BT = here_BT & (tokens_BT == model.mask_id)
                word_BT, chance_BT = _propose(model, tokens_BT, temperature, generator)
                if order == "random":
                    chance_BT.uniform_(generator=generator)
                kept_BT = confidence_BT if remask else torch.inf
                score_BT = torch.where(hidden_BT, chance_BT, kept_BT)
                stay_BT = highest(score_BT.masked_fill(~here_BT, -torch.inf), standing)
                revealed_BT, remasked_BT = hidden_BT & stay_BT, here_BT & ~hidden_BT & ~stay_BT
                tokens_BT = torch.where(revealed_BT, word_BT, tokens_BT)
                tokens_BT = tokens_BT.masked_fill(remasked_BT, model.mask_id)
                confidence_BT = torch.where(revealed_BT, chance_BT, confidence_BT)
                yield Step(tokens_BT, revealed_BT, remasked_BT, passes)

    return run(tokens_BT)


def parallel_joint(joint: Tensor, counts: Sequence[int]) -> Tensor:
    """What `denoise` draws in random order from a model that is perfect: all outcomes, exactly.

    joint: the true probability of every text, with one axis of V a position.
    counts: how many tokens each pass uncovers. One at a time gives `joint` back. More at a time do
            not: each is drawn from its own conditional, as if the others were independent.
    Cost:   all T! orders of all V**T texts: for toys.
    """
    T = joint.ndim
    if sum(counts) != T or any(count < 1 for count in counts):
        raise ValueError(f"counts={list(counts)}: expected whole numbers that add up to T={T}")

    def marginal(known: set[int]) -> Tensor:
        others = tuple(set(range(T)) - known)
        return joint.sum(others, keepdim=True) if others else joint

    total, orders = torch.zeros_like(joint), list(permutations(range(T)))
    for order in orders:
        probs, known = torch.ones_like(joint), set()
        for count in counts:
            new = order[len(known) : len(known) + count]
            for i in new:
                chance = marginal(known | {i}) / marginal(known)
                probs = probs * chance.nan_to_num(1 / joint.shape[i])  # no such text: any word
            known |= set(new)
        total += probs
    return total / len(orders)


@torch.no_grad()
def _propose(model, tokens_BT: Tensor, temperature: float, generator) -> tuple[Tensor, Tensor]:
    """A word for every position, and how probable the model finds it, before any noise."""
    logits_BTV = model(tokens_BT)
    if logits_BTV.shape != (*tokens_BT.shape, model.mask_id):
        raise ShapeError(
            f"logits are {tuple(logits_BTV.shape)} for tokens {tuple(tokens_BT.shape)}: expected "
            f"one for each of {model.mask_id} words and none for the mask, which is no word"
        )
    word_BT = draw(logits_BTV, temperature, generator)
    probs_BTV = logits_BTV.double().softmax(-1)
    return word_BT, probs_BTV.gather(-1, word_BT[..., None])[..., 0]


def _cover(prompt_BT: Tensor, length: int, mask_id: int) -> tuple[Tensor, Tensor]:
    """The prompt and `length` masks, and which positions are to be filled."""
    if prompt_BT.is_floating_point() or prompt_BT.ndim != 2:
        raise ShapeError(
            f"prompt_BT is {prompt_BT.dtype} of shape {tuple(prompt_BT.shape)}: expected whole "
            "numbers of shape (B, T)"
        )
    if type(length) is not int or length < 0:
        raise ValueError(f"length={length!r}: expected a whole number, 0 to fill holes only")
    if prompt_BT.numel() and not 0 <= prompt_BT.min() <= prompt_BT.max() <= mask_id:
        raise ValueError(f"the prompt holds ids outside 0..{mask_id}, the last being the mask")
    tokens_BT = nnf.pad(prompt_BT, (0, length), value=mask_id)
    holes_BT = tokens_BT == mask_id
    holes = holes_BT.sum(-1).tolist()
    if not holes or min(holes) < 1 or min(holes) < max(holes):
        raise ValueError(f"the rows have {holes} positions to fill: expected one number, above 0")
    return tokens_BT, holes_BT


def _check_whole(**named: int) -> None:
    for name, value in named.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
