"""Known-wrong answers to notebook 07 and the message each must get."""

import math

import torch
import torch.nn.functional as nnf


def _layer(c):
    return 2 * c.D * c.H * (c.N + c.K) + 3 * c.D * c.F + 2 * c.D


def _narrow(layer=_layer, each=lambda c, drop: 3 * c.D * c.L, cached=lambda c: 4 * c.K * c.H,
            shallow=lambda c, drop: c.L - drop):  # fmt: skip
    def answer(config, drop):
        F_new = config.F - drop * layer(config) / each(config, drop)
        return F_new, shallow(config, drop) * cached(config), config.L * cached(config)

    return answer


def _caches_with_width(config, drop):
    F_new, shallow, narrow = _narrow()(config, drop)
    return F_new, shallow, narrow * F_new / config.F


def _but(change):
    def answer(config, drop):
        return change(config, *_narrow()(config, drop))

    return answer


def _cosines(x_BTD, y_BTD):
    lengths = x_BTD.norm(dim=-1) * y_BTD.norm(dim=-1)
    return (x_BTD * y_BTD).sum(-1) / lengths


def _summed_first(x_BTD, y_BTD):
    lengths = x_BTD.norm(dim=-1) * y_BTD.norm(dim=-1)
    return 1 - (x_BTD * y_BTD).sum(-1).sum() / lengths.sum()


def _mean_over_D(x_BTD, y_BTD):
    lengths = x_BTD.norm(dim=-1) * y_BTD.norm(dim=-1)
    return 1 - ((x_BTD * y_BTD).mean(-1) / lengths).mean()


def _in_place(x_BTD, y_BTD):
    x_BTD /= x_BTD.norm(dim=-1, keepdim=True)
    y_BTD /= y_BTD.norm(dim=-1, keepdim=True)
    return 1 - (x_BTD * y_BTD).sum(-1).mean()


def _split(gate_up_MD, keep):
    gate_FD, up_FD = gate_up_MD.chunk(2)
    return gate_FD[keep], up_FD[keep]


def _both(gate_up_MD, keep):
    return torch.cat(_split(gate_up_MD, keep))


def _goes(gate_up_MD, down_DF, keep):
    stays = torch.ones(down_DF.shape[1], dtype=torch.bool)
    stays[keep] = False
    return gate_up_MD[stays.repeat(2)], down_DF[:, stays]


def _zeroed(gate_up_MD, down_DF, keep):
    gone = torch.ones(down_DF.shape[1], dtype=torch.bool)
    gone[keep] = False
    gate_up_MD[gone.repeat(2)] = 0
    return _both(gate_up_MD, keep), down_DF[:, keep]


