"""Gives rows of virtual tokens what their adapter has: embeddings in place of the model's, or keys and values.

    VirtualEmbed: after the embedding      VirtualWrite: after a layer's keys and values are in the pool, in its place

A slot's values are float32, token after token, and a row's token is that of its position. Steps without such rows run a
program without these kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pillion.kernels.cpu.adapters.low_rank import ADAPTED
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Ptr
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import WORD_BYTES, RecordLayout, RecordView
from pillion.kernels.cpu.rows.rotate import RotateWrite, RowWriter

# This record says where the virtual tokens of an adapter slot are.
VIRTUAL = RecordLayout("virtual", pointers=("values",))
_VIRTUAL_BYTES = WORD_BYTES * VIRTUAL.num_words


def _source(call: KernelCall, row: Int, token_bytes: Int) -> Ptr:
    """Returns the values of the virtual token of a row; a token has ``token_bytes``."""
    k, step = call.k, RecordView(ADAPTED, call.k, call.args.pointer("adapted"))
    slot = k.load_int(step.pointer("tokens_slots") + row * 4, 32)
    position = k.load_int(call.step.pointer("positions") + row * 4, 32)
    values = RecordView(VIRTUAL, k, call.args.pointer("virtual") + slot * _VIRTUAL_BYTES).pointer("values")
    return values + position * token_bytes


@dataclass(frozen=True, slots=True)
class VirtualEmbed(KernelSpec):
    """Writes embeddings of virtual tokens into ``hidden`` [T, width] float32; ``width`` is a multiple of 16."""

    layout = RecordLayout(
        "virtual_embed", pointers=("hidden", "virtual", "adapted"), numbers=("width", "hidden_stride")
    )

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        step = RecordView(ADAPTED, k, args.pointer("adapted"))
        rows, width = step.pointer("embedded_rows"), args.number("width")
        with call.even_share(step.number("num_embedded_rows")) as number:
            row = k.load_int(rows + number * 4, 32)
            source, target = _source(call, row, width * 4), args.pointer("hidden") + row * args.number("hidden_stride")
            with k.range(width // LANES) as i:
                k.store(target + i * VECTOR_BYTES, k.load(source + i * VECTOR_BYTES))


@dataclass(frozen=True, slots=True)
class VirtualWrite(RotateWrite):
    """Writes keys and values of virtual tokens into the pool, as they are: a token has ``token_bytes``, and those of
    this layer, [2 * kv_heads, head_dim], begin at ``layer_begin``. There are no queries, and so no ``heads``."""

    layout = RecordLayout(
        "virtual_write",
        pointers=(*RotateWrite.layout.pointers, "virtual", "adapted"),
        numbers=(*RotateWrite.layout.numbers, "token_bytes", "layer_begin"),
        reals=RotateWrite.layout.reals,
    )

    def emit(self, call: KernelCall) -> None:
        k, args, writer = call.k, call.args, RowWriter(self, call)
        step = RecordView(ADAPTED, k, args.pointer("adapted"))
        with call.even_share(step.number("num_prefixed_rows") * self.kv_heads) as item:
            number = k.load_int(step.pointer("prefixed_rows") + item // self.kv_heads * 4, 32)
            source = _source(call, number, args.number("token_bytes")) + args.number("layer_begin")
            row = replace(writer.row(number), source=source)
            writer.write_keys(row, item % self.kv_heads)
            writer.write_values(row, item % self.kv_heads)
