"""A faster Triton interpreter, which runs kernels on CPU tensors in tests, by skipping repeated work.

At every launch and call within a kernel, the interpreter patches the language's functions with numpy versions. After
every launch it copies all arguments back to a device, which on a CPU is the argument's own memory. It repeats integer
operations in 64 bits to detect overflows, and drops the result as debugging is off. It rebuilds the table of numpy
types at each look-up, and a constant type and shape for each value. Before each operation it derives the common type
and shape of both sides, which are mostly equal or a number. For small kernels this is five sixths of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

# Cached constant tensors: numbers in the text of kernels and a few of their arguments.
MAX_KEPT_NUMBERS = 1024
_INTS = (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64)
_KINDS = {kind.name: kind for kind in (*_INTS, tl.float16, tl.float32, tl.float64)}
_BOUNDS = {kind.name: (kind.get_int_min_value(), kind.get_int_max_value()) for kind in _INTS}


@cache
def _known(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """Return the shape as Triton stores it in a type, its number of elements, and its text. Raises as Triton does for
    an invalid shape."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    kept = tl.core.tuple(shape)
    return kept, tl.core.validate_block_shape(kept), str(kept)


@cache
def _constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a tensor's shape and number of elements as constants."""
    return tl.core.tuple([tl.core.constexpr(size) for size in shape]), tl.core.constexpr(math.prod(shape))


def _make_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.sizes = tuple([getattr(size, "value", size) for size in shape])
    self.shape, self.numel, self.text = _known(self.sizes)


def _with_element_ty(self: Any, element_ty: Any) -> Any:
    made = object.__new__(tl.block_type)
    made.element_ty, made.sizes = element_ty, self.sizes
    made.shape, made.numel, made.text = self.shape, self.numel, self.text
    return made


def _make_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _constants(kind.sizes if kind.is_block() else ())


