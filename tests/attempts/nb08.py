"""Known-wrong answers to notebook 08 and the message each must get."""

import random

import torch


def _look(itself=False, latest=True, up=False, only=None, room=1, eos="cut", whole=False,
          overlap=True, falls=False, keeps_match=False):  # fmt: skip
    """An honest lookup with one thing wrong. room: what the budget is short by, None: forgotten."""

    def answer(tokens, longest, k, budget, end):
        most = k if room is None else max(min(k, budget - room), 0)
        sizes = list(range(min(longest, len(tokens) - 1), 0, -1))
        sizes = sizes[::-1] if up else sizes
        sizes = [n for n in sizes if only is None or only(n, longest)]
        for n in sizes:
            last = tokens[len(tokens) - n :]
            found = [
                i
                for i in range(len(tokens) - n + itself)
                if tokens[i : i + n] == last and (overlap or i + n <= len(tokens) - n)
            ]
            for i in reversed(found) if latest else found:
                guess = tokens[i:][: n + most][0 if keeps_match else n :]
                guess = guess[:most]
                if whole and len(guess) < most:
                    continue
                if end in guess and eos != "kept":
                    at = guess.index(end)
                    guess = {
                        "cut": guess[:at],
                        "last": guess[: at + 1],
                        "skipped": [t for t in guess if t != end],
                        "dropped": [],
                    }[eos]
                if guess or not falls:
                    return guess
        return []

    return answer


def _clears(tokens, longest, k, budget, end):
    found = _look()(tokens, longest, k, budget, end)
    tokens.clear()
    return found


def _q(p_V, q_V, x):
    return torch.eye(len(p_V), dtype=p_V.dtype)[x] if q_V is None else q_V


def _rest(p_V, q_V):
    left_V = torch.relu(p_V - q_V)
    return left_V / left_V.sum() if left_V.sum() > 0 else p_V


def _rule(accept=None, rest=_rest):
    def answer(p_V, q_V, x):
        q_V = _q(p_V, q_V, x)
        sure = min(1.0, (p_V[x] / q_V[x]).item()) if accept is None else accept(p_V, q_V, x)
        return sure, rest(p_V, q_V)

    return answer


def _nan(p_V, q_V, x):
    q_V = _q(p_V, q_V, x)
    left_V = torch.relu(p_V - q_V)
    return min(1.0, float(p_V[x] / q_V[x])), left_V / left_V.sum()


def _chosen(sure, rest):
    def answer(p_V, q_V, x):
        if q_V is None:
            return sure(p_V, x), rest(p_V, x)
        return _rule()(p_V, q_V, x)

    return answer


def _zeroes_in_place(p_V, q_V, x):
    sure, rest_V = _rule()(p_V, q_V, x)
    rest_V = rest_V.clone()
    p_V[x] = 0
    return sure, rest_V


def _goes_on(p_MV, q_KV, chance):
    tokens = [chance.draw(q) for q in q_KV]
    for k, x in enumerate(tokens):
        if chance.uniform() > p_MV[k][x] / q_KV[k][x]:
            tokens[k] = chance.draw(torch.relu(p_MV[k] - q_KV[k]))
    return [*tokens, chance.draw(p_MV[-1])]


def _other_dice(uniform):
    def answer(p_MV, q_KV, chance):
        guesses = [chance.draw(q) for q in q_KV]
        for k, x in enumerate(guesses):
            if uniform() > p_MV[k][x] / q_KV[k][x]:
                return [*guesses[:k], chance.draw(torch.relu(p_MV[k] - q_KV[k]))]
        return [*guesses, chance.draw(p_MV[-1])]

    return answer


def _one_round(drawn=True, one_number=False, bonus="fresh", rest="residual", always=False):
    def answer(p_MV, q_KV, chance):
        guesses = [chance.draw(q) if drawn else q.argmax().item() for q in q_KV]
        number = chance.uniform() if one_number else None
        for k, x in enumerate(guesses):
            left = torch.relu(p_MV[k] - q_KV[k])
            u = number if one_number else chance.uniform()
            if not always and u > p_MV[k][x] / q_KV[k][x]:
                after = {
                    "residual": left,
                    "p": p_MV[k],
                    "where": torch.where(p_MV[k] > q_KV[k], p_MV[k], 0),
                }[rest]
                return [*guesses[:k], chance.draw(after)]
        if bonus == "none":
            return guesses
        return [*guesses, chance.draw(p_MV[-1] if bonus == "fresh" else left)]

    return answer


def _writes(p_MV, q_KV, chance):
    guesses = [chance.draw(q) for q in q_KV]
    for k, x in enumerate(guesses):
        ratio = p_MV[k][x] / q_KV[k][x]
        if chance.uniform() > ratio:
            p_MV[k] = torch.relu(p_MV[k] - q_KV[k])
            return [*guesses[:k], chance.draw(p_MV[k])]
    return [*guesses, chance.draw(p_MV[-1])]


