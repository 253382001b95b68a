"""What the kernels need to know of a processor, as data; which rows of the table this one can run, and which is taken.

Features are named as LLVM names them. Nothing here needs LLVM, except asking for the features of this processor.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection
from dataclasses import dataclass

from pillion.errors import ConfigError

# Of a vector in the kernels' language, whatever the processor has; tokens of a group of the pool.
LANES = 16
# What ``--cpu-kernels`` takes besides the names of the table.
AUTO, TORCH = "auto", "torch"


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set.

    Attributes:
        name: what ``--cpu-kernels`` calls it.
        needs: features of the processor without which this row cannot be taken.
        without: features that are not used even where the processor has them, so that a row is the same code on all.
        machine: the kind of processor, in the words of ``uname -m``.
        model: the processor that LLVM compiles for where this machine is of another kind.
        bf16_dot: "x86" where there is an instruction for the dot product of bfloat16 pairs (VDPBF16PS), else "".
        gemm_rows: the most rows of a register tile, 32 columns wide, that leave registers for weights and rows.
        attention_rows: query rows that share a pass over a KV head's blocks.
        attention_sums: vectors of sums that stay in registers in such a pass, beside what they are computed from.
        decode_blocks: blocks whose scores are computed side by side where there are few rows.
    """

    name: str
    needs: tuple[str, ...]
    without: tuple[str, ...] = ()
    machine: str = "x86_64"
    model: str = "x86-64-v4"
    bf16_dot: str = ""
    gemm_rows: int = 14
    attention_rows: int = 12
    attention_sums: int = 24
    decode_blocks: int = 4


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

# Best first: ``auto`` takes the first row that the processor has the features for.
TABLE = (
    Isa("avx512_bf16", (*_AVX512, "avx512bf16", "avx512vbmi"), without=("prefer-256-bit",), bf16_dot="x86"),
    Isa(
        "avx512",
        _AVX512,
        without=("avx512bf16", "prefer-256-bit"),
        gemm_rows=6,
    ),
    Isa(
        "avx2",
        ("avx2", "fma", "f16c", "bmi2"),
        without=("avx512f", "avx10.1"),
        model="x86-64-v3",
        gemm_rows=2,
        attention_rows=4,
        attention_sums=4,
    ),
    Isa(
        "neon",
        ("neon", "fp-armv8"),
        without=("sve", "sve2", "sme"),
        machine="aarch64",
        model="generic",
        gemm_rows=4,
        attention_rows=4,
        attention_sums=4,
    ),
)
BY_NAME = {isa.name: isa for isa in TABLE}
CHOICES = (AUTO, *BY_NAME, TORCH)


def host_features() -> frozenset[str]:
    """What this processor and its system can run. Empty where the kernels do not run: off Linux, or if LLVM is lost."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or sys.byteorder != "little":
        return frozenset()
    try:
        import llvmlite.binding as llvm

        found = llvm.get_host_cpu_features()
    except (ImportError, OSError, RuntimeError):  # No LLVM here, or it does not know how to ask this processor.
        return frozenset()
    features = {name for name, has in found.items() if has}
    if platform.machine() == "aarch64":
        features |= {"neon", "fp-armv8"}  # Part of every 64-bit ARM that Linux runs on.
    return frozenset(features)


def choose_isa(said: str, features: Collection[str]) -> Isa | None:
    """The row to compile for, or None: torch computes.

    Args:
        said: one of ``CHOICES``. ``auto`` takes the best row, and None on a processor that no row knows.
        features: of the processor, :func:`host_features`.

    Raises:
        ConfigError: ``said`` is no choice, or a row that the processor lacks features for.
    """
    if said not in CHOICES:
        raise ConfigError(f"--cpu-kernels: {said!r} is none of {', '.join(CHOICES)}")
    if said == TORCH:
        return None
    if said == AUTO:
        return next((isa for isa in TABLE if not _lacking(isa, features)), None)
    lacking = _lacking(BY_NAME[said], features)
    if lacking:
        raise ConfigError(f"--cpu-kernels {said}: this processor lacks {', '.join(lacking)}; take auto or torch")
    return BY_NAME[said]


def _lacking(isa: Isa, features: Collection[str]) -> list[str]:
    return [name for name in isa.needs if name not in features]
