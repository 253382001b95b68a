"""All kernels build for the GPUs that are supported, without spills, on a machine that has none.

For the older architecture each kernel is built once, and attention over chunks, which has the most registers; for the
newer one all uses that differ much are.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 600

# Builds kernels as `python -m lab.gpu_builds` does, after one whose limits no kernel can keep.
_TOO_TIGHT = """
import sys
from dataclasses import replace
from lab.gpu_builds import __main__ as build
spec = replace(build.all_specs("embed")[0], max_registers=1, max_spill_bytes=-1)
print(build.build(spec, 90).excess)
"""
_COMMON = _TOO_TIGHT + "sys.exit(build.main())\n"
_ONE_OF_EACH = (
    _TOO_TIGHT
    + """
common = [spec for spec in build.all_specs(rare=False) if 80 in spec.architectures]
chosen = {}
for spec in common:
    chosen.setdefault("attention_chunk" if spec.name == "attention_chunk" else spec.kernel.__name__, spec)
build.all_specs = lambda *args, **kwargs: list(chosen.values())
sys.exit(build.main())
"""
)


@pytest.mark.long
@pytest.mark.timeout(BUILD_TIMEOUT_S)
@pytest.mark.parametrize(
    ("program", "architectures"),
    [
        pytest.param(_ONE_OF_EACH, [80], id="one of each for sm_80"),
        pytest.param(_COMMON, [90], id="all"),
    ],
)
def test_every_kernel_builds_within_its_limits(tmp_path, program, architectures):
    # The interpreter's functions cannot be compiled.
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, "--json", str(tmp_path / "built.json")]
    command += [word for number in architectures for word in ("--arch", str(number))]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    too_tight = done.stdout.splitlines()[0]
    assert "registers, at most 1" in too_tight
    assert "bytes of spills, at most -1" in too_tight
    built = json.loads((tmp_path / "built.json").read_text())
    assert sorted({each["arch"] for each in built}) == architectures
    assert {"attention_decode", "attention_chunk"} <= {each["name"] for each in built}
    for each in built:
        assert each["code_bytes"] > 0
        assert 0 < each["registers"] <= 255
        assert not each["excess"], each
        # Heads and states of 256 fill the registers of a chunk's tile, two parts those of attention in parts, and sums
        # of groups those of 128 rows. Of all but states, what is spilled is outside the loop over keys or inputs.
        spilling = "attention_chunk_256|attention_parts|state_space-falcon|(quantized|grouped).*-128$"
        assert each["spill_bytes"] == 0 or re.match(spilling, each["name"]), each
