"""Which kernels are interpreted, and what is mended there for a NumPy that Triton does not know."""

import os
import subprocess
import sys

import pytest

CODE = """
import numpy as np
import torch, triton, triton.language as tl
from triton.runtime import interpreter
from lecture_util.kernels import interpreted as module

class Refused:  # as NumPy 2.5 does
    def __int__(self):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

assert module._converts(np.zeros((), np.int32)) and not module._converts(Refused())
module._converts = lambda one: False

@triton.jit
def add_up(x_ptr, length_ptr, y_ptr):
    total = 0.0
    for i in range(tl.load(length_ptr)):
        total += tl.load(x_ptr + i)
    tl.store(y_ptr, total)

assert module.interpreted(add_up) and module.interpreted(add_up)
assert interpreter._patch_lang_tensor.mended
y = torch.zeros(1)
for length in (3, 0, 5):
    add_up[(1,)](torch.arange(1.0, 9), torch.tensor([length]), y)
    assert y.item() == length * (length + 1) / 2
print("added up")
"""


def run(tmp_path, code, **env):
    path = tmp_path / "code.py"  # Triton reads a kernel's source from its file
    path.write_text(code)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | env
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)


def test_a_loop_may_end_at_a_loaded_number_even_where_numpy_converts_no_arrays(tmp_path):
    pytest.importorskip("triton", reason="Triton comes for Linux on x86-64")
    done = run(tmp_path, CODE, TRITON_INTERPRET="1")
    assert done.stdout == "added up\n", done.stderr[-3000:]


def test_a_compiled_kernel_is_not_interpreted_and_nothing_is_touched(tmp_path):
    pytest.importorskip("triton", reason="Triton comes for Linux on x86-64")
    code = """
from triton.runtime import interpreter
before = interpreter._patch_lang_tensor
from lecture_util.kernels import int4_linear_triton, paged_attention_triton, selective_scan_triton
kernels = (int4_linear_triton, paged_attention_triton, selective_scan_triton)
assert not any(kernel.INTERPRETED for kernel in kernels)
assert interpreter._patch_lang_tensor is before
print("compiled")
"""
    done = run(tmp_path, code)
    assert done.stdout == "compiled\n", done.stderr[-3000:]