def _best(tokens=None, cost=None, plans=lambda most: range(most + 1), result=None):
    def answer(alpha, c, v, most):
        made = tokens or (lambda g: sum(alpha**k for k in range(g + 1)))
        paid = cost or (lambda g, c, v: g * c + v(g + 1))
        gain = {g: (made if tokens is None else lambda g: tokens(alpha, g))(g) / paid(g, c, v)
                for g in plans(most)}  # fmt: skip
        best = max(gain, key=lambda g: gain[g])
        return result(alpha, best, gain[best]) if result else (best, gain[best])

    return answer


def _first_top(alpha, c, v, most):
    gain = lambda g: sum(alpha**k for k in range(g + 1)) / (g * c + v(g + 1))  # noqa: E731
    g = 0
    while g < most and gain(g + 1) > gain(g):
        g += 1
    return g, gain(g)


def _line(far):
    def answer(alpha, c, v, most):
        slope = (v(far(most)) - v(1)) / (far(most) - 1)
        return _best()(alpha, c, lambda n: 1 + slope * (n - 1), most)

    return answer


def _led_to(parents, m):
    seen = {m}
    while (m := parents[m]) >= 0:
        seen.add(m)
    return seen


def _tree(sees=_led_to, at=None, prefix=True):
    def answer(parents, before):
        M = len(parents)
        rows = [[prefix] * before + [n in sees(parents, m) for n in range(M)] for m in range(M)]
        depth = [len(_led_to(parents, m)) - 1 for m in range(M)]
        positions = [before + d for d in depth] if at is None else at(depth, before)
        return torch.tensor(rows), torch.tensor(positions)

    return answer


def _inverted(parents, before):
    mask_MS, positions_M = _tree()(parents, before)
    return mask_MS.logical_not(), positions_M


def _prunes(parents, before):
    made = _tree()(parents, before)
    parents[0] = 0
    return made


def _caches(target=lambda n, g, a: n + a, draft=lambda n, g, a: n + a - (a == g), reads=None):
    def answer(n, gamma, accepted):
        kept = draft(n, gamma, accepted)
        to_read = n + accepted + 1 - kept if reads is None else reads
        return target(n, gamma, accepted), kept, to_read

    return answer


