"""Quantizer of plain matrices: finds the codes, scale and offset of least squared error for each group of weights.

The error of a group x of inputs of one output is |scale * code + offset - x|^2. Given scale and offset, the best codes
are the nearest ones; given codes, a linear regression gives the best scale and offset. Rounding and regression
alternate from several starting points, and the best result wins. The first starting point is the group's range, so that
no group is worse than with rounding to nearest. Finally, scales and offsets are rounded to float16 if that hardly
increases the matrix's error. Needs no calibration data, like HQQ (half-quadratic quantization); the arithmetic is that
of llama.cpp's make_qkx2_quants.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.model_files import TEXT_FILES, Progress
from pillion.engine.models.config_json import read_json
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import Role, tensors_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.quantized.formats.pillion_format import stored_tensors
from pillion.engine.quantized.quantization import OWN_METHOD
from pillion.engine.quantized.shards import write_shards
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

# Weights that a thread quantizes at once, so that they fit a core's cache.
_CHUNK_WEIGHTS = 2**18


@dataclass(frozen=True, slots=True)
class CodeRange:
    """Integer codes that the quantizer uses of a coding: ``lowest``, which is 0 with ``offsets``, to ``highest``."""

    coding: str
    lowest: int
    highest: int
    offsets: bool


CODE_RANGES = {
    "int4": CodeRange("uint4", 0, 15, True),
    # Without -128, so that both signs have the same range.
    "int8": CodeRange("int8", -127, 127, False),
    "int8-dynamic": CodeRange("int8", -127, 127, False),
}


def choose_group_size(columns: int, wanted: int) -> int:
    """Return the inputs per group: the largest of ``wanted``, its half, its quarter etc. that divides ``columns`` and
    is at least 16; ``columns`` if there is none, or if ``wanted`` is 0."""
    group = wanted
    while group >= 16:
        if columns % group == 0:
            return group
        group //= 2
    return columns


def quantize_matrix(
    weight: torch.Tensor, kind: str, group: int, pool: ThreadPoolExecutor | None = None
) -> QuantizedMatrix:
    """Quantize a matrix [N, K] of finite values to a key ``kind`` of CODE_RANGES, on the threads of ``pool``, or on
    this thread. ``group``: inputs per scale, a divisor of K."""
    rows, columns = weight.shape
    levels = CODE_RANGES[kind]
    step = max(1, _CHUNK_WEIGHTS // columns)
    chunks = range(0, rows, step)
    codes = torch.empty(2, rows, columns, dtype=torch.uint8)
    scales, offsets = torch.zeros(2, 2, rows, columns // group)
    errors = torch.zeros(2, len(chunks), dtype=torch.float64)

    def fill(begin: int) -> None:
        chunk = slice(begin, begin + step)
        # Groups are columns, since torch reduces over the first dimension fastest on CPUs.
        groups = weight[chunk].float().reshape(-1, group).t().contiguous()
        best = _best_fit(groups, levels)
        halves = (_without_zeros(best.scale.half().float()), best.offset.half().float())
        for number, fit in enumerate((best, _fit_codes(groups, levels, *halves))):
            codes[number, chunk] = fit.codes.to(torch.int8).t().contiguous().view(torch.uint8).view(-1, columns)
            scales[number, chunk] = fit.scale.view(-1, columns // group)
            offsets[number, chunk] = fit.offset.view(-1, columns // group)
            errors[number, begin // step] = fit.error.sum(dtype=torch.float64)

    for _ in map(fill, chunks) if pool is None else pool.map(fill, chunks):
        pass
    # float16 scales and offsets, which need half the memory, may increase the squared error by 1%.
    chosen = int(errors[1].sum() <= errors[0].sum() * 1.01)
    # Copies, since views would keep both results alive.
    parts = (codes[chosen].clone(), scales[chosen].clone(), group, offsets[chosen].clone() if levels.offsets else None)
    return QuantizedMatrix(levels.coding, *parts)


@dataclass(slots=True)
class GroupFit:
    """Fit of G groups: codes [group, G] as float32, and scale, offset and squared error [G]."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    error: torch.Tensor

    def keep_better(self, other: GroupFit) -> None:
        """Replace the groups for which ``other`` has a smaller error."""
        better = other.error < self.error
        for name in ("codes", "scale", "offset", "error"):
            setattr(self, name, torch.where(better, getattr(other, name), getattr(self, name)))


def _best_fit(groups: torch.Tensor, levels: CodeRange) -> GroupFit:
    """Return the fit with the smallest error of each group, after all starting points and refinement."""
    best = None
    # Starting points: the share of a group's range that the codes span.
    for reach in (1.0, 0.95, 0.9, 0.85, 0.8, 0.72):
        fit = _fit_codes(groups, levels, *_start(groups, levels, reach))
        if best is None:
            best = fit
        else:
            best.keep_better(fit)
        best.keep_better(_fit_codes(groups, levels, *_regression(groups, levels, fit)))
    assert best is not None
    # Refinement rounds of the best fit.
    for _ in range(3):
        best.keep_better(_fit_codes(groups, levels, *_regression(groups, levels, best)))
    return best


