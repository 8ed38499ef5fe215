"""Known-wrong answers of notebook 09, each with the message it must get."""

import math


def _split(lengths, slots):
    rest, batches = list(lengths), []
    while rest:
        batches.append(rest[:slots])
        rest = rest[slots:]
    return batches


def _empty(padding=None, fewest=None, order=lambda lengths: lengths):
    def answer(lengths, slots):
        batches = _split(order(lengths), slots)
        computed = [len(batch) * max(batch) for batch in batches]
        share = padding(lengths, slots, batches) if padding else 1 - sum(lengths) / sum(computed)
        at_least = fewest(lengths, slots) if fewest else max(
            math.ceil(sum(lengths) / slots), max(lengths)
        )  # fmt: skip
        return share, sum(max(batch) for batch in _split(lengths, slots)) / at_least

    return answer


def _sorts_in_place(lengths, slots):
    right = _empty()(lengths, slots)
    lengths.sort()
    return right


def _timetable(join=lambda t, left, free: free, leave=0, key=None, came=lambda a, t: a <= t,
               note_empty=True, slots_of=lambda slots: slots):  # fmt: skip
    def answer(arrivals, lengths, slots):
        todo, left, table, t = set(range(len(lengths))), {}, [], 0
        while todo or left:
            free = join(t, left, slots_of(slots) - len(left))
            ready = sorted((i for i in todo if came(arrivals[i], t)), key=key and key(lengths))
            for i in ready[: max(free, 0)]:
                todo.remove(i)
                left[i] = lengths[i] + leave
            if left or note_empty:
                table.append(sorted(left))
            for i in list(left):
                left[i] -= 1
                if left[i] <= 0:
                    del left[i]
            t += 1
        return table

    return answer


def _carried(arrivals, lengths, slots):
    table, nxt = [], 0
    while nxt < len(lengths):
        group = []
        while nxt < len(lengths) and len(group) < slots and arrivals[nxt] <= len(table):
            group.append(nxt)
            nxt += 1
        table += [list(group) for _ in range(max([lengths[i] for i in group], default=1))]
    return table


def _by_slots(arrivals, lengths, slots):
    seats, nxt, table = [None] * slots, 0, []
    left = list(lengths)
    while nxt < len(lengths) or any(seat is not None for seat in seats):
        for j in range(slots):
            if seats[j] is None and nxt < len(lengths) and arrivals[nxt] <= len(table):
                seats[j], nxt = nxt, nxt + 1
        table.append([i for i in seats if i is not None])
        for j, i in enumerate(seats):
            if i is not None:
                left[i] -= 1
                seats[j] = i if left[i] else None
    return table


def _pops(arrivals, lengths, slots):
    right = _timetable()(arrivals, lengths, slots)
    arrivals.pop()
    return right


def _run(first=lambda n, done, count: done, place=lambda done, first: done,
         sees=lambda n, done, count: done + count):  # fmt: skip
    def answer(pieces, capacity):
        out = [], [], []
        for n, done, count, row in pieces:
            start = first(n, done, count)
            for i in range(count):
                out[0].append(start + i)
                out[1].append(capacity * row + place(done, start) + i)
            out[2].append(sees(n, done, count))
        return out

    return answer


def _decodes_late(n, done, count):
    return n if count == 1 else done


def _whole(n, done, count):
    return n


def _target(budget=lambda f, t, d, g: (g - f) // t, chunk=lambda b, d: b - d, up=math.ceil,
            more=0, time=None, result=lambda b, d: b):  # fmt: skip
    def answer(fixed_us, token_us, decoding, prompt, target_us):
        most = budget(fixed_us, token_us, decoding, target_us)
        count = up(prompt / chunk(most, decoding)) + more
        if time:
            took = time(fixed_us, token_us, decoding, prompt, target_us, most, count)
        else:
            took = count * fixed_us + (count * decoding + prompt) * token_us
        return result(most, decoding), count, took

    return answer


def _memory(victim=-1, same=False, keep=False, skip=False, end=False, reserve=True, admit=True,
            strict=0):  # fmt: skip
    def answer(running, waiting, room, slots):
        running, waiting, back = list(running), list(waiting), 0
        free = room - sum(n for _, n in running)
        while running and len(running) + strict > free:
            gone = running.pop(victim)
            back += 1
            free += gone[1]
            if end:
                waiting.append(gone)
            else:
                waiting.insert(0, gone)
        if reserve:
            free -= len(running)
        stay = []
        for i, one in enumerate(waiting):
            if not admit or (back and not same) or len(running) >= slots:
                stay += waiting[i:]
                break
            if one[1] <= free:
                free -= one[1]
                running.append(one)
                continue
            if keep:
                free -= one[1]
            if not skip:
                stay += waiting[i:]
                break
            stay.append(one)
        return [a for a, _ in running], [a for a, _ in stay], free

    return answer


