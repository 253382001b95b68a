"""The CPU kernels' layout of keys and values in a (layer, K or V, head) piece of the KV pool.

The pool is [slots, layers, 2, kv_heads, piece], K before V; a piece has block_size * head_dim values, and in 8 bits a
float32 scale for each token. Inside, tokens are in groups of 16, one for each lane of a vector (block sizes are
multiples of 16):

    bfloat16   K  [block_size / 16][head_dim / 2][16 tokens][2]     a lane's pair: two adjacent values of a token's key
               V  [block_size / 2 pairs of tokens][head_dim][2]     a lane's pair: one column of two adjacent tokens
    float32    K  [block_size / 16][head_dim][16 tokens]
               V  [block_size][head_dim]
    8 bits     K  [block_size / 16][lines: head_dim / 4], and after each group's lines its 16 scales
               V  [block_size / 16][lines: 4 tokens * head_dim / 16], and after each group's lines its 16 scales
               a line of 64 codes is 4 values of 16 lanes, [4 quarters][2 pairs][4 lanes][2 values]: in K four
               adjacent values of each of 16 tokens, in V four adjacent tokens of each of 16 columns
               Rows of latents, in the layout of K, have 16 scales of latents, then 16 of rotated keys

So the scores of 16 tokens are one vector, and the product with V sums tokens pair by pair: both are dot products of
bfloat16 pairs without shuffles (:meth:`pillion.kernels.cpu.language.emit.Kernel.dot`). A group is as large in K as in
V.
"""

from __future__ import annotations

from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.kv_codes import KV_SCALE_BYTES

# Versions of the layout, in the namespace of block hashes, so that blocks of different layouts are never shared (I2).
LAYOUT_VERSION, EIGHT_BIT_VERSION = "lanes16-1", "lanes16-quads-1"
_VALUE_BYTES = {"bfloat16": 2, "float32": 4, "fp8_e4m3": 1, "int8": 1}


def line_values(kind: str) -> int:
    """Return the values per lane in a line of 64 bytes. ``kind`` is the type of K and V, as in ``KVLayout.dtype``."""
    return 4 // _VALUE_BYTES[kind]


def lines_bytes(head_dim: int, kind: str) -> int:
    """Return the bytes of the keys of 16 tokens of a KV head, without scales (the same for values)."""
    return LANES * head_dim * _VALUE_BYTES[kind]


def group_bytes(head_dim: int, kind: str, scales: int = 1) -> int:
    """Return the bytes of the keys of 16 tokens of a KV head (the same for values), with ``scales`` scales per token in
    8-bit layouts."""
    return lines_bytes(head_dim, kind) + (LANES * KV_SCALE_BYTES * scales if _VALUE_BYTES[kind] == 1 else 0)
