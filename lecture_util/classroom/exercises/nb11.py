"""Checks of notebook 11: model merging. Those on single tensors are in `merging_tensors`."""

import copy
import functools
import inspect
import itertools
import math
import re
from collections.abc import Mapping

import torch

from lecture_util.classroom.checker import Wrong
from lecture_util.classroom.compare import difference
from lecture_util.classroom.exercise import exercise

from . import merging_tensors  # noqa: F401, registers 11.2 to 11.4
from .merging_cases import Adapter, Models, State, called, copied, has_nan, telling, untouched


def _mean(states):
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


def _best_first(alone):
    return sorted(range(len(alone)), key=lambda i: -alone[i])


def _greedy(order=_best_first, joins=lambda reached, best, own: reached >= best, updates=True,
            running=False, dregs=False, stops=False, forgets=False, total=False,
            members=list):  # fmt: skip
    """Greedy soup; the keywords make the usual mistakes."""

    def answer(states, score):
        alone = [score(state) for state in states]
        queue = order(alone)
        bowl, soup, best = queue[:1], states[queue[0]], alone[queue[0]]
        for n, i in enumerate(queue[1:], 2):
            parts = [states[j] for j in (queue[:n] if dregs else [*bowl, i])]
            mixed = _mean([soup, states[i]] if running else parts)
            if total:
                mixed = {name: mixed[name] * len(parts) for name in mixed}
            reached = score(mixed)
            if joins(reached, best, alone[i]):
                bowl, soup = [*bowl, i], mixed
                best = reached if updates else best
            elif stops:
                break
            elif forgets:
                best = reached
        return soup, members(bowl)

    return answer


def _forward(order=_best_first):
    """Whoever helps most comes next."""

    def answer(states, score):
        alone = [score(state) for state in states]
        rest, bowl, best = order(alone), [alone.index(max(alone))], max(alone)
        while rest := [i for i in rest if i not in bowl]:
            reached = {i: score(_mean([states[j] for j in (*bowl, i)])) for i in rest}
            i = max(rest, key=reached.get)
            if reached[i] < best:
                break
            bowl, best = [*bowl, i], reached[i]
        return _mean([states[j] for j in bowl]), bowl

    return answer


GREEDY = {
    "a model that ties is kept out in yours: here it joins unless the score *falls*":
        _greedy(joins=lambda reached, best, own: reached > best),
    "the mean of the soup and the newcomer gives the newcomer half: all members and the newcomer "
    "weigh the same": _greedy(running=True),
    "candidates are compared with the best single model throughout: once somebody has joined, the "
    "soup's new score is the one to reach": _greedy(updates=False),
    "models are tried in the order of the list: the best comes first, then the next best":
        _greedy(order=lambda alone: list(range(len(alone)))),
    "the worst model goes in first in yours: higher scores are better":
        _greedy(order=lambda alone: sorted(range(len(alone)), key=lambda i: alone[i])),
    "of two equally good models the later one is tried first in yours: the earlier one goes first":
        _greedy(order=lambda alone: sorted(range(len(alone)), key=lambda i: alone[i])[::-1]),
    "everybody joins in yours, that is the uniform soup: whoever lets the score fall stays out":
        _greedy(joins=lambda *scores: True),
    "everybody joins in yours, in the list's order, that is the uniform soup: whoever lets the "
    "score fall stays out":
        _greedy(order=lambda alone: list(range(len(alone))), joins=lambda *scores: True),
    "nobody joins the best model in yours": _greedy(joins=lambda *scores: False),
    "yours stops at the first model that is refused: the next one may fit": _greedy(stops=True),
    "a refused model still counts in the next mean: it should leave no trace": _greedy(dregs=True),
    "a candidate's score becomes the one to reach even if it is refused: then the soup's own score "
    "stays the one": _greedy(forgets=True),
    "a small fall is let through in yours: only a tie or a gain lets anybody in":
        _greedy(joins=lambda reached, best, own: reached >= best - 0.01),
    "you pick whoever helps most at each step: the order is fixed by the scores alone": _forward(),
    "a newcomer is judged by its own score: what counts is the soup's score with it":
        _greedy(joins=lambda reached, best, own: own >= best),
    "the sum of the models isn't divided by their number": _greedy(total=True),
    "the members are right, but sorted: list them in the order in which they joined":
        _greedy(members=sorted),
}  # fmt: skip

