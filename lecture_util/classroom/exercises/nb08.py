"""Checks of notebook 08: speculative sampling."""

import contextlib
import copy
import itertools
import random

import numpy as np
import torch

from lecture_util.classroom.exercise import exercise


def _untouched(c, answer, args) -> None:
    """One check: called with these very objects, not copies, the answer leaves them alone."""
    before = copy.deepcopy(args)
    c.call(lambda: answer(*args))
    same = all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(args, before, strict=True)
    )
    c.expect(same, "your function changed what it was given: build new values instead")


def _lookup(
    tokens,
    longest,
    k,
    room,
    eos,
    *,
    lengths=None,
    latest=True,
    itself=False,
    overlap=True,
    whole=False,
    budget=lambda k, room: min(k, room - 1),
    ending="before",
    from_match=False,
    falls=False,
):
    """One n after the other, one start after the other; the keywords make the usual mistakes."""
    most = max(budget(k, room), 0)
    top = min(longest, len(tokens) - 1)
    for n in lengths(top) if lengths else range(top, 0, -1):
        end = len(tokens) - n + itself
        starts = list(range(end if overlap else max(end - n + 1, 0)))
        for start in reversed(starts) if latest else starts:
            if tokens[start : start + n] != tokens[-n:]:
                continue
            first = start if from_match else start + n
            guesses = tokens[first : first + most]
            if whole and len(guesses) < most:
                continue
            if ending == "drop":
                guesses = [] if eos in guesses else guesses
            elif ending == "filter":
                guesses = [token for token in guesses if token != eos]
            elif ending != "never" and eos in guesses:
                guesses = guesses[: guesses.index(eos) + (ending == "with")]
            if guesses or not falls:
                return guesses
    return []


def _looks(**mistakes):
    return lambda *args: _lookup(*args, **mistakes)


BUDGETS = {
    "": lambda k, room: min(k, room - 1),
    "the budget is forgotten: a draft longer than the text may still grow": lambda k, room: k,
    "the draft fills the whole budget: after every draft comes one token of the target's own, so "
    "leave it a place": lambda k, room: min(k, room),
}
ENDINGS = {
    "": "before",
    "there are guesses after the end token: nothing follows it": "never",
    "the end token itself is guessed: in a prompt it closed somebody's turn, so end the guess "
    "before it": "with",
    "the end token was left out and what follows it kept: a guess ends there": "filter",
    "a guess with the end token in it was dropped whole: what stands before it may come": "drop",
}


def _shorter(most):
    """A lookup that never tries more than most(longest) tokens."""
    return lambda tokens, longest, *rest: _lookup(tokens, most(longest), *rest)


def _both_ends():
    """Wrong in the budget, in the end token, or in both: a message that names what is left."""
    found = {}
    for (budget, most), (ending, where) in itertools.product(BUDGETS.items(), ENDINGS.items()):
        if message := "; and ".join(filter(None, (budget, ending))):
            found[message] = _looks(budget=most, ending=where)
    return found


