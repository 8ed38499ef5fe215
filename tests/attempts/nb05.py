"""Known-wrong answers to notebook 05 and the message each must get."""

import math

import torch
import torch.nn.functional as nnf


def _ssm(decay=None, taken=None, late=False):
    """An answer to 5.1 put together from its parts."""

    def answer(a_Z, b_Z, c_Z, delta, u_T):
        keep_Z = decay(a_Z, delta) if decay else torch.exp(delta * a_Z)
        enter_Z = taken(a_Z, b_Z, delta) if taken else (torch.exp(delta * a_Z) - 1) / a_Z * b_Z
        x_Z, y = torch.zeros_like(a_Z), []
        for u in u_T:
            new_Z = keep_Z * x_Z + enter_Z * u
            y.append((c_Z * (x_Z if late else new_Z)).sum())
            x_Z = new_Z
        return torch.stack(y)

    return answer


def _mamba(biases=1, sign=-1.0, in_place=False, log=False):
    def answer(u_BE, dt_BE, dt_bias_E, A_log_EZ, B_BZ, C_BZ, state_BEZ):
        delta_BE = nnf.softplus(dt_BE + biases * dt_bias_E)
        A_EZ = A_log_EZ if log else sign * A_log_EZ.exp()
        decay_BEZ = torch.exp(delta_BE[..., None] * A_EZ)
        taken_BEZ = (delta_BE * u_BE)[..., None] * B_BZ[:, None]
        if in_place:
            state_BEZ *= decay_BEZ
            state_BEZ += taken_BEZ
        else:
            state_BEZ = decay_BEZ * state_BEZ + taken_BEZ
        return (state_BEZ * C_BZ[:, None]).sum(-1), state_BEZ

    return answer


def _linear(in_place=False, first_read=False, normed=True, newest=False, keep=True, count=True):
    def answer(q_BNM, k_BNM, v_BNH, kv_BNMH, sum_BNM):
        old = kv_BNMH, sum_BNM
        pair_BNMH = k_BNM[..., :, None] * v_BNH[..., None, :]
        if in_place:
            kv_BNMH += pair_BNMH
            sum_BNM += k_BNM
        else:
            kv_BNMH = kv_BNMH + pair_BNMH if keep else pair_BNMH
            sum_BNM = sum_BNM + k_BNM
        kv, total = old if first_read else (kv_BNMH if keep else old[0] + pair_BNMH, sum_BNM)
        read_BNH = torch.einsum("bnm,bnmh->bnh", q_BNM, kv)
        weight_BN1 = (q_BNM * (k_BNM if newest else total)).sum(-1, keepdim=True)
        out_BNH = read_BNH / weight_BN1 if normed else read_BNH
        return out_BNH, kv_BNMH, sum_BNM if count else old[1]

    return answer


def _uncover(score, open_T=lambda tokens_T, mask_id: tokens_T == mask_id):
    def answer(tokens_T, logits_TV, count, mask_id):
        rank_T = score(logits_TV).masked_fill(~open_T(tokens_T, mask_id), -torch.inf)
        chosen = rank_T.topk(count).indices
        filled_T = tokens_T.clone()
        filled_T[chosen] = logits_TV.argmax(-1)[chosen]
        return filled_T

    return answer


def _sure(logits_TV):
    return logits_TV.softmax(-1).max(-1).values


def _uncover_all(tokens_T, logits_TV, count, mask_id):
    return torch.where(tokens_T == mask_id, logits_TV.argmax(-1), tokens_T)


def _per_token(K, H, width):
    return 2 * K * H * width


def _bias_into_dt(u_BE, dt_BE, dt_bias_E, *rest):
    dt_BE += dt_bias_E
    return _mamba()(u_BE, dt_BE, torch.zeros_like(dt_bias_E), *rest)


def _spoils_a_key(q_BNM, k_BNM, *rest):
    right = _linear()(q_BNM, k_BNM, *rest)
    k_BNM.zero_()
    return right


