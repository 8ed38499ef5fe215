"""Checks of notebook 07: pruning and distillation."""

import copy
import functools
import itertools
import math

import torch

from lecture_util.classroom.exercise import exercise
from lecture_util.model.config import Config


def _untouched(c, answer, args) -> None:
    """One check: called with these very objects, not copies, the answer leaves them alone."""
    before = copy.deepcopy(args)
    c.call(lambda: answer(*args))
    same = all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(args, before, strict=True)
    )
    c.expect(same, "your function changed what it was given: build new values instead")


def _narrow(config, drop, *, layer=None, spread=True, cache=None):
    """The width at which all layers together lose what `drop` layers have, and both caches."""
    D, F, K, N, H, L = (getattr(config, name) for name in "DFKNHL")
    weights = layer or (lambda: 2 * D * N * H + 2 * D * K * H + 3 * D * F + 2 * D)
    each = drop * weights() / (3 * D * (L if spread else L - drop))
    a_token = cache or (lambda layers, F_new: 4 * layers * K * H)
    return F - each, a_token(L - drop, F), a_token(L, F - each)


def _narrow_as(weights=None, a_token=None):
    """A wrong answer: a layer's parameters, or a token's cache, as functions of the config."""

    def answer(config, drop):
        return _narrow(
            config,
            drop,
            layer=weights and (lambda: weights(config)),
            cache=a_token and (lambda layers, F: a_token(config, layers, F)),
        )

    return answer


@exercise(
    "7.1",
    title="Shallow or narrow?",
    minutes=12,
    trains="deriving sizes: what a layer has, what a neuron has, and which of them caches",
    hints=(
        "First count one layer: four matrices of attention, three of the MLP, two norms. Then "
        "count one neuron of the MLP, in one layer.",
        "The narrow student has L layers, and all of them are narrower by the same amount, so "
        "3*D*(F - F_new)*L parameters are gone. Set that equal to `drop` layers.",
        "A token leaves a key and a value of K*H numbers in each layer, whatever D and F are.",
    ),
)
def _(answer, c):
    cases = []
    for L, drop in ((30, 8), (24, 3), (c.int(18, 28), 2), (c.int(30, 40), c.int(3, 6))):
        K, G = c.int(1, 5), c.int(2, 5)
        D, F, H = 2 * c.int(150, 450), c.int(1500, 2500), 2 * c.int(16, 48)
        cases.append((Config(D=D, F=F, K=K, G=G, H=H, L=L, V=c.int(500, 900), tied=True), drop))
    attention = lambda s: 2 * s.D * s.N * s.H + 2 * s.D * s.K * s.H  # noqa: E731
    c.like(
        answer,
        _narrow,
        cases,
        rtol=1e-9,
        wrong={
            "the neurons were taken from the layers that the shallow student keeps: the narrow one "
            "has all L layers": lambda s, n: _narrow(s, n, spread=False),
            "a layer is more than its MLP: attention goes with it": _narrow_as(
                lambda s: 3 * s.D * s.F
            ),
            "the layer's two norms were forgotten: 2*D parameters": _narrow_as(
                lambda s: attention(s) + 3 * s.D * s.F
            ),
            "a gated MLP has three matrices, so a layer has 3*D*F there and a neuron "
            "3*D": lambda s, n: (
                s.F - n * (attention(s) + 2 * s.D * s.F + 2 * s.D) / (2 * s.D * s.L),
                *_narrow(s, n)[1:],
            ),
            "keys and values have K heads, not N: grouped attention shares them": _narrow_as(
                lambda s: 4 * s.D * s.N * s.H + 3 * s.D * s.F + 2 * s.D
            ),
            "right, but in your answer both students cache the same: every layer that is gone "
            "leaves no keys and values": lambda s, n: (
                _narrow(s, n)[0],
                4 * s.L * s.K * s.H,
                4 * s.L * s.K * s.H,
            ),
            "the cache holds the keys and values of K heads, not of N": _narrow_as(
                a_token=lambda s, layers, F: 4 * layers * s.N * s.H
            ),
            "half of each cache: only keys or only values, or numbers instead of bytes; both are "
            "kept, and 16 bits are 2 bytes": _narrow_as(
                a_token=lambda s, layers, F: 2 * layers * s.K * s.H
            ),
            "twice each cache: 16 bits are 2 bytes a number, and fp32's 4": _narrow_as(
                a_token=lambda s, layers, F: 8 * layers * s.K * s.H
            ),
            "the first number is how many neurons go, in each layer: return the F that is "
            "left": lambda s, n: (s.F - _narrow(s, n)[0], *_narrow(s, n)[1:]),
            "the two caches are swapped: the shallow student's comes first": lambda s, n: (
                _narrow(s, n)[0],
                *_narrow(s, n)[:0:-1],
            ),
            "the layer is right, but a neuron is 3*D: a row of gate, a row of up, a column of "
            "down": lambda s, n: (
                s.F - (s.F - _narrow(s, n)[0]) * 3 / 2,
                *_narrow(s, n)[1:],
            ),
            "one norm was counted, and a layer has two, D each": _narrow_as(
                lambda s: attention(s) + 3 * s.D * s.F + s.D
            ),
            "F is rounded: return what the algebra says": lambda s, n: (
                round(_narrow(s, n)[0]),
                *_narrow(s, n)[1:],
            ),
            "F is cut to an integer: return what the algebra says": lambda s, n: (
                int(_narrow(s, n)[0]),
                *_narrow(s, n)[1:],
            ),
            "the cache does not know F: a narrower MLP caches as much": _narrow_as(
                a_token=lambda s, layers, F: 4 * layers * s.K * s.H * F / s.F
            ),
        },
    )  # fmt: skip