@exercise(
    "8.1",
    title="Look the last words up",
    minutes=15,
    trains="a draft without a model: longest match, the suffix itself, budget and end token",
    hints=(
        "Begin with n = longest and go down to 1. For each n, compare the last n tokens with every "
        "run of n tokens that starts earlier.",
        "The last n tokens start at len(tokens) - n. So earlier starts are 0 to len(tokens) - n - "
        "1, and n can be at most len(tokens) - 1. Go through them from the right.",
        "A round yields the accepted guesses and one token more: with room for 5, guess 4. Cut the "
        "guess at the end token when it is found, not before.",
    ),
)
def _(answer, c):
    name = c.ints(60, low=3, high=900)  # what stands for tokens 0, 1, 2, ...
    eos, few = 2, c.int(3, 4)
    text = [
        ([1, 2, 9, 1, 2, 8, 1, 2], 3, 3, 20),  # leftmost would give 9
        ([1, 2, 3, 4, 9, 3, 7, 1, 2, 3], 3, 4, 20),  # a single token stands nearer
        ([1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3], 3, 4, 20),  # and here a run of two
        ([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 8, 3, 4, 7, 1, 2, 3, 4], 4, 4, 20),  # and here of three
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4], 5, 8, few),  # no more than the budget, less one
        ([1, 2, 3, 1, 2], 3, 8, 1),  # room for the target's own token, and no more
        ([5, 6, 7, 8, -1, 10, 11, 5, 6], 4, 8, 20),  # what follows has an end token in it
        ([5, 6, 9, 6, 12, 13, 5, 6, -1, 7, 5, 6], 3, 4, 20),  # and here begins with it
        ([1, 2, 3, 4, 5], 3, 4, 20),  # nothing stands twice
        ([7, 7, 7, 7], 2, 3, 20),  # an earlier run may overlap with the last
        ([4], 3, 4, 20),
        ([1, 2, 3, 4, 1, 2], 9, c.int(6, 9), 20),  # fewer than k follow
        ([8, 9, 1, 2, 3, 4, 9, 1, 5, 6, 8, 9, 1], 2, 3, 20),  # longest=2: not the run of three
    ]
    cases = [
        ([name[i] if i >= 0 else eos for i in tokens], longest, k, room, eos)
        for tokens, longest, k, room in text
    ]
    c.like(
        answer,
        _lookup,
        cases,
        wrong={
            "no guess anywhere: do the last n tokens match themselves, with nothing after "
            "them?": _looks(itself=True),
            "the leftmost match was taken: the latest is likelier to go on as the text does "
            "now": _looks(latest=False),
            "the leftmost match was taken, or the last n tokens where nothing stands earlier: "
            "leave them out, and begin from the right": _looks(latest=False, itself=True),
            "short matches were tried first, or alone: the longest is the best evidence": _looks(
                lengths=lambda top: range(1, top + 1)
            ),
            "only n = longest was tried: go on with shorter runs": _looks(
                lengths=lambda top: [top] if top > 0 else []
            ),
            "runs of `longest` tokens count too: begin with n = longest": _shorter(lambda n: n - 1),
            "runs of `longest` tokens count too, yours end at two": _shorter(lambda n: min(n, 2)),
            "runs of `longest` tokens count too, yours end at three": _shorter(lambda n: min(n, 3)),
            "the guess repeats the matched tokens: it begins after them": _looks(from_match=True),
            "matches that k tokens don't follow were passed over: fewer guesses will do": _looks(
                whole=True
            ),
            "an earlier run may overlap with the last n tokens: in 7 7 7 the two 7s at the end "
            "also stand one place earlier": _looks(overlap=False),
            "where the longest match is followed by the end token, you went on to another: the "
            "text says that it ends here, so guess nothing": _looks(falls=True),
            **_both_ends(),
        },
    )
    _untouched(c, answer, cases[0])


def _judge(p_V, q_V, x):
    """The definition, a token at a time."""
    if q_V is None:
        q_V = torch.zeros_like(p_V)
        q_V[x] = 1
    accept = min(1.0, float(p_V[x]) / float(q_V[x]))
    left = [max(float(p) - float(q), 0.0) for p, q in zip(p_V, q_V, strict=True)]
    total = sum(left)
    rest_V = torch.tensor([a / total for a in left], dtype=p_V.dtype) if total else p_V.clone()
    return accept, rest_V


def _judged(accept=None, rest=None, chosen=None, raw=False):
    """A wrong answer: another chance, another distribution, or another view of a chosen guess."""

    def answer(p_V, q_V, x):
        if q_V is None and chosen:
            return chosen(p_V, x)
        right = _judge(p_V, q_V, x)
        q = torch.nn.functional.one_hot(torch.tensor(x), len(p_V)).to(p_V) if q_V is None else q_V
        left_V = rest(p_V, q) if rest else right[1]
        if rest and not raw:
            left_V = left_V / left_V.sum() if left_V.sum() > 0 else p_V
        return (accept(p_V, q, x) if accept else right[0]), left_V

    return answer