def _sizes(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape, empty for a scalar."""
    return tensor.type.sizes if tensor.type.is_block() else ()


def _is_plain(kind: Any) -> bool:
    return _KINDS.get(kind.name) is kind


@lru_cache(MAX_KEPT_NUMBERS, typed=True)
def _number(number: Any, name: str, sizes: tuple[int, ...]) -> Any:
    """Return a tensor filled with a number; safe to share, since no operation writes into its operands."""
    kind = _KINDS[name]
    values = np.full(sizes or (1,), number, interpreter._get_np_dtype(kind))
    return tl.core.tensor(interpreter.TensorHandle(values, kind), tl.block_type(kind, sizes) if sizes else kind)


@cache
def _joint(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape to which two of equal rank broadcast, or None."""
    fit = len(left) == len(right) and all(1 in pair or pair[0] == pair[1] for pair in zip(left, right, strict=True))
    return tuple([max(pair) for pair in zip(left, right, strict=True)]) if fit else None


class _Operands:
    """Conversion of both sides of an operation to one type and shape. Cases of different tensor types or ranks, or a
    number outside of the tensor's type, are left to Triton."""

    def __init__(self, semantic: Any) -> None:
        self._one_type, self._one_shape = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
        self._builder = semantic.builder

    def of_one_type(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        """Replace ``binary_op_type_checking_impl``."""
        if isinstance(lhs, tl.core.tensor):
            options = allow_lhs_ptr, arithmetic_check, div_or_mod
            if isinstance(rhs, tl.core.tensor):
                if self._as_they_are(lhs.dtype, rhs.dtype, allow_lhs_ptr, div_or_mod):
                    return self.of_one_shape(lhs, rhs)
            elif (number := self._side(rhs, lhs, *options)) is not None:
                return lhs, number
        elif isinstance(rhs, tl.core.tensor):
            number = self._side(lhs, rhs, allow_rhs_ptr, arithmetic_check, div_or_mod)
            if number is not None:
                return number, rhs
        return self._one_type(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def of_one_shape(self, lhs: Any, rhs: Any) -> Any:
        """Replace ``broadcast_impl_value``."""
        left, right = _sizes(lhs), _sizes(rhs)
        if left == right:
            return lhs, rhs
        if not right:
            return lhs, self._splat(rhs, lhs.type)
        if not left:
            return self._splat(lhs, rhs.type), rhs
        sizes = _joint(left, right)
        if sizes is None:
            return self._one_shape(lhs, rhs)
        return self._broadcast(lhs, sizes), self._broadcast(rhs, sizes)

    @staticmethod
    def _as_they_are(kind: Any, other: Any, pointers: bool, divides: bool) -> bool:
        """Return whether an operation accepts tensors of two types unchanged: equal ones, or a pointer and an
        offset."""
        if not _is_plain(other):
            return False
        if kind is other:
            return not (divides and kind is tl.float16)
        return pointers and kind.is_ptr() and other.name in _BOUNDS

    @staticmethod
    def _side(number: Any, tensor: Any, pointers: bool, arithmetic: bool, divides: bool) -> Any:
        """Return the number as a tensor like the other side, or None if the operation may compute in another type."""
        kind: Any = tl.int32 if pointers and tensor.dtype.is_ptr() else tensor.dtype
        if not _is_plain(kind) or not (arithmetic or kind is tl.int32):
            return None
        if kind.name in _BOUNDS:
            least, most = _BOUNDS[kind.name]
            fits = type(number) is int and least <= number <= most
        else:
            fits = type(number) is float or (type(number) is int and -(2**63) <= number < 2**64)
            fits = fits and not (divides and kind is tl.float16)
        return _number(number, kind.name, _sizes(tensor)) if fits else None

    @staticmethod
    def _splat(scalar: Any, kind: Any) -> Any:
        handle = scalar.handle
        values = np.full(kind.sizes, handle.data, interpreter._get_np_dtype(handle.dtype))
        return tl.core.tensor(interpreter.TensorHandle(values, handle.dtype.scalar), kind.with_element_ty(scalar.dtype))

    def _broadcast(self, one: Any, sizes: tuple[int, ...]) -> Any:
        if one.type.sizes == sizes:
            return one
        return tl.core.tensor(self._builder.create_broadcast(one.handle, sizes), tl.block_type(one.dtype, sizes))


def _calling(function: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    return call


@cache
def replace_once() -> None:
    """Patch the language for the life of this process: it cannot compile afterwards, and launches on CPU tensors only.

    A Triton version whose interpreter has other parts is left unpatched.
    """
    parts = ("_patch_lang", "_LangPatchScope", "GridExecutor", "_get_np_dtype", "interpreter_builder")
    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    of_language = ("validate_block_shape", "_unwrap_if_constexpr")
    if not (
        all(hasattr(interpreter, name) for name in parts)
        and all(hasattr(tl.core, name) for name in of_language)
        and all(hasattr(semantic, name) for name in ("binary_op_type_checking_impl", "broadcast_impl_value"))
    ):
        return
    # The interpreter looks up these modules among a kernel's globals to replace their functions.
    replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    for owner, name, _ in getattr(replaced, "_changes", ()):
        # Skips two wrappers that add and check one argument.
        member = (getattr(getattr(owner, name), "__kwdefaults__", None) or {}).get("member")
        if member is not None:
            setattr(owner, name, _calling(getattr(member, "__wrapped__", member), semantic))
    tl.core.block_type.__init__ = _make_type
    tl.core.block_type.name = property(lambda self: f"<{self.text}, {self.element_ty}>")
    tl.core.block_type.with_element_ty = _with_element_ty
    tl.core.tensor.__init__ = _make_tensor
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    operands = _Operands(semantic)
    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = operands.of_one_type, operands.of_one_shape
    _replace_lookups()


def _replace_lookups() -> None:
    """Cache the look-ups that Triton makes for each value."""
    type_of, kind_of, equal = interpreter._get_np_dtype, tl.core.dtype.to_ir, tl.core.dtype.__eq__
    value_of, values = tl.core._unwrap_if_constexpr, (tl.core.tensor, int, float, str, tl.core.dtype, type(None))
    known = {name: type_of(kind) for name, kind in _KINDS.items()}
    interpreter._get_np_dtype = lambda kind: (
        known[name] if (name := kind.scalar.name) in known else type_of(kind.scalar)
    )
    tl.core.dtype.to_ir = lambda self, builder: _KINDS.get(self.name) or kind_of(self, builder)
    tl.core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    tl.core._unwrap_if_constexpr = lambda one: one if isinstance(one, values) else value_of(one)
