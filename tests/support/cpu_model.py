"""Drives the CPU kernels by hand, as :mod:`tests.support.torch_model` drives torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pillion.engine.backends.cpu import cpu_backend as module
from pillion.engine.backends.cpu.cpu_backend import CpuBackend, load_cpu_model
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.model_config import load_config
from pillion.engine.models.rank_split import RankSplit
from pillion.kernels.cpu.language.isa import Isa, choose_isa, host_features
from pillion.kernels.cpu.language.module import KernelSpec
from pillion.kernels.cpu.runtime.compiler import CompiledKernels, compile_kernels
from tests.support.torch_model import BackendDriver

ISA = choose_isa("auto", host_features())
needs_kernels = pytest.mark.skipif(ISA is None, reason="there are no kernels for this processor")


@dataclass(frozen=True)
class KernelUse:
    """A model on the CPU kernels, as :func:`cpu_backend` takes it, or the ranks that share it."""

    prepared: PreparedModel
    block_size: int = 16
    kv: str = "auto"
    checked: bool = False
    kernels: str = "auto"
    ranks: int = 1

    @property
    def isa(self) -> Isa:
        """Raises ConfigError where this processor has no such instructions."""
        found = choose_isa(self.kernels, host_features())
        assert found is not None
        return found

    def planned(self) -> dict[str, KernelSpec]:
        """The model's kernels by name, which are not compiled."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "compile_kernels", lambda *specs, **options: None)
            config = load_config(self.prepared.folder)
            splits = [RankSplit.of(config, rank, self.ranks) for rank in range(self.ranks)]
            models = [
                load_cpu_model(self.prepared, self.block_size, self.isa, kv_cache_dtype=self.kv, split=split)
                for split in splits
            ]
        return {operation.spec.name: operation.spec for model in models for operation in model.plan.operations}


class KernelShelf:
    """Compiled kernels that the small models of a process share: without it, LLVM takes most of such a test's time.

    A model takes any kernels among which its own are. Where there are none yet, its kernels and those that are expected
    for other models are compiled together, once. A kernel is the same function beside any others.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[Isa, bool], list[CompiledKernels]] = {}
        self._expected: dict[tuple[Isa, bool], dict[str, KernelSpec]] = {}

    def expect(self, uses: Iterable[KernelUse]) -> None:
        """Plans what models will be used; forgets what was expected before."""
        self._expected = {}
        for use in uses:
            self._expected.setdefault((use.isa, use.checked), {}).update(use.planned())

    def compile(
        self, specs: Sequence[KernelSpec], isa: Isa, *, checked: bool = False, **unused: Any
    ) -> CompiledKernels:
        """Stands for :func:`pillion.kernels.cpu.runtime.compiler.compile_kernels`."""
        wanted, shelf = {spec.name: spec for spec in specs}, self._compiled.setdefault((isa, checked), [])
        for kernels in shelf:
            if wanted.keys() <= set(kernels.names):
                return kernels
        expected = self._expected.get((isa, checked), {})
        together = expected if wanted.keys() <= expected.keys() else wanted
        shelf.append(compile_kernels(list(together.values()), isa, checked=checked))
        return shelf[-1]


SHELF = KernelShelf()


def cpu_backend(
    prepared: PreparedModel,
    block_size: int = 16,
    threads: int = 1,
    kernels: str = "auto",
    kv_cache_dtype: str = "auto",
    checked: bool | None = None,
) -> CpuBackend:
    """A backend of the kernels for this processor, or of another instruction set that it has."""
    isa = choose_isa(kernels, host_features())
    assert isa is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compile_kernels", SHELF.compile)
        model = load_cpu_model(prepared, block_size, isa, kv_cache_dtype=kv_cache_dtype, checked=checked)
    return CpuBackend(model, threads)


class CpuDriver(BackendDriver):
    """One backend, one pool of NaN, any number of texts."""

    def __init__(
        self,
        prepared: PreparedModel,
        block_size: int = 16,
        num_slots: int = 64,
        seed: int = 0,
        backend: CpuBackend | None = None,
    ) -> None:
        super().__init__(prepared, block_size, num_slots, seed, backend or cpu_backend(prepared, block_size))
