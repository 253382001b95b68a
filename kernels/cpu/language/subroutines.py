"""Functions that kernels of one module share, so that what several of them need is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.language.emit import Kernel
from pillion.kernels.cpu.language.values import Int, Ptr

_I64 = ir.IntType(64)


def call_subroutine(k: Kernel, name: str, values: Sequence[Int | Ptr], body: Callable[..., None]) -> None:
    """Calls the module's function ``name`` with ``values``.

    Where the module has no function of that name yet, ``body`` writes it: it is given a :class:`Kernel` and the values
    as the function sees them. The function does not check its accesses: in checked mode it is the caller who asks
    :meth:`Kernel.holds` for all that it will read and write.
    """
    module = k.builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * len(values)), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        inner = Kernel(builder, k.isa)
        seen: list[Any] = [type(value)(inner, raw) for value, raw in zip(values, function.args, strict=True)]
        body(inner, *seen)
        builder.ret_void()
    k.builder.call(function, [value.ir for value in values])
