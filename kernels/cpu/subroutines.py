"""Functions that kernels of one module share, so that what several of them need is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from kernels.cpu.emit import Kernel
from kernels.cpu.values import Int, Ptr

_I64 = ir.IntType(64)
Body = Callable[[Kernel, list[Int | Ptr]], None]


def call_subroutine(k: Kernel, name: str, values: Sequence[Int | Ptr], body: Body) -> None:
    """Calls the module's function ``name`` with ``values``.

    Where the module has no function of that name yet, ``body`` writes it; it is given the values as the function sees
    them. In checked mode pointers take their bounds along, and each kernel has functions of its own: strays are noted
    under the kernel's number.
    """
    raw = []
    for value in values:
        raw.append(value.ir)
        if k.checked and isinstance(value, Ptr):
            raw += [value.begin, value.end]
    if k.checked:
        raw.append(k.fault)
        name = f"{name}.{k.number}"
    module = k.builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * len(raw)), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        _write(k, function, values, body)
    k.builder.call(function, raw)


def _write(k: Kernel, function: ir.Function, values: Sequence[Int | Ptr], body: Body) -> None:
    arguments = iter(function.args)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    inner = k.inside(builder, function.args[-1] if k.checked else None)
    seen: list[Int | Ptr] = []
    for value in values:
        first = next(arguments)
        if isinstance(value, Int):
            seen.append(Int(inner, first))
        elif k.checked:
            seen.append(Ptr(inner, first, next(arguments), next(arguments)))
        else:
            seen.append(Ptr(inner, first))
    body(inner, seen)
    builder.ret_void()
