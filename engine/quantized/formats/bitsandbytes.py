"""Layouts of bitsandbytes: NF4 with block statistics, and int8 with a scale per output."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from pillion.engine.quantized.formats.layout import (
    Get,
    Headers,
    Part,
    finite,
    read_optional,
    stem,
    unpack_halves,
    unstacked_shape,
)
from pillion.engine.quantized.quantization import MatrixScheme
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix

# Limit on the block sizes in a file.
_MAX_BLOCK_WEIGHTS = 4096


class Nf4Layout:
    """NF4: ``weight`` uint8 [N * K / 2, 1], the first of two codes in the upper half, and its statistics.

    A block is a run of codes that may continue in the next row. ``absmax`` has the largest absolute value per block:
    float32, or, with double quantization, an index into ``nested_quant_map``, to scale by the ``nested_absmax`` of a
    block of indices and to add ``nested_offset`` to. Block sizes and that offset are JSON in the bytes of
    ``quant_state.bitsandbytes__nf4``.
    """

    def marks(self, name: str, headers: Headers) -> bool:
        # Also match uint8 weights without statistics, which are then reported as missing.
        return _state(name) in headers or (name in headers and headers[name].dtype == "U8")

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        count = math.prod(unstacked_shape(name, shape))
        storage = [(count // (2 * size), 1) for size in (1, 2, 4)]
        return (
            Part(name, ("U8", "BF16", "F16", "F32"), storage),
            Part(_state(name), ("U8",), []),
            Part(f"{name}.quant_map", ("F32",), [(16,)]),
            Part(f"{name}.absmax", ("F32", "U8"), []),
            Part(f"{name}.nested_absmax", ("F32",), [], optional=True),
            Part(f"{name}.nested_quant_map", ("F32",), [(256,)], optional=True),
        )

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        state = _read_state(name, get)
        rows, columns = shape
        count, block = rows * columns, _size(name, state, "blocksize")
        packed = get(name).contiguous().view(torch.uint8).flatten()
        if state.get("shape") != [rows, columns] or state.get("quant_type") != "nf4" or len(packed) * 2 != count:
            raise ConfigError(
                f"{_state(name)} is for {state.get('quant_type')} of {state.get('shape')}, not nf4 of {shape}"
            )
        if not torch.equal(get(f"{name}.quant_map"), CODINGS["nf4"]):
            raise ConfigError(f"{name}.quant_map has other values than NF4's")
        scales = _absmax(name, state, get)
        if len(scales) != -(-count // block):
            raise ConfigError(f"{name}.absmax has {len(scales)} values, not {-(-count // block)}")
        # A block may span rows; a group of this size is within one block and one row.
        group = math.gcd(block, columns)
        return QuantizedMatrix(
            coding="nf4",
            codes=unpack_halves((packed >> 4) | (packed << 4)).view(rows, columns),
            scales=scales.repeat_interleave(block // group)[: count // group].view(rows, columns // group),
            group=group,
        )


def _state(name: str) -> str:
    return f"{name}.quant_state.bitsandbytes__nf4"


def _read_state(name: str, get: Get) -> dict[str, Any]:
    try:
        state = json.loads(bytes(get(_state(name)).tolist()))
    except ValueError as error:
        raise ConfigError(f"{_state(name)} is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{_state(name)} is not a JSON object")
    return state


def _size(name: str, state: dict[str, Any], key: str) -> int:
    value = state.get(key)
    if type(value) is not int or not 1 <= value <= _MAX_BLOCK_WEIGHTS:
        raise ConfigError(f"{_state(name)}: {key} must be 1 to {_MAX_BLOCK_WEIGHTS}, not {value!r}")
    return value


def _absmax(name: str, state: dict[str, Any], get: Get) -> torch.Tensor:
    """Return the largest absolute value of each block, float32 [blocks]."""
    absmax = get(f"{name}.absmax").flatten()
    if absmax.dtype == torch.float32:
        return finite(f"{name}.absmax", absmax)
    block, offset = _size(name, state, "nested_blocksize"), state.get("nested_offset")
    try:
        table, outer = get(f"{name}.nested_quant_map"), get(f"{name}.nested_absmax").flatten()
    except KeyError as missing:
        raise ConfigError(f"{missing.args[0]} is missing, which {name}.absmax in bytes needs") from None
    if not isinstance(offset, float) or len(outer) != -(-len(absmax) // block):
        raise ConfigError(f"{name}.nested_absmax and nested_offset {offset!r} do not fit {len(absmax)} blocks")
    dequantized = table[absmax.long()] * outer.repeat_interleave(block)[: len(absmax)] + offset
    return finite(f"{name}.nested_absmax", dequantized)


class Int8Layout:
    """int8: ``weight`` [N, K] and ``SCB`` float32 [N], the largest absolute value of each row."""

    def marks(self, name: str, headers: Headers) -> bool:
        return f"{stem(name)}.SCB" in headers or (name in headers and headers[name].dtype == "I8")

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        return (
            Part(name, ("I8",), [shape]),
            Part(f"{stem(name)}.SCB", ("F32",), [unstacked_shape(name, shape)[:1]]),
            Part(f"{stem(name)}.weight_format", ("U8",), [(), (1,)], optional=True),
        )

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        order = read_optional(f"{stem(name)}.weight_format", get)
        if order is not None and int(order):
            raise ConfigError(f"{stem(name)}.weight_format is {int(order)}; only row order, 0, is supported")
        scales = finite(f"{stem(name)}.SCB", get(f"{stem(name)}.SCB")) / 127
        return QuantizedMatrix(coding="int8", codes=get(name).view(torch.uint8), scales=scales[:, None], group=shape[1])
