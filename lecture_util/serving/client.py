"""The same requests to a real engine: a client for vLLM's OpenAI-compatible completions.

The server streams each answer, so first token and pace are timed from here, network included. Each
request in flight has a thread.

Source: vLLM's completion protocol, vllm/entrypoints/openai/completion/protocol.py; token numbers
        come with `return_token_ids`, vllm#22587.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from urllib.parse import SplitResult, urlsplit

from .request import Completion, EndsAfter, Params, Request, as_requests
from .wire import RemoteError, ask, events, parsed

DEFAULTS = Params()


@dataclass(frozen=True)
class RemoteCompletion(Completion):
    """A `Completion` with its text. `tokens` is empty if the server keeps their numbers to itself;
    they are counted and timed even so. Times are seconds since the RemoteEngine was made."""

    text: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_times_s)


@dataclass
class Answer:
    """One sample on its way."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finish: str | None = None
    finished_s: float | None = None

    def take(self, choice: dict, told: int | None, now: float) -> None:
        """A piece of it. told: tokens so far by the server's count; else a piece is one token."""
        ids, text = choice.get("token_ids"), choice.get("text") or ""
        left = bool(text) if told is None else told - len(self.times_s)
        self.times_s += [now] * (left if ids is None else len(ids))
        self.tokens += ids or []
        self.text += text
        if choice.get("finish_reason"):
            self.finish, self.finished_s = choice["finish_reason"], now


