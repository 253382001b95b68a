"""Small random adapters, created, saved and run by PEFT."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pillion.engine.models.model_config import ModelConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(
    model_folder: pathlib.Path, into: pathlib.Path, *, seed: int = 0, strength: float = 0.5, **config: Any
) -> pathlib.Path:
    """Write an adapter with random matrices for a model, with an effect of the order of ``strength``; ``config`` are
    options of PEFT's LoraConfig. Return the folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with _quiet_patterns():
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{"target_modules": "all-linear"} | config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape) * strength / parameter.shape[1] ** 0.5)
    adapted.save_pretrained(into)
    return into


def adapted_model(model_folder: pathlib.Path, adapter: pathlib.Path) -> Any:
    """Return transformers' model with PEFT's adapter, in float32."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with _quiet_patterns():
        return PeftModel.from_pretrained(base, adapter).eval()


@contextmanager
def _quiet_patterns() -> Iterator[None]:
    """Suppress a warning of PEFT, which claims to ignore a pattern that it applies."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*did not match any targeted module", RuntimeWarning)
        yield


def write_adapter(model: ModelConfig, into: pathlib.Path, *, rank: int = 4, seed: int = 0) -> pathlib.Path:
    """Write a random query-projection adapter in PEFT's format, without loading the model; return the folder."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (rank, model.hidden_size), "B": (model.num_heads * model.head_dim, rank)}
    into.mkdir(parents=True)
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": torch.randn(
                shape, generator=generator
            )
            / shape[1] ** 0.5
            for layer in range(model.num_layers)
            for half, shape in shapes.items()
        },
        into / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (into / "adapter_config.json").write_text(json.dumps(config))
    return into


def edit_config(adapter: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Change keys of an adapter's config. Return the folder."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return adapter


def edit_tensors(adapter: pathlib.Path, change: Any) -> pathlib.Path:
    """Replace an adapter's tensors by ``change`` of them. Return the folder."""
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor.clone().contiguous() for name, tensor in change(load_file(path)).items()}, path)
    return adapter
