"""Speeds up Triton's interpreter, which runs kernels on CPU tensors in tests, by leaving out work that it repeats.

At every launch, and at every call of a function within a kernel, Triton's interpreter goes through its language and
replaces what kernels call by functions that compute with numpy. After every launch it copies the memory of all
arguments back to a device, and on a CPU that memory is the argument itself. It computes each operation on integers
again in 64 bits, to find overflows, and drops what it has found, because its option for debugging is off. Whenever it
asks for a type of numpy it makes the table of all of them. For small kernels this repeated work takes more than half of
the time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def replace_once() -> None:
    """Replaces the language's functions once for the life of this process, in which nothing can be compiled any more.

    Launches then take CPU tensors alone. A version of Triton whose interpreter has other parts stays as it is.
    """
    parts = ("_patch_lang", "_LangPatchScope", "GridExecutor", "_get_np_dtype", "interpreter_builder")
    if not all(hasattr(interpreter, name) for name in parts):
        return
    # Triton's interpreter looks for these modules among the globals of a kernel, to replace their functions.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    builder, type_of = interpreter.interpreter_builder, interpreter._get_np_dtype
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    known = cache(type_of)

    def known_type_of(kind: Any) -> Any:
        # Types of pointers and of blocks cannot be looked up.
        return type_of(kind.scalar) if kind.scalar.is_ptr() else known(kind.scalar)

    interpreter._get_np_dtype = known_type_of