ATTEMPTS = [
    ("8.1", "suffix matches itself", _look(itself=True), "match themselves"),
    ("8.1", "always nothing", lambda *_: [], "no guess anywhere"),
    ("8.1", "leftmost", _look(latest=False), "the leftmost match was taken: the latest"),
    (
        "8.1",
        "leftmost, then itself",
        _look(latest=False, itself=True),
        "the leftmost match was taken",
    ),
    ("8.1", "shortest first", _look(up=True), "short matches were tried first"),
    ("8.1", "longest only", _look(only=lambda n, longest: n == longest), "only n = longest"),
    (
        "8.1",
        "single tokens",
        _look(only=lambda n, longest: n == 1),
        "short matches were tried first",
    ),
    (
        "8.1",
        "one less than longest",
        _look(only=lambda n, longest: n < longest),
        "runs of `longest` tokens count too: begin",
    ),
    (
        "8.1",
        "two at most",
        _look(only=lambda n, longest: n <= 2),
        "runs of `longest` tokens count too, yours end at two",
    ),
    (
        "8.1",
        "three at most",
        _look(only=lambda n, longest: n <= 3),
        "runs of `longest` tokens count too, yours end at three",
    ),
    ("8.1", "drops a guess with EOS", _look(eos="dropped"), "was dropped whole"),
    ("8.1", "draft longer than the budget", _look(room=None), "the budget is forgotten"),
    ("8.1", "fills the budget", _look(room=0), "fills the whole budget"),
    ("8.1", "guesses after EOS", _look(eos="kept"), "guesses after the end token"),
    ("8.1", "guesses EOS", _look(eos="last"), "end token itself is guessed"),
    ("8.1", "skips EOS", _look(eos="skipped"), "what follows it kept"),
    (
        "8.1",
        "neither budget nor EOS",
        _look(room=None, eos="kept"),
        "grow; and there are guesses after the end token",
    ),
    ("8.1", "all k or nothing", _look(whole=True), "fewer guesses will do"),
    ("8.1", "no overlap", _look(overlap=False), "may overlap"),
    ("8.1", "looks on after EOS", _look(falls=True), "you went on to another"),
    ("8.1", "match repeated", _look(keeps_match=True), "begins after them"),
    ("8.1", "clears its input", _clears, "changed what it was given"),
    ("8.2", "accept everything", _rule(lambda p, q, x: 1.0), "everything is accepted"),
    ("8.2", "accept nothing", _rule(lambda p, q, x: 0.0), "nothing is accepted"),
    (
        "8.2",
        "upside down",
        _rule(lambda p, q, x: min(1.0, float(q[x] / p[x]))),
        "the ratio is upside down",
    ),
    ("8.2", "no minimum", _rule(lambda p, q, x: float(p[x] / q[x])), "can be above 1"),
    ("8.2", "p alone", _rule(lambda p, q, x: float(p[x])), "whatever q"),
    ("8.2", "only where p is larger", _rule(lambda p, q, x: float(p[x] >= q[x])), "accepted only"),
    (
        "8.2",
        "residual not renormalised",
        _rule(rest=lambda p, q: torch.relu(p - q)),
        "not renormalised",
    ),
    ("8.2", "from p", _rule(rest=lambda p, q: p), "replaced from p itself"),
    ("8.2", "turned round", _rule(rest=lambda p, q: _rest(q, p)), "yours is of q - p"),
    (
        "8.2",
        "absolute values",
        _rule(rest=lambda p, q: p if torch.equal(p, q) else (p - q).abs() / (p - q).abs().sum()),
        "absolute values",
    ),
    ("8.2", "not clamped", _rule(rest=lambda p, q: p - q), "negative entries"),
    ("8.2", "softmax", _rule(rest=lambda p, q: (p - q).softmax(-1)), "is not a softmax, which"),
    (
        "8.2",
        "softmax where they differ",
        _rule(rest=lambda p, q: (p - q).softmax(-1) if (p - q).any() else p),
        "is not a softmax: clamp",
    ),
    ("8.2", "nothing left", _nan, "0/0 is NaN"),
    (
        "8.2",
        "chosen is certain",
        _chosen(lambda p, x: 1.0, lambda p, x: _rest(p, _q(p, None, x))),
        "always accepted in yours",
    ),
    (
        "8.2",
        "chosen again",
        _chosen(lambda p, x: float(p[x]), lambda p, x: p),
        "it can be drawn again",
    ),
    (
        "8.2",
        "greedy",
        _chosen(lambda p, x: float(p.argmax() == x), lambda p, x: _rest(p, _q(p, None, x))),
        "exactly if it is the target's favourite",
    ),
    ("8.2", "in place", _zeroes_in_place, "changed what it was given"),
    (
        "8.3",
        "as printed",
        _one_round(drawn=False, one_number=True, bonus="left"),
        "3 mistakes are still there",
    ),
    ("8.3", "argmax draft, softmax q", _one_round(drawn=False), "judged as if drawn from q"),
    ("8.3", "one uniform reused", _one_round(one_number=True), "one uniform number serves all"),
    ("8.3", "bonus adjusted", _one_round(bonus="left"), "from what was left at the last guess"),
    (
        "8.3",
        "two of three",
        _one_round(one_number=True, bonus="left"),
        "2 mistakes are still there: one uniform",
    ),
    (
        "8.3",
        "first mended",
        _one_round(drawn=False, bonus="left"),
        "2 mistakes are still there: the guesses",
    ),
    ("8.3", "from p after a rejection", _one_round(rest="p"), "not from the residual"),
    ("8.3", "accept everything", _one_round(always=True), "everything is accepted"),
    (
        "8.3",
        "plain sampling",
        lambda p_MV, q_KV, chance: [chance.draw(p_MV[0])],
        "no guess is ever used",
    ),
    ("8.3", "no bonus", _one_round(bonus="none"), "without the bonus"),
    ("8.3", "goes on", _goes_on, "it goes on after a rejection"),
    ("8.3", "p where it is larger", _one_round(rest="where"), "not all of p where p is larger"),
    ("8.3", "dice of Python's", _other_dice(random.random), "don't come from `chance`"),
    ("8.3", "dice of torch's", _other_dice(lambda: torch.rand(()).item()), "don't come from"),
    ("8.3", "in place", _writes, "changed what it was given"),
    ("8.3", "a constant", lambda p_MV, q_KV, chance: [0], "expected"),
    ("8.3", "a tensor", lambda p_MV, q_KV, chance: p_MV[0].argmax(), "expected a list"),
    (
        "8.4",
        "no bonus",
        _best(tokens=lambda a, g: sum(a**k for k in range(1, g + 1))),
        "own token is forgotten",
    ),
    ("8.4", "kept share", _best(tokens=lambda a, g: 1 + a * g), "each guess was counted with"),
    ("8.4", "all or nothing", _best(tokens=lambda a, g: 1 + g * a**g), "all or nothing"),
    (
        "8.4",
        "draft once",
        _best(cost=lambda g, c, v: (c if g > 0 else 0) + v(g + 1)),
        "draft's cost was counted once:",
    ),
    ("8.4", "one too many", _best(cost=lambda g, c, v: (g + 1) * (c) + v(g + 1)), "not gamma + 1"),
    (
        "8.4",
        "one too few read",
        _best(cost=lambda g, c, v: g * c + v(g if g else 1)),
        "the target reads gamma + 1",
    ),
    ("8.4", "checking is free", _best(cost=lambda g, c, v: g * c + 1.0), "it costs v(n)"),
    ("8.4", "draft is free", _best(cost=lambda g, c, v: v(g + 1)), "each guess costs c"),
    ("8.4", "never plain", _best(plans=lambda most: range(1, most + 1)), "is a plan too"),
    ("8.4", "first top", _first_top, "stopped at the first decrease"),
    ("8.4", "a line to v(2)", _line(lambda most: 2), "a straight line, from v(1) and v(2)"),
    ("8.4", "a line to the end", _line(lambda most: most + 1), "a straight line, to v(most + 1)"),
    ("8.4", "most left out", _best(plans=range), "gamma = most is allowed"),
    ("8.4", "swapped", _best(result=lambda a, g, gain: (gain, g)), "the other way round"),
    (
        "8.4",
        "tokens",
        _best(result=lambda a, g, gain: (g, sum(a**k for k in range(g + 1)))),
        "divide by what the round",
    ),
    ("8.4", "most tokens", _best(cost=lambda g, c, v: 1), "it always says `most`"),
    ("8.5", "chain", _tree(sees=lambda p, m: range(m + 1)), "the mask is a chain's"),
    (
        "8.5",
        "chain and slots",
        _tree(
            sees=lambda p, m: range(m + 1),
            at=lambda depth, before: [before + m for m in range(len(depth))],
        ),
        "beside it too; and positions follow the slots",
    ),
    (
        "8.5",
        "slots",
        _tree(at=lambda depth, before: list(range(before, before + len(depth)))),
        "positions follow the slots",
    ),
    ("8.5", "parent only", _tree(sees=lambda p, m: {m, p[m]}), "parent's parent"),
    ("8.5", "blind to itself", _tree(sees=lambda p, m: _led_to(p, m) - {m}), "doesn't see itself"),
    ("8.5", "itself only", _tree(sees=lambda p, m: {m}), "sees only itself"),
    (
        "8.5",
        "all above",
        _tree(
            sees=lambda p, m: (
                {m} | {n for n in range(len(p)) if len(_led_to(p, n)) < len(_led_to(p, m))}
            )
        ),
        "everything less deep",
    ),
    (
        "8.5",
        "turned over",
        _tree(sees=lambda p, m: {n for n in range(len(p)) if m in _led_to(p, n)}),
        "turned over",
    ),
    ("8.5", "everything", _tree(sees=lambda p, m: range(len(p))), "sees every other"),
    (
        "8.5",
        "one too far",
        _tree(at=lambda depth, before: [before + d + 1 for d in depth]),
        "one too far",
    ),
    (
        "8.5",
        "one too early",
        _tree(at=lambda depth, before: [before + d - 1 for d in depth]),
        "one too early",
    ),
    ("8.5", "from zero", _tree(at=lambda depth, before: depth), "count from 0"),
    ("8.5", "inverted", _inverted, "the mask is inverted"),
    ("8.5", "no sequence", _tree(prefix=False), "the sequence itself is hidden"),
    ("8.5", "in place", _prunes, "changed what it was given"),
    (
        "8.6",
        "no rollback",
        _caches(lambda n, g, a: n + g, lambda n, g, a: n + g - 1, 1),
        "nothing is rolled back",
    ),
    ("8.6", "target not rolled back", _caches(lambda n, g, a: n + g), "still holds the rejected"),
    ("8.6", "newest counted", _caches(lambda n, g, a: n + a + 1), "the target's newest token was"),
    (
        "8.6",
        "both newest counted",
        _caches(lambda n, g, a: n + a + 1, lambda n, g, a: n + a + 1, 1),
        "both newest tokens",
    ),
    ("8.6", "reset", _caches(lambda n, g, a: 0), "start again from nothing"),
    ("8.6", "all thrown away", _caches(lambda n, g, a: n, lambda n, g, a: n), "throw all guesses"),
    ("8.6", "one too few", _caches(lambda n, g, a: n + a - 1), "you keep one too few"),
    ("8.6", "no catching up", _caches(draft=lambda n, g, a: n + a), "and never read it"),
    ("8.6", "draft holds all", _caches(draft=lambda n, g, a: n + g - 1), "the draft still holds"),
    ("8.6", "reads one", _caches(reads=1), "two tokens to read then"),
    ("8.6", "always short", _caches(draft=lambda n, g, a: n + a - 1), "only if all guesses"),
]