@exercise(
    "8.2",
    title="Accept, or draw from what is left",
    minutes=12,
    trains="the rule that makes speculation exact, drawn and chosen guesses alike",
    hints=(
        "Where the draft likes x less than the target does, take it. Where it likes x too much, "
        "take it as often as brings it down to p(x).",
        "What is still missing after that is p - q wherever it is positive. A distribution adds up "
        "to 1.",
        "A chosen guess is one that the draft would have given with certainty: q is 1 at x and 0 "
        "elsewhere. If nothing is left at all, p and q are the same, and p will do.",
    ),
)
def _(answer, c):
    cases = []
    for V in (2, 5, c.int(6, 9)):
        p_V, q_V = ((1.5 * c.randn(V).double()).softmax(-1) for _ in range(2))
        if V == 5:
            p_V[3] = 0  # as after top-k
            p_V /= p_V.sum()
        over, under = int((q_V - p_V).argmax()), int((p_V - q_V).argmax())
        cases += [(p_V, q_V, over), (p_V, q_V, under), (p_V, None, int(p_V.argmax()))]
    cases.append((p_V, None, int(p_V.argmin())))
    same_V = c.randn(4).double().softmax(-1)
    cases += [(same_V, same_V.clone(), 2), (torch.eye(3).double()[1], None, 1)]
    c.like(
        answer,
        _judge,
        cases,
        rtol=1e-9,
        atol=1e-12,
        wrong={
            "everything is accepted: then the output is the draft's": _judged(lambda p, q, x: 1.0),
            "the ratio is upside down: p(x)/q(x) is small where the draft likes x too "
            "much": _judged(lambda p, q, x: min(1.0, float(q[x] / p[x]))),
            "the first number is a probability: p(x)/q(x) can be above 1, so min(1, ...)": _judged(
                lambda p, q, x: float(p[x] / q[x])
            ),
            "accepted with probability p(x), whatever q: right only for a chosen guess": _judged(
                lambda p, q, x: float(p[x])
            ),
            "accepted only where p(x) >= q(x): keep the others with probability p(x)/q(x)": _judged(
                lambda p, q, x: float(p[x] >= q[x])
            ),
            "the residual is not renormalised: it adds up to 1 - alpha": _judged(
                rest=lambda p, q: (p - q).clamp(min=0), raw=True
            ),
            "a rejected guess is replaced from p itself: where the draft is too timid that gives "
            "less than p, since p's share there was already handed out": _judged(
                rest=lambda p, q: p, raw=True
            ),
            "the residual is of p - q, where the target wants more; yours is of q - p": _judged(
                rest=lambda p, q: (q - p).clamp(min=0)
            ),
            "the residual took absolute values: where q is above p nothing is missing, so clamp at "
            "0": _judged(rest=lambda p, q: (p - q).abs()),
            "negative entries are left in the residual: clamp at 0 before you normalise": _judged(
                rest=lambda p, q: p - q, raw=True
            ),
            "the residual is not a softmax, which would give every token a share: clamp p - q at 0 "
            "and divide by its sum": _judged(rest=lambda p, q: (p - q).softmax(-1), raw=True),
            "the residual is not a softmax: clamp p - q at 0 and divide by its sum": _judged(
                rest=lambda p, q: p if torch.equal(p, q) else (p - q).softmax(-1), raw=True
            ),
            "where p and q agree nothing is left, and 0/0 is NaN: p itself will do": (
                lambda p, q, x: (
                    _judge(p, q, x)[0],
                    _judge(p, q, x)[1]
                    if (q is None and p[x] < 1) or (q is not None and not torch.equal(p, q))
                    else p * float("nan"),
                )
            ),
            "a chosen guess is always accepted in yours: it is certain to the draft, not to the "
            "target": _judged(chosen=lambda p, x: (1.0, _judge(p, None, x)[1])),
            "after a chosen guess was rejected it can be drawn again: q is 1 there, so nothing of "
            "it is left": _judged(chosen=lambda p, x: (float(p[x]), p)),
            "a chosen guess is taken exactly if it is the target's favourite: that is greedy "
            "decoding, whatever the temperature": _judged(
                chosen=lambda p, x: (float(x == int(p.argmax())), _judge(p, None, x)[1])
            ),
            "nothing is accepted: then no guess saves a forward": _judged(lambda p, q, x: 0.0),
        },
    )
    _untouched(c, answer, cases[0])


