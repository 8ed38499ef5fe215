"""Text to tokens without letting text act as a command, and tokens to text as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

ROLES = ("system", "user", "assistant")


def encode(tokenizer, text: str) -> list[int]:
    """Plain text to tokens. "<|im_end|>" in it is ten characters, never the control token.

    Raises: ValueError if the text is empty.
    """
    if not isinstance(text, str):
        raise TypeError(f"text is a {type(text).__name__}: expected a string")
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
    if not messages:
        raise ValueError("no messages: pass the user's words, or a list of messages")
    for m in messages:
        if not isinstance(m, dict) or m.get("role") not in ROLES:
            raise ValueError(f"message {m!r}: expected a dict whose role is {', '.join(ROLES)}")
        if not isinstance(m.get("content"), str) or not m["content"]:
            raise ValueError(f"message {m!r}: a message is empty or no text; give it a content")
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
    from tokenizers.decoders import DecodeStream

    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop or ()):
        raise ValueError(f"stop={stop!r}: expected a list of non-empty strings")
    stop = stop or ()
    decoder = DecodeStream(skip_special_tokens=True)
    held = ""
    for token in tokens:
        held += decoder.step(tokenizer.backend_tokenizer, token) or ""
        cuts = [at for s in stop if (at := held.find(s)) >= 0]
        ready = min(cuts) if cuts else len(held) - _start_of_stop(held, stop)
        if ready:
            yield held[:ready]
        held = held[ready:]
        if cuts:
            if hasattr(tokens, "close"):
                tokens.close()
            return
    if held:
        yield held


def _start_of_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest tail that a stop string may begin with."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
