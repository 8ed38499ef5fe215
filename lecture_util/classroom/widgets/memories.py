"""Four memories of the same pairs, computed: what each holds after every token, and gives back.

A token stores a value v under a key k; a question is a key, and the answer should be its value.
Everything is as small as it can be: one head, H numbers wide, and random pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

SHARPNESS = 16  # what a trained model would have learned: softmax(16 k·q) picks one key out of many
CACHE_BYTES, STATE_BYTES = 2, 4  # a number: caches in bf16, states in fp32
NAMES = ("KV cache", "window", "linear attention", "selective SSM")


@dataclass(frozen=True)
class Pairs:
    """Keys and values of unit length, and the steps Δ of the SSM, for `runs` random sequences.

    Shapes: k_XTH, v_XTH, delta_XT for X runs; the first run is the one that is drawn.
    """

    T: int = 48
    H: int = 16
    W: int = 8
    seed: int = 0
    runs: int = 64

    def __post_init__(self) -> None:
        for name, least in {"T": 2, "H": 2, "W": 1, "runs": 1}.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}: expected a whole number, at least {least}")

    @cached_property
    def _drawn(self) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(self.seed)
        k, v = rng.standard_normal((2, self.runs, self.T, self.H))
        delta_XT = np.log1p(np.exp(rng.normal(-3, 1, (self.runs, self.T))))  # softplus
        return (*(x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (k, v)), delta_XT)

    @property
    def k_XTH(self) -> np.ndarray:
        return self._drawn[0]

    @property
    def v_XTH(self) -> np.ndarray:
        return self._drawn[1]

    @property
    def delta_XT(self) -> np.ndarray:
        return self._drawn[2]

    def kept(self, t: int) -> np.ndarray:
        """The tokens a window holds after t of them: the last W-1, which the next will join."""
        return np.arange(max(0, t - self.W + 1), t)

    @cached_property
    def linear_TXHH(self) -> np.ndarray:
        """After each token: the sum of the outer products v kᵀ so far. Nothing ever leaves it."""
        return np.cumsum(np.einsum("xth,xtj->txhj", self.v_XTH, self.k_XTH), axis=0)

    @cached_property
    def ssm_TXHH(self) -> np.ndarray:
        """After each token: exp(ΔA) of the old state, A = -1, plus Δ v kᵀ."""
        state_XHH, states = np.zeros((self.runs, self.H, self.H)), []
        for t in range(self.T):
            delta_X11 = self.delta_XT[:, t, None, None]
            pair_XHH = self.v_XTH[:, t, :, None] * self.k_XTH[:, t, None, :]
            state_XHH = np.exp(-delta_X11) * state_XHH + delta_X11 * pair_XHH
            states.append(state_XHH)
        return np.stack(states)

    def read(self, t: int) -> dict[str, np.ndarray]:
        """What each memory answers after t tokens, asked for every one of them.

        Shapes: each (X, t, H): run, pair asked for, the value read back.
        """
        q_XtH = self.k_XTH[:, :t]
        states = {NAMES[2]: self.linear_TXHH[t - 1], NAMES[3]: self.ssm_TXHH[t - 1]}
        return {
            NAMES[0]: self._attend(q_XtH, np.arange(t)),
            NAMES[1]: self._attend(q_XtH, self.kept(t)),
            **{name: q_XtH @ state.swapaxes(-1, -2) for name, state in states.items()},
        }

    def _attend(self, q_XtH: np.ndarray, held: np.ndarray) -> np.ndarray:
        if not len(held):  # a window of one token holds nothing between steps
            return np.zeros_like(q_XtH)
        k_XSH, v_XSH = self.k_XTH[:, held], self.v_XTH[:, held]
        weights = np.exp(SHARPNESS * (q_XtH @ k_XSH.swapaxes(-1, -2) - 1))
        return weights / weights.sum(-1, keepdims=True) @ v_XSH

    @cached_property
    def recall(self) -> dict[str, np.ndarray]:
        """Cosine between what is read back and what was stored, the mean over the runs.

        Shapes: each (T, T): after how many tokens less one, and the pair asked for; nan before
                the pair has come.
        """
        recall = {name: np.full((self.T, self.T), np.nan) for name in NAMES}
        for t in range(1, self.T + 1):
            for name, read_XtH in self.read(t).items():
                dots = (read_XtH * self.v_XTH[:, :t]).sum(-1)
                lengths = np.linalg.norm(read_XtH, axis=-1)
                cosines = np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
                recall[name][t - 1, :t] = cosines.mean(0)
        return recall

    def numbers(self, t: int) -> dict[str, int]:
        """How many numbers each memory holds after t tokens."""
        pair, state = 2 * self.H, self.H**2
        return dict(zip(NAMES, (pair * t, pair * len(self.kept(t)), state, state), strict=True))

    def nbytes(self, t: int) -> dict[str, int]:
        """The same in bytes: caches of two bytes a number, states of four."""
        each = (CACHE_BYTES, CACHE_BYTES, STATE_BYTES, STATE_BYTES)
        return {name: n * b for (name, n), b in zip(self.numbers(t).items(), each, strict=True)}