class _EveryChance:
    """Follows every outcome once: replays the choices made so far, then takes the next branch.

    A uniform number is one of `levels` equally likely ones; the cases below have ratios p/q that
    are multiples of 1/levels, so comparing with it is exact.
    """

    def __init__(self, levels: int) -> None:
        self.levels, self.script, self.limit = levels, [], 0

    def _next(self, weights):
        if self.at == len(self.script):
            if len(self.script) >= 12:
                raise RuntimeError("your function never stops drawing")
            self.script.append([0, [i for i, w in enumerate(weights) if w > 0]])
        chosen, options = self.script[self.at]
        if chosen >= len(options):
            raise RuntimeError("your function does not do the same twice, given the same chances")
        self.at += 1
        self.weight *= weights[options[chosen]]
        return options[chosen]

    def uniform(self):
        return (self._next([1 / self.levels] * self.levels) + 0.5) / self.levels

    def draw(self, p_V):
        weights = [float(x) for x in p_V]
        total = sum(weights)
        if not total > 0 or any(not w >= 0 for w in weights):
            raise ValueError(f"chance.draw was given {weights}, which is no distribution")
        return self._next([w / total for w in weights])

    def outcomes(self, function):
        """(what it returned, how likely) for every path."""
        while True:
            self.at, self.weight = 0, 1.0
            yield function(), self.weight
            self.limit += 1
            if self.limit > 20_000:
                raise RuntimeError("your function draws far more often than it has guesses")
            self.script = self.script[: self.at]
            while self.script and self.script[-1][0] + 1 == len(self.script[-1][1]):
                self.script.pop()
            if not self.script:
                return
            self.script[-1][0] += 1


def _joint(function, p_MV, q_KV):
    """How likely every text of K + 1 tokens is, if plain sampling goes on after the round."""
    (M, V), found = p_MV.shape, {}
    chance = _EveryChance(4)
    for tokens, weight in chance.outcomes(lambda: function(p_MV.clone(), q_KV.clone(), chance)):
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= M:
            raise ValueError(f"it returned {tokens!r}: expected a list of 1 to {M} tokens")
        tokens = tuple(int(token) for token in tokens)
        if not all(0 <= token < V for token in tokens):
            raise ValueError(f"it returned {list(tokens)}: tokens are 0 to {V - 1}")
        found[tokens] = found.get(tokens, 0.0) + weight
    joint = torch.zeros((V,) * M, dtype=torch.float64)
    for tokens, weight in found.items():
        rest = torch.tensor(weight, dtype=torch.float64)
        for p_V in p_MV[len(tokens) :]:
            rest = rest[..., None] * p_V
        joint[tokens] += rest
    return joint


def _lengths_of_rounds(function, p_MV, q_KV):
    chance, lengths = _EveryChance(4), [0.0] * len(p_MV)
    for tokens, weight in chance.outcomes(lambda: function(p_MV.clone(), q_KV.clone(), chance)):
        lengths[len(tokens) - 1] += weight
    return lengths


def _generators():
    state = np.random.get_state()
    return random.getstate(), state[1].tolist(), state[2], torch.get_rng_state().tolist()


def _chances_elsewhere(function, p_MV, q_KV) -> bool:
    """Whether the function draws numbers that `chance` knows nothing of."""
    before, chance = _generators(), _EveryChance(4)
    paths = chance.outcomes(lambda: function(p_MV.clone(), q_KV.clone(), chance))
    with contextlib.suppress(Exception):  # what is wrong otherwise, the next check says
        for _ in itertools.islice(paths, 200):
            pass
    return _generators() != before


def _leaves_alone(c, function, p_MV, q_KV):
    """One check: on no path does the function write into what it was given."""
    chance, same = _EveryChance(4), []

    def watched():
        given = p_MV.clone(), q_KV.clone()
        tokens = function(*given, chance)
        same.append(torch.equal(given[0], p_MV) and torch.equal(given[1], q_KV))
        return tokens

    list(chance.outcomes(watched))
    c.expect(all(same), "your function changed what it was given: build new values instead")


def _left(p_V, q_V):
    return (p_V - q_V).clamp(min=0)


def _round(p_MV, q_KV, chance, *, drawn=True, fresh=True, bonus=True, renewed=True, left=_left):
    """One round over a chain of guesses; each keyword as False is one of the printed mistakes."""
    guesses = [chance.draw(q_V) if drawn else int(q_V.argmax()) for q_V in q_KV]
    once = None if fresh else chance.uniform()
    left_V = p_MV[-1]
    for k, x in enumerate(guesses):
        u = chance.uniform() if fresh else once
        left_V = left(p_MV[k], q_KV[k])
        if not left_V.sum() > 0:
            left_V = p_MV[k]
        if u >= p_MV[k, x] / q_KV[k, x]:
            return [*guesses[:k], chance.draw(left_V if renewed else p_MV[k])]
    return [*guesses, chance.draw(p_MV[-1] if bonus else left_V)]


