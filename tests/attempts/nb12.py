"""Known-wrong answers to notebook 12 and the message each must get."""

import math

from lecture_util.together.configuration import Configuration


def _up(a, b):
    return math.ceil(a / b)


def _numbers(config):
    """(of the blocks' linear layers, of embedding and head, of the norms), added up by layers."""
    c, N = config, config.K * config.G
    layer = c.D * (N + 2 * c.K) * c.H + N * c.H * c.D + 3 * c.D * c.F
    tables = (1 if c.tied else 2) * c.V * c.D
    return c.L * layer, tables, c.D + 2 * c.L * c.D


def _held(pages=None, place=None, weights=None):
    def answer(config, lengths, shared, page, linear_bytes, rest_bytes, cache_bytes):
        linear, tables, norms = _numbers(config)
        held = linear * linear_bytes + (tables + norms) * rest_bytes
        if weights:
            held = weights(config, linear, tables, norms, linear_bytes, rest_bytes)
        lent = shared // page
        for n in lengths:
            lent += _up(n, page) - shared // page
        lent = pages(lengths, shared, page) if pages else lent
        width = 2 * config.K * config.H * config.L * cache_bytes
        width = place(config, linear_bytes, rest_bytes, cache_bytes) if place else width
        return held + lent * page * width

    return answer


def _forgets_lengths(config, lengths, *rest):
    right = _held()(config, lengths, *rest)
    lengths.clear()
    return right


def _partly(lengths, s, P):
    return _up(s, P) + sum(_up(n, P) - _up(s, P) for n in lengths)


def _faster(cache=lambda B, kv, width: B * kv, wait=max, last=None, compute=1, tokens=None,
            two=2, first=1):  # fmt: skip
    def answer(n, width, B, kv, flops, peak, bandwidth):
        def seconds(width, B):
            speed = peak * (2 / width if compute == "narrow" else 1)
            return wait(B * flops / speed, (n * width + cache(B, kv, width)) / bandwidth)

        if last:
            return last(seconds, width, B)
        made = B if tokens is None else tokens
        return made * seconds(two, B if first == "B" else 1) / seconds(width, B)

    return answer


def _product(seconds, width, B):
    return (seconds(2, 1) / seconds(width, 1)) * (B * seconds(2, 1) / seconds(2, B))


def _reading(computing, reading):
    return reading


def _speculates(tokens=lambda a, g: (1 - a ** (g + 1)) / (1 - a), n=lambda B, g: B * (g + 1),
                read=lambda B, g, w, kv: w + B * kv, wait=max, last=None, gain=None,
                turned=False, plainly=None, alone=False):  # fmt: skip
    def answer(alpha, gamma, weights, kv, flops, peak, bandwidth, most):
        gains = []

        def seconds(count, B, g):
            return wait(count(B, g) * flops / peak, read(B, g, weights, kv) / bandwidth)

        for B in range(1, most + 1):
            plain = B * seconds(plainly or n, 1, 0) if alone else seconds(plainly or n, B, 0)
            together = seconds(n, B, gamma)
            made = tokens(alpha, gamma)
            gains.append(gain(B, made, plain, together) if gain else made * plain / together)
        pays = 0
        for B, x in enumerate(gains, 1):
            if x > 1:
                pays = B
        pays = last(gains, pays, most) if last else pays
        return (pays, gains) if turned else (gains, pays)

    return answer


def _exchanges(sums=lambda L: 1 + 2 * L, gathers=1, x=lambda B, T, D: B * T * D,
               logits=lambda B, T, V, M: B * V, twice=lambda M: 2 * (M - 1) / M,
               once=lambda M: (M - 1) / M, ranks=None, width_is=None):  # fmt: skip
    def answer(config, B, T, M, width):
        width = width_is or width
        n = sums(config.L)
        sent = n * x(B, T, config.D) * width * twice(M)
        sent += logits(B, T, config.V, M) * width * once(M)
        messages = n + gathers
        return (messages * ranks(M) if ranks else messages), sent

    return answer


