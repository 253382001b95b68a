"""Speeds up Triton's interpreter, which runs kernels on CPU tensors in tests, by leaving out work that it repeats.

At every launch, and at every call of a function within a kernel, Triton's interpreter goes through its language and
replaces what kernels call by functions that compute with numpy. After every launch it copies the memory of all
arguments back to a device, and on a CPU that memory is the argument itself. It computes each operation on integers
again in 64 bits, to find overflows, and drops what it has found, because its option for debugging is off. Whenever it
asks for a type of numpy it makes the table of all of them. And it makes a type and a shape of constants for each value,
which takes longer than the value itself. For small kernels this repeated work takes more than three quarters of the
time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def _known(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """The shape as Triton keeps it in a type, its number of elements, and its text. Raises as Triton does for a shape
    that no tensor may have."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    kept = tl.core.tuple(shape)
    return kept, tl.core.validate_block_shape(kept), str(kept)


@cache
def _constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape of a tensor and its number of elements, as constants."""
    return tl.core.tuple([tl.core.constexpr(size) for size in shape]), tl.core.constexpr(math.prod(shape))


def _make_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel, text = _known(tuple([getattr(size, "value", size) for size in shape]))
    self.name = f"<{text}, {element_ty}>"


def _make_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _constants(tuple(kind.shape) if kind.is_block() else ())


def replace_once() -> None:
    """Replaces the language's functions once for the life of this process, in which nothing can be compiled any more.

    Launches then take CPU tensors alone. A version of Triton whose interpreter has other parts stays as it is.
    """
    parts = ("_patch_lang", "_LangPatchScope", "GridExecutor", "_get_np_dtype", "interpreter_builder")
    if not (all(hasattr(interpreter, name) for name in parts) and hasattr(tl.core, "validate_block_shape")):
        return
    # Triton's interpreter looks for these modules among the globals of a kernel, to replace their functions.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    tl.core.block_type.__init__ = _make_type
    tl.core.tensor.__init__ = _make_tensor
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    builder, type_of = interpreter.interpreter_builder, interpreter._get_np_dtype
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    known = cache(type_of)

    def known_type_of(kind: Any) -> Any:
        # Types of pointers and of blocks cannot be looked up.
        return type_of(kind.scalar) if kind.scalar.is_ptr() else known(kind.scalar)

    interpreter._get_np_dtype = known_type_of
