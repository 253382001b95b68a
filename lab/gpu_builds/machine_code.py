"""Instruction counts of loops in machine code, the limit of products by quantized matrices."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from pillion.kernels.gpu.products.gpu_packing import COLUMNS

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
# Tensor core instructions.
_PRODUCTS = ("HGMMA", "HMMA", "FFMA")


def main_loop(cubin: bytes) -> list[str]:
    """Return the instructions, by name, of the longest innermost loop that multiplies."""
    lines = [(int(at, 16), name, more) for at, name, more in _LINE.findall(_disassembled(cubin))]
    ends = {}
    for at, name, more in lines:
        goal = re.search(r"0x([0-9a-f]+)", more) if name.startswith("BRA") else None
        if goal and int(goal[1], 16) < at:
            ends[int(goal[1], 16)] = at
    inner = [
        (begin, end) for begin, end in ends.items() if not any(begin < other and ends[other] < end for other in ends)
    ]
    loops = [[name for at, name, _ in lines if begin <= at <= end] for begin, end in inner]
    found = [loop for loop in loops if any(name.startswith(_PRODUCTS) for name in loop)]
    return max(found, key=len, default=[])


def weights_of(constants: Mapping[str, Any]) -> int:
    """Return the weights per turn of the loop, 0 for kernels that are not products."""
    if not constants.get("CODING"):
        return int(constants["BLOCK_N"] * constants["BLOCK_K"]) if "CODING" in constants else 0
    return int(constants["BLOCK_N"] * constants["PER_WORD"] * COLUMNS)


def _disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = str(knobs.nvidia.cuobjdump.path)
        return subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
