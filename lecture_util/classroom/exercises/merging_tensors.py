"""Checks of notebook 11 on single tensors: SLERP, TIES and DARE (11.2 to 11.4)."""

import itertools
import math

import torch

from lecture_util.classroom.exercise import exercise

from .merging_cases import Tensors, called, has_nan, telling, untouched


def _angle(v0, v1):
    """By the diagonals of the rhombus; exact for small angles, too."""
    u, v = v0 / v0.norm(), v1 / v1.norm()
    return 2 * math.atan2((u - v).norm().item(), (u + v).norm().item())


def _lerp(v0, v1, t):
    return (1 - t) * v0 + t * v1


def _slerp(angle=_angle, ends=lambda v0, v1: (v0, v1), straight=lambda a: False,
           sine=math.sin, after=lambda v, v0, v1, t: v):  # fmt: skip
    """The formula; the keywords make the usual mistakes."""

    def answer(v0, v1, t):
        a = angle(v0, v1)
        if straight(a):
            return _lerp(v0, v1, t)
        e0, e1 = ends(v0, v1)
        out = (sine((1 - t) * a) * e0 + sine(t * a) * e1) / sine(a)
        return after(out, v0, v1, t)

    return answer


def _lengths(v, v0, v1, t):
    return v / v.norm() * _lerp(v0.norm(), v1.norm(), t)


def _raw_angle(v0, v1):
    return math.acos(max(-1.0, min(1.0, (v0 * v1).sum().item())))


def _by_rows(v0, v1, t):
    if v0.ndim == 1:
        return _slerp()(v0, v1, t)
    rows = zip(v0.flatten(0, -2), v1.flatten(0, -2), strict=True)
    return torch.stack([_slerp()(x, y, t) for x, y in rows]).view_as(v0)


def _short(v0, v1, t):
    return _slerp()(v0, v1 if (v0 * v1).sum() >= 0 else -v1, t)


def _units(v0, v1):
    return v0 / v0.norm(), v1 / v1.norm()


ARC = {
    "that is the straight way, LERP: the factors are sines": _lerp,
    "the straight way with its length put right: the direction comes too early or too late, "
    "because equal steps of t are not equal angles":
        lambda v0, v1, t: _lengths(_lerp(*_units(v0, v1), t), v0, v1, t),
    "LERP, stretched to the length between the two: its direction is not the arc's":
        lambda v0, v1, t: _lengths(_lerp(v0, v1, t), v0, v1, t),
    "unit vectors are mixed, so lengths are lost: the factors multiply v0 and v1 as they are":
        _slerp(ends=_units),
    "directions and lengths are mixed apart: here the factors multiply v0 and v1 as they are":
        _slerp(ends=_units, after=lambda v, v0, v1, t: v * _lerp(v0.norm(), v1.norm(), t)),
    "the result is stretched to a length of its own: the factors alone decide":
        _slerp(after=_lengths),
    "the result is stretched to v0's length: the factors alone decide":
        _slerp(after=lambda v, v0, v1, t: v / v.norm() * v0.norm()),
    "t runs backwards in yours: t = 0 gives v0": lambda v0, v1, t: _slerp()(v0, v1, 1 - t),
    "the angle is taken of v0 and v1 as they are: their dot product is a cosine only after "
    "division by both lengths": _slerp(angle=_raw_angle),
    "each row has an angle of its own in yours: the whole tensor is one vector": _by_rows,
    "v1 is turned round when the angle is above 90 degrees: a habit from quaternions, of which v "
    "and -v mean one rotation; of weights they don't": _short,
    "the angle is in degrees, but sin takes radians":
        _slerp(angle=lambda v0, v1: math.degrees(_angle(v0, v1))),
    "the sum isn't divided by sin(a)":
        _slerp(after=lambda v, v0, v1, t: v * math.sin(_angle(v0, v1))),
    "the cosine is used where the angle should be": _slerp(angle=lambda v0, v1:
        math.cos(_angle(v0, v1))),
}  # fmt: skip
ARC |= {
    f"yours goes straight less than {limit} from {where}, where there is an arc: only up to 1e-6 "
    "is it too short": _slerp(straight=lambda a, near=near, limit=limit: near(a) < limit)
    for limit in (0.03, 0.01)
    for where, near in {
        "0 and pi": lambda a: min(a, math.pi - a),
        "0": lambda a: a,
        "pi": lambda a: math.pi - a,
    }.items()
}


