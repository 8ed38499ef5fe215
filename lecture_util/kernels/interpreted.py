"""Is a kernel compiled for a GPU, or run by Triton's interpreter on the CPU, through NumPy?

Triton decides when it is imported: TRITON_INTERPRET=1 in the environment makes it interpret. Its
interpreter turns a loop's bound, an array of one number, into a whole number by int(array). NumPy
2.5 refuses that; Triton 3.6 still does it, 3.9 no longer. So where both meet, this mends it.
"""

from __future__ import annotations

import numpy as np
import triton
from triton.runtime import interpreter


def interpreted(kernel: triton.JITFunction) -> bool:
    """Whether calling this kernel interprets it. If so, a loop's bound may be a number it loaded.

    kernel: what `triton.jit` made.
    """
    found = isinstance(kernel, interpreter.InterpretedFunction)
    if found and not _converts(np.zeros(1, np.int32)):
        _mend()
    return found


def _converts(one: np.ndarray) -> bool:
    try:
        int(one)
    except TypeError:
        return False
    return True


def _mend() -> None:
    """Replace the interpreter's conversion, which it puts into Triton's tensors at each launch."""
    prepare = interpreter._patch_lang_tensor
    if getattr(prepare, "mended", False):
        return

    def mended(tensor, *scope) -> None:
        prepare(tensor, *scope)
        set_attr = scope[0].set_attr if scope else setattr  # taken back after a launch
        set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    mended.mended = True
    interpreter._patch_lang_tensor = mended
