"""Iteration-level scheduling: who computes how many tokens in the next forward pass.

The scheduler never sees a tensor. It knows each sequence's number of tokens, asks a `Memory` for
room, and hands out work; a model, or a formula for its speed, does it. So the same scheduler serves
the real model and the simulator.

Source: Yu et al. 2022, Orca (OSDI 22): iteration-level scheduling. Agrawal et al. 2024,
        arXiv:2403.02310: chunks of prompts beside decoding. Sheng et al. 2024, arXiv:2401.00588: a
        counter of served tokens for each user.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from .request import Running

ORDERS = ("arrival", "shortest", "fair")


class Memory(Protocol):
    """Room for keys and values, counted in tokens. `slots.Slots` and `paging.Pages` are two."""

    def fits(self, tokens: int) -> bool:
        """Could a sequence of so many tokens be held, with nothing else there?"""

    def begin(self, sequence: Running) -> int | None:
        """Take a sequence in; how many of its first tokens are already there. None: no room."""

    def grow(self, sequence: Running, tokens: int) -> bool:
        """Make room for its first `tokens` tokens in all. False, with nothing changed: none."""

    def fork(self, sequence: Running, child: Running) -> None:
        """Let the child begin with all that the sequence holds."""

    def commit(self, sequence: Running) -> None:
        """Its first `computed` tokens are in the cache now: others may find them."""

    def release(self, sequence: Running) -> None:
        """Give back all that it holds; nothing, if it holds nothing."""

    def held(self) -> tuple[int, int]:
        """Tokens stored, and tokens that what is lent out has room for."""


@dataclass(frozen=True)
class Work:
    """In the next forward, compute `count` tokens of `sequence`, those from `start` on.

    padding: a row carried along although its text is over, padded: tokens computed for nothing
    after its own; only static batching has such.
    """

    sequence: Running
    start: int
    count: int
    padding: bool = False
    padded: int = 0

    @property
    def draws(self) -> bool:
        """Its last token is computed, so a new one follows. A prompt's earlier chunks give none."""
        return not self.padding and self.start + self.count == len(self.sequence.tokens)

    @property
    def prefill(self) -> bool:
        return self.sequence.prefilling


@dataclass(frozen=True)
class Policy:
    """What an engine is set to.

    slots                 sequences that may run at once
    token_budget          tokens of one forward: what it leaves after decoding goes to prompts
    chunked               cut a prompt to the budget. False computes each prompt whole, in one
                          forward, and everybody waits for it
    order                 who is admitted next: "arrival"; "shortest" prompt; "fair", the user who
                          has been served the fewest tokens
    patience              forwards after which one who waits goes first, whatever the order
    waiting_served_ratio  admit only when so many wait for each one running, ...
    max_waiting_steps     ... or after so many forwards without admission
    """

    slots: int = 16
    token_budget: int = 256
    chunked: bool = True
    order: str = "arrival"
    patience: int | None = None
    waiting_served_ratio: float = 0.0
    max_waiting_steps: int = 20

    def __post_init__(self) -> None:
        for name in ("slots", "token_budget", "patience", "max_waiting_steps"):
            value = getattr(self, name)
            if value is None and name == "patience":
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1")
        if not isinstance(self.chunked, bool):
            raise ValueError(f"chunked={self.chunked!r}: expected True or False")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: expected one of {', '.join(ORDERS)}")
        ratio = self.waiting_served_ratio
        if (
            isinstance(ratio, bool)
            or not isinstance(ratio, int | float)
            or not 0 <= ratio < math.inf
        ):
            raise ValueError(f"waiting_served_ratio={ratio!r}: expected a number from 0 up")
        if self.token_budget < self.slots:
            raise ValueError(
                f"token_budget={self.token_budget} is below slots={self.slots}: every running "
                "sequence needs one token a forward"
            )


