"""Known-wrong answers to notebook 11 and the message each must get."""

import math
from itertools import combinations, pairwise

import torch
import torch.nn.functional as F


def _mix(states, divisor=None):
    names = states[0].keys()
    return {n: torch.stack([s[n] for s in states]).sum(0) / (divisor or len(states)) for n in names}


def _soups(key=lambda score, i: (-score, i), accept=lambda new, best, first, own: new >= best,
           mix=lambda soup, members, newcomer: _mix([*members, newcomer]),
           after=lambda members: members, give_up=False):  # fmt: skip
    def answer(states, score):
        scores = {i: score(state) for i, state in enumerate(states)}
        first, *others = sorted(scores, key=lambda i: key(scores[i], i))
        inside, soup, best = [first], states[first], scores[first]
        for i in others:
            candidate = mix(soup, [states[j] for j in inside], states[i])
            new = score(candidate)
            if accept(new, best, scores[first], scores[i]):
                inside.append(i)
                soup, best = candidate, new
            elif give_up:
                break
        return soup, after(inside)

    return answer


def _keeps_refused(states, score):
    order = sorted(range(len(states)), key=lambda i: -score(states[i]))
    total, inside, best, soup = states[order[0]], order[:1], score(states[order[0]]), None
    soup = total
    for count, i in enumerate(order[1:], start=2):
        total = {name: total[name] + states[i][name] for name in total}
        candidate = {name: total[name] / count for name in total}
        if score(candidate) >= best:
            inside, best, soup = [*inside, i], score(candidate), candidate
    return soup, inside


def _raises_the_bar(states, score):
    order = sorted(range(len(states)), key=lambda i: -score(states[i]))
    inside, best = order[:1], score(states[order[0]])
    for i in order[1:]:
        new = score(_mix([states[j] for j in (*inside, i)]))
        if new >= best:
            inside.append(i)
        best = new
    return _mix([states[j] for j in inside]), inside


def _most_helpful(rank):
    """The next is whoever helps most; rank orders the indices, and so decides between equals."""

    def answer(states, score):
        inside, left = [], rank([score(state) for state in states])
        best, soup = -math.inf, None
        while left:
            mixes = [_mix([states[j] for j in (*inside, i)]) for i in left]
            scores = [score(mix) for mix in mixes]
            k = scores.index(max(scores))
            if scores[k] < best:
                break
            best, soup = scores[k], mixes[k]
            inside.append(left.pop(k))
        return soup, inside

    return answer


def _adds_in_place(states, score):
    right = _soups()(states, score)
    for name in states[0]:
        states[0][name] += 1
    return right


def _sorts_in_place(states, score):
    right = _soups()(states, score)
    states.sort(key=score)
    return right


def _scores_all(states, score):
    return score(states), [0]


def _straight(v0, v1, t):
    return v0 + t * (v1 - v0)


def _theta(v0, v1):
    product = v0.norm() * v1.norm()
    if product == 0:
        return math.pi / 2
    return torch.arccos(((v0 * v1).sum() / product).clamp(-1, 1)).item()


def _arcs(theta=_theta, none=lambda a, v0, v1: min(a, math.pi - a) < 1e-6 or not v0.any()
          or not v1.any(), before=lambda v: v, then=lambda out, v0, v1, t: out,
          else_=_straight):  # fmt: skip
    def answer(v0, v1, t):
        a = theta(v0, v1)
        if none(a, v0, v1):
            return else_(v0, v1, t)
        s0, s1 = (math.sin(x * a) / math.sin(a) for x in (1 - t, t))
        out = s0 * before(v0) + s1 * before(v1)
        return then(out, v0, v1, t)

    return answer


def _unit(v):
    return v / v.norm().clamp(min=1e-300)


def _rowwise(v0, v1, t):
    a = torch.arccos((_unit_rows(v0) * _unit_rows(v1)).sum(-1, keepdim=True).clamp(-1, 1))
    out = (torch.sin((1 - t) * a) * v0 + torch.sin(t * a) * v1) / torch.sin(a)
    return torch.where(torch.sin(a) < 1e-6, _straight(v0, v1, t), out)


