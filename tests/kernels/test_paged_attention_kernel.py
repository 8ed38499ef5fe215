"""Paged attention: its definition against a loop in fp64, the Triton kernel against the same loop.

Triton decides when it is imported whether it interprets. So the cases run in a process of their
own, which is this file run as a script, and report how far each result was from the loop.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lecture_util.kernels.paged_attention as module
from lecture_util.kernels.paged_attention import (
    gather_pages,
    page_index,
    paged_attention,
    paged_attention_fused,
    paged_attention_triton,
)
from lecture_util.model.attention import attend
from lecture_util.model.shapes import ShapeError, TensorMismatch

DTYPES = ["float32", "bfloat16", "float16"]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def inputs(
    lengths, P=4, K=2, G=3, H=16, dtype=torch.float32, device="cpu", integers=torch.int64, seed=0
):
    """Pages in random order. Every slot that no sequence owns is NaN; table entries past the pages
    needed are no pages; the tables are a slice of a wider buffer."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // P) for length in lengths]
    J, M = max(needed, default=0) + 1, sum(needed) + 2
    pages = torch.randperm(M, generator=generator).tolist()
    wide = torch.full((len(lengths), J + 3), -1, dtype=integers)
    wide[:, 1::2] = torch.iinfo(integers).max
    used = torch.zeros(M, P, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for s in range(length):
            if s % P == 0:
                wide[b, s // P] = pages.pop()
            used[wide[b, s // P], s % P] = True
    pools = torch.randn(2, M, P, K, H, generator=generator).to(dtype)
    pools[:, ~used] = torch.nan
    q = torch.randn(len(lengths), K * G, H, generator=generator).to(dtype)
    tables, lengths = wide.to(device)[:, :J], torch.tensor(lengths, dtype=integers, device=device)
    return q.to(device), *pools.to(device), tables, lengths


def by_hand(q, k, v, tables, lengths):
    """One sequence, one head and one position after the other, in fp64: out, and what rounding may
    do to it where the kernel computes in fp32, and in q's dtype with the tensor cores."""
    q, k, v = (x.detach().cpu() for x in (q, k, v))
    (B, N, H), (P, K) = q.shape, k.shape[1:3]
    out, bound = torch.zeros(2, B, N, H, dtype=torch.float64)
    fine, eps = torch.finfo(torch.float32).eps, torch.finfo(q.dtype).eps
    for b, length in enumerate(lengths.tolist()):
        if not length:
            continue
        places = [divmod(s, P) for s in range(length)]
        pages = tables[b].tolist()
        keys, values = (
            torch.stack([x[pages[j], slot] for j, slot in places]).double() for x in (k, v)
        )
        for n in range(N):
            head = n // (N // K)
            products = q[b, n].double() * keys[:, head]
            weights = (products.sum(-1) / math.sqrt(H)).exp()
            weights /= weights.sum()
            out[b, n] = weights @ values[:, head]
            score = float(products.abs().sum(-1).max()) / math.sqrt(H)
            relative = 16 * fine * (score + 2)
            if q.dtype != torch.float32:
                relative += eps  # of the weights
            bound[b, n] = relative * (weights @ values[:, head].abs()) + eps * out[b, n].abs()
    return out, bound


def error(result, tensors):
    """In units of what rounding may do: below 1 unless something is wrong."""
    out, bound = by_hand(*tensors)
    assert result.shape == out.shape and result.dtype == tensors[0].dtype
    assert result.is_contiguous()
    difference = (result.detach().cpu().double() - out).abs()
    assert torch.equal(difference[bound == 0], torch.zeros_like(difference[bound == 0]))
    return str(float((difference / bound.clamp(min=1e-300)).max()))  # NaN too must survive JSON


def distance(tensors, **options):
    return error(paged_attention_triton(*tensors, **options), tensors)


LENGTHS = {1: [3, 0, 1, 6], 3: [4, 2, 0, 3, 1, 17], 4: [5, 0, 1, 3, 4], 16: [15, 16, 0, 17, 1]}


@case
def pages(device):
    """Lengths 0, 1, one less than a page, a page, one more, and 5 in pages of 4."""
    return {
        f"P={P}": distance(inputs(lengths, P, K=1, device=device), num_splits=1, block_S=16)
        for P, lengths in LENGTHS.items()
    }


@case
def heads(device):
    return {
        f"K={K}, G={G}, H={H}": distance(inputs([9, 2], K=K, G=G, H=H, device=device))
        for K, G, H in ((2, 1, 16), (1, 3, 64), (2, 4, 24), (1, 5, 80), (1, 17, 8))
    }


@case
def splits(device):
    """More of them than blocks, and blocks that do not divide evenly; 0 positions in some."""
    made = inputs([70, 0, 1, 33], P=3, K=1, device=device)
    report = {
        f"{number} splits": distance(made, num_splits=number, block_S=16) for number in (1, 2, 3, 7)
    }
    report["blocks of 64"] = distance(made, num_splits=2, block_S=64)
    return report


@case
def dtypes(device):
    return {
        f"{name}, {number} splits": distance(
            inputs([21, 5], dtype=getattr(torch, name), K=1, device=device),
            num_splits=number, block_S=16,
        )
        for name in DTYPES for number in (1, 2)
    }  # fmt: skip


@case
def integers(device):
    return {
        str(kind): distance(inputs([5, 0, 9], K=1, integers=kind, device=device))
        for kind in (torch.int32, torch.int64)
    }


@case
def mixed_integers_and_strides(device):
    q, k, v, tables, lengths = inputs([5, 0, 9], K=1, device=device)
    spread = torch.stack((lengths, lengths * 0 - 9), -1).flatten()[::2]
    turned = tables.mT.contiguous().mT
    return {
        "tables int32, lengths int64": distance((q, k, v, tables.int(), lengths)),
        "tables int64, lengths int32": distance((q, k, v, tables, lengths.int())),
        "lengths apart": distance((q, k, v, tables, spread)),
        "tables turned": distance((q, k, v, turned, lengths)),
        "tables two pages wide": distance((q[:1], k, v, tables[:1, :2], lengths[:1])),
    }


def layouts(k, v):
    """Pools as slices, or with other orders of their axes: all of them the same numbers."""
    around = torch.full((len(k), 3, *k.shape[1:]), torch.nan, dtype=k.dtype, device=k.device)
    around[:, 0], around[:, 2] = k, v
    both = torch.stack((k, v), -1)
    return {
        "slices of a wider pool": (around[:, 0], around[:, 2]),
        "heads before slots": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)],
        "last axis apart": both.unbind(-1),
        "keys and values unlike": (around[:, 0], v),
    }


@case
def pools(device):
    q, k, v, *rest = inputs([7, 0, 10], K=2, device=device)
    turned = q.transpose(0, 2).contiguous().transpose(0, 2)
    report = {name: distance((q, *pair, *rest)) for name, pair in layouts(k, v).items()}
    return report | {"queries turned": distance((turned, k, v, *rest))}


def one_sequence(device):
    """Three of everything: nine tokens in three pages, which are the whole pool, in its order."""
    q, k, v, tables, lengths = inputs([9], 3, 3, 1, 3, dtype=torch.float16, device=device)
    used = tables[0, :3]
    return q, k[used], v[used], torch.arange(3, device=device)[None], lengths


@case
def more_than_two_to_the_31_apart(device):
    """In a huge buffer, of which only the pages that hold numbers are ever touched.

    A stride of 2^30 fits in 32 bits, twice that does not.
    """
    buffer = torch.empty(2**31 + 2**12, dtype=torch.float16, device=device)

    def apart(tensor, axis):
        strides = list(tensor.contiguous().stride())
        strides[axis] = 2**30 + 8
        return buffer.as_strided(tensor.shape, strides).copy_(tensor)

    report = {}
    q, k, v, *rest = one_sequence(device)
    for axis, name in enumerate(("pages", "slots", "heads", "numbers")):
        report[f"{name} of keys"] = distance((q, apart(k, axis), v, *rest))
        report[f"{name} of values"] = distance((q, k, apart(v, axis), *rest))
    for axis, name in ((1, "heads"), (2, "numbers")):
        report[f"{name} of queries"] = distance((apart(q, axis), k, v, *rest))
    q, *rest = inputs([6, 0, 4], K=1, dtype=torch.float16, device=device)
    return report | {"rows of queries": distance((apart(q, 0), *rest))}


def check(report):
    for name, wrong in report.items():
        assert float(wrong) < 1, (name, wrong)  # NaN fails too


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton", reason="Triton comes for Linux on x86-64")
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""  # the interpreter computes with NumPy, which warns of 0/0 and overflow
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_loop(interpreted, name):
    check(interpreted[name])


# On a GPU.

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernel_equals_the_loop(name):
    check(CASES[name]("cuda"))


@gpu
@needs_cuda
@pytest.mark.parametrize("length", [4096, 4097, 6144])
@pytest.mark.parametrize("P", [16, 128, 256])
def test_large_pages_and_long_contexts_equal_sdpa(P, length):
    q, k, v, tables, lengths = inputs(
        [length, 1, length - 1], P, K=2, G=4, H=128, dtype=torch.bfloat16, device="cuda"
    )
    out = paged_attention_fused(q, k, v, tables, lengths)
    for b, S in enumerate(lengths.tolist()):
        keys, values = (gather_pages(x, tables[b], S)[None].float() for x in (k, v))
        exact = attend(q[b, None, None].float(), keys, values)[0, 0]
        torch.testing.assert_close(out[b].float(), exact, rtol=2**-7, atol=2**-8)


def captured(run_once):
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run_once()  # compiles
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_once()
    return graph, out


@gpu
@needs_cuda
def test_a_graph_captured_at_short_lengths_is_right_at_long_ones_and_at_none():
    q, k, v, tables, lengths = inputs([3000, 700, 16], 16, K=2, H=64, device="cuda")
    now = torch.ones_like(lengths)
    graph, out = captured(lambda: paged_attention_triton(q, k, v, tables, now))
    for new in (lengths, lengths // 2, lengths * 0, lengths):
        now.copy_(new)
        graph.replay()
        check({"replayed": error(out.clone(), (q, k, v, tables, new))})


@gpu
@needs_cuda
def test_keys_written_on_a_stream_are_seen_by_a_launch_on_it():
    q, k, v, tables, lengths = inputs([900, 41], 16, K=2, H=64, device="cuda")
    grown = [torch.full_like(x, torch.nan) for x in (k, v)]
    busy = torch.randn(4096, 4096, device="cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(20):
            busy = busy @ busy / 64  # so that what is written next comes late
        for pool, written in zip(grown, (k, v), strict=True):
            pool.copy_(written)
        out = paged_attention_triton(q, *grown, tables, lengths)
    aside.synchronize()
    check({"aside": error(out, (q, k, v, tables, lengths))})


@gpu
@needs_cuda
def test_on_a_gpu_the_kernel_is_chosen_unless_a_gradient_is_wanted(monkeypatch):
    from lecture_util.kernels import paged_attention_triton as kernel

    launches = []
    launch = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *args: launches.append(1) or launch(*args))
    q, *rest = inputs([5, 2], device="cuda")
    paged_attention_fused(q, *rest)
    assert len(launches) == 1
    paged_attention_fused(q.clone().requires_grad_(True), *rest)
    assert len(launches) == 1


# The definition.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("P", LENGTHS)
def test_the_definition_equals_the_loop(P, dtype):
    made = inputs(LENGTHS[P], P, dtype=dtype)
    check({P: error(paged_attention(*made), made)})


@pytest.mark.parametrize(("K", "G", "H"), [(2, 1, 16), (1, 3, 64), (2, 4, 24), (3, 5, 80)])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_the_definition_equals_the_loop_for_all_heads_and_integers(K, G, H, integers):
    made = inputs([9, 0, 2, 1], K=K, G=G, H=H, integers=integers)
    check({"": error(paged_attention(*made), made)})


@pytest.mark.parametrize("positions", [1, 7, 20, 4096])
def test_the_definition_is_the_same_however_sequences_are_grouped(monkeypatch, positions):
    monkeypatch.setattr(module, "GROUP_POSITIONS", positions)
    made = inputs([9, 0, 2, 9, 1, 5, 9, 4])
    check({positions: error(paged_attention(*made), made)})
    _, k, _, tables, lengths = made
    index = page_index(tables, lengths, *k.shape[:2])
    assert sorted(b for group in index.groups for b in group.rows.tolist()) == [0, 2, 3, 4, 5, 6, 7]
    assert max(len(group.slots) for group in index.groups) <= max(positions, 9)


def test_the_definition_equals_attention_over_contiguous_keys():
    q, k, v, tables, lengths = inputs([6, 11, 3])
    out = paged_attention(q, k, v, tables, lengths)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (gather_pages(x, tables[b], length)[None] for x in (k, v))
        exact = attend(q[b, None, None], keys, values)[0, 0]
        torch.testing.assert_close(out[b], exact)


def test_an_index_made_once_serves_every_layer():
    q, k, v, tables, lengths = inputs([6, 0, 11, 3])
    index = page_index(tables, lengths, *k.shape[:2])
    for seed in range(2):
        q, *_ = layer = inputs([6, 0, 11, 3], seed=seed)
        pools = (layer[1].nan_to_num(3), layer[2].nan_to_num(3))
        made = (q, *pools, tables, lengths)
        assert torch.equal(paged_attention(*made, index), paged_attention(*made))
        assert torch.equal(paged_attention_fused(*made, index), paged_attention(*made))
    with pytest.raises(ShapeError, match=r"index is for B=4, M=.*, P=4 but .* B=3"):
        paged_attention(q[:3], k, v, tables[:3], lengths[:3], index)


@pytest.mark.parametrize("layout", range(4))
def test_the_definition_reads_pools_of_any_strides(layout):
    q, k, v, *rest = inputs([7, 0, 10], K=2)
    k, v = list(layouts(k, v).values())[layout]
    check({layout: error(paged_attention(q, k, v, *rest), (q, k, v, *rest))})


def test_a_slice_of_a_wider_pool_is_not_copied_whole(monkeypatch):
    _, k, v, *_ = inputs([7, 0, 10])
    k, _ = layouts(k, v)["slices of a wider pool"]
    monkeypatch.setattr(torch.Tensor, "flatten", lambda *args: pytest.fail("copied"))
    assert module._take(k, torch.tensor([0, 1, 2, 3]), 2).shape == (2, 2, 2, 16)


def test_padded_rows_and_no_rows_get_zeros():
    q, k, v, tables, lengths = inputs([0, 0])
    for empty in (k, k[:0]):
        assert torch.equal(paged_attention(q, empty, empty, tables, lengths), torch.zeros_like(q))
    assert paged_attention(q[:0], k, v, tables[:0], lengths[:0]).shape == (0, 6, 16)
    assert torch.equal(paged_attention(q, k, v, tables[:, :0], lengths), torch.zeros_like(q))


def test_a_result_is_not_written_over_by_the_next_call():
    q, *rest = inputs([5, 2])
    first = paged_attention_fused(q, *rest)
    kept = first.clone()
    paged_attention_fused(q + 1, *rest)
    assert torch.equal(first, kept)


def test_on_a_cpu_gradients_flow():
    q, k, v, *rest = inputs([5, 0, 2], dtype=torch.float64)
    q.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda q: paged_attention_fused(q, k, v, *rest), q)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11])
