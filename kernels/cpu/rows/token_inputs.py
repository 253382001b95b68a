"""Kernels of per-layer token inputs, and of a layer's factor of the residual stream.

    rows [T, layers, width] = (norm(product) + own embedding) / sqrt(2)          once per step
    gate [rows, width] *= the layer's slice of these inputs                      in each layer

Strides are bytes from row to row; ``width`` is a multiple of 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import VECTOR_BYTES
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.rows.rows import row_factor, vectors_of


@dataclass(frozen=True, slots=True)
class MixTokenInputs(KernelSpec):
    """Compute the per-layer token inputs of all layers, float32: ``rows`` [T, layers, width], initially the tokens'
    per-layer embeddings, become (rows + RMS norm of ``products`` [T, layers, width] * ``weight`` [width]) / sqrt(2)."""

    layout = RecordLayout(
        "mix_token_inputs",
        pointers=("rows", "products", "weight"),
        numbers=("width", "layers", "rows_stride", "products_stride"),
        reals=("eps",),
    )

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        rows, products, weight = (args.pointer(name) for name in self.layout.pointers)
        width, layers, rows_stride, products_stride = (args.number(name) for name in self.layout.numbers)
        eps, factor = args.real("eps"), k.vector(math.sqrt(0.5))
        with call.even_share(call.step.number("num_tokens") * layers) as item:
            row, at_layer = item // layers, item % layers * width * 4
            target, source = rows + row * rows_stride + at_layer, products + row * products_stride + at_layer
            rstd = row_factor(k, source, width, eps)
            with k.range(vectors_of(width)) as i:
                at = i * VECTOR_BYTES
                normed = k.load(source + at) * rstd * k.load(weight + at)
                k.store(target + at, (normed + k.load(target + at)) * factor)


@dataclass(frozen=True, slots=True)
class WeighByTokenInputs(KernelSpec):
    """Multiply ``gate`` [rows, width], bfloat16 or float32, in place by a layer's per-layer token inputs. A row of
    ``inputs`` has a token's inputs of all layers, float32; this layer's begin at byte ``layer_bytes``."""

    layout = RecordLayout(
        "weigh_by_token_inputs",
        pointers=("gate", "inputs"),
        numbers=("width", "gate_stride", "inputs_stride", "layer_bytes"),
    )

    bf16: bool
    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        k, args, samples = call.k, call.args, call.step.pointer("sample_rows")
        gate, inputs = args.pointer("gate"), args.pointer("inputs")
        width, gate_stride, inputs_stride, layer_bytes = (args.number(name) for name in self.layout.numbers)
        size = 2 if self.bf16 else 4
        with call.even_share(call.step.number(f"num_{self.rows_of}")) as row:
            token = k.load_int(samples + row * 4, 32) if self.rows_of == "samples" else row
            target, source = gate + row * gate_stride, inputs + token * inputs_stride + layer_bytes
            with k.range(vectors_of(width)) as i:
                at = target + i * (LANES * size)
                k.store_float(at, k.load_float(at, self.bf16) * k.load(source + i * VECTOR_BYTES), self.bf16)


@dataclass(frozen=True, slots=True)
class ScaleRows(KernelSpec):
    """Multiply the residual stream ``hidden`` [rows, width] float32 by ``factor``, in place."""

    layout = RecordLayout("scale_rows", pointers=("hidden",), numbers=("width", "hidden_stride"), reals=("factor",))

    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        hidden, width, stride = args.pointer("hidden"), args.number("width"), args.number("hidden_stride")
        factor = args.real("factor")
        with call.even_share(call.step.number(f"num_{self.rows_of}")) as row, k.range(vectors_of(width)) as i:
            at = hidden + row * stride + i * VECTOR_BYTES
            k.store(at, k.load(at) * factor)
