"""Known-wrong answers to notebook 02, and what each must be told."""

import math


def rows_decide():
    by_rows = {"a": 2048, "b": 64, "c": 64, "d": 512, "e": 512, "f": 2048, "g": 256, "h": 512}
    return {name: "compute" if rows > 295 else "memory" for name, rows in by_rows.items()}


def slogan():
    return {name: "memory" if name in "cdh" else "compute" for name in "abcdefgh"}


def long_prompts_only():
    return {name: "compute" if name in "adefg" else "memory" for name in "abcdefgh"}


ATTEMPTS = [
    (
        "2.1",
        "all in the weights' width",
        lambda B, D, F, w, a: 2 * B * D * F / (w * (B * D + D * F + B * F)),
        "x and y are activations",
    ),
    (
        "2.1",
        "weights dequantized before counting",
        lambda B, D, F, w, a: 2 * B * D * F / (a * (B * D + D * F + B * F)),
        "quantizing would gain nothing",
    ),
    (
        "2.1",
        "result not written",
        lambda B, D, F, w, a: 2 * B * D * F / (a * B * D + w * D * F),
        "y has to be written",
    ),
    (
        "2.1",
        "multiply-add as one FLOP",
        lambda B, D, F, w, a: B * D * F / (a * (B * D + B * F) + w * D * F),
        "two FLOPs",
    ),
    (
        "2.1",
        "upside down",
        lambda B, D, F, w, a: (a * (B * D + B * F) + w * D * F) / (2 * B * D * F),
        "bytes per FLOP",
    ),
    (
        "2.1",
        "widths swapped",
        lambda B, D, F, w, a: 2 * B * D * F / (w * (B * D + B * F) + a * D * F),
        "widths are swapped",
    ),
    (
        "2.1",
        "bits for bytes",
        lambda B, D, F, w, a: 2 * B * D * F / (8 * a * (B * D + B * F) + 8 * w * D * F),
        "FLOPs per bit",
    ),
    (
        "2.1",
        "bytes taken for bits",
        lambda B, D, F, w, a: 2 * B * D * F / (a / 8 * (B * D + B * F) + w / 8 * D * F),
        "taken for bits",
    ),
    ("2.2", "the claim", lambda B, D, F, ridge: ridge < B, "the claim itself"),
    (
        "2.2",
        "negative crossover",
        lambda B, D, F, ridge: 1 / (1 / ridge - 1 / D - 1 / F) <= B,
        "no batch is large enough",
    ),
    (
        "2.2",
        "smallest size",
        lambda B, D, F, ridge: min(B, D, F) > ridge,
        "the three reciprocals add up",
    ),
    (
        "2.2",
        "returns the intensity",
        lambda B, D, F, ridge: 1 / (1 / B + 1 / D + 1 / F),
        "expected True or False",
    ),
    (
        "2.2",
        "equality excluded",
        lambda B, D, F, ridge: 2 * B * D * F / (2 * B * D + 2 * D * F + 2 * B * F) > ridge,
        ">= and not >",
    ),
    ("2.3", "the limit", lambda S, ridge: math.ceil(ridge), "limit for endless contexts"),
    (
        "2.3",
        "negative count",
        lambda S, ridge: math.ceil(ridge * S / (S - ridge)),
        "no G is enough",
    ),
    (
        "2.3",
        "not whole",
        lambda S, ridge: ridge * S / (S - ridge) if ridge < S else math.inf,
        "round up",
    ),
    (
        "2.3",
        "rounded down",
        lambda S, ridge: int(ridge * S / (S - ridge)) if ridge < S else math.inf,
        "just below the ridge",
    ),
    (
        "2.3",
        "floor plus one",
        lambda S, ridge: int(ridge * S / (S - ridge)) + 1 if ridge < S else math.inf,
        "one too many",
    ),
    (
        "2.3",
        "context equal to the ridge",
        lambda S, ridge: math.ceil(ridge * S / (S - ridge)) if ridge <= S else math.inf,
        "ZeroDivisionError",
    ),
    (
        "2.4",
        "cache with N heads",
        lambda B, S, T, N, K, H: (
            4 * B * N * H * (T * (S - T) + T * (T + 1) // 2),
            4 * B * S * N * H + 4 * B * T * N * H,
        ),
        "the cache holds K",
    ),
    (
        "2.4",
        "no mask",
        lambda B, S, T, N, K, H: (4 * B * S * T * N * H, 4 * B * S * K * H + 4 * B * T * N * H),
        "no query sees a key ahead of it",
    ),
    (
        "2.4",
        "half of everything",
        lambda B, S, T, N, K, H: (2 * B * S * T * N * H, 4 * B * S * K * H + 4 * B * T * N * H),
        "right only in prefill",
    ),
    (
        "2.4",
        "triangle without the cache",
        lambda B, S, T, N, K, H: (
            2 * B * N * H * T * (T + 1),
            4 * B * S * K * H + 4 * B * T * N * H,
        ),
        "S−T before them",
    ),
    (
        "2.4",
        "scores only",
        lambda B, S, T, N, K, H: (
            2 * B * N * H * (T * (S - T) + T * (T + 1) // 2),
            4 * B * S * K * H + 4 * B * T * N * H,
        ),
        "there are two products",
    ),
    (
        "2.4",
        "tuple swapped",
        lambda B, S, T, N, K, H: (
            4 * B * S * K * H + 4 * B * T * N * H,
            4 * B * N * H * (T * (S - T) + T * (T + 1) // 2),
        ),
        "the two are swapped",
    ),
    (
        "2.4",
        "diagonal forgotten",
        lambda B, S, T, N, K, H: (
            4 * B * N * H * (T * (S - T) + T * (T - 1) // 2),
            4 * B * S * K * H + 4 * B * T * N * H,
        ),
        "sees itself too",
    ),
    (
        "2.4",
        "FLOPs of K heads",
        lambda B, S, T, N, K, H: (
            4 * B * K * H * (T * (S - T) + T * (T + 1) // 2),
            4 * B * S * K * H + 4 * B * T * N * H,
        ),
        "sharing saves bytes",
    ),
    ("2.5", "the slogan", slogan, "the slogan"),
    ("2.5", "attention by rows", rows_decide, "treats attention like the MLP"),
    ("2.5", "short prompt forgotten", long_prompts_only, "g: S/2 FLOPs a byte"),
    ("2.5", "a list", lambda: ["memory"] * 8, "expected dict"),
]