FORWARD = {  # differs from the like mistake above only by chance
    "you pick whoever helps most at each step, of equals the first in the list: the order is fixed "
    "by the scores alone": _forward(lambda alone: list(range(len(alone)))),
}


def _accuracy(x_BD, labels_B):
    def score(state):
        if not isinstance(state, Mapping) or set(state) != {"weight", "bias"}:
            raise TypeError("score takes one state, a dict with the names of those in `states`")
        logits_BC = x_BD @ state["weight"].T + state["bias"]
        return (logits_BC.argmax(1) == labels_B).double().mean().item()

    return score


def _fine_tunes(c, N, B=128):
    """N noisy copies of one linear classifier, and their accuracy on B examples."""
    truth = {"weight": c.randn(3, 4).double(), "bias": c.randn(3).double()}
    states = Models()
    for _ in range(N):
        noise = c.float(0.4, 1.6)
        states.append(
            State({name: w + noise * c.randn(*w.shape).double() for name, w in truth.items()})
        )
    x_BD = c.randn(B, 4).double()
    labels_B = (x_BD @ truth["weight"].T + truth["bias"]).argmax(1)
    return states, _accuracy(x_BD, labels_B)


@exercise(
    "11.1",
    title="Greedy soup",
    minutes=15,
    trains="a loop that keeps only what helps, and a mean that stays a mean",
    hints=(
        "Keep three things: the list of members, the soup, and the soup's score. What must change "
        "when somebody joins, and what when somebody is refused?",
        "Compute each candidate's mean afresh from the members' own tensors, divided by how many "
        "they are. Then nothing has to be taken out again.",
        "sorted(..., reverse=True) leaves equal ones in their order; turning a sorted list round "
        "does not.",
    ),
)
def _(answer, c):
    def draw():
        cases = [_fine_tunes(c, N) for N in (7, 8, 9, 1)]
        states, score = cases[1]
        best = max(range(7), key=lambda i: score(states[i]))
        states[7] = copy.deepcopy(states[best])  # two equally good ones
        return cases

    cases = telling(draw, _greedy(), GREEDY.values())
    untouched(c, answer, cases[1])
    try:
        c.like(copied(answer), _greedy(), cases, rtol=1e-9, atol=1e-12, wrong=GREEDY | FORWARD)
    except Wrong as error:
        names = {"item 0: ": "soup: ", "item 1: ": "members: "}
        text = re.sub("item [01]: ", lambda item: names[item[0]], str(error), count=1)
        raise Wrong(text) from error


def _cosine(x, y):
    lengths = x.norm() * y.norm()
    return ((x * y).sum() / lengths).item() if lengths > 0 else 0.0


def _ratio(cosine, N):
    return N * cosine / (1 + (N - 1) * cosine)


def _pairs(vectors, of=_cosine):
    values = [of(x, y) for x, y in itertools.combinations(vectors, 2)]
    return sum(values) / len(values)


def _stock(cosine=lambda offsets, w0, ws: _pairs(offsets), ratio=_ratio,
           bound=lambda c: max(c, 0.0), whole=False, back=False):  # fmt: skip
    """Model Stock; the keywords make the usual mistakes."""

    def answer(base, tuned):
        N, merged = len(tuned), {}
        flat = [torch.cat([(s[k] - base[k]).flatten() for k in base]) for s in tuned]
        for name, w0 in base.items():
            ws = [state[name] for state in tuned]
            offsets = flat if whole else [w - w0 for w in ws]
            t = ratio(bound(cosine(offsets, w0, ws)), N)
            merged[name] = w0 + (1 - t if back else t) * (sum(ws) / N - w0)
        return merged

    return answer


