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
# Attention plans of a step, at most: one for each distinct number of KV heads among the layers.
ATTENTION_PLANS = 2
# Values of ``--cpu-kernels`` besides the names of the table's rows.
AUTO, TORCH = "auto", "torch"
# Features of the matrix tiles: usable only after the kernel grants the process their registers.
_TILE_FEATURES = ("amx-tile", "amx-bf16", "amx-int8")
# System call arch_prctl, ARCH_REQ_XCOMP_PERM, and the state component XTILEDATA.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class TileRows:
    """Max rows of a register tile that leave registers for weights and rows: ``wide`` for a tile as wide as a panel (32
    columns), ``narrow`` for one half as wide (0: no narrow tiles)."""

    wide: int
    narrow: int = 0

    @property
    def most(self) -> int:
        return max(self.wide, self.narrow)


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set.

    Attributes:
        name: its value of ``--cpu-kernels``.
        needs: features that the processor must have.
        without: features that stay unused even where the processor has them, so that a row is the same code everywhere.
        machine: the kind of processor, as ``uname -m`` prints it.
        model: the processor that LLVM compiles for where this machine is of another kind.
        bf16_dot: "x86" with an instruction for the dot product of bfloat16 pairs (VDPBF16PS), else "".
        int8_dot: the instruction for the dot product of four 8-bit codes: "vpdpbusd", "sdot", or "" where such
            products are built from 16-bit ones.
        bf16_tiles: tiles of products of bfloat16 rows.
        fp32_tiles: tiles of products of float32 rows.
        int8_tiles: tiles of products of rows of int8.
        dot_tiles: tiles of products of rows of int8 with scales for groups of inputs.
        matrix_tiles: whether one instruction multiplies tiles of 16 rows of bfloat16 pairs or codes
            (:mod:`pillion.kernels.cpu.language.matrix_tiles`).
        emulated_tiles: whether such instructions are emulated, for tests on processors without them.
        version: version of the row's arithmetic, incremented by a release that changes its bits.
        rounds_codes: whether bfloat16 rows are multiplied by scale * code + offset rounded to bfloat16, not by the
            exact value (:mod:`pillion.kernels.cpu.quantized.rounded_codes`). Needs ``matrix_tiles``.
        attention_rows: query rows that share a pass over a KV head's blocks.
        attention_sums: vectors of sums that stay in registers in such a pass, beside their operands.
        decode_blocks: blocks whose scores are computed side by side for few rows.
        products_load: whether tiles that unpack codes load a row's value as an operand of each product, instead of once
            for both halves of a panel. Results have the same bits either way, so it needs no row of the table.
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
    decode_blocks: int = 4
    products_load: bool = True

    @property
    def label(self) -> str:
        """Name in logs and in a worker's registration; differs where bits differ."""
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

# Best row first: ``auto`` takes the first row whose features the processor has.
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
CHOICES = (AUTO, *BY_NAME, TORCH)


def host_features() -> frozenset[str]:
    """Return the features of this processor that this process may use; empty where the kernels cannot run (not Linux,
    or without LLVM)."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or sys.byteorder != "little":
        return frozenset()
    try:
        import llvmlite.binding as llvm

        found = llvm.get_host_cpu_features()
    except (ImportError, OSError, RuntimeError):  # no LLVM, or it cannot read this processor's features
        return frozenset()
    features = {name for name, has in found.items() if has}
    if platform.machine() == "aarch64":
        # LLVM may not list NEON and floating point, but Linux requires both on 64-bit ARM.
        features |= {"neon", "fp-armv8"}
    if "amx-tile" in features and not _may_use_tiles():
        features -= set(_TILE_FEATURES)
    return frozenset(features)


@cache
def _may_use_tiles() -> bool:
    """Request the tiles' registers for all threads of this process and its children; return whether they were granted.
    Signal frames grow with them, so Linux refuses if a thread has a small alternate signal stack."""
    words = map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return int(ctypes.CDLL(None).syscall(*words)) == 0


def choose_isa(choice: str, features: Collection[str], *, exact_codes: bool = False) -> Isa | None:
    """Return the row to compile for, or None if torch runs the model.

    Args:
        choice: one of ``CHOICES``. ``auto`` is the best row, or None if the processor matches none.
        features: the processor's features, as :func:`host_features` lists them.
        exact_codes: products never round quantized weights.

    Raises:
        ConfigError: ``choice`` is not in ``CHOICES``, or the processor lacks features that its row needs.
    """
    if choice not in CHOICES:
        raise ConfigError(f"--cpu-kernels: {choice!r} is none of {', '.join(CHOICES)}")
    if choice == TORCH:
        return None
    if choice == AUTO:
        found = next((isa for isa in TABLE if not _lacking(isa, features)), None)
        return found and _tuned(found, features, exact_codes)
    lacking = _lacking(BY_NAME[choice], features)
    if lacking:
        raise ConfigError(f"--cpu-kernels {choice}: this processor lacks {', '.join(lacking)}; use auto or torch")
    return _tuned(BY_NAME[choice], features, exact_codes)


def _tuned(isa: Isa, features: Collection[str], exact_codes: bool) -> Isa:
    """Return a row tuned for a processor with these features."""
    if isa.rounds_codes and exact_codes:
        isa = replace(isa, rounds_codes=False)
    # Zen 5: bfloat16 pair products, of which two start per cycle, with at most two loads of vectors in it.
    return replace(isa, products_load=False) if isa.bf16_dot and "avx512vp2intersect" in features else isa


def _lacking(isa: Isa, features: Collection[str]) -> list[str]:
    return [name for name in isa.needs if name not in features]
