"""The tests of the kernels as ARM code, under emulation.

Without an emulator this file has no tests, and test_emulated_arm.py reports that.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.kernels.cpu import (
    test_attention,
    test_gemm,
    test_moe,
    test_rotate,
    test_rows,
)
from tests.support.emulated import EmulatedRunner, available
from tests.support.kernel_runner import with_checks


def emulated(module: Any, isa: str = "neon") -> type:
    """A class of the tests of ``module`` that run its SPECS, compiled for ``isa``."""

    @staticmethod
    def runner(tmp_path_factory):
        found = EmulatedRunner(module.SPECS, tmp_path_factory.mktemp("arm"), checked=False, isa=isa)
        yield found
        found.close()

    tests = {
        name: staticmethod(test)
        for name, test in vars(module).items()
        if name.startswith("test_") and "runner" in inspect.signature(test).parameters and not left_out(test)
    }
    assert tests
    return type("Emulated", (), {"runner": pytest.fixture(scope="class")(runner), **tests})


def left_out(test: Any) -> bool:
    """Return whether a test needs kernels that check accesses, unlike these, or takes long under emulation."""
    if with_checks.mark in getattr(test, "pytestmark", ()):
        return True
    return getattr(test, "is_hypothesis_test", False) or test is test_attention.test_a_row_does_not_depend_on_its_batch


if available():
    TestAttention = emulated(test_attention)
    TestGemm = emulated(test_gemm)
    TestMoe = emulated(test_moe)
    TestRotate = emulated(test_rotate)
    TestRows = emulated(test_rows)
