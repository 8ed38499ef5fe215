"""Checks of notebook 05: beyond attention."""

import math

import torch
import torch.nn.functional as nnf

from lecture_util.classroom.exercise import exercise


def _ssm(a_Z, b_Z, c_Z, delta, u_T, *, decay=None, taken=None, late=False):
    """The definition in fp64; `decay` and `taken` are other rules to discretise by."""
    a_Z, b_Z, c_Z = (x.double() for x in (a_Z, b_Z, c_Z))
    decay_Z = torch.exp(delta * a_Z) if decay is None else decay(a_Z, delta)
    taken_Z = torch.expm1(delta * a_Z) / a_Z * b_Z if taken is None else taken(a_Z, b_Z, delta)
    x_Z, y = torch.zeros_like(a_Z), []
    for u in u_T.double():
        before_Z, x_Z = x_Z, decay_Z * x_Z + taken_Z * u
        y.append((c_Z * (before_Z if late else x_Z)).sum())
    return torch.stack(y).float()


@exercise(
    "5.1",
    title="Discretise, then run",
    minutes=10,
    trains="from a continuous system to a recurrence",
    hints=(
        "Two things are needed once, before the loop: how much of the state is left after a time "
        "delta, and how much of an input that held still for so long has entered.",
        "Left to itself x' = a x shrinks by exp(delta * a). The input's share is the integral of "
        "that decay over the step, times b; look at the formula for B-bar above.",
        "In the loop: first the new state from the old one and u, then y from the new state.",
    ),
)
def _(answer, c):
    cases = []
    for Z, T in ((3, 7), (1, 1), (5, 12)):
        a_Z = -(0.2 + c.randn(Z).abs())
        cases.append((a_Z, c.randn(Z), c.randn(Z), c.float(0.3, 0.9), c.randn(T)))
    c.like(
        answer,
        _ssm,
        cases,
        rtol=1e-4,
        atol=1e-5,
        wrong={
            "B-bar is delta * b, Euler's rule (Mamba's): zero-order hold integrates the decay over "
            "the step": lambda *a: _ssm(*a, taken=lambda a_Z, b_Z, d: d * b_Z),
            "the input enters with b as it is: it too must be discretised": lambda *a: _ssm(
                *a, taken=lambda a_Z, b_Z, d: b_Z
            ),
            "the decay is 1 + delta*a, Euler's rule: zero-order hold has the exact "
            "exponential": lambda *a: _ssm(*a, decay=lambda a_Z, d: 1 + d * a_Z),
            "the state decays by a itself: that is a rate, for continuous time": lambda *a: _ssm(
                *a, decay=lambda a_Z, d: a_Z
            ),
            "y is read before the token has entered: the input of a step counts in that step's "
            "output": lambda *a: _ssm(*a, late=True),
            "the decay grows instead of shrinking: a is negative already": lambda *a: _ssm(
                *a, decay=lambda a_Z, d: torch.exp(-d * a_Z)
            ),
        },
    )


def _step(u_BE, dt_BE, dt_bias_E, A_log_EZ, B_BZ, C_BZ, state_BEZ, *, biases=1, rate=None):
    """One channel and one state at a time."""
    new_BEZ, y_BE = torch.empty_like(state_BEZ), torch.zeros_like(u_BE)
    for b in range(u_BE.shape[0]):
        for e in range(u_BE.shape[1]):
            delta = nnf.softplus(dt_BE[b, e] + biases * dt_bias_E[e])
            for z in range(state_BEZ.shape[2]):
                A = -math.exp(A_log_EZ[e, z]) if rate is None else rate(float(A_log_EZ[e, z]))
                kept = torch.exp(delta * A) * state_BEZ[b, e, z]
                new_BEZ[b, e, z] = kept + delta * B_BZ[b, z] * u_BE[b, e]
            y_BE[b, e] = (new_BEZ[b, e] * C_BZ[b]).sum()
    return y_BE, new_BEZ


def _pair(got, names, c):
    """It returns so many tensors, in a tuple or a list."""
    c.expect_type(got, (tuple, list), "what it returns")
    c.expect(len(got) == len(names), f"it returns {len(got)} values, expected {', '.join(names)}")


