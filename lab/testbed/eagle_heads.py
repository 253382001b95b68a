"""EAGLE-3 heads with random weights, in the format of ``speculators`` or the original one."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file

# Keys of a model's config that the config of a head's layer shares.
OF_LAYER = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings", "rope_theta"),
)


def head_config(
    main: dict[str, Any],
    model_type: str,
    draft_vocab_size: int,
    aux_hidden_state_layers: tuple[int, ...] | None,
    before: bool,
) -> dict[str, Any]:
    """Return the config.json of a head for a model with the config ``main``, as ``speculators`` writes it."""
    layer = {key: main[key] for key in OF_LAYER if key in main} | {"model_type": model_type, "num_hidden_layers": 1}
    layer.setdefault("head_dim", main["hidden_size"] // main["num_attention_heads"])
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab_size,
        "norm_before_residual": before,
        "eagle_aux_hidden_state_layer_ids": None if aux_hidden_state_layers is None else list(aux_hidden_state_layers),
        "target_hidden_size": None,
        "embed_requires_grad": False,
    }


def original_config(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a head's config from ``speculators`` to the original EAGLE-3 layout."""
    kept = {key: config[key] for key in ("draft_vocab_size", "norm_before_residual")}
    named = config["eagle_aux_hidden_state_layer_ids"]
    options = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": named, "use_aux_hidden_state": True}}
    return {**config["transformer_layer_config"], **kept, **(options if named else {})}


def head_tensors(
    config: dict[str, Any], seed: int, states: int = 3, embedding: bool = False
) -> dict[str, torch.Tensor]:
    """Return random weights of a head, with the names of ``speculators``."""
    layer, draft = config["transformer_layer_config"], config["draft_vocab_size"]
    hidden, inner, vocab = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    queries = layer["num_attention_heads"] * layer["head_dim"]
    keys = layer["num_key_value_heads"] * layer["head_dim"]
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) / math.sqrt(columns)

    def norm(width: int) -> torch.Tensor:
        return torch.ones(width) + 0.2 * torch.randn(width, generator=draw)

    ids = torch.randperm(vocab, generator=draw)[:draft].sort().values
    tensors = {
        "fc.weight": matrix(hidden, states * hidden),
        **{
            f"layers.0.self_attn.{name}_proj.weight": matrix(queries if name == "q" else keys, 2 * hidden)
            for name in "qkv"
        },
        "layers.0.self_attn.o_proj.weight": matrix(hidden, queries),
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner),
        **{
            f"layers.0.{name}.weight": norm(hidden)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(draft, hidden),
        "d2t": ids - torch.arange(draft),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, value=True),
    }
    if layer["model_type"] == "qwen3":
        tensors |= {f"layers.0.self_attn.{name}_norm.weight": norm(layer["head_dim"]) for name in "qk"}
    if embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden)
    return tensors


def save_head(
    folder: pathlib.Path,
    main: pathlib.Path,
    *,
    model_type: str = "llama",
    draft_vocab_size: int = 200,
    aux_hidden_state_layers: tuple[int, ...] | None = None,
    norm_before_residual: bool = False,
    original: bool = False,
    embedding: bool = False,
    seed: int = 0,
) -> pathlib.Path:
    """Write a head for the model in ``main`` and return ``folder``."""
    config = head_config(
        json.loads((main / "config.json").read_text()),
        model_type,
        draft_vocab_size,
        aux_hidden_state_layers,
        norm_before_residual,
    )
    tensors = head_tensors(config, seed, len(aux_hidden_state_layers or "abc"), embedding)
    if original:
        config = original_config(config)
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    write_head(folder, config, tensors)
    return folder


def write_head(folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))
