"""Weights of a prepared folder, as the decoder wants them. Reads safetensors only: no pickle, no code from a model.

Tensors that need no change are views of the mapped file, whose pages all workers of a machine share; fused, converted
and packed ones are this process's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.model_config import ModelConfig
from engine.model_files import weight_files
from kernels.torch_linear import Linear
from pillion.errors import ConfigError

FLOATS = ("F64", "F32", "F16", "BF16")

# Tensors that old checkpoints carry and nobody reads.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_LISTED_NAMES = 4  # Most tensors that an error names.


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. ``qkv`` stacks queries, keys, values in its output, ``gate_up`` stacks gate, up.

    ``qk_norm`` is [heads + kv_heads, head_dim]: the query norm's weight for query heads, the key norm's for key heads.
    """

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """``embedding`` is [vocab, hidden]; where the model ties them, ``lm_head`` is made of the same tensor."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of every tensor that the model needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Loads and fuses. Raises ConfigError for tensors that are missing, not expected, misshapen or not floats."""
    shapes = tensor_shapes(config)
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is not a safetensors file: {error}") from None
            handles.update(dict.fromkeys(handle.keys(), handle))
        _check(folder, shapes, handles, config)

        def take(name: str) -> torch.Tensor:
            tensor: torch.Tensor = handles[name].get_tensor(name)
            return tensor.to(dtype)

        return _assemble(config, take)


def _check(folder: Path, shapes: dict[str, tuple[int, ...]], handles: dict[str, Any], config: ModelConfig) -> None:
    missing = sorted(shapes.keys() - handles.keys())
    if missing:
        raise ConfigError(f"{folder} lacks {_names(missing)}, which a {config.family} model needs")
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    strange = [n for n in handles.keys() - shapes.keys() - tied if not n.endswith(_IGNORED_SUFFIXES)]
    if strange:
        raise ConfigError(f"{folder} holds {_names(sorted(strange))}, which a {config.family} model does not have")
    for name, shape in shapes.items():
        piece = handles[name].get_slice(name)
        if tuple(piece.get_shape()) != shape:
            raise ConfigError(f"{folder}: {name} is {piece.get_shape()}, config.json wants {list(shape)}")
        if piece.get_dtype() not in FLOATS:
            raise ConfigError(f"{folder}: {name} is {piece.get_dtype()}; only {', '.join(FLOATS)} are read")


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED_NAMES])
    return shown if len(names) <= _LISTED_NAMES else f"{shown} and {len(names) - _LISTED_NAMES} more tensors"


def _assemble(config: ModelConfig, take: Callable[[str], torch.Tensor]) -> ModelWeights:
    def fused(prefix: str, names: tuple[str, ...], bias: bool) -> Linear:
        def stacked(suffix: str) -> torch.Tensor:
            pieces = [take(f"{prefix}{name}.{suffix}") for name in names]
            return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

        return Linear(stacked("weight"), stacked("bias") if bias else None)

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        qk_norm = None
        if config.qk_norm:
            of_queries = take(prefix + "self_attn.q_norm.weight").expand(config.num_heads, -1)
            of_keys = take(prefix + "self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
            qk_norm = torch.cat((of_queries, of_keys))
        return LayerWeights(
            input_norm=take(prefix + "input_layernorm.weight"),
            qkv=fused(prefix, qkv, config.qkv_bias),
            qk_norm=qk_norm,
            o=fused(prefix, ("self_attn.o_proj",), config.o_bias),
            mlp_norm=take(prefix + "post_attention_layernorm.weight"),
            gate_up=fused(prefix, gate_up, config.mlp_bias),
            down=fused(prefix, ("mlp.down_proj",), config.mlp_bias),
        )

    embedding = take("model.embed_tokens.weight")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=take("model.norm.weight"),
        lm_head=Linear(embedding if config.tie_word_embeddings else take("lm_head.weight")),
    )
