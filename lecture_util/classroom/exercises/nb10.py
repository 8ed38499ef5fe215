"""Checks of notebook 10: paged attention."""

import copy
import itertools
import math
from types import SimpleNamespace

import torch

from lecture_util.classroom.checker import Wrong
from lecture_util.classroom.exercise import exercise


def _untouched(c, answer, args) -> None:
    """One check: called with these very objects, not copies, the answer leaves them alone."""
    before = copy.deepcopy(args)
    c.call(lambda: answer(*args))
    same = all(
        torch.allclose(x, y, equal_nan=True) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(args, before, strict=True)
    )
    c.expect(same, "your function changed what it was given: build new values instead")


def _pages(S, P):
    return -(-S // P)


def _moments(lives, most=0, least=0):
    return [(S, last) for first, last in lives for S in range(first + least, last + 1 - most)]


def _waste(moments=_moments, lent=lambda S, last, P: _pages(S, P) * P, share=None):
    def answer(lives, P):
        places = [(S, lent(S, last, P)) for S, last in moments(lives)]
        stored, rented = (sum(column) for column in zip(*places, strict=True))
        return 1 - stored / rented if share is None else share(stored, rented)

    return answer


def _averaged(groups):
    """The mean of shares, where the share of the sums is asked for."""

    def answer(lives, P):
        shares = [_waste(moments=lambda lives: lives)(group, P) for group in groups(lives)]
        return sum(shares) / len(shares)

    return answer


@exercise(
    "10.1",
    title="What a page size wastes",
    minutes=10,
    trains="counting a share over a sequence's whole life",
    hints=(
        "Take one sequence at one moment, with S tokens. How many pages has it, how many places "
        "have these, and how many of those hold a token?",
        "Rounding up without floats: -(-S // P) pages.",
        "Add up the places lent over all sequences and all S from first to last, both included; "
        "add up the tokens likewise; divide only at the end.",
    ),
)
def _(answer, c):
    cases = []
    for P in (16, c.int(3, 6), 1, c.choice([7, 11, 13])):
        firsts = c.ints(4, low=3, high=90)
        lives = [(first, first + c.int(1, 70)) for first in firsts] + [(2 * P, 2 * P)]
        cases.append((lives, P))
    cases.append(([(5, 5), (8, 8), (30, 31)], 4))
    c.like(
        answer, _waste(), cases, rtol=1e-5, atol=1e-7,
        wrong={
            "only each sequence's last forward was counted: on the way there places are unused, "
            "too": _waste(lambda lives: [(last, last) for _, last in lives]),
            "only each sequence's first forward was counted: it goes on until `last`":
                _waste(lambda lives: lives),
            "the final forward is missing: `last` is included":
                _waste(lambda lives: _moments(lives, most=1)),
            "S // P + 1 pages is one too many where the last page is full: round up":
                _waste(lent=lambda S, last, P: (S // P + 1) * P),
            "that is the share that *holds* a token; asked is the rest":
                _waste(share=lambda stored, rented: stored / rented),
            "that is in percent: asked is a number from 0 to 1":
                _waste(share=lambda stored, rented: 100 * (1 - stored / rented)),
            "unused places over tokens stored: divide by the places lent":
                _waste(share=lambda stored, rented: (rented - stored) / stored),
            "each sequence was given the pages that it will need at its end: pages are rented when "
            "the last one is full": _waste(lent=lambda S, last, P: _pages(last, P) * P),
            "(P - 1)/2 is an average over many lengths: these lengths are known, so count":
                _waste(lent=lambda S, last, P: S + (P - 1) / 2),
            "you averaged the sequences' shares: whoever lives longer counts more":
                _averaged(lambda lives: [[(S, 0) for S in range(a, b + 1)] for a, b in lives]),
            "you averaged the shares of single moments: add up places first, divide once":
                _averaged(lambda lives: [[moment] for moment in _moments(lives)]),
        },
    )  # fmt: skip
    _untouched(c, answer, cases[0])


def _places(table, start, count, P):
    return [table[s // P] * P + s % P for s in range(start, start + count)]


def _placed(place=lambda table, s, P: table[s // P] * P + s % P, run=None):
    def answer(table, start, count, P):
        positions = range(start, start + count) if run is None else run(start, count)
        return [place(table, s, P) for s in positions]

    return answer


@exercise(
    "10.2",
    title="Where a token goes",
    minutes=6,
    trains="translating positions to places",
    hints=(
        "Which entry of the table has position s, and which slot of that page?",
        "Page table[s // P] begins at place table[s // P] * P.",
    ),
)
def _(answer, c):
    cases = []
    for P in (4, c.int(5, 9), 16, 1):
        table = c.ints(6, low=0, high=40)
        table = sorted(table, reverse=True)[:3] + table[3:]  # never in order
        start = c.int(1, 2 * P)
        cases += [(table, start, 2 * P + 1, P), (table, P, 1, P)]
    cases += [([5, 2], 0, 3, 4), ([3], 1, 0, 4)]
    c.like(
        answer, _places, cases,
        wrong={
            "the table is not used: places follow positions only in contiguous memory":
                _placed(lambda table, s, P: s),
            "the first token's place is looked up and the rest just follow: the next page may lie "
            "anywhere": lambda table, start, count, P: [
                _places(table, start, 1, P)[0] + i for i in range(count)
            ],
            "`start` is forgotten: these are the places of the sequence's first tokens":
                _placed(run=lambda start, count: range(count)),
            "each is one position too far: the first of them stands at `start`":
                _placed(run=lambda start, count: range(start + 1, start + 1 + count)),
            "`count` was taken for the end: the last position is start + count - 1":
                _placed(run=range),
            "a page begins at page * P: times P is missing":
                _placed(lambda table, s, P: table[s // P] + s % P),
            "page and slot are right, but asked is one number: the place in the flattened pool":
                _placed(lambda table, s, P: (table[s // P], s % P)),
            "the table was sorted: its order is the text's, not the pool's":
                _placed(lambda table, s, P: sorted(table)[s // P] * P + s % P),
        },
    )  # fmt: skip
    _untouched(c, answer, cases[0])


def _attend(q_NH, k_MPKH, v_MPKH, table, length):
    """A loop over heads and positions."""
    (N, H), (_, P, K, _) = q_NH.shape, k_MPKH.shape
    out_NH = torch.zeros_like(q_NH)
    for n in range(N):
        where = [(table[s // P], s % P, n // (N // K)) for s in range(length)]
        scores = torch.stack([q_NH[n] @ k_MPKH[w] for w in where]) / math.sqrt(H)
        for w, weight in zip(where, scores.softmax(0), strict=True):
            out_NH[n] += weight * v_MPKH[w]
    return out_NH


def _attended(
    length=lambda length, P, J: length,
    scale=lambda H: H**-0.5,
    tiled=False,
    pages=lambda table: table,
    mask=None,
    over=-1,
):
    """Gathers all of the table; the keywords make the usual mistakes."""

    def answer(q_NH, k_MPKH, v_MPKH, table, length_):
        N, H = q_NH.shape
        P, K = k_MPKH.shape[1:3]
        chosen = pages(list(table))
        k, v = (pool[chosen].flatten(0, 1) for pool in (k_MPKH, v_MPKH))
        S = length(length_, P, len(chosen)) if mask is None else len(k)
        heads = [n % K if tiled else n // (N // K) for n in range(N)]
        k, v = k[:S, heads], v[:S, heads]
        scores = torch.einsum("nh,snh->ns", q_NH, k) * scale(H)
        if mask is not None:
            scores[:, length_:] = mask
        return torch.einsum("ns,snh->nh", scores.softmax(over), v)

    return answer


@exercise(
    "10.3",
    title="Attention in pages",
    minutes=15,
    trains="reading in order, grouped heads, and what a mask cannot hide",
    hints=(
        "k_MPKH[table] puts the pages in the text's order. Two axes then are one: which page, and "
        "which slot in it.",
        "Cut off what lies past the length *before* anything is multiplied, from keys and from "
        "values: 0 times NaN is NaN.",
        "With q_NH.unflatten(0, (K, G)) the einsum 'kgh,skh->kgs' lets query heads read their own "
        "KV head, and nothing is repeated.",
    ),
)
def _(answer, c):
    cases = []
    for N, K, H, P, length in (
        (6, 2, 4, 4, 4 * 2 + c.int(1, 3)),
        (4, 4, 6, 3, 6),
        (4, 2, 8, 5, 1),
        (9, 3, 5, 2, c.choice([5, 7])),
        (4, 1, 3, 1, c.int(3, 5)),
    ):
        q, k, v = (c.randn(*s).double() for s in ((N, H), (11, P, K, H), (11, P, K, H)))
        table = sorted(c.ints(_pages(length, P) + 1, low=0, high=10), reverse=True)
        cases.append((q, k, v, table if cases else [*table[-1:], *table[:-1]], length))
    c.like(
        answer, _attend, cases, rtol=1e-9, atol=1e-12,
        wrong={
            "the last page is read to its end: past the length lies what somebody else left "
            "there": _attended(length=lambda S, P, J: _pages(S, P) * P),
            "all pages of the table are read: only the first `length` places count":
                _attended(length=lambda S, P, J: J * P),
            "scores past the length are set to 0: e^0 is 1, so they still take a share":
                _attended(mask=0.0),
            "query head n reads KV head n % K in yours: heads that share a KV head stand side by "
            "side, so n // G": _attended(tiled=True),
            "the scores are not divided by the square root of H": _attended(scale=lambda H: 1.0),
            "pages were taken in the pool's order: a table's order is the text's":
                _attended(pages=sorted),
            "the table was sorted, the last page first: a table's order is the text's":
                _attended(pages=lambda table: sorted(table, reverse=True)),
            "the table is not used: you read the pool's first pages":
                _attended(pages=lambda table: list(range(len(table)))),
            "the newest token is left out: it looks at itself, too":
                _attended(length=lambda S, P, J: S - 1),
            "the softmax runs over heads: each head's weights over the positions add up to "
            "1": _attended(over=0),
        },
    )  # fmt: skip
    for q, k, v, table, length in cases[:4]:
        P = k.shape[1]
        ours = {(table[s // P], s % P) for s in range(length)}
        for page, slot in itertools.product(range(len(k)), range(P)):
            if (page, slot) not in ours:
                k[page, slot] = v[page, slot] = math.nan
        got = c.call(answer, q, k, v, table, length)
        c.expect(
            not got.isnan().any(),
            "with NaN in places that nobody wrote, the result is NaN: a score of -inf gives weight "
            "0, and 0 * NaN is NaN. Leave those values out altogether",
        )
        c.close(got, _attend(q, k, v, table, length), rtol=1e-9, atol=1e-12)
    _untouched(c, answer, cases[0])


MISTAKES = {
    "asks": "`length` does not count the new token here, so a page is needed at length % P == 0",
    "new": "a page that was just taken is held by one table: its count is 1",
    "old": "after the copy this table holds the old page no longer: count it once less",
}


def _append(asks=False, new=False, old=False, copy="shared", at=-1, turned=False, both=False,
            late=None):  # fmt: skip
    """append, with mistakes switched on."""

    def answer(pool, table, length, P):
        if length % P == (1 if asks else 0):
            page = pool.free.pop()
            table.append(page)
            if not new:
                pool.counts[page] = 1
        elif copy == "always" or (copy == "shared" and pool.counts[table[at]] > 1):
            page, source = pool.free.pop(), table[at]
            pool.copies.append((page, source) if turned else (source, page))
            pool.counts[page] = pool.counts[source] if both else 1
            table[at] = page
            if late is not None:
                pool.counts[page] = late
            elif not old:
                pool.counts[source] -= 1

    return answer


def _story(append, steps, num_pages, P):
    """What pool and tables look like after each step, up to an error."""
    pool = SimpleNamespace(free=list(range(num_pages))[::-1], counts=[0] * num_pages, copies=[])
    tables, lengths, seen = {"A": [pool.free.pop()]}, {"A": 1}, []
    pool.counts[tables["A"][0]] = 1
    for what, name, other in steps:
        if what == "fork":
            tables[name], lengths[name] = list(tables[other]), lengths[other]
            for page in set(tables[name]):
                pool.counts[page] += 1
        else:
            table, length = tables.setdefault(name, []), lengths.setdefault(name, 0)
            try:
                said = append(pool, table, length, P)
            except (NotImplementedError, KeyboardInterrupt):
                raise
            except Exception as error:
                return [*seen, f"your function raised {type(error).__name__}: {error}"]
            if said is not None:
                return [*seen, "it returned something: change pool and table, return nothing"]
            lengths[name] += 1
        seen.append(copy.deepcopy((tables, pool.counts, sorted(pool.free), pool.copies)))
    return seen


def _held(counts):
    """The counts that are not 0, by page; whatever is no list comes back as it is."""
    return {page: n for page, n in enumerate(counts) if n} if isinstance(counts, list) else counts


def _steps(c, P):
    grow = [("append", "A", "")] * (2 * P + c.int(1, max(P - 2, 1)))
    return [
        *grow, ("fork", "B", "A"), ("fork", "C", "B"), ("append", "B", ""), ("append", "C", ""),
        *[("append", "A", "")] * (P + 1), *[("append", "B", "")] * P, ("fork", "D", "C"),
        ("append", "C", ""), ("append", "D", ""), *[("append", "E", "")] * 2,
    ]  # fmt: skip


@exercise(
    "10.4",
    title="An allocator that loses pages",
    minutes=15,
    trains="finding mistakes in reference counting",
    hints=(
        "Go through it with P = 4, from an empty table: at which lengths must a page be taken?",
        "After every call, a page's count must be the number of tables that list it. Check it for "
        "both branches, and for both pages of a copy.",
    ),
)
def _(answer, c):
    for P in (4, c.int(3, 5), 2):
        steps = _steps(c, P)
        got = c.call(lambda P=P, steps=steps: _story(answer, steps, 40, P))
        want = _story(_append(), steps, 40, P)
        if got == want:
            c.passed += 1
            continue
        for flags in itertools.product((False, True), repeat=3):
            named = dict(zip(MISTAKES, flags, strict=True))
            if any(flags) and got == _story(_append(**named), steps, 40, P):
                left = [MISTAKES[name] for name, flag in named.items() if flag]
                many = f"{len(left)} mistakes are still there: " if len(left) > 1 else ""
                raise Wrong(many + "; ".join(left))
        others = {
            "nothing is copied: two texts write to one page": _append(copy="never"),
            "it copies although nobody else holds the page: only at a count above 1": _append(
                copy="always"
            ),
            "the copy is turned round: (from, to)": _append(turned=True),
            "the first page is copied: the one written to is the table's last": _append(at=0),
            "the copy takes over the old page's count: only this table holds it": _append(
                both=True
            ),
            "table[-1] is the new page by then, and it is counted once less: note the old one "
            "before you write to the table": _append(late=0),
            "table[-1] is the new page by then, and it is counted once less: note the old one "
            "before you write to the table, and count the new one": _append(late=-1),
        }
        for message, wrong in others.items():
            if got == _story(wrong, steps, 40, P):
                raise Wrong(message)
        i = next(i for i, (g, w) in enumerate(zip(got, want, strict=False)) if g != w)
        what, name, other = steps[i]
        event = f"P={P}, step {i + 1}, {what} {name}{other and ' of ' + other}"
        if isinstance(got[i], str):
            raise Wrong(f"{event}: {got[i]}")
        parts = zip(("tables", "counts", "free pages", "copies"), got[i], want[i], strict=True)
        part, is_, should = next(p for p in parts if p[1] != p[2])
        if part == "counts":
            is_, should = _held(is_), _held(should)
        raise Wrong(f"{event}: {part} are {is_}, expected {should}")


def _family(prompt, new, samples, P):
    """Follow the pages: fork, then let each write."""
    pages = [{("prompt", j) for j in range(_pages(prompt, P))} for _ in range(samples)]
    for i, s in itertools.product(range(samples), range(prompt, prompt + new)):
        j = s // P
        mine = ("own", i, j)
        if ("prompt", j) in pages[i]:
            if sum(("prompt", j) in p for p in pages) > 1:
                pages[i].remove(("prompt", j))
                pages[i].add(mine)
        else:
            pages[i].add(mine)
    return len(set().union(*pages))


def _families(count, always=False):
    def answer(prompt, new, samples, P):
        if new == 0 and not always:
            return _pages(prompt, P)
        return count(prompt, new, samples, P)

    return answer


def _own(p, n, P):
    return _pages(p + n, P) - p // P


@exercise(
    "10.5",
    title="Pages for a family",
    minutes=8,
    trains="predicting what sharing saves",
    hints=(
        "Which pages of the prompt are never written to again? Those are shared to the end.",
        "The prompt's last page, if it is not full, is copied by whoever writes while others hold "
        "it, too. By all of them?",
        "The last one to write finds a count of 1 and keeps the old page. So each has its own "
        "from the first open page on, and none is left over. With no new token nobody has written.",
    ),
)
def _(answer, c):
    P, samples = c.int(4, 9), c.int(3, 6)
    cases = [
        (3 * P + c.int(1, P - 2), 1, samples, P),
        (2 * P + P - 1, 2, samples, P),
        (3 * P + 2, c.int(2 * P, 4 * P), samples, P),
        (2 * P, P + 1, samples, P),
        (2 * P, P, samples, P),
        (P - 1, 1, samples, P),
        (3 * P + 1, 0, samples, P),
        (3 * P, 0, samples, P),
        (3 * P + 1, 5, 1, P),
        (c.int(40, 90), c.int(20, 60), 8, 16),
        (7, 3, 4, 1),
    ]
    counts = {
        "nothing is shared in yours: full pages of the prompt are stored once":
            lambda p, n, k, P: k * _pages(p + n, P),
        "all is shared in yours: new tokens differ": lambda p, n, k, P: _pages(p + n, P),
        "the open page is never copied in yours: what is new goes on the prompt's last page, so "
        "each writer needs its own":
            lambda p, n, k, P: _pages(p, P) + k * (_own(p, n, P) - (p % P > 0)),
        "new tokens begin a page of their own in yours: they fill up the prompt's last one first":
            lambda p, n, k, P: _pages(p, P) + k * _pages(n, P),
        "the old open page was counted beside the copies: the last to write finds a count of 1 "
        "and keeps it": lambda p, n, k, P: p // P + (p % P > 0) + k * _own(p, n, P),
        "the open page is copied for all but one, and so yours counts one copy too few: that one "
        "keeps the old page, which also counts":
            lambda p, n, k, P: p // P + k * _own(p, n, P) - (p % P > 0),
    }  # fmt: skip
    c.like(
        answer, _family, cases,
        wrong={
            "with no new token nobody has written yet: all pages are shared, the open one, "
            "too": _families(lambda p, n, k, P: p // P + k * _own(p, n, P), always=True),
            **{message: _families(count, True) for message, count in counts.items()},
            **{message + " (at new = 0 you are right)": _families(count)
               for message, count in counts.items()},
        },
    )  # fmt: skip


def _shared(texts, space, prompt, P):
    """By names: every page's is all that stands before it, the space too."""
    known = {
        (other, tuple(tokens[:end]))
        for other, tokens in texts
        for end in range(P, len(tokens) + 1, P)
    }
    found = 0
    while found + P < len(prompt) and (space, tuple(prompt[: found + P])) in known:
        found += P
    return found


def _by_pages(most=lambda prompt, P: (len(prompt) - 1) // P, same=None, stop=True, spaces=True,
              unit=None):  # fmt: skip
    """A look-up page by page, with mistakes."""

    def answer(texts, space, prompt, P):
        texts = [tokens for other, tokens in texts if other == space or not spaces]
        full = [[t[i : i + P] for i in range(0, len(t) - P + 1, P)] for t in texts]
        hits = 0
        for j in range(max(most(prompt, P), 0)):
            page = prompt[j * P : (j + 1) * P]
            if same is None:
                hit = any(prompt[: (j + 1) * P] == t[: (j + 1) * P] for t in texts)
            else:
                hit = any(same(page, j, pages) for pages in full)
            if hit:
                hits += 1
            elif stop:
                break
        return hits * (P if unit is None else unit)

    return answer


def _common(left):
    def answer(texts, space, prompt, P):
        best = 0
        for other, tokens in texts:
            n = 0
            while other == space and n < min(len(tokens), len(prompt) - left):
                if tokens[n] != prompt[n]:
                    break
                n += 1
            best = max(best, n)
        return best

    return answer


def _keyed(key):
    """Beginnings are known by a key, and keys of different beginnings may be equal."""

    def answer(texts, space, prompt, P):
        known = {(o, key(t[:end])) for o, t in texts for end in range(P, len(t) + 1, P)}
        found = 0
        while found + P < len(prompt) and (space, key(prompt[: found + P])) in known:
            found += P
        return found

    return answer


def _some(choose, spaces=True):
    def answer(texts, space, prompt, P):
        mine = [t for t in texts if t[0] == space]
        found = [_shared([text], space, prompt, P) for text in mine]
        return choose(found) if found else 0

    return answer


@exercise(
    "10.6",
    title="How much is found?",
    minutes=12,
    trains="chains, full pages, and the token that must run",
    hints=(
        "Go through the prompt page by page and stop at the first that is not there.",
        "A page is there if some text of the same space begins with all of the prompt up to this "
        "page's end.",
        "If everything were found there would be nothing to compute, and no logits: one token at "
        "least is left.",
    ),
)
def _(answer, c):
    t, u, x = (c.ints(30, low=low, high=low + 300) for low in (0, 1000, 2000))
    P = c.int(3, 5)
    french, alice = "adapter french", "salt alice"
    one = [(french, t[: 3 * P + 2])]
    mixed = [(french, t[:P] + u[P : 2 * P]), (french, u[:P] + t[P : 2 * P])]
    cases = [
        (one, french, t[: 3 * P + 2] + x[:9], P),
        (one, french, t[: 2 * P], P),  # all of it is there
        (one, french, t[: 2 * P + 1], P),
        (one, french, t[: 2 * P - 1] + x[:5], P),  # not a whole second page
        (one, french, t[:P] + x[:P] + t[2 * P : 3 * P] + x[:2], P),  # a hole
        (one, french, t[P : 2 * P] + x[:5], P),  # a page of the middle, in front
        (one, french, x[:1] + t[:20], P),
        (one, alice, t[:20], P),
        ([], french, t[:20], P),
        (one, french, t[:1], P),
        ([(french, t[:P]), (french, t[: 3 * P]), (french, t[: 2 * P])], french, t[:25], P),
        ([(french, u[:9]), (alice, t[: 3 * P]), (french, t[:P])], french, t[:25], P),
        (mixed, french, t[: 2 * P] + x[:3], P),
        ([(french, t[:6])], french, t[:6], 1),
        ([(french, t[:20])], french, t[:29], 16),
        ([(french, [-1, 5, 6, 7])], french, [-2, 5, 6, 7, 8], 2),  # of one hash
        ([(french, [1, 23, 4, 5])], french, [12, 3, 4, 5, 6], 2),  # of one row of digits
    ]
    one_left = "one token is left to compute in any case: without it there are no logits"
    c.like(
        answer, _shared, cases,
        wrong={
            "single tokens were counted: only full pages can be found": _common(1),
            f"single tokens were counted: only full pages can be found; and {one_left}": _common(0),
            f"if all of the prompt is there, all is found in yours: {one_left}": _by_pages(
                lambda prompt, P: len(prompt) // P
            ),
            "a whole page is always left over in yours: one token is enough":
                _by_pages(lambda prompt, P: len(prompt) // P - 1),
            "a page is found by its own tokens, wherever it stood: its keys depend on all that "
            "came before": _by_pages(same=lambda page, j, pages: page in pages),
            "a page is found by its tokens and its number: its keys depend on all tokens before, "
            "which may be others":
                _by_pages(same=lambda page, j, pages: j < len(pages) and pages[j] == page),
            "pages after the first miss are counted: what follows a page that is not there was "
            "computed after something else": _by_pages(
                same=lambda page, j, pages: j < len(pages) and pages[j] == page, stop=False
            ),
            "pages anywhere are counted: a page is worth nothing unless all before it are the "
            "same": _by_pages(same=lambda page, j, pages: page in pages, stop=False),
            "spaces are ignored: with another adapter the same words have other keys":
                _by_pages(spaces=False),
            "only the first text of the space was looked at": _some(lambda found: found[0]),
            "several texts were added up: take the longest": _some(sum),
            "that is the number of pages: how many *tokens*?": _by_pages(unit=1),
            "that is what remains to be computed: how many tokens are *found*?":
                lambda texts, space, prompt, P: len(prompt) - _shared(texts, space, prompt, P),
            "two different beginnings have one hash, such as -1 and -2: compare the tokens":
                _keyed(lambda tokens: hash(tuple(tokens))),
            "digits are joined without anything between them: 1, 23 and 12, 3 look alike":
                _keyed(lambda tokens: "".join(map(str, tokens))),
            "nothing is ever found": lambda *args: 0,
        },
    )  # fmt: skip
    _untouched(c, answer, cases[0])
