"""Loader of an encoder's tensors from safetensors files, checked against its config."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pillion.engine.checkpoints.checkpoint import format_names, open_files
from pillion.engine.models.encoder_config import EncoderConfig
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

# Family -> prefix of tensor names in files, which may be absent.
_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "modernbert": "model."}
# Tensors to skip: position counters, heads for other tasks, and the pooler, which only BERT's classifiers use.
_UNREAD = re.compile(r"(.*\.)?(position_ids|token_type_ids)|(cls|lm_head|decoder)\..*|pooler\..*")


def read_tensors(folder: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of an encoder by their names in files, without the prefix. Raises ConfigError, with file and
    tensor, for tensors that are missing, unknown, of a wrong shape, or not finite."""
    encoder, prefix = config.encoder, _PREFIXES[config.family]
    assert encoder is not None
    shapes = (_rotary if encoder.rotary else _learned)(config, encoder) | _head(config, encoder)
    tensors: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    with open_files(folder) as files:
        for file_name, tensor in files.items():
            name = file_name.removeprefix(prefix)
            for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
                name = name.replace(old, new)
            if name in shapes:
                tensor.check(shapes[name])
                tensors[name] = tensor.numbers(dtype)
            elif not _UNREAD.fullmatch(name) and not (name.startswith("head.") and not config.labels):
                unknown.append(f"{tensor.path.name}: {file_name}")
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise ConfigError(f"{folder} lacks {format_names(missing)}, which a {config.family} model needs")
    if unknown:
        raise ConfigError(
            f"{folder} holds {format_names(sorted(unknown))}, which a {config.family} model does not have"
        )
    return tensors


def _weights(name: str, *shape: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weight of a linear layer or norm, and of its bias if it has one, by name."""
    return {f"{name}.weight": shape, **({f"{name}.bias": shape[:1]} if bias else {})}


def _learned(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of an encoder with learned positions."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = {"word": config.vocab_size, "position": encoder.num_positions, "token_type": encoder.num_token_types}
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (rows, hidden) for name, rows in tables.items()
    }
    shapes |= _weights("embeddings.LayerNorm", hidden)
    for layer in range(encoder.num_layers):
        prefix = f"encoder.layer.{layer}."
        for name in ("query", "key", "value"):
            shapes |= _weights(f"{prefix}attention.self.{name}", hidden, hidden)
        shapes |= _weights(f"{prefix}attention.output.dense", hidden, hidden)
        shapes |= _weights(f"{prefix}attention.output.LayerNorm", hidden)
        shapes |= _weights(f"{prefix}intermediate.dense", inner, hidden)
        shapes |= _weights(f"{prefix}output.dense", hidden, inner)
        shapes |= _weights(f"{prefix}output.LayerNorm", hidden)
    return shapes


def _rotary(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of an encoder with rotary embeddings."""
    hidden, inner, norm_bias = config.hidden_size, config.intermediate_size, encoder.norm_bias
    shapes: dict[str, tuple[int, ...]] = {"embeddings.tok_embeddings.weight": (config.vocab_size, hidden)}
    shapes |= _weights("embeddings.norm", hidden, bias=norm_bias)
    for layer in range(encoder.num_layers):
        prefix = f"layers.{layer}."
        shapes |= _weights(f"{prefix}attn_norm", hidden, bias=norm_bias) if layer else {}
        shapes |= _weights(f"{prefix}attn.Wqkv", 3 * hidden, hidden, bias=encoder.attention_bias)
        shapes |= _weights(f"{prefix}attn.Wo", hidden, hidden, bias=encoder.attention_bias)
        shapes |= _weights(f"{prefix}mlp_norm", hidden, bias=norm_bias)
        shapes |= _weights(f"{prefix}mlp.Wi", 2 * inner, hidden, bias=encoder.mlp_bias)
        shapes |= _weights(f"{prefix}mlp.Wo", hidden, inner, bias=encoder.mlp_bias)
    return shapes | _weights("final_norm", hidden, bias=norm_bias)


def _head(config: ModelConfig, encoder: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a classifier's head; {} for other encoders."""
    hidden, labels = config.hidden_size, config.labels
    match encoder.head:
        case "pooler":
            return _weights("pooler.dense", hidden, hidden) | _weights("classifier", labels, hidden)
        case "dense":
            dense = _weights("classifier.dense", hidden, hidden)
            return dense | _weights("classifier.out_proj", labels, hidden)
        case "normed":
            dense = _weights("head.dense", hidden, hidden, bias=encoder.head_bias)
            normed = _weights("head.norm", hidden, bias=encoder.norm_bias)
            return dense | normed | _weights("classifier", labels, hidden)
    return {}