ATTEMPTS = [
    ("5.1", "Euler's B", _ssm(taken=lambda a, b, d: d * b), "Euler's rule (Mamba's)"),
    ("5.1", "b as it is", _ssm(taken=lambda a, b, d: b), "it too must be discretised"),
    ("5.1", "Euler's A", _ssm(decay=lambda a, d: 1 + d * a), "the exact exponential"),
    ("5.1", "a as it is", _ssm(decay=lambda a, d: a), "a rate, for continuous time"),
    ("5.1", "reads too early", _ssm(late=True), "before the token has entered"),
    ("5.1", "wrong sign", _ssm(decay=lambda a, d: torch.exp(-d * a)), "negative already"),
    ("5.2", "bias twice", _mamba(biases=2), "added twice"),
    ("5.2", "no bias", _mamba(biases=0), "the bias is gone"),
    ("5.2", "grows", _mamba(sign=1.0), "the state grows"),
    ("5.2", "forgets the logarithm", _mamba(log=True), "A_log is a logarithm"),
    ("5.2", "only no longer in place", _mamba(biases=2, sign=1.0), "both are still there"),
    ("5.2", "in place", _mamba(in_place=True), "has changed"),
    ("5.2", "bias written into dt", _bias_into_dt, "has changed"),
    ("5.2", "y only", lambda *a: _mamba()(*a)[0], "expected tuple or list"),
    ("5.3", "spoils a key", _spoils_a_key, "has changed"),
    ("5.3", "in place", _linear(in_place=True), "has changed"),
    ("5.3", "reads first", _linear(first_read=True), "it sees itself"),
    ("5.3", "no normaliser", _linear(normed=False), "don't add up to 1"),
    ("5.3", "newest key only", _linear(newest=True), "only the newest key"),
    ("5.3", "drops the past", _linear(keep=False), "the past was dropped"),
    ("5.3", "sum not carried", _linear(count=False), "sum_BNM comes back as it was"),
    ("5.3", "two values", lambda *a: _linear()(*a)[:2], "it returns 2 values"),
    (
        "5.4",
        "keys only",
        lambda K, H, s, n, w=2: (n - 1) * s // (K * H * w) + 1,
        "a factor of 2 is missing",
    ),
    (
        "5.4",
        "all layers",
        lambda K, H, s, n, w=2: n * s // _per_token(K, H, w) + 1,
        "only every - 1 hold a state",
    ),
    (
        "5.4",
        "one state",
        lambda K, H, s, n, w=2: s // _per_token(K, H, w) + 1,
        "against a single state",
    ),
    (
        "5.4",
        "one too few",
        lambda K, H, s, n, w=2: (n - 1) * s // _per_token(K, H, w),
        "one token more",
    ),
    (
        "5.4",
        "16 bits for ever",
        lambda K, H, s, n, w=2: (n - 1) * s // _per_token(K, H, 2) + 1,
        "right in 16 bits only",
    ),
    (
        "5.4",
        "a fraction",
        lambda K, H, s, n, w=2: (n - 1) * s / _per_token(K, H, w),
        "no whole number of tokens",
    ),
    (
        "5.4",
        "rounds up",
        lambda K, H, s, n, w=2: math.ceil((n - 1) * s / _per_token(K, H, w)),
        "rounding up is not enough",
    ),
    ("5.5", "fills all", _uncover_all, "only count of them"),
    (
        "5.5",
        "known tokens too",
        _uncover(_sure, lambda tokens_T, mask_id: tokens_T >= 0),
        "a known token was chosen",
    ),
    ("5.5", "compares logits", _uncover(lambda x: x.max(-1).values), "its own offset"),
    (
        "5.5",
        "left to right",
        _uncover(lambda x: -torch.arange(len(x), dtype=torch.float32)),
        "that is autoregression",
    ),
    ("5.5", "least sure", _uncover(lambda x: -_sure(x)), "least sure positions"),
    ("5.5", "nothing", lambda tokens_T, *rest: tokens_T, "nothing was uncovered"),
]