@exercise(
    "5.2",
    title="Three mistakes in a Mamba step",
    minutes=12,
    trains="reading a recurrent step with suspicion",
    hints=(
        "Go through it line by line and ask of each: what should this number be, what sign should "
        "it have, and who else may be looking at this tensor?",
        "How often is the bias added? And is exp(delta * ...) below 1, so that the state decays?",
        "`*=` and `+=` write into the tensor that was passed in; state = a * state + b makes a "
        "new one.",
    ),
)
def _(answer, c):
    B, E, Z = 3, 4, 5
    given = (
        c.randn(B, E),
        c.randn(B, E),
        0.5 + c.randn(E).abs(),
        0.5 * c.randn(E, Z),
        c.randn(B, Z),
        c.randn(B, Z),
    )
    state_BEZ = c.randn(B, E, Z)
    passed = (*given, state_BEZ)
    given = tuple(x.clone() for x in passed)
    got = c.call(lambda: answer(*passed))  # as they are, not as copies
    _pair(got, ("y_BE", "state_BEZ"), c)
    want = _step(*given)
    named = {
        "the bias is added twice: once into dt, once more inside the softplus": {"biases": 2},
        "the bias is gone: it is to be added once": {"biases": 0},
        "the state grows: A is -exp(A_log), and negative": {"rate": math.exp},
        "A_log is a logarithm: A is -exp(A_log)": {"rate": lambda log: log},
        "A_log is a logarithm, so A is -exp(A_log) and not -A_log": {"rate": lambda log: -log},
        "both are still there, the bias added twice and the state that grows": {
            "biases": 2,
            "rate": math.exp,
        },
    }
    for i, name in enumerate(("y_BE", "the new state_BEZ")):
        c.close(
            got[i],
            want[i],
            rtol=1e-4,
            atol=1e-5,
            given=name,
            wrong={
                message: lambda i=i, how=how: _step(*given, **how)[i]
                for message, how in named.items()
            },
        )
    names = ("u_BE", "dt_BE", "dt_bias_E", "A_log_EZ", "B_BZ", "C_BZ", "the state")
    _untouched(passed, given, names, c)


def _untouched(passed, before, names, c):
    """What came in is as it was: the last check, since right numbers may come of spoilt inputs."""
    changed = [
        name
        for name, now, was in zip(names, passed, before, strict=True)
        if not torch.equal(now, was)
    ]
    c.expect(
        not changed,
        f"right numbers, but {changed[0] if changed else ''} that was passed in has changed: make "
        "new tensors, so that whoever kept the old ones can go back to them",
    )


def _linear(q_BNM, k_BNM, v_BNH, kv_BNMH, sum_BNM, *, seen=True, normed=True, count=False):
    """One head at a time, by outer products."""
    new_kv, new_sum = kv_BNMH.clone(), sum_BNM.clone()
    out_BNH = torch.empty_like(v_BNH)
    for b in range(v_BNH.shape[0]):
        for n in range(v_BNH.shape[1]):
            q_M = q_BNM[b, n]
            new_kv[b, n] += torch.outer(k_BNM[b, n], v_BNH[b, n])
            new_sum[b, n] += k_BNM[b, n]
            kv_MH = new_kv[b, n] if seen else kv_BNMH[b, n]
            total = q_M @ (new_sum if seen else sum_BNM)[b, n]
            total = k_BNM[b, n] @ q_M if count else total
            out_BNH[b, n] = q_M @ kv_MH / (total if normed else 1.0)
    return out_BNH, new_kv, new_sum


@exercise(
    "5.3",
    title="A step of linear attention",
    minutes=12,
    trains="the state, its normaliser, and no writing in place",
    hints=(
        "The loop of section 4 does it for one head. Batch and heads are two axes in front that "
        "nothing mixes.",
        "The outer product of k and v for all heads: k_BNM[..., :, None] * v_BNH[..., None, :].",
        "Add first, then read: numerator q times kv, denominator q times sum, each over M. "
        "`kv = kv + ...` leaves the tensor that came in alone, `kv += ...` does not.",
    ),
)
def _(answer, c):
    B, N, M, H = 2, 3, 5, 4
    q, k = (0.1 + c.randn(B, N, M).abs() for _ in range(2))
    v, kv, total = c.randn(B, N, H), c.randn(B, N, M, H), 0.5 + c.randn(B, N, M).abs()
    kept = kv.clone(), total.clone()
    passed = (q, k, v, kv, total)
    given = (*(x.clone() for x in (q, k, v)), *kept)
    got = c.call(lambda: answer(*passed))
    _pair(got, ("out_BNH", "kv_BNMH", "sum_BNM"), c)
    want = _linear(*given)
    wrong = [
        {
            "the new token is missing from what is read: take it in first, it sees "
            "itself": lambda: _linear(*given, seen=False)[0],
            "the weights don't add up to 1: divide by q times the sum of keys": lambda: _linear(
                *given, normed=False
            )[0],
            "the normaliser holds only the newest key: it is carried along, as the state "
            "is": lambda: _linear(*given, count=True)[0],
        },
        {
            "kv_BNMH comes back as it was: the token was not taken in": kept[0],
            "kv_BNMH is this token's alone: the past was dropped": lambda: want[1] - kept[0],
        },
        {
            "sum_BNM comes back as it was: the normaliser must take in the key as well": kept[1],
            "sum_BNM is this token's alone: the past was dropped": given[1],
        },
    ]
    for value, right, misconceptions, name in zip(
        got, want, wrong, ("out_BNH", "kv_BNMH", "sum_BNM"), strict=True
    ):
        c.close(value, right, rtol=1e-4, atol=1e-5, given=name, wrong=misconceptions)
    _untouched(passed, given, ("q_BNM", "k_BNM", "v_BNH", "the state", "the state"), c)


