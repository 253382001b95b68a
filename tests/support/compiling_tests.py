"""A plugin of pytest that compiles what tests launch on a GPU: ``-p tests.support.compiling_tests``.

Tests of kernels run over tensors of the CPU as they would natively, but launches only compile. What tests compare
passes, so that they go on to their next launch; a test that fails for what a kernel has not written is no harm.
"""

from __future__ import annotations

import collections
import os

import torch

# The tests decide where kernels run when this is imported, before any kernel is.
from tests.support import gpu

gpu.NATIVE, gpu.DEVICE = True, torch.device("cpu")
os.environ["TRITON_INTERPRET"] = "0"
_counts: collections.Counter[str] = collections.Counter()


def pytest_configure() -> None:
    """Begins to compile in place of launching."""
    from lab.gpu_builds.cache import KEY, compile_for_gpu, compiler_key
    from lab.gpu_builds.compilations import counted_kernels

    global _counts
    compile_for_gpu(os.environ.get(KEY) or compiler_key())
    _counts = counted_kernels()
    torch.testing.assert_close = lambda *args, **kwargs: None
    torch.equal = lambda *args: True
    torch.allclose = lambda *args, **kwargs: True


def pytest_sessionfinish() -> None:
    """Says what was compiled."""
    print(f"\ncompiled {_counts['compiled']}, in the cache {_counts['in the cache']}")
