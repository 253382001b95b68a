"""Draft models of a model: its own first layers, and a model whose upper layers add little by construction."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Ends of the names, in Llama-like checkpoints, of the matrices whose outputs a layer adds to its input.
ADDED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def first_layers(folder: pathlib.Path, into: pathlib.Path, layers: int) -> pathlib.Path:
    """Write a model of the first ``layers`` of that in ``folder``, with its tokenizer, and return ``into``."""
    config, tensors = _read(folder, into)
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < layers}
    config["num_hidden_layers"] = layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    _write(into, config, kept)
    return into


def with_quiet_layers(folder: pathlib.Path, into: pathlib.Path, loud: int, factor: float) -> pathlib.Path:
    """Write the model of ``folder`` with the outputs of all layers after the first ``loud`` scaled by ``factor``, so
    that most draft tokens of its first layers are accepted, and return ``into``."""
    config, tensors = _read(folder, into)
    for name, tensor in tensors.items():
        if _layer(name) >= loud and name.endswith(ADDED):
            tensors[name] = tensor * factor
    _write(into, config, tensors)
    return into


def _layer(name: str) -> int:
    """Return the number of a tensor's layer, -1 for none."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def _read(folder: pathlib.Path, into: pathlib.Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    into.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja") and not path.name.endswith(".index.json"):
            shutil.copy(path, into / path.name)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return json.loads((folder / "config.json").read_text()), tensors


def _write(into: pathlib.Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    (into / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(into / "model.safetensors"), {"format": "pt"})