def _influence(x_BTD, y_BTD):
    """The definition, one token at a time."""
    pairs = zip(x_BTD.flatten(0, 1).tolist(), y_BTD.flatten(0, 1).tolist(), strict=True)
    turns = [
        1 - sum(a * b for a, b in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y)
        for x, y in pairs
    ]
    return torch.tensor(sum(turns) / len(turns), dtype=x_BTD.dtype)


def _cosine(x, y, dim=-1):
    return torch.nn.functional.cosine_similarity(x, y, dim=dim)


@exercise(
    "7.2",
    title="How far a layer turns the stream",
    minutes=10,
    trains="which axis a cosine is over, and what is averaged when",
    hints=(
        "Each token has its own pair of vectors, before and after, of width D. So there are B*T "
        "cosines.",
        "A cosine is the dot product of two vectors over the product of their lengths: three sums "
        "over the last axis.",
        "The mean comes last, over what are by then (B, T) numbers.",
    ),
)
def _(answer, c):
    cases = []
    for B, T, D in ((1, 1, 5), (2, 7, 6), (c.int(2, 4), c.int(5, 9), c.int(7, 12))):
        x, y = c.randn(B, T, D), c.randn(B, T, D)
        x[:, 0] *= 60  # as in real models, where the first token is far longer than the rest
        cases.append((x, x + 1.5 * y))
    x = c.randn(2, 5, 8)
    cases += [(x, 3 * x), (x.double(), (x + c.randn(2, 5, 8)).double())]
    c.like(
        answer,
        _influence,
        cases,
        rtol=1e-4,
        atol=1e-5,
        wrong={
            "that is the similarity: a layer that changes nothing must score 0": lambda x, y: (
                _cosine(x, y).mean()
            ),
            "all tokens were taken as one long vector: the first token, far longer than the "
            "others, decides alone": lambda x, y: 1 - _cosine(x.flatten(), y.flatten(), 0),
            "the vectors were averaged before they were compared: compare token by token, then "
            "average": lambda x, y: 1 - _cosine(x.mean((0, 1)), y.mean((0, 1)), 0),
            "your cosines run over the tokens of one channel: take them over the channels of one "
            "token": lambda x, y: 1 - _cosine(x, y, 1).mean(),
            "that is the angle between the input and what the layer adds: compare its input with "
            "its output": lambda x, y: 1 - _cosine(x, y - x).mean(),
            "that measures how long the change is: a layer that only makes the stream longer must "
            "score 0": lambda x, y: ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean(),
            "dot products and lengths were each summed over the tokens before dividing: the first "
            "token, far longer than the others, decides alone": lambda x, y: (
                1 - (x * y).sum() / (x.norm(dim=-1) * y.norm(dim=-1)).sum()
            ),
            "the dot product is a mean over D, and the lengths are sums: take a sum over "
            "D": lambda x, y: 1 - _cosine(x, y).mean() / x.shape[-1],
            "that is a number for each token, of shape (B, T): take the mean over "
            "them": lambda x, y: 1 - _cosine(x, y),
            "the cosines were added up: the score would grow with the text, so take the "
            "mean": lambda x, y: (1 - _cosine(x, y)).sum(),
            "the lengths are not divided out: that is a dot product, not a cosine": lambda x, y: (
                1 - (x * y).sum(-1).mean()
            ),
        },
    )
    _untouched(c, answer, cases[1])