PRINTED = {
    "drawn": "the guesses are the draft's favourites, but they are judged as if drawn from q",
    "fresh": "one uniform number serves all guesses: each acceptance needs its own",
    "bonus": "the bonus is drawn from what was left at the last guess: all guesses were accepted, "
    "so it comes from p's last row as it is",
}


def _wrongs(p_MV, q_KV):
    """Message -> the joint distribution of a round with one, two or three of the mistakes."""
    found = {}
    for n in (1, 2, 3):
        for names in itertools.combinations(PRINTED, n):
            made = dict.fromkeys(names, False)
            still = f"{n} mistakes are still there: " if n > 1 else ""
            found[still + "; ".join(PRINTED[name] for name in names)] = lambda made=made: _joint(
                lambda p, q, chance: _round(p, q, chance, **made), p_MV, q_KV
            )
    found["after a rejection the token comes from p, not from the residual"] = lambda: _joint(
        lambda p, q, chance: _round(p, q, chance, renewed=False), p_MV, q_KV
    )
    found[
        "the residual is not all of p where p is larger: only what p has more than q, p - q, is "
        "still missing"
    ] = lambda: _joint(
        lambda p, q, chance: _round(p, q, chance, left=lambda p, q: p * (p > q)), p_MV, q_KV
    )
    found["everything is accepted: that is the draft's distribution"] = lambda: _joint(
        lambda p, q, chance: [*map(chance.draw, q), chance.draw(p[-1])], p_MV, q_KV
    )
    return found


@exercise(
    "8.3",
    title="A round that is not exact",
    minutes=15,
    trains="finding mistakes that no shape and no single example shows",
    hints=(
        "Three lines are wrong. Ask of every random choice: from which distribution, and has this "
        "number been used before?",
        "First: a guess that is judged by q must have been drawn from q. Second: what do the "
        "acceptances of two guesses have in common here?",
        "Third: read the last line once more for the case in which every guess was accepted. "
        "Which row of p has not been used yet?",
    ),
)
def _(answer, c):
    # Ratios p/q are multiples of 1/4, so that four levels of a uniform number are exact.
    rows = [
        ([2, 1, 5], [4, 2, 2]),
        ([1, 4, 3], [4, 2, 2]),
        ([3, 3, 2], [4, 2, 2]),
        ([1, 3, 4], [2, 4, 2]),
    ]
    order = c.ints(4, low=0, high=3)
    names = c.ints(3, low=0, high=2)
    p, q = (
        torch.tensor([rows[i][side] for i in order], dtype=torch.float64)[:, names] / 8
        for side in (0, 1)
    )
    for p_MV, q_KV in ((p[:3], q[:2]), (p[1:4], q[1:3]), (p[:2], q[:1])):
        if not callable(answer):
            c.call(answer)  # says what is wrong with that
        c.expect(
            not _chances_elsewhere(answer, p_MV, q_KV),
            "some chances don't come from `chance`: with chance.uniform() and chance.draw the "
            "check can go down every path",
        )
        joint = c.call(lambda p, q: _joint(answer, p, q), p_MV, q_KV)
        want = p_MV[0]
        for p_V in p_MV[1:]:
            want = want[..., None] * p_V
        c.close(
            joint,
            want,
            rtol=1e-9,
            atol=1e-12,
            wrong=_wrongs(p_MV, q_KV),
            given=f"{len(q_KV)} guesses: how likely every text is, over all paths",
        )
    agree = [float(torch.minimum(p[k], q[k]).sum()) for k in range(2)]
    c.close(
        c.call(lambda p, q: _lengths_of_rounds(answer, p, q), p[:3], q[:2]),
        [1 - agree[0], agree[0] * (1 - agree[1]), agree[0] * agree[1]],
        rtol=1e-9,
        wrong={
            "exact, but no guess is ever used: that is plain sampling": [1.0, 0.0, 0.0],
            "exact, but without the bonus: if all guesses were accepted, p's last row yields one "
            "token more": [1 - agree[0], agree[0], 0.0],
            "it goes on after a rejection: the guesses behind it continue a text that is no longer "
            "there, so the round ends (it looks exact only because no row here depends on the "
            "guesses)": [0.0, 0.0, 1.0],
        },
        given="how often a round yields 1, 2 and 3 tokens",
    )
    c.call(lambda p, q: _leaves_alone(c, answer, p, q), p[:3], q[:2])


