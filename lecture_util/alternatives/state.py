"""What a recurrent layer remembers: one state of fixed size, whatever the context.

A state is a tuple of tensors that a step takes and returns anew. Nothing is written in place, so
keeping an old one is a rollback, and two continuations of one prefix cannot disturb each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lecture_util.model.config import Config
from lecture_util.model.kv_cache import Cache, KVCache, NoCache
from lecture_util.model.shapes import ShapeError

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Snapshot:
    """Where a sequence stood: enough to go back to."""

    length: int
    states: dict[int, State]
    rollbacks: int  # how many had been made: see States.restore


class States:
    """The cache of a stack in which layers carry a state, a few of them perhaps keys and values.

    attention_layers: the layers that attend over everything; only they get slots for `capacity`
    tokens. All rows have the same length: a state that has taken in padding cannot give it back.
    New states count from `extend` on, so a forward pass that breaks off halfway leaves no trace.

    Bytes: the states, constant in S, and 2*S*K*H numbers a row for each attention layer.
    """

    def __init__(
        self,
        config: Config,
        B: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        attention_layers: Sequence[int] = (),
    ) -> None:
        strange = [layer for layer in attention_layers if layer not in range(config.L)]
        if strange or len(set(attention_layers)) < len(attention_layers):
            raise ValueError(
                f"attention_layers={list(attention_layers)}: expected different layers of "
                f"0..{config.L - 1}"
            )
        self.B, self.length = B, 0
        self.states: dict[int, State] = {}
        self.new_states: dict[int, State] = {}
        self.rollbacks: list[int] = []  # the length that each went back to
        self.slots = {layer: slot for slot, layer in enumerate(attention_layers)}
        self.kv = None
        if self.slots:
            self.kv = KVCache(replace(config, L=len(self.slots)), B, capacity, dtype, device)

    @property
    def lengths(self) -> list[int]:
        return [self.length] * self.B

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held: states and, for attention layers, slots used or not."""
        held = sum(part.nbytes for state in self.states.values() for part in state)
        return held + (self.kv.nbytes if self.kv else 0)

    def positions(self, shape: torch.Size, device: torch.device) -> Tensor:
        B, T = shape
        if B != self.B:
            raise ShapeError(f"tokens have B={B} rows but the states have {self.B}")
        if self.kv:
            self.kv.positions(shape, device)  # is there room?
        self.new_states = {}
        return torch.arange(self.length, self.length + T, device=device).expand(B, T)

    def attend(self, layer: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        if layer not in self.slots:
            raise ValueError(
                f"layer {layer} attends but has no slots: name it in attention_layers="
                f"{[*self.slots, layer]}"
            )
        return self.kv.attend(self.slots[layer], q_BTNH, k_BTKH, v_BTKH)

    def extend(self, T: int) -> None:
        self.length += T
        self.states, self.new_states = self.states | self.new_states, {}
        if self.kv:
            self.kv.extend(T)

    def snapshot(self) -> Snapshot:
        """Remember this point. Costs nothing: states are replaced, never changed."""
        return Snapshot(self.length, self.states, len(self.rollbacks))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to it; what came after is forgotten.

        Raises: ValueError if attention layers have forgotten what it needs: their keys are not
        copied, so after a rollback to 5 tokens no snapshot of more that was taken before holds.
        """
        if self.kv:
            least = min(self.rollbacks[snapshot.rollbacks :], default=snapshot.length)
            if least < snapshot.length:
                raise ValueError(
                    f"the snapshot is of {snapshot.length} tokens, but a rollback to {least} since "
                    "let the attention layers' later keys go: take it anew on the way"
                )
            self.kv.truncate(snapshot.length)
            self.rollbacks.append(snapshot.length)
        self.length, self.states = snapshot.length, snapshot.states

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Refused unless nothing is cut: a state does not remember what it was.

        Raises: ValueError pointing to snapshot().
        """
        wanted = [lengths] * self.B if isinstance(lengths, int) else list(lengths)
        if wanted != self.lengths:
            raise ValueError(
                f"truncate() to {wanted} of {self.lengths} tokens: a recurrent state cannot be "
                "cut. Take snapshot() beforehand and restore() it, and feed prompts of one length"
            )


def state_of(cache: Cache, layer: int) -> State | None:
    """The layer's state; None at the start of a sequence, or where nothing is kept (NoCache).

    Raises: TypeError for a cache that would keep the positions and lose the state.
    """
    if not isinstance(cache, States | NoCache):
        raise TypeError(
            f"layer {layer} carries a state, which a {type(cache).__name__} does not keep: pass "
            "States(config, B, capacity), or generate(..., new_cache=States)"
        )
    return cache.states.get(layer) if isinstance(cache, States) else None


def keep_state(cache: Cache, layer: int, state: State) -> None:
    """Hand the new state over; without `States` it is dropped."""
    if isinstance(cache, States):
        cache.new_states[layer] = state
