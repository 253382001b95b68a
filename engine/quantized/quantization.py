"""The ``quantization_config`` of a checkpoint: the storage of its quantized matrices. Imports no torch.

A row of :data:`pillion.engine.quantized.quantization_methods.METHODS` parses one producer's config to a
:class:`Quantization`, by which :mod:`pillion.engine.quantized.formats` reads tensors. The config decides how a
module is quantized; whether it is quantized is decided by the tensors in the files, because configs list exceptions by
module names of different programs and versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pillion.errors import ConfigError

Raw = Mapping[str, Any]

# Pattern of a scheme for all modules.
ANY_MODULE = ""
# Keys of config.json with the quantization, by different producers; the first one present wins.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
# Quantization of layers' inputs on CPUs: with a scale per row, or per group of a row's inputs, which only
# --activation-quantization enables.
WHOLE_ROWS, GROUPED_ROWS = "dynamic", "grouped"
# quant_method of checkpoints that Pillion converts or quantizes.
OWN_METHOD = "pillion"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixScheme:
    """Storage of the matrices of some modules.

    Attributes:
        layout: key of :data:`pillion.engine.quantized.formats.table.LAYOUTS`.
        kind: kind of codes: "int", "fp8", "fp4" or "nf4".
        bits: bits per code.
        group: inputs per scale; 0 for all.
        rows: outputs per scale; 0 for all.
        symmetric: True if there are no zero points.
        ordered: True if a tensor gives the group of each input (act-order); False if groups are contiguous.
        activations: type to which the producer quantizes a layer's inputs, but Pillion does not: "int8", "fp8" or
            "fp4"; "" if there is none.
        row_codes: WHOLE_ROWS if CPUs quantize a layer's inputs to int8
            (:func:`pillion.kernels.torch.quantized_matrix.rounded_rows`), else "".
        fp8_rows: True if the producer quantizes a layer's inputs to FP8 with dynamic scales; Pillion's GPU kernels then
            do, too.
    """

    layout: str
    kind: str = "int"
    bits: int
    group: int = 0
    rows: int = 1
    symmetric: bool = True
    ordered: bool = False
    activations: str = ""
    row_codes: str = ""
    fp8_rows: bool = False

    @property
    def words(self) -> str:
        """Short description: "4 bits in groups of 128"."""
        names = {"fp8": "8-bit floats", "fp4": "4-bit floats", "nf4": "NF4"}
        number = names.get(self.kind, f"{self.bits} bits")
        if self.rows > 1:
            return f"{number} in blocks of {self.rows} x {self.group}"
        return f"{number} in groups of {self.group}" if self.group else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Storage of a checkpoint's quantized matrices; part of the model's fingerprint.

    Attributes:
        method: name of the producer's format.
        schemes: (regular expression for :func:`re.match` on module names, scheme); the first match wins. () for
            Pillion's own format.
        weights: description of the weights in a config without schemes.
        row_codes: WHOLE_ROWS or GROUPED_ROWS for all modules; "" for those of the schemes.
    """

    method: str
    schemes: tuple[tuple[str, MatrixScheme], ...] = ()
    weights: str = ""
    row_codes: str = ""

    @property
    def words(self) -> str:
        """Short description: "awq, 4 bits in groups of 128"."""
        weights = (
            self.weights or f"{self.method}, {' and '.join(dict.fromkeys(scheme.words for _, scheme in self.schemes))}"
        )
        return f"{weights}; inputs in 8 bits" if self.row_codes == GROUPED_ROWS else weights

    @property
    def activations(self) -> frozenset[str]:
        """Types to which the producer quantizes some layers' inputs, but Pillion does not."""
        return frozenset(scheme.activations for _, scheme in self.schemes) - {""}

    @property
    def fp8_rows(self) -> bool:
        """True if the producer quantizes the inputs of all quantized layers to FP8 with dynamic scales."""
        return bool(self.schemes) and all(scheme.fp8_rows for _, scheme in self.schemes)

    @property
    def quantizes_inputs(self) -> bool:
        """True if CPUs quantize the inputs of some layers to int8."""
        return bool(self.row_codes) or any(scheme.row_codes for _, scheme in self.schemes)

    def rounding_notes(self, device: str, *, latents: bool) -> Iterator[str]:
        """Yield a sentence for the user per difference from the producer's arithmetic on ``device``. ``latents``: True
        if the model has latent attention (MLA)."""
        rounded, grouped = self.activations, self.row_codes == GROUPED_ROWS
        if device == "cuda" and (grouped or (self.method == OWN_METHOD and self.quantizes_inputs)):
            flag = "--activation-quantization int8" if grouped else "--quantization int8-dynamic"
            yield (
                f"{flag} rounds the inputs of linear layers on CPUs only; here they are not rounded, which is nearer"
                " to the unquantized model"
            )
        elif device == "cuda" and self.quantizes_inputs:
            rounded |= {"int8"}
        if device == "cuda" and self.fp8_rows:
            rounded -= {"fp8"}
        if rounded and not (grouped and device == "cpu"):
            yield (
                "the checkpoint's producer also rounds the inputs of quantized layers to"
                f" {' and '.join(sorted(rounded))}; here they are not rounded, which is nearer to the unquantized model"
            )
        if device == "cpu" and latents and self.quantizes_inputs and not grouped and self.method != OWN_METHOD:
            yield (
                "latents are not rounded to int8 where keys and values are made of them, which is nearer to the"
                " unquantized model"
            )


