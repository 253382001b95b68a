"""All kernels build for the supported GPUs, without spills, on a machine without a GPU.

For the newer architecture each is built with each type of its arguments and each value of its constants, for the older
one once; `python -m lab.gpu_builds` builds all combinations that differ considerably.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from lab.gpu_builds.specs import ARCHITECTURES

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 600

# Builds kernels like `python -m lab.gpu_builds --few`, after one with limits that no kernel meets.
_PROGRAM = """
import sys
from dataclasses import replace
from lab.gpu_builds import __main__ as build
spec = replace(build.all_specs("embed")[0], max_registers=1, max_spill_bytes=-1)
print(build.build(spec, 90).excess)
sys.exit(build.main())
"""


@pytest.mark.long
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_every_kernel_builds_within_its_limits(tmp_path):
    # The interpreter's functions cannot be compiled.
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _PROGRAM, "--few", "--json", str(tmp_path / "built.json")]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    too_tight = done.stdout.splitlines()[0]
    assert "registers, at most 1" in too_tight
    assert "bytes of spills, at most -1" in too_tight
    built = json.loads((tmp_path / "built.json").read_text())
    for arch in ARCHITECTURES:
        names = [each["name"] for each in built if each["arch"] == arch]
        assert "attention_decode" in names
        assert any(name.startswith("attention_chunk") for name in names)
    for each in built:
        assert each["code_bytes"] > 0
        assert 0 < each["registers"] <= 255
        assert not each["excess"], each
        # Heads of 256 fill the registers, as do two parts of attention, and sums of parts beside those of groups of 128
        # rows. Spills are outside of the loops over keys and inputs.
        spilling = "attention_(chunk|decode)_256|attention_parts|(quantized|grouped).*-128$|delta_solve.*fp32"
        assert each["spill_bytes"] == 0 or re.match(spilling, each["name"]), each
