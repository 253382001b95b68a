"""Compilation of kernel specs to machine code: through LLVM the first time, then from the code cache on disk.

A *unit* is compiled and cached by itself: a kernel, a subroutine that kernels call, or the thread pool. So a model
reuses what was compiled for others.
"""

from __future__ import annotations

import gc
import json
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from pillion.kernels.cpu.language.isa import Isa, host_features
from pillion.kernels.cpu.language.module import FAULT_CELL, KernelModule, KernelSpec
from pillion.kernels.cpu.runtime.code_cache import CodeCache, key_of
from pillion.kernels.cpu.runtime.thread_pool_code import THREAD_POOL_FUNCTIONS, add_thread_pool

Progress = Callable[[str], None]

# Name of the unit with the thread pool's functions and the fault cell.
_THREAD_POOL = "thread_pool"
# LLVM's optimization levels: passes, code generation.
_SPEED_LEVEL, _CODE_LEVEL = 2, 3


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """The machine that LLVM compiles for, in LLVM's names."""

    triple: str
    cpu: str
    features: str


@dataclass(frozen=True, slots=True)
class Unit:
    """A compiled unit: an ELF object, and the names of the units that it calls."""

    needs: tuple[str, ...]
    code: bytes

    @classmethod
    def of(cls, content: bytes) -> Unit:
        """Return the unit with these cached bytes, the inverse of ``content``."""
        needs, _, code = content.partition(b"\n")
        return cls(tuple(json.loads(needs)), code)

    @property
    def content(self) -> bytes:
        """The unit as bytes for the cache."""
        return json.dumps(self.needs).encode() + b"\n" + self.code


class CompiledKernels:
    """Loaded machine code, which is freed with this object.

    Attributes:
        names: names of the kernels.
        checked: whether kernels check every access.
        seconds: time that compiling or reading the code took.
        from_cache: whether all code came from the on-disk cache.
    """

    def __init__(
        self, units: Iterable[Unit], target: CompileTarget, names: Sequence[str], *, checked: bool, from_cache: bool
    ) -> None:
        self.names = tuple(names)
        self.checked, self.from_cache = checked, from_cache
        self.seconds = 0.0
        # LLVM's execution engine requires an initial module.
        empty = llvm.parse_assembly(f'target triple = "{target.triple}"')
        self._engine = llvm.create_mcjit_compiler(empty, _machine(target))
        for unit in units:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(unit.code))
        self._engine.finalize_object()
        self._addresses = {
            name: self._engine.get_function_address(name) for name in (*self.names, *THREAD_POOL_FUNCTIONS)
        } | {FAULT_CELL: self._engine.get_global_value_address(FAULT_CELL)}
        missing = [name for name, address in self._addresses.items() if not address]
        assert not missing, f"the code has no {missing}"

    def address(self, name: str) -> int:
        """Return the address of a kernel, a function of the thread pool, or the fault cell. Raises KeyError for other
        names."""
        return int(self._addresses[name])

    def name_at(self, address: int) -> str:
        """Return the name of the kernel at ``address``, which checked kernels record in the fault cell."""
        return next(name for name in self.names if self._addresses[name] == address)


