"""Adds products with matrices in few bits to the CPU kernels: these are the classes that this room registers with the
core's seams."""

from __future__ import annotations

from collections.abc import Sequence

from pillion.kernels.cpu.few_bits.codes import CODE_KINDS, UNIT_INPUTS
from pillion.kernels.cpu.few_bits.few_bit_packing import (
    INT8_DOTS,
    KINDS,
    MAX_DOT_INPUTS,
    MAX_GROUP_INPUTS,
    dots_constants_bytes,
    has_offsets,
    pack_few_bits,
    packed_kind,
    panel_bytes,
    unpack_few_bits,
)
from pillion.kernels.cpu.few_bits.input_rows import ROW_CONSTANTS
from pillion.kernels.cpu.few_bits.quantized_tiles import CodedProduct, CodedRows
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Int, Ptr, Vec
from pillion.kernels.cpu.products.gemm import GemmBody, Panels, RowCut, loaded
from pillion.kernels.cpu.products.gemm_tiles import TileKind
from pillion.kernels.cpu.products.packing import PackedWeight
from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, TOTALS_BYTES
from pillion.kernels.torch.quantized_matrix import Matrix


class DotPanels(Panels):
    """Multiplies rows of int8 codes by panels of int8 codes, whose sums are integers."""

    def __init__(self, body: GemmBody) -> None:
        self.before_bytes = dots_constants_bytes(body.spec.offsets)
        super().__init__(body)

    def tile_kind(self) -> TileKind:
        return TileKind(INT8_DOTS, "int8")

    def totals(self, sums: Ptr, panel: Ptr, row: Int) -> list[Vec]:
        k, args, spec = self.body.k, self.body.call.args, self.body.spec
        about = args.pointer("input_sums") + row * args.number("input_sums_stride")
        scale, shift, zero, sum_ = (about + ROW_CONSTANTS[name] for name in ROW_CONSTANTS)
        found = []
        for half in range(2):
            at = half * VECTOR_BYTES
            total = k.load_quads(sums + at) + k.broadcast_quad(shift)
            if spec.zeros:
                total = total - k.broadcast_quad(zero) * k.load_quads(panel + (TOTALS_BYTES + at))
            value = k.real_lanes(total) * k.broadcast(scale) * k.load(panel + at)
            if spec.offsets:
                value = k.fma(k.load(panel + (2 * TOTALS_BYTES + at)), k.broadcast(sum_), value)
            found.append(value)
        return found


class CodedPanels(Panels):
    """Multiplies rows by panels of codes, group by group."""

    def __init__(self, body: GemmBody) -> None:
        spec, args = body.spec, body.call.args
        self.body = body
        self.coded = CodedProduct(body.k, CODE_KINDS[spec.weights], spec.rows == "fp32", spec.offsets)
        self.units, self.group_units = (args.number(name) // UNIT_INPUTS for name in ("depth", "inputs"))
        self.panel_bytes = self.coded.panel_bytes(self.units, self.group_units)

    def most_rows(self) -> int:
        return self.coded.most_rows(self.coded.widens)

    def multiply(
        self, cut: RowCut, panel: Int, out: Ptr, weights: Ptr, ahead: Ptr, constants: tuple[Vec, Vec] | None
    ) -> None:
        body, coded = self.body, self.coded
        args, zero = body.call.args, body.k.int(0)
        begin = cut.begin(cut.first)
        sums, sums_stride = args.pointer("input_sums"), args.number("input_sums_stride")
        rows = CodedRows(
            x=body.x + begin * body.x_stride,
            x_stride=body.x_stride,
            weights=weights,
            weights_stride=zero,
            constants=weights,
            constants_stride=zero,
            input_sums=sums + begin * sums_stride,
            input_sums_stride=sums_stride,
            group_units=self.group_units,
            units=self.units,
            ahead=ahead,
            ahead_stride=zero,
            ahead_step=zero,
            totals=body.call.scratch,
        )

        def finish(row: Int, totals: Ptr) -> None:
            body.finish(begin + row, panel, loaded(body.k, totals), out, constants)

        coded.multiply(cut.begin(cut.last) - begin, rows, weights, body.call.scratch, finish)


class FewBitProducts:
    """Implements :class:`pillion.kernels.cpu.products.packing.FewBitKinds`."""

    names = KINDS
    kind_of = staticmethod(packed_kind)
    has_offsets = staticmethod(has_offsets)
    unpack = staticmethod(unpack_few_bits)
    panel_bytes = staticmethod(panel_bytes)

    @staticmethod
    def pack(matrices: Sequence[Matrix], kind: str, offsets: bool) -> PackedWeight:
        return pack_few_bits(matrices, kind, offsets)

    @staticmethod
    def sound(kind: str, depth: int, group: int, *, rounded: bool) -> bool:
        if depth % DEPTH_MULTIPLE:
            return False
        if kind == INT8_DOTS:
            return rounded and depth < MAX_DOT_INPUTS + DEPTH_MULTIPLE
        return 0 < group <= MAX_GROUP_INPUTS and group % DEPTH_MULTIPLE == 0

    @staticmethod
    def panels(body: GemmBody) -> Panels:
        return DotPanels(body) if body.spec.weights == INT8_DOTS else CodedPanels(body)


FEW_BIT_PRODUCTS = FewBitProducts()
