"""Lists the instruction sets that the CPU kernels are written for, and chooses one of them for this processor.

Features have LLVM's names. Only :func:`host_features` needs LLVM.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache

from pillion.errors import ConfigError

# A vector has this many lanes in the kernels' language, on every processor; a group in the KV pool has as many tokens.
LANES = 16
# A step has a plan of its attention for each number of KV heads that layers have: at most so many.
ATTENTION_PLANS = 2
# The flag ``--cpu-kernels`` takes these values besides the names of the table's rows.
AUTO, TORCH = "auto", "torch"
# Features of the matrix tiles, which a process has only if the system grants it their registers.
_TILE_FEATURES = ("amx-tile", "amx-bf16", "amx-int8")
# Among processors with products of bfloat16 pairs, those with this feature (Zen 5) start two such products of 512 bits
# in each cycle, but load no more than two vectors in it.
_TWO_PRODUCTS = "avx512vp2intersect"
# The number of the system call arch_prctl, its request for more registers, and the number of the tiles' registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class TileRows:
    """Says how many rows a register tile has at most, so that registers are left for weights and rows: ``wide`` rows in
    a tile as wide as a panel (32 columns), ``narrow`` rows in one half as wide. ``narrow`` is 0 where narrow tiles are
    not used."""

    wide: int
    narrow: int = 0

    @property
    def most(self) -> int:
        """Returns the most rows of any tile."""
        return max(self.wide, self.narrow)


@dataclass(frozen=True, slots=True)
class Isa:
    """Describes an instruction set.

    Attributes:
        name: its value of ``--cpu-kernels``.
        needs: features that the processor must have.
        without: features that stay unused even where the processor has them, so that a row is the same code everywhere.
        machine: the kind of processor, as ``uname -m`` prints it.
        model: the processor that LLVM compiles for where this machine is of another kind.
        bf16_dot: "x86" where there is an instruction for the dot product of bfloat16 pairs (VDPBF16PS), else "".
        int8_dot: the instruction for the dot product of four codes of 8 bits: "vpdpbusd", "sdot", or "" where such
            products are made of products of 16 bits.
        bf16_tiles: tiles of products of bfloat16 rows.
        fp32_tiles: tiles of products of float32 rows.
        int8_tiles: tiles of products of rows of int8.
        dot_tiles: tiles of products of rows of int8 with scales for groups of inputs.
        matrix_tiles: whether one instruction multiplies tiles of 16 rows of bfloat16 pairs or codes
            (:mod:`pillion.kernels.cpu.language.matrix_tiles`).
        emulated_tiles: whether such instructions are emulated, as in tests on processors without them.
        version: of the row's arithmetic; it grows in the release that changes a row's bits.
        rounds_codes: whether rows of bfloat16 meet codes as scale * code + offset in bfloat16, and not exactly
            (:mod:`pillion.kernels.cpu.quantized.rounded_codes`). It needs ``bf16_dot``.
        attention_rows: query rows that share a pass over a KV head's blocks.
        attention_sums: vectors of sums that stay in registers in such a pass, beside their operands.
        decode_blocks: blocks whose scores are computed side by side where there are few rows.
        products_load: whether tiles that unpack codes load a row's value as a part of each product, and not once for
            both halves of a panel. Results have the same bits either way, so it has no row of its own.
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
        """Returns the name in logs and of a worker: it differs where bits do."""
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

# The best row comes first: ``auto`` chooses the first row whose features the processor has.
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
    """Returns the features of this processor that this process may use. The set is empty where the kernels cannot run:
    not on Linux, or without LLVM."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or sys.byteorder != "little":
        return frozenset()
    try:
        import llvmlite.binding as llvm

        found = llvm.get_host_cpu_features()
    except (ImportError, OSError, RuntimeError):  # Either LLVM is missing, or it cannot read this processor's features.
        return frozenset()
    features = {name for name, has in found.items() if has}
    if platform.machine() == "aarch64":
        # Every 64-bit ARM processor that Linux runs on has NEON and floating point, whether or not LLVM lists them.
        features |= {"neon", "fp-armv8"}
    if "amx-tile" in features and not _may_use_tiles():
        features -= set(_TILE_FEATURES)
    return frozenset(features)


@cache
def _may_use_tiles() -> bool:
    """Asks the system for the tiles' registers, for all threads of this process and for its children, and returns
    whether it grants them. Signals then need larger stacks, so a system refuses where a thread has given them small
    ones."""
    words = map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return int(ctypes.CDLL(None).syscall(*words)) == 0


def choose_isa(choice: str, features: Collection[str], *, exact_codes: bool = False) -> Isa | None:
    """Returns the row to compile for; None where torch runs the model.

    Args:
        choice: one of ``CHOICES``. ``auto`` is the best row, or None where the processor has no row.
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
    """Returns a row as it is quickest on a processor with these features."""
    if isa.rounds_codes and exact_codes:
        isa = replace(isa, rounds_codes=False)
    return replace(isa, products_load=False) if isa.bf16_dot and _TWO_PRODUCTS in features else isa


def _lacking(isa: Isa, features: Collection[str]) -> list[str]:
    return [name for name in isa.needs if name not in features]
