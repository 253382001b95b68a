"""The kernels on ARM: compiled for NEON, run under emulation.

Without the emulator or the cross compiler, the skip of this one test also stands for test_emulated_kernels.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from pillion.errors import Internal
from tests.support.emulated import EmulatedRunner, available
from tests.support.kernel_runner import rows_step
from tests.support.small_kernels import Scale, Stray, WhoAmI


@pytest.mark.skipif(not available(), reason="needs qemu-user and a cross compiler for aarch64")
def test_threads_share_the_work_and_faults_are_reported(tmp_path_factory):
    for checked in (False, True):
        runner = EmulatedRunner([Scale(), WhoAmI(), Stray()], tmp_path_factory.mktemp("arm"), checked)
        for threads in (1, 3):
            shared_by(runner, threads)
        out, waste = np.zeros(4, np.int64), np.zeros((4, 16), np.float32)
        runner.run(WhoAmI(), {"out": out, "waste": waste, "turns": 1000}, rows_step(1), threads=4)
        assert out.tolist() == [1, 1001, 2001, 3001]
        if checked:
            out = np.zeros(16, np.float32)
            with pytest.raises(Internal, match="stray_False accessed byte 4"):
                runner.run(Stray(), {"out": out, "offset": 4}, rows_step(1))
            assert not out.any()
        runner.close()


def shared_by(runner, threads):
    """Each of 37 items is computed once, by any thread."""
    items = 37
    x, out = np.random.default_rng(1).standard_normal((2, items, 16), np.float32)
    expected = (x.astype(np.float64) * np.float32(0.3) + out).astype(np.float32)
    runner.run(Scale(), {"x": x, "out": out, "items": items, "factor": 0.3}, rows_step(1), threads)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)