def _cut_mlp(gate_up_MD, down_DF, keep):
    F = down_DF.shape[1]
    at = torch.tensor(keep, dtype=torch.long)
    return gate_up_MD[torch.cat((at, F + at))], down_DF[:, at]


def _others(down_DF, keep):
    return [f for f in range(down_DF.shape[1]) if f not in keep]


@exercise(
    "7.3",
    title="Cut neurons out",
    minutes=12,
    trains="which rows and which columns one neuron owns",
    hints=(
        "Neuron f computes silu(gate row f) * (up row f), one number, and `down` spreads it over D "
        "channels. Which slices of which matrices is that?",
        "gate_up has 2F rows: gate's F first, then up's. So neuron f has the rows f and F + f.",
        "down has a column a neuron: down_DF[:, keep].",
    ),
)
def _(answer, c):
    cases = []
    for F, n in ((4, 2), (9, 9), (c.int(8, 14), 3), (c.int(15, 20), c.int(5, 9))):
        D = c.int(3, 7)
        keep = sorted(c.ints(n, low=0, high=F - 1))
        if keep == list(range(n)) and n < F:
            keep[-1] = F - 1  # or the first neurons alone would do
        cases.append((c.randn(2 * F, D), c.randn(D, F), keep))
    c.like(
        answer,
        _cut_mlp,
        cases,
        rtol=1e-6,
        wrong={
            "only gate's rows were kept: neuron f also has a row of up, F rows further "
            "down": lambda g, d, keep: (g[keep], d[:, keep]),
            "the rows are taken in pairs, 2f and 2f + 1: gate's F rows come first, then all of "
            "up's": lambda g, d, keep: (
                g[[row for f in keep for row in (2 * f, 2 * f + 1)]],
                d[:, keep],
            ),
            "gate's and up's rows alternate in your result: keep the layout, gate first, then "
            "up": lambda g, d, keep: (
                torch.stack((g[keep], g[[d.shape[1] + f for f in keep]]), 1).flatten(0, 1),
                d[:, keep],
            ),
            "up's rows come first in your result: gate goes through silu, and must stay "
            "first": lambda g, d, keep: (
                torch.cat((g[[d.shape[1] + f for f in keep]], g[keep])),
                d[:, keep],
            ),
            "up's rows are off by one: gate's are 0 to F - 1, so up's first "
            "is F": lambda g, d, keep: (
                g[keep + [d.shape[1] + f - 1 for f in keep]],
                d[:, keep],
            ),
            "gate's rows are there twice: the second half must be up's, F rows further "
            "down": lambda g, d, keep: (g[keep + keep], d[:, keep]),
            "those are the neurons that should go": lambda g, d, keep: _cut_mlp(
                g, d, _others(d, keep)
            ),
            "down still has a column for every neuron": lambda g, d, keep: (
                _cut_mlp(g, d, keep)[0],
                d,
            ),
            "of down the first columns are left: each neuron takes its own "
            "along": lambda g, d, keep: (_cut_mlp(g, d, keep)[0], d[:, : len(keep)]),
            "down was cut by rows, which are channels: a neuron is one of its "
            "columns": lambda g, d, keep: (_cut_mlp(g, d, keep)[0], d[keep]),
        },
    )  # fmt: skip
    _untouched(c, answer, cases[2])