def target_of(isa: Isa) -> CompileTarget:
    """Return the target for ``isa``: this processor without the features that ``isa`` excludes, or ``isa.model`` if
    this processor cannot run ``isa``.

    LLVM aborts the process if code needs an instruction that its target lacks.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    if platform.machine() == isa.machine and set(isa.needs) <= host_features():
        # Lists absent features, too: a hypervisor may hide some that the CPU name implies.
        cpu, features = llvm.get_host_cpu_name(), [llvm.get_host_cpu_features().flatten()]
    else:
        cpu, features = isa.model, [f"+{name}" for name in isa.needs]
    features += [f"-{name}" for name in isa.without]
    return CompileTarget(f"{isa.machine}-unknown-linux-gnu", cpu, ",".join(features))


def compile_kernels(
    specs: Sequence[KernelSpec],
    isa: Isa,
    *,
    checked: bool = False,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
) -> CompiledKernels:
    """Return the kernels of ``specs`` with the code of the thread pool, ready to run on this machine.

    Args:
        specs: the kernels; specs of one name are one kernel.
        isa: an instruction set that this processor has (:func:`pillion.kernels.cpu.language.isa.choose_isa`).
        checked: kernels check every access.
        cache_folder: folder of the code cache; None for none.
        progress: is called with one line before and one line after compiling.
    """
    begin = time.perf_counter()
    report = progress or (lambda line: None)
    target = target_of(isa)
    wanted = {spec.name: spec for spec in specs}
    library = _Library(wanted, isa, target, checked, CodeCache(cache_folder) if cache_folder else None)
    from_cache = not library.missing()
    if not from_cache:
        with library.one_compiler():
            # Another process may have compiled them meanwhile.
            missing = library.missing()
            from_cache = not missing
            if missing:
                report(f"compiling CPU kernels for {isa.name} ({len(missing)})")
                library.compile(missing)
    kernels = CompiledKernels(library.units.values(), target, list(wanted), checked=checked, from_cache=from_cache)
    kernels.seconds = time.perf_counter() - begin
    origin = "from the cache" if from_cache else "compiled"
    report(f"CPU kernels for {isa.name} {origin} ({len(wanted)}, {kernels.seconds:.1f} s)")
    return kernels


class _Library:
    """The units of the wanted kernels, read from the cache or compiled here.

    Attributes:
        units: by name, the units that the wanted kernels consist of and call, and the thread pool.
    """

    def __init__(
        self, wanted: Mapping[str, KernelSpec], isa: Isa, target: CompileTarget, checked: bool, cache: CodeCache | None
    ) -> None:
        self.units: dict[str, Unit] = {}
        self._wanted, self._isa, self._target, self._checked, self._cache = wanted, isa, target, checked, cache
        self._key_parts = (llvmlite.__version__, *map(repr, (llvm.llvm_version_info, isa, target)))

    def missing(self) -> list[str]:
        """Read units from the cache; return the names of wanted kernels, and of the thread pool, that still lack
        units."""
        return [name for name in (_THREAD_POOL, *self._wanted) if not self._complete(name)]

    def compile(self, names: Sequence[str]) -> None:
        """Compile kernels with their missing subroutines, and write them to the cache."""
        before = set(self.units)
        module = KernelModule(self._isa, self._checked)
        with _no_collection():
            if _THREAD_POOL in names:
                pool = KernelModule(self._isa)
                pool.define_fault_cell()
                add_thread_pool(pool.module, self._isa)
                self._add(_THREAD_POOL, (), str(pool.module))
            for name in names:
                if name != _THREAD_POOL:
                    module.add(self._wanted[name])
            for name, function in _functions(module.module).items():
                if not self._complete(name):
                    needs, text = _isolated(function)
                    self._add(name, needs, text)
        if self._cache:
            compiled = {name: unit for name, unit in self.units.items() if name not in before}
            self._cache.write({self._key(name): unit.content for name, unit in compiled.items()})

    @contextmanager
    def one_compiler(self) -> Iterator[None]:
        """Hold the lock under which one process at a time compiles these kernels."""
        with self._cache.one_compiler(self._key("\n".join(self._wanted))) if self._cache else nullcontext():
            yield

    def _complete(self, name: str) -> bool:
        """Read a unit and those that it calls from the cache, unless in memory; return whether none is missing."""
        if name not in self.units:
            content = self._cache.read(self._key(name)) if self._cache else None
            if content is None:
                return False
            self.units[name] = Unit.of(content)
        return all(self._complete(one) for one in self.units[name].needs)

    def _add(self, name: str, needs: Sequence[str], text: str) -> None:
        speed_level, code_level = _SPEED_LEVEL, _CODE_LEVEL
        if self._checks(name):
            # Checked kernels are for debugging; optimizing their branches would take 90% of their compile time. Code
            # generation level 0 is tested on x86-64 only.
            speed_level = 0
            code_level = 0 if self._isa.machine == "x86_64" else _CODE_LEVEL
        machine = _machine(self._target, code_level)
        code = bytes(machine.emit_object(_optimized(text, self._target, machine, speed_level)))
        self.units[name] = Unit(tuple(needs), code)

    def _checks(self, name: str) -> bool:
        # Subroutines and the thread pool never check accesses, so one unit serves both modes.
        return self._checked and name in self._wanted

    def _key(self, name: str) -> str:
        return key_of(*self._key_parts, str(self._checks(name)), name)


def _functions(module: ir.Module) -> dict[str, ir.Function]:
    return {name: one for name, one in module.globals.items() if isinstance(one, ir.Function) and one.blocks}


def _isolated(function: ir.Function) -> tuple[list[str], str]:
    """Return the names of the functions that ``function`` calls and its module defines, and the text of a module that
    contains ``function`` only."""
    text, defined = str(function), _functions(function.module)
    called = [name for name in dict.fromkeys(re.findall(r'@"([^"]+)"', text)) if name != function.name]
    needs = [name for name in called if name in defined]
    declared = [str(function.module.globals[name]) for name in called if name not in defined]
    for name in needs:
        arguments = ", ".join(str(kind) for kind in defined[name].ftype.args)
        declared.append(f'declare {defined[name].ftype.return_type} @"{name}"({arguments})')
    return needs, "\n".join([*declared, text, *map(str, function.module.metadata)])


def _optimized(
    text: str, target: CompileTarget, machine: llvm.TargetMachine, speed_level: int = _SPEED_LEVEL
) -> llvm.ModuleRef:
    module = llvm.parse_assembly(f'target triple = "{target.triple}"\n' + text)
    module.verify()
    # Kernels are vectorized and unrolled by their own code.
    options = llvm.create_pipeline_tuning_options(speed_level=speed_level)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector while the context is open.

    A module has millions of objects, all alive until its text is written. The collector would traverse them repeatedly,
    which takes longer than creating them.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _machine(target: CompileTarget, level: int = _CODE_LEVEL) -> llvm.TargetMachine:
    """Return LLVM's code generator; its code may be loaded far from libc."""
    kind = llvm.Target.from_triple(target.triple)
    return kind.create_target_machine(cpu=target.cpu, features=target.features, opt=level, jit=True)
