"""Random LoRA adapters, as backends load them and as PEFT's files."""

from __future__ import annotations

import json
import pathlib

import torch
from safetensors.torch import save_file

from pillion.engine.adapters.adapter_files import modules
from pillion.engine.adapters.adapter_rows import adapter_shapes
from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank
from pillion.engine.models.model_config import ModelConfig


def random_adapter(
    config: ModelConfig,
    seed: int,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    *,
    leave: tuple[str, ...] = (),
    experts: bool = False,
) -> AdapterWeights:
    """Return an adapter of every projection, except in the layers ``leave``, that changes outputs by about 0.5.

    ``ranks`` apply in turn to the projections of a fused layer. ``experts``: also pairs for experts, their routers and
    the gates beside them.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, shape in adapter_shapes(config).items():
        if not experts and (shape.experts or shape.exact):
            continue
        inputs = shape.inputs
        each = (shape.experts,) if shape.experts else ()
        own_dtype = torch.float32 if shape.exact else dtype
        pairs, first = [], 0
        for number, end in enumerate(shape.ends):
            rank = ranks[number % len(ranks)]
            a = torch.randn(*each, rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(*each, end - first, rank, generator=generator) / (2 * rank**0.5)
            pairs.append(LowRank(first, a.to(own_dtype), b.to(own_dtype)))
            first = end
        if name not in leave:
            layers[name] = tuple(pairs)
    return AdapterWeights(f"{seed:064x}", max(ranks), layers)


def random_adapter_folder(config: ModelConfig, into: pathlib.Path, seed: int, rank: int) -> pathlib.Path:
    """Write a random bfloat16 adapter of every projection in PEFT's files and return the folder. It changes each
    output of a projection by about 0.5 for inputs of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    # Of a projection's several names in checkpoints, an adapter uses one.
    named = {projection: name for name, projection in reversed(modules(config).items()) if not projection.exact}
    for projection, name in named.items():
        a = torch.randn(rank, projection.inputs, generator=generator) / projection.inputs**0.5
        b = torch.randn(projection.outputs, rank, generator=generator) / (2 * rank**0.5)
        for half, matrix in (("A", a), ("B", b)):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = matrix.bfloat16()
    into.mkdir(parents=True)
    save_file(tensors, into / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (into / "adapter_config.json").write_text(json.dumps(about))
    return into
