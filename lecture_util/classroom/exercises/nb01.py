"""Checks of notebook 01: the inference workload."""

from lecture_util.classroom.exercise import exercise
from lecture_util.model.config import Config


def _served(log, ttft=None, latency=None, throughput=None):
    """Mean TTFT, mean latency and the server's throughput, or one of them misunderstood."""
    gaps = [(times[-1] - times[0]) / (len(times) - 1) for _, times in log]
    tokens = sum(len(times) for _, times in log)
    wall_s = max(times[-1] for _, times in log) - min(arrival for arrival, _ in log)
    n = len(log)
    return (
        ttft(log) if ttft else sum(times[0] - arrival for arrival, times in log) / n,
        latency(log) if latency else sum(gaps) / n,
        throughput(log) if throughput else tokens / wall_s,
    )


def _whole_wait(log):
    return sum((times[-1] - arrival) / len(times) for arrival, times in log) / len(log)


def _tokens_not_gaps(log):
    return sum((times[-1] - times[0]) / len(times) for _, times in log) / len(log)


def _from_start(log):
    start = min(arrival for arrival, _ in log)
    return sum(times[0] - start for _, times in log) / len(log)


def _sum_of_rates(log):
    return sum(len(times) / (times[-1] - arrival) for arrival, times in log)


@exercise(
    "1.1",
    title="Three metrics from a server's log",
    minutes=10,
    trains="telling what a user feels from what a server delivers",
    hints=(
        "TTFT belongs to one request: from its own arrival to its own first token.",
        "n tokens have n - 1 gaps between them, and the wait for the first is not one of them.",
        "Throughput has one clock for everybody: first arrival to last token.",
    ),
)
def _(answer, c):
    logs = []
    for requests in (2, 3):
        log, arrival = [], c.float(5.0, 9.0)
        for _ in range(requests):
            times = [arrival + c.float(0.3, 0.9)]
            for _ in range(c.int(4, 9)):
                times.append(times[-1] + c.float(0.02, 0.09))
            log.append((arrival, times))
            arrival += c.float(0.1, 0.4)
        logs.append((log,))
    c.like(
        answer,
        _served,
        logs,
        rtol=1e-9,
        wrong={
            "your latency contains the wait for the first token: count from the first token on": (
                lambda log: _served(log, latency=_whole_wait)
            ),
            "you divided by the number of tokens: n tokens have n - 1 gaps between them": (
                lambda log: _served(log, latency=_tokens_not_gaps)
            ),
            "your TTFT starts when the log does: a request waits from its own arrival": (
                lambda log: _served(log, ttft=_from_start)
            ),
            "you added up the requests' own rates: they overlap only in part, so use one clock": (
                lambda log: _served(log, throughput=_sum_of_rates)
            ),
        },
    )


@exercise(
    "1.2",
    title="How much cheaper is checking than generating?",
    minutes=12,
    trains="a bound from two times, each the larger of two",
    hints=(
        "A pass takes max(computing, reading). Reading the weights takes the same for any T.",
        "From which T on does computing take longer than reading? Call it T0.",
        "Up to T0 checking costs one read, and generating costs T. Beyond T0 it no longer grows.",
    ),
)
def _(answer, c):
    def tokens(peak, bandwidth, dtype_bytes):
        return peak / bandwidth * dtype_bytes / 2

    cases = []
    for dtype_bytes, T in ((2, 4), (4, 5000), (1, 6), (4, 8)):
        bandwidth = c.float(1e11, 4e12)
        cases.append((T, bandwidth * c.float(60, 300), bandwidth, dtype_bytes))
    c.like(
        answer,
        lambda T, peak, bandwidth, dtype_bytes: min(T, tokens(peak, bandwidth, dtype_bytes)),
        cases,
        rtol=1e-9,
        wrong={
            "it can't grow without end: a pass over many tokens waits for computing": (
                lambda T, peak, bandwidth, dtype_bytes: T
            ),
            "that is the ceiling: with fewer tokens than that, T reads become one and no more": (
                lambda T, peak, bandwidth, dtype_bytes: tokens(peak, bandwidth, dtype_bytes)
            ),
            "you compared T with the ridge: a weight costs 2 FLOPs and dtype_bytes bytes": (
                lambda T, peak, bandwidth, dtype_bytes: min(T, peak / bandwidth)
            ),
        },
    )


@exercise(
    "1.3",
    title="Give every query head its own KV head",
    minutes=10,
    trains="which query heads share a KV head",
    hints=(
        "The rows of the weight come in K heads of H rows. Make that axis visible first.",
        "Query heads 0 to G - 1 all read KV head 0, so its copies must stand next to each other.",
        "unflatten to (K, H, D), repeat_interleave along the heads, flatten again.",
    ),
)
def _(answer, c):
    import torch

    cases = []
    for K, G, H in ((3, 2, 4), (2, 4, 6)):
        cases.append((c.randn(K * H, c.int(5, 9)), K, G))
    c.like(
        answer,
        lambda w, K, G: w.unflatten(0, (K, -1)).repeat_interleave(G, dim=0).flatten(0, 1),
        cases,
        wrong={
            "you repeated the whole stack of heads, so head n reads n % K; it should read n // G": (
                lambda w, K, G: w.repeat(G, 1)
            ),
            "you repeated rows: a head is H rows that stay together, so copy heads and not rows": (
                lambda w, K, G: torch.repeat_interleave(w, G, dim=0)
            ),
            "you divided each copy by G: copies keep their size, they are not shared out": (
                lambda w, K, G: (
                    w.unflatten(0, (K, -1)).repeat_interleave(G, dim=0).flatten(0, 1) / G
                )
            ),
        },
    )