def _memory_in_place(running, waiting, room, slots):
    right = _memory()(running, waiting, room, slots)
    running.clear()
    return right


ATTEMPTS = [
    (
        "9.1",
        "useful share",
        _empty(lambda n, s, bs: sum(n) / sum(len(b) * max(b) for b in bs)),
        "the first number is the useful share",
    ),
    (
        "9.1",
        "mean of shares",
        _empty(lambda n, s, bs: 1 - sum(sum(b) / len(b) / max(b) for b in bs) / len(bs)),
        "the batches' shares were averaged",
    ),
    (
        "9.1",
        "last batch full",
        _empty(lambda n, s, bs: 1 - sum(n) / (s * sum(map(max, bs)))),
        "the last batch was counted with `slots` rows",
    ),
    (
        "9.1",
        "longest of all",
        _empty(lambda n, s, bs: 1 - sum(n) / len(n) / max(n)),
        "every batch was given",
    ),
    ("9.1", "sorted", _empty(order=sorted), "sorted first"),
    ("9.1", "longest forgotten", _empty(fewest=lambda n, s: math.ceil(sum(n) / s)), "before the"),
    ("9.1", "not whole", _empty(fewest=lambda n, s: max(sum(n) / s, max(n))), "forwards are whole"),
    ("9.1", "neither", _empty(fewest=lambda n, s: sum(n) / s), "forwards are whole and no"),
    ("9.1", "longest alone", _empty(fewest=lambda n, s: max(n)), "is no bound where"),
    (
        "9.1",
        "two mistakes",
        _empty(lambda n, s, bs: 1 - sum(n) / (s * sum(map(max, bs))), lambda n, s: max(n)),
        "`slots` rows: it has as many as there are texts left; and the longest text alone",
    ),
    (
        "9.1",
        "upside down",
        lambda n, s: (_empty()(n, s)[0], 1 / _empty()(n, s)[1]),
        "upside down",
    ),
    (
        "9.1",
        "from the share",
        lambda n, s: (_empty()(n, s)[0], 1 / (1 - _empty()(n, s)[0])),
        "1 over the useful share",
    ),
    ("9.1", "swapped", lambda n, s: _empty()(n, s)[::-1], "the other way round"),
    ("9.1", "in place", _sorts_in_place, "changed what it was given"),
    ("9.1", "a constant", lambda n, s: (0.25, 1.5), "expected"),
    (
        "9.2",
        "static",
        _timetable(join=lambda t, left, free: 0 if left else free),
        "that is static batching: nobody joins",
    ),
    ("9.2", "static and padded", _carried, "carried along"),
    ("9.2", "one forward too long", _timetable(leave=1), "one forward too long"),
    ("9.2", "one at a time", _timetable(join=lambda t, left, free: min(free, 1)), "only one is"),
    ("9.2", "newest first", _timetable(key=lambda n: lambda i: -i), "the newest is served first"),
    ("9.2", "shortest first", _timetable(key=lambda n: lambda i: (n[i], i)), "the shortest is"),
    ("9.2", "arrivals ignored", _timetable(came=lambda a, t: True), "arrivals are not looked at"),
    ("9.2", "idle left out", _timetable(note_empty=False), "forwards without anybody"),
    ("9.2", "after the bell", _timetable(came=lambda a, t: a < t), "just as a forward begins"),
    ("9.2", "one too many", _timetable(slots_of=lambda n: n + 1), "one too many is running"),
    (
        "9.2",
        "descending",
        lambda a, n, s: [row[::-1] for row in _timetable()(a, n, s)],
        "return them ascending",
    ),
    ("9.2", "by slots", _by_slots, "return them ascending"),
    ("9.2", "one forward for nobody", lambda a, n, s: [*_timetable()(a, n, s), []], "for nobody"),
    ("9.2", "in place", _pops, "changed what it was given"),
    ("9.2", "everybody always", lambda a, n, s: [list(range(len(n)))] * max(n), "expected"),
    (
        "9.3",
        "as printed",
        _run(_decodes_late, lambda done, first: 0, _whole),
        "3 mistakes are still there",
    ),
    ("9.3", "decode position", _run(_decodes_late), "not at length: it is already counted"),
    (
        "9.3",
        "decode position and place",
        _run(_decodes_late, lambda done, first: first),
        "places follow the positions",
    ),
    ("9.3", "places from zero", _run(place=lambda done, first: 0), "writes over the first"),
    ("9.3", "full length", _run(sees=_whole), "a chunk sees its text's full length"),
    ("9.3", "two left", _run(_decodes_late, sees=_whole), "2 mistakes are still there"),
    ("9.3", "positions from zero", _run(lambda n, done, count: 0), "positions begin at 0"),
    ("9.3", "one too far", _run(lambda n, done, count: done + 1), "one too far"),
    (
        "9.3",
        "blind to itself",
        _run(sees=lambda n, done, count: done + count - 1),
        "doesn't see itself",
    ),
    ("9.3", "sees itself only", _run(sees=lambda n, done, count: count), "sees only itself"),
    ("9.3", "nothing", lambda pieces, capacity: ([], [], []), "expected"),
    ("9.4", "no constant", _target(budget=lambda f, t, d, g: g // t), "is forgotten in the budget"),
    ("9.4", "rounded up", _target(budget=lambda f, t, d, g: -((f - g) // t)), "rounded up"),
    (
        "9.4",
        "below the target",
        _target(budget=lambda f, t, d, g: (g - f - 1) // t),
        "one token more fits",
    ),
    ("9.4", "readers forgotten", _target(chunk=lambda b, d: b), "a chunk gets what they leave"),
    ("9.4", "rounded down", _target(up=math.floor), "round up"),
    ("9.4", "one too many", _target(more=1), "one forward too many"),
    (
        "9.4",
        "full last chunk",
        _target(time=lambda f, t, d, p, g, b, n: n * (f + b * t)),
        "the last forward is shorter",
    ),
    ("9.4", "target times", _target(time=lambda f, t, d, p, g, b, n: n * g), "less than the"),
    (
        "9.4",
        "readers take no time",
        _target(time=lambda f, t, d, p, g, b, n: n * f + p * t),
        "take their time",
    ),
    (
        "9.4",
        "constant once",
        _target(time=lambda f, t, d, p, g, b, n: f + (n * d + p) * t),
        "not once",
    ),
    (
        "9.4",
        "last forward only",
        _target(time=lambda f, t, d, p, g, b, n: f + (d + p - (n - 1) * (b - d)) * t),
        "last forward only",
    ),
    (
        "9.4",
        "two mistakes",
        _target(up=math.floor, time=lambda f, t, d, p, g, b, n: n * g),
        "round up; and a forward takes",
    ),
    ("9.4", "the chunk", _target(result=lambda b, d: b - d), "the first number is the chunk"),
    (
        "9.4",
        "in seconds",
        lambda *args: (*_target()(*args)[:2], _target()(*args)[2] * 1e-6),
        "in microseconds",
    ),
    (
        "9.4",
        "in milliseconds",
        lambda *args: (*_target()(*args)[:2], _target()(*args)[2] / 1000),
        "yours is in milliseconds",
    ),
    ("9.4", "a constant", lambda *args: (220, 5, 50_000), "expected"),
    ("9.5", "as printed", _memory(0, True, True, True), "4 mistakes are still there"),
    ("9.5", "oldest", _memory(victim=0), "the oldest is put back"),
    ("9.5", "in again", _memory(same=True), "somebody comes in right after"),
    ("9.5", "keeps", _memory(keep=True), "keeps the memory"),
    ("9.5", "passes", _memory(skip=True), "is passed by others"),
    ("9.5", "two left", _memory(keep=True, skip=True), "2 mistakes are still there: a refused"),
    ("9.5", "three left", _memory(0, True, True), "3 mistakes are still there: the oldest"),
    ("9.5", "to the end", _memory(end=True), "goes to the end of the queue"),
    ("9.5", "no reserve", _memory(reserve=False), "was not set aside"),
    ("9.5", "one too many put back", _memory(strict=1), "although there is just enough"),
    ("9.5", "nobody", _memory(admit=False), "nobody is admitted"),
    ("9.5", "in place", _memory_in_place, "changed what it was given"),
    (
        "9.5",
        "nothing changes",
        lambda running, waiting, room, slots: (
            [n for n, _ in running],
            [n for n, _ in waiting],
            room,
        ),
        "expected",
    ),
]
