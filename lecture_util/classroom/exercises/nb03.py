"""Checks of notebook 03: the KV cache, latency and throughput."""

import math

import torch

from lecture_util.classroom.exercise import exercise
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import ACCELERATORS, kv_bytes_per_token, num_params, weight_bytes


@exercise(
    "3.1",
    title="A chat of many turns",
    minutes=10,
    trains="counting tokens through the model, off-by-ones included",
    hints=(
        "Write down, for turn 1 and turn 2, which tokens enter the model. A token enters when the "
        "one after it is to be predicted, so the last token of a reply has not entered yet.",
        "Cache dropped: turn k encodes (k-1)*(user+reply) tokens of history and user new ones, and "
        "then decodes reply-1 times.",
        "Cache kept: every token of the chat enters once, except the very last.",
    ),
)
def _(answer, c):
    cases = [c.ints(3, low=2, high=40) for _ in range(3)] + [[1, c.int(2, 9), c.int(2, 9)]]
    c.like(
        answer,
        lambda m, u, r: (sum(k * (u + r) - 1 for k in range(1, m + 1)), m * (u + r) - 1),
        cases,
        wrong={
            "you fed the last token of a reply to the model within its own turn: nothing after it "
            "is predicted there, so it enters one turn later, or never": lambda m, u, r: (
                sum(k * (u + r) for k in range(1, m + 1)),
                m * (u + r),
            ),
            "that drops the cache after every token: within a turn the reply is decoded with "
            "a cache, one token a step": lambda m, u, r: (
                sum((k - 1) * (u + r) + u + t for k in range(1, m + 1) for t in range(r)),
                m * (u + r) - 1,
            ),
            "the history of a turn holds the model's replies as well as the user's "
            "words": lambda m, u, r: (
                sum(k * u + r - 1 for k in range(1, m + 1)),
                m * (u + r) - 1,
            ),
            "with the cache kept, the last token of the reply before is still missing from it: "
            "the next turn feeds it together with the user's words": lambda m, u, r: (
                sum(k * (u + r) - 1 for k in range(1, m + 1)),
                m * (u + r - 1),
            ),
        },
    )


def _step(q_BNH, k_BKH, v_BKH, k_BSKH, v_BSKH, lengths_B, *, sees=None, grouped=True, scale=True):
    """The definition, one row and one head at a time; `sees` maps a length to the slots seen."""
    k_BSKH, v_BSKH = k_BSKH.clone(), v_BSKH.clone()
    N, H = q_BNH.shape[1:]
    S, K = k_BSKH.shape[1:3]
    out_BNH = torch.zeros_like(q_BNH)
    for b, length in enumerate(lengths_B.tolist()):
        k_BSKH[b, length], v_BSKH[b, length] = k_BKH[b], v_BKH[b]
        slots = slice(0, length + 1) if sees is None else sees(length, S)
        for n in range(N):
            k = n // (N // K) if grouped else n % K
            scores = k_BSKH[b, slots, k] @ q_BNH[b, n] / (math.sqrt(H) if scale else 1)
            out_BNH[b, n] = scores.softmax(-1) @ v_BSKH[b, slots, k]
    return out_BNH, k_BSKH, v_BSKH


@exercise(
    "3.2",
    title="Append, then attend",
    minutes=15,
    trains="the cache as two tensors and a length",
    hints=(
        "Position equals slot: row b's new token stands at slot lengths_B[b]. Indexing with two "
        "tensors, k_BSKH[rows_B, lengths_B], reaches one slot in every row.",
        "Group the query heads by reshape: q_BNH.unflatten(1, (K, G)); then "
        'einsum("bkgh,bskh->bkgs") gives the scores, still to be divided by sqrt(H).',
        "Slot s of row b is visible if s <= lengths_B[b]: what lies beyond is left over from "
        "somebody else. Mask it with -inf before the softmax.",
    ),
)
def _(answer, c):
    B, S, K, G, H = 3, 9, 2, 3, 4
    q_BNH, k_BKH, v_BKH = c.randn(B, K * G, H), c.randn(B, K, H), c.randn(B, K, H)
    k_BSKH, v_BSKH = c.randn(B, S, K, H), c.randn(B, S, K, H)
    lengths_B = torch.tensor(c.ints(B, low=1, high=S - 2))
    given = (q_BNH, k_BKH, v_BKH, k_BSKH, v_BSKH, lengths_B)
    got = c.call(answer, *given)
    c.expect_type(got, (tuple, list), "what it returns")
    c.expect(len(got) == 3, f"it returns {len(got)} values, expected out_BNH, k_BSKH, v_BSKH")
    want = _step(*given)
    rows_B = torch.arange(B)
    for index, (new, old) in enumerate([(k_BKH, k_BSKH), (v_BKH, v_BSKH)], start=1):
        at_the_longest, shifted = old.clone(), old.clone()
        at_the_longest[:, int(lengths_B.max())] = new
        shifted[rows_B, lengths_B - 1] = new
        c.equal(
            got[index],
            want[index],
            given=f"the returned {'kv'[index - 1]}_BSKH",
            wrong={
                "the cache comes back as it was: the new key and value were not stored": old,
                "all rows were written at the longest row's slot: each row has its own "
                "length": at_the_longest,
                "you overwrote the last token: a row of length n holds slots 0 to n-1, so the "
                "new one goes to slot n": shifted,
            },
        )
    c.close(
        got[0],
        want[0],
        rtol=1e-4,
        atol=1e-5,
        given="out_BNH",
        wrong={
            "every slot was attended to: those past a row's length hold leftovers and must be "
            "masked": lambda: _step(*given, sees=lambda length, S: slice(0, S))[0],
            "the new token does not see itself: it attends to slots 0 to its own, its own "
            "included": lambda: _step(*given, sees=lambda length, S: slice(0, length))[0],
            "query head n read KV head n % K: neighbours share a KV head, n // G": lambda: _step(
                *given, grouped=False
            )[0],
            "the scores are not divided by sqrt(H)": lambda: _step(*given, scale=False)[0],
        },
    )