def _pair(c, *shape, a):
    """Two tensors with the angle a between them, lengths unlike each other and 1."""
    v0, w = c.randn(*shape).double(), c.randn(*shape).double()
    w = w - (w * v0).sum() / (v0 * v0).sum() * v0
    u0, u1 = _units(v0, w)
    long, product = c.float(1.5, 3), c.float(0.5, 0.8)
    return u0 * long, (math.cos(a) * u0 + math.sin(a) * u1) * product / long


def _rounds_up(c):
    """A vector whose cosine with itself comes out above 1."""
    for _ in range(2000):
        v = c.randn(7).double()
        if min((v * v).sum() / (v.norm() * v.norm()), (v / v.norm()).square().sum()) > 1:
            break
    return v


def _straight(c, answer, what, v0, v1, wrong, noise=None):
    """Two checks of a pair without an arc."""
    t = c.float(0.2, 0.45)
    got = called(c, answer, what, v0, v1, t)
    c.expect(not has_nan(got), f"{what} can make yours NaN, by 0/0 or by the arccos of a little "
             "more than 1. Go straight there")  # fmt: skip
    values = {message: f(v0, v1, t) for message, f in wrong.items()}
    if noise:
        values[what + noise] = got  # whatever it is: its shape was right so far
    c.close(got, _lerp(v0, v1, t), rtol=1e-6, atol=1e-9, wrong=values, given=what)


@exercise(
    "11.2",
    title="Along the arc",
    minutes=12,
    trains="a formula, and the three places where it has no answer",
    hints=(
        "First the angle: the dot product of all entries, divided by both lengths, is its cosine.",
        "Which of the three pairs gives 0/0, which 1/0, and which has no cosine to begin with? "
        "Catch the zero vector before you divide by a length.",
        "Near pi the sine is as small as near 0: min(a, math.pi - a) covers both.",
    ),
)
def _(answer, c):
    cases = [
        (*_pair(c, 6, a=c.float(0.6, 1.3)), c.float(0.15, 0.4)),
        (*_pair(c, 3, 4, a=c.float(1.9, 2.6)), c.float(0.6, 0.85)),
        (*_pair(c, 2, 3, 2, a=c.float(0.4, 1)), 0.5),
        (*_pair(c, 5, a=c.float(0.015, 0.025)), c.float(0.3, 0.7)),
        (*_pair(c, 4, 2, a=c.float(0.001, 0.002)), 0.5),
        (*_pair(c, 5, a=math.pi - c.float(0.015, 0.025)), c.float(0.3, 0.45)),
        (*_pair(c, 5, a=math.pi - c.float(0.001, 0.002)), c.float(0.3, 0.45)),
        (*_pair(c, 2, 2, a=1.0), 0.0),
        (*_pair(c, 7, a=2.0), 1.0),
    ]
    untouched(c, answer, cases[1])
    # Far above what an arccos loses at .001 from 0 or pi (3e-10), far below what LERP is off there.
    c.like(answer, _slerp(), cases, rtol=1e-8, atol=1e-9, wrong=ARC)

    v, w = c.randn(2, 3).double(), _rounds_up(c)
    nothing = torch.zeros_like(v)
    for v0, v1 in ((v, v), (v, 2.5 * v), (w, w), (2 * w, w)):
        _straight(c, answer, "parallel vectors", v0, v1, {})
    for v0, v1 in ((v, -v), (w, -1.5 * w), (0.3 * v, -2 * v)):
        _straight(
            c, answer, "opposite vectors", v0, v1,
            {
                "opposite vectors give v0: go straight there, through 0": lambda v0, v1, t: v0,
                "opposite vectors give v1: go straight there, through 0": lambda v0, v1, t: v1,
            },
            noise=": sin(pi) is nearly 0, and dividing by it leaves only rounding errors. Go "
            "straight there",
        )  # fmt: skip
    for v0, v1 in ((nothing, v), (v, nothing), (nothing, nothing)):
        _straight(
            c, answer, "a zero vector", v0, v1,
            {
                "a zero vector stands at 90 degrees to all others in yours: its dot products are "
                "0, but it has no direction. Go straight there":
                    _slerp(angle=lambda v0, v1: math.pi / 2),
                "with a zero vector yours gives v0: go straight there": lambda v0, v1, t: v0,
                "with a zero vector yours gives v1: go straight there": lambda v0, v1, t: v1,
                "with a zero vector yours gives zeros: go straight there": lambda v0, v1, t: v * 0,
            },
        )  # fmt: skip


