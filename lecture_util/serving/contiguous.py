"""Contiguous regions of unequal size, first fit: how caches were allocated before pages.

Each sequence gets one stretch of memory, as long as somebody thinks it will need. Three things are
lost: what is kept for tokens still to come, what was kept for tokens that never come, and gaps
between stretches that are too small for anybody. Bookkeeping only, to measure that.

Source: Kwon et al. 2023, arXiv:2309.06180, figures 2 and 3; `reserve` has the names of its Orca
        variants.
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import EndsAfter, Running

RESERVES = ("max", "pow2", "oracle")


@dataclass(frozen=True)
class Waste:
    """All the memory, in tokens: what holds one, and why the rest does not.

    reserved   kept for a token that will come, before the text ends
    internal   lent, and no token will ever be there
    external   lent to nobody: too small a gap, or nobody waits
    """

    stored: int
    reserved: int
    internal: int
    external: int

    @property
    def total(self) -> int:
        return self.stored + self.reserved + self.internal + self.external


class Regions:
    """`total_tokens` of memory in one piece. A `Memory` for the scheduler.

    reserve: how much a sequence gets. "max": all that it may ask for; "pow2": its prompt and the
             next power of two of its true output; "oracle": exactly what it will need. The last two
             know what no server knows, and read it off an `EndsAfter`.
    """

    def __init__(self, total_tokens: int, reserve: str = "max") -> None:
        if type(total_tokens) is not int or total_tokens < 1:
            raise ValueError(f"total_tokens={total_tokens!r}: expected a whole number, at least 1")
        if reserve not in RESERVES:
            raise ValueError(f"reserve={reserve!r}: expected one of {', '.join(RESERVES)}")
        self.total_tokens, self.reserve = total_tokens, reserve
        self.regions: dict[int, tuple[int, int]] = {}  # sequence id -> (start, size)
        self.lengths: dict[int, int] = {}
        self.finals: dict[int, int] = {}

    def fits(self, tokens: int) -> bool:
        return tokens <= self.total_tokens

    def check(self, sequence: Running) -> None:
        """Raises: ValueError for what regions cannot serve: samples, or an end nobody knows."""
        if sequence.followers:
            samples = sequence.request.params.samples
            raise ValueError(f"samples={samples}: regions cannot be shared, ask for one")
        final_length(sequence)

    def begin(self, sequence: Running) -> int | None:
        final, size = final_length(sequence), self._size(sequence)
        start = self.first_fit(size)
        if start is None:
            return None
        self.regions[sequence.id] = (start, size)
        self.lengths[sequence.id] = 0
        self.finals[sequence.id] = final
        return 0

    def first_fit(self, size: int) -> int | None:
        """The lowest gap that has room for `size` tokens."""
        start = 0
        for begin, length in sorted(self.regions.values()):
            if begin - start >= size:
                return start
            start = begin + length
        return start if self.total_tokens - start >= size else None

    def grow(self, sequence: Running, tokens: int) -> bool:
        if tokens > self.regions[sequence.id][1]:
            return False
        self.lengths[sequence.id] = max(tokens, self.lengths[sequence.id])
        return True

    def fork(self, sequence: Running, child: Running) -> None:
        raise NotImplementedError("regions cannot be shared: ask for one sample a request")

    def commit(self, sequence: Running) -> None:
        pass

    def release(self, sequence: Running) -> None:
        for held in (self.regions, self.lengths, self.finals):
            held.pop(sequence.id, None)

    def held(self) -> tuple[int, int]:
        return sum(self.lengths.values()), sum(size for _, size in self.regions.values())

    def waste(self) -> Waste:
        """Where the memory is, now."""
        stored, lent = self.held()
        final = sum(self.finals.values())
        return Waste(stored, final - stored, lent - final, self.total_tokens - lent)

    def _size(self, sequence: Running) -> int:
        if self.reserve == "max":
            return sequence.longest
        final = final_length(sequence)
        if self.reserve == "oracle":
            return final
        output = final - len(sequence.request.prompt) + 1
        return min(sequence.longest, final - output + (1 << (output - 1).bit_length()))


def final_length(sequence: Running) -> int:
    """The tokens it will have in the cache at its end; the last one drawn is never computed.

    Raises: ValueError if that cannot be known.
    """
    stop = sequence.request.params.stop
    if not isinstance(stop, EndsAfter):
        raise ValueError(
            f"stop={stop!r}: only a request with stop=EndsAfter(n) tells where it will end"
        )
    return min(sequence.longest, len(sequence.request.prompt) + stop.count - 1)
