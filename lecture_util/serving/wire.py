"""HTTP to a server that streams: requests out, server-sent events in, one kind of error.

Such a stream is lines of `data: {JSON}` with an empty line after each event. Where a packet ends
means nothing: it may be in the middle of a line, or of a letter. Only the standard library is used,
and no proxy.

Source: html.spec.whatwg.org, section 9.2, server-sent events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit


class RemoteError(RuntimeError):
    """The server was not there, refused, fell silent or broke off; the message says which."""


@contextmanager
def ask(
    url: str,
    path: str,
    body: dict | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
) -> Iterator[HTTPResponse]:
    """A response that is not an error; with a body it is posted.

    timeout_s: silence after which the server is given up.
    Raises: RemoteError for whatever goes wrong until the response is read.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    connected = False
    try:
        connection.connect()
        connected = True
        method = "GET" if body is None else "POST"
        sent = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, parts.path + path, sent, headers)
        response = connection.getresponse()
        if response.status != 200:
            why = message(response.read().decode(errors="replace"))
            raise RemoteError(f"{url} answered {response.status} to {path}: {why}")
        yield response
    except (OSError, HTTPException) as error:
        if not connected:
            problem = f"no server at {url} ({error}): start one, or correct LECTURE_ENGINE_URL"
        elif isinstance(error, TimeoutError):
            problem = (
                f"{url} was silent for {timeout_s:g} s: pass a larger timeout_s, or send less at a "
                "time"
            )
        else:
            problem = f"the connection to {url} broke: {error!r}"
        raise RemoteError(problem) from error
    finally:
        connection.close()


def events(response: Iterable[bytes]) -> Iterator[dict]:
    """What the events say, until the one that says [DONE].

    Raises: RemoteError if one says that there was an error, or is not JSON.
    """
    data: list[bytes] = []
    for line in response:
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            whole, data = b"\n".join(data), []
            if whole == b"[DONE]":
                return
            event = parsed(whole)
            if "error" in event:
                raise RemoteError(f"the server failed in the middle: {message(whole.decode())}")
            yield event


def parsed(text: bytes) -> dict:
    """A JSON object. Raises: RemoteError for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RemoteError(f"expected JSON of an OpenAI-compatible server, but came {text[:80]!r}")
    return found


def message(text: str) -> str:
    """The message in an error's body, in either form that vLLM has used, or what there is."""
    try:
        found = json.loads(text)
        error = found.get("error", found)
        return error if isinstance(error, str) else error["message"]
    except (ValueError, AttributeError, KeyError, TypeError):
        return text.strip()[:200] or "nothing"