def _unit_rows(v):
    return v / v.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def _fills(v0, v1, t):
    right = _arcs()(v0, v1, t)
    v0.zero_()
    return right


def _no_clamp(v0, v1):
    return torch.arccos((v0 * v1).sum() / (v0.norm() * v1.norm())).item()


def _loops(elect=None, counted=None, share=None, zero=None, out=lambda values, sign: None):
    """Entry by entry, in plain Python."""

    def sign(x):
        return (x > 0) - (x < 0)

    elect = elect or (lambda values: sign(sum(values)))
    counted = counted or (lambda value, s: value * s > 0)
    share = share or (lambda kept, values: sum(kept) / len(kept) if kept else 0.0)
    zero = zero or (lambda signs, rows: sign(sum(signs)))

    def answer(trimmed):
        rows = [list(column) for column in zip(*(x.flatten().tolist() for x in trimmed))]  # noqa: B905
        signs = [elect(values) for values in rows]
        rest = zero(signs, rows)
        merged = [
            share([v for v in values if counted(v, s or rest)], values)
            for values, s in zip(rows, signs, strict=True)
        ]
        return torch.tensor(merged, dtype=torch.float64).view_as(trimmed[0])

    return answer


def _s(x):
    return (x > 0) - (x < 0)


def _overwrites(trimmed):
    right = _loops()(trimmed)
    trimmed[0].mul_(0.5)
    return right


def _clears(trimmed):
    right = _loops()(trimmed)
    trimmed.clear()
    return right


def _by_nothing(trimmed):
    d = torch.stack(trimmed)
    signs = d.sum(0).sign()
    signs[signs == 0] = signs.sum().sign()
    agrees = d.sign() == signs
    return (d * agrees).sum(0) / agrees.sum(0)


def _drops(mask=lambda u, p: u < p, up=lambda thin, delta, p: thin / p,
           spread=lambda delta, thin, p: delta.square() * (1 / p - 1)):  # fmt: skip
    def answer(delta, density, uniform):
        thin = torch.where(mask(uniform, density), delta, torch.zeros_like(delta))
        thin = up(thin, delta, density)
        return thin, spread(delta, thin, density)

    return answer


def _as_printed(delta, density, uniform):
    kept = uniform < 1 - density
    thin = delta * kept
    thin.div(density)
    return thin, density * (1 - density) * delta**2


def _rescales_in_place(delta, density, uniform):
    variance = (1 / density - 1) * delta**2
    return delta.mul_(uniform < density).div_(density), variance


def _stocks(N=len, cos=None, over=lambda c, N: N * c, under=lambda c, N: 1 + (N - 1) * c,
            clamp=lambda c: max(c, 0), swap=False, offsets=lambda w0, ws: [w - w0 for w in ws],
            t_of=None):  # fmt: skip
    def answer(base, tuned):
        out = {}
        for name in base:
            w0, ws = base[name], [state[name] for state in tuned]
            d, n = offsets(w0, ws), N(tuned)
            c = clamp((cos or _cos)(d))
            t = over(c, n) / under(c, n) if t_of is None else t_of(c, n)
            mean = torch.stack(ws).mean(0)
            out[name] = t * w0 + (1 - t) * mean if swap else t * mean + (1 - t) * w0
        return out

    return answer


def _cos(d, pairs=None, of=lambda x, y: F.cosine_similarity(x, y, dim=0).item()):
    flat = [x.flatten() for x in d]
    pairs = [of(x, y) for x, y in (pairs or (lambda d: combinations(d, 2)))(flat)]
    return sum(pairs) / len(pairs)


def _bare(x, y):
    return ((x @ y) / (x.norm() * y.norm())).item()


def _guarded(epsilon):
    return lambda d: _cos(d, of=lambda x, y: (x @ y / (x.norm() * y.norm() + epsilon)).item())


def _global(base, tuned):
    d = [torch.cat([(s[n] - base[n]).flatten() for n in base]) for s in tuned]
    c, N = max(_cos(d), 0), len(tuned)
    t = N * c / (1 + (N - 1) * c)
    return {n: (1 - t) * base[n] + t * sum(s[n] for s in tuned) / N for n in base}


