"""Known-wrong answers to notebook 04 and the message each must get."""

import math

import torch


def _pool(order=lambda heads, new: heads.unflatten(0, (new, -1)), reduce=lambda x: x.mean(1)):
    def answer(w_MD, K, K_new):
        return reduce(order(w_MD.unflatten(0, (K, -1)), K_new)).flatten(0, 1)

    return answer


def _pool_rows(w_MD, K, K_new):
    group = K // K_new
    return torch.stack([w_MD[i : i + group].mean(0) for i in range(0, len(w_MD), group)])


def _intensity(kv=lambda N, K: 2 * K, ends=lambda N, K: 2 * N, flops=lambda N, K: N, width=None):
    def answer(S, N, K, H, w=2):
        num_bytes = (width or w) * (kv(N, K) * S * H + ends(N, K) * H)
        return 4 * S * flops(N, K) * H / num_bytes

    return answer


def _absorb(join=lambda c, r: torch.cat((c, r), -1), scale=lambda J, R, C: (J + R) ** -0.5):
    def answer(q_NJ, q_NR, w_NJC):
        q_NC = (q_NJ[:, None] @ w_NJC)[:, 0]
        return join(q_NC, q_NR), scale(q_NJ.shape[1], q_NR.shape[1], w_NJC.shape[2])

    return answer


def _scale_inside(q_NJ, q_NR, w_NJC):
    q_NX, scale = _absorb()(q_NJ, q_NR, w_NJC)
    return q_NX * scale, scale


def _ring(slots=lambda W, slack: W - 1 + slack, first=0):
    def answer(W, slack, chunks):
        R, length = slots(W, slack), sum(chunks)
        ring = [None] * R
        for p in range(max(0, length - R), length):
            ring[p % R] = p + first
        return ring

    return answer


def _ring_moved(W, slack, chunks):
    R, kept = W - 1 + slack, list(range(sum(chunks)))
    kept = kept[-R:] if R else []
    return kept + [None] * (R - len(kept))


def _ring_restarted(W, slack, chunks):
    R, length = W - 1 + slack, 0
    ring = [None] * R
    for T in chunks:
        for i in range(T):
            if R:
                ring[i % R] = length + i
        length += T
    return ring


def _ring_first(W, slack, chunks):
    R, length = W - 1 + slack, 0
    ring = [None] * R
    for T in chunks:
        for p in list(range(length, length + T))[:R]:
            ring[p % R] = p
        length += T
    return ring


def _modulo_zero(W, slack, chunks):
    R = W - 1 + slack
    ring = [None] * R
    for p in range(sum(chunks)):
        ring[p % R] = p
    return ring


def _deep(layers, window):
    return lambda S, W, L: (layers(S, W), window(S, L))