def _crossing(K, H, state_bytes, every, dtype_bytes=2, *, tensors=2, others=-1, more=1):
    per_token = tensors * K * H * dtype_bytes
    return (every + others) * state_bytes // per_token + more


@exercise(
    "5.4",
    title="From which context on?",
    minutes=10,
    trains="deriving a crossing of what grows and what does not",
    hints=(
        "In a group of `every` layers, how many hold a state, and how many a cache?",
        "One token adds a key and a value of K heads, H numbers each.",
        "You look for the smallest whole S with S * bytes_per_token > states. At equality it does "
        "not outweigh them yet.",
    ),
)
def _(answer, c):
    cases = [(8, 128, 573_440, 8, 2)]
    for every in (2, c.int(3, 12)):
        K, H, width = c.choice([1, 2, 4]), c.choice([16, 32, 64]), c.choice([1, 4])
        exact = 2 * K * H * width * c.int(50, 500)  # the crossing meets a whole number of tokens
        cases.append((K, H, exact, every, width))
    cases.append((c.int(2, 9), 64, 2 * c.int(50_000, 450_000) + 1, 4, 1))
    c.like(
        answer,
        _crossing,
        cases,
        wrong={
            "keys *and* values are kept: a factor of 2 is missing": lambda *a: _crossing(
                *a, tensors=1
            ),
            "one of the layers attends: only every - 1 hold a state": lambda *a: _crossing(
                *a, others=0
            ),
            "that is against a single state: every - 1 layers hold one": lambda K, H, s, n, w: (
                _crossing(K, H, s, 2, w)
            ),
            "at that S the two are equal, or the cache is still the smaller: one token "
            "more": lambda *a: _crossing(*a, more=0),
            "right in 16 bits only: a number takes dtype_bytes": lambda K, H, s, n, w: _crossing(
                K, H, s, n, 2
            ),
            "that is no whole number of tokens: round, and mind equality": lambda K, H, s, n, w: (
                (n - 1) * s / (2 * K * H * w)
            ),
            "rounding up is not enough: where the division comes out even, the two are "
            "equal": lambda K, H, s, n, w: math.ceil((n - 1) * s / (2 * K * H * w)),
        },
    )


def _uncover(tokens_T, logits_TV, count, mask_id, *, score="chance", anywhere=False):
    """Position by position, the surest first; `score` is what they are ranked by."""
    filled = tokens_T.tolist()
    ranks = []
    for t, token in enumerate(filled):
        chances = logits_TV[t].double().softmax(-1)
        rank = {
            "chance": chances.max(),
            "logit": logits_TV[t].max(),
            "left": torch.tensor(-float(t)),
            "least": -chances.max(),
        }[score]
        if anywhere or token == mask_id:
            ranks.append((float(rank), t))
    for _, t in sorted(ranks, reverse=True)[:count]:
        filled[t] = int(logits_TV[t].argmax())
    return torch.tensor(filled)


def _uncover_all(tokens_T, logits_TV, count, mask_id):
    return torch.where(tokens_T == mask_id, logits_TV.argmax(-1), tokens_T)


@exercise(
    "5.5",
    title="Which tokens to uncover",
    minutes=12,
    trains="one pass of a masked diffusion sampler",
    hints=(
        "Three steps: how sure is the model at each position, which positions may be chosen at "
        "all, and which count of them are the surest?",
        "Logits of two positions can't be compared, since each row may be shifted by a constant. "
        "Their softmax can. `.max(-1)` gives the largest chance and the word at once.",
        "Give known positions a chance below 0, take topk(count).indices, and write the words of "
        "those positions into a clone.",
    ),
)
def _(answer, c):
    mask_id, T = 11, 10
    cases = []
    for hidden, count in ((7, 3), (4, 4), (9, 1), (6, 2)):
        tokens_T = torch.tensor([c.int(0, mask_id - 1) for _ in range(T)])
        tokens_T[sorted(c.ints(hidden, low=0, high=T - 1))] = mask_id
        logits_TV = c.randn(T, mask_id) + 6 * c.randn(T, 1)  # each row is shifted
        known_T = tokens_T != mask_id
        logits_TV[known_T, 0] += 8  # the model is surest of what it sees
        cases.append((tokens_T, logits_TV, count, mask_id))
    c.like(
        answer,
        _uncover,
        cases,
        wrong={
            "all masks were filled in: only count of them may be": _uncover_all,
            "a known token was chosen: the model is sure of what it sees, but only masked "
            "positions are open": lambda *a: _uncover(*a, anywhere=True),
            "you compared logits of different positions: each row has its own offset, which a "
            "softmax takes away": lambda *a: _uncover(*a, score="logit"),
            "these are the leftmost masks, that is autoregression: choose the surest": lambda *a: (
                _uncover(*a, score="left")
            ),
            "these are the least sure positions: choose the surest": lambda *a: _uncover(
                *a, score="least"
            ),
            "nothing was uncovered": lambda tokens_T, *rest: tokens_T,
        },
    )