def _random_config(c) -> Config:
    """A shape whose D differs from N*H, as in several published families."""
    K, G = c.int(2, 8), c.int(2, 8)
    H = 2 * c.int(16, 64)
    return Config(D=G * (K * H + 64), F=4096, K=K, G=G, H=H, L=c.int(12, 80), V=32000)


@exercise(
    "3.3",
    title="Repair the cache formula",
    minutes=8,
    trains="reading a formula's hidden assumptions",
    hints=(
        "Say aloud what each factor stands for. Two of them are only right for some models.",
        "What is stored for a token and layer is K heads of width H, once as keys and once as "
        "values. The model's width D does not occur.",
        "One of the two 2s counts keys and values; the other is the bytes of a 16-bit number.",
    ),
)
def _(answer, c):
    cases = [(_random_config(c), c.int(2, 64), c.int(100, 4096), width) for width in (2, 1, 4)] + [
        (PUBLISHED["llama-3-8b"], c.int(2, 64), c.int(100, 4096), 1)
    ]
    c.like(
        answer,
        lambda config, B, S, width: B * S * kv_bytes_per_token(config, width),
        cases,
        rtol=1e-12,
        wrong={
            "the width is still that of the query heads, N*H: only the K KV heads are "
            "stored": lambda m, B, S, w: 2 * w * B * S * m.L * m.N * m.H,
            "the width is still the model's, D: only K heads are stored": lambda m, B, S, w: (
                2 * w * B * S * m.L * m.D
            ),
            "right in 16 bits only: one of the 2s is a number's bytes": lambda m, B, S, w: (
                2 * 2 * B * S * m.L * m.K * m.H
            ),
            "D/G equals K*H only where D = N*H, which not every model keeps": lambda m, B, S, w: (
                2 * w * B * S * m.L * m.D / m.G
            ),
            "keys and values are both stored: a factor of 2 went missing": lambda m, B, S, w: (
                w * B * S * m.L * m.K * m.H
            ),
        },
    )


