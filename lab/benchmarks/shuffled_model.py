"""The demo model with shuffled channels: the same function, with weights on no 4-bit grid.

The demo model's weights are de-quantized, so that groups of 32 of its columns have at most 16 values, and quantizing
them again would cost nothing. Any order of hidden channels, of an MLP's inner channels and of a head's values gives the
same function with other groups.
"""

from __future__ import annotations

import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file

from pillion.engine.models.config_parser import load_config


def save_shuffled_model(source: pathlib.Path, folder: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """Write the shuffled Llama of ``source``, a plain Hugging Face folder, to ``folder``, and return that."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    config = load_config(source)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(config.hidden_size, generator=generator)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight")):
            tensors[name] = tensor[hidden]
        else:
            tensors[name] = tensor[:, hidden]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        inner = torch.randperm(config.intermediate_size, generator=generator)
        for part in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{part}.weight"] = tensors[f"{prefix}mlp.{part}.weight"][inner]
        tensors[f"{prefix}mlp.down_proj.weight"] = tensors[f"{prefix}mlp.down_proj.weight"][:, inner]
        values = torch.stack([torch.randperm(config.head_dim, generator=generator) for _ in range(config.num_kv_heads)])
        starts = torch.arange(config.num_kv_heads)[:, None] * config.head_dim
        tensors[f"{prefix}self_attn.v_proj.weight"] = tensors[f"{prefix}self_attn.v_proj.weight"][
            (values + starts).flatten()
        ]
        # A KV head's values go to all query heads of its group.
        of_heads = values.repeat_interleave(config.num_heads // config.num_kv_heads, 0)
        columns = (of_heads + torch.arange(config.num_heads)[:, None] * config.head_dim).flatten()
        tensors[f"{prefix}self_attn.o_proj.weight"] = tensors[f"{prefix}self_attn.o_proj.weight"][:, columns]
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
