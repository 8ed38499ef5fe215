"""Known-wrong answers to notebook 06 and the message each must get."""

import math

import torch

from lecture_util.quantization.formats import decode


def _read(small=None, top=None, bias=7):
    def answer(code):
        sign = -1.0 if code >= 128 else 1.0
        exponent, mantissa = code // 8 % 16, code % 8
        if exponent == 15 and top is not None:
            return top(sign, mantissa)
        if exponent == 15 and mantissa == 7:
            return float("nan")
        if exponent == 0 and small is not None:
            return sign * small(mantissa)
        return sign * (1 + mantissa / 8) * 2.0 ** (exponent - bias)

    return answer


def _step_down(mantissa):
    return mantissa * 2.0**-9


def _quantize_groups(top=lambda w: w.abs().amax(-1, keepdim=True), largest=None, snap=torch.round,
                     dead=True):  # fmt: skip
    def answer(w_FD, bits, size):
        groups = w_FD.unflatten(1, (-1, size))
        scale = top(groups) / (largest or (lambda b: 2 ** (b - 1) - 1))(bits)
        if dead:
            scale = torch.where(scale == 0, 1, scale)
        codes = snap(groups / scale).flatten(1).to(torch.int8)
        return codes, scale.expand(*groups.shape[:2], 1).squeeze(-1)

    return answer


def _groups_in_place(w_FD, bits, size):
    codes, scale = _quantize_groups()(w_FD, bits, size)
    w_FD.copy_(codes)
    return codes, scale


def _int8(columns=lambda x, t: (x.abs() >= t).any(0), scales=None, per=127**2, floats=None,
          least=1e-9, snap=torch.round, anew=False):  # fmt: skip
    def answer(x_TD, codes_FD, absmax_F, w_FD, threshold):
        apart = columns(x_TD, threshold)
        if anew:
            absmax_F = w_FD.abs().amax(1)
            codes_FD = torch.round(127 * w_FD / absmax_F[:, None])
        inside = torch.where(apart, 0.0, x_TD)
        absmax = (scales or (lambda x, inside: inside.abs().amax(1)))(x_TD, inside)
        absmax = absmax.clamp(min=least)
        codes = snap(127 * inside / absmax[:, None])
        out = codes @ codes_FD.float().T * absmax[:, None] * absmax_F / per
        if floats is not None:
            return out + floats(x_TD, codes_FD, absmax_F, w_FD, apart)
        return out + x_TD[:, apart] @ w_FD[:, apart].T

    return answer


def _int8_wraps(x_TD, codes_FD, absmax_F, w_FD, threshold):
    apart = (x_TD.abs() >= threshold).any(0)
    inside = torch.where(apart, 0.0, x_TD)
    absmax = inside.abs().amax(1).clamp(min=1e-9)
    codes = torch.round(127 * inside / absmax[:, None]).to(torch.int8)
    whole = (codes @ codes_FD.T) * absmax[:, None] * absmax_F / 127**2
    return whole + x_TD[:, apart] @ w_FD[:, apart].T


def _int8_element_scales(x_TD, codes_FD, absmax_F, w_FD, threshold):
    """bitsandbytes' scales: small elements of an outlier's column still count."""

    def scales(x, inside):
        return x.masked_fill(x.abs() >= threshold, 0).abs().amax(1)

    return _int8(scales=scales)(x_TD, codes_FD, absmax_F, w_FD, threshold)


def _int8_in_place(x_TD, codes_FD, absmax_F, w_FD, threshold):
    x = x_TD.clone()
    out = _int8()(x, codes_FD, absmax_F, w_FD, threshold)
    x_TD[:, (x.abs() >= threshold).any(0)] = 0
    x_TD += 1e-3
    return out


def _bytes(codes=2, scales=lambda n, F, D, block: math.ceil(n / block), scale=1,
           groups=lambda j, n, g: math.ceil(j / g), mean=4):  # fmt: skip
    def answer(F, D, block=64, group=256):
        n = F * D
        j = scales(n, F, D, block)
        return math.ceil(n / codes) + scale * j + 4 * groups(j, n, group) + mean

    return answer


