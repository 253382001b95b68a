"""Machine code of CPU kernels for tests: as one object, or as instructions, e.g. to detect register spills."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import llvmlite.binding as llvm

from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.module import KernelModule, KernelSpec
from pillion.kernels.cpu.runtime.compiler import (
    _functions,
    _isolated,
    _machine,
    _no_collection,
    _optimized,
    target_of,
)
from pillion.kernels.cpu.runtime.thread_pool_code import add_thread_pool


def object_code(specs: Sequence[KernelSpec], isa: Isa, *, checked: bool = False) -> bytes:
    """Return one ELF object of the kernels and the thread pool; ``isa`` may be of another architecture."""
    module, machine = _together(specs, isa, checked)
    return bytes(machine.emit_object(module))


def assembly(specs: Sequence[KernelSpec], isa: Isa, *, checked: bool = False) -> dict[str, str]:
    """Return the instructions of each function by name."""
    module, machine = _together(specs, isa, checked)
    return _instructions(machine.emit_assembly(module))


def assembly_of(
    specs: Sequence[KernelSpec], isa: Isa, choose: Callable[[Iterable[str]], Iterable[str]]
) -> dict[str, str]:
    """Return the instructions of the functions whose names ``choose`` picks, each compiled alone as for a cache."""
    target, module = target_of(isa), KernelModule(isa)
    machine, found = _machine(target), dict[str, str]()
    with _no_collection():
        for spec in specs:
            module.add(spec)
        functions = _functions(module.module)
        texts = [_isolated(functions[name])[1] for name in choose(functions)]
    for text in texts:
        found |= _instructions(machine.emit_assembly(_optimized(text, target, machine)))
    return found


def _instructions(text: str) -> dict[str, str]:
    """Return the functions in an assembly text, by name."""
    bodies = re.finditer(r'@function\n"?([^\s"]+)"?:.*?^\.Lfunc_end', text, re.MULTILINE | re.DOTALL)
    return {body.group(1): body.group(0) for body in bodies}


def _together(specs: Sequence[KernelSpec], isa: Isa, checked: bool) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    target = target_of(isa)
    machine = _machine(target)
    with _no_collection():
        kernels = KernelModule(isa, checked)
        kernels.define_fault_cell()
        for spec in specs:
            kernels.add(spec)
        add_thread_pool(kernels.module, isa)
        text = str(kernels.module)
    return _optimized(text, target, machine), machine
