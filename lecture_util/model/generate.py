"""Generation: prefill, cached decode, batches, streaming, and the naive loop it replaces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from .kv_cache import Cache, KVCache
from .sampling import GREEDY, Sampling, sample
from .transformer import Transformer

Prompt = Sequence[int]


class PromptError(ValueError):
    """A prompt that the model cannot continue."""


@torch.inference_mode()
def prefill(
    model: Transformer,
    prompts: Sequence[Prompt],
    capacity: int,
    new_cache: Callable[..., Cache] = KVCache,
) -> tuple[Cache, Tensor]:
    """Run the prompts once, together, and keep their keys and values.

    Prompts of unequal length are padded on the right; the cache is then cut to the true lengths.
    new_cache: makes the cache, called as new_cache(config, B, capacity, dtype, device).

    Shapes: B prompts -> a cache with room for `capacity` tokens a row, logits_BV of the next token.
    """
    prompts = check_prompts(model, prompts, 0)
    lengths = [len(prompt) for prompt in prompts]
    T = max(lengths)
    tokens_BT = torch.tensor(
        [[*prompt, *[0] * (T - len(prompt))] for prompt in prompts], device=model.device
    )
    cache = new_cache(model.config, len(prompts), capacity, model.dtype, model.device)
    x_BTD = model.features(tokens_BT, cache)
    if min(lengths) < T:
        cache.truncate(lengths)
    last_B = torch.tensor(lengths, device=model.device) - 1
    rows_B = torch.arange(len(prompts), device=model.device)
    return cache, model.head(x_BTD[rows_B, last_B])


def decode(
    model: Transformer,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    eos: int | Collection[int] = (),
    generator: torch.Generator | None = None,
    new_cache: Callable[..., Cache] = KVCache,
) -> Iterator[list[int | None]]:
    """Yield one token a row and step; None for rows that have ended. Stops when all have.

    new_cache: as in `prefill`.

    Raises: PromptError before anything is computed.
    """
    prompts = check_prompts(model, prompts, max_new_tokens)
    eos = end_tokens(eos)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {sampling!r}: expected Sampling(temperature=0.7) or the like")
    if max_new_tokens == 0:
        return
    longest = max(map(len, prompts))
    cache, logits_BV = prefill(model, prompts, longest + max_new_tokens, new_cache)
    running = [True] * len(prompts)
    for remaining in reversed(range(max_new_tokens)):
        tokens_B = sample(logits_BV, sampling, generator)
        tokens = tokens_B.tolist()
        yield [token if run else None for token, run in zip(tokens, running, strict=True)]
        running = [run and token not in eos for token, run in zip(tokens, running, strict=True)]
        if not remaining or not any(running):
            return
        with torch.inference_mode():  # inside the loop: it must not reach the caller
            logits_BV = model(tokens_B[:, None], cache)[:, -1]


def generate(
    model: Transformer,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    eos: int | Collection[int] = (),
    generator: torch.Generator | None = None,
    new_cache: Callable[..., Cache] = KVCache,
) -> list[list[int]]:
    """Continue each prompt by up to `max_new_tokens` tokens, an end token included when it comes.

    The batch is static: rows that have ended are carried along until the last one ends.
    """
    prompts = check_prompts(model, prompts, max_new_tokens)
    steps = decode(
        model, prompts, max_new_tokens,
        sampling=sampling, eos=eos, generator=generator, new_cache=new_cache,
    )  # fmt: skip
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for output, token in zip(outputs, step, strict=True):
            if token is not None:
                output.append(token)
    return outputs


def stream(model: Transformer, prompt: Prompt, max_new_tokens: int, **options) -> Iterator[int]:
    """Yield the tokens of one prompt as they are made; options as in `decode`.

    For text: `stream_text(tokenizer, stream(model, prompt, 50, eos=[2]), stop=["\\n"])`.
    """
    for (token,) in decode(model, [prompt], max_new_tokens, **options):
        yield token


@torch.inference_mode()
def generate_naive(
    model: Transformer, prompt: Prompt, max_new_tokens: int, *, eos: int | Collection[int] = ()
) -> list[int]:
    """Greedy generation without a cache: every step runs the whole sequence again.

    Cost: t tokens of forward pass at step t, so about T²/2 in all where the cache needs T.
    """
    (tokens,) = check_prompts(model, [prompt], max_new_tokens)
    start, eos = len(tokens), end_tokens(eos)
    for _ in range(max_new_tokens):
        x_BTD = model.features(torch.tensor([tokens], device=model.device))
        tokens.append(int(model.head(x_BTD[:, -1]).argmax()))
        if tokens[-1] in eos:
            break
    return tokens[start:]


def check_prompts(model: Transformer, prompts, max_new_tokens: int) -> list[list[int]]:
    """The prompts as lists of tokens; a tensor or an array of them will do.

    Raises: PromptError, ValueError or TypeError naming the prompt, what it holds and the limit.
    """
    V, limit = model.config.V, model.config.max_context
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
        raise TypeError(f"max_new_tokens={max_new_tokens!r}: expected a whole number")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens}: expected 0 or more")
    prompts = plain(prompts)
    if not isinstance(prompts, list) or not prompts:
        raise PromptError(f"no prompts in {prompts!r}: pass lists of tokens, such as [[1, 2, 3]]")
    prompts = [plain(prompt) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, list):
            raise PromptError(
                f"prompt {row} is {prompt!r}, not a list of tokens: "
                "pass prompts=[encode(tokenizer, text)]"
            )
        if len(prompt) == 0:
            raise PromptError(f"prompt {row} is empty: a model continues at least one token")
        for token in prompt:
            if type(token) is not int:
                raise PromptError(f"prompt {row} holds {token!r}: tokens are whole numbers")
            if not 0 <= token < V:
                raise PromptError(
                    f"prompt {row} holds token {token} but the vocabulary is 0..{V - 1}: "
                    "was it encoded by another model's tokenizer?"
                )
        if len(prompt) + max_new_tokens > limit:
            room = limit - len(prompt)
            remedy = f"ask for at most {room}" if room > 0 else "shorten the prompt"
            raise PromptError(
                f"prompt {row} has {len(prompt)} tokens and {max_new_tokens} more were asked for, "
                f"but the model's context is {limit}: {remedy}"
            )
    return prompts


def end_tokens(eos: int | Collection[int] | None) -> frozenset[int]:
    """End tokens as a set; one token, or none, may be given plainly."""
    eos = plain(eos)
    eos = () if eos is None else [eos] if isinstance(eos, int) else eos
    if not isinstance(eos, Collection) or not all(type(token) is int for token in eos):
        raise TypeError(f"eos={eos!r}: expected tokens, such as [tokenizer.eos_token_id]")
    return frozenset(eos)


def plain(values):
    """Tensors, arrays, tuples and their numbers as Python's lists and ints."""
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, list | tuple):
        return [v.item() if getattr(v, "shape", None) == () else v for v in values]
    return values