def _groups(rows=None, columns=None, keep_v=True):
    """The colleague's code, with other heads in q's rows or out's columns."""

    def answer(qkv_MD, out_DX, K, G, keep):
        H = out_DX.shape[1] // (K * G)
        q_NHD, k_KHD, v_KHD = qkv_MD.unflatten(0, (-1, H)).split([K * G, K, K])
        right = [n for n in range(K * G) if n // G in keep]
        heads = [n for n in range(K * G) if rows(n, K, G) in keep] if rows else right
        v_KHD = v_KHD[keep] if keep_v else v_KHD[: len(keep)]
        qkv = torch.cat((q_NHD[heads], k_KHD[keep], v_KHD)).flatten(0, 1)
        heads = [n for n in range(K * G) if columns(n, K, G) in keep] if columns else heads
        return qkv, out_DX.unflatten(1, (-1, H))[:, heads].flatten(1)

    return answer


def _every_query(qkv_MD, out_DX, K, G, keep):
    H = out_DX.shape[1] // (K * G)
    q_NHD, k_KHD, v_KHD = qkv_MD.unflatten(0, (-1, H)).split([K * G, K, K])
    return torch.cat((q_NHD, k_KHD[keep], v_KHD[keep])).flatten(0, 1), out_DX


def _values_from_keys(qkv_MD, out_DX, K, G, keep):
    qkv, out = _groups()(qkv_MD, out_DX, K, G, keep)
    H = out_DX.shape[1] // (K * G)
    q_and_k = qkv[: -len(keep) * H]
    return torch.cat((q_and_k, q_and_k[-len(keep) * H :])), out


def _whole_out(qkv_MD, out_DX, K, G, keep):
    return _groups()(qkv_MD, out_DX, K, G, keep)[0], out_DX


def _kl(direction=1, power=2, reduction="sum", over=lambda x: x[..., 0].numel(), soft=(1, 1)):
    def answer(student_logits, teacher_logits, temperature):
        T_s, T_t = (temperature if on else 1 for on in soft)
        log_q, log_p = (
            (student_logits / T_s).log_softmax(-1),
            (teacher_logits / T_t).log_softmax(-1),
        )
        first, second = (log_q, log_p) if direction == 1 else (log_p, log_q)
        loss = nnf.kl_div(first, second.exp(), reduction=reduction)
        return loss * temperature**power / (over(log_q) if reduction == "sum" else 1)

    return answer


def _printed(log=False, swapped=True, reduction="mean", power=0):
    """The notebook's code, with some of its four mistakes mended."""

    def answer(student_logits, teacher_logits, temperature):
        q, p = ((x / temperature).softmax(-1) for x in (student_logits, teacher_logits))
        first, second = (p, q) if swapped else (q, p)
        loss = nnf.kl_div(first.log() if log else first, second, reduction=reduction)
        return loss * temperature**power

    return answer


def _softens_its_teacher(student_logits, teacher_logits, temperature):
    teacher_logits /= temperature
    return _kl(soft=(1, 0))(student_logits, teacher_logits, temperature)


def _no_log(student_logits, teacher_logits, temperature):
    q, p = ((x / temperature).softmax(-1) for x in (student_logits, teacher_logits))
    return nnf.kl_div(q, p, reduction="sum") * temperature**2 / q[..., 0].numel()


def _two_logs(student_logits, teacher_logits, temperature):
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (student_logits, teacher_logits))
    return nnf.kl_div(log_q, log_p, reduction="sum") * temperature**2 / log_q[..., 0].numel()


def _soft_cross_entropy(student_logits, teacher_logits, temperature):
    V = student_logits.shape[-1]
    p = (teacher_logits / temperature).softmax(-1).reshape(-1, V)
    return nnf.cross_entropy((student_logits / temperature).reshape(-1, V), p) * temperature**2


def _detached(student_logits, teacher_logits, temperature):
    return _kl()(student_logits.detach(), teacher_logits, temperature)


def _one_after_the_other(L, rounds):
    left = list(range(L))
    for gone in rounds:
        for i in gone:
            left.pop(i)
    return left


def _right(L, rounds):
    left = list(range(L))
    for gone in rounds:
        left = [layer for i, layer in enumerate(left) if i not in gone]
    return left


def _offset(L, rounds):
    gone = []
    for indices in rounds:
        gone += [i + len(gone) for i in indices]
    return [i for i in range(L) if i not in gone]


def _pops_its_rounds(L, rounds):
    left = list(range(L))
    while rounds:
        gone = rounds.pop(0)
        left = [layer for i, layer in enumerate(left) if i not in gone]
    return left


