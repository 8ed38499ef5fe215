"""The formulas of tensor parallelism, against enumeration, the whole model, and each other."""

import math
from dataclasses import replace

import pytest
import sympy

from lecture_util.model.config import PUBLISHED
from lecture_util.parallel.sharding import ShardError
from lecture_util.parallel.step_time import (
    LINKS,
    Link,
    rank_cache_bytes,
    rank_weight_bytes,
    sharded_step,
)
from lecture_util.parallel.traffic import Traffic, forward_traffic, vocabulary_rows
from lecture_util.roofline.accounting import (
    kv_bytes_per_token,
    kv_cache_bytes,
    params_by_part,
    weight_bytes,
)
from lecture_util.roofline.hardware import ACCELERATORS
from lecture_util.roofline.step_time import decode_step
from lecture_util.roofline.symbolic import symbolic_config, symbols

LLAMA, H100 = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"]


def ring_all_reduce(parts):
    """Sum M lists, cut in M pieces, around a ring. -> the M results, pieces sent by each rank."""
    M = len(parts)
    held, sent = [list(part) for part in parts], [0] * M
    for step in range(2 * (M - 1)):
        moved = []
        for rank in range(M):
            piece = (rank - step) % M if step < M - 1 else (rank + 1 - (step - M + 1)) % M
            moved.append(((rank + 1) % M, piece, held[rank][piece]))
            sent[rank] += 1
        for to, piece, value in moved:
            held[to][piece] = value + held[to][piece] if step < M - 1 else value
    return held, sent


@pytest.mark.parametrize("M", [1, 2, 3, 5, 8])
def test_a_ring_sends_what_the_formula_says(M):
    parts = [[10**rank * (piece + 1) for piece in range(M)] for rank in range(M)]
    results, sent = ring_all_reduce(parts)
    assert results == [[sum(column) for column in zip(*parts, strict=True)]] * M
    piece_bytes = 48
    traffic = Traffic({"all_reduce": 1}, {"all_reduce": M * piece_bytes})
    assert {pieces * piece_bytes for pieces in sent} == {traffic.sent_bytes(M)}
    gathered = Traffic({"all_gather": 1}, {"all_gather": M * piece_bytes})
    assert gathered.sent_bytes(M) == (M - 1) * piece_bytes


def test_a_step_of_llama_2_13b_on_eight():
    """By hand: 40 layers, two sums of 5120 numbers each, one for the embedding; 32000 scores."""
    traffic = forward_traffic(LLAMA, B=1, T=1, M=8)
    assert traffic.counts == {"all_reduce": 2 * 40 + 1, "all_gather": 1}
    assert traffic.nbytes == {"all_reduce": 81 * 5120 * 2, "all_gather": 32000 * 2}
    assert (traffic.messages, traffic.payload_bytes) == (82, 893_440)
    assert traffic.sent_bytes(8) == 2 * 7 / 8 * 829_440 + 7 / 8 * 64_000


def test_messages_depend_on_layers_only_and_bytes_on_tokens():
    assert {
        forward_traffic(LLAMA, B, T, M).messages for B in (1, 64) for T in (1, 99) for M in (2, 8)
    } == {82}
    one = forward_traffic(LLAMA, 1, 1, 8)
    assert forward_traffic(LLAMA, 3, 7, 8).payload_bytes == 21 * one.payload_bytes
    last = forward_traffic(LLAMA, 3, 7, 8, logits_for=1)
    assert last.nbytes == {"all_reduce": 21 * 829_440, "all_gather": 3 * 64_000}


def test_symbols_give_the_algebra_of_the_same_numbers():
    c = symbolic_config()
    B, T, M, beta, wait, wire = symbols("B T M beta t_wait beta_link")
    values = {getattr(c, letter): getattr(LLAMA, letter) for letter in "DFKGHLV"}
    values |= {B: 16, T: 1, M: 8, beta: 3.35e12, wait: 1e-5, wire: 450e9}
    algebra = forward_traffic(c, B, T, M)
    numbers = forward_traffic(LLAMA, 16, 1, 8)
    assert algebra.messages == 2 * c.L + 2
    assert float(algebra.sent_bytes(M).subs(values)) == numbers.sent_bytes(8)
    link = Link("any", 1e-5, 450e9, "assumed")
    step = sharded_step(c, B, 1024, beta, M, Link("any", wait, wire, ""))
    number = sharded_step(LLAMA, 16, 1024, H100, 8, link)
    assert math.isclose(step.latency_s.subs(values), number.latency_s, rel_tol=1e-12)
    assert sympy.simplify(rank_weight_bytes(c, 1) - weight_bytes(c)) == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_rank_is_the_roofline_of_the_whole_model(name):
    c = PUBLISHED[name]
    step, whole = sharded_step(c, 4, 100, H100, 1), decode_step(c, 4, 100, H100)
    assert step.latency_s == whole.latency_s and step.fits == whole.fits
    assert step.weight_bytes + step.cache_bytes == whole.memory_bytes
    assert step.waiting_s == step.sending_s == step.sent_bytes == 0


