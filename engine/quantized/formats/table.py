"""Layouts of quantized matrices by name. A new format needs a row here and one in
:mod:`pillion.engine.quantized.quantization_methods`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from pillion.engine.checkpoints.weight_format import WeightFormat
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.quantized.formats.bitsandbytes import Int8Layout, Nf4Layout
from pillion.engine.quantized.formats.compressed import CodesLayout, PackedLayout
from pillion.engine.quantized.formats.fp4 import Mxfp4Layout, Nvfp4Layout, PackedMxfp4Layout
from pillion.engine.quantized.formats.int32_layouts import AwqLayout, GptqLayout
from pillion.engine.quantized.formats.layout import Headers, Layout, Part, stem
from pillion.engine.quantized.formats.pillion_format import PillionFormat
from pillion.engine.quantized.quantization import OWN_METHOD, MatrixScheme, Quantization
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

LAYOUTS: Mapping[str, Layout] = {
    "awq": AwqLayout(),
    "gptq": GptqLayout(1),
    "gptq_v2": GptqLayout(0),
    "packed": PackedLayout(),
    "codes": CodesLayout(),
    "nvfp4": Nvfp4Layout("_packed", "_global_scale", divides=True),
    "modelopt_nvfp4": Nvfp4Layout("", "_scale_2", divides=False),
    "bnb4": Nf4Layout(),
    "bnb8": Int8Layout(),
    "mxfp4": Mxfp4Layout(),
    "packed_mxfp4": PackedMxfp4Layout(),
}
# Names of statistics of activations that some producers store with a matrix; never read.
_ACTIVATION_STATISTICS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)


def format_of(config: ModelConfig) -> WeightFormat | None:
    """Return the format of a model's quantized matrices; None if its config has no quantization."""
    quantization = config.quantization
    if quantization is None:
        return None
    is_own = quantization.method == OWN_METHOD
    return PillionFormat(quantization.row_codes) if is_own else ConfiguredFormat(quantization)


class ConfiguredFormat:
    """:class:`WeightFormat` of other producers, with a layout for each matrix by the config's schemes."""

    def __init__(self, quantization: Quantization) -> None:
        self._words = quantization.words
        self._row_codes = quantization.row_codes
        self._patterns = [(re.compile(pattern), scheme) for pattern, scheme in quantization.schemes]
        self._schemes: dict[str, MatrixScheme | None] = {}

    def stored(self, name: str, shape: tuple[int, ...], headers: Headers) -> tuple[str, ...]:
        module = stem(name)
        scheme = self._scheme(module)
        if scheme is None or not LAYOUTS[scheme.layout].marks(name, headers):
            if any(layout.marks(name, headers) for layout in LAYOUTS.values()):
                raise ConfigError(f"{module} is quantized, but not as its quantization_config says ({self._words})")
            return ()
        parts = LAYOUTS[scheme.layout].parts(name, shape, scheme)
        for part in parts:
            _check(part, headers, self._words)
        names = [part.name for part in parts] + [
            _statistic_name(name, statistic) for statistic in _ACTIVATION_STATISTICS
        ]
        return tuple(part for part in names if part in headers)

    def read(self, name: str, shape: tuple[int, int], get: Callable[[str], torch.Tensor]) -> QuantizedMatrix:
        scheme = self._scheme(stem(name))
        assert scheme is not None
        return replace(
            LAYOUTS[scheme.layout].read(name, shape, scheme, get), row_codes=self._row_codes or scheme.row_codes
        )

    def _scheme(self, module: str) -> MatrixScheme | None:
        """Return the first scheme whose pattern matches a module's name; None if there is none."""
        if module not in self._schemes:
            # Patterns of multimodal models may include the prefix of the language model.
            names = (module, f"language_model.{module}", re.sub("^model[.]", "model.language_model.", module))
            matching = (scheme for pattern, scheme in self._patterns if any(map(pattern.match, names)))
            self._schemes[module] = next(matching, None)
        return self._schemes[module]


def _statistic_name(name: str, statistic: str) -> str:
    """Return the name of an activation statistic of the matrix ``name``."""
    module = stem(name)
    return f"{module}{'_' if module == name else '.'}{statistic}"


def _check(part: Part, headers: Headers, quantization: str) -> None:
    """Raise ConfigError if a required tensor is missing, or a tensor has a wrong type or shape."""
    header = headers.get(part.name)
    if header is None:
        if not part.optional and part.instead not in headers:
            raise ConfigError(f"{part.name} is missing, which a matrix of {quantization} needs")
        return
    if header.dtype not in part.dtypes:
        raise ConfigError(
            f"{part.name} is {header.dtype}, not {' or '.join(part.dtypes)}, for a matrix of {quantization}"
        )
    if part.shapes and header.shape not in part.shapes:
        expected = " or ".join(str(list(shape)) for shape in part.shapes)
        raise ConfigError(f"{part.name} is {list(header.shape)}, not {expected}, for a matrix of {quantization}")