def _majority(signs, stacked):
    return signs.sum().sign()


def _elect(vote=lambda d: d.sum(0).sign(), zero=_majority):
    def signs(d):
        elected = vote(d)
        return torch.where(elected == 0, torch.as_tensor(zero(elected, d)).to(d), elected)

    return signs


def _ties(elect=_elect(), merge=None, zeros=False):  # noqa: B008
    """Elect and merge; the keywords make the usual mistakes."""

    def answer(trimmed):
        d = torch.stack(trimmed)
        signs = elect(d)
        agrees = (d * signs >= 0) if zeros else (d.sign() == signs) & (d != 0)
        if merge is not None:
            return merge(d, signs, agrees)
        return (d * agrees).sum(0) / agrees.sum(0).clamp(min=1)

    return answer


TIES = {
    "you divide by the number of all models: only those that have the elected sign are averaged":
        _ties(merge=lambda d, signs, agrees: (d * agrees).mean(0)),
    "trimmed entries count as agreeing: a 0 has no sign, so it isn't averaged either":
        _ties(zeros=True),
    "you divide by the number of models that changed the entry: those that disagree aren't "
    "counted": _ties(
        merge=lambda d, signs, agrees: (d * agrees).sum(0) / (d != 0).sum(0).clamp(min=1)
    ),
    "each model has one vote in yours: large changes count more, by the sign of the *sum*":
        _ties(_elect(lambda d: d.sign().sum(0).sign())),
    "the model with the largest change decides alone: the sign is that of the sum":
        _ties(_elect(lambda d: d.gather(0, d.abs().argmax(0)[None])[0].sign())),
    "squares vote in yours, so one large change beats two that together are larger: take the sign "
    "of the sum": _ties(_elect(lambda d: (d * d.abs()).sum(0).sign())),
    "small sums count as 0 in yours: the majority is asked only where the sum is *exactly* 0":
        _ties(_elect(lambda d: d.sum(0).sign() * (d.sum(0).abs() > 0.2))),
    "where the sum is 0 yours gives 0: there the sign is the one that most entries have":
        _ties(_elect(zero=lambda signs, d: 0)),
    "where the sum is 0 the sign is always + in yours (as in mergekit): it is the one that most "
    "elected entries have": _ties(_elect(zero=lambda signs, d: 1)),
    "where the sum is 0 the sign is always - in yours: it is the one that most elected entries "
    "have": _ties(_elect(zero=lambda signs, d: -1)),
    "where the sum is 0 you take the sign of the tensor's total: count signs there, not sizes":
        _ties(_elect(zero=lambda signs, d: d.sum().sign())),
    "where the sum is 0 you count the signs of all models' values: count the *elected* signs":
        _ties(_elect(zero=lambda signs, d: d.sign().sum().sign())),
    "where the sum is 0 you take the opposite sign": _ties(
        _elect(zero=lambda signs, d: -signs.sum().sign())
    ),
    "the sum of those that agree: it isn't divided by how many they are":
        _ties(merge=lambda d, signs, agrees: (d * agrees).sum(0)),
    "the largest of those that agree: take their mean":
        _ties(merge=lambda d, signs, agrees: (d * agrees).abs().amax(0) * signs),
    "sizes without signs: multiply by the elected sign":
        _ties(merge=lambda d, signs, agrees: _ties()(list(d)).abs()),
    "those that *disagree* are averaged": _ties(
        merge=lambda d, signs, agrees: (d * (d * signs < 0)).sum(0)
        / (d * signs < 0).sum(0).clamp(min=1)
    ),
    "all are averaged in yours, whatever their sign":
        _ties(merge=lambda d, signs, agrees: d.mean(0)),
    "all that aren't 0 are averaged in yours, whatever their sign": _ties(
        merge=lambda d, signs, agrees: d.sum(0) / (d != 0).sum(0).clamp(min=1)
    ),
    "those are the elected signs: the mean is still to come":
        _ties(merge=lambda d, signs, agrees: signs),
}  # fmt: skip