def _rows(base, tuned):
    out = {}
    for n in base:
        flat = [(s[n] - base[n]).reshape(-1, base[n].shape[-1]) for s in tuned]
        pairs = [F.cosine_similarity(x, y, dim=-1) for x, y in combinations(flat, 2)]
        c = torch.stack(pairs).mean(0).clamp(min=0)[:, None]
        t = len(tuned) * c / (1 + (len(tuned) - 1) * c)
        out[n] = base[n] + (t * sum(flat) / len(tuned)).view_as(base[n])
    return out


def _moves_base(base, tuned):
    right = _stocks()(base, tuned)
    for n in base:
        base[n].copy_(right[n])
    return right


def _shifts_tuned(base, tuned):
    right = _stocks()(base, tuned)
    for state in tuned:
        for n in base:
            state[n] -= base[n]
    return right


def _as_given(first, second, weights):
    (down0, up0), (down1, up1), (w0, w1) = first, second, weights
    down = math.sqrt(w0) * down0 + math.sqrt(w1) * down1
    up = math.sqrt(w0) * up0 + math.sqrt(w1) * up1
    return down, up


def _adds(a, b):
    """Sums of factors, down weighted by a and up by b."""
    return lambda first, second, weights: tuple(
        f(weights[0]) * x + f(weights[1]) * y for f, x, y in zip((a, b), first, second, strict=True)
    )


def _cats(a=lambda w: 1, b=lambda w: w, turn=False):
    def answer(first, second, weights):
        (down0, up0), (down1, up1), (w0, w1) = first, second, weights
        downs, ups = [a(w0) * down0, a(w1) * down1], [b(w0) * up0, b(w1) * up1]
        return torch.vstack(downs[::-1] if turn else downs), torch.hstack(ups)

    return answer


def _dense(first, second, weights):
    up = weights[0] * first[1] @ first[0] + weights[1] * second[1] @ second[0]
    return torch.eye(up.shape[1], dtype=up.dtype), up


def _full(first, second, weights):
    down, up = _cats()(first, second, weights)
    return up @ down


def _weighs_in_place(first, second, weights):
    first[1].mul_(weights[0])
    return torch.vstack([first[0], second[0]]), torch.hstack([first[1], weights[1] * second[1]])


