"""What benchmarks/pruning.py recorded of models with fewer layers, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lecture_util.classroom.figures.small_caches import recorded


@dataclass(frozen=True)
class Row:
    """One model of the record. Perplexity `repaired` and the `repair` are None where not recorded.

    measured, predicted: how many times as fast as the whole model a token is decoded.
    tokens_per_s: of the CPU time of the process that decoded.
    """

    kept: int
    dropped: tuple[int, ...]
    perplexity: float
    repaired: float | None
    repair: str | None
    nbytes: int
    measured: float
    predicted: float
    tokens_per_s: float


@dataclass(frozen=True)
class Record:
    """Models by layers kept, the largest first; `conditions` says when and on what."""

    L: int
    rows: tuple[Row, ...]
    conditions: str


def read_record(record: Mapping[str, Any] | None = None) -> Record:
    """A record as benchmarks/pruning.py writes it; None: the one in its results.

    Raises: FileNotFoundError naming the script; ValueError naming what the record lacks.
    """
    if record is None:
        record = recorded("pruning")
    try:
        repairs = record.get("layers repaired", {})
        rows = [_row(int(kept), one, repairs.get(kept)) for kept, one in record["layers"].items()]
        conditions = f"Recorded {record['date']} on {record['hardware']}."
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the record is not as benchmarks/pruning.py writes it, {type(error).__name__}: "
            f"{error}. Run its sections importance and layers"
        ) from error
    rows.sort(key=lambda row: -row.kept)
    if not rows or rows[0].dropped:
        raise ValueError("the record lacks the whole model: run benchmarks/pruning.py to its end")
    L = rows[0].kept
    for row in rows:
        left = set(range(L)) - set(row.dropped)
        if len(left) != row.kept or len(left) + len(row.dropped) != L:
            raise ValueError(
                f"the record's {row.kept} layers are not what {L} less {list(row.dropped)} leave"
            )
    return Record(L, tuple(rows), conditions)


def _row(kept: int, one: Mapping[str, Any], repair: Mapping[str, Any] | None) -> Row:
    repaired = words = None
    if repair is not None:
        options, repaired = repair["options"], float(repair["after"])
        words = f"{options['steps']} steps of {options['B']}×{options['T']} tokens"
    return Row(
        kept, tuple(int(layer) for layer in one["dropped"]), float(one["perplexity"]), repaired,
        words, int(one["weight_bytes"]), float(one["times_as_fast"]),
        float(one["predicted_times_as_fast"]), float(one["tokens_per_cpu_s"]),
    )  # fmt: skip