def _start(groups: torch.Tensor, levels: CodeRange, reach: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and offset [G] with which the codes span the share ``reach`` of each group's range."""
    low, high = groups.amin(0), groups.amax(0)
    if not levels.offsets:
        return _without_zeros(torch.maximum(-low, high) * (reach / levels.highest)), torch.zeros_like(low)
    scale = _without_zeros((high - low) * (reach / levels.highest))
    return scale, (low + high - scale * levels.highest) / 2 if reach < 1 else low


def _without_zeros(scale: torch.Tensor) -> torch.Tensor:
    """Replace scales of 0, those of groups of equal weights, by 1: any scale is right, but 0 cannot divide."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _fit_codes(groups: torch.Tensor, levels: CodeRange, scale: torch.Tensor, offset: torch.Tensor) -> GroupFit:
    """Return the fit of the nearest codes, given scale and offset [G]."""
    codes = ((groups - offset) / scale).round_().clamp_(levels.lowest, levels.highest)
    error = (codes * scale).add_(offset).sub_(groups).square_().sum(0)
    return GroupFit(codes, scale, offset, error)


def _regression(groups: torch.Tensor, levels: CodeRange, fit: GroupFit) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and offset [G] of least error for the codes of ``fit``; those of ``fit`` where it is
    undetermined."""
    codes, count = fit.codes, groups.shape[0]
    squares, products = codes.square().sum(0), (codes * groups).sum(0)
    if not levels.offsets:
        return torch.where(squares > 0, products / squares, fit.scale), fit.offset
    total, sum_ = codes.sum(0), groups.sum(0)
    spread = count * squares - total.square()
    scale = (count * products - total * sum_) / spread
    usable = (spread > 0) & (scale != 0)
    scale = torch.where(usable, scale, fit.scale)
    return scale, torch.where(usable, (sum_ - scale * total) / count, fit.offset)


def quantize_folder(source: Path, folder: Path, kind: str, group: int, progress: Progress) -> None:
    """Fill ``folder`` with the files of a plain model folder and quantized linear layers.

    Norms, biases, routers, row gates and the embedding stay plain. The LM head becomes int8 with a scale per output.
    Tensors are read one by one, and each is quantized on as many threads as torch uses. Raises ConfigError for weights
    that do not fit the config or are not finite.
    """
    raw, config = read_json(source / "config.json"), load_config(source)
    for name in TEXT_FILES:
        if (source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            ThreadPoolExecutor(threads) as pool,
            open_checkpoint(source, config) as checkpoint,
            write_shards(folder) as writer,
        ):
            if not checkpoint.chooses_tokens:
                raise ConfigError(
                    f"{source}: --quantization is for models that choose tokens, and this one has no head"
                )
            untied = replace(config, tie_word_embeddings=False)
            names, linear = decoder_tensors(untied), _linear_names(untied)
            embeddings, heads = ({tensor.name for (tensor,) in names[key]} for key in ("embedding", "lm_head"))
            tied_head = names["lm_head"][0][0].name
            for index, (source_tensor, tensor) in enumerate(checkpoint.tensors()):
                name = source_tensor.name
                if index % 100 == 0:
                    progress(f"quantizing weights to {kind}: tensor {index}")
                if name in heads:
                    writer.add(_stored(name, tensor, "int8", 0, pool))
                elif name in linear:
                    matrix = tensor.mT if source_tensor.transposed else tensor
                    writer.add(_stored(name, matrix, kind, group, pool))
                else:
                    writer.add({name: tensor})
                if name in embeddings and not checkpoint.has("lm_head"):
                    writer.add(_stored(tied_head, tensor, "int8", 0, pool))
    finally:
        torch.set_num_threads(threads)
    description = f"{kind} in groups of {group}" if group else f"{kind}, a scale for each output"
    row_codes = {"row_codes": "dynamic"} if kind == "int8-dynamic" else {}
    raw["quantization_config"] = {"quant_method": OWN_METHOD, "weights": description, **row_codes}
    (folder / "config.json").write_text(json.dumps(raw, indent=2), "utf-8")


def _linear_names(config: ModelConfig) -> set[str]:
    """Return all checkpoint names of the linear layers' matrices, without routers and other matrices that are never
    quantized (Role.EXACT_MATRIX)."""
    tables = {"embedding", "positions", "token_inputs.embedding", "token_inputs.projection"}
    exact = {
        f"layers.{index}.{tensor.name}"
        for index, operations in enumerate(layers_of(config))
        for tensor in tensors_of(operations)
        if tensor.role is not Role.MATRIX
    }
    return {
        tensor.name
        for key, checkpoint_names in decoder_tensors(config).items()
        for stacked in checkpoint_names
        for tensor in stacked
        if len(tensor.shape) > 1 and key not in exact | tables and not key.endswith(".bias")
    }


def _stored(
    name: str, weight: torch.Tensor, kind: str, group: int, pool: ThreadPoolExecutor
) -> dict[str, torch.Tensor]:
    """Return the tensors to store for a matrix [N, K], or for stacked experts [experts, N, K], quantized to ``kind``.
    Raises ConfigError for NaN and infinities."""
    if not bool(weight.isfinite().all()):
        raise ConfigError(f"{name} contains NaN or infinities")
    *lead, columns = weight.shape
    matrix = quantize_matrix(weight.reshape(-1, columns), kind, choose_group_size(columns, group), pool)
    return {part: tensor.view(*lead, -1) for part, tensor in stored_tensors(name, matrix).items()}
