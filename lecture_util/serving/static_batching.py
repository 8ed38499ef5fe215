"""Static batching, which continuous batching replaced: a batch is filled once and kept to its end.

Prompts are padded to the longest of them, rows whose text is over are carried along, and whoever
arrives meanwhile waits. Kept here in full, with the same loop and metrics, to be compared with.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from lecture_util.model.generate import check_prompts, prefill
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.transformer import Transformer

from .clock import VirtualClock, WallClock
from .executor import Drawn, draw
from .loop import Loop
from .request import Running
from .scheduler import Memory, Policy, Scheduler, Work
from .slots import Slots


class StaticScheduler(Scheduler):
    """Admits only when everybody is done, and plans a token for every row until then."""

    def __init__(self, memory: Memory, policy: Policy | None = None) -> None:
        super().__init__(memory, policy)
        self.over: set[int] = set()  # ids of the batch whose text has ended

    def add(self, sequence: Running) -> None:
        followers, sequence.followers = sequence.followers, []
        self.waiting += [sequence, *followers]  # samples are rows like any other

    def plan(self) -> list[Work]:
        if not self.running:
            self._new_batch()
        batch = [(s, len(s.request.prompt), s.id in self.over) for s in self.running]
        steps = max((s.computed - prompt for s, prompt, _ in batch), default=0)
        if steps < 0:  # nothing is computed yet
            longest = max(prompt for _, prompt, _ in batch)
            return [Work(s, 0, prompt, over, longest - prompt) for s, prompt, over in batch]
        for sequence, prompt, _ in batch:
            self._grow(sequence, prompt + steps + 1)
        return [Work(s, prompt + steps, 1, over) for s, prompt, over in batch]

    def _new_batch(self) -> None:
        for sequence in sorted(self.waiting, key=self._rank)[: self.policy.slots]:
            if self.memory.begin(sequence) is None:
                break
            self.waiting.remove(sequence)
            self.join(sequence)
            self._grow(sequence, len(sequence.tokens))

    def _grow(self, sequence: Running, tokens: int) -> None:
        if not self.memory.grow(sequence, tokens) and sequence.id not in self.over:
            raise RuntimeError(
                f"no room for {tokens} tokens of sequence {sequence.id}: a static batch keeps what "
                "it began with, so use memory that lends whole rows, such as Slots"
            )

    def leave(self, sequence: Running) -> None:
        """A row is given back only with the whole batch."""
        if sequence not in self.running:
            super().leave(sequence)
            return
        self.over.add(sequence.id)
        if len(self.over) < len(self.running):
            return
        for one in self.running:
            heapq.heappush(self.free_slots, one.slot)
            one.slot = None
            self.memory.release(one)
        self.running, self.over = [], set()


class PaddedExecutor:
    """Rows of one length through an ordinary KVCache."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.cache: KVCache | None = None

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[list[Drawn]]:
        sequences = [w.sequence for w in work]
        if work[0].start == 0:
            prompts = [s.tokens for s in sequences]
            new = max(s.request.params.max_new_tokens for s in sequences)
            self.cache, logits_BV = prefill(self.model, prompts, max(map(len, prompts)) + new)
        else:
            last_B1 = torch.tensor([[s.tokens[-1]] for s in sequences], device=self.model.device)
            logits_BV = self.model(last_B1, self.cache)[:, -1]
        live = [b for b, w in enumerate(work) if not w.padding]
        drawn: list[list[Drawn]] = [[] for _ in work]
        tokens = draw(logits_BV[live], [(sequences[b],) for b in live])
        for b, token in zip(live, tokens, strict=True):
            drawn[b] = token
        return drawn


def static_server(
    model: Transformer,
    slots: int,
    capacity: int,
    clock: WallClock | VirtualClock | None = None,
) -> Loop:
    """A loop that serves in batches of up to `slots`, of texts of up to `capacity` tokens."""

    def check(request) -> list[int]:
        (prompt,) = check_prompts(model, [request.prompt], request.params.max_new_tokens)
        return prompt

    scheduler = StaticScheduler(
        Slots(slots, capacity), Policy(slots=slots, token_budget=max(slots, 256))
    )
    return Loop(scheduler, PaddedExecutor(model), clock, check)