def _all_queries(qkv_MD, out_DX, K, G, keep):
    """k and v cut, q and out as they were."""
    H = len(qkv_MD) // (K * G + 2 * K)
    q, k, v = qkv_MD.split([K * G * H, K * H, K * H])
    rows = [i * H + h for i in keep for h in range(H)]
    return torch.cat((q, k[rows], v[rows])), out_DX


def _keys_as_values(qkv_MD, out_DX, K, G, keep):
    qkv, out = _cut_groups(qkv_MD, out_DX, K, G, keep)
    H = len(qkv_MD) // (K * G + 2 * K)
    n = len(keep) * H
    return torch.cat((qkv[: -2 * n], qkv[-2 * n : -n], qkv[-2 * n : -n])), out


def _cut_groups(qkv_MD, out_DX, K, G, keep, *, reads=None, out_reads=None, values=True):
    """One head after the other; `reads` tells which KV head query head n reads."""
    H = len(qkv_MD) // (K * G + 2 * K)
    right = lambda n: n // G  # noqa: E731
    head = lambda i: qkv_MD[i * H : (i + 1) * H]  # noqa: E731
    heads = [n for n in range(K * G) if (reads or right)(n) in keep]
    columns = [n for n in range(K * G) if (out_reads or reads or right)(n) in keep]
    k = [head(K * G + i) for i in keep]
    v = [head(K * G + K + i) for i in (keep if values else range(len(keep)))]
    return (
        torch.cat([*map(head, heads), *k, *v]),
        torch.cat([out_DX[:, n * H : (n + 1) * H] for n in columns], dim=1),
    )


