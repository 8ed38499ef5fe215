"""Notebook 02: reading FLOPs, bytes and their ratio off the shapes."""

import math

from lecture_util.classroom.exercise import exercise
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, attention, mlp


def quantized_intensity(B, D, F, weight_bytes, activation_bytes):
    return 2 * B * D * F / (activation_bytes * (B * D + B * F) + weight_bytes * D * F)


@exercise(
    "2.1",
    title="A matmul with quantized weights",
    minutes=8,
    trains="counting bytes by what they hold",
    hints=(
        "Go through the four steps again: read x, read w, multiply, write y. Only one of the three "
        "tensors is a weight.",
        "The multiplication does not change: 2·B·D·F FLOPs, whatever the weights were stored in.",
        "Bytes: activation_bytes for each of the B·D numbers of x and the B·F of y, weight_bytes "
        "for each of the D·F weights.",
    ),
)
def _(answer, c):
    cases = []
    for weight_bytes, activation_bytes in ((1, 2), (0.5, 2), (2, 4)):
        B, D, F = c.ints(3, low=5, high=5000)
        cases.append((B, D, F, weight_bytes, activation_bytes))
    c.like(
        answer,
        quantized_intensity,
        cases,
        wrong={
            "every tensor is counted at the weights' width, but x and y are activations: they stay "
            "in activation_bytes": lambda B, D, F, w, a: quantized_intensity(B, D, F, w, w),
            "every tensor is counted at the activations' width, so quantizing would gain nothing: "
            "the D·F weights have weight_bytes each": lambda B, D, F, w, a: quantized_intensity(
                B, D, F, a, a
            ),
            "the result y has to be written too, B·F numbers of activation_bytes each": (
                lambda B, D, F, w, a: 2 * B * D * F / (a * B * D + w * D * F)
            ),
            "a multiply and an add are two FLOPs, so there are 2·B·D·F of them": (
                lambda B, D, F, w, a: quantized_intensity(B, D, F, w, a) / 2
            ),
            "this is bytes per FLOP: intensity is the other way round": (
                lambda B, D, F, w, a: 1 / quantized_intensity(B, D, F, w, a)
            ),
            "the two widths are swapped: weight_bytes belongs to the D·F weights, activation_bytes "
            "to x and y": lambda B, D, F, w, a: quantized_intensity(B, D, F, a, w),
            "this is FLOPs per bit: the widths are in bytes, so nothing is multiplied by 8": (
                lambda B, D, F, w, a: quantized_intensity(B, D, F, w, a) / 8
            ),
            "the widths are taken for bits: they are in bytes, so nothing is divided by 8": (
                lambda B, D, F, w, a: quantized_intensity(B, D, F, w, a) * 8
            ),
        },
    )


def reaches(B, D, F, ridge):
    intensity = 1 / (1 / B + 1 / D + 1 / F)
    return intensity >= ridge