def _by_row(rows):
    def answer(base, tuned):
        merged = {}
        for name, w0 in base.items():
            starts, *ends = (rows(state[name]) for state in (base, *tuned))
            parts = [
                _stock()({0: row}, [{0: end[i]} for end in ends])[0] for i, row in enumerate(starts)
            ]
            merged[name] = torch.stack(parts).view_as(w0)
        return merged

    return answer


def _pooled(offsets, w0, ws):
    dots = _pairs(offsets, lambda x, y: (x * y).sum().item())
    return dots / _pairs(offsets, lambda x, y: (x.norm() * y.norm()).item())


def _overshoots(base, tuned):
    right = _stock()(base, tuned)
    return {name: w0 + len(tuned) * (right[name] - w0) for name, w0 in base.items()}


def _degrees(offsets, w0, ws):
    return _pairs(offsets, lambda x, y: math.acos(max(-1.0, min(1.0, _cosine(x, y)))))


def _all_pairs(offsets, w0, ws):
    N = len(offsets)
    return (_pairs(offsets) * N * (N - 1) + N) / N**2


STOCK = {
    "t has N - 1 where the formula has N, and N - 2 for N - 1: N is the number of fine-tunes, the "
    "base isn't counted out":
        _stock(ratio=lambda c, N: _ratio(c, N - 1)),
    "the base is counted among the N: N is the number of fine-tunes":
        _stock(ratio=lambda c, N: _ratio(c, N + 1)),
    "above the line stands N - 1 in yours: it is N": _stock(
        ratio=lambda c, N: (N - 1) * c / (1 + (N - 1) * c)
    ),
    "below the line stands N in yours: it is N - 1":
        _stock(ratio=lambda c, N: N * c / (1 + N * c)),
    "t is the formula for two fine-tunes: put in N": _stock(ratio=lambda c, N: _ratio(c, 2)),
    "the angle stands where its cosine should": _stock(cosine=_degrees),
    "the cosine is used as t: the formula makes t of it": _stock(ratio=lambda c, N: c),
    "t = 1 always, that is the uniform soup": _stock(ratio=lambda c, N: 1),
    "t = 0 always, that is the base": _stock(ratio=lambda c, N: 0),
    "base and mean have changed places: at c = 1 the fine-tunes agree, and t = 1 is their mean":
        _stock(back=True),
    "the cosine is that of the weights themselves, which are all nearly parallel: subtract the "
    "base first": _stock(cosine=lambda offsets, w0, ws: _pairs(ws)),
    "the cosine is that between base and fine-tunes: it is between what two fine-tunes added":
        _stock(cosine=lambda offsets, w0, ws: sum(_cosine(w0, w) for w in ws) / len(ws)),
    "the cosine between offsets and their mean: take it between pairs of fine-tunes": _stock(
        cosine=lambda offsets, w0, ws: sum(
            _cosine(x, sum(offsets) / len(offsets)) for x in offsets
        ) / len(offsets)
    ),
    "only the first pair's cosine is taken: it is the mean over all pairs":
        _stock(cosine=lambda offsets, w0, ws: _cosine(*offsets[:2])),
    "each fine-tune is paired with itself, too, and there the cosine is 1: leave those out":
        _stock(cosine=_all_pairs),
    "the *sum* of the pairs' cosines: divide by the number of pairs": _stock(
        cosine=lambda offsets, w0, ws: _pairs(offsets) * len(offsets) * (len(offsets) - 1) / 2
    ),
    "all dot products together are divided by all lengths together, so long offsets count more: "
    "one cosine a pair, and their mean": _stock(cosine=_pooled),
    "t multiplies the *sum* of the offsets: it is t of the way to the mean": _overshoots,
    "the cosine of the mean angle: take the mean of the cosines":
        _stock(cosine=lambda offsets, w0, ws: math.cos(_degrees(offsets, w0, ws))),
    "the dot product isn't divided by the lengths":
        _stock(cosine=lambda offsets, w0, ws: _pairs(offsets, lambda x, y: (x * y).sum().item())),
    "one t for the whole model: each tensor has its own angle": _stock(whole=True),
    "each row has a t of its own in yours: one for the tensor":
        _by_row(lambda x: x.reshape(-1, x.shape[-1])),
    "each row has a t of its own in yours: one for the tensor, whatever its axes":
        _by_row(lambda x: x.flatten(1) if x.ndim > 1 else x[None]),
    "each row has a t of its own in yours: one for the tensor, on every axis":
        _by_row(lambda x: x.flatten(1) if x.ndim > 1 else x[:, None]),
}  # fmt: skip

