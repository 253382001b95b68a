"""Norms, rotary embedding and KV write: from a row's QKV product to queries in a buffer, and K and V in the pool.

The pool's layout is that of :mod:`pillion.kernels.cpu.attention.kv_layout`. A head stays in registers from load to
store. 8-bit keys and values are rounded once, from float32, with a scale per token and head
(:mod:`pillion.kernels.cpu.attention.eight_bits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pillion.kernels.cpu.attention.eight_bits import encode, scale_of
from pillion.kernels.cpu.attention.kv_layout import group_bytes, lines_bytes
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Bool, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.rows.rows import norm_factor, row_factor, squares_factor


@dataclass(frozen=True, slots=True)
class RotateWrite(KernelSpec):
    """Norm, rotation and KV write of the step's rows of ``qkv`` [T, heads + 2 * kv_heads, head_dim] float32,
    ``qkv_stride`` bytes each.

    queries  [kv_heads][allocated rows][heads / kv_heads][head_dim] of the model's type, ``head_stride`` bytes for each
             KV head
    K and V  go into the step's pool, K at ``layer_offset`` bytes in a slot of ``slot_bytes``, V ``value_offset`` bytes
             after it

    ``rope``: pairs (i, i + head_dim / 2) rotate by the angles whose cosines and sines are in ``cos`` and ``sin``
    [positions, head_dim / 2] float32. ``qk_norm``: RMS norm before that, over each "head" (weights ``q_norm`` and
    ``k_norm`` [head_dim] float32); "layer_by_head" for a LayerNorm of each head without biases, with weights per head
    ([heads, head_dim], [kv_heads, head_dim]); or over all queries, and all keys, of a row as a "projection" (weights
    [heads * head_dim], [kv_heads * head_dim]); "" for none. Unused pointers may be None.

    ``norm_last``: heads are normed after the rotation. ``norm_values``: values are normed over each head, without
    weights. ``queries_only``: rows of ``qkv`` are queries only, and nothing is written into the pool. ``grows``:
    queries are finally scaled by their position's factor in ``growth`` [positions] float32.

    ``summed``: a norm over a "projection" that is divided over ranks: ``squares`` [T, 2] float32 are the sums of
    squares of the row's ``query_width`` query and ``key_width`` key values in all ranks
    (:mod:`pillion.kernels.cpu.ranks`).

    ``codes``: the 8-bit type of K and V, "fp8_e4m3" or "int8"; "" for the model's type.

    head_dim and block_size are multiples of 16. A sequence's last row also zeroes the rest of its block's V, or of
    V's scales, if this step began the block: attention multiplies masked rows by 0, and 0 times a stale NaN is not 0.
    """

    layout = RecordLayout(
        "rotate_write",
        pointers=("qkv", "queries", "cos", "sin", "q_norm", "k_norm", "squares", "growth"),
        numbers=(
            "qkv_stride",
            "head_stride",
            "slot_bytes",
            "layer_offset",
            "value_offset",
            "squares_stride",
            "query_width",
            "key_width",
        ),
        reals=("eps",),
    )

    head_dim: int
    heads: int
    kv_heads: int
    block_size: int
    bf16: bool
    rope: bool = True
    qk_norm: str = ""
    codes: str = ""
    summed: bool = False
    norm_last: bool = False
    grows: bool = False
    norm_values: bool = False
    queries_only: bool = False

    def emit(self, call: KernelCall) -> None:
        # A work item is one KV head of a row, so that the few rows of a decode step occupy all threads; a norm over a
        # projection needs the whole row.
        items = 1 if self.qk_norm == "projection" and not self.summed else self.kv_heads
        k, writer = call.k, RowWriter(self, call)
        with call.even_share(call.step.number("num_tokens") * items) as item:
            row, first = writer.row(item // items), item % items
            with k.range(first + self.kv_heads // items, first) as head:
                writer.write_queries(row, head)
                if not self.queries_only:
                    writer.write_keys(row, head)
                    writer.write_values(row, head)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of the step.

    Attributes:
        index: index of the row in the step.
        source: the row of ``qkv``: queries, keys and values.
        angles: byte offset of the position's cosines and sines in the rotary tables.
        growth: scale of the queries by their position, or None.
        qk_rstd: 1 / RMS of the row's queries and of its keys, for norms over a projection; else None, None.
        piece: K of the row's block in this layer, of the first KV head.
        offset: index of the row's token in its block.
        clears: whether to zero V after this token in the block.
    """

    index: Int
    source: Ptr
    angles: Int
    growth: Vec | None
    qk_rstd: tuple[Vec | None, ...]
    piece: Ptr
    offset: Int
    clears: Bool