def _hybrid(windowed=lambda S, W: min(S, W - 1), runs=None, num_global=None, factor=4, heads="K",
            least=0):  # fmt: skip
    runs = runs or (lambda n, share, kind: math.ceil(n / share))
    num_global = num_global or (lambda L, every: L // every)

    def answer(config, W, every, share, S, memory_bytes, weights):
        g = num_global(config.L, every)
        tokens = runs(g, share, "global") * S
        tokens += runs(config.L - g, share, "window") * windowed(S, W)
        num_bytes = factor * getattr(config, heads) * config.H * tokens
        batch = int((memory_bytes - weights) // num_bytes)
        return num_bytes, batch if least is None else max(least, batch)

    return answer


ATTEMPTS = [
    (
        "4.1",
        "tiled groups",
        _pool(lambda heads, new: heads.unflatten(0, (-1, new)), lambda x: x.mean(0)),
        "heads that lie K_new apart",
    ),
    ("4.1", "sums", _pool(reduce=lambda x: x.sum(1)), "that is the sum"),
    ("4.1", "keeps the first", _pool(reduce=lambda x: x[:, 0]), "the first head of each group"),
    ("4.1", "averages rows", _pool_rows, "you averaged neighbouring rows"),
    (
        "4.1",
        "heads left apart",
        lambda w, K, new: w.reshape(new, K // new, len(w) // K, -1).mean(1),
        "shape",
    ),
    ("4.2", "as printed", _intensity(kv=lambda N, K: 2 * N, width=2), "for S="),
    ("4.2", "query heads, own width", _intensity(kv=lambda N, K: 2 * N), "only K heads are stored"),
    ("4.2", "K everywhere", _intensity(ends=lambda N, K: 2 * K), "have N heads, not K"),
    ("4.2", "16 bits for ever", _intensity(width=2), "right in 16 bits only"),
    ("4.2", "keys only", _intensity(kv=lambda N, K: K), "both are read"),
    ("4.2", "cache only", _intensity(ends=lambda N, K: 0), "query and output are read"),
    ("4.2", "fewer FLOPs", _intensity(flops=lambda N, K: K), "the FLOPs were cut"),
    ("4.3", "naive query", lambda a, b, w: (torch.cat((a, b), -1), 0.3), "the cache's rows are"),
    ("4.3", "one value", lambda a, b, w: _absorb()(a, b, w)[0], "expected tuple or list"),
    ("4.3", "rotated first", _absorb(join=lambda c, r: torch.cat((r, c), -1)), "comes first"),
    ("4.3", "no rotated part", _absorb(join=lambda c, r: c), "rotated part is missing"),
    ("4.3", "scale inside", _scale_inside, "already in q_NX"),
    ("4.3", "torch's own scale", _absorb(scale=lambda J, R, C: (C + R) ** -0.5), "C + R wide"),
    ("4.3", "scale of the first part", _absorb(scale=lambda J, R, C: J**-0.5), "rotated part too"),
    ("4.3", "scale of the latent", _absorb(scale=lambda J, R, C: C**-0.5), "the latent's width"),
    ("4.3", "no root", _absorb(scale=lambda J, R, C: 1 / (J + R)), "the root of the width"),
    ("4.3", "divisor", _absorb(scale=lambda J, R, C: (J + R) ** 0.5), "would be divided by"),
    ("4.4", "W slots", _ring(slots=lambda W, slack: W + slack), "one too many"),
    ("4.4", "no slack", _ring(slots=lambda W, slack: W - 1), "slack is missing"),
    ("4.4", "moved to the front", _ring_moved, "moved to the front"),
    ("4.4", "restarts each chunk", _ring_restarted, "from 0 again in every chunk"),
    ("4.4", "first of a chunk", _ring_first, "the last are in sight"),
    ("4.4", "counts from 1", _ring(first=1), "positions start at 1"),
    ("4.4", "modulo zero", _modulo_zero, "ZeroDivisionError"),
    (
        "4.5",
        "a layer adds W",
        _deep(lambda S, W: math.ceil(S / W), lambda S, L: math.ceil(S / L)),
        "does not add W tokens",
    ),
    (
        "4.5",
        "rounds down",
        _deep(lambda S, W: (S - 1) // (W - 1), lambda S, L: 1 + (S - 1) // L),
        "rounded down",
    ),
    (
        "4.5",
        "adds 1 always",
        _deep(lambda S, W: (S - 1) // (W - 1) + 1, lambda S, L: (S - 1) // L + 2),
        "S - 1 are left to cross",
    ),
    (
        "4.5",
        "window without itself",
        _deep(lambda S, W: math.ceil((S - 1) / (W - 1)), lambda S, L: math.ceil((S - 1) / L)),
        "includes the query itself",
    ),
    (
        "4.5",
        "crosses S",
        _deep(lambda S, W: math.ceil(S / (W - 1)), lambda S, L: 1 + math.ceil(S / L)),
        "S - 1 are left to cross",
    ),
    ("4.6", "keeps W", _hybrid(windowed=lambda S, W: min(S, W)), "keeps W - 1 tokens"),
    ("4.6", "always W - 1", _hybrid(windowed=lambda S, W: W - 1), "only S tokens to keep"),
    ("4.6", "nobody shares", _hybrid(runs=lambda n, share, kind: n), "nobody shares"),
    (
        "4.6",
        "windows share",
        _hybrid(runs=lambda n, share, kind: n if kind == "global" else math.ceil(n / share)),
        "the global ones do, too",
    ),
    ("4.6", "rounds down", _hybrid(runs=lambda n, share, kind: n // share), "round up"),
    (
        "4.6",
        "a global too many",
        _hybrid(num_global=lambda L, every: math.ceil(L / every)),
        "one global layer too many",
    ),
    ("4.6", "query heads", _hybrid(heads="N"), "K heads are kept"),
    ("4.6", "keys only", _hybrid(factor=2), "each number takes 2 bytes"),
    ("4.6", "negative batch", _hybrid(least=None), "it is 0"),
]
