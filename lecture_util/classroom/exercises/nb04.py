"""Checks of notebook 04: shrinking the KV cache."""

import math

import torch

from lecture_util.classroom.exercise import exercise
from lecture_util.kv_reduction.layout import Layout
from lecture_util.kv_reduction.sizes import cache_bytes
from lecture_util.model.config import Config


def _pool(w_MD, K, K_new):
    """The definition: new head i is the mean of old heads i*group to (i+1)*group - 1."""
    heads_KHD, group = w_MD.unflatten(0, (K, -1)), K // K_new
    new = [heads_KHD[i * group : (i + 1) * group].mean(0) for i in range(K_new)]
    return torch.cat(new)


@exercise(
    "4.1",
    title="Average the heads",
    minutes=10,
    trains="grouping by reshape, and which heads are neighbours",
    hints=(
        "H is the number of rows over K. Give the rows two axes, head and row within the head, "
        "before you average anything.",
        "Query heads that shared old heads 0 and 1 become neighbours that share new head 0: so "
        "split the K heads into K_new runs of K // K_new neighbours.",
        "reshape(K_new, K // K_new, H, D), average over the second axis, and put heads and rows "
        "together again.",
    ),
)
def _(answer, c):
    D, H = c.ints(2, low=3, high=9)
    shapes = [(6, 2), (6, 3), (4, 1), (3, 3), (8, 2)]
    cases = [(c.randn(K * H, D), K, K_new) for K, K_new in shapes]
    cases.append((c.randn(6 * H, D).double(), 6, 2))
    c.like(
        answer,
        _pool,
        cases,
        rtol=1e-5,
        atol=1e-6,
        wrong={
            "you averaged heads that lie K_new apart: those that share are neighbours, 0 and 1 "
            "before 0 and 2": lambda w, K, new: (
                w.reshape(K // new, new, len(w) // K, -1).mean(0).flatten(0, 1)
            ),
            "that is the sum: scores would grow with the group, so divide by its "
            "size": lambda w, K, new: _pool(w, K, new) * (K // new),
            "the first head of each group was kept and the others thrown away: average "
            "them": lambda w, K, new: (
                w.unflatten(0, (K, -1))[:: K // new].flatten(0, 1)
            ),
            "you averaged neighbouring rows: a head is H rows, and row h of one head belongs with "
            "row h of the next": lambda w, K, new: (
                w.reshape(len(w) // (K // new), K // new, -1).mean(1)
            ),
        },
    )  # fmt: skip


def _intensity(S, N, K, H, width=2, *, keys=2, ends=2, per_head=False):
    heads = N if per_head else K
    return 4 * S * N * H / (width * (keys * S * heads * H + ends * N * H))


@exercise(
    "4.2",
    title="At most 1?",
    minutes=10,
    trains="finding the mistake",
    hints=(
        "The FLOPs are right: every query head scores every position. Look at the bytes: how many "
        "heads are there to read?",
        "Keys and values: 2*S*K*H numbers, read once for all the queries that share them. Query "
        "and output keep their N heads.",
        "`width` multiplies all the numbers, and none of the FLOPs.",
    ),
)
def _(answer, c):
    cases = []
    for width in (2, 2, 1, 4):
        K, G = c.int(2, 8), c.int(2, 16)
        cases.append((c.int(500, 9000), K * G, K, 2 * c.int(16, 64), width))
    cases.append((c.int(500, 9000), 32, 32, 64, 2))
    c.like(
        answer,
        _intensity,
        cases,
        rtol=1e-9,
        wrong={
            "the keys and values of all N query heads are still counted: only K heads are stored, "
            "and each is read once for its whole group": lambda *a: _intensity(*a, per_head=True),
            "query and output have N heads, not K: only keys and values are "
            "shared": lambda S, N, K, H, w: 4 * S * N * H / (w * (2 * S * K * H + 2 * K * H)),
            "right in 16 bits only: a number has `width` bytes": lambda S, N, K, H, w: _intensity(
                S, N, K, H, 2
            ),
            "only keys or only values were counted: both are read": lambda *a: _intensity(
                *a, keys=1
            ),
            "query and output are read and written too, 2*N*H numbers": lambda *a: _intensity(
                *a, ends=0
            ),
            "the FLOPs were cut as well: all N query heads still compute": lambda S, N, K, H, w: (
                _intensity(S, N, K, H, w) * K / N
            ),
        },
    )


def _absorbed(q_NJ, q_NR, w_NJC):
    q_NC = torch.stack([w_JC.T @ q_J for w_JC, q_J in zip(w_NJC, q_NJ, strict=True)])
    return torch.cat((q_NC, q_NR), dim=-1)


@exercise(
    "4.3",
    title="Absorb a query",
    minutes=12,
    trains="which widths meet where, and the scale",
    hints=(
        "Write out one head: (w_JC @ c_C) . q_J. Which product can you do before you know c_C?",
        "einsum(\"nj,njc->nc\", ...) takes every head's query to the latent's side. The rotated "
        "part is not made from the latent: it only has to stand in the same columns as the "
        "cache's rotated key.",
        "The scale is that of the keys you never made: one over the root of a head's key width, "
        "both parts of it.",
    ),
)
def _(answer, c):
    N = c.int(2, 5)
    J, R, C, S = 6, 4, c.int(11, 14), 23
    q_NJ, q_NR, w_NJC = c.randn(N, J), c.randn(N, R), c.randn(N, J, C)
    got = c.call(answer, q_NJ, q_NR, w_NJC)
    c.expect_type(got, (tuple, list), "what it returns")
    c.expect(len(got) == 2, f"it returns {len(got)} values, expected q_NX and scale")
    q_NX, scale = got
    c.expect_type(q_NX, torch.Tensor, "q_NX")
    c.expect(
        q_NX.shape != (N, J + R),
        f"q_NX is {J + R} wide, J + R, as a head's own key is: the cache's rows are C + R = "
        f"{C + R} wide, so take the first part to the latent's side",
    )
    want = _absorbed(q_NJ, q_NR, w_NJC)
    c.close(
        q_NX,
        want,
        rtol=1e-4,
        atol=1e-5,
        given="q_NX",
        wrong={
            "the rotated part comes first: in the cache the latent does": lambda: torch.cat(
                (want[:, C:], want[:, :C]), dim=-1
            ),
            "the rotated part is missing: without it no score knows a position": lambda: want[
                :, :C
            ],
            "the scale is already in q_NX: return it apart, it is applied to the scores": lambda: (
                want * (J + R) ** -0.5
            ),
        },
    )
    scale = float(scale) if isinstance(scale, torch.Tensor) and scale.numel() == 1 else scale
    c.expect_type(scale, (float, int), "scale")
    c.close(
        scale,
        (J + R) ** -0.5,
        rtol=1e-5,
        given="scale",
        wrong={
            "that is the scale of vectors C + R wide: absorbing changes the way a score is "
            "computed, not its value, so the scale is still that of a head's key": (C + R) ** -0.5,
            "a head's key has a rotated part too: its width counts": J**-0.5,
            "that is the latent's width: keys are made from it, but it is not theirs": C**-0.5,
            "divide by the root of the width, not by the width": 1 / (J + R),
            "scores are multiplied by it: you return what they would be divided "
            "by": (J + R) ** 0.5,
        },
    )  # fmt: skip
    latent_SX = c.randn(S, C + R)
    keys_SNJ = torch.einsum("njc,sc->snj", w_NJC, latent_SX[:, :C])
    naive_NS = torch.einsum("nj,snj->ns", q_NJ, keys_SNJ) + q_NR @ latent_SX[:, C:].T
    c.close(
        scale * q_NX @ latent_SX.T,
        naive_NS / math.sqrt(J + R),
        rtol=1e-4,
        atol=1e-4,
        given="the scores they give",
    )


def _ring(W, slack, chunks):
    """One token at a time, which must come to the same."""
    R = W - 1 + slack
    ring = [None] * R
    for position in range(sum(chunks) if R else 0):
        ring[position % R] = position
    return ring


def _shifted(W, slack, chunks):
    """The kept tokens in order from slot 0, as if they were moved along."""
    R, length = W - 1 + slack, sum(chunks)
    kept = list(range(max(0, length - R), length))
    return kept + [None] * (R - len(kept))


def _per_chunk(W, slack, chunks):
    """Slots counted anew in every chunk."""
    R, start = W - 1 + slack, 0
    ring = [None] * R
    for T in chunks:
        for i in range(T) if R else ():
            ring[i % R] = start + i
        start += T
    return ring


def _first_of_chunk(W, slack, chunks):
    """A chunk longer than the ring cut to its first R tokens."""
    R, start = W - 1 + slack, 0
    ring = [None] * R
    for T in chunks:
        for position in range(start, start + min(T, R)):
            ring[position % R] = position
        start += T
    return ring


@exercise(
    "4.4",
    title="What does the ring hold?",
    minutes=12,
    trains="slots, chunks longer than the ring, slack",
    hints=(
        "How the tokens came doesn't matter for what is left: the last R of them, or all if there "
        "were fewer.",
        "The slot of a position never depends on the chunk: p % R.",
        "R may be 0. Then there is no slot to write, and % 0 raises.",
    ),
)
def _(answer, c):
    cases = [
        (4, 0, [7, 1, 1]),
        (c.int(4, 6), 0, [c.int(8, 13), 1, 1]),
        (c.int(4, 6), c.int(1, 3), [1] * c.int(11, 15)),
        (5, 2, [3, c.int(9, 14), 2]),
        (c.int(6, 9), 1, [2, 1]),
        (1, 0, [5, 1]),
    ]
    c.like(
        answer,
        _ring,
        cases,
        wrong={
            "your ring has W slots, one too many: the newest query brings its own key": lambda W,
            slack, chunks: _ring(W + 1, slack, chunks),
            "the slack is missing: the ring has W - 1 + slack slots": lambda W, slack, chunks: (
                _ring(W, 0, chunks)
            ),
            "the right positions, but moved to the front: a token stays in slot p % R until it is "
            "overwritten": _shifted,
            "slots are counted from 0 again in every chunk: they follow from the position in the "
            "sequence": _per_chunk,
            "of a chunk longer than the ring the first tokens were kept: the last are in "
            "sight": _first_of_chunk,
            "positions start at 1 in your ring: the first token's is 0": lambda *a: [
                None if p is None else p + 1 for p in _ring(*a)
            ],
        },
    )  # fmt: skip


def _needed(S, W, L):
    """By search, over the library's own receptive field."""
    layers = next(n for n in range(1, S + 1) if Layout.windowed(n, W).receptive_field() >= S)
    window = next(w for w in range(1, S + 1) if Layout.windowed(L, w).receptive_field() >= S)
    return layers, window


@exercise(
    "4.5",
    title="How deep, how wide?",
    minutes=8,
    trains="deriving from the receptive field, off-by-ones included",
    hints=(
        "The last token's output depends on 1 + L*(W-1) tokens. Which inequality do you need, and "
        "in which unknown?",
        "S <= 1 + L*(W-1), so L >= (S-1)/(W-1): the next whole number up. In Python -(-a // b) "
        "rounds up.",
        "The same inequality solved for W.",
    ),
)
def _(answer, c):
    cases = [
        (1 + 7 * (12 - 1), 12, 7),  # both exactly
        (c.int(150, 400), c.int(8, 20), c.int(3, 9)),
        (c.int(150, 400), c.int(30, 60), c.int(10, 20)),
        (257, 17, 16),
        (258, 17, 16),
    ]
    c.like(
        answer,
        _needed,
        cases,
        wrong={
            "a layer does not add W tokens: the query's own position is in its window, and was "
            "counted already": lambda S, W, L: (-(-S // W), -(-S // L)),
            "rounded down: one token short of the first": lambda S, W, L: (
                (S - 1) // (W - 1),
                1 + (S - 1) // L,
            ),
            "one too many where it fits exactly: the last token reaches itself without any layer, "
            "so S - 1 are left to cross, rounded up": lambda S, W, L: (
                -(-S // (W - 1)),
                1 + -(-S // L),
            ),
            "the window is one too small: it includes the query itself": lambda S, W, L: (
                -(-(S - 1) // (W - 1)),
                -(-(S - 1) // L),
            ),
        },
    )


def _sized(config, W, every, share, S, memory_bytes, weights):
    layout = Layout.hybrid(config.L, W, every, share)
    num_bytes = cache_bytes(config, layout, 1, S)
    return num_bytes, max(0, int((memory_bytes - weights) // num_bytes))


def _sized_as(tokens, *, clip=True, heads="K", parts=2):
    """A wrong answer that differs in how many tokens are kept, all layers together."""

    def answer(config, W, every, share, S, memory_bytes, weights):
        num_global = config.L // every
        kept = tokens(num_global, config.L - num_global, share, S, W)
        num_bytes = 2 * parts * getattr(config, heads) * config.H * kept
        batch = int((memory_bytes - weights) // num_bytes)
        return num_bytes, max(0, batch) if clip else batch

    return answer


def _up(n, share):
    return -(-n // share)


def _tokens(g, w, share, S, W):
    return _up(g, share) * S + _up(w, share) * min(S, W - 1)


@exercise(
    "4.6",
    title="Size a hybrid",
    minutes=15,
    trains="deriving a cache from a recipe",
    hints=(
        "Count the global layers first: those whose number, from 1, is a multiple of `every`. The "
        "others are windowed.",
        "Of m layers of a kind that share in runs of `share`, m / share, rounded up, keep "
        "anything. A global one keeps S tokens, a windowed one min(S, W-1).",
        "2 (keys, values) * 2 (bytes) * K * H for each token kept. Then what is left of the memory "
        "over that, rounded down and not below 0.",
    ),
)
def _(answer, c):
    K, G, H = c.int(1, 8), c.int(2, 6), 2 * c.int(16, 64)
    config = [Config(D=512, F=1024, K=K, G=G, H=H, L=n, V=999) for n in (c.int(26, 29), 40, 15)]
    W, S = c.int(100, 900), c.int(3000, 9000)
    cases = [
        (config[0], W, 6, 1, S, 80e9, 26e9),
        (config[1], W, 6, 2, S, 80e9, 26e9),
        (config[0], W + 1, 4, 3, S, 24e9, 7e9),
        (config[1], W, 5, 2, W // 2, 24e9, 7e9),
        (config[2], W, 7, 2, S, 10e9, 26e9),
        (config[2], W, 3, 3, S, 16e9, 3e9),
    ]
    c.like(
        answer,
        _sized,
        cases,
        rtol=1e-12,
        wrong={
            "a window keeps W - 1 tokens between steps: the newest query brings its own "
            "key": _sized_as(lambda g, w, n, S, W: _up(g, n) * S + _up(w, n) * min(S, W)),
            "in a context shorter than the window there are only S tokens to keep": _sized_as(
                lambda g, w, n, S, W: _up(g, n) * S + _up(w, n) * (W - 1)
            ),
            "nobody shares in your stack: of each kind, a run of `share` layers keeps one set of "
            "keys": _sized_as(lambda g, w, n, S, W: g * S + w * min(S, W - 1)),
            "only the windowed layers share in your stack: the global ones do, too": _sized_as(
                lambda g, w, n, S, W: g * S + _up(w, n) * min(S, W - 1)
            ),
            "a last run that is shorter than `share` still keeps its keys: round up": _sized_as(
                lambda g, w, n, S, W: g // n * S + w // n * min(S, W - 1)
            ),
            "one global layer too many: where `every` does not divide L, the last few are all "
            "windowed": lambda config, W, every, share, S, memory, weights: _sized_as(
                lambda g, w, n, S, W: _tokens(g + (config.L % every > 0),
                                              w - (config.L % every > 0), n, S, W)
            )(config, W, every, share, S, memory, weights),
            "N query heads were counted: K heads are kept": _sized_as(_tokens, heads="N"),
            "keys and values are both kept, and each number takes 2 bytes": _sized_as(
                _tokens, parts=1
            ),
            "a negative batch: where the weights alone don't fit, it is 0": _sized_as(
                _tokens, clip=False
            ),
        },
    )  # fmt: skip
