"""Speeds up Triton's interpreter, which runs kernels on CPU tensors in tests, by leaving out work that it repeats.

At every launch, and at every call of a function within a kernel, Triton's interpreter goes through its language and
replaces what kernels call by functions that compute with numpy. After every launch it copies the memory of all
arguments back to a device, and on a CPU that memory is the argument itself. For small kernels this repeated work takes
a third of the time.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def replace_once() -> None:
    """Replaces the language's functions once for the life of this process, in which nothing can be compiled any more.

    Launches then take CPU tensors alone. A version of Triton whose interpreter has other parts stays as it is.
    """
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "GridExecutor")):
        return
    # Triton's interpreter looks for these modules among the globals of a kernel, to replace their functions.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