class RemoteEngine:
    """`Engine`'s generate and serve, computed elsewhere.

    url        such as http://localhost:8000; None: the environment's LECTURE_ENGINE_URL. A key that
               the server wants is read from LECTURE_ENGINE_KEY
    model      by the server's name; None: the first that it offers
    timeout_s  silence after which a request has failed

    Raises: ValueError without a URL that has a host, or for a timeout that is none.
    """

    def __init__(
        self, url: str | None = None, model: str | None = None, timeout_s: float = 120
    ) -> None:
        url = os.environ.get("LECTURE_ENGINE_URL", "") if url is None else url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
            raise ValueError(
                f"url={url!r}: expected the address of a server that `vllm serve MODEL` started, "
                "such as 'http://localhost:8000': pass it, or set it before Python starts, "
                "export LECTURE_ENGINE_URL=http://localhost:8000"
            )
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise TypeError(f"timeout_s={timeout_s!r}: expected seconds")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s!r}: expected seconds above 0")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model, self.timeout_s, self.origin_s = model, timeout_s, time.perf_counter()
        self.numbers = itertools.count()

    def models(self) -> list[str]:
        """What the server offers. Raises: RemoteError."""
        with self._open("/v1/models") as response:
            return [model["id"] for model in parsed(response.read()).get("data", ())]

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: Params | Sequence[Params] = DEFAULTS,
        concurrency: int = 64,
    ) -> list[RemoteCompletion]:
        """Continue all prompts, texts or lists of tokens, so many at a time.

        A request arrives when it is sent. One that fails gives a completion with reason "failed"
        and its error, and the others finish.
        Raises: RemoteError if the server cannot even say which models it has.
        """
        if type(concurrency) is not int or concurrency < 1:
            raise ValueError(f"concurrency={concurrency!r}: expected a whole number, at least 1")
        return self._run(as_requests(prompts, params), concurrency, on_time=False)

    def serve(self, trace: Iterable[Request]) -> list[RemoteCompletion]:
        """Send each request at its `arrival_s`, counted from now, however many are on their way."""
        trace = list(trace)
        for request in trace:
            if not isinstance(request, Request):
                raise TypeError(f"the trace holds {request!r}: expected Request(prompt, ...)")
        return self._run(trace, len(trace), on_time=True)

    def now(self) -> float:
        return time.perf_counter() - self.origin_s

    def _run(self, requests: list[Request], workers: int, on_time: bool) -> list[RemoteCompletion]:
        if not requests:
            return []
        if self.model is None:
            self.model = next(iter(self.models()), None)
        start_s, asked, pool = self.now(), {}, ThreadPoolExecutor(workers)
        try:
            for i in sorted(range(len(requests)), key=lambda i: requests[i].arrival_s):
                due_s = start_s + requests[i].arrival_s if on_time else None
                if on_time:
                    time.sleep(max(0.0, due_s - self.now()))
                asked[i] = pool.submit(self._ask, requests[i], next(self.numbers), due_s)
            return [c for i in range(len(requests)) for c in asked[i].result()]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, nothing more is sent

    def _ask(
        self, request: Request, number: int, arrival_s: float | None
    ) -> list[RemoteCompletion]:
        arrival_s = self.now() if arrival_s is None else arrival_s
        answers, prompt, error = [Answer() for _ in range(request.params.samples)], [], None
        try:
            body = {"model": self.model, **_body(request)}
            prompt = body["prompt"] if isinstance(body["prompt"], list) else []
            with self._open("/v1/completions", body) as response:
                for event in events(response):
                    choices, usage = event.get("choices") or [], event.get("usage") or {}
                    if not choices and len(answers) == 1:  # the last event counts all
                        choices = [{"text": ""}]
                    for choice in choices:
                        prompt = prompt or choice.get("prompt_token_ids") or []
                        answer = answers[choice.get("index", 0)]
                        answer.take(choice, usage.get("completion_tokens"), self.now())
            if any(answer.finish is None for answer in answers):
                raise RemoteError("the server's answer stops in the middle: see its log")
        except Exception as problem:  # one request's failure is its own, whatever it is
            error = problem
        completions, end_s = [], self.now()
        for sample, one in enumerate(answers):
            reason, why = _reason(one, request.params, error)
            completions.append(
                RemoteCompletion(
                    number, sample, prompt, one.tokens, reason, why, arrival_s, None,
                    tuple(one.times_s), one.finished_s or end_s, user=request.user, text=one.text,
                )
            )  # fmt: skip
        return completions

    def _open(self, path: str, body: dict | None = None) -> AbstractContextManager[HTTPResponse]:
        key = os.environ.get("LECTURE_ENGINE_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return ask(self.url, path, body, headers=headers, timeout_s=self.timeout_s)


def _has_port(parts: SplitResult) -> bool:
    """A port that is one, or none at all."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:  # urllib's, which does not say what is wanted
        return False


def _body(request: Request) -> dict:
    """A request as vLLM wants it. All of `Sampling` is sent, also what filters nothing: for what is
    left out, the server takes the values recommended for the model."""
    params, sampling = request.params, request.params.sampling
    stop, prompt = params.stop, request.prompt
    if stop is not None and not isinstance(stop, EndsAfter):
        raise ValueError(f"stop={stop!r}: a function cannot be sent; use eos, or EndsAfter(count)")
    most = params.max_new_tokens if stop is None else min(params.max_new_tokens, stop.count)
    greedy = sampling.temperature == 0  # older servers then refuse filters
    body = {
        "prompt": prompt if isinstance(prompt, str) else [operator.index(t) for t in prompt],
        "max_tokens": most,
        "n": params.samples,
        "seed": params.seed,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p or 1.0,
        "top_k": -1 if greedy else sampling.top_k or -1,
        "min_p": 0.0 if greedy else sampling.min_p or 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,  # ours are named: none, unless the request says so
        "stop_token_ids": sorted(params.eos),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    return body | ({"cache_salt": json.dumps(request.space)} if request.space else {})


def _reason(
    answer: Answer, params: Params, error: Exception | None
) -> tuple[str, Exception | None]:
    """The completion's reason and error, by what the server calls it."""
    if answer.finish == "length":
        ended = isinstance(params.stop, EndsAfter) and len(answer.times_s) >= params.stop.count
        return ("stop" if ended else "length"), None
    if answer.finish == "stop":  # only an end token can have
        return "end", None
    return "failed", error or RemoteError(f"the server ended the answer with {answer.finish!r}")
