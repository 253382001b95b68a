"""Instruction sets of the CPU kernels, and the choice of one for this processor.

Features are named as in LLVM. Only :func:`host_features` needs LLVM.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache

from pillion.errors import ConfigError

# Lanes of a vector in the kernels' language, on every processor; also the tokens of a group in the KV pool.
LANES = 16
# Max attention plans of a step: one per distinct number of KV heads among the layers.
ATTENTION_PLANS = 2
# Features of the matrix tiles: usable only after Linux has granted the process their registers.
_TILE_FEATURES = ("amx-tile", "amx-bf16", "amx-int8")


@dataclass(frozen=True, slots=True)
class TileRows:
    """Max rows of tiles whose sums stay in registers: ``wide`` for tiles of all 32 columns of a panel, ``narrow`` for
    tiles of 16 columns (0: no narrow tiles)."""

    wide: int
    narrow: int = 0

    @property
    def tallest(self) -> int:
        return max(self.wide, self.narrow)


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set.

    Attributes:
        name: its value of ``--cpu-kernels``.
        needs: features that the processor must have.
        without: features that stay unused even if the processor has them, so that the code is the same everywhere.
        machine: the architecture, as ``uname -m`` prints it.
        model: LLVM's CPU name to compile for if this machine cannot run the instruction set.
        bf16_dot: "x86" with an instruction for the dot product of bfloat16 pairs (VDPBF16PS), else "".
        int8_dot: the instruction for the dot product of four 8-bit codes: "vpdpbusd" or "sdot"; "" if wider products
            are used instead.
        bf16_tiles: tile sizes for bfloat16 rows.
        fp32_tiles: tile sizes for float32 rows.
        int8_tiles: tile sizes for int8 rows with one scale per row.
        dot_tiles: tile sizes for int8 rows with a scale per group of inputs.
        matrix_tiles: whether one instruction multiplies tiles of 16 rows of bfloat16 pairs or codes, as AMX's do
            (:mod:`pillion.kernels.cpu.language.matrix_tiles`).
        emulated_tiles: whether AMX's instructions are emulated, for tests on processors without them.
        version: version of the arithmetic, incremented by releases that change bits of results.
        rounds_codes: whether bfloat16 rows are multiplied by scale * code + offset rounded to bfloat16, not by the
            exact value (:mod:`pillion.kernels.cpu.quantized.rounded_codes`). Needs ``matrix_tiles``.
        attention_rows: query rows that share a pass over a KV head's blocks.
        attention_sums: accumulator vectors of such a pass that fit into the registers besides its operands.
        decode_groups: groups of 16 tokens whose scores are computed at a time for few rows.
        products_load: whether tiles that unpack codes load a row's value as an operand of each product, instead of once
            for both halves of a panel. Results have the same bits, so it does not make another instruction set.
    """

    name: str
    needs: tuple[str, ...]
    without: tuple[str, ...] = ()
    machine: str = "x86_64"
    model: str = "x86-64-v4"
    bf16_dot: str = ""
    int8_dot: str = ""
    matrix_tiles: bool = False
    emulated_tiles: bool = False
    version: int = 1
    rounds_codes: bool = False
    bf16_tiles: TileRows = TileRows(14)
    fp32_tiles: TileRows = TileRows(12)
    int8_tiles: TileRows = TileRows(14)
    dot_tiles: TileRows = TileRows(12)
    attention_rows: int = 12
    attention_sums: int = 24
    decode_groups: int = 4
    products_load: bool = True

    @property
    def label(self) -> str:
        """Name in logs and in a worker's registration. Instruction sets whose results differ in bits differ in it."""
        version = f".{self.version}" if self.version > 1 else ""
        return f"{self.name}{version}{'-rounded' if self.rounds_codes else ''}"


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_BF16 = Isa(
    "avx512_bf16",
    (*_AVX512, "avx512bf16", "avx512vbmi", "avx512vnni"),
    without=("prefer-256-bit",),
    bf16_dot="x86",
    int8_dot="vpdpbusd",
)
_AVX2 = Isa(
    "avx2",
    ("avx2", "fma", "f16c", "bmi2"),
    without=("avx512f", "avx10.1", "avxvnni"),
    model="x86-64-v3",
    bf16_tiles=TileRows(1, 4),
    fp32_tiles=TileRows(2, 6),
    int8_tiles=TileRows(1, 3),
    dot_tiles=TileRows(1, 2),
    attention_rows=4,
    attention_sums=4,
)
_NEON = Isa(
    "neon",
    ("neon", "fp-armv8"),
    without=("sve", "sve2", "sme", "dotprod"),
    machine="aarch64",
    model="generic",
    bf16_tiles=TileRows(1, 4),
    fp32_tiles=TileRows(1, 4),
    int8_tiles=TileRows(1, 2),
    dot_tiles=TileRows(1, 2),
    attention_rows=4,
    attention_sums=4,
)