def _climb(alpha, c, v, most):
    """Uphill from no guess, to the first step that goes down."""
    best = 0, 1.0
    for gamma in range(1, most + 1):
        gain = sum(alpha**k for k in range(gamma + 1)) / (gamma * c + v(gamma + 1))
        if gain < best[1]:
            break
        best = gamma, gain
    return best


def _straight(alpha, c, v, most, *, far):
    """As if v were a line from v(1) through v(far)."""
    slope = (v(far) - 1) / (far - 1)
    return _plan(alpha, c, lambda n: 1 + (n - 1) * slope, most)


def _plan(alpha, c, v, most, *, tokens=None, cost=None, least=0, last=1):
    """Try every gamma."""
    tokens = tokens or (lambda g: sum(alpha**k for k in range(g + 1)))
    cost = cost or (lambda g: g * c + v(g + 1))
    gains = {g: tokens(g) / cost(g) for g in range(least, most + last)}
    gamma = max(gains, key=gains.get)
    return gamma, gains[gamma]


@exercise(
    "8.4",
    title="How many guesses?",
    minutes=10,
    trains="predicting a speed-up from acceptance and two costs",
    hints=(
        "A round yields 1 + alpha + ... + alpha**gamma tokens: guess k counts only if all before "
        "it were accepted too.",
        "A round costs gamma forwards of the draft, c each, and one of the target, which reads the "
        "newest token and all guesses.",
        "No guess at all is a plan too: one token for the price of one.",
    ),
)
def _(answer, c):
    def flat(n):
        return 1.0

    def slow(n):
        return 1 + 0.04 * (n - 1)

    def steep(n):
        return 1 + 0.6 * (n - 1)

    def stairs(n):
        return 1.0 if n == 1 else 1.6 if n <= 8 else 3.0

    cases = [
        (0.8, 0.05, slow, 12),
        (c.float(0.55, 0.7), 0.1, slow, c.int(9, 12)),
        (c.float(0.5, 0.6), c.float(0.7, 0.9), flat, 8),  # the draft costs too much: 0
        (c.float(0.3, 0.4), 0.0, steep, 6),  # checking costs too much: 0
        (c.float(0.92, 0.97), 0.01, flat, 5),  # more than `most` would be better still
        (c.float(0.72, 0.78), 0.02, slow, 10),
        (1.0, 0.25, flat, 4),
        (0.9, 0.02, stairs, 12),
        (c.float(0.94, 0.96), 0.4, stairs, 12),  # one guess loses, seven win, eight win less
    ]
    c.like(
        answer,
        _plan,
        cases,
        rtol=1e-9,
        wrong={
            "the target's own token is forgotten: a round yields one more than the accepted "
            "guesses": lambda a, c, v, m: _plan(
                a, c, v, m, tokens=lambda g: sum(a**k for k in range(1, g + 1))
            ),
            "each guess was counted with alpha, as if a later one could count after a "
            "rejection": lambda a, c, v, m: _plan(a, c, v, m, tokens=lambda g: 1 + g * a),
            "that is all or nothing: guesses before the first rejection "
            "count": lambda a, c, v, m: _plan(a, c, v, m, tokens=lambda g: 1 + g * a**g),
            "the draft's cost was counted once: it makes its guesses one after the "
            "other": lambda a, c, v, m: _plan(a, c, v, m, cost=lambda g: c * min(g, 1) + v(g + 1)),
            "the draft makes gamma guesses, not gamma + 1: the last token is the "
            "target's": lambda a, c, v, m: _plan(a, c, v, m, cost=lambda g: (g + 1) * c + v(g + 1)),
            "the target reads gamma + 1 tokens: the newest of the sequence comes "
            "first": lambda a, c, v, m: _plan(a, c, v, m, cost=lambda g: g * c + v(max(g, 1))),
            "checking was taken to cost as much as one token: it costs "
            "v(n)": lambda a, c, v, m: _plan(a, c, v, m, cost=lambda g: g * c + 1),
            "the draft was taken to be free: each guess costs c": lambda a, c, v, m: _plan(
                a, c, v, m, cost=lambda g: v(g + 1)
            ),
            "no guess at all is a plan too, and the best where guesses cost too "
            "much": lambda a, c, v, m: _plan(a, c, v, m, least=1),
            "the search stopped at the first decrease: more guesses can be better again, so try "
            "every gamma up to `most`": _climb,
            "v was taken to be a straight line, from v(1) and v(2): ask it for every "
            "n": lambda a, c, v, m: _straight(a, c, v, m, far=2),
            "v was taken to be a straight line, to v(most + 1): ask it for every "
            "n": lambda a, c, v, m: _straight(a, c, v, m, far=m + 1),
            "gamma = most is allowed": lambda a, c, v, m: _plan(a, c, v, m, last=0),
            "that is the speed-up first, then gamma: the other way round": lambda a, c, v, m: (
                _plan(a, c, v, m)[::-1]
            ),
            "gamma is right, but the second number is tokens a round: divide by what the round "
            "costs": lambda a, c, v, m: (
                _plan(a, c, v, m)[0],
                sum(a**k for k in range(_plan(a, c, v, m)[0] + 1)),
            ),
            "most tokens a round is not the aim: it always says `most`. What does the round "
            "cost?": lambda a, c, v, m: _plan(a, c, v, m, cost=lambda g: 1),
        },
    )  # fmt: skip