@pytest.mark.parametrize("name", ["llama-2-13b", "llama-2-70b", "smollm2-1.7b"])
def test_the_shards_together_are_the_model_and_the_norms_again_on_each(name):
    c = PUBLISHED[name]
    norms = 2 * params_by_part(c)["norms"]
    for M in (2, 4, 8):
        together = sum(rank_weight_bytes(c, M, rank=rank) for rank in range(M))
        assert together == weight_bytes(c) + (M - 1) * norms
        assert M * rank_cache_bytes(c, 3, 7, M) == kv_cache_bytes(c, 3, 7)


def test_kv_heads_that_are_fewer_than_the_ranks_are_held_twice():
    c = PUBLISHED["llama-2-70b"]  # K=8
    assert rank_cache_bytes(c, 1, 10, 16) == rank_cache_bytes(c, 1, 10, 8)
    together = sum(rank_weight_bytes(c, 16, rank=rank) for rank in range(16))
    again = 8 * 2 * c.L * 2 * c.H * c.D + 15 * 2 * params_by_part(c)["norms"]
    assert together == weight_bytes(c) + again


def test_notebook_03s_formula_is_what_remains_of_an_endless_link():
    B, S, M, wait_s = 16, 1024, 8, 10e-6
    link = Link("endless", wait_s, math.inf, "assumed")
    step = sharded_step(LLAMA, B, S, H100, M, link)
    weights, each = weight_bytes(LLAMA), S * kv_bytes_per_token(LLAMA)
    theirs = (weights + B * each) / M / H100.bandwidth_bytes_per_s + 2 * LLAMA.L * wait_s
    norms = 2 * params_by_part(LLAMA)["norms"] * (1 - 1 / M) / H100.bandwidth_bytes_per_s
    assert math.isclose(step.latency_s, theirs + 2 * wait_s + norms, rel_tol=1e-12)


def test_a_vocabulary_that_does_not_divide_is_dealt_from_the_first_rank_on():
    assert [vocabulary_rows(23, 3, rank) for rank in range(3)] == [8, 8, 7]
    assert [vocabulary_rows(4, 3, rank) for rank in range(3)] == [2, 2, 0]
    odd = replace(LLAMA, V=32_001)
    assert forward_traffic(odd, 1, 1, 8).nbytes["all_gather"] == 8 * 4001 * 2  # filled up


ALL_REDUCE, BROADCAST = (Traffic({kind: 1}, {kind: 8}) for kind in ("all_reduce", "broadcast"))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: forward_traffic("llama-2-13b", 1, 1, 2), TypeError, "a name: pass the shape"),
        (lambda: forward_traffic(LLAMA, 1, 1, 0), ValueError, "M is 0"),
        (lambda: forward_traffic(LLAMA, 1, 3, 2, logits_for=5), ValueError, "of T=3 positions"),
        (lambda: rank_weight_bytes(LLAMA, 0), ValueError, "M is 0"),
        (lambda: rank_weight_bytes(LLAMA, 4, rank=4), ValueError, "rank is 4: .* are 0 to 3"),
        (lambda: rank_weight_bytes(LLAMA, 4, rank=-1), ValueError, "rank is -1"),
        (lambda: rank_weight_bytes(LLAMA, 4, rank=1.5), ValueError, "rank is 1.5"),
        (lambda: rank_weight_bytes(LLAMA, 3), ShardError, "K=40 KV heads cannot be dealt to M=3"),
        (lambda: rank_cache_bytes(LLAMA, 1, 9, 3), ShardError, "K=40 KV heads"),
        (lambda: sharded_step(LLAMA, 1, 9, H100, 3), ShardError, "K=40 KV heads"),
        (lambda: sharded_step(None, 1, 9, H100, 2), TypeError, "config=None: expected a Config"),
        (lambda: sharded_step(LLAMA, 1, 1, -1, 2), ValueError, "accelerator is -1"),
        (lambda: sharded_step(LLAMA, 1, 1, H100, 2, "nvlink4"), TypeError, r"LINKS\['nvlink4'\]"),
        (lambda: sharded_step(LLAMA, 1, 1, H100, 2, None), TypeError, "link is None"),
        (lambda: Link("x", -1, 5, "y"), ValueError, "latency_s is -1"),
        (lambda: Link("x", math.inf, 5, "y"), ValueError, "latency_s is inf"),
        (lambda: Link("x", 0, -5, "y"), ValueError, "bandwidth_bytes_per_s is -5"),
        (lambda: Link("x", 0, 0, "y"), ValueError, "bandwidth_bytes_per_s is 0"),
        (lambda: ALL_REDUCE.sent_bytes(-3), ValueError, "M is -3"),
        (lambda: BROADCAST.sent_bytes(2), ValueError, "no ring formula for broadcast"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_one_rank_has_nobody_to_write_to():
    assert forward_traffic(LLAMA, 3, 7, 1) == Traffic()
    assert (Traffic().messages, Traffic().payload_bytes, Traffic().sent_bytes(1)) == (0, 0, 0)


def test_every_link_has_its_source():
    for link in LINKS.values():
        assert link.source and link.latency_s > 0 and link.bandwidth_bytes_per_s > 0