OPPOSED = {
    "t is not clamped: below c = 0 the formula leaves the stretch between base and mean, so stay "
    "at the base": _stock(bound=lambda c: c),
    "the cosine's size without its sign: below 0 the fine-tunes pull apart, stay at the base":
        _stock(bound=abs),
    "t's size without its sign: below c = 0 stay at the base":
        _stock(ratio=lambda c, N: abs(_ratio(c, N)), bound=lambda c: c),
    "t's size without its sign, at most 1: below c = 0 stay at the base":
        _stock(ratio=lambda c, N: min(1, abs(_ratio(c, N))), bound=lambda c: c),
    "below c = 0 yours takes the mean: stay at the base": lambda base, tuned: _mean(tuned),
}  # fmt: skip


def _offsets(c, N, shape, low, high):
    """N vectors of unlike lengths, the mean cosine between each two from low to high."""
    while True:
        own = torch.stack([c.randn(*shape).double() for _ in range(N)])
        shared = c.randn(*shape).double() if low > 0 else -0.5 * own.mean(0)
        lengths = torch.tensor([c.float(0.5, 1.5) for _ in range(N)])
        offsets = (own + shared) * lengths.view(N, *[1] * len(shape))
        if low < _pairs(list(offsets)) < high:
            return list(offsets)


def _family(c, N, shapes, low=0.2, high=0.8):
    base, tuned = State(), Models(State() for _ in range(N))
    for name, shape in shapes.items():
        base[name] = 2 * c.randn(*shape).double()
        for state, offset in zip(tuned, _offsets(c, N, shape, low, high), strict=True):
            state[name] = base[name] + offset
    return base, tuned