def _ancestors(parents, node):
    found = []
    while node != -1:
        found.append(node)
        node = parents[node]
    return found


def _tree(parents, before, *, sees=None, prefix=True, at=None):
    """`sees` tells which nodes node m may look at, `at` its position behind the sequence."""
    M = len(parents)
    sees = sees or (lambda m: _ancestors(parents, m))
    at = at or (lambda m: len(_ancestors(parents, m)) - 1)
    mask = torch.zeros(M, before + M, dtype=torch.bool)
    mask[:, :before] = prefix
    for m in range(M):
        for node in sees(m):
            mask[m, before + node] = True
    return mask, torch.tensor([before + at(m) for m in range(M)])


def _trees():
    """Each wrong mask with each wrong position: the message names both."""
    depth = lambda parents, m: len(_ancestors(parents, m))  # noqa: E731
    masks = {
        "": None,
        "the mask is a chain's: a guess sees the alternatives beside it too": (
            lambda parents, m: range(m + 1)
        ),
        "a guess sees its parent but not its parent's parent": (
            lambda parents, m: [m] if parents[m] == -1 else [m, parents[m]]
        ),
        "a guess doesn't see itself": lambda parents, m: _ancestors(parents, m)[1:],
        "everything less deep is seen: only a guess's own ancestors led to it": (
            lambda parents, m: (
                [m] + [n for n in range(len(parents)) if depth(parents, n) < depth(parents, m)]
            )
        ),
        "the mask is turned over: a guess sees what follows it": (
            lambda parents, m: [n for n in range(len(parents)) if m in _ancestors(parents, n)]
        ),
        "a guess sees only itself: what it was guessed after must be visible": lambda _, m: [m],
        "every guess sees every other": lambda parents, m: range(len(parents)),
    }
    places = {
        "": None,
        "positions follow the slots: alternatives for one token stand at one position": (
            lambda parents, m: m
        ),
        "positions are one too far: a first guess comes right behind the sequence, whose positions "
        "are 0 to before - 1": lambda parents, m: depth(parents, m),
        "positions are one too early: the sequence has 0 to before - 1 already": (
            lambda parents, m: depth(parents, m) - 2
        ),
    }
    found = {}
    for (seen, sees), (placed, at) in itertools.product(masks.items(), places.items()):
        if message := "; and ".join(filter(None, (seen, placed))):
            found[message] = lambda parents, before, sees=sees, at=at: _tree(
                parents,
                before,
                sees=sees and (lambda m: sees(parents, m)),
                at=at and (lambda m: at(parents, m)),
            )
    found["the sequence itself is hidden: every guess sees all of it"] = lambda parents, before: (
        _tree(parents, before, prefix=False)
    )
    found["the mask is inverted: True is where a guess may look"] = lambda parents, before: (
        ~_tree(parents, before)[0],
        _tree(parents, before)[1],
    )
    found["positions count from 0: they go on where the sequence ends"] = lambda parents, before: (
        _tree(parents, before, at=lambda m: depth(parents, m) - 1 - before)
    )
    return found