class RowWriter:
    """Emitter of the norm, rotation and writes of rows. Loads the values that all rows share."""

    def __init__(self, spec: RotateWrite, call: KernelCall) -> None:
        self._spec, self._k, self._args = spec, call.k, call.args
        self._arrays = {
            name: call.step.pointer(name) for name in ("positions", "rope_rows", "row_seqs", "query_starts")
        }
        self._tables, self._table_stride = call.step.pointer("block_tables"), call.step.number("table_stride")
        self._layer_pool = call.step.pointer("pool") + call.args.number("layer_offset")
        self._slot_bytes, self._value_offset = call.args.number("slot_bytes"), call.args.number("value_offset")
        self._qkv, self._qkv_stride = call.args.pointer("qkv"), call.args.number("qkv_stride")
        self._queries, self._head_stride = call.args.pointer("queries"), call.args.number("head_stride")
        self._cos, self._sin = call.args.pointer("cos"), call.args.pointer("sin")
        self._q_norm, self._k_norm = call.args.pointer("q_norm"), call.args.pointer("k_norm")
        self._eps = call.args.real("eps")
        self._group = spec.heads // spec.kv_heads
        self._vectors = spec.head_dim // LANES
        self._element_bytes = 2 if spec.bf16 else 4
        self._float_head_bytes, self._head_bytes = spec.head_dim * 4, spec.head_dim * self._element_bytes
        self._keys_offset = spec.heads * self._float_head_bytes
        self._values_offset = (spec.heads + spec.kv_heads) * self._float_head_bytes
        kind = spec.codes or ("bfloat16" if spec.bf16 else "float32")
        self._group_bytes, self._lines_bytes = group_bytes(spec.head_dim, kind), lines_bytes(spec.head_dim, kind)
        self._piece_bytes = spec.block_size // LANES * self._group_bytes

    def row(self, index: Int) -> StepRow:
        """Load a row's source, its angles, and its place in the pool."""
        k, spec = self._k, self._spec
        source = self._qkv + index * self._qkv_stride
        position = k.load_int(self._arrays["positions"] + index * 4, 32)
        seq = k.load_int(self._arrays["row_seqs"] + index * 4, 32)
        first, end = (k.load_int(self._arrays["query_starts"] + (seq + i) * 4, 32) for i in (0, 1))
        offset = position % spec.block_size
        slot = k.load_int(self._tables + (seq * self._table_stride + position // spec.block_size) * 4, 32)
        qk_rstd: tuple[Vec | None, ...] = None, None
        if spec.summed:
            squares = self._args.pointer("squares") + index * self._args.number("squares_stride")
            widths = self._args.number("query_width"), self._args.number("key_width")
            qk_rstd = tuple(
                squares_factor(k, k.broadcast(squares + at), width, self._eps)
                for at, width in zip((0, 4), widths, strict=True)
            )
        elif spec.qk_norm == "projection":
            both = (source, spec.heads), (source + self._keys_offset, spec.kv_heads)
            qk_rstd = tuple(row_factor(k, at, k.int(heads * spec.head_dim), self._eps) for at, heads in both)
        return StepRow(
            index=index,
            source=source,
            angles=k.load_int(self._arrays["rope_rows"] + index * 4, 32) * (self._float_head_bytes // 2),
            growth=k.broadcast(self._args.pointer("growth") + position * 4) if spec.grows else None,
            qk_rstd=qk_rstd,
            piece=self._layer_pool + slot * self._slot_bytes,
            offset=offset,
            clears=end.equals(index + 1) & (index - offset >= first),
        )

    def write_queries(self, row: StepRow, kv_head: Int) -> None:
        """Write the row's queries of ``kv_head``'s group, adjacent, to the buffer."""
        k = self._k
        target = self._queries + kv_head * self._head_stride + row.index * (self._group * self._head_bytes)
        with k.range(self._group) as i:
            head = kv_head * self._group + i
            values = self._load_head(row, row.source, head, self._q_norm, row.qk_rstd[0])
            for vector, value in enumerate(values):
                value = value if row.growth is None else value * row.growth
                k.store_float(
                    target + i * self._head_bytes + vector * LANES * self._element_bytes, value, self._spec.bf16
                )

    def write_keys(self, row: StepRow, kv_head: Int) -> None:
        """Write a key. K has a lane per token, so a key's values, or bfloat16 pairs, are a vector apart."""
        k = self._k
        group = row.piece + (kv_head * self._piece_bytes + row.offset // LANES * self._group_bytes)
        target = group + row.offset % LANES * 4
        keys = self._load_head(row, row.source + self._keys_offset, kv_head, self._k_norm, row.qk_rstd[1])
        if self._spec.codes:
            self._write_key_codes(row, group, keys)
            return
        for vector, value in enumerate(keys):
            scatter_key(k, target, vector, value, self._spec.bf16)

    def _write_key_codes(self, row: StepRow, group: Ptr, keys: list[Vec]) -> None:
        for vector, codes in enumerate(self._codes(row, group, keys)):
            scatter_key_codes(self._k, group, row.offset % LANES, vector, codes)

    def _codes(self, row: StepRow, group: Ptr, values: list[Vec]) -> list[Any]:
        """Write the scale of ``values`` into ``group``; return their codes, vector by vector."""
        k, kind = self._k, self._spec.codes
        scale = scale_of(k, values, kind)
        inverse = k.vector(1.0) / scale
        k.store_first(group + (self._lines_bytes + row.offset % LANES * 4), scale)
        return [encode(k, value * inverse, kind) for value in values]

    def write_values(self, row: StepRow, kv_head: Int) -> None:
        """Write V of a token: float32 values in order, or bfloat16 values interleaved with the neighbour token's."""
        k, bf16 = self._k, self._spec.bf16
        source = row.source + self._values_offset + kv_head * self._float_head_bytes
        piece = row.piece + (self._value_offset + kv_head * self._piece_bytes)
        if self._spec.codes:
            self._write_value_codes(row, source, piece)
            return
        tokens = 2 if bf16 else 1
        target = piece + row.offset // tokens * (tokens * self._head_bytes) + row.offset % tokens * self._element_bytes
        for vector, value in enumerate(self._stored_values(source)):
            if bf16:
                k.scatter(target + vector * VECTOR_BYTES, k.to_bf16(value), range(0, VECTOR_BYTES, 4))
            else:
                k.store(target + vector * VECTOR_BYTES, value)
        with k.when(row.clears):
            self._clear(piece, row.offset)

    def _write_value_codes(self, row: StepRow, source: Ptr, piece: Ptr) -> None:
        """Write the codes of V, interleaved with those of three neighbour tokens, and its scale; zero the scales after
        it if the row clears."""
        k, group = self._k, piece + row.offset // LANES * self._group_bytes
        token = row.offset % LANES
        target = group + (token // 4 * (self._vectors * VECTOR_BYTES) + token % 4 // 2 * 8 + token % 2)
        for vector, codes in enumerate(self._codes(row, group, list(self._stored_values(source)))):
            offsets = [column // 4 * LANES + column % 4 * 2 for column in range(LANES)]
            k.scatter(target + vector * VECTOR_BYTES, codes, offsets)
        with k.when(row.clears), k.range(k.int(self._spec.block_size), row.offset + 1) as token:
            at = token // LANES * self._group_bytes + (self._lines_bytes + token % LANES * 4)
            k.store_int(piece + at, 0, 32)

    def _stored_values(self, source: Ptr) -> Iterator[Vec]:
        """Load the vectors of a head's values, normed if the model norms values."""
        loaded = (self._k.load(source + vector * VECTOR_BYTES) for vector in range(self._vectors))
        if not self._spec.norm_values:
            return loaded
        values = list(loaded)
        factor = self._head_factor(values)
        return (value * factor for value in values)

    def _head_factor(self, values: list[Vec]) -> Vec:
        """Return 1 / RMS of a head's vectors."""
        k, squares = self._k, self._k.vector(0.0)
        for value in values:
            squares = k.fma(value, value, squares)
        return norm_factor(k, squares, k.int(self._spec.head_dim), self._eps)

    def _clear(self, piece: Ptr, offset: Int) -> None:
        """Zero V of the block's tokens after ``offset``."""
        k = self._k
        begin = offset + 1
        if self._spec.bf16:
            # bfloat16 tokens are interleaved in pairs: zero the neighbour's halves if this token is the first of its
            # pair.
            with k.when(offset % 2 < 1), k.range(self._spec.head_dim) as i:
                k.store_int(piece + offset * self._head_bytes + i * 4 + 2, 0, 16)
            begin = begin + begin % 2
        with k.range(k.int(self._piece_bytes // VECTOR_BYTES), begin * self._head_bytes // VECTOR_BYTES) as i:
            k.store(piece + i * VECTOR_BYTES, k.vector(0.0))

    def _load_head(self, row: StepRow, heads: Ptr, head: Int, weight: Ptr, factor: Vec | None) -> list[Vec]:
        """Load a head of ``heads`` as vectors, normed and rotated."""
        values = [self._k.load(heads + head * self._float_head_bytes + i * VECTOR_BYTES) for i in range(self._vectors)]
        if self._spec.norm_last:
            return self._normed(self._rotated(row, values), head, weight, factor)
        return self._rotated(row, self._normed(values, head, weight, factor))

    def _normed(self, values: list[Vec], head: Int, weight: Ptr, factor: Vec | None) -> list[Vec]:
        """Norm a head's vectors if the model norms queries and keys."""
        k, kind = self._k, self._spec.qk_norm
        if not kind:
            return values
        if kind == "layer_by_head":
            total = k.vector(0.0)
            for value in values:
                total = total + value
            mean = k.sum(total) / k.real(k.int(self._spec.head_dim))
            values = [value - mean for value in values]
        if factor is None:
            factor = self._head_factor(values)
        weights = weight + head * self._float_head_bytes if kind in ("projection", "layer_by_head") else weight
        return [value * factor * k.load(weights + i * VECTOR_BYTES) for i, value in enumerate(values)]

    def _rotated(self, row: StepRow, head: list[Vec]) -> list[Vec]:
        """Return the head rotated by the row's angles, if the layer rotates, like
        :func:`pillion.engine.models.rope.rotate`."""
        if not self._spec.rope:
            return head
        return rotate(self._k, head, self._cos + row.angles, self._sin + row.angles)


def rotate(k: Kernel, head: list[Vec], cos: Ptr, sin: Ptr) -> list[Vec]:
    """Return head * cos + (head with swapped halves) * signed sin, for a row's cosines and sines [values / 2]."""
    half, rotated = len(head) * LANES // 2, []
    for i, value in enumerate(head):
        signs = [-1.0 if i * LANES + lane < half else 1.0 for lane in range(LANES)]
        signed = _angles(k, sin, i, half) * k.constant(signs)
        rotated.append(value * _angles(k, cos, i, half) + _swapped(k, head, i) * signed)
    return rotated


def scatter_key(k: Kernel, target: Ptr, vector: Int | int, value: Vec, bf16: bool) -> None:
    """Scatter a vector of a token's key into its lane: consecutive values, or bfloat16 pairs, are one vector apart."""
    words = LANES * (2 if bf16 else 4) // 4
    parts = k.builder.bitcast(k.to_bf16(value) if bf16 else value.ir, ir.VectorType(ir.IntType(32), words))
    k.scatter(target + vector * (words * VECTOR_BYTES), parts, range(0, words * VECTOR_BYTES, VECTOR_BYTES))


def scatter_key_codes(k: Kernel, group: Ptr, token: Int, vector: int, codes: Any) -> None:
    """Write the codes of one vector of a key, pair by pair, into its token's lane of a group."""
    target = group + (token // 4 * LANES + token % 4 * 2)
    pairs = k.builder.bitcast(codes, ir.VectorType(ir.IntType(16), LANES // 2))
    # A line has two pairs of each token.
    offsets = [pair // 2 * VECTOR_BYTES + pair % 2 * 8 for pair in range(LANES // 2)]
    k.scatter(target + vector * 4 * VECTOR_BYTES, pairs, offsets)


def _swapped(k: Kernel, head: list[Vec], i: int) -> Vec:
    """Return vector i of a head with swapped halves; a half may end inside a vector."""
    whole, rest = divmod(len(head) * LANES // 2, LANES)
    first = head[(i + whole) % len(head)]
    return k.joined(first, head[(i + whole + 1) % len(head)], LANES // 2) if rest else first


def _angles(k: Kernel, table: Ptr, i: int, half: int) -> Vec:
    """Return vector i of a position's entries [half] repeated twice."""
    first = i * LANES % half
    return k.load(table + first * 4) if first + LANES <= half else k.load_halves(table + first * 4, table)