def _params(config, matrices=3, kv_heads=None, head=None):
    c = config
    K = c.N if kv_heads == "N" else c.K
    heads = 2 if head == "always" or not c.tied else 1
    block = 2 * c.D * c.N * c.H + 2 * c.D * K * c.H + matrices * c.D * c.F + 2 * c.D
    return c.L * block + heads * c.V * c.D + c.D


@exercise(
    "1.4",
    title="A parameter count with three mistakes",
    minutes=10,
    trains="reading a count off the block's matrices",
    hints=(
        "Walk along the figure of the block and tick off each matrix.",
        "How many matrices has a gated MLP? How wide are the keys? Where does a tied head live?",
        "Compare with params_by_part(config), part by part.",
    ),
)
def _(answer, c):
    cases = []
    for tied in (True, False, True):
        D, F, V = c.ints(3, low=20, high=400)
        shape = dict(D=D, F=F, V=V, K=c.int(2, 5), G=c.int(2, 5), H=2 * c.int(2, 9), L=c.int(2, 7))
        cases.append((Config(**shape, tied=tied),))
    c.like(
        answer,
        _params,
        cases,
        wrong={
            "the MLP still has two matrices: a gated MLP has a gate as well": (
                lambda config: _params(config, matrices=2)
            ),
            "keys and values still have N heads: with grouped queries they have fewer": (
                lambda config: _params(config, kv_heads="N")
            ),
            "a tied head is still counted: it is the embedding's own matrix": (
                lambda config: _params(config, head="always")
            ),
            "nothing changed: all three mistakes are still there": (
                lambda config: _params(config, matrices=2, kv_heads="N", head="always")
            ),
        },
    )


def _weights(config):
    c = config
    return c.L * (2 * c.D * c.N * c.H + 2 * c.D * c.K * c.H + 3 * c.D * c.F) + c.V * c.D


@exercise(
    "1.5",
    title="The context at which attention costs as much as the weights",
    minutes=12,
    trains="setting two costs equal",
    hints=(
        "One new token multiplies every weight of a matrix once, the LM head included.",
        "It also does 4*S*N*H FLOPs of attention in each layer.",
        "Set 2 * weights equal to 4 * S * N * H * L and solve for S.",
    ),
)
def _(answer, c):
    cases = []
    for _ in range(3):
        D, F, V = c.ints(3, low=64, high=900)
        shape = dict(D=D, F=F, V=V, K=c.int(2, 4), G=c.int(2, 5), H=2 * c.int(4, 16), L=c.int(2, 9))
        cases.append((Config(**shape),))
    c.like(
        answer,
        lambda config: _weights(config) / (2 * config.N * config.H * config.L),
        cases,
        rtol=1e-9,
        wrong={
            "6 FLOPs a weight is forward plus backward: inference has no backward pass": (
                lambda config: 3 * _weights(config) / (2 * config.N * config.H * config.L)
            ),
            "you counted K heads: sharing keys saves bytes, but all N query heads still compute": (
                lambda config: _weights(config) / (2 * config.K * config.H * config.L)
            ),
            "you counted one layer's attention: every layer attends": (
                lambda config: _weights(config) / (2 * config.N * config.H)
            ),
        },
    )


@exercise(
    "1.6",
    title="When serving has cost as much as training",
    minutes=8,
    trains="2 FLOPs against 6, and what utilization does to both",
    hints=(
        "Training: 6 FLOPs a parameter and token. Serving: 2. The parameters cancel.",
        "Accelerator time is FLOPs over what is reached: peak times utilization. The peak cancels.",
        "Low utilization in serving makes a token dearer, so break-even comes sooner.",
    ),
)
def _(answer, c):
    cases = [
        (c.float(1e12, 2e13), c.float(1e10, 3e11), c.float(0.3, 0.6), c.float(0.01, 0.2))
        for _ in range(3)
    ]
    c.like(
        answer,
        lambda trained, daily, train_util, serve_util: (
            3 * trained / daily * serve_util / train_util
        ),
        cases,
        rtol=1e-9,
        wrong={
            "a served token costs 2 FLOPs a parameter, a trained one 6: they are not equal": (
                lambda trained, daily, train_util, serve_util: (
                    trained / daily * serve_util / train_util
                )
            ),
            "your utilizations are the wrong way round: badly used hardware costs more a token": (
                lambda trained, daily, train_util, serve_util: (
                    3 * trained / daily * train_util / serve_util
                )
            ),
            "that is break-even in FLOPs: in accelerator time utilization counts as well": (
                lambda trained, daily, train_util, serve_util: 3 * trained / daily
            ),
        },
    )