def test_gathered_pages_are_a_sequence_in_order_and_dense(length):
    _, k, _, tables, _ = inputs([length], P=4)
    for pool in (k, k.transpose(1, 2).contiguous().transpose(1, 2)):
        keys = gather_pages(pool, tables[0], length)
        assert keys.shape == (length, 2, 16) and keys.is_contiguous()
        for s in range(length):
            assert torch.equal(keys[s], k[tables[0, s // 4], s % 4])


# What does not fit together.


@pytest.mark.parametrize(
    "attention", [paged_attention, paged_attention_fused, paged_attention_triton]
)
@pytest.mark.parametrize(
    ("change", "wrong", "match"),
    [
        (dict(q=torch.ones(2, 6)), ShapeError, "q_BNH has 2 axes"),
        (dict(q=torch.ones(3, 6, 16)), ShapeError, "tables_BJ has B=2 but q_BNH has B=3"),
        (dict(q=torch.ones(2, 5, 16)), ShapeError, "N=5 but k_MPKH has K=2: N must be a multiple"),
        (dict(q=torch.ones(2, 6, 8)), ShapeError, "k_MPKH has H=16 but q_BNH has H=8"),
        (dict(v=torch.ones(6, 3, 2, 16)), ShapeError, "v_MPKH has P=3 but k_MPKH has P=4"),
        (dict(v=torch.ones(6, 4, 1, 16)), ShapeError, "v_MPKH has K=1 but k_MPKH has K=2"),
        (dict(lengths=torch.ones(3).long()), ShapeError, "lengths_B has B=3"),
        (dict(q=torch.ones(2, 6, 16).half()), TensorMismatch, "k_MPKH is .* but q_BNH is"),
        (dict(tables=torch.ones(2, 3)), TensorMismatch, "tables_BJ is torch.float32: expected int"),
        (dict(lengths=torch.ones(2).bool()), TensorMismatch, "lengths_B is torch.bool"),
        (dict(lengths=torch.ones(2, device="meta").long()), TensorMismatch, "move one"),
    ],
)
def test_what_does_not_fit_together_is_named(attention, change, wrong, match):
    q, k, v, tables, lengths = inputs([9, 2])
    made = dict(q=q, k=k, v=v, tables=tables, lengths=lengths) | change
    with pytest.raises(wrong, match=match):
        attention(*made.values())


def test_whole_numbers_and_other_devices_are_refused():
    q, k, v, tables, lengths = inputs([9, 2])
    with pytest.raises(TensorMismatch, match=r"q_BNH is torch\.int64: expected floating-point"):
        paged_attention(q.long(), k.long(), v.long(), tables, lengths)
    with pytest.raises(TensorMismatch, match="tables_BJ is on meta but q_BNH is on cpu"):
        paged_attention(q, k, v, tables.to("meta"), lengths.to("meta"))


@pytest.mark.parametrize(
    ("lengths", "page", "match"),
    [
        ([13, 2], 0, r"lengths_B\[0\] is 13: expected 0 to 12, which the 3 pages of 4"),
        ([9, -1], 0, r"lengths_B\[1\] is -1"),
        ([9, 2], -1, r"tables_BJ\[1, 0\] is -1: expected a page from 0 to 5, .* 2 tokens"),
        ([9, 2], 6, r"tables_BJ\[1, 0\] is 6"),
    ],
)
def test_lengths_and_pages_that_cannot_be_are_named(lengths, page, match):
    q, k, v, tables, _ = inputs([9, 2], seed=3)
    tables = torch.cat((tables[:, :2], tables[:, :1]), 1)
    tables[1, 0] = page
    with pytest.raises(ValueError, match=match):
        paged_attention(q, k, v, tables, torch.tensor(lengths))


def test_gathering_what_cannot_be_is_named():
    _, k, _, tables, _ = inputs([9])
    for length in (-1, 13 + 4, 2.0, True):
        with pytest.raises(ValueError, match=f"length={length}: expected a whole number, 0 to 16"):
            gather_pages(k, tables[0], length)
    with pytest.raises(ValueError, match=r"table_J\[3\] is 9223372036854775807: .* 13 tokens"):
        gather_pages(k, tables[0], 13)
    with pytest.raises(TensorMismatch, match=r"table_J is torch\.float32"):
        gather_pages(k, tables[0].float(), 1)
    with pytest.raises(ShapeError, match="table_J has 2 axes"):
        gather_pages(k, tables, 1)


@pytest.mark.parametrize(
    "options", [dict(num_splits=0), dict(num_splits=1.5), dict(block_S=8), dict(block_S=24)]
)
def test_splits_and_blocks_that_cannot_be_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}=.*: expected a"):
        paged_attention_triton(*inputs([9, 2]), **options)


def test_the_kernel_refuses_fp64():
    with pytest.raises(TensorMismatch, match="the kernel takes 16 or 32 bits"):
        paged_attention_triton(*inputs([9, 2], dtype=torch.float64))


# Where there is no Triton, or no GPU.


def test_without_a_gpu_or_the_interpreter_the_kernel_says_so():
    pytest.importorskip("triton")
    code = (
        "import torch;"
        "from lecture_util.kernels.paged_attention import paged_attention_triton as f;"
        "x = torch.ones(1, 1, 1, 1); f(x[0], x, x, x[0, 0].int(), x[0, 0, 0].int())"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "RuntimeError: Triton compiles for GPUs but q_BNH is on cpu" in done.stderr


def test_without_triton_the_kernel_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lecture_util.kernels.paged_attention_triton", raising=False)
    monkeypatch.delattr("lecture_util.kernels.paged_attention_triton", raising=False)
    with pytest.raises(RuntimeError, match="Triton is not installed here"):
        paged_attention_triton(*inputs([9, 2]))


def test_triton_is_imported_when_a_kernel_runs_and_not_before():
    code = "import sys, lecture_util.kernels.paged_attention; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from lecture_util.kernels import paged_attention_triton as kernels

def build(kernel, kinds, constants, arch, **options):
    signature = {name: "i32" for name in kernel.arg_names} | kinds
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= 99 * 1024  # what a program may have on a consumer's GPU
    return compiled.asm["ptx"]

for arch, G, H, P, dtype, itemsize in (
    (80, 1, 128, 16, "bf16", 2), (90, 4, 128, 16, "bf16", 2), (90, 5, 80, 3, "fp32", 4)
):
    blocks = kernels.choose_blocks(G, H, itemsize)
    options = {name: blocks.pop(name) for name in ("num_warps", "num_stages")}
    kinds = {name + "_ptr": "*" + dtype for name in ("q", "k", "v")}
    kinds |= {"tables_ptr": "*i32", "lengths_ptr": "*i64", "out_ptr": "*fp32", "lse_ptr": "*fp32"}
    kinds |= {"stride_k_page": "i64", "stride_v_page": "i64", "scale": "fp32"}
    constants = blocks | {"P": P, "H": H, "WIDEN": False}
    ptx = build(kernels._attend, kinds, constants, arch, **options)
    assert ("mma" in ptx) == (itemsize == 2)  # on tensor cores or not
    kinds = {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*" + dtype}
    build(kernels._merge, kinds, {"H": H, "BLOCK_I": 8, "BLOCK_H": blocks["BLOCK_H"]}, arch)
print("compiled")
"""


def test_the_kernel_compiles_for_an_a100_and_an_h100_without_having_one(tmp_path):
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "compiled\n", done.stderr[-3000:]


def test_the_benchmark_checks_its_results_on_a_cpu(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "paged_kernel.py"
    out = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, str(script), "--small", "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert record["small"] and len(record["date"]) == 10
    ways = {row["way"] for row in record["rows"]}
    assert {"SDPA", "SDPA, heads grouped", "pages, torch"} <= ways
    assert ("pages, Triton" in ways) == (record["versions"]["triton"] is not None)
    assert all(row["error"] < 1 and row["median_s"] > 0 for row in record["rows"])


def test_splits_follow_from_what_a_table_could_hold():
    pytest.importorskip("triton")
    from lecture_util.kernels.paged_attention_triton import choose_splits

    assert choose_splits(B=1, K=8, positions=255, processors=132) == 1
    assert choose_splits(B=4, K=8, positions=1024, processors=132) == 4  # not too small
    assert choose_splits(B=4, K=8, positions=2**20, processors=132) == 17  # 4 a processor
    assert choose_splits(B=999, K=8, positions=2**20, processors=132) == 1  # enough without
    assert choose_splits(B=1, K=1, positions=2**20, processors=132) == 128


if __name__ == "__main__":
    print(json.dumps({name: run("cpu") for name, run in CASES.items()}))
