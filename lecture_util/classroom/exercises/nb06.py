"""Checks of notebook 06: quantization."""

import functools
import math

import torch

from lecture_util.classroom.checker import Wrong
from lecture_util.classroom.exercise import exercise


def _watched(answer):
    """The answer; what it is given must be as it was when it returns."""
    if not callable(answer):
        return answer

    @functools.wraps(answer)
    def watched(*args):
        before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        got = answer(*args)
        for now, was in zip(args, before, strict=True):
            if isinstance(now, torch.Tensor) and not torch.equal(now, was):
                raise Wrong(
                    "a tensor that was passed in has changed: make new ones, since what you were "
                    "given is still needed"
                )
        return got

    return watched


def _e4m3(code, *, bias=7, mantissa_bits=3, subnormal="step", top="finite", signed=True):
    """The definition with one thing wrong at a time."""
    exponent_bits = 7 - mantissa_bits
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    sign = -1.0 if signed and code >> 7 else 1.0
    if exponent == 2**exponent_bits - 1:
        if top == "ieee":
            return math.nan if mantissa else sign * math.inf
        if top == "finite" and mantissa == 2**mantissa_bits - 1:
            return math.nan
    share = mantissa / 2**mantissa_bits
    if exponent == 0 and subnormal != "leading one":
        return sign * 2.0 ** ((1 if subnormal == "step" else 0) - bias) * share
    return sign * 2.0 ** (exponent - bias) * (1 + share)


@exercise(
    "6.1",
    title="Read eight bits",
    minutes=12,
    trains="sign, exponent, mantissa, and the codes that are different",
    hints=(
        "Take the code apart first: code >> 7 is the sign, (code >> 3) & 15 the exponent, code & 7 "
        "the mantissa. Which two exponents are not like the others?",
        "Exponent 0 has no leading one, and the scale of exponent 1: these numbers go on down to "
        "zero in equal steps.",
        "Exponent 15 is an ordinary one in e4m3. Only all ones, exponent 15 with mantissa 7, is "
        "NaN: float('nan').",
    ),
)
def _(answer, c):
    normal = [8 * c.int(1, 14) + c.int(0, 7) for _ in range(4)]
    small = c.ints(3, 1, 7)
    codes = [*normal, c.int(0x88, 0xF0), *small, 0x80 + c.int(1, 7), 0]
    codes += [0x78 + c.int(0, 5), 0x7E, 0xFE, 0x7F, 0xFF]
    c.like(
        answer,
        _e4m3,
        [(code,) for code in codes],
        rtol=1e-12,
        wrong={
            "with exponent 0 there is no leading one: these are the subnormals, which step down to "
            "zero": lambda n: _e4m3(n, subnormal="leading one"),
            "the subnormals are half of what they should be: exponent 0 has the scale of "
            "exponent 1": lambda n: _e4m3(n, subnormal="half"),
            "your largest number is 240, as by IEEE's rule: e4m3 has no infinities and keeps "
            "exponent 15 for numbers": lambda n: _e4m3(n, top="ieee"),
            "a bias of 8 belongs to the fnuz variant, which ends at 240: here it is "
            "7": lambda n: _e4m3(n, bias=8),
            "that is a bias of 8, the fnuz variant's, with its NaN elsewhere": lambda n: (
                _e4m3(n, bias=8, top="none")
            ),
            "all ones, 0x7f and 0xff, are no number: 480 would be next, and its code is "
            "NaN's": lambda n: _e4m3(n, top="none"),
            "the sign bit is not read": lambda n: _e4m3(n, signed=False),
            "that is e5m2: 5 bits of exponent, bias 15": lambda n: _e4m3(
                n, bias=15, mantissa_bits=2, top="ieee"
            ),
            "2 to the power of the exponent, less the bias: 7 is missing": lambda n: _e4m3(
                n, bias=0
            ),
        },
    )  # fmt: skip
    c.expect(
        math.copysign(1.0, c.call(answer, 0x80)) == -1,
        "the code 0x80 is -0.0, you return 0.0: a zero has a sign as well",
    )