def quantization_method(config: Mapping[str, Any]) -> str:
    """Return the producer of a quantized checkpoint, such as "awq"; "" for plain weights."""
    key = next((key for key in QUANTIZATION_KEYS if config.get(key)), "")
    raw = config.get(key)
    if not isinstance(raw, Mapping):
        return repr(raw) if key else ""
    # Configs without quant_method: old ones of bitsandbytes, which only have the bit width, and those of MLX.
    if raw.get("load_in_4bit") or raw.get("load_in_8bit"):
        return "bitsandbytes"
    default = "compressed-tensors" if key == "compression_config" else "an unnamed method"
    # MLX writes both "quantization" and "quantization_config".
    return str(raw.get("quant_method") or ("mlx" if config.get("quantization") else default))


def unsupported(what: str, why: str = "") -> ConfigError:
    """Return the error for an unsupported quantization ``what``; ``why``: what is supported."""
    reason = f" ({why})" if why else ""
    return ConfigError(
        f"weights quantized by {what} are not supported{reason}; use another quantization, such as awq, gptq,"
        " compressed-tensors or fp8, or the bf16, fp16 or fp32 release"
    )


def refuse_unknown(raw: Raw, known: str, where: str) -> None:
    """Raise ConfigError for a key outside of ``known``, names separated by spaces, unless its value is falsy."""
    for key in sorted(raw.keys() - set(known.split())):
        if raw[key] and not key.startswith("_"):
            raise ConfigError(f"config.json: {where} has {key} = {repr(raw[key])[:60]}, which is not supported")


def whole(raw: Raw, keys: str, default: int | None, allowed: Sequence[int] = ()) -> int:
    """Return the integer of the first key of ``keys``, names separated by spaces, that is present: one of ``allowed``
    if given, else above 0."""
    key = next((key for key in keys.split() if raw.get(key) is not None), keys.split()[0])
    value = raw.get(key, default)
    valid = isinstance(value, int) and not isinstance(value, bool) and (value in allowed or (not allowed and value > 0))
    if not valid:
        expected = " or ".join(map(str, allowed)) or "a whole number above 0"
        raise ConfigError(f"config.json: quantization_config: {key} must be {expected}, not {value!r}")
    assert isinstance(value, int)
    return value


def words_of(raw: Raw, keys: str, default: str) -> str:
    """Return the lower-case value of the first key of ``keys``, names separated by spaces, that is present; else
    ``default``."""
    return str(next((raw[key] for key in keys.split() if raw.get(key) is not None), default)).lower()


def checked_pattern(pattern: str, key: str) -> str:
    """Return the regular expression ``pattern`` of ``key``. Raises ConfigError if it is invalid."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"config.json: quantization_config: {key}: {pattern} is not a regular expression: {error}"
        ) from None
    return pattern


def block_of(block: Any, where: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs in a block with one scale. Raises ConfigError for an invalid
    ``block``."""
    if isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    raise ConfigError(f"config.json: {where} must be two whole numbers above 0, not {block!r}")