@exercise(
    "2.2",
    title="Find the mistake: compute-limited iff B > 295",
    minutes=8,
    trains="asking when a limit holds",
    hints=(
        "The claim compares the batch with the ridge. What has to be compared with the ridge?",
        "The intensity of the finite matmul, 1/(1/B + 1/D + 1/F). Compare that.",
        "Solving for B first is a trap: where 1/ridge < 1/D + 1/F, the solution is negative.",
    ),
)
def _(answer, c):
    cases = [(300, 5120, 13824, 295.0), (340, 5120, 13824, 295.0), (100_000, 576, 576, 295.0)]
    D, F, ridge = c.int(3000, 9000), c.int(10_000, 20_000), c.int(60, 300)
    crossover = 1 / (1 / ridge - 1 / D - 1 / F)
    cases += [
        (math.floor(0.99 * crossover), D, F, ridge),
        (math.ceil(1.01 * crossover), D, F, ridge),
        (c.int(2000, 9000), c.int(ridge // 2, ridge - 1), F, ridge),
        (c.int(2, ridge // 2), D, F, ridge),
    ]
    power = 2 ** c.int(5, 9)  # 1/2 + 1/4 + 1/4: the intensity is the ridge, exactly in floats too
    cases.append((2 * power, 4 * power, 4 * power, power))
    c.like(
        answer,
        reaches,
        cases,
        wrong={
            "comparing B with the ridge is the claim itself: it forgets x and y, and holds only as "
            "D and F grow without end": lambda B, D, F, ridge: ridge < B,
            "where 1/ridge is below 1/D + 1/F your crossover is negative, and every B exceeds it; "
            "there no batch is large enough": (
                lambda B, D, F, ridge: 1 / (1 / ridge - 1 / D - 1 / F) <= B
            ),
            "the smallest of B, D and F only bounds the intensity from above: the three "
            "reciprocals add up": lambda B, D, F, ridge: min(B, D, F) >= ridge,
            "True and False are swapped: this says where the matmul is memory-limited": (
                lambda B, D, F, ridge: not reaches(B, D, F, ridge)
            ),
            "an intensity equal to the ridge reaches it: >= and not >": (
                lambda B, D, F, ridge: 1 / (1 / B + 1 / D + 1 / F) > ridge
            ),
        },
    )


@exercise(
    "2.3",
    title="How many queries must share a KV head",
    minutes=10,
    trains="solving for the ridge, and seeing when it is out of reach",
    hints=(
        "Set S·G/(S+G) equal to the ridge and solve for G.",
        "G = ridge·S/(S − ridge), rounded up to a whole number.",
        "S·G/(S+G) is always below S. So what if S is no larger than the ridge?",
    ),
)
def _(answer, c):
    cases = []
    for factor in (1.3, 4, 40):
        exact = 0.0
        while abs(exact - round(exact)) < 1e-3:  # away from a whole number, where rounding decides
            ridge = c.int(40, 300) + c.float(0.1, 0.9)
            S = int(ridge * factor) + c.int(1, 9)
            exact = ridge * S / (S - ridge)
        cases.append((S, ridge))
    power = 2 ** c.int(6, 8)  # S = 2·ridge needs G = 2·ridge, exactly in floats too
    cases.append((2 * power, power))
    ridge = c.int(100, 300) + 0.25
    cases += [(c.int(20, 99), ridge), (int(ridge), ridge)]

    def needed(S, ridge):
        return math.ceil(ridge * S / (S - ridge)) if ridge < S else math.inf

    c.like(
        answer,
        needed,
        cases,
        rtol=0,
        wrong={
            "that is the limit for endless contexts, where the intensity is G: at a finite S the "
            "queries and outputs add bytes": lambda S, ridge: math.ceil(ridge),
            "S·G/(S+G) stays below S, so for a context no longer than the ridge no G is enough: "
            "return math.inf there": lambda S, ridge: math.ceil(ridge * S / (S - ridge)),
            "a fraction of a query head cannot be built: round up to a whole number": (
                lambda S, ridge: ridge * S / (S - ridge) if ridge < S else math.inf
            ),
            "rounding down leaves the intensity just below the ridge": (
                lambda S, ridge: math.floor(ridge * S / (S - ridge)) if ridge < S else math.inf
            ),
            "one too many where the solution is a whole number: math.ceil leaves it as it is": (
                lambda S, ridge: math.floor(ridge * S / (S - ridge)) + 1 if ridge < S else math.inf
            ),
        },
    )
    c.like(answer, needed, [(power, power)], rtol=0)  # last: here S − ridge is zero


def _pairs(S, T):
    return T * (S - T) + T * (T + 1) // 2


def gqa_cost(B, S, T, N, K, H):
    return 4 * B * N * H * _pairs(S, T), 4 * B * S * K * H + 4 * B * T * N * H


@exercise(
    "2.4",
    title="The cost of grouped, causal attention",
    minutes=12,
    trains="reading a cost off shapes and a mask",
    hints=(
        "Bytes: q and the output have N heads and T positions, k and v have K heads and S "
        "positions, two bytes a number.",
        "FLOPs: each pair of a query and a key that it may see costs 2·H in the scores and 2·H in "
        "the weighted sum, for each of the N query heads.",
        "How many pairs? The first of the T new positions sees S−T+1 keys, the last sees all S.",
        "Their sum is T·(S−T) + T·(T+1)/2.",
    ),
)
def _(answer, c):
    cases = []
    for T in (1, None, c.int(3, 9)):  # decode, prefill, a few tokens onto a cache
        K, G = c.ints(2, low=2, high=8)
        S = c.int(20, 400)
        cases.append((c.int(2, 9), S, T or S, K * G, K, 2 * c.int(8, 64)))

    def flops_by(pairs):
        return lambda B, S, T, N, K, H: (
            4 * B * N * H * pairs(S, T),
            gqa_cost(B, S, T, N, K, H)[1],
        )

    def bytes_by(count):
        return lambda B, S, T, N, K, H: (
            gqa_cost(B, S, T, N, K, H)[0],
            count(B, S, T, N, K, H),
        )

    c.like(
        answer,
        gqa_cost,
        cases,
        wrong={
            "k and v are counted with N heads, but the cache holds K: the G queries of a group "
            "share one read": bytes_by(lambda B, S, T, N, K, H: 4 * B * N * H * (S + T)),
            "q and the output are counted with K heads, but every one of the N query heads asks "
            "and answers": bytes_by(lambda B, S, T, N, K, H: 4 * B * S * K * H + 4 * B * T * K * H),
            "all T·S scores are counted, but no query sees a key ahead of it": flops_by(
                lambda S, T: S * T
            ),
            "half of T·S is right only in prefill, where T = S is large: a single new token sees "
            "all S keys": flops_by(lambda S, T: S * T / 2),
            "the triangle counts only keys among the T new ones: each query also sees the S−T "
            "before them": flops_by(lambda S, T: T * (T + 1) / 2),
            "the diagonal is forgotten: each query sees itself too": flops_by(
                lambda S, T: T * (S - T) + T * (T - 1) // 2
            ),
            "FLOPs are counted with K heads: sharing saves bytes, but each of the N query heads "
            "has scores of its own": lambda B, S, T, N, K, H: (
                4 * B * K * H * _pairs(S, T),
                gqa_cost(B, S, T, N, K, H)[1],
            ),
            "the two are swapped: return (flops, bytes), in this order": (
                lambda *shape: gqa_cost(*shape)[::-1]
            ),
            "the scores are counted but not the weighted sum of the values, or the other way "
            "round: there are two products": flops_by(lambda S, T: _pairs(S, T) / 2),
        },
    )  # fmt: skip


SETTINGS = {  # layer, B, S, T
    "a": ("mlp", 1, 2048, 2048),
    "b": ("mlp", 1, 64, 64),
    "c": ("mlp", 64, 2048, 1),
    "d": ("mlp", 512, 2048, 1),
    "e": ("mlp", 32, 2048, 16),
    "f": ("attention", 1, 2048, 2048),
    "g": ("attention", 1, 256, 256),
    "h": ("attention", 512, 2048, 1),
}
_WHY = {
    "a": "a: one long prompt gives the MLP 2,048 rows that share one read of its weights",
    "b": "b: prefill is no magic word; how many rows share one read of the weights here?",
    "c": "c: 64 sequences with one new token each are 64 rows",
    "d": "d: generation is no magic word; how many rows share one read of the weights here?",
    "e": "e: the MLP cannot tell sequences from positions; how many rows are B·T?",
    "f": "f: in prefill, attention does about S/2 FLOPs a byte, S/4 with a causal mask",
    "g": "g: S/2 FLOPs a byte, S/4 with a causal mask: is this prompt long enough?",
    "h": "h: every sequence brings its own cache, so B cancels",
}


def bounds():
    """What sets the pace of each setting: Llama-2-13B's layers in bf16 on an H100."""
    config, h100 = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"]
    costs = {
        name: mlp(B, T, config.D, config.F)
        if layer == "mlp"
        else attention(B, S, T, config.N, config.K, config.H, causal=True)
        for name, (layer, B, S, T) in SETTINGS.items()
    }
    return {name: cost.bound(h100) for name, cost in costs.items()}


@exercise(
    "2.5",
    title="Memory or compute?",
    minutes=8,
    trains="sorting workloads without a calculator",
    hints=(
        "An MLP does about B·T FLOPs a byte. Attention with one query a KV head does S·T/(S+T), "
        "and half of that under a causal mask in prefill.",
        "Compare each with 295, the ridge of an H100.",
        "B·T is 2,048 in a, 64 in b and c, 512 in d and e. In g, S/4 is 64.",
    ),
)
def _(answer, c):
    got = c.call(answer)
    c.expect_type(got, dict, "your answer")
    c.expect(
        set(got) == set(SETTINGS) and all(v in ("memory", "compute") for v in got.values()),
        'expected the eight keys "a" to "h", each with "memory" or "compute"',
    )
    right = bounds()
    slogan = {k: "compute" if T > 1 else "memory" for k, (_, _, _, T) in SETTINGS.items()}
    rows = {k: "compute" if B * T > 295 else "memory" for k, (_, B, _, T) in SETTINGS.items()}
    batch = {k: "compute" if B > 295 else "memory" for k, (_, B, _, _) in SETTINGS.items()}
    c.expect(
        got != slogan,
        "this is the slogan, several positions at once for compute and one for memory: three of "
        "these settings break it, so put numbers to each",
    )
    c.expect(
        got != rows,
        "this treats attention like the MLP: in attention the sequences share no bytes, so B·T "
        "does not decide",
    )
    c.expect(
        got != batch,
        "this looks at the batch alone: positions of one sequence share the MLP's weights just as "
        "well, and attention does not care about B",
    )
    for name, want in right.items():
        c.expect(got[name] == want, f"not yet, {_WHY[name]}")
