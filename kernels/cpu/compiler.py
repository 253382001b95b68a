"""From specs to machine code."""

from __future__ import annotations

from collections.abc import Sequence

import llvmlite.binding as llvm

from kernels.cpu.isa import Isa
from kernels.cpu.module import KernelModule, KernelSpec


class CompiledKernels:
    """Machine code in memory, as long as this object lives."""

    def __init__(self, engine: llvm.ExecutionEngine, names: Sequence[str]) -> None:
        self._engine = engine
        self._addresses = {name: engine.get_function_address(name) for name in names}

    def address(self, name: str) -> int:
        """Of a kernel."""
        return self._addresses[name]


def compile_kernels(specs: Sequence[KernelSpec], isa: Isa, *, checked: bool = False) -> CompiledKernels:
    """Compiles ``specs`` for ``isa``."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = KernelModule(isa, checked)
    for spec in specs:
        module.add(spec)
    parsed = llvm.parse_assembly(str(module.module))
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=isa.cpu or llvm.get_host_cpu_name(),
        features=isa.features or llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return CompiledKernels(engine, module.names)