ATTEMPTS = [
    ("11.1", "strict", _soups(accept=lambda new, best, first, own: new > best), "that ties"),
    ("11.1", "half and half", _soups(mix=lambda soup, members, x: _mix([soup, x])),
     "gives the newcomer half"),
    ("11.1", "never re-scored", _soups(accept=lambda new, best, first, own: new >= first),
     "best single model throughout"),
    ("11.1", "in list order", _soups(key=lambda score, i: i), "in the order of the list"),
    ("11.1", "worst first", _soups(key=lambda score, i: (score, i)), "worst model goes in first"),
    ("11.1", "later of equals", _soups(key=lambda score, i: (-score, -i)), "the earlier one"),
    ("11.1", "keeps on fall", _soups(accept=lambda *scores: True), "uniform soup"),
    ("11.1", "uniform", lambda states, score: (_mix(states), list(range(len(states)))),
     "in the list's order, that is the uniform soup"),
    ("11.1", "best alone", _soups(accept=lambda *scores: False), "nobody joins"),
    ("11.1", "gives up", _soups(give_up=True), "the first model that is refused"),
    ("11.1", "leftovers", _keeps_refused, "should leave no trace"),
    ("11.1", "own score", _soups(accept=lambda new, best, first, own: own >= best),
     "judged by its own score"),
    ("11.1", "raises the bar", _raises_the_bar, "becomes the one to reach even if it is refused"),
    ("11.1", "lenient", _soups(accept=lambda new, best, first, own: new >= best - 0.01),
     "a small fall is let through"),
    ("11.1", "most helpful", _most_helpful(
        lambda scores: sorted(range(len(scores)), key=lambda i: -scores[i])),
     "11.1 Greedy soup: you pick whoever helps most at each step"),
    ("11.1", "most helpful, in list order", _most_helpful(lambda scores: list(range(len(scores)))),
     "11.1 Greedy soup: you pick whoever helps most at each step"),
    ("11.1", "members from 1", _soups(after=lambda members: [i + 1 for i in members]),
     "score=score: members: item 0: got "),
    ("11.1", "no members", _soups(after=lambda members: []), "members: it has 0 items, expected"),
    ("11.1", "soup halved", lambda states, score: (
        _mix([_soups()(states, score)[0]], 2), _soups()(states, score)[1]),
     "soup: under 'weight': at [0, 0]: got "),
    ("11.1", "sum", _soups(mix=lambda soup, members, x: _mix([*members, x], 1)), "by their number"),
    ("11.1", "sorted members", _soups(after=sorted), "the members are right, but sorted"),
    ("11.1", "soup only", lambda states, score: _soups()(states, score)[0], "a tuple of 2"),
    ("11.1", "writes into a model", _adds_in_place, "changed what it was given"),
    ("11.1", "sorts the list", _sorts_in_place, "changed what it was given"),
    ("11.1", "scores a list", _scores_all, "score takes one state"),
    ("11.2", "straight", _straight, "LERP: the factors are sines"),
    ("11.2", "stretched", lambda v0, v1, t: _unit(_straight(v0, v1, t))
     * ((1 - t) * v0.norm() + t * v1.norm()), "LERP, stretched"),
    ("11.2", "unit vectors", _arcs(before=_unit), "lengths are lost"),
    ("11.2", "lengths apart", _arcs(before=_unit, then=lambda out, v0, v1, t: out * (
        (1 - t) * v0.norm() + t * v1.norm())), "mixed apart"),
    ("11.2", "backwards", _arcs(then=lambda out, v0, v1, t: _arcs()(v1, v0, t)), "t runs backw"),
    ("11.2", "raw dot product", _arcs(
        theta=lambda v0, v1: math.acos(max(-1, min(1, (v0 * v1).sum().item())))),
     "division by both lengths"),
    ("11.2", "row by row", _rowwise, "each row has an angle of its own"),
    ("11.2", "short way", lambda v0, v1, t: _arcs()(v0, v1 if (v0 * v1).sum() >= 0 else -v1, t),
     "quaternions"),
    ("11.2", "degrees", _arcs(theta=lambda v0, v1: 180 / math.pi * _theta(v0, v1),
                              none=lambda a, v0, v1: False), "sin takes radians"),
    ("11.2", "length of v0", _arcs(then=lambda out, v0, v1, t: _unit(out) * v0.norm()),
     "stretched to v0's length"),
    ("11.2", "as the tool", _arcs(none=lambda a, v0, v1: abs(math.cos(a)) > 0.9995),
     "less than 0.03 from 0 and pi, where"),
    ("11.2", "straight when small", _arcs(none=lambda a, v0, v1: math.cos(a) > 0.9995),
     "less than 0.03 from 0, where"),
    ("11.2", "straight near pi", _arcs(none=lambda a, v0, v1: math.cos(a) < -0.9995),
     "less than 0.03 from pi, where"),
    ("11.2", "straight below 0.01", _arcs(none=lambda a, v0, v1: min(a, math.pi - a) < 1e-2),
     "less than 0.01 from 0 and pi, where"),
    ("11.2", "straight below 0.01, at 0 alone", _arcs(
        none=lambda a, v0, v1: a < 1e-2 or math.pi - a < 1e-6), "less than 0.01 from 0, where"),
    ("11.2", "straight below 0.01, at pi alone", _arcs(
        none=lambda a, v0, v1: a < 1e-6 or math.pi - a < 1e-2), "less than 0.01 from pi, where"),
    ("11.2", "cosine for angle", _arcs(theta=lambda v0, v1: math.cos(_theta(v0, v1)),
                                       none=lambda a, v0, v1: False), "where the angle should be"),
    ("11.2", "parallel forgotten", _arcs(
        none=lambda a, v0, v1: math.pi - a < 1e-6 or not v0.any() or not v1.any()),
     "parallel vectors: your"),
    ("11.2", "opposite forgotten", _arcs(
        none=lambda a, v0, v1: a < 1e-6 or not v0.any() or not v1.any()), "sin(pi) is nearly 0"),
    ("11.2", "arccos above 1", _arcs(theta=_no_clamp), "parallel vectors"),
    ("11.2", "zero at 90 degrees", _arcs(none=lambda a, v0, v1: min(a, math.pi - a) < 1e-6),
     "stands at 90 degrees"),
    ("11.2", "0 by 0", _arcs(theta=lambda v0, v1: torch.arccos(
        ((v0 * v1).sum() / (v0.norm() * v1.norm())).clamp(-1, 1)).item(),
        none=lambda a, v0, v1: min(a, math.pi - a) < 1e-6), "a zero vector can make yours NaN"),
    ("11.2", "zero gives v0", _arcs(else_=lambda v0, v1, t: (
        _straight(v0, v1, t) if v0.any() and v1.any() else v0)), "yours gives v0"),
    ("11.2", "fp32", lambda v0, v1, t: _arcs()(v0.float(), v1.float(), t).float(), "dtype"),
    ("11.2", "flat", lambda v0, v1, t: _arcs()(v0, v1, t).flatten(), "shape"),
    ("11.2", "fills v0", _fills, "changed what it was given"),
    ("11.3", "over all N", _loops(share=lambda kept, all_: sum(kept) / len(all_)),
     "number of all models"),
    ("11.3", "zeros agree", _loops(counted=lambda v, s: v * s >= 0), "trimmed entries count"),
    ("11.3", "over the changed", _loops(
        share=lambda kept, all_: sum(kept) / max(1, sum(v != 0 for v in all_))),
     "models that changed the entry"),
    ("11.3", "one vote each", _loops(elect=lambda values: _s(sum(map(_s, values)))), "one vote"),
    ("11.3", "mean of signs", _loops(
        elect=lambda values: _s(sum(_s(v) for v in values) / len(values))), "one vote"),
    ("11.3", "squares vote", _loops(elect=lambda values: _s(sum(v * abs(v) for v in values))),
     "squares vote in yours"),
    ("11.3", "small sums are 0", _loops(
        elect=lambda values: _s(sum(values)) if abs(sum(values)) >= 0.2 else 0),
     "small sums count as 0"),
    ("11.3", "flat", lambda trimmed: _loops()(trimmed).flatten(),
     "for trimmed=4 tensors of shape (3, 7): shape (21,)"),
    ("11.3", "the largest decides", _loops(elect=lambda values: _s(max(values, key=abs))),
     "decides alone"),
    ("11.3", "no rule", _loops(zero=lambda signs, rows: 0), "yours gives 0"),
    ("11.3", "plus", _loops(zero=lambda signs, rows: 1), "always + in yours"),
    ("11.3", "minus", _loops(zero=lambda signs, rows: -1), "always - in yours"),
    ("11.3", "sign of the total", _loops(zero=lambda signs, rows: _s(sum(map(sum, rows)))),
     "count signs there, not sizes"),
    ("11.3", "all values vote", _loops(
        zero=lambda signs, rows: _s(sum(_s(v) for row in rows for v in row))),
     "count the *elected* signs"),
    ("11.3", "turned", _loops(zero=lambda signs, rows: -_s(sum(signs))), "the opposite sign"),
    ("11.3", "sum", _loops(share=lambda kept, all_: float(sum(kept))), "isn't divided"),
    ("11.3", "largest", _loops(share=lambda kept, all_: max(kept, key=abs, default=0.0)),
     "the largest of those"),
    ("11.3", "sizes", _loops(share=lambda kept, all_: abs(sum(kept)) / max(len(kept), 1)),
     "multiply by the elected sign"),
    ("11.3", "plain mean", lambda trimmed: sum(trimmed) / len(trimmed), "all are averaged"),
    ("11.3", "mean of the changed", _loops(counted=lambda v, s: v != 0), "all that aren't 0"),
    ("11.3", "signs alone", lambda trimmed: torch.where(
        sum(trimmed) == 0, sum(trimmed).sign().sum().sign(), sum(trimmed).sign()),
     "those are the elected signs"),
    ("11.3", "disagreeing", _loops(counted=lambda v, s: v * s < 0), "that *disagree*"),
    ("11.3", "0 by 0", _by_nothing, "give NaN"),
    ("11.3", "overwrites", _overwrites, "changed what it was given"),
    ("11.3", "clears the list", _clears, "changed what it was given"),
    ("11.4", "as printed", _as_printed, "3 mistakes are left: `density` is taken"),
    ("11.4", "density is the drop rate", _drops(mask=lambda u, p: u < 1 - p), "for the drop rate"),
    ("11.4", "low ones dropped", _drops(mask=lambda u, p: u >= p), "below the density are dropped"),
    ("11.4", "high ones kept", _drops(mask=lambda u, p: u > 1 - p), "above 1 - density"),
    ("11.4", "no rescale", _drops(up=lambda thin, delta, p: thin), "nothing is scaled up"),
    ("11.4", "times density", _drops(up=lambda thin, delta, p: thin * p), "multiplied by the dens"),
    ("11.4", "over drop rate", _drops(up=lambda thin, delta, p: thin / (1 - p)), "by 1 - density"),
    ("11.4", "L1", _drops(up=lambda thin, delta, p: (
        thin / thin.abs().sum().clamp(min=1e-9) * delta.abs().sum())), "sum of magnitudes"),
    ("11.4", "share that stayed", _drops(up=lambda thin, delta, p: (
        thin / (thin != 0).double().mean().clamp(min=1e-9))), "happened to stay: divide by its"),
    ("11.4", "length", _drops(up=lambda thin, delta, p: thin / math.sqrt(p)), "density's root"),
    ("11.4", "L1, NaN", _drops(up=lambda thin, delta, p: (
        thin * (delta.abs().sum() / thin.abs().sum()))), "where nobody stays"),
    ("11.4", "variance before", _drops(spread=lambda d, thin, p: p * (1 - p) * d * d),
     "before the rescale"),
    ("11.4", "divided once", _drops(spread=lambda d, thin, p: (1 - p) * d * d), "density once: "),
    ("11.4", "divided thrice", _drops(spread=lambda d, thin, p: (1 - p) / p**2 * d * d),
     "density once too often"),
    ("11.4", "drop rate squared", _drops(spread=lambda d, thin, p: (1 - p) ** 2 * d * d),
     "the drop rate's square"),
    ("11.4", "odds turned", _drops(spread=lambda d, thin, p: p / (1 - p) * d * d),
     "have changed places: the more"),
    ("11.4", "no delta", _drops(spread=lambda d, thin, p: torch.ones_like(d) * (1 / p - 1)),
     "lacks delta"),
    ("11.4", "no square", _drops(spread=lambda d, thin, p: d.abs() * (1 / p - 1)), "the square"),
    ("11.4", "deviation", _drops(spread=lambda d, thin, p: d.abs() * math.sqrt(1 / p - 1)),
     "the standard deviation"),
    ("11.4", "mean square", _drops(spread=lambda d, thin, p: d * d / p), "the mean of the square"),
    ("11.4", "this draw", _drops(spread=lambda d, thin, p: (d - thin) ** 2), "this one draw"),
    ("11.4", "of survivors", _drops(spread=lambda d, thin, p: (1 / p - 1) * thin**2), "take delta"),
    ("11.4", "one for all", _drops(spread=lambda d, thin, p: ((1 / p - 1) * d * d).mean()),
     "one variance for all"),
    ("11.4", "no variance", _drops(spread=lambda d, thin, p: d * 0), "the variance is 0 in yours"),
    ("11.4", "two left", _drops(up=lambda thin, delta, p: thin,
                                spread=lambda d, thin, p: p * (1 - p) * d * d),
     "2 mistakes are left: nothing is scaled"),
    ("11.4", "mask and rescale", _drops(mask=lambda u, p: u < 1 - p,
                                        up=lambda thin, delta, p: thin), "2 mistakes are left: `d"),
    ("11.4", "turned round", lambda *args: _drops()(*args)[::-1], "thin and variance have changed"),
    ("11.4", "thin alone", lambda *args: _drops()(*args)[0], "a tuple of 2"),
    ("11.4", "in place", _rescales_in_place, "changed what it was given"),
    ("11.5", "N - 1", _stocks(N=lambda tuned: len(tuned) - 1), "N - 1 where the formula has N"),
    ("11.5", "N + 1", _stocks(N=lambda tuned: len(tuned) + 1), "the base is counted"),
    ("11.5", "N - 1 above", _stocks(over=lambda c, N: (N - 1) * c), "above the line"),
    ("11.5", "N below", _stocks(under=lambda c, N: 1 + N * c), "below the line"),
    ("11.5", "always two", _stocks(N=lambda tuned: 2), "formula for two fine-tunes"),
    ("11.5", "angle", _stocks(cos=lambda d: math.acos(_cos(d, pairs=lambda d: [d[:2]]))
                              if len(d) == 2 else _cos(d, of=lambda x, y: math.acos(_bare(x, y)))),
     "the angle stands where"),
    ("11.5", "cosine as t", _stocks(t_of=lambda c, N: c), "the cosine is used as t"),
    ("11.5", "uniform", _stocks(t_of=lambda c, N: 1), "the uniform soup"),
    ("11.5", "base", lambda base, tuned: dict(base), "that is the base"),
    ("11.5", "swapped", _stocks(swap=True), "base and mean have changed places"),
    ("11.5", "of weights", _stocks(offsets=lambda w0, ws: ws), "of the weights themselves"),
    ("11.5", "of base and weights", lambda base, tuned: {
        n: _stocks(cos=lambda d, n=n: _cos(
            [base[n], *[s[n] for s in tuned]], pairs=lambda d: [(d[0], x) for x in d[1:]]))(
            {n: base[n]}, [{n: s[n]} for s in tuned])[n] for n in base},
     "between base and fine-tunes"),
    ("11.5", "to their mean", _stocks(cos=lambda d: _cos(
        [sum(d) / len(d), *d], pairs=lambda d: [(d[0], x) for x in d[1:]])), "and their mean"),
    ("11.5", "first pair", _stocks(cos=lambda d: _cos(d[:2])), "only the first pair's"),
    ("11.5", "neighbours", _stocks(cos=lambda d: _cos(d, pairs=pairwise)), "expected"),
    ("11.5", "with itself", _stocks(cos=lambda d: _cos(
        d, pairs=lambda d: [(x, y) for x in d for y in d])), "paired with itself"),
    ("11.5", "sum of cosines", _stocks(cos=lambda d: _cos(d) * len(d) * (len(d) - 1) / 2),
     "*sum* of the pairs'"),
    ("11.5", "pooled", _stocks(cos=lambda d: _cos(d, of=lambda x, y: (x @ y).item())
                               / _cos(d, of=lambda x, y: (x.norm() * y.norm()).item())),
     "all dot products together"),
    ("11.5", "sum of offsets", _stocks(t_of=lambda c, N: N * N * c / (1 + (N - 1) * c)),
     "the *sum* of the offsets"),
    ("11.5", "mean angle", _stocks(cos=lambda d: math.cos(
        _cos(d, of=lambda x, y: math.acos(_bare(x, y))))), "cosine of the mean angle"),
    ("11.5", "no lengths", _stocks(cos=lambda d: _cos(d, of=lambda x, y: (x @ y).item())),
     "isn't divided by the lengths"),
    ("11.5", "one t", _global, "one t for the whole model"),
    ("11.5", "row by row", _rows, "each row has a t"),
    ("11.5", "not clamped", _stocks(clamp=lambda c: c), "t is not clamped"),
    ("11.5", "size of c", _stocks(clamp=abs), "the cosine's size"),
    ("11.5", "size of t", _stocks(clamp=lambda c: c, t_of=lambda c, N: abs(
        N * c / (1 + (N - 1) * c))), "t's size without its sign: below"),
    ("11.5", "mean below 0", _stocks(clamp=lambda c: c, t_of=lambda c, N: (
        N * c / (1 + (N - 1) * c) if c > 0 else 1)), "below c = 0 yours takes the mean"),
    ("11.5", "divides by 0", _stocks(clamp=lambda c: c, cos=lambda d: _cos(d, of=_bare),
                                     t_of=lambda c, N: max(0, N * c / (1 + (N - 1) * c))),
     "opposite ways, c = -1: your function raised ZeroDivisionError"),
    ("11.5", "0 by 0", _stocks(cos=lambda d: _cos(d, of=_bare), clamp=lambda c: 0 if c < 0 else c),
     "no fine-tune changed gives NaN"),
    ("11.5", "guard too large", _stocks(cos=_guarded(1e-8)), "must be far smaller"),
    ("11.5", "floor of the tool", _stocks(cos=lambda d: _cos(d, of=lambda x, y: (
        x @ y / (x.norm() * y.norm()).clamp(min=1e-6)).item())), "must be far smaller"),
    ("11.5", "moves the base", _moves_base, "changed what it was given"),
    ("11.5", "shifts the tuned", _shifts_tuned, "changed what it was given"),
    ("11.5", "a list", lambda base, tuned: list(_stocks()(base, tuned).values()),
     "expected a dict"),
    ("11.6", "as printed", _as_given, "cross terms"),
    ("11.6", "up weighted", _adds(lambda w: 1, lambda w: w), "Weights in `up` alone"),
    ("11.6", "down weighted", _adds(lambda w: w, lambda w: 1), "Weights in `down` alone"),
    ("11.6", "both weighted", _adds(lambda w: w, lambda w: w), "And the weights come in twice"),
    ("11.6", "plain sums", _adds(lambda w: 1, lambda w: 1), "And the weights are missing"),
    ("11.6", "another order", _cats(turn=True), "in another order"),
    ("11.6", "weights twice", _cats(a=lambda w: w), "so they are squared"),
    ("11.6", "no weights", _cats(b=lambda w: 1), "the weights are missing"),
    ("11.6", "weights swapped", lambda first, second, w: _cats()(first, second, w[::-1]),
     "of the other adapter"),
    ("11.6", "normalised", lambda first, second, w: _cats()(
        first, second, [x / sum(w) for x in w]), "divided by their sum"),
    ("11.6", "halved", _cats(b=lambda w: w / 2), "the change is halved"),
    ("11.6", "one root", _cats(b=lambda w: math.sqrt(abs(w))), "the square root of each weight"),
    ("11.6", "first weight twice", lambda first, second, w: _cats()(first, second, [w[0]] * 2),
     "both changes have the first weight"),
    ("11.6", "tripled", _cats(b=lambda w: 3 * w),
     "for first=an adapter of rank 2, second=an adapter of rank 2, weights=[0."),
    ("11.6", "first only", lambda first, second, w: (first[0], w[0] * first[1]), "only the first"),
    ("11.6", "roots of sizes", _cats(lambda w: math.sqrt(abs(w)), lambda w: math.sqrt(abs(w))),
     "has lost its sign"),
    ("11.6", "two signs", _cats(lambda w: math.copysign(math.sqrt(abs(w)), w),
                                lambda w: math.copysign(math.sqrt(abs(w)), w)), "its sign"),
    ("11.6", "roots", _cats(math.sqrt, math.sqrt), "your function raised ValueError"),
    ("11.6", "sizes", _cats(b=abs), "lost its sign"),
    ("11.6", "negative left out", _cats(b=lambda w: max(w, 0)), "is left out"),
    ("11.6", "dense", _dense, "the change is right, but of rank"),
    ("11.6", "the change itself", _full, "a pair (down, up), got"),
    ("11.6", "up first", lambda *args: _cats()(*args)[::-1], "with one rank R"),
    ("11.6", "stacked the other way", lambda first, second, w: (
        torch.hstack([first[0], second[0]]), torch.vstack([w[0] * first[1], w[1] * second[1]])),
     "with one rank R"),
    ("11.6", "weighs in place", _weighs_in_place, "changed what it was given"),
]  # fmt: skip
