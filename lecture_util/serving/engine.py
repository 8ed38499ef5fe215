"""The engine's public face: prompts in, texts out, many at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

from lecture_util.model.generate import Prompt, check_prompts
from lecture_util.model.transformer import Transformer

from .clock import VirtualClock, WallClock
from .executor import ModelExecutor
from .flat import FlatCache
from .graphs import DecodeGraphs, can_capture
from .loop import Loop
from .metrics import Stats, stats
from .paging import PagedCache
from .records import Event
from .request import Completion, Params, Request, as_requests
from .scheduler import Policy, Scheduler

DEFAULTS = Params()


class Engine:
    """A small serving engine around a Transformer.

    Every text is what `generate` would have made of its prompt alone, to within the rounding of
    sums in another order.

    cache    where keys and values are kept: a PagedCache (by default, with room for `slots`
             sequences of 512 tokens) or a SlotCache of at least `slots` rows
    policy   see `scheduler.Policy`
    clock    WallClock(), or VirtualClock() where runs are to be alike on every machine
    graphs   replay decode steps as CUDA graphs, see `graphs.DecodeGraphs`; None: on a GPU, where a
             PagedCache allows it

    A PagedCache keeps prefixes: after the weights have changed, call `forget_prefixes`.
    """

    def __init__(
        self,
        model: Transformer,
        cache: FlatCache | None = None,
        policy: Policy | None = None,
        clock: WallClock | VirtualClock | None = None,
        graphs: bool | None = None,
    ) -> None:
        if not isinstance(model, Transformer):
            raise TypeError(f"model={model!r}: expected a Transformer")
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy={policy!r}: expected Policy(slots=16, ...)")
        longest = model.config.max_context
        if policy is None:
            policy = Policy(slots=min(16, longest), token_budget=min(256, longest))
        if policy.token_budget > longest:
            raise ValueError(
                f"token_budget={policy.token_budget} is above the model's context of {longest}: "
                "choose at most that"
            )
        if cache is None:
            pages = -(-policy.slots * 512 // 16)
            cache = PagedCache(model.config, pages, 16, model.dtype, model.device)
        check_cache(model, cache)
        rows = getattr(cache.memory, "rows", policy.slots)
        if rows < policy.slots:
            raise ValueError(
                f"the cache has {rows} rows but the policy {policy.slots} slots: make it with "
                f"rows={policy.slots}, or Policy(slots={rows})"
            )
        self.model, self.cache = model, cache
        if graphs or (graphs is None and can_capture(model, cache)):
            executor = DecodeGraphs(model, cache, policy.slots)
        else:
            executor = ModelExecutor(model, cache)
        self.loop = Loop(Scheduler(cache.memory, policy), executor, clock, self._check)
        cache.model, cache.engine = weakref.ref(model), weakref.ref(self)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = DEFAULTS,
        progress: bool = False,
    ) -> list[Completion]:
        """Continue all prompts; completions in their order, the samples of one side by side.

        params: for all, or one for each. A prompt that cannot be served gives a completion with
        reason "failed" and its error; the others are served.
        """
        return self.loop.serve(as_requests(prompts, params), progress, stacklevel=3)

    def serve(self, trace: Iterable[Request], progress: bool = False) -> list[Completion]:
        """Serve requests at their `arrival_s`, counted from now."""
        return self.loop.serve(trace, progress, stacklevel=3)

    def stream(self, prompt: Prompt, params: Params = DEFAULTS) -> Iterator[int]:
        """Yield the tokens of one prompt as they come; other requests move on meanwhile.

        Closing the iterator, or leaving its `for`, cancels the request.
        Raises: what the request failed of.
        """
        if isinstance(params, Params) and params.samples > 1:
            raise ValueError(f"samples={params.samples}: a stream has one answer; use submit()")
        number = self.submit(prompt, params)
        # Both lists are kept up by the loop: when the answer ends, it goes from one to the other.
        live, done = self.loop.live.get(number, []), self.loop.done[number]
        given = 0
        try:
            while True:
                over = bool(done)  # now: while we wait in `yield`, others may step
                tokens = done[0].tokens if over else live[0].new_tokens
                yield from tokens[given:]
                given = len(tokens)
                if over and done[0].error is not None:
                    raise done[0].error
                if over:
                    return
                if not done:
                    self.step()
        finally:
            self.cancel(number)

    def submit(
        self,
        prompt: Prompt,
        params: Params = DEFAULTS,
        *,
        user: str = "",
        space: tuple[str, ...] = (),
    ) -> int:
        """Queue a prompt and return its number; `step` moves it on. user, space: see `Request`.

        Raises: PromptError, TooLong, TypeError or ValueError; then nothing is queued.
        """
        return self.loop.submit(Request(prompt, params, user=user, space=space))

    def step(self) -> list[Event]:
        """One forward pass for everybody; the tokens and ends that came of it."""
        return self.loop.step()

    def cancel(self, number: int) -> None:
        """End a request and free what it holds; nothing if it is over."""
        self.loop.cancel(number)

    def result(self, number: int) -> list[Completion]:
        """The completions of a request so far, one a sample.

        Raises: ValueError for a number that was never given, or is forgotten.
        """
        if number not in self.loop.done:
            raise ValueError(f"no request has number {number!r}: submit() returns it")
        return list(self.loop.done[number])

    @property
    def stats(self) -> Stats:
        """Throughput, latencies and use of the memory since the engine was made or reset."""
        return stats([c for cs in self.loop.done.values() for c in cs], self.loop.iterations)

    def reset_stats(self) -> None:
        """Forget what is over, so that `stats` counts from here."""
        self.loop.forget()

    def forget_prefixes(self) -> None:
        """Reuse nothing computed so far: call it when the weights have changed."""
        if isinstance(self.cache, PagedCache):
            self.cache.blocks.forget()

    def _check(self, request: Request) -> list[int]:
        if self.cache.engine() is not self:
            raise RuntimeError("another Engine was made on this cache: use that, or give each one")
        (prompt,) = check_prompts(self.model, [request.prompt], request.params.max_new_tokens)
        return prompt


def check_cache(model: Transformer, cache: FlatCache) -> None:
    """Raises: TypeError or ValueError if the cache is not this model's, or is in use."""
    if not isinstance(cache, FlatCache):
        raise TypeError(
            f"cache={cache!r}: expected PagedCache(model.config, num_pages) or a SlotCache"
        )
    L, _, _, K, H = cache.k_LMPKH.shape
    c, has = model.config, (L, K, H, cache.k_LMPKH.dtype, cache.k_LMPKH.device)
    wants = (c.L, c.K, c.H, model.dtype, model.device)
    if has != wants:
        raise ValueError(
            f"the cache has (L, K, H, dtype, device) {has} but the model {wants}: make it with the "
            "model's config, dtype and device"
        )
    if cache.model is not None and cache.model() is not model:
        raise ValueError("the cache holds another model's keys: make one for this model")
    engine = None if cache.engine is None else cache.engine()
    if cache.memory.held()[1] or (engine is not None and engine.loop.busy):
        raise ValueError("the cache is in use by another Engine: make one for this one")
