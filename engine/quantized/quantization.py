"""Reads the ``quantization_config`` of a checkpoint: how its files hold quantized matrices. Imports no torch.

A row of :data:`pillion.engine.quantized.quantization_methods.METHODS` reads the config of one producer into a
:class:`Quantization`, and :mod:`pillion.engine.quantized.formats` reads tensors by it. The config says only how a
module is quantized, never whether: the lists of exceptions are written under the module names of different programs
and versions, but a tensor in a file either is a quantized matrix or is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pillion.errors import ConfigError

Raw = Mapping[str, Any]

# The kinds of codes in words; codes of "int" are named by their bits.
_WORDS = {"fp8": "8-bit floats", "fp4": "4-bit floats", "nf4": "NF4"}
# This pattern gives a scheme to all modules.
ANY_MODULE = ""
# Checkpoints say under these keys how their weights are quantized; the last is MLX's.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
# What a config says of the rounding of layers' inputs on CPUs: one scale for each row, or one for each group of inputs
# of a row, which only --activation-quantization asks for.
WHOLE_ROWS, GROUPED_ROWS = "dynamic", "grouped"
# Checkpoints that Pillion itself converts or quantizes have this quant_method.
OWN_METHOD = "pillion"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixScheme:
    """Says how the files hold the matrices of some modules.

    Attributes:
        layout: which tensors there are and how they are packed, a key of
            :data:`pillion.engine.quantized.formats.table.LAYOUTS`.
        kind: the kind of a code: "int", "fp8", "fp4" or "nf4".
        bits: number of bits of a code.
        group: number of inputs that share a scale; 0 for all inputs.
        rows: number of outputs that share a scale; 0 for all outputs.
        symmetric: whether there are no zero points.
        ordered: whether inputs of a group do not follow each other (act-order), so that a tensor says their groups.
        activations: the type to which the producer also rounds a layer's inputs ("int8", "fp8", "fp4") where no product
            here does, or "".
        row_codes: WHOLE_ROWS where products on CPUs round a layer's inputs to int8
            (:func:`pillion.kernels.torch.quantized_matrix.rounded_rows`), or "".
        fp8_rows: whether the producer rounds a layer's inputs to FP8 by their own sizes (dynamic activations), as GPUs
            do.
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
        """Gives the scheme in a few words: "4 bits in groups of 128"."""
        number = _WORDS.get(self.kind, f"{self.bits} bits")
        if self.rows > 1:
            return f"{number} in blocks of {self.rows} x {self.group}"
        return f"{number} in groups of {self.group}" if self.group else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Says how a checkpoint's files hold its quantized matrices. It is a part of the model's fingerprint.

    Attributes:
        method: the name of the producer's format.
        schemes: pairs of a regular expression and the scheme of modules whose names it matches from their first letter
            on. The first match decides. In Pillion's own format the tensors themselves say all.
        weights: the config's words about its weights, where there are no schemes.
        row_codes: WHOLE_ROWS, GROUPED_ROWS or "", for all modules, whatever their schemes say; "" leaves it to these.
    """

    method: str
    schemes: tuple[tuple[str, MatrixScheme], ...] = ()
    weights: str = ""
    row_codes: str = ""

    @property
    def words(self) -> str:
        """Gives the format in a few words: "awq, 4 bits in groups of 128"."""
        weights = (
            self.weights or f"{self.method}, {' and '.join(dict.fromkeys(scheme.words for _, scheme in self.schemes))}"
        )
        return f"{weights}; inputs in 8 bits" if self.row_codes == GROUPED_ROWS else weights

    @property
    def activations(self) -> frozenset[str]:
        """Gives the types to which a checkpoint's producer rounds the inputs of some layers, where Pillion's products
        do not."""
        return frozenset(scheme.activations for _, scheme in self.schemes) - {""}

    @property
    def fp8_rows(self) -> bool:
        """Says whether the producer rounds the inputs of all quantized layers to FP8 by their own sizes."""
        return bool(self.schemes) and all(scheme.fp8_rows for _, scheme in self.schemes)

    @property
    def rounds_rows(self) -> bool:
        """Says whether products on CPUs round the inputs of some layers to int8."""
        return bool(self.row_codes) or any(scheme.row_codes for _, scheme in self.schemes)

    def rounding_notes(self, device: str, *, latents: bool) -> Iterator[str]:
        """Yields a sentence for each difference from the arithmetic of the checkpoint's producer. ``latents`` says
        whether the model has attention over latents."""
        rounded, grouped = self.activations, self.row_codes == GROUPED_ROWS
        if device == "cuda" and (grouped or (self.method == OWN_METHOD and self.rounds_rows)):
            flag = "--activation-quantization int8" if grouped else "--quantization int8-dynamic"
            yield (
                f"{flag} rounds the inputs of linear layers on CPUs only; here they are not rounded, which is nearer"
                " to the unquantized model"
            )
        elif device == "cuda" and self.rounds_rows:
            rounded |= {"int8"}
        if device == "cuda" and self.fp8_rows:
            rounded -= {"fp8"}  # A worker that does not do the same says so.
        if rounded and not (grouped and device == "cpu"):
            yield (
                "the checkpoint's producer also rounds the inputs of quantized layers to"
                f" {' and '.join(sorted(rounded))}; here they are not rounded, which is nearer to the unquantized model"
            )
        if device == "cpu" and latents and self.rounds_rows and not grouped and self.method != OWN_METHOD:
            yield (
                "latents are not rounded to int8 where keys and values are made of them, which is nearer to the"
                " unquantized model"
            )


def quantization_method(config: Mapping[str, Any]) -> str:
    """Returns the producer of a checkpoint quantized by its name in configs, such as "awq"; "" for plain weights."""
    key = next((key for key in QUANTIZATION_KEYS if config.get(key)), "")
    raw = config.get(key)
    if not isinstance(raw, Mapping):
        return repr(raw) if key else ""
    # Old configs of bitsandbytes name only the width, and those of MLX name no method.
    if raw.get("load_in_4bit") or raw.get("load_in_8bit"):
        return "bitsandbytes"
    unnamed = "compressed-tensors" if key == "compression_config" else "an unnamed method"
    # MLX writes the same under its own key and under the usual one.
    return str(raw.get("quant_method") or ("mlx" if config.get("quantization") else unnamed))


def unsupported(what: str, why: str = "") -> ConfigError:
    """Makes the error for weights that cannot be read; ``what`` names their quantization."""
    reason = f" ({why})" if why else ""
    return ConfigError(
        f"weights quantized by {what} are not supported{reason}; use another quantization, such as awq, gptq,"
        " compressed-tensors or fp8, or the bf16, fp16 or fp32 release"
    )


def refuse_others(raw: Raw, known: str, where: str) -> None:
    """Raises ConfigError for a key that is neither in ``known`` nor switched off, and could change the numbers."""
    for key in sorted(raw.keys() - set(known.split())):
        if raw[key] and not key.startswith("_"):
            raise ConfigError(f"config.json: {where} has {key} = {repr(raw[key])[:60]}, which is not supported")


def whole(raw: Raw, keys: str, default: int | None, allowed: Sequence[int] = ()) -> int:
    """Returns a whole number under the first of ``keys`` that the config has: one of ``allowed``, or else above 0."""
    key = next((key for key in keys.split() if raw.get(key) is not None), keys.split()[0])
    value = raw.get(key, default)
    fits = isinstance(value, int) and not isinstance(value, bool) and (value in allowed or (not allowed and value > 0))
    if not fits:
        wanted = " or ".join(map(str, allowed)) or "a whole number above 0"
        raise ConfigError(f"config.json: quantization_config: {key} must be {wanted}, not {value!r}")
    assert isinstance(value, int)
    return value


def words_of(raw: Raw, keys: str, default: str) -> str:
    """Returns, in lower case, the value of the first of ``keys`` that the config has, else ``default``."""
    return str(next((raw[key] for key in keys.split() if raw.get(key) is not None), default)).lower()


def checked_pattern(pattern: str, key: str) -> str:
    """Returns a regular expression of the config's key ``key``. Raises ConfigError for a text that is none."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"config.json: quantization_config: {key}: {pattern} is no regular expression: {error}"
        ) from None
    return pattern


def block_of(block: Any, where: str) -> tuple[int, int]:
    """Returns the outputs and inputs of a block that shares a scale."""
    if isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    raise ConfigError(f"config.json: {where} must be two whole numbers above 0, not {block!r}")
