"""Conversion of GGUF files to Hugging Face folders.

gguf_reader.py            metadata and tensors of the files
gguf_architectures.py     metadata and tensor names -> config.json and the tensor names of a folder
gguf_tokenizer.py         metadata -> tokenizer.json, tokenizer_config.json, chat templates
gguf_blocks.py            blocks of quantized types -> quantized matrices

Matrices of the types in :mod:`pillion.engine.quantized.gguf_blocks` stay quantized, in the layout of
:mod:`pillion.engine.quantized.formats.pillion_format`. Torch is imported in functions only, so that a converted model
starts quickly.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pillion.engine.checkpoints.model_files import Progress, first_line
from pillion.engine.checkpoints.work_report import WorkReport
from pillion.engine.models.config_parser import parse_config
from pillion.errors import ConfigError
from pillion.types import SAMPLING_OPTIONS

if TYPE_CHECKING:
    from pillion.engine.quantized.gguf_architectures import FolderTensor
    from pillion.engine.quantized.gguf_reader import GgufModel


def convert_gguf(parts: Sequence[Path], folder: Path, dtype: str, progress: Progress) -> None:
    """Fill ``folder`` with config, tokenizer and weights of the model in the GGUF files ``parts``. Matrices of
    supported quantized types keep their codes; other tensors are stored in ``dtype`` ("bfloat16" or "float32"). Raises
    ConfigError for damaged files and for an unsupported architecture or tokenizer."""
    from pillion.engine.quantized.gguf_architectures import read_config
    from pillion.engine.quantized.gguf_reader import read_gguf
    from pillion.engine.quantized.gguf_tokenizer import read_tokenizer

    with _naming_file(parts[0]):
        model = read_gguf(parts)
        config = read_config(model)
        tokenizer = read_tokenizer(model.metadata)
        config |= _token_ids(model.metadata)
        parse_config(config)
    kinds = _convert_weights(parts[0], model, config, folder, dtype, progress)
    if kinds:
        config["quantization_config"] = {"quant_method": "pillion", "weights": ", ".join(kinds)}
    sampling = recommended_sampling(model.metadata)
    _write(folder / "tokenizer.json", tokenizer.codec)
    _write(folder / "tokenizer_config.json", tokenizer.config)
    for path, template in tokenizer.templates.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(template, "utf-8")
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": tokenizer.end_ids, **sampling})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of BOS, EOS and padding in the metadata, by their keys in config.json."""
    names = {"bos_token_id": ("bos",), "pad_token_id": ("padding",), "eos_token_id": ("eos", "eot")}
    ids_by_name = {
        name: [value for key in keys if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None]
        for name, keys in names.items()
    }
    return {name: sorted(set(ids)) if name == "eos_token_id" else ids[0] for name, ids in ids_by_name.items() if ids}


@contextlib.contextmanager
def _naming_file(source: Path) -> Iterator[None]:
    """Convert parser exceptions to a ConfigError that names the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}") from None
    except Exception as error:  # noqa: BLE001  (numpy, struct and the gguf package raise errors of many kinds)
        raise ConfigError(
            f"{source} cannot be read as GGUF; it may be damaged or truncated: {first_line(error)}"
        ) from None


def quantized_types(parts: Sequence[Path]) -> str:
    """Return the types of a model's quantized tensors, joined, or "". Raises ConfigError for damaged files."""
    from pillion.engine.quantized.gguf_reader import read_gguf

    with _naming_file(parts[0]):
        return ", ".join(read_gguf(parts).quantized_types)


def _convert_weights(
    source: Path, model: GgufModel, config: Mapping[str, Any], folder: Path, dtype: str, progress: Progress
) -> list[str]:
    """Write the weights to ``folder`` and return the GGUF types of matrices that stay quantized."""
    converted = WorkReport(progress, "converting weights", sum(tensor.data.nbytes for tensor in model.tensors))
    import torch

    from pillion.engine.quantized.formats.pillion_format import stored_tensors
    from pillion.engine.quantized.gguf_blocks import BLOCK_LAYOUTS
    from pillion.engine.quantized.shards import write_shards

    kind_counts = Counter(tensor.kind for tensor in model.tensors)
    for kind in sorted({*model.quantized_types} - BLOCK_LAYOUTS.keys()):
        progress(f"widening {kind_counts[kind]} tensors of the type {kind} to {dtype}")
    with write_shards(folder) as writer:
        for name, matrix in _matrices(source, model, config, converted):
            if isinstance(matrix, torch.Tensor):
                writer.add({name: matrix.to(getattr(torch, dtype)).contiguous()})
            elif isinstance(matrix, list):
                stored = [stored_tensors(name, part) for part in matrix]
                writer.add({key: torch.stack([part[key] for part in stored]) for key in stored[0]})
            else:
                writer.add(stored_tensors(name, matrix))
    return sorted({*model.quantized_types} & BLOCK_LAYOUTS.keys())


def _matrices(
    source: Path, model: GgufModel, config: Mapping[str, Any], converted: WorkReport
) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each tensor of the converted model: a torch tensor, a QuantizedMatrix, or a list of
    one QuantizedMatrix per expert."""
    import numpy as np
    import torch

    from pillion.engine.quantized.gguf_architectures import folder_tensors

    with _naming_file(source):
        for tensor in folder_tensors(model, config):
            converted.add(sum(part.data.nbytes for part in tensor.parts))
            matrices = _quantized(tensor)
            yield tensor.name, torch.from_numpy(np.copy(tensor.numbers())) if matrices is None else matrices


def _quantized(tensor: FolderTensor) -> Any:
    """Return a tensor as a QuantizedMatrix, or as a list of one per expert; None if it cannot stay quantized."""
    import numpy as np
    import torch

    from pillion.engine.quantized.gguf_blocks import BLOCK_LAYOUTS, read_blocks, reorder_inputs
    from pillion.kernels.torch.quantized_matrix import QuantizedMatrix, stack_rows

    first, kinds = tensor.parts[0], {part.kind for part in tensor.parts}
    is_matrix = first.data.ndim > 1 and not first.name.endswith("bias") and tensor.change is None
    if not is_matrix or len(kinds) > 1 or not kinds <= BLOCK_LAYOUTS.keys():
        return None
    layout, stacked, matrices = BLOCK_LAYOUTS[first.kind], first.data.ndim == 3, []
    for expert in range(len(first.data) if stacked else 1):
        expert_parts = [part.data[expert] if stacked else part.data for part in tensor.parts]
        matrix = stack_rows(
            [read_blocks(layout, torch.from_numpy(np.copy(data))) for data in expert_parts], torch.float32
        )
        assert isinstance(matrix, QuantizedMatrix)
        for numbers in (matrix.scales, matrix.offsets):
            if numbers is not None and not bool(numbers.isfinite().all()):
                raise ConfigError(f"{first.name} contains NaN or infinite scales")
        if tensor.rows is not None:
            matrix = matrix.rows(torch.from_numpy(tensor.rows))
        reordered = matrix if tensor.columns is None else reorder_inputs(matrix, torch.from_numpy(tensor.columns))
        if reordered is None:
            return None
        matrices.append(reordered)
    return matrices if stacked else matrices[0]


def recommended_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recommended sampling values in metadata, by their keys in generation_config.json."""
    sampling: dict[str, Any] = {}
    for option in SAMPLING_OPTIONS.values():
        value = metadata.get(f"general.sampling.{option.gguf}") if option.gguf else None
        if value is not None:
            # Values are float32; the shortest decimal with the same bits is what the author wrote.
            sampling[option.recommended_as] = float(f"{value:.7g}") if isinstance(value, float) else value
    return sampling
