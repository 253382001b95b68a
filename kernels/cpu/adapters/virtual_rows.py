"""Gives rows of virtual tokens what their adapter has: embeddings in place of the model's, or keys and values.

    VirtualEmbed: after the embedding      VirtualWrite: in place of the kernel that writes a layer's keys and values

A slot's values are float32, token after token, and a row's token is that of its position. Steps without such rows run a
program without these kernels.

Ranks of a common KV head write the same bytes of the pool, each at its own pace. So a row's keys and values are written
once, as what they stay: a rank that first wrote those of the model would do so while another one reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pillion.kernels.cpu.adapters.low_rank import ADAPTED
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import WORD_BYTES, RecordLayout, RecordView
from pillion.kernels.cpu.rows.rotate import RotateWrite, RowWriter, StepRow

# This record says where the virtual tokens of an adapter slot are, and how many of them are keys and values.
VIRTUAL = RecordLayout("virtual", pointers=("values",), numbers=("prefixed",))
_VIRTUAL_BYTES = WORD_BYTES * VIRTUAL.num_words


def _virtual(call: KernelCall, slot: Int) -> RecordView:
    """Returns the record of an adapter slot's virtual tokens."""
    return RecordView(VIRTUAL, call.k, call.args.pointer("virtual") + slot * _VIRTUAL_BYTES)


def _position(call: KernelCall, row: Int) -> Int:
    return call.k.load_int(call.step.pointer("positions") + row * 4, 32)


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
            slot = k.load_int(step.pointer("tokens_slots") + row * 4, 32)
            source = _virtual(call, slot).pointer("values") + _position(call, row) * (width * 4)
            target = args.pointer("hidden") + row * args.number("hidden_stride")
            with k.range(width // LANES) as i:
                k.store(target + i * VECTOR_BYTES, k.load(source + i * VECTOR_BYTES))


@dataclass(frozen=True, slots=True)
class VirtualWrite(RotateWrite):
    """Does what :class:`RotateWrite` does, but for keys and values of virtual tokens, which go into the pool as they
    are: a token has ``token_bytes``, and those of this layer, [2 * kv_heads, head_dim], begin at ``layer_begin``."""

    layout = RecordLayout(
        "virtual_write",
        pointers=(*RotateWrite.layout.pointers, "virtual", "adapted"),
        numbers=(*RotateWrite.layout.numbers, "token_bytes", "layer_begin"),
        reals=RotateWrite.layout.reals,
    )

    def write(self, call: KernelCall, writer: RowWriter, row: StepRow, head: Int) -> None:
        k = call.k
        slots = RecordView(ADAPTED, k, call.args.pointer("adapted")).pointer("tokens_slots")
        slot, position = k.load_int(slots + row.index * 4, 32), _position(call, row.index)
        # A row without an adapter looks at the first slot's record, and is not taken.
        virtual = _virtual(call, k.most(slot, 0))
        prefixed = (slot >= 0) & (position < virtual.number("prefixed"))
        writer.write_queries(row, head)
        with k.when(prefixed):
            at = virtual.pointer("values") + position * call.args.number("token_bytes")
            plain = replace(row, source=at + call.args.number("layer_begin"))
            kept = RotateWrite(self.head_dim, 0, self.kv_heads, self.block_size, self.bf16, False, codes=self.codes)
            for write in (RowWriter(kept, call).write_keys, RowWriter(kept, call).write_values):
                write(plain, head)
        with k.when((slot < 0) | (position >= virtual.number("prefixed"))):
            writer.write_keys(row, head)
            writer.write_values(row, head)