@exercise(
    "8.5",
    title="A tree in one forward",
    minutes=12,
    trains="who may see whom, and at which position",
    hints=(
        "Write down for each guess which tokens it was guessed after: the whole sequence, its "
        "parent, its parent's parent, ... and it sees itself, as in every causal mask.",
        "Parents come before their children. So when you reach node m, its parent's row is done: "
        "copy it, and add m.",
        "The position counts the tokens in front: `before` for a first guess, and one more for "
        "every step down. Two alternatives get the same.",
    ),
)
def _(answer, c):
    cases = [([-1, 0, 1], 4), ([-1, -1, 0, 0, 1, 2], 3), ([-1], 1), ([-1, -1, -1], 2)]
    for M in (9, c.int(10, 14)):
        parents = [-1, -1, 0, 2]
        while len(parents) < M:
            parents.append(c.int(-1, len(parents) - 1))
        cases.append((parents, c.int(3, 7)))
    c.like(answer, _tree, cases, wrong=_trees())
    _untouched(c, answer, cases[1])


def _lengths(n, gamma, accepted):
    target, draft = n + accepted, n + min(accepted, gamma - 1)
    return target, draft, n + accepted + 1 - draft


def _with(target=None, draft=None, reads=None):
    def answer(n, gamma, accepted):
        t, d, _ = _lengths(n, gamma, accepted)
        t = target(n, gamma, accepted) if target else t
        d = draft(n, gamma, accepted) if draft else d
        return t, d, (reads(n, gamma, accepted, d) if reads else n + accepted + 1 - d)

    return answer


@exercise(
    "8.6",
    title="What the caches keep",
    minutes=8,
    trains="rollback, and the token that the draft never read",
    hints=(
        "After the round the sequence has n + accepted + 1 tokens. Its newest came out of the "
        "target's forward: who has read it?",
        "The target read the newest token and all guesses. Those that were accepted stay in its "
        "cache, in front of the new token.",
        "Who makes gamma guesses, one after the other, reads gamma tokens: the newest of the "
        "sequence and all guesses but the last. What if that last guess was accepted?",
    ),
)
def _(answer, c):
    n = c.int(20, 90)
    gamma = c.int(4, 7)
    cases = [(n, gamma, a) for a in (0, 2, gamma - 1, gamma)]
    cases += [(c.int(5, 19), 1, 0), (c.int(5, 19), 1, 1), (c.int(100, 200), 3, 3)]
    one = lambda n, g, a, d: 1  # noqa: E731
    c.like(
        answer,
        _lengths,
        cases,
        wrong={
            "nothing is rolled back: keys and values of rejected guesses stay, and every later "
            "token would see them": _with(lambda n, g, a: n + g, lambda n, g, a: n + g - 1,
                                          lambda n, g, a, d: 1),
            "the target still holds the rejected guesses": _with(lambda n, g, a: n + g),
            "the target's newest token was counted as read: it has only just come out": _with(
                lambda n, g, a: n + a + 1
            ),
            "both newest tokens were counted as read: they have only just come out": _with(
                lambda n, g, a: n + a + 1, lambda n, g, a: n + a + 1, one
            ),
            "the target's caches start again from nothing: what was accepted is right, and may "
            "stay": _with(lambda n, g, a: 0),
            "what was accepted may stay: you throw all guesses away": _with(
                lambda n, g, a: n, lambda n, g, a: n
            ),
            "the target read the newest token of the sequence too: you keep one too few": _with(
                lambda n, g, a: n + a - 1
            ),
            "after a draft accepted to its end, the draft's cache lacks the last guess: it gave "
            "it, and never read it": _with(draft=lambda n, g, a: n + a),
            "the draft still holds rejected guesses": _with(draft=lambda n, g, a: n + g - 1),
            "the draft's cache lacks the last guess after a full acceptance, as you say, so it has "
            "two tokens to read then": _with(reads=one),
            "the draft lacks a token only if all guesses were accepted: after a rejection it has "
            "read all that stays": _with(draft=lambda n, g, a: n + a - 1),
        },
    )  # fmt: skip
