"""Compiled kernels shared by all tests, of this run and later ones: LLVM would dominate many tests' time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pillion.kernels.cpu.language.isa import Isa
from pillion.kernels.cpu.language.module import KernelSpec
from pillion.kernels.cpu.runtime.compiler import CompiledKernels, compile_kernels
from tests.support.own_cache import KERNEL_CACHE

_loaded: dict[tuple[Isa, bool, tuple[str, ...]], CompiledKernels] = {}


def kept_kernels(specs: Sequence[KernelSpec], isa: Isa, *, checked: bool = False, **unused: Any) -> CompiledKernels:
    """Replace :func:`pillion.kernels.cpu.runtime.compiler.compile_kernels`, loading kernels once per process."""
    key = isa, checked, tuple(spec.name for spec in specs)
    if key not in _loaded:
        _loaded[key] = compile_kernels(specs, isa, checked=checked, cache_folder=KERNEL_CACHE)
    return _loaded[key]
