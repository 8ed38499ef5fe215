"""The product with 4-bit weights: its packing, its reference, and the Triton kernel against that.

Triton decides when it is imported whether it interprets. So the cases run in a process of their
own, which is this file run as a script, and report how far each result was from the reference.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lecture_util.kernels.int4_linear import (
    dequantize_int4,
    int4_linear,
    int4_linear_fused,
    int4_linear_triton,
    pack_int4,
    unpack_int4,
)
from lecture_util.model.shapes import ShapeError, TensorMismatch

SIZES = [  # B, D, F, group_size: odd rows, groups with tails, groups no power of two, one a row
    (1, 1, 1, 1),
    (1, 16, 1, 16),
    (3, 16, 33, 4),
    (2, 37, 21, 8),
    (5, 577, 7, 48),
    (17, 70, 5, 32),
    (4, 63, 5, 63),
    (2, 41, 18, 100),
]
LEVELS = {"zero to fifteen": 0, "around zero": -8, "table": None}
DTYPES = ["float32", "bfloat16", "float16"]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def inputs(device, B=2, D=37, F=5, group_size=8, dtype=torch.float32, levels=-8, offset=True):
    """Slices of wider tensors that are NaN or 255 all around; an odd row's spare half is 15."""
    generator = torch.Generator().manual_seed(B * D + F)

    def around(tensor, filler):
        wide = tensor.new_full((tensor.shape[0] + 2, tensor.shape[1] + 16), filler)
        wide[: tensor.shape[0], : tensor.shape[1]] = tensor
        return wide.to(device)[: tensor.shape[0], : tensor.shape[1]]

    def normal(*shape):
        return around(torch.randn(shape, generator=generator).to(dtype), torch.nan)

    J = -(-D // group_size)
    codes = torch.randint(0, 16, (F, D + D % 2), generator=generator)
    if D % 2:
        codes[:, -1] = 15
    if levels is None:
        levels = torch.randn(16, generator=generator).to(device)
    x, scale, offset_FJ = normal(B, D), normal(F, J), normal(F, J)
    return x, around(pack_int4(codes), 255), levels, scale, offset_FJ if offset else None


def distance(tensors, group_size, **options):
    """The largest error, in units of what rounding may do: below 1 unless something is wrong."""
    x, packed, levels, scale, offset = tensors
    y = int4_linear_triton(*tensors, group_size=group_size, **options)
    assert y.dtype == x.dtype and y.is_contiguous()
    F, D, x_wide = len(packed), x.shape[1], x.double()
    exact = int4_linear(x_wide, packed, levels, scale, offset, group_size=group_size)

    # Of sums of D terms in fp32, of the result in x's dtype and, on tensor cores, of w in it too.
    top = 15 if isinstance(levels, int) else float(levels.abs().max())
    widest = torch.full((16,), top, dtype=torch.float64, device=x.device)
    terms = int4_linear(
        x_wide.abs(), packed, widest, scale.abs(), None if offset is None else offset.abs(),
        group_size=group_size,
    )  # fmt: skip
    eps = torch.finfo(x.dtype).eps
    rounded = eps if options.get("dot") or len(x) > 1 else 0
    bound = terms * ((D + 8) * torch.finfo(torch.float32).eps + rounded) + exact.abs() * eps
    assert exact.shape == (len(x), F)
    return str(float(((y.double() - exact).abs() / bound).max()))  # NaN too must survive JSON


@case
def sizes(device):
    report = {}
    for B, D, F, group_size in SIZES:
        for name, levels in LEVELS.items():
            offset = name != "around zero"
            made = inputs(device, B, D, F, group_size, levels=levels, offset=offset)
            for dot in (None, True):
                label = f"{(B, D, F, group_size)} {name}, dot={dot}"
                report[label] = distance(made, group_size, dot=dot)
    return report


@case
def dtypes(device):
    report = {}
    for name in DTYPES:
        for B in (1, 3):
            made = inputs(device, B, dtype=getattr(torch, name))
            report[f"{name}, B={B}"] = distance(made, 8)
            x, *weights = made
            report[f"{name}, B={B}, other scales"] = distance(
                (x, *weights[:2], weights[2].half(), weights[3].float()), 8
            )
    return report


@case
def blocks(device):
    made = inputs(device, D=70, F=9, group_size=32)
    return {
        f"{block_F} rows, {block_bytes} bytes, dot={dot}": distance(
            made, 32, block_F=block_F, block_bytes=block_bytes, dot=dot
        )
        for block_F, block_bytes in ((1, 16), (16, 8), (2, 128))
        for dot in (False, True)
    }


@case
def last_axis_not_dense(device):
    x, packed, levels, *rest = inputs(device)
    turned = [tensor.mT.contiguous().mT for tensor in (x, packed, *rest)]
    return {"turned": distance((*turned[:2], levels, *turned[2:]), 8)}


@case
def rows_more_than_two_to_the_31_apart(device):
    """In huge buffers, of which only the pages that hold the rows are ever touched."""
    x, packed, levels, scale, offset = inputs(device, 1, 20, 3, 8, torch.float16)

    def apart(tensor):
        buffer = torch.empty(2**31 + 64, dtype=tensor.dtype, device=device)
        return buffer.as_strided(tensor.shape, (2**30 + 8, 1)).copy_(tensor)

    return {
        "packed": distance((x, apart(packed), levels, scale, offset), 8),
        "scales": distance((x, packed, levels, apart(scale), offset), 8),
        "x": distance((apart(x.expand(3, -1)), packed, levels, scale, offset), 8),
    }


def check(report):
    for name, error in report.items():
        assert float(error) < 1, (name, error)  # NaN fails too


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
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_reference(interpreted, name):
    check(interpreted[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernel_equals_the_reference(name):
    check(CASES[name]("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_kernel_is_chosen_for_few_rows_unless_a_gradient_is_wanted(monkeypatch):
    from lecture_util.kernels import int4_linear_triton as kernel

    launches = []
    launch = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *args: launches.append(1) or launch(*args))
    x, *weights = inputs("cuda")
    int4_linear_fused(x, *weights, group_size=8)
    assert len(launches) == 1
    int4_linear_fused(x.clone().requires_grad_(True), *weights, group_size=8)
    int4_linear_fused(x[:1].expand(1000, -1), *weights, group_size=8)
    assert len(launches) == 1


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize(("B", "D", "F", "group_size"), SIZES)
def test_the_reference_is_the_definition_weight_by_weight(B, D, F, group_size, levels):
    x, packed, levels, scale, offset = inputs("cpu", B, D, F, group_size, levels=levels)
    y = int4_linear(x.double(), packed, levels, scale, offset, group_size=group_size)
    table = range(levels, levels + 16) if isinstance(levels, int) else levels.tolist()
    for f in range(F):
        bytes_of_row = packed[f].tolist()
        w = []
        for d in range(D):
            high, low = divmod(bytes_of_row[d // 2], 16)
            level, j = table[low if d % 2 else high], d // group_size
            w.append(level * scale[f, j].item() + offset[f, j].item())
        w = torch.tensor(w, dtype=torch.float64)
        torch.testing.assert_close(y[:, f], x.double() @ w, rtol=1e-12, atol=1e-11)


def test_the_reference_multiplies_by_bitsandbytes_own_bytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(24, 192, generator=generator), torch.randn(3, 192, generator=generator)
    stored, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    y = int4_linear(
        x.double(), stored.view(24, 96), state.code, state.absmax.view(24, 3), group_size=64
    )
    theirs = functional.dequantize_4bit(stored, state)
    torch.testing.assert_close(y, x.double() @ theirs.double().T, rtol=1e-6, atol=1e-5)


def test_on_a_cpu_dense_weights_are_multiplied_and_gradients_flow():
    x, *weights = inputs("cpu")
    x.requires_grad_(True)
    y = int4_linear_fused(x, *weights, group_size=8)
    w_FD = dequantize_int4(*weights, group_size=8, D=37)
    torch.testing.assert_close(y, x @ w_FD.T)
    torch.testing.assert_close(y, int4_linear(x, *weights, group_size=8))
    y.sum().backward()
    torch.testing.assert_close(x.grad, w_FD.sum(0).expand(2, -1))


# Packing.


@pytest.mark.parametrize("shape", [(1, 16), (33, 16), (3, 1), (5, 7), (2, 0), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_packing_loses_nothing_at_any_width(shape, dtype):
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    packed = pack_int4(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (shape[0], (shape[1] + 1) // 2)
    assert torch.equal(unpack_int4(packed, shape[1]), codes.to(torch.uint8))


def test_the_first_code_is_the_high_half_and_an_odd_row_ends_in_zero():
    assert pack_int4(torch.tensor([[1, 2, 15], [0, 3, 9]])).tolist() == [[0x12, 0xF0], [0x03, 0x90]]


@pytest.mark.parametrize("code", [-1, 16, 255])
def test_a_code_beyond_four_bits_is_refused_with_its_place(code):
    codes = torch.zeros(3, 4, dtype=torch.int64)
    codes[1, 2] = code
    with pytest.raises(ValueError, match=rf"codes_FD\[1, 2\] is {code}: .* adding 8"):
        pack_int4(codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_only_whole_numbers_are_packed(dtype):
    with pytest.raises(TypeError, match="expected whole numbers"):
        pack_int4(torch.zeros(1, 2).to(dtype))


def test_unpacking_wants_the_bytes_of_that_width():
    packed = pack_int4(torch.zeros(3, 8, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"ceil\(D/2\) = 5 bytes"):
        unpack_int4(packed, 9)
    with pytest.raises(TypeError, match="expected uint8"):
        unpack_int4(packed.int(), 8)


# What does not fit together.


@pytest.mark.parametrize("product", [int4_linear, int4_linear_fused, int4_linear_triton])
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (dict(x=torch.ones(2, 38 + 1)), ShapeError, r"packed has shape \(5, 19\) for D=39"),
        (dict(x=torch.ones(37)), ShapeError, "x_BD has 1 axes"),
        (dict(x=torch.ones(2, 37, dtype=torch.int32)), TensorMismatch, "expected floating-point"),
        (dict(packed=torch.ones(5, 19)), TypeError, "expected uint8"),
        (dict(levels=torch.ones(8)), ShapeError, r"expected \(16,\)"),
        (dict(levels=torch.ones(16).int()), TensorMismatch, "levels_16 is torch.int32"),
        (dict(levels=0.5), ValueError, "expected a table of 16, or the whole number"),
        (dict(scale=torch.ones(5, 4)), ShapeError, r"scale_FJ .* expected \(5, 5\)"),
        (dict(offset=torch.ones(4, 5)), ShapeError, r"offset_FJ .* expected \(5, 5\)"),
        (dict(scale=torch.ones(5, 5).int()), TensorMismatch, "scale_FJ is torch.int32"),
        (dict(scale=torch.ones(5, 5, device="meta")), TensorMismatch, "move one"),
        (dict(x=torch.ones(2, 37, device="meta")), TensorMismatch, "move one"),
        (dict(group_size=7), ValueError, "expected an even number"),
        (dict(group_size=0), ValueError, "group_size=0"),
        (dict(group_size=8.0), ValueError, "group_size=8.0"),
    ],
)
def test_what_does_not_fit_together_is_named(product, change, error, match):
    x, packed, levels, scale, offset = inputs("cpu")
    made = dict(x=x, packed=packed, levels=levels, scale=scale, offset=offset, group_size=8)
    made |= change
    group_size = made.pop("group_size")
    with pytest.raises(error, match=match):
        product(*made.values(), group_size=group_size)


@pytest.mark.parametrize("block", ["block_F", "block_bytes"])
@pytest.mark.parametrize("size", [0, -2, 3, 24, 8.0])
def test_a_block_is_a_power_of_two(block, size):
    with pytest.raises(ValueError, match=f"{block}=.* expected a power of two"):
        int4_linear_triton(*inputs("cpu"), group_size=8, **{block: size})


def test_the_kernel_refuses_fp64():
    x, *weights = inputs("cpu")
    with pytest.raises(TensorMismatch, match="the kernel takes 16 or 32 bits"):
        int4_linear_triton(x.double(), *weights, group_size=8)


def test_without_a_gpu_or_the_interpreter_the_kernel_says_so():
    pytest.importorskip("triton")
    code = (
        "import torch; from lecture_util.kernels.int4_linear import int4_linear_triton as f;"
        "f(torch.ones(1, 2), torch.ones(1, 1).byte(), 0, torch.ones(1, 1), group_size=2)"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "RuntimeError: Triton compiles for GPUs but x_BD is on cpu" in done.stderr


def test_without_triton_the_kernel_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lecture_util.kernels.int4_linear_triton", raising=False)
    monkeypatch.delattr("lecture_util.kernels.int4_linear_triton", raising=False)
    with pytest.raises(RuntimeError, match="Triton is not installed here"):
        int4_linear_triton(*inputs("cpu"), group_size=8)


def test_triton_is_imported_when_a_kernel_runs_and_not_before():
    code = (
        "import sys, lecture_util.kernels.int4_linear; early = 'triton' in sys.modules;"
        "import lecture_util.quantization.int4;"
        "late = 'lecture_util.kernels.int4_linear_triton' in sys.modules; sys.exit(early + late)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from lecture_util.kernels.int4_linear_triton import _product as kernel, choose_blocks
for B, group_size, table, dtype in ((1, 64, True, "fp32"), (5, 48, False, "fp16"),
                                    (16, 64, True, "bf16")):
    constants = choose_blocks(B, 576, 576 // group_size, group_size, dtype != "fp32")
    options = {"num_warps": constants.pop("num_warps")}
    constants |= {"LOWEST": 0 if table else -8, "TABLE": table, "OFFSET": not table, "WIDEN": False}
    kinds = {name: "i32" for name in kernel.arg_names}
    kinds |= {name: "*" + dtype for name in kinds if "ptr" in name}
    kinds |= {"packed_ptr": "*u8", "levels_ptr": "*fp32"} | dict.fromkeys(constants, "constexpr")
    for arch in (80, 90):
        source = triton.compiler.ASTSource(kernel, signature=kinds, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        assert len(compiled.asm["cubin"]) > 0
        assert constants["DOT"] == ("mma" in compiled.asm["ptx"])  # on tensor cores or not
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


def test_the_benchmark_checks_its_results_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    script = Path(__file__).parents[2] / "benchmarks" / "int4_kernel.py"
    out = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, str(script), "--dry", "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert record["dry"] and len(record["date"]) == 10
    ways = {row["way"] for row in record["rows"]}
    assert {"int4, Triton", "NF4, Triton", "dense bf16"} <= ways
    assert ("NF4, bitsandbytes" in ways) == (record["versions"]["bitsandbytes"] is not None)
    assert all(row["error"] < 1 and row["median_s"] > 0 for row in record["rows"])


if __name__ == "__main__":
    print(json.dumps({name: run("cpu") for name, run in CASES.items()}))
