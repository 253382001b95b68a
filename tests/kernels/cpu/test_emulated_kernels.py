"""The tests of the kernels once more: as ARM code, under emulation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.kernels.cpu import (
    test_attention,
    test_gemm,
    test_input_rows,
    test_integer_products,
    test_moe,
    test_quantized_products,
    test_rotate,
    test_rows,
)
from tests.support.emulated import EmulatedRunner, available

pytestmark = pytest.mark.skipif(not available(), reason="needs qemu-user and a cross compiler for aarch64")


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
        if name.startswith("test_") and "runner" in inspect.signature(test).parameters and not takes_long(test)
    }
    assert tests
    return type("Emulated", (), {"runner": pytest.fixture(scope="class")(runner), **tests})


def takes_long(test: Any) -> bool:
    """Under emulation; the kernels' own tests have these."""
    return getattr(test, "is_hypothesis_test", False) or test is test_attention.test_a_row_does_not_depend_on_its_batch


TestAttention = emulated(test_attention)
TestGemm = emulated(test_gemm)
TestInputRows = emulated(test_input_rows)
TestIntegerProducts = emulated(test_integer_products)
TestIntegerDotProducts = emulated(test_integer_products, "neon_dot")
TestMoe = emulated(test_moe)
TestQuantizedProducts = emulated(test_quantized_products)
TestRotate = emulated(test_rotate)
TestRows = emulated(test_rows)