def _groups(w_FD, bits, size, *, largest=None, round_=torch.round, top=None, dead=1.0):
    """Group by group, in a loop."""
    F, D = w_FD.shape
    largest = 2 ** (bits - 1) - 1 if largest is None else largest(bits)
    codes_FD = torch.zeros(F, D, dtype=torch.int8)
    scale_FJ = torch.full((F, D // size), dead, dtype=w_FD.dtype)
    for f in range(F):
        for j in range(D // size):
            at = slice(j * size, (j + 1) * size)
            group = w_FD[f, at]
            most = group.abs().max() if top is None else top(w_FD, f, at)
            if most != 0:
                scale_FJ[f, j] = most / largest
                codes_FD[f, at] = round_(group / scale_FJ[f, j]).to(torch.int8)
    return codes_FD, scale_FJ


@exercise(
    "6.2",
    title="Absmax by groups",
    minutes=12,
    trains="one scale for each group, and groups that are zero",
    hints=(
        "Give the columns two axes, group and place in the group: w_FD.unflatten(1, (-1, size)). "
        "Then one reduction makes all scales.",
        "The largest code is 2^(bits-1) - 1 on both sides. The scale is the group's largest "
        "magnitude over that code.",
        "A group of zeros has a scale of 0, and 0/0 is NaN: put 1 where the scale is 0, before "
        "you divide. Last, round, put groups together again and cast to int8.",
    ),
)
def _(answer, c):
    cases = []
    for bits, size, J in ((4, c.int(5, 9), 3), (3, 4, c.int(2, 5)), (8, 1, 3), (4, c.int(6, 9), 1)):
        w_FD = c.randn(c.int(3, 6), size * J).double()
        cases.append((w_FD, bits, size))
    dead = c.randn(4, 18).double()
    dead[1, 6:12], dead[3] = 0, 0
    cases.append((dead, 4, 6))
    answer = _watched(answer)
    for given in (cases[0], cases[-1]):
        got = c.call(answer, *given)
        c.expect_type(got, (tuple, list), "what it returns")
        c.expect(len(got) == 2, f"it returns {len(got)} values, expected codes and scales")
        c.expect_type(got[0], torch.Tensor, "codes_FD")
        c.expect(
            got[0].dtype == torch.int8,
            f"codes_FD, the first of the two, has dtype {got[0].dtype}, expected torch.int8",
        )
        c.expect_type(got[1], torch.Tensor, "scale_FJ")
        c.expect(
            got[1].isfinite().all() and (got[1] != 0).all(),
            "a group of zeros got a scale of 0 or NaN, and 0/0 is no code: let its scale be 1",
        )
    c.like(
        answer,
        _groups,
        cases,
        rtol=1e-9,
        wrong={
            "that is one scale a row: each group of `size` neighbours has its own": lambda *a: (
                _groups(*a, top=lambda w, f, at: w[f].abs().max())
            ),
            "your groups run down the columns: neighbours in a row share a scale": lambda w, b, s: (
                tuple(part.T for part in _groups(w.T, b, s))
            ),
            "the largest code is 2^(bits-1) - 1: with 2^(bits-1) the largest weight does not fit "
            "into the signed range": lambda *a: _groups(*a, largest=lambda b: 2 ** (b - 1)),
            "2^bits - 1 is the largest code without a sign: here half of the codes are "
            "negative": lambda *a: _groups(*a, largest=lambda b: 2**b - 1),
            "your codes are cut off, not rounded: the error can reach a whole step instead of "
            "half": lambda *a: _groups(*a, round_=torch.trunc),
            "your codes are rounded down: to the nearest, please": lambda *a: _groups(
                *a, round_=torch.floor
            ),
            "you took the largest value, not the largest magnitude: a group's most negative weight "
            "may be larger": lambda *a: _groups(*a, top=lambda w, f, at: w[f, at].max()),
        },
    )


def _wrapped(codes, w_codes):
    """The product, if sums are kept in int8."""
    return (codes @ w_codes + 128) % 256 - 128


def _product(x_TD, codes_FD, absmax_F, w_FD, threshold, *, split=True, over=None, by="column",
             scaled=127**2, apart=True, from_codes=False, one=False, round_=torch.round,
             times=torch.matmul, fresh=False):  # fmt: skip
    """LLM.int8(), in exact integers; keywords are ways to get it wrong."""
    if fresh:
        absmax_F = w_FD.abs().amax(1)
        codes_FD = (w_FD / absmax_F[:, None] * 127).round()
    large_TD = x_TD.abs() > threshold if over == "more" else x_TD.abs() >= threshold
    large_TD = x_TD >= threshold if over == "signed" else large_TD
    elements_TD = x_TD.masked_fill(large_TD, 0)
    if not split:
        large_TD = torch.zeros_like(large_TD)
    if by == "column":
        large_TD = large_TD.any(0, keepdim=True).expand_as(large_TD)
    inside_TD = x_TD.masked_fill(large_TD, 0)
    counted_TD = {"all": x_TD, "elements": elements_TD}.get(over, inside_TD)
    absmax_T1 = counted_TD.abs().amax(1, keepdim=True)
    absmax_T1 = absmax_T1.amax().expand_as(absmax_T1) if one else absmax_T1
    x_codes = round_(inside_TD / absmax_T1.clamp(min=1e-30) * 127)
    out_TF = times(x_codes.double(), codes_FD.double().T) * absmax_T1 * absmax_F / scaled
    if apart:
        w_FD = codes_FD * absmax_F[:, None] / 127 if from_codes else w_FD
        out_TF = out_TF + x_TD.masked_fill(~large_TD, 0).double() @ w_FD.double().T
    return out_TF.float()


@exercise(
    "6.3",
    title="LLM.int8(), the product",
    minutes=15,
    trains="splitting by columns, and which scale belongs where",
    hints=(
        "Which columns of x hold a magnitude of `threshold` or more, in any row? Make one mask of "
        "D booleans, and set those columns of x to 0 for the int8 part.",
        "Scales of x: a row's largest magnitude of what is left. Codes times codes: convert to "
        "int32 (or float64) first, since int8 holds 127 and one product is 16,129. Then times "
        "absmax_T and absmax_F, over 127^2.",
        "Add x[:, columns] @ w[:, columns].T. A row that was nothing but outliers has an absmax of "
        "0: clamp it before dividing.",
    ),
)
def _(answer, c):
    cases = []
    for T, D, F, large in ((5, 24, 7, 2), (1, 33, 4, 1), (6, 17, 5, 0), (4, 12, 3, 3)):
        threshold = 6.0 if large != 3 else c.float(3.0, 4.0)
        x_TD, w_FD = c.randn(T, D).clamp(-2.5, 2.5), 0.3 * c.randn(F, D)
        columns = c.ints(large, 0, D - 1) if large else []
        for i, column in enumerate(columns):
            x_TD[:, column] *= 0.01
            x_TD[c.int(0, T - 1), column] = (-1) ** i * c.float(20, 60)
        if columns:  # one that just reaches it, the only one of its column
            x_TD[:, columns[0]] *= 0.01
            at = c.int(0, T - 1)
            x_TD[at, columns[0]] = -threshold
            if T > 1:  # and one below it, the largest of its row that is no outlier itself
                x_TD[(at + 1) % T, columns[0]] = 0.8 * threshold
        if T == 6:
            x_TD[2] = 0
        absmax_F = c.float(1.05, 1.3) * w_FD.abs().amax(1)  # not the best: they are to be used
        codes_FD = (w_FD / absmax_F[:, None] * 127).round().to(torch.int8)
        cases.append((x_TD, codes_FD, absmax_F, w_FD, threshold))
    answer = _watched(answer)
    got = c.call(answer, *cases[2])
    c.expect_type(got, torch.Tensor, "what it returns")
    c.expect(
        not got.isnan().any(),
        "a row of x that holds nothing but zeros gives NaN: its scale is 0, so do not divide by it",
    )
    c.like(
        answer,
        _product,
        cases,
        rtol=1e-4,
        atol=1e-4,
        wrong={
            "that is plain int8, with no column apart": lambda *a: _product(*a, split=False),
            "an element of exactly the threshold counts as an outlier: >=": lambda *a: _product(
                *a, over="more"
            ),
            "the rows' scales still come from all of x: leave the outlier columns out first, or "
            "they stretch every scale as before": lambda *a: _product(*a, over="all"),
            "the rows' scales leave out large elements only, as bitsandbytes does: here the whole "
            "columns set apart do not count": lambda *a: _product(*a, over="elements"),
            "the most negative outliers were missed: it is the magnitude that reaches the "
            "threshold": lambda *a: _product(*a, over="signed"),
            "x was not rounded: its codes are whole numbers, too": lambda *a: _product(
                *a, round_=lambda codes: codes
            ),
            "the sums wrapped around: int8 holds 127 and one product can be 16,129, so convert the "
            "codes first": lambda *a: _product(*a, times=_wrapped),
            "you quantized w_FD yourself: its codes and their scales were made beforehand, use "
            "these": lambda *a: _product(*a, fresh=True),
            "only the large elements were taken out: their whole columns go, so that what is left "
            "is one int8 matrix and one narrow float one": lambda *a: _product(*a, by="element"),
            "the outlier columns are left out and never come back": lambda *a: _product(
                *a, apart=False
            ),
            "outlier columns are multiplied by the int8 weights, as bitsandbytes does: here, by "
            "the float weights": lambda *a: _product(*a, from_codes=True),
            "one scale for all of x: each row has its own": lambda *a: _product(*a, one=True),
            "both scales were put on 127, so divide by 127 twice": lambda *a: _product(
                *a, scaled=127
            ),
            "codes count 127ths: divide the int8 part by 127^2": lambda *a: _product(*a, scaled=1),
        },
    )


def _nf4_bytes(F, D, block=64, group=256, *, up=lambda a, b: -(-a // b), per_byte=2, scale=1,
               second=4, offset=4, rows=False):  # fmt: skip
    n = F * D
    scales = F * up(D, block) if rows else up(n, block)
    return up(n, per_byte) + scale * scales + second * up(scales, group) + offset


@exercise(
    "6.4",
    title="Bytes of a doubly quantized matrix",
    minutes=10,
    trains="deriving what is stored, tails included",
    hints=(
        "Write down the four things that are stored, and how many there are of each.",
        "Blocks run over the flattened matrix, so there are F*D/block scales, rounded up; each is "
        "one byte now. Groups are groups of scales, not of weights.",
        "Then 4 bytes for each group's own scale, and 4 for the mean that was taken off: one of "
        "these for the whole matrix.",
    ),
)
def _(answer, c):
    cases = [
        (c.int(20, 90), 64 * c.int(3, 9), 64, 256),
        (c.int(10, 20), 64, 64, 4),
        (2 * c.int(10, 20) + 1, 2 * c.int(20, 40) + 1, 32, 16),
        (c.int(30, 60), c.int(90, 120), 64, 8),
        (3072, 576, 64, 256),
    ]
    c.like(
        answer,
        _nf4_bytes,
        cases,
        rtol=1e-12,
        wrong={
            "the mean of the scales is stored too, once, in 4 bytes": lambda *a: _nf4_bytes(
                *a, offset=0
            ),
            "there the scales are still in fp32: they take a byte each, and a group of them shares "
            "a scale of 4": lambda F, D, block, group: (
                -(-F * D // 2) + 4 * -(-F * D // block)
            ),
            "the groups' own scales are missing: 4 bytes for every `group` scales": lambda *a: (
                _nf4_bytes(*a, second=0)
            ),
            "a code takes half a byte: two to a byte": lambda *a: _nf4_bytes(*a, per_byte=1),
            "a last block or group that is not full still has its scale: round up": lambda *a: (
                _nf4_bytes(*a, up=lambda n, d: n // d)
            ),
            "no part of a byte can be stored: whole codes, blocks and groups, rounded "
            "up": lambda *a: _nf4_bytes(*a, up=lambda n, d: n / d),
            "your blocks end with each row: here they run over the flattened matrix": lambda *a: (
                _nf4_bytes(*a, rows=True)
            ),
            "groups are of scales, not of weights": lambda F, D, block, group: (
                -(-F * D // 2) + -(-F * D // block) + 4 * -(-F * D // group) + 4
            ),
            "those are bits: 8 of them are a byte": lambda *a: 8 * _nf4_bytes(*a),
            "those are bits, 8 to a byte; and whole codes, blocks and groups, rounded "
            "up": lambda *a: 8 * _nf4_bytes(*a, up=lambda n, d: n / d),
        },
    )  # fmt: skip


def _folded(gate_up_MD, down_DF, s_F, *, gate=False, up=True, power=-1, columns=1):
    F = len(s_F)
    gate_FD, up_FD = gate_up_MD[:F], gate_up_MD[F:]
    s_F1 = (s_F**power)[:, None]
    new_MD = torch.cat((gate_FD * s_F1 if gate else gate_FD, up_FD * s_F1 if up else up_FD))
    return new_MD, down_DF * s_F**columns


@exercise(
    "6.5",
    title="Where does 1/s go?",
    minutes=10,
    trains="finding the mistake: what may be folded through what",
    hints=(
        "Make all of it small: one x, one gate, one up. The layer computes "
        "down * silu(gate x) * up x. Is silu(z / s) the same as silu(z) / s?",
        "down reads a product of two factors. To divide it by s, how many of the factors should be "
        "divided, and which one lets the division through?",
        "The up rows are the second half of gate_up's rows. The gate rows stay as they are.",
    ),
)
def _(answer, c):
    cases = []
    for F, D in ((5, 3), (c.int(6, 12), c.int(3, 7)), (1, 4)):
        s_F = 0.5 + c.randn(F).abs()
        cases.append((c.randn(2 * F, D), c.randn(D, F), s_F))
    answer = _watched(answer)
    got = c.call(answer, *cases[0])
    c.expect_type(got, (tuple, list), "what it returns")
    c.expect(len(got) == 2, f"it returns {len(got)} values, expected gate_up_MD and down_DF")
    c.like(
        answer,
        _folded,
        cases,
        rtol=1e-5,
        atol=1e-6,
        wrong={
            "gate and up are still both divided: their product is divided by s twice, and silu "
            "lets no factor through": lambda *a: _folded(*a, gate=True),
            "you divided the gate: silu(z/s) is not silu(z)/s, so the division does not come "
            "through": lambda *a: _folded(*a, gate=True, up=False),
            "up is multiplied by s, and down too: one of them has to undo the other": lambda *a: (
                _folded(*a, power=1)
            ),
            "the other way round: AWQ enlarges the weights that are rounded, down's columns, and "
            "shrinks what they meet": lambda *a: _folded(*a, power=1, columns=-1),
            "up and down are both divided: down's columns take the factor s": lambda *a: _folded(
                *a, columns=-1
            ),
            "that is the layer as it was: down's columns times s, please, and something before "
            "them divided by it": lambda *a: _folded(*a, up=False, columns=0),
            "nothing is divided: down's columns are s times as large, and so is its output": (
                lambda *a: _folded(*a, up=False)
            ),
            "down is as it was: its columns take the factor s": lambda *a: _folded(*a, columns=0),
            "gate and up each divided by the root of s: silu is not linear, so its argument must "
            "not change": lambda *a: _folded(*a, gate=True, power=-0.5),
        },
    )  # fmt: skip


def _faster(linear, other, bits, cache_bytes):
    before = 2 * (linear + other) + cache_bytes
    return before / (linear * bits / 8 + 2 * other + cache_bytes)


@exercise(
    "6.6",
    title="How many times as fast?",
    minutes=8,
    trains="predicting a speed-up from bytes",
    hints=(
        "A decode step reads all weights once and the cache once. Count the bytes of both steps.",
        "What is not quantized takes 2 bytes a number before and after; the cache is read in "
        "either case.",
        "(bytes before) / (bytes after), with bits / 8 bytes for a weight of the linear layers.",
    ),
)
def _(answer, c):
    cases = [
        (106_168_320, 28_350_000, 4.5, 0),
        (c.int(5, 9) * 10**9, c.int(2, 9) * 10**8, c.float(3.2, 4.8), 0),
        (c.int(5, 9) * 10**9, c.int(2, 9) * 10**8, c.float(3.2, 4.8), c.int(1, 9) * 10**9),
        (c.int(5, 9) * 10**9, 0, 8.0, c.int(10, 60) * 10**9),
    ]
    c.like(
        answer,
        _faster,
        cases,
        rtol=1e-9,
        wrong={
            "16 over the bits is what the linear layers shrink by: other weights and the cache are "
            "read as before": lambda n, other, bits, cache: 16 / bits,
            "the cache is read in either step": lambda n, other, bits, cache: _faster(
                n, other, bits, 0
            ),
            "embedding, head and norms stay in 16 bits": lambda n, other, bits, cache: _faster(
                n + other, 0, bits, cache
            ),
            "embedding, head and norms (`other`) are read in either step, like the "
            "cache": lambda n, other, bits, cache: _faster(n, 0, bits, cache),
            "the cache does not shrink along: it stays as it is": lambda n, other, bits, cache: (
                (2 * (n + other) + cache) / (n * bits / 8 + 2 * other + cache * bits / 16)
            ),
            "`bits` are bits, the rest bytes: 8 bits are a byte": lambda n, other, bits, cache: (
                (2 * (n + other) + cache) / (n * bits + 2 * other + cache)
            ),
            "that is the share of time that is left: how many times as fast is its "
            "inverse": lambda *a: 1 / _faster(*a),
            "cache_bytes are bytes, the others bits: a byte is 8": lambda n, other, bits, cache: (
                (16 * (n + other) + cache) / (n * bits + 16 * other + cache)
            ),
            "16 bits are 2 bytes: your model starts from 4 bytes a weight": lambda n, other, bits,
            cache: (4 * (n + other) + cache) / (n * bits / 8 + 4 * other + cache),
        },
    )  # fmt: skip
