"""Known-wrong answers to notebook 10 and the message each must get."""

import math

import torch


def _up(a, b):
    return -(-a // b)


def _share(held=lambda first, last: range(first, last + 1), pages=lambda S, last, P: _up(S, P),
           result=lambda unused, lent: unused / lent):  # fmt: skip
    def answer(lives, P):
        unused = lent = 0
        for first, last in lives:
            for S in held(first, last):
                lent += pages(S, last, P) * P
                unused += pages(S, last, P) * P - S
        return result(unused, lent)

    return answer


def _mean_of_sequences(lives, P):
    return sum(_share()([life], P) for life in lives) / len(lives)


def _mean_of_moments(lives, P):
    shares = [1 - S / (_up(S, P) * P) for a, b in lives for S in range(a, b + 1)]
    return sum(shares) / len(shares)


def _half_a_page(lives, P):
    unused, held = (P - 1) / 2, [S for a, b in lives for S in range(a, b + 1)]
    return unused * len(held) / (sum(held) + unused * len(held))


def _clears(lives, P):
    share = _share()(lives, P)
    lives.clear()
    return share


def _spots(page=lambda table, s, P: table[s // P], slot=lambda s, P: s % P, shift=0):
    return lambda table, start, count, P: [
        page(table, s, P) * P + slot(s, P) for s in range(start + shift, start + shift + count)
    ]


def _pops(table, start, count, P):
    right = _spots()(table, start, count, P)
    table.sort()
    return right


def _attends(cut=lambda length, P, J: length, scale=math.sqrt, order=lambda table: table,
             heads="repeat_interleave", mask=None, dim=-1, swapped=False):  # fmt: skip
    def answer(q_NH, k_MPKH, v_MPKH, table, length):
        (N, H), (P, K) = q_NH.shape, k_MPKH.shape[1:3]
        S = cut(length, P, len(table))
        k_SKH, v_SKH = (pool[order(table)].reshape(-1, K, H)[:S] for pool in (k_MPKH, v_MPKH))
        if swapped:
            k_SKH, v_SKH = v_SKH, k_SKH
        if heads == "repeat":
            k_SNH, v_SNH = k_SKH.repeat(1, N // K, 1), v_SKH.repeat(1, N // K, 1)
        else:
            k_SNH, v_SNH = (x.repeat_interleave(N // K, 1) for x in (k_SKH, v_SKH))
        scores_NS = (q_NH[:, None] * k_SNH.transpose(0, 1)).sum(-1) / scale(H)
        if mask is not None:
            scores_NS = scores_NS.masked_fill(torch.arange(S) >= length, mask)
        return (scores_NS.softmax(dim)[..., None] * v_SNH.transpose(0, 1)).sum(1)

    return answer


def _writes_zeros(q_NH, k_MPKH, v_MPKH, table, length):
    P = k_MPKH.shape[1]
    for s in range(length, len(table) * P):
        k_MPKH[table[s // P], s % P] = v_MPKH[table[s // P], s % P] = 0
    return _attends()(q_NH, k_MPKH, v_MPKH, table, length)


def _appends(when=0, counted=True, dropped=True, shared=lambda count: count > 1, last=-1,
             swap=False, inherits=False, says=None):  # fmt: skip
    def answer(pool, table, length, P):
        if length % P == when:
            table += [pool.free.pop()]
            if counted:
                pool.counts[table[-1]] += 1
        elif shared(pool.counts[table[last]]):
            old, new = table[last], pool.free.pop()
            pool.counts[new] = pool.counts[old] if inherits else 1
            pool.counts[old] -= dropped
            table[last] = new
            pool.copies += [(new, old) if swap else (old, new)]
        return says

    return answer


def _overwrites(counted):
    def answer(pool, table, length, P):
        if length % P == 0:
            table.append(pool.free.pop())
            pool.counts[table[-1]] = 1
        elif pool.counts[table[-1]] > 1:
            page = pool.free.pop()
            pool.copies.append((table[-1], page))
            if counted:
                pool.counts[page] = 1
            table[-1] = page
            pool.counts[table[-1]] -= 1

    return answer


def _kin(full=lambda p, P: p // P, extra=lambda p, n, k, P: 0,
         own=lambda p, n, P: _up(p + n, P) - p // P, unwritten=True):  # fmt: skip
    def answer(prompt, new, samples, P):
        if unwritten and not new:
            return _up(prompt, P)
        return full(prompt, P) + samples * own(prompt, new, P) + extra(prompt, new, samples, P)

    return answer


def _found(whole=0, chained=True, aligned=True, stop=True, spaces=True, size=None):
    """Page by page. whole: tokens of a prompt that are always computed, at least."""

    def answer(texts, space, prompt, P):
        n = 0
        for at in range(0, max(len(prompt) - whole, 0) // P * P, P):
            page = prompt[at : at + P]
            there = False
            for other, tokens in texts:
                if spaces and other != space:
                    continue
                starts = [at] if aligned else range(0, len(tokens), P)
                if chained:
                    there |= tokens[: at + P] == prompt[: at + P]
                else:
                    there |= any(tokens[i : i + P] == page for i in starts)
            if not there and stop:
                break
            n += there
        return n * (size or P)

    return answer


def _tokens(left):
    def answer(texts, space, prompt, P):
        lengths = [0]
        for other, tokens in texts:
            same = [a == b for a, b in zip(tokens, prompt[: len(prompt) - left], strict=False)]
            if other == space:
                lengths.append([*same, False].index(False))
        return max(lengths)

    return answer


def _of_each(choose):
    def answer(texts, space, prompt, P):
        mine = [_found(1)([text], space, prompt, P) for text in texts if text[0] == space]
        return choose(mine) if mine else 0

    return answer


def _names(name):
    def answer(texts, space, prompt, P):
        shelf = {
            name(t[: i + P]) for o, t in texts if o == space for i in range(0, len(t) - P + 1, P)
        }
        n = 0
        while n + P < len(prompt) and name(prompt[: n + P]) in shelf:
            n += P
        return n

    return answer


def _chained(texts, space, prompt, P):
    def names(tokens):
        name, out = hash(space), []
        for i in range(0, len(tokens) - P + 1, P):
            name = hash((name, tuple(tokens[i : i + P])))
            out.append(name)
        return out

    shelf = {name for other, tokens in texts if other == space for name in names(tokens)}
    n = 0
    for name in names(prompt[:-1]):
        if name not in shelf:
            break
        n += P
    return n


def _empties(texts, space, prompt, P):
    found = _found(1)(texts, space, prompt, P)
    prompt.clear()
    return found


ATTEMPTS = [
    ("10.1", "at the end", _share(held=lambda a, b: [b]), "last forward was counted"),
    ("10.1", "at the beginning", _share(held=lambda a, b: [a]), "first forward was counted"),
    ("10.1", "last left out", _share(held=range), "the final forward is missing"),
    ("10.1", "one more page", _share(pages=lambda S, last, P: S // P + 1), "one too many"),
    ("10.1", "what is used", _share(result=lambda u, n: 1 - u / n), "*holds* a token"),
    ("10.1", "in percent", _share(result=lambda u, n: 100 * u / n), "in percent"),
    ("10.1", "over stored", _share(result=lambda u, n: u / (n - u)), "over tokens stored"),
    ("10.1", "ahead", _share(pages=lambda S, last, P: _up(last, P)), "will need at its end"),
    ("10.1", "the formula", _half_a_page, "these lengths are known"),
    ("10.1", "sequences averaged", _mean_of_sequences, "the sequences' shares"),
    ("10.1", "moments averaged", _mean_of_moments, "shares of single moments"),
    ("10.1", "clears its input", _clears, "changed what it was given"),
    ("10.1", "a constant", lambda lives, P: 0.04, "expected"),
    ("10.2", "no table", lambda table, start, count, P: list(range(start, start + count)),
     "the table is not used"),
    ("10.2", "straight on",
     lambda t, start, n, P: [t[start // P] * P + start % P + i for i in range(n)],
     "the rest just follow"),
    ("10.2", "from 0", lambda t, start, n, P: _spots()(t, 0, n, P), "`start` is forgotten"),
    ("10.2", "one on", _spots(shift=1), "one position too far"),
    ("10.2", "count is the end",
     lambda t, a, b, P: [t[s // P] * P + s % P for s in range(a, b)], "taken for the end"),
    ("10.2", "page + slot", lambda t, a, n, P: [t[s // P] + s % P for s in range(a, a + n)],
     "times P is missing"),
    ("10.2", "pairs", lambda t, a, n, P: [divmod(s, P) for s in range(a, a + n)], "expected"),
    ("10.2", "page and slot",
     lambda t, a, n, P: [(t[s // P], s % P) for s in range(a, a + n)], "asked is one number"),
    ("10.2", "pages", lambda t, a, n, P: [t[s // P] for s in range(a, a + n)], "expected"),
    ("10.2", "sorted", lambda t, a, n, P: _spots()(sorted(t), a, n, P), "the table was sorted"),
    ("10.2", "sorts its input", _pops, "changed what it was given"),
    ("10.3", "masks scores", _attends(cut=lambda S, P, J: J * P, mask=-math.inf), "0 * NaN is NaN"),
    ("10.3", "whole last page", _attends(cut=lambda S, P, J: _up(S, P) * P), "read to its end"),
    ("10.3", "whole table", _attends(cut=lambda S, P, J: J * P), "all pages of the table"),
    ("10.3", "masks with 0", _attends(cut=lambda S, P, J: J * P, mask=0.0), "e^0 is 1"),
    ("10.3", "repeats wrongly", _attends(heads="repeat"), "n % K in yours"),
    ("10.3", "no scale", _attends(scale=lambda H: 1), "not divided by the square root"),
    ("10.3", "sorted", _attends(order=sorted), "the pool's order"),
    ("10.3", "sorted downwards", _attends(order=lambda table: sorted(table)[::-1]),
     "the last page first"),
    ("10.3", "no table", _attends(order=lambda table: list(range(len(table)))), "first pages"),
    ("10.3", "swapped", _attends(swapped=True), "expected"),
    ("10.3", "softmax over heads", _attends(dim=0), "runs over heads"),
    ("10.3", "writes zeros", _writes_zeros, "changed what it was given"),
    ("10.3", "the query", lambda q, k, v, table, length: q, "expected"),
    ("10.4", "as printed", _appends(when=1, counted=False, dropped=False), "3 mistakes are still"),
    ("10.4", "asks at 1", _appends(when=1), "at length % P == 0"),
    ("10.4", "not counted", _appends(counted=False), "its count is 1"),
    ("10.4", "old kept", _appends(dropped=False), "the old page no longer"),
    ("10.4", "two of three", _appends(counted=False, dropped=False), "2 mistakes are still"),
    ("10.4", "first mended", _appends(when=1, dropped=False), "2 mistakes are still there: `leng"),
    ("10.4", "never copies", _appends(shared=lambda n: False), "two texts write to one page"),
    ("10.4", "always copies", _appends(shared=lambda n: True), "although nobody else"),
    ("10.4", "turned", _appends(swap=True), "(from, to)"),
    ("10.4", "first page", _appends(last=0), "is the table's last"),
    ("10.4", "takes the count", _appends(inherits=True), "takes over the old page's count"),
    ("10.4", "from three on", _appends(shared=lambda n: n > 2), "expected"),
    ("10.4", "table first", _overwrites(counted=True), "table[-1] is the new page by then"),
    ("10.4", "table first, not counted", _overwrites(counted=False), "and count the new one"),
    ("10.4", "returns", _appends(says=[]), "return nothing"),
    ("10.4", "does nothing", lambda pool, table, length, P: None, "expected"),
    ("10.5", "no sharing", lambda p, n, k, P: k * _up(p + n, P), "nothing is shared in yours"),
    ("10.5", "all shared", lambda p, n, k, P: _up(p + n, P), "all is shared"),
    ("10.5", "no special case", _kin(unwritten=False), "nobody has written yet"),
    ("10.5", "open page shared",
     _kin(full=_up, own=lambda p, n, P: _up(p + n, P) - _up(p, P)), "never copied"),
    ("10.5", "new pages", _kin(full=_up, own=lambda p, n, P: _up(n, P), unwritten=False),
     "begin a page of their own"),
    ("10.5", "old one too", _kin(full=_up), "counted beside the copies"),
    ("10.5", "one copy less", _kin(extra=lambda p, n, k, P: -(p % P > 0)), "one copy too few"),
    ("10.5", "tokens", lambda p, n, k, P: P * _kin()(p, n, k, P), "expected"),
    ("10.6", "tokens, one left", _tokens(1), "single tokens were counted: only full"),
    ("10.6", "tokens", _tokens(0), "and one token is left"),
    ("10.6", "everything", _found(0), "all is found in yours"),
    ("10.6", "a page left", lambda texts, space, prompt, P: _found(P)(texts, space, prompt, P),
     "a whole page is always left"),
    ("10.6", "page alone", _found(1, chained=False, aligned=False), "wherever it stood"),
    ("10.6", "page and number", _found(1, chained=False), "tokens and its number"),
    ("10.6", "over the hole", _found(1, chained=False, stop=False), "after the first miss"),
    ("10.6", "anywhere", _found(1, chained=False, aligned=False, stop=False), "pages anywhere"),
    ("10.6", "no spaces", _found(1, spaces=False), "spaces are ignored"),
    ("10.6", "first text", _of_each(lambda found: found[0]), "only the first text"),
    ("10.6", "sum", _of_each(sum), "added up"),
    ("10.6", "pages", _found(1, size=1), "number of pages"),
    ("10.6", "the rest", lambda *args: len(args[2]) - _found(1)(*args), "what remains"),
    ("10.6", "by hash", _names(lambda tokens: hash(tuple(tokens))), "have one hash"),
    ("10.6", "by chained hash", _chained, "have one hash"),
    ("10.6", "by digits", _names(lambda tokens: "".join(str(t) for t in tokens)), "look alike"),
    ("10.6", "nothing", lambda texts, space, prompt, P: 0, "nothing is ever found"),
    ("10.6", "empties the prompt", _empties, "changed what it was given"),
]  # fmt: skip
