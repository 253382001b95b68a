"""Manual driver of the CPU kernels, as :mod:`tests.support.torch_model` of torch."""

from __future__ import annotations

import pytest

from pillion.engine.backends.cpu import cpu_model as module
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import load_cpu_model
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.kernels.cpu.language.isa import Isa, choose_isa, host_features
from tests.support.kernel_cache import kept_kernels
from tests.support.torch_model import BackendDriver

ISA = choose_isa("auto", host_features())
needs_kernels = pytest.mark.skipif(ISA is None, reason="there are no kernels for this processor")


def cpu_backend(
    prepared: PreparedModel,
    block_size: int = 16,
    threads: int = 1,
    kernels: str | Isa = "auto",
    kv_cache_dtype: str = "auto",
    checked: bool | None = None,
) -> CpuBackend:
    """Return a backend of the exact kernels for this processor, or of another instruction set that it supports."""
    isa = kernels if isinstance(kernels, Isa) else choose_isa(kernels, host_features(), exact_codes=True)
    assert isa is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compile_kernels", kept_kernels)
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
