"""Latent attention (MLA): rotation of queries, and writes of latents and rotated keys into the pool.

A token's KV is a key of ``rank`` latents and ``rotary`` rotated values, in the layout of K
(:mod:`pillion.kernels.cpu.attention.kv_layout`); there is no V. In 8 bits, latents and rotated values have separate
scales, so that neither limits the other's accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.kernels.cpu.attention.eight_bits import encode, scale_of
from pillion.kernels.cpu.attention.kv_layout import group_bytes, lines_bytes
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.rows.rotate import rotate, scatter_key, scatter_key_codes


@dataclass(frozen=True, slots=True)
class WriteLatents(KernelSpec):
    """Rotation and KV write of the step's T rows.

    absorbed   [T, heads, rank] float32: queries absorbed into the latents' space
    projected  [T, heads, still + rotary] of the model's type: queries, of which the last ``rotary`` values are rotated
    latents    [T, rank + rotary] float32: normed latents, and the key's values to rotate
    queries    [T, heads, rank + rotary] of the model's type: output
    index_key  [T, index] float32: normed index keys, of which the first ``rotary`` values are rotated

    Keys go into the step's pool, at ``layer_offset`` bytes in a slot of ``slot_bytes``. Pairs (i, i + rotary / 2)
    rotate by the angles whose cosines and sines are in ``cos`` and ``sin`` [positions, rotary / 2] float32.

    rank, rotary and block_size are multiples of 16. A sequence's last row also zeroes the rest of its block's keys, or
    the scales of their latents, if this step began the block: keys serve as values, and 0 times a stale NaN is not 0.

    ``codes``: the keys' 8-bit type, "fp8_e4m3" or "int8"; "" for the model's type.
    ``rotated``: whether pairs rotate; if not, ``cos`` and ``sin`` are None.
    ``index``: values of an index key, stored after the rotated key; ``indexed``: whether this layer writes one.
    ``grows``: queries are finally scaled by their position's factor in ``growth`` [positions] float32.
    """

    layout = RecordLayout(
        "write_latents",
        pointers=("absorbed", "projected", "latents", "queries", "index_key", "cos", "sin", "growth"),
        numbers=(
            "absorbed_stride", "projected_stride", "latents_stride", "index_key_stride", "slot_bytes", "layer_offset",
        ),
    )  # fmt: skip

    rank: int
    rotary: int
    still: int
    heads: int
    block_size: int
    bf16: bool
    codes: str = ""
    grows: bool = False
    rotated: bool = True
    index: int = 0
    indexed: bool = False

    def emit(self, call: KernelCall) -> None:
        # Work items of a row: its heads, and its key.
        k, items = call.k, self.heads + 1
        with call.even_share(call.step.number("num_tokens") * items) as item:
            row, head = item // items, item % items
            angles = k.load_int(call.step.pointer("rope_rows") + row * 4, 32) * (self.rotary * 2)
            with k.when(head < self.heads):
                self._query(call, row, head, angles)
            with k.when(head >= self.heads):
                self._key(call, row, angles)

    @property
    def _bytes(self) -> int:
        return 2 if self.bf16 else 4

    def _query(self, call: KernelCall, row: Int, head: Int, angles: Int) -> None:
        k, args, size = call.k, call.args, self._bytes
        target = args.pointer("queries") + (row * self.heads + head) * ((self.rank + self.rotary) * size)
        absorbed = args.pointer("absorbed") + row * args.number("absorbed_stride") + head * (self.rank * 4)
        factor = None
        if self.grows:
            position = k.load_int(call.step.pointer("positions") + row * 4, 32)
            factor = k.broadcast(args.pointer("growth") + position * 4)
        with k.range(self.rank // LANES) as i:
            value = k.load(absorbed + i * VECTOR_BYTES)
            k.store_float(target + i * (LANES * size), value if factor is None else value * factor, self.bf16)
        projected = args.pointer("projected") + row * args.number("projected_stride")
        source = projected + (head * (self.still + self.rotary) + self.still) * size
        values = [k.load_float(source + i * (LANES * size), self.bf16) for i in range(self.rotary // LANES)]
        for vector, value in enumerate(self._rotated(call, values, angles)):
            at = target + (self.rank + vector * LANES) * size
            k.store_float(at, value if factor is None else value * factor, self.bf16)

    def _key(self, call: KernelCall, row: Int, angles: Int) -> None:
        k, args, step = call.k, call.args, call.step
        position, seq = (k.load_int(step.pointer(name) + row * 4, 32) for name in ("positions", "row_seqs"))
        first, end = (k.load_int(step.pointer("query_starts") + (seq + i) * 4, 32) for i in (0, 1))
        offset = position % self.block_size
        index = seq * step.number("table_stride") + position // self.block_size
        slot = k.load_int(step.pointer("block_tables") + index * 4, 32)
        piece = step.pointer("pool") + args.number("layer_offset") + slot * args.number("slot_bytes")
        source = args.pointer("latents") + row * args.number("latents_stride")
        latent_vectors = self.rank // LANES
        values = [k.load(source + (latent_vectors + i) * VECTOR_BYTES) for i in range(self.rotary // LANES)]
        keys = self._rotated(call, values, angles)
        clears = end.equals(row + 1) & (row - offset >= first)
        if self.codes:
            latents = [k.load(source + i * VECTOR_BYTES) for i in range(latent_vectors)]
            self._write_codes(k, piece, offset, latents, keys)
            with k.when(clears):
                self._clear_scales(k, piece, offset)
            return
        target = piece + (offset // LANES * self._group_bytes + offset % LANES * 4)
        with k.range(latent_vectors) as i:
            scatter_key(k, target, i, k.load(source + i * VECTOR_BYTES), self.bf16)
        for vector, value in enumerate((*keys, *self._index_key(call, row, angles))):
            scatter_key(k, target, latent_vectors + vector, value, self.bf16)
        with k.when(clears):
            self._clear(call, piece, offset)

    def _index_key(self, call: KernelCall, row: Int, angles: Int) -> list[Vec]:
        if not self.indexed:
            return []
        source = call.args.pointer("index_key") + row * call.args.number("index_key_stride")
        rotary = self.rotary // LANES
        values = [call.k.load(source + i * VECTOR_BYTES) for i in range(self.index // LANES)]
        return [*self._rotated(call, values[:rotary], angles), *values[rotary:]]

    def _rotated(self, call: KernelCall, values: list[Vec], angles: Int) -> list[Vec]:
        """Return the values rotated by the angles of their position."""
        if not self.rotated:
            return values
        return rotate(call.k, values, call.args.pointer("cos") + angles, call.args.pointer("sin") + angles)

    @property
    def _group_bytes(self) -> int:
        return group_bytes(
            self.rank + self.rotary + self.index, self.codes or ("bfloat16" if self.bf16 else "float32"), 2
        )

    def _write_codes(self, k: Kernel, piece: Ptr, offset: Int, latents: list[Vec], keys: list[Vec]) -> None:
        group, token = piece + offset // LANES * self._group_bytes, offset % LANES
        scales = group + lines_bytes(self.rank + self.rotary, self.codes)
        for part, first, values in ((0, 0, latents), (1, len(latents), keys)):
            scale = scale_of(k, values, self.codes)
            inverse = k.vector(1.0) / scale
            k.store_first(scales + (token * 4 + part * VECTOR_BYTES), scale)
            for vector, value in enumerate(values):
                scatter_key_codes(k, group, token, first + vector, encode(k, value * inverse, self.codes))

    def _clear_scales(self, k: Kernel, piece: Ptr, offset: Int) -> None:
        """Zero the scales of the latents of the block's tokens after ``offset``."""
        at_scales = lines_bytes(self.rank + self.rotary, self.codes)
        with k.range(k.int(self.block_size), offset + 1) as token:
            k.store_int(piece + (token // LANES * self._group_bytes + (at_scales + token % LANES * 4)), 0, 32)

    def _clear(self, call: KernelCall, piece: Ptr, offset: Int) -> None:
        """Zero the keys of the block's tokens after ``offset``, lane by lane in the group of ``offset``: other threads
        may be writing earlier tokens of it."""
        k, group, size = call.k, offset // LANES, self._group_bytes
        with k.range(size, step=VECTOR_BYTES) as line, k.range(LANES, offset % LANES + 1) as lane:
            k.store_int(piece + (group * size + line + lane * 4), 0, 32)
        with k.range(self.block_size // LANES * size, (group + 1) * size, step=VECTOR_BYTES) as at:
            k.store(piece + at, k.vector(0.0))