# Best instruction set first: ``auto`` selects the first one whose features the processor has.
TABLE = (
    replace(
        _AVX512_BF16,
        name="amx",
        needs=(*_AVX512_BF16.needs, *_TILE_FEATURES),
        version=2,
        matrix_tiles=True,
        rounds_codes=True,
    ),
    _AVX512_BF16,
    Isa(
        "avx512_vnni",
        (*_AVX512, "avx512vnni"),
        without=("avx512bf16", "prefer-256-bit"),
        int8_dot="vpdpbusd",
        bf16_tiles=TileRows(6),
    ),
    Isa(
        "avx512",
        _AVX512,
        without=("avx512bf16", "avx512vnni", "avxvnni", "prefer-256-bit"),
        bf16_tiles=TileRows(6),
        int8_tiles=TileRows(6),
        dot_tiles=TileRows(4),
    ),
    replace(
        _AVX2,
        name="avx2_vnni",
        needs=(*_AVX2.needs, "avxvnni"),
        without=("avx512f", "avx10.1"),
        int8_dot="vpdpbusd",
        int8_tiles=TileRows(2, 6),
        dot_tiles=TileRows(1, 4),
    ),
    _AVX2,
    replace(
        _NEON,
        name="neon_dot",
        needs=(*_NEON.needs, "dotprod"),
        without=("sve", "sve2", "sme"),
        int8_dot="sdot",
        int8_tiles=TileRows(2, 4),
        dot_tiles=TileRows(1, 4),
    ),
    _NEON,
)
BY_NAME = {isa.name: isa for isa in TABLE}
# Values of ``--cpu-kernels``.
CHOICES = ("auto", *BY_NAME, "torch")


def host_features() -> frozenset[str]:
    """Return the processor features that this process may use; empty if the kernels cannot run (not Linux, no LLVM)."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or sys.byteorder != "little":
        return frozenset()
    try:
        import llvmlite.binding as llvm

        host = llvm.get_host_cpu_features()
    except (ImportError, OSError, RuntimeError):  # no LLVM, or it cannot read this processor's features
        return frozenset()
    features = {name for name, has in host.items() if has}
    if platform.machine() == "aarch64":
        # LLVM may not list NEON and floating point, but Linux requires both on 64-bit ARM.
        features |= {"neon", "fp-armv8"}
    if "amx-tile" in features and not _request_tiles():
        features -= set(_TILE_FEATURES)
    return frozenset(features)


@cache
def _request_tiles() -> bool:
    """Request the tiles' registers for all threads of this process and its children; return whether they were granted.
    Signal frames grow with them, so Linux refuses if a thread has a small alternate signal stack."""
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return int(ctypes.CDLL(None).syscall(*map(ctypes.c_long, (158, 0x1023, 18)))) == 0


def choose_isa(choice: str, features: Collection[str], *, exact_codes: bool = False) -> Isa | None:
    """Return the instruction set to compile for, or None if torch runs the model.

    Args:
        choice: one of ``CHOICES``. ``auto`` selects the best instruction set that the processor has, or None.
        features: the processor's features, as :func:`host_features` lists them.
        exact_codes: whether products must not round quantized weights.

    Raises:
        ConfigError: ``choice`` is not in ``CHOICES``, or the processor lacks features that it needs.
    """
    if choice not in CHOICES:
        raise ConfigError(f"--cpu-kernels: {choice!r} is none of {', '.join(CHOICES)}")
    if choice == "torch":
        return None
    if choice == "auto":
        best = next((isa for isa in TABLE if not _lacking(isa, features)), None)
        return best and _tuned(best, features, exact_codes)
    lacking = _lacking(BY_NAME[choice], features)
    if lacking:
        raise ConfigError(f"--cpu-kernels {choice}: this processor lacks {', '.join(lacking)}; use auto or torch")
    return _tuned(BY_NAME[choice], features, exact_codes)


def _tuned(isa: Isa, features: Collection[str], exact_codes: bool) -> Isa:
    """Return the instruction set adapted to ``exact_codes`` and to a processor with these features."""
    if isa.rounds_codes and exact_codes:
        isa = replace(isa, rounds_codes=False)
    # Zen 5 starts two bfloat16 dot products per cycle, but at most two vector loads.
    return replace(isa, products_load=False) if isa.bf16_dot and "avx512vp2intersect" in features else isa


def _lacking(isa: Isa, features: Collection[str]) -> list[str]:
    return [name for name in isa.needs if name not in features]