ATTEMPTS = [
    (
        "7.1",
        "only the kept layers are narrowed",
        _narrow(each=lambda c, drop: 3 * c.D * (c.L - drop)),
        "the narrow one has all L layers",
    ),
    ("7.1", "MLP only", _narrow(lambda c: 3 * c.D * c.F), "attention goes with it"),
    ("7.1", "no norms", _narrow(lambda c: _layer(c) - 2 * c.D), "two norms were forgotten"),
    (
        "7.1",
        "two matrices",
        _narrow(lambda c: _layer(c) - c.D * c.F, lambda c, drop: 2 * c.D * c.L),
        "three matrices",
    ),
    (
        "7.1",
        "N keys and values",
        _narrow(lambda c: _layer(c) + 2 * c.D * c.H * (c.N - c.K)),
        "K heads, not N: grouped attention",
    ),
    ("7.1", "one cache", _narrow(shallow=lambda c, drop: c.L), "leaves no keys and values"),
    ("7.1", "N heads cached", _narrow(cached=lambda c: 4 * c.N * c.H), "of K heads, not of N"),
    ("7.1", "keys only", _narrow(cached=lambda c: 2 * c.K * c.H), "both are kept"),
    ("7.1", "a cache as wide as F", _caches_with_width, "does not know F"),
    ("7.1", "fp32", _narrow(cached=lambda c: 8 * c.K * c.H), "twice each cache"),
    ("7.1", "neurons gone", _but(lambda c, F, a, b: (c.F - F, a, b)), "how many neurons go"),
    ("7.1", "swapped", _but(lambda c, F, a, b: (F, b, a)), "swapped"),
    ("7.1", "neuron 2D", _narrow(each=lambda c, drop: 2 * c.D * c.L), "a neuron is 3*D"),
    ("7.1", "one norm", _narrow(lambda c: _layer(c) - c.D), "one norm was counted"),
    ("7.1", "rounded", _but(lambda c, F, a, b: (round(F), a, b)), "F is rounded"),
    ("7.1", "cut off", _but(lambda c, F, a, b: (math.floor(F), a, b)), "F is cut to an integer"),
    ("7.2", "similarity", lambda x, y: _cosines(x, y).mean(), "must score 0"),
    (
        "7.2",
        "one long vector",
        lambda x, y: 1 - nnf.cosine_similarity(x.reshape(-1), y.reshape(-1), dim=0),
        "one long vector",
    ),
    (
        "7.2",
        "averaged first",
        lambda x, y: 1 - nnf.cosine_similarity(x.mean((0, 1)), y.mean((0, 1)), dim=0),
        "averaged before they were compared",
    ),
    (
        "7.2",
        "over tokens",
        lambda x, y: 1 - nnf.cosine_similarity(x, y, dim=1).mean(),
        "over the tokens of one channel",
    ),
    ("7.2", "what is added", lambda x, y: 1 - _cosines(x, y - x).mean(), "what the layer adds"),
    (
        "7.2",
        "relative length",
        lambda x, y: ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean(),
        "how long the change is",
    ),
    ("7.2", "sum", lambda x, y: (1 - _cosines(x, y)).sum(), "added up"),
    ("7.2", "dot product", lambda x, y: 1 - (x * y).sum(-1).mean(), "a dot product"),
    ("7.2", "a token each", lambda x, y: 1 - _cosines(x, y), "a number for each token"),
    ("7.2", "summed first", _summed_first, "before dividing"),
    ("7.2", "mean over D", _mean_over_D, "take a sum over D"),
    ("7.2", "in place", _in_place, "changed what it was given"),
    ("7.2", "a constant", lambda x, y: torch.tensor(0.0), "expected"),
    ("7.3", "gate only", lambda g, d, keep: (g[keep], d[:, keep]), "only gate's rows"),
    (
        "7.3",
        "pairs",
        lambda g, d, keep: (g.unflatten(0, (-1, 2))[keep].flatten(0, 1), d[:, keep]),
        "taken in pairs",
    ),
    (
        "7.3",
        "interleaved",
        lambda g, d, keep: (torch.stack(_split(g, keep), 1).flatten(0, 1), d[:, keep]),
        "rows alternate",
    ),
    (
        "7.3",
        "up first",
        lambda g, d, keep: (torch.cat(_split(g, keep)[::-1]), d[:, keep]),
        "up's rows come first",
    ),
    ("7.3", "the others", _goes, "the neurons that should go"),
    (
        "7.3",
        "off by one",
        lambda g, d, keep: (torch.cat((g[keep], g.roll(1, 0)[d.shape[1] :][keep])), d[:, keep]),
        "off by one",
    ),
    ("7.3", "gate twice", lambda g, d, keep: (g[keep].repeat(2, 1), d[:, keep]), "there twice"),
    ("7.3", "whole down", lambda g, d, keep: (_both(g, keep), d), "column for every neuron"),
    (
        "7.3",
        "first columns",
        lambda g, d, keep: (_both(g, keep), d[:, : len(keep)]),
        "takes its own along",
    ),
    ("7.3", "in place", _zeroed, "changed what it was given"),
    ("7.3", "as it was", lambda g, d, keep: (g, d), "shape"),
    ("7.4", "as printed", _groups(lambda n, K, G: n % K), "still the query heads n with n % K"),
    ("7.4", "runs of K", _groups(lambda n, K, G: n // K), "it is G that divides"),
    ("7.4", "one of each run", _groups(lambda n, K, G: n % G), "one query head of every run"),
    (
        "7.4",
        "q right, out not",
        _groups(columns=lambda n, K, G: n % K),
        "out's columns belong to other heads",
    ),
    ("7.4", "out whole", _whole_out, "out still reads every head"),
    ("7.4", "first values", _groups(keep_v=False), "of v the first heads"),
    ("7.4", "own number", _groups(lambda n, K, G: n), "whose own number is in keep"),
    ("7.4", "all queries", _every_query, "all query heads are kept"),
    ("7.4", "v from k", _values_from_keys, "v's rows are k's"),
    ("7.5", "as printed", _printed(), "4 things are still wrong"),
    (
        "7.5",
        "printed, direction right",
        _printed(swapped=False),
        "went in without a logarithm; the",
    ),
    ("7.5", "printed, logarithm right", _printed(log=True), "the student leads instead"),
    ("7.5", "printed, only T**2 and the log", _printed(log=True, power=2), "the student leads"),
    ("7.5", "no mean, no square", _kl(power=0, reduction="mean"), "T**2 is missing"),
    (
        "7.5",
        "batchmean, no log",
        _printed(swapped=False, reduction="batchmean", power=2),
        "the first axis alone",
    ),
    ("7.5", "in place", _softens_its_teacher, "changed what it was given"),
    ("7.5", "reverse", _kl(direction=-1), "the other direction"),
    ("7.5", "no log", _no_log, "went in without a logarithm"),
    ("7.5", "two logs", _two_logs, "the teacher went in as logarithms"),
    ("7.5", "torch's mean", _kl(reduction="mean"), "V times too small"),
    ("7.5", "batchmean", _kl(reduction="batchmean"), "the first axis only"),
    ("7.5", "sum", _kl(over=lambda x: 1), "a sum over positions"),
    ("7.5", "no square", _kl(power=0), "T**2 is missing"),
    ("7.5", "T once", _kl(power=1), "T once is not enough"),
    ("7.5", "hot teacher", _kl(soft=(0, 1)), "only the teacher is softened"),
    ("7.5", "hot student", _kl(soft=(1, 0)), "only the student is softened"),
    ("7.5", "cross-entropy", _soft_cross_entropy, "plus the teacher's own entropy"),
    ("7.5", "no gradient", _detached, "no gradient reaches the student"),
    (
        "7.6",
        "teacher's numbers",
        lambda L, rounds: [i for i in range(L) if all(i not in gone for gone in rounds)],
        "read as the teacher's numbers",
    ),
    ("7.6", "one by one", _one_after_the_other, "deleted one after the other"),
    (
        "7.6",
        "what went",
        lambda L, rounds: sorted(set(range(L)) - set(_right(L, rounds))),
        "the layers that went",
    ),
    (
        "7.6",
        "counted anew",
        lambda L, rounds: list(range(L - sum(map(len, rounds)))),
        "how they are counted in the student",
    ),
    ("7.6", "offset", _offset, "only shifted"),
    ("7.6", "first round", lambda L, rounds: _right(L, rounds[:1]), "only the first round"),
    ("7.6", "eats its input", _pops_its_rounds, "changed what it was given"),
]
