"""Known-wrong answers to notebook 01 and the message each must get."""

from lecture_util.model.config import Config


def _log(ttft, latency, throughput):
    """An answer to 1.1 put together from three functions of the log."""
    return lambda log: (ttft(log), latency(log), throughput(log))


def _ttft(log):
    return sum(times[0] - arrival for arrival, times in log) / len(log)


def _latency(log):
    return sum((t[-1] - t[0]) / (len(t) - 1) for _, t in log) / len(log)


def _throughput(log):
    last, first = max(t[-1] for _, t in log), min(arrival for arrival, _ in log)
    return sum(len(t) for _, t in log) / (last - first)


def _latency_with_wait(log):
    return sum((t[-1] - arrival) / len(t) for arrival, t in log) / len(log)


def _latency_per_token(log):
    return sum((t[-1] - t[0]) / len(t) for _, t in log) / len(log)


def _ttft_from_start(log):
    return sum(t[0] - log[0][0] for _, t in log) / len(log)


def _rates_added(log):
    return sum(len(t) / (t[-1] - arrival) for arrival, t in log)


def _count(c: Config, matrices: int, kv_heads: int, heads: int) -> int:
    block = 2 * c.D * c.N * c.H + 2 * c.D * kv_heads * c.H + matrices * c.D * c.F + 2 * c.D
    return c.L * block + heads * c.V * c.D + c.D


def _untied(c: Config) -> int:
    return 1 if c.tied else 2


def _weights(c: Config) -> int:
    return c.L * (2 * c.D * c.N * c.H + 2 * c.D * c.K * c.H + 3 * c.D * c.F) + c.V * c.D


ATTEMPTS = [
    (
        "1.1",
        "latency with the first wait",
        _log(_ttft, _latency_with_wait, _throughput),
        "contains the wait for the first token",
    ),
    (
        "1.1",
        "divided by tokens",
        _log(_ttft, _latency_per_token, _throughput),
        "n - 1 gaps",
    ),
    (
        "1.1",
        "TTFT from the log's start",
        _log(_ttft_from_start, _latency, _throughput),
        "its own arrival",
    ),
    ("1.1", "rates added up", _log(_ttft, _latency, _rates_added), "use one clock"),
    ("1.2", "always T", lambda T, peak, bandwidth, dtype_bytes: T, "without end"),
    (
        "1.2",
        "always the ceiling",
        lambda T, peak, bandwidth, dtype_bytes: peak / bandwidth * dtype_bytes / 2,
        "that is the ceiling",
    ),
    (
        "1.2",
        "the ridge itself",
        lambda T, peak, bandwidth, dtype_bytes: min(T, peak / bandwidth),
        "2 FLOPs and dtype_bytes bytes",
    ),
    ("1.3", "tiled", lambda w, K, G: w.repeat(G, 1), "head n reads n % K"),
    ("1.3", "rows repeated", lambda w, K, G: w.repeat_interleave(G, dim=0), "copy heads"),
    (
        "1.3",
        "shared out",
        lambda w, K, G: w.unflatten(0, (K, -1)).repeat_interleave(G, 0).flatten(0, 1) / G,
        "copies keep their size",
    ),
    ("1.3", "not widened", lambda w, K, G: w, "shape"),
    ("1.4", "no gate", lambda c: _count(c, 2, c.K, _untied(c)), "a gate as well"),
    ("1.4", "N key heads", lambda c: _count(c, 3, c.N, _untied(c)), "they have fewer"),
    ("1.4", "head twice", lambda c: _count(c, 3, c.K, 2), "the embedding's own matrix"),
    ("1.4", "nothing fixed", lambda c: _count(c, 2, c.N, 2), "all three mistakes"),
    ("1.5", "training's 6", lambda c: 3 * _weights(c) / (2 * c.N * c.H * c.L), "no backward pass"),
    ("1.5", "K heads", lambda c: _weights(c) / (2 * c.K * c.H * c.L), "saves bytes"),
    ("1.5", "one layer", lambda c: _weights(c) / (2 * c.N * c.H), "every layer attends"),
    ("1.6", "6 for both", lambda n, d, t, s: n / d * s / t, "they are not equal"),
    ("1.6", "upside down", lambda n, d, t, s: 3 * n / d * t / s, "wrong way round"),
    ("1.6", "FLOPs only", lambda n, d, t, s: 3 * n / d, "utilization counts"),
]
