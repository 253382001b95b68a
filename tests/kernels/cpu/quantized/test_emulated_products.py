"""The tests of quantized products as ARM code, under emulation, if there is an emulator."""

from __future__ import annotations

from tests.kernels.cpu.quantized import test_input_rows, test_integer_products, test_quantized_products
from tests.kernels.cpu.test_emulated_kernels import emulated
from tests.support.emulated import available

if available():
    TestInputRows = emulated(test_input_rows)
    TestIntegerProducts = emulated(test_integer_products)
    TestIntegerDotProducts = emulated(test_integer_products, "neon_dot")
    TestQuantizedProducts = emulated(test_quantized_products)
