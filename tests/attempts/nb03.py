"""Known-wrong answers to notebook 03 and the message each must get."""

import math

import torch

from lecture_util.roofline import kv_bytes_per_token, num_params, weight_bytes


def _chat(dropped, kept=lambda m, u, r: m * (u + r) - 1):
    return lambda turns, user, reply: (dropped(turns, user, reply), kept(turns, user, reply))


def _dropped(m, u, r):
    return (u + r) * m * (m + 1) // 2 - m


def _attend(store, visible, group=True, scale=True):
    """An answer to 3.2 put together from its parts."""

    def answer(q_BNH, k_BKH, v_BKH, k_BSKH, v_BSKH, lengths_B):
        N, H = q_BNH.shape[1:]
        S, K = k_BSKH.shape[1:3]
        store(k_BSKH, k_BKH, lengths_B)
        store(v_BSKH, v_BKH, lengths_B)
        heads = torch.arange(N) // (N // K) if group else torch.arange(N) % K
        scores_BNS = torch.einsum("bnh,bsnh->bns", q_BNH, k_BSKH[:, :, heads])
        scores_BNS = scores_BNS / math.sqrt(H) if scale else scores_BNS
        seen_BS = visible(torch.arange(S), lengths_B[:, None])
        weights_BNS = scores_BNS.masked_fill(~seen_BS[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bns,bsnh->bnh", weights_BNS, v_BSKH[:, :, heads]), k_BSKH, v_BSKH

    return answer


def _store(cache, new, lengths_B):
    cache[torch.arange(len(new)), lengths_B] = new


def _store_nothing(cache, new, lengths_B):
    pass


def _store_at_longest(cache, new, lengths_B):
    cache[:, lengths_B.max()] = new


def _store_over_the_last(cache, new, lengths_B):
    cache[torch.arange(len(new)), lengths_B - 1] = new


def _up_to_itself(slots_S, lengths_B1):
    return slots_S <= lengths_B1


def _before_itself(slots_S, lengths_B1):
    return slots_S < lengths_B1


def _everything(slots_S, lengths_B1):
    return (slots_S >= 0).expand(len(lengths_B1), -1)


def _out_only(*tensors):
    return _attend(_store, _up_to_itself)(*tensors)[0]


def _limits(first=lambda B: max(0, B), weights=True, second=1):
    def answer(config, S, memory_bytes, dtype_bytes=2):
        w = weight_bytes(config, dtype_bytes)
        each = S * kv_bytes_per_token(config, dtype_bytes)
        return first(int((memory_bytes - weights * w) // each)), w // each + second

    return answer


def _latency(unit=1e3, batched=False, one_width=False, sequences=True):
    def answer(config, B, S, accelerator, weight_width, cache_width):
        cache_width = weight_width if one_width else cache_width
        num_bytes = num_params(config) * weight_width
        num_bytes += (B if sequences else 1) * S * kv_bytes_per_token(config, cache_width)
        seconds = num_bytes / accelerator.bandwidth_bytes_per_s
        return unit * seconds * (B if batched else 1)

    return answer


def _plans(load=lambda B, M: B / M, shard=lambda B, M: B / M, fit=True, waits=lambda L: 2 * L):
    def answer(config, B, S, accelerator, M, sync_s):
        w, each = weight_bytes(config), S * kv_bytes_per_token(config)
        held = [w + load(B, M) * each, w / M + shard(B, M) * each]
        times = [b / accelerator.bandwidth_bytes_per_s for b in held]
        times[1] += waits(config.L) * sync_s
        full = [fit and b > accelerator.memory_bytes for b in held]
        return tuple(math.inf if f else t for f, t in zip(full, times, strict=True))

    return answer


ATTEMPTS = [
    (
        "3.1",
        "feeds the last token",
        _chat(lambda m, u, r: _dropped(m, u, r) + m, lambda m, u, r: m * (u + r)),
        "enters one turn later, or never",
    ),
    (
        "3.1",
        "no cache at all",
        _chat(
            lambda m, u, r: sum(
                (k - 1) * (u + r) + u + t for k in range(1, m + 1) for t in range(r)
            )
        ),
        "drops the cache after every token",
    ),
    (
        "3.1",
        "history without replies",
        _chat(lambda m, u, r: u * m * (m + 1) // 2 + m * (r - 1)),
        "holds the model's replies",
    ),
    (
        "3.1",
        "forgets the reply's last token",
        _chat(_dropped, lambda m, u, r: m * (u + r - 1)),
        "still missing from it",
    ),
    ("3.2", "stores nothing", _attend(_store_nothing, _up_to_itself), "were not stored"),
    ("3.2", "one slot for all", _attend(_store_at_longest, _up_to_itself), "its own length"),
    ("3.2", "overwrites the last", _attend(_store_over_the_last, _up_to_itself), "goes to slot n"),
    ("3.2", "sees leftovers", _attend(_store, _everything), "hold leftovers"),
    ("3.2", "blind to itself", _attend(_store, _before_itself), "does not see itself"),
    ("3.2", "interleaved heads", _attend(_store, _up_to_itself, group=False), "n // G"),
    ("3.2", "unscaled", _attend(_store, _up_to_itself, scale=False), "sqrt(H)"),
    ("3.2", "returns out only", _out_only, "expected tuple or list"),
    (
        "3.3",
        "query heads",
        lambda m, B, S, w: 2 * w * B * S * m.L * m.N * m.H,
        "that of the query heads",
    ),
    ("3.3", "model width", lambda m, B, S, w: 2 * w * B * S * m.L * m.D, "still the model's"),
    (
        "3.3",
        "16 bits for ever",
        lambda m, B, S, w: 4 * B * S * m.L * m.K * m.H,
        "right in 16 bits only",
    ),
    (
        "3.3",
        "divides by G",
        lambda m, B, S, w: 2 * w * B * S * m.L * m.D // m.G,
        "only where D = N*H",
    ),
    ("3.3", "keys only", lambda m, B, S, w: w * B * S * m.L * m.K * m.H, "factor of 2"),
    ("3.4", "negative batch", _limits(first=lambda B: B), "it is 0"),
    ("3.4", "forgot the weights", _limits(weights=False), "need room too"),
    ("3.4", "rounded down twice", _limits(second=0), "one too small"),
    (
        "3.4",
        "one token a sequence",
        lambda config, S, memory, width: _limits()(config, 1, memory, width),
        "each holds S of them",
    ),
    ("3.5", "seconds", _latency(unit=1), "in seconds"),
    ("3.5", "times B", _latency(batched=True), "serves the whole batch"),
    ("3.5", "one width for both", _latency(one_width=True), "given the weights' width"),
    ("3.5", "one sequence", _latency(sequences=False), "each of the B has its own"),
    (
        "3.5",
        "computing, not reading",
        lambda m, B, S, x, w, k: 2e3 * num_params(m) * B / x.peak("bf16"),
        "divide bytes by the bandwidth",
    ),
    ("3.6", "load not shared", _plans(load=lambda B, M: B), "B/M a copy"),
    ("3.6", "whole cache everywhere", _plans(shard=lambda B, M: B), "by KV heads"),
    ("3.6", "ignores memory", _plans(fit=False), "math.inf"),
    ("3.6", "waits once a step", _plans(waits=lambda L: 1), "twice in every layer"),
    ("3.6", "never waits", _plans(waits=lambda L: 0), "add 2*L*sync_s"),
]
