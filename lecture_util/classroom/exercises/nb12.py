"""Checks of notebook 12: putting it together."""

import copy
import itertools

from lecture_util.classroom.checker import Wrong
from lecture_util.classroom.compare import kind
from lecture_util.classroom.exercise import exercise
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.parallel.traffic import forward_traffic
from lecture_util.roofline.accounting import params_by_part

RTOL = 1e-9


def _untouched(c, answer, args) -> None:
    """One check: called with these very objects, not copies, the answer leaves them alone."""
    before = copy.deepcopy(args)
    c.call(lambda: answer(*args))
    c.expect(args == before, "your function changed what it was given: build new values instead")


def _mixed(*parts, most=2):
    """Messages of all combinations of up to `most` mistakes, the right choice of each part as "".

    parts: dicts from a message to a setting; yields (message, the settings), few mistakes first.
    """
    chosen = sorted(
        itertools.product(*(part.items() for part in parts)),
        key=lambda combination: sum(bool(said) for said, _ in combination),
    )
    for combination in chosen:
        said = [message for message, _ in combination if message]
        if 1 <= len(said) <= most:
            yield "; and ".join(said), [setting for _, setting in combination]


def _pages(n, page):
    return -(-n // page)


def _memory(config, lengths, shared, page, linear_bytes, rest_bytes, cache_bytes, *, lent=None,
            token=None, weights=None):  # fmt: skip
    """Each keyword replaces one part."""
    once = shared // page
    pages = once + sum(_pages(n, page) - once for n in lengths)
    pages = lent(lengths, shared, page) if lent else pages
    widths = linear_bytes, rest_bytes, cache_bytes
    per_token = 2 * config.L * config.K * config.H * cache_bytes
    per_token = token(config, page, *widths) if token else per_token
    parts = params_by_part(config)
    linear = parts["attention"] + parts["mlp"]
    rest = sum(parts.values()) - linear
    if weights:
        held = weights(config, parts, linear, rest, linear_bytes, rest_bytes)
    else:
        held = linear_bytes * linear + rest_bytes * rest
    return held + pages * page * per_token


LENT = {
    "": None,
    "the page in which the common beginning ends is not shared: other tokens follow in it": (
        lambda n, s, P: _pages(s, P) + sum(_pages(x, P) - _pages(s, P) for x in n)
    ),
    "the common beginning's last page is counted once and the texts go on in pages of their own: "
    "what is not full can't be shared": lambda n, s, P: (
        _pages(s, P) + sum(_pages(x - s, P) for x in n)
    ),
    "the common beginning is held once, not by every text": lambda n, s, P: sum(
        _pages(x, P) for x in n
    ),
    "single tokens are counted: pages are lent whole": lambda n, s, P: (
        (s + sum(x - s for x in n)) / P
    ),
    "single tokens are counted, and nothing is shared": lambda n, s, P: sum(n) / P,
    "a text's own pages begin where the last full shared page ends, not where its own tokens do": (
        lambda n, s, P: s // P + sum(_pages(x - s, P) for x in n)
    ),
    "the texts' tokens were added up before rounding: no two texts write to one page": (
        lambda n, s, P: _pages(s + sum(x - s for x in n), P)
    ),
    "the shared pages are not counted at all: they are held once": lambda n, s, P: sum(
        _pages(x, P) - s // P for x in n
    ),
    "n // page + 1 pages is one too many where the last page is full: round up": lambda n, s, P: (
        s // P + sum(x // P + 1 - s // P for x in n)
    ),
    "the last page of a text is lent whole, even if it is not full: round up": lambda n, s, P: (
        s // P + sum(x // P - s // P for x in n)
    ),
    "every text got as many pages as the longest: pages are lent as texts grow": lambda n, s, P: (
        s // P + len(n) * (_pages(max(n), P) - s // P)
    ),
}
TOKEN = {
    "": None,
    "a token leaves a key *and* a value in each layer": lambda c, P, lin, rest, cache: (
        c.L * c.K * c.H * cache
    ),
    "the cache has the KV heads' width, K*H: query heads share them": lambda c, P, lin, rest, kv: (
        2 * c.L * c.N * c.H * kv
    ),
    "the cache was taken to be as wide as the stream, D": lambda c, P, lin, rest, cache: (
        2 * c.L * c.D * cache
    ),
    "each layer keeps keys and values of its own": lambda c, P, lin, rest, cache: (
        2 * c.K * c.H * cache
    ),
    "the cache was given the linear layers' width: its numbers have `cache_bytes`": (
        lambda c, P, lin, rest, cache: 2 * c.L * c.K * c.H * lin
    ),
    "the cache was given the width of embedding and head: its numbers have `cache_bytes`": (
        lambda c, P, lin, rest, cache: 2 * c.L * c.K * c.H * rest
    ),
    "a page was counted as one token: it has `page` of them": lambda c, P, lin, rest, cache: (
        2 * c.L * c.K * c.H * cache / P
    ),
}
WEIGHTS = {
    "": None,
    "embedding, norms and head keep `rest_bytes`": lambda c, parts, linear, rest, lin, wide: (
        lin * (linear + rest)
    ),
    "the linear layers have `linear_bytes`, not `rest_bytes`": (
        lambda c, parts, linear, rest, lin, wide: wide * (linear + rest)
    ),
    "only the blocks' linear layers were counted: embedding, norms and head are held too": (
        lambda c, parts, linear, rest, lin, wide: lin * linear
    ),
    "the norms are missing": lambda c, parts, linear, rest, lin, wide: (
        lin * linear + wide * (rest - parts["norms"])
    ),
    "where they are tied, embedding and head are one table, held once": (
        lambda c, parts, linear, rest, lin, wide: lin * linear + wide * (rest + c.tied * c.V * c.D)
    ),
    "attention's projections are linear layers too": lambda c, parts, linear, rest, lin, wide: (
        lin * parts["mlp"] + wide * (rest + parts["attention"])
    ),
    "the MLP's layers are linear layers too": lambda c, parts, linear, rest, lin, wide: (
        lin * parts["attention"] + wide * (rest + parts["mlp"])
    ),
    "that is the cache alone: the weights are held too": (
        lambda c, parts, linear, rest, lin, wide: 0
    ),
}


@exercise(
    "12.1",
    title="The bytes of a configuration",
    minutes=10,
    trains="deriving what a configuration holds, from shapes alone",
    hints=(
        "Three sums: numbers in linear layers, all other numbers, places in pages. Each has a "
        "width of its own.",
        "How many pages are full of shared tokens? These are lent once. How many pages has a text "
        "in all, and how many of them are its own?",
        "A place holds a key and a value in each layer: 2 * L * K * H numbers.",
    ),
)
def _(answer, c):
    page = c.int(5, 9)
    small = Config(D=c.int(40, 60), F=c.int(70, 99), K=2, G=3, H=16, L=c.int(3, 5), V=c.int(90, 99))
    tied = Config(D=48, F=c.int(60, 99), K=3, G=2, H=10, L=2, V=c.int(200, 300), tied=True)
    texts = [c.int(2 * page, 3 * page - 1) + n for n in c.ints(4, low=1, high=5 * page)]
    cases = [
        (small, [10, 13], 6, 4, 1, 4, 2),
        (tied, texts, page + c.int(1, page - 1), page, 0.5625, 4, 2),
        (small, [24, 17, 30, 18], 16, 8, 1, 2, 4),  # the common beginning fills its pages
        (tied, [c.int(20, 40), 16, c.int(41, 50)], 0, 16, 2, 4, 1),  # nothing is shared
        (PUBLISHED["smollm2-135m"], [300 + c.int(1, 40), 333, 352], 293, 16, 0.5625, 2, 4),
        (PUBLISHED["llama-3-8b"], [c.int(900, 999)], 100, 16, 1, 4, 2),  # a text alone
        (small, c.ints(3, low=12, high=30), 11, 1, 1, 4, 2),
    ]
    wrong = {
        message: lambda *args, s=settings: _memory(*args, lent=s[0], token=s[1], weights=s[2])
        for message, settings in _mixed(LENT, TOKEN, WEIGHTS)
    }
    wrong["those are the weights alone: the cache comes on top"] = lambda config, *rest: _memory(
        config, [], 0, *rest[2:]
    )
    c.like(answer, _memory, cases, rtol=RTOL, wrong=wrong)
    _untouched(c, answer, cases[1])


def _times(num_weights, width, B, cache_bytes, flops, flops_per_s, bytes_per_s, *, per_text=True,
           computes=True, product=False, combine=max, cached=None, base=None, peak=None, B_of=None,
           read=1):  # fmt: skip
    """Each keyword makes a mistake."""

    def step_s(width, B):
        cache = (B if per_text else 1) * (cached(cache_bytes, width) if cached else cache_bytes)
        memory_s = ((B if read == "each" else 1) * num_weights * width + cache) / bytes_per_s
        faster = peak(width) if peak else 1
        return combine(computes * B * flops / (faster * flops_per_s), memory_s)

    tokens = B if B_of is None else B_of
    if product:
        return step_s(2, 1) / step_s(width, 1) * tokens * step_s(2, 1) / step_s(2, B)
    return tokens * step_s(2, B if base else 1) / step_s(width, B)


COLLEAGUE = {
    "per_text": (False, "each of the B texts reads a cache of its own"),
    "computes": (False, "a step takes the longer of computing and reading, and yours only reads"),
    "product": (True, "both factors shorten the same reading: their product counts it twice, so "
                      "compare the two steps themselves"),
}  # fmt: skip


@exercise(
    "12.2",
    title="Speed-ups do not multiply",
    minutes=8,
    trains="finding what a product of factors leaves out",
    hints=(
        "Take the two steps that are compared: one text and 2 bytes; B texts and `width` bytes. "
        "What does each read, and what does it compute?",
        "step_s does not depend on B in the colleague's function: that is wrong twice. And where "
        "it does depend on B, are two factors that were each measured alone still right together?",
        "Seconds of a step are max(computing, reading). Tokens a second are B over them. Divide "
        "one by the other: only two steps are needed, not four.",
    ),
)
def _(answer, c):
    n = c.int(120, 150) * 10**6
    cases = [
        (10**8, 0.5, 2, 10**7, 2e8, 4e12, 1e11),  # all wait for memory
        (n, 0.5625, c.int(3, 6), 2e7 * c.float(1, 2), 2.0 * n, 4e12, 60e9),
        (n, 0.5625, c.int(24, 40), 1e6 * c.float(1, 2), 2.0 * n, 4e12, 60e9),  # narrow: computing
        (n, 1, 150 + c.int(1, 50), 5e5 * c.float(1, 2), 2.0 * n, 2e12, 60e9),  # both, when batched
        (n, 0.5625, 1, 3e7 * c.float(1, 2), 2.0 * n, 4e12, 30e9),
        (n, 0.5625, 1, 1e6, 2.0 * n, 0.02e12 * c.float(1, 1.2), 60e9),  # computing, even alone
        (c.int(6, 8) * 10**9, 1, c.int(8, 16), 5e8 * c.float(1, 2), 1.5e10, 9.9e14, 3.35e12),
    ]
    wrong = {}
    pairs = list(itertools.combinations(COLLEAGUE, 2))
    for chosen in [*((name,) for name in COLLEAGUE), *pairs]:
        more = "2 mistakes are still there: " if chosen in pairs else ""
        says = "; and ".join(COLLEAGUE[name][1] for name in chosen)
        if chosen == ("per_text", "computes"):  # no step depends on B: then a product is right
            says += ". With these mended, look whether factors may be multiplied"
        options = {name: COLLEAGUE[name][0] for name in chosen}
        wrong[more + says] = lambda *args, options=options: _times(*args, **options)
    for message, options in {
        "that is how many times as fast one step is: a step of B texts makes B tokens":
            {"B_of": 1},
        "the comparison is with one text and 2 bytes, not with B texts and 2 bytes":
            {"base": True, "B_of": 1},
        "the comparison is with one text and 2 bytes: B texts on both sides leave only the "
        "weights' factor, times B": {"base": True},
        "the cache shrank with the weights: it keeps its 16 bits":
            {"cached": lambda cache, width: cache * width / 2},
        "computing sped up with the weights: they are multiplied in 16 bits, however they are "
        "held": {"peak": lambda width: 2 / width},
        "computing and reading go on at the same time: the longer counts, not the sum":
            {"combine": lambda a, b: a + b},
        "the shorter of computing and reading was taken: a step ends when both are done":
            {"combine": min},
        "the weights are read once for all B texts, not for each": {"read": "each"},
        "only computing was counted: most steps wait for memory":
            {"combine": lambda compute_s, memory_s: compute_s},
    }.items():  # fmt: skip
        wrong[message] = lambda *args, options=options: _times(*args, **options)
    wrong["that is upside down: tokens a second with both, over those with neither"] = (
        lambda *args: 1 / _times(*args)
    )
    wrong["only the bytes of a weight were compared: a step reads caches too, and computes"] = (
        lambda n, width, B, *rest: B * 2 / width
    )
    c.like(answer, _times, cases, rtol=RTOL, wrong=wrong)


def _gains(alpha, gamma, weight_bytes, cache_bytes, flops, flops_per_s, bytes_per_s, most, *,
           gained=None, computed=None, read=None, combine=max, last=None, relative=None,
           first=1):  # fmt: skip
    """Each keyword replaces one part."""

    def forward_s(B, tokens):
        compute_s = (computed or (lambda B, n: B * n))(B, tokens) * flops / flops_per_s
        bytes_read = read(B, tokens, weight_bytes, cache_bytes) if read else None
        bytes_read = weight_bytes + B * cache_bytes if bytes_read is None else bytes_read
        return combine(compute_s, bytes_read / bytes_per_s)

    tokens = gained(alpha, gamma) if gained else sum(alpha**k for k in range(gamma + 1))
    relative = relative or (lambda B, tokens, plain, round_: tokens * plain / round_)
    gains = [
        relative(B, tokens, forward_s(B, 1), forward_s(B, gamma + 1))
        for B in range(first, most + first)
    ]
    pays = [B for B, gain in enumerate(gains, 1) if gain > 1]
    best = max(pays, default=0)
    return gains, last(gains, best, most) if last else best


def _over_one(alpha, gamma, weight_bytes, cache_bytes, flops, flops_per_s, bytes_per_s, most):
    alone_s = max(flops / flops_per_s, (weight_bytes + cache_bytes) / bytes_per_s)
    return _gains(
        alpha, gamma, weight_bytes, cache_bytes, flops, flops_per_s, bytes_per_s, most,
        relative=lambda B, tokens, plain, round_: B * tokens * alone_s / round_,
    )  # fmt: skip


GAINED = {
    "": None,
    "the model's own token is forgotten: a round yields one more than the accepted guesses": (
        lambda a, g: sum(a**k for k in range(1, g + 1))
    ),
    "each guess was counted with alpha: it counts only if all before it were right, too": (
        lambda a, g: 1 + g * a
    ),
    "that is all or nothing: guesses before the first wrong one count": lambda a, g: 1 + g * a**g,
    "all gamma guesses were taken to be right": lambda a, g: g + 1,
    "a round was given gamma guesses' worth of tokens, the model's own among them: it comes on top "
    "of all gamma": lambda a, g: sum(a**k for k in range(g)),
}
COMPUTED = {
    "": None,
    "a round costs what a plain step costs in yours: it computes gamma + 1 tokens of each text, "
    "and with many texts that takes longer than reading": lambda B, n: B,
    "a round computes gamma + 1 tokens a text, not gamma: the newest token comes first": (
        lambda B, n: B * max(n - 1, 1)
    ),
    "one text's computing was counted: all B have theirs in the same forward": lambda B, n: n,
    "one text's computing was counted in a round: all B have theirs in the same forward": (
        lambda B, n: B if n == 1 else n
    ),
    "B texts of gamma + 1 tokens are B * (gamma + 1) tokens, not B + gamma": lambda B, n: B + n - 1,
}
READ = {
    "": None,
    "one text's cache is read in yours: each of the B has its own": lambda B, n, w, kv: w + kv,
    "the weights are read once for all B texts": lambda B, n, w, kv: B * (w + kv),
    "a text's guesses read its cache together: once a forward, not once a token": (
        lambda B, n, w, kv: w + B * n * kv
    ),
    "the caches are forgotten: they are read besides the weights": lambda B, n, w, kv: w,
    "weights and caches are read once a forward, however many tokens it has": (
        lambda B, n, w, kv: n * (w + B * kv)
    ),
}
LAST = {
    "": None,
    "the second number is the first B that doesn't gain: asked is the last that does": (
        lambda gains, best, most: best + 1
    ),
    "the second number is an index: gains[0] belongs to B = 1": lambda gains, best, most: best - 1,
    "the second number is where gains begin to fall: above 1 they are gains all the same": (
        lambda gains, best, most: sum(g > gains[0] * (1 - 1e-9) for g in gains)
    ),
    "the second number is 0 only if there is no gain at all, and `most` if all gain": (
        lambda gains, best, most: 0 if best == most else best
    ),
    "the second number is the largest gain: asked is a number of texts": lambda gains, best, most: (
        max(gains)
    ),
    "the second number is the gain at that B: asked is B": lambda gains, best, most: (
        gains[best - 1] if best else 0
    ),
}


@exercise(
    "12.3",
    title="When a batch has spent what speculation needs",
    minutes=12,
    trains="predicting where two techniques compete for one resource",
    hints=(
        "Write one function: seconds of a forward with B texts and n tokens of each. A plain step "
        "has n = 1, a round n = gamma + 1; they read the same bytes.",
        "A round makes 1 + alpha + ... + alpha**gamma tokens of each text, a plain step one. The "
        "gain is tokens over seconds, for the one and the other.",
        "The largest B that gains may be `most`, or none at all: max(..., default=0).",
    ),
)
def _(answer, c):
    cases = [
        (0.75, 3, 2.7e8, 1e6, 2.7e8, 4e12, 60e9, 60),
        (c.float(0.5, 0.6), c.int(4, 5), 2.7e8, 1e6 * c.float(1, 2), 2.7e8, 4e12, 60e9, 99),
        (c.float(0.85, 0.9), c.int(6, 7), 1e8, 1e6 * c.float(3, 4), 2e8, 2e12, 60e9, 70),
        (0.8, 2, 2.7e8, 1.5e7 * c.float(1, 1.5), 2.7e8, 4e12, 60e9, 40),  # caches: always gains
        (c.float(0.1, 0.2), 4, 1e8, 1e6, 2e9, 1e12, 60e9, 6),  # computing, even alone: never
        (c.float(0.6, 0.7), 4, 1.4e10, 2e8 * c.float(1, 1.5), 1.5e10, 9e14, 3.35e12, 200),
        (c.float(0.3, 0.4), 1, 2.7e8, 2e6, 2.7e8, 4e12, 60e9, 90),
        (0.6, 3, 1e8, 2e7, 2.4e9 * c.float(1, 1.1), 4e12, 60e9, 12),  # a round computes, even alone
    ]

    def mistaken(*settings, **more):
        names = ("gained", "computed", "read", "last")
        return lambda *args: _gains(*args, **dict(zip(names, settings, strict=False)), **more)

    wrong = {
        message: mistaken(*settings) for message, settings in _mixed(GAINED, COMPUTED, READ, LAST)
    }
    others = {
        "computing and reading go on at the same time: the longer counts, not the sum": {
            "combine": lambda a, b: a + b
        },
        "only computing was counted: small batches wait for memory": {"combine": lambda a, b: a},
        "those are tokens a second: divide by what plain steps make": {
            "relative": lambda B, tokens, plain, round_: B * tokens / round_
        },
        "that is upside down: a round's tokens a second over a plain step's": {
            "relative": lambda B, tokens, plain, round_: round_ / plain / tokens
        },
        "the seconds of a round were compared, not its tokens a second": {
            "relative": lambda B, tokens, plain, round_: plain / round_
        },
        "the gains begin with B = 0: the first is that of one text": {"first": 0},
    }
    for message, options in others.items():
        wrong[message] = lambda *args, options=options: _gains(*args, **options)
    wrong["compared was with plain steps of *one* text: a batch is there without guesses, too"] = (
        _over_one
    )
    wrong["the other way round: the gains first"] = lambda *args: _gains(*args)[::-1]
    c.like(answer, _gains, cases, rtol=RTOL, wrong=wrong)


def _traffic(config, B, T, M, width):
    traffic = forward_traffic(config, B, T, M, logits_for=1, dtype_bytes=width)
    return traffic.messages, traffic.sent_bytes(M)


def _said(config, B, T, M, width, *, reduces=None, gathers=1, logits=None, summed=None,
          ring=None):  # fmt: skip
    """Each keyword replaces one part."""
    reduces = (reduces or (lambda L: 2 * L + 1))(config.L)
    x_bytes = (summed or (lambda B, T, D, width: B * T * D * width))(B, T, config.D, width)
    out = (logits or (lambda B, T, V, M, width: B * V * width))(B, T, config.V, M, width)
    around, once = ring(M) if ring else (2 * (M - 1) / M, (M - 1) / M)
    return reduces + gathers, reduces * x_bytes * around + out * once


REDUCES = {
    "": None,
    "each layer has two all-reduces: attention and MLP are two sums, with a norm in between": (
        lambda L: L + 1
    ),
    "each layer has two all-reduces, and the sharded embedding needs one besides": lambda L: L,
    "the embedding is sharded too: what it gives has to be summed once": lambda L: 2 * L,
    "q, k and v need no sum, nor do gate and up: their inputs are whole, so only the way back to "
    "the stream is summed": lambda L: 4 * L + 1,
    "the final norm works on sums that are there already: nothing is said for it": (
        lambda L: 2 * L + 2
    ),
}
LOGITS = {
    "": None,
    "the logits' all-gather is counted, but its bytes are not": lambda B, T, V, M, width: 0,
    "the gather's n is what it *results* in: all V logits, not one shard's V/M": (
        lambda B, T, V, M, width: B * V / M * width
    ),
    "only each text's last token goes through the head": lambda B, T, V, M, width: (
        B * T * V * width
    ),
    "logits are summed in yours: a shard has whole logits, of its own words, so they are only "
    "put together": lambda B, T, V, M, width: 2 * B * V * width,
    "each of the B texts has logits": lambda B, T, V, M, width: V * width,
}
SUMMED = {
    "": None,
    "all T tokens pass through the layers: their sums have B*T*D numbers": (
        lambda B, T, D, width: B * D * width
    ),
    "all B texts pass through the layers: their sums have B*T*D numbers": (
        lambda B, T, D, width: T * D * width
    ),
}
RINGS = {
    "": None,
    "those are the tensors' bytes: around a ring a shard sends 2(M-1)/M of what is summed and "
    "(M-1)/M of what is gathered": lambda M: (1, 1),
    "an all-reduce goes around the ring twice, to sum and to spread: 2(M-1)/M": lambda M: (
        (M - 1) / M,
        (M - 1) / M,
    ),
    "the bytes are those of all shards together: asked is what one sends": lambda M: (
        2 * (M - 1),
        M - 1,
    ),
    "everything was sent to everybody: around a ring a shard passes on parts": lambda M: (
        M - 1,
        M - 1,
    ),
    "a ring of M takes M - 1 steps, not M": lambda M: (2, 1),
    "the all-gather was taken for an all-reduce, or its factor: (M-1)/M": lambda M: (
        2 * (M - 1) / M,
        2 * (M - 1) / M,
    ),
}


@exercise(
    "12.4",
    title="What shards have to say to one another",
    minutes=10,
    trains="deriving traffic from shapes",
    hints=(
        "Where does each shard hold a part of a sum? After the embedding, after attention, after "
        "the MLP. How often is that in L layers?",
        "What is summed is x_BTD. What is gathered are logits: of which tokens, and how many "
        "numbers once they are together?",
        "One message for each collective, whatever M is. The bytes: 2(M-1)/M of every sum, (M-1)/M "
        "of the logits, `width` bytes a number.",
    ),
)
def _(answer, c):
    cases = []
    for T, M in ((1, 2), (c.int(3, 9), 4), (1, c.choice([3, 5, 7])), (c.int(10, 20), 8)):
        D, F, L, B = c.int(20, 60), c.int(70, 99), c.int(3, 7), c.int(2, 9)
        config = Config(D=D, F=F, K=M, G=c.int(2, 3), H=8, L=L, V=M * c.int(50, 90))
        cases.append((config, B, T, M, c.choice([1, 4])))
    llama = PUBLISHED["llama-2-13b"]
    cases += [(llama, 1, 1, 8, 2), (llama, c.int(2, 16), c.int(100, 300), 4, 2)]
    wrong = {}
    for message, reduces in REDUCES.items():
        said = "the logits are not put together: that is one all-gather more, and its bytes"
        wrong["; and ".join(filter(None, (message, said)))] = lambda *args, r=reduces: _said(
            *args, reduces=r, gathers=0, logits=lambda *sizes: 0
        )
    gathers = {"": 1, "the logits' all-gather is a message too": 0}
    for message, (reduces, gather, logits, summed, ring) in _mixed(
        REDUCES, gathers, LOGITS, SUMMED, RINGS
    ):
        wrong[message] = lambda *args, r=reduces, g=gather, o=logits, s=summed, w=ring: _said(
            *args, reduces=r, gathers=g, logits=o, summed=s, ring=w
        )
    wrong |= {
        "`width` bytes a number: yours assumes 2": lambda *args: _traffic(*args[:4], 2),
        "those are numbers: times `width` they are bytes": lambda *args: _traffic(*args[:4], 1),
        "the messages were counted for every shard: all take part in the same ones": (
            lambda *args: (_traffic(*args)[0] * args[3], _traffic(*args)[1])
        ),
        "the steps of the rings were counted: a collective is one message here": (
            lambda config, B, T, M, width: (
                (2 * (2 * config.L + 1) + 1) * (M - 1), _traffic(config, B, T, M, width)[1],
            )
        ),
        "the other way round: the messages first": lambda *args: _traffic(*args)[::-1],
    }  # fmt: skip
    c.like(answer, _traffic, cases, rtol=RTOL, wrong=wrong)


MOST_SLOTS = 16


def _in_words(scenario, configuration, verdict) -> list[str]:
    """The budgets that were broken; with numbers where every machine has the same."""
    outcome, exact = verdict.outcome, configuration.draft is None
    held = outcome.weight_bytes, outcome.cache_bytes
    late = f", after about {1e3 * outcome.ttft_s:.0f} ms" if exact else ""
    slow = f", about {outcome.tokens_per_s:.0f} a second" if exact else ""
    words = {
        "memory": f"it holds about {sum(held) / 1e6:.0f} MB, {held[0] / 1e6:.0f} of weights and "
                  f"{held[1] / 1e6:.0f} of cache, and the budget is "
                  f"{scenario.memory_bytes / 1e6:.0f}",
        "first token": f"first tokens come too late{late}: the budget is "
                       f"{1e3 * (scenario.ttft_s or 0):.0f} ms",
        "speed": f"it is too slow{slow}: at least {scenario.tokens_per_s:.0f} tokens a second are "
                 "needed",
        "quality": "its texts are too poor: the perplexity may be "
                   f"{scenario.perplexity:.1f} at most",
    }  # fmt: skip
    return [words.get(said.split(":")[0], said) for said in verdict.broken]


@exercise(
    "12.5",
    title="Three customers",
    minutes=20,
    trains="choosing what goes together, for somebody",
    hints=(
        "Begin with the budget that leaves least choice: memory and quality decide on the weights, "
        "before anything is said about speed.",
        "chat: who waits for a first token, and what do eight caches have in common? batch: all "
        "eight are there at once, and nobody minds the first token. laptop: what is idle while one "
        "text decodes, and where does the next word already stand?",
        "chat: 8 bits, and everything of notebook 10. batch: the fewest bytes that the quality "
        "allows, and as many slots as texts. laptop: 8 bits, and notebook 08 without trained "
        "heads.",
    ),
)
def _(answer, c):
    from lecture_util.together.configuration import Configuration
    from lecture_util.together.scenarios import SCENARIOS, trial

    chosen = {name: c.call(answer, name) for name in SCENARIOS}
    for name, configuration in chosen.items():
        what = "None: is a `return` missing?" if configuration is None else kind(configuration)
        c.expect(
            isinstance(configuration, Configuration),
            f"for {name!r} it returned {what}; expected a Configuration, such as "
            "Configuration('int8', schedule='continuous', slots=4)",
        )
        c.expect(
            configuration.slots <= MOST_SLOTS,
            f"for {name!r} slots={configuration.slots}: only eight texts come, so {MOST_SLOTS} "
            "are enough",
        )
    c.expect(
        len(set(chosen.values())) > 1,
        "all three get the same: one minds the first token, one the bytes, and one is alone with "
        "an idle chip, so look at each one's budgets",
    )
    for name, configuration in chosen.items():
        verdict = trial()(name, configuration)
        if not verdict.holds:
            broken = "; ".join(_in_words(SCENARIOS[name], configuration, verdict))
            raise Wrong(f"{name} with {configuration}: {broken}")
        c.expect(verdict.holds, "")
