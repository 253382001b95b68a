"""4-bit floats: the layouts of NVFP4, with an FP8 scale per group and one factor per matrix, and of MXFP4 (OCP
Microscaling Formats 1.0), whose scales are powers of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pillion.engine.quantized.formats.layout import (
    Get,
    Headers,
    Part,
    finite,
    groups_of,
    largest,
    stem,
    unpack_halves,
    unstacked_shape,
)
from pillion.engine.quantized.quantization import MatrixScheme
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

_CODING = "fp4_e2m1"


class Nvfp4Layout:
    """NVFP4: codes uint8 [N, K / 2], the first of two in the lower half, ``weight_scale`` in E4M3 [N, G], and a float32
    factor of all scales of the matrix."""

    def __init__(self, codes: str, factor: str, *, divides: bool) -> None:
        """Set the suffixes of the tensor names of codes and factor; ``divides``: True if scales are to be divided by
        the factor, False to be multiplied."""
        self._codes, self._factor, self._divides = codes, factor, divides

    def marks(self, name: str, headers: Headers) -> bool:
        header = headers.get(name + self._codes)
        return header is not None and header.dtype == "U8"

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        rows, columns = unstacked_shape(name, shape)
        return (
            Part(name + self._codes, ("U8",), [(rows, -(-columns // 2))]),
            Part(f"{name}_scale", ("F8_E4M3",), [(rows, groups_of(name, columns, scheme.group))]),
            Part(name + self._factor, ("F32",), [(), (1,)]),
        )

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        factor = get(name + self._factor).reshape(())
        if not 0 < float(factor) < float("inf"):
            raise ConfigError(f"{name}{self._factor} is {float(factor)}, not a number above 0")
        scales = get(f"{name}_scale").float()
        scales = finite(f"{name}_scale", scales / factor if self._divides else scales * factor, largest(_CODING))
        codes = unpack_halves(get(name + self._codes))[:, : shape[1]]
        factors = (1 / factor if self._divides else factor).expand(shape[0]).contiguous()
        return QuantizedMatrix(
            coding=_CODING, codes=codes.contiguous(), scales=scales, group=scheme.group, factors=factors
        )


class PackedMxfp4Layout:
    """MXFP4 of compressed-tensors: ``weight_packed`` uint8 [N, K / 2], the first of two codes in the lower half, and
    ``weight_scale`` uint8 [N, G], the exponents."""

    def marks(self, name: str, headers: Headers) -> bool:
        header = headers.get(f"{name}_packed")
        return header is not None and header.dtype == "U8"

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        rows, columns = unstacked_shape(name, shape)
        return (
            Part(f"{name}_packed", ("U8",), [(rows, -(-columns // 2))]),
            Part(f"{name}_scale", ("U8", "F8_E8M0"), [(rows, groups_of(name, columns, scheme.group))]),
        )

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        codes = unpack_halves(get(f"{name}_packed"))[:, : shape[1]]
        scales = _powers(f"{name}_scale", get)
        return QuantizedMatrix(coding=_CODING, codes=codes.contiguous(), scales=scales, group=scheme.group)


class Mxfp4Layout:
    """Experts of gpt-oss: ``NAME_blocks`` uint8 [..., N, K / 32, 16], two codes per byte, the first in the lower half,
    and ``NAME_scales`` uint8 [..., N, K / 32], the exponents."""

    def marks(self, name: str, headers: Headers) -> bool:
        return any(part in headers for part in _names(name))

    def parts(self, name: str, shape: tuple[int, ...], scheme: MatrixScheme) -> Sequence[Part]:
        *leading, columns = shape
        blocks, scales = _names(name)
        groups = (*leading, groups_of(name, columns, scheme.group))
        return Part(blocks, ("U8",), [(*groups, scheme.group // 2)]), Part(scales, ("U8",), [groups])

    def read(self, name: str, shape: tuple[int, int], scheme: MatrixScheme, get: Get) -> QuantizedMatrix:
        blocks, scales = _names(name)
        codes = unpack_halves(get(blocks).flatten(-2)).view(shape)
        return QuantizedMatrix(coding=_CODING, codes=codes, scales=_powers(scales, get), group=scheme.group)


def _powers(name: str, get: Get) -> torch.Tensor:
    """Read E8M0 exponents and return the powers of two, float32. Raises ConfigError for NaN."""
    # 127 is the bias of E8M0.
    exponents = get(name).view(torch.uint8).int() - 127
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents)
    return finite(name, powers, largest(_CODING))


def _names(name: str) -> tuple[str, str]:
    module = stem(name)
    return f"{module}_blocks", f"{module}_scales"
