"""Compiled kernels that all tests share, of this run and of later ones: LLVM would take most of many tests' time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.module import KernelSpec
from pillion.kernels.cpu.runtime.compiler import CompiledKernels, compile_kernels
from tests.support.own_cache import KERNEL_CACHE

_loaded: dict[tuple[Isa, bool, tuple[str, ...]], CompiledKernels] = {}


def kept_kernels(specs: Sequence[KernelSpec], isa: Isa, *, checked: bool = False, **unused: Any) -> CompiledKernels:
    """Stands for :func:`pillion.kernels.cpu.runtime.compiler.compile_kernels`; loads kernels once in a process."""
    key = isa, checked, tuple(spec.name for spec in specs)
    if key not in _loaded:
        _loaded[key] = compile_kernels(specs, isa, checked=checked, cache_folder=KERNEL_CACHE)
    return _loaded[key]