@exercise(
    "11.5",
    title="How far from the base?",
    minutes=12,
    trains="which vectors have the angle, how many there are, and where the formula stops",
    hints=(
        "What each fine-tune *added* is its tensor minus the base's. Of N of them there are "
        "N(N-1)/2 pairs.",
        "Clamp the cosine at 0 before it goes into the formula: then t is between 0 and 1, and the "
        "division is safe.",
        "t of the way: base + t * (mean - base).",
    ),
)
def _(answer, c):
    shapes = {"wq": (4, 6), "norm": (7,), "conv": (3, 2, 5)}

    def draw():
        return [_family(c, N, shapes) for N in (2, 3, 5)]

    given = copied(answer)
    cases = telling(draw, _stock(), STOCK.values())
    untouched(c, answer, cases[1])
    c.like(given, _stock(), cases, rtol=1e-6, atol=1e-7, wrong=STOCK)

    def opposed():
        return [_family(c, N, shapes, -0.7, -0.1) for N in (2, 3)]

    cases_below = telling(opposed, _stock(), OPPOSED.values())
    c.like(given, _stock(), cases_below, rtol=1e-6, atol=1e-7, wrong=OPPOSED)

    w0, d = torch.tensor([3.0, -2, 5]).double(), torch.tensor([0, 0, 2.0]).double()
    base, tuned = State(wq=w0), Models([State(wq=w0 + d), State(wq=w0 - 2 * d)])
    what = "two fine-tunes that go opposite ways, c = -1"
    got = called(c, given, what, base, tuned)
    c.expect(not has_nan(got), "fine-tunes that go opposite ways, c = -1, give NaN: the formula "
             "divides by 0 there. Stay at the base")  # fmt: skip
    c.close(
        got, dict(base), rtol=1e-9, given=what,
        wrong={"two fine-tunes that go opposite ways give their mean: stay at the base at c = -1":
               _mean(tuned)},
    )  # fmt: skip

    still = State(wq=base["wq"], norm=c.randn(5).double(), wk=2 * w0)
    tuned = Models(State(wq=w0 + x, norm=still["norm"], wk=2 * w0 + x) for x in (d, 2 * d, d))
    what = "a model with a tensor that nobody changed"
    got = called(c, given, what, still, tuned)
    c.expect(not has_nan(got), "a tensor that no fine-tune changed gives NaN: its offsets have no "
             "direction, and so no cosine. It stays what it is")  # fmt: skip
    c.close(got, _stock()(still, tuned), rtol=1e-9, given=what)

    zero = State(wq=torch.zeros(4, 6).double())
    near = Models(State(wq=6e-5 * x) for x in _offsets(c, 3, (4, 6), 0.2, 0.8))
    got = called(c, given, "fine-tunes close to the base", zero, near)
    want = _stock()(zero, near)
    if isinstance(got, Mapping) and difference(dict(got), want, 1e-4, 1e-12):
        raise Wrong("fine-tunes close to the base get another t: what guards the division by the "
                    "lengths must be far smaller than their product")  # fmt: skip
    c.close(got, want, rtol=1e-4, atol=1e-12)


def _product(answer):
    """The change that the answer's adapter makes; the answer's form is looked at on the way."""
    if not callable(answer):
        return answer

    @functools.wraps(answer)
    def change(first, second, weights):
        got = answer(*copy.deepcopy((first, second, weights)))
        if got is None or inspect.iscoroutine(got):
            return got  # what to say of these is known elsewhere
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise Wrong("expected a pair (down, up), got " + _kind(got))
        if not all(isinstance(x, torch.Tensor) and x.ndim == 2 for x in got):
            raise Wrong("expected a pair of matrices, got " + " and ".join(map(_kind, got)))
        down, up = got
        F, D = len(first[1]), first[0].shape[1]
        if down.shape[1] != D or len(up) != F or len(down) != up.shape[1]:
            raise Wrong(
                f"down is {tuple(down.shape)} and up {tuple(up.shape)}: expected (R, {D}) and "
                f"({F}, R) with one rank R, so that up @ down is ({F}, {D})"
            )
        if down.dtype != up.dtype:
            raise Wrong(f"down is {down.dtype} and up {up.dtype}: expected torch.float64")
        return up @ down

    return change


def _kind(value):
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" {tuple(shape)}" if isinstance(shape, tuple) else "")


def _joined(of=lambda w: w, outer=lambda w: 1.0, crossed=False, turned=False):
    """up @ down with the weights split between the two; the keywords make the mistakes."""

    def answer(first, second, weights):
        (down0, up0), (down1, up1), (w0, w1) = first, second, weights
        a, b = outer(w0), outer(w1)
        downs, ups = [a * down0, b * down1], [of(w0) * up0, of(w1) * up1]
        if turned:
            downs = downs[::-1]
        if crossed:
            return sum(ups) @ sum(downs)
        return torch.cat(ups, 1) @ torch.cat(downs)

    return answer


def _root(w):
    return math.sqrt(abs(w))


