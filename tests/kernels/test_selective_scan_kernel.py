"""The Triton scan against its torch reference: interpreted here, compiled where there is a GPU.

Triton decides when it is imported whether it interprets. So the cases run in a process of their
own, which is this file run as a script, and report how far each result was from the reference.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from lecture_util.kernels.selective_scan import (
    selective_scan,
    selective_scan_fused,
    selective_scan_triton,
)

SIZES = [  # B, T, E, Z, block_E: blocks too large, too small, and never a divisor but for the first
    (1, 1, 1, 1, 1),
    (2, 7, 3, 5, 2),
    (3, 1, 33, 16, 32),
    (2, 5, 21, 7, 16),
    (1, 11, 5, 3, 8),
]
DTYPES = ["float64", "float32", "bfloat16", "float16"]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def inputs(device, B=2, T=7, E=5, Z=3, dtype=torch.float64):
    """Slices of wider tensors that are NaN all around: what is masked must not be missed."""
    generator = torch.Generator().manual_seed(B * T + E * Z)

    def normal(*shape):
        wide = torch.full((*shape[:-1], shape[-1] + 9), torch.nan, dtype=torch.float64)
        wide[..., : shape[-1]] = torch.randn(shape, generator=generator, dtype=torch.float64)
        return wide.to(device, dtype)[..., : shape[-1]]

    delta_BTE = normal(B, T, E)
    delta_BTE.exp_()
    A_EZ = -normal(E, Z).exp()
    return normal(B, T, E), delta_BTE, A_EZ, normal(B, T, Z), normal(B, T, Z), normal(1, E)[0]


def distance(tensors, state=None, **options):
    """Largest error of y and of the state, over the largest number: against the loop in fp64."""
    kept = None if state is None else state.clone()
    result = selective_scan_triton(*tensors, state, **options)
    exact = selective_scan(
        *(x.double() for x in tensors), None if state is None else state.double()
    )
    assert result[0].dtype == tensors[0].dtype
    assert state is None or torch.equal(state, kept), "the old state was written over"
    errors = [
        float((one.double() - other).abs().max() / other.abs().max())
        for one, other in zip(result, exact, strict=True)
    ]
    return [str(error) for error in errors]  # NaN too must survive JSON


@case
def sizes(device):
    return {str(size): distance(inputs(device, *size[:4]), block_E=size[4]) for size in SIZES} | {
        "default": distance(inputs(device, E=37))
    }


@case
def dtypes(device):
    return {name: distance(inputs(device, dtype=getattr(torch, name))) for name in DTYPES}


@case
def continues_from_a_state(device):
    state = torch.randn(2, 5, 3, dtype=torch.float64, device=device)
    turned = torch.randn(3, 5, 2, dtype=torch.float64, device=device).transpose(0, 2)
    return {
        "dense": distance(inputs(device), state),
        "turned": distance(inputs(device), turned),
        "one token": distance(inputs(device, T=1), state),
    }


@case
def last_axis_not_dense(device):
    u, delta, A, B, C, D = inputs(device)
    turned = [x.mT.contiguous().mT for x in (u, delta, A, B, C)]
    spread = torch.stack((D, D * torch.nan), -1).flatten()[::2]
    return {"turned": distance((*turned, spread))}


@case
def rows_more_than_two_to_the_31_apart(device):
    """In one huge buffer, of which only the pages that hold the rows are ever touched."""
    report = {}
    for B, stride in ((2, 2**31 + 8), (3, 2**30 + 8)):  # 2^30 fits in 32 bits, twice that does not
        u, *rest = inputs(device, B, T=1, dtype=torch.float16)
        buffer = torch.empty(2**31 + 64, dtype=u.dtype, device=device)
        apart = buffer.as_strided(u.shape, (stride, u.shape[-1], 1)).copy_(u)
        report[f"{B} rows far apart"] = distance((apart, *rest))
    return report


def check(report):
    """Within rounding: 16 units in the last place of y's dtype, and of the state's fp32 or fp64."""
    for name, errors in report.items():
        dtype = name if name in DTYPES else "float16" if "far apart" in name else "float64"
        dtype = getattr(torch, dtype)
        kept = torch.promote_types(dtype, torch.float32)
        bounds = [16 * torch.finfo(kind).eps for kind in (dtype, kept)]
        for error, bound in zip(errors, bounds, strict=True):
            assert float(error) < bound, (name, errors)  # NaN fails too


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
def test_on_a_gpu_the_kernel_is_chosen_unless_a_gradient_is_wanted(monkeypatch):
    from lecture_util.kernels import selective_scan_triton as kernel

    launches = []
    launch = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *args: launches.append(1) or launch(*args))
    u, *rest = inputs("cuda")
    selective_scan_fused(u, *rest)
    assert len(launches) == 1
    selective_scan_fused(u.clone().requires_grad_(True), *rest)
    assert len(launches) == 1


def test_on_a_cpu_the_reference_is_chosen():
    tensors = inputs("cpu")
    for one, other in zip(selective_scan_fused(*tensors), selective_scan(*tensors), strict=True):
        assert torch.equal(one, other)


def test_without_a_gpu_or_the_interpreter_the_kernel_says_so():
    pytest.importorskip("triton")
    code = (
        "import torch; from lecture_util.kernels.selective_scan import selective_scan_triton as f;"
        "f(*(torch.ones(s) for s in [(1,1,1),(1,1,1),(1,1),(1,1,1),(1,1,1),(1,)]))"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "RuntimeError: Triton compiles for GPUs but u_BTE is on cpu" in done.stderr


def test_without_triton_the_kernel_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lecture_util.kernels.selective_scan_triton", raising=False)
    monkeypatch.delattr("lecture_util.kernels.selective_scan_triton", raising=False)
    with pytest.raises(RuntimeError, match="Triton is not installed here"):
        selective_scan_triton(*inputs("cpu"))


@pytest.mark.parametrize("block_E", [0, -2, 3, 24, 8.0])
def test_a_block_is_a_power_of_two(block_E):
    with pytest.raises(ValueError, match="expected a power of two"):
        selective_scan_triton(*inputs("cpu"), block_E=block_E)


def test_triton_is_imported_when_a_kernel_runs_and_not_before():
    code = (
        "import sys, lecture_util.kernels.selective_scan; early = 'triton' in sys.modules;"
        "import lecture_util.alternatives.mamba;"
        "late = 'lecture_util.kernels.selective_scan_triton' in sys.modules; sys.exit(early + late)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


COMPILE = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from lecture_util.kernels.selective_scan_triton import _scan as kernel
for dtype, wide in (("bf16", "fp32"), ("fp64", "fp64")):
    kinds = {name: "i32" for name in kernel.arg_names}
    kinds |= {name: "*" + (wide if "state" in name else dtype) for name in kinds if "ptr" in name}
    kinds |= {name: "constexpr" for name in kinds if name.isupper() and len(name) > 1}
    constants = {"WIDE": getattr(tl, "float" + wide[2:]), "BLOCK_E": 32, "BLOCK_Z": 16}
    for arch in (80, 90):
        source = triton.compiler.ASTSource(kernel, signature=kinds, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
        assert len(compiled.asm["cubin"]) > 0
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


if __name__ == "__main__":
    print(json.dumps({name: run("cpu") for name, run in CASES.items()}))
