"""What the kernels need to know of a processor, as data; and which row of the table this one is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set.

    Attributes:
        name: what ``--cpu-kernels`` calls it.
        cpu, features: what LLVM compiles for; "" and () stand for the processor that this runs on.
        bf16_dot: "x86" where there is an instruction for the dot product of bfloat16 pairs (VDPBF16PS), else "".
        needs: features of the processor without which this row cannot be taken, in LLVM's names.
        gemm_rows: rows of a register tile, largest first, down to 1.
        gemm_pairs: pairs of 16-column tiles that a register tile of as many rows is wide (same places).
        attention_rows: query rows that share a pass over a KV head's blocks.
        decode_blocks: blocks whose scores are computed side by side where there are few rows.
    """

    name: str
    needs: tuple[str, ...]
    bf16_dot: str = ""
    cpu: str = ""
    features: str = ""
    gemm_rows: tuple[int, ...] = (14, 8, 4, 2, 1)
    gemm_pairs: tuple[int, ...] = (1, 1, 1, 1, 1)
    attention_rows: int = 12
    decode_blocks: int = 4


TABLE = (
    Isa("avx512_bf16", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16"), bf16_dot="x86"),
    Isa("avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq"), gemm_rows=(6, 4, 2, 1), gemm_pairs=(1, 1, 1, 1)),
    Isa("avx2", ("avx2", "fma"), gemm_rows=(2, 1), gemm_pairs=(1, 1), attention_rows=4),
)
