"""Messages and bytes between the ranks: predicted by a formula, counted as they are sent."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lecture_util.roofline.symbolic import is_symbolic, positive, shape_of, sizes

if TYPE_CHECKING:
    from lecture_util.model.config import Config

# By kind: what a rank sends around a ring, as a multiple of (M - 1)/M of the tensor.
RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
# Operators of torch, by the beginning of their names, once "_" is taken off.
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one forward, as each rank takes part in them.

    counts, nbytes: by kind. Bytes are those of the whole tensor, that is summed or put together.
    """

    counts: dict[str, Any] = field(default_factory=dict)
    nbytes: dict[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> Any:
        """How often the ranks wait for each other."""
        return sum(self.counts.values())

    @property
    def payload_bytes(self) -> Any:
        return sum(self.nbytes.values())

    def sent_bytes(self, M: Any) -> Any:
        """What each rank sends if all go around a ring of M: for an all-reduce 2(M-1)/M of it.

        An all-reduce is a reduce-scatter and an all-gather, each of M - 1 steps in which every rank
        passes 1/M of the tensor on. Exact where M divides the tensor.
        Source: Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
        """
        (M,) = sizes(M=M)
        if unknown := set(self.nbytes) - set(RING):
            raise ValueError(f"no ring formula for {', '.join(unknown)}: only {', '.join(RING)}")
        return sum(RING[kind] * n for kind, n in self.nbytes.items()) * (M - 1) / M


def forward_traffic(
    config: Config, B: Any, T: Any, M: Any, *, logits_for: Any = None, dtype_bytes: Any = 2
) -> Traffic:
    """What a forward over T tokens a sequence makes M ranks exchange; a decode step has T=1.

    2*L all-reduces of x_BTD after attention and MLP, one after the embedding, and an all-gather of
    the logits, for which each rank's share of V is rounded up. None of it depends on S, and none on
    M but for that rounding: M ranks wait as often as two, and one alone sends nothing. Symbols are
    taken to divide evenly, and M to be two or more.

    config: of the whole model. logits_for: positions of the T that reach the head, all if None.
    """
    c = shape_of(config)
    B, T, M = sizes(B=B, T=T, M=M)
    (logits,) = (T,) if logits_for is None else sizes(logits_for=logits_for)
    if not is_symbolic(logits - T) and logits > T:
        raise ValueError(f"logits_for is {logits}: of T={T} positions, at most {T} reach the head")
    width = positive("dtype_bytes", dtype_bytes, "2")
    if M == 1:
        return Traffic()
    all_reduces = 2 * c.L + 1
    return Traffic(
        {"all_reduce": all_reduces, "all_gather": 1},
        {
            "all_reduce": all_reduces * B * T * c.D * width,
            "all_gather": B * logits * M * vocabulary_rows(c.V, M) * width,
        },
    )


def vocabulary_rows(V: Any, M: Any, rank: int = 0) -> Any:
    """Rows of the vocabulary on one of M ranks: V/M rounded up, and fewer on the last.

    Raises: ValueError for a rank that is none of 0 to M - 1.
    """
    V, M = sizes(V=V, M=M)
    (rank,) = sizes(0, rank=rank)
    if not is_symbolic(M - rank) and rank >= M:
        raise ValueError(f"rank is {rank}: the ranks of M={M} are 0 to {M - 1}")
    if is_symbolic(V / M):
        return V / M
    share = -(-V // M)
    return max(0, min(share, V - rank * share))


class CountTraffic(TorchDispatchMode):
    """Count the collectives that torch is asked for: `with CountTraffic() as seen: model(tokens)`.

    Sees DTensor's and those called by hand; `seen.traffic` has what this rank took part in.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, int] = defaultdict(int)
        self._nbytes: dict[str, int] = defaultdict(int)

    @property
    def traffic(self) -> Traffic:
        return Traffic(dict(self._counts), dict(self._nbytes))

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        # DTensor first: it turns its operators into local ones and collectives, which come by here.
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        out = op(*args, **(kwargs or {}))
        if getattr(op, "namespace", "") in ("c10d", "_c10d_functional"):
            name = op._schema.name.split("::")[1].replace("_", "")
            for start, kind in KINDS.items():
                if name.startswith(start):
                    self._counts[kind] += 1
                    whole = max(map(_nbytes, (*args, out)))  # not its parts beside it
                    self._nbytes[kind] += whole
        return out


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
