"""Text to tokens without letting text act as a command, and tokens to text as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

UNFINISHED = "\ufffd"  # what decoders show for half a character


def encode(tokenizer, text: str) -> list[int]:
    """Plain text to tokens. "<|im_end|>" in it is ten characters, never the control token.

    Raises: ValueError if the text is empty.
    """
    if not text:
        raise ValueError("the prompt is empty: a model continues at least one token")
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def chat(tokenizer, messages: str | Sequence[dict[str, str]]) -> list[int]:
    """A conversation to tokens, by the model's own template, up to where the assistant speaks.

    messages: the user's words, or a list of {"role": ..., "content": ...}.
    What people wrote is encoded as plain text, so nobody can close their own turn.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not messages or not all(m.get("content") for m in messages):
        raise ValueError("a message is empty: give each a non-empty content")
    slots = [f"\x00{i}\x00" for i in range(len(messages))]
    blanks = [m | {"content": slot} for m, slot in zip(messages, slots, strict=True)]
    rest = tokenizer.apply_chat_template(blanks, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = []
    for message, slot in zip(messages, slots, strict=True):
        before, _, rest = rest.partition(slot)
        tokens += tokenizer.encode(before, add_special_tokens=False)
        tokens += encode(tokenizer, message["content"])
    return tokens + tokenizer.encode(rest, add_special_tokens=False)


def stream_text(tokenizer, tokens: Iterable[int], stop: Sequence[str] = ()) -> Iterator[str]:
    """Decode tokens as they come: whole characters only, ending before a stop string.

    Text that may yet grow into a stop string is held back until it cannot. After a stop string the
    token source is closed, so whatever computes it stops as well.
    """
    if isinstance(stop, str) or not all(stop):
        raise ValueError(f"stop={stop!r}: expected a list of non-empty strings")
    held: list[int] = []  # tokens whose text has not all been shown
    shown = 0  # characters of the held tokens' text already shown
    for token in tokens:
        held.append(token)
        text = tokenizer.decode(held, skip_special_tokens=True)
        pending = text[shown:]
        if found := _first_stop(pending, stop):
            yield from filter(None, [pending[: found[0]]])
            if hasattr(tokens, "close"):
                tokens.close()
            return
        ready = len(pending) - _held_back(pending, stop)
        if ready > 0:
            yield pending[:ready]
            shown += ready
        if shown == len(text) and len(held) > 16 and not text.endswith(" "):
            held, shown = held[-1:], len(tokenizer.decode(held[-1:], skip_special_tokens=True))
    if rest := tokenizer.decode(held, skip_special_tokens=True)[shown:]:
        yield rest


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    return min(((at, s) for s in stop if (at := text.find(s)) >= 0), default=None)


def _held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the tail that may be half a character or the start of a stop string."""
    tails = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    broken = len(text) - len(text.rstrip(UNFINISHED))
    return max([broken, *tails])
