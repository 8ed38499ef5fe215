"""Checks of notebook 09: continuous batching."""

import copy
import itertools

from lecture_util.classroom.checker import Wrong
from lecture_util.classroom.exercise import exercise


def _untouched(c, answer, args) -> None:
    """One check: called with these very objects, not copies, the answer leaves them alone."""
    before = copy.deepcopy(args)
    c.call(lambda: answer(*args))
    c.expect(args == before, "your function changed what it was given: build new lists instead")


def _mixed(*parts):
    """Messages of every combination of mistakes, one choice of each part, the right one as "".

    parts: dicts from a message to a setting; yields (message, the settings), but not all right.
    """
    for chosen in itertools.product(*(part.items() for part in parts)):
        if message := "; and ".join(said for said, _ in chosen if said):
            yield message, [setting for _, setting in chosen]


def _batches(lengths, slots):
    return [lengths[i : i + slots] for i in range(0, len(lengths), slots)]


def _seats(lengths, slots, *, share=None, best=None):
    batches = _batches(lengths, slots)
    forwards = sum(map(max, batches))
    rows = sum(len(batch) * max(batch) for batch in batches)
    right = max(-(-sum(lengths) // slots), max(lengths))
    padding = share(lengths, slots, batches) if share else 1 - sum(lengths) / rows
    return padding, forwards / (best(lengths, slots) if best else right)


SHARES = {
    "": None,
    "the first number is the useful share; padding is the rest": lambda n, slots, batches: (
        sum(n) / sum(len(b) * max(b) for b in batches)
    ),
    "the batches' shares were averaged, as if all had as many rows: divide the sums": (
        lambda n, slots, batches: (
            sum(1 - sum(b) / (len(b) * max(b)) for b in batches) / len(batches)
        )
    ),
    "the last batch was counted with `slots` rows: it has as many as there are texts left": (
        lambda n, slots, batches: 1 - sum(n) / sum(slots * max(b) for b in batches)
    ),
    "every batch was given as many forwards as the longest text of all: each ends with its own "
    "longest": lambda n, slots, batches: 1 - sum(n) / (len(n) * max(n)),
    "the texts were sorted first: batches are in the order given": lambda n, slots, batches: (
        1 - sum(n) / sum(len(b) * max(b) for b in _batches(sorted(n), slots))
    ),
}
BESTS = {
    "": None,
    "no scheduler is done before the longest text is": lambda n, slots: -(-sum(n) // slots),
    "forwards are whole: round up what all texts need in `slots` slots": lambda n, slots: max(
        sum(n) / slots, max(n)
    ),
    "forwards are whole and no scheduler is done before the longest text is": lambda n, slots: (
        sum(n) / slots
    ),
    "the longest text alone is no bound where there are many: the slots have to compute all "
    "tokens": lambda n, slots: max(n),
}


@exercise(
    "9.1",
    title="Empty seats",
    minutes=10,
    trains="predicting what a better scheduler can win, from lengths alone",
    hints=(
        "Take the lengths apart into batches. How many forwards does one batch take, and how many "
        "rows does each of these forwards have?",
        "Useful rows are the lengths themselves: a text of n tokens needs n. The rest of all rows "
        "computed is padding.",
        "With all slots always busy, `slots` tokens come of a forward. Forwards are whole; and the "
        "longest text needs one for each of its tokens, whoever else is there.",
    ),
)
def _(answer, c):
    cases = [
        ([4, 2, 6, 3, 5, 3, 4, 2], 4),
        ([3, 7, 1, 2, 9], 2),  # the last batch has one row
        ([30, 1, 2, 1, 2, 3], 3),  # the longest text decides
        (c.ints(11, low=2, high=40), c.int(3, 5)),
        ([c.int(2, 9)] * 4, 4),  # nothing to win
        (c.ints(5, low=2, high=20), 1),
        ([*(c.int(2, 9) for _ in range(13)), 7], 4),
    ]
    wrong = {
        message: lambda n, slots, share=share, best=best: _seats(n, slots, share=share, best=best)
        for message, (share, best) in _mixed(SHARES, BESTS)
    }
    wrong["the second number is upside down: the static batches' forwards come on top"] = (
        lambda n, slots: (_seats(n, slots)[0], 1 / _seats(n, slots)[1])
    )
    only_share = (
        "the second number is 1 over the useful share: the last batch has fewer rows, forwards are "
        "whole, and the longest text takes its time"
    )
    wrong[only_share] = lambda n, slots: (
        _seats(n, slots)[0],
        1 / (1 - _seats(n, slots)[0]),
    )
    wrong["the other way round: the share of padding first"] = lambda n, slots: _seats(n, slots)[
        ::-1
    ]
    c.like(answer, _seats, cases, rtol=1e-9, atol=1e-12, wrong=wrong)
    _untouched(c, answer, cases[0])


def _who(
    arrivals,
    lengths,
    slots,
    *,
    static=False,
    late=0,
    one=False,
    newest=False,
    shortest=False,
    blind=False,
    idle=True,
    strict=False,
    overfull=0,
):
    """Forward by forward; each keyword is a usual mistake."""
    forwards, left, coming, t = [], {}, list(range(len(lengths))), 0
    while coming or left:
        room = slots + overfull - len(left) if not (static and left) else 0
        here = [i for i in coming if blind or (arrivals[i] < t if strict else arrivals[i] <= t)]
        if newest:
            here.reverse()
        if shortest:
            here.sort(key=lambda i: lengths[i])
        for number in here[: max(0, min(room, 1) if one else room)]:
            coming.remove(number)
            left[number] = lengths[number] + late
        if left or idle:
            forwards.append(sorted(left))
        left = {number: n - 1 for number, n in left.items() if n > 1}
        t += 1
        if t > 10_000:
            raise RuntimeError("never done")
    return forwards


def _schedules(**mistakes):
    return lambda *args: _who(*args, **mistakes)


def _ascending(rows):
    """The rows with their numbers in order; whatever is no list of rows comes back as it is."""
    try:
        return [sorted(row) for row in rows]
    except TypeError:
        return rows


def _static_full(arrivals, lengths, slots):
    """A static batch whose rows stay until the last is done, as the tensor has them."""
    forwards, coming, t = [], list(range(len(lengths))), 0
    while coming:
        batch = [i for i in coming if arrivals[i] <= t][:slots]
        coming = [i for i in coming if i not in batch]
        forwards += [batch] * max((lengths[i] for i in batch), default=1)
        t = len(forwards)
    return forwards


@exercise(
    "9.2",
    title="A scheduler",
    minutes=15,
    trains="iteration-level scheduling, with arrivals",
    hints=(
        "Keep a dict of how many forwards each running request still needs, and a list of those "
        "that are to come. One turn of the loop is one forward.",
        "At the beginning of a turn, let in from the front of the list while there is a free slot "
        "and the first in it has arrived. Then note who is in. Then count down.",
        "Whoever has counted down to 0 leaves before the next turn lets others in. The loop goes "
        "on while anybody runs or is to come, also if nobody is there at the moment.",
    ),
)
def _(answer, c):
    many = c.int(7, 10)
    cases = [
        ([0] * 8, [4, 2, 6, 3, 5, 3, 4, 2], 4),
        ([0, 0.5, 1, 9, 9.2], [2, 3, 1, 2, 2], 2),  # nobody is there in between
        ([3], [2], 1),
        ([0, 0, 0, 0, 0], [1, 1, 3, 1, 2], 3),  # two leave at once, two come in at once
        ([0, 1, 1, 2, 2, 2], [5, 4, 1, 3, 1, 2], 2),
        (sorted(c.float(0, 9) for _ in range(many)), c.ints(many, low=1, high=12), c.int(2, 3)),
        (sorted(c.float(0, 5) for _ in range(many)), c.ints(many, low=1, high=12), c.int(3, 4)),
    ]
    rows = [(c.call(answer, *case), _who(*case)) for case in cases]
    if any(got != want for got, want in rows) and all(
        _ascending(got) == want for got, want in rows
    ):
        raise Wrong("a forward's numbers are not in order: return them ascending")
    c.like(
        answer,
        _who,
        cases,
        wrong={
            "that is static batching: nobody joins before all are done": _schedules(static=True),
            "that is static batching: whoever is done is carried along to the end of the batch, "
            "and nobody joins": _static_full,
            "whoever is done stays one forward too long: a text of n tokens is in n forwards": (
                _schedules(late=1)
            ),
            "only one is let in a forward: fill all slots that are free": _schedules(one=True),
            "the newest is served first: who came first goes first": _schedules(newest=True),
            "the shortest is served first: nobody knows how long a text will be, so who came "
            "first goes first": _schedules(shortest=True),
            "arrivals are not looked at: nobody can be served before coming": _schedules(
                blind=True
            ),
            "forwards without anybody are missing: time goes on, so each is an empty list": (
                _schedules(idle=False)
            ),
            "whoever arrives just as a forward begins may be in it": _schedules(strict=True),
            "one too many is running: at most `slots`": _schedules(overfull=1),
            "one slot is never used: `slots` may run": _schedules(overfull=-1),
            "the last forward is for nobody: the list ends when all are done": lambda *args: [
                *_who(*args),
                [],
            ],
        },
    )
    _untouched(c, answer, cases[1])


def _flat(pieces, capacity, *, first="computed", place="position", sees="end"):
    positions, places, ends = [], [], []
    for length, computed, count, row in pieces:
        start = {
            "computed": computed,
            "length": length if count == 1 else computed,
            "zero": 0,
            "next": computed + 1,
        }[first]
        at = {"position": computed, "zero": 0, "theirs": start}[place]
        positions += range(start, start + count)
        places += range(row * capacity + at, row * capacity + at + count)
        ends.append({"end": computed + count, "length": length, "before": computed + count - 1,
                     "count": count}[sees])  # fmt: skip
    return positions, places, ends


FIRSTS = {
    "": "computed",
    "a decode step's token stands at length - 1, not at length: it is already counted": "length",
    "positions begin at 0 in every piece: they go on after what is computed": "zero",
    "positions are one too far: with n tokens computed, the next stands at n": "next",
}
PLACES = {
    "": "position",
    "places begin at the row's start again: a second chunk writes over the first": "zero",
}
SEES = {
    "": "end",
    "a chunk sees its text's full length: what comes after it isn't computed yet": "length",
    "the last token doesn't see itself: computed + count tokens are there by then": "before",
    "each piece sees only itself: what was computed before belongs to its text too": "count",
}


@exercise(
    "9.3",
    title="Where everything goes",
    minutes=12,
    trains="finding three mistakes that gave fluent nonsense in real engines",
    hints=(
        "Write the pieces down as a text with places 0, 1, 2, ... Which of them are computed now? "
        "A text of 7 tokens, 6 of them computed, decodes.",
        "Positions and places run in step: a row's place for position p is p behind its start, "
        "whatever was in this forward.",
        "The last token of a chunk sees what was computed before, and the chunk. The rest of the "
        "prompt comes in a later forward: nothing is there to be seen.",
    ),
)
def _(answer, c):
    n, k = c.int(12, 18), c.int(3, 6)
    cases = [
        ([(7, 6, 1, 0)], 20),  # decoding
        ([(9, 0, 4, 1)], 16),  # the first chunk of a prompt
        ([(9, 4, 5, 1)], 16),  # and the last
        ([(9, 4, 3, 2)], 16),
        ([(n, k, 1, 1)], 24),  # a chunk of one token: no decode step
        ([(5, 4, 1, 2), (3, 0, 3, 0), (n, k, k, 1), (n, n - 1, 1, 3)], c.int(20, 30)),
        ([(1, 0, 1, 0)], 4),
    ]
    wrong = {}
    for message, (first, place, sees) in _mixed(FIRSTS, PLACES, SEES):
        parts = message.count("; and ") + 1
        more = f"{parts} mistakes are still there: " if parts > 1 else ""
        for at in {place, "theirs" if first != "computed" and place == "position" else place}:
            key = more + message
            if at == "theirs":
                key += " (and places follow the positions)"
            wrong[key] = lambda pieces, capacity, first=first, at=at, sees=sees: _flat(
                pieces, capacity, first=first, place=at, sees=sees
            )
    c.like(answer, _flat, cases, wrong=wrong)
    _untouched(c, answer, cases[5])


def _budget(fixed, token, decoding, prompt, target, *, most=None, chunk=None, forwards=None,
            ttft=None):  # fmt: skip
    """Each keyword replaces one step; later steps go on with what came of it."""
    budget = most(fixed, token, decoding, target) if most else (target - fixed) // token
    size = chunk(budget, decoding) if chunk else budget - decoding
    count = forwards(prompt, size) if forwards else -(-prompt // size)
    exact = count * (fixed + decoding * token) + prompt * token
    if ttft:
        exact = ttft(fixed, token, decoding, prompt, target, budget, count)
    return budget, count, exact


MOSTS = {
    "": None,
    "the constant part of a forward is forgotten in the budget": lambda f, t, d, g: g // t,
    "the budget was rounded up: then a forward takes longer than the target": lambda f, t, d, g: (
        -(-(g - f) // t)
    ),
    "one token more fits: a forward that takes exactly the target keeps it": lambda f, t, d, g: (
        (g - f - 1) // t
    ),
}
CHUNKS = {
    "": None,
    "the readers' tokens count in the budget: a chunk gets what they leave": lambda b, d: b,
}
FORWARDS = {
    "": None,
    "the last chunk may be shorter, but it is a forward too: round up": lambda p, n: p // n,
    "one forward too many: the last chunk's own forward gives the first token": lambda p, n: (
        -(-p // n) + 1
    ),
}
TTFTS = {
    "": None,
    "the last forward is shorter: it has only what is left of the prompt": (
        lambda f, t, d, p, g, b, n: n * (f + b * t)
    ),
    "a forward takes fixed_us + n * token_us, which may be less than the target": (
        lambda f, t, d, p, g, b, n: n * g
    ),
    "the readers' tokens are computed in these forwards too, and take their time": (
        lambda f, t, d, p, g, b, n: n * f + p * t
    ),
    "the constant part comes with every forward, not once": lambda f, t, d, p, g, b, n: (
        f + n * d * t + p * t
    ),
    "the time is of the prompt's last forward only: its chunks come one after the other": (
        lambda f, t, d, p, g, b, n: f + (d + p - (n - 1) * (b - d)) * t
    ),
}


@exercise(
    "9.4",
    title="Choose the budget",
    minutes=12,
    trains="from a target for the pace to a token budget, and what the newcomer pays",
    hints=(
        "A reader's pause is one forward. How many tokens can a forward have and keep the target?",
        "Of these tokens, each reader takes one. The rest is the chunk. How many chunks is the "
        "prompt, if the last may be shorter?",
        "Over all these forwards: the constant part and the readers' tokens come in each of them, "
        "and every token of the prompt comes once.",
    ),
)
def _(answer, c):
    cases = [
        (8000, 100, 8, 1000, 30_000),
        (7000, 90, c.int(5, 20), c.int(900, 1500), 20_000 + c.int(1, 80)),
        (5000, 50, 16, 40, 12_000),  # the prompt fits into one forward
        (9000, 300, 10, 7, 12_600),  # a token at a time, nearly
        (c.int(4000, 6000), c.int(30, 70), c.int(20, 40), c.int(2000, 4000), c.int(15_000, 20_000)),
        (6000, 100, 4, 192, 11_200),  # the chunks divide the prompt exactly
    ]
    wrong = {
        message: lambda *args, s=settings: _budget(
            *args, most=s[0], chunk=s[1], forwards=s[2], ttft=s[3]
        )
        for message, settings in _mixed(MOSTS, CHUNKS, FORWARDS, TTFTS)
    }
    wrong["the first number is the chunk: the readers' tokens count in a budget"] = lambda *args: (
        _budget(*args)[0] - args[2],
        *_budget(*args)[1:],
    )
    wrong["time is counted in microseconds, whole ones"] = lambda *args: (
        *_budget(*args)[:2], _budget(*args)[2] / 1e6
    )  # fmt: skip
    wrong["time is counted in microseconds: yours is in milliseconds"] = lambda *args: (
        *_budget(*args)[:2], _budget(*args)[2] / 1e3
    )  # fmt: skip
    c.like(answer, _budget, cases, wrong=wrong)


def _plan(running, waiting, room, slots, *, oldest=False, again=False, keeps=False, passes=False,
          back=0, spare=True, eager=False):  # fmt: skip
    """One forward's bookkeeping; each keyword as True is one of the printed mistakes."""
    running, waiting = list(running), list(waiting)
    free, before = room - sum(tokens for _, tokens in running), len(running)
    while running and free < len(running) + eager:
        victim = running.pop(0 if oldest else -1)
        waiting.insert(back if back == 0 else len(waiting), victim)
        free += victim[1]
    free -= len(running) if spare else 0
    if again or len(running) == before:
        for one in list(waiting):
            if len(running) >= slots:
                break
            if one[1] > free:
                free -= one[1] if keeps else 0
                if passes:
                    continue
                break
            waiting.remove(one)
            running.append(one)
            free -= one[1]
    return [n for n, _ in running], [n for n, _ in waiting], free


PRINTED = {
    "oldest": "the oldest is put back: it has the most to compute again, and with the newest "
    "victim somebody always gets to the end",
    "again": "somebody comes in right after another was put back: the victim itself may be the "
    "first to come in again",
    "keeps": "a refused one keeps the memory that it asked for",
    "passes": "one who doesn't fit is passed by others: while small ones come, a large one waits "
    "for ever",
}


@exercise(
    "9.5",
    title="An admission that goes wrong",
    minutes=15,
    trains="finding four mistakes in a rule that decides who keeps memory",
    hints=(
        "Follow the memory: note `free` after every line, for one text that fits and for one that "
        "doesn't.",
        "Who has computed least, and who is nearest to its end? Put back the one who loses least. "
        "And remember whether anybody was put back at all.",
        "Compare before you take. If the first in the queue doesn't fit, nobody behind it comes in "
        "either.",
    ),
)
def _(answer, c):
    a, b = c.ints(2, low=20, high=29)
    cases = [
        ([(0, 5), (1, 7)], [(2, 6), (3, 4)], 40, 4),  # all fit
        ([(0, 9), (1, 5), (2, 4)], [(3, 2)], 19, 4),  # the newest goes back, and stays out
        ([(0, 9), (1, 5), (2, 5)], [], 20, 4),  # the victim would fit at once
        ([(0, 10)], [(1, 30), (2, 3)], 30, 4),  # the first doesn't fit, the second would
        ([(0, 10)], [(1, 3), (2, 30), (3, 2)], 30, 4),
        ([(0, 4), (1, 4)], [(2, 3), (3, 3)], 60, 3),  # slots end
        ([(0, 8), (1, 8), (2, 8), (3, 8)], [(4, 5)], 33, 5),
        ([(0, 8), (1, 9), (2, 10), (3, 11)], [(4, 1)], 29, 5),  # two go back
        ([(0, 3)], [(1, 5)], 9, 2),  # just enough
        ([(0, 5), (1, 5)], [], 12, 4),  # just enough for those who run
        ([], [(0, a), (1, b)], a + b, 2),
        ([(7, a), (8, b)], [(9, 2)], a + b + 1, 3),
    ]
    wrong = {}
    for n in range(1, 5):
        for names in itertools.combinations(PRINTED, n):
            still = f"{n} mistakes are still there: " if n > 1 else ""
            made = dict.fromkeys(names, True)
            wrong[still + "; ".join(PRINTED[name] for name in names)] = lambda *args, made=made: (
                _plan(*args, **made)
            )
    wrong["whoever was put back goes to the end of the queue: it has waited its turn once, so it "
          "stands first"] = lambda *args: _plan(*args, back=1)  # fmt: skip
    wrong["room for the next token of everybody running was not set aside: subtract it before you "
          "admit"] = lambda *args: _plan(*args, spare=False)  # fmt: skip
    wrong["somebody is put back although there is just enough: a token for each of those running "
          "is all they need"] = lambda *args: _plan(*args, eager=True)  # fmt: skip
    wrong["nobody is admitted at all"] = lambda running, waiting, room, slots: _plan(
        running, waiting, room, 0
    )
    c.like(answer, _plan, cases, wrong=wrong)
    _untouched(c, answer, cases[1])