def _trimmed(c, N, *shape):
    """Eighths, whose sums are exact in any order; half of them 0, some entries summing to 0."""
    d = torch.stack([(c.randn(*shape).double() * 12).round() / 8 for _ in range(N)])
    d = d * (c.randn(N, *shape) > 0)
    flat = d.flatten(1)
    flat[:, ::5] = 0
    flat[0, ::5], flat[1, ::5] = 0.75, -0.75
    flat[-1, 1] = flat[:, 2:5] = 0
    # Two small sums, one of them against the majority; one value larger than each of two others,
    # smaller than both together.
    flat[:2, 3:5] = torch.tensor([[0.875, -0.875], [-0.75, 0.75]]).double()
    if N > 2:
        flat[:, 6] = 0
        flat[:3, 6] = torch.tensor([1, -0.625, -0.625]).double()
    draw = _ties(merge=lambda d, signs, agrees: d.sum(0).sign().sum())(list(d)) == 0
    return _trimmed(c, N, *shape) if draw else Tensors(d)


@exercise(
    "11.3",
    title="Elect, then merge",
    minutes=12,
    trains="who votes, who is heard, and who is divided by",
    hints=(
        "torch.stack(trimmed) has the models along axis 0: sums over it are entry by entry.",
        "Make a mask of the values whose sign is the elected one. A 0 is never among them, if each "
        "elected sign is 1 or -1.",
        "The divisor is the mask's own sum over the models. Where it is 0 so is the sum above it.",
    ),
)
def _(answer, c):
    def draw():
        shapes = ((3, 11), (4, 3, 7), (2, 9), (5, 2, 2, 5))
        return [(_trimmed(c, *shape),) for shape in shapes]

    cases = telling(draw, _ties(), TIES.values())
    untouched(c, answer, cases[1])
    got = c.call(answer, *cases[0])
    c.expect(not has_nan(got), "entries that no model changed give NaN: 0 divided by 0. They "
             "should be 0")  # fmt: skip
    c.like(answer, _ties(), cases, rtol=1e-9, atol=1e-12, wrong=TIES)