@exercise(
    "7.4",
    title="Heads that go together",
    minutes=12,
    trains="finding the mistake, where every shape is right",
    hints=(
        "With K=3 and G=3: which query heads read KV head 0? Print `heads` of the colleague's code "
        "for keep=[0].",
        "Query heads that share a KV head are neighbours: 0, 1, 2 read KV head 0. Notebook 04 "
        "found which of n // G and n % K that is.",
        "Only the line that makes `heads` is wrong. The columns of `out` follow from it.",
    ),
)
def _(answer, c):
    cases = []
    for K, G, keep in ((3, 4, [0, 2]), (4, 3, [1]), (2, 5, [1]), (5, 2, [0, 3, 4])):
        H, D = 2 * c.int(1, 3), c.int(4, 7)
        cases.append((c.randn((K * G + 2 * K) * H, D), c.randn(D, K * G * H), K, G, keep))
    c.like(
        answer,
        _cut_groups,
        cases,
        wrong={
            "these are still the query heads n with n % K in keep: the heads that read KV head 0 "
            "are its neighbours 0 to G - 1": lambda *a: _cut_groups(*a, reads=lambda n: n % a[2]),
            "query heads come in K runs of G, one after the other, so it is G that divides "
            "them": lambda *a: _cut_groups(*a, reads=lambda n: n // a[2]),
            "that keeps one query head of every run, not the runs of the KV heads that "
            "stay": lambda *a: _cut_groups(*a, reads=lambda n: n % a[3]),
            "q's rows are right, but out's columns belong to other heads: both must follow the "
            "same list": lambda *a: _cut_groups(*a, out_reads=lambda n: n % a[2]),
            "only the query heads whose own number is in keep are left: each KV head takes along "
            "the G that read it": lambda *a: _cut_groups(*a, reads=lambda n: n),
            "all query heads are kept: those whose KV head is gone would have nothing to "
            "read": _all_queries,
            "v's rows are k's: v's heads come after all K of k": _keys_as_values,
            "out still reads every head": lambda *a: (_cut_groups(*a)[0], a[1]),
            "of v the first heads are left, whatever `keep` says: k and v go "
            "together": lambda *a: _cut_groups(*a, values=False),
        },
    )  # fmt: skip
    _untouched(c, answer, cases[0])


def _kl(student, teacher, T, *, mean_over=None, power=2, warm=(True, True)):
    """The definition in plain sums, one position and token at a time."""
    rows = zip(student.flatten(0, -2).tolist(), teacher.flatten(0, -2).tolist(), strict=True)
    total, positions = 0.0, 0
    for z, y in rows:
        z, y = ([x / (T if on else 1) for x in row] for row, on in zip((z, y), warm, strict=True))
        log_q = [x - math.log(sum(map(math.exp, z))) for x in z]
        log_p = [x - math.log(sum(map(math.exp, y))) for x in y]
        total += sum(math.exp(b) * (b - a) for a, b in zip(log_q, log_p, strict=True))
        positions += 1
    over = positions if mean_over is None else mean_over(student)
    return torch.tensor(total * T**power / over, dtype=student.dtype)


def _cross_entropy(student, teacher, T):
    log_q = (student / T).log_softmax(-1)
    return -((teacher / T).softmax(-1) * log_q).sum(-1).mean() * T**2


def _forgotten_log(student, teacher, T):
    p, q = (teacher / T).softmax(-1), (student / T).softmax(-1)
    return (p * (p.log() - q)).sum(-1).mean() * T**2


def _kl_div_of_logs(student, teacher, T):
    """kl_div with a target that is already a log, and log_target left False."""
    log_q, log_p = ((x / T).log_softmax(-1).flatten(0, -2) for x in (student, teacher))
    return torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean") * T**2


def _with_mistakes(student, teacher, T, *, log, leads, over, power):
    """kl_div as it might be called: `log` of its first argument or not, and which one leads."""
    q, p = ((x / T).softmax(-1).flatten(0, -2) for x in (student, teacher))
    q, p = (p, q) if leads == "student" else (q, p)
    return (p * (p.log() - (q.log() if log else q))).sum() / over(student) * T**power


MISTAKES = {
    "log": {"": True, "the first argument went in without a logarithm": False},
    "leads": {"": "teacher", "the student leads instead of the teacher": "student"},
    "over": {
        "": lambda x: x[..., 0].numel(),
        "the mean is over the vocabulary too, not over positions alone": lambda x: x.numel(),
        "the mean is over the first axis alone, not over all positions": lambda x: x.shape[0],
        "the sum over positions should be a mean": lambda x: 1,
    },
    "power": {"": 2, "T**2 is missing": 0},
}


def _mixtures():
    """Two mistakes or more at once, each with a message that names all that are left."""
    found = {}
    for choice in itertools.product(*(kinds.items() for kinds in MISTAKES.values())):
        left = [message for message, _ in choice if message]
        if len(left) >= 2:
            made = dict(zip(MISTAKES, (value for _, value in choice), strict=True))
            found[f"{len(left)} things are still wrong: {'; '.join(left)}"] = functools.partial(
                _with_mistakes, **made
            )
    return found


@exercise(
    "7.5",
    title="Four ways to get KL wrong",
    minutes=12,
    trains="direction, logarithm, reduction and temperature of a divergence in torch",
    hints=(
        "Write the sum first: p (log p - log q) over the vocabulary, p the teacher's, q the "
        "student's, both from logits over T. Then compare with what kl_div does with its two "
        "arguments.",
        "kl_div(input, target) computes target * (log(target) - input): the input has to be a "
        "log-probability already, and it is the *second* argument that leads.",
        "Sum over everything, divide by the number of positions, multiply by T twice.",
    ),
)
def _(answer, c):
    cases = [
        (2 * c.randn(*shape, V), 2 * c.randn(*shape, V), T)
        for shape, V, T in (((3,), 4, 1.0), ((2, 5), c.int(6, 12), 2.0), ((1, 4), 7, 3.0))
    ]
    cases.append((c.randn(2, 3, 5).double(), c.randn(2, 3, 5).double(), 1.5))
    c.like(
        answer,
        _kl,
        cases,
        rtol=1e-4,
        atol=1e-6,
        wrong={
            "that is the other direction: here the teacher's p leads, and every token it finds "
            "likely counts": lambda s, t, T: _kl(t, s, T),
            "the student went in without a logarithm: kl_div wants log-probabilities as its first "
            "argument": _forgotten_log,
            "the teacher went in as logarithms: kl_div wants probabilities as its second argument, "
            "unless told log_target=True": _kl_div_of_logs,
            "the mean was taken over the vocabulary too, so it is V times too small: sum over "
            "tokens, mean over positions": lambda s, t, T: _kl(
                s, t, T, mean_over=lambda x: x.numel()
            ),
            "divided by the first axis only: every position of every row is one": lambda s, t, T: (
                _kl(s, t, T, mean_over=lambda x: x.shape[0])
            ),
            "that is a sum over positions: the loss would grow with the batch": lambda s, t, T: _kl(
                s, t, T, mean_over=lambda x: 1
            ),
            "the factor T**2 is missing: a higher temperature would mean smaller "
            "gradients": lambda s, t, T: _kl(s, t, T, power=0),
            "times T once is not enough: softening divides the gradient by T "
            "twice": lambda s, t, T: _kl(s, t, T, power=1),
            "only the teacher is softened: both are, or the student learns to be "
            "unsure": lambda s, t, T: _kl(s, t, T, warm=(False, True)),
            "only the student is softened: both are": lambda s, t, T: _kl(
                s, t, T, warm=(True, False)
            ),
            "that is the cross-entropy of p and q: it is KL plus the teacher's own entropy, so it "
            "is not 0 for a perfect student": _cross_entropy,
            **_mixtures(),
        },
    )  # fmt: skip
    _untouched(c, answer, cases[1])
    student, teacher, T = cases[1]
    student.requires_grad_(True)
    loss = c.call(lambda: answer(student, teacher, T))
    c.expect(
        isinstance(loss, torch.Tensor) and loss.requires_grad,
        "no gradient reaches the student: keep the loss a tensor, without detach or item()",
    )
    (grad,) = torch.autograd.grad(loss, student)
    positions = student[..., 0].numel()
    want = T * ((student / T).softmax(-1) - (teacher / T).softmax(-1)).detach() / positions
    c.close(grad, want, rtol=1e-3, atol=1e-6, given="the gradient with respect to the student")


def _left(L, rounds):
    layers = list(range(L))
    for gone in rounds:
        layers = [layer for i, layer in enumerate(layers) if i not in gone]
    return layers


def _shifted(L, rounds):
    gone = []
    for indices in rounds:
        gone += [i + len(gone) for i in indices]
    return [i for i in range(L) if i not in gone]


def _one_by_one(L, rounds):
    layers = list(range(L))
    for gone in rounds:
        for i in gone:
            del layers[i]
    return layers


@exercise(
    "7.6",
    title="Which layers are left?",
    minutes=8,
    trains="indices that shift when something before them goes",
    hints=(
        "After the first round the model has fewer layers, counted from 0 again. So keep a list of "
        "whose layer each of them is.",
        "Start with list(range(L)). A round's indices are positions in that list.",
        "Within a round all indices count before anything is removed: build a new list of those "
        "that stay, rather than deleting one after the other.",
    ),
)
def _(answer, c):
    cases = [
        (6, [[1, 2], [1]]),
        (5, []),
        (9, [[0, 3, 5]]),
        (c.int(12, 16), [[0, *sorted(c.ints(3, low=2, high=8))], [1, 3, 4], [0, 2]]),
        (c.int(20, 30), [sorted(c.ints(4, low=0, high=12)), sorted(c.ints(4, low=0, high=12))]),
    ]
    c.like(
        answer,
        _left,
        cases,
        wrong={
            "all rounds were read as the teacher's numbers: after the first round the layers are "
            "counted anew": lambda L, rounds: [
                i for i in range(L) if not any(i in gone for gone in rounds)
            ],
            "within a round you deleted one after the other, so that later indices hit the next "
            "layer: they all count before the round": _one_by_one,
            "those are the layers that went": lambda L, rounds: [
                i for i in range(L) if i not in _left(L, rounds)
            ],
            "that is how they are counted in the student: say which of the teacher's layers they "
            "are": lambda L, rounds: list(range(len(_left(L, rounds)))),
            "later rounds were only shifted by how many layers are gone: an index moves by the "
            "layers gone *before* it": lambda L, rounds: _shifted(L, rounds),
            "only the first round was carried out": lambda L, rounds: _left(L, rounds[:1]),
        },
    )
    _untouched(c, answer, cases[3])