class Scheduler:
    """Continuous batching: after every forward, whoever ended leaves and whoever fits joins."""

    def __init__(self, memory: Memory, policy: Policy | None = None) -> None:
        self.memory = memory
        self.policy = Policy() if policy is None else policy
        self.waiting: list[Running] = []
        self.running: list[Running] = []  # in order of admission
        self.free_slots = list(range(self.policy.slots))
        self.served: Counter[str] = Counter()  # tokens computed, by user
        self.waited: Counter[int] = Counter()  # forwards that a sequence has seen from outside
        self.steps_since_admission = 0
        self.preempted = 0

    def add(self, sequence: Running) -> None:
        """Queue a sequence. A user who comes back is no further ahead than whoever is there."""
        user, there = (
            sequence.request.user,
            {s.request.user for s in (*self.waiting, *self.running)},
        )
        if there and user not in there:
            self.served[user] = max(self.served[user], min(self.served[u] for u in there))
        self.waiting.append(sequence)

    def plan(self) -> list[Work]:
        """The work of the next forward: decoding first, then prompts, then whoever can join."""
        budget = self.policy.token_budget
        work: list[Work] = []
        before = self.preempted
        for sequence in sorted(self.running, key=lambda s: s.prefilling):
            if sequence.slot is None:  # put back a moment ago
                continue
            count = sequence.remaining
            if self.policy.chunked:
                count = min(count, budget - sum(w.count for w in work))
            if count <= 0:
                continue
            while not self.memory.grow(sequence, sequence.computed + count):
                newest = self.running[-1]
                self.preempt(newest)
                work = [w for w in work if w.sequence is not newest]
                if newest is sequence:
                    break
            else:  # no break: there is room
                work.append(Work(sequence, sequence.computed, count))
        if self.preempted == before:  # whoever was put back must not come straight in again
            self._admit(work)
        for sequence in self.waiting:
            self.waited[sequence.id] += 1
        for w in work:
            self.served[w.sequence.request.user] += w.count
        return work

    def _admit(self, work: list[Work]) -> None:
        policy, waiting = self.policy, self.waiting
        self.steps_since_admission += 1
        enough = len(waiting) >= policy.waiting_served_ratio * len(self.running)
        if not enough and self.steps_since_admission < policy.max_waiting_steps:
            return
        while waiting:
            left = policy.token_budget - sum(w.count for w in work)
            sequence = min(waiting, key=self._rank)
            if left < 1 or len(self.free_slots) < 1 + len(sequence.followers):
                return
            if not policy.chunked and work and sequence.remaining > left:
                return
            found = self.memory.begin(sequence)
            if found is None:
                return
            # Only now is it known how much is left to compute.
            count = len(sequence.tokens) - found
            count = min(count, left) if policy.chunked else count
            if not self.memory.grow(sequence, found + count):
                self.memory.release(sequence)
                return
            sequence.computed = found
            sequence.found += found
            waiting.remove(sequence)
            self.join(sequence)
            for follower in sequence.followers:
                follower.slot = heapq.heappop(self.free_slots)
            work.append(Work(sequence, found, count))
            self.steps_since_admission = 0

    def _rank(self, sequence: Running) -> tuple:
        """Who is admitted first has the smallest. Whoever was put back keeps its turn."""
        policy = self.policy
        late = policy.patience is not None and self.waited[sequence.id] >= policy.patience
        turn = 0 if sequence.preemptions else 1 if late else 2
        key = {
            "arrival": 0,
            "shortest": len(sequence.tokens),
            "fair": self.served[sequence.request.user],
        }[policy.order]
        return turn, 0 if turn < 2 else key, sequence.arrival_s, sequence.id

    def join(self, sequence: Running) -> None:
        """Take a sequence among the running ones, in the lowest free slot unless it has one."""
        if sequence.slot is None:
            sequence.slot = heapq.heappop(self.free_slots)
        self.waited.pop(sequence.id, None)
        self.running.append(sequence)

    def preempt(self, sequence: Running) -> None:
        """Put a running sequence back: its room is freed, all its tokens will be computed again."""
        self.leave(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preempted += 1
        self.waiting.append(sequence)

    def leave(self, sequence: Running) -> None:
        """The sequence is over, or put back: slot and memory are free again."""
        self.waited.pop(sequence.id, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        for one in (sequence, *sequence.followers):
            if one.slot is not None:
                heapq.heappush(self.free_slots, one.slot)
                one.slot = None
        self.memory.release(sequence)

    def forked(self, sequence: Running) -> list[Running]:
        """The prompt is computed: its further samples begin with what it holds, and run."""
        children, sequence.followers = sequence.followers, []
        for child in children:
            self.memory.fork(sequence, child)
            child.computed = sequence.computed
            self.join(child)
        return children