# What the real model runs: few, and each only once a process.
CHAT = Configuration("int8", schedule="continuous", slots=8, pages=True, prefix=True)
BATCH = Configuration("int4", schedule="continuous", slots=8)
IN_8_BITS = Configuration("int8", schedule="continuous", slots=8)


def _chooses(chat=CHAT, batch=BATCH, laptop=None):
    laptop = laptop or Configuration("int8", draft="ngram")
    return lambda name: {"chat": chat, "batch": batch, "laptop": laptop}[name]


def _combines(name):
    return Configuration("int8", schedule="continuous", slots=8, draft="ngram")


ATTEMPTS = [
    ("12.1", "partial page shared", _held(_partly), "in which the common beginning ends"),
    ("12.1", "partial page shared, new pages",
     _held(lambda n, s, P: _up(s, P) + sum(_up(x - s, P) for x in n)), "pages of their own"),
    ("12.1", "nothing shared", _held(lambda n, s, P: sum(_up(x, P) for x in n)),
     "not by every text"),
    ("12.1", "tokens", _held(lambda n, s, P: (s + sum(x - s for x in n)) / P), "single tokens"),
    ("12.1", "own tokens only", _held(lambda n, s, P: s // P + sum(_up(x - s, P) for x in n)),
     "where the last full shared page ends"),
    ("12.1", "one row of pages", _held(lambda n, s, P: _up(s + sum(x - s for x in n), P)),
     "added up before rounding"),
    ("12.1", "one page more", _held(lambda n, s, P: s // P + sum(x // P + 1 - s // P for x in n)),
     "one too many"),
    ("12.1", "shared never counted", _held(lambda n, s, P: sum(_up(x, P) - s // P for x in n)),
     "not counted at all"),
    ("12.1", "as the longest",
     _held(lambda n, s, P: s // P + len(n) * (_up(max(n), P) - s // P)), "as the longest"),
    ("12.1", "keys only", _held(place=lambda c, a, b, kv: c.L * c.K * c.H * kv),
     "a key *and* a value"),
    ("12.1", "query heads", _held(place=lambda c, a, b, kv: 2 * c.L * c.K * c.G * c.H * kv),
     "query heads share"),
    ("12.1", "one layer", _held(place=lambda c, a, b, kv: 2 * c.K * c.H * kv), "each layer keeps"),
    ("12.1", "cache at the weights' width",
     _held(place=lambda c, a, b, kv: 2 * c.L * c.K * c.H * a), "the linear layers' width"),
    ("12.1", "cache at the head's width",
     _held(place=lambda c, a, b, kv: 2 * c.L * c.K * c.H * b), "width of embedding and head"),
    ("12.1", "one width", _held(weights=lambda c, lin, t, n, a, b: (lin + t + n) * a),
     "keep `rest_bytes`"),
    ("12.1", "linear layers only", _held(weights=lambda c, lin, t, n, a, b: lin * a),
     "only the blocks' linear layers"),
    ("12.1", "no norms", _held(weights=lambda c, lin, t, n, a, b: lin * a + t * b), "norms are"),
    ("12.1", "head besides",
     _held(weights=lambda c, lin, t, n, a, b: lin * a + (2 * c.V * c.D + n) * b), "one table"),
    ("12.1", "the weights", _held(lambda n, s, P: 0), "the weights alone"),
    ("12.1", "the cache", _held(weights=lambda *numbers: 0), "the cache alone"),
    ("12.1", "two mistakes", _held(_partly, lambda c, a, b, kv: c.L * c.K * c.H * kv),
     "tokens follow in it; and a token leaves a key"),
    ("12.1", "clears its input", _forgets_lengths, "changed what it was given"),
    ("12.2", "as printed", _faster(lambda B, kv, w: kv, _reading, _product), "whether factors may"),
    ("12.2", "the product", _faster(last=_product), "✗ 12.2 Speed-ups do not multiply: both fac"),
    ("12.2", "one cache", _faster(lambda B, kv, w: kv), "a cache of its own"),
    ("12.2", "no limit", _faster(wait=_reading), "yours only reads"),
    ("12.2", "product of full steps", _faster(lambda B, kv, w: kv, last=_product),
     "2 mistakes are still there: each of the B texts"),
    ("12.2", "product, no limit", _faster(wait=_reading, last=_product),
     "2 mistakes are still there: a step takes"),
    ("12.2", "one cache, no limit", _faster(lambda B, kv, w: kv, _reading), "2 mistakes are"),
    ("12.2", "one step", _faster(tokens=1), "makes B tokens"),
    ("12.2", "the same batch", _faster(tokens=1, first="B"), "not with B texts"),
    ("12.2", "cache narrower", _faster(lambda B, kv, w: B * kv * w / 2), "keeps its 16 bits"),
    ("12.2", "computes narrow", _faster(compute="narrow"), "multiplied in 16 bits"),
    ("12.2", "the sum", _faster(wait=lambda a, b: a + b), "not the sum"),
    ("12.2", "upside down", lambda *args: 1 / _faster()(*args), "upside down"),
    ("12.2", "bytes only", lambda n, width, B, *rest: B * 2 / width, "only the bytes of a weight"),
    ("12.2", "a constant", lambda *args: 3.56, "expected"),
    ("12.3", "no bonus", _speculates(lambda a, g: sum(a**k for k in range(1, g + 1))),
     "the model's own token is forgotten"),
    ("12.3", "one forward", _speculates(n=lambda B, g: B), "costs what a plain step costs"),
    ("12.3", "one text computes", _speculates(n=lambda B, g: g + 1), "one text's computing was"),
    ("12.3", "one text's round", _speculates(n=lambda B, g: g + 1, plainly=lambda B, g: B),
     "counted in a round"),
    ("12.3", "gamma tokens", _speculates(n=lambda B, g: B * max(g, 1)), "not gamma"),
    ("12.3", "B + gamma", _speculates(n=lambda B, g: B + g), "not B + gamma"),
    ("12.3", "plain alone",
     _speculates(alone=True), "plain steps of *one* text"),
    ("12.3", "independent", _speculates(lambda a, g: 1 + a * g), "was counted with alpha"),
    ("12.3", "all right", _speculates(lambda a, g: g + 1), "taken to be right"),
    ("12.3", "one short", _speculates(lambda a, g: (1 - a**g) / (1 - a)), "on top of all gamma"),
    ("12.3", "one cache", _speculates(read=lambda B, g, w, kv: w + kv), "each of the B has its"),
    ("12.3", "no cache", _speculates(read=lambda B, g, w, kv: w), "caches are forgotten"),
    ("12.3", "cache a token", _speculates(read=lambda B, g, w, kv: w + B * (g + 1) * kv),
     "read its cache together"),
    ("12.3", "weights a text", _speculates(read=lambda B, g, w, kv: B * (w + kv)),
     "once for all B texts"),
    ("12.3", "the sum", _speculates(wait=lambda a, b: a + b), "not the sum"),
    ("12.3", "first that fails", _speculates(last=lambda g, B, most: B + 1), "doesn't gain"),
    ("12.3", "index", _speculates(last=lambda g, B, most: B - 1), "is an index"),
    ("12.3", "the best", _speculates(last=lambda g, B, most: 1), "item 1: got 1"),
    ("12.3", "tokens a second", _speculates(gain=lambda B, made, s, r: B * made / r),
     "those are tokens a second"),
    ("12.3", "upside down", _speculates(gain=lambda B, made, s, r: r / s / made), "upside down"),
    ("12.3", "seconds", _speculates(gain=lambda B, made, s, r: s / r), "seconds of a round"),
    ("12.3", "turned", _speculates(turned=True), "the gains first"),
    ("12.3", "no bonus, one forward",
     _speculates(lambda a, g: sum(a**k for k in range(1, g + 1)), lambda B, g: B),
     "accepted guesses; and a round costs"),
    ("12.4", "one a layer", _exchanges(lambda L: L + 1), "each layer has two all-reduces: att"),
    ("12.4", "no embedding", _exchanges(lambda L: 2 * L), "the embedding is sharded too"),
    ("12.4", "one a layer, no embedding", _exchanges(lambda L: L), "and the sharded embedding"),
    ("12.4", "final norm", _exchanges(lambda L: 2 * L + 2), "final norm"),
    ("12.4", "every projection", _exchanges(lambda L: 4 * L + 1), "nor do gate and up"),
    ("12.4", "no gather", _exchanges(gathers=0, logits=lambda *sizes: 0), "are not put together"),
    ("12.4", "no embedding, no gather",
     _exchanges(lambda L: 2 * L, gathers=0, logits=lambda *sizes: 0),
     "summed once; and the logits are not"),
    ("12.4", "gather not counted", _exchanges(gathers=0), "is a message too"),
    ("12.4", "gather without bytes", _exchanges(logits=lambda *sizes: 0), "its bytes are not"),
    ("12.4", "V of one rank", _exchanges(logits=lambda B, T, V, M: B * V / M), "one shard's V/M"),
    ("12.4", "all logits", _exchanges(logits=lambda B, T, V, M: B * T * V), "last token goes"),
    ("12.4", "payload", _exchanges(twice=lambda M: 1, once=lambda M: 1), "the tensors' bytes"),
    ("12.4", "once around", _exchanges(twice=lambda M: (M - 1) / M), "goes around the ring twice"),
    ("12.4", "gather twice", _exchanges(once=lambda M: 2 * (M - 1) / M), "taken for an all-red"),
    ("12.4", "of all ranks", _exchanges(twice=lambda M: 2 * (M - 1), once=lambda M: M - 1),
     "all shards together"),
    ("12.4", "to everybody", _exchanges(twice=lambda M: M - 1, once=lambda M: M - 1),
     "sent to everybody"),
    ("12.4", "messages of all", _exchanges(ranks=lambda M: M), "counted for every shard"),
    ("12.4", "one token", _exchanges(x=lambda B, T, D: B * D), "all T tokens"),
    ("12.4", "one text", _exchanges(x=lambda B, T, D: T * D), "all B texts"),
    ("12.4", "two bytes", _exchanges(width_is=2), "assumes 2"),
    ("12.4", "numbers", _exchanges(width_is=1), "those are numbers"),
    ("12.4", "turned", lambda *args: _exchanges()(*args)[::-1], "the messages first"),
    ("12.5", "a string", lambda name: "int8", "a str; expected a Configuration"),
    ("12.5", "nothing", lambda name: CHAT if name == "chat" else None, "is a `return` missing?"),
    ("12.5", "the same for all", lambda name: CHAT, "all three get the same"),
    ("12.5", "impossible", _combines, "Incompatible: speculation spends"),
    ("12.5", "too many slots",
     _chooses(Configuration(schedule="continuous", slots=64)), "only eight texts come"),
    ("12.5", "chat: three slots",
     _chooses(Configuration("int8", schedule="continuous", slots=3, pages=True, prefix=True)),
     "chat with int8, continuous x3, pages, prefix: first tokens come too late, after about"),
    ("12.5", "batch: memory", _chooses(batch=IN_8_BITS), "of cache, and the budget is 150"),
    ("12.5", "batch: speed", _chooses(batch=IN_8_BITS), "it is too slow, about"),
    ("12.5", "laptop: quality", _chooses(laptop=Configuration("int4", draft="ngram")),
     "laptop with int4, cache, ngram x4: its texts are too poor"),
]  # fmt: skip