CROSS = "multiply out: the first's up meets the second's down, and the other way round. "
JOINS = {
    CROSS + "Sums of factors have these cross terms, so let each up meet its own down only":
        _joined(of=_root, outer=_root, crossed=True),
    CROSS + "Weights in `up` alone don't help: let each up meet its own down only":
        _joined(crossed=True),
    CROSS + "Weights in `down` alone don't help: let each up meet its own down only":
        _joined(of=lambda w: 1, outer=lambda w: w, crossed=True),
    CROSS + "And the weights come in twice": _joined(outer=lambda w: w, crossed=True),
    CROSS + "And the weights are missing": _joined(of=lambda w: 1, crossed=True),
    "the ups stand in another order than the downs: each must meet its own": _joined(turned=True),
    "weights are in both factors, so they are squared in the product: one of them is enough":
        _joined(outer=lambda w: w),
    "the weights are missing": _joined(of=lambda w: 1),
    "the weights are those of the other adapter": lambda first, second, weights: _joined()(
        first, second, weights[::-1]
    ),
    "the weights are divided by their sum: here they count as they are": lambda first, second,
        weights: _joined()(first, second, weights) / sum(weights),
    "the change is halved: a weighted sum, no mean": lambda *args: _joined()(*args) / 2,
    "that is the square root of each weight: in one factor alone it must be the weight":
        _joined(of=_root),
    "both changes have the first weight": lambda first, second, weights: _joined()(
        first, second, (weights[0], weights[0])
    ),
    "only the first adapter is in it": lambda first, second, weights: _joined()(
        first, second, (weights[0], 0)
    ),
}  # fmt: skip


SIGNS = {
    "a negative weight has lost its sign: two roots of |w| give |w|, and with the sign in both "
    "minus times minus is plus. Put the weight into one factor": _joined(of=abs),
    "an adapter with a negative weight is left out: it is to be taken away":
        _joined(of=lambda w: max(w, 0)),
}  # fmt: skip


@exercise(
    "11.6",
    title="Two adapters in one",
    minutes=10,
    trains="products and factors",
    hints=(
        "(up0 + up1) @ (down0 + down1) has four terms. Which two are asked for?",
        "A block matrix [up0 up1] times the blocks down0 over down1 is up0 @ down0 + up1 @ down1.",
        "Let each weight, sign and all, multiply one factor of its adapter.",
    ),
)
def _(answer, c):
    def adapters(F, D, r0, r1):
        return [Adapter((c.randn(r, D).double(), c.randn(F, r).double())) for r in (r0, r1)]

    def rank(case):
        down, _ = c.call(copied(answer), *case)
        R = len(case[0][0]) + len(case[1][0])
        c.expect(len(down) == R, f"the change is right, but of rank {len(down)}: {R} are enough "
                 "here, and more is memory and time for nothing")  # fmt: skip

    w0, w1 = round(c.float(0.3, 0.8), 2), round(c.float(1.2, 2), 2)
    cases = [
        (*adapters(7, 9, 2, 2), [w0, w1]),
        (*adapters(6, 5, 1, 1), [w1, w0]),
        (*adapters(8, 8, 3, 3), [1.0, 1.0]),
    ]
    untouched(c, answer, cases[1])
    change = _product(answer)
    tolerance = dict(rtol=1e-9, atol=1e-11)
    c.like(change, _joined(), cases, **tolerance, wrong=JOINS)
    cases_signed = [
        (*adapters(7, 9, 2, 2), [w0, -w1]),
        (*adapters(6, 5, 1, 1), [-w1, w0]),
        (*adapters(4, 6, 2, 2), [-1.0, 0.0]),
    ]
    c.like(change, _joined(), cases_signed, **tolerance, wrong=SIGNS)
    unequal = [(*adapters(9, 10, 2, 4), [w0, -w1]), (*adapters(8, 7, 3, 1), [w1, 1.0])]
    c.like(change, _joined(), unequal, **tolerance)
    for case in (cases[0], unequal[0]):
        rank(case)
