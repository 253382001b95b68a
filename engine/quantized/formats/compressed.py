"""Layouts of compressed-tensors and fp8: codes packed in int32 or one per byte, with scales per row, group or block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pillion.engine.checkpoints.weight_format import FLOATS
from pillion.engine.quantized.formats.int32_layouts import input_order
from pillion.engine.quantized.formats.layout import (
    SCALES,
    Get,
    Headers,
    Part,
    check_symmetric,
    finite,
    from_unsigned,
    groups_of,
    largest,
    read_optional,
    unpack,
)
from pillion.engine.quantized.quantization import MatrixScheme
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix


class PackedLayout:
    """``weight_packed`` int32 [N, K * bits / 32], ``weight_scale`` [N, G], ``weight_shape`` int64 [2] and, if not
    symmetric, ``weight_zero_point`` int32 [N * bits / 32, G] (int8 [N, G] in old files).

    Codes and zero points are unsigned. Old files may have ``weight_g_idx``, the group of each input.
    """

    def marks(self, name: str, headers: Headers) -> bool:
        return f"{name}_packed" in headers

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        *experts, rows, columns = shape
        groups, bits = groups_of(name, columns, scheme.group), scheme.bits
        zeros = [(*experts, -(-rows * bits // 32), groups), (*experts, rows, groups)]
        parts = [
            Part(f"{name}_packed", ("I32",), [(*experts, rows, -(-columns * bits // 32))]),
            Part(f"{name}_scale", FLOATS, _scale_shapes(name, shape, scheme)),
            Part(f"{name}_shape", ("I64", "I32"), [(2,), (*experts, 2), (len(shape),)], optional=True),
            Part(f"{name}_g_idx", ("I32", "I64"), [(*experts, columns)], optional=not scheme.ordered),
        ]
        # Symmetric matrices may have zero points in the file, all of them in the middle of the code range.
        return [*parts, Part(f"{name}_zero_point", ("I32", "I8"), zeros, optional=scheme.symmetric)]

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        (rows, columns), bits = shape, scheme.bits
        stored_shape = read_optional(f"{name}_shape", get)
        if stored_shape is not None and stored_shape.dim() == 1 and stored_shape.tolist()[-2:] != [rows, columns]:
            raise ConfigError(f"{name}_shape is {stored_shape.tolist()}, not {[rows, columns]}")
        codes = unpack(get(f"{name}_packed"), bits)[:, :columns]
        scales = _scales(f"{name}_scale", get, shape, scheme, 2.0**bits)
        input_groups, zeros = read_optional(f"{name}_g_idx", get), read_optional(f"{name}_zero_point", get)
        order = None
        # -1 for all inputs means that groups are contiguous.
        if input_groups is not None and not bool((input_groups == -1).all()):
            order = input_order(f"{name}_g_idx", input_groups, scales.shape[1])
            codes = codes if order is None else codes[:, order]
        if zeros is not None:
            is_int8 = zeros.dtype == torch.int8
            if len(zeros) != (rows if is_int8 else -(-rows * bits // 32)):
                raise ConfigError(
                    f"{name}_zero_point is {zeros.dtype} {list(zeros.shape)}, which does not fit {rows} rows"
                )
            zeros = _shifted(f"{name}_zero_point", zeros, bits) if is_int8 else unpack(zeros.t(), bits)[:, :rows].t()
            if scheme.symmetric:
                check_symmetric(f"{name}_zero_point", zeros, 2 ** (bits - 1))
                zeros = None
        return from_unsigned(codes.contiguous(), bits, scales, zeros, scheme.group, order)


class CodesLayout:
    """``weight`` [N, K] with one code per byte, and ``weight_scale`` (or ``weight_scale_inv``): a scalar, [N, 1],
    [N, G], or [N / rows, G] for blocks of ``rows`` outputs, of which the last ones may be partial."""

    def marks(self, name: str, headers: Headers) -> bool:
        has_scale = f"{name}_scale" in headers or f"{name}_scale_inv" in headers
        header = headers.get(name)
        return header is not None and header.dtype not in FLOATS and (has_scale or header.dtype in ("I8", "F8_E4M3"))

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        scales = _scale_shapes(name, shape, scheme)
        zeros = Part(f"{name}_zero_point", ("I8",), scales, optional=scheme.symmetric)
        return (
            Part(name, {"int": ("I8",), "fp8": ("F8_E4M3",)}[scheme.kind], [shape]),
            Part(f"{name}_scale_inv", SCALES, scales, optional=True),
            Part(f"{name}_scale", SCALES, scales, instead=f"{name}_scale_inv"),
            zeros,
        )

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        codes = get(name)
        fp8 = scheme.kind == "fp8"
        coding = "fp8_e4m3" if fp8 else "int8"
        # The codes 127 and 255 of E4M3 are NaN.
        if fp8 and bool(((codes.view(torch.uint8) & 127) == 127).any()):
            raise ConfigError(f"{name} contains NaN")
        scale = f"{name}_scale_inv" if read_optional(f"{name}_scale_inv", get) is not None else f"{name}_scale"
        scales = _scales(scale, get, shape, scheme, 2 * largest(coding))
        zeros = read_optional(f"{name}_zero_point", get)
        if zeros is not None and scheme.symmetric:
            check_symmetric(f"{name}_zero_point", zeros, 0)
            zeros = None
        if zeros is not None:
            zeros = _spread(zeros, shape, scheme)
        if scheme.bits == 4:
            shifted = None if zeros is None else _shifted(f"{name}_zero_point", zeros, 4)
            return from_unsigned(_shifted(name, codes, 4), 4, scales, shifted, scheme.group)
        return QuantizedMatrix(
            coding=coding,
            codes=codes.view(torch.uint8),
            scales=scales,
            group=scheme.group or shape[1],
            offsets=None if zeros is None else -scales * zeros.float(),
        )


def _shifted(name: str, numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Convert signed int8 numbers of ``bits`` bits to unsigned ones. Raises ConfigError for numbers out of range."""
    half = 1 << (bits - 1)
    if int(numbers.min()) < -half or int(numbers.max()) >= half:
        raise ConfigError(f"{name} has numbers outside of {-half} to {half - 1}, which do not fit into {bits} bits")
    return (numbers.to(torch.int16) + half).to(torch.uint8)


def _scale_shapes(name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> list[tuple[int, ...]]:
    """Return the allowed shapes of a matrix's scales in the file. A single scale may have 0, 1 or 2 dimensions."""
    *experts, rows, columns = shape
    if not scheme.rows:
        return [(*experts, *ones) for ones in ((), (1,), (1, 1))]
    if scheme.rows == 1:
        groups = groups_of(name, columns, scheme.group)
        return [(*experts, rows, groups), *([(*experts, rows)] if groups == 1 else [])]
    blocks, groups = -(-rows // scheme.rows), -(-columns // scheme.group)
    # Model Optimizer keeps the reduced axes of blocks, of size 1.
    return [(*experts, blocks, groups), (*experts, blocks, 1, groups, 1)]


def _scales(name: str, get: Get, shape: tuple[int, int], scheme: MatrixScheme, max_factor: float) -> torch.Tensor:
    return _spread(finite(name, get(name), max_factor), shape, scheme)


def _spread(values: torch.Tensor, shape: tuple[int, int], scheme: MatrixScheme) -> torch.Tensor:
    """Broadcast scales or zero points from their shape in the file to [N, G]."""
    rows = min(scheme.rows or shape[0], shape[0])
    matrix = values.reshape(-(-shape[0] // rows), -1)
    return matrix.repeat_interleave(rows, 0)[: shape[0]].contiguous()