KEEPS = {
    "": lambda u, p: u < p,
    "`density` is taken for the drop rate: it is the share to keep, so an entry stays where "
    "`uniform` is below it": lambda u, p: u < 1 - p,
    "entries below the density are dropped: those are the ones to keep": lambda u, p: u >= p,
    "you keep where `uniform` is above 1 - density: as good a draw, but here an entry stays where "
    "it is below the density": lambda u, p: u > 1 - p,
    "nothing is dropped": lambda u, p: u >= 0,
}
RESCALES = {
    "": lambda thin, d, p: thin / p,
    "nothing is scaled up: `div` returns a new tensor, which is thrown away there":
        lambda thin, d, p: thin,
    "survivors are multiplied by the density: over many draws the mean would be density**2 "
    "times delta": lambda thin, d, p: thin * p,
    "survivors are divided by 1 - density: how many of 100 draws keep an entry?":
        lambda thin, d, p: thin / (1 - p),
    "the sum of magnitudes is restored (as in mergekit), which depends on who happened to stay: "
    "divide by what makes the mean right":
        lambda thin, d, p: thin * (d.abs().sum() / thin.abs().sum()) if thin.any() else thin,
    "survivors are divided by the share that happened to stay: divide by its mean over the draws":
        lambda thin, d, p: thin * (d.numel() / (thin != 0).sum().item()) if thin.any() else thin,
    "survivors are divided by the density's root: that keeps the length, not the mean":
        lambda thin, d, p: thin / p**0.5,
}  # fmt: skip
VARIANCES = {
    "": lambda d, thin, p: (1 - p) / p * d**2,
    "the variance is the one before the rescale: a number divided by the density has its variance "
    "divided by the density's *square*": lambda d, thin, p: p * (1 - p) * d**2,
    "the variance is divided by the density once: dividing a number by it divides its variance "
    "twice": lambda d, thin, p: (1 - p) * d**2,
    "the variance is divided by the density once too often: look again at the variance "
    "before the rescale": lambda d, thin, p: (1 - p) / p**2 * d**2,
    "the variance has the drop rate's square: how likely an entry is to be dropped counts once":
        lambda d, thin, p: (1 - p) ** 2 * d**2,
    "in the variance, density and drop rate have changed places: the more is kept the smaller it "
    "is": lambda d, thin, p: p / (1 - p) * d**2,
    "the variance lacks delta: an entry twice as large has four times the variance":
        lambda d, thin, p: torch.full_like(d, (1 - p) / p),
    "the variance has delta without the square": lambda d, thin, p: (1 - p) / p * d.abs(),
    "that is the standard deviation: the variance is its square":
        lambda d, thin, p: ((1 - p) / p) ** 0.5 * d.abs(),
    "that is the mean of the square: the square of the mean is still to be taken away":
        lambda d, thin, p: d**2 / p,
    "the variance is what this one draw is off, squared: it is the mean of that over all draws":
        lambda d, thin, p: (thin - d) ** 2,
    "the variance is computed from what stayed in this draw: take delta":
        lambda d, thin, p: (1 - p) / p * thin**2,
    "one variance for all: each entry has its own":
        lambda d, thin, p: (1 - p) / p * (d**2).mean(),
    "one variance for all: each entry has its own, over the draws": lambda d, thin, p: thin.var(),
    "the variance is 0 in yours: after the rescale the mean is right, but single draws are not":
        lambda d, thin, p: torch.zeros_like(d),
}  # fmt: skip


def _dare(keeps=KEEPS[""], rescale=RESCALES[""], variance=VARIANCES[""]):
    def answer(delta, density, uniform):
        thin = rescale(delta * keeps(uniform, density), delta, density)
        return thin, variance(delta, thin, density)

    return answer


def _left(messages):
    left = [message for message in messages if message]
    return (f"{len(left)} mistakes are left: " if len(left) > 1 else "") + "; ".join(left)


DARES = {
    _left(messages): _dare(*mistakes)
    for messages, mistakes in (
        zip(*some, strict=True)
        for some in itertools.product(KEEPS.items(), RESCALES.items(), VARIANCES.items())
    )
    if any(messages)
}
DARES["thin and variance have changed places"] = lambda *args: _dare()(*args)[::-1]


@exercise(
    "11.4",
    title="Three mistakes in DARE",
    minutes=12,
    trains="reading code with the formula in mind, and a variance",
    hints=(
        "Take density = 0.9. Which share of the entries stays, in the code above? And what does "
        "its line with `div` do to `thin`?",
        "A survivor is delta/density, with probability density; otherwise the entry is 0. So what "
        "is the mean of the square, and what the square of the mean?",
    ),
)
def _(answer, c):
    def draw(*shape):
        return c.randn(*shape).double(), torch.from_numpy(c.rng.uniform(size=shape))

    cases = []
    for shape, density in (((12,), c.float(0.2, 0.35)), ((3, 8), c.float(0.7, 0.85))):
        delta, uniform = draw(*shape)
        flat = uniform.flatten()  # whichever way it is read, some stay and some go
        flat[:4] = torch.tensor([density / 2, 1 - density / 2, 1 - density / 3, density / 3])
        cases.append((delta, density, uniform))
    delta, uniform = draw(6)
    cases.append((delta, 0.02, 0.1 + 0.8 * uniform))  # nobody stays
    untouched(c, answer, cases[1])
    got = c.call(answer, *cases[2])
    c.expect(not has_nan(got), "where nobody stays yours gives NaN: divide by nothing that was "
             "counted in the draw")  # fmt: skip
    c.like(answer, _dare(), cases, rtol=1e-9, atol=1e-12, wrong=DARES)
    delta, uniform = draw(2, 3, 2)
    c.like(answer, _dare(), [(delta, 1.0, uniform)], rtol=1e-9, atol=1e-12)
