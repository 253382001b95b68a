"""All kernels build for the GPUs that are supported, without spills, on a machine that has none."""

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

# Compiles nothing but one kernel, whose limits no kernel can keep.
_TOO_TIGHT = """
from dataclasses import replace
from pillion.kernels.gpu.build import all_specs, build
spec = replace(all_specs("embed")[0], max_registers=1, max_spill_bytes=-1)
print(build(spec, 90).excess)
"""


def run(*command: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    # The interpreter's functions cannot be compiled.
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )


@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_every_kernel_builds_within_its_limits(tmp_path):
    done = run("-m", "pillion.kernels.gpu.build", "--json", str(tmp_path / "built.json"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    built = json.loads((tmp_path / "built.json").read_text())
    assert {each["arch"] for each in built} == {80, 90}
    for each in built:
        assert each["code_bytes"] > 0
        assert 0 < each["registers"] <= 255
        assert not each["excess"], each
        # Heads of 256 fill the registers of a chunk's tile; what is spilled there is outside the loop over keys.
        assert each["spill_bytes"] == 0 or re.match("attention_chunk_256", each["name"]), each


def test_a_kernel_beyond_its_limits_fails(tmp_path):
    done = run("-c", _TOO_TIGHT, folder=tmp_path)
    assert "registers, at most 1" in done.stdout, done.stderr
    assert "bytes of spills, at most -1" in done.stdout
