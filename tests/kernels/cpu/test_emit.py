"""The functions of the kernels' language against numpy and torch, on all special bit patterns and many others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pillion.kernels.cpu.language.emit import VECTOR_BYTES
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from tests.support.kernel_runner import ISAS, Runner, isa_or_skip, isa_runs, rows_step


@dataclass(frozen=True, slots=True)
class Apply(KernelSpec):
    """out = a function of x, both float32 except the result of "to_bf16"."""

    layout = RecordLayout("apply", pointers=("x", "out"), numbers=("vectors",))
    function: str

    def emit(self, call: KernelCall) -> None:
        k, x, out = call.k, call.args.pointer("x"), call.args.pointer("out")
        with call.even_share(call.args.number("vectors")) as i:
            value = k.load(x + i * VECTOR_BYTES)
            if self.function == "to_bf16":
                k.store_float(out + i * (VECTOR_BYTES // 2), value, True)
            else:
                k.store(out + i * VECTOR_BYTES, getattr(k, self.function)(value))


# Functions of products in matrix tiles alone.
ROUGH = ("exp2_rough", "sigmoid_rough")


@pytest.fixture(scope="module", params=[name for name in ISAS if isa_runs(name)] or ISAS)
def runner(request):
    functions = ("exp2", "sigmoid", "tanh", "softplus", "to_bf16", *ROUGH)
    found = Runner([Apply(name) for name in functions], isa_or_skip(request.param), False)
    yield found
    found.close()


def apply(runner, function, x, dtype=np.float32):
    """x [n] float32, n a multiple of 16."""
    out = np.zeros(len(x), dtype)
    runner.run(Apply(function), {"x": x, "out": out, "vectors": len(x) // LANES}, rows_step(1))
    return out


def test_exp2_matches_numpy(runner):
    x = np.linspace(-126, 127, 1 << 18).astype(np.float32)
    np.testing.assert_allclose(apply(runner, "exp2", x), np.exp2(x.astype(np.float64)), rtol=3e-7)
    hidden = np.resize(np.array([-126.001, -1e4, -1e30, -np.inf], np.float32), LANES)
    assert not apply(runner, "exp2", hidden).any()


@pytest.mark.parametrize(("function", "exact"), [("sigmoid", lambda x: 1 / (1 + np.exp(-x))), ("tanh", np.tanh)])
def test_saturating_functions(runner, function, exact):
    x = np.concatenate([np.linspace(-95, 95, 1 << 16), np.linspace(-1, 1, 1 << 12)]).astype(np.float32)
    np.testing.assert_allclose(apply(runner, function, x), exact(x.astype(np.float64)), rtol=0, atol=1e-6)
    assert np.isnan(apply(runner, "tanh", np.full(LANES, np.nan, np.float32))).all()
    ends = np.resize(np.array([-np.inf, np.inf, -3e38, 3e38], np.float32), LANES)
    np.testing.assert_allclose(apply(runner, function, ends), exact(np.clip(ends, -80, 80)), atol=1e-6)


def test_approximate_functions_stay_within_their_error(runner):
    """Within a tenth of a rounding to bfloat16."""
    x = np.linspace(-126, 127, 1 << 18).astype(np.float32)
    np.testing.assert_allclose(apply(runner, "exp2_rough", x), np.exp2(x.astype(np.float64)), rtol=8e-5)
    assert not apply(runner, "exp2_rough", np.resize(np.array([-150, -1e4, -1e30], np.float32), 3 * LANES)).any()
    x = np.linspace(-80, 95, 1 << 18).astype(np.float32)
    np.testing.assert_allclose(apply(runner, "sigmoid_rough", x), 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1.5e-4)
    ends = np.resize(np.array([-3e38, 3e38], np.float32), LANES)
    np.testing.assert_allclose(apply(runner, "sigmoid_rough", ends), np.resize([0, 1], LANES), atol=1.5e-4)


def test_softplus_matches_numpy(runner):
    x = np.concatenate([np.linspace(-85, 95, 1 << 16), np.linspace(-1, 1, 1 << 12)]).astype(np.float32)
    np.testing.assert_allclose(apply(runner, "softplus", x), np.logaddexp(x.astype(np.float64), 0), rtol=1e-5)
    ends = np.resize(np.array([-np.inf, np.inf, -3e38, 3e38, np.nan], np.float32), 5 * LANES)
    wanted = np.resize(np.array([0, np.inf, 0, 3e38, np.nan], np.float32), 5 * LANES)
    np.testing.assert_array_equal(apply(runner, "softplus", ends), wanted)


def test_bfloat16_is_rounded_as_torch_does(runner):
    """Infinities, halfway cases, the largest number, NaN; but denormal numbers may become zero."""
    special = [0, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x7FC00000, 0xFF800001, 0x00800000]
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    bits[: len(special)] = special
    x = bits.view(np.float32)
    found = apply(runner, "to_bf16", x, np.int16)
    expected = torch.from_numpy(x).bfloat16()
    finite = ~np.isnan(x) & ~((np.abs(x) < np.finfo(np.float32).tiny) & (x != 0))
    np.testing.assert_array_equal(found[finite], expected.view(torch.int16).numpy()[finite])
    assert torch.from_numpy(found).view(torch.bfloat16)[torch.from_numpy(np.isnan(x))].isnan().all()
