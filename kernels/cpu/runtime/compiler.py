"""Compiles kernel specs to machine code: through LLVM the first time, from the code cache on disk after that."""

from __future__ import annotations

import gc
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from pillion.kernels.cpu.language.isa import Isa, host_features
from pillion.kernels.cpu.language.module import FAULT_CELL, KernelModule, KernelSpec
from pillion.kernels.cpu.runtime.code_cache import CodeCache, key_of
from pillion.kernels.cpu.runtime.thread_pool_code import THREAD_POOL_FUNCTIONS, add_thread_pool

Progress = Callable[[str], None]

_LINUX = "unknown-linux-gnu"


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """The machine that LLVM compiles for, in LLVM's names."""

    triple: str
    cpu: str
    features: str


class CompiledKernels:
    """Machine code in memory, as long as this object lives.

    Attributes:
        names: names of the kernels in the order of their specs; the fault cell holds an index into them, plus one.
        checked: whether kernels check every access.
        seconds: how long it took to get the code.
        from_cache: whether the code came from the cache on disk.
    """

    def __init__(
        self, code: bytes, target: CompileTarget, names: Sequence[str], *, checked: bool, from_cache: bool
    ) -> None:
        self.names = tuple(names)
        self.checked, self.from_cache = checked, from_cache
        self.seconds = 0.0
        # LLVM's code loader needs a module to begin with; it stays empty.
        empty = llvm.parse_assembly(f'target triple = "{target.triple}"')
        self._engine = llvm.create_mcjit_compiler(empty, _machine(target))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._addresses = {
            name: self._engine.get_function_address(name) for name in (*self.names, *THREAD_POOL_FUNCTIONS)
        } | {FAULT_CELL: self._engine.get_global_value_address(FAULT_CELL)}
        missing = [name for name, address in self._addresses.items() if not address]
        assert not missing, f"the code has no {missing}"

    def address(self, name: str) -> int:
        """The address of a kernel, a function of the thread pool, or the fault cell. Raises KeyError for others."""
        return int(self._addresses[name])


def target_of(isa: Isa) -> CompileTarget:
    """The target for ``isa``: this processor without the features that ``isa`` excludes, or ``isa.model`` where this
    processor cannot run ``isa``.

    LLVM ends the process where code needs an instruction that its target lacks.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    if platform.machine() == isa.machine and set(isa.needs) <= host_features():
        # The list also says which features are missing: a hypervisor may hide some that processors of this name have.
        cpu, features = llvm.get_host_cpu_name(), [llvm.get_host_cpu_features().flatten()]
    else:
        cpu, features = isa.model, [f"+{name}" for name in isa.needs]
    features += [f"-{name}" for name in isa.without]
    return CompileTarget(f"{isa.machine}-{_LINUX}", cpu, ",".join(features))


def compile_kernels(
    specs: Sequence[KernelSpec],
    isa: Isa,
    *,
    checked: bool = False,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
) -> CompiledKernels:
    """The kernels of ``specs`` with the code of the thread pool, ready to run on this machine.

    Args:
        specs: the kernels; specs of one name are one kernel.
        isa: an instruction set that this processor has (:func:`pillion.kernels.cpu.language.isa.choose_isa`).
        checked: kernels check every access.
        cache_folder: folder that keeps code between runs; None keeps none.
        progress: is called with one line before and one line after compiling.
    """
    begin = time.perf_counter()
    report = progress or (lambda line: None)
    target = target_of(isa)
    names = list(dict.fromkeys(spec.name for spec in specs))
    cache = CodeCache(cache_folder) if cache_folder else None
    key = key_of(llvmlite.__version__, repr(llvm.llvm_version_info), repr(isa), repr(target), str(checked), *names)
    code = cache.read(key) if cache else None
    from_cache = code is not None
    if code is None:
        with cache.one_compiler(key) if cache else nullcontext():
            # Another process may have compiled it while this one waited.
            code = cache.read(key) if cache else None
            from_cache = code is not None
            if code is None:
                report(f"compiling CPU kernels for {isa.name} ({len(names)})")
                code = object_code(specs, isa, checked=checked)
                if cache:
                    cache.write(key, code)
    kernels = CompiledKernels(code, target, names, checked=checked, from_cache=from_cache)
    kernels.seconds = time.perf_counter() - begin
    origin = "from the cache" if from_cache else "compiled"
    report(f"CPU kernels for {isa.name} {origin} ({len(names)}, {kernels.seconds:.1f} s)")
    return kernels


def object_code(specs: Sequence[KernelSpec], isa: Isa, *, checked: bool = False) -> bytes:
    """An ELF object of the kernels and the thread pool; ``isa`` may be of another kind of machine than this one."""
    module, machine = _optimized(specs, isa, checked)
    return bytes(machine.emit_object(module))


def assembly(specs: Sequence[KernelSpec], isa: Isa, *, checked: bool = False) -> dict[str, str]:
    """The instructions of each function by name, for tests that look for spilled registers, for instance."""
    module, machine = _optimized(specs, isa, checked)
    body = re.compile(r'@function\n"?([^\s"]+)"?:.*?^\.Lfunc_end', re.MULTILINE | re.DOTALL)
    bodies = body.finditer(machine.emit_assembly(module))
    return {body.group(1): body.group(0) for body in bodies}


def _optimized(specs: Sequence[KernelSpec], isa: Isa, checked: bool) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    target = target_of(isa)
    machine = _machine(target)
    with _no_collection():
        kernels = KernelModule(isa, checked)
        for spec in specs:
            kernels.add(spec)
        add_thread_pool(kernels.module, isa)
        kernels.module.triple = target.triple
        text = str(kernels.module)
    module = llvm.parse_assembly(text)
    module.verify()
    # The kernels' own code decides what is a vector and what is unrolled.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module, machine


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector of garbage waits meanwhile.

    A module is some millions of objects that all live until its text is written. The collector would go through all of
    them many times and find nothing, which takes longer than making them.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _machine(target: CompileTarget) -> llvm.TargetMachine:
    """LLVM's code generator, for code that is loaded anywhere in memory, far from libc."""
    kind = llvm.Target.from_triple(target.triple)
    return kind.create_target_machine(cpu=target.cpu, features=target.features, opt=3, jit=True)