def _limits(config, S, memory, width):
    weights, each = weight_bytes(config, width), S * kv_bytes_per_token(config, width)
    return max(0, int((memory - weights) // each)), int(weights // each) + 1


def _limits_unclipped(config, S, memory, width):
    weights, each = weight_bytes(config, width), S * kv_bytes_per_token(config, width)
    return int((memory - weights) // each), int(weights // each) + 1


def _limits_without_weights(config, S, memory, width):
    each = S * kv_bytes_per_token(config, width)
    return int(memory // each), _limits(config, S, memory, width)[1]


def _limits_per_token(config, S, memory, width):
    return _limits(config, 1, memory, width)


@exercise(
    "3.4",
    title="Two batch sizes that matter",
    minutes=8,
    trains="solving the memory equation for B",
    hints=(
        "One sequence's cache takes S * kv_bytes_per_token(config, dtype_bytes) bytes. Call it c, "
        "and the weights' bytes w.",
        "The batch fits while w + B*c <= memory_bytes; solve for B and round down. If w alone is "
        "too large, no batch fits: 0.",
        "The caches outweigh the weights once B*c > w: one more than w // c.",
    ),
)
def _(answer, c):
    S = [c.int(256, 4096) for _ in range(3)]
    cases = [
        (PUBLISHED["llama-2-13b"], S[0], 80e9, 2),
        (PUBLISHED["llama-3-8b"], S[1], 24e9, 1),
        (PUBLISHED["smollm2-1.7b"], S[2], 16e9, 2),
        (PUBLISHED["llama-3-70b"], S[0], 80e9, 2),
    ]
    c.like(
        answer,
        _limits,
        cases,
        wrong={
            "a negative batch: where the weights alone don't fit, it is 0": _limits_unclipped,
            "the weights need room too: take them off the memory first": _limits_without_weights,
            "that is for one token a sequence: each holds S of them": _limits_per_token,
            "your second batch size is one too small: at w // c the caches are still no heavier "
            "than the weights": lambda *case: (_limits(*case)[0], _limits(*case)[1] - 1),
        },
    )


def _mixed(config, B, S, accelerator, weight_width, cache_width, sequences=None):
    count = B if sequences is None else sequences
    num_bytes = num_params(config) * weight_width
    num_bytes += count * S * kv_bytes_per_token(config, cache_width)
    return 1e3 * num_bytes / accelerator.bandwidth_bytes_per_s


def _computing(config, B, S, accelerator, weight_width, cache_width):
    return 1e3 * 2 * num_params(config) * B / accelerator.peak("bf16")


@exercise(
    "3.5",
    title="Another machine, another dtype",
    minutes=10,
    trains="predicting a latency from shapes and a data sheet",
    hints=(
        "Two reads make a step: all weights, and the caches of B sequences. Each has a width of "
        "its own.",
        "A step serves the whole batch, so its latency is not multiplied by B: only the cache "
        "term is.",
        "(num_params(config)*weight_width + B*S*kv_bytes_per_token(config, cache_width)) / "
        "accelerator.bandwidth_bytes_per_s, and then in milliseconds.",
    ),
)
def _(answer, c):
    shapes = [("llama-2-13b", 0.5, 2), ("llama-3-8b", 1, 2), ("mistral-7b", 2, 1)]
    machines = [ACCELERATORS[name] for name in ("l4", "a100", "h200")]
    cases = [
        (PUBLISHED[name], c.int(2, 128), c.int(256, 8192), machine, w, kv)
        for (name, w, kv), machine in zip(shapes, machines, strict=True)
    ]
    c.like(
        answer,
        _mixed,
        cases,
        rtol=1e-6,
        wrong={
            "that is in seconds: the answer is in milliseconds": lambda *a: _mixed(*a) / 1e3,
            "you multiplied the latency by B: one read of the weights serves the whole "
            "batch": lambda *a: _mixed(*a) * a[1],
            "the cache was given the weights' width: quantizing the weights leaves it as it "
            "is": lambda *a: _mixed(*a[:5], a[4]),
            "the weights were given the cache's width": lambda *a: _mixed(*a[:4], a[5], a[5]),
            "one sequence's cache was counted: each of the B has its own": lambda *a: _mixed(
                *a, sequences=1
            ),
            "that is time to compute, not to read: divide bytes by the bandwidth": _computing,
        },
    )


def _plans(config, B, S, accelerator, M, sync_s, *, fit=True, share=True, shard_cache=True):
    weights, each = weight_bytes(config), S * kv_bytes_per_token(config)
    bandwidth, room = accelerator.bandwidth_bytes_per_s, accelerator.memory_bytes
    copy = weights + each * (B // M if share else B)
    shard = weights / M + each * (B / M if shard_cache else B)
    copies_s = copy / bandwidth
    sharded_s = shard / bandwidth + (2 * config.L * sync_s if M > 1 else 0)
    if fit:
        copies_s = math.inf if copy > room else copies_s
        sharded_s = math.inf if shard > room else sharded_s
    return copies_s, sharded_s


def _plans_one_sync(config, B, S, accelerator, M, sync_s):
    copies_s, sharded_s = _plans(config, B, S, accelerator, M, sync_s)
    return copies_s, sharded_s - (2 * config.L - 1) * sync_s


@exercise(
    "3.6",
    title="Copies or shards?",
    minutes=15,
    trains="comparing two plans at equal load",
    hints=(
        "Look at one device. Under copies it holds all the weights and B/M caches; under sharding "
        "1/M of the weights and 1/M of all B caches.",
        "The cache term is the same in both. What differs: W against W/M, and the waiting.",
        "Bytes on a device over its bandwidth is the latency; more bytes than memory_bytes means "
        "math.inf. Sharding adds 2 * config.L * sync_s.",
    ),
)
def _(answer, c):
    h100, M = ACCELERATORS["h100"], c.choice([2, 4, 8])
    sync_s, S = c.float(5e-6, 3e-5), c.int(512, 2048)
    cases = [
        (PUBLISHED["llama-2-13b"], 4 * M, S, h100, M, sync_s),
        (PUBLISHED["llama-3-8b"], 16 * M, S, h100, M, sync_s),
        (PUBLISHED["llama-2-70b"], 8, S, h100, 8, sync_s),
        (PUBLISHED["llama-2-70b"], 32, S, h100, 2, sync_s),
        (PUBLISHED["llama-2-7b"], 3_000 * 4, S, h100, 4, sync_s),
    ]
    c.like(
        answer,
        _plans,
        cases,
        rtol=1e-6,
        wrong={
            "each copy was given all B sequences: the load is shared, B/M a copy": lambda *a: (
                _plans(*a, share=False)[0],
                _plans(*a)[1],
            ),
            "every shard was given the whole cache: it is sharded with the weights, by KV "
            "heads": lambda *a: (_plans(*a)[0], _plans(*a, shard_cache=False)[1]),
            "these don't all fit: where a device would hold more than its memory, the latency is "
            "math.inf": lambda *a: _plans(*a, fit=False),
            "sharded devices wait twice in every layer, not once a step": _plans_one_sync,
            "sharding without its waiting: add 2*L*sync_s": lambda *a: (
                _plans(*a)[0],
                _plans(*a[:5], 0.0)[1],
            ),
        },
    )
