"""A model's folder with matrices in few bits, in Pillion's own layout, beside one with the same matrices widened."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable

import torch
from safetensors.torch import load_file, save_file

from pillion.engine.checkpoints.formats.pillion_format import METHOD, stored_tensors
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix


def quantized(weight: torch.Tensor, coding: str, group: int) -> QuantizedMatrix:
    """Round a matrix [N, K] to "int4", "uint4" (with offsets) or "int8" codes, one scale for ``group`` inputs."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, min(group, inputs))
    if coding == "uint4":
        low, high = groups.amin(-1), groups.amax(-1)
        scales, offsets, least, most = (high - low) / 15 + 1e-6, low, 0, 15
    else:
        least, most = (-8, 7) if coding == "int4" else (-127, 127)
        scales, offsets = groups.abs().amax(-1) / most + 1e-6, None
    shifted = groups if offsets is None else groups - offsets[..., None]
    values = (shifted / scales[..., None]).round().clamp(least, most).view(outputs, inputs)
    codes = values.to(torch.int8).view(torch.uint8) if coding == "int8" else (values - CODINGS[coding][0]).byte()
    return QuantizedMatrix(coding, codes, scales, min(group, inputs), offsets)


def quantize_folder(
    folder: pathlib.Path, into: pathlib.Path, choose: Callable[[str], tuple[str, int] | None]
) -> pathlib.Path:
    """Write the model of ``folder`` to ``into`` in few bits, and the widened matrices back to ``folder``.

    ``choose`` returns coding and group of the matrix of a tensor's name, or None where it stays plain.
    """
    shutil.copytree(folder, into)
    plain, few = load_file(folder / "model.safetensors"), {}
    for name, tensor in plain.items():
        chosen = choose(name) if tensor.ndim == 2 else None
        if chosen is None:
            few[name] = tensor
        else:
            matrix = quantized(tensor, *chosen)
            few.update(stored_tensors(name, matrix))
            plain[name] = matrix.dequantize(torch.float32).to(tensor.dtype)
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    save_file(few, into / "model.safetensors", {"format": "pt"})
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": METHOD}}))
    return into