def _fold(gate=lambda w, s: w, up=lambda w, s: w / s, down=lambda w, s: w * s):
    def answer(gate_up_MD, down_DF, s_F):
        a, b = gate_up_MD.chunk(2)
        return torch.cat((gate(a, s_F[:, None]), up(b, s_F[:, None]))), down(down_DF, s_F)

    return answer


def _fold_in_place(gate_up_MD, down_DF, s_F):
    gate_up_MD[len(s_F) :] /= s_F[:, None]
    return gate_up_MD, down_DF * s_F


ATTEMPTS = [
    ("6.1", "all normal", _read(), "no leading one"),
    ("6.1", "half subnormals", _read(lambda m: m * 2.0**-10), "half of what they should be"),
    (
        "6.1",
        "IEEE",
        _read(_step_down, lambda sign, m: float("nan") if m else sign * math.inf),
        "your largest number is 240",
    ),
    ("6.1", "no NaN", _read(_step_down, lambda s, m: s * 256 * (1 + m / 8)), "480 would be next"),
    ("6.1", "bias 8", _read(lambda m: m * 2.0**-10, bias=8), "fnuz"),
    ("6.1", "unsigned", lambda n: _read(_step_down)(n % 128), "the sign bit is not read"),
    ("6.1", "e5m2", lambda n: decode(n, "e5m2").item(), "that is e5m2"),
    ("6.1", "no -0", lambda n: _read(_step_down)(n) + 0.0, "0x80 is -0.0"),
    ("6.1", "constant", lambda n: 448.0, "expected"),
    ("6.1", "the code itself", float, "expected"),
    (
        "6.2",
        "by rows",
        _quantize_groups(lambda w: w.abs().amax((1, 2), keepdim=True)),
        "one scale a row",
    ),
    ("6.2", "0/0", _quantize_groups(dead=False), "a group of zeros got a scale of 0"),
    ("6.2", "one code too many", _quantize_groups(largest=lambda b: 2 ** (b - 1)), "does not fit"),
    ("6.2", "unsigned", _quantize_groups(largest=lambda b: 2**b - 1), "without a sign"),
    ("6.2", "cut off", _quantize_groups(snap=torch.trunc), "cut off, not rounded"),
    (
        "6.2",
        "largest value",
        _quantize_groups(lambda w: w.amax(-1, keepdim=True)),
        "not the largest magnitude",
    ),
    ("6.2", "writes into w", _groups_in_place, "has changed"),
    ("6.2", "input back", lambda w, b, s: (w, torch.ones(len(w), w.shape[1] // s)), "dtype"),
    ("6.2", "swapped", lambda *a: _quantize_groups()(*a)[::-1], "the first of the two"),
    ("6.2", "codes alone", lambda w, b, s: _quantize_groups()(w, b, s)[0], "expected tuple"),
    ("6.3", "none apart", _int8(lambda x, t: torch.zeros(x.shape[1]).bool()), "plain int8"),
    ("6.3", "more than", _int8(lambda x, t: (x.abs() > t).any(0)), ">="),
    ("6.3", "old scales", _int8(scales=lambda x, inside: x.abs().amax(1)), "stretch every scale"),
    ("6.3", "dropped", _int8(floats=lambda *a: 0.0), "never come back"),
    (
        "6.3",
        "from codes",
        _int8(floats=lambda x, q, s, w, at: x[:, at] @ (q[:, at] * s[:, None] / 127).T),
        "as bitsandbytes does",
    ),
    (
        "6.3",
        "one scale",
        _int8(scales=lambda x, inside: inside.abs().amax().expand(len(x))),
        "each row has its own",
    ),
    ("6.3", "127 once", _int8(per=127), "127 twice"),
    ("6.3", "codes as they are", _int8(per=1), "127^2"),
    ("6.3", "NaN", _int8(least=0.0), "gives NaN"),
    ("6.3", "sums in int8", _int8_wraps, "wrapped around"),
    ("6.3", "element scales", _int8_element_scales, "large elements only"),
    ("6.3", "no abs", _int8(lambda x, t: (x >= t).any(0)), "it is the magnitude"),
    ("6.3", "cut off", _int8(snap=torch.trunc), "expected"),
    ("6.3", "not rounded", _int8(snap=lambda codes: codes), "was not rounded"),
    ("6.3", "weights anew", _int8(anew=True), "you quantized w_FD yourself"),
    ("6.3", "writes into x", _int8_in_place, "what you were given"),
    ("6.4", "no mean", _bytes(mean=0), "the mean of the scales"),
    (
        "6.4",
        "not doubled",
        lambda F, D, block=64, group=256: math.ceil(F * D / 2) + 4 * math.ceil(F * D / block),
        "still in fp32",
    ),
    ("6.4", "no groups", _bytes(groups=lambda j, n, g: 0), "groups' own scales are missing"),
    ("6.4", "a byte a code", _bytes(codes=1), "two to a byte"),
    (
        "6.4",
        "rounds down",
        lambda F, D, block=64, group=256: (
            F * D // 2 + F * D // block + 4 * (F * D // block // group) + 4
        ),
        "round up",
    ),
    (
        "6.4",
        "by rows",
        _bytes(scales=lambda n, F, D, block: F * math.ceil(D / block)),
        "end with each row",
    ),
    ("6.4", "groups of weights", _bytes(groups=lambda j, n, g: math.ceil(n / g)), "not of weights"),
    ("6.4", "bits", lambda *a: 8 * _bytes()(*a), "those are bits"),
    (
        "6.4",
        "bits, not rounded up",
        lambda F, D, b, g: F * D * (4 + 8 / b + 32 / (b * g)) + 32,
        "those are bits, 8",
    ),
    ("6.5", "as it was", _fold(gate=lambda w, s: w / s), "still both divided"),
    (
        "6.5",
        "gate alone",
        _fold(gate=lambda w, s: w / s, up=lambda w, s: w),
        "you divided the gate",
    ),
    ("6.5", "up grows", _fold(up=lambda w, s: w * s), "one of them has to undo"),
    (
        "6.5",
        "the other way",
        _fold(up=lambda w, s: w * s, down=lambda w, s: w / s),
        "the other way round",
    ),
    ("6.5", "nothing divided", _fold(up=lambda w, s: w), "nothing is divided"),
    (
        "6.5",
        "roots",
        _fold(lambda w, s: w / s.sqrt(), lambda w, s: w / s.sqrt()),
        "divided by the root",
    ),
    ("6.5", "writes into gate_up", _fold_in_place, "has changed"),
    ("6.5", "input back", lambda a, b, s: (a, b), "as it was"),
    ("6.5", "both shrink", _fold(down=lambda w, s: w / s), "both divided"),
    ("6.6", "16 over bits", lambda n, o, b, c: 16 / b, "16 over the bits"),
    (
        "6.6",
        "no cache",
        lambda n, o, b, c: 2 * (n + o) / (n * b / 8 + 2 * o),
        "the cache is read",
    ),
    (
        "6.6",
        "everything shrinks",
        lambda n, o, b, c: (2 * (n + o) + c) / ((n + o) * b / 8 + c),
        "stay in 16 bits",
    ),
    (
        "6.6",
        "inverse",
        lambda n, o, b, c: (n * b / 8 + 2 * o + c) / (2 * (n + o) + c),
        "its inverse",
    ),
    (
        "6.6",
        "bits and bytes",
        lambda n, o, b, c: (16 * (n + o) + c) / (n * b + 16 * o + c),
        "a byte is 8",
    ),
    ("6.6", "no other", lambda n, o, b, c: (2 * n + c) / (n * b / 8 + c), "(`other`) are read"),
    (
        "6.6",
        "bits for bytes",
        lambda n, o, b, c: (2 * (n + o) + c) / (n * b + 2 * o + c),
        "8 bits are a byte",
    ),
    (
        "6.6",
        "cache shrinks",
        lambda n, o, b, c: (2 * (n + o) + c) / (n * b / 8 + 2 * o + c * b / 16),
        "does not shrink along",
    ),
]
