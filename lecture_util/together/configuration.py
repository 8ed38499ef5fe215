"""One way of answering requests: what is switched on, and what excludes what."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = {
    "fp32": "as loaded",
    "bf16": "half the bytes",
    "int8": "int8 rows, activations rounded on the fly",
    "int4": "4-bit groups of 64, activations in bf16",
}
SCHEDULES = {
    "single": "one request after another",
    "static": "a batch is filled once and kept to its end",
    "continuous": "every forward takes in who waits and lets go who is done",
}
DRAFTS = {
    "ngram": "look the last words up in the text so far",
    "medusa": "heads that guess a tree",
    "eagle": "a layer that continues the features",
}
HEADS = ("medusa", "eagle")


class Incompatible(ValueError):
    """Techniques that this course's code does not combine, each with its reason."""


@dataclass(frozen=True)
class Configuration:
    """What is switched on. The default is a cached loop over the unchanged model.

    weights   what the layers hold, see WEIGHTS; the head keeps the model's numbers
    student   the pruned and repaired model instead of the whole one
    cache     keep keys and values
    schedule  see SCHEDULES
    slots     sequences computed together
    pages     keys and values in pages of 16, instead of rows as long as the longest request
    prefix    pages of equal beginnings are shared
    draft     see DRAFTS, or None
    guesses   guesses a round

    Raises: Incompatible with every reason at once; ValueError for a value that is none.
    """

    weights: str = "fp32"
    student: bool = False
    cache: bool = True
    schedule: str = "single"
    slots: int = 1
    pages: bool = False
    prefix: bool = False
    draft: str | None = None
    guesses: int = 4

    def __post_init__(self) -> None:
        for name, value, known in (
            ("weights", self.weights, WEIGHTS),
            ("schedule", self.schedule, SCHEDULES),
            ("draft", self.draft, (None, *DRAFTS)),
        ):
            if value not in tuple(known):
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")
        for name in ("student", "cache", "pages", "prefix"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected True or False")
        for name in ("slots", "guesses"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a whole number from 1")
        if self.draft is None:  # it says nothing then: two alike should be equal
            object.__setattr__(self, "guesses", 4)
        if reasons := conflicts(self):
            raise Incompatible("; ".join(reasons))

    def __str__(self) -> str:
        """Such as 'student int4, continuous x16, pages, prefix'."""
        parts = ["student " * self.student + self.weights]
        parts += ["cache" if self.cache else "no cache"] * (self.schedule == "single")
        parts += [f"{self.schedule} x{self.slots}"] * (self.schedule != "single")
        parts += [name for name in ("pages", "prefix") if getattr(self, name)]
        parts += [f"{self.draft} x{self.guesses}"] * (self.draft is not None)
        return ", ".join(parts)


def conflicts(c: Configuration) -> list[str]:
    """Why these techniques do not go together; empty where they do."""
    batched = c.schedule != "single"
    why = [
        (not c.cache and batched, "without a cache every forward reads whole texts: a batch needs "
         "cache=True"),
        (not c.cache and (c.pages or c.prefix), "pages hold a cache, and there is none: "
         "cache=True"),
        (not c.cache and c.draft is not None, "a draft is verified on top of what was read: "
         "cache=True"),
        (not batched and c.slots > 1, f"one request after another uses one slot, not {c.slots}: "
         "schedule='static' or 'continuous'"),
        (c.pages and c.schedule != "continuous", "pages are lent as texts grow, by the scheduler "
         "that plans each forward: schedule='continuous'"),
        (c.prefix and not c.pages, "what is shared are pages: pages=True"),
        (c.draft is not None and batched, "speculation spends the computing that a batch of one "
         "leaves idle, and a batch has spent it already; our loop verifies one text: "
         "schedule='single'"),
        (c.draft in HEADS and c.student, f"{c.draft}'s heads were trained on the whole model's "
         "features, and their loader takes no other: student=False, or draft='ngram'"),
    ]  # fmt: skip
    return [reason for holds, reason in why if holds]
